"""The library's own sockets, one pair for each process: opened before anybody counts what a test leaves behind."""

from __future__ import annotations

from collections.abc import Iterator

import grpc.aio
import pytest

from tests.core.telemetry.heard import Heard

grpc.aio.init_grpc_aio()


@pytest.fixture
def heard() -> Iterator[Heard]:
    heard = Heard()
    yield heard
    heard.tracers.shutdown()
    heard.meters.shutdown()
