"""One thread that stores what has arrived: what came together is one commit of the store (group commit).

A commit to disk takes milliseconds, whatever is in it; measured on SQLite: 271 webhooks a second in a commit each, thousands
in commits of a hundred.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TypeAlias

from .receiver import Answer, Receiver, Reception

__all__ = ["Committer"]

#: In one commit: requests, and bytes of their bodies, which are in memory while it is written.
_MOST, _MOST_BYTES = 256, 16 * 1024 * 1024
#: The thread ends after so many seconds without work: where nobody closes us, nothing is left behind.
_IDLE_S = 10.0

_Waiter: TypeAlias = "Future[Answer] | asyncio.Future[Answer]"


class Committer:
    """Finishes requests for any number of threads and loops. Its thread starts when there is work."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._thread: threading.Thread | None = None
        self._start()

    def finish(self, reception: Reception) -> Answer:
        """The answer, once what it promises is durable. Blocks; never raises."""
        done: Future[Answer] = Future()
        self._put(reception, done)
        return done.result()

    async def finished(self, reception: Reception) -> Answer:
        """The same. Cancelling the wait does not take back what is being stored."""
        done: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._put(reception, done)
        return await done

    def close(self) -> None:
        """What was begun is stored; then the thread ends. It may be used again."""
        with self._changed:
            self._closing = True
            thread = self._thread
            self._changed.notify()
        if thread is not None:
            thread.join()
        with self._changed:
            self._closing = False

    def _put(self, reception: Reception, done: _Waiter) -> None:
        if self._pid != os.getpid():  # a forked child has the parent's lock and queue, and no thread
            self._start()
        with self._changed:
            self._waiting.append((reception, done))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="spanwire-webhook", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Reception, _Waiter]] = deque()
        self._thread = None
        self._closing = False

    def _run(self) -> None:
        while True:
            batch: list[tuple[Reception, _Waiter]] = []
            size = 0
            with self._changed:
                if not self._waiting and not self._closing:
                    self._changed.wait(_IDLE_S)
                while self._waiting and len(batch) < _MOST and size < _MOST_BYTES:
                    one = self._waiting.popleft()
                    batch.append(one)
                    size += one[0].size
                if not batch:
                    self._thread = None
                    return
            self._receiver.commit([reception for reception, _ in batch])
            _tell([(done, reception.finish()) for reception, done in batch])  # they are decided by now


def _tell(answers: Sequence[tuple[_Waiter, Answer]]) -> None:
    """Each loop is woken once for all of its requests: a wake is a system call, and a turn of the interpreter's lock."""
    loops: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Answer], Answer]]] = {}
    for done, answer in answers:
        if isinstance(done, asyncio.Future):
            loops.setdefault(done.get_loop(), []).append((done, answer))
        else:
            done.set_result(answer)
    for loop, its in loops.items():
        with contextlib.suppress(RuntimeError):  # it was closed, and nobody waits there
            loop.call_soon_threadsafe(_resolve, its)


def _resolve(answers: Sequence[tuple[asyncio.Future[Answer], Answer]]) -> None:
    for done, answer in answers:
        if not done.done():
            done.set_result(answer)
