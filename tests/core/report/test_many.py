"""A hundred thousand calls: within some seconds, a few hundred megabytes, and a page that a browser opens at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.core.report import traffic
from tests.core.report.browser import BROWSER, Browser

#: Different calls, repeated with other times: making each anew would take longer than reading it.
KINDS, CALLS = 5_000, 100_000
MEGABYTES, KILOBYTES = 300, 2_000

#: In a process of its own, and by its address space's own mark: ``ru_maxrss`` outlives exec, and has the test runner in it.
WORK = """
import pathlib, re, sys
from spanwire.report import build
report = build([sys.argv[1]])
pathlib.Path(sys.argv[2]).write_text(report.to_html(), encoding="utf-8")
peak = re.search(r"VmHWM:\\s+(\\d+) kB", pathlib.Path("/proc/self/status").read_text())
print(report.summary.all.calls, int(peak[1]) // 1024)
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_a_hundred_thousand_calls(tmp_path: Path) -> None:
    timelines = list(traffic.timelines(KINDS))
    log = tmp_path / "calls.jsonl"
    with log.open("wb") as file:
        for again in range(CALLS // KINDS):
            for timeline in timelines:
                timeline["started_unix_s"] += 1.0 + again
            file.write(b"".join(msgspec.json.encode(timeline) + b"\n" for timeline in timelines))
    page = tmp_path / "report.html"
    done = subprocess.run(
        [sys.executable, "-c", WORK, str(log), str(page)], capture_output=True, text=True, timeout=50, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    calls, megabytes = map(int, done.stdout.split())
    assert calls == CALLS
    assert megabytes < MEGABYTES
    assert page.stat().st_size < KILOBYTES * 1024
    if BROWSER is not None:
        with Browser(tmp_path) as browser:
            browser.open(page)
            assert browser.run("document.documentElement.dataset.ready") == "true"
            assert browser.complaints == []
