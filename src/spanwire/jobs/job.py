"""What callers hold: :class:`Job`, and :class:`Jobs` as ``manager.jobs``."""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections.abc import AsyncIterator, Generator, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self

import msgspec

from ..calls import BatchReply, Call, Embeddings, Reply
from ..endpoint import Endpoint
from ..errors import ConfigurationError, JobError
from ..timeline import AttemptRecord, Timeline
from .contract import TERMINAL, JobRow, State, Store
from .runner import JobRunner, Party
from .settings import JobSettings, JobTransport
from .stores import default_store_url, open_store
from .timing import timeline_of

if TYPE_CHECKING:
    from ..manager import ConnectionManager, LoopState
    from ..run import Prepared
    from .bulk.bulk import Bulk

__all__ = ["Completed", "Ended", "Job", "Jobs"]


class Job:
    """A call that is answered later. ``await job`` gives its reply, in this process or any other that has its id.

    Made by ``manager.submit(...)`` and ``manager.jobs.attach(id)``. Cancelling the await, or dropping this object, does not
    cancel the job; :meth:`cancel` does.

    Attributes:
        id: the job's id: all that is needed to take it up again.
        row: the job as it was last looked at; None before the first look of an attached one.
    """

    __slots__ = ("_jobs", "_source", "_submit", "id", "row")

    def __init__(
        self,
        jobs: Jobs,
        source: str | Store | Party,
        id: str,
        row: JobRow | None = None,
        submit: AttemptRecord | None = None,
    ) -> None:
        self._jobs = jobs
        self._source = source
        self._submit = submit
        self.id = id
        self.row = row

    def __repr__(self) -> str:
        return f"<spanwire.Job {self.id} {self.row.state if self.row is not None else 'not looked at'}>"

    def __await__(self) -> Generator[Any, None, Reply | Embeddings | BatchReply]:
        return self.result().__await__()

    async def result(self) -> Reply | Embeddings | BatchReply:
        """Wait for the end, and give the reply, of a ``Call.batch()`` a ``BatchReply``; what ``await job`` does. May be asked
        again.

        Raises:
            ServerError: the provider says that it failed.
            JobLost, JobExpired, JobCancelled: it has ended without a result.
            JobError: it is not in the store, or the store is down.
            ConnectionFailed: the manager was closed meanwhile; the job goes on.
        """
        runner = await self._runner()
        if self.row is None or self.row.state not in TERMINAL:
            self.row = await runner.wait(self.id)
        reply = await runner.reply(self.row)
        return reply if self._submit is None else msgspec.structs.replace(reply, timeline=self.timeline)

    async def status(self) -> State:
        """How it stands, as the store has it now. Does not ask the provider."""
        row = await (await self._runner()).get(self.id)
        if row is None:
            raise JobError("there is no such job in the store", job=self.id)
        self.row = row
        return row.state

    async def cancel(self) -> bool:
        """End it, here and for everybody who waits, and ask the provider to stop. False if it had ended before."""
        runner = await self._runner()
        try:
            return await runner.cancel(self.id)
        finally:
            self.row = await runner.get(self.id) or self.row

    async def late(self) -> Reply | Embeddings | BatchReply | None:
        """The result that came after the job was cancelled, expired or lost; None if none did.

        Of a batch the provider is asked: what was answered before it was given up is there once it has stopped.
        """
        await self.status()
        assert self.row is not None
        return await (await self._runner()).late(self.row)

    @property
    def timeline(self) -> Timeline:
        """Where its time went. Raises RuntimeError before its end was seen."""
        if self.row is None or self.row.state not in TERMINAL:
            raise RuntimeError("the job has not ended, as far as it was looked at: await it first")
        return timeline_of(self.row, self._submit if self.row.attempt == 1 else None)

    async def _runner(self) -> JobRunner:
        return await self._jobs.runner(self._source)


class Jobs:
    """The jobs of a manager: ``manager.jobs``."""

    def __init__(self, manager: ConnectionManager) -> None:
        self._manager = manager
        self._stores: dict[str, Store] = {}
        self._lock = threading.Lock()

    def attach(self, id: str, *, endpoint: Endpoint | str | None = None, store: str | Store | None = None) -> Job:
        """Take up a job by its id, whoever has submitted it.

        Args:
            endpoint: the job's. With it this process can also ask the provider, submit again and cancel there; without it
                it sees what comes into the store.
            store: where the job is, if no endpoint says it. Default: SPANWIRE_STORE, else the user's own.
        """
        if not isinstance(id, str) or not id:
            raise ConfigurationError(f"a job's id is text, not {type(id).__name__}")
        return Job(self, self._source(endpoint, store), id)

    def completed(
        self, group: str, *, endpoint: Endpoint | str | None = None, store: str | Store | None = None
    ) -> Completed:
        """The replies of a group's jobs, in the order in which they end, from the first one on; ends when none is open.

        A job that has failed raises its error; the iteration can be taken up again after it, with the same object. Use
        :meth:`ended` to know which job it is.
        """
        return Completed(self.ended(group, endpoint=endpoint, store=store))

    def ended(self, group: str, *, endpoint: Endpoint | str | None = None, store: str | Store | None = None) -> Ended:
        """The same as jobs, whose ``row`` says how they have ended, and whose ``await`` gives the reply or raises."""
        if not isinstance(group, str) or not group:
            raise ConfigurationError("a group is a name, as it was given to submit(group=...)")
        return Ended(self, self._source(endpoint, store), group)

    # --- inner --------------------------------------------------------------------------------------------------------

    async def submit(
        self,
        prepared: Prepared,
        endpoint: Endpoint,
        call: Call,
        *,
        group: str,
        deadline_s: float | None,
        headers: Mapping[str, str],
    ) -> Job:
        """See ``ConnectionManager.submit``."""
        _check_submit(group, deadline_s, endpoint.address)
        party = self.party(endpoint, prepared)
        runner = await self.runner(party, receive=False)  # which raises if it cannot
        row, submit = await runner.submit(party, call, group=group, deadline_s=deadline_s, headers=headers)
        return Job(self, party, row.id, row, submit)

    def submit_many(
        self,
        prepared: Prepared,
        endpoint: Endpoint,
        calls: Iterable[Call],
        *,
        group: str,
        window: int | None,
        deadline_s: float | None,
        headers: Mapping[str, str] | None,
        shard: int | None,
        shard_bytes: int | None,
        batch: bool | None,
        retry_failed: bool,
    ) -> Bulk:
        """See ``ConnectionManager.submit_many``."""
        from .bulk.bulk import Bulk
        from .bulk.drive import Drive, Task
        from .bulk.shards import rules_of

        address = endpoint.address
        _check_submit(group, deadline_s, address)
        for name, number in (("window", window), ("shard", shard), ("shard_bytes", shard_bytes)):
            if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
                raise ConfigurationError(f"{name}= is a number from 1, not {number!r:.20}", endpoint=address)
        if isinstance(calls, (str, bytes, Mapping, Call)) or not isinstance(calls, Iterable):
            raise ConfigurationError(
                f"calls= is a list of calls, or a JSONLFile, not {type(calls).__name__}", endpoint=address
            )
        if retry_failed and not group:
            raise ConfigurationError(
                "retry_failed=True needs the group that the calls were submitted with", endpoint=address
            )
        party = self.party(endpoint, prepared)
        # A template was written for one call's input: whether it can be a list of many, only its author knows.
        merge = "input" not in endpoint.options
        rules = rules_of(party.codec, merge=merge, batch=batch, shard=shard, shard_bytes=shard_bytes, address=address)
        return Bulk(Drive(self, Task(party, calls, rules, group, window, deadline_s, headers, retry_failed)))

    def headers_of(self, party: Party, call: Call, headers: Mapping[str, str] | None) -> Mapping[str, str]:
        """Those of a call's submit."""
        return self._manager._headers_of(party.prepared, party.endpoint, call, headers)

    def store_of(self, party: Party) -> Store:
        """An endpoint's store, opened. Blocking."""
        store = party.settings.store
        return self._open(store) if isinstance(store, str) else store

    def state(self) -> LoopState:
        """Of the running loop."""
        return self._manager.state()

    def party(self, endpoint: Endpoint, prepared: Prepared) -> Party:
        """What a runner needs to know of an endpoint."""
        known: Party | None = endpoint.__dict__.get("_job_party")
        if known is not None and known.prepared is prepared:
            return known
        transport, dialect = prepared.transport, prepared.dialect
        if "jobs" not in prepared.spec.capabilities or not isinstance(transport, JobTransport) or dialect is None:
            raise ConfigurationError(
                f'transport {prepared.spec.name!r} has no jobs; use Endpoint(url, transport="webhook", dialect=...) '
                "(pip install 'spanwire[webhook]')",
                endpoint=endpoint.address,
            )
        settings: JobSettings = transport.jobs(endpoint, dialect)
        party = endpoint.__dict__["_job_party"] = Party(endpoint, prepared, settings)
        return party

    async def runner(self, source: str | Store | Party, *, receive: bool = True) -> JobRunner:
        """The runner of a store on the running loop. ``receive``: with the receiver of the endpoint, if it has one."""
        state = self._manager.state()
        if not state.guarded:
            await state.guard()
        store = source.settings.store if isinstance(source, Party) else source
        key = store if isinstance(store, str) else id(store)
        runner: JobRunner | None = state.jobs.get(key)
        if runner is None:
            opened = await asyncio.to_thread(self._open, store) if isinstance(store, str) else store
            runner = state.jobs.get(key)  # somebody else may have made it meanwhile
            if runner is None:
                runner = state.jobs[key] = JobRunner(state, opened)
        if isinstance(source, Party):
            runner.register(source)
            if receive:
                await runner.receive(source)
        return runner

    def close(self) -> None:
        """Close the stores that were opened here."""
        with self._lock:
            stores, self._stores = list(self._stores.values()), {}
        for store in stores:
            store.close()

    def _open(self, url: str) -> Store:
        with self._lock:
            store = self._stores.get(url)
            if store is None:
                store = self._stores[url] = open_store(url)
            return store

    def _source(self, endpoint: Endpoint | str | None, store: str | Store | None) -> str | Store | Party:
        if endpoint is not None:
            if isinstance(endpoint, str):
                endpoint = Endpoint(endpoint, transport="webhook")
            return self.party(endpoint, self._manager._prepare(endpoint))
        if store is not None:
            return store
        with self._lock:
            if len(self._stores) == 1:  # the one that this manager's jobs are in
                return next(iter(self._stores))
        return default_store_url()


def _check_submit(group: object, deadline_s: object, address: str) -> None:
    if not isinstance(group, str):
        raise ConfigurationError(f"group= is a name, not {type(group).__name__}", endpoint=address)
    if deadline_s is not None and (
        isinstance(deadline_s, bool) or not isinstance(deadline_s, (int, float)) or not deadline_s > 0
    ):
        raise ConfigurationError("deadline_s= is a number of seconds, more than 0", endpoint=address)


class Ended:
    """Async iterator over the jobs of a group, as they end. See :meth:`Jobs.ended`."""

    #: Rows of processes whose clock is behind may come in below what was seen: so far back it is looked again, in seconds. What
    #: comes in lower is given at the end.
    _BACK_S = 5.0

    def __init__(self, jobs: Jobs, source: str | Store | Party, group: str) -> None:
        self._jobs = jobs
        self._source = source
        self._group = group
        self._after = (0.0, "")
        self._given: dict[str, float] = {}
        self._long_given = array("q")  # hashes of their ids: there may be millions
        self._ready: list[JobRow] = []

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Job:
        runner = await self._jobs.runner(self._source)
        while not self._ready:
            seen = await runner.change_mark()
            open_jobs = await runner.open_jobs(self._group)
            after = (max(0.0, self._after[0] - self._BACK_S), "")
            rows = await runner.completed(self._group, after)
            fresh = [row for row in rows if row.id not in self._given]
            if rows and not fresh and len(rows) >= 10_000:  # all of one moment, and more than come at once
                fresh = [row for row in await runner.completed(self._group, self._after) if row.id not in self._given]
            for row in fresh:
                self._given[row.id] = row.resolved_s
                self._after = max(self._after, (row.resolved_s, row.id))
            self._ready = fresh[::-1]
            horizon_s = self._after[0] - 2 * self._BACK_S
            if len(self._given) > 1000:
                self._long_given.extend(hash(job) for job, at in self._given.items() if at < horizon_s)
                self._given = {job: at for job, at in self._given.items() if at >= horizon_s}
            if not fresh and open_jobs == 0:
                self._ready = (await self._left_out(runner))[::-1]
                if not self._ready:
                    raise StopAsyncIteration
            elif not fresh:
                await runner.changed_since(seen)
        row = self._ready.pop()
        return Job(self._jobs, self._source, row.id, row)

    async def _left_out(self, runner: JobRunner) -> list[JobRow]:
        """Those that came in far below what was seen, from a clock that is far behind, or a write that took long."""
        long_given = set(self._long_given)
        found: list[JobRow] = []
        after = (0.0, "")
        while rows := await runner.completed(self._group, after):
            found += [row for row in rows if row.id not in self._given and hash(row.id) not in long_given]
            after = (rows[-1].resolved_s, rows[-1].id)
        self._given.update((row.id, row.resolved_s) for row in found)
        return found


class Completed(AsyncIterator["Reply | Embeddings | BatchReply"]):
    """Async iterator over the replies of a group. See :meth:`Jobs.completed`."""

    def __init__(self, ended: Ended) -> None:
        self._ended = ended

    async def __anext__(self) -> Reply | Embeddings | BatchReply:
        return await (await self._ended.__anext__())
