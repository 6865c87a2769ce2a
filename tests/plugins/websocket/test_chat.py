"""Chat on sockets: what is tried again and what is not, what is left behind, and that no answer is another one's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import spanwire
from spanwire import errors
from spanwire.testing import LoopbackServer, Script
from tests.plugins.websocket.raw_server import (
    Peer,
    RawServer,
    answer,
    close_frame,
    completed,
    created,
    delta,
    error,
    event,
    frame,
    raw_server,
)
from tests.support import AT_ONCE, NEVER, assert_adds_up, chat, hello, read, run, wait_for

FINE = answer("Hello")
Handler = Callable[[Peer], Awaitable[None]]


def plays(*answers: bytes, end: bool = False) -> Handler:
    """A server with an answer for each request on a connection, the last one for all others. ``end``: then it goes."""

    async def handler(peer: Peer) -> None:
        await peer.upgrade()
        for data in answers:
            await peer.request()
            await peer.send(data)
        while not end:
            await peer.request()
            await peer.send(answers[-1])

    return handler


async def fine(peer: Peer) -> None:
    await peer.upgrade()
    number = 0
    while True:
        await peer.request()
        number += 1
        await peer.send(answer("Hello", id=f"p{peer.number}-{number}"))


def loopback(*scripts: Any, **more: Any) -> LoopbackServer:
    return LoopbackServer([*scripts], part="websocket", **more)


async def complete(
    manager: spanwire.ConnectionManager, server: RawServer, call: spanwire.Call | None = None, **more: Any
) -> spanwire.Reply:
    more.setdefault("retries", AT_ONCE)
    return await manager.complete(server.endpoint(**more), call or chat())


def conversation(*texts: str) -> list[dict[str, Any]]:
    """Messages, of user and assistant by turns."""
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]


# --- what is safe to try again ------------------------------------------------------------------------------------------

#: The first answer, whether it is tried again by itself, and the kind of the error if not.
SAFE = [
    pytest.param(error("server_is_overloaded", type="server_error"), True, errors.Overloaded, id="overloaded"),
    pytest.param(error(None, type="server_error"), True, errors.ServerError, id="server_error"),
    pytest.param(error("rate_limit_exceeded", type="rate_limit_error"), True, errors.RateLimited, id="rate"),
    pytest.param(error(None, "No model provided"), False, errors.BadRequest, id="litellm"),
    pytest.param(error("invalid_prompt"), False, errors.BadRequest, id="prompt"),
    pytest.param(error("x", "Too many items: limit exceeded", status=400), False, errors.BadRequest, id="too-many"),
    pytest.param(error("x", "maximum context limit exceeded"), False, errors.BadRequest, id="context"),
    pytest.param(error("invalid_api_key", status=401), False, errors.AuthenticationFailed, id="key"),
    pytest.param(event("error", code="server_error", message="flat"), True, errors.ServerError, id="flat"),
    pytest.param(close_frame(1000), True, errors.Truncated, id="1000"),
    pytest.param(close_frame(), True, errors.Truncated, id="1005"),
    pytest.param(close_frame(1001), True, errors.ConnectionFailed, id="1001"),
    pytest.param(close_frame(1012), True, errors.ConnectionFailed, id="1012"),
    pytest.param(close_frame(1011, "upstream"), False, errors.ConnectionFailed, id="1011"),
    pytest.param(close_frame(1008, "policy"), False, errors.ServerError, id="1008"),
    pytest.param(close_frame(1008, "rate limit"), True, errors.RateLimited, id="1008-rate"),
    pytest.param(b"", True, errors.ConnectionFailed, id="eof"),
]


@pytest.mark.parametrize("reused", [False, True], ids=["first", "reused"])
@pytest.mark.parametrize(("said", "again", "kind"), SAFE)
def test_before_anything_of_the_answer(said: bytes, again: bool, kind: type[Exception], reused: bool) -> None:
    async def body() -> None:
        first = plays(FINE, said, end=True) if reused else plays(said, end=True)
        async with raw_server(first, fine) as server, spanwire.ConnectionManager(telemetry=None) as manager:
            if reused:
                await complete(manager, server)
            if again:
                reply = await complete(manager, server, limits=spanwire.Limits(queue_timeout_s=5))
                assert reply.text == "Hello"
                assert len(server.asked) == 2 + reused
            else:
                with pytest.raises(kind) as caught:
                    await complete(manager, server)
                assert isinstance(caught.value, errors.SpanwireError)
                assert caught.value.retryable is False
                assert len(server.asked) == 1 + reused
            assert len({id(peer) for peer in server.peers}) == 1 + again

    run(body)


@pytest.mark.parametrize(("said", "_again", "kind"), SAFE)
def test_once_there_was_content_nothing_is_tried_again(said: bytes, _again: bool, kind: type[Exception]) -> None:
    async def body() -> None:
        async with (
            raw_server(plays(created() + delta("Hi") + said, end=True), fine) as server,
            spanwire.ConnectionManager(telemetry=None) as manager,
        ):
            with pytest.raises(errors.SpanwireError) as caught:
                await complete(manager, server)
            assert caught.value.reply is not None
            assert caught.value.reply.text == "Hi"
            assert caught.value.full is False
            assert len(server.asked) == 1

    run(body)


@pytest.mark.parametrize("end", [close_frame(1001), close_frame(1013), b""])
@pytest.mark.parametrize("reused", [False, True])
def test_a_close_after_response_created_is_not_tried_again(reused: bool, end: bytes) -> None:
    """The server has begun: it may have been paid for."""

    async def body() -> None:
        first = plays(*([FINE] if reused else []), created() + end, end=True)
        async with raw_server(first, fine) as server, spanwire.ConnectionManager(telemetry=None) as manager:
            if reused:
                await complete(manager, server)
            with pytest.raises(errors.ConnectionFailed) as caught:
                await complete(manager, server)
            assert caught.value.retryable is False
            assert len(server.asked) == 1 + reused

    run(body)


@pytest.mark.parametrize("end", [b"", close_frame(1001), close_frame(1013), close_frame(1000)])
def test_a_call_that_names_its_parent_is_not_sent_again_when_its_delivery_is_unknown(end: bytes) -> None:
    async def body() -> None:
        async with (
            raw_server(plays(FINE, end, end=True), fine) as server,
            spanwire.ConnectionManager(telemetry=None) as manager,
        ):
            await complete(manager, server)
            call = spanwire.Call.chat("m", [{"role": "user", "content": "next"}], previous_response_id="r1")
            with pytest.raises(errors.SpanwireError) as caught:
                await complete(manager, server, call, limits=spanwire.Limits(queue_timeout_s=2))
            assert caught.value.retryable is False
            assert len(server.asked) == 2
            assert len(server.peers) == 1

    run(body)


@pytest.mark.parametrize("code", ["previous_response_not_found", "websocket_connection_limit_reached"])
@pytest.mark.parametrize("kind", ["nested", "flat", "failed"])
def test_the_two_safe_errors_give_the_full_history_once_on_a_new_socket(code: str, kind: str) -> None:
    said = {
        "nested": error(code, status=400),
        "flat": event("error", code=code, message="gone"),
        "failed": event("response.failed", response={"status": "failed", "error": {"code": code, "message": "gone"}}),
    }[kind]

    async def body() -> None:
        async with (
            raw_server(plays(answer("Hello"), said), fine) as server,
            spanwire.ConnectionManager(telemetry=None) as manager,
        ):
            await complete(manager, server, spanwire.Call.chat("m", conversation("a")), retries=NEVER)
            call = spanwire.Call.chat("m", conversation("a", "Hello", "b"))
            reply = await complete(manager, server, call, retries=NEVER)
            assert reply.text == "Hello"
            assert reply.timeline is not None
            assert_adds_up(reply.timeline)
            assert len(reply.timeline.to_dict()["attempts"]) == 2
            second, third = server.asked[1:]
            assert second["previous_response_id"] == "r1"
            assert len(second["input"]) == 1
            assert "previous_response_id" not in third
            assert len(third["input"]) == 3
            assert [len(peer.asked) for peer in server.peers] == [2, 1]
            # and the conversation goes on from there
            call = spanwire.Call.chat("m", conversation("a", "Hello", "b", "Hello", "c"))
            await complete(manager, server, call, retries=NEVER)
            assert server.asked[3]["previous_response_id"] == "p1-1"

    run(body)


@pytest.mark.parametrize("code", ["previous_response_not_found", "websocket_connection_limit_reached"])
def test_a_server_that_says_so_for_ever_is_asked_twice(code: str) -> None:
    async def body() -> None:
        async with raw_server(plays(error(code, status=400))) as server:
            async with spanwire.ConnectionManager(telemetry=None) as manager:
                with pytest.raises(errors.ServerError) as caught:
                    await complete(manager, server)
                assert caught.value.code == code
            assert len(server.asked) == 2

    run(body)


def test_a_parent_of_the_callers_own_that_is_not_found_is_his_to_hear_of() -> None:
    async def body() -> None:
        async with raw_server(plays(error("previous_response_not_found", status=400)), fine) as server:
            async with spanwire.ConnectionManager(telemetry=None) as manager:
                call = spanwire.Call.chat("m", conversation("b"), previous_response_id="r0")
                with pytest.raises(errors.BadRequest) as caught:
                    await complete(manager, server, call)
                assert caught.value.code == "previous_response_not_found"
            assert len(server.asked) == 1

    run(body)


def test_a_socket_that_is_closed_after_an_error_event_fails_no_other_call() -> None:
    """``--strict`` mocks and LiteLLM: the error event of one call, and close 1008 as the next one is under way."""

    async def strict(peer: Peer) -> None:
        await peer.upgrade()
        await peer.request()
        await peer.send(error("no_match", status=404))
        await peer.request()
        await peer.send(close_frame(1008, "policy"))
        await peer.until_gone()

    async def body() -> None:
        async with raw_server(strict, fine) as server, spanwire.ConnectionManager(telemetry=None) as manager:
            with pytest.raises(errors.BadRequest):
                await complete(manager, server)
            assert (await complete(manager, server, retries=NEVER)).text == "Hello"
            assert len(server.peers) == 2

    run(body)


def test_an_error_event_in_an_answer_leaves_the_socket_for_the_next_one() -> None:
    async def body() -> None:
        async with (
            raw_server(plays(error("invalid_prompt", status=400), FINE)) as server,
            spanwire.ConnectionManager(telemetry=None) as manager,
        ):
            with pytest.raises(errors.BadRequest):
                await complete(manager, server)
            assert (await complete(manager, server)).text == "Hello"
            assert len(server.peers) == 1

    run(body)


def test_retry_after_of_an_error_event() -> None:
    said = event(
        "error", status=429, error={"type": "rate_limit_error", "message": "x", "headers": {"Retry-After": "60"}}
    )

    async def body() -> None:
        async with raw_server(plays(said)) as server, spanwire.ConnectionManager(telemetry=None) as manager:
            with pytest.raises(errors.RateLimited) as caught:
                await complete(manager, server)
            assert caught.value.retry_after_s == 60

    run(body)


# --- never another one's answer -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leave", ["early", "cancel", "timeout", "drop"])
def test_no_answer_is_shifted_after_an_interrupt(leave: str) -> None:
    """The abandoned answer goes on, as no event stops it: its socket takes no other call."""

    def script(request: Any) -> Script:
        more = " and" * 2000 if request.model == "first" else ""
        return Script.say(f"answer to {request.model}{more}", gap_s=0.02 if more else 0.0)

    with loopback(default=script) as server:
        endpoint = server.endpoint(
            retries=NEVER, timeouts=spanwire.Timeouts(total_s=0.05 if leave == "timeout" else None)
        )

        async def first(manager: spanwire.ConnectionManager) -> None:
            stream = manager.stream(endpoint, chat("first"))
            await stream.__aenter__()
            async for chunk in stream:
                if chunk.text and leave != "timeout":
                    break
            if leave == "early":
                await stream.__aexit__(None, None, None)
            elif leave == "cancel":
                await asyncio.Event().wait()

        async def body() -> None:
            async with spanwire.ConnectionManager(telemetry=None) as manager:
                task = asyncio.create_task(first(manager))
                if leave == "cancel":
                    await wait_for(server, lambda s: s.requests and s.requests[0].content_ns)
                    await asyncio.sleep(0.01)
                    task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                del task
                import gc

                gc.collect()
                endpoint2 = server.endpoint(retries=NEVER)
                replies = [await manager.complete(endpoint2, chat(f"m{n}")) for n in range(3)]
                assert [reply.text for reply in replies] == [f"answer to m{n}" for n in range(3)]
                await wait_for(server, lambda s: s.requests[0].left)

        run(body)
        assert server.requests[1].connection != server.requests[0].connection
        assert len({request.connection for request in server.requests[1:]}) == 1
        assert server.faults == []


def test_what_comes_while_nobody_has_asked_is_nobodys_answer() -> None:
    async def late(peer: Peer) -> None:
        await peer.upgrade()
        await peer.request()
        await peer.send(FINE)
        await peer.send(answer("stray", id="r9"))
        await peer.until_gone()

    async def body() -> None:
        async with raw_server(late, fine) as server, spanwire.ConnectionManager(telemetry=None) as manager:
            assert (await complete(manager, server)).text == "Hello"
            await asyncio.sleep(0.05)
            assert (await complete(manager, server)).text == "Hello"
            assert len(server.peers) == 2
            await asyncio.sleep(0)

    run(body)


def test_what_comes_in_the_same_read_as_the_end_of_an_answer_is_not_the_next_ones() -> None:
    async def body() -> None:
        async with (
            raw_server(plays(FINE + delta("stray")), fine) as server,
            spanwire.ConnectionManager(telemetry=None) as manager,
        ):
            endpoint = server.endpoint(retries=NEVER)
            replies = await asyncio.gather(*(manager.complete(endpoint, chat()) for _ in range(2)))
            replies.append(await manager.complete(endpoint, chat()))
            assert [reply.text for reply in replies] == ["Hello"] * 3

    run(body)


def test_a_second_response_in_the_middle_of_one_is_refused() -> None:
    async def body() -> None:
        async with (
            raw_server(plays(created("r1") + delta("a") + created("r2") + delta("b") + completed("b", "r2"))) as server,
            spanwire.ConnectionManager(telemetry=None) as manager,
        ):
            with pytest.raises(errors.ProtocolError) as caught:
                await complete(manager, server)
            assert "second response" in str(caught.value)

    run(body)


@pytest.mark.parametrize("begun", [False, True])
def test_leaving_tells_the_server(begun: bool) -> None:
    """There is no event to cancel with: it is told by the end of the socket, and in order."""
    seen: list[int | None] = []

    async def handler(peer: Peer) -> None:
        await peer.upgrade()
        await peer.request()
        if begun:
            await peer.send(created() + delta("Hi"))
        await peer.until_gone()
        seen.append(peer.closed)

    async def body() -> None:
        async with raw_server(handler) as server, spanwire.ConnectionManager(telemetry=None) as manager:
            async with manager.stream(server.endpoint(), chat()) as stream:
                if begun:
                    async for _ in stream:
                        break
            assert stream.timeline.outcome == "closed_by_caller"
            assert_adds_up(stream.timeline)

    run(body)
    assert seen == [1000]


# --- times --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shows", [True, False])
def test_the_servers_queue_prefill_and_decode(shows: bool) -> None:
    script = Script(tokens=["a", "b", "c"], queue_s=0.2, prefill_s=0.15, gap_s=0.05)
    with loopback(script, options={"shows_queue": shows}) as server:

        async def body() -> None:
            async with spanwire.ConnectionManager(telemetry=None) as manager:
                errors_s = []
                for _ in range(5):  # the best of several: this machine may be busy with something else
                    timeline = (await manager.complete(server.endpoint(), chat())).timeline
                    assert timeline is not None
                    assert_adds_up(timeline)
                    queue, model = timeline.segments["queue"], timeline.segments["model"]
                    assert queue.source == "estimated"
                    found = (queue.duration_s, *(model.parts[part].duration_s for part in ("prefill", "decode")))
                    errors_s.append(max(abs(mine - true) for mine, true in zip(found, (0.2, 0.15, 0.1), strict=True)))
                assert min(errors_s) < 0.03

        run(body)


def test_created_is_no_content() -> None:
    async def slow(peer: Peer) -> None:
        await peer.upgrade()
        await peer.request()
        await peer.send(created())
        await asyncio.sleep(0.1)
        await peer.send(delta(""))
        await asyncio.sleep(0.1)
        await peer.send(delta("Hello") + completed("Hello"))
        await peer.until_gone()

    async def body() -> None:
        async with raw_server(slow) as server, spanwire.ConnectionManager(telemetry=None) as manager:
            timeline = (await complete(manager, server)).timeline
            assert timeline is not None
            assert timeline.first_byte_s is not None
            assert timeline.first_content_s is not None
            assert timeline.first_content_s - timeline.first_byte_s > 0.19

    run(body)


def test_the_limit_for_the_first_content_is_not_met_by_events_without_any() -> None:
    async def slow(peer: Peer) -> None:
        await peer.upgrade()
        await peer.request()
        await peer.send(created())
        while True:
            await asyncio.sleep(0.02)
            await peer.send(event("response.in_progress", response={"id": "r1"}))

    async def body() -> None:
        async with raw_server(slow) as server, spanwire.ConnectionManager(telemetry=None) as manager:
            with pytest.raises(errors.CallTimeout) as caught:
                await complete(manager, server, retries=NEVER, timeouts=spanwire.Timeouts(first_content_s=0.2))
            assert caught.value.limit == "first_content_s"

    run(body)


def test_a_slow_reader_stops_the_server_and_loses_nothing() -> None:
    with loopback(Script(tokens=["x" * 100] * 200_000)) as server:

        async def body() -> None:
            async with spanwire.ConnectionManager(telemetry=None) as manager:
                options = {"ping_interval_s": 0.05, "ping_timeout_s": 0.1}
                async with manager.stream(server.endpoint(retries=NEVER, options=options), chat()) as stream:
                    count = 0
                    async for chunk in stream:
                        if chunk.text:
                            count += 1
                            if count == 1:
                                await asyncio.sleep(1.0)
                    assert count == 200_000
                assert stream.timeline.outcome == "completed"

        run(body)
        assert server.faults == []


# --- the request ----------------------------------------------------------------------------------------------------------


def test_fields_that_have_no_meaning_here_are_not_sent() -> None:
    async def body() -> None:
        async with raw_server(fine) as server, spanwire.ConnectionManager(telemetry=None) as manager:
            call = chat(background=False, stream_options={"include_usage": True})
            await complete(manager, server, call)
            asked = server.asked[0]
            assert asked["type"] == "response.create"
            assert asked["model"] == "m"
            assert not {"stream", "background", "stream_options", "messages"} & asked.keys()
            with pytest.raises(errors.ConfigurationError) as caught:
                await complete(manager, server, chat(background=True))
            assert "background" in str(caught.value)

    run(body)


@pytest.mark.parametrize("bad", [object(), float("nan"), "\ud800", {1, 2}])
def test_what_is_no_json_is_found_before_anything_is_sent(bad: Any) -> None:
    async def body() -> None:
        async with raw_server(fine) as server, spanwire.ConnectionManager(telemetry=None) as manager:
            for call in (
                chat(metadata={"x": bad}),
                spanwire.Call.chat("m", [{"role": "user", "content": "a", "x": bad}]),
            ):
                try:
                    await complete(manager, server, call)
                except errors.ConfigurationError:
                    continue
                assert isinstance(bad, (set, float)), "JSON has lists and null"
            for asked in server.asked:
                json.dumps(asked)
            assert (await complete(manager, server)).text == "Hello"

    run(body)


def test_a_large_request_goes_in_pieces_and_its_upload_is_counted() -> None:
    with loopback(hello(), options={"max_size": None}) as server:

        async def body() -> None:
            async with spanwire.ConnectionManager(telemetry=None) as manager:
                text = "x" * 8_000_000
                call = spanwire.Call.chat("m", [{"role": "user", "content": text}])
                reply = await manager.complete(server.endpoint(), call)
                assert reply.text == "Hello from the loopback server."
                assert reply.timeline is not None
                assert_adds_up(reply.timeline)
                assert "send" in reply.timeline.segments["network"].parts

        run(body)
        assert len(server.requests[0].raw) > 8_000_000


def test_a_large_request_that_the_server_refuses_by_its_size() -> None:
    with loopback(hello(), options={"max_size": 1_000_000}) as server:

        async def body() -> None:
            async with spanwire.ConnectionManager(telemetry=None) as manager:
                call = spanwire.Call.chat("m", [{"role": "user", "content": "x" * 8_000_000}])
                with pytest.raises(errors.MessageTooBig) as caught:
                    await manager.complete(server.endpoint(retries=AT_ONCE), call)
                assert "1009" in str(caught.value)
                assert caught.value.retryable is False

        run(body)
        assert server.connections == 1


def test_an_answer_in_the_middle_of_a_large_upload() -> None:
    """The server refuses before it has read all: the error is told at once."""

    async def early(peer: Peer) -> None:
        await peer.upgrade()
        await peer.reader.readexactly(100)
        await peer.send(error("invalid_prompt", status=400))
        while await peer.reader.read(65536):
            pass

    async def body() -> None:
        async with raw_server(early) as server, spanwire.ConnectionManager(telemetry=None) as manager:
            call = spanwire.Call.chat("m", [{"role": "user", "content": "x" * 8_000_000}])
            with pytest.raises(errors.BadRequest):
                await complete(manager, server, call)

    run(body)


# --- the other ways in ------------------------------------------------------------------------------------------------------


def test_the_synchronous_manager_and_its_threads() -> None:
    from concurrent.futures import ThreadPoolExecutor

    with loopback(default=lambda request: Script.say(f"to {request.model}")) as server:
        with spanwire.SyncConnectionManager(telemetry=None) as manager, ThreadPoolExecutor(8) as threads:
            endpoint = server.endpoint()
            found = [threads.submit(manager.complete, endpoint, chat(f"m{n}")) for n in range(64)]
            assert [one.result().text for one in found] == [f"to m{n}" for n in range(64)]
        server.wait_for(lambda s: s.open_connections == 0)
        assert server.connections <= 8
        assert server.faults == []


def test_two_loops_share_no_socket() -> None:
    with loopback(hello()) as server:
        manager = spanwire.ConnectionManager(telemetry=None)
        endpoint = server.endpoint()

        async def body() -> None:
            for _ in range(2):
                async with manager.stream(endpoint, chat()) as stream:
                    assert await read(stream) == "Hello from the loopback server."

        for _ in range(2):
            asyncio.run(body())
        asyncio.run(manager.aclose())
        server.wait_for(lambda s: s.open_connections == 0)
        assert [request.connection for request in server.requests] == [1, 1, 2, 2]
        assert server.faults == []


def test_a_message_of_the_wrong_lane_or_shape_does_not_break_the_answer() -> None:
    odd = frame('{"type": 7}') + frame('{"type": "response.output_text.delta"}') + frame('{"type": null, "x": 1}')

    async def body() -> None:
        async with (
            raw_server(plays(created() + odd + delta("Hello") + odd + completed("Hello"))) as server,
            spanwire.ConnectionManager(telemetry=None) as manager,
        ):
            assert (await complete(manager, server)).text == "Hello"

    run(body)


def test_a_server_with_much_to_say_before_it_is_asked_is_read_again() -> None:
    """More than a socket keeps for nobody: it is stopped then, and has to go on with the call."""

    async def body() -> None:
        async def talks(peer: Peer) -> None:
            await peer.upgrade(then=event("hello") * 100)
            await peer.request()
            await peer.send(FINE)
            await peer.until_gone()

        async with raw_server(talks) as server, spanwire.ConnectionManager(telemetry=None) as manager:
            timeouts = spanwire.Timeouts(first_content_s=5)
            reply = await manager.complete(server.endpoint(retries=NEVER, timeouts=timeouts), chat())
            assert reply.text == "Hello"

    run(body)


@pytest.mark.parametrize("late", [False, True])
def test_an_end_that_is_said_twice_is_not_the_next_answer(late: bool) -> None:
    """Some servers send ``response.done`` after ``response.completed``. It may come when the next call has begun."""

    async def body() -> None:
        async def twice(peer: Peer) -> None:
            await peer.upgrade()
            again = b""
            for number in range(4):
                await peer.request()
                one = answer(f"Hello {number}", id=f"r{number}")
                before, again = again, completed(f"Hello {number}", f"r{number}")
                await (peer.send(before + one) if late else peer.send(one + again))
            await peer.until_gone()

        async with raw_server(twice) as server, spanwire.ConnectionManager(telemetry=None) as manager:
            for number in range(4):
                reply = await manager.complete(server.endpoint(retries=NEVER), chat())
                assert reply.text == f"Hello {number}"
                assert reply.id == f"r{number}"
            assert len(server.peers) == 1

    run(body)


# --- what a server remembers of an answer ----------------------------------------------------------------------------


def output(*items: dict[str, Any], id: str) -> bytes:
    """An answer of which nothing came before its last event."""
    response = {"id": id, "model": "m", "status": "completed", "output": list(items)}
    return created(id) + event("response.completed", response=response)


def said(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def called(**fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "id": "fc_1", "name": "f", "arguments": "{}", **fields}


async def two_turns(server: RawServer, **first: Any) -> dict[str, Any]:
    """A turn, and the one that follows it with all of it in the form of chat. Gives the second request."""
    async with spanwire.ConnectionManager(telemetry=None) as manager:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
        reply = await manager.complete(server.endpoint(retries=NEVER), spanwire.Call.chat("m", messages, **first))
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in reply.tool_calls
        ]
        messages.append({"role": "assistant", "content": reply.text, **({"tool_calls": calls} if calls else {})})
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "b"} for call in reply.tool_calls]
        messages.append({"role": "user", "content": "c"})
        await manager.complete(server.endpoint(retries=NEVER), spanwire.Call.chat("m", messages))
    assert len(server.asked) == 2
    return server.asked[1]


@pytest.mark.parametrize(
    "first",
    [
        output(said("Hello"), id="r1"),
        output(called(call_id="x"), id="r1"),
        output(said("Hello"), called(call_id="x"), id="r1"),
        created("r1") + delta("Hel") + completed("Hello", "r1"),
    ],
    ids=["text", "call", "both", "rest"],
)
def test_an_answer_that_comes_with_its_last_event_is_continued(first: bytes) -> None:
    async def body() -> None:
        async with raw_server(plays(first, FINE)) as server:
            second = await two_turns(server)
            assert second["previous_response_id"] == "r1"
            assert second["input"][-1] == {"type": "message", "role": "user", "content": "c"}
            assert all(item["type"] != "function_call" for item in second["input"])

    run(body)


@pytest.mark.parametrize(
    "first",
    [
        output(called(), id="r1"),
        output(called(id=""), id="r1"),
        created("r1")
        + event("response.output_item.added", output_index=0, item=called(arguments=""))
        + event("response.output_item.done", output_index=0, item=called(call_id="x"))
        + event("response.completed", response={"id": "r1", "status": "completed", "output": [called(call_id="x")]}),
    ],
    ids=["the item's", "ours", "too late"],
)
def test_a_call_to_which_we_gave_an_id_is_sent_with_what_its_tool_says(first: bytes) -> None:
    """The server knows no call of that name: it gets both."""

    async def body() -> None:
        async with raw_server(plays(first, FINE)) as server:
            second = await two_turns(server)
            assert "previous_response_id" not in second
            call, said = second["input"][-3:-1]
            assert (call["type"], said["type"]) == ("function_call", "function_call_output")
            assert call["call_id"] == said["call_id"]

    run(body)


def test_a_conversation_that_the_server_keeps_is_not_mixed_with_what_a_socket_remembers() -> None:
    """``conversation`` and ``previous_response_id`` exclude each other, and it holds more than the call has said."""

    async def body() -> None:
        async with raw_server(fine) as server:
            second = await two_turns(server, conversation="conv_1")
            assert server.asked[0]["conversation"] == "conv_1"
            assert "previous_response_id" not in second
            assert len(second["input"]) == 3

    run(body)
