"""Schemas for tests of the receiver, one for each way of signing, and requests that fit them."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from spanwire_webhook.receiver import Answer, Receiver, Reception
from spanwire_webhook.settings import ReceiverSettings
from spanwire_webhook.signatures import sign_standard

from spanwire.errors import JobError
from spanwire.jobs.contract import Delivery, JobCodec, JobRow, Seen, State, Store
from spanwire.jobs.ids import new_id
from spanwire.jobs.sqlite import SQLiteStore

SECRET = "whsec_IjCW3yJpnCExt6cBFFiTOw5YeOrObR2GBC/eP8BvzP0="
BASETEN_SECRET = "whsec_Wxk4Bbd1t4Vtldwt1czDSZvQDHouq1uTdAZFG023"
NOW = 1_796_040_000.0
SETTINGS = ReceiverSettings(
    secrets={"generic": (SECRET,), "baseten": (BASETEN_SECRET,), "openai": (SECRET,)},
    public_url="https://hooks.example",
)

Scheme = Literal["standard", "baseten", "fal", "gemini", "none"]


class FakeCodec:
    """Bodies are ``{"id": ..., "status": ...}``."""

    def __init__(
        self, scheme: Scheme, callback: Literal["request", "account"] = "request", *, bearer: bool = False
    ) -> None:
        self.scheme = scheme
        self.bearer = bearer
        self.callback = callback
        self.read: list[bytes] = []

    def webhook(self, headers: Mapping[str, str], body: bytes) -> Seen:
        self.read.append(body)
        said = json.loads(body)
        if not isinstance(said, dict):
            raise ValueError("no object")  # noqa: TRY004 - what the contract says
        states: dict[str, State] = {"succeeded": "succeeded", "failed": "failed", "processing": "running"}
        return Seen(states.get(said.get("status", "")), provider_id=said.get("id"), body=body)

    def dedupe(self, headers: Mapping[str, str], body: bytes) -> str:
        if "webhook-id" in headers:
            return headers["webhook-id"]
        said = json.loads(body)
        return f"{said['id']}:{said['status']}"


def codecs() -> dict[str, JobCodec]:
    made = {
        "generic": FakeCodec("standard"),
        "baseten": FakeCodec("baseten"),
        "runpod": FakeCodec("none"),
        "cog": FakeCodec("none", bearer=True),
        "openai": FakeCodec("standard", "account"),
        "gemini": FakeCodec("gemini"),
        "fal": FakeCodec("fal"),
    }
    return cast("dict[str, JobCodec]", made)


class BrokenStore:
    """A store that is down when it is told to be; else another one."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.down = False
        self.batches: list[int] = []

    def receive(self, deliveries: Sequence[Delivery]) -> list[bool]:
        self.batches.append(len(deliveries))
        if self.down:
            raise JobError("the disk is full")
        return self.store.receive(deliveries)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


class Yard:
    """A receiver over a private SQLite store, and its clock."""

    def __init__(self, settings: ReceiverSettings = SETTINGS, **more: Any) -> None:
        self.now_s = NOW
        self.sqlite = SQLiteStore()
        self.store = BrokenStore(self.sqlite)
        self.codecs = codecs()
        self.settings = settings
        self.receiver = Receiver(self.store, self.codecs, settings, clock=lambda: self.now_s, **more)

    def again(self, settings: ReceiverSettings) -> None:
        """The same store, another configuration."""
        self.receiver = Receiver(self.store, self.codecs, settings, clock=lambda: self.now_s)

    def path(self, dialect: str, job: str | None = None, attempt: int = 1) -> str:
        return self.receiver.mac.path(dialect, job or new_id(), attempt)

    def open_job(self, dialect: str = "generic", **more: Any) -> str:
        job = new_id()
        self.sqlite.add([JobRow(id=job, dialect=dialect, state="submitted", created_s=NOW, due_s=NOW + 3600, **more)])
        return job

    def post(
        self, path: str, headers: Sequence[tuple[str, str]] = (), body: bytes = b"", *, piece: int = 1000
    ) -> Answer:
        reception = self.begin(path, headers)
        for start in range(0, len(body), piece):
            if not reception.reads:
                break
            reception.feed(body[start : start + piece])
        return reception.finish()

    def begin(self, path: str, headers: Sequence[tuple[str, str]] = (), method: str = "POST") -> Reception:
        return self.receiver.begin(method, path, [(name.encode(), value.encode("latin-1")) for name, value in headers])

    def inbox(self) -> list[Delivery]:
        """Everything that is verified, whoever's it is."""
        found = self.sqlite._read(
            "SELECT number, delivery, body, verified FROM inbox WHERE verified = 1 ORDER BY number", ()
        )
        return [self.sqlite._delivery(row)[1] for row in found]

    def quarantine(self) -> list[Delivery]:
        return [delivery for _, delivery in self.sqlite.quarantined()]

    def count(self, name: str) -> int:
        return self.receiver.counters[name]

    def close(self) -> None:
        self.sqlite.close()


def signed(
    body: bytes, *, id: str = "msg_1", at_s: float | None = None, secret: str = SECRET, **more: str
) -> list[tuple[str, str]]:
    timestamp = int(NOW if at_s is None else at_s)
    return [
        ("webhook-id", id),
        ("webhook-timestamp", str(timestamp)),
        ("webhook-signature", sign_standard(secret, id, timestamp, body)),
        *((name.replace("_", "-"), value) for name, value in more.items()),
    ]


def signed_now(body: bytes, **more: Any) -> list[tuple[str, str]]:
    """For a receiver on the real clock."""
    return signed(body, at_s=time.time(), **more)


def said(id: str = "p1", status: str = "succeeded", **more: Any) -> bytes:
    return json.dumps({"id": id, "status": status, **more}).encode()
