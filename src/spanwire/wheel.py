"""Coarse timers for limits that are far away: one timer of the loop for all calls of a quarter of a second.

Nearly every call ends long before its limits, so what counts is the cost of setting and forgetting a timer: two steps in a
dictionary here, against a heap of the loop that is cleaned up now and then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

__all__ = ["NEAR_NS", "Wheel"]

#: Limits that are nearer than this are worth a precise timer of their own, in ns.
NEAR_NS = 5_000_000_000
#: How late a coarse timer may be, in ns.
_SLOT_NS = 250_000_000


class Wheel:
    """Calls back when a time has come, at most a quarter of a second late. For one loop."""

    __slots__ = ("_armed_slot", "_loop", "_slots", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._slots: dict[int, dict[object, Callable[[], None]]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._armed_slot = 0

    def __len__(self) -> int:
        return sum(map(len, self._slots.values()))

    def add(self, key: object, due_ns: int, callback: Callable[[], None]) -> int:
        """Call back at ``due_ns`` (``perf_counter_ns``) or soon after. Returns the slot, which :meth:`discard` wants."""
        slot = due_ns // _SLOT_NS + 1
        entries = self._slots.get(slot)
        if entries is None:
            entries = self._slots[slot] = {}
            if self._timer is None or slot < self._armed_slot:
                self._arm(slot)
        entries[key] = callback
        return slot

    def discard(self, key: object, slot: int) -> None:
        """Forget it. Harmless if it was called back already."""
        entries = self._slots.get(slot)
        if entries is not None:
            entries.pop(key, None)
            if not entries:
                del self._slots[slot]

    def _arm(self, slot: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._armed_slot = slot
        delay_s = max(0.0, (slot * _SLOT_NS - time.perf_counter_ns()) / 1e9)
        self._timer = self._loop.call_later(delay_s, self._turn)

    def _turn(self) -> None:
        self._timer = None
        now = time.perf_counter_ns() // _SLOT_NS
        for slot in [slot for slot in self._slots if slot <= now]:
            for callback in self._slots.pop(slot).values():
                callback()
        if self._slots and self._timer is None:
            self._arm(min(self._slots))

    def close(self) -> None:
        """Forget everything."""
        self._slots.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
