"""What stands out is said, with its number; and nothing is said where nothing does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spanwire.report.calls import Call
from spanwire.report.findings import count, duration, findings, percent
from spanwire.report.summary import summarize
from tests.core.report.test_summary import call

MODEL = ("model", "prefill", "reported")


def quiet(n: int, **more: object) -> list[Call]:
    return [call(1.0, pieces=[(*MODEL, 1.0)], **more) for _ in range(n)]


def said(members: list[Call]) -> list[str]:
    return [finding.text for finding in findings(summarize(members))]


def test_nothing_stands_out() -> None:
    assert said(quiet(50)) == ["Nothing stands out."]
    assert said(quiet(1)) == ["Nothing stands out among so few calls (1 call)."]


def test_new_connections_and_what_they_cost() -> None:
    pieces = [("handshake", "tls", "measured", 0.083), (*MODEL, 0.917)]
    members = [*quiet(62), *(call(1.0, pieces=pieces, reused=False) for _ in range(38))]
    (text,) = said(members)
    assert text.startswith("38 % of calls opened a new connection (38 of 100): handshakes cost 83 ms at the median. ")


def test_a_few_new_connections_are_as_it_should_be() -> None:
    assert said([*quiet(95), *quiet(5, reused=False)]) == ["Nothing stands out."]


def test_connections_of_which_nothing_is_known_say_nothing() -> None:
    assert said(quiet(50, reused=None)) == ["Nothing stands out."]


@pytest.mark.parametrize(
    ("piece", "words"),
    [
        (("unattributed", "", "measured"), "12 % of the time is unattributed"),
        (("queue", "local", "measured"), "12 % of the time went into waiting for a slot or a connection on this side"),
        (
            ("queue", "server", "reported"),
            "12 % of the time went into waiting in the server's queue (120 ms at the median",
        ),
        (("queue", "backoff", "measured"), "12 % of the time went into waiting between failed attempts"),
        (("client", "waiting", "measured"), "12 % of the time an answer was there and the program did not fetch it"),
    ],
)
def test_shares_of_the_time(piece: tuple[str, str, str], words: str) -> None:
    members = [call(1.0, pieces=[(*piece, 0.12), (*MODEL, 0.88)]) for _ in range(20)]
    (text,) = said(members)
    assert text.startswith(words)


def test_failures_and_attempts() -> None:
    members = [
        *quiet(90),
        *quiet(4, outcome="error", error_type="RateLimited"),
        *quiet(2, outcome="timeout", error_type="CallTimeout"),
        *quiet(4, outcome="closed_by_caller", attempts=2),
    ]
    assert said(members) == [
        "6.0 % of calls failed (6 of 100: 4 RateLimited, 2 CallTimeout).",
        "4.0 % of calls needed more than one attempt (4).",
        "4.0 % of calls were left before their end (4 closed by caller).",
    ]


def test_one_failed_call_of_few_is_said_too() -> None:
    assert said(quiet(1, outcome="error", error_type="ConnectionFailed")) == [
        "100 % of calls failed (1 of 1: 1 ConnectionFailed)."
    ]


def test_a_long_tail_names_its_model() -> None:
    members = [
        call(9.0, pieces=[(*MODEL, 9.0)], model="tailed", first_content_s=0.1 if number % 10 else 4.0, output_tokens=2)
        for number in range(100)
    ]
    (text,) = said(members)
    assert text == "Time to first token of tailed at e has a long tail: 4 s at p95, 100 ms at the median."


def test_what_is_estimated_or_unknown_is_told() -> None:
    members = [call(1.0, pieces=[("model", "prefill", "estimated", 1.0)], first_content_s=0.1) for _ in range(20)]
    first, second, third = said(members)
    assert first == "Nothing stands out."
    assert second.startswith(
        "No server reported times of its own: how a wait divides between model and network is estimated"
    )
    assert third == "No call has a token count: token speeds are left blank."


@given(st.floats(0, 1))
def test_a_share_in_words_never_says_nothing_of_something_or_all_of_less(share: float) -> None:
    text = percent(share)
    assert (text == "0.0 %") == (share == 0)
    assert (text == "100 %") == (share == 1)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (2e-6, "2 us"), (0.0005, "0.5 ms"), (0.0834, "83.4 ms"), (0.342, "342 ms"), (0.9999, "1 s"), (1.254, "1.25 s"),
        (59.96, "60 s"), (250, "4 min 10 s"), (240, "4 min"), (7260, "2 h 1 min"), (7200, "2 h"),
    ],
)  # fmt: skip
def test_durations_in_words(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_counts_in_words() -> None:
    assert [count(number, "call") for number in (0, 1, 1200)] == ["0 calls", "1 call", "1,200 calls"]
