"""Plugins of third parties as their users have them: wheels, in a fresh environment with nothing of this checkout.

For each: core's wheels and the plugin's are built, and installed into an environment of their own; there the plugin's tests
pass, the conformance kit among them, and a call goes over it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.third_party, pytest.mark.timeout(600)]

ROOT = Path(__file__).parent.parent.parent

#: Where everything is imported from, said by the environment itself.
_WHERE = """
import importlib, json, sys
print(json.dumps([importlib.import_module(name).__file__ for name in sys.argv[1:]]))
"""


def run(*command: str | Path, cwd: Path | None = None) -> str:
    # Nothing of this checkout, nor of the environment in which these tests run, may be found.
    env = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST", "VIRTUAL_ENV"))
    }
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-6000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def uv(*arguments: str | Path) -> str:
    return run("sh", ROOT / "scripts" / "bootstrap.sh", *arguments)


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheels of all our distributions."""
    folder = tmp_path_factory.mktemp("core")
    uv("build", "--quiet", "--wheel", "--all-packages", "--out-dir", folder, "--directory", ROOT)
    return folder


@pytest.fixture(scope="module")
def generator(core: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command of an environment that has core's wheels and nothing else."""
    folder = tmp_path_factory.mktemp("generator")
    uv("venv", "--quiet", folder / "env")
    python = folder / "env" / "bin" / "python"
    uv("pip", "install", "--quiet", "--python", python, *core_wheels(core), "spanwire[cli]")
    return python.parent / "spanwire"


def core_wheels(core: Path) -> list[str]:
    return [f"{name}@{path}" for path in core.glob("spanwire*.whl") if (name := _distribution(path)) in _CORE]


class Installed:
    """A fresh environment with a plugin's wheel, and its tests beside it."""

    def __init__(self, project: Path, core: Path, folder: Path, extras: str) -> None:
        self.package = next(path.name for path in (project / "src").iterdir() if path.name.startswith("spanwire_"))
        self.python = folder / "env" / "bin" / "python"
        wheels = folder / "wheels"
        uv("build", "--quiet", "--wheel", "--out-dir", wheels, project)
        (wheel,) = wheels.glob("*.whl")
        uv("venv", "--quiet", folder / "env")
        uv(
            "pip",
            "install",
            "--quiet",
            "--python",
            self.python,
            f"{wheel}[{extras}]",
            *core_wheels(core),
            "spanwire[cli]",
        )
        self.folder = folder / "tests-alone"
        self.folder.mkdir()
        shutil.copytree(project / "tests", self.folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(project / "pyproject.toml", self.folder)  # pytest's settings

    def check(self) -> str:
        """All its tests, and where what they tested came from."""
        where = json.loads(run(self.python, "-c", _WHERE, "spanwire", "spanwire_sse", self.package, cwd=self.folder))
        assert all(f"{os.sep}site-packages{os.sep}" in path for path in where), where
        return run(self.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rA", cwd=self.folder)

    def spanwire(self, *arguments: str) -> str:
        return run(self.python.parent / "spanwire", *arguments, cwd=self.folder)


_CORE = ("spanwire", "spanwire-sse")


def _distribution(wheel: Path) -> str:
    return wheel.name.partition("-")[0].replace("_", "-")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)  # an environment is tens of megabytes


def test_a_generated_transport(core: Path, generator: Path, folder: Path) -> None:
    run(generator, "new-transport", "my-wire", "--output", folder)
    installed = Installed(folder / "spanwire-my-wire", core, folder, "test")
    out = installed.check()
    assert "PASSED tests/test_conformance.py::TestMyWire::test_a_call_that_is_left_leaves_nothing[sent-cancel]" in out
    assert "PASSED tests/test_conformance.py::TestMyWire::test_it_is_loaded_when_its_scheme_is_first_used" in out
    assert "PASSED tests/test_call.py::test_a_call" in out
    (row,) = [
        row
        for row in json.loads(installed.spanwire("transports", "--json"))["plugins"]
        if row["distribution"] == "spanwire-my-wire"
    ]
    assert row["status"] == "ok"
    assert row["transports"][0]["schemes"] == ["my-wire"]
    demo = json.loads(installed.spanwire("demo", "--json"))["transports"]["my-wire"]
    assert demo["connections_opened"] == 1
    assert demo["cold"]["segments"]["handshake"]["duration_s"] > 0
    assert "handshake" not in demo["warm"]["segments"]


def test_a_generated_dialect(core: Path, generator: Path, folder: Path) -> None:
    run(generator, "new-dialect", "my-server", "--output", folder)
    installed = Installed(folder / "spanwire-my-server", core, folder, "test")
    out = installed.check()
    assert "PASSED tests/test_conformance.py::TestMyServer::test_a_whole_answer_is_the_joined_stream" in out
    assert "PASSED tests/test_call.py::test_a_call" in out
    plugins = json.loads(installed.spanwire("transports", "--json"))["plugins"]
    (sse,) = [spec for row in plugins for spec in row["transports"] if spec["name"] == "sse"]
    assert sse["dialects"] == ["my-server", "openai", "responses"]


def test_anthropics_messages_as_a_dialect(core: Path, folder: Path) -> None:
    out = Installed(ROOT / "examples" / "anthropic-dialect", core, folder, "test,oracle").check()
    assert "PASSED tests/test_conformance.py::TestAnthropic::test_a_whole_answer_is_the_joined_stream" in out
    assert "PASSED tests/test_call.py::test_anthropics_own_library_reads_the_same_of_this_server" in out


def test_nats_as_a_transport(core: Path, folder: Path) -> None:
    out = Installed(ROOT / "examples" / "nats-transport", core, folder, "test").check()
    assert "PASSED tests/test_conformance.py::TestNATS::test_a_call_that_is_left_leaves_nothing[sent-cancel]" in out
    assert "PASSED tests/test_conformance.py::TestNATS::test_the_capacity_is_what_the_server_sees" in out
    assert "PASSED tests/test_call.py::test_a_call" in out
