"""One HTTP/2 connection against a scripted server on loopback, which is written with h2's other side."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from itertools import pairwise
from typing import Any, cast

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.settings
import pytest
import trustme
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    PushPromiseFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spanwire.errors import ConfigurationError, ConnectionFailed, MessageTooBig, ProtocolError, SpanwireError
from spanwire.net import http2 as http2_module
from spanwire.net.http2 import (
    CONNECTION_WINDOW_BYTES,
    MAX_HEAD_BYTES,
    MAX_STREAMS,
    STREAM_WINDOW_BYTES,
    HTTP2Connection,
    HTTP2Stream,
)
from tests.http2_server import Server
from tests.support import run

Codes = h2.settings.SettingCodes
HEADERS = [(":method", "POST"), (":scheme", "http"), (":authority", "h"), (":path", "/"), ("x-a", "b")]


class Recorder:
    """A sink that writes down what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.trailers: dict[str, str] = {}
        self.batches = 0
        loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = loop.create_future()
        self.sent: asyncio.Future[None] = loop.create_future()
        self.started: asyncio.Future[None] = loop.create_future()
        self.arrived = asyncio.Event()

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
        self.arrived.set()

    def on_sent(self) -> None:
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
    def headers(self) -> dict[str, str]:
        return cast(dict[str, str], next(event[2] for event in self.events if event[0] == "head"))

    @property
    def body(self) -> bytes:
        return b"".join(event[1] for event in self.events if event[0] == "body")

    @property
    def error(self) -> SpanwireError:
        assert self.kinds[-1] == "lost", self.events
        return cast(SpanwireError, self.events[-1][1])

    async def body_of(self, size: int) -> bytes:
        while len(self.body) < size:
            self.arrived.clear()
            await self.arrived.wait()
        return self.body


Script = Callable[[Server], Awaitable[None]]


@contextlib.asynccontextmanager
async def connected(
    script: Script, *, tls: tuple[ssl.SSLContext, ssl.SSLContext] | None = None
) -> AsyncIterator[HTTP2Connection]:
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
            await script(Server(reader, writer))
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client has left
        except Exception as error:
            failures.append(error)
            raise
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls[0] if tls else None)
    port = server.sockets[0].getsockname()[1]
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(
        lambda: HTTP2Connection(f"127.0.0.1:{port}"), "127.0.0.1", port, ssl=tls[1] if tls else None
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
        await server.wait_closed()
        await connection.aclose()
    assert not failures


def ask(connection: HTTP2Connection, body: bytes = b"", sink: Recorder | None = None) -> tuple[HTTP2Stream, Recorder]:
    stream, recorder = connection.stream(), sink or Recorder()
    stream.send(HEADERS, body, recorder)
    return stream, recorder


async def never() -> None:
    await asyncio.get_running_loop().create_future()


def test(script: Script, body: Callable[[HTTP2Connection], Awaitable[None]]) -> None:
    async def main() -> None:
        async with connected(script) as connection:
            await body(connection)

    run(main)


test.__test__ = False  # type: ignore[attr-defined]


# --- one exchange -----------------------------------------------------------------------------------------------------


def test_a_request_and_its_answer() -> None:
    seen: list[Any] = []

    async def script(server: Server) -> None:
        server.hello()
        request = await server.wait(h2.events.RequestReceived)
        seen.append(request.headers)
        seen.append((await server.wait(h2.events.DataReceived)).data)
        await server.wait(h2.events.StreamEnded)
        server.head(1, ("X-Upper", "no"), ("a", "1"), ("b", "2"), ("a", "3"))
        server.data(1, b"hel")
        server.data(1, b"lo", end=True)
        await never()

    async def body(connection: HTTP2Connection) -> None:
        stream, recorder = ask(connection, b"prompt")
        await recorder.sent
        assert stream.first_arrival_ns == 0
        await recorder.done
        assert recorder.kinds == ["head", "body", "end"]
        assert recorder.events[0] == ("head", 200, {"x-upper": "no", "a": "1, 3", "b": "2"})
        assert recorder.body == b"hello"
        assert recorder.batches
        assert 0 < stream.first_arrival_ns <= stream.arrival_ns
        assert connection.usable()
        rtt_ns = stream.rtt_min_ns()
        assert rtt_ns is None or rtt_ns > 0

    async def lower(server: Server) -> None:
        server.http.config.normalize_outbound_headers = True
        await script(server)

    test(lower, body)
    assert seen == [HEADERS, b"prompt"]


def test_the_request_does_not_wait_for_the_servers_settings() -> None:
    async def script(server: Server) -> None:
        stream = await server.request()
        server.hello()
        server.answer(stream)
        await never()

    async def body(connection: HTTP2Connection) -> None:
        _, recorder = ask(connection)
        await recorder.done
        assert recorder.body == b"hello"

    test(script, body)


def test_an_answer_without_a_body_and_one_with_trailers() -> None:
    async def script(server: Server) -> None:
        server.hello()
        server.head(await server.request(), end=True)
        stream = await server.request()
        server.head(stream)
        server.data(stream, b"x")
        server.http.send_headers(stream, [("grpc-status", "0")], end_stream=True)
        server.flush()
        await never()

    async def body(connection: HTTP2Connection) -> None:
        _, first = ask(connection)
        await first.done
        assert first.kinds == ["head", "end"]
        _, second = ask(connection)
        await second.done
        assert second.kinds == ["head", "body", "end"]
        assert second.headers == {}
        assert second.trailers == {"grpc-status": "0"}

    test(script, body)


def test_interim_answers_are_skipped() -> None:
    gate = asyncio.Event()

    async def script(server: Server) -> None:
        server.hello()
        stream = await server.request()
        for status in ("100", "103"):
            server.head(stream, ("link", "x"), status=status)
        server.raw(GoAwayFrame(0, last_stream_id=stream))  # which can be seen from outside
        await gate.wait()
        server.answer(stream)
        await never()

    async def body(connection: HTTP2Connection) -> None:
        stream, recorder = ask(connection)
        while connection.usable():
            await asyncio.sleep(0)
        assert stream.first_arrival_ns == 0
        assert recorder.events == []
        gate.set()
        await recorder.done
        assert recorder.events[0] == ("head", 200, {})
        assert recorder.body == b"hello"
        assert stream.first_arrival_ns

    test(script, body)


@pytest.mark.parametrize("status", ["abc", "20", "099", "2000", "²00"])
def test_a_status_that_http_does_not_have_ends_its_exchange_alone(status: str) -> None:
    async def script(server: Server) -> None:
        server.hello()
        first, second = await server.request(), await server.request()
        server.head(first, status=status)
        assert (await server.wait(h2.events.StreamReset)).stream_id == first
        server.answer(second)
        await never()

    async def body(connection: HTTP2Connection) -> None:
        (_, bad), (_, good) = ask(connection), ask(connection)
        await asyncio.gather(bad.done, good.done)
        assert isinstance(bad.error, ProtocolError)
        assert "which HTTP does not have" in str(bad.error)
        assert good.body == b"hello"

    test(script, body)


@pytest.mark.parametrize("name", ["connection", "keep-alive", "te", "transfer-encoding", "upgrade"])
def test_a_header_that_http2_forbids_is_refused_before_anything_is_sent(name: str) -> None:
    async def script(server: Server) -> None:
        server.hello()
        server.answer(await server.request())
        await never()

    async def body(connection: HTTP2Connection) -> None:
        with pytest.raises(ConfigurationError, match=name):
            connection.stream().send([*HEADERS, (name, "x")], b"", Recorder())
        _, recorder = ask(connection)
        await recorder.done
        assert recorder.body == b"hello"

    test(script, body)


# --- many exchanges ---------------------------------------------------------------------------------------------------


def test_exchanges_go_on_side_by_side_and_each_is_woken_once_for_a_read() -> None:
    async def script(server: Server) -> None:
        server.hello()
        streams = [await server.request() for _ in range(20)]
        frames: list[Any] = []
        for stream in streams:
            server.http.send_headers(stream, [(":status", "200")])
        for _ in range(3):
            for stream in streams:
                server.http.send_data(stream, b"%d;" % stream)
        frames.append(server.http.data_to_send())
        server.raw(*frames)
        for stream in reversed(streams):
            server.http.end_stream(stream)
        server.flush()
        await never()

    async def body(connection: HTTP2Connection) -> None:
        asked = [ask(connection) for _ in range(20)]
        await asyncio.gather(*(recorder.done for _, recorder in asked))
        assert [stream.id for stream, _ in asked] == list(range(1, 41, 2))
        for stream, recorder in asked:
            assert recorder.body == b"%d;" % stream.id * 3
            assert recorder.batches <= 2 or os.environ.get("CI")
        assert not connection._streams

    test(script, body)


def test_capacity_is_what_the_server_allows_and_follows_it() -> None:
    async def script(server: Server) -> None:
        server.hello(max_concurrent_streams=3)
        streams = [await server.request() for _ in range(3)]
        server.http.update_settings({Codes.MAX_CONCURRENT_STREAMS: 1})
        server.flush()
        await server.wait(h2.events.SettingsAcknowledged)
        await server.wait(h2.events.PingReceived)
        for stream in streams:
            server.answer(stream)
        for _ in range(2):  # one after the other, or the server's h2 would object
            server.answer(await server.request())
        server.http.update_settings({Codes.MAX_CONCURRENT_STREAMS: 1000})
        server.flush()
        await never()

    async def body(connection: HTTP2Connection) -> None:
        assert connection.capacity == MAX_STREAMS  # until it has said
        while connection.capacity == MAX_STREAMS:
            await asyncio.sleep(0)
        assert connection.capacity == 3
        first = [ask(connection)[1] for _ in range(3)]
        while connection.capacity == 3:
            await asyncio.sleep(0)
        assert connection.capacity == 1
        stream, _ = left = ask(connection)  # planned before the server changed its mind
        more = [ask(connection)[1] for _ in range(2)]
        assert stream.id == 0
        assert not any(recorder.sent.done() for recorder in more)
        stream.leave(left[1])
        connection._engine.ping(b"12345678")
        connection._flush()
        await asyncio.gather(*(recorder.done for recorder in (*first, *more)))
        assert {recorder.body for recorder in (*first, *more)} == {b"hello"}
        assert left[1].events == []
        while connection.capacity == 1:
            await asyncio.sleep(0)
        assert connection.capacity == MAX_STREAMS

    test(script, body)


def test_no_stream_at_all_is_allowed() -> None:
    async def script(server: Server) -> None:
        server.hello(max_concurrent_streams=0)
        await never()

    async def body(connection: HTTP2Connection) -> None:
        while connection.capacity:
            await asyncio.sleep(0)
        _, recorder = ask(connection)
        connection.abort()
        await recorder.done
        assert isinstance(recorder.error, ConnectionFailed)
        assert recorder.error.phase == "send"
        assert recorder.error.retryable

    test(script, body)


def test_when_the_numbers_are_used_up_it_takes_no_more() -> None:
    async def script(server: Server) -> None:
        server.hello()
        server.answer(await server.request())
        await never()

    async def body(connection: HTTP2Connection) -> None:
        connection._next_id = 2**31 - 1
        assert connection.usable()
        _, recorder = ask(connection)
        assert not connection.usable()
        await recorder.done
        assert recorder.body == b"hello"
        with pytest.raises(ConnectionFailed, match="before the request was sent"):
            ask(connection)

    test(script, body)


# --- leaving ----------------------------------------------------------------------------------------------------------


def test_leaving_resets_the_stream_and_the_others_go_on() -> None:
    async def script(server: Server) -> None:
        server.hello()
        first, second = await server.request(), await server.request()
        server.head(first)
        server.head(second)
        reset = await server.wait(h2.events.StreamReset)
        assert (reset.stream_id, reset.error_code) == (first, h2.errors.ErrorCodes.CANCEL)
        server.raw(DataFrame(first, b"too late"), HeadersFrame(first, b"\x88", flags=["END_HEADERS", "END_STREAM"]))
        server.data(second, b"hello", end=True)
        server.answer(await server.request())
        assert not [event for event in server.seen if isinstance(event, h2.events.ConnectionTerminated)]
        await never()

    async def body(connection: HTTP2Connection) -> None:
        (stream, left), (other, stays) = ask(connection), ask(connection)
        await asyncio.gather(left.started, stays.started)
        first_arrival_ns = other.first_arrival_ns
        stream.leave(left)
        stream.leave(left)
        await stays.done
        assert stays.body == b"hello"
        assert other.first_arrival_ns == first_arrival_ns < other.arrival_ns
        assert left.kinds == ["head"]
        _, third = ask(connection)
        await third.done
        assert third.body == b"hello"

    test(script, body)


def test_only_ones_own_exchange_can_be_left() -> None:
    async def script(server: Server) -> None:
        server.hello()
        server.answer(await server.request())
        await never()

    async def body(connection: HTTP2Connection) -> None:
        stream, recorder = ask(connection)
        stream.leave(Recorder())
        await recorder.done
        assert recorder.body == b"hello"
        stream.leave(recorder)  # it has ended
        assert not any(isinstance(event, h2.events.StreamReset) for event in connection._engine.receive_data(b""))

    test(script, body)


def test_what_arrives_for_a_stream_that_was_left_costs_the_connections_window_nothing() -> None:
    """Twice as much as the window is wide: it has to be handed back."""
    total = 2 * CONNECTION_WINDOW_BYTES

    async def script(server: Server) -> None:
        server.hello()
        first = await server.request()
        await server.wait(h2.events.StreamReset)
        second = await server.request()
        sent, window = 0, CONNECTION_WINDOW_BYTES
        while sent < total:
            size = min(16_384, window)
            if size:
                server.raw(DataFrame(first, bytes(size)))
                sent, window = sent + size, window - size
                await server.writer.drain()
            else:
                window += (await server.wait(h2.events.WindowUpdated)).delta
        server.answer(second)
        assert sum(isinstance(event, h2.events.StreamReset) for event in server.seen) == 1
        await never()

    async def body(connection: HTTP2Connection) -> None:
        stream, left = ask(connection)
        stream.leave(left)
        _, recorder = ask(connection)
        await recorder.done
        assert recorder.body == b"hello"
        assert left.events == []

    test(script, body)


# --- the answer's pace ------------------------------------------------------------------------------------------------


def test_a_paused_exchange_holds_a_window_and_slows_nobody() -> None:
    total = 4 * STREAM_WINDOW_BYTES

    async def script(server: Server) -> None:
        server.hello()
        slow, fast = await server.request(), await server.request()
        server.head(slow)
        server.head(fast)
        sent = {slow: 0, fast: 0}
        while sent[fast] < total:
            for stream in (slow, fast):
                size = min(16_384, server.http.local_flow_control_window(stream), total - sent[stream])
                if size > 0:
                    server.data(stream, bytes(size))
                    sent[stream] += size
            await server.writer.drain()
            if not server.http.local_flow_control_window(fast):
                await server.wait(h2.events.WindowUpdated, of=fast)
        assert sent[slow] == STREAM_WINDOW_BYTES
        server.http.end_stream(fast)
        server.flush()
        while sent[slow] < total:
            size = min(16_384, server.http.local_flow_control_window(slow), total - sent[slow])
            if size > 0:
                server.data(slow, bytes(size))
                sent[slow] += size
                await server.writer.drain()
            else:
                await server.wait(h2.events.WindowUpdated, of=slow)
        server.http.end_stream(slow)
        server.flush()
        await never()

    async def body(connection: HTTP2Connection) -> None:
        (stream, slow), (_, fast) = ask(connection), ask(connection)
        stream.pause_reading()
        stream.pause_reading()
        await fast.done
        assert len(fast.body) == total
        assert len(slow.body) == STREAM_WINDOW_BYTES
        assert not slow.done.done()
        stream.resume_reading()
        stream.resume_reading()
        await slow.done
        assert len(slow.body) == total

    test(script, body)


def test_an_answer_that_is_larger_than_all_windows() -> None:
    total = 3 * CONNECTION_WINDOW_BYTES

    async def script(server: Server) -> None:
        server.hello()
        stream = await server.request()
        server.head(stream)
        sent = 0
        while sent < total:
            size = min(16_384, server.http.local_flow_control_window(stream), total - sent)
            if size > 0:
                server.data(stream, bytes(size))
                sent += size
                await server.writer.drain()
            else:
                await server.wait(h2.events.WindowUpdated)
        server.http.end_stream(stream)
        server.flush()
        await never()

    async def body(connection: HTTP2Connection) -> None:
        stream, size = connection.stream(), 0

        class Counter(Recorder):
            def on_body(self, data: bytes) -> None:
                nonlocal size
                size += len(data)

        counter = Counter()
        stream.send(HEADERS, b"", counter)
        await counter.done
        assert counter.kinds == ["head", "end"]
        assert size == total

    test(script, body)


# --- the request's pace -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [0, 1, 1000, 65_535, 2**31 - 1])
def test_a_large_body_keeps_to_the_servers_windows(window: int) -> None:
    size = 300 if window < 2 else 3_000_000
    prompt = random.Random(window).randbytes(size)
    got: list[bytes] = []

    async def script(server: Server) -> None:
        server.hello(initial_window_size=window)
        if window > 65_535:
            server.http.increment_flow_control_window(2**31 - 1 - 65_535)
            server.flush()
        stream = await server.request()
        if not window:
            server.http.increment_flow_control_window(7, stream)
            server.flush()
        received = 0
        while received < size:  # h2 fails this test if more comes than it allowed
            event = await server.wait(h2.events.DataReceived)
            got.append(event.data)
            received += len(event.data)
            n = event.flow_controlled_length
            server.http.increment_flow_control_window(n, stream)
            server.http.increment_flow_control_window(n)
            server.flush()
        await server.wait(h2.events.StreamEnded)
        server.answer(stream)
        await never()

    async def body(connection: HTTP2Connection) -> None:
        while not connection.arrival_ns:  # its settings
            await asyncio.sleep(0)
        _, recorder = ask(connection, prompt)
        assert window > size or not recorder.sent.done()
        await recorder.sent
        await recorder.done
        assert recorder.body == b"hello"

    test(script, body)
    assert b"".join(got) == prompt


def test_the_end_of_an_upload_is_seen_when_the_kernel_has_it_all() -> None:
    """The server does not read: neither window is used up, and yet the request is not sent."""
    size = 40_000_000
    gate = asyncio.Event()

    async def script(server: Server) -> None:
        server.hello(initial_window_size=2**31 - 1)
        server.http.increment_flow_control_window(2**31 - 1 - 65_535)
        server.flush()
        await gate.wait()
        received = 0
        while received < size:
            received += len((await server.wait(h2.events.DataReceived)).data)
        server.answer(1)
        await never()

    async def body(connection: HTTP2Connection) -> None:
        while connection._engine.outbound_flow_control_window < size:
            await asyncio.sleep(0)
        stream, recorder = ask(connection, bytes(size))
        _, small = ask(connection)
        assert not recorder.sent.done()
        assert not small.sent.done()
        assert connection._write_paused
        assert stream.rest  # neither is it copied into a buffer
        transport = connection._transport
        assert transport is not None
        assert transport.get_write_buffer_size() < 4 << 20
        gate.set()
        await asyncio.gather(recorder.sent, small.sent)
        await recorder.done
        assert recorder.body == b"hello"

    test(script, body)


def test_a_server_that_takes_huge_frames_gets_small_ones() -> None:
    """As nginx does: the whole prompt in one frame would lie in our buffer, and look like a flood of the server's."""
    size = 5_000_000
    gate = asyncio.Event()

    async def script(server: Server) -> None:
        server.http.max_inbound_frame_size = 2**24 - 1
        server.hello(initial_window_size=2**31 - 1, max_frame_size=2**24 - 1)
        server.http.increment_flow_control_window(2**31 - 1 - 65_535)
        server.flush()
        await gate.wait()
        received = 0
        while received < size:
            data = (await server.wait(h2.events.DataReceived)).data
            assert len(data) <= 64 * 1024
            received += len(data)
        server.answer(1)
        await never()

    async def body(connection: HTTP2Connection) -> None:
        while connection._engine.max_outbound_frame_size < size:
            await asyncio.sleep(0)
        _, recorder = ask(connection, bytes(size))
        transport = connection._transport
        assert transport is not None
        assert transport.get_write_buffer_size() < 1 << 20
        gate.set()
        await recorder.done
        assert recorder.body == b"hello"

    test(script, body)


def test_uploads_take_turns() -> None:
    size = 500_000

    async def script(server: Server) -> None:
        server.hello()
        ended: list[int] = []
        got = {1: 0, 3: 0}
        while len(ended) < 2:
            await server.read()
            for event in server._unread:
                if isinstance(event, h2.events.DataReceived):
                    got[event.stream_id] += len(event.data)
                    for stream in (None, event.stream_id) if event.stream_ended is None else (None,):
                        server.http.increment_flow_control_window(event.flow_controlled_length, stream)
                elif isinstance(event, h2.events.StreamEnded):
                    if not ended:
                        assert min(got.values()) > size // 2
                    ended.append(event.stream_id)
            server._unread = []
            server.flush()
        for stream in ended:
            server.answer(stream)
        await never()

    async def body(connection: HTTP2Connection) -> None:
        both = [ask(connection, bytes(size))[1] for _ in range(2)]
        await asyncio.gather(*(recorder.done for recorder in both))
        assert [recorder.body for recorder in both] == [b"hello", b"hello"]

    test(script, body)


def test_an_answer_before_the_request_has_ended_stops_the_upload_alone() -> None:
    async def script(server: Server) -> None:
        server.hello()
        first = await server.request()
        server.head(first, status="413", end=True)
        reset = await server.wait(h2.events.StreamReset)
        assert reset.stream_id == first
        server.answer(await server.request())
        await never()

    async def body(connection: HTTP2Connection) -> None:
        stream, recorder = ask(connection, bytes(1_000_000))
        await recorder.done
        assert recorder.kinds == ["head", "end"]
        assert not stream.rest
        _, other = ask(connection)
        await other.done
        assert other.body == b"hello"

    test(script, body)


def test_a_reset_without_error_after_the_whole_answer_is_fine() -> None:
    """RFC 9113 section 8.1: the server needs no more of the request."""

    async def script(server: Server) -> None:
        server.hello()
        stream = await server.request()
        server.head(stream)
        server.data(stream, b"hello", end=True)
        server.raw(RstStreamFrame(stream, error_code=0))
        server.answer(await server.request())
        await never()

    async def body(connection: HTTP2Connection) -> None:
        for size in (100_000, 0):
            _, recorder = ask(connection, bytes(size))
            await recorder.done
            assert recorder.kinds == ["head", "body", "end"]

    test(script, body)


def test_leaving_in_the_middle_of_an_upload() -> None:
    async def script(server: Server) -> None:
        server.hello()
        await server.wait(h2.events.StreamReset)
        server.answer(await server.request())
        await never()

    async def body(connection: HTTP2Connection) -> None:
        stream, left = ask(connection, bytes(1_000_000))
        stream.leave(left)
        assert not connection._uploads
        _, recorder = ask(connection)
        await recorder.done
        assert recorder.body == b"hello"
        assert not left.sent.done()

    test(script, body)


# --- the server ends it early -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [*h2.errors.ErrorCodes, 0x1234])
@pytest.mark.parametrize("answered", [False, True])
def test_a_reset_by_the_server(code: h2.errors.ErrorCodes | int, answered: bool) -> None:
    async def script(server: Server) -> None:
        server.hello()
        first, second = await server.request(), await server.request()
        if answered:
            server.head(first)
            server.data(first, b"he")
        server.raw(RstStreamFrame(first, error_code=int(code)))
        server.answer(second)
        await never()

    async def body(connection: HTTP2Connection) -> None:
        (_, reset), (_, other) = ask(connection), ask(connection)
        await asyncio.gather(reset.done, other.done)
        assert reset.kinds == (["head", "body", "lost"] if answered else ["lost"])
        assert isinstance(reset.error, ConnectionFailed)
        assert reset.error.retryable
        if code == h2.errors.ErrorCodes.REFUSED_STREAM:
            assert reset.error.phase == "wait"
            assert "refused" in str(reset.error)
        else:
            assert reset.error.phase == ("read" if answered else "wait")
            assert (code.name if isinstance(code, h2.errors.ErrorCodes) else "error 4660") in str(reset.error)
        assert other.body == b"hello"

    test(script, body)


def test_goaway_fails_what_was_not_looked_at_and_lets_the_others_finish() -> None:
    async def script(server: Server) -> None:
        server.hello()
        first, _ = await server.request(), await server.request()
        server.head(first)
        server.goaway(first)
        await server.wait(h2.events.StreamReset, of=3)
        server.data(first, b"hel")
        server.raw(PingFrame(0, b"12345678"))
        await server.wait(h2.events.PingAckReceived)
        server.data(first, b"lo", end=True)
        while await server.reader.read(100):  # the client closes
            pass

    async def body(connection: HTTP2Connection) -> None:
        (_, finishes), (_, failed) = ask(connection), ask(connection)
        await failed.done
        assert not connection.usable()
        assert isinstance(failed.error, ConnectionFailed)
        assert (failed.error.phase, failed.error.retryable) == ("wait", True)
        with pytest.raises(ConnectionFailed) as refused:
            ask(connection)
        assert (refused.value.phase, refused.value.retryable) == ("send", True)
        await finishes.done
        assert finishes.body == b"hello"
        await connection._closed

    test(script, body)


def test_goaway_in_two_steps() -> None:
    """RFC 9113 section 6.8: first with the highest number, so that what is under way is not lost."""

    async def script(server: Server) -> None:
        server.hello()
        first = await server.request()
        server.goaway(2**31 - 1)
        server.answer(first)
        server.goaway(first)
        while await server.reader.read(100):
            pass

    async def body(connection: HTTP2Connection) -> None:
        _, recorder = ask(connection)
        await recorder.done
        assert recorder.body == b"hello"
        assert not connection.usable()
        await connection._closed

    test(script, body)


def test_goaway_in_one_read_with_all_that_follows() -> None:
    """h2 itself takes nothing after a GOAWAY, and drops what it has not sent."""
    answered = asyncio.Event()

    async def script(server: Server) -> None:
        server.hello()
        first = await server.request()
        server.http.send_headers(first, [(":status", "200")])
        head = server.http.data_to_send()
        server.http.send_data(first, b"hello", end_stream=True)
        server.raw(PingFrame(0, b"1234567a"), head, GoAwayFrame(0, last_stream_id=first), server.http.data_to_send())
        ack = await server.wait(h2.events.PingAckReceived)  # h2 would have dropped it
        assert ack.ping_data == b"1234567a"
        answered.set()
        await never()

    async def body(connection: HTTP2Connection) -> None:
        _, recorder = ask(connection)
        await recorder.done
        assert recorder.kinds == ["head", "body", "end"]
        await answered.wait()

    test(script, body)


def test_leaving_the_last_stream_after_goaway_closes_the_connection() -> None:
    async def script(server: Server) -> None:
        server.hello()
        server.goaway(await server.request())
        await server.wait(h2.events.StreamReset)
        while await server.reader.read(100):
            pass

    async def body(connection: HTTP2Connection) -> None:
        stream, recorder = ask(connection)
        while connection.usable():
            await asyncio.sleep(0)
        stream.leave(recorder)
        await connection._closed
        assert recorder.events == []

    test(script, body)


def test_the_reason_for_going_away_is_told() -> None:
    async def script(server: Server) -> None:
        server.hello()
        server.goaway(await server.request(), h2.errors.ErrorCodes.ENHANCE_YOUR_CALM)

    async def body(connection: HTTP2Connection) -> None:
        _, recorder = ask(connection)
        await recorder.done
        assert "ENHANCE_YOUR_CALM" in str(recorder.error)
        assert recorder.error.phase == "wait"

    test(script, body)


@pytest.mark.parametrize("how", ["eof", "goaway", "reset"])
def test_an_end_is_noticed_while_idle(how: str) -> None:
    async def script(server: Server) -> None:
        server.hello()
        await server.wait(h2.events.SettingsAcknowledged)
        if how == "goaway":
            server.goaway(0)
            await never()
        elif how == "reset":
            sock = server.writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

    async def body(connection: HTTP2Connection) -> None:
        assert connection.usable()
        while connection.usable():
            await asyncio.sleep(0)
        await connection._closed

    test(script, body)


@pytest.mark.parametrize("reset", [False, True])
def test_a_connection_that_breaks_ends_all_its_exchanges(reset: bool) -> None:
    async def script(server: Server) -> None:
        server.hello()
        first, _ = await server.request(), await server.request()
        server.head(first)
        server.data(first, b"he")
        await server.wait(h2.events.PingReceived)
        if reset:
            sock = server.writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

    async def body(connection: HTTP2Connection) -> None:
        (begun, first), (_, second) = ask(connection), ask(connection)
        await first.body_of(2)
        connection._engine.ping(b"12345678")
        connection._flush()
        await asyncio.gather(first.done, second.done)
        assert first.kinds == ["head", "body", "lost"]
        assert "broke in the middle of the answer" in str(first.error)
        assert first.error.phase == "read"
        assert "closed before anything of the answer came" in str(second.error)
        assert second.error.phase == "wait"
        assert all(isinstance(error, ConnectionFailed) for error in (first.error, second.error))
        assert first.error is not second.error
        assert (first.error.__cause__ is not None) == reset
        assert begun.arrival_ns > begun.first_arrival_ns > 0
        assert not connection.usable()

    test(script, body)


# --- what a server must not send --------------------------------------------------------------------------------------


def _too_big() -> bytes:
    frame = DataFrame(1, bytes(16_385))
    return frame.serialize()


def _head(stream: int, *headers: tuple[str, str], end: bool = False) -> bytes:
    """A HEADERS frame by a fresh encoder: only for the first head of a connection."""
    from hpack import Encoder

    flags = ["END_HEADERS", "END_STREAM"] if end else ["END_HEADERS"]
    return HeadersFrame(stream, Encoder().encode([(":status", "200"), *headers]), flags=flags).serialize()


BAD: dict[str, tuple[bytes, str]] = {
    "an answer of HTTP/1.1": (b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", "HTTP/1.1"),
    "text": (b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n", "not HTTP/2"),
    "zeros": (bytes(64), "not HTTP/2"),
    "a frame over the limit": (_too_big(), "not HTTP/2"),
    "data before the head": (DataFrame(1, b"x").serialize(), "not HTTP/2"),
    "an answer on a stream of its own": (_head(2), "not HTTP/2"),
    "a request": (HeadersFrame(2, b"\x83\x84\x86\x41\x01h", flags=["END_HEADERS"]).serialize(), "a request"),
    "a head on a stream that nobody opened": (_head(99), "not HTTP/2"),
    "data on a stream that nobody opened": (DataFrame(99, b"x").serialize(), "not HTTP/2"),
    "a push": (PushPromiseFrame(1, 2, b"\x82\x84\x86", flags=["END_HEADERS"]).serialize(), "not HTTP/2"),
    "a window of zero": (b"\0\0\4\x08\0\0\0\0\0" + bytes(4), "not HTTP/2"),
    "a window over the limit": (WindowUpdateFrame(0, window_increment=2**31 - 1).serialize(), "not HTTP/2"),
    "a continuation of nothing": (ContinuationFrame(1, b"").serialize(), "not HTTP/2"),
    "half a head and another frame": (
        HeadersFrame(1, b"\x88").serialize() + PingFrame(0, b"12345678").serialize(),
        "not HTTP/2",
    ),
    "a bad table index": (HeadersFrame(1, b"\xff\xff\xff", flags=["END_HEADERS"]).serialize(), "not HTTP/2"),
    "a setting out of range": (SettingsFrame(0, {Codes.MAX_FRAME_SIZE: 1}).serialize(), "not HTTP/2"),
    "an uppercase name": (_head(1, ("X", "y")), "not HTTP/2"),
    "no status": (HeadersFrame(1, b"\x00\x01a\x01b", flags=["END_HEADERS"]).serialize(), "not HTTP/2"),
    "two lengths": (_head(1, ("content-length", "1"), ("content-length", "2")), "not HTTP/2"),
    "less than its length": (_head(1, ("content-length", "5"), end=False) + b"\0\0\2\0\1\0\0\0\1he", "length says 5"),
    "more than its length": (_head(1, ("content-length", "1"), end=False) + b"\0\0\2\0\0\0\0\0\1he", "length says 1"),
    "a huge head": (
        b"".join(
            [
                HeadersFrame(1, b"\x88").serialize(),
                *(ContinuationFrame(1, b"\x10\x01a\x7f\x80\x20" + b"a" * 4223).serialize() for _ in range(16)),
                ContinuationFrame(1, b"", flags=["END_HEADERS"]).serialize(),
            ]
        ),
        "a head over 65536 bytes",
    ),
    "endless continuations": (
        HeadersFrame(1, b"\x88").serialize() + ContinuationFrame(1, b"").serialize() * 100,
        "not HTTP/2",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_not_http2_ends_in_a_typed_error(name: str) -> None:
    wrong, words = BAD[name]

    async def script(server: Server) -> None:
        await server.request()
        server.raw(wrong)
        while await server.reader.read(1000):
            pass

    async def body(connection: HTTP2Connection) -> None:
        _, recorder = ask(connection)
        await recorder.done
        assert isinstance(recorder.error, ProtocolError)
        assert words in str(recorder.error)
        assert not connection.usable()
        await connection._closed

    test(script, body)


def test_the_exchange_that_is_wrong_is_told_so_and_the_others_that_the_connection_broke() -> None:
    """And what came before, in the same read, is delivered to all of them."""

    async def script(server: Server) -> None:
        server.hello()
        streams = [await server.request() for _ in range(3)]
        for stream in streams[:2]:
            server.http.send_headers(stream, [(":status", "200"), ("content-length", "4")])
            server.http.send_data(stream, b"he")
        server.raw(server.http.data_to_send(), DataFrame(streams[0], b"", flags=["END_STREAM"]))
        goodbye = await server.wait(h2.events.ConnectionTerminated)
        assert goodbye.error_code == h2.errors.ErrorCodes.PROTOCOL_ERROR
        await never()

    async def body(connection: HTTP2Connection) -> None:
        first, second, third = (ask(connection)[1] for _ in range(3))
        await asyncio.gather(first.done, second.done, third.done)
        assert first.kinds == second.kinds == ["head", "body", "lost"]
        assert isinstance(first.error, ProtocolError)
        assert "2 bytes where its content-length says 4" in str(first.error)
        assert isinstance(second.error, ConnectionFailed)
        assert second.error.phase == "read"
        assert isinstance(third.error, ConnectionFailed)
        assert third.error.phase == "wait"

    test(script, body)


def test_no_push_is_wanted_and_the_windows_are_told() -> None:
    async def script(server: Server) -> None:
        server.hello()
        changed = await server.wait(h2.events.RemoteSettingsChanged)
        values = {Codes(code): setting.new_value for code, setting in changed.changed_settings.items()}
        assert values[Codes.ENABLE_PUSH] == 0
        assert values[Codes.INITIAL_WINDOW_SIZE] == STREAM_WINDOW_BYTES
        assert values[Codes.MAX_HEADER_LIST_SIZE] == MAX_HEAD_BYTES
        stream = await server.request()
        assert server.http.outbound_flow_control_window == CONNECTION_WINDOW_BYTES
        server.answer(stream)
        await never()

    async def body(connection: HTTP2Connection) -> None:
        _, recorder = ask(connection)
        await recorder.done
        assert recorder.body == b"hello"

    test(script, body)


def test_a_server_that_asks_and_never_listens_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2_module, "_MAX_UNREAD_BYTES", 64 * 1024)

    async def script(server: Server) -> None:
        await server.request()
        server.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        flood = PingFrame(0, b"12345678").serialize() * 4096
        while True:
            server.raw(flood)
            await server.writer.drain()

    async def body(connection: HTTP2Connection) -> None:
        assert connection._round_trip.socket is not None
        connection._round_trip.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        _, recorder = ask(connection)
        await recorder.done
        assert isinstance(recorder.error, ProtocolError)
        assert "than it reads" in str(recorder.error)

    test(script, body)


# --- sinks that fail --------------------------------------------------------------------------------------------------


class Failing(Recorder):
    def __init__(self, at: str, error: Exception) -> None:
        super().__init__()
        self.at, self.raises = at, error

    def _fail(self, at: str) -> None:
        if at == self.at:
            self.at = ""
            raise self.raises

    def on_head(self, status: int, headers: dict[str, str]) -> None:
        super().on_head(status, headers)
        self._fail("head")

    def on_body(self, data: bytes) -> None:
        super().on_body(data)
        self._fail("body")

    def on_batch(self) -> None:
        super().on_batch()
        self._fail("batch")

    def on_end(self) -> None:
        self._fail("end")
        super().on_end()


@pytest.mark.parametrize("at", ["head", "body", "batch", "end"])
@pytest.mark.parametrize("error", [ValueError("bug"), MessageTooBig("big")])
def test_a_sink_that_fails_ends_its_exchange_alone(at: str, error: Exception) -> None:
    async def script(server: Server) -> None:
        server.hello()
        first, second = await server.request(), await server.request()
        server.head(first)
        server.data(first, b"hello")
        if at == "end":
            server.http.end_stream(first)
            server.flush()
        else:
            await server.wait(h2.events.StreamReset, of=first)
        server.answer(second)
        await never()

    async def body(connection: HTTP2Connection) -> None:
        failing = Failing(at, error)
        ask(connection, sink=failing)
        _, other = ask(connection)
        await asyncio.gather(failing.done, other.done)
        if isinstance(error, MessageTooBig):
            assert failing.error is error
        else:
            assert isinstance(failing.error, ProtocolError)
            assert failing.error.__cause__ is error
        assert failing.kinds.count("lost") == 1
        assert other.body == b"hello"

    test(script, body)


# --- closing ----------------------------------------------------------------------------------------------------------


def test_closing_says_goodbye_and_fails_what_is_under_way() -> None:
    heard: list[str] = []

    async def script(server: Server) -> None:
        server.hello()
        await server.wait(h2.events.SettingsAcknowledged)
        server.head(1)
        await server.wait(h2.events.ConnectionTerminated)
        heard.append("goaway")
        assert await server.reader.read(100) == b""
        heard.append("eof")

    async def body(connection: HTTP2Connection) -> None:
        _, recorder = ask(connection)
        await recorder.started
        await connection.aclose()
        assert isinstance(recorder.error, ConnectionFailed)
        assert not recorder.error.retryable
        assert not connection.usable()
        await connection.aclose()
        while len(heard) < 2:
            await asyncio.sleep(0)

    test(script, body)
    assert heard == ["goaway", "eof"]


def test_aborting_ends_what_is_under_way() -> None:
    async def script(server: Server) -> None:
        server.hello()
        await server.request()
        await never()

    async def body(connection: HTTP2Connection) -> None:
        stream, recorder = ask(connection)
        connection.abort()
        assert not connection.usable()
        await recorder.done
        assert isinstance(recorder.error, ConnectionFailed)
        stream.leave(recorder)
        stream.pause_reading()
        stream.resume_reading()
        connection.abort()

    test(script, body)


def test_a_closed_loop_leaves_no_socket_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        loop = asyncio.new_event_loop()

        async def connect() -> tuple[HTTP2Connection, HTTP2Stream, Recorder]:
            _, connection = await loop.create_connection(lambda: HTTP2Connection("h"), *listening.getsockname())
            return connection, *ask(connection)

        connection, stream, recorder = loop.run_until_complete(connect())
        peer, _ = listening.accept()
        loop.close()
        stream.leave(recorder)  # ends the connection: nobody else will
        with peer:
            while peer.recv(1 << 16):
                pass
        connection.abort()
        del connection, stream
        gc.collect()  # a socket left open would warn


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_leaves_the_connection_alone() -> None:
    async def script(server: Server) -> None:
        server.hello()
        stream = await server.request()
        server.head(stream)
        server.goaway(stream)  # with it, leaving the last stream closes the connection
        await server.wait(h2.events.PingReceived)
        assert not any(isinstance(event, h2.events.StreamReset) for event in server.seen)
        server.data(stream, b"hello", end=True)
        await never()

    async def body(connection: HTTP2Connection) -> None:
        stream, recorder = ask(connection)
        while connection.usable():
            await asyncio.sleep(0)
        child = os.fork()
        if not child:
            stream.leave(recorder)
            connection.abort()
            os._exit(0)
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        assert status == 0
        connection._engine.ping(b"12345678")
        connection._flush()
        await recorder.done
        assert recorder.body == b"hello"

    test(script, body)


def test_over_tls() -> None:
    """Also a body that is larger than any buffer in between."""
    authority = trustme.CA()
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    trust.set_alpn_protocols(["h2"])
    own = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(own)
    own.set_alpn_protocols(["h2"])
    size = 20_000_000

    async def script(server: Server) -> None:
        server.hello(initial_window_size=2**31 - 1)
        server.http.increment_flow_control_window(2**31 - 1 - 65_535)
        server.flush()
        stream = await server.request()
        received = 0
        while received < size:
            received += len((await server.wait(h2.events.DataReceived)).data)
        server.answer(stream)
        while await server.reader.read(1000):
            pass

    async def main() -> None:
        async with connected(script, tls=(own, trust)) as connection:
            while connection._engine.outbound_flow_control_window < size:
                await asyncio.sleep(0)
            _, recorder = ask(connection, bytes(size))
            await recorder.sent
            await recorder.done
            assert recorder.body == b"hello"
            await connection.aclose()

    run(main)


# --- any split of the server's bytes: the same events -------------------------------------------------------------------


class Wire:
    """A transport without a network."""

    def __init__(self) -> None:
        self.written = b""
        self.closing = False

    def write(self, data: bytes) -> None:
        assert not self.closing
        self.written += data

    def set_write_buffer_limits(self, high: int, low: int) -> None: ...

    def get_extra_info(self, name: str) -> None:
        return None

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    abort = close


def play(pieces: Iterator[bytes] | list[bytes], *, streams: int = 3, leave: bool = True) -> list[list[Any]]:
    """What the sinks of some streams hear, the second of which is left at its head."""

    async def main() -> list[list[Any]]:
        wire = Wire()
        connection = HTTP2Connection("h")
        connection.connection_made(cast(asyncio.Transport, wire))
        recorders = [Recorder() for _ in range(streams)]
        made = [connection.stream() for _ in range(streams)]
        if leave and streams > 1:

            def left(status: int, headers: dict[str, str]) -> None:
                made[1].leave(recorders[1])

            recorders[1].on_head = left  # type: ignore[method-assign]
        for stream, recorder in zip(made, recorders, strict=True):
            stream.send(HEADERS, b"", recorder)
        for piece in pieces:
            if wire.closing:
                break
            connection.data_received(piece)
        connection.connection_lost(None)
        assert not connection._streams
        assert not connection._waiting
        assert not connection._touched
        return [[_plain(event) for event in recorder.events] for recorder in recorders]

    return asyncio.run(main())


def _plain(event: tuple[Any, ...]) -> tuple[Any, ...]:
    return ("lost", type(event[1]), str(event[1]), event[1].phase) if event[0] == "lost" else event


def conversation(end: bytes = b"") -> bytes:
    """Three answers at once, with all that a server may say in between."""
    server = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
    server.initiate_connection()
    client = h2.connection.H2Connection()
    client.initiate_connection()
    for stream in (1, 3, 5):
        client.send_headers(stream, HEADERS, end_stream=True)
    server.receive_data(client.data_to_send())
    server.send_headers(1, [(":status", "103"), ("link", "x")])
    for stream in (1, 3, 5):
        server.send_headers(stream, [(":status", "200"), ("x", "y" * 100), ("number", str(stream))])
    server.ping(b"abcdefgh")
    server.send_data(1, b"one", pad_length=7)
    server.send_data(3, b"ignored")
    server.send_data(5, b"")
    server.update_settings({Codes.MAX_CONCURRENT_STREAMS: 2})
    server.send_data(5, b"five" * 50)
    server.send_headers(1, [("trailer", "x")], end_stream=True)
    server.end_stream(3)
    return server.data_to_send() + end


ENDS = {
    "cut": b"",
    "ended": DataFrame(5, b"", flags=["END_STREAM"]).serialize(),
    "reset": RstStreamFrame(5, error_code=2).serialize(),
    "goaway": GoAwayFrame(0, last_stream_id=5).serialize() + DataFrame(5, b"!", flags=["END_STREAM"]).serialize(),
    "garbage": b"\0\0\1\x04\0\0\0\0\0x",
}


@pytest.mark.parametrize("end", ENDS)
@settings(max_examples=60, deadline=None)
@given(cuts=st.lists(st.integers(0, 1000), max_size=40))
def test_any_split_gives_the_same_events(end: str, cuts: list[int]) -> None:
    whole = conversation(ENDS[end])
    edges = sorted({0, len(whole), *(cut % len(whole) for cut in cuts)})
    pieces = [whole[a:b] for a, b in pairwise(edges)]
    expected = play([whole])
    assert [events[-1][0] for events in expected if events] == ["end", "end" if end in ("ended", "goaway") else "lost"]
    assert expected[1] == []
    assert play(pieces) == expected


@pytest.mark.parametrize("end", ENDS)
def test_byte_by_byte(end: str) -> None:
    whole = conversation(ENDS[end])
    assert play([whole[at : at + 1] for at in range(len(whole))]) == play([whole])


_frames = st.builds(
    lambda kind, flags, stream, payload: (
        len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload
    ),
    st.integers(0, 11),
    st.integers(0, 255),
    st.sampled_from([0, 1, 2, 3, 5, 7, 2**31 - 1, 2**32 - 1]),
    st.binary(max_size=40),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.one_of(_frames, st.binary(max_size=30)), max_size=12), st.booleans())
@example([b"\0\0\0\x09\0\0\0\0\1" * 80], False)
def test_any_bytes_end_in_a_typed_error_or_an_answer(pieces: list[bytes], after_a_start: bool) -> None:
    start = [conversation()] if after_a_start else []
    for events in play([*start, *pieces]):
        if events:
            assert events[-1][0] in ("end", "lost")
            assert [event[0] for event in events].count("lost") <= 1
            if events[-1][0] == "lost":
                assert issubclass(events[-1][1], ConnectionFailed | ProtocolError)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_conversation_with_some_bytes_changed(data: st.DataObject) -> None:
    whole = bytearray(conversation(ENDS["ended"]))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    for events in play([bytes(whole)], leave=False):
        assert events[-1][0] in ("end", "lost")
