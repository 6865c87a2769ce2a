"""Servers that are started once for all tests that want them; each test has a store of its own on them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.plugins.webhook.stores.valkey import Valkey, valkey


@pytest.fixture(scope="session")
def shared_valkey() -> Iterator[Valkey]:
    """With append-only on, and on the disk with each write."""
    with valkey() as server:
        yield server
