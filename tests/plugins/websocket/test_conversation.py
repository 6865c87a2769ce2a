"""What a socket's server remembers, and what therefore need not be sent: the pure part."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spanwire_websocket.conversation import Conversation, Outgoing, conversation_after, outgoing

from spanwire.calls import ToolCall


def item(text: str, role: str = "user") -> dict[str, Any]:
    return {"type": "message", "role": role, "content": text}


def call(id: str, arguments: str, name: str = "f") -> dict[str, Any]:
    return {"type": "function_call", "call_id": id, "name": name, "arguments": arguments}


def ask(*items: dict[str, Any], **more: Any) -> Outgoing:
    return outgoing({"model": "m", "input": list(items), **more})


def after(first: Outgoing, text: str = "", *calls: ToolCall, before: Conversation | None = None) -> Conversation:
    found = conversation_after(before, "r1", first, text, calls)
    assert found is not None
    return found


def event(call: Outgoing, known: Conversation | None) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(call.message(known))
    assert found.pop("type") == "response.create"
    return found


def test_only_what_is_new_goes_with_the_id_of_the_last_answer() -> None:
    known = after(ask(item("a"), item("b")), "c")
    more = ask(item("a"), item("b"), item("c", "assistant"), item("d"), temperature=1)
    assert known.is_continued_by(more)
    assert event(more, known) == {
        "model": "m",
        "temperature": 1,
        "previous_response_id": "r1",
        "input": [item("d")],
    }
    assert event(more, None) == {"model": "m", "temperature": 1, "input": more_items(more)}


def more_items(call: Outgoing) -> list[Any]:
    assert call.items is not None
    return [json.loads(one) for one in call.items]


@pytest.mark.parametrize(
    "changed",
    [
        ask(item("a")),
        ask(item("a"), item("c", "assistant")),  # nothing new
        ask(item("A"), item("c", "assistant"), item("d")),
        ask(item("a"), item("C", "assistant"), item("d")),
        ask(item("a"), item("d")),
        ask(item("a"), item("c", "user"), item("d")),
        ask(),
        outgoing({"model": "other", "input": [item("a"), item("c", "assistant"), item("d")]}),
        ask(item("a"), item("c", "assistant"), item("d"), previous_response_id="r0"),
        ask(item("a"), item("c", "assistant"), item("d"), conversation="conv_1"),
        outgoing({"model": "m", "input": "d"}),
    ],
)
def test_anything_else_is_sent_whole(changed: Outgoing) -> None:
    assert not after(ask(item("a")), "c").is_continued_by(changed)


def test_the_order_of_keys_does_not_count() -> None:
    known = after(ask(item("a")), "c")
    shuffled = {"content": "a", "role": "user", "type": "message"}
    assert known.is_continued_by(ask(shuffled, item("c", "assistant"), item("d")))


def test_settings_keep_the_order_of_their_keys() -> None:
    """A server writes an answer's fields in the order of the schema: the reasons before the verdict."""
    properties = {"reasons": {"type": "string"}, "answer": {"type": "string"}}
    asked = ask(item("a"), text={"format": {"schema": {"type": "object", "properties": properties}}})
    for known in (None, after(ask(generate=False))):
        sent = event(asked, known)
        assert list(sent["text"]["format"]["schema"]["properties"]) == ["reasons", "answer"]
        assert list(sent["text"]["format"]["schema"]) == ["type", "properties"]
    text = outgoing({"model": "m", "input": "a", "tools": [{"parameters": {"properties": properties}}]})
    assert list(event(text, None)["tools"][0]["parameters"]["properties"]) == ["reasons", "answer"]


@pytest.mark.parametrize(
    ("theirs", "mine", "same"),
    [
        ('{"a":1,"b":"ä"}', '{"b": "\\u00e4", "a": 1}', True),
        ('{"a":1}', '{"a":2}', False),
        ("", "{}", True),
        ("{broken", "{broken", True),
        ("{broken", "{broken ", False),
        ('{"a":1}', '{"a":1.0}', False),
        ('{"a":true}', '{"a":1}', False),
        ("[" * 100_000, "[" * 100_000, True),
    ],
)
def test_arguments_are_compared_as_json(theirs: str, mine: str, same: bool) -> None:
    known = after(ask(item("a")), "", ToolCall(id="1", name="f", arguments=theirs))
    following = ask(item("a"), call("1", mine), {"type": "function_call_output", "call_id": "1", "output": "x"})
    assert known.is_continued_by(following) is same


@pytest.mark.parametrize("other", [call("2", "{}"), call("1", "{}", "g")])
def test_calls_of_another_name_or_id_differ(other: dict[str, Any]) -> None:
    known = after(ask(item("a")), "", ToolCall(id="1", name="f", arguments="{}"))
    assert not known.is_continued_by(ask(item("a"), other, item("b")))


def test_a_text_as_input_is_sent_as_it_is_and_remembered_by_nobody() -> None:
    asked = outgoing({"model": "m", "input": "hello"})
    assert event(asked, None) == {"model": "m", "input": "hello"}
    assert conversation_after(None, "r1", asked, "x", ()) is None


def test_a_caller_who_names_the_parent_himself() -> None:
    first = after(ask(item("a")), "b")
    own = ask(item("c"), previous_response_id="r1")
    assert event(own, None)["previous_response_id"] == "r1"
    second = conversation_after(first, "r2", own, "d", ())
    assert second is not None
    assert second.id == "r2"
    assert second.is_continued_by(
        ask(item("a"), item("b", "assistant"), item("c"), item("d", "assistant"), item("e"))
    ), "a caller who then sends all of it"
    assert conversation_after(first, "r2", ask(item("c"), previous_response_id="r0"), "d", ()) is None
    assert conversation_after(None, "r2", own, "d", ()) is None


def test_a_warm_up_has_no_answer_to_be_appended() -> None:
    known = after(ask(item("s", "system"), generate=False))
    assert known.is_continued_by(ask(item("s", "system"), item("a")))
    assert not known.is_continued_by(ask(item("s", "system")))


@pytest.mark.parametrize("bad", [object(), {1: object()}, {"x": {3, object()}}])
def test_what_is_no_json_is_found_when_the_call_is_encoded(bad: Any) -> None:
    for request in ({"model": "m", "input": [], "x": bad}, {"model": "m", "input": [{"x": bad}]}):
        with pytest.raises((TypeError, ValueError)):
            outgoing(request)


words = st.text(max_size=5)
items = st.lists(st.builds(item, words, st.sampled_from(["user", "assistant", "system"])), max_size=6)


@given(items, words, items)
def test_whatever_is_sent_the_server_has_all_of_it_in_the_end(first: list[Any], reply: str, new: list[Any]) -> None:
    """What it remembers and what is sent, together, are the call's own items."""
    known = after(ask(*first), reply)
    whole = [*first, item(reply, "assistant"), *new]
    asked = ask(*whole)
    assert known.is_continued_by(asked) is bool(new)
    if new:
        assert event(asked, known)["input"] == new
        assert event(asked, None)["input"] == whole


@given(items, items)
def test_only_a_true_beginning_is_continued(one: list[Any], other: list[Any]) -> None:
    known = Conversation("r", ask(*one).digests, "m")
    assert known.is_continued_by(ask(*other)) is (len(other) > len(one) and other[: len(one)] == one)
