"""The examples of third parties' plugins, as far as they need no network: test_wheels.py has the rest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.plugin_projects import foreign_imports, on_path

ROOT = Path(__file__).parent.parent.parent
PROJECTS = sorted(path.parent for path in (ROOT / "examples").glob("*/pyproject.toml"))

each = pytest.mark.parametrize("project", PROJECTS, ids=lambda project: project.name)


@each
def test_it_uses_public_names_alone(project: Path) -> None:
    assert foreign_imports(project) == []


@each
def test_it_is_listed(project: Path) -> None:
    assert f"`{project.name}/`" in (ROOT / "examples" / "README.md").read_text("utf-8")


@pytest.mark.long
@pytest.mark.timeout(120)
def test_the_dialect_passes_its_tests(tmp_path: Path) -> None:
    """The transport over NATS needs a broker, which test_wheels.py installs."""
    project = ROOT / "examples" / "anthropic-dialect"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=project,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env=on_path(project, tmp_path),
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
