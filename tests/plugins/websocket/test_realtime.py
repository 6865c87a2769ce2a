"""The realtime dialect: what a client sends, what comes, and its turns, on the loopback server and on paper."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry.trace import StatusCode
from spanwire_websocket import realtime
from spanwire_websocket.realtime import Playback, RealtimeSchema

import spanwire
from spanwire import errors
from spanwire.calls import SessionEvent, Usage
from spanwire.manager import ConnectionManager
from spanwire.session import Session
from spanwire.testing import LoopbackServer, Script, ScriptedTool
from spanwire.transport import Turn
from tests.core.telemetry.heard import Heard, attributes, parent_id
from tests.plugins.websocket.session_server import nothing_is_left, until
from tests.support import assert_adds_up, run, serving

BYTES_PER_MS = 48


def silence(ms: int) -> bytes:
    return bytes(BYTES_PER_MS * ms)


def sound(ms: int, seed: int = 0) -> bytes:
    """Loud, and nowhere the same: what comes back can be told from what does not."""
    samples = ((seed * 7919 + number * 31) % 20_000 + 2000 for number in range(24 * ms))
    return b"".join(sample.to_bytes(2, "little", signed=True) for sample in samples)


def update(**session: Any) -> dict[str, Any]:
    return {"type": "session.update", "session": session}


NO_DETECTION = update(audio={"input": {"turn_detection": None}})
TEXT = {"output_modalities": ["text"]}


async def until_event(session: Session, *names: str) -> list[SessionEvent]:
    """Everything up to the first event of one of these types."""
    events = []
    async for event in session:
        events.append(event)
        if event.type in names:
            return events
    raise AssertionError(f"the session ended before {names}; it had {[event.type for event in events]}")


def text_of(events: Sequence[SessionEvent]) -> str:
    return "".join(event.text for event in events)


def audio_of(events: Sequence[SessionEvent]) -> bytes:
    return b"".join(event.audio for event in events)


def in_a_session(
    body: Callable[[Session, LoopbackServer], Any], *scripts: Script, observed: list[spanwire.Timeline] | None = None
) -> None:
    """Run it in one session on a server with these scripts; nothing may be left."""

    class Plugin:
        @spanwire.hookimpl
        def register_observers(self) -> list[Plugin]:
            return [self]

        def call_ended(self, timeline: spanwire.Timeline) -> None:
            if observed is not None:
                observed.append(timeline)

    with serving(*scripts, part="websocket") as server:

        async def main() -> None:
            async with ConnectionManager(plugins=[Plugin()]) as manager:
                async with manager.session(server.endpoint(), model="rt") as session:
                    assert (await anext(session)).type == "session.created"
                    await body(session, server)
                await nothing_is_left(manager)

        run(main)


# --- turns over the wire ----------------------------------------------------------------------------------------------


def test_a_turn_in_text() -> None:
    observed: list[spanwire.Timeline] = []

    async def body(session: Session, server: LoopbackServer) -> None:
        await session.send(realtime.user_text("hi"))
        await session.send(realtime.create_response(**TEXT))
        events = await until_event(session, "response.done")
        assert text_of(events) == "Hello there."
        (turn,) = session.turns
        assert observed == [turn]
        assert (turn.outcome, turn.model, turn.operation) == ("completed", "rt", "chat")
        assert_adds_up(turn)
        assert {"prefill", "decode"} == set(turn.segments["model"].parts)
        assert turn.segments["model"].source == "estimated"
        assert turn.segments["network"].parts["to_and_back"].duration_s <= (turn.first_byte_s or 0)
        assert 0 < (turn.first_byte_s or 0) < (turn.first_content_s or 0) <= turn.total_s
        usage = turn.to_dict()["usage"]
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        assert server.requests[0].query == "model=rt"

    in_a_session(body, Script.say("Hello there.", prefill_s=0.05, gap_s=0.02), observed=observed)


def test_a_turn_in_audio() -> None:
    """What was said comes back, whole and in order, with its transcript."""

    async def body(session: Session, _: LoopbackServer) -> None:
        await session.send(NO_DETECTION)
        said = sound(330)
        for frame in realtime.frames(said):
            await session.send(realtime.append_audio(frame))
        await session.send(realtime.commit_audio())
        await session.send(realtime.create_response())
        events = await until_event(session, "response.done")
        assert audio_of(events) == said
        assert text_of(events) == "I heard you."
        assert [turn.outcome for turn in session.turns] == ["completed"]

    in_a_session(body, Script.say("I heard you."))


def test_a_server_that_detects_turns_begins_them() -> None:
    """It heard the user's end, one way ago, and answers one way late: no round trip is in such a turn."""

    async def body(session: Session, _: LoopbackServer) -> None:
        said = sound(200) + silence(600)
        for frame in realtime.frames(said):
            await session.send(realtime.append_audio(frame))
        events = await until_event(session, "response.done")
        names = [event.type for event in events]
        order = ["speech_started", "speech_stopped", "committed"]
        assert [name.removeprefix("input_audio_buffer.") for name in names if name.startswith("input_")] == order
        (turn,) = session.turns
        assert turn.outcome == "completed"
        assert "to_and_back" not in getattr(turn.segments.get("network"), "parts", {})
        assert_adds_up(turn)
        # The next one is asked for, and has one.
        await session.send(realtime.create_response(**TEXT))
        await until_event(session, "response.done")
        assert "to_and_back" in session.turns[1].segments["network"].parts

    in_a_session(body, Script.say("yes", prefill_s=0.02))


def test_barge_in_cancels_and_tells_what_was_heard() -> None:
    async def body(session: Session, server: LoopbackServer) -> None:
        await session.send(NO_DETECTION)
        await session.send(realtime.append_audio(sound(1000)))
        await session.send(realtime.commit_audio())
        await session.send(realtime.create_response())
        playback = Playback()
        heard = 0
        async for event in session:
            playback.received(event)
            if event.audio:
                heard += 1
                if heard == 3:
                    break
        playback.played(150 * BYTES_PER_MS)
        messages = playback.interrupt()
        assert [message["type"] for message in messages] == ["response.cancel", "conversation.item.truncate"]
        for message in messages:
            await session.send(message)
        events = await until_event(session, "conversation.item.truncated")
        assert events[-1].data["audio_end_ms"] == 150
        assert "error" not in {event.type for event in events}
        (turn,) = session.turns
        assert (turn.outcome, len(session.turns)) == ("cancelled", 1)
        assert_adds_up(turn)
        assert server.requests[0].left
        # The session goes on.
        await session.send(realtime.create_response(**TEXT))
        assert text_of(await until_event(session, "response.done")) == "and on"
        assert [turn.outcome for turn in session.turns] == ["cancelled", "completed"]

    in_a_session(body, Script(tokens=list("0123456789"), hang_after=5), Script.say("and on"))


def test_speaking_while_a_server_with_detection_answers() -> None:
    async def body(session: Session, _: LoopbackServer) -> None:
        await session.send(realtime.append_audio(sound(400) + silence(600)))
        playback = Playback()
        truncated = False
        async for event in session:
            playback.received(event)
            if event.audio:
                playback.played(len(event.audio) // 2)
                await session.send(realtime.append_audio(sound(100)))
            if event.type == "input_audio_buffer.speech_started":
                for message in playback.interrupt(server_cancels=True):
                    assert message["type"] == "conversation.item.truncate"
                    await session.send(message)
            assert event.type != "error"
            if event.type == "conversation.item.truncated":
                truncated = True
            if truncated and session.turns:
                break
        assert [turn.outcome for turn in session.turns] == ["cancelled"]

    in_a_session(body, Script(tokens=list("0123456789"), hang_after=2), Script.say("and on"))


def test_a_response_that_fails_is_its_turns_error_alone() -> None:
    async def body(session: Session, _: LoopbackServer) -> None:
        for _turn in range(2):
            await session.send(realtime.create_response(**TEXT))
            await until_event(session, "response.done")
        failed, well = session.turns
        assert (failed.outcome, failed.error_type) == ("error", "ServerError")
        assert (well.outcome, well.error_type) == ("completed", None)
        assert_adds_up(failed)

    in_a_session(body, Script(status=500), Script.say("well"))


def test_error_events_end_neither_session_nor_turns() -> None:
    async def body(session: Session, _: LoopbackServer) -> None:
        await session.send({"type": "no.such.event"})
        assert (await until_event(session, "error"))[-1].data["error"]["code"] == "invalid_value"
        # One that is about something else than the turn that was asked for meanwhile.
        await session.send(realtime.cancel())
        await session.send(realtime.create_response(**TEXT))
        await until_event(session, "response.done")
        assert [turn.outcome for turn in session.turns] == ["completed"]

    in_a_session(body, Script.say("well", prefill_s=0.02))


def test_asking_twice_is_a_turn_that_was_refused() -> None:
    async def body(session: Session, _: LoopbackServer) -> None:
        await session.send(realtime.create_response(**TEXT))
        await until_event(session, "response.created")
        await session.send(realtime.create_response(**TEXT))
        await until_event(session, "error")
        await session.send(realtime.cancel())
        await until_event(session, "response.done")
        begin_s = time.perf_counter()
        await session.send(realtime.create_response(**TEXT))
        await until_event(session, "response.done")
        took_s = time.perf_counter() - begin_s
        refused, cancelled, well = session.turns
        assert [turn.outcome for turn in session.turns] == ["error", "cancelled", "completed"]
        assert refused.error_type == "BadRequest"
        assert well.total_s <= took_s  # it is counted from its own asking, not from that of the refused one
        assert cancelled.first_byte_s is not None

    in_a_session(body, Script(tokens=["a", "b"], hang_after=1), Script.say("well"))


def test_function_calls_and_cut_answers() -> None:
    async def body(session: Session, _: LoopbackServer) -> None:
        await session.send(realtime.create_response(**TEXT))
        events = await until_event(session, "response.done")
        assert text_of(events) == '{"city":"Oslo"}'
        done = next(event for event in events if event.type == "response.function_call_arguments.done")
        assert done.data["name"] == "weather"
        output = {"type": "function_call_output", "call_id": done.data["call_id"], "output": "rain"}
        await session.send({"type": "conversation.item.create", "item": output})
        await session.send(realtime.create_response(**TEXT))
        assert text_of(await until_event(session, "response.done")) == "Rain."
        assert [turn.outcome for turn in session.turns] == ["completed", "completed"]

    tool = ScriptedTool("weather", ['{"city":', '"Oslo"}'])
    in_a_session(body, Script(tool_calls=[tool]), Script.say("Rain."))


def test_many_turns_share_their_connection() -> None:
    async def body(session: Session, server: LoopbackServer) -> None:
        for number in range(102):
            await session.send(realtime.create_response(**TEXT))
            await until_event(session, "response.done")
            assert len(session.turns) == min(number + 1, 100)
        assert len({turn.connection.id for turn in session.turns if turn.connection}) == 1
        assert all(turn.connection is not None and turn.connection.reused for turn in session.turns)
        assert server.connections == 1

    in_a_session(body, Script.say("again"))


# --- how turns end with their session ---------------------------------------------------------------------------------


def ended_turns(
    leave: Callable[[ConnectionManager, Session, LoopbackServer], Any],
    *,
    ask: int = 1,
    timeouts: spanwire.Timeouts | None = None,
    **script: Any,
) -> list[spanwire.Timeline]:
    """The turns of a session that ends while an answer is being made."""
    with serving(Script(tokens=["a", "b", "c"], **script), part="websocket") as server:

        async def main() -> list[spanwire.Timeline]:
            manager = ConnectionManager()
            session = manager.session(server.endpoint(), model="rt", timeouts=timeouts)
            try:
                async with session:
                    for _ in range(ask):
                        await session.send(realtime.create_response(**TEXT))
                    if "hang_after" in script and script["hang_after"] != "request":
                        await until_event(session, "response.output_text.delta")
                    await leave(manager, session, server)
            except errors.SpanwireError:
                pass
            turns = session.turns
            await manager.aclose()
            assert session.turns == turns
            return turns

        return run(main)


async def read_on(_manager: ConnectionManager, session: Session, _server: LoopbackServer) -> None:
    async for _ in session:
        pass


async def go(_manager: ConnectionManager, session: Session, _server: LoopbackServer) -> None:
    """Leave the block."""


async def close_manager(manager: ConnectionManager, session: Session, _server: LoopbackServer) -> None:
    await manager.aclose()


@pytest.mark.parametrize(
    ("leave", "more", "outcome", "error_type"),
    [
        (read_on, {"drop_after": 2, "drop_mode": 1000}, "error", "Truncated"),
        (read_on, {"drop_after": 2, "drop_mode": 1011}, "error", "ConnectionFailed"),
        (read_on, {"drop_after": 2, "drop_mode": "reset"}, "error", "ConnectionFailed"),
        (read_on, {"drop_after": "request", "drop_mode": 1001}, "error", "ConnectionFailed"),
        (read_on, {"hang_after": 2, "timeouts": spanwire.Timeouts(total_s=0.2)}, "timeout", "CallTimeout"),
        (read_on, {"hang_after": "request", "timeouts": spanwire.Timeouts(total_s=0.2)}, "timeout", "CallTimeout"),
        (go, {"hang_after": 2}, "closed_by_caller", None),
        (go, {"hang_after": "request"}, "closed_by_caller", None),
        (close_manager, {"hang_after": 2}, "error", "ConnectionFailed"),
    ],
)
def test_a_turn_ends_with_its_session(
    leave: Callable[[ConnectionManager, Session, LoopbackServer], Any],
    more: dict[str, Any],
    outcome: str,
    error_type: str | None,
) -> None:
    (turn,) = ended_turns(leave, **more)
    assert (turn.outcome, turn.error_type) == (outcome, error_type)
    assert turn.connection is not None
    assert turn.connection.protocol == "websocket"
    assert_adds_up(turn)


def test_a_turn_ends_as_cancelled_with_whoever_reads() -> None:
    with serving(Script(tokens=["a", "b"], hang_after=2), part="websocket") as server:

        async def main() -> None:
            async with ConnectionManager() as manager:
                session = manager.session(server.endpoint(), model="rt")

                async def use() -> None:
                    async with session:
                        await session.send(realtime.create_response(**TEXT))
                        await read_on(manager, session, server)

                task = asyncio.ensure_future(use())
                await until(lambda: server.requests and server.requests[0].content_ns)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert [turn.outcome for turn in session.turns] == ["cancelled"]

        run(main)


def test_the_turn_of_a_session_that_is_dropped() -> None:
    heard: list[spanwire.Timeline] = []

    class Plugin:
        @spanwire.hookimpl
        def register_observers(self) -> list[Plugin]:
            return [self]

        def call_ended(self, timeline: spanwire.Timeline) -> None:
            heard.append(timeline)

    with serving(Script(tokens=["a", "b"], hang_after=2), part="websocket") as server:

        async def main() -> None:
            async with ConnectionManager(plugins=[Plugin()]) as manager:
                session = manager.session(server.endpoint(), model="rt")
                await session.__aenter__()
                await session.send(realtime.create_response(**TEXT))
                await until_event(session, "response.output_text.delta")
                del session
                gc.collect()
                await until(lambda: heard)
                assert [timeline.outcome for timeline in heard] == ["abandoned"]
                assert_adds_up(heard[0])
                await nothing_is_left(manager)

        run(main)


# --- spans and metrics ------------------------------------------------------------------------------------------------


def test_a_span_for_each_turn_and_none_for_the_session(heard: Heard) -> None:
    scripts = [Script.say("one"), Script(status=500), Script(tokens=["x", "y"], hang_after=2)]
    with serving(*scripts, part="websocket") as server:

        async def main() -> None:
            async with ConnectionManager(telemetry=heard.telemetry(detail="full")) as manager:
                with heard.tracer.start_as_current_span("conversation"):
                    session = manager.session(server.endpoint(), model="rt")
                    await session.__aenter__()
                with heard.tracer.start_as_current_span("elsewhere"):
                    for end in ("response.done", "response.done", "response.output_text.delta"):
                        await session.send(realtime.create_response(**TEXT))
                        await until_event(session, end)
                    await session.send(realtime.cancel())
                    await until_event(session, "response.done")
                    await session.aclose()

        run(main)
    conversation = heard.one("conversation")
    turns = heard.spans("chat rt")
    assert conversation.context is not None
    assert [attributes(span)["spanwire.outcome"] for span in turns] == ["completed", "error", "cancelled"]
    assert {parent_id(span) for span in turns} == {conversation.context.span_id}
    assert [span.status.status_code for span in turns][1] is StatusCode.ERROR
    assert not [span for span in heard.spans() if "session" in span.name]
    setup = heard.one("spanwire.connection_setup")
    assert setup.context is not None
    for span in turns:
        assert [link.context.span_id for link in span.links] == [setup.context.span_id]
        found = attributes(span)
        total = sum(
            value
            for name, value in found.items()
            if name.startswith("spanwire.segment.") and name.endswith(".duration") and name.count(".") == 3
        )
        assert abs(total - ((span.end_time or 0) - (span.start_time or 0)) / 1e9) < 1e-3
    assert attributes(turns[0])["gen_ai.usage.output_tokens"] == 1
    assert list(attributes(turns[0])["gen_ai.response.finish_reasons"]) == ["stop"]
    metrics = heard.metrics()
    assert sum(point.count for point in metrics["gen_ai.client.operation.duration"]) == 3


# --- the schema on paper ----------------------------------------------------------------------------------------------


class Played:
    """A schema, and the turns that it told of."""

    def __init__(self, rtt_ns: int | None = 5) -> None:
        self.turns: list[Turn] = []
        self.schema = RealtimeSchema(self.turns.append, lambda: rtt_ns)

    def came(self, at_ns: int, type: str, **fields: Any) -> SessionEvent:
        return self.schema.event(json.dumps({"type": type, **fields}).encode(), True, at_ns)


def test_a_turns_moments() -> None:
    played = Played()
    played.schema.sent({"type": "response.create"}, 100)
    played.came(130, "response.created", response={"id": "r"})
    played.came(140, "response.output_text.delta", response_id="r", delta="a")
    played.came(170, "response.output_audio.delta", response_id="r", delta="AAAA")
    usage = {"input_tokens": 3, "output_tokens": 4, "total_tokens": 7, "input_token_details": {"cached_tokens": 2}}
    played.came(180, "response.done", response={"id": "r", "status": "completed", "usage": usage})
    (turn,) = played.turns
    marks = turn.marks
    assert (turn.begin_ns, turn.end_ns, turn.head.id) == (100, 180, "r")
    assert (marks.sent_ns, marks.first_byte_ns, marks.first_content_ns, marks.last_chunk_ns) == (100, 130, 140, 170)
    assert (marks.rtt_ns, marks.ended_ns) == (5, 180)
    assert turn.head.usage == Usage(input_tokens=3, output_tokens=4, total_tokens=7, cached_tokens=2)


def test_a_round_trip_is_no_longer_than_what_was_seen() -> None:
    played = Played(rtt_ns=1000)
    played.schema.sent({"type": "response.create"}, 100)
    played.came(130, "response.created", response={"id": "r"})
    played.came(180, "response.done", response={"id": "r", "status": "completed"})
    assert played.turns[0].marks.rtt_ns == 30


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ({"status": "completed"}, "stop"),
        ({"status": "completed", "output": [{"type": "function_call"}]}, "tool_calls"),
        ({"status": "incomplete", "status_details": {"reason": "max_output_tokens"}}, "length"),
        ({"status": "incomplete", "status_details": {"reason": "content_filter"}}, "content_filter"),
        ({"status": "incomplete"}, "length"),
        ({"status": "cancelled"}, None),
        ({"status": "failed"}, None),
    ],
)
def test_finish_reasons(response: dict[str, Any], reason: str | None) -> None:
    played = Played()
    played.came(1, "response.created", response={"id": "r"})
    played.came(2, "response.done", response={"id": "r", **response})
    assert played.turns[0].finish_reason == reason


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        ({"code": "invalid_value"}, 0),
        ({"code": "invalid_value", "event_id": "second"}, 1),
        ({"code": "invalid_value", "event_id": "of another event"}, None),
        ({"code": "response_cancel_not_active"}, None),
        ({"code": "input_audio_buffer_commit_empty"}, None),
        ({"code": "item_not_found"}, None),
        ({"code": "conversation_already_has_active_response"}, 0),
        ({"code": 7}, 0),
        ({}, 0),
    ],
)
def test_which_turn_an_error_event_refuses(error: dict[str, Any], refused: int | None) -> None:
    played = Played()
    played.schema.sent({"type": "response.create"}, 10)
    played.schema.sent('{"response": {"instructions": "x"}, "event_id": "second", "type": "response.create"}', 20)
    played.schema.sent('{"type": "conversation.item.create", "note": "\\"response.create\\""}', 25)
    played.schema.sent(b'{"type": "response.create"}', 26)
    played.came(30, "error", error=error)
    assert [turn.begin_ns for turn in played.turns] == ([] if refused is None else [(10, 20)[refused]])
    assert all(turn.outcome == "error" and turn.error is not None for turn in played.turns)
    played.schema.ended(40, None)
    assert len(played.turns) == 2


def test_an_error_in_a_turn_refuses_nothing_but_a_second_one() -> None:
    played = Played()
    played.schema.sent({"type": "response.create"}, 10)
    played.came(20, "response.created", response={"id": "r"})
    played.schema.sent({"type": "response.create"}, 30)
    played.came(35, "error", error={"code": "invalid_value"})
    assert played.turns == []
    played.came(40, "error", error={"code": "conversation_already_has_active_response"})
    assert [turn.begin_ns for turn in played.turns] == [30]


ids = st.sampled_from(["r1", "r2", None, 7])
errors_and_responses: st.SearchStrategy[Any] = st.fixed_dictionaries(
    {},
    optional={
        "id": ids,
        "event_id": ids,
        "status": st.sampled_from(["completed", "failed", "cancelled", "incomplete", 1, None]),
        "status_details": st.sampled_from([None, 3, {"error": 3}, {"error": {"code": 3}}, {"reason": []}]),
        "usage": st.sampled_from([None, 3, {}, {"input_tokens": "x"}, {"total_tokens": 3, "input_token_details": 1}]),
        "output": st.sampled_from([None, 3, [], [3], [{"type": "function_call"}]]),
        "code": st.sampled_from([None, 3, "x", "item_x", "conversation_already_has_active_response"]),
    },
)
objects: st.SearchStrategy[Any] = errors_and_responses | st.sampled_from([None, 3, "x", []])
names = st.sampled_from(
    [
        "response.created",
        "response.done",
        "response.output_audio.delta",
        "response.output_text.delta",
        "input_audio_buffer.committed",
        "error",
        "x",
    ]
)
fields = st.fixed_dictionaries(
    {},
    optional={
        "response": objects,
        "error": objects,
        "delta": st.sampled_from(["", "a", "AAAA", 3]),
        "response_id": ids,
        "item_id": ids,
    },
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(names, fields) | st.binary(max_size=20), max_size=12), st.integers(0, 3))
def test_whatever_a_server_sends_is_an_event(messages: list[tuple[str, dict[str, Any]] | bytes], asks: int) -> None:
    """Nothing that comes can break a session, and each turn is told of once, and ends no earlier than it begins."""
    played = Played()
    for number in range(asks):
        played.schema.sent({"type": "response.create"}, number)
    for at_ns, message in enumerate(messages, 10):
        raw = message if isinstance(message, bytes) else json.dumps({"type": message[0], **message[1]}).encode()
        event = played.schema.event(raw, True, at_ns)
        assert event.raw == raw
        assert not event.binary
    played.schema.ended(100, None)
    assert len(played.turns) >= asks
    assert len(set(map(id, played.turns))) == len(played.turns)
    assert all(turn.begin_ns <= turn.end_ns for turn in played.turns)
    count = len(played.turns)
    played.schema.ended(101, None)
    assert len(played.turns) == count


# --- helpers ----------------------------------------------------------------------------------------------------------


@given(st.binary(max_size=5000).map(lambda data: data + bytes(len(data) % 2)), st.integers(1, 60))
def test_frames_join_to_what_was_cut(pcm: bytes, ms: int) -> None:
    cut = list(realtime.frames(pcm, ms))
    assert b"".join(cut) == pcm
    assert all(len(frame) == ms * BYTES_PER_MS for frame in cut[:-1])
    assert all(0 < len(frame) <= ms * BYTES_PER_MS for frame in cut[-1:])


def test_frames_of_nothing_and_of_halves() -> None:
    assert list(realtime.frames(b"")) == []
    with pytest.raises(ValueError, match="whole samples"):
        list(realtime.frames(b"123"))
    with pytest.raises(ValueError, match="no sample"):
        list(realtime.frames(b"12", 0))


@given(st.binary(max_size=300))
def test_appended_audio_is_json_with_base64(pcm: bytes) -> None:
    event = json.loads(realtime.append_audio(pcm))
    assert event["type"] == "input_audio_buffer.append"
    assert base64.b64decode(event["audio"], validate=True) == pcm


@given(
    st.lists(
        st.tuples(st.just("came"), st.integers(0, 3), st.integers(1, 400))
        | st.tuples(st.just("played"), st.just(0), st.integers(0, 600)),
        max_size=30,
    )
)
def test_playback_counts_each_item_by_itself(steps: list[tuple[str, int, int]]) -> None:
    """Against a plain account: bytes leave in the order in which they came, whichever item they are of."""
    playback = Playback()
    runs: list[list[int]] = []  # item, came, played
    for what, item, size in steps:
        if what == "came":
            delta = base64.b64encode(bytes(size)).decode()
            raw = json.dumps({"type": "response.output_audio.delta", "item_id": f"i{item}", "delta": delta}).encode()
            playback.received(SessionEvent("response.output_audio.delta", "", bytes(size), raw))
            if not runs or runs[-1][0] != item:
                runs.append([item, 0, 0])
            runs[-1][1] += size
        else:
            playback.played(size)
            for entry in runs:
                some = min(size, entry[1] - entry[2])
                entry[2] += some
                size -= some
    cut = [(f"i{item}", played * 1000 // 48_000) for item, came, played in runs if played < came]
    if cut:
        assert playback.played_ms == cut[0][1]
    messages = playback.interrupt()
    assert [(message["item_id"], message["audio_end_ms"]) for message in messages] == cut
    assert playback.interrupt() == []
    assert playback.played_ms == 0


def test_playback_stops_the_response_that_is_under_way() -> None:
    def event(type: str, id: str) -> SessionEvent:
        return SessionEvent(type, raw=json.dumps({"type": type, "response": {"id": id}}).encode())

    playback = Playback()
    assert playback.interrupt() == []
    playback.received(event("response.created", "r1"))
    playback.received(event("response.done", "another"))
    assert playback.interrupt() == [{"type": "response.cancel", "response_id": "r1"}]
    playback.received(event("response.created", "r2"))
    assert playback.interrupt(server_cancels=True) == []
    playback.received(event("response.created", "r3"))
    playback.received(event("response.done", "r3"))
    assert playback.interrupt() == []


def test_what_still_comes_of_an_interrupted_answer_is_not_played_and_counts_for_nothing() -> None:
    def delta(item: str, response: str | None) -> SessionEvent:
        event = {"type": "response.output_audio.delta", "item_id": item, "response_id": response}
        raw = json.dumps({**event, "delta": base64.b64encode(bytes(4800)).decode()}).encode()
        return SessionEvent("response.output_audio.delta", "", bytes(4800), raw)

    def created(id: str) -> SessionEvent:
        return SessionEvent("response.created", raw=json.dumps({"type": "", "response": {"id": id}}).encode())

    playback = Playback()
    assert not playback.received(created("r1"))
    assert playback.received(delta("i1", None))
    playback.played(2400)
    assert [message["type"] for message in playback.interrupt()] == ["response.cancel", "conversation.item.truncate"]
    assert not playback.received(delta("i1", None))
    assert not playback.received(delta("i2", "r1")), "another item of the same answer"
    assert playback.interrupt() == [], "it would take back what was heard of the first item"
    playback.received(created("r2"))
    assert playback.received(delta("i3", "r2"))
    playback.played(4800 - 480)
    assert playback.interrupt(server_cancels=True) == [realtime.truncate("i3", 90)]


def test_what_a_client_sends() -> None:
    assert realtime.create_response() == {"type": "response.create"}
    assert realtime.create_response(**TEXT) == {"type": "response.create", "response": TEXT}
    assert realtime.cancel() == {"type": "response.cancel"}
    assert realtime.truncate("i", 7, content_index=1) == {
        "type": "conversation.item.truncate",
        "item_id": "i",
        "content_index": 1,
        "audio_end_ms": 7,
    }
    assert realtime.commit_audio() == {"type": "input_audio_buffer.commit"}
    assert realtime.user_text("x")["item"]["content"] == [{"type": "input_text", "text": "x"}]


@given(st.text(max_size=20))
def test_audio_that_is_no_base64_is_none(delta: str) -> None:
    event = Played().came(1, "response.output_audio.delta", delta=delta)
    try:
        expected = base64.b64decode(delta)
    except ValueError:
        expected = b""
    assert event.audio == expected


@pytest.mark.parametrize(
    "fields", [{"delta": {"a": 1}}, {"event_id": 7}, {"response": {"status": 1}}, {"response": []}]
)
def test_an_event_has_its_type_whatever_its_fields_are(fields: dict[str, Any]) -> None:
    for name in ("response.done", "response.created", "x.y"):
        assert Played().came(1, name, **fields).type == name


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"7", b'{"type":7}', b'{"type":"\xff"}', b"[" * 100_000])
def test_what_has_no_type_is_an_event_all_the_same(raw: bytes) -> None:
    event = Played().schema.event(raw, True, 1)
    assert (event.type, event.raw) == ("", raw)


def test_a_binary_message_is_handed_on() -> None:
    event = Played().schema.event(b"\x00\x01", False, 1)
    assert (event.binary, event.raw, event.type) == (True, b"\x00\x01", "")
