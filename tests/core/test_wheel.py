"""Coarse timers: set and forgotten at little cost, called back in time, nothing left."""

from __future__ import annotations

import asyncio
import time

from spanwire import wheel
from spanwire.wheel import Wheel
from tests.support import run


def test_it_calls_back_after_the_time_and_in_order_of_slots() -> None:
    async def body() -> None:
        timers = Wheel(asyncio.get_running_loop())
        now_ns = time.perf_counter_ns()
        called: list[tuple[str, int]] = []
        done = asyncio.get_running_loop().create_future()

        def late() -> None:
            called.append(("late", time.perf_counter_ns()))
            done.set_result(None)

        timers.add("late", now_ns + 300_000_000, late)
        timers.add("soon", now_ns + 1_000_000, lambda: called.append(("soon", time.perf_counter_ns())))
        await done
        assert [name for name, _ in called] == ["soon", "late"]
        assert called[0][1] >= now_ns + 1_000_000
        assert called[1][1] >= now_ns + 300_000_000
        assert len(timers) == 0

    run(body)


def test_what_is_forgotten_is_not_called_and_leaves_no_slot() -> None:
    async def body() -> None:
        timers = Wheel(asyncio.get_running_loop())
        slots = [timers.add(number, time.perf_counter_ns() + 10**12, lambda: None) for number in range(1000)]
        assert len(timers) == 1000
        for number, slot in enumerate(slots):
            timers.discard(number, slot)
            timers.discard(number, slot)
        assert len(timers) == 0
        assert timers._slots == {}

    run(body)


def test_a_callback_may_set_another_timer() -> None:
    async def body() -> None:
        timers = Wheel(asyncio.get_running_loop())
        done = asyncio.get_running_loop().create_future()

        def again() -> None:
            timers.add("b", time.perf_counter_ns(), lambda: done.set_result(None))

        timers.add("a", time.perf_counter_ns(), again)
        await done
        assert timers._timer is None

    run(body)


def test_close_forgets_everything() -> None:
    async def body() -> None:
        timers = Wheel(asyncio.get_running_loop())
        timers.add("a", time.perf_counter_ns() + 2 * wheel.NEAR_NS, lambda: None)
        timers.close()
        assert len(timers) == 0
        assert timers._timer is None

    run(body)
