"""PURE: LangChain's messages to the ones that an OpenAI-compatible server takes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    convert_to_openai_messages,
)

__all__ = ["openai_messages"]

#: Blocks in the manner of LangChain's standard, Anthropic, Google or Bedrock, which langchain-core makes OpenAI's. Anything
#: else is sent as it is: chat completions know it, or its server does.
_CONVERTED = frozenset({"audio", "file", "guard_content", "image", "json", "media", "tool_result"})
#: Blocks of an answer that are no part of what is sent back: they are in ``tool_calls``, or the model's own business.
_NOT_SENT = frozenset(
    {
        "function_call",
        "invalid_tool_call",
        "non_standard",
        "reasoning",
        "reasoning_content",
        "redacted_thinking",
        "server_tool_call",
        "server_tool_call_chunk",
        "server_tool_result",
        "thinking",
        "tool_call",
        "tool_call_chunk",
        "tool_use",
    }
)


def openai_messages(messages: Sequence[BaseMessage], *, send_reasoning: bool = False) -> list[dict[str, Any]]:
    """The messages in OpenAI's shape.

    Args:
        messages: LangChain's.
        send_reasoning: give answers their reasoning back, as ``reasoning_content``.

    Raises:
        ValueError: a content block that cannot be sent (langchain-core says which).
    """
    found: list[dict[str, Any]] = []
    for message in messages:
        if isinstance(message, AIMessage):
            found.append(_answer(message, send_reasoning=send_reasoning))
        else:
            found.extend(_other(message))
    return found


def _other(message: BaseMessage) -> Iterable[dict[str, Any]]:
    content, more = _content(message)
    if not content and more:  # nothing but the results of tools, in Anthropic's manner
        return more
    sent: dict[str, Any] = {"role": _role(message), "content": content}
    if isinstance(message, ToolMessage):
        sent["tool_call_id"] = message.tool_call_id  # and no name, which strict servers refuse here
    elif message.name:
        sent["name"] = message.name
    return [sent, *more]


def _role(message: BaseMessage) -> str:
    if isinstance(message, HumanMessage):
        return "user"
    if isinstance(message, SystemMessage):
        role = message.additional_kwargs.get("__openai_role__", "system")
        return role if isinstance(role, str) else "system"
    if isinstance(message, ToolMessage):
        return "tool"
    if isinstance(message, FunctionMessage):
        return "function"
    if isinstance(message, ChatMessage):
        return message.role
    raise ValueError(f"a message of type {type(message).__name__} cannot be sent to a chat model")


def _content(message: BaseMessage) -> tuple[str | list[Any], list[dict[str, Any]]]:
    """What is sent as content, and messages of their own that blocks become."""
    content = message.content
    if isinstance(content, str):
        return content, []
    sent: list[Any] = []
    more: list[dict[str, Any]] = []
    for block in content:
        kind = None if isinstance(block, str) else block.get("type")
        if isinstance(block, str):
            sent.append({"type": "text", "text": block})
        elif kind == "text" and isinstance(block.get("text"), str):
            sent.append(_text(block))
        elif kind in ("thinking", "reasoning", "tool_use"):
            continue
        elif not _is_converted(kind, block):
            sent.append(block)
        else:
            first, *others = convert_to_openai_messages(
                [message.model_copy(update={"content": [block]})], text_format="block"
            )
            if first.get("role") == "tool" and not isinstance(message, ToolMessage):
                others = [first, *others]
            else:
                sent.extend(first["content"])
            more.extend(others)
    if len(sent) == 1 and set(sent[0]) == {"type", "text"} and isinstance(sent[0]["text"], str):
        return sent[0]["text"], more  # as text, which every server takes
    return sent, more


def _is_converted(kind: Any, block: dict[str, Any]) -> bool:
    if kind == "file" and isinstance(block.get("file"), dict):  # OpenAI's own
        return False
    return kind in _CONVERTED or (kind is None and not _CONVERTED.isdisjoint(block))  # Bedrock has no types


def _text(block: dict[str, Any]) -> dict[str, Any]:
    """Without what our side keeps in a block: ids, indexes, annotations."""
    sent = {"type": "text", "text": block["text"]}
    if "cache_control" in block:
        sent["cache_control"] = block["cache_control"]
    return sent


def _answer(message: AIMessage, *, send_reasoning: bool) -> dict[str, Any]:
    content = message.content
    sent: dict[str, Any] = {"role": "assistant", "content": content if isinstance(content, str) else _said(content)}
    if message.name:
        sent["name"] = message.name
    calls = [
        _call(call["id"], call["name"], json.dumps(call["args"], ensure_ascii=False)) for call in message.tool_calls
    ]
    # Their results follow, and a result without its call is refused.
    calls += [_call(call["id"], call["name"] or "", call["args"] or "") for call in message.invalid_tool_calls]
    kept = message.additional_kwargs
    if calls:
        sent["tool_calls"] = calls
    elif isinstance(kept.get("function_call"), dict):
        sent["function_call"] = kept["function_call"]
    if not sent["content"] and ("tool_calls" in sent or "function_call" in sent):
        sent["content"] = None
    if kept.get("refusal"):
        sent["refusal"] = kept["refusal"]
    audio = kept.get("audio")
    if isinstance(audio, dict) and audio.get("id"):
        sent["audio"] = {"id": audio["id"]}  # what was said is sent back by its id alone
    if send_reasoning:
        reasoning = kept.get("reasoning_content") or _reasoning(content)
        if reasoning:
            sent["reasoning_content"] = reasoning
    return sent


def _call(id: str | None, name: str, arguments: str) -> dict[str, Any]:
    return {"type": "function", "id": id, "function": {"name": name, "arguments": arguments}}


def _said(blocks: Sequence[Any]) -> str | list[Any]:
    """The visible part of an answer that is kept as blocks: one text, unless there is more than text in it."""
    seen: list[Any] = []
    for block in blocks:
        if isinstance(block, str):
            seen.append({"type": "text", "text": block})
        elif block.get("type") == "text" and isinstance(block.get("text"), str):
            seen.append(_text(block))
        elif block.get("type") not in _NOT_SENT:
            seen.append(block)
    if all(set(block) == {"type", "text"} for block in seen):
        return "".join(block["text"] for block in seen)
    return seen


def _reasoning(content: str | Sequence[Any]) -> str:
    if isinstance(content, str):
        return ""
    return "".join(
        block["reasoning"]
        for block in content
        if isinstance(block, dict) and block.get("type") == "reasoning" and isinstance(block.get("reasoning"), str)
    )
