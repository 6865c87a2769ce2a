"""Connections of one origin: the decision as a state machine and by example, the shell with a fake transport."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from spanwire import pool as pool_module
from spanwire.endpoint import Limits
from spanwire.errors import CallTimeout, ConnectionFailed, SpanwireError
from spanwire.pool import FINISH_WAIT_NS, Dial, Lease, Member, Pool, PoolState, Waiter
from spanwire.timeline import Marks
from tests.core.fakes import FakeConnection, FakeTransport, fake_attempt, settle

S = 1_000_000_000
NONE = Limits(max_idle_s=None)


# --- the decision, as a state machine ----------------------------------------------------------------------------------


class InOrder(dict[Any, None]):
    """A set that is walked in order of arrival: hypothesis has to see the same run twice."""

    def add(self, item: object) -> None:
        self[item] = None

    def discard(self, item: object) -> None:
        self.pop(item, None)

    def remove(self, item: object) -> None:
        del self[item]


class PoolMachine(RuleBasedStateMachine):
    """The shell's part is played by the rules: callers, the 5 ms expiry, dials and their ends."""

    @initialize(
        expect=st.integers(1, 3), idle_s=st.none() | st.just(10), age_s=st.none() | st.just(40), busy=st.integers(0, 2)
    )
    def set_up(self, expect: int, idle_s: int | None, age_s: int | None, busy: int) -> None:
        self.state = PoolState()
        self.state.dials = cast(set[Dial], InOrder())
        self.state.members = cast(set[Member], InOrder())
        self.expect = expect
        self.limits = Limits(max_idle_s=idle_s, max_connection_age_s=age_s)
        self.now = S
        self.queue: list[Waiter] = []  # in order of arrival, not yet served, failed or cancelled
        self.expiries: list[Waiter] = []
        self.served: list[Waiter] = []  # served, and the caller has not noticed
        self.leases: list[tuple[Member, int]] = []  # with finishing_since_ns
        self.dropped: list[Member] = []
        for _ in range(busy):
            self.call()
        for dial in list(self.state.dials):
            self.succeed(dial, FakeConnection())
        self.callers_notice(finishing=True)

    # what the shell does

    def dial_for(self, waiter: Waiter | None) -> None:
        dial = self.state.dial(self.now, self.expect, waiter)
        dial.counted = InOrder(dict.fromkeys(dial.counted))

    def look(self) -> None:
        """Who was served or failed by the last step; the order has to be that of arrival."""
        served = [waiter for waiter in self.queue if waiter.member is not None]
        failed = [waiter for waiter in self.queue if waiter.error is not None]
        rest = [waiter for waiter in self.queue if waiter not in served and waiter not in failed]
        assert [waiter for waiter in self.queue if waiter not in failed][: len(served)] == served, "overtaken"
        for waiter in served:
            assert waiter.served in {"dialled", "rode", "freed"}
            assert (waiter.by is not None) == (waiter.served != "freed")
            if waiter.served == "rode":
                assert waiter.by is not None
                assert waiter.by.begin_ns < waiter.asked_ns
        self.served += served
        self.queue = rest
        for member in self.state.dropped:
            assert member not in self.dropped, "dropped twice"
            assert member not in self.state.members
            assert member.leases == 0
            assert member not in {leased for leased, _ in self.leases}
            self.dropped.append(member)
        self.state.dropped.clear()

    # what may happen

    @rule(count=st.integers(1, 3))
    def calls(self, count: int) -> None:
        for _ in range(count):
            self.call()

    def call(self) -> None:
        self.now += 1
        member = self.state.take(self.now, self.limits)
        if member is not None:
            assert not self.queue, "overtook those who wait"
            assert member.connection.usable()
            self.leases.append((member, 0))
        else:
            waiter = self.state.wait(self.now, self.limits)
            self.queue.append(waiter)
            if self.state.wants_dial(waiter, may_wait=True):
                self.dial_for(waiter)
            elif waiter.dial is None:
                self.expiries.append(waiter)
        self.look()

    @precondition(lambda self: self.expiries)
    @rule(data=st.data())
    def wait_for_a_finishing_one_expires(self, data: st.DataObject) -> None:
        waiter = data.draw(st.sampled_from(self.expiries))
        self.expiries.remove(waiter)
        if self.state.late(waiter) and self.state.wants_dial(waiter, may_wait=False):
            self.dial_for(waiter)
        self.look()

    @precondition(lambda self: not self.state.dials)
    @rule()
    def warm(self) -> None:
        self.dial_for(None)

    @precondition(lambda self: self.state.dials)
    @rule(data=st.data(), capacity=st.sampled_from([1, 1, 3]), ok=st.sampled_from([True, True, True, False]))
    def dial_succeeds(self, data: st.DataObject, capacity: int, ok: bool) -> None:
        self.now += 1
        self.succeed(data.draw(st.sampled_from(list(self.state.dials))), FakeConnection(capacity, ok=ok))

    def succeed(self, dial: Dial, connection: FakeConnection) -> None:
        member, left_over = self.state.dialled(dial, connection, self.now)
        for waiter in left_over:
            assert waiter in self.state.waiters
            assert waiter.dial is None
            if not member.uses:
                self.state.refuse(waiter, ConnectionFailed("takes no call"))
            elif self.state.wants_dial(waiter, may_wait=False):
                self.dial_for(waiter)
        self.look()

    @precondition(lambda self: self.state.dials)
    @rule(data=st.data())
    def dial_fails(self, data: st.DataObject) -> None:
        dial = data.draw(st.sampled_from(list(self.state.dials)))
        counted = [waiter for waiter in self.queue if waiter.dial is dial]
        error = ConnectionFailed("no")
        self.state.failed(dial, error, self.now)
        assert [waiter for waiter in self.queue if waiter.error is error] == counted, "failed callers of another dial"
        self.look()

    @precondition(lambda self: self.served)
    @rule(finishing=st.booleans())
    def callers_run(self, finishing: bool) -> None:
        self.callers_notice(finishing=finishing)

    def callers_notice(self, *, finishing: bool) -> None:
        while self.served:
            member = self.served.pop(0).member
            assert member is not None
            self.leases.append((member, self.now if finishing else 0))
            if finishing:
                self.state.finishing(member)

    @precondition(lambda self: self.served or self.queue)
    @rule(data=st.data())
    def caller_cancels(self, data: st.DataObject) -> None:
        waiter = data.draw(st.sampled_from(self.served + self.queue))
        (self.served if waiter in self.served else self.queue).remove(waiter)
        self.state.cancel(waiter, self.now)
        assert waiter not in self.state.waiters
        self.look()

    @precondition(lambda self: any(not since for _, since in self.leases))
    @rule(data=st.data())
    def terminal_event(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from([lease for lease in self.leases if not lease[1]]))
        self.leases.remove(lease)
        self.leases.append((lease[0], self.now))
        self.state.finishing(lease[0])

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), broken=st.sampled_from([False, False, True]))
    def exchange_ends(self, data: st.DataObject, broken: bool) -> None:
        self.now += 1
        lease = data.draw(st.sampled_from(self.leases))
        self.end(lease, broken=broken)

    def end(self, lease: tuple[Member, int], *, broken: bool) -> None:
        self.leases.remove(lease)
        member, since = lease
        if broken:
            assert isinstance(member.connection, FakeConnection)
            member.connection.ok = False
        self.state.release(member, self.now, self.limits, finishing_since_ns=since)
        self.look()

    @precondition(lambda self: self.state.members)
    @rule(data=st.data())
    def connection_becomes_unusable(self, data: st.DataObject) -> None:
        member = data.draw(st.sampled_from(list(self.state.members)))
        assert isinstance(member.connection, FakeConnection)
        member.connection.ok = False

    @rule(seconds=st.sampled_from([0, 1, 5, 20]))
    def time_passes_and_the_evictor_comes(self, seconds: int) -> None:
        self.now += seconds * S + 1
        next_ns = self.state.evict(self.now, self.limits)
        self.look()
        assert next_ns is None or next_ns >= 0
        for member in self.state.members:
            assert member.leases or member.connection.usable()
            if not member.leases and self.limits.max_idle_s is not None:
                assert next_ns is not None
                assert self.now + next_ns <= member.idle_since_ns + 10 * S

    # what always holds

    def live(self) -> bool:
        return hasattr(self, "state")

    @invariant()
    def leases_are_counted(self) -> None:
        if self.live():
            held = Counter(member for member, _ in self.leases)
            held += Counter(waiter.member for waiter in self.served if waiter.member)
            for member in set(self.state.members) | set(held):
                assert member.leases == held[member] >= 0
                assert member.leases <= member.connection.capacity
                assert member.finishing == sum(1 for leased, since in self.leases if leased is member and since)
            assert set(held) <= set(self.state.members), "in use, and not in the pool"

    @invariant()
    def every_waiter_has_a_supply(self) -> None:
        if self.live():
            assert list(self.state.waiters) == self.queue
            for waiter in self.queue:
                assert waiter.dial in self.state.dials or waiter in self.expiries, "nobody will ever serve it"

    @invariant()
    def nobody_waits_beside_a_free_connection(self) -> None:
        if self.live() and self.queue:
            for member in self.state.members:
                assert member.leases >= member.connection.capacity or not self.state._fit(member, self.now, self.limits)

    def teardown(self) -> None:
        """Whatever is still open ends, badly: everybody has to have got something, and nothing may be left."""
        if not self.live():
            return
        for _ in range(1000):
            if self.leases:
                self.end(self.leases[0], broken=True)
            elif self.served:
                waiter = self.served.pop()
                assert waiter.member is not None
                self.leases.append((waiter.member, 0))
            elif self.expiries:
                waiter = self.expiries.pop()
                if (
                    waiter in self.state.waiters
                    and waiter.dial is None
                    and self.state.wants_dial(waiter, may_wait=False)
                ):
                    self.dial_for(waiter)
            elif self.state.dials:
                self.now += 1
                self.succeed(next(iter(self.state.dials)), FakeConnection(1))
            else:
                break
        assert not self.queue, "a waiter was lost"
        self.now += 1000 * S
        for member in self.state.members:
            assert isinstance(member.connection, FakeConnection)
            member.connection.ok = False
        self.state.evict(self.now, self.limits)
        self.look()
        assert not self.state.members
        assert not self.state._free


TestPoolState = PoolMachine.TestCase
TestPoolState.settings = settings(max_examples=400, stateful_step_count=30, deadline=None)


# --- the decision, by example ------------------------------------------------------------------------------------------


def member(state: PoolState, connection: FakeConnection | None = None, at_ns: int = S) -> Member:
    dial = state.dial(at_ns, 1)
    return state.dialled(dial, connection or FakeConnection(), at_ns)[0]


def test_the_connection_used_last_is_used_again_so_that_others_age() -> None:
    state = PoolState()
    first, second = member(state), member(state)
    assert state.take(S, NONE) is second
    assert state.take(S, NONE) is first
    state.release(second, 2 * S, NONE)
    state.release(first, 3 * S, NONE)
    assert state.take(4 * S, NONE) is first
    assert (first.uses, second.uses) == (2, 1)
    assert second.idle_since_ns == 2 * S


def test_a_dead_connection_is_dropped_and_the_next_one_taken() -> None:
    state = PoolState()
    good, dead = member(state), member(state)
    assert isinstance(dead.connection, FakeConnection)
    dead.connection.ok = False
    assert state.take(S, NONE) is good
    assert state.dropped == [dead]
    assert state.members == {good}


def test_a_connection_idle_for_too_long_is_not_used_again() -> None:
    state = PoolState()
    limits = Limits(max_idle_s=10)
    old = member(state)
    assert state.take(11 * S, limits) is old  # exactly 10 s
    state.release(old, 12 * S, NONE)
    assert state.take(22 * S + 1, limits) is None
    assert state.dropped == [old]


def test_a_connection_that_is_too_old_is_not_used_again() -> None:
    state = PoolState()
    limits = Limits(max_idle_s=None, max_connection_age_s=10)
    old = member(state)
    assert state.take(11 * S, limits) is old
    state.release(old, 11 * S, NONE)
    assert state.take(11 * S + 1, limits) is None
    assert state.dropped == [old]


def test_a_busy_connection_is_not_idle() -> None:
    state = PoolState()
    limits = Limits(max_idle_s=10)
    busy = member(state, FakeConnection(2))
    assert state.take(S, limits) is busy
    assert state.evict(100 * S, limits) is None
    assert state.take(100 * S, limits) is busy


def test_evict_says_when_the_next_one_is_due() -> None:
    state = PoolState()
    limits = Limits(max_idle_s=10)
    first = member(state, at_ns=1 * S)
    second = member(state, at_ns=5 * S)
    assert state.evict(6 * S, limits) == 5 * S
    assert state.evict(11 * S + 1, limits) == 4 * S - 1
    assert state.dropped == [first]
    assert state.evict(16 * S, limits) is None
    assert state.dropped == [first, second]


def test_no_limit_on_idle_life_can_be_written_as_infinity() -> None:
    state = PoolState()
    member(state)
    state.evict(S, Limits(max_idle_s=float("inf")))
    assert not state.dropped


def test_callers_ride_on_a_dial_that_has_room() -> None:
    state = PoolState()
    waiters = [state.wait(S + number, NONE) for number in range(4)]
    assert state.wants_dial(waiters[0], may_wait=True)
    dial = state.dial(S + 1, 3, waiters[0])
    assert not state.wants_dial(waiters[1], may_wait=True)
    assert not state.wants_dial(waiters[2], may_wait=True)
    assert state.wants_dial(waiters[3], may_wait=True)
    state.dial(S + 3, 3, waiters[3])
    state.dialled(dial, FakeConnection(3), S + 9)
    assert [waiter.served for waiter in waiters] == ["dialled", "dialled", "rode", ""]
    assert all(waiter.by is dial for waiter in waiters[:3])


def test_a_freed_connection_serves_the_first_and_its_dial_is_left_to_the_next() -> None:
    state = PoolState()
    held = member(state)
    assert state.take(S, NONE) is held
    first = state.wait(2 * S, NONE)
    dial = state.dial(2 * S, 1, first)
    state.release(held, 3 * S, NONE)
    assert (first.member, first.served, first.by) == (held, "freed", None)
    second = state.wait(4 * S, NONE)
    assert not state.wants_dial(second, may_wait=True)
    assert second.dial is dial


def test_waiters_that_swapped_dials_fail_with_the_dial_they_have_now() -> None:
    state = PoolState()
    first, second = state.wait(1, NONE), state.wait(2, NONE)
    dial_1, dial_2 = state.dial(1, 1, first), state.dial(2, 1, second)
    state.dialled(dial_2, FakeConnection(), 5)
    assert first.by is dial_2
    assert second.dial is dial_1
    error = ConnectionFailed("no")
    state.failed(dial_1, error, 6)
    assert second.error is error
    assert (second.by, list(state.waiters)) == (dial_1, [])


def test_a_dial_that_brings_less_room_than_expected_gives_its_waiters_back() -> None:
    state = PoolState()
    waiters = [state.wait(number, NONE) for number in range(3)]
    dial = state.dial(1, 3, waiters[0])
    for waiter in waiters[1:]:
        assert not state.wants_dial(waiter, may_wait=True)
    _, left_over = state.dialled(dial, FakeConnection(1), 5)
    assert waiters[0].member is not None
    assert set(left_over) == set(waiters[1:])
    assert all(waiter.dial is None for waiter in left_over)


def test_a_dialled_connection_that_is_dead_already_does_not_stay() -> None:
    """Nothing else would ever drop it where ``max_idle_s`` is None."""
    state = PoolState()
    dead = member(state, FakeConnection(ok=False))
    assert state.take(S, NONE) is None
    assert dead not in state.members
    assert state.dropped == [dead]


def finishing_pool() -> tuple[PoolState, Member]:
    state = PoolState()
    busy = member(state)
    assert state.take(S, NONE) is busy
    state.finishing(busy)
    return state, busy


def test_a_caller_waits_for_a_connection_that_is_finishing() -> None:
    state, busy = finishing_pool()
    waiter = state.wait(S, NONE)
    assert not state.wants_dial(waiter, may_wait=True)
    assert waiter.dial is None
    assert state.wants_dial(waiter, may_wait=False)
    state.release(busy, S + 1, NONE, finishing_since_ns=S)
    assert (waiter.member, waiter.served) == (busy, "freed")


def test_one_finishing_connection_is_waited_for_by_one_caller() -> None:
    state, _ = finishing_pool()
    assert not state.wants_dial(state.wait(S, NONE), may_wait=True)
    assert state.wants_dial(state.wait(S, NONE), may_wait=True)


@pytest.mark.parametrize(("late", "in_time", "waits"), [(5, 4, False), (4, 4, True), (0, 0, True), (1, 0, False)])
def test_nobody_waits_where_messages_usually_end_late(late: int, in_time: int, waits: bool) -> None:
    state, busy = finishing_pool()
    state.release(busy, S, NONE, finishing_since_ns=S)
    state._in_time.clear()
    now = 10 * S
    for took_ns in [FINISH_WAIT_NS] * in_time + [FINISH_WAIT_NS + 1] * late:
        assert state.take(now, NONE) is busy
        state.finishing(busy)
        state.release(busy, now + took_ns, NONE, finishing_since_ns=now)
        now += S
    assert state.take(now, NONE) is busy
    state.finishing(busy)
    waits_now = not state.wants_dial(state.wait(now, NONE), may_wait=True)
    # of the last eight messages at least half
    assert waits_now is waits


def test_a_dial_that_overtakes_the_wait_for_a_finishing_connection_loses_nobody() -> None:
    """first waits for the finishing one, second dials; the dial serves first, so second needs a supply of its own."""
    state, busy = finishing_pool()
    first = state.wait(S, NONE)
    assert not state.wants_dial(first, may_wait=True)
    second = state.wait(S + 1, NONE)
    assert state.wants_dial(second, may_wait=True)
    dial = state.dial(S + 1, 1, second)
    _, left_over = state.dialled(dial, FakeConnection(), S + 2)
    assert first.member is not None
    assert isinstance(busy.connection, FakeConnection)
    busy.connection.ok = False
    state.release(busy, S + 3, NONE, finishing_since_ns=S)  # the finishing one breaks
    assert second in left_over or second.dial in state.dials, "second waits for ever"


def test_capacity_that_shrank_is_seen_by_the_next_decision() -> None:
    """An HTTP/2 server lowers its SETTINGS_MAX_CONCURRENT_STREAMS."""
    state = PoolState()
    wide = member(state, FakeConnection(3))
    assert state.take(S, NONE) is wide
    assert isinstance(wide.connection, FakeConnection)
    wide.connection.capacity = 1
    assert state.take(S, NONE) is None
    state.release(wide, S, NONE)
    assert state.take(S, NONE) is wide


def test_capacity_that_grew_is_seen_by_the_next_decision() -> None:
    """The SETTINGS of an HTTP/2 server arrive after the first request."""
    state = PoolState(multiplexed=True)
    narrow = member(state, FakeConnection(1))
    assert state.take(S, NONE) is narrow
    assert isinstance(narrow.connection, FakeConnection)
    narrow.connection.capacity = 3
    assert state.take(S, NONE) is narrow


def test_cancelling_a_served_waiter_gives_its_connection_to_the_next() -> None:
    state = PoolState()
    held = member(state)
    assert state.take(S, NONE) is held
    first, second = state.wait(1, NONE), state.wait(2, NONE)
    for waiter in (first, second):
        state.dial(3, 1, waiter)
    state.release(held, S, NONE)
    assert first.member is held
    state.cancel(first, S)
    assert second.member is held
    assert held.leases == 1
    assert held.uses == 2  # the one before and second's


def test_cancelling_twice_or_after_a_failure_changes_nothing() -> None:
    state = PoolState()
    waiter = state.wait(1, NONE)
    dial = state.dial(1, 1, waiter)
    state.failed(dial, ConnectionFailed("no"), 2)
    state.cancel(waiter, 3)
    other = state.wait(4, NONE)
    state.cancel(other, 5)
    state.cancel(other, 6)
    assert not state.waiters


def test_a_connection_that_left_the_pool_may_still_be_released() -> None:
    state = PoolState()
    held = member(state)
    assert state.take(S, NONE) is held
    state.members.clear()  # the pool was closed
    state.release(held, S, NONE)
    assert held.leases == 0
    assert state.take(S, NONE) is None
    assert not state.dropped


def test_a_member_has_an_id_of_its_own_and_the_times_of_its_connect() -> None:
    marks = Marks()
    first, second = (Member(FakeConnection(), marks, (1, 5)) for _ in range(2))
    assert first.id != second.id
    assert (first.made_ns, first.idle_since_ns, first.connect_ns, first.marks) == (5, 5, (1, 5), marks)


# --- the shell ---------------------------------------------------------------------------------------------------------


class Shell:
    """A pool over a fake transport, and the callers' side of it."""

    def __init__(self, expect: int = 1, **options: Any) -> None:
        self.transport = FakeTransport(expect)
        self.pool = Pool(self.transport, asyncio.get_running_loop(), **options)

    def call(self, **options: Any) -> asyncio.Task[Lease]:
        async def lease() -> Lease:
            found = self.pool.try_lease(Limits(max_idle_s=None), time.perf_counter_ns())
            if found is not None:
                return found
            return await self.pool.lease(fake_attempt(**options), lambda waiter: None)

        return asyncio.create_task(lease())

    async def connected(self, capacity: int = 1) -> tuple[FakeConnection, Lease]:
        """A connection that a first call has."""
        task = self.call()
        await settle()
        connection = self.transport.gates[-1].open(capacity)
        return connection, await task


def run(main: Callable[[], Any]) -> None:
    """A caller that is never served is a failure, and should not take the runner's whole patience."""
    asyncio.run(asyncio.wait_for(main(), 5))


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a message is waited for, however long it takes."""
    monkeypatch.setattr(pool_module, "FINISH_WAIT_NS", 3600 * S)


def test_dialled_then_idle() -> None:
    async def main() -> None:
        shell = Shell()
        connection, lease = await shell.connected()
        assert (lease.served, lease.member.connection) == ("dialled", connection)
        assert lease.by is not None
        assert lease.by.end_ns >= lease.by.begin_ns > 0
        lease.release()
        again = await shell.call()
        assert (again.served, again.member, again.by) == ("idle", lease.member, None)
        assert again.was_idle_ns > 0
        assert again.member.uses == 2
        assert len(shell.transport.gates) == 1
        again.release()
        await shell.pool.aclose()
        assert connection.closed

    run(main)


def test_rode_on_a_dial_that_was_under_way() -> None:
    async def main() -> None:
        shell = Shell(expect=2)
        first = shell.call()
        await settle()
        second = shell.call()
        await settle()
        assert len(shell.transport.gates) == 1
        shell.transport.gates[0].open(capacity=2)
        assert ((await first).served, (await second).served) == ("dialled", "rode")
        assert (await first).member is (await second).member
        assert (await second).by is (await first).by

    run(main)


def test_a_dial_serves_only_as_many_as_it_has_room_for_and_the_others_get_another_dial() -> None:
    async def main() -> None:
        shell = Shell(expect=3)
        calls = [shell.call() for _ in range(3)]
        await settle()
        shell.transport.gates[0].open(capacity=1)
        await settle()
        assert [task.done() for task in calls] == [True, False, False]
        assert len(shell.transport.gates) == 2
        shell.transport.gates[1].open(capacity=3)
        await asyncio.gather(*calls)

    run(main)


def test_freed_before_the_dial_is_done() -> None:
    async def main() -> None:
        shell = Shell()
        connection, lease = await shell.connected()
        second = shell.call()
        await settle()
        assert len(shell.transport.gates) == 2
        lease.release()
        freed = await second
        assert (freed.served, freed.by, freed.member.connection) == ("freed", None, connection)
        spare = shell.transport.gates[1].open()  # the dial goes on, for the next call
        await settle()
        third = await shell.call()
        assert (third.served, third.member.connection) == ("idle", spare)

    run(main)


def test_waiters_are_served_first_come_first_served_whoever_dialled() -> None:
    async def main() -> None:
        shell = Shell()
        calls = [shell.call() for _ in range(3)]
        await settle()
        assert len(shell.transport.gates) == 3
        shell.transport.gates[2].open()
        await settle()
        assert [task.done() for task in calls] == [True, False, False]
        shell.transport.gates[1].fail(ConnectionFailed("no"))
        await settle()
        done = [task.done() for task in calls]
        assert done.count(True) == 2
        shell.transport.gates[0].open()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(result).__name__ for result in results].count("ConnectionFailed") == 1
        assert [type(result).__name__ for result in results].count("Lease") == 2

    run(main)


def test_a_failed_dial_fails_only_the_callers_counted_on_it() -> None:
    async def main() -> None:
        shell = Shell(expect=2)
        calls = [shell.call() for _ in range(3)]
        await settle()
        assert len(shell.transport.gates) == 2
        cause = OSError("refused")
        error = ConnectionFailed("no", endpoint="h:1", phase="tcp")
        error.__cause__ = cause
        shell.transport.gates[0].fail(error)
        await settle()
        assert [task.done() for task in calls] == [True, True, False]
        failures = [task.exception() for task in calls[:2]]
        for failure in failures:
            assert isinstance(failure, ConnectionFailed)
            assert (failure.phase, failure.endpoint, failure.message) == ("tcp", "h:1", "no")
            assert failure.__cause__ is cause
        assert failures[0] is not failures[1], "each caller needs an error of its own: it collects traceback and reply"
        shell.transport.gates[1].open()
        assert (await calls[2]).served == "dialled"

    run(main)


def test_a_connection_that_is_dead_on_arrival_fails_its_caller_instead_of_dialling_for_ever() -> None:
    async def main() -> None:
        shell = Shell()
        task = shell.call()
        await settle()
        connection = FakeConnection(ok=False)
        shell.transport.gates[0].answer.set_result(connection)
        with pytest.raises(ConnectionFailed):
            await task
        await settle()
        assert len(shell.transport.gates) == 1
        assert connection.aborted
        assert not shell.pool.state.members

    run(main)


def test_what_a_transport_should_not_raise_becomes_an_error_of_ours() -> None:
    async def main() -> None:
        shell = Shell()
        task = shell.call()
        await settle()
        cause = ZeroDivisionError("a plugin's bug")
        shell.transport.gates[0].fail(cause)
        with pytest.raises(ConnectionFailed, match="ZeroDivisionError") as caught:
            await task
        assert caught.value.__cause__ is cause
        assert not caught.value.retryable
        assert not shell.pool.state.waiters
        assert not shell.pool.state.dials

    run(main)


def test_a_connect_that_takes_too_long_names_the_part_where_it_stood() -> None:
    class Stuck(FakeTransport):
        async def connect(self, endpoint: Any, attempt: Any) -> FakeConnection:
            attempt.marks.begin("tcp", 1)
            attempt.marks.end("tcp", 2)
            attempt.marks.begin("tls", 3)
            return await super().connect(endpoint, attempt)

    async def main() -> None:
        shell = Shell()
        shell.pool.transport = Stuck()
        task = shell.call(connect_s=0.001)
        with pytest.raises(CallTimeout, match=r"0\.001 s \(Timeouts\.connect_s\).*tls") as caught:
            await task
        assert (caught.value.limit, caught.value.phase, caught.value.endpoint) == ("connect_s", "tls", "host:1")

    run(main)


def test_a_connect_that_takes_too_long_in_no_part() -> None:
    async def main() -> None:
        shell = Shell()
        with pytest.raises(CallTimeout) as caught:
            await shell.call(connect_s=0.001)
        assert caught.value.phase == "connect"

    run(main)


def test_the_systems_own_timeout_is_not_our_limit() -> None:
    """ETIMEDOUT is a TimeoutError too; there was no ``connect_s``."""

    async def main() -> None:
        shell = Shell()
        task = shell.call(connect_s=None)
        await settle()
        shell.transport.gates[0].fail(TimeoutError(110, "Connection timed out"))
        with pytest.raises(SpanwireError) as caught:
            await task
        assert isinstance(caught.value, ConnectionFailed), caught.value

    run(main)


def test_a_caller_cancelled_while_dialling_leaves_the_connection_to_the_next() -> None:
    async def main() -> None:
        shell = Shell()
        first = shell.call()
        await settle()
        first.cancel()
        await settle()
        assert first.cancelled()
        second = shell.call()
        await settle()
        assert len(shell.transport.gates) == 1
        shell.transport.gates[0].open()
        assert (await second).served == "rode"

    run(main)


def test_a_caller_cancelled_as_it_is_served_leaves_the_connection_to_the_next() -> None:
    async def main() -> None:
        shell = Shell()
        connection, lease = await shell.connected()
        first, second = shell.call(), shell.call()
        await settle()
        lease.release()  # first has it, and has not run
        first.cancel()
        await settle()
        assert first.cancelled()
        assert (await second).member.connection is connection
        (await second).release()
        assert (await shell.call()).member.connection is connection

    run(main)


def test_a_dial_outlives_its_caller_and_knows_nothing_of_its_context() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")
    seen: list[str] = []

    class Curious(FakeTransport):
        async def connect(self, endpoint: Any, attempt: Any) -> FakeConnection:
            seen.append(variable.get())
            return await super().connect(endpoint, attempt)

    async def main() -> None:
        shell = Shell()
        shell.pool.transport = shell.transport = Curious()
        variable.set("the caller's")
        task = shell.call(headers={"x-a": "b"})
        await settle()
        assert seen == ["unset"]
        own = shell.transport.gates[0].attempt
        assert own.headers == {}, "others will use the connection too"
        assert own.timeouts.connect_s is None
        shell.transport.gates[0].open()
        lease = await task
        assert lease.by is not None
        assert lease.by.marks is own.marks is lease.member.marks

    run(main)


def test_on_wait_gets_the_waiter_at_once_and_on_connect_every_dials_end() -> None:
    async def main() -> None:
        ends: list[tuple[Dial, Member | None, SpanwireError | None]] = []
        shell = Shell(on_connect=lambda attempt, dial, member, error: ends.append((dial, member, error)))
        waiters: list[Waiter] = []
        context = object()
        task = asyncio.create_task(shell.pool.lease(fake_attempt(), waiters.append, context))
        await settle()
        assert len(waiters) == 1
        assert waiters[0].dial is not None
        assert waiters[0].dial.context is context
        shell.transport.gates[0].open()
        lease = await task
        assert ends == [(waiters[0].by, lease.member, None)]
        second = shell.call()
        await settle()
        shell.transport.gates[1].fail(ConnectionFailed("no"))
        await asyncio.wait([second])
        assert isinstance(second.exception(), ConnectionFailed)
        assert ends[1][1] is None
        assert isinstance(ends[1][2], ConnectionFailed)

    run(main)


# finishing


@pytest.mark.usefixtures("patient")
def test_the_next_call_waits_for_the_end_of_the_message() -> None:
    async def main() -> None:
        shell = Shell()
        connection, lease = await shell.connected()
        lease.finish(lambda: None)
        second = shell.call()
        await settle()
        assert len(shell.transport.gates) == 1
        lease.release()
        assert ((await second).served, (await second).member.connection) == ("freed", connection)

    run(main)


def test_a_message_that_does_not_end_in_time_costs_a_dial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "FINISH_WAIT_NS", 0)

    async def main() -> None:
        shell = Shell()
        _, lease = await shell.connected()
        lease.finish(lambda: None)
        second = shell.call()
        await shell.transport.dialled(2)
        assert not second.done()
        shell.transport.gates[1].open()
        assert (await second).served == "dialled"

    run(main)


@pytest.mark.usefixtures("patient")
def test_a_caller_cancelled_while_it_waits_for_the_end_of_a_message() -> None:
    async def main() -> None:
        shell = Shell()
        _, lease = await shell.connected()
        lease.finish(lambda: None)
        second = shell.call()
        await settle()
        second.cancel()
        await settle()
        assert not shell.pool.state.waiters
        lease.release()
        assert (await shell.call()).served == "idle"

    run(main)


def test_an_overdue_end_aborts_the_exchange_and_never_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "FINISH_LIMIT_S", 0)

    async def main() -> None:
        shell = Shell()
        connection, lease = await shell.connected()
        aborted = asyncio.get_running_loop().create_future()
        lease.finish(lambda: aborted.set_result(None))
        await aborted
        assert not connection.aborted
        assert lease.member.leases == 1  # until the exchange says that it has left
        lease.release()
        assert lease.member.leases == 0

    run(main)


def test_a_message_that_ends_in_time_is_not_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "FINISH_LIMIT_S", 0)

    async def main() -> None:
        shell = Shell()
        _, lease = await shell.connected()
        aborted: list[None] = []
        lease.finish(lambda: aborted.append(None))
        lease.release()
        await settle()
        assert not aborted
        assert lease.member.finishing == 0

    run(main)


def test_finish_after_release_is_nothing_and_releasing_twice_is_once() -> None:
    async def main() -> None:
        shell = Shell()
        _, lease = await shell.connected(capacity=2)
        other = await shell.call()
        assert other.member is lease.member
        lease.release()
        lease.release()
        lease.finish(lambda: None)
        assert (lease.member.leases, lease.member.finishing) == (1, 0)

    run(main)


# age, idle life


def test_a_broken_connection_is_closed_when_it_comes_back() -> None:
    async def main() -> None:
        shell = Shell()
        connection, lease = await shell.connected()
        connection.ok = False
        lease.release()
        assert connection.aborted
        assert not shell.pool.state.members

    run(main)


def test_idle_connections_are_closed_without_another_call() -> None:
    async def main() -> None:
        shell = Shell()
        task = shell.call(limits=Limits(max_idle_s=0.001))
        await settle()
        connection = shell.transport.gates[0].open()
        connection.on_abort = asyncio.get_running_loop().create_future()
        (await task).release()
        await connection.on_abort
        assert not shell.pool.state.members
        await shell.pool.aclose()

    run(main)


def test_a_connection_that_is_too_old_is_not_handed_to_a_waiter_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under load somebody always waits; the limit on age has to hold there as well."""

    class Clock:
        now_ns = S

        def perf_counter_ns(self) -> int:
            return self.now_ns

    clock = Clock()
    monkeypatch.setattr(pool_module, "time", clock)

    async def main() -> None:
        shell = Shell()
        limits = Limits(max_idle_s=None, max_connection_age_s=10)
        first = shell.call(limits=limits)
        await settle()
        old = shell.transport.gates[0].open()
        lease = await first
        second = shell.call(limits=limits)
        await settle()
        clock.now_ns += 60 * S
        lease.release()
        await settle()
        assert old.aborted
        shell.transport.gates[1].open()
        assert (await second).member.connection is not old

    run(main)


# warm


def test_warm_makes_room_for_n_and_waits_for_it() -> None:
    async def main() -> None:
        shell = Shell(expect=2)
        task = asyncio.create_task(shell.pool.warm(fake_attempt(), 3))
        await settle()
        assert len(shell.transport.gates) == 2
        assert shell.transport.gates[0].attempt.endpoint.address == "host:1"
        shell.transport.gates[0].open(capacity=2)
        await settle()
        assert not task.done()
        shell.transport.gates[1].open(capacity=2)
        await task
        await shell.pool.warm(fake_attempt(), 4)  # nothing to do
        assert len(shell.transport.gates) == 2
        assert (await shell.call()).served == "idle"

    run(main)


def test_warm_raises_what_went_wrong() -> None:
    async def main() -> None:
        shell = Shell()
        task = asyncio.create_task(shell.pool.warm(fake_attempt(), 2))
        await settle()
        shell.transport.gates[0].open()
        shell.transport.gates[1].fail(ConnectionFailed("no", phase="dns"))
        with pytest.raises(ConnectionFailed, match="no") as caught:
            await task
        assert caught.value.phase == "dns"
        assert len(shell.pool.state.members) == 1

    run(main)


def test_warm_counts_dials_under_way_and_replaces_dead_connections() -> None:
    async def main() -> None:
        shell = Shell()
        connection, lease = await shell.connected()
        lease.release()
        connection.ok = False
        first = asyncio.create_task(shell.pool.warm(fake_attempt(), 1))
        await settle()
        assert connection.aborted
        second = asyncio.create_task(shell.pool.warm(fake_attempt(), 1))
        await settle()
        assert len(shell.transport.gates) == 2
        shell.transport.gates[1].open()
        await asyncio.gather(first, second)

    run(main)


def test_warm_does_not_report_room_that_is_not_there() -> None:
    """It counted on a dial under way, and that one failed."""

    async def main() -> None:
        shell = Shell()
        first = asyncio.create_task(shell.pool.warm(fake_attempt(), 1))
        await settle()
        second = asyncio.create_task(shell.pool.warm(fake_attempt(), 1))
        await settle()
        shell.transport.gates[0].fail(ConnectionFailed("no"))
        await settle()
        for gate in shell.transport.gates[1:]:  # dialling again would be fine too
            gate.open()
        await asyncio.wait([first, second])
        assert isinstance(first.exception(), ConnectionFailed)
        assert second.exception() is not None or shell.pool.state.members

    run(main)


# closing


def test_aclose_while_dialling_fails_those_who_wait() -> None:
    async def main() -> None:
        shell = Shell()
        task = shell.call()
        await settle()
        await shell.pool.aclose()
        await settle()
        assert task.done()
        error = task.exception()
        assert isinstance(error, ConnectionFailed)
        assert "closed" in str(error)
        assert not error.retryable
        assert shell.transport.gates[0].answer.cancelled()

    run(main)


def test_aclose_before_a_dial_has_taken_its_first_step_fails_its_caller_too() -> None:
    """A task that is cancelled before its first step runs none of its handlers."""

    async def main() -> None:
        shell = Shell()
        task = shell.call()
        await asyncio.sleep(0)  # the caller waits, its dial's task is made and has not run
        assert shell.pool.state.dials
        assert not shell.transport.gates
        await shell.pool.aclose()
        await settle()
        assert task.done(), "the caller waits for ever"
        assert isinstance(task.exception(), ConnectionFailed)
        assert not shell.pool.state.dials

    run(main)


@pytest.mark.usefixtures("patient")
def test_aclose_fails_those_who_wait_for_the_end_of_a_message() -> None:
    async def main() -> None:
        shell = Shell()
        _, lease = await shell.connected()
        lease.finish(lambda: None)
        task = shell.call()
        await settle()
        await shell.pool.aclose()
        await settle()
        assert task.done(), "the caller waits for ever"
        assert isinstance(task.exception(), ConnectionFailed)
        lease.release()

    run(main)


def test_no_dial_begins_after_aclose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "FINISH_WAIT_NS", 1_000_000)

    async def main() -> None:
        shell = Shell()
        _, lease = await shell.connected()
        lease.finish(lambda: None)
        task = shell.call()
        await settle()
        await shell.pool.aclose()
        await asyncio.wait([task])
        assert isinstance(task.exception(), ConnectionFailed)
        assert len(shell.transport.gates) == 1
        lease.release()

    run(main)


def test_a_closed_pool_takes_no_more_calls_and_leases_may_come_back() -> None:
    async def main() -> None:
        shell = Shell()
        connection, lease = await shell.connected()
        await shell.pool.aclose()
        assert connection.closed
        lease.release()
        with pytest.raises(ConnectionFailed, match="closed"):
            await shell.call()
        with pytest.raises(ConnectionFailed, match="closed"):
            await shell.pool.warm(fake_attempt(), 1)
        assert len(shell.transport.gates) == 1
        await shell.pool.aclose()

    run(main)


def test_a_connection_that_does_not_close_in_order_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "CLOSE_LIMIT_S", 0.001)

    async def main() -> None:
        shell = Shell()
        stuck, lease = await shell.connected()
        stuck.close_gate = asyncio.get_running_loop().create_future()
        lease.release()
        await shell.pool.aclose()
        assert stuck.aborted

    run(main)


def test_abort_closes_at_once_also_on_a_closed_loop() -> None:
    kept: list[Any] = []

    async def main() -> None:
        shell = Shell()
        kept.extend([shell, *(await shell.connected())])

    run(main)
    shell, connection, lease = kept
    shell.pool.abort()
    assert connection.aborted
    lease.release()


def test_abort_ends_dials_under_way() -> None:
    async def main() -> None:
        shell = Shell()
        task = shell.call()
        await settle()
        shell.pool.abort()
        await asyncio.wait([task])
        assert isinstance(task.exception(), ConnectionFailed)
        assert shell.transport.gates[0].answer.cancelled()
        assert not shell.pool.state.members

    run(main)


def test_repr_counts() -> None:
    async def main() -> None:
        shell = Shell()
        _, lease = await shell.connected()
        task = shell.call()
        await settle()
        assert repr(shell.pool) == "Pool(1 connections, 1 busy, 1 dialling, 1 waiting)"
        lease.release()
        await task
        await shell.pool.aclose()

    run(main)
