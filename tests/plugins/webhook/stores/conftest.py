"""One server for all tests of a session, started by the first that needs it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.plugins.webhook.stores.postgresql import PostgreSQL, serving


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgreSQL]:
    with serving() as server:
        yield server
