"""A fast server for benchmarks, with OpenAI's chat completions: rendered beforehand, one ``asyncio.Protocol``.

The model's name carries the script:

- ``m-TOKENS-GAP_US-BATCH`` streams TOKENS tokens, GAP_US microseconds apart (0: all in one write), BATCH tokens in each
  write.
- ``t-TOKENS-GAP_US``: each token's text is the time at which it was written, CLOCK_MONOTONIC in nanoseconds. Made for
  a thousand streams at once: one timer for all, and a token is one call of the system.
- ``f-TOKENS`` pours the tokens out as fast as they are taken, and waits while they are not.

A call that is not streamed gets one and the same answer, whatever the model.

``GET /log`` returns what happened since the last one, and forgets it (times of CLOCK_MONOTONIC, in nanoseconds)::

    {"connections": accepted, without those that asked for the log, "calls": {user: [arrived, first token written]},
     "poured": bytes of scripts f-..., "late_ms": {"p50": ..., "p99": ...}, the server's own delay in scripts t-...}

Usage: ``server.py [--port PORT] [--core CORE]``; its first line of output is the port. For loopback only: it believes
every word that it reads. The server for tests, with faults and delays, is ``spanwire.testing.LoopbackServer``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import heapq
import itertools
import json
import math
import os
import resource
import sys
import time
from typing import Any, NamedTuple, cast

COMPLETION: dict[str, Any] = {"id": "chatcmpl-1", "created": 1764000000, "model": "bench"}


class Script(NamedTuple):
    """How an answer is streamed. Read from the name of the model."""

    kind: str
    tokens: int
    gap_s: float
    batch: int

    @classmethod
    def parse(cls, model: str) -> Script:
        """Raises ValueError for a name that is no script. What is left out: GAP_US 0, BATCH 1."""
        kind, tokens, *more = model.split("-")
        if kind not in {"m", "t", "f"}:
            raise ValueError(f"{model} begins with none of m-, t-, f-")
        gap_us, batch = (*more, *("0", "1")[len(more) :])
        return cls(kind, int(tokens), int(gap_us) / 1e6, int(batch))


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
#: A token whose text is a time, before and behind its 19 digits.
STAMP_HEAD, STAMP_TAIL = _event(_choice({"content": f"{0:019}"})).split(b"%019d" % 0)
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

    #: Lateness is counted in steps of this, up to so many steps.
    STEP_NS, STEPS = 100_000, 10_000

    def __init__(self) -> None:
        self.opened: set[Connection] = set()
        self.calls: dict[str, tuple[int, int]] = {}
        self.poured = 0
        self.late = [0] * self.STEPS

    def written(self, late_ns: int) -> None:
        """A token was written so long after it was due."""
        self.late[min(late_ns // self.STEP_NS, self.STEPS - 1)] += 1

    def late_ms(self, share: float) -> float:
        """What this share of the tokens was late by at most; 0 if there were none."""
        seen, wanted = 0, share * sum(self.late)
        for step, count in enumerate(self.late):
            seen += count
            if count and seen >= wanted:
                return (step + 1) * self.STEP_NS / 1e6
        return 0.0

    def take(self, asking: Connection) -> bytes:
        """The log as a response, without the connection that asks for it."""
        self.opened.discard(asking)
        late_ms = {"p50": self.late_ms(0.5), "p99": self.late_ms(0.99)}
        response = _whole(
            {"connections": len(self.opened), "calls": self.calls, "poured": self.poured, "late_ms": late_ms}
        )
        self.opened.clear()
        self.calls.clear()
        self.poured = 0
        self.late = [0] * self.STEPS
        return response


class Timed:
    """A stream whose tokens say when they were written.

    Tokens that fall due while the client does not take what there is are written when it does, and say when they were
    due: the delay is the client's.
    """

    def __init__(self, connection: Connection, script: Script, begins_ns: int) -> None:
        self.connection = connection
        self.gap_ns = round(script.gap_s * 1e9)
        self.due_ns = begins_ns + self.gap_ns
        self.left = script.tokens
        self.end = _end(script.tokens)
        self.descriptor: int = connection.transport.get_extra_info("socket").fileno()

    def write(self, log: Log) -> bool:
        """Write one token; False if none is left, or the client does not take them."""
        connection = self.connection
        if connection.transport.is_closing():
            return False
        if connection.blocked:
            connection.waiting = self
            return False
        now_ns = time.monotonic_ns()
        log.written(now_ns - self.due_ns)
        data = STAMP_HEAD + b"%019d" % now_ns + STAMP_TAIL
        self.left -= 1
        self.due_ns += self.gap_ns
        if not self.left:
            data += self.end
        # At once, not by the transport: uvloop's sends at the end of the loop's turn, after all others' tokens.
        sent = 0
        if not connection.transport.get_write_buffer_size():
            try:
                sent = os.write(self.descriptor, data)
            except BlockingIOError:
                pass
            except OSError:  # the transport will hear of it too
                return False
        if sent < len(data):
            connection.transport.write(data[sent:])
        return self.left > 0

    def catch_up(self) -> bool:
        """Write all that fell due meanwhile; False if none is left."""
        now_ns, data = time.monotonic_ns(), []
        while self.left and self.due_ns <= now_ns:
            data.append(STAMP_HEAD + b"%019d" % self.due_ns + STAMP_TAIL)
            self.left -= 1
            self.due_ns += self.gap_ns
        if not self.left:
            data.append(self.end)
        self.connection.transport.write(b"".join(data))
        return self.left > 0


class Ticker:
    """One timer for all streams whose tokens say when they were written."""

    #: The golden ratio: streams that begin together are spread evenly over a gap, however many they are.
    SPREAD = 0.6180339887498949

    def __init__(self, log: Log) -> None:
        self.log = log
        self.queue: list[tuple[int, int, Timed]] = []
        self.serial = itertools.count()
        self.begun = 0
        self.timer: asyncio.TimerHandle | None = None

    def begin(self, connection: Connection, script: Script) -> None:
        """Start a stream, at most a gap from now."""
        self.begun += 1
        phase_s = self.begun * self.SPREAD % 1.0 * script.gap_s
        self.add(Timed(connection, script, time.monotonic_ns() + round(phase_s * 1e9)))

    def add(self, stream: Timed) -> None:
        """A stream has tokens to come."""
        heapq.heappush(self.queue, (stream.due_ns, next(self.serial), stream))
        if self.queue[0][2] is stream:
            self._arm()

    def _arm(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
        # In whole milliseconds, rounded up: uvloop knows no others, and rounds down.
        wait_ms = max(math.ceil((self.queue[0][0] - time.monotonic_ns()) / 1e6), 0)
        self.timer = asyncio.get_running_loop().call_later(wait_ms / 1e3, self._tick)

    def _tick(self) -> None:
        self.timer = None
        queue, now_ns = self.queue, time.monotonic_ns()
        while queue and queue[0][0] <= now_ns:
            stream = queue[0][2]
            if stream.write(self.log):
                heapq.heapreplace(queue, (stream.due_ns, next(self.serial), stream))
            else:
                heapq.heappop(queue)
        if queue:
            self._arm()


class Connection(asyncio.Protocol):
    """One client's connection: reads requests, answers each at once."""

    def __init__(self, log: Log, ticker: Ticker) -> None:
        self.log = log
        self.ticker = ticker
        self.buffer = b""
        self.streaming: set[asyncio.Task[None]] = set()
        self.blocked = False
        self.waiting: Timed | asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Counted from here, whether a call comes or not."""
        self.transport = cast("asyncio.Transport", transport)  # not isinstance: uvloop's is none by name
        self.log.opened.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client left: nobody is there to stream to."""
        for task in self.streaming:
            task.cancel()

    def pause_writing(self) -> None:
        """The client does not take what there is."""
        self.blocked = True

    def resume_writing(self) -> None:
        """It does again."""
        self.blocked = False
        waiting, self.waiting = self.waiting, None
        if isinstance(waiting, asyncio.Future):
            if not waiting.done():
                waiting.set_result(None)
        elif waiting is not None and waiting.catch_up():
            self.ticker.add(waiting)

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
        elif script.kind == "t":
            self.transport.set_write_buffer_limits(high=0)  # whatever is left over counts as not taken
            self.transport.write(HEAD + ROLE)
            self.ticker.begin(self, script)
        elif script.kind == "f" or script.gap_s:
            work = self.pour(script) if script.kind == "f" else self.pace(script, user, arrived_ns)
            task = asyncio.get_running_loop().create_task(work)
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

    async def pour(self, script: Script) -> None:
        """Write as fast as the client takes it."""
        self.transport.write(HEAD + ROLE)
        for start in range(0, script.tokens, len(WORDS)):
            if self.blocked:
                self.waiting = asyncio.get_running_loop().create_future()
                await self.waiting
            data = _words(0, min(len(WORDS), script.tokens - start))
            self.transport.write(data)
            self.log.poured += len(data)
            await asyncio.sleep(0)  # others have tokens due
        self.transport.write(_end(script.tokens))

    def note(self, user: str | None, arrived_ns: int) -> None:
        """Log the call, if it said whose it is. (uvloop sends at the end of the loop's turn: for every client alike.)"""
        if user:
            self.log.calls[user] = (arrived_ns, time.monotonic_ns())


async def serve(port: int) -> None:
    """Serve until the process is ended; port 0 takes a free one."""
    log = Log()
    ticker = Ticker(log)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(log, ticker), "127.0.0.1", port, backlog=4096)
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
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS says "unlimited" and means less
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    try:
        import uvloop
    except ImportError:
        asyncio.run(serve(given.port))
    else:
        uvloop.run(serve(given.port))


if __name__ == "__main__":
    main()
