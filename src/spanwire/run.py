"""One call from its slot to its end: the inner state behind a stream handle or a unary call.

Whatever happens, :meth:`Run.finish` runs exactly once: it gives back the slot, leaves or finishes the connection, stops
the timer, and turns the record into a timeline, a span and metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import logging
import os
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from .admission import Slots, Ticket
from .calls import Call, Chunk, Embeddings, Reply, ReplyBuilder
from .closing import end_at_last_activity, hear_timing, reach, with_rtt
from .endpoint import Endpoint, Retries, Timeouts, hide_secrets
from .errors import CallTimeout, ConfigurationError, ConnectionFailed, ServerError, SpanwireError
from .pool import Lease, Member, Pool, Waiter
from .retry import retry_wait_s
from .telemetry import CallSpan
from .timeline import AttemptRecord, CallRecord, ConnectionUse, Outcome, Timeline
from .transport import Attempt, Dialect, Exchange, Garbage, Head, Inbox, Item, Transport, TransportSpec, told
from .watch import NEAR_S

if TYPE_CHECKING:
    from .manager import LoopState

__all__ = ["Prepared", "Run", "resolve_key"]

_log = logging.getLogger("spanwire.manager")

_T = TypeVar("_T")


#: How a server says that it does not know a field. Source: RFC 9110 (400), RFC 9110 section 15.5.21 (422, as FastAPI
#: servers and Mistral do).
_REFUSALS = frozenset({400, 422})
#: Later than any clock.
_NEVER_NS = 1 << 62
#: Unique in the world by its random part, and in the process by its number.
_key_prefix = f"spanwire-{os.urandom(16).hex()}-"
_key_number = itertools.count(1)


def _idempotency_key() -> str:
    return f"{_key_prefix}{next(_key_number)}"


def _after_fork() -> None:
    global _key_prefix
    _key_prefix = f"spanwire-{os.urandom(16).hex()}-"


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Prepared(NamedTuple):
    """What is looked up once for an endpoint and a registry."""

    registry: object
    forks: int
    spec: TransportSpec
    transport: Transport
    dialect: Dialect | None
    key: object
    slots: Slots | None
    prepare: Callable[[Call, Endpoint, Dialect | None], object] | None = None
    jobs: bool = False


async def resolve_key(endpoint: Endpoint) -> str | None:
    """The endpoint's key now: asks the function that gives it.

    Raises:
        ConfigurationError: the function failed, or gave something that is no text.
    """
    provider = endpoint.api_key
    if provider is None or isinstance(provider, str):
        return provider
    try:
        key = provider()
        if inspect.isawaitable(key):
            key = await key
    except Exception as error:
        raise ConfigurationError(
            f"Endpoint.api_key() failed with {type(error).__name__}", endpoint=endpoint.address
        ) from error
    if not isinstance(key, str):
        raise ConfigurationError(
            f"Endpoint.api_key() must give text, not {type(key).__name__}", endpoint=endpoint.address
        )
    return key


class Run:
    """One call. All methods run on the loop of ``state``."""

    __slots__ = (
        "_api_key",
        "_asked_ns",
        "_asking",
        "_attempt",
        "_backoff_until_ns",
        "_builder",
        "_call_span",
        "_error",
        "_failure",
        "_headers",
        "_interrupted",
        "_lease",
        "_opener",
        "_prepared",
        "_raw",
        "_reading",
        "_record",
        "_retries",
        "_stale",
        "_stale_retry",
        "_ticket",
        "_timeline",
        "_timeouts",
        "_timer",
        "_traced",
        "_unasked",
        "_unsent",
        "batch",
        "call",
        "ended",
        "endpoint",
        "exchange",
        "items",
        "look_ns",
        "opened",
        "state",
        "streamed",
    )

    def __init__(
        self,
        state: LoopState,
        prepared: Prepared,
        endpoint: Endpoint,
        call: Call,
        *,
        streamed: bool,
        timeouts: Timeouts,
        retries: Retries,
        headers: Mapping[str, str],
    ) -> None:
        self.state = state
        self.endpoint = endpoint
        self.call = call
        self.streamed = streamed
        self.batch: list[Chunk] = []  # in reverse: the next one is at the end
        self.items: list[Item] = []
        self.exchange: Exchange | None = None
        self.opened = False
        self.ended = False
        self._prepared = prepared
        self._timeouts = timeouts
        self._retries = retries
        self._headers = headers
        self._record: CallRecord
        self._attempt: AttemptRecord
        self._builder = ReplyBuilder()
        self._call_span: CallSpan | None = None
        self._traced = False
        self._ticket: Ticket | None = None
        self._lease: Lease | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.look_ns = _NEVER_NS  # see watch.py
        self._failure: SpanwireError | None = None  # why the call has to end, before its exchange can say it
        self._opener: asyncio.Task[Any] | None = None  # the task that waits for a slot, a connection, a back-off
        self._interrupted = False  # we have cancelled the opener ourselves
        self._unasked = False  # the server refused a request with those fields
        self._unsent = False  # an attempt failed, and the next one was not sent yet
        self._backoff_until_ns = 0
        self._api_key: str | None = None
        self._asked_ns = 0  # when it first asked for a connection
        self._error: BaseException | None = None
        self._timeline: Timeline | None = None
        self._raw = b""  # the whole answer, if it was not streamed
        self._reading = False
        self._stale_retry = False
        self._asking: Call | None = None  # the call with the fields that ask a server for its times
        self._stale = 0  # attempts that found a connection dead: not counted in Retries.max_attempts

    # --- what its owner asks for ------------------------------------------------------------------------------------

    @property
    def timeline(self) -> Timeline:
        """Raises RuntimeError before the call has ended."""
        if self._timeline is None:
            raise RuntimeError("the call has not ended: read the stream to its end, or leave its `with` block first")
        return self._timeline

    @property
    def head(self) -> Head | None:
        """What is known of the answer's start; None before the request was sent."""
        if self.exchange is None:
            return None
        try:
            head = self.exchange.head
        except Exception:  # noqa: BLE001 - a transport's bug must not keep a call from ending
            _log.warning("an exchange's head cannot be read", exc_info=True)
            return None
        return head if isinstance(head, Head) else None

    def reply(self) -> Reply:
        """What has arrived and was read so far."""
        head = self.head
        if head is None:
            return self._builder.reply(timeline=self._timeline)
        reply = self._builder.reply(
            id=head.id, model=head.model, headers=head.headers, timeline=self._timeline, raw=self._raw
        )
        if reply.usage is None and head.usage is not None:  # the server has said it, and the caller left before
            return msgspec.structs.replace(reply, usage=head.usage)
        return reply

    async def open(self) -> None:
        """Get a slot and a connection, and send the request; tries again where that may help."""
        if self.opened:
            raise RuntimeError("a stream is entered once: ask the manager for a new one")
        self.opened = True
        begin_ns, started_unix_ns = time.perf_counter_ns(), time.time_ns()
        if not self.state.guarded:
            await self.state.guard()
        self._record = CallRecord(
            begin_ns,
            operation=self.call.operation,
            model=self.call.model,
            endpoint=self.endpoint.address,
            transport=self._prepared.spec.name,
            streamed=self.streamed,
            started_unix_ns=started_unix_ns,
        )
        self.state.runs.add(self)
        try:
            await self._opening(begin_ns)
        except BaseException as error:
            self._give_up(error)
            raise

    async def drain(self) -> None:
        """Read to the end; what came is in :attr:`items`, if it was no chunk, and in :meth:`reply`."""
        try:
            while await self.read():
                pass
        except BaseException as error:
            self._give_up(error)
            raise

    def leave(self, outcome: Outcome) -> None:
        """The caller goes, before the answer has ended."""
        if self.opened and not self.ended and not self.state.parked:
            self.finish(outcome, None)
            self._interrupt()

    def fail(self, error: SpanwireError) -> None:
        """A limit was hit: the pending or next read delivers what has arrived, and then raises the error."""
        if self.ended:
            return
        if self.exchange is not None and not self._unsent:
            self.exchange.abort(error)
        else:
            self._failure = error
            self._interrupt()

    def end(self, error: SpanwireError) -> None:
        """End the call from outside, at once. The pending or next read raises the error."""
        if not self.ended:
            self.finish("error", error)
            self._interrupt()

    def _interrupt(self) -> None:
        if self._opener is None:
            return
        if self.state.loop.is_closed() or self._opener is not asyncio.current_task(self.state.loop):
            self._interrupted = True
            with contextlib.suppress(RuntimeError):  # its loop is closed: it will never run again
                self._opener.cancel()

    # --- attempts ---------------------------------------------------------------------------------------------------

    async def _opening(self, begin_ns: int) -> None:
        """Attempts until a request is sent. Can be interrupted, and taken up again by the next read if it was cancelled."""
        self._unsent = True
        task = self._opener = asyncio.current_task()
        assert task is not None
        try:
            while self._unsent:
                if self._backoff_until_ns:
                    await self._back_off()
                    begin_ns = time.perf_counter_ns()
                attempt = self._attempt = AttemptRecord(begin_ns, streamed=self.streamed)
                self._record.attempts.append(attempt)
                try:
                    await self._send(attempt)
                    self._unsent = False
                except SpanwireError as error:
                    self._after_failure(error)
                    begin_ns = time.perf_counter_ns()
        except asyncio.CancelledError:
            if self._interrupted:
                self._interrupted = False
                if task.uncancel() == 0:
                    raise self._ended_by() from None
            if self._record.attempts:
                self._end_attempt(self._attempt, "cancelled", None)
            raise
        finally:
            self._opener = None

    def _ended_by(self) -> BaseException:
        """Why the opening was interrupted."""
        return (
            self._error
            or self._failure
            or ConnectionFailed(
                "the call was left while it was being opened", endpoint=self.endpoint.address, retryable=False
            )
        )

    async def _back_off(self) -> None:
        # Again, since uvloop's timers count in whole milliseconds and may come one too early.
        while (left_s := (self._backoff_until_ns - time.perf_counter_ns()) / 1e9) > 0:
            await self._within_total(asyncio.sleep(left_s), phase="queue")
        self._backoff_until_ns = 0

    def _trace(self, member: Member | None = None) -> None:
        """Start the span, once: before the first wait, or with the connection that was there without one."""
        if self._traced:
            return
        self._traced = True
        telemetry = self.state.manager.telemetry
        if telemetry is None:
            headers: dict[str, str] = {}
        else:
            link: Any = None if member is None else member.context
            span = self._call_span = telemetry.start(
                self.call,
                self.endpoint,
                self._record.begin_ns,
                streamed=self.streamed,
                connection=link,
                headers=self._headers,
            )
            headers = telemetry.headers(span)
            if span is not None and span.parent_sent:  # the server is sent the child of what the caller would send
                self._headers = {**self._headers, **headers}
        if self.endpoint.server_timing == "ask":
            headers.update(self._ask())
        # The same over all attempts, so that a server may drop the second of two that it has seen.
        headers["idempotency-key"] = _idempotency_key()
        if self._headers:  # a caller that traces by itself has set its own
            headers.update(self._headers)
        self._headers = headers

    def _ask(self) -> Mapping[str, str]:
        """Add what makes the server tell its times, unless it has refused that before. Returns headers."""
        dialect = self._prepared.dialect
        if dialect is None:
            return {}
        fields = {name: value for name, value in dialect.timing_fields.items() if name not in self.call.body}
        if fields and self.call.operation == "chat" and self._server not in self.state.manager.timing_refused:
            self._asking = msgspec.structs.replace(self.call, body={**self.call.body, **fields})
        own = {name.lower() for name in self.endpoint.headers}
        return {name: value for name, value in dialect.timing_headers.items() if name not in own}

    @property
    def _server(self) -> tuple[object, ...]:
        endpoint = self.endpoint
        return (endpoint.origin, endpoint.uds, endpoint.path, self._prepared.spec.name, endpoint.dialect)

    async def _send(self, record: AttemptRecord) -> None:
        slots = self._prepared.slots
        if slots is not None:
            self._ticket = slots.try_acquire(self.call.model, self.state.loop)
            if self._ticket is None:
                self._trace()
                record.queued_ns = time.perf_counter_ns()
                self._ticket = await self._wait_for_slot(slots)
                record.slot_ns = time.perf_counter_ns()
        api_key = self.endpoint.api_key
        if api_key is not None and not isinstance(api_key, str):
            self._trace()
            api_key = await self._within_total(resolve_key(self.endpoint), phase="configure")
        self._api_key = api_key
        record.asked_ns = time.perf_counter_ns()
        self._asked_ns = self._asked_ns or record.asked_ns
        pool = self.state.pool_for(self._prepared, self.endpoint)
        prepare = self._prepared.prepare
        try:
            prepared = (
                None if prepare is None else prepare(self._asking or self.call, self.endpoint, self._prepared.dialect)
            )
            lease = None if self._stale_retry else pool.try_lease(self.endpoint.limits, record.asked_ns, prepared)
        except SpanwireError:
            raise
        except Exception as cause:
            raise self._bug(cause) from cause
        if lease is not None:
            self._trace(lease.member)
        else:
            self._trace()
        total_s = self._timeouts.total_s
        attempt = Attempt(
            self.endpoint,
            timeouts=self._timeouts,
            dialect=self._prepared.dialect,
            streamed=self.streamed,
            api_key=api_key,
            headers=self._headers,
            marks=record.marks,
            deadline_ns=self._record.begin_ns + int(total_s * 1e9) if total_s is not None else None,
            prepared=prepared,
            asked_ns=self._asked_ns,
        )
        if lease is None:
            lease = await self._wait_for_connection(pool, attempt, record)
            record.leased_ns = time.perf_counter_ns()
        else:
            record.leased_ns = record.asked_ns
        attempt._on_released = lease.release
        try:
            self._leased(lease, record)
            self._arm(record)
            connection = lease.member.connection
            if self._call_span is not None and getattr(connection, "self_pooling", False):
                with self._call_span.current():  # what instruments the user's client makes its spans below ours
                    exchange = await connection.start(self._asking or self.call, attempt)
            else:
                exchange = await connection.start(self._asking or self.call, attempt)
            if not isinstance(exchange, Inbox):
                _check_exchange(exchange)
        except SpanwireError:
            lease.release()
            raise
        except Exception as cause:
            lease.release()
            raise self._bug(cause) from cause
        except BaseException:
            lease.release()
            raise
        self.exchange = exchange
        if self.ended:  # left by somebody else meanwhile
            exchange.abort()
            raise self._ended_by()

    async def _wait_for_slot(self, slots: Slots) -> Ticket:
        telemetry = self.state.manager.telemetry
        if telemetry is not None:
            telemetry.waiting(self.endpoint, 1)
        try:
            return await self._within_total(
                slots.acquire(self.call.model, self.endpoint.limits.queue_timeout_s), phase="queue"
            )
        finally:
            if telemetry is not None:
                telemetry.waiting(self.endpoint, -1)

    async def _wait_for_connection(self, pool: Pool, attempt: Attempt, record: AttemptRecord) -> Lease:
        waited: list[Waiter] = []
        try:
            lease = pool.lease(attempt, waited.append, self._call_span, fresh=self._stale_retry)
            return await self._within_total(lease, phase="connect")
        finally:
            if waited:
                waiter = waited[0]
                dial = waiter.by or waiter.dial
                record.dial_asked_ns = waiter.dial_asked_ns
                if waiter.served:
                    record.served = waiter.served
                elif dial is None:
                    record.served = "freed"
                else:  # it failed, or the caller gave up before it was done
                    record.served = "dialled" if dial.begin_ns >= waiter.asked_ns else "rode"
                if dial is not None and record.served != "freed":
                    record.connect = dial.marks
                    record.connect_begin_ns, record.connect_end_ns = dial.begin_ns, dial.end_ns

    def _leased(self, lease: Lease, record: AttemptRecord) -> None:
        self._lease = lease
        if lease.served == "idle":
            record.served = "idle"
        context = lease.member.context
        if self._call_span is not None and context is not None:
            self._call_span.link(context)  # type: ignore[arg-type]

    async def _within_total(self, wait: Awaitable[_T], *, phase: str) -> _T:
        total_s = self._timeouts.total_s
        if total_s is None:
            return await wait
        left_s = total_s - (time.perf_counter_ns() - self._record.begin_ns) / 1e9
        try:
            async with asyncio.timeout(left_s) as scope:
                return await wait
        except TimeoutError:
            if not scope.expired():
                raise
            raise self._timeout_error("total_s", total_s, phase) from None

    def _after_failure(self, error: SpanwireError) -> None:
        """After a failed attempt: plan the next one, or raise the error."""
        record, lease = self._attempt, self._lease
        self._end_attempt(record, "timeout" if isinstance(error, CallTimeout) else "error", error)
        if self.ended or self._failure is not None or self._builder.content_chunks:
            raise error
        stale = (
            self._retries.stale
            and not self._stale_retry
            and lease is not None
            and (
                error.again
                or (
                    isinstance(error, ConnectionFailed)
                    and error.retryable
                    and not error.full
                    and record.connection is not None
                    and record.connection.reused
                    and not record.marks.first_byte_ns
                    # Not where only its stream was reset: the connection is well, and the server has said no.
                    and (
                        getattr(lease.member.connection, "self_pooling", False) or not lease.member.connection.usable()
                    )
                )
            )
        )
        # It waits for room with the others, for as long as they do: that is no failure of this call.
        waits = (
            error.full
            and lease is not None
            and lease.pool.refused(error, self._asked_ns, self.endpoint.limits, self._timeouts)
        )
        # Our own fields may be what it does not take: the call is the user's without them.
        unasked = self._asking is not None and isinstance(error, ServerError) and error.status in _REFUSALS
        if unasked:
            self._asking = None
            self._unasked = True
            if self._headers.get("idempotency-key", "").startswith(_key_prefix):  # of another body: a key of its own
                self._headers = {**self._headers, "idempotency-key": _idempotency_key()}
        if stale or unasked or waits:
            self._stale += 1
            wait_s: float | None = 0.0
        else:
            failed = sum(attempt.outcome in ("error", "timeout") for attempt in self._record.attempts) - self._stale
            wait_s = retry_wait_s(error, failed, self._retries, random.random())  # noqa: S311
        if wait_s is None:
            raise error
        self._stale_retry = stale
        self._builder = ReplyBuilder()
        self.exchange = None
        self._backoff_until_ns = time.perf_counter_ns() + int(wait_s * 1e9) if wait_s else 0

    # --- reading ----------------------------------------------------------------------------------------------------

    async def read(self) -> list[Item]:
        """The next batch, [] at the end of the answer. An attempt that fails before any content is made again."""
        if self._reading or self._opener is not None:
            raise RuntimeError("two tasks read one stream at the same time; give each call a stream of its own")
        while not self.ended:
            if self._unsent:
                await self._open_again()
            exchange = self.exchange
            assert exchange is not None
            self._reading = True
            try:
                if isinstance(exchange, Inbox):  # nearly every transport's: without a coroutine for each batch
                    waiter = exchange.wait()
                    if waiter is not None:
                        await waiter
                    items: Sequence[Item] = exchange.take()
                else:
                    items = await exchange.read()
                if items:
                    if isinstance(items[0], Chunk):
                        self._builder.add(items)  # type: ignore[arg-type]
                        if not self.streamed:
                            self._raw = items[-1].raw  # type: ignore[union-attr]
                    else:
                        self._take_others(items)
                else:
                    _check_empty(items)
            except Exception as error:  # noqa: BLE001 - a transport's bug is the error of its call
                self._failed_to_read(error)
                continue
            finally:
                self._reading = False
            if items:
                return items  # type: ignore[return-value]
            self.finish("completed", None)  # unless somebody else has ended it while we were reading
        if self._error is not None:
            raise self._error
        return []

    def _take_others(self, items: Sequence[Item]) -> None:
        """A batch that begins with no chunk."""
        for item in items:
            if not isinstance(item, Embeddings):
                raise Garbage(f"read() gave {type(item).__name__} where a Chunk was due")
        self.items.extend(items)

    def _bug(self, cause: Exception) -> SpanwireError:
        """The error of a call whose transport has failed in a way that it must not."""
        owner = self.state.manager.registry.owner(self._prepared.spec)
        return ConnectionFailed(
            f"{owner} failed with {type(cause).__name__}{told(cause)}", endpoint=self.endpoint.address, retryable=False
        )

    def _failed_to_read(self, error: Exception) -> None:
        """Plan another attempt, or end the call with the error."""
        if not isinstance(error, SpanwireError):
            cause = error
            error = self._bug(cause)
            error.__cause__ = cause
        if self.ended:  # by somebody else, who has said why
            return
        try:
            self._after_reading(error)
        except SpanwireError as final:
            self._give_up(final)
            raise
        self._unsent = True

    def _after_reading(self, error: SpanwireError) -> None:
        """The answer broke off, or was an error: plan the next attempt, or raise it."""
        self._after_failure(error)

    async def _open_again(self) -> None:
        begin_ns = time.perf_counter_ns()
        last = self._record.attempts[-1]
        if last.outcome == "cancelled" and not last.leased_ns:  # it never began: polling must not pile up attempts
            self._record.attempts.pop()
            begin_ns = last.begin_ns
        try:
            await self._opening(begin_ns)
        except asyncio.CancelledError:
            raise  # of this read only: the next one goes on, unless its owner leaves
        except BaseException as final:
            self._give_up(final)
            raise

    # --- time limits: one timer, armed for the nearest limit, looked at again when it fires ----------------------------

    def _arm(self, record: AttemptRecord) -> None:
        limits = self._timeouts
        total_s, first_s, idle_s = limits.total_s, limits.first_content_s, limits.idle_s
        if (
            (total_s is None or total_s >= NEAR_S)
            and (first_s is None or first_s >= NEAR_S)
            and (idle_s is None or idle_s >= NEAR_S)
        ):
            self.look_ns = 0  # at the next look, which most calls don't live to see
            self.state.watch.start()
            return
        deadline = self._deadline(record)
        if deadline is not None:
            left_s = (deadline[0] - time.perf_counter_ns()) / 1e9
            self._timer = self.state.loop.call_later(max(0.0, left_s), self._tick)

    def _disarm(self) -> None:
        self.look_ns = _NEVER_NS
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _deadline(self, record: AttemptRecord) -> tuple[int, str] | None:
        limits, marks = self._timeouts, record.marks
        nearest: tuple[int, str] | None = None
        if limits.total_s is not None:
            nearest = (self._record.begin_ns + int(limits.total_s * 1e9), "total_s")
        if limits.first_content_s is not None and not marks.first_content_ns:
            due_ns = record.leased_ns + int(limits.first_content_s * 1e9)
            if nearest is None or due_ns < nearest[0]:
                nearest = (due_ns, "first_content_s")
        if limits.idle_s is not None and marks.first_byte_ns:
            # While nobody reads, the consumer is the slow one, and its reads will find what has come.
            # What we have stopped ourselves has to come the whole way once we let it go on.
            heard_ns = max(marks.last_byte_ns, marks.first_byte_ns, marks.resumed_ns)
            last_ns = heard_ns if self._reading else time.perf_counter_ns()
            due_ns = last_ns + int(limits.idle_s * 1e9)
            if nearest is None or due_ns < nearest[0]:
                nearest = (due_ns, "idle_s")
        elif limits.idle_s is not None:  # nothing has come: look again when something may have
            due_ns = time.perf_counter_ns() + int(limits.idle_s * 1e9)
            if nearest is None or due_ns < nearest[0]:
                nearest = (due_ns, "")
        return nearest

    def _tick(self) -> None:
        self._timer = None
        if not self.ended:
            self.look(time.perf_counter_ns())
            if self.look_ns != _NEVER_NS:
                self._arm(self._attempt)

    def look(self, now_ns: int) -> None:
        """Hit a limit whose time has come, or say when the next one may."""
        deadline = self._deadline(self._attempt)
        if deadline is None:
            self.look_ns = _NEVER_NS
            return
        due_ns, limit = deadline
        if not limit or due_ns > now_ns:
            self.look_ns = due_ns
            return
        self.look_ns = _NEVER_NS
        marks = self._attempt.marks
        phase = "read" if marks.first_byte_ns else "wait" if marks.sent_ns else "send"
        self.fail(self._timeout_error(limit, getattr(self._timeouts, limit), phase))

    def _timeout_error(self, limit: str, seconds: float, phase: str) -> CallTimeout:
        words = {
            "total_s": f"the call did not end within {seconds} s",
            "first_content_s": f"no content within {seconds} s",
            "idle_s": f"nothing came for {seconds} s",
        }[limit]
        return CallTimeout(
            f"{words} (Timeouts.{limit})",
            limit=limit,
            endpoint=self.endpoint.address,
            phase=phase,
            retryable=limit != "total_s",
        )

    # --- the end ----------------------------------------------------------------------------------------------------

    def _give_up(self, error: BaseException) -> None:
        if self.ended:
            return
        if isinstance(error, CallTimeout):
            self.finish("timeout", error)
        elif isinstance(error, Exception):
            self.finish("error", error)
        else:
            self.finish("cancelled", None)

    def _end_attempt(self, record: AttemptRecord, outcome: Outcome, error: BaseException | None) -> None:
        """Close the attempt's books: its exchange, its slot, its timer. Harmless if that was done before."""
        if not record.end_ns:
            record.end_ns = time.perf_counter_ns()
            record.outcome = outcome
            record.error_type = type(error).__name__ if error is not None else None
        self._disarm()
        lease, self._lease = self._lease, None
        if self.exchange is not None and lease is not None:
            try:
                if outcome == "completed" or self.exchange.complete:
                    lease.finish(self.exchange.abort)
                else:
                    self.exchange.abort()
            except Exception:  # noqa: BLE001 - a transport's bug must not keep the slot, the lease and the span
                _log.warning("a transport failed to leave its exchange", exc_info=True)
                lease.release()
        if not record.marks.ended_ns:  # its exchange may go on: a caller left who had all but the end
            record.marks = record.marks.copy()
        head = self.head
        edge = head is not None and hear_timing(self.state.manager.registry, self.endpoint, head, record)
        if lease is not None:
            record.connection = _use(lease, record, edge=edge)
        ticket, self._ticket = self._ticket, None
        if ticket is not None and self._prepared.slots is not None:
            self._prepared.slots.release(ticket)

    def finish(self, outcome: Outcome, error: Exception | None) -> None:
        """Once, whatever happened. Never raises."""
        if self.ended:
            return
        self.ended = True
        self.batch = []
        attempt = self._attempt if self._record.attempts else None
        if attempt is not None:
            self._end_attempt(attempt, outcome, error)
        record = self._record
        record.outcome = outcome
        record.error_type = type(error).__name__ if error is not None else None
        if attempt is None or self._backoff_until_ns:
            record.end_ns = time.perf_counter_ns()
        else:
            record.end_ns = attempt.end_ns
        if outcome == "abandoned" and attempt is not None:
            end_at_last_activity(record, attempt)
        self._error = error
        if isinstance(error, SpanwireError):
            hide_secrets(error, self.endpoint, self._api_key, self._headers)
        if self._call_span is not None:
            record.trace_id = self._call_span.span.get_span_context().trace_id
        record.usage = self._builder.usage or (self.head.usage if self.head is not None else None)
        if self._unasked and (
            outcome == "completed" or self._builder.content_chunks
        ):  # without our fields it went well
            self.state.manager.remember_refusal(self._server)
        self._timeline = Timeline(record)
        self.state.runs.discard(self)
        if self.state.ending and not self.state.runs:
            with contextlib.suppress(RuntimeError):  # it is closed by now
                self.state.loop.call_soon(self.state.abort)
        self._tell(self._timeline, record, error)
        if isinstance(error, SpanwireError):
            error.timeline = self._timeline
            if error.endpoint is None:
                error.endpoint = self.endpoint.address
            if self.exchange is not None:
                error.reply = self.reply()

    def _tell(self, timeline: Timeline, record: CallRecord, error: Exception | None) -> None:
        """Span, metrics and observers."""
        manager = self.state.manager
        extra = manager.registry.span_attributes(timeline)
        if manager.telemetry is not None:
            manager.telemetry.end(
                self._call_span,
                timeline,
                record,
                self.call,
                self.endpoint,
                self.head,
                record.usage,
                self._builder.finish_reason,
                error,
                extra,
                self.reply,
                streamed=self.streamed,
            )
        if manager.registry.has_observers:
            manager.registry.observe(timeline)


def _check_exchange(exchange: object) -> None:
    """Not for nearly every transport's, which is an Inbox: this takes some time. Raises Garbage."""
    if not isinstance(exchange, Exchange):
        raise Garbage(f"start() gave {type(exchange).__name__}, which is no Exchange")


def _check_empty(items: object) -> None:
    """The end of an answer is an empty batch, not just something false. Raises Garbage."""
    if not isinstance(items, Sequence):
        raise Garbage(f"read() gave {type(items).__name__}, not a list of chunks")


def _use(lease: Lease, record: AttemptRecord, *, edge: bool) -> ConnectionUse:
    """The connection of an attempt that has ended."""
    rtt_ns, own = record.marks.rtt_ns, record.marks.use
    if own is not None:  # a client that pools by itself knows better
        return with_rtt(own, rtt_ns, edge=edge)
    member, served = lease.member, lease.served
    reused = served in ("idle", "freed")
    rtt_s, scope = reach(rtt_ns, edge=edge)
    return ConnectionUse(
        member.id,
        reused,
        (record.leased_ns - member.made_ns) / 1e9 if reused else None,
        (record.leased_ns - lease.was_idle_ns) / 1e9 if served == "idle" else None,
        member.connection.protocol,
        rtt_s,
        member.connection.engine,
        scope,
    )
