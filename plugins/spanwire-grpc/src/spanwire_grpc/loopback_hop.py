"""A TCP hop in front of the library's server, which can neither count its connections nor cut one.

It ends TLS, too: the loopback server's certificates are in a context of Python's, which the library cannot read.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl as tls
import struct
import sys
from pathlib import Path

from spanwire.testing.loopback import Book

__all__ = ["Hop", "Pipe"]

_READ_BYTES = 1 << 16
_BACKLOG = 4096
#: How long a closing TLS connection waits for the client's goodbye, in seconds.
_TLS_GOODBYE_S = 1.0
#: ``struct linger``: on, 0 seconds. Two ints, on Windows two shorts.
_RESET = struct.pack("hh" if sys.platform == "win32" else "ii", 1, 0)


class Pipe:
    """One connection of a client, and its other half to the server."""

    def __init__(
        self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, to: socket.socket
    ) -> None:
        self.number = number
        self._reader = reader
        self._writer = writer
        self._to = to
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()

    async def run(self) -> None:
        """Until one end closes, or it is cut."""
        pumps = [self._loop.create_task(self._up()), self._loop.create_task(self._down()), self._ended]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            self._to.close()
            self._writer.close()

    async def _up(self) -> None:
        with contextlib.suppress(OSError):
            while data := await self._reader.read(_READ_BYTES):
                await self._loop.sock_sendall(self._to, data)

    async def _down(self) -> None:
        with contextlib.suppress(OSError):
            while data := await self._loop.sock_recv(self._to, _READ_BYTES):
                self._writer.write(data)
                await self._writer.drain()
            await self._writer.drain()

    def cut(self, *, reset: bool) -> None:
        """Now, with what the server has written until now."""
        with contextlib.suppress(OSError):  # BlockingIOError: that was all
            while data := self._to.recv(_READ_BYTES):
                self._writer.write(data)
        if reset:
            found: socket.socket | None = self._writer.get_extra_info("socket")
            if found is not None and found.family != getattr(socket, "AF_UNIX", None):
                with contextlib.suppress(OSError):  # closed by the client in this very moment
                    found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self._writer.transport.abort()
        else:
            self._writer.close()
        if not self._ended.done():
            self._ended.set_result(None)


class Hop:
    """Listens where clients come, and leads to ``port`` on this machine."""

    def __init__(self, book: Book, port: int) -> None:
        self._book = book
        self._port = port
        self._pipes: dict[int, Pipe] = {}  # by the port from which the server is reached
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._uds: str | None = None
        self.address: tuple[str, int] | None = None

    async def start(self, *, host: str, port: int, uds: str | None, ssl: tls.SSLContext | None) -> None:
        """Listen. Raises OSError."""
        shutdown_s = None if ssl is None else _TLS_GOODBYE_S
        if uds is not None:
            self._uds = uds
            self._server = await asyncio.start_unix_server(
                self._accepted, uds, ssl=ssl, backlog=_BACKLOG, ssl_shutdown_timeout=shutdown_s
            )
            return
        self._server = await asyncio.start_server(
            self._accepted, host, port, ssl=ssl, backlog=_BACKLOG, ssl_shutdown_timeout=shutdown_s
        )
        self.address = self._server.sockets[0].getsockname()[:2]

    def pipe_of(self, peer: str) -> Pipe | None:
        """The connection that a call came on, by what the library calls its peer: ``ipv4:127.0.0.1:PORT``."""
        port = peer.rpartition(":")[2]
        return self._pipes.get(int(port)) if port.isdigit() else None

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        number = self._book.connected()
        local = 0
        to = socket.socket()
        try:
            to.setblocking(False)
            to.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.get_running_loop().sock_connect(to, ("127.0.0.1", self._port))
            local = to.getsockname()[1]
            pipe = self._pipes[local] = Pipe(number, reader, writer, to)
            await pipe.run()
        except (OSError, asyncio.CancelledError):
            writer.close()
        finally:
            to.close()
            self._pipes.pop(local, None)
            self._tasks.discard(task)
            self._book.disconnected()

    def disconnect(self, *, reset: bool) -> None:
        """Cut every connection; go on listening."""
        for pipe in list(self._pipes.values()):
            pipe.cut(reset=reset)

    async def aclose(self) -> None:
        """Stop listening, and cut every connection."""
        if self._server is not None:
            self._server.close()
        tasks = list(self._tasks)
        self.disconnect(reset=False)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._remove_socket()

    def _remove_socket(self) -> None:
        if self._uds is not None:
            with contextlib.suppress(OSError):  # Python 3.13 removes it by itself
                Path(self._uds).unlink()
