"""PURE: one call as a report sees it, whatever file it came from.

A report holds a hundred thousand of them, so they are small: the names of a call's pieces are shared by all calls that
have the same ones, and the durations are one array of doubles.
"""

from __future__ import annotations

from array import array
from typing import Annotated, Any

import msgspec

__all__ = ["SOURCES", "Call", "Log", "Piece", "Pieces", "call_of"]

SOURCES = ("measured", "reported", "estimated")

#: segment, part ("" = undivided), source
Piece = tuple[str, str, str]

#: Longest time that a call or a piece can have taken, in seconds: 31 years. What is longer is no duration.
_LONGEST_S = 1e9
#: Longest name that is shown, in characters.
_NAME_LIMIT = 200

_Seconds = Annotated[float, msgspec.Meta(ge=0, le=_LONGEST_S)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
#: Seconds since 1970, up to the year 9999.
_UnixSeconds = Annotated[float, msgspec.Meta(ge=0, lt=253_402_300_800)]


class Call(msgspec.Struct, frozen=True, gc=False):
    """One call. Durations in seconds from the call's start; None = unknown.

    Attributes:
        started_unix_s: when it began, by the wall clock.
        endpoint, model, operation, transport: what it was; ``""`` where the file does not say.
        outcome, error_type: how it ended.
        total_s: the whole call. The pieces add up to it.
        first_content_s: to the first content: time to first token.
        last_chunk_s: to the last data event of a stream.
        reused: whether its connection had been used before; None if it had none, or it is not known.
        attempts: how often it was tried.
        input_tokens, output_tokens, cached_tokens: as the server counted them.
        pieces, durations: what the time went into, in the same order.
        trace_id: of its span.
    """

    started_unix_s: float | None
    endpoint: str
    model: str
    operation: str
    transport: str
    outcome: str
    error_type: str | None
    total_s: float
    first_content_s: float | None
    last_chunk_s: float | None
    reused: bool | None
    attempts: int
    input_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None
    pieces: tuple[Piece, ...]
    durations: array[float]
    trace_id: str | None = None

    @property
    def cold(self) -> bool | None:
        """It had to wait for a connection to be made; None if that is not known."""
        return None if self.reused is None else not self.reused


class Pieces:
    """Collects the pieces of one call after the other, and shares their names among calls."""

    def __init__(self) -> None:
        self._known: dict[tuple[Piece, ...], tuple[Piece, ...]] = {}
        self._names: dict[str, str] = {}

    def name(self, text: str | None) -> str:
        """The one copy of a name, cut to what can be shown."""
        text = text or ""
        if len(text) > _NAME_LIMIT:
            text = text[: _NAME_LIMIT - 1] + "…"
        return self._names.setdefault(text, text)

    def share(self, rows: list[tuple[str, str, str, float]]) -> tuple[tuple[Piece, ...], array[float]]:
        """``(segment, part, source, seconds)`` of one call to what :class:`Call` keeps."""
        pieces = tuple((segment, part, source) for segment, part, source, _ in rows)
        known = self._known.get(pieces)
        if known is None:
            known = tuple((self.name(a), self.name(b), self.name(c)) for a, b, c in pieces)
            self._known[known] = known
        return known, array("d", [seconds for *_, seconds in rows])


# --- to_dict() ----------------------------------------------------------------------------------------------------------


class _Part(msgspec.Struct, gc=False):
    duration_s: _Seconds
    source: str = "measured"


class _Segment(msgspec.Struct, gc=False):
    duration_s: _Seconds
    source: str = "measured"
    parts: dict[str, _Part] = {}


class _Connection(msgspec.Struct, gc=False):
    reused: bool | None = None


class _Attempt(msgspec.Struct, gc=False):
    outcome: str = ""
    error_type: str | None = None


class _Usage(msgspec.Struct, gc=False):
    input_tokens: _Count | None = None
    output_tokens: _Count | None = None
    cached_tokens: _Count | None = None


class Log(msgspec.Struct, gc=False):
    """One line of a call log: ``Timeline.to_dict()``, of which only what a report uses is looked at.

    ``dropped`` stands alone on its line: so many calls could not be written.
    """

    schema: int
    outcome: str = ""
    total_s: _Seconds | None = None
    dropped: _Count = 0
    started_unix_s: _UnixSeconds | None = None
    first_content_s: _Seconds | None = None
    last_chunk_s: _Seconds | None = None
    segments: dict[str, _Segment] = {}
    connection: _Connection | None = None
    attempts: list[_Attempt] = []
    usage: _Usage | None = None
    endpoint: str = ""
    transport: str = ""
    operation: str = ""
    model: str = ""
    trace_id: str | None = None


def call_of(line: Log, shared: Pieces) -> Call:
    """The call of a line.

    Raises:
        ValueError: it has another schema, or is no timeline.
    """
    if line.schema != 1:
        raise ValueError(f"schema {line.schema} is not known to this version, which reads 1: pip install -U spanwire")
    if line.total_s is None or not line.outcome:
        raise ValueError("no timeline: it has no total_s and outcome")
    rows: list[tuple[str, str, str, float]] = []
    for name, segment in line.segments.items():
        rest_s = segment.duration_s
        for part, piece in segment.parts.items():
            rows.append((name, part, piece.source, piece.duration_s))
            rest_s -= piece.duration_s
        if rest_s > 1e-9:  # undivided, or not wholly divided
            rows.append((name, "", segment.source, rest_s))
    pieces, durations = shared.share(rows)
    usage = line.usage
    last = line.attempts[-1] if line.attempts else None
    return Call(
        started_unix_s=line.started_unix_s,
        endpoint=shared.name(line.endpoint),
        model=shared.name(line.model),
        operation=shared.name(line.operation),
        transport=shared.name(line.transport),
        outcome=shared.name(line.outcome),
        error_type=shared.name(last.error_type) if last and last.error_type and line.outcome != "completed" else None,
        total_s=line.total_s,
        first_content_s=line.first_content_s,
        last_chunk_s=line.last_chunk_s if line.last_chunk_s is not None else _last_chunk_s(line.first_content_s, rows),
        reused=line.connection.reused if line.connection is not None else None,
        attempts=max(1, len(line.attempts)),
        input_tokens=usage.input_tokens if usage is not None else None,
        output_tokens=usage.output_tokens if usage is not None else None,
        cached_tokens=usage.cached_tokens if usage is not None else None,
        pieces=pieces,
        durations=durations,
        trace_id=line.trace_id if line.trace_id and len(line.trace_id) <= 64 else None,
    )


def _last_chunk_s(first_content_s: float | None, rows: list[tuple[str, str, str, Any]]) -> float | None:
    """Where a file does not say it: the decode follows the first content, and is estimated from just these two."""
    if first_content_s is None:
        return None
    found = [seconds for segment, part, _, seconds in rows if (segment, part) == ("model", "decode")]
    return first_content_s + found[0] if found else None
