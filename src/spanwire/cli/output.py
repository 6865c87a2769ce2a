"""Where text goes: answers on stdout, everything else on stderr; colours only on a terminal and without NO_COLOR."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import typer
from rich.box import Box
from rich.console import Console
from rich.table import Table

from ..errors import visible

__all__ = [
    "Unwritable",
    "complain",
    "milliseconds",
    "new_table",
    "plural",
    "prepare_streams",
    "print_json",
    "print_table",
    "unwritable",
]

#: No table of ours is wider.
_WIDEST = 500

#: One line below the head, nothing else; of characters that every encoding has.
_PLAIN = Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)


def prepare_streams() -> None:
    """Have what an old encoding cannot show replaced, instead of a traceback in the middle of a waterfall.

    A stream that was closed (``>&-``) takes what is written, and drops it.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - to the process's end
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(OSError, ValueError):
                stream.reconfigure(errors="replace")


class Unwritable(Exception):
    """Stdout took no more, in the middle of what has errors of its own."""

    def __init__(self, why: OSError) -> None:
        super().__init__(str(why))
        self.why = why


def unwritable(error: OSError) -> int:
    """Say that stdout does not take what we have to say, and let it rest. The exit code.

    What lies in its buffer would be tried again when Python ends, and fail there with a traceback.
    """
    complain(f"the output cannot be written: {error.strerror or error}")
    with contextlib.suppress(OSError, ValueError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)
    return 1


def complain(message: object) -> None:
    """One line on stderr, with the program's name."""
    typer.echo(f"spanwire: {visible(' '.join(str(message).split()))}", err=True)


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
