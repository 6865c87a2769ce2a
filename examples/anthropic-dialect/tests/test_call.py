"""Calls over HTTP, as a user makes them; and Anthropic's own library on the same server, as the oracle of that."""

from __future__ import annotations

from typing import Any

import pytest
import server
from spanwire_anthropic.request import body_of

import spanwire
from spanwire.errors import AuthenticationFailed, Overloaded
from spanwire.testing import LoopbackServer, Script, ScriptedTool

CALL = spanwire.Call.chat(
    "claude-test", [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say hello"}]
)
TOOLS = (ScriptedTool("search", ['{"q', '": "a"}'], id="toolu_1"), ScriptedTool("noop", id="toolu_2"))
SCRIPT = Script(reasoning=["Hm", "."], tokens=["Hello", " there"], tool_calls=TOOLS)


def serving(script: Script) -> LoopbackServer:
    return LoopbackServer(default=server.answers(script))


def origin(server: LoopbackServer) -> str:
    return server.url.removesuffix("/v1")


def endpoint(server: LoopbackServer) -> spanwire.Endpoint:
    return spanwire.Endpoint(origin(server), dialect="anthropic", api_key="sk-ant-1", proxy=None)


def test_a_stream_and_a_whole_answer_over_one_connection() -> None:
    with serving(SCRIPT) as loopback, spanwire.SyncConnectionManager() as manager:
        with manager.stream(endpoint(loopback), CALL) as stream:
            text = "".join(chunk.text for chunk in stream)
        print(stream.timeline)
        whole = manager.complete(endpoint(loopback), CALL)
    assert text == "Hello there"
    for reply in (stream.reply, whole):
        assert (reply.text, reply.reasoning, reply.finish_reason) == ("Hello there", "Hm.", "tool_calls")
        tools = [(tool.id, tool.name, tool.arguments) for tool in reply.tool_calls]
        assert tools == [("toolu_1", "search", '{"q": "a"}'), ("toolu_2", "noop", "{}")]
        assert (reply.id, reply.model) == ("msg_1", "claude-test")
        assert reply.usage is not None
        assert reply.usage.input_tokens == 7
    assert loopback.connections == 1
    assert stream.timeline.outcome == "completed"
    request, _ = loopback.requests
    assert request.path == "/v1/messages"
    assert request.headers["x-api-key"] == "sk-ant-1"
    assert request.headers["anthropic-version"] == "2023-06-01"
    assert "authorization" not in request.headers
    assert request.body["system"] == [{"type": "text", "text": "Be brief."}]


@pytest.mark.parametrize(("status", "kind"), [(401, AuthenticationFailed), (529, Overloaded)])
def test_a_refusal(status: int, kind: type[Exception]) -> None:
    never = spanwire.Retries(max_attempts=1)
    with serving(Script(status=status)) as loopback, spanwire.SyncConnectionManager() as manager:
        with pytest.raises(kind, match="the script says so"):
            manager.complete(endpoint(loopback), CALL, retries=never)


def test_anthropics_own_library_reads_the_same_of_this_server() -> None:
    anthropic = pytest.importorskip("anthropic", reason="pip install -e '.[oracle]'")
    messages = [{"role": "user", "content": "Say hello"}]
    with serving(SCRIPT) as loopback:
        with anthropic.Anthropic(base_url=origin(loopback), api_key="sk-ant-1", max_retries=0) as client:
            whole = client.messages.create(model="claude-test", max_tokens=10, messages=messages)
            with client.messages.stream(model="claude-test", max_tokens=10, messages=messages) as stream:
                streamed = stream.get_final_message()
    for message in (whole, streamed):
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
        thinking, text, search, noop = message.content
        assert (thinking.thinking, text.text) == ("Hm.", "Hello there")
        assert (search.id, search.input, noop.input) == ("toolu_1", {"q": "a"}, {})
        assert message.stop_reason == "tool_use"
        assert message.usage.input_tokens == 7


def test_anthropics_own_library_knows_every_field_that_is_sent() -> None:
    types = pytest.importorskip("anthropic.types", reason="pip install -e '.[oracle]'")
    from pydantic import ConfigDict, TypeAdapter, with_config

    def check(kind: Any, value: dict[str, Any]) -> None:
        TypeAdapter(with_config(ConfigDict(extra="forbid"))(kind)).validate_python(value)

    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
    call = spanwire.Call.chat(
        "claude-test",
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]},
            {"role": "assistant", "content": "Ah.", "tool_calls": [{"id": "c1", "function": {"name": "f"}}]},
            {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        ],
        tools=[tool],
        tool_choice="required",
        stop=["END"],
        reasoning_effort="low",
        user="u1",
    )
    body = body_of(call, max_tokens=10, streamed=False)
    check(types.message_create_params.MessageCreateParamsNonStreaming, body)
    kinds = {
        "text": types.TextBlockParam,
        "image": types.ImageBlockParam,
        "tool_use": types.ToolUseBlockParam,
        "tool_result": types.ToolResultBlockParam,
    }
    blocks = [block for message in body["messages"] for block in message["content"]]
    assert {block["type"] for block in blocks} == set(kinds)
    for block in blocks:
        check(kinds[block["type"]], block)
    (sent,) = body["tools"]
    check(types.ToolParam, sent)
