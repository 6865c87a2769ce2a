"""Installs servers that other people wrote into `.peers/` of the repository, and runs them on loopback."""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOME = ROOT / ".peers"
_INSTALL_LIMIT_S = 900.0


# --- installing -------------------------------------------------------------------------------------------------------


def python_peer(name: str, *requirements: str) -> Path:
    """The Python of an environment that holds these requirements and nothing else. Skips if it cannot be made."""
    venv = HOME / name / "venv"
    python = venv / "bin/python"
    requirement = " ".join(requirements)
    if not _is_installed(name, requirement, python):
        uv = ("sh", str(ROOT / "scripts/bootstrap.sh"))
        _install(
            name,
            requirement,
            [*uv, "venv", "--quiet", str(venv)],
            [*uv, "pip", "install", "--python", str(python), *requirements],
        )
    return python


def node_peer(name: str, requirement: str, script: str, *, node: tuple[int, ...]) -> list[str]:
    """The command that runs `script` of an npm package. Skips if it cannot be installed, or Node.js is too old."""
    wanted = f"{name} needs Node.js {'.'.join(map(str, node))} or newer with npm"
    paths = {tool: shutil.which(tool) for tool in ("node", "npm")}
    missing = [tool for tool, path in paths.items() if path is None]
    if missing:
        pytest.skip(f"{wanted}: found no {' and no '.join(missing)}")
    version = subprocess.run(["node", "--version"], capture_output=True, text=True, check=False).stdout.strip()
    if tuple(int(number) for number in version.removeprefix("v").split(".") if number.isdigit()) < node:
        pytest.skip(f"{wanted}: found {version or 'one that does not start'}")
    target = HOME / name / "node_modules" / script
    if not _is_installed(name, requirement, target):
        prefix = ["--prefix", str(HOME / name)]
        _install(
            name,
            requirement,
            [
                "npm",
                "install",
                *prefix,
                "--ignore-scripts",
                "--no-audit",
                "--no-fund",
                "--fetch-retries=1",
                requirement,
            ],
        )
    return ["node", str(target)]


def _is_installed(name: str, requirement: str, target: Path) -> bool:
    stamp = HOME / name / "installed"
    return target.exists() and stamp.is_file() and stamp.read_text() == requirement


def _install(name: str, requirement: str, *commands: Sequence[str]) -> None:
    HOME.mkdir(exist_ok=True)
    (HOME / ".gitignore").write_text("*\n")
    folder = HOME / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    deadline_s = time.monotonic() + _INSTALL_LIMIT_S
    for command in commands:
        log = folder / "install.log"
        with log.open("ab") as output:
            installer = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=ROOT, start_new_session=True
            )
            try:
                code: int | None = installer.wait(deadline_s - time.monotonic())
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(installer)
        if code != 0:
            took = f"took over {_INSTALL_LIMIT_S:.0f} s" if code is None else f"failed ({code})"
            pytest.skip(f"{name} cannot be installed: {requirement!r} {took}: {last_line(log)}")
    (folder / "installed").write_text(requirement)


def last_line(log: Path) -> str:
    lines = [line.strip(" │╰─▶├") for line in log.read_text(errors="replace").splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("npm error A complete log")]
    return lines[-1] if lines else "(it printed nothing)"


# --- running ----------------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def running(
    name: str, command: Sequence[str], *, ready: Callable[[], bool], limit_s: float, cwd: Path, **env: str
) -> Iterator[None]:
    """Run a server for the length of the block, which begins when the server is ready."""
    log = HOME / f"{name}.log"
    inherited = {key: value for key, value in os.environ.items() if not key.upper().endswith("_PROXY")}
    if tool := shutil.which("setpriv"):  # Linux: it ends with us also when we are killed
        command = [tool, "--pdeathsig", "KILL", "--", *command]
    with log.open("wb") as output:
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env={**inherited, "PYTHONUNBUFFERED": "1", **env},
            start_new_session=True,
        )
    try:
        _wait(name, server, log, ready, limit_s)
        yield
    finally:
        _end(server)


def _wait(name: str, server: subprocess.Popen[bytes], log: Path, ready: Callable[[], bool], limit_s: float) -> None:
    deadline_s = time.monotonic() + limit_s
    while not ready():
        code = server.poll()
        if code is not None or time.monotonic() > deadline_s:
            what = f"ended with code {code}" if code is not None else f"was not ready within {limit_s:.0f} s"
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            pytest.fail(f"{name} {what}; the end of {log}:\n{tail}", pytrace=False)
        time.sleep(0.1)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process, and everything that it has started, for certain."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)


def answers(port: int, path: str, *, tls: ssl.SSLContext | None = None) -> bool:
    """Whether a GET is answered with 200."""
    connection = (
        http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        if tls is None
        else http.client.HTTPSConnection("127.0.0.1", port, timeout=5, context=tls)
    )
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
