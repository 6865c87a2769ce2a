"""The same names for synchronous code: a facade over one event loop in a thread of its own.

There is one implementation, the async one. Every call hops to the loop thread; a stream hops once for each batch of
chunks, not once for each chunk. It works on threads whose own loop is running (notebooks): it blocks that thread, and
never deadlocks, since the work is done elsewhere.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec

from .calls import BatchReply, Call, Chunk, Embeddings, Reply, SessionEvent
from .endpoint import Endpoint, Retries, Timeouts
from .errors import ConfigurationError, ConnectionFailed, SpanwireError
from .manager import ConnectionManager, Stream, default_manager
from .session import Session
from .telemetry import Telemetry
from .timeline import Timeline

if TYPE_CHECKING:
    from .jobs.bulk.bulk import Bulk, BulkCounts, BulkResult
    from .jobs.contract import JobRow, Store
    from .jobs.job import Ended, Job

__all__ = [
    "SyncBulk",
    "SyncConnectionManager",
    "SyncJob",
    "SyncJobs",
    "SyncSession",
    "SyncStream",
    "default_sync_manager",
    "on_loop_thread",
]

_T = TypeVar("_T")
#: How long the interpreter's exit waits for the loop thread to close its connections, in seconds.
_EXIT_LIMIT_S = 2.0


class _LoopThread:
    """An event loop that runs in a daemon thread until the interpreter exits."""

    def __init__(self) -> None:
        self.loop = _new_loop()
        self._pid = os.getpid()
        self._stopping = False
        self._thread = threading.Thread(target=self._main, name="spanwire loop", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # since Python 3.12, while the interpreter exits
            self.loop.close()
            raise _closing() from error
        atexit.register(self._stop)

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            with contextlib.suppress(Exception):  # the interpreter is on its way out
                self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()

    def _stop(self) -> None:
        self._stopping = True
        if self._thread.is_alive() and not self.loop.is_closed():
            with contextlib.suppress(RuntimeError):
                self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(_EXIT_LIMIT_S)

    def is_ours(self) -> bool:
        """Whether it runs in this process: a forked child has only the thread that forked."""
        return self._pid == os.getpid()

    def call(self, function: Callable[..., Coroutine[Any, Any, _T]], *arguments: Any) -> _T:
        """Run a coroutine on the loop and wait for it. Its context is a copy of the caller's, so that spans nest."""
        if threading.current_thread() is self._thread:
            raise RuntimeError(
                "SyncConnectionManager was called on its own loop thread (from an observer or a hook?), where it could "
                "only wait for itself; use the async ConnectionManager there"
            )
        if not self.is_ours():
            raise ConnectionFailed(
                "the call was begun before this process was forked, and is its parent's", retryable=False
            )
        future: Future[_T] = Future()
        tasks: list[asyncio.Task[_T]] = []

        def start() -> None:
            task = self.loop.create_task(function(*arguments))
            tasks.append(task)
            task.add_done_callback(done)

        def done(task: asyncio.Task[_T]) -> None:
            if self._stopping:
                if not task.cancelled():
                    task.exception()  # looked at: else the loop logs that nobody did
                return  # only daemon threads wait at the interpreter's end: to wake them would be to let them complain
            if task.cancelled():
                future.set_exception(_closing())
            elif (error := task.exception()) is not None:
                future.set_exception(error)
            else:
                future.set_result(task.result())

        try:  # from here on Ctrl-C ends the call on the loop too
            try:
                self.loop.call_soon_threadsafe(start)
            except RuntimeError as error:
                raise _closing() from error
            return future.result()
        except BaseException:
            if not future.done():  # Ctrl-C while waiting: the call ends on the loop too
                with contextlib.suppress(RuntimeError):
                    self.loop.call_soon_threadsafe(lambda: [task.cancel() for task in tasks])
            raise


def _new_loop() -> asyncio.AbstractEventLoop:
    """The loop that SPANWIRE_LOOP names: ``asyncio``, which is the default, or ``uvloop``.

    uvloop takes a sixth off what paced tokens cost synchronous code, and nothing off a whole answer (measured).
    """
    name = os.environ.get("SPANWIRE_LOOP", "").strip().lower()
    if name in ("", "asyncio"):
        return asyncio.new_event_loop()
    if name != "uvloop":
        raise ConfigurationError(f"SPANWIRE_LOOP={name!r:.40}: it can be asyncio or uvloop")
    try:
        import uvloop
    except ImportError as error:
        raise ConfigurationError("SPANWIRE_LOOP=uvloop needs uvloop: pip install 'spanwire[uvloop]'") from error
    return uvloop.new_event_loop()


def _closing() -> SpanwireError:
    return ConnectionFailed("the interpreter is exiting, and the connections are closed", retryable=False)


_thread: _LoopThread | None = None
_thread_lock = threading.Lock()


def _loop_thread() -> _LoopThread:
    global _thread
    _refuse_gevent()  # each time: it may have patched meanwhile
    with _thread_lock:
        if _thread is None:
            _thread = _LoopThread()
        return _thread


def on_loop_thread() -> bool:
    """Whether the caller runs on the synchronous manager's own event loop: a transport asks it, to refuse what is bound
    to a loop of the user's."""
    return _thread is not None and threading.current_thread() is _thread._thread


def _refuse_gevent() -> None:
    """Where gevent has replaced threads, sockets or select, our loop would run on its hub, and wait for itself."""
    monkey = sys.modules.get("gevent.monkey")
    if monkey is not None and any(map(monkey.is_module_patched, ("threading", "socket", "select", "selectors"))):
        raise ConfigurationError(
            "SyncConnectionManager needs native threads and sockets, and gevent has replaced them in this process; make "
            "the calls in a process without monkey.patch_all(), or from asyncio with ConnectionManager"
        )


class SyncConnectionManager:
    """:class:`~spanwire.manager.ConnectionManager` for synchronous code. Safe to use from many threads.

    Args:
        manager: the async manager to run; its connections on the loop thread are shared with other facades of it. By
            default a new one is made with ``plugins`` and ``telemetry``.
        plugins, telemetry: as of ``ConnectionManager``.
    """

    def __init__(
        self,
        manager: ConnectionManager | None = None,
        *,
        plugins: Iterable[object] = (),
        telemetry: Telemetry | msgspec.UnsetType | None = msgspec.UNSET,
    ) -> None:
        self._manager = manager if manager is not None else ConnectionManager(plugins=plugins, telemetry=telemetry)

    def __repr__(self) -> str:
        return f"Sync{self._manager!r}"

    @property
    def manager(self) -> ConnectionManager:
        """The async manager below, for code that has both kinds of callers."""
        return self._manager

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stream(
        self,
        endpoint: Endpoint | str,
        call: Call,
        *,
        timeouts: Timeouts | None = None,
        retries: Retries | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> SyncStream:
        """A streamed call as a context manager that gives chunks; see ``ConnectionManager.stream``."""
        stream = self._manager.stream(endpoint, call, timeouts=timeouts, retries=retries, headers=headers)
        return SyncStream(stream, _loop_thread())

    def complete(
        self,
        endpoint: Endpoint | str,
        call: Call,
        *,
        timeouts: Timeouts | None = None,
        retries: Retries | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """A call that is answered as a whole; see ``ConnectionManager.complete``."""

        async def complete() -> Reply:
            return await self._manager.complete(endpoint, call, timeouts=timeouts, retries=retries, headers=headers)

        return _loop_thread().call(complete)

    def embed(
        self,
        endpoint: Endpoint | str,
        call: Call,
        *,
        timeouts: Timeouts | None = None,
        retries: Retries | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Embeddings:
        """Vectors for an embeddings call; see ``ConnectionManager.embed``."""

        async def embed() -> Embeddings:
            return await self._manager.embed(endpoint, call, timeouts=timeouts, retries=retries, headers=headers)

        return _loop_thread().call(embed)

    def session(
        self,
        endpoint: Endpoint | str,
        *,
        model: str | None = None,
        timeouts: Timeouts | None = None,
        retries: Retries | None = None,
    ) -> SyncSession:
        """A session in both directions as a context manager; see ``ConnectionManager.session``."""
        session = self._manager.session(endpoint, model=model, timeouts=timeouts, retries=retries)
        return SyncSession(session, _loop_thread())

    def submit(
        self,
        endpoint: Endpoint | str,
        call: Call,
        *,
        group: str = "",
        deadline_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> SyncJob:
        """Submit a call that is answered later; see ``ConnectionManager.submit``."""

        async def submit() -> Job:
            return await self._manager.submit(endpoint, call, group=group, deadline_s=deadline_s, headers=headers)

        thread = _loop_thread()
        return SyncJob(thread.call(submit), thread)

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
    ) -> SyncBulk:
        """Submit many calls, and iterate over their results; see ``ConnectionManager.submit_many``."""
        bulk = self._manager.submit_many(
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
        return SyncBulk(bulk, _loop_thread())

    def answers_later(self, endpoint: Endpoint | str) -> bool:
        """Whether calls to this endpoint are jobs; see ``ConnectionManager.answers_later``."""
        return self._manager.answers_later(endpoint)

    @property
    def jobs(self) -> SyncJobs:
        """The jobs of this manager's stores; see ``ConnectionManager.jobs``."""
        return SyncJobs(self._manager)

    def warm(self, endpoint: Endpoint | str, n: int = 1) -> None:
        """Have connections ready for ``n`` calls at once; see ``ConnectionManager.warm``."""
        _loop_thread().call(self._manager.warm, endpoint, n)

    def close(self) -> None:
        """End the calls that run, close every connection. May be used again."""
        _loop_thread().call(self._manager.aclose)


class SyncStream:
    """A streamed call for synchronous code. Made by :meth:`SyncConnectionManager.stream`."""

    __slots__ = ("_batch", "_stream", "_thread")

    def __init__(self, stream: Stream, thread: _LoopThread) -> None:
        self._stream = stream
        self._thread = thread
        self._batch: list[Chunk] = []  # in reverse: the next one is at the end

    def __repr__(self) -> str:
        return f"<spanwire.SyncStream of {self._stream!r}>"

    def __enter__(self) -> Self:
        self._thread.call(self._stream._open)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._batch = []
        self.close()

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        if not self._batch:
            run = self._stream._run
            if run is None:
                run = self._thread.call(self._stream._open)
            self._batch = self._thread.call(run.read)[::-1]  # type: ignore[assignment]
            if not self._batch:
                raise StopIteration
        return self._batch.pop()

    def close(self) -> None:
        """Leave the call now. Does nothing if it has ended."""
        run = self._stream._run
        if run is not None and not run.ended and self._thread.is_ours():
            self._thread.call(self._stream.aclose)

    @property
    def timeline(self) -> Timeline:
        """Where the time went. Raises RuntimeError before the call has ended."""
        return self._stream.timeline

    @property
    def reply(self) -> Reply:
        """Everything that was read so far, joined."""
        return self._stream.reply

    @property
    def headers(self) -> Mapping[str, str]:
        """The answer's headers, names in lower case; empty before they have come."""
        return self._stream.headers


class SyncJob:
    """A call that is answered later, for synchronous code. Made by ``SyncConnectionManager.submit`` and ``.jobs``."""

    __slots__ = ("_job", "_thread")

    def __init__(self, job: Job, thread: _LoopThread) -> None:
        self._job = job
        self._thread = thread

    def __repr__(self) -> str:
        return f"<spanwire.SyncJob of {self._job!r}>"

    @property
    def id(self) -> str:
        """All that is needed to take it up again: ``manager.jobs.attach(id)``."""
        return self._job.id

    @property
    def row(self) -> JobRow | None:
        """The job as it was last looked at."""
        return self._job.row

    def result(self) -> Reply | Embeddings | BatchReply:
        """Block until the job's end, and give the reply. Errors as of ``Job.result``."""
        return self._thread.call(self._job.result)

    def status(self) -> str:
        """How it stands, as the store has it now."""
        return self._thread.call(self._job.status)

    def cancel(self) -> bool:
        """End it; see ``Job.cancel``."""
        return self._thread.call(self._job.cancel)

    def late(self) -> Reply | Embeddings | BatchReply | None:
        """The result that came after the job was given up; see ``Job.late``."""
        return self._thread.call(self._job.late)

    @property
    def timeline(self) -> Timeline:
        """Where its time went. Raises RuntimeError before its end was seen."""
        return self._job.timeline


class SyncBulk:
    """Results of many calls, for synchronous code. Made by ``SyncConnectionManager.submit_many``; see ``Bulk``.

    The calls are read on the manager's own thread.
    """

    __slots__ = ("_bulk", "_thread")

    def __init__(self, bulk: Bulk, thread: _LoopThread) -> None:
        self._bulk = bulk
        self._thread = thread

    def __repr__(self) -> str:
        return f"<spanwire.SyncBulk of {self._bulk!r}>"

    @property
    def counts(self) -> BulkCounts:
        """How far it is."""
        return self._bulk.counts

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[BulkResult]:
        return self

    def __next__(self) -> BulkResult:
        result = self._thread.call(self._bulk.next)
        if result is None:
            raise StopIteration
        return result

    def wait(self) -> BulkCounts:
        """Block until the end; see ``Bulk.wait``."""
        return self._thread.call(self._bulk.wait)

    def submitted(self) -> BulkCounts:
        """Block until the server has all of them; see ``Bulk.submitted``."""
        return self._thread.call(self._bulk.submitted)

    def stored(self) -> Iterator[BulkResult]:
        """What the store has of these calls now; see ``Bulk.stored``."""
        return self._bulk.stored()

    def close(self) -> None:
        """Leave it; see ``Bulk``."""
        if self._thread.is_ours():
            self._thread.call(self._bulk.aclose)


class SyncJobs:
    """The jobs of a manager, for synchronous code; see ``ConnectionManager.jobs``. The same arguments."""

    __slots__ = ("_manager",)

    def __init__(self, manager: ConnectionManager) -> None:
        self._manager = manager

    def attach(self, id: str, *, endpoint: Endpoint | str | None = None, store: str | Store | None = None) -> SyncJob:
        """Take up a job by its id."""
        return SyncJob(self._manager.jobs.attach(id, endpoint=endpoint, store=store), _loop_thread())

    def completed(
        self, group: str, *, endpoint: Endpoint | str | None = None, store: str | Store | None = None
    ) -> Iterator[Reply | Embeddings | BatchReply]:
        """The replies of a group, as its jobs end. A job that has failed raises its error, and ends the iteration; see
        :meth:`ended`."""
        for job in self.ended(group, endpoint=endpoint, store=store):
            yield job.result()

    def ended(
        self, group: str, *, endpoint: Endpoint | str | None = None, store: str | Store | None = None
    ) -> Iterator[SyncJob]:
        """The jobs of a group, as they end."""
        thread = _loop_thread()
        ended = self._manager.jobs.ended(group, endpoint=endpoint, store=store)
        while True:
            job = thread.call(_next_job, ended)
            if job is None:
                return
            yield SyncJob(job, thread)


async def _next_job(ended: Ended) -> Job | None:
    try:
        return await ended.__anext__()
    except StopAsyncIteration:  # no coroutine may raise it
        return None


class SyncSession:
    """A session for synchronous code. Made by :meth:`SyncConnectionManager.session`.

    ::

        with manager.session(endpoint, model="gpt-realtime") as session:
            session.send({"type": "response.create"})
            for event in session:
                ...

    One thread may read while others send, and any thread may :meth:`close` it: what is pending then ends. A second thread
    that reads at the same time gets a RuntimeError.
    """

    __slots__ = ("_batch", "_session", "_thread")

    def __init__(self, session: Session, thread: _LoopThread) -> None:
        self._session = session
        self._thread = thread
        self._batch: list[SessionEvent] = []  # in reverse: the next one is at the end

    def __repr__(self) -> str:
        return f"<spanwire.SyncSession of {self._session!r}>"

    def __enter__(self) -> Self:
        self._thread.call(self._session._open)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._batch = []
        self.close()

    def send(self, message: Mapping[str, Any] | str | bytes) -> None:
        """Send one message: a mapping as JSON text, a ``str`` as text, ``bytes`` as a binary frame.

        Blocks while the network, or the server, takes no more. Errors as of ``Session.send``.
        """
        self._thread.call(self._session.send, message)

    def send_eof(self) -> None:
        """Say that nothing more will be sent, and go on reading. See ``Session.send_eof``."""
        self._thread.call(self._session.send_eof)

    def __iter__(self) -> Iterator[SessionEvent]:
        return self

    def __next__(self) -> SessionEvent:
        if not self._batch:
            self._batch = self._thread.call(self._session._entered().read)[::-1]  # type: ignore[assignment]
            if not self._batch:
                raise StopIteration
        return self._batch.pop()

    def close(self) -> None:
        """End the session now; also from another thread than the one that reads. Does nothing if it has ended."""
        run = self._session._run
        if run is not None and not run.ended and self._thread.is_ours():
            self._thread.call(self._session.aclose)

    @property
    def turns(self) -> list[Timeline]:
        """Timelines of the last 100 turns that have ended."""
        return self._session.turns

    @property
    def timeline(self) -> Timeline:
        """Of the session as a whole. Raises RuntimeError before it has ended."""
        return self._session.timeline


_default: SyncConnectionManager | None = None


def default_sync_manager() -> SyncConnectionManager:
    """The facade of :func:`~spanwire.manager.default_manager`, one for each process."""
    global _default
    if _default is None:
        _default = SyncConnectionManager(default_manager())
    return _default


def _after_fork() -> None:
    global _thread, _thread_lock
    if _thread is not None:  # only the forking thread lives on in the child
        atexit.unregister(_thread._stop)
        _parked.append(_thread)
        _thread = None
    _thread_lock = threading.Lock()


_parked: list[_LoopThread] = []

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
