"""PURE: answers of Anthropic's Messages API: events and whole messages in, chunks out.

A stream, each event with its name in ``type`` too::

    message_start                                   id, model, tokens of the prompt
      content_block_start, _delta ..., _stop        once for each block: thinking, text, tool_use, ...
    message_delta                                   why it stopped, tokens of the answer
    message_stop                                    the terminal event

``ping`` may come anywhere, and so may ``error``. New kinds of events, blocks and deltas are passed over.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from spanwire import Chunk, ToolCallDelta, Usage
from spanwire.errors import ProtocolError, ServerError, Truncated, server_error

__all__ = ["MessageDecoder", "error_of", "object_of"]

#: The API's words for why it stopped, and OpenAI's. Others go out as they are.
_FINISH = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "pause_turn": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}
#: Its kinds of errors as statuses, for those that come inside a stream. Source: the API's reference, "Errors".
_STATUSES = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "api_error": 500,
    "timeout_error": 504,
    "overloaded_error": 529,
}


class MessageDecoder:
    """The state of one answer.

    Attributes:
        done: ``message_stop`` was seen.
        id, model: as the server gave them.
        finish_reason: once it is known; after it come only the usage and the end.
        usage: the last count of tokens that was seen.
    """

    def __init__(self) -> None:
        self.done = False
        self.id: str | None = None
        self.model: str | None = None
        self.finish_reason: str | None = None
        self.usage: Usage | None = None
        self._counts: dict[str, Any] = {}
        self._tools: dict[int, _Tool] = {}  # by the number of their block
        self._last_raw = b""
        self._usage_given = False

    # --- a stream ---------------------------------------------------------------------------------------------------

    def event(self, name: bytes, data: bytes) -> Chunk | None:
        """One event; None for one that brings nothing. Raises ServerError, ProtocolError."""
        event = object_of(data)
        if event is None:
            raise ProtocolError(f"an event of {len(data)} bytes is no JSON object")
        kind = event.get("type")
        if kind == "content_block_delta":
            return self._delta(event, data)
        if kind == "message_start":
            self._see(event.get("message"))
        elif kind == "content_block_start":
            return self._block(event, data)
        elif kind == "content_block_stop":
            return self._block_end(event, data)
        elif kind == "message_delta":
            return self._message_delta(event, data)
        elif kind == "message_stop":
            self.done = True
        elif kind == "error" or name == b"error":
            raise _stream_error(event)
        return None

    def end(self) -> Chunk | None:
        """The stream has ended; gives the usage, which is known only now. Raises Truncated."""
        if self.finish_reason is None:
            raise Truncated("the stream ended before the answer was complete: no stop_reason came")
        if self.usage is None or self._usage_given:
            return None
        self._usage_given = True
        return Chunk(usage=self.usage, raw=self._last_raw)

    def _see(self, message: Any) -> None:
        if isinstance(message, dict):
            self.id = _text_or_none(message.get("id"))
            self.model = _text_or_none(message.get("model"))
            self._count(message.get("usage"))

    def _count(self, usage: Any) -> None:
        """Counts are running totals; an event has only those that it knows."""
        if isinstance(usage, dict):
            self._counts.update({name: count for name, count in usage.items() if count is not None})
            self.usage = _usage(self._counts)

    def _block(self, event: Mapping[str, Any], data: bytes) -> Chunk | None:
        block = event.get("content_block")
        if not isinstance(block, dict):
            raise ProtocolError("a content_block_start has no block")
        kind = block.get("type")
        if kind == "tool_use":
            tool = self._tools[_number(event)] = _Tool(len(self._tools))
            first = ToolCallDelta(tool.index, _text_or_none(block.get("id")), _text_or_none(block.get("name")))
            return Chunk(tool_calls=(first,), raw=data)
        chunk = Chunk(
            text=_text(block, "text") if kind == "text" else "",
            reasoning=_text(block, "thinking") if kind == "thinking" else "",
            raw=data,
        )
        return chunk if chunk.has_content else None

    def _delta(self, event: Mapping[str, Any], data: bytes) -> Chunk | None:
        delta = event.get("delta")
        if not isinstance(delta, dict):
            raise ProtocolError("a content_block_delta has no delta")
        kind = delta.get("type")
        if kind == "text_delta":
            return Chunk(text=_text(delta, "text"), raw=data)
        if kind == "thinking_delta":
            return Chunk(reasoning=_text(delta, "thinking"), raw=data)
        if kind == "input_json_delta":
            tool = self._tools.get(_number(event))
            piece = _text(delta, "partial_json")
            if tool is None or not piece:  # of a tool that the server runs by itself
                return None
            tool.has_arguments = True
            return Chunk(tool_calls=(ToolCallDelta(tool.index, arguments=piece),), raw=data)
        return Chunk(raw=data)  # signatures, citations: for who reads `raw`

    def _block_end(self, event: Mapping[str, Any], data: bytes) -> Chunk | None:
        """A tool without arguments got no delta, and its arguments are JSON text all the same."""
        tool = self._tools.get(_number(event))
        if tool is None or tool.has_arguments:
            return None
        tool.has_arguments = True
        return Chunk(tool_calls=(ToolCallDelta(tool.index, arguments="{}"),), raw=data)

    def _message_delta(self, event: Mapping[str, Any], data: bytes) -> Chunk | None:
        self._count(event.get("usage"))
        self._last_raw = data
        delta = event.get("delta")
        reason = _text_or_none(delta.get("stop_reason")) if isinstance(delta, dict) else None
        if reason is None or self.finish_reason is not None:
            return None
        self.finish_reason = _FINISH.get(reason, reason)
        return Chunk(finish_reason=self.finish_reason, raw=data)

    # --- an answer that is not streamed -----------------------------------------------------------------------------

    def whole(self, body: bytes) -> Chunk:
        """Raises ServerError, ProtocolError."""
        message = object_of(body)
        if message is None:
            raise ProtocolError(f"an answer of {len(body)} bytes is no JSON object")
        if message.get("type") == "error":
            raise _stream_error(message)
        blocks = message.get("content")
        if not isinstance(blocks, list):
            raise ProtocolError("the answer is no message: it has no content")
        self._see(message)
        text, reasoning = "", ""
        tools: list[ToolCallDelta] = []
        for block in blocks:
            kind = block.get("type") if isinstance(block, dict) else None
            if kind == "text":
                text += _text(block, "text")
            elif kind == "thinking":
                reasoning += _text(block, "thinking")
            elif kind == "tool_use":
                id_, name = _text_or_none(block.get("id")), _text_or_none(block.get("name"))
                arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
                tools.append(ToolCallDelta(len(tools), id_, name, arguments))
        reason = _text_or_none(message.get("stop_reason"))
        self.finish_reason = None if reason is None else _FINISH.get(reason, reason)
        return Chunk(text, reasoning, tuple(tools), self.finish_reason, self.usage, body)


class _Tool:
    """A tool call whose arguments are coming."""

    __slots__ = ("has_arguments", "index")

    def __init__(self, index: int) -> None:
        self.index = index
        self.has_arguments = False


def object_of(data: bytes) -> dict[str, Any] | None:
    """A JSON object, None for anything else."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def error_of(error: Any) -> tuple[str | None, str]:
    """Kind and message of the API's error object."""
    if not isinstance(error, dict):
        return None, "the server failed"
    return _text_or_none(error.get("type")), _text_or_none(error.get("message")) or "the server failed"


def _stream_error(event: Mapping[str, Any]) -> ServerError:
    """An error in an answer whose status was 200: its kind says what status it would have been."""
    kind, message = error_of(event.get("error"))
    error = server_error(message, code=_STATUSES.get(kind or ""))
    error.code = kind
    return error


def _usage(counts: Mapping[str, Any]) -> Usage | None:
    """Tokens of the prompt are all of them here, as everywhere in spanwire: the API counts the cached ones apart."""
    given = [_count(counts.get(f"{name}input_tokens")) for name in ("", "cache_creation_", "cache_read_")]
    made = _count(counts.get("output_tokens"))
    details = counts.get("output_tokens_details")
    prompt = None if given[0] is None else sum(count or 0 for count in given)
    if prompt is None and made is None:
        return None
    return Usage(
        input_tokens=prompt,
        output_tokens=made,
        total_tokens=None if prompt is None or made is None else prompt + made,
        cached_tokens=given[2],
        reasoning_tokens=_count(details.get("thinking_tokens")) if isinstance(details, dict) else None,
    )


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _number(event: Mapping[str, Any]) -> int:
    number = event.get("index")
    if not isinstance(number, int):
        raise ProtocolError("an event of a block does not say which")
    return number


def _text(of: Mapping[str, Any], field: str) -> str:
    value = of.get(field) or ""
    if not isinstance(value, str):
        raise ProtocolError(f"the answer's {field!r} is a {type(value).__name__}, not text")
    return value


def _text_or_none(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
