from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spanwire.cli.stats import Outcome, percentile, report, summarize
from spanwire.timeline import AttemptRecord, CallRecord, ConnectionUse, Timeline

MS = 1_000_000
seconds = st.lists(st.floats(0, 1e6, allow_nan=False), min_size=1, max_size=250)


@given(values=seconds, percent=st.integers(1, 100))
def test_a_percentile_is_the_smallest_value_that_so_many_do_not_exceed(values: list[float], percent: int) -> None:
    found = percentile(sorted(values), percent)
    assert found in values
    assert 100 * sum(value <= found for value in values) >= percent * len(values)
    assert 100 * sum(value < found for value in values) < percent * len(values)


@pytest.mark.parametrize(("percent", "expected"), [(1, 1), (5, 1), (30, 2), (40, 2), (50, 3), (95, 5), (100, 5)])
def test_percentiles_of_five_values(percent: int, expected: int) -> None:
    assert percentile([1, 2, 3, 4, 5], percent) == expected


@given(seconds)
def test_a_summary_is_in_order_whatever_the_order_of_its_values(values: list[float]) -> None:
    found = summarize(values)
    assert found == summarize(reversed(values))
    known = [found.min_s, found.p50_s, found.p95_s, found.p99_s, found.max_s]
    present = [value for value in known if value is not None]
    assert present == sorted(present)
    assert (found.n, found.min_s, found.max_s) == (len(values), min(values), max(values))
    assert found.min_s <= found.mean_s <= found.max_s


@given(seconds)
def test_high_percentiles_exist_only_where_they_are_not_the_maximum_by_definition(values: list[float]) -> None:
    found = summarize(values)
    assert (found.p95_s is None) == (len(values) < 20)
    assert (found.p99_s is None) == (len(values) < 100)
    assert {"p95_s", "p99_s"} & found.to_dict().keys() == {
        name for name, least in (("p95_s", 20), ("p99_s", 100)) if len(values) >= least
    }


def test_p95_of_20_and_p99_of_100_values_leave_one_out() -> None:
    assert summarize(range(1, 21)).p95_s == 19
    assert summarize(range(1, 101)).p99_s == 99


def timeline(
    *, reused: bool | None, tcp_ms: int = 0, send_ms: int = 1, prefill_ms: int = 10, decode_ms: int = 0, rtt_ms: int = 2
) -> Timeline:
    """A streamed call as a manager would have recorded it; ``reused=None``: it had no connection."""
    record = CallRecord(1000, operation="chat", model="m", endpoint="h:1", transport="sse")
    attempt = AttemptRecord(1000, streamed=True)
    record.attempts.append(attempt)
    now_ns = attempt.asked_ns = 1000
    marks = attempt.marks
    if tcp_ms:
        from spanwire.timeline import Marks

        attempt.served = "dialled"
        attempt.connect = Marks()
        attempt.connect.parts.append(("tcp", now_ns, now_ns + tcp_ms * MS))
        now_ns += tcp_ms * MS
    attempt.leased_ns = now_ns
    marks.parts.append(("send", now_ns, now_ns + send_ms * MS))
    now_ns += send_ms * MS
    marks.sent_ns = now_ns
    marks.rtt_ns = rtt_ms * MS
    now_ns += (rtt_ms + prefill_ms) * MS
    marks.first_byte_ns = marks.first_chunk_ns = marks.first_content_ns = now_ns
    now_ns += decode_ms * MS
    marks.last_chunk_ns = marks.last_byte_ns = marks.ended_ns = now_ns
    attempt.end_ns = record.end_ns = now_ns
    if reused is not None:
        attempt.connection = ConnectionUse("c1", reused)
    return Timeline(record)


def test_cold_calls_are_apart_from_warm_ones() -> None:
    timelines = [timeline(reused=False, tcp_ms=5), timeline(reused=True, send_ms=3), timeline(reused=True)]
    found = report([Outcome(each) for each in timelines], 1.0)
    assert found.cold is not None
    assert found.warm is not None
    assert (found.ok, found.failed, found.cold.calls, found.warm.calls) == (3, 0, 1, 2)
    assert found.cold.times["total"].max_s == pytest.approx(0.018)
    assert [found.warm.times["total"].p50_s, found.warm.times["total"].max_s] == pytest.approx([0.013, 0.015])
    assert [(row.segment, row.part) for row in found.cold.rows] == [
        ("handshake", ""),
        ("handshake", "tcp"),
        ("network", ""),
        ("network", "send"),
        ("network", "to_and_back"),
        ("model", ""),
        ("model", "prefill"),
    ]
    data = found.cold.to_dict()
    assert data["segments"]["handshake"]["parts"]["tcp"]["p50_s"] == pytest.approx(0.005)
    assert data["segments"]["handshake"]["source"] == "measured"
    assert "handshake" not in found.warm.to_dict()["segments"]


def test_a_segment_has_the_weakest_source_and_the_count_of_the_calls_that_have_it() -> None:
    timelines = [timeline(reused=True), timeline(reused=True, rtt_ms=0, prefill_ms=0), timeline(reused=True)]
    found = report([Outcome(each) for each in timelines], 1.0)
    assert found.warm is not None
    rows = {(row.segment, row.part): row for row in found.warm.rows}
    assert rows["network", ""].source == "estimated"
    assert rows["network", "send"].source == "measured"
    assert rows["network", ""].summary.n == 3
    assert rows["network", "to_and_back"].summary.n == 2


def test_failed_calls_are_counted_by_error_and_nothing_else_is_made_of_them() -> None:
    failed = [
        Outcome(timeline(reused=True), error_type="RateLimited", message="first"),
        Outcome(error_type="RateLimited", message="second"),
        Outcome(error_type="ConnectionFailed", message="third"),
    ]
    found = report([*failed, Outcome(timeline(reused=None))], 1.0)
    assert found.errors == {"RateLimited": (2, "first"), "ConnectionFailed": (1, "third")}
    assert (found.ok, found.failed, found.warm, found.tokens) == (1, 3, None, None)
    assert found.cold is not None
    assert found.cold.calls == 1


def test_nothing_is_made_of_nothing() -> None:
    found = report([], 0.0)
    assert (found.ok, found.failed, found.cold, found.warm, found.tokens) == (0, 0, None, None, None)


@pytest.mark.parametrize(
    ("counted_by", "expected"),
    [(["usage", "usage"], "usage"), (["chunks", "chunks"], "chunks"), (["usage", "chunks"], "mixed")],
)
def test_tokens(counted_by: Sequence[str], expected: str) -> None:
    outcomes = [
        Outcome(timeline(reused=True, decode_ms=90 * number), 10, by)  # type: ignore[arg-type]
        for number, by in enumerate(counted_by, 1)
    ]
    found = report(outcomes, 0.5).tokens
    assert found is not None
    assert (found.output, found.source, found.per_second) == (20, expected, 40.0)
    assert found.per_second_in_call == pytest.approx(9 / 0.18)  # nearest-rank: the slower of two


def test_the_speed_within_a_call_is_left_out_where_it_is_not_known() -> None:
    found = report([Outcome(timeline(reused=True), 1, "usage")], 0.5).tokens
    assert found is not None
    assert found.to_dict() == {"output": 1, "source": "usage", "per_second": 2.0}
