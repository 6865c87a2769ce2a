"""A socket that carries chat calls, one after the other."""

from __future__ import annotations

import time

from spanwire.calls import Call
from spanwire.endpoint import Endpoint
from spanwire.errors import ConnectionFailed, ServerError, SpanwireError
from spanwire.transport import Attempt, Exchange
from spanwire.wire.openai_responses import ResponsesDecoder

from .answer import ResponsesExchange, ends_again
from .conversation import Conversation, Outgoing
from .faults import closed_error, judge
from .socket import WebSocket

__all__ = ["MAX_AGE_S", "ChatConnection"]

#: A server closes a socket after 60 minutes, whatever is on it (OpenAI's and xAI's documentation): so before that, between
#: two turns.
MAX_AGE_S = 55 * 60.0


class ChatConnection:
    """One response in flight; the conversation that its server remembers goes on with it.

    Args:
        max_age_s: it takes no call after that.
        remembers: go on with the conversation that the server has, where a call allows it.

    Attributes:
        answered: id of the last answer, if the server had announced it; None if not.
        refused: the last call got an error event: many servers close the socket after it.
    """

    __slots__ = (
        "_exchange",
        "_made_ns",
        "_max_age_ns",
        "_retired",
        "_used",
        "answered",
        "conversation",
        "refused",
        "remembers",
        "socket",
    )

    capacity = 1
    protocol = "websocket"
    engine = "websockets"

    def __init__(self, socket: WebSocket, *, max_age_s: float = MAX_AGE_S, remembers: bool = True) -> None:
        self.socket = socket
        self.conversation: Conversation | None = None
        self._exchange: ResponsesExchange | None = None
        self._made_ns = time.perf_counter_ns()
        self._max_age_ns = int(max_age_s * 1e9)
        self._retired = False
        self.remembers = remembers
        self.refused = False
        self.answered: str | None = None
        self._used = False

    def usable(self) -> bool:
        """Not after an abandoned response, nor when something came that nobody had asked for."""
        return (
            not self._retired
            and self.socket.usable()
            and (self._exchange is not None or not self._used or not self._unasked())
            and time.perf_counter_ns() - self._made_ns < self._max_age_ns
        )

    def _unasked(self) -> bool:
        """Something has come that belongs to no call."""
        quiet = self.socket.quiet
        if quiet and self.answered is not None:
            quiet[:] = [(data, text) for data, text in quiet if not ends_again(data, self.answered)]
        return bool(quiet)

    def suits(self, call: object) -> int:
        """2: its server remembers this conversation; 1: none; 0: another one, which it would forget."""
        known = self.conversation
        if known is None:
            return 1
        assert isinstance(call, Outgoing)
        return 2 if known.is_continued_by(call) or call.parent == known.id else 0

    def check(self, endpoint: Endpoint) -> None:
        """Look at what came before anything was asked: a greeting, or the reason why this client is not served.

        Raises:
            SpanwireError: the server's error event, or that it has closed the socket.
        """
        socket = self.socket
        found: SpanwireError | None = None
        for data, _ in socket.quiet:
            try:
                ResponsesDecoder().event(b"", bytes(data))
            except ServerError as error:
                judge(error, begun=False, closing=socket.lost is not None, own_parent=False)
                found = error
            except SpanwireError:
                pass
        socket.quiet.clear()
        if found is None and socket.lost is not None:
            found = closed_error(socket.lost, endpoint.address, max_bytes=endpoint.limits.max_event_bytes, asked=False)
        if found is not None:
            found.endpoint, found.phase = endpoint.address, "upgrade"
            self.retire()
            raise found

    async def start(self, call: Call, attempt: Attempt) -> Exchange:
        """Write the request; marks encode and send."""
        begin_ns = time.perf_counter_ns()
        if not self._used:
            self._used = True
            self.check(attempt.endpoint)
        if not self.usable() or self._exchange is not None:
            raise ConnectionFailed(
                "the WebSocket was closed before the request was sent", endpoint=attempt.endpoint.address, phase="send"
            )
        marks, outgoing = attempt.marks, attempt.prepared
        assert isinstance(outgoing, Outgoing)
        known = self.conversation
        if known is not None and not known.is_continued_by(outgoing):
            known = None
        message = outgoing.message(known)
        exchange = self._exchange = ResponsesExchange(self, outgoing, known, attempt)
        self.socket.take(exchange)
        encoded_ns = time.perf_counter_ns()
        marks.parts.append(("encode", begin_ns, encoded_ns))
        marks.begin("send", encoded_ns)
        try:
            if self.socket.send(message):
                exchange.on_sent()
        except BaseException:
            self.left(exchange)
            raise
        return exchange

    def left(self, exchange: ResponsesExchange) -> None:
        """An exchange is over."""
        if self._exchange is exchange:
            self._exchange = None
            self.socket.take(None)

    def retire(self) -> None:
        """No further call, and no further event: the server is told by a close frame."""
        if not self._retired:
            self._retired = True
            self.socket.say_goodbye()

    async def aclose(self) -> None:
        self._retired = True
        await self.socket.aclose()

    def abort(self) -> None:
        self._retired = True
        self.socket.abort()
