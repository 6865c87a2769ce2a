"""A little wire of lines of JSON over TCP, as an author would write it: many calls on one connection, told apart by a number.

From the client: ``{"id", "call", "stream", "headers", "query"}`` and ``{"id", "cancel"}``. From the server: ``{"id", ...}``
with ``chunk``, ``end`` or ``error``.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import socket
import struct
import time
from collections.abc import Callable, Hashable
from typing import Any

import msgspec

import spanwire
from spanwire.calls import Call, Chunk, ToolCallDelta, Usage
from spanwire.endpoint import Endpoint
from spanwire.errors import ConfigurationError, ConnectionFailed, SpanwireError, Truncated, server_error
from spanwire.testing import Book, Request, Script
from spanwire.transport import Attempt, Head, Inbox, TransportSpec

CAPACITY = 16
_encode, _decode = msgspec.json.encode, msgspec.json.decode


class LinesExchange(Inbox):
    def __init__(self, connection: LinesConnection, number: int, attempt: Attempt) -> None:
        super().__init__(high=1 << 30)
        self.head = Head()
        self._connection, self._number, self._attempt = connection, number, attempt
        self._finish: str | None = None
        self._released = False

    @property
    def complete(self) -> bool:
        return super().complete or (not self._ended and self._finish is not None)

    def arrived(self, message: dict[str, Any], now_ns: int) -> None:
        marks = self._attempt.marks
        marks.first_byte_ns = marks.first_byte_ns or now_ns
        if not self._ended:
            marks.last_byte_ns = now_ns
        if "chunk" in message:
            chunk = msgspec.convert(message["chunk"], Chunk)
            marks.first_chunk_ns = marks.first_chunk_ns or now_ns
            if chunk.has_content:
                marks.first_content_ns = marks.first_content_ns or now_ns
            marks.last_chunk_ns = now_ns
            self._finish = chunk.finish_reason or self._finish
            if not self._ended:
                self.put(chunk)
                self.wake()
        elif "error" in message:
            self.failed(server_error("refused", status=message["error"], endpoint=self._attempt.endpoint.address))
        elif "last" in message:
            marks.ended_ns = time.perf_counter_ns()
            address = self._attempt.endpoint.address
            self.end(None if self._finish else Truncated("no finish reason", endpoint=address))
        else:  # the end of the message
            self._left()

    def failed(self, error: SpanwireError) -> None:
        self.end(error)
        self._left()

    def _left(self) -> None:
        self._connection.exchanges.pop(self._number, None)
        if not self._released:
            self._released = True
            self._attempt.released()

    def abort(self, error: SpanwireError | None = None) -> None:
        super().abort(error)
        if self._number in self._connection.exchanges:
            self._connection.write(_encode({"id": self._number, "cancel": True}))
        self._left()


class LinesConnection:
    capacity = CAPACITY
    protocol = "lines"
    engine = "asyncio"

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str) -> None:
        self._writer, self._address = writer, address
        self._closed = False
        self._numbers = itertools.count(1)
        self.exchanges: dict[int, LinesExchange] = {}
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._task = loop.create_task(self._receive(reader), context=contextvars.Context())

    def write(self, line: bytes) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._writer.write(line + b"\n")

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        cause: Exception | None = None
        try:
            while line := await reader.readline():
                now_ns = time.perf_counter_ns()
                if not line.endswith(b"\n"):
                    break
                message = _decode(line)
                exchange = self.exchanges.get(message["id"])
                if exchange is not None:
                    exchange.arrived(message, now_ns)
        except OSError as error:
            cause = error
        self._lost(cause)

    def _lost(self, cause: Exception | None) -> None:
        self._closed = True
        self._writer.transport.abort()
        for exchange in list(self.exchanges.values()):
            phase = "read" if exchange._attempt.marks.first_byte_ns else "wait"
            error = ConnectionFailed("the connection broke", endpoint=self._address, phase=phase)
            error.__cause__ = cause
            exchange.failed(error)

    async def start(self, call: Call, attempt: Attempt) -> LinesExchange:
        begin_ns = time.perf_counter_ns()
        number = next(self._numbers)
        endpoint = attempt.endpoint
        headers = {**endpoint.headers, **attempt.headers}
        if attempt.api_key is not None:
            headers["key"] = attempt.api_key
        asked = {"model": call.model, **call.body}
        message = {"id": number, "call": asked, "stream": attempt.streamed, "headers": headers, "query": endpoint.query}
        try:
            line = _encode(message)
        except TypeError as error:
            raise ConfigurationError("the call is no JSON", endpoint=self._address) from error
        exchange = self.exchanges[number] = LinesExchange(self, number, attempt)
        encoded_ns = time.perf_counter_ns()
        self.write(line)
        attempt.marks.sent_ns = time.perf_counter_ns()
        attempt.marks.parts += [("encode", begin_ns, encoded_ns), ("send", encoded_ns, attempt.marks.sent_ns)]
        return exchange

    def usable(self) -> bool:
        return not self._closed

    async def aclose(self) -> None:
        self.abort()
        await asyncio.wait([self._task])

    def abort(self) -> None:
        if self._closed:
            return
        with contextlib.suppress(RuntimeError):
            self._task.cancel()
        if self._loop.is_closed():
            self._closed = True
            self._writer.transport._sock.close()  # type: ignore[attr-defined]
        else:
            self._lost(None)


class LinesTransport:
    def expect(self, endpoint: Endpoint) -> int:
        return CAPACITY

    def key(self, endpoint: Endpoint) -> Hashable:
        return endpoint.connection_key()

    async def connect(self, endpoint: Endpoint, attempt: Attempt) -> LinesConnection:
        origin = endpoint.origin
        attempt.marks.begin("tcp", time.perf_counter_ns())
        try:
            reader, writer = await asyncio.open_connection(origin.host, origin.port, limit=1 << 26)
        except OSError as error:
            raise ConnectionFailed(
                f"no connection: {error.strerror}", endpoint=endpoint.address, phase="tcp"
            ) from error
        attempt.marks.end("tcp", time.perf_counter_ns())
        return LinesConnection(reader, writer, endpoint.address)


class Plugin:
    @spanwire.hookimpl
    def register_transports(self) -> list[TransportSpec]:
        return [TransportSpec(name="lines", schemes=("lines",), factory=LinesTransport)]


# --- the server's side ------------------------------------------------------------------------------------------------


def _chunks(script: Script) -> list[Chunk]:
    found = [Chunk(reasoning=piece) for piece in script.reasoning] + [Chunk(text=piece) for piece in script.tokens]
    for index, tool in enumerate(script.tool_calls):
        found.append(Chunk(tool_calls=(ToolCallDelta(index, tool.id, tool.name),)))
        found += [Chunk(tool_calls=(ToolCallDelta(index, arguments=piece),)) for piece in tool.arguments]
    return found


class _Client:
    def __init__(self, part: _Listener, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.part, self.reader, self.writer = part, reader, writer
        self.calls: dict[int, tuple[Request, asyncio.Task[None]]] = {}

    async def serve(self) -> None:
        book = self.part.book
        connection = book.connected()
        with contextlib.suppress(OSError):
            while line := await self.reader.readline():
                message = _decode(line)
                number = message["id"]
                if "cancel" in message:
                    self.leave(number)
                    continue
                query = "&".join(f"{name}={value}" for name, value in message["query"].items())
                request = Request(
                    method="CALL", path="/", query=query, headers=message["headers"],
                    raw=_encode(message["call"]), connection=connection,
                )  # fmt: skip
                book.arrived(request)
                task = asyncio.create_task(self.answer(number, request, streamed=message["stream"]))
                self.calls[number] = (request, task)
        for number in list(self.calls):
            self.leave(number)
        self.writer.transport.abort()
        book.disconnected()

    def leave(self, number: int, *, dropped: bool = False) -> None:
        request, task = self.calls.pop(number, (None, None))
        if request is not None and task is not None:
            (self.part.book.dropped if dropped else self.part.book.left)(request)
            if task is not asyncio.current_task():
                task.cancel()

    def drop(self, *, reset: bool = False) -> None:
        for number in list(self.calls):
            self.leave(number, dropped=True)
        if reset:
            found: socket.socket = self.writer.get_extra_info("socket")
            found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.writer.transport.abort()
        else:
            self.writer.close()

    async def answer(self, number: int, request: Request, *, streamed: bool) -> None:
        def say(**fields: Any) -> None:
            self.writer.write(_encode({"id": number, **fields}) + b"\n")

        script = self.part.book.script_for(request, request.model)
        if script.drop_after == "request":
            self.drop(reset=script.drop_mode == "reset")
            return
        if script.hang_after == "request":
            await asyncio.get_running_loop().create_future()
        await asyncio.sleep(script.queue_s)
        if script.status >= 400:
            say(error=script.status)
        else:
            await self.play(script, say, streamed=streamed)
            if script.hang_after is not None:
                await asyncio.get_running_loop().create_future()
            if script.drop_after is not None:
                self.drop(reset=script.drop_mode == "reset")
                return
            say(last=True)
            if script.end_s:
                await asyncio.sleep(script.end_s)
        self.part.book.ended(request)
        self.calls.pop(number, None)
        say(end=True)
        await self.writer.drain()

    async def play(self, script: Script, say: Callable[..., None], *, streamed: bool) -> None:
        await asyncio.sleep(script.prefill_s)
        chunks = _chunks(script)
        if not streamed:
            deltas = tuple(delta for chunk in chunks for delta in chunk.tool_calls)
            usage = script.usage if isinstance(script.usage, Usage) else None
            text, reasoning = "".join(script.tokens), "".join(script.reasoning)
            say(chunk=Chunk(text, reasoning, deltas, script.finish, usage))
            return
        for played, chunk in enumerate(chunks):
            if played in {script.drop_after, script.hang_after}:
                return
            if played and script.gap_s:
                await asyncio.sleep(script.gap_s)
            say(chunk=chunk)
        if script.hang_after is None and script.drop_after is None and script.finish is not None:
            say(chunk=Chunk(finish_reason=script.finish))
            if isinstance(script.usage, Usage):
                say(chunk=Chunk(usage=script.usage))


class _Listener:
    def __init__(self, book: Book) -> None:
        self.book = book
        self.clients: dict[_Client, asyncio.Task[None]] = {}
        self.address: tuple[str, int] | None = None
        self.server: asyncio.Server

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = _Client(self, reader, writer)
        task = asyncio.current_task()
        assert task is not None
        self.clients[client] = task
        try:
            await client.serve()
        finally:
            del self.clients[client]

    def disconnect(self, *, reset: bool) -> None:
        for client in list(self.clients):
            client.drop(reset=reset)

    async def aclose(self) -> None:
        loop = asyncio.get_running_loop()
        for listening in self.server.sockets:
            loop.remove_reader(listening.fileno())
        # What was accepted just now becomes a client first: Python 3.11 loses its socket if the server is closed by then.
        for _ in range(5):
            await asyncio.sleep(0)
        self.server.close()
        tasks = list(self.clients.values())
        self.disconnect(reset=False)
        await asyncio.gather(*tasks)


class Part:
    name = "lines"
    alpn = ()

    async def start(self, book: Book, *, host: str, port: int, uds: str | None, ssl: Any) -> _Listener:
        found = _Listener(book)
        found.server = await asyncio.start_server(found.accept, host, port, limit=1 << 26)
        found.address = found.server.sockets[0].getsockname()[:2]
        return found

    def url(self, host: str, port: int, *, secure: bool) -> str:
        return f"lines://{host}:{port}"
