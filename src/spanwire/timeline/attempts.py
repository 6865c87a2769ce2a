"""PURE: the pieces of one attempt, and their sum."""

from __future__ import annotations

from collections.abc import Iterable

from .answer import explain
from .marks import AttemptRecord
from .sources import SEGMENT_OF, WEAKNESS, Piece, Source, weakest_source

__all__ = ["add_up", "attempt_pieces", "is_answered"]

#: Marked parts whose end nobody saw: ``backlog`` is what the kernel still had of a large request when all of it was written,
#: by the rate at which it was leaving.
_SOURCE_OF: dict[str, Source] = {"backlog": "estimated"}


def _clip(begin: int, end: int, low: int, high: int) -> int:
    return max(0, min(end, high) - max(begin, low))


def _add_connection(pieces: list[Piece], attempt: AttemptRecord) -> None:
    """The wait for a slot and for a connection."""
    end_ns = attempt.end_ns
    if attempt.queued_ns:
        pieces.append(("queue", "local", (attempt.slot_ns or end_ns) - attempt.queued_ns, "measured"))
    if not attempt.asked_ns or attempt.served == "idle":
        return
    low, high = attempt.asked_ns, attempt.leased_ns or end_ns
    if attempt.served == "freed":
        pieces.append(("queue", "local", high - low, "measured"))
        return
    if attempt.dial_asked_ns:
        pieces.append(("queue", "local", attempt.dial_asked_ns - low, "measured"))
        low = attempt.dial_asked_ns
    if attempt.served == "rode":
        shared = _clip(attempt.connect_begin_ns, attempt.connect_end_ns or end_ns, low, high)
        for part, begin, end in attempt.connect.parts if attempt.connect is not None else ():
            if part == "admission":
                admission = _clip(begin, end, low, high)
                pieces.append(("queue", "server", admission, "estimated"))
                shared -= admission
        pieces.append(("handshake", "shared", shared, "measured"))
    elif attempt.connect is not None:
        for part, begin, end in attempt.connect.parts:
            if part == "admission":
                pieces.append(("queue", "server", _clip(begin, end, low, high), "estimated"))
            else:
                pieces.append(("handshake", part, _clip(begin, end, low, high), "measured"))
        open_part = attempt.connect.open_part
        if open_part is not None:  # where it failed, or was given up
            begin = attempt.connect.begun_ns(open_part)
            pieces.append(("handshake", open_part, _clip(begin, attempt.connect_end_ns or high, low, high), "measured"))


def _add_preparation(pieces: list[Piece], attempt: AttemptRecord) -> None:
    """What the client did before the request's bytes were made: settings, span, books."""
    if attempt.asked_ns and not attempt.queued_ns:
        pieces.append(("client", "encode", attempt.asked_ns - attempt.begin_ns, "measured"))
    parts = attempt.marks.parts
    if attempt.leased_ns and parts and parts[0][0] == "encode":
        pieces.append(("client", "encode", parts[0][1] - attempt.leased_ns, "measured"))


def _add_marked(pieces: list[Piece], attempt: AttemptRecord) -> None:
    """What the transport measured of the exchange itself."""
    marks = attempt.marks
    for part, begin, end in marks.parts:
        pieces.append((SEGMENT_OF.get(part, "network"), part, end - begin, _SOURCE_OF.get(part, "measured")))
    open_part = marks.open_part
    if open_part is not None:  # such as an upload that was given up
        segment = SEGMENT_OF.get(open_part, "network")
        pieces.append((segment, open_part, attempt.end_ns - marks.begun_ns(open_part), "measured"))


def _add_consumer(pieces: list[Piece], attempt: AttemptRecord) -> None:
    """What the consumer's slowness and the parsing took."""
    marks = attempt.marks
    pieces.append(("client", "waiting", marks.paused_ns, "measured"))
    if marks.ended_ns:
        pieces.append(("client", "decode", marks.ended_ns - marks.last_byte_ns, "measured"))
        pieces.append(("client", "waiting", attempt.end_ns - marks.ended_ns, "measured"))


def attempt_pieces(attempt: AttemptRecord) -> list[Piece]:
    """All that is known of one attempt; equal parts may come more than once, and some may be 0 or negative."""
    pieces: list[Piece] = []
    answered = is_answered(attempt)
    _add_preparation(pieces, attempt)
    _add_connection(pieces, attempt)
    _add_marked(pieces, attempt)
    if attempt.marks.sent_ns and attempt.marks.first_byte_ns:
        pieces += explain(attempt, answered=answered).pieces
        if answered:
            _add_consumer(pieces, attempt)
    return pieces


def is_answered(attempt: AttemptRecord) -> bool:
    """An answer came, or the beginning of one: not only an error status."""
    return attempt.outcome != "error" or bool(attempt.marks.first_chunk_ns)


def add_up(pieces: Iterable[Piece], total_ns: int) -> dict[tuple[str, str], tuple[int, Source]]:
    """Merge equal parts, drop what is 0 or negative, and make the rest of the total ``unattributed``.

    Windows of one attempt do not overlap by construction. Should a clock or a plugin's marks be wrong all the same, so
    that the pieces exceed the total, estimates are dropped, the largest first, until the sum fits.
    """
    merged: dict[tuple[str, str], tuple[int, Source]] = {}
    known = 0
    for segment, part, duration_ns, source in pieces:
        if duration_ns <= 0:
            continue
        key = (segment, part)
        before = merged.get(key)
        if before is None:
            merged[key] = (duration_ns, source)
        else:
            merged[key] = (before[0] + duration_ns, weakest_source(source, before[1]))
        known += duration_ns
    while known > total_ns and merged:
        worst = max(merged, key=lambda key: (WEAKNESS[merged[key][1]], merged[key][0]))
        known -= merged.pop(worst)[0]
    if total_ns > known:
        merged["unattributed", ""] = (total_ns - known, "measured")
    return merged
