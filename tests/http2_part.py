"""A part of the loopback server that speaks HTTP/2: the answers of the built-in part, frame by frame on a stream."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl as tls
import time
from collections.abc import Callable
from typing import Any

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings
import msgspec
from spanwire_sse.loopback import _OPERATIONS, _RESET, _Listener, _plan

from spanwire.testing import Book, Request

#: Exchanges at once that it allows.
STREAMS = 20


class _Stream:
    """One request, and its answer."""

    def __init__(self, headers: dict[str, str]) -> None:
        self.headers = headers
        self.body: list[bytes] = []
        self.request: Request | None = None
        self.task: asyncio.Task[None] | None = None


class _Connection(asyncio.Protocol):
    def __init__(self, book: Book, connections: set[_Connection]) -> None:
        self._book, self._connections = book, connections
        self._streams: dict[int, _Stream] = {}
        self._window = asyncio.Event()
        self._gone = False
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._http = h2.connection.H2Connection(
            h2.config.H2Configuration(client_side=False, header_encoding="utf-8", validate_outbound_headers=False)
        )
        self._http.local_settings = h2.settings.Settings(
            client=False, initial_values={h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS: STREAMS}
        )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._connections.add(self)
        self._number = self._book.connected()
        self._http.initiate_connection()
        self._flush()

    def _flush(self) -> None:
        data = self._http.data_to_send()
        if data and not self._transport.is_closing():
            self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        try:
            events = self._http.receive_data(data)
        except h2.exceptions.ProtocolError as error:
            self._book.fault(f"connection {self._number}: {error!r}")
            self._flush()
            self._transport.close()
            return
        for event in events:
            if isinstance(event, h2.events.RequestReceived):
                self._streams[event.stream_id] = _Stream(dict(event.headers))  # type: ignore[arg-type]
            elif isinstance(event, h2.events.DataReceived):
                self._http.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                if event.stream_id in self._streams:
                    self._streams[event.stream_id].body.append(event.data)
            elif isinstance(event, h2.events.StreamEnded):
                self._arrived(event.stream_id)
            elif isinstance(event, h2.events.StreamReset):
                self._leave(event.stream_id, left=True)
            elif isinstance(event, (h2.events.WindowUpdated, h2.events.RemoteSettingsChanged)):
                self._window.set()
        self._flush()

    def _arrived(self, number: int) -> None:
        stream = self._streams.get(number)
        if stream is None:
            return
        path, _, query = stream.headers[":path"].partition("?")
        headers = {name: value for name, value in stream.headers.items() if not name.startswith(":")}
        stream.request = request = Request(
            method="POST", path=path, query=query, headers=headers, raw=b"".join(stream.body), connection=self._number
        )
        self._book.arrived(request)
        stream.task = asyncio.get_running_loop().create_task(self._answer(number, request))

    async def _answer(self, number: int, request: Request) -> None:
        try:
            await self._play(number, request)
        except Exception as error:  # noqa: BLE001 - shown to the test
            self._book.fault(f"connection {self._number}: the server failed: {error!r}")
            self.drop()

    async def _play(self, number: int, request: Request) -> None:
        body = request.body
        script = self._book.script_for(request, body["model"])
        if script.drop_after == "request":
            self.drop(reset=script.drop_mode == "reset")
            return
        if script.hang_after == "request":
            await asyncio.get_running_loop().create_future()
        operation = next(name for end, name in _OPERATIONS.items() if request.path.endswith(end))
        plan = _plan(operation, msgspec.structs.replace(script, chunked=False), request, body, keep_alive=True)
        for wait_s, stamp in plan.phases:
            await asyncio.sleep(wait_s)
            if stamp:
                setattr(request, stamp, time.perf_counter_ns())
        message = plan.message()
        lines = message.head.decode().split("\r\n")
        headers = [(":status", lines[0].split(" ")[1])]
        headers += [(name.lower(), value) for name, value in (line.split(": ", 1) for line in lines[1:] if line)]
        self._http.send_headers(number, [pair for pair in headers if pair[0] != "connection"])
        self._book.wrote(request, headers=True)
        for played, frame in enumerate(message.frames):
            if played in {script.drop_after, script.hang_after}:
                break
            if frame.wait_s:
                self._flush()
                await asyncio.sleep(frame.wait_s)
            await self._write(number, frame.data)
        self._flush()
        if script.hang_after is not None:
            await asyncio.get_running_loop().create_future()
        if script.drop_after is not None:
            self.drop(reset=script.drop_mode == "reset")
            return
        if message.end_wait_s:
            await asyncio.sleep(message.end_wait_s)
        self._book.ended(request)
        self._streams.pop(number, None)
        self._http.end_stream(number)
        self._flush()

    async def _write(self, number: int, data: bytes) -> None:
        while data:
            room = min(self._http.local_flow_control_window(number), self._http.max_outbound_frame_size)
            if room <= 0:
                self._window.clear()
                self._flush()
                await self._window.wait()
                continue
            self._http.send_data(number, data[:room])
            data = data[room:]

    def _leave(self, number: int, *, left: bool) -> None:
        stream = self._streams.pop(number, None)
        if stream is None or stream.request is None:
            return
        (self._book.left if left else self._book.dropped)(stream.request)
        if stream.task is not None and stream.task is not asyncio.current_task():
            stream.task.cancel()

    def drop(self, *, left: bool = False, reset: bool = False, abort: bool = False) -> None:
        for number in list(self._streams):
            self._leave(number, left=left)
        if reset:
            found: socket.socket | None = self._transport.get_extra_info("socket")
            if found is not None and found.family != socket.AF_UNIX:
                with contextlib.suppress(OSError):
                    found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        if reset or abort:
            self._transport.abort()
        else:
            self._transport.close()

    def eof_received(self) -> None:
        self.drop(left=True)

    def connection_lost(self, error: Exception | None) -> None:
        for number in list(self._streams):
            self._leave(number, left=True)
        self._connections.discard(self)
        self._book.disconnected()
        self._window.set()
        self.closed.set_result(None)


class _Part:
    name = "sse over http/2"
    alpn = ("h2",)

    @staticmethod
    async def start(book: Book, *, host: str, port: int, uds: str | None, ssl: tls.SSLContext | None) -> _Listener:
        connections: set[_Connection] = set()
        made: Callable[[], Any] = lambda: _Connection(book, connections)  # noqa: E731
        server = await asyncio.get_running_loop().create_server(made, host, port, ssl=ssl)
        return _Listener(server, connections, None)  # type: ignore[arg-type]  # which asks for no more than ours have

    @staticmethod
    def url(host: str, port: int, *, secure: bool) -> str:
        return f"{'https' if secure else 'http'}://{host}:{port}/v1"


PART = _Part()
