"""Inputs of jobs that this process has written or read: each look at a job would bring its input along again."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Hashable

__all__ = ["Inputs"]


class Inputs:
    """The last ones, up to some bytes of them. Any thread. An input never changes; whether it is still there, the store says."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._start()

    def get(self, job: Hashable) -> bytes | None:
        """None if it is not known here."""
        with self._now():
            found = self._known.get(job)
            if found is not None:
                self._known.move_to_end(job)
            return found

    def put(self, job: Hashable, input: bytes) -> None:
        """Keep it for a while, if it is not too large."""
        if not input or len(input) > self._most_bytes // 8:
            return
        with self._now():
            self._drop(job)
            self._known[job] = input
            self._bytes += len(input)
            while self._bytes > self._most_bytes:
                self._drop(next(iter(self._known)))

    def drop(self, job: Hashable) -> None:
        """It is not needed any more."""
        with self._now():
            self._drop(job)

    def _now(self) -> threading.Lock:
        if self._pid != os.getpid():  # whoever held the lock is not in this child
            self._start()
        return self._lock

    def _start(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._bytes = 0
        self._known: OrderedDict[Hashable, bytes] = OrderedDict()

    def _drop(self, job: Hashable) -> None:
        self._bytes -= len(self._known.pop(job, b""))
