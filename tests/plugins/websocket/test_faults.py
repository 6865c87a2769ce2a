"""What a refusal, a close and an error event mean: the pure part."""

from __future__ import annotations

import errno
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spanwire_websocket.faults import closed_error, judge, refused_upgrade
from spanwire_websocket.socket import Closed

from spanwire import errors
from spanwire.errors import ServerError, server_error


def closed(code: int | None, reason: str = "", *, ours: bool = False, cause: Any = None, **more: Any) -> Any:
    return closed_error(Closed(code, reason, ours, cause), "h:1", max_bytes=1000, **more)


#: code, reason, class, retryable while nothing has come, full then.
CODES = [
    (None, "", errors.ConnectionFailed, True, False),
    (1000, "", errors.Truncated, True, False),
    (1005, "", errors.Truncated, True, False),
    (1001, "", errors.ConnectionFailed, True, False),
    (1012, "", errors.ConnectionFailed, True, False),
    (1013, "", errors.ConnectionFailed, True, True),
    (1002, "", errors.ConnectionFailed, False, False),
    (1003, "", errors.ConnectionFailed, False, False),
    (1007, "", errors.ConnectionFailed, False, False),
    (1011, "upstream failed", errors.ConnectionFailed, False, False),
    (1008, "policy", errors.ServerError, False, False),
    (1008, "rate limit exceeded", errors.RateLimited, True, True),
    (1008, "max_active_conversations", errors.RateLimited, True, True),
    (1008, "Too many connections", errors.RateLimited, True, True),
    (1008, "concurrency limit", errors.RateLimited, True, True),
    (1009, "", errors.MessageTooBig, False, False),
    (3000, "app", errors.ConnectionFailed, False, False),
    (4999, "", errors.ConnectionFailed, False, False),
]


@pytest.mark.parametrize(("code", "reason", "kind", "retryable", "full"), CODES)
def test_a_close(code: int | None, reason: str, kind: type[errors.SpanwireError], retryable: bool, full: bool) -> None:
    before: Any = closed(code, reason)
    assert before.__class__ is kind
    assert (before.retryable, before.full) == (retryable, full)
    assert before.phase == ("wait" if kind is errors.ConnectionFailed else before.phase)
    assert reason in str(before)
    if code is not None:
        assert str(code) in str(before)
    after: Any = closed(code, reason, begun=True)
    assert after.__class__ is kind
    assert (after.retryable, after.full) == (False, False)


def test_1011_before_anything_was_sent() -> None:
    assert closed(1011, "engine", asked=False).retryable is True
    assert closed(1008, "policy", asked=False).retryable is False
    assert closed(4001, "who are you", asked=False).retryable is False


def test_our_own_closes() -> None:
    keepalive = closed(1011, "our keepalive: nothing came for 20 s after a ping", ours=True)
    assert type(keepalive) is errors.ConnectionFailed
    assert "our keepalive" in str(keepalive)
    assert "server" not in str(keepalive)
    big = closed(1009, ours=True, begun=True)
    assert type(big) is errors.MessageTooBig
    assert "1000 bytes (Limits.max_event_bytes)" in str(big)
    assert type(closed(1002, "odd frame", ours=True)) is errors.ProtocolError


def test_the_systems_words() -> None:
    cause = ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
    error = closed(None, cause=cause, begun=True)
    assert "Connection reset by peer" in str(error)
    assert error.__cause__ is cause


@given(st.none() | st.integers(0, 65535), st.text(max_size=130), st.booleans(), st.booleans())
def test_any_close_is_an_error_of_ours(code: int | None, reason: str, ours: bool, begun: bool) -> None:
    error = closed(code, reason, ours=ours, begun=begun)
    assert isinstance(error, errors.SpanwireError)
    assert not (begun and (error.retryable or error.full))
    assert error.endpoint == "h:1"


@given(st.integers(100, 599), st.binary(max_size=300), st.text(max_size=30))
def test_any_refusal_is_an_error_of_ours(status: int, body: bytes, location: str) -> None:
    error = refused_upgrade("h:1", status, {"location": location}, body, None)
    assert isinstance(error, errors.SpanwireError)
    assert error.phase == "upgrade"
    assert len(str(error)) < 600
    assert error.full is (status in (429, 503, 529))


def test_a_server_without_a_websocket_there_may_call_it_forbidden() -> None:
    """uvicorn refuses so where no route takes it: it need not be the key."""
    assert "no WebSocket at this path" in str(refused_upgrade("h:1", 403, {}, b"", None))
    assert "no WebSocket at this path" not in str(refused_upgrade("h:1", 401, {}, b"", None))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"error": {"message": "no room"}}', "no room"),
        (b'{"error": "no room"}', "no room"),
        (b'{"detail": "no room"}', "no room"),
        (b'{"message": "no room"}', "no room"),
        (b"no\n room", "no room"),
        (b"<html>no room</html>", ""),
        (b'{"error": {"message": 7}}', ""),
        (b"{broken no room", "no room"),
        ("ä".encode()[:1] + b" no room", "no room"),
        (b'{"error": ' * 5000, ""),
    ],
)
def test_the_servers_words(body: bytes, words: str) -> None:
    said = str(refused_upgrade("h:1", 503, {}, body, None))
    assert words in said
    assert "<html" not in said


# --- error events ---------------------------------------------------------------------------------------------------------


def event(status: int | None, code: str | None, message: str = "no") -> ServerError:
    return server_error(message, status=status, code=code)


def judged(error: ServerError, **more: Any) -> tuple[bool, bool, bool, bool]:
    useless = judge(error, **{"begun": False, "closing": False, "own_parent": False, **more})
    return error.retryable, error.full, error.again, useless


@pytest.mark.parametrize("code", ["previous_response_not_found", "websocket_connection_limit_reached"])
def test_the_two_safe_errors(code: str) -> None:
    assert judged(event(400, code)) == (False, False, True, True)
    assert judged(event(400, code), begun=True) == (False, False, False, False)
    assert judged(event(400, code), own_parent=True) == (False, False, False, False)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (event(None, "server_is_overloaded"), (True, False, False, False)),
        (event(503, "server_is_overloaded"), (True, False, False, False)),
        (event(429, "rate_limit_exceeded"), (True, False, False, False)),
        (event(None, "rate_limit_exceeded", "slow down"), (True, False, False, False)),
        (event(429, "x", "too many connections"), (True, True, False, True)),
        (event(None, "max_active_conversations"), (True, True, False, True)),
        (event(400, "max_active_conversations"), (True, True, False, True)),
        (event(400, "x", "too many connections of this kind in the graph"), (False, False, False, False)),
        (event(400, "context_length_exceeded", "rate limit? no: token limit exceeded"), (False, False, False, False)),
        (event(400, "x", "too many images"), (False, False, False, False)),
        (event(401, "invalid_api_key"), (False, False, False, False)),
        (event(None, None), (False, False, False, False)),
    ],
)
def test_other_error_events(error: ServerError, expected: tuple[bool, ...]) -> None:
    assert judged(error) == expected


def test_a_limit_of_calls_that_closes_the_socket_is_one_of_clients() -> None:
    assert judged(event(429, "rate_limit_exceeded"), closing=True) == (True, True, False, False)
