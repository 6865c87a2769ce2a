from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spanwire.calls import Usage
from spanwire.wire.along import Along


def sse(*events: Any, named: bool = False) -> list[bytes]:
    made = []
    for event in events:
        name = b"event: " + event["type"].encode() + b"\n" if named else b""
        made.append(name + b"data: " + (event if isinstance(event, bytes) else json.dumps(event).encode()) + b"\n\n")
    return made


def chunk(content: str | None = None, **more: Any) -> dict[str, Any]:
    delta = {} if content is None else {"content": content}
    choice = {"index": 0, "delta": delta, "finish_reason": more.pop("finish", None)}
    return {"id": "chatcmpl-1", "model": "m-1", "choices": [choice], **more}


CHAT = [
    *sse(chunk("")),
    *sse(*[chunk(f"word {number} ") for number in range(6)]),
    *sse(chunk(finish="stop")),
    *sse(
        {
            "id": "chatcmpl-1",
            "choices": [],
            "usage": {"prompt_tokens": 3, "completion_tokens": 6, "prompt_tokens_details": {"cached_tokens": 2}},
        }
    ),
    b"data: [DONE]\n\n",
]
COMPLETIONS = [
    *sse({"id": "cmpl-1", "model": "m-1", "choices": [{"text": "", "finish_reason": None}]}),
    *sse({"id": "cmpl-1", "model": "m-1", "choices": [{"text": "a", "finish_reason": None}]}),
    *sse({"id": "cmpl-1", "model": "m-1", "choices": [{"text": "", "finish_reason": "stop"}]}),
    b"data: [DONE]\n\n",
]
RESPONSES = sse(
    {"type": "response.created", "response": {"id": "resp_1", "model": "m-1", "usage": None}},
    {"type": "response.output_item.added", "item": {"id": "msg_1"}},
    {"type": "response.output_text.delta", "item_id": "msg_1", "delta": "Hello"},
    {"type": "response.output_text.delta", "item_id": "msg_1", "delta": " you"},
    {"type": "response.output_text.done", "item_id": "msg_1", "text": "Hello you"},
    {
        "type": "response.completed",
        "response": {
            "id": "resp_1",
            "usage": {"input_tokens": 3, "output_tokens": 6, "output_tokens_details": {"reasoning_tokens": 2}},
        },
    },
    named=True,
)
ANTHROPIC = sse(
    {
        "type": "message_start",
        "message": {
            "id": "msg_1",
            "model": "m-1",
            "usage": {"input_tokens": 3, "cache_read_input_tokens": 10, "output_tokens": 1},
        },
    },
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "ping"},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hello"}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": " you"}},
    {"type": "content_block_stop", "index": 0},
    {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 6}},
    {"type": "message_stop"},
    named=True,
)


def gemini(text: str, **more: Any) -> dict[str, Any]:
    candidate = {"content": {"parts": [{"text": text}], "role": "model"}, "index": 0}
    if "finish" in more:
        candidate["finishReason"] = more.pop("finish")
    return {"candidates": [candidate], "modelVersion": "m-1", "responseId": "r1", **more}


GEMINI_EVENTS = [
    gemini(""),
    gemini("Hello", usageMetadata={"promptTokenCount": 3}),
    gemini(" you"),
    gemini(
        "",
        finish="STOP",
        usageMetadata={"promptTokenCount": 3, "candidatesTokenCount": 4, "thoughtsTokenCount": 2, "totalTokenCount": 9},
    ),
]
GEMINI = sse(*GEMINI_EVENTS)
OLLAMA = [
    json.dumps({"model": "m-1", "message": {"role": "assistant", "content": text}, "done": False}).encode() + b"\n"
    for text in ("", "Hello", " you")
] + [
    json.dumps(
        {
            "model": "m-1",
            "message": {"role": "assistant", "content": ""},
            "done": True,
            "done_reason": "stop",
            "total_duration": 5,
            "prompt_eval_count": 3,
            "eval_count": 6,
        }
    ).encode()
    + b"\n"
]
STREAMS = {
    # pieces, first content in which, finish, id, usage, done
    "chat": (CHAT, 1, "stop", "chatcmpl-1", Usage(3, 6, None, 2), True),
    "completions": (COMPLETIONS, 1, "stop", "cmpl-1", None, True),
    "responses": (RESPONSES, 2, "completed", "resp_1", Usage(3, 6, reasoning_tokens=2), True),
    "anthropic": (ANTHROPIC, 3, "end_turn", "msg_1", Usage(13, 6, cached_tokens=10), True),
    "gemini": (GEMINI, 1, "STOP", "r1", Usage(3, 6, 9, reasoning_tokens=2), False),
    "ollama": (OLLAMA, 1, "stop", None, Usage(3, 6), True),
}


def along(name: str = "", **more: Any) -> Along:
    kind = "application/x-ndjson" if name == "ollama" else "text/event-stream; charset=utf-8"
    return Along(content_type=kind, **more)


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_is_understood_by_its_keys(name: str) -> None:
    pieces, content, finish, own_id, usage, done = STREAMS[name]
    reader = along(name)
    for number, piece in enumerate(pieces, 1):
        assert not reader.done_ns
        reader.feed(piece, number * 10)
    assert reader.complete
    reader.end()
    assert reader.first_chunk_ns == 10
    assert reader.first_content_ns == (content + 1) * 10
    assert reader.last_byte_ns == len(pieces) * 10
    assert reader.finish_reason == finish
    assert reader.id == own_id
    assert reader.model == "m-1"
    assert reader.usage == usage
    assert bool(reader.done_ns) == done
    assert reader.streamed is True
    assert reader.late_events
    assert not reader.failed
    assert reader.blind is None


@pytest.mark.parametrize("name", STREAMS)
@given(data=st.data())
def test_however_it_is_cut_the_same_is_found(name: str, data: st.DataObject) -> None:
    pieces, _, finish, own_id, usage, done = STREAMS[name]
    whole = b"".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    reader = along(name)
    for begin, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        reader.feed(whole[begin:end], 7)
    reader.end()
    assert (reader.finish_reason, reader.id, reader.model, reader.usage) == (finish, own_id, "m-1", usage)
    assert bool(reader.done_ns) == done
    assert reader.first_content_ns == 7


def test_the_late_events_are_those_from_the_finish_reason_on() -> None:
    reader = along()
    for piece in CHAT:
        reader.feed(piece, 1)
    reader.end()
    assert [json.loads(event)["choices"] != [] for event in reader.late_events] == [True, False]


def test_a_finish_reason_in_one_read_with_content_is_found() -> None:
    reader = along()
    reader.feed(b"".join(CHAT[:3]), 1)
    reader.feed(CHAT[3], 2)
    reader.feed(b"".join(CHAT[4:]), 3)
    assert (reader.finish_reason, reader.done_ns, reader.usage) == ("stop", 3, Usage(3, 6, None, 2))


def test_content_that_looks_like_an_end_is_none() -> None:
    reader = along()
    reader.feed(CHAT[1], 1)
    for text in ("[DONE]", '"finish_reason":"stop"', "data: [DONE]\n\n", '"usage":{"prompt_tokens":1}', '"error"'):
        (piece,) = sse(chunk(text))
        reader.feed(piece, 2)
    assert not reader.complete
    assert reader.usage is None
    assert not reader.failed
    for piece in CHAT[-3:]:
        reader.feed(piece, 3)
    assert reader.finish_reason == "stop"


def test_what_comes_after_the_terminal_event_is_nobodys() -> None:
    reader = along()
    for piece in CHAT:
        reader.feed(piece, 1)
    reader.feed(b"data: {}\n\n", 99)
    assert reader.last_byte_ns == reader.last_chunk_ns == 1
    assert reader.bytes == sum(map(len, CHAT)) + 10


@pytest.mark.parametrize(
    "delta",
    [
        {"reasoning_content": "hm"},
        {"reasoning": "hm"},
        {"tool_calls": [{"index": 0, "id": "c"}]},
        {"function_call": {"name": "f"}},
        {"refusal": "no"},
    ],
)
def test_reasoning_and_tool_calls_are_content(delta: dict[str, Any]) -> None:
    reader = along()
    reader.feed(sse({"choices": [{"delta": {"role": "assistant", "content": ""}}]})[0], 1)
    before_ns = reader.first_content_ns
    reader.feed(sse({"choices": [{"delta": delta}]})[0], 2)
    assert (before_ns, reader.first_content_ns) == (0, 2)


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"error":{"message":"boom"}}\n\n',
        b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error"}}\n\n',
        b'data: {"type": "error", "message": "boom"}\n\n',
        b'event: response.failed\ndata: {"type":"response.failed","response":{"error":{"code":"x"}}}\n\n',
    ],
)
@pytest.mark.parametrize("before", [[], CHAT[:1], CHAT[:4], ANTHROPIC[:2], ANTHROPIC[:5], RESPONSES[:4]])
def test_an_error_in_the_stream_is_seen(event: bytes, before: list[bytes]) -> None:
    reader = along()
    for piece in before:
        reader.feed(piece, 1)
    reader.feed(event, 2)
    reader.end()
    typed = b'"error":' not in event.replace(b": {", b":{")
    mixed = before == CHAT[:4] and (
        typed or b"response.failed" in event
    )  # of two schemas in one stream: no search for it
    assert reader.failed or mixed


WHOLE = {
    "chat": ({"id": "1", "model": "m", "choices": [{"message": {"content": "x" * 10}, "finish_reason": "stop"}],
              "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}}, "stop", Usage(1, 2, 3)),
    "responses": ({"id": "1", "model": "m", "status": "completed", "usage": {"input_tokens": 1, "output_tokens": 2}},
                  "completed", Usage(1, 2)),
    "anthropic": ({"id": "1", "model": "m", "stop_reason": "end_turn", "usage": {"input_tokens": 1, "output_tokens": 2}},
                  "end_turn", Usage(1, 2)),
    "gemini": ({"responseId": "1", "modelVersion": "m", "candidates": [{"finishReason": "STOP"}],
                "usageMetadata": {"promptTokenCount": 1, "candidatesTokenCount": 2}}, "STOP", Usage(1, 2)),
    "ollama": ({"id": "1", "model": "m", "done_reason": "stop", "done": True, "prompt_eval_count": 1, "eval_count": 2},
               "stop", Usage(1, 2)),
    "embeddings": ({"id": "1", "model": "m", "data": [{"embedding": [0.5] * 100}], "usage": {"prompt_tokens": 1}},
                   None, Usage(1)),
}  # fmt: skip


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("end", [b"", b"\n"])
@pytest.mark.parametrize("indent", [None, 2])
def test_a_whole_answer(name: str, end: bytes, indent: int | None) -> None:
    value, finish, usage = WHOLE[name]
    body = json.dumps(value, indent=indent).encode() + end
    reader = Along(content_type="application/json")
    reader.feed(body[:20], 1)
    reader.feed(body[20:], 2)
    reader.end()
    assert (reader.id, reader.model, reader.finish_reason, reader.usage) == ("1", "m", finish, usage)
    assert reader.streamed is False
    assert (reader.first_chunk_ns, reader.first_content_ns, reader.last_byte_ns) == (1, 0, 2)
    assert json.loads(reader.late_events[0]) == value


@pytest.mark.parametrize("between", [b",", b"\n,\r\n"])
def test_an_array_that_is_streamed_by_its_elements(between: bytes) -> None:
    events = [json.dumps(event, indent=2).encode() for event in GEMINI_EVENTS]
    pieces = [b"[" + events[0], *[between + event for event in events[1:]], b"]"]
    reader = Along(content_type="application/json")
    for number, piece in enumerate(pieces, 1):
        reader.feed(piece, number)
    reader.end()
    assert (reader.first_chunk_ns, reader.first_content_ns) == (1, 2)
    assert (reader.finish_reason, reader.usage, reader.model) == ("STOP", Usage(3, 6, 9, reasoning_tokens=2), "m-1")
    assert reader.streamed is True


def test_a_bare_list_of_vectors_is_no_stream() -> None:
    reader = Along(content_type="application/json")
    reader.feed(b"[[0.25, 0.5]]", 1)
    reader.end()
    assert reader.streamed is False
    assert reader.first_content_ns == 0
    assert reader.blind is None


def _raw_deflate(data: bytes) -> bytes:
    stream = zlib.compressobj(wbits=-15)
    return stream.compress(data) + stream.flush()


@pytest.mark.parametrize(
    ("coding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress), ("deflate", _raw_deflate)]
)
def test_a_coded_stream_is_decoded_in_a_copy(coding: str, pack: Any) -> None:
    packed = pack(b"".join(CHAT))
    reader = along(content_encoding=coding)
    for at in range(0, len(packed), 50):
        reader.feed(packed[at : at + 50], at + 1)
    assert (reader.finish_reason, reader.usage) == ("stop", Usage(3, 6, None, 2))
    assert reader.done_ns
    assert reader.bytes >= len(packed) - 50


@pytest.mark.parametrize("coding", ["exi", "gzip, gzip", "br;q=1"])
def test_a_coding_that_cannot_be_read_is_said_and_not_guessed(coding: str) -> None:
    reader = along(content_encoding=coding)
    reader.feed(b"\x00\x01\x02", 1)
    reader.feed(b"\x03", 2)
    reader.end()
    assert reader.blind == "coding"
    assert (reader.first_chunk_ns, reader.last_chunk_ns, reader.first_content_ns) == (1, 2, 0)
    assert reader.streamed is True


def test_a_few_bytes_that_stand_for_many_cost_no_memory() -> None:
    bomb = gzip.compress(b" " * (64 << 20))
    reader = along(content_encoding="gzip")
    reader.feed(bomb, 1)
    assert reader.blind == "broken"


def test_what_is_too_big_is_only_timed() -> None:
    for kind, start in (
        ("text/event-stream", b'data: {"choices":[{"delta":{"content":"'),
        ("application/json", b'{"a":"'),
    ):
        reader = Along(content_type=kind, max_bytes=1000)
        reader.feed(start, 1)
        for at in range(2, 30):
            reader.feed(b"x" * 100, at)
        assert reader.blind in ("size", "broken")
        assert reader.last_byte_ns == 29
        assert reader._pieces == []
        reader.end()


def test_views_of_buffers_are_taken_too() -> None:
    reader = along()
    for piece in CHAT:
        reader.feed(memoryview(bytearray(piece)), 1)  # type: ignore[arg-type]
    assert (reader.finish_reason, reader.first_content_ns) == ("stop", 1)


def test_candidates_that_are_no_list_are_none() -> None:
    reader = along()
    reader.feed(sse({"candidates": 1, "usageMetadata": None})[0], 1)
    reader.feed(CHAT[-3], 2)
    assert (reader.finish_reason, reader.blind) == ("stop", None)


def test_an_error_status_has_no_content() -> None:
    reader = Along(status=503, content_type="text/event-stream")
    reader.feed(CHAT[1], 1)
    reader.end()
    assert reader.first_content_ns == 0
    assert reader.blind == "status"


def test_heartbeats_before_the_answer_are_no_answer() -> None:
    reader = along()
    for at in range(1, 100):
        reader.feed(b"\n\n", at)
    reader.feed(b": ping\n\n", 100)
    assert reader.first_chunk_ns == 0
    reader.feed(CHAT[0], 101)
    assert reader.first_chunk_ns == 101


@given(pieces=st.lists(st.binary(max_size=40), max_size=12), coding=st.sampled_from(["", "gzip", "deflate"]))
def test_nothing_raises(pieces: list[bytes], coding: str) -> None:
    for start in (b"", CHAT[1], b"[", OLLAMA[1], b'{"a":', b"event: x\n"):
        reader = along(content_encoding=coding)
        reader.feed(start, 1)
        for piece in pieces:
            reader.feed(piece, 2)
        reader.end()
        reader.end()


@given(
    event=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["choices", "delta", "usage", "type", "message", "response", "candidates", "content", "parts", "done",
                 "error", "finish_reason", "prompt_tokens", "text", "id", "model", "content_block", "usageMetadata"]
            ),
            inner,
            max_size=4,
        ),
        max_leaves=12,
    )
)  # fmt: skip
def test_no_shape_of_json_breaks_it(event: Any) -> None:
    reader = along()
    reader.feed(sse(event if isinstance(event, dict) else {"choices": event})[0], 1)
    reader.feed(CHAT[-3], 2)
    reader.end()
    assert reader.blind is None
    whole = Along()
    whole.feed(json.dumps({"choices": event}).encode(), 1)
    whole.end()
