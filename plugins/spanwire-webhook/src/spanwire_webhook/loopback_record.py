"""The job server's record: every job that it took and every webhook that it sent, to be counted against."""

from __future__ import annotations

import io
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from threading import Condition
from typing import Any

import msgspec

__all__ = ["Delivery", "Job", "Record"]

_ENDED = frozenset({"succeeded", "failed", "cancelled", "expired"})


class Delivery(msgspec.Struct, kw_only=True):
    """One attempt to deliver a webhook.

    Attributes:
        job: id of the job.
        kind: ``start`` or ``end``.
        webhook_id: the id in its headers; equal for the attempts of one webhook.
        attempt: from 1, for each webhook.
        at_s: when it was sent, seconds since the epoch.
        status: of the receiver's answer; None where none came.
        error: why none came.
        faults: what was wrong with it by intent: ``wrong``, ``blank``, ``duplicate``, ``renumber``.
    """

    job: str
    kind: str
    webhook_id: str
    attempt: int
    at_s: float
    status: int | None = None
    error: str | None = None
    faults: tuple[str, ...] = ()

    @property
    def taken(self) -> bool:
        """The receiver said 2xx."""
        return self.status is not None and 200 <= self.status < 300


class Job(msgspec.Struct, kw_only=True, eq=False):
    """A job that was taken. Times are seconds since the epoch, by this server's clock.

    Attributes:
        number: from 1, in the order in which they came.
        id: the server's.
        own: the client's, where it sent one.
        dialect: of the submit.
        state: ``queued``, ``running``, ``succeeded``, ``failed``, ``cancelled``, or of a batch ``expired``.
        submits: how many submits have asked for it: more than one with the same ``own``.
        asked: how many times its status was asked for.
        callback: where its webhooks go.
        faults: which befall it, see :class:`~spanwire_webhook.loopback_rules.Rules`.
        webhook: of the last webhook: ``PENDING``, ``SUCCEEDED``, ``FAILED``, ``CANCELED``; ``LOST`` where it was never sent.
        deliveries: attempts, in order.
    """

    number: int
    id: str
    own: str | None
    dialect: str
    model: str | None
    operation: str
    call: Any
    callback: str | None
    base: str
    headers: Mapping[str, str]
    faults: frozenset[str] = frozenset()
    state: str = "queued"
    submits: int = 1
    asked: int = 0
    accepted_s: float = 0.0
    started_s: float | None = None
    finished_s: float | None = None
    output: Any = None
    error: tuple[str, str] | None = None
    webhook: str = "PENDING"
    deliveries: list[Delivery] = []

    @property
    def ended(self) -> bool:
        """It has a result, has failed, or was cancelled."""
        return self.state in _ENDED

    @property
    def taken(self) -> int:
        """How often its last webhook was delivered."""
        return sum(1 for delivery in self.deliveries if delivery.kind == "end" and delivery.taken)

    def __repr__(self) -> str:
        return f"Job({self.dialect} {self.id}, {self.state}, webhook={self.webhook})"


class Record:
    """Jobs and deliveries; read from any thread under ``changed``, which is notified at each change."""

    def __init__(self, changed: Condition, *, keep: int, log: str | None) -> None:
        self.changed = changed
        self.jobs: dict[tuple[str, str], Job] = {}
        self.counts: Counter[str] = Counter()
        self._own: dict[tuple[str, str], Job] = {}
        self._keep = keep
        #: Unbuffered: what was written is there when this process is killed.
        self._log: io.FileIO | None = None if log is None else io.FileIO(Path(log), "a")

    def of_client(self, dialect: str, own: str | None) -> Job | None:
        """The job that the client's id already stands for."""
        return None if own is None else self._own.get((dialect, own))

    def find(self, dialect: str, id: str) -> Job | None:
        """A job by the server's id. Cog's predictions are found among Replicate's, whose paths they share."""
        found = self.jobs.get((dialect, id))
        return self.jobs.get(("cog", id)) if found is None and dialect == "replicate" else found

    def add(self, job: Job) -> None:
        """A job was taken."""
        with self.changed:
            self.jobs[job.dialect, job.id] = job
            if job.own is not None:
                self._own[job.dialect, job.own] = job
            self.counts["jobs"] += 1
            self._forget()
            self._say("job", job, own=job.own, faults=sorted(job.faults))
            self.changed.notify_all()

    def again(self, job: Job) -> None:
        """It was submitted once more."""
        with self.changed:
            job.submits += 1
            self.counts["repeated_submits"] += 1
            self._say("again", job)
            self.changed.notify_all()

    def state(self, job: Job) -> None:
        """Its state has changed."""
        with self.changed:
            if job.ended:
                self.counts["ended"] += 1
                self.counts[job.state] += 1
            self._say(job.state, job)
            self.changed.notify_all()

    def delivered(self, job: Job, delivery: Delivery) -> None:
        """An attempt has come to its end."""
        with self.changed:
            job.deliveries.append(delivery)
            self.counts["deliveries"] += 1
            self.counts["taken"] += delivery.taken
            self._say(
                "delivery",
                job,
                kind=delivery.kind,
                webhook_id=delivery.webhook_id,
                attempt=delivery.attempt,
                status=delivery.status,
                error=delivery.error,
                faults=delivery.faults,
            )
            self.changed.notify_all()

    def webhook(self, job: Job, word: str) -> None:
        """What has become of its last webhook."""
        with self.changed:
            job.webhook = word
            self.counts[f"webhook_{word.lower()}"] += 1
            self._say("webhook", job, word=word)
            self.changed.notify_all()

    def _forget(self) -> None:
        if len(self.jobs) > 2 * self._keep + 16:  # seldom, so that it costs little
            for key, job in list(self.jobs.items())[: -self._keep or None]:
                if job.ended and job.webhook != "PENDING":
                    del self.jobs[key]
                    if job.own is not None:
                        self._own.pop((job.dialect, job.own), None)

    def _say(self, what: str, job: Job, **more: Any) -> None:
        if self._log is not None:
            line = {"at_s": time.time(), "what": what, "dialect": job.dialect, "id": job.id, **more}
            self._log.write(msgspec.json.encode(line) + b"\n")

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None
