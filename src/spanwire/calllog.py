"""A file of all calls: one JSON line for each, as :meth:`Timeline.to_dict` has it. What ``spanwire report`` reads.

Give :class:`CallLog` to a manager, or set ``SPANWIRE_CALL_LOG=calls.jsonl`` and change no code::

    manager = spanwire.ConnectionManager(plugins=[CallLog("calls.jsonl")])

A call's loop only hands its timeline over; a daemon thread makes the lines and writes them. Several processes may write
one file: each write is of whole lines, at the file's end (O_APPEND; on Linux such writes do not mix). No content, no
header and no key is in a timeline, and so none is in the file.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any
from weakref import WeakSet

import msgspec

from .errors import ConfigurationError
from .hookspecs import Observer, hookimpl
from .timeline import Timeline

__all__ = ["ENVIRONMENT", "CallLog", "call_log_from_environment"]

_log = logging.getLogger("spanwire.calllog")

#: The variable that names a file for every manager of the process.
ENVIRONMENT = "SPANWIRE_CALL_LOG"
#: Timelines that may wait to be written, about 3 KB each. More are dropped, and counted.
MAX_WAITING = 10_000
#: A call is in the file so much later, in seconds: one write for all that ended meanwhile.
_GATHER_S = 0.1
#: Lines of one write, about 1 KB each.
_BATCH = 500
#: The thread ends after so long without a call, in seconds.
_IDLE_S = 5.0
#: How long closing a manager, and the end of the process, wait for a disk, in seconds.
FLUSH_S = 5.0
#: Between two warnings about the same file, in seconds.
_WARN_EVERY_S = 30.0


class CallLog:
    """An observer, and the plugin that registers it, which appends every ended call to a file.

    Args:
        path: the file. It is made if it is not there; its folder has to be. A file that was moved away (by logrotate,
            say) is made anew.
        max_waiting: how many calls may wait for a slow disk before more are dropped; the file says how many were.

    Raises:
        ConfigurationError: the file cannot be opened for writing.
    """

    def __init__(self, path: str | os.PathLike[str], *, max_waiting: int = MAX_WAITING) -> None:
        if max_waiting < 1:
            raise ConfigurationError(f"CallLog(max_waiting={max_waiting!r}): the number of calls that may wait, from 1")
        self.path = Path(path).absolute()  # the process may change its folder
        self._max_waiting = max_waiting
        try:
            self._fd = self._open()
        except OSError as error:
            raise ConfigurationError(
                f"the call log {str(self.path)!r} cannot be written: {error.strerror or error}"
            ) from error
        self._dropped = 0
        self._untold = 0  # dropped, and not yet in the file
        self._torn = False  # the last write ended inside a line
        self._warned_s = -_WARN_EVERY_S
        self._exiting = False
        self._fresh()
        _logs.add(self)

    def _fresh(self) -> None:
        self._waiting: SimpleQueue[tuple[Timeline, float] | threading.Event] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._flushed_at_end = False
        self._hurry = threading.Event()
        self._lock = threading.RLock()
        self._writing = threading.Lock()

    def __repr__(self) -> str:
        return f"CallLog({str(self.path)!r})"

    @hookimpl
    def register_observers(self) -> Sequence[Observer]:
        """It is its own observer."""
        return (self,)

    @property
    def dropped(self) -> int:
        """Calls of this process that are not in the file: the disk was too slow, or refused them."""
        return self._dropped

    def call_ended(self, timeline: Timeline) -> None:
        """Hand the call over. Never waits for the disk."""
        if self._waiting.qsize() >= self._max_waiting:
            self._drop(1)
            return
        self._waiting.put((timeline, time.time()))
        if self._exiting:  # daemon threads get no more time
            self._write_waiting()
        elif self._thread is None:
            self._start()

    def flush(self, timeout_s: float = FLUSH_S) -> bool:
        """Wait until every call that has ended is in the file; False if that takes longer than ``timeout_s``."""
        if self._thread is None and self._waiting.empty():
            return True
        done = threading.Event()
        self._waiting.put(done)
        self._hurry.set()
        if self._thread is None:
            self._start()
        return done.wait(timeout_s)

    # --- the writer -------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        with self._lock:
            if self._thread is not None:
                return
            thread = threading.Thread(target=self._write_on, name="spanwire-call-log", daemon=True)
            self._thread = thread
            try:
                thread.start()
            except RuntimeError:  # the interpreter is ending, or the system has no thread left
                self._thread = None
                self._write_waiting()
                return
        if not self._flushed_at_end:  # once, not for each thread: the registry of multiprocessing forgets nothing
            self._flushed_at_end = True
            _at_end_of_worker(self)

    def _write_on(self) -> None:
        """The thread: until nothing has come for some seconds, so that a log that nobody uses any more can go."""
        waiting, me = self._waiting, threading.current_thread()
        while True:
            try:
                item = waiting.get(timeout=_IDLE_S)
            except Empty:
                self._thread = None  # first, and look afterwards: who puts later sees None and starts another thread
                if waiting.empty() or not self._take_up(me):
                    return
                continue
            if not isinstance(item, threading.Event):
                self._hurry.wait(_GATHER_S)
            self._hurry.clear()
            try:
                self._write_waiting(item)
            except Exception:  # noqa: BLE001 - a thread that died would stop the log in silence
                self._warn("the call log %s could not be written", exc_info=True)

    def _take_up(self, thread: threading.Thread) -> bool:
        with self._lock:
            if self._thread is None:
                self._thread = thread
            return self._thread is thread

    def _write_waiting(self, *items: tuple[Timeline, float] | threading.Event) -> None:
        """Write what waits. Only as much as waits now: calls that come meanwhile are another turn's."""
        batch = [*items, *self._taken()]
        with self._writing:
            for begin in range(0, len(batch), _BATCH):
                some = batch[begin : begin + _BATCH]
                lines = [line for item in some if isinstance(item, tuple) and (line := self._line(*item))]
                if lines:
                    self._append(lines)
        for item in batch:
            if isinstance(item, threading.Event):
                item.set()

    def _taken(self) -> Iterator[tuple[Timeline, float] | threading.Event]:
        with contextlib.suppress(Empty):
            for _ in range(self._waiting.qsize()):
                yield self._waiting.get_nowait()

    def _line(self, timeline: Timeline, ended_unix_s: float) -> bytes | None:
        time.sleep(
            0
        )  # gives the interpreter to a loop that wants it: else a batch would hold tokens up for milliseconds
        try:
            data: dict[str, Any] = timeline.to_dict()
            data.setdefault("started_unix_s", round(ended_unix_s - timeline.total_s, 6))
            return msgspec.json.encode(data) + b"\n"
        except Exception:  # noqa: BLE001 - such as text that is no Unicode; the other calls are to be written
            self._drop(1)
            self._warn("a call could not be written to the call log %s", exc_info=True)
            return None

    def _append(self, lines: list[bytes]) -> None:
        data = b"".join(lines)
        untold = self._untold
        if untold:
            data += msgspec.json.encode({"schema": 1, "dropped": untold}) + b"\n"
        if self._torn:
            data = b"\n" + data
        written = 0
        try:
            self._reopen_if_moved()
            while written < len(data):  # regular files take all at once, unless the disk is full
                written += os.write(self._fd, data[written:])
        except OSError as error:
            self._torn = data[:written][-1:] not in (b"", b"\n") or (self._torn and not written)
            self._drop(len(lines) - min(len(lines), data[:written].count(b"\n")))
            self._warn("the call log %s cannot be written: %s", error.strerror or error)
            return
        self._torn = False
        if untold:
            with self._lock:
                self._untold -= untold
            self._warn("the call log %s could not keep up: %d calls are not in it", untold)

    def _drop(self, calls: int) -> None:
        with self._lock:
            self._dropped += calls
            self._untold += calls

    def _warn(self, message: str, *more: object, exc_info: bool = False) -> None:
        now_s = time.monotonic()
        if now_s - self._warned_s >= _WARN_EVERY_S:
            self._warned_s = now_s
            _log.warning(message, self.path, *more, exc_info=exc_info)

    # --- the file ---------------------------------------------------------------------------------------------------

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        # Not inherited by programs that are started; on Windows, lines that end as they are written.
        flags |= getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOINHERIT", 0)
        return os.open(self.path, flags, 0o666)

    def _reopen_if_moved(self) -> None:
        try:
            there = os.stat(self.path)  # noqa: PTH116 - beside fstat
            here = os.fstat(self._fd)
            if (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino):
                return
        except FileNotFoundError:
            pass
        fd, self._fd = self._fd, self._open()
        self._torn = False
        os.close(fd)

    def __del__(self) -> None:
        fd = self.__dict__.get("_fd")
        if fd is not None:
            with contextlib.suppress(OSError):
                os.close(fd)


# --- the process --------------------------------------------------------------------------------------------------------

_logs: WeakSet[CallLog] = WeakSet()
_shared: dict[Path, CallLog | None] = {}
_sharing = threading.Lock()


def call_log_from_environment() -> CallLog | None:
    """The log that ``SPANWIRE_CALL_LOG`` asks for, one for all managers of the process; None if it asks for none.

    A file that cannot be written is one line in the log, and the calls go on: who sets a variable in production does not
    mean to stop the service by it.
    """
    name = os.environ.get(ENVIRONMENT, "").strip()
    if not name:
        return None
    path = Path(name).absolute()
    with _sharing:
        if path not in _shared:
            try:
                _shared[path] = CallLog(path)
            except ConfigurationError as error:
                _shared[path] = None
                _log.error("%s=%s has no effect: %s", ENVIRONMENT, name, error)
        return _shared[path]


def _at_exit() -> None:
    for log in list(_logs):
        log.flush()
        log._exiting = True


def _at_end_of_worker(log: CallLog) -> None:
    """Workers of multiprocessing end without the exit functions of the interpreter."""
    multiprocessing = sys.modules.get("multiprocessing")
    if multiprocessing is not None and multiprocessing.parent_process() is not None:
        from multiprocessing.util import Finalize

        Finalize(log, log.flush, exitpriority=0)


def _before_fork() -> None:
    _sharing.acquire()


def _after_fork_in_parent() -> None:
    _sharing.release()


def _after_fork_in_child() -> None:
    # What waits is the parent's to write, and so is its thread. The file is shared as it is between strangers.
    _sharing.release()
    for log in list(_logs):
        log._fresh()
        log._dropped = log._untold = 0


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
