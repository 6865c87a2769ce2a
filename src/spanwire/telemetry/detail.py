"""PURE: for which calls the segments are drawn as spans of their own. Times are arguments.

A span costs about as much as everything else that tracing does for a call, so by default only calls get them that
somebody will look at: cold, slow and failed ones, and of the others a sample.
"""

from __future__ import annotations

import math

from ..timeline import CallRecord
from .attributes import Labels

__all__ = ["PER_SECOND", "Detail", "Slowness"]

#: Ordinary calls that are drawn, in a second, and as many slow ones, and cold ones. That is all of these in nearly every
#: program; where a crowd connects at once, or load makes ordinary calls slow, spans for each would add to it. Seven spans each cost some 0.4 ms of CPU (measured): 0.4 % of one core.
PER_SECOND = 10
#: Calls before anything counts as slow.
_WARM_UP = 20
#: How far above the mean a slow call is, at the least: where all take the same, the last hundredth is not slow.
_TIMES_MEAN = 2.0
#: Calls over which the mean forgets.
_MEMORY = 64
#: The estimate of the 99th percentile goes up by 5 % at each time above it and down by 1/99 of that at each other one: it
#: rests where one in a hundred is above.
_UP = math.exp(0.05)
_DOWN = math.exp(-0.05 / 99)


class Slowness:
    """Is a time unusually long among those that came before it?

    Slow is what is above the 99th percentile and above twice the mean, both estimated as calls come: three numbers for
    each endpoint and model, a fifth of a microsecond for each call. Nothing is slow among the first 20. Whatever comes,
    not many more than one call in a hundred is: a server that gets slower for good moves the estimate within some 14 calls
    for each doubling.
    """

    __slots__ = ("_bound_s", "_mean_s", "_seen")

    def __init__(self) -> None:
        self._seen = 0
        self._mean_s = 0.0
        self._bound_s = 0.0

    def add(self, seconds: float) -> bool:
        """Take one more time into account, and say whether it was slow."""
        mean_s, bound_s = self._mean_s, self._bound_s
        if self._seen < _WARM_UP:
            self._seen += 1
            self._mean_s = mean_s + (seconds - mean_s) / self._seen
            self._bound_s = max(bound_s, seconds)
            return False
        self._mean_s = mean_s + (seconds - mean_s) / _MEMORY
        if seconds <= bound_s:
            self._bound_s = bound_s * _DOWN
            return False
        self._bound_s = bound_s * _UP
        return seconds > mean_s * _TIMES_MEAN


class Detail:
    """Decides, once for each call that is recorded.

    Args:
        mode: ``full`` always, ``flat`` never, ``auto`` when the call was cold (it waited for a handshake), slow (see
            :class:`Slowness`; of a stream, its first content) or failed (or tried again), and for the first
            ``PER_SECOND`` others in each second. Of the slow ones, too, the first ``PER_SECOND`` in each, and of the cold.
    """

    __slots__ = ("_cold", "_count", "_mode", "_since_ns", "_slow")

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self._since_ns = 0
        self._count = 0
        self._slow = 0
        self._cold = 0

    def wants(self, record: CallRecord, labels: Labels) -> bool:
        """Whether this call, which has ended, is drawn in detail."""
        if self._mode != "auto":
            return self._mode == "full"
        attempts = record.attempts
        if len(attempts) != 1 or record.outcome in ("error", "timeout"):
            return True
        attempt = attempts[0]
        if record.end_ns - self._since_ns >= 1_000_000_000:
            self._since_ns, self._count, self._slow, self._cold = record.end_ns, 0, 0, 0
        if attempt.served != "idle" and (attempt.connection is None or not attempt.connection.reused):
            self._cold += 1
            return self._cold <= PER_SECOND
        slowness = labels.slowness
        if slowness is None:
            slowness = labels.slowness = Slowness()
        until_ns = attempt.marks.first_content_ns or record.end_ns
        if record.outcome == "completed" and slowness.add((until_ns - record.begin_ns) / 1e9):
            self._slow += 1
            return self._slow <= PER_SECOND
        self._count += 1
        return self._count <= PER_SECOND
