"""A connection that could not be made, in words: what, why, and what to do about it."""

from __future__ import annotations

import os
import socket
import ssl

from ..endpoint import Endpoint
from ..errors import ConnectionFailed
from .proxies import Proxy
from .tls import trusts_nobody

__all__ = ["certificate_refused", "connect_failed", "tls_failed", "words"]

#: What OpenSSL calls an answer that is plain text.
_NO_TLS = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "UNEXPECTED_MESSAGE"})
#: Alerts by which a server refuses our certificate, or the lack of one: RFC 8446 section 6.2, as OpenSSL names them. A
#: TLS 1.2 server says "handshake failure" where a certificate is missing.
_REFUSALS = ("CERTIFICATE", "UNKNOWN_CA", "ACCESS_DENIED", "HANDSHAKE_FAILURE")


def connect_failed(
    endpoint: Endpoint, phase: str, what: str, error: BaseException, *, retryable: bool = True
) -> ConnectionFailed:
    """What failed, and the system's words for why."""
    return ConnectionFailed(f"{what}: {words(error)}", endpoint=endpoint.address, phase=phase, retryable=retryable)


def tls_failed(
    endpoint: Endpoint, context: ssl.SSLContext, error: OSError, proxy: Proxy | None = None
) -> ConnectionFailed:
    """A handshake with the endpoint, or with the proxy before it."""
    phase, who = ("tls", "the server") if proxy is None else ("proxy", f"the proxy {proxy}")
    if isinstance(error, ssl.SSLCertVerificationError):
        advice = trusts_nobody(endpoint.tls, context) or "for a private CA use TLS(ca=FILE)"
        what = f"the certificate of {who} is not trusted; {advice}"
        return connect_failed(endpoint, phase, what, error, retryable=False)
    refused = None if proxy is not None else certificate_refused(endpoint.address, error)
    if refused is not None:
        return refused
    what = "the TLS handshake failed" if proxy is None else f"the TLS handshake with {who} failed"
    if getattr(error, "reason", None) in _NO_TLS:
        what = f"{who} does not speak TLS here (is it http:// and not https://?)"
    return connect_failed(endpoint, phase, what, error)


def certificate_refused(address: str, error: BaseException | None) -> ConnectionFailed | None:
    """The error for a server that refuses our certificate or the lack of one; None if this is something else.

    A TLS 1.3 server says so after the handshake, so that it comes with the first read, in the place of an answer.
    """
    reason = (error.reason or "") if isinstance(error, ssl.SSLError) else ""
    if "ALERT" not in reason or not any(word in reason for word in _REFUSALS):
        return None
    assert error is not None
    what = "the server ended the TLS handshake; it may want a client certificate, TLS(cert=...), or another one"
    return ConnectionFailed(f"{what}: {words(error)}", endpoint=address, phase="tls", retryable=False)


def words(error: BaseException) -> str:
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
