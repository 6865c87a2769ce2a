"""A proxy for tests, in a thread of its own: CONNECT, forwarding, Basic authentication, TLS, SOCKS4, 4a and 5."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import socket
import ssl
import threading
from collections.abc import Callable
from typing import Any, Self
from urllib.parse import urlsplit

import httptools

from spanwire.net import sockets

_LIMIT_S = 10.0


class ProxyServer:
    """Use as a context manager.

    Args:
        auth: user and password that it asks for.
        tls: the context with which it listens.
        answer: bytes to answer each HTTP request with, in the place of doing what it asks.
        then_close: with `answer`, whether it closes.
        silent: it takes the connection and says nothing, ever.

    Attributes:
        seen: request lines of HTTP (`CONNECT h:1`), and `socks5 h:1`, one for each request, in order.
        headers: of the last HTTP request, names in lower case.
        certificates: what the clients of its TLS have shown.
        connections: how many came, in all; `open`: of these, how many are still there.
    """

    def __init__(
        self,
        *,
        auth: tuple[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
        answer: bytes | None = None,
        then_close: bool = True,
        silent: bool = False,
    ) -> None:
        self.auth, self.tls, self.answer, self.then_close, self.silent = auth, tls, answer, then_close, silent
        self.seen: list[str] = []
        self.headers: dict[str, str] = {}
        self.certificates: list[Any] = []
        self.connections = 0
        self.open = 0
        self._changed = threading.Condition()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)
        self.port = 0

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(_LIMIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_LIMIT_S)
        assert not self._thread.is_alive()

    def url(self, scheme: str | None = None, *, auth: str = "", host: str = "127.0.0.1") -> str:
        return f"{scheme or ('https' if self.tls else 'http')}://{auth}{host}:{self.port}"

    def wait_for(self, predicate: Callable[[ProxyServer], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: predicate(self), _LIMIT_S), (self.seen, self.open)

    def count(self, opened: int) -> None:
        with self._changed:
            self.open += opened
            self.connections += opened > 0
            self._changed.notify_all()

    def note(self, what: str) -> None:
        with self._changed:
            self.seen.append(what)
            self._changed.notify_all()

    # --- inside the thread --------------------------------------------------------------------------------------------

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._loop.set_exception_handler(lambda _loop, _context: None)  # clients break handshakes on purpose
        # Ours, and not asyncio.start_server: that one's handlers begin after the TLS handshake, and we count before.
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        self.port = listener.getsockname()[1]
        tasks: set[asyncio.Task[None]] = set()
        waiting: set[socket.socket] = set()  # nobody's yet: their task has not begun

        async def accept() -> None:
            while True:
                sock, _ = await self._loop.sock_accept(listener)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio does for its own servers only
                waiting.add(sock)
                task = asyncio.create_task(self._connection(sock, waiting))
                tasks.add(task)
                task.add_done_callback(tasks.discard)

        accepting = asyncio.create_task(accept())
        self._ready.set()
        await self._stop.wait()
        for task in [accepting, *tasks]:
            task.cancel()
        await asyncio.gather(accepting, *tasks, return_exceptions=True)
        for sock in (listener, *waiting):
            sock.close()

    async def _connection(self, sock: socket.socket, waiting: set[socket.socket]) -> None:
        waiting.discard(sock)
        self.count(1)
        writer: asyncio.StreamWriter | None = None
        try:
            reader = asyncio.StreamReader()
            protocol = asyncio.StreamReaderProtocol(reader)
            transport, _ = await self._loop.connect_accepted_socket(lambda: protocol, sock, ssl=self.tls)
            writer = asyncio.StreamWriter(transport, protocol, reader, self._loop)
            if self.tls is not None:
                self.certificates.append(writer.get_extra_info("ssl_object").getpeercert() or None)
            await self._speak(reader, writer)
        except (OSError, EOFError, ValueError):
            pass
        finally:
            if writer is not None:
                sockets.abort(writer.transport, None)  # Python up to 3.11.2 cannot abort TLS closed twice
            else:
                sock.close()
            self.count(-1)

    async def _speak(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.silent:
            self.note("silence")
            await reader.read()
            return
        first = await reader.readexactly(1)
        if first == b"\x05":
            await self._socks5(reader, writer)
        elif first == b"\x04":
            await self._socks4(reader, writer)
        else:
            await self._http(first, reader, writer)

    # --- HTTP

    async def _http(self, first: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream: dict[tuple[str, int], tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}
        try:
            while True:
                head = first + await reader.readuntil(b"\r\n\r\n")
                first = b""
                line, *rest = head.decode().split("\r\n")
                method, target, _ = line.split(" ")
                self.headers = {k.lower(): v.strip() for k, _, v in (text.partition(":") for text in rest if text)}
                self.note(f"{method} {target}")
                body = await reader.readexactly(int(self.headers.get("content-length", "0")))
                if self.answer is not None:
                    writer.write(self.answer)
                    await writer.drain()
                    if self.then_close:
                        return
                    await reader.read()
                    return
                if self.auth is not None:
                    expected = base64.b64encode(":".join(self.auth).encode()).decode()
                    if self.headers.get("proxy-authorization") != f"Basic {expected}":
                        writer.write(b"HTTP/1.1 407 Proxy Authentication Required\r\ncontent-length: 0\r\n\r\n")
                        await writer.drain()
                        continue
                if method == "CONNECT":
                    host, _, port = target.rpartition(":")
                    await self._tunnel(reader, writer, host.strip("[]"), int(port), b"HTTP/1.1 200 Here\r\n\r\n")
                    return
                url = urlsplit(target)
                place = (url.hostname or "", url.port or 80)
                if place not in upstream:
                    upstream[place] = await asyncio.open_connection(*place)
                keep = [
                    text for text in rest if text and text.split(":")[0].lower() not in ("proxy-authorization", "host")
                ]
                path = target.removeprefix(f"{url.scheme}://{url.netloc}")
                lines = "\r\n".join([f"{method} {path} HTTP/1.1", f"host: {url.netloc}", *keep])
                upstream[place][1].write(f"{lines}\r\n\r\n".encode() + body)
                if not await self._relay_answer(upstream[place][0], writer):
                    return
        finally:
            for _, up in upstream.values():
                up.transport.abort()

    @staticmethod
    async def _relay_answer(up: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        ended: list[bool] = []

        class Callbacks:
            def on_message_complete(self) -> None:
                ended.append(parser.should_keep_alive())

        parser = httptools.HttpResponseParser(Callbacks())
        while not ended:
            data = await up.read(65536)
            if not data:
                return False
            parser.feed_data(data)
            writer.write(data)
            await writer.drain()
        return ended[0]

    async def _tunnel(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, port: int, consent: bytes
    ) -> None:
        try:
            up_reader, up_writer = await asyncio.open_connection(host, port)
        except OSError:
            refusal = {
                b"H": b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\n\r\n",
                b"\x05": b"\x05\x05\x00\x01" + bytes(6),
            }
            writer.write(refusal.get(consent[:1], b"\x00\x5b" + bytes(6)))
            await writer.drain()
            return
        writer.write(consent)

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while data := await source.read(65536):
                    sink.write(data)
                    await sink.drain()

        try:
            pumps = [asyncio.create_task(pump(reader, up_writer)), asyncio.create_task(pump(up_reader, writer))]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in pumps:
                    task.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        finally:
            up_writer.transport.abort()

    # --- SOCKS

    async def _socks5(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        (count,) = await reader.readexactly(1)
        methods = await reader.readexactly(count)
        wanted = 2 if self.auth else 0
        if wanted not in methods:
            writer.write(b"\x05\xff")
            await writer.drain()
            return
        writer.write(bytes([5, wanted]))
        if self.auth:
            await reader.readexactly(1)
            pair = []
            for _ in range(2):
                (length,) = await reader.readexactly(1)
                pair.append((await reader.readexactly(length)).decode())
            good = tuple(pair) == self.auth
            writer.write(b"\x01\x00" if good else b"\x01\x01")
            await writer.drain()
            if not good:
                return
        _, _, _, kind = await reader.readexactly(4)
        if kind == 3:
            (length,) = await reader.readexactly(1)
            host = (await reader.readexactly(length)).decode()
        else:
            family, length = (socket.AF_INET, 4) if kind == 1 else (socket.AF_INET6, 16)
            host = socket.inet_ntop(family, await reader.readexactly(length))
        port = int.from_bytes(await reader.readexactly(2), "big")
        self.note(f"socks5 {host}:{port}")
        await self._tunnel(reader, writer, host, port, b"\x05\x00\x00\x01" + bytes(6))

    async def _socks4(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _, *rest = await reader.readexactly(7)
        port, address = int.from_bytes(bytes(rest[:2]), "big"), bytes(rest[2:])
        user = (await reader.readuntil(b"\0"))[:-1].decode()
        host = socket.inet_ntoa(address)
        if address[:3] == bytes(3) and address[3]:
            host = (await reader.readuntil(b"\0"))[:-1].decode()
        self.note(f"socks4 {user}@{host}:{port}" if user else f"socks4 {host}:{port}")
        await self._tunnel(reader, writer, host, port, b"\x00\x5a" + bytes(6))


class Target:
    """What a proxy connects to: a server of blocking sockets, one thread for each connection.

    Nothing of it lives on the loop under test, so whatever is left there was left by the client.
    """

    def __init__(self, handler: Callable[[socket.socket], None], tls: ssl.SSLContext | None = None) -> None:
        self.handler, self.tls = handler, tls
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads: list[threading.Thread] = []
        self._socks: set[socket.socket] = set()

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        for sock in (self._listener, *list(self._socks)):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(_LIMIT_S)
            assert not thread.is_alive()

    def _start(self, target: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                self._socks.add(sock)
                self._start(self._serve, sock)

    def _serve(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError, ValueError):  # ValueError: `__exit__` shut it down
            if self.tls is None:
                self.handler(sock)
                return
            with self.tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False) as secure:
                self._socks.add(secure)
                secure.do_handshake()
                self.handler(secure)
                secure.unwrap()  # says that it closes


def loops() -> list[Any]:
    """Event loops to test with: asyncio's, and uvloop's where it is installed."""
    factories: list[Any] = [asyncio.new_event_loop]
    with contextlib.suppress(ImportError):
        import uvloop

        factories.append(uvloop.new_event_loop)
    return factories
