"""``dialect="raw"``: a method that takes and gives a stream of messages, whose bytes are the caller's business.

Nothing is known of turns, so that there are no spans.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from spanwire.calls import SessionEvent
from spanwire.endpoint import Endpoint
from spanwire.errors import ConfigurationError, SpanwireError
from spanwire.transport import Turn

from .session import OPTIONS as SESSION_OPTIONS
from .session import Outgoing

__all__ = ["OPTIONS", "Raw"]

#: ``method``: the full name of the method, such as ``/package.Service/Method``.
OPTIONS = SESSION_OPTIONS | {"method"}
#: Source: gRPC over HTTP/2, ``Path``: "/" Service-Name "/" method name; names are protobuf's.
_METHOD = re.compile(r"/[A-Za-z_][\w.]*/[A-Za-z_]\w*", re.ASCII)


class Raw:
    """Any method of two streams."""

    learn = None
    learns_by = ()

    def method(self, endpoint: Endpoint) -> str:
        """What the option ``method`` says."""
        name = endpoint.options.get("method")
        if not isinstance(name, str) or not _METHOD.fullmatch(name):
            raise ConfigurationError(
                "a session of the dialect 'raw' needs options={'method': '/package.Service/Method'}"
                + ("" if name is None else f", and not {name!r:.60}"),
                endpoint=endpoint.address,
            )
        return name

    def credentials(self, api_key: str) -> Mapping[str, str]:
        return {"authorization": f"Bearer {api_key}"}

    def schema(self, endpoint: Endpoint, model: str, on_turn: Callable[[Turn], None], rtt_ns: int | None) -> _RawSchema:
        return _RawSchema(endpoint.address)


class _RawSchema:
    def __init__(self, address: str) -> None:
        self._address = address

    def encode(self, message: Mapping[str, Any] | str | bytes) -> Outgoing:
        """Bytes as they are, text as UTF-8, a mapping as JSON."""
        if isinstance(message, bytes | bytearray | memoryview):
            return Outgoing(bytes(message))
        try:
            return Outgoing(message.encode() if isinstance(message, str) else msgspec.json.encode(message))
        except (TypeError, ValueError, UnicodeEncodeError, RecursionError) as error:
            raise ConfigurationError(
                f"the message cannot be written: {error}; send bytes, a text, or a mapping", endpoint=self._address
            ) from error

    def sent(self, outgoing: Outgoing, at_ns: int) -> None:
        """Nothing is known of it."""

    def event(self, data: bytes, arrival_ns: int) -> SessionEvent:
        """gRPC knows no text: what comes are bytes."""
        return SessionEvent(raw=data, binary=True)

    def learned(self, facts: Any) -> None:
        """There is nothing to learn."""

    def ended(self, at_ns: int, error: SpanwireError | None) -> None:
        """There are no turns."""
