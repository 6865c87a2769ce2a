"""Errors of spanwire as LiteLLM's own: its router decides by their class, status and ``Retry-After``.

LiteLLM passes its own exceptions on as they are; anything else it would map by the words of the message.
"""

from __future__ import annotations

import math
from typing import Any
from urllib.parse import urlsplit

import httpx  # LiteLLM's exceptions carry its responses
import litellm

from spanwire import errors

from .reports import KEY, fill

__all__ = ["translated"]

#: Of an error inside a 200 answer that gives no number: the server's own failure.
_UNKNOWN = 500
#: Headers that are not true of a response without the body.
_OF_THE_BODY = frozenset({"content-length", "content-encoding", "transfer-encoding"})


def translated(error: errors.SpanwireError, model: str, url: str | None, found: dict[str, Any]) -> Exception:
    """LiteLLM's exception for an error of ours. To be raised ``from`` it."""
    status = _status(error)
    headers = _headers(error)
    mapped: Exception = _mapped(error, status, f"SpanwireException - {error}", model, _response(status, headers, url))
    fill(found, error.timeline)
    setattr(mapped, KEY, found)
    if headers:  # by which the router waits, and the proxy answers, also when a stream's error wraps this one
        mapped.litellm_response_headers = httpx.Headers(headers)  # type: ignore[attr-defined]
    return mapped


def _status(error: errors.SpanwireError) -> int:
    if isinstance(error, errors.ServerError):
        if error.status is not None and error.status >= 300:
            return error.status
        code = error.code
        if isinstance(code, str) and code.isascii() and code.isdigit():
            code = int(code[:4])
        return code if isinstance(code, int) and 400 <= code < 600 else _UNKNOWN
    if isinstance(error, errors.ConfigurationError):
        return 400
    if isinstance(error, errors.CallTimeout):
        return 408
    if isinstance(error, errors.NoSlot):
        return 429
    return 502 if isinstance(error, errors.ProtocolError) else 500


def _headers(error: errors.SpanwireError) -> dict[str, str]:
    if not isinstance(error, errors.ServerError):
        return {}
    headers = {name: value for name, value in error.headers.items() if name not in _OF_THE_BODY}
    if error.retry_after_s is not None:  # LiteLLM reads whole seconds, and no other header
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
    return headers


def _response(status: int, headers: dict[str, str], url: str | None) -> httpx.Response:
    parts = urlsplit(url or "")
    shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}" if parts.netloc else "http://spanwire"
    return httpx.Response(status, headers=headers, request=httpx.Request("POST", shown))


def _mapped(error: errors.SpanwireError, status: int, message: str, model: str, response: httpx.Response) -> Any:
    more: dict[str, Any] = {"message": message, "model": model, "llm_provider": "spanwire"}
    if isinstance(error, (errors.ConnectionFailed, errors.Truncated)):
        return litellm.APIConnectionError(**more)
    if status in {408, 504}:
        return litellm.Timeout(**more, exception_status_code=status, headers=dict(response.headers))
    classes = {
        401: litellm.AuthenticationError,
        403: litellm.PermissionDeniedError,
        404: litellm.NotFoundError,
        422: litellm.UnprocessableEntityError,
        429: litellm.RateLimitError,
        500: litellm.InternalServerError,
        502: litellm.BadGatewayError,
        503: litellm.ServiceUnavailableError,
        529: litellm.ServiceUnavailableError,  # "overloaded", from those who have a number of their own for it
    }
    if status in classes:
        return classes[status](**more, response=response)
    if status < 500:
        return _bad_request(error, message)(**more, response=response)
    return litellm.APIError(status_code=status, request=response.request, **more)


def _bad_request(error: errors.SpanwireError, message: str) -> Any:
    """The router has fallbacks of their own for prompts that are too long, and for refused ones."""
    from litellm.litellm_core_utils import exception_mapping_utils

    code = getattr(error, "code", None)
    checkers = getattr(exception_mapping_utils, "ExceptionCheckers", None)
    for word, name, cls in (
        ("context_length_exceeded", "is_error_str_context_window_exceeded", litellm.ContextWindowExceededError),
        ("content_policy_violation", "is_azure_content_policy_violation_error", litellm.ContentPolicyViolationError),
    ):
        check = getattr(checkers, name, None)
        if code == word or (check is not None and check(message)):
            return cls
    return litellm.BadRequestError
