"""PURE: how many jobs of a bulk are open, and how many are being submitted. Times are arguments.

Open at once are at most

* what the caller says, else 1,000;
* with webhooks, what a receiver takes within the time for which the provider goes on delivering: after an outage all of them
  may come at once;
* what can be asked for within the time for which results are kept, with half of the provider's limit: webhooks may stop.

On "too many requests" the window is halved, once for all that were sent before that, and nothing is sent for as long as the
server says. Each acknowledgement opens it again by a part, a whole window's worth by one (AIMD, as TCP does).
"""

from __future__ import annotations

import math

__all__ = ["OPEN", "Window", "most_open"]

#: Jobs that are open at once, unless the caller says otherwise.
OPEN = 1000
#: Webhooks a second. Source: measured, SQLite with each on the disk before its answer, without a group commit.
RECEIVED_PER_S = 250.0
#: Bytes of calls whose jobs are open: they are kept in case that a shard has to be split.
OPEN_BYTES = 64 * 1024 * 1024
#: Submits at once.
SUBMITS = 16
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 60.0


def most_open(given: int | None, *, webhooks: bool, delivery_s: float, polls_per_s: float, retention_s: float) -> int:
    """The bound above; at least 1. Arguments as in :class:`~spanwire.jobs.contract.JobCodec`."""
    bounds = [float(OPEN if given is None else given)]
    if webhooks:
        bounds.append(RECEIVED_PER_S * delivery_s)
    asked = polls_per_s * retention_s * 0.5
    if asked > 0:  # Cog has no status: nothing to be asked
        bounds.append(asked)
    return max(1, int(min(bounds)))


class Window:
    """Decides whether one more may be submitted.

    Args:
        most: jobs that are open at once.
    """

    def __init__(self, most: int, *, most_bytes: int = OPEN_BYTES, submits: int = SUBMITS) -> None:
        self.most = most
        self.limit = float(most)
        self.submitting = 0
        self._most_bytes = most_bytes
        self._submits = submits
        self._ticket = 0
        self._cut = 0  # the last ticket that was given out before the window was halved
        self._refusals = 0  # pauses in a row
        self._not_before_s = 0.0

    def room(self, jobs: int, size: int) -> bool:
        """Whether one more job may be open besides so many with so many bytes."""
        return jobs == 0 or (jobs < math.floor(self.limit) and size < self._most_bytes)

    def may_submit(self, now_s: float) -> bool:
        """Whether one more may be sent now."""
        return now_s >= self._not_before_s and self.submitting < max(1, min(self._submits, math.floor(self.limit)))

    def wait_s(self, now_s: float) -> float | None:
        """How long nothing is to be sent; None: something may be."""
        left_s = self._not_before_s - now_s
        return left_s if left_s > 0 else None

    def begin(self) -> int:
        """A submit is sent; returns what to give to :meth:`refused`."""
        self.submitting += 1
        self._ticket += 1
        return self._ticket

    def end(self) -> None:
        """It is over, however."""
        self.submitting -= 1

    def acknowledged(self) -> None:
        """A submit was taken."""
        self._refusals = 0
        self.limit = min(float(self.most), self.limit + 1.0 / self.limit)

    def refused(self, ticket: int, now_s: float, *, retry_after_s: float | None, dice: float) -> None:
        """The server takes no more now.

        Args:
            retry_after_s: as it says.
            dice: a random number in [0, 1): several processes do not come back together.
        """
        if ticket > self._cut:
            self._cut = self._ticket
            self.limit = max(1.0, self.limit / 2)
            if retry_after_s is None:
                self.pause(now_s, dice=dice)
        if retry_after_s is not None:
            self._not_before_s = max(self._not_before_s, now_s + retry_after_s)

    def pause(self, now_s: float, *, dice: float) -> None:
        """Send nothing for a while, longer each time."""
        wait_s = min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2.0 ** min(self._refusals, 16))
        self._refusals += 1
        self._not_before_s = max(self._not_before_s, now_s + wait_s * (0.75 + 0.5 * dice))
