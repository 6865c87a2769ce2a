"""Twenty thousand jobs, some of whose webhooks are repeated, lost or late, while those who submit and receive are killed.

``SPANWIRE_SOAK_JOBS`` is how many. In PostgreSQL and Valkey, three receivers and two submitters share the store, and its server
is killed too, in the middle.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from pathlib import Path

import pytest

from tests.plugins.webhook.stores import postgresql
from tests.plugins.webhook.stores.valkey import valkey
from tests.soak.jobs import Outcome, crowd
from tests.soak.workload import SEED

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kills processes")


JOBS = int(os.environ.get("SPANWIRE_SOAK_JOBS", "20000"))


def said(outcome: Outcome) -> None:
    print(f"{outcome.seconds:.0f} s", outcome.states, outcome.resolved_by, outcome.flags, outcome.log)


@pytest.mark.soak
@pytest.mark.timeout(3700)
def test_every_job_is_resolved_once_whoever_is_killed(tmp_path: Path) -> None:
    outcome = crowd(tmp_path, JOBS, kills=10, seed=SEED, limit_s=3600)
    said(outcome)
    outcome.check(JOBS, kills=10)


@pytest.mark.soak
@pytest.mark.timeout(3700)
def test_in_postgresql_which_is_killed_too(tmp_path: Path) -> None:
    with postgresql.serving() as server:

        def restart() -> None:
            server.stop()
            server.start()

        outcome = crowd(
            tmp_path,
            JOBS,
            kills=10,
            store=postgresql.url_of(tmp_path),
            submitters=2,
            receivers=3,
            restart=restart,
            seed=SEED,
            limit_s=3600,
        )
    said(outcome)
    outcome.check(JOBS, kills=10)


@pytest.mark.soak
@pytest.mark.timeout(3700)
def test_in_valkey_which_is_killed_too(tmp_path: Path) -> None:
    with valkey() as server:

        def restart() -> None:
            server.kill()
            server.start()

        outcome = crowd(
            tmp_path,
            JOBS,
            kills=10,
            store=server.url(),
            submitters=2,
            receivers=3,
            restart=restart,
            seed=SEED,
            limit_s=3600,
        )
    said(outcome)
    outcome.check(JOBS, kills=10)


@pytest.mark.soak
@pytest.mark.timeout(1300)
def test_in_valkey_which_is_killed_over_and_over(tmp_path: Path) -> None:
    """Every other second, besides those who submit and receive."""
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
            outcome = crowd(tmp_path, JOBS // 10, kills=10, store=server.url(), seed=SEED, limit_s=1200)
        finally:
            ended.set()
            thread.join()
    print(f"killed {kills} times")
    said(outcome)
    outcome.check(JOBS // 10, kills=10)
    assert kills
