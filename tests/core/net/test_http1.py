"""One HTTP/1.1 connection: against a scripted server on loopback, and byte by byte against h11."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import ssl
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from itertools import pairwise
from typing import Any, cast

import h11
import pytest
import trustme
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spanwire.errors import ConnectionFailed, MessageTooBig, ProtocolError, SpanwireError
from spanwire.net import http1 as http1_module
from spanwire.net.http1 import MAX_HEAD_BYTES, HTTP1Connection

REQUEST = b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"


class Recorder:
    """A sink that writes down what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.trailers: dict[str, str] = {}
        self.batches = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_head(self, status: int, headers: dict[str, str]) -> None:
        self.events.append(("head", status, headers))
        self.started.set_result(None)

    def on_body(self, data: bytes) -> None:
        assert data
        if self.events and self.events[-1][0] == "body":
            data = self.events.pop()[1] + data
        self.events.append(("body", data))

    def on_batch(self) -> None:
        self.batches += 1
        if not self.arrived.done():
            self.arrived.set_result(None)

    def on_sent(self) -> None:
        self.events.append(("sent",))
        self.sent.set_result(None)

    def on_trailers(self, trailers: dict[str, str]) -> None:
        assert not self.done.done()
        self.trailers = trailers

    def on_end(self) -> None:
        self.events.append(("end",))
        self.done.set_result(None)

    def on_lost(self, error: SpanwireError) -> None:
        self.events.append(("lost", error))
        self.done.set_result(None)

    @property
    def kinds(self) -> list[str]:
        return [event[0] for event in self.events]

    @property
    def status(self) -> int:
        return cast(int, next(event[1] for event in self.events if event[0] == "head"))

    @property
    def headers(self) -> dict[str, str]:
        return cast(dict[str, str], next(event[2] for event in self.events if event[0] == "head"))

    @property
    def body(self) -> bytes:
        return b"".join(event[1] for event in self.events if event[0] == "body")

    @property
    def error(self) -> SpanwireError:
        assert self.kinds[-1] == "lost", self.events
        return cast(SpanwireError, self.events[-1][1])


# --- a server that says what it is told --------------------------------------------------------------------------------

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def request(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b"\r\n\r\n")


@contextlib.asynccontextmanager
async def connected(
    script: Script, *, tls: tuple[ssl.SSLContext, ssl.SSLContext] | None = None
) -> AsyncIterator[HTTP1Connection]:
    """A connection to a server that runs ``script`` on it and closes."""
    tasks: list[asyncio.Task[Any]] = []
    accepted = asyncio.Event()
    failures: list[Exception] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.append(task)
        accepted.set()
        try:
            await script(reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client has left
        except Exception as error:
            failures.append(error)
            raise
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 20, ssl=tls[0] if tls else None)
    port = server.sockets[0].getsockname()[1]
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(
        lambda: HTTP1Connection(f"127.0.0.1:{port}"), "127.0.0.1", port, ssl=tls[1] if tls else None
    )
    try:
        yield connection
    finally:
        connection.abort()
        await accepted.wait()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        server.close()
        if sys.version_info >= (3, 13):  # its side of a TLS connection that does not read never ends by itself
            server.abort_clients()
        await server.wait_closed()
        await connection.aclose()
    assert not failures


async def exchange(connection: HTTP1Connection, data: bytes = REQUEST) -> Recorder:
    sink = Recorder()
    connection.send(data, sink)
    await sink.done
    return sink


def saying(*answers: bytes) -> Script:
    """Each request gets the next answer; after the last one the server waits for the client to close."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in answers:
            await request(reader)
            writer.write(answer)
            await writer.drain()
        await reader.read()

    return script


def closing(*answers: bytes) -> Script:
    """The same, but the server closes after the last answer."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in answers:
            await request(reader)
            writer.write(answer)
            await writer.drain()

    return script


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_connection_is_used_again_and_again() -> None:
    async def main() -> None:
        answers = [OK, b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", OK]
        async with connected(saying(*answers)) as connection:
            assert connection.usable()
            for status, body in ((200, b"hello"), (404, b""), (200, b"hello")):
                sink = await exchange(connection)
                assert (sink.status, sink.body, sink.kinds[-1]) == (status, body, "end")
                assert connection.usable()

    run(main)


def test_it_carries_one_exchange_at_a_time() -> None:
    async def main() -> None:
        gate = asyncio.get_running_loop().create_future()

        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await request(reader)
            await gate
            writer.write(OK)

        async with connected(script) as connection:
            sink = Recorder()
            connection.send(REQUEST, sink)
            with pytest.raises(ConnectionFailed) as caught:
                connection.send(REQUEST, Recorder())
            assert caught.value.phase == "send"
            assert connection.usable(), "after the answer that is under way"
            gate.set_result(None)
            await sink.done
            assert sink.body == b"hello"

    run(main)


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (OK, b"hello"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", b"hello"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: Chunked\r\n\r\n2;a=b\r\nhe\r\n3\r\nllo\r\n0\r\nX-Late: 1\r\n\r\n", b"hello"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b""),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", b""),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b""),
        (b"HTTP/1.1 200\r\nContent-Length: 5\r\n\r\nhello", b"hello"),
        (b"HTTP/1.1 200 OK\r\nUpgrade: h2c\r\nConnection: Upgrade, Keep-Alive\r\nContent-Length: 5\r\n\r\nhello", b"hello"),
    ],
)  # fmt: skip
def test_bodies_that_end_by_themselves_leave_the_connection_usable(answer: bytes, body: bytes) -> None:
    async def main() -> None:
        async with connected(saying(answer, answer)) as connection:
            for _ in range(2):
                sink = await exchange(connection)
                assert (sink.kinds[-1], sink.body) == ("end", body)
                assert "x-late" not in sink.headers
                assert connection.usable()

    run(main)


def test_a_body_may_end_with_the_connection() -> None:
    async def main() -> None:
        async with connected(closing(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nhello")) as connection:
            sink = await exchange(connection)
            assert (sink.kinds, sink.body) == (["head", "body", "end"], b"hello")
            assert sink.batches >= 1
            assert not connection.usable()

    run(main)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nconnection: Close\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello",
    ],
)
def test_a_server_that_will_close_is_believed_at_once(answer: bytes) -> None:
    async def main() -> None:
        async with connected(saying(answer)) as connection:
            sink = await exchange(connection)
            assert (sink.kinds[-1], sink.body) == ("end", b"hello")
            assert not connection.usable()
            with pytest.raises(ConnectionFailed):
                connection.send(REQUEST, Recorder())

    run(main)


def test_http_1_0_with_keep_alive_is_kept() -> None:
    async def main() -> None:
        answer = b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 5\r\n\r\nhello"
        async with connected(saying(answer)) as connection:
            await exchange(connection)
            assert connection.usable()

    run(main)


@pytest.mark.parametrize(
    "before",
    [
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\nContent-Type: hint\r\n\r\n",
        b"HTTP/1.1 102 Processing\r\n\r\n" * 5,
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nKeep-Alive: timeout=0\r\n\r\n",
    ],
)
def test_answers_before_the_answer_are_skipped(before: bytes) -> None:
    async def main() -> None:
        async with connected(saying(before + OK, OK)) as connection:
            sink = await exchange(connection)
            assert (sink.status, sink.headers, sink.body) == (200, {"content-length": "5"}, b"hello")
            assert connection.usable()
            assert (await exchange(connection)).body == b"hello"

    run(main)


def test_header_names_are_lower_case_and_repeated_ones_are_joined() -> None:
    async def main() -> None:
        answer = b"HTTP/1.1 200 OK\r\nX-A: 1\r\nx-a: 2\r\nX-B:  sp \xe9\r\nX-C:\r\nContent-Length: 0\r\n\r\n"
        async with connected(saying(answer)) as connection:
            sink = await exchange(connection)
            assert sink.headers == {"x-a": "1, 2", "x-b": "sp \xe9", "x-c": "", "content-length": "0"}

    run(main)


def test_white_space_around_a_value_is_not_part_of_it() -> None:
    """RFC 9110 section 5.5."""

    async def main() -> None:
        connection, _ = faked()
        sink = Recorder()
        connection.send(REQUEST, sink)
        connection.data_received(b"HTTP/1.1 200 OK\r\nRetry-After: \t 3 \t\r\nContent-Length: 0 \r\n\r\n")
        assert sink.headers == {"retry-after": "3", "content-length": "0"}

    run(main)


def test_an_exchange_does_not_feel_the_ones_before_it() -> None:
    async def main() -> None:
        connection, _ = faked()
        head = big_head(MAX_HEAD_BYTES // 4)
        for _ in range(8):  # the limit on a head counts this head only
            sink = Recorder()
            connection.send(REQUEST, sink)
            feed(connection, head, 1000)
            assert sink.kinds == ["head", "end"]
        sink = Recorder()
        connection.send(REQUEST, sink)
        connection.data_received(b"HTTP/1.1 204 No Content\r\n\r\n")  # has no length, as a body up to the end has
        assert sink.kinds == ["head", "end"]
        sink = Recorder()
        connection.send(REQUEST, sink)
        connection.connection_lost(None)
        assert isinstance(sink.error, ConnectionFailed)
        assert sink.error.phase == "wait"

    run(main)


def test_trailers_are_not_headers() -> None:
    async def main() -> None:
        connection, _ = faked()
        sink = Recorder()
        connection.send(REQUEST, sink)
        connection.data_received(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nKeep-Alive: timeout=0\r\nX-Late: 1\r\n\r\n"
        )
        assert sink.headers == {"transfer-encoding": "chunked"}
        assert sink.trailers == {"keep-alive": "timeout=0", "x-late": "1"}
        assert connection.usable()
        second = Recorder()
        connection.send(REQUEST, second)
        connection.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        assert second.trailers == {}

    run(main)


def test_trailers_without_end_are_refused() -> None:
    async def main() -> None:
        connection, _ = faked()
        sink = Recorder()
        connection.send(REQUEST, sink)
        connection.data_received(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n")
        for number in range(MAX_HEAD_BYTES // 1000 + 9):
            if sink.done.done():
                break
            connection.data_received(b"X-%d: " % number + b"x" * 1000 + b"\r\n")
        assert isinstance(sink.error, ProtocolError)
        assert "trailers" in sink.error.message
        assert not connection.usable()

    run(main)


# --- idle life ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "usable_for_s"),
    [
        (b"timeout=5", 4),
        (b"timeout=5, max=100", 4),
        (b"max=100,timeout=5", 4),
        (b"Timeout=5", 4),
        (b"timeout=1", 0.5),
        (b"timeout=0", 0),
        (b"timeout=x", None),
        (b"max=100", None),
        (b"", None),
    ],
)
def test_the_servers_keep_alive_timeout_is_heard(
    monkeypatch: pytest.MonkeyPatch, header: bytes, usable_for_s: float | None
) -> None:
    class Clock:
        now_ns = 1_000_000_000

        def perf_counter_ns(self) -> int:
            return self.now_ns

    clock = Clock()
    monkeypatch.setattr(http1_module, "time", clock)

    async def main() -> None:
        connection, _ = faked()
        sink = Recorder()
        connection.send(REQUEST, sink)
        clock.now_ns = arrived_ns = 7_000_000_000
        connection.data_received(b"HTTP/1.1 200 OK\r\nKeep-Alive: " + header + b"\r\nContent-Length: 0\r\n\r\n")
        assert sink.kinds[-1] == "end"
        if usable_for_s is None:
            clock.now_ns += 10**15
            assert connection.usable()
        else:
            if usable_for_s:
                clock.now_ns = arrived_ns + int(usable_for_s * 1e9) - 1
                assert connection.usable()
            clock.now_ns = arrived_ns + int(usable_for_s * 1e9)
            assert not connection.usable()

    run(main)


def test_a_keep_alive_timeout_is_that_of_the_last_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        connection, _ = faked()
        for header in (b"Keep-Alive: timeout=300\r\n", b""):
            sink = Recorder()
            connection.send(REQUEST, sink)
            connection.data_received(b"HTTP/1.1 200 OK\r\n" + header + b"Content-Length: 0\r\n\r\n")
            assert connection.usable()
        assert connection._keep_alive_until_ns == 0

    run(main)


def test_a_server_that_closes_an_idle_connection() -> None:
    async def main() -> None:
        async with connected(closing(OK)) as connection:
            await exchange(connection)
            await connection.aclose()  # returns once it is closed, whoever closed it
            assert not connection.usable()
            with pytest.raises(ConnectionFailed) as caught:
                connection.send(REQUEST, Recorder())
            assert caught.value.phase == "send"
            assert caught.value.endpoint is not None

    run(main)


@pytest.mark.parametrize("extra", [b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n", b"x", b"\r\n", OK])
def test_unexpected_bytes_while_idle_make_it_unusable(extra: bytes) -> None:
    async def main() -> None:
        connection, transport = faked()
        sink = Recorder()
        connection.send(REQUEST, sink)
        connection.data_received(OK)
        assert connection.usable()
        connection.data_received(extra)
        assert not connection.usable()
        assert transport.aborted
        assert sink.kinds == ["head", "body", "end"]

    run(main)


@pytest.mark.parametrize("extra", [b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n", b"junk\r\n\r\n", OK])
def test_more_than_the_answer_in_one_read_makes_it_unusable(extra: bytes) -> None:
    async def main() -> None:
        connection, _ = faked()
        sink = Recorder()
        connection.send(REQUEST, sink)
        connection.data_received(OK + extra)
        assert (sink.kinds, sink.body) == (["head", "body", "end"], b"hello")
        assert not connection.usable()

    run(main)


def test_unexpected_bytes_before_the_first_request() -> None:
    async def main() -> None:
        connection, _ = faked()
        connection.data_received(b"220 smtp.example ready\r\n")
        assert not connection.usable()

    run(main)


# --- bad answers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "garbage",
    [
        b"220 smtp.example ESMTP\r\n",
        b"\x15\x03\x01\x00\x02\x02\x46",
        b"<html>\r\n\r\n",
        b"HTTP/1.1 2xx OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nBad Header\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: five\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhello\r\n0\r\n\r\n",
    ],
)
def test_what_is_not_http_is_refused(garbage: bytes) -> None:
    async def main() -> None:
        async with connected(saying(garbage)) as connection:
            sink = await exchange(connection)
            assert isinstance(sink.error, ProtocolError)
            assert sink.error.__cause__ is not None
            assert sink.error.endpoint
            assert not connection.usable()

    run(main)


def test_a_switch_of_protocols_that_nobody_asked_for() -> None:
    async def main() -> None:
        answer = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"
        async with connected(saying(answer)) as connection:
            sink = await exchange(connection)
            assert isinstance(sink.error, ProtocolError)
            assert "protocols" in str(sink.error)
            assert not connection.usable()

    run(main)


def test_a_head_without_an_end_is_refused() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n")
        while True:
            writer.write(b"X-Filler: " + b"x" * 1000 + b"\r\n")
            await writer.drain()

    async def main() -> None:
        async with connected(script) as connection:
            sink = await exchange(connection)
            assert isinstance(sink.error, ProtocolError)
            assert str(MAX_HEAD_BYTES) in str(sink.error)
            assert not connection.usable()

    run(main)


def big_head(total: int) -> bytes:
    start, end = b"HTTP/1.1 200 OK\r\nX-Filler: ", b"\r\nContent-Length: 0\r\n\r\n"
    return start + b"x" * (total - len(start) - len(end)) + end


@pytest.mark.parametrize("size", [1000, 65536, 10**9])
def test_a_head_over_the_limit_is_refused_whatever_the_size_of_the_reads(size: int) -> None:
    async def main() -> None:
        connection, _ = faked()
        sink = Recorder()
        connection.send(REQUEST, sink)
        feed(connection, big_head(2 * MAX_HEAD_BYTES), size)
        assert sink.kinds == ["lost"]
        assert isinstance(sink.error, ProtocolError)
        assert not connection.usable()

    run(main)


@pytest.mark.parametrize("size", [1000, 10**9])
def test_a_head_below_the_limit_is_fine_whatever_follows_it(size: int) -> None:
    async def main() -> None:
        connection, _ = faked()
        sink = Recorder()
        connection.send(REQUEST, sink)
        body = b"b" * 300_000
        head = big_head(MAX_HEAD_BYTES - 1000).replace(b"Content-Length: 0", b"Content-Length: 300000")
        feed(connection, head + body, size)
        assert sink.kinds == ["head", "body", "end"]
        assert sink.body == body

    run(main)


def test_endless_interim_answers_are_refused() -> None:
    async def main() -> None:
        connection, _ = faked()
        sink = Recorder()
        connection.send(REQUEST, sink)
        for _ in range(10_000):
            if sink.events:
                break
            connection.data_received(b"HTTP/1.1 102 Processing\r\n\r\n")
        assert isinstance(sink.error, ProtocolError)

    run(main)


@pytest.mark.parametrize("where", ["on_head", "on_body", "on_batch", "on_end"])
@pytest.mark.parametrize("error", [MessageTooBig("too big"), ZeroDivisionError("a bug")])
def test_what_a_sink_raises_ends_the_exchange_as_its_error(where: str, error: Exception) -> None:
    async def main() -> None:
        connection, transport = faked()
        sink = Recorder()

        def raising(*_: object) -> None:
            raise error

        setattr(sink, where, raising)
        connection.send(REQUEST, sink)
        # on_batch also comes after on_end, when the exchange is over; what it raises there is nobody's any more
        connection.data_received(OK[:-1] if where == "on_batch" else OK)
        found = sink.error
        if isinstance(error, SpanwireError):
            assert found is error
        else:
            assert isinstance(found, ProtocolError)
            assert found.__cause__ is error
        assert not connection.usable()
        assert transport.aborted

    run(main)


# --- breaks ------------------------------------------------------------------------------------------------------------


def reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST instead of FIN."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@pytest.mark.parametrize("rst", [False, True], ids=["fin", "rst"])
@pytest.mark.parametrize(
    ("begun", "phase"),
    [
        (b"", "wait"),
        (b"HTTP/1.1 200", "read"),
        (b"HTTP/1.1 200 OK\r\n", "read"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", "read"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhell", "read"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n", "read"),
        (b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n40\r\ndata: {"id', "read"),
    ],
)
def test_a_break_before_the_end_of_the_answer(begun: bytes, phase: str, rst: bool) -> None:
    async def main() -> None:
        arrived = asyncio.get_running_loop().create_future()

        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await request(reader)
            writer.write(begun)
            await writer.drain()
            if begun:
                await arrived
            if rst:
                reset(writer)

        async with connected(script) as connection:
            sink = Recorder()
            connection.send(REQUEST, sink)
            if begun:
                await sink.arrived
                arrived.set_result(None)
            await sink.done
            error = sink.error
            assert isinstance(error, ConnectionFailed)
            assert error.phase == phase
            assert error.retryable
            assert error.endpoint
            assert isinstance(error.__cause__, ConnectionResetError) is rst
            assert not connection.usable()
            assert connection.first_arrival_ns > 0 or phase == "wait"
            if b"hello" in begun:
                assert sink.kinds == ["head", "body", "lost"], "what came before the break comes first"
                assert sink.body.startswith(b"hello")

    run(main)


def test_a_reset_is_no_end_of_a_body_that_ends_with_the_connection() -> None:
    async def main() -> None:
        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await request(reader)
            writer.write(b"HTTP/1.1 200 OK\r\n\r\nhel")
            await writer.drain()
            await reader.readexactly(1)
            reset(writer)

        async with connected(script) as connection:
            sink = Recorder()
            connection.send(REQUEST, sink)
            await sink.started
            assert connection._transport is not None
            connection._transport.write(b"x")
            await sink.done
            assert isinstance(sink.error, ConnectionFailed)

    run(main)


def test_a_connection_lost_within_interim_answers_is_no_end() -> None:
    async def main() -> None:
        async with connected(closing(b"HTTP/1.1 100 Continue\r\n\r\n")) as connection:
            sink = await exchange(connection)
            assert isinstance(sink.error, ConnectionFailed)

    run(main)


# --- leaving, closing --------------------------------------------------------------------------------------------------


def test_leave_closes_and_the_server_notices() -> None:
    async def main() -> None:
        noticed = asyncio.get_running_loop().create_future()

        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await request(reader)
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            await writer.drain()
            with contextlib.suppress(ConnectionError):
                await reader.read()
            noticed.set_result(None)

        async with connected(script) as connection:
            sink = Recorder()
            connection.send(REQUEST, sink)
            await sink.started
            connection.leave(sink)
            assert not connection.usable()
            await noticed
            await connection.aclose()
            assert sink.kinds == ["head"], "who has left is not told anything more"
            connection.leave(sink)  # harmless

    run(main)


def test_leaving_an_exchange_that_is_over_leaves_the_connection_alone() -> None:
    async def main() -> None:
        async with connected(saying(OK, OK)) as connection:
            old = await exchange(connection)
            connection.leave(old)
            assert connection.usable()
            sink = Recorder()
            connection.send(REQUEST, sink)
            connection.leave(old)
            await sink.done
            assert sink.body == b"hello"

    run(main)


def test_aclose_of_an_idle_connection() -> None:
    async def main() -> None:
        async with connected(saying(OK)) as connection:
            await exchange(connection)
            await connection.aclose()
            assert not connection.usable()
            await connection.aclose()

    run(main)


@pytest.mark.parametrize("how", ["aclose", "abort"])
def test_an_exchange_is_told_when_its_connection_is_closed_under_it(how: str) -> None:
    """Or whoever waits for its next bytes waits for ever."""

    async def main() -> None:
        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await request(reader)
            await reader.read()

        async with connected(script) as connection:
            sink = Recorder()
            connection.send(REQUEST, sink)
            if how == "abort":
                connection.abort()
            else:
                await connection.aclose()
            async with asyncio.timeout(2):
                await sink.done
            assert isinstance(sink.error, ConnectionFailed)

    run(main)


@pytest.mark.parametrize("secure", [False, True], ids=["tcp", "tls"])
def test_abort_ends_a_close_in_order_that_does_not_end(secure: bool) -> None:
    """The peer reads nothing, so what is to be sent first is never sent. This is how the pool closes such a one."""

    async def main() -> None:
        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            await asyncio.get_running_loop().create_future()

        async with connected(script, tls=contexts() if secure else None) as connection:
            sink = Recorder()
            connection.send(REQUEST + bytes(32 * 1024 * 1024), sink)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await connection.aclose()
            connection.abort()
            async with asyncio.timeout(2):
                await connection.aclose()

    run(main)


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # asyncio's: a transport cannot be closed any more
def test_abort_on_a_closed_loop_closes_the_socket_once() -> None:
    """The transport of a closed loop is collected later; it must not close a number that is somebody else's by then."""
    loop = asyncio.new_event_loop()
    near, far = socket.socketpair()
    number = near.fileno()
    _, connection = loop.run_until_complete(loop.create_connection(lambda: HTTP1Connection("h:1"), sock=near))
    del _, near
    loop.close()
    with far:
        connection.abort()
        connection.abort()
        assert not connection.usable()
        far.settimeout(5)
        assert far.recv(1) == b""
        try:
            os.fstat(number)
        except OSError:  # closed already, so the number is free; now it is somebody else's
            os.dup2(far.fileno(), number)
            del connection
            gc.collect()
            os.fstat(number)
            os.close(number)
        else:
            del connection
            gc.collect()


# --- flow --------------------------------------------------------------------------------------------------------------


def contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    authority = trustme.CA()
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    client = ssl.create_default_context()
    authority.issue_cert("127.0.0.1").configure_cert(server)
    authority.configure_trust(client)
    return server, client


secured = pytest.mark.parametrize("secure", [False, True], ids=["tcp", "tls"])


@secured
def test_a_small_request_is_sent_when_send_returns(secure: bool) -> None:
    async def main() -> None:
        async with connected(saying(OK, OK), tls=contexts() if secure else None) as connection:
            for _ in range(2):
                sink = Recorder()
                assert connection.send(REQUEST, sink) is True
                await sink.done
                assert "sent" not in sink.kinds

    run(main)


@secured
def test_the_end_of_a_large_upload_is_marked(secure: bool) -> None:
    async def main() -> None:
        size = 16 * 1024 * 1024
        go = asyncio.get_running_loop().create_future()

        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await go
            await request(reader)
            await reader.readexactly(size)
            writer.write(OK)
            await reader.read()

        async with connected(script, tls=contexts() if secure else None) as connection:
            sink = Recorder()
            head = b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % size
            assert connection.send(head + bytes(size), sink) is False
            for _ in range(20):
                await asyncio.sleep(0)
            assert not sink.sent.done(), "the server has not read anything"
            go.set_result(None)
            await sink.sent
            await sink.done
            assert sink.kinds == ["sent", "head", "body", "end"]
            assert connection.usable()
            assert connection.send(REQUEST, Recorder()) is True, "the next request is small again"

    run(main)


def test_a_paused_consumer_stops_the_server() -> None:
    async def main() -> None:
        chunk = 64 * 1024
        count = 256
        asked = asyncio.get_running_loop().create_future()
        written = 0

        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal written
            writer.transport.set_write_buffer_limits(high=0)
            await request(reader)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (chunk * count))
            await writer.drain()
            await asked
            for _ in range(count):
                writer.write(bytes(chunk))
                written += chunk
                await writer.drain()
            await reader.read()

        async with connected(script) as connection:
            sink = Recorder()
            connection.send(REQUEST, sink)
            await sink.started
            connection.pause_reading()
            connection.pause_reading()
            states = [connection.paused]
            asked.set_result(None)
            before = -1
            while written != before:  # until the kernel's buffers are full and the server is held
                before = written
                for _ in range(50):
                    await asyncio.sleep(0)
            assert written < chunk * count, "the server was not held"
            assert sink.body == b""
            connection.resume_reading()
            connection.resume_reading()
            assert [*states, connection.paused] == [True, False]
            await sink.done
            assert len(sink.body) == chunk * count

    run(main)


def test_arrivals_are_stamped() -> None:
    async def main() -> None:
        connection, _ = faked()
        sink = Recorder()
        connection.send(REQUEST, sink)
        assert connection.first_arrival_ns == 0
        connection.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n")
        first = connection.first_arrival_ns
        assert first == connection.arrival_ns > 0
        connection.data_received(b"a")
        connection.data_received(b"b")
        assert connection.first_arrival_ns == first
        assert connection.arrival_ns >= first
        assert sink.batches == 3
        connection.send(REQUEST, Recorder())
        assert connection.first_arrival_ns == 0

    run(main)


def test_the_round_trip_is_the_kernels_or_that_of_the_dial() -> None:
    async def main() -> None:
        async with connected(saying(OK)) as connection:
            connection.set_connect_rtt(5_000_000)
            await exchange(connection)
            rtt_ns = connection.rtt_min_ns()
            assert rtt_ns is not None
            assert 0 < rtt_ns <= 5_000_000_000
            connection.set_connect_rtt(0)  # a unix socket
            assert connection.rtt_min_ns() == 0
        connection, _ = faked()
        assert connection.rtt_min_ns() is None
        connection.set_connect_rtt(7)
        assert connection.rtt_min_ns() == 7

    run(main)


# --- any split, and the oracle -----------------------------------------------------------------------------------------


class FakeTransport:
    """What the connection asks of its asyncio transport."""

    def __init__(self) -> None:
        self.written = b""
        self.closing = False
        self.aborted = False

    def write(self, data: bytes) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.closing = self.aborted = True

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default


def faked() -> tuple[HTTP1Connection, FakeTransport]:
    connection, transport = HTTP1Connection("host:1"), FakeTransport()
    connection.connection_made(cast(asyncio.Transport, transport))
    return connection, transport


def feed(connection: HTTP1Connection, data: bytes, size: int) -> None:
    for begin in range(0, len(data), size):
        connection.data_received(data[begin : begin + size])


token = st.text("abcdefghijklmnopqrstuvwxyz-", min_size=1, max_size=6)
names = token.map(lambda name: f"x-{name}")
values = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), max_size=8)


@st.composite
def answers(draw: st.DrawFn) -> tuple[bytes, bool]:
    """A legal answer, and whether only the end of the connection ends it."""
    interim = draw(st.lists(st.sampled_from([100, 102, 103]), max_size=2))
    stream = b"".join(b"HTTP/1.1 %d Interim\r\nx-early: 1\r\n\r\n" % status for status in interim)
    status = draw(st.sampled_from([200, 200, 200, 201, 204, 304, 400, 404, 429, 500, 503]))
    headers = draw(st.lists(st.tuples(names, values), max_size=4))
    framing = draw(st.sampled_from(["length", "chunked", "eof"]))
    body = b"" if status in (204, 304) else draw(st.binary(max_size=80))
    if draw(st.booleans()):
        headers.append(("Connection", draw(st.sampled_from(["close", "keep-alive"]))))
    content = body
    if status in (204, 304):
        framing = "none"
    if framing == "length":
        headers.append(("Content-Length", str(len(body))))
    elif framing == "chunked":
        headers.append(("Transfer-Encoding", "chunked"))
        content = b""
        rest = body
        while rest:
            size = draw(st.integers(1, len(rest)))
            extension = draw(st.sampled_from([b"", b";a=b", b';a="b"']))
            content += b"%x%b\r\n%b\r\n" % (size, extension, rest[:size])
            rest = rest[size:]
        content += b"0\r\n" + b"".join(b"x-late: 1\r\n" for _ in range(draw(st.integers(0, 2)))) + b"\r\n"
    order = draw(st.permutations(headers))
    head = "".join(f"{name}: {value}\r\n" for name, value in order).encode()
    reason = draw(st.sampled_from([b"OK", b"Some Words", b""]))
    stream += b"HTTP/1.1 %d %b\r\n%b\r\n%b" % (status, reason, head, content)
    return stream, framing == "eof"


def by_h11(stream: bytes, *, eof: bool) -> tuple[int, dict[str, str], bytes, bool]:
    """What an independent implementation makes of it: status, headers, body, whether the connection lives on."""
    peer = h11.Connection(h11.CLIENT)
    peer.send(h11.Request(method="GET", target="/", headers=[("Host", "h")]))
    peer.send(h11.EndOfMessage())
    peer.receive_data(stream)
    if eof:
        peer.receive_data(b"")
    headers: dict[str, str] = {}
    status, body = 0, b""
    while True:
        event = peer.next_event()
        if isinstance(event, h11.Response):
            status = event.status_code
            for raw_name, raw_value in event.headers:
                name, value = raw_name.decode(), raw_value.decode("latin-1")
                headers[name] = f"{headers[name]}, {value}" if name in headers else value
        elif isinstance(event, h11.Data):
            body += bytes(event.data)
        elif isinstance(event, h11.EndOfMessage):
            return status, headers, body, peer.their_state is h11.DONE and not eof
        else:
            assert isinstance(event, h11.InformationalResponse), event


def play(reads: list[bytes], *, eof: bool) -> tuple[Recorder, bool]:
    """Twice on one connection where that is allowed: the second answer must not feel the first."""

    async def main() -> tuple[Recorder, bool]:
        connection, transport = faked()
        sink = Recorder()
        connection.send(REQUEST, sink)
        for read in reads:
            connection.data_received(read)
        if eof:
            connection.connection_lost(None)
        usable = connection.usable()
        assert usable is not transport.closing or eof
        if usable:
            second = Recorder()
            connection.send(REQUEST, second)
            for read in reads:
                connection.data_received(read)
            assert second.events == sink.events
        return sink, usable

    return asyncio.run(main())


@settings(max_examples=60)
@given(answers(), st.lists(st.integers(0, 1000), max_size=10))
@example(
    (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", False), [47, 48, 50, 55, 56, 57]
)
def test_any_split_gives_the_same_and_h11_agrees(answer: tuple[bytes, bool], cuts: list[int]) -> None:
    stream, eof = answer
    edges = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    status, headers, body, alive = by_h11(stream, eof=eof)
    whole, usable = play([stream], eof=eof)
    assert whole.kinds == ["head", *(["body"] if body else []), "end"]
    assert (whole.status, whole.headers, whole.body) == (status, headers, body)
    assert usable is alive
    for reads in (
        [stream[begin:end] for begin, end in pairwise(edges)],
        [bytes([byte]) for byte in stream],
    ):
        pieces, still_usable = play(reads, eof=eof)
        assert pieces.events == whole.events
        assert still_usable is usable


def shape(sink: Recorder) -> list[Any]:
    return [type(event[1]) if event[0] == "lost" else event for event in sink.events]


@settings(max_examples=60)
@given(
    st.lists(
        st.sampled_from([
            b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 100 Continue\r\n\r\n", b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n", b"\r\n",
            b"3\r\n", b"abc", b"abc\r\n", b"0\r\n\r\n", b"X: y\r\n", b"Connection: close\r\n", b"\xff", b"junk", b"\n", OK,
        ]),
        max_size=8,
    ).map(b"".join)
)  # fmt: skip
def test_any_split_of_nonsense_is_the_same_nonsense(stream: bytes) -> None:
    """The same events, errors by their class, whether it comes at once or byte by byte; then the peer closes."""

    def outcome(reads: list[bytes]) -> list[Any]:
        async def main() -> list[Any]:
            connection, _ = faked()
            sink = Recorder()
            connection.send(REQUEST, sink)
            for read in reads:
                connection.data_received(read)
            connection.connection_lost(None)
            return shape(sink)

        return asyncio.run(main())

    assert outcome([stream]) == outcome([bytes([byte]) for byte in stream])
