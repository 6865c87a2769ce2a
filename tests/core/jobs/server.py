"""A job server for tests, of the schema in :mod:`tests.core.jobs.simple`: what it does with each submit is scripted."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec

_numbers = itertools.count(1)


@dataclass
class Doing:
    """What is done with one submit.

    ``ack``: a status; ``"cut"`` closes the connection instead of answering, ``"hang"`` never answers, ``"page"`` is a page of HTML.
    ``webhooks``: bodies to deliver, before the ack if ``early``; None for one that is done.
    """

    ack: int | str = 202
    early: bool = False
    webhooks: list[dict[str, Any]] | None = None
    status: dict[str, Any] | None = None
    retry_after: str | None = None
    body_status: int = 200


@dataclass
class JobServer:
    """See :func:`serving`."""

    port: int = 0
    script: list[Doing] = field(default_factory=list)
    default: Doing = field(default_factory=Doing)
    submits: list[dict[str, Any]] = field(default_factory=list)
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    deliver: bool = True
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def until(self, what: Callable[[Self], bool]) -> None:
        """Wait until the server has seen something."""
        while not what(self):
            self.changed.clear()
            await self.changed.wait()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handler = asyncio.current_task()
        assert handler is not None
        self._tasks.add(handler)
        try:
            await self.converse(reader, writer)
        except asyncio.CancelledError:  # the test is over; asyncio.streams logs a handler that was cancelled
            pass
        finally:
            self._tasks.discard(handler)
            writer.transport.abort()

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                line, *fields = head.strip().split("\r\n")
                method, path, _ = line.split(" ")
                headers = {name.lower(): value.strip() for name, _, value in (one.partition(":") for one in fields)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                self.requests.append((method, path, headers))
                answer = await self.answer(method, path, headers, body)
                self.changed.set()
                if answer is None:
                    break
                status, more, data = answer
                text = "".join(f"{name}: {value}\r\n" for name, value in more.items())
                writer.write(f"HTTP/1.1 {status} X\r\n{text}content-length: {len(data)}\r\n\r\n".encode() + data)
                await writer.drain()

    async def answer(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes] | None:
        if method == "POST":
            return await self.submitted(msgspec.json.decode(body))
        job = path.rpartition("/")[2]
        if method == "DELETE":
            self.cancelled.append(job)
            return 200, {}, b"{}"
        found = self.jobs.get(job)
        return (200, {}, msgspec.json.encode(found)) if found is not None else (404, {}, b"{}")

    async def submitted(self, asked: dict[str, Any]) -> tuple[int, dict[str, str], bytes] | None:
        doing = self.script.pop(0) if self.script else self.default
        self.submits.append(asked)
        self.changed.set()
        if isinstance(doing.ack, int) and doing.ack >= 400 and doing.ack not in (500, 502, 504):
            more = {} if doing.retry_after is None else {"retry-after": doing.retry_after}
            return doing.ack, more, b'{"error": "no"}'
        known = f"p-{next(_numbers)}"
        done = {
            "id": known,
            "status": "done",
            "output": str(asked["input"].get("messages", asked["input"].get("input"))),
        }
        self.jobs[known] = done if doing.status is None else {"id": known, **doing.status}
        webhooks = [done] if doing.webhooks is None else [{"id": known, **one} for one in doing.webhooks]
        if asked["callback"] and self.deliver:
            if doing.early:
                for one in webhooks:
                    await self.send(asked["callback"], one)
            else:
                task = asyncio.ensure_future(self.send_all(asked["callback"], webhooks))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        if doing.ack == "cut":
            return None
        if doing.ack == "hang":
            await asyncio.Event().wait()
        if doing.ack == "page":
            return 200, {}, b"<html>"
        return int(doing.ack), {}, msgspec.json.encode({"id": known})

    async def send_all(self, url: str, bodies: list[dict[str, Any]]) -> None:
        for body in bodies:
            await self.send(url, body)

    async def send(self, url: str, body: dict[str, Any]) -> None:
        host, _, path = url.removeprefix("http://").partition("/")
        name, _, port = host.partition(":")
        reader, writer = await asyncio.open_connection(name, int(port))
        data = msgspec.json.encode(body)
        writer.write(
            f"POST /{path} HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(data)}\r\nconnection: close\r\n\r\n".encode()
            + data
        )
        status = (await reader.readline()).split()[1]
        self.answers.append(int(status))
        writer.transport.abort()
        self.changed.set()


@contextlib.asynccontextmanager
async def serving(*script: Doing, default: Doing | None = None) -> AsyncIterator[JobServer]:
    """A server on the running loop."""
    made = JobServer(script=list(script), default=default or Doing())
    server = await asyncio.start_server(made.handle, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
        tasks = list(made._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
