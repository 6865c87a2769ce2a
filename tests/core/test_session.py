"""Sessions over a transport that the test plays: opening, sending, turns, and every way to end."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from opentelemetry import trace

import spanwire
from spanwire import errors
from spanwire.calls import Usage
from spanwire.manager import ConnectionManager
from spanwire.session import Session
from spanwire.transport import Attempt, Turn
from tests.core.scripted import Line, Scripted, Talk, Wire, endpoint
from tests.core.telemetry.heard import Heard, attributes, parent_id
from tests.support import NEVER, assert_adds_up, chat, run

LIMITED = {"limits": spanwire.Limits(max_concurrent=1)}


def nothing(talk: Talk) -> None:
    """The session stays open."""


def session_wire() -> Wire:
    wire = Wire()
    wire.play = nothing
    return wire


@asynccontextmanager
async def managed(wire: Wire, **more: Any) -> AsyncIterator[ConnectionManager]:
    more.setdefault("telemetry", None)
    async with ConnectionManager(plugins=[Scripted(wire)], **more) as manager:
        yield manager


def slots(manager: ConnectionManager, at: spanwire.Endpoint) -> str:
    return repr(manager._prepare_session(at).slots).partition(", ")[2]


async def events(session: Session) -> list[str]:
    return [event.type async for event in session]


# --- opening, sending, ending ------------------------------------------------------------------------------------------


def test_a_session_sends_and_reads_and_holds_its_slot_while_it_lasts() -> None:
    wire, at = session_wire(), endpoint(**LIMITED)

    async def body() -> None:
        async with managed(wire) as manager:
            async with manager.session(at) as session:
                (talk,) = wire.talks
                assert talk.call.operation == "session"
                assert slots(manager, at) == "1 of 1 in use, 0 waiting)"
                assert repr(session) == "<spanwire.Session open>"
                for message in ({"type": "a"}, "text", b"bytes"):
                    await session.send(message)
                assert talk.sent == [{"type": "a"}, "text", b"bytes"]
                talk.event("one")
                talk.event("two")
                assert (await anext(session)).type == "one"
                assert (await anext(session)).type == "two"
            assert talk.left
            assert slots(manager, at) == "0 of 1 in use, 0 waiting)"
            assert repr(session) == "<spanwire.Session ended>"
            assert session.timeline.outcome == "closed_by_caller"
            assert_adds_up(session.timeline)
            assert await events(session) == []
            assert repr(manager) == "ConnectionManager(0 connections, 0 calls)"

    run(body)


def test_the_slot_is_shared_with_calls() -> None:
    wire, at = session_wire(), endpoint(limits=spanwire.Limits(max_concurrent=1, queue_timeout_s=0.02))

    async def body() -> None:
        async with managed(wire) as manager:
            async with manager.session(at):
                with pytest.raises(errors.QueueTimeout, match="slot"):
                    await manager.complete(at, chat())

    run(body)


def test_before_it_is_entered_nothing_is_sent_and_using_it_is_a_mistake() -> None:
    wire = session_wire()

    async def body() -> None:
        async with managed(wire) as manager:
            session = manager.session(endpoint())
            assert repr(session) == "<spanwire.Session not entered>"
            with pytest.raises(RuntimeError, match="not entered"):
                await session.send("a")
            with pytest.raises(RuntimeError, match="not entered"):
                await anext(session)
            with pytest.raises(RuntimeError, match="not entered"):
                _ = session.timeline
            assert session.turns == []
            await session.aclose()
            assert wire.connects == 0
            async with session:
                with pytest.raises(RuntimeError, match="entered once"):
                    await session.__aenter__()

    run(body)


def test_sending_while_it_is_still_being_opened_is_a_mistake_too() -> None:
    wire = session_wire()
    go_on = asyncio.Event()

    async def slowly(number: int, attempt: Attempt) -> None:
        await go_on.wait()

    wire.on_connect = slowly

    async def body() -> None:
        async with managed(wire) as manager:
            session = manager.session(endpoint())
            opening = asyncio.create_task(session.__aenter__())
            while not wire.connects:
                await asyncio.sleep(0)
            with pytest.raises(RuntimeError, match="being opened"):
                await session.send("early")
            go_on.set()
            await opening
            await session.send("now")
            await session.aclose()

    run(body)


@pytest.mark.parametrize("way", ["left", "ended", "broke"])
def test_sending_after_its_end_says_that_it_has_ended(way: str) -> None:
    wire = session_wire()

    async def body() -> None:
        async with managed(wire) as manager:
            async with manager.session(endpoint(retries=NEVER)) as session:
                (talk,) = wire.talks
                if way == "left":
                    await session.aclose()
                elif way == "ended":
                    talk.finish()
                    assert await events(session) == []
                else:
                    talk.refuse(errors.ConnectionFailed("it broke"))
                    with pytest.raises(errors.ConnectionFailed, match="it broke"):
                        await events(session)
                with pytest.raises(
                    errors.ConnectionFailed, match="it broke" if way == "broke" else "session has ended"
                ) as caught:
                    await session.send("late")
                assert caught.value.endpoint == "host:1"
            assert talk.sent == []

    run(body)


def test_a_transport_that_fails_to_send_is_named() -> None:
    wire = session_wire()

    class Broken(Talk):
        async def send(self, message: Any) -> None:
            raise ZeroDivisionError("secret")

    wire.exchange = Broken

    async def body() -> None:
        async with managed(wire) as manager:
            async with manager.session(endpoint()) as session:
                with pytest.raises(errors.ConnectionFailed, match="failed with ZeroDivisionError") as caught:
                    await session.send("a")
                assert "secret" not in str(caught.value)
                assert isinstance(caught.value.__cause__, ZeroDivisionError)

    run(body)


def test_the_servers_clean_end_ends_the_iteration_after_what_it_had_sent() -> None:
    wire, at = session_wire(), endpoint(**LIMITED)

    async def body() -> None:
        async with managed(wire) as manager:
            async with manager.session(at) as session:
                (talk,) = wire.talks
                talk.event("last words")
                talk.finish()
                assert await events(session) == ["last words"]
                assert slots(manager, at) == "0 of 1 in use, 0 waiting)"
            assert session.timeline.outcome == "completed"
            assert_adds_up(session.timeline)

    run(body)


def test_a_session_that_breaks_is_not_made_again() -> None:
    wire, at = session_wire(), endpoint(**LIMITED)

    async def body() -> None:
        async with managed(wire) as manager:
            async with manager.session(at) as session:
                (talk,) = wire.talks
                talk.event("one")
                error = errors.ConnectionFailed("it broke")
                error.again = True
                talk.refuse(error)
                assert (await anext(session)).type == "one", "what came before the break is delivered first"
                with pytest.raises(errors.ConnectionFailed, match="it broke") as caught:
                    await anext(session)
                assert caught.value.timeline is session.timeline
            assert session.timeline.outcome == "error"
            assert wire.connects == 1
            assert slots(manager, at) == "0 of 1 in use, 0 waiting)"

    run(body)


def test_a_refused_opening_is_tried_again_and_one_that_is_full_waits() -> None:
    wire = session_wire()

    async def busy(number: int, attempt: Attempt) -> None:
        if number == 1:
            raise errors.Overloaded("later", status=503, retryable=True)
        if number == 2:
            error = errors.Overloaded("no room", status=503)
            error.full = True
            raise error

    wire.on_connect = busy

    async def body() -> None:
        async with managed(wire) as manager:
            at = endpoint(
                limits=spanwire.Limits(queue_timeout_s=60), retries=spanwire.Retries(max_attempts=2, base_s=0.0)
            )
            async with manager.session(at):
                assert wire.connects == 3

    run(body)


def test_each_session_has_a_connection_of_its_own_and_calls_have_others() -> None:
    wire = session_wire()

    async def body() -> None:
        async with managed(wire) as manager:
            await manager.warm(endpoint())
            for _ in range(2):
                async with manager.session(endpoint()):
                    pass
            async with manager.session(endpoint()), manager.session(endpoint()):
                pass
            assert wire.connects == 5
            assert len({id(talk.connection) for talk in wire.talks} | {id(wire.lines[0])}) == 5

    run(body)


def test_a_model_is_sent_in_the_address() -> None:
    wire = session_wire()

    async def body() -> None:
        async with managed(wire) as manager:
            at = endpoint(query={"a": "b"})
            async with manager.session(at, model="m-1"):
                assert wire.talks[0].attempt.endpoint.query == {"a": "b", "model": "m-1"}
                assert wire.talks[0].call.model == "m-1"
            with pytest.raises(errors.ConfigurationError, match="model"):
                manager.session(at, model="")

    run(body)


@pytest.mark.parametrize("given", [{"timeouts": 5}, {"retries": 5}])
def test_settings_are_checked_where_they_are_given(given: dict[str, Any]) -> None:
    async def body() -> None:
        async with managed(session_wire()) as manager:
            with pytest.raises(errors.ConfigurationError, match=f"{next(iter(given))}= must be"):
                manager.session(endpoint(), **given)

    run(body)


def test_a_dialect_of_calls_has_no_sessions_and_one_of_sessions_has_no_calls() -> None:
    async def body() -> None:
        async with managed(session_wire()) as manager:
            with pytest.raises(errors.ConfigurationError, match="'chatter' has no sessions"):
                manager.session(endpoint(dialect="chatter"))
            with pytest.raises(errors.ConfigurationError, match=r"use manager\.session"):
                manager.stream(endpoint(dialect="talk"), chat())

    run(body)


def test_silence_is_no_failure_but_the_whole_session_has_its_limit() -> None:
    wire = session_wire()

    async def body() -> None:
        async with managed(wire) as manager:
            timeouts = spanwire.Timeouts(first_content_s=0.01, idle_s=0.01, total_s=0.1)
            async with manager.session(endpoint(), timeouts=timeouts) as session:
                with pytest.raises(errors.CallTimeout) as caught:
                    await anext(session)
                assert caught.value.limit == "total_s"
            assert session.timeline.outcome == "timeout"

    run(body)


@pytest.mark.parametrize("way", ["aclose", "manager", "cancel"])
def test_ending_it_from_outside_ends_a_pending_read(way: str) -> None:
    wire, at = session_wire(), endpoint(**LIMITED)

    async def body() -> None:
        async with managed(wire) as manager:

            async def use() -> list[str]:
                async with manager.session(at) as session:
                    made.append(session)
                    return await events(session)

            made: list[Session] = []
            task = asyncio.create_task(use())
            while not made or made[0]._run is None or not made[0]._run._reading:
                await asyncio.sleep(0)
            if way == "aclose":
                await made[0].aclose()
                assert await task == []
            elif way == "manager":
                await manager.aclose()
                with pytest.raises(errors.ConnectionFailed, match="manager was closed"):
                    await task
            else:
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            outcome = {"aclose": "closed_by_caller", "manager": "error", "cancel": "cancelled"}[way]
            assert made[0].timeline.outcome == outcome
            assert wire.talks[0].left
            assert slots(manager, at) == "0 of 1 in use, 0 waiting)"

    run(body)


def test_a_session_that_is_dropped_is_noticed() -> None:
    wire, at = session_wire(), endpoint(**LIMITED)

    async def body() -> None:
        async with managed(wire) as manager:
            session = manager.session(at)
            await session.__aenter__()
            run_ = session._run
            assert run_ is not None
            del session
            gc.collect()
            while not run_.ended:
                await asyncio.sleep(0)
            assert run_.timeline.outcome == "abandoned"
            assert wire.talks[0].left
            assert slots(manager, at) == "0 of 1 in use, 0 waiting)"

    run(body)


@pytest.mark.parametrize("kind", ["no session", "no exchange"])
def test_a_transport_that_gives_no_session_is_named_and_leaves_nothing(kind: str) -> None:
    wire, at = session_wire(), endpoint(**LIMITED)

    class Mute:
        """An exchange that cannot send."""

        complete = False

        def __init__(self, connection: Line, call: spanwire.Call, attempt: Attempt) -> None:
            self.head = spanwire.transport.Head()
            self.attempt = attempt

        async def read(self) -> list[Any]:
            return []

        def abort(self, error: Any = None) -> None:
            self.attempt.released()

    wire.exchange = Mute if kind == "no session" else lambda *_: None
    words = "which is no SessionExchange" if kind == "no session" else "which is no Exchange"

    async def body() -> None:
        async with managed(wire) as manager:
            with pytest.raises(errors.ConnectionFailed, match=words):
                async with manager.session(at):
                    pass
            assert slots(manager, at) == "0 of 1 in use, 0 waiting)"
            assert repr(manager).endswith(" 0 calls)")

    run(body)


def test_what_comes_has_to_be_an_event() -> None:
    wire = session_wire()

    async def body() -> None:
        async with managed(wire) as manager:
            async with manager.session(endpoint()) as session:
                wire.talks[0].say("a chunk")
                with pytest.raises(errors.ConnectionFailed, match="gave Chunk where a SessionEvent was due"):
                    await anext(session)

    run(body)


# --- turns -------------------------------------------------------------------------------------------------------------


def turn_of(talk: Talk, *, error: errors.SpanwireError | None = None, text: bool = True) -> Turn:
    """A turn that has ended just now."""
    turn = Turn(time.perf_counter_ns())
    marks = turn.marks
    marks.sent_ns = turn.begin_ns
    now_ns = time.perf_counter_ns()
    marks.first_byte_ns = marks.first_chunk_ns = now_ns
    if text:
        marks.first_content_ns = now_ns
    marks.last_chunk_ns = marks.last_byte_ns = marks.ended_ns = time.perf_counter_ns()
    turn.end_ns = time.perf_counter_ns()
    turn.head.id, turn.head.model = "resp-1", "m-told"
    turn.head.usage = Usage(3, 4, 7)
    turn.finish_reason = "stop"
    if error is not None:
        turn.outcome, turn.error = "error", error
    assert talk.on_turn is not None
    talk.on_turn(turn)
    return turn


def test_each_turn_is_one_span_one_record_and_one_word_to_the_observers_and_the_session_is_none() -> None:
    wire, heard = session_wire(), Heard()
    plugin = Scripted(wire)

    async def body() -> None:
        async with ConnectionManager(plugins=[plugin], telemetry=heard.telemetry()) as manager:
            with heard.tracer.start_as_current_span("the opener"):
                session = manager.session(endpoint(), model="m-1")
                await session.__aenter__()
            with heard.tracer.start_as_current_span("somebody else"):
                turn_of(wire.talks[0])
            turn_of(wire.talks[0])
            await session.aclose()

        turns = heard.spans("chat m-1")
        opener = heard.one("the opener")
        assert len(turns) == 2
        for span in turns:
            assert parent_id(span) == opener.context.span_id
            assert span.kind is trace.SpanKind.CLIENT
            told = attributes(span)
            assert told["gen_ai.response.id"] == "resp-1"
            assert told["gen_ai.response.model"] == "m-told"
            assert told["gen_ai.usage.output_tokens"] == 4
            assert told["gen_ai.response.finish_reasons"] == ("stop",)
        assert [attributes(span)["spanwire.connection.reused"] for span in turns] == [False, True]
        names = {span.name for span in heard.spans()}
        assert not [name for name in names if "session" in name]
        (point,) = heard.metrics()["gen_ai.client.operation.duration"]
        assert point.count == 2
        assert len(plugin.seen) == 2
        assert [timeline.model for timeline in plugin.seen] == ["m-1", "m-1"]
        assert plugin.seen == session.turns
        for timeline in session.turns:
            assert_adds_up(timeline)
            assert timeline.outcome == "completed"
            assert timeline.transport == "scripted"

    run(body)


def test_a_turn_that_failed_says_so_and_the_session_goes_on() -> None:
    wire, heard = session_wire(), Heard()

    async def body() -> None:
        async with managed(wire, telemetry=heard.telemetry()) as manager:
            async with manager.session(endpoint()) as session:
                turn_of(wire.talks[0], error=errors.ServerError("no", code="bad"), text=False)
                wire.talks[0].event("still here")
                assert (await anext(session)).type == "still here"
            (timeline,) = session.turns
            assert (timeline.outcome, timeline.error_type) == ("error", "ServerError")
        span = heard.one("chat m-told")
        assert span.status.status_code is trace.StatusCode.ERROR
        assert parent_id(span) is None

    run(body)


def test_a_hundred_turns_are_kept() -> None:
    wire = session_wire()

    async def body() -> None:
        async with managed(wire) as manager:
            async with manager.session(endpoint()) as session:
                turns = [turn_of(wire.talks[0]) for _ in range(103)]
            kept = session.turns
            assert len(kept) == 100
            assert [timeline.total_s for timeline in kept] == [(t.end_ns - t.begin_ns) / 1e9 for t in turns[3:]]

    run(body)


def test_a_turn_that_ends_as_the_session_does_is_told_too() -> None:
    wire = session_wire()
    plugin = Scripted(wire)

    async def body() -> None:
        async with ConnectionManager(plugins=[plugin], telemetry=None) as manager:
            async with manager.session(endpoint()) as session:
                pass
            turn_of(wire.talks[0])
            assert len(session.turns) == len(plugin.seen) == 1
            assert_adds_up(session.turns[0])

    run(body)


def test_the_state_of_a_session_does_not_keep_its_handle_alive() -> None:
    wire = session_wire()

    async def body() -> None:
        async with managed(wire) as manager:
            async with manager.session(endpoint()) as session:
                talk = wire.talks[0]
                assert not [held for held in gc.get_referrers(session) if held is talk or held is session._run]

    run(body)
