"""The answers that LangChain's standard suites want: tools from the prompt, JSON from the schema, and strict requests.

``answer`` is a script for the loopback server. It refuses, as OpenAI's API does, what is not in the schema: so the suites
test what the adapter sends, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from spanwire.testing import Script, ScriptedTool
from spanwire.testing.loopback import Request

#: Keys of a message by role. Source: OpenAI's reference of chat completions.
MESSAGE_KEYS = {
    "system": {"role", "content", "name"},
    "developer": {"role", "content", "name"},
    "user": {"role", "content", "name"},
    "assistant": {"role", "content", "name", "tool_calls", "refusal", "audio", "function_call"},
    "tool": {"role", "content", "tool_call_id"},
}
#: Content parts, and the keys of each. ``cache_control`` is what gateways to other providers take.
PART_KEYS = {
    "text": {"type", "text", "cache_control"},
    "image_url": {"type", "image_url"},
    "input_audio": {"type", "input_audio"},
    "file": {"type", "file"},
    "refusal": {"type", "refusal"},
}
PARAMETERS = {
    "frequency_penalty", "logit_bias", "logprobs", "max_completion_tokens", "max_tokens", "messages", "model",
    "parallel_tool_calls", "presence_penalty", "reasoning_effort", "response_format", "seed", "service_tier", "stop",
    "stream", "stream_options", "temperature", "tool_choice", "tools", "top_logprobs", "top_p", "user", "verbosity",
}  # fmt: skip


def wrong_with(body: Mapping[str, Any]) -> str | None:
    """What OpenAI's API would refuse in a request."""
    if unknown := body.keys() - PARAMETERS:
        return f"unknown parameters: {sorted(unknown)}"
    if nothing := [name for name, value in body.items() if value is None]:
        return f"null: {nothing}"
    if "tool_choice" in body and not body.get("tools"):
        return "tool_choice without tools"
    called: set[str] = set()
    for number, message in enumerate(body["messages"]):
        role = message.get("role")
        if role not in MESSAGE_KEYS:
            return f"messages[{number}]: role {role!r}"
        if unknown := message.keys() - MESSAGE_KEYS[role]:
            return f"messages[{number}]: unknown keys {sorted(unknown)}"
        if problem := _wrong_with_content(message):
            return f"messages[{number}]: {problem}"
        for call in message.get("tool_calls", ()):
            if call.keys() != {"id", "type", "function"} or call["function"].keys() != {"name", "arguments"}:
                return f"messages[{number}]: a tool call of another shape"
            if not isinstance(call["function"]["arguments"], str) or not call["id"]:
                return f"messages[{number}]: a tool call without id, or with arguments that are no text"
            called.add(call["id"])
        if role == "tool" and message.get("tool_call_id") not in called:
            return f"messages[{number}]: the result of a call that was not made"
    return None


def _wrong_with_content(message: Mapping[str, Any]) -> str | None:
    content = message.get("content")
    if content is None:
        return None if message["role"] == "assistant" and message.get("tool_calls") else "no content"
    if isinstance(content, str):
        return None
    if not content:
        return "an empty list as content"
    for part in content:
        kind = part.get("type")
        if kind not in PART_KEYS:
            return f"a part of type {kind!r}"
        if unknown := part.keys() - PART_KEYS[kind]:
            return f"a part of type {kind} with unknown keys {sorted(unknown)}"
        if kind == "image_url" and not part["image_url"]["url"].startswith(("https://", "data:image/")):
            return "an image that is neither an address nor data"
        if kind == "file" and not part["file"]["file_data"].startswith("data:application/pdf;base64,"):
            return "a file without its data"
        if kind == "input_audio" and part["input_audio"].keys() != {"data", "format"}:
            return "audio without data or format"
    return None


def answer(request: Request) -> Script:
    """What the standard suites ask of a model."""
    body = request.body
    if "input" in body:
        return Script()
    problem = wrong_with(body)
    if problem is not None:
        return Script(status=400, body=json.dumps({"error": {"message": problem, "code": "bad_request"}}).encode())
    headers = {"x-request-id": "req-1", "openai-processing-ms": "3"}
    prompt = _prompt(body["messages"])
    tools = {tool["function"]["name"]: tool["function"] for tool in body.get("tools", ())}
    choice = body.get("tool_choice", "auto")
    if isinstance(choice, dict):
        tools = {choice["function"]["name"]: tools[choice["function"]["name"]]}
    if tools and choice != "none" and (choice != "auto" or body["messages"][-1]["role"] != "tool"):
        name, tool = next(iter(tools.items()))
        arguments = json.dumps(_filled(tool.get("parameters", {}), prompt), ensure_ascii=False)
        cut = max(len(arguments) // 2, 1)
        call = ScriptedTool(name, [arguments[:cut], *([arguments[cut:]] if arguments[cut:] else [])], "call_" + name)
        return Script(tool_calls=[call], headers=headers)
    form = body.get("response_format", {})
    if form.get("type") in ("json_schema", "json_object"):
        schema = form.get("json_schema", {}).get("schema")
        schema = schema or {"properties": {"setup": {"type": "string"}, "punchline": {"type": "string"}}}
        return Script.say(json.dumps(_filled(schema, prompt)), headers=headers)
    return Script.say("This is an answer of several words.", headers=headers)


def _prompt(messages: list[dict[str, Any]]) -> str:
    for message in reversed(messages):
        if message["role"] == "user":
            content = message["content"]
            if isinstance(content, str):
                return content
            return " ".join(part.get("text", "") for part in content)
    return ""


def _filled(schema: Mapping[str, Any], prompt: str) -> dict[str, Any]:
    """Values for an object's properties: numbers and quoted names come from the prompt."""
    numbers = iter([int(number) for number in re.findall(r"\d+", prompt)] or [1])
    quoted = re.findall(r"'([^']+)'", prompt)
    found: dict[str, Any] = {}
    for name, kind in schema.get("properties", {}).items():
        types = kind.get("type") or next((one.get("type") for one in kind.get("anyOf", ())), "string")
        if types in ("integer", "number"):
            found[name] = next(numbers, 1)
        elif types == "string":
            found[name] = quoted[0] if "name" in name and quoted else f"some {name}"
        elif types == "boolean":
            found[name] = True
        elif types == "object":
            found[name] = {}
        else:
            found[name] = []
    return found
