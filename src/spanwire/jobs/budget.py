"""PURE: when a provider is asked how a job stands, and how often it may be. Times are arguments."""

from __future__ import annotations

from collections import deque

from .contract import Mode

__all__ = ["Durations", "TokenBucket", "next_poll_s"]

#: Earliest question after the submit, in seconds: where webhooks come, most jobs end without one.
_FLOOR_S: dict[Mode, float] = {"webhook": 60.0, "poll": 1.0}
#: Longest wait between two questions, in seconds.
_CEILING_S = 300.0
_KEPT = 200


def next_poll_s(
    *,
    now_s: float,
    since_s: float,
    mode: Mode,
    floor_s: float | None,
    usual_s: float | None,
    retention_s: float,
    dice: float,
) -> float:
    """When to ask next.

    The wait grows with the job's age, by half of it, so that a job of any length is asked a handful of times; it ends before
    the provider forgets the result.

    Args:
        since_s: when the job was submitted.
        floor_s: the least wait, if one is set.
        usual_s: how long jobs of this model take, if that is known: no use in asking before.
        retention_s: how long the provider keeps a result.
        dice: a random number in [0, 1): jobs that were submitted together are not asked for together.
    """
    floor_s = _FLOOR_S[mode] if floor_s is None else floor_s
    age_s = max(0.0, now_s - since_s)
    wait_s = max(floor_s, age_s * 0.5)
    if usual_s is not None and age_s < usual_s:
        wait_s = max(wait_s, usual_s - age_s)
    wait_s = min(wait_s, max(floor_s, _CEILING_S), max(0.5, retention_s * 0.5))
    return now_s + wait_s * (0.9 + 0.2 * dice)


class TokenBucket:
    """At most ``rate_per_s`` on average, and a second's worth at once."""

    def __init__(self, rate_per_s: float, now_s: float) -> None:
        self.rate_per_s = max(rate_per_s, 1e-3)
        self._most = max(1.0, self.rate_per_s)
        self._tokens = self._most
        self._at_s = now_s
        self._not_before_s = 0.0

    def take(self, now_s: float) -> bool:
        """Whether one more is allowed now."""
        self._tokens = min(self._most, self._tokens + max(0.0, now_s - self._at_s) * self.rate_per_s)
        self._at_s = now_s
        if now_s < self._not_before_s or self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True

    def pause(self, until_s: float) -> None:
        """The provider has asked for it."""
        self._not_before_s = max(self._not_before_s, until_s)


class Durations:
    """How long the last jobs of each model took."""

    def __init__(self) -> None:
        self._seen: dict[object, deque[float]] = {}

    def add(self, key: object, seconds: float) -> None:
        """One more has ended."""
        if key not in self._seen and len(self._seen) >= _KEPT:
            self._seen.clear()
        self._seen.setdefault(key, deque(maxlen=_KEPT)).append(seconds)

    def usual_s(self, key: object) -> float | None:
        """What 95 of 100 do not exceed; None while few are known."""
        seen = self._seen.get(key)
        if seen is None or len(seen) < 5:
            return None
        return sorted(seen)[int(len(seen) * 0.95)] if len(seen) > 1 else seen[0]
