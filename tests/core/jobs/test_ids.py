"""Ids of jobs grow, whatever the clock does."""

from __future__ import annotations

import threading
import time
import uuid

import pytest

from spanwire.jobs.ids import new_id


def test_ids_are_version_7_and_grow_in_every_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    before = time.time_ns() // 1_000_000
    seen: list[list[str]] = []

    def make() -> None:
        seen.append([new_id() for _ in range(5000)])

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    everything = [one for ids in seen for one in ids]
    assert len(set(everything)) == 20_000
    assert all(ids == sorted(ids) for ids in seen)
    first = uuid.UUID(min(everything))
    assert (first.version, first.variant) == (7, uuid.RFC_4122)
    assert before <= first.int >> 80
    last = new_id()
    monkeypatch.setattr("time.time_ns", lambda: 0)  # a clock that is set back
    assert new_id() > last
