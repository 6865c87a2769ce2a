"""One call under odd conditions: left while it opens, cancelled in a back-off, limits that meet unread data."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import subprocess
import sys
import textwrap

import pytest
from spanwire_sse.exchange import HTTPExchange
from spanwire_sse.transport import SSETransport

import spanwire
from spanwire import errors, pool
from spanwire.manager import ConnectionManager
from spanwire.testing import Request, Script
from spanwire.transport import Attempt, Connection
from tests.support import AT_ONCE, NEVER, assert_adds_up, chat, hello, read, run, serving, wait_for

HELLO = "Hello from the loopback server."
SLOW = spanwire.Retries(base_s=3600, max_wait_s=3600)


async def never() -> str:
    await asyncio.get_running_loop().create_future()
    raise AssertionError


@pytest.mark.parametrize("way", ["aclose", "manager"])
@pytest.mark.parametrize("where", ["slot", "key", "back-off"])
def test_a_call_that_is_left_while_it_opens_ends_at_once(where: str, way: str) -> None:
    with serving(hello(hang_after=2) if where == "slot" else Script(status=503)) as server:
        limits = spanwire.Limits(max_concurrent=1) if where == "slot" else spanwire.Limits()
        endpoint = server.endpoint(limits=limits, api_key=never if where == "key" else None, retries=SLOW)

        async def body() -> None:
            async with ConnectionManager() as manager:
                holder = manager.stream(endpoint, chat("holder"))
                if where == "slot":
                    await anext(holder)
                stream = manager.stream(endpoint, chat())
                opening = asyncio.create_task(anext(stream))
                if where == "back-off":
                    await wait_for(server, lambda s: s.requests and s.requests[0].ended)
                while stream._run is None or stream._run._opener is None:
                    await asyncio.sleep(0)
                await (stream.aclose() if way == "aclose" else manager.aclose())
                with pytest.raises(errors.ConnectionFailed, match=r"was left while|manager was closed"):
                    await opening
                assert not opening.cancelled()
                assert stream.timeline.outcome == ("closed_by_caller" if way == "aclose" else "error")
                assert_adds_up(stream.timeline)
                await holder.aclose()
                slots = manager._prepare(endpoint).slots
                assert slots is None or "0 of 1 in use, 0 waiting" in repr(slots)

        run(body)


def test_a_read_that_is_cancelled_in_a_back_off_does_not_look_like_the_end() -> None:
    breaks = hello(drop_after=1)
    with serving(breaks, hello()) as server:

        async def body() -> None:
            retries = spanwire.Retries(base_s=0.2)
            async with ConnectionManager() as manager:
                async with manager.stream(server.endpoint(retries=retries), chat()) as stream:
                    text, cancelled = "", 0
                    while True:
                        try:
                            text += (await asyncio.wait_for(anext(stream), 0.002)).text
                        except TimeoutError:
                            cancelled += 1
                        except StopAsyncIteration:
                            break
                assert text == HELLO
                assert stream.timeline.outcome == "completed"
                assert_adds_up(stream.timeline)

        run(body)


def test_two_tasks_cannot_read_one_stream() -> None:
    with serving(hello(hang_after=1)) as server:

        async def body() -> None:
            async with ConnectionManager() as manager:
                async with manager.stream(server.endpoint(), chat()) as stream:
                    await anext(stream)
                    first = asyncio.create_task(anext(stream))
                    await asyncio.sleep(0)
                    with pytest.raises(RuntimeError, match="two tasks"):
                        await anext(stream)
                    first.cancel()
                    await asyncio.gather(first, return_exceptions=True)

        run(body)


def test_a_limit_of_the_queue_is_not_multiplied_by_retries() -> None:
    with serving(hello(hang_after=2)) as server:
        endpoint = server.endpoint(limits=spanwire.Limits(max_concurrent=1, queue_timeout_s=0.05), retries=AT_ONCE)

        async def body() -> None:
            async with ConnectionManager() as manager:
                async with manager.stream(endpoint, chat()) as stream:
                    await anext(stream)
                    with pytest.raises(errors.QueueTimeout) as caught:
                        await manager.complete(endpoint, chat())
                    assert caught.value.timeline is not None
                    assert len(caught.value.timeline.to_dict()["attempts"]) == 1

        run(body)


def test_what_had_arrived_before_a_limit_is_delivered_before_its_error() -> None:
    with serving(hello(hang_after=6)) as server:
        endpoint = server.endpoint(timeouts=spanwire.Timeouts(total_s=0.1))

        async def body() -> None:
            async with ConnectionManager() as manager:
                with pytest.raises(errors.CallTimeout) as caught:
                    async with manager.stream(endpoint, chat()) as stream:
                        await asyncio.sleep(0.2)  # the delay under test: the limit is hit while nobody reads
                        await read(stream)
                assert caught.value.reply is not None
                assert caught.value.reply.text == HELLO
                assert stream.timeline.outcome == "timeout"

        run(body)


def test_leaving_after_the_finish_reason_keeps_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only usage and the end are to come: nobody has to be stopped."""
    monkeypatch.setattr(pool, "FINISH_WAIT_NS", 3600 * 10**9)  # however late this machine hears of the end
    with serving(default=lambda _request: hello(end_s=0.02)) as server:

        async def body() -> None:
            async with ConnectionManager() as manager:
                for number in range(3):
                    async with manager.stream(server.endpoint(), chat()) as stream:
                        async for chunk in stream:
                            if chunk.finish_reason:
                                break
                    assert stream.timeline.outcome == "closed_by_caller"
                    await wait_for(server, lambda s, n=number: s.requests[n].ended)  # type: ignore[misc]
                    await asyncio.sleep(0)

        run(body)
        assert server.connections == 1
        assert not any(request.left for request in server.requests)


def test_an_early_refusal_of_an_upload_does_not_spoil_the_connection_for_the_next_call() -> None:
    """The server answers and keeps the connection, with most of the request not read."""
    seen: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        seen.append(head)
        if len(seen) == 1:
            writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\n{}")
            await reader.read()  # until the client closes
        else:
            body = b'{"choices":[{"message":{"content":"ok"},"finish_reason":"stop"}]}'
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
            await reader.read()
        writer.close()

    async def body() -> None:
        server = await asyncio.start_server(handle, "127.0.0.1", 0, limit=1024)
        endpoint = spanwire.Endpoint(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", proxy=None)
        async with ConnectionManager() as manager:
            with pytest.raises(errors.BadRequest) as caught:
                await manager.complete(endpoint, chat(padding="x" * 30_000_000))
            assert caught.value.status == 413
            assert (await manager.complete(endpoint, chat())).text == "ok"
        server.close()
        await server.wait_closed()
        while len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0)

    run(body)


@pytest.mark.parametrize("status", [200, 500])
def test_json_that_is_nested_too_deep_is_an_error_and_hangs_nobody(status: int) -> None:
    with serving(Script(status=status, body=b'{"choices":' + b"[" * 100_000), hello()) as server:
        endpoint = server.endpoint(limits=spanwire.Limits(max_concurrent=1), retries=NEVER)

        async def body() -> None:
            async with ConnectionManager() as manager:
                with pytest.raises((errors.ProtocolError, errors.ServerError)):
                    await manager.complete(endpoint, chat())
                assert (await manager.complete(endpoint, chat())).text

        run(body)


def test_a_key_that_the_server_repeats_is_not_shown() -> None:
    script = Script(status=401, body=b'{"error":{"message":"Invalid key: sk-secret"}}')
    with serving(script) as server:

        async def body() -> None:
            async with ConnectionManager() as manager:
                with pytest.raises(errors.AuthenticationFailed, match=r"Invalid key: \*\*\*") as caught:
                    await manager.complete(server.endpoint(api_key="sk-secret"), chat())
                assert "sk-secret" not in repr(caught.value) + str(caught.value)

        run(body)


def test_the_part_in_which_a_call_was_given_up_is_on_its_timeline() -> None:
    with serving(Script(status=503, headers={"retry-after": "5"})) as server:

        async def body() -> None:
            async with ConnectionManager() as manager:
                endpoint = server.endpoint(timeouts=spanwire.Timeouts(total_s=0.1), retries=spanwire.Retries())
                with pytest.raises(errors.CallTimeout) as caught:
                    await manager.complete(endpoint, chat())
                timeline = caught.value.timeline
                assert timeline is not None
                assert timeline.total_s >= 0.09
                assert timeline.error_type == "CallTimeout"
                assert timeline.segments["queue"].parts["backoff"].duration_s >= 0.05
                assert_adds_up(timeline)

        run(body)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_child_has_slots_of_its_own_and_its_parent_can_still_leave() -> None:
    with serving(hello(hang_after=2), hello()) as server:
        code = f"""
        import os, sys, spanwire
        manager = spanwire.default_sync_manager()
        endpoint = spanwire.Endpoint("{server.url}", proxy=None, limits=spanwire.Limits(max_concurrent=1))
        call = spanwire.Call.chat("m", [{{"role": "user", "content": "x"}}])
        stream = manager.stream(endpoint, call)
        next(stream)
        ready, go = os.pipe()
        child = os.fork()
        if child == 0:
            assert manager.complete(endpoint, call).text
            os.read(ready, 1)  # lives on, with the parent's socket in its hands
            os._exit(0)
        stream.close()
        print("left", flush=True)
        sys.stdin.readline()
        os.write(go, b"x")
        print(os.waitpid(child, 0)[1])
        """
        child = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        server.wait_for(lambda s: s.requests and s.requests[0].left, 20)
        server.wait_for(lambda s: len(s.requests) == 2 and s.requests[1].ended, 20)
        out, err = child.communicate("\n", timeout=30)
        assert (out, err) == ("left\n0\n", "")


@pytest.fixture
def slow_dials(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = SSETransport.connect

    async def later(self: SSETransport, endpoint: spanwire.Endpoint, attempt: Attempt) -> Connection:
        await asyncio.sleep(0.1)  # a delay that a network would have
        return await connect(self, endpoint, attempt)

    monkeypatch.setattr(SSETransport, "connect", later)


def test_an_attempt_on_a_dead_connection_is_not_counted() -> None:
    with serving(hello(), Script(drop_after="request"), Script(status=503), hello()) as server:

        async def body() -> None:
            async with ConnectionManager() as manager:
                endpoint = server.endpoint(retries=spanwire.Retries(max_attempts=2, base_s=0.0))
                await manager.complete(endpoint, chat())
                assert (await manager.complete(endpoint, chat())).text  # dead, 503, answered

        run(body)


def test_after_a_dead_connection_the_call_gets_a_new_one_and_not_one_that_is_just_given_back(slow_dials: None) -> None:
    def answer(request: Request) -> Script:
        if request.model == "first":
            return hello(queue_s=0.05)
        return Script(drop_after="request") if request.connection <= 2 else hello()

    with serving(default=answer) as server:

        async def body() -> None:
            async with ConnectionManager() as manager:
                endpoint = server.endpoint(retries=NEVER)
                await manager.warm(endpoint, 2)
                first = asyncio.create_task(manager.complete(endpoint, chat("first")))
                await wait_for(server, lambda s: len(s.requests) == 1)
                assert (await manager.complete(endpoint, chat())).text
                await first

        run(body)


def test_polling_while_an_attempt_is_made_uses_up_no_retries(slow_dials: None) -> None:
    busy = Script(status=503, close=True)
    with serving(busy, busy, hello()) as server:

        async def body() -> None:
            async with ConnectionManager() as manager:
                endpoint = server.endpoint(retries=spanwire.Retries(max_attempts=3, base_s=0.0))
                text = ""
                async with manager.stream(endpoint, chat()) as stream:
                    while not text:
                        try:
                            async with asyncio.timeout(0.03):
                                text += (await anext(stream)).text
                        except TimeoutError:
                            continue
                    text += await read(stream)
                assert text == HELLO
                attempts = stream.timeline.to_dict()["attempts"]
                assert [attempt["outcome"] for attempt in attempts] == ["error", "error", "completed"]

        run(body)


@pytest.mark.skipif(sys.platform == "win32", reason="uvloop does not run on Windows")
@pytest.mark.parametrize("way", ["break", "cancel", "drop", "timeout"])
def test_leaving_leaves_nothing_on_the_other_event_loop_either(way: str) -> None:
    import uvloop

    with serving(hello(hang_after=2)) as server:
        timeouts = spanwire.Timeouts(idle_s=0.05 if way == "timeout" else 60)
        endpoint = server.endpoint(limits=spanwire.Limits(max_concurrent=1), timeouts=timeouts, retries=NEVER)

        async def body() -> None:
            async with ConnectionManager() as manager:
                stream = manager.stream(endpoint, chat())
                if way == "drop":
                    await anext(stream)
                    del stream
                    gc.collect()
                else:
                    with contextlib.suppress(asyncio.CancelledError, errors.CallTimeout):
                        async with stream:
                            await anext(stream)
                            if way == "cancel":
                                raise asyncio.CancelledError
                            if way == "timeout":
                                await read(stream)
                await wait_for(server, lambda s: s.requests[0].left)
                assert repr(manager) == "ConnectionManager(0 connections, 0 calls)"
                assert "0 of 1 in use" in repr(manager._prepare(endpoint).slots)

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(body())


def test_a_stream_that_we_have_stopped_is_not_idle_when_we_let_it_go_on() -> None:
    """What the server sends then has the whole way to come: the limit begins anew."""
    second_ns = 1_000_000_000

    async def body() -> None:
        with serving(hello(hang_after=2)) as server:
            timeouts = spanwire.Timeouts(idle_s=10, first_content_s=None)
            async with (
                ConnectionManager() as manager,
                manager.stream(server.endpoint(timeouts=timeouts), chat()) as stream,
            ):
                await anext(stream)
                call = stream._run
                assert call is not None
                marks = call._attempt.marks
                call._reading = True
                heard_ns = max(marks.last_byte_ns, marks.first_byte_ns)
                assert call._deadline(call._attempt) == (heard_ns + 10 * second_ns, "idle_s")
                marks.resumed_ns = heard_ns + 8 * second_ns
                assert call._deadline(call._attempt) == (heard_ns + 18 * second_ns, "idle_s")
                call._reading = False

    run(body)


def test_a_timeline_stays_as_it_was_when_the_caller_left_at_the_finish_reason() -> None:
    """The connection is kept, so what the server still has to say arrives after the call has ended."""

    def event(**more: object) -> bytes:
        data = b"data: " + json.dumps({"id": "a", "model": "m", **more}).encode() + b"\n\n"
        return b"%x\r\n%b\r\n" % (len(data), data)

    async def main() -> None:
        go_on = asyncio.Event()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
            for text in "ab":
                writer.write(event(choices=[{"index": 0, "delta": {"content": text}}]))
                await asyncio.sleep(0.005)
            writer.write(event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}]))
            await go_on.wait()
            writer.write(event(choices=[], usage={"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}))
            writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
            await reader.read()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, spanwire.ConnectionManager(telemetry=None) as manager:
            endpoint = spanwire.Endpoint(f"http://127.0.0.1:{port}")
            await manager.warm(endpoint)
            async with manager.stream(endpoint, chat()) as stream:
                async for chunk in stream:
                    if chunk.finish_reason:
                        break
            timeline = stream.timeline  # its segments are worked out when somebody looks
            go_on.set()
            assert stream._run is not None
            exchange = stream._run.exchange
            assert isinstance(exchange, HTTPExchange)
            while not exchange._finished:
                await asyncio.sleep(0)
        assert timeline.outcome == "closed_by_caller"
        assert timeline.last_chunk_s is not None
        assert timeline.last_chunk_s <= timeline.total_s
        assert_adds_up(timeline)
        assert set(timeline.segments["model"].parts) == {"prefill", "decode"}
        assert timeline.segments["network"].parts["to_and_back"].source == "estimated"

    run(main)


@pytest.mark.parametrize("way", ["cancelled", "total_s"])
def test_the_wait_for_a_handshake_that_hangs_is_a_handshake_to_who_gives_up(way: str) -> None:
    """And no wait for a connection that another call was using, for which the caller's own limits would be to blame."""

    async def main() -> None:
        arrived = asyncio.Event()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readexactly(1)  # of the client's hello, to which nothing is said
            arrived.set()
            await reader.read()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        timeouts = spanwire.Timeouts(total_s=0.1 if way == "total_s" else None)
        endpoint = spanwire.Endpoint(f"https://127.0.0.1:{port}", timeouts=timeouts, retries=NEVER)
        async with server, ConnectionManager() as manager:
            first = manager.stream(endpoint, chat())
            opening = asyncio.ensure_future(first.__aenter__())
            await arrived.wait()
            if way == "cancelled":
                opening.cancel()
            await asyncio.wait([opening])
            with pytest.raises((asyncio.CancelledError, errors.CallTimeout)):
                await opening
            timeline = first.timeline
        assert timeline.outcome == ("cancelled" if way == "cancelled" else "timeout")
        assert_adds_up(timeline)
        assert set(timeline.segments["handshake"].parts) == {"tcp", "tls"}
        assert "queue" not in timeline.segments

    run(main)
