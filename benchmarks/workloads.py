"""The workloads, one row each. Data alone: what each does is a function in clients.py, named in its row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Load(NamedTuple):
    """How much is asked for.

    Attributes:
        model: the script of each answer (server.py says how it is written).
        at_once: calls at the same time.
        calls: calls in all.
        beside: the script of one call that goes on beside them.
    """

    model: str
    at_once: int
    calls: int
    beside: str | None = None


class Budget(NamedTuple):
    """What spanwire may cost.

    Attributes:
        limit: times the figure of ``to``; where that is None, in the unit of the figure.
        to: a client of the same run.
        wall_s: what the load may take besides, in seconds.
    """

    limit: float
    to: str | None = None
    wall_s: float | None = None


class Workload(NamedTuple):
    """A row.

    Attributes:
        name: ``group/size`` where one workload has several sizes; the group's name alone stands for all of them.
        measure: the function in clients.py; empty where the figure is worked out of other workloads (``needs``).
        load: what is measured.
        quick: what ``--quick`` asks for instead: enough to see that it works.
        figure: the key of the figure that is compared, in what ``measure`` returns. Less is better.
        unit: what the figure is, for the table.
        title: the same in words, for the chart.
        also: further figures for the table, as a format over a round.
        loops: whether ``--loop`` applies. The others run on asyncio's own loop.
        usual: whether it is measured when none is named.
        gated: whether a ratio that grew fails the run.
        related: whether a ratio to another client means anything.
        budget: of spanwire.
        clients: who can be measured; None for all.
        needs: the workloads out of which this one is worked out.
    """

    name: str
    measure: str
    load: Load
    quick: Load
    figure: str
    unit: str
    title: str
    also: str = ""
    loops: bool = False
    usual: bool = True
    gated: bool = True
    related: bool = True
    budget: Budget | None = None
    clients: frozenset[str] | None = None
    needs: tuple[str, ...] = ()


#: They have a `follow` (peers.py), which hands out every token.
FOLLOWING = frozenset({"raw", "aiohttp", "httpx", "openai", "spanwire"})


def _thousand(streams: int, tokens: int) -> Workload:
    """``streams`` at 50 tokens a second each."""
    return Workload(
        f"thousand/{streams}",
        "keep_pace",
        Load(f"t-{tokens}-20000", streams, streams),
        Load("t-50-20000", streams // 16, streams // 16),
        "added_ms_p99",
        "ms added to a token, p99",
        f"{streams:,} streams at 50 tokens/s: ms added to a token, 99th percentile",
        also="{keep_pace:.0f} of {streams:.0f} keep pace, p50 {added_ms_p50:.2f} ms, {cpu_share:.0%} CPU, "
        "server late by {late_ms_p99:.1f} ms (p99)",
        loops=True,
        usual=False,
        gated=False,
        clients=FOLLOWING,
    )


_ALL = (
    Workload(
        "burst",
        "stream_tokens",
        Load("m-200-0-1", 1, 40),
        Load("m-200-0-1", 1, 2),
        "cpu_us_per_token",
        "us CPU per token",
        "All tokens of an answer at once: us of CPU per token",
        loops=True,
        budget=Budget(2.0, "raw"),
    ),
    Workload(
        "paced",
        "stream_tokens",
        Load("m-100-20000-1", 32, 32),
        Load("m-20-20000-1", 2, 2),
        "cpu_us_per_token",
        "us CPU per token",
        "Token by token, 32 streams: us of CPU per token",
        also="done after {wall_s:.2f} s",
        loops=True,
        budget=Budget(2.0, "raw"),
    ),
    Workload(
        "crowd",
        "stream_tokens",
        Load("m-100-20000-1", 256, 256),
        Load("m-20-20000-1", 16, 16),
        "cpu_us_per_token",
        "us CPU per token",
        "Token by token, 256 streams: us of CPU per token",
        also="done after {wall_s:.2f} s",
        loops=True,
        # The server is done after 2.0 s; a quarter more for connecting and for the end.
        budget=Budget(2.1, "raw", wall_s=2.5),
    ),
    Workload(
        "latency",
        "first_tokens",
        Load("m-4-0-1", 1, 60),
        Load("m-4-0-1", 1, 3),
        "added_us_median",
        "us added to the first token",
        "Warm calls: us added to the first token",
        also="p95 {added_us_p95:.0f} us",
        budget=Budget(0.9, "aiohttp"),
    ),
    Workload(
        "unary",
        "call_unary",
        Load("m", 64, 640),
        Load("m", 4, 40),
        "cpu_us_per_call",
        "us CPU per call",
        "Not streamed, 64 at once: us of CPU per call",
        budget=Budget(1.2, "aiohttp"),
    ),
    Workload(
        "reuse",
        "connections",
        Load("m-20-0-1", 1, 6),
        Load("m-20-0-1", 1, 2),
        "connections",
        "connections for the calls",
        "Six streamed calls in a row: connections opened",
        budget=Budget(1.0),
    ),
    Workload(
        "memory",
        "",
        Load("", 0, 0),
        Load("", 0, 0),
        "kib_per_stream",
        "KiB for each open stream",
        "Each open stream: KiB of memory",
        loops=True,
        gated=False,  # a megabyte more or less in a process of fifty is a KiB for each stream
        budget=Budget(20.0),
        needs=("burst", "crowd"),
    ),
    _thousand(250, 1000),
    _thousand(500, 1000),
    _thousand(1000, 3000),
    Workload(
        "backpressure",
        "stop_reading",
        Load("t-100-20000", 32, 32, beside="f-360000"),
        Load("t-20-20000", 2, 2, beside="f-100000"),
        "growth_mib",
        "MiB that the process grew",
        "One of 33 streams is not read: MiB that the process grew",
        also="{poured_mib:.0f} MiB taken by the reader's side, the others' tokens p50 {added_ms_p50:.2f} ms, "
        "p99 {added_ms_p99:.2f} ms",
        loops=True,
        usual=False,
        gated=False,
        related=False,
        clients=FOLLOWING,
    ),
)
WORKLOADS = {row.name: row for row in _ALL}


def groups() -> list[str]:
    """The names that can be asked for, one for each group of sizes."""
    return list(dict.fromkeys(name.partition("/")[0] for name in WORKLOADS))


def chosen(names: Sequence[str]) -> list[Workload]:
    """The workloads of these names, in the table's order; the usual ones for no names.

    Raises:
        KeyError: with the name that there is not.
    """
    for name in names:
        if name not in WORKLOADS and name not in groups():
            raise KeyError(name)
    wanted = set(names) or {row.name for row in _ALL if row.usual}
    return [row for row in _ALL if row.name in wanted or row.name.partition("/")[0] in wanted]


def with_needs(rows: Sequence[Workload]) -> list[Workload]:
    """Those, and what they are worked out of, in the table's order."""
    wanted = {name for row in rows for name in (row.name, *row.needs)}
    return [row for row in _ALL if row.name in wanted]
