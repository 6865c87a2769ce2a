"""PURE: what was seen of one run, as the findings need it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

__all__ = ["Call", "Client", "Context", "Lookup", "Roots", "Run", "Site"]


class Site(msgspec.Struct, frozen=True):
    """A line of the user's own code; see :class:`.sites.Site`."""

    file: str
    line: int
    function: str = "<module>"
    library: str = ""
    made: str = ""

    @property
    def at_top(self) -> bool:
        """At module level: run once."""
        return self.function == "<module>"

    @property
    def place(self) -> tuple[str, int]:
        """File and line."""
        return (self.file, self.line)


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One request to a model.

    Attributes:
        timeline: :meth:`spanwire.Timeline.to_dict`.
        process: number of the process that made it.
        site: None if no code of the user's made it.
        client: number of the client that sent it, 0 for unknown.
        inside: number of the one call into a library in which it was sent, 0 for unknown.
        cpu_s: CPU time of the process from its begin to its end, None if other calls ran at the same time.
    """

    timeline: Mapping[str, Any]
    process: int = 0
    site: Site | None = None
    client: int = 0
    inside: int = 0
    cpu_s: float | None = None

    @property
    def outcome(self) -> str:
        """As the timeline has it."""
        return str(self.timeline.get("outcome", ""))

    @property
    def endpoint(self) -> str:
        """Host and port."""
        return str(self.timeline.get("endpoint", ""))

    @property
    def transport(self) -> str:
        """What carried it, such as ``httpx2``."""
        return str(self.timeline.get("transport", ""))

    @property
    def model(self) -> str:
        """That it asked for."""
        return str(self.timeline.get("model", ""))

    @property
    def streamed(self) -> bool:
        """Asked for as a stream."""
        return bool(self.timeline.get("streamed"))

    @property
    def total_s(self) -> float:
        """The whole call."""
        return float(self.timeline.get("total_s", 0.0))

    @property
    def begin_s(self) -> float:
        """By the wall clock, in seconds since 1970."""
        return float(self.timeline.get("started_unix_s", 0.0))

    @property
    def end_s(self) -> float:
        """The same of its end."""
        return self.begin_s + self.total_s

    @property
    def first_s(self) -> float:
        """To the first content; of an answer that is no stream, to its end."""
        first = self.timeline.get("first_content_s")
        return float(first) if first is not None else self.total_s

    @property
    def reused(self) -> bool | None:
        """Its connection was there already; None for unknown."""
        connection = self.timeline.get("connection")
        return bool(connection["reused"]) if connection and "reused" in connection else None

    @property
    def protocol(self) -> str:
        """Such as ``http/1.1``, ``""`` for unknown."""
        return str((self.timeline.get("connection") or {}).get("protocol") or "")

    @property
    def error(self) -> str:
        """The kind of error it ended with, ``""`` for none."""
        if self.outcome not in ("error", "timeout"):
            return ""
        attempts = self.timeline.get("attempts") or [{}]
        return str(attempts[-1].get("error_type") or self.outcome)

    @property
    def tokens(self) -> int | None:
        """Of the answer, as the server counted them."""
        return (self.timeline.get("usage") or {}).get("output_tokens")

    def segment_s(self, segment: str, part: str = "") -> float:
        """Duration of a segment, or of one part of it, in seconds; 0 if it has none."""
        found = (self.timeline.get("segments") or {}).get(segment) or {}
        if part:
            found = (found.get("parts") or {}).get(part) or {}
        return float(found.get("duration_s", 0.0))


class Client(msgspec.Struct, frozen=True, kw_only=True):
    """An HTTP client was made: ``cls`` of the library, below ``site.made`` of the SDK."""

    number: int
    cls: str
    process: int = 0
    site: Site | None = None
    inside: int = 0


class Context(msgspec.Struct, frozen=True, kw_only=True):
    """An ``ssl.SSLContext`` was made, at this time by the wall clock."""

    at_s: float
    process: int = 0
    site: Site | None = None
    inside: int = 0


class Roots(msgspec.Struct, frozen=True, kw_only=True):
    """Certificates were read into one."""

    seconds: float
    site: Site | None = None


class Lookup(msgspec.Struct, frozen=True, kw_only=True):
    """A name was looked up."""

    host: str
    seconds: float
    process: int = 0
    site: Site | None = None


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """Everything of one run.

    Attributes:
        unfinished: where calls were begun of which no end is known: their process was killed, or left them behind.
        processes: how many recorded.
        left_out: for each Python that could not: its path, and why.
        dropped: calls that are missing.
    """

    calls: tuple[Call, ...] = ()
    clients: tuple[Client, ...] = ()
    contexts: tuple[Context, ...] = ()
    roots: tuple[Roots, ...] = ()
    lookups: tuple[Lookup, ...] = ()
    unfinished: tuple[Site | None, ...] = ()
    processes: int = 0
    left_out: tuple[tuple[str, str], ...] = ()
    dropped: int = 0

    @property
    def sites(self) -> Iterator[Site]:
        """All that there are."""
        for some in (self.calls, self.clients, self.contexts, self.roots, self.lookups):
            for one in some:
                if one.site is not None:
                    yield one.site
        yield from (site for site in self.unfinished if site is not None)
