"""A fast server for benchmarks, with OpenAI's chat completions: rendered beforehand, one ``asyncio.Protocol``.

The model's name carries the script: ``m-TOKENS-GAP_US-BATCH`` streams TOKENS tokens, GAP_US microseconds apart (0: all
in one write), BATCH tokens in each write. A call that is not streamed gets one and the same answer, whatever the model.

``GET /log`` returns what happened since the last one, and forgets it (times of CLOCK_MONOTONIC, in nanoseconds)::

    {"connections": accepted, without those that asked for the log, "calls": {user: [arrived, first token written]}}

Usage: ``server.py [--port PORT] [--core CORE]``; its first line of output is the port. For loopback only: it believes
every word that it reads. The server for tests, with faults and delays, is ``spanwire.testing.LoopbackServer``.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import sys
import time
from typing import Any, NamedTuple, cast

COMPLETION: dict[str, Any] = {"id": "chatcmpl-1", "created": 1764000000, "model": "bench"}


class Script(NamedTuple):
    """How an answer is streamed. Read from the name of the model."""

    tokens: int
    gap_s: float
    batch: int

    @classmethod
    def parse(cls, model: str) -> Script:
        """Raises ValueError for a name that is no script. BATCH may be left out: 1."""
        _, tokens, gap_us, *batch = model.split("-")
        return cls(int(tokens), int(gap_us) / 1e6, int(batch[0]) if batch else 1)


def _event(choices: list[dict[str, Any]], **more: Any) -> bytes:
    """A server-sent event as one HTTP chunk."""
    payload = {**COMPLETION, "object": "chat.completion.chunk", "choices": choices, **more}
    data = b"data: %s\n\n" % json.dumps(payload, separators=(",", ":")).encode()
    return b"%x\r\n%s\r\n" % (len(data), data)


def _choice(delta: dict[str, Any], finish_reason: str | None = None) -> list[dict[str, Any]]:
    return [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}]


def _whole(payload: object, status: str = "200 OK") -> bytes:
    """A response that is not streamed, head and body."""
    body = json.dumps(payload).encode()
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
ROLE = _event(_choice({"content": "", "role": "assistant"}))
WORDS = [_event(_choice({"content": f" w{number:02}"})) for number in range(50)]
STOP = _event(_choice({}, "stop"))
DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
UNARY = _whole(
    {
        **COMPLETION,
        "object": "chat.completion",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": "hello " * 20}, "finish_reason": "stop"},
        ],
        "usage": {"prompt_tokens": 9, "completion_tokens": 20, "total_tokens": 29},
    }
)


@functools.cache
def _words(start: int, count: int) -> bytes:
    """Tokens ``start`` to ``start + count`` of a stream."""
    return b"".join(WORDS[number % len(WORDS)] for number in range(start, start + count))


@functools.cache
def _end(tokens: int) -> bytes:
    usage = {"prompt_tokens": 9, "completion_tokens": tokens, "total_tokens": 9 + tokens}
    return STOP + _event([], usage=usage) + DONE


class Log:
    """What happened since it was last asked for."""

    def __init__(self) -> None:
        self.opened: set[Connection] = set()
        self.calls: dict[str, tuple[int, int]] = {}

    def take(self, asking: Connection) -> bytes:
        """The log as a response, without the connection that asks for it."""
        self.opened.discard(asking)
        response = _whole({"connections": len(self.opened), "calls": self.calls})
        self.opened.clear()
        self.calls.clear()
        return response


class Connection(asyncio.Protocol):
    """One client's connection: reads requests, answers each at once."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.buffer = b""
        self.streaming: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Counted from here, whether a call comes or not."""
        self.transport = cast("asyncio.Transport", transport)  # not isinstance: uvloop's is none by name
        self.log.opened.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client left: nobody is there to stream to."""
        for task in self.streaming:
            task.cancel()

    def data_received(self, data: bytes) -> None:
        """Cut requests out of the bytes. Bodies have a content-length: every client here sends one."""
        self.buffer += data
        while (head_end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = self.buffer[:head_end].lower()
            _, found, rest = head.partition(b"\r\ncontent-length:")
            body_at = head_end + 4
            body_end = body_at + (int(rest.split(b"\r\n", 1)[0]) if found else 0)
            if len(self.buffer) < body_end:
                return
            arrived_ns = time.monotonic_ns()
            body = self.buffer[body_at:body_end]
            self.buffer = self.buffer[body_end:]
            if head.startswith(b"get /log "):
                self.transport.write(self.log.take(self))
            else:
                self.answer(body, arrived_ns)

    def answer(self, body: bytes, arrived_ns: int) -> None:
        """Answer a chat completion, or begin to."""
        try:
            request = json.loads(body)
            script = Script.parse(request["model"]) if request.get("stream") else None
        except (ValueError, KeyError) as error:
            self.transport.write(_whole({"error": {"message": f"no script: {error!r}"}}, "400 Bad Request"))
            return
        user = request.get("user")
        if script is None:
            self.transport.write(UNARY)
        elif script.gap_s:
            task = asyncio.get_running_loop().create_task(self.pace(script, user, arrived_ns))
            self.streaming.add(task)
            task.add_done_callback(self.streaming.discard)
            return
        else:
            self.transport.write(HEAD + ROLE + _words(0, script.tokens) + _end(script.tokens))
        self.note(user, arrived_ns)

    async def pace(self, script: Script, user: str | None, arrived_ns: int) -> None:
        """Write on schedule: a late wake-up does not move the tokens after it."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        self.transport.write(HEAD + ROLE)
        for start in range(0, script.tokens, script.batch):
            due = started + (start // script.batch + 1) * script.gap_s
            await asyncio.sleep(max(due - loop.time(), 0.0))
            self.transport.write(_words(start, min(script.batch, script.tokens - start)))
            if start == 0:
                self.note(user, arrived_ns)
        self.transport.write(_end(script.tokens))

    def note(self, user: str | None, arrived_ns: int) -> None:
        """Log the call, if it said whose it is. (uvloop sends at the end of the loop's turn: for every client alike.)"""
        if user:
            self.log.calls[user] = (arrived_ns, time.monotonic_ns())


async def serve(port: int) -> None:
    """Serve until the process is ended; port 0 takes a free one."""
    log = Log()
    server = await asyncio.get_running_loop().create_server(lambda: Connection(log), "127.0.0.1", port, backlog=4096)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


def main() -> None:
    options = argparse.ArgumentParser(description="A fast server for benchmarks.")
    options.add_argument("--port", type=int, default=0, help="default: a free one")
    options.add_argument("--core", type=int, help="run on this core only (Linux)")
    given = options.parse_args()
    if given.core is not None:
        os.sched_setaffinity(0, {given.core})
    try:
        import uvloop
    except ImportError:
        asyncio.run(serve(given.port))
    else:
        uvloop.run(serve(given.port))


if __name__ == "__main__":
    main()
