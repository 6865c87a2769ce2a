"""One call on an HTTP/1.1 connection: takes the answer's bytes for what they are, and fills the inbox.

What was asked for does not decide how an answer is read, since servers and proxies answer with what they have: a body
that begins like JSON is read as a whole answer (or an error object), HTML is refused, anything else is an event stream,
whatever the content type says. A stream where a whole answer was asked for is joined by whoever reads the chunks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime

from spanwire.errors import MessageTooBig, ProtocolError, SpanwireError, Truncated
from spanwire.net.http1 import HTTP1Connection
from spanwire.transport import Attempt, Head, Inbox
from spanwire.wire.sse import EventStreamParser

from .codec import AnswerDecoder, Codec
from .decompress import decompressor

__all__ = ["HTTPExchange", "retry_after_s"]

#: How much of the body of an error status is read, in bytes.
_ERROR_BODY_BYTES = 64 * 1024
_BOM = b"\xef\xbb\xbf"


class HTTPExchange(Inbox):
    """The :class:`~spanwire.net.http1.Sink` of one answer; its reading side is :class:`~spanwire.transport.Inbox`."""

    __slots__ = (
        "_attempt",
        "_body",
        "_codec",
        "_decoder",
        "_decompress",
        "_finished",
        "_http",
        "_marks",
        "_max_bytes",
        "_parser",
        "_paused_since_ns",
        "_size",
        "_take",
        "head",
        "sending_since_ns",
    )

    def __init__(self, http: HTTP1Connection, codec: Codec, decoder: AnswerDecoder, attempt: Attempt) -> None:
        super().__init__()
        self._http = http
        self._codec = codec
        self._decoder = decoder
        self._attempt = attempt
        self._marks = attempt.marks
        self._max_bytes = attempt.endpoint.limits.max_event_bytes
        self._finished = False
        self._decompress: Callable[[bytes], bytes] | None = None
        self._parser: EventStreamParser | None = None
        self._body: list[bytes] = []
        self._size = 0
        self._take: Callable[[bytes], None] = self._sniff
        self._paused_since_ns = 0
        self.head = Head()
        self.sending_since_ns = 0
        self.on_high = self._pause
        self.on_low = self._resume

    # --- sending ----------------------------------------------------------------------------------------------------

    def sent(self, since_ns: int) -> None:
        """The request is in the kernel's buffer; writing began at ``since_ns``."""
        now_ns = time.perf_counter_ns()
        self._marks.sent_ns = now_ns
        self._marks.parts.append(("send", since_ns, now_ns))

    def on_sent(self) -> None:
        if not self._marks.sent_ns:
            self.sent(self.sending_since_ns)

    # --- receiving --------------------------------------------------------------------------------------------------

    def on_head(self, status: int, headers: dict[str, str]) -> None:
        self._marks.first_byte_ns = self._http.first_arrival_ns
        if not self._marks.sent_ns:  # answered before it had read the request to its end
            self.sent(self.sending_since_ns)
        self.head.status = status
        self.head.headers = headers
        if not 200 <= status < 300:
            self._take = self._collect_error
        encoding = headers.get("content-encoding", "identity")
        if encoding != "identity":
            self._decompress = decompressor(encoding, self._max_bytes)

    def on_body(self, data: bytes) -> None:
        if self._decompress is not None:
            data = self._decompress(data)
            if not data:
                return
        self._take(data)

    def on_batch(self) -> None:
        if not self._finished:
            self._marks.last_byte_ns = self._http.arrival_ns
        self.wake()

    def _sniff(self, data: bytes) -> None:
        self._body.append(data)
        start = b"".join(self._body)
        text = start.removeprefix(_BOM).lstrip(b" \t\r\n")
        if not text:
            return
        if text[:1] in (b"{", b"[", b"<"):
            self._size = len(start)
            self._take = self._collect
            return
        self._body = []
        self._parser = EventStreamParser(self._event, max_event_bytes=self._max_bytes)
        self._take = self._parser.feed
        self._parser.feed(start)

    def _collect(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > self._max_bytes:
            raise MessageTooBig(
                f"the answer is over {self._max_bytes} bytes (Limits.max_event_bytes)",
                endpoint=self._attempt.endpoint.address,
            )
        self._body.append(data)

    def _collect_error(self, data: bytes) -> None:
        if self._size < _ERROR_BODY_BYTES:
            self._size += len(data)
            self._body.append(data)

    def _ignore(self, data: bytes) -> None:
        """What comes after the terminal event belongs to nobody."""

    def _event(self, name: bytes, data: bytes) -> None:
        if self._finished:
            return
        decoder = self._decoder
        chunk = decoder.event(name, data)
        marks = self._marks
        if chunk is not None:
            arrival_ns = self._http.arrival_ns
            marks.last_chunk_ns = arrival_ns
            if not marks.first_content_ns:
                if not marks.first_chunk_ns:
                    marks.first_chunk_ns = arrival_ns
                if chunk.text or chunk.reasoning or chunk.tool_calls:
                    marks.first_content_ns = arrival_ns
            self._items.append(chunk)
        elif decoder.done:
            self._terminal()

    def _terminal(self) -> None:
        """The terminal event: the call has ended, the message on the connection may go on."""
        last = self._decoder.end()
        if last is not None:
            self._items.append(last)
        self._finished = True
        self._take = self._ignore
        self._complete()

    def _complete(self) -> None:
        self.head.id, self.head.model = self._decoder.id, self._decoder.model
        marks = self._marks
        marks.last_byte_ns = self._http.arrival_ns
        marks.rtt_ns = self._http.rtt_min_ns()
        marks.ended_ns = time.perf_counter_ns()
        self._http.resume_reading()
        self.end()

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
        self._attempt.released()

    def _finish_body(self) -> None:
        status = self.head.status or 0
        body = b"".join(self._body)
        if not 200 <= status < 300:
            headers = self.head.headers
            error = self._codec.error(status, headers, body[:_ERROR_BODY_BYTES], retry_after_s(headers))
            if 300 <= status < 400 and "location" in headers:  # not followed: it would carry the key to another host
                error.message += f"; it redirects to {headers['location'].split('?')[0][:200]!r}: use that as the URL"
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
        item = self._decoder.whole(text)
        marks = self._marks
        marks.first_chunk_ns = marks.last_chunk_ns = self._http.arrival_ns
        if self._attempt.streamed:  # all that there is came with its last byte
            marks.first_content_ns = self._http.arrival_ns
        self._items.append(item)

    def _finish_stream(self, parser: EventStreamParser) -> None:
        tail = parser.tail.strip()
        if tail == b"[DONE]":  # the blank line after it is missing
            self._decoder.event(b"", tail)
        try:
            last = self._decoder.end()
        except Truncated as error:
            if parser.ignored and not self._marks.first_chunk_ns:
                raise self._explain(parser.ignored) from error
            raise
        if last is not None:
            self._items.append(last)

    def _explain(self, ignored: list[bytes]) -> SpanwireError:
        """No event came, yet something did: say what."""
        first = ignored[0]
        status = 200 if self.head.status is None else self.head.status
        name, colon, value = first.partition(b":")
        if colon and name == b"error":
            return self._codec.error(status, self.head.headers, value.strip(), None)
        shown = first[:200].decode("utf-8", "replace")
        return ProtocolError(f"the answer is not an event stream, it begins with {shown!r}")

    def on_lost(self, error: SpanwireError) -> None:
        if not self._finished:
            self._finished = True
            self._end_with(error)
        self._attempt.released()

    def _end_with(self, error: SpanwireError) -> None:
        self.head.id, self.head.model = self._decoder.id, self._decoder.model
        if error.endpoint is None:
            error.endpoint = self._attempt.endpoint.address
        self._marks.rtt_ns = self._http.rtt_min_ns()
        self.end(error)

    # --- leaving, and a consumer that is slower than the server -----------------------------------------------------

    def abort(self) -> None:
        """Leave: HTTP/1.1 knows no other way than to close the connection, unless the message has ended already."""
        if not self._finished:
            self._finished = True
            self.head.id, self.head.model = self._decoder.id, self._decoder.model
            self._marks.rtt_ns = self._http.rtt_min_ns()
        super().abort()
        self._http.leave(self)
        self._attempt.released()

    def _pause(self) -> None:
        self._paused_since_ns = time.perf_counter_ns()
        self._http.pause_reading()

    def _resume(self) -> None:
        if self._paused_since_ns:
            if self._marks.first_content_ns:
                self._marks.paused_ns += time.perf_counter_ns() - max(
                    self._paused_since_ns, self._marks.first_content_ns
                )
            self._paused_since_ns = 0
        self._http.resume_reading()


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """How long the server asks to wait, in seconds: ``retry-after-ms``, ``Retry-After`` as seconds or as a date.

    A date in the past is 0; what cannot be read, or is negative, is None.
    """
    for name, scale in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        value = headers.get(name, "").strip()
        if value.isascii() and value.replace(".", "", 1).isdigit():
            return float(value) * scale
    value = headers.get("retry-after", "")
    if not value or value.lstrip("-").isdigit():
        return None
    try:
        moment = parsedate_to_datetime(value)
    except (TypeError, ValueError):
        return None
    return max(0.0, moment.timestamp() - time.time())
