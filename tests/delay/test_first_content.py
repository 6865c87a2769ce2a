"""What a re-used connection saves: a warm call's first content is one round trip away, and nothing more."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest

from tests.delay.measure import RTT_MS, measure

#: The first content of a warm call, in ms: a round trip, and what server and client do. Measured: 41.3.
WARM_MS = 44.0
#: A cold one pays a round trip for TCP, one for TLS 1.3 and one for the call. Measured: 125 to 129.
COLD_MS = 3 * RTT_MS


@pytest.mark.parametrize("manager", ["async", "sync"])
def test_the_first_call_pays_for_the_handshake_and_later_ones_do_not(manager: str) -> None:
    def judge(figures: dict[str, Any]) -> None:
        first, *later = figures["first_ms"]
        assert figures["connections"] == 1
        assert COLD_MS - 2 < first < COLD_MS + 15
        assert RTT_MS - 1 < median(later) <= WARM_MS, later

    measure(f"firsts_{manager}_cold", judge)


@pytest.mark.parametrize("manager", ["async", "sync"])
def test_after_warm_the_first_call_is_as_fast_as_any(manager: str) -> None:
    def judge(figures: dict[str, Any]) -> None:
        first, *later = figures["first_ms"]
        assert figures["connections"] == 1
        assert first <= WARM_MS + 3  # one sample, and not a median
        assert RTT_MS - 1 < median(later) <= WARM_MS, later

    measure(f"firsts_{manager}_warm", judge)
