"""One loopback server for a module, and files that the suites would otherwise fetch from the internet."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from langchain_tests.integration_tests import chat_models

from spanwire.testing import LoopbackServer
from tests.integrations.langchain.server import answer

#: The smallest PNG: one transparent pixel. Sent as image, as PDF and as sound: no model looks at it.
_PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)


@pytest.fixture(scope="session")
def server() -> Iterator[LoopbackServer]:
    with LoopbackServer([answer], part=os.environ.get("STANDARD_PART", "sse")) as server:
        yield server
        assert server.faults == []


@pytest.fixture(autouse=True)
def _no_internet(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fetched:
        content = _PIXEL

    def get(_url: str, **_more: Any) -> Fetched:
        return Fetched()

    monkeypatch.setenv("LANGCHAIN_TESTS_USER_AGENT", "none is asked")
    monkeypatch.setattr(
        chat_models, "httpx", type("Fetcher", (), {"get": staticmethod(get), "Response": httpx.Response})
    )
