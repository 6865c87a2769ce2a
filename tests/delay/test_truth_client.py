"""What the client makes itself wait for is not the model's: slow reading, large prompts, retries, limits."""

from __future__ import annotations

from benchmarks.truth.scenarios import Scenario
from tests.delay.truth import Measured, assert_true, scenarios


@scenarios("client")
def test_the_client_s_own_time(scenario: Scenario, measured: Measured) -> None:
    assert_true(scenario, measured)
