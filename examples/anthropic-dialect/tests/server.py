"""A server that speaks the Messages API, and plays scripts: for the kit, and over HTTP for calls."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from spanwire.testing import Script

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


class Server(ThreadingHTTPServer):
    """Answers every call with one script, and keeps what was asked."""

    daemon_threads = True

    def __init__(self, script: Script) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script = script
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.connections = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def setup(self) -> None:
        super().setup()
        self.server.connections += 1

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        path = self.path.partition("?")[0]
        self.server.requests.append((path, {n.lower(): v for n, v in self.headers.items()}, body))
        script = self.server.script
        if path != "/v1/messages":
            self._say(404, error(404, f"there is nothing at {path}"))
        elif script.status >= 400:
            self._say(script.status, error(script.status, "the script says so"))
        elif body.get("stream"):
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream; charset=utf-8")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for data in events(script):
                self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
            self.wfile.write(b"0\r\n\r\n")
        else:
            self._say(200, whole(script))

    def _say(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(script: Script) -> Iterator[Server]:
    """A server on a free port of this machine."""
    with Server(script) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
