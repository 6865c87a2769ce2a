"""Errors arrive as the classes of LiteLLM's that its users catch, and that its router decides by."""

from __future__ import annotations

import json
from typing import Any

import litellm
import pytest
from litellm.exceptions import MidStreamFallbackError
from litellm_spanwire import report
from litellm_spanwire.errors import translated

from spanwire import errors
from spanwire.testing import LoopbackServer, Script
from tests.cases.play import AB, DONE, choice, data
from tests.integrations.litellm.support import WAYS, ask, ours, to

each_way = pytest.mark.parametrize("way", WAYS)

STATUSES: dict[int, tuple[type[Exception], int]] = {
    400: (litellm.BadRequestError, 400),
    401: (litellm.AuthenticationError, 401),
    403: (litellm.PermissionDeniedError, 403),
    404: (litellm.NotFoundError, 404),
    408: (litellm.Timeout, 408),
    418: (litellm.BadRequestError, 418),
    422: (litellm.UnprocessableEntityError, 422),
    429: (litellm.RateLimitError, 429),
    500: (litellm.InternalServerError, 500),
    502: (litellm.BadGatewayError, 502),
    503: (litellm.ServiceUnavailableError, 503),
    504: (litellm.Timeout, 504),
    507: (litellm.APIError, 507),
    529: (litellm.ServiceUnavailableError, 503),
}


def mapped(error: Any) -> Any:
    """What LiteLLM wraps where a stream fails while it is read."""
    return error.original_exception if isinstance(error, MidStreamFallbackError) else error


@each_way
@pytest.mark.parametrize("status", STATUSES)
def test_status(server: LoopbackServer, way: str, status: int) -> None:
    server.script(Script(status=status, headers={"retry-after": "7", "x-request-id": "r1"}))
    seen = ask(way, to(server))
    cls, number = STATUSES[status]
    error = mapped(seen.error)
    assert error.__class__.__name__ == cls.__name__
    assert error.status_code == number
    assert seen.error.status_code == error.status_code
    assert seen.error.litellm_response_headers["retry-after"] == "7"
    assert error.llm_provider == "spanwire"
    assert f"status {status}, as scripted" in str(error)
    assert ours(error) is not None
    assert len(server.requests) == 1  # attempts are LiteLLM's to repeat
    found = report(seen.error)
    assert found is not None
    assert (found["outcome"], len(found["attempts"])) == ("error", 1)
    if hasattr(error, "response"):
        assert error.response.headers["x-request-id"] == "r1"
        assert "content-length" not in error.response.headers or error.response.content == b""
    assert "sk-test" not in str(seen.error)


def test_only_an_asynchronous_stream_fails_where_it_is_read(server: LoopbackServer) -> None:
    """A synchronous one fails where it was made, as LiteLLM's built-in providers do."""
    server.script(Script(status=503))
    assert type(ask("completion stream", to(server)).error) is litellm.ServiceUnavailableError
    late = ask("acompletion stream", to(server)).error
    assert isinstance(late, MidStreamFallbackError)
    assert late.is_pre_first_chunk


@each_way
@pytest.mark.parametrize(
    ("body", "cls"),
    [
        ({"message": "too long", "code": "context_length_exceeded"}, litellm.ContextWindowExceededError),
        ({"message": "This model's maximum context length is 8 tokens."}, litellm.ContextWindowExceededError),
        ({"message": "no", "code": "content_policy_violation"}, litellm.ContentPolicyViolationError),
    ],
)
def test_prompts_for_which_the_router_has_fallbacks(
    server: LoopbackServer, way: str, body: dict[str, str], cls: type[Exception]
) -> None:
    server.script(Script(status=400, body=json.dumps({"error": body}).encode()))
    assert type(ask(way, to(server)).error) is cls


@each_way
def test_nobody_listens(way: str) -> None:
    with LoopbackServer() as server:
        given = to(server)
    error = mapped(ask(way, given).error)
    assert type(error) is litellm.APIConnectionError
    assert isinstance(ours(error), errors.ConnectionFailed)


@pytest.mark.parametrize("way", ["acompletion stream", "completion stream"])
def test_a_stream_that_breaks_off(server: LoopbackServer, way: str) -> None:
    server.script(Script.say("one two three four", drop_after=3))
    seen = ask(way, to(server))
    assert seen.text == "one two"
    assert isinstance(seen.error, MidStreamFallbackError)
    assert not seen.error.is_pre_first_chunk
    assert seen.error.generated_content == "one two"
    assert type(seen.error.original_exception) is litellm.APIConnectionError
    assert seen.finish_reason is None
    assert seen.report is not None
    assert seen.report["outcome"] == "error"


@pytest.mark.parametrize("way", ["acompletion stream", "completion stream"])
def test_a_stream_that_ends_too_early(server: LoopbackServer, way: str) -> None:
    """LiteLLM would end it with `stop`."""
    server.script(Script(writes=[AB]))
    seen = ask(way, to(server))
    assert seen.text == "ab"
    assert isinstance(ours(seen.error), errors.Truncated)
    assert seen.finish_reason is None


@each_way
def test_an_error_inside_the_answer(server: LoopbackServer, way: str) -> None:
    event = data({"error": {"message": "quota", "code": 429}})
    server.script(Script(writes=[event, DONE]))
    assert type(mapped(ask(way, to(server)).error)) is litellm.RateLimitError


@pytest.mark.parametrize("code", [None, "server_error", 7, "x429"])
def test_an_error_without_a_number(server: LoopbackServer, code: Any) -> None:
    server.script(Script(writes=[data(choice(role="assistant")), data({"error": {"message": "oh", "code": code}})]))
    assert type(mapped(ask("acompletion stream", to(server)).error)) is litellm.InternalServerError


@each_way
def test_timeout(server: LoopbackServer, way: str) -> None:
    server.script(Script(hang_after="request"))
    error = mapped(ask(way, to(server, timeout=0.05)).error)
    assert type(error) is litellm.Timeout
    assert error.status_code == 408
    assert isinstance(ours(error), errors.CallTimeout)


def test_stream_timeout_is_the_longest_pause(server: LoopbackServer) -> None:
    server.script(Script.say("one two three", gap_s=0.04))
    assert ask("acompletion stream", to(server, timeout=0.1)).text == "one two three"
    server.script(Script.say("one two three", hang_after=2))
    seen = ask("acompletion stream", to(server, timeout=0.1))
    assert seen.text == "one"
    assert type(mapped(seen.error)) is litellm.Timeout


KINDS = {
    errors.ConfigurationError("x"): litellm.BadRequestError,
    errors.QueueFull("x"): litellm.RateLimitError,
    errors.QueueTimeout("x"): litellm.RateLimitError,
    errors.CallTimeout("x", limit="idle_s"): litellm.Timeout,
    errors.ConnectionFailed("x"): litellm.APIConnectionError,
    errors.Truncated("x"): litellm.APIConnectionError,
    errors.ProtocolError("x"): litellm.BadGatewayError,
    errors.MessageTooBig("x"): litellm.BadGatewayError,
    errors.ServerError("x", status=302): litellm.BadRequestError,
    errors.ServerError("x", status=200, code="503"): litellm.ServiceUnavailableError,
    errors.SpanwireError("x"): litellm.InternalServerError,
}


@pytest.mark.parametrize("error", KINDS, ids=lambda error: type(error).__name__)
def test_every_error_has_a_class_that_litellm_passes_on(error: errors.SpanwireError) -> None:
    found: dict[str, Any] = {}
    made = translated(error, "m", "http://user:secret@127.0.0.1:1/v1?key=secret", found)
    assert type(made) is KINDS[error]
    assert isinstance(made, tuple(litellm.LITELLM_EXCEPTION_TYPES))
    assert report(made) is found
    request = made.response.request if hasattr(made, "response") else None
    assert "secret" not in f"{made} {request and request.url}"


def test_retry_after_is_whole_seconds_rounded_up() -> None:
    error = errors.server_error("x", status=429, retry_after_s=0.25, headers={"retry-after-ms": "250"})
    made: Any = translated(error, "m", None, {})
    assert made.response.headers["retry-after"] == "1"
    assert made.litellm_response_headers["retry-after"] == "1"
