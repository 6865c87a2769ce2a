"""PURE: the answer of a scripted server in OpenAI's Responses schema, for any wire that carries its events.

A step is what a :class:`~spanwire.testing.Script` calls an event: the role, a piece of content, the end. What the schema
puts around a piece (items and parts that begin and end) goes with the step that makes it known, so that ``drop_after=3``
means the same pieces as in a chat answer::

    role             response.created, response.in_progress
    first piece      response.output_item.added, response.content_part.added, response.output_text.delta
    further pieces   response.output_text.delta
    first of a tool  (the message ends: .done events), response.output_item.added
    its arguments    response.function_call_arguments.delta
    the end          (the last item ends), response.completed

Shapes after the types in ``openai.types.responses``; the order after OpenAI's own streams.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

from ..calls import Usage
from .script import Script, ScriptedTool

__all__ = ["Step", "error_event", "input_tokens", "response_events", "whole_response"]

#: What a server says of its own time, to be merged into the response object; called when that is made.
Timing = Callable[[], Mapping[str, Any]]

_ids = count(1)
#: Finish reasons with which a response is incomplete, and the reason that the schema has for it.
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
#: The finish reason of a script whose answer fails in the end.
_FAILED = "error"


class Step(NamedTuple):
    """One step of a streamed answer.

    Attributes:
        wait_s: pause before it, in seconds.
        paced: the pause is counted from when the last step was due, so that a late loop does not slow the pace.
        content: what a client waits for: a piece of reasoning, text or a tool call.
        counts: ``Script.drop_after`` and ``hang_after`` count it.
        events: in order, each with its ``type`` and ``sequence_number``.
    """

    wait_s: float
    paced: bool
    content: bool
    counts: bool
    events: tuple[dict[str, Any], ...]


def response_events(
    script: Script,
    body: Mapping[str, Any],
    *,
    shows_queue: bool = False,
    id: str | None = None,
    timing: Timing | None = None,
) -> Iterator[Step]:
    """The steps of a streamed answer, each made when it is due.

    The finish reason decides the terminal event: ``"length"`` and ``"content_filter"`` make ``response.incomplete``,
    ``"error"`` makes ``response.failed``, None leaves it out, and any other is ``response.completed``.

    Args:
        script: what to answer. ``queue_s`` is waited here only with ``shows_queue``; ``headers_s`` and all that follows
            is. ``end_s``, ``done`` and the ends of connections are the wire's business.
        body: the request, as ``POST /v1/responses`` takes it.
        shows_queue: the queue is told by events: ``created`` and ``queued`` at once, ``in_progress`` after ``queue_s``.
            That first step does not count. Without a ``queue_s`` there is none.
        id: of the response; one is made if it is not given.
        timing: see ``Timing``; merged into the response object of the terminal event.
    """
    writer = _Writer(script, body, id)
    opening = [writer.response_event("created", "in_progress")]
    wait_s = script.headers_s
    if shows_queue and script.queue_s:
        opening[0]["response"]["status"] = "queued"
        opening.append(writer.response_event("queued", "queued"))
        yield Step(0.0, False, False, False, tuple(opening))
        opening = []
        wait_s += script.queue_s
    opening.append(writer.response_event("in_progress", "in_progress"))
    if script.role_chunk:
        yield Step(wait_s, False, False, True, tuple(opening))
        opening, wait_s = [], 0.0
    wait_s += script.prefill_s
    paced = False
    for events in writer.pieces():
        yield Step(wait_s, paced, True, True, (*opening, *events))
        opening, wait_s, paced = [], script.gap_s, True
    if paced:  # else there is no content, and the wait for it is kept all the same
        wait_s = 0.0
    if script.finish is not None:
        yield Step(wait_s, paced, False, True, (*opening, *writer.end(timing)))
    elif opening:
        yield Step(wait_s, paced, False, True, tuple(opening))


def whole_response(
    script: Script, body: Mapping[str, Any], *, id: str | None = None, timing: Timing | None = None
) -> dict[str, Any]:
    """The response object of an answer that is not streamed. Arguments as :func:`response_events` has them."""
    writer = _Writer(script, body, id)
    for _ in writer.pieces():
        pass
    response: dict[str, Any] = writer.end(timing)[-1]["response"]
    return response


def error_event(
    message: str,
    *,
    code: str | None = None,
    type: str = "invalid_request_error",
    status: int | None = None,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
    nested: bool = True,
    sequence_number: int | None = None,
) -> dict[str, Any]:
    """The event with which a server gives up.

    Args:
        nested: with the fields in an object ``error``, as on WebSocket; False: flat, as in a stream of server-sent
            events, where there is no place for type, status and headers.
    """
    event: dict[str, Any] = {"type": "error"}
    if nested:
        event["error"] = {"type": type, "code": code, "message": message, "param": param}
        if headers:
            event["error"]["headers"] = dict(headers)
        if status is not None:
            event["status"] = status
    else:
        event.update(code=code, message=message, param=param)
    if sequence_number is not None:
        event["sequence_number"] = sequence_number
    return event


def input_tokens(body: Mapping[str, Any]) -> int:
    """Tokens of a request, as this server counts them: words of its texts."""
    return _words(body.get("instructions")) + _words(body.get("input"))


def _words(value: Any) -> int:
    if isinstance(value, str):
        return len(value.split())
    if isinstance(value, list):
        return sum(map(_words, value))
    if isinstance(value, dict):
        return sum(_words(value.get(name)) for name in ("content", "text", "output", "arguments"))
    return 0


def _usage(usage: Usage) -> dict[str, Any]:
    """Usage as the schema has it; what is not known is left out."""
    cached, reasoning = usage.cached_tokens, usage.reasoning_tokens
    fields: dict[str, Any] = {
        "input_tokens": usage.input_tokens,
        "input_tokens_details": None if cached is None else {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": None if reasoning is None else {"reasoning_tokens": reasoning},
        "total_tokens": usage.total_tokens,
    }
    return {name: value for name, value in fields.items() if value is not None}


class _Writer:
    """Makes the events of one answer, and keeps what its response object will say."""

    def __init__(self, script: Script, body: Mapping[str, Any], id: str | None) -> None:
        self._script = script
        self._number = next(_ids)
        self._sequence = 0
        self._output: list[dict[str, Any]] = []
        self._ending: list[dict[str, Any]] = []  # of the item that goes on
        self._usage = script.usage_for(input_tokens(body), asked=True)
        self._same = {
            "id": id or f"resp_{self._number:08x}",
            "object": "response",
            "created_at": int(time.time()),
            "model": body.get("model"),
            "previous_response_id": body.get("previous_response_id"),
            "instructions": body.get("instructions"),
            "metadata": body.get("metadata") or {},
            "parallel_tool_calls": body.get("parallel_tool_calls", True),
            "tool_choice": body.get("tool_choice", "auto"),
            "tools": body.get("tools") or [],
            "store": body.get("store", True),
        }

    def response_event(self, name: str, status: str, **more: Any) -> dict[str, Any]:
        response = {
            **self._same,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
            **more,
        }
        return self._event(f"response.{name}", response=response)

    def _event(self, type_: str, **fields: Any) -> dict[str, Any]:
        event = {"type": type_, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return event

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self._number:08x}_{len(self._output)}"

    # --- content ----------------------------------------------------------------------------------------------------

    def pieces(self) -> Iterator[list[dict[str, Any]]]:
        """The events of each piece. What an item says at its end goes with the next piece, or to :meth:`end`."""
        script = self._script
        if script.reasoning:
            item: dict[str, Any] = {"id": self._id("rs"), "type": "reasoning", "summary": []}
            part: dict[str, Any] = {"type": "reasoning_text"}
            yield from self._texts(item, part, script.reasoning)
        if script.tokens:
            item = {"id": self._id("msg"), "type": "message", "role": "assistant"}
            part = {"type": "output_text", "annotations": [], "logprobs": []}
            yield from self._texts(item, part, script.tokens)
        for index, tool in enumerate(script.tool_calls):
            yield from self._tool(tool, tool.id or f"call_{index}")

    def _taken(self) -> list[dict[str, Any]]:
        ending, self._ending = self._ending, []
        return ending

    def _texts(
        self, item: dict[str, Any], part: dict[str, Any], pieces: Sequence[str]
    ) -> Iterator[list[dict[str, Any]]]:
        index, kind = len(self._output), part["type"]
        whole = {**part, "text": "".join(pieces)}
        finished = {**item, "content": [whole], "status": "completed"}
        at = {"item_id": item["id"], "output_index": index, "content_index": 0}
        logprobs: dict[str, Any] = {"logprobs": []} if kind == "output_text" else {}
        opening = [
            *self._taken(),
            self._added(index, {**item, "content": [], "status": "in_progress"}),
            self._event("response.content_part.added", **at, part={**part, "text": ""}),
        ]
        for piece in pieces:
            yield [*opening, self._event(f"response.{kind}.delta", **at, delta=piece, **logprobs)]
            opening = []
        self._ending = [
            self._event(f"response.{kind}.done", **at, text=whole["text"], **logprobs),
            self._event("response.content_part.done", **at, part=whole),
            self._finished(index, finished),
        ]

    def _tool(self, tool: ScriptedTool, call_id: str) -> Iterator[list[dict[str, Any]]]:
        index = len(self._output)
        item = {"id": self._id("fc"), "type": "function_call", "call_id": call_id, "name": tool.name}
        at = {"item_id": item["id"], "output_index": index}
        yield [*self._taken(), self._added(index, {**item, "arguments": "", "status": "in_progress"})]
        for piece in tool.arguments:
            yield [self._event("response.function_call_arguments.delta", **at, delta=piece)]
        arguments = "".join(tool.arguments)
        self._ending = [
            self._event("response.function_call_arguments.done", **at, arguments=arguments),
            self._finished(index, {**item, "arguments": arguments, "status": "completed"}),
        ]

    def _added(self, index: int, item: dict[str, Any]) -> dict[str, Any]:
        return self._event("response.output_item.added", output_index=index, item=item)

    def _finished(self, index: int, item: dict[str, Any]) -> dict[str, Any]:
        self._output.append(item)
        return self._event("response.output_item.done", output_index=index, item=item)

    # --- the end ----------------------------------------------------------------------------------------------------

    def end(self, timing: Timing | None) -> list[dict[str, Any]]:
        """The end of the last item, and the terminal event."""
        finish = self._script.finish
        events = self._taken()
        more: dict[str, Any] = {"output": self._output}
        if self._usage is not None:
            more["usage"] = _usage(self._usage)
        for name, value in (timing() if timing is not None else {}).items():
            more[name] = {**(more.get(name) or {}), **value} if isinstance(value, Mapping) else value
        if finish in _INCOMPLETE:
            more["incomplete_details"] = {"reason": _INCOMPLETE[finish]}
            return [*events, self.response_event("incomplete", "incomplete", **more)]
        if finish == _FAILED:
            more["error"] = {"code": "server_error", "message": "the answer failed, as scripted"}
            return [*events, self.response_event("failed", "failed", **more)]
        return [*events, self.response_event("completed", "completed", **more)]
