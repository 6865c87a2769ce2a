"""10,000 calls of all kinds at 64 at once on one manager, whose owners read, cancel, leave, raise and forget.

After each round, both sides are asked what happened, and nothing may be left. ``SPANWIRE_SOAK_SEED`` makes other calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import pytest

import spanwire
from spanwire.manager import ConnectionManager, Stream
from spanwire.sync import SyncConnectionManager, SyncStream, _loop_thread
from tests.soak.audit import (
    Ledger,
    Memory,
    Spans,
    held,
    left_of_calls,
    members_of,
    open_connections,
    sockets_to,
    table,
    until,
)
from tests.soak.server import Server
from tests.soak.workload import (
    ASYNC_ACTIONS,
    DONE,
    SYNC_ACTIONS,
    Leaving,
    Plan,
    Totals,
    check_reply,
    check_round,
    endpoints,
    plan,
    slots_of,
)
from tests.support import chat, run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

AT_ONCE = 64
#: Growth over the second half that may be chance: the allocator's arenas, and cancelled timers, which asyncio keeps
#: until half of all are (one object for ten calls would be seen).
RSS_TOLERANCE_KIB = 4096
OBJECTS_TOLERANCE = 400


class Soak:
    """What both variants keep, and ask at the end of a round."""

    def __init__(self, server: Server, actions: dict[str, Any]) -> None:
        self.server = server
        self.endpoints = endpoints(server.url)
        self.slots = slots_of(self.endpoints)
        self.ledger = Ledger()
        self.spans = Spans()
        self.totals = Totals()
        self.got: dict[int, str] = {}
        self.surprises: list[str] = []
        self.now = self.most = 0
        self.memory: list[Memory] = []
        self._actions = actions
        self._before = left_of_calls()  # by other tests

    def plans(self, first: int, count: int) -> list[Plan]:
        return [plan(number, self._actions) for number in range(first, first + count)]

    def begin(self, one: Plan) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        self.got[one.number] = "unborn"

    def end(self, one: Plan, got: str | None, error: BaseException | None) -> None:
        self.now -= 1
        if error is not None:
            self.surprises.append(f"{one}: {error!r}")
        elif got is not None:
            self.got[one.number] = got

    def over(self, manager: ConnectionManager, born: int) -> bool:
        """Nothing is under way on our side, and its last bytes are with the kernel."""
        return (
            not held(manager, self.slots)
            and len(self.ledger.timelines) == born
            and sockets_to(self.server.port) == open_connections(manager)
        )

    def check(self, manager: ConnectionManager, plans: list[Plan]) -> None:
        assert not self.surprises, f"{len(self.surprises)}:\n" + "\n".join(self.surprises[:10])
        assert self.spans.open == 0
        spans = self.spans.take()
        seen = self.server.quiet(connections=self.spans.dials["made"], open_now=open_connections(manager))
        check_round(plans, self.got, self.ledger, spans, seen, self.totals)
        alive = {member.id for member in members_of(manager)}
        known = self.totals.connections
        self.totals.connections = {name: number for name, number in known.items() if name in alive}
        self.got.clear()
        del seen, spans, known
        left = left_of_calls() - self._before
        assert not left, f"objects of calls that are over: {left}"
        self.memory.append(Memory.now())

    def report(self, calls: int, took_s: float) -> None:
        totals = self.totals
        left = sorted(totals.left_after_s) or [0.0]
        half = self.memory[len(self.memory) // 2 - 1]
        print(
            f"\n{calls} calls in {took_s:.1f} s, {self.most} at once, {totals.unborn} cancelled before their first step",
            f"attempts: {totals.attempts}, sent {totals.sent}, arrived {totals.arrived}, "
            f"unanswered {totals.unanswered}, stale {totals.stale}; calls that queued: {totals.queued}",
            f"connections: {dict(self.spans.dials)}, used {totals.used}; at the server: {dict(totals.server)}",
            f"the server saw the client leave after {left[len(left) // 2] * 1e3:.1f} ms (median), "
            f"{left[-1] * 1e3:.1f} ms (longest of {len(left)})",
            f"memory at 50 %: {half}; at 100 %: {self.memory[-1]}",
            "rounds: " + "; ".join(map(str, self.memory)),
            table(totals.ends, "ends:"),
            table(totals.outcomes, "by what the owner did:"),
            sep="\n",
        )

    def check_memory(self) -> None:
        """Flat over the second half. Two rounds on either side, since the last of a round may still be in a frame."""
        half = len(self.memory) // 2
        before, after = self.memory[half - 2 : half], self.memory[-2:]
        grown_kib = min(memory.rss_kib for memory in after) - max(memory.rss_kib for memory in before)
        grown = min(memory.objects for memory in after) - max(memory.objects for memory in before)
        assert grown_kib <= RSS_TOLERANCE_KIB, f"{grown_kib} KiB more"
        assert grown <= OBJECTS_TOLERANCE, f"{grown} objects more"


# --- async ------------------------------------------------------------------------------------------------------------


class Owner:
    """Makes calls, and does with them what the plan says."""

    def __init__(self, soak: Soak, manager: ConnectionManager) -> None:
        self._soak = soak
        self._manager = manager

    async def work(self, plans: Iterator[Plan]) -> None:
        loop = asyncio.get_running_loop()
        for one in plans:
            self._soak.begin(one)
            task = asyncio.create_task(self._one(one))
            alarm: asyncio.TimerHandle | None = None
            if one.action == "cancel":
                alarm = loop.call_later(one.delay_s, task.cancel)
            elif one.action == "cancel-at-once":
                task.cancel()
            await asyncio.wait([task])
            if alarm is not None:
                alarm.cancel()
            if task.cancelled():
                began = self._soak.got[one.number] == "born"
                self._soak.end(one, "cancelled" if began else None, None)
            elif (error := task.exception()) is not None:
                self._soak.end(one, None, error)
            else:
                self._soak.end(one, task.result(), None)
            del task

    async def _one(self, one: Plan) -> str:
        self._soak.got[one.number] = "born"
        try:
            async with asyncio.timeout(one.delay_s if one.action == "timeout" else None):
                return await self._call(one)
        except spanwire.SpanwireError as error:
            return type(error).__name__
        except Leaving:
            return "left"
        except TimeoutError:
            if one.action != "timeout":
                raise
            return "cancelled"

    async def _call(self, one: Plan) -> str:
        endpoint = self._soak.endpoints[one.where]
        if not one.streamed:
            check_reply(one, await self._manager.complete(endpoint, chat(one.model), timeouts=one.timeouts))
            return DONE
        stream = self._manager.stream(endpoint, chat(one.model), timeouts=one.timeouts)
        if one.action in {"drop", "drop-ring"}:
            await stream.__aenter__()
            if not await self._some(stream, one.after):
                return DONE
            if one.action == "drop-ring":
                ring: list[Any] = [stream]
                ring.append(ring)
            return "dropped"
        if one.action == "aclose-elsewhere":
            closer = asyncio.create_task(self._close_later(stream, one.delay_s))
            try:
                async with stream:
                    async for _ in stream:
                        pass
            finally:
                closer.cancel()
                await asyncio.wait([closer])
            return DONE
        if one.action == "generator":
            return await self._leave_a_generator(stream, one)
        async with stream:
            return await self._in_block(stream, one)

    async def _in_block(self, stream: Stream, one: Plan) -> str:
        if one.action in {"break", "raise", "aclose"}:
            if not await self._some(stream, one.after):
                return DONE
            if one.action == "raise":
                raise Leaving
            if one.action == "aclose":
                await stream.aclose()
                assert [chunk async for chunk in stream] == []
            return "left"
        if one.action == "poll":
            await self._poll(stream)
        else:
            async for _ in stream:
                if one.action == "slowly":
                    await asyncio.sleep(one.delay_s / 100)
        check_reply(one, stream.reply)
        return DONE

    @staticmethod
    async def _some(stream: Stream, count: int) -> bool:
        """Read so many chunks. False if the stream ended before that."""
        for _ in range(count):
            if await anext(stream, None) is None:
                return False
        return True

    @staticmethod
    async def _poll(stream: Stream) -> None:
        while True:
            try:
                async with asyncio.timeout(0.003):
                    await anext(stream)
            except TimeoutError:
                continue
            except StopAsyncIteration:
                return

    @staticmethod
    async def _close_later(stream: Stream, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        await stream.aclose()

    @staticmethod
    async def _leave_a_generator(stream: Stream, one: Plan) -> str:
        """Break out of an async generator around the stream, which asyncio closes later, in a task of its own."""

        async def texts() -> AsyncGenerator[str, None]:
            async with stream:
                async for chunk in stream:
                    yield chunk.text

        number = 0
        async for _ in texts():
            number += 1
            if number > one.after:
                return "left"
        return DONE


async def soak_async(server: Server, rounds: int, size: int) -> Soak:
    soak = Soak(server, ASYNC_ACTIONS)
    threads = set(threading.enumerate())
    began_s = time.monotonic()
    async with ConnectionManager(plugins=[soak.ledger], telemetry=soak.spans.telemetry()) as manager:
        owner = Owner(soak, manager)
        await manager.warm(soak.endpoints["free"])  # and with it the guard, which the first call would await
        for number in range(rounds):
            plans = soak.plans(number * size, size)
            waiting = iter(plans)
            await asyncio.gather(*(owner.work(waiting) for _ in range(AT_ONCE)))
            gc.collect()  # the rings
            born = sum(got != "unborn" for got in soak.got.values())
            await until(
                lambda born=born: soak.over(manager, born),  # type: ignore[misc]
                lambda: (
                    f"{held(manager, soak.slots)}, {len(soak.ledger.timelines)} ended, {sockets_to(server.port)} "
                    f"sockets, {open_connections(manager)} connections, {soak.surprises[:3]}"
                ),
            )
            soak.check(manager, plans)
            await until(lambda: asyncio.all_tasks() == {asyncio.current_task()}, asyncio.all_tasks)
    assert manager._states == {}
    await until(lambda: sockets_to(server.port) == 0, lambda: sockets_to(server.port))
    assert server.quiet(connections=soak.spans.dials["made"], open_now=0) == []
    assert set(threading.enumerate()) == threads
    soak.report(rounds * size, time.monotonic() - began_s)
    return soak


# --- sync -------------------------------------------------------------------------------------------------------------


class SyncOwner:
    """The same on threads."""

    def __init__(self, soak: Soak, manager: SyncConnectionManager) -> None:
        self._soak = soak
        self._manager = manager
        self._lock = threading.Lock()

    def work(self, plans: Iterator[Plan]) -> None:
        while True:
            with self._lock:
                one = next(plans, None)
                if one is None:
                    return
                self._soak.begin(one)
            got: str | None = None
            caught: BaseException | None = None
            try:
                got = self._call(one)
            except spanwire.SpanwireError as error:
                got = type(error).__name__
            except Leaving:
                got = "left"
            except BaseException as error:  # noqa: BLE001 - told at the end of the round
                caught = error
            with self._lock:
                self._soak.end(one, got, caught)

    def _call(self, one: Plan) -> str:
        endpoint = self._soak.endpoints[one.where]
        if not one.streamed:
            check_reply(one, self._manager.complete(endpoint, chat(one.model), timeouts=one.timeouts))
            return DONE
        stream = self._manager.stream(endpoint, chat(one.model), timeouts=one.timeouts)
        if one.action in {"drop", "drop-ring"}:
            stream.__enter__()
            if not self._some(stream, one.after):
                return DONE
            if one.action == "drop-ring":
                ring: list[Any] = [stream]
                ring.append(ring)
            return "dropped"
        if one.action == "aclose-elsewhere":
            closer = threading.Timer(one.delay_s, stream.close)
            closer.start()
            try:
                with stream:
                    for _ in stream:
                        pass
            finally:
                closer.cancel()
                closer.join()
            return DONE
        with stream:
            if one.action in {"break", "raise", "aclose"}:
                if not self._some(stream, one.after):
                    return DONE
                if one.action == "raise":
                    raise Leaving
                if one.action == "aclose":
                    stream.close()
                return "left"
            for _ in stream:
                pass
            check_reply(one, stream.reply)
        return DONE

    @staticmethod
    def _some(stream: SyncStream, count: int) -> bool:
        return all(next(stream, None) is not None for _ in range(count))


def soak_sync(server: Server, rounds: int, size: int, at_once: int) -> Soak:
    soak = Soak(server, SYNC_ACTIONS)
    loop = _loop_thread().loop
    threads = set(threading.enumerate())
    began_s = time.monotonic()

    async def settle(born: int) -> None:
        await until(
            lambda: soak.over(manager._manager, born),
            lambda: (
                f"{held(manager._manager, soak.slots)}, {len(soak.ledger.timelines)} of {born} ended, "
                f"{sockets_to(server.port)} sockets, {open_connections(manager._manager)} connections"
            ),
        )

    with SyncConnectionManager(plugins=[soak.ledger], telemetry=soak.spans.telemetry()) as manager:
        owner = SyncOwner(soak, manager)
        manager.warm(soak.endpoints["free"])
        for number in range(rounds):
            plans = soak.plans(1_000_000 + number * size, size)
            waiting = iter(plans)
            workers = [threading.Thread(target=owner.work, args=(waiting,)) for _ in range(at_once)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            del workers
            gc.collect()
            _loop_thread().call(settle, size)
            soak.check(manager._manager, plans)
    assert manager._manager._states == {}
    assert server.quiet(connections=soak.spans.dials["made"], open_now=0) == []
    assert sockets_to(server.port) == 0
    assert asyncio.all_tasks(loop) == set()
    assert set(threading.enumerate()) == threads
    soak.report(rounds * size, time.monotonic() - began_s)
    return soak


# --- the tests --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def serving(caplog: pytest.LogCaptureFixture) -> Iterator[Server]:
    caplog.set_level(logging.WARNING)
    with Server() as server:
        yield server.start()
    assert caplog.records == []


def run_async(server: Server, rounds: int, size: int) -> Soak:
    return run(lambda: soak_async(server, rounds, size))


def descriptors() -> Counter[str]:
    return Counter(
        "socket" if str(link).startswith("socket:") else str(link)
        for link in (entry.readlink() for entry in Path("/proc/self/fd").iterdir() if entry.exists())
    )


def test_a_few_hundred_calls(caplog: pytest.LogCaptureFixture) -> None:
    with serving(caplog) as server:
        soak = run_async(server, 2, 250)
    assert soak.most == AT_ONCE


def test_a_few_hundred_calls_on_threads(caplog: pytest.LogCaptureFixture) -> None:
    with serving(caplog) as server:
        soak = soak_sync(server, 2, 100, 16)
    assert soak.most == 16


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_ten_thousand_calls(caplog: pytest.LogCaptureFixture) -> None:
    with serving(caplog) as server:
        soak = run_async(server, 10, 1000)
    assert soak.most == AT_ONCE
    assert soak.totals.queued
    assert {"QueueTimeout", "QueueFull", "abandoned", "cancelled", "closed_by_caller"} <= set(soak.totals.ends)
    soak.check_memory()


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_two_thousand_calls_on_threads(caplog: pytest.LogCaptureFixture) -> None:
    with serving(caplog) as server:
        soak = soak_sync(server, 10, 200, 64)
    soak.check_memory()
