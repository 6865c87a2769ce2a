"""The table of scenarios, and how it is judged. That it comes true: tests/delay/test_truth_*.py."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.truth import __main__ as command
from benchmarks.truth.judge import Finding, Outcome, faults, judge
from benchmarks.truth.scenarios import PEERS, SCENARIOS, Injected, Scenario
from spanwire.testing import Script
from spanwire.testing.delaynet import Packet

RTT_MS = 80.0
SCENARIO = Scenario(
    name="made-up",
    group="none",
    title="made up",
    script=Script(),
    expect={
        "network": lambda t: t.rtt,
        "queue+model": lambda t: t.queue + t.prefill,
        "model.prefill": lambda t: t.prefill,
    },
    sources={"network": "estimated"},
    absent=("handshake",),
)


def part(ms: float, source: str = "estimated", **parts: float) -> dict[str, Any]:
    more = (
        {"parts": {name: {"duration_s": one / 1e3, "source": source} for name, one in parts.items()}} if parts else {}
    )
    return {"duration_s": ms / 1e3, "source": source, **more}


def outcome(*calls: dict[str, Any]) -> Outcome:
    noted = []
    for number, segments in enumerate(calls):
        total_s = sum(segment["duration_s"] for segment in segments.values())
        timeline = {"segments": segments, "total_s": total_s, "connection": {}}
        facts = {"queue": 10.0, "prefill": 100.0, "unread": 0.0, "timeline": timeline}
        noted.append({"begin_ns": 1000 * number, "end_ns": 1000 * number + 999, **facts})
    held_ns = int(RTT_MS / 2 * 1e6) - 50_000  # the device does not know of the rest
    packets = [Packet(1000 * n + 5, 1000 * n + 5 + held_ns, SCENARIO.peer, 60) for n in range(len(calls))]
    return Outcome(noted, packets)


def findings(*calls: dict[str, Any]) -> dict[str, Finding]:
    return {finding.key: finding for finding in judge(SCENARIO, outcome(*calls))}


def test_what_comes_back_is_compared_call_by_call() -> None:
    good = {"network": part(81), "queue": part(10), "model": part(100, prefill=99)}
    bad = {"network": part(90), "queue": part(10), "model": part(100, prefill=99)}
    found = findings(good, good, bad)
    assert (found["network"].injected_ms, found["network"].off_ms, found["network"].worst_ms) == pytest.approx(
        (80, 1, 10)
    )
    assert found["queue+model"].off_ms == pytest.approx(0)
    assert found["model.prefill"].off_ms == pytest.approx(-1)
    assert found["total"].injected_ms == pytest.approx(190)
    assert all(finding.ok for finding in found.values())
    assert not findings(good, bad, bad)["network"].ok


def test_a_segment_that_nobody_injected_is_a_finding() -> None:
    found = findings({"network": part(80), "queue": part(10), "model": part(100, prefill=100), "client": part(5)})
    assert not found["client"].ok
    assert "client: injected 0.0 ms, recovered 5.0 ms, off by +5.0 ms" in str(found["client"])
    assert found["handshake"].ok


def test_sources_and_absence_are_judged_too() -> None:
    good = {"network": part(80)}
    assert faults(SCENARIO, outcome(good)) == []
    (one, two) = faults(SCENARIO, outcome(good, {"network": part(80, "measured"), "handshake": part(1)}))
    assert "handshake is there" in one
    assert two == "network is measured, not estimated"


def test_every_scenario_has_a_name_a_link_and_expectations_that_are_the_whole_call() -> None:
    assert len({scenario.name for scenario in SCENARIOS}) == len(SCENARIOS)
    for scenario in SCENARIOS:
        assert PEERS[scenario.peer].rtt_s * 1e3 == scenario.rtt_ms
        assert sum(rule(Injected(rtt=1.0)) for rule in scenario.expect.values()) > 0


def test_the_command_needs_a_delay_network(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("spanwire.testing.delaynet.available", lambda: "no such thing here")
    assert command.main(["textbook"]) == 2
    assert capsys.readouterr().err == "no such thing here\n"


def test_the_table_leaves_out_what_is_absent_and_marks_what_is_off() -> None:
    rows = command._rows(
        SCENARIO,
        [
            Finding("network", 80, 80.25, 0.25, 0.5),
            Finding("client", 0, 0.1, 0.1, 0.2),
            Finding("queue+model", 110, 120, 10, 11),
        ],
    )
    assert rows == [
        ["made up", "network", "80.0", "80.2", "+0.2", "+0.5"],
        ["", "queue + model", "110.0", "120.0", "**+10.0**", "+11.0"],
    ]
