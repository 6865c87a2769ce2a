"""PURE: what a refused upgrade and a closed socket mean, as one of spanwire's errors. Sources: RFC 6455 section 7.4, and how the
servers that speak these schemas behave (the table in docs/websocket.md)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec

from spanwire.errors import (
    BadRequest,
    ConnectionFailed,
    MessageTooBig,
    ProtocolError,
    RateLimited,
    ServerError,
    SpanwireError,
    Truncated,
    server_error,
)

from .socket import Closed

__all__ = ["closed_error", "judge", "refused_at_once", "refused_upgrade"]

_SHOWN = 200
#: Statuses by which a server, or a proxy before it, says that no further client fits: it does when one has left.
_FULL = frozenset({429, 503, 529})
#: Close codes after which a new socket helps: going away, service restart, try again later. Source: RFC 6455 section 7.4.1, and
#: the IANA registry of close codes for 1012 and 1013.
_MOVED = frozenset({1001, 1012, 1013})
_NOT_PASSED_ON = frozenset({400, 404, 405, 426, 501})
#: The server has lost what the socket had, and has not begun: the same call, whole, on a new socket, is safe.
_SAFE = frozenset({"previous_response_not_found", "websocket_connection_limit_reached"})
#: It says by itself that it can do no more now. Source: openai-agents' retry advice.
_OVERLOADED = frozenset({"server_is_overloaded", "server_error", "overloaded_error"})
#: How servers name, in an error's code or words or in the reason of a close frame, a limit of clients: when one has left
#: there is room.
_CLIENTS = re.compile(
    r"max_active|concurren|too many (open |active |concurrent )?(websocket |realtime )?"
    r"(connection|client|session|conversation|websocket)|"
    r"(connection|client|session|conversation)s?[ _]limit",
    re.IGNORECASE,
)
#: The same for a limit of calls or tokens, which time alone helps.
_CALLS = re.compile(r"rate[ _-]?limit|too many requests|quota", re.IGNORECASE)


def refused_upgrade(
    address: str, status: int, headers: Mapping[str, str], body: bytes, retry_after_s: float | None
) -> SpanwireError:
    """A handshake that was answered with anything but 101.

    ``full`` on the error: the server has no room now (429, 503, 529).
    """
    said = _said(body)
    words = f": {said}" if said else ""
    if 300 <= status < 400:
        error: SpanwireError = server_error(
            f"the upgrade was answered {status}: it redirects{_place(headers.get('location', ''))}; use that as the URL",
            status=status,
            headers=dict(headers),
            endpoint=address,
        )
    elif 200 <= status < 300:
        error = ProtocolError(
            f"the upgrade was answered {status}, not 101: this is no WebSocket{words}",
            endpoint=address,
            retryable=False,
        )
    else:
        advice = (
            "; is this path one for WebSocket, and does the proxy before it pass the upgrade on?"
            if status in _NOT_PASSED_ON
            else "; some servers say so, too, where they have no WebSocket at this path"
            if status == 403
            else ""
        )
        error = server_error(
            f"the upgrade was refused with {status}{words}{advice}",
            status=status,
            headers=dict(headers),
            retry_after_s=retry_after_s,
            endpoint=address,
        )
        error.full = status in _FULL
    error.phase = "upgrade"
    return error


def _place(location: str) -> str:
    """Where a redirect points to, without what may be secret in it."""
    try:
        where = urlsplit(location)
    except ValueError:
        return ""
    return f" to {where.scheme}://{where.netloc.rpartition('@')[2]}{where.path}"[:_SHOWN] if where.netloc else ""


def _said(body: bytes) -> str:
    """The server's words in the body of a refusal, at most 200 characters."""
    text = body[: 8 * _SHOWN].decode("utf-8", "replace").strip()
    if text[:1] == "{":
        try:
            found: Any = msgspec.json.decode(body)
        except (msgspec.DecodeError, RecursionError):
            found = None
        if isinstance(found, dict):
            inner = found.get("error", found)
            message = inner.get("message") if isinstance(inner, dict) else inner
            message = message or found.get("detail")
            if isinstance(message, str):
                return message[:_SHOWN]
    return "" if text[:1] == "<" else " ".join(text.split())[:_SHOWN]


def closed_error(
    closed: Closed, address: str, *, max_bytes: int, begun: bool = False, asked: bool = True, what: str = "answer"
) -> SpanwireError:
    """A socket that ended before the answer was complete.

    Args:
        max_bytes: ``Limits.max_event_bytes``.
        begun: something of the answer came, so that the server has begun: it is not sent again.
        asked: False: before anything was sent.
        what: was broken off.
    """
    error = _closed_error(closed, address, max_bytes, begun, what)
    if not asked and closed.code == 1011:  # how servers say that what is behind them has failed
        error.retryable = True
    if error.__cause__ is None:
        error.__cause__ = closed.cause
    return error


def _closed_error(closed: Closed, address: str, max_bytes: int, begun: bool, what: str) -> SpanwireError:
    code = closed.code
    reason = f": {closed.reason[:_SHOWN]}" if closed.reason else ""
    phase = "read" if begun else "wait"
    if code == 1009:
        if closed.ours:
            return MessageTooBig(
                f"a message is over {max_bytes} bytes (Limits.max_event_bytes); we have closed with 1009",
                endpoint=address,
            )
        return MessageTooBig(
            f"the server closed with 1009: our message is too big for it{reason}", endpoint=address, phase="send"
        )
    if closed.ours:
        if code == 1011:
            return ConnectionFailed(closed.reason, endpoint=address, phase=phase, retryable=not begun)
        return ProtocolError(
            f"what the server sent is no WebSocket (we have closed with {code}{reason})", endpoint=address
        )
    if code is None:
        broke = (
            f"the connection broke in the middle of the {what}"
            if begun
            else f"the connection broke before anything of the {what} came"
        )
        words = f": {closed.cause.strerror or closed.cause}" if isinstance(closed.cause, OSError) else ""
        return ConnectionFailed(broke + words, endpoint=address, phase=phase, retryable=not begun)
    if code in _MOVED:
        error: SpanwireError = ConnectionFailed(
            f"the server closed with {code}, as it does when it restarts or is full{reason}",
            endpoint=address,
            phase=phase,
            retryable=not begun,
        )
        error.full = code == 1013 and not begun
        return error
    if code in (1000, 1005):
        return Truncated(
            f"the server closed with {code} before the {what} was complete{reason}",
            endpoint=address,
            retryable=not begun,
        )
    if code == 1008:
        said = f"the server closed with 1008 (policy){reason}"
        if not (_CLIENTS.search(closed.reason) or _CALLS.search(closed.reason)):
            return ServerError(said, code=1008, endpoint=address)
        limited = RateLimited(said, code=1008, endpoint=address, retryable=not begun)
        limited.full = not begun
        return limited
    return ConnectionFailed(f"the server closed with {code}{reason}", endpoint=address, phase=phase, retryable=False)


def refused_at_once(closed: Closed, messages: Sequence[bytes], address: str, *, max_bytes: int) -> SpanwireError:
    """A socket that was accepted, and closed before anything was sent on it: the way in which some servers refuse.

    Args:
        messages: the texts that came before the close frame: the last one may be an error event, which says more.
        max_bytes: ``Limits.max_event_bytes``.
    """
    words = _said(messages[-1]) if messages and b'"error"' in messages[-1] else ""
    if words and words not in closed.reason:
        closed = closed._replace(reason=f"{closed.reason} ({words})" if closed.reason else words)
    return closed_error(closed, address, max_bytes=max_bytes, asked=False, what="session")


def judge(error: ServerError, *, begun: bool, closing: bool, own_parent: bool) -> bool:
    """What an error event allows: sets ``retryable``, ``full`` and ``again``.

    Args:
        begun: something of the answer came.
        closing: the server has closed the socket with it.
        own_parent: the caller has named the answer before by himself; we do not have its history.

    Returns:
        Whether the socket is of no further use.
    """
    if begun:
        return False
    code = error.code if isinstance(error.code, str) else ""
    said = f"{code} {error.message}"
    if code in _SAFE:
        error.again = not own_parent
        return error.again
    if code in _OVERLOADED:
        error.retryable = True
    elif _CLIENTS.search(code if isinstance(error, BadRequest) else said):
        error.retryable = error.full = True  # it is the socket that is one too many
        return True
    elif _CALLS.search(said) and not isinstance(error, BadRequest):  # that one is about the call, whatever its words
        error.retryable = True
        error.full = closing
    return False
