"""Makes a TCP, TLS or unix connection and marks each part: ``dns``, ``tcp``, ``tls``, ``connect`` (unix socket)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import time
from collections.abc import Callable
from typing import TypeVar

import aiohappyeyeballs

from ..endpoint import Endpoint
from ..errors import ConfigurationError, ConnectionFailed
from ..timeline import Marks
from .proxies import proxy_for
from .tls import context_for

__all__ = ["HAPPY_EYEBALLS_DELAY_S", "dial"]

#: Head start of the first address over the next one, in seconds. Source: RFC 8305 section 8.
HAPPY_EYEBALLS_DELAY_S = 0.25

#: What OpenSSL calls an answer that is plain text.
_NO_TLS = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "UNEXPECTED_MESSAGE"})

_P = TypeVar("_P", bound=asyncio.Protocol)


async def dial(
    endpoint: Endpoint, marks: Marks, factory: Callable[[], _P], *, alpn: tuple[str, ...] = ("http/1.1",)
) -> _P:
    """Connect to the endpoint's host, or its unix socket, and return the protocol that now has the connection.

    ``alpn``: what TLS offers the server to speak, the best one first.

    Raises:
        ConnectionFailed: with the phase in which it failed.
        ConfigurationError: TLS files that cannot be loaded, a proxy that this transport cannot go through.
    """
    _refuse_proxy(endpoint)
    if endpoint.uds is not None:
        return await _dial_unix(endpoint, endpoint.uds, marks, factory, alpn)
    context = context_for(endpoint.tls, alpn=alpn) if endpoint.secure else None
    addresses = await _resolve(endpoint, marks)
    sock = await _connect(endpoint, addresses, marks)
    return await _adopt(endpoint, sock, context, marks, factory)


def _refuse_proxy(endpoint: Endpoint) -> None:
    found = proxy_for(endpoint, os.environ)
    if found is not None:
        raise ConfigurationError(
            f"{found[1]} asks for a proxy, and spanwire's own connections go directly only; "
            "add the host to NO_PROXY, or use Endpoint(proxy=None)",
            endpoint=endpoint.address,
            phase="proxy",
        )


async def _resolve(endpoint: Endpoint, marks: Marks) -> list[aiohappyeyeballs.AddrInfoType]:
    host, port = endpoint.origin.host, endpoint.origin.port
    literal = _literal(host, port)
    if literal is not None:
        return [literal]
    loop = asyncio.get_running_loop()
    marks.begin("dns", time.perf_counter_ns())
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        again = getattr(error, "errno", None) == socket.EAI_AGAIN  # the resolver may know it in a moment
        raise _failed(endpoint, "dns", f"the name {host!r} cannot be resolved", error, retryable=again) from error
    marks.end("dns", time.perf_counter_ns())
    return [*found]


def _literal(host: str, port: int) -> aiohappyeyeballs.AddrInfoType | None:
    """An address needs no look-up, and so no thread of the loop's executor."""
    for family, address in ((socket.AF_INET, (host, port)), (socket.AF_INET6, (host, port, 0, 0))):
        try:
            socket.inet_pton(family, host)
        except (OSError, ValueError):
            continue
        return family, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", address
    return None


async def _connect(endpoint: Endpoint, addresses: list[aiohappyeyeballs.AddrInfoType], marks: Marks) -> socket.socket:
    marks.begin("tcp", time.perf_counter_ns())
    try:
        sock = await aiohappyeyeballs.start_connection(
            addresses, happy_eyeballs_delay=HAPPY_EYEBALLS_DELAY_S, interleave=1
        )
    except OSError as error:
        where = f"{len(addresses)} addresses" if len(addresses) > 1 else "the server"
        raise _failed(endpoint, "tcp", f"{where} cannot be reached", error) from error
    marks.end("tcp", time.perf_counter_ns())
    if len(addresses) == 1:  # of a race the interval is longer than one round trip
        marks.rtt_ns = marks.duration_ns("tcp")
    return sock


async def _adopt(
    endpoint: Endpoint, sock: socket.socket, context: ssl.SSLContext | None, marks: Marks, factory: Callable[[], _P]
) -> _P:
    loop = asyncio.get_running_loop()
    try:
        if context is None:
            _, protocol = await loop.create_connection(factory, sock=sock)
            return protocol
        marks.begin("tls", time.perf_counter_ns())
        _, protocol = await loop.create_connection(
            factory, sock=sock, ssl=context, server_hostname=endpoint.origin.host, ssl_handshake_timeout=None
        )
        marks.end("tls", time.perf_counter_ns())
        return protocol
    except ssl.SSLCertVerificationError as error:
        _end(sock)
        raise _not_trusted(endpoint, error) from error
    except OSError as error:  # ssl.SSLError is one
        _end(sock)
        what = "the TLS handshake failed"
        if getattr(error, "reason", None) in _NO_TLS:
            what = "the server does not speak TLS here (is it http:// and not https://?)"
        raise _failed(endpoint, "tls", what, error) from error
    except BaseException:
        _end(sock)
        raise


def _end(sock: socket.socket) -> None:
    """Tell the peer. Not ``close()``: a transport of the loop owns the descriptor by now, and closes it in a moment."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


async def _dial_unix(
    endpoint: Endpoint, path: str, marks: Marks, factory: Callable[[], _P], alpn: tuple[str, ...]
) -> _P:
    if not hasattr(socket, "AF_UNIX"):
        raise ConfigurationError("Endpoint.uds: this system has no unix sockets")
    context = context_for(endpoint.tls, alpn=alpn) if endpoint.secure else None
    marks.begin("connect", time.perf_counter_ns())
    try:
        _, protocol = await asyncio.get_running_loop().create_unix_connection(
            factory, path, ssl=context, server_hostname=endpoint.origin.host if context else None
        )
    except ssl.SSLCertVerificationError as error:
        raise _not_trusted(endpoint, error) from error
    except ssl.SSLError as error:
        raise _failed(endpoint, "tls", "the TLS handshake failed", error) from error
    except OSError as error:
        raise _failed(endpoint, "connect", "the unix socket cannot be reached", error) from error
    marks.end("connect", time.perf_counter_ns())
    marks.rtt_ns = 0  # there is no network in between
    return protocol


def _not_trusted(endpoint: Endpoint, error: BaseException) -> ConnectionFailed:
    what = "the server's certificate is not trusted; for a private CA use TLS(ca=FILE)"
    return _failed(endpoint, "tls", what, error, retryable=False)


def _failed(
    endpoint: Endpoint, phase: str, what: str, error: BaseException, *, retryable: bool = True
) -> ConnectionFailed:
    return ConnectionFailed(f"{what}: {_words(error)}", endpoint=endpoint.address, phase=phase, retryable=retryable)


def _words(error: BaseException) -> str:
    """What the system says: asyncio and OpenSSL put it behind words of their own."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    if isinstance(error, ssl.SSLError):
        return (error.reason or str(error)).replace("_", " ").lower()
    if isinstance(error, socket.gaierror):
        return error.strerror or str(error)
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno).lower()
    return str(error) or type(error).__name__
