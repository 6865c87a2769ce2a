"""One request of an httpx-like client, watched: what its synchronous and its asynchronous streams have in common."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any
from weakref import ref

from spanwire.bridges.httpcore import TraceBridge
from spanwire.endpoint import Endpoint
from spanwire.manager import ConnectionManager
from spanwire.timeline import Outcome
from spanwire.wire.along import Along
from spanwire.witness import TRACE_HEADERS as _TRACE_HEADERS
from spanwire.witness import Witness

from .recognise import DEFAULT_RULES, Recognised, Rules

__all__ = ["TRACE_HEADERS", "Settings", "Tail", "Watched", "endpoint_of", "headers_of", "leads_somewhere"]

#: Headers by which a request belongs to a trace already.
TRACE_HEADERS = frozenset(name.encode() for name in _TRACE_HEADERS)
#: How a body ends whose length was not known: RFC 9112 section 7.1. Before it stands the end of the last chunk.
_LAST_CHUNK = b"\r\n0\r\n\r\n"


class Settings:
    """What the transports of one client have in common.

    Attributes:
        rules: which requests are looked at.
        manager: whose spans, metrics, observers and tables are used; None for the process's default one.
        drain: give connections back after streams.
    """

    __slots__ = ("drain", "manager", "rules")

    def __init__(
        self, *, rules: Rules | None = None, manager: ConnectionManager | None = None, drain: bool = True
    ) -> None:
        self.rules = rules or DEFAULT_RULES
        self.manager = manager
        self.drain = drain


@lru_cache(maxsize=256)
def endpoint_of(scheme: str, host: str, port: int | None) -> Endpoint:
    """One object for each origin: it keeps the labels of its spans."""
    name = f"[{host}]" if ":" in host else host
    return Endpoint(f"{scheme}://{name}:{port}" if port else f"{scheme}://{name}", proxy=None)


def leads_somewhere(url: Any) -> bool:
    """Whether there can be an endpoint behind this URL of an httpx-like library. Elsewhere the library is to complain."""
    port: int | None = url.port
    return url.scheme in ("http", "https") and bool(url.raw_host) and (port is None or 0 < port < 65536)


def headers_of(raw: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Names in lower case, repeated ones joined."""
    headers: dict[str, str] = {}
    for raw_name, raw_value in raw:
        name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers


class Watched:
    """Joins the :class:`~spanwire.witness.Witness`, the trace events, and what is known of the message's end.

    Args:
        asked: what the request asks for.
        scheme, host, port: of its URL, the host as it is written there.
        engine, id: the library's name, and that of a connection of which nothing is known.
        headers: the request's own, where a trace is among them.
        bridged: the client tells what it does by httpcore's trace events.
        tailed: follow what is read from the connection, so that :attr:`end_is_here` knows. A synchronous drain needs it.

    Attributes:
        origin: host and port, to which the drain's experience belongs.
        http11: the answer came over HTTP/1.1, whose connection needs its message read to the end.
        stopped: the call is over, and its books are closed.
    """

    __slots__ = ("_framed", "_length", "_tails", "bridge", "drains", "http11", "origin", "stopped", "witness")

    def __init__(
        self,
        asked: Recognised,
        *,
        scheme: str,
        host: str,
        port: int | None,
        engine: str,
        id: str,
        settings: Settings,
        headers: Mapping[str, str] | None,
        bridged: bool = True,
        tailed: bool = True,
    ) -> None:
        manager = settings.manager
        more: dict[str, Any] = {}
        if manager is not None:
            more = {"telemetry": manager.telemetry, "registry": manager.registry}
        self.origin = (host, port or (443 if scheme == "https" else 80))
        self.http11 = False
        self.drains = settings.drain
        self.stopped = False
        self._framed = False
        self._length: int | None = None
        self.witness = Witness.begin(
            endpoint_of(scheme, host, port),
            operation=asked.operation,
            model=asked.model,
            streamed=asked.streamed,
            body_params=asked.params,
            transport=engine,
            request_headers=headers,
            **more,
        )
        self._tails = _Tails()  # apart, so that nothing here refers to itself and waits for the garbage collector
        self.bridge: TraceBridge | None = None
        if bridged:
            on_event = self._tails.on_event if tailed and asked.streamed and settings.drain else None
            self.bridge = TraceBridge(self.witness.marks, engine=engine, id=id, on_event=on_event, every_event=False)
            self.bridge.to(self.origin)

    def handed_over(self) -> None:
        """The client's transport is given the request now."""
        now_ns = time.perf_counter_ns()
        self.witness.handed_over(now_ns)
        if self.bridge is not None:
            self.bridge.begin(now_ns)

    def answered(self, status: int, raw_headers: Iterable[tuple[bytes, bytes]], extensions: Mapping[str, Any]) -> None:
        """The answer's head is there."""
        at_ns = time.perf_counter_ns()
        version = extensions.get("http_version", b"")
        headers = headers_of(raw_headers)
        if self.bridge is not None:
            self.bridge.answered(extensions.get("network_stream"), version.decode("latin-1"), at_ns)
            self.witness.marks.rtt_ns = self.bridge.rtt_ns
            at_ns = self.bridge.head_ns or at_ns
        self.witness.head(status, headers, at_ns)
        self.http11 = version == b"HTTP/1.1"
        length = headers.get("content-length", "")
        if length.isdigit():
            self._length = int(length)
        closes = "close" in headers.get("connection", "").lower()
        self._framed = not closes and ("transfer-encoding" in headers or self._length is not None)
        if not self.http11:
            self._tails.let_go()

    @property
    def along(self) -> Along:
        """What reads along; of an answer that could not be begun, nothing that anybody looks at."""
        return self.witness.along or Along()

    @property
    def worth_draining(self) -> bool:
        """The answer is there but for the end of its message, and that end would free the connection."""
        return self.drains and self.http11 and self._framed and self.witness.complete

    @property
    def end_is_here(self) -> bool:
        """The end of the message was read from the connection already: finding it waits for nobody."""
        if self._length is not None:
            along = self.witness.along
            return along is not None and along.bytes >= self._length
        tail = self._tails.tail
        return tail is not None and tail.has_end

    # --- the end ----------------------------------------------------------------------------------------------------

    def end(self, outcome: Outcome, error: BaseException | None = None) -> None:
        """The call is over. The connection may be drained after it."""
        if not self.stopped:
            self.stopped = True
            if self.bridge is not None:
                self.bridge.stop()
            self.witness.end(outcome, error)

    def failed(self, error: BaseException) -> None:
        """The client raised this to its user."""
        self._tails.let_go()
        if isinstance(error, Exception):
            names = {cls.__name__ for cls in type(error).__mro__}
            self.end("timeout" if names & {"TimeoutException", "TimeoutError"} else "error", error)
        else:
            self.end("cancelled")

    def abandon(self) -> None:
        """The user's handle was dropped. See :meth:`Witness.abandon`."""
        if not self.stopped:
            self.stopped = True
            self._tails.let_go()
            if self.bridge is not None:
                self.bridge.stop()
            self.witness.abandon()

    def over(self) -> None:
        """The message was read to its end."""
        self._tails.let_go()
        self.end("completed")

    def let_go(self) -> None:
        """Nothing of the connection is looked at any more. A second call is harmless."""
        self._tails.let_go()

    def begin_tail(self) -> Tail | None:
        """Follow the connection from now on; for the drain, which lets it go. None if that is not possible."""
        stream = self.bridge.stream if self.bridge is not None else None
        try:
            return None if stream is None else Tail.on(stream)
        except Exception:  # noqa: BLE001 - a stream of another kind
            return None

    def take_tail(self) -> Tail | None:
        """For the drain, which lets it go."""
        tail, self._tails.tail = self._tails.tail, None
        return tail


class _Tails:
    """Follows a request to the stream that carries it.

    Attributes:
        tail: what was read last from the connection, None if that is not seen.
    """

    __slots__ = ("tail",)

    def __init__(self) -> None:
        self.tail: Tail | None = None

    def on_event(self, name: str, stream: Any) -> None:
        """See :class:`TraceBridge`. Before the answer can come, whose last bytes may come with its first."""
        if stream is not None and name == "http11.send_request_headers.started":
            try:
                self.let_go()  # of the request for a tunnel, below the TLS of this one
                self.tail = Tail.on(stream)
            except Exception:  # noqa: BLE001 - a stream of another kind
                self.tail = None

    def let_go(self) -> None:
        """A second call is harmless."""
        tail, self.tail = self.tail, None
        if tail is not None:
            tail.let_go()


class Overdue(Exception):
    """Raised in the place of a read while draining, when the time for it is over."""


class Tail:
    """Stands in for ``read`` of one network stream of httpcore, as long as one answer is read from it.

    It keeps the last bytes, which tell whether the end of the message lies in the parser's buffer already, where no
    ``select`` would find it; and it can clip the time of reads, which a client fixes when it begins to read an answer.
    Only the one object is changed, for that time only, by its public method.
    """

    __slots__ = ("_last", "_read", "deadline_s", "stream")

    def __init__(self, stream: Any) -> None:
        self.stream = ref(stream)
        self._read = type(stream).read
        self._last = b""
        self.deadline_s: float | None = None

    @classmethod
    def on(cls, stream: Any) -> Tail | None:
        """Begin; None for a stream whose ``read`` is somebody else's already."""
        own = vars(stream)
        if "read" in own:
            return None
        tail = cls(stream)
        own["read"] = tail._read_async if inspect.iscoroutinefunction(tail._read) else tail._read_sync
        return tail

    def let_go(self) -> None:
        """End. A second call is harmless."""
        stream = self.stream()
        if stream is not None and getattr(vars(stream).get("read"), "__self__", None) is self:
            del vars(stream)["read"]

    @property
    def has_end(self) -> bool:
        """What was read last ends like a message in chunks."""
        return self._last == _LAST_CHUNK

    @property
    def socket(self) -> Any:
        """Of the connection, None if it has none."""
        stream = self.stream()
        return None if stream is None else stream.get_extra_info("socket")

    def _left_s(self, timeout: float | None) -> float | None:
        if self.deadline_s is None:
            return timeout
        left_s = self.deadline_s - time.monotonic()
        if left_s <= 0:
            raise Overdue
        return left_s if timeout is None else min(left_s, timeout)

    def _keep(self, data: bytes) -> None:
        self._last = data[-7:] if len(data) >= 7 else (self._last + data)[-7:]

    def _read_sync(self, max_bytes: int, timeout: float | None = None) -> bytes:
        data: bytes = self._read(self.stream(), max_bytes, self._left_s(timeout))
        self._keep(data)
        return data

    async def _read_async(self, max_bytes: int, timeout: float | None = None) -> bytes:
        data: bytes = await self._read(self.stream(), max_bytes, self._left_s(timeout))
        self._keep(data)
        return data
