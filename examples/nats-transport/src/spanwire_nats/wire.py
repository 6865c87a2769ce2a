"""PURE: what is in the messages. JSON both ways.

A call is one message to the endpoint's subject. Its NATS headers are the call's headers (``traceparent``,
``authorization``, ...) and ``spanwire-heartbeat``, in seconds; its reply subject is an inbox of this call alone::

    {"model": "m", "stream": true, "body": {"messages": [...]}, "query": {...}}

The answer is messages to that inbox, numbered from 0, since a broker that drops one says so to nobody::

    {"n": 0, "reasoning": "..."}  {"n": 1, "text": "..."}  {"n": 2, "tool_calls": [...]}
    {"n": 3, "finish_reason": "stop", "usage": {...}}  {"n": 4, "end": true}  {"n": 4, "error": {"status": 429, "message": "..."}}

An answer that is not streamed has all in one message, and then ``end``. An empty message is a heartbeat: the responder
lives. It has a reply subject, so that the broker tells the responder when nobody listens any more. A caller that leaves
says so itself, on the subject and ``.cancel``, with its inbox as the payload.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from spanwire import Chunk, ToolCallDelta, Usage
from spanwire.errors import ProtocolError

__all__ = ["HEARTBEAT", "cancel_subject", "chunk_of", "decode", "encode", "fields_of", "joined"]

HEARTBEAT = "spanwire-heartbeat"


def cancel_subject(subject: str) -> str:
    """Where callers of a subject say that they leave."""
    return f"{subject}.cancel"


def encode(message: Mapping[str, Any]) -> bytes:
    """Raises TypeError, ValueError or RecursionError for what is no JSON."""
    return json.dumps(message, ensure_ascii=False, allow_nan=False).encode()


def decode(payload: bytes) -> dict[str, Any]:
    """Raises ProtocolError; its text shows nothing of the content."""
    try:
        message = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a message of {len(payload)} bytes is not JSON") from error
    if not isinstance(message, dict):
        raise ProtocolError(f"a message holds a {type(message).__name__}, not an object")
    return message


def chunk_of(message: Mapping[str, Any], raw: bytes) -> Chunk | None:
    """What a message brings for the caller, None for nothing. Raises ProtocolError."""
    usage = message.get("usage")
    try:
        chunk = Chunk(
            text=message.get("text", ""),
            reasoning=message.get("reasoning", ""),
            tool_calls=tuple(ToolCallDelta(**piece) for piece in message.get("tool_calls", ())),
            finish_reason=message.get("finish_reason"),
            usage=None if usage is None else Usage(**usage),
            raw=raw,
        )
    except TypeError as error:
        raise ProtocolError("a message has fields that this wire does not know") from error
    if not all(isinstance(text, str) for text in (chunk.text, chunk.reasoning, chunk.finish_reason or "")):
        raise ProtocolError("a message's text is no text")
    return chunk if chunk.has_content or chunk.finish_reason is not None or chunk.usage is not None else None


def fields_of(chunk: Chunk) -> dict[str, Any]:
    """The way back: what a responder sends for a chunk."""
    fields: dict[str, Any] = {}
    if chunk.text:
        fields["text"] = chunk.text
    if chunk.reasoning:
        fields["reasoning"] = chunk.reasoning
    if chunk.tool_calls:
        fields["tool_calls"] = [_given(piece, "index", "id", "name", "arguments") for piece in chunk.tool_calls]
    if chunk.finish_reason is not None:
        fields["finish_reason"] = chunk.finish_reason
    if chunk.usage is not None:
        counts = ("input_tokens", "output_tokens", "total_tokens", "cached_tokens", "reasoning_tokens")
        fields["usage"] = _given(chunk.usage, *counts)
    return fields


def joined(chunks: Iterable[Chunk]) -> Chunk:
    """One chunk of many, for an answer that is not streamed."""
    text, reasoning = "", ""
    tools: list[ToolCallDelta] = []
    finish_reason: str | None = None
    usage: Usage | None = None
    for chunk in chunks:
        text += chunk.text
        reasoning += chunk.reasoning
        tools += chunk.tool_calls
        finish_reason = chunk.finish_reason or finish_reason
        usage = chunk.usage or usage
    return Chunk(text=text, reasoning=reasoning, tool_calls=tuple(tools), finish_reason=finish_reason, usage=usage)


def _given(of: object, *names: str) -> dict[str, Any]:
    values = {name: getattr(of, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}
