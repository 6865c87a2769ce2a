"""One client of the WebSocket loopback server: its record in the book, what is written to it, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import sys
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from websockets.asyncio.server import Server, ServerConnection
from websockets.exceptions import PayloadTooBig, ProtocolError
from websockets.frames import Frame, Opcode
from websockets.protocol import State
from websockets.server import ServerProtocol

from spanwire.testing.loopback import Book, Request
from spanwire.testing.script import Script

__all__ = ["GOODBYE_S", "Gone", "Peer"]

#: How long a closing connection waits for the client's goodbye, in seconds. The library's own default is 10.
GOODBYE_S = 1.0

#: ``struct linger``: on, 0 seconds. Two ints, on Windows two shorts.
_RESET = struct.pack("hh" if sys.platform == "win32" else "ii", 1, 0)
#: A text frame of 256 bytes, of which this is all that ever comes.
_CUT_FRAME = b'\x81\x7e\x01\x00{"type":"response.'
#: What the library says of a client that broke the rules.
_FAULTS = (PayloadTooBig, ProtocolError, UnicodeDecodeError)


class Gone(Exception):
    """There is nobody to write to any more; it ends the answer's task and goes no further."""


class Peer(ServerConnection):
    """See the module. ``headers``, ``path`` and ``query`` are those of the upgrade.

    Args:
        peers: holds every connection from its first moment to its last, upgraded or not.
        on_lost: called once, when it is gone.
    """

    def __init__(
        self,
        protocol: ServerProtocol,
        server: Server,
        *,
        book: Book,
        peers: set[Peer],
        on_lost: Callable[[Peer], None],
        answers_pings: bool,
        **settings: Any,
    ) -> None:
        super().__init__(protocol, server, **settings)
        self.book = book
        self._peers = peers
        self._on_lost = on_lost
        self.number = 0
        self.refusal: str | None = None
        #: Requests whose answer is not complete.
        self.running: dict[Request, asyncio.Task[None] | None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.headers: dict[str, str] = {}
        self.path = ""
        self.query = ""
        self._closing: asyncio.Task[None] | None = None
        self._last: asyncio.TimerHandle | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._active = 0.0
        if not answers_pings:
            _mute(protocol)

    # --- asyncio.Protocol -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._peers.add(self)
        self.number = self.book.connected()
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._active = self.loop.time()
        if self._last is None and (self.protocol.state is State.CLOSING or self.protocol.eof_sent):
            # The library waits for a client that has said goodbye, or broke the rules, and does not go.
            self._last = self.loop.call_later(GOODBYE_S, self.transport.abort)
            self._leave(left=True)
            fault = self.protocol.parser_exc
            if isinstance(fault, _FAULTS):
                self.book.fault(f"connection {self.number}: {type(fault).__name__}: {fault}")

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._last, self._idle):
            if timer is not None:
                timer.cancel()
        self._leave(left=True)
        for task in self._tasks:  # those too that have answered, and are not over
            task.cancel()
        self._peers.discard(self)
        self._on_lost(self)
        self.book.disconnected()

    # --- the record -------------------------------------------------------------------------------------------------

    def arrived(self, raw: bytes, method: str) -> Request:
        """A request is here."""
        request = Request(
            method=method, path=self.path, query=self.query, headers=self.headers, raw=raw, connection=self.number
        )
        self.running[request] = None
        self.book.arrived(request)
        return request

    def ended(self, request: Request) -> None:
        """Its answer is complete: to be called before the last bytes, so that whoever has read them finds it recorded."""
        if self.running.pop(request, self) is not self:
            self.book.ended(request)

    def left(self, request: Request) -> asyncio.Task[None] | None:
        """The client does not want it any more. Returns the task that made it, which is the caller's to cancel."""
        if request not in self.running:
            return None
        self.book.left(request)
        return self.running.pop(request)

    def _leave(self, *, left: bool) -> None:
        """The end of all answers that did not end well."""
        running, self.running = self.running, {}
        for request, task in running.items():
            (self.book.left if left else self.book.dropped)(request)
            if task is not None and task is not asyncio.current_task(self.loop):
                task.cancel()

    def answer(self, request: Request, make: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
        """Make an answer in a task of its own, which ends with the connection.

        Args:
            make: called in the task, which may be cancelled before: a coroutine would be left that nobody awaits.
        """
        task = self.loop.create_task(self._guard(make))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if request in self.running:
            self.running[request] = task
        return task

    async def _guard(self, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await make()
        except Gone:
            pass
        except Exception as error:  # noqa: BLE001 - a fault of ours must not look like a slow server
            self.book.fault(f"connection {self.number}: the loopback server failed: {error!r}")
            self.drop()

    # --- writing ----------------------------------------------------------------------------------------------------

    def push(self, messages: Iterable[bytes], *, binary: bool = False) -> None:
        """Write messages, each as one frame, all in one write. Raises Gone."""
        protocol = self.protocol
        if protocol.state is not State.OPEN or self.transport.is_closing():
            raise Gone
        send = protocol.send_binary if binary else protocol.send_text
        for message in messages:
            send(message)
        # Several frames at once: the library's send() makes a write of each. The state is open, so that there is no
        # end of the stream among them.
        self.transport.write(b"".join(protocol.data_to_send()))
        self._active = self.loop.time()

    async def write(self, messages: Iterable[bytes], *, binary: bool = False) -> None:
        """The same, and wait until the kernel has taken it."""
        self.push(messages, binary=binary)
        try:
            await self.drain()
        except OSError as error:
            raise Gone from error

    def cut_when_idle(self, idle_s: float) -> None:
        """From now on, so many seconds without a byte are the end."""
        left_s = self._active + idle_s - self.loop.time()
        if left_s > 0:
            self._idle = self.loop.call_later(left_s, self.cut_when_idle, idle_s)
        else:
            self.drop(abort=False)

    # --- ends -------------------------------------------------------------------------------------------------------

    async def cut(self, script: Script, *, partial: bool) -> None:
        """The end that the script asks for.

        Args:
            partial: in the middle of a frame, if not with RST or with a close code.
        """
        mode = script.drop_mode
        if isinstance(mode, int):
            await self.finish(mode, "as scripted")
        elif mode == "reset":
            self.drop(reset=True)
        else:
            if partial and not self.transport.is_closing():
                self.transport.write(_CUT_FRAME)
                await self.drain()
            self.drop(abort=False)

    async def finish(self, code: int, reason: str = "") -> None:
        """The closing handshake, begun by us."""
        self._leave(left=False)
        await self.close(code, reason)

    def drop(self, *, reset: bool = False, abort: bool = True) -> None:
        """Close the connection now, without a close frame, whatever goes on on it.

        Args:
            reset: with RST, which discards what is on its way.
            abort: without flushing what is still here.
        """
        self._leave(left=False)
        if reset:
            found: socket.socket | None = self.transport.get_extra_info("socket")
            if found is not None and found.family != getattr(socket, "AF_UNIX", None):
                with contextlib.suppress(OSError):  # closed by the client in this very moment
                    found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        if reset or abort:
            self.transport.abort()
        else:
            self.transport.close()

    def close_soon(self, code: int, reason: str = "") -> None:
        """The same, without waiting for it; harmless where it has begun."""
        self._leave(left=False)
        if self.protocol.state is State.OPEN:
            if self._closing is None:
                self._closing = self.loop.create_task(self.finish(code, reason))
        elif self.protocol.state is State.CONNECTING:
            self.transport.close()


def _mute(protocol: ServerProtocol) -> None:
    """Keep it from answering pings, which it does by itself."""
    send = protocol.send_frame

    def send_frame(frame: Frame) -> None:
        if frame.opcode is not Opcode.PONG:
            send(frame)

    protocol.send_frame = send_frame  # type: ignore[method-assign]
