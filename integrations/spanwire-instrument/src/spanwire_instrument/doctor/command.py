"""``spanwire doctor``: its arguments and help text."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["app"]

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(
    name="doctor",
    short_help="Run a program; say what to change about its calls.",
    context_settings={"allow_interspersed_args": False},
)
def doctor(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="COMMAND", help="The program, as you run it.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The report as JSON.")] = False,
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="FILE", help="Where the report goes; - is stdout. By default stderr."),
    ] = None,
) -> None:
    """Run a program, and say what to change about its calls to models.

    The program runs as it is: nothing in it is changed, its input, output, signals and exit code are its own. After it
    comes the report: connections that are not re-used, clients and TLS contexts made for each call, waits for a pool,
    look-ups of names, retries that an SDK hides, streams that are not closed; each with the line to change.

    \b
    Examples:
      spanwire doctor -- python agent.py --question "Why?"
      spanwire doctor -- python -m my_agent
      spanwire doctor -o report.txt -- uvicorn app:app
      spanwire doctor --json -o report.json -- pytest tests/test_agent.py

    What is seen: httpx, httpx2 and aiohttp, and so OpenAI's SDK, Anthropic's, LangChain, LiteLLM and others above them;
    and spanwire itself. Processes that the program starts are seen too, if they run Python.

    Exit code: the program's; 128 and the signal's number if one ended it. 2 for wrong usage, 126 or 127 if the program
    cannot be run.
    """  # noqa: D301 - \b: click keeps the line breaks that follow
    from .examine import examine  # only this command needs it

    raise typer.Exit(examine(command or (), as_json=as_json, output=output))
