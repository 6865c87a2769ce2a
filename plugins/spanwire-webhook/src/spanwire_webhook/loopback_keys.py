"""The job server's own keys: Ed25519 as fal signs, RSA as Gemini does, and the set (RFC 7517) that it serves of both.

Made once in a process, when they are first needed; they guard nothing. Needs ``cryptography``.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

__all__ = ["KEYS_PATH", "key_set", "sign_fal", "sign_gemini"]

#: Where the set is served, as by both providers.
KEYS_PATH = "/.well-known/jwks.json"
_KID = "loopback"
_ISSUER = "https://generativelanguage.googleapis.com"
#: How long a token is good for, in seconds.
_TOKEN_S = 300


def sign_fal(request_id: str, timestamp: int, body: bytes, *, wrong: bool = False) -> dict[str, str]:
    """fal's headers. ``wrong``: by a key that is in no set."""
    user = "loopback"
    message = "\n".join((request_id, user, str(timestamp), hashlib.sha256(body).hexdigest())).encode()
    start = "X-Fal-Webhook-"
    return {
        f"{start}Request-Id": request_id,
        f"{start}User-Id": user,
        f"{start}Timestamp": str(timestamp),
        f"{start}Signature": _ed25519(wrong).sign(message).hex(),
    }


def sign_gemini(
    id: str, timestamp: int, audience: str, event: Mapping[str, Any], *, wrong: bool = False
) -> dict[str, str]:
    """The headers of a dynamic webhook: a token whose claims are the event."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import padding

    claims = {"iss": _ISSUER, "aud": audience, "iat": timestamp, "exp": timestamp + _TOKEN_S, **event}
    head = {"alg": "RS256", "typ": "JWT", "kid": _KID}
    signed = b".".join(_base64url(msgspec.json.encode(part)).encode() for part in (head, claims))
    signature = _rsa(wrong).sign(signed, padding.PKCS1v15(), hashes.SHA256())
    token = f"{signed.decode()}.{_base64url(signature)}"
    return {"webhook-id": id, "webhook-timestamp": str(timestamp), "webhook-signature": token}


@functools.cache
def key_set() -> bytes:
    """The public keys."""
    numbers = _rsa(False).public_key().public_numbers()
    ed25519 = {
        "kty": "OKP",
        "crv": "Ed25519",
        "use": "sig",
        "x": _base64url(_ed25519(False).public_key().public_bytes_raw()),
    }
    rsa = {
        "kty": "RSA",
        "alg": "RS256",
        "use": "sig",
        "kid": _KID,
        "n": _base64url(numbers.n.to_bytes(256, "big")),
        "e": _base64url(numbers.e.to_bytes(3, "big")),
    }
    return msgspec.json.encode({"keys": [ed25519, rsa]})


@functools.cache
def _ed25519(wrong: bool) -> Any:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.generate()


@functools.cache
def _rsa(wrong: bool) -> Any:
    from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key

    return generate_private_key(65537, 2048)


def _base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
