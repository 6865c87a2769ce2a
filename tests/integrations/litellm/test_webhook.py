"""The provider on an endpoint of jobs: the same calls, answered later."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import spanwire
from spanwire.testing import LoopbackServer, Script
from tests.integrations.litellm.support import WAYS, ask, ours, to

each_way = pytest.mark.parametrize("way", WAYS)


@pytest.fixture
def server() -> Iterator[LoopbackServer]:
    with LoopbackServer(part="webhook") as running:
        yield running
    spanwire.default_sync_manager().close()  # with its stores, which are watched, and receivers
    assert running.faults == []


def jobs(path: Path) -> dict[str, Any]:
    return {
        "transport": "webhook",
        "dialect": "generic",
        "options": {
            "store": f"sqlite:///{path}/jobs.db",
            "receiver": "127.0.0.1:0",
            "receiver_options": {"unsigned": ["generic"]},
            "poll_after_s": 0.1,
        },
    }


@each_way
def test_the_answer_comes_later(server: LoopbackServer, way: str, tmp_path: Path) -> None:
    seen = ask(way, to(server, spanwire=jobs(tmp_path)))
    assert (seen.text, seen.error) == ("You said: Say hello", None)
    assert seen.finish_reason == "stop"
    assert seen.report is not None
    assert seen.report["transport"] == "webhook"


@each_way
def test_a_job_that_failed_raises(server: LoopbackServer, way: str, tmp_path: Path) -> None:
    server.script(Script(finish_reason="error"))
    seen = ask(way, to(server, spanwire=jobs(tmp_path)))
    assert ours(seen.error) is not None
