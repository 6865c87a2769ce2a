"""PURE: how the scripted job server treats jobs and webhooks, apart from the answers: settings, checked, no I/O.

Faults are shares from 0 to 1 of the jobs that they befall. Which jobs those are is decided by the seed and the job's
number alone: the same in every run.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, Self
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import force_setattr

from spanwire.errors import ConfigurationError

__all__ = ["FAULTS", "SECRET", "Rules"]

_WHERE = "the webhook loopback server's option"
#: Signs what nobody has given a secret for. It guards nothing.
SECRET = "whsec_c3BhbndpcmUncyBsb29wYmFjayBzZXJ2ZXIsIG5vIHNlY3JldA=="  # noqa: S105
FAULTS = ("duplicate", "renumber", "lose", "reorder", "early", "swallow", "mute", "wrong", "blank")
_SHARE = 2**32


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """The options of the part: ``LoopbackServer(part="webhook", options={"lose": 0.05})``.

    Attributes:
        api_key: what a request must have as its bearer (or ``Api-Key``). None: anything goes.
        workers: jobs that are worked on at once; more wait in the queue. None: any number.
        webhook_url: where webhooks of providers go whose endpoints belong to an account (OpenAI, Gemini's static ones).
        secrets: with which webhooks are signed, where their provider signs: each makes a part of the signature, as during
            a rotation. None left: unsigned.
        seed_v1a: 32 bytes as hex: sign with this Ed25519 key as well (Standard Webhooks v1a; needs ``cryptography``).
        auth_token: Cog's ``WEBHOOK_AUTH_TOKEN``.
        ca: file of a CA (PEM) that webhooks to https:// trust besides the system's.
        senders: webhooks that are sent at once.
        timeout_s: how long the answer to a webhook is waited for.
        speed: by how much attempts to deliver are faster than the provider's own (its delays are divided by it).
        start_events: tell that the work has begun, where the provider can.
        thin: ``generic`` leaves the output out of the webhook, to be fetched.
        retention_s: how long the status of an ended job can be asked for; then 404.
        batch_window_s: a batch that has not ended by then has expired.
        upload_status: with which the upload of a file is refused. None: it is taken.
        keep: how many ended jobs are kept in ``part.jobs``; older ones are forgotten.
        log: a file to which every job and delivery is written, one JSON object on a line, as it happens.
        seed: of the choice which jobs have faults.
        duplicate: the last webhook is sent twice.
        renumber: the last webhook is sent twice, under two ids.
        lose: the last webhook is never sent.
        reorder: the start event comes after the end; without start events the end comes later than those of later jobs.
        early: the webhooks come before the submit is acknowledged.
        swallow: the job is taken, and the submit answered with 504.
        mute: the job is taken, and the connection cut without an answer.
        wrong: the webhook is signed with a secret that nobody has.
        blank: the body of the last webhook is empty.

    Raises:
        ConfigurationError: a value that cannot be meant; the message names the option.
    """

    api_key: str | None = None
    workers: int | None = None
    webhook_url: str | None = None
    secrets: Sequence[str] = (SECRET,)
    seed_v1a: str | None = None
    auth_token: str | None = None
    ca: str | None = None
    senders: int = 64
    timeout_s: float = 10.0
    speed: float = 100.0
    start_events: bool = True
    thin: bool = False
    retention_s: float = 3600.0
    batch_window_s: float = 86_400.0
    upload_status: int | None = None
    keep: int = 200_000
    log: str | None = None
    seed: int = 0
    duplicate: float = 0.0
    renumber: float = 0.0
    lose: float = 0.0
    reorder: float = 0.0
    early: float = 0.0
    swallow: float = 0.0
    mute: float = 0.0
    wrong: float = 0.0
    blank: float = 0.0

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """Raises ConfigurationError also for a name that is no option."""
        known = cls.__struct_fields__
        unknown = [name for name in options if name not in known]
        if unknown:
            raise ConfigurationError(
                f"the webhook loopback server has no option {unknown[0]!r}; it has: {', '.join(known)}"
            )
        return cls(**options)

    def __post_init__(self) -> None:
        for name in ("api_key", "webhook_url", "seed_v1a", "auth_token", "ca", "log"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ConfigurationError(f"{_WHERE} {name} must be text, not {type(value).__name__}")
        if self.webhook_url is not None:
            parts = urlsplit(self.webhook_url)
            if parts.scheme not in {"http", "https"} or not parts.hostname:
                raise ConfigurationError(f"{_WHERE} webhook_url must be an http:// or https:// address")
        if isinstance(self.secrets, str) or not all(isinstance(secret, str) and secret for secret in self.secrets):
            raise ConfigurationError(f"{_WHERE} secrets must be a list of secrets")  # which are not shown
        force_setattr(self, "secrets", tuple(self.secrets))
        if self.seed_v1a is not None:
            try:
                known = len(bytes.fromhex(self.seed_v1a)) == 32
            except ValueError:
                known = False
            if not known:
                raise ConfigurationError(f"{_WHERE} seed_v1a must be 32 bytes as hex")
        for name, least in (("workers", 1), ("senders", 1), ("keep", 0), ("seed", 0), ("upload_status", 300)):
            value = getattr(self, name)
            if value is None and name in {"workers", "upload_status"}:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigurationError(f"{_WHERE} {name} must be a number from {least}, not {value!r:.40}")
        for name in ("timeout_s", "retention_s", "speed", "batch_window_s"):
            value = getattr(self, name)
            if not _is_number(value) or not 0 <= value < math.inf or (name == "speed" and value == 0):
                raise ConfigurationError(f"{_WHERE} {name} must be a number over 0, not {value!r:.40}")
        for name in FAULTS:
            value = getattr(self, name)
            if not _is_number(value) or not 0 <= value <= 1:
                raise ConfigurationError(f"{_WHERE} {name} must be a share from 0 to 1, not {value!r:.40}")
        for name in ("start_events", "thin"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigurationError(f"{_WHERE} {name} must be true or false, not {getattr(self, name)!r:.40}")

    def faults(self, number: int) -> frozenset[str]:
        """What befalls the job of this number."""
        found = set()
        for name in FAULTS:
            share = getattr(self, name)
            if share:
                drawn = hashlib.sha256(f"{self.seed}:{name}:{number}".encode()).digest()[:4]
                if int.from_bytes(drawn) < share * _SHARE:
                    found.add(name)
        return frozenset(found)

    def __repr__(self) -> str:  # without keys, secrets and addresses
        return f"Rules({', '.join(f'{name}={getattr(self, name)}' for name in FAULTS if getattr(self, name))})"


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
