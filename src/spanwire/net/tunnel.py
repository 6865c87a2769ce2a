"""Through a proxy to an endpoint: a tunnel by CONNECT (RFC 9110 section 9.3.6), or by SOCKS (``python-socks``).

What comes out is a connection to the endpoint like any other: its TLS runs inside, its re-use and its speed are those
of a direct one. Proxies that forward requests need no tunnel: see ``prefix`` in the plugin that writes the requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
import time
from collections.abc import Callable
from typing import TypeVar

import httptools

from ..endpoint import Endpoint
from ..errors import ConfigurationError, ConnectionFailed
from ..timeline import Marks
from .failures import connect_failed, tls_failed
from .proxies import Proxy
from .tls import handshake_with

__all__ = ["MAX_ANSWER_BYTES", "ConnectAnswer", "connect_through", "credentials_wanted", "shut_down", "socks_through"]

#: Longest head of an answer to CONNECT, in bytes: four times what Squid sends with all its headers at most.
MAX_ANSWER_BYTES = 16 * 1024
#: python-socks has a timeout of its own, which this puts out of the way: how long to wait is `Timeouts.connect_s`.
_A_DAY_S = 86_400.0
_BLANK_LINE = re.compile(rb"\r?\n\r?\n")
#: "Connection not allowed by ruleset". Source: RFC 1928 section 6.
_SOCKS5_NOT_ALLOWED = 2

_P = TypeVar("_P", bound=asyncio.Protocol)


def credentials_wanted(address: str, proxy: Proxy) -> ConnectionFailed:
    """The error for a proxy that wants to know who we are."""
    if proxy.user is None:
        what = f"the proxy {proxy} wants credentials: put user:password@ before the host of its URL"
    else:
        what = f"the proxy {proxy} refuses the user name and password of its URL"
    return ConnectionFailed(what, endpoint=address, phase="proxy", retryable=False)


# --- CONNECT ------------------------------------------------------------------------------------------------------------


class ConnectAnswer:
    """PURE: reads the answer to CONNECT, however it is split.

    Attributes:
        status, reason: of the final answer; 0 until it is there.
        rest: what came behind its head.
    """

    __slots__ = ("_buffer", "reason", "rest", "status")

    def __init__(self) -> None:
        self._buffer = b""
        self.status = 0
        self.reason = ""
        self.rest = b""

    def feed(self, data: bytes) -> bool:
        """Take bytes; true when the answer is there.

        Raises:
            ValueError: this is not HTTP, or its head is over ``MAX_ANSWER_BYTES``.
        """
        self._buffer += data
        while not self.status:
            end = _BLANK_LINE.search(self._buffer)
            if (len(self._buffer) if end is None else end.end()) > MAX_ANSWER_BYTES:
                raise ValueError(f"an answer with a head of over {MAX_ANSWER_BYTES} bytes")
            if end is None:
                if not _begins_like_http(self._buffer):
                    raise ValueError("something that is not HTTP")
                return False
            head, self._buffer = self._buffer[: end.end()], self._buffer[end.end() :]
            status, reason = _parse(head)
            if status >= 200:  # 1xx: the final answer follows
                self.status, self.reason, self.rest = status, reason, self._buffer
        return True


def _begins_like_http(data: bytes) -> bool:
    return data[:5] == b"HTTP/"[: len(data)]


def _parse(head: bytes) -> tuple[int, str]:
    lines: list[bytes] = []

    class Callbacks:
        def on_status(self, reason: bytes) -> None:
            lines.append(reason)

    parser = httptools.HttpResponseParser(Callbacks())
    try:
        parser.feed_data(head)
    except httptools.HttpParserUpgrade:  # a 101, which nobody asked for, or headers that llhttp takes for one
        pass
    except httptools.HttpParserError as error:
        raise ValueError(f"something that is not HTTP ({error})") from error
    status = parser.get_status_code()
    if status < 100:
        raise ValueError(f"status {status:03}, which HTTP does not have")
    if status == 101:
        raise ValueError("a switch of protocols that nobody asked for")
    reason = b"".join(lines).decode("latin-1")
    return status, "".join(letter for letter in reason if letter.isprintable())[:60]


class _Waiting(asyncio.Protocol):
    """Has the connection while the proxy makes up its mind."""

    def __init__(self) -> None:
        self.answer = ConnectAnswer()
        self.answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        if self.answered.done():  # in the moment before somebody takes over
            self.answer.rest += data
            return
        try:
            if self.answer.feed(data):
                self.answered.set_result(None)
        except ValueError as error:
            self.answered.set_exception(error)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.answered.done():
            self.answered.set_exception(error or ConnectionResetError("it closed the connection"))


class _Gate(asyncio.Protocol):
    """Stands in for a protocol until TLS is up: a server that speaks first is heard before ``start_tls`` returns."""

    def __init__(self) -> None:
        self._data = b""
        self._eof = False
        self._lost: tuple[Exception | None] | None = None

    def data_received(self, data: bytes) -> None:
        self._data += data

    def eof_received(self) -> None:
        self._eof = True

    def connection_lost(self, error: Exception | None) -> None:
        self._lost = (error,)

    def open(self, transport: asyncio.Transport, protocol: asyncio.Protocol) -> None:
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        if self._data:
            protocol.data_received(self._data)
        if self._eof:
            protocol.eof_received()
        if self._lost is not None:
            protocol.connection_lost(*self._lost)


async def connect_through(
    endpoint: Endpoint,
    proxy: Proxy,
    sock: socket.socket,
    outer: ssl.SSLContext | None,
    inner: ssl.SSLContext | None,
    marks: Marks,
    factory: Callable[[], _P],
) -> _P:
    """Ask the HTTP proxy at the other end of a socket for a tunnel, and make that the protocol's connection.

    Args:
        outer: for TLS to the proxy, or None.
        inner: for TLS to the endpoint, inside the tunnel, or None.

    Raises:
        ConnectionFailed: phase ``proxy`` or ``tls``. The socket is closed, as it is when this is cancelled.
    """
    marks.begin("proxy", time.perf_counter_ns())
    bottom: asyncio.Transport | None = None
    try:
        bottom, waiting = await asyncio.get_running_loop().create_connection(_Waiting, sock=sock)
        transport = bottom
        if outer is not None:
            transport = await _start_tls(bottom, waiting, outer, proxy.host, proxy.port)
        await _ask(endpoint, proxy, transport, waiting, secure=inner is not None)
        marks.end("proxy", time.perf_counter_ns())
        if inner is None:
            protocol = factory()
            transport.set_protocol(protocol)
            protocol.connection_made(transport)
            if waiting.answer.rest:
                protocol.data_received(waiting.answer.rest)
            return protocol
        marks.begin("tls", time.perf_counter_ns())
        gate = _Gate()
        transport = await _start_tls(transport, gate, inner, *endpoint.origin[1:])
        marks.end("tls", time.perf_counter_ns())
        protocol = factory()
        gate.open(transport, protocol)
        return protocol
    except BaseException as error:
        # The lowest transport: those of TLS do not close it in every state, and not in every release of Python.
        if bottom is None:
            shut_down(sock)
        else:
            bottom.abort()
        if not isinstance(error, OSError):
            raise
        if marks.begun_ns("tls"):
            assert inner is not None
            raise tls_failed(endpoint, inner, error) from error
        if outer is None:
            raise connect_failed(endpoint, "proxy", f"the proxy {proxy} hung up", error) from error
        raise tls_failed(endpoint, outer, error, proxy) from error


async def _ask(
    endpoint: Endpoint, proxy: Proxy, transport: asyncio.Transport, waiting: _Waiting, *, secure: bool
) -> None:
    transport.write(_connect_request(endpoint, proxy))
    try:
        await waiting.answered
    except ValueError as error:
        raise _failed(endpoint, f"the proxy {proxy} answered CONNECT with {error}") from error
    except OSError as error:
        raise connect_failed(endpoint, "proxy", f"the proxy {proxy} hung up", error) from error
    status, reason = waiting.answer.status, waiting.answer.reason
    if status == 407:
        raise credentials_wanted(endpoint.address, proxy)
    if status < 300 and secure and waiting.answer.rest:  # in TLS the client speaks first
        raise _failed(endpoint, f"the proxy {proxy} sent more than an answer to CONNECT")
    if status < 300 and transport.is_closing():
        raise _failed(endpoint, f"the proxy {proxy} hung up after its consent")
    if status >= 300:
        what = f"the proxy {proxy} makes no connection to the server: it answered {status} {reason}".rstrip()
        raise _failed(endpoint, what, retryable=status >= 500 or status in (408, 429))


def _connect_request(endpoint: Endpoint, proxy: Proxy) -> bytes:
    _, name, port = endpoint.origin
    if not name.isascii():
        try:
            name = name.encode("idna").decode()
        except UnicodeError as error:
            what = f"the name {name!r} cannot be told to a proxy"
            raise connect_failed(endpoint, "proxy", what, error, retryable=False) from error
    target = f"[{name}]:{port}" if ":" in name else f"{name}:{port}"
    headers = {"host": target, "user-agent": "spanwire", **proxy.headers}
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    return f"CONNECT {target} HTTP/1.1\r\n{lines}\r\n".encode()


async def _start_tls(
    transport: asyncio.Transport, protocol: asyncio.Protocol, context: ssl.SSLContext, host: str, port: int
) -> asyncio.Transport:
    """Raises OSError, of which ssl.SSLError is one."""
    loop = asyncio.get_running_loop()
    try:
        with handshake_with(context, host, port):
            inside = await loop.start_tls(transport, protocol, context, server_hostname=host)
    except TypeError as error:
        # CPython up to 3.11.7 and 3.12.1 cannot close TLS in TLS for a reason, and so loses it.
        reason = error.__context__
        while reason is not None and not isinstance(reason, OSError):
            reason = reason.__context__
        raise reason or error from None
    if inside is None:
        raise ConnectionResetError("the connection was closed")
    return inside


def _failed(endpoint: Endpoint, what: str, *, retryable: bool = True) -> ConnectionFailed:
    return ConnectionFailed(what, endpoint=endpoint.address, phase="proxy", retryable=retryable)


def shut_down(sock: socket.socket) -> None:
    """Tell the peer. Not ``close()``: a transport of the loop owns the descriptor by now, and closes it in a moment."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


# --- SOCKS --------------------------------------------------------------------------------------------------------------


async def socks_through(endpoint: Endpoint, proxy: Proxy, marks: Marks) -> socket.socket:
    """A socket that a SOCKS proxy has connected to the endpoint's host.

    Raises:
        ConnectionFailed: phase ``proxy``.
        ConfigurationError: the extra ``socks`` is not installed, or SOCKS4 is asked for an IPv6 address.
    """
    try:
        import python_socks
        from python_socks.async_.asyncio import Proxy as Connector
    except ImportError as error:
        raise ConfigurationError(
            f"{proxy.setting} asks for a {proxy.scheme} proxy, which needs: pip install 'spanwire[socks]'",
            endpoint=endpoint.address,
            phase="proxy",
        ) from error
    _, host, port = endpoint.origin
    if proxy.scheme.startswith("socks4") and ":" in host:
        raise ConfigurationError(
            f"{proxy.setting}: SOCKS4 knows no IPv6 addresses; use socks5",
            endpoint=endpoint.address,
            phase="proxy",
        )
    kind = python_socks.ProxyType.SOCKS4 if proxy.scheme.startswith("socks4") else python_socks.ProxyType.SOCKS5
    there = proxy.scheme in ("socks4a", "socks5h")
    marks.begin("proxy", time.perf_counter_ns())
    connector = Connector(
        kind, proxy.host, proxy.port, proxy.user, proxy.password, rdns=there, loop=asyncio.get_running_loop()
    )
    try:
        sock = await connector.connect(host, port, timeout=_A_DAY_S)
    except python_socks.ProxyConnectionError as error:
        raise connect_failed(endpoint, "proxy", f"the proxy {proxy} cannot be reached", error) from error
    except python_socks.ProxyError as error:
        if "authentication" in str(error).lower():
            raise credentials_wanted(endpoint.address, proxy) from error
        final = error.error_code == _SOCKS5_NOT_ALLOWED and proxy.scheme.startswith("socks5")
        what = f"the proxy {proxy} makes no connection to the server"
        raise connect_failed(endpoint, "proxy", what, error, retryable=not final) from error
    except socket.gaierror as error:
        again = error.errno == socket.EAI_AGAIN
        what = f"the name {host!r} cannot be resolved"
        raise connect_failed(endpoint, "proxy", what, error, retryable=again) from error
    except (OSError, ValueError) as error:  # ValueError: a name that IDNA does not take, an answer out of shape
        raise connect_failed(endpoint, "proxy", f"the proxy {proxy} failed", error) from error
    # Small writes go out at once. asyncio sees to it only where a socket says that it is TCP's, which these do not.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    marks.end("proxy", time.perf_counter_ns())
    return sock
