"""What a re-used connection saves: a warm call's first content is one round trip away, and nothing more."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest

from tests.delay.measure import RTT_MS, measure, part_ms

#: The first content of a warm call, in ms: a round trip, and what server and client do. Measured: 41.3.
WARM_MS = 44.0
#: What a cold call may take beside its handshake and a round trip, in ms: half a round trip, so that one more would show.
#: Measured: 2 to 5, and 7 to 14 on a slower machine, where both ends share a process and two processors with the network.
COLD_MS = 20.0


@pytest.mark.parametrize("manager", ["async", "sync"])
def test_the_first_call_pays_for_the_handshake_and_later_ones_do_not(manager: str) -> None:
    def judge(figures: dict[str, Any]) -> None:
        first, *later = figures["first_ms"]
        assert figures["connections"] == 1
        cold = figures["timelines"][:1]
        tcp_ms, tls_ms = (part_ms(cold, "handshake", part) for part in ("tcp", "tls"))
        assert RTT_MS - 1 < tcp_ms < RTT_MS + 5
        assert RTT_MS - 1 < tls_ms < RTT_MS + 15  # TLS 1.3: one round trip, and what the key exchange costs both ends
        assert 3 * RTT_MS - 2 < first < tcp_ms + tls_ms + RTT_MS + COLD_MS
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
