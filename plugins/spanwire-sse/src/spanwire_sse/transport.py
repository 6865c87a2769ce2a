"""Connections: dialled and spoken by :mod:`spanwire.net`; here is what HTTP means to a call."""

from __future__ import annotations

import time
from collections.abc import Hashable

from spanwire.calls import Call
from spanwire.endpoint import Endpoint
from spanwire.errors import ConfigurationError
from spanwire.net.dial import dial, route_of
from spanwire.net.http1 import HTTP1Connection
from spanwire.net.proxies import Proxy
from spanwire.net.tls import context_for
from spanwire.transport import Attempt, Connection, Exchange

from .client import CAPACITY, ClientConnection, check_client
from .codec import Codec
from .exchange import ForwardedExchange, HTTPExchange
from .request import Outline, host_header

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
        """HTTP sends credentials with each request, so endpoints that differ in them share connections.

        The proxy is a part of it, as the environment names it when the endpoint is first used.
        """
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
        """Dial; marks dns, tcp, proxy, tls. Raises ConnectionFailed, ConfigurationError."""
        if "http_client" in endpoint.options:
            return ClientConnection(endpoint)  # it connects by itself, when it is first used
        version = _http_version(endpoint)
        if version == "1.1":
            return await self._connect_http1(endpoint, attempt)
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
        chosen.set_connect_rtt(attempt.marks.rtt_ns, through_proxy=route_of(endpoint).proxy is not None)
        if isinstance(chosen, HTTP1Connection):
            learn(1)
            return SSEConnection(chosen)
        return HTTP2SSEConnection(chosen)

    @staticmethod
    async def _connect_http1(endpoint: Endpoint, attempt: Attempt) -> SSEConnection:
        route = route_of(endpoint, forward=True)
        http = await dial(endpoint, attempt.marks, lambda: HTTP1Connection(endpoint.address), route=route)
        http.set_connect_rtt(attempt.marks.rtt_ns, through_proxy=route.proxy is not None)
        if route.proxy is None or route.how != "forward":
            return SSEConnection(http)
        outline = Outline(prefix=f"http://{host_header(endpoint)}", more=route.proxy.headers)
        return SSEConnection(http, outline, forwarded_by=route.proxy)


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
    return endpoint.connection_key(), version, route_of(endpoint, forward=version == "1.1").key


class SSEConnection:
    """One HTTP/1.1 connection: one exchange at a time.

    Args:
        forwarded_by: the proxy at its other end, if that reads the requests and sends them on.
    """

    __slots__ = ("_forwarded_by", "_outline", "http", "usable")

    capacity = 1
    protocol = "http/1.1"
    engine = "spanwire"

    def __init__(
        self, http: HTTP1Connection, outline: Outline | None = None, *, forwarded_by: Proxy | None = None
    ) -> None:
        self.http = http
        self._outline = outline or Outline()
        self.usable = http.usable  # asked several times for each call
        self._forwarded_by = forwarded_by

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
