"""A call that the server has no room for, or wants elsewhere; and which idle connection it gets."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import spanwire
from spanwire import errors
from spanwire.manager import ConnectionManager
from spanwire.transport import Attempt
from tests.core.scripted import Scripted, Talk, Wire, endpoint
from tests.support import NEVER, assert_adds_up, chat, run


def refusal(retry_after_s: float | None = None, **flags: bool) -> errors.SpanwireError:
    error = errors.Overloaded("no room", status=503, retry_after_s=retry_after_s)
    for name in flags:
        setattr(error, name, True)
    return error


@asynccontextmanager
async def managed(wire: Wire, **more: Any) -> AsyncIterator[ConnectionManager]:
    async with ConnectionManager(plugins=[Scripted(wire)], telemetry=None, **more) as manager:
        yield manager


def outcomes(timeline: spanwire.Timeline | None) -> list[str]:
    assert timeline is not None
    return [attempt["outcome"] for attempt in timeline.to_dict()["attempts"]]


def parts(timeline: spanwire.Timeline | None, segment: str) -> dict[str, str]:
    """Part to source."""
    assert timeline is not None
    assert_adds_up(timeline)
    found = timeline.segments.get(segment)
    return {} if found is None else {name: part.source for name, part in found.parts.items()}


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


# --- again -------------------------------------------------------------------------------------------------------------


def test_a_call_that_the_server_wants_on_another_connection_is_sent_again_once_and_not_counted() -> None:
    wire = Wire()

    def play(talk: Talk) -> None:
        if len(wire.talks) == 3:
            talk.refuse(refusal(again=True), breaks=False)
        else:
            talk.answer()

    wire.play = play

    async def body() -> None:
        async with managed(wire) as manager:
            await manager.warm(endpoint(), 2)
            for _ in range(2):
                await manager.complete(endpoint(), chat())
            reply = await manager.complete(endpoint(retries=NEVER), chat())
            assert reply.text == "hello"
            assert outcomes(reply.timeline) == ["error", "completed"]
            assert wire.connects == 3, "a fresh one, although one was idle"
            assert wire.talks[3].connection is wire.lines[2]

    run(body)


@pytest.mark.parametrize(("stale", "tries"), [(True, 2), (False, 1)])
def test_a_second_time_is_a_failure_and_so_is_the_first_where_nothing_is_to_be_sent_again(
    stale: bool, tries: int
) -> None:
    wire = Wire()
    wire.play = lambda talk: talk.refuse(refusal(again=True))

    async def body() -> None:
        async with managed(wire) as manager:
            with pytest.raises(errors.Overloaded) as caught:
                await manager.complete(endpoint(retries=spanwire.Retries(max_attempts=1, stale=stale)), chat())
            assert outcomes(caught.value.timeline) == ["error"] * tries
            assert wire.connects == tries

    run(body)


def test_after_content_nothing_is_sent_again() -> None:
    wire = Wire()

    def play(talk: Talk) -> None:
        talk.say("a")
        talk.refuse(refusal(again=True, full=True))

    wire.play = play

    async def body() -> None:
        async with managed(wire) as manager:
            with pytest.raises(errors.Overloaded):
                await manager.complete(endpoint(limits=spanwire.Limits(queue_timeout_s=60)), chat())
            assert wire.connects == 1

    run(body)


# --- full --------------------------------------------------------------------------------------------------------------


def one_client() -> Wire:
    """A server that takes one client, and tells the second one after the handshake."""
    wire = Wire()

    def play(talk: Talk) -> None:
        others = [other for other in wire.talks if other is not talk and not other.left]
        if others:
            talk.refuse(refusal(full=True))
        elif talk.call.model == "quick":
            talk.answer()

    wire.play = play
    return wire


def test_a_call_that_is_refused_on_its_connection_waits_for_one_that_is_given_back() -> None:
    wire = one_client()

    async def body() -> None:
        async with managed(wire) as manager:
            slow = asyncio.create_task(manager.complete(endpoint(), chat("slow")))
            await until(lambda: wire.talks)
            quick = asyncio.create_task(manager.complete(endpoint(retries=NEVER), chat("quick")))
            (pool,) = manager.state().pools.values()
            await until(lambda: pool.state.waiters and len(wire.talks) == 2)
            wire.talks[0].answer()
            await slow
            reply = await quick
            assert reply.text == "hello"
            assert set(outcomes(reply.timeline)[:-1]) == {"error"}
            assert outcomes(reply.timeline)[-1] == "completed"
            assert parts(reply.timeline, "queue")["local"] == "measured"

    run(body)


def test_the_wait_of_all_attempts_together_is_bounded_by_the_first_asking() -> None:
    wire = Wire()
    wire.play = lambda talk: talk.refuse(refusal(full=True))
    limits = spanwire.Limits(queue_timeout_s=0.4)

    async def body() -> None:
        async with managed(wire) as manager:
            with pytest.raises((errors.QueueTimeout, errors.Overloaded)) as caught:
                await manager.complete(endpoint(limits=limits, retries=NEVER), chat())
            assert 2 <= wire.connects <= 8, "it asked again, and was in no hurry"
            timeline = caught.value.timeline
            assert set(outcomes(timeline)) == {"error"}
            assert parts(timeline, "queue")["local"] == "measured"
            for pool in manager.state().pools.values():
                assert not pool.state.waiters
                assert pool._looker is None

    run(body)


def test_a_server_that_names_a_longer_time_than_the_caller_has_is_not_asked_again() -> None:
    wire = Wire()
    wire.play = lambda talk: talk.refuse(refusal(3600, full=True))

    async def body() -> None:
        async with managed(wire) as manager:
            limits = spanwire.Limits(queue_timeout_s=0.05)
            with pytest.raises(
                errors.QueueTimeout, match=r"server is full.*Limits\.queue_timeout_s = 0\.05 s"
            ) as caught:
                await manager.complete(endpoint(limits=limits), chat())
            assert wire.connects == 1
            assert outcomes(caught.value.timeline) == ["error", "error"]
            assert parts(caught.value.timeline, "queue")["local"] == "measured"

    run(body)


def test_who_has_not_said_how_long_it_waits_and_has_nothing_to_wait_for_fails() -> None:
    wire = Wire()
    wire.play = lambda talk: talk.refuse(refusal(full=True))

    async def body() -> None:
        async with managed(wire) as manager:
            with pytest.raises(errors.Overloaded):
                await manager.complete(endpoint(retries=NEVER), chat())
            assert wire.connects == 1

    run(body)


def test_the_limit_on_the_whole_call_interrupts_the_wait_for_room() -> None:
    wire = one_client()

    async def body() -> None:
        async with managed(wire) as manager:
            slow = asyncio.create_task(manager.complete(endpoint(), chat("slow")))
            await until(lambda: wire.talks)
            timeouts = spanwire.Timeouts(total_s=0.1)
            with pytest.raises(errors.CallTimeout) as caught:
                await manager.complete(endpoint(timeouts=timeouts, retries=NEVER), chat("quick"))
            assert caught.value.limit == "total_s"
            assert "local" in parts(caught.value.timeline, "queue")
            (pool,) = manager.state().pools.values()
            assert not pool.state.waiters
            wire.talks[0].answer()
            await slow

    run(body)


def test_a_call_refused_in_the_handshake_waits_for_a_connection_and_has_one_attempt() -> None:
    wire = Wire()
    wire.play = lambda talk: talk.answer() if talk.call.model == "quick" else None

    async def no_room(number: int, attempt: Attempt) -> None:
        begin_ns = time.perf_counter_ns()
        attempt.marks.begin("upgrade", begin_ns)
        if number > 1:
            raise refusal(full=True)
        attempt.marks.end("upgrade", begin_ns + 1000)

    wire.on_connect = no_room

    async def body() -> None:
        async with managed(wire) as manager:
            slow = asyncio.create_task(manager.complete(endpoint(), chat("slow")))
            await until(lambda: wire.talks)
            quick = asyncio.create_task(manager.complete(endpoint(retries=NEVER), chat("quick")))
            await until(lambda: wire.connects == 2)
            wire.talks[0].answer()
            reply = await quick
            await slow
            assert outcomes(reply.timeline) == ["completed"]
            assert parts(reply.timeline, "queue") == {"local": "measured"}
            assert not parts(reply.timeline, "handshake")

    run(body)


def test_a_try_for_room_that_succeeds_is_queue_until_it_began_and_then_handshake() -> None:
    wire = Wire()

    async def no_room(number: int, attempt: Attempt) -> None:
        if number == 1:
            raise refusal(full=True)
        attempt.marks.begin("upgrade", time.perf_counter_ns())
        await asyncio.sleep(0.002)
        attempt.marks.end("upgrade", time.perf_counter_ns())

    wire.on_connect = no_room

    async def body() -> None:
        async with managed(wire) as manager:
            limits = spanwire.Limits(queue_timeout_s=60)
            reply = await manager.complete(endpoint(retries=NEVER, limits=limits), chat())
            assert outcomes(reply.timeline) == ["completed"]
            assert parts(reply.timeline, "queue") == {"local": "measured"}
            assert parts(reply.timeline, "handshake") == {"upgrade": "measured"}

    run(body)


@pytest.mark.parametrize("served", ["dialled", "rode"])
def test_a_handshake_that_the_server_lets_wait_is_its_queue(served: str) -> None:
    wire = Wire()
    go_on = asyncio.Event()

    async def slowly(number: int, attempt: Attempt) -> None:
        begin_ns = time.perf_counter_ns()
        await go_on.wait()
        middle_ns = begin_ns + (time.perf_counter_ns() - begin_ns) // 4
        attempt.marks.parts += [("upgrade", begin_ns, middle_ns), ("admission", middle_ns, time.perf_counter_ns())]

    wire.on_connect = slowly

    async def body() -> None:
        async with managed(wire) as manager:
            warm = asyncio.create_task(manager.warm(endpoint())) if served == "rode" else None
            await until(lambda: warm is None or wire.connects)
            call = asyncio.create_task(manager.complete(endpoint(), chat()))
            (await asyncio.sleep(0)) if warm else await until(lambda: wire.connects)
            await asyncio.sleep(0.02)  # the wait under test
            go_on.set()
            reply = await call
            if warm is not None:
                await warm
            assert wire.connects == 1
            assert parts(reply.timeline, "queue") == {"server": "estimated"}
            assert parts(reply.timeline, "handshake") == {("shared" if warm else "upgrade"): "measured"}

    run(body)


def test_a_loop_that_ends_while_a_call_waits_for_room_leaves_nothing() -> None:
    wire = one_client()
    kept: list[Any] = []

    async def body() -> None:
        manager = ConnectionManager(plugins=[Scripted(wire)], telemetry=None)
        slow = manager.stream(endpoint(), chat("slow"))
        await slow.__aenter__()
        waits = asyncio.create_task(manager.complete(endpoint(), chat("quick")))
        (pool,) = manager.state().pools.values()
        await until(lambda: pool._looker is not None)
        kept.extend([manager, pool, pool._looker, slow, waits])
        waits.cancel()

    asyncio.run(body())
    _, pool, timer, slow, waits = kept
    assert timer.cancelled()
    assert pool._looker is None
    assert not pool.state.waiters
    assert slow.timeline.outcome == "error"
    assert waits.cancelled()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_child_does_not_wait_with_its_parents_calls_and_they_go_on() -> None:
    code = """
    import asyncio, os
    from spanwire.manager import ConnectionManager
    from tests.core.scripted import Scripted, answers, endpoint
    from tests.core.test_run_full import one_client, until
    from tests.support import chat

    async def in_child(manager, wire):
        wire.play = answers
        assert (await manager.complete(endpoint(), chat("quick"))).text == "hello"
        (pool,) = manager.state().pools.values()
        assert (pool._looker, pool.state.full_until_ns, len(pool.state.waiters)) == (None, 0, 0)

    async def main():
        wire = one_client()
        async with ConnectionManager(plugins=[Scripted(wire)], telemetry=None) as manager:
            slow = asyncio.create_task(manager.complete(endpoint(), chat("slow")))
            await until(lambda: wire.talks)
            quick = asyncio.create_task(manager.complete(endpoint(), chat("quick")))
            (pool,) = manager.state().pools.values()
            await until(lambda: pool._looker is not None)
            child = os.fork()
            if child == 0:
                try:
                    asyncio.run(in_child(manager, wire))
                    os._exit(0)
                finally:
                    os._exit(1)
            assert os.waitpid(child, 0)[1] == 0
            wire.talks[0].answer()
            assert (await quick).text == (await slow).text == "hello"

    asyncio.run(main())
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert (done.returncode, done.stderr) == (0, "")


# --- prepare, suits ----------------------------------------------------------------------------------------------------


class Preparing(Wire):
    """Its connections remember calls."""

    def __init__(self) -> None:
        super().__init__()
        self.prepared: list[object] = []
        self.error: Exception | None = None

    def prepare(self, call: spanwire.Call, endpoint: spanwire.Endpoint, dialect: Any) -> object:
        assert dialect.name == "chatter"
        if self.error is not None:
            raise self.error
        self.prepared.append(object())
        return self.prepared[-1]


def test_what_was_prepared_is_handed_to_the_exchange_on_the_connection_that_suits_it() -> None:
    wire = Preparing()

    async def body() -> None:
        async with managed(wire) as manager:
            await manager.warm(endpoint(), 3)
            for line, worth in zip(wire.lines, (1, 2, 0), strict=True):
                line.worth = worth
            await manager.complete(endpoint(), chat())
            assert wire.talks[0].connection is wire.lines[1]
            assert wire.talks[0].attempt.prepared is wire.prepared[0]
            assert wire.connects == 3

    run(body)


@pytest.mark.parametrize("where", ["prepare", "suits"])
@pytest.mark.parametrize("known", [True, False])
def test_an_error_of_the_preparation_is_the_calls_and_leaves_no_slot(where: str, known: bool) -> None:
    wire = Preparing()
    raised: Exception = errors.ConfigurationError("no such message") if known else ZeroDivisionError("secret")
    limited = endpoint(limits=spanwire.Limits(max_concurrent=1))

    class Failing:
        def __call__(self, prepared: object) -> int:
            raise raised

    async def body() -> None:
        async with managed(wire) as manager:
            await manager.warm(limited, 2)
            if where == "prepare":
                wire.error = raised
            else:
                for line in wire.lines:
                    line.suits = Failing()  # type: ignore[method-assign]
            words = "no such message" if known else "failed with ZeroDivisionError"
            with pytest.raises(errors.SpanwireError, match=words) as caught:
                await manager.complete(limited, chat())
            assert "secret" not in str(caught.value)
            assert not caught.value.retryable
            assert outcomes(caught.value.timeline) == ["error"]
            assert "0 of 1 in use" in repr(manager._prepare(limited).slots)
            (pool,) = manager.state().pools.values()
            assert not any(member.leases for member in pool.state.members)

    run(body)
