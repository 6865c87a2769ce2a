"""Calls, chunks and replies: what they accept, what they show, how they join."""

import copy
import pickle
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spanwire.calls import Call, Chunk, Embeddings, Reply, ReplyBuilder, ToolCall, ToolCallDelta, Usage
from spanwire.errors import ConfigurationError

MESSAGES = [{"role": "user", "content": "tell nobody"}]


def test_chat_keeps_messages_and_parameters_in_the_body() -> None:
    call = Call.chat("m", MESSAGES, temperature=0, tools=None, headers={"x-a": "b"})
    assert (call.operation, call.model, call.headers) == ("chat", "m", {"x-a": "b"})
    assert call.body == {"messages": MESSAGES, "temperature": 0}


def test_false_and_zero_are_sent_only_none_is_left_out() -> None:
    call = Call.chat("m", MESSAGES, a=0, b=False, c="", d=[], e=None)
    assert set(call.body) == {"messages", "a", "b", "c", "d"}


def test_a_call_does_not_change_when_the_callers_list_does() -> None:
    messages: list[dict[str, Any]] = [*MESSAGES]
    headers = {"a": "b"}
    call = Call.chat("m", messages, headers=headers)
    messages.append({"role": "user", "content": "more"})
    headers["c"] = "d"
    assert call.body["messages"] == MESSAGES
    assert call.headers == {"a": "b"}


@pytest.mark.parametrize("stream", [True, False, None])
def test_stream_is_no_parameter(stream: bool | None) -> None:
    with pytest.raises(ConfigurationError, match=r"stream=.*manager\.stream"):
        Call.chat("m", MESSAGES, stream=stream)
    with pytest.raises(ConfigurationError, match=r"stream="):
        Call.embeddings("m", "text", stream=stream)


@pytest.mark.parametrize("n", [0, 2, "3"])
def test_one_call_is_one_answer(n: Any) -> None:
    with pytest.raises(ConfigurationError, match="n="):
        Call.chat("m", MESSAGES, n=n)
    assert Call.chat("m", MESSAGES, n=1).body["n"] == 1
    assert "n" not in Call.chat("m", MESSAGES, n=None).body


@pytest.mark.parametrize("model", ["", None, 3, b"m"])
def test_a_model_is_needed(model: Any) -> None:
    with pytest.raises(ConfigurationError, match="model"):
        Call.chat(model, MESSAGES)
    with pytest.raises(ConfigurationError, match="model"):
        Call.embeddings(model, "text")


@pytest.mark.parametrize("messages", ["hello", b"hello", {"role": "user"}, None, 5, iter(MESSAGES)])
def test_messages_have_to_be_a_list(messages: Any) -> None:
    with pytest.raises(ConfigurationError, match="messages"):
        Call.chat("m", messages)


@pytest.mark.parametrize("bad", ["tell nobody", None, ["a"]])
def test_each_message_has_to_be_a_mapping_and_the_bad_one_is_named(bad: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"messages\[1\]") as caught:
        Call.chat("m", [*MESSAGES, bad])
    assert "tell nobody" not in str(caught.value)


@pytest.mark.parametrize("input", ["text", ["a", "b"], [1, 2, 3], [[1, 2], [3]], ("a",)])
def test_embeddings_take_texts_and_token_ids(input: Any) -> None:
    call = Call.embeddings("m", input, dimensions=8, user=None)
    assert call.operation == "embeddings"
    assert call.body == {"input": input, "dimensions": 8}


@pytest.mark.parametrize("input", ["", [], (), b"text", None, 5, {"a": 1}])
def test_an_empty_or_strange_input_is_refused(input: Any) -> None:
    with pytest.raises(ConfigurationError, match="input"):
        Call.embeddings("m", input)


def test_calls_are_frozen_and_compare_by_identity() -> None:
    call = Call.chat("m", MESSAGES)
    with pytest.raises(AttributeError):
        call.model = "n"  # type: ignore[misc]
    assert call != Call.chat("m", MESSAGES)
    assert hash(call) == hash(call)


def test_nothing_shows_content() -> None:
    secret = "tell nobody"
    things: list[object] = [
        Call.chat("m", MESSAGES, headers={"authorization": secret}, user=secret),
        Chunk(text=secret, reasoning=secret, raw=secret.encode(), tool_calls=(ToolCallDelta(0, "t", "f", secret),)),
        ToolCallDelta(0, "t", "f", secret),
        ToolCall("t", "f", secret),
        Reply(text=secret, reasoning=secret, tool_calls=(ToolCall("t", "f", secret),), headers={"a": secret}),
        Embeddings([[1.0]], headers={"a": secret}),
    ]
    for thing in things:
        assert secret not in repr(thing)
        assert secret not in str(thing)


def test_rich_shows_no_content_either() -> None:
    """Rich, and with it typer's tracebacks, asks ``__rich_repr__`` before ``repr``; msgspec gives every struct one."""
    pretty = pytest.importorskip("rich.pretty")
    for thing in (
        Call.chat("m", MESSAGES, headers={"authorization": "tell nobody"}),
        Chunk(text="tell nobody", raw=b"tell nobody"),
        ToolCall("t", "f", "tell nobody"),
        ToolCallDelta(0, "t", "f", "tell nobody"),
        Reply(text="tell nobody"),
    ):
        assert "tell nobody" not in pretty.pretty_repr(thing)


@pytest.mark.parametrize("thing", [Call.chat("m", MESSAGES), Reply(text="a"), Embeddings([[1.0]])])
def test_calls_and_answers_can_be_pickled_and_copied(thing: Any) -> None:
    for twin in (pickle.loads(pickle.dumps(thing)), copy.deepcopy(thing)):
        assert type(twin) is type(thing)
        assert all(getattr(twin, field) == getattr(thing, field) for field in thing.__struct_fields__)


@pytest.mark.parametrize(
    ("chunk", "expected"),
    [
        (Chunk(), False),
        (Chunk(finish_reason="stop"), False),
        (Chunk(usage=Usage(1, 2, 3)), False),
        (Chunk(raw=b"{}"), False),
        (Chunk(text="a"), True),
        (Chunk(reasoning="a"), True),
        (Chunk(tool_calls=(ToolCallDelta(0),)), True),
    ],
)
def test_what_content_is(chunk: Chunk, expected: bool) -> None:
    assert chunk.has_content is expected


# --- ReplyBuilder ------------------------------------------------------------------------------------------------------


def join(*chunks: Chunk) -> Reply:
    builder = ReplyBuilder()
    builder.add(chunks)
    return builder.reply()


def test_nothing_added_gives_an_empty_reply_that_claims_nothing() -> None:
    reply = join()
    assert (reply.text, reply.reasoning, reply.tool_calls) == ("", "", ())
    assert (reply.finish_reason, reply.usage, reply.id, reply.model, reply.timeline) == (None, None, None, None, None)
    assert reply.headers == {}


def test_the_reply_has_what_it_is_given() -> None:
    reply = ReplyBuilder().reply(id="i", model="m", headers={"a": "b"})
    assert (reply.id, reply.model, reply.headers) == ("i", "m", {"a": "b"})


def test_text_on_the_chunk_with_the_finish_reason_and_usage_counts_too() -> None:
    reply = join(Chunk(text="a"), Chunk(text="b", finish_reason="stop", usage=Usage(1, 2, 3)))
    assert reply.text == "ab"
    assert reply.finish_reason == "stop"
    assert reply.usage == Usage(1, 2, 3)


def test_text_reasoning_and_tools_on_one_chunk_are_all_kept() -> None:
    reply = join(Chunk(text="a", reasoning="r", tool_calls=(ToolCallDelta(0, "t", "f", "{}"),)))
    assert (reply.text, reply.reasoning, reply.tool_calls) == ("a", "r", (ToolCall("t", "f", "{}"),))


def test_tool_calls_are_joined_by_index_in_order() -> None:
    reply = join(
        Chunk(tool_calls=(ToolCallDelta(0, "t", "f", '{"a"'), ToolCallDelta(1, "u", "g", "{"))),
        Chunk(tool_calls=(ToolCallDelta(1, arguments="}"),)),
        Chunk(tool_calls=(ToolCallDelta(0, arguments=":1}"),)),
    )
    assert reply.tool_calls == (ToolCall("t", "f", '{"a":1}'), ToolCall("u", "g", "{}"))


def test_tool_calls_are_in_the_order_of_their_indexes() -> None:
    reply = join(Chunk(tool_calls=(ToolCallDelta(1, "u", "g"),)), Chunk(tool_calls=(ToolCallDelta(0, "t", "f"),)))
    assert [tool.id for tool in reply.tool_calls] == ["t", "u"]


def test_id_and_name_may_come_late_and_the_first_ones_stay() -> None:
    reply = join(
        Chunk(tool_calls=(ToolCallDelta(0, None, None, "{"),)),
        Chunk(tool_calls=(ToolCallDelta(0, "t", None, "}"),)),
        Chunk(tool_calls=(ToolCallDelta(0, "other", "f", ""),)),
        Chunk(tool_calls=(ToolCallDelta(0, None, "other", ""),)),
    )
    assert reply.tool_calls == (ToolCall("t", "f", "{}"),)


def test_a_call_without_an_id_gets_one() -> None:
    reply = join(Chunk(tool_calls=(ToolCallDelta(0, None, "f", "{}"), ToolCallDelta(1, None, "g", "{}"))))
    assert [tool.id for tool in reply.tool_calls] == ["call_0", "call_1"]


chunks = st.builds(
    Chunk,
    text=st.text(max_size=3),
    reasoning=st.text(max_size=3),
    tool_calls=st.lists(
        st.builds(
            ToolCallDelta,
            index=st.integers(0, 2),
            id=st.none() | st.sampled_from("tu"),
            name=st.none() | st.sampled_from("fg"),
            arguments=st.text(max_size=3),
        ),
        max_size=2,
    ).map(tuple),
    finish_reason=st.none() | st.sampled_from(["stop", "length"]),
    usage=st.none() | st.builds(Usage, st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)),
)


@given(st.lists(chunks, max_size=12), st.lists(st.integers(0, 12), max_size=4))
def test_any_chunks_in_any_batches_join_to_all_their_pieces(items: list[Chunk], cuts: list[int]) -> None:
    builder = ReplyBuilder()
    edges = sorted({0, len(items), *(min(cut, len(items)) for cut in cuts)})
    for begin, end in pairwise(edges):
        builder.add(items[begin:end])
    reply = builder.reply()
    assert reply.text == "".join(item.text for item in items)
    assert reply.reasoning == "".join(item.reasoning for item in items)
    assert reply.finish_reason == next((i.finish_reason for i in reversed(items) if i.finish_reason), None)
    assert reply.usage == next((item.usage for item in reversed(items) if item.usage), None)
    assert (builder.finish_reason, builder.usage) == (reply.finish_reason, reply.usage)
    assert builder.content_chunks == sum(item.has_content for item in items)
    deltas = [delta for item in items for delta in item.tool_calls]
    for tool, index in zip(reply.tool_calls, sorted({delta.index for delta in deltas}), strict=True):
        mine = [delta for delta in deltas if delta.index == index]
        assert tool.arguments == "".join(delta.arguments for delta in mine)
        assert tool.id == next((delta.id for delta in mine if delta.id), f"call_{index}")
        assert tool.name == next((delta.name for delta in mine if delta.name), "")
