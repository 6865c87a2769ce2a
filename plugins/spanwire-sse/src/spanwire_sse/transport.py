"""Connections: dialled and spoken by :mod:`spanwire.net`; here is what HTTP means to a call."""

from __future__ import annotations

import time
from collections.abc import Hashable

from spanwire.calls import Call
from spanwire.endpoint import Endpoint
from spanwire.errors import ConfigurationError
from spanwire.net.dial import dial
from spanwire.net.http1 import HTTP1Connection
from spanwire.net.tls import context_for
from spanwire.transport import Attempt, Connection, Exchange

from .client import CAPACITY, ClientConnection, check_client
from .codec import Codec
from .exchange import HTTPExchange
from .request import Outline

__all__ = ["SSEConnection", "SSETransport"]


#: Exchanges that an HTTP/2 connection is expected to carry before it is there: as many as it will carry at most.
_EXPECTED_STREAMS = 100
_ALPN = {"1.1": ("http/1.1",), "2": ("h2",), "auto": ("h2", "http/1.1")}


class SSETransport:
    """Makes connections for ``http://`` and ``https://`` endpoints.

    ``Endpoint(options={"http_client": client})``: an ``httpx`` or ``httpx2`` client carries the calls, see
    :mod:`spanwire_sse.client`. ``Endpoint(options={"http_version": ...})``: ``"1.1"`` (the default), ``"2"`` (nothing else will do), or ``"auto"``
    (the server chooses in the TLS handshake; without TLS there is none, and it is 1.1).
    """

    def __init__(self) -> None:
        self._learned: dict[Hashable, int] = {}  # capacity of the last connection, where it is not always 1

    def expect(self, endpoint: Endpoint) -> int:
        """Exchanges at once: 1 over HTTP/1.1; over HTTP/2 what the server allowed, or chose, the last time."""
        if "http_client" in endpoint.options:
            return CAPACITY
        version = _http_version(endpoint)
        return 1 if version == "1.1" else self._learned.get(_key(endpoint, version), _EXPECTED_STREAMS)

    def key(self, endpoint: Endpoint) -> Hashable:
        """HTTP sends credentials with each request, so endpoints that differ in them share connections."""
        if "http_client" in endpoint.options:
            check_client(endpoint)
            return endpoint.connection_key()
        version = _http_version(endpoint)
        if version != "1.1":
            _load_http2(endpoint)
        if endpoint.secure:
            # Refuses bad files here; reading the system's certificates takes a while.
            context_for(endpoint.tls, alpn=_ALPN[version])
        return _key(endpoint, version)

    async def connect(self, endpoint: Endpoint, attempt: Attempt) -> Connection:
        """Dial; marks dns, tcp, tls. Raises ConnectionFailed, ConfigurationError."""
        if "http_client" in endpoint.options:
            return ClientConnection(endpoint)  # it connects by itself, when it is first used
        version = _http_version(endpoint)
        if version == "1.1":
            http = await dial(endpoint, attempt.marks, lambda: HTTP1Connection(endpoint.address))
            http.set_connect_rtt(attempt.marks.rtt_ns)
            return SSEConnection(http)
        from spanwire.net.http2 import HTTP2Connection

        from .multiplexed import HTTP2SSEConnection, dial_http2, dial_negotiated

        key = _key(endpoint, version)
        learned = self._learned.get(key, _EXPECTED_STREAMS)

        def learn(capacity: int) -> None:
            self._learned[key] = capacity

        chosen: HTTP1Connection | HTTP2Connection
        if version == "2":
            chosen = await dial_http2(endpoint, attempt, capacity=learned, on_capacity=learn)
        else:
            before = learned if learned > 1 else _EXPECTED_STREAMS
            chosen = await dial_negotiated(endpoint, attempt, capacity=before, on_capacity=learn)
        chosen.set_connect_rtt(attempt.marks.rtt_ns)
        if isinstance(chosen, HTTP1Connection):
            learn(1)
            return SSEConnection(chosen)
        return HTTP2SSEConnection(chosen)


def _http_version(endpoint: Endpoint) -> str:
    """``"1.1"``, ``"2"``, or ``"auto"`` where the server can be asked."""
    version = endpoint.options.get("http_version", "1.1")
    if not isinstance(version, str) or version not in _ALPN:
        raise ConfigurationError(
            f'Endpoint.options: http_version must be "1.1", "2" or "auto", not {version!r:.40}',
            endpoint=endpoint.address,
        )
    return "1.1" if version == "auto" and not endpoint.secure else version


def _load_http2(endpoint: Endpoint) -> None:
    """Here and not in the first connect, where a caller would wait for it."""
    try:
        import h2.connection  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(
            "Endpoint.options: http_version needs the library h2: pip install 'spanwire[http2]'",
            endpoint=endpoint.address,
        ) from error
    from . import multiplexed  # noqa: F401


def _key(endpoint: Endpoint, version: str) -> Hashable:
    return (endpoint.connection_key(), version)


class SSEConnection:
    """One HTTP/1.1 connection: one exchange at a time."""

    __slots__ = ("_outline", "http", "usable")

    capacity = 1
    protocol = "http/1.1"
    engine = "spanwire"

    def __init__(self, http: HTTP1Connection, outline: Outline | None = None) -> None:
        self.http = http
        self._outline = outline or Outline()
        self.usable = http.usable  # asked several times for each call

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
