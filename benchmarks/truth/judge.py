"""Runs scenarios on a delay network and compares what came back with what was injected."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.truth.scenarios import PEERS, Injected, Scenario, address
from spanwire.testing import delaynet
from spanwire.testing.delaynet import Packet

__all__ = ["TOLERANCE_MS", "Finding", "Outcome", "faults", "judge", "run"]

ROOT = Path(__file__).parent.parent.parent
#: How far the median of nine calls may be off, in ms.
TOLERANCE_MS = 3.0
_SEGMENTS = ("queue", "handshake", "client", "network", "model", "unattributed")
_FACTS = ("queue", "prefill", "decode", "server", "crypto", "dns", "backoff", "upload", "ahead")


@dataclass(frozen=True)
class Finding:
    """One segment, part or sum of a scenario, over its calls.

    Attributes:
        key: as in ``Scenario.expect``, or ``total``, or a segment that should be absent.
        injected_ms, recovered_ms: medians.
        off_ms: the median of what each call's figure was off.
        worst_ms: that of the call that was off the most.
        tolerance_ms: how far the median may be off.
    """

    key: str
    injected_ms: float
    recovered_ms: float
    off_ms: float
    worst_ms: float
    tolerance_ms: float = TOLERANCE_MS

    @property
    def ok(self) -> bool:
        """The median is near enough."""
        return abs(self.off_ms) <= self.tolerance_ms

    def __str__(self) -> str:
        return (
            f"{self.key}: injected {self.injected_ms:.1f} ms, recovered {self.recovered_ms:.1f} ms, "
            f"off by {self.off_ms:+.1f} ms, at worst {self.worst_ms:+.1f} ms"
        )


@dataclass(frozen=True)
class Outcome:
    """What came of a scenario.

    Attributes:
        calls: as ``inside.py`` noted them.
        packets: what the network did meanwhile.
    """

    calls: Sequence[Mapping[str, Any]]
    packets: Sequence[Packet]


def run(scenarios: Iterable[Scenario], *, timeout_s: float | None = None) -> dict[str, Outcome]:
    """By the scenario's name.

    Raises:
        ConfigurationError: there can be no delay network here.
        RuntimeError: the process in the network failed.
    """
    names = [scenario.name for scenario in scenarios]
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "packets")
        done = delaynet.run_delayed(
            [sys.executable, "-W", "error", "-m", "benchmarks.truth.inside", *names],
            peers=PEERS,
            record=record,
            timeout_s=timeout_s,
            cwd=ROOT,
        )
        if done.returncode != 0 or done.stderr:
            raise RuntimeError(f"the scenarios {', '.join(names)} failed: {done.stderr[-4000:]}")
        packets = delaynet.read_record(record)
    found: dict[str, Outcome] = {}
    for name, calls in json.loads(done.stdout).items():
        begin_ns, end_ns = calls[0]["begin_ns"], calls[-1]["end_ns"]
        found[name] = Outcome(calls, [packet for packet in packets if begin_ns <= packet.taken_ns <= end_ns])
    return found


def judge(scenario: Scenario, outcome: Outcome) -> list[Finding]:
    """Every expectation of the scenario against its calls."""
    given = [_injected(scenario, call, outcome.packets) for call in outcome.calls]
    timelines = [call["timeline"] for call in outcome.calls]
    keys = dict(scenario.expect)
    named = {part.split(".")[0] for key in keys for part in key.split("+")}
    for segment in _SEGMENTS:
        if segment not in named:
            keys[segment] = lambda _: 0.0
    # A segment that stands alone counts by itself, and a sum of several by what it adds to those.
    whole = _whole(scenario)
    keys["total"] = lambda t: sum(scenario.expect[key](t) for key in whole)
    findings = []
    for key, rule in keys.items():
        injected = [rule(one) for one in given]
        recovered = [_recovered_ms(key, timeline) for timeline in timelines]
        off = [b - a for a, b in zip(injected, recovered, strict=True)]
        # In a total, what its segments are off adds up.
        tolerance_ms = TOLERANCE_MS * (len(whole) if key == "total" else 1)
        worst_ms = max(off, key=abs)
        findings.append(Finding(key, median(injected), median(recovered), median(off), worst_ms, tolerance_ms))
    return findings


def faults(scenario: Scenario, outcome: Outcome) -> list[str]:
    """What is wrong beside figures: segments that should not be there, other sources than expected."""
    found = []
    for call in outcome.calls:
        timeline = call["timeline"]
        segments = timeline["segments"]
        found += [f"{segment} is there: {segments[segment]}" for segment in scenario.absent if segment in segments]
        found += [
            f"{segment} is {segments.get(segment, {}).get('source')}, not {source}"
            for segment, source in scenario.sources.items()
            if segments.get(segment, {}).get("source") != source
        ]
        scope = timeline["connection"].get("rtt_scope")
        if scope != ("edge" if scenario.edge is not None else None):
            found.append(f"the round trip's scope is {scope}")
    return sorted(set(found))


def _whole(scenario: Scenario) -> list[str]:
    """Keys of segments whose sum is the total: sums first, then segments that are in none of them."""
    sums = [key for key in scenario.expect if "+" in key]
    within = {segment for key in sums for segment in key.split("+")}
    return [*sums, *(key for key in scenario.expect if key in _SEGMENTS and key not in within)]


def _injected(scenario: Scenario, call: Mapping[str, Any], packets: Sequence[Packet]) -> Injected:
    rtt_ms = _rtt_ms(scenario.peer, call, packets)
    upstream_ms = 0.0 if scenario.edge is None else _rtt_ms(address(scenario.upstream_ms), call, packets)
    if scenario.rate_mbit is not None:
        rtt_ms = scenario.rtt_ms  # packets also waited for each other, which is in the upload
    facts = {name: float(call[name]) for name in _FACTS if name in call}
    return Injected(rtt=rtt_ms, upstream=upstream_ms, unread=max(0.0, call["unread"] - rtt_ms / 2), **facts)


def _rtt_ms(peer: str, call: Mapping[str, Any], packets: Sequence[Packet]) -> float:
    """Twice what a packet of this call was held, in the middle."""
    held = [p.held_s for p in packets if p.peer == peer and call["begin_ns"] <= p.taken_ns <= call["end_ns"]]
    return median(held) * 2e3


def _recovered_ms(key: str, timeline: Mapping[str, Any]) -> float:
    if key == "total":
        return float(timeline["total_s"]) * 1e3
    total_s = 0.0
    for one in key.split("+"):
        segment, _, part = one.partition(".")
        found = timeline["segments"].get(segment, {})
        if part:
            found = found.get("parts", {}).get(part, {})
        total_s += found.get("duration_s", 0.0)
    return total_s * 1e3
