"""The connection manager on a real server: calls, connections, limits, ends."""

from __future__ import annotations

import asyncio
import gc
import socket
from typing import Any

import pytest

import spanwire
from spanwire import errors
from spanwire.manager import ConnectionManager
from spanwire.testing import LoopbackServer, Request, Script, ScriptedTool
from tests.support import AT_ONCE, NEVER, assert_adds_up, chat, hello, read, run, serving, wait_for

HELLO = "Hello from the loopback server."


# --- answers --------------------------------------------------------------------------------------------------------


def test_a_stream_gives_the_pieces_and_then_a_whole_reply() -> None:
    with serving(hello(reasoning=["hm", "m"])) as server:

        async def body() -> None:
            async with ConnectionManager() as manager:
                async with manager.stream(server.endpoint(), chat()) as stream:
                    chunks = [chunk async for chunk in stream]
                assert [chunk.text for chunk in chunks if chunk.text] == [
                    "Hello",
                    " from",
                    " the",
                    " loopback",
                    " server.",
                ]
                reply = stream.reply
                assert (reply.text, reply.reasoning, reply.finish_reason) == (HELLO, "hmm", "stop")
                assert reply.usage is not None
                assert reply.usage.output_tokens == 7
                assert sum(1 for chunk in chunks if chunk.usage is not None) == 1
                assert reply.timeline is stream.timeline
                assert stream.timeline.outcome == "completed"
                assert stream.headers["content-type"].startswith("text/event-stream")
                assert_adds_up(stream.timeline)

        run(body)


def test_a_whole_answer_is_the_joined_stream() -> None:
    script = hello(
        tool_calls=[ScriptedTool("f", ('{"a"', ":1}")), ScriptedTool("g", "{}")], usage=spanwire.Usage(3, 4, 7)
    )
    with serving(script, script) as server:

        async def body() -> None:
            async with ConnectionManager() as manager:
                whole = await manager.complete(server.endpoint(), chat())
                async with manager.stream(server.endpoint(), chat()) as stream:
                    await read(stream)
                joined = stream.reply
                assert (whole.text, whole.tool_calls, whole.finish_reason, whole.usage, whole.model) == (
                    joined.text,
                    joined.tool_calls,
                    joined.finish_reason,
                    joined.usage,
                    joined.model,
                )
                assert [(call.name, call.arguments) for call in whole.tool_calls] == [("f", '{"a":1}'), ("g", "{}")]
                assert whole.timeline is not None
                assert_adds_up(whole.timeline)

        run(body)


def test_embeddings_come_in_the_order_of_the_input() -> None:
    with serving() as server:

        async def body() -> None:
            async with ConnectionManager() as manager:
                found = await manager.embed(server.endpoint(), spanwire.Call.embeddings("e", ["a", "b", "c"]))
                alone = await manager.embed(server.endpoint(), spanwire.Call.embeddings("e", ["b"]))
            assert len(found.vectors) == 3
            assert len(found.vectors[0]) == 8
            assert found.vectors[1] == alone.vectors[0]
            assert found.timeline is not None
            assert found.timeline.operation == "embeddings"

        run(body)


def test_a_call_of_another_operation_is_refused_and_the_right_method_named() -> None:
    async def body() -> None:
        manager, vectors = ConnectionManager(), spanwire.Call.embeddings("e", "x")
        with pytest.raises(errors.ConfigurationError, match=r"Call\.embeddings"):
            await manager.embed("http://127.0.0.1:9/v1", chat())
        with pytest.raises(errors.ConfigurationError, match=r"embed\(\)"):
            await manager.complete("http://127.0.0.1:9/v1", vectors)
        with pytest.raises(errors.ConfigurationError, match=r"embed\(\)"):
            manager.stream("http://127.0.0.1:9/v1", vectors)

    run(body)


def test_a_stream_can_be_iterated_without_a_with_block() -> None:
    with serving(hello()) as server:

        async def body() -> None:
            async with ConnectionManager() as manager:
                stream = manager.stream(server.endpoint(), chat())
                assert await read(stream) == HELLO

        run(body)


def test_the_request_is_what_an_openai_server_expects() -> None:
    with serving() as server:
        endpoint = server.endpoint(
            api_key="sk-1", headers={"X-Team": "a"}, query={"api-version": "2"}, options={"include_usage": True}
        )

        async def body() -> None:
            async with ConnectionManager() as manager:
                call = chat(temperature=0.5, stop=None, headers={"X-Call": "b"})
                async with manager.stream(endpoint, call, headers={"X-Now": "c"}) as stream:
                    await read(stream)
                await manager.complete(server.endpoint(options={"include_usage": False}), chat())

        run(body)
        streamed, whole = server.requests
        assert (streamed.method, streamed.path, streamed.query) == ("POST", "/v1/chat/completions", "api-version=2")
        assert streamed.body == {
            "model": "m",
            "messages": [{"role": "user", "content": "Say hello"}],
            "temperature": 0.5,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = streamed.headers
        assert headers["authorization"] == "Bearer sk-1"
        assert (headers["x-team"], headers["x-call"], headers["x-now"]) == ("a", "b", "c")
        assert headers["accept-encoding"] == "identity"
        assert headers["host"] == f"127.0.0.1:{server.port}"
        assert headers["idempotency-key"].startswith("spanwire-")
        assert "authorization" not in whole.headers
        assert "stream" not in whole.body
        assert "stream_options" not in whole.body


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_key_can_be_a_function_that_is_asked_for_each_attempt(kind: str) -> None:
    keys = iter(["first", "second"])

    async def later() -> str:
        return next(keys)

    provider: Any = later if kind == "async" else lambda: next(keys)
    with serving(Script(status=503), hello()) as server:

        async def body() -> None:
            async with ConnectionManager() as manager:
                await manager.complete(server.endpoint(api_key=provider, retries=AT_ONCE), chat())

        run(body)
        assert [request.headers["authorization"] for request in server.requests] == ["Bearer first", "Bearer second"]


def test_a_key_function_that_fails_is_a_configuration_error() -> None:
    def provider() -> str:
        raise KeyError("vault")

    async def body() -> None:
        endpoint = spanwire.Endpoint("http://127.0.0.1:9/v1", api_key=provider)
        with pytest.raises(errors.ConfigurationError, match=r"api_key\(\) failed with KeyError") as caught:
            await ConnectionManager().complete(endpoint, chat())
        assert isinstance(caught.value.__cause__, KeyError)

    run(body)


# --- connections ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end_s", [0.0, 0.002])
def test_six_streamed_calls_use_one_connection(end_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spanwire.pool.FINISH_WAIT_NS", 500_000_000)  # a busy machine may need more than 5 ms for 2
    with serving(default=lambda _request: hello(end_s=end_s)) as server:

        async def body() -> None:
            async with ConnectionManager() as manager:
                for number in range(6):
                    async with manager.stream(server.endpoint(), chat()) as stream:
                        assert await read(stream) == HELLO
                    use = stream.timeline.connection
                    assert use is not None
                    assert use.reused == (number > 0)
                    assert ("handshake" in stream.timeline.segments) == (number == 0)

        run(body)
        assert server.connections == 1


def test_an_end_of_message_that_is_late_does_not_hold_up_the_next_call() -> None:
    """The terminal event ends the call; the next one dials, and both connections are used again later."""
    with serving(hello(end_s=0.4), hello(), hello()) as server:

        async def body() -> None:
            async with ConnectionManager() as manager:
                for _ in range(2):
                    async with manager.stream(server.endpoint(), chat()) as stream:
                        assert await read(stream) == HELLO
                await wait_for(server, lambda s: all(request.ended for request in s.requests))
                async with manager.stream(server.endpoint(), chat()) as stream:
                    assert await read(stream) == HELLO

        run(body)
        assert server.connections == 2
        assert not any(request.left for request in server.requests)


def test_an_end_of_message_that_never_comes_closes_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spanwire.pool.FINISH_LIMIT_S", 0.05)
    with serving(hello(end_s=60)) as server:

        async def body() -> None:
            async with ConnectionManager() as manager:
                async with manager.stream(server.endpoint(), chat()) as stream:
                    assert await read(stream) == HELLO
                assert stream.timeline.outcome == "completed"
                await wait_for(server, lambda s: s.requests[0].left)

        run(body)


def test_warm_pays_the_handshake_before_the_first_call() -> None:
    with serving() as server:

        async def body() -> None:
            async with ConnectionManager() as manager:
                await manager.warm(server.endpoint(), 2)
                assert "2 connections" in repr(manager)
                replies = await asyncio.gather(*(manager.complete(server.endpoint(), chat()) for _ in range(2)))
                for reply in replies:
                    assert reply.timeline is not None
                    assert "handshake" not in reply.timeline.segments

        run(body)
        assert server.connections == 2


def test_endpoints_that_differ_in_policy_share_a_connection() -> None:
    with serving() as server:

        async def body() -> None:
            async with ConnectionManager() as manager:
                for number in range(3):
                    endpoint = server.endpoint(
                        api_key=f"k{number}",
                        headers={"x-n": str(number)},
                        timeouts=spanwire.Timeouts(idle_s=5.0 + number),
                    )
                    await manager.complete(endpoint, chat())

        run(body)
        assert server.connections == 1
        assert [request.headers["authorization"] for request in server.requests] == [f"Bearer k{n}" for n in range(3)]


def test_a_connection_that_the_server_closed_meanwhile_is_replaced_without_an_error() -> None:
    with serving() as server:

        async def body() -> None:
            async with ConnectionManager() as manager:
                await manager.complete(server.endpoint(), chat())
                server.disconnect()
                await wait_for(server, lambda s: s.open_connections == 0)
                reply = await manager.complete(server.endpoint(retries=spanwire.Retries(base_s=30)), chat())
                assert reply.text

        run(body)
        assert server.connections == 2


def test_a_reused_connection_that_breaks_before_any_answer_is_tried_once_on_a_new_one() -> None:
    with serving(hello(), Script(drop_after="request"), hello()) as server:

        async def body() -> None:
            async with ConnectionManager() as manager:
                await manager.complete(server.endpoint(), chat())
                # base_s: an ordinary retry would wait for up to 30 s, and the test would run into its limit
                reply = await manager.complete(server.endpoint(retries=spanwire.Retries(base_s=30)), chat())
                assert reply.timeline is not None
                attempts = reply.timeline.to_dict()["attempts"]
                assert [attempt.get("error_type") for attempt in attempts] == ["ConnectionFailed", None]
                assert [attempt["connection"]["reused"] for attempt in attempts] == [True, False]
                assert_adds_up(reply.timeline)

        run(body)


def test_tls_is_verified_and_its_handshake_is_on_the_timeline() -> None:
    with LoopbackServer(tls=True) as server:

        async def body() -> None:
            async with ConnectionManager() as manager:
                reply = await manager.complete(server.endpoint(), chat())
                assert reply.timeline is not None
                assert set(reply.timeline.segments["handshake"].parts) == {"tcp", "tls"}
                with pytest.raises(errors.ConnectionFailed, match="not trusted") as caught:
                    await manager.complete(spanwire.Endpoint(server.url, proxy=None), chat())
                assert caught.value.phase == "tls"
                assert not caught.value.retryable
                unchecked = spanwire.Endpoint(server.url, proxy=None, tls=spanwire.TLS(verify=False))
                assert (await manager.complete(unchecked, chat())).text

        run(body)


def test_a_unix_socket_carries_a_call(tmp_path: Any) -> None:
    with serving(uds=str(tmp_path / "s")) as server:

        async def body() -> None:
            async with ConnectionManager() as manager:
                reply = await manager.complete(server.endpoint(), chat())
                assert reply.timeline is not None
                assert reply.timeline.endpoint.startswith("unix:")
                assert set(reply.timeline.segments["handshake"].parts) == {"connect"}

        run(body)


def test_one_manager_serves_one_loop_after_the_other() -> None:
    """The connections of a loop are closed with it, without a warning."""
    manager = ConnectionManager()
    with serving() as server:

        async def body() -> None:
            assert (await manager.complete(server.endpoint(), chat())).text

        for number in range(3):
            run(body)
            server.wait_for(lambda s: s.open_connections == 0)
            assert server.connections == number + 1


def test_the_default_manager_is_one_for_the_process() -> None:
    assert spanwire.default_manager() is spanwire.default_manager()


def test_a_loop_that_ends_with_an_open_stream_ends_the_call() -> None:
    manager = ConnectionManager()
    with serving(hello(hang_after=2)) as server:
        streams = []

        async def body() -> None:
            stream = manager.stream(server.endpoint(), chat())
            await anext(stream)
            streams.append(stream)

        asyncio.run(body())
        server.wait_for(lambda s: s.requests[0].left)
        assert streams[0].timeline.outcome == "error"
        assert_adds_up(streams[0].timeline)


def test_closing_the_manager_ends_the_calls_that_run_with_an_error() -> None:
    with serving(hello(hang_after=2)) as server:

        async def body() -> None:
            manager = ConnectionManager()
            async with manager.stream(server.endpoint(), chat()) as stream:
                await anext(stream)
                pending = asyncio.create_task(read(stream))
                await asyncio.sleep(0)
                await manager.aclose()
                with pytest.raises(errors.ConnectionFailed, match="manager was closed"):
                    await pending

        run(body)


@pytest.mark.parametrize("count", [0, -1, True, 1.5, "2"])
def test_warm_takes_a_number_from_one(count: Any) -> None:
    async def body() -> None:
        with pytest.raises(errors.ConfigurationError, match="from 1"):
            await ConnectionManager().warm("http://127.0.0.1:9/v1", count)

    run(body)


def test_tls_towards_a_plain_server_says_so() -> None:
    with LoopbackServer() as server:
        endpoint = spanwire.Endpoint(server.url.replace("http:", "https:"), proxy=None, retries=NEVER)

        async def body() -> None:
            async with ConnectionManager() as manager:
                with pytest.raises(errors.ConnectionFailed, match="does not speak TLS"):
                    await manager.complete(endpoint, chat())

        run(body)


# --- limits ---------------------------------------------------------------------------------------------------------


def test_calls_over_the_limit_wait_in_order_and_the_wait_is_queue() -> None:
    with serving(default=lambda _request: Script.say("a", prefill_s=0.05)) as server:
        endpoint = server.endpoint(limits=spanwire.Limits(max_concurrent=2))

        async def body() -> None:
            async with ConnectionManager() as manager:
                replies = await asyncio.gather(*(manager.complete(endpoint, chat(f"m{n}")) for n in range(5)))
                waits = []
                for reply in replies:
                    assert reply.timeline is not None
                    assert_adds_up(reply.timeline)
                    queue = reply.timeline.segments.get("queue")
                    waits.append(queue.duration_s if queue is not None else 0.0)
                assert waits[:2] == [0.0, 0.0]
                assert min(waits[2:4]) >= 0.04
                assert waits[4] >= 0.08

        run(body)
        assert [request.model for request in server.requests] == [f"m{n}" for n in range(5)]
        assert server.connections == 2


def test_a_full_queue_and_a_queue_that_takes_too_long_are_told_apart() -> None:
    with serving(hello(hang_after=2)) as server:
        limits = spanwire.Limits(max_concurrent=1, max_queue=1, queue_timeout_s=0.05)
        endpoint = server.endpoint(limits=limits)

        async def body() -> None:
            async with ConnectionManager() as manager:
                async with manager.stream(endpoint, chat("holder")) as stream:
                    await anext(stream)
                    waiting = asyncio.create_task(manager.complete(endpoint, chat()))
                    await asyncio.sleep(0)
                    with pytest.raises(errors.QueueFull, match="max_queue"):
                        await manager.complete(endpoint, chat(), retries=NEVER)
                    with pytest.raises(errors.QueueTimeout, match=r"max_concurrent.*holder for") as caught:
                        await waiting
                    assert caught.value.timeline is not None
                    assert set(caught.value.timeline.segments) <= {"queue", "unattributed"}

        run(body)
        assert len(server.requests) == 1


def test_a_caller_that_is_cancelled_while_it_waits_leaves_no_slot_behind() -> None:
    with serving(hello(hang_after=2)) as server:
        endpoint = server.endpoint(limits=spanwire.Limits(max_concurrent=1))

        async def body() -> None:
            async with ConnectionManager() as manager:
                async with manager.stream(endpoint, chat()) as stream:
                    await anext(stream)
                    waiting = [asyncio.create_task(manager.complete(endpoint, chat())) for _ in range(3)]
                    await asyncio.sleep(0)
                    for task in waiting:
                        task.cancel()
                    await asyncio.gather(*waiting, return_exceptions=True)
                assert (await manager.complete(endpoint, chat())).text

        run(body)


# --- leaving --------------------------------------------------------------------------------------------------------


def test_leaving_early_tells_the_server_and_frees_the_slot() -> None:
    with serving(hello(hang_after=3)) as server:
        endpoint = server.endpoint(limits=spanwire.Limits(max_concurrent=1))

        async def body() -> None:
            async with ConnectionManager() as manager:
                async with manager.stream(endpoint, chat()) as stream:
                    async for chunk in stream:
                        if chunk.text:
                            break
                assert stream.timeline.outcome == "closed_by_caller"
                assert_adds_up(stream.timeline)
                await wait_for(server, lambda s: s.requests[0].left)
                assert (await manager.complete(endpoint, chat())).text

        run(body)


def test_an_error_in_the_block_is_the_callers_and_closes_the_call() -> None:
    with serving(hello(hang_after=3)) as server:

        async def body() -> None:
            async with ConnectionManager() as manager:
                with pytest.raises(ZeroDivisionError):
                    async with manager.stream(server.endpoint(), chat()) as stream:
                        async for _ in stream:
                            _ = 1 / 0
                assert stream.timeline.outcome == "closed_by_caller"
                await wait_for(server, lambda s: s.requests[0].left)

        run(body)


@pytest.mark.parametrize("streamed", [True, False])
def test_a_cancelled_task_cancels_the_call(streamed: bool) -> None:
    with serving(Script(hang_after="request")) as server:
        timelines = []

        class Observer:
            def call_ended(self, timeline: spanwire.Timeline) -> None:
                timelines.append(timeline)

        class Plugin:
            @spanwire.hookimpl
            def register_observers(self) -> list[Observer]:
                return [Observer()]

        async def body() -> None:
            async with ConnectionManager(plugins=[Plugin()]) as manager:

                async def call() -> None:
                    if not streamed:
                        await manager.complete(server.endpoint(), chat())
                    async with manager.stream(server.endpoint(), chat()) as stream:
                        await read(stream)

                task = asyncio.create_task(call())
                await wait_for(server, lambda s: len(s.requests) == 1)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                await wait_for(server, lambda s: s.requests[0].left)

        run(body)
        assert [timeline.outcome for timeline in timelines] == ["cancelled"]


def test_a_read_that_is_cancelled_can_be_made_again() -> None:
    """``asyncio.wait_for`` around one chunk, to show that something is still going on, does not lose the answer."""
    with serving(Script.say("late", prefill_s=0.05)) as server:

        async def body() -> None:
            async with ConnectionManager() as manager:
                async with manager.stream(server.endpoint(), chat()) as stream:
                    text, beats = "", 0
                    while not text:
                        try:
                            text += (await asyncio.wait_for(anext(stream), 0.005)).text
                        except TimeoutError:
                            beats += 1
                    assert text == "late"
                    assert beats
                    await read(stream)
                assert stream.timeline.outcome == "completed"

        run(body)


def test_closing_from_another_task_ends_the_pending_read() -> None:
    with serving(hello(hang_after=1)) as server:

        async def body() -> None:
            async with ConnectionManager() as manager:
                async with manager.stream(server.endpoint(), chat()) as stream:
                    reading = asyncio.create_task(read(stream))
                    await wait_for(server, lambda s: len(s.requests) == 1)
                    await stream.aclose()
                    assert await reading == ""
                assert stream.timeline.outcome == "closed_by_caller"

        run(body)


def test_a_stream_that_is_dropped_is_noticed() -> None:
    with serving(hello(hang_after=3)) as server:
        endpoint = server.endpoint(limits=spanwire.Limits(max_concurrent=1))

        async def body() -> None:
            async with ConnectionManager() as manager:
                stream = manager.stream(endpoint, chat())
                await anext(stream)
                inner = stream._run
                assert inner is not None
                del stream
                gc.collect()
                await wait_for(server, lambda s: s.requests[0].left)
                assert inner.timeline.outcome == "abandoned"
                assert_adds_up(inner.timeline)
                assert (await manager.complete(endpoint, chat())).text

        run(body)


def test_a_stream_is_entered_once() -> None:
    with serving(hello()) as server:

        async def body() -> None:
            async with ConnectionManager() as manager:
                stream = manager.stream(server.endpoint(), chat())
                with pytest.raises(RuntimeError, match="not entered"):
                    _ = stream.timeline
                async with stream:
                    with pytest.raises(RuntimeError, match="has not ended"):
                        _ = stream.timeline
                    with pytest.raises(RuntimeError, match="entered once"):
                        await stream.__aenter__()
                    await read(stream)
                assert await read(stream) == ""

        run(body)


# --- time limits ----------------------------------------------------------------------------------------------------


def test_heartbeats_do_not_count_as_content() -> None:
    script = Script(writes=[b": ping\n\n"] * 100, write_gap_s=0.01)
    with serving(script) as server:
        timeouts = spanwire.Timeouts(first_content_s=0.1)

        async def body() -> None:
            async with ConnectionManager() as manager:
                with pytest.raises(errors.CallTimeout, match=r"first_content_s") as caught:
                    async with manager.stream(server.endpoint(timeouts=timeouts), chat(), retries=NEVER) as stream:
                        await read(stream)
                assert caught.value.limit == "first_content_s"
                assert stream.timeline.outcome == "timeout"
                await wait_for(server, lambda s: s.requests[0].left)

        run(body)


def test_a_stream_that_stalls_ends_by_the_idle_limit_with_what_had_come() -> None:
    with serving(hello(hang_after=3)) as server:
        timeouts = spanwire.Timeouts(idle_s=0.1)

        async def body() -> None:
            async with ConnectionManager() as manager:
                text = ""
                with pytest.raises(errors.CallTimeout) as caught:
                    async with manager.stream(server.endpoint(timeouts=timeouts), chat()) as stream:
                        async for chunk in stream:
                            text += chunk.text
                assert caught.value.limit == "idle_s"
                assert caught.value.reply is not None
                assert caught.value.reply.text == text == "Hello from"
                assert len(server.requests) == 1

        run(body)


def test_a_slow_consumer_is_not_an_idle_server() -> None:
    with serving(hello(end_s=0.0)) as server:
        timeouts = spanwire.Timeouts(idle_s=0.05)

        async def body() -> None:
            async with ConnectionManager() as manager:
                async with manager.stream(server.endpoint(timeouts=timeouts), chat()) as stream:
                    await anext(stream)
                    await asyncio.sleep(0.2)  # the delay under test: longer than the limit
                    await read(stream)
                assert stream.timeline.outcome == "completed"
                assert stream.timeline.segments["client"].parts["waiting"].duration_s >= 0.15

        run(body)


def test_the_total_limit_covers_retries_and_their_waits() -> None:
    with serving(default=lambda _request: Script(status=503)) as server:
        timeouts = spanwire.Timeouts(total_s=0.1)
        retries = spanwire.Retries(max_attempts=1000, base_s=0.02, max_wait_s=0.03)

        async def body() -> None:
            async with ConnectionManager() as manager:
                with pytest.raises(errors.CallTimeout) as caught:
                    await manager.complete(server.endpoint(timeouts=timeouts, retries=retries), chat())
                assert caught.value.limit == "total_s"
                assert caught.value.timeline is not None
                assert_adds_up(caught.value.timeline)
                assert caught.value.timeline.segments["queue"].parts["backoff"].duration_s > 0

        run(body)
        assert len(server.requests) > 1


def test_a_connect_that_hangs_names_where_it_stood() -> None:
    """A listening socket whose accept queue is never served completes TCP but not TLS."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        url = f"https://127.0.0.1:{listener.getsockname()[1]}/v1"
        endpoint = spanwire.Endpoint(url, proxy=None, timeouts=spanwire.Timeouts(connect_s=0.1), retries=NEVER)

        async def body() -> None:
            async with ConnectionManager() as manager:
                with pytest.raises(errors.CallTimeout, match="connect_s") as caught:
                    await manager.complete(endpoint, chat())
                assert (caught.value.limit, caught.value.phase) == ("connect_s", "tls")
                assert caught.value.timeline is not None
                assert set(caught.value.timeline.segments["handshake"].parts) == {"tcp", "tls"}
                assert caught.value.timeline.segments["handshake"].duration_s >= 0.09

        run(body)


# --- errors and retries ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "kind", "attempts"),
    [
        (400, errors.BadRequest, 1),
        (401, errors.AuthenticationFailed, 1),
        (404, errors.BadRequest, 1),
        (408, errors.BadRequest, 3),
        (429, errors.RateLimited, 3),
        (500, errors.ServerError, 3),
        (503, errors.Overloaded, 3),
    ],
)
def test_a_status_becomes_its_error_and_is_retried_where_that_may_help(
    status: int, kind: type[errors.ServerError], attempts: int
) -> None:
    with serving(
        default=lambda _request: Script(status=status, body=b'{"error": {"message": "so", "code": "c"}}')
    ) as server:

        async def body() -> None:
            async with ConnectionManager() as manager:
                with pytest.raises(kind, match="so") as caught:
                    await manager.complete(server.endpoint(retries=AT_ONCE), chat())
                error = caught.value
                assert (error.status, error.code) == (status, "c")
                assert error.endpoint == f"127.0.0.1:{server.port}"
                assert error.timeline is not None
                assert len(error.timeline.to_dict()["attempts"]) == attempts
                assert_adds_up(error.timeline)

        run(body)
        assert len(server.requests) == attempts
        assert server.connections == 1
        keys = {request.headers["idempotency-key"] for request in server.requests}
        assert len(keys) == 1


def test_retry_after_is_waited_for_and_one_that_is_too_long_is_raised_at_once() -> None:
    slow = Script(status=429, headers={"retry-after-ms": "80"})
    absurd = Script(status=429, headers={"retry-after": "3600"})
    with serving(slow, hello(), absurd) as server:

        async def body() -> None:
            async with ConnectionManager() as manager:
                reply = await manager.complete(server.endpoint(retries=AT_ONCE), chat())
                assert reply.timeline is not None
                assert reply.timeline.segments["queue"].parts["backoff"].duration_s >= 0.08
                assert_adds_up(reply.timeline)
                with pytest.raises(errors.RateLimited) as caught:
                    await manager.complete(server.endpoint(), chat())
                assert caught.value.retry_after_s == 3600

        run(body)
        assert len(server.requests) == 3


def test_nothing_is_sent_again_after_content() -> None:
    with serving(hello(drop_after=3)) as server:

        async def body() -> None:
            async with ConnectionManager() as manager:
                text = ""
                with pytest.raises(errors.ConnectionFailed) as caught:
                    async with manager.stream(server.endpoint(retries=AT_ONCE), chat()) as stream:
                        async for chunk in stream:
                            text += chunk.text
                assert caught.value.reply is not None
                assert caught.value.reply.text == text != ""
                assert caught.value.reply.finish_reason is None
                assert stream.timeline.outcome == "error"

        run(body)
        assert len(server.requests) == 1


def test_a_stream_that_breaks_before_content_is_made_again() -> None:
    with serving(hello(drop_after=1), hello()) as server:

        async def body() -> None:
            async with ConnectionManager() as manager:
                async with manager.stream(server.endpoint(retries=AT_ONCE), chat()) as stream:
                    assert await read(stream) == HELLO
                assert len(stream.timeline.to_dict()["attempts"]) == 2

        run(body)


def test_a_refused_connection_says_so() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        endpoint = spanwire.Endpoint(f"http://127.0.0.1:{taken.getsockname()[1]}/v1", proxy=None, retries=AT_ONCE)

        async def body() -> None:
            async with ConnectionManager() as manager:
                with pytest.raises(errors.ConnectionFailed, match=r"refused") as caught:
                    await manager.complete(endpoint, chat())
                assert caught.value.phase == "tcp"
                assert isinstance(caught.value.__cause__, OSError)
                assert caught.value.timeline is not None
                assert len(caught.value.timeline.to_dict()["attempts"]) == 3

        run(body)


@pytest.mark.parametrize(
    ("url", "more", "words"),
    [
        ("htpp://h/v1", {}, "did you mean 'http'"),
        ("http://h/v1", {"transport": "ssse"}, "did you mean 'sse'"),
        ("http://h/v1", {"dialect": "openapi"}, "did you mean 'openai'"),
        ("http://h/v1", {"options": {"include_usages": True}}, "did you mean 'include_usage'"),
    ],
)
def test_a_bad_endpoint_is_told_where_the_stream_is_made(url: str, more: dict[str, Any], words: str) -> None:
    async def body() -> None:
        with pytest.raises(errors.ConfigurationError, match=words):
            ConnectionManager().stream(spanwire.Endpoint(url, **more), chat())

    run(body)


@pytest.mark.parametrize("wrong", [None, 5, {"url": "http://h"}])
def test_a_wrong_type_of_endpoint_or_call_is_told(wrong: Any) -> None:
    async def body() -> None:
        with pytest.raises(errors.ConfigurationError, match="endpoint"):
            ConnectionManager().stream(wrong, chat())
        with pytest.raises(errors.ConfigurationError, match="call"):
            await ConnectionManager().complete("http://h/v1", wrong)

    run(body)


def test_headers_cannot_smuggle_in_others_or_break_the_message() -> None:
    async def body() -> None:
        manager = ConnectionManager()
        with pytest.raises(errors.ConfigurationError, match="line break"):
            await manager.complete("http://h/v1", chat(), headers={"x": "a\r\ny: b"})
        with serving() as server, pytest.raises(errors.ConfigurationError, match="content-length"):
            await manager.complete(server.endpoint(), chat(), headers={"Content-Length": "3"})

    run(body)


def test_a_key_from_a_function_is_checked_too() -> None:
    with serving() as server:

        async def body() -> None:
            async with ConnectionManager() as manager:
                with pytest.raises(errors.ConfigurationError, match="line break") as caught:
                    await manager.complete(server.endpoint(api_key=lambda: "sk\r\nx: y"), chat())
                assert "sk" not in str(caught.value)

        run(body)
        assert server.requests == []


def test_a_call_that_is_no_json_is_refused_and_leaves_nothing() -> None:
    with serving() as server:
        endpoint = server.endpoint(limits=spanwire.Limits(max_concurrent=1))

        async def body() -> None:
            async with ConnectionManager() as manager:
                with pytest.raises(errors.ConfigurationError, match="JSON"):
                    await manager.complete(endpoint, chat(user=object()))
                assert (await manager.complete(endpoint, chat())).text

        run(body)
        assert server.connections == 1


def test_a_slow_answer_shows_as_model_time_and_not_as_network() -> None:
    def slow(_request: Request) -> Script:
        return Script(tokens=["a", "b", "c"], prefill_s=0.06, gap_s=0.03)

    with serving(default=slow) as server:

        async def body() -> None:
            async with ConnectionManager() as manager:
                await manager.warm(server.endpoint())
                async with manager.stream(server.endpoint(), chat()) as stream:
                    await read(stream)
                model = stream.timeline.segments["model"]
                assert model.source == "estimated"
                assert model.parts["prefill"].duration_s >= 0.055
                assert model.parts["decode"].duration_s >= 0.055
                assert stream.timeline.segments["network"].duration_s < 0.03
                first = stream.timeline
                assert first.first_byte_s is not None
                assert first.first_content_s is not None
                assert first.first_content_s - first.first_byte_s >= 0.05

        run(body)


def test_a_whole_answer_s_bytes_are_kept_and_a_streamed_one_s_are_not() -> None:
    body = b'{"id": "c", "x_new": 1, "choices": [{"index": 0, "message": {"content": "a"}, "finish_reason": "stop"}]}'

    async def main() -> None:
        with serving(Script(body=body), hello()) as server:
            async with spanwire.ConnectionManager() as manager:
                assert (await manager.complete(server.endpoint(), chat())).raw == body
                async with manager.stream(server.endpoint(), chat()) as stream:
                    assert all([chunk.raw async for chunk in stream])
                assert stream.reply.raw == b""

    run(main)
