"""PURE: addresses for callbacks that say which job they are about, and prove that we made them.

::

    {public_base}/{provider}/{job_id}.{attempt}.{mac}

``mac`` is the first 22 characters (132 bits) of base64url of HMAC-SHA256 over ``v1|provider|job_id|attempt``. It is in the path
and not in the query, which relays drop. It is checked before the body is read, and is all that there is for servers that do
not sign. It comes beside a signature and never replaces one: addresses get into logs.
"""

from __future__ import annotations

import base64
import hmac
import re
import secrets
from collections.abc import Sequence
from typing import Literal

import msgspec

from spanwire.errors import ConfigurationError

__all__ = ["CallbackPath", "URLMac", "new_instance_key", "parse_instance_key"]

#: Bytes of an instance key: as many as the hash gives. Fewer than half of it are refused.
_KEY_BYTES = 32
_LEAST_KEY_BYTES = 16

_PROVIDER = re.compile(r"[a-z][a-z0-9_-]{0,31}")
# One spelling only of everything: lower case, UUID version 7 or 8 of RFC 9562, no leading zero, exactly 22 characters.
_UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-[78][0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
_JOB = re.compile(_UUID)
_NAME = re.compile(rf"({_UUID})\.([1-9][0-9]{{0,5}})\.([A-Za-z0-9_-]{{22}})")


class CallbackPath(msgspec.Struct, frozen=True):
    """What a callback's address says; believe it only if ``reason`` is ``ok``.

    Attributes:
        reason: ``ok``, ``bad_path`` (none of ours) or ``bad_mac`` (by no key of ours).
        provider: name of the dialect.
        job: our id of the job.
        attempt: number of the submit, from 1.
    """

    reason: Literal["ok", "bad_path", "bad_mac"]
    provider: str = ""
    job: str = ""
    attempt: int = 0

    @property
    def ok(self) -> bool:
        """It is one that we made."""
        return self.reason == "ok"


class URLMac:
    """Makes and checks addresses of callbacks.

    Args:
        keys: instance keys, see :func:`parse_instance_key`. The first one makes; all are good for checking, so that a key can
            be replaced while jobs are open.
    """

    def __init__(self, keys: Sequence[bytes]) -> None:
        if not keys:
            raise ConfigurationError(
                "callback addresses need an instance key; spanwire_webhook.new_instance_key() makes one"
            )
        for key in keys:
            if len(key) < _LEAST_KEY_BYTES:
                raise ConfigurationError(f"an instance key has {len(key)} bytes, and needs {_KEY_BYTES}")
        self._keys = tuple(keys)

    def __repr__(self) -> str:
        return f"URLMac({len(self._keys)} keys)"

    def path(self, provider: str, job: str, attempt: int = 1) -> str:
        """``/provider/job.attempt.mac``. Raises ConfigurationError for a name that no address can have."""
        if not _PROVIDER.fullmatch(provider):
            raise ConfigurationError(
                f"a provider's name in a callback address is lower case, up to 32 characters, not {provider!r:.40}"
            )
        if not _JOB.fullmatch(job) or not 1 <= attempt <= 999_999:
            raise ConfigurationError(
                f"a callback address needs a UUID of version 7 or 8 in lower case and an attempt from 1, not {job!r:.40}, {attempt}"
            )
        return f"/{provider}/{job}.{attempt}.{_mac(self._keys[0], provider, job, attempt)}"

    def url(self, public_url: str, provider: str, job: str, attempt: int = 1) -> str:
        """The address to give to a provider."""
        return public_url.rstrip("/") + self.path(provider, job, attempt)

    def urls(self, public_url: str, provider: str, job: str, attempt: int) -> list[str]:
        """The addresses of this attempt by all keys: one of them was given to the provider."""
        base = public_url.rstrip("/")
        return [f"{base}/{provider}/{job}.{attempt}.{_mac(key, provider, job, attempt)}" for key in self._keys]

    def read(self, path: str) -> CallbackPath:
        """What a path says: its last two segments, so that whatever it is mounted below, or a relay puts in front, is fine.

        A query, and a slash at the end, do not count.
        """
        segments = path.partition("?")[0].removesuffix("/").rsplit("/", 2)
        if len(segments) < 3 or not _PROVIDER.fullmatch(segments[1]):
            return CallbackPath("bad_path")
        match = _NAME.fullmatch(segments[2])
        if match is None:
            return CallbackPath("bad_path")
        job, attempt, mac = match[1], int(match[2]), match[3].encode()
        right = False
        for key in self._keys:
            right |= hmac.compare_digest(mac, _mac(key, segments[1], job, attempt).encode())
        return CallbackPath("ok" if right else "bad_mac", segments[1], job, attempt)


def _mac(key: bytes, provider: str, job: str, attempt: int) -> str:
    digest = hmac.digest(key, f"v1|{provider}|{job}|{attempt}".encode(), "sha256")
    return base64.urlsafe_b64encode(digest)[:22].decode()


def new_instance_key() -> str:
    """A new instance key, as hex."""
    return secrets.token_hex(_KEY_BYTES)


def parse_instance_key(text: str) -> bytes:
    """Bytes of an instance key in hex. Raises ConfigurationError, without the key in it."""
    try:
        key = bytes.fromhex(text.strip())
    except ValueError:
        raise ConfigurationError("an instance key is not hex; spanwire_webhook.new_instance_key() makes one") from None
    if len(key) < _LEAST_KEY_BYTES:
        raise ConfigurationError(f"an instance key has {len(key)} bytes, and needs {_KEY_BYTES}")
    return key
