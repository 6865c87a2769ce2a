"""A server that is killed and started again, over and over, under 32 streams that call again and again.

``SPANWIRE_SOAK_S`` is how long, ``SPANWIRE_SOAK_SEED`` makes other times and calls.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import random
import sys
import threading
import time
from array import array
from bisect import bisect_right
from collections import Counter
from pathlib import Path

import pytest

import spanwire
from spanwire.admission import slots_for
from spanwire.manager import ConnectionManager
from spanwire.timeline import AttemptRecord, Timeline
from tests.soak.audit import Ledger, Memory, Spans, held, left_of_calls, open_connections, sockets_to, table, until
from tests.soak.server import PACED, Server, port_for_restarts
from tests.soak.workload import SEED
from tests.support import assert_adds_up, chat, run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

DURATION_S = float(os.environ.get("SPANWIRE_SOAK_S", "600"))
STREAMS = 32
RETRIES = spanwire.Retries(max_attempts=4, base_s=0.1, max_wait_s=0.4)
TIMEOUTS = spanwire.Timeouts(connect_s=2.0, first_content_s=2.0, idle_s=2.0, total_s=3.0)
#: For what waits in a queue of the machine, not of ours: a loop's turn, a process's start.
SLACK_S = 1.0
RSS_TOLERANCE_KIB = 4096
OBJECTS_TOLERANCE = 400


class Reaper(threading.Thread):
    """Kills the server, and starts the next one, which has been made ready before, on the same port.

    Attributes:
        ups_ns, kills_ns, downs_ns: of each server, in order: it listened, it was about to be killed, it was dead.
        over: set when the time is up, or when the test has failed.
    """

    def __init__(self, port: int, log: Path, duration_s: float, up_s: tuple[float, float], down_s: float) -> None:
        super().__init__(name="reaper")
        self.ups_ns: list[int] = []
        self.kills_ns: list[int] = []
        self.downs_ns: list[int] = []
        self.over = threading.Event()
        self._port = port
        self._log = log
        self._duration_s = duration_s
        self._up_s = up_s
        self._down_s = down_s
        self.server = self._start(Server())

    def _start(self, server: Server) -> Server:
        server.start(self._port, self._log)
        self.ups_ns.append(server.at_ns)
        return server

    def run(self) -> None:
        dice = random.Random(SEED)
        end_s = time.monotonic() + self._duration_s
        try:
            while True:
                following = Server()
                for_s = min(dice.uniform(*self._up_s), end_s - time.monotonic())
                if self.over.wait(max(for_s, 0.0)) or time.monotonic() >= end_s:
                    following.kill()
                    return
                self.kills_ns.append(time.perf_counter_ns())
                self.server.kill()
                self.downs_ns.append(time.perf_counter_ns())
                self.server = following
                self.over.wait(dice.choice([0.0, dice.uniform(0, self._down_s)]))
                self._start(following)
        finally:
            self.over.set()

    def explains(self, begin_ns: int, end_ns: int) -> bool:
        """Whether something that failed in this time did so because the server was killed, or not there yet."""
        before = bisect_right(self.kills_ns, begin_ns)
        if bisect_right(self.kills_ns, end_ns) > before:
            return True
        return len(self.ups_ns) <= before or begin_ns < self.ups_ns[before]


class Restarts:
    """The streams, and what became of them. Attempts are looked at when their call ends, and then only counted."""

    def __init__(self, reaper: Reaper) -> None:
        self.reaper = reaper
        self.ledger = Ledger()
        self.spans = Spans()
        self.endpoint = spanwire.Endpoint(
            f"http://127.0.0.1:{reaper.server.port}/v1",
            proxy=None,
            limits=spanwire.Limits(max_concurrent=STREAMS * 3 // 4),
            retries=RETRIES,
            timeouts=TIMEOUTS,
        )
        self.ends = Counter[str]()
        self.attempts = Counter[tuple[str, str]]()
        self.counts = Counter[str]()
        self.longest_s = 0.0
        self.span_count = 0
        self.unexplained: list[str] = []
        self.memory: list[Memory] = []
        self.numbers = itertools.count()
        self.recovered_s = array("d")  # from a restart to a stream's next content
        self.recovered = Counter[int]()  # streams, by restart
        self._recovered: dict[tuple[int, int], int] = {}  # not counted yet
        self._met = [0] * STREAMS  # the last server that each stream has had content from
        self.reused_after_stale = 0

    async def stream(self, worker: int, manager: ConnectionManager) -> None:
        dice = random.Random(f"{SEED}:{worker}")
        while not self.reaper.over.is_set():
            model = f"{dice.choices(['slow', 'ok', 'late-end', 'close'], [6, 2, 1, 1])[0]}:{next(self.numbers)}"
            leave_after = dice.randrange(20) if dice.random() < 0.1 else None
            stream = manager.stream(self.endpoint, chat(model))
            try:
                async with asyncio.timeout((TIMEOUTS.total_s or 0) + 2 * SLACK_S):  # else it hangs, and we fail
                    async with stream:
                        number = 0
                        async for _ in stream:
                            number += 1
                            if number == leave_after:
                                break
            except spanwire.SpanwireError as error:
                self._count(worker, stream.timeline, error)
            except BaseException:  # such as the limit above
                self.reaper.over.set()
                raise
            else:
                if stream.timeline.outcome == "completed" and model.startswith("slow"):
                    assert stream.reply.text == "".join(PACED)
                self._count(worker, stream.timeline, None)
            del stream

    def _count(self, worker: int, timeline: Timeline, error: spanwire.SpanwireError | None) -> None:
        assert_adds_up(timeline)
        self.longest_s = max(self.longest_s, timeline.total_s)
        end = type(error).__name__ if error is not None else timeline.outcome
        if isinstance(error, spanwire.errors.CallTimeout):
            end += f" {error.limit}"
        self.ends[end] += 1
        assert (timeline.error_type is None) == (error is None)
        attempts = timeline._record.attempts
        for number, attempt in enumerate(attempts):
            self._count_attempt(worker, attempt)
            if number and _stale(attempts[number - 1]) and attempt.connection is not None and attempt.connection.reused:
                self.reused_after_stale += 1
        assert len(attempts) <= RETRIES.max_attempts + 1

    def _count_attempt(self, worker: int, attempt: AttemptRecord) -> None:
        marks = attempt.marks
        self.counts["attempts"] += 1
        self.counts["sent"] += bool(marks.sent_ns)
        self.counts["answered"] += bool(marks.first_byte_ns)
        self.counts["stale"] += _stale(attempt)
        self.attempts[attempt.outcome, attempt.error_type or ""] += 1
        if attempt.outcome in ("error", "timeout") and not self.reaper.explains(attempt.begin_ns, attempt.end_ns):
            self.unexplained.append(f"{attempt.outcome} {attempt.error_type} {attempt.served}")
        if marks.first_content_ns:
            server = bisect_right(self.reaper.downs_ns, attempt.leased_ns)  # the others were dead by then
            if server > self._met[worker]:
                self._met[worker] = server
                self._recovered[worker, server] = marks.first_content_ns

    def sum_up(self) -> None:
        """Turn what was collected into numbers, so that the test does not grow."""
        self.ledger.timelines.clear()
        self.span_count += sum(map(len, self.spans.take().values()))
        ups_ns = self.reaper.ups_ns
        for (worker, server), at_ns in list(self._recovered.items()):
            if server < len(ups_ns):
                del self._recovered[worker, server]
                self.recovered[server] += 1
                self.recovered_s.append((at_ns - ups_ns[server]) / 1e9)


def _stale(attempt: AttemptRecord) -> bool:
    use = attempt.connection
    return (
        attempt.error_type == "ConnectionFailed" and use is not None and use.reused and not attempt.marks.first_byte_ns
    )


async def watch(restarts: Restarts, duration_s: float) -> None:
    """Sum up now and then, and measure the memory at the half."""
    begin_s = time.monotonic()
    while not restarts.reaper.over.is_set():
        await asyncio.sleep(0.2)
        restarts.sum_up()
        if not restarts.memory and time.monotonic() - begin_s >= duration_s / 2:
            restarts.memory.append(Memory.now())


async def soak(reaper: Reaper, duration_s: float) -> Restarts:
    restarts = Restarts(reaper)
    before = left_of_calls()
    slots = slots_for(restarts.endpoint)
    assert slots is not None
    port = reaper.server.port
    async with ConnectionManager(plugins=[restarts.ledger], telemetry=restarts.spans.telemetry()) as manager:
        reaper.start()
        watcher = asyncio.create_task(watch(restarts, duration_s))
        await asyncio.gather(*(restarts.stream(worker, manager) for worker in range(STREAMS)))
        await watcher
        reaper.join()
        await until(
            lambda: not held(manager, [slots]) and sockets_to(port) == open_connections(manager),
            lambda: (held(manager, [slots]), sockets_to(port), open_connections(manager)),
        )
        restarts.sum_up()
        restarts.memory.append(Memory.now())
        # All slots and connections can be had at once.
        count = slots._admission.max_concurrent
        replies = await asyncio.gather(
            *(manager.complete(restarts.endpoint, chat(f"slow:{next(restarts.numbers)}")) for _ in range(count))
        )
        for reply in replies:
            assert reply.timeline is not None
            assert "queue" not in reply.timeline.segments
            restarts._count(0, reply.timeline, None)
        del replies, reply
        await until(lambda: asyncio.all_tasks() == {asyncio.current_task()}, asyncio.all_tasks)
    assert manager._states == {}
    await until(lambda: sockets_to(port) == 0, lambda: sockets_to(port))
    restarts.sum_up()
    left = left_of_calls() - before
    assert not left, f"objects of calls that are over: {left}"
    return restarts


def check(restarts: Restarts, log: Path, *, took_s: float) -> None:
    reaper, counts = restarts.reaper, restarts.counts
    arrived = len(log.read_text().splitlines())
    calls = sum(restarts.ends.values())
    # One back-off and the machine's own delays; where the next kill came before that, a stream may have missed its turn.
    limit_s = RETRIES.max_wait_s + SLACK_S
    lives = itertools.zip_longest(reaper.ups_ns, reaper.kills_ns, fillvalue=time.perf_counter_ns())
    missing = {
        server: STREAMS - restarts.recovered[server]
        for server, (up_ns, kill_ns) in enumerate(lives)
        if server and kill_ns - up_ns > (limit_s + SLACK_S) * 1e9 and restarts.recovered[server] < STREAMS
    }
    recovered_s = sorted(restarts.recovered_s)
    print(
        f"\n{took_s:.0f} s, {len(reaper.kills_ns)} kills, {calls} calls on {STREAMS} streams, "
        f"longest {restarts.longest_s:.3f} s",
        f"attempts {counts['attempts']}, sent {counts['sent']}, arrived {arrived}, answered {counts['answered']}, "
        f"stale {counts['stale']} (then again on a used connection: {restarts.reused_after_stale})",
        f"connections {dict(restarts.spans.dials)}, spans {restarts.span_count}",
        f"content again after a restart, for each stream: median {recovered_s[len(recovered_s) // 2]:.3f} s, "
        f"99 % {recovered_s[len(recovered_s) * 99 // 100]:.3f} s, longest {recovered_s[-1]:.3f} s, of "
        f"{len(recovered_s)}; never: {missing}",
        f"failed although the server was up: {restarts.unexplained}",
        f"memory at 50 %: {restarts.memory[0]}; at 100 %: {restarts.memory[-1]}",
        table(restarts.ends, "ends:"),
        table(restarts.attempts, "attempts:"),
        sep="\n",
    )
    assert set(restarts.ends) <= {"completed", "closed_by_caller", "ConnectionFailed", "CallTimeout total_s"}
    assert restarts.longest_s <= (TIMEOUTS.total_s or 0) + SLACK_S
    assert counts["answered"] <= arrived <= counts["sent"]
    assert restarts.span_count == calls
    assert restarts.spans.open == 0
    assert not restarts.unexplained
    assert not missing
    assert recovered_s[-1] <= limit_s


def restart(tmp_path: Path, caplog: pytest.LogCaptureFixture, duration_s: float, up_s: tuple[float, float]) -> Restarts:
    caplog.set_level(logging.WARNING)
    log = tmp_path / "arrived"
    threads = set(threading.enumerate())
    began_s = time.monotonic()
    reaper = Reaper(port_for_restarts(), log, duration_s, up_s, down_s=0.6)
    try:
        restarts = run(lambda: soak(reaper, duration_s))
    finally:
        reaper.over.set()
        if reaper.is_alive():
            reaper.join()
        reaper.server.kill()
    check(restarts, log, took_s=time.monotonic() - began_s)
    assert set(threading.enumerate()) == threads
    assert caplog.records == []
    return restarts


def test_some_restarts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    restarts = restart(tmp_path, caplog, 4.0, (0.4, 1.0))
    assert restarts.reaper.kills_ns


@pytest.mark.soak
@pytest.mark.timeout(DURATION_S + 120)
def test_restarts_for_ten_minutes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    restarts = restart(tmp_path, caplog, DURATION_S, (0.3, 4.0))
    half, end = restarts.memory
    assert end.rss_kib - half.rss_kib <= RSS_TOLERANCE_KIB
    assert end.objects - half.objects <= OBJECTS_TOLERANCE
