"""Results as a picture: a panel for each workload, a bar for each client. PURE, but for :func:`main`.

Usage: ``chart.py RESULTS.json CHART.svg``. It names no font and loads nothing, and brings its own ground in a light and
a dark colour, so that it can be read wherever a page shows it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

if not __package__:  # started by its path
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks import results
from benchmarks.figures import OURS, Measured, budget, by_workload, find, ratio
from benchmarks.table import number
from benchmarks.workloads import WORKLOADS

#: Sizes in pixels, as far as a picture that scales has any.
WIDTH, MARGIN, NAMES, LABELS = 800, 24, 92, 158
BAR, STEP, PANEL_HEAD, PANEL_GAP = 14, 20, 26, 18
TITLE, FOOT = 74, 34
#: A bar that is longer than so many times the first client's is broken off. Otherwise the slowest hides all others.
LONGEST = 12.0
#: No scale is shorter than that, so that two equal bars do not look like much.
SHORTEST = 2.5

# No variables: not every program that shows an SVG knows them.
STYLE = """
  text { font: 13px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328 }
  .title { font-size: 16px; font-weight: 600 } .panel { font-weight: 600 } .quiet { font-size: 12px; fill: #59636e }
  .ground { fill: #ffffff; stroke: #d1d9e0 } .axis { stroke: #d1d9e0 } .break { stroke: #ffffff; stroke-width: 3 }
  .bar { fill: #9aa5b1 } .first { fill: #d1d9e0 } .ours { fill: #1f6feb } .budget { stroke: #bc4c00; stroke-width: 2 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .quiet { fill: #9198a1 }
    .ground { fill: #0d1117; stroke: #3d444d } .axis { stroke: #3d444d } .break { stroke: #0d1117 }
    .bar { fill: #656f7b } .first { fill: #3d444d } .ours { fill: #4493f8 } .budget { stroke: #f0883e }
  }
"""


class Bar(NamedTuple):
    """A client.

    Attributes:
        client: its name.
        times: the length, in times the first client's figure.
        label: what stands behind it.
    """

    client: str
    times: float
    label: str


class Panel(NamedTuple):
    """A workload: its bars from short to long, and where on their scale our budget ends."""

    title: str
    bars: list[Bar]
    budget: float | None

    @property
    def height(self) -> int:
        """In pixels."""
        return PANEL_HEAD + STEP * len(self.bars)


def panels(run: results.Results) -> list[Panel]:
    """One for each workload and loop in which the first client, and another, came to an end."""
    found = []
    both = len({one.loop for one in run.measured if WORKLOADS[one.workload].loops}) > 1
    for group in by_workload(run.measured):
        row, first = WORKLOADS[group[0].workload], group[0]
        base = find(group, first.workload, first.loop, run.clients[0])
        times = [(one, ratio(one, base)) for one in group if one.rounds]
        bars = [_bar(one, value) for one, value in times if value is not None]
        if base is None or len(bars) < 2:
            continue
        ours = find(group, first.workload, first.loop, OURS)
        allowed = None if ours is None else budget(ours, group)
        limit = None if allowed is None else allowed.limit / statistics.median(base.values())
        title = f"{row.title} ({first.loop})" if both and row.loops else row.title
        found.append(Panel(title, sorted(bars, key=lambda bar: bar.times), limit))
    return found


def _bar(one: Measured, times: float) -> Bar:
    return Bar(one.client, times, f"{number(times)} x  ({number(statistics.median(one.values()))})")


def svg(run: results.Results) -> str:
    """The picture, as a document of its own."""
    drawn = panels(run)
    height = TITLE + sum(panel.height + PANEL_GAP for panel in drawn) + FOOT
    first = run.clients[0]
    explained = "Shorter is better; in brackets the figure itself. A bar broken off is longer than drawn."
    if any(panel.budget is not None for panel in drawn):
        explained += f" The line: {OURS}'s budget."
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="title">',
        f"<style>{STYLE}</style>",
        f'<rect class="ground" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="6"/>',
        f'<text class="title" id="title" x="{MARGIN}" y="34">What each client costs, in times {escape(first)}</text>',
        f'<text class="quiet" x="{MARGIN}" y="54">{escape(explained)}</text>',
    ]
    top = TITLE
    for panel in drawn:
        parts += _panel(panel, first, top)
        top += panel.height + PANEL_GAP
    where = f"{run.machine.cpu}, {run.machine.cores} cores, Python {run.python}, spanwire at {run.commit}"
    warning = "WITH --quick: THESE NUMBERS MEAN NOTHING. " if run.quick else ""
    parts += [f'<text class="quiet" x="{MARGIN}" y="{height - 16}">{escape(warning + where)}</text>', "</svg>"]
    return "\n".join(parts) + "\n"


def _panel(panel: Panel, first: str, top: int) -> list[str]:
    left, room = MARGIN + NAMES, WIDTH - 2 * MARGIN - NAMES - LABELS
    scale = room / min(max(SHORTEST, panel.budget or 0.0, *(bar.times for bar in panel.bars)), LONGEST)
    begin = top + PANEL_HEAD - 8
    parts = [f'<text class="panel" x="{MARGIN}" y="{top + 8}">{escape(panel.title)}</text>']
    for number_, bar in enumerate(panel.bars):
        y, width = begin + STEP * number_, max(min(bar.times, LONGEST) * scale, 1.0)
        kind = "ours" if bar.client == OURS else "first" if bar.client == first else "bar"
        label = left + width + 8
        parts += [
            f'<text x="{left - 8}" y="{y + 11.5}" text-anchor="end">{escape(bar.client)}</text>',
            f'<rect class="{kind}" x="{left}" y="{y}" width="{width:.1f}" height="{BAR}" rx="2"/>',
        ]
        if bar.times > LONGEST:
            x = left + width - 26
            parts += [
                f'<line class="break" x1="{x + gap:.1f}" y1="{y + BAR + 2}" x2="{x + gap + 8:.1f}" y2="{y - 2}"/>'
                for gap in (0, 8)
            ]
        if kind == "ours" and panel.budget is not None and panel.budget <= LONGEST:
            x = left + panel.budget * scale
            parts.append(f'<line class="budget" x1="{x:.1f}" y1="{y - 3}" x2="{x:.1f}" y2="{y + BAR + 3}"/>')
            if label - 8 <= x < label + LABELS:  # it would go through the label
                label = x + 8
        parts.append(f'<text class="quiet" x="{label:.1f}" y="{y + 11.5}">{escape(bar.label)}</text>')
    bottom = begin + STEP * len(panel.bars) - (STEP - BAR)
    parts.append(f'<line class="axis" x1="{left}" y1="{begin - 3}" x2="{left}" y2="{bottom + 3}"/>')
    return parts


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 for results that cannot be read or drawn."""
    options = argparse.ArgumentParser(description="Draw the results of a run.")
    options.add_argument("results", type=Path, metavar="RESULTS.json")
    options.add_argument("chart", type=Path, metavar="CHART.svg")
    given = options.parse_args(arguments)
    try:
        run = results.read(given.results)
    except results.Unreadable as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if not panels(run):
        sys.stderr.write(f"{given.results}: no workload in which {run.clients[0]} and another client were measured\n")
        return 1
    given.chart.write_text(svg(run), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
