"""Tool-call deltas of any server come to one form, and join to the calls that the model made."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spanwire.calls import Chunk, ReplyBuilder, ToolCall, ToolCallDelta
from spanwire.wire.tool_calls import ToolCallRepair

#: index, id, name, arguments as a server sent them
Sent = tuple[Any, Any, Any, Any]


def repair(*sent: Sent) -> list[ToolCallDelta]:
    state = ToolCallRepair()
    return [state.delta(*delta) for delta in sent]


def join(deltas: list[ToolCallDelta]) -> list[ToolCall]:
    builder = ReplyBuilder()
    builder.add([Chunk(tool_calls=(delta,)) for delta in deltas])
    return list(builder.reply().tool_calls)


def joined(*sent: Sent) -> list[tuple[str, str, str]]:
    return [(tool.id, tool.name, tool.arguments) for tool in join(repair(*sent))]


ONE = [("t1", "f", '{"a":1}')]
TWO = [("t1", "f", '{"a":1}'), ("t2", "g", '{"b":2}')]


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        # as the schema says
        ([(0, "t1", "f", ""), (0, None, None, '{"a"'), (0, None, None, ":1}")], ONE),
        ([(0, "t1", "f", '{"a"'), (1, "t2", "g", '{"b"'), (0, None, None, ":1}"), (1, None, None, ":2}")], TWO),
        # no index
        ([(None, "t1", "f", '{"a":'), (None, None, None, "1}")], ONE),
        ([(None, "t1", "f", '{"a":1}'), (None, "t2", "g", '{"b":2}')], TWO),
        (
            [(None, "t1", "f", '{"a"'), (None, "t2", "g", '{"b"'), (None, "t1", None, ":1}"), (None, "t2", "", ":2}")],
            TWO,
        ),
        ([(None, "t1", "f", '{"a"'), (0, None, None, ":1}")], ONE),
        # an index given later
        ([(None, "t1", "f", '{"a"'), (0, "t1", None, ":1}"), (1, "t2", "g", '{"b":2}')], TWO),
        # neither index nor id
        ([(None, None, "f", '{"a"'), (None, None, None, ":1}")], [("call_0", "f", '{"a":1}')]),
        (
            [(None, None, "f", '{"a":1}'), (None, None, "g", '{"b":2}')],
            [("call_0", "f", '{"a":1}'), ("call_1", "g", '{"b":2}')],
        ),
        # id and name repeated, or sent empty, or only one of them
        ([(0, "t1", "f", '{"a"'), (0, "t1", "f", ":1}")], ONE),
        ([(0, "t1", "f", '{"a"'), (0, "", "", ":1}")], ONE),
        ([(0, "t1", "f", '{"a"'), (0, "t1", None, ":1}")], ONE),
        ([(None, "t1", "f", '{"a"'), (None, "t1", "f", ":1}")], ONE),
        # several calls under one index
        ([(0, "t1", "f", '{"a":1}'), (0, "t2", "g", '{"b":2}')], TWO),
        ([(0, "t1", "f", '{"a"'), (0, None, None, ":1}"), (0, "t2", "g", '{"b"'), (0, None, None, ":2}")], TWO),
        ([(0, "t1", "f", '{"a"'), (0, "t2", "g", '{"b"'), (0, "t1", None, ":1}"), (0, "t2", None, ":2}")], TWO),
        # indexes that do not begin at 0, or not in order
        ([(1, "t1", "f", '{"a":1}'), (2, "t2", "g", '{"b":2}')], TWO),
        ([(7, "t1", "f", '{"a"'), (3, "t2", "g", '{"b"'), (7, None, None, ":1}"), (3, None, None, ":2}")], TWO),
        # arguments
        ([(0, "t1", "f", None), (0, None, None, '{"a":1}')], ONE),
        ([(0, "t1", "f", {"a": 1})], ONE),
        ([(0, "t1", "f", {})], [("t1", "f", "{}")]),
        ([(0, "t1", "f", None)], [("t1", "f", "")]),
        # the name after the id, the id after the name
        ([(0, "t1", None, None), (0, None, "f", None), (0, None, None, '{"a":1}')], ONE),
        ([(0, None, None, ""), (0, "t1", "f", '{"a":1}')], ONE),
        (
            [(None, None, "f", '{"a":1}'), (None, "t2", "f", '{"b":2}')],
            [("call_0", "f", '{"a":1}'), ("t2", "f", '{"b":2}')],
        ),
        # things of no use
        ([(True, "t1", "f", '{"a"'), ("0", None, None, ":1}")], ONE),
        ([(0, 5, ["f"], '{"a":1}')], [("call_0", "", '{"a":1}')]),
    ],
)
def test_odd_but_clear_deltas(sent: list[Sent], expected: list[tuple[str, str, str]]) -> None:
    assert joined(*sent) == expected


def test_indexes_are_counted_from_0_in_order_of_appearance() -> None:
    deltas = repair((5, "t1", "f", ""), (9, "t2", "g", ""), (None, "t3", "h", ""), (5, None, None, "x"))
    assert [delta.index for delta in deltas] == [0, 1, 2, 0]


def test_id_and_name_are_said_once() -> None:
    deltas = repair((0, "t1", "f", "{"), (0, "t1", "f", "}"), (0, "", "", ""), (0, "t1", None, ""))
    assert [(delta.id, delta.name) for delta in deltas] == [("t1", "f"), (None, None), (None, None), (None, None)]


def test_a_call_without_an_id_gets_one_with_its_name() -> None:
    first, second = repair((0, None, "f", "{"), (0, None, None, "}"))
    assert (first.id, first.name) == ("call_0", "f")
    assert (second.id, second.name) == (None, None)


def test_arguments_as_an_object_are_the_same_json() -> None:
    value = {"a": [1, 2.5, None, True, "é\n"], "b": {}}
    (delta,) = repair((0, "t1", "f", value))
    assert json.loads(delta.arguments) == value


# --- any interleaving, any oddity --------------------------------------------------------------------------------------

#: number of the call, its id and name, the piece, whether it is its call's first piece
Style = Callable[[int, str, str, str, bool], Sent]

#: Deltas of several calls may come in any order: each one says whose it is.
ANY_ORDER: dict[str, Style] = {
    "as the schema says": lambda n, call, name, piece, first: (
        n,
        call if first else None,
        name if first else None,
        piece,
    ),
    "id and name repeated": lambda n, call, name, piece, first: (n, call, name, piece),
    "id and name empty": lambda n, call, name, piece, first: (n, call if first else "", name if first else "", piece),
    "no id at all": lambda n, call, name, piece, first: (n, None, name if first else None, piece),
    "indexes from 1": lambda n, call, name, piece, first: (
        n + 1,
        call if first else None,
        name if first else None,
        piece,
    ),
    "odd indexes": lambda n, call, name, piece, first: (90 - 7 * n, call, name if first else None, piece),
    "no index, ids repeated": lambda n, call, name, piece, first: (None, call, name if first else None, piece),
    "no index, all repeated": lambda n, call, name, piece, first: (None, call, name, piece),
    "one index, ids repeated": lambda n, call, name, piece, first: (0, call, name if first else None, piece),
    "one index, all repeated": lambda n, call, name, piece, first: (0, call, name, piece),
}
#: Deltas that continue whatever came last: one call after the other.
ONE_BY_ONE: dict[str, Style] = {
    "no index, id at first": lambda n, call, name, piece, first: (
        None,
        call if first else None,
        name if first else None,
        piece,
    ),
    "one index, id at first": lambda n, call, name, piece, first: (
        0,
        call if first else None,
        name if first else None,
        piece,
    ),
    "only names": lambda n, call, name, piece, first: (None, None, name if first else None, piece),
    "empty ids, names": lambda n, call, name, piece, first: (None, "", name if first else "", piece),
}

calls = st.lists(
    st.tuples(st.sampled_from("fgh"), st.lists(st.text('{}":a1é', min_size=1, max_size=4), min_size=1, max_size=4)),
    min_size=1,
    max_size=4,
)


def send(style: Style, made: list[tuple[str, list[str]]], order: list[int]) -> list[Sent]:
    """The deltas of these calls, in this order of call numbers."""
    left = [list(pieces) for _, pieces in made]
    sent = []
    for number in order:
        name, pieces = made[number]
        first = len(left[number]) == len(pieces)
        sent.append(style(number, f"t{number}", name, left[number].pop(0), first))
    return sent


@given(st.data(), calls, st.sampled_from(sorted(ANY_ORDER)))
def test_any_interleaving_gives_the_same_calls(
    data: st.DataObject, made: list[tuple[str, list[str]]], name: str
) -> None:
    order = data.draw(st.permutations([number for number, (_, pieces) in enumerate(made) for _ in pieces]))
    seen = list(dict.fromkeys(order))  # calls are counted in order of appearance
    found = join(repair(*send(ANY_ORDER[name], made, list(order))))
    assert [(tool.name, tool.arguments) for tool in found] == [(made[n][0], "".join(made[n][1])) for n in seen]
    if name != "no id at all":
        assert [tool.id for tool in found] == [f"t{number}" for number in seen]
    else:
        assert len({tool.id for tool in found}) == len(seen)


@given(calls, st.sampled_from(sorted(ONE_BY_ONE)))
def test_one_call_after_the_other_gives_the_same_calls(made: list[tuple[str, list[str]]], name: str) -> None:
    order = [number for number, (_, pieces) in enumerate(made) for _ in pieces]
    found = join(repair(*send(ONE_BY_ONE[name], made, order)))
    assert [(tool.name, tool.arguments) for tool in found] == [(call, "".join(pieces)) for call, pieces in made]
    assert len({tool.id for tool in found}) == len(made)


odd = st.none() | st.booleans() | st.integers(-2, 3) | st.text(max_size=2) | st.sampled_from(["t", "u"]) | st.just(1.5)


@given(st.lists(st.tuples(odd, odd, odd, odd | st.dictionaries(st.text(max_size=2), odd, max_size=2)), max_size=8))
def test_nothing_is_an_error_and_nothing_is_lost(sent: list[Sent]) -> None:
    deltas = repair(*sent)
    assert len(deltas) == len(sent)
    indexes = [delta.index for delta in deltas]
    assert list(dict.fromkeys(indexes)) == list(range(len(set(indexes)))), "not counted from 0 in order of appearance"
    for index in set(indexes):
        mine = [delta for delta in deltas if delta.index == index]
        assert sum(delta.id is not None for delta in mine) <= 1
        assert sum(delta.name is not None for delta in mine) <= 1
        assert all(delta.id != "" and delta.name != "" for delta in mine)
    texts = "".join(delta.arguments for delta in deltas)
    assert texts == "".join(
        "" if a is None else a if isinstance(a, str) else json.dumps(a, separators=(",", ":"), ensure_ascii=False)
        for *_, a in sent
    )
