"""PURE: is it worth reading on to the end of a message, so that its connection can be used again? By origin.

A reader of event streams stops at the terminal event and closes; the end of the message (the last, empty chunk) is then
unread, and HTTP/1.1 has to drop the connection. Reading on for a moment saves it. A server that ends later than that
costs the whole moment, and the connection is lost all the same: after some misses in a row an origin is left alone, and
tried again now and then.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

__all__ = ["DRAIN_BYTES", "DRAIN_S", "WAIT_S", "DrainBook"]

#: How long to read on, in seconds. What openai's own asynchronous client takes (3.57), and enough for a terminator that
#: is 30 ms late (measured).
DRAIN_S = 0.1
#: How much to read on, in bytes: usage, timing and the terminator are far below, the rest of an answer is not.
DRAIN_BYTES = 64 * 1024
#: How long a request waits for a connection that is being drained, in seconds, where they usually come back within that:
#: as in spanwire's own pool, since waiting longer costs more than the handshake that it saves.
WAIT_S = 0.005

_MISSES = 3  # in a row, after which an origin is left alone
_SKIPS = 16  # streams that are closed without a drain before the next try
_ORIGINS = 256


class _Origin:
    __slots__ = ("late", "misses", "skipped")

    def __init__(self) -> None:
        self.misses = 0
        self.skipped = 0
        self.late = 0  # in a row: ended, and yet not within WAIT_S


class DrainBook:
    """What was learned of each origin. No locks: each step is one that threads may mix."""

    __slots__ = ("_origins",)

    def __init__(self) -> None:
        self._origins: OrderedDict[Hashable, _Origin] = OrderedDict()

    def _of(self, origin: Hashable) -> _Origin:
        found = self._origins.get(origin)
        if found is None:
            while len(self._origins) >= _ORIGINS:
                try:
                    self._origins.popitem(last=False)
                except KeyError:  # another thread was faster
                    break
            found = self._origins[origin] = _Origin()
        return found

    def wanted(self, origin: Hashable) -> bool:
        """Whether to drain the stream that ends now. Counts those that are not."""
        found = self._of(origin)
        if found.misses < _MISSES:
            return True
        found.skipped += 1
        if found.skipped >= _SKIPS:
            found.skipped = 0
            return True
        return False

    def ended(self, origin: Hashable, took_s: float) -> None:
        """A drain has found the end of the message."""
        found = self._of(origin)
        found.misses = found.skipped = 0
        found.late = found.late + 1 if took_s > WAIT_S else 0

    def missed(self, origin: Hashable) -> None:
        """A drain has found no end, or the connection broke: it is lost."""
        self._of(origin).misses += 1

    def worth_waiting(self, origin: Hashable) -> bool:
        """Whether a request should wait for a connection that is being drained."""
        found = self._origins.get(origin)
        return found is None or (not found.misses and found.late < _MISSES)
