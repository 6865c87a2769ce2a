"""Plays one call on a scripted server in every way, and makes the corpus's three standing checks after each:

no socket and no task is left, nothing went to a loop's exception handler or the log, the segments add up.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Self

import msgspec

import spanwire
from spanwire import errors, sync
from spanwire.testing import LoopbackServer, Script
from spanwire.testing.loopback import load_part
from tests.support import AT_ONCE, assert_adds_up, chat, run

WAYS = ("async stream", "async complete", "sync stream", "sync complete")
#: How the server's writes reach the client: with pauses, all at once, or byte by byte. Not every way needs each of them:
#: the facade reads through the same code. test_wire plays them all.
CUTS = {
    "async stream": ("paused", "whole", "bytes"),
    "async complete": ("whole", "bytes"),
    "sync stream": ("bytes",),
    "sync complete": ("whole",),
}

# --- events ------------------------------------------------------------------------------------------------------------


def data(value: Any, end: bytes = b"\n\n") -> bytes:
    """One event: bytes as they are, anything else as JSON in which nothing is escaped."""
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value, ensure_ascii=False).encode()) + end


def choice(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def delta(finish: str | None = None, **more: Any) -> bytes:
    return data(choice(finish, **more))


def tool(*calls: Any, finish: str | None = None) -> bytes:
    """One delta with these entries in its ``tool_calls``."""
    return delta(finish, tool_calls=list(calls))


ROLE = delta(role="assistant", content="")
AB = delta(content="ab")
STOP = delta("stop")
DONE = b"data: [DONE]\n\n"
END = STOP + DONE
BOM = b"\xef\xbb\xbf"


def whole(finish: str | None = "stop", usage: Any = None, **message: Any) -> bytes:
    """A whole answer that is no stream."""
    body: dict[str, Any] = {"id": "c1", "model": "m", "choices": [{"index": 0, "message": message}]}
    body["choices"][0]["finish_reason"] = finish
    if usage is not None:
        body["usage"] = usage
    return json.dumps(body).encode()


# --- what is expected, and what was seen ---------------------------------------------------------------------------------


class Want(NamedTuple):
    """What a call has to give, whichever way it is made. ``tools``: id, name, arguments; ``usage``: in, out, total."""

    text: str = ""
    reasoning: str = ""
    tools: Sequence[tuple[str, str, str]] = ()
    usage: tuple[int | None, int | None, int | None] | None = None
    finish: str | None = "stop"
    error: type[errors.SpanwireError] | tuple[type[errors.SpanwireError], ...] | None = None
    says: str = ""
    code: Any = None
    status: int | None = None
    requests: int = 1
    reused: bool | None = None  # by the next call


class Seen:
    """What a client saw of one call."""

    def __init__(self) -> None:
        self.chunks: list[spanwire.Chunk] = []
        self.error: errors.SpanwireError | None = None
        self.reply: spanwire.Reply | None = None
        self.timeline: spanwire.Timeline | None = None
        self.next: spanwire.Reply | None = None
        self.requests = 0

    def ended(self, reply: spanwire.Reply | None, timeline: spanwire.Timeline | None) -> None:
        self.reply, self.timeline = reply, timeline

    def failed(self, error: errors.SpanwireError) -> None:
        self.error = error
        self.ended(error.reply, error.timeline)

    @property
    def known(self) -> spanwire.Timeline:
        assert self.timeline is not None
        return self.timeline

    @property
    def got(self) -> spanwire.Reply:
        assert self.reply is not None
        return self.reply


def check(seen: Seen, want: Want) -> None:
    error = seen.error
    if want.error is None:
        assert error is None
        assert seen.known.outcome == "completed"
    else:
        assert isinstance(error, want.error), f"no error, or another one: {error!r}"
        assert want.says in str(error)
        assert error.endpoint
        assert seen.known.outcome == ("timeout" if isinstance(error, errors.CallTimeout) else "error")
        if isinstance(error, errors.ServerError):
            assert want.code is None or error.code == want.code
            assert want.status is None or error.status == want.status
    reply = seen.reply or spanwire.Reply()
    usage = (
        None
        if reply.usage is None
        else tuple(getattr(reply.usage, f"{n}_tokens") for n in ("input", "output", "total"))
    )
    assert (reply.text, reply.reasoning, reply.finish_reason, usage) == (
        want.text,
        want.reasoning,
        want.finish,
        want.usage,
    )
    assert [(t.id, t.name, _parsed(t.arguments)) for t in reply.tool_calls] == [
        (*t[:2], _parsed(t[2])) for t in want.tools
    ]
    if seen.chunks:
        assert "".join(chunk.text for chunk in seen.chunks) == want.text
        assert sum(chunk.usage is not None for chunk in seen.chunks) == (want.usage is not None)
    assert seen.requests == want.requests
    assert_adds_up(seen.known)
    if seen.next is not None:
        assert seen.next.text == "You said: Say hello"
        assert seen.next.timeline is not None
        connection = seen.next.timeline.connection
        assert want.reused is None or (connection is not None and connection.reused is want.reused)


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


# --- the standing checks -------------------------------------------------------------------------------------------------


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR or record.name.startswith(("spanwire", "opentelemetry")):
            self.lines.append(f"{record.name}: {record.getMessage()}")


@contextlib.contextmanager
def nothing_left(*servers: LoopbackServer) -> Iterator[None]:
    """No socket, no task on the facade's loop, nothing in its exception handler, no log."""
    heard = _Heard()
    logging.getLogger().addHandler(heard)
    loop = sync._loop_thread().loop
    loop.set_exception_handler(lambda _loop, context: heard.lines.append(f"exception handler: {context}"))
    try:
        yield
        for server in servers:
            server.wait_for(lambda s: s.open_connections == 0)
            assert server.faults == []
        deadline = time.monotonic() + 5
        while asyncio.all_tasks(loop) and time.monotonic() < deadline:
            time.sleep(0.001)
        assert not (tasks := asyncio.all_tasks(loop)), tasks
    finally:
        loop.set_exception_handler(None)
        logging.getLogger().removeHandler(heard)
    assert heard.lines == []


# Looked up once: the entry points of an environment take longer than a call.
_part = functools.cache(load_part)
_manager = functools.cache(spanwire.ConnectionManager)  # closed after each call, and used again
_sync_manager = functools.cache(spanwire.SyncConnectionManager)


# --- playing ---------------------------------------------------------------------------------------------------------


def ask(
    way: str, endpoint: spanwire.Endpoint, call: spanwire.Call | None = None, *, then: bool = False, **more: Any
) -> Seen:
    """One call, and with ``then`` another one on the same manager. ``more`` is for the manager."""
    seen = Seen()
    call = call if call is not None else chat()
    if way.startswith("async"):
        run(lambda: _ask_async(way, endpoint, call, seen, then=then, **more))
    else:
        _ask_sync(way, endpoint, call, seen, then=then, **more)
    return seen


async def _ask_async(
    way: str, endpoint: spanwire.Endpoint, call: spanwire.Call, seen: Seen, *, then: bool, **more: Any
) -> None:
    async with spanwire.ConnectionManager(**more) if more else _manager() as manager:
        try:
            if way.endswith("stream"):
                async with manager.stream(endpoint, call) as stream:
                    async for chunk in stream:
                        seen.chunks.append(chunk)
                seen.ended(stream.reply, stream.timeline)
            else:
                reply = await manager.complete(endpoint, call)
                seen.ended(reply, reply.timeline)
        except errors.SpanwireError as error:
            seen.failed(error)
        if then:
            seen.next = await manager.complete(endpoint, chat("next"))


def _ask_sync(
    way: str, endpoint: spanwire.Endpoint, call: spanwire.Call, seen: Seen, *, then: bool, **more: Any
) -> None:
    with spanwire.SyncConnectionManager(**more) if more else _sync_manager() as manager:
        try:
            if way.endswith("stream"):
                with manager.stream(endpoint, call) as stream:
                    seen.chunks.extend(stream)
                seen.ended(stream.reply, stream.timeline)
            else:
                reply = manager.complete(endpoint, call)
                seen.ended(reply, reply.timeline)
        except errors.SpanwireError as error:
            seen.failed(error)
        if then:
            seen.next = manager.complete(endpoint, chat("next"))


_FULL = b'{"id":"c1","object":"chat.completion.chunk","created":1700000000,"model":"m","choices"'


def cut_up(script: Script, cut: str) -> Script:
    if script.writes is None:
        return script
    writes = list(script.writes)
    if cut == "bytes":
        writes = [bytes([byte]) for write in writes for byte in write]
    elif not script.headers:  # what a real server adds to each event; without, other code decodes them
        writes = [write.replace(b'{"choices"', _FULL) for write in writes]
    return msgspec.structs.replace(
        script,
        writes=writes,
        write_gap_s=0.002 if cut == "paused" else 0.0,
        drop_after=len(writes)
        if script.drop_after is not None and script.drop_after != "request"
        else script.drop_after,
        hang_after=len(writes)
        if script.hang_after is not None and script.hang_after != "request"
        else script.hang_after,
    )


def play(way: str, script: Script, want: Want, *, then: bool = True, **endpoint: Any) -> list[Seen]:
    """The script, cut in the manners of this way; the next call on the same manager must be answered well."""
    found = []
    endpoint.setdefault("retries", AT_ONCE)
    cuts = CUTS[way] if script.writes is not None else ("whole",)
    with LoopbackServer(part=_part("sse")) as server:
        for cut in cuts:
            try:
                server.clear()
                server.script(cut_up(script, cut), model="m")
                with nothing_left(server):
                    seen = ask(way, server.endpoint(**endpoint), then=then)
                seen.requests = sum(request.model == "m" for request in server.requests)
                check(seen, want)
            except BaseException as error:
                error.add_note(f"cut: {cut}")
                raise
            found.append(seen)
    return found


def split_everywhere(writes: bytes, want: Want, *, step: int = 1) -> None:
    """Every split in two, as many calls on one manager, so that the connection is used again after each of them."""
    with LoopbackServer() as server, nothing_left(server):
        endpoint = server.endpoint(retries=AT_ONCE)

        async def body() -> None:
            async with spanwire.ConnectionManager() as manager:
                for at in range(1, len(writes), step):
                    server.script(Script(writes=[writes[:at], writes[at:]]), model=f"m{at}", times=1)
                    seen = Seen()
                    seen.requests = want.requests
                    try:
                        async with manager.stream(endpoint, chat(f"m{at}")) as stream:
                            async for chunk in stream:
                                seen.chunks.append(chunk)
                        seen.ended(stream.reply, stream.timeline)
                    except errors.SpanwireError as error:
                        seen.failed(error)
                    try:
                        check(seen, want)
                    except AssertionError as error:
                        error.add_note(f"split at {at}: {writes[:at][-30:]!r} | {writes[at:][:30]!r}")
                        raise

        run(body)


# --- a server for what no HTTP server does ---------------------------------------------------------------------------------

Handler = Callable[[socket.socket], None]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunked(payload: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(payload), payload)


def send(payload: bytes, then: str = "keep") -> Handler:
    """Send these bytes; then ``keep`` the connection, ``close`` it, or ``reset`` it."""

    def handler(sock: socket.socket) -> None:
        sock.sendall(payload)
        if then == "reset":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if then != "keep":
            sock.close()

    return handler


class RawServer:
    """One function for each request, over all connections; the last one stays. Plain sockets in threads."""

    def __init__(self, *answers: Handler) -> None:
        self._answers = deque(answers)
        self._lock = threading.Lock()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._threads: list[threading.Thread] = []
        self.requests = 0
        self.connections = 0
        self.open = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listening.getsockname()[1]}/v1"

    def endpoint(self, **more: Any) -> spanwire.Endpoint:
        return spanwire.Endpoint(self.url, proxy=None, **more)

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join(5)
            assert not thread.is_alive(), "the client has left a connection open"
        self._listening.close()

    def _start(self, target: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listening.accept()
            except OSError:
                return
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self.connections += 1
                self.open += 1
            self._start(self._serve, sock)

    def _serve(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            while sock.fileno() >= 0 and _read_request(sock):
                with self._lock:
                    self.requests += 1
                    answer = self._answers.popleft() if len(self._answers) > 1 else self._answers[0]
                answer(sock)
        with self._lock:
            self.open -= 1


def _read_request(sock: socket.socket) -> bool:
    received = b""
    while b"\r\n\r\n" not in received:
        more = sock.recv(65536)
        if not more:
            return False
        received += more
    head, _, body = received.partition(b"\r\n\r\n")
    length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    while len(body) < length:
        body += sock.recv(65536)
    return True
