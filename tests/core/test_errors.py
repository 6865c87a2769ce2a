"""The error tree: its shape, its defaults, and that errors survive a process boundary."""

import copy
import pickle
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spanwire import errors
from spanwire.calls import Reply
from spanwire.errors import (
    AuthenticationFailed,
    BadRequest,
    CallTimeout,
    ConfigurationError,
    ConnectionFailed,
    JobCancelled,
    JobError,
    JobExpired,
    JobLost,
    MessageTooBig,
    NoSlot,
    Overloaded,
    PluginConflict,
    PluginError,
    ProtocolError,
    QueueFull,
    QueueTimeout,
    RateLimited,
    ServerError,
    SignatureInvalid,
    SpanwireError,
    Truncated,
    server_error,
    visible,
)
from spanwire.timeline import AttemptRecord, CallRecord, Timeline

TREE: dict[type[SpanwireError], type[Exception]] = {
    SpanwireError: Exception,
    ConfigurationError: SpanwireError,
    PluginError: ConfigurationError,
    PluginConflict: ConfigurationError,
    NoSlot: SpanwireError,
    QueueFull: NoSlot,
    QueueTimeout: NoSlot,
    CallTimeout: SpanwireError,
    ConnectionFailed: SpanwireError,
    ServerError: SpanwireError,
    AuthenticationFailed: ServerError,
    RateLimited: ServerError,
    BadRequest: ServerError,
    Overloaded: ServerError,
    ProtocolError: SpanwireError,
    MessageTooBig: ProtocolError,
    Truncated: SpanwireError,
    JobError: SpanwireError,
    JobLost: JobError,
    JobExpired: JobError,
    JobCancelled: JobError,
    SignatureInvalid: JobError,
}

SERVER = {ServerError, AuthenticationFailed, RateLimited, BadRequest, Overloaded}
DEFAULTS: dict[type[SpanwireError], tuple[str, bool]] = {
    ConfigurationError: ("configure", False),
    PluginError: ("configure", False),
    PluginConflict: ("configure", False),
    QueueFull: ("queue", True),
    QueueTimeout: ("queue", True),
    ConnectionFailed: ("connect", True),
    ServerError: ("read", False),
    AuthenticationFailed: ("read", False),
    RateLimited: ("read", True),
    BadRequest: ("read", False),
    Overloaded: ("read", True),
    ProtocolError: ("read", False),
    MessageTooBig: ("read", False),
    Truncated: ("read", True),
    JobError: ("wait", False),
    JobLost: ("wait", True),
    JobExpired: ("wait", True),
    JobCancelled: ("wait", False),
    SignatureInvalid: ("read", False),
}


def make(cls: type[SpanwireError], message: str = "it broke", endpoint: str | None = "host:1") -> SpanwireError:
    if issubclass(cls, CallTimeout):
        return cls(message, limit="idle_s", endpoint=endpoint, phase="read")
    if issubclass(cls, ServerError):
        return cls(message, status=418, code="teapot", retry_after_s=1.5, headers={"x-a": "b"}, endpoint=endpoint)
    return cls(message, endpoint=endpoint)


def timeline() -> Timeline:
    record = CallRecord(1_000, operation="chat", model="m", endpoint="host:1", transport="sse")
    attempt = AttemptRecord(1_000, streamed=True)
    attempt.asked_ns, attempt.leased_ns, attempt.end_ns = 1_000, 2_000, 5_000
    attempt.outcome, attempt.error_type = "error", "Truncated"
    record.attempts.append(attempt)
    record.end_ns, record.outcome = 5_000, "error"
    return Timeline(record)


def test_every_error_has_the_parent_that_the_drawing_shows() -> None:
    for cls, parent in TREE.items():
        assert cls.__bases__ == (parent,), cls


def test_the_drawing_and_all_name_every_error() -> None:
    found = {value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, SpanwireError)}
    assert found == set(TREE)
    assert {cls.__name__ for cls in TREE} <= set(errors.__all__)
    assert errors.__doc__ is not None
    for cls in TREE:
        assert cls.__name__ in errors.__doc__


@pytest.mark.parametrize("cls", DEFAULTS, ids=lambda cls: cls.__name__)
def test_defaults_of_phase_and_retryable(cls: type[SpanwireError]) -> None:
    error = make(cls)
    assert (error.phase, error.retryable) == DEFAULTS[cls]
    assert error.reply is None
    assert error.timeline is None
    assert error.endpoint == "host:1"


def test_phase_and_retryable_of_one_error_leave_the_class_alone() -> None:
    error = ConnectionFailed("no", phase="tls", retryable=False)
    assert (error.phase, error.retryable) == ("tls", False)
    assert (ConnectionFailed("no").phase, ConnectionFailed("no").retryable) == ("connect", True)


def test_call_timeout_names_its_limit() -> None:
    error = CallTimeout("too slow", limit="first_content_s", phase="wait")
    assert error.limit == "first_content_s"
    assert error.retryable


@pytest.mark.parametrize("cls", TREE, ids=lambda cls: cls.__name__)
def test_text_is_the_message_and_the_endpoint(cls: type[SpanwireError]) -> None:
    assert str(make(cls)) == "it broke [host:1]"
    assert str(make(cls, endpoint=None)) == "it broke"


@pytest.mark.parametrize("copier", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy])
@pytest.mark.parametrize("cls", TREE, ids=lambda cls: cls.__name__)
def test_errors_cross_processes_with_all_they_carry(
    cls: type[SpanwireError], copier: Callable[[SpanwireError], SpanwireError]
) -> None:
    error = make(cls)
    error.phase, error.retryable = "upgrade", True
    error.reply = Reply(text="part", headers={"a": "b"})
    error.timeline = timeline()
    twin = copier(error)
    assert type(twin) is cls
    assert str(twin) == str(error)
    assert twin.args == error.args
    assert (twin.message, twin.endpoint, twin.phase, twin.retryable) == ("it broke", "host:1", "upgrade", True)
    assert twin.reply is not None
    assert twin.reply.text == "part"
    assert twin.timeline is not None
    assert twin.timeline.to_dict() == error.timeline.to_dict()
    if isinstance(twin, ServerError):
        assert (twin.status, twin.code, twin.retry_after_s, twin.headers) == (418, "teapot", 1.5, {"x-a": "b"})
    if isinstance(twin, CallTimeout):
        assert twin.limit == "idle_s"


def test_repr_shows_no_headers_and_no_reply() -> None:
    error = ServerError("it broke", status=500, headers={"set-cookie": "hunter2"})
    error.reply = Reply(text="the secret plan")
    for shown in (repr(error), str(error), repr(error.reply)):
        assert "hunter2" not in shown
        assert "secret plan" not in shown


# --- server_error ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "cls", "retryable"),
    [
        (301, ServerError, False),
        (307, ServerError, False),
        (400, BadRequest, False),
        (401, AuthenticationFailed, False),
        (403, AuthenticationFailed, False),
        (404, BadRequest, False),
        (408, BadRequest, True),
        (409, BadRequest, True),
        (422, BadRequest, False),
        (425, BadRequest, True),
        (429, RateLimited, True),
        (499, BadRequest, False),
        (500, ServerError, True),
        (501, ServerError, False),
        (502, ServerError, True),
        (503, Overloaded, True),
        (504, ServerError, True),
        (505, ServerError, False),
        (529, Overloaded, True),
        (599, ServerError, True),
        (600, ServerError, False),
    ],
)
def test_class_and_retryable_follow_the_status(status: int, cls: type[ServerError], retryable: bool) -> None:
    error = server_error("words", status=status)
    assert type(error) is cls
    assert error.status == status
    assert error.retryable is retryable


@pytest.mark.parametrize("status", [None, 200])
@pytest.mark.parametrize("code", [429, "429"])
def test_a_numeric_code_decides_where_the_status_is_no_error(status: int | None, code: str | int) -> None:
    error = server_error("words", status=status, code=code)
    assert type(error) is RateLimited
    assert error.retryable
    assert (error.status, error.code) == (status, code)


def test_an_error_status_wins_over_the_code() -> None:
    assert type(server_error("words", status=400, code=429)) is BadRequest
    assert type(server_error("words", status=302, code=429)) is ServerError


@pytest.mark.parametrize("code", [None, True, 0, 200, 399, 600, 4290, "4290", "429.0", " 429", "²", "rate_limit", ""])
def test_a_code_that_is_no_status_decides_nothing(code: str | int | None) -> None:
    error = server_error("words", code=code)
    assert type(error) is ServerError
    assert not error.retryable
    assert error.code == code


@given(
    status=st.none() | st.integers(-10, 10_000),
    code=st.none() | st.integers() | st.text() | st.from_regex(r"[0-9]{1,6}", fullmatch=True),
)
def test_any_status_and_code_give_an_error_that_keeps_them(status: int | None, code: str | int | None) -> None:
    error = server_error("words", status=status, code=code, retry_after_s=2.0, headers={"a": "b"}, endpoint="h:1")
    assert (error.status, error.code, error.retry_after_s, error.headers) == (status, code, 2.0, {"a": "b"})
    assert str(error) == "words [h:1]"
    assert not (isinstance(error, AuthenticationFailed) and error.retryable)
    assert type(error) in SERVER


# --- what others wrote -----------------------------------------------------------------------------------------------


def test_what_a_terminal_would_obey_is_written_out() -> None:
    error = ProtocolError("\x1b]0;title\x07 \x9b31m \r\x7f \u202egnp.exe \ud800", endpoint="h:1")
    assert str(error) == "\\u001b]0;title\\u0007 \\u009b31m \\u000d\\u007f \\u202egnp.exe \\ud800 [h:1]"
    assert error.args == (error.message,)
    assert str(error).encode()


@given(st.text())
def test_text_is_shown_as_it_is_but_for_what_is_obeyed(text: str) -> None:
    shown = visible(text)
    assert all(letter in "\n\t" or ord(letter) >= 0x20 for letter in shown)
    assert shown.encode().decode() == shown
    assert visible(shown) == shown
    assert shown == text or len(shown) > len(text)


def test_lines_of_a_servers_words_stay_lines() -> None:
    assert visible("two\n\tlines, \xe9\u4e2d\U0001f600\xa0") == "two\n\tlines, \xe9\u4e2d\U0001f600\xa0"
