"""Runs langchain-tests' suites in a process of their own, with their own settings and pytest plugins."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree as ET

HERE = Path(__file__).parent / "standard"


class Outcome:
    """What became of a suite: tests by outcome, and which were skipped."""

    def __init__(self, report: Path) -> None:
        self.counts: Counter[str] = Counter()
        self.skipped: set[str] = set()
        for case in ET.parse(report).iter("testcase"):
            kinds = [kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None]
            self.counts[kinds[0] if kinds else "passed"] += 1
            if kinds == ["skipped"]:
                self.skipped.add(case.attrib["name"])


def run_suite(
    name: str, folder: Path, *, python: str, timeout_s: float = 150, part: str = "sse"
) -> tuple[Outcome, str]:
    """The outcome of ``standard/suite_<name>.py``, and what pytest wrote. ``part``: over which of our wires."""
    report = folder / f"{name}.xml"
    done = subprocess.run(
        [
            python, "-m", "pytest", "-q", "-c", str(HERE / "pytest.ini"), "--rootdir", str(HERE),
            "-p", "no:cacheprovider", "-p", "no:langsmith_plugin", f"--junitxml={report}", str(HERE / f"suite_{name}.py"),
        ],
        capture_output=True, text=True, timeout=timeout_s, check=False, cwd=folder,
        env={
            **{key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "SPANWIRE_", "LANG", "LC_"))},
            "STANDARD_PART": part,
        },
    )  # fmt: skip
    output = done.stdout + done.stderr
    assert report.exists(), output
    return Outcome(report), output
