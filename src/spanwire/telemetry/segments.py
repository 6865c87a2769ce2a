"""A call's segments as spans: children of its span, or of its attempts' if it was tried more than once."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, set_span_in_context

from ..timeline import AttemptRecord, CallRecord, Source, Timeline
from .attributes import Value
from .placement import Placed, place

__all__ = ["draw_attempts", "draw_segments"]

_BACKOFF = ("queue", "backoff")
_Pieces = Mapping[tuple[str, str], tuple[int, Source]]


def draw_segments(tracer: Tracer, context: Context, anchor_ns: int, record: CallRecord, pieces: _Pieces) -> None:
    """``pieces`` of a call that was tried once."""
    for attempt in record.attempts[:1]:
        if _BACKOFF in pieces:  # it ended while it waited for another attempt: that is behind this one
            pieces = {key: piece for key, piece in pieces.items() if key != _BACKOFF}
            _between(tracer, context, anchor_ns, attempt.end_ns, record.end_ns)
        _draw(tracer, context, anchor_ns, attempt, pieces)


def draw_attempts(tracer: Tracer, context: Context, anchor_ns: int, record: CallRecord, *, detailed: bool) -> None:
    """A ``spanwire.attempt`` for each try; with its segments below it, and the waits between, if that is wanted."""
    before_ns = 0
    for number, attempt in enumerate(record.attempts, 1):
        if before_ns and detailed:
            _between(tracer, context, anchor_ns, before_ns, attempt.begin_ns)
        before_ns = attempt.end_ns
        span = tracer.start_span(
            "spanwire.attempt",
            context,
            SpanKind.CLIENT,
            {"spanwire.attempt.number": number, "spanwire.outcome": attempt.outcome},
            start_time=anchor_ns + attempt.begin_ns,
        )
        if attempt.error_type is not None:
            span.set_attribute("error.type", attempt.error_type)
            span.set_status(Status(StatusCode.ERROR))
        if detailed and span.is_recording():
            _draw(tracer, set_span_in_context(span, context), anchor_ns, attempt, _pieces_of(record, attempt))
        span.end(anchor_ns + attempt.end_ns)
    if detailed and record.end_ns > before_ns:  # it ended while it waited for another attempt
        _between(tracer, context, anchor_ns, before_ns, record.end_ns)


def _pieces_of(record: CallRecord, attempt: AttemptRecord) -> _Pieces:
    """As if the call had been this attempt alone."""
    alone = CallRecord(
        attempt.begin_ns,
        operation=record.operation,
        model=record.model,
        endpoint=record.endpoint,
        transport=record.transport,
    )
    alone.end_ns = attempt.end_ns
    alone.attempts = [attempt]
    alone.outcome = attempt.outcome
    return Timeline(alone).pieces


def _between(tracer: Tracer, context: Context, anchor_ns: int, begin_ns: int, end_ns: int) -> None:
    if end_ns > begin_ns:
        _child(tracer, context, anchor_ns, Placed("queue", "backoff", begin_ns, end_ns, "measured", "clock"))


def _draw(tracer: Tracer, context: Context, anchor_ns: int, attempt: AttemptRecord, pieces: _Pieces) -> None:
    # The handshake that this call waited for from its begin is a span already, `spanwire.connection_setup`.
    drawn = attempt.served == "dialled"
    for placed in place(attempt, pieces):
        if not (drawn and placed.segment == "handshake"):
            _child(tracer, context, anchor_ns, placed)


def _child(tracer: Tracer, context: Context, anchor_ns: int, placed: Placed) -> None:
    segment, part, begin_ns, end_ns, source, how = placed
    name, attributes = segment_labels(segment, part, source, how)
    tracer.start_span(name, context, SpanKind.INTERNAL, attributes, None, anchor_ns + begin_ns).end(anchor_ns + end_ns)


@lru_cache(maxsize=256)
def segment_labels(segment: str, part: str, source: str, placed: str) -> tuple[str, dict[str, Value]]:
    """Name and attributes of a segment's span. Not to be changed: they are shared."""
    attributes: dict[str, Any] = {
        "spanwire.segment": segment,
        "spanwire.segment.part": part,
        "spanwire.segment.source": source,
        "spanwire.segment.placed": placed,
    }
    if not part:
        del attributes["spanwire.segment.part"]
    return f"{segment} {part}".rstrip(), attributes
