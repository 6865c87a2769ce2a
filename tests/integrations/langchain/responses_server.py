"""The answers that LangChain's standard suites want, for requests to the Responses API, which are judged first.

A request has to have the types of OpenAI's client, and no field that those do not know; then it is put back into the words
of chat completions, so that the answers are those of the other server.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, get_type_hints

from openai.types.responses import ResponseInputItemParam
from openai.types.responses.response_create_params import ResponseCreateParamsBase, ResponseCreateParamsNonStreaming
from pydantic import TypeAdapter, ValidationError

from spanwire.testing import Script
from spanwire.testing.loopback import Request

from .server import answer

_REQUEST: TypeAdapter[Any] = TypeAdapter(ResponseCreateParamsNonStreaming)
_ITEM: TypeAdapter[Any] = TypeAdapter(ResponseInputItemParam)
_PARAMETERS = get_type_hints(ResponseCreateParamsBase).keys() | {"stream"}
#: Keys of the items that a chat call becomes.
_ITEM_KEYS = {
    "message": {"type", "role", "content"},
    "function_call": {"type", "call_id", "name", "arguments"},
    "function_call_output": {"type", "call_id", "output"},
}
_PART_KEYS = {
    "input_text": {"type", "text", "cache_control"},
    "input_image": {"type", "image_url", "detail"},
    "input_file": {"type", "file_data", "filename"},
}


def answer_responses(request: Request) -> Script:
    """As the chat server would, after a look at the request."""
    if not request.path.endswith("/responses"):
        return answer(request)
    body = _whole(request.body)
    problem = _wrong_with(body)
    if problem is not None:
        return Script(status=400, body=json.dumps({"error": {"message": problem, "code": "bad_request"}}).encode())
    raw = json.dumps(_chat(body)).encode()
    return answer(
        Request(method="POST", path="/", query="", headers=request.headers, raw=raw, connection=request.connection)
    )


def _whole(body: Mapping[str, Any]) -> dict[str, Any]:
    """As it would be sent over HTTP: of a call over WebSocket, which may go on with what the server has, the tool calls whose
    results it brings are in its input too."""
    found = {name: value for name, value in body.items() if name != "type"}
    if "previous_response_id" in found:
        results = [item for item in found["input"] if item["type"] == "function_call_output"]
        made = [
            {"type": "function_call", "call_id": item["call_id"], "name": "made", "arguments": "{}"} for item in results
        ]
        found["input"] = [*made, *found["input"]]
    return found


def _wrong_with(body: Mapping[str, Any]) -> str | None:
    if unknown := body.keys() - _PARAMETERS:
        return f"unknown parameters: {sorted(unknown)}"
    if body["store"] is not False:
        return "store"
    called: set[str] = set()
    try:
        _REQUEST.validate_python({name: value for name, value in body.items() if name != "stream"})
        for item in body["input"]:
            _ITEM.validate_python(item)
    except ValidationError as error:
        return f"not the schema's: {error.errors()[0]}"
    for item in body["input"]:
        if unknown := item.keys() - _ITEM_KEYS[item["type"]]:
            return f"unknown keys of an item: {sorted(unknown)}"
        for part in _parts(item):
            if unknown := part.keys() - _PART_KEYS[part["type"]]:
                return f"unknown keys of a part: {sorted(unknown)}"
        if item["type"] == "function_call":
            called.add(item["call_id"])
        if item["type"] == "function_call_output" and item["call_id"] not in called:
            return "the result of a call that was not made"
    return None


def _parts(item: Mapping[str, Any]) -> list[dict[str, Any]]:
    content = item.get("content", item.get("output"))
    return content if isinstance(content, list) else []


def _chat(body: Mapping[str, Any]) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for item in body["input"]:
        if item["type"] == "message":
            content = item["content"]
            if isinstance(content, list):
                content = [{"type": "text", "text": part.get("text", "")} for part in content]
            messages.append({"role": item["role"], "content": content})
        elif item["type"] == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            messages.append({"role": "assistant", "tool_calls": [call]})
        else:
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": "a result"})
    found: dict[str, Any] = {"model": body["model"], "messages": messages}
    if "tools" in body:
        found["tools"] = [{"type": "function", "function": tool} for tool in body["tools"]]
    choice = body.get("tool_choice")
    if choice is not None:
        found["tool_choice"] = {"function": choice} if isinstance(choice, dict) else choice
    form = body.get("text", {}).get("format")
    if form is not None:
        found["response_format"] = {"type": form["type"], "json_schema": form}
    return found
