"""What a store says of a body that it cannot read, and that is no reason to keep the other jobs waiting.

Two cases. What is gone, or is not what was written, stays so: its job comes without its input, and a delivery without its body.
What cannot be read now, for want of file descriptors or because a disk fails, may be readable later: it is left out of this look.
"""

from __future__ import annotations

import logging
import threading

import msgspec

from ..errors import JobError
from .contract import DAMAGED, Delivery

__all__ = ["Damage", "damaged"]

_log = logging.getLogger("spanwire.jobs")
#: Jobs and deliveries that were told of are remembered, so that each is told of once; no more than so many.
_MOST = 10_000


class Damage:
    """Tells once of each. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told: set[tuple[str, bool]] = set()

    def input(self, job: str, why: JobError | str) -> bytes:
        """The input of this job is gone for good; what it has instead."""
        if self._is_new(f"job {job}", later=False):
            _log.warning("job %s: its input is damaged, so it cannot be submitted again: %s", job, why)
        return b""

    def delivery(self, number: int, delivery: Delivery, why: JobError | str) -> Delivery:
        """The body of this delivery is gone for good; what is left of it."""
        if self._is_new(f"delivery {number}", later=False):
            _log.warning("webhook %d of job %s: its body is damaged: %s", number, _job_of(delivery), why)
        return damaged(delivery)

    def left_out(self, what: str, why: JobError) -> None:
        """This cannot be read now. ``what``: ``job ...`` or ``webhook ...``."""
        if self._is_new(what, later=True):
            _log.warning("%s is left for later: %s", what, why)

    def _is_new(self, what: str, *, later: bool) -> bool:
        with self._lock:
            if len(self._told) >= _MOST:
                self._told.clear()
            before = len(self._told)
            self._told.add((what, later))
            return len(self._told) > before


def damaged(delivery: Delivery) -> Delivery:
    """A delivery whose body cannot be had any more: that it has come is what is known."""
    return msgspec.structs.replace(delivery, body=b"", flags=(*delivery.flags, DAMAGED))


def _job_of(delivery: Delivery) -> str:
    return delivery.job or f"{delivery.endpoint}:{delivery.provider_id}"
