"""PURE parser of event streams, to the letter of the WHATWG HTML standard, section 9.2.6, on bytes.

A line ends with CRLF, LF or CR and nothing else; one byte order mark at the very start is dropped; ``data`` lines of one
event are joined with LF; comments and unknown fields are ignored; an event without data is not dispatched; what is left
when the stream ends is not dispatched. Data stay bytes: a character may be split over two reads, and whether a broken
one matters is for the layer above to say.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NoReturn

from ..errors import MessageTooBig

__all__ = ["EventStreamParser"]

_BOM = b"\xef\xbb\xbf"
_LINE_END = re.compile(rb"\r\n|\n|\r")
#: How much of what the standard says to ignore is kept for an error message, in bytes.
_IGNORED_BYTES = 4096


class EventStreamParser:
    """Feed bytes, get events.

    Args:
        on_event: called with (event name, data) of each event; the name is ``b""`` where the stream gave none. May be
            replaced between two events.
        max_event_bytes: largest event, in bytes.

    Attributes:
        ignored: the first lines that were ignored and were no comments, for whoever has to explain an empty stream.
    """

    __slots__ = (
        "_data",
        "_name",
        "_partial",
        "_plain",
        "_size",
        "_skip_lf",
        "_start",
        "ignored",
        "max_event_bytes",
        "on_event",
    )

    def __init__(self, on_event: Callable[[bytes, bytes], None], *, max_event_bytes: int = 64 * 1024 * 1024) -> None:
        self.on_event = on_event
        self.max_event_bytes = max_event_bytes
        self._partial: list[bytes] = []  # pieces of a line whose end has not come
        self._data: list[bytes] = []
        self._name = b""
        self._size = 0  # bytes in _partial and _data
        self._skip_lf = False  # the last read ended with CR, which was taken as a line's end
        self._start = True
        self._plain = True  # between two events, nothing held back
        self.ignored: list[bytes] = []

    @property
    def tail(self) -> bytes:
        """Data of an event that was not dispatched, because no blank line came: for a lenient layer above."""
        data = list(self._data)
        line = b"".join(self._partial)
        if line.startswith(b"data:"):
            data.append(_value(line, 5))
        return b"\n".join(data)

    @property
    def unfinished_line(self) -> bytes:
        """What came after the last line's end, for whoever has to explain an empty stream."""
        return b"".join(self._partial)

    def feed(self, data: bytes) -> None:
        """Take the next bytes.

        Raises:
            MessageTooBig: an event is over the limit.
        """
        # What nearly every server sends: whole events of one data line each, and nothing is left from before.
        if self._plain and data[:6] == b"data: " and data[-2:] == b"\n\n":
            end = len(data) - 2
            if end < self.max_event_bytes and b"\r" not in data:
                self._start = False
                if data.find(b"\n") == end:
                    self.on_event(b"", data[6:end])
                    return
                payloads = data[6:end].split(b"\n\ndata: ")
                if data.count(b"\n") == 2 * len(payloads):  # else a line is of another kind
                    for payload in payloads:
                        self.on_event(b"", payload)
                    return
        self._feed(data)
        self._plain = not (self._size or self._name or self._skip_lf or self._start)

    def _feed(self, data: bytes) -> None:
        if self._start:
            data = self._after_bom(data)
        if self._skip_lf and data:
            self._skip_lf = False
            if data.startswith(b"\n"):
                data = data[1:]
        if not data:
            return
        has_cr = b"\r" in data
        if not has_cr and b"\n" not in data:
            self._grow(len(data))
            self._partial.append(data)
            return
        lines = _LINE_END.split(data) if has_cr else data.split(b"\n")
        self._skip_lf = has_cr and data.endswith(b"\r")
        rest = lines.pop()
        if self._partial:
            self._size -= sum(map(len, self._partial))
            lines[0] = b"".join(self._partial) + lines[0]
            self._partial.clear()
        for line in lines:
            if self._size + len(line) > self.max_event_bytes:
                self._too_big()
            if line.startswith(b"data:"):
                self._grow(len(line) + 1)
                self._data.append(_value(line, 5))
            elif not line:
                self._dispatch()
            elif not line.startswith(b":"):
                self._field(line)
        if rest:
            self._grow(len(rest))
            self._partial.append(rest)

    def _after_bom(self, data: bytes) -> bytes:
        """Drop the byte order mark, which may come in pieces."""
        held = b"".join(self._partial)
        data = held + data
        self._partial.clear()
        self._size = 0
        if len(data) < 3 and _BOM.startswith(data):
            self._partial.append(data)
            self._size = len(data)
            return b""
        self._start = False
        return data[3:] if data.startswith(_BOM) else data

    def _grow(self, count: int) -> None:
        self._size += count
        if self._size > self.max_event_bytes:
            self._too_big()

    def _too_big(self) -> NoReturn:
        raise MessageTooBig(f"one event of the answer is over {self.max_event_bytes} bytes (Limits.max_event_bytes)")

    def _dispatch(self) -> None:
        name, self._name = self._name, b""
        if self._data:
            data = self._data[0] if len(self._data) == 1 else b"\n".join(self._data)
            self._data.clear()
            self._size = 0
            self.on_event(name, data)

    def _field(self, line: bytes) -> None:
        field, _, _ = line.partition(b":")
        if field == b"event":
            self._name = _value(line, 6)
        elif line == b"data":
            self._grow(len(line) + 1)
            self._data.append(b"")
        elif field not in (b"id", b"retry") and sum(map(len, self.ignored)) < _IGNORED_BYTES:
            self.ignored.append(line[:_IGNORED_BYTES])


def _value(line: bytes, start: int) -> bytes:
    """What stands behind the colon, one leading space removed."""
    return line[start + 1 :] if line[start : start + 1] == b" " else line[start:]
