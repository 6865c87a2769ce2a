"""PURE: what Gemini's model gave, as a reply: of an interaction, and of ``generateContent`` in a batch."""

from __future__ import annotations

from typing import Any

from spanwire.calls import Embeddings, Reply, ToolCall, Usage
from spanwire.errors import ProtocolError

from .reading import json_of

__all__ = ["embedding_of", "reply_of_content", "reply_of_interaction"]

#: After one of these an interaction's output begins anew: what stands before it was there already.
_INPUTS = frozenset({"user_input", "function_result"})
#: It ended before it was done.
_CUT = frozenset({"incomplete", "budget_exceeded", "requires_continuation"})
#: ``finishReason`` of ``generateContent`` in OpenAI's words; others stay as they are, in lower case.
_REASONS = {
    "STOP": "stop",
    "MAX_TOKENS": "length",
    **dict.fromkeys(("SAFETY", "RECITATION", "BLOCKLIST", "PROHIBITED_CONTENT", "SPII"), "content_filter"),
}


def reply_of_interaction(interaction: Any, raw: bytes) -> Reply:
    """The output of an interaction. Raises ProtocolError: it is none."""
    steps = interaction.get("steps") if isinstance(interaction, dict) else None
    if steps is None and isinstance(interaction, dict):
        steps = interaction.get("outputs")  # before the revision 2026-05-20: contents without steps around them
    if not isinstance(steps, list):
        if not (isinstance(interaction, dict) and isinstance(interaction.get("status"), str)):
            raise ProtocolError("the job's result is no interaction: it has no steps")
        steps = []
    begin = max((at + 1 for at, step in enumerate(steps) if _of(step, "type") in _INPUTS), default=0)
    text: list[str] = []
    reasoning: list[str] = []
    calls: list[ToolCall] = []
    for step in steps[begin:]:
        kind = _of(step, "type")
        if kind == "model_output":
            text += _texts(step.get("content"))
        elif kind == "thought":
            reasoning += _texts(step.get("summary"))
        elif kind == "text":
            text += _texts([step])
        elif kind == "function_call":
            calls.append(_call(step.get("id"), step.get("name"), step.get("arguments"), len(calls)))
    status = _of(interaction, "status")
    reason = "length" if status in _CUT else "tool_calls" if calls else "stop" if status == "completed" else None
    return Reply(
        text="".join(text),
        reasoning="".join(reasoning),
        tool_calls=tuple(calls),
        finish_reason=reason,
        usage=_usage(interaction.get("usage"), _INTERACTION),
        id=_of(interaction, "id"),
        model=_of(interaction, "model"),
        raw=raw,
    )


def reply_of_content(answer: Any, raw: bytes) -> Reply:
    """A ``GenerateContentResponse``: its first candidate. Raises ProtocolError: it is none."""
    if not isinstance(answer, dict):
        raise ProtocolError("a result of the batch is no answer of generateContent")
    listed = answer.get("candidates")
    candidate = listed[0] if isinstance(listed, list) and listed and isinstance(listed[0], dict) else {}
    content = candidate.get("content")
    parts = content.get("parts") if isinstance(content, dict) else None
    text: list[str] = []
    reasoning: list[str] = []
    calls: list[ToolCall] = []
    for part in parts if isinstance(parts, list) else ():
        if not isinstance(part, dict):
            continue
        called = part.get("functionCall")
        if isinstance(called, dict):
            calls.append(_call(called.get("id"), called.get("name"), called.get("args"), len(calls)))
        elif isinstance(part.get("text"), str):
            (reasoning if part.get("thought") is True else text).append(_clean(part["text"]))
    said = _of(candidate, "finishReason")
    blocked = _of(answer.get("promptFeedback"), "blockReason")
    reason = _REASONS.get(said or "", said.lower() if said else None)
    if calls and reason in (None, "stop"):
        reason = "tool_calls"
    return Reply(
        text="".join(text),
        reasoning="".join(reasoning),
        tool_calls=tuple(calls),
        finish_reason="content_filter" if blocked and reason is None else reason,
        usage=_usage(answer.get("usageMetadata"), _CONTENT),
        id=_of(answer, "responseId"),
        model=_of(answer, "modelVersion"),
        raw=raw,
    )


def embedding_of(answers: list[Any], model: str | None) -> Embeddings:
    """Vectors of ``EmbedContentResponse``. Raises ProtocolError."""
    vectors: list[list[float]] = []
    counted: int | None = None
    for answer in answers:
        inner = answer.get("embedding") if isinstance(answer, dict) else None
        values = inner.get("values") if isinstance(inner, dict) else None
        if not isinstance(values, list) or not all(
            isinstance(value, (int, float)) and not isinstance(value, bool) for value in values
        ):
            raise ProtocolError("a result of the batch has no vector in it")
        try:
            vectors.append([float(value) for value in values])
        except OverflowError:
            raise ProtocolError("a result of the batch has a number that no vector can have") from None
        used = answer.get("usageMetadata") or answer.get("usage_metadata")
        number = _count(used.get("promptTokenCount")) if isinstance(used, dict) else None
        number = _count(answer.get("tokenCount")) if number is None else number
        counted = (counted or 0) + number if number is not None else counted
    return Embeddings(vectors, model, None if counted is None else Usage(counted, None, counted))


#: Names of input, output, all, cached, and reasoning tokens. Output is what the server counts as output: without thoughts.
_INTERACTION = (
    "total_input_tokens",
    "total_output_tokens",
    "total_tokens",
    "total_cached_tokens",
    "total_thought_tokens",
)
_CONTENT = (
    "promptTokenCount",
    "candidatesTokenCount",
    "totalTokenCount",
    "cachedContentTokenCount",
    "thoughtsTokenCount",
)


def _usage(usage: Any, names: tuple[str, ...]) -> Usage | None:
    if not isinstance(usage, dict):
        return None
    numbers = [_count(usage.get(name)) for name in names]
    return Usage(*numbers) if any(number is not None for number in numbers[:3]) else None


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _call(id_: Any, name: Any, arguments: Any, index: int) -> ToolCall:
    return ToolCall(
        id=_clean(id_) if isinstance(id_, str) and id_ else f"call_{index}",
        name=_clean(name) if isinstance(name, str) else "",
        arguments=_clean(arguments) if isinstance(arguments, str) else _json(arguments),
    )


def _json(arguments: Any) -> str:
    try:
        return json_of({} if arguments is None else arguments).decode("utf-8", "replace")
    except RecursionError:
        raise ProtocolError("the arguments of a call are nested too deeply") from None


def _texts(parts: Any) -> list[str]:
    return [
        _clean(part["text"])
        for part in (parts if isinstance(parts, list) else ())
        if isinstance(part, dict) and isinstance(part.get("text"), str)
    ]


def _clean(text: str) -> str:
    """Text that can be written."""
    return text.encode("utf-8", "replace").decode()


def _of(value: Any, name: str) -> str | None:
    found = value.get(name) if isinstance(value, dict) else None
    return _clean(found) if isinstance(found, str) and found else None
