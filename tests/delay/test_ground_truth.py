"""Segments against the truth: the network's round trip and the server's delays are known, and come back."""

from __future__ import annotations

from statistics import median
from typing import Any

from tests.delay.measure import RTT_MS, TOLERANCE_MS, measure, part_ms, segment_ms, total_ms
from tests.delay.scenarios import GAP_S, PREFILL_S, QUEUE_S, TOKENS


def near(value_ms: float, truth_ms: float, tolerance_ms: float = TOLERANCE_MS) -> bool:
    return abs(value_ms - truth_ms) <= tolerance_ms


def test_segments_of_a_stream() -> None:
    def judge(figures: dict[str, Any]) -> None:
        cold, *warm = figures["timelines"]
        # The server's queue counts as prefill, since it does not report it. What its timers add is its own time too.
        server_ms = median(figures["server_ms"][1:])
        decode_ms = (TOKENS - 1) * GAP_S * 1000
        assert server_ms >= (QUEUE_S + PREFILL_S) * 1000 - 0.1
        assert near(part_ms(warm, "network", "to_and_back"), RTT_MS)
        assert near(part_ms(warm, "model", "prefill"), server_ms)
        assert near(part_ms(warm, "model", "decode"), decode_ms)
        assert near(total_ms(warm), RTT_MS + server_ms + decode_ms)
        assert segment_ms(warm, "unattributed") < TOLERANCE_MS
        assert segment_ms(warm, "client") < TOLERANCE_MS
        assert all("handshake" not in timeline["segments"] for timeline in warm)
        # One sample each. TLS makes a key exchange and checks a certificate, at both ends.
        assert near(part_ms([cold], "handshake", "tcp"), RTT_MS, 5)
        assert RTT_MS - 1 < part_ms([cold], "handshake", "tls") < RTT_MS + 15
        assert near(part_ms([cold], "network", "to_and_back"), RTT_MS)

    measure("segments", judge)


def test_segments_of_an_answer_that_is_not_streamed() -> None:
    def judge(figures: dict[str, Any]) -> None:
        _, *warm = figures["timelines"]
        server_ms = median(figures["server_ms"][1:])
        assert near(part_ms(warm, "network", "to_and_back"), RTT_MS)
        assert near(segment_ms(warm, "model"), server_ms)
        assert near(total_ms(warm), RTT_MS + server_ms)
        assert segment_ms(warm, "unattributed") < TOLERANCE_MS

    measure("whole_answers", judge)


def test_a_large_prompt_is_sent_and_not_prefilled() -> None:
    def judge(figures: dict[str, Any]) -> None:
        timeline = figures["timeline"]
        before_ms = segment_ms([timeline], "handshake") + part_ms([timeline], "client", "encode")
        upload_ms = figures["arrived_ms"] - before_ms - RTT_MS / 2
        assert upload_ms > 3 * RTT_MS  # slow start
        # One sample, and the server is slower to take 2 MB in than the wire: measured, 12 to 18 ms, 30 to 38 on a slower
        # machine. What the kernel still has when all was written is the backlog. To the packet: test_truth_client.py.
        sent_ms = part_ms([timeline], "network", "send") + part_ms([timeline], "network", "backlog")
        assert near(sent_ms, upload_ms, 50)
        assert near(part_ms([timeline], "model", "prefill"), figures["server_ms"], 15)
        assert near(part_ms([timeline], "network", "to_and_back"), RTT_MS)

    measure("large_prompt", judge)
