from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def played() -> dict[str, Any]:
    """What came out of the calls of play.py."""
    if not hasattr(os, "fork"):
        pytest.skip("each set of tools runs in a fork of one process that has imported them all")
    done = subprocess.run([sys.executable, HERE / "play.py"], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found
