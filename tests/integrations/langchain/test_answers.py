from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_spanwire.answers import Extras, Pieces, chat_result, usage_metadata

import spanwire
from spanwire import Chunk, Reply, ToolCall, ToolCallDelta, Usage


def event(text: str | None, **more: Any) -> bytes:
    delta: dict[str, Any] = {} if text is None else {"content": text}
    return json.dumps({"id": "c", "choices": [{"index": 0, "delta": {**delta, **more}}]}, ensure_ascii=False).encode()


def added(pieces: Pieces, chunks: list[Chunk], reply: Reply) -> AIMessageChunk:
    found = [made for chunk in chunks if (made := pieces.next(chunk)) is not None]
    first, *others = [*found, pieces.last(reply)]
    message = first.__add__(others).message
    assert isinstance(message, AIMessageChunk)
    return message


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (None, None),
        (Usage(3, 2, 5), (3, 2, 5)),
        (Usage(3, 2), (3, 2, 5)),
        (Usage(3, None, 5), (3, 2, 5)),
        (Usage(None, 2, 5), (3, 2, 5)),
        (Usage(3, 2, 9), (3, 2, 9)),  # some servers count reasoning apart
        (Usage(7, None, 5), (7, 0, 5)),
        (Usage(3), None),
        (Usage(None, None, 5), None),
    ],
)
def test_usage(usage: Usage | None, expected: tuple[int, int, int] | None) -> None:
    found = usage_metadata(usage)
    if expected is None:
        assert found is None
    else:
        assert found is not None
        assert (found["input_tokens"], found["output_tokens"], found["total_tokens"]) == expected
        assert "input_token_details" not in found


def test_usage_details() -> None:
    found = usage_metadata(Usage(3, 2, 5, cached_tokens=0, reasoning_tokens=1))
    assert found is not None
    assert found["input_token_details"] == {"cache_read": 0}
    assert found["output_token_details"] == {"reasoning": 1}


@given(st.lists(st.tuples(st.text(), st.sampled_from([None, "x", "y"])), max_size=8))
def test_extras_miss_nothing_and_keep_nothing_else(events: list[tuple[str, str | None]]) -> None:
    """Whatever the texts are, and whichever events have something beyond the schema."""
    extras = Extras()
    pieces = []
    for text, more in events:
        raw = event(text) if more is None else event(text, x_new=[more])
        extras.add(raw, json.loads(raw)["choices"][0]["delta"]["content"])
        pieces += [] if more is None else [more]
    assert extras.message == ({"x_new": pieces} if pieces else {})
    assert extras.answer == {}


def test_extras_hidden_beside_a_shorter_text() -> None:
    """As long as the event before it, with the same ends, and something more in it."""
    extras = Extras()
    one = event("abcdefghijklm")
    other = event("a", x="b")
    extras.add(one, "abcdefghijklm")
    assert len(other) <= len(one)
    padded = event("a" + " " * (len(one) - len(other)), x="b")
    assert len(padded) == len(one)
    extras.add(padded, "a" + " " * (len(one) - len(other)))
    assert extras.message == {"x": "b"}


def test_bytes_that_are_no_json_are_passed_over() -> None:
    extras = Extras()
    for raw in (b"\xff", b"[1]", b"{", b"[" * 100_000):
        extras.add(raw, "a")
    assert (extras.answer, extras.message) == ({}, {})


def test_another_schema_is_left_alone() -> None:
    """Events of a transport or dialect that is not OpenAI's chat completions: each of their keys would be unknown."""
    extras = Extras()
    for number in range(3):
        extras.add(json.dumps({"type": "delta", "delta": "a", "sequence_number": number}).encode(), "a")
    assert (extras.answer, extras.message) == ({}, {})
    raw = json.dumps({"object": "response", "output": [], "status": "completed"}).encode()
    message = chat_result(Reply("a", raw=raw)).generations[0].message
    assert message.response_metadata == {"model_provider": "spanwire"}


def test_tool_calls_of_a_whole_answer() -> None:
    calls = (
        ToolCall("t1", "f", '{"a": 1}'),
        ToolCall("t2", "f", ""),
        ToolCall("t3", "f", '{"a": oh'),
        ToolCall("t4", "f", "[1]"),
        ToolCall("t5", "f", '{"a": "line\nbreak"}'),
    )
    message = chat_result(Reply(tool_calls=calls)).generations[0].message
    assert isinstance(message, AIMessage)
    assert [(call["id"], call["args"]) for call in message.tool_calls] == [
        ("t1", {"a": 1}),
        ("t2", {}),
        ("t5", {"a": "line\nbreak"}),
    ]
    assert [(call["id"], call["args"]) for call in message.invalid_tool_calls] == [("t3", '{"a": oh'), ("t4", "[1]")]
    assert "not JSON" in str(message.invalid_tool_calls[0]["error"])
    assert "list" in str(message.invalid_tool_calls[1]["error"])


def test_streamed_arguments_that_are_no_json_are_told_as_invalid() -> None:
    deltas = [ToolCallDelta(0, "t1", "f", "no"), ToolCallDelta(0, arguments=" JSON")]
    message = added(Pieces(), [Chunk(tool_calls=(delta,)) for delta in deltas], Reply())
    assert message.tool_calls == []
    assert [(call["id"], call["name"], call["args"]) for call in message.invalid_tool_calls] == [("t1", "f", "no JSON")]


@pytest.mark.parametrize("blocks", [False, True])
def test_interleaved_calls_with_text_and_reasoning(blocks: bool) -> None:
    chunks = [
        Chunk(reasoning="h"),
        Chunk(reasoning="m"),
        Chunk("a"),
        Chunk("b", tool_calls=(ToolCallDelta(0, "t1", "f", '{"a"'), ToolCallDelta(1, "t2", "g", ""))),
        Chunk(tool_calls=(ToolCallDelta(1, arguments='{"b":'),)),
        Chunk(tool_calls=(ToolCallDelta(0, arguments=":1}"), ToolCallDelta(1, arguments="2}"))),
        Chunk(finish_reason="tool_calls"),
    ]
    message = added(Pieces(blocks=blocks), chunks, Reply(finish_reason="tool_calls", usage=Usage(1, 2, 3)))
    assert [(call["id"], call["name"], call["args"]) for call in message.tool_calls] == [
        ("t1", "f", {"a": 1}),
        ("t2", "g", {"b": 2}),
    ]
    assert [block["type"] for block in message.content_blocks] == ["reasoning", "text", "tool_call", "tool_call"]
    assert message.content_blocks[0]["reasoning"] == "hm"  # type: ignore[typeddict-item]
    assert message.text == "ab"
    if blocks:
        assert isinstance(message.content, list)
    else:
        assert message.content == "ab"
        assert message.additional_kwargs["reasoning_content"] == "hm"


def logprob(text: str | None, *tokens: str) -> bytes:
    found = {"content": [{"token": token, "logprob": -0.5, "top_logprobs": []} for token in tokens]} if tokens else None
    delta = {} if text is None else {"content": text}
    return json.dumps({"choices": [{"index": 0, "delta": delta, "logprobs": found}]}).encode()


def test_log_probabilities_are_added_up() -> None:
    chunks = [
        Chunk("a", raw=logprob("a", "a")),
        Chunk("bc", raw=logprob("bc", "b", "c")),
        Chunk(finish_reason="stop", raw=logprob(None, "end")),
    ]
    pieces = Pieces(logprobs=True)
    found = [made for chunk in chunks if (made := pieces.next(chunk)) is not None]
    last = pieces.last(Reply(finish_reason="stop"))
    assert [made.generation_info for made in found] == [
        {"logprobs": json.loads(c.raw)["choices"][0]["logprobs"]} for c in chunks[:2]
    ]
    assert [one["token"] for one in last.message.response_metadata["logprobs"]["content"]] == ["end"]


def test_events_are_not_decoded_for_what_nobody_asked() -> None:
    found = Pieces().next(Chunk("a", raw=logprob("a", "a")))
    assert found is not None
    assert found.generation_info is None


def test_an_empty_answer_is_one_chunk() -> None:
    last = Pieces().last(Reply(finish_reason="stop"))
    assert last.text == ""
    assert last.message.response_metadata == {"model_provider": "spanwire", "finish_reason": "stop"}


def test_headers_are_kept_when_asked_for() -> None:
    reply = Reply(headers={"x-request-id": "r1", "server": "s"})
    assert chat_result(reply).generations[0].message.response_metadata["request_id"] == "r1"
    kept = chat_result(reply, headers=True).generations[0].message.response_metadata["headers"]
    assert kept == {"x-request-id": "r1", "server": "s"}


def test_refusals_come_through() -> None:
    body = {"choices": [{"index": 0, "message": {"role": "assistant", "content": None, "refusal": "No."}}]}
    whole = chat_result(spanwire.Reply(raw=json.dumps(body).encode())).generations[0].message
    assert whole.additional_kwargs == {"refusal": "No."}
    chunks = [Chunk(raw=event(None, refusal="N")), Chunk(raw=event(None, refusal="o."))]
    assert added(Pieces(), chunks, Reply()).additional_kwargs == {"refusal": "No."}
