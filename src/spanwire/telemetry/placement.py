"""PURE: where in time the pieces of a timeline lie.

What was measured has a begin and an end on this process's clock. What was estimated or reported has a length alone, and is
somewhere between the request's last byte and the answer's: it is put there one after the other, in the order of the
waterfall, and marked as put there. Nothing overlaps, and nothing lies outside its attempt. Time in which nothing is known
(``unattributed``) stays empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from ..timeline import AttemptRecord, Source
from ..timeline.sources import SEGMENT_OF
from ..waterfall import rank

__all__ = ["Placed", "place"]

#: Not before the first content of a stream, or the first byte of another answer's body.
_LATE = {True: frozenset({("model", "decode"), ("client", "waiting")}), False: frozenset({("network", "receive")})}
#: Clocks that differ by less agree, in ns: intervals are rounded one by one.
_AGREE_NS = 1_000

_Key = tuple[str, str]
_Interval = tuple[int, int, _Key]


class Placed(NamedTuple):
    """A piece, or a stretch of it, on the clock of ``time.perf_counter_ns``.

    ``placed``: ``clock`` = it was measured there; ``window`` = its length is known, and it was put there.
    """

    segment: str
    part: str
    begin_ns: int
    end_ns: int
    source: Source
    placed: Literal["clock", "window"]


def place(attempt: AttemptRecord, pieces: Mapping[_Key, tuple[int, Source]]) -> list[Placed]:
    """``pieces`` of this one attempt, in the order of time. A piece that was measured in stretches comes in stretches."""
    known: dict[_Key, list[_Interval]] = {}
    for row in _apart(attempt.begin_ns, attempt.end_ns, _measured(attempt)):
        known.setdefault(row[2], []).append(row)
    placed: list[Placed] = []
    floating: list[tuple[_Key, int, Source]] = []
    for key, (length_ns, source) in pieces.items():
        if key[0] == "unattributed":
            continue
        rows = known.get(key, ()) if source == "measured" else ()
        rest_ns = length_ns - sum(end - begin for begin, end, _ in rows)
        if rest_ns < -_AGREE_NS:  # the timeline believes less than the marks say: so do we
            rows, rest_ns = (), length_ns
        placed += [Placed(*key, begin, end, source, "clock") for begin, end, _ in rows]
        if rest_ns > (_AGREE_NS if rows else 0):
            floating.append((key, rest_ns, source))
    if floating:
        placed += _put(attempt, placed, floating)
    placed.sort(key=lambda row: (row.begin_ns, row.end_ns))
    return placed


def _measured(attempt: AttemptRecord) -> Iterator[_Interval]:
    """Every interval that has a begin and an end, as the attempt's record and its marks have them."""
    begin, end, marks = attempt.begin_ns, attempt.end_ns, attempt.marks
    asked, leased = attempt.asked_ns, attempt.leased_ns or end
    if attempt.queued_ns:
        yield attempt.queued_ns, attempt.slot_ns or end, ("queue", "local")
    elif asked:
        yield begin, asked, ("client", "encode")
    if asked and attempt.served != "idle":
        low = asked
        if attempt.served == "freed":
            yield asked, leased, ("queue", "local")
        elif attempt.dial_asked_ns:
            yield asked, attempt.dial_asked_ns, ("queue", "local")
            low = attempt.dial_asked_ns
        if attempt.served == "rode":
            shared_end = min(attempt.connect_end_ns or end, leased)
            yield max(low, attempt.connect_begin_ns), shared_end, ("handshake", "shared")
        elif attempt.served != "freed" and attempt.connect is not None:
            for part, since, until in attempt.connect.parts:
                yield max(since, low), min(until, leased), ("handshake", part)
            open_part = attempt.connect.open_part
            if open_part is not None:
                since = attempt.connect.begun_ns(open_part)
                yield max(since, low), min(attempt.connect_end_ns or leased, leased), ("handshake", open_part)
    if attempt.leased_ns and marks.parts and marks.parts[0][0] == "encode":
        yield attempt.leased_ns, marks.parts[0][1], ("client", "encode")
    for part, since, until in marks.parts:
        yield since, until, (SEGMENT_OF.get(part, "network"), part)
    open_part = marks.open_part
    if open_part is not None:
        yield marks.begun_ns(open_part), end, (SEGMENT_OF.get(open_part, "network"), open_part)
    if marks.ended_ns:
        yield marks.last_byte_ns, marks.ended_ns, ("client", "decode")
        yield marks.ended_ns, end, ("client", "waiting")


def _apart(low: int, high: int, intervals: Iterator[_Interval]) -> list[_Interval]:
    """Inside ``low`` to ``high``, none over another (the later one gives way), neighbours of one kind joined."""
    apart: list[_Interval] = []
    for begin, end, key in sorted(intervals):
        begin, end = max(begin, low), min(end, high)
        if end <= begin:
            continue
        low = end
        if apart and apart[-1][2] == key and apart[-1][1] == begin:
            apart[-1] = (apart[-1][0], end, key)
        else:
            apart.append((begin, end, key))
    return apart


def _put(attempt: AttemptRecord, fixed: list[Placed], floating: list[tuple[_Key, int, Source]]) -> list[Placed]:
    """One after the other in the time between request and answer, as late as they begin and as early as they must."""
    marks = attempt.marks
    answered_ns = marks.first_byte_ns or attempt.end_ns
    low = max([marks.sent_ns, attempt.begin_ns, *(row.end_ns for row in fixed if row.begin_ns < answered_ns)])
    low = max([low, *(row.end_ns for row in fixed if row.begin_ns < low)])
    high = marks.last_byte_ns if marks.ended_ns and marks.last_byte_ns >= low else attempt.end_ns
    high = min([high, attempt.end_ns, *(row.begin_ns for row in fixed if row.begin_ns >= low)])
    floating.sort(key=lambda row: rank(row[0]))
    late = _LATE[attempt.streamed]
    after_ns = marks.first_content_ns if attempt.streamed else marks.first_chunk_ns
    begins: list[int] = []
    at_ns = low
    for key, length_ns, _ in floating:
        if key in late:
            at_ns = max(at_ns, after_ns)
        begins.append(at_ns)
        at_ns += length_ns
    placed: list[Placed] = []
    limit_ns = high
    for begin, (key, length_ns, source) in zip(reversed(begins), reversed(floating), strict=True):
        end = min(begin + length_ns, limit_ns)
        begin = max(end - length_ns, low)
        if end > begin:
            placed.append(Placed(*key, begin, end, source, "window"))
            limit_ns = begin
    return placed
