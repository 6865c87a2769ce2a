"""Marks and connection facts out of the signals of aiohttp's ``TraceConfig``.

One request sends, in this order (measured)::

    request_start
    connection_queued_start .. _end       local      (only where the connector's limit was hit; may come again)
    connection_reuseconn                             or
    connection_create_start               dns        dns_resolvehost_start .. _end, or nothing: cached, an IP address
                                          tcp        up to here, if it is told when TLS begins, or there is none
                                          tls        from there on
                                          connect    TCP and TLS, or all that a proxy takes, where nobody tells
    connection_create_end
    request_headers_sent
    request_chunk_sent                    send       until the body is with the kernel

Nothing of aiohttp is imported: calls come in, marks go out. A step that fails stays open in the marks, so that they say
where a connect stood; a request that is sent again, after a redirect, begins it anew.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from ..pool import _ids
from ..timeline import ConnectionUse, Marks

__all__ = ["SignalBridge"]

_ENGINE = "aiohttp"


class _Known:
    """What is known of a connection that the connector keeps. ``made_ns`` is 0 where its connect was not seen."""

    __slots__ = ("id", "idle_since_ns", "made_ns")

    def __init__(self, made_ns: int) -> None:
        self.id = f"c{next(_ids)}"
        self.made_ns = made_ns
        self.idle_since_ns = 0


#: By aiohttp's protocol object, which is the same for as long as the connection lives.
_known: WeakKeyDictionary[Any, _Known] = WeakKeyDictionary()


class SignalBridge:
    """Takes the signals of one request. Each is given its time, so it needs no clock.

    Args:
        marks: filled in; ``marks.use`` too.
        secure: the request is for https.

    Attributes:
        connecting: a connection is being made for this request.
        reused: it got one that was there.
    """

    __slots__ = ("_begin_ns", "_connect_ns", "_current", "_marks", "_secure", "_stopped", "connecting", "reused")

    def __init__(self, marks: Marks, *, secure: bool) -> None:
        self._marks = marks
        self._secure = secure
        self._begin_ns = 0
        self._connect_ns = 0  # where the part that is open began, once the name is known
        self._current: _Known | None = None
        self._stopped = False
        self.connecting = False
        self.reused = False
        # Said before anything is known: without it the connection would be taken for one that was used before.
        marks.use = ConnectionUse(f"c{next(_ids)}", False, engine=_ENGINE)

    def queued(self, at_ns: int) -> None:
        """``connection_queued_start``: the connector has no room."""
        if not self._stopped:
            self._marks.begin("local", at_ns)

    def admitted(self, at_ns: int) -> None:
        """``connection_queued_end``."""
        if not self._stopped:
            self._marks.end("local", at_ns)

    def reuses(self) -> None:
        """``connection_reuseconn``."""
        self.reused = True

    def create_begins(self, at_ns: int) -> None:
        """``connection_create_start``."""
        if not self._stopped:
            self.connecting = True
            self.reused = False
            self._marks.begin("connect" if self._secure else "tcp", at_ns)
            self._connect_ns = at_ns

    def dns_begins(self, at_ns: int) -> None:
        """``dns_resolvehost_start``."""
        if not self._stopped:
            self._marks.begin("dns", at_ns)

    def dns_ends(self, at_ns: int) -> None:
        """``dns_resolvehost_end``: what began the connect was the look-up."""
        if not self._stopped and self.connecting:
            self._marks.end("dns", at_ns)
            self._marks.begin("connect" if self._secure else "tcp", at_ns)
            self._connect_ns = at_ns

    def tls_begins(self, at_ns: int) -> None:
        """TCP is connected. No signal says so; without it TCP and TLS are one part."""
        if not self._stopped and self.connecting and self._secure and self._marks.begun_ns("connect"):
            self._marks.end("connect", at_ns)
            self._marks.parts[-1] = ("tcp", *self._marks.parts[-1][1:])
            self._marks.begin("tls", at_ns)

    def create_ends(self, at_ns: int) -> None:
        """``connection_create_end``."""
        if not self._stopped:
            for part in ("dns", "tcp", "connect", "tls"):
                self._marks.end(part, at_ns)
            self.connecting = False

    def carried_by(self, protocol: Any, at_ns: int, *, proxied: bool = False) -> None:
        """``request_headers_sent``: the connection that it goes out on, None if that cannot be told."""
        if self._stopped:
            return
        marks = self._marks
        if proxied:  # what it took to get through, in all
            marks.parts[:] = [
                ("proxy" if part in ("tcp", "tls", "connect") else part, begin_ns, end_ns)
                for part, begin_ns, end_ns in marks.parts
            ]
        marks.begin("send", at_ns)
        marks.sent_ns = 0
        known = None
        if protocol is not None:
            self.left(at_ns)
            known = _known.get(protocol)
            if known is None:
                known = _known.setdefault(protocol, _Known(0 if self.reused else at_ns))
        self._current = known
        age_s = idle_s = None
        if known is not None and self.reused:
            age_s = (at_ns - known.made_ns) / 1e9 if known.made_ns else None
            idle_s = (at_ns - known.idle_since_ns) / 1e9 if known.idle_since_ns else None
        name = known.id if known is not None else marks.use.id if marks.use is not None else ""
        marks.use = ConnectionUse(name, self.reused, age_s, idle_s, "http/1.1", engine=_ENGINE)

    def sent(self, at_ns: int) -> None:
        """``request_chunk_sent``: the last one counts."""
        if not self._stopped:
            self._marks.sent_ns = at_ns

    def answered(self, at_ns: int) -> None:
        """The answer's head is there."""
        if not self._stopped:
            self._marks.end("send", self._marks.sent_ns or at_ns)

    def left(self, at_ns: int) -> None:
        """The exchange has left its connection. A second call is ignored."""
        known, self._current = self._current, None
        if known is not None:
            known.idle_since_ns = at_ns

    def stop(self, at_ns: int) -> None:
        """Nothing that happens from now on is marked: the exchange's books are closed."""
        self._stopped = True
        self.left(at_ns)
