"""Starts the program with the bootstrap in front of its path, and stands aside: streams, signals and exit code are its own.

``SIGINT`` and ``SIGQUIT`` that come from a terminal reach the whole foreground, the program included, and are not passed
on a second time. Everything else that is sent to the doctor is.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from spanwire.calllog import ENVIRONMENT

__all__ = ["FOLDER", "Ended", "Refused", "check", "environment", "run"]

#: Names the folder for the bootstrap.
FOLDER = "SPANWIRE_DOCTOR"
_BOOTSTRAP = str(Path(__file__).parent / "bootstrap")
_INSTALL = "-m pip install 'spanwire[instrument]'"
#: As shells, env and timeout do: not found, and found but not to be run.
_NOT_FOUND, _NOT_RUNNABLE, _USAGE = 127, 126, 2
_FROM_KEYBOARD = ("SIGINT", "SIGQUIT")
_PASSED_ON = (*_FROM_KEYBOARD, "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
#: How long asking an interpreter may take, in seconds: 0.02 as a rule.
_ASK_S = 10.0


class Refused(Exception):
    """The program was not started.

    Attributes:
        code: the exit code.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class Ended(msgspec.Struct, frozen=True):
    """The program has ended.

    Attributes:
        code: its exit code; 128 and the signal's number if a signal ended it.
        signal: that signal's name, None if none did.
        wall_s: how long it ran.
    """

    code: int
    signal: str | None
    wall_s: float


# --- before -------------------------------------------------------------------------------------------------------------


def check(command: Sequence[str]) -> str:
    """The program's file. Refuses what can be seen to lead to nothing before it costs anything.

    Raises:
        Refused: there is no such program; it is a Python that leaves ``sitecustomize`` out, or has no spanwire.
    """
    name = command[0]
    path = shutil.which(name)
    if path is None:
        there = Path(name)
        if there.suffix == ".py" and there.is_file():
            raise Refused(f"{name} is no program by itself: spanwire doctor -- python {name}", _NOT_RUNNABLE)
        if there.exists():
            raise Refused(f"{name} cannot be run: it is a folder, or not executable", _NOT_RUNNABLE)
        raise Refused(f"there is no program {name!r}", _NOT_FOUND)
    python = _interpreter(path)
    if python is None:
        return path
    options = _options(command[1:]) if python == path else ""
    for option, why in (("S", "site"), ("I", "PYTHONPATH"), ("E", "PYTHONPATH")):
        if option in options:
            raise Refused(
                f"python -{option} leaves out {why}, by which the doctor gets into a program: run it without -{option}",
                _USAGE,
            )
    if Path(python).absolute() != Path(sys.executable).absolute() and not _has_spanwire(python):
        raise Refused(f"{python} has no spanwire-instrument: {python} {_INSTALL}", _USAGE)
    return path


def _interpreter(path: str) -> str | None:
    """The Python that runs this program: itself, or that of its first line; None if it is none."""
    if Path(path).name.lower().removesuffix(".exe").rstrip("0123456789.") in ("python", "pypy"):
        return path
    try:
        with Path(path).open("rb") as file:
            first = file.readline(512)
    except OSError:
        return None
    if not first.startswith(b"#!"):
        return None
    words = first[2:].decode("utf-8", "replace").split()
    if words and Path(words[0]).name == "env":
        words = [found] if len(words) == 2 and (found := shutil.which(words[1])) else []
    if words and Path(words[0]).name.rstrip("0123456789.") in ("python", "pypy"):
        return words[0]
    return None


def _options(arguments: Sequence[str]) -> str:
    """The letters of Python's own options that take no value."""
    letters = ""
    skip = False
    for argument in arguments:
        if skip:
            skip = False
            continue
        if not argument.startswith("-") or argument in ("-", "--") or argument.startswith("--"):
            break
        for at, letter in enumerate(argument[1:], 1):
            if letter in "cm":
                return letters
            if letter in "WX":
                skip = at == len(argument) - 1
                break
            letters += letter
    return letters


def _has_spanwire(python: str) -> bool:
    """False only if that interpreter says so."""
    ask = "import importlib.util as u, sys; sys.exit(0 if u.find_spec('spanwire_instrument') else 3)"
    try:
        asked = subprocess.run(  # noqa: S603 - what the user is about to run anyway
            [python, "-c", ask], stdin=subprocess.DEVNULL, capture_output=True, timeout=_ASK_S, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return True
    return asked.returncode != 3


def environment(given: Mapping[str, str], folder: str) -> tuple[dict[str, str], Path]:
    """What the program gets, and the file in which it logs its calls: the user's, if there is one already."""
    env = dict(given)
    before = env.get("PYTHONPATH")
    env["PYTHONPATH"] = _BOOTSTRAP + os.pathsep + before if before else _BOOTSTRAP
    env[FOLDER] = folder
    log = env.get(ENVIRONMENT, "").strip()
    if not log:
        log = env[ENVIRONMENT] = str(Path(folder) / "calls.jsonl")
    return env, Path(log).absolute()


# --- the run ------------------------------------------------------------------------------------------------------------


def run(path: str, command: Sequence[str], env: Mapping[str, str]) -> Ended:
    """Run it, and wait for its end.

    Raises:
        Refused: the system cannot run this file.
    """
    begin_s = time.monotonic()
    process: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def passed_on(number: int, _: FrameType | None) -> None:
        if signal.Signals(number).name in _FROM_KEYBOARD and _in_foreground():
            return
        if process is None:
            early.append(number)
        elif process.returncode is None:
            process.send_signal(number)

    with _handled(passed_on):
        try:
            process = subprocess.Popen(command, executable=path, env=env)  # noqa: S603 - the user's own command
        except OSError as error:
            raise Refused(f"{command[0]} cannot be run: {error.strerror or error}", _NOT_RUNNABLE) from error
        for number in early:
            process.send_signal(number)
        code = process.wait()
    wall_s = time.monotonic() - begin_s
    if code >= 0:
        return Ended(code, None, wall_s)
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal
        name = f"signal {-code}"
    return Ended(128 - code, name, wall_s)


@contextlib.contextmanager
def _handled(handler: Any) -> Iterator[None]:
    """What is ignored (nohup, a job in the background) stays so, for the program too, which inherits that."""
    before: dict[int, Any] = {}
    for name in _PASSED_ON:
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) not in (signal.SIG_IGN, None):
            before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _in_foreground() -> bool:
    """Keys of the terminal reach us and the program alike."""
    if not hasattr(os, "tcgetpgrp"):
        return True  # Windows: a console's Ctrl-C goes to all of its processes
    try:
        fd = os.open(os.ctermid(), os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(fd)
