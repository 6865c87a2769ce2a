"""``spanwire report``: its files, its output, and three lines of what is in it.

``--json`` prints :meth:`spanwire.report.Report.to_dict`::

    {
        "schema": 1,
        "spanwire": "0.1.0",
        "files": {"calls.jsonl": 1200},
        "calls": 1200,
        "findings": ["38 % of calls opened a new connection ..."],
        "selections": [
            {"endpoint": null, "model": null, "outcome": null, "calls": 1200, "times": {...}, "rows": [...]}
        ],
    }

A selection is one endpoint, model and outcome; null = all of them.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import typer

from ..calllog import ENVIRONMENT
from ..errors import ConfigurationError
from ..report import build
from ..report.page import GENERATOR
from .output import complain, plural, print_json

__all__ = ["Task", "moment", "run_report"]

_DEFAULT = "report.html"
_AGO = re.compile(r"(\d{1,6}(?:\.\d{1,6})?)\s*(s|m|min|h|d|w)")
_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400, "w": 604_800}


class Task(msgspec.Struct, frozen=True):
    """The command's arguments."""

    files: tuple[str, ...]
    output: str | None
    since: str | None = None
    until: str | None = None
    force: bool = False
    as_json: bool = False


def run_report(task: Task) -> int:
    """Make the report; the exit code.

    Raises:
        ConfigurationError: nothing to read, nothing in it, or nowhere to write to.
    """
    now_unix_s = time.time()
    since = None if task.since is None else moment(task.since, now_unix_s, "--since")
    until = None if task.until is None else moment(task.until, now_unix_s, "--until")
    files = task.files or _recorded()
    output = task.output or (None if task.as_json else _DEFAULT)
    if output is not None and output != "-":
        _check(Path(output), files, force=task.force)
    report = build(files, since_unix_s=since, until_unix_s=until)
    found = report.found
    if found.bad_lines:
        first = found.bad[0]
        complain(f"{plural(found.bad_lines, 'line')} could not be read, the first is {first}")
    page = "" if output is None else report.to_html()
    if output == "-":
        sys.stdout.buffer.write(page.encode())
        sys.stdout.buffer.flush()
        return 0
    if output is not None:
        _write(Path(output), page)
    if task.as_json:
        print_json(report.to_dict())
        return 0
    typer.echo(f"{output} ({len(page.encode()) / 1024:,.0f} KB)")
    for line in report.lines():
        typer.echo(line)
    return 0


def _recorded() -> tuple[str, ...]:
    name = os.environ.get(ENVIRONMENT, "").strip()
    if not name:
        raise typer.BadParameter(
            f"give the files to read, such as calls.jsonl ({ENVIRONMENT}=calls.jsonl makes one)", param_hint="FILES"
        )
    return (name,)


def moment(text: str, now_unix_s: float, option: str) -> float:
    """``2h`` (before now), or a date with or without a time, to seconds since 1970. UTC where it does not say.

    Raises:
        typer.BadParameter: it is neither.
    """
    text = text.strip()
    ago = _AGO.fullmatch(text)
    if ago:
        return max(0.0, now_unix_s - float(ago[1]) * _SECONDS[ago[2]])
    try:
        when = datetime.fromisoformat(text)
        unix_s = (when if when.tzinfo is not None else when.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        unix_s = -1.0
    if unix_s < 0:
        raise typer.BadParameter(
            f"{text!r:.60} is no time; write 2026-01-31, 2026-01-31T10:00 (UTC), or 30m, 2h, 7d before now",
            param_hint=option,
        )
    return unix_s


def _check(path: Path, files: tuple[str, ...], *, force: bool) -> None:
    """Not over what is read, and not over somebody's file by a slip of the hand."""
    if not path.is_file():
        return
    if any(name != "-" and Path(name).exists() and path.samefile(name) for name in files):
        raise ConfigurationError(f"{path} is among the files to read: write the report to another one (-o)")
    with path.open("rb") as file:
        known = file.read(4096)
    if known and GENERATOR.encode() not in known and not force:
        raise ConfigurationError(f"{path} is there and is no report of spanwire: name another one (-o), or --force")


def _write(path: Path, page: str) -> None:
    """All or nothing: who has the older report open never sees half of the new one."""
    try:
        if path.exists() and not path.is_file():  # /dev/stdout and the like
            path.write_text(page, encoding="utf-8")
            return
        beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            beside.write_text(page, encoding="utf-8", newline="\n")
            beside.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                beside.unlink()
            raise
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror or error}") from error
