"""PURE: is a webhook from whom it says it is? One verifier for each way in which servers sign.

::

    verifier = StandardWebhooks(["whsec_..."])
    check = verifier.begin(headers)  # reads the headers, once
    check.feed(data)  # raw bytes of the body, as they come
    verdict = check.verdict(now_s)  # never raises: a verdict and its reason

Rules for all of them: raw bytes only, since no JSON encoder gives back the bytes that were signed; header names in any case;
two lines of a signature, an id or a timestamp are refused, since a proxy and we may read different ones; parts that cannot be
read are skipped; every secret is tried against every part, in constant time, on decoded bytes. Only what the user configures
raises: :class:`~spanwire.errors.ConfigurationError`, without the secret in it.

Sources: the Standard Webhooks specification (standard-webhooks/spec, "Signature scheme"); Baseten's and fal's documentation of
their webhooks; RFC 7515 (compact JWS) for Gemini's dynamic webhooks.
"""

from __future__ import annotations

import binascii
import hashlib
import hmac
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import msgspec

from spanwire.errors import ConfigurationError

from .keys import KeySet, ed25519_key

__all__ = [
    "TOLERANCE_S",
    "Baseten",
    "Bearer",
    "Check",
    "Fal",
    "Gemini",
    "GeminiJWT",
    "Headers",
    "Reason",
    "StandardWebhooks",
    "Verdict",
    "Verifier",
    "sign_baseten",
    "sign_standard",
    "token_digest",
    "verifier_for",
]

#: Seconds that a timestamp may differ from our clock, both ways; this difference itself passes. Source: Standard Webhooks.
TOLERANCE_S = 300
#: A secret of fewer bytes can be guessed. The specification asks for 24 to 64; 16 is what some senders give out.
_LEAST_KEY_BYTES = 16
#: Signatures with public keys that one request is worth: each costs 0.2 ms for each key (measured), and anybody can send them.
_MOST_PUBLIC_PARTS = 8
#: Of parts in all: a sender that rotates has two.
_MOST_PARTS = 64
#: Of a token; real ones are below 1 KB.
_MOST_TOKEN_BYTES = 16 * 1024

Headers: TypeAlias = Iterable[tuple[bytes | str, bytes | str]]
Reason: TypeAlias = Literal[
    "ok",
    "bad_mac",
    "bad_path",
    "duplicate_header",
    "malformed_timestamp",
    "mismatch",
    "missing_header",
    "no_usable_signature",
    "too_new",
    "too_old",
    "unknown_key",
    "wrong_algorithm",
    "wrong_audience",
]

_TIMESTAMP = re.compile(rb"[0-9]{1,12}")
_HEX_32 = re.compile(rb"[0-9a-fA-F]{64}")
_HEX_64 = re.compile(rb"[0-9a-fA-F]{128}")


class Verdict(msgspec.Struct, frozen=True):
    """What came out.

    Attributes:
        reason: ``ok``, or the first thing that is wrong.
        signature_ok: the signature is right, whatever the clock and the audience say.
        id: of the message as its headers have it; None if they do not.
        timestamp: the signed one, seconds since the epoch; None where there is none.
        payload: what is signed, where that is not the body: the claims of a token, JSON.
    """

    reason: Reason
    signature_ok: bool = False
    id: str | None = None
    timestamp: int | None = None
    payload: bytes | None = None

    @property
    def ok(self) -> bool:
        """Believe it."""
        return self.reason == "ok"


class Check(Protocol):
    """One request that is being checked.

    Attributes:
        uses_keys: by a key set, which may be out of date.
    """

    uses_keys: bool

    def feed(self, data: bytes) -> None:
        """The next bytes of the body."""

    def verdict(self, now_s: float) -> Verdict:
        """The verdict over all that was fed. May be asked again, after a key set has changed."""


class Verifier(Protocol):
    """A way of signing, with its secrets or keys."""

    def begin(self, headers: Headers, *, audience: Sequence[str] = ()) -> Check:
        """Start to check a request. ``audience``: our addresses, for schemes that sign whom a message is for."""


class _Refused:
    """The headers alone say no."""

    __slots__ = ("_verdict",)
    uses_keys = False

    def __init__(self, reason: Reason, id: str | None = None) -> None:
        self._verdict = Verdict(reason, id=id)

    def feed(self, data: bytes) -> None:
        pass

    def verdict(self, now_s: float) -> Verdict:
        return self._verdict


# --- Standard Webhooks: v1 (HMAC-SHA256) and v1a (Ed25519) -------------------------------------------------------------


class StandardWebhooks:
    """Standard Webhooks: ``webhook-id``, ``webhook-timestamp``, ``webhook-signature``.

    Signed is ``{id}.{timestamp}.`` and the body. The signature header has parts, separated by blanks: ``v1,`` and base64 of an
    HMAC-SHA256, ``v1a,`` and base64 of an Ed25519 signature. Ed25519 signs the message and not its hash, so a body whose
    request has such a part, and no other, is kept in memory until the verdict.

    Args:
        secrets: ``whsec_`` and the key in base64 (v1), or ``whpk_`` and the public key in base64 (v1a; needs ``cryptography``).
            Several while one is being replaced.
        tolerance_s: see :data:`TOLERANCE_S`.
    """

    def __init__(self, secrets: Sequence[str], *, tolerance_s: float = TOLERANCE_S) -> None:
        self._keys = [_symmetric(secret) for secret in secrets if not secret.startswith("whpk_")]
        self._public = [_public(secret) for secret in secrets if secret.startswith("whpk_")]
        self._tolerance_s = tolerance_s
        if not secrets:
            raise ConfigurationError("a webhook verifier needs at least one secret: whsec_... or whpk_...")

    def begin(self, headers: Headers, *, audience: Sequence[str] = ()) -> Check:
        found = _pick(headers, (b"webhook-id", b"webhook-timestamp", b"webhook-signature"))
        if isinstance(found, _Refused):
            return found
        message_id, raw_timestamp, signatures = found
        if not _TIMESTAMP.fullmatch(raw_timestamp):
            return _Refused("malformed_timestamp", _text(message_id))
        digests: list[bytes] = []
        public: list[bytes] = []
        for part in signatures.split()[:_MOST_PARTS]:
            version, _, encoded = part.partition(b",")
            if version == b"v1" and self._keys:
                _add(digests, _base64(encoded), 32)
            elif version == b"v1a" and self._public and len(public) < _MOST_PUBLIC_PARTS:
                _add(public, _base64(encoded), 64)
        if not digests and not public:
            return _Refused("no_usable_signature", _text(message_id))
        return _StandardCheck(self, message_id, raw_timestamp, digests, public)


class _StandardCheck:
    __slots__ = ("_digests", "_id", "_macs", "_message", "_of", "_public", "_timestamp")
    uses_keys = False

    def __init__(
        self, of: StandardWebhooks, id: bytes, timestamp: bytes, digests: list[bytes], public: list[bytes]
    ) -> None:
        self._of = of
        self._id = _text(id)
        self._timestamp = int(timestamp)
        start = id + b"." + timestamp + b"."
        self._digests = digests
        self._macs = [hmac.new(key, start, "sha256") for key in of._keys] if digests else []
        self._public = public
        self._message = bytearray(start) if public else None

    def feed(self, data: bytes) -> None:
        for mac in self._macs:
            mac.update(data)
        if self._message is not None:
            self._message += data

    def verdict(self, now_s: float) -> Verdict:
        right = _matches([mac.digest() for mac in self._macs], self._digests)
        if not right and self._message is not None:
            message = bytes(self._message)
            right = any(verify(part, message) for verify in self._of._public for part in self._public)
        return _timed(right, self._timestamp, now_s, self._of._tolerance_s, self._id)


def sign_standard(secret: str, id: str, timestamp: int, body: bytes) -> str:
    """The value of ``webhook-signature`` (v1): for senders, and tests. ``secret`` is ``whsec_...``."""
    digest = hmac.digest(_symmetric(secret), f"{id}.{timestamp}.".encode() + body, "sha256")
    return "v1," + binascii.b2a_base64(digest, newline=False).decode()


def _symmetric(secret: str) -> bytes:
    """Bytes of a ``whsec_`` secret. What libraries disagree on is refused: each would take another key."""
    if secret.startswith("v1,"):
        raise ConfigurationError("a webhook secret starts with 'v1,', which belongs to signatures: leave it out")
    if not secret.startswith("whsec_"):
        raise ConfigurationError(
            "a Standard Webhooks secret has to start with 'whsec_': without it some libraries decode the text, and others "
            "use it as it is. Put the prefix in front if what you have is base64"
        )
    return _secret_bytes(secret.removeprefix("whsec_"), "whsec_")


def _public(secret: str) -> Callable[[bytes, bytes], bool]:
    key = _secret_bytes(secret.removeprefix("whpk_"), "whpk_")
    if len(key) != 32:
        raise ConfigurationError(f"a webhook's public key 'whpk_...' has {len(key)} bytes, and Ed25519 has 32")
    verify = ed25519_key(key)
    if verify is None:
        raise ConfigurationError("a webhook's public key 'whpk_...' is none of Ed25519")
    return verify


def _secret_bytes(encoded: str, prefix: str) -> bytes:
    encoded = encoded.rstrip("=")
    key = _base64(f"{encoded}{'=' * (-len(encoded) % 4)}".encode())
    if key is None:
        raise ConfigurationError(
            f"a webhook secret '{prefix}...' is not base64 of the standard alphabet (with '+' and '/', not '-' and '_')"
        )
    if len(key) < _LEAST_KEY_BYTES:
        raise ConfigurationError(
            f"a webhook secret '{prefix}...' has {len(key)} bytes; fewer than {_LEAST_KEY_BYTES} can be guessed"
        )
    return key


# --- Baseten ----------------------------------------------------------------------------------------------------------


class Baseten:
    """``X-BASETEN-SIGNATURE``: ``v1=`` and hex of an HMAC-SHA256 of the body alone, parts separated by commas.

    The key is the secret's text as it is, ``whsec_`` included. There is no timestamp: nothing is ever too old.

    Args:
        secrets: as Baseten shows them.
    """

    def __init__(self, secrets: Sequence[str]) -> None:
        if not secrets:
            raise ConfigurationError("a webhook verifier needs at least one secret")
        self._keys = [_as_text(secret) for secret in secrets]

    def begin(self, headers: Headers, *, audience: Sequence[str] = ()) -> Check:
        found = _pick(headers, (b"x-baseten-signature",), (b"x-baseten-request-id",))
        if isinstance(found, _Refused):
            return found
        digests: list[bytes] = []
        for part in found[0].split(b",")[:_MOST_PARTS]:
            version, _, digits = part.strip().partition(b"=")
            if version == b"v1" and _HEX_32.fullmatch(digits):
                digests.append(binascii.unhexlify(digits))
        request_id = _text(found[1]) or None
        if not digests:
            return _Refused("no_usable_signature", request_id)
        return _BasetenCheck([hmac.new(key, None, "sha256") for key in self._keys], digests, request_id)


class _BasetenCheck:
    __slots__ = ("_digests", "_id", "_macs")
    uses_keys = False

    def __init__(self, macs: list[hmac.HMAC], digests: list[bytes], id: str | None) -> None:
        self._macs = macs
        self._digests = digests
        self._id = id

    def feed(self, data: bytes) -> None:
        for mac in self._macs:
            mac.update(data)

    def verdict(self, now_s: float) -> Verdict:
        right = _matches([mac.digest() for mac in self._macs], self._digests)
        return Verdict("ok" if right else "mismatch", right, self._id)


def sign_baseten(secret: str, body: bytes) -> str:
    """The value of ``X-BASETEN-SIGNATURE``: for senders, and tests."""
    return "v1=" + hmac.digest(_as_text(secret), body, "sha256").hex()


def _as_text(secret: str) -> bytes:
    key = secret.encode()
    if len(key) < _LEAST_KEY_BYTES:
        raise ConfigurationError(f"a webhook secret has {len(key)} bytes; fewer than {_LEAST_KEY_BYTES} can be guessed")
    return key


# --- fal --------------------------------------------------------------------------------------------------------------


class Fal:
    """``X-Fal-Webhook-Signature``: hex of an Ed25519 signature by any key of fal's set.

    Signed are request id, user id, timestamp, and the hex of the body's SHA-256, joined by line feeds.

    Args:
        keys: fal's key set. A mismatch may mean that it is out of date: load it again, and ask for the verdict again.
        tolerance_s: see :data:`TOLERANCE_S`.
    """

    def __init__(self, keys: KeySet, *, tolerance_s: float = TOLERANCE_S) -> None:
        self._keys = keys
        self._tolerance_s = tolerance_s

    def begin(self, headers: Headers, *, audience: Sequence[str] = ()) -> Check:
        start = b"x-fal-webhook-"
        found = _pick(headers, (start + b"request-id", start + b"user-id", start + b"timestamp", start + b"signature"))
        if isinstance(found, _Refused):
            return found
        request_id, user, timestamp, signature = found
        if not _TIMESTAMP.fullmatch(timestamp):
            return _Refused("malformed_timestamp", _text(request_id))
        if not _HEX_64.fullmatch(signature):
            return _Refused("no_usable_signature", _text(request_id))
        return _FalCheck(self, (request_id, user, timestamp), binascii.unhexlify(signature))


class _FalCheck:
    __slots__ = ("_body", "_of", "_signature", "_start")
    uses_keys = True

    def __init__(self, of: Fal, start: tuple[bytes, bytes, bytes], signature: bytes) -> None:
        self._of = of
        self._start = start
        self._signature = signature
        self._body = hashlib.sha256()

    def feed(self, data: bytes) -> None:
        self._body.update(data)

    def verdict(self, now_s: float) -> Verdict:
        message = b"\n".join((*self._start, self._body.hexdigest().encode()))
        right = any(verify(self._signature, message) for verify in self._of._keys.ed25519)
        return _timed(right, int(self._start[2]), now_s, self._of._tolerance_s, _text(self._start[0]))


# --- Gemini's dynamic webhooks -----------------------------------------------------------------------------------------


class _JOSE(msgspec.Struct):
    alg: str = ""
    kid: str = ""
    crit: list[str] | None = None


class _Claims(msgspec.Struct):
    aud: str | list[str] = ""
    exp: int | float | None = None
    iat: int | float | None = None


class GeminiJWT:
    """``Webhook-Signature``: a compact JWS with RS256 by the key that it names.

    It signs neither the body nor the other headers: take :attr:`Verdict.payload`, the token's claims, as the event.
    The algorithm is fixed here and never taken from the token (RFC 8725, section 3.1).

    Args:
        keys: Google's key set. ``unknown_key`` may mean that it is out of date.
        tolerance_s: see :data:`TOLERANCE_S`; here after ``exp``.
    """

    def __init__(self, keys: KeySet, *, tolerance_s: float = TOLERANCE_S) -> None:
        self._keys = keys
        self._tolerance_s = tolerance_s

    def begin(self, headers: Headers, *, audience: Sequence[str] = ()) -> Check:
        found = _pick(headers, (b"webhook-signature",), (b"webhook-id", b"webhook-timestamp"))
        if isinstance(found, _Refused):
            return found
        token, message_id = found[0].strip(), _text(found[1]) or None
        parts = token.split(b".") if len(token) <= _MOST_TOKEN_BYTES else []
        decoded = [_base64url(part) for part in parts]
        if len(decoded) != 3:
            return _Refused("no_usable_signature", message_id)
        head, payload, signature = decoded
        if head is None or payload is None or signature is None:
            return _Refused("no_usable_signature", message_id)
        jose = _decoded(head, _JOSE)
        if jose is None or jose.crit is not None:  # `crit`: extensions that must be understood, and we know none
            return _Refused("no_usable_signature", message_id)
        if jose.alg != "RS256":
            return _Refused("wrong_algorithm", message_id)
        return _GeminiCheck(
            self, jose.kid, (token.rpartition(b".")[0], payload, signature), tuple(audience), message_id
        )


class _GeminiCheck:
    __slots__ = ("_audience", "_id", "_kid", "_of", "_token")
    uses_keys = True

    def __init__(
        self, of: GeminiJWT, kid: str, token: tuple[bytes, bytes, bytes], audience: tuple[str, ...], id: str | None
    ) -> None:
        self._of = of
        self._kid = kid
        self._token = token
        self._audience = audience
        self._id = id

    def feed(self, data: bytes) -> None:
        pass  # the token does not cover it

    def verdict(self, now_s: float) -> Verdict:
        signed, payload, signature = self._token
        verify = self._of._keys.rs256.get(self._kid)
        if verify is None:
            return Verdict("unknown_key", id=self._id)
        if not verify(signature, signed):
            return Verdict("mismatch", id=self._id)
        claims = _decoded(payload, _Claims)
        reason: Reason = "ok"
        if claims is None or claims.exp is None:
            reason = "malformed_timestamp"  # a token without an end would be good for ever
        elif now_s - self._of._tolerance_s > claims.exp:
            reason = "too_old"
        else:
            named = [claims.aud] if isinstance(claims.aud, str) else claims.aud
            if not set(named) & set(self._audience):
                reason = "wrong_audience"
        issued = claims.iat if claims else None
        timestamp = int(issued) if issued is not None and abs(issued) < 1e12 else None
        return Verdict(reason, True, self._id, timestamp, payload)


class Gemini:
    """Both ways in which Gemini signs, told apart by the header: a token (dynamic webhooks), or Standard Webhooks (static ones).

    Args:
        secrets: of the project's static webhooks: ``whsec_...``; none if there are none.
        keys: Google's key set; None: no token is believed.
        tolerance_s: see :data:`TOLERANCE_S`.
    """

    def __init__(self, secrets: Sequence[str], keys: KeySet | None, *, tolerance_s: float = TOLERANCE_S) -> None:
        self._static = StandardWebhooks(secrets, tolerance_s=tolerance_s) if secrets else None
        self._dynamic = GeminiJWT(keys, tolerance_s=tolerance_s) if keys is not None else None

    def begin(self, headers: Headers, *, audience: Sequence[str] = ()) -> Check:
        lines = list(headers)
        # Parts of Standard Webhooks have a comma, which base64url and so a token has not.
        static = any(_bytes(name).lower() == b"webhook-signature" and b"," in _bytes(value) for name, value in lines)
        chosen = self._static if static else self._dynamic
        return _Refused("no_usable_signature") if chosen is None else chosen.begin(lines, audience=audience)


# --- Cog --------------------------------------------------------------------------------------------------------------


class Bearer:
    """``Authorization: Bearer`` and a token, as Cog sends what stands in its environment as ``WEBHOOK_AUTH_TOKEN``.

    It proves nothing of the body; the callback's address, which is asked for in any case, says what the webhook is about.

    Args:
        secrets: the tokens: several while one is being replaced.
    """

    def __init__(self, secrets: Sequence[str]) -> None:
        if not secrets:
            raise ConfigurationError("a webhook verifier needs at least one secret")
        self._tokens = [_as_text(secret) for secret in secrets]

    def begin(self, headers: Headers, *, audience: Sequence[str] = ()) -> Check:
        found = _pick(headers, (b"authorization",))
        if isinstance(found, _Refused):
            return found
        digest = token_digest(found[0])
        return _Refused("no_usable_signature") if digest is None else self.again(digest)

    def again(self, digest: bytes) -> Check:
        """The same by :func:`token_digest` of a token that came before, with the tokens of now."""
        # Digests have one length, so that comparing tells nothing of the tokens'.
        return _BearerCheck(_matches([hashlib.sha256(one).digest() for one in self._tokens], [digest]))


def token_digest(authorization: bytes) -> bytes | None:
    """The SHA-256 of a bearer token, which may be kept where the token itself may not; None if there is none."""
    scheme, _, token = authorization.strip().partition(b" ")
    return hashlib.sha256(token.strip()).digest() if scheme.lower() == b"bearer" else None


class _BearerCheck:
    __slots__ = ("_right",)
    uses_keys = False

    def __init__(self, right: bool) -> None:
        self._right = right

    def feed(self, data: bytes) -> None:
        pass

    def verdict(self, now_s: float) -> Verdict:
        return Verdict("ok" if self._right else "mismatch", self._right)


# --- shared -----------------------------------------------------------------------------------------------------------


def _pick(headers: Headers, needed: Sequence[bytes], wanted: Sequence[bytes] = ()) -> list[bytes] | _Refused:
    """Values of the headers that are needed, then of those that are wanted (b"" if absent)."""
    names = (*needed, *wanted)
    found: dict[bytes, bytes] = {}
    twice = False
    for raw_name, raw_value in headers:
        name = _bytes(raw_name).lower()
        if name in names:
            twice = twice or name in found
            found[name] = _bytes(raw_value)
    if twice:
        return _Refused("duplicate_header")
    if any(name not in found for name in needed):
        return _Refused("missing_header")
    return [found.get(name, b"") for name in names]


def _timed(right: bool, timestamp: int, now_s: float, tolerance_s: float, id: str) -> Verdict:
    reason: Reason = "ok"
    if not right:
        reason = "mismatch"
    elif now_s - timestamp > tolerance_s:
        reason = "too_old"
    elif timestamp - now_s > tolerance_s:
        reason = "too_new"
    return Verdict(reason, right, id, timestamp)


def _matches(expected: list[bytes], given: list[bytes]) -> bool:
    """Without a way out early: how long it takes says nothing about which one it was."""
    right = False
    for one in expected:
        for other in given:
            right |= hmac.compare_digest(one, other)
    return right


def _add(parts: list[bytes], decoded: bytes | None, length: int) -> None:
    if decoded is not None and len(decoded) == length:
        parts.append(decoded)


def _base64(encoded: bytes) -> bytes | None:
    try:
        return binascii.a2b_base64(encoded, strict_mode=True)
    except ValueError:
        return None


def _base64url(encoded: bytes) -> bytes | None:
    if b"+" in encoded or b"/" in encoded or b"=" in encoded:
        return None  # RFC 7515, section 2: the urlsafe alphabet, without padding
    return _base64(encoded.replace(b"-", b"+").replace(b"_", b"/") + b"=" * (-len(encoded) % 4))


def _decoded(raw: bytes, type: Any) -> Any:
    try:
        return msgspec.json.decode(raw, type=type)
    except (ValueError, RecursionError):  # msgspec.DecodeError is a ValueError; nesting without an end is the other
        return None


def _bytes(value: bytes | str) -> bytes:
    """As on the wire; a str that no wire can have had (a test's) becomes UTF-8."""
    if isinstance(value, str):
        try:
            return value.encode("latin-1")
        except UnicodeEncodeError:
            return value.encode("utf-8", "surrogatepass")
    return bytes(value)


def _text(value: bytes) -> str:
    return value.decode("latin-1")


def verifier_for(
    scheme: str, secrets: Sequence[str], keys: Mapping[str, KeySet], *, tolerance_s: float = TOLERANCE_S
) -> Verifier | None:
    """The verifier of a :attr:`JobCodec.scheme`; None where nothing to verify with was given.

    Raises:
        ConfigurationError: a secret that cannot be one, or a scheme that is not known.
    """
    if scheme == "none":
        return None
    if scheme == "bearer":
        return Bearer(secrets) if secrets else None
    if scheme == "standard":
        return StandardWebhooks(secrets, tolerance_s=tolerance_s) if secrets else None
    if scheme == "baseten":
        return Baseten(secrets) if secrets else None
    if scheme == "fal":
        return Fal(keys["fal"], tolerance_s=tolerance_s) if "fal" in keys else None
    if scheme == "gemini":
        known = keys.get("gemini")
        return None if known is None and not secrets else Gemini(secrets, known, tolerance_s=tolerance_s)
    raise ConfigurationError(
        f"webhooks signed by the scheme {scheme!r} cannot be verified; it is none that spanwire knows"
    )
