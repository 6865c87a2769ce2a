"""The commands: their arguments and help texts. What they do is in the modules beside this one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec.structs import replace
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..calls import Call
from ..endpoint import TLS, Endpoint, Retries, Timeouts
from ..plugins import Registry
from .commands import SpanwireGroup
from .output import complain, plural, prepare_streams, print_json, unwritable
from .probe import Plan, Probe
from .stats import Outcome, Report
from .tables import print_probe, print_transports

if TYPE_CHECKING:
    from .generate import Kind

__all__ = ["app", "run"]

_OPENAI_HOST = "api.openai.com"

app = typer.Typer(
    cls=SpanwireGroup,
    name="spanwire",
    no_args_is_help=True,
    add_completion=True,  # --install-completion, --show-completion
    pretty_exceptions_enable=False,  # they show local variables: keys among them
    rich_markup_mode=None,  # plain text in 80 columns, with examples that keep their lines
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
)


def run() -> None:
    """What ``spanwire`` on a shell runs."""
    prepare_streams()
    try:
        app(prog_name="spanwire")
    except OSError as error:  # a full disk, a closed stdout: files that are read or written have errors of their own
        sys.exit(unwritable(error))


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"spanwire {version('spanwire')}")
        raise typer.Exit


@app.callback()
def spanwire(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Where the time of a call to a model goes: handshake, queue, model, network, client.

    \b
    spanwire demo
        Three calls to a scripted server on this machine. Needs nothing else.
    spanwire probe http://127.0.0.1:8000/v1 --model my-model
        Measure your own server, cold connections against warm ones.
    spanwire report calls.jsonl
        One page of what your own program's calls were: see SPANWIRE_CALL_LOG.
    """  # noqa: D301 - \b: click keeps the line breaks that follow


# --- demo -------------------------------------------------------------------------------------------------------------


@app.command(short_help="A cold call, a warm call and a tool call: where time goes.")
def demo(
    as_json: Annotated[bool, typer.Option("--json", help="Print the timelines as JSON instead.")] = False,
) -> None:
    """Show a cold call, a warm call and a tool call, with their waterfalls.

    Starts a scripted model server on this machine and calls it over every installed transport that has one. Real
    sockets, no network, no key, no model; takes about a second.

    \b
    Reading a waterfall: one line for each part of the call, in order; the bars
    divide the total. "source" says how sure a number is:
      measured   on this side, by a clock
      reported   by the server
      estimated  worked out, for example from the connection's round trip
    Time that nobody can account for is "unattributed", never hidden.
    """  # noqa: D301 - \b: click keeps the line breaks that follow
    from .demo import run_demo  # the loopback server: only the demo needs it

    raise typer.Exit(run_demo(as_json=as_json))


# --- probe ------------------------------------------------------------------------------------------------------------


@app.command(short_help="Make the same call many times; where does the time go?")
def probe(
    url: Annotated[str, typer.Argument(metavar="URL", help="The server's base URL, such as http://127.0.0.1:8000/v1")],
    model: Annotated[str, typer.Option("--model", "-m", help="The model's name, as the server knows it.")],
    calls: Annotated[int, typer.Option("-n", "--calls", min=1, metavar="N", help="How many calls.")] = 20,
    concurrency: Annotated[
        int, typer.Option("--concurrency", "-c", min=1, metavar="C", help="How many of them at once.")
    ] = 1,
    cold: Annotated[bool, typer.Option("--cold", help="Every call on a new connection.")] = False,
    unary: Annotated[bool, typer.Option("--unary", help="Ask for whole answers instead of streams.")] = False,
    prompt: Annotated[
        str, typer.Option("--prompt", metavar="TEXT", help="What to ask.")
    ] = "Say hello in one short sentence.",
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=1, metavar="N", help="Sent with the call; not sent by default.")
    ] = None,
    timeout_s: Annotated[
        float | None,
        typer.Option("--timeout", min=0.001, metavar="SECONDS", help="For one call as a whole; no limit by default."),
    ] = None,
    api_key_env: Annotated[
        str | None,
        typer.Option(
            "--api-key-env",
            metavar="NAME",
            help="Environment variable with the API key. By default SPANWIRE_API_KEY, then OPENAI_API_KEY, the latter "
            "only towards api.openai.com.",
        ),
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option("--header", "-H", metavar="'NAME: VALUE'", help="Sent with every call. May be repeated."),
    ] = None,
    ca: Annotated[
        Path | None,
        typer.Option("--ca", metavar="FILE", exists=True, help="CA certificates to trust instead of the system's."),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", "-k", help="Don't verify the server's certificate. For tests.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: all numbers, and the timeline of each call.")
    ] = False,
) -> None:
    """Make the same call many times, and show where the time goes.

    Calls for which a connection was made (cold) are reported apart from calls on one that was there (warm). The first
    calls of a run are cold; with --cold all of them are. Failed calls are not tried again, only counted.

    \b
    Examples:
      spanwire probe http://127.0.0.1:8000/v1 --model my-model
      spanwire probe http://127.0.0.1:8000/v1 --model my-model -n 200 -c 8
      spanwire probe https://api.openai.com/v1 --model gpt-4o-mini --cold -n 5
      spanwire probe https://10.0.0.7/v1 -m m --ca ca.pem -H 'X-Team: search'
      spanwire probe http://127.0.0.1:8000/v1 -m m --json > run.json

    All calls send the same prompt: a server that caches prompts answers the later ones sooner, which is not the
    connection's doing. Proxies of the environment (HTTPS_PROXY, NO_PROXY) are used. Ctrl-C shows what there is.

    Exit code: 0, 1 if no call went well, 2 for wrong usage or a bad address,
    130 after Ctrl-C.
    """  # noqa: D301 - \b: click keeps the line breaks that follow
    endpoint = Endpoint(
        url,
        headers=dict(_header(text) for text in header or ()),
        tls=TLS(verify=not insecure, ca=None if ca is None else str(ca)),
        retries=Retries(max_attempts=1),
        timeouts=Timeouts(total_s=timeout_s),
    )
    endpoint = replace(endpoint, api_key=_api_key(endpoint, api_key_env))
    call = Call.chat(model, [{"role": "user", "content": prompt}], max_tokens=max_tokens)
    plan = Plan(endpoint, call, calls, concurrency, cold=cold, streamed=not unary)
    raise typer.Exit(_probe(plan, as_json=as_json))


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise typer.BadParameter("write it as 'Name: value'", param_hint="--header")
    return name.strip(), value.strip()


def _api_key(endpoint: Endpoint, name: str | None) -> str | None:
    """The key from the environment: never an argument, which every user of the machine can see."""
    if name is not None:
        key = os.environ.get(name)
        if not key:
            raise typer.BadParameter(f"the environment variable {name} is not set", param_hint="--api-key-env")
        return key
    key = os.environ.get("SPANWIRE_API_KEY")
    if not key and endpoint.origin.host == _OPENAI_HOST:
        key = os.environ.get("OPENAI_API_KEY")
    return key or None


def _probe(plan: Plan, *, as_json: bool) -> int:
    with _progress(plan) as on_call:
        probe = Probe(plan, on_call)
        try:
            asyncio.run(probe.run())
        except KeyboardInterrupt:
            probe.interrupted = True
    found = probe.report()
    if as_json:
        print_json(probe.to_dict())
    elif found.ok:
        print_probe(probe)
    if not found.ok:
        complain(_failure(probe, found))
    if probe.interrupted:
        return 130
    return 0 if found.ok else 1


def _failure(probe: Probe, found: Report) -> str:
    """Nothing went well: why, on one line."""
    if not found.errors:
        return "interrupted before a call had ended"
    name, (_, message) = next(iter(found.errors.items()))
    calls = probe.plan.calls
    if probe.gave_up:
        first = "call" if found.failed == 1 else f"{found.failed} calls"
        what = f"the first {first} of {calls:,} failed, the others were not tried"
    else:
        what = "the call failed" if found.failed == 1 else f"all {found.failed:,} calls failed"
    others = len(found.errors) - 1
    more = f" (and {plural(others, 'other kind')} of error)" if others else ""
    return f"{what}: {name}: {message}{more}"


@contextlib.contextmanager
def _progress(plan: Plan) -> Iterator[Callable[[Outcome], None]]:
    """A progress bar on stderr, if that is a terminal; gives what is called after each call."""
    if not sys.stderr.isatty():
        yield lambda outcome: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[failed]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=4) as bar:
        task = bar.add_task(plan.endpoint.address, total=plan.calls, failed="")
        failed = 0

        def advance(outcome: Outcome) -> None:
            nonlocal failed
            failed += outcome.error_type is not None
            bar.update(task, advance=1, failed=f"{failed:,} failed" if failed else "")

        yield advance


# --- report -----------------------------------------------------------------------------------------------------------


@app.command(short_help="Make one HTML page of many calls.")
def report(
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILES",
            help="Call logs, or OTLP traces in JSON; also gzipped; - is stdin. By default what SPANWIRE_CALL_LOG names.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="FILE", help="Where to; - is stdout. By default report.html."),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            "--since", metavar="WHEN", help="Only calls that began then or later: 2h, 2026-01-31T10:00 (UTC)."
        ),
    ] = None,
    until: Annotated[
        str | None, typer.Option("--until", metavar="WHEN", help="Only calls that began earlier than that.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Write over a file that is no report, too.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the numbers as JSON; without -o there is no page then.")
    ] = False,
) -> None:
    """Make one HTML page of many calls: what they waited for, how long, and when.

    The page needs nothing but itself: no server and no network. It has the percentiles by endpoint and model, segments
    over time, cold calls against warm ones, and the waterfalls of the slowest calls.

    \b
    Recording, without a change of code:
      SPANWIRE_CALL_LOG=calls.jsonl python my_program.py
    Or from an OpenTelemetry Collector: what its "file" exporter writes.

    \b
    Examples:
      spanwire report calls.jsonl
      spanwire report calls*.jsonl.gz -o january.html --since 2026-01-01
      spanwire report traces.json --since 2h
      kubectl logs my-collector | spanwire report - -o - > report.html
      spanwire report calls.jsonl --json | jq .findings

    Lines that cannot be read are counted and left out. A report is written over an older one.

    Exit code: 0, 1 if there is nothing to report, 2 for wrong usage or files that
    cannot be read or written.
    """  # noqa: D301 - \b: click keeps the line breaks that follow
    from .report import Task, run_report  # only this command needs it

    task = Task(tuple(files or ()), output, since=since, until=until, force=force, as_json=as_json)
    raise typer.Exit(run_report(task))


# --- transports -------------------------------------------------------------------------------------------------------


@app.command(short_help="List the installed transports.")
def transports(
    as_json: Annotated[bool, typer.Option("--json", help="Print the same as JSON.")] = False,
) -> None:
    """List the installed transports: what they serve, and where they are from.

    A plugin that is broken is shown with the reason. SPANWIRE_DISABLE_PLUGINS=a,b leaves plugins out, by the name of
    their entry point or distribution.

    \b
    With --json: {"schema": 1, "plugins": [{"distribution", "version", "module",
    "entries", "status", "transports": [{"name", "schemes", "dialects",
    "capabilities", "contract"}]}]}
    """  # noqa: D301 - \b: click keeps the line breaks that follow
    rows = Registry().describe()
    if as_json:
        print_json({"schema": 1, "plugins": rows})
    else:
        print_transports(rows)


# --- new plugins ------------------------------------------------------------------------------------------------------

_JSON = typer.Option("--json", help="Print what was made as JSON.")
_OUTPUT = typer.Option("--output", "-o", metavar="DIR", help="Where the project's folder is made.")


@app.command("new-transport", short_help="Begin a transport of your own: a project that works.")
def new_transport(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The URL scheme, and the transport's name.")],
    output: Annotated[Path, _OUTPUT] = Path(),
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Begin a transport of your own: a project that works and passes the conformance kit.

    Makes the folder spanwire-NAME, with a transport for NAME:// that speaks a small echo wire, a server for it, tests and a
    workflow for GitHub. Replace the wire by yours, and keep the tests green. Needs no network.

    \b
    Example:
      spanwire new-transport my-wire
      cd spanwire-my-wire
      pip install -e '.[test]' && pytest

    Exit code: 0, 2 for wrong usage, a name that is taken, a folder that exists.
    """  # noqa: D301 - \b: click keeps the line breaks that follow
    _new("transport", name, output, as_json=as_json)


@app.command("new-dialect", short_help="Begin a dialect of your own: a server's message schema.")
def new_dialect(
    name: Annotated[str, typer.Argument(metavar="NAME", help='As in Endpoint(dialect="NAME").')],
    transport: Annotated[
        str, typer.Option("--transport", metavar="TRANSPORT", help="The transport that it belongs to.")
    ] = "sse",
    output: Annotated[Path, _OUTPUT] = Path(),
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Begin a dialect of your own: a server's message schema on a transport that is there.

    Makes the folder spanwire-NAME, with a small schema, tests that run the conformance kit and make a call over HTTP, and
    a workflow for GitHub. Put your server's schema into its place. Needs no network.

    \b
    Example:
      spanwire new-dialect my-server
      cd spanwire-my-server
      pip install -e '.[test]' && pytest

    Exit code: 0, 2 for wrong usage, a name that is taken, a folder that exists.
    """  # noqa: D301 - \b: click keeps the line breaks that follow
    _new("dialect", name, output, transport=transport, as_json=as_json)


def _new(kind: Kind, name: str, output: Path, *, transport: str = "", as_json: bool) -> None:
    from .generate import generate, project_of  # only these two commands need it

    project = project_of(kind, name, transport=transport)
    made = generate(project, output)
    where = output / project.distribution
    if as_json:
        files = [path.as_posix() for path in made]
        print_json({"schema": 1, "folder": str(where), "distribution": project.distribution, "files": files})
        return
    typer.echo(f"{where}: {plural(len(made), 'file')}")
    for path in made:
        typer.echo(f"  {path.as_posix()}")
    typer.echo(f"\nNext: cd {where} && pip install -e '.[test]' && pytest")
