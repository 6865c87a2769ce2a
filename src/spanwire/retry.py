"""PURE: whether a failed attempt is tried again, and after how long."""

from __future__ import annotations

from .endpoint import Retries
from .errors import JobError, NoSlot, ServerError, SpanwireError

__all__ = ["retry_wait_s"]


def retry_wait_s(error: SpanwireError, attempts: int, retries: Retries, dice: float) -> float | None:
    """Seconds to wait before the next attempt, None to give up.

    Args:
        error: what ended the last attempt.
        attempts: how many there were.
        dice: a random number in [0, 1): full jitter, so that clients that failed together do not come back together.
            Source: AWS Architecture Blog, "Exponential Backoff And Jitter".
    """
    if not error.retryable or attempts >= retries.max_attempts:
        return None
    # Waiting again at once would multiply the caller's own limit; a job is submitted again by its own rules.
    if isinstance(error, (NoSlot, JobError)):
        return None
    wait_s = min(retries.max_wait_s, retries.base_s * 2.0 ** min(attempts - 1, 32)) * dice
    asked_s = error.retry_after_s if isinstance(error, ServerError) else None
    if asked_s is None:
        return wait_s
    return max(wait_s, asked_s) if asked_s <= retries.max_wait_s else None
