"""Tests over a network with a known round trip, the only ones beside the benchmarks that look at the clock."""

from __future__ import annotations

import pytest

from spanwire.testing import delaynet


@pytest.fixture(scope="session", autouse=True)
def _delay_network() -> None:
    reason = delaynet.available()
    if reason is not None:
        pytest.skip(reason)
