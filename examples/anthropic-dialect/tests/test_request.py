"""Calls in OpenAI's shape, and what is sent for them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from spanwire_anthropic import MessagesCodec
from spanwire_anthropic.request import body_of

import spanwire
from spanwire.errors import ConfigurationError

ENDPOINT = spanwire.Endpoint("https://api.anthropic.com")
ASK = {"role": "user", "content": "Weather?"}
PIXEL = "iVBORw0KGgo="


def body(*messages: dict[str, Any], **parameters: Any) -> dict[str, Any]:
    return body_of(spanwire.Call.chat("m", list(messages) or [ASK], **parameters), max_tokens=4096, streamed=False)


def test_path_version_and_key() -> None:
    codec = MessagesCodec()
    call = spanwire.Call.chat("m", [ASK])
    path, data, headers = codec.encode(call, ENDPOINT, streamed=True)
    assert (path, headers) == ("/v1/messages", {"anthropic-version": "2023-06-01"})
    assert json.loads(data)["stream"] is True
    assert "stream" not in json.loads(codec.encode(call, ENDPOINT, streamed=False).body)
    assert codec.credentials("sk-ant-1") == {"x-api-key": "sk-ant-1"}
    with_version = spanwire.Endpoint("https://h/v1", options={"anthropic_version": "2030-01-01", "max_tokens": 7})
    path, data, headers = codec.encode(call, with_version, streamed=False)
    assert (path, headers) == ("/messages", {"anthropic-version": "2030-01-01"})
    assert json.loads(data)["max_tokens"] == 7


def test_the_systems_words_are_apart() -> None:
    found = body({"role": "system", "content": "Be brief."}, ASK, {"role": "developer", "content": "In French."})
    assert found["system"] == [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "In French."}]
    assert found["messages"] == [{"role": "user", "content": [{"type": "text", "text": "Weather?"}]}]


@pytest.mark.parametrize(
    ("parameters", "limit"), [({}, 4096), ({"max_tokens": 5}, 5), ({"max_completion_tokens": 6, "max_tokens": 5}, 6)]
)
def test_a_limit_of_tokens_is_always_sent(parameters: dict[str, int], limit: int) -> None:
    found = body(**parameters)
    assert found["max_tokens"] == limit
    assert "max_completion_tokens" not in found


def test_pictures_by_url_and_as_bytes_and_documents() -> None:
    parts = [
        {"type": "text", "text": "What is this?", "cache_control": {"type": "ephemeral"}},
        {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}},
        {"type": "file", "file": {"file_data": f"data:application/pdf;base64,{PIXEL}"}},
        {"type": "text", "text": ""},
    ]
    (turn,) = body({"role": "user", "content": parts})["messages"]
    assert turn["content"] == [
        parts[0],
        {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}},
        {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": PIXEL}},
    ]


def test_tool_calls_and_their_results() -> None:
    def tool(number: int, arguments: str) -> dict[str, Any]:
        return {"id": f"c{number}", "type": "function", "function": {"name": "f", "arguments": arguments}}

    found = body(
        ASK,
        {"role": "assistant", "content": None, "tool_calls": [tool(1, '{"city": "Oslo"}'), tool(2, "")]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "sun"}]},
        {"role": "assistant", "content": "Rain and sun."},
    )
    assert [turn["role"] for turn in found["messages"]] == ["user", "assistant", "user", "assistant"]
    assert found["messages"][1]["content"] == [
        {"type": "tool_use", "id": "c1", "name": "f", "input": {"city": "Oslo"}},
        {"type": "tool_use", "id": "c2", "name": "f", "input": {}},
    ]
    # The results of one turn's calls have to be in one turn.
    assert found["messages"][2]["content"] == [
        {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "rain"}]},
        {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": "sun"}]},
    ]


def test_thinking_goes_back_with_its_signature() -> None:
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
    found = body(ASK, {"role": "assistant", "content": "Yes.", "thinking_blocks": [thought]}, ASK)
    assert found["messages"][1]["content"] == [thought, {"type": "text", "text": "Yes."}]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("auto", {"type": "auto"}),
        ("none", {"type": "none"}),
        ("required", {"type": "any"}),
        ({"type": "function", "function": {"name": "f"}}, {"type": "tool", "name": "f"}),
        ({"type": "any"}, {"type": "any"}),
    ],
)
def test_tools_and_which_to_take(choice: Any, expected: dict[str, Any]) -> None:
    function = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}, "strict": True}
    search = {"type": "web_search_20250305", "name": "web_search"}
    found = body(tools=[{"type": "function", "function": function}, search], tool_choice=choice)
    schema = {"type": "object", "properties": {}}
    assert found["tools"] == [{"name": "f", "description": "d", "input_schema": schema, "strict": True}, search]
    assert found["tool_choice"] == expected


def test_other_parameters() -> None:
    schema = {"type": "object"}
    found = body(
        stop="END",
        n=1,
        stream_options={"include_usage": True},
        parallel_tool_calls=False,
        reasoning_effort="high",
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        user="u1",
        temperature=0.5,
        top_k=3,
        thinking={"type": "adaptive"},
    )
    del found["model"], found["messages"], found["max_tokens"]
    assert found == {
        "stop_sequences": ["END"],
        "tool_choice": {"disable_parallel_tool_use": True, "type": "auto"},
        "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": schema}},
        "metadata": {"user_id": "u1"},
        "temperature": 0.5,
        "top_k": 3,
        "thinking": {"type": "adaptive"},
    }


@pytest.mark.parametrize(
    ("messages", "parameters", "words"),
    [
        ([{"role": "robot", "content": "x"}], {}, r"messages\[0\]: .* no role 'robot'"),
        ([ASK, {"role": "tool", "content": "x"}], {}, r"messages\[1\]: .* tool_call_id"),
        ([{"role": "user", "content": 5}], {}, r"messages\[0\]: content must be text"),
        ([{"role": "user", "content": [5]}], {}, r"content\[0\] must be a mapping"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], {}, "does not take"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], {}, "no image_url"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "data:secret"}]}], {}, "base64"),
        ([{"role": "user", "content": [{"type": "file", "file": {"file_id": "f"}}]}], {}, "file_data"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}], {}, "no JSON object"),
        ([ASK], {"tool_choice": "sometimes"}, "tool_choice"),
        ([ASK], {"response_format": {"type": "json_object"}}, "response_format"),
        ([ASK], {"metadata": {"x": object()}}, "cannot be written as JSON"),
    ],
)
def test_what_it_has_no_words_for_is_refused(
    messages: list[dict[str, Any]], parameters: dict[str, Any], words: str
) -> None:
    call = spanwire.Call.chat("m", messages, **parameters)
    with pytest.raises(ConfigurationError, match=words) as caught:
        MessagesCodec().encode(call, ENDPOINT, streamed=False)
    assert "secret" not in str(caught.value)
    assert caught.value.endpoint == ENDPOINT.address
