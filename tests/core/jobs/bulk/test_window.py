"""How many jobs are open, and how many are being submitted."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from spanwire.jobs.bulk.window import OPEN, Window, most_open


def test_the_bounds() -> None:
    quiet: dict[str, Any] = {"webhooks": False, "delivery_s": 0.0, "polls_per_s": 0.0, "retention_s": 0.0}
    assert most_open(None, **quiet) == OPEN
    assert most_open(5000, **quiet) == 5000
    # Baseten: 250 webhooks a second for 30 s; 20 questions a second for half of an hour.
    baseten: dict[str, Any] = {"webhooks": True, "delivery_s": 30.0, "polls_per_s": 20.0, "retention_s": 3600.0}
    assert most_open(10**6, **baseten) == 7500
    assert most_open(10**6, **{**baseten, "webhooks": False}) == 36_000
    assert most_open(10, **baseten) == 10
    # OpenAI without storage.
    assert most_open(10**6, webhooks=False, delivery_s=0.0, polls_per_s=10.0, retention_s=600.0) == 3000
    assert most_open(None, webhooks=True, delivery_s=0.001, polls_per_s=0.0, retention_s=0.0) == 1


def test_room_by_number_and_bytes() -> None:
    window = Window(2, most_bytes=100)
    assert window.room(0, 1000)  # one that is too large is alone
    assert window.room(1, 99)
    assert not window.room(1, 100)
    assert not window.room(2, 0)


def test_submits_at_once_are_bounded() -> None:
    window = Window(100, submits=2)
    window.begin()
    assert window.may_submit(0.0)
    window.begin()
    assert not window.may_submit(0.0)
    window.end()
    assert window.may_submit(0.0)


def test_it_is_halved_once_for_what_was_sent_before() -> None:
    window = Window(64)
    tickets = [window.begin() for _ in range(8)]
    for ticket in tickets:
        window.refused(ticket, 10.0, retry_after_s=None, dice=0.5)
    assert window.limit == 32
    assert not window.may_submit(10.9)
    assert window.wait_s(10.0) == 1.0
    assert window.may_submit(11.0) or window.submitting
    window.refused(window.begin(), 11.0, retry_after_s=None, dice=0.5)
    assert window.limit == 16
    assert window.wait_s(11.0) == 2.0  # longer each time
    window.acknowledged()
    window.refused(window.begin(), 20.0, retry_after_s=None, dice=0.5)
    assert window.wait_s(20.0) == 1.0  # in a row


def test_the_server_says_how_long() -> None:
    window = Window(64)
    window.refused(window.begin(), 0.0, retry_after_s=7.0, dice=0.9)
    assert window.wait_s(0.0) == 7.0
    window.refused(0, 0.0, retry_after_s=9.0, dice=0.9)  # one of before, that says more
    assert window.limit == 32
    assert window.wait_s(0.0) == 9.0


def test_a_whole_window_of_acknowledgements_opens_it_by_one() -> None:
    window = Window(64)
    window.refused(window.begin(), 0.0, retry_after_s=1.0, dice=0.0)
    for _ in range(33):
        window.acknowledged()
    assert 32.9 < window.limit < 33.1
    for _ in range(10_000):
        window.acknowledged()
    assert window.limit == 64


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 200),
    st.lists(st.tuples(st.sampled_from(["ack", "refuse", "after", "pause"]), st.floats(0, 100)), max_size=60),
)
def test_it_stays_between_one_and_most(most: int, steps: list[tuple[str, float]]) -> None:
    window, now_s = Window(most), 0.0
    for what, number in steps:
        now_s += number
        ticket = window.begin()
        if what == "ack":
            window.acknowledged()
        elif what == "pause":
            window.pause(now_s, dice=0.999)
        else:
            window.refused(ticket, now_s, retry_after_s=number if what == "after" else None, dice=0.999)
        window.end()
        assert 1 <= window.limit <= most
        assert window.submitting == 0
        assert (window.wait_s(now_s) or 0.0) <= 100.001  # of a sum of floats
        assert window.may_submit(now_s + 100.001)
        assert window.room(0, 0)
