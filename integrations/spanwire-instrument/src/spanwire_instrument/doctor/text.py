"""The report as text of at most 80 columns, with colours on a terminal, and as JSON."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec
from rich.console import Console
from rich.text import Text

from spanwire.errors import visible
from spanwire.report.findings import count, duration, percent

from .facts import Run
from .findings import ENOUGH, Finding, Where, enough, split
from .launch import Ended

__all__ = ["Report", "print_text", "to_json"]

_WIDTH = 80
_BAR = 24
_STYLES = {"high": "bold red", "medium": "bold yellow", "note": "bold blue"}
_SIGNS = {"high": "!!", "medium": "! ", "note": "i "}


class Report(msgspec.Struct, frozen=True):
    """One examination."""

    command: list[str]
    ended: Ended
    run: Run
    findings: list[Finding]


def program(command: Sequence[str]) -> str:
    """The program's name, without the arguments, which may hold what is nobody's business."""
    first = Path(command[0]).name
    if not first.lower().removesuffix(".exe").rstrip("0123456789.").endswith(("python", "pypy")):
        return first + (" ..." if len(command) > 1 else "")
    options = iter(command[1:])
    rest = " ..." if len(command) > 2 else ""
    for word in options:
        if word == "-c":
            return f"{first} -c ..."
        if word == "-m":
            return f"{first} -m {next(options, '')}" + (" ..." if next(options, None) is not None else "")
        if word in ("-W", "-X"):
            next(options, None)
        elif not word.startswith("-"):
            return f"{first} {Path(word).name}" + (" ..." if next(options, None) is not None else "")
    return first + rest


def to_json(report: Report) -> str:
    """One object: how the program ended, counts, the split of the time, the findings."""
    run = report.run
    data: dict[str, Any] = {
        "schema": 1,
        "program": program(report.command),
        "exit_code": report.ended.code,
        "signal": report.ended.signal,
        "wall_s": round(report.ended.wall_s, 3),
        "processes": run.processes,
        "not_seen": [{"python": python, "reason": reason} for python, reason in run.left_out],
        "calls": len(run.calls),
        "connections": sum(call.reused is False for call in run.calls),
        "unfinished_calls": len(run.unfinished),
        "dropped_calls": run.dropped,
        "clients": len(run.clients),
        "ssl_contexts": len(run.contexts),
        "enough_calls": enough(run),
        "time": {row.segment: {"seconds": row.seconds, "share": row.share} for row in split(run)},
        "findings": [msgspec.to_builtins(finding) for finding in report.findings],
    }
    return msgspec.json.format(msgspec.json.encode(data), indent=2).decode()


def print_text(report: Report, file: IO[str]) -> None:
    """Write it. Colours only where the file is a terminal and ``NO_COLOR`` is not set."""
    console = Console(file=file, highlight=False, soft_wrap=True, width=_WIDTH)
    for line in _report(report):
        line.plain = visible(line.plain)  # names of models and hosts are whatever the program was given
        console.print(line)


def _report(report: Report) -> Iterator[Text]:
    run, ended = report.run, report.ended
    yield Text()
    end = f"ended by {ended.signal}" if ended.signal else f"exit code {ended.code}"
    left, right = f"spanwire doctor: {program(report.command)}", f"{end}, {duration(ended.wall_s)}"
    gap = _WIDTH - len(left) - len(right)
    if gap >= 2:
        yield Text.assemble((left, "bold"), " " * gap + right)
    else:
        yield from (Text(line, "bold") for line in _wrap(left, ""))
        yield Text(right)
    yield from (Text(line) for line in _wrap(_summary(run), ""))
    yield Text()
    if not run.processes:
        yield from _nothing_recorded(run)
        return
    for python, reason in run.left_out:
        yield from (
            Text(line, "yellow") for line in _wrap(f"{python} could not be watched: {_why(python, reason)}", "")
        )
        yield Text()
    if not run.calls and not run.unfinished:
        yield Text("No call to a model was seen.", "bold")
        yield from _plain(
            "Seen are httpx, httpx2, aiohttp and what stands on them. A request counts if it is a POST to a path that a "
            "model's API has, such as /v1/chat/completions. Calls of programs that are not Python cannot be seen."
        )
        return
    numbered = [finding for finding in report.findings if finding.severity != "note"]
    for number, finding in enumerate(numbered, 1):
        yield from _finding(finding, f"{number}.")
    if not enough(run):
        yield from _plain(
            f"{count(sum(call.outcome == 'completed' for call in run.calls), 'complete call')}: too few to speak of shares and "
            f"percentiles. Have the program make {ENOUGH} or more; the first one always opens a connection."
        )
        yield Text()
    elif not numbered:
        yield Text("Nothing to fix.", "bold green")
        yield Text()
    for finding in report.findings:
        if finding.severity == "note":
            yield from _finding(finding, "i")
    yield from _split(run)


def _nothing_recorded(run: Run) -> Iterator[Text]:
    yield Text("The program could not be watched.", "bold red")
    if not run.left_out:
        yield from _plain(
            "No Python reported from inside it. It is no Python program, or its environment or its options (-S, -I, -E) "
            "keep PYTHONPATH or sitecustomize out."
        )
    for python, reason in run.left_out:
        yield from _plain(f"{python}: {_why(python, reason)}")


def _why(python: str, reason: str) -> str:
    if reason.startswith("ModuleNotFoundError: No module named 'spanwire"):
        return f"it has no spanwire-instrument. {python} -m pip install 'spanwire[instrument]'"
    return reason


def _summary(run: Run) -> str:
    endpoints = sorted({call.endpoint for call in run.calls if call.endpoint})
    to = f" to {', '.join(endpoints[:3])}{' and others' if len(endpoints) > 3 else ''}" if endpoints else ""
    opened = sum(call.reused is False for call in run.calls)
    parts = [count(len(run.calls), "call") + to, count(opened, "connection")]
    if run.processes != 1:
        parts.append(f"{run.processes:,} processes" if run.processes else "no process seen")
    if run.dropped:
        parts.append(f"{run.dropped:,} more were not recorded")
    return ", ".join(parts)


def _finding(finding: Finding, number: str) -> Iterator[Text]:
    style = _STYLES[finding.severity]
    indent = " " * 3
    where = _place(finding.where[0]) if finding.where else ""
    title = _wrap(finding.title, "", _WIDTH - 3)
    if where and len(title) == 1 and len(title[0]) + len(where) + 5 <= _WIDTH:
        gap = " " * (_WIDTH - 3 - len(title[0]) - len(where))
        yield Text.assemble((f"{number:<3}{title[0]}", style), gap + where)
    else:
        for at, line in enumerate(title):
            yield Text(f"{number if not at else '':<3}{line}", style)
        if where:
            yield Text(indent + where)
    for other in finding.where[1:]:
        yield Text(indent + _place(other))
    for sentence in finding.evidence:
        yield from (Text(line) for line in _wrap(sentence, indent))
    if finding.change:
        yield from (Text(line, "bold") for line in _wrap(finding.change, indent))
    for sign, code, colour in (("-", finding.now, "red"), ("+", finding.instead, "green")):
        if code:
            yield from (Text(f"{indent}  {sign} {line}", colour) for line in _code(code, _WIDTH - 7))
    yield Text()


def _split(run: Run) -> Iterator[Text]:
    rows = split(run)
    if not rows:
        return
    calls = sum(call.outcome == "completed" for call in run.calls)
    yield Text(f"Where the time went ({count(calls, 'complete call')}, each at its mean)", "bold")
    for row in rows:
        bar = "#" * round(row.share * _BAR)
        yield Text(f"   {row.segment:<13} {duration(row.seconds / calls):>9}  {percent(row.share):>15}  {bar}".rstrip())


def _place(where: Where) -> str:
    """Relative where that is shorter."""
    if where.file.startswith("<"):
        return f"{where.file}:{where.line}"
    try:
        relative = os.path.relpath(where.file)
    except ValueError:  # another drive
        relative = where.file
    return f"{min(relative, where.file, key=len)}:{where.line}"


def _wrap(text: str, indent: str, width: int = _WIDTH) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    ) or [""]


def _code(code: str, width: int) -> list[str]:
    """One line, or broken after its first bracket, as formatters do; what stands behind ``#`` stays at the top."""
    code, mark, comment = code.partition("  # ")
    note = mark + comment
    if len(code + note) <= width:
        return [code + note]
    begin, end = code.find("("), code.rfind(")")
    if end != len(code) - 1 or begin < 0 or end == begin + 1:
        return [*([note.strip()] if note else []), code]
    inner = _code(code[begin + 1 : end], width - 4)
    return [code[: begin + 1] + note, *("    " + line for line in inner), ")"]


def _plain(text: str) -> Iterator[Text]:
    return (Text(line) for line in _wrap(text, ""))
