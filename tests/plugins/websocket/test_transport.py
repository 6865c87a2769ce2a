"""Conversations that stay on their sockets, sockets that grow old, full servers with many callers, forks."""

from __future__ import annotations

import asyncio
import json
import os
import time
from typing import Any

import msgspec
import pytest
from spanwire_websocket import WebSocketTransport

import spanwire
from spanwire import errors
from spanwire.testing import LoopbackServer, Script, ScriptedTool
from tests.plugins.websocket.raw_server import Peer, answer, raw_server
from tests.plugins.websocket.session_server import until
from tests.support import NEVER, assert_adds_up, chat, hello, read, run, wait_for

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
Messages = list[dict[str, Any]]


def loopback(*scripts: Any, **more: Any) -> LoopbackServer:
    return LoopbackServer([*scripts], part="websocket", **more)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def echo(request: Any) -> Script:
    """What was said last, so that a shifted answer shows."""
    last = request.body["input"]
    words = last if isinstance(last, str) else json.dumps(last[-1].get("content", last[-1].get("output")))
    return Script.say(f"re {words}")


async def tell(
    manager: spanwire.ConnectionManager, endpoint: spanwire.Endpoint, messages: Messages, **more: Any
) -> spanwire.Reply:
    """One turn: its answer is added to the messages."""
    reply = await manager.complete(endpoint, spanwire.Call.chat("m", messages, **more))
    messages.append(reply.to_message() if hasattr(reply, "to_message") else said(reply.text))
    assert reply.timeline is not None
    assert_adds_up(reply.timeline)
    return reply


def sizes(server: LoopbackServer) -> list[int]:
    """How many items each request had."""
    return [len(request.body["input"]) for request in server.requests]


def parents(server: LoopbackServer) -> list[bool]:
    return ["previous_response_id" in request.body for request in server.requests]


# --- a conversation stays on its socket ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rewrite", [False, True], ids=["as-it-came", "written-anew"])
@pytest.mark.parametrize("text", ["", "Let me see. "])
def test_a_tool_loop_of_ten_turns_sends_only_what_is_new(rewrite: bool, text: str) -> None:
    def script(request: Any) -> Script:
        turn = len(server.requests)
        if turn > 10:
            return Script.say("done")
        pieces = ['{"n": ', f'{turn}, "b": "ä"', ', "a":1}']
        calls = [ScriptedTool("look", pieces, id=f"call_{turn}_{n}") for n in range(2)]
        return Script(tokens=[text] if text else [], tool_calls=calls)

    with loopback(default=script) as server:
        endpoint = server.endpoint(retries=NEVER)

        async def body() -> None:
            messages: Messages = [{"role": "system", "content": "Be brief."}, user("Look ten times.")]
            async with spanwire.ConnectionManager(telemetry=None) as manager:
                for _ in range(11):
                    reply = await manager.complete(endpoint, spanwire.Call.chat("m", messages, tools=TOOLS))
                    if not reply.tool_calls:
                        assert reply.text == "done"
                        return
                    calls = []
                    for call in reply.tool_calls:
                        arguments = call.arguments
                        if rewrite:  # as frameworks do, which hold them parsed
                            arguments = json.dumps(json.loads(arguments), sort_keys=True, separators=(",", ":"))
                        function = {"name": call.name, "arguments": arguments}
                        calls.append({"id": call.id, "type": "function", "function": function})
                    messages.append({"role": "assistant", "content": reply.text or None, "tool_calls": calls})
                    messages += [{"role": "tool", "tool_call_id": call["id"], "content": "seen"} for call in calls]
                raise AssertionError("it never ended")

        run(body)
        assert server.connections == 1
        assert parents(server) == [False] + [True] * 10
        assert sizes(server)[1:] == [2] * 10
        assert all(request.body["tools"] for request in server.requests), "the settings go with every call"
        kinds = {item["type"] for request in list(server.requests)[1:] for item in request.body["input"]}
        assert kinds == {"function_call_output"}
        assert server.faults == []


def test_an_edited_history_is_sent_whole() -> None:
    with loopback(default=echo) as server:
        endpoint = server.endpoint(retries=NEVER)

        async def body() -> None:
            async with spanwire.ConnectionManager(telemetry=None) as manager:
                messages = [user("a")]
                await tell(manager, endpoint, messages)
                messages[1] = said("something else")
                messages.append(user("b"))
                reply = await tell(manager, endpoint, messages)
                assert reply.text == 're "b"'
                messages.append(user("c"))
                await tell(manager, endpoint, messages)
                # and one that is shorter: the user goes back to the first question
                await tell(manager, endpoint, [user("a")])

        run(body)
        assert parents(server) == [False, False, True, False]
        assert sizes(server) == [1, 3, 1, 1]
        assert server.connections == 1


@pytest.mark.parametrize(
    ("change", "continued"),
    [({"model": "other"}, False), ({"tools": TOOLS}, True), ({"temperature": 0.5}, True)],
    ids=["model", "tools", "temperature"],
)
def test_other_settings_in_the_next_turn(change: dict[str, Any], continued: bool) -> None:
    with loopback(default=echo) as server:
        endpoint = server.endpoint(retries=NEVER)

        async def body() -> None:
            async with spanwire.ConnectionManager(telemetry=None) as manager:
                messages = [user("a")]
                await tell(manager, endpoint, messages)
                messages.append(user("b"))
                more = dict(change)
                call = spanwire.Call.chat(more.pop("model", "m"), messages, **more)
                assert (await manager.complete(endpoint, call)).text == 're "b"'

        run(body)
        assert parents(server) == [False, continued]
        assert server.requests[1].body.items() >= {"model": change.get("model", "m")}.items()


def test_two_conversations_by_turns_stay_on_their_sockets() -> None:
    with loopback(default=lambda request: msgspec.structs.replace(echo(request), prefill_s=0.05)) as server:
        endpoint = server.endpoint(retries=NEVER)

        async def body() -> None:
            async with spanwire.ConnectionManager(telemetry=None) as manager:
                one, two = [user("one")], [user("two")]
                await asyncio.gather(tell(manager, endpoint, one), tell(manager, endpoint, two))
                for turn in range(5):
                    for name, messages in (("one", one), ("two", two)) if turn % 2 else (("two", two), ("one", one)):
                        messages.append(user(f"{name} {turn}"))
                        reply = await tell(manager, endpoint, messages)
                        assert reply.text == f're "{name} {turn}"'

        run(body)
        assert server.connections == 2
        assert sizes(server) == [1] * 12
        by_socket: dict[int, set[str]] = {}
        for request in server.requests:
            by_socket.setdefault(request.connection, set()).add(request.body["input"][0]["content"][:3])
        assert sorted(map(sorted, by_socket.values())) == [["one"], ["two"]]


def test_conversations_by_turns_on_one_socket_are_right_if_not_short() -> None:
    with loopback(default=echo) as server:
        endpoint = server.endpoint(retries=NEVER)

        async def body() -> None:
            async with spanwire.ConnectionManager(telemetry=None) as manager:
                talks = {name: [user(name)] for name in ("one", "two", "three")}
                for turn in range(3):
                    for name, messages in talks.items():
                        if turn:
                            messages.append(user(f"{name} {turn}"))
                        assert (await tell(manager, endpoint, messages)).text.startswith(f're "{name}')

        run(body)
        assert server.faults == []


def test_a_parent_of_the_callers_own() -> None:
    """It goes to the socket that made it, as it is; and what follows it can be continued."""
    with loopback(default=lambda request: Script.say("ok", prefill_s=0.03)) as server:
        endpoint = server.endpoint(retries=NEVER)

        async def body() -> None:
            async with spanwire.ConnectionManager(telemetry=None) as manager:
                first, _ = await asyncio.gather(
                    tell(manager, endpoint, [user("a")]), tell(manager, endpoint, [user("x")])
                )
                for _ in range(3):
                    reply = await tell(manager, endpoint, [user("b")], previous_response_id=first.id)
                    first = reply

        run(body)
        assert server.connections == 2
        assert len({request.connection for request in list(server.requests)[2:]}) == 1
        assert sizes(server) == [1] * 5
        assert parents(server)[2:] == [True] * 3


def test_a_cut_off_answer_is_not_continued() -> None:
    """What the next turn says of it is not what the server has."""
    with loopback(Script.say("Hello there", finish_reason="length"), Script.say("ok")) as server:
        endpoint = server.endpoint(retries=NEVER)

        async def body() -> None:
            async with spanwire.ConnectionManager(telemetry=None) as manager:
                messages = [user("a")]
                await tell(manager, endpoint, messages)
                messages.append(user("b"))
                await tell(manager, endpoint, messages)

        run(body)
        assert parents(server) == [False, False]
        assert sizes(server)[1] == 3


def test_it_can_be_turned_off() -> None:
    with loopback(default=echo) as server:
        endpoint = server.endpoint(options={"continue_conversations": False})

        async def body() -> None:
            async with spanwire.ConnectionManager(telemetry=None) as manager:
                messages = [user("a")]
                for turn in range(3):
                    await tell(manager, endpoint, messages)
                    messages.append(user(f"{turn}"))

        run(body)
        assert sizes(server) == [1, 3, 5]
        assert parents(server) == [False] * 3
        assert server.connections == 1


def test_a_warm_up_without_an_answer() -> None:
    with loopback(default=echo) as server:
        endpoint = server.endpoint(retries=NEVER)

        async def body() -> None:
            async with spanwire.ConnectionManager(telemetry=None) as manager:
                system = {"role": "system", "content": "Long instructions."}
                warm = spanwire.Call.chat("m", [system], tools=TOOLS, generate=False)
                reply = await manager.complete(endpoint, warm)
                assert (reply.text, reply.finish_reason) == ("", "stop")
                assert reply.id
                messages = [system, user("a")]
                await tell(manager, endpoint, messages, tools=TOOLS)
                assert server.requests[1].body["previous_response_id"] == reply.id

        run(body)
        assert sizes(server) == [1, 1]
        assert server.requests[0].body["generate"] is False
        assert "generate" not in server.requests[1].body


@pytest.mark.parametrize("store", [None, True, False])
def test_answers_are_stored_only_if_the_call_says_so(store: bool | None) -> None:
    with loopback(default=echo) as server:

        async def body() -> None:
            async with spanwire.ConnectionManager(telemetry=None) as manager:
                messages = [user("a")]
                for _ in range(2):
                    await tell(manager, server.endpoint(), messages, **({} if store is None else {"store": store}))
                    messages.append(user("b"))

        run(body)
        assert [request.body["store"] for request in server.requests] == [bool(store)] * 2


@pytest.mark.parametrize("content", ["text", "parts", "image"])
def test_what_users_say_in_other_forms_is_continued_too(content: str) -> None:
    forms: dict[str, Any] = {
        "text": "a",
        "parts": [{"type": "text", "text": "a"}],
        "image": [
            {"type": "text", "text": "a"},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}},
        ],
    }
    with loopback(default=lambda _request: hello()) as server:

        async def body() -> None:
            async with spanwire.ConnectionManager(telemetry=None) as manager:
                messages = [{"role": "user", "content": forms[content]}]
                for _ in range(3):
                    reply = await manager.complete(server.endpoint(), spanwire.Call.chat("m", messages))
                    # LangChain keeps an answer's text as it is, others as parts
                    messages = [*messages, {"role": "assistant", "content": [{"type": "text", "text": reply.text}]}]
                    messages.append({"role": "user", "content": forms[content]})

        run(body)
        assert sizes(server) == [1, 1, 1]


# --- sockets that grow old ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when_old", ["error", "close"])
def test_the_servers_limit_is_met_without_the_caller_seeing_it(when_old: str) -> None:
    with loopback(default=echo, options={"max_turns": 2, "when_old": when_old}) as server:
        endpoint = server.endpoint(retries=NEVER)

        async def body() -> None:
            async with spanwire.ConnectionManager(telemetry=None) as manager:
                messages = [user("0")]
                for turn in range(1, 8):
                    reply = await tell(manager, endpoint, messages)
                    assert reply.text == f're "{turn - 1}"'
                    messages.append(user(f"{turn}"))

        run(body)
        assert server.connections == 4
        assert server.faults == []


def test_a_socket_is_changed_between_two_turns_before_the_server_does_it() -> None:
    with loopback(default=echo) as server:
        endpoint = server.endpoint(retries=NEVER, options={"max_age_s": 0.15})

        async def body() -> None:
            async with spanwire.ConnectionManager(telemetry=None) as manager:
                messages = [user("0")]
                await tell(manager, endpoint, messages)
                messages.append(user("1"))
                await tell(manager, endpoint, messages)
                await asyncio.sleep(0.2)
                messages.append(user("2"))
                reply = await tell(manager, endpoint, messages)
                assert reply.text == 're "2"'
                assert reply.timeline is not None
                assert len(reply.timeline.to_dict()["attempts"]) == 1

        run(body)
        assert [request.connection for request in server.requests] == [1, 1, 2]
        assert sizes(server) == [1, 1, 5]


def test_an_answer_that_outlives_the_sockets_age_is_not_cut() -> None:
    with loopback(Script.say("a b c d e f", gap_s=0.05)) as server:
        endpoint = server.endpoint(retries=NEVER, options={"max_age_s": 0.1})

        async def body() -> None:
            async with spanwire.ConnectionManager(telemetry=None) as manager:
                for _ in range(2):
                    assert (await manager.complete(endpoint, chat())).text == "a b c d e f"

        run(body)
        assert server.connections == 2
        assert not any(request.left for request in server.requests)


def connections(manager: spanwire.ConnectionManager) -> list[Any]:
    pools = [pool for state in manager._states.values() for pool in state.pools.values()]
    return [member.connection for pool in pools for member in pool.state.members]


@pytest.mark.parametrize("reset", [False, True])
def test_a_socket_that_died_between_two_turns(reset: bool) -> None:
    with loopback(default=echo) as server:
        endpoint = server.endpoint(retries=NEVER)

        async def body() -> None:
            async with spanwire.ConnectionManager(telemetry=None) as manager:
                messages = [user("0")]
                for turn in range(1, 5):
                    assert (await tell(manager, endpoint, messages)).text == f're "{turn - 1}"'
                    messages.append(user(f"{turn}"))
                    await asyncio.to_thread(server.disconnect, reset=reset)
                    await until(lambda: not any(connection.usable() for connection in connections(manager)))

        run(body)
        # A request that crossed the server's goodbye was sent again, whole.
        whole = [size for size, parent in zip(sizes(server), parents(server), strict=True) if not parent]
        assert whole == [1, 3, 5, 7]


def test_a_socket_that_dies_with_the_request_on_its_way() -> None:
    with loopback(Script.say("x"), Script(drop_after="request"), Script.say("y")) as server:
        endpoint = server.endpoint(retries=NEVER)

        async def body() -> None:
            async with spanwire.ConnectionManager(telemetry=None) as manager:
                messages = [user("0")]
                await tell(manager, endpoint, messages)
                messages.append(user("1"))
                assert (await tell(manager, endpoint, messages)).text == "y"

        run(body)
        assert parents(server) == [False, True, False]
        assert sizes(server) == [1, 1, 3]


# --- a fixed number of clients -----------------------------------------------------------------------------------------


def _queued_s(reply: spanwire.Reply) -> float:
    assert reply.timeline is not None
    assert_adds_up(reply.timeline)
    queue = reply.timeline.segments.get("queue")
    return queue.duration_s if queue is not None else 0.0


@pytest.mark.parametrize("when_full", ["503", "429", "1013", "error", "wait"])
def test_two_hundred_callers_of_a_server_for_twenty(when_full: str) -> None:
    script = Script.say("Hello", prefill_s=0.03)
    with loopback(default=lambda _request: script, options={"max_clients": 20, "when_full": when_full}) as server:
        endpoint = server.endpoint(retries=NEVER, limits=spanwire.Limits(queue_timeout_s=30))

        async def body() -> None:
            async with spanwire.ConnectionManager(telemetry=None) as manager:
                replies = await asyncio.gather(*(manager.complete(endpoint, chat()) for _ in range(200)))
            assert {reply.text for reply in replies} == {"Hello"}
            waits = sorted(map(_queued_s, replies))
            assert waits[150] > 0.05
            assert waits[-1] < 20

        run(body)
        assert len(server.requests) == 200
        assert server.connections <= 200 + 60, "no storm of attempts"
        assert server.faults == []


@pytest.mark.parametrize("when_full", ["503", "error"])
def test_two_hundred_callers_in_ten_managers(when_full: str) -> None:
    script = Script.say("Hello", prefill_s=0.02)
    with loopback(default=lambda _request: script, options={"max_clients": 20, "when_full": when_full}) as server:
        endpoint = server.endpoint(retries=NEVER, limits=spanwire.Limits(queue_timeout_s=40))

        async def one() -> list[spanwire.Reply]:
            async with spanwire.ConnectionManager(telemetry=None) as manager:
                return await asyncio.gather(*(manager.complete(endpoint, chat()) for _ in range(20)))

        async def body() -> None:
            found = await asyncio.gather(*(one() for _ in range(10)))
            replies = [reply for some in found for reply in some]
            assert len(replies) == 200
            assert {reply.text for reply in replies} == {"Hello"}
            assert max(map(_queued_s, replies)) > 0.02

        run(body)
        assert len(server.requests) == 200
        assert server.connections < 600, "no storm of attempts"


def test_our_own_slots_come_first() -> None:
    script = Script.say("Hello", prefill_s=0.02)
    with loopback(default=lambda _request: script, options={"max_clients": 4, "when_full": "503"}) as server:
        endpoint = server.endpoint(retries=NEVER, limits=spanwire.Limits(max_concurrent=4))

        async def body() -> None:
            async with spanwire.ConnectionManager(telemetry=None) as manager:
                replies = await asyncio.gather(*(manager.complete(endpoint, chat()) for _ in range(40)))
            for reply in replies[8:]:
                assert reply.timeline is not None
                assert "local" in reply.timeline.segments["queue"].parts

        run(body)
        assert server.connections == 4


def test_c21_the_wait_for_a_slot_eats_no_other_limit() -> None:
    slow = Script.say("a", prefill_s=0.3)
    with loopback(default=lambda _request: slow) as server:
        endpoint = server.endpoint(
            retries=NEVER,
            limits=spanwire.Limits(max_concurrent=2, queue_timeout_s=5),
            timeouts=spanwire.Timeouts(first_content_s=0.55, idle_s=0.55),
        )

        async def body() -> None:
            async with spanwire.ConnectionManager(telemetry=None) as manager:
                replies = await asyncio.gather(*(manager.complete(endpoint, chat(f"m{n}")) for n in range(5)))
                waits = list(map(_queued_s, replies))
                assert [request.model for request in server.requests] == [f"m{n}" for n in range(5)]
                for wait, least in zip(waits, (0, 0, 0.28, 0.28, 0.58), strict=True):
                    assert wait >= least
                assert max(waits[:2]) < min(waits[2:])
                holders = [asyncio.create_task(manager.complete(endpoint, chat())) for _ in range(2)]
                await wait_for(server, lambda s: len(s.requests) == 7)
                waiting = [asyncio.create_task(manager.complete(endpoint, chat())) for _ in range(3)]
                await asyncio.sleep(0.02)
                for task in waiting:
                    task.cancel()
                await asyncio.gather(*waiting, return_exceptions=True)
                await asyncio.gather(*holders)
                assert _queued_s(await manager.complete(endpoint, chat())) < 0.25

        run(body)
        assert server.connections == 2


def test_c21_a_call_inside_another_ones_loop_is_refused_in_time() -> None:
    with loopback(default=lambda _request: hello(gap_s=0.001)) as server:
        endpoint = server.endpoint(retries=NEVER, limits=spanwire.Limits(max_concurrent=1, queue_timeout_s=0.2))

        async def body() -> None:
            async with spanwire.ConnectionManager(telemetry=None) as manager:
                async with manager.stream(endpoint, chat("outer")) as stream:
                    async for chunk in stream:
                        if chunk.text:
                            with pytest.raises(errors.QueueTimeout) as caught:
                                await manager.complete(endpoint, chat("inner"))
                            assert caught.value.phase == "queue"
                            assert "outer for 0." in str(caught.value)
                            break
                    await read(stream)
                assert stream.reply.text == "Hello from the loopback server."

        run(body)


def test_a_full_server_without_a_limit_for_the_wait_is_an_error_at_once() -> None:
    """Nothing of ours is there that could be given back."""
    with loopback(hello(), options={"max_clients": 0, "when_full": "503", "retry_after": "7"}) as server:

        async def body() -> None:
            async with spanwire.ConnectionManager(telemetry=None) as manager:
                begin = time.monotonic()
                with pytest.raises(errors.Overloaded) as caught:
                    await manager.complete(server.endpoint(retries=NEVER), chat())
                assert caught.value.retry_after_s == 7
                assert time.monotonic() - begin < 3

        run(body)
        assert server.connections == 1


def test_a_server_that_stays_full_is_a_queue_timeout() -> None:
    with loopback(hello(), options={"max_clients": 0, "when_full": "503"}) as server:

        async def body() -> None:
            async with spanwire.ConnectionManager(telemetry=None) as manager:
                endpoint = server.endpoint(retries=NEVER, limits=spanwire.Limits(queue_timeout_s=0.5))
                with pytest.raises(errors.SpanwireError) as caught:
                    await manager.complete(endpoint, chat())
                assert isinstance(caught.value, (errors.QueueTimeout, errors.Overloaded))
                assert caught.value.timeline is not None
                assert_adds_up(caught.value.timeline)
                assert caught.value.timeline.segments["queue"].duration_s > 0.3

        run(body)
        assert server.connections < 10


# --- many -------------------------------------------------------------------------------------------------------------------


def test_many_conversations_at_once_get_their_own_answers() -> None:
    with loopback(default=echo) as server:
        endpoint = server.endpoint(retries=NEVER, limits=spanwire.Limits(max_concurrent=8))

        async def talk(manager: spanwire.ConnectionManager, name: str) -> None:
            messages = [user(f"{name} 0")]
            for turn in range(6):
                assert (await tell(manager, endpoint, messages)).text == f're "{name} {turn}"'
                messages.append(user(f"{name} {turn + 1}"))

        async def body() -> None:
            async with spanwire.ConnectionManager(telemetry=None) as manager:
                await asyncio.gather(*(talk(manager, f"talk {n}") for n in range(25)))

        run(body)
        assert server.connections <= 8
        assert len(server.requests) == 150
        assert server.faults == []


def test_random_interrupts_leave_no_shifted_answer_and_no_socket() -> None:
    import random

    dice = random.Random(7)

    def script(request: Any) -> Script:
        return Script.say(f"to {request.model} and some more words", gap_s=0.002, prefill_s=0.002)

    with loopback(default=script) as server:
        endpoint = server.endpoint(retries=NEVER, limits=spanwire.Limits(max_concurrent=6))

        async def call(manager: spanwire.ConnectionManager, n: int) -> None:
            async with manager.stream(endpoint, chat(f"m{n}")) as stream:
                text = ""
                async for chunk in stream:
                    text += chunk.text
                    if n % 3 == 1 and text:
                        return
                assert text == f"to m{n} and some more words"

        async def body() -> None:
            async with spanwire.ConnectionManager(telemetry=None) as manager:
                tasks = [asyncio.create_task(call(manager, n)) for n in range(120)]
                for task in tasks[::4]:
                    await asyncio.sleep(dice.random() * 0.01)
                    task.cancel()
                found = await asyncio.gather(*tasks, return_exceptions=True)
                bad = [one for one in found if one is not None and not isinstance(one, asyncio.CancelledError)]
                assert bad == []
            await wait_for(server, lambda s: s.open_connections == 0)

        run(body)
        assert server.faults == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_makes_sockets_of_its_own() -> None:
    with loopback(default=echo) as server:
        endpoint = server.endpoint(retries=NEVER)
        manager = spanwire.SyncConnectionManager(telemetry=None)
        assert manager.complete(endpoint, chat("m")).text
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                reply = manager.complete(endpoint, chat("m"))
                os.write(writing, reply.text.encode())
                manager.close()
                code = 0
            finally:
                os._exit(code)
        os.close(writing)
        text = b""
        while more := os.read(reading, 1000):
            text += more
        os.close(reading)
        assert os.waitpid(child, 0)[1] == 0
        assert text == b're "Say hello"'
        assert manager.complete(endpoint, chat("m")).text
        manager.close()
        server.wait_for(lambda s: s.open_connections == 0)
        assert [request.connection for request in server.requests] == [1, 2, 1]


# --- what the handshake sends parts the sockets ---------------------------------------------------------------------------


def test_endpoints_that_differ_in_what_the_handshake_says_share_no_socket() -> None:
    transport = WebSocketTransport()
    base = spanwire.Endpoint("ws://h:1/v1", proxy=None, api_key="a")
    same = [
        spanwire.Endpoint("ws://h:1/v1/", proxy=None, api_key="a"),
        spanwire.Endpoint("ws://h:1/v1", proxy=None, api_key="a", retries=NEVER),
        spanwire.Endpoint("ws://h:1/v1", proxy=None, api_key="a", timeouts=spanwire.Timeouts(total_s=3)),
    ]
    other = [
        spanwire.Endpoint("ws://h:1/v2", proxy=None, api_key="a"),
        spanwire.Endpoint("ws://h:1/v1?x=1", proxy=None, api_key="a"),
        spanwire.Endpoint("ws://h:1/v1", proxy=None, api_key="b"),
        spanwire.Endpoint("ws://h:1/v1", proxy=None, api_key="a", headers={"x": "1"}),
        spanwire.Endpoint("wss://h:1/v1", proxy=None, api_key="a"),
        spanwire.Endpoint("ws://h:1/v1", proxy="http://p:1", api_key="a"),
        spanwire.Endpoint("ws://h:1/v1", proxy=None, api_key="a", options={"subprotocols": ["x"]}),
    ]
    assert {transport.key(endpoint) for endpoint in same} == {transport.key(base)}
    assert len({transport.key(endpoint) for endpoint in [base, *other]}) == len(other) + 1


@pytest.mark.parametrize("dialect", [None, "responses"])
@pytest.mark.parametrize("warmed", [False, True])
def test_an_address_with_the_path_of_the_schema_is_refused_with_advice(dialect: str | None, warmed: bool) -> None:
    with loopback(hello()) as server:

        async def body() -> None:
            async with spanwire.ConnectionManager(telemetry=None) as manager:
                endpoint = spanwire.Endpoint(f"{server.url}/responses", proxy=None, dialect=dialect)
                with pytest.raises(errors.ConfigurationError, match="remove '/responses' from its end"):
                    await (manager.warm(endpoint) if warmed else manager.complete(endpoint, chat()))

        run(body)
        assert server.connections == 0


def test_a_key_that_is_asked_for_goes_with_the_handshake() -> None:
    keys = iter(["k1", "k2", "k3"])

    async def fine(peer: Peer) -> None:
        await peer.upgrade()
        while True:
            await peer.request()
            await peer.send(answer("Hello"))

    async def body() -> None:
        async with raw_server(fine) as server, spanwire.ConnectionManager(telemetry=None) as manager:
            endpoint = server.endpoint(api_key=lambda: next(keys))
            await manager.complete(endpoint, chat())
            await manager.complete(endpoint, chat())
            keys_sent = [peer.head.partition(b"Bearer ")[2][:2] for peer in server.peers]
            assert keys_sent[0] == b"k1"
            assert len(keys_sent) == 1, "the key goes with the handshake, and with no call after it"

    run(body)


def test_warm() -> None:
    with loopback(hello()) as server:

        async def body() -> None:
            async with spanwire.ConnectionManager(telemetry=None) as manager:
                await manager.warm(server.endpoint(), 3)
                assert server.connections == 3
                timelines = await asyncio.gather(*(manager.complete(server.endpoint(), chat()) for _ in range(3)))
                for reply in timelines:
                    assert reply.timeline is not None
                    assert "handshake" not in reply.timeline.segments

        run(body)
        assert server.connections == 3
