"""C10 to C12: odd but clear deltas of tool calls; never an error. tests/core/wire/test_tool_calls.py has the rules apart."""

from __future__ import annotations

import json
from typing import Any

import pytest

from spanwire.testing import Script
from tests.cases.play import (
    AB,
    DONE,
    END,
    ROLE,
    WAYS,
    Want,
    ask,
    delta,
    nothing_left,
    play,
    split_everywhere,
    tool,
    whole,
)
from tests.support import NEVER, serving

way_of = pytest.mark.parametrize("way", WAYS)
ONE = [("t1", "f", '{"a":1}')]
TWO = [*ONE, ("t2", "g", '{"b":2}')]
LEFT_OUT: Any = object()


def t(arguments: Any = LEFT_OUT, id: Any = LEFT_OUT, name: Any = LEFT_OUT, index: Any = LEFT_OUT) -> dict[str, Any]:
    """One entry of ``tool_calls`` with only what is given."""
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not LEFT_OUT}
    entry = {key: value for key, value in (("index", index), ("id", id)) if value is not LEFT_OUT}
    return {**entry, "function": function} if function else entry


def both(first: Any, second: Any) -> list[list[dict[str, Any]]]:
    """Two interleaved calls that are told apart by these indexes alone."""
    return [
        [t('{"a"', "t1", "f", first)],
        [t('{"b"', "t2", "g", second)],
        [t(":1}", index=first)],
        [t(":2}", index=second)],
    ]


#: Lists of entries, one for each delta, and the calls that they are.
DELTAS: dict[str, tuple[list[list[Any]], list[tuple[str, str, str]]]] = {
    # C10, the index
    "(a) no index": ([[t('{"a":', "t1", "f")], [t("1}")]], ONE),
    "(b) no index, two calls": ([[t('{"a":1}', "t1", "f")], [t('{"b":2}', "t2", "g")]], TWO),
    "(c) no index, one delta": ([[t('{"a":1}', "t1", "f"), t('{"b":2}', "t2", "g")]], TWO),
    "no index, one delta, in pieces": (
        [[t('{"a"', "t1", "f"), t('{"b"', "t2", "g")], [t(":2}")], [t(":1}", "t1")]],
        TWO,
    ),
    "no index, ids in all": ([[t('{"a"', "t1", "f")], [t('{"b"', "t2", "g")], [t(":1}", "t1")], [t(":2}", "t2")]], TWO),
    "index null": ([[t('{"a":', "t1", "f", None)], [t("1}", None, None, None)]], ONE),
    "an index given later": ([[t('{"a"', "t1", "f")], [t(":1}", index=0)], [t('{"b":2}', "t2", "g", 1)]], TWO),
    "an index given first": ([[t('{"a"', "t1", "f", 0)], [t(":1}")], [t('{"b":2}', "t2", "g")]], TWO),
    "the same index for all": ([[t('{"a":1}', "t1", "f", 0)], [t('{"b":2}', "t2", "g", 0)]], TWO),
    "the same index, in pieces": (
        [[t('{"a"', "t1", "f", 0)], [t(":1}", index=0)], [t('{"b"', "t2", "g", 0)], [t(":2}", index=0)]],
        TWO,
    ),
    "indexes from 1": (both(1, 2), TWO),
    "indexes with a gap": (both(3, 7), TWO),
    "indexes that fall": (both(7, 3), TWO),
    "negative indexes": (both(-1, -2), TWO),
    "indexes as text": (both("0", "1"), TWO),
    "indexes as floats": (both(0.0, 1.0), TWO),
    "indexes of mixed types": (
        [[t('{"a"', "t1", "f", 0)], [t('{"b"', "t2", "g", 1)], [t(":1}", index="0")], [t(":2}", index=1.0)]],
        TWO,
    ),
    "an index that is none": ([[t('{"a":', "t1", "f", "x")], [t("1}", index=[0])]], ONE),
    "an index that is true": ([[t('{"a":', "t1", "f", True)], [t("1}", index=True)]], ONE),
    # C11, id and name
    "(a) repeated": ([[t('{"a"', "t1", "f", 0)], [t(":1}", "t1", "f", 0)]], ONE),
    "(b) empty": ([[t('{"a"', "t1", "f", 0)], [t(":1}", "", "", 0)]], ONE),
    "(c) id without name": ([[t('{"a"', "t1", "f", 0)], [t(":1}", "t1", index=0)]], ONE),
    "name without id": ([[t('{"a"', "t1", "f", 0)], [t(":1}", name="f", index=0)]], ONE),
    "null": ([[t('{"a"', "t1", "f", 0)], [t(":1}", None, None, 0)]], ONE),
    "repeated without index": ([[t('{"a"', "t1", "f")], [t(":1}", "t1", "f")]], ONE),
    "empty without index": ([[t('{"a"', "t1", "f")], [t(":1}", "", "")]], ONE),
    "id first, then name, then arguments": (
        [[t(id="t1", index=0)], [t(name="f", index=0)], [t('{"a":1}', index=0)]],
        ONE,
    ),
    "name first, then id": ([[t("", None, "f", 0)], [t('{"a":1}', "t1", index=0)]], [("call_0", "f", '{"a":1}')]),
    "arguments first": ([[t('{"a"', index=0)], [t(":1}", "t1", "f", 0)]], ONE),
    "no id": ([[t('{"a"', name="f", index=0)], [t(":1}", index=0)]], [("call_0", "f", '{"a":1}')]),
    "no ids, two calls": (
        [[t('{"a":1}', name="f", index=0)], [t('{"b":2}', name="g", index=1)]],
        [("call_0", "f", '{"a":1}'), ("call_1", "g", '{"b":2}')],
    ),
    "neither id nor index, two calls": (
        [[t('{"a":1}', name="f")], [t('{"b":2}', name="g")]],
        [("call_0", "f", '{"a":1}'), ("call_1", "g", '{"b":2}')],
    ),
    "an id that is a number": ([[t('{"a"', 5, "f", 0)], [t(":1}", 5, index=0)]], [("5", "f", '{"a":1}')]),
    "the same name twice": (
        [[t('{"a":1}', "t1", "f", 0)], [t('{"a":2}', "t2", "f", 1)]],
        [("t1", "f", '{"a":1}'), ("t2", "f", '{"a":2}')],
    ),
    # C12, interleaving and arguments
    "(a) interleaved": (both(0, 1), TWO),
    "(a) interleaved in one delta": (
        [[t('{"a"', "t1", "f", 0), t('{"b"', "t2", "g", 1)], [t(":2}", index=1), t(":1}", index=0)]],
        TWO,
    ),
    "(b) null arguments": ([[t(None, "t1", "f", 0)], [t('{"a":1}', index=0)]], ONE),
    "(c) an object": ([[t({"a": 1}, "t1", "f", 0)]], ONE),
    "an object after null": ([[t(None, "t1", "f", 0)], [t({"a": 1}, index=0)]], ONE),
    "an empty object": ([[t({}, "t1", "f", 0)]], [("t1", "f", "{}")]),
    "a list": ([[t([1], "t1", "f", 0)]], [("t1", "f", "[1]")]),
    "empty arguments": ([[t("", "t1", "f", 0)], [t("", index=0)]], [("t1", "f", "")]),
    "no arguments": ([[t(id="t1", name="f", index=0)]], [("t1", "f", "")]),
    "no function at all": ([[{"index": 0, "id": "t1"}], [t('{"a":1}', name="f", index=0)]], ONE),
    "function null": ([[{"index": 0, "id": "t1", "function": None}], [t('{"a":1}', name="f", index=0)]], ONE),
    "function empty": ([[{"index": 0, "id": "t1", "function": {}}], [t('{"a":1}', name="f", index=0)]], ONE),
    "function of another type": ([[{"index": 0, "id": "t1", "function": "f"}], [t('{"a":1}', name="f", index=0)]], ONE),
    "an entry that is null": ([[None, t('{"a":1}', "t1", "f", 0)], [None], []], ONE),
    "an empty list between": ([[t('{"a"', "t1", "f", 0)], [], [t(":1}", index=0)]], ONE),
    "arguments in single characters": ([[t("", "t1", "f", 0)], *[[t(c, index=0)] for c in '{"a":1}']], ONE),
    "escapes in pieces": (
        [[t('{"a":"\\u00', "t1", "f", 0)], [t("e9 \\ud83d", index=0)], [t("\\ude42 \\", index=0)], [t('n"}', index=0)]],
        [("t1", "f", '{"a":"é 🙂 \\n"}')],
    ),
    "arguments that are no JSON": ([[t('{"a": oh', "t1", "f", 0)]], [("t1", "f", '{"a": oh')]),
}


@way_of
@pytest.mark.parametrize("name", DELTAS)
def test_odd_but_clear(name: str, way: str) -> None:
    lists, calls = DELTAS[name]
    want = Want(tools=calls, finish="tool_calls")
    events = [tool(*entries) for entries in lists]
    for seen in play(way, Script(writes=[ROLE, *events, delta("tool_calls"), DONE]), want):
        said: dict[int, list[str | None]] = {}
        for chunk in seen.chunks:
            for part in chunk.tool_calls:
                said.setdefault(part.index, []).extend(filter(None, (part.id, part.name)))
        # indexes from 0, and neither id nor name twice
        assert not said or list(said) == list(range(len(calls)))
        assert all(len(words) <= 2 for words in said.values())


@way_of
@pytest.mark.parametrize("name", ["(a) no index", "(b) no index, two calls", "(a) interleaved", "(c) an object"])
def test_the_finish_may_be_on_the_last_delta(name: str, way: str) -> None:
    lists, calls = DELTAS[name]
    events = [tool(*entries) for entries in lists[:-1]] + [tool(*lists[-1], finish="tool_calls")]
    play(way, Script(writes=[*events, DONE]), Want(tools=calls, finish="tool_calls"))
    play(way, Script(writes=events), Want(tools=calls, finish="tool_calls"))
    play(way, Script(writes=[AB, *events, DONE]), Want("ab", tools=calls, finish="tool_calls"))


LEGACY: dict[str, list[Any]] = {
    "in pieces": [{"name": "f", "arguments": ""}, {"arguments": '{"a"'}, {"arguments": ":1}"}],
    "with nulls": [{"name": "f", "arguments": None}, None, {"name": None, "arguments": '{"a":1}'}],
    "name repeated": [{"name": "f", "arguments": '{"a"'}, {"name": "f", "arguments": ":1}"}],
    "name empty": [{"name": "f", "arguments": '{"a"'}, {"name": "", "arguments": ":1}"}],
    "an object": [{"name": "f", "arguments": {"a": 1}}],
    "an empty one": [{"name": "f"}, {}, {"arguments": '{"a":1}'}],
}


@way_of
@pytest.mark.parametrize("name", LEGACY)
def test_the_schema_before_tools(name: str, way: str) -> None:
    events = [delta(function_call=piece) for piece in LEGACY[name]]
    want = Want(tools=[("call_0", "f", '{"a":1}')], finish="function_call")
    play(way, Script(writes=[ROLE, *events, delta("function_call"), DONE]), want)


@way_of
@pytest.mark.parametrize(
    "name",
    ["(c) no index, one delta", "(c) an object", "no ids, two calls", "indexes as text", "an entry that is null"],
)
def test_a_whole_answer_is_read_by_the_same_rules(name: str, way: str) -> None:
    lists, calls = DELTAS[name]
    if name == "indexes as text":
        lists = [[t('{"a":1}', "t1", "f", "0"), t('{"b":2}', "t2", "g", "1")]]
    entries = [entry for entry_list in lists for entry in entry_list]
    play(
        way, Script(body=whole("tool_calls", content=None, tool_calls=entries)), Want(tools=calls, finish="tool_calls")
    )


def test_split_anywhere() -> None:
    lists, calls = DELTAS["escapes in pieces"]
    stream = b"".join(tool(*entries) for entries in lists[:-1]) + tool(*lists[-1], finish="tool_calls") + DONE
    split_everywhere(stream, Want(tools=calls, finish="tool_calls"))


@way_of
def test_a_tool_call_among_everything_else(way: str) -> None:
    """Content, reasoning and tools in one delta; custom and unknown types; unknown keys."""
    entry = {**t('{"a":1}', "t1", "f", 0), "type": "function", "extra": {"x": [1]}}
    events = [
        delta(content="a", reasoning="hm", tool_calls=[entry]),
        delta(content="b", tool_calls=None),
        delta("stop"),
    ]
    play(way, Script(writes=[*events, DONE]), Want("ab", "hm", ONE))


@way_of
def test_a_large_call_comes_whole(way: str) -> None:
    arguments = json.dumps({"a": ["x" * 100] * 2000})
    pieces = [arguments[at : at + 5000] for at in range(0, len(arguments), 5000)]
    with serving(
        Script(writes=[tool(t("", "t1", "f", 0)), *[tool(t(piece, index=0)) for piece in pieces], END])
    ) as server:
        with nothing_left(server):
            seen = ask(way, server.endpoint(retries=NEVER))
    assert [call.arguments for call in seen.got.tool_calls] == [arguments]
