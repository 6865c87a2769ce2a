"""Sets of public keys (RFC 7517), and how they are kept fresh.

The parsing is pure. ``cryptography`` is loaded when the first key is made: it is an extra, only for those who need it.
"""

from __future__ import annotations

import binascii
import http.client
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import msgspec

from spanwire.errors import ConfigurationError

__all__ = ["FAL_KEYS_URL", "GEMINI_KEYS_URL", "KeySet", "Verify", "ed25519_key", "fetch", "rs256_key"]

#: Where the providers publish their keys. Sources: their documentation of webhooks.
FAL_KEYS_URL = "https://rest.fal.ai/.well-known/jwks.json"
GEMINI_KEYS_URL = "https://generativelanguage.googleapis.com/.well-known/jwks.json"

#: A set is good for a day: fal's documentation allows no more.
KEEP_S = 24 * 3600.0
#: Between two loads that unknown keys ask for: anybody can send an unknown key.
LEAST_RELOAD_S = 60.0
#: Of a set's document, of keys in it, and of an RSA modulus (a check's cost grows with its square).
_MOST_BYTES = 256 * 1024
_MOST_KEYS = 64
_MOST_RSA_BITS = 8192
_LEAST_RSA_BITS = 2048

#: ``verify(signature, message)``; False for whatever is wrong, never raises.
Verify: TypeAlias = Callable[[bytes, bytes], bool]


class _Key(msgspec.Struct):
    kty: str = ""
    crv: str = ""
    kid: str = ""
    alg: str = ""
    use: str = ""
    x: str = ""
    n: str = ""
    e: str = ""


class KeySet:
    """The keys of one provider; thread-safe. Those that cannot be read are left out.

    Args:
        document: the set, JSON as bytes, or as what it decodes to; None for one that is loaded when it is first needed.
        load: gives the document; None if it cannot be loaded again.
        clock: monotonic seconds.

    Attributes:
        ed25519: all keys of this kind.
        rs256: by ``kid``.
    """

    def __init__(
        self,
        document: bytes | Mapping[str, Any] | None = None,
        *,
        load: Callable[[], bytes] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ed25519: list[Verify] = []
        self.rs256: dict[str, Verify] = {}
        self._load = load
        self._clock = clock
        self._lock = threading.Lock()
        self._loaded_s: float | None = None
        self._tried_s: float | None = None
        if document is not None:
            self.replace(document)

    def replace(self, document: bytes | Mapping[str, Any]) -> None:
        """Take the keys of this document. One without a usable key changes nothing: a broken answer is no revocation."""
        ed25519: list[Verify] = []
        rs256: dict[str, Verify] = {}
        for raw in _entries(document):
            try:
                key = msgspec.convert(raw, _Key)
            except (ValueError, RecursionError):
                continue
            if key.use not in ("", "sig"):
                continue
            if (key.kty, key.crv) == ("OKP", "Ed25519"):
                one = ed25519_key(_number(key.x))
                if one is not None:
                    ed25519.append(one)
            elif key.kty == "RSA" and key.alg in ("", "RS256") and key.kid:
                other = rs256_key(_number(key.n), _number(key.e))
                if other is not None:
                    rs256[key.kid] = other
        if ed25519 or rs256:
            self.ed25519, self.rs256 = ed25519, rs256
            self._loaded_s = self._clock()

    def stale(self) -> bool:
        """A day old, or never loaded."""
        return self._load is not None and (self._loaded_s is None or self._clock() - self._loaded_s > KEEP_S)

    def reload(self) -> bool:
        """Load the set again, at most once a minute. Blocks. True if there may be other keys now; never raises."""
        if self._load is None:
            return False
        asked_s = self._clock()
        with self._lock:  # whoever waits here gets what the first one loaded
            if self._tried_s is not None:
                if self._tried_s > asked_s:
                    return True
                if self._clock() - self._tried_s < LEAST_RELOAD_S:
                    return False
            try:
                self.replace(self._load())
            except (OSError, http.client.HTTPException, ValueError):
                return False
            finally:
                self._tried_s = self._clock()
            return True


def fetch(url: str, *, timeout_s: float = 5.0) -> bytes:
    """The document at an address that the user or this module chose. Blocks; follows no redirect.

    Raises:
        OSError, http.client.HTTPException: no connection, or no answer.
        ValueError: no 200, or too much.
    """
    from spanwire.endpoint import TLS
    from spanwire.net.tls import context_for

    address = urlsplit(url)
    connection: http.client.HTTPConnection
    if address.scheme == "https":
        connection = http.client.HTTPSConnection(
            address.hostname or "", address.port, timeout=timeout_s, context=context_for(TLS())
        )
    else:
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=timeout_s)
    try:
        connection.request("GET", address.path or "/", headers={"accept": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise ValueError(f"{address.hostname} answers {answer.status} to a request for its keys")
        document = answer.read(_MOST_BYTES + 1)
        if len(document) > _MOST_BYTES:
            raise ValueError(f"the keys of {address.hostname} are over {_MOST_BYTES} bytes")
        return document
    finally:
        connection.close()


def ed25519_key(raw: bytes) -> Verify | None:
    """A public key of 32 bytes; None if these are none. Raises ConfigurationError without ``cryptography``."""
    exceptions, ed25519, *_ = _cryptography()
    try:
        key = ed25519.Ed25519PublicKey.from_public_bytes(raw)
    except ValueError:
        return None

    def verify(signature: bytes, message: bytes) -> bool:
        try:
            key.verify(signature, message)
        except exceptions.InvalidSignature:
            return False
        return True

    return verify


def rs256_key(modulus: bytes, exponent: bytes) -> Verify | None:
    """An RSA public key for RS256 (RSASSA-PKCS1-v1_5 with SHA-256); None if these numbers are none."""
    exceptions, _, rsa, padding, hashes = _cryptography()
    n, e = int.from_bytes(modulus, "big"), int.from_bytes(exponent, "big")
    # An exponent of 1 would make everything a right signature; a huge one makes a check slow. Real ones are 65537.
    if not (_LEAST_RSA_BITS <= n.bit_length() <= _MOST_RSA_BITS and 3 <= e < 2**33):
        return None
    try:
        key = rsa.RSAPublicNumbers(e, n).public_key()
    except ValueError:
        return None

    def verify(signature: bytes, message: bytes) -> bool:
        try:
            key.verify(signature, message, padding.PKCS1v15(), hashes.SHA256())
        except (exceptions.InvalidSignature, ValueError):
            return False
        return True

    return verify


def _entries(document: bytes | Mapping[str, Any]) -> list[Any]:
    if isinstance(document, bytes):
        try:
            document = msgspec.json.decode(document)
        except (ValueError, RecursionError):
            return []
    entries = document.get("keys") if isinstance(document, Mapping) else None
    return entries[:_MOST_KEYS] if isinstance(entries, list) else []


def _number(text: str) -> bytes:
    """base64url without padding; b"" for what is none."""
    try:
        raw = text.rstrip("=").encode("ascii").replace(b"-", b"+").replace(b"_", b"/")
        return binascii.a2b_base64(raw + b"=" * (-len(raw) % 4), strict_mode=True)
    except ValueError:
        return b""


def _cryptography() -> tuple[Any, ...]:
    try:
        from cryptography import exceptions
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ed25519, padding, rsa
    except ImportError as error:
        raise ConfigurationError(
            "signatures with public keys (fal, Gemini, Standard Webhooks v1a) need cryptography: pip install 'spanwire[webhook]'"
        ) from error
    return exceptions, ed25519, rsa, padding, hashes
