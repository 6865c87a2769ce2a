"""PURE: what a number on a timeline is from, and how strong that makes it."""

from __future__ import annotations

from typing import Literal

__all__ = ["SEGMENTS", "Piece", "Source", "weakest_of", "weakest_source"]

Source = Literal["measured", "reported", "estimated"]

#: Segments in the order in which they are shown.
SEGMENTS = ("queue", "handshake", "client", "network", "model", "unattributed")
WEAKNESS: dict[str, int] = {"measured": 0, "reported": 1, "estimated": 2}
_BY_WEAKNESS: tuple[Source, ...] = ("measured", "reported", "estimated")

#: segment, part ("" = undivided), duration in ns, source
Piece = tuple[str, str, int, Source]


def weakest_source(first: Source, second: Source) -> Source:
    """The source of a sum: estimated is weaker than reported, reported than measured."""
    return first if WEAKNESS[first] >= WEAKNESS[second] else second


def weakest_of(sources: list[Source]) -> Source:
    """The same of many."""
    return _BY_WEAKNESS[max(WEAKNESS[source] for source in sources)]
