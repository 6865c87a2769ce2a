"""Connections: dialled and spoken by :mod:`spanwire.net`; here is what HTTP means to a call."""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping
from importlib import metadata
from urllib.parse import urlencode

from spanwire.calls import Call
from spanwire.endpoint import Endpoint, check_headers
from spanwire.errors import ConfigurationError
from spanwire.net.dial import dial
from spanwire.net.http1 import HTTP1Connection
from spanwire.net.tls import context_for
from spanwire.transport import Attempt, Exchange

from .codec import Codec
from .exchange import HTTPExchange

__all__ = ["SSEConnection", "SSETransport"]


def _user_agent() -> str:
    try:
        return f"spanwire/{metadata.version('spanwire')}"
    except metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return "spanwire"


_USER_AGENT = _user_agent()
#: Written by us from the request itself; a caller's own would make two answers out of one, or none.
_OURS = frozenset({"content-length", "transfer-encoding", "connection", "host"})


class SSETransport:
    """Makes connections for ``http://`` and ``https://`` endpoints."""

    expect = 1

    def key(self, endpoint: Endpoint) -> Hashable:
        """HTTP sends credentials with each request, so endpoints that differ in them share connections."""
        if endpoint.secure:
            context_for(endpoint.tls)  # refuses bad files here; reading the system's certificates takes a while
        return endpoint.connection_key()

    async def connect(self, endpoint: Endpoint, attempt: Attempt) -> SSEConnection:
        """Dial; marks dns, tcp, tls. Raises ConnectionFailed, ConfigurationError."""
        http = await dial(endpoint, attempt.marks, lambda: HTTP1Connection(endpoint.address))
        http.set_connect_rtt(attempt.marks.rtt_ns)
        return SSEConnection(http)


class SSEConnection:
    """One HTTP/1.1 connection: one exchange at a time."""

    __slots__ = ("_block", "_block_for", "http")

    capacity = 1
    protocol = "http/1.1"

    def __init__(self, http: HTTP1Connection) -> None:
        self.http = http
        # The head's part that stays the same from call to call, and what it was made for.
        self._block_for: tuple[Endpoint, str | None, object] | None = None
        self._block: dict[str, str] = {}

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
        endpoint = attempt.endpoint
        path, body, own = codec.encode(call, endpoint, streamed=attempt.streamed)
        head = self._head(codec, attempt, path, own, len(body))
        exchange = HTTPExchange(self.http, codec, codec.decoder(call, streamed=attempt.streamed), attempt)
        encoded_ns = time.perf_counter_ns()
        marks.parts.append(("encode", begin_ns, encoded_ns))
        marks.begin("send", encoded_ns)
        if self.http.send(head + body, exchange):
            exchange.on_sent()
        return exchange

    def _head(self, codec: Codec, attempt: Attempt, path: str, own: Mapping[str, str], length: int) -> bytes:
        endpoint = attempt.endpoint
        wanted = (endpoint, attempt.api_key, codec)
        if self._block_for != wanted:
            self._block_for = wanted
            self._block = self._fixed_headers(codec, endpoint, attempt.api_key)
        headers = self._block
        if own or attempt.headers:
            headers = {**headers, **own}
            for name, value in attempt.headers.items():
                headers[name.lower()] = value
            _refuse_ours(headers, endpoint)
        target = f"{endpoint.path}{path}"
        if endpoint.query:
            target = f"{target}?{urlencode(endpoint.query)}"
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        text = f"POST {target} HTTP/1.1\r\nhost: {_host(endpoint)}\r\n{lines}content-length: {length}\r\n\r\n"
        return text.encode()

    @staticmethod
    def _fixed_headers(codec: Codec, endpoint: Endpoint, api_key: str | None) -> dict[str, str]:
        headers = {
            "user-agent": _USER_AGENT,
            "accept": "text/event-stream, application/json",
            "content-type": "application/json",
            # Compressed events would wait for each other in the compressor.
            "accept-encoding": "identity",
        }
        if api_key is not None:
            headers.update(codec.credentials(api_key))
        headers.update((name.lower(), value) for name, value in endpoint.headers.items())
        check_headers(headers, "the request's headers")
        _refuse_ours(headers, endpoint)
        return headers


def _refuse_ours(headers: Mapping[str, str], endpoint: Endpoint) -> None:
    for name in _OURS:
        if name in headers:
            raise ConfigurationError(
                f"the header {name!r} is written by spanwire itself; remove it from the headers",
                endpoint=endpoint.address,
            )


def _host(endpoint: Endpoint) -> str:
    scheme, host, port = endpoint.origin
    name = f"[{host}]" if ":" in host else host
    return name if port == (443 if scheme == "https" else 80) else f"{name}:{port}"
