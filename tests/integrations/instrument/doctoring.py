"""Programs, written into a folder, and ``spanwire doctor`` as a process that runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from spanwire.testing import LoopbackServer

#: As the installed script does; with Ctrl-C on, which a shell turns off for jobs in the background.
MAIN = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from spanwire.cli import main; main()"
ASK = 'messages=[{"role": "user", "content": "Say hello"}]'


class Examined(NamedTuple):
    """What came of it."""

    code: int
    out: str
    err: str
    report: dict[str, Any]

    @property
    def kinds(self) -> list[str]:
        """Of what was found."""
        return [finding["kind"] for finding in self.report["findings"]]

    def finding(self, kind: str) -> dict[str, Any]:
        """The only one of this kind."""
        (found,) = [finding for finding in self.report["findings"] if finding["kind"] == kind]
        return dict(found)


class Doctor:
    """Programs in ``folder``, towards ``server``."""

    def __init__(self, folder: Path, server: LoopbackServer) -> None:
        self.folder = folder
        self.server = server
        self.env = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("SPANWIRE_") and not name.lower().endswith("_proxy") and name != "FORCE_COLOR"
        }
        self.env |= {"COLUMNS": "80", "URL": server.url}
        if server.ca is not None:
            self.env["SSL_CERT_FILE"] = str(server.ca)

    def write(self, text: str, name: str = "agent.py") -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.strip() + "\n", encoding="utf-8")
        return path

    def line(self, words: str, name: str = "agent.py") -> int:
        """Number of the only line with these words."""
        lines = (self.folder / name).read_text("utf-8").splitlines()
        (number,) = [number for number, line in enumerate(lines, 1) if words in line]
        return number

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", MAIN, "doctor", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            cwd=self.folder,
            env=self.env,
        )

    def text(self, *arguments: str, stdin: str = "") -> tuple[int, str, str]:
        """Exit code, stdout and stderr of ``spanwire doctor`` with these arguments."""
        process = self.start(*arguments)
        out, err = process.communicate(stdin, timeout=50)
        return process.returncode, out, err

    def examine(self, *command: str, stdin: str = "") -> Examined:
        """A run whose report is JSON, in a file."""
        command = command or (sys.executable, "agent.py")
        code, out, err = self.text("--json", "-o", "report.json", "--", *command, stdin=stdin)
        return Examined(code, out, err, json.loads((self.folder / "report.json").read_text("utf-8")))

    def bare(self, *command: str, stdin: str = "") -> tuple[int, str, str]:
        """The same without the doctor."""
        command = command or (sys.executable, "agent.py")
        done = subprocess.run(
            command,
            input=stdin,
            capture_output=True,
            text=True,
            encoding="utf-8",
            cwd=self.folder,
            env=self.env,
            timeout=50,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr
