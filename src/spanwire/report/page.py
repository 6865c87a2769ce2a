"""The numbers to one HTML file, which needs nothing else: style, script, charts and data are in it.

Nothing of it reaches the network: the page's own policy forbids it (``default-src 'none'``; the two scripts and the style
by their hash). Names are those that servers and files gave, so they are text everywhere: escaped in what is written
here, ``textContent`` in the script, and in the data no ``<`` is left that could end the element around it.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import resources
from string import Template
from typing import Any

import msgspec

from ..timeline import SEGMENTS
from .calls import SOURCES, Call
from .findings import Finding, count, duration
from .read import Found
from .summary import Column, Selection, Stats, Summary

__all__ = ["GENERATOR", "render", "what"]

#: By this a page of ours is known.
GENERATOR = '<meta name="generator" content="spanwire report">'


def render(summary: Summary, found: Found, findings: Sequence[Finding], *, made_unix_s: float, version: str) -> str:
    """The page.

    Args:
        summary, findings: what it says.
        found: where that is from.
        made_unix_s: the time that it shows as its own.
        version: of spanwire.
    """
    style = "\n" + _asset("uPlot.min.css") + "\n" + _asset("page.css")
    uplot, script = "\n" + _asset("uPlot.iife.min.js"), "\n" + _asset("page.js")
    policy = (
        f"default-src 'none'; script-src {_hash(uplot)} {_hash(script)}; style-src {_hash(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    calls = what(summary)
    return Template(_asset("page.html")).substitute(
        policy=policy,
        title=html.escape(f"spanwire report: {calls}"),
        heading="Where the time of calls goes",
        what=html.escape(calls),
        style=style,
        findings="\n".join(
            f'<li class="{"serious" if finding.serious else "info"}">{html.escape(finding.text)}</li>'
            for finding in findings
        ),
        files="\n".join(f"<li>{html.escape(line)}</li>" for line in _sources(summary, found)),
        version=html.escape(version),
        made=_moment(made_unix_s),
        uplot_version=html.escape(json.loads(_asset("uplot.json"))["version"]),
        uplot_license=html.escape(_asset("uPlot.LICENSE")),
        data=_safe(json.dumps(_data(summary), separators=(",", ":"), allow_nan=False)),
        uplot=uplot,
        script=script,
    )


def _asset(name: str) -> str:
    return (resources.files(__package__) / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _safe(text: str) -> str:
    """JSON inside a script element: no character that HTML, or an old JavaScript, could take for its own."""
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


# --- words --------------------------------------------------------------------------------------------------------------


#: The last second that Python's dates know.
_LAST_UNIX_S = 253_402_300_799.0


def _moment(unix_s: float) -> str:
    unix_s = min(unix_s, _LAST_UNIX_S)
    return f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%d %H:%M:%S} UTC"


def what(summary: Summary) -> str:
    """How many calls, of what, and when: one line."""
    calls = count(summary.all.calls, "call")
    models = count(len(summary.models), "model")
    endpoints = count(len(summary.endpoints), "endpoint")
    if summary.first_unix_s is None or summary.end_unix_s is None:
        return f"{calls} to {models} at {endpoints}, without times of day"
    lasted = duration(max(summary.end_unix_s - summary.first_unix_s, 0.0))
    return f"{calls} to {models} at {endpoints}, from {_moment(summary.first_unix_s)} to {_moment(summary.end_unix_s)} ({lasted})"


def _sources(summary: Summary, found: Found) -> list[str]:
    lines = [f"{name}: {count(calls, 'call')}" for name, calls in found.files.items()]
    if found.repeated:
        lines.append(f"{count(found.repeated, 'call')} that were there twice count once")
    if found.dropped:
        lines.append(
            f"{count(found.dropped, 'call')} more were made and are in no file: the disk was too slow for the log"
        )
    if found.unfinished:
        lines.append(f"{count(found.unfinished, 'last line')} still being written, or cut off: left out")
    if found.bad_lines:
        lines.append(f"{count(found.bad_lines, 'line')} that could not be read: left out")
        lines += [str(bad) for bad in found.bad]
    if summary.timeless:
        lines.append(f"{count(summary.timeless, 'call')} without a time of day")
    return lines


# --- data ---------------------------------------------------------------------------------------------------------------


def _data(summary: Summary) -> dict[str, Any]:
    shapes: dict[tuple[Any, ...], int] = {}
    calls = [_call(summary, 1, row, shapes) for row in summary.slowest]
    calls += [_call(summary, 2, row, shapes) for row in summary.sample]
    return {
        "segments": SEGMENTS,
        "sources": SOURCES,
        "endpoints": summary.endpoints,
        "models": summary.models,
        "outcomes": summary.outcomes,
        "begin": summary.begin_unix_s,
        "width": summary.bucket_s,
        "buckets": summary.buckets,
        "timeless": summary.timeless,
        "selections": {f"{s.endpoint},{s.model},{s.outcome}": _selection(s) for s in summary.selections},
        "pieces": list(shapes),
        "calls": calls,
    }


def _short(seconds: float | None) -> float | None:
    """Six digits of a number say all that a page can show."""
    return None if seconds is None else float(f"{seconds:.6g}")


def _column(column: Column) -> list[float | None]:
    values = (column.min, column.mean, column.p50, column.max, column.p95, column.p99)
    return [column.n, *(_short(value) for value in values)]


def _selection(selection: Selection) -> dict[str, Any]:
    stats: Stats = selection.stats
    buckets = selection.buckets
    return {
        "calls": stats.calls,
        "cold": stats.cold,
        "warm": stats.warm,
        "sum": stats.sum_s,
        "times": {name: _column(column) for name, column in stats.times.items()},
        "cold_times": {name: _column(column) for name, column in stats.cold_times.items()},
        "warm_times": {name: _column(column) for name, column in stats.warm_times.items()},
        "rows": [
            [row.segment, row.part, _short(row.sum_s), [_short(s) for s in row.by_source], _column(row.spread)]
            for row in stats.rows
        ],
        "outcomes": stats.outcomes,
        "errors": stats.errors,
        "retried": stats.retried,
        "tokens": {"output": 0, **stats.tokens},
        "over": {
            "index": buckets.index,
            "calls": buckets.calls,
            "cold": buckets.cold,
            "segments": [[_short(s) for s in column] for column in buckets.segments],
            "total_p50": [_short(s) for s in buckets.total_p50],
            "total_p95": [_short(s) for s in buckets.total_p95],
            "first_p50": [_short(s) for s in buckets.first_p50],
            "first_p95": [_short(s) for s in buckets.first_p95],
        },
    }


def _call(
    summary: Summary, kind: int, row: tuple[int, int, Call], shapes: dict[tuple[Any, ...], int]
) -> dict[str, Any]:
    endpoint, model, call = row
    order = sorted(range(len(call.pieces)), key=lambda number: _in_time(call.pieces[number]))
    shape = tuple(call.pieces[number] for number in order)
    return {
        "kind": kind,
        "endpoint": endpoint,
        "model": model,
        "endpointName": call.endpoint,
        "modelName": call.model,
        "outcome": summary.outcomes.index(call.outcome),
        "error": call.error_type,
        "started": call.started_unix_s,
        "total": call.total_s,
        "first": _short(call.first_content_s),
        "cold": call.cold,
        "attempts": call.attempts,
        "input": call.input_tokens,
        "output": call.output_tokens,
        "cached": call.cached_tokens,
        "operation": call.operation,
        "transport": call.transport,
        "trace": call.trace_id,
        "pieces": shapes.setdefault(shape, len(shapes)),
        "durations": [round(call.durations[number] * 1e6, 1) for number in order],
    }


def _in_time(piece: tuple[str, str, str]) -> int:
    """The order of a waterfall: that of the text that ``print(timeline)`` draws."""
    from ..waterfall import rank

    return rank(piece[:2])


def read_json(page: str) -> dict[str, Any]:
    """The data of a page, for tests and for whoever wants the numbers back."""
    begin = page.index('<script id="data" type="application/json">') + len('<script id="data" type="application/json">')
    data: dict[str, Any] = msgspec.json.decode(page[begin : page.index("</script>", begin)])
    return data
