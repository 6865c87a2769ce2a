"""The event-stream parser: any bytes in any split are what a second, simple reading of the standard makes of them.

Input: the stream; behind it the cuts (see ``Controls``), and last a byte for ``max_event_bytes``, 0 for a large one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fuzz.common import Controls, cut, single_bytes
from spanwire.errors import MessageTooBig
from spanwire.wire.sse import EventStreamParser

Events = list[tuple[bytes, bytes]]
_LARGE = 1 << 20


class _Outcome(NamedTuple):
    events: Events
    too_big: bool
    tail: bytes
    ignored: list[bytes]
    unfinished: bytes


def check(data: bytes) -> None:
    """Raises AssertionError, or whatever a bug raises."""
    controls = Controls(data)
    limit = controls.byte() or _LARGE
    cuts = controls.cuts()
    stream = controls.rest()
    whole = _parse([stream], limit)
    for reads in (
        cut(stream, cuts),
        single_bytes(stream),
        _at_blank_lines(stream),
        [piece for byte in cut(stream, cuts) for piece in (b"", byte)],
    ):
        got = _parse(reads, limit)
        if whole.too_big:  # what the parser holds then is of no use to anybody
            assert (got.too_big, got.events) == (True, whole.events), "another split, another outcome"
        else:
            assert got == whole, "another split, another outcome"
    expected, tail = reference(stream)
    if whole.too_big:
        assert whole.events == expected[: len(whole.events)], "not the standard's events before the limit"
        # Data lines count with a byte for each line's end; nothing else can make an event larger than its stream.
        assert len(stream) + stream.count(b"\n") + stream.count(b"\r") > limit, "too big, and all of it is not"
    else:
        assert whole.events == expected, "not the standard's events"
        assert whole.tail == tail, "not what the last blank line left"
    assert all(len(value) <= limit for _, value in whole.events), "an event over the limit"


def _parse(reads: Sequence[bytes], limit: int) -> _Outcome:
    events: Events = []
    parser = EventStreamParser(lambda name, value: events.append((name, value)), max_event_bytes=limit)
    too_big = False
    try:
        for read in reads:
            parser.feed(read)
    except MessageTooBig:
        too_big = True
    return _Outcome(events, too_big, parser.tail, parser.ignored, parser.unfinished_line)


def _at_blank_lines(stream: bytes) -> list[bytes]:
    """As most servers write: an event in each piece."""
    pieces = stream.split(b"\n\n")
    return [piece + b"\n\n" for piece in pieces[:-1]] + pieces[-1:]


def reference(stream: bytes) -> tuple[Events, bytes]:
    """WHATWG HTML 9.2.6 on bytes, a byte at a time, and the data of the event that no blank line ended."""
    if stream[:3] == b"\xef\xbb\xbf":
        stream = stream[3:]
    lines: list[bytes] = []
    line = bytearray()
    for at, byte in enumerate(stream):
        if byte == 0x0A and at and stream[at - 1] == 0x0D:
            continue  # the second half of CRLF
        if byte in (0x0A, 0x0D):
            lines.append(bytes(line))
            line.clear()
        else:
            line.append(byte)
    events: Events = []
    name = b""
    data: list[bytes] = []
    for full in lines:
        if full == b"":
            if data:
                events.append((name, b"\n".join(data)))
            name, data = b"", []
            continue
        field, value = _field(full)
        if field == b"event":
            name = value
        elif field == b"data":
            data.append(value)
    if line.startswith(b"data:"):
        data.append(_field(bytes(line))[1])
    return events, b"\n".join(data)


def _field(line: bytes) -> tuple[bytes, bytes]:
    colon = line.find(b":")
    if colon < 0:
        return line, b""
    value = line[colon + 1 :]
    return line[:colon], value[1:] if value[:1] == b" " else value
