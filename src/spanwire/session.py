"""Sessions: both sides send when they like. A session is a :class:`~spanwire.run.Run` whose exchange can send; what is
traced are its turns."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec

from .calls import Call, Chunk, ReplyBuilder, SessionEvent
from .closing import hear_timing
from .endpoint import Endpoint, Retries, Timeouts
from .errors import ConfigurationError, ConnectionFailed, SpanwireError
from .pool import Member
from .run import Prepared, Run
from .timeline import AttemptRecord, CallRecord, ConnectionUse, Outcome, Timeline
from .transport import Garbage, Item, SessionExchange, Turn

__all__ = ["Session", "SessionRun", "with_model"]

_TOO_EARLY = "the session is still being opened: send once its `async with` block is entered"
#: Turns whose timelines a session keeps.
_TURNS_KEPT = 100


def with_model(endpoint: Endpoint, model: str) -> Endpoint:
    """The endpoint whose address names a model. The same object for the same model: what was learned of it stays."""
    if not isinstance(model, str) or not model:
        raise ConfigurationError("session(model=...): the model's name as text", endpoint=endpoint.address)
    known: dict[str, Endpoint] = endpoint.__dict__.setdefault("_with_model", {})
    found = known.get(model)
    if found is None:
        found = known[model] = msgspec.structs.replace(endpoint, query={**endpoint.query, "model": model})
    return found


class _NoReply(ReplyBuilder):
    """A session has no reply that its pieces would be joined to."""

    def add(self, chunks: Sequence[Chunk]) -> None:
        raise Garbage(f"read() gave {type(chunks[0]).__name__} where a SessionEvent was due")


class SessionRun(Run):
    """The inner state behind a session's handle. All methods run on the loop of ``state``."""

    __slots__ = ("_context", "_member", "_said_all", "_why", "turns")

    def __init__(
        self, state: Any, prepared: Prepared, endpoint: Endpoint, *, timeouts: Timeouts, retries: Retries
    ) -> None:
        super().__init__(
            state,
            prepared,
            endpoint,
            Call("session", endpoint.query.get("model", ""), {}),
            streamed=True,
            timeouts=timeouts,
            retries=retries,
            headers={},
        )
        self._traced = True  # its turns are
        self._context: contextvars.Context | None = None
        self._member: Member | None = None
        self._said_all = False
        self._why: Exception | None = None  # it ends
        self.turns: deque[Timeline] = deque(maxlen=_TURNS_KEPT)

    async def open(self) -> None:
        """Get a slot and a connection of its own."""
        self._context = (
            contextvars.copy_context()
        )  # of whoever opens it: its turns are children of what is current there
        await super().open()
        exchange = self.exchange
        if not isinstance(exchange, SessionExchange):
            error = self._bug(
                Garbage(f"start() gave {type(exchange).__name__} for a session, which is no SessionExchange")
            )
            self._give_up(error)
            raise error
        if self._lease is not None:
            self._member = self._lease.member
        exchange.on_turn = self._turn_ended
        self._builder = _NoReply()

    async def send(self, message: Mapping[str, Any] | str | bytes) -> None:
        """See :meth:`Session.send`."""
        exchange = self.exchange
        if self.ended:
            ended = ConnectionFailed(
                "the session has ended", endpoint=self.endpoint.address, phase="send", retryable=False
            )
            raise self._error or ended
        if exchange is None:
            raise RuntimeError(_TOO_EARLY)
        if self._said_all:
            raise RuntimeError("send_eof() has told the server that nothing more comes: open another session to send")
        try:
            # open() has looked that it can: to ask for each message would take 50 us.
            await exchange.send(message)  # type: ignore[attr-defined]
        except SpanwireError:
            raise
        except Exception as cause:
            raise self._bug(cause) from cause

    async def send_eof(self) -> None:
        """See :meth:`Session.send_eof`."""
        if self.ended:
            if self._error is not None:
                raise self._error
            return
        exchange = self.exchange
        if exchange is None:
            raise RuntimeError(_TOO_EARLY)
        say: Callable[[], Awaitable[None]] | None = getattr(exchange, "send_eof", None)
        if say is None:
            raise ConfigurationError(
                f"a session of transport {self._prepared.spec.name!r} ends for both sides at once: say the end of what "
                "you send in its schema, or leave the session",
                endpoint=self.endpoint.address,
            )
        self._said_all = True  # also where this is cancelled: nobody knows then
        try:
            await say()
        except SpanwireError:
            raise
        except Exception as cause:
            raise self._bug(cause) from cause

    def _deadline(self, record: AttemptRecord) -> tuple[int, str] | None:
        """A session may be silent for as long as its owner likes: ``first_content_s`` bounds its wait for room, and no more."""
        total_s = self._timeouts.total_s
        return None if total_s is None else (self._record.begin_ns + int(total_s * 1e9), "total_s")

    def _take_others(self, items: Sequence[Item]) -> None:
        if not isinstance(items[0], SessionEvent):
            raise Garbage(f"read() gave {type(items[0]).__name__} where a SessionEvent was due")

    def _after_reading(self, error: SpanwireError) -> None:
        """What was said on a session that broke is lost with it: it is not made again."""
        raise error

    def _tell(self, timeline: Timeline, record: CallRecord, error: Exception | None) -> None:
        """Nothing: its turns were told."""

    def finish(self, outcome: Outcome, error: Exception | None) -> None:
        """See :meth:`Run.finish`. Turns that are under way end for the same reason."""
        if not self.ended:
            self._why = error
        super().finish(outcome, error)

    def _turn_ended(self, turn: Turn) -> None:
        context = self._context
        if context is not None:
            context.copy().run(self._record_turn, turn)

    def _record_turn(self, turn: Turn) -> None:
        manager, head = self.state.manager, turn.head
        if self.ended and turn.outcome == "closed_by_caller":  # its transport knows no more than that it has to go
            turn.outcome = self._attempt.outcome
            turn.error = self._why if isinstance(self._why, SpanwireError) else None
        call = Call("chat", self.call.model or head.model or "", {})  # what was asked for; what answered is in the head
        now_ns = time.perf_counter_ns()
        record = CallRecord(
            turn.begin_ns,
            operation=call.operation,
            model=call.model,
            endpoint=self.endpoint.address,
            transport=self._prepared.spec.name,
            streamed=True,
            started_unix_ns=time.time_ns() - (now_ns - turn.begin_ns),
        )
        attempt = AttemptRecord(turn.begin_ns, streamed=True)
        record.attempts.append(attempt)
        attempt.asked_ns = attempt.leased_ns = turn.begin_ns
        attempt.served = "idle"
        attempt.marks = turn.marks
        attempt.end_ns = record.end_ns = turn.end_ns
        attempt.outcome = record.outcome = turn.outcome
        attempt.error_type = record.error_type = type(turn.error).__name__ if turn.error is not None else None
        hear_timing(manager.registry, self.endpoint, head, attempt)
        member, rtt_ns = self._member, turn.marks.rtt_ns
        context: Any = None
        if member is not None:
            context = member.context
            attempt.connection = ConnectionUse(
                member.id,
                reused=bool(self.turns),
                age_s=(turn.begin_ns - member.made_ns) / 1e9,
                protocol=member.connection.protocol,
                rtt_min_s=rtt_ns / 1e9 if rtt_ns else None,
                engine=member.connection.engine,
            )
        record.usage = head.usage
        telemetry = manager.telemetry
        span = None
        if telemetry is not None:
            span = telemetry.start(call, self.endpoint, turn.begin_ns, streamed=True, connection=context)
            if span is not None:
                record.trace_id = span.span.get_span_context().trace_id
        timeline = Timeline(record)
        extra = manager.registry.span_attributes(timeline)
        if telemetry is not None:
            telemetry.end(
                span,
                timeline,
                record,
                call,
                self.endpoint,
                head,
                head.usage,
                turn.finish_reason,
                turn.error,
                extra,
                None,
                streamed=True,
            )
        self.turns.append(timeline)
        if manager.registry.has_observers:
            manager.registry.observe(timeline)


class Session:
    """A session's handle. Made by :meth:`ConnectionManager.session <spanwire.manager.ConnectionManager.session>`."""

    __slots__ = ("__weakref__", "_begin", "_events", "_run")

    def __init__(self, begin: Callable[[], SessionRun]) -> None:
        self._begin = begin
        self._run: SessionRun | None = None
        self._events: list[SessionEvent] = []  # in reverse: the next one is at the end

    def __repr__(self) -> str:
        run = self._run
        state = "not entered" if run is None else "ended" if run.ended else "open"
        return f"<spanwire.Session {state}>"

    async def __aenter__(self) -> Self:
        await self._open()
        return self

    async def _open(self) -> SessionRun:
        if self._run is not None:
            raise RuntimeError("a session is entered once: ask the manager for a new one")
        run = self._run = self._begin()
        await run.open()
        return run

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._events = []
        if self._run is not None:
            cancelled = kind is not None and issubclass(kind, asyncio.CancelledError)
            self._run.leave("cancelled" if cancelled else "closed_by_caller")

    async def send(self, message: Mapping[str, Any] | str | bytes) -> None:
        """Send one message: a mapping as JSON text, a ``str`` as text, ``bytes`` as a binary frame.

        Waits while the network, or the server, takes no more. May be called by another task than the one that reads.

        Raises:
            ConnectionFailed: the session has ended in order; else the error that ended it.
            ConfigurationError: the message cannot be written as JSON.
        """
        await self._entered().send(message)

    async def send_eof(self) -> None:
        """Say that nothing more will be sent, and go on reading until the server has ended the session.

        Waits until what was sent before has left. A second call does nothing, nor does one when the server has ended the
        session in order.

        Raises:
            ConfigurationError: the transport cannot say that, as WebSocket cannot.
            SpanwireError: the session has broken.
        """
        await self._entered().send_eof()

    def __aiter__(self) -> AsyncIterator[SessionEvent]:
        return self

    async def __anext__(self) -> SessionEvent:
        if not self._events:
            run = self._entered()
            self._events = (await run.read())[::-1]  # type: ignore[assignment]
            if not self._events:
                raise StopAsyncIteration
        return self._events.pop()

    async def aclose(self) -> None:
        """End the session now; also from another task, whose pending read then ends."""
        self._events = []
        if self._run is not None:
            self._run.leave("closed_by_caller")

    def __del__(self) -> None:
        run = self._run
        if run is not None and run.opened and not run.ended:
            run.state.abandon(run)

    @property
    def turns(self) -> list[Timeline]:
        """Timelines of the last 100 turns that have ended."""
        return list(self._run.turns) if self._run is not None else []

    @property
    def timeline(self) -> Timeline:
        """Of the session as a whole: how it was opened, how it ended. Raises RuntimeError before it has ended."""
        return self._entered().timeline

    def _entered(self) -> SessionRun:
        if self._run is None:
            raise RuntimeError("the session was not entered: use `async with manager.session(...) as session`")
        return self._run
