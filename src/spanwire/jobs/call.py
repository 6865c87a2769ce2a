"""A plain call to an endpoint of jobs: submitted, waited for, and handed over as if it had been streamed.

It looks like :class:`~spanwire.run.Run` to whoever holds it, so ``manager.complete()``, ``stream()`` and ``embed()`` work, and
with them every adapter above.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from ..calls import BatchReply, Call, Chunk, Embeddings, Reply, ToolCallDelta
from ..endpoint import Endpoint, Timeouts
from ..errors import CallTimeout, SpanwireError
from ..timeline import CallRecord, Outcome, Timeline
from ..transport import Head, Item
from .job import Job

if TYPE_CHECKING:
    from ..manager import LoopState
    from ..run import Prepared

__all__ = ["JobCall"]


class JobCall:
    """One such call. Leaving it cancels the job: its caller has no id to come back with."""

    def __init__(
        self,
        state: LoopState,
        prepared: Prepared,
        endpoint: Endpoint,
        call: Call,
        *,
        streamed: bool,
        timeouts: Timeouts,
        headers: Mapping[str, str],
    ) -> None:
        if "stream_options" in call.body:  # of a stream that there is none of
            body = {name: value for name, value in call.body.items() if name != "stream_options"}
            call = msgspec.structs.replace(call, body=body)
        self.state = state
        self.endpoint = endpoint
        self.call = call
        self.streamed = streamed
        self.batch: list[Chunk] = []
        self.items: list[Item] = []
        self.head: Head | None = None
        self.opened = False
        self.ended = False
        self._prepared = prepared
        self._timeouts = timeouts
        self._headers = headers
        self._job: Job | None = None
        self._reply: Reply | None = None
        self._error: BaseException | None = None
        self._outcome: Outcome = "completed"
        self._timeline: Timeline | None = None
        self._begin_s = time.monotonic()
        self._begin_unix_ns = 0
        self._reader: asyncio.Task[object] | None = None
        self._left = False

    async def open(self) -> None:
        """Submit."""
        if self.opened:
            raise RuntimeError("a stream is entered once: ask the manager for a new one")
        self.opened = True
        self._begin_s, self._begin_unix_ns = time.monotonic(), time.time_ns()
        total_s = self._timeouts.total_s
        try:
            async with asyncio.timeout(total_s):
                self._job = await self.state.manager.jobs.submit(
                    self._prepared,
                    self.endpoint,
                    self.call,
                    group="",
                    # A moment later than the call: whose own limit it is says so.
                    deadline_s=None if total_s is None else total_s + 1.0,
                    headers=self._headers,
                )
        except TimeoutError:
            error = self._too_late()
            self._end("timeout", error)
            raise error from None
        except BaseException as error:
            self._end("error" if isinstance(error, Exception) else "cancelled", error)
            raise

    async def read(self) -> list[Item]:
        """The whole answer as one batch; [] after it."""
        if self.ended:
            if self._error is not None and not self._left:
                raise self._error
            return []
        job = self._job
        assert job is not None
        total_s = self._timeouts.total_s
        left_s = None if total_s is None else max(0.0, total_s - (time.monotonic() - self._begin_s))
        self._reader = asyncio.current_task()
        try:
            async with asyncio.timeout(left_s):
                found = await job
        except TimeoutError:
            error = self._too_late()
            self._leave("timeout", error)
            raise error from None
        except asyncio.CancelledError:
            if self._left:  # by another task, whose read this one is not any more
                task = asyncio.current_task()
                if task is not None and task.uncancel() == 0:
                    return []
            raise
        except SpanwireError as error:
            self._end("timeout" if isinstance(error, CallTimeout) else "error", error)
            error.timeline = self._timeline
            raise
        finally:
            self._reader = None
        return self._take(found)

    def _take(self, found: Reply | Embeddings | BatchReply) -> list[Item]:
        assert not isinstance(found, BatchReply)  # which no plain call asks for
        self._timeline = found.timeline
        head = self.head = Head()
        head.headers, head.model = found.headers, found.model
        items: list[Item]
        if isinstance(found, Embeddings):
            items = [found]
            self.items = items
        else:
            head.id, head.usage = found.id, found.usage
            self._reply = found
            calls = tuple(
                ToolCallDelta(number, call.id, call.name, call.arguments)
                for number, call in enumerate(found.tool_calls)
            )
            items = [
                Chunk(
                    text=found.text,
                    reasoning=found.reasoning,
                    tool_calls=calls,
                    finish_reason=found.finish_reason,
                    usage=found.usage,
                    raw=found.raw,
                )
            ]
        self._end("completed", None)
        return items

    async def drain(self) -> None:
        """Read to the end. Whoever is cancelled in it leaves the job."""
        try:
            while await self.read():
                pass
        except asyncio.CancelledError as error:
            self._leave("cancelled", error)
            raise

    def leave(self, outcome: Outcome) -> None:
        """The caller goes before the answer has come: the job is cancelled."""
        if self.opened and not self.ended and not self.state.parked:
            self._leave(outcome, None)

    def _leave(self, outcome: Outcome, error: BaseException | None) -> None:
        if self.ended:
            return
        self._left = error is None
        self._end(outcome, error)
        job, reader = self._job, self._reader
        if reader is not None and reader is not asyncio.current_task():
            reader.cancel()
        if job is not None and not self.state.closed:
            self.state.later(job.cancel())

    def reply(self) -> Reply:
        """What has come."""
        reply = self._reply or Reply()
        return reply if reply.timeline is not None else msgspec.structs.replace(reply, timeline=self._timeline)

    @property
    def timeline(self) -> Timeline:
        """Raises RuntimeError before the call has ended."""
        if self._timeline is None:
            raise RuntimeError("the call has not ended: read the stream to its end, or leave its `with` block first")
        return self._timeline

    def _end(self, outcome: Outcome, error: BaseException | None) -> None:
        self.ended = True
        self._error = error
        if self._timeline is None:
            job = self._job
            if job is not None and job.row is not None and job.row.resolved_s:
                self._timeline = job.timeline
            else:
                self._timeline = self._short(outcome, error)
        self.state.manager.registry.observe(self._timeline)

    def _short(self, outcome: Outcome, error: BaseException | None) -> Timeline:
        """Of a call that was left, or that never was a job."""
        record = CallRecord(
            self._begin_unix_ns,
            operation=self.call.operation,
            model=self.call.model,
            endpoint=self.endpoint.address,
            transport=self._prepared.spec.name,
            streamed=self.streamed,
            started_unix_ns=self._begin_unix_ns,
        )
        record.outcome = outcome
        record.error_type = type(error).__name__ if isinstance(error, Exception) else None
        record.end_ns = self._begin_unix_ns + int((time.monotonic() - self._begin_s) * 1e9)
        return Timeline(record)

    def _too_late(self) -> CallTimeout:
        return CallTimeout(
            f"the call did not end within {self._timeouts.total_s} s (Timeouts.total_s)",
            limit="total_s",
            endpoint=self.endpoint.address,
            phase="wait",
            retryable=False,
        )
