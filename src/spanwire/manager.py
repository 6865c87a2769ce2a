"""The async shell that joins them: :class:`ConnectionManager`, its :class:`Stream`, and the process's default manager.

Connections belong to the event loop that made them. A manager may be used from several loops, one after the other or at
once: it keeps a :class:`LoopState` for each, which closes with its loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Hashable, Iterable, Mapping
from functools import lru_cache
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakSet

import msgspec

from .admission import slots_for
from .calls import Call, Chunk, Embeddings, Reply
from .endpoint import Endpoint, Retries, Timeouts, check_headers
from .errors import ConfigurationError, ConnectionFailed, ProtocolError, SpanwireError
from .plugins import Registry
from .pool import Dial, Member, Pool
from .run import Prepared, Run, resolve_key
from .session import Session, SessionRun, with_model
from .telemetry import Telemetry
from .timeline import Timeline
from .transport import Attempt
from .watch import Watch

if TYPE_CHECKING:
    from .jobs.bulk.bulk import Bulk
    from .jobs.job import Job, Jobs
    from .jobs.runner import JobRunner

__all__ = ["ConnectionManager", "LoopState", "Stream", "default_manager"]

#: More servers than a process asks for their times.
_REFUSALS_KEPT = 4096


class LoopState:
    """Everything of one manager that belongs to one event loop."""

    def __init__(self, manager: ConnectionManager, loop: asyncio.AbstractEventLoop) -> None:
        self.manager = manager
        self.loop = loop
        self.pools: dict[Hashable, Pool] = {}
        self.runs: set[Run] = set()
        self.jobs: dict[object, JobRunner] = {}  # by store
        self._tasks: set[asyncio.Task[Any]] = set()
        self.watch = Watch(loop, self.runs)
        self._abandoned: deque[Run] = deque()
        self._guard: AsyncGenerator[None, None] | None = None
        self.closed = False
        self.parked = False  # it belongs to the process that this one was forked from
        self.ending = loop in manager._ending  # the loop is being shut down: nobody would close what is kept

    @property
    def guarded(self) -> bool:
        """Whether :meth:`guard` was called."""
        return self._guard is not None or self.ending

    async def guard(self) -> None:
        """Have this state closed when the loop is: ``loop.shutdown_asyncgens()`` closes the generator."""

        async def wait_for_the_end() -> AsyncGenerator[None, None]:
            try:
                yield
            finally:
                if not self.closed:
                    self.manager._ending.add(self.loop)
                await self.aclose()

        self._guard = wait_for_the_end()
        await anext(self._guard)

    def pool_for(self, prepared: Prepared, endpoint: Endpoint) -> Pool:
        """The pool that this endpoint's connections are in."""
        key = (prepared.spec.name, prepared.key)
        pool = self.pools.get(key)
        if pool is None:
            telemetry = self.manager.telemetry
            transport = prepared.spec.name

            def on_connect(attempt: Attempt, dial: Dial, member: Member | None, error: SpanwireError | None) -> None:
                if member is not None and getattr(member.connection, "self_pooling", False):
                    return  # nothing was connected: it will do that by itself
                if telemetry is not None:
                    protocol = member.connection.protocol if member is not None else None
                    context = telemetry.connected(attempt.endpoint, transport, dial, protocol, error)
                    if member is not None:
                        member.context = context

            pools = self.pools  # not `self`: a timer of the pool must not keep the manager alive

            def on_empty() -> None:
                pools.pop(key, None)

            pool = self.pools[key] = Pool(
                prepared.transport,
                self.loop,
                name=self.manager.registry.owner(prepared.spec),
                on_connect=on_connect,
                on_empty=on_empty,
            )
        return pool

    def later(self, doing: Coroutine[Any, Any, object]) -> None:
        """Have something done for a caller that has gone; closing this state waits for it."""
        task = self.loop.create_task(_quietly(doing), context=contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def abandon(self, run: Run) -> None:
        """A stream was dropped without being closed. May be called from any thread, inside the garbage collector: only
        leaves a note for the loop."""
        if self.parked:
            return
        self._abandoned.append(run)
        with contextlib.suppress(RuntimeError):  # the loop is closed: its guard has ended the call
            self.loop.call_soon_threadsafe(self._sweep)

    def _sweep(self) -> None:
        while self._abandoned:
            self._abandoned.popleft().leave("abandoned")

    def _end_runs(self) -> None:
        for run in list(self.runs):
            error = ConnectionFailed(
                "the manager was closed during the call", endpoint=run.endpoint.address, retryable=False
            )
            run.end(error)

    async def aclose(self) -> None:
        """End what runs, close what is open."""
        self.closed = True
        if self.parked:
            return
        self._sweep()
        if self.jobs or self._tasks:
            await self._close_jobs()
        self._end_runs()
        self.watch.close()
        pools, self.pools = list(self.pools.values()), {}
        try:
            await asyncio.gather(*(pool.aclose() for pool in pools))
        except BaseException:
            for pool in pools:
                pool.abort()
            raise
        guard, self._guard = self._guard, None
        if guard is not None:
            with contextlib.suppress(RuntimeError):  # it is the guard that has called us
                await guard.aclose()

    async def _close_jobs(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)
        runners, self.jobs = list(self.jobs.values()), {}
        for runner in runners:
            await runner.aclose()

    def abort(self) -> None:
        """The same at once, without awaiting anything."""
        self.closed = True
        if self.parked:
            return
        runners, self.jobs = list(self.jobs.values()), {}
        for runner in runners:
            runner.abort()
        self._end_runs()
        self.watch.close()
        pools, self.pools = list(self.pools.values()), {}
        for pool in pools:
            pool.abort()


async def _quietly(doing: Coroutine[Any, Any, object]) -> None:
    with contextlib.suppress(SpanwireError):
        await doing


class ConnectionManager:
    """Carries calls over connections that it keeps, and tells where their time went.

    Use it as ``async with ConnectionManager() as manager``, or keep one for the process: what it holds on an event loop
    is closed with that loop.

    Args:
        plugins: objects with hooks (see :mod:`spanwire.hookspecs`), besides the installed ones.
        telemetry: settings of spans and metrics; None turns them off. By default on: without an OpenTelemetry SDK in
            the process they cost next to nothing.

    Raises:
        PluginError, PluginConflict: one of ``plugins`` breaks the contract.
    """

    def __init__(
        self, *, plugins: Iterable[object] = (), telemetry: Telemetry | msgspec.UnsetType | None = msgspec.UNSET
    ) -> None:
        from .timing import Readers  # noqa: F401 - its tables are milliseconds, for which the first call need not wait

        self.registry = Registry(plugins)
        #: Servers that refused the fields by which they are asked for their times.
        self.timing_refused: set[tuple[object, ...]] = set()
        self.telemetry = Telemetry() if telemetry is msgspec.UNSET else telemetry
        self._jobs: Jobs | None = None
        self._states: dict[int, LoopState] = {}
        self._ending: WeakSet[asyncio.AbstractEventLoop] = WeakSet()
        self._lock = threading.Lock()
        _managers.add(self)

    def __reduce__(self) -> tuple[object, ...]:
        raise ConfigurationError(
            "a connection manager cannot be pickled or copied, connections belong to one process: send the endpoint, and make "
            "a manager where it is used"
        )

    def __repr__(self) -> str:
        pools = [pool for state in list(self._states.values()) for pool in list(state.pools.values())]
        runs = sum(len(state.runs) for state in list(self._states.values()))
        connections = sum(len(pool.state.members) for pool in pools)
        return f"ConnectionManager({connections} connections, {runs} calls)"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # --- calls ------------------------------------------------------------------------------------------------------

    def stream(
        self,
        endpoint: Endpoint | str,
        call: Call,
        *,
        timeouts: Timeouts | None = None,
        retries: Retries | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Stream:
        """A streamed call, as an async context manager that gives chunks.

        ::

            async with manager.stream(endpoint, call) as stream:
                async for chunk in stream:
                    print(chunk.text, end="")
            print(stream.timeline)

        Nothing is sent before the block is entered. Leaving it early tells the server to stop.

        Args:
            endpoint: where to; a URL is taken as ``Endpoint(url)``.
            call: what to ask.
            timeouts, retries: instead of the endpoint's.
            headers: sent with this call only; they win over the call's own.

        Raises:
            ConfigurationError: at once for a bad endpoint, call or header.
            SpanwireError: from the block and the iteration, see :mod:`spanwire.errors`.
        """
        return Stream(self, _endpoint(endpoint), _call(call, "stream"), timeouts, retries, headers)

    async def complete(
        self,
        endpoint: Endpoint | str,
        call: Call,
        *,
        timeouts: Timeouts | None = None,
        retries: Retries | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """A call that is answered as a whole. Arguments and errors as of :meth:`stream`."""
        run = self._run(_endpoint(endpoint), _call(call, "complete"), timeouts, retries, headers, streamed=False)
        await run.open()
        await run.drain()
        return run.reply()

    async def embed(
        self,
        endpoint: Endpoint | str,
        call: Call,
        *,
        timeouts: Timeouts | None = None,
        retries: Retries | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Embeddings:
        """Vectors for an embeddings call. Arguments and errors as of :meth:`stream`."""
        run = self._run(_endpoint(endpoint), _call(call, "embed"), timeouts, retries, headers, streamed=False)
        await run.open()
        await run.drain()
        found = run.items[0] if run.items else None
        if not isinstance(found, Embeddings):
            raise ProtocolError("the answer has no embeddings", endpoint=run.endpoint.address)
        headers_back = run.head.headers if run.head is not None else {}
        return msgspec.structs.replace(found, headers=headers_back, timeline=run.timeline)

    def session(
        self,
        endpoint: Endpoint | str,
        *,
        model: str | None = None,
        timeouts: Timeouts | None = None,
        retries: Retries | None = None,
    ) -> Session:
        """A session in both directions, as an async context manager: send events, and read those that come.

        ::

            async with manager.session(endpoint, model="gpt-realtime") as session:
                await session.send({"type": "response.create"})
                async for event in session:
                    ...

        It has a connection of its own (over gRPC a stream of one), and a slot of ``Limits.max_concurrent`` while it lasts.
        Each of its turns is a call of its own on spans, in metrics and for observers; the session itself is none.

        Args:
            endpoint: where to; a URL is taken as ``Endpoint(url)``. Its ``dialect`` names the schema.
            model: for schemas whose address names one: sent as ``?model=``, which ``Endpoint.query`` may say as well.
            timeouts: instead of the endpoint's: ``connect_s`` holds for the opening, ``total_s`` for the whole session.
            retries: instead of the endpoint's; for the opening. A session that breaks is not made again.

        Raises:
            ConfigurationError: at once for a bad endpoint, or one whose transport has no sessions.
            SpanwireError: from the block and the iteration.
        """
        endpoint = _endpoint(endpoint)
        if model is not None:
            endpoint = with_model(endpoint, model)
        for name, given, kind in (("timeouts", timeouts, Timeouts), ("retries", retries, Retries)):
            if given is not None and not isinstance(given, kind):
                raise ConfigurationError(
                    f"{name}= must be spanwire.{kind.__name__}(...) or None, not {type(given).__name__}",
                    endpoint=endpoint.address,
                )
        prepared = self._prepare_session(endpoint)

        def begin() -> SessionRun:
            return SessionRun(
                self.state(),
                prepared,
                endpoint,
                timeouts=timeouts if timeouts is not None else endpoint.timeouts,
                retries=retries if retries is not None else endpoint.retries,
            )

        return Session(begin)

    async def submit(
        self,
        endpoint: Endpoint | str,
        call: Call,
        *,
        group: str = "",
        deadline_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Job:
        """Submit a call that is answered later, and return when the server has acknowledged it.

        ::

            job = await manager.submit(endpoint, call)
            ...
            reply = await job  # here; or in another process: await manager.jobs.attach(job.id)

        The job is in the endpoint's store before it is sent, and is resolved once, whatever crashes meanwhile. A submit to
        which no answer came is a job too: it is given some time to show up, and then submitted again.

        Args:
            endpoint: one of a transport with jobs: ``Endpoint(url, transport="webhook", dialect=..., options=...)``.
            call: what to ask.
            group: a name for jobs that belong together, for ``manager.jobs.completed(group)``.
            deadline_s: how long it may take; then it is ``expired``. Default: the endpoint's, a day.
            headers: sent with the submit only. They are not kept: a further attempt goes without them.

        Raises:
            ConfigurationError: at once for a bad endpoint or call; nothing was sent.
            SpanwireError: the server has not taken it.
        """
        endpoint = _endpoint(endpoint)
        given: Any = call
        if not isinstance(given, Call):
            raise ConfigurationError(
                f"the call must be made by Call.chat(...) or Call.embeddings(...), not {type(given).__name__}"
            )
        prepared = self._prepare(endpoint)
        merged = self._headers_of(prepared, endpoint, call, headers)
        return await self.jobs.submit(prepared, endpoint, call, group=group, deadline_s=deadline_s, headers=merged)

    def submit_many(
        self,
        endpoint: Endpoint | str,
        calls: Iterable[Call],
        *,
        group: str = "",
        window: int | None = None,
        deadline_s: float | None = None,
        headers: Mapping[str, str] | None = None,
        shard: int | None = None,
        shard_bytes: int | None = None,
        batch: bool | None = None,
        retry_failed: bool = False,
    ) -> Bulk:
        """Submit many calls, and give their results in the order in which they end.

        ::

            async with manager.submit_many(endpoint, calls, group="texts-1") as bulk:
                async for result in bulk:
                    print(result.index, result.reply or result.error)

        As few jobs as the provider allows: batches where it has them, else the inputs of embeddings calls that follow one
        another in one call, else one call a job. A job that fails and may have failed for one of its calls is split, until
        the bad ones fail alone. One call's failure ends nothing else. See ``docs/bulk.md``.

        Args:
            endpoint: as of :meth:`submit`.
            calls: any iterable of calls; one that can be read again, such as a list or a
                :class:`~spanwire.jobs.bulk.JSONLFile`, is not copied.
            group: with it the bulk can be taken up again: the same calls, group and endpoint give the results of what has ended
                and submit what is missing, in any process. Without it what is open is cancelled when it is left, and nothing
                is ever taken up: the same prompt gives another answer.
            window: most jobs that are open at once. Default 1,000, or less where results may be lost otherwise.
            deadline_s: of each job, from its own submit.
            headers: sent with each submit.
            shard: most inputs of a merged call (default 100, or 1 where the endpoint's option ``input`` says what the model
                gets), and calls of a batch.
            shard_bytes: most bytes of either. Default 256 KiB, and 32 MiB for a batch.
            batch: False: no batches. True: only in batches; None: where the provider has them.
            retry_failed: submit again what has failed, expired or is lost.

        Raises:
            ConfigurationError: at once for a bad endpoint or argument.
            SpanwireError: from the iteration, for what is not about one call.
        """
        endpoint = _endpoint(endpoint)
        return self.jobs.submit_many(
            self._prepare(endpoint),
            endpoint,
            calls,
            group=group,
            window=window,
            deadline_s=deadline_s,
            headers=headers,
            shard=shard,
            shard_bytes=shard_bytes,
            batch=batch,
            retry_failed=retry_failed,
        )

    def answers_later(self, endpoint: Endpoint | str) -> bool:
        """Whether calls to this endpoint are jobs, for :meth:`submit` and :meth:`submit_many`. Raises ConfigurationError."""
        return self._prepare(_endpoint(endpoint)).jobs

    @property
    def jobs(self) -> Jobs:
        """The jobs of this manager's stores: ``attach(id)``, ``completed(group)``, ``ended(group)``."""
        if self._jobs is None:
            from .jobs.job import Jobs  # with the first job

            with self._lock:
                self._jobs = self._jobs or Jobs(self)
        return self._jobs

    async def warm(self, endpoint: Endpoint | str, n: int = 1) -> None:
        """Have connections ready for ``n`` calls at once: pays DNS, TCP and TLS before the first call.

        Raises:
            ConfigurationError: a bad endpoint, or ``n`` is not a number from 1.
            ConnectionFailed, CallTimeout: a connection could not be made.
        """
        endpoint = _endpoint(endpoint)
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ConfigurationError(f"warm(n={n!r:.20}): the number of calls to be ready for, from 1")
        prepared = self._prepare(endpoint)
        state = self.state()
        if not state.guarded:
            await state.guard()
        key = await resolve_key(endpoint)
        attempt = Attempt(endpoint, timeouts=endpoint.timeouts, dialect=prepared.dialect, api_key=key)
        await state.pool_for(prepared, endpoint).warm(attempt, n)

    async def aclose(self) -> None:
        """End the calls that run, and close every connection, of this loop and of any other. May be used again."""
        with self._lock:
            states, self._states = list(self._states.values()), {}
        here = asyncio.get_running_loop()
        for state in states:
            if state.loop is here:
                await state.aclose()
            elif state.loop.is_closed() or not state.loop.is_running():
                state.abort()
            else:
                with contextlib.suppress(RuntimeError):
                    state.loop.call_soon_threadsafe(state.abort)
        if self._jobs is not None:
            await asyncio.to_thread(self._jobs.close)
        if self.registry.keeps_back:
            try:
                await asyncio.to_thread(self.registry.flush)
            except RuntimeError:  # the process is ending and starts no threads: nothing else runs that could be held up
                self.registry.flush()

    # --- inner ------------------------------------------------------------------------------------------------------

    def state(self) -> LoopState:
        """The state of the running loop; drops those of loops that are closed."""
        loop = asyncio.get_running_loop()
        state = self._states.get(id(loop))
        if state is not None and state.loop is loop and not state.closed:
            return state
        with self._lock:
            dead = [(key, other) for key, other in self._states.items() if other.loop.is_closed() or other.closed]
            for key, _ in dead:
                del self._states[key]
            state = self._states[id(loop)] = LoopState(self, loop)
        for _, other in dead:  # without the lock: it tells observers, who may use this manager
            other.abort()
        return state

    def remember_refusal(self, server: tuple[object, ...]) -> None:
        """Do not ask that server for its times again."""
        if len(self.timing_refused) >= _REFUSALS_KEPT:  # of a process that meets new servers for ever
            self.timing_refused.clear()
        self.timing_refused.add(server)

    def _prepare(self, endpoint: Endpoint) -> Prepared:
        cached: Prepared | None = endpoint.__dict__.get("_prepared")
        if cached is not None and cached.registry is self.registry and cached.forks == _forks:
            return cached
        spec = self.registry.spec_for(endpoint)
        transport = self.registry.transport(spec)
        dialect = self.registry.dialect_for(endpoint, spec)
        if dialect is not None and dialect.operations == {"session"}:
            raise ConfigurationError(
                f"dialect {dialect.name!r} is one of sessions: use manager.session(endpoint)", endpoint=endpoint.address
            )
        prepared = Prepared(
            self.registry,
            _forks,
            spec,
            transport,
            dialect,
            self.registry.key_for(endpoint, spec),
            slots_for(endpoint),
            getattr(transport, "prepare", None),
            "jobs" in spec.capabilities,
        )
        endpoint.__dict__["_prepared"] = prepared
        _ = self.registry.timing_readers  # loaded now, before the first call begins: its end may be the interpreter's
        return prepared

    def _prepare_session(self, endpoint: Endpoint) -> Prepared:
        cached: Prepared | None = endpoint.__dict__.get("_prepared_session")
        if cached is not None and cached.registry is self.registry and cached.forks == _forks:
            return cached
        spec = self.registry.spec_for(endpoint)
        transport = self.registry.transport(spec)
        dialect = self.registry.dialect_for(endpoint, spec, session=True)
        if "session" not in spec.capabilities or dialect is None or "session" not in dialect.operations:
            named = "" if dialect is None else f" with dialect {dialect.name!r}"
            raise ConfigurationError(
                f"transport {spec.name!r}{named} has no sessions; use a ws://, wss://, grpc:// or grpcs:// URL, and a dialect of "
                "sessions (`spanwire transports` lists them)",
                endpoint=endpoint.address,
            )
        key = ("session", dialect.name, self.registry.key_for(endpoint, spec))
        prepared = Prepared(self.registry, _forks, spec, transport, dialect, key, slots_for(endpoint))
        endpoint.__dict__["_prepared_session"] = prepared
        _ = self.registry.timing_readers
        return prepared

    def _run(
        self,
        endpoint: Endpoint,
        call: Call,
        timeouts: Timeouts | None,
        retries: Retries | None,
        headers: Mapping[str, str] | None,
        *,
        streamed: bool,
    ) -> Run:
        prepared = self._prepare(endpoint)
        for name, given, kind in (("timeouts", timeouts, Timeouts), ("retries", retries, Retries)):
            if given is not None and not isinstance(given, kind):
                raise ConfigurationError(
                    f"{name}= must be spanwire.{kind.__name__}(...) or None, not {type(given).__name__}",
                    endpoint=endpoint.address,
                )
        merged = self._headers_of(prepared, endpoint, call, headers)
        if prepared.jobs:
            return self._job_call(prepared, endpoint, call, timeouts, merged, streamed=streamed)
        return Run(
            self.state(),
            prepared,
            endpoint,
            call,
            streamed=streamed,
            timeouts=timeouts if timeouts is not None else endpoint.timeouts,
            retries=retries if retries is not None else endpoint.retries,
            headers=merged,
        )

    def _job_call(
        self,
        prepared: Prepared,
        endpoint: Endpoint,
        call: Call,
        timeouts: Timeouts | None,
        headers: Mapping[str, str],
        *,
        streamed: bool,
    ) -> Run:
        from .jobs.call import JobCall

        made: Any = JobCall(
            self.state(),
            prepared,
            endpoint,
            call,
            streamed=streamed,
            timeouts=timeouts if timeouts is not None else endpoint.timeouts,
            headers=headers,
        )
        run: Run = made  # it has what holders of a Run use
        return run

    def _headers_of(
        self, prepared: Prepared, endpoint: Endpoint, call: Call, headers: Mapping[str, str] | None
    ) -> Mapping[str, str]:
        """The call's own headers, names in lower case. Raises ConfigurationError for a call that its dialect cannot say."""
        dialect = prepared.dialect
        if dialect is not None and call.operation not in dialect.operations:
            raise ConfigurationError(
                f"dialect {dialect.name!r} has no operation {call.operation!r}; it has: {', '.join(sorted(dialect.operations))}",
                endpoint=endpoint.address,
            )
        merged = self.registry.request_metadata(call, endpoint)
        for more, where in ((call.headers, "Call.headers"), (headers, "headers=")):
            if more:
                check_headers(more, where)
                merged = {**merged, **{name.lower(): value for name, value in more.items()}}
        return merged

    def _after_fork(self) -> None:
        # The child must not touch its parent's sockets: closing them would take them out of the parent's epoll.
        _parked.append(self._states)
        for state in self._states.values():
            state.parked = True
        self._states = {}
        self._lock = threading.Lock()
        self.registry.after_fork()


class Stream:
    """A streamed call: a thin handle, so that dropping it is noticed. Made by :meth:`ConnectionManager.stream`."""

    __slots__ = ("__weakref__", "_arguments", "_manager", "_run")

    def __init__(
        self,
        manager: ConnectionManager,
        endpoint: Endpoint,
        call: Call,
        timeouts: Timeouts | None,
        retries: Retries | None,
        headers: Mapping[str, str] | None,
    ) -> None:
        self._manager = manager
        self._arguments = (endpoint, call, timeouts, retries, headers)
        self._run: Run | None = None
        manager._prepare(endpoint)  # a bad endpoint is told here, where it was given

    def __repr__(self) -> str:
        run = self._run
        state = "not entered" if run is None else "ended" if run.ended else "open"
        return f"<spanwire.Stream {state}>"

    async def __aenter__(self) -> Self:
        await self._open()
        return self

    async def _open(self) -> Run:
        if self._run is not None:
            raise RuntimeError("a stream is entered once: ask the manager for a new one")
        run = self._run = self._manager._run(*self._arguments, streamed=True)
        await run.open()
        return run

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._run is not None:
            cancelled = kind is not None and issubclass(kind, asyncio.CancelledError)
            self._run.leave("cancelled" if cancelled else "closed_by_caller")

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        run = self._run
        if run is None:
            run = await self._open()
        if run.batch:
            return run.batch.pop()
        items = await run.read()
        if not items:
            raise StopAsyncIteration
        if len(items) == 1:
            return items[0]  # type: ignore[return-value]
        run.batch = list(reversed(items))  # type: ignore[arg-type]
        return run.batch.pop()

    async def aclose(self) -> None:
        """Leave the call now; also from another task, whose pending read then ends. Does nothing if it has ended."""
        if self._run is not None:
            self._run.leave("closed_by_caller")

    def __del__(self) -> None:
        run = self._run
        if run is not None and run.opened and not run.ended:
            run.state.abandon(run)

    @property
    def timeline(self) -> Timeline:
        """Where the time went. Raises RuntimeError before the call has ended."""
        return self._entered().timeline

    @property
    def reply(self) -> Reply:
        """Everything that was read so far, joined."""
        return self._entered().reply()

    @property
    def headers(self) -> Mapping[str, str]:
        """The answer's headers, names in lower case; empty before they have come."""
        head = self._entered().head
        return head.headers if head is not None else {}

    def _entered(self) -> Run:
        if self._run is None:
            raise RuntimeError("the stream was not entered: use `async with manager.stream(...) as stream`")
        return self._run


def _endpoint(endpoint: Any) -> Endpoint:
    if isinstance(endpoint, Endpoint):
        return endpoint
    if isinstance(endpoint, str):
        return _endpoint_of(endpoint)
    raise ConfigurationError(
        f"the endpoint must be spanwire.Endpoint(url, ...) or a URL, not {type(endpoint).__name__}"
    )


@lru_cache(maxsize=256)
def _endpoint_of(url: str) -> Endpoint:
    return Endpoint(url)


def _call(call: Any, method: str) -> Call:
    if isinstance(call, Call):
        if call.operation == "batch":
            raise ConfigurationError(f"{method}() takes one call: a batch is a job, see manager.submit(endpoint, call)")
        if (call.operation == "embeddings") != (method == "embed"):
            wanted = "Call.embeddings(...)" if method == "embed" else "Call.chat(...); embed() is for embeddings"
            raise ConfigurationError(f"{method}() takes {wanted}, not a call of operation {call.operation!r}")
        return call
    raise ConfigurationError(
        f"the call must be made by Call.chat(...) or Call.embeddings(...), not {type(call).__name__}"
    )


_managers: WeakSet[ConnectionManager] = WeakSet()
_parked: list[object] = []
_forks = 0  # how often this process is a child's child: what was prepared before a fork is prepared again
_default: ConnectionManager | None = None
_default_lock = threading.Lock()


def default_manager() -> ConnectionManager:
    """The one manager that serves whoever is not given one: all of them share its connections."""
    global _default
    with _default_lock:
        if _default is None:
            _default = ConnectionManager()
        return _default


def _after_fork() -> None:
    global _default_lock, _forks
    _forks += 1
    _default_lock = threading.Lock()
    for manager in list(_managers):
        manager._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
