"""Lets the server choose the version of HTTP, by ALPN (RFC 7301) in the TLS handshake."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from .http1 import HTTP1Connection
from .http2 import HTTP2Connection

__all__ = ["NegotiatedConnection", "negotiated"]


class NegotiatedConnection(asyncio.Protocol):
    """Stands in for a connection until the handshake has shown which one it is to be. For :func:`~.dial.dial`.

    Args:
        http2: makes one of HTTP/2.

    Attributes:
        http: the connection, from the end of the handshake on.
    """

    __slots__ = ("_address", "_http2", "http")

    http: HTTP1Connection | HTTP2Connection

    def __init__(self, address: str, http2: Callable[[], HTTP2Connection]) -> None:
        self._address = address
        self._http2 = http2

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.http = self._http2() if negotiated(transport) == "h2" else HTTP1Connection(self._address)
        cast(asyncio.Transport, transport).set_protocol(self.http)
        self.http.connection_made(transport)


def negotiated(transport: asyncio.BaseTransport) -> str | None:
    """What the server has chosen; None where it chose nothing, or there is no TLS."""
    tls = transport.get_extra_info("ssl_object")
    return None if tls is None else tls.selected_alpn_protocol()
