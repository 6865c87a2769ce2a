"""Who watches a store hears of writes: LISTEN on a connection of its own, and NOTIFY after the commit, for many at once.

NOTIFY inside of the writing transaction would make every writer wait for every other one: PostgreSQL takes a lock of the
whole server from there until the commit is on the disk. Outside it is a hint: one that is lost, with its process or its
connection, is made up for by whoever looks once in a while.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable

import psycopg

from spanwire.errors import JobError

from .postgresql_schema import named
from .postgresql_server import Connection, Server

__all__ = ["Bell", "Ear", "mark_of"]

_log = logging.getLogger("spanwire.jobs")
#: In seconds: between two notifications of one process; until a thread without work ends; without LISTEN, between questions.
_GAP_S, _IDLE_S, _ASK_S = 0.005, 10.0, 0.1
#: In seconds: how long our own first notification may take; between tries to connect; between signs of life.
_ECHO_S, _RETRY_S, _ALIVE_S = 5.0, 0.5, 30.0
#: How long a store that is closed waits for its last notification, in seconds.
_LAST_S = 1.0


def mark_of(connection: Connection) -> int:
    """Differs once any transaction was committed since: the server's own snapshot, as a number."""
    found = connection.execute("SELECT pg_current_snapshot()::text").fetchone()
    return hash(found)


class Bell:
    """Notifies, soon, and once for everything that was written meanwhile. Its thread lives while there is work."""

    _thread: threading.Thread | None
    _rung: bool
    _closing: bool

    def __init__(self, server: Server, channel: str) -> None:
        self._server = server
        self._channel = channel
        self._start()

    def ring(self) -> None:
        """Something was written."""
        if self._pid != os.getpid():
            self._start()
        if self._rung:
            return
        with self._changed:
            self._rung = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="spanwire store bell", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """What was rung is notified."""
        with self._changed if self._pid == os.getpid() else contextlib.nullcontext():
            thread, self._closing = self._thread, True
            if self._pid != os.getpid():
                return
            self._changed.notify()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_LAST_S)  # the server may be down

    def _start(self) -> None:
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._rung = self._closing = False
        self._thread = None

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._rung and not self._closing:
                    self._changed.wait(_IDLE_S)
                if not self._rung:
                    self._thread = None
                    return
                self._rung = False
            with contextlib.suppress(JobError):
                self._server.run(self.notify)
            time.sleep(_GAP_S)

    def notify(self, connection: Connection) -> None:
        """Wake everybody."""
        connection.execute("SELECT pg_notify(%s, '')", (self._channel,))


class Ear:
    """Calls those who watch after anybody wrote. Its thread lives while somebody watches."""

    _thread: threading.Thread | None
    _ours: socket.socket | None

    def __init__(self, server: Server, bell: Bell, channel: str) -> None:
        self._server = server
        self._bell = bell
        self._channel = channel
        self._deaf = not server.settings.listen
        self._start()

    def subscribe(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Returns what ends it."""
        if self._pid != os.getpid():
            self._start()
        token = object()
        with self._lock:
            self._wakes[token] = wake
            if self._thread is None:
                self._ours, theirs = socket.socketpair()
                self._thread = threading.Thread(
                    target=self._run, args=(theirs,), name="spanwire store ear", daemon=True
                )
                self._thread.start()

        def end() -> None:
            if self._pid != os.getpid():
                return
            with self._lock:
                self._wakes.pop(token, None)
                thread = self._stop() if not self._wakes else None
            if thread is not None and thread is not threading.current_thread():
                thread.join(_LAST_S)

        return end

    def close(self) -> None:
        """Nobody is called any more."""
        if self._pid != os.getpid():
            return
        with self._lock:
            self._wakes.clear()
            thread = self._stop()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_LAST_S)

    def _start(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._wakes: dict[object, Callable[[], None]] = {}
        self._thread = None
        self._ours = None

    def _stop(self) -> threading.Thread | None:
        thread, self._thread = self._thread, None
        ours, self._ours = self._ours, None
        if ours is not None:
            ours.close()  # which the thread sees
        return thread

    def _wake(self) -> None:
        with self._lock:
            wakes = list(self._wakes.values())
        for wake in wakes:
            wake()

    def _run(self, stop: socket.socket) -> None:
        with stop, selectors.DefaultSelector() as stopping:
            stopping.register(stop, selectors.EVENT_READ)
            mark: int | None = None
            while not stopping.select(0):
                if not self._deaf:
                    try:
                        self._listen(stop)
                    except JobError:
                        pass  # the store is down, which whoever uses it is told
                    except psycopg.Error as error:
                        _log.info("the store's notifications are not heard: %s", self._server.settings.clean(error))
                    if stopping.select(0):
                        return
                mark = self._ask(mark)
                stopping.select(_ASK_S if self._deaf else _RETRY_S)

    def _ask(self, mark: int | None) -> int | None:
        """Without notifications: has anything changed?"""
        try:
            now = self._server.run(mark_of)
        except JobError:
            return mark  # the store is down, which whoever uses it is told
        if now != mark:
            self._wake()
        return now

    def _listen(self, stop: socket.socket) -> None:
        """Until it is to stop, or the connection breaks."""
        with self._server.connect() as connection, selectors.DefaultSelector() as selector:
            selector.register(stop, selectors.EVENT_READ, stop)
            selector.register(connection.fileno(), selectors.EVENT_READ)
            connection.execute(named("LISTEN {s}", self._channel))
            self._wake()  # what was written while nobody listened
            self._server.run(self._bell.notify)  # do we hear ourselves?
            heard, since = False, time.monotonic()
            while True:
                events = selector.select(_ALIVE_S if heard else _ECHO_S)
                if any(key.data is stop for key, _ in events):
                    return
                came = list(connection.notifies(timeout=0))
                if came:
                    heard = True
                    self._wake()
                elif not heard and time.monotonic() - since > _ECHO_S:
                    self._deaf = True
                    _log.warning(
                        "the store's notifications do not arrive (a pooler in transaction mode?): it is asked %d times a "
                        "second instead; listen=no in its URL says so at once",
                        round(1 / _ASK_S),
                    )
                    return
                elif not events:
                    connection.execute("SELECT 1")  # a peer that is gone answers nothing
