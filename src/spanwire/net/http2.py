"""One HTTP/2 client connection over ``h2`` (hyper's): many exchanges at once, each on a stream of its own.

Frames, header compression and the state of each stream are h2's; this module moves bytes, keeps the times at which
they arrived, divides them among the exchanges, and says when the connection may take another one. No task runs for a
connection or for a stream. Compared with HTTP/1.1: an exchange that is abandoned is reset, and the connection goes on.

Requests are sent without waiting for the server's SETTINGS: that would cost every cold call a round trip. Until they
have come, 100 streams are taken to be welcome (RFC 9113 section 6.5.2 asks servers not to allow fewer); a stream that
the server refuses was not processed, and may be sent again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import cast

from h2.config import H2Configuration
from h2.connection import ConnectionInputs, ConnectionState, H2Connection, H2ConnectionStateMachine
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    RemoteSettingsChanged,
    RequestReceived,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from h2.exceptions import DenialOfServiceError, InvalidBodyLengthError, NoSuchStreamError
from h2.settings import SettingCodes, Settings
from hyperframe.frame import DataFrame, WindowUpdateFrame

from ..errors import ConfigurationError, ConnectionFailed, ProtocolError, SpanwireError
from . import sockets
from .carrier import Sink
from .failures import certificate_refused
from .tls import remember_session

__all__ = [
    "CONNECTION_WINDOW_BYTES",
    "MAX_HEAD_BYTES",
    "MAX_STREAMS",
    "STREAM_WINDOW_BYTES",
    "HTTP2Connection",
    "HTTP2Stream",
]

#: Exchanges at once, however many more the server would allow: one lost packet holds up all of them.
MAX_STREAMS = 100
#: What a stream may send ahead of its consumer: the bound of what is kept for one that reads slowly. At 100 ms round
#: trip it lets 10 MB/s through for each stream, far over what tokens or embeddings need.
STREAM_WINDOW_BYTES = 1024 * 1024
#: The same for all streams together. Handed back whatever the consumers do, so that none of them holds up another.
CONNECTION_WINDOW_BYTES = 16 * 1024 * 1024
#: Largest head of an answer, uncompressed and counted as RFC 9113 section 6.5.2 says; the same as over HTTP/1.1.
MAX_HEAD_BYTES = 64 * 1024

#: Bodies are written in pieces of this size, in bytes, as over HTTP/1.1.
_PIECE_BYTES = 64 * 1024
#: Answers to the server's PING and SETTINGS frames that it does not read, in bytes, until the connection is given up.
_MAX_UNREAD_BYTES = 1024 * 1024
#: A stream that is left after so long, while nothing at all came for any other, takes its connection with it, in ns.
_SILENCE_NS = 1_000_000_000
_FRAME_HEADER_BYTES = 9
_DEFAULT_WINDOW_BYTES = 65535
_MAX_STREAM_ID = 2**31 - 1
#: They are about one connection of HTTP/1.1, and make a message malformed here: RFC 9113 section 8.2.2.
_FORBIDDEN = frozenset({"connection", "keep-alive", "proxy-connection", "te", "transfer-encoding", "upgrade"})

_log = logging.getLogger("spanwire.net")


class _StateMachine(H2ConnectionStateMachine):
    """h2 takes a GOAWAY for the end of everything; RFC 9113 section 6.8 lets the streams below its number finish."""

    def process_input(self, input_: ConnectionInputs) -> list[Event]:
        if input_ is ConnectionInputs.RECV_GOAWAY and self.state is not ConnectionState.CLOSED:
            return []
        return super().process_input(input_)


class _Engine(H2Connection):
    """h2 with the settings of a client that takes no pushes."""

    def __init__(self) -> None:
        # Outbound headers were checked by who made them, and by HTTP2Stream.send.
        super().__init__(H2Configuration(client_side=True, validate_outbound_headers=False))
        self.state_machine = _StateMachine()
        self.local_settings = Settings(
            client=True,
            initial_values={
                SettingCodes.ENABLE_PUSH: 0,
                SettingCodes.MAX_CONCURRENT_STREAMS: 100,  # of the server's own: none, without pushes
                SettingCodes.INITIAL_WINDOW_SIZE: STREAM_WINDOW_BYTES,
                SettingCodes.MAX_HEADER_LIST_SIZE: MAX_HEAD_BYTES,
            },
        )

    def clear_outbound_data_buffer(self) -> None:
        """h2 does this at a GOAWAY, and would lose what the streams that go on have in there."""


class HTTP2Stream:
    """One exchange: the :class:`~spanwire.net.carrier.Carrier` of its answer. Made by :meth:`HTTP2Connection.stream`.

    Attributes:
        id: the stream's number, 0 until it is opened.
        arrival_ns, first_arrival_ns: see :class:`~spanwire.net.carrier.Carrier`.
        paused: what comes is not acknowledged, so that the server stops after a window.
    """

    __slots__ = (
        "_connection",
        "arrival_ns",
        "first_arrival_ns",
        "headers",
        "id",
        "is_large",
        "opened_ns",
        "paused",
        "rest",
        "sink",
        "taken",
    )

    def __init__(self, connection: HTTP2Connection) -> None:
        self._connection = connection
        self.id = 0
        self.opened_ns = 0
        self.is_large = False
        self.sink: Sink | None = None
        self.headers: list[tuple[bytes, bytes]] = []  # until it is opened
        self.rest = memoryview(b"")  # of the body, not handed over yet
        self.taken = 0  # bytes that came and were not acknowledged
        self.paused = False
        self.arrival_ns = 0
        self.first_arrival_ns = 0

    def send(self, headers: Iterable[tuple[str, str]], body: bytes, sink: Sink) -> None:
        """Open the stream and write the request. Once for each stream.

        ``headers`` begin with the pseudo-header fields; names are in lower case. ``sink.on_sent`` is told when all of
        it is in the kernel's buffer, which may be before this returns.

        Raises:
            ConnectionFailed: the connection takes no more streams.
            ConfigurationError: a header that HTTP/2 forbids.
        """
        self.is_large = len(body) > _PIECE_BYTES
        self._connection._send(self, [*headers], body, sink)

    def leave(self, sink: Sink) -> None:
        """Give up on an answer: the stream is reset, and the connection serves the others as before."""
        if self.sink is sink:
            self._connection._leave(self)

    def pause_reading(self) -> None:
        """Stop the server, for this stream only: it may send what is left of the stream's window."""
        self.paused = True

    def resume_reading(self) -> None:
        """Go on after :meth:`pause_reading`."""
        if self.paused:
            self.paused = False
            self._connection._resume(self)

    def rtt_min_ns(self) -> int | None:
        """See :meth:`HTTP2Connection.rtt_min_ns`."""
        return self._connection.rtt_min_ns()

    def backlog_ns(self) -> int:
        """See :class:`~spanwire.net.carrier.Carrier`. A small request leaves at once."""
        return self._connection.backlog_ns() if self.is_large else 0


class HTTP2Connection(asyncio.Protocol):
    """A connection. Made by :func:`spanwire.net.dial.dial` as its protocol.

    Args:
        capacity: streams at once until the server has said how many: what it said the last time.
        on_capacity: told how many the server allows, whenever it says so.

    Attributes:
        capacity: streams at once: what the server allows, at most :data:`MAX_STREAMS`. May change at any time.
        arrival_ns: when the bytes that are being handed over arrived.
    """

    __slots__ = (
        "_address",
        "_closed",
        "_engine",
        "_going_away",
        "_ignored",
        "_in_read",
        "_next_id",
        "_on_capacity",
        "_partial",
        "_pid",
        "_round_trip",
        "_session_kept",
        "_streams",
        "_taken",
        "_touched",
        "_transport",
        "_unsent",
        "_uploads",
        "_waiting",
        "_why",
        "_write_paused",
        "arrival_ns",
        "capacity",
    )

    def __init__(
        self, address: str, *, capacity: int = MAX_STREAMS, on_capacity: Callable[[int], None] | None = None
    ) -> None:
        self._address = address
        self._pid = os.getpid()
        self._transport: asyncio.Transport | None = None
        self._round_trip = sockets.RoundTrip()
        self._session_kept = False
        self._engine = _Engine()
        self._closed = asyncio.get_running_loop().create_future()
        self._streams: dict[int, HTTP2Stream] = {}  # those that the server counts
        self._waiting: deque[HTTP2Stream] = deque()  # the server has lowered its limit since they were planned
        self._uploads: deque[HTTP2Stream] = deque()  # with a body that is not written yet
        self._unsent: list[HTTP2Stream] = []  # written, and not in the kernel's buffer yet
        self._touched: dict[HTTP2Stream, Sink] = {}  # by the read under way
        self._next_id = 1
        self._partial = b""  # a frame that has not come to its end
        self._in_read = False
        self._taken = 0  # bytes of all streams that were not acknowledged
        self._ignored = 0  # those of streams that were left, of which h2 has not heard
        self._going_away = False
        self._why = ""  # the server's reason for going away
        self._write_paused = False
        self._on_capacity = on_capacity
        self.capacity = capacity
        self.arrival_ns = 0

    # --- for the transport ------------------------------------------------------------------------------------------

    def stream(self) -> HTTP2Stream:
        """A stream for one exchange, opened by its :meth:`~HTTP2Stream.send`."""
        return HTTP2Stream(self)

    def usable(self) -> bool:
        """Whether it may take another stream, now or once one of those on it has ended."""
        return (
            not self._going_away
            and self._transport is not None
            and not self._transport.is_closing()
            and self._next_id + 2 * len(self._waiting) <= _MAX_STREAM_ID
        )

    def rtt_min_ns(self) -> int | None:
        """The kernel's minimum round trip to the peer (Linux), else the time of the TCP connect; None if unknown."""
        return self._round_trip.min_ns()

    def backlog_ns(self) -> int:
        """How long what the kernel has of our bytes takes to leave, in ns; estimated."""
        return self._round_trip.backlog_ns()

    def set_connect_rtt(self, rtt_ns: int | None, *, through_proxy: bool = False) -> None:
        """What the dial knows of the round trip: 0 for a unix socket. Behind a proxy the kernel's is only that to it."""
        self._round_trip.connect_ns = rtt_ns
        self._round_trip.through_proxy = through_proxy

    async def aclose(self) -> None:
        """Say GOAWAY, close in order and wait until it is done."""
        self._going_away = True
        self._lose_all(lambda _: ConnectionFailed("the connection was closed", endpoint=self._address, retryable=False))
        if self._transport is not None:
            self._say_goodbye()
            self._transport.close()
            await asyncio.shield(self._closed)

    def abort(self) -> None:
        """Close at once."""
        self._going_away = True
        if self._transport is None or self._closed.done() or self._pid != os.getpid():
            return  # in a forked child: the connection is the parent's, who goes on with it
        sockets.abort(self._transport, self._round_trip.socket)

    # --- for the streams --------------------------------------------------------------------------------------------

    def _send(self, stream: HTTP2Stream, headers: list[tuple[str, str]], body: bytes, sink: Sink) -> None:
        for name, _ in headers:
            if name in _FORBIDDEN:
                raise ConfigurationError(
                    f"the header {name!r} does not exist in HTTP/2; remove it, or use http_version 1.1",
                    endpoint=self._address,
                )
        if not self.usable():
            raise ConnectionFailed(
                "the connection was closed before the request was sent", endpoint=self._address, phase="send"
            )
        stream.headers = [(name.encode(), value.encode()) for name, value in headers]
        stream.sink = sink
        stream.rest = memoryview(body)
        self._waiting.append(stream)
        self._open_waiting()

    def _open_waiting(self) -> None:
        """Open streams that are due, in order, as far as the server's limit allows; during a read at its end."""
        if self._in_read:
            return
        while self._waiting and len(self._streams) < self.capacity and not self._is_over():
            stream = self._waiting.popleft()
            stream.id, self._next_id = self._next_id, self._next_id + 2
            self._streams[stream.id] = stream
            stream.opened_ns = time.perf_counter_ns()
            headers, stream.headers = stream.headers, []
            self._engine.send_headers(stream.id, headers, end_stream=not stream.rest)
            (self._uploads if stream.rest else self._unsent).append(stream)
        self._write_on()

    def _write_on(self) -> None:
        """Write what the windows and the kernel's buffer take of the bodies: a frame of each in turn."""
        engine, uploads = self._engine, self._uploads
        blocked = written = 0
        while blocked < len(uploads) and not self._write_paused and not self._is_over():
            stream = uploads.popleft()
            window = engine.local_flow_control_window(stream.id)
            # nginx takes frames of 16 MiB: one of that size would wait in our buffer, in front of everything else.
            size = min(len(stream.rest), window, engine.max_outbound_frame_size, _PIECE_BYTES)
            if size <= 0:
                uploads.append(stream)
                blocked += 1
                continue
            blocked = 0
            piece, stream.rest = stream.rest[:size], stream.rest[size:]
            engine.send_data(stream.id, piece, end_stream=not stream.rest)
            (uploads if stream.rest else self._unsent).append(stream)
            written += size
            if written >= _PIECE_BYTES:  # asyncio buffers what TLS makes of it without telling
                written = 0
                self._flush()
        self._flush()
        if self._unsent and not self._write_paused:
            self._tell_sent()

    def _tell_sent(self) -> None:
        unsent, self._unsent = self._unsent, []
        for stream in unsent:
            if stream.sink is not None:
                stream.sink.on_sent()

    def _leave(self, stream: HTTP2Stream) -> None:
        if stream.id and self.arrival_ns < stream.opened_ns < time.perf_counter_ns() - _SILENCE_NS:
            self._going_away = (
                True  # perhaps the peer is gone without a word: the next call dials, and does not wait too
            )
        self._reset(stream, ErrorCodes.CANCEL)
        self._open_waiting()
        self._close_if_done()

    def _reset(self, stream: HTTP2Stream, code: ErrorCodes) -> None:
        """End a stream that may be in any state but ended."""
        self._forget(stream)
        if stream.id and not self._is_over():
            self._engine.reset_stream(stream.id, code)

    def _forget(self, stream: HTTP2Stream) -> None:
        stream.sink = None
        self._touched.pop(stream, None)
        if self._streams.pop(stream.id, None) is None and stream in self._waiting:
            self._waiting.remove(stream)
        if stream.rest:
            stream.rest = memoryview(b"")
            if stream in self._uploads:
                self._uploads.remove(stream)

    def _resume(self, stream: HTTP2Stream) -> None:
        if stream.sink is not None and not self._is_over():
            self._acknowledge(stream)
            self._flush()

    def _acknowledge(self, stream: HTTP2Stream) -> None:
        if stream.taken >= STREAM_WINDOW_BYTES // 2 and not stream.paused:
            self._engine.increment_flow_control_window(stream.taken, stream.id)
            stream.taken = 0

    def _is_over(self) -> bool:
        """Nothing is to be written any more."""
        return (
            self._transport is None
            or self._transport.is_closing()
            or self._engine.state_machine.state is ConnectionState.CLOSED
            or self._pid != os.getpid()  # the connection is the parent's, who goes on with it
        )

    def _flush(self) -> None:
        """Write what h2 has ready; during a read at its end."""
        if self._in_read or self._transport is None:
            return
        data = self._engine.data_to_send()
        if not data or self._pid != os.getpid() or self._transport.is_closing():
            return
        if self._closed.get_loop().is_closed():
            self.abort()  # nobody else will ever end the connection
        else:
            self._transport.write(data)

    # --- asyncio.Protocol -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        # Told as soon as the kernel does not take everything, so that the end of a large prompt's upload is seen. Not
        # high=0: with TLS, asyncio then pauses at every write and never says that writing goes on.
        self._transport.set_write_buffer_limits(high=1, low=0)
        self._round_trip.socket = transport.get_extra_info("socket")
        sockets.limit_unsent(self._round_trip.socket)
        sockets.limit_reads(transport)
        self._engine.initiate_connection()
        self._engine.increment_flow_control_window(CONNECTION_WINDOW_BYTES - _DEFAULT_WINDOW_BYTES)
        self._flush()

    def data_received(self, data: bytes) -> None:
        if self._is_over():
            return
        self.arrival_ns = time.perf_counter_ns()
        if self._partial:
            data = self._partial + data
        at, end = 0, len(data)
        self._in_read = True
        # One frame at a time: h2 keeps what it has understood of several to itself when it does not like the last one.
        while end - at >= _FRAME_HEADER_BYTES:
            size = int.from_bytes(data[at : at + 3], "big")
            if size > self._engine.max_inbound_frame_size:
                what = "HTTP/1.1" if data[at : at + 5] == b"HTTP/" else f"a frame of {size} bytes"
                self._break(0, f"something that is not HTTP/2 ({what})", None)
                return
            stop = at + _FRAME_HEADER_BYTES + size
            if stop > end:
                break
            self._frame(data[at:stop])
            at = stop
            if self._is_over():
                self._in_read = False
                return
        self._partial = data[at:]
        self._in_read = False
        self._end_read()

    def _end_read(self) -> None:
        if self._taken >= CONNECTION_WINDOW_BYTES // 2:
            self._engine.increment_flow_control_window(self._taken)
            self._taken = 0
        touched, self._touched = self._touched, {}
        for stream, sink in touched.items():
            try:
                sink.on_batch()
            except Exception as error:  # noqa: BLE001 - a bug in a codec is the call's error, not the connection's
                self._drop(stream, sink, self._raised(error))
        if self._is_over():
            return
        self._open_waiting()
        transport = self._transport
        if self._write_paused and transport is not None and transport.get_write_buffer_size() > _MAX_UNREAD_BYTES:
            self._break(0, "more frames that ask for an answer than it reads answers", None)
        self._close_if_done()

    def _close_if_done(self) -> None:
        """The server is closing the connection: so do we, after the last exchange."""
        if self._going_away and not self._streams and not self._in_read and not self._is_over():
            self._say_goodbye()
            cast(asyncio.Transport, self._transport).close()

    def eof_received(self) -> None:
        return None  # the transport closes itself; connection_lost follows

    def connection_lost(self, error: Exception | None) -> None:
        self._going_away = True
        if not self._closed.done():
            self._closed.set_result(None)
        self.arrival_ns = time.perf_counter_ns()
        self._touched = {}
        # After an answer an alert means something else.
        refused = None if self._session_kept else certificate_refused(self._address, error)
        self._lose_all(lambda stream: refused or self._broken(stream, error))

    def pause_writing(self) -> None:
        self._write_paused = True

    def resume_writing(self) -> None:
        self._write_paused = False
        self._write_on()

    # --- what the server says ---------------------------------------------------------------------------------------

    def _frame(self, frame: bytes) -> None:
        number = int.from_bytes(frame[5:9], "big") & _MAX_STREAM_ID
        if frame[3] == DataFrame.type and number not in self._streams and number % 2 and number < self._next_id:
            self._ignore(len(frame) - _FRAME_HEADER_BYTES)
            return
        try:
            events = self._engine.receive_data(frame)
        except Exception as error:  # noqa: BLE001 - h2 has errors of its own for nearly all that a server can do wrong
            self._break(number, _words(error), error)
            return
        for event in events:
            kind = type(event)
            if kind is DataReceived:
                self._on_data(cast(DataReceived, event))
            elif kind is StreamEnded:
                self._on_end(cast(StreamEnded, event).stream_id)
            elif kind is ResponseReceived:
                self._on_head(cast(ResponseReceived, event))
            elif kind is TrailersReceived:
                self._on_trailers(cast(TrailersReceived, event))
            elif kind is StreamReset:
                self._on_reset(cast(StreamReset, event))
            elif kind is RemoteSettingsChanged:
                self.capacity = min(self._engine.remote_settings.max_concurrent_streams, MAX_STREAMS)
                if self._on_capacity is not None:
                    self._on_capacity(self.capacity)
            elif kind is ConnectionTerminated:
                self._on_goaway(cast(ConnectionTerminated, event))
            elif kind is RequestReceived:
                self._break(0, "a request", None)

    def _ignore(self, size: int) -> None:
        """Data of a stream that was left: it counts for the connection's window, and h2 would answer each with a reset."""
        self._ignored += size
        if self._ignored >= CONNECTION_WINDOW_BYTES // 4:
            # Not by h2, which does not know that these bytes came: its count and the server's are equal again.
            if self._transport is not None and not self._is_over():
                self._transport.write(WindowUpdateFrame(0, window_increment=self._ignored).serialize())
            self._ignored = 0

    def _on_head(self, event: ResponseReceived) -> None:
        stream = self._streams.get(event.stream_id)
        if stream is None or stream.sink is None:
            return
        sink = stream.sink
        self._touch(stream, sink)
        if not self._session_kept:  # tickets come behind the handshake, before any answer
            self._session_kept = True
            if self._transport is not None:
                remember_session(self._transport.get_extra_info("ssl_object"))
        headers: dict[str, str] = {}
        status = ""
        for raw_name, raw_value in cast("Iterable[tuple[bytes, bytes]]", event.headers):
            name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
            if name == ":status":
                status = value
            else:
                headers[name] = f"{headers[name]}, {value}" if name in headers else value
        if len(status) != 3 or not (status.isascii() and status.isdigit()) or status < "200":
            what = f"the server sent status {status[:20]!r}, which HTTP does not have"
            self._drop(stream, sink, ProtocolError(what, endpoint=self._address))
            return
        try:
            sink.on_head(int(status), headers)
        except Exception as error:  # noqa: BLE001 - a bug in a codec is the call's error, not the connection's
            self._drop(stream, sink, self._raised(error))

    def _on_trailers(self, event: TrailersReceived) -> None:
        stream = self._streams.get(event.stream_id)
        if stream is None or stream.sink is None:
            return
        sink = stream.sink
        self._touch(stream, sink)
        trailers: dict[str, str] = {}
        for raw_name, raw_value in cast("Iterable[tuple[bytes, bytes]]", event.headers):
            name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
            trailers[name] = f"{trailers[name]}, {value}" if name in trailers else value
        try:
            sink.on_trailers(trailers)
        except Exception as error:  # noqa: BLE001 - a bug in a codec is the call's error, not the connection's
            self._drop(stream, sink, self._raised(error))

    def _on_data(self, event: DataReceived) -> None:
        size = event.flow_controlled_length
        self._taken += size
        stream = self._streams.get(event.stream_id)
        if stream is None or stream.sink is None:
            return
        sink = stream.sink
        self._touch(stream, sink)
        if event.stream_ended is None:
            stream.taken += size
            self._acknowledge(stream)
        if event.data:
            try:
                sink.on_body(event.data)
            except Exception as error:  # noqa: BLE001 - a bug in a codec is the call's error, not the connection's
                self._drop(stream, sink, self._raised(error))

    def _touch(self, stream: HTTP2Stream, sink: Sink) -> None:
        self._touched[stream] = sink
        stream.arrival_ns = self.arrival_ns
        if not stream.first_arrival_ns:
            stream.first_arrival_ns = self.arrival_ns

    def _on_end(self, number: int) -> None:
        stream = self._streams.get(number)
        if stream is None or stream.sink is None:
            return
        sink = stream.sink
        stream.arrival_ns = self.arrival_ns
        if stream.rest:  # answered before it had read the request to its end: nobody wants the rest
            self._reset(stream, ErrorCodes.NO_ERROR)
        else:
            self._forget(stream)
        self._touched[stream] = sink
        try:
            sink.on_end()
        except Exception as error:  # noqa: BLE001 - a bug in a codec is the call's error, not the connection's
            self._tell_lost(stream, sink, self._raised(error))

    def _on_reset(self, event: StreamReset) -> None:
        stream = self._streams.get(event.stream_id)
        if stream is None or stream.sink is None:
            return
        sink = stream.sink
        self._forget(stream)
        stream.arrival_ns = self.arrival_ns
        code = _name(event.error_code)
        error: SpanwireError
        if not event.remote_reset:
            error = ProtocolError(f"the server broke the rules of HTTP/2 ({code})", endpoint=self._address)
        elif event.error_code == ErrorCodes.REFUSED_STREAM:
            error = ConnectionFailed(
                "the server refused the request before it looked at it (REFUSED_STREAM)",
                endpoint=self._address,
                phase="wait",
            )
        elif stream.first_arrival_ns:
            what = f"the server broke off in the middle of the answer ({code})"
            error = ConnectionFailed(what, endpoint=self._address, phase="read")
        else:
            what = f"the server broke off before anything of the answer came ({code})"
            error = ConnectionFailed(what, endpoint=self._address, phase="wait")
        self._tell_lost(stream, sink, error)

    def _on_goaway(self, event: ConnectionTerminated) -> None:
        self._going_away = True
        if event.error_code:
            self._why = f" ({_name(event.error_code)})"
        last = event.last_stream_id or 0
        untouched = [stream for number, stream in self._streams.items() if number > last]
        for stream in [*untouched, *self._waiting]:
            sink = stream.sink
            self._reset(stream, ErrorCodes.CANCEL)
            if sink is not None:
                what = f"the server is closing the connection and did not look at the request{self._why}"
                self._tell_lost(stream, sink, ConnectionFailed(what, endpoint=self._address, phase="wait"))

    # --- the bad ends -----------------------------------------------------------------------------------------------

    def _drop(self, stream: HTTP2Stream, sink: Sink, error: SpanwireError) -> None:
        """Our side cannot go on with this answer."""
        if stream.sink is sink:
            self._reset(stream, ErrorCodes.CANCEL)
        self._tell_lost(stream, sink, error)

    def _tell_lost(self, stream: HTTP2Stream, sink: Sink, error: SpanwireError) -> None:
        self._touched.pop(stream, None)
        try:
            sink.on_lost(error)
        except Exception:  # noqa: BLE001 - the others have to be told too
            if not self._closed.get_loop().is_closed():
                _log.warning("an exchange failed to take its error", exc_info=True)

    def _lose_all(self, error: Callable[[HTTP2Stream], SpanwireError]) -> None:
        lost = [*self._streams.values(), *self._waiting]
        for stream in lost:
            sink = stream.sink
            self._forget(stream)
            stream.arrival_ns = self.arrival_ns
            if sink is not None:
                self._tell_lost(stream, sink, error(stream))
        self._unsent = []

    def _broken(self, stream: HTTP2Stream, error: Exception | None) -> ConnectionFailed:
        """What a lost connection is to an exchange on it."""
        words = f": {error.strerror or error}{self._why}" if isinstance(error, OSError) else self._why
        if stream.first_arrival_ns:
            what, phase = "the connection broke in the middle of the answer", "read"
        elif stream.id:
            what, phase = "the connection was closed before anything of the answer came", "wait"
        else:
            what, phase = "the connection was closed before the request was sent", "send"
        failed = ConnectionFailed(f"{what}{words}", endpoint=self._address, phase=phase)
        failed.__cause__ = error
        return failed

    def _break(self, number: int, what: str, cause: Exception | None) -> None:
        """The server sent what it must not: the exchange of that stream ends with it, or all if it was of none."""
        self._going_away = True
        self._in_read = False
        culprit = self._streams.get(number)

        def error(stream: HTTP2Stream) -> SpanwireError:
            if culprit is not None and stream is not culprit:
                return self._broken(stream, None)
            wrong = ProtocolError(f"the server sent {what}", endpoint=self._address)
            wrong.__cause__ = cause
            return wrong

        self._say_goodbye()
        self._lose_all(error)
        if self._transport is not None:
            self._transport.abort()

    def _raised(self, error: Exception) -> SpanwireError:
        """What a sink has raised, as the exchange's error."""
        if isinstance(error, SpanwireError):
            return error
        wrong = ProtocolError("the server sent an answer that could not be handled", endpoint=self._address)
        wrong.__cause__ = error
        return wrong

    def _say_goodbye(self) -> None:
        """GOAWAY, unless it was said."""
        if not self._is_over():
            self._engine.close_connection()
        self._flush()


def _name(code: ErrorCodes | int | None) -> str:
    return code.name if isinstance(code, ErrorCodes) else f"error {code}"


def _words(error: Exception) -> str:
    if isinstance(error, DenialOfServiceError):
        return f"a head over {MAX_HEAD_BYTES} bytes"
    if isinstance(error, InvalidBodyLengthError):
        return f"{error.actual_length} bytes where its content-length says {error.expected_length}"
    if isinstance(error, NoSuchStreamError):  # whose own words are the number alone
        return f"something that is not HTTP/2 (a frame of stream {error.stream_id}, which is not open)"
    return f"something that is not HTTP/2 ({str(error) or type(error).__name__})"
