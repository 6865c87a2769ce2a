"""Calls through a client that the user brings: ``Endpoint(url, options={"http_client": client})``.

The client is an ``AsyncClient`` or ``Client`` of httpx or httpx2, with proxies, mounts, authentication, client
certificates, event hooks and HTTP/2 as its owner has set them. It pools by itself: to spanwire's pool it is one
connection that takes any number of exchanges, and what it does for each (its wait in its own pool, the connect) is
marked on the exchange, by :mod:`spanwire.bridges.httpcore`. It is never closed here: that is its owner's business.

Time limits are spanwire's; the client is given ``connect_s`` for its connects and ``queue_timeout_s`` for its pool.
Over HTTP/2 a call that is left is not reset: httpcore sends no RST_STREAM, so a server goes on until it has ended. And
httpcore's HTTP/2 is not safe with threads, which share its state without a lock (measured: protocol errors at four calls
at once): a synchronous client with ``http2=True`` is for one call at a time, whoever makes them.

Neither library is imported here: they are recognised by the classes that the client is made of.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import importlib
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl
from weakref import WeakKeyDictionary, ref

from spanwire.bridges.httpcore import TraceBridge, new_connection_id, shut_down
from spanwire.calls import Call
from spanwire.endpoint import TLS, Endpoint
from spanwire.errors import ConfigurationError, ConnectionFailed, ProtocolError, SpanwireError
from spanwire.net.carrier import Sink
from spanwire.pool import FINISH_WAIT_NS
from spanwire.sync import on_loop_thread
from spanwire.timeline import Marks
from spanwire.transport import Attempt, Exchange

from .client_errors import explain, library_names
from .codec import Codec
from .exchange import HTTPExchange
from .request import Outline, host_header

__all__ = ["ClientConnection", "check_client"]

#: Exchanges at once on a client: its own limits decide.
CAPACITY = 1 << 30
#: Bytes that a synchronous client's thread may be ahead of the event loop.
_AHEAD_BYTES = 1024 * 1024


class _Kind:
    """What a client is: the package that it comes from, and whether it is asynchronous."""

    __slots__ = ("asynchronous", "engine")

    def __init__(self, engine: str, *, asynchronous: bool) -> None:
        self.engine = engine
        self.asynchronous = asynchronous


def _kind_of(client: object) -> _Kind | None:
    names = library_names(client)
    for name, asynchronous in (("AsyncClient", True), ("Client", False)):
        if name in names:
            return _Kind(names[name], asynchronous=asynchronous)
    return None


def check_client(endpoint: Endpoint) -> None:
    """Refuse what cannot work, before anything is sent.

    Raises:
        ConfigurationError: ``options["http_client"]`` is no client, or settings of the endpoint would be ignored.
    """
    client = endpoint.options["http_client"]
    kind = _kind_of(client)
    if kind is None:
        given = f"the class {client.__name__} itself" if isinstance(client, type) else type(client).__name__
        raise ConfigurationError(
            "Endpoint.options['http_client'] must be an httpx.AsyncClient, httpx.Client, httpx2.AsyncClient or "
            f"httpx2.Client, not {given}",
            endpoint=endpoint.address,
        )
    for name, ignored, instead in (
        ("tls", endpoint.tls != TLS(), "verify= and cert="),
        ("proxy", endpoint.proxy not in ("env", None), "proxy=, mounts= or trust_env="),
        ("uds", endpoint.uds is not None, "transport=HTTPTransport(uds=...)"),
        ("options['http_version']", "http_version" in endpoint.options, "http2="),
    ):
        if ignored:
            raise ConfigurationError(
                f"Endpoint.{name} has no effect on a client of your own: remove it, and give the client {instead}",
                endpoint=endpoint.address,
            )
    if kind.asynchronous:
        _import_early()


def _closed(endpoint: Endpoint) -> ConfigurationError:
    return ConfigurationError(
        "the client in Endpoint.options['http_client'] is closed; keep it open for as long as calls are made",
        endpoint=endpoint.address,
    )


def _import_early() -> None:
    """What httpcore imports in the middle of its first request, 60 to 120 ms (measured), which would look like a wait for
    its pool."""
    for name in ("anyio.streams.tls", "anyio._backends._asyncio"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


class ClientConnection:
    """A client that somebody brought, as a connection that takes any number of exchanges.

    Raises:
        ConfigurationError: it is closed, or bound to another event loop.
    """

    __slots__ = (
        "_client",
        "_finishing",
        "_id",
        "_in_time",
        "_kind",
        "_left",
        "_outline",
        "_runs",
        "engine",
        "protocol",
    )

    capacity = CAPACITY
    self_pooling = True

    def __init__(self, endpoint: Endpoint) -> None:
        client = endpoint.options["http_client"]
        kind = _kind_of(client)
        assert kind is not None  # the transport has checked it
        if client.is_closed:
            raise _closed(endpoint)
        if kind.asynchronous:
            _bind(client, kind.engine, endpoint)
        self._client = client
        self._kind = kind
        self._left = False
        self._id = new_connection_id()
        self._outline = Outline(prefix=f"{endpoint.origin.scheme}://{host_header(endpoint)}")
        self._runs: set[_Run] = set()
        self._finishing: dict[_Run, int] = {}  # those that have had their terminal event, and when
        self._in_time: deque[bool] = deque(maxlen=8)  # whether the last ones ended within FINISH_WAIT_NS
        self.engine = kind.engine
        self.protocol = "http/1.1"

    def usable(self) -> bool:
        return not self._left and not self._client.is_closed

    async def start(self, call: Call, attempt: Attempt) -> Exchange:
        """Encode the request and hand it to the client; marks encode, and whatever the client tells."""
        marks = attempt.marks
        if self._finishing:
            await self._wait_for_one(marks)
        begin_ns = time.perf_counter_ns()
        assert attempt.dialect is not None
        codec: Codec = attempt.dialect.codec
        if self._client.is_closed:
            raise _closed(attempt.endpoint)
        target, headers, body = self._outline.make(call, attempt)
        run: _Run = (_TaskRun if self._kind.asynchronous else _ThreadRun)(self, attempt)
        try:
            request = self._request(run, target, headers, body)
        except Exception as error:
            run.bridge.stop()
            raise explain(error, attempt, proxied=False) from error  # such as a URL that the client does not take
        exchange = HTTPExchange(run, codec, codec.decoder(call, streamed=attempt.streamed), attempt)
        encoded_ns = time.perf_counter_ns()
        marks.parts.append(("encode", begin_ns, encoded_ns))
        run.bridge.begin(encoded_ns)
        run.begin(self._client, request, exchange)
        return exchange

    async def _wait_for_one(self, marks: Marks) -> None:
        """For the end of a message whose call has ended, as spanwire's own pool does: the next call of the same caller
        comes before the client has the connection back, and would make it open another one."""
        run = next((run for run in self._finishing if run.waiter is None), None)
        if run is None or self.protocol == "h2" or sum(self._in_time) * 2 < len(self._in_time):
            return
        begin_ns = time.perf_counter_ns()
        waiter = run.waiter = asyncio.get_running_loop().create_future()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FINISH_WAIT_NS / 1e9):
                await waiter
        marks.parts.append(("local", begin_ns, time.perf_counter_ns()))

    def _finished(self, run: _Run) -> None:
        since_ns = self._finishing.pop(run, 0)
        if since_ns:
            self._in_time.append(time.perf_counter_ns() - since_ns <= FINISH_WAIT_NS)
        if run.waiter is not None and not run.waiter.done():
            run.waiter.set_result(None)

    def _request(self, run: _Run, target: str, headers: Mapping[str, str], body: bytes) -> Any:
        client = self._client
        more: dict[str, Any] = {}
        if client.params:  # they would take the place of the target's query
            target, _, query = target.partition("?")
            more["params"] = parse_qsl(query, keep_blank_values=True)
        request = client.build_request(
            "POST",
            target,
            content=body,
            # As bytes: text is taken as ASCII only.
            headers=[(name.encode(), value.encode()) for name, value in headers.items()],
            extensions={"timeout": run.timeouts()},
            **more,
        )
        url = request.url
        port = url.port or (443 if url.scheme == "https" else 80)
        run.bridge.to((url.raw_host.decode("ascii"), port))
        request.extensions = run.bridge.extensions(request.extensions, asynchronous=self._kind.asynchronous)
        return request

    async def aclose(self) -> None:
        """Leave every exchange, and wait until their tasks and threads have ended. The client stays open."""
        self._left = True
        runs = list(self._runs)
        for run in runs:
            run.close()
        for run in runs:
            await run.ended()

    def abort(self) -> None:
        self._left = True
        for run in list(self._runs):
            run.close()


# --- event loops --------------------------------------------------------------------------------------------------------

#: The loop that first used an asynchronous client.
_loops: WeakKeyDictionary[Any, ref[asyncio.AbstractEventLoop]] = WeakKeyDictionary()


def _bind(client: Any, engine: str, endpoint: Endpoint) -> None:
    if on_loop_thread():
        raise ConfigurationError(
            f"an {engine}.AsyncClient belongs to your own event loop, and SyncConnectionManager has another one; give "
            f"it an {engine}.Client",
            endpoint=endpoint.address,
        )
    loop = asyncio.get_running_loop()
    if _loops.setdefault(client, ref(loop))() is not loop:
        raise ConfigurationError(
            f"this {engine}.AsyncClient has been used on another event loop, and its connections belong to that one; "
            f"make one client for each loop (each asyncio.run), or give an {engine}.Client, which any loop can use",
            endpoint=endpoint.address,
        )


# --- one exchange -------------------------------------------------------------------------------------------------------


class _Run:
    """The :class:`~spanwire.net.carrier.Carrier` of one exchange: what an async and a synchronous client have in common.

    Attributes:
        arrival_ns, first_arrival_ns: see the carrier.
    """

    def __init__(self, connection: ClientConnection, attempt: Attempt) -> None:
        self._connection = connection
        self._attempt = attempt
        self._sink: HTTPExchange | None = None
        self._paused = False
        self.waiter: asyncio.Future[None] | None = None  # of a call that wants its connection next
        self.arrival_ns = 0
        self.first_arrival_ns = 0
        self.bridge = TraceBridge(attempt.marks, engine=connection.engine, id=connection._id, on_event=self._on_event)

    def timeouts(self) -> dict[str, float | None]:
        """What the client is told: it must not end a call that our limits let live."""
        attempt = self._attempt
        return {
            "connect": attempt.timeouts.connect_s,
            "pool": attempt.endpoint.limits.queue_timeout_s,
            "read": None,
            "write": None,
        }

    def begin(self, client: Any, request: Any, sink: HTTPExchange) -> None:
        """Hand over the request."""
        raise NotImplementedError

    async def ended(self) -> None:
        """Wait until nothing of it runs any more."""
        raise NotImplementedError

    def close(self) -> None:
        """The manager is being closed: end it, as an error of its call."""
        sink = self._sink
        if sink is None:
            self._stop()
        else:
            self._lost(
                ConnectionFailed("the connection was closed", endpoint=self._attempt.endpoint.address, retryable=False)
            )

    def leave(self, sink: Sink) -> None:
        if self._sink is sink:
            self._sink = None
            self._stop()
            self.bridge.stop()
            self._connection._finished(self)

    def pause_reading(self) -> None:
        raise NotImplementedError

    def resume_reading(self) -> None:
        raise NotImplementedError

    def rtt_min_ns(self) -> int | None:
        return self.bridge.rtt_min_ns()

    def backlog_ns(self) -> int:
        return 0

    def _on_event(self, name: str, stream: Any) -> None:
        """See :class:`TraceBridge`."""

    def _stop(self) -> None:
        """Have the client end the exchange, and its connection. A second call is ignored."""
        raise NotImplementedError

    # --- what has come, on the loop ---------------------------------------------------------------------------------

    def _head(self, status: int, headers: dict[str, str], at_ns: int) -> None:
        self.arrival_ns = self.first_arrival_ns = at_ns
        use = self._attempt.marks.use
        if use is not None and use.protocol is not None:
            self._connection.protocol = use.protocol
        if self._sink is not None:
            self._sink.on_head(status, headers)

    def _body(self, data: bytes, at_ns: int) -> None:
        self.arrival_ns = at_ns
        if self._sink is not None:
            self._sink.on_body(data)

    def _batch(self) -> None:
        sink = self._sink
        if sink is not None:
            sink.on_batch()
            if sink.complete:
                self._connection._finishing.setdefault(self, self.arrival_ns)

    def _end(self) -> None:
        """The client has the connection back."""
        sink, self._sink = self._sink, None
        self.bridge.stop()
        self._connection._finished(self)
        if sink is not None:
            sink.on_end()

    def _lost(self, error: BaseException) -> None:
        """It broke, or what has come could not be handled."""
        sink, self._sink = self._sink, None
        if sink is not None:
            found = self._error(error)
            self._stop()
            self.bridge.stop()
            self._connection._finished(self)
            sink.on_lost(found)

    def _error(self, error: BaseException) -> SpanwireError:
        return explain(error, self._attempt, proxied=self.bridge.proxied)

    def _raised(self, error: Exception) -> SpanwireError:
        """What a sink has raised, as the exchange's error."""
        if isinstance(error, SpanwireError):
            return error
        problem = ProtocolError(
            "the server sent an answer that could not be handled", endpoint=self._attempt.endpoint.address
        )
        problem.__cause__ = error
        return problem


def _headers_of(response: Any) -> dict[str, str]:
    """Names in lower case. Without the coding of a body that somebody has read already, such as an event hook or a mock:
    its content is plain."""
    headers: dict[str, str] = {}
    for raw_name, raw_value in response.headers.raw:
        name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1").strip(" \t")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    if response.is_stream_consumed:
        headers.pop("content-encoding", None)
    return headers


class _TaskRun(_Run):
    """An exchange over an asynchronous client: one task, which sends, and hands over what comes."""

    def begin(self, client: Any, request: Any, sink: HTTPExchange) -> None:
        self._sink = sink
        self._wakeup: asyncio.Future[None] | None = None
        self._cancelled = False
        # In a copy of the caller's context, unlike other tasks of a connection: the client's own event hooks and
        # instrumentation want to see what the caller has set there, and the task ends with the exchange.
        self._task = asyncio.get_running_loop().create_task(self._main(client, request), name="spanwire client call")
        self._connection._runs.add(self)
        self._task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        """Also after a task that was cancelled before its first step, and so has run nothing, not even a `finally`."""
        self._connection._runs.discard(self)
        self.bridge.stop()
        error = None if task.cancelled() else task.exception()
        if self._sink is not None:
            address = self._attempt.endpoint.address
            self._lost(error or ConnectionFailed("the event loop is being closed", endpoint=address, retryable=False))

    async def ended(self) -> None:
        if not self._task.done():
            await asyncio.wait([self._task])

    def _stop(self) -> None:
        wakeup = self._wakeup
        if wakeup is not None:  # it holds the stream up; it cancels itself then, where that ends the stream in order
            if not wakeup.done():
                wakeup.set_result(None)
        elif not self._cancelled:
            self._cancelled = True
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._task.cancel()

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        self._paused = False
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)

    async def _main(self, client: Any, request: Any) -> None:
        response = None
        try:
            response = await client.send(request, stream=True, follow_redirects=False)
            self._answered(response)
            # Where the exchange is left, this goes on until the cancellation takes effect below, and so ends the
            # client's generators from the inside. Leaving the loop would leave them to the garbage collector.
            if response.is_stream_consumed:
                self._arrived(response.content, time.perf_counter_ns())
            else:
                async for data in response.aiter_raw():
                    self._arrived(data, time.perf_counter_ns())
                    if self._paused:
                        await self._may_go_on()
            self._end()
        except asyncio.CancelledError:
            if not self._cancelled:
                raise
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
        except Exception as error:  # noqa: BLE001 - it is told to the call
            self._cancelled = True  # the client has ended it: nothing is left to cancel
            self._lost(error)
        finally:
            with contextlib.suppress(Exception):
                if response is not None:
                    await response.aclose()
                elif self.bridge.waiting:
                    await _give_back_slot(client, request.url)

    def _answered(self, response: Any) -> None:
        now_ns = time.perf_counter_ns()
        self.bridge.answered(response.extensions.get("network_stream"), response.http_version, now_ns)
        try:
            self._head(response.status_code, _headers_of(response), self.bridge.head_ns or now_ns)
        except Exception as error:  # noqa: BLE001 - it is told to the call
            self._lost(self._raised(error))

    def _arrived(self, data: bytes, at_ns: int) -> None:
        try:
            self._body(data, at_ns)
            self._batch()
        except Exception as error:  # noqa: BLE001 - it is told to the call
            self._lost(self._raised(error))

    async def _may_go_on(self) -> None:
        while self._paused and self._sink is not None:
            self._wakeup = asyncio.get_running_loop().create_future()
            try:
                await self._wakeup
            finally:
                self._wakeup = None
        if self._sink is None:
            self._stop()


async def _give_back_slot(client: Any, url: Any) -> None:
    """httpcore 1 loses a slot of its pool for ever when a request is cancelled just as it was given a new connection
    (https://github.com/encode/httpcore/issues/1093; measured with 1.0.9, right in httpcore2). Such a connection was
    never begun, and no request has it."""
    pool = getattr(client._transport_for_url(url), "_pool", None)
    requests, connections = getattr(pool, "_requests", None), getattr(pool, "_connections", None)
    if pool is None or not isinstance(requests, list) or not isinstance(connections, list):
        return
    taken = {id(request.connection) for request in requests}
    lost = [one for one in connections if id(one) not in taken and one.info() == "CONNECTING"]
    if lost:
        connections[:] = [one for one in connections if one not in lost]
        await pool._close_connections(pool._assign_requests_to_connections())  # those who wait for it


class _Left(Exception):
    """Raised in a client's thread by its trace callback: the exchange was left before the client had a connection."""


class _ThreadRun(_Run):
    """An exchange over a synchronous client: a thread, which sends, and passes what comes to the loop.

    A thread of its own for each: those of the loop's executor are few, and would all wait for the first answers. It is
    ended by shutting its connection down, which needs that connection to be known; while it waits for the client's
    pool, or for a connect (at most ``connect_s``), it ends with that wait.
    """

    def begin(self, client: Any, request: Any, sink: HTTPExchange) -> None:
        self._sink = sink
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self._over = self._loop.create_future()
        self._lock = threading.Condition()  # guards what follows
        self._came: list[tuple[str, Any, int]] = []
        self._ahead = 0  # bytes in it
        self._mine: Any = None  # the stream that only this exchange is on
        self._left = False
        # In a copy of the caller's context, for the client's event hooks and instrumentation.
        context = contextvars.copy_context()
        thread = threading.Thread(
            target=context.run, args=(self._main, client, request), name="spanwire client call", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # no more of them, or the interpreter exits
            self._sink = None
            self.bridge.stop()
            raise ConnectionFailed(
                "no thread can be started for the client", endpoint=self._attempt.endpoint.address, phase="send"
            ) from error
        self._connection._runs.add(self)

    def timeouts(self) -> dict[str, float | None]:
        """As of the others, with an end to waits that nothing can interrupt, later than our own limits."""
        found, limits = super().timeouts(), self._attempt.timeouts
        if limits.first_content_s is not None and limits.idle_s is not None:
            longest_s = max(limits.first_content_s, limits.idle_s) + 1.0
            found["read"] = longest_s
            if found["pool"] is None:
                found["pool"] = longest_s
        return found

    async def ended(self) -> None:
        await asyncio.shield(self._over)

    def _stop(self) -> None:
        if self._pid != os.getpid():
            return  # in a forked child: thread and connection are the parent's
        with self._lock:
            self._left = True
            self._shut_down()
            self._lock.notify_all()

    def _shut_down(self) -> None:
        if self._mine is not None and self.bridge.alone_on(self._mine):
            shut_down(self._mine)

    def pause_reading(self) -> None:
        with self._lock:
            self._paused = True

    def resume_reading(self) -> None:
        with self._lock:
            self._paused = False
            self._lock.notify_all()

    # --- in the thread ----------------------------------------------------------------------------------------------

    def _on_event(self, name: str, stream: Any) -> None:
        with self._lock:
            if stream is not None:
                self._mine = stream
            elif name.endswith("response_closed.started"):  # from here on the client may give it to another exchange
                self._mine = None
            if not self._left:
                return
            self._shut_down()
        if name.endswith(("connect_tcp.started", "connect_unix_socket.started", "send_request_headers.started")):
            raise _Left

    def _main(self, client: Any, request: Any) -> None:
        try:
            response = client.send(request, stream=True, follow_redirects=False)
            try:
                now_ns = time.perf_counter_ns()
                self.bridge.answered(response.extensions.get("network_stream"), response.http_version, now_ns)
                self._tell("head", (response.status_code, _headers_of(response)), self.bridge.head_ns or now_ns)
                pieces = (response.content,) if response.is_stream_consumed else response.iter_raw()
                for data in pieces:
                    if not self._tell("body", data, time.perf_counter_ns(), len(data)):
                        break
            finally:
                response.close()
            self._tell("end", None, 0)
        except BaseException as error:  # noqa: BLE001 - it is told to the call
            self._tell("lost", error, 0)
        finally:
            self._tell("over", None, 0)

    def _tell(self, what: str, value: Any, at_ns: int, size: int = 0) -> bool:
        """Pass it to the loop, and wait while that is behind. Returns whether anybody still wants the answer."""
        with self._lock:
            self._came.append((what, value, at_ns))
            self._ahead += size
            if len(self._came) == 1:
                try:
                    self._loop.call_soon_threadsafe(self._take)
                except RuntimeError:  # the loop is closed
                    self._left = True
            while size and not self._left and (self._paused or self._ahead > _AHEAD_BYTES):
                self._lock.wait()
            return not self._left

    # --- on the loop ------------------------------------------------------------------------------------------------

    def _take(self) -> None:
        with self._lock:
            came, self._came = self._came, []
            self._ahead = 0
            self._lock.notify_all()
        try:
            for what, value, at_ns in came:
                if what == "head":
                    status, headers = value
                    self._head(status, headers, at_ns)
                elif what == "body":
                    self._body(value, at_ns)
            self._batch()
        except Exception as error:  # noqa: BLE001 - it is told to the call
            self._lost(self._raised(error))
        for what, value, _ in came:
            if what == "end":
                self._end()
            elif what == "lost":
                self._lost(value)
            elif what == "over":
                self._connection._runs.discard(self)
                if not self._over.done():
                    self._over.set_result(None)
