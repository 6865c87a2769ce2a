"""Marks and connection facts out of the trace events of httpcore and httpcore2, which httpx and httpx2 pass on.

A request's ``extensions["trace"]`` is called with a name and a dict at each step (an async callback in an async client,
a plain function in a synchronous one)::

    the pool is asked      local      (no event: until the first one; ``shared`` if it waited for another's connect)
    connect_tcp            tcp        (the name is looked up in it: dns cannot be told apart)
    connect_unix_socket    connect
    send_request_headers   proxy      of a CONNECT, until its answer; and setup_socks5_connection
    start_tls              tls
    send_connection_init   upgrade    (the preface of HTTP/2)
    send_request_*         send       until the body is with the kernel

Nothing of httpx or httpcore is imported: names and dicts come in, marks go out. A step that fails stays open in the
marks, so that they say where a connect stood; a client that tries again begins it anew.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from ..net.sockets import min_rtt_ns
from ..pool import _ids
from ..timeline import ConnectionUse, Marks

__all__ = ["TraceBridge", "is_watched", "new_connection_id", "shut_down"]

#: Waits below this are the client's own work before it sends, not a wait for its pool, in ns. Measured: 0.1 to 0.5 ms.
_MEASURABLE_NS = 1_000_000

_PARTS = {
    "connect_tcp": "tcp",
    "connect_unix_socket": "connect",
    "start_tls": "tls",
    "setup_socks5_connection": "proxy",
    "send_connection_init": "upgrade",
}
#: Events that mark nothing.
_DULL = frozenset(
    f"{prefix}.{event}"
    for prefix in ("http11", "http2")
    for event in (
        "send_request_headers.complete",
        "send_request_body.started",
        "receive_response_headers.started",
        "receive_response_body.started",
        "receive_response_body.complete",
        "response_closed.started",
        "response_closed.complete",
    )
)
_CONNECTS = frozenset({"connect_tcp", "connect_unix_socket"})
_PROTOCOLS = {"http11": "http/1.1", "http2": "h2"}


class _Known:
    """What is known of a connection that a client keeps. ``made_ns`` is 0 where its connect was not seen, and then
    ``proxied`` is None."""

    __slots__ = ("active", "begin_ns", "id", "idle_since_ns", "made_ns", "proxied")

    def __init__(self, id: str, begin_ns: int, made_ns: int, proxied: bool | None) -> None:
        self.id = id
        self.begin_ns = begin_ns
        self.made_ns = made_ns
        self.proxied = proxied
        self.idle_since_ns = 0
        self.active = 0


#: By httpcore's stream object, which is the same for as long as the connection lives.
_known: WeakKeyDictionary[Any, _Known] = WeakKeyDictionary()


def new_connection_id() -> str:
    """A short name for a connection, unique in the process: from the pool's own count."""
    return f"c{next(_ids)}"


class TraceBridge:
    """Takes the events of one exchange. Each :meth:`event` is given its time, so it needs no clock.

    Args:
        marks: filled in; ``marks.use`` too.
        engine: the library's name, ``httpx`` or ``httpx2``.
        id: of the connection, for as long as nothing is known of it.
        on_event: called after each event with its name, and the stream that was made or is used, else None. It may
            raise, which ends the request.
        every_event: it wants those too that mark nothing.

    Attributes:
        head_ns: when the answer's head was there, 0 before.
        stream: httpcore's stream that carries the exchange, once known.
        proxied: it goes through a proxy, as far as was seen.
        waiting: the client was asked, and nothing has happened since.
    """

    __slots__ = (
        "_begin_ns",
        "_connect_ns",
        "_current",
        "_engine",
        "_made",
        "_marks",
        "_on_event",
        "_origin",
        "_rtt_ns",
        "_skips",
        "_stopped",
        "_tunnel",
        "_upgraded",
        "head_ns",
        "proxied",
        "stream",
        "waiting",
    )

    def __init__(
        self,
        marks: Marks,
        *,
        engine: str,
        id: str,
        on_event: Callable[[str, Any], None] | None = None,
        every_event: bool = True,
    ) -> None:
        self._marks = marks
        self._engine = engine
        self._origin = ("", 0)
        self._on_event = on_event
        self._skips = on_event is None or not every_event
        self._begin_ns = 0
        self.waiting = False
        self._connect_ns = 0  # when this exchange began to connect by itself, and what has come of it
        self._made: _Known | None = None
        self._upgraded = False
        self.proxied = False
        self._tunnel = False
        self._stopped = False
        self._current: _Known | None = None
        self._rtt_ns: int | None = None
        self.head_ns = 0
        self.stream: Any = None
        # Said before anything is known: without it the connection would be taken for one that was used before.
        marks.use = ConnectionUse(id, False, engine=engine)

    # --- what goes into the request ---------------------------------------------------------------------------------

    def to(self, origin: tuple[str, int]) -> None:
        """Host and port of the request as the client writes them: a connect to another one goes to a proxy."""
        self._origin = origin

    def extensions(self, given: Mapping[str, Any] | None = None, *, asynchronous: bool) -> dict[str, Any]:
        """The request's extensions: those given, with our callback before the one that is there already.

        ``given["timeout"]`` tells, besides, when the client's pool is asked.
        """
        merged = dict(given or {})
        merged["timeout"] = _Timeouts(merged.get("timeout") or {}, self.pool_asked)
        before: Callable[[str, Mapping[str, Any]], Any] | None = merged.get("trace")
        if asynchronous:

            async def trace(name: str, info: Mapping[str, Any]) -> None:
                self._traced(name, info)
                if before is not None:
                    await before(name, info)

        else:

            def trace(name: str, info: Mapping[str, Any]) -> None:  # type: ignore[misc]
                self._traced(name, info)
                if before is not None:
                    before(name, info)

        merged["trace"] = trace
        return merged

    def _traced(self, name: str, info: Mapping[str, Any]) -> None:
        if name in _DULL and self._skips and not self.waiting:
            return
        at_ns = time.perf_counter_ns()
        self.event(name, info, at_ns)
        stream = None
        if name.endswith(".complete"):
            stream = _stream_in(info)
        elif name.endswith("send_request_headers.started"):
            stream = _stream_of_caller()
            if not self._tunnel:
                self.carried_by(stream, at_ns)
        if self._on_event is not None:
            self._on_event(name, stream)

    # --- what happens -----------------------------------------------------------------------------------------------

    def begin(self, at_ns: int) -> None:
        """The client was asked."""
        if not self._stopped:
            self._begin_ns = at_ns
            self.waiting = True
            self._marks.begin("local", at_ns)

    def pool_asked(self) -> None:
        """The client asks its pool, after its own hooks and authentication: the wait begins only now."""
        self.begin(time.perf_counter_ns())

    def event(self, name: str, info: Mapping[str, Any], at_ns: int) -> None:
        """One trace event. Unknown ones are ignored."""
        prefix, _, rest = name.partition(".")
        step, _, state = rest.partition(".")
        if self._stopped or not state:
            return
        if self.waiting and state == "started":
            self._end_wait(at_ns)
        part = _PARTS.get(step)
        if part is not None:
            self._part(prefix, step, part, state, info, at_ns)
        elif step == "send_request_headers" and state == "started":
            self._tunnel = getattr(info.get("request"), "method", b"") == b"CONNECT"
            self.proxied = self.proxied or self._tunnel
            self.head_ns = 0
            self._marks.begin("proxy" if self._tunnel else "send", at_ns)
            if not self._tunnel:
                self._use(protocol=_PROTOCOLS.get(prefix))
        elif step == "send_request_body" and state == "complete" and not self._tunnel:
            self._marks.sent_ns = at_ns
            self._marks.end("send", at_ns)
        elif step == "receive_response_headers" and state == "complete":
            if self._tunnel:
                self._tunnel = False
                self._marks.end("proxy", at_ns)
            else:
                self.head_ns = at_ns

    def _end_wait(self, at_ns: int) -> None:
        self.waiting = False
        waited = at_ns - self._begin_ns >= _MEASURABLE_NS
        self._marks.end("local", at_ns if waited else self._begin_ns)  # of no length: left out of the timeline

    def _part(self, prefix: str, step: str, part: str, state: str, info: Mapping[str, Any], at_ns: int) -> None:
        if state == "started":
            if step in _CONNECTS:
                there = (info.get("host"), info.get("port"))
                self.proxied = prefix == "socks" or (step == "connect_tcp" and there != self._origin)
                self._connect_ns = at_ns
                self._made = None
            self._marks.begin(part, at_ns)
        elif state == "complete":
            self._marks.end(part, at_ns)
            if part == "upgrade" and self._made is None:  # of two threads one connects, and the other is here first
                self._upgraded = True
            else:
                self._connected(_stream_in(info), at_ns)

    def _connected(self, stream: Any, at_ns: int) -> None:
        """A step of a connect is done. Known at once: over HTTP/2 others may go out on the connection before we do."""
        if self._made is None:
            self._made = _Known(new_connection_id(), self._connect_ns, at_ns, self.proxied)
        self._made.made_ns = at_ns
        if stream is not None:  # TLS makes another one of it
            _known[stream] = self._made

    def carried_by(self, stream: Any, at_ns: int) -> None:
        """The connection on which the request goes out, or on which its answer came. None changes nothing."""
        if stream is None or self._stopped:
            return
        known = _known.get(stream)
        if known is None:  # the client has made it before it was brought to us
            known = _known.setdefault(stream, _Known(new_connection_id(), 0, 0, None))
        if known is self._current:
            return
        self.left()
        self.stream = stream
        self._current = known
        idle_s = None
        reused = known is not self._made
        if self._upgraded:
            known.made_ns = max(known.made_ns, at_ns)
        if reused and known.made_ns > self._begin_ns:  # somebody else's connect, which this one has waited for
            reused = False
            self._share(known)
        if reused and not known.active and known.idle_since_ns and known.idle_since_ns <= self._begin_ns:
            idle_s = (at_ns - known.idle_since_ns) / 1e9
        known.active += 1
        age_s = (at_ns - known.made_ns) / 1e9 if reused and known.made_ns else None
        self._marks.use = ConnectionUse(
            known.id, reused, age_s, idle_s, self._marks.use.protocol if self._marks.use else None, engine=self._engine
        )

    def _share(self, known: _Known) -> None:
        parts = self._marks.parts
        for index, (part, begin_ns, end_ns) in enumerate(parts):
            if part == "local" and known.begin_ns < end_ns and known.made_ns > begin_ns:
                shared_ns = max(begin_ns, known.begin_ns), min(end_ns, known.made_ns)
                parts[index : index + 1] = [
                    ("local", begin_ns, shared_ns[0]),
                    ("shared", *shared_ns),
                    ("local", shared_ns[1], end_ns),
                ]
                return

    def answered(self, stream: Any, http_version: str, at_ns: int) -> None:
        """The answer's head is there: its ``network_stream``, None for none, and version such as ``HTTP/1.1``."""
        if self._stopped:
            return
        if self.waiting:  # a transport that tells nothing
            self.waiting = False
            self._marks.end("local", self._begin_ns)
        self.carried_by(stream, at_ns)
        self._use(protocol="h2" if http_version == "HTTP/2" else http_version.lower() or None)
        self._rtt_ns = self.rtt_min_ns()  # the connection may be closed by the end

    def _use(self, *, protocol: str | None) -> None:
        use = self._marks.use
        if use is not None and protocol is not None:
            self._marks.use = ConnectionUse(use.id, use.reused, use.age_s, use.idle_s, protocol, engine=self._engine)

    def alone_on(self, stream: Any) -> bool:
        """Whether no other exchange that we know of is on the connection: always so with HTTP/1.1."""
        known = _known.get(stream)
        return known is None or known.active <= (1 if known is self._current else 0)

    def left(self) -> None:
        """The exchange has left its connection. A second call is ignored."""
        known, self._current = self._current, None
        if known is not None:
            known.active -= 1
            known.idle_since_ns = time.perf_counter_ns()

    def stop(self) -> None:
        """Nothing that happens from now on is marked: the exchange's books are closed."""
        self._stopped = True
        self.left()

    @property
    def rtt_ns(self) -> int | None:
        """What :meth:`rtt_min_ns` was when the answer's head came."""
        return self._rtt_ns

    def rtt_min_ns(self) -> int | None:
        """The kernel's minimum round trip to the server (Linux); None if unknown, or if a proxy stands between."""
        known = _known.get(self.stream) if self.stream is not None else None
        if known is None or known.proxied is not False:
            return None
        sock = self.stream.get_extra_info("socket")
        found = None if sock is None else min_rtt_ns(sock)
        return self._rtt_ns if found is None else found


class _Timeouts(dict[str, Any]):
    """A request's time limits, which httpcore asks for ``pool`` when it comes to its pool, and at no other time. No
    event says so, and what goes before (hooks, authentication, first imports) is no wait for a connection."""

    def __init__(self, given: Mapping[str, Any], on_pool: Callable[[], None]) -> None:
        super().__init__(given)
        self._on_pool = on_pool

    def get(self, key: str, default: Any = None) -> Any:
        if key == "pool":
            self._on_pool()
        return super().get(key, default)


def is_watched(extensions: Mapping[str, Any]) -> bool:
    """Whether a request's extensions were made by a :class:`TraceBridge`: somebody above keeps its books already."""
    return isinstance(extensions.get("timeout"), _Timeouts)


def _stream_in(info: Mapping[str, Any]) -> Any:
    made = info.get("return_value")
    return made if hasattr(made, "get_extra_info") else None


def _stream_of_caller() -> Any:
    """The stream of the connection that calls the callback; None if it cannot be told.

    No event says which connection it comes from, and a request that never gets an answer never tells. So we look at
    who has called: httpcore's connections keep their stream as ``_network_stream``. Where that should change, the
    answer's head still tells.
    """
    frame = sys._getframe(2)
    for _ in range(8):  # the callback, perhaps another one around it, httpcore's Trace, the connection
        stream = getattr(frame.f_locals.get("self"), "_network_stream", None)
        if stream is not None:
            return stream
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None


def shut_down(stream: Any) -> None:
    """End a connection from another thread than the one that is blocked on it, which then finds it ended.

    Not by closing: that thread would go on with a descriptor that may be somebody else's by then. And not by the
    method of a TLS socket, which takes the TLS away from under the other thread.
    """
    sock = stream.get_extra_info("socket")
    if isinstance(sock, socket.socket):
        try:
            socket.socket.shutdown(sock, socket.SHUT_RDWR)
        except OSError:  # closed already
            return
