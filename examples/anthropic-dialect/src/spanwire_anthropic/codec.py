"""PURE: what a dialect on HTTP with server-sent events has to be, for ``POST /v1/messages``.

How a call is written is in :mod:`.request`, how an answer is read in :mod:`.answer`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

from spanwire import Call, Endpoint
from spanwire.errors import ConfigurationError, ServerError, server_error

from .answer import MessageDecoder, error_of, object_of
from .request import body_of

__all__ = ["OPTIONS", "MessagesCodec", "Request"]

#: Names in ``Endpoint.options``. ``anthropic_version``: of the API (default ``2023-06-01``, the only one since then).
#: ``max_tokens``: sent where the call has none, since the API asks for one (default 4096).
OPTIONS = frozenset({"anthropic_version", "max_tokens"})
_VERSION = "2023-06-01"
_MAX_TOKENS = 4096


class Request(NamedTuple):
    """The path below the endpoint's URL, the body, and headers of this dialect."""

    path: str
    body: bytes
    headers: Mapping[str, str]


class MessagesCodec:
    """One object for all calls: it keeps nothing."""

    def encode(self, call: Call, endpoint: Endpoint, *, streamed: bool) -> Request:
        """Raises ConfigurationError for what the API has no words for."""
        try:
            body = body_of(call, max_tokens=endpoint.options.get("max_tokens", _MAX_TOKENS), streamed=streamed)
            data = json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
        except ConfigurationError as error:
            error.endpoint = endpoint.address
            raise
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigurationError(
                f"the call cannot be written as JSON: {error}", endpoint=endpoint.address
            ) from error
        path = "/messages" if endpoint.path.endswith("/v1") else "/v1/messages"
        return Request(path, data, {"anthropic-version": str(endpoint.options.get("anthropic_version", _VERSION))})

    def credentials(self, api_key: str) -> Mapping[str, str]:
        return {"x-api-key": api_key}

    def decoder(self, call: Call, *, streamed: bool) -> MessageDecoder:
        return MessageDecoder()

    def error(self, status: int, headers: Mapping[str, str], body: bytes, retry_after_s: float | None) -> ServerError:
        more = {"status": status, "headers": dict(headers), "retry_after_s": retry_after_s}
        found = object_of(body)
        if found is None or "error" not in found:  # not the API's: a proxy's page, or nothing
            return server_error(f"status {status}", **more)  # type: ignore[arg-type]
        kind, message = error_of(found["error"])
        return server_error(message, code=kind, **more)  # type: ignore[arg-type]
