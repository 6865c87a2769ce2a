"""PURE: what went wrong, as a Responses server says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ...errors import ServerError, server_error
from ..openai_chat import error_in
from ..retry_after import retry_after_s

__all__ = ["response_error"]

#: What a code or type without a status means, as the status that says the same. Sources: ``ResponseError.code`` and
#: ``openai/lib/responses_websocket`` of OpenAI's client, the retry advice of openai-agents, OpenAI's list of error codes.
#: Every other code of a failed response is about the request: sending it again cannot help.
_STATUS: Mapping[str, int] = {
    "authentication_error": 401,
    "invalid_api_key": 401,
    "permission_error": 403,
    "rate_limit_error": 429,
    "rate_limit_exceeded": 429,
    "insufficient_quota": 429,
    "internal_error": 500,
    "internal_server_error": 500,
    "server_error": 500,
    "vector_store_timeout": 500,
    "overloaded_error": 503,
    "server_is_overloaded": 503,
    "service_unavailable": 503,
    "slow_down": 503,
    "invalid_prompt": 400,
    "invalid_request_error": 400,
    "not_found_error": 404,
}


def response_error(data: bytes, *, status: int | None = None, **more: Any) -> ServerError:
    """The error that a body, an event or a failed response describes.

    Read are ``{"type": "error", "error": {...}, "status"?}`` (WebSocket), ``{"type": "error", "code", "message"}``
    (server-sent events), ``{"type": "response.failed", "response": {"error": {...}}}``, a response object with an
    ``error``, and all that :func:`spanwire.wire.openai_chat.error_in` reads.

    Args:
        data: JSON, or whatever stands in its place.
        status: the HTTP status, if there is one; else that of the event.
        more: further fields of the error: ``headers``, ``retry_after_s``. ``error.headers`` of an event fill in for them.

    Returns:
        The error of the class that fits the status; without one, the code or type decides class and ``retryable``, and
        ``status`` stays None. ``code`` is the server's own, such as ``previous_response_not_found``.
    """
    event = _mapping(data)
    inner = event.get("error")
    response = event if event.get("object") == "response" else event.get("response")
    if not inner and isinstance(response, dict):
        inner = response.get("error")
        if not inner:
            inner = {"message": _without_error(response)}
        data = msgspec.json.encode({"error": inner})
    if not isinstance(inner, dict):
        inner = event  # flat
    if status is None and type(event.get("status")) is int:
        status = event["status"]
    headers = _headers(inner.get("headers"))
    if headers:
        more["headers"] = {**headers, **(more.get("headers") or {})}
        if more.get("retry_after_s") is None:
            more["retry_after_s"] = retry_after_s(headers)
    found = error_in(_without_type(event) if event and inner is event else data, status=status, **more)
    if status is None or not 300 <= status < 600:
        meant = _STATUS.get(str(inner.get("code"))) or _STATUS.get(str(inner.get("type")))
        if meant is not None and type(found) is ServerError and not found.retryable:
            found = server_error(
                found.message,
                status=meant,
                code=found.code,
                retry_after_s=found.retry_after_s,
                headers=found.headers,
            )
            found.status = status
    return found


def _mapping(data: bytes) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _without_type(event: dict[str, Any]) -> bytes:
    """Its type is that of the event and no code."""
    return msgspec.json.encode({name: value for name, value in event.items() if (name, value) != ("type", "error")})


def _without_error(response: Mapping[str, Any]) -> str:
    return f"the response has the status {response.get('status')!r:.40}, and no error says why"


def _headers(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        return {}
    return {str(name).lower(): str(text) for name, text in value.items() if isinstance(text, (str, int, float))}
