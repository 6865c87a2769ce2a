"""PURE: marks in, segments out. The only place with rules about segments.

Times are nanoseconds of ``time.perf_counter_ns`` (monotonic; 0 = did not happen). Transports fill :class:`Marks`, the
manager fills an :class:`AttemptRecord` for each attempt, and :class:`Timeline` turns them into segments that add up:

    handshake + queue + model + network + client + unattributed = total

The rules, each of which has its own function or branch below:

* **queue**: ``local`` = waiting for a slot or for a connection that somebody else held (measured); ``backoff`` = waiting
  between two attempts (measured).
* **handshake**: ``dns``, ``tcp``, ``tls``, ... as the connection was made, clipped to the time this call waited for it
  (measured), up to the failure where it failed; ``shared`` = waiting for a connection that was being made before this
  call came. Absent on a re-used one.
* **client**: ``encode`` = making the request's bytes, with all that the client did before (settings, the span); ``decode`` = from the arrival of the last bytes to the parsed end;
  ``waiting`` = data that was there and waited for the consumer (all measured).
* **network**: ``send`` = handing the request to the kernel (measured); ``to_and_back`` = one minimum round trip
  (estimated: the kernel's ``tcpi_min_rtt``, else the TCP connect); ``receive`` = first to last byte of the body of an
  answer that is not streamed (estimated).
* **model**: ``prefill`` = request sent to first content, less one round trip; ``decode`` = first content to last chunk,
  less the time in which the consumer had stopped the stream (both estimated). Of an answer that is not streamed only
  the undivided wait for its body is known.
* An estimate that comes out negative is dropped and its window stays ``unattributed``; so does every window in which
  nothing is known, and the tail of a call that did not complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, Literal

import msgspec

__all__ = [
    "SEGMENTS",
    "AttemptRecord",
    "CallRecord",
    "ConnectionUse",
    "Marks",
    "Outcome",
    "Part",
    "Segment",
    "Timeline",
    "weakest_source",
]

Source = Literal["measured", "reported", "estimated"]
Outcome = Literal["completed", "closed_by_caller", "cancelled", "abandoned", "timeout", "error"]
Served = Literal["", "idle", "dialled", "rode", "freed"]

#: Segments in the order in which they are shown.
SEGMENTS = ("queue", "handshake", "client", "network", "model", "unattributed")
_WEAKNESS: dict[str, int] = {"measured": 0, "reported": 1, "estimated": 2}
_BY_WEAKNESS: tuple[Source, ...] = ("measured", "reported", "estimated")

#: segment, part ("" = undivided), duration in ns, source
_Piece = tuple[str, str, int, Source]


class Marks:
    """What a transport saw, in ns of ``time.perf_counter_ns``. One for a connect, one for each exchange.

    Attributes:
        parts: closed intervals ``(part, begin_ns, end_ns)``: ``dns``, ``tcp``, ``tls``, ``proxy``, ``upgrade`` and
            ``connect`` on a connect; ``encode`` and ``send`` on an exchange. An exchange over a client that pools by
            itself has those of the connect too, and ``local`` for its wait in that pool.
        sent_ns: the request is in the kernel's buffer.
        first_byte_ns: arrival of the answer's first byte.
        first_chunk_ns: arrival of the first data event; of an answer that is not streamed, of its body's first byte.
        first_content_ns: arrival of the first text, reasoning or tool call.
        last_chunk_ns: arrival of the last data event.
        last_byte_ns: arrival of the last bytes of the answer up to its terminal event.
        ended_ns: the terminal event, or the whole unary answer, was parsed.
        paused_ns: time in which the consumer's slowness had stopped the stream, in all.
        resumed_ns: when a stream that was stopped so was last let go on.
        rtt_ns: minimum round trip to the peer, None if unknown or if a proxy stands between.
        use: the connection as the exchange saw it, where it knows better than the pool (a client that pools by itself).
    """

    __slots__ = (
        "_open",
        "ended_ns",
        "first_byte_ns",
        "first_chunk_ns",
        "first_content_ns",
        "last_byte_ns",
        "last_chunk_ns",
        "parts",
        "paused_ns",
        "resumed_ns",
        "rtt_ns",
        "sent_ns",
        "use",
    )

    def __init__(self) -> None:
        self.parts: list[tuple[str, int, int]] = []
        self._open: dict[str, int] | None = None
        self.sent_ns = 0
        self.first_byte_ns = 0
        self.first_chunk_ns = 0
        self.first_content_ns = 0
        self.last_chunk_ns = 0
        self.last_byte_ns = 0
        self.ended_ns = 0
        self.paused_ns = 0
        self.resumed_ns = 0
        self.rtt_ns: int | None = None
        self.use: ConnectionUse | None = None

    def begin(self, part: str, at_ns: int) -> None:
        """Open an interval. Opening one that is open starts it anew."""
        if self._open is None:
            self._open = {}
        self._open[part] = at_ns

    def end(self, part: str, at_ns: int) -> None:
        """Close an interval; one that is not open is ignored."""
        begin_ns = self._open.pop(part, None) if self._open else None
        if begin_ns is not None:
            self.parts.append((part, begin_ns, max(at_ns, begin_ns)))

    @property
    def open_part(self) -> str | None:
        """The part that was begun last and not ended: where a failed connect stood."""
        return next(reversed(self._open), None) if self._open else None

    def begun_ns(self, part: str) -> int:
        """When a part that is still open was begun, 0 if it is not open."""
        return self._open.get(part, 0) if self._open else 0

    def duration_ns(self, part: str) -> int | None:
        """The closed interval of that name, or None."""
        return next((end - begin for name, begin, end in self.parts if name == part), None)


class ConnectionUse(msgspec.Struct, frozen=True, omit_defaults=True):
    """The connection that carried an attempt. Durations in seconds; None = unknown.

    ``engine`` is what moved the bytes: ``spanwire``, or the name of the library that did.
    """

    id: str
    reused: bool
    age_s: float | None = None
    idle_s: float | None = None
    protocol: str | None = None
    rtt_min_s: float | None = None
    engine: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, unknown entries absent."""
        return {"id": self.id, "reused": self.reused} | {
            name: value
            for name, value in (
                ("age_s", self.age_s),
                ("idle_s", self.idle_s),
                ("protocol", self.protocol),
                ("rtt_min_s", self.rtt_min_s),
                ("engine", self.engine),
            )
            if value is not None
        }


class AttemptRecord:
    """One try of a call, as the manager saw it. Times in ns; 0 = did not get that far.

    Attributes:
        begin_ns, end_ns: the attempt's own window.
        queued_ns, slot_ns: it began to wait for a slot of the local limits, and was granted one; 0 if it never waited.
        asked_ns, leased_ns: a connection was asked for, and was there.
        dial_asked_ns: it had waited for one that was finishing, until then; 0 if it had not.
        served: how: ``idle`` (was ready), ``dialled`` (made for this call), ``rode`` (was being made already),
            ``freed`` (somebody else gave it back).
        connect: marks of the connect that this attempt waited for, else None.
        connect_begin_ns, connect_end_ns: that connect as a whole.
        marks: marks of the exchange.
        streamed: the answer was asked for as a stream.
        outcome: as of the call; ``error_type`` the class of the error.
        connection: facts about the connection, once there was one.
    """

    __slots__ = (
        "asked_ns",
        "begin_ns",
        "connect",
        "connect_begin_ns",
        "connect_end_ns",
        "connection",
        "dial_asked_ns",
        "end_ns",
        "error_type",
        "leased_ns",
        "marks",
        "outcome",
        "queued_ns",
        "served",
        "slot_ns",
        "streamed",
    )

    def __init__(self, begin_ns: int, *, streamed: bool) -> None:
        self.begin_ns = begin_ns
        self.queued_ns = 0
        self.slot_ns = 0
        self.asked_ns = 0
        self.dial_asked_ns = 0
        self.leased_ns = 0
        self.served: Served = ""
        self.connect: Marks | None = None
        self.connect_begin_ns = 0
        self.connect_end_ns = 0
        self.marks = Marks()
        self.streamed = streamed
        self.end_ns = 0
        self.outcome: Outcome = "completed"
        self.error_type: str | None = None
        self.connection: ConnectionUse | None = None


class CallRecord:
    """All attempts of one call, and what it was about."""

    __slots__ = (
        "attempts",
        "begin_ns",
        "end_ns",
        "endpoint",
        "error_type",
        "model",
        "operation",
        "outcome",
        "transport",
    )

    def __init__(self, begin_ns: int, *, operation: str, model: str, endpoint: str, transport: str) -> None:
        self.begin_ns = begin_ns
        self.end_ns = 0
        self.attempts: list[AttemptRecord] = []
        self.outcome: Outcome = "completed"
        self.error_type: str | None = None
        self.operation = operation
        self.model = model
        self.endpoint = endpoint
        self.transport = transport


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


#: Which segment the parts belong to that transports mark; what is not here was found by the network.
_SEGMENT_OF = {
    "encode": "client",
    "local": "queue",
    "dns": "handshake",
    "tcp": "handshake",
    "tls": "handshake",
    "proxy": "handshake",
    "upgrade": "handshake",
    "connect": "handshake",
    "shared": "handshake",
}


def _clip(begin: int, end: int, low: int, high: int) -> int:
    return max(0, min(end, high) - max(begin, low))


def _add_connection(pieces: list[_Piece], attempt: AttemptRecord) -> None:
    """The wait for a slot and for a connection."""
    end_ns = attempt.end_ns
    if attempt.queued_ns:
        pieces.append(("queue", "local", (attempt.slot_ns or end_ns) - attempt.queued_ns, "measured"))
    if not attempt.asked_ns or attempt.served == "idle":
        return
    low, high = attempt.asked_ns, attempt.leased_ns or end_ns
    if attempt.served == "freed":
        pieces.append(("queue", "local", high - low, "measured"))
        return
    if attempt.dial_asked_ns:
        pieces.append(("queue", "local", attempt.dial_asked_ns - low, "measured"))
        low = attempt.dial_asked_ns
    if attempt.served == "rode":
        shared = _clip(attempt.connect_begin_ns, attempt.connect_end_ns or end_ns, low, high)
        pieces.append(("handshake", "shared", shared, "measured"))
    elif attempt.connect is not None:
        for part, begin, end in attempt.connect.parts:
            pieces.append(("handshake", part, _clip(begin, end, low, high), "measured"))
        open_part = attempt.connect.open_part
        if open_part is not None:  # where it failed, or was given up
            begin = attempt.connect.begun_ns(open_part)
            pieces.append(("handshake", open_part, _clip(begin, attempt.connect_end_ns or high, low, high), "measured"))


def _add_preparation(pieces: list[_Piece], attempt: AttemptRecord) -> None:
    """What the client did before the request's bytes were made: settings, span, books."""
    if attempt.asked_ns and not attempt.queued_ns:
        pieces.append(("client", "encode", attempt.asked_ns - attempt.begin_ns, "measured"))
    parts = attempt.marks.parts
    if attempt.leased_ns and parts and parts[0][0] == "encode":
        pieces.append(("client", "encode", parts[0][1] - attempt.leased_ns, "measured"))


def _add_answer(pieces: list[_Piece], marks: Marks, end_ns: int, *, streamed: bool, answered: bool) -> None:
    """From the request's bytes to the end of the answer. ``answered``: it was an answer, not an error status."""
    for part, begin, end in marks.parts:
        pieces.append((_SEGMENT_OF.get(part, "network"), part, end - begin, "measured"))
    open_part = marks.open_part
    if open_part is not None:  # such as an upload that was given up
        pieces.append(
            (_SEGMENT_OF.get(open_part, "network"), open_part, end_ns - marks.begun_ns(open_part), "measured")
        )
    if not marks.sent_ns or not marks.first_byte_ns:
        return
    # How long the server's work may have lasted: to the first content, to the body, or, of an error, to its first byte.
    until_ns = marks.first_byte_ns
    if answered:
        until_ns = (marks.first_content_ns or marks.last_chunk_ns) if streamed else (marks.first_chunk_ns or until_ns)
    wait_ns = max(until_ns, marks.first_byte_ns) - marks.sent_ns
    rtt_ns = marks.rtt_ns
    rtt_fits = rtt_ns is not None and rtt_ns <= wait_ns
    if rtt_fits:
        pieces.append(("network", "to_and_back", rtt_ns or 0, "estimated"))
    if not answered:
        return
    if rtt_fits and until_ns:
        pieces.append(("model", "prefill" if streamed else "", until_ns - marks.sent_ns - (rtt_ns or 0), "estimated"))
    if not streamed:
        pieces.append(("network", "receive", marks.last_byte_ns - until_ns, "estimated"))
    elif marks.first_content_ns:
        decode_ns = marks.last_chunk_ns - marks.first_content_ns - marks.paused_ns
        pieces.append(("model", "decode", decode_ns, "estimated"))
    pieces.append(("client", "waiting", marks.paused_ns, "measured"))
    if marks.ended_ns:
        pieces.append(("client", "decode", marks.ended_ns - marks.last_byte_ns, "measured"))
        pieces.append(("client", "waiting", end_ns - marks.ended_ns, "measured"))


def _add_attempt(pieces: list[_Piece], attempt: AttemptRecord) -> None:
    _add_preparation(pieces, attempt)
    _add_connection(pieces, attempt)
    answered = attempt.outcome != "error" or bool(attempt.marks.first_chunk_ns)
    _add_answer(pieces, attempt.marks, attempt.end_ns, streamed=attempt.streamed, answered=answered)


def _add_up(pieces: Iterable[_Piece], total_ns: int) -> dict[tuple[str, str], tuple[int, Source]]:
    """Merge equal parts, drop what is 0 or negative, and make the rest of the total ``unattributed``.

    Windows of one attempt do not overlap by construction. Should a clock or a plugin's marks be wrong all the same, so
    that the pieces exceed the total, estimates are dropped, the largest first, until the sum fits.
    """
    merged: dict[tuple[str, str], tuple[int, Source]] = {}
    known = 0
    for segment, part, duration_ns, source in pieces:
        if duration_ns <= 0:
            continue
        key = (segment, part)
        before = merged.get(key)
        if before is None:
            merged[key] = (duration_ns, source)
        else:
            merged[key] = (before[0] + duration_ns, weakest_source(source, before[1]))
        known += duration_ns
    while known > total_ns and merged:
        worst = max(merged, key=lambda key: (_WEAKNESS[merged[key][1]], merged[key][0]))
        known -= merged.pop(worst)[0]
    if total_ns > known:
        merged["unattributed", ""] = (total_ns - known, "measured")
    return merged


def weakest_source(first: Source, second: Source) -> Source:
    """The source of a sum: estimated is weaker than reported, reported than measured."""
    return first if _WEAKNESS[first] >= _WEAKNESS[second] else second


def _segments(merged: Mapping[tuple[str, str], tuple[int, Source]]) -> dict[str, Segment]:
    segments: dict[str, Segment] = {}
    for name in SEGMENTS:
        rows = [(part, ns, source) for (segment, part), (ns, source) in merged.items() if segment == name]
        if rows:
            segments[name] = Segment(
                duration_s=sum(ns for _, ns, _ in rows) / 1e9,
                source=_BY_WEAKNESS[max(_WEAKNESS[source] for *_, source in rows)],
                parts={part: Part(ns / 1e9, source) for part, ns, source in rows if part},
            )
    return segments


class Timeline:
    """Where the time of one call went. ``print(timeline)`` draws it; :meth:`to_dict` is the public, stable form.

    Attributes:
        outcome: ``completed``, ``closed_by_caller``, ``cancelled``, ``abandoned``, ``timeout`` or ``error``.
        operation, model, endpoint, transport: what the call was.
    """

    def __init__(self, record: CallRecord) -> None:
        self._record = record
        self.outcome: Outcome = record.outcome
        self.operation = record.operation
        self.model = record.model
        self.endpoint = record.endpoint
        self.transport = record.transport

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

        pieces: list[_Piece] = []
        before_ns = 0
        for attempt in self._record.attempts:
            if before_ns:
                pieces.append(("queue", "backoff", attempt.begin_ns - before_ns, "measured"))
            _add_attempt(pieces, attempt)
            before_ns = attempt.end_ns
        if self._record.attempts and self._record.attempts[-1].outcome in ("error", "timeout"):
            # It ended while it waited for another attempt; 0 if the last one's end was its own.
            pieces.append(("queue", "backoff", self._record.end_ns - before_ns, "measured"))
        return _add_up(pieces, self._record.end_ns - self._record.begin_ns)

    @cached_property
    def segments(self) -> Mapping[str, Segment]:
        """The segments that took any time, by name. They add up to :attr:`total_s`."""
        return _segments(self.pieces)

    def to_dict(self) -> dict[str, Any]:
        """Plain data: seconds, unknown entries absent. The form is versioned by ``schema``."""
        data: dict[str, Any] = {"schema": 1, "outcome": self.outcome, "total_s": self.total_s}
        for name in ("first_byte_s", "first_chunk_s", "first_content_s"):
            value = getattr(self, name)
            if value is not None:
                data[name] = value
        data["segments"] = {name: segment.to_dict() for name, segment in self.segments.items()}
        if self.connection is not None:
            data["connection"] = self.connection.to_dict()
        data["attempts"] = [self._attempt(attempt) for attempt in self._record.attempts]
        data["endpoint"] = self.endpoint
        data["transport"] = self.transport
        data["operation"] = self.operation
        data["model"] = self.model
        return data

    def _attempt(self, attempt: AttemptRecord) -> dict[str, Any]:
        data: dict[str, Any] = {"outcome": attempt.outcome}
        if attempt.error_type is not None:
            data["error_type"] = attempt.error_type
        if len(self._record.attempts) > 1:
            total_ns = attempt.end_ns - attempt.begin_ns
            data["begin_s"] = (attempt.begin_ns - self._record.begin_ns) / 1e9
            data["total_s"] = total_ns / 1e9
            pieces: list[_Piece] = []
            _add_attempt(pieces, attempt)
            merged = _add_up(pieces, total_ns)
            data["segments"] = {name: segment.to_dict() for name, segment in _segments(merged).items()}
            if attempt.connection is not None:
                data["connection"] = attempt.connection.to_dict()
        return data

    def __str__(self) -> str:
        from .waterfall import draw  # only when somebody looks

        return draw(self)

    def __repr__(self) -> str:
        parts = ", ".join(f"{name}={segment.duration_s * 1e3:.1f}ms" for name, segment in self.segments.items())
        return f"Timeline({self.outcome}, total={self.total_s * 1e3:.1f}ms, {parts})"
