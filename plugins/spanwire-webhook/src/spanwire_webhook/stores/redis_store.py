"""The store in Redis (6.2 or newer) or Valkey, for any number of machines.

Each change is one script inside the server (see :mod:`.redis_lua`), so nobody sees half of it, and what is sent twice because
an answer was lost is done once. Whether a write is on a disk when it returns is for the server's settings to say: where it
syncs once a second, we wait for it (``WAITAOF``); where it cannot promise, a line in the log says what may be lost.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec

from spanwire.errors import ConfigurationError, JobError
from spanwire.jobs.apply import dialect_of
from spanwire.jobs.contract import OPEN, Delivery, JobRow, State
from spanwire.jobs.damage import Damage
from spanwire.jobs.segments import inline

from .redis import RedisAddress
from .redis_link import Command, Link, newer
from .redis_listener import Listener
from .redis_lua import BODY_KEPT_S, OUTSIDE

__all__ = ["STEPS", "VERSION", "RedisStore"]

_log = logging.getLogger("spanwire.jobs")
_T = TypeVar("_T")

#: Of what is in the server; one that is older is brought here by :data:`STEPS`.
VERSION: Final = 1
#: What brings a store from a version to the next: gets a function that sends commands, and the keys' prefix. It may be begun
#: again after it was cut off, so doing a part of it twice must do no harm.
STEPS: Mapping[int, Callable[[Callable[[Sequence[Command]], list[Any]], str], None]] = {}
#: How long deliveries are remembered, in seconds. Source: OpenAI delivers again for up to 72 h.
REMEMBER_S = 80 * 3600.0
#: In one script, while others wait: deliveries, and what a sweep takes. In one round trip: rows that are read.
_DELIVERIES, _SWEPT, _READ = 500, 500, 500
#: Rows of one answer of completed(), as in SQLite.
_COMPLETED = 10_000
#: How long one store's migration keeps others out, and how long these wait, in seconds.
_MIGRATION_S, _MIGRATED_S = 300, 600.0
#: Reads of a row and its body, one after the other, until they fit; what never does is damaged.
_TRIES = 3
#: Why there is no body: the server evicts keys (see `maxmemory-policy`), or somebody has deleted it.
_GONE = "the server has lost it"
#: The reference of an input that is not needed.
_NOTHING = b"\x00"
_row_decoder = msgspec.msgpack.Decoder(JobRow)
_delivery_decoder = msgspec.msgpack.Decoder(Delivery)
_encoder = msgspec.msgpack.Encoder()


class _Head(msgspec.Struct):
    state: State = "created"


_head_decoder = msgspec.msgpack.Decoder(_Head)


class RedisStore:
    """Jobs in one Redis or Valkey, or in one slot of a cluster.

    Raises:
        ConfigurationError: the server refuses us, or the store is of a newer version.
        JobError: the server is not there.
    """

    def __init__(self, address: RedisAddress) -> None:
        self._address = address
        self._damage = Damage()
        self._key = secrets.token_bytes(32)
        self._pid, self._making = os.getpid(), threading.Lock()
        self._link = Link(address, VERSION, self._emptied)
        self._listener: Listener | None = None
        try:
            try:
                self._link.durability()
                self._make()
            except JobError as error:
                if error.retryable:
                    raise
                raise ConfigurationError(str(error)) from error
        except BaseException:
            self._link.close()
            raise

    def __repr__(self) -> str:
        return f"RedisStore({self._address.place!r})"

    # --- jobs -------------------------------------------------------------------------------------------------------

    def add(self, rows: Sequence[JobRow]) -> None:
        """New jobs, all or none. Raises JobError if one is there already."""
        if not rows:
            return
        bodies: list[Command] = []
        arguments: list[object] = []
        for row in rows:
            arguments += [row.id, _data(row), self._kept(row.input, bodies) if row.input else b"", row.result]
        if not self._link.script("add", _token(), *arguments, before=bodies, durable=True):
            raise JobError("the store has a job of this id already")

    def get(self, id: str) -> JobRow | None:
        """A job."""
        return next(iter(self._rows([id])), None)

    def find(self, dialect: str, provider_id: str) -> JobRow | None:
        """A job by the provider's id of it, or of one of its attempts; the newest, if a provider gave an id twice."""
        ids = self._link.run([("GET", self._link.key(f"p:{dialect} {provider_id}"))])[0]
        return self.get(max(ids.split(b"\n")).decode()) if ids else None

    def swap(self, row: JobRow, *, was: tuple[State, int]) -> bool:
        """Compare-and-set on state, attempt and revision. Its answer is right also where the server's first one was lost."""
        token, data = _token(), _data(msgspec.structs.replace(row, revision=row.revision + 1))
        bodies: list[Command] = []
        what: bytes = b"keep" if row.input else b"drop"  # it is the same: an input is written once, or dropped
        while True:
            given = (token, row.id, *was, data, row.result, what, row.revision)
            done = self._link.script("swap", *given, before=bodies, durable=True)
            if done != 2:
                return bool(done)
            what = self._kept(row.input, bodies)

    def due(
        self,
        now_s: float,
        limit: int = 500,
        *,
        parties: Sequence[tuple[str, str]] | None = None,
        lease_s: float = 0.0,
    ) -> list[JobRow]:
        """Open jobs whose deadline or next poll has come, the oldest first. A lease puts off when they are due."""
        if parties is not None and not parties:
            return []
        ids = self._link.script(
            "due",
            repr(float(now_s)),
            limit,
            repr(now_s + lease_s) if lease_s > 0 else "",
            int(parties is not None),
            *(f"{dialect} {origin}" for origin, dialect in dict.fromkeys(parties or ())),
        )
        return [row for row in self._rows(ids) if row.state in OPEN]

    def states(self, ids: Sequence[str]) -> dict[str, State]:
        """How these jobs stand."""
        found: dict[str, State] = {}
        for some in _portions(ids, 2 * _READ):
            rows = self._link.run([("HGET", self._job(one), "r") for one in some])
            found.update((one, _head_decoder.decode(row).state) for one, row in zip(some, rows, strict=True) if row)
        return found

    def open_jobs(self, group: str | None = None) -> int:
        """How many are open."""
        if group is None:
            return sum(map(int, self._link.run([("HVALS", self._link.key("open"))])[0]))
        return int(self._link.run([("HGET", self._link.key("open"), group)])[0] or 0)

    def completed(self, group: str, after: tuple[float, str] = (0.0, "")) -> list[JobRow]:
        """Ended jobs of a group after a place in the order of ``(resolved_s, id)``."""
        key, (resolved_s, last) = self._link.key(f"done:{group}"), after
        at, rank, before = self._link.run(
            [("ZSCORE", key, last), ("ZRANK", key, last), ("ZCOUNT", key, "-inf", f"({float(resolved_s)!r}")]
        )
        start = int(rank) + 1 if at is not None and float(at) == resolved_s else int(before)
        rows = self._rows(self._link.run([("ZRANGE", key, start, start + _COMPLETED - 1)])[0])
        # One that was changed a moment ago is where it is now.
        return sorted(
            (row for row in rows if row.state not in OPEN and (row.resolved_s, row.id) > after),
            key=lambda row: (row.resolved_s, row.id),
        )

    # --- the inbox --------------------------------------------------------------------------------------------------

    def receive(self, deliveries: Sequence[Delivery]) -> list[bool]:
        """Put deliveries into the inbox; False for each that was there already.

        One that could not be verified does not stand in the way of the same one, verified.
        """
        fresh: list[bool] = []
        for some in _portions(deliveries, _DELIVERIES):
            bodies: list[Command] = []
            arguments: list[object] = []
            for delivery in some:
                arguments += [
                    hashlib.blake2b(
                        f"{len(delivery.endpoint)} {delivery.endpoint} {delivery.dedupe}".encode(), digest_size=16
                    ).digest(),
                    int(delivery.verified),
                    repr(float(delivery.received_s)),
                    _waits_for(delivery),
                    _encoder.encode(msgspec.structs.replace(delivery, body=b"")),
                    self._kept(delivery.body, bodies),
                ]
            told = self._link.script("receive", _token(), *arguments, before=bodies, durable=True)
            fresh += [one == ord("1") for one in told]
        return fresh

    def unapplied(
        self,
        *,
        job: str | None = None,
        provider: tuple[str, str] | None = None,
        limit: int = 1000,
        lease_s: float = 0.0,
    ) -> list[tuple[int, Delivery]]:
        """Verified deliveries that were not applied yet, the oldest first."""
        if job is not None or provider is not None:
            who = f"j:{job}" if provider is None else f"p:{provider[0]} {provider[1]}"
            numbers = self._link.run([("SMEMBERS", self._link.key(f"w:{who}"))])[0]
        elif lease_s > 0:
            numbers = self._link.script("lease_deliveries", limit, max(1, round(lease_s * 1000)))
        else:
            ready, held = self._link.run(
                [("ZRANGE", self._link.key("ready"), 0, limit - 1), ("ZRANGE", self._link.key("held"), 0, -1)]
            )
            numbers = [*ready, *held]
        return self._deliveries(sorted(map(int, numbers))[:limit], verified=True)

    def applied(self, numbers: Sequence[int]) -> None:
        """These deliveries have been applied. Their bodies go; that they came is remembered."""
        for some in _portions(numbers, 2 * _DELIVERIES):
            self._link.script("applied", *some)

    def quarantined(self, limit: int = 1000) -> list[tuple[int, Delivery]]:
        """Deliveries that could not be verified, the oldest first."""
        numbers = self._link.run([("ZRANGE", self._link.key("quarantine"), 0, limit - 1)])[0]
        return self._deliveries(list(map(int, numbers)), verified=False)

    def verified(self, number: int) -> None:
        """One of those could be, after all; it goes if the same one has come, verified, meanwhile."""
        self._link.script("verified", number, durable=True)

    # --- bodies -----------------------------------------------------------------------------------------------------

    def put_body(self, body: bytes) -> bytes:
        """Keep a result; returns its reference. It goes after an hour if no row refers to it then."""
        commands: list[Command] = []
        reference = self._kept(body, commands)
        if commands:  # it is on the disk when the row that refers to it is: that comes later in the same file
            self._link.run(commands)
        return reference

    def body(self, reference: bytes) -> bytes:
        """A result's bytes."""
        body = self._bodies([reference])[0]
        if body is None:
            raise JobError("a body in the store of jobs is gone")
        return body

    # --- the rest ---------------------------------------------------------------------------------------------------

    def changed(self) -> int:
        """A counter of all writes."""
        return int(self._link.run([("GET", self._link.key("changed"))])[0] or 0)

    def subscribe(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Call ``wake`` soon after anybody wrote, from a thread of ours. It may be called once too often."""
        with self._lock():
            listener = self._listener
            if listener is None or not listener.add(wake):
                listener = self._listener = Listener(self._link)
                listener.add(wake)
        return lambda: listener.remove(wake)

    def instance_key(self) -> bytes:
        """32 random bytes that were made with the store, the same for whoever opens it: they sign callback URLs."""
        return self._key

    def sweep(self, now_s: float) -> int:
        """Delete ended jobs after ``keep_s``, and deliveries after 80 hours; bodies go with them."""
        gone = 0
        groups = self._link.run([("SMEMBERS", self._link.key("groups"))])[0]
        for group in groups:
            while True:
                count = int(self._link.script("sweep_jobs", group, repr(now_s - self._address.keep_s), _SWEPT))
                gone += count
                if count < _SWEPT:
                    break
        while True:
            seen, waiting = self._link.script("sweep_deliveries", repr(now_s - REMEMBER_S), _SWEPT)
            gone += int(seen)
            if max(int(seen), int(waiting)) < _SWEPT:
                return gone

    def close(self) -> None:
        """Let go of everything. What was begun is written."""
        with self._lock():
            listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
        self._link.close()

    # --- inner ------------------------------------------------------------------------------------------------------

    def _lock(self) -> threading.Lock:
        if self._pid != os.getpid():  # a forked child: the parent's may be held for ever, and its listener is not here
            self._pid, self._making, self._listener = os.getpid(), threading.Lock(), None
        return self._making

    def _job(self, id: str | bytes) -> str:
        return self._link.key(f"j:{id.decode() if isinstance(id, bytes) else id}")

    def _make(self) -> None:
        version, key = self._link.bare("make", VERSION, self._key, durable=True)
        give_up_s = time.monotonic() + _MIGRATED_S
        while int(version) < VERSION:
            if not self._migrate(int(version)):
                if time.monotonic() > give_up_s:
                    raise JobError(f"{self!r} is being brought to a newer version by somebody else", retryable=True)
                time.sleep(0.05)
            version = self._link.run([("GET", self._link.key("version"))])[0]
        if int(version) > VERSION:
            raise newer(self._address.place, version.decode(), VERSION)
        self._key = bytes(key)

    def _migrate(self, version: int) -> bool:
        """One step, unless somebody else is at it."""
        me = secrets.token_hex(8)
        if not self._link.run([("SET", self._link.key("migrating"), me, "NX", "EX", _MIGRATION_S)])[0]:
            return False
        try:
            if self._link.run([("GET", self._link.key("version"))])[0] != b"%d" % version:
                return False
            _log.info("%r is brought from version %d to %d", self, version, version + 1)
            STEPS[version](self._link.run, self._link.prefix)
            return bool(self._link.bare("migrated", version, version + 1, me, durable=True))
        finally:
            with contextlib.suppress(JobError):
                if self._link.run([("GET", self._link.key("migrating"))])[0] == me.encode():
                    self._link.run([("DEL", self._link.key("migrating"))])

    def _emptied(self) -> None:
        """The server has lost everything. Callback URLs that are out there stay right: the key is the same."""
        _log.warning("%r is empty: it was flushed, or restarted without append-only. It is made again", self)
        with self._lock():
            self._make()

    def _kept(self, body: bytes, commands: list[Command]) -> bytes:
        """The reference of a body. If it gets a key of its own, that is for an hour, or until a script finds the reference in a
        row or delivery. NX: sent again, it must not become one that goes."""
        small = inline(body)
        if small is not None:
            return small
        name = secrets.token_bytes(12)
        commands.append(("SET", self._body_key(OUTSIDE + name), body, "NX", "EX", BODY_KEPT_S))
        return OUTSIDE + name

    def _body_key(self, reference: bytes) -> bytes:
        return self._link.key("b:").encode() + reference[1:]

    def _bodies(self, references: Sequence[bytes]) -> list[bytes | None]:
        """None for each that is gone."""
        far = [reference for reference in references if reference[:1] == OUTSIDE]
        found: dict[bytes, bytes | None] = {}
        for some in _portions(far, _READ):
            found.update(zip(some, self._link.run([("GET", self._body_key(one)) for one in some]), strict=True))
        return [found.get(one) if one[:1] == OUTSIDE else _inlined(one) for one in references]

    def _rows(self, ids: Iterable[str | bytes]) -> list[JobRow]:
        """In this order, without those that are not here."""
        rows = []
        for some in _portions(list(ids), _READ):
            for _ in range(_TRIES):
                found = self._link.run([("HMGET", self._job(one), "r", "i", "x") for one in some])
                here = [one for one in found if one[0] is not None]
                inputs = self._bodies([reference or _NOTHING for _, reference, _ in here])
                if None not in inputs:
                    break  # else it was dropped between the two, and the row says so now
            for (data, _, result), body in zip(here, inputs, strict=True):
                row = _row_decoder.decode(data)
                row.input = self._damage.input(row.id, _GONE) if body is None else body
                row.result = result or b""
                rows.append(row)
        return rows

    def _deliveries(self, numbers: Sequence[int], *, verified: bool) -> list[tuple[int, Delivery]]:
        """Those of them that are still there."""
        deliveries = []
        for some in _portions(numbers, _READ):
            for _ in range(_TRIES):
                found = self._link.run([("HMGET", self._link.key(f"d:{number}"), "d", "b") for number in some])
                here = [(number, *one) for number, one in zip(some, found, strict=True) if one[0] is not None]
                bodies = self._bodies([reference or b"" for _, _, reference in here])
                if None not in bodies:
                    break  # else somebody has applied it between the two
            for (number, data, _), body in zip(here, bodies, strict=True):
                delivery = _delivery_decoder.decode(data)
                delivery.verified = verified
                if body is None:
                    delivery = self._damage.delivery(number, delivery, _GONE)
                else:
                    delivery.body = body
                deliveries.append((number, delivery))
        return deliveries


def _token() -> bytes:
    return secrets.token_bytes(8)


def _data(row: JobRow) -> bytes:
    return _encoder.encode(msgspec.structs.replace(row, input=b"", result=b""))


def _inlined(reference: bytes) -> bytes | None:
    return reference[1:] if reference[:1] == b"\x00" else None


def _waits_for(delivery: Delivery) -> str:
    if delivery.job is not None:
        return f"j:{delivery.job}"
    return "" if delivery.provider_id is None else f"p:{dialect_of(delivery)} {delivery.provider_id}"


def _portions(items: Sequence[_T], size: int) -> Iterator[Sequence[_T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
