"""PURE: which response a message of a WebSocket belongs to. OpenAI's Responses over WebSocket, and Realtime.

A client asks with ``response.create``, or the server begins by itself when somebody has spoken. The server names the
response in ``response.created``, and in most of what follows; where it does not, there is only one.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import msgspec

__all__ = ["Asked", "Told", "Turns", "asked", "told"]

T = TypeVar("T")

_TERMINAL = {
    "response.completed": "completed",
    "response.incomplete": "completed",
    "response.failed": "error",
    "error": "error",
}
#: ``response.status`` of ``response.done``, Realtime's one terminal event.
_STATUS = {"completed": "completed", "incomplete": "completed", "cancelled": "closed_by_caller", "failed": "error"}

End = Literal["completed", "closed_by_caller", "error"]


class Asked(NamedTuple):
    """A ``response.create``."""

    model: str | None
    params: dict[str, Any]


class Told(NamedTuple):
    """A message of the server.

    Attributes:
        type: of the event.
        id: of its response, None where it does not say.
        end: how the response has ended with it, None if it goes on.
        data: the message for who reads along, terminal events by their names in Responses.
    """

    type: str
    id: str | None
    end: End | None
    data: bytes


class _Create(msgspec.Struct, gc=False):
    type: Any = None
    model: Any = None
    response: Any = None
    temperature: Any = None
    top_p: Any = None
    max_output_tokens: Any = None


class _Response(msgspec.Struct, gc=False):
    id: Any = None
    status: Any = None


class _Event(msgspec.Struct, gc=False):
    type: Any = None
    response_id: Any = None
    response: _Response | None = None


_decode_create = msgspec.json.Decoder(_Create).decode
_decode_event = msgspec.json.Decoder(_Event).decode


def asked(message: bytes | str) -> Asked | None:
    """What a message of the client asks for, None if it asks for no response."""
    if ("response.create" if isinstance(message, str) else b"response.create") not in message:  # type: ignore[operator]
        return None
    try:
        found = _decode_create(message)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    if found.type != "response.create":
        return None
    inner = found.response if isinstance(found.response, dict) else {}
    model = found.model or inner.get("model")
    params = {
        ours: value
        for name, ours in (("temperature", "temperature"), ("top_p", "top_p"), ("max_output_tokens", "max_tokens"))
        if (value := getattr(found, name) or inner.get(name)) is not None
    }
    return Asked(model if isinstance(model, str) else None, params)


def told(message: bytes) -> Told | None:
    """What a message of the server says, None if it is about no response."""
    if b'"response' not in message and b'"error"' not in message:
        return None
    try:
        event = _decode_event(message)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    kind = event.type
    if not isinstance(kind, str) or not (kind == "error" or kind.startswith("response.")):
        return None
    inner = event.response
    of = event.response_id or (inner.id if inner is not None else None)
    end: Any = _TERMINAL.get(kind)
    data = message.replace(b"\n", b" ") if b"\n" in message else message  # between values only: JSON escapes others
    if kind == "response.done":
        end = _STATUS.get(str(inner.status) if inner is not None else "", "completed")
        name = b"failed" if end == "error" else b"completed"
        data = data.replace(b'"response.done"', b'"response.' + name + b'"', 1)
    return Told(kind, of if isinstance(of, str) else None, end, data)


class Turns(Generic[T]):
    """The turns of one connection that are open: asked for, and begun."""

    __slots__ = ("_active", "_asked")

    def __init__(self) -> None:
        self._asked: deque[T] = deque()
        self._active: dict[str, T] = {}

    def ask(self, turn: T) -> None:
        """The client has asked for a response."""
        self._asked.append(turn)

    def find(self, event: Told) -> T | None:
        """The turn of an event, which is closed with a terminal one. None: none that is open."""
        active, of = self._active, event.id
        if event.type == "error":  # of what was asked for last and not begun, else of the only one
            if self._asked:
                return self._asked.popleft()
            return active.pop(next(iter(active))) if len(active) == 1 else None
        if of is not None and of in active:
            found: T | None = active[of]
        elif of is not None and self._asked:
            found = active[of] = self._asked.popleft()
        elif of is None and len(active) == 1:
            ((of, found),) = active.items()
        elif of is None and not active and self._asked:
            of = ""
            found = active[of] = self._asked.popleft()
        else:
            return None
        if event.end is not None and of is not None:
            active.pop(of, None)
        return found

    def drop(self, turn: T) -> None:
        """It was not sent. A second call is harmless."""
        if turn in self._asked:
            self._asked.remove(turn)

    def begin(self, id: str, turn: T) -> None:
        """The server has begun a response that nobody has asked for."""
        self._active[id] = turn

    def close(self) -> list[T]:
        """Those that are left when the connection ends."""
        left = [*self._active.values(), *self._asked]
        self._active.clear()
        self._asked.clear()
        return left
