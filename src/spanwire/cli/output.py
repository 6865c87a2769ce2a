"""Where text goes: answers on stdout, everything else on stderr; colours only on a terminal and without NO_COLOR."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from typing import Any

import typer
from rich.box import Box
from rich.console import Console
from rich.table import Table

__all__ = ["complain", "milliseconds", "new_table", "plural", "prepare_streams", "print_json", "print_table"]

#: No table of ours is wider.
_WIDEST = 500

#: One line below the head, nothing else; of characters that every encoding has.
_PLAIN = Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)


def prepare_streams() -> None:
    """Have what an old encoding cannot show replaced, instead of a traceback in the middle of a waterfall."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(OSError, ValueError):
                stream.reconfigure(errors="replace")


def complain(message: object) -> None:
    """One line on stderr, with the program's name."""
    typer.echo(f"spanwire: {' '.join(str(message).split())}", err=True)


def print_json(data: Any) -> None:
    """One JSON document on stdout."""
    typer.echo(json.dumps(data, indent=2))


def print_table(table: Table) -> None:
    """A table on stdout, never cut: where the terminal is too narrow, its lines are wrapped."""
    console = Console(highlight=False)
    console.width = max(console.width, console.measure(table, options=console.options.update(width=_WIDEST)).maximum)
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as text:
        console.print(table)
    for line in text.get().splitlines():
        typer.echo(line.rstrip())


def new_table() -> Table:
    """An empty table in our style."""
    return Table(box=_PLAIN, padding=0, pad_edge=False, header_style="bold", show_edge=False)


def milliseconds(seconds: float) -> str:
    """Three digits or more, at most seven characters below a day."""
    value = seconds * 1e3
    for limit, digits in ((10, 2), (1000, 1)):
        if value < limit:
            return f"{value:.{digits}f}"
    return f"{value:.0f}"


def plural(count: int, what: str) -> str:
    """``1 call``, ``2 calls``."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"
