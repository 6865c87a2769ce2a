"""Chat calls as Responses requests: everything that can be said is said, and what cannot is refused by name."""

from __future__ import annotations

import json
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat.completion_create_params import CompletionCreateParamsBase
from openai.types.responses import ResponseInputItemParam
from openai.types.responses.response_create_params import ResponseCreateParamsBase, ResponseCreateParamsNonStreaming
from pydantic import TypeAdapter

from spanwire.calls import ToolCall
from spanwire.errors import ConfigurationError
from spanwire.wire.openai_responses import answer_items, begins_with, custom_tools, encode_responses, input_items

_ITEM: TypeAdapter[Any] = TypeAdapter(ResponseInputItemParam)
_REQUEST: TypeAdapter[Any] = TypeAdapter(ResponseCreateParamsNonStreaming)
#: Parameters of chat completions that have another name in Responses.
_TRANSLATED = {"max_tokens", "max_completion_tokens", "logprobs", "reasoning_effort", "response_format", "verbosity"}
_USER = {"role": "user", "content": "Say hello"}


def _encode(**body: Any) -> dict[str, Any]:
    found = encode_responses({"messages": [_USER], **body}, "m")
    _REQUEST.validate_python(json.loads(json.dumps(found)))
    return {name: value for name, value in found.items() if name not in {"model", "input", "store"}}


def _items(*messages: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    items = input_items(messages, **more)
    for item in items:
        _ITEM.validate_python(item)
    return items


# --- messages ---------------------------------------------------------------------------------------------------------


def test_a_plain_call() -> None:
    assert encode_responses({"messages": [_USER]}, "m") == {
        "model": "m",
        "input": [{"type": "message", "role": "user", "content": "Say hello"}],
        "store": False,
    }


def test_system_and_developer_messages_stay_in_their_place() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "developer", "content": [{"type": "text", "text": "c"}]},
    ]
    assert [(item["role"], item["content"]) for item in _items(*messages)] == [
        ("system", "a"),
        ("user", "b"),
        ("developer", [{"type": "input_text", "text": "c"}]),
    ]


def test_pictures_and_files() -> None:
    breakpoint_ = {"mode": "explicit"}
    parts = [
        {"type": "text", "text": "look", "prompt_cache_breakpoint": breakpoint_},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", "detail": "low"}},
        {"type": "image_url", "image_url": "https://x.test/a.png"},
        {"type": "file", "file": {"file_data": "data:application/pdf;base64,AA==", "filename": "a.pdf"}},
        {"type": "input_file", "file_id": "file_1"},
        "and",
    ]
    (item,) = _items({"role": "user", "content": parts})
    assert item["content"] == [
        {"type": "input_text", "text": "look", "prompt_cache_breakpoint": breakpoint_},
        {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "low"},
        {"type": "input_image", "image_url": "https://x.test/a.png", "detail": "auto"},
        {"type": "input_file", "file_data": "data:application/pdf;base64,AA==", "filename": "a.pdf"},
        {"type": "input_file", "file_id": "file_1"},
        {"type": "input_text", "text": "and"},
    ]


def test_a_tool_loop() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    items = _items(
        _USER,
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "42", "name": "f"},
        {"role": "assistant", "content": None, "tool_calls": [{**call, "id": "call_2"}]},
        {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "43"}]},
    )
    assert items[1:] == [
        {"type": "message", "role": "assistant", "content": "I look."},
        {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "42"},
        {"type": "function_call", "call_id": "call_2", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "43"}]},
    ]


def test_a_loop_with_a_custom_tool() -> None:
    chat = {"id": "c1", "type": "custom", "custom": {"name": "sql", "input": "select 1"}}
    function = {"id": "c2", "type": "function", "function": {"name": "sql", "arguments": "select 2"}}
    items = _items(
        {"role": "assistant", "tool_calls": [chat, function]},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "tool", "tool_call_id": "c2", "content": "2"},
        custom={"sql"},
    )
    assert items == [
        {"type": "custom_tool_call", "call_id": "c1", "name": "sql", "input": "select 1"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "sql", "input": "select 2"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "1"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "2"},
    ]


def test_what_clients_keep_of_an_answer() -> None:
    """Dumps of other clients' messages: nulls, annotations, reasoning, refusals, content in parts."""
    items = _items(
        {"role": "assistant", "content": "a", "refusal": None, "audio": None, "function_call": None, "annotations": []},
        {"role": "assistant", "content": "b", "reasoning_content": "hm", "name": "agent"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "c"}, "d"]},
        {"role": "assistant", "content": None, "refusal": "no"},
        {"role": "assistant", "content": [{"type": "text", "text": "e"}, {"type": "refusal", "refusal": "f"}]},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": None},
    )
    assert [item["content"] for item in items] == [
        "a",
        "b",
        "cd",
        "no",
        "ef",
        "",
        "",
    ]


def test_items_and_fields_of_responses_stay_as_they_are() -> None:
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}
    message = {
        "type": "message",
        "role": "assistant",
        "id": "msg_1",
        "status": "completed",
        "phase": "commentary",
        "content": [
            {"type": "output_text", "text": "a", "annotations": [{"type": "file_path", "file_id": "f", "index": 0}]}
        ],
    }
    custom = {"type": "custom_tool_call", "call_id": "c", "name": "sql", "input": "x"}
    items = _items(reasoning, message, custom, {"role": "tool", "tool_call_id": "c", "content": "1"})
    assert items[:3] == [reasoning, message, custom]
    assert items[3]["type"] == "custom_tool_call_output"
    given = encode_responses({"messages": [], "input": "hi", "instructions": "be brief"}, "m")
    assert (given["input"], given["instructions"]) == ("hi", "be brief")


@pytest.mark.parametrize(
    ("message", "names"),
    [
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, r"messages\[0\].content\[0\].type"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, r"content\[0\].image_url"),
        ({"role": "user", "content": [{"type": "file"}]}, r"content\[0\].file"),
        ({"role": "user", "content": [{"type": "text", "text": 1}]}, r"content\[0\].text"),
        ({"role": "user", "content": [7]}, r"content\[0\] must be a mapping"),
        ({"role": "user", "content": 7}, r"content must be text"),
        ({"role": "assistant", "content": [{"type": "image_url", "image_url": "x"}]}, "assistant"),
        ({"role": "assistant", "audio": {"id": "a"}}, "audio"),
        ({"role": "assistant", "function_call": {"name": "f"}}, "use tool_calls"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}, r"tool_calls\[0\].id"),
        ({"role": "assistant", "tool_calls": [{"id": "c"}]}, r"tool_calls\[0\].function"),
        ({"role": "assistant", "tool_calls": [{"id": "c", "type": "custom"}]}, r"tool_calls\[0\].custom"),
        ({"role": "assistant", "tool_calls": ["c"]}, r"tool_calls\[0\]"),
        ({"role": "tool", "content": "x"}, "tool_call_id"),
        ({"role": "function", "name": "f", "content": "x"}, "use role 'tool'"),
        ({"role": "narrator", "content": "secret"}, "narrator"),
        ({"content": "secret"}, "role None"),
    ],
)
def test_what_a_message_cannot_say_is_refused_by_name(message: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigurationError, match=names) as caught:
        input_items([message])
    assert "secret" not in str(caught.value)


# --- the items of an answer -------------------------------------------------------------------------------------------

_NAMES = st.sampled_from(["f", "g", "sql"])
_CALLS = st.lists(st.builds(ToolCall, id=st.text(min_size=1), name=_NAMES, arguments=st.text()), max_size=3)


def _assistant_message(text: str, calls: list[ToolCall], *, nulls: bool, parts: bool) -> dict[str, Any]:
    content: Any = [{"type": "text", "text": text}] if parts and text else text
    message: dict[str, Any] = {"role": "assistant", "content": None if nulls and not text else content}
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    elif nulls:
        message.update(tool_calls=None, refusal=None)
    return message


@given(st.text(), _CALLS, st.booleans(), st.booleans(), st.sets(_NAMES))
def test_the_items_of_an_answer_are_those_of_the_message_that_a_client_appends(
    text: str, calls: list[ToolCall], nulls: bool, parts: bool, custom: set[str]
) -> None:
    message = _assistant_message(text, calls, nulls=nulls, parts=parts)
    assert input_items([message], custom=custom) == answer_items(text, calls, custom=custom)
    earlier = input_items([_USER], custom=custom)
    later = input_items([_USER, message, _USER], custom=custom)
    assert later == [*earlier, *answer_items(text, calls, custom=custom), *earlier]
    assert begins_with(later, [*earlier, *answer_items(text, calls, custom=custom)])


def test_arguments_that_a_framework_wrote_again_are_the_same() -> None:
    mine = answer_items("", [ToolCall("c", "f", '{"b":"\\u00e9","a":1}')])
    again = answer_items("", [ToolCall("c", "f", '{"a": 1, "b": "é"}')])
    assert begins_with(again, mine)
    assert begins_with(answer_items("", [ToolCall("c", "f", "{}")]), answer_items("", [ToolCall("c", "f", "")]))
    for other in ('{"a": 1.0, "b": "é"}', '{"a": true, "b": "é"}', '{"b":"é"}', '{"a":'):
        assert not begins_with(answer_items("", [ToolCall("c", "f", other)]), mine)
    assert not begins_with(answer_items("", [ToolCall("d", "f", '{"b":"é","a":1}')]), mine)
    assert not begins_with([], mine)
    assert not begins_with(answer_items("x", []), answer_items("y", []))


# --- parameters -------------------------------------------------------------------------------------------------------


def test_limits() -> None:
    assert _encode(max_tokens=5) == {"max_output_tokens": 5}
    assert _encode(max_completion_tokens=5, max_tokens=5) == {"max_output_tokens": 5}
    with pytest.raises(ConfigurationError, match="max_completion_tokens and max_tokens"):
        _encode(max_completion_tokens=5, max_tokens=6)


def test_function_tools_are_flat_and_no_stricter_than_in_chat() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    found = _encode(
        tools=[
            {"type": "function", "function": {"name": "f", "description": "d", "parameters": schema}},
            {"type": "function", "function": {"name": "g", "parameters": schema, "strict": True}},
            {"type": "function", "function": {"name": "h"}},
            {"type": "function", "name": "flat", "parameters": schema, "strict": True},
            {"type": "web_search"},
        ],
        parallel_tool_calls=False,
    )
    assert found["tools"] == [
        {"type": "function", "name": "f", "description": "d", "parameters": schema, "strict": False},
        {"type": "function", "name": "g", "parameters": schema, "strict": True},
        {"type": "function", "name": "h", "parameters": {"type": "object", "properties": {}}, "strict": False},
        {"type": "function", "name": "flat", "parameters": schema, "strict": True},
        {"type": "web_search"},
    ]
    assert found["parallel_tool_calls"] is False


def test_custom_tools() -> None:
    grammar = {"definition": "x", "syntax": "regex"}
    tools = [
        {"type": "custom", "custom": {"name": "a", "format": {"type": "grammar", "grammar": grammar}}},
        {"type": "custom", "custom": {"name": "b", "format": {"type": "text"}}},
        {"type": "custom", "name": "c"},
        {"type": "function", "function": {"name": "d"}},
    ]
    assert _encode(tools=tools)["tools"][:3] == [
        {"type": "custom", "name": "a", "format": {"type": "grammar", **grammar}},
        {"type": "custom", "name": "b", "format": {"type": "text"}},
        {"type": "custom", "name": "c"},
    ]
    assert custom_tools({"tools": tools}) == {"a", "b", "c"}
    assert custom_tools({}) == frozenset()
    call = {"id": "c1", "type": "function", "function": {"name": "a", "arguments": "x"}}
    found = encode_responses({"messages": [{"role": "assistant", "tool_calls": [call]}], "tools": tools}, "m")
    assert found["input"][0]["type"] == "custom_tool_call"


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("required", "required"),
        ({"type": "function", "function": {"name": "f"}}, {"type": "function", "name": "f"}),
        ({"type": "custom", "custom": {"name": "f"}}, {"type": "custom", "name": "f"}),
        ({"type": "function", "name": "f"}, {"type": "function", "name": "f"}),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]},
            },
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
        ),
    ],
)
def test_tool_choice(choice: Any, expected: Any) -> None:
    assert _encode(tool_choice=choice) == {"tool_choice": expected}


def test_structured_output_and_verbosity() -> None:
    schema = {"name": "out", "schema": {"type": "object"}, "strict": True, "description": None}
    assert _encode(response_format={"type": "json_schema", "json_schema": schema}, verbosity="low") == {
        "text": {
            "format": {"type": "json_schema", "name": "out", "schema": {"type": "object"}, "strict": True},
            "verbosity": "low",
        }
    }
    assert _encode(response_format={"type": "json_object"}) == {"text": {"format": {"type": "json_object"}}}
    assert _encode(response_format={"type": "text"}, text={"verbosity": "low"}) == {
        "text": {"verbosity": "low", "format": {"type": "text"}}
    }


def test_reasoning_logprobs_and_stream_options() -> None:
    assert _encode(reasoning_effort="low", reasoning={"summary": "auto"}) == {
        "reasoning": {"summary": "auto", "effort": "low"}
    }
    assert _encode(logprobs=True, top_logprobs=3, include=["reasoning.encrypted_content"]) == {
        "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
        "top_logprobs": 3,
    }
    assert _encode(logprobs=False, include=["reasoning.encrypted_content"]) == {
        "include": ["reasoning.encrypted_content"]
    }
    assert _encode(stream_options={"include_usage": True}) == {}
    assert _encode(stream_options={"include_obfuscation": False, "include_usage": True}) == {
        "stream_options": {"include_obfuscation": False}
    }


def test_what_both_have_and_what_only_responses_has_is_passed() -> None:
    more = {
        "temperature": 0,
        "top_p": 0.5,
        "user": "u",
        "metadata": {"a": "b"},
        "service_tier": "flex",
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "previous_response_id": "resp_1",
        "truncation": "auto",
        "generate": False,
        "top_k": 3,
    }
    assert _encode(**more) == more
    assert encode_responses({"messages": [_USER], "store": True}, "m")["store"] is True
    assert _encode(temperature=None, n=1, seed=None, stop=[], presence_penalty=0.0, logit_bias={}) == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("stop", ["x"]),
        ("seed", 0),
        ("frequency_penalty", 0.1),
        ("presence_penalty", -1),
        ("logit_bias", {"1": 2}),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "v"}),
        ("prediction", {"type": "content", "content": "x"}),
        ("functions", [{"name": "f"}]),
        ("function_call", "auto"),
        ("web_search_options", {}),
        ("response_format", {"type": "grammar"}),
        ("response_format", "json"),
        ("tools", "f"),
        ("tools", ["f"]),
        ("text", "plain"),
        ("reasoning", "low"),
        ("stream_options", True),
        ("input", "and an input"),
    ],
)
def test_what_cannot_be_said_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=name):
        _encode(**{name: value})


@pytest.mark.parametrize(
    "body",
    [
        {"reasoning_effort": "low", "reasoning": {"effort": "high"}},
        {"verbosity": "low", "text": {"verbosity": "high"}},
        {"response_format": {"type": "text"}, "text": {"format": {"type": "json_object"}}},
    ],
)
def test_two_names_of_one_parameter_must_agree(body: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="differ here"):
        _encode(**body)


def test_no_parameter_of_chat_completions_gets_lost() -> None:
    """Every one that OpenAI's client knows is said in Responses' own words, or refused."""
    chat, responses = get_type_hints(CompletionCreateParamsBase), get_type_hints(ResponseCreateParamsBase)
    for name in chat.keys() - {"messages", "model"}:
        value: Any = {
            "response_format": {"type": "text"},
            "tools": [{"type": "web_search"}],
            "stream_options": {"include_obfuscation": True},
        }.get(name, 7)
        if name in responses or name in _TRANSLATED:
            found = encode_responses({"messages": [], name: value}, "m")
            assert found.keys() - {"model", "input", "store"} or name == "store", name
            assert found.keys() <= responses.keys(), name
        else:
            with pytest.raises(ConfigurationError, match=name):
                encode_responses({"messages": [], name: value}, "m")
