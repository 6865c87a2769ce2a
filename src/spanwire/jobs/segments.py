"""Bodies outside the database: appended to files of their own, and found again by a reference.

A body in a row would be copied through the write-ahead log, and moved whenever the row changes. A reference says where the
body is, how long it is and its CRC-32; a small body is its own reference. A process only appends to files that it has made
itself, so several of them need no agreement. A file goes when nothing refers to it any more.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import struct
import time
import zlib
from pathlib import Path

from ..errors import JobError

__all__ = ["INLINE_BYTES", "NAME_BYTES", "Segments", "inline"]

#: Bodies up to here are kept in the row. Source: measured; SQLite's pages have 4 KiB, and what is longer spills over.
INLINE_BYTES = 4096
#: A file is closed at this length, so that it can go when its last body does.
SEGMENT_BYTES = 64 * 1024 * 1024
#: A file that was written to a moment ago may hold a body whose row is not written yet, in seconds.
_YOUNG_S = 3600.0
NAME_BYTES = 16
_INLINE, _OUTSIDE = b"\x00", b"\x01"
_PLACE = struct.Struct(">16sQQI")  # file, offset, length, CRC-32
_NAME = re.compile(r"[0-9a-f]{16}\.bodies")


def inline(body: bytes) -> bytes | None:
    """The reference of a body that is small enough to be its own; None if it is not."""
    return _INLINE + body if len(body) <= INLINE_BYTES else None


class Segments:
    """The files of one folder. :meth:`append`, :meth:`sync` and :meth:`sweep` belong to one thread, :meth:`read` to any."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file: int | None = None
        self._name = ""
        self._length = 0
        self._dirty = False

    def append(self, body: bytes) -> bytes:
        """Write a body, and return its reference. Durable after the next :meth:`sync`. Raises OSError."""
        small = inline(body)
        if small is not None:
            return small
        if self._file is None or self._length >= SEGMENT_BYTES:
            self._begin()
        assert self._file is not None
        offset, view = self._length, memoryview(body)
        while view:
            written = os.write(self._file, view)
            self._length += written
            view = view[written:]
        self._dirty = True
        return _OUTSIDE + _PLACE.pack(self._name.encode(), offset, len(body), zlib.crc32(body))

    def sync(self) -> None:
        """Have everything that was appended on the disk. Raises OSError."""
        if self._dirty and self._file is not None:
            os.fsync(self._file)
            self._dirty = False

    def read(self, reference: bytes) -> bytes:
        """The body.

        Raises:
            JobError: it is not there, or not what was written; retryable: it cannot be read now.
        """
        if not reference:
            return b""
        if reference[:1] == _INLINE:
            return reference[1:]
        try:
            name, offset, length, crc = _PLACE.unpack(reference[1:])
            path = self.folder / _file_name(name)
            with path.open("rb") as file:
                file.seek(offset)
                body = file.read(length)
        except (FileNotFoundError, ValueError, struct.error) as error:
            raise JobError("a job's body cannot be read from the store's folder of bodies") from error
        except OSError as error:  # no file descriptors, a disk that fails, no permission: later it may do
            raise JobError(f"a job's body cannot be read now: {error.strerror} ({path})", retryable=True) from error
        if len(body) != length or zlib.crc32(body) != crc:
            raise JobError(f"a job's body is damaged: see {path}")
        return body

    def sweep(self, used: set[bytes]) -> int:
        """Delete the files that nothing refers to: ``used`` are the names that something does. Returns how many went."""
        gone = 0
        with contextlib.suppress(OSError):
            for entry in list(os.scandir(self.folder)):
                if not _NAME.fullmatch(entry.name) or entry.name[:NAME_BYTES].encode() in used:
                    continue
                if entry.name.startswith(self._name or "-"):
                    continue
                with contextlib.suppress(OSError):
                    if time.time() - entry.stat().st_mtime > _YOUNG_S and _unlink_unused(entry.path):
                        gone += 1
        return gone

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _begin(self) -> None:
        self.sync()
        self.close()
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._name = secrets.token_hex(8)
        path = self.folder / f"{self._name}.bodies"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | getattr(os, "O_BINARY", 0)
        self._file = os.open(path, flags, 0o600)
        self._length = 0
        _lock(self._file)
        _sync_folder(self.folder)


def _file_name(name: bytes) -> str:
    file_name = f"{name.decode()}.bodies"
    if not _NAME.fullmatch(file_name):  # a reference leads nowhere else
        raise ValueError("no name of a file of bodies")
    return file_name


def _lock(file: int) -> None:
    """Held for as long as somebody may append: the sweep of another process leaves the file alone."""
    try:
        import fcntl
    except ImportError:  # Windows, where an open file cannot be deleted anyhow
        return
    fcntl.flock(file, fcntl.LOCK_SH)


def _unlink_unused(path: str) -> bool:
    try:
        import fcntl
    except ImportError:
        Path(path).unlink()  # fails while it is open
        return True
    file = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        Path(path).unlink()
    finally:
        os.close(file)
    return True


def _sync_folder(folder: Path) -> None:
    """A new file's name is durable when its folder is."""
    with contextlib.suppress(OSError, AttributeError):  # Windows has no way
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(file)
        finally:
            os.close(file)
