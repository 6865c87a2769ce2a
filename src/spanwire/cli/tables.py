"""What ``spanwire probe`` and ``spanwire transports`` show to people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import typer
from rich.table import Table
from rich.text import Text

from ..percentiles import P95_FROM, P99_FROM
from ..timeline import weakest_source
from .output import milliseconds, new_table, plural, print_table
from .probe import Probe
from .stats import Group, Report, Row, Summary

__all__ = ["print_probe", "print_transports"]

_TIMES = ("total", "first_byte", "first_content")
_TOKEN_SOURCES = {
    "usage": "as the server counted them",
    "chunks": "counted as pieces of content: the server gave no usage",
    "mixed": "as the server counted them, else as pieces of content",
}


# --- probe ------------------------------------------------------------------------------------------------------------


def print_probe(probe: Probe) -> None:
    """The report of a run in which at least one call went well."""
    found = probe.report()
    plan = probe.plan
    over = f" over {probe.transport}" if probe.transport else ""
    typer.echo(f"{plan.call.model} at {plan.endpoint.address}{over}{'' if plan.streamed else ', not streamed'}")
    for line in _summary(probe, found):
        typer.echo(line)
    typer.echo()
    groups = [(name, group) for name, group in (("cold", found.cold), ("warm", found.warm)) if group is not None]
    print_table(_table(groups))
    for line in _notes(groups):
        typer.echo(line)


def _summary(probe: Probe, found: Report) -> Iterator[str]:
    done = found.ok + found.failed
    planned = "" if done == probe.plan.calls else f" of {probe.plan.calls:,} planned"
    how = f", {probe.plan.concurrency} at a time" if probe.plan.concurrency > 1 else ""
    yield (
        f"calls        {found.ok:,} ok, {found.failed:,} failed{planned} in {probe.elapsed_s:.2f} s{how}"
        f"{' (interrupted)' if probe.interrupted else ''}"
    )
    for name, (count, message) in found.errors.items():
        yield f"failed       {count:,} x {name}: {message}"
    cold = found.cold.calls if found.cold is not None else 0
    warm = found.warm.calls if found.warm is not None else 0
    yield f"connections  {probe.connections_opened:,} opened; {plural(cold, 'cold call')}, {warm:,} warm"
    tokens = found.tokens
    if tokens is not None:
        yield f"tokens       {tokens.output:,} ({_TOKEN_SOURCES[tokens.source]})"
        yield f"tokens/s     {tokens.per_second:,.1f} over the run"
        if tokens.per_second_in_call is not None:
            median = "" if found.ok == 1 else " (median)"
            yield f"             {tokens.per_second_in_call:,.1f} in a call, after its first content{median}"


def _columns(group: Group) -> Sequence[str]:
    """What so many calls can tell."""
    if group.calls == 1:
        return ("p50",)
    if group.calls < P95_FROM:
        return ("p50", "max")
    return ("p50", "p95", "max" if group.calls < P99_FROM else "p99")


def _cell(summary: Summary, column: str) -> str:
    value: float | None = getattr(summary, f"{column}_s")
    return "-" if value is None else milliseconds(value)


def _table(groups: Sequence[tuple[str, Group]]) -> Table:
    table = new_table()
    table.add_column("milliseconds", no_wrap=True)
    table.add_column("source", no_wrap=True)
    counted = {name: _partial(group) for name, group in groups}
    for name, group in groups:
        table.add_column("")  # keeps the groups apart
        for number, column in enumerate(_columns(group)):
            label = column if group.calls > 1 else ""
            table.add_column(f"{name} {label}".strip() if number == 0 else label, justify="right", no_wrap=True)
        if counted[name]:
            table.add_column("calls", justify="right", no_wrap=True)

    def add(label: str, source: str, summaries: Mapping[str, Summary | None], style: str | None = None) -> None:
        cells: list[str] = []
        for name, group in groups:
            cells.append("")
            summary = summaries[name]
            cells.extend(_cell(summary, column) if summary is not None else "" for column in _columns(group))
            if counted[name]:
                cells.append(f"{summary.n:,}" if summary is not None and summary.n < group.calls else "")
        table.add_row(Text(label), source, *cells, style=style)

    for time in _TIMES:
        if any(time in group.times for _, group in groups):
            add(
                time.replace("_", " "),
                "measured",
                {name: group.times.get(time) for name, group in groups},
                "bold" if time == "total" else None,
            )
    rows = {name: {(row.segment, row.part): row for row in group.rows} for name, group in groups}
    table.add_section()
    for segment, part in _merged([group.rows for _, group in groups]):
        found = [rows[name].get((segment, part)) for name, _ in groups]
        present = [row for row in found if row is not None]
        source = present[0].source
        for row in present:
            source = weakest_source(source, row.source)
        summaries = {name: row.summary if row else None for (name, _), row in zip(groups, found, strict=True)}
        add(f"  {part}" if part else segment, source, summaries, None if part else "bold")
    return table


def _partial(group: Group) -> bool:
    """Whether some row is about only some of the calls."""
    return any(row.summary.n < group.calls for row in group.rows) or any(
        group.times[name].n < group.calls for name in _TIMES if name in group.times
    )


def _merged(lists: Sequence[Sequence[Row]]) -> list[tuple[str, str]]:
    """The rows of all groups: segments in order of the first that has them, parts below their segment."""
    from ..timeline import SEGMENTS

    keys = dict.fromkeys((row.segment, row.part) for rows in lists for row in rows)
    order = [*SEGMENTS, *(segment for segment, _ in keys if segment not in SEGMENTS)]
    return sorted(keys, key=lambda key: order.index(key[0]))  # stable: parts keep their order


def _notes(groups: Sequence[tuple[str, Group]]) -> Iterator[str]:
    sizes = [group.calls for _, group in groups]
    lines = []
    if any(size > 1 for size in sizes):
        lines.append("Percentiles are nearest-rank: each is the time of one of the calls.")
    if any(1 < size < P99_FROM for size in sizes):
        lines.append(f"max where the calls are too few: p95 needs {P95_FROM} of them, p99 {P99_FROM}.")
    if any(_partial(group) for _, group in groups):
        lines.append("calls: how many of them have this part, where not all do.")
    if lines:
        yield ""
        yield from lines


# --- transports -------------------------------------------------------------------------------------------------------


def print_transports(rows: Sequence[Mapping[str, Any]]) -> None:
    """What ``Registry.describe()`` gives, and below the table why something is not there."""
    table = new_table()
    table.add_column("transport", no_wrap=True)
    # Narrow enough that the built-in transports fit into 80 columns.
    for name, least, most in (("schemes", 7, 24), ("dialects", 12, 24), ("capabilities", 12, 24), ("from", 17, 18)):
        table.add_column(name, overflow="fold", min_width=least, max_width=most)
    table.add_column("contract", justify="right", no_wrap=True)
    table.add_column("status", no_wrap=True)
    reasons: list[str] = []
    for row in rows:
        status, reason = _status(row["status"])
        version = row["version"]
        origin = row["distribution"] if version is None else f"{row['distribution']} {version}"
        if reason:
            reasons.append(f"{origin}: {reason}")
        style = None if status == "ok" else "red" if status == "broken" else "dim"
        found: Sequence[Mapping[str, Any]] = row["transports"]
        for transport in found:
            table.add_row(
                Text(transport["name"]),
                Text(",\n".join(transport["schemes"]) or "-"),
                Text(",\n".join(transport["dialects"]) or "-"),
                Text(", ".join(transport["capabilities"]) or "-"),
                Text(origin),
                str(transport["contract"]),
                status,
                style=style,
            )
        if not found:
            table.add_row(Text(", ".join(row["entries"])), "", "", "", Text(origin), "", status, style=style)
    if not rows:
        typer.echo("No transport is installed. Get the built-in one with: pip install --force-reinstall spanwire-sse")
        return
    print_table(table)
    for reason in reasons:
        typer.echo(f"\n{reason}")


def _status(status: str) -> tuple[str, str]:
    """``describe()`` says ``ok``, ``disabled by ...``, or what is wrong."""
    if status == "ok":
        return "ok", ""
    return ("disabled" if status.startswith("disabled") else "broken"), status
