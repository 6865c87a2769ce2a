"""Twenty thousand jobs, some of whose webhooks are repeated, lost or late, while those who submit and receive are killed.

``SPANWIRE_SOAK_JOBS`` is how many.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from pathlib import Path

import pytest

from tests.plugins.webhook.stores.valkey import valkey
from tests.soak.jobs import crowd
from tests.soak.workload import SEED

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kills processes")


@pytest.mark.soak
def test_every_job_is_resolved_once_whoever_is_killed(tmp_path: Path) -> None:
    jobs = int(os.environ.get("SPANWIRE_SOAK_JOBS", "20000"))
    outcome = crowd(tmp_path, jobs, kills=10, seed=SEED, limit_s=3600)
    print(outcome.seconds, outcome.states, outcome.resolved_by, outcome.flags, outcome.log)
    outcome.check(jobs, kills=10)


@pytest.mark.soak
def test_every_job_is_resolved_once_while_the_server_of_the_store_is_killed(tmp_path: Path) -> None:
    """Valkey with append-only on, killed every other second, besides those who submit and receive."""
    jobs = int(os.environ.get("SPANWIRE_SOAK_JOBS", "20000")) // 10
    dice, ended, kills = random.Random(SEED), threading.Event(), 0
    with valkey() as server:

        def kill() -> None:
            nonlocal kills
            while not ended.wait(dice.uniform(1.0, 3.0)):
                server.kill()
                ended.wait(dice.uniform(0.0, 0.5))
                server.start()
                kills += 1

        thread = threading.Thread(target=kill)
        thread.start()
        try:
            outcome = crowd(tmp_path, jobs, kills=10, seed=SEED, limit_s=1200, store_url=server.url())
        finally:
            ended.set()
            thread.join()
    print(outcome.seconds, kills, outcome.states, outcome.resolved_by, outcome.flags, outcome.log)
    outcome.check(jobs, kills=10)
    assert kills
