"""TLS contexts, one for each configuration, and the sessions that they resume.

Building a context reads the system's certificates, 30 to 200 ms, so it is done once.

**Trust.** ``TLS.ca`` is trusted instead of the system's store. Without it ``SSL_CERT_FILE`` and ``SSL_CERT_DIR`` are
honoured as OpenSSL does: each takes the place of its default. Where neither is set, macOS and Windows verify by their
own means (``truststore``), and elsewhere OpenSSL's default places are read, or those of other distributions if these
are empty, which happens to a Python that was built on another system.

**Sessions.** A server that was spoken to before need not send and prove its certificate again: that saves CPU on both
sides, and with TLS 1.2 a round trip. A context remembers the last session of each host and port, and never gives it to
another context: the context is what says how a server is verified and who we are. A server that refuses one makes a
full handshake of it. A forked child may keep them: a session is a secret and no state of a connection; each handshake
draws fresh randoms (OpenSSL seeds itself anew after a fork), so two processes may resume the same one.
"""

from __future__ import annotations

import contextlib
import os
import ssl
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from typing import Any, Self, cast

from ..endpoint import TLS
from ..errors import ConfigurationError

__all__ = [
    "MAX_SESSIONS",
    "context_for",
    "handshake_with",
    "proxy_context_for",
    "remember_session",
    "trusts_nobody",
]

#: Sessions that one context remembers, of about 3 KiB each: the servers of one configuration, with room.
MAX_SESSIONS = 64
_ENVIRONMENT = ("SSL_CERT_FILE", "SSL_CERT_DIR")
#: Where distributions keep all CA certificates in one file. Source: their packages `ca-certificates`.
_CA_FILES = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Ubuntu, Arch, Gentoo, Alpine
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",  # Fedora, RHEL
    "/etc/pki/tls/certs/ca-bundle.crt",  # their older releases
    "/etc/ssl/ca-bundle.pem",  # SUSE
    "/etc/ssl/cert.pem",  # Alpine, OpenWrt, the BSDs
)

_lock = threading.Lock()
#: The server that the handshake of this task speaks to: `wrap_bio` is told its name, but not its port.
_peer: ContextVar[tuple[str, int] | None] = ContextVar("spanwire_tls_peer", default=None)


def context_for(tls: TLS, alpn: tuple[str, ...] = ("http/1.1",)) -> ssl.SSLContext:
    """The context of this configuration, made once and shared by all connections.

    Args:
        alpn: protocols to offer, the preferred one first.

    Raises:
        ConfigurationError: a file of ``Endpoint.tls`` is missing or is not what it should be.
    """
    with _lock:
        return _build(tls, alpn, None, _environment())


def proxy_context_for(tls: TLS) -> ssl.SSLContext:
    """The context for TLS to a proxy: trusts the system's store and ``TLS.ca``.

    Nothing else of an endpoint's configuration is meant for the proxy: it gets no client certificate, and
    ``TLS(verify=False)`` does not make us show it our password unverified.
    """
    with _lock:
        return _build(TLS(), ("http/1.1",), tls.ca, _environment())


def _environment() -> tuple[str | None, ...]:
    """A part of the cache's key: set after the first call, they hold for the contexts that are made from then on."""
    return tuple(os.environ.get(name) for name in _ENVIRONMENT)


@lru_cache(maxsize=64)
def _build(tls: TLS, alpn: tuple[str, ...], more_ca: str | None, environment: tuple[str | None, ...]) -> ssl.SSLContext:
    context = _system_context(any(environment)) if tls.ca is None and tls.verify else _ResumingContext()
    context.set_alpn_protocols(list(alpn))
    for ca in (tls.ca, more_ca):
        if ca is not None:
            _trust(context, ca)
    if not tls.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if tls.cert is not None:
        certificate, key = (tls.cert, None) if isinstance(tls.cert, str) else tls.cert
        try:
            # Without an own password function OpenSSL would ask on the terminal, on the event loop.
            context.load_cert_chain(certificate, key, password=_refuse_password)
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"Endpoint.tls: cannot load the client certificate: {_words(error)}") from error
    return context


# --- trust --------------------------------------------------------------------------------------------------------------


def _system_context(by_environment: bool) -> ssl.SSLContext:
    if not by_environment and sys.platform in ("darwin", "win32"):
        return _platform_context()
    context = _ResumingContext()
    context.load_default_certs()  # SSL_CERT_FILE and SSL_CERT_DIR, else OpenSSL's own places
    if not by_environment and _is_empty(context):
        for file in _CA_FILES:
            if Path(file).is_file():
                with contextlib.suppress(OSError):  # one that cannot be read is as good as none
                    context.load_verify_locations(file)
                    break
    return context


def _platform_context() -> ssl.SSLContext:
    """Verified by the operating system.

    Without resumption: Python's sessions do not keep the server's chain, which truststore verifies after each handshake.
    """
    import truststore

    return truststore.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def _trust(context: ssl.SSLContext, ca: str) -> None:
    try:
        if "-----BEGIN" in ca:
            context.load_verify_locations(cadata=ca)
        elif Path(ca).is_dir():
            context.load_verify_locations(capath=ca)
        else:
            context.load_verify_locations(cafile=ca)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigurationError(
            f"Endpoint.tls: cannot load the CA certificates from TLS(ca=...): {_words(error)}"
        ) from error


def _is_empty(context: ssl.SSLContext) -> bool:
    """No certificate is loaded, and no folder has any that could be loaded when needed."""
    if context.cert_store_stats()["x509"]:
        return False
    folders = os.environ.get("SSL_CERT_DIR") or ssl.get_default_verify_paths().openssl_capath
    # OpenSSL finds them by names that are hashes: openssl-rehash(1).
    return not any(True for folder in folders.split(os.pathsep) for _ in Path(folder).glob("????????.[0-9]"))


def trusts_nobody(tls: TLS, context: ssl.SSLContext) -> str | None:
    """Why no server can be trusted with this context, in words for people; None where one can."""
    if tls.ca is not None or not isinstance(context, _ResumingContext) or not _is_empty(context):
        return None
    advice = "no CA certificates were found on this system: install ca-certificates or use TLS(ca=FILE)"
    named = [name for name in _ENVIRONMENT if os.environ.get(name)]
    return f"{advice} (now {' and '.join(named)} in the environment should name some)" if named else advice


# --- sessions -----------------------------------------------------------------------------------------------------------


class _ResumingContext(ssl.SSLContext):
    """Hands the session of the last connection to a server over to the next handshake with it."""

    sessions: OrderedDict[tuple[str, int], ssl.SSLSession]

    def __new__(cls) -> Self:
        context = super().__new__(cls, ssl.PROTOCOL_TLS_CLIENT)
        context.sessions = OrderedDict()
        # What ssl.create_default_context does besides, which makes contexts of no other class.
        if sys.version_info >= (3, 13):
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | ssl.VERIFY_X509_STRICT
        key_log = os.environ.get("SSLKEYLOGFILE")
        if key_log and not sys.flags.ignore_environment:
            context.keylog_filename = key_log
        return context

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        peer = _peer.get()
        if session is None and peer is not None:
            with _lock:
                session = self.sessions.get(peer)
        made = super().wrap_bio(incoming, outgoing, server_side, server_hostname, session)
        if peer is not None:
            cast(Any, made)._spanwire_keep = (self, peer)
        return made


@contextlib.contextmanager
def handshake_with(context: ssl.SSLContext, host: str, port: int) -> Iterator[None]:
    """The handshake that is made inside is one with this server, and may resume its session."""
    token = _peer.set((host, port))
    try:
        yield
    except OSError:  # perhaps for the session's sake: the next handshake begins without
        if isinstance(context, _ResumingContext):
            with _lock:
                context.sessions.pop((host, port), None)
        raise
    finally:
        _peer.reset(token)


def remember_session(ssl_object: ssl.SSLObject | None) -> None:
    """Keep the connection's session for the next handshake with the same server.

    To be called once, with or after the first answer: TLS 1.3 sends its tickets after the handshake. Harmless on
    anything that was not made with :func:`handshake_with`.
    """
    keep = getattr(ssl_object, "_spanwire_keep", None)
    if keep is None or ssl_object is None:
        return
    session = ssl_object.session
    if session is None or not (session.has_ticket or session.id):
        return
    context, peer = keep
    with _lock:
        context.sessions[peer] = session
        context.sessions.move_to_end(peer)
        while len(context.sessions) > MAX_SESSIONS:
            context.sessions.popitem(last=False)


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _refuse_password() -> str:
    raise ValueError("its key is protected by a password; give a key without one")


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__
