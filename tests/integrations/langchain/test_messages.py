from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_spanwire.messages import openai_messages

CALL = {"name": "f", "args": {"a": "é"}, "id": "t1", "type": "tool_call"}
SENT = {"type": "function", "id": "t1", "function": {"name": "f", "arguments": '{"a": "é"}'}}
URL = {"type": "image_url", "image_url": {"url": "https://x/y.png", "detail": "low"}}


def sent(message: BaseMessage, **more: Any) -> dict[str, Any]:
    (found,) = openai_messages([message], **more)
    return found


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (HumanMessage("hi"), {"role": "user", "content": "hi"}),
        (HumanMessage(""), {"role": "user", "content": ""}),
        (HumanMessage("hi", name="eve"), {"role": "user", "content": "hi", "name": "eve"}),
        (SystemMessage("be"), {"role": "system", "content": "be"}),
        (
            SystemMessage("be", additional_kwargs={"__openai_role__": "developer"}),
            {"role": "developer", "content": "be"},
        ),
        (ChatMessage(content="x", role="critic"), {"role": "critic", "content": "x"}),
        (FunctionMessage(content="x", name="f"), {"role": "function", "content": "x", "name": "f"}),
        (ToolMessage("3", tool_call_id="t1", name="f"), {"role": "tool", "content": "3", "tool_call_id": "t1"}),
        (AIMessage("yes"), {"role": "assistant", "content": "yes"}),
        (AIMessage("", tool_calls=[CALL]), {"role": "assistant", "content": None, "tool_calls": [SENT]}),
        (AIMessage("so", tool_calls=[CALL]), {"role": "assistant", "content": "so", "tool_calls": [SENT]}),
        (
            AIMessage("", invalid_tool_calls=[{"name": "f", "args": "{", "id": "t2", "error": "bad", "type": "invalid_tool_call"}]),
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"type": "function", "id": "t2", "function": {"name": "f", "arguments": "{"}}],
            },
        ),
        (
            AIMessage("", additional_kwargs={"refusal": "no"}),
            {"role": "assistant", "content": "", "refusal": "no"},
        ),
        (
            AIMessage("", additional_kwargs={"audio": {"id": "a1", "data": "xxxx"}}),
            {"role": "assistant", "content": "", "audio": {"id": "a1"}},
        ),
        (
            AIMessage("", additional_kwargs={"function_call": {"name": "f", "arguments": "{}"}}),
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        ),
    ],
)  # fmt: skip
def test_a_message(message: BaseMessage, expected: dict[str, Any]) -> None:
    assert sent(message) == expected


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        (["one"], "one"),
        ([{"type": "text", "text": "one", "id": "lc_1", "index": 0, "annotations": []}], "one"),
        (
            [{"type": "text", "text": "one"}, "two"],
            [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
        ),
        (
            [{"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}}],
            [{"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}}],
        ),
        ([URL], [URL]),
        (
            [{"type": "image", "url": "https://x/y.png"}],
            [{"type": "image_url", "image_url": {"url": "https://x/y.png"}}],
        ),
        (
            [{"type": "image", "base64": "AAA", "mime_type": "image/png"}],
            [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAA"}}],
        ),
        (
            [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAA"}}],
            [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAA"}}],
        ),
        (
            [{"type": "audio", "base64": "AAA", "mime_type": "audio/wav"}],
            [{"type": "input_audio", "input_audio": {"data": "AAA", "format": "wav"}}],
        ),
        (
            [{"type": "file", "base64": "AAA", "mime_type": "application/pdf", "filename": "a.pdf"}],
            [{"type": "file", "file": {"file_data": "data:application/pdf;base64,AAA", "filename": "a.pdf"}}],
        ),
        (
            [{"image": {"format": "png", "source": {"bytes": b"AAA"}}}],
            [{"type": "image_url", "image_url": {"url": "data:image/png;base64,QUFB"}}],
        ),
        ([{"type": "file", "file": {"file_id": "f1"}}], [{"type": "file", "file": {"file_id": "f1"}}]),
        ([{"type": "x_new", "y": 1}], [{"type": "x_new", "y": 1}]),
    ],
)
def test_content_of_blocks(blocks: list[Any], expected: Any) -> None:
    assert sent(HumanMessage(blocks))["content"] == expected
    assert sent(ToolMessage(blocks, tool_call_id="t1")) == {"role": "tool", "content": expected, "tool_call_id": "t1"}


def test_results_of_tools_inside_a_user_message_are_messages_of_their_own() -> None:
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "3"}]}
    assert openai_messages([HumanMessage([result])]) == [
        {"role": "tool", "content": [{"type": "text", "text": "3"}], "tool_call_id": "t1"}
    ]
    both = openai_messages([HumanMessage([result, {"type": "text", "text": "and?"}])])
    assert sorted(message["role"] for message in both) == ["tool", "user"]


#: What an answer is kept as with ``output_version="v1"``.
V1: list[str | dict[Any, Any]] = [
    {"type": "reasoning", "reasoning": "hm ", "index": "lc_rs_0"},
    {"type": "text", "text": "one ", "index": "lc_txt_0"},
    {"type": "text", "text": "two"},
    {"type": "tool_call", **{key: CALL[key] for key in ("name", "args", "id")}},
]


def test_an_answer_kept_as_blocks_goes_back_as_text_and_tool_calls() -> None:
    message = AIMessage(V1, tool_calls=[CALL])
    assert sent(message) == {"role": "assistant", "content": "one two", "tool_calls": [SENT]}


@pytest.mark.parametrize(
    "message", [AIMessage(V1), AIMessage("one two", additional_kwargs={"reasoning_content": "hm "})]
)
def test_reasoning_goes_back_only_when_asked_for(message: AIMessage) -> None:
    assert "reasoning_content" not in sent(message)
    assert sent(message, send_reasoning=True)["reasoning_content"] == "hm "


def test_the_messages_are_left_as_they_are() -> None:
    block = {"type": "image", "base64": "AAA", "mime_type": "image/png"}
    message = HumanMessage([dict(block)])
    openai_messages([message])
    assert message.content == [block]


def test_what_is_no_message_is_refused() -> None:
    with pytest.raises(ValueError, match="RemoveMessage"):
        openai_messages([RemoveMessage(id="1")])
