"""PURE: a call in OpenAI's shape, as the body of a request to Anthropic's Messages API.

What has the same meaning there gets its name there; what has none is refused (a picture that is not one, arguments that are
no JSON); parameters that are not known here are sent as they are, and the server says what it thinks of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from spanwire import Call
from spanwire.errors import ConfigurationError

__all__ = ["body_of"]

Block = dict[str, Any]

_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+);base64,(.*)", re.DOTALL)
#: Parameters of OpenAI's that say what is so anyway: one answer, and a stream with its usage.
_DROPPED = ("n", "stream_options")
_CHOICES = {"auto": "auto", "none": "none", "required": "any"}


def body_of(call: Call, *, max_tokens: int, streamed: bool) -> dict[str, Any]:
    """The body of ``POST /v1/messages``.

    Raises:
        ConfigurationError: names the message, and what is wrong with it; never shows content.
    """
    if call.operation != "chat":
        raise ConfigurationError(f"the Messages API has no {call.operation!r} calls")
    rest = dict(call.body)
    system, messages = _conversation(rest.pop("messages"))
    limit = rest.pop("max_completion_tokens", None) or rest.pop("max_tokens", None) or max_tokens
    rest.pop("max_tokens", None)
    body: dict[str, Any] = {"model": call.model, "max_tokens": limit, "messages": messages}
    if system:
        body["system"] = system
    if streamed:
        body["stream"] = True
    for name in _DROPPED:
        rest.pop(name, None)
    for name, translate in _PARAMETERS.items():
        if name in rest:
            _merge(body, translate(rest.pop(name)))
    if rest.pop("parallel_tool_calls", True) is False:
        _merge(body, {"tool_choice": {"disable_parallel_tool_use": True}})
    if "tool_choice" in body:
        body["tool_choice"].setdefault("type", "auto")
    _merge(body, rest)
    return body


def _merge(into: dict[str, Any], more: Mapping[str, Any]) -> None:
    for name, value in more.items():
        mine = into.get(name)
        if isinstance(mine, dict) and isinstance(value, Mapping):
            into[name] = {**mine, **value}
        else:
            into[name] = value


# --- parameters -------------------------------------------------------------------------------------------------------


def _tools(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {"tools": [_tool(tool) for tool in tools]}


def _tool(tool: Mapping[str, Any]) -> Block:
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return dict(tool)  # one of Anthropic's own
    found: Block = {"name": function.get("name"), "input_schema": function.get("parameters") or {"type": "object"}}
    for name in ("description", "strict"):
        if function.get(name) is not None:
            found[name] = function[name]
    return found


def _tool_choice(choice: Any) -> dict[str, Any]:
    if isinstance(choice, str):
        if choice not in _CHOICES:
            raise ConfigurationError(f"tool_choice={choice!r:.40} is none of {', '.join(_CHOICES)}")
        return {"tool_choice": {"type": _CHOICES[choice]}}
    if not isinstance(choice, Mapping):
        raise ConfigurationError(f"tool_choice must be text or a mapping, not {type(choice).__name__}")
    function = choice.get("function")
    if isinstance(function, Mapping):
        return {"tool_choice": {"type": "tool", "name": function.get("name")}}
    return {"tool_choice": dict(choice)}


def _stop(stop: str | Sequence[str]) -> dict[str, Any]:
    return {"stop_sequences": [stop] if isinstance(stop, str) else list(stop)}


def _response_format(given: Any) -> dict[str, Any]:
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind == "text":
        return {}
    schema = given.get("json_schema") if isinstance(given, Mapping) else None
    if kind != "json_schema" or not isinstance(schema, Mapping):
        raise ConfigurationError("response_format: the Messages API knows a json_schema, and nothing else but text")
    return {"output_config": {"format": {"type": "json_schema", "schema": schema.get("schema")}}}


_PARAMETERS: Mapping[str, Callable[[Any], Mapping[str, Any]]] = {
    "tools": _tools,
    "tool_choice": _tool_choice,
    "stop": _stop,
    "response_format": _response_format,
    "reasoning_effort": lambda effort: {"output_config": {"effort": effort}},
    "user": lambda user: {"metadata": {"user_id": user}},
}


# --- messages ---------------------------------------------------------------------------------------------------------


def _conversation(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Block], list[dict[str, Any]]]:
    """The system's text, and the turns: results of tools are a user's, and those that follow each other are one turn."""
    system: list[Block] = []
    turns: list[dict[str, Any]] = []
    for position, message in enumerate(messages):
        where = f"messages[{position}]"
        role = message.get("role")
        if role in ("system", "developer"):
            system += _blocks(message.get("content"), where)
        elif role == "tool":
            result = _tool_result(message, where)
            if turns and turns[-1]["role"] == "user" and turns[-1]["content"][-1]["type"] == "tool_result":
                turns[-1]["content"].append(result)
            else:
                turns.append({"role": "user", "content": [result]})
        elif role == "user":
            turns.append({"role": "user", "content": _blocks(message.get("content"), where)})
        elif role == "assistant":
            turns.append({"role": "assistant", "content": _said(message, where)})
        else:
            raise ConfigurationError(f"{where}: the Messages API has no role {role!r:.40}")
    return system, turns


def _said(message: Mapping[str, Any], where: str) -> list[Block]:
    """An assistant's turn. ``thinking_blocks``: as they came, with their signatures, which the API wants back."""
    blocks: list[Block] = [dict(block) for block in message.get("thinking_blocks") or ()]
    blocks += _blocks(message.get("content"), where)
    for number, tool in enumerate(message.get("tool_calls") or ()):
        function = tool.get("function") or {}
        try:
            arguments = json.loads(function.get("arguments") or "{}")
        except (TypeError, ValueError):
            arguments = None
        if not isinstance(arguments, dict):
            raise ConfigurationError(
                f"{where}: the arguments of tool_calls[{number}] are no JSON object, which the Messages API wants"
            )
        blocks.append({"type": "tool_use", "id": tool.get("id"), "name": function.get("name"), "input": arguments})
    return blocks


def _tool_result(message: Mapping[str, Any], where: str) -> Block:
    if not message.get("tool_call_id"):
        raise ConfigurationError(f"{where}: a tool's result needs its tool_call_id")
    return {
        "type": "tool_result",
        "tool_use_id": message["tool_call_id"],
        "content": _blocks(message.get("content"), where),
    }


def _blocks(content: Any, where: str) -> list[Block]:
    """Text, or a list of parts. Empty text is left out: the API refuses it."""
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    if not isinstance(content, Sequence):
        raise ConfigurationError(f"{where}: content must be text or a list of parts, not {type(content).__name__}")
    return list(_parts(content, where))


def _parts(parts: Sequence[Any], where: str) -> Iterator[Block]:
    for number, part in enumerate(parts):
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        if not isinstance(part, Mapping):
            raise ConfigurationError(f"{where}: content[{number}] must be a mapping, not {type(part).__name__}")
        kind = part.get("type")
        if kind == "text" and not part.get("text"):
            continue
        if kind == "image_url":
            yield _with_cache({"type": "image", "source": _image(part, f"{where}: content[{number}]")}, part)
        elif kind == "file":
            yield _with_cache({"type": "document", "source": _file(part, f"{where}: content[{number}]")}, part)
        elif kind in ("input_audio", "refusal"):
            raise ConfigurationError(f"{where}: content[{number}] is {kind!r}, which the Messages API does not take")
        else:
            yield dict(part)  # text, or one of Anthropic's own


def _with_cache(block: Block, part: Mapping[str, Any]) -> Block:
    if "cache_control" in part:
        block["cache_control"] = part["cache_control"]
    return block


def _image(part: Mapping[str, Any], where: str) -> Block:
    """By its URL, or as the bytes that a data URL holds."""
    given = part.get("image_url")
    url = given.get("url") if isinstance(given, Mapping) else given
    if not isinstance(url, str) or not url:
        raise ConfigurationError(f"{where} has no image_url")
    data = _DATA_URL.fullmatch(url)
    if data is not None:
        return {"type": "base64", "media_type": data[1], "data": data[2]}
    if url.startswith("data:"):
        raise ConfigurationError(f"{where}: a data URL has to say its type, and be base64: data:image/png;base64,...")
    return {"type": "url", "url": url}


def _file(part: Mapping[str, Any], where: str) -> Block:
    given = part.get("file")
    data = _DATA_URL.fullmatch(str(given.get("file_data"))) if isinstance(given, Mapping) else None
    if data is None:
        raise ConfigurationError(f"{where}: a file has to come as file_data: data:application/pdf;base64,...")
    return {"type": "base64", "media_type": data[1], "data": data[2]}
