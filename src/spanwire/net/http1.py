"""One HTTP/1.1 client connection over llhttp (``httptools``): direct TCP, TLS or unix socket, one exchange at a time.

Parsing is llhttp's; this module moves bytes, keeps the times at which they arrived, and knows when the connection may
be used again. The bytes of an answer go to a :class:`~spanwire.net.carrier.Sink` as they come, without a copy and without a task.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import cast

import httptools

from ..errors import ConnectionFailed, ProtocolError, SpanwireError
from . import sockets
from .carrier import Sink
from .failures import certificate_refused
from .tls import remember_session

__all__ = ["MAX_HEAD_BYTES", "HTTP1Connection"]

#: llhttp sets no limit of its own; 64 KiB is what nginx, Node and h11 take at most by default, rounded up.
MAX_HEAD_BYTES = 64 * 1024
#: A request over this size is written in pieces, in bytes: what the kernel's buffer takes at once, or a few times that.
_PIECE_BYTES = 64 * 1024
#: Left of the server's ``Keep-Alive: timeout``, so that a request does not cross its close on the wire.
_KEEP_ALIVE_MARGIN_S = 1.0


#: Names as servers write them, to what they are. Servers decide what is in it, so it has a bound.
_names: dict[bytes, str] = {}


def _learn(raw_name: bytes) -> str:
    name = raw_name.decode("latin-1").lower()
    if len(_names) < 256 and len(raw_name) <= 64:
        _names[raw_name] = name
    return name


class HTTP1Connection(asyncio.Protocol):
    """A connection. Made by :func:`spanwire.net.dial.dial` as its protocol.

    Attributes:
        arrival_ns: when the bytes that are being handed over arrived.
        first_arrival_ns: when the first bytes of the current answer arrived, 0 before.
    """

    __slots__ = (
        "_address",
        "_body",
        "_body_end",
        "_closed",
        "_final",
        "_head_bytes",
        "_headers",
        "_in_head",
        "_is_large",
        "_keep_alive",
        "_keep_alive_asked",
        "_keep_alive_until_ns",
        "_parser",
        "_pid",
        "_refused",
        "_rest",
        "_round_trip",
        "_session_kept",
        "_sink",
        "_transport",
        "_until_eof",
        "_write_paused",
        "arrival_ns",
        "first_arrival_ns",
        "on_body",
        "paused",
    )

    def __init__(self, address: str) -> None:
        self._address = address
        self._pid = os.getpid()
        self._transport: asyncio.Transport | None = None
        self._round_trip = sockets.RoundTrip()
        self._body: list[bytes] = []  # of one read, in the pieces that its chunks make
        self._body_end = -1  # as many of them belong to the answer, once that has ended; -1 before
        # Looked up once, by the parser: a call of Python for every chunk costs more than all the parsing.
        self.on_body = self._body.append
        self._parser = httptools.HttpResponseParser(self)
        self._sink: Sink | None = None
        self._closed = asyncio.get_running_loop().create_future()
        self._keep_alive = True
        self._keep_alive_until_ns = 0
        self._keep_alive_asked = ""
        self._in_head = False
        self._final = False
        self._until_eof = False
        self._head_bytes = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._write_paused = False
        self._is_large = False
        self._rest: memoryview | bytes = b""
        self._session_kept = False
        self._refused: ConnectionFailed | None = None
        self.arrival_ns = 0
        self.first_arrival_ns = 0
        self.paused = False

    # --- for the transport ------------------------------------------------------------------------------------------

    def send(self, request: bytes, sink: Sink) -> bool:
        """Write a whole request. Returns whether it is in the kernel's buffer already; else ``sink.on_sent`` follows."""
        if self._transport is None or self._sink is not None or not self.usable():
            raise self._refused or ConnectionFailed(
                "the connection was closed before the request was sent", endpoint=self._address, phase="send"
            )
        self._sink = sink
        self._in_head = True
        self._final = False
        self._head_bytes = 0
        self._headers = []
        self.first_arrival_ns = 0
        self._is_large = len(request) > _PIECE_BYTES
        if not self._is_large:
            self._transport.write(request)
        else:
            self._rest = memoryview(request)
            self._write_on()
        return not self._sending()

    def _sending(self) -> bool:
        return self._write_paused or bool(self._rest)

    def _write_on(self) -> None:
        """Write a large request in pieces: asyncio buffers what TLS makes of it without telling."""
        while self._rest and not self._write_paused and self._transport is not None:
            piece, self._rest = self._rest[:_PIECE_BYTES], self._rest[_PIECE_BYTES:]
            self._transport.write(piece)

    def usable(self) -> bool:
        """Whether it may take another request, now or after the answer that is under way."""
        if not self._keep_alive or self._transport is None or self._transport.is_closing():
            return False
        if not self._keep_alive_until_ns or self._sink is not None:
            return True
        return time.perf_counter_ns() < self._keep_alive_until_ns

    def leave(self, sink: Sink) -> None:
        """Give up on an answer. HTTP/1.1 has no other way to tell the server than to close."""
        if self._sink is sink:
            self._sink = None
            self.abort()

    def pause_reading(self) -> None:
        """Stop the peer: the kernel's buffer fills, and TCP holds the server."""
        if not self.paused and self._transport is not None and not self._transport.is_closing():
            self.paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Go on after :meth:`pause_reading`."""
        if self.paused:
            self.paused = False
            if self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()

    def rtt_min_ns(self) -> int | None:
        """See :meth:`spanwire.net.sockets.RoundTrip.min_ns`."""
        return self._round_trip.min_ns()

    def backlog_ns(self) -> int:
        """See :class:`spanwire.net.carrier.Carrier`. A small request leaves at once."""
        return self._round_trip.backlog_ns() if self._is_large else 0

    def set_connect_rtt(self, rtt_ns: int | None, *, through_proxy: bool = False) -> None:
        """What the dial knows of the round trip: 0 for a unix socket. Behind a proxy the kernel's is only that to it."""
        self._round_trip.connect_ns = rtt_ns
        self._round_trip.through_proxy = through_proxy

    async def aclose(self) -> None:
        """Close in order and wait until it is done."""
        self._keep_alive = False
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.on_lost(ConnectionFailed("the connection was closed", endpoint=self._address, retryable=False))
        if self._transport is not None:
            self._transport.close()
            await asyncio.shield(self._closed)

    def abort(self) -> None:
        """Close at once."""
        self._keep_alive = False
        self._rest = b""
        if self._transport is None or self._closed.done() or self._pid != os.getpid():
            return  # in a forked child: the connection is the parent's, who goes on with it
        sockets.abort(self._transport, self._round_trip.socket)

    # --- asyncio.Protocol -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        # Told as soon as the kernel does not take everything, so that the end of a large prompt's upload is seen. Not
        # high=0: with TLS, asyncio then pauses at every write and never says that writing goes on.
        self._transport.set_write_buffer_limits(high=1, low=0)
        self._round_trip.socket = transport.get_extra_info("socket")
        sockets.limit_unsent(self._round_trip.socket)
        sockets.limit_reads(transport)

    def data_received(self, data: bytes) -> None:
        now_ns = self.arrival_ns = time.perf_counter_ns()
        sink = self._sink
        if sink is None:
            self._drop()  # nobody asked: an early 408, or leftovers of a broken server
            return
        if not self.first_arrival_ns:
            self.first_arrival_ns = now_ns
        if self._in_head:
            self._head_bytes += len(data)
        failure: SpanwireError | None = None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            failure = self._raised(error.__context__ or error)
        except httptools.HttpParserUpgrade as error:
            failure = self._not_http("a switch of protocols that nobody asked for", error)
        except httptools.HttpParserError as error:
            failure = self._not_http(f"something that is not HTTP/1.1 ({error})", error)
        try:
            body = self._body
            if body:  # what came before a failure is handed over too
                end = self._body_end
                whole = body[0] if len(body) == 1 and end else b"".join(body if end < 0 else body[:end])
                body.clear()
                if whole and self._sink is sink:
                    sink.on_body(whole)
            if self._body_end >= 0:
                if failure is not None:  # of what came after the answer
                    self._keep_alive = False
                self._message_end(sink)
            elif failure is not None:
                self._fail(failure)
                return
            elif self._in_head and self._head_bytes > MAX_HEAD_BYTES:
                # Before the next read: at most one read's size over the limit is kept.
                self._fail(ProtocolError(f"the answer's head is over {MAX_HEAD_BYTES} bytes", endpoint=self._address))
                return
            sink.on_batch()
        except Exception as error:  # noqa: BLE001 - a bug in a codec is the call's error, not the event loop's
            body.clear()
            self._fail(self._raised(error))

    def eof_received(self) -> None:
        return None  # the transport closes itself; connection_lost follows

    def connection_lost(self, error: Exception | None) -> None:
        self._keep_alive = False
        if not self._closed.done():
            self._closed.set_result(None)
        sink, self._sink = self._sink, None
        # After an answer an alert means something else.
        refused = None if self._session_kept else certificate_refused(self._address, error)
        if sink is None:
            self._refused = refused
            return
        self.arrival_ns = time.perf_counter_ns()
        if self._until_eof and error is None and not self._in_head:
            self._end(sink)
            return
        words = f": {error.strerror or error}" if isinstance(error, OSError) else ""
        if self.first_arrival_ns:
            what, phase = "the connection broke in the middle of the answer", "read"
        else:
            what, phase = "the connection was closed before anything of the answer came", "wait"
        failed = refused or ConnectionFailed(f"{what}{words}", endpoint=self._address, phase=phase)
        failed.__cause__ = error
        sink.on_lost(failed)

    def pause_writing(self) -> None:
        self._write_paused = True

    def resume_writing(self) -> None:
        self._write_paused = False
        self._write_on()
        if self._sink is not None and not self._sending():
            self._sink.on_sent()

    # --- httptools callbacks ----------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._sink is None or not self._in_head:
            self._keep_alive = False  # a second answer to one request

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            self._headers.append((name, value))
        elif self._final and self._body_end < 0:  # a trailer
            self._head_bytes += len(name) + len(value)
            if self._head_bytes > MAX_HEAD_BYTES:
                raise ProtocolError(f"the answer's trailers are over {MAX_HEAD_BYTES} bytes", endpoint=self._address)
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self._body_end >= 0 or self._sink is None:  # of a second answer
            return
        status = self._parser.get_status_code()
        if status < 200:
            self._interim(status)
            return
        if (  # whole in one read, perhaps with the body's beginning
            self._head_bytes > MAX_HEAD_BYTES
            and sum(len(name) + len(value) for name, value in self._headers) > MAX_HEAD_BYTES
        ):
            raise ProtocolError(f"the answer's head is over {MAX_HEAD_BYTES} bytes", endpoint=self._address)
        self._in_head = False
        self._final = True
        if not self.first_arrival_ns:
            self.first_arrival_ns = self.arrival_ns
        headers = self._take_headers()
        self._head_bytes = 0
        if not self._session_kept:  # tickets come behind the handshake, before any answer
            self._session_kept = True
            if self._transport is not None:
                remember_session(self._transport.get_extra_info("ssl_object"))
        self._until_eof = "content-length" not in headers and "transfer-encoding" not in headers
        self._keep_alive_asked = headers.get("keep-alive", "")
        self._sink.on_head(status, headers)

    def _take_headers(self) -> dict[str, str]:
        taken, self._headers = self._headers, []
        headers: dict[str, str] = {}
        for raw_name, raw_value in taken:
            name, value = _names.get(raw_name) or _learn(raw_name), raw_value.decode("latin-1").strip(" \t")
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
        return headers

    def _interim(self, status: int) -> None:
        """1xx: the final head follows."""
        if status < 100:  # llhttp lets it pass, with a body; RFC 9110 section 15 knows no such class
            raise ProtocolError(f"the server sent status {status:03}, which HTTP does not have", endpoint=self._address)
        if any(
            name.lower() in (b"content-length", b"transfer-encoding") and value != b"0" for name, value in self._headers
        ):  # RFC 9110 section 15.2: it has none. llhttp would hand over a body
            raise ProtocolError(f"the server sent an interim answer ({status}) with a body", endpoint=self._address)
        self._headers = []
        self.first_arrival_ns = 0  # of the final answer, which may come much later

    def on_message_complete(self) -> None:
        if self._final and self._body_end < 0:  # neither the end of a 1xx answer nor of a second one
            self._body_end = len(self._body)
            if self._keep_alive and not self._parser.should_keep_alive():
                self._keep_alive = False

    def _message_end(self, sink: Sink) -> None:
        self._body_end = -1
        self._final = False
        if self._sink is not sink:  # it has left while the last bytes were handed over
            return
        self._sink = None
        self._keep_alive_until_ns = 0
        if self._keep_alive_asked:
            self._hear_keep_alive(self._keep_alive_asked)
        if self._write_paused or self._rest:  # answered before it had read the request to its end: the rest would go
            self.abort()  # to the next call
        elif not self._keep_alive and self._transport is not None:
            self._transport.close()
        self._end(sink)

    def _hear_keep_alive(self, asked: str) -> None:
        for item in asked.split(","):
            key, _, number = item.strip().partition("=")
            if key.lower() == "timeout" and number.isascii() and number.isdigit():
                seconds = float(number[:9])
                left_s = seconds - _KEEP_ALIVE_MARGIN_S if seconds > _KEEP_ALIVE_MARGIN_S else seconds / 2
                self._keep_alive_until_ns = self.arrival_ns + int(left_s * 1e9)

    def _end(self, sink: Sink) -> None:
        try:
            if self._headers:
                sink.on_trailers(self._take_headers())
            sink.on_end()
        except Exception as error:  # noqa: BLE001 - a bug in a codec is the call's error, not the event loop's
            self._drop()
            sink.on_lost(self._raised(error))

    def _raised(self, error: BaseException) -> SpanwireError:
        """What a sink has raised, as the exchange's error."""
        if isinstance(error, SpanwireError):
            return error
        return self._not_http("an answer that could not be handled", error)

    # --- the bad ends -----------------------------------------------------------------------------------------------

    def _not_http(self, what: str, cause: BaseException) -> ProtocolError:
        error = ProtocolError(f"the server sent {what}", endpoint=self._address)
        error.__cause__ = cause
        return error

    def _fail(self, error: SpanwireError) -> None:
        sink, self._sink = self._sink, None
        self._drop()
        if sink is not None:
            sink.on_lost(error)

    def _drop(self) -> None:
        self._keep_alive = False
        if self._transport is not None:
            self._transport.abort()
