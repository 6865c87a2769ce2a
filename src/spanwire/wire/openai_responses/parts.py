"""PURE: what of an answer's items has been delivered, so that each piece is delivered once.

A Responses stream says everything up to four times: as deltas, in the ``.done`` event of a part, in that of its item, and
in the response object at the end. Servers leave any of these out. So each text says how much of it is new.

Items are told apart by their id, by their place in the output, and by their order, since servers send ids that change from
event to event, and places that are always 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from ...calls import ToolCallDelta

__all__ = ["CALLS", "Delivered", "ItemState", "Part"]

#: Types of items whose calls the caller answers, with the field that has their arguments.
CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
_KNOWN = frozenset({"message", "reasoning", *CALLS})


class Part:
    """One text: of a content part, a summary, or the arguments of a call.

    Attributes:
        sent: characters of it that were delivered.
    """

    __slots__ = ("sent",)

    def __init__(self) -> None:
        self.sent = 0

    def rest(self, text: str) -> str:
        """What of the whole text has not been delivered; it counts as delivered now."""
        if len(text) <= self.sent:
            return ""
        rest = text[self.sent :] if self.sent else text
        self.sent = len(text)
        return rest


class ItemState:
    """One item of the output.

    Attributes:
        kind: its type.
        call: which of the tool calls it is, counted from 0.
        call_id: the call's own id, which is the same in all its events that have it.
        named: name and id of the call have been delivered.
        held: its arguments that came before them.
    """

    __slots__ = ("_parts", "added", "call", "call_id", "finished", "held", "id", "index", "kind", "named")

    def __init__(self, kind: str, id: str | None, index: int | None, call: int) -> None:
        self.kind = kind
        self.id = id
        self.index = index
        self.call = call
        self.call_id: str | None = None
        self.added = False
        self.finished = False
        self.named = False
        self.held: list[str] = []
        self._parts: dict[int, Part] = {}

    def part(self, place: int) -> Part:
        """By its place in the content; -1, -2, ... for the summaries of a reasoning item."""
        part = self._parts.get(place)
        if part is None:
            part = self._parts[place] = Part()
        return part


class Delivered:
    """State of one answer. Items may be given in any form; what is no item of a caller's is passed over.

    Attributes:
        calls: tool calls so far.
        made_up: one of them was delivered with another id than the call's own, since the server had not named that.
    """

    __slots__ = ("_by_id", "_by_index", "_items", "_last", "calls", "made_up")

    def __init__(self) -> None:
        self.calls = 0
        self.made_up = False
        self._items: list[ItemState] = []
        self._by_id: dict[tuple[str, str], ItemState] = {}
        self._by_index: dict[tuple[str, int], ItemState] = {}
        self._last: dict[str, ItemState] = {}

    # --- which item -------------------------------------------------------------------------------------------------

    def find(self, kind: str, id: str | None, index: int | None) -> ItemState:
        """The item of an event, a new one if there is none yet."""
        found = self._known(kind, id, index)
        if found is None and id is None and index is None:
            found = self._last.get(kind)
        return found or self._new(kind, id, index)

    def _known(self, kind: str, id: str | None, index: int | None) -> ItemState | None:
        found = self._by_id.get((kind, id)) if id is not None else None
        if found is None and index is not None:
            found = self._by_index.get((kind, index))
            if found is not None and found.id is None and id is not None:
                found.id = id
                self._by_id[kind, id] = found
        return found

    def _new(self, kind: str, id: str | None, index: int | None) -> ItemState:
        item = ItemState(kind, id, index, self.calls)
        if kind in CALLS:
            self.calls += 1
        self._items.append(item)
        self._last[kind] = item
        if id is not None:
            self._by_id[kind, id] = item
        if index is not None:
            self._by_index[kind, index] = item
        return item

    def add(self, item: dict[str, Any], index: int | None) -> tuple[ToolCallDelta, ...]:
        """``output_item.added``: of a call its id and name."""
        kind, id_ = _text_of(item, "type"), _text_of(item, "id")
        if kind not in _KNOWN:
            return ()
        state = self._known(kind, id_, index)
        # One that is there already was begun by its own deltas, or is another item at a place that is always 0.
        if state is None or state.finished or _is_other(state, item) or (state.added and state.id != id_):
            state = self._new(kind, id_, index)
        state.added = True
        return self._name(state, item) if kind in CALLS else ()

    # --- what is new ------------------------------------------------------------------------------------------------

    def piece(self, state: ItemState, delta: str) -> tuple[ToolCallDelta, ...]:
        """A delta of a call's arguments. Before its name they wait: a framework needs the name first."""
        if not state.named:
            state.held.append(delta)
            return ()
        state.part(0).sent += len(delta)
        return (ToolCallDelta(state.call, None, None, delta),) if delta else ()

    def arguments(self, state: ItemState, text: str) -> tuple[ToolCallDelta, ...]:
        """A call's whole arguments."""
        if not state.named:
            state.held = [text]
            return ()
        rest = state.part(0).rest(text)
        return (ToolCallDelta(state.call, None, None, rest),) if rest else ()

    def finish(self, item: dict[str, Any], index: int | None) -> tuple[str, str, tuple[ToolCallDelta, ...]]:
        """``output_item.done``: what of its text, reasoning and tool calls is new."""
        kind = _text_of(item, "type")
        if kind not in _KNOWN:
            return "", "", ()
        state = self.find(kind, _text_of(item, "id"), index)
        # Another one at a place that is always 0.
        if _is_other(state, item) or (state.finished and state.id is not None and state.id != item.get("id")):
            state = self._new(kind, _text_of(item, "id"), index)
        return self._rest(state, item)

    def finish_all(self, output: Sequence[Any]) -> tuple[str, str, tuple[ToolCallDelta, ...]]:
        """The output of the whole response: what of it is new. Calls whose name never came are delivered without it."""
        texts: list[str] = []
        reasoning: list[str] = []
        calls: list[ToolCallDelta] = []
        for item, state in self._matched(output):
            text, thought, deltas = self._rest(state, item)
            texts.append(text)
            reasoning.append(thought)
            calls += deltas
        for state in self._items:
            if state.held and not state.named:
                calls += self._name(state, {"name": "", "id": state.id}, forced=True)
        return "".join(texts), "".join(reasoning), tuple(calls)

    def _matched(self, output: Sequence[Any]) -> Iterator[tuple[dict[str, Any], ItemState]]:
        items = [
            (index, item)
            for index, item in enumerate(output)
            if isinstance(item, dict) and _text_of(item, "type") in _KNOWN
        ]
        free = list(self._items)
        found: dict[int, ItemState] = {}
        for by in ("id", "call_id", "index", "order"):
            for index, item in items:
                if index in found:
                    continue
                for state in free:
                    if state.kind == item["type"] and _is_same(state, item, index, by):
                        found[index] = state
                        free.remove(state)
                        break
        for index, item in items:
            yield item, found.get(index) or self._new(item["type"], _text_of(item, "id"), None)

    def _rest(self, state: ItemState, item: dict[str, Any]) -> tuple[str, str, tuple[ToolCallDelta, ...]]:
        state.finished = True
        if state.kind in CALLS:
            named = self._name(state, item)
            rest = state.part(0).rest(as_text(item.get(CALLS[state.kind])))
            return "", "", _joined(named, state.call, rest)
        text = "".join([state.part(place).rest(words) for place, words in _texts(item.get("content"))])
        if state.kind == "message":
            return text, "", ()
        summary = "".join([state.part(~place).rest(words) for place, words in _texts(item.get("summary"))])
        return "", summary + text, ()

    def _name(self, state: ItemState, item: dict[str, Any], *, forced: bool = False) -> tuple[ToolCallDelta, ...]:
        name = _text_of(item, "name")
        if state.named or not (name or forced):
            return ()
        state.named = True
        state.call_id = _text_of(item, "call_id")
        self.made_up = self.made_up or state.call_id is None
        id_ = state.call_id or _text_of(item, "id") or state.id or f"call_{state.call}"
        held, state.held = "".join(state.held), []
        state.part(0).sent += len(held)
        return (ToolCallDelta(state.call, id_, name, held),)


def _is_other(state: ItemState, item: dict[str, Any]) -> bool:
    """Both have a call's own id, and they differ."""
    call_id = _text_of(item, "call_id")
    return state.call_id is not None and call_id is not None and state.call_id != call_id


def _is_same(state: ItemState, item: dict[str, Any], index: int, by: str) -> bool:
    if by == "id":
        return state.id is not None and state.id == item.get("id")
    if by == "call_id":
        return state.call_id is not None and state.call_id == item.get("call_id")
    return not _is_other(state, item) and (by == "order" or state.index == index)


def _joined(named: tuple[ToolCallDelta, ...], call: int, rest: str) -> tuple[ToolCallDelta, ...]:
    if not rest:
        return named
    if not named:
        return (ToolCallDelta(call, None, None, rest),)
    first = named[0]
    return (ToolCallDelta(call, first.id, first.name, first.arguments + rest),)


def _texts(parts: Any) -> Iterator[tuple[int, str]]:
    """The texts of an item's content, or of its summaries, each with its place."""
    if isinstance(parts, str):
        yield 0, parts
    elif isinstance(parts, list):
        for place, part in enumerate(parts):
            if isinstance(part, dict):
                yield place, text_of_part(part)


def text_of_part(part: dict[str, Any]) -> str:
    """Of a text its text, of a refusal what it says."""
    for name in ("text", "refusal"):
        if isinstance(part.get(name), str):
            return str(part[name])
    return ""


def as_text(value: Any) -> str:
    """Arguments that a server sends as an object are JSON again."""
    if value is None:
        return ""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _text_of(item: dict[str, Any], name: str) -> str | None:
    value = item.get(name)
    return value if isinstance(value, str) and value else None
