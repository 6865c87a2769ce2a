"""``engine="spanwire"``: requests of an httpx-like asynchronous client on connections of our own.

The request's bytes are those that the client has made: method, target, headers in their order and spelling, body. So are
the answer's: status, reason, headers, and the body without its transfer coding. Time limits are the request's, and what is
raised are exceptions of the user's library, with ours as their cause.

Connections belong to the manager, one pool for each origin and TLS context on each event loop. They are dialled by
:mod:`spanwire.net`, spoken by :class:`~spanwire.net.http1.HTTP1Connection`, and given back by the pool's own rules: after a
stream that was read to its terminal event, when its message ends. What this cannot do it does not :meth:`take <Engine.takes>`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import ssl
import time
from collections.abc import AsyncIterator, Callable, Hashable, Mapping
from functools import lru_cache
from types import ModuleType
from typing import Any, cast
from weakref import WeakKeyDictionary

import msgspec

from spanwire.calls import Call
from spanwire.endpoint import Endpoint, Limits, Timeouts
from spanwire.errors import CallTimeout, ConfigurationError, ConnectionFailed, ProtocolError, SpanwireError
from spanwire.manager import LoopState, default_manager
from spanwire.net.dial import dial
from spanwire.net.http1 import HTTP1Connection
from spanwire.pool import Lease, Waiter
from spanwire.run import Prepared
from spanwire.timeline import ConnectionUse, Marks
from spanwire.transport import Attempt, Connection, Exchange, TransportSpec

from .watched import Settings, Watched, endpoint_of, leads_somewhere

__all__ = ["Engine"]

#: Bytes of an answer that lie here unread before the server is stopped.
_AHEAD_BYTES = 1024 * 1024
#: How much may come after the terminal event until the connection is given up, in bytes.
_OVERTIME_BYTES = 64 * 1024
#: RFC 9110 sections 5.6.2 (token) and 5.5 (no CR, LF, NUL).
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_BAD_VALUE = re.compile(rb"[\r\n\0]")
_BAD_TARGET = re.compile(rb"[\x00-\x20\x7f]")
_CONNECT_PHASES = frozenset({"dns", "tcp", "tls", "proxy", "connect", "upgrade"})
_UNLIMITED = Timeouts(connect_s=None, first_content_s=None, idle_s=None)


@lru_cache(maxsize=32)
def _shared_context(hx: ModuleType, trust_env: bool, environment: tuple[str | None, ...]) -> ssl.SSLContext:
    """What the library trusts by default, made once: that takes 30 ms and more."""
    context: ssl.SSLContext = hx.create_ssl_context(trust_env=trust_env)
    context.set_alpn_protocols(["http/1.1"])
    return context


def _context(hx: ModuleType, verify: Any, cert: Any, *, trust_env: bool) -> ssl.SSLContext:
    if verify is True and cert is None:
        names = ("SSL_CERT_FILE", "SSL_CERT_DIR", "SSLKEYLOGFILE")
        return _shared_context(hx, trust_env, tuple(os.environ.get(name) for name in names))
    context: ssl.SSLContext = hx.create_ssl_context(verify=verify, cert=cert, trust_env=trust_env)
    context.set_alpn_protocols(["http/1.1"])  # as the library does, with the user's own too
    return context


class _RawConnection(HTTP1Connection):
    """Keeps what a client wants to see of an answer's head as it came.

    Attributes:
        raw_headers: names and values as they were written.
        reason: what stood behind the status.
    """

    __slots__ = ("raw_headers", "reason")

    capacity = 1
    protocol = "http/1.1"
    engine = "spanwire"

    def __init__(self, address: str) -> None:
        self.raw_headers: list[tuple[bytes, bytes]] = []
        self.reason = b""
        super().__init__(address)

    def on_message_begin(self) -> None:
        self.reason = b""
        super().on_message_begin()

    def on_status(self, part: bytes) -> None:
        """For the parser, which may have it in pieces."""
        self.reason += part

    def _take_headers(self) -> dict[str, str]:
        self.raw_headers = [(name, value.strip(b" \t")) for name, value in self._headers]
        return super()._take_headers()

    async def start(self, call: Call, attempt: Attempt) -> Exchange:
        """Not for calls: the client has the bytes of its request, and sends them by itself."""
        raise NotImplementedError("requests of a client go out by its transport, not by Connection.start")

    def extra_info(self, name: str) -> Any:
        """As httpcore's streams have it."""
        transport = self._transport
        if transport is None:
            return None
        return transport.get_extra_info({"client_addr": "sockname", "server_addr": "peername"}.get(name, name))


class _Transport:
    """What the pool is given: how connections to an origin are made."""

    def __init__(self, context: ssl.SSLContext | None) -> None:
        self._context = context

    def expect(self, endpoint: Endpoint) -> int:
        return 1

    def key(self, endpoint: Endpoint) -> Hashable:
        return endpoint.origin

    async def connect(self, endpoint: Endpoint, attempt: Attempt) -> Connection:
        """Dial; marks dns, tcp, tls."""
        made = await dial(endpoint, attempt.marks, lambda: _RawConnection(endpoint.address), context=self._context)
        made.set_connect_rtt(attempt.marks.rtt_ns)
        return cast(Connection, made)  # but for `start`, which only the manager's own calls need


_SPEC = TransportSpec("http", ("http", "https"), lambda: _Transport(None))


class Engine:
    """For one client.

    Args:
        hx: the library.
        settings: see :class:`Settings`.
        verify, cert, trust_env, limits: as of the library's client.

    Raises:
        Whatever the library raises for ``verify`` and ``cert``.
    """

    def __init__(
        self, hx: ModuleType, settings: Settings, *, verify: Any = True, cert: Any = None, trust_env: bool = True,
        limits: Any = None,
    ) -> None:  # fmt: skip
        self.hx = hx
        self.settings = settings
        self._context = _context(hx, verify, cert, trust_env=trust_env)
        limits = limits or hx.Limits(max_connections=100, max_keepalive_connections=20)
        self._limits = Limits(max_idle_s=limits.keepalive_expiry or None)
        self._most: int | None = limits.max_connections
        self._slots: WeakKeyDictionary[LoopState, asyncio.Semaphore] = WeakKeyDictionary()
        self._endpoints: dict[Hashable, tuple[Endpoint, Prepared]] = {}
        self._stream = _stream_class(hx)

    def takes(self, request: Any) -> bool:
        """Whether the request can go over our connections: its body is there, and HTTP/1.1 has nothing special in it."""
        if request.method in ("HEAD", "CONNECT") or not leads_somewhere(request.url):
            return False
        headers = request.headers
        if "transfer-encoding" in headers or "upgrade" in headers or "expect" in headers:
            return False
        try:
            _ = request.content
            asyncio.get_running_loop()
        except (RuntimeError, self.hx.RequestNotRead):  # an upload that is streamed; another kind of loop
            return False
        return True

    async def send(self, request: Any, watched: Watched | None) -> Any:
        """The answer, as of the library's own transport.

        Raises:
            Exceptions of the library.
        """
        hx, timeouts = self.hx, request.extensions.get("timeout") or {}
        head = self._head(request)
        answer: _Answer | None = None
        try:
            state = self._state()
            if not state.guarded:
                await state.guard()
            slot = await self._slot(state, timeouts.get("pool"))
            try:
                lease = await self._lease(state, request.url, timeouts, watched)
            except BaseException:
                if slot is not None:
                    slot.release()
                raise
            connection = cast(_RawConnection, lease.member.connection)
            answer = _Answer(connection, lease, slot, watched)
            try:
                if watched is not None:
                    watched.witness.marks.begin("send", time.perf_counter_ns())
                if connection.send(head + request.content, answer):
                    answer.on_sent()
            except BaseException:
                answer.give_back()
                raise
            while not answer.sent and answer.status == 0 and answer.error is None:
                await answer.wait(timeouts.get("write"), hx.WriteTimeout)
            while answer.status == 0:
                answer.check()
                await answer.wait(timeouts.get("read"), hx.ReadTimeout)
        except SpanwireError as error:
            raise _translated(hx, error) from error
        except BaseException:
            if answer is not None:
                answer.leave()
            raise
        return hx.Response(
            answer.status,
            headers=answer.raw_headers,
            stream=self._stream(answer, timeouts.get("read"), hx, watched),
            extensions={
                "http_version": b"HTTP/1.1",
                "reason_phrase": answer.reason,
                "network_stream": _NetworkStream(connection),
            },
        )

    def _state(self) -> LoopState:
        manager = self.settings.manager or default_manager()
        return manager.state()

    async def _slot(self, state: LoopState, limit_s: float | None) -> asyncio.Semaphore | None:
        if self._most is None:
            return None
        slot = self._slots.get(state)
        if slot is None:
            slot = self._slots[state] = asyncio.Semaphore(self._most)
        if not slot.locked():
            await slot.acquire()
            return slot
        try:
            async with asyncio.timeout(limit_s):
                await slot.acquire()
        except TimeoutError as error:
            raise self.hx.PoolTimeout("") from error
        return slot

    async def _lease(
        self, state: LoopState, url: Any, timeouts: Mapping[str, float | None], watched: Watched | None
    ) -> Lease:
        endpoint, prepared = self._prepared(state, (url.scheme, url.raw_host.decode("ascii"), url.port))
        pool = state.pool_for(prepared, endpoint)
        asked_ns = time.perf_counter_ns()
        lease = pool.try_lease(self._limits, asked_ns)
        waited: list[Waiter] = []
        if lease is None:
            connect_s = timeouts.get("connect")
            limits = msgspec.structs.replace(_UNLIMITED, connect_s=connect_s) if connect_s else _UNLIMITED
            attempt = Attempt(endpoint, timeouts=limits, marks=Marks())
            context = watched.witness.call_span if watched is not None else None
            try:
                lease = await pool.lease(attempt, waited.append, context)
            finally:
                if watched is not None:
                    _note_wait(watched, waited, asked_ns)
        if watched is not None:
            _note_lease(watched, lease, waited=bool(waited))
        return lease

    def _prepared(self, state: LoopState, origin: tuple[str, str, int | None]) -> tuple[Endpoint, Prepared]:
        """The endpoint with our limits, and what its pool is made with."""
        from spanwire import manager as module

        registry = state.manager.registry
        found = self._endpoints.get(origin)
        if found is None or found[1].registry is not registry or found[1].forks != module._forks:
            if len(self._endpoints) > 256:
                self._endpoints.clear()
            known = endpoint_of(*origin)
            context = self._context if known.secure else None
            endpoint = msgspec.structs.replace(known, limits=self._limits)
            transport = _Transport(context)
            key = ("raw", known.origin, None if context is None else id(context))
            prepared = Prepared(registry, module._forks, _SPEC, transport, None, key, None)
            found = self._endpoints[origin] = (endpoint, prepared)
        return found

    def _head(self, request: Any) -> bytes:
        hx, method, target = self.hx, request.method.encode("ascii", "replace"), request.url.raw_path
        if not _NAME.fullmatch(method) or _BAD_TARGET.search(target):
            raise hx.LocalProtocolError(f"Illegal method or target in {request.method!r:.20} request")
        lines = [b"%s %s HTTP/1.1" % (method, target)]
        for name, value in request.headers.raw:
            if not _NAME.fullmatch(name):
                raise hx.LocalProtocolError(f"Illegal header name {name!r:.60}")
            if _BAD_VALUE.search(value):
                raise hx.LocalProtocolError(f"Illegal header value of {name!r:.60}")
            lines.append(b"%s: %s" % (name, value))
        return b"\r\n".join(lines) + b"\r\n\r\n"


def _note_wait(watched: Watched, waited: list[Waiter], asked_ns: int) -> None:
    """How a connection was waited for, as :mod:`spanwire.run` does for calls of our own."""
    attempt = watched.witness.attempt
    attempt.asked_ns, attempt.leased_ns = asked_ns, 0
    if waited:
        waiter = waited[0]
        found = waiter.by or waiter.dial
        attempt.dial_asked_ns = waiter.dial_asked_ns
        attempt.served = waiter.served or ("dialled" if found is not None else "freed")
        if found is not None and attempt.served != "freed":
            attempt.connect = found.marks
            attempt.connect_begin_ns, attempt.connect_end_ns = found.begin_ns, found.end_ns


def _note_lease(watched: Watched, lease: Lease, *, waited: bool) -> None:
    attempt, member = watched.witness.attempt, lease.member
    now_ns = attempt.leased_ns = time.perf_counter_ns()
    if not waited:
        attempt.asked_ns = now_ns
    reused = lease.served in ("idle", "freed")
    watched.witness.marks.use = ConnectionUse(
        member.id,
        reused,
        (now_ns - member.made_ns) / 1e9 if reused else None,
        (now_ns - lease.was_idle_ns) / 1e9 if lease.served == "idle" else None,
        "http/1.1",
        engine="spanwire",
    )
    if watched.witness.call_span is not None and member.context is not None:
        watched.witness.call_span.link(member.context)  # type: ignore[arg-type]


class _Answer:
    """The :class:`~spanwire.net.carrier.Sink` of one answer. Its reader holds a handle, so that dropping it is noticed."""

    __slots__ = (
        "_ahead",
        "_along",
        "_connection",
        "_loop",
        "_overtime",
        "_slot",
        "_waiter",
        "ended",
        "error",
        "lease",
        "left",
        "pieces",
        "raw_headers",
        "reason",
        "sent",
        "status",
        "watched",
    )

    def __init__(
        self, connection: _RawConnection, lease: Lease, slot: asyncio.Semaphore | None, watched: Watched | None
    ) -> None:
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._slot = slot
        self._waiter: asyncio.Future[bool] | None = None
        self._ahead = 0
        self._overtime = 0
        self._along: Callable[[bytes, int], None] | None = None
        self.lease = lease
        self.watched = watched
        self.pieces: list[bytes] = []
        self.status = 0
        self.raw_headers: list[tuple[bytes, bytes]] = []
        self.reason = b""
        self.sent = False
        self.ended = False
        self.left = False
        self.error: SpanwireError | None = None

    # --- what the connection tells ----------------------------------------------------------------------------------

    def on_sent(self) -> None:
        if not self.sent:
            self.sent = True
            if self.watched is not None:
                marks = self.watched.witness.marks
                marks.sent_ns = time.perf_counter_ns()
                marks.end("send", marks.sent_ns)
            self._wake()

    def on_head(self, status: int, headers: dict[str, str]) -> None:
        self.on_sent()  # if not before: it answers without having read the request to its end
        self.raw_headers, self.reason = self._connection.raw_headers, self._connection.reason
        if self.watched is not None:
            witness = self.watched.witness
            witness.head(status, headers, self._connection.first_arrival_ns)
            self._along = self.watched.along.feed
        self.status = status

    def on_body(self, data: bytes) -> None:
        if self.left:
            self._overtime += len(data)
            if self._overtime > _OVERTIME_BYTES:
                self.leave()
            return
        if self._along is not None:
            self._along(data, self._connection.arrival_ns)
        self.pieces.append(data)
        self._ahead += len(data)
        if self._ahead > _AHEAD_BYTES:
            self._connection.pause_reading()

    def on_batch(self) -> None:
        self._wake()

    def on_trailers(self, trailers: dict[str, str]) -> None:
        """Clients of this kind have no place for them."""

    def on_end(self) -> None:
        self._note_rtt()
        self.ended = True
        self.give_back()
        self._wake()

    def on_lost(self, error: SpanwireError) -> None:
        self._note_rtt()
        self.error = error
        self.ended = True
        self.give_back()
        self._wake()

    def _note_rtt(self) -> None:
        if self.watched is not None and not self.watched.stopped:
            self.watched.witness.marks.rtt_ns = self._connection.rtt_min_ns()

    # --- what the reader does ---------------------------------------------------------------------------------------

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(True)

    def _expire(self, waiter: asyncio.Future[bool]) -> None:
        if not waiter.done():
            waiter.set_result(False)

    async def wait(self, limit_s: float | None, expired: Callable[[str], BaseException]) -> None:
        """For whatever comes next. Raises what ``expired`` makes."""
        waiter = self._waiter = self._loop.create_future()
        timer = None if limit_s is None else self._loop.call_later(limit_s, self._expire, waiter)
        try:
            if not await waiter:
                raise expired("")
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    def check(self) -> None:
        """Raises what the connection broke with."""
        if self.error is not None:
            raise self.error

    def take(self) -> bytes | None:
        """What has come, None for nothing."""
        if not self.pieces:
            return None
        data = b"".join(self.pieces) if len(self.pieces) > 1 else self.pieces[0]
        self.pieces.clear()
        self._ahead = 0
        if self._connection.paused:
            self._connection.resume_reading()
        return data

    def finish(self) -> None:
        """The reader goes, and only the end of the message is missing: the pool waits for it."""
        if not self.left and not self.ended:
            self._note_rtt()
            self.left = True
            self.pieces.clear()
            self._connection.resume_reading()
            self.lease.finish(self.leave)
            self._free_slot()

    def leave(self) -> None:
        """The reader goes now, and the server is told."""
        if not self.ended:
            self._note_rtt()
            self.ended = self.left = True
            self._connection.leave(self)
            self.give_back()

    def _free_slot(self) -> None:
        slot, self._slot = self._slot, None
        if slot is not None:
            with contextlib.suppress(RuntimeError):  # its loop is closed
                slot.release()

    def give_back(self) -> None:
        """The connection, and the slot. A second call is harmless."""
        self.lease.release()
        self._free_slot()

    def abandon(self) -> None:
        """The reader's handle was dropped, perhaps in another thread."""
        if not self.ended and not self.left:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and the connection with it
                self._loop.call_soon_threadsafe(self.leave)


class _NetworkStream:
    """What ``extensions["network_stream"]`` is asked for."""

    def __init__(self, connection: _RawConnection) -> None:
        self._connection = connection

    def get_extra_info(self, info: str) -> Any:
        return self._connection.extra_info(info)


_streams: dict[int, tuple[ModuleType, type[Any]]] = {}


def _stream_class(hx: ModuleType) -> type[Any]:
    found = _streams.get(id(hx))
    if found is not None and found[0] is hx:
        return found[1]

    class EngineStream(hx.AsyncByteStream):  # type: ignore[misc, name-defined]
        """The body of an answer."""

        def __init__(self, answer: _Answer, read_s: float | None, library: ModuleType, watched: Watched | None) -> None:
            self._answer = answer
            self._read_s = read_s
            self._hx = library
            self._watched = watched

        async def __aiter__(self) -> AsyncIterator[bytes]:
            answer, watched = self._answer, self._watched
            if watched is not None and not watched.stopped and watched.witness.done:
                watched.end("completed")  # an SDK that drains by itself
            try:
                while True:
                    data = answer.take()
                    if data is not None:
                        yield data
                        if watched is not None and not watched.stopped and watched.witness.done:
                            watched.end("completed")
                    elif answer.ended:
                        answer.check()
                        break
                    else:
                        await answer.wait(self._read_s, self._hx.ReadTimeout)
            except SpanwireError as error:
                found = _translated(self._hx, error)
                if watched is not None:
                    watched.failed(found)
                raise found from error
            except GeneratorExit:  # `aclose` tells why
                raise
            except BaseException as error:
                if watched is not None:
                    watched.failed(error)
                answer.leave()
                raise
            if watched is not None:
                watched.over()

        async def aclose(self) -> None:
            answer, watched = self._answer, self._watched
            complete = watched is not None and watched.witness.complete
            if watched is not None:
                watched.end("cancelled" if _is_cancelled() else "closed_by_caller")
            if complete:
                answer.finish()
            else:
                answer.leave()

        def __del__(self) -> None:
            self._answer.abandon()
            if self._watched is not None:
                self._watched.abandon()

    _streams[id(hx)] = (hx, EngineStream)
    return EngineStream


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _translated(hx: ModuleType, error: SpanwireError) -> BaseException:
    """The exception of the library that its own transport would raise."""
    words, system = error.message, isinstance(error.__cause__, OSError)
    if isinstance(error, CallTimeout):
        return cast(BaseException, hx.ConnectTimeout(words))
    if isinstance(error, ConfigurationError):
        return cast(BaseException, hx.LocalProtocolError(words))
    if isinstance(error, ConnectionFailed):
        if error.phase in _CONNECT_PHASES:
            return cast(BaseException, hx.ConnectError(words))
        if error.phase == "send":
            return cast(BaseException, hx.WriteError(words))
        return cast(BaseException, hx.ReadError(words) if system else hx.RemoteProtocolError(words))
    if isinstance(error, ProtocolError):
        return cast(BaseException, hx.RemoteProtocolError(words))
    return cast(BaseException, hx.ReadError(words))
