"""One channel, and the calls on it.

A channel of grpc.aio is a connection that connects by itself, again and again. Here it is one connection: it is made when
the pool dials, and it is of no use any more once it has left the state in which it was ready. So a handshake is on the
timeline of the call that waited for it, and calls are never queued behind a reconnect that nobody sees.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import time
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import grpc

from spanwire.calls import Call
from spanwire.errors import ConnectionFailed, MessageTooBig
from spanwire.transport import Attempt

from .channel import Settings
from .codec import Codec, Rpc
from .exchange import GRPCExchange
from .metadata import Metadata, fixed, merged
from .session import GRPCSession, SessionDialect

__all__ = ["GRPCConnection"]

#: Where the library's coroutines are written, as far as they are in Python.
_AIO = str(Path("grpc", "aio")) + os.sep
_READY = grpc.ChannelConnectivity.READY
#: How long calls may take to end when the connection is closed, in seconds: they are cancelled, which is local.
_GOODBYE_S = 0.7
#: The same for what the library does by itself afterwards.
_LIBRARY_S = 0.2


class GRPCConnection:
    """A channel that is ready.

    Attributes:
        rtt_ns: the round trip to the peer, None if unknown.
        max_request_bytes: the largest message that may be sent.
        learned: what was asked of the server once, by what it depends on.
    """

    protocol = "grpc"
    engine = "grpc.aio"

    def __init__(self, channel: Any, settings: Settings, address: str, rtt_ns: int | None = None) -> None:
        self.rtt_ns = rtt_ns
        self.address = address
        self.capacity = settings.max_streams
        self.loop = asyncio.get_running_loop()
        self.heard_ns = 0  # something came on it, whichever call it was for
        self.cancelled_ns = 0  # a call on it was cancelled that had not ended
        self._channel = channel
        self.max_request_bytes = settings.max_request_bytes
        self._exchanges: set[GRPCExchange | GRPCSession] = set()
        self._tasks: set[asyncio.Task[None]] = set()  # of calls that have left, too: the library ends a moment later
        self._closing = False
        self._suspect = False
        self.learned: dict[Hashable, Any] = {}
        self._fixed: dict[str, str] = {}
        self._fixed_for: tuple[object, object, object] | None = None
        self._methods: dict[tuple[str, str], Any] = {}

    # --- for the pool -----------------------------------------------------------------------------------------------

    def connected(self) -> bool:
        """The connection is there. Costs less than a microsecond."""
        try:
            return not self._closing and self._channel.get_state() is _READY
        except Exception:  # noqa: BLE001 - the library's UsageError, which it does not export, of a closed channel
            return False

    def usable(self) -> bool:
        return not self._suspect and self.connected()

    def suspect(self) -> None:
        """A call has waited in vain, and nothing came on the connection meanwhile: it may lead nowhere."""
        self._suspect = True

    async def start(self, call: Call, attempt: Attempt) -> GRPCExchange | GRPCSession:
        """Hand the call over; marks encode and send."""
        if not self.usable():
            raise ConnectionFailed("the connection takes no call", endpoint=self.address, phase="send")
        assert attempt.dialect is not None
        begin_ns = time.perf_counter_ns()
        metadata = self._metadata(attempt.dialect.codec, attempt)
        if call.operation == "session":
            session = GRPCSession(self, attempt.dialect.codec, call, attempt, metadata)
            self._entered(session, session.task)
            return session
        codec: Codec = attempt.dialect.codec
        exchange = GRPCExchange(self, codec, call, attempt, metadata)
        if codec.learn is None:
            exchange.begin(None, begin_ns)
        else:
            about = (codec, call.model, *map(attempt.endpoint.options.get, codec.learns_by))
            if about in self.learned:
                exchange.begin(self.learned[about], begin_ns)
            else:
                exchange.begin_after(self._learn(about, codec, exchange, call, attempt))
        assert exchange.task is not None
        self._entered(exchange, exchange.task)
        return exchange

    def _entered(self, exchange: GRPCExchange | GRPCSession, task: asyncio.Task[None]) -> None:
        self._exchanges.add(exchange)
        self.watch(task)

    def watch(self, task: asyncio.Task[None]) -> None:
        """A task of one of the calls: the connection is not closed before it has ended, or its loop."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard, context=contextvars.Context())

    async def _learn(self, about: Hashable, codec: Codec, exchange: GRPCExchange, call: Call, attempt: Attempt) -> Any:
        assert codec.learn is not None
        found = self.learned[about] = await codec.learn(exchange.ask, call, attempt.endpoint)
        return found

    def _metadata(self, codec: Codec | SessionDialect, attempt: Attempt) -> Metadata:
        endpoint, key = attempt.endpoint, attempt.api_key
        made = self._fixed_for
        if made is None or made[0] is not endpoint or made[1] != key or made[2] is not codec:
            self._fixed = fixed(endpoint, codec.credentials(key) if key is not None else {})
            self._fixed_for = (endpoint, key, codec)
        return merged(self._fixed, attempt.headers, endpoint)

    def call(self, rpc: Rpc, metadata: Metadata, timeout_s: float | None, requests: Any = None) -> Any:
        """Begin an RPC. ``requests``: for a method that takes many, what gives them."""
        size = len(rpc.request)
        if size > self.max_request_bytes:
            raise MessageTooBig(
                f"the request has {size} bytes, over the limit of {self.max_request_bytes} (option max_request_bytes)",
                endpoint=self.address,
                phase="send",
            )
        shape = (
            "stream_stream"
            if rpc.kind in ("bidi", "held")
            else "unary_stream"
            if rpc.kind == "stream"
            else "unary_unary"
        )
        begin = self._method(shape, rpc.method)
        return begin(rpc.request if requests is None else requests, timeout=timeout_s, metadata=metadata)

    def both_ways(self, method: str, metadata: Metadata, timeout_s: float | None) -> Any:
        """Begin an RPC to which messages are written, and from which they are read."""
        return self._method("stream_stream", method)(timeout=timeout_s, metadata=metadata)

    def _method(self, shape: str, name: str) -> Any:
        if self._closing:
            raise ConnectionFailed("the connection was closed", endpoint=self.address, phase="send")
        found = self._methods.get((shape, name))
        if found is None:
            found = self._methods[shape, name] = getattr(self._channel, shape)(name)
        return found

    def left(self, exchange: GRPCExchange | GRPCSession) -> None:
        """The exchange has left."""
        self._exchanges.discard(exchange)

    async def aclose(self) -> None:
        self._closing = True
        self._fail_all()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_GOODBYE_S)
        await self._channel.close()
        await self._library_ends()

    async def _library_ends(self) -> None:
        """Of a call that was cancelled the library keeps a task, until its core has heard of that: a moment. Such tasks do not
        tell whose they are, so this waits for those of other connections too, as long as one of ours may be among them."""
        until_ns = self.cancelled_ns + int(_LIBRARY_S * 1e9) if self.cancelled_ns else 0
        while time.perf_counter_ns() < until_ns and any(map(_is_librarys, asyncio.all_tasks(self.loop))):  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.001)

    def abort(self) -> None:
        self._closing = True
        self._fail_all()
        close_now(self._channel)
        if self.loop.is_closed():
            self._bury()

    def _bury(self) -> None:
        """No task of that loop will ever take another step, and those of our calls hold them, and the connection: open.

        What the library's core may still write into is kept by its own record of the operation, not by these.
        """
        _take_no_events(self.loop)
        for task in [*self._tasks, *filter(_is_of_a_call, asyncio.all_tasks(self.loop))]:
            task._log_destroy_pending = False  # type: ignore[attr-defined] # what it would tell of is done here
            coroutine = task.get_coro()
            if coroutine is not None and hasattr(coroutine, "close"):
                with contextlib.suppress(RuntimeError):
                    coroutine.close()
        self._tasks.clear()

    def _fail_all(self) -> None:
        for exchange in list(self._exchanges):
            phase = "read" if exchange.heard else "wait"
            exchange.leave(ConnectionFailed("the connection was closed", endpoint=self.address, phase=phase))

    def __repr__(self) -> str:
        state = "closed" if self._closing else "ready" if self.connected() else "lost"
        return f"GRPCConnection({self.address}, {state}, calls={len(self._exchanges)})"


def _take_no_events(loop: asyncio.AbstractEventLoop) -> None:
    """The library has one queue of events for all loops of a process. Whichever loop finds one of a loop that is closed fails
    to hand it on, and reports that to its own exception handler: somebody else's, much later. Nobody waits for them."""
    hand_on = loop.call_soon_threadsafe

    def call_soon_threadsafe(callback: Any, *args: Any, context: contextvars.Context | None = None) -> Any:
        if getattr(callback, "__name__", "") == "_handle_callback_wrapper":
            return None
        return hand_on(callback, *args, context=context)  # raises, since it is closed

    if getattr(hand_on, "__name__", "") == "call_soon_threadsafe" and getattr(hand_on, "__self__", None) is loop:
        with contextlib.suppress(AttributeError):  # a loop that is written in C
            loop.call_soon_threadsafe = call_soon_threadsafe


def _is_librarys(task: asyncio.Task[Any]) -> bool:
    return "_handle_status_once_received" in (getattr(task.get_coro(), "__qualname__", None) or "")


def _is_of_a_call(task: asyncio.Task[Any]) -> bool:
    """Any of the tasks that the library keeps for a call."""
    code = getattr(task.get_coro(), "cr_code", None)
    return _is_librarys(task) or (code is not None and _AIO in code.co_filename)


def close_now(channel: Any) -> None:
    """Close it without a loop. Without a time of grace its coroutine has nothing to wait for, and ends in one step."""
    closing = channel.close()
    try:
        contextvars.Context().run(closing.send, None)
    except (StopIteration, RuntimeError):  # RuntimeError: the loop is closed, and some call's callback cannot run
        pass
    finally:
        closing.close()
