"""httpx and httpx2, by one source: transports of the user's own library that watch inference requests.

``engine="wrap"``: the library's own transport does everything, and :func:`make` gives what stands around it. A request
that is no inference passes it untouched. One that is gets a trace callback, and ``traceparent`` if it has none; its answer
is read along as its user reads it. Of the library nothing but its public classes is used; what its transports are made of
is recognised where it is, and left alone where it is something else.

**Streams give their connection back.** A reader that stops at the terminal event and closes leaves the end of the message
unread. Where that end has been read from the socket already it is found at once; else reading goes on in the background,
for a moment, and the next request to that origin waits a little for it. Errors in that are nobody's: the connection is
dropped, as it would have been.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import select
import threading
import time
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from spanwire.bridges.httpcore import new_connection_id, shut_down
from spanwire.witness import PAUSE_NS

from .drain import DRAIN_BYTES, DRAIN_S, WAIT_S, DrainBook
from .recognise import recognise
from .watched import TRACE_HEADERS, Settings, Watched, headers_of, leads_somewhere

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["Family", "make"]

_log = logging.getLogger("spanwire.instrument")

#: Drains that run at once below one transport, in threads of their own. More than that, and connections are dropped.
_THREADS = 32


class Family(NamedTuple):
    """What :func:`make` makes of a library.

    Attributes:
        hx: the library.
        Transport, AsyncTransport: around one transport of the library, or around what its client would choose.
    """

    hx: ModuleType
    Transport: type[Any]
    AsyncTransport: type[Any]


#: By module identity: ``httpx2.alias_httpx()`` makes one of the two.
_made: dict[int, Family] = {}


def make(hx: ModuleType) -> Family:
    """The transports for a library, made once.

    Args:
        hx: the module ``httpx`` or ``httpx2``.
    """
    found = _made.get(id(hx))
    if found is None or found.hx is not hx:
        found = _made[id(hx)] = _make(hx)
    return found


class _Common:
    """What the two transports of a library have in common. ``inner``: the transport for a URL."""

    asynchronous = False

    def __init__(self, hx: ModuleType, settings: Settings, inner: Callable[[Any], Any]) -> None:
        self.hx = hx
        self.settings = settings
        self.inner = inner
        self.id = new_connection_id()
        self.book = DrainBook()

    def watch(self, request: Any, *, bridged: bool = True) -> tuple[Watched, Any] | None:
        """The request, watched, and what is to be sent in its place; None for one that is nobody's business."""
        if request.method != "POST":
            return None
        try:
            return self._watch(request, bridged=bridged)
        except Exception:  # noqa: BLE001 - the call goes on without us
            _log.warning("a request cannot be watched", exc_info=True)
            return None

    def _watch(self, request: Any, *, bridged: bool) -> tuple[Watched, Any] | None:
        hx, url, raw = self.hx, request.url, request.headers.raw
        content_type, traced = b"", False
        for raw_name, value in raw:
            name = raw_name.lower()
            if name == b"content-type":
                content_type = value
            elif name in TRACE_HEADERS:
                traced = True
        try:
            body = request.content
        except hx.RequestNotRead:
            body = None
        host = url.raw_host.decode("ascii")
        path = url.raw_path.partition(b"?")[0].decode("ascii")
        asked = recognise(request.method, host, path, content_type.decode("latin-1"), body, self.settings.rules)
        if asked is None or not leads_somewhere(url):
            return None
        watched = Watched(
            asked,
            scheme=url.scheme,
            host=host,
            port=url.port,
            engine=hx.__name__,
            id=self.id,
            settings=self.settings,
            headers=headers_of(raw) if traced else None,
            bridged=bridged,
            tailed=not self.asynchronous,
        )
        try:
            # A twin of it, since the user's own is what the response shows. By its attributes: making one anew would
            # leave out what others have put there, and costs more than all of this.
            sent = object.__new__(type(request))
            vars(sent).update(vars(request))
            if watched.bridge is not None:
                sent.extensions = watched.bridge.extensions(request.extensions, asynchronous=self.asynchronous)
            added = {} if traced else watched.witness.headers()
            if added:
                names = {name.lower() for name, _ in raw}
                more = [(key, value.encode()) for name, value in added.items() if (key := name.encode()) not in names]
                sent.headers = hx.Headers([*raw, *more])
        except BaseException as error:
            watched.failed(error)
            raise
        return watched, sent

    def answered(self, watched: Watched, response: Any) -> bool:
        """Begin to read along; False if there is nothing to read, since somebody has done so."""
        try:
            watched.answered(response.status_code, response.headers.raw, response.extensions)
            if not response.is_stream_consumed:
                return True
            watched.along.feed(response.content, time.perf_counter_ns())
            watched.over()
        except Exception:  # noqa: BLE001 - the answer goes on without us
            _log.warning("an answer cannot be watched", exc_info=True)
            watched.end("closed_by_caller")
            watched.let_go()
        return False


class _AsyncCommon(_Common):
    asynchronous = True


# ------------------------------------------------------------------------------------------------------------ synchronous


class _ThreadDrains:
    """Drains of synchronous streams."""

    def __init__(self, book: DrainBook) -> None:
        self._book = book
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._running: dict[threading.Event, tuple[Hashable, Any]] = {}

    def wait(self, watched: Watched) -> None:
        """For a connection that is about to come back."""
        if not self._running:
            return
        if self._pid != os.getpid():  # their threads are the parent's
            self._pid, self._running, self._lock = os.getpid(), {}, threading.Lock()
            return
        origin = watched.origin
        with self._lock:
            ends = [ended for ended, (of, _) in self._running.items() if of == origin]
        if ends and self._book.worth_waiting(origin):
            begin_ns = time.perf_counter_ns()
            ends[0].wait(WAIT_S)
            watched.witness.marks.parts.append(("local", begin_ns, time.perf_counter_ns()))

    def drain(self, watched: Watched, source: Iterator[bytes], close: Callable[[], None]) -> None:
        """Read on at once where that waits for nobody, else in a thread."""
        origin, tail = watched.origin, watched.take_tail()
        if tail is None or not self._book.wanted(origin):
            if tail is not None:
                tail.let_go()
            close()
            return
        tail.deadline_s = time.monotonic() + WAIT_S
        if watched.end_is_here or tail.has_end or (watched.witness.done and _is_readable(tail.socket)):
            self._read_on(origin, tail, source, close)
            return
        tail.deadline_s = time.monotonic() + DRAIN_S
        ended = threading.Event()
        with self._lock:
            room = len(self._running) < _THREADS
            if room:
                self._running[ended] = (origin, tail.stream)
        if room:
            context = contextvars.Context()
            thread = threading.Thread(
                target=context.run,
                args=(self._in_thread, ended, origin, tail, source, close),
                name="spanwire drain",
                daemon=True,
            )
            try:
                thread.start()
                return
            except RuntimeError:  # no more of them, or the interpreter exits
                self._forget(ended)
        tail.let_go()
        close()

    def _in_thread(
        self, ended: threading.Event, origin: Hashable, tail: Any, source: Iterator[bytes], close: Callable[[], None]
    ) -> None:
        try:
            self._read_on(origin, tail, source, close)
        except Exception:  # noqa: BLE001 - nobody waits for it
            _log.debug("a connection could not be closed", exc_info=True)
        finally:
            self._forget(ended)

    def _forget(self, ended: threading.Event) -> None:
        with self._lock:
            self._running.pop(ended, None)
        ended.set()

    def _read_on(self, origin: Hashable, tail: Any, source: Iterator[bytes], close: Callable[[], None]) -> None:
        begin_s = time.monotonic()
        found = False
        taken = 0
        try:
            for data in source:
                taken += len(data)
                if taken > DRAIN_BYTES:
                    break
            else:
                found = True
        except Exception:  # noqa: BLE001 - the answer is complete: what fails now is nobody's error
            _log.debug("a connection was lost while it was drained", exc_info=True)
        finally:
            tail.let_go()
            if found:
                self._book.ended(origin, time.monotonic() - begin_s)
            else:
                self._book.missed(origin)
            close()

    def close(self) -> None:
        """End those that run."""
        if self._running and self._pid == os.getpid():
            with self._lock:
                running = dict(self._running)
            for _, stream in running.values():
                if (there := stream()) is not None:
                    shut_down(there)
            for ended in running:
                ended.wait(DRAIN_S)


def _is_readable(sock: Any) -> bool:
    """Whether something has come that was not read."""
    if sock is None:
        return False
    try:
        if getattr(sock, "pending", lambda: 0)():
            return True
        if hasattr(select, "poll"):
            poll = select.poll()
            poll.register(sock.fileno(), select.POLLIN)
            return bool(poll.poll(0))
        return bool(select.select([sock], [], [], 0)[0])
    except (OSError, ValueError):
        return False


# ----------------------------------------------------------------------------------------------------------- asynchronous


class _TaskDrains:
    """Drains of asynchronous streams: tasks, on the loop of their stream."""

    def __init__(self, book: DrainBook) -> None:
        self._book = book
        self._running: dict[asyncio.Task[None], tuple[Hashable, asyncio.AbstractEventLoop]] = {}

    async def wait(self, watched: Watched) -> None:
        """For a connection that is about to come back."""
        if not self._running:
            return
        loop, origin = _running_loop(), watched.origin
        tasks = [task for task, (of, on) in list(self._running.items()) if of == origin and on is loop]
        if tasks and self._book.worth_waiting(origin):
            begin_ns = time.perf_counter_ns()
            await asyncio.wait(tasks, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
            watched.witness.marks.parts.append(("local", begin_ns, time.perf_counter_ns()))

    async def drain(self, watched: Watched, source: AsyncIterator[bytes], close: Callable[[], Any]) -> None:
        """Read on at once where that waits for nobody, else in a task."""
        origin = watched.origin
        tail = watched.begin_tail() if self._book.wanted(origin) else None
        if tail is None:
            await close()
            return
        loop = _running_loop()
        if watched.end_is_here or loop is None:  # other loops than asyncio's: for a shorter moment
            tail.deadline_s = time.monotonic() + WAIT_S
            await self._read_on(origin, tail, source, close)
            return
        tail.deadline_s = time.monotonic() + DRAIN_S
        task = loop.create_task(
            self._read_on(origin, tail, source, close), name="spanwire drain", context=contextvars.Context()
        )
        # Nobody has asked for it, so nobody is to be told that a loop which closes in the next moment has lost it.
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        self._running[task] = (origin, loop)
        task.add_done_callback(self._done)
        # Its first step, at once: a task that is cancelled before runs no `finally`, and the connection would be left to
        # the garbage collector. What has come by now is read in it.
        await asyncio.sleep(0)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.pop(task, None)
        if not task.cancelled() and task.exception() is not None:
            _log.debug("a connection could not be closed", exc_info=task.exception())

    async def _read_on(
        self, origin: Hashable, tail: Any, source: AsyncIterator[bytes], close: Callable[[], Any]
    ) -> None:
        begin_s = time.monotonic()
        found = False
        taken = 0
        try:
            async for data in source:
                taken += len(data)
                if taken > DRAIN_BYTES:
                    break
            else:
                found = True
        except Exception:  # noqa: BLE001 - the answer is complete: what fails now is nobody's error
            _log.debug("a connection was lost while it was drained", exc_info=True)
        finally:
            tail.let_go()
            if found:
                self._book.ended(origin, time.monotonic() - begin_s)
            else:
                self._book.missed(origin)
            await close()

    async def aclose(self) -> None:
        """End those that run on this loop."""
        loop = _running_loop()
        tasks = [task for task, (_, on) in list(self._running.items()) if on is loop]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for task, (_, on) in list(self._running.items()):
            if on.is_closed():
                self._running.pop(task, None)


def _is_cancelled() -> bool:
    """The task that closes a stream does so because it is being cancelled."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # another kind of loop
        return False
    return task is not None and task.cancelling() > 0


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


# ------------------------------------------------------------------------------------------------------------ the classes


def _make(hx: ModuleType) -> Family:
    class Stream(hx.SyncByteStream):  # type: ignore[misc, name-defined]
        """The body of an answer, read along. Its reader may stop, and :meth:`close` read on."""

        def __init__(self, inner: Any, watched: Watched, drains: _ThreadDrains) -> None:
            self._inner = inner
            self._watched = watched
            self._drains = drains
            self._source: Iterator[bytes] | None = None
            self._closed = False
            self._ended = False

        def __iter__(self) -> Iterator[bytes]:
            watched, clock = self._watched, time.perf_counter_ns
            source = self._source
            if source is None:
                source = self._source = iter(self._inner)
            witness, along = watched.witness, watched.along
            feed = along.feed
            if along.done_ns and not watched.stopped:
                watched.end("completed")  # an SDK that drains by itself
            fed_ns = asked_ns = clock()
            try:
                for data in source:
                    at_ns = clock()
                    if asked_ns - fed_ns >= PAUSE_NS:
                        witness.paused(asked_ns - fed_ns, at_ns - asked_ns)
                    feed(data, at_ns)
                    fed_ns = at_ns
                    yield data
                    asked_ns = clock()
                    witness.waited_ns += asked_ns - fed_ns
                    if along.done_ns and not watched.stopped:
                        watched.end("completed")  # who comes back after the terminal event waits for the connection
            except GeneratorExit:  # closing tells how it ends
                raise
            except BaseException as error:
                watched.failed(error)
                raise
            self._ended = True
            watched.over()

        def close(self) -> None:
            watched, source = self._watched, self._source
            if self._closed:
                self._inner.close()
                return
            self._closed = True
            drain = not self._ended and source is not None and watched.worth_draining
            watched.end("closed_by_caller")
            if drain and source is not None:
                self._source = None
                self._drains.drain(watched, source, self._inner.close)
            else:
                watched.let_go()
                self._inner.close()

        def __del__(self) -> None:
            self._watched.abandon()

    class AsyncStream(hx.AsyncByteStream):  # type: ignore[misc, name-defined]
        """The same, asynchronous."""

        def __init__(self, inner: Any, watched: Watched, drains: _TaskDrains) -> None:
            self._inner = inner
            self._watched = watched
            self._drains = drains
            self._source: AsyncIterator[bytes] | None = None
            self._closed = False
            self._ended = False

        async def __aiter__(self) -> AsyncIterator[bytes]:
            watched, clock = self._watched, time.perf_counter_ns
            source = self._source
            if source is None:
                source = self._source = aiter(self._inner)
            witness, along = watched.witness, watched.along
            feed = along.feed
            if along.done_ns and not watched.stopped:
                watched.end("completed")  # an SDK that drains by itself
            fed_ns = asked_ns = clock()
            try:
                async for data in source:
                    at_ns = clock()
                    if asked_ns - fed_ns >= PAUSE_NS:
                        witness.paused(asked_ns - fed_ns, at_ns - asked_ns)
                    feed(data, at_ns)
                    fed_ns = at_ns
                    yield data
                    asked_ns = clock()
                    witness.waited_ns += asked_ns - fed_ns
                    if along.done_ns and not watched.stopped:
                        watched.end("completed")  # who comes back after the terminal event waits for the connection
            except GeneratorExit:  # closing tells how it ends
                raise
            except BaseException as error:
                watched.failed(error)
                raise
            self._ended = True
            watched.over()

        async def aclose(self) -> None:
            watched, source = self._watched, self._source
            if self._closed:
                await self._inner.aclose()
                return
            self._closed = True
            drain = not self._ended and source is not None and watched.worth_draining
            watched.end("cancelled" if _is_cancelled() else "closed_by_caller")
            if drain and source is not None:
                self._source = None
                await self._drains.drain(watched, source, self._inner.aclose)
            else:
                watched.let_go()
                await self._inner.aclose()

        def __del__(self) -> None:
            self._watched.abandon()

    class Transport(hx.BaseTransport):  # type: ignore[misc, name-defined]
        """Around a transport, or around those of a client of the library that is made for the purpose.

        Args:
            inner: a transport of the library, or anything with its methods; or a client, whose choice of transports (by
                proxies and mounts) is used, and which is closed with this.
            settings: see :class:`Settings`.
        """

        def __init__(self, inner: Any, settings: Settings) -> None:
            is_client = isinstance(inner, hx.Client)
            route = inner._transport_for_url if is_client else (lambda _url: inner)
            self._inner = inner
            self._common = _Common(hx, settings, route)
            self._drains = _ThreadDrains(self._common.book)

        def handle_request(self, request: Any) -> Any:
            common = self._common
            inner = common.inner(request.url)
            watching = common.watch(request)
            if watching is None:
                return inner.handle_request(request)
            watched, sent = watching
            try:
                watched.handed_over()
                self._drains.wait(watched)
                with watched.witness.current():
                    response = inner.handle_request(sent)
            except BaseException as error:
                watched.failed(error)
                raise
            if common.answered(watched, response):
                response.stream = Stream(response.stream, watched, self._drains)
            return response

        def __enter__(self) -> Any:
            self._inner.__enter__()
            return self

        def __exit__(
            self,
            kind: type[BaseException] | None = None,
            error: BaseException | None = None,
            trace: TracebackType | None = None,
        ) -> None:
            self._drains.close()
            self._inner.__exit__(kind, error, trace)

        def close(self) -> None:
            self._drains.close()
            self._inner.close()

    class AsyncTransport(hx.AsyncBaseTransport):  # type: ignore[misc, name-defined]
        """The same, asynchronous.

        Args:
            engine: carries what goes to no proxy and no mount, as far as it can.
        """

        def __init__(self, inner: Any, settings: Settings, engine: Engine | None = None) -> None:
            is_client = isinstance(inner, hx.AsyncClient)
            route = inner._transport_for_url if is_client else (lambda _url: inner)
            self._inner = inner
            self._engine = engine
            self._direct = inner._transport if is_client else inner  # where neither proxy nor mount stands between
            self._common = _AsyncCommon(hx, settings, route)
            self._drains = _TaskDrains(self._common.book)

        async def handle_async_request(self, request: Any) -> Any:
            common = self._common
            inner = common.inner(request.url)
            engine = self._engine
            if engine is not None and inner is self._direct and engine.takes(request):
                return await self._by_engine(engine, request)
            watching = common.watch(request)
            if watching is None:
                return await inner.handle_async_request(request)
            watched, sent = watching
            try:
                watched.handed_over()
                await self._drains.wait(watched)
                with watched.witness.current():
                    response = await inner.handle_async_request(sent)
            except BaseException as error:
                watched.failed(error)
                raise
            if common.answered(watched, response):
                response.stream = AsyncStream(response.stream, watched, self._drains)
            return response

        async def _by_engine(self, engine: Engine, request: Any) -> Any:
            watching = self._common.watch(request, bridged=False)
            if watching is None:
                return await engine.send(request, None)
            watched, sent = watching
            try:
                watched.handed_over()
                return await engine.send(sent, watched)
            except BaseException as error:
                watched.failed(error)
                raise

        async def __aenter__(self) -> Any:
            await self._inner.__aenter__()
            return self

        async def __aexit__(
            self,
            kind: type[BaseException] | None = None,
            error: BaseException | None = None,
            trace: TracebackType | None = None,
        ) -> None:
            await self._drains.aclose()
            await self._inner.__aexit__(kind, error, trace)

        async def aclose(self) -> None:
            await self._drains.aclose()
            await self._inner.aclose()

    return Family(hx, Transport, AsyncTransport)
