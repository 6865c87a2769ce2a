"""Tests over a network with a known round trip, the only ones beside the benchmarks that look at the clock."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.truth.scenarios import Scenario
from spanwire.testing import delaynet
from tests.delay.truth import Measured, measuring


@pytest.fixture(scope="session", autouse=True)
def _delay_network() -> None:
    reason = delaynet.available()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def measured(request: pytest.FixtureRequest, _delay_network: None) -> Iterator[Measured]:
    """Outcomes of the scenarios that this run asks for, by their group."""
    groups: dict[str, None] = {}
    for item in request.session.items:
        scenario = getattr(item, "callspec", None) and item.callspec.params.get("scenario")  # type: ignore[attr-defined]
        if isinstance(scenario, Scenario):
            groups[scenario.group] = None
    with measuring(groups) as outcomes:
        yield outcomes
