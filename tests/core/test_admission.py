"""Limits on calls at once: the decision as a state machine, the shell over loops and threads."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from spanwire.admission import Admission, Slots, Ticket, slots_for
from spanwire.endpoint import Endpoint, Limits, Timeouts
from spanwire.errors import NoSlot, QueueFull, QueueTimeout
from tests.core.fakes import settle


class AdmissionMachine(RuleBasedStateMachine):
    """Against a list of who is here, in order: the first ``limit`` that were let in hold, the others wait."""

    @initialize(limit=st.integers(1, 4), queue=st.none() | st.integers(0, 4))
    def set_up(self, limit: int, queue: int | None) -> None:
        self.admission = Admission(limit, queue)
        self.limit, self.queue = limit, queue
        self.holding: list[Ticket] = []
        self.waiting: list[Ticket] = []
        self.gone: list[Ticket] = []

    @rule()
    def ask(self) -> None:
        ticket = Ticket()
        answer = self.admission.ask(ticket)
        if len(self.holding) < self.limit:
            assert answer == "admit"
            self.holding.append(ticket)
        elif self.queue is not None and len(self.waiting) >= self.queue:
            assert answer == "refuse"
            self.gone.append(ticket)
        else:
            assert answer == "wait"
            self.waiting.append(ticket)

    @rule(data=st.data())
    def holder_leaves(self, data: st.DataObject) -> None:
        if self.holding:
            ticket = data.draw(st.sampled_from(self.holding))
            self.holding.remove(ticket)
            self.gone.append(ticket)
            successor = self.admission.leave(ticket)
            assert successor is (self.waiting[0] if self.waiting else None)
            if successor is not None:
                self.holding.append(self.waiting.pop(0))

    @rule(data=st.data())
    def waiter_leaves(self, data: st.DataObject) -> None:
        if self.waiting:
            ticket = data.draw(st.sampled_from(self.waiting))
            self.waiting.remove(ticket)
            self.gone.append(ticket)
            assert self.admission.leave(ticket) is None

    @rule(data=st.data())
    def somebody_leaves_twice(self, data: st.DataObject) -> None:
        if self.gone:
            assert self.admission.leave(data.draw(st.sampled_from(self.gone))) is None

    @invariant()
    def as_in_the_model(self) -> None:
        if hasattr(self, "admission"):
            assert self.admission.holders == set(self.holding)
            assert list(self.admission.waiters) == self.waiting
            assert len(self.holding) <= self.limit
            assert not self.waiting or len(self.holding) == self.limit, "a slot is free while somebody waits"


TestAdmission = AdmissionMachine.TestCase
TestAdmission.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# --- the shell ---------------------------------------------------------------------------------------------------------


def slots(max_concurrent: int = 1, max_queue: int | None = None) -> Slots:
    return Slots("host:1", Limits(max_concurrent=max_concurrent, max_queue=max_queue))


def test_slots_are_given_in_order() -> None:
    async def main() -> None:
        pool = slots()
        first = await pool.acquire("first", None)
        order: list[int] = []

        async def wait(number: int) -> None:
            ticket = await pool.acquire(str(number), None)
            order.append(number)
            pool.release(ticket)

        tasks = [asyncio.create_task(wait(number)) for number in range(5)]
        await settle()
        assert pool.waiting == 5
        assert pool.try_acquire("pushy") is None
        assert order == []
        pool.release(first)
        await asyncio.gather(*tasks)
        assert order == [0, 1, 2, 3, 4]
        assert pool.waiting == 0
        ticket = pool.try_acquire("after")
        assert ticket is not None
        assert ticket.since_ns > 0

    asyncio.run(main())


def test_nobody_overtakes_a_waiter_whose_task_has_not_run_yet() -> None:
    async def main() -> None:
        pool = slots()
        first = await pool.acquire("first", None)
        waiter = asyncio.create_task(pool.acquire("waiter", None))
        await settle()
        pool.release(first)
        assert pool.try_acquire("pushy") is None
        await waiter

    asyncio.run(main())


def test_releasing_twice_gives_one_slot() -> None:
    async def main() -> None:
        pool = slots()
        first = await pool.acquire("first", None)
        waiters = [asyncio.create_task(pool.acquire(name, None)) for name in "ab"]
        await settle()
        pool.release(first)
        pool.release(first)
        await settle()
        assert [task.done() for task in waiters] == [True, False]
        pool.release(waiters[0].result())
        await waiters[1]

    asyncio.run(main())


def test_a_full_queue_refuses_at_once_and_names_the_limit_and_the_holders() -> None:
    async def main() -> None:
        pool = slots(max_concurrent=1, max_queue=1)
        held = await pool.acquire("chat m-1", None)
        waiter = asyncio.create_task(pool.acquire("chat m-2", None))
        await settle()
        with pytest.raises(QueueFull, match=r"1 calls wait already \(Limits\.max_queue\).*chat m-1") as caught:
            await pool.acquire("chat m-3", None)
        assert "Limits.max_concurrent" in str(caught.value)
        assert (caught.value.endpoint, caught.value.phase, caught.value.retryable) == ("host:1", "queue", True)
        pool.release(held)
        pool.release(await waiter)
        assert pool.try_acquire("after") is not None

    asyncio.run(main())


def test_a_wait_that_is_too_long_names_the_limit_and_the_holders() -> None:
    async def main() -> None:
        pool = slots(max_concurrent=5)
        tickets = [await pool.acquire(f"chat m-{number}", None) for number in range(5)]
        with pytest.raises(QueueTimeout, match=r"no slot within 0 s \(Limits\.queue_timeout_s\)") as caught:
            await pool.acquire("late", 0)
        text = str(caught.value)
        assert "all 5 slots (Limits.max_concurrent) are held" in text
        assert text.count("chat m-") == 3
        assert "and 2 more" in text
        assert "host:1" in text
        assert isinstance(caught.value, NoSlot)
        assert caught.value.phase == "queue"
        assert pool.waiting == 0
        for ticket in tickets:
            pool.release(ticket)
        assert all(pool.try_acquire("after") is not None for _ in range(5))

    asyncio.run(main())


def test_a_cancelled_waiter_leaves_the_queue() -> None:
    async def main() -> None:
        pool = slots()
        held = await pool.acquire("held", None)
        first, second = (asyncio.create_task(pool.acquire(name, None)) for name in "ab")
        await settle()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert pool.waiting == 1
        pool.release(held)
        pool.release(await second)
        assert pool.try_acquire("after") is not None

    asyncio.run(main())


def test_a_waiter_cancelled_just_after_it_was_admitted_passes_the_slot_on() -> None:
    async def main() -> None:
        pool = slots()
        held = await pool.acquire("held", None)
        first, second = (asyncio.create_task(pool.acquire(name, None)) for name in "ab")
        await settle()
        pool.release(held)  # the slot is first's now, and first has not run
        first.cancel()
        await settle()
        assert first.cancelled()
        assert second.done()
        pool.release(second.result())
        assert pool.try_acquire("after") is not None

    asyncio.run(main())


def test_two_loops_in_two_threads_share_the_limit() -> None:
    pool = slots(max_concurrent=2)
    lock = threading.Lock()
    now = peak = done = 0

    async def call() -> None:
        nonlocal now, peak, done
        ticket = await pool.acquire("call", None)
        with lock:
            now += 1
            peak = max(peak, now)
        await asyncio.sleep(0)
        with lock:
            now -= 1
            done += 1
        pool.release(ticket)

    async def main() -> None:
        await asyncio.gather(*(call() for _ in range(100)))

    threads = [threading.Thread(target=lambda: asyncio.run(main())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (now, done) == (0, 200)
    assert peak == 2
    assert pool.waiting == 0


def in_a_thread(main: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=main)
    thread.start()
    return thread


def test_a_slot_released_in_one_thread_wakes_a_loop_in_another() -> None:
    pool = slots()
    held = pool.try_acquire("held")
    assert held is not None
    got: list[Ticket] = []
    thread = in_a_thread(lambda: got.append(asyncio.run(pool.acquire("other thread", None))))
    while not pool.waiting:
        thread.join(0.001)
    pool.release(held)
    thread.join()
    assert len(got) == 1
    pool.release(got[0])
    assert pool.try_acquire("after") is not None


@pytest.mark.parametrize("dead", [1, 3])
def test_the_closed_loop_of_a_waiter_does_not_lose_the_slot(dead: int) -> None:
    pool = slots()
    held = pool.try_acquire("held")
    assert held is not None
    coroutines = []
    for _ in range(dead):
        loop = asyncio.new_event_loop()
        coroutine = pool.acquire("gone", None)
        task = loop.create_task(coroutine)
        loop.run_until_complete(asyncio.sleep(0))
        coroutines.append((task, coroutine))
        loop.close()
    assert pool.waiting == dead

    async def live() -> None:
        assert held is not None
        waiter = asyncio.create_task(pool.acquire("live", None))
        await settle()
        assert pool.waiting == dead + 1
        pool.release(held)
        pool.release(await waiter)

    asyncio.run(live())
    assert pool.waiting == 0
    assert pool.try_acquire("after") is not None
    for task, coroutine in coroutines:
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        with contextlib.suppress(RuntimeError):
            coroutine.close()
    del coroutines
    gc.collect()


def test_repr_counts() -> None:
    pool = slots(max_concurrent=2)
    pool.try_acquire("a secret label?")
    assert repr(pool) == "Slots(host:1, 1 of 2 in use, 0 waiting)"


# --- sharing -----------------------------------------------------------------------------------------------------------


def test_no_limit_no_slots() -> None:
    assert slots_for(Endpoint("http://h")) is None


def test_equal_endpoints_share_slots_and_others_do_not() -> None:
    limits = Limits(max_concurrent=1)
    first = slots_for(Endpoint("http://h/v1", limits=limits))
    assert first is not None
    same = Endpoint("http://h/v1/", api_key="k", headers={"a": "b"}, timeouts=Timeouts(total_s=1), limits=limits)
    assert slots_for(same) is first
    assert slots_for(Endpoint("http://h/v1", limits=Limits(max_concurrent=1, queue_timeout_s=5))) is first
    others = [
        Endpoint("http://h/v2", limits=limits),
        Endpoint("http://h:81/v1", limits=limits),
        Endpoint("http://h/v1", limits=Limits(max_concurrent=2)),
        Endpoint("http://h/v1", limits=Limits(max_concurrent=1, max_queue=1)),
        Endpoint("http://h/v1", uds="/s", limits=limits),
    ]
    found = [slots_for(other) for other in others]
    assert len({id(item) for item in (first, *found)}) == 6


def test_slots_that_nobody_holds_are_forgotten() -> None:
    endpoint = Endpoint("http://forgotten/v1", limits=Limits(max_concurrent=1))
    held = slots_for(endpoint)
    assert held is not None
    held.try_acquire("held")
    del held
    gc.collect()
    fresh = slots_for(endpoint)
    assert fresh is not None
    assert fresh.try_acquire("new") is not None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_starts_with_all_slots() -> None:
    endpoint = Endpoint("http://forked/v1", limits=Limits(max_concurrent=1))
    held = slots_for(endpoint)
    assert held is not None
    assert held.try_acquire("parent") is not None
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            fresh = slots_for(endpoint)
            code = 0 if fresh is not None and fresh.try_acquire("child") is not None else 2
        os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert held.try_acquire("parent again") is None
