"""PURE: brings tool-call deltas of any server to one form: indexes from 0 in order of appearance, id and name once.

Servers leave out the index, give several calls the same one, repeat id and name in every delta or send them empty,
send arguments as null or as an object, or send no id at all. The rules:

* An index is believed, unless the delta brings another id than the call of that index has: then it is a new call. One
  that comes later, with neither id nor name, is that of the call before.
* Without an index an id decides: a known one continues its call, a new one begins a call.
* With neither, a delta continues the call that came last, unless it brings a name while that call has arguments
  already: then it begins a call.
* A call that names its function and has no id gets ``call_<index>``: frameworks need one to send the result back.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ..calls import ToolCallDelta

__all__ = ["ToolCallRepair"]


class _Known:
    __slots__ = ("given_id", "has_arguments", "has_index", "id", "index", "name")

    def __init__(self, index: int) -> None:
        self.index = index
        self.id = ""
        self.given_id = False
        self.name = ""
        self.has_arguments = False
        self.has_index = False  # the server has given one


class ToolCallRepair:
    """State of one answer. Feed each delta's list of tool calls, in order."""

    __slots__ = ("_by_id", "_by_index", "_calls", "_last")

    def __init__(self) -> None:
        self._calls: list[_Known] = []
        self._by_index: dict[int, _Known] = {}
        self._by_id: dict[str, _Known] = {}
        self._last: _Known | None = None

    def delta(self, index: Any, id: Any, name: Any, arguments: Any) -> ToolCallDelta:
        """One entry of a delta's ``tool_calls`` as the server sent it, to one that can be joined by its index."""
        call_id = id if isinstance(id, str) else ""
        call_name = name if isinstance(name, str) else ""
        text = _as_text(arguments)
        call = self._find(_as_index(index), call_id, call_name)
        self._last = call
        new_id = new_name = None
        if call_id and not call.given_id:
            call.given_id = True
            self._by_id[call_id] = call
            if not call.id:
                call.id = new_id = call_id
        if call_name and not call.name:
            call.name = new_name = call_name
            if not call.id:
                call.id = new_id = f"call_{call.index}"
        if text:
            call.has_arguments = True
        return ToolCallDelta(call.index, new_id, new_name, text)

    def _find(self, index: int | None, id: str, name: str) -> _Known:
        if index is not None:
            known = self._by_index.get(index)
            if known is not None and not (id and known.given_id and self._by_id.get(id) is not known):
                return known
            # Its earlier deltas may have come without an index, or with another one.
            known = self._by_id.get(id) if id else None
            last = self._last
            if known is None and not id and not name and last is not None and not last.has_index:
                known = last
            if known is None:
                known = self._new()
            known.has_index = True
            self._by_index[index] = known
            return known
        if id:
            return self._by_id.get(id) or self._adopt_or_new(name)
        if self._last is None or (name and self._last.has_arguments):
            return self._new()
        return self._last

    def _adopt_or_new(self, name: str) -> _Known:
        """An id that comes after its call's first delta belongs to that call; any other one begins a call."""
        last = self._last
        if last is not None and not last.given_id and not last.has_arguments and (not name or name == last.name):
            return last
        return self._new()

    def _new(self) -> _Known:
        known = _Known(len(self._calls))
        self._calls.append(known)
        return known


def _as_index(index: Any) -> int | None:
    """Also as text or as a whole float; anything else is none."""
    if isinstance(index, str) and index.isascii() and index.isdigit():
        return int(index[:9])
    if isinstance(index, float) and index.is_integer():
        return int(index)
    return index if isinstance(index, int) and not isinstance(index, bool) else None


def _as_text(arguments: Any) -> str:
    if arguments is None:
        return ""
    if isinstance(arguments, str):
        return arguments
    return msgspec.json.encode(arguments).decode()
