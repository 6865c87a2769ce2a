"""Errors in every form in which Responses servers send them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from spanwire.errors import AuthenticationFailed, BadRequest, Overloaded, RateLimited, ServerError
from spanwire.testing.responses_events import error_event
from spanwire.wire.openai_responses import ResponsesDecoder, response_error


def _error(event: Any, **more: Any) -> ServerError:
    return response_error(json.dumps(event).encode(), **more)


@pytest.mark.parametrize("nested", [True, False])
def test_nested_and_flat_events(nested: bool) -> None:
    event = error_event("Previous response not found.", code="previous_response_not_found", nested=nested)
    with pytest.raises(ServerError) as caught:
        ResponsesDecoder().event(b"", json.dumps(event).encode())
    error = caught.value
    assert (error.code, error.message) == ("previous_response_not_found", "Previous response not found.")
    assert error.status is None


def test_an_events_status_and_headers() -> None:
    event = error_event(
        "slow down", code="rate_limit_exceeded", status=429, headers={"Retry-After": "7", "X-Request-Id": "r"}
    )
    error = _error(event)
    assert isinstance(error, RateLimited)
    assert (error.status, error.retry_after_s, error.retryable) == (429, 7.0, True)
    assert error.headers == {"retry-after": "7", "x-request-id": "r"}
    error = _error(event, status=503, retry_after_s=2.0, headers={"x-request-id": "q"})
    assert isinstance(error, Overloaded)
    assert (error.status, error.retry_after_s, error.headers["x-request-id"]) == (503, 2.0, "q")


@pytest.mark.parametrize(
    ("fields", "kind", "retryable", "code"),
    [
        ({"code": "server_is_overloaded"}, Overloaded, True, "server_is_overloaded"),
        ({"type": "server_error", "code": None}, ServerError, True, "server_error"),
        ({"code": "server_error"}, ServerError, True, "server_error"),
        ({"code": "rate_limit_exceeded"}, RateLimited, True, "rate_limit_exceeded"),
        ({"code": 429}, RateLimited, True, 429),
        ({"code": "invalid_api_key"}, AuthenticationFailed, False, "invalid_api_key"),
        ({"type": "invalid_request_error", "code": "unknown"}, BadRequest, False, "unknown"),
        ({"code": "image_too_large"}, ServerError, False, "image_too_large"),
        ({"type": "invalid_request_error"}, BadRequest, False, "invalid_request_error"),
    ],
)
def test_without_a_status_the_code_decides(
    fields: dict[str, Any], kind: type[ServerError], retryable: bool, code: Any
) -> None:
    forms: list[Any] = [{"type": "error", "error": {"message": "m", **fields}}, {"error": {"message": "m", **fields}}]
    forms.append({"type": "response.failed", "response": {"status": "failed", "error": {"message": "m", **fields}}})
    for form in forms:
        error = _error(form)
        assert type(error) is kind
        assert (error.retryable, error.code, error.status, error.message) == (retryable, code, None, "m")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error":{"message":"no such model"}}', "no such model"),
        (b'{"error":"no such model"}', "no such model"),
        (b'{"detail":"no such model"}', "no such model"),
        (b'{"type":"error","message":"no such model"}', "no such model"),
        (b"no such model", "no such model"),
        (b'[{"error":{"message":"no such model"}}]', "no such model"),
        (b"<html>", "404 Not Found"),
    ],
)
def test_bodies_with_a_status(body: bytes, message: str) -> None:
    error = response_error(body, status=404)
    assert isinstance(error, BadRequest)
    assert (error.message, error.status) == (message, 404)


def test_a_failed_response_without_an_error_says_so() -> None:
    for form in (
        {"type": "response.failed", "response": {"status": "failed"}},
        {"object": "response", "status": "cancelled"},
    ):
        error = _error(form)
        assert "the response has the status" in error.message
        assert error.code is None
