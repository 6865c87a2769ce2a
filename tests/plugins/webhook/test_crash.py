"""A small crowd of jobs whose submitter and receiver are killed; ``tests/soak/test_jobs.py`` has the large one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.soak.jobs import crowd


@pytest.mark.skipif(sys.platform != "linux", reason="kills processes")
@pytest.mark.timeout(180)
def test_every_job_is_resolved_once_whoever_is_killed(tmp_path: Path) -> None:
    crowd(tmp_path, 300, kills=4, limit_s=150).check(300, kills=4)
