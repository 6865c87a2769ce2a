"""What a server of the Messages API sends for a script: for the kit, and over HTTP for calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from spanwire.testing import Request, Script

FINISH = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
KINDS = {400: "invalid_request_error", 401: "authentication_error", 429: "rate_limit_error", 529: "overloaded_error"}


def events(script: Script) -> Iterator[bytes]:
    """The events of a streamed answer, with what may come in between."""
    yield event("message_start", message={**_message(script), "content": [], "stop_reason": None})
    yield event("ping")
    for number, (block, deltas) in enumerate(_blocks(script)):
        yield event("content_block_start", index=number, content_block=block)
        for delta in deltas:
            yield event("content_block_delta", index=number, delta=delta)
        yield event("content_block_stop", index=number)
    if script.finish is None:
        return
    usage = _usage(script)
    more = {"usage": {"output_tokens": usage["output_tokens"]}} if usage else {}
    yield event("message_delta", delta={"stop_reason": FINISH[script.finish], "stop_sequence": None}, **more)
    yield event("message_stop")


def whole(script: Script) -> bytes:
    """The body of an answer that is not streamed."""
    content = []
    for block, deltas in _blocks(script):
        block = dict(block)
        for delta in deltas:
            if delta["type"] == "input_json_delta":
                block["json"] = block.get("json", "") + delta["partial_json"]
            else:
                field = delta["type"].removesuffix("_delta")
                block[field] = block.get(field, "") + delta[field]
        if block["type"] == "tool_use":
            block["input"] = json.loads(block.pop("json", "") or "{}")
        content.append(block)
    stop = FINISH[script.finish] if script.finish else None
    return json.dumps({**_message(script), "content": content, "stop_reason": stop}).encode()


def error(status: int, message: str) -> bytes:
    """The body of an error, and the data of an error event."""
    kind = KINDS.get(status, "api_error")
    return json.dumps({"type": "error", "error": {"type": kind, "message": message}}).encode()


def event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


def _message(script: Script) -> dict[str, Any]:
    usage = _usage(script)
    head = {"id": "msg_1", "type": "message", "role": "assistant", "model": "claude-test", "stop_sequence": None}
    return {**head, **({"usage": usage} if usage else {})}


def _usage(script: Script) -> dict[str, Any]:
    usage = script.usage_for(7, asked=True)
    return {} if usage is None else {"input_tokens": usage.input_tokens, "output_tokens": usage.output_tokens}


def _blocks(script: Script) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Each block as it starts, and its deltas."""
    if script.reasoning:
        deltas = [{"type": "thinking_delta", "thinking": text} for text in script.reasoning]
        yield (
            {"type": "thinking", "thinking": "", "signature": ""},
            [*deltas, {"type": "signature_delta", "signature": "x"}],
        )
    if script.tokens:
        yield {"type": "text", "text": ""}, [{"type": "text_delta", "text": text} for text in script.tokens]
    for number, tool in enumerate(script.tool_calls):
        block = {"type": "tool_use", "id": tool.id or f"call_{number}", "name": tool.name, "input": {}}
        # No deltas at all for no arguments: this is what the API does, and clients trip over.
        pieces = [] if list(tool.arguments) == ["{}"] else ["", *tool.arguments]
        yield block, [{"type": "input_json_delta", "partial_json": piece} for piece in pieces]


def answers(script: Script) -> Callable[[Request], Script]:
    """For ``LoopbackServer(default=...)``, which sends these bytes at any path."""

    def answer(request: Request) -> Script:
        if request.path != "/v1/messages":
            return Script(status=404, body=error(404, f"there is nothing at {request.path}"))
        if script.status >= 400:
            return Script(status=script.status, body=error(script.status, "the script says so"))
        if request.body.get("stream"):
            return Script(writes=list(events(script)), content_type="text/event-stream; charset=utf-8")
        return Script(body=whole(script))

    return answer
