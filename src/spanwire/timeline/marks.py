"""PURE: what was seen of a call, in ns of ``time.perf_counter_ns`` (monotonic; 0 = did not happen).

Transports fill :class:`Marks`, the manager fills an :class:`AttemptRecord` for each attempt and a :class:`CallRecord` for
the call, and what the server has said of its own time is in :class:`Reported`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    from ..calls import Usage

__all__ = ["AttemptRecord", "CallRecord", "ConnectionUse", "Marks", "Outcome", "Reported", "Served"]

Outcome = Literal["completed", "closed_by_caller", "cancelled", "abandoned", "timeout", "error"]
Served = Literal["", "idle", "dialled", "rode", "freed"]


class Marks:
    """What a transport saw, in ns of ``time.perf_counter_ns``. One for a connect, one for each exchange.

    Attributes:
        parts: closed intervals ``(part, begin_ns, end_ns)``: ``dns``, ``tcp``, ``tls``, ``proxy``, ``upgrade``,
            ``connect`` and ``admission`` (the server was full and let the handshake wait: that is its queue, and
            estimated) on a connect; ``encode`` and ``send`` on an exchange. An exchange over a client that pools by
            itself has those of the connect too, and ``local`` for its wait in that pool.
        sent_ns: the request is in the kernel's buffer.
        started_ns: arrival of the server's word that it has begun to work on the request, where its schema has one.
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
        "started_ns",
        "use",
    )

    def __init__(self) -> None:
        self.parts: list[tuple[str, int, int]] = []
        self._open: dict[str, int] | None = None
        self.sent_ns = 0
        self.started_ns = 0
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

    def copy(self) -> Marks:
        """As they stand now: whoever fills them may go on after the call has ended."""
        copy = Marks()
        for name in Marks.__slots__:
            setattr(copy, name, getattr(self, name))
        copy.parts = [*self.parts]
        copy._open = dict(self._open) if self._open else None
        return copy

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


class Reported(msgspec.Struct, frozen=True, kw_only=True):
    """What a server has said of its own time, one value for each question. Durations in ns; None = not said.

    Attributes:
        server: whose schema it was, such as ``vllm``.
        queue_ns, prefill_ns, decode_ns: the parts.
        model_ns: prefill and decode, undivided.
        ttft_ns: from the request's arrival to the first token, the queue included.
        total_ns: from the request's arrival to the answer's end; with ``total_to_headers`` to its headers, of an answer
            that was made before they were sent.
        outer_ns: an outer bound of the server's time: what a gateway in front of it measured, or what the headers of a
            stream say, which are written before the first token. With ``outer_to_headers`` to the headers.
        slack_ns: how much the values may be off, since they were cut to whole units.
        queue_estimated: the queue is what we saw from outside, not what the server has said.
        raw: every reading as it was sent, by header or path, also those that no segment uses.
    """

    server: str
    queue_ns: int | None = None
    prefill_ns: int | None = None
    decode_ns: int | None = None
    model_ns: int | None = None
    ttft_ns: int | None = None
    total_ns: int | None = None
    total_to_headers: bool = False
    outer_ns: int | None = None
    outer_to_headers: bool = True
    slack_ns: int = 0
    queue_estimated: bool = False
    raw: Mapping[str, Any] = {}


class ConnectionUse(msgspec.Struct, frozen=True, omit_defaults=True):
    """The connection that carried an attempt. Durations in seconds; None = unknown.

    ``engine`` is what moved the bytes: ``spanwire``, or the name of the library that did. ``rtt_scope`` is ``edge`` where
    the answer shows that something in between ended the connection (a CDN, a gateway): the round trip is the one to there.
    """

    id: str
    reused: bool
    age_s: float | None = None
    idle_s: float | None = None
    protocol: str | None = None
    rtt_min_s: float | None = None
    engine: str | None = None
    rtt_scope: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, unknown entries absent."""
        return {"id": self.id, "reused": self.reused} | {
            name: value
            for name, value in (
                ("age_s", self.age_s),
                ("idle_s", self.idle_s),
                ("protocol", self.protocol),
                ("rtt_min_s", self.rtt_min_s),
                ("rtt_scope", self.rtt_scope),
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
        streamed: the answer was a stream; until one has come, it was asked for as one.
        outcome: as of the call; ``error_type`` the class of the error.
        connection: facts about the connection, once there was one.
        reported: what the server has said of its own time, None if nothing.
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
        "reported",
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
        self.reported: Reported | None = None


class CallRecord:
    """All attempts of one call, and what it was about.

    Attributes:
        started_unix_ns: the wall clock at ``begin_ns``: an anchor, nothing is subtracted from it. 0 = not read.
        trace_id: of the call's span, 0 for none.
        usage: the tokens as the server counted them, None if it did not say.
    """

    __slots__ = (
        "attempts",
        "begin_ns",
        "end_ns",
        "endpoint",
        "error_type",
        "model",
        "operation",
        "outcome",
        "started_unix_ns",
        "streamed",
        "trace_id",
        "transport",
        "usage",
    )

    def __init__(
        self,
        begin_ns: int,
        *,
        operation: str,
        model: str,
        endpoint: str,
        transport: str,
        streamed: bool = False,
        started_unix_ns: int = 0,
    ) -> None:
        self.begin_ns = begin_ns
        self.started_unix_ns = started_unix_ns
        self.streamed = streamed
        self.trace_id = 0
        self.usage: Usage | None = None
        self.end_ns = 0
        self.attempts: list[AttemptRecord] = []
        self.outcome: Outcome = "completed"
        self.error_type: str | None = None
        self.operation = operation
        self.model = model
        self.endpoint = endpoint
        self.transport = transport
