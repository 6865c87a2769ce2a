"""40 ms there, 10 ms queue, 250 ms model, 40 ms back: a timeline gives back what the network and the server took."""

from __future__ import annotations

from benchmarks.truth.scenarios import Scenario
from tests.delay.truth import Measured, assert_true, scenarios


@scenarios("textbook")
def test_the_textbook_case(scenario: Scenario, measured: Measured) -> None:
    assert_true(scenario, measured)


@scenarios("dialects")
def test_what_other_servers_report(scenario: Scenario, measured: Measured) -> None:
    assert_true(scenario, measured)
