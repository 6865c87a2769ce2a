"""Connections: dialled and spoken by :mod:`spanwire.net`; here is what HTTP means to a call."""

from __future__ import annotations

import time
from collections.abc import Hashable

from spanwire.calls import Call
from spanwire.endpoint import Endpoint
from spanwire.net.dial import dial, route_of
from spanwire.net.http1 import HTTP1Connection
from spanwire.net.proxies import Proxy
from spanwire.net.tls import context_for
from spanwire.transport import Attempt, Connection, Exchange

from .codec import Codec
from .exchange import ForwardedExchange, HTTPExchange
from .request import Outline, host_header

__all__ = ["SSEConnection", "SSETransport"]


class SSETransport:
    """Makes connections for ``http://`` and ``https://`` endpoints."""

    def expect(self, endpoint: Endpoint) -> int:
        """One exchange at a time."""
        return 1

    def key(self, endpoint: Endpoint) -> Hashable:
        """HTTP sends credentials with each request, so endpoints that differ in them share connections.

        The proxy is a part of it, as the environment names it when the endpoint is first used.
        """
        if endpoint.secure:
            context_for(endpoint.tls)  # refuses bad files here; reading the system's certificates takes a while
        return endpoint.connection_key(), route_of(endpoint, forward=True).key

    async def connect(self, endpoint: Endpoint, attempt: Attempt) -> Connection:
        """Dial; marks dns, tcp, proxy, tls. Raises ConnectionFailed, ConfigurationError."""
        route = route_of(endpoint, forward=True)
        http = await dial(endpoint, attempt.marks, lambda: HTTP1Connection(endpoint.address), route=route)
        http.set_connect_rtt(attempt.marks.rtt_ns, through_proxy=route.proxy is not None)
        if route.proxy is None or route.how != "forward":
            return SSEConnection(http)
        outline = Outline(prefix=f"http://{host_header(endpoint)}", more=route.proxy.headers)
        return SSEConnection(http, outline, forwarded_by=route.proxy)


class SSEConnection:
    """One HTTP/1.1 connection: one exchange at a time.

    Args:
        forwarded_by: the proxy at its other end, if that reads the requests and sends them on.
    """

    __slots__ = ("_forwarded_by", "_outline", "http")

    capacity = 1
    protocol = "http/1.1"
    engine = "spanwire"

    def __init__(
        self, http: HTTP1Connection, outline: Outline | None = None, *, forwarded_by: Proxy | None = None
    ) -> None:
        self.http = http
        self._outline = outline or Outline()
        self._forwarded_by = forwarded_by

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
        decoder = codec.decoder(call, streamed=attempt.streamed)
        if self._forwarded_by is None:
            exchange = HTTPExchange(self.http, codec, decoder, attempt)
        else:
            exchange = ForwardedExchange(self.http, codec, decoder, attempt, self._forwarded_by)
        encoded_ns = time.perf_counter_ns()
        marks.parts.append(("encode", begin_ns, encoded_ns))
        marks.begin("send", encoded_ns)
        if self.http.send(request, exchange):
            exchange.on_sent()
        return exchange
