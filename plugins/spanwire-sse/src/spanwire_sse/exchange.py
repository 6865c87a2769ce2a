"""One call on an HTTP/1.1 connection: takes the answer's bytes for what they are, and fills the inbox.

What was asked for does not decide how an answer is read, since servers and proxies answer with what they have: a body
that begins like JSON is read as a whole answer (or an error object), HTML is refused, anything else is an event stream,
whatever the content type says. A stream where a whole answer was asked for is joined by whoever reads the chunks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NoReturn
from urllib.parse import urlsplit

from spanwire.calls import Chunk
from spanwire.errors import MessageTooBig, ProtocolError, ServerError, SpanwireError, Truncated
from spanwire.net.carrier import Carrier
from spanwire.net.proxies import Proxy
from spanwire.net.tunnel import credentials_wanted
from spanwire.transport import Attempt, Head, Inbox, Item
from spanwire.wire.advice import advice
from spanwire.wire.retry_after import retry_after_s
from spanwire.wire.sse import EventStreamParser

from .codec import AnswerDecoder, Codec
from .decompress import decompressor

__all__ = ["ForwardedExchange", "HTTPExchange"]

#: How much of the body of an error status is read, in bytes.
_ERROR_BODY_BYTES = 64 * 1024
#: A request's last bytes leave the kernel in less, in ns, and it is not worth telling.
_BACKLOG_NS = 1_000_000
#: How much may come between the terminal event and the end of the message until the connection is left, in bytes.
_OVERTIME_BYTES = 64 * 1024
_BOM = b"\xef\xbb\xbf"


class HTTPExchange(Inbox):
    """The :class:`~spanwire.net.carrier.Sink` of one answer; its reading side is :class:`~spanwire.transport.Inbox`."""

    __slots__ = (
        "_attempt",
        "_backlog_ns",
        "_body",
        "_codec",
        "_decode",
        "_decoder",
        "_decompress",
        "_finished",
        "_head",
        "_http",
        "_last_item",
        "_marks",
        "_max_bytes",
        "_parser",
        "_paused_since_ns",
        "_released",
        "_size",
        "_take",
        "_unpacked_whole",
        "on_body",
    )

    def __init__(self, http: Carrier, codec: Codec, decoder: AnswerDecoder, attempt: Attempt) -> None:
        super().__init__()
        self._http = http
        self._codec = codec
        self._decoder = decoder
        self._decode = decoder.event
        self._attempt = attempt
        self._marks = attempt.marks
        self._max_bytes = attempt.endpoint.limits.max_event_bytes
        self._finished = False
        self._released = False
        self._decompress: Callable[[bytes], None] | None = None
        self._unpacked_whole: Callable[[], bool] | None = None
        self._parser: EventStreamParser | None = None
        self._body: list[bytes] = []
        self._size = 0
        self._take: Callable[[bytes], None] = self._sniff
        self.on_body: Callable[[bytes], None] = self._sniff
        self._paused_since_ns = 0
        self._backlog_ns = 0
        self._last_item: Item | None = None  # whose arrival is on the marks
        self._head = Head()

    @property
    def head(self) -> Head:
        """With what the events have told by now."""
        head, decoder = self._head, self._decoder
        head.id, head.model, head.usage = decoder.id, decoder.model, getattr(decoder, "usage", None)
        head.late_events = getattr(decoder, "late_events", ())
        return head

    # --- sending ----------------------------------------------------------------------------------------------------

    def on_sent(self) -> None:
        if not self._marks.sent_ns:
            self._marks.sent_ns = time.perf_counter_ns()
            self._marks.end("send", self._marks.sent_ns)
            self._backlog_ns = self._http.backlog_ns()

    def _count_backlog(self) -> None:
        """A large request had not left when the kernel had it. Only now: its end may not lie after the answer."""
        marks = self._marks
        kernel_ns = marks.sent_ns
        latest_ns = marks.first_byte_ns - (self._http.rtt_min_ns() or 0)
        marks.sent_ns = max(kernel_ns, min(kernel_ns + self._backlog_ns, latest_ns))
        marks.parts.append(("backlog", kernel_ns, marks.sent_ns))

    # --- receiving --------------------------------------------------------------------------------------------------

    def on_head(self, status: int, headers: dict[str, str]) -> None:
        self._marks.first_byte_ns = self._http.first_arrival_ns
        self.on_sent()  # if not before: it answers without having read the request to its end
        if self._backlog_ns > _BACKLOG_NS:
            self._count_backlog()
        self._head.status = status
        self._head.headers = headers
        if not 200 <= status < 300:
            self._take = self._collect_error
        encoding = headers.get("content-encoding", "").strip().lower()
        if encoding not in ("", "identity"):
            strict = self._take == self._sniff
            self._decompress, self._unpacked_whole = decompressor(encoding, self._unpacked, strict=strict)
            self.on_body = self._decompress
        else:
            self.on_body = self._take

    def _unpacked(self, plain: bytes) -> None:
        self._take(plain)  # which changes: not `self._take` itself

    def _overtime(self, data: bytes) -> None:
        """What comes after the terminal event belongs to nobody, and much of it is worth no connection."""
        self._size += len(data)
        if self._size > _OVERTIME_BYTES:
            self._http.leave(self)
            self._release()

    def on_batch(self) -> None:
        items = self._items
        if not self._finished:
            now_ns = self._marks.last_byte_ns = self._http.arrival_ns
            if items and items[-1] is not self._last_item:  # as `_stamp`
                self._last_item = items[-1]
                self._marks.last_chunk_ns = now_ns
        waiter = self._waiter
        if waiter is not None and (items or self._ended):  # as `wake`, without a step for each token
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)
        elif len(items) >= self._high:
            self.wake()

    def _stamp(self) -> None:
        """Once for each read, and not for each event: when the last chunk came."""
        items = self._items
        if items and items[-1] is not self._last_item:
            self._last_item = items[-1]
            self._marks.last_chunk_ns = self._http.arrival_ns

    def _stamp_last(self, last: Item) -> None:
        """The chunk of the answer's end: of what did come now, or where nothing else came."""
        marks, now_ns = self._marks, self._http.arrival_ns
        if isinstance(last, Chunk) and last.has_content:
            marks.first_chunk_ns = marks.first_chunk_ns or now_ns
            marks.first_content_ns = marks.first_content_ns or now_ns
            marks.last_chunk_ns = now_ns
        elif marks.first_chunk_ns and not marks.last_chunk_ns:
            marks.last_chunk_ns = now_ns

    def _sniff(self, data: bytes) -> None:
        if self._body or data[:5] != b"data:":  # else it is what nearly every stream begins with
            start = b"".join([*self._body, data])
            text = start.removeprefix(_BOM).lstrip(b" \t\r\n")
            blank = _short(start[: len(start) - len(text)])
            if not text or (not blank and _BOM.startswith(text)):
                self._body = [blank, text]
                return
            self._body = []
            if text[:1] in (b"{", b"[", b"<"):
                self._marks.first_chunk_ns = self._http.arrival_ns  # blank heartbeats may have come long before
                self._head.streamed = False
                self._use(self._collect)
                self._collect(text)
                return
            data = blank + text
        self._head.streamed = True
        self._parser = EventStreamParser(self._event, max_event_bytes=self._max_bytes)
        self._use(self._parser.feed)
        self._parser.feed(data)

    def _use(self, take: Callable[[bytes], None]) -> None:
        """From now on body bytes go there, without a step in between: this is the hot path."""
        self._take = take
        if self._decompress is None:
            self.on_body = take

    def _collect(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > self._max_bytes:
            self._too_big()
        self._body.append(data)

    def _too_big(self) -> NoReturn:
        raise MessageTooBig(
            f"the answer is over {self._max_bytes} bytes (Limits.max_event_bytes)",
            endpoint=self._attempt.endpoint.address,
        )

    def _collect_error(self, data: bytes) -> None:
        if self._size < _ERROR_BODY_BYTES:
            self._size += len(data)
            self._body.append(data)

    def _event(self, name: bytes, data: bytes) -> None:
        """An event up to the first content."""
        before = len(self._items)
        self._later_event(name, data)
        if len(self._items) > before:
            marks, now_ns = self._marks, self._http.arrival_ns
            marks.first_chunk_ns = marks.first_chunk_ns or now_ns
            chunk = self._items[-1]
            if isinstance(chunk, Chunk) and chunk.has_content:
                marks.first_content_ns = now_ns
                if self._parser is not None:
                    self._parser.on_event = self._later_event
        elif not self._marks.first_chunk_ns and getattr(self._decoder, "created", False):
            self._marks.first_chunk_ns = self._http.arrival_ns  # the first thing that came, as a chat answer's role is

    def _later_event(self, name: bytes, data: bytes) -> None:
        chunk = self._decode(name, data)
        if chunk is not None:
            self._items.append(chunk)
        elif self._decoder.done:
            self._terminal()

    def _terminal(self) -> None:
        """The terminal event: the call has ended, the message on the connection may go on."""
        self._end_stream()
        self._finished = True
        self._complete()

    def _complete(self) -> None:
        marks, http = self._marks, self._http
        marks.last_byte_ns = http.arrival_ns
        marks.rtt_ns = http.rtt_min_ns()
        if self._paused:  # now: the connection is the next call's in a moment
            self._paused = False
            self.on_low()
        marks.ended_ns = time.perf_counter_ns()
        self.end()
        self._size = 0
        self._let_go()

    def _let_go(self) -> None:
        """Break the cycles of bound methods, so that the bytes go when the call does and not when the collector comes."""
        self._take = _ignore
        self.on_body = self._overtime
        self._decompress = None
        self._last_item = None
        if self._parser is not None:
            self._parser.on_event = _ignore_event
            self._parser = None
        self._body = []

    def _release(self) -> None:
        """It has left the connection: said once, whatever ends come together."""
        if not self._released:
            self._released = True
            self.on_body = _ignore  # `_overtime` is a cycle too
            self._attempt.released()

    def on_trailers(self, trailers: dict[str, str]) -> None:
        self._head.trailers = trailers

    def on_end(self) -> None:
        """The end of the message: for an answer without a terminal event, the end of the answer too."""
        if not self._finished:
            self._finished = True
            self._marks.last_byte_ns = self._http.arrival_ns
            try:
                self._finish_body()
                self._complete()
            except SpanwireError as error:
                self._end_with(error)
            except Exception as error:  # noqa: BLE001 - a bug in a dialect is the error of its call
                problem = ProtocolError(f"the dialect failed at the answer's end with {type(error).__name__}")
                problem.__cause__ = error
                self._end_with(problem)
        self._release()

    def _finish_body(self) -> None:
        status = self._head.status or 0
        body = b"".join(self._body)
        if not 200 <= status < 300:
            headers = self._head.headers
            error = self._codec.error(status, headers, body[:_ERROR_BODY_BYTES], retry_after_s(headers))
            if 300 <= status < 400 and "location" in headers:  # not followed: it would carry the key to another host
                error.message += f"; it redirects to {_shown_url(headers['location'])!r}: use that as the URL"
            attempt = self._attempt
            more = advice(error, attempt.endpoint, api_key=attempt.api_key, headers=attempt.headers)
            if more:
                error.message = error.message.rstrip(".") + more
            raise error
        if self._parser is not None:
            self._finish_stream(self._parser)
            return
        text = body.removeprefix(_BOM).strip()
        if not text:
            what = "an empty stream" if self._attempt.streamed else "an empty body"
            raise Truncated(f"the server answered {status} with {what}")
        if text.startswith(b"<"):
            shown = text[:200].decode("utf-8", "replace")
            raise ProtocolError(f"the server answered with a page, not with an answer to this call: {shown!r}")
        if text[:1] not in (b"{", b"["):
            raise self._explain(text)
        if self._unpacked_whole is not None and not self._unpacked_whole():
            raise Truncated("the answer's coding ended before its end")
        end = text.find(b"\ndata:")  # some servers end a JSON body as they end a stream
        item = self._decoder.whole(text if end < 0 else text[:end])
        marks = self._marks
        marks.last_chunk_ns = self._http.arrival_ns
        if self._attempt.streamed and isinstance(item, Chunk) and item.has_content:  # all came with the last byte
            marks.first_content_ns = self._http.arrival_ns
        self._items.append(item)

    def _finish_stream(self, parser: EventStreamParser) -> None:
        tail = parser.tail.strip()
        if tail == b"[DONE]":  # the blank line after it is missing
            self._decoder.event(b"", tail)
        self._end_stream()

    def _end_stream(self) -> None:
        parser = self._parser
        if parser is not None and getattr(self._decoder, "finish_reason", None) is None:
            self._read_ignored([*parser.ignored, parser.unfinished_line])
        self._stamp()
        last = self._decoder.end()
        if last is not None:
            self._items.append(last)
            self._last_item = last  # which did not come now
            self._stamp_last(last)

    def _read_ignored(self, lines: list[bytes]) -> None:
        """The standard ignores lines of unknown fields; where no answer is complete they may say why."""
        for number, line in enumerate(lines):
            if line.startswith(b"error:"):
                raise self._explain(line)
            if line[:1] in (b"{", b"["):
                rest = b"\n".join(lines[number:]).strip()
                if self._marks.first_chunk_ns:  # an answer was under way: only an error can stand there
                    raise self._codec.error(self._head.status or 200, self._head.headers, rest, None)
                self._items.append(self._decoder.whole(rest))
                self._marks.first_chunk_ns = self._marks.last_chunk_ns = self._http.arrival_ns
                return
        first = next((line for line in lines if line), b"")
        if (
            first
            and not self._marks.first_chunk_ns
            and not first.startswith((b"data", b"event", b"id", b"retry", b":"))
        ):
            raise self._explain(first)

    def _explain(self, first: bytes) -> SpanwireError:
        """No event came, yet a line did that is not of the standard: say which."""
        status = 200 if self._head.status is None else self._head.status
        name, colon, value = first.partition(b":")
        if colon and name == b"error":
            return self._codec.error(status, self._head.headers, value.strip(), None)
        shown = first[:200].decode("utf-8", "replace")
        return ProtocolError(f"the answer is not an event stream, it begins with {shown!r}")

    def on_lost(self, error: SpanwireError) -> None:
        try:
            if not self._finished:
                self._finished = True
                self._end_with(error)
        finally:
            self._release()

    def _end_with(self, error: SpanwireError) -> None:
        if not self._marks.first_byte_ns:  # a part of a head is a beginning too
            self._marks.first_byte_ns = self._http.first_arrival_ns
        if error.endpoint is None:
            error.endpoint = self._attempt.endpoint.address
        if isinstance(error, ServerError) and error.status is None:  # inside a stream: its head tells more
            error.status = self._head.status
            error.headers = dict(self._head.headers)
            error.retry_after_s = retry_after_s(self._head.headers)
        self._marks.rtt_ns = self._http.rtt_min_ns()
        self.end(error)
        self._let_go()

    # --- leaving, and a consumer that is slower than the server -----------------------------------------------------

    @property
    def complete(self) -> bool:
        """After a finish reason only usage and the end are to come, in a moment."""
        if self._ended or getattr(self._decoder, "finish_reason", None) is None:
            return super().complete
        self._marks.rtt_ns = self._http.rtt_min_ns()  # who asks is about to leave, and looks at the marks as they are
        return True

    def abort(self, error: SpanwireError | None = None) -> None:
        """Leave: HTTP/1.1 knows no other way than to close the connection, unless the message has ended already."""
        if not self._finished:
            self._finished = True
            self._marks.rtt_ns = self._http.rtt_min_ns()
        super().abort(error)
        self._http.leave(self)
        self._let_go()
        self._release()

    def on_high(self) -> None:
        self._paused_since_ns = time.perf_counter_ns()
        self._http.pause_reading()

    def on_low(self) -> None:
        if self._paused_since_ns:
            if self._marks.first_content_ns:
                self._marks.paused_ns += time.perf_counter_ns() - max(
                    self._paused_since_ns, self._marks.first_content_ns
                )
            self._paused_since_ns = 0
        self._marks.resumed_ns = time.perf_counter_ns()
        self._http.resume_reading()


class ForwardedExchange(HTTPExchange):
    """One that a proxy forwards, and may answer itself."""

    __slots__ = ("_proxy",)

    def __init__(self, http: Carrier, codec: Codec, decoder: AnswerDecoder, attempt: Attempt, proxy: Proxy) -> None:
        super().__init__(http, codec, decoder, attempt)
        self._proxy = proxy

    def on_head(self, status: int, headers: dict[str, str]) -> None:
        super().on_head(status, headers)
        if status == 407:  # no server says that
            raise credentials_wanted(self._attempt.endpoint.address, self._proxy)


def _short(blank: bytes) -> bytes:
    """All that matters of the blanks before an answer, of which a server may send any number as heartbeats: a byte order
    mark at the start, whether a line has ended, and whether the next one begins with a blank."""
    last = blank[-1:]
    if b"\n" in blank or b"\r" in blank:
        return b"\n" if last in b"\r\n" else b"\n "
    return blank[:3] + (b" " if len(blank) > 3 else b"") if blank.startswith(_BOM) else blank[:1]


def _ignore(_data: bytes) -> None:
    """What comes after the terminal event belongs to nobody."""


def _ignore_event(_name: bytes, _data: bytes) -> None:
    """The same for events that came in the same read."""


def _shown_url(url: str) -> str:
    """Scheme, host and path: neither a query nor credentials."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "an address that cannot be read"
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"[:200] if parts.netloc else parts.path[:200]
