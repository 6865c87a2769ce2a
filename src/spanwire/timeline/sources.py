"""PURE: what a number on a timeline is from, and how strong that makes it."""

from __future__ import annotations

from typing import Literal

__all__ = ["SEGMENTS", "SEGMENT_OF", "Piece", "Source", "weakest_of", "weakest_source"]

Source = Literal["measured", "reported", "estimated"]

#: Segments in the order in which they are shown.
SEGMENTS = ("queue", "handshake", "client", "network", "model", "unattributed")
WEAKNESS: dict[str, int] = {"measured": 0, "reported": 1, "estimated": 2}
_BY_WEAKNESS: tuple[Source, ...] = ("measured", "reported", "estimated")

#: Which segment the parts belong to that transports mark; what is not here was found by the network.
SEGMENT_OF = {
    "encode": "client",
    "local": "queue",
    "dns": "handshake",
    "tcp": "handshake",
    "tls": "handshake",
    "proxy": "handshake",
    "upgrade": "handshake",
    "connect": "handshake",
    "shared": "handshake",
}

#: segment, part ("" = undivided), duration in ns, source
Piece = tuple[str, str, int, Source]


def weakest_source(first: Source, second: Source) -> Source:
    """The source of a sum: estimated is weaker than reported, reported than measured."""
    return first if WEAKNESS[first] >= WEAKNESS[second] else second


def weakest_of(sources: list[Source]) -> Source:
    """The same of many."""
    return _BY_WEAKNESS[max(WEAKNESS[source] for source in sources)]
