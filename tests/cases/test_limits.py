"""C19 to C21: slots and connections come back whatever is cancelled, over loops and threads; and the order of the queue."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import spanwire_sse.transport

import spanwire
from spanwire import errors
from spanwire.admission import slots_for
from spanwire.net.dial import dial as real_dial
from spanwire.testing import Script
from tests.cases.play import nothing_left
from tests.support import NEVER, assert_adds_up, chat, hello, read, run, serving, wait_for

Limits, Timeouts = spanwire.Limits, spanwire.Timeouts


def in_use(endpoint: spanwire.Endpoint) -> int:
    slots = slots_for(endpoint)
    assert slots is not None
    return len(slots._admission.holders)


def queued_s(timeline: spanwire.Timeline | None) -> float:
    assert timeline is not None
    assert_adds_up(timeline)
    queue = timeline.segments.get("queue")
    return queue.duration_s if queue is not None else 0.0


# --- C19 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("turns", range(4))
def test_a_waiting_call_that_is_cancelled_as_the_slot_comes_free(turns: int) -> None:
    """A is read to its end and, before the loop runs again (or some turns later), B's task is cancelled. C is admitted."""
    with serving(default=lambda _request: hello(close=True)) as server, nothing_left(server):
        endpoint = server.endpoint(retries=NEVER, limits=Limits(max_concurrent=1, queue_timeout_s=0.3))

        async def body() -> None:
            async with spanwire.ConnectionManager() as manager:
                async with manager.stream(endpoint, chat("a")) as stream:
                    waiting = asyncio.create_task(manager.complete(endpoint, chat("b")))
                    await asyncio.sleep(0.01)
                    assert not waiting.done()
                    await read(stream)
                    for _ in range(turns):
                        await asyncio.sleep(0)
                    waiting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await waiting
                assert (await manager.complete(endpoint, chat("c"))).text
                assert in_use(endpoint) == 0

        run(body)


def slow_dial(monkeypatch: pytest.MonkeyPatch, dice: random.Random) -> None:

    async def dial(*arguments: Any, **keywords: Any) -> Any:
        await asyncio.sleep(dice.random() * 0.004)
        made = await real_dial(*arguments, **keywords)
        try:
            await asyncio.sleep(dice.random() * 0.002)
        except asyncio.CancelledError:
            made.abort()
            raise
        return made

    monkeypatch.setattr(spanwire_sse.transport, "dial", dial)


@pytest.mark.parametrize("streamed", [True, False])
def test_a_thousand_random_cancels_leave_no_slot_and_no_connection_in_use(
    streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = random.Random(streamed)
    slow_dial(monkeypatch, dice)
    scripts = [hello(), hello(close=True), hello(gap_s=0.001), hello(end_s=0.002), Script(status=400)]
    with serving(default=lambda _request: dice.choice(scripts)) as server, nothing_left(server):
        endpoint = server.endpoint(retries=NEVER, limits=Limits(max_concurrent=4))

        async def call(manager: spanwire.ConnectionManager) -> None:
            with contextlib.suppress(errors.ServerError):
                if not streamed:
                    await manager.complete(endpoint, chat())
                    return
                async with manager.stream(endpoint, chat()) as stream:
                    async for _ in stream:
                        if dice.random() < 0.1:
                            break

        async def body() -> None:
            async with spanwire.ConnectionManager() as manager:
                live: set[asyncio.Task[None]] = set()
                for _ in range(1000):
                    task = asyncio.create_task(call(manager))
                    live.add(task)
                    task.add_done_callback(live.discard)
                    if dice.random() < 0.5:
                        await asyncio.sleep(dice.random() * 0.0015)
                    if live and dice.random() < 0.9:
                        dice.choice(list(live)).cancel()
                await asyncio.gather(*live, return_exceptions=True)
                assert in_use(endpoint) == 0
                (state,) = manager._states.values()
                assert not state.runs
                (pool,) = state.pools.values()
                assert not pool.state.waiters
                for _ in range(200):
                    if not any(member.leases for member in pool.state.members):
                        break
                    await asyncio.sleep(0.01)
                assert not any(member.leases for member in pool.state.members)
                # and no later call is refused
                now = server.endpoint(retries=NEVER, limits=Limits(max_concurrent=4, queue_timeout_s=1))
                replies = await asyncio.gather(
                    *(manager.complete(now, chat()) for _ in range(40)), return_exceptions=True
                )
                assert not [reply for reply in replies if isinstance(reply, errors.NoSlot)]

        run(body)


def test_cancels_at_every_turn_of_the_loop_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call, cancelled after 0, 1, 2, ... turns, with another one waiting behind it."""
    with serving(default=lambda _request: hello()) as server, nothing_left(server):
        endpoint = server.endpoint(retries=NEVER, limits=Limits(max_concurrent=1, queue_timeout_s=2))

        async def body() -> None:
            async with spanwire.ConnectionManager() as manager:
                for turns in range(40):
                    first = asyncio.create_task(manager.complete(endpoint, chat()))
                    second = asyncio.create_task(manager.complete(endpoint, chat()))
                    for _ in range(turns):
                        await asyncio.sleep(0)
                    first.cancel()
                    await asyncio.gather(first, return_exceptions=True)
                    assert (await second).text
                    assert in_use(endpoint) == 0

        run(body)


# --- C20 --------------------------------------------------------------------------------------------------------------


def test_one_manager_over_loops_and_threads() -> None:
    """asyncio.run three times; then four threads, each with its own, at once; then the facade; nothing is left open."""
    with serving(default=lambda _request: hello(prefill_s=0.01)) as server, nothing_left(server):
        endpoint = server.endpoint(retries=NEVER, limits=Limits(max_concurrent=3))
        manager = spanwire.ConnectionManager()

        async def ask() -> str:
            first = await manager.complete(endpoint, chat())
            async with manager.stream(endpoint, chat()) as stream:
                assert await read(stream) == first.text
            return first.text

        async def ask_and_drop() -> str:
            stream = manager.stream(endpoint, chat())
            await anext(stream)
            del stream  # with its slot
            return await ask()

        for _ in range(3):
            assert asyncio.run(ask())
        server.wait_for(lambda s: s.open_connections == 0)  # each loop closed its own
        with ThreadPoolExecutor(4) as threads:
            for body in (ask, ask_and_drop):
                assert all(threads.map(lambda _, body=body: asyncio.run(body()), range(4)))
        facade = spanwire.SyncConnectionManager(manager)
        with ThreadPoolExecutor(4) as threads:
            assert all(threads.map(lambda _: facade.complete(endpoint, chat()).text, range(8)))
        assert in_use(endpoint) == 0
        facade.close()
        assert not manager._states


def test_closing_from_one_loop_closes_what_another_one_holds() -> None:
    with serving(default=lambda _request: hello()) as server, nothing_left(server):
        manager = spanwire.ConnectionManager()
        endpoint = server.endpoint()
        ready, leave = threading.Event(), threading.Event()

        async def other() -> None:
            await manager.complete(endpoint, chat())
            ready.set()
            await asyncio.to_thread(leave.wait)

        thread = threading.Thread(target=lambda: asyncio.run(other()))
        thread.start()
        ready.wait(5)

        async def body() -> None:
            await manager.complete(endpoint, chat())
            await manager.aclose()
            await asyncio.to_thread(server.wait_for, lambda s: s.open_connections == 0)

        run(body)
        leave.set()
        thread.join(5)


# --- C21 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["stream", "complete"])
def test_the_wait_for_a_slot_is_queue_and_counts_against_no_other_limit(kind: str) -> None:
    """Five calls of 300 ms, two at once; the read limits are shorter than the wait for the last one."""
    slow = Script.say("a", prefill_s=0.3)
    with serving(default=lambda _request: slow) as server, nothing_left(server):
        endpoint = server.endpoint(
            retries=NEVER,
            limits=Limits(max_concurrent=2, queue_timeout_s=5),
            timeouts=Timeouts(first_content_s=0.55, idle_s=0.55),
        )

        async def body() -> None:
            async with spanwire.ConnectionManager() as manager:
                ended: list[str] = []

                async def call(n: int) -> spanwire.Timeline:
                    if kind == "complete":
                        timeline = (await manager.complete(endpoint, chat(f"m{n}"))).timeline
                    else:
                        async with manager.stream(endpoint, chat(f"m{n}")) as stream:
                            await read(stream)
                        timeline = stream.timeline
                    ended.append(f"m{n}")
                    assert timeline is not None
                    return timeline

                begin = time.perf_counter()
                timelines = await asyncio.gather(*(call(n) for n in range(5)))
                assert 0.9 <= time.perf_counter() - begin < 1.45  # 1.5: one after the other
                assert [request.model for request in server.requests] == [f"m{n}" for n in range(5)]
                assert ended == [f"m{n}" for n in range(5)]
                for timeline, least, most in zip(
                    timelines, (0, 0, 0.28, 0.28, 0.58), (0.1, 0.1, 0.5, 0.5, 0.9), strict=True
                ):
                    assert least <= queued_s(timeline) <= most
                    assert timeline.segments["model"].duration_s < 0.5
                    handshake = timeline.segments.get("handshake")
                    assert handshake is None or handshake.duration_s < 0.2
                # second: three that wait are cancelled, and one more is admitted as soon as there is room
                holders = [asyncio.create_task(call(n)) for n in range(2)]
                await asyncio.sleep(0.02)
                waiting = [asyncio.create_task(call(n)) for n in range(3)]
                await asyncio.sleep(0.02)
                for task in waiting:
                    task.cancel()
                await asyncio.gather(*waiting, return_exceptions=True)
                await asyncio.gather(*holders)
                assert queued_s(await call(9)) < 0.1

        run(body)


def test_the_facade_keeps_the_same_order() -> None:
    slow = Script.say("a", prefill_s=0.1)
    with serving(default=lambda _request: slow) as server, nothing_left(server):
        endpoint = server.endpoint(
            retries=NEVER, limits=Limits(max_concurrent=2), timeouts=Timeouts(first_content_s=0.18)
        )
        with spanwire.SyncConnectionManager() as manager, ThreadPoolExecutor(6) as threads:
            waits = []
            for n in range(6):
                waits.append(threads.submit(manager.complete, endpoint, chat(f"m{n}")))
                time.sleep(0.005)
            found = [queued_s(wait.result().timeline) for wait in waits]
        assert [request.model for request in server.requests] == [f"m{n}" for n in range(6)]
    assert max(found[:2]) < 0.05 < min(found[2:])
    assert min(found[4:]) >= 0.15


def test_a_call_inside_another_ones_loop_is_refused_in_time_and_the_outer_one_goes_on() -> None:
    with serving(default=lambda _request: hello(gap_s=0.001)) as server, nothing_left(server):
        endpoint = server.endpoint(retries=NEVER, limits=Limits(max_concurrent=1, queue_timeout_s=0.1))

        def refused(error: errors.QueueTimeout, waited_s: float) -> None:
            assert error.phase == "queue"
            assert waited_s >= 0.1
            assert "queue_timeout_s" in str(error)
            assert "max_concurrent" in str(error)
            assert "outer for 0." in str(error)
            assert queued_s(error.timeline) >= 0.1

        async def body() -> None:
            async with spanwire.ConnectionManager() as manager:
                text = ""
                async with manager.stream(endpoint, chat("outer")) as stream:
                    async for chunk in stream:
                        if chunk.text and not text:
                            begin = time.perf_counter()
                            with pytest.raises(errors.QueueTimeout) as caught:
                                await manager.complete(endpoint, chat("inner"))
                            refused(caught.value, time.perf_counter() - begin)
                        text += chunk.text
                assert text == "Hello from the loopback server."
                assert stream.timeline.outcome == "completed"
                assert (await manager.complete(endpoint, chat())).text

        run(body)
        with spanwire.SyncConnectionManager() as manager:
            text = ""
            with manager.stream(endpoint, chat("outer")) as stream:
                for chunk in stream:
                    if chunk.text and not text:
                        begin = time.perf_counter()
                        with pytest.raises(errors.QueueTimeout) as caught:
                            manager.complete(endpoint, chat("inner"))
                        refused(caught.value, time.perf_counter() - begin)
                    text += chunk.text
            assert text == "Hello from the loopback server."
            assert manager.complete(endpoint, chat()).text


def test_a_retry_waits_for_its_slot_again_and_holds_none_while_it_waits() -> None:
    """The back-off of one call is time for another one."""
    again = Script(status=429, headers={"retry-after-ms": "1000"})
    with serving(default=lambda request: hello()) as server, nothing_left(server):
        server.script(again, model="a", times=1)
        endpoint = server.endpoint(
            retries=spanwire.Retries(base_s=0), limits=Limits(max_concurrent=1, queue_timeout_s=0.5)
        )

        async def body() -> None:
            async with spanwire.ConnectionManager() as manager:
                first = asyncio.create_task(manager.complete(endpoint, chat("a")))
                await wait_for(server, lambda s: s.requests and s.requests[0].ended)
                while in_use(endpoint):
                    await asyncio.sleep(0.001)
                assert not first.done()
                assert (await manager.complete(endpoint, chat("b"))).text
                assert not first.done()
                assert (await first).text

        run(body)
