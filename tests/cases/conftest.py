"""What the collector finds, such as a socket that nobody closed, is told in the file that left it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _collected() -> Iterator[None]:
    yield
    gc.collect()
