"""One call on a channel: a task pulls the messages, and fills the inbox.

grpc.aio hands out nothing that nobody asks for. So one task for each call asks, whether the consumer reads or not: then
arrivals are stamped when messages arrive, and what came before a break is kept. (The library itself drops what it has
received and not handed out when a connection breaks, so little as that is while the task keeps up.)
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import time
from collections.abc import AsyncIterator, Coroutine
from typing import TYPE_CHECKING, Any

import grpc

from spanwire.calls import Call, Chunk
from spanwire.errors import CallTimeout, ConnectionFailed, MessageTooBig, ProtocolError, ServerError, SpanwireError
from spanwire.transport import Attempt, Head, Inbox

from .codec import AnswerDecoder, Codec, Rpc
from .metadata import Metadata, incoming
from .status import error_of

if TYPE_CHECKING:
    from .connection import GRPCConnection

__all__ = ["GRPCExchange", "call_error", "forget", "forget_reason"]

#: How long the end of a call waits for its trailing metadata, in seconds: they nearly always come with the last message.
_TRAILERS_S = 0.005
#: What the library's core takes to tell its own task of a call that this side has cancelled, in seconds.
_CORE_S = 0.001
_EOF = grpc.aio.EOF
_OK = grpc.StatusCode.OK


class GRPCExchange(Inbox):
    """See :class:`~spanwire.transport.Exchange`."""

    __slots__ = (
        "__weakref__",
        "_answered",
        "_attempt",
        "_call",
        "_codec",
        "_connection",
        "_decoder",
        "_finished",
        "_go_on",
        "_head",
        "_headers_ns",
        "_limit",
        "_marks",
        "_metadata",
        "_paused_since_ns",
        "_pieces",
        "_released",
        "_rpc",
        "_spoken",
        "_streamed",
        "_trailers_due",
        "heard",
        "task",
    )

    def __init__(
        self, connection: GRPCConnection, codec: Codec, call: Call, attempt: Attempt, metadata: Metadata
    ) -> None:
        super().__init__()
        self.heard = False
        self.task: asyncio.Task[None] | None = None
        self._connection = connection
        self._codec = codec
        self._spoken: Call | None = call
        self._attempt = attempt
        self._marks = attempt.marks
        self._marks.rtt_ns = connection.rtt_ns
        self._metadata = metadata
        self._streamed = attempt.streamed
        self._limit = attempt.endpoint.limits.max_event_bytes
        self._head = Head()
        self._rpc: Rpc | None = None
        self._call: Any = None
        self._decoder: AnswerDecoder | None = None
        self._answered: asyncio.Future[None] | None = None
        self._pieces = 0
        self._headers_ns = 0
        self._finished = False
        self._released = False
        self._go_on: asyncio.Future[None] | None = None
        self._paused_since_ns = 0
        self._trailers_due: asyncio.TimerHandle | None = None

    @property
    def head(self) -> Head:
        """With what the messages have told by now."""
        head, decoder = self._head, self._decoder
        if decoder is not None:
            head.id, head.model, head.usage = decoder.id, decoder.model, getattr(decoder, "usage", None)
            head.late_events = getattr(decoder, "late_events", ())
        return head

    # --- sending ----------------------------------------------------------------------------------------------------

    def begin(self, learned: Any, begin_ns: int) -> None:
        """Encode, and begin the RPC. Raises ConfigurationError, MessageTooBig."""
        attempt, marks, call = self._attempt, self._marks, self._spoken
        assert call is not None
        endpoint = attempt.endpoint
        rpc = self._rpc = self._codec.encode(
            call, endpoint, streamed=self._streamed, headers=attempt.headers, learned=learned
        )
        self._decoder = self._codec.decoder(call, endpoint, streamed=self._streamed, learned=learned)
        self._spoken = None
        self._head.attributes = {"rpc.system.name": "grpc", "rpc.method": rpc.method[1:]}
        encoded_ns = time.perf_counter_ns()
        marks.parts.append(("encode", begin_ns, encoded_ns))
        marks.begin("send", encoded_ns)
        self._open(rpc)
        marks.sent_ns = time.perf_counter_ns()
        marks.end("send", marks.sent_ns)
        if self.task is None:
            self._run(self._receive())

    def begin_after(self, learning: Coroutine[Any, Any, Any]) -> None:
        """The same, once something is known that has to be asked for."""
        self._run(self._learn(learning))

    async def _learn(self, learning: Coroutine[Any, Any, Any]) -> None:
        try:
            learned = await learning
            self.begin(learned, time.perf_counter_ns())
        except SpanwireError as error:
            self._end(error)
            return
        except asyncio.CancelledError:
            if not self._ended:
                raise
            await asyncio.sleep(_CORE_S)
            return
        await self._receive()

    async def ask(self, method: str, request: bytes) -> bytes:
        """One unary RPC, before the call itself. Its errors are the call's."""
        rpc = Rpc(method, request, "unary")
        self._head.attributes = {"rpc.system.name": "grpc", "rpc.method": method[1:]}
        self._call = self._connection.call(rpc, self._metadata, self._timeout_s())
        try:
            answer: bytes = await self._call
        except grpc.aio.AioRpcError as error:
            raise self._error_for(error, method) from error.with_traceback(None)
        self._connection.heard_ns = time.perf_counter_ns()
        return answer

    def _open(self, rpc: Rpc) -> None:
        requests: Any = None
        if rpc.kind == "bidi":
            requests = (rpc.request,)
        elif rpc.kind == "held":
            self._answered = self._connection.loop.create_future()
            requests = _held(rpc.request, self._answered)
        # In the caller's context: what instruments grpc.aio makes its span below the caller's. It ends with the call.
        self._call = self._connection.call(rpc, self._metadata, self._timeout_s(), requests)

    def _timeout_s(self) -> float | None:
        """What is left of ``Timeouts.total_s``, for the server to know. The manager's own timer is the one that counts."""
        deadline_ns = self._attempt.deadline_ns
        return None if deadline_ns is None else max(0.0, (deadline_ns - time.perf_counter_ns()) / 1e9)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        context = contextvars.Context()
        self.task = self._connection.loop.create_task(work, context=context)
        # A task that is cancelled before its first step runs no `finally`.
        self.task.add_done_callback(self._ended_task, context=context)

    def _ended_task(self, task: asyncio.Task[None]) -> None:
        if not self._ended:  # by whoever ends all tasks of the loop
            self.end(ConnectionFailed("the call was cancelled with its event loop", endpoint=self._connection.address))
        if not task.cancelled() and task.exception() is not None:
            self._connection.loop.call_exception_handler(
                {"message": "a call's task failed", "exception": task.exception(), "task": task}
            )
        self._cancel()
        forget_reason(task)
        if self._call is not None:
            forget(self._call)
            self._call = None
        self._release()

    # --- receiving --------------------------------------------------------------------------------------------------

    # Whoever keeps an error keeps its frames, and a call of the library in one of them keeps the connection open, even
    # behind a channel that was closed. So frames give it back, and the library's own errors lose theirs.

    async def _receive(self) -> None:
        rpc = self._rpc
        assert rpc is not None
        try:
            if rpc.kind == "unary":
                await self._one()
            else:
                await self._stream()
            self._status("OK")
            self._head.trailers = incoming(await self._call.trailing_metadata())
            self._end_of_message()
        except grpc.aio.AioRpcError as error:
            self._end(self._error_for(error, rpc.method))
        except asyncio.CancelledError:
            if not self._ended:
                raise
            await asyncio.sleep(_CORE_S)
        except SpanwireError as error:
            error.endpoint = error.endpoint or self._connection.address
            if isinstance(error, ServerError):
                error.headers = error.headers or dict(self._head.headers)
            self._end(error)
        except Exception as error:  # noqa: BLE001 - a bug in a dialect is the error of its call
            problem = ProtocolError(
                f"the dialect failed with {type(error).__name__}", endpoint=self._connection.address
            )
            problem.__cause__ = error
            self._end(problem)

    async def _one(self) -> None:
        message = await self._call
        now_ns = time.perf_counter_ns()
        self._head.headers = incoming(await self._call.initial_metadata())
        self._message(message, now_ns)

    async def _stream(self) -> None:
        if self._rpc is not None and self._rpc.kind == "stream":
            await self._call.wait_for_connection()  # as the next line, but for the task that a cancelled call leaves
        headers = incoming(await self._call.initial_metadata())
        # Those of a server that says nothing look like those of a call that has failed: the first message tells.
        self._headers_ns = time.perf_counter_ns()
        self._head.headers = headers
        if headers:
            self._arrived(self._headers_ns)
        read = self._call.read
        try:
            while True:
                message = await read()
                if message is _EOF:
                    return
                now_ns = time.perf_counter_ns()
                if self._finished:  # after the terminal message: of no use to anybody
                    continue
                self._message(message, now_ns)
                if self._paused:
                    self._go_on = self._connection.loop.create_future()
                    await self._go_on
        finally:
            del read

    def _arrived(self, now_ns: int) -> None:
        marks = self._marks
        if not marks.first_byte_ns:
            marks.first_byte_ns = now_ns
            if decoder_says := getattr(self._decoder, "headers", None):
                self._head.headers = {**self._head.headers, **decoder_says}
        marks.last_byte_ns = now_ns
        self._connection.heard_ns = now_ns

    def _message(self, data: bytes, now_ns: int) -> None:
        marks, decoder = self._marks, self._decoder
        assert decoder is not None
        if not self.heard:
            self._arrived(self._headers_ns or now_ns)
            self.heard = True
        self._connection.heard_ns = marks.last_byte_ns = now_ns
        if len(data) > self._limit:
            raise MessageTooBig(
                f"a message of the answer has {len(data)} bytes, over the limit of {self._limit} (Limits.max_event_bytes)"
            )
        item = decoder.message(data)
        if item is not None:
            if not marks.first_chunk_ns:
                marks.first_chunk_ns = now_ns
            marks.last_chunk_ns = now_ns
            if isinstance(item, Chunk) and item.has_content:
                self._pieces += 1
                if not marks.first_content_ns and self._streamed:
                    marks.first_content_ns = now_ns
            self._items.append(item)
        if decoder.done:
            self._terminal()
        self.wake()

    def _terminal(self) -> None:
        """The answer is complete. The call ends now, or in a moment: with its trailing metadata."""
        self._finish()
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(None)
        if self._rpc is not None and self._rpc.kind != "unary":
            self._trailers_due = self._connection.loop.call_later(
                _TRAILERS_S, self._complete, context=contextvars.Context()
            )

    def _finish(self) -> None:
        if self._finished:
            return
        decoder = self._decoder
        assert decoder is not None
        last = decoder.end()
        self._finished = True
        if last is not None:
            self._items.append(last)
        self._head.streamed = self._streamed or self._pieces > 1

    def _end_of_message(self) -> None:
        """The server has ended the call in order: for an answer without a terminal message, its end too."""
        self._finish()
        self._complete()

    def _complete(self) -> None:
        if self._trailers_due is not None:
            self._trailers_due.cancel()
            self._trailers_due = None
        if not self._ended:
            self._marks.ended_ns = time.perf_counter_ns()
            self.end()

    def _end(self, error: SpanwireError) -> None:
        """With an error: what had arrived stays."""
        if self._trailers_due is not None:
            self._trailers_due.cancel()
            self._trailers_due = None
        if self._finished and not isinstance(
            error, CallTimeout
        ):  # the answer was complete: what comes after is nobody's
            self._complete()
            return
        self._marks.ended_ns = time.perf_counter_ns()
        self.end(error)

    def _status(self, name: str) -> None:
        self._head.attributes = {**self._head.attributes, "rpc.response.status_code": name}

    def _error_for(self, error: Any, method: str) -> SpanwireError:
        """What a status other than OK means."""
        code, details = error.code().name, error.details() or ""
        headers, trailers = incoming(error.initial_metadata()), incoming(error.trailing_metadata())
        head = self._head
        head.headers, head.trailers = head.headers or headers, trailers
        self._status(code)
        connection = self._connection
        found = call_error(
            error, self._attempt, connection, method, heard=self.heard, meant=self._codec.error(code, details)
        )
        if (
            self._rpc is not None
            and not isinstance(found, (ConnectionFailed, CallTimeout))
            and not self._marks.first_byte_ns
        ):
            self._arrived(time.perf_counter_ns())  # it is the server that says so
        elif isinstance(found, ConnectionFailed):
            connection.suspect()
        return found

    # --- leaving ----------------------------------------------------------------------------------------------------

    @property
    def complete(self) -> bool:
        decoder = self._decoder
        if self._ended:
            return super().complete
        decoder = self._decoder
        return decoder is not None and decoder.finish_reason is not None

    def abort(self, error: SpanwireError | None = None) -> None:
        if self._released:
            super().abort(error)
            return
        if isinstance(error, CallTimeout) and self._connection.heard_ns < self._marks.sent_ns:
            self._connection.suspect()
        super().abort(error)
        self._let_go()

    def leave(self, error: SpanwireError) -> None:
        """The connection is closed under it: what has arrived stays."""
        self.end(error)
        self._let_go()

    def _let_go(self) -> None:
        if self._trailers_due is not None:
            self._trailers_due.cancel()
            self._trailers_due = None
        self._cancel()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            if self._go_on is not None and not self._go_on.done():
                self._go_on.set_result(None)
        if self.task is None or self._connection.loop.is_closed():
            self._release()  # else its task does, in a moment

    def _cancel(self) -> None:
        """Tell the server. Harmless on a call that has ended."""
        with contextlib.suppress(RuntimeError):  # the loop is closed; the server is told all the same
            if self._answered is not None and not self._answered.done():
                self._answered.set_result(None)
        if self._call is not None:
            with contextlib.suppress(RuntimeError):
                if self._call.cancel():
                    self._connection.cancelled_ns = time.perf_counter_ns()
            if self._connection.loop.is_closed():
                self._call = None

    def _release(self) -> None:
        if not self._released:
            self._released = True
            self._connection.left(self)
            self._attempt.released()

    # --- a consumer that is slower than the server --------------------------------------------------------------------

    def on_high(self) -> None:
        """The task stops after this message; the library's own flow control then stops the server."""
        self._paused_since_ns = time.perf_counter_ns()

    def on_low(self) -> None:
        now_ns = time.perf_counter_ns()
        if self._paused_since_ns:
            if self._marks.first_content_ns:
                self._marks.paused_ns += now_ns - max(self._paused_since_ns, self._marks.first_content_ns)
            self._paused_since_ns = 0
        self._marks.resumed_ns = now_ns
        if self._go_on is not None and not self._go_on.done():
            self._go_on.set_result(None)
        self._go_on = None


async def _held(request: bytes, answered: asyncio.Future[None]) -> AsyncIterator[bytes]:
    """One request, and its end when the answer is here."""
    yield request
    await answered


def call_error(
    error: Any,
    attempt: Attempt,
    connection: GRPCConnection,
    method: str,
    *,
    heard: bool,
    meant: SpanwireError | None = None,
    what: str = "call",
) -> SpanwireError:
    """What a status other than OK means.

    Args:
        error: the library's, which loses its traceback, and is the cause.
        heard: a message had come.
        meant: what the dialect says, if it does.
    """
    code, details = error.code().name, error.details() or ""
    deadline_ns, found = attempt.deadline_ns, meant
    if code == "DEADLINE_EXCEEDED" and deadline_ns is not None and time.perf_counter_ns() >= deadline_ns:
        found = CallTimeout(
            f"the {what} did not end within {attempt.timeouts.total_s} s (Timeouts.total_s)",
            limit="total_s",
            endpoint=connection.address,
            phase="read" if heard else "wait",
            retryable=False,
        )
    elif found is None:
        found = error_of(
            code,
            details,
            {**incoming(error.initial_metadata()), **incoming(error.trailing_metadata())},
            endpoint=connection.address,
            method=method,
            heard=heard,
            connected=connection.connected(),
            max_event_bytes=attempt.endpoint.limits.max_event_bytes,
        )
    found.endpoint = found.endpoint or connection.address
    found.__cause__ = error.with_traceback(None)
    return found


def forget_reason(task: asyncio.Task[Any]) -> None:
    """A task that was cancelled keeps the frames in which that happened until it is asked for the reason."""
    if task.cancelled():
        with contextlib.suppress(asyncio.CancelledError):
            task.exception()


def forget(call: Any) -> None:
    """The frames of the library's tasks hold their call, which holds them, and the connection: until the garbage collector
    comes."""
    for name in ("_preparation", "_invocation_task", "_initializer", "_async_request_poller"):
        task = getattr(call, name, None)
        if isinstance(task, asyncio.Task):
            forget_reason(task)
