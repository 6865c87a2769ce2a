"""When a provider is asked, and how often it may be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spanwire.jobs.budget import Durations, TokenBucket, next_poll_s


def poll(age_s: float = 0.0, **more: object) -> float:
    """How long until the next question, of a job of that age."""
    given: dict[str, object] = {
        "now_s": 1000.0 + age_s,
        "since_s": 1000.0,
        "mode": "webhook",
        "floor_s": None,
        "usual_s": None,
        "retention_s": 3600.0,
        "dice": 0.5,
        **more,
    }
    return next_poll_s(**given) - 1000.0 - age_s  # type: ignore[arg-type]


def test_the_wait_grows_with_the_jobs_age() -> None:
    assert poll(0.0, mode="poll") == 1.0
    assert poll(100.0, mode="poll") == 50.0
    assert poll(1e6, mode="poll") == 300.0
    assert poll(0.0) == 60.0
    assert poll(0.0, floor_s=0.5) == 0.5


def test_a_job_is_not_asked_for_before_its_like_have_ended() -> None:
    assert poll(10.0, mode="poll", usual_s=40.0) == 30.0
    assert poll(50.0, mode="poll", usual_s=40.0) == 25.0


def test_it_is_asked_for_before_its_result_is_forgotten() -> None:
    assert poll(10_000.0, retention_s=60.0) == 30.0
    assert poll(0.0, usual_s=1000.0, retention_s=60.0) == 30.0


@given(age_s=st.floats(0, 1e6), dice=st.floats(0, 1, exclude_max=True), retention_s=st.floats(1, 1e6))
def test_the_wait_is_never_nothing(age_s: float, dice: float, retention_s: float) -> None:
    wait_s = poll(age_s, mode="poll", dice=dice, retention_s=retention_s)
    assert 0.4 < wait_s < 331.0


@given(steps=st.lists(st.floats(0, 2), max_size=200), rate=st.floats(0.5, 50))
def test_the_bucket_keeps_to_its_rate(steps: list[float], rate: float) -> None:
    bucket, now_s, taken = TokenBucket(rate, 0.0), 0.0, 0
    for step in steps:
        now_s += step
        while bucket.take(now_s):
            taken += 1
    assert taken <= rate * now_s + max(1.0, rate) + 1e-6


def test_the_bucket_waits_when_it_is_told_to() -> None:
    bucket = TokenBucket(10.0, 0.0)
    bucket.pause(5.0)
    assert not bucket.take(4.9)
    assert bucket.take(5.0)
    bucket.pause(4.0)  # an older word
    assert bucket.take(5.0)


def test_a_clock_that_is_set_back_brings_no_tokens() -> None:
    bucket = TokenBucket(1.0, 100.0)
    assert bucket.take(100.0)
    assert not bucket.take(50.0)
    assert not bucket.take(50.5)


def test_what_is_usual_is_known_after_a_few() -> None:
    seen = Durations()
    for seconds in range(1, 5):
        seen.add("m", float(seconds))
    assert seen.usual_s("m") is None
    for seconds in range(5, 101):
        seen.add("m", float(seconds))
    assert seen.usual_s("m") == 96.0
    assert seen.usual_s("other") is None
    for number in range(500):
        seen.add(number, 1.0)
    assert seen.usual_s("m") is None or len(seen._seen) <= 200
