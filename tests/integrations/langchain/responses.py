"""The same answers for requests of the Responses schema: what was sent is said again as a chat request, and judged as one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from spanwire.testing import Script
from spanwire.testing.loopback import Request
from tests.integrations.langchain.server import answer_to

#: Parameters of both schemas that have one name.
_SAME = {
    "model", "parallel_tool_calls", "service_tier", "stream", "temperature", "top_logprobs", "top_p", "user",
}  # fmt: skip
#: And those that say something of the Responses schema alone.
_OWN = {"type", "store", "include", "previous_response_id", "truncation"}


def answer(request: Request) -> Script:
    """What the standard suites ask of a model."""
    try:
        body = chat_body(request.body)
    except (KeyError, ValueError) as error:
        return Script(status=400, body=json.dumps({"error": {"message": repr(error), "code": "bad_request"}}).encode())
    return answer_to(body, continued="previous_response_id" in request.body)


def chat_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """Raises KeyError, ValueError for what is not in the schema."""
    chat: dict[str, Any] = {name: value for name, value in body.items() if name in _SAME}
    for name, value in body.items():
        if name in _SAME or name in _OWN or name == "input":
            continue
        if name == "max_output_tokens":
            chat["max_completion_tokens"] = value
        elif name == "tools":
            chat["tools"] = [
                {"type": "function", "function": {key: part for key, part in tool.items() if key != "type"}}
                for tool in value
            ]
        elif name == "tool_choice":
            chat["tool_choice"] = (
                value if isinstance(value, str) else {"type": "function", "function": {"name": value["name"]}}
            )
        elif name == "text":
            _format(chat, value)
        elif name == "reasoning":
            chat["reasoning_effort"] = value["effort"]
        else:
            raise ValueError(f"unknown parameter {name}")
    given = body["input"]
    chat["messages"] = _messages([{"role": "user", "content": given}] if isinstance(given, str) else given)
    return chat


def _format(chat: dict[str, Any], text: Mapping[str, Any]) -> None:
    form = text.get("format")
    if form is not None and form["type"] == "json_schema":
        schema = {name: value for name, value in form.items() if name != "type"}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif form is not None:
        chat["response_format"] = form
    if "verbosity" in text:
        chat["verbosity"] = text["verbosity"]


def _messages(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for item in items:
        kind = item.get("type", "message")
        if kind == "message":
            messages.append({"role": item["role"], "content": _content(item["content"])})
        elif kind == "function_call":
            call = {
                "id": item["call_id"],
                "type": "function",
                "function": {"name": item["name"], "arguments": item["arguments"]},
            }
            if messages and messages[-1]["role"] == "assistant":
                messages[-1].setdefault("tool_calls", []).append(call)
            else:
                messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        elif kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": _content(item["output"])})
        else:
            raise ValueError(f"an item of type {kind!r}")
    return messages


def _content(content: Any) -> Any:
    return content if isinstance(content, str) else [_part(part) for part in content]


def _part(part: dict[str, Any]) -> dict[str, Any]:
    kind = part["type"]
    if kind in ("input_text", "output_text"):
        return {"type": "text", "text": part["text"]}
    if kind == "input_image":
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    if kind == "input_file":
        return {"type": "file", "file": {name: value for name, value in part.items() if name != "type"}}
    if kind == "input_audio":
        return {"type": "input_audio", "input_audio": part["input_audio"]}
    if kind == "refusal":
        return part
    raise ValueError(f"a part of type {kind!r}")
