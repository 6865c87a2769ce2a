"""The plugin contract: what a transport is, what it may do, and what core gives it.

The life of one call, as a transport sees it::

    manager                      transport                              pool
    ───────                      ─────────                              ────
    slot granted
    asks for a connection ─────────────────────────────────────────────► idle one, one that ends within
                                 connect(endpoint, attempt)  ◄────────── 5 ms, one being dialled, or a new dial
                                   marks dns, tcp, tls
    start(call, attempt) ──────► writes the request, marks encode,
                                 send; never awaits the answer
    read() ────────────────────► what has arrived: a batch of chunks
      ...                        (marks first byte, chunk, content)
    read() ────────────────────► () at the terminal event
    ends the call                the rest of the message comes in
                                 attempt.released() ───────────────────► free for the next call

A transport never retries, sleeps for back-off, opens spans or queues: the manager does that, for all of them alike.

Rules:

* ``connect()`` is cancelled at ``Timeouts.connect_s``, and when the manager is closed. It then ends at once, by
  CancelledError, and leaves no socket open. :func:`spanwire.net.dial.dial` is how to connect: DNS, TCP, proxies, TLS and
  unix sockets, each marked, each the phase of its error; :class:`spanwire.net.sockets.RoundTrip` tells ``rtt_ns``.
* ``attempt.released()`` is called exactly once for each started exchange: when it has left the connection (end of its
  message, abort, break); of a multiplexed connection when its stream is closed.
* A ``start()`` that raises, or is cancelled, has started no exchange: the manager gives the connection back by itself.
  ``released()`` need not be called then, and does no harm. If a part of the request was written, the connection is unusable
  by then.
* What arrived before a failure is delivered before the error. Arrival is marked when bytes arrive, not when they are
  asked for.
* ``first_content_ns`` is set for an answer that was asked for as a stream (``attempt.streamed``); at its end, if it came
  whole. A whole answer to a call that was not streamed leaves it at 0, for nobody can read a part of it; then
  ``Timeouts.first_content_s`` holds until its end.
* A consumer that does not read stops the server: :meth:`Inbox.on_high`.
* ``abort()`` is idempotent, never raises, and tells the server to stop. A pending ``read`` then returns empty; with an
  error, what has arrived is delivered first, and then the error is raised.
* Where the library cannot reset one exchange, aborting makes the connection unusable (``usable()`` is False) and the
  pool closes it after its last exchange.
* Tasks that a connection owns are started in an empty ``contextvars.Context``: they outlive the call.
* Errors are those of :mod:`spanwire.errors`, with the library's exception as ``__cause__``. A server that takes no
  further client has an error with ``full = True``: the manager waits for room. One that has not begun, and wants the
  same call on another connection, has ``again = True``.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec

from .calls import Call, Chunk, Embeddings, SessionEvent, Usage
from .endpoint import Endpoint, Timeouts
from .errors import SpanwireError
from .timeline import Marks, Outcome

__all__ = [
    "CONTRACT",
    "Attempt",
    "Connection",
    "Dialect",
    "Exchange",
    "Head",
    "Inbox",
    "Item",
    "SessionExchange",
    "Transport",
    "TransportSpec",
    "Turn",
]

#: Version of this contract. A plugin states the one it was written for (``TransportSpec.contract``).
CONTRACT = 1

Item = Chunk | Embeddings | SessionEvent


class Head:
    """The start of an answer, filled as it becomes known.

    Attributes:
        status: the HTTP status, or None where the wire has none.
        headers: names in lower case; repeated ones joined with ``", "``.
        id: the server's id of the answer.
        model: the model that the server says answered.
        usage: the last count of tokens that it gave, whether it has been handed on or not.
        streamed: the answer is a stream of events, whatever was asked for; None before that is known. Headers of a stream
            were written before its first token.
        late_events: raw JSON of the answer's last events, from its finish reason on, or of the whole answer if it is not
            a stream: where servers put what they say of their own time.
        trailers: as headers, but sent after the answer (HTTP trailers, gRPC trailing metadata).
        attributes: what the conventions of this wire want on the call's span, such as ``rpc.method``.
    """

    __slots__ = ("attributes", "headers", "id", "late_events", "model", "status", "streamed", "trailers", "usage")

    def __init__(self) -> None:
        self.status: int | None = None
        self.headers: Mapping[str, str] = {}
        self.id: str | None = None
        self.model: str | None = None
        self.usage: Usage | None = None
        self.streamed: bool | None = None
        self.late_events: Sequence[bytes] = ()
        self.trailers: Mapping[str, str] = {}
        self.attributes: Mapping[str, str | int] = {}


class Dialect(msgspec.Struct, frozen=True):
    """A server's message schema on a transport: path, headers, how calls are encoded and answers decoded.

    Attributes:
        transport: name of the transport that it belongs to.
        name: as in ``Endpoint(dialect=...)``.
        codec: what the transport asks for; its documentation says what it has to be. For ``sse`` that is
            ``spanwire_sse.codec.Codec``. One thing there is easily missed: an event that brings a chunk does not end the
            answer, whatever ``done`` says after it. Where a server's last event has both, give None for it, and the chunk
            from ``end()``; else the call ends with the next event, or with the message.
        operations: which operations it knows: ``chat``, ``embeddings``; ``session`` alone for one of sessions.
        options: names in ``Endpoint.options`` that it understands.
        default: it is used where the endpoint names none. For each transport one for calls, and one for sessions.
        timing_fields, timing_headers: fields of the body, and headers, that make servers of this schema say how long they
            took. Sent with ``Endpoint(server_timing="ask")``, where the call does not set them itself.
    """

    transport: str
    name: str
    codec: Any
    operations: frozenset[str] = frozenset({"chat"})
    options: frozenset[str] = frozenset()
    default: bool = False
    timing_fields: Mapping[str, Any] = {}
    timing_headers: Mapping[str, str] = {}


class Attempt:
    """What the manager hands to a transport for one connect, or for one exchange.

    Attributes:
        endpoint: where to.
        dialect: the dialect to speak, None where the transport has none.
        streamed: the answer is wanted as a stream.
        api_key: resolved; None for none.
        headers: further headers of this call: from the call, the hooks, and ``traceparent`` and the like. They win
            over ``endpoint.headers``.
        timeouts: limits of the call. The manager watches them; a transport may pass them on to its server.
        deadline_ns: when the call has to end by ``Timeouts.total_s``, in ns of ``perf_counter_ns``; None for never.
        asked_ns: when the call first asked for a connection; 0 for a dial.
        prepared: what :meth:`Transport.prepare` made of the call, None if the transport has no such method.
        marks: fill in what happens, when it happens.
    """

    __slots__ = (
        "_on_released",
        "api_key",
        "asked_ns",
        "deadline_ns",
        "dialect",
        "endpoint",
        "headers",
        "marks",
        "prepared",
        "streamed",
        "timeouts",
    )

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        timeouts: Timeouts,
        dialect: Dialect | None = None,
        streamed: bool = False,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        marks: Marks | None = None,
        deadline_ns: int | None = None,
        on_released: Callable[[], None] | None = None,
        prepared: object = None,
        asked_ns: int = 0,
    ) -> None:
        self.endpoint = endpoint
        self.dialect = dialect
        self.streamed = streamed
        self.api_key = api_key
        self.headers: Mapping[str, str] = headers or {}
        self.timeouts = timeouts
        self.deadline_ns = deadline_ns
        self.prepared = prepared
        self.asked_ns = asked_ns
        self.marks = marks or Marks()
        self._on_released = on_released

    def released(self) -> None:
        """The exchange has left its connection. A second call is harmless, and so is one from a ``start()`` that raises:
        the manager has the connection back by then."""
        callback, self._on_released = self._on_released, None
        if callback is not None:
            callback()


@runtime_checkable
class Exchange(Protocol):
    """One call on a connection."""

    @property
    def head(self) -> Head:
        """What is known of the answer's start by now."""
        ...

    async def read(self) -> Sequence[Item]:
        """What has arrived, at least one item; empty at the terminal event. Raises what ended the answer early.

        A call that is not streamed gives one item. Cancelling a pending read loses nothing.
        """
        ...

    @property
    def complete(self) -> bool:
        """Everything of the answer but its end has arrived: a caller that goes now need not stop the server."""
        ...

    def abort(self, error: SpanwireError | None = None) -> None:
        """Leave now and tell the server. Idempotent.

        A pending :meth:`read` returns empty. With an error, reads first give what has arrived, and then raise it.
        """
        ...


class Turn:
    """One turn of a session: from what asked for an answer to the answer's end. Its transport fills it in.

    Attributes:
        begin_ns, end_ns: ns of ``perf_counter_ns``.
        marks: as of an exchange. ``rtt_ns`` is 0 where the server itself began the turn, so that no way there is in it.
        head: id, model and usage, as far as they were told.
        finish_reason: why the answer ended, None if unknown.
        outcome: as of a call; with ``error`` what the server said went wrong.
    """

    __slots__ = ("begin_ns", "end_ns", "error", "finish_reason", "head", "marks", "outcome")

    def __init__(self, begin_ns: int) -> None:
        self.begin_ns = begin_ns
        self.end_ns = 0
        self.marks = Marks()
        self.head = Head()
        self.finish_reason: str | None = None
        self.outcome: Outcome = "completed"
        self.error: SpanwireError | None = None


@runtime_checkable
class SessionExchange(Exchange, Protocol):
    """A session: what is read are :class:`~spanwire.calls.SessionEvent`.

    A transport with the capability ``"session"`` gives one for a call of operation ``session``. It has a connection of its
    own, which is not used again after it, or a stream of one (gRPC). ``read`` ends when the server has closed the session in
    order. Where one side can end what it sends and go on reading, there is a method ``async send_eof()`` more; it waits until
    what was sent before has left, and does nothing when the session has ended.

    Attributes:
        on_turn: set by the manager: to be called with each turn that has ended.
    """

    on_turn: Callable[[Turn], None] | None

    async def send(self, message: Mapping[str, Any] | str | bytes) -> None:
        """Send a message: a mapping as JSON, a text as text, bytes as a binary frame. Waits while the peer takes no more.

        Raises:
            ConnectionFailed: the session has ended.
            ConfigurationError: it cannot be written as JSON.
        """
        ...


@runtime_checkable
class Connection(Protocol):
    """Carries exchanges. Belongs to the loop that made it; the pool owns it.

    One that has pooled connections of its own behind it says so with an attribute ``self_pooling = True``: it is made
    without connecting, gets no span, and its exchanges say which connection they were on (``Marks.use``).
    """

    @property
    def capacity(self) -> int:
        """Exchanges at once. Read at each decision; may change. 1 for HTTP/1.1."""
        ...

    @property
    def protocol(self) -> str:
        """The wire's name and version as on spans: ``http/1.1``, ``h2``, ``websocket``, ``grpc``."""
        ...

    @property
    def engine(self) -> str:
        """What moves the bytes: the name of the library behind it, ``spanwire`` for connections of our own."""
        ...

    async def start(self, call: Call, attempt: Attempt) -> Exchange:
        """Hand over the request. Never awaits the answer.

        If it raises, no exchange was started, and the manager gives the connection back.
        """
        ...

    def usable(self) -> bool:
        """Whether it may take a NEW exchange, now or once one of those on it has left. Load is not its business."""
        ...

    async def aclose(self) -> None:
        """Close it in order, within a second."""
        ...

    def abort(self) -> None:
        """Close it at once; harmless on a closed loop."""
        ...


@runtime_checkable
class Transport(Protocol):
    """Makes connections. One object for each manager; keeps no connection itself.

    One whose connections remember something of the calls that they carried (a WebSocket whose server keeps the
    conversation) has a method ``prepare(call, endpoint, dialect)`` more. What it makes of a call, such as its encoded
    messages, is in ``Attempt.prepared``, and idle connections are asked ``suits(prepared)``: a number, and the highest
    one gets the call.
    """

    def expect(self, endpoint: Endpoint) -> int:
        """Capacity that a dial probably brings: so many callers are planned with one dial. May change as it learns."""
        ...

    def key(self, endpoint: Endpoint) -> Hashable:
        """Endpoints with equal keys share connections. ``endpoint.connection_key()``, plus what the handshake sends.

        Asked once for each endpoint object, before its first call: the place to refuse settings that cannot work
        (ConfigurationError), and to build what its connections will share.
        """
        ...

    async def connect(self, endpoint: Endpoint, attempt: Attempt) -> Connection:
        """Make a connection; marks its parts on ``attempt.marks``. Raises ConnectionFailed with the phase.

        A dial serves whoever comes first, so ``attempt`` has nothing of a call: no headers, and no ``deadline_ns``.
        """
        ...


class Garbage(TypeError):
    """A transport gave something else than its contract says. Its text says what, and shows nothing of the call."""


def told(error: BaseException) -> str:
    """What may be shown of a transport's bug in a message: our own words. What others' exceptions say may be secret."""
    return f": {error}" if isinstance(error, Garbage) else ""


class TransportSpec(msgspec.Struct, frozen=True):
    """What ``register_transports()`` returns.

    Attributes:
        name: as in ``Endpoint(transport=...)``, on spans and in timelines.
        schemes: URL schemes that it serves.
        factory: makes the :class:`Transport`, without arguments.
        capabilities: what it can do besides single calls: ``"session"``, ``"jobs"``, ``"self_pooling"``.
        options: names in ``Endpoint.options`` that it understands.
        contract: version of the contract that it was written for. Say it: one that says nothing was written for the first.
    """

    name: str
    schemes: tuple[str, ...]
    factory: Callable[[], Transport]
    capabilities: frozenset[str] = frozenset()
    options: frozenset[str] = frozenset()
    contract: int = 1  # not CONTRACT: a later core would take an older plugin for one of its own time


class Inbox:
    """Implements :meth:`Exchange.read`: batches, data before the error, abort. Used on the connection's loop only.

    The side that receives calls :meth:`put` for each item, :meth:`wake` once for each batch of bytes, and
    :meth:`end` once. A subclass overrides :meth:`on_high` and :meth:`on_low` to stop a peer that is faster than the
    consumer.

    Args:
        high: items that may lie here unread before ``on_high`` is called. Default 4096: at the commonest size, one
            token of some 200 bytes for each item, about a megabyte.
    """

    __slots__ = ("_ended", "_ended_well", "_error", "_high", "_items", "_paused", "_waiter")

    def __init__(self, *, high: int = 4096) -> None:
        self._items: list[Item] = []
        self._waiter: asyncio.Future[None] | None = None
        self._error: SpanwireError | None = None
        self._ended = False
        self._ended_well = False
        self._high = high
        self._paused = False

    def on_high(self) -> None:
        """Many items lie here unread: stop the peer. Of a connection that others share, this exchange alone."""

    def on_low(self) -> None:
        """They have been read: go on."""

    @property
    def complete(self) -> bool:
        """See :attr:`Exchange.complete`."""
        return self._ended_well

    def put(self, item: Item) -> None:
        """Add an item; the reader is told at the next :meth:`wake`."""
        self._items.append(item)

    def wake(self) -> None:
        """Tell the reader that something has arrived."""
        waiter = self._waiter
        if waiter is not None and (self._items or self._ended):
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)
        elif not (self._paused or self._ended) and len(self._items) >= self._high:
            self._paused = True
            self.on_high()

    def end(self, error: SpanwireError | None = None) -> None:
        """No more items. With an error: raised by the read after the last item. A second call is ignored."""
        if not self._ended:
            self._ended = True
            self._ended_well = error is None
            self._error = error
            self.wake()

    def abort(self, error: SpanwireError | None = None) -> None:
        """See :meth:`Exchange.abort`. Without an error what was not read is dropped."""
        if error is None:
            self._items = []
            self._error = None
        elif not self._ended:
            self._error = error
        self._ended = True
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody will ever read
            self.wake()

    async def read(self) -> Sequence[Item]:
        """See :meth:`Exchange.read`. One reader at a time."""
        waiter = self.wait()
        if waiter is not None:
            await waiter
        return self.take()

    def wait(self) -> asyncio.Future[None] | None:
        """The first half of :meth:`read`: what to await until something is there, None if something is."""
        if self._items or self._ended:
            return None
        waiter = self._waiter = asyncio.get_running_loop().create_future()
        return waiter

    def take(self) -> list[Item]:
        """The second half of :meth:`read`: what has arrived. Raises as it does."""
        items = self._items
        if items:
            self._items = []
            if self._paused:
                self._paused = False
                self.on_low()
        elif self._error is not None:
            error, self._error = self._error, None
            raise error
        return items
