"""``dialect="responses"`` over the loopback server, and the server under OpenAI's own client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx2
import msgspec
import openai
import pytest
from spanwire_sse.responses import OpenAIResponses

import spanwire
from spanwire.calls import Usage
from spanwire.errors import BadRequest, ConfigurationError, RateLimited, ServerError, Truncated
from spanwire.testing import LoopbackServer, Script, ScriptedTool
from spanwire.testing.responses_events import error_event
from spanwire.wire.openai_responses import answer_items

USER = {"role": "user", "content": "Say hello"}
CALL = spanwire.Call.chat("m", [USER])
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
FULL = Script(
    reasoning=("I", " think"),
    tokens=("Hello", " you"),
    tool_calls=(ScriptedTool("add", ['{"a":', "1}"], id="call_a"), ScriptedTool("noop", id="call_b")),
    usage=Usage(7, 11, 18, 3, 2),
)


@pytest.fixture
def server() -> Iterator[LoopbackServer]:
    with LoopbackServer() as running:
        yield running
        assert running.faults == []


def stream(
    server: LoopbackServer, call: spanwire.Call = CALL, **more: Any
) -> tuple[list[spanwire.Chunk], spanwire.Reply]:
    endpoint = server.endpoint(dialect="responses", **more)
    with spanwire.SyncConnectionManager() as manager, manager.stream(endpoint, call) as answer:
        return [*answer], answer.reply


def complete(server: LoopbackServer, call: spanwire.Call = CALL, **more: Any) -> spanwire.Reply:
    with spanwire.SyncConnectionManager() as manager:
        return manager.complete(server.endpoint(dialect="responses", **more), call)


def written(events: list[dict[str, Any]], *, named: bool = True) -> bytes:
    """As an event stream."""
    name = "event: {}\n" if named else ""
    return b"".join(
        name.format(event["type"]).encode() + b"data: %b\n\n" % msgspec.json.encode(event) for event in events
    )


# --- the dialect ------------------------------------------------------------------------------------------------------


def test_what_is_sent(server: LoopbackServer) -> None:
    server.script(Script.say("Hello"))
    stream(server, spanwire.Call.chat("m", [USER], max_tokens=5, tools=[TOOL]), api_key="k-1")
    (request,) = server.requests
    assert (request.method, request.path) == ("POST", "/v1/responses")
    assert request.headers["authorization"] == "Bearer k-1"
    assert request.body == {
        "model": "m",
        "input": [{"type": "message", "role": "user", "content": "Say hello"}],
        "store": False,
        "max_output_tokens": 5,
        "tools": [{"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}],
        "stream": True,
    }
    complete(server)
    assert "stream" not in server.requests[-1].body


def test_times_are_asked_for_without_fields_that_the_schema_lacks(server: LoopbackServer) -> None:
    server.script(Script.say("Hello"))
    stream(server, server_timing="ask")
    assert server.requests[-1].body.keys() == {"model", "input", "store", "stream"}


def test_an_answer_streamed_and_whole(server: LoopbackServer) -> None:
    server.script(FULL)
    chunks, streamed = stream(server)
    whole = complete(server)
    assert [chunk.text for chunk in chunks if chunk.text] == ["Hello", " you"]
    for reply in (streamed, whole):
        assert (reply.text, reply.reasoning, reply.finish_reason) == ("Hello you", "I think", "tool_calls")
        assert [(call.id, call.name, call.arguments) for call in reply.tool_calls] == [
            ("call_a", "add", '{"a":1}'),
            ("call_b", "noop", "{}"),
        ]
        assert reply.usage == FULL.usage
        assert reply.model == "m"
        assert reply.id is not None
        assert reply.id.startswith("resp_")


def test_a_tool_loop(server: LoopbackServer) -> None:
    server.script(Script(tool_calls=FULL.tool_calls[:1]))
    server.script(Script.say("It is 1."))
    first = complete(server, spanwire.Call.chat("m", [USER], tools=[TOOL]))
    (call,) = first.tool_calls
    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        ],
    }
    result = {"role": "tool", "tool_call_id": call.id, "content": "1"}
    _, reply = stream(server, spanwire.Call.chat("m", [USER, message, result], tools=[TOOL]))
    assert reply.text == "It is 1."
    before, after = (request.body["input"] for request in server.requests)
    assert after == [
        *before,
        *answer_items(first.text, first.tool_calls),
        {"type": "function_call_output", "call_id": "call_a", "output": "1"},
    ]


def test_embeddings_are_those_of_the_chat_dialect(server: LoopbackServer) -> None:
    with spanwire.SyncConnectionManager() as manager:
        found = manager.embed(server.endpoint(dialect="responses"), spanwire.Call.embeddings("e", ["a", "b"]))
    assert len(found.vectors) == 2
    assert server.requests[-1].path == "/v1/embeddings"


def test_what_cannot_be_said_is_not_sent(server: LoopbackServer) -> None:
    call = spanwire.Call.chat("m", [USER], seed=1)
    for ask in (stream, complete):
        with pytest.raises(ConfigurationError, match="seed") as caught:
            ask(server, call)
        assert caught.value.endpoint == server.endpoint().address
    with pytest.raises(ConfigurationError, match="cannot be written as JSON"):
        stream(server, spanwire.Call.chat("m", [USER], metadata={"a": object()}))
    with pytest.raises(ConfigurationError, match="base URL"):
        OpenAIResponses().encode(CALL, spanwire.Endpoint("http://h/v1/responses"), streamed=True)
    assert server.requests == []


@pytest.mark.parametrize(
    ("finish", "reason"), [("length", "length"), ("content_filter", "content_filter"), ("stop", "stop")]
)
def test_finish_reasons(server: LoopbackServer, finish: str, reason: str) -> None:
    server.script(Script(tokens=("a",), finish_reason=finish))
    assert stream(server)[1].finish_reason == reason
    assert complete(server).finish_reason == reason


def test_a_response_that_fails_in_the_end(server: LoopbackServer) -> None:
    server.script(Script(tokens=("a", "b"), finish_reason="error"))
    for ask in (stream, complete):
        with pytest.raises(ServerError, match="as scripted") as caught:
            ask(server, retries=spanwire.Retries(max_attempts=1))
        assert (caught.value.code, caught.value.status) == ("server_error", 200)
        if ask == stream:
            assert caught.value.reply is not None
            assert caught.value.reply.text == "ab"


@pytest.mark.parametrize("nested", [True, False])
def test_an_error_event_after_content(server: LoopbackServer, nested: bool) -> None:
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": {"id": "resp_1"}},
        {"type": "response.output_text.delta", "delta": "a"},
        error_event("too fast", code="rate_limit_exceeded", nested=nested),
    ]
    server.script(Script(writes=[written(events)]))
    with pytest.raises(RateLimited, match="too fast") as caught:
        stream(server)
    assert (caught.value.code, caught.value.status) == ("rate_limit_exceeded", 200)
    assert caught.value.reply is not None
    assert caught.value.reply.text == "a"
    assert len(server.requests) == 1, "content was delivered, so it may not be tried again"


def test_an_error_status_keeps_the_servers_code(server: LoopbackServer) -> None:
    body = b'{"error":{"message":"no","type":"invalid_request_error","code":"previous_response_not_found"}}'
    server.script(Script(status=404, body=body))
    with pytest.raises(BadRequest) as caught:
        complete(server)
    assert (caught.value.status, caught.value.code, caught.value.message) == (404, "previous_response_not_found", "no")


def test_retry_after_of_a_refusal(server: LoopbackServer) -> None:
    server.script(Script(status=429, headers={"Retry-After": "100"}))
    with pytest.raises(RateLimited) as caught:
        stream(server)
    assert caught.value.retry_after_s == 100


@pytest.mark.parametrize("named", [True, False])
def test_streams_of_other_servers(server: LoopbackServer, named: bool) -> None:
    """Without names, with ``[DONE]``, with nothing but the end, or a whole body where a stream was asked for."""
    message = {"type": "message", "id": "m", "content": [{"type": "output_text", "text": "ab"}]}
    done = {"type": "response.completed", "response": {"id": "r", "status": "completed", "output": [message]}}
    delta = {"type": "response.output_text.delta", "item_id": "m", "output_index": 0, "content_index": 0, "delta": "a"}
    for body in (
        written([done], named=named),
        written([delta, done], named=named) + b"data: [DONE]\n\n",
        written([{"type": "keepalive"}, delta, done], named=named) + written([delta], named=named),
        msgspec.json.encode(done["response"]),
    ):
        server.script(Script(writes=[body]))
        reply = stream(server)[1]
        assert (reply.text, reply.finish_reason, reply.id) == ("ab", "stop", "r")


def test_a_stream_ends_at_its_terminal_event(server: LoopbackServer) -> None:
    """The message on the connection goes on for longer than the call may take."""
    server.script(Script(tokens=("a",), end_s=30))
    assert stream(server, timeouts=spanwire.Timeouts(total_s=10))[1].text == "a"
    message = {"type": "message", "content": [{"type": "output_text", "text": "ab"}]}
    done = {"type": "response.completed", "response": {"output": [message]}}
    server.script(Script(writes=[written([done])], end_s=30))
    reply = stream(server, timeouts=spanwire.Timeouts(total_s=10))[1]
    assert reply.text == "ab"
    assert reply.timeline is not None
    assert reply.timeline.first_content_s is not None


def test_done_is_not_the_end_of_an_answer(server: LoopbackServer) -> None:
    server.script(
        Script(writes=[written([{"type": "response.output_text.delta", "delta": "a"}]) + b"data: [DONE]\n\n"])
    )
    with pytest.raises(Truncated) as caught:
        stream(server)
    assert caught.value.reply is not None
    assert caught.value.reply.text == "a"


def test_the_first_event_is_the_first_chunk_in_the_timeline(server: LoopbackServer) -> None:
    server.script(Script(tokens=("a", "b"), prefill_s=0.05, gap_s=0.01))
    timeline = stream(server)[1].timeline
    assert timeline is not None
    assert timeline.first_chunk_s is not None
    assert timeline.first_content_s is not None
    assert timeline.first_content_s - timeline.first_chunk_s > 0.04
    server.script(Script())
    timeline = stream(server)[1].timeline
    assert timeline is not None
    assert timeline.first_chunk_s is not None
    assert timeline.first_content_s is None


@pytest.mark.parametrize("dialect", ["vllm", "llama.cpp", "groq", "openai", "envoy", "server-timing"])
@pytest.mark.parametrize("streamed", [True, False])
def test_what_the_server_says_of_its_time_is_heard(server: LoopbackServer, dialect: str, streamed: bool) -> None:
    server.script(Script(tokens=("a", "b"), queue_s=0.03, prefill_s=0.03, gap_s=0.03, server_timing=dialect))
    reply = stream(server)[1] if streamed else complete(server)
    assert reply.timeline is not None
    told = reply.timeline.to_dict()
    assert told["server_timing"]["raw"], told
    if dialect == "vllm":
        assert told["segments"]["queue"]["parts"]["server"]["source"] == "reported"
        assert told["segments"]["queue"]["parts"]["server"]["duration_s"] >= 0.029


# --- the loopback server, judged by OpenAI's client -------------------------------------------------------------------


def client(server: LoopbackServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url, api_key="k", max_retries=0, http_client=httpx2.Client(trust_env=False))


def test_openais_client_reads_a_whole_answer(server: LoopbackServer) -> None:
    server.script(FULL)
    with client(server) as sdk:
        response = sdk.responses.create(model="m", input="Say hello")
    assert response.output_text == "Hello you"
    assert response.status == "completed"
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (7, 11, 18)
    assert response.usage.input_tokens_details.cached_tokens == 3
    assert response.usage.output_tokens_details.reasoning_tokens == 2


def test_openais_client_reads_a_stream(server: LoopbackServer) -> None:
    server.script(FULL)
    with client(server) as sdk:
        events = [*sdk.responses.create(model="m", input="Say hello", stream=True)]
        # This one builds the response from the events, and fails where they do not fit together.
        with sdk.responses.stream(model="m", input="Say hello") as answer:
            text = "".join(event.delta for event in answer if event.type == "response.output_text.delta")
            final = answer.get_final_response()
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert [event.type for event in events][:: len(events) - 1] == ["response.created", "response.completed"]
    assert text == final.output_text == "Hello you"
    calls = [item for item in final.output if item.type == "function_call"]
    assert [(call.call_id, call.name, call.arguments) for call in calls] == [
        ("call_a", "add", '{"a":1}'),
        ("call_b", "noop", "{}"),
    ]


def test_openais_client_hears_what_is_wrong(server: LoopbackServer) -> None:
    server.script(Script(status=429))
    server.script(Script(tokens=("a",), finish_reason="length"))
    with client(server) as sdk:
        with pytest.raises(openai.RateLimitError):
            sdk.responses.create(model="m", input="Say hello")
        response = sdk.responses.create(model="m", input="Say hello")
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"
        with pytest.raises(openai.BadRequestError, match="input must be"):
            sdk.responses.create(model="m")
        with pytest.raises(openai.BadRequestError, match="messages is no parameter"):
            sdk.responses.create(model="m", input="x", extra_body={"messages": []})


def test_many_streams_on_one_loop(server: LoopbackServer) -> None:
    server.script(Script(tokens=[f" {n}" for n in range(50)], gap_s=0.001))

    async def main() -> set[str]:
        async with spanwire.ConnectionManager() as manager:
            endpoint = server.endpoint(dialect="responses")

            async def one() -> str:
                async with manager.stream(endpoint, CALL) as answer:
                    return "".join([chunk.text async for chunk in answer])

            return {*await asyncio.gather(*(one() for _ in range(20)))}

    assert asyncio.run(main()) == {"".join(f" {n}" for n in range(50))}
