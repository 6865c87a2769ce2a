"""websockets: Responses and Realtime by openai's SDK and by hand, on a server of the same library."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st
from spanwire_instrument import instrument, uninstrument, websocket_options
from spanwire_instrument.turns import Turns, asked, told
from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.server import ServerConnection, serve

from tests.integrations.instrument.support import Seen
from tests.integrations.instrument.zero import checked, instrumented, one

MODES = ["explicit", "zero"]
Handler = Callable[[ServerConnection], Awaitable[None]]


def _response(status: str, **more: Any) -> dict[str, Any]:
    usage = {"input_tokens": 3, "output_tokens": 2, "total_tokens": 5}
    return {
        "id": "resp_1",
        "object": "response",
        "model": "m-1",
        "status": status,
        "output": [],
        "usage": usage,
        **more,
    }


async def responses(ws: ServerConnection) -> None:
    """A server of Responses over WebSocket."""
    async for message in ws:
        request = json.loads(message)
        events: list[dict[str, Any]] = [
            {"type": "response.created", "response": _response("in_progress")},
            {"type": "response.output_text.delta", "item_id": "i", "output_index": 0, "content_index": 0, "delta": "Hi",
             "logprobs": []},
            {"type": "response.completed", "response": _response("completed")},
        ]  # fmt: skip
        if request.get("input") == "fail":
            events[-1] = {
                "type": "response.failed",
                "response": _response("failed", error={"code": "x", "message": "y"}),
            }
        if request.get("input") == "refuse":
            events = [{"type": "error", "code": "x", "message": "no", "param": None}]
        for number, event in enumerate(events):
            await ws.send(json.dumps({"sequence_number": number, **event}))
            if request.get("input") == "break" and number == 1:
                ws.transport.abort()


async def realtime(ws: ServerConnection) -> None:
    """A server of Realtime, which answers out of order, and once by itself."""
    await ws.send(json.dumps({"type": "session.created", "event_id": "e", "session": {"type": "realtime"}}))
    waiting: list[str] = []
    async for message in ws:
        request = json.loads(message)
        if request["type"] == "input_audio_buffer.commit":
            await answer(ws, ["spoken"])
        elif request["type"] == "response.create":
            waiting.append(f"r{len(waiting)}")
            if len(waiting) == 2:
                await answer(ws, waiting)


async def answer(ws: ServerConnection, ids: list[str]) -> None:
    for kind in ("response.created", "response.output_audio.delta", "response.done"):
        for name in reversed(ids) if kind == "response.done" else ids:
            event: dict[str, Any] = {"type": kind, "event_id": "e"}
            if kind.endswith("delta"):
                event |= {"response_id": name, "item_id": "i", "output_index": 0, "content_index": 0, "delta": "AAAA"}
            else:
                event["response"] = {"id": name, "object": "realtime.response", "status": "completed", "output": []}
            await ws.send(json.dumps(event, indent=1))


def play(mode: str, handler: Handler, body: Callable[[str, dict[str, Any]], Awaitable[Any]], **more: Any) -> Any:
    """The body is given the server's address and the options of the connect."""
    ca = trustme.CA()
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("127.0.0.1").configure_cert(serving)
    trusting = ssl.create_default_context()
    ca.configure_trust(trusting)

    async def main(seen: Seen) -> Any:
        options: dict[str, Any] = {"ssl": trusting}
        if mode == "explicit":
            options = websocket_options(manager=seen.manager, **options, **more)
        async with serve(handler, "127.0.0.1", 0, ssl=serving) as server:
            port = server.sockets[0].getsockname()[1]
            return await body(f"127.0.0.1:{port}", options)

    if mode == "zero":
        with instrumented(**more) as seen:
            return asyncio.run(main(seen)), seen
    seen = Seen()
    return asyncio.run(main(seen)), seen


def sdk(address: str) -> Any:
    return openai.AsyncOpenAI(api_key="k", base_url=f"https://{address}/v1")


async def ask(connection: Any, what: str = "q") -> list[str]:
    await connection.response.create(model="m", input=what)
    kinds = []
    async for event in connection:
        kinds.append(event.type)
        if event.type in ("response.completed", "response.failed", "error"):
            break
    return kinds


@pytest.mark.parametrize("mode", MODES)
def test_each_response_is_a_call(mode: str) -> None:
    async def body(address: str, options: dict[str, Any]) -> Any:
        async with sdk(address).responses.connect(websocket_connection_options=options) as connection:
            return [await ask(connection) for _ in range(3)]

    expected, _ = play("bare", responses, body)
    found, seen = play(mode, responses, body)
    assert found == expected
    assert [checked(timeline).model for timeline in seen.timelines] == ["m"] * 3
    for timeline in seen.timelines:
        assert timeline.transport == "websockets"
        assert timeline.first_content_s is not None
        assert timeline.usage is not None
        assert timeline.usage.output_tokens == 2
    uses = [timeline.connection for timeline in seen.timelines]
    assert [use.reused for use in uses if use is not None] == [False, True, True]
    assert len({use.id for use in uses if use is not None}) == 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("what", ["fail", "refuse"])
def test_a_response_that_fails_is_an_error(mode: str, what: str) -> None:
    async def body(address: str, options: dict[str, Any]) -> Any:
        async with sdk(address).responses.connect(websocket_connection_options=options) as connection:
            return await ask(connection, what), await ask(connection)

    expected, _ = play("bare", responses, body)
    found, seen = play(mode, responses, body)
    assert found == expected
    first, second = seen.timelines
    checked(first, "error")
    checked(second)


@pytest.mark.parametrize("mode", MODES)
def test_a_connection_that_breaks_ends_its_response(mode: str) -> None:
    async def body(address: str, options: dict[str, Any]) -> str:
        async with sdk(address).responses.connect(websocket_connection_options=options) as connection:
            with pytest.raises(Exception, match="close frame") as raised:
                await ask(connection, "break")
        return type(raised.value).__name__

    expected, _ = play("bare", responses, body)
    found, seen = play(mode, responses, body)
    assert found == expected
    one(seen, "error")


@pytest.mark.parametrize("mode", MODES)
def test_a_connection_that_is_left_ends_its_response(mode: str) -> None:
    async def hang(ws: ServerConnection) -> None:
        await ws.send(json.dumps({"type": "response.created", "response": _response("in_progress")}))
        await ws.wait_closed()

    async def body(address: str, options: dict[str, Any]) -> None:
        async with connect(f"wss://{address}/v1/responses", **options) as ws:
            await ws.send('{"type": "response.create", "model": "m", "input": "q"}')
            await ws.recv()

    _, seen = play(mode, hang, body)
    one(seen, "closed_by_caller")


@pytest.mark.parametrize("mode", MODES)
def test_responses_of_realtime_may_cross_each_other(mode: str) -> None:
    async def body(address: str, options: dict[str, Any]) -> Any:
        kinds = []
        client = sdk(address)
        async with client.realtime.connect(model="gpt-x", websocket_connection_options=options) as connection:
            await connection.input_audio_buffer.commit()
            await connection.response.create()
            await connection.response.create(response={"conversation": "none"})
            async for event in connection:
                kinds.append(event.type)
                if kinds.count("response.done") == 3:
                    break
        return kinds

    expected, _ = play("bare", realtime, body)
    found, seen = play(mode, realtime, body)
    assert found == expected
    assert [checked(timeline).model for timeline in seen.timelines] == ["gpt-x"] * 3
    assert all(timeline.first_content_s for timeline in seen.timelines)


@pytest.mark.parametrize("mode", MODES)
def test_messages_in_fragments(mode: str) -> None:
    async def pieces(ws: ServerConnection) -> None:
        await ws.recv()
        for kind in ("created", "completed"):
            text = json.dumps({"type": f"response.{kind}", "response": _response("completed")})
            await ws.send([text[:5], text[5:20], text[20:]])

    async def body(address: str, options: dict[str, Any]) -> int:
        async with connect(f"wss://{address}/v1/responses", **options) as ws:
            await ws.send(json.dumps({"type": "response.create", "model": "m", "input": "q"}))
            return len([await ws.recv(), await ws.recv()])

    found, seen = play(mode, pieces, body)
    assert found == 2
    one(seen)


@pytest.mark.parametrize("mode", MODES)
def test_other_connections_are_nobodys_business(mode: str) -> None:
    async def echo(ws: ServerConnection) -> None:
        async for message in ws:
            await ws.send(message)

    async def body(address: str, options: dict[str, Any]) -> set[str]:
        async with connect(f"wss://{address}/chat", **options) as ws:
            await ws.send('{"type": "response.create"}')
            await ws.recv()
            return {"send", "process_event"} & set(vars(ws))

    found, seen = play(mode, echo, body)
    assert found == set()
    assert seen.timelines == []


def test_the_explicit_options_are_not_doubled() -> None:
    with instrumented() as seen:

        async def body(address: str, options: dict[str, Any]) -> Any:
            options = websocket_options(manager=seen.manager, **options)
            async with sdk(address).responses.connect(websocket_connection_options=options) as connection:
                return await ask(connection)

        play("bare", responses, body)
    one(seen)


def test_a_connection_that_outlives_the_instrumentation_is_left_alone() -> None:
    seen = Seen()

    async def body(address: str, options: dict[str, Any]) -> Any:
        instrument(manager=seen.manager)
        try:
            async with sdk(address).responses.connect(websocket_connection_options=options) as connection:
                await ask(connection)
                uninstrument()
                return await ask(connection)
        finally:
            uninstrument()

    play("bare", responses, body)
    one(seen)


def test_an_own_class_of_connection_stays_below() -> None:
    class Mine(ClientConnection):
        pass

    assert issubclass(websocket_options(create_connection=Mine)["create_connection"], Mine)


# ------------------------------------------------------------------------------------------------------------------ turns


@given(st.binary() | st.text())
def test_anything_may_be_said(message: bytes | str) -> None:
    asked(message)
    if isinstance(message, bytes):
        told(message)


def test_what_is_asked() -> None:
    found = asked('{"type": "response.create", "response": {"model": "x", "temperature": 0.5}}')
    assert found is not None
    assert (found.model, found.params) == ("x", {"temperature": 0.5})
    assert asked('{"type": "conversation.item.create", "item": "response.create"}') is None
    assert asked(b'{"type": "response.create"}') == (None, {})


@pytest.mark.parametrize(
    ("status", "end"),
    [("completed", "completed"), ("cancelled", "closed_by_caller"), ("failed", "error"), ("incomplete", "completed")],
)
def test_how_a_response_is_done(status: str, end: str) -> None:
    found = told(json.dumps({"type": "response.done", "response": {"id": "r", "status": status}}).encode())
    assert found is not None
    assert (found.id, found.end) == ("r", end)
    assert b"response.done" not in found.data


@given(st.permutations(["a", "b", "c"]), st.permutations(["a", "b", "c"]))
def test_turns_are_found_by_their_names(order: list[str], ends: list[str]) -> None:
    turns: Turns[int] = Turns()
    for number in range(3):
        turns.ask(number)
    of = {}
    for name in order:
        event = told(json.dumps({"type": "response.created", "response": {"id": name}}).encode())
        assert event is not None
        of[name] = turns.find(event)
    assert [of[name] for name in order] == [0, 1, 2]  # begun in the order in which they were asked for
    for name in ends:
        event = told(json.dumps({"type": "response.done", "response": {"id": name}}).encode())
        assert event is not None
        assert turns.find(event) == of[name]
        assert turns.find(event) is None
    assert turns.close() == []
