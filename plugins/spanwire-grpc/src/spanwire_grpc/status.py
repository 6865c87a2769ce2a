"""PURE: what a gRPC status means to a call.

gRPC has one status for things that are not the same: UNAVAILABLE is a broken connection and a server that is full,
RESOURCE_EXHAUSTED a message that is too large, a reader that is too slow, and a quota. Its words tell them apart.

Sources of the words: grpc core 1.60 to 1.85 (read and provoked); SGLang ``rust/sglang-grpc``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from spanwire.errors import (
    AuthenticationFailed,
    BadRequest,
    ConnectionFailed,
    MessageTooBig,
    Overloaded,
    RateLimited,
    ServerError,
    SpanwireError,
)

__all__ = ["connect_error", "error_of", "retry_after_s"]

#: Statuses by the error that they are. What is missing is a ServerError that is not worth another try.
_KINDS: Mapping[str, tuple[type[ServerError], bool]] = {
    "INVALID_ARGUMENT": (BadRequest, False),
    "FAILED_PRECONDITION": (BadRequest, False),
    "OUT_OF_RANGE": (BadRequest, False),
    "NOT_FOUND": (BadRequest, False),
    "ALREADY_EXISTS": (BadRequest, False),
    "UNIMPLEMENTED": (BadRequest, False),
    "UNAUTHENTICATED": (AuthenticationFailed, False),
    "PERMISSION_DENIED": (AuthenticationFailed, False),
    "ABORTED": (ServerError, True),
    "UNAVAILABLE": (Overloaded, True),
    "RESOURCE_EXHAUSTED": (RateLimited, True),
}
_TOO_LARGE = re.compile(r"larger than max", re.IGNORECASE)
_LIMIT = re.compile(r"vs\. (\d+)\)")
_SLOW_READER = re.compile(r"not consuming", re.IGNORECASE)
#: What the library itself says where a connection could not be made, or broke. Servers say other things.
_BROKEN = re.compile(
    r"failed to connect|connections? to all backends failing|socket closed|connection (reset|closed|refused)|recvmsg|sendmsg"
    r"|broken pipe|goaway|transport closed|endpoint closing|endpoint read failed|stream removed|keepalive|ping timeout|too.many.pings"
    r"|cancelling all calls|failed parsing http/2|dns resolution failed|handshake|http2 header with status|eof\b",
    re.IGNORECASE,
)
#: What it says where a request could not be written on a connection that was lost, with the status INTERNAL.
_LOST = re.compile(r"^internal error from core$", re.IGNORECASE)
_NOT_GRPC = re.compile(r"failed parsing http/2|expected settings frame|connect an http1", re.IGNORECASE)
_HTTP_STATUS = re.compile(r"http2 header with status: (\d{3})")
_PROXY_STATUS = re.compile(r"proxy returned response code (\d{3})", re.IGNORECASE)
_CLOSED = re.compile(r"socket closed|connection reset|eof\b", re.IGNORECASE)
_CERTIFICATE = re.compile(r"certificate|hostname", re.IGNORECASE)
#: Where in a connect it happened, by the library's words; the first that fits.
_PHASES = (
    (re.compile(r"dns resolution|name resolution|getaddrinfo|no address", re.IGNORECASE), "dns"),
    (re.compile(r"ssl|tls|certificate|handshake", re.IGNORECASE), "tls"),
    (re.compile(r"proxy|http connect", re.IGNORECASE), "proxy"),
    (re.compile(r"refused|unreachable|timed out|no such file|failed to connect to remote", re.IGNORECASE), "tcp"),
)


def error_of(
    code: str,
    details: str,
    metadata: Mapping[str, str],
    *,
    endpoint: str,
    method: str,
    heard: bool,
    connected: bool,
    max_event_bytes: int | None = None,
) -> SpanwireError:
    """The error of a call that ended with this status.

    Args:
        code: the status's name.
        metadata: initial and trailing ones, names in lower case.
        heard: a message of the answer had come.
        connected: the connection is still there.
        max_event_bytes: this side's limit on messages.
    """
    words = details or f"the server ended the call with {code}"
    if (code == "UNAVAILABLE" and (not connected or _BROKEN.search(details))) or _LOST.search(details):
        return _broken(words, endpoint=endpoint, heard=heard)
    if code == "RESOURCE_EXHAUSTED" and _TOO_LARGE.search(details):
        # Received by the server is what we have sent. The library's own words begin with the side since 1.65; before, only
        # the limit tells, since both sides say the same.
        limit = _LIMIT.search(details)
        ours = "CLIENT: Received" in details or (
            details.startswith("Received") and limit is not None and int(limit[1]) == max_event_bytes
        )
        phase = "read" if ours else "send"
        side = "Limits.max_event_bytes" if phase == "read" else "the server's limit"
        return MessageTooBig(f"{words} ({side})", endpoint=endpoint, phase=phase)
    kind, retryable = _KINDS.get(code, (ServerError, False))
    if code == "RESOURCE_EXHAUSTED" and _SLOW_READER.search(details):  # not overload: it would happen again
        kind, retryable = ServerError, False
    if code == "UNIMPLEMENTED":
        words = f"the server does not know {method} ({words}): does it speak this dialect?"
    pushback = metadata.get("grpc-retry-pushback-ms", "").strip()
    if pushback and retry_after_s(metadata) is None:  # negative, or no number: gRFC A6 reads both as "never"
        retryable = False
    return kind(
        words,
        code=code,
        retry_after_s=retry_after_s(metadata),
        headers=dict(metadata),
        endpoint=endpoint,
        phase="read" if heard else "wait",
        retryable=retryable and not heard,
    )


def _broken(words: str, *, endpoint: str, heard: bool) -> ConnectionFailed:
    retryable = not heard
    status = _HTTP_STATUS.search(words)
    if _NOT_GRPC.search(words):
        words, retryable = f"this is not a gRPC server: {words}", False
    elif status:
        words = f"something between here and the server answered with the HTTP status {status[1]}: {words}"
    return ConnectionFailed(words, endpoint=endpoint, phase="read" if heard else "wait", retryable=retryable)


def connect_error(details: str, *, endpoint: str, secure: bool = False) -> ConnectionFailed:
    """Why no connection could be made. ``secure``: with TLS, whose alerts the library keeps to itself."""
    words = details or "no connection could be made"
    if _NOT_GRPC.search(details):
        return ConnectionFailed(
            f"this is not a gRPC server: {words}", endpoint=endpoint, phase="connect", retryable=False
        )
    phase = next((name for pattern, name in _PHASES if pattern.search(details)), "connect")
    never = phase == "tls" and _CERTIFICATE.search(details) is not None
    refused = _PROXY_STATUS.search(details)
    if (
        refused is not None and refused[1].startswith("4") and refused[1] not in ("408", "429")
    ):  # another try would be answered in the same way
        never = True
        if refused[1] == "407":
            words = f"the proxy wants a user and a password, or other ones: Endpoint(proxy='http://user:password@...') ({words})"
    elif secure and phase == "connect" and _CLOSED.search(details):
        words = f"the server ended the TLS handshake; it may want a client certificate, TLS(cert=...), or another one ({words})"
    return ConnectionFailed(words, endpoint=endpoint, phase=phase, retryable=not never)


def retry_after_s(metadata: Mapping[str, str]) -> float | None:
    """How long the server asks to wait, in seconds; None where it does not say, or says never."""
    for name, scale in (("grpc-retry-pushback-ms", 1e-3), ("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        value = metadata.get(name, "").strip()
        if value.isascii() and value.replace(".", "", 1).isdigit():
            return float(value) * scale
    return None
