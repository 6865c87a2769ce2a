"""The kit is worth something only if it fails: every broken copy of the transport is caught, by the test that says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from spanwire.testing import TransportConformance
from tests.plugins.sse.mutants import MUTANTS, ROOT

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="the broken copies are forked"),
    pytest.mark.timeout(240),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """In a process that has no threads and no sockets of other tests."""
    out = tmp_path_factory.mktemp("mutants") / "results.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.plugins.sse.mutants", "--json", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    print(done.stdout)
    assert out.exists(), done.stderr[-2000:]
    found: dict[str, Any] = json.loads(Path(out).read_text())
    return found


@pytest.mark.parametrize("name", list(MUTANTS))
def test_it_is_caught(name: str, results: dict[str, Any]) -> None:
    missed = set(MUTANTS[name].caught_by) - set(results[name]["failed"])
    assert missed == set(), results[name]["output"]


def test_the_names_are_those_of_tests() -> None:
    for mutant in MUTANTS.values():
        for test in mutant.caught_by:
            assert hasattr(TransportConformance, test.partition("[")[0])
