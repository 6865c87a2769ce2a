"""Connections: dialled and spoken by :mod:`spanwire.net`; here is what HTTP means to a call."""

from __future__ import annotations

import time
from collections.abc import Hashable

from spanwire.calls import Call
from spanwire.endpoint import Endpoint
from spanwire.net.dial import dial
from spanwire.net.http1 import HTTP1Connection
from spanwire.net.tls import context_for
from spanwire.transport import Attempt, Connection, Exchange

from .client import CAPACITY, ClientConnection, check_client
from .codec import Codec
from .exchange import HTTPExchange
from .request import Outline

__all__ = ["SSEConnection", "SSETransport"]


class SSETransport:
    """Makes connections for ``http://`` and ``https://`` endpoints."""

    def expect(self, endpoint: Endpoint) -> int:
        """One exchange at a time; any number on a client that the user brings."""
        return CAPACITY if "http_client" in endpoint.options else 1

    def key(self, endpoint: Endpoint) -> Hashable:
        """HTTP sends credentials with each request, so endpoints that differ in them share connections."""
        if "http_client" in endpoint.options:
            check_client(endpoint)
        elif endpoint.secure:
            context_for(endpoint.tls)  # refuses bad files here; reading the system's certificates takes a while
        return endpoint.connection_key()

    async def connect(self, endpoint: Endpoint, attempt: Attempt) -> Connection:
        """Dial; marks dns, tcp, tls. Raises ConnectionFailed, ConfigurationError."""
        if "http_client" in endpoint.options:
            return ClientConnection(endpoint)  # it connects by itself, when it is first used
        http = await dial(endpoint, attempt.marks, lambda: HTTP1Connection(endpoint.address))
        http.set_connect_rtt(attempt.marks.rtt_ns)
        return SSEConnection(http)


class SSEConnection:
    """One HTTP/1.1 connection: one exchange at a time."""

    __slots__ = ("_outline", "http")

    capacity = 1
    protocol = "http/1.1"
    engine = "spanwire"

    def __init__(self, http: HTTP1Connection, outline: Outline | None = None) -> None:
        self.http = http
        self._outline = outline or Outline()

    def usable(self) -> bool:
        return self.http.usable()

    async def aclose(self) -> None:
        await self.http.aclose()

    def abort(self) -> None:
        self.http.abort()

    async def start(self, call: Call, attempt: Attempt) -> Exchange:
        """Encode and write the request; marks encode and send."""
        begin_ns = time.perf_counter_ns()
        marks = attempt.marks
        assert attempt.dialect is not None
        codec: Codec = attempt.dialect.codec
        request = self._outline.http1(call, attempt)
        exchange = HTTPExchange(self.http, codec, codec.decoder(call, streamed=attempt.streamed), attempt)
        encoded_ns = time.perf_counter_ns()
        marks.parts.append(("encode", begin_ns, encoded_ns))
        marks.begin("send", encoded_ns)
        if self.http.send(request, exchange):
            exchange.on_sent()
        return exchange
