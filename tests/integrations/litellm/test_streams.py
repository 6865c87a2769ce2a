"""Connections, loops, and calls that are left before their end."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import litellm
import litellm_spanwire
import pytest

import spanwire
from spanwire.testing import LoopbackServer, Script
from tests.integrations.litellm.support import ask, run, to
from tests.support import wait_for

TEXT = "You said: Say hello"
SLOW = Script.say("one two three", hang_after=2)


async def text_of(response: Any) -> str:
    return "".join([chunk.choices[0].delta.content or "" async for chunk in response])


def left_and_closed(server: LoopbackServer) -> bool:
    return server.requests[0].left and server.open_connections == 0


# --- re-use ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
def test_a_hundred_calls_on_one_connection(server: LoopbackServer, streamed: bool) -> None:
    async def body() -> None:
        for _ in range(100):
            made = await litellm.acompletion(**to(server), stream=streamed)
            assert (await text_of(made) if streamed else made.choices[0].message.content) == TEXT

    run(body)
    assert (len(server.requests), server.connections) == (100, 1)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_hundred_synchronous_calls_on_one_connection(server: LoopbackServer, streamed: bool) -> None:
    for _ in range(100):
        made = litellm.completion(**to(server), stream=streamed)
        if streamed:
            assert "".join(chunk.choices[0].delta.content or "" for chunk in made) == TEXT
    assert (len(server.requests), server.connections) == (100, 1)


def test_calls_at_once_from_many_threads(server: LoopbackServer) -> None:
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(ask("completion", to(server)).text)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == [TEXT] * 8


# --- loops ------------------------------------------------------------------------------------------------------------------


def test_one_loop_after_the_other(server: LoopbackServer) -> None:
    """Each closes the connections that were made on it."""
    for number in (1, 2):
        assert ask("acompletion", to(server)).text == TEXT
        assert ask("acompletion stream", to(server)).text == TEXT
        server.wait_for(lambda s: s.open_connections == 0)
        assert server.connections == 2 * number  # `ask` makes a loop for each call


@pytest.mark.parametrize("streamed", [False, True])
def test_a_synchronous_call_inside_a_running_loop(server: LoopbackServer, streamed: bool) -> None:
    async def body() -> str:
        made = litellm.completion(**to(server), stream=streamed)
        if streamed:
            return "".join(chunk.choices[0].delta.content or "" for chunk in made)
        text: str = made.choices[0].message.content
        return text

    assert run(body) == TEXT


def test_calls_on_one_loop_while_a_synchronous_one_runs_elsewhere(server: LoopbackServer) -> None:
    async def body() -> None:
        both = await asyncio.gather(
            asyncio.to_thread(litellm.completion, **to(server)), litellm.acompletion(**to(server))
        )
        assert [made.choices[0].message.content for made in both] == [TEXT, TEXT]

    run(body)


# --- leaving ----------------------------------------------------------------------------------------------------------------


def test_cancelling_a_stream(server: LoopbackServer) -> None:
    server.script(SLOW)

    async def body() -> None:
        reading = asyncio.Event()
        stream = await litellm.acompletion(**to(server), stream=True)

        async def read() -> None:
            async for _ in stream:
                reading.set()

        task = asyncio.create_task(read())
        await reading.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await wait_for(server, left_and_closed)  # while the stream is still held
        found = litellm_spanwire.report(stream)
        assert found is not None
        assert found["outcome"] == "cancelled"

    run(body)


def test_cancelling_a_whole_answer(server: LoopbackServer) -> None:
    server.script(Script(hang_after="request"))

    async def body() -> None:
        task = asyncio.create_task(litellm.acompletion(**to(server)))
        await wait_for(server, lambda s: s.requests)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await wait_for(server, left_and_closed)

    run(body)


def test_closing_a_stream(server: LoopbackServer) -> None:
    server.script(SLOW)

    async def body() -> None:
        stream = await litellm.acompletion(**to(server), stream=True)
        async for chunk in stream:
            assert litellm_spanwire.report(chunk) == {}
            break
        await stream.aclose()
        await wait_for(server, left_and_closed)
        found = litellm_spanwire.report(chunk)
        assert found is not None
        assert found["outcome"] == "closed_by_caller"
        assert [chunk async for chunk in stream] == []

    run(body)


def test_dropping_a_stream(server: LoopbackServer) -> None:
    server.script(SLOW)

    async def body() -> None:
        stream = await litellm.acompletion(**to(server), stream=True)
        async for _ in stream:
            break
        del stream, _
        gc.collect()
        await wait_for(server, left_and_closed)

    run(body)


def test_a_stream_that_nobody_reads_sends_nothing(server: LoopbackServer) -> None:
    async def body() -> None:
        stream = await litellm.acompletion(**to(server), stream=True)
        await stream.aclose()
        del stream
        assert await text_of(await litellm.acompletion(**to(server), stream=True)) == TEXT

    run(body)
    assert len(server.requests) == 1


def test_the_loop_ends_before_the_stream(server: LoopbackServer) -> None:
    server.script(SLOW)

    async def body() -> Any:
        stream = await litellm.acompletion(**to(server), stream=True)
        async for _ in stream:
            break
        return stream

    stream = run(body)
    server.wait_for(left_and_closed)
    del stream
    gc.collect()


@pytest.mark.parametrize("how", ["close", "with", "drop"])
def test_leaving_a_synchronous_stream(server: LoopbackServer, how: str) -> None:
    server.script(SLOW)
    stream = litellm.completion(**to(server), stream=True)
    found = litellm_spanwire.report(next(stream))
    assert found == {}
    if how == "close":
        stream.close()
    elif how == "with":
        with stream:
            pass
    else:
        del stream
        gc.collect()
    server.wait_for(left_and_closed)
    assert found.get("outcome") == (None if how == "drop" else "closed_by_caller")


def test_a_chunk_after_the_end(server: LoopbackServer) -> None:
    async def body() -> None:
        stream = await litellm.acompletion(**to(server), stream=True)
        assert await text_of(stream) == TEXT
        assert await text_of(stream) == ""
        await stream.aclose()

    run(body)
    stream = litellm.completion(**to(server), stream=True)
    assert len(list(stream)) > 1
    assert list(stream) == []
    stream.close()


def test_slots_come_back(server: LoopbackServer) -> None:
    """A limit of one call at once: whatever was left, or failed, holds it no longer."""
    limits = {"max_concurrent": 1, "max_queue": 0}
    given = to(server, spanwire={"proxy": None, "limits": limits})
    server.script(SLOW, times=1)
    server.script(Script(status=503), times=1)

    async def body() -> None:
        stream = await litellm.acompletion(**given, stream=True)
        async for _ in stream:
            break
        with pytest.raises(litellm.RateLimitError, match="max_queue"):
            await litellm.acompletion(**given)
        await stream.aclose()
        with pytest.raises(litellm.ServiceUnavailableError):
            await litellm.acompletion(**given)
        assert (await litellm.acompletion(**given)).choices[0].message.content == TEXT

    run(body)


def test_what_is_asked_of_a_manager_that_was_closed(server: LoopbackServer) -> None:
    async def body() -> None:
        async with spanwire.ConnectionManager() as manager:
            litellm_spanwire.register(manager)
            stream = await litellm.acompletion(**to(server), stream=True)
        assert await text_of(stream) == TEXT
        await manager.aclose()

    run(body)
