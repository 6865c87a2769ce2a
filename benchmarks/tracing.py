"""What tracing adds to a call, for each way of it: one table.

One process makes short unary calls, 64 at once, through managers that differ in their telemetry alone, in turn, so that a
machine that changes its pace does so for all. Time is the process's CPU time, with what the SDK does in its threads, and
until everything is exported (to an exporter that drops it: a real one's serialising is the application's). Of the rounds
the least is taken: what disturbs a run makes it longer.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from importlib import util
from pathlib import Path
from typing import NamedTuple

if not __package__:  # started by its path
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from opentelemetry.metrics import NoOpMeterProvider
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON
from opentelemetry.trace import NoOpTracerProvider

import spanwire
from benchmarks.peers import MESSAGES, PEERS
from benchmarks.processes import cores, note, serving

AT_ONCE = 64
#: The measure of the budget: tracing may cost half of what this client takes for a whole call.
MEASURE = "aiohttp"


class Drop(SpanExporter):
    """Takes spans and forgets them."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Nothing goes anywhere."""
        return SpanExportResult.SUCCESS


class Way(NamedTuple):
    """One way of making the calls."""

    name: str
    what: str
    call: Callable[[], Awaitable[None]]
    flush: Callable[[], object]


def way(name: str, what: str, url: str, *, traced: bool, counted: bool, sampled: bool = True, detail: str = "") -> Way:
    """Calls through a manager of its own, with an SDK of its own."""
    tracers = TracerProvider(sampler=ALWAYS_ON if sampled else ALWAYS_OFF)
    # The queue holds a whole round: what overflows would be dropped, which is cheaper than exporting it.
    tracers.add_span_processor(BatchSpanProcessor(Drop(), max_queue_size=1 << 16))
    telemetry = None
    if name != "off":
        telemetry = spanwire.Telemetry(
            tracer_provider=tracers if traced else NoOpTracerProvider(),
            meter_provider=MeterProvider() if counted else NoOpMeterProvider(),
            **({"detail": detail} if detail else {}),  # an older release has no such argument
        )
    manager = spanwire.ConnectionManager(telemetry=telemetry)
    endpoint = spanwire.Endpoint(url)
    call = spanwire.Call.chat("m", MESSAGES)

    async def once() -> None:
        await manager.complete(endpoint, call)

    return Way(name, what, once, tracers.force_flush)


def ways(url: str) -> list[Way]:
    found = [
        way("off", "`telemetry=None`", url, traced=False, counted=False),
        way("no SDK", "the OpenTelemetry API alone", url, traced=False, counted=False),
        way("metrics only", "three records", url, traced=False, counted=True),
        way("unsampled", "a sampler that drops, and metrics", url, traced=True, counted=True, sampled=False),
        way("flat", "one span, three records", url, traced=True, counted=True, detail="flat"),
        way("auto", "the default: ten calls a second in detail", url, traced=True, counted=True),
        way("full", "every call in detail", url, traced=True, counted=True, detail="full"),
    ]
    if util.find_spec(MEASURE) is not None:
        found.append(Way(MEASURE, "another client, untraced", PEERS[MEASURE].client(url).unary, lambda: None))
    return found


async def one_round(tried: Way, calls: int) -> float:
    """CPU time for each call, in microseconds."""
    todo = iter(range(calls))

    async def worker() -> None:
        for _ in todo:  # shared: whoever is free takes the next one
            await tried.call()

    gc.collect()
    cpu_s = time.process_time()
    await asyncio.gather(*[worker() for _ in range(AT_ONCE)])
    tried.flush()
    return (time.process_time() - cpu_s) / calls * 1e6


async def measure(url: str, *, rounds: int, calls: int) -> dict[str, tuple[str, float]]:
    """The least of the rounds for each way."""
    found: dict[str, tuple[str, float]] = {}
    tried = ways(url)
    for one in tried:
        await one_round(one, 4 * AT_ONCE)  # its connections, and code
    for number in range(rounds):
        for one in tried[number % 2 :: 2] + tried[1 - number % 2 :: 2]:
            taken = await one_round(one, calls)
            found[one.name] = one.what, min(taken, found.get(one.name, ("", taken))[1])
        note(f"round {number + 1} of {rounds}")
    return {one.name: found[one.name] for one in tried}


def table(found: dict[str, tuple[str, float]]) -> str:
    """Markdown."""
    off = found["off"][1]
    whole = found.get(MEASURE, ("", 0.0))[1]
    lines = [f"| tracing | | us per call | added | of {MEASURE} |", "| --- | --- | ---: | ---: | ---: |"]
    for name, (what, taken) in found.items():
        added = "" if name in ("off", MEASURE) else f"{taken - off:+.0f}"
        share = f"{(taken - off) / whole:.2f}" if added and whole else ""
        lines.append(f"| {name} | {what} | {taken:.0f} | {added} | {share} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    options = argparse.ArgumentParser(description="What tracing adds to a call, for each way of it.")
    options.add_argument("--rounds", type=int, default=7, metavar="N", help="default: 7")
    options.add_argument("--calls", type=int, default=2_000, metavar="N", help="in each round; default: 2000")
    given = options.parse_args(arguments)
    server_core, _ = cores()
    with serving(server_core) as port:
        found = asyncio.run(measure(f"http://127.0.0.1:{port}/v1", rounds=given.rounds, calls=given.calls))
    print(table(found))


if __name__ == "__main__":
    main()
