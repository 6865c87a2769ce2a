"""Makes a connection: directly by TCP, with TLS, by a unix socket, or through a proxy. Each part is marked.

``dns`` and ``tcp`` (behind an HTTP proxy: to the proxy), ``proxy`` (TLS to the proxy and its consent; all that SOCKS
does), ``tls`` (to the endpoint), ``connect`` (a unix socket).

Public: it is what a transport's ``connect()`` is made of. :func:`dial` wants a factory of an ``asyncio.Protocol``, which is
then the connection::

    async def connect(self, endpoint, attempt):
        connection = await dial(endpoint, attempt.marks, lambda: MyConnection(endpoint), alpn=())
        connection.round_trip.connect_ns = attempt.marks.rtt_ns
        connection.round_trip.through_proxy = route_of(endpoint).proxy is not None
        return connection


    def key(self, endpoint):
        return endpoint.connection_key(), route_of(endpoint).key

Cancelled at any point, it leaves nothing open.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import time
from collections.abc import Callable
from typing import TypeVar

import aiohappyeyeballs

from ..endpoint import Endpoint
from ..errors import ConfigurationError
from ..timeline import Marks
from .failures import connect_failed, tls_failed
from .proxies import Proxy, Route, route_for
from .tls import context_for, handshake_with, proxy_context_for
from .tunnel import connect_through, shut_down, socks_through

__all__ = ["HAPPY_EYEBALLS_DELAY_S", "dial", "route_of"]

#: Head start of the first address over the next one, in seconds. Source: RFC 8305 section 8.
HAPPY_EYEBALLS_DELAY_S = 0.25

_P = TypeVar("_P", bound=asyncio.Protocol)


def route_of(endpoint: Endpoint, *, forward: bool = False) -> Route:
    """The way to an endpoint. The environment is read when it is first asked for, and then holds for this endpoint.

    So a connection is made through the proxy that the endpoint's key was made with, also where a variable changes in
    between. Arguments and errors: :func:`~spanwire.net.proxies.route_for`.
    """
    name = "_route_forward" if forward else "_route"
    found: Route | None = endpoint.__dict__.get(name)
    if found is None:
        found = endpoint.__dict__[name] = route_for(endpoint, os.environ, forward=forward)
    return found


async def dial(
    endpoint: Endpoint,
    marks: Marks,
    factory: Callable[[], _P],
    *,
    alpn: tuple[str, ...] = ("http/1.1",),
    route: Route | None = None,
    context: ssl.SSLContext | None = None,
) -> _P:
    """Connect to the endpoint's host, or its unix socket, and return the protocol that now has the connection.

    TLS where the URL's scheme is ``https``, ``wss`` or ``grpcs``.

    Args:
        marks: get ``dns``, ``tcp``, ``tls``, ``proxy`` or ``connect``, and ``rtt_ns``: what the TCP connect took, if it was
            one round trip to the endpoint.
        factory: makes the protocol, once.
        alpn: protocols to offer with TLS, the preferred one first; ``()`` for none.
        route: from :func:`route_of`. Whoever passes ``forward=True`` there has to write requests in absolute form where
            ``route.how`` is ``forward``. By default a proxy only ever tunnels.
        context: for TLS with the endpoint, instead of what ``Endpoint.tls`` says. It offers ``alpn`` already.

    Raises:
        ConnectionFailed: with the phase in which it failed.
        ConfigurationError: TLS files that cannot be loaded, a proxy's setting that is none, a missing extra.
    """
    if not endpoint.secure:
        context = None
    elif context is None:
        context = context_for(endpoint.tls, alpn)
    if endpoint.uds is not None:
        return await _dial_unix(endpoint, endpoint.uds, context, marks, factory)
    proxy = (route or route_of(endpoint)).proxy
    if proxy is None:
        sock = await _tcp(endpoint, None, marks)
        return await _adopt(endpoint, sock, context, None, marks, factory)
    if proxy.socks:
        sock = await socks_through(endpoint, proxy, marks)
        return await _adopt(endpoint, sock, context, None, marks, factory)
    outer = proxy_context_for(endpoint.tls) if proxy.scheme == "https" else None
    sock = await _tcp(endpoint, proxy, marks)
    if route is not None and route.how == "forward":
        return await _adopt(endpoint, sock, outer, proxy, marks, factory)
    return await connect_through(endpoint, proxy, sock, outer, context, marks, factory)


async def _tcp(endpoint: Endpoint, proxy: Proxy | None, marks: Marks) -> socket.socket:
    """A TCP connection to the endpoint, or to the proxy before it."""
    host, port = endpoint.origin[1:] if proxy is None else (proxy.host, proxy.port)
    addresses = await _resolve(endpoint, host, port, proxy, marks)
    sock = await _connect(endpoint, addresses, proxy, marks)
    if proxy is None and len(addresses) == 1:  # of a race the interval is longer than one round trip
        marks.rtt_ns = marks.duration_ns("tcp")
    return sock


async def _resolve(
    endpoint: Endpoint, host: str, port: int, proxy: Proxy | None, marks: Marks
) -> list[aiohappyeyeballs.AddrInfoType]:
    literal = _literal(host, port)
    if literal is not None:
        return [literal]
    loop = asyncio.get_running_loop()
    marks.begin("dns", time.perf_counter_ns())
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        again = getattr(error, "errno", None) == socket.EAI_AGAIN  # the resolver may know it in a moment
        whose = "" if proxy is None else f" of the proxy ({proxy.setting})"
        what = f"the name {host!r}{whose} cannot be resolved"
        raise connect_failed(endpoint, "dns", what, error, retryable=again) from error
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


async def _connect(
    endpoint: Endpoint, addresses: list[aiohappyeyeballs.AddrInfoType], proxy: Proxy | None, marks: Marks
) -> socket.socket:
    marks.begin("tcp", time.perf_counter_ns())
    try:
        sock = await aiohappyeyeballs.start_connection(
            addresses, happy_eyeballs_delay=HAPPY_EYEBALLS_DELAY_S, interleave=1
        )
    except OSError as error:
        where = "the server" if proxy is None else f"the proxy {proxy}"
        if len(addresses) > 1:
            where = f"{len(addresses)} addresses" if proxy is None else f"{where} at {len(addresses)} addresses"
        raise connect_failed(endpoint, "tcp", f"{where} cannot be reached", error) from error
    marks.end("tcp", time.perf_counter_ns())
    return sock


async def _adopt(
    endpoint: Endpoint,
    sock: socket.socket,
    context: ssl.SSLContext | None,
    proxy: Proxy | None,
    marks: Marks,
    factory: Callable[[], _P],
) -> _P:
    """Make the socket a connection of the loop, with TLS to the endpoint, or to the proxy that is given."""
    loop = asyncio.get_running_loop()
    try:
        if context is None:
            _, protocol = await loop.create_connection(factory, sock=sock)
            return protocol
        part = "tls" if proxy is None else "proxy"
        host, port = endpoint.origin[1:] if proxy is None else (proxy.host, proxy.port)
        marks.begin(part, time.perf_counter_ns())
        with handshake_with(context, host, port):
            _, protocol = await loop.create_connection(factory, sock=sock, ssl=context, server_hostname=host)
        marks.end(part, time.perf_counter_ns())
        return protocol
    except OSError as error:  # ssl.SSLError is one
        shut_down(sock)
        if context is None:
            raise connect_failed(endpoint, "tcp", "the connection broke at once", error) from error
        raise tls_failed(endpoint, context, error, proxy) from error
    except BaseException:
        shut_down(sock)
        raise


async def _dial_unix(
    endpoint: Endpoint, path: str, context: ssl.SSLContext | None, marks: Marks, factory: Callable[[], _P]
) -> _P:
    if not hasattr(socket, "AF_UNIX"):
        raise ConfigurationError("Endpoint.uds: this system has no unix sockets")
    marks.begin("connect", time.perf_counter_ns())
    try:
        _, protocol = await asyncio.get_running_loop().create_unix_connection(
            factory, path, ssl=context, server_hostname=endpoint.origin.host if context else None
        )
    except ssl.SSLError as error:
        assert context is not None
        raise tls_failed(endpoint, context, error) from error
    except OSError as error:
        raise connect_failed(endpoint, "connect", "the unix socket cannot be reached", error) from error
    marks.end("connect", time.perf_counter_ns())
    marks.rtt_ns = 0  # there is no network in between
    return protocol
