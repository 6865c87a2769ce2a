"""Which calls are drawn in detail: cold, slow, failed, and a sample of the others."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spanwire.endpoint import Endpoint
from spanwire.telemetry.attributes import Labels
from spanwire.telemetry.detail import PER_SECOND, Detail, Slowness
from spanwire.timeline import AttemptRecord, CallRecord, ConnectionUse, Outcome

MS = 1_000_000


def labels() -> Labels:
    return Labels(Endpoint("http://h/v1"), "chat", "m", streamed=True)


def call(
    at_ms: float,
    *,
    lasted_ms: float = 10,
    reused: bool = True,
    outcome: Outcome = "completed",
    attempts: int = 1,
    first_ms: float = 0,
) -> CallRecord:
    begin_ns = int((at_ms - lasted_ms) * MS)
    record = CallRecord(begin_ns, operation="chat", model="m", endpoint="h", transport="t")
    record.end_ns = int(at_ms * MS)
    record.outcome = outcome
    for _ in range(attempts):
        attempt = AttemptRecord(begin_ns, streamed=True)
        attempt.served = "idle" if reused else "dialled"
        attempt.connection = ConnectionUse("c", reused)
        attempt.marks.first_content_ns = begin_ns + int(first_ms * MS) if first_ms else 0
        record.attempts.append(attempt)
    return record


def used_up(mode: str = "auto") -> tuple[Detail, Labels]:
    """At 5 seconds, when this second's sample has been drawn, and 10 ms are usual."""
    detail, known = Detail(mode), labels()
    for number in range(50):
        detail.wants(call(5_000 + number / 1_000), known)
    return detail, known


def test_the_first_ten_of_a_second() -> None:
    detail, known = Detail("auto"), labels()
    assert [detail.wants(call(5_000 + n), known) for n in range(15)] == [True] * PER_SECOND + [False] * 5
    assert not detail.wants(call(5_999), known)
    assert detail.wants(call(6_000), known)


@pytest.mark.parametrize(
    "record",
    [
        call(5_100, reused=False),
        call(5_100, outcome="error"),
        call(5_100, outcome="timeout"),
        call(5_100, attempts=2),
        call(5_100, attempts=0, outcome="error"),
        call(5_100, lasted_ms=100),
        call(5_100, lasted_ms=100, first_ms=60),
    ],
    ids=["cold", "failed", "timed out", "tried again", "never began", "slow", "slow to begin"],
)
def test_cold_slow_and_failed_calls_always(record: CallRecord) -> None:
    detail, known = used_up()
    assert detail.wants(record, known)
    assert not detail.wants(call(5_100), known)


def test_of_slow_calls_as_many_as_of_others() -> None:
    """Where there are more, it is the load that makes them, and their spans would make it worse."""
    detail, known = used_up()
    drawn = [detail.wants(call(5_100, lasted_ms=10.0 * 3**n), known) for n in range(1, 15)]
    assert drawn == [True] * PER_SECOND + [False] * 4
    assert detail.wants(call(6_100, lasted_ms=10.0 * 3**15), known)


def test_of_cold_calls_as_many_as_of_others() -> None:
    detail, known = used_up()
    assert [detail.wants(call(5_100, reused=False), known) for _ in range(15)] == [True] * PER_SECOND + [False] * 5
    assert detail.wants(call(6_100, reused=False), known)


def test_a_long_answer_is_not_slow() -> None:
    detail, known = used_up()
    assert not detail.wants(call(5_100, lasted_ms=900, first_ms=10), known)


def test_a_call_that_was_left_says_nothing_of_what_is_usual() -> None:
    detail, known = used_up()
    assert not detail.wants(call(5_100, lasted_ms=900, outcome="closed_by_caller"), known)


def test_full_and_flat() -> None:
    full, known = used_up("full")
    assert full.wants(call(5_100), known)
    flat, known = used_up("flat")
    assert not flat.wants(call(9_000, reused=False, outcome="error", lasted_ms=900), known)


def test_nothing_is_slow_before_anything_is_usual() -> None:
    slowness = Slowness()
    assert not any(slowness.add(10.0**n) for n in range(20))


def test_slow_is_far_from_what_is_usual() -> None:
    slowness = Slowness()
    for _ in range(1_000):
        assert not slowness.add(0.1)
    assert not slowness.add(0.19)
    assert slowness.add(0.3)
    assert not slowness.add(0.1)
    assert slowness.add(0.5)


def test_about_one_in_a_hundred_of_a_long_tail() -> None:
    # Lognormal with sigma 1: the 99th percentile is 10 times the median, 6 times the mean.
    randomly = random.Random(4)
    slowness = Slowness()
    slow = sum(slowness.add(randomly.lognormvariate(0, 1)) for _ in range(20_000))
    assert 100 < slow < 300


def test_a_server_that_slows_down_for_good_becomes_usual() -> None:
    slowness = Slowness()
    for _ in range(1_000):
        slowness.add(0.1)
    slow = [slowness.add(1.0) for _ in range(1_000)]
    assert slow[0]
    assert 10 < sum(slow) < 100
    assert not any(slow[100:])


@given(st.lists(st.floats(1e-6, 1e3), max_size=2_000))
def test_whatever_comes_few_are_slow(times: list[float]) -> None:
    slowness = Slowness()
    slow = sum(slowness.add(seconds) for seconds in times)
    # Each one above moves the estimate up by 5 %, and it never has to leave the range of the times: ln(1e9) / 0.05.
    assert slow <= len(times) / 90 + 440
