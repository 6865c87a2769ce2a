"""``dialect="raw"``: any schema, text or binary. Nothing is known of its turns, so that there are no spans."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from spanwire.calls import SessionEvent
from spanwire.errors import SpanwireError
from spanwire.transport import Turn

__all__ = ["Raw"]


class _Named(msgspec.Struct, gc=False):
    type: Any = None


_decode = msgspec.json.Decoder(_Named).decode


class Raw:
    """The endpoint's path is the target's."""

    def path(self, base: str) -> str:
        return base or "/"

    def schema(self, on_turn: Callable[[Turn], None], rtt_ns: Callable[[], int | None]) -> _RawSchema:
        return _RawSchema()


class _RawSchema:
    def event(self, data: bytes | bytearray, text: bool, arrival_ns: int) -> SessionEvent:
        raw = bytes(data)
        if not text:
            return SessionEvent(raw=raw, binary=True)
        name = ""
        if raw[:1] == b"{":
            try:
                found = _decode(raw).type
            except (msgspec.DecodeError, RecursionError):
                found = None
            name = found if isinstance(found, str) else ""
        return SessionEvent(type=name, raw=raw)

    def sent(self, message: Mapping[str, Any] | str | bytes, at_ns: int) -> None:
        """Nothing is known of it."""

    def ended(self, at_ns: int, error: SpanwireError | None) -> None:
        """There are no turns."""
