"""Connections of one origin: a PURE decision, and its thin shell that owns them.

:class:`PoolState` decides, with the time as an argument: use again, wait for one that is finishing or being dialled,
dial, or drop. :class:`Pool` does what it says, on one event loop.

A server that takes a fixed number of clients says so by refusing one (an error that is ``full``). Then nobody dials for a
while: the callers wait for a connection that is given back, and one dial at a time tries whether there is room again.

Waiters are served first come, first served, by whatever comes first: a connection that is given back or a finished
dial. Yet each waiter is *counted on* at most one dial, so that a dial that fails has its callers to fail, and no waiter
is left without a supply: when a waiter is served by another dial than its own, the two waiters swap theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import logging
import math
import random
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Literal

from .endpoint import Endpoint, Limits, Timeouts
from .errors import CallTimeout, ConnectionFailed, QueueTimeout, SpanwireError
from .timeline import Marks
from .transport import Attempt, Connection, Garbage, Transport, told

__all__ = ["Dial", "Lease", "Member", "Pool", "PoolState", "Waiter"]

_log = logging.getLogger("spanwire.pool")

#: How long a call waits for a connection whose message is about to end, before it dials. Longer costs more than the
#: handshake it saves (measured on loopback and at 40 ms round trip).
FINISH_WAIT_NS = 5_000_000
#: How long the end of a message may be overdue after the terminal event until the exchange is aborted, in seconds.
FINISH_LIMIT_S = 1.0
#: How long one connection may take to close in order, in seconds.
CLOSE_LIMIT_S = 1.0
#: After a server has said that it is full: until the next try, in seconds; doubled each time up to the limit, with jitter
#: of a half. A server that names a time gets it. Our own choice: a client that leaves is noticed soon, and many
#: processes together ask a full server some ten times a second and not more.
FULL_WAIT_S = 0.1
FULL_WAIT_LIMIT_S = 5.0

_NEVER_S = 86_400.0 * 365
#: Later than any clock.
_NEVER_NS = 1 << 62
#: By so much may the time of a timer differ from the ns that it was made of.
_ROUNDING_S = 5e-7

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
    """A connection that is being made.

    Attributes:
        expect: exchanges that it will probably carry.
        counted: the waiters that are counted on it, in order of arrival.
        context: whatever the pool's owner gave with the call that asked for it; None when warming up.
    """

    __slots__ = ("begin_ns", "context", "counted", "end_ns", "expect", "marks")

    def __init__(self, begin_ns: int, expect: int) -> None:
        self.begin_ns = begin_ns
        self.end_ns = 0
        self.expect = expect
        self.marks = Marks()
        self.counted: dict[Waiter, None] = {}  # in order of arrival
        self.context: object = None


class Waiter:
    """A call that waits for a connection.

    Attributes:
        limits: of its endpoint.
        until_ns: when it gives up on a server that is full.
        dial: the dial it is counted on; None while it waits for a connection that is finishing, or that the server has
            room.
        dial_asked_ns: when it was first counted on a dial, after it had waited for one that is finishing; else 0.
        served: how it was served, once it was.
        by: the dial that served it, or that failed it, or that it was counted on when it gave up.
        member: the connection it got; ``error``: why it gets none.
        wake: called once either is set.
        attempt, context: what a dial for it is made with, and whatever the pool's owner keeps on that.
    """

    __slots__ = (
        "asked_ns",
        "attempt",
        "by",
        "context",
        "dial",
        "dial_asked_ns",
        "error",
        "fresh",
        "limits",
        "member",
        "served",
        "until_ns",
        "wake",
    )

    def __init__(self, asked_ns: int, limits: Limits, *, fresh: bool = False) -> None:
        self.asked_ns = asked_ns
        self.limits = limits
        self.until_ns = 0
        self.fresh = fresh
        self.dial: Dial | None = None
        self.dial_asked_ns = 0
        self.by: Dial | None = None
        self.served: Literal["", "dialled", "rode", "freed"] = ""
        self.member: Member | None = None
        self.error: SpanwireError | None = None
        self.wake: Callable[[], None] | None = None
        self.attempt: Attempt | None = None
        self.context: object = None


class PoolState:
    """PURE. All times are ns. Connections to close pile up in :attr:`dropped`; the shell empties it.

    Every decision is made without looking at all waiters or connections: a thousand cold calls at once would pay for
    that a million times.

    Args:
        multiplexed: connections of this kind may carry several exchanges, and the number may grow while they live.
    """

    __slots__ = (
        "_finishing",
        "_free",
        "_in_time",
        "_multiplexed",
        "_refusals",
        "_roomy",
        "_tried",
        "_unproven",
        "dials",
        "dropped",
        "full_until_ns",
        "members",
        "waiters",
    )

    def __init__(self, *, multiplexed: bool = False) -> None:
        self.members: set[Member] = set()
        self.dials: set[Dial] = set()
        self.waiters: OrderedDict[Waiter, None] = OrderedDict()
        self.dropped: list[Member] = []
        self._multiplexed = multiplexed
        self._free: list[Member] = []  # members with room, the one used last at the end
        self._roomy: dict[Dial, None] = {}  # dials that have room for another waiter
        self._finishing = 0  # exchanges whose message is about to end, over all members
        self._in_time: deque[bool] = deque(maxlen=8)  # whether the last messages ended within FINISH_WAIT_NS
        self._refusals = 0  # in a row, of a server that is full
        self._unproven = False  # it says so after the handshake: that one succeeded is no sign of room
        self._tried = False  # a handshake has succeeded meanwhile, and its exchange has not been refused yet
        self.full_until_ns = 0  # nobody dials before; 0 while the server is not known to be full

    def take(self, now_ns: int, limits: Limits, prepared: object = None) -> Member | None:
        """A connection that is ready: the one used last, so that the others may age away. Drops dead ones.

        With ``prepared``, the one that says that it suits it best (see :meth:`spanwire.transport.Transport.prepare`).
        """
        if self.waiters:
            return None
        if self._multiplexed:
            for member in self.members:  # few, and their capacity may have grown
                self._list(member)
        while self._free:
            if prepared is not None:
                self._put_last(prepared)
            member = self._free[-1]
            if member.leases < member.connection.capacity and self._fit(member, now_ns, limits):
                self._lease(member)
                return member
            self._unlist(member)
            if not self._fit(member, now_ns, limits):
                self._drop_if_idle(member)
        return None

    def _put_last(self, prepared: object) -> None:
        """Have the member found first that suits this call best; of equal ones the one used last. Where all would have to
        forget something (0), the one used longest ago: what it remembers is asked for least."""
        free = self._free
        if len(free) > 1:
            suits = [member.connection.suits(prepared) for member in free]  # type: ignore[attr-defined]
            highest = max(suits)
            best = suits.index(highest) if highest == 0 else len(suits) - 1 - suits[::-1].index(highest)
            free.append(free.pop(best))

    def _fit(self, member: Member, now_ns: int, limits: Limits) -> bool:
        if not _usable(member.connection):
            return False
        age_s, idle_s = limits.max_connection_age_s, limits.max_idle_s
        if age_s is not None and now_ns - member.made_ns > age_s * 1e9:
            return False
        return not (idle_s is not None and not member.leases and now_ns - member.idle_since_ns > idle_s * 1e9)

    def _lease(self, member: Member) -> None:
        member.leases += 1
        member.uses += 1
        if member.leases >= member.connection.capacity:
            self._unlist(member)

    def _list(self, member: Member, *, fit: bool = False) -> None:
        """Have it found by the next call. ``fit``: it was looked at just now."""
        if not member.listed and member.leases < member.connection.capacity and (fit or _usable(member.connection)):
            self._free.append(member)
            member.listed = True

    def _unlist(self, member: Member) -> None:
        if member.listed:
            member.listed = False
            if self._free[-1] is member:
                self._free.pop()
            else:
                self._free.remove(member)

    def wait_for_new(self, now_ns: int, limits: Limits) -> Waiter:
        """A call that takes no connection that was used before: it stands in no queue. Then :meth:`dial` for it."""
        return Waiter(now_ns, limits, fresh=True)

    def wait(self, now_ns: int, limits: Limits) -> Waiter:
        """A call that found nothing ready. Then ask :meth:`wants_dial`."""
        waiter = Waiter(now_ns, limits)
        self.waiters[waiter] = None
        return waiter

    def wants_dial(self, waiter: Waiter, *, may_wait: bool) -> bool:
        """Whether to dial for this waiter, which is counted on no dial yet.

        It rides on a dial that has room for it; else, if ``may_wait``, it waits for a connection that is finishing.
        """
        if self._roomy:
            self._count(waiter, next(iter(self._roomy)))
            return False
        if self.full_until_ns and not waiter.fresh:
            return False  # it waits for a connection that is given back, or for the next try
        if may_wait and self._usually_in_time():
            undialled = len(self.waiters) - sum(len(dial.counted) for dial in self.dials) if self._finishing else 1
            return self._finishing < undialled
        return True

    def _usually_in_time(self) -> bool:
        return not self._in_time or sum(self._in_time) * 2 >= len(self._in_time)

    def _count(self, waiter: Waiter, dial: Dial | None) -> None:
        """Count a waiter on this dial, and on no other one any more."""
        before = waiter.dial
        if before is not None:
            before.counted.pop(waiter, None)
            if before in self.dials:
                self._roomy[before] = None
        waiter.dial = dial
        if dial is not None:
            dial.counted[waiter] = None
            if len(dial.counted) >= dial.expect:
                self._roomy.pop(dial, None)

    def dial(self, now_ns: int, expect: int, waiter: Waiter | None = None) -> Dial:
        """A dial has been started, for this waiter or to warm up."""
        dial = Dial(now_ns, expect)
        self.dials.add(dial)
        self._roomy[dial] = None
        if waiter is not None:
            self._count(waiter, dial)
        return dial

    def dialled(self, dial: Dial, connection: Connection, now_ns: int) -> tuple[Member, list[Waiter]]:
        """A dial has succeeded. Returns the new member, and waiters that it had no room for, counted on nothing now."""
        self._end_dial(dial, now_ns)
        if self._unproven:
            self._tried = True
            self.full_until_ns = max(self.full_until_ns, now_ns + int(self._full_wait_s(0.0) * 1e9))
        else:
            self.full_until_ns = self._refusals = 0
        member = Member(connection, dial.marks, (dial.begin_ns, now_ns))
        self.members.add(member)
        if connection.capacity > 1:
            self._multiplexed = True
        for waiter in [waiter for waiter in dial.counted if waiter.fresh]:
            if member.leases < connection.capacity:
                self._grant(waiter, member, dial)
        self._serve(member, dial, now_ns)
        self._list(member)
        if not _usable(connection):
            self._drop_if_idle(member)
        left_over = list(dial.counted)
        for waiter in left_over:
            self._count(waiter, None)
        return member, left_over

    def failed(self, dial: Dial, error: SpanwireError, now_ns: int) -> None:
        """A dial has failed: so do the callers that are counted on it, unless the server is full and they may wait."""
        self._end_dial(dial, now_ns)
        for waiter in list(dial.counted):
            if error.full and not waiter.fresh and self._may_wait(waiter, now_ns):
                self._count(waiter, None)
            else:
                waiter.by = dial
                self.refuse(waiter, error)

    def _may_wait(self, waiter: Waiter, now_ns: int) -> bool:
        """Where we hold connections one will be given back; else only if the caller has said how long it would wait."""
        return now_ns < waiter.until_ns and (bool(self.members) or waiter.limits.queue_timeout_s is not None)

    def refused(self, now_ns: int, wait_s: float | None, dice: float, *, connected: bool = False) -> None:
        """The server is full: nobody dials for a while. ``dice`` in [0, 1).

        ``connected``: it has said so after it had taken the connection, so that only an exchange that ends well shows that
        there is room.
        """
        if connected:
            self._unproven = True
        least_s = min(wait_s or 0.0, _NEVER_S)
        if now_ns >= self.full_until_ns or self._tried:  # of many that were refused together the first one counts
            least_s = max(least_s, self._full_wait_s(dice))
            self._refusals += 1
            self._tried = False
        self.full_until_ns = max(self.full_until_ns, now_ns + int(least_s * 1e9))

    def _full_wait_s(self, dice: float) -> float:
        return min(FULL_WAIT_LIMIT_S, FULL_WAIT_S * 2.0 ** min(self._refusals, 16)) * (0.5 + dice / 2)

    def look_at_full(self, now_ns: int) -> tuple[Waiter | None, list[Waiter], int]:
        """Whose turn it is to try whether there is room: a waiter to dial for, or None; those who have waited too long; and
        when to look again, in ns from now (0 for never)."""
        late: list[Waiter] = []
        waiting: list[Waiter] = []
        if not self.full_until_ns:
            return None, late, 0
        for waiter in self.waiters:
            if waiter.dial is None:
                (late if waiter.until_ns <= now_ns else waiting).append(waiter)
        if not waiting:
            return None, late, 0
        next_ns = min(waiter.until_ns for waiter in waiting) - now_ns
        if now_ns < self.full_until_ns:
            return None, late, max(1, min(next_ns, self.full_until_ns - now_ns))
        return (None if self.dials else waiting[0]), late, max(1, next_ns)

    def _end_dial(self, dial: Dial, now_ns: int) -> None:
        self.dials.discard(dial)
        self._roomy.pop(dial, None)
        dial.end_ns = now_ns

    def refuse(self, waiter: Waiter, error: SpanwireError) -> None:
        """A waiter gets an error."""
        self._count(waiter, None)
        self.waiters.pop(waiter, None)
        waiter.error = error
        if waiter.wake is not None:
            waiter.wake()

    def _serve(self, member: Member, dial: Dial | None, now_ns: int) -> None:
        while self.waiters and member.leases < member.connection.capacity:
            waiter = next(iter(self.waiters))
            if not self._fit(member, now_ns, waiter.limits):
                return
            self.waiters.popitem(last=False)
            own = waiter.dial
            self._grant(waiter, member, dial)
            if own is not None and dial is not None and own is not dial and dial.counted:
                # A swap: one that is counted on this dial takes over the other one, so that nobody is without a supply.
                self._count(next(iter(dial.counted)), own)

    def _grant(self, waiter: Waiter, member: Member, dial: Dial | None) -> None:
        if dial is None:
            waiter.served = "freed"
        else:
            waiter.served = "dialled" if dial.begin_ns >= waiter.asked_ns else "rode"
            waiter.by = dial
            if waiter.dial is None and waiter.served == "dialled":  # made for another one that waited with it
                waiter.dial_asked_ns = dial.begin_ns
        self._count(waiter, None)
        self._lease(member)
        waiter.member = member
        if waiter.wake is not None:
            waiter.wake()

    def finishing(self, member: Member) -> None:
        """An exchange has had its terminal event, and its message has not ended."""
        member.finishing += 1
        self._finishing += 1

    def late(self, waiter: Waiter) -> bool:
        """A waiter has waited long enough for a connection that is finishing: whether it still waits, and for that."""
        if waiter in self.waiters and waiter.dial is None:
            self._in_time.append(False)
            return True
        return False

    def release(
        self, member: Member, now_ns: int, limits: Limits, *, finishing_since_ns: int = 0, used: bool = True
    ) -> None:
        """An exchange has left its connection. Serves the first waiter, or drops what is of no use any more.

        Not ``used``: there was none, so that it says nothing of the server.
        """
        member.leases -= 1
        if finishing_since_ns:
            member.finishing -= 1
            self._finishing -= 1
            self._in_time.append(now_ns - finishing_since_ns <= FINISH_WAIT_NS)
        if member not in self.members:
            return
        member.idle_since_ns = now_ns
        if self._fit(member, now_ns, limits):
            if self._unproven and used:
                self.full_until_ns = self._refusals = 0
                self._unproven = self._tried = False
            if self.waiters:
                self._serve(member, None, now_ns)
            self._list(member, fit=True)
        else:
            self._unlist(member)
            self._drop_if_idle(member)

    def cancel(self, waiter: Waiter, now_ns: int) -> None:
        """A caller gives up waiting. If it has just been served, its connection goes to the next."""
        if waiter.member is not None:
            waiter.member.uses -= 1
            self.release(waiter.member, now_ns, waiter.limits, used=False)
            waiter.member = None
        elif waiter in self.waiters or waiter.fresh:
            self.waiters.pop(waiter, None)
            waiter.by = waiter.by or waiter.dial
            self._count(waiter, None)

    def evict(self, now_ns: int, limits: Limits) -> int | None:
        """Drop idle connections that are dead or too old. Returns ns until the next one may be due, None for never."""
        next_ns: int | None = None
        for member in list(self.members):
            if member.leases:
                continue
            if not self._fit(member, now_ns, limits):
                self._drop_if_idle(member)
            elif limits.max_idle_s is not None and math.isfinite(limits.max_idle_s):
                due_ns = int(member.idle_since_ns + limits.max_idle_s * 1e9) - now_ns
                next_ns = due_ns if next_ns is None else min(next_ns, due_ns)
        return next_ns

    def room(self, now_ns: int, limits: Limits) -> int:
        """Exchanges that could begin at once, now or when the dials under way are done."""
        ready = sum(
            member.connection.capacity - member.leases for member in self.members if self._fit(member, now_ns, limits)
        )
        return ready + sum(dial.expect - len(dial.counted) for dial in self.dials)

    def _drop_if_idle(self, member: Member) -> None:
        if not member.leases and member in self.members:
            self.members.remove(member)
            self._unlist(member)
            self.dropped.append(member)


class Lease:
    """The right to run one exchange on a connection."""

    __slots__ = ("_finishing_since_ns", "_open", "_overdue", "by", "member", "pool", "served", "was_idle_ns")

    def __init__(
        self, pool: Pool, member: Member, served: Literal["idle", "dialled", "rode", "freed"], by: Dial | None
    ) -> None:
        self.pool = pool
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
            self.pool._released(self.member, self._finishing_since_ns)

    def finish(self, abort: Callable[[], None]) -> None:
        """The call has ended; if its message has not, wait for that in the background, then ``abort`` it."""
        if self._open:
            self._finishing_since_ns = time.perf_counter_ns()
            self.pool.state.finishing(self.member)
            self._overdue = self.pool.loop.call_later(FINISH_LIMIT_S, self._end_overdue, abort)

    def _end_overdue(self, abort: Callable[[], None]) -> None:
        try:
            abort()
        except Exception:  # noqa: BLE001 - a transport's bug must not keep the connection for ever
            _log.warning("an exchange of %s could not be aborted", self.pool.name, exc_info=True)
            _abort(self.member.connection)  # nobody knows what is on it
            self.release()


class Pool:
    """All connections of one transport to one origin, on one loop.

    Args:
        name: the transport's, and its plugin's, for messages.
    """

    def __init__(
        self,
        transport: Transport,
        loop: asyncio.AbstractEventLoop,
        *,
        name: str = "the transport",
        on_connect: Callable[[Attempt, Dial, Member | None, SpanwireError | None], None] | None = None,
        on_empty: Callable[[], None] | None = None,
    ) -> None:
        self.transport = transport
        self.loop = loop
        self.name = name
        self.state = PoolState()
        self._tasks: set[asyncio.Task[SpanwireError | None]] = set()
        self._evictor: asyncio.TimerHandle | None = None
        self._looker: asyncio.TimerHandle | None = None  # while the server is full
        self._limits = Limits()
        self._on_connect = on_connect
        self._on_empty = on_empty
        self._closed = False

    def __repr__(self) -> str:
        state = self.state
        busy = sum(1 for member in state.members if member.leases)
        return f"Pool({len(state.members)} connections, {busy} busy, {len(state.dials)} dialling, {len(state.waiters)} waiting)"

    def try_lease(self, limits: Limits, now_ns: int, prepared: object = None) -> Lease | None:
        """A connection that is ready, or None."""
        member = self.state.take(now_ns, limits, prepared)
        if self.state.dropped:
            self._close_dropped()
        return None if member is None else Lease(self, member, "idle", None)

    async def lease(
        self, attempt: Attempt, on_wait: Callable[[Waiter], None], context: object = None, *, fresh: bool = False
    ) -> Lease:
        """Wait for a connection, and dial where the state says so. ``attempt`` is what a dial is made with.

        ``on_wait`` is given the waiter at once: its ``dial`` and ``by`` tell afterwards what was waited for. ``context``
        is kept on the dial that this call asks for.

        Raises:
            ConnectionFailed, CallTimeout: the dial that this caller counted on failed.
        """
        if self._closed:
            raise _closed(attempt)
        self._limits = attempt.endpoint.limits
        wait = self.state.wait_for_new if fresh else self.state.wait
        waiter = wait(time.perf_counter_ns(), self._limits)
        waiter.until_ns = (attempt.asked_ns or waiter.asked_ns) + _patience_ns(self._limits, attempt.timeouts)
        waiter.attempt, waiter.context = attempt, context
        on_wait(waiter)
        ready: asyncio.Future[None] = self.loop.create_future()
        waiter.wake = lambda: None if ready.done() else ready.set_result(None)
        expiry: asyncio.TimerHandle | None = None
        if self.state.wants_dial(waiter, may_wait=not fresh):
            self._start_dial(attempt, waiter, context)
        elif waiter.dial is None and self.state.full_until_ns:
            self._look_by(waiter.until_ns)
        elif waiter.dial is None:
            expiry = self.loop.call_later(FINISH_WAIT_NS / 1e9, self._finish_wait_expired, attempt, waiter, context)
        try:
            await ready
        except BaseException:
            self.state.cancel(waiter, time.perf_counter_ns())
            self._close_dropped()
            if not self.state.waiters:
                self._look_soon()  # for nobody: the timer goes
            self._say_if_empty()
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
        if self._closed or not self.state.late(waiter):
            return
        waiter.dial_asked_ns = time.perf_counter_ns()
        if self.state.wants_dial(waiter, may_wait=False):
            self._start_dial(attempt, waiter, context)
        elif waiter.dial is None:
            self._look_by(waiter.until_ns)

    def refused(self, error: SpanwireError, asked_ns: int, limits: Limits, timeouts: Timeouts) -> bool:
        """The server has said on a connection that it is full: then a connection that was made is no sign of room.

        Returns whether the caller, who first asked at ``asked_ns``, may wait for room, instead of failing.
        """
        now_ns = time.perf_counter_ns()
        self.state.refused(now_ns, getattr(error, "retry_after_s", None), random.random(), connected=True)  # noqa: S311
        if now_ns >= asked_ns + _patience_ns(limits, timeouts):
            return False
        return limits.queue_timeout_s is not None or any(_usable(member.connection) for member in self.state.members)

    def _look_by(self, until_ns: int) -> None:
        """Somebody waits for a full server until then. Looks at all who wait only if nobody would look in time."""
        state, looker = self.state, self._looker
        due_ns = until_ns if state.dials else min(until_ns, state.full_until_ns)
        left_s = (due_ns - time.perf_counter_ns()) / 1e9
        if looker is None or looker.when() > self.loop.time() + left_s + _ROUNDING_S:
            self._look_soon()

    def _look_soon(self) -> None:
        """Look at those who wait for a full server, when the next thing is due."""
        if self._looker is not None:
            self._looker.cancel()
            self._looker = None
        if self._closed:
            return
        waiter, late, next_ns = self.state.look_at_full(time.perf_counter_ns())
        for other in late:
            limit_s = other.limits.queue_timeout_s
            named = f"Limits.queue_timeout_s = {limit_s:g} s" if limit_s is not None else "Timeouts.first_content_s"
            address = other.attempt.endpoint.address if other.attempt is not None else None
            self.state.refuse(
                other, QueueTimeout(f"the server is full, and had no room in time ({named})", endpoint=address)
            )
        if waiter is not None and waiter.attempt is not None:
            waiter.dial_asked_ns = time.perf_counter_ns()
            self._start_dial(waiter.attempt, waiter, waiter.context)
        if next_ns:
            self._looker = self.loop.call_later(next_ns / 1e9, self._look_again)

    def _look_again(self) -> None:
        self._look_soon()
        self._say_if_empty()

    async def warm(self, attempt: Attempt, count: int) -> None:
        """Make room for ``count`` exchanges at once, and wait until it is there.

        Raises:
            ConnectionFailed, CallTimeout: of the first dial that failed.
        """
        if self._closed:
            raise _closed(attempt)
        self._limits = attempt.endpoint.limits
        now_ns = time.perf_counter_ns()
        self.state.evict(now_ns, self._limits)
        self._close_dropped()
        room = self.state.room(now_ns, self._limits)
        while room < count:
            self._start_dial(attempt, None)
            room += self._expected(attempt.endpoint)
        pending = set(self._tasks)  # those that others have asked for make room too
        if pending:
            await asyncio.wait(pending)
        for task in pending:
            error = _closed(attempt) if task.cancelled() else task.result()
            if error is not None:
                raise _copy(error)

    def _expected(self, endpoint: Endpoint) -> int:
        """What a dial will probably carry. A transport that cannot say gets one dial for each caller."""
        try:
            return max(1, self.transport.expect(endpoint))
        except Exception:  # noqa: BLE001 - a transport's bug must not leave its callers waiting
            _log.warning("expect() of %s failed", self.name, exc_info=True)
            return 1

    def _start_dial(
        self, attempt: Attempt, waiter: Waiter | None, context: object = None
    ) -> asyncio.Task[SpanwireError | None]:
        dial = self.state.dial(time.perf_counter_ns(), self._expected(attempt.endpoint), waiter)
        dial.context = context
        # Nothing of the call itself (its headers, its trace): others will use the connection too.
        own = Attempt(
            attempt.endpoint,
            timeouts=attempt.timeouts,
            dialect=attempt.dialect,
            api_key=attempt.api_key,
            marks=dial.marks,
        )
        # An empty context: the connection outlives the call, and must not keep its context alive or run in it.
        task = self.loop.create_task(self._dial(own, dial), context=contextvars.Context(), name="spanwire dial")
        self._tasks.add(task)

        def done(task: asyncio.Task[SpanwireError | None]) -> None:
            self._tasks.discard(task)
            if dial in self.state.dials:  # cancelled before its first step
                self.state.failed(dial, _closed(own), time.perf_counter_ns())
                self._say_if_empty()

        task.add_done_callback(done)
        return task

    async def _dial(self, attempt: Attempt, dial: Dial) -> SpanwireError | None:
        """Never raises: what went wrong is returned, and given to the callers that count on it."""
        connection: Connection | None = None
        error: SpanwireError | None = None
        limit_s = attempt.timeouts.connect_s
        try:
            async with asyncio.timeout(limit_s) as timer:
                connection = _checked(await self.transport.connect(attempt.endpoint, attempt))
        except TimeoutError as cause:
            phase = dial.marks.open_part or "connect"
            if timer.expired():
                full = phase == "upgrade"  # how some proxies are full: Envoy's circuit breaker
                error = CallTimeout(
                    f"no connection within {limit_s} s (Timeouts.connect_s), it stood at {phase}"
                    + (": the server may be full" if full else ""),
                    limit="connect_s",
                    endpoint=attempt.endpoint.address,
                    phase=phase,
                )
                error.full = full
            else:  # the system's own, ETIMEDOUT
                error = ConnectionFailed("the system timed out", endpoint=attempt.endpoint.address, phase=phase)
            error.__cause__ = cause
        except SpanwireError as cause:
            error = cause
        except asyncio.CancelledError as cause:  # the pool is being closed
            error = _closed(attempt)
            error.__cause__ = cause
        except Exception as cause:  # noqa: BLE001 - a transport's bug is the error of the calls that need it
            error = ConnectionFailed(
                f"{self.name} failed with {type(cause).__name__}{told(cause)}",
                endpoint=attempt.endpoint.address,
                retryable=False,
            )
            error.__cause__ = cause
        now_ns = time.perf_counter_ns()
        member: Member | None = None
        if connection is None or self._closed:
            if connection is not None:
                _abort(connection)
                error = _closed(attempt)
            assert error is not None
            dial.end_ns = now_ns
            if self._on_connect is not None:
                self._on_connect(attempt, dial, None, error)
            if error.full:
                self.state.refused(now_ns, getattr(error, "retry_after_s", None), random.random())  # noqa: S311
            counted = list(dial.counted)
            self.state.failed(dial, error, now_ns)
            if not self.state.waiters and self._looker is not None:  # nobody is left to look at
                self._looker.cancel()
                self._looker = None
            elif self.state.full_until_ns:  # also where it failed in another way: the next one has its try
                self._look_by(min((waiter.until_ns for waiter in counted if waiter.error is None), default=_NEVER_NS))
            self._say_if_empty()
            return error
        was_full = self.state.full_until_ns > 0
        member, left_over = self.state.dialled(dial, connection, now_ns)
        if self._on_connect is not None:
            self._on_connect(attempt, dial, member, None)
        if not member.uses:  # another one would be no better, and the one after that
            for waiter in left_over:
                useless = "a connection was made that takes no call"
                self.state.refuse(waiter, ConnectionFailed(useless, endpoint=attempt.endpoint.address))
            left_over = []
        if was_full and not self.state.full_until_ns:
            self._dial_on()
        for waiter in left_over:
            if self.state.wants_dial(waiter, may_wait=False):
                self._start_dial(attempt, waiter, dial.context)
        if self.state.full_until_ns or self._looker is not None:
            self._look_soon()
        self._close_dropped()
        self._arm_evictor()
        return None

    def _dial_on(self) -> None:
        """There was room again: perhaps for one more. One at a time, so that a full server is not run down."""
        if any(waiter.dial is None for waiter in self.state.waiters):
            self.state.full_until_ns = time.perf_counter_ns()  # not before that is known
            self._look_soon()

    def _released(self, member: Member, finishing_since_ns: int) -> None:
        was_full = self.state.full_until_ns > 0
        self.state.release(member, time.perf_counter_ns(), self._limits, finishing_since_ns=finishing_since_ns)
        if was_full and not self.state.full_until_ns:
            self._dial_on()
        if self._looker is not None and not self.state.waiters:
            self._look_soon()  # for nobody: the timer goes
        if self.state.dropped:
            self._close_dropped()
        elif self._evictor is None:
            self._arm_evictor()

    def _close_dropped(self) -> None:
        dropped, self.state.dropped = self.state.dropped, []
        for member in dropped:
            _abort(member.connection)

    def _arm_evictor(self) -> None:
        idle_s = self._limits.max_idle_s
        if self._evictor is None and idle_s is not None and math.isfinite(idle_s) and not self._closed:
            self._evictor = self.loop.call_later(idle_s, self._evict)

    def _evict(self) -> None:
        self._evictor = None
        next_ns = self.state.evict(time.perf_counter_ns(), self._limits)
        self._close_dropped()
        if next_ns is not None and not self._closed:
            self._evictor = self.loop.call_later(max(0.05, next_ns / 1e9), self._evict)
        self._say_if_empty()

    def _say_if_empty(self) -> None:
        """Nothing is here and nobody waits: whoever keeps this pool need not."""
        state = self.state
        if self._on_empty is not None and not self._closed and not (state.members or state.dials or state.waiters):
            self._on_empty()

    def _stop_timers(self) -> None:
        for timer in (self._evictor, self._looker):
            if timer is not None:
                timer.cancel()
        self._evictor = self._looker = None

    async def aclose(self) -> None:
        """Close every connection, each within a second; fail those who wait."""
        self._closed = True
        self._stop_timers()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        try:
            if tasks:
                await asyncio.wait(tasks)
        except BaseException:  # this closing is cancelled itself: at once, then
            self.abort()
            raise
        for waiter in list(self.state.waiters):  # for the end of a message, not for a dial
            self.state.refuse(waiter, ConnectionFailed("the manager was closed", retryable=False))
        members, self.state.members = list(self.state.members), set()
        await asyncio.gather(*(self._close_one(member) for member in members))

    async def _close_one(self, member: Member) -> None:
        try:
            async with asyncio.timeout(CLOSE_LIMIT_S):
                await member.connection.aclose()
        except BaseException as error:
            _abort(member.connection)
            if not isinstance(error, Exception):  # this closing is cancelled itself
                raise
            _log.debug("connection %s did not close in order", member.id, exc_info=True)

    def abort(self) -> None:
        """Close everything at once, on a loop that may be closed already."""
        self._closed = True
        self._stop_timers()
        with contextlib.suppress(RuntimeError):  # its loop is closed: nothing there will ever run again
            for task in list(self._tasks):
                task.cancel()
            for waiter in list(self.state.waiters):
                self.state.refuse(waiter, ConnectionFailed("the manager was closed", retryable=False))
        members, self.state.members = list(self.state.members), set()
        for member in members:
            _abort(member.connection)


def _usable(connection: Connection) -> bool:
    """A connection that cannot say is of no use."""
    try:
        return connection.usable()
    except Exception:  # noqa: BLE001 - a transport's bug must not stop the pool
        _log.warning("usable() of %s failed", type(connection).__qualname__, exc_info=True)
        return False


def _abort(connection: Connection) -> None:
    """Close it at once; the others have to be closed too."""
    try:
        connection.abort()
    except Exception:  # noqa: BLE001 - a transport's bug must not stop the pool
        _log.warning("abort() of %s failed", type(connection).__qualname__, exc_info=True)


def _checked(connection: Connection) -> Connection:
    """What a transport says is a connection. Raises Garbage."""
    if not isinstance(connection, Connection):
        raise Garbage(f"connect() gave {type(connection).__name__}, which is no Connection")
    if not isinstance(connection.capacity, int):
        raise Garbage(f"a connection's capacity is a number, not {type(connection.capacity).__name__}")
    return connection


def _patience_ns(limits: Limits, timeouts: Timeouts) -> int:
    """How long a call waits for a server that is full."""
    limit_s = limits.queue_timeout_s
    if limit_s is None:
        limit_s = timeouts.first_content_s
    return int((_NEVER_S if limit_s is None else min(limit_s, _NEVER_S)) * 1e9)


def _closed(attempt: Attempt) -> SpanwireError:
    return ConnectionFailed("the manager was closed", endpoint=attempt.endpoint.address, retryable=False)


def _copy(error: SpanwireError) -> SpanwireError:
    """An error of its own for each of several callers: it collects their traceback, reply and timeline."""
    twin = error.__class__.__new__(error.__class__, *error.args)
    twin.args = error.args
    twin.__dict__.update(error.__dict__)
    twin.__cause__ = error.__cause__
    return twin
