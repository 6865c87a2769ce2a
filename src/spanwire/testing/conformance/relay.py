"""A hop between client and server that hands on the answer's bytes in small pieces, or says nothing at all."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit, urlunsplit

from msgspec.structs import replace

from ...endpoint import Endpoint

__all__ = ["Relay"]

_THREAD_S = 10.0


class Relay:
    """Stands in front of the server of an endpoint. Use it as a context manager; :attr:`endpoint` goes through it.

    Args:
        endpoint: the server's: of TCP, or of a unix socket.
        piece_bytes: hand the server's bytes on in pieces of this size, each in a read of its own.
        pause_s: between two pieces. A reader that is not slower sees each by itself.
        silent: take connections and what comes on them, and say nothing.
    """

    def __init__(
        self, endpoint: Endpoint, *, piece_bytes: int | None = None, pause_s: float = 0.0005, silent: bool = False
    ) -> None:
        self._to = endpoint
        self._piece_bytes = piece_bytes
        self._pause_s = pause_s
        self._silent = silent
        self._ready: Future[int] = Future()
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="spanwire-relay-") if endpoint.uds is not None else None
        self._thread = threading.Thread(target=self._main, name="spanwire-relay", daemon=True)
        self._pumps: set[asyncio.Task[None]] = set()
        self.endpoint = endpoint

    def __enter__(self) -> Self:
        self._thread.start()
        port = self._ready.result(_THREAD_S)
        if self._folder is not None:
            self.endpoint = replace(self._to, uds=self._path)
        else:
            parts = urlsplit(self._to.url)
            host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
            self.endpoint = replace(self._to, url=urlunsplit(parts._replace(netloc=f"{host}:{port}")))
        return self

    def __exit__(self, *_: object) -> None:
        loop, stop = self._loop, self._stop
        if loop is not None and stop is not None:
            loop.call_soon_threadsafe(stop.set)
        self._thread.join(_THREAD_S)
        if self._folder is not None:
            self._folder.cleanup()

    @property
    def _path(self) -> str:
        assert self._folder is not None
        return str(Path(self._folder.name, "relay.sock"))

    def _main(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            if self._ready.done():
                raise
            self._ready.set_exception(error)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        if self._folder is not None:
            server: asyncio.Server = await asyncio.start_unix_server(self._accepted, self._path)
            self._ready.set_result(0)
        else:
            server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
            self._ready.set_result(server.sockets[0].getsockname()[1])
        await self._stop.wait()
        server.close()
        for pump in list(self._pumps):
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._pumps.add(task)
        there: asyncio.StreamWriter | None = None
        try:
            if self._silent:
                await self._pump(reader, None, None)
                return
            if self._to.uds is not None:
                answers, there = await asyncio.open_unix_connection(self._to.uds)
            else:
                origin = self._to.origin
                answers, there = await asyncio.open_connection(origin.host, origin.port)
            up = asyncio.create_task(self._pump(reader, there, None))
            down = asyncio.create_task(self._pump(answers, writer, self._piece_bytes))
            try:
                await asyncio.wait((up, down), return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in (up, down):
                    pump.cancel()
                await asyncio.gather(up, down, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            pass  # the end of one side is the end of the other
        finally:
            for end in (writer, there):
                if end is not None:
                    end.close()
            self._pumps.discard(task)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter | None, piece_bytes: int | None
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if writer is None:
                    continue
                if piece_bytes is None:
                    writer.write(data)
                    await writer.drain()
                    continue
                for at in range(0, len(data), piece_bytes):
                    writer.write(data[at : at + piece_bytes])
                    await asyncio.sleep(self._pause_s)
            if writer is not None:
                await writer.drain()
