"""The async shell around one store, for one event loop: submits, takes in what comes, asks where nothing does, ends what is due.

Several runners may share a store, in this process or others. Whatever they do to a job they do by compare-and-set, so each
job is submitted by one of them, and resolved once.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import random
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ..calls import BatchReply, Call, Embeddings, Reply
from ..endpoint import Endpoint
from ..errors import (
    AuthenticationFailed,
    ConfigurationError,
    ConnectionFailed,
    JobCancelled,
    JobError,
    JobExpired,
    JobLost,
    MessageTooBig,
    ProtocolError,
    ServerError,
    SpanwireError,
    server_error,
)
from ..run import Prepared
from ..timeline import AttemptRecord
from ..wire.advice import nothing_there
from .apply import Applied, Learned, add, apply_deliveries, change, learn
from .budget import Durations, TokenBucket, next_poll_s
from .carry import JobRun, carry, was_refused
from .contract import (
    OPEN,
    TERMINAL,
    BatchCodec,
    Delivery,
    HTTPAnswer,
    HTTPRequest,
    JobCodec,
    JobRow,
    Seeks,
    Seen,
    State,
    Steps,
    Store,
    Wakes,
)
from .ids import new_id
from .settings import Heard, JobSettings, Receiving
from .states import NO_INPUT, Advance, advance, expire, last_word, next_attempt, submit_begins, submit_unknown, withdraw
from .tracing import JobTelemetry

if TYPE_CHECKING:
    from ..manager import LoopState

__all__ = ["JobRunner", "Party"]

_log = logging.getLogger("spanwire.jobs")
_T = TypeVar("_T")

#: How often the store is looked at, in seconds: while somebody waits, and while nobody does.
_LOOK_S, _IDLE_LOOK_S = 0.1, 1.0
#: How often jobs that are due are looked for, and how often old ones are swept away, in seconds.
_DUE_S, _SWEEP_S = 1.0, 3600.0
#: A store that tells of writes is asked only so often, and looked at no more often than this, in seconds.
_ASK_S, _PAUSE_S = 1.0, 0.02
#: How long others leave alone the due jobs that this runner takes on, and the deliveries, whose callers wait; and how often it
#: looks for what others have dropped, in seconds.
_TAKEN_S, _APPLYING_S = 5.0, 1.0
#: A submitter that has not said for so long that it is at work is dead, in seconds.
_LEASE_S = 20.0
#: What a server does not take now, and whose submitter has not come back for so long, others submit, in seconds.
_HELD_S = 60.0
#: Questions at once.
_ASKS = 32
#: Waiting jobs that are looked up one by one in each look: those that others have resolved are nearly always found before.
_LOOKED_UP = 50
#: Two commits may be in another order than the times in them: so far back completed jobs are read again, in seconds.
_BACK_S = 0.5
#: How often a store that stays down is told of, in seconds.
_TELL_S = 60.0
#: For how long deliveries are taken in before what is due is looked at, in seconds.
_LOOKING_S = 1.0
#: So many jobs in a row whose end was found by asking, in spite of webhooks: these do not come.
_DISTRUST = 5
#: How long the last question before a deadline may take, and that of a batch, whose files are large, in seconds.
_LAST_ASK_S, _LAST_BATCH_ASK_S = 10.0, 120.0
_BLOCKING_THREADS = 16
#: A submit of this row was answered, and its answer is none of this schema.
_UNREAD = "unread_answer"
#: Deliveries that are taken in before those who wait are told, and how many threads do it.
_DELIVERIES, _APPLIERS = 200, 8
#: Due jobs that are taken on at once.
_DUE = 500


class Party(msgspec.Struct, frozen=True):
    """An endpoint whose jobs this runner can submit, ask for and cancel."""

    endpoint: Endpoint
    prepared: Prepared
    settings: JobSettings

    @property
    def codec(self) -> JobCodec:
        """Its schema."""
        assert self.prepared.dialect is not None
        codec: JobCodec = self.prepared.dialect.codec
        return codec

    @property
    def dialect_name(self) -> str:
        """The name of its dialect."""
        assert self.prepared.dialect is not None
        return self.prepared.dialect.name

    @property
    def origin(self) -> str:
        """What identifies it in a row: scheme, host, port and path. No key."""
        return origin_of(self.endpoint)


def origin_of(endpoint: Endpoint) -> str:
    """Scheme, host, port and path."""
    scheme, host, port = endpoint.origin
    return f"{scheme}://{endpoint.uds or host}:{port}{endpoint.path}"


class JobRunner:
    """Looks after the jobs of one store on one loop. Made by ``manager.jobs``."""

    def __init__(self, state: LoopState, store: Store) -> None:
        self.state = state
        self.store = store
        self._threads = ThreadPoolExecutor(_BLOCKING_THREADS, thread_name_prefix="spanwire jobs")
        self._parties: dict[tuple[str, str], Party] = {}
        self._waiters: dict[str, set[asyncio.Future[JobRow]]] = {}
        self._cursors: dict[str, tuple[float, str]] = {}
        self._turns: set[asyncio.Future[None]] = set()  # of those who wait for a change of any kind
        self._round: list[str] = []  # waiting jobs that are still to be looked up
        self._another_round = True
        self._submitting: dict[str, float] = {}  # our submits that are under way, and until when others leave them
        self._books: dict[str, AttemptRecord] = {}  # of submits that were just acknowledged
        self._busy: set[str] = set()  # jobs that something is being done about
        self._skipped: set[str] = set()  # due jobs of endpoints that are not known here
        self._leased: dict[str, tuple[float, JobRow]] = {}  # leased, and until when: no question was free for them
        self._others_s = 0.0  # when the jobs of others are looked at next
        self._stuck = 0  # deliveries that wait for a dialect that is not installed here
        self._news = False  # somebody has said that something was written
        self._unsubscribe: Callable[[], None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._watcher: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._asks = asyncio.Semaphore(_ASKS)
        self._buckets: dict[object, TokenBucket] = {}
        self._durations = Durations()
        self._overdue: dict[tuple[str, str], int] = {}
        self._receivers: dict[str, Receiving] = {}  # by where they listen
        self._receiver_lock = asyncio.Lock()
        self._key: bytes | None = None
        self._tell = JobTelemetry(state.manager.telemetry)
        self.closed = False

    # --- what callers ask for -----------------------------------------------------------------------------------------

    def register(self, party: Party) -> None:
        """From now on this runner looks after the jobs of that endpoint too."""
        self._parties[party.origin, self._dialect(party)] = party
        self._skipped.clear()
        self._others_s = 0.0
        self._start()

    async def receive(self, party: Party) -> None:
        """Let what comes for the jobs of that endpoint come, as when they were submitted: they may be older than this process.

        If its receiver cannot listen, which a submit would raise, another process may do so: jobs are asked for in any case.
        """
        try:
            await self.have_receiver(party)
        except ConfigurationError as error:
            _log.warning("no receiver for the jobs of %s: %s", party.endpoint.address, error)

    async def submit(
        self,
        party: Party,
        call: Call,
        *,
        group: str,
        deadline_s: float | None,
        headers: Mapping[str, str],
        id: str | None = None,
        held: bool = False,
    ) -> tuple[JobRow, AttemptRecord | None]:
        """Write the row, submit, and return the row as the acknowledgement has left it, with the submit's books.

        Args:
            id: the job's. If it is in the store already, somebody else submits it: its row is returned as it is there.
            held: its caller comes back to it. What the server does not take now stays ``created``, for :meth:`submit_held`;
                and if the caller leaves meanwhile, the job is not cancelled.

        Raises:
            ConfigurationError: the call cannot be a job of this endpoint; nothing was written.
            SpanwireError: the provider has surely not taken it. The row says ``failed``, or ``created`` if it is held.
        """
        self.register(party)
        await self.have_receiver(party)
        settings, now_s = party.settings, time.time()
        if deadline_s is None:
            deadline_s = settings.batch_deadline_s if call.operation == "batch" else settings.deadline_s
        row = JobRow(
            id=new_id() if id is None else id,
            group=group,
            endpoint=party.endpoint.address,
            origin=party.origin,
            transport=party.prepared.spec.name,
            dialect=self._dialect(party),
            mode=settings.mode,
            model=call.model,
            operation=call.operation,
            state="submitting",
            created_s=now_s,
            due_s=now_s + deadline_s,
            poll_s=now_s + _LEASE_S,
            input=_encode(call),
        )
        request = await self._request(party, call, row)  # refused before anything is written
        span = self._tell.begin_submit(party.endpoint, row, headers)
        row.trace = span.headers
        try:
            self._submitting[row.id] = row.poll_s
            try:
                await self._add(row, held=held)
            except JobError:
                known = None if id is None else await self.get(id)
                if known is None:
                    raise
                return known, None
            row = await self._send(party, row, call, request, span, headers, held=held)
            return row, self._books.get(row.id)
        finally:
            span.end()  # does nothing if the exchange has ended it
            self._submitting.pop(row.id, None)
            self._books.pop(row.id, None)

    async def _add(self, row: JobRow, *, held: bool) -> None:
        async def write() -> None:
            await self._blocking(add, self.store, row)
            self._tell.written(row)

        adding = self._task(write())
        adding.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may be there for it

        async def take_back() -> None:
            """Its caller has left: else whoever finds the row takes it for one whose submitter died, and submits it."""
            with contextlib.suppress(JobError):
                await adding
            await self._give_up_submit(row.id)

        try:
            await asyncio.shield(adding)
        except asyncio.CancelledError:
            if adding.cancelled():
                raise _closed() from None
            if not held:
                self._later(take_back)
            raise

    async def get(self, job: str) -> JobRow | None:
        """A job's row."""
        return await self._blocking(self.store.get, job)

    async def states(self, jobs: Sequence[str]) -> dict[str, State]:
        """How these stand; those that are not in the store are left out."""
        return await self._blocking(self.store.states, jobs)

    async def wait(self, job: str) -> JobRow:
        """Wait for a job's end. Cancelling the wait does not cancel the job.

        Raises:
            JobError: there is no such job, or the store is down.
        """
        self._start()
        future: asyncio.Future[JobRow] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(job, set()).add(future)
        self._wake.set()  # it may look once in a while only, for nobody was waiting
        try:
            row = await self.get(job)
            if row is None:
                raise JobError("there is no such job in the store", job=job)
            self._cursors.setdefault(row.group, (time.time() - 5.0, ""))
            if row.state in TERMINAL:
                return row
            return await future
        finally:
            waiting = self._waiters.get(job)
            if waiting is not None:
                waiting.discard(future)
                if not waiting:
                    del self._waiters[job]

    async def reply(self, row: JobRow) -> Reply | Embeddings | BatchReply:
        """What an ended job is for its caller.

        Raises:
            ServerError: the provider says that it failed.
            JobLost, JobExpired, JobCancelled: see there.
            ProtocolError: its result cannot be read.
        """
        codec = self.codec_for(row)
        if codec is None:
            raise ConfigurationError(f"the job's dialect {row.dialect!r} is not installed here", endpoint=row.endpoint)
        if row.state == "succeeded":
            return await self._decoded(codec, row)
        raise failure_of(codec, row)

    async def late(self, row: JobRow) -> Reply | Embeddings | BatchReply | None:
        """The result that came after the job was given up; None if none did. For that of a batch the provider is asked."""
        codec = self.codec_for(row)
        if (
            row.operation == "batch"
            and row.state in ("cancelled", "expired", "lost")
            and "late_result" not in row.flags
        ):
            row = await self._ask_late(row)
        if "late_result" not in row.flags or not row.result or codec is None:
            return None
        return await self._decoded(codec, row)

    async def cancel(self, job: str) -> bool:
        """End it for its owner, and ask the provider to stop. Whether this has ended it: False if it had ended before.

        Raises:
            JobError: there is no such job, or the store is down.
        """
        learned = await self._blocking(change, self.store, job, lambda row: withdraw(row, now_s=time.time()))
        if learned is None:
            raise JobError("there is no such job in the store", job=job)
        self._took(learned)
        if learned.resolved:
            await self._stop(learned.row)
        return learned.resolved

    def wake(self) -> None:
        """Something has come: look now. From any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.state.loop.call_soon_threadsafe(self._has_news)

    def _has_news(self) -> None:
        self._news = True
        self._wake.set()

    def codec_for(self, row: JobRow) -> JobCodec | None:
        """The codec of a job's dialect, if it is installed here."""
        codec: JobCodec | None = self.state.manager.registry.codec_named(row.transport, row.dialect)
        return codec

    async def open_jobs(self, group: str) -> int:
        """How many of a group are open."""
        return await self._blocking(self.store.open_jobs, group)

    async def completed(self, group: str, after: tuple[float, str]) -> list[JobRow]:
        """Those of a group that have ended, from there on."""
        return await self._blocking(self.store.completed, group, after)

    async def change_mark(self) -> int:
        """What to give to :meth:`changed_since`."""
        return await self._blocking(self.store.changed)

    async def changed_since(self, mark: int) -> None:
        """Wait until something was written since then."""
        self._start()
        while await self._blocking(self.store.changed) == mark:
            turn = asyncio.get_running_loop().create_future()
            self._turns.add(turn)
            self._wake.set()
            try:
                await turn
            finally:
                self._turns.discard(turn)

    async def aclose(self) -> None:
        """Stop looking. Jobs stay in the store, for whoever opens it next; whoever waits here gets a ConnectionFailed."""
        self.abort()
        tasks = list(self._tasks)
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)
        receivers, self._receivers = list(self._receivers.values()), {}
        for receiver in receivers:
            with contextlib.suppress(RuntimeError):  # the interpreter is on its way out
                await asyncio.get_running_loop().run_in_executor(None, receiver.close)
        self._threads.shutdown(wait=False)

    def abort(self) -> None:
        """The same without awaiting anything."""
        if self.closed:
            return
        self.closed = True
        unsubscribe, self._unsubscribe = self._unsubscribe, None
        if unsubscribe is not None:
            unsubscribe()
        for task in list(self._tasks):
            with contextlib.suppress(RuntimeError):
                task.cancel()
        waiting: list[asyncio.Future[Any]] = [future for futures in self._waiters.values() for future in futures]
        for future in [*waiting, *self._turns]:
            if not future.done():
                with contextlib.suppress(RuntimeError):
                    future.set_exception(_closed())
        if self.state.loop.is_closed():
            receivers, self._receivers = list(self._receivers.values()), {}
            for receiver in receivers:
                receiver.close()

    # --- submitting -----------------------------------------------------------------------------------------------------

    async def _callback(self, party: Party, row: JobRow) -> str | None:
        if row.mode != "webhook" or party.codec.callback != "request":
            return None
        if self._key is None:
            self._key = await self._blocking(self.store.instance_key)
        base = party.settings.public_url
        receiver = self._receivers.get(party.settings.receiver_at)
        if base is None and receiver is not None:
            base = receiver.public_url
        if base is None:
            raise ConfigurationError("there is no public URL for callbacks", endpoint=party.endpoint.address)
        return party.settings.callback(base, row, self._key)

    async def _request(self, party: Party, call: Call, row: JobRow) -> HTTPRequest:
        codec, url = party.codec, await self._callback(party, row)
        if row.operation == "batch":  # many thousand calls: the loop has other things to do meanwhile
            request = await self._blocking(codec.submit, call, party.endpoint, row, url)
        else:
            request = codec.submit(call, party.endpoint, row, url)
        limit = codec.most_body_bytes
        if limit is not None and len(request.body) > limit:
            raise ConfigurationError(
                f"the submit has {len(request.body)} bytes, and dialect {row.dialect!r} takes {limit}: make several jobs of it",
                endpoint=party.endpoint.address,
            )
        return request

    async def _send(
        self,
        party: Party,
        row: JobRow,
        call: Call,
        request: HTTPRequest,
        span: Any,
        headers: Mapping[str, str],
        *,
        held: bool = False,
    ) -> JobRow:
        """The submit exchange of a row that says ``submitting``, and what it has brought."""
        codec = party.codec
        more = {**span.headers, **headers}
        begun = False
        try:
            if isinstance(codec, Steps):
                request = await self._before_the_last(party, codec, row, call, request, more)
            begun = True
            seen, run = await carry(
                self.state,
                party.prepared,
                party.endpoint,
                request,
                codec.acknowledged,
                operation="send",
                model=row.model,
                span=span.call_span,
                headers=more,
                idempotent=codec.resubmits,
                quiet=False,
                retried=True,
            )
        except asyncio.CancelledError:
            if not held:
                self._later(self._give_up_submit, row.id)
            raise
        except SpanwireError as error:
            if begun and not was_refused(error):
                return await self._unknown(party, row, error)
            if isinstance(error, ServerError) and nothing_there(error):
                error.message += f"; does this URL take jobs as the dialect {row.dialect!r} has them?"
            if held and not _is_about_the_call(error):
                await self._hold(row, error)
                raise
            code = _code_of(error)
            message, at_s = error.message, time.time()
            learned = await self._blocking(
                change,
                self.store,
                row.id,
                lambda row: last_word(row, code=code, message=message, now_s=at_s),
            )
            if learned is not None:
                self._took(learned)
            raise
        self._books[row.id] = run.books
        try:
            return await self._acknowledged(party, row, seen)
        except JobError as error:
            if error.retryable:
                error.job = error.job or row.id
                self._later(self._acknowledged_later, party, row, seen)
            raise

    async def _before_the_last(
        self,
        party: Party,
        codec: Steps,
        row: JobRow,
        call: Call,
        request: HTTPRequest,
        headers: Mapping[str, str],
    ) -> HTTPRequest:
        """The steps of a submit that begin nothing, and so may be sent again. Returns the one that does."""
        answers: list[HTTPAnswer] = []
        steps = codec.steps(call)
        url = await self._callback(party, row) if steps > 1 else None

        def read(answer: HTTPAnswer) -> tuple[HTTPAnswer, HTTPRequest]:
            return answer, codec.follow(call, party.endpoint, row, url, [*answers, answer])

        for _ in range(steps - 1):
            (answer, request), _run = await carry(
                self.state,
                party.prepared,
                party.endpoint,
                request,
                read,
                operation="send",
                model=row.model,
                headers=headers,
                retried=True,
            )
            answers.append(answer)
        return request

    async def _acknowledged(self, party: Party, row: JobRow, seen: Seen) -> JobRow:
        now_s = time.time()
        first_s = self._poll_at(party, row, now_s, now_s)

        def step(known: JobRow) -> Advance:
            made = advance(known, seen, by="ack", now_s=now_s, attempt=row.attempt)
            if made.row is not None and made.row.state in OPEN and not made.row.poll_s > known.poll_s:
                made.row.poll_s = first_s if "fetch" not in made.row.flags else now_s
            return made

        learned = await self._blocking(change, self.store, row.id, step, seen.body)
        if learned is None:
            raise JobError("the job has gone from the store", job=row.id)
        self._took(learned)
        if seen.provider_id is not None and learned.row.state in OPEN:
            # What came before we knew whose it is.
            waiting = await self._blocking(lambda: self.store.unapplied(provider=(row.dialect, seen.provider_id or "")))
            if waiting:
                await self._apply(waiting)
                return await self.get(row.id) or learned.row
        return learned.row

    async def _acknowledged_later(self, party: Party, row: JobRow, seen: Seen) -> None:
        """The store was down when the provider had taken it: what is not written is submitted, and paid for, once more."""
        while time.time() < row.due_s:
            await asyncio.sleep(_IDLE_LOOK_S)
            try:
                await self._acknowledged(party, row, seen)
            except JobError as error:
                if not error.retryable:
                    raise
            else:
                return

    async def _unknown(self, party: Party, row: JobRow, error: SpanwireError) -> JobRow:
        """It was sent, and nobody knows whether it was taken: wait for the job to show up."""
        unread = isinstance(error, ProtocolError)  # an answer it was, but of another kind of server
        codec = party.codec
        # Of one that is told by webhook, and makes no second job of it, the result may come all the same.
        harmless = row.mode == "webhook" and codec.callback == "request" and codec.resubmits
        _log.warning(
            "job %s: no answer to its submit (%s in %s: %s); it is given %g s to show up",
            row.id,
            type(error).__name__,
            error.phase,
            error.message,
            party.settings.grace_s,
        )
        at_s = time.time() + party.settings.grace_s

        def step(known: JobRow) -> Advance:
            if known.attempt != row.attempt:
                return Advance(None)
            if unread and not harmless and _UNREAD in known.flags and known.state == "submitting":
                # The next answer would be no other, and it would be submitted, and perhaps paid for, until its deadline.
                return last_word(known, code=_UNREAD, message=error.message, now_s=time.time())
            waiting = submit_unknown(known, retry_s=at_s)
            if waiting is not None and unread:
                waiting.flags = (*waiting.flags, _UNREAD)
            return Advance(waiting)

        learned = await self._blocking(change, self.store, row.id, step)
        self._tell.count("submit_unknown", row)
        if learned is None:
            return row
        self._took(learned)
        return learned.row

    async def _give_up_submit(self, job: str) -> None:
        """Its caller left before the acknowledgement: nobody has its id."""
        message = "its caller left while it was being submitted"
        learned = await self._blocking(
            change, self.store, job, lambda row: withdraw(row, now_s=time.time(), message=message)
        )
        if learned is not None and learned.resolved:
            self._took(learned)
            await self._stop(learned.row)

    async def _hold(self, row: JobRow, error: SpanwireError) -> None:
        """It was not taken, and its caller sends it again; or whoever looks after it later, if its caller has gone."""
        asked_s = error.retry_after_s if isinstance(error, ServerError) else None
        at_s = time.time() + max(_HELD_S, asked_s or 0.0)

        def step(known: JobRow) -> Advance:
            if known.state != "submitting" or known.attempt != row.attempt:
                return Advance(None)
            return Advance(msgspec.structs.replace(known, state="created", poll_s=at_s))

        await self._blocking(change, self.store, row.id, step)

    async def submit_held(self, party: Party, job: str, headers: Mapping[str, str], *, held: bool = True) -> JobRow:
        """Submit a job that says ``created``; does nothing if somebody else does. Returns the row as it is then.

        Raises:
            SpanwireError: as of :meth:`submit`.
        """
        row = await self.get(job)
        if row is not None and row.state == "created":
            await self._submit_row(party, row, headers, held=held)
            row = await self.get(job)
        if row is None:
            raise JobError("the job has gone from the store", job=job)
        return row

    async def _submit_again(self, party: Party, row: JobRow, *, held: bool = False) -> None:
        """A row that says ``created``."""
        with contextlib.suppress(SpanwireError):  # the row says it
            await self._submit_row(party, row, {}, held=held)

    async def _submit_row(self, party: Party, row: JobRow, headers: Mapping[str, str], *, held: bool) -> None:
        """Whoever swaps it first submits it."""

        def step(known: JobRow) -> Advance:
            begun = submit_begins(known)
            if begun is not None and not known.input:
                return last_word(known, code=None, message=NO_INPUT, now_s=time.time())
            if begun is not None:
                begun.poll_s = time.time() + _LEASE_S
            return Advance(begun)

        self._submitting[row.id] = time.time() + _LEASE_S
        try:
            learned = await self._blocking(change, self.store, row.id, step)
            if learned is None or not learned.changed:
                return  # somebody else submits it
            row = learned.row
            if row.state != "submitting":  # without its input, this is its end
                self._took(learned)
                return
            call = _decode(row)
            await self.have_receiver(party)
            request = await self._request(party, call, row)
            span = self._tell.begin_submit(party.endpoint, row, headers, again=True)
            try:
                await self._send(party, row, call, request, span, headers, held=held)
            finally:
                span.end()
        finally:
            self._submitting.pop(row.id, None)
            self._books.pop(row.id, None)

    # --- looking --------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._watcher is None and not self.closed:
            self._watcher = self._task(self._watch())

    async def _watch(self) -> None:
        seen = -1
        ask_at = due_at = look_at = tell_at = 0.0
        sweep_at = time.monotonic() + _SWEEP_S * random.uniform(0.5, 1.0)  # noqa: S311
        while not self.closed:
            down: JobError | None = None
            looked = False
            try:
                self._wake.clear()
                await self._subscribe()
                news, self._news = self._news, False
                if news or self._unsubscribe is None or time.monotonic() >= ask_at:
                    ask_at = time.monotonic() + _ASK_S
                    now = await self._blocking(self.store.changed)
                    if now != seen or time.monotonic() >= look_at:
                        seen, looked = now, True
                        look_at = time.monotonic() + _APPLYING_S
                        self._another_round = True
                        await self._look()
                if not looked and self._waiters:
                    await self._look_up()
            except JobError as error:  # the store is down: it may come back
                down = error
                await asyncio.sleep(_IDLE_LOOK_S)
            except Exception:  # noqa: BLE001 - it goes on: nobody else looks
                _log.warning("jobs are not looked at", exc_info=True)
                await asyncio.sleep(_IDLE_LOOK_S)
            try:  # also if what has come cannot be looked at
                if time.monotonic() >= due_at:
                    due_at = time.monotonic() + _DUE_S
                    await self._do_what_is_due()
            except JobError as error:
                down = error
            except Exception:  # noqa: BLE001 - it goes on
                _log.warning("jobs that are due are not looked at", exc_info=True)
            if down is None:
                tell_at = 0.0
            elif time.monotonic() >= tell_at:  # a disk may be full for a night
                _log.warning("jobs are not looked at: %s", down, exc_info=None if tell_at else down.__cause__)
                tell_at = time.monotonic() + _TELL_S
            if time.monotonic() >= sweep_at:
                sweep_at = time.monotonic() + _SWEEP_S
                self._later(self._sweep)
            for turn in self._turns:
                if not turn.done():
                    turn.set_result(None)
            hears = self._unsubscribe is not None
            limit = _LOOK_S if (self._waiters or self._turns) and not hears else _IDLE_LOOK_S
            if hears and looked:  # writes come in crowds: what the next ones bring is looked at together
                await asyncio.sleep(_PAUSE_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit):  # not wait_for, which in Python 3.11 may swallow a cancel
                    await self._wake.wait()

    async def _subscribe(self) -> None:
        if self._unsubscribe is None and isinstance(self.store, Wakes):
            self._unsubscribe = await self._blocking(self.store.subscribe, self.wake)

    async def _look(self) -> None:
        """Something was written: take in deliveries, and tell those who wait."""
        until = time.monotonic() + _LOOKING_S
        while self._stuck < 20_000:
            # What cannot be applied here is not to be kept from who can, nor is what comes after it to wait.
            stuck = self._stuck
            limit, lease_s = _DELIVERIES + stuck, _APPLYING_S if not stuck else 0.0
            waiting = await self._blocking(partial(self.store.unapplied, limit=limit, lease_s=lease_s))
            applied = await self._apply(waiting)
            self._stuck = sum(one.learned is None for one in applied)
            if len(waiting) < limit and (lease_s or self._stuck == len(waiting)):
                break
            if time.monotonic() >= until:  # submits that are under way say so, and what is due is done, in between
                self._has_news()
                break
        if not self._waiters:
            self._cursors.clear()
        groups = dict(self._cursors)
        for group, after in groups.items():
            rows = await self._blocking(self.store.completed, group, (after[0] - _BACK_S, ""))
            for row in rows:
                self._resolve(row)
            if rows:
                self._cursors[group] = (rows[-1].resolved_s, rows[-1].id)
        await self._look_up()

    async def _look_up(self) -> None:
        """Some of those that somebody waits for, one by one: what the order of completion has not shown, since clocks differ."""
        if not self._round:
            if not self._another_round:
                return  # nothing was written since all of them were looked up
            self._another_round = False
            self._round = list(self._waiters)
        some, self._round = self._round[:_LOOKED_UP], self._round[_LOOKED_UP:]
        if some:
            states = await self._blocking(self.store.states, some)
            ended = [job for job, state in states.items() if state in TERMINAL]
            for row in await self._blocking(lambda: [self.store.get(job) for job in ended]) if ended else ():
                if row is not None:
                    self._resolve(row)

    async def _apply(self, waiting: Sequence[tuple[int, Delivery]]) -> list[Applied]:
        """Take in deliveries: those of one job in order, those of several at once, so that one commit holds many."""
        shares: dict[int, list[tuple[int, Delivery]]] = {}
        for number, delivery in waiting:
            of = hash(delivery.job or delivery.provider_id) % _APPLIERS
            shares.setdefault(of, []).append((number, delivery))

        async def apply(share: list[tuple[int, Delivery]]) -> list[Applied]:
            applied = await self._blocking(
                lambda: apply_deliveries(self.store, share, self.codec_for, now_s=time.time())
            )
            for one in applied:
                if one.learned is not None:
                    self._tell.delivery(one.delivery, one.learned)
                    self._took(one.learned, by_webhook=True)
            return applied

        answers = await asyncio.gather(*map(apply, shares.values()))
        return [one for applied in answers for one in applied]

    def _took(self, learned: Learned, *, by_webhook: bool = False) -> None:
        """Something was learned: count it, and tell those who wait."""
        row = learned.row
        self._leased.pop(row.id, None)
        if learned.resolved:
            self._tell.resolved(row)
            if "old_attempt" in learned.flags and row.provider_id is not None:
                self._later(self._stop, row)  # the attempt that is not needed any more
            party = (row.origin, row.dialect)
            if row.state == "succeeded" and row.submitted_s:
                self._durations.add((row.origin, row.model, row.operation), row.resolved_s - row.submitted_s)
            if by_webhook:
                self._overdue[party] = 0
            elif row.resolved_by == "poll" and row.mode == "webhook" and "fetch" not in row.flags:
                self._overdue[party] = self._overdue.get(party, 0) + 1
                if self._overdue[party] == _DISTRUST:
                    _log.warning(
                        "%d jobs of %s in a row have ended without a webhook: is the receiver reached? They are polled now "
                        "(`spanwire jobs check` tries the public URL)",
                        _DISTRUST,
                        row.endpoint,
                    )
                    self._tell.count("overdue", row)
        if row.state in TERMINAL:
            self._resolve(row)
        elif "fetch" in row.flags and row.poll_s <= time.time():
            self._wake.set()
            party_of = self._parties.get((row.origin, row.dialect))
            if party_of is not None:
                self._about(row, self._ask, party_of)

    def _resolve(self, row: JobRow) -> None:
        for future in self._waiters.get(row.id, ()):
            if not future.done():
                future.set_result(row)

    # --- what is due ----------------------------------------------------------------------------------------------------

    async def _do_what_is_due(self) -> None:
        now_s = time.time()
        for job, until_s in list(self._submitting.items()):
            if until_s - now_s < _LEASE_S / 2:
                self._submitting[job] = now_s + _LEASE_S
                self._later(self._renew, job)
        self._leased = {job: held for job, held in self._leased.items() if held[0] > now_s}
        self._act([row for _, row in self._leased.values()], now_s)  # before those that are taken now
        room = _DUE - len(self._leased)
        all_taken = True
        if self._parties and room > 0:
            leased = partial(self.store.due, parties=list(self._parties), lease_s=_TAKEN_S)
            taken = await self._blocking(leased, now_s, room)
            all_taken = len(taken) < room
            self._act(taken, now_s, held_until_s=now_s + _TAKEN_S)
        if now_s >= self._others_s:
            # Of others, only what anybody can do: a deadline that has come, a submitter that has died.
            rows = await self._blocking(self.store.due, now_s, min(_DUE + len(self._skipped), 20_000))
            self._act(rows, now_s, only_others=not all_taken)
            self._others_s = now_s + len(self._skipped) / 1000 + (0.0 if all_taken else _TAKEN_S)

    def _act(
        self, rows: Sequence[JobRow], now_s: float, *, held_until_s: float = 0.0, only_others: bool = False
    ) -> None:
        for row in rows:
            if row.id in self._busy or row.id in self._submitting:
                continue
            party = self._parties.get((row.origin, row.dialect))
            if party is not None and only_others:
                continue  # another runner of this party may be about to take it
            if row.due_s and now_s >= row.due_s:
                self._about(row, self._expire, party)
            elif row.state == "submitting":
                self._about(row, self._orphaned, party)
            elif party is None:
                self._skipped.add(row.id)  # for a runner that has its endpoint
            elif row.state == "submit_unknown":
                self._about(row, self._after_grace, party)
            elif row.state == "created":
                self._about(row, self._begin_again, party)
            elif self._allowed(party, now_s):
                self._about(row, self._ask, party)
            elif held_until_s:
                self._leased[row.id] = (held_until_s, row)

    def _allowed(self, party: Party, now_s: float) -> bool:
        return self._bucket(party).take(now_s)

    def _bucket(self, party: Party) -> TokenBucket:
        key = (party.origin, party.endpoint.api_key)
        bucket = self._buckets.get(key)
        if bucket is None:
            rate = party.codec.polls_per_s * party.settings.poll_share
            bucket = self._buckets[key] = TokenBucket(rate, time.time())
        return bucket

    def _poll_at(self, party: Party, row: JobRow, now_s: float, since_s: float) -> float:
        mode = row.mode
        if self._overdue.get((row.origin, row.dialect), 0) >= _DISTRUST:
            mode = "poll"
        if not party.codec.polls:
            return 0.0
        return next_poll_s(
            now_s=now_s,
            since_s=since_s or now_s,
            mode=mode,
            floor_s=party.settings.poll_after_s,
            usual_s=self._durations.usual_s((row.origin, row.model, row.operation)),
            retention_s=party.codec.retention_s,
            dice=random.random(),  # noqa: S311
        )

    async def _renew(self, job: str) -> None:
        """Our submit is still under way: it may be waiting for a slot."""

        def step(row: JobRow) -> Advance:
            if row.state != "submitting":
                return Advance(None)
            return Advance(msgspec.structs.replace(row, poll_s=time.time() + _LEASE_S))

        await self._blocking(change, self.store, job, step)

    async def _orphaned(self, row: JobRow, party: Party | None) -> None:
        """Its submitter died, perhaps after it was sent."""
        grace_s = party.settings.grace_s if party is not None else 60.0
        at_s = time.time() + grace_s

        def step(known: JobRow) -> Advance:
            if known.attempt != row.attempt or known.poll_s > time.time():
                return Advance(None)
            return Advance(submit_unknown(known, retry_s=at_s))

        await self._blocking(change, self.store, row.id, step)

    async def _after_grace(self, row: JobRow, party: Party | None) -> None:
        """It has not shown up: look for it where that can be done, else submit it again: as the same attempt where that makes no
        second job, else under the next number."""
        assert party is not None
        try:
            seen = await self._seek(party, row)
        except SpanwireError as error:  # perhaps it was taken: it is not to be paid for twice
            _log.warning("job %s: it cannot be looked for at the provider: %s", row.id, error)
            wait_s = (error.retry_after_s or 0.0) if isinstance(error, ServerError) else 0.0
            await self._plan(row, time.time() + max(party.settings.grace_s, wait_s))
            return
        if seen is not None:
            await self._acknowledged(party, row, seen)
        elif party.codec.resubmits:
            await self._repeat(row, party)
        else:
            await self._next_attempt(row, party, "resubmitted")

    async def _repeat(self, row: JobRow, party: Party) -> None:
        def step(known: JobRow) -> Advance:
            if known.attempt != row.attempt or known.state != "submit_unknown":
                return Advance(None)
            return Advance(msgspec.structs.replace(known, state="created", poll_s=time.time()))

        learned = await self._blocking(change, self.store, row.id, step)
        if learned is not None and learned.row.state == "created":
            await self._submit_again(party, learned.row)

    async def _seek(self, party: Party, row: JobRow) -> Seen | None:
        """The job at the provider, if that can be searched, and has it."""
        codec = party.codec
        answers: list[HTTPAnswer] = []
        if isinstance(codec, Seeks):
            while (request := codec.seek(row, party.endpoint, answers)) is not None:
                answers.append((await self._carry(party, row, request, _as_it_is, "seek"))[0])
            if answers:
                return codec.sought(row, answers)
        return None

    async def _next_attempt(self, row: JobRow, party: Party, why: str) -> None:
        def step(known: JobRow) -> Advance:
            if known.attempt != row.attempt or known.state != row.state:
                return Advance(None)
            made = next_attempt(known, why=why, now_s=time.time())
            if made is None:
                return last_word(known, code=None, message=NO_INPUT, now_s=time.time())
            return Advance(made)

        learned = await self._blocking(change, self.store, row.id, step)
        if learned is None:
            return
        self._took(learned)
        if learned.row.state == "created":
            self._tell.count("resubmitted", row)
            if row.provider_id is not None:
                self._later(self._stop, row)
            await self._submit_again(party, learned.row)

    async def _begin_again(self, row: JobRow, party: Party | None) -> None:
        assert party is not None
        await self._submit_again(party, row, held=True)

    async def _expire(self, row: JobRow, party: Party | None) -> None:
        """Its deadline has come. Once more it is asked for: what was never delivered may be there."""
        if party is not None and party.codec.polls and row.provider_id is not None:
            with contextlib.suppress(SpanwireError, TimeoutError):
                async with asyncio.timeout(_LAST_BATCH_ASK_S if row.operation == "batch" else _LAST_ASK_S):
                    await self._ask(row, party)
        learned = await self._blocking(change, self.store, row.id, lambda row: expire(row, now_s=time.time()))
        if learned is not None:
            self._took(learned)
            if learned.resolved:
                await self._stop(learned.row)

    async def _ask(self, row: JobRow, party: Party | None) -> None:
        """Ask the provider how it stands, or for the result that it has announced."""
        assert party is not None
        codec, now_s = party.codec, time.time()
        fetch = "fetch" in row.flags
        request = codec.result(row, party.endpoint) if fetch else codec.status(row, party.endpoint)
        again_s = self._poll_at(party, row, now_s, row.submitted_s)
        if request is None:
            await self._plan(row, again_s or row.due_s)
            return
        try:
            async with self._asks:
                seen = await self._asked(party, row, request)
                if seen.fetch and seen.body is None and seen.state in TERMINAL:
                    known = msgspec.structs.replace(row, urls={**row.urls, **seen.urls})
                    if row.operation == "batch" and isinstance(codec, BatchCodec):
                        seen = await self._fetched(party, codec, known, seen)
                    elif not fetch and (more := codec.result(known, party.endpoint)) is not None:
                        seen = await self._asked(party, known, more)
        except SpanwireError as error:
            wait_s = error.retry_after_s if isinstance(error, ServerError) else None
            if wait_s is not None:
                self._bucket(party).pause(now_s + wait_s)
            level = logging.WARNING if isinstance(error, MessageTooBig) else logging.INFO
            _log.log(level, "job %s: its status cannot be asked for: %s", row.id, error)
            await self._plan(row, max(again_s or now_s + 60.0, now_s + (wait_s or 0.0)))
            return
        if seen.retry_after_s is not None:
            again_s = max(again_s, now_s + seen.retry_after_s)
        if seen.state == "succeeded" and seen.body is None:
            seen = msgspec.structs.replace(seen, state="lost", message="it is done, and its output is gone")
        seen = msgspec.structs.replace(seen, fetch=False)  # it was asked for: no more comes
        if seen.state in ("lost", "expired"):  # unless it is here already
            await self._apply_for(row)
        if seen.state == "lost" and party.settings.on_lost == "resubmit" and row.input:
            await self._next_attempt(row, party, "lost")
            return
        learned = await self._blocking(
            lambda: learn(self.store, row.id, seen, by="poll", now_s=time.time(), attempt=row.attempt)
        )
        if learned is None:
            return
        self._took(learned, by_webhook=fetch)  # which was thin
        if learned.row.state in OPEN:
            await self._plan(row, again_s or row.due_s)

    async def _fetched(self, party: Party, codec: BatchCodec, row: JobRow, seen: Seen) -> Seen:
        """The result of a batch: its files, which the status has named."""
        requests = codec.fetches(row, party.endpoint)
        if not requests:
            return seen
        answers = [(await self._carry(party, row, request, _as_it_is, "result"))[0] for request in requests]
        return await self._blocking(lambda: codec.fetched(row, seen, _names(row), answers))

    async def _ask_late(self, row: JobRow) -> JobRow:
        """What a batch that was given up had answered until then: no word comes of it, and it is paid for."""
        party = self._parties.get((row.origin, row.dialect))
        request = party.codec.status(row, party.endpoint) if party is not None else None
        if party is None or request is None or not isinstance(codec := party.codec, BatchCodec):
            return row
        seen = await self._asked(party, row, request)
        if seen.fetch and seen.state in TERMINAL:
            known = msgspec.structs.replace(row, urls={**row.urls, **seen.urls})
            found = await self._fetched(party, codec, known, seen)
            learned = await self._blocking(lambda: learn(self.store, row.id, found, by="poll", now_s=time.time()))
            return row if learned is None else learned.row
        return row

    async def _apply_for(self, row: JobRow) -> None:
        waiting = await self._blocking(lambda: self.store.unapplied(job=row.id))
        if not waiting and row.provider_id is not None:
            waiting = await self._blocking(lambda: self.store.unapplied(provider=(row.dialect, row.provider_id or "")))
        if waiting:
            await self._apply(waiting)

    async def _asked(self, party: Party, row: JobRow, request: HTTPRequest) -> Seen:
        read = party.codec.told
        return (await self._carry(party, row, request, read, "status"))[0]

    async def _carry(
        self, party: Party, row: JobRow, request: HTTPRequest, read: Callable[[HTTPAnswer], _T], operation: str
    ) -> tuple[_T, JobRun]:
        return await carry(
            self.state,
            party.prepared,
            party.endpoint,
            request,
            read,
            operation=operation,
            model=row.model,
            check_url=party.settings.check_url,
        )

    async def _plan(self, row: JobRow, at_s: float) -> None:
        """When to ask next; ``row``: as it was when it was asked for. What was planned meanwhile, since a webhook says that there
        is something to ask for, is not put off."""

        def step(known: JobRow) -> Advance:
            if known.state not in OPEN or known.attempt != row.attempt or known.poll_s != row.poll_s:
                return Advance(None)
            return Advance(msgspec.structs.replace(known, poll_s=at_s))

        await self._blocking(change, self.store, row.id, step)

    async def _stop(self, row: JobRow) -> None:
        """Ask the provider to stop, as well as it can."""
        party = self._parties.get((row.origin, row.dialect))
        if party is None:
            return
        with contextlib.suppress(SpanwireError, TimeoutError):
            async with asyncio.timeout(10.0):
                if row.provider_id is None and (seen := await self._seek(party, row)) is not None:
                    row = msgspec.structs.replace(row, provider_id=seen.provider_id)
                request = party.codec.cancel(row, party.endpoint)
                if request is None:
                    return
                await self._carry(party, row, request, lambda answer: answer.status, "cancel")

    async def _sweep(self) -> None:
        await self._blocking(self.store.sweep, time.time())

    # --- inner ----------------------------------------------------------------------------------------------------------

    async def have_receiver(self, party: Party) -> None:
        """Start the receiver of that endpoint, if it has one in this process. Raises ConfigurationError."""
        start, where = party.settings.receiver, party.settings.receiver_at
        if start is None or where in self._receivers:
            return
        async with self._receiver_lock:
            if where not in self._receivers:
                codecs = self.state.manager.registry.codecs_of(party.prepared.spec.name)
                receiver = await self._blocking(start, self.store, codecs, self.wake)
                if isinstance(receiver, Heard):
                    receiver.hear(self._tell.webhook)
                self._receivers[where] = receiver

    async def _decoded(self, codec: JobCodec, row: JobRow) -> Reply | Embeddings | BatchReply:
        body = await self._blocking(self.store.body, row.result)
        reply: Reply | Embeddings | BatchReply
        try:
            if row.operation == "batch" and isinstance(codec, BatchCodec):
                reply = await self._blocking(codec.replies, body)
                for item in reply.items.values():
                    if isinstance(item, SpanwireError):
                        item.endpoint = item.endpoint or row.endpoint
                    if isinstance(item, JobError):
                        item.job = item.job or row.id
            else:
                reply = codec.reply(row.operation, body)
        except SpanwireError as error:
            if error.endpoint is None:
                error.endpoint = row.endpoint
            raise
        timeline = self._tell.timeline(row)
        return msgspec.structs.replace(reply, timeline=timeline)

    async def _blocking(self, function: Callable[..., _T], *arguments: Any) -> _T:
        if self.closed:
            raise _closed()
        try:
            future = self.state.loop.run_in_executor(self._threads, function, *arguments)
        except RuntimeError as error:  # the interpreter is on its way out
            raise _closed() from error
        return await future

    def _about(
        self, row: JobRow, do: Callable[[JobRow, Party | None], Coroutine[Any, Any, None]], party: Party | None
    ) -> None:
        """Do something about a job, unless something is being done."""
        if row.id in self._busy:
            return
        self._busy.add(row.id)
        self._leased.pop(row.id, None)

        async def alone() -> None:
            try:
                await do(row, party)
            finally:
                self._busy.discard(row.id)

        self._task(self._logged(alone()))

    def _later(self, do: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        self._task(self._logged(do(*arguments)))

    @staticmethod
    async def _logged(doing: Coroutine[Any, Any, None]) -> None:
        try:
            await doing
        except SpanwireError as error:
            _log.warning("a job could not be looked after: %s", error)
        except Exception:  # noqa: BLE001 - one job's trouble is not another's
            _log.warning("a job could not be looked after", exc_info=True)

    def _task(self, doing: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        # It outlives the call that has started it, and is none of its spans'.
        task = self.state.loop.create_task(doing, context=contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @staticmethod
    def _dialect(party: Party) -> str:
        assert party.prepared.dialect is not None
        return party.prepared.dialect.name


def _is_about_the_call(error: SpanwireError) -> bool:
    """Whether a submit was refused for what is in it: else the next one would be refused as well, or this one is not later."""
    if error.retryable or isinstance(error, AuthenticationFailed):
        return False
    return isinstance(error, (ServerError, ConfigurationError, ProtocolError))


def _code_of(error: SpanwireError) -> str | None:
    """What the row of a refused submit keeps of its error, so that whoever reads it later gets one of the same class."""
    if not isinstance(error, ServerError):
        return None
    code = error.status if error.code is None else error.code
    return None if code is None else str(code)


def failure_of(codec: JobCodec, row: JobRow) -> SpanwireError:
    """The error of a job that has ended, and not well."""
    message = row.message or ""
    error: SpanwireError
    if row.state == "failed":
        made = codec.failure(row)
        error = made if made is not None else server_error(message or "the job failed", code=row.code)
    elif row.state == "cancelled":
        error = JobCancelled(f"the job was cancelled{message and f': {message}'}", job=row.id)
    elif row.state == "lost":
        error = JobLost(f"the job's output is gone{message and f': {message}'}", job=row.id)
    else:
        error = JobExpired(f"the job expired{message and f': {message}'}", job=row.id)
    error.endpoint = error.endpoint or row.endpoint
    return error


def _encode(call: Call) -> bytes:
    """What is needed to submit it again. Without its headers: they may hold keys."""
    try:
        return msgspec.json.encode([call.operation, call.model, call.body])
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"the call cannot be written as JSON: {error}") from error


def _decode(row: JobRow) -> Call:
    operation, model, body = msgspec.json.decode(row.input)
    return Call(operation, model, body)


class _Named(msgspec.Struct):
    custom_id: str


class _Batch(msgspec.Struct):
    requests: list[_Named]


_decode_names = msgspec.json.Decoder(tuple[str, str, _Batch]).decode


def _names(row: JobRow) -> list[str]:
    """Of the calls in a batch; none once its input is gone."""
    return [one.custom_id for one in _decode_names(row.input)[2].requests] if row.input else []


def _as_it_is(answer: HTTPAnswer) -> HTTPAnswer:
    return answer


def _closed() -> SpanwireError:
    return ConnectionFailed(
        "the manager was closed; its jobs go on in the store: manager.jobs.attach(id)", retryable=False
    )
