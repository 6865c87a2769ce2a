"""Scenarios of benchmarks/truth as tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from benchmarks.truth import edges
from benchmarks.truth.judge import Outcome, faults, judge, run
from benchmarks.truth.scenarios import SCENARIOS, Scenario

#: A group takes some 25 s at most; a test has a minute, with the second look at its scenario.
_GROUP_S, _AGAIN_S = 45.0, 12.0


def _possible(scenario: Scenario) -> bool:
    return scenario.edge != "haproxy" or edges.HAPROXY is not None


def scenarios(group: str) -> pytest.MarkDecorator:
    """The scenarios of a group, as a test's argument."""
    return pytest.mark.parametrize(
        "scenario",
        [
            pytest.param(
                scenario,
                id=scenario.name,
                marks=pytest.mark.skipif(not _possible(scenario), reason="haproxy is not installed"),
            )
            for scenario in SCENARIOS
            if scenario.group == group
        ],
    )


Measured = Callable[[str], dict[str, Outcome]]


@contextmanager
def measuring(groups: Iterable[str]) -> Iterator[Measured]:
    """Each in a process and a network of its own, all at once: they do little but wait."""
    chosen = {group: [s for s in SCENARIOS if s.group == group and _possible(s)] for group in groups}
    with ThreadPoolExecutor(len(chosen) or 1) as pool:
        running = {group: pool.submit(run, some, timeout_s=_GROUP_S) for group, some in chosen.items()}
        yield lambda group: running[group].result()


def _wrong(scenario: Scenario, outcome: Outcome) -> list[str]:
    return [str(finding) for finding in judge(scenario, outcome) if not finding.ok] + faults(scenario, outcome)


def assert_true(scenario: Scenario, measured: Measured) -> None:
    """Every segment of the median call is within 3 ms of what was injected.

    As everywhere here: measured again if not, and given up if this machine has more to do than it has processors.
    """
    wrong = _wrong(scenario, measured(scenario.group)[scenario.name])
    if wrong:
        wrong = _wrong(scenario, run([scenario], timeout_s=_AGAIN_S)[scenario.name])
        load, processors = os.getloadavg()[0], os.cpu_count() or 1
        if wrong and load > processors:
            pytest.skip(f"too busy to measure (load {load:.1f} on {processors} processors): {wrong}"[:300])
    assert not wrong, "\n".join(wrong)
