"""A transport whose connects and exchanges are played by the test, for what the manager makes of them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Hashable, Mapping
from typing import Any

import spanwire
from spanwire.calls import Call, Chunk, SessionEvent
from spanwire.endpoint import Endpoint
from spanwire.errors import ConnectionFailed, SpanwireError
from spanwire.timeline import Timeline
from spanwire.transport import Attempt, Dialect, Head, Inbox, TransportSpec, Turn


class Talk(Inbox):
    """One exchange, or a session: the test says what comes."""

    def __init__(self, connection: Line, call: Call, attempt: Attempt) -> None:
        super().__init__()
        self.head = Head()
        self.connection, self.call, self.attempt = connection, call, attempt
        self.on_turn: Callable[[Turn], None] | None = None
        self.sent: list[Any] = []
        self.left = False

    def say(self, text: str) -> None:
        marks, now_ns = self.attempt.marks, time.perf_counter_ns()
        marks.first_byte_ns = marks.first_byte_ns or now_ns
        marks.first_chunk_ns = marks.first_chunk_ns or now_ns
        marks.first_content_ns = marks.first_content_ns or now_ns
        marks.last_chunk_ns = marks.last_byte_ns = now_ns
        self.put(Chunk(text=text))
        self.wake()

    def event(self, type: str) -> None:
        self.put(SessionEvent(type))
        self.wake()

    def finish(self) -> None:
        self.attempt.marks.ended_ns = time.perf_counter_ns()
        self.end()
        self._leave()

    def answer(self) -> None:
        self.say("hello")
        self.finish()

    def refuse(self, error: SpanwireError, *, breaks: bool = True) -> None:
        """And its connection is of no use any more, if it ``breaks``."""
        if breaks:
            self.connection.ok = False
        self.end(error)
        self._leave()

    def abort(self, error: SpanwireError | None = None) -> None:
        super().abort(error)
        if not self.left:
            self.connection.ok = False
        self._leave()

    def _leave(self) -> None:
        if not self.left:
            self.left = True
            if self.call.operation == "session":
                self.connection.ok = False
            self.attempt.released()

    async def send(self, message: Mapping[str, Any] | str | bytes) -> None:
        if self.left:
            raise ConnectionFailed("the session has ended", endpoint=self.attempt.endpoint.address)
        self.sent.append(message)


class Line:
    """A connection: one exchange at a time."""

    capacity = 1
    protocol = "scripted"
    engine = "test"

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.ok = True
        self.closed = False
        self.worth = 0

    def suits(self, prepared: object) -> int:
        return self.worth

    async def start(self, call: Call, attempt: Attempt) -> Talk:
        made: Talk = self.wire.exchange(self, call, attempt)
        attempt.marks.sent_ns = time.perf_counter_ns()
        self.wire.talks.append(made)
        self.wire.play(made)
        return made

    def usable(self) -> bool:
        return self.ok and not self.closed

    async def aclose(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True


def answers(talk: Talk) -> None:
    talk.answer()


async def connects(number: int, attempt: Attempt) -> None:
    """At once."""


class Wire:
    """The transport. ``on_connect`` gets each connect's number, from 1; ``play`` each exchange as it starts."""

    exchange: Callable[..., Any] = Talk

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.talks: list[Talk] = []
        self.connects = 0
        self.on_connect: Callable[[int, Attempt], Awaitable[None]] = connects
        self.play: Callable[[Talk], None] = answers

    def expect(self, endpoint: Endpoint) -> int:
        return 1

    def key(self, endpoint: Endpoint) -> Hashable:
        return endpoint.connection_key()

    async def connect(self, endpoint: Endpoint, attempt: Attempt) -> Line:
        self.connects += 1
        await self.on_connect(self.connects, attempt)
        line = Line(self)
        self.lines.append(line)
        return line


class Scripted:
    """The plugin, and an observer of what the manager tells."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.seen: list[Timeline] = []

    @spanwire.hookimpl
    def register_transports(self) -> list[TransportSpec]:
        return [
            TransportSpec(
                name="scripted",
                schemes=("scripted",),
                factory=lambda: self.wire,
                capabilities=frozenset({"session"}),
            )
        ]

    @spanwire.hookimpl
    def register_dialects(self) -> list[Dialect]:
        return [
            Dialect("scripted", "chatter", None, default=True),
            Dialect("scripted", "talk", None, operations=frozenset({"session"}), default=True),
        ]

    @spanwire.hookimpl
    def register_observers(self) -> list[Any]:
        return [self]

    def call_ended(self, timeline: Timeline) -> None:
        self.seen.append(timeline)


def endpoint(**more: Any) -> Endpoint:
    return Endpoint("scripted://host:1/v1", **more)
