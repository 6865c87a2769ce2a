"""Makes a socket: dials, asks for the upgrade, and says what a refusal means."""

from __future__ import annotations

import re
import string
import time
from collections.abc import Sequence
from importlib import metadata
from typing import cast
from urllib.parse import quote, urlencode

from websockets.client import ClientProtocol
from websockets.exceptions import InvalidStatus
from websockets.extensions.permessage_deflate import ClientPerMessageDeflateFactory
from websockets.http11 import Response
from websockets.typing import Subprotocol
from websockets.uri import WebSocketURI

from spanwire.endpoint import Endpoint, check_headers
from spanwire.errors import ConfigurationError, ConnectionFailed, ServerError, SpanwireError
from spanwire.net.dial import dial, route_of
from spanwire.transport import Attempt
from spanwire.wire.retry_after import retry_after_s

from .faults import refused_at_once, refused_upgrade
from .options import Options
from .socket import WebSocket, quiet_logger

__all__ = ["closed_at_once", "open_socket"]

#: An upgrade may take so much longer than a round trip, in ns, before it counts as a wait in the server's queue: looking
#: up a key takes some milliseconds. Our own choice.
_HANDLING_NS = 10_000_000
#: Written by the handshake itself.
_OURS = frozenset({"host", "upgrade", "connection", "content-length", "transfer-encoding"})
_OURS_PREFIX = "sec-websocket-"
#: What a value may hold on every version of the library, and is read alike by every server. Source: RFC 9110 section 5.5.
_VALUE = re.compile(r"[\t\x20-\x7e]*")


def _user_agent() -> str:
    try:
        return f"spanwire/{metadata.version('spanwire')}"
    except metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return "spanwire"


_USER_AGENT = _user_agent()


async def open_socket(
    endpoint: Endpoint, attempt: Attempt, path: str, query: Sequence[tuple[str, str]], options: Options
) -> WebSocket:
    """An open socket; marks dns, tcp, proxy, tls, upgrade, and admission.

    Args:
        path: the whole path of the target.
        query: what follows ``?``.

    Raises:
        ConnectionFailed: with the phase in which it failed.
        SpanwireError: it was accepted, and closed at once; as of :func:`closed_at_once`.
        ServerError: the upgrade was refused; with phase ``upgrade``, and ``full`` where there was no room.
        ProtocolError: it was answered with something else.
        ConfigurationError: a header that is ours to write; the settings of :func:`spanwire.net.dial.dial`.
    """
    secure, host, port = endpoint.secure, *endpoint.origin[1:]
    target = quote(path, safe=string.punctuation)  # what is no ASCII; all else is as it was given
    uri = WebSocketURI(
        secure=secure, host=host, port=port, path=target, query=urlencode(query), username=None, password=None
    )
    wire = ClientProtocol(
        uri,
        subprotocols=cast("list[Subprotocol]", list(options.subprotocols)) or None,
        extensions=[ClientPerMessageDeflateFactory()] if options.compression else None,
        max_size=endpoint.limits.max_event_bytes,
        logger=quiet_logger,
    )
    request = wire.connect()
    for name, value in _headers(endpoint, attempt.api_key).items():
        request.headers[name] = value
    route = route_of(endpoint)
    socket = await dial(
        endpoint,
        attempt.marks,
        lambda: WebSocket(endpoint.address, wire, options.keepalive, max_size=endpoint.limits.max_event_bytes),
        route=route,
    )
    socket.set_connect_rtt(attempt.marks.rtt_ns, through_proxy=route.proxy is not None)
    try:
        begin_ns = time.perf_counter_ns()
        attempt.marks.begin("upgrade", begin_ns)
        response = await socket.upgrade(request)
        _mark_upgrade(attempt, begin_ns, socket)
    except BaseException:
        _mark_unanswered(attempt, begin_ns, socket)
        socket.abort()
        raise
    if socket.handshake_problem is not None:
        socket.abort()
        raise _refusal(endpoint, attempt.api_key, response, socket.handshake_problem)
    socket.start()
    return socket


def closed_at_once(endpoint: Endpoint, socket: WebSocket) -> SpanwireError:
    """The error of a socket that the server has accepted, and ended before anything was sent on it: a refusal."""
    assert socket.lost is not None
    error = refused_at_once(
        socket.lost,
        [bytes(data) for data, text in socket.quiet if text],
        endpoint.address,
        max_bytes=endpoint.limits.max_event_bytes,
    )
    error.phase = "upgrade"
    return error


def _mark_upgrade(attempt: Attempt, begin_ns: int, socket: WebSocket) -> None:
    """What of it lies beyond a round trip was a wait for the server to have room."""
    marks, end_ns = attempt.marks, socket.upgraded_ns
    rtt_ns = socket.connect_rtt_ns()
    marks.end("upgrade", end_ns)
    if rtt_ns is not None and end_ns - begin_ns - rtt_ns > _HANDLING_NS:
        marks.parts.pop()
        marks.parts.append(("upgrade", begin_ns, begin_ns + rtt_ns))
        marks.parts.append(("admission", begin_ns + rtt_ns, end_ns))


def _mark_unanswered(attempt: Attempt, begin_ns: int, socket: WebSocket) -> None:
    """It was never answered: that is how some servers are full. What stays open tells where it was given up."""
    marks, now_ns, rtt_ns = attempt.marks, time.perf_counter_ns(), socket.connect_rtt_ns()
    if marks.open_part == "upgrade" and rtt_ns is not None and now_ns - begin_ns - rtt_ns > _HANDLING_NS:
        marks.parts.append(("upgrade", begin_ns, begin_ns + rtt_ns))
        marks.parts.append(("admission", begin_ns + rtt_ns, now_ns))
        marks.begin("upgrade", now_ns)


def _refusal(endpoint: Endpoint, api_key: str | None, response: Response, problem: Exception) -> Exception:
    if api_key:  # servers repeat the key that they refuse; the library's exception shows the body
        response.body = bytes(response.body or b"").replace(api_key.encode(), b"***")
    if not isinstance(problem, InvalidStatus):  # 101, and something in it is wrong
        error: Exception = ConnectionFailed(
            f"the server's answer to the upgrade is wrong: {problem}",
            endpoint=endpoint.address,
            phase="upgrade",
            retryable=False,
        )
    else:
        headers: dict[str, str] = {}
        for name, value in response.headers.raw_items():
            name = name.lower()
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
        error = refused_upgrade(
            endpoint.address, response.status_code, headers, bytes(response.body or b""), retry_after_s(headers)
        )
        if isinstance(error, ServerError) and endpoint.api_key is None and response.status_code in (401, 403):
            error.message += "; the endpoint has no api_key"
    error.__cause__ = problem
    return error


def _headers(endpoint: Endpoint, api_key: str | None) -> dict[str, str]:
    headers = {"user-agent": _USER_AGENT}
    if api_key is not None:
        headers["authorization"] = f"Bearer {api_key}"
    headers.update((name.lower(), value) for name, value in endpoint.headers.items())
    check_headers(headers, "the request's headers")
    for name, value in headers.items():
        if not _VALUE.fullmatch(value):
            advice = " (it holds the api_key)" if name == "authorization" and api_key is not None else ""
            raise ConfigurationError(
                f"the value of the header {name!r}{advice} has a character that is none of ASCII's printable ones; look for "
                "one that was pasted with it, or percent-encode it",
                endpoint=endpoint.address,
            )
        if name in _OURS or name.startswith(_OURS_PREFIX):
            advice = '; use options={"subprotocols": [...]}' if name == "sec-websocket-protocol" else ""
            raise ConfigurationError(
                f"the header {name!r} is written by spanwire itself; remove it from the headers{advice}",
                endpoint=endpoint.address,
            )
    return headers
