"""Connections of one origin: a PURE decision, and its thin shell that owns them.

:class:`PoolState` decides, with the time as an argument: use again, wait for one that is finishing or being dialled,
dial, or drop. :class:`Pool` does what it says, on one event loop.

Waiters are served first come, first served, by whatever comes first: a connection that is given back or a finished
dial. Yet each waiter is *counted on* at most one dial, so that a dial that fails has its callers to fail, and no waiter
is left without a supply: when a waiter is served by another dial than its own, the two waiters swap theirs.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

from .endpoint import Limits
from .errors import CallTimeout, ConnectionFailed, SpanwireError
from .timeline import Marks
from .transport import Attempt, Connection, Transport

__all__ = ["Dial", "Lease", "Member", "Pool", "PoolState", "Waiter"]

_log = logging.getLogger("spanwire.pool")

#: How long a call waits for a connection whose message is about to end, before it dials. Longer costs more than the
#: handshake it saves (measured on loopback and at 40 ms round trip).
FINISH_WAIT_NS = 5_000_000
#: How long the end of a message may be overdue after the terminal event until the exchange is aborted, in seconds.
FINISH_LIMIT_S = 1.0
#: How long one connection may take to close in order, in seconds.
CLOSE_LIMIT_S = 1.0

_ids = itertools.count(1)


class Member:
    """A connection in the pool.

    Attributes:
        id: short name, unique in the process.
        leases: exchanges on it now; ``finishing`` of them have had their terminal event.
        made_ns, idle_since_ns: when it was made, when it was last given back.
        uses: exchanges that were started on it.
        marks: of its connect; begin and end of the connect in ``connect_ns``.
        context: whatever the pool's owner keeps with it.
    """

    __slots__ = (
        "connect_ns",
        "connection",
        "context",
        "finishing",
        "id",
        "idle_since_ns",
        "leases",
        "listed",
        "made_ns",
        "marks",
        "uses",
    )

    def __init__(self, connection: Connection, marks: Marks, connect_ns: tuple[int, int]) -> None:
        self.connection = connection
        self.id = f"c{next(_ids)}"
        self.leases = 0
        self.finishing = 0
        self.made_ns = connect_ns[1]
        self.idle_since_ns = connect_ns[1]
        self.uses = 0
        self.listed = False
        self.marks = marks
        self.connect_ns = connect_ns
        self.context: object = None


class Dial:
    """A connection that is being made. ``expect``: exchanges that it will probably carry.

    ``context`` is whatever the pool's owner gave with the call that asked for it, None when warming up.
    """

    __slots__ = ("begin_ns", "context", "end_ns", "expect", "marks")

    def __init__(self, begin_ns: int, expect: int) -> None:
        self.begin_ns = begin_ns
        self.end_ns = 0
        self.expect = expect
        self.marks = Marks()
        self.context: object = None


class Waiter:
    """A call that waits for a connection.

    Attributes:
        dial: the dial it is counted on; None while it waits for one that is finishing.
        served: how it was served, once it was.
        by: the dial that served it, if one did.
        member: the connection it got; ``error``: why it gets none.
        wake: called once either is set.
    """

    __slots__ = ("asked_ns", "by", "dial", "error", "member", "served", "wake")

    def __init__(self, asked_ns: int) -> None:
        self.asked_ns = asked_ns
        self.dial: Dial | None = None
        self.by: Dial | None = None
        self.served: Literal["", "dialled", "rode", "freed"] = ""
        self.member: Member | None = None
        self.error: SpanwireError | None = None
        self.wake: Callable[[], None] | None = None

    def _done(self) -> None:
        if self.wake is not None:
            self.wake()


class PoolState:
    """PURE. All times are ns. Connections to close pile up in :attr:`dropped`; the shell empties it."""

    __slots__ = ("_free", "_in_time", "dials", "dropped", "members", "waiters")

    def __init__(self) -> None:
        self.members: set[Member] = set()
        self.dials: set[Dial] = set()
        self.waiters: deque[Waiter] = deque()
        self.dropped: list[Member] = []
        self._free: list[Member] = []  # members with room, the one used last at the end
        self._in_time: deque[bool] = deque(maxlen=8)  # whether the last messages ended within FINISH_WAIT_NS

    def take(self, now_ns: int, limits: Limits) -> Member | None:
        """A connection that is ready: the one used last, so that the others may age away. Drops dead ones."""
        if self.waiters:
            return None
        while self._free:
            member = self._free[-1]
            if not self._fit(member, now_ns, limits):
                self._free.pop()
                member.listed = False
                self._drop_if_idle(member)
                continue
            self._lease(member)
            return member
        return None

    def _fit(self, member: Member, now_ns: int, limits: Limits) -> bool:
        if not member.connection.usable():
            return False
        age_s, idle_s = limits.max_connection_age_s, limits.max_idle_s
        if age_s is not None and now_ns - member.made_ns > age_s * 1e9:
            return False
        return not (idle_s is not None and not member.leases and now_ns - member.idle_since_ns > idle_s * 1e9)

    def _lease(self, member: Member) -> None:
        member.leases += 1
        member.uses += 1
        if member.listed and member.leases >= member.connection.capacity:
            self._free.remove(member) if self._free[-1] is not member else self._free.pop()
            member.listed = False

    def wait(self, now_ns: int) -> Waiter:
        """A call that found nothing ready. Then ask :meth:`wants_dial`."""
        waiter = Waiter(now_ns)
        self.waiters.append(waiter)
        return waiter

    def wants_dial(self, waiter: Waiter, *, may_wait: bool) -> bool:
        """Whether to dial for this waiter.

        It rides on a dial that has room for it; else, if ``may_wait``, it waits for a connection that is finishing.
        """
        for dial in self.dials:
            if self._counted(dial) < dial.expect:
                waiter.dial = dial
                return False
        if may_wait and self._usually_in_time():
            finishing = sum(member.finishing for member in self.members if member.connection.usable())
            if finishing >= sum(1 for other in self.waiters if other.dial is None):
                return False
        return True

    def _counted(self, dial: Dial) -> int:
        return sum(1 for waiter in self.waiters if waiter.dial is dial)

    def _usually_in_time(self) -> bool:
        return not self._in_time or sum(self._in_time) * 2 >= len(self._in_time)

    def dial(self, now_ns: int, expect: int, waiter: Waiter | None = None) -> Dial:
        """A dial has been started, for this waiter or to warm up."""
        dial = Dial(now_ns, expect)
        self.dials.add(dial)
        if waiter is not None:
            waiter.dial = dial
        return dial

    def dialled(self, dial: Dial, connection: Connection, now_ns: int) -> tuple[Member, list[Waiter]]:
        """A dial has succeeded. Returns the new member, and waiters that it had no room for: dial for them."""
        self.dials.discard(dial)
        dial.end_ns = now_ns
        member = Member(connection, dial.marks, (dial.begin_ns, now_ns))
        self.members.add(member)
        self._serve(member, dial)
        self._list(member)
        return member, [waiter for waiter in self.waiters if waiter.dial is dial]

    def failed(self, dial: Dial, error: SpanwireError, now_ns: int) -> None:
        """A dial has failed: so do the callers that are counted on it."""
        self.dials.discard(dial)
        dial.end_ns = now_ns
        for waiter in [waiter for waiter in self.waiters if waiter.dial is dial]:
            self.waiters.remove(waiter)
            waiter.by = dial
            waiter.error = error
            waiter._done()

    def _serve(self, member: Member, dial: Dial | None) -> None:
        while self.waiters and member.leases < member.connection.capacity and member.connection.usable():
            waiter = self.waiters.popleft()
            if dial is None:
                waiter.served = "freed"
            else:
                waiter.served = "dialled" if dial.begin_ns >= waiter.asked_ns else "rode"
                waiter.by = dial
                if waiter.dial is not dial:  # swap: somebody counted on this dial takes over the other one
                    for other in self.waiters:
                        if other.dial is dial:
                            other.dial = waiter.dial
                            break
            self._lease(member)
            waiter.member = member
            waiter._done()

    def _list(self, member: Member) -> None:
        if not member.listed and member.connection.usable() and member.leases < member.connection.capacity:
            self._free.append(member)
            member.listed = True

    def finishing(self, member: Member) -> None:
        """An exchange has had its terminal event, and its message has not ended."""
        member.finishing += 1

    def release(self, member: Member, now_ns: int, *, finishing_since_ns: int = 0) -> None:
        """An exchange has left its connection. Serves the first waiter, or drops what is of no use any more."""
        member.leases -= 1
        if finishing_since_ns:
            member.finishing -= 1
            self._in_time.append(now_ns - finishing_since_ns <= FINISH_WAIT_NS)
        if member not in self.members:
            return
        member.idle_since_ns = now_ns
        if member.connection.usable():
            self._serve(member, None)
            self._list(member)
        else:
            self._drop_if_idle(member)

    def cancel(self, waiter: Waiter, now_ns: int) -> None:
        """A caller gives up waiting. If it has just been served, its connection goes to the next."""
        if waiter.member is not None:
            waiter.member.uses -= 1
            self.release(waiter.member, now_ns)
            waiter.member = None
        elif waiter in self.waiters:
            self.waiters.remove(waiter)

    def evict(self, now_ns: int, limits: Limits) -> int | None:
        """Drop idle connections that are dead or too old. Returns ns until the next one may be due, None for never."""
        next_ns: int | None = None
        for member in list(self.members):
            if member.leases:
                continue
            if not self._fit(member, now_ns, limits):
                self._drop_if_idle(member)
            elif limits.max_idle_s is not None:
                due_ns = int(member.idle_since_ns + limits.max_idle_s * 1e9) - now_ns
                next_ns = due_ns if next_ns is None else min(next_ns, due_ns)
        return next_ns

    def _drop_if_idle(self, member: Member) -> None:
        if not member.leases and member in self.members:
            self.members.remove(member)
            if member.listed:
                self._free.remove(member)
                member.listed = False
            self.dropped.append(member)


class Lease:
    """The right to run one exchange on a connection."""

    __slots__ = ("_finishing_since_ns", "_open", "_overdue", "_pool", "by", "error", "member", "served", "was_idle_ns")

    def __init__(
        self, pool: Pool, member: Member, served: Literal["idle", "dialled", "rode", "freed"], by: Dial | None
    ) -> None:
        self._pool = pool
        self.member = member
        self.served = served
        self.by = by
        self.was_idle_ns = member.idle_since_ns
        self._open = True
        self._finishing_since_ns = 0
        self._overdue: asyncio.TimerHandle | None = None

    def release(self) -> None:
        """Give it back. A second call is ignored."""
        if self._open:
            self._open = False
            if self._overdue is not None:
                self._overdue.cancel()
                self._overdue = None
            self._pool._released(self.member, self._finishing_since_ns)

    def finish(self, abort: Callable[[], None]) -> None:
        """The call has ended; if its message has not, wait for that in the background, then ``abort`` it."""
        if self._open:
            self._finishing_since_ns = time.perf_counter_ns()
            self._pool.state.finishing(self.member)
            self._overdue = self._pool.loop.call_later(FINISH_LIMIT_S, abort)


class Pool:
    """All connections of one transport to one origin, on one loop."""

    def __init__(
        self,
        transport: Transport,
        loop: asyncio.AbstractEventLoop,
        *,
        on_connect: Callable[[Attempt, Dial, Member | None, SpanwireError | None], None] | None = None,
    ) -> None:
        self.transport = transport
        self.loop = loop
        self.state = PoolState()
        self._tasks: set[asyncio.Task[SpanwireError | None]] = set()
        self._evictor: asyncio.TimerHandle | None = None
        self._limits = Limits()
        self._on_connect = on_connect
        self._closed = False

    def __repr__(self) -> str:
        state = self.state
        busy = sum(1 for member in state.members if member.leases)
        return f"Pool({len(state.members)} connections, {busy} busy, {len(state.dials)} dialling, {len(state.waiters)} waiting)"

    def try_lease(self, limits: Limits, now_ns: int) -> Lease | None:
        """A connection that is ready, or None."""
        member = self.state.take(now_ns, limits)
        if self.state.dropped:
            self._close_dropped()
        return None if member is None else Lease(self, member, "idle", None)

    async def lease(self, attempt: Attempt, on_wait: Callable[[Waiter], None], context: object = None) -> Lease:
        """Wait for a connection, and dial where the state says so. ``attempt`` is what a dial is made with.

        ``on_wait`` is given the waiter at once: its ``dial`` and ``by`` tell afterwards what was waited for. ``context``
        is kept on the dial that this call asks for.

        Raises:
            ConnectionFailed, CallTimeout: the dial that this caller counted on failed.
        """
        if self._closed:
            raise ConnectionFailed("the manager was closed", endpoint=attempt.endpoint.address, retryable=False)
        self._limits = attempt.endpoint.limits
        waiter = self.state.wait(time.perf_counter_ns())
        on_wait(waiter)
        ready: asyncio.Future[None] = self.loop.create_future()
        waiter.wake = lambda: None if ready.done() else ready.set_result(None)
        expiry: asyncio.TimerHandle | None = None
        if self.state.wants_dial(waiter, may_wait=True):
            self._start_dial(attempt, waiter, context)
        elif waiter.dial is None:
            expiry = self.loop.call_later(FINISH_WAIT_NS / 1e9, self._finish_wait_expired, attempt, waiter, context)
        try:
            await ready
        except BaseException:
            self.state.cancel(waiter, time.perf_counter_ns())
            self._close_dropped()
            raise
        finally:
            if expiry is not None:
                expiry.cancel()
        if waiter.error is not None:
            raise _copy(waiter.error)
        assert waiter.member is not None
        assert waiter.served
        return Lease(self, waiter.member, waiter.served, waiter.by)

    def _finish_wait_expired(self, attempt: Attempt, waiter: Waiter, context: object) -> None:
        if waiter in self.state.waiters and waiter.dial is None and self.state.wants_dial(waiter, may_wait=False):
            self._start_dial(attempt, waiter, context)

    async def warm(self, attempt: Attempt, count: int) -> None:
        """Make room for ``count`` exchanges at once, and wait until it is there.

        Raises:
            ConnectionFailed, CallTimeout: of the first dial that failed.
        """
        self._limits = attempt.endpoint.limits
        now_ns = time.perf_counter_ns()
        self.state.evict(now_ns, self._limits)
        self._close_dropped()
        room = sum(member.connection.capacity for member in self.state.members if member.connection.usable())
        room += sum(dial.expect for dial in self.state.dials)
        tasks = []
        while room < count:
            tasks.append(self._start_dial(attempt, None))
            room += max(1, self.transport.expect)
        pending = set(self._tasks)
        if pending:
            await asyncio.wait(pending)
        for task in tasks:
            error = task.result()
            if error is not None:
                raise _copy(error)

    def _start_dial(
        self, attempt: Attempt, waiter: Waiter | None, context: object = None
    ) -> asyncio.Task[SpanwireError | None]:
        dial = self.state.dial(time.perf_counter_ns(), max(1, self.transport.expect), waiter)
        dial.context = context
        own = Attempt(
            attempt.endpoint,
            timeouts=attempt.timeouts,
            dialect=attempt.dialect,
            api_key=attempt.api_key,
            headers=attempt.headers,
            marks=dial.marks,
        )
        # An empty context: the connection outlives the call, and must not keep its context alive or run in it.
        task = self.loop.create_task(self._dial(own, dial), context=contextvars.Context(), name="spanwire dial")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _dial(self, attempt: Attempt, dial: Dial) -> SpanwireError | None:
        """Never raises: what went wrong is returned, and given to the callers that count on it."""
        connection: Connection | None = None
        error: SpanwireError | None = None
        limit_s = attempt.timeouts.connect_s
        try:
            async with asyncio.timeout(limit_s):
                connection = await self.transport.connect(attempt.endpoint, attempt)
        except TimeoutError as cause:
            phase = dial.marks.open_part or "connect"
            error = CallTimeout(
                f"no connection within {limit_s} s (Timeouts.connect_s), it stood at {phase}",
                limit="connect_s",
                endpoint=attempt.endpoint.address,
                phase=phase,
            )
            error.__cause__ = cause
        except SpanwireError as cause:
            error = cause
        except asyncio.CancelledError as cause:  # the pool is being closed
            error = ConnectionFailed("the manager was closed", endpoint=attempt.endpoint.address, retryable=False)
            error.__cause__ = cause
        except Exception as cause:  # noqa: BLE001 - a transport's bug is the error of the calls that need it
            error = ConnectionFailed(
                f"the transport failed with {type(cause).__name__}", endpoint=attempt.endpoint.address, retryable=False
            )
            error.__cause__ = cause
        now_ns = time.perf_counter_ns()
        member: Member | None = None
        if connection is None or self._closed:
            if connection is not None:
                connection.abort()
                error = ConnectionFailed("the manager was closed", endpoint=attempt.endpoint.address, retryable=False)
            assert error is not None
            dial.end_ns = now_ns
            if self._on_connect is not None:
                self._on_connect(attempt, dial, None, error)
            self.state.failed(dial, error, now_ns)
            return error
        member, left_over = self.state.dialled(dial, connection, now_ns)
        if self._on_connect is not None:
            self._on_connect(attempt, dial, member, None)
        for waiter in left_over:
            waiter.dial = None
            if self.state.wants_dial(waiter, may_wait=False):
                self._start_dial(attempt, waiter, dial.context)
        self._arm_evictor()
        return None

    def _released(self, member: Member, finishing_since_ns: int) -> None:
        self.state.release(member, time.perf_counter_ns(), finishing_since_ns=finishing_since_ns)
        if self.state.dropped:
            self._close_dropped()
        elif self._evictor is None:
            self._arm_evictor()

    def _close_dropped(self) -> None:
        dropped, self.state.dropped = self.state.dropped, []
        for member in dropped:
            member.connection.abort()

    def _arm_evictor(self) -> None:
        if self._evictor is None and self._limits.max_idle_s is not None and not self._closed:
            self._evictor = self.loop.call_later(self._limits.max_idle_s, self._evict)

    def _evict(self) -> None:
        self._evictor = None
        next_ns = self.state.evict(time.perf_counter_ns(), self._limits)
        self._close_dropped()
        if next_ns is not None and not self._closed:
            self._evictor = self.loop.call_later(max(0.05, next_ns / 1e9), self._evict)

    async def aclose(self) -> None:
        """Close every connection, each within a second; fail those who wait."""
        self._closed = True
        if self._evictor is not None:
            self._evictor.cancel()
            self._evictor = None
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        members, self.state.members = list(self.state.members), set()
        await asyncio.gather(*(self._close_one(member) for member in members))

    async def _close_one(self, member: Member) -> None:
        try:
            async with asyncio.timeout(CLOSE_LIMIT_S):
                await member.connection.aclose()
        except Exception:  # noqa: BLE001 - it is closed all the same, below
            _log.debug("connection %s did not close in order", member.id, exc_info=True)
            member.connection.abort()

    def abort(self) -> None:
        """Close everything at once, on a loop that may be closed already."""
        self._closed = True
        members, self.state.members = list(self.state.members), set()
        for member in members:
            member.connection.abort()


def _copy(error: SpanwireError) -> SpanwireError:
    """An error of its own for each of several callers: it collects their traceback, reply and timeline."""
    twin = error.__class__.__new__(error.__class__, *error.args)
    twin.args = error.args
    twin.__dict__.update(error.__dict__)
    twin.__cause__ = error.__cause__
    return twin
