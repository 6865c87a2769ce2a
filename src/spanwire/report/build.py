"""All steps in a row: files in, a :class:`Report` out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

import msgspec

from .findings import Finding, count, duration, findings, percent
from .page import render, what
from .read import Found, NothingToReport, between, read
from .summary import Summary, plain, summarize

__all__ = ["Report", "build"]


class Report(msgspec.Struct, frozen=True):
    """A report, ready to be shown.

    Attributes:
        summary: the numbers.
        found: what the files had, with what could not be read.
        findings: what stands out, in words.
    """

    summary: Summary
    found: Found
    findings: Sequence[Finding]

    def to_html(self) -> str:
        """One page, complete in itself."""
        return render(self.summary, self.found, self.findings, made_unix_s=time.time(), version=_version())

    def to_dict(self) -> dict[str, Any]:
        """Plain data: durations in seconds, unknown entries absent. Without single calls and the course over time."""
        found = self.found
        data = {
            "schema": 1,
            "spanwire": _version(),
            "files": found.files,
            "calls": self.summary.all.calls,
            "bad_lines": found.bad_lines,
            "bad": [msgspec.to_builtins(bad) for bad in found.bad],
            "unfinished": found.unfinished,
            "dropped": found.dropped,
            "repeated": found.repeated,
            "findings": [finding.text for finding in self.findings],
            **plain(self.summary),
        }
        return {name: value for name, value in data.items() if value is not None}

    def lines(self) -> list[str]:
        """Three lines for a terminal."""
        every = self.summary.all
        main = self.summary.completed or every
        times = []
        for name, label in (("first_content", "time to first token"), ("total", "whole call")):
            column = main.times.get(name)
            if column is not None:
                p95 = f", {duration(column.p95)} at p95" if column.p95 is not None else ""
                times.append(f"{label} {duration(column.p50)} at the median{p95}")
        speed = main.times.get("tokens_per_s")
        if speed is not None:
            # Three digits alone would turn into powers of ten from 1000 on.
            times.append(f"{speed.p50:{',.0f' if speed.p50 >= 100 else '.3g'}} tokens/s")
        known = every.cold + every.warm
        done = every.outcomes.get("completed", 0)
        ends = [f"{percent(done / every.calls)} completed"]
        if known:
            ends.append(f"{percent(every.warm / known)} on a re-used connection ({count(every.cold, 'handshake')})")
        return [what(self.summary), "; ".join(times), "; ".join(ends)]


def build(files: Sequence[str], *, since_unix_s: float | None = None, until_unix_s: float | None = None) -> Report:
    """Read files and put a report together.

    Args:
        files: call logs (see :class:`spanwire.calllog.CallLog`), lists of timelines, OTLP traces in JSON; plain or
            gzipped; ``-`` is the standard input.
        since_unix_s, until_unix_s: only calls that began in this window, in seconds since 1970.

    Raises:
        ConfigurationError: a file cannot be read. NothingToReport, which is one: there is no call in them.
    """
    found = read(files)
    before = len(found.calls)
    timeless = between(found, since_unix_s, until_unix_s)
    if not found.calls:
        unknown = f"; {timeless:,} have no time of day" if timeless else ""
        raise NothingToReport(
            f"nothing to report: none of {count(before, 'call')} began {_window(since_unix_s, until_unix_s)}{unknown}"
        )
    summary = summarize(found.calls)
    return Report(summary, found, findings(summary))


def _window(since_unix_s: float | None, until_unix_s: float | None) -> str:
    words = []
    for word, at in (("since", since_unix_s), ("until", until_unix_s)):
        if at is not None:
            words.append(f"{word} {datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC")
    return " and ".join(words)


def _version() -> str:
    try:
        return metadata.version("spanwire")
    except metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return "0"
