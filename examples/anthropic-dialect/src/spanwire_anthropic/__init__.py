"""Anthropic's Messages API as a dialect of spanwire: ``Endpoint("https://api.anthropic.com", dialect="anthropic")``."""

from __future__ import annotations

from spanwire import hookimpl
from spanwire.transport import Dialect

from .codec import OPTIONS, MessagesCodec

__all__ = ["MessagesCodec", "register_dialects"]


@hookimpl
def register_dialects() -> list[Dialect]:
    """``anthropic``, on HTTP with server-sent events."""
    return [Dialect(transport="sse", name="anthropic", codec=MessagesCodec(), options=OPTIONS)]
