"""A crowd of jobs whose submitters and receiver are killed over and over, and the count of what became of them.

Every process here is a real one. The job server is the loopback server's, with its own log of what it took and delivered; a
submitter writes each job's id down before the next one; the receiver is ``spanwire receive``.
"""

from __future__ import annotations

import asyncio
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

import spanwire
from spanwire.jobs import runner as jobs_runner
from spanwire.jobs.contract import TERMINAL, JobRow, Store
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
        assert self.resolved_by["webhook"] > self.resolved_by["poll"]


def crowd(
    folder: Path, jobs: int, kills: int, *, seed: int = 5, limit_s: float = 300.0, store_url: str | None = None
) -> Outcome:
    """Have so many jobs submitted and resolved, by processes of which so many are killed with SIGKILL.

    ``store_url``: of an empty store; None for an SQLite file of its own.
    """
    dice, begin = random.Random(seed), time.monotonic()
    url_of_store, log = store_url or f"sqlite:///{folder}/jobs.db", folder / "server.log"
    open_store(url_of_store).close()
    options = {**FAULTS, "log": str(log), "speed": 50.0, "seed": seed}
    server, url = _server(options)
    port = free_port()
    receiver = _receiver(url_of_store, port)
    resolved_log, submitter_log = folder / "resolved", folder / "submitted"
    outcome, left, submitter = Outcome(), kills, None
    waiter = None
    try:
        kill_after = [int(jobs * (n + 1) / (kills + 1)) for n in range(kills)]
        while True:
            if submitter is None:
                submitter = _submitter(folder, url, port, jobs, url_of_store)
            store = open_store(url_of_store)
            written, still_open = len(_lines(submitter_log)), store.open_jobs(GROUP)
            done = 0 if still_open else len(list(_ended(store)))
            store.close()
            if left and written >= kill_after[kills - left]:
                # In turn: those who submit and resolve, then who receives.
                if (kills - left) % 2 == 0:
                    _kill(submitter)
                    submitter = None
                else:
                    _kill(receiver)
                    time.sleep(dice.uniform(0.0, 0.3))
                    receiver = _receiver(url_of_store, port)
                left -= 1
                outcome.kills += 1
                continue
            if not left and written >= jobs and not still_open and done >= jobs:
                break
            if submitter.poll() is not None:
                raise AssertionError(f"a submitter has ended by itself: {submitter.returncode}")
            if time.monotonic() - begin > limit_s:
                raise AssertionError(f"{still_open} jobs are open after {limit_s} s, {written} were submitted")
            time.sleep(0.05)
    finally:
        for process in (submitter, receiver, server, waiter):
            if process is not None:
                _kill(process)
    outcome.seconds = time.monotonic() - begin
    _count(outcome, url_of_store, submitter_log, resolved_log, log)
    return outcome


def _count(outcome: Outcome, store_url: str, submitted: Path, resolved: Path, log: Path) -> None:
    outcome.said = set(_lines(submitted))
    outcome.resolutions = Counter(_lines(resolved))
    store = open_store(store_url)
    for row in _ended(store):
        assert row.state in TERMINAL
        outcome.stored.add(row.id)
        outcome.states[row.state] += 1
        outcome.resolved_by[row.resolved_by] += 1
        outcome.flags.update(row.flags)
        if row.state == "succeeded":
            assert store.body(row.result)
    assert store.open_jobs() == 0
    # What came again while the last submitter was killed is of a job that has ended.
    for _, delivery in store.unapplied():
        ended = store.get(delivery.job) if delivery.job is not None else None
        assert ended is not None
        assert ended.state in TERMINAL
    store.close()
    for line in log.read_bytes().splitlines():
        said = msgspec.json.decode(line)
        outcome.log[said.get("event", said.get("what", "?"))] += 1
        if own := said.get("own"):
            outcome.served.add(own.rpartition(".")[0] or own)


def _ended(store: Store) -> Iterator[JobRow]:
    after = (0.0, "")
    while rows := store.completed(GROUP, after):
        after = (rows[-1].resolved_s, rows[-1].id)
        yield from rows


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


def _receiver(store_url: str, port: int) -> subprocess.Popen[bytes]:
    begin = [sys.executable, "-c", "from spanwire.cli import main; main()"]
    words = [*begin, "receive", "--store", store_url, "--port", str(port)]
    return subprocess.Popen([*words, "--unsigned", _UNSIGNED], stderr=subprocess.DEVNULL)


def _submitter(folder: Path, url: str, port: int, jobs: int, store_url: str) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "tests.soak.jobs", str(folder), url, str(port), str(jobs), store_url]
    return subprocess.Popen(words)


async def _submit(folder: Path, url: str, port: int, jobs: int, store_url: str) -> None:
    """Submit what the logs say is missing, and look after all of it until killed."""
    jobs_runner._LEASE_S = 3.0  # a test has less patience with the dead
    endpoint = spanwire.Endpoint(
        url,
        transport="webhook",
        dialect="generic",
        options={
            "store": store_url,
            "public_url": f"http://127.0.0.1:{port}",
            "grace_s": 1.0,
            "poll_after_s": 1.0,
            "poll_share": 1.0,
        },
        limits=spanwire.Limits(max_concurrent=16),
    )
    submitted, resolved = folder / "submitted", folder / "resolved"
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
            for job_id in await asyncio.to_thread(_all_ids, store_url):
                if job_id not in known:
                    known.add(job_id)
                    said.write(job_id + "\n")
            missing = jobs - len(known)

            async def some() -> None:
                nonlocal missing
                while missing > 0:
                    missing -= 1
                    job = await manager.submit(endpoint, _CALL, group=GROUP)
                    said.write(job.id + "\n")

            await asyncio.gather(*(some() for _ in range(16)))
            await asyncio.Event().wait()


def _all_ids(store_url: str) -> list[str]:
    store = open_store(store_url)
    rows = [*store.due(time.time() + 1e9, 1_000_000), *_ended(store)]  # each has a deadline
    store.close()
    return [row.id for row in rows]


if __name__ == "__main__":
    asyncio.run(_submit(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]))
