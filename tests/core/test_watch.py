"""Far limits: every call is looked at when it wants to be, and nothing runs when there is none."""

from __future__ import annotations

import asyncio
import time

import pytest

from spanwire import watch
from spanwire.watch import Watch
from tests.support import run


class Call:
    """Notes when it was looked at, and is looked at again after ``again_ns``."""

    def __init__(self, look_ns: int, again_ns: int | None = None) -> None:
        self.look_ns = look_ns
        self.again_ns = again_ns
        self.looks: list[int] = []
        self.seen = asyncio.get_running_loop().create_future()

    def look(self, now_ns: int) -> None:
        self.looks.append(now_ns)
        if self.again_ns is None or len(self.looks) == 2:
            self.look_ns = 1 << 62
            self.seen.set_result(None)
        else:
            self.look_ns = now_ns + self.again_ns


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_EVERY_S", 0.01)


def test_a_call_is_looked_at_after_its_time_and_not_before() -> None:
    async def body() -> None:
        now_ns = time.perf_counter_ns()
        soon, late, never = Call(now_ns), Call(now_ns + 50_000_000), Call(1 << 62)
        looker = Watch(asyncio.get_running_loop(), {soon, late, never})
        looker.start()
        await late.seen
        looker.close()
        assert len(soon.looks) == len(late.looks) == 1
        assert soon.looks[0] >= now_ns
        assert late.looks[0] >= now_ns + 50_000_000
        assert never.looks == []

    run(body)


def test_a_call_that_is_not_due_yet_is_looked_at_again() -> None:
    async def body() -> None:
        call = Call(0, again_ns=20_000_000)
        looker = Watch(asyncio.get_running_loop(), {call})
        looker.start()
        await call.seen
        looker.close()
        assert call.looks[1] - call.looks[0] >= 20_000_000

    run(body)


def test_it_stops_when_there_are_no_calls_and_starts_once() -> None:
    async def body() -> None:
        calls: set[Call] = {Call(0)}
        looker = Watch(asyncio.get_running_loop(), calls)
        looker.start()
        timer = looker._timer
        looker.start()
        assert looker._timer is timer
        (call,) = calls
        calls.clear()
        while looker._timer is not None:
            await asyncio.sleep(0)
        assert call.looks == []

    run(body)


def test_a_call_may_leave_while_it_is_looked_at() -> None:
    async def body() -> None:
        calls: set[Call] = set()

        class Leaving(Call):
            def look(self, now_ns: int) -> None:
                calls.discard(self)
                super().look(now_ns)

        both = Leaving(0), Leaving(0)
        calls.update(both)
        looker = Watch(asyncio.get_running_loop(), calls)
        looker.start()
        await asyncio.gather(*(call.seen for call in both))
        assert calls == set()

    run(body)


def test_a_call_that_cannot_be_ended_does_not_take_the_others_limits(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        class Broken(Call):
            def look(self, now_ns: int) -> None:
                super().look(now_ns)
                raise ValueError("a transport's bug")

        broken, later = Broken(0), Call(time.perf_counter_ns() + 40_000_000)
        looker = Watch(asyncio.get_running_loop(), {broken, later})
        looker.start()
        await later.seen
        looker.close()

    run(body)
    assert "could not be ended" in caplog.text


def test_closed_it_looks_no_more() -> None:
    async def body() -> None:
        first, second = Call(0), Call(0)
        looker = Watch(asyncio.get_running_loop(), {first})
        looker.start()
        looker.close()
        looker.close()
        other = Watch(asyncio.get_running_loop(), {second})
        other.start()
        await second.seen
        other.close()
        assert first.looks == []

    run(body)
