"""PURE: percentiles, and from how many values on they say something."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["P95_FROM", "P99_FROM", "percentile"]

#: From so many values on, the nearest-rank percentile is not the maximum by definition: 100 / (100 - p).
P95_FROM = 20
P99_FROM = 100


def percentile(ordered: Sequence[float], percent: int) -> float:
    """The nearest-rank percentile of values that are sorted and not empty; ``percent`` from 1 to 100."""
    return ordered[-(-percent * len(ordered) // 100) - 1]  # rounded up in whole numbers: no rounding moves a rank
