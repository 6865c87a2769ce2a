"""What tracing adds: the table, and that every way of it makes its calls."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.tracing import table

ROOT = Path(__file__).parents[2]


def test_what_is_added_is_beside_the_measure() -> None:
    lines = table({"off": ("none", 40.0), "flat": ("one span", 110.0), "aiohttp": ("another", 140.0)}).splitlines()
    assert lines[2:] == [
        "| off | none | 40 |  |  |",
        "| flat | one span | 110 | +70 | 0.50 |",
        "| aiohttp | another | 140 |  |  |",
    ]


def test_without_the_measure_there_is_no_share() -> None:
    assert (
        table({"off": ("none", 40.0), "flat": ("one span", 110.0)}).splitlines()[-1]
        == "| flat | one span | 110 | +70 |  |"
    )


def test_every_way_makes_its_calls() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "tracing.py"), "--rounds", "1", "--calls", "64"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    names = [line.split(" | ")[0].strip("| ") for line in done.stdout.splitlines()]
    assert names[2:9] == ["off", "no SDK", "metrics only", "unsampled", "flat", "auto", "full"]
