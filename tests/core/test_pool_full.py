"""A server that takes no further client: who waits, who asks again and when. By example, and the whole shell as a state
machine on a loop whose clock the test moves."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import random
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from spanwire.endpoint import Limits, Timeouts
from spanwire.errors import ConnectionFailed, Overloaded, QueueTimeout, RateLimited, SpanwireError
from spanwire.pool import FULL_WAIT_LIMIT_S, FULL_WAIT_S, Dial, Lease, Member, Pool, PoolState, Waiter
from tests.core.fakes import FakeConnection, FakeTransport, fake_attempt, settle

pool_module: Any = importlib.import_module("spanwire.pool")

S = 1_000_000_000
MS = 1_000_000
PATIENT = Limits(max_idle_s=None, queue_timeout_s=60)
#: A timer's time is a float of seconds: it may differ from the ns it was made of by so much.
ROUNDING_NS = 1_000


def full(retry_after_s: float | None = None) -> SpanwireError:
    error = Overloaded("no room", status=503, retry_after_s=retry_after_s)
    error.full = True
    return error


def limits(queue_timeout_s: float | None = 60) -> Limits:
    return Limits(max_idle_s=None, queue_timeout_s=queue_timeout_s)


class Clock:
    """Stands in for ``time`` in the pool. Far from 0, which means "never" there."""

    def __init__(self) -> None:
        self.now_ns = 1000 * S

    def perf_counter_ns(self) -> int:
        return self.now_ns


class Dice:
    """Stands in for ``random`` in the pool."""

    def __init__(self, *, value: float | None = None) -> None:
        self.value = value
        self._random = random.Random(0)

    def random(self) -> float:
        return self._random.random() if self.value is None else self.value


class ClockLoop(asyncio.SelectorEventLoop):
    """An event loop whose time only the test moves."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def time(self) -> float:
        return self.clock.now_ns / 1e9

    def timers(self) -> list[asyncio.TimerHandle]:
        scheduled: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
        return [timer for timer in scheduled if not timer.cancelled()]


class WatchedState(PoolState):
    """Says so when somebody dials who should not."""

    def __init__(self) -> None:
        super().__init__()
        self.tries: list[Dial] = []
        self.warming = False

    def dial(self, now_ns: int, expect: int, waiter: Waiter | None = None) -> Dial:
        if self.full_until_ns and not self.warming and not (waiter is not None and waiter.fresh):
            assert now_ns >= self.full_until_ns, "dialled before the server's time had come"
            assert not [dial for dial in self.tries if dial in self.dials], "two tries at once"
            made = super().dial(now_ns, expect, waiter)
            self.tries.append(made)
            return made
        return super().dial(now_ns, expect, waiter)


class Caller:
    """One call's side of the pool, as the manager plays it: an idle connection, else it waits."""

    def __init__(self, shell: Shell, queue_timeout_s: float | None, asked_ns: int) -> None:
        self.shell = shell
        self.limits = limits(queue_timeout_s)
        self.asked_ns = asked_ns
        self.waiter: Waiter | None = None
        self.lease: Lease | None = None
        self.task = shell.loop.create_task(self._ask())
        self.task.add_done_callback(
            lambda task: task.cancelled() or task.exception()
        )  # looked at: asyncio need not warn

    async def _ask(self) -> Lease:
        attempt = fake_attempt(limits=self.limits)
        attempt.asked_ns = self.asked_ns
        self.lease = self.shell.pool.try_lease(self.limits, self.shell.clock.now_ns)
        if self.lease is None:
            self.lease = await self.shell.pool.lease(attempt, self._waits)
        return self.lease

    def _waits(self, waiter: Waiter) -> None:
        self.waiter = waiter

    @property
    def waits(self) -> bool:
        waiter = self.waiter
        return waiter is not None and waiter.member is None and waiter.error is None and not self.task.done()

    @property
    def error(self) -> BaseException | None:
        return self.task.exception() if self.task.done() and not self.task.cancelled() else None


class Shell:
    """A pool over a fake transport, on a loop whose time stands still."""

    def __init__(self, expect: int = 1, *, dice: float | None = None, **options: Any) -> None:
        self.clock = Clock()
        self.loop = ClockLoop(self.clock)
        self.transport: FakeTransport
        self._modules = pool_module.time, pool_module.random
        pool_module.time = self.clock
        pool_module.random = Dice(value=dice)

        async def make() -> None:
            self.transport = FakeTransport(expect)
            self.pool = Pool(self.transport, self.loop, **options)

        self.run(make())
        self.state = self.pool.state = WatchedState()

    def run(self, what: Any) -> Any:
        return self.loop.run_until_complete(what)

    def settle(self) -> None:
        self.run(settle())

    def after(self, seconds: float) -> None:
        """Time passes; the timers that are due run."""
        self.clock.now_ns += int(seconds * S) + ROUNDING_NS
        self.settle()

    def call(self, queue_timeout_s: float | None = 60, asked_ns: int | None = None) -> Caller:
        self.clock.now_ns += 1
        caller = Caller(self, queue_timeout_s, self.clock.now_ns if asked_ns is None else asked_ns)
        self.settle()
        return caller

    def open(self, number: int = -1, capacity: int = 1) -> FakeConnection:
        self.clock.now_ns += 1
        connection = self.transport.gates[number].open(capacity)
        self.settle()
        return connection

    def refuse(self, number: int = -1, retry_after_s: float | None = None, error: SpanwireError | None = None) -> None:
        self.clock.now_ns += 1
        self.transport.gates[number].fail(error or full(retry_after_s))
        self.settle()

    def held(self, count: int = 1) -> list[Lease]:
        """So many connections, each in use."""
        found = []
        for _ in range(count):
            caller = self.call()
            self.open()
            assert caller.lease is not None
            found.append(caller.lease)
        return found

    def close(self) -> None:
        """And whatever is left behind is a leak."""
        try:
            self.run(self.pool.aclose())
            self.settle()
            assert self.loop.timers() == []
            assert not asyncio.all_tasks(self.loop)
        finally:
            pool_module.time, pool_module.random = self._modules
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.settle()
            self.loop.close()

    @property
    def dials(self) -> int:
        return len(self.transport.gates)


@contextlib.contextmanager
def shell(**options: Any) -> Iterator[Shell]:
    made = Shell(**options)
    try:
        yield made
    finally:
        made.close()


# --- the whole shell as a state machine --------------------------------------------------------------------------------


class FullServerMachine(RuleBasedStateMachine):
    """Any order of refusals, ends, failures, callers and time: nobody is lost, overtaken or forgotten."""

    @initialize(expect=st.sampled_from([1, 1, 3]), held=st.integers(0, 2))
    def set_up(self, expect: int, held: int) -> None:
        self.shell = Shell(expect)
        self.callers: list[Caller] = []
        self.leases: list[tuple[Lease, Caller]] = []
        for _ in range(held):
            self.callers.append(self.shell.call())
            self.shell.open()
        self.look()

    def look(self) -> None:
        """Who was served or failed by the last step; the order has to be that of arrival."""
        waiting = [caller for caller in self.callers if caller.waits]
        served = [caller for caller in self.callers if caller.lease is not None]
        if waiting and served:
            first = waiting[0].waiter
            assert first is not None
            for caller in served:
                assert caller.waiter is None or caller.waiter.asked_ns <= first.asked_ns, "overtaken"
        for caller in self.callers:
            error = caller.error
            if isinstance(error, QueueTimeout):
                assert caller.waiter is not None
                assert self.shell.clock.now_ns >= caller.waiter.until_ns, "gave up too early"
            assert error is None or isinstance(error, SpanwireError), error
        for caller in served:
            assert caller.lease is not None
            self.leases.append((caller.lease, caller))
        self.callers = waiting

    @rule(count=st.integers(1, 3), patience=st.sampled_from([None, 0.0, 2.0, 30.0, 30.0]))
    def calls(self, count: int, patience: float | None) -> None:
        for _ in range(count):
            self.callers.append(self.shell.call(patience))
        self.look()

    def pending(self) -> list[int]:
        return [number for number, gate in enumerate(self.shell.transport.gates) if not gate.answer.done()]

    @precondition(lambda self: self.pending())
    @rule(data=st.data(), capacity=st.sampled_from([1, 1, 1, 3]), ok=st.sampled_from([True, True, True, False]))
    def dial_succeeds(self, data: st.DataObject, capacity: int, ok: bool) -> None:
        number = data.draw(st.sampled_from(self.pending()))
        self.shell.clock.now_ns += 1
        self.shell.transport.gates[number].answer.set_result(FakeConnection(capacity, ok=ok))
        self.shell.settle()
        self.look()

    @precondition(lambda self: self.pending())
    @rule(data=st.data(), retry_after_s=st.sampled_from([None, None, 0.5, 20.0]))
    def dial_is_refused(self, data: st.DataObject, retry_after_s: float | None) -> None:
        self.shell.refuse(data.draw(st.sampled_from(self.pending())), retry_after_s)
        self.look()

    @precondition(lambda self: self.pending())
    @rule(data=st.data())
    def dial_fails(self, data: st.DataObject) -> None:
        self.shell.refuse(data.draw(st.sampled_from(self.pending())), error=ConnectionFailed("no"))
        self.look()

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), broken=st.booleans())
    def exchange_ends(self, data: st.DataObject, broken: bool) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        self.end(lease, broken=broken)

    def end(self, held: tuple[Lease, Caller], *, broken: bool) -> None:
        self.leases.remove(held)
        self.shell.clock.now_ns += 1
        if broken:
            held[0].member.connection.ok = False  # type: ignore[attr-defined]
        held[0].release()
        self.shell.settle()
        self.look()

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), comes_back=st.sampled_from([True, True, False]))
    def exchange_is_refused(self, data: st.DataObject, comes_back: bool) -> None:
        held = data.draw(st.sampled_from(self.leases))
        self.leases.remove(held)
        lease, caller = held
        self.shell.clock.now_ns += 1
        lease.member.connection.ok = False  # type: ignore[attr-defined]
        lease.release()
        may_wait = self.shell.pool.refused(full(), caller.asked_ns, caller.limits, Timeouts())
        assert self.shell.state.full_until_ns > self.shell.clock.now_ns
        if may_wait and comes_back:
            self.callers.append(self.shell.call(caller.limits.queue_timeout_s, caller.asked_ns))
        self.shell.settle()
        self.look()

    @precondition(lambda self: self.callers)
    @rule(data=st.data())
    def caller_cancels(self, data: st.DataObject) -> None:
        caller = data.draw(st.sampled_from(self.callers))
        self.callers.remove(caller)
        caller.task.cancel()
        self.shell.settle()
        assert caller.task.cancelled()
        self.look()

    @precondition(lambda self: self.callers and self.leases)
    @rule(data=st.data())
    def caller_cancels_as_it_is_served(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.leases))
        self.leases.remove(held)
        held[0].release()
        for caller in self.callers:
            if caller.waiter is not None and caller.waiter.member is not None:
                caller.task.cancel()
        self.shell.settle()
        self.callers = [caller for caller in self.callers if not caller.task.cancelled()]
        self.look()

    @rule(seconds=st.sampled_from([0.0, 0.05, 0.1, 1.0, 10.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        # Not over what is due: a machine is late, but not by this much.
        until_ns = self.shell.clock.now_ns + int(seconds * S)
        for _ in range(200):
            due = [int(timer.when() * S) + ROUNDING_NS for timer in self.shell.loop.timers()]
            if not due or min(due) > until_ns:
                break
            self.shell.clock.now_ns = max(self.shell.clock.now_ns + 1, min(due))
            self.shell.settle()
            self.look()
        else:
            raise AssertionError("the timers never rest")
        self.shell.clock.now_ns = max(until_ns, self.shell.clock.now_ns)
        self.shell.settle()
        self.look()

    @rule()
    def a_late_machine(self) -> None:
        self.shell.after(100.0)
        self.look()

    # what always holds

    def live(self) -> bool:
        return hasattr(self, "leases")

    @invariant()
    def the_queue_is_who_waits(self) -> None:
        if self.live():
            assert list(self.shell.state.waiters) == [caller.waiter for caller in self.callers]

    @invariant()
    def every_waiter_has_a_supply(self) -> None:
        if not self.live():
            return
        state, looker = self.shell.state, self.shell.pool._looker
        now_ns = self.shell.clock.now_ns
        for waiter in state.waiters:
            if waiter.dial is not None:
                assert waiter.dial in state.dials
                continue
            assert state.full_until_ns, "it waits for a server that is not full"
            assert now_ns < waiter.until_ns, "it waits for longer than it wanted"
            assert looker is not None, "nobody will ever look at it"
            assert not looker.cancelled()
            look_ns = looker.when() * S
            assert look_ns <= waiter.until_ns + ROUNDING_NS, "nobody will look when its time is over"
            assert state.dials or look_ns <= max(state.full_until_ns, now_ns) + ROUNDING_NS, "nobody will try in time"

    @invariant()
    def nobody_waits_beside_a_free_connection(self) -> None:
        if self.live() and self.callers:
            for member in self.shell.state.members:
                assert member.leases >= member.connection.capacity or not member.connection.usable()

    @invariant()
    def no_timer_without_a_waiter(self) -> None:
        if self.live() and not self.shell.state.waiters:
            assert self.shell.loop.timers() == []

    def teardown(self) -> None:
        if not self.live():
            return
        try:
            for _ in range(1000):
                if self.pending():
                    self.shell.open(self.pending()[0])
                    self.look()
                elif self.leases:
                    self.end(self.leases[0], broken=True)
                elif self.callers:
                    assert self.shell.pool._looker is not None
                    self.shell.clock.now_ns = int(self.shell.pool._looker.when() * S) + ROUNDING_NS
                    self.shell.settle()
                    self.look()
                else:
                    break
            assert not self.callers, "a caller was lost"
        finally:
            self.shell.close()


TestFullServer = FullServerMachine.TestCase
TestFullServer.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


# --- the decision, by example ------------------------------------------------------------------------------------------


def parked(state: PoolState, until_ns: int = 100 * S, now_ns: int = S, queue_timeout_s: float | None = 60) -> Waiter:
    """A caller that came when the server was known to be full."""
    waiter = state.wait(now_ns, limits(queue_timeout_s))
    waiter.until_ns = until_ns
    assert not state.wants_dial(waiter, may_wait=True)
    assert waiter.dial is None
    return waiter


def full_state(until_s: float = 1.0) -> PoolState:
    state = PoolState()
    state.refused(S, until_s, 0.0)
    return state


def member(state: PoolState, at_ns: int = S, capacity: int = 1) -> Member:
    return state.dialled(state.dial(at_ns, 1), FakeConnection(capacity), at_ns)[0]


def test_the_wait_is_doubled_with_each_try_up_to_its_limit() -> None:
    state, now_ns, waits = PoolState(), S, []
    for _ in range(12):
        state.refused(now_ns, None, 1.0)
        waits.append((state.full_until_ns - now_ns) / S)
        now_ns = state.full_until_ns
    assert waits[:3] == [FULL_WAIT_S, 2 * FULL_WAIT_S, 4 * FULL_WAIT_S]
    assert waits[-1] == FULL_WAIT_LIMIT_S == max(waits)


def test_the_dice_take_at_most_half() -> None:
    state = PoolState()
    state.refused(S, None, 0.0)
    assert state.full_until_ns == S + int(FULL_WAIT_S / 2 * S)


def test_of_many_that_are_refused_together_the_first_one_counts() -> None:
    state = PoolState()
    for number in range(50):
        state.refused(S + number, None, 1.0)
    assert state.full_until_ns == S + int(FULL_WAIT_S * S)
    state.refused(state.full_until_ns, None, 1.0)
    assert state.full_until_ns == S + int(3 * FULL_WAIT_S * S)


def test_a_time_that_the_server_names_is_kept_and_a_shorter_one_shortens_nothing() -> None:
    state = PoolState()
    state.refused(S, 20.0, 0.5)
    assert state.full_until_ns == 21 * S
    state.refused(2 * S, None, 0.5)
    state.refused(2 * S, 0.0, 0.5)
    assert state.full_until_ns == 21 * S


def test_a_time_without_end_is_no_error() -> None:
    """``Retry-After`` with 400 digits is an infinity."""
    state = PoolState()
    state.refused(S, float("inf"), 0.5)
    assert state.full_until_ns > 86_400 * S


@pytest.mark.parametrize(
    ("has_members", "queue_timeout_s", "now_ns", "waits"),
    [
        (True, None, 5 * S, True),
        (False, 60.0, 5 * S, True),
        (False, None, 5 * S, False),
        (True, 60.0, 10 * S - 1, True),
        (True, 60.0, 10 * S, False),
    ],
)
def test_who_may_wait_when_a_dial_is_refused(
    has_members: bool, queue_timeout_s: float | None, now_ns: int, waits: bool
) -> None:
    state = PoolState()
    if has_members:
        busy = member(state)
        assert state.take(S, PATIENT) is busy
    waiter = state.wait(S, limits(queue_timeout_s))
    waiter.until_ns = 10 * S
    dial = state.dial(S, 1, waiter)
    error = full()
    state.failed(dial, error, now_ns)
    assert (waiter.error is None) is waits
    assert (waiter in state.waiters) is waits
    assert waiter.by is (None if waits else dial)
    assert waiter.dial is None


def test_a_failure_of_another_kind_fails_its_callers_also_on_a_full_server() -> None:
    state = full_state()
    waiter = parked(state)
    dial = state.dial(3 * S, 1, waiter)
    error = ConnectionFailed("no")
    state.failed(dial, error, 4 * S)
    assert waiter.error is error


def test_a_call_that_takes_no_connection_used_before_does_not_wait_for_one() -> None:
    state = full_state()
    waiter = state.wait_for_new(S, PATIENT)
    waiter.until_ns = 100 * S
    assert state.wants_dial(waiter, may_wait=False)
    dial = state.dial(S, 1, waiter)
    error = full()
    state.failed(dial, error, S)
    assert waiter.error is error


def test_a_caller_rides_on_a_try_that_has_room() -> None:
    state = full_state()
    first = parked(state)
    dial = state.dial(3 * S, 2, first)
    second = state.wait(4 * S, PATIENT)
    assert not state.wants_dial(second, may_wait=True)
    assert second.dial is dial


def test_it_looks_at_the_first_when_the_time_has_come_and_at_nobody_before() -> None:
    state = full_state(1.0)
    first, _ = parked(state), parked(state, until_ns=50 * S)
    assert state.look_at_full(S) == (None, [], S)
    assert state.look_at_full(2 * S - 1) == (None, [], 1)
    assert state.look_at_full(2 * S) == (first, [], 48 * S)
    state.dial(2 * S, 1, first)
    assert state.look_at_full(3 * S) == (None, [], 47 * S), "one try at a time"


def test_those_who_have_waited_too_long_are_late_and_those_who_wait_for_a_dial_are_not() -> None:
    state = full_state(1.0)
    dialling, late, waits = parked(state, 5 * S), parked(state, 5 * S), parked(state, 5 * S + 1)
    state.dial(3 * S, 1, dialling)
    assert state.look_at_full(5 * S) == (None, [late], 1)
    assert state.look_at_full(6 * S) == (None, [late, waits], 0)


def test_it_looks_when_the_first_of_them_gives_up_if_that_is_earlier() -> None:
    state = full_state(10.0)
    parked(state, until_ns=3 * S)
    assert state.look_at_full(S) == (None, [], 2 * S)


def test_nobody_is_late_on_a_server_that_is_not_full() -> None:
    """It waits for the end of a message, and its own limit is on the wait for a slot."""
    state = PoolState()
    busy = member(state)
    assert state.take(S, PATIENT) is busy
    state.finishing(busy)
    waiter = state.wait(S, limits(0.0))
    waiter.until_ns = S
    assert not state.wants_dial(waiter, may_wait=True)
    assert state.look_at_full(2 * S) == (None, [], 0)


def test_a_dial_that_succeeds_shows_that_there_is_room() -> None:
    state = full_state()
    state.dialled(state.dial(2 * S, 1), FakeConnection(), 3 * S)
    assert state.full_until_ns == 0
    state.refused(4 * S, None, 1.0)
    assert state.full_until_ns == 4 * S + int(FULL_WAIT_S * S), "counted anew"


def test_where_it_refuses_after_the_handshake_only_an_exchange_that_ends_well_shows_that_there_is_room() -> None:
    state = PoolState()
    state.refused(S, None, 0.0, connected=True)
    waiter = parked(state)
    made, _ = state.dialled(state.dial(2 * S, 1, waiter), FakeConnection(), 3 * S)
    assert waiter.member is made
    assert state.full_until_ns > 3 * S
    made.connection.ok = False  # type: ignore[attr-defined]
    state.release(made, 4 * S, PATIENT)
    assert state.full_until_ns > 3 * S, "it broke"
    other, _ = state.dialled(state.dial(5 * S, 1), FakeConnection(), 5 * S)
    assert state.take(5 * S, PATIENT) is other
    state.release(other, 6 * S, PATIENT)
    assert state.full_until_ns == 0
    state.dialled(state.dial(7 * S, 1), FakeConnection(), 7 * S)
    assert state.full_until_ns == 0


def test_where_it_refuses_after_the_handshake_the_wait_is_doubled_too() -> None:
    """The refusal comes within the wait that the handshake before it has begun."""
    state, now_ns, waits = PoolState(), S, []
    for _ in range(4):
        state.refused(now_ns, None, 1.0, connected=True)
        waits.append(round((state.full_until_ns - now_ns) / S, 3))
        now_ns = state.full_until_ns
        waiter = parked(state, now_ns=now_ns)
        made, _ = state.dialled(state.dial(now_ns, 1, waiter), FakeConnection(), now_ns)
        made.connection.ok = False  # type: ignore[attr-defined]
        now_ns += MS
        state.release(made, now_ns, PATIENT)
    assert waits == [0.1, 0.2, 0.4, 0.8]


def test_a_caller_that_is_cancelled_as_it_is_served_shows_nothing_of_the_server() -> None:
    state = PoolState()
    state.refused(S, None, 0.0, connected=True)
    first, second = parked(state), parked(state)
    made, _ = state.dialled(state.dial(2 * S, 1, first), FakeConnection(), 3 * S)
    state.cancel(first, 3 * S)
    assert second.member is made
    assert state.full_until_ns > 3 * S


def test_one_that_waited_and_is_served_by_anothers_dial_knows_since_when() -> None:
    """What was before that is queue, and no handshake."""
    state = full_state()
    first, second = parked(state), parked(state)
    dial = state.dial(5 * S, 2, first)
    state.dialled(dial, FakeConnection(2), 6 * S)
    assert (second.served, second.by, second.dial_asked_ns) == ("dialled", dial, 5 * S)
    third = state.wait(7 * S, PATIENT)
    state.dial(7 * S, 1, third)
    assert third.dial_asked_ns == 0


# which idle connection


class Suiting(FakeConnection):
    def __init__(self, suits: int) -> None:
        super().__init__()
        self._suits = suits

    def suits(self, prepared: object) -> int:
        assert prepared == "call"
        return self._suits


@pytest.mark.parametrize(("suits", "found"), [([0, 2, 1], 1), ([1, 1, 0], 1), ([2, 1, 2], 2), ([0, 0, 0], 0), ([3], 0)])
def test_the_idle_connection_that_suits_best_is_taken_and_of_those_that_forget_the_one_used_longest_ago(
    suits: list[int], found: int
) -> None:
    state = PoolState()
    members = [state.dialled(state.dial(S, 1), Suiting(number), S)[0] for number in suits]
    assert state.take(S, PATIENT, "call") is members[found]


def test_without_a_preparation_nobody_is_asked_what_suits() -> None:
    state = PoolState()
    first, second = member(state), member(state)
    assert state.take(S, PATIENT) is second
    assert state.take(S, PATIENT) is first


def test_if_the_one_that_suits_best_is_dead_the_next_best_is_taken() -> None:
    state = PoolState()
    members = [state.dialled(state.dial(S, 1), Suiting(number), S)[0] for number in (1, 2, 0)]
    members[1].connection.ok = False  # type: ignore[attr-defined]
    assert state.take(S, PATIENT, "call") is members[0]
    assert state.dropped == [members[1]]


# --- the shell, by example ---------------------------------------------------------------------------------------------


def test_two_hundred_calls_are_served_by_twenty_connections() -> None:
    with shell() as the:
        held = the.held(20)
        waiting = [the.call() for _ in range(180)]
        the.refuse(20)  # 180 dials, before anything was known
        for number in range(21, the.dials):
            the.refuse(number)
        assert all(caller.waits for caller in waiting)
        dials = the.dials
        for number, caller in enumerate(waiting):
            assert caller.waits
            lease = held.pop(0)
            lease.release()
            the.settle()
            served = caller.lease
            assert served is not None, number
            assert (served.served, served.member) == ("freed", lease.member)
            held.append(served)
        assert the.dials == dials, "nobody dialled while connections came back"
        assert len(the.state.members) == 20
        assert the.loop.timers() == []


def test_a_server_that_is_known_to_be_full_is_not_dialled() -> None:
    with shell() as the:
        the.held()
        first = the.call()
        the.refuse()
        callers = [first, *(the.call() for _ in range(50))]
        assert the.dials == 2
        the.after(FULL_WAIT_S)
        assert the.dials == 3, "one tries"
        the.refuse()
        assert the.dials == 3
        assert all(caller.waits for caller in callers)


def test_retry_after_is_kept_to() -> None:
    with shell() as the:
        the.held()
        caller = the.call()
        the.refuse(retry_after_s=7)
        the.after(6.99)
        assert the.dials == 2
        the.after(0.02)
        assert the.dials == 3
        the.open()
        assert caller.lease is not None
        assert caller.lease.served == "dialled"
        assert caller.waiter is not None
        assert caller.waiter.dial_asked_ns > 1000 * S + 7 * S


def test_a_retry_after_without_end_leaves_no_caller_behind() -> None:
    with shell() as the:
        caller = the.call(queue_timeout_s=2)
        the.refuse(retry_after_s=float("inf"))
        assert caller.waits
        the.after(2)
        assert isinstance(caller.error, QueueTimeout)


def test_once_there_is_room_they_dial_one_after_the_other() -> None:
    with shell() as the:
        callers = [the.call()]
        the.refuse()
        callers += [the.call() for _ in range(3)]
        the.after(FULL_WAIT_S)
        for number in range(4):
            assert the.dials == 2 + number
            assert [caller.lease is not None for caller in callers] == [index < number for index in range(4)]
            the.open()
        assert the.dials == 5
        assert the.state.full_until_ns == 0


def test_a_try_that_fails_in_another_way_leaves_the_next_its_try() -> None:
    with shell() as the:
        callers = [the.call()]
        the.refuse()
        callers += [the.call() for _ in range(2)]
        the.after(FULL_WAIT_S)
        the.refuse(error=ConnectionFailed("a cable"))
        assert isinstance(callers[0].error, ConnectionFailed)
        the.settle()
        assert the.dials == 3
        the.open()
        assert callers[1].lease is not None
        the.open()
        assert callers[2].lease is not None


def test_the_limit_that_ended_the_wait_is_named() -> None:
    with shell() as the:
        the.held()
        by_queue = the.call(5)
        the.refuse(retry_after_s=3600)
        by_content = the.call(None)
        the.after(5)
        assert isinstance(by_queue.error, QueueTimeout)
        assert "Limits.queue_timeout_s = 5 s" in str(by_queue.error)
        assert "host:1" in str(by_queue.error)
        assert by_queue.error.phase == "queue"
        assert by_content.waits
        the.after(600)
        assert isinstance(by_content.error, QueueTimeout)
        assert "Timeouts.first_content_s" in str(by_content.error)


def test_the_wait_counts_from_the_calls_first_asking() -> None:
    with shell() as the:
        the.held()
        the.call(60)
        the.refuse(retry_after_s=3600)
        again = the.call(10, asked_ns=the.clock.now_ns - 9 * S)
        the.after(0.9)
        assert again.waits
        the.after(0.2)
        assert isinstance(again.error, QueueTimeout)
        late = the.call(10, asked_ns=the.clock.now_ns - 11 * S)
        assert isinstance(late.error, QueueTimeout)


def test_one_with_less_patience_that_is_refused_later_is_looked_at_in_time() -> None:
    with shell() as the:
        patient, hasty = the.call(60), the.call(2)
        the.refuse(0, retry_after_s=30)
        the.refuse(1)
        the.after(2)
        assert isinstance(hasty.error, QueueTimeout)
        assert patient.waits


def test_without_a_connection_of_our_own_only_who_has_said_how_long_waits() -> None:
    with shell() as the:
        hasty, patient = the.call(None), the.call(5)
        the.refuse(0)
        the.refuse(1)
        assert isinstance(hasty.error, Overloaded)
        assert hasty.error.full
        assert patient.waits


def test_a_caller_cancelled_while_it_waits_for_room_leaves_nothing() -> None:
    empty: list[None] = []
    with shell(on_empty=lambda: empty.append(None)) as the:
        caller = the.call()
        the.refuse(retry_after_s=30)
        assert the.loop.timers()
        caller.task.cancel()
        the.settle()
        assert caller.task.cancelled()
        assert the.loop.timers() == []
        assert len(empty) == 1, "whoever keeps this pool need not"


def test_a_pool_that_nobody_waits_at_any_more_says_so() -> None:
    empty: list[None] = []
    with shell(on_empty=lambda: empty.append(None)) as the:
        caller = the.call(1)
        the.refuse(retry_after_s=30)
        the.after(1)
        assert isinstance(caller.error, QueueTimeout)
        assert len(empty) == 1
        assert the.loop.timers() == []


def test_a_caller_cancelled_while_its_try_is_made_leaves_it_to_the_next() -> None:
    with shell() as the:
        first = the.call()
        the.refuse()
        second = the.call()
        the.after(FULL_WAIT_S)
        first.task.cancel()
        the.settle()
        the.refuse(error=ConnectionFailed("no"))
        assert second.waits, "it did not count on that one"
        assert the.dials == 3
        the.open()
        assert second.lease is not None


@pytest.mark.parametrize("way", ["aclose", "abort"])
def test_closing_while_it_is_full_fails_those_who_wait(way: str) -> None:
    with shell() as the:
        the.held()
        callers = [the.call()]
        the.refuse(retry_after_s=30)
        callers.append(the.call())
        if way == "aclose":
            the.run(the.pool.aclose())
        else:
            the.pool.abort()
        the.settle()
        for caller in callers:
            assert isinstance(caller.error, ConnectionFailed)
            assert "closed" in str(caller.error)
        assert the.loop.timers() == []
        the.after(60)
        assert the.dials == 2


def test_warm_against_a_full_server_raises() -> None:
    with shell() as the:
        the.state.warming = True

        async def warm() -> None:
            await the.pool.warm(fake_attempt(), 2)

        task = the.loop.create_task(warm())
        the.settle()
        assert the.dials == 2
        the.open(0)
        the.refuse(1)
        assert isinstance(task.exception(), Overloaded)
        assert the.loop.timers() == []
        assert len(the.state.members) == 1


def refused_on(the: Shell, caller: Caller, *, error: SpanwireError | None = None) -> bool:
    """What the manager does when the server refuses a call on its connection."""
    assert caller.lease is not None
    caller.lease.member.connection.ok = False  # type: ignore[attr-defined]
    caller.lease.release()
    may_wait = the.pool.refused(error or full(), caller.asked_ns, caller.limits, Timeouts())
    the.settle()
    return may_wait


def test_a_refusal_on_a_connection_lets_its_caller_wait_with_the_others() -> None:
    with shell() as the:
        (held,) = the.held()
        caller = the.call()
        the.open()
        assert refused_on(the, caller)
        again = the.call(asked_ns=caller.asked_ns)
        assert the.dials == 2
        held.release()
        the.settle()
        assert again.lease is not None
        assert again.lease.served == "freed"


def test_a_refusal_on_a_connection_that_was_warmed_lets_its_caller_wait_too() -> None:
    """Nobody has ever waited for a connection there."""
    with shell() as the:
        task = the.loop.create_task(the.pool.warm(fake_attempt(), 1))
        the.settle()
        the.open()
        task.result()
        assert refused_on(the, the.call(5))


@pytest.mark.parametrize(
    ("queue_timeout_s", "others", "waited_s", "may_wait"),
    [
        (5, "none", 4.9, True),
        (5, "none", 5.1, False),
        (None, "none", 0, False),
        (None, "one", 0, True),
        (None, "dead", 0, False),
        (None, "one", 601, False),
    ],
)
def test_who_may_wait_when_an_exchange_is_refused(
    queue_timeout_s: float | None, others: str, waited_s: float, may_wait: bool
) -> None:
    with shell() as the:
        if others != "none":
            (held,) = the.held()
            held.member.connection.ok = others == "one"  # type: ignore[attr-defined]
        caller = the.call(queue_timeout_s)
        the.open()
        the.after(waited_s)
        the.call(1000)  # another one, that asked last and has other limits
        assert refused_on(the, caller) is may_wait


def test_where_it_refuses_after_the_handshake_the_next_one_tries_after_the_wait() -> None:
    """Not only once the first has ended, which may take an hour."""
    with shell() as the:
        caller = the.call()
        the.open()
        assert refused_on(the, caller)
        callers = [the.call() for _ in range(3)]
        for number in range(3):
            the.after(FULL_WAIT_LIMIT_S)
            assert the.dials == 2 + number
            the.open()
            lease = callers[number].lease
            assert lease is not None
            assert lease.served == "dialled"


def test_a_refused_exchange_whose_caller_goes_away_leaves_the_others_their_try() -> None:
    with shell() as the:
        caller = the.call()
        the.open()
        assert refused_on(the, caller)
        others = [the.call() for _ in range(2)]
        the.after(FULL_WAIT_S)
        the.open()
        refused_on(the, others[0])
        assert others[1].waits
        the.after(FULL_WAIT_LIMIT_S)
        assert the.dials == 3
        the.open()
        assert others[1].lease is not None


def test_a_connection_given_back_in_order_shows_that_there_is_room_for_more() -> None:
    with shell() as the:
        caller = the.call()
        the.open()
        assert refused_on(the, caller, error=RateLimited("no", retry_after_s=30))
        the.state.full_until_ns = the.clock.now_ns  # the 30 s are over
        first, second, third = (the.call() for _ in range(3))
        the.open()
        assert first.lease is not None
        first.lease.release()
        the.settle()
        assert second.lease is not None
        assert third.waits
        assert the.dials == 3
        the.open()
        assert third.lease is not None


def test_nothing_of_a_call_stays_with_the_pool() -> None:
    class Message:
        """As large as the conversation."""

    with shell() as the:
        attempt = fake_attempt(limits=PATIENT)
        attempt.prepared = Message()
        message = weakref.ref(attempt.prepared)
        task = the.loop.create_task(the.pool.lease(attempt, lambda waiter: None))
        the.settle()
        the.open()
        task.result()
        del attempt, task
        gc.collect()
        assert message() is None
        assert len(the.state.members) == 1


def test_a_try_is_made_with_the_settings_of_the_one_it_is_made_for() -> None:
    with shell() as the:
        the.held()
        contexts = [object(), object()]
        for connect_s, context in zip((7.0, 8.0), contexts, strict=True):
            attempt = fake_attempt(limits=PATIENT, connect_s=connect_s)
            the.loop.create_task(the.pool.lease(attempt, lambda waiter: None, context))
            the.settle()
            if connect_s == 7.0:
                the.refuse()
        the.after(FULL_WAIT_S)
        assert the.transport.gates[-1].attempt.timeouts.connect_s == 7.0
        (dial,) = the.state.dials
        assert dial.context is contexts[0]
        the.open()
        assert the.transport.gates[-1].attempt.timeouts.connect_s == 8.0
        the.open()


def test_many_that_wait_are_not_all_looked_at_for_each_that_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    look = PoolState.look_at_full

    def counted(self: PoolState, now_ns: int) -> Any:
        looks.append(now_ns)
        return look(self, now_ns)

    monkeypatch.setattr(PoolState, "look_at_full", counted)
    with shell() as the:
        the.held()
        the.call()
        the.refuse(retry_after_s=30)
        before = len(looks)
        for _ in range(50):
            the.call()
        assert len(looks) == before
        the.call(1)
        assert len(looks) == before + 1, "it wants to be looked at earlier"


def test_many_that_are_refused_together_are_not_all_looked_at_for_each_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    look = PoolState.look_at_full

    def counted(self: PoolState, now_ns: int) -> Any:
        looks.append(now_ns)
        return look(self, now_ns)

    with shell() as the:
        the.held()
        callers = [the.call() for _ in range(50)]
        monkeypatch.setattr(PoolState, "look_at_full", counted)
        for number in range(1, 51):
            the.refuse(number)
        assert all(caller.waits for caller in callers)
        assert len(looks) == 1


def test_a_lease_that_ends_on_a_closed_loop_is_quiet() -> None:
    the = Shell()
    the.held()
    caller = the.call()
    the.refuse(retry_after_s=30)
    the.pool.abort()
    the.settle()
    assert caller.task.done()
    assert caller.error is not None
    the.close()
    the.pool.abort()
    assert the.loop.timers() == []
