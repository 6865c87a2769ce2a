"""Messages as span attributes, in the schema of the GenAI conventions. Only where the application asks for it.

``OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT`` is the switch that OpenTelemetry's own instrumentations have, with
their values: ``span_only`` and ``span_and_event`` put messages on the span; ``event_only`` and ``no_content`` do not, since
no events are emitted here; anything else is ``no_content``, with a warning.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from ..calls import Reply
from ..endpoint import Endpoint
from .attributes import Asked

__all__ = ["add_messages", "wanted"]

_log = logging.getLogger("spanwire.telemetry")

_VARIABLE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
_MODES = {"": False, "no_content": False, "event_only": False, "span_only": True, "span_and_event": True}
#: Where the conventions' words are not OpenAI's.
_FINISH_REASONS = {"tool_calls": "tool_call", "function_call": "tool_call"}


def wanted() -> bool:
    """Whether the environment asks for messages on spans."""
    text = os.environ.get(_VARIABLE, "").strip().lower()
    if text not in _MODES:
        _log.warning("%s is none of %s: no content is captured", _VARIABLE, ", ".join(filter(None, _MODES)))
    return _MODES.get(text, False)


def add_messages(attributes: dict[str, Any], call: Asked, reply: Reply, endpoint: Endpoint) -> None:
    """``gen_ai.input.messages`` and ``gen_ai.output.messages``, each as JSON text."""
    messages = call.body.get("messages")
    if isinstance(messages, (list, tuple)):
        found = [_message(message) for message in messages if isinstance(message, Mapping)]
        attributes["gen_ai.input.messages"] = _json(found, endpoint)
    if call.operation == "chat":
        parts = list(_reply_parts(reply))
        if parts or reply.finish_reason:
            reason = reply.finish_reason or "error"
            output = {"role": "assistant", "parts": parts, "finish_reason": _FINISH_REASONS.get(reason, reason)}
            attributes["gen_ai.output.messages"] = _json([output], endpoint)


def _json(messages: list[dict[str, Any]], endpoint: Endpoint) -> str:
    text = msgspec.json.encode(messages).decode("utf-8", "replace")
    key = endpoint.api_key
    return text.replace(key, "***") if isinstance(key, str) and key else text


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    if role == "tool":
        response = {"type": "tool_call_response", "id": message.get("tool_call_id"), "response": message.get("content")}
        return {"role": "tool", "parts": [response]}
    parts = [*_content(message.get("content"))]
    for call in message.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            parts.append(_tool_call(call.get("id"), function.get("name"), function.get("arguments")))
    return {"role": str(role), "parts": parts}


def _content(content: object) -> Iterator[dict[str, Any]]:
    if isinstance(content, str):
        yield _text(content)
        return
    if not isinstance(content, (list, tuple)):
        return
    for block in content:
        if not isinstance(block, Mapping):
            continue
        kind, inner = block.get("type"), block.get(str(block.get("type")))
        if isinstance(block.get("text"), str):
            yield _text(block["text"])
        elif kind == "image_url" and isinstance(inner, Mapping) and isinstance(inner.get("url"), str):
            yield _image(inner["url"])
        elif kind == "input_audio" and isinstance(inner, Mapping):
            mime = f"audio/{inner['format']}" if isinstance(inner.get("format"), str) else None
            yield {"type": "blob", "mime_type": mime, "modality": "audio", "content": inner.get("data")}
        elif kind == "file" and isinstance(inner, Mapping) and isinstance(inner.get("file_id"), str):
            yield {"type": "file", "mime_type": None, "modality": "document", "file_id": inner["file_id"]}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "content": _clean(text)}


def _clean(text: str) -> str:
    """Without halves of surrogate pairs, which no encoder takes."""
    return text.encode("utf-8", "replace").decode()


def _image(url: str) -> dict[str, Any]:
    if not url.startswith("data:"):
        return {"type": "uri", "mime_type": None, "modality": "image", "uri": url}
    kind, _, data = url[len("data:") :].partition(",")
    return {"type": "blob", "mime_type": kind.partition(";")[0] or None, "modality": "image", "content": data}


def _tool_call(id: object, name: object, arguments: Any) -> dict[str, Any]:
    if isinstance(arguments, str):
        text = _clean(arguments)
        try:
            arguments = msgspec.json.decode(text)
        except msgspec.DecodeError:
            arguments = text
    return {"type": "tool_call", "id": id, "name": name, "arguments": arguments}


def _reply_parts(reply: Reply) -> Iterator[dict[str, Any]]:
    if reply.reasoning:
        yield {"type": "reasoning", "content": _clean(reply.reasoning)}
    if reply.text:
        yield _text(reply.text)
    for call in reply.tool_calls:
        yield _tool_call(call.id, call.name, call.arguments)
