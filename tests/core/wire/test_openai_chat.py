"""The chat-completions and embeddings codec: what servers send in, chunks out."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spanwire.calls import Chunk, Reply, ReplyBuilder, ToolCall, Usage
from spanwire.errors import (
    AuthenticationFailed,
    BadRequest,
    Overloaded,
    ProtocolError,
    RateLimited,
    ServerError,
    Truncated,
)
from spanwire.wire.openai_chat import ChatDecoder, decode_chat, decode_embeddings, error_in

HEAD: dict[str, Any] = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m-1"}
DONE = b"[DONE]"


def dump(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def event(delta: Any = None, finish: Any = None, *, head: dict[str, Any] | None = None, **more: Any) -> bytes:
    body = {**(HEAD if head is None else head), "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
    return dump({**body, **more})


STOP = event({}, "stop")


class Answer:
    """A decoder, and everything that came out of it."""

    def __init__(self, *events: bytes | tuple[bytes, bytes]) -> None:
        self.decoder = ChatDecoder()
        self.chunks: list[Chunk] = []
        for item in events:
            name, data = item if isinstance(item, tuple) else (b"", item)
            chunk = self.decoder.event(name, data)
            if chunk is not None:
                self.chunks.append(chunk)

    def end(self) -> Reply:
        last = self.decoder.end()
        if last is not None:
            self.chunks.append(last)
        builder = ReplyBuilder()
        builder.add(self.chunks)
        return builder.reply(id=self.decoder.id, model=self.decoder.model)


def reply(*events: bytes | tuple[bytes, bytes]) -> Reply:
    return Answer(*events).end()


# both shapes of server: with id and model (decoded on the short path after the first event), and without
heads = pytest.mark.parametrize("head", [HEAD, {}], ids=["full", "bare"])


@heads
def test_a_plain_answer(head: dict[str, Any]) -> None:
    answer = Answer(
        event({"role": "assistant", "content": ""}, head=head),
        event({"content": "a"}, head=head),
        event({"content": "b"}, head=head),
        event({}, "stop", head=head),
        DONE,
    )
    got = answer.end()
    assert (got.text, got.reasoning, got.tool_calls, got.finish_reason, got.usage) == ("ab", "", (), "stop", None)
    assert (got.id, got.model) == (head.get("id"), head.get("model"))
    assert answer.decoder.done
    assert [chunk.has_content for chunk in answer.chunks] == [False, True, True, False]


@heads
@given(pieces=st.lists(st.text(), max_size=12))
def test_any_pieces_of_text_come_back(head: dict[str, Any], pieces: list[str]) -> None:
    events = [event({"content": piece}, head=head) for piece in pieces]
    answer = Answer(*events, event({}, "stop", head=head), DONE)
    assert [chunk.text for chunk in answer.chunks[:-1]] == pieces
    assert [chunk.raw for chunk in answer.chunks[:-1]] == events
    assert answer.end().text == "".join(pieces)


@heads
@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
@given(pieces=st.lists(st.tuples(st.booleans(), st.text(min_size=1)), max_size=8))
def test_text_and_reasoning_are_kept_apart(head: dict[str, Any], key: str, pieces: list[tuple[bool, str]]) -> None:
    events = [
        event({key: piece, "content": None} if thinking else {"content": piece}, head=head)
        for thinking, piece in pieces
    ]
    got = reply(*events, event({}, "stop", head=head))
    assert got.text == "".join(piece for thinking, piece in pieces if not thinking)
    assert got.reasoning == "".join(piece for thinking, piece in pieces if thinking)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([
                "id", "model", "choices", "index", "delta", "message", "content", "text", "finish_reason", "usage", "tool_calls", "function",
                "function_call", "name", "arguments", "prompt_tokens", "reasoning", "thinking", "prompt_tokens_details", "x",
            ]),
            inner,
            max_size=5,
        ),
        max_leaves=30,
    ),
    st.booleans(),
)  # fmt: skip
def test_json_of_any_shape_is_a_chunk_or_a_protocol_error(value: Any, later: bool) -> None:
    """Never a bug's exception: TypeError, AttributeError, a msgspec error, ..."""
    decoder = ChatDecoder()
    if later:
        decoder.event(b"", event({"role": "assistant"}))
    try:
        chunk = decoder.event(b"", dump(value))
    except ProtocolError:
        assert not isinstance(value, dict)
    else:
        assert isinstance(value, dict)
        if chunk is not None:
            assert isinstance(chunk.text, str)
            assert isinstance(chunk.reasoning, str)
            assert chunk.finish_reason is None or isinstance(chunk.finish_reason, str)


@given(st.binary(max_size=40), st.booleans())
def test_bytes_that_are_no_json_are_a_protocol_error(data: bytes, later: bool) -> None:
    decoder = ChatDecoder()
    if later:
        decoder.event(b"", event({"role": "assistant"}))
    try:
        decoder.event(b"", b"<" + data)
    except ProtocolError as error:
        assert error.__cause__ is not None  # noqa: PT017 (what else it may raise is the point)
    else:
        pytest.fail("taken for an answer")


def test_a_bad_event_is_shown_but_not_all_of_it() -> None:
    with pytest.raises(ProtocolError, match="<html>") as caught:
        reply(b"<html>" + b"x" * 10_000)
    assert len(str(caught.value)) < 300


@heads
def test_a_broken_character_is_replaced_and_the_answer_goes_on(head: dict[str, Any]) -> None:
    broken = event({"content": "aXb"}, head=head).replace(b"X", b"\xff")
    got = reply(event({"role": "assistant"}, head=head), broken, event({"content": "c"}, head=head), STOP)
    assert got.text == "a\ufffdbc"


def test_line_separators_inside_text_are_text() -> None:
    text = "a\u2028b\u0085c\u2029d"
    assert reply(event({"content": text}), STOP).text == text


@heads
@pytest.mark.parametrize("data", [b"[DONE]", b" [DONE]", b"[DONE]\n", b"\t[DONE] "])
def test_done_in_any_spelling(head: dict[str, Any], data: bytes) -> None:
    answer = Answer(event({"content": "a"}, head=head), data)
    assert answer.decoder.done
    assert len(answer.chunks) == 1
    assert answer.end().text == "a"
    assert answer.end().finish_reason is None  # never made up


@heads
@pytest.mark.parametrize("data", [b"", b" ", b"\n"])
def test_a_heartbeat_with_empty_data_is_nothing(head: dict[str, Any], data: bytes) -> None:
    answer = Answer(data, event({"content": "a"}, head=head), data, event({}, "stop", head=head), data)
    assert len(answer.chunks) == 2
    assert answer.end().text == "a"


# --- nulls, empties, lists ---------------------------------------------------------------------------------------------


@heads
@pytest.mark.parametrize(
    "odd",
    [
        {"choices": []},
        {"choices": None},
        {"choices": [], "prompt_filter_results": []},
        {},
        {"error": None, "choices": []},
        {"choices": [], "usage": None},
        {"choices": "x"},
    ],
    ids=str,
)
def test_events_without_a_choice_are_no_chunk_and_no_error(head: dict[str, Any], odd: dict[str, Any]) -> None:
    answer = Answer(
        dump({**head, **odd}), event({"content": "a"}, head=head), dump({**head, **odd}), event({}, "stop", head=head)
    )
    assert len(answer.chunks) == 2
    assert answer.end().text == "a"


@heads
@pytest.mark.parametrize(
    "delta",
    [None, {}, {"content": None}, {"content": ""}, {"role": "assistant"}, {"tool_calls": None}, {"tool_calls": []}, {"content": 5}, []],
    ids=str,
)  # fmt: skip
def test_deltas_without_content(head: dict[str, Any], delta: Any) -> None:
    answer = Answer(event(delta, head=head), event({"content": "a"}, head=head), event(delta, head=head), STOP)
    assert answer.end().text == "a"
    assert [chunk.has_content for chunk in answer.chunks] == [False, True, False, False]


@heads
def test_content_as_a_list_of_parts(head: dict[str, Any]) -> None:
    parts = [
        {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
        {"type": "text", "text": "a"},
        "b",
        {"type": "reference", "reference_ids": [1]},
    ]
    got = reply(event({"content": parts}, head=head), event({"content": "c"}, head=head), STOP)
    assert (got.text, got.reasoning) == ("abc", "hm")


@heads
@pytest.mark.parametrize("empty", [None, {}, "", False, []])
def test_an_empty_error_is_no_error(head: dict[str, Any], empty: Any) -> None:
    events = [
        event({"content": "a"}, head=head, error=empty),
        event({"content": ["b"]}, head=head, error=empty),
        event({}, "stop", head=head, error=empty),
    ]
    assert reply(*events).text == "ab"


@heads
def test_only_the_first_choice_is_the_answer(head: dict[str, Any]) -> None:
    both = [
        {"index": 1, "delta": {"content": "no"}, "finish_reason": None},
        {"index": 0, "delta": {"content": "yes"}, "finish_reason": None},
    ]
    other = [{"index": 1, "delta": {"content": "no"}, "finish_reason": "stop"}]
    alone = [{"index": 1, "delta": {"content": "no"}, "finish_reason": None}]
    got = Answer(*(dump({**head, "choices": choices}) for choices in (both, both, alone, other)))
    assert [chunk.text for chunk in got.chunks] == ["yes", "yes"]
    assert got.decoder.finish_reason is None


@heads
def test_a_choice_without_an_index_is_the_first(head: dict[str, Any]) -> None:
    for index in ({}, {"index": None}):
        data = dump({**head, "choices": [{**index, "delta": {"content": "a"}, "finish_reason": None}]})
        assert reply(data, data, STOP).text == "aa"


def test_finish_reason_is_what_the_server_says() -> None:
    for reason in ("stop", "length", "tool_calls", "content_filter", "a_new_one"):
        answer = Answer(event({"content": "a"}, reason))
        assert answer.chunks[0].text == "a"
        assert answer.end().finish_reason == reason
    for none in (None, ""):
        answer = Answer(event({"content": "a"}, none), DONE)
        assert answer.end().finish_reason is None


def test_id_and_model_may_come_late_and_empty_ones_say_nothing() -> None:
    answer = Answer(
        event({"content": "a"}, head={"id": "", "model": ""}),
        event({"content": "b"}, head={"id": "i"}),
        event({"content": "c"}, head={"model": "m"}),
        STOP,
    )
    got = answer.end()
    assert (got.id, got.model, got.text) == ("i", "m", "abc")


# --- the end -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "events",
    [
        [],
        [event({"role": "assistant", "content": ""})],
        [event({"content": "a"})],
        [DONE],
        [event({"content": "a"}, None), dump({**HEAD, "choices": [], "usage": {"prompt_tokens": 1}})],
        [event({"content": "a"}, "")],
    ],
    ids=["nothing", "role", "text", "done only", "usage", "empty reason"],
)
def test_a_stream_that_is_not_complete_is_truncated(events: list[bytes]) -> None:
    answer = Answer(*events)
    with pytest.raises(Truncated) as caught:
        answer.decoder.end()
    assert caught.value.retryable


@pytest.mark.parametrize("odd", [{}, {"choices": []}, {"choices": None}, {"object": "x"}], ids=str)
def test_a_stream_without_any_chunk_is_no_success(odd: dict[str, Any]) -> None:
    """[DONE] alone says that the server has stopped, not that it has answered."""
    answer = Answer(dump({**HEAD, **odd}), DONE)
    assert not answer.chunks
    with pytest.raises(Truncated):
        answer.decoder.end()


@pytest.mark.parametrize("events", [[STOP], [event({"content": "a"}), DONE], [event({"content": "a"}, "length"), DONE]])
def test_a_finish_reason_or_done_completes_an_answer(events: list[bytes]) -> None:
    assert Answer(*events).decoder.end() is None


# --- usage -------------------------------------------------------------------------------------------------------------

COUNTS = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def with_usage(usage: Any, *, head: dict[str, Any], **more: Any) -> bytes:
    return dump({**head, "choices": [], "usage": usage, **more})


def running(number: int, head: dict[str, Any], finish: str | None = None, **delta: Any) -> bytes:
    """``continuous_usage_stats``: a count with every event."""
    usage = {"prompt_tokens": 3, "completion_tokens": number, "total_tokens": 3 + number}
    return event(delta, finish, head=head, usage=usage)


@heads
def test_usage_after_the_finish_reason(head: dict[str, Any]) -> None:
    answer = Answer(
        event({"content": "a"}, head=head), event({}, "stop", head=head), with_usage(COUNTS, head=head), DONE
    )
    assert answer.end().usage == Usage(3, 2, 5)
    assert [chunk.usage for chunk in answer.chunks] == [None, None, Usage(3, 2, 5)]
    assert not answer.chunks[2].has_content


@heads
@pytest.mark.parametrize("last", ["nothing", "finish", "final"])
def test_a_running_count_goes_out_once_and_it_is_the_last_one(head: dict[str, Any], last: str) -> None:
    events = [running(0, head, role="assistant"), running(1, head, content="a"), running(2, head, content="b")]
    if last == "nothing":
        events.append(DONE)
    else:
        events.append(running(3, head, "stop"))
    if last == "final":
        events += [with_usage({**COUNTS, "completion_tokens": 4, "total_tokens": 7}, head=head), DONE]
    answer = Answer(*events)
    got = answer.end()
    expected = {"nothing": 2, "finish": 3, "final": 4}[last]
    assert got.text == "ab"
    assert got.usage == Usage(3, expected, 3 + expected)
    assert sum(chunk.usage is not None for chunk in answer.chunks) == 1
    assert answer.decoder.end() is None


@heads
def test_usage_repeated_goes_out_once(head: dict[str, Any]) -> None:
    answer = Answer(event({}, "stop", head=head), with_usage(COUNTS, head=head), with_usage(COUNTS, head=head))
    assert answer.end().usage == Usage(3, 2, 5)
    assert sum(chunk.usage is not None for chunk in answer.chunks) == 1


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (None, None),
        ({}, None),
        ([], None),
        ("x", None),
        ({"prompt_tokens": None, "completion_tokens": None}, None),
        ({"prompt_tokens": "3"}, None),
        ({"prompt_tokens": True}, None),
        ({"prompt_tokens": -1}, None),
        ({"prompt_tokens": 3.5}, None),
        ({"prompt_tokens": 3.0}, Usage(3)),
        ({"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}, Usage(0, 0, 0)),
        ({"completion_tokens": 2}, Usage(None, 2, None)),
        ({"input_tokens": 3, "output_tokens": 2}, Usage(3, 2, None)),
        ({**COUNTS, "prompt_tokens_details": {"cached_tokens": 1}}, Usage(3, 2, 5, 1, None)),
        ({**COUNTS, "completion_tokens_details": {"reasoning_tokens": 1}}, Usage(3, 2, 5, None, 1)),
        ({**COUNTS, "prompt_tokens_details": None, "completion_tokens_details": []}, Usage(3, 2, 5)),
        ({**COUNTS, "cost": 0.1, "x": {}}, Usage(3, 2, 5)),
    ],
    ids=str,
)
def test_what_is_not_known_of_usage_is_left_out(usage: Any, expected: Usage | None) -> None:
    assert reply(STOP, with_usage(usage, head=HEAD)).usage == expected
    body = {**HEAD, "choices": [{"message": {"content": "a"}, "finish_reason": "stop"}], "usage": usage}
    assert decode_chat(dump(body))[0].usage == expected


# --- tool calls --------------------------------------------------------------------------------------------------------


def tool(index: Any, id: Any, name: Any, arguments: Any, **more: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    made = {"index": index, "id": id, "type": "function", "function": function, **more}
    return {key: value for key, value in made.items() if value is not None}


@heads
@pytest.mark.parametrize(
    "lists",
    [
        [[tool(0, "t1", "f", '{"a"'), tool(1, "t2", "g", '{"b":')], [tool(1, None, None, "2}"), tool(0, None, None, ":1}")]],
        [[tool(None, "t1", "f", '{"a":1}'), tool(None, "t2", "g", '{"b":2}')]],
        [[tool(None, "t1", "f", '{"a":1}')], [tool(None, "t2", "g", '{"b":2}')]],
        [[tool(0, "t1", "f", {"a": 1})], [tool(1, "t2", "g", {"b": 2})]],
        [[tool(0, "t1", "f", '{"a":1}')], [tool(0, "t2", "g", '{"b":2}')]],
        [[tool(0, "t1", "f", None)], [tool(0, "t1", "f", '{"a":1}')], [tool(1, "t2", "g", '{"b":2}'), tool(1, "", "", "")]],
        [[tool(0, "t1", "f", '{"a":1}'), None, "x"], [tool(1, "t2", "g", '{"b":2}')]],
        [[{"index": 0, "id": "t1", "function": {"name": "f", "arguments": '{"a":1}'}, "extra": [1]}], [tool(1, "t2", "g", '{"b":2}')]],
        [[tool(0, "t1", "f", ""), {"index": 0, "function": None}], [tool(0, None, None, '{"a":1}')], [tool(1, "t2", "g", '{"b":2}')]],
    ],
)  # fmt: skip
def test_tool_calls(head: dict[str, Any], lists: list[list[Any]]) -> None:
    events = [event({"tool_calls": tools, "content": None}, head=head) for tools in lists]
    answer = Answer(event({"role": "assistant"}, head=head), *events, event({}, "tool_calls", head=head), DONE)
    found = answer.end().tool_calls
    assert [(call.id, call.name, json.loads(call.arguments)) for call in found] == [
        ("t1", "f", {"a": 1}),
        ("t2", "g", {"b": 2}),
    ]
    assert all(chunk.has_content for chunk in answer.chunks[1:-1])
    assert answer.end().finish_reason == "tool_calls"


@heads
def test_an_id_that_is_a_number_is_an_id(head: dict[str, Any]) -> None:
    events = [event({"tool_calls": [tool(None, number, "f", "{}")]}, head=head) for number in (7, 8)]
    assert [call.id for call in reply(*events, STOP).tool_calls] == ["7", "8"]


@heads
def test_the_schema_before_tools(head: dict[str, Any]) -> None:
    events = [
        event({"function_call": {"name": "f", "arguments": '{"a"'}}, head=head),
        event({"function_call": {"arguments": ":1}"}}, head=head),
        event({}, "function_call", head=head),
    ]
    assert reply(*events).tool_calls == (ToolCall("call_0", "f", '{"a":1}'),)


@heads
@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_text_and_reasoning_in_one_event(head: dict[str, Any], key: str) -> None:
    events = [event({"content": text, key: thought}, head=head) for text, thought in (("a", "x"), ("b", "y"))]
    got = reply(*events, event({}, "stop", head=head))
    assert (got.text, got.reasoning) == ("ab", "xy")


@heads
def test_text_and_tool_calls_in_one_event(head: dict[str, Any]) -> None:
    delta = {"content": "a", "reasoning": "r", "tool_calls": [tool(0, "t1", "f", "{}")]}
    got = reply(event({"role": "assistant"}, head=head), event(delta, "tool_calls", head=head))
    assert (got.text, got.reasoning, got.tool_calls) == ("a", "r", (ToolCall("t1", "f", "{}"),))
    assert got.finish_reason == "tool_calls"


# --- errors inside a stream --------------------------------------------------------------------------------------------


@heads
@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize(
    ("name", "data", "cls", "code", "message"),
    [
        (b"", dump({"error": {"message": "quota", "type": "rate_limit", "code": 429}}), RateLimited, 429, "quota"),
        (b"", dump({"error": {"message": "slow", "code": 504}}), ServerError, 504, "slow"),
        (b"", dump({"error": {"message": "busy", "code": "503"}}), Overloaded, "503", "busy"),
        (b"", dump({"error": "plain words"}), ServerError, None, "plain words"),
        (b"", dump({"error": {"message": "m", "type": "server_error"}}), ServerError, "server_error", "m"),
        (b"", dump({"error": {"message": "m", "code": None, "type": "t"}, "choices": []}), ServerError, "t", "m"),
        (b"", dump({"error": {"code": 400}, "message": "outside"}), BadRequest, 400, "outside"),
        (b"error", dump({"error": {}}), ServerError, None, "error"),
        (b"", dump({"object": "error", "message": "m", "code": 400}), BadRequest, 400, "m"),  # vLLM before 0.10
        (b"error", dump({"message": "m", "code": 500}), ServerError, 500, "m"),
        (b"error", dump({"error": {"message": "m", "code": 401}}), AuthenticationFailed, 401, "m"),
        (b"error", dump({"detail": "m"}), ServerError, None, "m"),
        (b"error", b"overloaded, plain text", ServerError, None, "overloaded, plain text"),
        (b"error", b'"json text"', ServerError, None, "json text"),
    ],
)
def test_errors_in_a_stream(
    head: dict[str, Any], first: bool, name: bytes, data: bytes, cls: type[ServerError], code: Any, message: str
) -> None:
    answer = Answer() if first else Answer(event({"content": "ab"}, head=head))
    with pytest.raises(ServerError) as caught:
        answer.decoder.event(name, data)
    assert type(caught.value) is cls
    assert caught.value.code == code
    assert caught.value.status is None
    assert message in str(caught.value)
    assert "".join(chunk.text for chunk in answer.chunks) == ("" if first else "ab")


@heads
def test_an_error_with_a_broken_character_is_still_an_error(head: dict[str, Any]) -> None:
    data = dump({"error": {"message": "quXota", "code": 429}}).replace(b"X", b"\xff")
    answer = Answer(event({"content": "ab"}, head=head))
    with pytest.raises(RateLimited, match="qu\ufffdota"):
        answer.decoder.event(b"", data)


def test_events_of_other_names_are_answers() -> None:
    assert reply((b"message", event({"content": "a"})), (b"chunk", STOP)).text == "a"


# --- bodies of errors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "status", "message", "code"),
    [
        (b"slow down", 429, "slow down", None),
        (b'{"error":"rate limited"}', 429, "rate limited", None),
        (b'{"error":{"message":"m","code":"c"}}', 400, "m", "c"),
        (b'[{"error":{"message":"m","code":429,"status":"RESOURCE_EXHAUSTED"}}]', 429, "m", 429),
        (b'{"message":"m"}', 500, "m", None),
        (b'{"detail":"Not Found"}', 404, "Not Found", None),
        (
            b'{"detail":[{"loc":["body","n",0],"msg":"bad","input":"x"},{"msg":"worse"}]}',
            422,
            "body.n.0: bad; worse",
            None,
        ),
        (b'{"detail":[{"loc":["body"],"input":"x"}]}', 422, "body: not valid", None),
        (b'{"detail":[{"loc":"body","msg":"bad"}]}', 422, "bad", None),
        (b'{"detail":["first","second"]}', 422, "first; second", None),
        (b'{"object":"error","message":"m","code":400}', 400, "m", 400),
        (b'"words"', 400, "words", None),
        (b"", 503, "503 Service Unavailable", None),
        (b"  \n", 503, "503 Service Unavailable", None),
        (b"{}", 503, "503 Service Unavailable", None),
        (b"<html><body>secret page</body></html>", 502, "502 Bad Gateway", None),
        (b"", 599, "status 599", None),
        (b"", None, "without a message", None),
        (b'{"error":{"message":"m","code":true}}', 400, "m", None),
        (b'{"error":{"message":"m","code":1.5}}', 400, "m", None),
        (b"a\xffb", 400, "a\ufffdb", None),
    ],
)
def test_error_bodies_of_all_forms(body: bytes, status: int | None, message: str, code: Any) -> None:
    error = error_in(body, status=status)
    assert message in str(error)
    assert (error.status, error.code) == (status, code)


def test_the_input_that_a_server_repeats_is_not_shown() -> None:
    body = dump({"detail": [{"loc": ["body"], "msg": "bad", "input": {"messages": ["tell nobody"]}}]})
    assert "tell nobody" not in str(error_in(body, status=422))


@pytest.mark.parametrize("loc", [5, 1.5, True, {"a": 1}, None, "x"])
def test_a_detail_of_another_form_is_no_bug(loc: Any) -> None:
    assert error_in(dump({"detail": [{"loc": loc, "msg": "bad"}]}), status=422).message


def test_an_error_keeps_what_it_is_given_and_a_long_message_is_cut() -> None:
    error = error_in(b"x" * 5000, status=429, retry_after_s=3.0, headers={"a": "b"}, endpoint="h:1")
    assert (error.retry_after_s, error.headers, error.endpoint) == (3.0, {"a": "b"}, "h:1")
    assert type(error) is RateLimited
    assert len(error.message) == 1000


@given(
    st.binary(max_size=60)
    | st.text(max_size=20).map(dump)
    | st.dictionaries(
        st.sampled_from(["error", "message", "code", "detail"]),
        st.none() | st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2),
    ).map(dump)
)
def test_any_body_makes_an_error_with_a_message(body: bytes) -> None:
    assert error_in(body, status=500).message
    assert error_in(body).message


# --- whole answers -----------------------------------------------------------------------------------------------------


def test_a_whole_answer() -> None:
    body = dump(
        {
            **HEAD,
            "choices": [
                {
                    "index": 0,
                    "message": {
                        "role": "assistant",
                        "content": "a",
                        "reasoning_content": "r",
                        "tool_calls": [tool(None, "t1", "f", '{"a":1}'), tool(None, "t2", "g", {"b": 2})],
                    },
                    "finish_reason": "tool_calls",
                }
            ],
            "usage": COUNTS,
        }
    )
    chunk, id_, model = decode_chat(body)
    assert (id_, model) == ("chatcmpl-1", "m-1")
    assert (chunk.text, chunk.reasoning, chunk.finish_reason, chunk.usage) == ("a", "r", "tool_calls", Usage(3, 2, 5))
    assert [(delta.id, delta.name, delta.arguments) for delta in chunk.tool_calls] == [
        ("t1", "f", '{"a":1}'),
        ("t2", "g", '{"b":2}'),
    ]
    assert chunk.raw == body


def test_a_whole_answer_without_a_finish_reason_keeps_its_usage() -> None:
    chunk, _, _ = decode_chat(dump({"choices": [{"message": {"content": "a"}}], "usage": COUNTS}))
    assert (chunk.text, chunk.finish_reason, chunk.usage) == ("a", None, Usage(3, 2, 5))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>no</html>",
        b"[]",
        b"null",
        b'"text"',
        b"{}",
        b'{"choices":[]}',
        b'{"choices":null}',
        b'{"choices":[],"usage":{"prompt_tokens":1}}',
        b'{"usage":{"prompt_tokens":1}}',
        b'{"object":"list","data":[]}',
        b"[DONE]",
        b'{"choices":[{"message":{"content":"a"}}]',
    ],
)
def test_what_is_no_chat_completion_is_a_protocol_error(body: bytes) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode_chat(body)
    assert caught.value.phase == "read"
    assert not caught.value.retryable


def test_a_whole_answer_that_is_an_error_object() -> None:
    with pytest.raises(RateLimited, match="quota"):
        decode_chat(b'{"error":{"message":"quota","code":429}}')


# --- embeddings --------------------------------------------------------------------------------------------------------


def embeddings(*rows: Any, **more: Any) -> bytes:
    return dump({"object": "list", "data": list(rows), "model": "e", **more})


def test_vectors_come_in_the_order_of_the_input() -> None:
    found = decode_embeddings(
        embeddings(
            {"index": 1, "embedding": [0.5, 1]},
            {"index": 0, "embedding": [-1.5, 2e-3]},
            usage={"prompt_tokens": 4, "total_tokens": 4},
        )
    )
    assert found.vectors == [[-1.5, 0.002], [0.5, 1.0]]
    assert all(isinstance(number, float) for vector in found.vectors for number in vector)
    assert (found.model, found.usage) == ("e", Usage(4, None, 4))


def test_without_indexes_the_order_is_that_of_the_answer() -> None:
    found = decode_embeddings(embeddings({"embedding": [2]}, {"embedding": [1], "index": None}))
    assert found.vectors == [[2.0], [1.0]]
    assert found.usage is None


def test_two_vectors_of_one_text_are_an_error_and_indexes_that_say_nothing_are_not() -> None:
    with pytest.raises(ProtocolError, match="same index"):
        decode_embeddings(embeddings(*({"index": number, "embedding": [number]} for number in (0, 2, 2))))
    found = decode_embeddings(embeddings({"index": 0, "embedding": [2]}, {"index": 0, "embedding": [1]}))
    assert found.vectors == [[2.0], [1.0]]


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=8))
def test_base64_is_little_endian_float32(vector: list[float]) -> None:
    packed = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
    assert decode_embeddings(embeddings({"index": 0, "embedding": packed})).vectors == [vector]


@given(st.permutations(range(6)))
def test_any_order_of_rows_is_put_right(order: list[int]) -> None:
    found = decode_embeddings(embeddings(*({"index": number, "embedding": [number]} for number in order)))
    assert found.vectors == [[float(number)] for number in range(6)]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"[]",
        b"{}",
        b'{"data":null}',
        b'{"data":[1]}',
        embeddings({"index": 0}),
        embeddings({"index": 0, "embedding": None}),
        embeddings({"index": 0, "embedding": {"a": 1}}),
        embeddings({"index": 0, "embedding": [None]}),
        embeddings({"index": 0, "embedding": ["x"]}),
        embeddings({"index": 0, "embedding": "not base64!"}),
        embeddings({"index": 0, "embedding": base64.b64encode(b"12345").decode()}),
    ],
)
def test_what_is_no_list_of_vectors_is_a_protocol_error(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_embeddings(body)


def test_an_error_object_instead_of_vectors() -> None:
    with pytest.raises(BadRequest, match="too long"):
        decode_embeddings(b'{"error":{"message":"too long","code":400}}')
    with pytest.raises(ServerError, match="words"):
        decode_embeddings(b'{"error":"words"}')


def test_a_bad_vector_is_shown_but_not_all_of_it() -> None:
    with pytest.raises(ProtocolError) as caught:
        decode_embeddings(embeddings({"index": 0, "embedding": ["x"] * 5000}))
    assert len(str(caught.value)) < 300


def test_late_events_are_the_finish_reasons_and_the_last_ones() -> None:
    """The first of several answers ends long before the others, and what servers tell of their time comes last of all."""
    others = [dump({**HEAD, "choices": [{"index": 1, "delta": {"content": str(n)}}]}) for n in range(20)]
    last = [dump({**HEAD, "choices": [{"index": 1, "delta": {}, "finish_reason": "stop"}]})]
    usage = dump({**HEAD, "choices": [], "usage": {"prompt_tokens": 1}, "metrics": {"queue_time_ms": 1.0}})
    decoder = Answer(event({"content": "a"}), STOP, *others, *last, usage, DONE).decoder
    assert decoder.late_events[0] == STOP
    assert decoder.late_events[-1] == usage
    assert len(decoder.late_events) == 8
