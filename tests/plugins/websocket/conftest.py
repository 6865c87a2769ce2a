from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.core.telemetry.heard import Heard


@pytest.fixture
def heard() -> Iterator[Heard]:
    heard = Heard()
    yield heard
    heard.tracers.shutdown()
    heard.meters.shutdown()
