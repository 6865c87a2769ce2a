"""The transport: one connection to the broker carries many calls, each with an inbox of its own.

What it cannot do, NATS being what it is: stop a responder that is faster than the consumer (messages wait in memory), and
tell the round trip to the responder (the broker stands between, so the timeline leaves the network out).
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import re
import time
from collections.abc import Coroutine, Hashable, Mapping
from typing import Any

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from spanwire import Call, Endpoint, SpanwireError
from spanwire.errors import ConfigurationError, ConnectionFailed, MessageTooBig, ProtocolError, Truncated, server_error
from spanwire.transport import Attempt, Head, Inbox

from .wire import HEARTBEAT, cancel_subject, chunk_of, decode, encode

__all__ = ["CAPACITY", "OPTIONS", "NATSConnection", "NATSExchange", "NATSTransport"]

#: Names in ``Endpoint.options``. ``nats``: further arguments of ``nats.connect``, such as ``{"user_credentials": FILE}``.
#: ``heartbeat_s``: how often a responder says that it lives, in seconds.
OPTIONS = frozenset({"heartbeat_s", "nats"})
#: Calls at once on one connection. NATS sets no limit; one slow reader should not hold thousands.
CAPACITY = 256
_HEARTBEAT_S = 2.0
#: So many heartbeats may fail to come; then the responder has gone.
_MISSED = 3
_DEFAULT_SUBJECT = "spanwire.chat"
#: What nats.connect is told by us.
_OURS = frozenset({"allow_reconnect", "closed_cb", "connect_timeout", "error_cb", "max_reconnect_attempts", "servers"})
_SUBJECT = re.compile(r"[^\s.*>]+(\.[^\s.*>]+)*")
_GOODBYE_S = 1.0
#: A cancel that was swallowed is repeated after this time, in seconds.
_AGAIN_S = 0.01


class NATSTransport:
    """Makes connections to brokers. Keeps nothing."""

    def expect(self, endpoint: Endpoint) -> int:
        return CAPACITY

    def key(self, endpoint: Endpoint) -> Hashable:
        """Calls for all subjects of a broker share connections; another account of it makes another one."""
        _subject(endpoint)
        _heartbeat_s(endpoint)
        if endpoint.uds is not None:
            raise ConfigurationError("nats:// knows no unix sockets: leave uds out", endpoint=endpoint.address)
        arguments = _arguments(endpoint)
        return endpoint.connection_key(), tuple(sorted((name, _hashable(value)) for name, value in arguments.items()))

    async def connect(self, endpoint: Endpoint, attempt: Attempt) -> NATSConnection:
        """TCP, INFO, CONNECT and PING: the library does them in one, so they are one part."""
        marks = attempt.marks
        connection = NATSConnection(endpoint)
        host = f"[{endpoint.origin.host}]" if ":" in endpoint.origin.host else endpoint.origin.host
        marks.begin("connect", time.perf_counter_ns())
        try:
            await _until_it_ends(connection.open(f"nats://{host}:{endpoint.origin.port or 4222}", _arguments(endpoint)))
        except (OSError, nats.errors.Error, TimeoutError) as error:
            cause = connection.failure or error
            await connection.aclose()
            raise ConnectionFailed(
                f"the broker cannot be reached: {str(cause) or type(cause).__name__}",
                endpoint=endpoint.address,
                phase="connect",
                retryable=not isinstance(cause, nats.errors.AuthorizationError),
            ) from cause
        except BaseException:  # cancelled
            await connection.aclose()
            raise
        marks.end("connect", time.perf_counter_ns())
        return connection


async def _until_it_ends(work: Coroutine[Any, Any, None]) -> None:
    """Await it so that a cancel is kept, and ends it.

    The library waits with asyncio.wait_for, which on Python 3.11 swallows a cancel that comes together with the result.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        while not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=_AGAIN_S)
        if not task.cancelled():
            task.exception()  # looked at, so that asyncio does not log it
        raise
    await task


def _arguments(endpoint: Endpoint) -> Mapping[str, Any]:
    found = endpoint.options.get("nats", {})
    if not isinstance(found, Mapping) or not _OURS.isdisjoint(found):
        raise ConfigurationError(
            f"Endpoint.options: nats must be a mapping of arguments of nats.connect, without {', '.join(sorted(_OURS))}",
            endpoint=endpoint.address,
        )
    return found


def _hashable(value: object) -> Hashable:
    return value if isinstance(value, Hashable) else id(value)


def _subject(endpoint: Endpoint) -> str:
    """``nats://host/models/small`` is the subject ``models.small``."""
    subject = endpoint.path.strip("/").replace("/", ".") or _DEFAULT_SUBJECT
    if not _SUBJECT.fullmatch(subject):
        raise ConfigurationError(
            f"the URL's path gives {subject!r:.60}, which is no subject of NATS", endpoint=endpoint.address
        )
    return subject


def _heartbeat_s(endpoint: Endpoint) -> float:
    value = endpoint.options.get("heartbeat_s", _HEARTBEAT_S)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 3600:
        raise ConfigurationError(
            f"Endpoint.options: heartbeat_s must be a number of seconds, not {value!r:.40}", endpoint=endpoint.address
        )
    return float(value)


class NATSConnection:
    """One connection to a broker.

    Attributes:
        failure: what the library has told of last: its own exceptions often say less.
    """

    capacity = CAPACITY
    protocol = "nats"
    engine = "nats-py"

    def __init__(self, endpoint: Endpoint) -> None:
        self.address = endpoint.address
        self.failure: Exception | None = None
        self._client = Client()
        self._inbox = ""
        self._exchanges: dict[str, NATSExchange] = {}
        self._count = 0
        self._closing = False
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._watch: asyncio.TimerHandle | None = None

    async def open(self, url: str, arguments: Mapping[str, Any]) -> None:
        """Connect, and listen for answers."""
        # Reconnecting is the pool's business: a connection that was lost takes its calls with it.
        await self._client.connect(
            url,
            **arguments,
            allow_reconnect=False,
            max_reconnect_attempts=1,
            reconnect_time_wait=0,
            connect_timeout=3600,  # the manager has the timer
            error_cb=self._on_error,
            closed_cb=self._on_closed,
        )
        self._inbox = self._client.new_inbox()
        await self._client.subscribe(f"{self._inbox}.*", cb=self._on_message)

    async def _on_error(self, error: Exception) -> None:
        self.failure = error

    async def _on_closed(self) -> None:
        self._closing = True
        self._fail_all(self.failure)

    # --- for the pool -----------------------------------------------------------------------------------------------

    async def start(self, call: Call, attempt: Attempt) -> NATSExchange:
        """Publish the call."""
        if not self.usable():
            raise ConnectionFailed("the connection takes no call", endpoint=self.address, phase="send")
        endpoint, marks = attempt.endpoint, attempt.marks
        begin_ns = time.perf_counter_ns()
        subject, payload, headers = _request(call, attempt)
        self._count += 1
        exchange = NATSExchange(self, f"{self._inbox}.{self._count}", subject, _heartbeat_s(endpoint), attempt)
        encoded_ns = time.perf_counter_ns()
        marks.parts.append(("encode", begin_ns, encoded_ns))
        marks.begin("send", encoded_ns)
        self._exchanges[exchange.inbox] = exchange
        try:
            await self._client.publish(subject, payload, reply=exchange.inbox, headers=headers)
        except nats.errors.MaxPayloadError as error:
            exchange.forget()
            limit = self._client.max_payload
            raise MessageTooBig(
                f"the call has {len(payload)} bytes, and the broker takes {limit} (its max_payload)",
                endpoint=self.address,
                phase="send",
            ) from error
        except BaseException as error:
            exchange.forget()
            if isinstance(error, (OSError, nats.errors.Error)):
                raise ConnectionFailed("the call was not sent", endpoint=self.address, phase="send") from error
            raise
        marks.sent_ns = time.perf_counter_ns()
        marks.end("send", marks.sent_ns)
        self._watch_over(exchange)
        return exchange

    def usable(self) -> bool:
        return not self._closing and self._client.is_connected

    async def aclose(self) -> None:
        self._closing = True
        self._fail_all(None)
        try:
            async with asyncio.timeout(_GOODBYE_S):
                if self._tasks:
                    await asyncio.wait(self._tasks)
                await self._client.close()
        except TimeoutError:
            self._cut()

    def abort(self) -> None:
        if self._closing and (self._client.is_closed or self._loop.is_closed()):
            return
        self._closing = True
        if self._loop.is_closed():
            for exchange in list(self._exchanges.values()):
                exchange.abort()
            self._cut()
        else:
            self._fail_all(None)
            self._spawn(self._client.close())

    def _cut(self) -> None:
        """Close the socket, and nothing else. Neither the library nor asyncio has a public call that does so at once."""
        writer = getattr(getattr(self._client, "_transport", None), "_io_writer", None)
        if writer is None:
            return
        try:
            writer.transport.abort()
        except RuntimeError:  # the loop is closed, and asyncio's last step, which closes the socket, will never come
            sock = getattr(writer.get_extra_info("socket"), "_sock", None)
            if sock is not None:
                sock.close()

    # --- for the exchanges ------------------------------------------------------------------------------------------

    def leave(self, exchange: NATSExchange, *, tell: bool) -> None:
        """The exchange leaves, and the responder is told, if it does not know."""
        if self._exchanges.pop(exchange.inbox, None) is not None and tell and self.usable():
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._spawn(self._tell(exchange))

    async def _tell(self, exchange: NATSExchange) -> None:
        with contextlib.suppress(OSError, nats.errors.Error):
            await self._client.publish(cancel_subject(exchange.subject), exchange.inbox.encode())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """In a context of its own: it must not keep the caller's."""
        if self._loop.is_closed():
            work.close()
            return
        task = self._loop.create_task(work, context=contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard, context=contextvars.Context())

    # --- what comes -------------------------------------------------------------------------------------------------

    async def _on_message(self, message: Msg) -> None:
        now_ns = time.perf_counter_ns()
        exchange = self._exchanges.get(message.subject)
        if exchange is None:  # it has left
            return
        try:
            if not message.data and message.headers and message.headers.get("Status") == "503":
                exchange.on_lost(f"nobody answers on the subject {exchange.subject}", None)
            else:
                exchange.receive(message.data, now_ns)
        except SpanwireError as error:
            error.endpoint = self.address
            exchange.fail(error)

    def _fail_all(self, cause: Exception | None) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        for exchange in list(self._exchanges.values()):
            exchange.on_lost("the connection to the broker is gone", cause)

    def _watch_over(self, exchange: NATSExchange) -> None:
        """One timer for each connection, while there are calls on it."""
        if self._watch is None:
            self._watch = self._loop.call_later(
                exchange.heartbeat_s, self._look, exchange.heartbeat_s, context=contextvars.Context()
            )

    def _look(self, after_s: float) -> None:
        self._watch = None
        now_ns = time.perf_counter_ns()
        for exchange in list(self._exchanges.values()):
            if now_ns - exchange.heard_ns > _MISSED * exchange.heartbeat_s * 1e9:
                exchange.on_lost("the responder has fallen silent", None)
        for exchange in self._exchanges.values():
            self._watch_over(exchange)
            break


def _request(call: Call, attempt: Attempt) -> tuple[str, bytes, dict[str, str]]:
    endpoint = attempt.endpoint
    if call.operation != "chat":
        raise ConfigurationError(f"nats:// carries no {call.operation!r} calls", endpoint=endpoint.address)
    headers = {name.lower(): value for name, value in endpoint.headers.items()}
    if attempt.api_key is not None:
        headers["authorization"] = f"Bearer {attempt.api_key}"
    headers |= {name.lower(): value for name, value in attempt.headers.items()}
    headers[HEARTBEAT] = str(_heartbeat_s(endpoint))
    message = {
        "model": call.model,
        "stream": attempt.streamed,
        "body": dict(call.body),
        "query": dict(endpoint.query),
    }
    try:
        return _subject(endpoint), encode(message), headers
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"the call cannot be written as JSON: {error}", endpoint=endpoint.address) from error


class NATSExchange(Inbox):
    """One call, and the inbox of its answer."""

    def __init__(
        self, connection: NATSConnection, inbox: str, subject: str, heartbeat_s: float, attempt: Attempt
    ) -> None:
        super().__init__()
        self.head = Head()
        self.inbox = inbox
        self.subject = subject
        self.heartbeat_s = heartbeat_s
        self.heard_ns = time.perf_counter_ns()
        self._connection = connection
        self._attempt = attempt
        self._next = 0
        self._left = False
        self._finish_reason: str | None = None

    def receive(self, payload: bytes, now_ns: int) -> None:
        """A message of the answer. Raises ProtocolError, MessageTooBig, ConnectionFailed."""
        marks, address = self._attempt.marks, self._connection.address
        self.heard_ns = now_ns
        marks.first_byte_ns = marks.first_byte_ns or now_ns
        marks.last_byte_ns = now_ns
        if not payload:  # a heartbeat
            return
        limit = self._attempt.endpoint.limits.max_event_bytes
        if len(payload) > limit:
            raise MessageTooBig(f"a message has {len(payload)} bytes, over the limit of {limit}")
        message = decode(payload)
        if message.get("n") != self._next:
            raise ConnectionFailed("the broker has dropped a message of the answer", endpoint=address, phase="read")
        self._next += 1
        failed = message.get("error")
        if failed is not None:
            if not isinstance(failed, dict):
                raise ProtocolError("an error of the responder is no object")
            self.head.status = failed.get("status")
            said = str(failed.get("message", "the responder failed"))
            self._end(server_error(said, status=failed.get("status"), endpoint=address))
            return
        chunk = chunk_of(message, payload)
        if chunk is not None:
            marks.first_chunk_ns = marks.first_chunk_ns or now_ns
            marks.last_chunk_ns = now_ns
            if chunk.has_content and self._attempt.streamed:
                marks.first_content_ns = marks.first_content_ns or now_ns
            self._finish_reason = chunk.finish_reason or self._finish_reason
            self.head.usage = chunk.usage or self.head.usage
            self.head.streamed = self._attempt.streamed
            self.put(chunk)
        if message.get("end"):
            cut = self._finish_reason is None
            self._end(Truncated("the answer ended without a finish reason", endpoint=address) if cut else None)
        self.wake()

    def _end(self, error: SpanwireError | None) -> None:
        self._attempt.marks.ended_ns = time.perf_counter_ns()
        self.end(error)
        self._leave(tell=False)

    def fail(self, error: SpanwireError) -> None:
        """The answer cannot be understood: nobody needs the rest of it."""
        self.end(error)
        self._leave(tell=True)

    def on_lost(self, what: str, cause: Exception | None) -> None:
        """Nothing more will come."""
        if self._left:
            return
        phase = "read" if self._attempt.marks.first_byte_ns else "wait"
        error = ConnectionFailed(what, endpoint=self._connection.address, phase=phase)
        error.__cause__ = cause
        self.end(error)
        self._leave(tell=True)

    def forget(self) -> None:
        """It was never sent: an exchange that was not started is not released either."""
        self._left = True
        self._connection.leave(self, tell=False)

    def _leave(self, *, tell: bool) -> None:
        if not self._left:
            self._left = True
            self._connection.leave(self, tell=tell)
            self._attempt.released()

    @property
    def complete(self) -> bool:
        return super().complete or (self._finish_reason is not None and not self._left)

    def abort(self, error: SpanwireError | None = None) -> None:
        super().abort(error)
        self._leave(tell=True)
