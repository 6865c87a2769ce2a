"""PURE: scripts as OpenAI's JSON, for the loopback server: chunks of a stream, whole answers, embeddings, errors."""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any, NamedTuple

import msgspec

from spanwire.calls import Usage
from spanwire.testing.loopback import Request
from spanwire.testing.reports import DIALECTS
from spanwire.testing.script import Script

__all__ = ["Event", "Report", "chunks", "embeddings", "error", "vector", "whole", "words"]

_encode = msgspec.json.encode
_ids = count(1)


class Event(NamedTuple):
    """One message of a stream: the pause before it, whether that is counted from when the last one was due, whether it is
    content, and its bytes."""

    wait_s: float
    paced: bool
    content: bool
    data: bytes


class Report:
    """What the server says of its own time, from the request's stamps at the moment when it is asked for."""

    def __init__(self, script: Script, request: Request) -> None:
        self._dialect = DIALECTS[script.server_timing] if script.server_timing is not None else None
        self._request = request
        body = request.body
        asked_by = self._dialect.asked_by if self._dialect is not None else None
        self._asked = asked_by is None or (isinstance(body, dict) and bool(body.get(asked_by)))

    def headers(self, *, streamed: bool) -> dict[str, str]:
        """For the initial metadata."""
        if self._dialect is None:
            return {}
        make = self._dialect.stream_headers if streamed else self._dialect.headers
        return make(self._request.times) if make is not None else {}

    def into(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Merged into a whole answer."""
        if self._dialect is not None and self._dialect.fields is not None:
            for name, value in self._dialect.fields(self._request.times).items():
                answer[name] = {**answer.get(name, {}), **value}
        return answer

    def fields(self, event: str, *, last: bool) -> dict[str, Any]:
        """To add to the event with the ``finish`` reason, or with the ``usage``."""
        dialect = self._dialect
        if dialect is None or dialect.event_fields is None or not self._asked:
            return {}
        here = dialect.event == event or (dialect.event == "last" and last)
        return dialect.event_fields(self._request.times) if here else {}


def words(value: Any) -> int:
    """Tokens of a request, as this server counts them."""
    if isinstance(value, str):
        return len(value.split())
    if isinstance(value, list):
        return sum(map(words, value))
    if isinstance(value, dict):
        return words(value.get("content", value.get("text")))
    return int(isinstance(value, int))


def usage_fields(usage: Usage) -> dict[str, Any]:
    """Usage as OpenAI's schema has it."""
    fields: dict[str, Any] = {
        "prompt_tokens": usage.input_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.total_tokens,
    }
    if usage.cached_tokens is not None:
        fields["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
    if usage.reasoning_tokens is not None:
        fields["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return {name: value for name, value in fields.items() if value is not None}


def _deltas(script: Script) -> Iterator[dict[str, Any]]:
    for piece in script.reasoning:
        yield {"reasoning_content": piece}
    for piece in script.tokens:
        yield {"content": piece}
    for index, tool in enumerate(script.tool_calls):
        function: dict[str, Any] = {"name": tool.name, "arguments": ""}
        yield {
            "tool_calls": [{"index": index, "id": tool.id or f"call_{index}", "type": "function", "function": function}]
        }
        for piece in tool.arguments:
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}


def chunks(script: Script, body: Mapping[str, Any], report: Report) -> Iterator[Event]:
    """The chunks of a streamed chat answer."""
    same = {
        "id": f"chatcmpl-{next(_ids):08x}",
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": body.get("model"),
    }

    def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        return {**same, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]}

    wait_s = script.headers_s
    if script.role_chunk:
        yield Event(wait_s, False, False, _encode(chunk({"role": "assistant", "content": ""})))
        wait_s = 0.0
    wait_s += script.prefill_s
    paced = False
    for delta in _deltas(script):
        yield Event(wait_s, paced, True, _encode(chunk(delta)))
        wait_s, paced = script.gap_s, True
    if paced:
        wait_s = 0.0
    options = body.get("stream_options")
    asked = isinstance(options, dict) and bool(options.get("include_usage"))
    usage = script.usage_for(words(body.get("messages")) if asked else 0, asked=asked)
    if script.finish is not None:
        event = {**chunk({}, script.finish), **report.fields("finish", last=usage is None)}
        yield Event(wait_s, paced, False, _encode(event))
        wait_s = 0.0
    if usage is not None:
        event = {**same, "choices": [], "usage": usage_fields(usage), **report.fields("usage", last=True)}
        yield Event(wait_s, paced, False, _encode(event))


def whole(script: Script, body: Mapping[str, Any], report: Report) -> bytes:
    """A chat answer that is not streamed."""
    message: dict[str, Any] = {"role": "assistant", "content": "".join(script.tokens)}
    if script.reasoning:
        message["reasoning_content"] = "".join(script.reasoning)
    if script.tool_calls:
        message["content"] = message["content"] or None
        message["tool_calls"] = [
            {
                "id": tool.id or f"call_{index}",
                "type": "function",
                "function": {"name": tool.name, "arguments": "".join(tool.arguments)},
            }
            for index, tool in enumerate(script.tool_calls)
        ]
    answer: dict[str, Any] = {
        "id": f"chatcmpl-{next(_ids):08x}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": body.get("model"),
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": script.finish}],
    }
    usage = script.usage_for(words(body.get("messages")), asked=True)
    if usage is not None:
        answer["usage"] = usage_fields(usage)
    return _encode(report.into(answer))


def vector(text: Any, dimensions: int) -> list[float]:
    """Numbers from -1 to 1 that depend on nothing but the input; a float32 holds them exactly."""
    raw = hashlib.shake_128(_encode(text)).digest(4 * dimensions)
    return [(value >> 8) / 2**23 - 1 for value in struct.unpack(f"<{dimensions}I", raw)]


def embeddings(script: Script, body: Mapping[str, Any]) -> bytes:
    """One vector for each input."""
    given: Any = body.get("input")
    inputs = given if isinstance(given, list) and not (given and isinstance(given[0], int)) else [given]
    dimensions = body.get("dimensions", script.dimensions)
    answer: dict[str, Any] = {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": vector(text, dimensions)}
            for index, text in enumerate(inputs)
        ],
        "model": body.get("model"),
    }
    if script.usage is not None:
        known = script.usage if isinstance(script.usage, Usage) else None
        counted = words(given)
        answer["usage"] = usage_fields(known or Usage(counted, None, counted))
    return _encode(answer)


def error(status: int, message: str) -> bytes:
    """An error object, with its status as the code."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return _encode({"error": {"message": message, "type": kind, "param": None, "code": status}})
