"""The files of docs/recipes.md, an environment with the tools that they are for, and processes that run them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from spanwire.testing import LoopbackServer, Script
from tests.peers.processes import python_peer

ROOT = Path(__file__).parent.parent.parent
URL = "http://127.0.0.1:8000/v1"
_TITLED = re.compile(r'^```(\w+) title="([^"]+)"\n(.*?)^```', re.DOTALL | re.MULTILINE)
#: Loose on purpose: a recipe is for what people install today.
TOOLS = (
    "fastapi",
    "uvicorn",
    "flask",
    "gunicorn",
    "celery",
    "nbclient",
    "ipykernel",
    "langchain",
    "litellm[proxy]",
)
_EXTRAS = "langchain,litellm,otel,testing"


def files() -> dict[str, str]:
    """What stands below each title of the page."""
    text = (ROOT / "docs" / "recipes.md").read_text("utf-8")
    return {title: body for _, title, body in _TITLED.findall(text)}


class Kitchen:
    """A folder with a recipe's files, and the environment that they run in."""

    def __init__(self, folder: Path, python: Path, server: LoopbackServer) -> None:
        self.folder, self.python, self.server = folder, python, server

    def file(self, title: str, *, url: str | None = None) -> str:
        """Write a file as the page has it, with another server. Its text."""
        text = files()[title]
        if url is None:
            assert f'"{URL}"' in text
            text = text.replace(URL, self.server.url)
        else:
            text = re.sub(r"https?://[\w.]+:\d+/v1", url, text)
        (self.folder / title).write_text(text, "utf-8")
        return text

    def command(self, name: str, *arguments: str) -> list[str]:
        """A command of that environment."""
        return [str(self.python.parent / name), *arguments]

    def run(self, *command: str, **env: str) -> str:
        """To its end; what it printed."""
        import os

        inherited = {key: value for key, value in os.environ.items() if not key.upper().endswith("_PROXY")}
        done = subprocess.run(
            command, cwd=self.folder, env={**inherited, **env}, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
        return done.stdout


def environment(name: str, extras: str, *tools: str) -> Path:
    """The Python of an environment with this tree, with its extras, and tools."""
    members: Sequence[str] = [
        str(path) for pattern in ("plugins/*", "integrations/*") for path in sorted(ROOT.glob(pattern))
    ]
    editable: list[Any] = [part for path in (f"{ROOT}[{extras}]", *members) for part in ("-e", path)]
    return python_peer(name, *editable, *tools)


@pytest.fixture(scope="session")
def python() -> Path:
    """The environment: this tree, and the tools."""
    return environment("recipes", _EXTRAS, *TOOLS)


@pytest.fixture
def server() -> Iterator[LoopbackServer]:
    with LoopbackServer() as made:
        yield made
    assert made.faults == []


@pytest.fixture
def kitchen(tmp_path: Path, python: Path, server: LoopbackServer) -> Kitchen:
    return Kitchen(tmp_path, python, server)


def long_answer() -> Script:
    """One that nobody waits for to its end."""
    return Script.say("word " * 3000, gap_s=0.05)
