"""Files to calls: call logs, JSON lists of timelines, and OTLP traces, each plain or gzipped, known by their content.

A line that cannot be read is counted and named, and stops nothing. Only when no call at all was found is that an error.
"""

from __future__ import annotations

import gzip
import io
import sys
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, cast

import msgspec

from ..errors import ConfigurationError
from .calls import Call, Log, Pieces, call_of
from .otlp import ResourceSpans, Spans

__all__ = ["BadLine", "Found", "NothingToReport", "between", "read"]

#: So many bad lines are named; all are counted.
_NAMED = 20
_GZIP = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"


class NothingToReport(ConfigurationError):
    """The files can be read, and no call is in them."""


class BadLine(msgspec.Struct, frozen=True):
    """What could not be read: where, and why. ``line`` is 0 where it is not about a line."""

    file: str
    line: int
    why: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.why}" if self.line else f"{self.file}: {self.why}"


class Found(msgspec.Struct):
    """Everything that the files had.

    Attributes:
        calls: in order of their start, those without one last.
        files: by name, how many calls each had.
        bad: the first lines that could not be read; ``bad_lines`` counts all of them.
        unfinished: files whose last line was still being written.
        dropped: calls that a log says it could not write.
        repeated: calls that were there twice, and count once.
    """

    calls: list[Call] = []
    files: dict[str, int] = {}
    bad: list[BadLine] = []
    bad_lines: int = 0
    unfinished: int = 0
    dropped: int = 0
    repeated: int = 0


class _Line(Log, gc=False):
    """Any JSON object that we know: told apart by which of its fields are there."""

    schema: int = 0
    resourceSpans: msgspec.Raw = msgspec.Raw()  # noqa: N815 - OTLP's names
    resourceMetrics: msgspec.Raw = msgspec.Raw()  # noqa: N815
    resourceLogs: msgspec.Raw = msgspec.Raw()  # noqa: N815
    timelines: msgspec.Raw = msgspec.Raw()  # `spanwire probe --json`


_line = msgspec.json.Decoder(_Line)
_lines = msgspec.json.Decoder(list[_Line])
_raws = msgspec.json.Decoder(list[msgspec.Raw])
_resources = msgspec.json.Decoder(list[ResourceSpans])
_UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)


def read(files: Sequence[str]) -> Found:
    """All calls of some files; ``-`` is the standard input. A file that is named twice is read once.

    Raises:
        ConfigurationError: a file is not there or cannot be read, or there is no call in any of them.
    """
    reader = _Reader()
    seen: set[object] = set()
    for name in files:
        key = "-" if name == "-" else Path(name).resolve()
        if key in seen:
            continue
        seen.add(key)
        reader.file(name)
    found = reader.finish()
    if not found.calls:
        raise NothingToReport(_nothing(found, reader.spans.seen))
    return found


def _nothing(found: Found, spans: int) -> str:
    names = ", ".join(found.files) or "no file"
    if found.bad:
        more = f" (and {found.bad_lines - 1:,} more lines that cannot be read)" if found.bad_lines > 1 else ""
        return (
            f"nothing to report: {found.bad[0]}{more}; a report is made of call logs (SPANWIRE_CALL_LOG=calls.jsonl) "
            "and of OTLP traces in JSON"
        )
    if spans:
        return f"nothing to report: none of the {spans:,} spans in {names} is of a call that spanwire made"
    return f"nothing to report: no call in {names}: were they made over spanwire, or under spanwire_instrument.instrument()?"


def between(found: Found, since_unix_s: float | None, until_unix_s: float | None) -> int:
    """Leave only calls that began in this window; how many were left out because they have no time of day."""
    if since_unix_s is None and until_unix_s is None:
        return 0
    low = float("-inf") if since_unix_s is None else since_unix_s
    high = float("inf") if until_unix_s is None else until_unix_s
    timeless = sum(call.started_unix_s is None for call in found.calls)
    found.calls = [
        call for call in found.calls if call.started_unix_s is not None and low <= call.started_unix_s < high
    ]
    return timeless


class _Reader:
    def __init__(self) -> None:
        self.shared = Pieces()
        self.spans = Spans(self.shared)
        self.found = Found()

    # --- a file -----------------------------------------------------------------------------------------------------

    def file(self, name: str) -> None:
        label = "standard input" if name == "-" else name
        self.found.files[label] = 0
        try:
            if name == "-":
                self._stream(label, sys.stdin.buffer)
            else:
                with Path(name).open("rb") as stream:
                    self._stream(label, stream)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            if isinstance(error, EOFError):  # gzip's word for it
                self.found.unfinished += 1
            else:
                self._bad(label, 0, f"not to be unpacked: {error}")
        except OSError as error:
            why = (
                "is a folder; give the files in it" if isinstance(error, IsADirectoryError) else error.strerror or error
            )
            help_ = (
                "; SPANWIRE_CALL_LOG=FILE makes one, of a program's calls"
                if isinstance(error, FileNotFoundError)
                else ""
            )
            raise ConfigurationError(f"{label}: {why}{help_}") from error

    def _stream(self, label: str, stream: IO[bytes]) -> None:
        buffered = cast("io.BufferedReader", stream)  # what `open` and the standard input give
        if buffered.peek(2)[:2] == _GZIP:
            with gzip.GzipFile(fileobj=buffered) as unpacked:
                self._content(label, cast("IO[bytes]", unpacked))
        else:
            self._content(label, stream)

    def _content(self, label: str, stream: IO[bytes]) -> None:
        """One JSON document, or one on each line. The first line tells, nearly always."""
        number = 0
        for first in stream:
            number += 1
            if text := first.strip().removeprefix(_BOM):
                break
        else:
            return
        if text[:1] == b"{":
            try:
                line = _line.decode(text)
            except _UNREADABLE:
                pass
            else:
                self._take(label, number, line)
                self._rest(label, number, stream)
                return
        # A document over several lines, a list, or a log whose first line is bad: nothing shorter than all of it tells.
        whole = first.lstrip().removeprefix(_BOM) + stream.read()
        if self._document(label, whole):
            return
        self._rest(label, number - 1, whole.splitlines(keepends=True))

    def _document(self, label: str, whole: bytes) -> bool:
        try:
            if whole[:1] == b"[":
                items = _raws.decode(whole)
            else:
                self._take(label, 0, _line.decode(whole))
                return True
        except _UNREADABLE:
            return False
        for number, item in enumerate(items, 1):
            self._text(label, number, bytes(item))
        return True

    def _rest(self, label: str, number: int, lines: Iterable[bytes]) -> None:
        for text in lines:
            number += 1
            if not text.isspace():
                self._text(label, number, text, last=not text.endswith(b"\n"))

    # --- an object --------------------------------------------------------------------------------------------------

    def _text(self, label: str, number: int, text: bytes, *, last: bool = False) -> None:
        """``last``: a line without its end, which may be still being written."""
        try:
            line = _line.decode(text)
        except _UNREADABLE as error:
            if last:
                self.found.unfinished += 1
            else:
                self._bad(label, number, _why(text, error))
            return
        self._take(label, number, line)

    def _take(self, label: str, number: int, line: _Line) -> None:
        try:
            if line.schema:
                if line.dropped:
                    self.found.dropped += line.dropped
                if bytes(line.timelines):
                    for timeline in _lines.decode(line.timelines):
                        self._call(label, timeline)
                elif line.outcome or not line.dropped:
                    self._call(label, line)
            elif bytes(line.resourceSpans):
                self.found.files[label] += self.spans.add(_resources.decode(line.resourceSpans))
            elif not bytes(line.resourceMetrics) and not bytes(line.resourceLogs):
                self._bad(label, number, "neither a timeline of spanwire nor an OTLP export")
        except _UNREADABLE as error:
            self._bad(label, number, str(error))

    def _call(self, label: str, line: Log) -> None:
        self.found.calls.append(call_of(line, self.shared))
        self.found.files[label] += 1

    def _bad(self, label: str, number: int, why: str) -> None:
        self.found.bad_lines += 1
        if len(self.found.bad) < _NAMED:
            self.found.bad.append(BadLine(label, number, why))

    # --- all files --------------------------------------------------------------------------------------------------

    def finish(self) -> Found:
        found = self.found
        spans = self.spans.calls()
        found.repeated = self.spans.repeated
        logged: dict[str, list[float]] = {}
        for call in found.calls:
            if call.trace_id:
                logged.setdefault(call.trace_id, []).append(call.total_s)
        for call in spans:  # a call that is in a log and in a trace is one call
            same = [s for s in logged.get(call.trace_id or "", ()) if abs(s - call.total_s) < 2e-6]
            if same:
                found.repeated += 1
            else:
                found.calls.append(call)
        found.calls.sort(key=lambda call: (call.started_unix_s is None, call.started_unix_s or 0.0))
        return found


def _why(text: bytes, error: Exception) -> str:
    if isinstance(error, msgspec.ValidationError):
        return str(error)
    shown = text[:40].decode("utf-8", "replace").strip()
    return f"no JSON: {shown!r}{'…' if len(text) > 40 else ''}"
