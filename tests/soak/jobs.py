"""A crowd of jobs whose submitters and receiver are killed over and over, and the count of what became of them.

Every process here is a real one. The job server is the loopback server's, with its own log of what it took and delivered; a
submitter writes each job's id down before the next one; the receiver is ``spanwire receive``.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

import spanwire
from spanwire.errors import JobError
from spanwire.jobs import runner as jobs_runner
from spanwire.jobs.contract import TERMINAL, Store
from spanwire.jobs.stores import open_store

__all__ = ["Outcome", "crowd"]

_CALL = spanwire.Call.chat("m", [{"role": "user", "content": "Say hello"}])
GROUP = "crowd"
FAULTS = {"duplicate": 0.05, "lose": 0.05, "reorder": 0.02}
_UNSIGNED = "generic"


def free_port() -> int:
    """One that nothing listens on now: the receiver comes back to it."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@dataclass
class Outcome:
    """What became of a crowd of jobs."""

    states: Counter[str] = field(default_factory=Counter)
    resolved_by: Counter[str] = field(default_factory=Counter)
    flags: Counter[str] = field(default_factory=Counter)
    said: set[str] = field(default_factory=set)
    stored: set[str] = field(default_factory=set)
    #: By the submitters' logs: how often each job was resolved, over all processes.
    resolutions: Counter[str] = field(default_factory=Counter)
    log: Counter[str] = field(default_factory=Counter)
    served: set[str] = field(default_factory=set)
    kills: int = 0
    seconds: float = 0.0

    def check(self, jobs: int, kills: int) -> None:
        """Every job that was ever written down is in the store, has a result, and was resolved by one process, once."""
        assert self.kills == kills
        assert len(self.stored) >= jobs
        assert self.said <= self.stored
        assert self.states == {"succeeded": len(self.stored)}
        # A process may be killed between its compare-and-set and its word about it: such a job has none; none has two.
        assert max(self.resolutions.values()) == 1
        assert len(self.stored) - len(self.resolutions) <= 64 * (kills + 1)
        # The server has worked on each: on some twice, where nobody knew whether it had been taken.
        assert self.stored <= self.served
        # A short run is for the most part one in which somebody starts again, and is asked for meanwhile.
        assert self.resolved_by["webhook"] > (self.resolved_by["poll"] if jobs >= 2_000 else jobs // 5)


class Crew:
    """The processes around one store: two kinds of them are killed, and come back."""

    def __init__(self, folder: Path, store: str, jobs: int, *, submitters: int, receivers: int, seed: int) -> None:
        self.folder, self.store, self.jobs = folder, store, jobs
        options = {**FAULTS, "log": str(folder / "server.log"), "speed": 50.0, "seed": seed}
        self._server, self.url = _server(options)
        self._ports = [free_port() for _ in range(receivers)]
        self.balancer = Balancer(self._ports)
        self.receivers = [_receiver(store, port) for port in self._ports]
        for port in self._ports:
            _listening(port)
        self._share = [jobs // submitters + (number < jobs % submitters) for number in range(submitters)]
        self.submitters = [self._submitter(number) for number in range(submitters)]

    def written(self) -> int:
        """How many jobs the submitters have said."""
        return sum(len(_lines(self.log(number))) for number in range(len(self._share)))

    def log(self, number: int) -> Path:
        """Where a submitter says its jobs' ids."""
        return self.folder / f"submitted-{number}"

    def kill_submitter(self, number: int) -> None:
        _kill(self.submitters[number])
        self.submitters[number] = self._submitter(number)

    def kill_receiver(self, number: int, pause_s: float) -> None:
        _kill(self.receivers[number])
        time.sleep(pause_s)
        self.receivers[number] = _receiver(self.store, self._ports[number])

    @property
    def _all(self) -> list[subprocess.Popen[Any]]:
        return [*self.submitters, *self.receivers, self._server]

    def check(self) -> None:
        """Nobody has ended by itself."""
        for process in self._all:
            assert process.poll() is None, f"a process has ended by itself: {process.args!r}, {process.returncode}"

    def close(self) -> None:
        for process in self._all:
            _kill(process)
        self.balancer.close()

    def _submitter(self, number: int) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "tests.soak.jobs", str(self.folder), self.store, self.url]
        return subprocess.Popen([*words, self.balancer.url, str(number), str(self._share[number])])


class Balancer:
    """What stands before several receivers: a connection goes to one of those that take it."""

    def __init__(self, ports: list[int]) -> None:
        self._ports, self._next = ports, 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._accepted, "127.0.0.1", 0, backlog=1024), self._loop
        ).result()
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.CancelledError):
            for _ in self._ports:
                self._next += 1
                try:
                    back, to = await asyncio.open_connection("127.0.0.1", self._ports[self._next % len(self._ports)])
                except OSError:
                    continue
                try:
                    await asyncio.gather(_pour(reader, to), _pour(back, writer))
                finally:
                    to.close()
                break
        writer.close()

    def close(self) -> None:
        async def end() -> None:
            self._server.close()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    finally:
        with contextlib.suppress(OSError, RuntimeError):
            writer.write_eof()


def crowd(
    folder: Path,
    jobs: int,
    kills: int,
    *,
    store: str | None = None,
    submitters: int = 1,
    receivers: int = 1,
    restart: Callable[[], None] | None = None,
    seed: int = 5,
    limit_s: float = 300.0,
) -> Outcome:
    """Have so many jobs submitted and resolved, by processes of which so many are killed with SIGKILL.

    Args:
        store: its URL; default: an SQLite file in the folder.
        restart: called once in the middle: takes the store's server down and brings it back.
    """
    dice, begin = random.Random(seed), time.monotonic()
    url = store if store is not None else f"sqlite:///{folder}/jobs.db"
    opened = open_store(url)
    outcome = Outcome()
    crew = Crew(folder, url, jobs, submitters=submitters, receivers=receivers, seed=seed)
    try:
        kill_after = [jobs * (n + 1) // (kills + 1) for n in range(kills)]
        while True:
            written = crew.written()
            if restart is not None and written >= jobs // 2:
                restart()
                restart = None
            if outcome.kills < kills and written >= kill_after[outcome.kills]:
                if outcome.kills % 2 == 0:
                    crew.kill_submitter(dice.randrange(submitters))
                else:
                    crew.kill_receiver(dice.randrange(receivers), dice.uniform(0.0, 0.3))
                outcome.kills += 1
                continue
            still_open = opened.open_jobs()
            if outcome.kills == kills and written >= jobs and not still_open:
                break
            crew.check()
            if time.monotonic() - begin > limit_s:
                raise AssertionError(f"{still_open} jobs are open after {limit_s} s, {written} were submitted")
            time.sleep(0.05)
    finally:
        crew.close()
    outcome.seconds = time.monotonic() - begin
    try:
        for number in range(submitters):
            outcome.said.update(_lines(crew.log(number)))
            _count(outcome, opened, f"{GROUP}-{number}")
        outcome.resolutions = Counter(_lines(folder / "resolved"))
        assert opened.open_jobs() == 0
        # What came again while the last submitter was killed is of a job that has ended.
        for _, delivery in opened.unapplied():
            ended = opened.get(delivery.job) if delivery.job is not None else None
            assert ended is not None
            assert ended.state in TERMINAL
    finally:
        opened.close()
    for line in (folder / "server.log").read_bytes().splitlines():
        said = msgspec.json.decode(line)
        outcome.log[said.get("event", said.get("what", "?"))] += 1
        if own := said.get("own"):
            outcome.served.add(own.rpartition(".")[0] or own)
    return outcome


def _count(outcome: Outcome, store: Store, group: str) -> None:
    after = (0.0, "")
    while rows := store.completed(group, after):
        after = (rows[-1].resolved_s, rows[-1].id)
        for row in rows:
            assert row.state in TERMINAL
            outcome.stored.add(row.id)
            outcome.states[row.state] += 1
            outcome.resolved_by[row.resolved_by] += 1
            outcome.flags.update(row.flags)
            if row.state == "succeeded":
                assert store.body(row.result)


def _lines(path: Path) -> list[str]:
    """Whole lines only: the last one may have been cut."""
    return [line for line in path.read_text().split("\n")[:-1] if len(line) == 36] if path.exists() else []


def _kill(process: subprocess.Popen[Any]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _server(options: dict[str, Any]) -> tuple[subprocess.Popen[str], str]:
    words = [sys.executable, "-m", "spanwire.testing", "--part", "webhook", "--tokens", "2"]
    for name, value in options.items():
        words += ["--option", f"{name}={msgspec.json.encode(value).decode()}"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().split()[0]


def _receiver(store: str, port: int) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-c", "from spanwire.cli import main; main()", "receive", "--store", store]
    return subprocess.Popen([*words, "--port", str(port), "--unsigned", _UNSIGNED], stderr=subprocess.DEVNULL)


def _listening(port: int, limit_s: float = 30.0) -> None:
    """Wait until somebody does."""
    until_s = time.monotonic() + limit_s
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        assert time.monotonic() < until_s, f"nobody listens on port {port}"
        time.sleep(0.02)


async def _submit(folder: Path, store: str, url: str, public_url: str, number: int, jobs: int) -> None:
    """Submit what the logs say is missing, and look after all of it until killed."""
    jobs_runner._LEASE_S = 3.0  # a test has less patience with the dead
    endpoint = spanwire.Endpoint(
        url,
        transport="webhook",
        dialect="generic",
        options={"store": store, "public_url": public_url, "grace_s": 1.0, "poll_after_s": 1.0, "poll_share": 1.0},
        limits=spanwire.Limits(max_concurrent=16),
    )
    group = f"{GROUP}-{number}"
    submitted, resolved = folder / f"submitted-{number}", folder / "resolved"
    with submitted.open("a", buffering=1) as said, resolved.open("a", buffering=1) as ended:
        async with spanwire.ConnectionManager() as manager:
            runner = await manager.jobs.runner(manager.jobs._source(endpoint, None))
            tell = runner._tell.resolved

            def note(row: Any) -> None:
                ended.write(row.id + "\n")
                tell(row)

            runner._tell.resolved = note  # type: ignore[method-assign]
            # What was stored by one that was killed before it could say so is a job too.
            known = set(_lines(submitted))
            for job_id in await asyncio.to_thread(_all_ids, runner.store, group):
                if job_id not in known:
                    known.add(job_id)
                    said.write(job_id + "\n")
            missing = jobs - len(known)

            async def some() -> None:
                nonlocal missing
                while missing > 0:
                    missing -= 1
                    try:
                        job = await manager.submit(endpoint, _CALL, group=group)
                    except JobError as error:  # the store is down for a moment
                        if not error.retryable:
                            raise
                        await asyncio.sleep(0.2)
                        missing += 1
                        continue
                    said.write(job.id + "\n")

            await asyncio.gather(*(some() for _ in range(16)))
            await asyncio.Event().wait()


def _all_ids(store: Store, group: str) -> list[str]:
    found = [row.id for row in store.due(float("inf"), 1_000_000) if row.group == group]
    after = (0.0, "")
    while rows := store.completed(group, after):
        after = (rows[-1].resolved_s, rows[-1].id)
        found += [row.id for row in rows]
    return found


if __name__ == "__main__":
    _, at, *texts = sys.argv
    asyncio.run(_submit(Path(at), texts[0], texts[1], texts[2], int(texts[3]), int(texts[4])))
