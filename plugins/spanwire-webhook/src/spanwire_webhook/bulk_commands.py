"""``spanwire jobs submit | watch | retry | export``: files of calls as jobs."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from spanwire.errors import ConfigurationError, SpanwireError, visible

from .options import StoreOption

if TYPE_CHECKING:
    from spanwire.endpoint import Endpoint
    from spanwire.jobs.bulk import Bulk, BulkCounts, JSONLFile
    from spanwire.jobs.contract import Store
    from spanwire.manager import ConnectionManager

__all__ = ["add_to"]

_OPENAI = "api.openai.com"
#: Failures that are shown while they happen; `export --failed` has all of them.
_SHOWN = 3
#: Seconds between two lines of progress, where there is no terminal for a bar.
_LINE_S = 5.0

_File = Annotated[
    Path, typer.Argument(metavar="FILE", help="One call a line: rows of OpenAI's batch files, or bodies.")
]
_URL = Annotated[str | None, typer.Option("--url", metavar="URL", help="The server's base URL.", show_default=False)]
_Dialect = Annotated[
    str | None,
    typer.Option("--dialect", metavar="NAME", help="Its schema of jobs; generic by default.", show_default=False),
]
_Model = Annotated[
    str | None, typer.Option("--model", "-m", metavar="NAME", help="For lines that name none.", show_default=False)
]
_Group = Annotated[
    str | None,
    typer.Option(
        "--group", metavar="NAME", help="By default the file's name, and a hash of what is in it.", show_default=False
    ),
]
_Window = Annotated[
    int | None,
    typer.Option("--window", min=1, metavar="N", help="Most jobs that are open at once.", show_default=False),
]
_Shard = Annotated[
    int | None,
    typer.Option(
        "--shard", min=1, metavar="N", help="Most texts, or calls of a batch, in one job.", show_default=False
    ),
]
_NoBatch = Annotated[bool, typer.Option("--no-batch", help="No batches, where the provider has them.")]
_Option = Annotated[
    list[str] | None,
    typer.Option(
        "--option", metavar="NAME=JSON", help="An option of the endpoint. May be repeated.", show_default=False
    ),
]
_KeyEnv = Annotated[
    str | None,
    typer.Option(
        "--api-key-env",
        metavar="NAME",
        help="Environment variable with the API key. By default SPANWIRE_API_KEY, then OPENAI_API_KEY, the latter only "
        "towards api.openai.com.",
        show_default=False,
    ),
]
_Header = Annotated[
    list[str] | None,
    typer.Option("--header", "-H", metavar="'NAME: VALUE'", help="Sent with each submit.", show_default=False),
]
_Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="OUT", help="Results as JSON lines.", show_default=False)
]
_JSON = Annotated[bool, typer.Option("--json", help="Print the counts as one JSON object.")]


def add_to(jobs: typer.Typer) -> None:
    """Add these commands to ``spanwire jobs``."""
    for name, command in (("submit", _submit), ("watch", _watch), ("retry", _retry), ("export", _export)):
        jobs.command(name=name)(command)


# --- the commands -------------------------------------------------------------------------------------------------------


def _submit(
    file: _File,
    url: Annotated[str, typer.Option("--url", metavar="URL", help="The server's base URL.")],
    dialect: _Dialect = None,
    model: _Model = None,
    group: _Group = None,
    window: _Window = None,
    shard: _Shard = None,
    no_batch: _NoBatch = False,
    deadline_s: Annotated[
        float | None,
        typer.Option(
            "--deadline", min=0.001, metavar="SECONDS", help="Of each job; a day by default.", show_default=False
        ),
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Leave once the server has all of them.")] = False,
    output: _Output = None,
    store: StoreOption = None,
    option: _Option = None,
    api_key_env: _KeyEnv = None,
    header: _Header = None,
    as_json: _JSON = False,
) -> None:
    """Submit the calls of a file as jobs, and wait for their results.

    Started again on the same file it submits only what is missing. Ctrl-C leaves the jobs as they are: the same command goes
    on. Results stay in the store; `spanwire jobs export FILE` writes them.

    \b
    Examples:
      spanwire jobs submit texts.jsonl --url https://api.openai.com/v1 --dialect openai
      spanwire jobs submit texts.jsonl --url http://10.0.0.7/v1 --model my-embedder -o vectors.jsonl
      spanwire jobs submit texts.jsonl --url http://10.0.0.7/v1 --detach && spanwire jobs watch texts.jsonl

    Exit code: 0, 1 if some have failed, 2 for wrong usage, 130 after Ctrl-C.
    """  # noqa: D301 - \b: click keeps the line breaks that follow
    with _usage():
        if detach and output is not None:
            raise ConfigurationError(
                "--detach has no results to write: `spanwire jobs export` does later, without -o here"
            )
        endpoint = _endpoint(url, dialect, store, option, api_key_env, header)
        asked = _Asked(file, model, group, window, shard, no_batch, deadline_s)
        raise typer.Exit(_run(endpoint, asked, detach=detach, output=output, as_json=as_json))


def _retry(
    file: _File,
    url: _URL = None,
    dialect: _Dialect = None,
    model: _Model = None,
    group: _Group = None,
    window: _Window = None,
    shard: _Shard = None,
    no_batch: _NoBatch = False,
    output: _Output = None,
    store: StoreOption = None,
    option: _Option = None,
    api_key_env: _KeyEnv = None,
    header: _Header = None,
    as_json: _JSON = False,
) -> None:
    """Submit again what has failed, has expired or is lost, and what is missing.

    Where to is in the store. --model, --group, --shard, --no-batch and --option have to be as they were for `submit`.

    Exit code: 0, 1 if some have failed, 2 for wrong usage, 130 after Ctrl-C.
    """
    with _usage():
        asked = _Asked(file, model, group, window, shard, no_batch, None)
        url, dialect = _where(store, asked.group, url, dialect)
        endpoint = _endpoint(url, dialect, store, option, api_key_env, header)
        raise typer.Exit(_run(endpoint, asked, retry_failed=True, output=output, as_json=as_json))


def _watch(
    what: Annotated[str, typer.Argument(metavar="GROUP|FILE", help="A group of jobs, or the file that they are from.")],
    url: _URL = None,
    dialect: _Dialect = None,
    store: StoreOption = None,
    option: _Option = None,
    api_key_env: _KeyEnv = None,
    as_json: _JSON = False,
) -> None:
    """Look after the jobs of a group until none is open.

    Asks the provider where no webhooks come. Another process may do the same.

    Exit code: 0, 1 if some have failed, 2 for wrong usage, 130 after Ctrl-C.
    """
    with _usage():
        group = _group_of(Path(what)) if Path(what).is_file() else what
        url, dialect = _where(store, group, url, dialect)
        endpoint = _endpoint(url, dialect, store, option, api_key_env, None)
        raise typer.Exit(_watched(endpoint, group, as_json=as_json))


def _export(
    file: _File,
    output: _Output = None,
    failed: Annotated[bool, typer.Option("--failed", help="Only what has failed.")] = False,
    url: _URL = None,
    dialect: _Dialect = None,
    model: _Model = None,
    group: _Group = None,
    shard: _Shard = None,
    no_batch: _NoBatch = False,
    store: StoreOption = None,
    option: _Option = None,
) -> None:
    """Write the results of a file's calls, in their order, as OpenAI's batches have them.

    Asks nobody: what has ended is in the store. --model, --group, --shard, --no-batch and --option have to be as they were for
    `submit`.

    Exit code: 0, 1 if some have failed or have not ended, 2 for wrong usage.
    """
    with _usage():
        asked = _Asked(file, model, group, None, shard, no_batch, None)
        url, dialect = _where(store, asked.group, url, dialect)
        # Nothing is sent, so nothing comes back: schemas that answer by webhook alone would want an address.
        endpoint = _endpoint(url, dialect, store, [*(option or ()), 'public_url="http://127.0.0.1/none"'], None, None)
        from spanwire.manager import ConnectionManager

        manager = ConnectionManager(telemetry=None)
        try:
            counts = _write_results(asked.bulk(manager, endpoint), asked.file, output, failed=failed)
        finally:
            asyncio.run(manager.aclose())
        if not counts["succeeded"] and not counts["failed"]:
            raise ConfigurationError(
                f"the store has no results of {file} in group {asked.group!r}: were --model, --shard, --no-batch and --option "
                "the same for `submit`?"
            )
        _say(", ".join(f"{count:,} {name}" for name, count in counts.items() if count))
        raise typer.Exit(1 if counts["failed"] or counts["not ended"] else 0)


# --- what is asked for --------------------------------------------------------------------------------------------------


class _Asked:
    """A file, and how it is cut."""

    def __init__(
        self,
        path: Path,
        model: str | None,
        group: str | None,
        window: int | None,
        shard: int | None,
        no_batch: bool,
        deadline_s: float | None,
    ) -> None:
        from spanwire.jobs.bulk import JSONLFile

        self.file: JSONLFile = JSONLFile(path, model=model)
        self.group = group or _group_of(path)
        self._how: dict[str, Any] = {"window": window, "shard": shard, "deadline_s": deadline_s}
        self._how["batch"] = False if no_batch else None

    def bulk(self, manager: ConnectionManager, endpoint: Endpoint, *, retry_failed: bool = False) -> Bulk:
        """Not begun."""
        return manager.submit_many(endpoint, self.file, group=self.group, retry_failed=retry_failed, **self._how)


def _group_of(path: Path) -> str:
    """The file's name and a hash of what is in it."""
    from spanwire.jobs.bulk.rows import opened

    try:
        with opened(path) as file:
            return f"{path.stem}-{hashlib.file_digest(file, 'sha256').hexdigest()[:12]}"
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror or error}") from error


def _endpoint(
    url: str,
    dialect: str | None,
    store: str | None,
    option: Iterable[str] | None,
    api_key_env: str | None,
    header: Iterable[str] | None,
) -> Endpoint:
    from spanwire.endpoint import Endpoint

    options: dict[str, Any] = {} if store is None else {"store": store}
    for text in option or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigurationError(f"--option {name!r:.40}: write it as NAME=JSON")
        try:
            options.setdefault(name, msgspec.json.decode(value))
        except msgspec.DecodeError:
            options.setdefault(name, value)  # text, such as an address
    headers = {}
    for text in header or ():
        name, colon, value = text.partition(":")
        if not colon or not name.strip():
            raise ConfigurationError("--header: write it as 'Name: value'")
        headers[name.strip()] = value.strip()
    endpoint = Endpoint(url, transport="webhook", dialect=dialect, headers=headers, options=options)
    return msgspec.structs.replace(endpoint, api_key=_api_key(endpoint, api_key_env))


def _api_key(endpoint: Endpoint, name: str | None) -> str | None:
    """As ``spanwire probe`` does: out of the environment, and OpenAI's to OpenAI alone."""
    if name is not None:
        key = os.environ.get(name)
        if not key:
            raise ConfigurationError(f"--api-key-env: the environment variable {name} is not set")
        return key
    key = os.environ.get("SPANWIRE_API_KEY")
    if not key and endpoint.origin.host == _OPENAI:
        key = os.environ.get("OPENAI_API_KEY")
    return key or None


def _where(store: str | None, group: str, url: str | None, dialect: str | None) -> tuple[str, str | None]:
    """Where the jobs of a group went, as far as it is not said."""
    if url is not None and dialect is not None:
        return url, dialect
    from spanwire.endpoint import Endpoint
    from spanwire.jobs.runner import origin_of

    from .commands import _existing

    opened = _existing(store)
    try:
        found = _parties(opened, group)
    finally:
        opened.close()
    wanted = None if url is None else origin_of(Endpoint(url, transport="webhook"))
    fitting = sorted(
        (origin, name)
        for origin, name in found
        if (wanted is None or origin == wanted) and (dialect is None or name == dialect)
    )
    if len(fitting) == 1:
        return (fitting[0][0] if url is None else url), fitting[0][1]
    some = fitting or sorted(found)
    there = ", ".join(f"{origin} ({name})" for origin, name in some)
    if not some:
        raise ConfigurationError(
            f"the store has no jobs of group {group!r}: give --url and --dialect, or --group, or --store"
        )
    if fitting:
        raise ConfigurationError(f"group {group!r} has jobs at {there}: say which by --url and --dialect")
    raise ConfigurationError(
        f"group {group!r} has jobs at {there} alone: give both --url and --dialect for another place"
    )


def _parties(store: Store, group: str) -> set[tuple[str, str]]:
    """The endpoints and dialects that a group has jobs of."""
    found = {(row.origin, row.dialect) for row in store.due(float("inf"), 10_000) if row.group == group}
    after = (0.0, "")
    while rows := store.completed(group, after):
        found.update((row.origin, row.dialect) for row in rows)
        after = (rows[-1].resolved_s, rows[-1].id)
    return found


# --- doing it -----------------------------------------------------------------------------------------------------------


def _run(
    endpoint: Endpoint,
    asked: _Asked,
    *,
    retry_failed: bool = False,
    detach: bool = False,
    output: Path | None = None,
    as_json: bool,
) -> int:
    from spanwire.manager import ConnectionManager

    if output is not None:
        _check_output(output, asked.file.path)  # before the hours that the jobs may take
    last: list[BulkCounts] = []

    async def main() -> None:
        async with ConnectionManager() as manager:
            bulk = asked.bulk(manager, endpoint, retry_failed=retry_failed)
            with _progress(asked.group) as show:
                ticking = asyncio.create_task(_tick(bulk, show))
                try:
                    async with bulk:
                        if detach:
                            await bulk.submitted()
                        else:
                            await _take(bulk, asked.file)
                finally:
                    ticking.cancel()
                    last.append(bulk.counts)
            if output is not None:
                _write_results(bulk, asked.file, output, failed=False)

    interrupted = False
    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        interrupted = True
    counts = last[-1] if last else None
    if counts is not None:
        _tell(asked, counts, interrupted=interrupted, detached=detach, as_json=as_json)
    if interrupted:
        return 130
    return 1 if counts is None or counts.failed else 0


async def _take(bulk: Bulk, file: JSONLFile) -> None:
    shown = 0
    async for result in bulk:
        if result.error is not None and shown < _SHOWN:
            shown += 1
            line = await asyncio.to_thread(file.line_of, result.index)
            _say(f"line {line}: {type(result.error).__name__}: {result.error}")


async def _tick(bulk: Bulk, show: Callable[[BulkCounts], None]) -> None:
    while True:
        show(bulk.counts)
        await asyncio.sleep(0.2)


def _tell(asked: _Asked, counts: BulkCounts, *, interrupted: bool, detached: bool, as_json: bool) -> None:
    if as_json:
        said = {"group": asked.group, **msgspec.structs.asdict(counts), "interrupted": interrupted}
        typer.echo(msgspec.json.format(msgspec.json.encode(said)).decode())
    total = counts.submitted if counts.total is None else counts.total
    path = asked.file.path
    if interrupted:
        _say(
            f"interrupted: {counts.submitted:,} of {total:,} submitted, {counts.done + counts.failed:,} ended. The jobs go on: the "
            f"same command submits what is missing, `spanwire jobs watch {asked.group}` waits for what is open"
        )
    elif detached:
        _say(f"{counts.submitted:,} of {total:,} submitted: `spanwire jobs watch {asked.group}` waits for them")
    else:
        again = f", {counts.found:,} of them in the store before" if counts.found else ""
        _say(f"{counts.done:,} of {total:,} succeeded, {counts.failed:,} failed{again}")
        if counts.failed:
            _say(f"`spanwire jobs export {path} --failed` says why, `spanwire jobs retry {path}` submits them again")


def _watched(endpoint: Endpoint, group: str, *, as_json: bool) -> int:
    from spanwire.manager import ConnectionManager

    states: Counter[str] = Counter()

    async def main() -> None:
        async with ConnectionManager() as manager:
            try:
                ended = manager.jobs.ended(group, endpoint=endpoint)
            except ConfigurationError as error:  # by webhook alone, and there is no receiver here: it can only look
                _say(f"nobody is asked: {error.message}")
                ended = manager.jobs.ended(group, store=endpoint.options.get("store"))
            said_s = time.monotonic()
            async for job in ended:
                assert job.row is not None
                states[job.row.state] += 1
                if time.monotonic() - said_s > _LINE_S:
                    said_s = time.monotonic()
                    _say(_words(states))

    interrupted = False
    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        interrupted = True
    if as_json:
        said = {"group": group, "jobs": dict(sorted(states.items())), "interrupted": interrupted}
        typer.echo(msgspec.json.format(msgspec.json.encode(said)).decode())
    _say(f"jobs of {group}: {_words(states) or 'none has ended'}")
    if set(states) - {"succeeded"}:
        _say(
            "of a job that failed for one of its calls `spanwire jobs submit`, as before, tries the others apart; `spanwire jobs retry` "
            "submits again all that has not succeeded"
        )
    if interrupted:
        return 130
    return 0 if set(states) <= {"succeeded"} else 1


def _words(states: Counter[str]) -> str:
    return ", ".join(f"{count:,} {state}" for state, count in sorted(states.items()))


def _write_results(bulk: Bulk, file: JSONLFile, output: Path | None, *, failed: bool) -> Counter[str]:
    """Rows of those that have ended; counts of all."""
    from spanwire.jobs.bulk.rows import result_row

    counts: Counter[str] = Counter(dict.fromkeys(("succeeded", "failed", "not ended"), 0))
    with _written(output, file.path) as write:
        for result, row in zip(bulk.stored(), file.rows(), strict=False):
            outcome = result.reply if result.error is None else result.error
            counts["not ended" if outcome is None else "succeeded" if result.error is None else "failed"] += 1
            if outcome is not None and (result.error is not None or not failed):
                write(result_row(result.index, row.custom_id, result.job, outcome))
    return counts


def _check_output(path: Path, source: Path) -> None:
    """Raises ConfigurationError: nothing can be written there."""
    if path.exists() and path.samefile(source):
        raise ConfigurationError(f"{path} is the file of the calls: write to another one (-o)")
    if path.is_dir() or not path.absolute().parent.is_dir():
        reason = "it is a directory" if path.is_dir() else "its directory is not there"
        raise ConfigurationError(f"{path} cannot be written: {reason}")


@contextlib.contextmanager
def _written(path: Path | None, source: Path) -> Iterator[Callable[[bytes], object]]:
    """All or nothing, in one step, once it is whole; stdout without a path."""
    if path is None:
        yield sys.stdout.buffer.write
        sys.stdout.buffer.flush()
        return
    try:
        if path.exists() and not path.is_file():  # /dev/stdout and the like
            with path.open("wb") as file:
                yield file.write
            return
        _check_output(path, source)
        beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with beside.open("wb") as file:
                yield file.write
            beside.replace(path)
        finally:
            with contextlib.suppress(OSError):
                beside.unlink()
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror or error}") from error


@contextlib.contextmanager
def _progress(group: str) -> Iterator[Callable[[BulkCounts], None]]:
    """A bar on stderr if that is a terminal, else a line now and then."""
    if not sys.stderr.isatty():
        yield _lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[more]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=4) as bar:
        task = bar.add_task(group, total=None, more="")

        def show(counts: BulkCounts) -> None:
            more = f"{counts.submitted:,} submitted"
            if counts.failed:
                more += f", {counts.failed:,} failed"
            bar.update(task, total=counts.total, completed=counts.done + counts.failed, more=more)

        yield show


def _lines() -> Callable[[BulkCounts], None]:
    said_s = time.monotonic()

    def show(counts: BulkCounts) -> None:
        nonlocal said_s
        if time.monotonic() - said_s > _LINE_S:
            said_s = time.monotonic()
            total = "?" if counts.total is None else f"{counts.total:,}"
            _say(f"{counts.submitted:,} of {total} submitted, {counts.done:,} succeeded, {counts.failed:,} failed")

    return show


def _say(text: str) -> None:
    typer.echo(f"spanwire: {visible(' '.join(text.split()))}", err=True)


@contextlib.contextmanager
def _usage() -> Iterator[None]:
    """What cannot be meant is wrong usage; everything else of ours is one line and exit code 1, as everywhere."""
    try:
        yield
    except ConfigurationError as error:
        _say(str(error))
        raise typer.Exit(2) from error
    except SpanwireError as error:
        _say(str(error))
        raise typer.Exit(1) from error
