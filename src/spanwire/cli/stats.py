"""PURE: what many calls have in common: percentiles of their times and segments, cold calls apart from warm ones.

Percentiles are nearest-rank: the smallest value that at least p percent of the values do not exceed. So each is a time
that was measured, never one in between. From few values a high percentile is only their maximum under another name: p95
exists from 20 values on, p99 from 100; below that it is None, and ``max_s`` is what there is to say.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from ..percentiles import P95_FROM, P99_FROM, percentile
from ..timeline import SEGMENTS, Source, Timeline, weakest_source

__all__ = ["Group", "Outcome", "Report", "Row", "Summary", "Tokens", "percentile", "report", "summarize"]

TokenSource = Literal["usage", "chunks"]


class Outcome(msgspec.Struct, frozen=True):
    """One call of a run.

    Attributes:
        timeline: where its time went; None if it failed before there was one.
        tokens: of its answer.
        counted_by: the server's ``usage``, or ``chunks``: pieces of content counted here.
        error_type, message: of a call that failed.
    """

    timeline: Timeline | None = None
    tokens: int = 0
    counted_by: TokenSource = "chunks"
    error_type: str | None = None
    message: str | None = None

    @property
    def cold(self) -> bool:
        """Its connection was made for it, or was still being made when it came."""
        use = self.timeline.connection if self.timeline is not None else None
        return use is None or not use.reused


class Summary(msgspec.Struct, frozen=True):
    """Times of ``n`` calls, in seconds. A percentile is None where there are too few values for it."""

    n: int
    min_s: float
    mean_s: float
    p50_s: float
    p95_s: float | None
    p99_s: float | None
    max_s: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data, without what is None."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}


class Row(msgspec.Struct, frozen=True):
    """A segment, or one of its parts (``part`` is not empty), over the calls that have it."""

    segment: str
    part: str
    source: Source
    summary: Summary


class Group(msgspec.Struct, frozen=True):
    """The cold, or the warm, calls of a run that went well.

    Attributes:
        calls: how many.
        times: ``total``, ``first_byte``, ``first_chunk``, ``first_content``, from the call's start.
        rows: segments in the order of the waterfall, each followed by its parts.
    """

    calls: int
    times: Mapping[str, Summary]
    rows: Sequence[Row]

    def to_dict(self) -> dict[str, Any]:
        """Plain data: the times, and ``segments`` by name with their ``parts``."""
        data: dict[str, Any] = {"calls": self.calls}
        data.update((name, summary.to_dict()) for name, summary in self.times.items())
        segments: dict[str, Any] = {}
        for row in self.rows:
            values = {"source": row.source, **row.summary.to_dict()}
            if row.part:
                segments[row.segment].setdefault("parts", {})[row.part] = values
            else:
                segments[row.segment] = values
        data["segments"] = segments
        return data


class Tokens(msgspec.Struct, frozen=True):
    """Tokens of the calls that went well.

    Attributes:
        output: in all.
        source: ``usage``, ``chunks``, or ``mixed``.
        per_second: over the whole run, with everything that ran at once.
        per_second_in_call: the median speed of one streamed answer after its first content; None where unknown.
    """

    output: int
    source: Literal["usage", "chunks", "mixed"]
    per_second: float
    per_second_in_call: float | None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, without what is None."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}


class Report(msgspec.Struct, frozen=True):
    """All calls of a run.

    Attributes:
        ok: calls that went well; only these are in ``cold``, ``warm`` and ``tokens``.
        errors: how many calls failed, and the first message, by the error's class.
        cold, warm: None where there were none.
    """

    ok: int
    errors: Mapping[str, tuple[int, str]]
    cold: Group | None
    warm: Group | None
    tokens: Tokens | None

    @property
    def failed(self) -> int:
        """Calls that failed."""
        return sum(count for count, _ in self.errors.values())


def summarize(values: Iterable[float]) -> Summary:
    """The summary of at least one value, in any order."""
    ordered = sorted(values)
    n = len(ordered)
    return Summary(
        n=n,
        min_s=ordered[0],
        mean_s=min(max(sum(ordered) / n, ordered[0]), ordered[-1]),  # the sum's rounding must not leave the range
        p50_s=percentile(ordered, 50),
        p95_s=percentile(ordered, 95) if n >= P95_FROM else None,
        p99_s=percentile(ordered, 99) if n >= P99_FROM else None,
        max_s=ordered[-1],
    )


def report(outcomes: Iterable[Outcome], elapsed_s: float) -> Report:
    """Put a run together; ``elapsed_s`` is how long all of it took."""
    good: list[Outcome] = []
    errors: dict[str, tuple[int, str]] = {}
    for outcome in outcomes:
        if outcome.error_type is None:
            good.append(outcome)
        else:
            count, message = errors.get(outcome.error_type, (0, outcome.message or outcome.error_type))
            errors[outcome.error_type] = (count + 1, message)
    return Report(
        ok=len(good),
        errors=errors,
        cold=_group([outcome.timeline for outcome in good if outcome.timeline is not None and outcome.cold]),
        warm=_group([outcome.timeline for outcome in good if outcome.timeline is not None and not outcome.cold]),
        tokens=_tokens(good, elapsed_s),
    )


def _group(timelines: Sequence[Timeline]) -> Group | None:
    if not timelines:
        return None
    times: dict[str, Summary] = {}
    for name in ("total", "first_byte", "first_chunk", "first_content"):
        values = [value for value in (getattr(timeline, f"{name}_s") for timeline in timelines) if value is not None]
        if values:
            times[name] = summarize(values)
    return Group(len(timelines), times, list(_rows(timelines)))


def _rows(timelines: Sequence[Timeline]) -> Iterator[Row]:
    values: dict[tuple[str, str], list[float]] = {}
    sources: dict[tuple[str, str], Source] = {}

    def take(key: tuple[str, str], duration_s: float, source: Source) -> None:
        values.setdefault(key, []).append(duration_s)
        sources[key] = weakest_source(sources.get(key, source), source)

    for timeline in timelines:
        for name, segment in timeline.segments.items():
            take((name, ""), segment.duration_s, segment.source)
            for part, piece in segment.parts.items():
                take((name, part), piece.duration_s, piece.source)
    known = (*SEGMENTS, *dict.fromkeys(name for name, _ in values if name not in SEGMENTS))
    for name in known:
        for key in sorted((key for key in values if key[0] == name), key=lambda key: key[1] != ""):
            yield Row(*key, sources[key], summarize(values[key]))


def _tokens(good: Sequence[Outcome], elapsed_s: float) -> Tokens | None:
    counted = [outcome for outcome in good if outcome.tokens]
    if not counted or elapsed_s <= 0:
        return None
    sources = {outcome.counted_by for outcome in counted}
    speeds = [speed for speed in map(_speed, counted) if speed is not None]
    output = sum(outcome.tokens for outcome in counted)
    return Tokens(
        output=output,
        source=sources.pop() if len(sources) == 1 else "mixed",
        per_second=output / elapsed_s,
        per_second_in_call=percentile(sorted(speeds), 50) if speeds else None,
    )


#: An answer that comes within this time after its first content came at once, and has no speed of its own, in seconds.
_PACED_S = 0.01


def _speed(outcome: Outcome) -> float | None:
    model = outcome.timeline.segments.get("model") if outcome.timeline is not None else None
    decode = model.parts.get("decode") if model is not None else None
    if decode is None or decode.duration_s < _PACED_S or outcome.tokens < 2:
        return None
    return (outcome.tokens - 1) / decode.duration_s
