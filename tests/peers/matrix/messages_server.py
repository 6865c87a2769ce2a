"""A small server of Anthropic's Messages API, with TLS: one answer, whole or as a stream, on connections that are kept."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from spanwire.testing.tls import ThrowAwayCA

TEXT = ("Hello", " from", " the", " loopback", " server.")
USAGE = {"input_tokens": 2, "output_tokens": len(TEXT)}


class Arrived(NamedTuple):
    path: str
    connection: int


class MessagesServer:
    """What arrived is in `requests`."""

    def __init__(self, origin: str, ca: str, requests: list[Arrived]) -> None:
        self.origin = origin
        self.ca = ca
        self.requests = requests


@contextlib.contextmanager
def messages_server() -> Iterator[MessagesServer]:
    authority = ThrowAwayCA()
    requests: list[Arrived] = []
    connections = 0
    loop = asyncio.new_event_loop()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        number = connections
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                lines = head.split("\r\n")
                headers = {
                    name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])
                }
                asked = json.loads(await reader.readexactly(int(headers["content-length"])))
                requests.append(Arrived(lines[0].split(" ")[1], number))
                for piece in _stream() if asked.get("stream") else _whole():
                    writer.write(piece)
                    await writer.drain()
        writer.close()

    async def start() -> asyncio.Server:
        return await asyncio.start_server(serve, "127.0.0.1", 0, ssl=authority.server_context("127.0.0.1"))

    async def stop(server: asyncio.Server) -> None:
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    thread = threading.Thread(target=loop.run_forever, name="messages-server", daemon=True)
    thread.start()
    try:
        server = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
        port = server.sockets[0].getsockname()[1]
        with tempfile.TemporaryDirectory() as folder:
            ca = Path(folder, "ca.pem")
            ca.write_text(authority.pem, encoding="ascii")
            yield MessagesServer(f"https://127.0.0.1:{port}", str(ca), requests)
        asyncio.run_coroutine_threadsafe(stop(server), loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def _message(**more: Any) -> dict[str, Any]:
    return {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "stop_sequence": None, **more}


def _whole() -> Iterator[bytes]:
    content = [{"type": "text", "text": "".join(TEXT)}]
    body = json.dumps(_message(content=content, stop_reason="end_turn", usage=USAGE)).encode()
    yield b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


def _stream() -> Iterator[bytes]:
    """The end of the message is a write of its own, as with most servers."""
    yield b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    started = _message(content=[], stop_reason=None, usage={**USAGE, "output_tokens": 1})
    yield _event("message_start", message=started)
    yield _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
    for piece in TEXT:
        yield _event("content_block_delta", index=0, delta={"type": "text_delta", "text": piece})
    yield _event("content_block_stop", index=0)
    yield _event("message_delta", delta={"stop_reason": "end_turn", "stop_sequence": None}, usage=USAGE)
    yield _event("message_stop")
    yield b"0\r\n\r\n"


def _event(kind: str, **more: Any) -> bytes:
    data = f"event: {kind}\ndata: {json.dumps({'type': kind, **more})}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(data), data)
