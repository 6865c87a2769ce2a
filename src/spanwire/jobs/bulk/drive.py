"""The async shell of a bulk: cuts, looks up, submits within the window, waits, splits what has failed.

Each shard that is under way is a task. One more task feeds them; results are decoded by whoever takes them, so that what
nobody takes is no more than references.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sized
from typing import TYPE_CHECKING, NamedTuple

from ...calls import Call
from ...endpoint import Endpoint
from ...errors import (
    AuthenticationFailed,
    CallTimeout,
    ConfigurationError,
    ConnectionFailed,
    JobCancelled,
    JobError,
    JobExpired,
    JobLost,
    Overloaded,
    ProtocolError,
    RateLimited,
    ServerError,
    SpanwireError,
    Truncated,
)
from ..contract import OPEN, TERMINAL, JobRow, State
from ..runner import JobRunner, Party, failure_of
from .manifest import Manifest, encoded, job_id, unlike_any
from .shards import Cutter, Outcome, Part, Rules, Shard, call_of, halves, may_be_one_call, outcomes, without_calls
from .stored import Found, stored
from .window import Window, most_open

if TYPE_CHECKING:
    from ...manager import LoopState
    from ..job import Jobs

__all__ = ["Drive", "Task"]

#: Shards that are looked up in the store at once, and their bytes: they are in memory meanwhile.
_LOOKED_UP, _LOOKED_UP_BYTES = 256, 8 * 1024 * 1024
#: Jobs that have ended and whose results nobody has taken: then nothing more is submitted.
_READY = 1000
#: Calls that are read before the loop's other tasks have a turn.
_SLICE = 256
#: Pauses in a row, 1 to 60 s long, after which a server that is not there, or a store, is given up: about two minutes.
_PAUSES = 7
#: How long submits that are under way may take to end when a bulk is left, in seconds.
_LEAVE_S = 5.0
_CANCELS = 16
#: Rounds that a job has by itself which the server takes and then finds to be too much, and tries of one for which the server
#: is not ready (408, 409, 425).
_ROUNDS = 20
#: How a job can end without a result. Other errors are not the job's.
_ENDS = (ServerError, ProtocolError, Truncated, JobLost, JobExpired, JobCancelled)


class Task(NamedTuple):
    """What is to be done; see ``ConnectionManager.submit_many``."""

    party: Party
    calls: Iterable[Call]
    rules: Rules
    group: str
    window: int | None
    deadline_s: float | None
    headers: Mapping[str, str] | None
    retry_failed: bool


class _Ended(NamedTuple):
    """A shard that is over: its row, or the error for which it has none."""

    shard: Shard
    row: JobRow | None
    error: SpanwireError | None = None


class Drive:
    """One bulk. Belongs to the loop on which it is started."""

    def __init__(self, jobs: Jobs, task: Task) -> None:
        codec, settings = task.party.codec, task.party.settings
        self.task = task
        self.group = task.group
        self.total: int | None = len(task.calls) if isinstance(task.calls, Sized) else None
        self.submitted = self.done = self.failed = self.found = self.jobs = 0
        self.started = self.stopped = False
        self._jobs = jobs
        self._manifest = b""
        self._window = Window(
            most_open(
                task.window,
                webhooks=settings.mode == "webhook",
                delivery_s=codec.delivery_s,
                polls_per_s=codec.polls_per_s if codec.polls else 0.0,
                retention_s=codec.retention_s,
            )
        )
        self._todo: deque[Shard] = deque()
        self._running: dict[asyncio.Task[None], Shard] = {}
        self._open_bytes = 0
        self._ready: deque[_Ended] = deque()
        self._out: deque[tuple[int, str | None, Outcome]] = deque()
        self._giving = 0  # results that are being decoded
        self._fed = False  # all calls have been read, and all their shards begun
        self._over = False
        self._error: BaseException | None = None
        self._trouble = self._unreached = 0  # pauses in a row for the store, and for a server that is not there
        self._move, self._turn = asyncio.Event(), asyncio.Event()  # for the feeder; for whoever takes results
        self._feeder: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None

    # --- taking results -------------------------------------------------------------------------------------------------

    async def next(self, *, until_submitted: bool = False) -> tuple[int, str | None, Outcome] | None:
        """The next result; None after the last one, and with ``until_submitted`` once all are submitted."""
        self._start()
        while True:
            if until_submitted and self._fed and not self._todo and not self._window.submitting:
                return None
            if self._out:
                index, job, outcome = self._out.popleft()
                failed = isinstance(outcome, SpanwireError)
                self.failed += failed
                self.done += not failed
                return index, job, outcome
            if self._ready:
                await self._take()
            elif self._over:
                if self._error is not None:
                    await self.stop()
                    raise self._error
                return None
            else:
                self._turn.clear()
                await self._turn.wait()

    async def _take(self) -> None:
        ended = self._ready.popleft()
        self._giving += 1
        try:
            found = await self._outcomes(ended)
        except BaseException:  # the caller was cancelled, or the store is down: it is still to be had
            self._ready.appendleft(ended)
            raise
        finally:
            self._giving -= 1
            self._move.set()
            self._turn.set()
        job = None if ended.row is None else ended.row.id
        self._out.extend((part.index, job, outcome) for part, outcome in zip(ended.shard.parts, found, strict=True))

    async def _outcomes(self, ended: _Ended) -> list[Outcome]:
        shard, row = ended.shard, ended.row
        error = ended.error
        if error is None and row is not None:
            try:
                reply = await self._runner.reply(row)
            except _ENDS as raised:
                error = raised
            else:
                found = outcomes(shard, reply)
                for one in found:
                    if isinstance(one, SpanwireError) and one.endpoint is None:
                        one.endpoint = row.endpoint
                return await self._without_retried(shard, found)
        assert error is not None
        return [error for _ in shard.parts]

    async def _without_retried(self, shard: Shard, found: list[Outcome]) -> list[Outcome]:
        """A batch has succeeded, and some of its calls have not: those may have a further round."""
        if shard.kind != "batch":
            return found
        failed = [number for number, outcome in enumerate(found) if isinstance(outcome, SpanwireError)]
        again = await self._next_round(shard) if failed else None
        if again is None:
            return found
        parts = [shard.parts[number] for number in failed]
        again.parts = parts
        shard.parts = [part for number, part in enumerate(shard.parts) if number not in set(failed)]
        self._todo.appendleft(again)
        return [outcome for outcome in found if not isinstance(outcome, SpanwireError)]

    def stored(self) -> Iterator[Found]:
        """See ``Bulk.stored``."""
        party, calls = self.task.party, self.task.calls
        if not self.group or iter(calls) is calls:
            raise ConfigurationError("only calls with a group, which can be read again, are found in the store")
        return stored(
            self._jobs.store_of(party),
            party.codec,
            calls,
            group=self.group,
            origin=party.origin,
            dialect=party.dialect_name,
            rules=self.task.rules,
            submitted=self._manifest,
        )

    # --- feeding --------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self.started:
            if self.state.loop is not asyncio.get_running_loop():
                raise ConfigurationError("a bulk belongs to the event loop on which it was first awaited")
            return
        if self.stopped:
            return
        self.started = True
        self.state: LoopState = self._jobs.state()
        self._feeder = asyncio.create_task(self._feed())

    async def _feed(self) -> None:
        shards: AsyncIterator[Shard] | None = None
        try:
            self._runner: JobRunner = await self._jobs.runner(self.task.party, receive=False)
            await self._runner.have_receiver(self.task.party)
            shards = self._looked_up()
            await self._begin_all(shards)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - also what the caller's own iterable raises: given to whoever takes results
            self._error = error
        finally:
            if shards is not None:
                with contextlib.suppress(RuntimeError):
                    await shards.aclose()  # type: ignore[attr-defined]
            self._over = True
            self._turn.set()

    async def _begin_all(self, shards: AsyncIterator[Shard]) -> None:
        window = self._window
        while True:
            self._move.clear()
            if self._error is not None:
                raise self._error
            if not self._todo and not self._fed and self._has_room():
                shard = await anext(shards, None)
                if shard is None:
                    self._fed = True
                    self._turn.set()
                else:
                    self._todo.append(shard)
                continue
            now_s = time.monotonic()
            if self._todo and self._has_room() and (not self._sends(self._todo[0]) or window.may_submit(now_s)):
                self._begin(self._todo.popleft())
                continue
            if self._fed and not (self._todo or self._running or self._ready or self._giving):
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(window.wait_s(now_s) if self._todo else None):
                    await self._move.wait()

    def _has_room(self) -> bool:
        return len(self._ready) < _READY and self._window.room(len(self._running), self._open_bytes)

    @staticmethod
    def _sends(shard: Shard) -> bool:
        """Whether something is to be submitted for it, as far as anybody knows."""
        return shard.state is None or shard.state in ("missing", "created")

    def _begin(self, shard: Shard) -> None:
        self._open_bytes += shard.size
        ticket = self._window.begin() if self._sends(shard) else None
        task = asyncio.create_task(self._one(shard, ticket))
        self._running[task] = shard
        task.add_done_callback(self._gone)

    def _gone(self, task: asyncio.Task[None]) -> None:
        shard = self._running.pop(task)
        self._open_bytes -= shard.size
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = self._error or error
        self._move.set()
        self._turn.set()

    # --- one shard ------------------------------------------------------------------------------------------------------

    async def _one(self, shard: Shard, ticket: int | None) -> None:
        """From wherever it is to its end, or back to those that are to be done."""
        sent = False

        def over() -> None:
            nonlocal sent
            if ticket is not None and not sent:
                sent = True
                self._window.end()
                self._move.set()
                self._turn.set()

        job = job_id(self._manifest, shard.path, shard.round)
        try:
            row = await self._on_its_way(shard, job, ticket)
            over()
            if row is None or row.state in OPEN:
                if shard.kind == "batch":
                    self._forget(shard)
                row = await self._runner.wait(job)
            self._trouble = 0
            if row.state == "succeeded":
                self._ready.append(_Ended(shard, row))
            else:
                await self._failed(shard, row, None, ticket)
        except _Back:
            pass
        except JobError as error:
            if type(error) is not JobError:
                raise
            self._store_failed(shard, error)
        finally:
            over()

    async def _on_its_way(self, shard: Shard, job: str, ticket: int | None) -> JobRow | None:
        """Submit it, unless somebody has. Its row, None if it has to be looked at."""
        if shard.state is None:
            shard.state = (await self._runner.states([job])).get(job, "missing")
        if shard.state not in ("missing", "created"):
            if not shard.counted:
                self.found += len(shard.parts)
            self._count(shard)
            return await self._runner.get(job) if shard.state in TERMINAL else None
        assert ticket is not None
        if any(part.call is None for part in shard.parts):
            await self._recall(shard)
        assert shard.parts[0].call is not None
        headers = self._jobs.headers_of(self.task.party, shard.parts[0].call, self.task.headers)
        try:
            if shard.state == "created":
                row = await self._runner.submit_held(self.task.party, job, headers, held=shard.tries < _ROUNDS)
                self.jobs += not shard.counted
            else:
                row, books = await self._runner.submit(
                    self.task.party,
                    call_of(shard),
                    group=self.group,
                    deadline_s=self.task.deadline_s,
                    headers=headers,
                    id=job,
                    held=shard.tries < _ROUNDS,
                )
                if books is not None or row.state == "submit_unknown":
                    self.jobs += 1
                else:  # another process was faster
                    self.found += 0 if shard.counted else len(shard.parts)
        except (JobError, AuthenticationFailed):
            raise
        except ConfigurationError as error:  # nothing was written
            await self._failed(shard, None, error)
            raise _Back from None
        except SpanwireError as error:
            await self._refused(shard, job, ticket, error)
            raise _Back from None
        self._taken(shard)
        return row

    def _forget(self, shard: Shard) -> None:
        """A batch is open for hours: its calls are read again if they are to be submitted again."""
        calls = self.task.calls
        if iter(calls) is not calls:
            self._open_bytes -= shard.size
            shard.parts = without_calls(shard)
            self._open_bytes += shard.size
            self._move.set()

    async def _recall(self, shard: Shard) -> None:
        wanted = {part.index: part for part in shard.parts}
        found = {}
        index = 0
        async for call, data in _read(self.task.calls, self.task.party.endpoint):
            if index in wanted:
                if hash(data) != wanted[index].mark:
                    break
                found[index] = Part(index, call, wanted[index].inputs, len(data), wanted[index].mark)
                if len(found) == len(wanted):
                    break
            index += 1
        if len(found) < len(wanted):
            raise ConfigurationError("the calls were others when they were read again: did the file change?")
        self._open_bytes -= shard.size
        shard.parts = [found[part.index] for part in shard.parts]
        self._open_bytes += shard.size

    async def _refused(self, shard: Shard, job: str, ticket: int, error: SpanwireError) -> None:
        row = await self._runner.get(job)
        if row is None or row.state in TERMINAL:
            self._taken(shard)
            await self._failed(shard, row, error)
            return
        # The server took it not, and will take it later: the job is in the store, and waits.
        shard.state = row.state
        self._todo.appendleft(shard)
        now_s, dice = time.monotonic(), random.random()  # noqa: S311
        if isinstance(error, (ConnectionFailed, CallTimeout)):
            if self._window.wait_s(now_s) is None:
                self._unreached += 1
                self._window.pause(now_s, dice=dice)
            if self._unreached > _PAUSES or not error.retryable:
                raise error
            return
        if not isinstance(error, (RateLimited, Overloaded)):
            shard.tries += 1
        wait_s = error.retry_after_s if isinstance(error, ServerError) else None
        self._window.refused(ticket, now_s, retry_after_s=wait_s, dice=dice)

    def _store_failed(self, shard: Shard, error: JobError) -> None:
        """The store may come back: look again, later, how it stands."""
        now_s = time.monotonic()
        if self._window.wait_s(now_s) is None:
            self._trouble += 1
            if self._trouble > _PAUSES:
                raise error
            self._window.pause(now_s, dice=random.random())  # noqa: S311
        shard.state = None
        self._todo.appendleft(shard)

    def _taken(self, shard: Shard) -> None:
        """The server has answered: with an acknowledgement, or that this job is none."""
        self._window.acknowledged()
        self._unreached = 0
        self._count(shard)

    def _count(self, shard: Shard) -> None:
        if not shard.counted:
            shard.counted = True
            self.submitted += len(shard.parts)
        self._turn.set()

    async def _failed(
        self, shard: Shard, row: JobRow | None, error: SpanwireError | None, ticket: int | None = None
    ) -> None:
        """It has failed: half of it may not, or a further round."""
        why = error
        if row is not None and row.state == "failed" and why is None:
            codec = self._runner.codec_for(row)
            why = failure_of(codec, row) if codec is not None else None
        failed = error is not None or (row is not None and row.state == "failed")
        if failed and len(shard.parts) > 1 and (why is None or may_be_one_call(why)):
            self._todo.extendleft(reversed(halves(shard)))
            return
        again = await self._next_round(shard) if row is not None else None
        if again is None and isinstance(why, (RateLimited, Overloaded)):
            # It was acknowledged, and then found to be too much, such as a batch for a queue that is full. Whoever waited to
            # submit it again may have died meanwhile.
            again = self._later(shard, why, ticket)
        if again is not None:
            self._todo.appendleft(again)
            return
        self._ready.append(_Ended(shard, row, error))

    def _later(self, shard: Shard, why: ServerError, ticket: int | None) -> Shard | None:
        if shard.round >= _ROUNDS:
            return None
        now_s, dice = time.monotonic(), random.random()  # noqa: S311
        self._window.refused(ticket or 0, now_s, retry_after_s=why.retry_after_s, dice=dice)
        return Shard(shard.path, shard.kind, shard.parts, round=shard.round + 1, counted=shard.counted)

    async def _next_round(self, shard: Shard) -> Shard | None:
        """A further round of a shard that had failed before this bulk began: if it is wanted, or there is one."""
        if shard.state not in TERMINAL:
            return None
        job = job_id(self._manifest, shard.path, shard.round + 1)
        state: State | None = (await self._runner.states([job])).get(job)
        if state is None and not self.task.retry_failed:
            return None
        return Shard(
            shard.path, shard.kind, shard.parts, round=shard.round + 1, state=state or "missing", counted=shard.counted
        )

    # --- calls ----------------------------------------------------------------------------------------------------------

    async def _looked_up(self) -> AsyncIterator[Shard]:
        """All shards, with how they stand."""
        some: list[Shard] = []
        size = 0
        async for shard in self._shards():
            some.append(shard)
            size += shard.size
            if len(some) >= _LOOKED_UP or size >= _LOOKED_UP_BYTES:
                for one in await self._look_up(some):
                    yield one
                some, size = [], 0
        for one in await self._look_up(some):
            yield one

    async def _look_up(self, shards: list[Shard]) -> list[Shard]:
        if self.group:
            ids = [job_id(self._manifest, shard.path, 0) for shard in shards]
            states = await self._runner.states(ids)
            for shard, job in zip(shards, ids, strict=True):
                shard.state = states.get(job, "missing")
        else:
            for shard in shards:
                shard.state = "missing"  # nobody else has these ids
        return shards

    async def _shards(self) -> AsyncIterator[Shard]:
        calls = self.task.calls
        if self.group:
            if iter(calls) is calls:  # it can be read once
                calls = list(calls)
            manifest = self._begin_manifest()
            async for _, data in _read(calls, self.task.party.endpoint):
                manifest.add(data)
            self._manifest, self.total = manifest.digest(), manifest.calls
        else:
            self._manifest = unlike_any()
        again = self._begin_manifest()
        cutter = Cutter(self.task.rules)
        async for call, data in _read(calls, self.task.party.endpoint):
            if self.group:
                again.add(data)
            for shard in cutter.add(call, data):
                yield shard
        if self.group and again.digest() != self._manifest:
            raise ConfigurationError("the calls were others when they were read again: did the file change?")
        for shard in cutter.finish():
            yield shard
        self.total = again.calls if self.group else cutter.calls

    def _begin_manifest(self) -> Manifest:
        party = self.task.party
        return Manifest(group=self.group, origin=party.origin, dialect=party.dialect_name, rules=self.task.rules)

    # --- the end --------------------------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """Leave it: with a group its jobs go on, without one they are cancelled."""
        self.stopped = True
        if not self.started:
            self._over = True
            return
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop())
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        feeder, running = self._feeder, dict(self._running)
        if feeder is not None and not feeder.done():
            feeder.cancel()
        if self._window.submitting:
            # Their acknowledgements are near: with them jobs need not be looked for later, or can be stopped at the provider.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LEAVE_S):
                    while self._window.submitting:
                        self._turn.clear()
                        await self._turn.wait()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, *(() if feeder is None else (feeder,)), return_exceptions=True)
        if not self.group and not self.state.closed:
            await self._cancel([*running.values(), *self._todo])
        self._over = True
        self._turn.set()

    async def _cancel(self, shards: list[Shard]) -> None:
        ids = iter([job_id(self._manifest, shard.path, shard.round) for shard in shards])

        async def some(left: Iterator[str]) -> None:
            for job in left:
                with contextlib.suppress(SpanwireError):  # it was never written, or the store is down
                    await self._runner.cancel(job)

        await asyncio.gather(*(some(ids) for _ in range(_CANCELS)))


class _Back(Exception):
    """No error: the shard is somewhere else now."""


async def _read(calls: Iterable[Call], endpoint: Endpoint) -> AsyncIterator[tuple[Call, bytes]]:
    """Each call and its encoding; other tasks have a turn in between."""
    for number, call in enumerate(calls):
        if not isinstance(call, Call) or call.operation == "batch":
            raise ConfigurationError(
                f"calls are made by Call.chat(...) or Call.embeddings(...); number {number} is {type(call).__name__}",
                endpoint=endpoint.address,
            )
        yield call, encoded(call)
        if number % _SLICE == _SLICE - 1:
            await asyncio.sleep(0)
