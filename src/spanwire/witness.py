"""The books of one call that another client makes: marks, span, timing and observers, as for a call of our own.

A :class:`Witness` watches. It never holds or alters what it sees, never raises into the caller, and needs no event loop:
synchronous clients use it in threads, and one call may be handed from thread to thread. Whatever happens, its end is
recorded once::

    witness = Witness.begin(endpoint, operation="chat", model="m", streamed=True)
    headers = witness.headers(present)  # traceparent and the like, where the request has none
    with witness.current():  # spans made inside are children of the call's: one await, or none
        ...  # send; marks of the connect and the request: witness.marks
    witness.head(status, headers, at_ns)
    witness.feed(data, at_ns)  # each piece of the body, as it came over the wire
    witness.end("completed")  # or closed_by_caller, cancelled, timeout, error

**Abandoned calls.** Whoever hands a stream to a user calls :meth:`Witness.abandon` in the finalizer of that handle, which
the witness must not know. It only leaves a note, since a finalizer may run anywhere, inside of a lock too; the note is read
by the event loop on which the call began, else when the next call begins or ends, and at the latest at the process's exit.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Container, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

from msgspec import UNSET, UnsetType
from opentelemetry import context as otel_context

from .closing import end_at_last_activity, hear_timing, with_rtt
from .endpoint import Endpoint
from .errors import server_error
from .plugins import Registry, plugin_entry_points
from .telemetry import CallSpan, Telemetry
from .timeline import AttemptRecord, CallRecord, Marks, Outcome, Timeline
from .transport import Head
from .wire.along import Along

__all__ = ["PAUSE_NS", "TRACE_HEADERS", "Witness", "prepare", "watching"]

_log = logging.getLogger("spanwire.witness")

#: A read that took less had its data there already, in ns: some parsing, and no wait. Measured: h11 takes 100 to 250 us.
_WAS_THERE_NS = 300_000
#: Only pauses of the consumer above this are counted as its own, in ns.
PAUSE_NS = 1_000_000
_NO_HEADERS: Mapping[str, str] = {}
#: Headers that say which trace a request belongs to: W3C, and what other propagators of OpenTelemetry write.
TRACE_HEADERS = frozenset({"traceparent", "b3", "x-b3-traceid", "uber-trace-id", "x-amzn-trace-id"})


#: The call whose request is being sent in this context: who watches the libraries below must not count it again.
watching: ContextVar[Witness | None] = ContextVar("spanwire_watching", default=None)


def prepare() -> None:
    """Load what :meth:`Witness.begin` needs: tens of milliseconds that the process's first call would wait for.

    Modules and the packages' metadata only: nothing is made, and no setting is read.
    """
    from opentelemetry import metrics, propagate  # noqa: F401 - these imports are what it is for

    from .telemetry import content, detail, instruments, outer, segments  # noqa: F401
    from .timing import Readers  # noqa: F401

    plugin_entry_points()


class _Asked(NamedTuple):
    operation: str
    model: str
    body: Mapping[str, Any]
    provider: str = ""


class Witness:
    """One call of another client. Made by :meth:`begin`.

    Attributes:
        marks: fill in what the client does, when it does it: see :class:`~spanwire.timeline.Marks`. ``marks.use`` is the
            connection.
        attempt: the record of the one attempt, for a client whose waits for a connection are known from outside.
        call_span: None without telemetry.
        along: what was read along; None before :meth:`head`.
        ended: its end was recorded.
        waited_ns: between being handed a piece and asking for the next one, in all: what the consumer took for itself,
            while the answer came or not.
    """

    __slots__ = (
        "_asked",
        "_endpoint",
        "_fed_ns",
        "_generation",
        "_head",
        "_lock",
        "_loop",
        "_record",
        "_registry",
        "_telemetry",
        "_timeline",
        "along",
        "attempt",
        "call_span",
        "ended",
        "marks",
        "waited_ns",
    )

    def __init__(
        self,
        endpoint: Endpoint,
        asked: _Asked,
        *,
        streamed: bool,
        transport: str,
        telemetry: Telemetry | None,
        registry: Registry | None,
        begin_ns: int,
    ) -> None:
        self._endpoint = endpoint
        self._asked = asked
        self._telemetry = telemetry
        self._registry = registry
        self.call_span: CallSpan | None = None
        self._timeline: Timeline | None = None
        self._lock = threading.Lock()
        self._generation = _generation
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fed_ns = 0
        self._head = Head()
        self._record = CallRecord(
            begin_ns,
            operation=asked.operation,
            model=asked.model,
            endpoint=endpoint.address,
            transport=transport,
            streamed=streamed,
            started_unix_ns=time.time_ns() - (time.perf_counter_ns() - begin_ns),
        )
        attempt = self.attempt = AttemptRecord(begin_ns, streamed=streamed)
        # The client has a pool of its own, whose waits are on the exchange's marks.
        attempt.served = "idle"
        self._record.attempts.append(attempt)
        self.marks: Marks = attempt.marks
        self.along: Along | None = None
        self.ended = False
        self.waited_ns = 0

    @classmethod
    def begin(
        cls,
        endpoint: Endpoint,
        *,
        operation: str,
        model: str,
        streamed: bool,
        body_params: Mapping[str, Any] | None = None,
        transport: str = "http",
        telemetry: Telemetry | UnsetType | None = UNSET,
        registry: Registry | None = None,
        request_headers: Mapping[str, str] | None = None,
        begin_ns: int = 0,
        provider: str = "",
    ) -> Witness:
        """The client begins a call. Never raises.

        Args:
            endpoint: where to, as far as it was seen: its address stands on spans. One object for each origin is cheaper.
            operation: as in ``gen_ai.operation.name``: ``chat``, ``text_completion``, ``generate_content``, ``embeddings``.
            model: that it asks for, ``""`` if unknown.
            streamed: the answer is asked for as a stream.
            body_params: of the request's fields those that may stand on a span; others are ignored.
            transport: name of what carries it, such as ``httpx``.
            telemetry: None for no spans and metrics; left out: the default manager's.
            registry: for observers, attributes and timing tables; the default manager's by default.
            request_headers: the request's own, names in lower case: where they have a trace and no span is current, that
                is the parent.
            begin_ns: when, in ns of ``perf_counter_ns``; now by default.
            provider: whose schema it is, as in ``gen_ai.provider.name``, for a host that says nothing.
        """
        begin_ns = begin_ns or time.perf_counter_ns()
        if _abandoned:
            sweep()
        try:
            if telemetry is UNSET or registry is None:
                from .manager import default_manager

                manager = default_manager()
                if telemetry is UNSET:
                    telemetry = manager.telemetry
                registry = registry or manager.registry
            _ = registry.timing_readers  # loaded now: the call may end with the interpreter, which loads nothing then
        except Exception:  # noqa: BLE001 - somebody's plugin may be broken
            _log.warning("a call is not recorded: the default manager cannot be made", exc_info=True)
            telemetry = None
        witness = cls(
            endpoint,
            _Asked(operation, model, body_params or {}, provider),
            streamed=streamed,
            transport=transport,
            telemetry=None if isinstance(telemetry, UnsetType) else telemetry,
            registry=registry,
            begin_ns=begin_ns,
        )
        if streamed:
            with contextlib.suppress(RuntimeError):
                witness._loop = asyncio.get_running_loop()
            _sweep_at_exit()
        if witness._telemetry is not None:
            carrier = None
            if request_headers is not None and not TRACE_HEADERS.isdisjoint(request_headers):
                carrier = request_headers
            witness.call_span = witness._telemetry.start(
                witness._asked, endpoint, begin_ns, streamed=streamed, headers=carrier or {}
            )
        witness.handed_over(time.perf_counter_ns())
        return witness

    # --- the request ------------------------------------------------------------------------------------------------

    def handed_over(self, at_ns: int) -> None:
        """The client is given the request now: what came before was preparation."""
        self.attempt.asked_ns = self.attempt.leased_ns = at_ns

    def headers(self, present: Container[str] = ()) -> Mapping[str, str]:
        """Headers that carry the trace to the server, names in lower case.

        Args:
            present: names of the request's own headers. With a trace in them, or any of ours: nothing is added.
        """
        if self._telemetry is None or self.call_span is None:
            return _NO_HEADERS
        if any(name in present for name in TRACE_HEADERS):
            return _NO_HEADERS
        found = self._telemetry.headers(self.call_span)
        return {name: value for name, value in found.items() if name not in present}

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make the call's span the current one, for what the client's own instrumentation does while it sends.

        Only around what begins and ends in one place: never across a ``yield`` to the user. :data:`watching` is set, too.
        """
        call_span = self.call_span
        mine = watching.set(self)
        try:
            if call_span is None or not call_span.span.get_span_context().is_valid:
                yield
                return
            token = otel_context.attach(call_span.context)
            try:
                yield
            finally:
                otel_context.detach(token)
        finally:
            watching.reset(mine)

    # --- the answer -------------------------------------------------------------------------------------------------

    def head(self, status: int, headers: Mapping[str, str], at_ns: int) -> None:
        """The answer's head is there.

        Args:
            status: of HTTP.
            headers: names in lower case, repeated ones joined with ``", "``.
            at_ns: when it came.
        """
        marks = self.marks
        marks.first_byte_ns = marks.first_byte_ns or at_ns
        self._head.status = status
        self._head.headers = headers
        self._fed_ns = 0
        try:
            self.along = Along(
                status=status,
                content_type=headers.get("content-type", ""),
                content_encoding=headers.get("content-encoding", ""),
            )
        except Exception:  # noqa: BLE001 - a decoder of another library, which does not work as it should
            _log.warning("an answer cannot be read along", exc_info=True)
            self.along = Along(content_encoding="unknown")

    def feed(self, data: bytes, at_ns: int, asked_ns: int = 0) -> None:
        """A piece of the body, as it came over the wire: transfer coding removed, content coding not.

        Args:
            data: is not kept longer than needed to find what is looked for.
            at_ns: when it came, as far as the client can tell.
            asked_ns: when the client asked for it; 0 where it does not ask but is told.
        """
        along = self.along
        if along is None:
            return
        if asked_ns and self._fed_ns:
            pause_ns = asked_ns - self._fed_ns
            self.waited_ns += pause_ns
            if pause_ns >= PAUSE_NS:
                self.paused(pause_ns, at_ns - asked_ns)
        self._fed_ns = at_ns
        along.feed(data, at_ns)

    def paused(self, pause_ns: int, read_ns: int) -> None:
        """The consumer took ``pause_ns``, at least ``PAUSE_NS``, until it asked for the next piece, which then took
        ``read_ns``. For callers of ``along.feed()``, which is :meth:`feed` without keeping these times."""
        # The answer has waited for the consumer only if its next piece was there by then.
        if read_ns < _WAS_THERE_NS and self.along is not None and self.along.first_content_ns:
            self.marks.paused_ns += pause_ns

    @property
    def done(self) -> bool:
        """The terminal event has come: nothing of the answer is missing but the end of the message."""
        return self.along is not None and self.along.done_ns > 0

    @property
    def complete(self) -> bool:
        """The same, or a finish reason has come: the end is to come in a moment."""
        return self.along is not None and self.along.complete

    # --- the end ----------------------------------------------------------------------------------------------------

    def end(self, outcome: Outcome, error: BaseException | None = None, at_ns: int = 0) -> None:
        """The call has ended: records everything, once. Never raises; a second call is ignored.

        Args:
            outcome: as the client saw it. An error status, and an error object at the end of a stream, make an ``error``
                of it; a caller that closes after the terminal event has completed it.
            error: what the client raised.
            at_ns: when; now by default.
        """
        self._end(outcome, error, at_ns)
        if _abandoned:
            sweep()

    def _end(self, outcome: Outcome, error: BaseException | None, at_ns: int) -> None:
        if self._generation != _generation:  # in a forked child it is the parent's
            return
        with self._lock:
            if self.ended:
                return
            self.ended = True
        try:
            self._finish(outcome, error, at_ns or time.perf_counter_ns())
        except Exception:  # noqa: BLE001 - it is another client's call
            _log.warning("a call could not be recorded", exc_info=True)

    def abandon(self) -> None:
        """The user's handle was dropped without being closed. May be called inside the garbage collector, in any thread."""
        if self.ended or self._generation != _generation:
            return
        _abandoned.append(self)
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it is closed
                self._loop.call_soon_threadsafe(sweep)

    @property
    def timeline(self) -> Timeline:
        """Raises RuntimeError before the call has ended."""
        if self._timeline is None:
            raise RuntimeError("the call has not ended")
        return self._timeline

    def _finish(self, outcome: Outcome, error: BaseException | None, end_ns: int) -> None:
        record, attempt, head = self._record, self.attempt, self._head
        self._loop = None
        along = self.along
        if along is not None:
            along.end()
            self._take_over(along)
            if outcome in ("closed_by_caller", "abandoned") and along.done_ns:
                outcome = "completed"
        if outcome in ("completed", "closed_by_caller", "abandoned"):
            failed = self._failure()
            if failed is not None:
                outcome, error = "error", failed
        self._close_marks(along, outcome)
        record.outcome = attempt.outcome = outcome
        if error is not None and outcome in ("error", "timeout"):
            record.error_type = attempt.error_type = type(error).__name__
        record.end_ns = attempt.end_ns = end_ns
        if outcome == "abandoned":
            end_at_last_activity(record, attempt)
        registry = self._registry
        edge = registry is not None and head.status is not None and hear_timing(registry, self._endpoint, head, attempt)
        use = self.marks.use
        if use is not None:
            attempt.connection = with_rtt(use, self.marks.rtt_ns, edge=edge)
        if self.call_span is not None:
            record.trace_id = self.call_span.span.get_span_context().trace_id
        record.usage = head.usage
        timeline = self._timeline = Timeline(record)
        extra = registry.span_attributes(timeline) if registry is not None else {}
        if self._telemetry is not None:
            self._telemetry.end(
                self.call_span,
                timeline,
                record,
                self._asked,
                self._endpoint,
                head,
                head.usage,
                along.finish_reason if along is not None else None,
                error,
                extra,
                None,
                streamed=record.streamed,
            )
        if registry is not None and registry.has_observers:
            registry.observe(timeline)

    def _take_over(self, along: Along) -> None:
        """What was read along, into the books."""
        marks, head = self.marks, self._head
        marks.first_chunk_ns = along.first_chunk_ns
        if self._record.streamed:
            marks.first_content_ns = along.first_content_ns
            if along.streamed is False and not along.failed:  # a whole answer all the same: all came with its end
                marks.first_content_ns = along.last_byte_ns
        marks.last_chunk_ns = along.last_chunk_ns
        marks.last_byte_ns = along.last_byte_ns or marks.first_byte_ns
        head.id, head.model, head.usage = along.id, along.model, along.usage
        head.late_events, head.streamed = along.late_events, along.streamed

    def _failure(self) -> Exception | None:
        """The error that the answer itself is, or ends with."""
        status = self._head.status
        if status is not None and status >= 400:
            return server_error(f"status {status}", status=status, endpoint=self._endpoint.address)
        if self.along is not None and self.along.failed:
            return server_error("the answer ends with an error", status=status, endpoint=self._endpoint.address)
        return None

    def _close_marks(self, along: Along | None, outcome: Outcome) -> None:
        marks = self.marks
        if marks.first_byte_ns and not marks.sent_ns:  # a client that does not tell when
            marks.sent_ns = self.attempt.leased_ns
        if along is not None and along.last_byte_ns and (along.done_ns or outcome == "completed"):
            marks.ended_ns = along.last_byte_ns  # from here on only the client has something to do


# ------------------------------------------------------------------------------------------- those that nobody has ended

_abandoned: deque[Witness] = deque()
_generation = 0  # how often this process is a child's child: calls of the parent are the parent's
_at_exit = False


def sweep() -> None:
    """End the calls that were abandoned. Never raises."""
    while True:
        try:
            witness = _abandoned.popleft()
        except IndexError:
            return
        witness._end("abandoned", None, 0)


def _sweep_at_exit() -> None:
    """Registered with the first call, and so after the application has set up its SDK, which closes after this runs."""
    global _at_exit
    if not _at_exit:
        _at_exit = True
        atexit.register(sweep)


def _after_fork() -> None:
    global _generation
    _generation += 1
    _abandoned.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
