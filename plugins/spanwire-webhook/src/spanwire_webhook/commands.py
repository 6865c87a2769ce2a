"""``spanwire receive`` and ``spanwire jobs``: their arguments and help texts."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from spanwire.errors import ConfigurationError, visible

from .bulk_commands import add_to
from .options import StoreOption
from .settings import ReceiverSettings

if TYPE_CHECKING:
    from spanwire.jobs.contract import JobCodec, JobRow, Store

    from .receiver import Receiver

__all__ = ["jobs", "receive"]

#: For webhooks that are being received when it is told to stop, in seconds: below what Kubernetes gives by default, 30.
_GRACE_S = 20
#: A receiver that was told to stop has to end some time.
_MOST_DRAIN_S = 3600.0

receive = typer.Typer(add_completion=False, rich_markup_mode=None)
jobs = typer.Typer(
    add_completion=False, rich_markup_mode=None, no_args_is_help=True, help="Look at jobs, and at what came for them."
)
add_to(jobs)

_PublicURL = Annotated[
    str | None,
    typer.Option(
        "--public-url",
        envvar="SPANWIRE_WEBHOOK_PUBLIC_URL",
        metavar="URL",
        help="Where providers reach the receiver.",
        show_default=False,
    ),
]
_Unsigned = Annotated[
    list[str] | None,
    typer.Option(
        "--unsigned",
        metavar="DIALECT",
        help="Believe this dialect's webhooks by their address alone: the server was given no secret. Repeatable.",
        show_default=False,
    ),
]
_Strict = Annotated[bool, typer.Option("--strict", help="Refuse right signatures that are older than 300 s.")]


@receive.command(name="receive")
def _receive(
    store: StoreOption = None,
    host: Annotated[str, typer.Option("--host", help="Listen here.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any that is free.")] = 8080,
    public_url: _PublicURL = None,
    unsigned: _Unsigned = None,
    strict: _Strict = False,
    body_limit: Annotated[int, typer.Option("--body-limit", metavar="BYTES", min=1, help="Of a webhook's body.")] = 64
    * 1024
    * 1024,
    drain: Annotated[
        float,
        typer.Option(
            "--drain",
            metavar="SECONDS",
            min=0.0,
            max=_MOST_DRAIN_S,
            help="Told to stop: go on for so long, but not ready.",
        ),
    ] = 0.0,
) -> None:
    """Take webhooks into a store, until it is told to stop.

    Answers 2xx once a webhook is on the disk. Programs that wait for the jobs read the same store.

    GET /healthz: the process answers. GET /readyz: the store can be written, and nobody has told it to stop. After
    SIGTERM it finishes what is being received, and exits with 0.

    \b
    Secrets come from the environment, several separated by blanks:
      SPANWIRE_WEBHOOK_SECRETS_BASETEN, SPANWIRE_WEBHOOK_SECRETS_REPLICATE, ...
      SPANWIRE_WEBHOOK_SECRETS_COG: the WEBHOOK_AUTH_TOKEN of Cog's servers
      SPANWIRE_WEBHOOK_KEYS: instance keys in hex, besides the store's own

    \b
    Examples:
      spanwire receive --store sqlite:///jobs.db --public-url https://hooks.example.com
      spanwire receive --store sqlite:////srv/jobs.db --host 0.0.0.0 --port 80
    """  # noqa: D301 - \b: click keeps the line breaks that follow
    from .embedded import listen, server_for

    if not host.strip():  # sockets take that for every address of the machine
        raise ConfigurationError("--host is empty: 127.0.0.1 for this machine alone, 0.0.0.0 for all of its addresses")
    settings = ReceiverSettings.from_environment(
        public_url=public_url, unsigned=frozenset(unsigned or ()), strict=strict, body_limit_bytes=body_limit
    )
    opened = _open(store)
    try:
        receiver = _receiver(opened, settings)
        receiver.tell = _counting()
        listening = listen(host, port)
        try:
            typer.echo(f"receiving on http://{host}:{listening.getsockname()[1]}", err=True)
            sys.stderr.flush()
            server_for(receiver, drain_s=drain, grace_s=_GRACE_S).run(sockets=[listening])
        finally:
            listening.close()
    finally:
        opened.close()


@jobs.command(name="list")
def _list(
    store: StoreOption = None,
    group: Annotated[str, typer.Option("--group", help="Ended jobs of this group.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """List open jobs, and ended ones of a group."""
    opened = _existing(store)
    try:
        rows = [*opened.due(float("inf"), 10_000), *opened.completed(group)]
    finally:
        opened.close()
    if as_json:
        _print_json([_shown(row) for row in rows])
        return
    now_s = time.time()
    for row in rows:
        age = f"{now_s - row.created_s:.0f} s" if row.created_s else "-"
        typer.echo(visible(f"{row.id}  {row.state:<14}  {row.dialect}/{row.model or '-'}  {age}"))
    if not rows:
        typer.echo("no jobs", err=True)


@jobs.command(name="show")
def _show(
    job: Annotated[str, typer.Argument(metavar="ID", help="Ours, or DIALECT:ID of the provider.")],
    store: StoreOption = None,
    body: Annotated[bool, typer.Option("--body", help="The result's bytes, as they came, and nothing else.")] = False,
) -> None:
    """Show a job as the store has it."""
    opened = _existing(store)
    try:
        dialect, colon, provider_id = job.partition(":")
        row = opened.find(dialect, provider_id) if colon else opened.get(job)
        if row is None:
            raise ConfigurationError(f"the store has no job {job!r:.100}")
        if not body:
            _print_json(_shown(row))
            return
        if not row.result:
            raise ConfigurationError(f"the job {row.id} is {row.state} and has no result")
        sys.stdout.buffer.write(opened.body(row.result))
        sys.stdout.buffer.flush()
    finally:
        opened.close()


@jobs.command(name="reverify")
def _reverify(
    store: StoreOption = None, public_url: _PublicURL = None, unsigned: _Unsigned = None, strict: _Strict = False
) -> None:
    """Verify again what was kept aside for its signature, with the secrets of now.

    Secrets are taken as by `spanwire receive`. What is right now is applied by whoever waits for the job.
    """
    settings = ReceiverSettings.from_environment(
        public_url=public_url, unsigned=frozenset(unsigned or ()), strict=strict
    )
    opened = _existing(store)
    try:
        right, tried = _receiver(opened, settings).verify_again()
    finally:
        opened.close()
    typer.echo(f"{right} of {tried} are right now")
    if right < tried:
        raise typer.Exit(1)


@jobs.command(name="check")
def _check(store: StoreOption = None, public_url: _PublicURL = None) -> None:
    """Ask our own public address: does what is sent arrive, and unchanged?

    Fails on redirects, pages of HTML, a body that a relay has written anew, and clocks that differ.
    """
    from .selfcheck import self_check

    settings = ReceiverSettings.from_environment(public_url=public_url)
    if settings.public_url is None:
        raise ConfigurationError("there is no public URL to check: give --public-url, or SPANWIRE_WEBHOOK_PUBLIC_URL")
    opened = _existing(store)
    try:
        checked = self_check(settings.public_url, _receiver(opened, settings).mac)
    finally:
        opened.close()
    for problem in checked.problems:
        typer.echo(f"spanwire: {visible(problem)}", err=True)
    if checked.problems:
        raise typer.Exit(1)
    typer.echo(
        f"all right: {checked.round_trip_s or 0.0:.3f} s there and back, clocks {checked.offset_s or 0.0:+.1f} s apart"
    )


def _counting() -> Callable[[str, str], None]:
    """Metrics of the receiver, where this process has a provider for them."""
    from spanwire.jobs.tracing import JobTelemetry
    from spanwire.telemetry import Telemetry

    return JobTelemetry(Telemetry()).webhook


def _existing(url: str | None) -> Store:
    """A store that is there: one that was mistyped is not made. Raises ConfigurationError."""
    from spanwire.errors import ConfigurationError
    from spanwire.jobs.stores import default_store_url, file_of

    url = default_store_url() if url is None else url
    path = file_of(url)
    if path is not None and not path.is_file():
        raise ConfigurationError(f"there is no store of jobs at {path}; programs make it when they submit")
    return _open(url)


def _open(url: str | None) -> Store:
    from spanwire.jobs.stores import default_store_url, open_store

    return open_store(default_store_url() if url is None else url)


def _receiver(store: Store, settings: ReceiverSettings) -> Receiver:
    from .receiver import Receiver

    return Receiver(store, _codecs(), settings)


def _codecs() -> dict[str, JobCodec]:
    """Schemas of all dialects that are installed for this transport."""
    from spanwire.endpoint import Endpoint
    from spanwire.plugins import Registry

    registry = Registry()
    spec = registry.spec_for(Endpoint("http://127.0.0.1", transport="webhook"))  # loads the plugin that has it
    return {name: dialect.codec for (owner, name), (dialect, _) in registry._dialects.items() if owner == spec.name}


def _shown(row: JobRow) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(row, input=b"", result=b""))
    if row.result:
        shown["result"] = "stored"
    return shown


def _print_json(data: Any) -> None:
    typer.echo(visible(msgspec.json.format(msgspec.json.encode(data)).decode()))  # inside texts, so it stays JSON
