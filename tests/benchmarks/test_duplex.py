"""Two seconds of voice in both directions: nothing is lost, and the table says so. No times: machines differ."""

from __future__ import annotations

import asyncio

from benchmarks.duplex import FRAME_BYTES, Ear, Figures, Way, frame, play, serving, table


def test_two_seconds_both_ways() -> None:
    with serving() as url:
        figures = asyncio.run(play(url, 2))
    for way in (figures.up, figures.down):
        assert (way.frames, way.lost, way.reordered, way.damaged) == (100, 0, 0, 0)
    assert figures.turns == ["completed"]
    assert "| up | 100 | 0 | 0 | 0 |" in table(figures)


def test_an_ear_hears_what_is_wrong() -> None:
    ear = Ear()
    for number in (0, 1, 4, 3):
        ear.hear(frame(number))
    ear.hear(frame(5)[:-1] + b"x")
    assert ear.told(8)[:4] == (5, 4, 1, 1)  # 2 and 3 when 4 came, and the last two
    assert len(frame(7)) == FRAME_BYTES


def test_the_table() -> None:
    way = Way(3000, 0, 0, 0, 0.4, 1.25, 6.0)
    lines = table(Figures(way, way, [100, 100, 150], 250.4, ["completed"])).splitlines()
    assert lines[2] == "| up | 3000 | 0 | 0 | 0 | 0.40 | 1.25 | 6.00 |"
    assert lines[-1] == "The client took 250 us for a frame each way, and its memory grew by 50 KiB."
