"""The store in Redis and Valkey, on a real Valkey: the kit, and what only such a store can get wrong."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from spanwire_webhook.stores.redis import open_store
from spanwire_webhook.stores.redis_store import RedisStore

from spanwire.testing import StoreConformance
from tests.plugins.webhook.stores.valkey import Valkey


class TestRedis(StoreConformance):
    @pytest.fixture(autouse=True)
    def server(self, shared_valkey: Valkey, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TESTS_VALKEY_PORT", str(shared_valkey.port))  # for processes of their own

    def open(self, tmp_path: Path) -> RedisStore:
        prefix = hashlib.sha256(str(tmp_path).encode()).hexdigest()[:16]
        return open_store(f"valkey://127.0.0.1:{os.environ['TESTS_VALKEY_PORT']}/0?prefix={prefix}")
