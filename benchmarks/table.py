"""Results as Markdown. PURE."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from benchmarks.figures import Finding, Measured, Spread, Verdict, budget, by_workload, ratio
from benchmarks.workloads import WORKLOADS

HEAD = ("workload", "loop", "client", "figure", "median", "spread", "ratio", "budget", "rss, MiB", "also")


def number(value: float) -> str:
    """Three digits or so, and all that stand before the point; a count stays one."""
    if value == int(value):
        return f"{value:,.0f}"
    magnitude = abs(value)
    return f"{value:,.0f}" if magnitude >= 100 else f"{value:.1f}" if magnitude >= 10 else f"{value:.2f}"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose columns line up."""
    widths = [max(len(line[column]) for line in (head, *rows)) for column in range(len(head))]
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


def _row(one: Measured, group: Sequence[Measured], first: str) -> list[str]:
    row = WORKLOADS[one.workload]
    head = [one.workload, one.loop, one.client, row.unit]
    if not one.rounds:
        return [*head, "failed", "", "", "", "", ""]
    spread = Spread.of(one.values())
    base = next((other for other in group if other.client == first and other.rounds), None)
    times = ratio(one, base)
    ours = budget(one, group)
    rss = one.values("rss_mib")
    medians = {key: statistics.median(one.values(key)) for key in one.rounds[0]}
    return [
        *head,
        number(spread.median),
        f"{number(spread.low)} to {number(spread.high)}",
        "" if times is None else f"{times:.2f} x {first}",
        "" if ours is None else f"{ours.text}: {'met' if ours.met else 'missed'}",
        f"{statistics.median(rss):.0f}" if rss else "",
        row.also.format_map(medians),
    ]


def table(measured: Sequence[Measured], first: str) -> str:
    """A row for each client in each workload; ratios to the client ``first``."""
    rows = [_row(one, group, first) for group in by_workload(measured) for one in group]
    return markdown(HEAD, rows)


def pace_table(measured: Sequence[Measured]) -> str:
    """How many streams keep pace, by their number; empty if none was measured."""
    found: dict[tuple[str, str], dict[int, Measured]] = defaultdict(dict)
    for one in measured:
        group, _, size = one.workload.partition("/")
        if group == "thousand":
            found[one.client, one.loop][int(size)] = one
    sizes = sorted({size for by_size in found.values() for size in by_size})
    if not sizes:
        return ""

    def cell(one: Measured | None) -> str:
        if one is None:
            return ""
        if not one.rounds:
            return "failed"
        keep, streams = (statistics.median(one.values(key)) for key in ("keep_pace", "streams"))
        return f"{keep:.0f} of {streams:.0f}"

    head = ["streams that keep pace", "loop", *(f"{size:,}" for size in sizes)]
    return markdown(
        head,
        [
            [client, loop, *(cell(by[size]) if size in by else "" for size in sizes)]
            for (client, loop), by in found.items()
        ],
    )


def comparison(findings: Sequence[Finding], before: str, after: str) -> str:
    """Ratios before and after, with what they say."""

    def spread(of: Spread) -> str:
        return f"{of.median:.2f} ({of.low:.2f} to {of.high:.2f})"

    head = ["workload", "loop", "client", "ratio to", before, after, "growth", "verdict"]
    rows = [
        [
            one.workload,
            one.loop,
            one.client,
            one.to,
            spread(one.before),
            spread(one.after),
            f"{one.grown:+.0%}",
            one.verdict.value,
        ]
        for one in findings
    ]
    return markdown(head, rows)


def regressions(findings: Sequence[Finding]) -> list[str]:
    """A sentence for each regression."""
    return [
        f"{one.workload} on {one.loop}: {one.client} takes {one.after.median:.2f} x {one.to}, "
        f"{one.before.median:.2f} before ({one.grown:+.0%})"
        for one in findings
        if one.verdict is Verdict.REGRESSION
    ]
