"""Calls over HTTP/2: many at once on one connection, each on a stream. Imported when first used, since it needs ``h2``."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable

from spanwire.calls import Call
from spanwire.endpoint import Endpoint
from spanwire.errors import ConnectionFailed
from spanwire.net.dial import dial
from spanwire.net.http1 import HTTP1Connection
from spanwire.net.http2 import HTTP2Connection
from spanwire.net.negotiate import NegotiatedConnection
from spanwire.transport import Attempt, Exchange

from .codec import Codec
from .exchange import HTTPExchange
from .request import Outline, host_header

__all__ = ["HTTP2SSEConnection", "dial_http2", "dial_negotiated"]


async def dial_http2(
    endpoint: Endpoint, attempt: Attempt, *, capacity: int, on_capacity: Callable[[int], None]
) -> HTTP2Connection:
    """A connection that speaks HTTP/2: agreed on by ALPN, or without TLS by prior knowledge (RFC 9113 section 3.3).

    ``capacity`` and ``on_capacity``: see :class:`~spanwire.net.http2.HTTP2Connection`.

    Raises:
        ConnectionFailed: also when the server does not choose HTTP/2; with phase ``tls``, and not retryable.
    """

    def http2() -> HTTP2Connection:
        return HTTP2Connection(endpoint.address, capacity=capacity, on_capacity=on_capacity)

    if not endpoint.secure:
        return await dial(endpoint, attempt.marks, http2)
    try:
        found = await dial(endpoint, attempt.marks, lambda: NegotiatedConnection(endpoint.address, http2), alpn=("h2",))
    except ConnectionFailed as error:
        cause = error.__cause__
        # The alert of RFC 7301 section 3.2; some releases of OpenSSL have no name for it, only a text.
        if isinstance(cause, ssl.SSLError) and "no application protocol" in str(cause).lower().replace("_", " "):
            raise _not_spoken(endpoint) from cause
        raise
    if isinstance(found.http, HTTP1Connection):
        found.http.abort()
        raise _not_spoken(endpoint)
    return found.http


async def dial_negotiated(
    endpoint: Endpoint, attempt: Attempt, *, capacity: int, on_capacity: Callable[[int], None]
) -> HTTP1Connection | HTTP2Connection:
    """A connection of the version that the server chooses by ALPN; HTTP/1.1 where it chooses none."""

    def http2() -> HTTP2Connection:
        return HTTP2Connection(endpoint.address, capacity=capacity, on_capacity=on_capacity)

    stand_in = await dial(
        endpoint, attempt.marks, lambda: NegotiatedConnection(endpoint.address, http2), alpn=("h2", "http/1.1")
    )
    return stand_in.http


def _not_spoken(endpoint: Endpoint) -> ConnectionFailed:
    return ConnectionFailed(
        'the server does not speak HTTP/2 here; use options={"http_version": "auto"}, or leave the option out',
        endpoint=endpoint.address,
        phase="tls",
        retryable=False,
    )


class HTTP2SSEConnection:
    """One HTTP/2 connection: as many exchanges at once as the server allows.

    An exchange has left when its stream is closed on both sides; until then the server counts it. After the terminal
    event that is the end of the stream, commonly in the same read; an overdue one is reset, and nothing else with it.
    """

    __slots__ = ("_outline", "http")

    protocol = "h2"
    engine = "spanwire"

    def __init__(self, http: HTTP2Connection, outline: Outline | None = None) -> None:
        self.http = http
        self._outline = outline or Outline()

    @property
    def capacity(self) -> int:
        return self.http.capacity

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
        endpoint = attempt.endpoint
        assert attempt.dialect is not None
        codec: Codec = attempt.dialect.codec
        target, more, body = self._outline.make(call, attempt)
        headers = [
            (":method", "POST"),
            (":scheme", endpoint.origin.scheme),
            (":authority", host_header(endpoint)),
            (":path", target),
            *more.items(),
            ("content-length", str(len(body))),
        ]
        stream = self.http.stream()
        exchange = HTTPExchange(stream, codec, codec.decoder(call, streamed=attempt.streamed), attempt)
        encoded_ns = time.perf_counter_ns()
        marks.parts.append(("encode", begin_ns, encoded_ns))
        marks.begin("send", encoded_ns)
        stream.send(headers, body, exchange)
        return exchange
