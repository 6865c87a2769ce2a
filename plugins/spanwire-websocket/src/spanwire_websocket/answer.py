"""One answer on a socket: events of the Responses schema in, chunks out."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from spanwire.calls import Chunk, ReplyBuilder
from spanwire.errors import MessageTooBig, ProtocolError, ServerError, SpanwireError
from spanwire.transport import Attempt, Head, Inbox, Item
from spanwire.wire.openai_responses import ResponsesDecoder

from .conversation import Conversation, Outgoing, conversation_after
from .faults import closed_error, judge
from .socket import Closed, WebSocket

if TYPE_CHECKING:
    from .chat import ChatConnection

__all__ = ["ResponsesExchange", "ends_again"]

#: What may lie unread before the peer is stopped, in bytes: much more than on other transports, since a socket that is not
#: read answers no pings either, and is given up by the server. Longer than any answer of words.
_HIGH_BYTES = 8 * 1024 * 1024
#: As many items are counted the first time, and each time twice as many.
_COUNT_FROM = 64


class _Response(msgspec.Struct, gc=False):
    id: str | None = None


class _Ending(msgspec.Struct, gc=False):
    type: str = ""
    response: _Response | None = None


_decode_ending = msgspec.json.Decoder(_Ending).decode


def ends_again(data: bytes | bytearray, answered: str) -> bool:
    """Whether it is the end of an answer that has ended: there are servers that say so by both names of the event."""
    try:
        found = _decode_ending(data)
    except (msgspec.DecodeError, RecursionError):
        return False
    is_end = found.type in ("response.completed", "response.done")
    return is_end and found.response is not None and found.response.id == answered


class ResponsesExchange(Inbox):
    """The :class:`~spanwire_websocket.socket.Sink` of one answer; its reading side is the inbox.

    Args:
        parent: the conversation that the request went on from, if only its new items were sent.
    """

    __slots__ = (
        "_answered",
        "_attempt",
        "_calls",
        "_connection",
        "_count_at",
        "_decode",
        "_decoder",
        "_done",
        "_head",
        "_last_item",
        "_marks",
        "_outgoing",
        "_parent",
        "_paused_since_ns",
        "_receive",
        "_socket",
        "_texts",
        "_was_refused",
        "on_message",
    )

    patient = (
        True  # Timeouts.idle_s and first_content_s watch over a call; missing pongs say nothing of its server's work
    )

    def __init__(
        self, connection: ChatConnection, call: Outgoing, parent: Conversation | None, attempt: Attempt
    ) -> None:
        super().__init__(high=1 << 62)
        self._count_at = _COUNT_FROM
        self._last_item: Item | None = None  # whose arrival is on the marks
        self._connection = connection
        self._socket: WebSocket = connection.socket
        self._outgoing = call
        self._parent = parent
        self._attempt = attempt
        self._marks = attempt.marks
        self._decoder = ResponsesDecoder()
        self._decode = self._decoder.event
        self._head = Head()
        self._head.streamed = True
        self._texts: list[str] = []
        self._calls: list[Chunk] = []
        self._paused_since_ns = 0
        self._done = False
        self._answered = connection.answered
        self._was_refused, connection.refused = connection.refused, False
        self.on_message: Callable[[bytes | bytearray, bool], None] = self._early

    @property
    def head(self) -> Head:
        """With what the events have told by now."""
        head, decoder = self._head, self._decoder
        head.id, head.model, head.usage = decoder.id, decoder.model, decoder.usage
        head.late_events = decoder.late_events
        return head

    # --- sending ----------------------------------------------------------------------------------------------------

    def on_sent(self) -> None:
        marks = self._marks
        if not marks.sent_ns:
            marks.sent_ns = time.perf_counter_ns()
            marks.end("send", marks.sent_ns)

    # --- receiving --------------------------------------------------------------------------------------------------

    def _early(self, data: bytes | bytearray, text: bool) -> None:
        """A message up to the first content."""
        if self._answered is not None and not self._decoder.created and ends_again(data, self._answered):
            return
        marks, now_ns = self._marks, self._socket.arrival_ns
        if not marks.first_byte_ns:
            self.on_sent()  # if not before: it answers without having read the request to its end
            marks.first_byte_ns = now_ns
            self._socket.saw_answer(now_ns - marks.sent_ns)
        before = len(self._items)
        self._later(data, text)
        if not marks.started_ns and self._decoder.in_progress:
            marks.started_ns = now_ns
        if len(self._items) > before:
            marks.first_chunk_ns = marks.first_chunk_ns or now_ns
            chunk = self._items[-1]
            if isinstance(chunk, Chunk) and chunk.has_content:
                marks.first_content_ns = now_ns
                if not self._done:
                    self.on_message = self._later

    def _later(self, data: bytes | bytearray, text: bool) -> None:
        if self._done:
            return
        try:
            chunk = self._decode(b"", data if type(data) is bytes else bytes(data))
        except SpanwireError as error:
            self._refused(error)
            return
        except Exception as error:  # noqa: BLE001 - a bug in the codec is the call's error, not the event loop's
            problem = ProtocolError(f"the dialect failed with {type(error).__name__}")
            problem.__cause__ = error
            self._refused(problem)
            return
        if chunk is not None:
            if chunk.text:
                self._texts.append(chunk.text)
            if chunk.tool_calls:
                self._calls.append(chunk)
            self._items.append(chunk)
        if self._decoder.done:
            self._terminal()

    def on_batch(self) -> None:
        if not self._done:
            now_ns = self._marks.last_byte_ns = self._socket.arrival_ns
            items = self._items
            if (
                items and items[-1] is not self._last_item
            ):  # else a part of a message came, and the consumer has not read
                self._last_item = items[-1]
                self._marks.last_chunk_ns = now_ns
        self.wake()
        if len(self._items) >= self._count_at:
            self._count()

    def _count(self) -> None:
        """Not for each message: in all, each item is looked at twice."""
        size = sum(len(item.raw) for item in self._items if isinstance(item, Chunk))
        self._count_at = 2 * len(self._items)
        if size >= _HIGH_BYTES and not (self._paused or self._ended):
            self._paused = True
            self.on_high()

    def _terminal(self) -> None:
        """The answer is complete, and with it the turn on the socket."""
        marks, socket, decoder = self._marks, self._socket, self._decoder
        marks.last_byte_ns = marks.last_chunk_ns = socket.arrival_ns
        marks.rtt_ns = socket.rtt_min_ns()
        try:
            last = decoder.end()
        except SpanwireError as error:
            self._refused(error)
            return
        if last is not None:  # with what came with no event before it
            self._texts.append(last.text)
            self._calls.append(last)
            self._items.append(last)
        if self._paused:
            self._paused = False
            self.on_low()
        marks.ended_ns = time.perf_counter_ns()
        self._leave()
        connection = self._connection
        # Only of servers that announce each answer: of others an end may be all that comes, and the id always the same.
        connection.answered = decoder.id if decoder.created else None
        if (
            connection.remembers
            and decoder.id is not None
            and decoder.finish_reason in ("stop", "tool_calls")
            and not decoder.made_up_ids  # what a tool has answered would belong to no call that the server has
        ):
            answer = ReplyBuilder()
            answer.add(self._calls)
            connection.conversation = conversation_after(
                connection.conversation, decoder.id, self._outgoing, "".join(self._texts), answer.reply().tool_calls
            )
        else:  # cut off: what the next turn will say of it is not what the server has
            connection.conversation = None
        self._texts, self._calls = [], []
        self.end()
        self._attempt.released()

    def _refused(self, error: SpanwireError) -> None:
        """The server's error event, or one that we have found. What the socket remembers is gone with it."""
        connection = self._connection
        connection.conversation = None
        marks = self._marks
        begun = bool(marks.first_content_ns or self._items)
        if isinstance(error, ServerError):
            own_parent = self._outgoing.parent is not None
            if judge(error, begun=begun, closing=not self._socket.usable(), own_parent=own_parent):
                connection.retire()
            connection.refused = True
        else:
            connection.retire()  # nobody knows where the answer ends
        if error.endpoint is None:
            error.endpoint = self._attempt.endpoint.address
        marks.rtt_ns = self._socket.rtt_min_ns()
        self._leave()
        self.end(error)
        self._attempt.released()

    def on_lost(self, closed: Closed) -> None:
        if self._done:
            return
        marks = self._marks
        begun = bool(marks.first_byte_ns)
        error = closed_error(
            closed,
            self._attempt.endpoint.address,
            max_bytes=self._attempt.endpoint.limits.max_event_bytes,
            begun=begun,
        )
        if self._outgoing.parent is not None and not isinstance(error, MessageTooBig):
            error.retryable = error.full = (
                False  # it was the caller who named it; whether it was delivered is not known
            )
        elif self._was_refused and not begun and not isinstance(error, MessageTooBig):
            error.again = True  # the call before was refused: it is after that one that the server has closed
        if begun:
            error.full = False
        marks.rtt_ns = self._socket.rtt_min_ns()
        self._leave()
        self.end(error)
        self._attempt.released()

    def _leave(self) -> None:
        """The socket is somebody else's from now on."""
        self._done = True
        self.on_message = _ignore
        self._connection.left(self)

    # --- leaving, and a consumer that is slower than the server -----------------------------------------------------

    def abort(self, error: SpanwireError | None = None) -> None:
        """Leave. The schema has no event to cancel with, and what an abandoned response still sends would be read as the
        next one's answer: the socket goes with it."""
        super().abort(error)
        if not self._done:
            self._marks.rtt_ns = self._socket.rtt_min_ns()
            self._leave()
            self._connection.retire()
            self._attempt.released()

    def on_high(self) -> None:
        self._paused_since_ns = time.perf_counter_ns()
        self._socket.pause_reading()

    def on_low(self) -> None:
        self._count_at = _COUNT_FROM
        marks, now_ns = self._marks, time.perf_counter_ns()
        if self._paused_since_ns:
            if marks.first_content_ns:
                marks.paused_ns += now_ns - max(self._paused_since_ns, marks.first_content_ns)
            self._paused_since_ns = 0
        marks.resumed_ns = now_ns
        self._socket.resume_reading()


def _ignore(_data: bytes | bytearray, _text: bool) -> None:
    """What comes after the terminal event belongs to nobody."""
