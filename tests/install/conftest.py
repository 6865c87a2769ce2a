"""Wheels as an index would have them, fresh environments as a user would make them, and the interpreters that are here."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest

ROOT = Path(__file__).parent.parent.parent
HERE = Path(__file__).parent
#: 2026-01-01. Any fixed time would do: build tools stamp files with it.
EPOCH = "1767225600"
VERSIONS = ("3.11", "3.12", "3.13", "3.14")

Installer = Literal["pip", "uv"]


def run(*command: str | Path, fails: bool = False, **more: str) -> subprocess.CompletedProcess[str]:
    """A command that sees nothing of this checkout, nor of the environment in which these tests run."""
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "PYTEST", "PYENV", "VIRTUAL_ENV", "SPANWIRE", "OTEL"))
    }
    done = subprocess.run(
        [str(part) for part in command],
        env={**env, "LITELLM_LOCAL_MODEL_COST_MAP": "True", **more},
        cwd=tempfile.gettempdir(),
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert fails or done.returncode == 0, f"{command}\n{done.stdout[-6000:]}\n{done.stderr[-4000:]}"
    return done


def uv(*arguments: str | Path, epoch: str = EPOCH) -> str:
    return run("sh", ROOT / "scripts" / "bootstrap.sh", *arguments, SOURCE_DATE_EPOCH=epoch).stdout


def build(source: Path, folder: Path) -> Path:
    """The wheels of all distributions of a tree."""
    uv("build", "--quiet", "--wheel", "--all-packages", "--out-dir", folder, "--directory", source)
    return folder


def tree(folder: Path) -> Path:
    """What is built, copied: tracked files and new ones, as git sees them."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file() and not name.startswith(("tests/", "docs/", "benchmarks/")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def release(folder: Path, version: str, *, contract: int | None = None) -> Path:
    """The wheels of this tree under another version, and with another plugin contract, as a release would have them."""
    source = tree(folder / "source")
    major, minor, *_ = version.split(".")
    for file in (
        source / "pyproject.toml",
        *source.glob("plugins/*/pyproject.toml"),
        *source.glob("integrations/*/pyproject.toml"),
    ):
        text = file.read_text("utf-8")
        text = re.sub(r'^version = "[^"]*"', f'version = "{version}"', text, flags=re.MULTILINE)
        text = re.sub(r">=0\.1,<0\.2", f">={major}.{minor},<{major}.{int(minor) + 1}", text)
        file.write_text(text, "utf-8")
    if contract is not None:
        for file in source.glob("src/spanwire/transport.py"):
            text, count = re.subn(
                r"^CONTRACT = \d+$", f"CONTRACT = {contract}", file.read_text("utf-8"), flags=re.MULTILINE
            )
            assert count == 1
            file.write_text(text, "utf-8")
        for file in source.glob("plugins/*/src/*/__init__.py"):
            text = re.sub(r"\bcontract=\d+,", "", file.read_text("utf-8"))
            text, count = re.subn(r"\bTransportSpec\(", f"TransportSpec(contract={contract}, ", text)
            assert count == 1, file
            file.write_text(text, "utf-8")
    return build(source, folder / "wheels")


def distribution(wheel: Path) -> str:
    return wheel.name.partition("-")[0].replace("_", "-")


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheels of all our distributions."""
    return build(ROOT, tmp_path_factory.mktemp("wheels"))


@pytest.fixture(scope="session")
def ours(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str | Path, ...]:
    """Arguments of an installer: our distributions are these wheels. (Constraints with URLs are what pip 23 cannot join
    with extras.)"""
    file = tmp_path_factory.mktemp("constraints") / "ours.txt"
    names = [path.name.split("-")[:2] for path in sorted(wheels.glob("*.whl"))]
    file.write_text("".join(f"{name.replace('_', '-')}=={version}\n" for name, version in names), "utf-8")
    return ("--find-links", wheels, "-c", file)


def interpreter(version: str) -> Path | None:
    """An interpreter of this version that is on this machine; CI has one of its own choice."""
    named = os.environ.get(f"SPANWIRE_PYTHON_{version.replace('.', '_')}")
    if named:
        return Path(named)
    found = run(
        "sh",
        ROOT / "scripts" / "bootstrap.sh",
        "python",
        "find",
        "--no-project",
        "--system",
        version,
        fails=True,
        UV_PYTHON=version,
    )
    candidates = [Path(found.stdout.strip())] if found.returncode == 0 else []
    candidates += sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"), reverse=True)
    for path in candidates:
        said = run(path, "-c", "import sys; print('%d.%d' % sys.version_info[:2])", fails=True)
        if said.returncode == 0 and said.stdout.strip() == version:
            return path
    return None


class Environment:
    """A fresh environment, filled by pip or by uv."""

    def __init__(self, folder: Path, installer: Installer, python: Path | None = None) -> None:
        self.folder, self.installer = folder, installer
        self.bin = folder / ("Scripts" if os.name == "nt" else "bin")
        self.python = self.bin / "python"
        if installer == "uv":
            uv("venv", "--quiet", folder, *(("--python", python) if python else ()))
        else:
            base = run(
                python or "python3", "-c", "import sys; print(getattr(sys, '_base_executable', sys.executable))"
            ).stdout.strip()
            run(base, "-m", "venv", folder)

    def install(self, *arguments: str | Path) -> str:
        """What the installer said."""
        if self.installer == "uv":
            return uv("pip", "install", "--python", self.python, *arguments)
        done = run(
            self.python, "-W", "ignore", "-m", "pip", "install", "--disable-pip-version-check", "--no-input", *arguments
        )
        return done.stdout + done.stderr

    def code(self, code: str, *arguments: str, fails: bool = False) -> subprocess.CompletedProcess[str]:
        """Code in it; -I: nothing of the current folder. Warnings are errors, our own modules' at least."""
        return run(self.python, "-I", "-c", code, *arguments, fails=fails)

    def calls(self, *names: str) -> dict[str, str]:
        """One call over every transport that is installed, and what each answered; further checks by their names."""
        done = run(self.python, "-I", HERE / "calls.py", *names)
        found = json.loads(done.stdout)
        assert isinstance(found, dict)
        return found

    def versions(self) -> dict[str, str]:
        """Installed distributions of ours, and their versions."""
        code = (
            "import json; from importlib.metadata import distributions as d; "
            "print(json.dumps({x.metadata['Name']: x.version for x in d() if 'spanwire' in x.metadata['Name']}))"
        )
        found = json.loads(self.code(code).stdout)
        assert isinstance(found, dict)
        return found


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[Callable[..., Environment]]:
    yield lambda installer, python=None: Environment(tmp_path / "env", installer, python)
    shutil.rmtree(tmp_path, ignore_errors=True)  # an environment is tens of megabytes, or hundreds
