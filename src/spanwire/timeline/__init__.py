"""PURE: marks in, segments out. The only place with rules about segments.

Transports fill :class:`Marks`, the manager fills an :class:`AttemptRecord` for each attempt, and :class:`Timeline` turns
them into segments that add up:

    handshake + queue + model + network + client + unattributed = total

The rules, each of which has its own function or branch below:

* **queue**: ``local`` = waiting for a slot or for a connection that somebody else held (measured); ``backoff`` = waiting
  between two attempts (measured).
* **handshake**: ``dns``, ``tcp``, ``tls``, ... as the connection was made, clipped to the time this call waited for it
  (measured), up to the failure where it failed; ``shared`` = waiting for a connection that was being made before this
  call came. Absent on a re-used one.
* **client**: ``encode`` = making the request's bytes, with all that the client did before (settings, the span); ``decode`` = from the arrival of the last bytes to the parsed end;
  ``waiting`` = data that was there and waited for the consumer (all measured).
* **network**: ``send`` = handing the request to the kernel (measured); ``to_and_back`` = the window less what the server
  says it took (reported), else one minimum round trip (estimated: the kernel's ``tcpi_min_rtt``, else the TCP connect);
  ``receive`` = first to last byte of the body of an answer that is not streamed (estimated).
* **queue** ``server`` and **model** as the server reports them; else ``prefill`` = request sent to first content, less the
  network, and ``decode`` = first content to last chunk, less the time in which the consumer had stopped the stream (both
  estimated). Of an answer that is not streamed only the undivided wait for its body is known. See :mod:`.answer`.
* An estimate that comes out negative is dropped and its window stays ``unattributed``; so does every window in which
  nothing is known, and the tail of a call that did not complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import msgspec

from .answer import explain
from .attempts import add_up, attempt_pieces, is_answered
from .marks import AttemptRecord, CallRecord, ConnectionUse, Marks, Outcome, Reported
from .sources import SEGMENTS, Piece, Source, weakest_of, weakest_source

__all__ = [
    "SEGMENTS",
    "AttemptRecord",
    "CallRecord",
    "ConnectionUse",
    "Marks",
    "Outcome",
    "Part",
    "Reported",
    "Segment",
    "Source",
    "Timeline",
    "weakest_source",
]


class Part(msgspec.Struct, frozen=True):
    """A piece of a segment: seconds, and where the number is from."""

    duration_s: float
    source: Source


class Segment(msgspec.Struct, frozen=True):
    """One segment: seconds, the weakest source of its parts, and the parts by name (may be empty)."""

    duration_s: float
    source: Source
    parts: Mapping[str, Part] = {}

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        data: dict[str, Any] = {"duration_s": self.duration_s, "source": self.source}
        if self.parts:
            data["parts"] = {
                name: {"duration_s": part.duration_s, "source": part.source} for name, part in self.parts.items()
            }
        return data


def _segments(merged: Mapping[tuple[str, str], tuple[int, Source]]) -> dict[str, Segment]:
    segments: dict[str, Segment] = {}
    for name in SEGMENTS:
        rows = [(part, ns, source) for (segment, part), (ns, source) in merged.items() if segment == name]
        if rows:
            segments[name] = Segment(
                duration_s=sum(ns for _, ns, _ in rows) / 1e9,
                source=weakest_of([source for *_, source in rows]),
                parts={part: Part(ns / 1e9, source) for part, ns, source in rows if part},
            )
    return segments


def _server_timing(attempt: AttemptRecord) -> dict[str, Any] | None:
    reported = attempt.reported
    if reported is None:
        return None
    explained = explain(attempt, answered=is_answered(attempt))
    timing: dict[str, Any] = {"dialect": reported.server, "raw": dict(reported.raw)}
    if explained.refused:
        timing["refused"] = list(explained.refused)
    if explained.prefill_includes_queue:
        timing["prefill_includes_queue"] = True
    return timing


class Timeline:
    """Where the time of one call went. ``print(timeline)`` draws it; :meth:`to_dict` is the public, stable form.

    Attributes:
        outcome: ``completed``, ``closed_by_caller``, ``cancelled``, ``abandoned``, ``timeout`` or ``error``.
        operation, model, endpoint, transport: what the call was.
        streamed: its answer was asked for as a stream.
        usage: the tokens as the server counted them, None if it did not say.
    """

    def __init__(self, record: CallRecord) -> None:
        self._record = record
        self.outcome: Outcome = record.outcome
        self.operation = record.operation
        self.model = record.model
        self.endpoint = record.endpoint
        self.transport = record.transport
        self.streamed = record.streamed
        self.usage = record.usage

    @property
    def started_unix_s(self) -> float | None:
        """The wall clock at the call's start, in seconds since 1970: where the call stands among others."""
        return self._record.started_unix_ns / 1e9 if self._record.started_unix_ns else None

    @property
    def trace_id(self) -> str | None:
        """The trace that the call's span is in, as 32 hexadecimal digits."""
        return f"{self._record.trace_id:032x}" if self._record.trace_id else None

    @property
    def total_s(self) -> float:
        """The whole call in seconds, retries and their waits included."""
        return (self._record.end_ns - self._record.begin_ns) / 1e9

    def _since_begin(self, mark: str) -> float | None:
        if not self._record.attempts:
            return None
        at_ns = getattr(self._record.attempts[-1].marks, mark)
        return (at_ns - self._record.begin_ns) / 1e9 if at_ns else None

    @property
    def first_byte_s(self) -> float | None:
        """From the call's start to the first byte of the answer, in seconds."""
        return self._since_begin("first_byte_ns")

    @property
    def first_chunk_s(self) -> float | None:
        """From the call's start to the first data event, which may be an empty role chunk."""
        return self._since_begin("first_chunk_ns")

    @property
    def first_content_s(self) -> float | None:
        """From the call's start to the first text, reasoning or tool call; None if there was none."""
        return self._since_begin("first_content_ns")

    @property
    def last_chunk_s(self) -> float | None:
        """From the call's start to the last data event that arrived."""
        return self._since_begin("last_chunk_ns")

    @property
    def server_timing(self) -> dict[str, Any] | None:
        """What the server said of its own time in the last attempt, None if nothing.

        ``dialect`` names the schema, ``raw`` has every reading as it was sent, also those that no segment uses. ``refused``
        names what did not fit into its window and was left out. ``prefill_includes_queue`` is True where the server told
        only its time to the first token.
        """
        return _server_timing(self._record.attempts[-1]) if self._record.attempts else None

    @property
    def connection(self) -> ConnectionUse | None:
        """The connection of the last attempt, None if it had none."""
        return self._record.attempts[-1].connection if self._record.attempts else None

    @property
    def error_type(self) -> str | None:
        """Class of the error that ended the call."""
        return self._record.error_type

    @cached_property
    def pieces(self) -> Mapping[tuple[str, str], tuple[int, Source]]:
        """``(segment, part)`` to ``(ns, source)`` over all attempts; the part is ``""`` where it is undivided."""

        pieces: list[Piece] = []
        before_ns = 0
        for attempt in self._record.attempts:
            if before_ns:
                pieces.append(("queue", "backoff", attempt.begin_ns - before_ns, "measured"))
            pieces += attempt_pieces(attempt)
            before_ns = attempt.end_ns
        if self._record.attempts and self._record.attempts[-1].outcome in ("error", "timeout"):
            # It ended while it waited for another attempt; 0 if the last one's end was its own.
            pieces.append(("queue", "backoff", self._record.end_ns - before_ns, "measured"))
        return add_up(pieces, self._record.end_ns - self._record.begin_ns)

    @cached_property
    def segments(self) -> Mapping[str, Segment]:
        """The segments that took any time, by name. They add up to :attr:`total_s`."""
        return _segments(self.pieces)

    def to_dict(self) -> dict[str, Any]:
        """Plain data: seconds, unknown entries absent. The form is versioned by ``schema``."""
        data: dict[str, Any] = {"schema": 1, "outcome": self.outcome, "total_s": self.total_s}
        for name in ("started_unix_s", "first_byte_s", "first_chunk_s", "first_content_s", "last_chunk_s"):
            value = getattr(self, name)
            if value is not None:
                data[name] = value
        data["segments"] = {name: segment.to_dict() for name, segment in self.segments.items()}
        if self.connection is not None:
            data["connection"] = self.connection.to_dict()
        if self.server_timing is not None:
            data["server_timing"] = self.server_timing
        if self.usage is not None:
            counts = msgspec.structs.asdict(self.usage).items()
            data["usage"] = {name: count for name, count in counts if count is not None}
        data["attempts"] = [self._attempt(attempt) for attempt in self._record.attempts]
        data["endpoint"] = self.endpoint
        data["transport"] = self.transport
        data["operation"] = self.operation
        data["streamed"] = self.streamed
        data["model"] = self.model
        if self.trace_id is not None:
            data["trace_id"] = self.trace_id
        return data

    def _attempt(self, attempt: AttemptRecord) -> dict[str, Any]:
        data: dict[str, Any] = {"outcome": attempt.outcome}
        if attempt.error_type is not None:
            data["error_type"] = attempt.error_type
        if len(self._record.attempts) > 1:
            total_ns = attempt.end_ns - attempt.begin_ns
            data["begin_s"] = (attempt.begin_ns - self._record.begin_ns) / 1e9
            data["total_s"] = total_ns / 1e9
            merged = add_up(attempt_pieces(attempt), total_ns)
            data["segments"] = {name: segment.to_dict() for name, segment in _segments(merged).items()}
            if attempt.connection is not None:
                data["connection"] = attempt.connection.to_dict()
            timing = _server_timing(attempt)
            if timing is not None:
                data["server_timing"] = timing
        return data

    def __str__(self) -> str:
        from ..waterfall import draw  # only when somebody looks

        return draw(self)

    def __repr__(self) -> str:
        parts = ", ".join(f"{name}={segment.duration_s * 1e3:.1f}ms" for name, segment in self.segments.items())
        return f"Timeline({self.outcome}, total={self.total_s * 1e3:.1f}ms, {parts})"
