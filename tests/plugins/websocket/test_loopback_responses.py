"""Responses over WebSocket, as the loopback server speaks it: by the plain client, and by OpenAI's own SDK."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from openai.types.responses import (
    ResponseCompletedEvent,
    ResponseIncompleteEvent,
    ResponseTextDeltaEvent,
)
from websockets.exceptions import ConnectionClosed, ConnectionClosedError, ConnectionClosedOK

from spanwire.calls import Usage
from spanwire.testing import LoopbackServer, Request, Script, ScriptedTool
from tests.plugins.websocket.plain import PATIENCE_S, Plain, kinds, text_of

#: Clocks of one process; asyncio's timers may fire one tick of its clock early.
TICK_NS = 1_000_000


def serving(*scripts: Any, **more: Any) -> LoopbackServer:
    options = more.pop("options", None)
    return LoopbackServer([*scripts], part="websocket", options=options, **more)


def test_a_turn_has_the_events_in_their_order() -> None:
    with serving(Script.say("Hello you there")) as server:
        with Plain(server) as client:
            events = client.turn()
            assert server.wait_for(lambda s: s.requests[0].ended)
        assert kinds(events) == [
            "created",
            "in_progress",
            "output_item.added",
            "content_part.added",
            "output_text.delta",
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "completed",
        ]
        assert text_of(events) == "Hello you there"
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert "stream_id" not in events[0]
        assert server.faults == []


def test_every_message_is_a_request_with_the_headers_of_the_upgrade() -> None:
    with serving(Script.say("a"), Script.say("b")) as server:
        headers = {"Authorization": "Bearer key", "X-Tenant": "blue"}
        with Plain(server, "/v1/responses?api-version=3", additional_headers=headers) as client:
            client.turn([{"role": "user", "content": "one"}])
            client.turn("two", model="other")
        first, second = server.requests
    assert (first.method, first.path, first.query) == ("response.create", "/v1/responses", "api-version=3")
    assert first.headers["authorization"] == "Bearer key"
    assert first.headers["x-tenant"] == "blue"
    assert json.loads(first.raw)["input"] == [{"role": "user", "content": "one"}]
    assert (second.model, second.body["input"]) == ("other", "two")
    assert first.connection == second.connection == 1


def test_the_default_answer_echoes_the_input() -> None:
    with serving() as server, Plain(server) as client:
        assert text_of(client.turn("one two")) == "You said: one two"
        assert (
            text_of(client.turn([{"role": "user", "content": [{"type": "input_text", "text": "x"}]}])) == "You said: x"
        )


def test_the_queue_is_told_by_an_event_and_its_waits_are_kept() -> None:
    script = Script.say("a b c", queue_s=0.05, prefill_s=0.03, gap_s=0.01)
    with serving(script) as server:
        with Plain(server) as client:
            events = client.turn()
        [request] = server.requests
    assert kinds(events)[:3] == ["created", "queued", "in_progress"]
    assert events[1]["response"]["status"] == "queued"
    times = request.times
    assert times.queue_s is not None
    assert times.prefill_s is not None
    assert times.decode_s is not None
    assert times.queue_s >= 0.049
    assert times.prefill_s >= 0.029
    assert times.prefill_s + times.decode_s >= 0.049  # what comes late does not slow the pace
    assert request.headers_ns is not None
    assert request.queued_ns is not None
    assert request.headers_ns < request.queued_ns  # `created` came before


def test_a_server_may_say_nothing_of_its_queue() -> None:
    with serving(Script.say("a", queue_s=0.05), options={"shows_queue": False}) as server:
        with Plain(server) as client:
            events = client.turn()
        [request] = server.requests
    assert kinds(events)[:2] == ["created", "in_progress"]
    assert request.headers_ns is not None
    assert request.queued_ns is not None
    assert request.headers_ns >= request.queued_ns >= request.arrived_ns + 50_000_000 - TICK_NS


def test_tools_reasoning_and_usage() -> None:
    script = Script(
        reasoning=["hm", "m"],
        tool_calls=[ScriptedTool("look", ['{"a"', ":1}"], id="call_9")],
        usage=Usage(5, 7, 12, cached_tokens=3, reasoning_tokens=2),
    )
    with serving(script) as server, Plain(server) as client:
        events = client.turn()
    assert text_of(events, "reasoning_text") == "hmm"
    assert text_of(events, "function_call_arguments") == '{"a":1}'
    response = events[-1]["response"]
    assert [item["type"] for item in response["output"]] == ["reasoning", "function_call"]
    assert response["output"][1]["call_id"] == "call_9"
    assert response["usage"]["input_tokens_details"]["cached_tokens"] == 3


@pytest.mark.parametrize(
    ("finish", "kind"), [("length", "incomplete"), ("content_filter", "incomplete"), ("error", "failed")]
)
def test_ends_that_are_not_complete(finish: str, kind: str) -> None:
    with serving(Script.say("a b", finish_reason=finish)) as server, Plain(server) as client:
        assert client.turn()[-1]["type"] == f"response.{kind}"


def test_server_times_are_on_the_terminal_event() -> None:
    with serving(Script.say("a b", server_timing="vllm", gap_s=0.01)) as server, Plain(server) as client:
        metrics = client.turn()[-1]["response"]["metrics"]
    assert metrics["generation_time_ms"] >= 9


def test_an_error_has_its_status_code_and_headers() -> None:
    script = Script(status=429, headers={"retry-after": "2"})
    with serving(script, Script.say("again")) as server, Plain(server) as client:
        [error] = client.turn()
        assert error["type"] == "error"
        assert error["status"] == 429
        assert error["error"]["code"] == "rate_limit_exceeded"
        assert error["error"]["headers"] == {"retry-after": "2"}
        assert text_of(client.turn()) == "again"  # the connection lives on


def test_an_answer_may_be_given_message_by_message() -> None:
    events = [b'{"type":"response.created"}', b'{"type":"error","error":{"code":"server_is_overloaded"}}']
    with serving(Script(writes=events), Script(body=b"not JSON")) as server, Plain(server) as client:
        client.create()
        assert [client.ws.recv(timeout=PATIENCE_S), client.ws.recv(timeout=PATIENCE_S)] == [e.decode() for e in events]
        client.create()
        assert client.ws.recv(timeout=PATIENCE_S) == "not JSON"


# --- cuts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["close", "reset", 1001, 1012, 1013, 4000])
def test_a_cut_in_the_middle_of_an_answer(mode: Any) -> None:
    script = Script.say("a b c d", drop_after=3, drop_mode=mode)  # the role, and two pieces
    with serving(script) as server, Plain(server) as client:
        client.create()
        texts = [client.event().get("delta") for _ in range(6)]
        with pytest.raises(ConnectionClosed) as caught:
            client.event()
        assert [text for text in texts if text] == ["a", " b"]
        received = caught.value.rcvd
        assert (received.code if received else None) == (mode if isinstance(mode, int) else None)
        server.wait_for(lambda s: s.open_connections == 0)
        [request] = server.requests
        assert request.dropped_ns is not None
        assert not request.ended
        assert not request.left


@pytest.mark.parametrize("mode", ["close", "reset", 1011])
def test_a_cut_before_any_answer(mode: Any) -> None:
    with serving(Script(drop_after="request", drop_mode=mode)) as server, Plain(server) as client:
        client.create()
        with pytest.raises(ConnectionClosedError) as caught:
            client.event()
        assert (caught.value.rcvd.code if caught.value.rcvd else None) == (mode if isinstance(mode, int) else None)
        assert server.requests[0].dropped_ns


def test_a_cut_after_the_terminal_event_takes_nothing_away() -> None:
    with serving(Script.say("a", drop_after=9, drop_mode="close")) as server, Plain(server) as client:
        assert client.turn()[-1]["type"] == "response.completed"
        with pytest.raises(ConnectionClosedError):
            client.event()
        assert server.requests[0].ended


def test_an_answer_that_hangs_is_seen_as_left_when_the_client_goes() -> None:
    with serving(Script.say("a b c", hang_after=2)) as server:
        with Plain(server) as client:
            client.create()
            client.until("response.output_text.delta")
            assert not server.requests[0].left
        server.wait_for(lambda s: s.requests[0].left)
        assert server.requests[0].dropped_ns is None


def test_an_answer_without_a_terminal_event_ends_in_order() -> None:
    with serving(Script.say("a b", finish_reason=None, usage=None, done=False)) as server, Plain(server) as client:
        client.create()
        with pytest.raises(ConnectionClosedOK) as caught:
            client.answer()
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 1000
        assert server.requests[0].ended


def test_a_script_may_close_after_its_answer() -> None:
    with serving(Script.say("a", close=True)) as server, Plain(server) as client:
        assert client.turn()[-1]["type"] == "response.completed"
        with pytest.raises(ConnectionClosedOK):
            client.event()


@pytest.mark.parametrize("reset", [False, True])
def test_the_server_disconnects_everybody(reset: bool) -> None:
    with serving(Script.say("a b", hang_after=2)) as server, Plain(server) as client, Plain(server) as idle:
        client.create()
        client.until("response.output_text.delta")
        server.disconnect(reset=reset)
        for one in (client, idle):
            with pytest.raises(ConnectionClosed) as caught:
                one.event()
            assert (caught.value.rcvd.code if caught.value.rcvd else None) == (None if reset else 1001)
        server.wait_for(lambda s: s.open_connections == 0)
        assert server.requests[0].dropped_ns


def test_the_server_ends_with_clients_of_every_kind() -> None:
    with serving(Script.say("a b", hang_after=2), options={"max_clients": 2}) as server:
        client, _idle = Plain(server), Plain(server)
        client.create()
        client.until("response.output_text.delta")
    assert server.open_connections == 0
    assert server.requests[0].dropped_ns


# --- lanes ------------------------------------------------------------------------------------------------------------


def test_turns_without_lanes_are_made_one_after_the_other() -> None:
    with serving(Script.say("a b", gap_s=0.01), Script.say("c")) as server:
        with Plain(server) as client:
            client.create()
            client.create()
            assert text_of(client.answer()) == "a b"
            assert text_of(client.answer()) == "c"
        first, second = server.requests
    assert first.ended_ns is not None
    assert second.queued_ns is not None
    assert second.arrived_ns < first.ended_ns < second.queued_ns


def test_lanes_interleave_and_their_events_say_which() -> None:
    with serving(Script.say("a b", hang_after=2), Script.say("c")) as server, Plain(server) as client:
        client.create(stream_id="one")
        assert client.until("response.output_text.delta")[-1]["stream_id"] == "one"
        client.create(stream_id="one")  # waits for ever behind the first
        client.create(stream_id="two")
        events = client.answer()
        assert {event["stream_id"] for event in events} == {"two"}
        assert text_of(events) == "c"
        assert [request.ended for request in server.requests] == [False, False, True]
        client.ws.close()
        server.wait_for(lambda s: sum(request.left for request in s.requests) == 2)


def test_lanes_may_be_unknown_to_a_server() -> None:
    with serving(Script.say("a", gap_s=0.01), options={"lanes": False}) as server, Plain(server) as client:
        client.create(stream_id="one")
        client.create(stream_id="two")
        events = [*client.answer(), *client.answer()]
        assert all("stream_id" not in event for event in events)


def test_so_many_lanes_and_no_more() -> None:
    with serving(Script.say("a"), options={"max_lanes": 1}) as server, Plain(server) as client:
        assert client.turn(stream_id="one")[-1]["type"] == "response.completed"
        [error] = client.turn(stream_id="two")
        assert error["error"]["code"] == "websocket_stream_limit_reached"
        assert client.turn()[-1]["type"] == "response.completed"  # the lane without a name is not counted
        for bad in ("", "a b", "x" * 257, 3):
            [error] = client.turn(stream_id=bad)
            assert error["error"]["code"] == "invalid_stream_id"


def test_so_many_responses_at_once_and_no_more() -> None:
    hanging = Script(hang_after="request")
    with serving(hanging, Script.say("b"), options={"max_active": 1}) as server, Plain(server) as client:
        client.create(stream_id="one")
        client.create(stream_id="two")
        server.wait_for(lambda s: len(s.requests) == 2)
        client.ws.close()
        server.wait_for(lambda s: s.open_connections == 0)
        assert server.requests[1].headers_ns is None


# --- memory -----------------------------------------------------------------------------------------------------------


def test_a_connection_knows_its_responses() -> None:
    with serving(Script.say("blue"), Script.say("yes")) as server, Plain(server) as client:
        first = client.turn("which colour is it")[-1]["response"]
        second = client.turn("sure", previous_response_id=first["id"])[-1]["response"]
        assert second["previous_response_id"] == first["id"]
        assert second["id"] != first["id"]
        assert second["usage"]["input_tokens"] == 4 + 1 + 1  # the history is part of it
        assert json.loads(server.requests[1].raw)["input"] == "sure"


def test_another_connection_knows_only_what_was_stored() -> None:
    with serving(Script.say("a")) as server:
        with Plain(server) as client:
            kept = client.turn(store=True)[-1]["response"]["id"]
            forgotten = client.turn(store=False)[-1]["response"]["id"]
        with Plain(server) as client:
            [error] = client.turn(previous_response_id=forgotten)
            assert error["error"]["code"] == "previous_response_not_found"
            assert error["status"] == 400
            assert client.turn(previous_response_id=kept)[-1]["type"] == "response.completed"
        assert all(request.ended for request in server.requests)


def test_an_error_makes_the_connection_forget_the_parent() -> None:
    with serving(Script.say("a"), Script(status=500), Script.say("b")) as server, Plain(server) as client:
        parent = client.turn()[-1]["response"]["id"]
        assert client.turn(previous_response_id=parent)[-1]["error"]["type"] == "server_error"
        [error] = client.turn(previous_response_id=parent)
        assert error["error"]["code"] == "previous_response_not_found"


def test_a_warm_up_says_nothing_and_can_be_gone_on_from() -> None:
    with serving(Script.say("never said"), Script.say("b")) as server, Plain(server) as client:
        events = client.turn(generate=False)
        assert kinds(events) == ["created", "in_progress", "completed"]
        assert events[-1]["response"]["output"] == []
        assert text_of(client.turn(previous_response_id=events[-1]["response"]["id"])) == "b"


# --- age --------------------------------------------------------------------------------------------------------------


def test_an_old_connection_says_so_at_the_next_turn() -> None:
    with serving(Script.say("a"), options={"max_turns": 1}) as server, Plain(server) as client:
        client.turn()
        [error] = client.turn()
        assert error["error"]["code"] == "websocket_connection_limit_reached"
        with pytest.raises(ConnectionClosedOK):
            client.event()
        with Plain(server) as fresh:
            assert fresh.turn()[-1]["type"] == "response.completed"


def test_an_old_connection_is_closed_when_it_is_idle() -> None:
    options = {"max_turns": 1, "when_old": "close"}
    with serving(Script.say("a"), options=options) as server, Plain(server) as client:
        assert client.turn()[-1]["type"] == "response.completed"
        with pytest.raises(ConnectionClosed) as caught:
            client.event()
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 1001


def test_age_may_be_a_time() -> None:
    with serving(Script.say("a"), options={"max_age_s": 0.0}) as server, Plain(server) as client:
        [error] = client.turn()
        assert error["error"]["code"] == "websocket_connection_limit_reached"
    with serving(options={"max_age_s": 0.01, "when_old": "close"}) as server, Plain(server) as client:
        with pytest.raises(ConnectionClosed):
            client.event()


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"model": 3}, "missing_required_parameter"),
        ({"input": 3}, "invalid_type"),
        ({"stream": True}, "unsupported_parameter"),
        ({"background": True}, "unsupported_parameter"),
        ({"previous_response_id": "resp_of_nobody"}, "previous_response_not_found"),
        ({"previous_response_id": 3}, "previous_response_not_found"),
    ],
)
def test_what_a_real_server_would_refuse(fields: dict[str, Any], code: str) -> None:
    with serving() as server, Plain(server) as client:
        client.send("response.create", **{"model": "m", "input": "x", **fields})
        error = client.event()
        assert (error["type"], error["status"], error["error"]["code"]) == ("error", 400, code)
        assert server.requests[0].ended


def test_messages_that_are_none() -> None:
    with serving() as server, Plain(server) as client:
        for message in ("no JSON", "[]", b"\xff"):
            client.ws.send(message)
            assert client.event()["error"]["code"] == "invalid_json"
        client.send("response.cancel")
        assert client.event()["error"]["code"] == "unknown_event"
        client.send("response.steer", previous_response_id="resp_1", input="x")
        assert client.event()["error"]["code"] == "steering_not_supported"
        assert len(server.faults) == 3
        assert server.requests == []


def test_a_function_that_makes_scripts_may_fail() -> None:
    def broken(_: Request) -> Script:
        raise ValueError("not today")

    with serving(broken) as server, Plain(server) as client:
        [error] = client.turn()
        assert (error["status"], error["error"]["type"]) == (500, "server_error")
        assert "not today" in server.faults[0]


# --- OpenAI's SDK -----------------------------------------------------------------------------------------------------


def sdk(server: LoopbackServer) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(api_key="sk-test", base_url="http://unused.invalid/v1", websocket_base_url=server.url)


async def events_of(connection: Any) -> list[Any]:
    events = []
    async for event in connection:
        events.append(event)
        if event.type in {"response.completed", "response.incomplete", "response.failed", "error"}:
            break
    return events


OPTIONS: Any = {"proxy": None}


def test_the_sdk_understands_a_conversation_with_a_tool() -> None:
    tool = ScriptedTool("weather", ['{"city":', '"Lisbon"}'], id="call_1")
    scripts = [Script(tool_calls=[tool]), Script.say("It is sunny.", reasoning=["let me see"], queue_s=0.01)]

    async def body(server: LoopbackServer) -> None:
        async with sdk(server) as client, client.responses.connect(websocket_connection_options=OPTIONS) as connection:
            await connection.response.create(model="m", input="What is the weather?")
            completed = (await events_of(connection))[-1]
            assert isinstance(completed, ResponseCompletedEvent)
            [call] = completed.response.output
            assert call.type == "function_call"
            assert (call.name, call.call_id, call.arguments) == ("weather", "call_1", '{"city":"Lisbon"}')
            output: Any = {"type": "function_call_output", "call_id": "call_1", "output": "sunny"}
            await connection.response.create(
                model="m", input=[output], previous_response_id=completed.response.id, stream_id="lane"
            )
            events = await events_of(connection)
            assert "".join(e.delta for e in events if isinstance(e, ResponseTextDeltaEvent)) == "It is sunny."
            assert events[1].type == "response.queued"
            assert isinstance(events[-1], ResponseCompletedEvent)
            assert events[-1].response.output_text == "It is sunny."
            assert events[-1].response.usage is not None
            assert events[-1].response.usage.output_tokens == 4

    with serving(*scripts) as server:
        asyncio.run(body(server))
        assert server.requests[0].headers["authorization"] == "Bearer sk-test"
        assert server.faults == []


def test_the_sdk_understands_errors_and_ends() -> None:
    async def body(server: LoopbackServer) -> None:
        async with sdk(server) as client, client.responses.connect(websocket_connection_options=OPTIONS) as connection:
            await connection.response.create(model="m", input="x")
            [error] = await events_of(connection)
            assert error.status == 503
            assert error.error.code == "server_is_overloaded"
            await connection.response.create(model="m", input="x")
            end = (await events_of(connection))[-1]
            assert isinstance(end, ResponseIncompleteEvent)
            assert end.response.incomplete_details is not None
            assert end.response.incomplete_details.reason == "max_output_tokens"

    with serving(Script(status=503), Script.say("cut", finish_reason="length")) as server:
        asyncio.run(body(server))
