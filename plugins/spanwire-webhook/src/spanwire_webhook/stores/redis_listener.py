"""One thread that hears of writes: it waits at the server's stream of changes, on a connection of its own."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Any

import redis

from spanwire.errors import JobError

from .redis_link import Link

__all__ = ["Listener"]

_log = logging.getLogger("spanwire.jobs")

#: How long the server waits for a change before it says that there is none, in milliseconds; and how often the thread looks
#: whether it is to end, in seconds, where nobody wakes it for that.
_WAIT_MS, _LOOK_S = 20_000, 1.0
#: It wakes at most so often, and waits so long for a server that has gone, in seconds.
_CALM_S, _AGAIN_S = 0.005, 0.5


class Listener:
    """Calls all that were added, soon after anybody wrote. Its thread begins with the first, and ends with the last."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._pid = os.getpid()
        self._wakes: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._id: int | None = None

    def add(self, wake: Callable[[], None]) -> bool:
        """From here on. False if this listener has ended, or is of another process. Raises JobError."""
        if self._pid != os.getpid():
            return False
        with self._lock:
            if self._ended.is_set():
                return False
            if self._thread is None:
                newest = self._link.run([("XREVRANGE", self._link.key("changes"), "+", "-", "COUNT", 1)])[0]
                since = newest[0][0] if newest else b"0-0"
                self._thread = threading.Thread(
                    target=self._listen, args=(since,), name="spanwire store listener", daemon=True
                )
                self._thread.start()
            self._wakes.append(wake)
            return True

    def remove(self, wake: Callable[[], None]) -> None:
        """Not any more."""
        with self._lock:
            if wake in self._wakes:
                self._wakes.remove(wake)
            last = not self._wakes
        if last:
            self.close()

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        if self._pid != os.getpid():
            return
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        while thread.is_alive():  # it may be just about to wait
            try:
                if self._id is not None:
                    self._link.run([("CLIENT", "UNBLOCK", self._id)], try_s=0.0)
                thread.join(0.01)
            except JobError:  # then it looks for itself
                thread.join()

    def _listen(self, since: bytes) -> None:
        connection: redis.Connection | None = None
        try:
            while not self._ended.is_set():
                try:
                    if connection is None:
                        connection = self._link.connection()
                        told = self._ask(connection, "CLIENT", "ID")
                        if told is None:
                            break  # it was closed while it connected
                        self._id = int(told)
                    answer = self._ask(
                        connection, "XREAD", "BLOCK", _WAIT_MS, "STREAMS", self._link.key("changes"), since
                    )
                except (redis.RedisError, OSError) as error:
                    _log.debug("the store of jobs is not heard: %s", error)
                    if connection is not None:
                        connection.disconnect()  # type: ignore[no-untyped-call]
                        connection = None
                    self._link.follow(error)
                    self._ended.wait(_AGAIN_S)
                    self._wake()  # whatever was missed
                    continue
                if answer and not self._ended.is_set():
                    since = answer[0][1][-1][0]
                    self._wake()
                    self._ended.wait(_CALM_S)
        except JobError:
            pass  # the store was closed
        finally:
            self._id = None
            if connection is not None:
                connection.disconnect()  # type: ignore[no-untyped-call]

    def _ask(self, connection: redis.Connection, *command: Any) -> Any:
        connection.send_command(*command)  # type: ignore[no-untyped-call]
        while not connection.can_read(timeout=_LOOK_S):
            if self._ended.is_set():
                return None
        return connection.read_response()

    def _wake(self) -> None:
        with self._lock:
            wakes = list(self._wakes)
        for wake in wakes:
            try:
                wake()
            except Exception:  # noqa: BLE001 - it is its owner's
                _log.warning("whoever waits for jobs could not be told", exc_info=True)
