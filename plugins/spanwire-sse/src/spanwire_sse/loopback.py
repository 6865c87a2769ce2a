"""HTTP/1.1 with server-sent events for the loopback server: OpenAI-compatible chat, responses and embeddings, as scripted.

Every connection is one ``asyncio.Protocol`` over llhttp; every answer is one task, cancelled when its client leaves.
An answer is a :class:`_Plan`: the waits before it, and then a :class:`_Message`: a head, frames with the wait before
each, and an end. :class:`_Connection` plays it, and cuts it where the script says so.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import socket
import ssl as tls
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, cast

import httptools
import msgspec

from spanwire.calls import Usage
from spanwire.testing.loopback import Book, Request
from spanwire.testing.reports import DIALECTS
from spanwire.testing.responses_events import response_events, whole_response
from spanwire.testing.script import Script

__all__ = ["PART"]

#: A prompt with pictures in it; the record keeps every body.
_MAX_BODY_BYTES = 64 * 1024 * 1024
#: What nginx, Node and h11 take at most by default, rounded up.
_MAX_HEAD_BYTES = 64 * 1024
#: Frames that are due together go out in writes of about this size, with other connections served in between.
_WRITE_BYTES = 64 * 1024
#: Vectors of real models have at most some thousand numbers.
_MAX_DIMENSIONS = 65_536
#: How long a closing TLS connection waits for the client's goodbye, in seconds. asyncio's own default is 30.
_TLS_GOODBYE_S = 1.0
_BACKLOG = 4096
_LAST_CHUNK = b"0\r\n\r\n"
#: The start of one more chunk, which is never finished.
_CUT_CHUNK = b'40\r\ndata: {"id'
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
#: ``struct linger``: on, 0 seconds. Two ints, on Windows two shorts.
_RESET = struct.pack("hh" if sys.platform == "win32" else "ii", 1, 0)

_encode = msgspec.json.encode
_ids = count(1)


class _Frame(NamedTuple):
    """One event, write or body, framed for the wire.

    Attributes:
        wait_s: pause before it.
        paced: the pause is counted from when the last frame was due, so that a late loop does not slow the pace.
        content: what a client waits for, not a role.
    """

    wait_s: float
    paced: bool
    content: bool
    data: bytes


class _Message(NamedTuple):
    """An answer, ready to be sent.

    Attributes:
        head: status line and headers.
        frames: what follows, made when it is due.
        end_wait_s: pause before the end.
        end: what ends the message.
        cut: what is sent of a frame in the middle of which the connection is cut.
        sized: the message ends with its last frame, whatever the script does after that.
        keep_alive: the connection may take another request.
    """

    head: bytes
    frames: Iterator[_Frame]
    end_wait_s: float
    end: bytes
    cut: bytes
    sized: bool
    keep_alive: bool


class _Plan(NamedTuple):
    """What is done before an answer, and the answer.

    Attributes:
        phases: seconds, and the stamp of :class:`Request` that is set when they are over (``""``: none).
        message: makes the answer; called when the phases are over, so that it can say how long they took.
    """

    phases: Sequence[tuple[float, str]]
    message: Callable[[], _Message]


class _Report:
    """What the server says about its own time, taken from the request's stamps when it is asked for."""

    def __init__(self, script: Script, request: Request) -> None:
        self._dialect = DIALECTS[script.server_timing] if script.server_timing is not None else None
        self._request = request
        self._is_error = script.status >= 400
        body = request.body if self._dialect is not None and self._dialect.asked_by is not None else None
        self._asked = isinstance(body, dict) and bool(body.get(self._dialect.asked_by if self._dialect else None))

    def headers(self, *, streamed: bool) -> dict[str, str]:
        dialect = self._dialect
        if dialect is None or (self._is_error and not dialect.on_errors):
            return {}
        make = dialect.stream_headers if streamed else dialect.headers
        return make(self._request.times) if make is not None else {}

    def fields(self) -> dict[str, Any]:
        """What a whole answer says."""
        if self._dialect is None or self._dialect.fields is None:
            return {}
        return self._dialect.fields(self._request.times)

    def into(self, answer: dict[str, Any]) -> None:
        """Merge it into a whole answer."""
        for name, value in self.fields().items():
            answer[name] = {**answer.get(name, {}), **value}

    def tail(self, event: str, *, last: bool) -> bytes:
        """The members to add to the event with the ``finish`` reason or the ``usage``, with a comma before them."""
        dialect = self._dialect
        if dialect is None or dialect.event_fields is None or (dialect.asked_by is not None and not self._asked):
            return b""
        if dialect.event != event and not (dialect.event == "last" and last):
            return b""
        return b"," + _encode(dialect.event_fields(self._request.times))[1:-1]


# --- bodies -----------------------------------------------------------------------------------------------------------


def _usage(usage: Usage) -> dict[str, Any]:
    """Usage as OpenAI's schema has it; what is not known is left out."""
    fields: dict[str, Any] = {
        "prompt_tokens": usage.input_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": None if usage.cached_tokens is None else {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": (
            None if usage.reasoning_tokens is None else {"reasoning_tokens": usage.reasoning_tokens}
        ),
    }
    return {name: value for name, value in fields.items() if value is not None}


def _words(value: Any) -> int:
    """Tokens of a request, as this server counts them: words of its texts."""
    if isinstance(value, str):
        return len(value.split())
    if isinstance(value, list):
        return sum(map(_words, value))
    if isinstance(value, dict):
        return _words(value.get("content", value.get("text")))
    return int(isinstance(value, int))  # a token id


def _tools(script: Script) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    for index, tool in enumerate(script.tool_calls):
        yield tool.id or f"call_{index}", tool.name, tuple(tool.arguments)


def _whole_chat(script: Script, body: Mapping[str, Any], report: _Report) -> bytes:
    message: dict[str, Any] = {"role": "assistant", "content": "".join(script.tokens)}
    if script.reasoning:
        message["reasoning_content"] = "".join(script.reasoning)
    if script.tool_calls:
        message["content"] = message["content"] or None
        message["tool_calls"] = [
            {"id": id_, "type": "function", "function": {"name": name, "arguments": "".join(pieces)}}
            for id_, name, pieces in _tools(script)
        ]
    answer: dict[str, Any] = {
        "id": f"chatcmpl-{next(_ids):08x}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": body.get("model"),
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": script.finish}],
    }
    usage = script.usage_for(_words(body.get("messages")), asked=True)
    if usage is not None:
        answer["usage"] = _usage(usage)
    report.into(answer)
    return _encode(answer)


def _chat_events(script: Script, body: Mapping[str, Any], report: _Report) -> Iterator[tuple[float, bool, bool, bytes]]:
    """The events of a streamed chat answer, each with its (wait_s, paced, content)."""
    same = {
        "id": f"chatcmpl-{next(_ids):08x}",
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": body.get("model"),
    }
    start = b"data: " + _encode(same)[:-1]
    # Everything around a piece is the same in each event, so it is made once.
    before = start + b',"choices":[{"index":0,"delta":{'
    after = b'},"logprobs":null,"finish_reason":null}]}\n\n'

    wait_s = script.headers_s
    if script.role_chunk:
        yield wait_s, False, False, b'%b"role":"assistant","content":""%b' % (before, after)
        wait_s = 0.0
    wait_s += script.prefill_s
    gap_s = script.gap_s
    paced = False
    for name, pieces in ((b'"reasoning_content":', script.reasoning), (b'"content":', script.tokens)):
        opening = before + name
        for piece in pieces:
            yield wait_s, paced, True, b"%b%b%b" % (opening, _encode(piece), after)
            wait_s, paced = gap_s, True
    for index, (id_, tool, arguments) in enumerate(_tools(script)):
        head = {"index": index, "id": id_, "type": "function", "function": {"name": tool, "arguments": ""}}
        yield wait_s, paced, True, b'%b"tool_calls":[%b]%b' % (before, _encode(head), after)
        wait_s, paced = gap_s, True
        for piece in arguments:
            tail = {"index": index, "function": {"arguments": piece}}
            yield wait_s, paced, True, b'%b"tool_calls":[%b]%b' % (before, _encode(tail), after)
    if paced:  # else there is no content, and the wait for it is kept all the same
        wait_s = 0.0
    options = body.get("stream_options")
    asked = isinstance(options, dict) and bool(options.get("include_usage"))
    usage = script.usage_for(_words(body.get("messages")) if asked else 0, asked=asked)
    if script.finish is not None:
        more = report.tail("finish", last=usage is None)
        finish = b'%b},"logprobs":null,"finish_reason":%b}]%b}\n\n' % (before, _encode(script.finish), more)
        yield wait_s, paced, False, finish
        wait_s = 0.0
    if usage is not None:
        more = report.tail("usage", last=True)
        yield wait_s, paced, False, b'%b,"choices":[],"usage":%b%b}\n\n' % (start, _encode(_usage(usage)), more)
        wait_s = 0.0
    if script.done:
        yield wait_s, paced, False, b"data: [DONE]\n\n"


def _responses_events(
    script: Script, body: Mapping[str, Any], report: _Report
) -> Iterator[tuple[float, bool, bool, bytes]]:
    """The steps of a streamed Responses answer. The schema's streams end without ``[DONE]``."""
    for step in response_events(script, body, timing=report.fields):
        events = [b"event: %b\ndata: %b\n\n" % (event["type"].encode(), _encode(event)) for event in step.events]
        yield step.wait_s, step.paced, step.content, b"".join(events)


def _embeddings(script: Script, body: Mapping[str, Any]) -> bytes:
    given = body.get("input")
    is_list = isinstance(given, list) and not (given and isinstance(given[0], int))  # a list of ids is one input
    inputs = cast("list[Any]", given) if is_list else [given]
    dimensions = body.get("dimensions", script.dimensions)
    packed = body.get("encoding_format") == "base64"
    answer: dict[str, Any] = {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": _vector(text, dimensions, packed=packed)}
            for index, text in enumerate(inputs)
        ],
        "model": body.get("model"),
    }
    if script.usage is not None:
        known = script.usage if isinstance(script.usage, Usage) else None
        words = _words(given)
        answer["usage"] = _usage(known or Usage(words, None, words))
    return _encode(answer)


def _vector(text: Any, dimensions: int, *, packed: bool) -> list[float] | str:
    """Numbers from -1 to 1 that depend on nothing but the input: the same text has the same vector, on any machine."""
    raw = hashlib.shake_128(_encode(text)).digest(4 * dimensions)
    # 24 bits of each, so that a float32 holds them exactly and both encodings say the same.
    numbers = [(value >> 8) / 2**23 - 1 for value in struct.unpack(f"<{dimensions}I", raw)]
    if packed:
        return base64.b64encode(struct.pack(f"<{dimensions}f", *numbers)).decode("ascii")
    return numbers


def _error(status: int, words: str) -> bytes:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return _encode({"error": {"message": words, "type": kind, "param": None, "code": status}})


def _wrong_with(operation: str, body: Any) -> str | None:
    """What a real server would refuse, so that a client's mistake is seen here too."""
    if not isinstance(body, dict):
        return "the request's body is not a JSON object"
    if not isinstance(body.get("model"), str):
        return "model must be text"
    if operation == "chat" and not (isinstance(body.get("messages"), list) and body["messages"]):
        return "messages must be a list that is not empty"
    if operation == "responses":
        if not isinstance(body.get("input"), (str, list)):
            return "input must be a text or a list"
        if "messages" in body:
            return "messages is no parameter of this API; did you mean input?"
    if operation == "embeddings":
        if not isinstance(body.get("input"), (str, list)) or not body["input"]:
            return "input must be a text or a list that is not empty"
        dimensions = body.get("dimensions", 1)
        if isinstance(dimensions, bool) or not isinstance(dimensions, int) or not 1 <= dimensions <= _MAX_DIMENSIONS:
            return f"dimensions must be a number from 1 to {_MAX_DIMENSIONS}"
    return None


# --- answers ----------------------------------------------------------------------------------------------------------


def _head(status: int, headers: Mapping[str, str]) -> bytes:
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    lines = [f"HTTP/1.1 {status} {phrase}", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    return "\r\n".join(lines).encode("latin-1")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _as_it_is(data: bytes) -> bytes:
    return data


def _plan_body(
    script: Script, make: Callable[[], bytes], report: _Report, *, keep_alive: bool, is_head: bool = False
) -> _Plan:
    """One body with its length. ``is_head``: the length alone, as HEAD has it."""

    def message() -> _Message:
        body = make()
        bodiless = script.status in {204, 304}
        headers = {"content-type": "application/json", **report.headers(streamed=False)}
        if not bodiless:
            headers["content-length"] = str(len(body))
        headers, stays = _finish_headers(script, headers, keep_alive=keep_alive)
        return _Message(
            head=_head(script.status, headers),
            frames=iter(() if bodiless or is_head else (_Frame(0.0, False, True, body),)),
            end_wait_s=0.0,
            end=b"",
            cut=body[: len(body) // 2],
            sized=True,
            keep_alive=stays,
        )

    phases = (
        (script.queue_s, "queued_ns"),
        (script.headers_s + script.prefill_s, "prefilled_ns"),
        (script.decode_s, "decoded_ns"),
        (script.end_s, ""),
    )
    return _Plan(phases, message)


def _plan_stream(
    script: Script,
    events: Iterable[tuple[float, bool, bool, bytes]],
    content_type: str,
    report: _Report,
    *,
    keep_alive: bool,
    streamed: bool = True,
) -> _Plan:
    """A body in chunks, or with neither chunks nor length."""

    def message() -> _Message:
        headers = {"content-type": content_type, "cache-control": "no-cache", **report.headers(streamed=streamed)}
        sized = any(name.lower() == "content-length" for name in script.headers)
        frame: Callable[[bytes], bytes] = _as_it_is
        if script.chunked and not sized:
            headers["transfer-encoding"] = "chunked"
            frame = _chunk
        headers, stays = _finish_headers(script, headers, keep_alive=keep_alive and (script.chunked or sized))
        return _Message(
            head=_head(script.status, headers),
            frames=(_Frame(wait_s, paced, content, frame(data)) for wait_s, paced, content, data in events),
            end_wait_s=script.end_s,
            end=_LAST_CHUNK if frame is _chunk else b"",
            cut=_CUT_CHUNK if frame is _chunk else b'data: {"id',
            sized=False,
            keep_alive=stays,
        )

    return _Plan(((script.queue_s, "queued_ns"),), message)


def _finish_headers(script: Script, headers: dict[str, str], *, keep_alive: bool) -> tuple[dict[str, str], bool]:
    if script.content_type is not None:
        headers["content-type"] = script.content_type
    keep_alive = keep_alive and not script.close
    if not keep_alive:
        headers["connection"] = "close"
    given = {name.lower() for name in script.headers}
    return {**{name: value for name, value in headers.items() if name not in given}, **script.headers}, keep_alive


def _plan_writes(script: Script, writes: Iterable[bytes]) -> Iterator[tuple[float, bool, bool, bytes]]:
    wait_s, paced = script.headers_s + script.prefill_s, False
    for write in writes:
        yield wait_s, paced, True, write
        wait_s, paced = script.write_gap_s, True


def _plan(operation: str, script: Script, request: Request, body: Mapping[str, Any], *, keep_alive: bool) -> _Plan:
    streamed = operation != "embeddings" and body.get("stream") is True
    report = _Report(script, request)
    content_type = "text/event-stream; charset=utf-8" if streamed else "application/json"
    if script.writes is not None:
        writes = _plan_writes(script, script.writes)
        return _plan_stream(script, writes, content_type, report, keep_alive=keep_alive, streamed=streamed)
    if streamed and script.body is None and script.status < 400:
        events = _responses_events if operation == "responses" else _chat_events
        return _plan_stream(script, events(script, body, report), content_type, report, keep_alive=keep_alive)

    def whole() -> bytes:
        if script.body is not None:
            return script.body
        if script.status >= 400:
            return _error(script.status, f"status {script.status}, as scripted")
        if operation == "responses":
            return _encode(whole_response(script, body, timing=report.fields))
        return _embeddings(script, body) if operation == "embeddings" else _whole_chat(script, body, report)

    return _plan_body(script, whole, report, keep_alive=keep_alive)


# --- connections ------------------------------------------------------------------------------------------------------


class _Connection(asyncio.Protocol):
    """One client: its requests, one at a time, and their answers. The callbacks of httptools are methods too."""

    def __init__(self, book: Book, connections: set[_Connection]) -> None:
        self._book = book
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._number = 0
        self._request: Request | None = None
        self._task: asyncio.Task[None] | None = None
        self._drained: asyncio.Future[None] | None = None
        self._gone = False
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self._http_1_0 = False
        self._in_head = True
        self._head_bytes = 0
        self._target: list[bytes] = []
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._body_bytes = 0

    # --- asyncio.Protocol -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # TCP_NODELAY is asyncio's own doing
        # Told as soon as the kernel does not take everything, so that a cut waits for what was sent before. Not
        # high=0: with TLS, asyncio then pauses at every write and never says that writing goes on.
        self._transport.set_write_buffer_limits(high=1, low=0)
        self._connections.add(self)
        self._number = self._book.connected()

    def data_received(self, data: bytes) -> None:
        if self._gone:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # refused when its head was complete
        except httptools.HttpParserError as error:
            self._refuse(400, f"not HTTP/1.1: {error}")
        else:
            if self._in_head:
                self._head_bytes += len(data)
                if self._head_bytes > _MAX_HEAD_BYTES:
                    self._refuse(431, f"the request's head is over {_MAX_HEAD_BYTES} bytes")

    def eof_received(self) -> None:
        if self._request is not None:  # it asked, and leaves before the answer's end
            self.drop(left=True)

    def connection_lost(self, error: Exception | None) -> None:
        self._leave(left=True)
        self._gone = True
        self._connections.discard(self)
        self._book.disconnected()
        self.resume_writing()
        self.closed.set_result(None)

    def pause_writing(self) -> None:
        if self._drained is None:
            self._drained = self._loop.create_future()

    def resume_writing(self) -> None:
        drained, self._drained = self._drained, None
        if drained is not None and not drained.done():
            drained.set_result(None)

    # --- httptools --------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        self._target = []
        self._headers = {}
        self._body = []
        self._body_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._target.append(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        self._headers[key] = f"{self._headers[key]}, {text}" if key in self._headers else text

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self._parser.should_upgrade():  # the parser skips the body of such a request
            self._refuse(400, "a switch of protocols is asked for, which this server does not know")
            return
        length = self._headers.get("content-length", "")
        if length.isdigit() and int(length) > _MAX_BODY_BYTES:
            self._refuse_body()
        elif self._headers.get("expect", "").lower() == "100-continue" and self._transport is not None:
            self._transport.write(_CONTINUE)

    def on_body(self, data: bytes) -> None:
        if self._gone:
            return
        self._body_bytes += len(data)
        if self._body_bytes > _MAX_BODY_BYTES:
            self._refuse_body()
        else:
            self._body.append(data)

    def _refuse_body(self) -> None:
        self._body = []
        self._refuse(413, f"the request's body is over {_MAX_BODY_BYTES} bytes")

    def on_message_complete(self) -> None:
        if self._gone:
            return
        if self._request is not None:
            self._book.fault(f"connection {self._number}: a request came before the end of the answer to the last one")
            self.drop()
            return
        path, _, query = b"".join(self._target).decode("latin-1").partition("?")
        self._request = request = Request(
            method=self._parser.get_method().decode("latin-1"),
            path=path,
            query=query,
            headers=self._headers,
            raw=b"".join(self._body),
            connection=self._number,
        )
        self._body = []
        self._http_1_0 = self._parser.get_http_version() == "1.0"
        keep_alive = self._parser.should_keep_alive() and not self._http_1_0
        self._book.arrived(request)
        self._task = self._loop.create_task(self._answer(request, keep_alive=keep_alive))

    # --- answers ----------------------------------------------------------------------------------------------------

    async def _answer(self, request: Request, *, keep_alive: bool) -> None:
        try:
            script, plan = self._decide(request, keep_alive=keep_alive)
            if script.drop_after == "request":
                await self._cut(script, b"")
            elif script.hang_after == "request":
                await self._loop.create_future()
            else:
                await self._play(request, script, plan)
        except Exception as error:  # noqa: BLE001 - a fault of ours must not look like a slow server
            self._book.fault(f"connection {self._number}: the loopback server failed: {error!r}")
            self.drop()

    def _decide(self, request: Request, *, keep_alive: bool) -> tuple[Script, _Plan]:
        path = request.path.rstrip("/")
        if request.method in {"GET", "HEAD"} and path.endswith("/models"):
            body = _encode(
                {
                    "object": "list",
                    "data": [
                        {"id": model, "object": "model", "created": 0, "owned_by": "spanwire"}
                        for model in self._book.models() or ["loopback"]
                    ],
                }
            )
            return self._say(200, body, request, keep_alive=keep_alive)
        operation = next((name for end, name in _OPERATIONS.items() if path.endswith(end)), None)
        if operation is None:  # another dialect's, if a script has its bytes

            def canned() -> Script | None:
                return self._book.canned_for(request) if request.method == "POST" else None

            fields = request.body
            fields = fields if isinstance(fields, dict) else {}
            return self._scripted(canned, "chat", request, fields, keep_alive=keep_alive)
        if request.method != "POST":
            words = _error(405, f"{request.path} takes POST, not {request.method}")
            return self._say(405, words, request, keep_alive=keep_alive)
        body = request.body
        wrong = _wrong_with(operation, body)
        if wrong is not None:
            return self._say(400, _error(400, wrong), request, keep_alive=keep_alive)
        return self._scripted(
            lambda: self._book.script_for(request, body["model"]), operation, request, body, keep_alive=keep_alive
        )

    def _scripted(
        self,
        next_script: Callable[[], Script | None],
        operation: str,
        request: Request,
        body: Mapping[str, Any],
        *,
        keep_alive: bool,
    ) -> tuple[Script, _Plan]:
        try:
            script = next_script()
            if script is None:
                words = _error(404, f"there is nothing at {request.method} {request.path}")
                return self._say(404, words, request, keep_alive=keep_alive)
            if self._http_1_0:  # which knows no chunks
                script = msgspec.structs.replace(script, chunked=False)
            return script, _plan(operation, script, request, body, keep_alive=keep_alive)
        except Exception as error:  # noqa: BLE001 - whatever a user's function raises
            self._book.fault(f"the script for {request.path} failed: {error!r}")
            return self._say(500, _error(500, f"the script failed: {error!r}"), request, keep_alive=keep_alive)

    @staticmethod
    def _say(status: int, body: bytes, request: Request, *, keep_alive: bool) -> tuple[Script, _Plan]:
        script = Script(status=status)
        is_head = request.method == "HEAD"
        report = _Report(script, request)
        return script, _plan_body(script, lambda: body, report, keep_alive=keep_alive, is_head=is_head)

    async def _play(self, request: Request, script: Script, plan: _Plan) -> None:
        loop = self._loop
        due = loop.time()
        for wait_s, stamp in plan.phases:
            if wait_s:
                due += wait_s  # from when the last one was due, so that late timers do not add up
                await asyncio.sleep(due - loop.time())
            if stamp:
                setattr(request, stamp, time.perf_counter_ns())
        message = plan.message()
        self._book.wrote(request, headers=True)
        held = [message.head]  # what goes out with the next write
        size = len(message.head)
        due = loop.time()
        has_content = complete = False
        stops = {script.drop_after, script.hang_after}
        for played, (wait_s, paced, content, data) in enumerate(message.frames):
            if played in stops:
                break
            now = loop.time()
            due = (due if paced else now) + wait_s
            if wait_s and due > now:
                await self._write(held)
                held, size = [], 0
                await asyncio.sleep(due - loop.time())
            elif size > _WRITE_BYTES:
                await self._write(held)
                held, size = [], 0
                await asyncio.sleep(0)
            if content:
                if not has_content:
                    has_content = True
                    self._book.wrote(request, content=True)
                    if request.prefilled_ns is None:
                        request.prefilled_ns = request.content_ns
                if not message.sized:
                    request.decoded_ns = time.perf_counter_ns()
            held.append(data)
            size += len(data)
        else:
            complete = message.sized
        if script.drop_after is not None:
            await self._write(held)
            if complete:
                self._end(request, b"", keep_alive=True)
            await self._cut(script, b"" if complete else message.cut)
        elif script.hang_after is not None and not complete:
            await self._write(held)
            await loop.create_future()
        else:
            if message.end_wait_s:
                await self._write(held)
                held = []
                await asyncio.sleep(message.end_wait_s)
            held.append(message.end)
            self._end(request, b"".join(held), keep_alive=message.keep_alive)

    async def _write(self, held: list[bytes]) -> None:
        if self._transport is not None:
            self._transport.write(b"".join(held))
        while self._drained is not None:
            await self._drained

    def _end(self, request: Request, last: bytes, *, keep_alive: bool) -> None:
        """Write the last bytes. Awaits nothing: the client's next request may come as soon as it has them."""
        self._request = self._task = None
        self._book.ended(request)  # before the bytes: whoever has read the whole answer finds it recorded
        if self._transport is not None:
            self._transport.write(last)
        if not keep_alive and self._transport is not None:
            self._gone = True
            self._transport.close()

    async def _cut(self, script: Script, partial: bytes) -> None:
        if script.drop_mode == "reset":
            self.drop(reset=True)
            return
        if partial:
            await self._write([partial])
        self.drop(abort=False)

    # --- ends -------------------------------------------------------------------------------------------------------

    def _leave(self, *, left: bool) -> None:
        """The end of an answer that did not end well."""
        request, self._request = self._request, None
        task, self._task = self._task, None
        if request is not None:
            (self._book.left if left else self._book.dropped)(request)
        if task is not None and task is not asyncio.current_task(self._loop):
            task.cancel()

    def drop(self, *, left: bool = False, reset: bool = False, abort: bool = True) -> None:
        """Close the connection now, whatever goes on on it.

        Args:
            left: the client began.
            reset: with RST, which discards what is on its way.
            abort: without flushing what is still here.
        """
        self._leave(left=left)
        self._gone = True
        if self._transport is None:
            return
        if reset:
            found: socket.socket | None = self._transport.get_extra_info("socket")
            if found is not None and found.family != getattr(socket, "AF_UNIX", None):
                with contextlib.suppress(OSError):  # closed by the client in this very moment
                    found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        if reset or abort:
            self._transport.abort()
        else:
            self._transport.close()

    def _refuse(self, status: int, words: str) -> None:
        """The client broke the rules: say so, and close."""
        self._book.fault(f"connection {self._number}: {words}")
        if self._transport is not None and self._request is None:
            body = _error(status, words)
            headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
            self._transport.write(_head(status, headers) + body)
        self.drop(abort=False)


_OPERATIONS = {"/chat/completions": "chat", "/responses": "responses", "/embeddings": "embeddings"}


#: asyncio accepts a connection some turns of the loop before it makes its transport, which fails, and leaves the socket
#: to nobody, if the server was closed in between (CPython 3.11 to 3.13: an assertion in Server._attach).
_ACCEPT_TURNS = 5


# --- the part ---------------------------------------------------------------------------------------------------------


class _Listener:
    """See :class:`spanwire.testing.loopback.Listener`."""

    def __init__(self, server: asyncio.Server, connections: set[_Connection], uds: str | None) -> None:
        self._server = server
        self._connections = connections
        self._uds = uds
        self.address: tuple[str, int] | None = None
        if uds is None:
            self.address = server.sockets[0].getsockname()[:2]

    def disconnect(self, *, reset: bool) -> None:
        for connection in list(self._connections):
            connection.drop(reset=reset, abort=False)

    async def aclose(self) -> None:
        # Not wait_closed(): from Python 3.12 on it also waits for clients that never finish their TLS handshake.
        loop = asyncio.get_running_loop()
        for listening in self._server.sockets:
            with contextlib.suppress(NotImplementedError):  # Windows' loop, which accepts in another way
                loop.remove_reader(listening.fileno())
        for _ in range(_ACCEPT_TURNS):
            await asyncio.sleep(0)
        self._server.close()
        connections = list(self._connections)
        for connection in connections:
            connection.drop()
        await asyncio.gather(*(connection.closed for connection in connections))
        self._remove_socket()

    def _remove_socket(self) -> None:
        if self._uds is not None:
            with contextlib.suppress(OSError):  # Python 3.13 removes it by itself
                Path(self._uds).unlink()


class _Part:
    """See :class:`spanwire.testing.loopback.LoopbackPart`."""

    name = "sse"
    alpn = ("http/1.1",)

    @staticmethod
    async def start(book: Book, *, host: str, port: int, uds: str | None, ssl: tls.SSLContext | None) -> _Listener:
        loop = asyncio.get_running_loop()
        connections: set[_Connection] = set()
        shutdown_s = None if ssl is None else _TLS_GOODBYE_S

        def connection() -> _Connection:
            return _Connection(book, connections)

        if uds is not None:
            server = await loop.create_unix_server(
                connection, uds, ssl=ssl, backlog=_BACKLOG, ssl_shutdown_timeout=shutdown_s
            )
        else:
            server = await loop.create_server(
                connection, host, port, ssl=ssl, backlog=_BACKLOG, ssl_shutdown_timeout=shutdown_s
            )
        return _Listener(server, connections, uds)

    @staticmethod
    def url(host: str, port: int, *, secure: bool) -> str:
        return f"{'https' if secure else 'http'}://{host}{f':{port}' if port else ''}/v1"


PART = _Part()
