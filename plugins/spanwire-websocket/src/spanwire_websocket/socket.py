"""One WebSocket: an ``asyncio.Protocol`` around the sans-I/O protocol of ``websockets``.

That library parses and writes frames; here are the socket, the messages, pings, and what is known of the round trip.
Messages go to a :class:`Sink` in the call that read them, without a task or a queue in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from types import GeneratorType
from typing import Any, NamedTuple, Protocol, cast

from websockets.client import ClientProtocol
from websockets.exceptions import PayloadTooBig
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.protocol import State
from websockets.streams import StreamReader

from spanwire.errors import ConnectionFailed
from spanwire.net import sockets

__all__ = ["Closed", "Keepalive", "Sink", "WebSocket", "quiet_logger"]

#: Large messages are written in pieces of this size, so that others' turns come in between, and the end of the upload is
#: seen: asyncio buffers what TLS makes of a write without telling.
_PIECE_BYTES = 256 * 1024
#: A timer that comes later than this, in seconds, says that our own loop was busy: answers may lie unread.
_LATE_S = 0.25
#: How long the other side may take to close TCP after both have said goodbye, in seconds.
_GOODBYE_S = 1.0

#: The first byte of a text message in one frame: FIN, and opcode 1.
_WHOLE_TEXT = 0x81

#: More messages than a server has to say to nobody.
_MOST_QUIET = 64

#: In a ping that only keeps the connection from being silent; those that measure have numbers.
_AGAIN = b"again"
#: Where the library's parser stands until the first byte of a frame comes. In a version that has it otherwise nothing is
#: equal to it, and everything goes through that parser.
_WAITS_FOR_A_FRAME = getattr(getattr(StreamReader, "at_eof", None), "__code__", object())

_TEXT, _BINARY, _CONT, _PONG, _CLOSE = Opcode.TEXT, Opcode.BINARY, Opcode.CONT, Opcode.PONG, Opcode.CLOSE


class _Quiet(logging.LoggerAdapter[logging.Logger]):
    """At DEBUG the library would log the handshake's headers, the key among them, and every message."""

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802 - the library's name
        return level > logging.INFO and super().isEnabledFor(level)


def _is_between_frames(wire: ClientProtocol) -> bool:
    """Its parser waits for the first byte of a frame.

    That nothing lies in its buffer does not say so: the head of a frame is taken out of it before the rest has come.
    """
    at: Any = getattr(wire, "parser", None)
    while isinstance(at, GeneratorType) and at.gi_yieldfrom is not None:
        at = at.gi_yieldfrom
    return getattr(at, "gi_code", None) is _WAITS_FOR_A_FRAME


def _begins_plain(data: bytes, largest: int) -> bool:
    """It is the beginning of a message that :meth:`WebSocket._take_plain` will take, whose rest has not come.

    Kept back from the library's parser, which else had to take everything that the next read brings.
    """
    if data[0] != _WHOLE_TEXT or len(data) < 2 or data[1] < 126:
        return data[0] == _WHOLE_TEXT and (len(data) < 2 or data[1] <= largest)
    return data[1] == 126 and (len(data) < 4 or 126 <= data[2] << 8 | data[3] <= largest)


quiet_logger = _Quiet(logging.getLogger("spanwire.websocket"), {})


class Keepalive(NamedTuple):
    """Pings of ours, in seconds; ``interval_s`` None for none, ``timeout_s`` None to measure with them only."""

    interval_s: float | None = 20.0
    timeout_s: float | None = 20.0


class Closed(NamedTuple):
    """How a socket came to its end.

    Attributes:
        code, reason: of the close frame that ended it (RFC 6455 section 7.4); code None if the connection broke.
        ours: the frame was ours: what we received broke the protocol or a limit, or nothing answered our pings.
        cause: what the library or the system said.
    """

    code: int | None
    reason: str = ""
    ours: bool = False
    cause: BaseException | None = None


class Sink(Protocol):
    """Whoever has the socket: told on its loop.

    ``patient``: missing answers to pings alone do not end the socket: the one who has it has limits of its own.
    """

    patient: bool

    def on_message(self, data: bytes | bytearray, text: bool) -> None:
        """A whole message."""

    def on_batch(self) -> None:
        """The last message of one read has been given."""

    def on_sent(self) -> None:
        """All that was sent is in the kernel's buffer."""

    def on_lost(self, closed: Closed) -> None:
        """Nothing more will come. Said once."""


class WebSocket(asyncio.Protocol):
    """A client's socket. Made by :func:`spanwire.net.dial.dial`, then :meth:`upgrade`.

    Args:
        max_size: the one that ``wire`` has, in bytes: the library's name for it differs from version to version.

    Attributes:
        arrival_ns: when the bytes that are being handed over arrived.
        upgraded_ns: when the answer to the handshake arrived; 0 before.
        lost: how it ended, None while it lives.
        quiet: messages that came while nobody had the socket, and whether they were text.
    """

    __slots__ = (
        "_address",
        "_between",
        "_closed",
        "_drained",
        "_fragments",
        "_fragments_text",
        "_goodbye",
        "_keepalive",
        "_kept_ns",
        "_largest",
        "_last_ping_ns",
        "_loop",
        "_out",
        "_pid",
        "_ping_due",
        "_ping_rtt_ns",
        "_pings",
        "_plain",
        "_pongs",
        "_round_trip",
        "_sink",
        "_tail",
        "_timer",
        "_transport",
        "_unanswered_ns",
        "_upgraded",
        "_wire",
        "_write_paused",
        "arrival_ns",
        "lost",
        "paused",
        "quiet",
        "upgraded_ns",
    )

    def __init__(
        self, address: str, wire: ClientProtocol, keepalive: Keepalive, *, max_size: int | None = None
    ) -> None:
        self._address = address
        self._wire = wire
        self._keepalive = keepalive
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self._transport: asyncio.Transport | None = None
        self._round_trip = sockets.RoundTrip()
        self._sink: Sink | None = None
        self._upgraded: asyncio.Future[Response] = self._loop.create_future()
        self._closed: asyncio.Future[None] = self._loop.create_future()
        self._drained: asyncio.Future[None] | None = None
        self._fragments: list[bytes | bytearray] = []
        self._fragments_text = False
        self._out: deque[memoryview | bytes] = deque()
        self._write_paused = False
        self._timer: asyncio.TimerHandle | None = None
        self._goodbye: asyncio.TimerHandle | None = None
        self._ping_due = 0.0
        self._pings = 0
        self._pongs = 0
        self._last_ping_ns = 0
        self._kept_ns = 0  # when something was last sent to keep proxies from closing it
        self._unanswered_ns = 0  # when the ping was sent that has no answer yet; 0 for none
        self._ping_rtt_ns: int | None = None
        self.arrival_ns = 0
        self.upgraded_ns = 0
        self.lost: Closed | None = None
        self.paused = False
        self.quiet: list[tuple[bytes | bytearray, bool]] = []
        self._plain = False  # messages come as they are, and may be taken without the library's parser
        self._tail = b""  # the beginning of a plain message
        self._between = False  # the library's parser has nothing of a message whose rest is still to come
        self._largest = max_size or 1 << 62

    # --- for its owner ----------------------------------------------------------------------------------------------

    async def upgrade(self, request: Any) -> Response:
        """Send the handshake's request, and give the answer, whatever it is: look at its status, and at
        :attr:`handshake_problem`.

        Raises:
            ConnectionFailed: the connection ended before there was one.
        """
        self._wire.send_request(request)
        self._flush()
        return await self._upgraded

    @property
    def handshake_problem(self) -> Exception | None:
        """What the library found wrong with the answer to the handshake."""
        return self._wire.handshake_exc

    @property
    def subprotocol(self) -> str | None:
        """What was agreed on."""
        return self._wire.subprotocol

    def start(self) -> None:
        """It is open: begin to ping."""
        self._plain = not self._wire.extensions
        self._between = not self._fragments and _is_between_frames(self._wire)
        if self._keepalive.interval_s is not None and self.lost is None:
            self.ping()
            self._arm(self._keepalive.interval_s)

    def take(self, sink: Sink | None) -> None:
        """From now on messages go there; None for nobody."""
        self._sink = sink
        if sink is not None:
            self.resume_reading()  # it was stopped if too much had come for nobody

    def usable(self) -> bool:
        """It is open, and nothing was said to end it."""
        return (
            self.lost is None
            and self._wire.state is State.OPEN
            and self._transport is not None
            and not self._transport.is_closing()
        )

    def send(self, data: bytes | bytearray, *, text: bool = True) -> bool:
        """Write a message. Returns whether all is in the kernel's buffer already; else ``on_sent`` follows.

        Raises:
            ConnectionFailed: the socket is closed.
        """
        if not self.usable():
            raise ConnectionFailed(
                "the WebSocket was closed before the message was sent", endpoint=self._address, phase="send"
            )
        if text:
            self._wire.send_text(data)
        else:
            self._wire.send_binary(data)
        self._flush()
        return not (self._write_paused or self._out)

    async def drain(self) -> None:
        """Wait until what was sent is in the kernel's buffer, or the socket has ended."""
        while (self._write_paused or self._out) and self.lost is None:
            if self._drained is None:
                self._drained = self._loop.create_future()
            await asyncio.shield(self._drained)

    def ping(self) -> None:
        """Send one, to measure the round trip by its answer."""
        if self.usable() and not self._unanswered_ns:
            self._pings += 1
            self._last_ping_ns = self._unanswered_ns = self._kept_ns = time.perf_counter_ns()
            self._wire.send_ping(b"%d" % self._pings)
            self._flush()

    def _keep(self) -> None:
        """Another ping, while one has no answer: a server that computes is silent for long, and proxies cut what is."""
        if self.usable() and not (self._write_paused or self._out):
            self._kept_ns = time.perf_counter_ns()
            self._wire.send_ping(_AGAIN)
            self._flush()

    def pause_reading(self) -> None:
        """Stop the peer by TCP. Its pings, and answers to ours, are not seen meanwhile; ours end nothing then."""
        if not self.paused and self._transport is not None and not self._transport.is_closing():
            self.paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Go on after :meth:`pause_reading`."""
        if self.paused:
            self.paused = False
            if self._unanswered_ns:
                self._unanswered_ns = time.perf_counter_ns()  # its answer may lie behind what was held up
            if self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()

    def set_connect_rtt(self, rtt_ns: int | None, *, through_proxy: bool) -> None:
        """What the dial knows of the round trip: 0 for a unix socket. Behind a proxy the kernel's is only that to it."""
        self._round_trip.connect_ns = rtt_ns
        self._round_trip.through_proxy = through_proxy

    def rtt_min_ns(self) -> int | None:
        """The minimum round trip to the server: that of pings, which reach it through whatever ends TCP in between; before
        one was answered the kernel's."""
        kernel_ns = self._round_trip.min_ns()
        return kernel_ns if self._ping_rtt_ns is None else self._ping_rtt_ns

    def saw_answer(self, after_ns: int) -> None:
        """A message was answered after so long: no round trip takes longer, whatever a ping to a busy server has said."""
        if self._ping_rtt_ns is not None and after_ns < self._ping_rtt_ns:
            self._ping_rtt_ns = max(after_ns, self._round_trip.min_ns() or 0)

    def connect_rtt_ns(self) -> int | None:
        """What the kernel knows of it, before there was a ping."""
        return self._round_trip.min_ns()

    def backlog_ns(self) -> int:
        """How long what is written will still take to be there. See :func:`spanwire.net.sockets.backlog_ns`."""
        return self._round_trip.backlog_ns()

    async def aclose(self, code: int = 1000) -> None:
        """Say goodbye, and wait until the connection has ended; whoever waits for less has to :meth:`abort` it."""
        self.say_goodbye(code)
        if self._transport is not None:
            await asyncio.shield(self._closed)

    def say_goodbye(self, code: int = 1000) -> None:
        """Send a close frame; the connection ends once the server has answered it, or a second later."""
        if self._transport is None or self._pid != os.getpid():
            return
        self._plain = False
        if self._wire.state is State.OPEN:
            self._wire.send_close(code)
            self._flush()
            self._end_soon()
        elif self._wire.state is State.CONNECTING:
            self.abort()

    def abort(self) -> None:
        """Close at once."""
        self._disarm()
        self._out.clear()
        if self._transport is None or self._closed.done() or self._pid != os.getpid():
            return  # in a forked child: the connection is the parent's, who goes on with it
        sockets.abort(self._transport, self._round_trip.socket)

    # --- asyncio.Protocol -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=1, low=0)  # told as soon as the kernel does not take everything
        self._round_trip.socket = transport.get_extra_info("socket")
        sockets.limit_unsent(self._round_trip.socket)
        sockets.limit_reads(transport)

    def data_received(self, data: bytes) -> None:
        self.arrival_ns = time.perf_counter_ns()
        wire, sink = self._wire, self._sink
        if self._tail:
            data, self._tail = self._tail + data, b""
        if sink is not None and self._plain and self._between:
            taken = self._take_plain(data, sink)
            if taken:
                data = data[taken:]
            if not data or (self._plain and self._sink is sink and _begins_plain(data, self._largest)):
                self._tail = data
                if self._sink is sink:
                    sink.on_batch()
                return
        wire.receive_data(data)
        if wire.writes:
            self._flush()
        for event in wire.events_received():
            if not isinstance(event, Frame):
                self._answered(cast(Response, event))
                continue
            opcode = event.opcode
            if opcode is _TEXT or opcode is _BINARY:
                if event.fin:
                    self._message(event.data, opcode is _TEXT)  # type: ignore[arg-type]
                else:
                    self._fragments = [event.data]  # type: ignore[list-item]
                    self._fragments_text = opcode is _TEXT
            elif opcode is _CONT:
                self._fragments.append(event.data)  # type: ignore[arg-type]
                if event.fin:
                    whole, self._fragments = b"".join(self._fragments), []
                    self._message(whole, self._fragments_text)
            elif opcode is _PONG:
                self._pong(bytes(event.data))
        if self._plain:
            self._between = not self._fragments and _is_between_frames(wire)
        if sink is not None and self._sink is sink:
            sink.on_batch()
        if wire.state is not State.OPEN and self.lost is None and self.upgraded_ns:
            self._wire_ended()
        elif wire.handshake_exc is not None and not self._upgraded.done():
            self._answered(None)

    def _take_plain(self, data: bytes, sink: Sink) -> int:
        """Hand over the whole, unfragmented text messages at the start, and say how many bytes that were.

        What nearly every read of a streamed answer consists of, in a sixth of the time that the library's parser takes,
        which gets the rest. The layout: RFC 6455 section 5.2.
        """
        at, size, largest = 0, len(data), self._largest
        while at + 2 <= size and data[at] == _WHOLE_TEXT and self._sink is sink:
            length, start = data[at + 1], at + 2
            if length >= 126:
                if length != 126 or at + 4 > size:  # longer than 64 KiB, masked, or half a head
                    break
                length, start = data[at + 2] << 8 | data[at + 3], at + 4
                if length < 126:  # not written as short as it has to be
                    break
            end = start + length
            if end > size or length > largest:
                break
            at = end
            sink.on_message(data[start:end], True)
        return at

    def _message(self, data: bytes | bytearray, text: bool) -> None:
        if self._sink is not None:
            self._sink.on_message(data, text)
        else:
            self.quiet.append((data, text))
            if len(self.quiet) >= _MOST_QUIET:
                self.pause_reading()

    def _answered(self, response: Response | None) -> None:
        self.upgraded_ns = self.arrival_ns
        if self._upgraded.done():
            return
        if response is not None:
            self._upgraded.set_result(response)
        else:
            error = self._no_answer()
            error.__cause__ = self._wire.handshake_exc
            self._upgraded.set_exception(error)

    def _no_answer(self) -> ConnectionFailed:
        said = isinstance(self._wire.handshake_exc, Exception) and not isinstance(
            self._wire.handshake_exc.__cause__, EOFError
        )
        words = (
            "the server's answer to the upgrade is not HTTP"
            if said
            else "the connection ended before the upgrade was answered"
        )
        return ConnectionFailed(words, endpoint=self._address, phase="upgrade", retryable=not said)

    def _wire_ended(self) -> None:
        """A close frame came, or was sent because of what came. TCP follows."""
        wire = self._wire
        received, sent = wire.close_rcvd, wire.close_sent
        if received is not None and (wire.close_rcvd_then_sent is not False):
            closed = Closed(int(received.code), received.reason, False, wire.parser_exc)
        elif received is not None:  # the answer to ours
            closed = Closed(int(received.code), received.reason, True, wire.parser_exc)
        elif wire.parser_exc is not None and sent is not None:
            closed = Closed(int(sent.code), sent.reason, True, wire.parser_exc)
        else:
            return  # we have said goodbye, and wait
        self._end_soon()
        self._lose(closed)

    def _end_soon(self) -> None:
        self._disarm()
        if self._goodbye is None:
            self._goodbye = self._loop.call_later(_GOODBYE_S, self.abort)

    def _lose(self, closed: Closed) -> None:
        self._plain = False
        if self.lost is not None:
            return
        self.lost = closed
        self._fragments = []
        self._wake_senders()
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.on_lost(closed)

    def eof_received(self) -> None:
        return None  # the transport closes itself; connection_lost follows

    def connection_lost(self, error: Exception | None) -> None:
        self._disarm()
        self._out.clear()
        if self._goodbye is not None:
            self._goodbye.cancel()
            self._goodbye = None
        self.arrival_ns = time.perf_counter_ns()
        with contextlib.suppress(EOFError):
            self._wire.receive_eof()
        for event in self._wire.events_received():  # an answer to the handshake whose end is that of the connection
            if isinstance(event, Response):
                self._answered(event)
        if not self._upgraded.done():
            failed = self._no_answer()
            failed.__cause__ = error or self._wire.handshake_exc
            self._upgraded.set_exception(failed)
            self._upgraded.exception()  # looked at: nobody may wait for it any more
        if not self._closed.done():
            self._closed.set_result(None)
        if isinstance(self._wire.parser_exc, PayloadTooBig):
            self._lose(Closed(1009, "", True, self._wire.parser_exc))
        self._lose(Closed(None, "", False, error))

    def pause_writing(self) -> None:
        self._write_paused = True

    def resume_writing(self) -> None:
        self._write_paused = False
        self._write_on()
        if not (self._write_paused or self._out):
            self._wake_senders()
            if self._sink is not None:
                self._sink.on_sent()

    # --- writing ----------------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        transport = self._transport
        for data in self._wire.data_to_send():
            if not data:  # the sign that nothing more will be written
                self._end_soon()
            elif self._out or len(data) > _PIECE_BYTES:
                self._out.append(memoryview(data))
            elif transport is not None:
                transport.write(data)
        if self._out:
            self._write_on()

    def _write_on(self) -> None:
        out = self._out
        while out and not self._write_paused and self._transport is not None:
            rest = out[0]
            self._transport.write(rest[:_PIECE_BYTES])
            if len(rest) > _PIECE_BYTES:
                out[0] = rest[_PIECE_BYTES:]
            else:
                out.popleft()

    def _wake_senders(self) -> None:
        drained, self._drained = self._drained, None
        if drained is not None and not drained.done():
            with contextlib.suppress(RuntimeError):  # the loop is closed
                drained.set_result(None)

    # --- pings ------------------------------------------------------------------------------------------------------

    def _pong(self, data: bytes) -> None:
        if not self._unanswered_ns:
            return
        if data == b"%d" % self._pings:
            rtt_ns = self.arrival_ns - self._last_ping_ns
            # Not where our own slowness is in it: it was stopped, and what came had to wait.
            if self._unanswered_ns == self._last_ping_ns and (self._ping_rtt_ns is None or rtt_ns < self._ping_rtt_ns):
                self._ping_rtt_ns = rtt_ns
        elif data != _AGAIN:  # of several pings a server may answer the last one only: RFC 6455 section 5.5.3
            return
        self._pongs += 1
        self._unanswered_ns = 0

    def _arm(self, after_s: float) -> None:
        self._ping_due = self._loop.time() + after_s
        self._timer = self._loop.call_later(after_s, self._tick)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self._timer = None
        interval_s, timeout_s = self._keepalive
        if interval_s is None or self.lost is not None:
            return
        late = self._loop.time() - self._ping_due > _LATE_S
        now_ns = time.perf_counter_ns()
        if not self._unanswered_ns:
            self.ping()
        elif timeout_s is not None and not (late or self.paused) and self._pongs:
            heard_ns = max(self._unanswered_ns, self.arrival_ns)  # whatever comes shows that it lives
            patient = self._sink is not None and self._sink.patient
            if not patient and now_ns - heard_ns >= timeout_s * 1e9:
                self._lose(Closed(1011, f"our keepalive: nothing came for {timeout_s:g} s after a ping", True, None))
                self.abort()
                return
        if self._unanswered_ns and now_ns - self._kept_ns >= 0.9 * interval_s * 1e9:  # timers may come early
            self._keep()
        self._arm(min(interval_s, timeout_s) if timeout_s is not None and self._unanswered_ns else interval_s)
