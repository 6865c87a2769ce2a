"""PURE: what the exceptions of httpx and httpx2 mean to a call.

They are known by the names of their classes, which are the same in both families; nothing of either is imported. What
a message of theirs may repeat from the request (a header's value, an address with a password) is not shown.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator

from spanwire.errors import (
    CallTimeout,
    ConfigurationError,
    ConnectionFailed,
    ProtocolError,
    QueueTimeout,
    SpanwireError,
    server_error,
)
from spanwire.net.failures import words as system_words
from spanwire.transport import Attempt
from spanwire.wire.retry_after import retry_after_s

__all__ = ["FAMILIES", "explain", "library_names"]

#: The packages whose clients are taken.
FAMILIES = ("httpx", "httpx2")

#: What OpenSSL calls an answer that is plain text.
_NO_TLS = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "UNEXPECTED_MESSAGE"})
#: Parts of a connect that may be open when it fails.
_CONNECT_PHASES = frozenset({"tcp", "tls", "proxy", "connect", "upgrade"})
#: How h11, h2 and httpcore say that the other side has gone; what else they find wrong is no HTTP.
_GONE = ("disconnected", "peer closed connection", "ConnectionTerminated", "StreamReset")


def library_names(of: object) -> dict[str, str]:
    """The classes of httpx and httpx2 that an object is made of: class name to the name of its package."""
    found: dict[str, str] = {}
    for cls in type(of).__mro__:
        package = (cls.__module__ or "").partition(".")[0]
        if package in FAMILIES:
            found.setdefault(cls.__name__, package)
    return found


def explain(error: BaseException, attempt: Attempt, *, proxied: bool) -> SpanwireError:
    """The error of the call, with the library's as its cause.

    Args:
        error: what the client raised.
        attempt: its marks say how far it came.
        proxied: the client went, or wanted to go, through a proxy.
    """
    if isinstance(error, SpanwireError):
        return error
    found = _explain(error, attempt, proxied=proxied)
    found.__cause__ = error
    return found


def _explain(error: BaseException, attempt: Attempt, *, proxied: bool) -> SpanwireError:
    names, address, marks = library_names(error), attempt.endpoint.address, attempt.marks
    phase = "read" if marks.first_byte_ns else "wait" if marks.sent_ns else "send"
    if "ConnectTimeout" in names:
        stood = marks.open_part or "connect"
        return CallTimeout(
            f"no connection within {attempt.timeouts.connect_s} s (Timeouts.connect_s), it stood at {stood}",
            limit="connect_s",
            endpoint=address,
            phase=stood,
        )
    if "PoolTimeout" in names:
        limit_s = attempt.endpoint.limits.queue_timeout_s
        within = "" if limit_s is None else f" within {limit_s} s (Limits.queue_timeout_s)"
        return QueueTimeout(f"the client's own pool had no connection{within}; see its limits", endpoint=address)
    if "TimeoutException" in names:  # ours are given to it as none: a transport of the user's has its own
        return CallTimeout(
            f"the client's own time limit was hit ({type(error).__name__})",
            limit="idle_s",
            endpoint=address,
            phase=phase,
        )
    if "ProxyError" in names:
        words = str(error)[:100]
        return ConnectionFailed(
            f"the client's proxy refused the connection: {words}",
            endpoint=address,
            phase="proxy",
            retryable=not words.startswith("4"),  # such as 407: it wants a password
        )
    if "ConnectError" in names:
        return _not_connected(error, attempt, proxied=proxied)
    if names.keys() & {"UnsupportedProtocol", "InvalidURL"}:
        return ConfigurationError("the client cannot take the endpoint's URL", endpoint=address)
    if "LocalProtocolError" in names:
        return ProtocolError("the client could not write the request as HTTP", endpoint=address, phase="send")
    if "RemoteProtocolError" in names and not any(words in str(error) for words in _GONE):
        return ProtocolError(
            f"the server sent something that is not HTTP ({str(error)[:200]})", endpoint=address, phase=phase
        )
    if names.keys() & {"RemoteProtocolError", "NetworkError"}:
        return _broken(error, attempt, phase)
    if "HTTPStatusError" in names:  # raised by a hook of the user's, raise_for_status()
        response = error.response  # type: ignore[attr-defined]
        headers = {name.lower(): value for name, value in response.headers.items()}
        return server_error(
            f"an event hook of the client refused status {response.status_code}",
            status=response.status_code,
            headers=headers,
            retry_after_s=retry_after_s(headers),
            endpoint=address,
        )
    return ConnectionFailed(
        f"the client failed with {type(error).__name__} (in an event hook, its authentication or its transport?)",
        endpoint=address,
        phase=phase,
        retryable=False,
    )


def _not_connected(error: BaseException, attempt: Attempt, *, proxied: bool) -> ConnectionFailed:
    open_part = attempt.marks.open_part or ""
    phase = open_part if open_part in _CONNECT_PHASES else "connect"
    roots = [*_roots(error)]
    root, what, retryable = roots[-1], "", True
    for root in roots:
        if isinstance(root, socket.gaierror):
            phase = "dns"
            name = "of the client's proxy" if proxied else repr(attempt.endpoint.origin.host)
            what = f"the name {name} cannot be resolved"
            retryable = root.errno == socket.EAI_AGAIN  # the resolver may know it in a moment
            break
        if isinstance(root, ssl.SSLCertVerificationError):
            phase, retryable = "tls", False
            what = "the server's certificate is not trusted; for a private CA give the client verify=SSLContext"
            break
        if isinstance(root, ssl.SSLError):
            phase, what = "tls", "the TLS handshake failed"
            if root.reason in _NO_TLS:
                what = "the server does not speak TLS here (is it http:// and not https://?)"
            break
    if not what:
        root = next((one for one in roots if isinstance(one, OSError) and one.errno), roots[-1])
        if phase == "tls":
            what = "the TLS handshake failed"
        elif proxied:
            phase, what = "proxy", "the client's proxy cannot be reached"
        else:
            what = "the server cannot be reached"
    return ConnectionFailed(
        f"{what}: {_words(root)}", endpoint=attempt.endpoint.address, phase=phase, retryable=retryable
    )


def _broken(error: BaseException, attempt: Attempt, phase: str) -> ConnectionFailed:
    if phase == "read":
        what = "the connection broke in the middle of the answer"
    else:
        what = "the connection was closed before anything of the answer came"
    system = next((one for one in _roots(error) if isinstance(one, OSError) and one.errno), None)
    words = f": {_words(system)}" if system is not None else ""
    return ConnectionFailed(f"{what}{words}", endpoint=attempt.endpoint.address, phase=phase)


def _roots(error: BaseException) -> Iterator[BaseException]:
    """The exception and those below it, from the top."""
    seen: set[int] = set()
    todo = [error]
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        if isinstance(one, BaseExceptionGroup):
            todo.extend(reversed(one.exceptions))
        below = one.__cause__ or one.__context__
        if below is not None:
            todo.append(below)


def _words(error: BaseException) -> str:
    """What the system says. Not what a library does: its words may have a proxy's password in them."""
    told = isinstance(error, ssl.SSLError) or (isinstance(error, OSError) and error.errno)
    return system_words(error) if told else type(error).__name__
