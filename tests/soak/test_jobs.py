"""Twenty thousand jobs, some of whose webhooks are repeated, lost or late, while those who submit and receive are killed.

``SPANWIRE_SOAK_JOBS`` is how many.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.soak.jobs import crowd
from tests.soak.workload import SEED

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kills processes")


@pytest.mark.soak
def test_every_job_is_resolved_once_whoever_is_killed(tmp_path: Path) -> None:
    jobs = int(os.environ.get("SPANWIRE_SOAK_JOBS", "20000"))
    outcome = crowd(tmp_path, jobs, kills=10, seed=SEED, limit_s=3600)
    print(outcome.seconds, outcome.states, outcome.resolved_by, outcome.flags, outcome.log)
    outcome.check(jobs, kills=10)
