"""One examination: check, run, read, report."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import typer

from spanwire.errors import ConfigurationError

from .findings import findings
from .launch import Ended, Refused, check, environment, run
from .read import read, sources
from .text import Report, print_text, to_json

__all__ = ["examine"]


def examine(command: Sequence[str], *, as_json: bool, output: str | None) -> int:
    """Run the program, then print the report; the exit code.

    Raises:
        typer.BadParameter: there is no command.
        ConfigurationError: the report cannot be written where it is to go: found out before the program runs.
    """
    if not command:
        raise typer.BadParameter("what to run? For example: spanwire doctor -- python agent.py", param_hint="COMMAND")
    try:
        path = check(command)
        if output not in (None, "-"):
            _writable(Path(str(output)))
        with tempfile.TemporaryDirectory(prefix="spanwire-doctor-", ignore_cleanup_errors=True) as folder:
            ended, report = _examined(path, command, folder)
    except Refused as refused:
        typer.echo(f"spanwire doctor: {refused}", err=True)
        return refused.code
    _print(report, as_json=as_json, output=output)
    return ended.code


def _examined(path: str, command: Sequence[str], folder: str) -> tuple[Ended, Report]:
    events = Path(folder) / "events.jsonl"
    events.touch(mode=0o600)
    env, log = environment(os.environ, folder)
    begin_unix_s = time.time()
    begin = log.stat().st_size if log.is_file() else 0
    ended = run(path, command, env)
    seen = read(events, log, log_from=begin, since_unix_s=begin_unix_s)
    code = sources(seen)
    return ended, Report(list(command), ended, seen, findings(seen, code))


def _writable(path: Path) -> None:
    try:
        with path.open("ab"):
            pass
    except OSError as error:
        raise ConfigurationError(f"the report cannot be written to {path}: {error.strerror or error}") from error


def _print(report: Report, *, as_json: bool, output: str | None) -> None:
    if output in (None, "-"):
        _write(report, sys.stderr if output is None else sys.stdout, as_json=as_json)
        return
    try:
        with Path(str(output)).open("w", encoding="utf-8") as file:
            _write(report, file, as_json=as_json)
    except OSError as error:
        raise ConfigurationError(f"the report cannot be written to {output}: {error.strerror or error}") from error


def _write(report: Report, file: IO[str], *, as_json: bool) -> None:
    if as_json:
        file.write(to_json(report) + "\n")
    else:
        print_text(report, file)
    file.flush()
