"""TLS contexts, one for each configuration: building one reads the system's certificates, 30 to 200 ms."""

from __future__ import annotations

import os
import ssl
import threading
from functools import lru_cache
from pathlib import Path

from ..endpoint import TLS
from ..errors import ConfigurationError

__all__ = ["context_for"]

_lock = threading.Lock()


def context_for(tls: TLS, *, alpn: tuple[str, ...] = ("http/1.1",)) -> ssl.SSLContext:
    """The context of this configuration, made once and shared by all connections.

    ``alpn``: the protocols to offer, the best one first.

    Raises:
        ConfigurationError: a file of ``Endpoint.tls`` is missing or is not what it should be.
    """
    with _lock:
        return _build(tls, alpn)


@lru_cache(maxsize=64)
def _build(tls: TLS, alpn: tuple[str, ...]) -> ssl.SSLContext:
    context = _trusting(tls.ca)
    context.set_alpn_protocols(list(alpn))
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


def _trusting(ca: str | None) -> ssl.SSLContext:
    try:
        if ca is None:
            return ssl.create_default_context()
        if "-----BEGIN" in ca:
            return ssl.create_default_context(cadata=ca)
        if Path(ca).is_dir():
            return ssl.create_default_context(capath=ca)
        return ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(
            f"Endpoint.tls: cannot load the CA certificates from TLS(ca=...): {_words(error)}"
        ) from error


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _refuse_password() -> str:
    raise ValueError("its key is protected by a password; give a key without one")


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__
