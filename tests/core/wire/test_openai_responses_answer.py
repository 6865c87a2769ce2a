"""Responses answers as chunks: everything is delivered once, however often the server says it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spanwire.calls import Chunk, Reply, ReplyBuilder, Usage
from spanwire.errors import ProtocolError, ServerError, Truncated
from spanwire.testing import Script, ScriptedTool
from spanwire.testing.responses_events import response_events, whole_response
from spanwire.wire.openai_responses import ResponsesDecoder, decode_response

_TERMINAL = {"response.completed", "response.incomplete"}
BODY = {"model": "m", "input": "q"}
FULL = Script(
    reasoning=("I", " think"),
    tokens=("Hello", " you"),
    tool_calls=(ScriptedTool("f", ['{"a":', "1}"], id="call_a"), ScriptedTool("g", ["{}"], id="call_b")),
    usage=Usage(7, 11, 18, 3, 2),
)


def events_of(script: Script) -> list[dict[str, Any]]:
    return [event for step in response_events(script, BODY) for event in step.events]


def decode(events: Iterable[dict[str, Any]], decoder: ResponsesDecoder | None = None) -> list[Chunk]:
    decoder = decoder or ResponsesDecoder()
    chunks: list[Chunk | None] = []
    for event in events:
        assert not decoder.done
        chunk = decoder.event(b"", json.dumps(event).encode())
        assert chunk is None or event["type"] not in _TERMINAL
        chunks.append(chunk)
    chunks.append(decoder.end())
    assert decoder.end() is None
    return [chunk for chunk in chunks if chunk is not None]


def joined(chunks: Iterable[Chunk]) -> Reply:
    builder = ReplyBuilder()
    for chunk in chunks:
        builder.add([chunk])
    return builder.reply()


def said(reply: Reply) -> tuple[Any, ...]:
    return reply.text, reply.reasoning, reply.tool_calls, reply.finish_reason, reply.usage


# --- the stream -------------------------------------------------------------------------------------------------------


def test_a_stream_piece_by_piece() -> None:
    decoder = ResponsesDecoder()
    chunks = decode(events_of(FULL), decoder)
    assert [chunk.reasoning for chunk in chunks if chunk.reasoning] == ["I", " think"]
    assert [chunk.text for chunk in chunks if chunk.text] == ["Hello", " you"]
    deltas = [delta for chunk in chunks for delta in chunk.tool_calls]
    assert [(d.index, d.id, d.name, d.arguments) for d in deltas] == [
        (0, "call_a", "f", ""),
        (0, None, None, '{"a":'),
        (0, None, None, "1}"),
        (1, "call_b", "g", ""),
        (1, None, None, "{}"),
    ]
    assert (chunks[-1].finish_reason, chunks[-1].usage) == ("tool_calls", FULL.usage)
    assert all(chunk.finish_reason is None and chunk.usage is None for chunk in chunks[:-1])
    assert decoder.model == "m"
    assert decoder.id is not None
    assert decoder.id.startswith("resp_")
    assert decoder.usage == FULL.usage
    assert json.loads(decoder.late_events[0])["type"] == "response.completed"
    assert json.loads(decoder.late_events[1])["object"] == "response"


def test_chunks_carry_their_events_bytes() -> None:
    decoder = ResponsesDecoder()
    for event in events_of(FULL):
        data = json.dumps(event).encode()
        chunk = decoder.event(b"", data)
        assert chunk is None or chunk.raw == data
    last = decoder.end()
    assert last is not None
    assert last.raw == data


def test_the_beginning_shows_in_flags_and_carries_no_content() -> None:
    decoder = ResponsesDecoder()
    seen = []
    for step in response_events(Script(queue_s=1), BODY, shows_queue=True):
        for event in step.events:
            chunk = decoder.event(event["type"].encode(), json.dumps(event).encode())
            assert chunk is None
            seen.append((decoder.created, decoder.queued, decoder.in_progress, decoder.done))
    assert seen == [
        (True, False, False, False),
        (True, True, False, False),
        (True, True, True, False),
        (True, True, True, True),
    ]


def test_the_whole_answer_is_the_joined_stream() -> None:
    streamed = joined(decode(events_of(FULL)))
    chunk, id_, model = decode_response(json.dumps(whole_response(FULL, BODY, id="resp_1")).encode())
    assert said(joined([chunk])) == said(streamed)
    assert (id_, model) == ("resp_1", "m")


@pytest.mark.parametrize("name", [b"response.output_text.delta", b"", b"response.completed"])
def test_the_type_in_the_json_is_believed(name: bytes) -> None:
    chunk = ResponsesDecoder().event(name, b'{"type":"response.output_text.delta","delta":"a"}')
    assert chunk is not None
    assert chunk.text == "a"


def test_without_a_type_the_events_name_counts() -> None:
    decoder = ResponsesDecoder()
    chunk = decoder.event(b"response.output_text.delta", b'{"delta":"a"}')
    assert decoder.event(b"response.completed", b'{"response":{}}') is None
    assert decoder.done
    assert (chunk and chunk.text) == "a"


# --- everything once --------------------------------------------------------------------------------------------------

_TEXTS = st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=4), max_size=3)


@st.composite
def _subsets(draw: st.DrawFn) -> tuple[Script, list[dict[str, Any]]]:
    """A stream of which any part is missing that another one repeats, with ids or places that are no good."""
    tools = draw(st.lists(st.lists(st.text(max_size=3), max_size=3), max_size=3))
    script = Script(
        reasoning=draw(_TEXTS),
        tokens=draw(_TEXTS),
        tool_calls=[ScriptedTool(f"tool{n}", pieces, id=f"call_{n}x") for n, pieces in enumerate(tools)],
    )
    events = events_of(script)
    at_end = draw(st.booleans())
    broken = draw(st.sampled_from(["nothing", "ids change", "no ids", "no places", "places are 0", "places are text"]))
    kept: dict[tuple[Any, str], Any] = {}
    result = []
    for event in events:
        kind, place = event["type"], event.get("output_index")
        if place is None:
            if kind == "response.completed" and not at_end:
                event = {**event, "response": {**event["response"], "output": []}}
            result.append(event)
            continue
        if (place, "") not in kept:  # where the item's content, and its name, are surely said
            kept[place, ""] = draw(st.sampled_from(["deltas", "item", *(["end"] if at_end else [])]))
        sure = kept[place, ""]
        if kind.endswith("item.added"):
            # Two flaws at once leave nothing by which to tell items apart.
            keep = sure == "deltas" or broken == "places are 0" or draw(st.booleans())
        elif kind.endswith(".delta"):
            # A server that leaves out a delta leaves out all that follow.
            before = kept.get((place, "deltas"), True)
            keep = kept[place, "deltas"] = before and (sure == "deltas" or draw(st.booleans()))
        elif kind.endswith("item.done"):
            keep = sure == "item" or draw(st.booleans())
        else:
            keep = draw(st.booleans())
        if keep:
            result.append(event)
    return script, [_broken(event, broken, number) for number, event in enumerate(result)]


def _broken(event: dict[str, Any], how: str, number: int) -> dict[str, Any]:
    event = json.loads(json.dumps(event))
    if "output_index" not in event:
        return event
    item = event.get("item", {})
    if how == "ids change":
        for of, name in ((event, "item_id"), (item, "id")):
            if name in of:
                of[name] = f"changed_{number}"
    elif how == "no ids":
        event.pop("item_id", None)
        item.pop("id", None)
    elif how == "no places":
        del event["output_index"]
    elif how == "places are 0":
        event["output_index"] = 0
    elif how == "places are text":
        event["output_index"] = str(event["output_index"])
    return event


@given(_subsets())
def test_whatever_the_server_leaves_out_everything_comes_once(case: tuple[Script, list[dict[str, Any]]]) -> None:
    script, events = case
    reply = joined(decode(events))
    assert reply.reasoning == "".join(script.reasoning)
    assert reply.text == "".join(script.tokens)
    assert sorted((call.id, call.name, call.arguments) for call in reply.tool_calls) == [
        (f"call_{n}x", tool.name, "".join(tool.arguments)) for n, tool in enumerate(script.tool_calls)
    ]
    assert reply.finish_reason == script.finish


def test_only_the_last_event_has_the_content() -> None:
    (chunk,) = decode([events_of(FULL)[-1]])
    assert said(joined([chunk])) == said(joined(decode(events_of(FULL))))


def test_arguments_wait_for_the_name() -> None:
    events = [event for event in events_of(FULL) if event["type"] != "response.output_item.added"]
    deltas = [delta for chunk in decode(events) for delta in chunk.tool_calls]
    assert [(d.index, d.id, d.name, d.arguments) for d in deltas] == [
        (0, "call_a", "f", '{"a":1}'),
        (1, "call_b", "g", "{}"),
    ]


def test_a_call_whose_name_never_comes_is_not_lost() -> None:
    delta = {"type": "response.function_call_arguments.delta", "item_id": "fc_1", "output_index": 0, "delta": "{}"}
    (call,) = joined(decode([delta, {"type": "response.completed", "response": {}}])).tool_calls
    assert (call.id, call.name, call.arguments) == ("fc_1", "", "{}")


def test_several_parts_and_summaries() -> None:
    message: dict[str, Any] = {
        "type": "message",
        "id": "m1",
        "content": [{"type": "output_text", "text": "ab"}, {"type": "refusal", "refusal": "no"}],
    }
    thought = {
        "type": "reasoning",
        "id": "r1",
        "summary": [{"type": "summary_text", "text": "s0"}, {"type": "summary_text", "text": "s1"}],
        "content": [{"type": "reasoning_text", "text": "c0"}],
    }
    events: list[dict[str, Any]] = [
        {"type": "response.reasoning_summary_text.delta", "item_id": "r1", "summary_index": 0, "delta": "s"},
        {"type": "response.reasoning_summary_text.done", "item_id": "r1", "summary_index": 0, "text": "s0"},
        {"type": "response.reasoning_summary_part.done", "item_id": "r1", "summary_index": 1, "part": {"text": "s1"}},
        {"type": "response.reasoning_text.done", "item_id": "r1", "content_index": 0, "text": "c"},
        {"type": "response.output_item.done", "item": thought},
        {"type": "response.output_text.delta", "item_id": "m1", "content_index": 0, "delta": "a"},
        {"type": "response.refusal.delta", "item_id": "m1", "content_index": 1, "delta": "n"},
        {"type": "response.content_part.done", "item_id": "m1", "content_index": 0, "part": message["content"][0]},
        {"type": "response.refusal.done", "item_id": "m1", "content_index": 1, "refusal": "no"},
        {"type": "response.completed", "response": {"output": [thought, message]}},
    ]
    reply = joined(decode(events))
    assert reply.reasoning == "s0s1c0"
    assert reply.text == "anbo"  # in the order in which it came
    assert reply.finish_reason == "stop"  # as in a chat answer: a refusal is a whole answer


def test_custom_tool_calls() -> None:
    item = {"type": "custom_tool_call", "id": "ct", "call_id": "c", "name": "sql", "input": ""}
    events: list[dict[str, Any]] = [
        {"type": "response.output_item.added", "output_index": 0, "item": item},
        {"type": "response.custom_tool_call_input.delta", "output_index": 0, "item_id": "ct", "delta": "sel"},
        {"type": "response.custom_tool_call_input.done", "output_index": 0, "item_id": "ct", "input": "select"},
        {"type": "response.output_item.done", "output_index": 0, "item": {**item, "input": "select 1"}},
        {"type": "response.completed", "response": {"output": [{**item, "input": "select 1"}]}},
    ]
    reply = joined(decode(events))
    (call,) = reply.tool_calls
    assert (call.id, call.name, call.arguments) == ("c", "sql", "select 1")
    assert reply.finish_reason == "tool_calls"


def test_built_in_tools_and_unknown_events_are_passed_over() -> None:
    search = {"type": "web_search_call", "id": "ws", "status": "completed"}
    events: list[dict[str, Any]] = [
        {"type": "response.output_item.added", "output_index": 0, "item": search},
        {"type": "response.web_search_call.searching", "output_index": 0, "item_id": "ws"},
        {"type": "response.mcp_call_arguments.delta", "output_index": 0, "item_id": "x", "delta": "{}"},
        {"type": "response.output_item.done", "output_index": 0, "item": search},
        {"type": "codex.rate_limits", "delta": "x"},
        {"type": "response.something_new", "delta": "x"},
        {"type": "response.steer.failed", "error": {"code": "x", "message": "too late"}},
        {"type": "response.output_text.delta", "delta": "a", "logprobs": []},
        {"type": "response.completed", "response": {"output": [search, None, {"type": "message", "content": "ab"}]}},
    ]
    assert said(joined(decode(events))) == ("ab", "", (), "stop", None)


def test_fields_of_other_types_than_they_should_be() -> None:
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": {"id": 7, "model": None}},
        {"type": "response.output_text.delta", "delta": {"text": "a"}, "content_index": "0", "item_id": 5},
        {"type": "response.output_text.delta", "delta": None, "content_index": 0.0, "item_id": "5"},
        {"type": "response.output_text.done", "text": "ab", "content_index": None, "item_id": 5},
        {"type": "response.output_item.added", "item": "nothing"},
        {"type": "response.function_call_arguments.done", "item_id": "fc", "arguments": {"a": 1}},
        {"type": "response.content_part.done", "part": "nothing"},
        {
            "type": "response.output_item.done",
            "item": {"type": "function_call", "id": "fc", "name": "f", "arguments": {"a": 1}},
        },
        {
            "type": "response.completed",
            "response": {"output": {}, "usage": {"input_tokens": 3.0, "output_tokens": "x"}},
        },
    ]
    reply = joined(decode(events))
    assert (reply.text, reply.usage) == ("ab", Usage(3))
    (call,) = reply.tool_calls
    assert (call.id, call.name, call.arguments) == ("fc", "f", '{"a":1}')


def test_broken_text_does_not_end_the_answer() -> None:
    decoder = ResponsesDecoder()
    broken = decoder.event(b"", b'{"type":"response.output_text.delta","delta":"a\xffb"}')
    half = decoder.event(b"", b'{"type":"response.output_text.delta","delta":"\\ud83d"}')
    assert broken is not None
    assert half is not None
    assert (broken.text, half.text) == ("a�b", "�")
    assert decoder.event(b"", b"") is None


# --- ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "kind", "finish"),
    [
        ({"incomplete_details": {"reason": "max_output_tokens"}}, "incomplete", "length"),
        ({"incomplete_details": {"reason": "content_filter"}}, "incomplete", "content_filter"),
        ({"incomplete_details": {"reason": "steered"}}, "incomplete", "steered"),
        ({"incomplete_details": None}, "incomplete", "incomplete"),
        # vLLM's way to say it
        ({"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}, "completed", "length"),
        ({"status": "completed"}, "done", "stop"),
    ],
)
def test_finish_reasons(response: dict[str, Any], kind: str, finish: str) -> None:
    response = {**response, "usage": {"input_tokens": 1, "output_tokens": 2, "total_tokens": 3}}
    (chunk,) = decode([{"type": f"response.{kind}", "response": response}])
    assert (chunk.finish_reason, chunk.usage) == (finish, Usage(1, 2, 3))


def test_the_response_object_itself_ends_a_stream() -> None:
    assert said(joined(decode([whole_response(FULL, BODY)]))) == said(joined(decode(events_of(FULL))))


@pytest.mark.parametrize("cut", range(len(events_of(FULL)) - 1))
def test_an_end_before_the_terminal_event_is_truncated(cut: int) -> None:
    decoder = ResponsesDecoder()
    for event in events_of(FULL)[:cut]:
        decoder.event(b"", json.dumps(event).encode())
    with pytest.raises(Truncated):
        decoder.end()
    assert decoder.event(b"", b"[DONE]") is None
    assert decoder.done
    with pytest.raises(Truncated):
        decoder.end()


def test_a_second_response_is_not_this_one() -> None:
    decoder = ResponsesDecoder()
    first = {"type": "response.created", "response": {"id": "resp_1"}}
    for _ in range(2):
        decoder.event(b"", json.dumps(first).encode())
    with pytest.raises(ProtocolError, match="resp_2"):
        decoder.event(b"", b'{"type":"response.created","response":{"id":"resp_2"}}')


@pytest.mark.parametrize("data", [b"hello", b"[1]", b'"a"', b"<html>", b'{"type":'])
def test_what_is_no_event_is_shown(data: bytes) -> None:
    with pytest.raises(ProtocolError) as caught:
        ResponsesDecoder().event(b"", data)
    assert data.decode() in str(caught.value)


@pytest.mark.parametrize(
    "body", [b"[]", b"{}", b"nothing", b'{"choices":[]}', b'{"object":"response","status":"queued"}']
)
def test_what_is_no_whole_answer(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_response(body)


def test_a_failed_answer_has_its_usage() -> None:
    decoder = ResponsesDecoder()
    script = Script(tokens=("a",), finish_reason="error")
    with pytest.raises(ServerError) as caught:
        decode(events_of(script), decoder)
    assert (caught.value.code, caught.value.retryable) == ("server_error", True)
    assert decoder.usage == Usage(1, 1, 2)
    for body in (whole_response(script, BODY), {"object": "response", "status": "cancelled", "output": []}):
        with pytest.raises(ServerError):
            decode_response(json.dumps(body).encode())


@pytest.mark.parametrize(
    "event",
    [
        {"type": "response.output_item.added", "item": {"type": {}}},
        {"type": "response.output_item.done", "item": {"type": []}},
        {"type": "response.completed", "response": {"output": [{"type": {}}]}},
        {"type": "response.completed", "response": {"status": []}},
    ],
)
def test_fields_that_cannot_be_what_they_are_called_are_passed_over(event: dict[str, Any]) -> None:
    assert ResponsesDecoder().event(b"", msgspec.json.encode(event)) is None


@given(st.binary(max_size=60) | st.recursive(st.none() | st.integers() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "delta", "item", "response", "output", "content", "id", "error", "usage", "part", "text", "output_index", "item_id"]), inner | st.sampled_from(["response.output_item.done", "response.completed", "response.output_text.delta", "response.output_text.done", "message", "function_call", "reasoning"]), max_size=6), max_leaves=20).map(msgspec.json.encode))  # fmt: skip
def test_any_event_is_a_chunk_nothing_or_a_typed_error(data: bytes) -> None:
    decoder = ResponsesDecoder()
    for name in (b"", b"response.completed"):
        with contextlib.suppress(ServerError, ProtocolError):
            found = decoder.event(name, data)
            assert found is None or isinstance(found, Chunk)
    with contextlib.suppress(Truncated):
        assert isinstance(decoder.end(), Chunk)


@pytest.mark.parametrize("status", [[], {}, ["queued"], 7, None])
def test_a_status_that_is_no_text_is_none(status: object) -> None:
    chunk, _, _ = decode_response(json.dumps({"object": "response", "status": status, "output": []}).encode())
    assert (chunk.text, chunk.finish_reason) == ("", "stop")
