"""What a receiver is told: addresses, secrets, limits. Secrets are in here, and in no text that it makes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from spanwire.errors import ConfigurationError

from .keys import FAL_KEYS_URL, GEMINI_KEYS_URL
from .signatures import TOLERANCE_S
from .url_mac import parse_instance_key

__all__ = ["ReceiverSettings"]

_MIB = 1024 * 1024
_HIDDEN = frozenset({"secrets", "instance_keys"})


class ReceiverSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a receiver.

    Attributes:
        public_url: where providers reach it, ``https://hooks.example.com/spanwire``; None if they cannot.
        instance_keys: for the addresses of callbacks, as :func:`spanwire_webhook.url_mac.parse_instance_key` gives them; the
            store's own key, if it has one, is good as well. All are good for receiving, so old ones stay until their jobs end.
        secrets: of the servers that sign, by dialect: several while one is being replaced. Cog's are bearer tokens, its
            ``WEBHOOK_AUTH_TOKEN``; Gemini's are those of static webhooks.
        unsigned: dialects that are believed by their address alone, although their scheme can sign: servers that were given no
            secret. Without this, and without a secret, what such a server sends is kept aside and answered 401.
        audience: addresses of ours that a signature may be for, besides the callback's own (Gemini).
        keys_urls: where public keys are loaded from, by scheme.
        tolerance_s: how far a signed time may be from ours, in seconds.
        strict: refuse a right signature that is older than this. By default it is taken, and flagged ``stale``, if its job is
            known: senders that retry for hours do not all sign anew.
        body_limit_bytes: of a body, and of what it decodes to; ``body_limits``: for single dialects.
        spool_bytes: a larger body goes through a temporary file while it arrives.
        quarantine_bytes: how much is kept of what has a right address and a wrong signature, with its headers.
        idle_s: longest silence within a body, in seconds; total_s: longest time that a body may take.
        retry_after_s: what senders are told when the store is down.
        most_headers: of a request.
    """

    public_url: str | None = None
    instance_keys: tuple[bytes, ...] = ()
    secrets: dict[str, tuple[str, ...]] = {}
    unsigned: frozenset[str] = frozenset()
    audience: tuple[str, ...] = ()
    keys_urls: dict[str, str] = msgspec.field(default_factory=lambda: {"fal": FAL_KEYS_URL, "gemini": GEMINI_KEYS_URL})
    tolerance_s: float = TOLERANCE_S
    strict: bool = False
    body_limit_bytes: int = 64 * _MIB
    body_limits: dict[str, int] = {}
    spool_bytes: int = _MIB
    quarantine_bytes: int = 64 * _MIB
    idle_s: float = 30.0
    total_s: float = 600.0
    retry_after_s: int = 5
    most_headers: int = 256

    def __post_init__(self) -> None:
        # A single secret where several are expected would be taken apart into its letters.
        given: Mapping[str, Any] = self.secrets
        secrets = {name: (one,) if isinstance(one, str) else tuple(one) for name, one in given.items()}
        msgspec.structs.force_setattr(self, "secrets", secrets)
        msgspec.structs.force_setattr(self, "unsigned", frozenset(self.unsigned))
        if self.public_url is not None and not re.match(r"https?://[^/?#@\s]+(/[^?#\s]*)?\Z", self.public_url):
            raise ConfigurationError(
                "the receiver's public URL has to be http:// or https://, a host and perhaps a path, nothing else"
            )
        if min(self.body_limit_bytes, *self.body_limits.values(), self.spool_bytes) < 1:
            raise ConfigurationError("the receiver's limits of bytes have to be positive")

    def __repr__(self) -> str:
        inside = ", ".join(f"{name}={value!r}" for name, value in self._shown())
        return f"ReceiverSettings({inside})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:  # rich would otherwise show the fields as they are
        return list(self._shown())

    def _shown(self) -> Iterator[tuple[str, Any]]:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name == "secrets":
                value = {dialect: len(secrets) for dialect, secrets in value.items()}
            elif name in _HIDDEN:
                value = len(value)
            yield name, value

    def limit_of(self, dialect: str) -> int:
        """Bytes that a body of this dialect may have."""
        return self.body_limits.get(dialect, self.body_limit_bytes)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ, **more: Any) -> ReceiverSettings:
        """Settings with secrets out of the environment, where a list of processes does not show them.

        ``SPANWIRE_WEBHOOK_SECRETS_<DIALECT>``: secrets of a dialect, separated by blanks or commas.
        ``SPANWIRE_WEBHOOK_KEYS``: instance keys in hex, likewise. ``SPANWIRE_WEBHOOK_PUBLIC_URL``. What is given here
        goes before them.

        Raises:
            ConfigurationError: one of them cannot be what it should be.
        """
        start = "SPANWIRE_WEBHOOK_SECRETS_"
        secrets = {
            name.removeprefix(start).lower().replace("__", "-"): _several(value)
            for name, value in environ.items()
            if name.startswith(start)
        }
        keys = tuple(parse_instance_key(key) for key in _several(environ.get("SPANWIRE_WEBHOOK_KEYS", "")))
        more.setdefault("public_url", environ.get("SPANWIRE_WEBHOOK_PUBLIC_URL"))
        more.setdefault("instance_keys", keys)
        secrets = {**{name: found for name, found in secrets.items() if found}, **more.pop("secrets", {})}
        return cls(secrets=secrets, **more)


def _several(text: str) -> tuple[str, ...]:
    return tuple(part for part in re.split(r"[\s,]+", text) if part)
