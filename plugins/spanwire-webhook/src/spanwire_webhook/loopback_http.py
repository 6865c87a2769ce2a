"""The job server's HTTP/1.1: one ``asyncio.Protocol`` over llhttp for each client, whole requests in, whole answers out."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl as tls
import struct
import sys
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple, cast

import httptools
import msgspec

from spanwire.testing.loopback import Book, Request

__all__ = ["Answer", "Cut", "Handler", "Listener", "error_body", "listen"]

_MAX_BODY_BYTES = 64 * 1024 * 1024
_MAX_HEAD_BYTES = 64 * 1024
_TLS_GOODBYE_S = 1.0
_BACKLOG = 4096
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
#: ``struct linger``: on, 0 seconds. Two ints, on Windows two shorts.
_RESET = struct.pack("hh" if sys.platform == "win32" else "ii", 1, 0)
#: asyncio accepts a connection some turns of the loop before it makes its transport, which fails, and leaves the socket
#: to nobody, if the server was closed in between (CPython 3.11 to 3.13: an assertion in Server._attach).
_ACCEPT_TURNS = 5


class Answer(NamedTuple):
    """What is answered."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = {}  # noqa: RUF012 - never changed


class Cut(NamedTuple):
    """Instead of an answer the connection ends, in order or with RST."""

    reset: bool = False


Handler = Callable[[Request], Awaitable[Answer | Cut]]


def error_body(status: int, words: str) -> bytes:
    """An error as OpenAI's servers have it."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return msgspec.json.encode({"error": {"message": words, "type": kind, "param": None, "code": None}})


class _Connection(asyncio.Protocol):
    """One client: its requests, one at a time, and their answers. The callbacks of httptools are methods too."""

    def __init__(self, book: Book, connections: set[_Connection], handler: Handler) -> None:
        self._book = book
        self._connections = connections
        self._handler = handler
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._number = 0
        self._request: Request | None = None
        self._task: asyncio.Task[None] | None = None
        self._gone = False
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self._in_head = True
        self._head_bytes = 0
        self._target: list[bytes] = []
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._body_bytes = 0

    # --- asyncio.Protocol -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._connections.add(self)
        self._number = self._book.connected()

    def data_received(self, data: bytes) -> None:
        if self._gone:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(400, "a switch of protocols is asked for, which this server does not know")
        except httptools.HttpParserError as error:
            self._refuse(400, f"not HTTP/1.1: {error}")
        else:
            if self._in_head:
                self._head_bytes += len(data)
                if self._head_bytes > _MAX_HEAD_BYTES:
                    self._refuse(431, f"the request's head is over {_MAX_HEAD_BYTES} bytes")

    def eof_received(self) -> None:
        if self._request is not None:  # it asked, and leaves before the answer's end
            self.drop(left=True)

    def connection_lost(self, error: Exception | None) -> None:
        self._leave(left=True)
        self._gone = True
        self._connections.discard(self)
        self._book.disconnected()
        self.closed.set_result(None)

    # --- httptools --------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        self._target = []
        self._headers = {}
        self._body = []
        self._body_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._target.append(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        self._headers[key] = f"{self._headers[key]}, {text}" if key in self._headers else text

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self._headers.get("expect", "").lower() == "100-continue" and self._transport is not None:
            self._transport.write(_CONTINUE)

    def on_body(self, data: bytes) -> None:
        if self._gone:
            return
        self._body_bytes += len(data)
        if self._body_bytes > _MAX_BODY_BYTES:
            self._body = []
            self._refuse(413, f"the request's body is over {_MAX_BODY_BYTES} bytes")
        else:
            self._body.append(data)

    def on_message_complete(self) -> None:
        if self._gone:
            return
        if self._request is not None:
            self._book.fault(f"connection {self._number}: a request came before the end of the answer to the last one")
            self.drop()
            return
        path, _, query = b"".join(self._target).decode("latin-1").partition("?")
        self._request = request = Request(
            method=self._parser.get_method().decode("latin-1"),
            path=path,
            query=query,
            headers=self._headers,
            raw=b"".join(self._body),
            connection=self._number,
        )
        self._body = []
        keep_alive = self._parser.should_keep_alive()
        self._book.arrived(request)
        self._task = self._loop.create_task(self._answer(request, keep_alive=keep_alive))

    # --- answers ----------------------------------------------------------------------------------------------------

    async def _answer(self, request: Request, *, keep_alive: bool) -> None:
        try:
            answer = await self._handler(request)
        except Exception as error:  # noqa: BLE001 - a fault of ours must not look like a slow server
            self._book.fault(f"connection {self._number}: the loopback server failed: {error!r}")
            self.drop()
            return
        if isinstance(answer, Cut):
            self.drop(reset=answer.reset, abort=False)
            return
        headers = {"content-type": "application/json", **answer.headers, "content-length": str(len(answer.body))}
        if not keep_alive:
            headers["connection"] = "close"
        self._request = self._task = None
        self._book.wrote(request, headers=True, content=True)
        self._book.ended(request)  # before the bytes: whoever has read the whole answer finds it recorded
        if self._transport is not None:
            self._transport.write(_head(answer.status, headers) + (b"" if request.method == "HEAD" else answer.body))
            if not keep_alive:
                self._gone = True
                self._transport.close()

    # --- ends -------------------------------------------------------------------------------------------------------

    def _leave(self, *, left: bool) -> None:
        request, self._request = self._request, None
        task, self._task = self._task, None
        if request is not None:
            (self._book.left if left else self._book.dropped)(request)
        if task is not None and task is not asyncio.current_task(self._loop):
            task.cancel()

    def drop(self, *, left: bool = False, reset: bool = False, abort: bool = True) -> None:
        """Close the connection now, whatever goes on on it."""
        self._leave(left=left)
        self._gone = True
        if self._transport is None:
            return
        if reset:
            found: socket.socket | None = self._transport.get_extra_info("socket")
            if found is not None and found.family != getattr(socket, "AF_UNIX", None):
                with contextlib.suppress(OSError):  # closed by the client in this very moment
                    found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        if reset or abort:
            self._transport.abort()
        else:
            self._transport.close()

    def _refuse(self, status: int, words: str) -> None:
        """The client broke the rules: say so, and close."""
        self._book.fault(f"connection {self._number}: {words}")
        if self._transport is not None and self._request is None:
            body = error_body(status, words)
            headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
            self._transport.write(_head(status, headers) + body)
        self.drop(abort=False)


def _head(status: int, headers: dict[str, str]) -> bytes:
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {status} {phrase}\r\n{lines}\r\n".encode("latin-1")


class Listener:
    """See :class:`spanwire.testing.loopback.Listener`. ``at_end`` is awaited when everything else is closed."""

    def __init__(
        self,
        server: asyncio.Server,
        connections: set[_Connection],
        uds: str | None,
        at_end: Callable[[], Awaitable[None]],
    ) -> None:
        self._server = server
        self._connections = connections
        self._uds = uds
        self._at_end = at_end
        self.address: tuple[str, int] | None = None
        if uds is None:
            self.address = server.sockets[0].getsockname()[:2]

    def disconnect(self, *, reset: bool) -> None:
        for connection in list(self._connections):
            connection.drop(reset=reset, abort=False)

    async def aclose(self) -> None:
        # Not wait_closed(): from Python 3.12 on it also waits for clients that never finish their TLS handshake.
        loop = asyncio.get_running_loop()
        for listening in self._server.sockets:
            with contextlib.suppress(NotImplementedError):  # Windows' loop, which accepts in another way
                loop.remove_reader(listening.fileno())
        for _ in range(_ACCEPT_TURNS):
            await asyncio.sleep(0)
        self._server.close()
        connections = list(self._connections)
        for connection in connections:
            connection.drop()
        await asyncio.gather(*(connection.closed for connection in connections))
        await self._at_end()
        self._remove_socket()

    def _remove_socket(self) -> None:
        if self._uds is not None:
            with contextlib.suppress(OSError):  # Python 3.13 removes it by itself
                Path(self._uds).unlink()


async def listen(
    book: Book,
    handler: Handler,
    at_end: Callable[[], Awaitable[None]],
    *,
    host: str,
    port: int,
    uds: str | None,
    ssl: tls.SSLContext | None,
) -> Listener:
    """Serve. Raises OSError."""
    loop = asyncio.get_running_loop()
    connections: set[_Connection] = set()
    shutdown_s = None if ssl is None else _TLS_GOODBYE_S

    def connection() -> _Connection:
        return _Connection(book, connections, handler)

    if uds is not None:
        server = await loop.create_unix_server(
            connection, uds, ssl=ssl, backlog=_BACKLOG, ssl_shutdown_timeout=shutdown_s
        )
    else:
        server = await loop.create_server(
            connection, host, port, ssl=ssl, backlog=_BACKLOG, ssl_shutdown_timeout=shutdown_s
        )
    return Listener(server, connections, uds, at_end)
