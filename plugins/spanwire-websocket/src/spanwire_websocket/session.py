"""A session on a socket of its own: events of any schema in, messages of any kind out."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from spanwire.calls import Call, SessionEvent
from spanwire.errors import ConfigurationError, ConnectionFailed, ProtocolError, SpanwireError, Truncated
from spanwire.transport import Attempt, Exchange, Head, Inbox, Item, Turn

from .faults import closed_error
from .socket import Closed, WebSocket
from .upgrade import closed_at_once

__all__ = ["SessionChannel", "SessionConnection", "SessionDialect", "SessionSchema"]

#: The inbox counts messages; what a session counts are bytes.
_NO_LIMIT = 1 << 62


class SessionSchema(Protocol):
    """State of one session in a schema: what messages are called, what they carry, and where turns begin and end."""

    def event(self, data: bytes | bytearray, text: bool, arrival_ns: int) -> SessionEvent:
        """A message that came. Never raises for what a server sends: what cannot be read has no type."""

    def sent(self, message: Mapping[str, Any] | str | bytes, at_ns: int) -> None:
        """A message that was sent."""

    def ended(self, at_ns: int, error: SpanwireError | None) -> None:
        """The session is over: so are its turns. Without an error its owner has left it."""


class SessionDialect(Protocol):
    """What ``Dialect.codec`` is for a dialect of sessions on this transport."""

    def path(self, base: str) -> str:
        """The target's path for an endpoint's path."""

    def schema(self, on_turn: Callable[[Turn], None], rtt_ns: Callable[[], int | None]) -> SessionSchema:
        """State of a new session. ``on_turn`` is to be called with each turn that has ended."""


class SessionConnection:
    """Carries one session, and is closed with it."""

    __slots__ = ("_buffer_bytes", "_dialect", "_used", "socket")

    capacity = 1
    protocol = "websocket"
    engine = "websockets"

    def __init__(self, socket: WebSocket, dialect: SessionDialect, *, buffer_bytes: int) -> None:
        self.socket = socket
        self._dialect = dialect
        self._buffer_bytes = buffer_bytes
        self._used = False

    def usable(self) -> bool:
        return not self._used and self.socket.usable()

    async def start(self, call: Call, attempt: Attempt) -> Exchange:
        if self.socket.lost is not None and not self._used:
            raise closed_at_once(attempt.endpoint, self.socket)
        if not self.usable():
            raise ConnectionFailed(
                "the WebSocket was closed before the session began", endpoint=attempt.endpoint.address, phase="send"
            )
        self._used = True
        channel = SessionChannel(self.socket, self._dialect, attempt, self._buffer_bytes)
        # What the server has said first (`session.created`) may have come with the upgrade.
        self.socket.take(channel)
        early, self.socket.quiet = self.socket.quiet, []
        for data, text in early:
            channel.on_message(data, text)
        channel.on_batch()
        return channel

    async def aclose(self) -> None:
        self._used = True
        await self.socket.aclose()

    def abort(self) -> None:
        self._used = True
        self.socket.abort()


class SessionChannel(Inbox):
    """The :class:`~spanwire_websocket.socket.Sink` of one session; its reading side is the inbox."""

    __slots__ = ("_attempt", "_buffer_bytes", "_bytes", "_gone", "_head", "_left", "_schema", "_socket", "on_turn")

    patient = False  # nothing else watches over a session that is silent

    def __init__(self, socket: WebSocket, dialect: SessionDialect, attempt: Attempt, buffer_bytes: int) -> None:
        super().__init__(high=_NO_LIMIT)
        self._socket = socket
        self._attempt = attempt
        self._buffer_bytes = buffer_bytes
        self._bytes = 0
        self._gone: SpanwireError | None = None
        self._left = False
        self._head = Head()
        self.on_turn: Callable[[Turn], None] | None = None
        self._schema = dialect.schema(self._turn_ended, socket.rtt_min_ns)

    def _turn_ended(self, turn: Turn) -> None:
        if self.on_turn is not None:
            self.on_turn(turn)

    @property
    def head(self) -> Head:
        return self._head

    @property
    def complete(self) -> bool:
        """A session has no end of its own: whoever leaves closes it."""
        return self._ended_well

    # --- sending ----------------------------------------------------------------------------------------------------

    async def send(self, message: Mapping[str, Any] | str | bytes) -> None:
        """See :meth:`spanwire.transport.SessionExchange.send`."""
        self._check_open()
        data, text = self._encoded(message)
        # Before it is written, too: else callers who give up, and send again, would fill the memory.
        await self._socket.drain()
        self._check_open()
        now_ns = time.perf_counter_ns()
        is_out = self._socket.send(data, text=text)
        self._schema.sent(message, now_ns)
        if not is_out:
            await self._socket.drain()
            if self._socket.lost is not None:
                raise self._over("the session ended before the message was sent")

    def _check_open(self) -> None:
        if self._gone is not None or self._left:
            raise self._over("the session has ended")

    def _over(self, words: str) -> ConnectionFailed:
        error = ConnectionFailed(words, endpoint=self._attempt.endpoint.address, phase="send", retryable=False)
        error.__cause__ = self._gone
        return error

    def _encoded(self, message: Mapping[str, Any] | str | bytes) -> tuple[bytes, bool]:
        if isinstance(message, bytes | bytearray | memoryview):
            return bytes(message), False
        try:
            return message.encode() if isinstance(message, str) else msgspec.json.encode(message), True
        except (TypeError, ValueError, UnicodeEncodeError, RecursionError) as error:
            raise ConfigurationError(
                f"the message cannot be written: {error}; send a mapping, a text, or bytes",
                endpoint=self._attempt.endpoint.address,
            ) from error

    # --- receiving --------------------------------------------------------------------------------------------------

    def on_sent(self) -> None:
        """Whoever sends waits for it by himself."""

    def on_message(self, data: bytes | bytearray, text: bool) -> None:
        if self._left:  # nobody will read it
            return
        try:
            event = self._schema.event(data, text, self._socket.arrival_ns)
        except Exception as error:  # noqa: BLE001 - a bug in a schema is the session's error, not the event loop's
            problem = ProtocolError(f"the dialect failed with {type(error).__name__}")
            problem.__cause__ = error
            self._finish(problem)
            self._socket.say_goodbye(1011)
            return
        self._items.append(event)
        self._bytes += len(data)

    def on_batch(self) -> None:
        self.wake()
        if self._bytes >= self._buffer_bytes and not (self._paused or self._ended):
            self._paused = True
            self._socket.pause_reading()

    def take(self) -> list[Item]:
        items = super().take()
        self._bytes = 0
        return items

    def on_low(self) -> None:
        self._socket.resume_reading()

    def on_lost(self, closed: Closed) -> None:
        if not closed.ours and closed.code in (1000, 1005):
            self._finish(None)
        else:
            self._finish(
                closed_error(
                    closed,
                    self._attempt.endpoint.address,
                    max_bytes=self._attempt.endpoint.limits.max_event_bytes,
                    begun=True,
                    what="session",
                )
            )
        self._attempt.released()

    def _finish(self, error: SpanwireError | None) -> None:
        if self._gone is None and not self._left:
            self._gone = error or ConnectionFailed("the server has closed the session")
            unfinished = error or Truncated(
                "the server closed the session in the middle of a turn",
                endpoint=self._attempt.endpoint.address,
                phase="read",
                retryable=False,
            )
            self._schema.ended(time.perf_counter_ns(), unfinished)
            self.end(error)

    # --- leaving ----------------------------------------------------------------------------------------------------

    def abort(self, error: SpanwireError | None = None) -> None:
        """Close the session: a close frame, and the end of the connection when the server has answered it."""
        super().abort(error)
        if not self._left:
            self._left = True
            if self._gone is None:
                self._schema.ended(time.perf_counter_ns(), error)
            self._socket.resume_reading()  # else its goodbye would not be seen
            if self._socket.lost is None and self._socket.usable():
                self._socket.say_goodbye()
            else:
                self._attempt.released()
