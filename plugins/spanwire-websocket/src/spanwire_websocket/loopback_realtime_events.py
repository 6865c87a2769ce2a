"""PURE: the answer of a scripted server in OpenAI's Realtime schema. Shapes after ``openai.types.realtime``.

Steps are those of :mod:`spanwire.testing.responses_events`: a piece of content counts, and so does the opening
(``response.created``) with ``Script.role_chunk``. In an audio answer a piece is a token of the transcript with a tenth of
a second of sound, as long as there are both.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from itertools import count, zip_longest
from typing import Any

from spanwire.calls import Usage
from spanwire.testing.responses_events import Step
from spanwire.testing.script import Script, ScriptedTool

from .loopback_speech import tone

__all__ = ["Answer"]

#: Sound of a delta, and of a token in an answer that has nothing to echo, in milliseconds.
_CHUNK_MS = 100

_Event = dict[str, Any]

_ids = count(1)
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
_FAILED = "error"
_CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded", 503: "server_is_overloaded"}
_RATE_LIMITS = {
    "type": "rate_limits.updated",
    "rate_limits": [
        {"name": "requests", "limit": 1000, "remaining": 999, "reset_seconds": 60.0},
        {"name": "tokens", "limit": 50_000, "remaining": 49_950, "reset_seconds": 0.06},
    ],
}


class Answer:
    """One response, from ``response.created`` to ``response.done``. Its events have no ``event_id`` yet.

    Args:
        script: what to answer.
        audio: an audio answer with this sound, or with a tone if it is empty. None: a text answer.
        bytes_per_ms: of that sound.
        settings: of the session, with ``response`` of the ``response.create`` over them.
        conversation: its id; None: the answer is no part of it.
        after: the item that comes before those of the answer.
        input_tokens: what was counted in the conversation.
    """

    def __init__(
        self,
        script: Script,
        *,
        audio: bytes | None,
        bytes_per_ms: int,
        settings: dict[str, Any],
        conversation: str | None,
        after: str | None,
        input_tokens: int,
    ) -> None:
        self._script = script
        self._number = next(_ids)
        self._audio = audio
        self._chunk = _CHUNK_MS * bytes_per_ms
        self._usage = script.usage_for(input_tokens, asked=True)
        self._after = after
        self._ending: list[_Event] = []
        self._begun = False
        self._stop: Callable[[], list[_Event]] | None = None
        #: Items that are finished.
        self.output: list[_Event] = []
        self.id = f"resp_{self._number:08x}"
        self._same: _Event = {
            "object": "realtime.response",
            "id": self.id,
            "output_modalities": ["text"] if audio is None else ["audio"],
            "conversation_id": conversation,
            "max_output_tokens": settings.get("max_output_tokens", "inf"),
            "metadata": settings.get("metadata"),
        }
        if audio is not None:
            self._same["audio"] = {"output": settings["audio"]["output"]}

    def steps(self) -> Iterator[Step]:
        """Each made when it is due. ``queue_s`` and ``end_s`` are the connection's business."""
        script = self._script
        opening = [self._response("response.created", "in_progress"), _RATE_LIMITS]
        wait_s = script.headers_s
        if script.role_chunk:
            yield Step(wait_s, False, False, True, tuple(opening))
            self._begun = True
            opening, wait_s = [], 0.0
        wait_s += script.prefill_s
        if script.status >= 400 or script.finish == _FAILED:
            yield Step(wait_s, False, False, True, (*opening, self._failed()))
            return
        paced = False
        for events in self._pieces():
            yield Step(wait_s, paced, True, True, (*opening, *events))
            self._begun = True
            opening, wait_s, paced = [], script.gap_s, True
        if paced:  # else there is no content, and the wait for it is kept all the same
            wait_s = 0.0
        if script.finish is not None:
            yield Step(wait_s, paced, False, True, (*opening, *self._taken(), self._done()))
        elif opening:
            yield Step(wait_s, paced, False, True, tuple(opening))

    def cancelled(self, reason: str) -> list[_Event]:
        """The events of an answer that ends after those steps that were taken, and no further."""
        events = [] if self._begun else [self._response("response.created", "in_progress")]
        if self._stop is not None:
            events += self._stop()
        details = {"type": "cancelled", "reason": reason}
        return [*events, self._response("response.done", "cancelled", status_details=details)]

    # --- content ----------------------------------------------------------------------------------------------------

    def _pieces(self) -> Iterator[list[_Event]]:
        """The events of each piece. What an item says at its end goes with the next piece, or with the end."""
        if self._script.tokens or self._audio:
            yield from self._message()
        for index, tool in enumerate(self._script.tool_calls):
            yield from self._tool(tool, tool.id or f"call_{index}")

    def _taken(self) -> list[_Event]:
        ending, self._ending = self._ending, []
        return ending

    def _message(self) -> Iterator[list[_Event]]:
        tokens = self._script.tokens
        item: _Event = self._item({"type": "message", "role": "assistant"})
        at = self._at(item, content_index=0)
        spoken = self._audio is not None
        chunks: list[bytes] = []
        if self._audio is not None:
            sound = self._audio or tone(_CHUNK_MS) * len(tokens)
            chunks = [sound[start : start + self._chunk] for start in range(0, len(sound), self._chunk)]
        field = "transcript" if spoken else "text"
        kind = "output_audio_transcript" if spoken else "output_text"
        part = {"type": "audio" if spoken else "text"}
        said = ""

        def end(status: str) -> list[_Event]:
            content = {"type": "output_audio" if spoken else "output_text", field: said}
            events = [{"type": f"response.{kind}.done", **at, field: said}]
            if spoken:
                events.insert(0, {"type": "response.output_audio.done", **at})
            events.append({"type": "response.content_part.done", **at, "part": {**part, field: said}})
            return [*events, *self._finished({**item, "content": [content], "status": status})]

        opening = [
            *self._taken(),
            *self._added({**item, "content": [], "status": "in_progress"}),
            {"type": "response.content_part.added", **at, "part": {**part, field: ""}},
        ]
        for token, chunk in zip_longest(tokens, chunks):
            events = []
            if token is not None:
                events.append({"type": f"response.{kind}.delta", **at, "delta": token})
            if chunk is not None:
                delta = base64.b64encode(chunk).decode("ascii")
                events.append({"type": "response.output_audio.delta", **at, "delta": delta})
            yield [*opening, *events]
            opening = []
            said += token or ""
            self._stop = lambda: end("incomplete")
        self._ending = end("completed")

    def _tool(self, tool: ScriptedTool, call_id: str) -> Iterator[list[_Event]]:
        item = self._item({"type": "function_call", "name": tool.name, "call_id": call_id})
        at = self._at(item)
        said = ""

        def end(status: str) -> list[_Event]:
            done = {"type": "response.function_call_arguments.done", **at, "call_id": call_id, "name": tool.name}
            return [{**done, "arguments": said}, *self._finished({**item, "arguments": said, "status": status})]

        yield [*self._taken(), *self._added({**item, "arguments": "", "status": "in_progress"})]
        self._stop = lambda: end("incomplete")
        for piece in tool.arguments:
            yield [{"type": "response.function_call_arguments.delta", **at, "call_id": call_id, "delta": piece}]
            said += piece
        self._ending = end("completed")

    def _item(self, fields: _Event) -> _Event:
        return {"id": f"item_{self._number:08x}_{len(self.output)}", "object": "realtime.item", **fields}

    def _at(self, item: _Event, **more: Any) -> _Event:
        return {"response_id": self.id, "item_id": item["id"], "output_index": len(self.output), **more}

    def _added(self, item: _Event) -> list[_Event]:
        return [
            {
                "type": "response.output_item.added",
                "response_id": self.id,
                "output_index": len(self.output),
                "item": item,
            },
            *self._in_conversation("added", item),
        ]

    def _finished(self, item: _Event) -> list[_Event]:
        index = len(self.output)
        events: list[_Event] = [
            {"type": "response.output_item.done", "response_id": self.id, "output_index": index, "item": item},
            *self._in_conversation("done", item),
        ]
        self.output.append(item)
        self._after = item["id"]
        self._stop = None
        return events

    def _in_conversation(self, what: str, item: _Event) -> list[_Event]:
        if self._same["conversation_id"] is None:
            return []
        return [{"type": f"conversation.item.{what}", "previous_item_id": self._after, "item": item}]

    # --- the response -----------------------------------------------------------------------------------------------

    def _done(self) -> _Event:
        reason = _INCOMPLETE.get(self._script.finish or "")
        if reason is not None:
            details = {"type": "incomplete", "reason": reason}
            return self._response("response.done", "incomplete", status_details=details)
        return self._response("response.done", "completed")

    def _failed(self) -> _Event:
        status = self._script.status
        words = "the answer failed, as scripted" if status < 400 else f"status {status}, as scripted"
        kind = "invalid_request_error" if 400 <= status < 500 else "server_error"
        error = {"type": kind, "code": _CODES.get(status, kind), "message": words}
        return self._response("response.done", "failed", status_details={"type": "failed", "error": error})

    def _response(self, type_: str, status: str, status_details: _Event | None = None) -> _Event:
        begins = type_ == "response.created"
        usage = None if begins or self._usage is None else self._usage_fields(self._usage)
        response = {
            **self._same,
            "status": status,
            "status_details": status_details,
            "output": [] if begins else list(self.output),
            "usage": usage,
        }
        return {"type": type_, "response": response}

    def _usage_fields(self, usage: Usage) -> _Event:
        given, made = usage.input_tokens or 0, usage.output_tokens or 0
        spoken = self._audio is not None
        return {
            "total_tokens": given + made if usage.total_tokens is None else usage.total_tokens,
            "input_tokens": given,
            "output_tokens": made,
            "input_token_details": {"text_tokens": given, "audio_tokens": 0, "cached_tokens": usage.cached_tokens or 0},
            "output_token_details": {
                "text_tokens": 0 if spoken else made,
                "audio_tokens": made if spoken else 0,
            },
        }
