"""C24 to C26: messages over the limit, connections that are not there any more, and calls that are left, over gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import threading
from collections.abc import Iterator
from typing import Any, Self

import pytest
from opentelemetry.instrumentation.grpc import GrpcAioInstrumentorClient
from spanwire_grpc.loopback import GRPCPart

import spanwire
from spanwire import errors
from spanwire.testing import LoopbackServer, Script
from tests.cases.play import nothing_left
from tests.cases.spans import Spans, attributes
from tests.support import AT_ONCE, NEVER, assert_adds_up, chat, hello, read, run, wait_for

MIB = 1024 * 1024
HELLO = "Hello from the loopback server."


@contextlib.contextmanager
def serving(*scripts: Any, **more: Any) -> Iterator[LoopbackServer]:
    with LoopbackServer([*scripts], **{"part": "grpc", **more}) as server, nothing_left(server):
        yield server


# --- C24: message over 4 MiB ----------------------------------------------------------------------------------------------


def whole(size: int) -> bytes:
    text = b"x" * size
    return b'{"id":"c","model":"m","choices":[{"index":0,"message":{"content":"%b"},"finish_reason":"stop"}]}' % text


@pytest.mark.parametrize("way", ["complete", "stream"])
def test_an_answer_of_five_mebibytes_is_an_answer(way: str) -> None:
    with serving(Script(body=whole(5 * MIB))) as server:

        async def body() -> spanwire.Reply:
            async with spanwire.ConnectionManager() as manager:
                if way == "complete":
                    return await manager.complete(server.endpoint(), chat())
                async with manager.stream(server.endpoint(), chat()) as stream:
                    await read(stream)
                return stream.reply

        assert len(run(body).text) == 5 * MIB


@pytest.mark.parametrize("limit", [4 * MIB, 4 * MIB + 1])
def test_an_answer_over_our_limit_names_both_numbers_and_the_side(limit: int) -> None:
    with serving(Script(body=whole(5 * MIB))) as server:

        async def body() -> None:
            async with spanwire.ConnectionManager() as manager:
                endpoint = server.endpoint(limits=spanwire.Limits(max_event_bytes=limit), retries=AT_ONCE)
                with pytest.raises(errors.MessageTooBig, match="max_event_bytes") as caught:
                    await manager.complete(endpoint, chat())
                assert str(limit) in str(caught.value)
                assert "52429" in str(caught.value) or "52430" in str(caught.value)
                assert (caught.value.phase, caught.value.retryable) == ("read", False)

        run(body)
        assert len(server.requests) == 1


def test_a_request_over_the_servers_limit_is_no_rate_limit() -> None:
    big = spanwire.Call.chat("m", [{"role": "user", "content": "x" * 5 * MIB}])
    with serving(hello(), part=GRPCPart(max_request_bytes=4 * MIB)) as server:

        async def body() -> None:
            async with spanwire.ConnectionManager() as manager:
                with pytest.raises(errors.MessageTooBig, match="the server's limit") as caught:
                    await manager.complete(server.endpoint(retries=AT_ONCE), big)
                assert str(4 * MIB) in str(caught.value)
                assert (caught.value.phase, caught.value.retryable) == ("send", False)
                assert (await manager.complete(server.endpoint(), chat())).text == HELLO

        run(body)


def test_a_request_over_our_own_limit_is_not_sent() -> None:
    big = spanwire.Call.chat("m", [{"role": "user", "content": "x" * 2 * MIB}])
    with serving(hello()) as server:

        async def body() -> None:
            async with spanwire.ConnectionManager() as manager:
                endpoint = server.endpoint(options={"max_request_bytes": MIB}, retries=AT_ONCE)
                with pytest.raises(errors.MessageTooBig, match="max_request_bytes") as caught:
                    await manager.complete(endpoint, big)
                assert str(MIB) in str(caught.value)
                assert (caught.value.phase, caught.value.retryable) == ("send", False)

        run(body)
        assert server.requests == []


# --- C25: the first call after a pause, or a restart, fails UNAVAILABLE ----------------------------------------------------


class Router:
    """A TCP relay that can forget its connections: what comes on them is swallowed, without FIN and without RST."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._forgotten: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._listener.accept()
                there = socket.create_connection(("127.0.0.1", self._port))
                self._pairs.append((here, there))
                for one, other in ((here, there), (there, here)):
                    threading.Thread(target=self._pump, args=(one, other), daemon=True).start()

    def _pump(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65536):
                if one not in self._forgotten:
                    other.sendall(data)
            if one not in self._forgotten:
                other.shutdown(socket.SHUT_WR)

    def forget(self) -> None:
        for pair in self._pairs:
            self._forgotten.update(pair)

    def reset(self) -> None:
        for here, there in self._pairs:
            here.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
            here.shutdown(socket.SHUT_RD)
            here.close()
            with contextlib.suppress(OSError):  # a close alone is none while another thread reads
                there.shutdown(socket.SHUT_RDWR)
            there.close()
        self._pairs.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        for pair in self._pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()


@pytest.mark.parametrize("way", ["reset", "forget"])
def test_a_connection_that_a_relay_has_lost(way: str) -> None:
    with serving(hello()) as server, Router(server.port) as relay:

        async def body() -> None:
            async with spanwire.ConnectionManager() as manager:
                # Only time tells a connection that swallows everything from a server that thinks.
                timeouts = spanwire.Timeouts(first_content_s=0.5 if way == "forget" else 20)
                retries = AT_ONCE if way == "forget" else NEVER
                endpoint = spanwire.Endpoint(
                    f"grpc://127.0.0.1:{relay.port}", proxy=None, timeouts=timeouts, retries=retries
                )
                await manager.complete(endpoint, chat())
                (relay.reset if way == "reset" else relay.forget)()
                reply = await manager.complete(endpoint, chat())
                assert reply.text == HELLO
                timeline = reply.timeline
                assert timeline is not None
                assert_adds_up(timeline)
                assert "handshake" in timeline.segments
                assert timeline.connection is not None
                assert not timeline.connection.reused

        run(body)
        assert len(server.requests) == 2


def test_a_server_that_was_started_anew() -> None:
    manager = spanwire.ConnectionManager()
    with serving(hello()) as first:
        port = first.port

        async def body() -> None:
            async with manager:
                endpoint = first.endpoint(retries=NEVER)
                assert (await manager.complete(endpoint, chat())).text == HELLO
                await asyncio.to_thread(first.close)
                second = LoopbackServer([hello()], part="grpc", port=port)
                await asyncio.to_thread(second.start)
                reply = await manager.complete(endpoint, chat())
                assert reply.text == HELLO
                assert reply.timeline is not None
                assert "handshake" in reply.timeline.segments
                assert len(second.requests) == 1
                await manager.aclose()
                await asyncio.to_thread(second.close)

        run(body)


def test_unavailable_after_the_first_message_is_not_tried_again() -> None:
    with serving(Script(tokens=["a", "b"], drop_after=3, drop_mode="reset"), hello()) as server:

        async def body() -> None:
            async with spanwire.ConnectionManager() as manager:
                with pytest.raises(errors.ConnectionFailed) as caught:
                    async with manager.stream(server.endpoint(retries=AT_ONCE), chat()) as stream:
                        await read(stream)
                assert caught.value.reply is not None
                assert caught.value.reply.text == "ab"

        run(body)
        assert len(server.requests) == 1


# --- C26: leaving the loop does not cancel the call ------------------------------------------------------------------------

PACED = Script(tokens=[f"t{n} " for n in range(500)], gap_s=0.02, role_chunk=False)


def left_soon(server: LoopbackServer, number: int = 0) -> None:
    """Within the 200 ms of the case, and the patience of a busy machine."""
    server.wait_for(lambda s: len(s.requests) > number and s.requests[number].left, timeout_s=2.0)


def test_a_break_after_three_messages_reaches_the_server() -> None:
    spans = Spans()
    with serving(PACED) as server:

        async def body() -> None:
            async with spanwire.ConnectionManager(telemetry=spans.telemetry()) as manager:
                count = 0
                async with manager.stream(server.endpoint(), chat()) as stream:
                    async for _ in stream:
                        count += 1
                        if count == 3:
                            break
                await asyncio.to_thread(left_soon, server)
                assert stream.timeline.outcome == "closed_by_caller"

        run(body)
    span = spans.one()
    assert span.status.is_ok or span.status.is_unset
    assert attributes(span)["spanwire.outcome"] == "closed_by_caller"


@pytest.mark.parametrize("way", ["complete", "stream"])
def test_cancelled_with_opentelemetrys_own_interceptors_in_between(way: str) -> None:
    spans = Spans()
    instrumentor: Any = GrpcAioInstrumentorClient()  # type: ignore[no-untyped-call]
    instrumentor.instrument()
    try:
        with serving(Script(hang_after="request"), hello()) as server:

            async def body() -> None:
                async with spanwire.ConnectionManager(telemetry=spans.telemetry()) as manager:

                    async def call() -> None:
                        if way == "complete":
                            await manager.complete(server.endpoint(), chat())
                        else:
                            async with manager.stream(server.endpoint(), chat()) as stream:
                                await read(stream)

                    task = asyncio.create_task(call())
                    await wait_for(server, lambda s: s.requests)
                    task.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await task
                    await asyncio.to_thread(left_soon, server)
                    assert (await manager.complete(server.endpoint(), chat())).text == HELLO

            run(body)
    finally:
        instrumentor.uninstrument()
    first = spans.all()[0]
    assert attributes(first)["spanwire.outcome"] == "cancelled"
    assert not first.status.description


def test_a_stream_that_is_never_read_and_dropped() -> None:
    spans = Spans()
    with serving(PACED) as server:

        async def body() -> None:
            async with spanwire.ConnectionManager(telemetry=spans.telemetry()) as manager:
                stream: spanwire.Stream | None = manager.stream(server.endpoint(), chat())
                assert stream is not None
                await stream.__aenter__()
                await wait_for(server, lambda s: s.requests)
                stream = None
                gc.collect()
                await asyncio.to_thread(left_soon, server)

        run(body)
    assert attributes(spans.one())["spanwire.outcome"] == "abandoned"


def test_closed_while_a_read_is_pending() -> None:
    with serving(Script(hang_after=2, tokens=["a", "b", "c"], role_chunk=False)) as server:

        async def body() -> None:
            async with spanwire.ConnectionManager() as manager:
                async with manager.stream(server.endpoint(), chat()) as stream:
                    reading = asyncio.create_task(read(stream))
                    await wait_for(server, lambda s: s.requests)
                    await asyncio.sleep(0.05)
                    await stream.aclose()
                    await reading
                    await asyncio.to_thread(left_soon, server)
                assert stream.timeline.outcome == "closed_by_caller"

        run(body)
