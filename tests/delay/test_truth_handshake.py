"""DNS, TCP and TLS take what they were given, once, and from the call that made the connection."""

from __future__ import annotations

from benchmarks.truth.scenarios import Scenario
from tests.delay.truth import Measured, assert_true, scenarios


@scenarios("handshake")
def test_handshakes(scenario: Scenario, measured: Measured) -> None:
    assert_true(scenario, measured)
