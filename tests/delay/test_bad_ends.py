"""What leaving a stream and losing a connection cost, in round trips."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest

from tests.delay.measure import RTT_MS, TOLERANCE_MS, measure, part_ms, total_ms


def test_the_server_knows_of_an_abandoned_stream_one_way_later() -> None:
    def judge(figures: dict[str, Any]) -> None:
        assert RTT_MS / 2 - 1 < median(figures["noticed_ms"]) < RTT_MS / 2 + 5
        assert max(figures["noticed_ms"]) < RTT_MS + 20

    measure("abandoned", judge)


@pytest.mark.parametrize(("scenario", "handshake"), [("stale_plain", ["tcp"]), ("stale_tls", ["tcp", "tls"])])
def test_a_stale_connection_costs_one_connect_more(scenario: str, handshake: list[str]) -> None:
    def judge(timelines: list[dict[str, Any]]) -> None:
        for timeline in timelines:
            stale, fresh = timeline["attempts"]
            assert (stale["outcome"], stale["error_type"]) == ("error", "ConnectionFailed")
            assert stale["connection"]["reused"]
            assert "handshake" not in stale["segments"]
            assert fresh["outcome"] == timeline["outcome"] == "completed"
            assert not fresh["connection"]["reused"]
            assert list(fresh["segments"]["handshake"]["parts"]) == handshake
        # The call was sent before the news of the close came, which takes half a round trip.
        stale_ms = median(timeline["attempts"][0]["total_s"] * 1000 for timeline in timelines)
        assert RTT_MS / 2 - 5 < stale_ms < RTT_MS / 2 + TOLERANCE_MS
        for part in handshake:
            assert RTT_MS - 1 < part_ms(timelines, "handshake", part) < RTT_MS + 8
        round_trips = len(handshake) + 1
        assert total_ms(timelines) < stale_ms + round_trips * RTT_MS + 10

    measure(scenario, judge)
