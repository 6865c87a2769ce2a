"""From rounds to figures, ratios and verdicts. PURE: no clock, no files, no processes."""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from benchmarks.workloads import WORKLOADS, Workload

#: What a client's process returned: figures by name.
Round = dict[str, float]

#: A ratio that grew by more than this is a regression.
LIMIT = 0.15
#: How sure the interval of a median is, where there are rounds enough.
CONFIDENCE = 0.9
#: Where less is known, an interval is the smallest to the largest round.
MINIMUM_ROUNDS = 3
#: Whose budgets these are, and whose ratios may not grow.
OURS = "spanwire"


class Measured(msgspec.Struct):
    """One client in one workload on one loop.

    Attributes:
        workload, loop, client: names.
        rounds: in order; empty if it failed.
        failed: what it said then.
    """

    workload: str
    loop: str
    client: str
    rounds: list[Round]
    failed: str | None = None

    def values(self, figure: str = "") -> list[float]:
        """A figure in every round; without a name the one that the workload is about."""
        key = figure or WORKLOADS[self.workload].figure
        return [figures[key] for figures in self.rounds if key in figures]


class Spread(NamedTuple):
    """Some values."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Smallest, median, largest."""
        return cls(min(values), statistics.median(values), max(values))

    @classmethod
    def of_median(cls, values: Sequence[float]) -> Spread:
        """The median between what it may be with CONFIDENCE, as far as order statistics tell; no shape is assumed.

        Five rounds: smallest and largest (94 %). Eight: second and seventh (93 %).
        """
        ordered, count = sorted(values), len(values)
        cut, outside = 0, 2 / 2**count
        while 2 * (cut + 2) <= count:
            outside += 2 * math.comb(count, cut + 1) / 2**count
            if outside > 1 - CONFIDENCE:
                break
            cut += 1
        return cls(ordered[cut], statistics.median(ordered), ordered[count - 1 - cut])


class Verdict(enum.Enum):
    """What two spreads of one ratio say."""

    SAME = f"within {LIMIT:.0%}"
    BETTER = "better"
    REGRESSION = "REGRESSION"
    UNCLEAR = "spread too wide to judge"


def judge(before: Spread, after: Spread, limit: float = LIMIT) -> Verdict:
    """A regression is a median that grew by more than the limit while the spreads do not overlap; better, the reverse.

    Too wide to judge: the median grew so much, but the spreads overlap; or the growth may lie anywhere in a range that
    is wider than the limit to either side.
    """
    grown = after.median / before.median - 1
    if after.low > before.high:
        return Verdict.REGRESSION if grown > limit else Verdict.SAME
    if after.high < before.low:
        return Verdict.BETTER if before.median / after.median - 1 > limit else Verdict.SAME
    least, most = after.low / before.high, after.high / before.low
    return Verdict.UNCLEAR if grown > limit or (most - least) / 2 > limit else Verdict.SAME


class Finding(NamedTuple):
    """A ratio, before and after."""

    workload: str
    loop: str
    client: str
    to: str
    before: Spread
    after: Spread

    @property
    def grown(self) -> float:
        """By which share the median grew."""
        return self.after.median / self.before.median - 1

    @property
    def verdict(self) -> Verdict:
        """What the two spreads say."""
        return judge(self.before, self.after)


def find(measured: Iterable[Measured], workload: str, loop: str, client: str) -> Measured | None:
    """The one with these names, if it was measured and did not fail."""
    for one in measured:
        if (one.workload, one.loop, one.client) == (workload, loop, client) and one.rounds:
            return one
    return None


def ratios(one: Measured, base: Measured) -> list[float]:
    """Round by round: what makes a machine slower for a minute is in both. Empty where there is none to be had."""
    pairs = list(zip(one.values(), base.values(), strict=False))
    return [value / other for value, other in pairs] if all(other > 0 for _, other in pairs) else []


def ratio(one: Measured, base: Measured | None) -> float | None:
    """Of the medians, as the table gives it."""
    if base is None or not WORKLOADS[one.workload].related:
        return None
    divisor = statistics.median(base.values())
    return statistics.median(one.values()) / divisor if divisor > 0 else None


def by_workload(measured: Sequence[Measured]) -> list[list[Measured]]:
    """Those of one workload on one loop together, in their order."""
    groups: dict[tuple[str, str], list[Measured]] = {}
    for one in measured:
        groups.setdefault((one.workload, one.loop), []).append(one)
    return list(groups.values())


def work_out(rows: Sequence[Workload], measured: Sequence[Measured]) -> list[Measured]:
    """What is not measured but worked out: memory, of `crowd` and `burst`. Of those who failed in neither."""
    found = []
    for row in rows:
        for group in by_workload([one for one in measured if row.needs and one.workload == row.needs[-1]]):
            for crowd in group:
                few = find(measured, row.needs[0], crowd.loop, crowd.client)
                if few is not None and crowd.rounds:
                    found.append(Measured(row.name, crowd.loop, crowd.client, _memory(few.rounds, crowd.rounds)))
    return found


def _memory(few: Sequence[Round], many: Sequence[Round]) -> list[Round]:
    """KiB for each stream: peak memory with many, less that with few, over the streams that are more."""
    return [
        {"kib_per_stream": (more["rss_mib"] - less["rss_mib"]) * 1024 / (more["at_once"] - less["at_once"])}
        for less, more in zip(few, many, strict=False)
    ]


class Budgeted(NamedTuple):
    """A budget, and how it went.

    Attributes:
        text: the budget in words.
        limit: in the figure's unit.
        met: whether it is kept.
    """

    text: str
    limit: float
    met: bool


def budget(one: Measured, measured: Iterable[Measured]) -> Budgeted | None:
    """How we did; None for others, for workloads without a budget, and where the other client was not measured."""
    row = WORKLOADS[one.workload]
    if one.client != OURS or row.budget is None or not one.rounds:
        return None
    limit, text = row.budget.limit, f"{row.budget.limit:g}"
    if row.budget.to is not None:
        base = find(measured, one.workload, one.loop, row.budget.to)
        if base is None:
            return None
        limit, text = limit * statistics.median(base.values()), f"{text} x {row.budget.to}"
    met = statistics.median(one.values()) <= limit
    if row.budget.wall_s is not None:
        text += f", {row.budget.wall_s:g} s"
        met = met and statistics.median(one.values("wall_s")) <= row.budget.wall_s
    return Budgeted(text, limit, met)
