"""Limits that are far away: one timer of the loop looks at all calls, four times a second, as long as there are any.

Nearly every call ends long before its limits, so what counts is the cost of setting and forgetting a timer for each:
none here, since the calls of a loop are in a set already.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from typing import Protocol

_log = logging.getLogger("spanwire.manager")

__all__ = ["NEAR_S", "Watch", "Watched"]

#: Limits below this are worth a precise timer of their own, in seconds.
NEAR_S = 5.0
#: How often the calls are looked at, in seconds: a far limit is hit at most so much too late.
_EVERY_S = 0.25


class Watched(Protocol):
    """A call under way.

    Attributes:
        look_ns: when it wants to be looked at, in ns of ``perf_counter_ns``.
    """

    look_ns: int

    def look(self, now_ns: int) -> None:
        """The time has come: hit the limit, or set another ``look_ns``."""


class Watch:
    """Looks at the calls of one loop."""

    __slots__ = ("_calls", "_loop", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, calls: Collection[Watched]) -> None:
        self._loop = loop
        self._calls = calls
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """There is a call. Does nothing if the others are looked at already."""
        if self._timer is None:
            self._timer = self._loop.call_later(_EVERY_S, self._look)

    def _look(self) -> None:
        self._timer = None
        now_ns = time.perf_counter_ns()
        for call in [call for call in self._calls if call.look_ns <= now_ns]:
            try:
                call.look(now_ns)
            except Exception:  # noqa: BLE001 - a transport's bug must not leave the others without limits
                _log.warning("a call could not be ended at its limit", exc_info=True)
        if self._calls:
            self.start()

    def close(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
