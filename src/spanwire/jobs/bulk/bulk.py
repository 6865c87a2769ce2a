"""What callers of ``manager.submit_many`` hold: :class:`Bulk`, and what it gives."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import Self

import msgspec

from ...calls import Embeddings, Reply
from ...errors import JobError, SpanwireError
from .drive import Drive

__all__ = ["Bulk", "BulkCounts", "BulkResult"]


class BulkResult(msgspec.Struct, frozen=True, eq=False):
    """What became of one call.

    Attributes:
        index: the call's place among the calls, from 0.
        job: id of the job that it was part of; None if it never was one.
        reply: its reply; ``usage`` is None where several calls shared a job, for the server says it of all together.
        error: why there is none. Both are None of a call whose job has not ended, in :meth:`Bulk.stored` alone.
    """

    index: int
    job: str | None
    reply: Reply | Embeddings | None = None
    error: SpanwireError | None = None

    def result(self) -> Reply | Embeddings:
        """The reply; raises the error."""
        if self.error is not None:
            raise self.error
        if self.reply is None:
            raise JobError("the call has no result yet", job=self.job)
        return self.reply

    def __repr__(self) -> str:
        what = type(self.error).__name__ if self.error is not None else "replied" if self.reply is not None else "open"
        return f"BulkResult({self.index}, {what}, job={self.job!r})"


class BulkCounts(msgspec.Struct, frozen=True):
    """How far a bulk is, in calls.

    Attributes:
        total: None while nobody knows: calls of an iterator without a group.
        submitted: those whose job the server has, or had.
        done: results that were given and are replies; failed: and are errors.
        found: of ``submitted``, those whose job was in the store already.
        jobs: jobs that were submitted by this bulk.
    """

    total: int | None
    submitted: int
    done: int
    failed: int
    found: int
    jobs: int


class Bulk:
    """Results of many calls, in the order in which they end. Made by ``manager.submit_many``.

    ::

        async with manager.submit_many(endpoint, calls, group="texts") as bulk:
            async for result in bulk:
                ...

    Submitting begins with the first ``await``. Leaving it early: with a group the jobs go on, and the same calls submitted again
    give what has ended meanwhile; without one nobody can come back, and what is open is cancelled. Cancelling an ``await``
    on it leaves it as it is.
    """

    def __init__(self, drive: Drive) -> None:
        self._drive = drive
        self._finalizer = weakref.finalize(self, _abandon, drive)
        self._finalizer.atexit = False

    def __repr__(self) -> str:
        return f"<spanwire.Bulk {self._drive.group!r} {self.counts}>"

    @property
    def counts(self) -> BulkCounts:
        """How far it is."""
        drive = self._drive
        return BulkCounts(drive.total, drive.submitted, drive.done, drive.failed, drive.found, drive.jobs)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> BulkResult:
        result = await self.next()
        if result is None:
            raise StopAsyncIteration
        return result

    async def next(self) -> BulkResult | None:
        """The next result; None after the last one.

        Raises:
            ConfigurationError: a bad endpoint, or calls that are none.
            AuthenticationFailed, ConnectionFailed: the server takes nothing from us, or is not there.
            JobError: the store is down.
        """
        given = await self._drive.next()
        return None if given is None else _result(*given)

    async def wait(self) -> BulkCounts:
        """Wait for the end; the results are counted, and with a group they can be had again."""
        while await self.next() is not None:
            pass
        return self.counts

    async def submitted(self) -> BulkCounts:
        """The same until the server has all of them, or until no more can be submitted."""
        while await self._drive.next(until_submitted=True) is not None:
            pass
        return self.counts

    def stored(self) -> Iterator[BulkResult]:
        """What the store has of these calls now, in their order; nothing is submitted, and nobody is asked. Blocking.

        Raises:
            ConfigurationError: there is no group, the calls can be read only once, or they have changed meanwhile.
            JobError: the store is down.
        """
        for index, job, outcome in self._drive.stored():
            yield BulkResult(index, job) if outcome is None else _result(index, job, outcome)

    async def aclose(self) -> None:
        """Leave it."""
        self._finalizer.detach()
        await self._drive.stop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


def _result(index: int, job: str | None, outcome: Reply | Embeddings | SpanwireError) -> BulkResult:
    if isinstance(outcome, SpanwireError):
        return BulkResult(index, job, error=outcome)
    return BulkResult(index, job, reply=outcome)


def _abandon(drive: Drive) -> None:
    """It was dropped without being closed. From any thread, inside the garbage collector."""
    if drive.started and not drive.stopped:
        state = drive.state
        with contextlib.suppress(RuntimeError):  # the loop is closed
            state.loop.call_soon_threadsafe(_leave, drive)


def _leave(drive: Drive) -> None:
    if not drive.state.closed:
        drive.state.later(drive.stop())
    else:
        asyncio.ensure_future(drive.stop()).add_done_callback(lambda done: done.cancelled() or done.exception())
