"""What must be true when the calls are over, looked at from all sides."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import spanwire
from spanwire.admission import Slots
from spanwire.manager import ConnectionManager
from spanwire.pool import Member
from spanwire.timeline import Timeline

PAGE_KIB = 4
#: Objects of ours that live as long as a call or a wait. None may be left when there is neither.
OF_A_CALL = (
    *("Run", "Stream", "SyncStream", "CallRecord", "AttemptRecord", "Timeline", "CallSpan", "ReplyBuilder", "Attempt"),
    *("HTTPExchange", "AnswerDecoder", "EventStreamParser", "Lease", "Waiter", "Dial", "Ticket"),
)


class Ledger:
    """A plugin that is told of every call's end."""

    def __init__(self) -> None:
        self.timelines: list[Timeline] = []

    @spanwire.hookimpl
    def register_observers(self) -> list[Ledger]:
        return [self]

    def call_ended(self, timeline: Timeline) -> None:
        self.timelines.append(timeline)


class _Starts(SpanProcessor):
    def __init__(self) -> None:
        self.open: set[int] = set()
        self._lock = threading.Lock()

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        with self._lock:
            assert span.context is not None
            self.open.add(span.context.span_id)

    def on_end(self, span: ReadableSpan) -> None:
        with self._lock:
            assert span.context is not None
            self.open.discard(span.context.span_id)


class Spans:
    """An SDK that samples everything, and knows which spans were begun."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self._starts = _Starts()
        self.tracers = TracerProvider(shutdown_on_exit=False)
        self.tracers.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracers.add_span_processor(self._starts)
        self.dials = Counter[str]()

    def telemetry(self) -> spanwire.Telemetry:
        return spanwire.Telemetry(tracer_provider=self.tracers)

    @property
    def open(self) -> int:
        return len(self._starts.open)

    def take(self) -> dict[str, list[ReadableSpan]]:
        """The calls' spans since the last time, by model. The spans of dials are counted in ``dials``."""
        found: dict[str, list[ReadableSpan]] = {}
        for span in self._exporter.get_finished_spans():
            if span.name == "spanwire.connection_setup":
                self.dials["failed" if span.status.status_code is StatusCode.ERROR else "made"] += 1
            elif span.kind is SpanKind.CLIENT and span.name.startswith("chat "):
                found.setdefault(span.name.removeprefix("chat "), []).append(span)
        self._exporter.clear()
        return found


class Memory(NamedTuple):
    rss_kib: int
    objects: int
    blocks: int

    @classmethod
    def now(cls) -> Memory:
        gc.collect()
        gc.collect()  # what finalizers of the first have left
        rss_kib = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_KIB
        return cls(rss_kib, len(gc.get_objects()), sys.getallocatedblocks())

    def __str__(self) -> str:
        return f"{self.rss_kib / 1024:.1f} MiB, {self.objects} objects, {self.blocks} blocks"


def left_of_calls() -> Counter[str]:
    """Objects of calls that are still here. Collects garbage first."""
    gc.collect()
    found = Counter(
        type(item).__name__
        for item in gc.get_objects()
        if str(type(item).__module__).startswith(("spanwire.", "spanwire_"))
    )
    return Counter({name: found[name] for name in OF_A_CALL if found[name]})


def sockets_to(port: int) -> int:
    """Open sockets of this process whose other end is that port of this machine."""
    mine = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            mine.add(str(link.readlink()))
        except OSError:  # the one that lists the folder
            continue
    found = 0
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[2].rpartition(":")[2], 16) == port and f"socket:[{fields[9]}]" in mine:
            found += 1
    return found


def held(manager: ConnectionManager, slots: Iterable[Slots]) -> list[str]:
    """What calls still hold of the manager and of the limits."""
    found: list[str] = []
    for state in list(manager._states.values()):
        if state.runs or state._abandoned:
            found.append(f"{len(state.runs)} calls, {len(state._abandoned)} abandoned")
        for pool in list(state.pools.values()):
            inner = pool.state
            if inner.waiters or inner.dials or pool._tasks or inner.dropped:
                found.append(repr(pool))
            busy = [(member.id, member.leases, member.finishing) for member in inner.members if member.leases]
            if busy or inner._finishing:
                found.append(f"leases {busy}, {inner._finishing} finishing")
            # What is only kept for speed must agree with what is counted.
            assert all(member.finishing == 0 for member in inner.members if not member.leases)
            assert {member for member in inner._free if member.leases} == set()
            assert len(set(inner._free)) == len(inner._free) <= len(inner.members)
    return found + [repr(slot) for slot in slots if slot._admission.holders or slot._admission.waiters]


def members_of(manager: ConnectionManager) -> list[Member]:
    return [
        member for state in manager._states.values() for pool in state.pools.values() for member in pool.state.members
    ]


def open_connections(manager: ConnectionManager) -> int:
    """Without those that the server has closed while they were idle: the pool drops these when it meets them."""
    return sum(member.connection.usable() for member in members_of(manager))


async def until(condition: Callable[[], object], what: Callable[[], object], limit_s: float = 10.0) -> None:
    """Wait for the condition; past the limit, fail and say what there is."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {limit_s} s: {what()}"
        await asyncio.sleep(0.001)


def most_at_once(intervals: Iterable[tuple[int, int]]) -> int:
    """How many of these intervals overlap at most; one may begin where another one ends."""
    turns = sorted([(begin, 1) for begin, _ in intervals] + [(end, -1) for _, end in intervals])
    most = now = 0
    for _, change in turns:
        now += change
        most = max(most, now)
    return most


def table(rows: Counter[Any], title: str) -> str:
    lines = [
        f"  {count:7d}  {name if isinstance(name, str) else ' '.join(map(str, name))}"
        for name, count in sorted(rows.items(), key=lambda row: (-row[1], str(row[0])))
    ]
    return "\n".join([title, *lines])
