"""A WebSocket server of bare bytes, on the test's own loop: for what no library sends. And the events of an answer."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import spanwire

TEXT, BINARY, CONT, CLOSE, PING, PONG = 1, 2, 0, 8, 9, 10
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


def frame(payload: bytes | str = b"", opcode: int = TEXT, *, fin: bool = True, rsv: int = 0) -> bytes:
    """A server's frame (RFC 6455 section 5.2)."""
    data = payload.encode() if isinstance(payload, str) else payload
    head = bytes([(0x80 if fin else 0) | rsv | opcode])
    if len(data) < 126:
        return head + bytes([len(data)]) + data
    if len(data) < 1 << 16:
        return head + b"\x7e" + struct.pack("!H", len(data)) + data
    return head + b"\x7f" + struct.pack("!Q", len(data)) + data


def close_frame(code: int | None = None, reason: str = "") -> bytes:
    return frame(b"" if code is None else struct.pack("!H", code) + reason.encode(), CLOSE)


# --- events ----------------------------------------------------------------------------------------------------------


def event(type: str, **fields: Any) -> bytes:
    return frame(json.dumps({"type": type, **fields}, ensure_ascii=False))


def created(id: str = "r1") -> bytes:
    return event("response.created", response={"id": id, "model": "m", "status": "in_progress", "output": []})


def delta(text: str) -> bytes:
    return event("response.output_text.delta", item_id="i1", output_index=0, content_index=0, delta=text)


def completed(text: str, id: str = "r1") -> bytes:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    item = {"type": "message", "id": "i1", "role": "assistant", "status": "completed", "content": content}
    usage = {"input_tokens": 1, "output_tokens": 2, "total_tokens": 3}
    response = {"id": id, "model": "m", "status": "completed", "output": [item], "usage": usage}
    return event("response.completed", response=response)


def answer(*pieces: str, id: str = "r1") -> bytes:
    return created(id) + b"".join(map(delta, pieces)) + completed("".join(pieces), id)


def error(code: str | None = None, message: str = "no", type: str = "invalid_request_error", **more: Any) -> bytes:
    inner = {"type": type, "message": message, **({} if code is None else {"code": code})}
    return event("error", error=inner, **more)


# --- the server ------------------------------------------------------------------------------------------------------


class Peer:
    """One client. ``head``: of its handshake; ``asked``: its ``response.create`` events so far."""

    def __init__(self, server: RawServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.server = server
        self.reader = reader
        self.writer = writer
        self.head = b""
        self.asked: list[dict[str, Any]] = []
        self.closed: int | None = None  # code of the close frame that came
        self.number = len(server.peers)

    async def handshake(self) -> None:
        self.head = await self.reader.readuntil(b"\r\n\r\n")

    @property
    def accept(self) -> str:
        key = next(line[19:] for line in self.head.split(b"\r\n") if line.lower().startswith(b"sec-websocket-key:"))
        return base64.b64encode(hashlib.sha1(key + _GUID).digest()).decode()

    def switching(self, *more: str) -> bytes:
        lines = ["HTTP/1.1 101 Switching Protocols", "Upgrade: websocket", "Connection: Upgrade"]
        return "\r\n".join([*lines, f"Sec-WebSocket-Accept: {self.accept}", *more, "", ""]).encode()

    async def upgrade(self, *more: str, then: bytes = b"") -> None:
        """Let it in. ``then``: in the same write."""
        await self.handshake()
        await self.send(self.switching(*more) + then)

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def frame(self) -> tuple[int, bytes]:
        """The next frame of the client, unmasked. Raises IncompleteReadError at the end."""
        first, second = await self.reader.readexactly(2)
        length = second & 0x7F
        if length == 126:
            (length,) = struct.unpack("!H", await self.reader.readexactly(2))
        elif length == 127:
            (length,) = struct.unpack("!Q", await self.reader.readexactly(8))
        mask = await self.reader.readexactly(4)
        data = await self.reader.readexactly(length)
        whole = int.from_bytes(data, "big") ^ int.from_bytes((mask * (length // 4 + 1))[:length], "big")
        return first & 0x0F, whole.to_bytes(length, "big")

    async def request(self) -> dict[str, Any]:
        """The next message that asks for something; answers pings meanwhile."""
        while True:
            opcode, data = await self.frame()
            if opcode == PING:
                await self.send(frame(data, PONG))
            elif opcode == CLOSE:
                self.closed = struct.unpack("!H", data[:2])[0] if data else 1005
                await self.send(frame(data, CLOSE))
                raise asyncio.IncompleteReadError(b"", None)
            elif opcode in (TEXT, BINARY):
                found: dict[str, Any] = json.loads(data)
                self.asked.append(found)
                return found

    async def until_gone(self) -> None:
        """Until the client has left."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                await self.request()

    def reset(self) -> None:
        """End the connection with RST."""
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


class RawServer:
    """Attributes: ``peers``: the clients that have come, in order."""

    def __init__(self) -> None:
        self.port = 0
        self.peers: list[Peer] = []

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}/v1"

    def endpoint(self, **more: Any) -> spanwire.Endpoint:
        return spanwire.Endpoint(self.url, **{"proxy": None, **more})

    @property
    def asked(self) -> list[dict[str, Any]]:
        return [request for peer in self.peers for request in peer.asked]


@contextlib.asynccontextmanager
async def raw_server(*handlers: Callable[[Peer], Awaitable[None]]) -> AsyncIterator[RawServer]:
    """One handler for each connection, the last one for all others; the connection is closed when it returns."""
    server = RawServer()
    tasks: set[asyncio.Task[None]] = set()
    failed: list[BaseException] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(server, reader, writer)
        server.peers.append(peer)
        try:
            await handlers[min(peer.number, len(handlers) - 1)](peer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except Exception as problem:  # noqa: BLE001 - told to the test
            failed.append(problem)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    listening = await asyncio.start_server(connected, "127.0.0.1", 0, limit=1 << 26)
    server.port = listening.sockets[0].getsockname()[1]
    try:
        yield server
        if tasks:
            _, left = await asyncio.wait(set(tasks), timeout=5)
            assert not left, "a client has left its connection open"
        assert failed == []
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)
        listening.close()
        await asyncio.sleep(0)
