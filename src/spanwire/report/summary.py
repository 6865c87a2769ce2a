"""PURE: calls to numbers: percentiles, segments, cold against warm, re-use, outcomes, and how all of it went over time.

Percentiles are nearest-rank: the smallest value that at least p percent of the values do not exceed, so each is a time
that was measured. p95 exists from 20 values on and p99 from 100: below that it would be the maximum under another name.

A page has filters, and every number on it is exact: so there are numbers for each *selection*, one endpoint or all, one
model or all, one outcome or all. Each call is looked at once, in its cell (endpoint, model, outcome); a selection is
put together from cells.
"""

from __future__ import annotations

import heapq
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ..percentiles import P95_FROM, P99_FROM, percentile
from ..timeline import SEGMENTS
from .calls import SOURCES, Call

__all__ = [
    "ALL",
    "OTHERS",
    "Buckets",
    "Column",
    "Row",
    "Selection",
    "Stats",
    "Summary",
    "percentile",
    "spread",
    "summarize",
]

#: In a selection: whatever it is.
ALL = -1
#: Pairs of endpoint and model beyond the largest MAX_PAIRS go together under this name.
OTHERS = "(others)"
MAX_PAIRS = 40
#: Buckets of time: as many as a chart can show, fewer where there are many selections to keep the page small.
MAX_BUCKETS = 240
_MIN_BUCKETS = 60
_FEW_BUCKETS = 16
_NUMBERS = 400_000
#: Widths of a bucket, in seconds: what people count time in.
_WIDTHS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30),
    *(60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800),
)
#: Slowest calls that are drawn, in all; and calls beside them that are not chosen for being slow.
SLOWEST = 200
SAMPLE = 60
#: An answer that came within this time after its first content came at once, and has no speed, in seconds.
_PACED_S = 0.01

#: Metrics of a call. All in seconds but the last.
TIMES = ("total", "first_content", "inter_token", "handshake", "tokens_per_s")


class Column(msgspec.Struct, frozen=True, omit_defaults=True):
    """How values spread: ``n`` of them. In seconds, or tokens a second. None = too few for it."""

    n: int
    min: float
    mean: float
    p50: float
    max: float
    p95: float | None = None
    p99: float | None = None


class Row(msgspec.Struct, frozen=True):
    """A segment, or one of its parts (``part`` not empty).

    Attributes:
        sum_s: over all calls of the selection.
        by_source: how much of it was measured, reported and estimated, in seconds.
        spread: over the calls that have it.
    """

    segment: str
    part: str
    sum_s: float
    by_source: Sequence[float]
    spread: Column


class Stats(msgspec.Struct, frozen=True):
    """Some of the calls.

    Attributes:
        calls: how many; cold + warm + those about whose connection nothing is known.
        sum_s: their time in all, to which the segments (the rows without a part) add up.
        times: by metric (TIMES); those that no call has are missing.
        cold, warm: number of calls and the same metrics, apart.
        rows: segments in the order of a waterfall, each followed by its parts.
        outcomes, errors: how many calls ended how; classes of errors.
        retried: calls with more than one attempt.
        tokens: ``input``, ``output``, ``cached``, as far as servers counted them; and ``calls`` that have a count.
    """

    calls: int
    cold: int
    warm: int
    sum_s: float
    times: Mapping[str, Column]
    cold_times: Mapping[str, Column]
    warm_times: Mapping[str, Column]
    rows: Sequence[Row]
    outcomes: Mapping[str, int]
    errors: Mapping[str, int]
    retried: int
    tokens: Mapping[str, int]


class Buckets(msgspec.Struct, frozen=True):
    """A selection over time: one entry in each column for each bucket that has calls.

    Attributes:
        index: which buckets.
        calls, cold: calls that began in it.
        segments: seconds of each segment in them, in the order of SEGMENTS.
        total_p50, total_p95, first_p50, first_p95: percentiles in seconds; None where unknown.
    """

    index: list[int]
    calls: list[int]
    cold: list[int]
    segments: list[list[float]]
    total_p50: list[float | None]
    total_p95: list[float | None]
    first_p50: list[float | None]
    first_p95: list[float | None]


class Selection(msgspec.Struct, frozen=True):
    """One endpoint, model and outcome, by their index in the summary, or ALL."""

    endpoint: int
    model: int
    outcome: int
    stats: Stats
    buckets: Buckets


class Summary(msgspec.Struct, frozen=True):
    """Everything that a report says about its calls.

    Attributes:
        endpoints, models, outcomes: names, by frequency.
        first_unix_s, end_unix_s: the first call's start and the last one's end; None if no call has a time of day.
        begin_unix_s: where the first bucket begins.
        timeless: calls without one.
        bucket_s, buckets: width and number of the buckets of time; 0 without any.
        selections: all that have calls; the first is everything.
        slowest, sample: calls to draw, with the index of their endpoint and model.
    """

    endpoints: Sequence[str]
    models: Sequence[str]
    outcomes: Sequence[str]
    first_unix_s: float | None
    end_unix_s: float | None
    begin_unix_s: float | None
    timeless: int
    bucket_s: float
    buckets: int
    selections: Sequence[Selection]
    slowest: Sequence[tuple[int, int, Call]]
    sample: Sequence[tuple[int, int, Call]]

    @property
    def all(self) -> Stats:
        """Of all calls."""
        return self.selections[0].stats

    def stats(self, endpoint: int = ALL, model: int = ALL, outcome: int = ALL) -> Stats | None:
        """Of a selection; None if it has no calls."""
        for selection in self.selections:
            if (selection.endpoint, selection.model, selection.outcome) == (endpoint, model, outcome):
                return selection.stats
        return None

    @property
    def completed(self) -> Stats | None:
        """Of the calls that came to their proper end."""
        return self.stats(outcome=self.outcomes.index("completed")) if "completed" in self.outcomes else None


# --- percentiles --------------------------------------------------------------------------------------------------------


def spread(values: Iterable[float]) -> Column:
    """How at least one value spreads, in any order."""
    ordered = sorted(values)
    n = len(ordered)
    return Column(
        n=n,
        min=ordered[0],
        mean=min(max(sum(ordered) / n, ordered[0]), ordered[-1]),  # the sum's rounding must not leave the range
        p50=percentile(ordered, 50),
        max=ordered[-1],
        p95=percentile(ordered, 95) if n >= P95_FROM else None,
        p99=percentile(ordered, 99) if n >= P99_FROM else None,
    )


# --- cells --------------------------------------------------------------------------------------------------------------


class _Bucket:
    __slots__ = ("calls", "cold", "first", "segments", "total")

    def __init__(self) -> None:
        self.calls = 0
        self.cold = 0
        self.segments = [0.0] * len(SEGMENTS)
        self.total = array("d")
        self.first = array("d")


class _Cell:
    """The calls of one endpoint, model and outcome."""

    __slots__ = ("buckets", "calls", "errors", "retried", "sources", "times", "tokens", "values")

    def __init__(self) -> None:
        self.calls: list[Call] = []
        #: (metric, cold) to values
        self.times: dict[tuple[str, bool | None], array[float]] = {}
        #: (segment, part) to values, (segment, "") of the whole segment
        self.values: dict[tuple[str, str], array[float]] = {}
        self.sources: dict[tuple[str, str, str], float] = {}
        self.errors: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.retried = 0
        self.buckets: dict[int, _Bucket] = {}

    def add(self, call: Call) -> dict[str, float]:
        """Count a call; gives its segments."""
        self.calls.append(call)
        segments: dict[str, float] = {}
        values, sources = self.values, self.sources
        for (segment, part, source), seconds in zip(call.pieces, call.durations, strict=True):
            segments[segment] = segments.get(segment, 0.0) + seconds
            key = (segment, part, source)
            sources[key] = sources.get(key, 0.0) + seconds
            if part:
                column = values.get((segment, part))
                if column is None:
                    column = values[segment, part] = array("d")
                column.append(seconds)
        for segment, seconds in segments.items():
            column = values.get((segment, ""))
            if column is None:
                column = values[segment, ""] = array("d")
            column.append(seconds)
        cold = call.cold
        for name, value in _times(call, segments):
            times = self.times.get((name, cold))
            if times is None:
                times = self.times[name, cold] = array("d")
            times.append(value)
        if call.error_type:
            self.errors[call.error_type] += 1
        self.retried += call.attempts > 1
        if call.output_tokens is not None:
            self.tokens["calls"] += 1
            self.tokens["output"] += call.output_tokens
        if call.input_tokens is not None:
            self.tokens["input"] += call.input_tokens
        if call.cached_tokens is not None:
            self.tokens["cached"] += call.cached_tokens
        return segments

    def add_at(self, number: int, call: Call, segments: Mapping[str, float]) -> None:
        """Count it in its bucket of time too."""
        bucket = self.buckets.get(number)
        if bucket is None:
            bucket = self.buckets[number] = _Bucket()
        bucket.calls += 1
        bucket.cold += call.cold is True
        bucket.total.append(call.total_s)
        if call.first_content_s is not None:
            bucket.first.append(call.first_content_s)
        for segment, seconds in segments.items():
            bucket.segments[_INDEX.get(segment, _LAST)] += seconds


_INDEX = {name: number for number, name in enumerate(SEGMENTS)}
_LAST = len(SEGMENTS) - 1  # a segment that this version does not know has no colour of its own


def _times(call: Call, segments: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    yield "total", call.total_s
    handshake_s = segments.get("handshake")
    if handshake_s:
        yield "handshake", handshake_s
    first_s, last_s, tokens = call.first_content_s, call.last_chunk_s, call.output_tokens
    if first_s is None:
        return
    yield "first_content", first_s
    if last_s is None or tokens is None or tokens < 2 or last_s - first_s < _PACED_S:
        return
    yield "inter_token", (last_s - first_s) / (tokens - 1)
    yield "tokens_per_s", tokens / (last_s - first_s)


# --- all ----------------------------------------------------------------------------------------------------------------


def summarize(calls: Sequence[Call]) -> Summary:
    """Put a report together from at least one call, in order of their start."""
    pair_of, endpoints, models = _pairs(calls)
    outcomes = [name for name, _ in Counter(call.outcome for call in calls).most_common()]
    outcome_of = {name: number for number, name in enumerate(outcomes)}
    begin, end, timeless = _window(calls)
    keys = {(*pair_of[call.endpoint, call.model], outcome_of[call.outcome]) for call in calls}
    groups = _groups(keys)
    bucket_s, buckets = _bucket_width(begin, end, len(calls), len(groups))
    origin = begin // bucket_s * bucket_s if begin is not None else 0.0
    cells: dict[tuple[int, int, int], _Cell] = {key: _Cell() for key in sorted(keys)}
    for call in calls:
        cell = cells[*pair_of[call.endpoint, call.model], outcome_of[call.outcome]]
        segments = cell.add(call)
        if buckets and call.started_unix_s is not None:
            cell.add_at(int((call.started_unix_s - origin) / bucket_s), call, segments)
    selections = [
        Selection(*key, _stats([(outcomes[name[2]], cells[name]) for name in members]), _buckets(cells, members))
        for key, members in groups.items()
    ]
    slowest, sample = _chosen(cells, calls, pair_of)
    return Summary(
        endpoints=endpoints,
        models=models,
        outcomes=outcomes,
        first_unix_s=begin,
        end_unix_s=end,
        begin_unix_s=origin if buckets else None,
        timeless=timeless,
        bucket_s=bucket_s,
        buckets=buckets,
        selections=selections,
        slowest=slowest,
        sample=sample,
    )


def _pairs(calls: Sequence[Call]) -> tuple[dict[tuple[str, str], tuple[int, int]], list[str], list[str]]:
    counted = Counter((call.endpoint, call.model) for call in calls).most_common()
    kept = counted if len(counted) <= MAX_PAIRS else counted[: MAX_PAIRS - 1]
    endpoints = list(dict.fromkeys(endpoint for (endpoint, _), _ in kept))
    models = list(dict.fromkeys(model for (_, model), _ in kept))
    pairs = {pair: (endpoints.index(pair[0]), models.index(pair[1])) for pair, _ in kept}
    if len(kept) < len(counted):
        others = (len(endpoints), len(models))
        endpoints.append(OTHERS)
        models.append(OTHERS)
        pairs.update((pair, others) for pair, _ in counted[len(kept) :])
    return pairs, endpoints, models


def _window(calls: Sequence[Call]) -> tuple[float | None, float | None, int]:
    begins = [call.started_unix_s for call in calls if call.started_unix_s is not None]
    if not begins:
        return None, None, len(calls)
    end = max(call.started_unix_s + call.total_s for call in calls if call.started_unix_s is not None)
    return min(begins), end, len(calls) - len(begins)


def _groups(keys: Iterable[tuple[int, int, int]]) -> dict[tuple[int, int, int], list[tuple[int, int, int]]]:
    """Every selection that has calls, to its cells; everything first."""
    groups: dict[tuple[int, int, int], list[tuple[int, int, int]]] = {(ALL, ALL, ALL): []}
    for key in sorted(keys):
        endpoint, model, outcome = key
        for e in (ALL, endpoint):
            for m in (ALL, model):
                for o in (ALL, outcome):
                    groups.setdefault((e, m, o), []).append(key)
    return groups


def _bucket_width(begin: float | None, end: float | None, calls: int, selections: int) -> tuple[float, int]:
    if begin is None or end is None or end <= begin:
        return (1.0, 1) if begin is not None else (1.0, 0)
    most = max(_MIN_BUCKETS, min(MAX_BUCKETS, _NUMBERS // (12 * selections)))
    most = min(most, max(_FEW_BUCKETS, calls // 4))  # few calls in many buckets would be a row of single calls
    for width in _WIDTHS:
        count = int((end - begin // width * width) / width) + 1
        if count <= most:
            return float(width), count
    days = -(-(end - begin) // (86_400 * (most - 1)))  # years of calls
    width = days * 86_400.0
    return width, int((end - begin // width * width) / width) + 1


def _columns(values: Mapping[str, list[array[float]]]) -> dict[str, Column]:
    return {name: spread(_joined(values[name])) for name in TIMES if name in values}


def _joined(arrays: Iterable[array[float]]) -> array[float]:
    joined = array("d")
    for values in arrays:
        joined.extend(values)
    return joined


def _stats(members: Sequence[tuple[str, _Cell]]) -> Stats:
    times: dict[str, list[array[float]]] = {}
    apart: dict[bool, dict[str, list[array[float]]]] = {True: {}, False: {}}
    values: dict[tuple[str, str], list[array[float]]] = {}
    sources: dict[tuple[str, str], list[float]] = {}
    outcomes: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    retried = 0
    for outcome, cell in members:
        outcomes[outcome] += len(cell.calls)
        errors += cell.errors
        tokens += cell.tokens
        retried += cell.retried
        for (name, cold), column in cell.times.items():
            times.setdefault(name, []).append(column)
            if cold is not None:
                apart[cold].setdefault(name, []).append(column)
        for key, column in cell.values.items():
            values.setdefault(key, []).append(column)
        for (segment, part, source), seconds in cell.sources.items():
            for key in {(segment, ""), (segment, part)}:
                row = sources.setdefault(key, [0.0] * len(SOURCES))
                row[SOURCES.index(source) if source in SOURCES else -1] += seconds
    rows = []
    for key in sorted(values, key=_rank):
        joined = _joined(values[key])
        rows.append(Row(*key, sum(joined), sources[key], spread(joined)))
    cold_times, warm_times = _columns(apart[True]), _columns(apart[False])
    total = times["total"]
    return Stats(
        calls=sum(outcomes.values()),
        cold=cold_times["total"].n if cold_times else 0,
        warm=warm_times["total"].n if warm_times else 0,
        sum_s=sum(sum(column) for column in total),
        times=_columns(times),
        cold_times=cold_times,
        warm_times=warm_times,
        rows=rows,
        outcomes=dict(outcomes.most_common()),
        errors=dict(errors.most_common()),
        retried=retried,
        tokens=dict(tokens),
    )


def _rank(key: tuple[str, str]) -> tuple[int, str, int, str]:
    segment, part = key
    return _INDEX.get(segment, _LAST), segment, _PART_ORDER.get(part, 99), part


#: Parts in the order in which they happen.
_PART_ORDER = {
    name: number
    for number, name in enumerate(
        (
            *("", "local", "server", "backoff", "shared", "connect", "dns", "tcp", "proxy", "tls", "upgrade"),
            *("encode", "send", "to_and_back", "prefill", "decode", "receive", "waiting"),
        )
    )
}


def _buckets(cells: Mapping[tuple[int, int, int], _Cell], members: Sequence[tuple[int, int, int]]) -> Buckets:
    by_number: dict[int, list[_Bucket]] = {}
    for key in members:
        for number, bucket in cells[key].buckets.items():
            by_number.setdefault(number, []).append(bucket)
    found = Buckets([], [], [], [[] for _ in SEGMENTS], [], [], [], [])
    for number in sorted(by_number):
        some = by_number[number]
        found.index.append(number)
        found.calls.append(sum(bucket.calls for bucket in some))
        found.cold.append(sum(bucket.cold for bucket in some))
        for segment, column in enumerate(found.segments):
            column.append(sum(bucket.segments[segment] for bucket in some))
        total = sorted(_joined(bucket.total for bucket in some))
        found.total_p50.append(percentile(total, 50))
        found.total_p95.append(percentile(total, 95) if len(total) >= P95_FROM else None)
        first = sorted(_joined(bucket.first for bucket in some))
        found.first_p50.append(percentile(first, 50) if first else None)
        found.first_p95.append(percentile(first, 95) if len(first) >= P95_FROM else None)
    return found


def _chosen(
    cells: Mapping[tuple[int, int, int], _Cell],
    calls: Sequence[Call],
    pair_of: Mapping[tuple[str, str], tuple[int, int]],
) -> tuple[list[tuple[int, int, Call]], list[tuple[int, int, Call]]]:
    """The slowest of each cell, half of them by the whole time and half by the first content; and every n-th of all."""
    each = max(1, SLOWEST // (2 * len(cells)))
    slowest: dict[int, tuple[int, int, Call]] = {}
    for (endpoint, model, _), cell in cells.items():
        by_total = heapq.nlargest(each, cell.calls, key=lambda call: call.total_s)
        by_first = heapq.nlargest(each, cell.calls, key=lambda call: call.first_content_s or -1.0)
        for call in (*by_total, *by_first):
            slowest[id(call)] = (endpoint, model, call)
    step = max(1, len(calls) // SAMPLE)
    sample = [(*pair_of[call.endpoint, call.model], call) for call in calls[step // 2 :: step][:SAMPLE]]
    ordered = sorted(slowest.values(), key=lambda row: -row[2].total_s)
    return ordered, sample


def shares(stats: Stats) -> dict[str, float]:
    """Each segment's share of the time, from 0 to 1."""
    if not stats.sum_s:
        return {}
    return {row.segment: row.sum_s / stats.sum_s for row in stats.rows if not row.part}


def plain(summary: Summary) -> dict[str, Any]:
    """For ``--json``: everything but the calls and the course over time."""

    def name(names: Sequence[str], number: int) -> str | None:
        return None if number == ALL else names[number]

    return {
        "endpoints": summary.endpoints,
        "models": summary.models,
        "begin_unix_s": summary.first_unix_s,
        "end_unix_s": summary.end_unix_s,
        "selections": [
            {
                "endpoint": name(summary.endpoints, selection.endpoint),
                "model": name(summary.models, selection.model),
                "outcome": name(summary.outcomes, selection.outcome),
                **msgspec.to_builtins(selection.stats),
            }
            for selection in summary.selections
        ],
    }
