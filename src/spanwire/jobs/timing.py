"""PURE: the timeline of a job that has ended, out of its row. Two clocks are never subtracted: of the provider's time only
durations are used."""

from __future__ import annotations

from typing import NamedTuple

from ..timeline import AttemptRecord, CallRecord, Marks, Outcome, Reported, Timeline
from .contract import JobRow, Times

__all__ = ["Spent", "known_of", "spent", "timeline_of"]


class Spent(NamedTuple):
    """The provider's own time, in seconds; None = it did not say."""

    queue_s: float | None
    model_s: float | None
    total_s: float | None


def spent(times: Times) -> Spent:
    """Durations as the provider gave them, else as the differences of times by its one clock; what is negative is left out."""
    queue_s = times.queue_s if times.queue_s is not None else _between(times.accepted_s, times.started_s)
    model_s = times.model_s if times.model_s is not None else _between(times.started_s, times.finished_s)
    total_s = times.total_s if times.total_s is not None else _between(times.accepted_s, times.finished_s)
    if total_s is None and queue_s is not None and model_s is not None:
        total_s = queue_s + model_s
    return Spent(*(value if value is not None and value >= 0 else None for value in (queue_s, model_s, total_s)))


def known_of(row: JobRow) -> tuple[Spent, bool]:
    """What is known of the provider's time, and whether its queue is an estimate: from the acknowledgement to when the job
    was first seen at work, both by our clock, within what the provider says that all of it took."""
    told = spent(row.times)
    if told.queue_s is not None or not row.submitted_s or row.running_s <= row.submitted_s:
        return told, False
    whole_s = row.resolved_s - row.submitted_s if told.total_s is None else told.total_s
    queue_s = min(row.running_s - row.submitted_s, whole_s - (told.model_s or 0.0))
    return (told._replace(queue_s=queue_s), True) if queue_s > 0 else (told, False)


def timeline_of(row: JobRow, submit: AttemptRecord | None = None) -> Timeline:
    """From the row's writing to the result's arrival: submit, the provider's queue and model, and the way of the result.

    ``submit``: the submit's books, where it was made in this process: then its handshake is told too.
    """
    begin_ns, end_ns = _ns(row.created_s), _ns(max(row.resolved_s, row.created_s))
    submitted_ns = min(max(_ns(row.submitted_s), begin_ns), end_ns) if row.submitted_s else begin_ns
    record = CallRecord(
        begin_ns,
        operation=row.operation,
        model=row.model,
        endpoint=row.endpoint,
        transport=row.transport,
        started_unix_ns=begin_ns,
    )
    attempt = AttemptRecord(begin_ns, streamed=False)
    record.attempts.append(attempt)
    outcome: Outcome = {"succeeded": "completed", "cancelled": "cancelled", "expired": "timeout"}.get(
        row.state, "error"
    )  # type: ignore[assignment]
    record.outcome = attempt.outcome = outcome
    record.end_ns = attempt.end_ns = end_ns
    marks = attempt.marks
    if submit is None or not submit.marks.sent_ns:
        attempt.asked_ns = attempt.leased_ns = begin_ns
        attempt.served = "idle"
        marks.parts.append(("submit", begin_ns, submitted_ns))
        marks.sent_ns = submitted_ns
    else:
        _take_over(attempt, submit, submitted_ns - submit.end_ns)
    marks.first_byte_ns = marks.last_byte_ns = marks.ended_ns = end_ns
    if row.state == "succeeded":
        marks.first_chunk_ns = marks.last_chunk_ns = end_ns
    told, estimated = known_of(row)
    if any(value is not None for value in told):
        attempt.reported = Reported(
            server=row.dialect,
            queue_ns=_maybe_ns(told.queue_s),
            model_ns=_maybe_ns(told.model_s),
            total_ns=_maybe_ns(told.total_s),
            slack_ns=1_000_000,
            queue_estimated=estimated,
            raw={name: value for name, value in zip(Spent._fields, spent(row.times), strict=True) if value is not None},
        )
    parts = row.trace.get("traceparent", "").split("-")
    if len(parts) == 4 and len(parts[1]) == 32:
        record.trace_id = int(parts[1], 16)
    return Timeline(record)


def _take_over(attempt: AttemptRecord, submit: AttemptRecord, shift_ns: int) -> None:
    """The submit's marks, on the row's clock. What its books are made of are intervals, and they stay what they were."""
    for name in (
        "queued_ns",
        "slot_ns",
        "asked_ns",
        "dial_asked_ns",
        "leased_ns",
        "connect_begin_ns",
        "connect_end_ns",
    ):
        at_ns = getattr(submit, name)
        setattr(attempt, name, max(attempt.begin_ns, at_ns + shift_ns) if at_ns else 0)
    attempt.served, attempt.connection = submit.served, submit.connection
    attempt.connect = None if submit.connect is None else _shifted(submit.connect, shift_ns)
    attempt.marks.parts.extend(_shifted(submit.marks, shift_ns).parts)
    attempt.marks.sent_ns = submit.marks.sent_ns + shift_ns


def _shifted(marks: Marks, shift_ns: int) -> Marks:
    moved = Marks()
    moved.parts = [(part, begin_ns + shift_ns, end_ns + shift_ns) for part, begin_ns, end_ns in marks.parts]
    return moved


def _between(begin_s: float | None, end_s: float | None) -> float | None:
    return None if begin_s is None or end_s is None else end_s - begin_s


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def _maybe_ns(seconds: float | None) -> int | None:
    return None if seconds is None else _ns(seconds)
