"""The standard suites on the oldest langchain-core that langchain-spanwire says it works with."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.integrations.langchain.standard_suites import run_suite
from tests.integrations.langchain.test_standard import SKIPPED
from tests.peers.processes import ROOT, python_peer

pytestmark = [pytest.mark.peers, pytest.mark.timeout(900)]
MEMBER = ROOT / "integrations" / "langchain-spanwire"


def lowest() -> str:
    project = tomllib.loads((MEMBER / "pyproject.toml").read_text("utf-8"))["project"]
    (wanted,) = [line for line in project["dependencies"] if line.startswith("langchain-core")]
    return str(wanted.split(">=")[1].split(",")[0])


@pytest.mark.parametrize("name", ["unit", "integration"])
def test_the_suite_passes(name: str, tmp_path: Path) -> None:
    python = python_peer(
        "langchain",
        f"langchain-core=={lowest()}",
        "langchain-tests",  # the newest that goes with it
        "pytest-timeout",
        *(f"--editable={folder}" for folder in (f"{ROOT}[testing]", ROOT / "plugins" / "spanwire-sse", MEMBER)),
    )
    outcome, output = run_suite(name, tmp_path, python=str(python))
    assert not outcome.counts["failure"], output
    assert not outcome.counts["error"], output
    assert outcome.skipped <= SKIPPED[name], output
    assert outcome.counts["passed"] > 10, output
