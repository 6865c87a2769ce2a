"""When a failed attempt is tried again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spanwire.endpoint import Retries
from spanwire.errors import ConnectionFailed, server_error
from spanwire.retry import retry_wait_s

WAITING = Retries(max_attempts=4, base_s=0.5, max_wait_s=8)


def test_an_error_that_cannot_be_helped_is_not_tried_again() -> None:
    assert retry_wait_s(server_error("no", status=400), 1, WAITING, 0.5) is None


def test_attempts_are_counted_with_the_first() -> None:
    error = ConnectionFailed("broke")
    assert retry_wait_s(error, 3, WAITING, 0.5) is not None
    assert retry_wait_s(error, 4, WAITING, 0.5) is None
    assert retry_wait_s(error, 1, Retries(max_attempts=1), 0.5) is None


def test_the_back_off_doubles_up_to_its_cap_and_is_jittered_in_full() -> None:
    error = ConnectionFailed("broke")
    many = Retries(max_attempts=100, base_s=0.5, max_wait_s=8)
    assert [retry_wait_s(error, n, many, 1.0) for n in (1, 2, 3, 4, 5, 6, 99)] == [0.5, 1, 2, 4, 8, 8, 8]
    assert retry_wait_s(error, 3, many, 0.0) == 0


def test_the_server_is_given_the_time_it_asks_for() -> None:
    assert retry_wait_s(server_error("later", status=429, retry_after_s=3), 1, WAITING, 0.9) == 3
    assert retry_wait_s(server_error("later", status=429, retry_after_s=0.0), 1, WAITING, 0.5) == 0.25


def test_a_wait_that_is_too_long_is_not_slept() -> None:
    assert retry_wait_s(server_error("later", status=429, retry_after_s=3600), 1, WAITING, 0.5) is None


@given(attempts=st.integers(1, 10_000), dice=st.floats(0, 1, exclude_max=True), asked=st.none() | st.floats(0, 1e9))
def test_no_wait_is_longer_than_the_cap(attempts: int, dice: float, asked: float | None) -> None:
    retries = Retries(max_attempts=100_000, base_s=0.5, max_wait_s=8)
    wait = retry_wait_s(server_error("later", status=503, retry_after_s=asked), attempts, retries, dice)
    assert wait is None or 0 <= wait <= 8
