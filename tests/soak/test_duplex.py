"""A minute of voice in both directions: no frame lost, none late by more than one, memory flat."""

from __future__ import annotations

import asyncio
import sys

import pytest

from benchmarks import duplex

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="looks into /proc, and compares clocks of two processes"
)

#: The allocator's arenas, and what was imported late.
TOLERANCE_KIB = 2048


@pytest.mark.soak
@pytest.mark.timeout(180)
def test_a_minute_of_voice_both_ways(capsys: pytest.CaptureFixture[str]) -> None:
    with duplex.serving() as url, duplex.first_in_line():
        figures = asyncio.run(duplex.play(url, 60))
    with capsys.disabled():
        print(f"\n{duplex.table(figures)}")
    for way in (figures.up, figures.down):
        assert (way.frames, way.lost, way.reordered, way.damaged) == (3000, 0, 0, 0)
        assert way.most_ms <= duplex.FRAME_MS
    assert figures.turns == ["completed"]
    assert figures.rss_kib[-1] - figures.rss_kib[len(figures.rss_kib) // 10] <= TOLERANCE_KIB
