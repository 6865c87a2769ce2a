"""A small HTTP proxy: forwards requests, opens tunnels (CONNECT), asks for a password if it is given one."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from urllib.parse import urlsplit


class Proxy:
    """What it has seen: the first line of each request, and how many connections were made to it."""

    def __init__(self, password: str | None) -> None:
        self.port = 0
        self.lines: list[str] = []
        self.connections = 0
        self.tasks: set[asyncio.Task[None]] = set()
        self._wanted = None if password is None else "Basic " + base64.b64encode(password.encode()).decode()

    def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.ensure_future(self._handle(reader, writer))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        task.add_done_callback(lambda _: writer.close())  # also after one that was cancelled before its first step

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there: asyncio.StreamWriter | None = None
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            head = await reader.readuntil(b"\r\n\r\n")
            line, _, rest = head.partition(b"\r\n")
            self.lines.append(line.decode())
            method, target, _ = line.decode().split(" ")
            headers = {
                name.lower(): value for name, _, value in (one.partition(": ") for one in rest.decode().split("\r\n"))
            }
            if self._wanted is not None and headers.get("proxy-authorization") != self._wanted:
                writer.write(b"HTTP/1.1 407 Proxy Authentication Required\r\ncontent-length: 0\r\n\r\n")
                await writer.drain()
            elif method == "CONNECT":
                host, _, port = target.rpartition(":")
                from_there, there = await asyncio.open_connection(host, int(port))
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
                await _both_ways(reader, writer, from_there, there)
            else:
                url = urlsplit(target)
                from_there, there = await asyncio.open_connection(url.hostname, url.port or 80)
                there.write(f"{method} {url.path} HTTP/1.1\r\n".encode() + rest)  # later ones go as they come
                await _both_ways(reader, writer, from_there, there)
        for one in (writer, there):
            if one is not None:
                one.close()


async def _both_ways(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    from_there: asyncio.StreamReader,
    there: asyncio.StreamWriter,
) -> None:
    async def pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()

    tasks = [asyncio.ensure_future(pass_on(reader, there)), asyncio.ensure_future(pass_on(from_there, writer))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.contextmanager
def proxy(password: str | None = None) -> Iterator[Proxy]:
    """A proxy on loopback, in a thread of its own."""
    made = Proxy(password)
    ready: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        server = await asyncio.start_server(made.connected, "127.0.0.1", 0)
        made.port = server.sockets[0].getsockname()[1]
        stop = asyncio.Event()
        ready.set_result((asyncio.get_running_loop(), stop))
        await stop.wait()
        server.close()
        for task in made.tasks:
            task.cancel()
        await asyncio.gather(*made.tasks, return_exceptions=True)
        await asyncio.sleep(0)  # what was closed says so to the loop

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        loop, stop = ready.result(10)
        yield made
        loop.call_soon_threadsafe(stop.set)
    finally:
        thread.join(10)
