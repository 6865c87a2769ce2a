"""One client, one workload, one process: writes a line of JSON. Started by processes.py.

Usage: ``clients.py CLIENT WORKLOAD PORT [--loop asyncio|uvloop] [--core CORE] [--quick]``

A workload's function gets (client's name, load, base URL) and returns its figures; a row of workloads.py names it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import resource
import statistics
import sys
import time
import urllib.request
from array import array
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

if not __package__:  # started by its path
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.peers import PEERS, Client
from benchmarks.workloads import WORKLOADS, Load

Figures = dict[str, float]
#: A stream keeps pace if 99 of 100 of its tokens come within this, in milliseconds: one gap of its script.
PACE_MS = 20.0
#: How long a stream may take beyond its schedule before it is given up, in seconds.
GRACE_S = 3.0


def server_log(url: str) -> dict[str, Any]:
    """What the server saw since it was last asked."""
    with urllib.request.urlopen(url.removesuffix("/v1") + "/log") as response:
        log: dict[str, Any] = json.load(response)
    return log


def tokens_of(model: str) -> int:
    """How many tokens a script has."""
    return int(model.split("-")[1])


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below or at which a share of the values lie. They are sorted, and at least one."""
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


# ------------------------------------------------------------------------------------------------------------- memory


def _status_mib(key: str) -> float | None:
    """A line of Linux's own account of this process, in MiB; None elsewhere."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    (line,) = [line for line in status.read_text().splitlines() if line.startswith(f"{key}:")]
    return int(line.split()[1]) / 1024


def peak_rss_mib() -> float:
    """The most memory that this process had at once, in MiB."""
    peak = _status_mib("VmHWM")  # not getrusage: on Linux that begins with what our parent had when it started us
    if peak is not None:
        return peak
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 * 1024 if sys.platform == "darwin" else 1024)


def begin_peak() -> float:
    """Let the peak begin anew, where the system can; returns the memory now, in MiB."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    now = _status_mib("VmRSS")
    return peak_rss_mib() if now is None else now


# ---------------------------------------------------------------------------------------------------------- workloads


async def _connect(client: Client, streams: int) -> None:
    """Make room for that many streams."""
    await asyncio.gather(*[client.stream("m-2-0-1", None) for _ in range(streams)])


async def _all(load: Load, call: Callable[[], Awaitable[None]]) -> tuple[float, float]:
    """Make the calls of a load; returns CPU and wall time, in seconds."""
    todo = iter(range(load.calls))

    async def worker() -> None:
        for _ in todo:  # shared: whoever is free takes the next one
            await call()

    gc.collect()
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    await asyncio.gather(*[worker() for _ in range(load.at_once)])
    return time.process_time() - cpu_s, time.perf_counter() - wall_s


async def stream_tokens(name: str, load: Load, url: str) -> Figures:
    """CPU time for each token. Raises RuntimeError if a token is missing."""
    client = PEERS[name].client(url)
    tokens = 0

    async def call() -> None:
        nonlocal tokens
        seen = await client.stream(load.model, None)
        tokens += seen.tokens  # on a line of its own: `+=` reads its left side before an await on its right

    await _connect(client, load.at_once)
    await client.stream("m-200-0-1", None)  # and code
    cpu_s, wall_s = await _all(load, call)
    expected = load.calls * tokens_of(load.model)
    if tokens != expected:
        raise RuntimeError(f"{tokens} tokens came, {expected} were sent")
    return {"cpu_us_per_token": cpu_s / tokens * 1e6, "wall_s": wall_s}


async def call_unary(name: str, load: Load, url: str) -> Figures:
    """CPU time for each call."""
    client = PEERS[name].client(url)
    await asyncio.gather(*[client.unary() for _ in range(load.at_once)])
    cpu_s, wall_s = await _all(load, client.unary)
    return {"cpu_us_per_call": cpu_s / load.calls * 1e6, "wall_s": wall_s}


async def first_tokens(name: str, load: Load, url: str) -> Figures:
    """What the client adds to the first token: from the call to the server's reading it, and from its writing on."""
    client = PEERS[name].client(url)
    for number in range(5):
        await client.stream(load.model, f"warm{number}")
    server_log(url)
    times: dict[str, tuple[int, int]] = {}
    for number in range(load.calls):
        started_ns = time.monotonic_ns()
        times[f"u{number}"] = started_ns, (await client.stream(load.model, f"u{number}")).first_ns
    seen = server_log(url)["calls"]
    added_us = sorted(
        (seen[user][0] - started_ns + first_ns - seen[user][1]) / 1e3 for user, (started_ns, first_ns) in times.items()
    )
    return {"added_us_median": statistics.median(added_us), "added_us_p95": added_us[int(len(added_us) * 0.95) - 1]}


async def connections(name: str, load: Load, url: str) -> Figures:
    """Connections that calls in a row open; synchronous calls where the client has them."""
    peer = PEERS[name]
    server_log(url)
    if peer.sync is not None:
        stream = peer.sync(url)
        for _ in range(load.calls):
            stream(load.model)
    else:
        client = peer.client(url)
        for _ in range(load.calls):
            await client.stream(load.model, None)
    return {"connections": server_log(url)["connections"]}


class Delays:
    """What was added to each token of one stream: from the server's writing it to its being handed out.

    Both times are CLOCK_MONOTONIC of one machine. The token's text is the time of writing (scripts ``t-...``).
    """

    def __init__(self) -> None:
        self.added_us = array("i")
        self.last_ns = 0

    def take(self, text: str) -> None:
        """A token came."""
        written_ns = int(text)
        self.added_us.append((time.monotonic_ns() - written_ns) // 1000)
        self.last_ns = written_ns

    def give_up(self, tokens: int, gap_ns: int, now_ns: int, begun_ns: int) -> None:
        """Tokens that have not come are late by at least the time since they were due."""
        due_ns = (self.last_ns or begun_ns) + gap_ns
        for number in range(tokens - len(self.added_us)):
            self.added_us.append(max(now_ns - due_ns - number * gap_ns, 0) // 1000)


def _added(streams: Sequence[Delays]) -> Figures:
    ordered = sorted(us for stream in streams for us in stream.added_us)
    return {"added_ms_p50": percentile(ordered, 0.5) / 1e3, "added_ms_p99": percentile(ordered, 0.99) / 1e3}


async def keep_pace(name: str, load: Load, url: str) -> Figures:
    """How many of many streams keep pace, and what is added to a token. Not to the end, for a client far behind."""
    client = PEERS[name].client(url)
    assert client.follow is not None
    tokens, gap_ns = tokens_of(load.model), int(load.model.split("-")[2]) * 1000
    await _connect(client, load.at_once)
    streams = [Delays() for _ in range(load.calls)]
    server_log(url)
    gc.collect()
    begun_ns, cpu_s = time.monotonic_ns(), time.process_time()
    tasks = [asyncio.ensure_future(client.follow(load.model, stream.take)) for stream in streams]
    done, late = await asyncio.wait(tasks, timeout=(tokens + 1) * gap_ns / 1e9 + GRACE_S)
    cpu_s, now_ns = time.process_time() - cpu_s, time.monotonic_ns()
    for task in late:
        task.cancel()
    for task in done:
        task.result()
    log = await asyncio.to_thread(server_log, url)
    came = sum(len(stream.added_us) for stream in streams)
    for stream, task in zip(streams, tasks, strict=True):
        if task in late:
            stream.give_up(tokens, gap_ns, now_ns, begun_ns)
        elif len(stream.added_us) != tokens:
            raise RuntimeError(f"{len(stream.added_us)} tokens came, {tokens} were sent")
    pace_us = PACE_MS * 1e3
    return {
        "streams": load.calls,
        "keep_pace": sum(percentile(sorted(stream.added_us), 0.99) <= pace_us for stream in streams),
        **_added(streams),
        "came_share": came / (tokens * load.calls),
        "cpu_share": cpu_s / ((now_ns - begun_ns) / 1e9),
        "cpu_us_per_token": cpu_s / came * 1e6,
        "late_ms_p50": log["late_ms"]["p50"],
        "late_ms_p99": log["late_ms"]["p99"],
    }


async def stop_reading(name: str, load: Load, url: str) -> Figures:
    """The memory that a stream costs whose reader stops, and what becomes of others. It reads on in the end."""
    client = PEERS[name].client(url)
    assert client.follow is not None
    assert load.beside is not None
    await _connect(client, load.at_once + 1)
    gate, stopped, poured = asyncio.Event(), asyncio.Event(), 0

    def take(text: str) -> Awaitable[object] | None:
        nonlocal poured
        poured += 1
        if stopped.is_set():
            return None
        stopped.set()
        return gate.wait()

    gc.collect()
    before_mib = begin_peak()
    server_log(url)
    reading = asyncio.ensure_future(client.follow(load.beside, take))
    await stopped.wait()
    streams = [Delays() for _ in range(load.calls)]
    await asyncio.gather(*[client.follow(load.model, stream.take) for stream in streams])
    growth_mib = peak_rss_mib() - before_mib
    log = await asyncio.to_thread(server_log, url)
    gate.set()
    await reading
    if poured != tokens_of(load.beside):
        raise RuntimeError(f"{poured} tokens came, {tokens_of(load.beside)} were sent")
    return {"growth_mib": max(growth_mib, 0.0), "poured_mib": log["poured"] / 2**20, **_added(streams)}


# ------------------------------------------------------------------------------------------------------------ process


def allow_streams() -> None:
    """As many open files as we may have: often it is 1,024 to begin with, and a stream is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS says "unlimited" and means less
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def main() -> None:
    options = argparse.ArgumentParser(description="One client, one workload, one process.")
    options.add_argument("client", choices=PEERS)
    options.add_argument("workload", choices=[row.name for row in WORKLOADS.values() if row.measure])
    options.add_argument("port", type=int)
    options.add_argument("--loop", choices=["asyncio", "uvloop"], default="asyncio")
    options.add_argument("--core", type=int, help="run on this core only (Linux)")
    options.add_argument("--quick", action="store_true", help="a small part of the load")
    given = options.parse_args()
    if given.core is not None:
        os.sched_setaffinity(0, {given.core})
    allow_streams()
    row = WORKLOADS[given.workload]
    measure: Callable[[str, Load, str], Awaitable[Figures]] = globals()[row.measure]
    load = row.quick if given.quick else row.load

    async def work() -> Figures:
        return await measure(given.client, load, f"http://127.0.0.1:{given.port}/v1")

    if given.loop == "uvloop":
        import uvloop

        figures = uvloop.run(work())
    else:
        figures = asyncio.run(work())
    sys.stdout.write(json.dumps({**figures, "rss_mib": peak_rss_mib(), "at_once": load.at_once}) + "\n")
    sys.stdout.flush()
    os._exit(0)  # clients are left open: how they close is not what is measured, nor what they say if nobody does


if __name__ == "__main__":
    main()
