"""What the program's processes have written, to facts. Lines that are torn or strange are left out."""

from __future__ import annotations

import os
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from .facts import Call, Client, Context, Lookup, Roots, Run, Site

__all__ = ["read", "sources"]

#: A file of the user's that is longer is not looked into, in bytes.
_LONGEST = 4_000_000


def read(events: Path, log: Path, *, log_from: int = 0, since_unix_s: float = 0.0) -> Run:
    """The facts.

    Args:
        events: what :mod:`.recorder` wrote.
        log: the call log, which has the calls of spanwire's own managers too.
        log_from: where in it this run begins, in bytes.
        since_unix_s: earlier calls in the log are not this run's.
    """
    seen = _Seen()
    for line in _lines(events):
        seen.add(line)
    for line in _lines(log, log_from):
        if isinstance(line.get("dropped"), int):
            seen.dropped += line["dropped"]
        elif "segments" in line and line.get("started_unix_s", 0.0) >= since_unix_s - 1.0:
            seen.add_logged(line)
    return seen.run()


def sources(run: Run) -> dict[str, str]:
    """The text of the files that are spoken of, as far as it can be read."""
    found: dict[str, str] = {}
    for name in {site.file for site in run.sites}:
        try:
            if Path(name).stat().st_size <= _LONGEST:
                with tokenize.open(name) as file:
                    found[name] = file.read()
        except (OSError, SyntaxError, ValueError):
            continue
    return found


def _lines(path: Path, begin: int = 0) -> Iterator[dict[str, Any]]:
    try:
        with path.open("rb") as file:
            file.seek(begin, os.SEEK_SET)
            for text in file:
                try:
                    line = msgspec.json.decode(text)
                except msgspec.DecodeError:
                    continue
                if isinstance(line, dict):
                    yield line
    except OSError:
        return


class _Seen:
    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.clients: list[Client] = []
        self.contexts: list[Context] = []
        self.roots: list[Roots] = []
        self.lookups: list[Lookup] = []
        self.open: dict[tuple[int, int], tuple[Site | None, int]] = {}
        self.processes: set[int] = set()
        self.left_out: dict[str, str] = {}
        self.known: set[tuple[Any, ...]] = set()
        self.dropped = 0

    def add(self, line: dict[str, Any]) -> None:
        try:
            self._add(line)
        except (KeyError, TypeError, ValueError, msgspec.ValidationError):
            return

    def _add(self, line: dict[str, Any]) -> None:
        event, process = line["e"], line["pid"]
        site, inside = _site(line.get("site"))
        if event == "start":
            self.processes.add(process)
        elif event == "failed":
            self.left_out[line["python"]] = line["error"]
        elif event == "client":
            self.clients.append(
                Client(number=line["client"], cls=line["cls"], process=process, site=site, inside=inside)
            )
        elif event == "context":
            self.contexts.append(Context(at_s=float(line["t"]), process=process, site=site, inside=inside))
        elif event == "roots":
            self.roots.append(Roots(seconds=float(line["s"]), site=site))
        elif event == "lookup":
            self.lookups.append(Lookup(host=line["host"], seconds=float(line["s"]), process=process, site=site))
        elif event == "begin":
            self.open[process, line["id"]] = (site, inside)
        elif event == "call":
            timeline = line["timeline"]
            site, inside = self.open.pop((process, line["id"]), (site, inside))
            self.known.add(_key(timeline))
            self.calls.append(
                Call(
                    timeline=timeline,
                    process=process,
                    site=site,
                    client=line.get("client", 0),
                    inside=inside,
                    cpu_s=line.get("cpu_s"),
                )
            )

    def add_logged(self, timeline: dict[str, Any]) -> None:
        key = _key(timeline)
        if key not in self.known:
            self.known.add(key)
            self.calls.append(Call(timeline=timeline))

    def run(self) -> Run:
        return Run(
            calls=tuple(sorted(self.calls, key=lambda call: call.begin_s)),
            clients=tuple(self.clients),
            contexts=tuple(self.contexts),
            roots=tuple(self.roots),
            lookups=tuple(self.lookups),
            unfinished=tuple(site for site, _ in self.open.values()),
            processes=len(self.processes),
            left_out=tuple(self.left_out.items()),
            dropped=self.dropped,
        )


def _key(timeline: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(timeline.get(name) for name in ("started_unix_s", "total_s", "endpoint", "model"))


def _site(found: Any) -> tuple[Site | None, int]:
    if not found:
        return None, 0
    file, line, function, library, made, inside = found
    if not isinstance(file, str):
        return None, int(inside)
    return Site(file, int(line), str(function), str(library), str(made)), int(inside)
