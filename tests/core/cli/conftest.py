import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from spanwire.cli.app import app
from spanwire.testing import LoopbackServer

#: As the installed script does; with Ctrl-C on, which a shell turns off for jobs in the background.
MAIN = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from spanwire.cli import main; main()"


class Spanwire:
    """The command line: in this process by calling it, or as a process of its own."""

    def __call__(self, *arguments: str) -> Result:
        return CliRunner().invoke(app, list(arguments), prog_name="spanwire")

    def start(self, *arguments: str, first: str = "", stderr: int = subprocess.PIPE) -> "subprocess.Popen[str]":
        command = [sys.executable, "-W", "error", "-c", first + MAIN, *arguments]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, encoding="utf-8")

    def run(self, *arguments: str, first: str = "") -> tuple[int, str, str]:
        process = self.start(*arguments, first=first)
        out, err = process.communicate(timeout=30)
        return process.returncode, out, err

    def interrupt(self, process: "subprocess.Popen[str]") -> tuple[int, str, str]:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
        return process.returncode, out, err


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("SPANWIRE_") or name.lower().endswith("_proxy") or name in {"OPENAI_API_KEY", "FORCE_COLOR"}:
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def spanwire() -> Spanwire:
    return Spanwire()


@pytest.fixture
def server() -> Iterator[LoopbackServer]:
    with LoopbackServer() as server:
        yield server
        assert server.faults == []


class Plugin:
    """A distribution that is not installed by anybody, in a folder on ``sys.path``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        info = folder / "acme_plugin-1.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-plugin\nVersion: 1.5\n")

    def entries(self, group: str, **entries: str) -> None:
        lines = [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
        (self.folder / "acme_plugin-1.5.dist-info" / "entry_points.txt").write_text("\n".join(lines))

    def module(self, name: str, text: str) -> None:
        (self.folder / f"{name}.py").write_text(text)


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plugin:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return Plugin(tmp_path)
