"""A hop that terminates TCP: the kernel's round trip ends there, and a server that reports tells the rest."""

from __future__ import annotations

from benchmarks.truth.scenarios import Scenario
from tests.delay.truth import Measured, assert_true, scenarios


@scenarios("edge")
def test_behind_an_edge(scenario: Scenario, measured: Measured) -> None:
    assert_true(scenario, measured)
