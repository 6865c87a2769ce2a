"""A session: one RPC in which both sides send when they like.

Two tasks for each: one reads and one writes. The library ends a call when somebody who waits in it is cancelled, so nobody
but these two ever waits in it: a caller who gives up a ``send`` has not ended the session.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import grpc

from spanwire.calls import Call, SessionEvent
from spanwire.endpoint import Endpoint
from spanwire.errors import ConfigurationError, ConnectionFailed, MessageTooBig, ProtocolError, SpanwireError, Truncated
from spanwire.transport import Attempt, Head, Inbox, Item, Turn

from .codec import Ask, Rpc
from .exchange import call_error, forget, forget_reason
from .metadata import Metadata, incoming

if TYPE_CHECKING:
    from .connection import GRPCConnection

__all__ = ["BUFFER_BYTES", "OPTIONS", "GRPCSession", "Outgoing", "SessionDialect", "SessionSchema", "buffer_bytes_of"]

#: Names in ``Endpoint.options`` of every dialect of sessions. ``buffer_bytes``: how much may lie here unread until the
#: server is held up.
OPTIONS = frozenset({"buffer_bytes"})
BUFFER_BYTES = 16 * 1024 * 1024
#: The inbox counts messages; what a session counts are bytes.
_NO_LIMIT = 1 << 62
#: What the library's core takes to tell its own task of a call that this side has cancelled, in seconds.
_CORE_S = 0.001
_EOF = grpc.aio.EOF
#: Where errors come from that only say that the call is over; InvalidStateError is one of asyncio's.
_LIBRARY = frozenset({"asyncio", "grpc"})


class Outgoing(NamedTuple):
    """A message to send. ``about``: what its schema has to know of it once it is on its way."""

    data: bytes
    about: Any = None


class SessionSchema(Protocol):
    """State of one session: what its messages are, what they carry, and where turns begin and end."""

    def encode(self, message: Mapping[str, Any] | str | bytes) -> Outgoing:
        """Raises ConfigurationError for what cannot be sent."""

    def sent(self, outgoing: Outgoing, at_ns: int) -> None:
        """It is on its way."""

    def event(self, data: bytes, arrival_ns: int) -> SessionEvent:
        """A message that came. Raises ProtocolError for one that is not of the schema."""

    def learned(self, facts: Any) -> None:
        """What :attr:`SessionDialect.learn` has found out, before the first event."""

    def ended(self, at_ns: int, error: SpanwireError | None) -> None:
        """The session is over: so are its turns. Without an error its owner has left it."""


class SessionDialect(Protocol):
    """What ``Dialect.codec`` is for a dialect of sessions on this transport.

    Attributes:
        learn: None, or what has to be known of a server before its first message is read; asked once for each connection.
        learns_by: names in ``Endpoint.options`` that it depends on.
    """

    learn: Callable[[Ask, Endpoint], Awaitable[Any]] | None
    learns_by: tuple[str, ...]

    def method(self, endpoint: Endpoint) -> str:
        """The full name of the method, such as ``/pkg.Service/Method``. Raises ConfigurationError."""

    def credentials(self, api_key: str) -> Mapping[str, str]:
        """Metadata that carries the key."""

    def schema(
        self, endpoint: Endpoint, model: str, on_turn: Callable[[Turn], None], rtt_ns: int | None
    ) -> SessionSchema:
        """State of a new session. ``on_turn`` is to be called with each turn that has ended."""


def buffer_bytes_of(endpoint: Endpoint) -> int:
    """Raises ConfigurationError."""
    value = endpoint.options.get("buffer_bytes", BUFFER_BYTES)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(
            f"Endpoint.options: buffer_bytes must be a number of bytes from 1, not {value!r:.40}",
            endpoint=endpoint.address,
        )
    return value


class GRPCSession(Inbox):
    """See :class:`~spanwire.transport.SessionExchange`."""

    __slots__ = (
        "__weakref__",
        "_attempt",
        "_buffer_bytes",
        "_bytes",
        "_call",
        "_closed_out",
        "_connection",
        "_dialect",
        "_go_on",
        "_gone",
        "_head",
        "_idle",
        "_left",
        "_metadata",
        "_method",
        "_outgoing",
        "_released",
        "_schema",
        "_writing",
        "heard",
        "on_turn",
        "task",
    )

    def __init__(
        self, connection: GRPCConnection, dialect: SessionDialect, call: Call, attempt: Attempt, metadata: Metadata
    ) -> None:
        super().__init__(high=_NO_LIMIT)
        endpoint = attempt.endpoint
        self.heard = False
        self.on_turn: Callable[[Turn], None] | None = None
        self._connection = connection
        self._dialect = dialect
        self._attempt = attempt
        self._metadata = metadata
        self._buffer_bytes = buffer_bytes_of(endpoint)
        self._bytes = 0
        self._method = dialect.method(endpoint)
        self._schema = dialect.schema(endpoint, call.model, self._turn_ended, connection.rtt_ns)
        self._head = Head()
        self._head.attributes = {"rpc.system.name": "grpc", "rpc.method": self._method[1:]}
        self._gone: SpanwireError | None = None
        self._left = False
        self._released = False
        self._closed_out = False
        self._go_on: asyncio.Future[None] | None = None
        #: Whoever waits until his message is sent, in order; None: there are no more.
        self._outgoing: dict[asyncio.Future[None], Outgoing | None] = {}
        self._writing: tuple[asyncio.Future[None], Outgoing | None] | None = None
        self._idle: asyncio.Future[None] | None = None
        begin_ns = time.perf_counter_ns()
        attempt.marks.rtt_ns = connection.rtt_ns
        attempt.marks.begin("send", begin_ns)
        # In the caller's context: what instruments grpc.aio makes its span below the caller's.
        self._call: Any = connection.both_ways(self._method, metadata, self._timeout_s())
        attempt.marks.sent_ns = time.perf_counter_ns()
        attempt.marks.end("send", attempt.marks.sent_ns)
        context = contextvars.Context()
        self.task: asyncio.Task[None] = connection.loop.create_task(self._live(), context=context)
        # A task that is cancelled before its first step runs no `finally`.
        self.task.add_done_callback(self._ended_task, context=context)

    def _turn_ended(self, turn: Turn) -> None:
        turn.head.attributes = self._head.attributes
        if self.on_turn is not None:
            self.on_turn(turn)

    @property
    def head(self) -> Head:
        return self._head

    @property
    def complete(self) -> bool:
        """A session has no end of its own: whoever leaves ends it."""
        return self._ended_well

    def _timeout_s(self) -> float | None:
        deadline_ns = self._attempt.deadline_ns
        return None if deadline_ns is None else max(0.0, (deadline_ns - time.perf_counter_ns()) / 1e9)

    # --- sending ----------------------------------------------------------------------------------------------------

    async def send(self, message: Mapping[str, Any] | str | bytes) -> None:
        """See :meth:`spanwire.transport.SessionExchange.send`."""
        self._check_open()
        outgoing = self._schema.encode(message)
        most = self._connection.max_request_bytes
        if len(outgoing.data) > most:
            raise MessageTooBig(
                f"the message has {len(outgoing.data)} bytes, over the limit of {most} (option max_request_bytes)",
                endpoint=self._connection.address,
                phase="send",
            )
        await self._queued(outgoing)

    async def send_eof(self) -> None:
        """Tell the server that no more messages come; it may go on sending. A second call does nothing."""
        if not (self._closed_out or self._gone is not None or self._left):
            self._closed_out = True
            await self._queued(None)

    async def _queued(self, outgoing: Outgoing | None) -> None:
        """Wait for one's turn, and until the network has taken it. Cancelled before that, it is not sent."""
        done: asyncio.Future[None] = self._connection.loop.create_future()
        self._outgoing[done] = outgoing
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)
        try:
            await done
        except asyncio.CancelledError:
            if outgoing is None and done in self._outgoing:
                self._closed_out = False
            raise
        finally:
            self._outgoing.pop(done, None)

    def _check_open(self) -> None:
        if self._gone is not None or self._left:
            raise self._over("the session has ended")

    def _over(self, words: str) -> ConnectionFailed:
        error = ConnectionFailed(words, endpoint=self._connection.address, phase="send", retryable=False)
        error.__cause__ = self._gone
        return error

    async def _write(self) -> None:
        """Ends when the call has: why, the reading side finds out."""
        call = self._call
        try:
            await call.wait_for_connection()
            # Its own write() makes up a status when it fails, and then the server's is lost, with all unread messages
            # (measured: in 97 % of calls that a server ended while it was being sent to).
            write = getattr(getattr(call, "_cython_call", None), "send_serialized_message", None) or call.write
            while True:
                while not self._outgoing:
                    self._idle = self._connection.loop.create_future()
                    await self._idle
                done = next(iter(self._outgoing))
                outgoing = self._outgoing.pop(done)
                if done.cancelled():  # a moment ago: its sender has not heard of it yet
                    self._closed_out = self._closed_out and outgoing is not None
                    continue
                self._writing = done, outgoing
                if outgoing is None:
                    await call.done_writing()
                else:
                    self._schema.sent(outgoing, time.perf_counter_ns())
                    await write(outgoing.data)
                self._writing = None
                if not done.done():
                    done.set_result(None)
        except asyncio.CancelledError:
            return
        except Exception as error:  # noqa: BLE001 - a bug in a schema must not leave senders waiting
            if error.__traceback__ is not None:  # whose frames would keep the call
                error.__traceback__ = None
            if not isinstance(error, grpc.RpcError) and type(error).__module__.partition(".")[0] not in _LIBRARY:
                self._finish(self._bug(error))
                self._cancel()

    def _bug(self, error: Exception) -> ProtocolError:
        problem = ProtocolError(f"the dialect failed with {type(error).__name__}", endpoint=self._connection.address)
        problem.__cause__ = error
        return problem

    # --- receiving --------------------------------------------------------------------------------------------------

    async def _live(self) -> None:
        writer = self._connection.loop.create_task(self._write(), context=contextvars.Context())
        self._connection.watch(writer)
        try:
            await self._receive()
        finally:
            writer.cancel()
            await asyncio.wait([writer])

    async def _receive(self) -> None:
        try:
            await self._learn()
            await self._messages()
            self._head.trailers = incoming(await self._call.trailing_metadata())
            self._status("OK")
            self._finish(None)
        except grpc.aio.AioRpcError as error:
            self._finish(self._error_for(error, self._method))
        except asyncio.CancelledError:
            if not self._ended:
                raise
            await asyncio.sleep(_CORE_S)
        except SpanwireError as error:
            error.endpoint = error.endpoint or self._connection.address
            self._finish(error)
        except Exception as error:  # noqa: BLE001 - a bug in a dialect is the session's error, not the event loop's
            self._finish(self._bug(error))

    async def _learn(self) -> None:
        dialect, connection, endpoint = self._dialect, self._connection, self._attempt.endpoint
        if dialect.learn is not None:
            about = (dialect, *map(endpoint.options.get, dialect.learns_by))
            if about not in connection.learned:
                connection.learned[about] = await dialect.learn(self._ask, endpoint)
            self._schema.learned(connection.learned[about])

    async def _ask(self, method: str, request: bytes) -> bytes:
        call = self._connection.call(Rpc(method, request, "unary"), self._metadata, self._timeout_s())
        try:
            answer: bytes = await call
        except grpc.aio.AioRpcError as error:
            raise self._error_for(error, method) from error.with_traceback(None)
        finally:
            forget(call)
            del call
        return answer

    async def _messages(self) -> None:
        call, connection = self._call, self._connection
        read = call.read
        try:
            while True:
                message = await read()
                if message is _EOF:
                    if not self.heard:
                        self._head.headers = incoming(await call.initial_metadata())
                    return
                now_ns = connection.heard_ns = time.perf_counter_ns()
                if not self.heard:
                    self.heard = True
                    self._head.headers = incoming(await call.initial_metadata())
                self._items.append(self._schema.event(message, now_ns))
                self._bytes += len(message)
                self.wake()
                if self._bytes >= self._buffer_bytes and not self._ended:
                    self._paused = True
                    self._go_on = connection.loop.create_future()
                    await self._go_on
        finally:
            del read, call  # whoever keeps an error keeps its frames

    def take(self) -> list[Item]:
        items = super().take()
        self._bytes = 0
        return items

    def on_low(self) -> None:
        """The library's own flow control has held the server meanwhile."""
        if self._go_on is not None and not self._go_on.done():
            self._go_on.set_result(None)
        self._go_on = None

    def _status(self, name: str) -> None:
        self._head.attributes = {**self._head.attributes, "rpc.response.status_code": name}

    def _error_for(self, error: Any, method: str) -> SpanwireError:
        connection, head = self._connection, self._head
        self._status(error.code().name)
        head.headers, head.trailers = (
            head.headers or incoming(error.initial_metadata()),
            incoming(error.trailing_metadata()),
        )
        found = call_error(error, self._attempt, connection, method, heard=self.heard, what="session")
        if isinstance(found, ConnectionFailed):
            connection.suspect()
        return found

    def _finish(self, error: SpanwireError | None) -> None:
        """It has ended, and not by this side; without an error in order."""
        if self._gone is None and not self._left:
            self._gone = error or ConnectionFailed("the server has ended the session")
            unfinished = error or Truncated(
                "the server ended the session in the middle of a turn",
                endpoint=self._connection.address,
                phase="read",
                retryable=False,
            )
            self._close_turns(unfinished)
            self.end(error)

    def _close_turns(self, error: SpanwireError | None) -> None:
        try:
            self._schema.ended(time.perf_counter_ns(), error)
        except Exception as bug:  # noqa: BLE001 - a session ends, whatever its schema does
            self._connection.loop.call_exception_handler({"message": "a session's dialect failed", "exception": bug})

    def _fail_senders(self) -> None:
        waiting, self._outgoing = [*self._outgoing.items()], {}
        if self._writing is not None:
            waiting.append(self._writing)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            for done, outgoing in waiting:
                if done.done():
                    continue
                if outgoing is None:
                    done.set_result(None)
                else:
                    done.set_exception(self._over("the session ended before the message was sent"))

    # --- leaving ----------------------------------------------------------------------------------------------------

    def abort(self, error: SpanwireError | None = None) -> None:
        """Cancel the call: the server is told at once."""
        super().abort(error)
        if not self._left:
            self._left = True
            if self._gone is None:
                self._close_turns(error)
        self._let_go()

    def leave(self, error: SpanwireError) -> None:
        """The connection is closed under it: what has arrived stays."""
        self._finish(error)
        self._let_go()

    def _let_go(self) -> None:
        self._fail_senders()
        self._cancel()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            if self._go_on is not None and not self._go_on.done():
                self._go_on.set_result(None)
        if self._connection.loop.is_closed():
            self._release()  # else its task does, in a moment

    def _cancel(self) -> None:
        """Harmless on a call that has ended."""
        if self._call is not None:
            with contextlib.suppress(RuntimeError):
                if self._call.cancel():
                    self._connection.cancelled_ns = time.perf_counter_ns()
            if self._connection.loop.is_closed():
                self._call = None

    def _ended_task(self, task: asyncio.Task[None]) -> None:
        if not self._ended:  # by whoever ends all tasks of the loop
            self._finish(
                ConnectionFailed("the session was cancelled with its event loop", endpoint=self._connection.address)
            )
        if not task.cancelled() and task.exception() is not None:
            self._connection.loop.call_exception_handler(
                {"message": "a session's task failed", "exception": task.exception(), "task": task}
            )
        self._fail_senders()
        self._cancel()
        forget_reason(task)
        if self._call is not None:
            forget(self._call)
            self._call = None
        self._release()

    def _release(self) -> None:
        if not self._released:
            self._released = True
            self._connection.left(self)
            self._attempt.released()
