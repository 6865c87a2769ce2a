"""PURE: the events of a Responses stream, or a whole response object, as chunks.

Decoding is typed where an event has a delta; all others, and those of other types than they should be, are read field by
field. Types of events that are not known here are passed over: the schema grows.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ...calls import Chunk, Usage
from ...errors import ProtocolError, Truncated
from ..openai_chat import DONE, _lenient_json, _show
from .failure import response_error
from .fields import as_id, as_index, as_piece, late_events, part_of, response_in, usage_of
from .parts import CALLS, Delivered, Part, as_text, text_of_part

__all__ = ["ResponsesDecoder", "decode_response"]

_TEXT = "response.output_text.delta"
#: Events with a delta of text: the item's type, and the field of the part's place.
_DELTAS = {
    _TEXT: ("message", "content_index"),
    "response.refusal.delta": ("message", "content_index"),
    "response.reasoning_text.delta": ("reasoning", "content_index"),
    "response.reasoning_summary_text.delta": ("reasoning", "summary_index"),
}
#: The same with the whole text, and the field that has it.
_DONES = {
    "response.output_text.done": ("message", "content_index", "text"),
    "response.refusal.done": ("message", "content_index", "refusal"),
    "response.reasoning_text.done": ("reasoning", "content_index", "text"),
    "response.reasoning_summary_text.done": ("reasoning", "summary_index", "text"),
    "response.reasoning_summary_part.done": ("reasoning", "summary_index", "part"),
}
_CALL_DELTAS = {
    "response.function_call_arguments.delta": "function_call",
    "response.custom_tool_call_input.delta": "custom_tool_call",
}
_CALL_DONES = {
    "response.function_call_arguments.done": "function_call",
    "response.custom_tool_call_input.done": "custom_tool_call",
}
#: The last is what some gateways send for all of them.
_TERMINAL = frozenset({"response.completed", "response.incomplete", "response.failed", "response.done"})
#: Why a response is incomplete, as chat completions say it.
_FINISH = {"max_output_tokens": "length", "content_filter": "content_filter"}


class _Event(msgspec.Struct, gc=False):
    """Fields of the events with a delta, which are nearly all events of an answer."""

    type: str | None = None
    delta: str | None = None
    item_id: str | None = None
    output_index: int | None = None
    content_index: int | None = None
    summary_index: int | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class ResponsesDecoder:
    """State of one streamed answer.

    The terminal event gives None and sets ``done``; :meth:`end` then gives the last chunk, with finish reason, usage, and
    whatever content came with nothing else.

    Attributes:
        done: the terminal event has been seen (or ``[DONE]``, which does not make an answer complete).
        finish_reason: ``"stop"``, ``"tool_calls"``, ``"length"``, ``"content_filter"``, or the server's own reason why
            the response is incomplete; None before the terminal event.
        id, model: as the server gave them.
        usage: None until the terminal event, and if that has none.
        late_events: the terminal event and the response object in it, as they came: servers put their timing there.
        created, queued, in_progress: the event of that name has been seen.
    """

    __slots__ = (
        "_delivered",
        "_last",
        "_part",
        "_part_item",
        "_part_place",
        "created",
        "done",
        "finish_reason",
        "id",
        "in_progress",
        "late_events",
        "model",
        "queued",
        "usage",
    )

    def __init__(self) -> None:
        self.done = False
        self.finish_reason: str | None = None
        self.id: str | None = None
        self.model: str | None = None
        self.usage: Usage | None = None
        self.late_events: list[bytes] = []
        self.created = False
        self.queued = False
        self.in_progress = False
        self._delivered = Delivered()
        self._last: Chunk | None = None
        self._part: Part | None = None  # that of the last text delta; the next one most likely belongs to it too
        self._part_item: str | None = None
        self._part_place: int | None = None

    @property
    def made_up_ids(self) -> bool:
        """A tool call was delivered with an id that the server does not know as the call's."""
        return self._delivered.made_up

    # --- events -----------------------------------------------------------------------------------------------------

    def event(self, name: bytes, data: bytes) -> Chunk | None:
        """One event of the stream. None for one that carries nothing for a caller.

        Args:
            name: as the event stream has it, or ``b""``. The ``type`` in the JSON is believed.
            data: the JSON of one event.

        Raises:
            ServerError: the event is an error, or the response failed.
            ProtocolError: it is not JSON, or begins a second response.
        """
        try:
            event = _decode(data)
        except (msgspec.DecodeError, RecursionError):
            return self._odd(name, data)
        kind = event.type
        delta = event.delta
        if kind == _TEXT and delta is not None:  # the commonest event
            part = self._part
            if part is None or event.item_id != self._part_item or event.content_index != self._part_place:
                part = self._turn_to(event)
            part.sent += len(delta)
            return Chunk(delta, "", (), None, None, data)
        if delta is None or kind is None or kind == "error" or event.error is not None:
            return self._other(name, data)
        return self._delta(kind, event, delta, data)

    def _turn_to(self, event: _Event) -> Part:
        item = self._delivered.find("message", event.item_id or None, event.output_index)
        self._part_item, self._part_place = event.item_id, event.content_index
        part = self._part = item.part(event.content_index or 0)
        return part

    def _delta(self, kind: str, event: _Event, delta: str, data: bytes) -> Chunk | None:
        """Any event with a delta that is text."""
        call = _CALL_DELTAS.get(kind)
        if call is not None:
            item = self._delivered.find(call, event.item_id or None, event.output_index)
            calls = self._delivered.piece(item, delta)
            return Chunk("", "", calls, None, None, data) if calls else None
        known = _DELTAS.get(kind)
        if known is None:
            return None
        type_, field = known
        item = self._delivered.find(type_, event.item_id or None, event.output_index)
        place = (event.content_index or 0) if field == "content_index" else ~(event.summary_index or 0)
        item.part(place).sent += len(delta)
        if type_ == "message":
            return Chunk(delta, "", (), None, None, data)
        return Chunk("", delta, (), None, None, data)

    def _odd(self, name: bytes, data: bytes) -> Chunk | None:
        """``[DONE]``, a heartbeat without data, broken UTF-8, or JSON of other types than the schema's."""
        text = data.strip()
        if text == DONE:
            self.done = True
        if text in (DONE, b""):
            return None
        return self._other(name, data)

    def _other(self, name: bytes, data: bytes) -> Chunk | None:
        """Any event, field by field."""
        event: Any = None
        kind = "error"
        if name != b"error":
            event = _lenient_json(data)
            if not isinstance(event, dict):
                raise ProtocolError(f"an event of the stream is not a JSON object: {_show(data)}")
            kind = event["type"] if isinstance(event.get("type"), str) else name.decode("utf-8", "replace")
            if not kind.startswith("response.") and event.get("object") == "response":
                kind, event = "response.done", {"response": event}  # the bare object
        # An event of a response may have an error that ends nothing: of a steering, of a tool on the server's side.
        if kind == "error" or (event.get("error") and not kind.startswith("response.")):
            raise response_error(data)
        if kind in _TERMINAL:
            self._terminal(event, data)
            return None
        if kind in {"response.created", "response.queued", "response.in_progress"}:
            self._begun(kind, event)
            return None
        text, reasoning, calls = self._content(kind, event)
        return Chunk(text, reasoning, calls, None, None, data) if text or reasoning or calls else None

    def _begun(self, kind: str, event: dict[str, Any]) -> None:
        response = event.get("response")
        if isinstance(response, dict):
            id_ = response.get("id")
            if kind == "response.created" and self.created and isinstance(id_, str) and id_ != self.id:
                raise ProtocolError(
                    f"a second response began in the middle of this one ({self.id!r:.80}, then {id_!r:.80})"
                )
            self._see(response)
        if kind == "response.created":
            self.created = True
        elif kind == "response.queued":
            self.queued = True
        else:
            self.in_progress = True

    def _see(self, response: dict[str, Any]) -> None:
        id_, model = response.get("id"), response.get("model")
        if self.id is None and isinstance(id_, str) and id_:
            self.id = id_
        if isinstance(model, str) and model:
            self.model = model

    def _content(self, kind: str, event: dict[str, Any]) -> tuple[str, str, tuple[Any, ...]]:
        """Text, reasoning and pieces of tool calls that are new in an event with content; nothing of any other."""
        delivered = self._delivered
        id_, index = as_id(event.get("item_id")), as_index(event.get("output_index"))
        if kind in {"response.output_item.added", "response.output_item.done"}:
            item = event.get("item")
            if not isinstance(item, dict):
                return "", "", ()
            return ("", "", delivered.add(item, index)) if kind.endswith("added") else delivered.finish(item, index)
        if kind in _CALL_DELTAS:
            call = delivered.find(_CALL_DELTAS[kind], id_, index)
            return "", "", delivered.piece(call, as_text(event.get("delta")))
        if kind in _CALL_DONES:
            type_ = _CALL_DONES[kind]
            call = delivered.find(type_, id_, index)
            return "", "", delivered.arguments(call, as_text(event.get(CALLS[type_])))
        if kind in _DELTAS:
            type_, field = _DELTAS[kind]
            piece = as_piece(event.get("delta"))
            part_of(delivered.find(type_, id_, index), field, event).sent += len(piece)
        elif kind in _DONES:
            type_, field, name = _DONES[kind]
            piece = part_of(delivered.find(type_, id_, index), field, event).rest(as_piece(event.get(name)))
        elif kind == "response.content_part.done" and isinstance(event.get("part"), dict):
            part = event["part"]
            type_ = "reasoning" if part.get("type") == "reasoning_text" else "message"
            item_state = delivered.find(type_, id_, index)
            piece = part_of(item_state, "content_index", event).rest(text_of_part(part))
        else:
            return "", "", ()
        return (piece, "", ()) if type_ == "message" else ("", piece, ())

    # --- the end ----------------------------------------------------------------------------------------------------

    def _terminal(self, event: dict[str, Any], data: bytes) -> None:
        response = event.get("response")
        if not isinstance(response, dict):
            response = {}
        if response and not self.late_events:
            self.late_events = late_events(data)
        self._see(response)
        self.usage = usage_of(response.get("usage"))
        status = as_id(response.get("status"))
        if status in {"failed", "cancelled"} or event.get("type") == "response.failed" or response.get("error"):
            raise response_error(data)
        output = response.get("output")
        text, reasoning, calls = self._delivered.finish_all(output if isinstance(output, list) else ())
        self.done = True
        self.finish_reason = self._finish(response, event.get("type"))
        self._last = Chunk(text, reasoning, calls, self.finish_reason, self.usage, data)

    def _finish(self, response: dict[str, Any], kind: Any) -> str:
        details = response.get("incomplete_details")
        if kind == "response.incomplete" or response.get("status") == "incomplete" or details:
            reason = details.get("reason") if isinstance(details, dict) else None
            return _FINISH.get(reason, reason) if isinstance(reason, str) and reason else "incomplete"
        return "tool_calls" if self._delivered.calls else "stop"

    def end(self) -> Chunk | None:
        """The stream has ended. Returns the last chunk, once.

        Raises:
            Truncated: it ended before the answer was complete.
        """
        if self.finish_reason is None:
            raise Truncated(
                "the stream ended before the answer was complete: no response.completed, .incomplete or .failed came"
            )
        last, self._last = self._last, None
        return last

    def whole(self, body: bytes) -> Chunk:
        """A whole answer. Raises as :func:`decode_response` does."""
        response = response_in(body)
        status = as_id(response.get("status"))
        if status in {"queued", "in_progress"}:
            raise ProtocolError(f"the answer is not complete, its status is {status!r}: a chat call cannot wait for it")
        self._terminal({"type": "response.done", "response": response}, body)
        self.late_events = [body]
        last, self._last = self._last, None
        assert last is not None
        return last


def decode_response(body: bytes) -> tuple[Chunk, str | None, str | None]:
    """A whole answer: its one chunk, id and model.

    Raises:
        ServerError: the body is an error, or the response failed.
        ProtocolError: it is no response, or one that goes on in the background.
    """
    decoder = ResponsesDecoder()
    chunk = decoder.whole(body)
    return chunk, decoder.id, decoder.model
