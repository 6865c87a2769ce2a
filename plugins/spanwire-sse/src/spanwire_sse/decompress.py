"""Content codings that a server insists on, although it was asked for none: decoded as they come, piece by piece."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable

from spanwire.errors import ProtocolError

__all__ = ["decompressor"]

#: ``wbits`` of zlib: 47 = 32 (gzip or zlib header, found by itself) + 15 (the largest window). Source: zlib.h.
_WBITS = {"gzip": 47, "x-gzip": 47, "deflate": 47}
#: What is unpacked at once, in bytes: whoever takes it has limits of its own, and says so before the next piece.
_PIECE = 64 * 1024


def decompressor(
    encoding: str, take: Callable[[bytes], None], *, strict: bool = True
) -> tuple[Callable[[bytes], None], Callable[[], bool]]:
    """A function that takes the coded bytes as they come and hands over what can be decoded by now; and one that tells
    whether the coding has come to its end.

    Args:
        encoding: the value of ``Content-Encoding``.
        take: gets the decoded bytes, never empty; what it raises comes out.
        strict: False stops where it cannot decode, instead of an error: for the body of an error status, which must
            not hide the status.

    Raises:
        ProtocolError: a coding that we do not know; from the function: bytes that are not of that coding. What stood
            before them has been handed over.
    """
    wbits = _WBITS.get(encoding)
    if wbits is None:
        if strict:
            raise ProtocolError(f"the answer is coded as {encoding[:40]!r} although no coding was asked for")
        return _nothing, lambda: True
    stream = zlib.decompressobj(wbits)
    broken = False

    def decode(data: bytes) -> None:
        nonlocal stream, broken
        more = not broken
        while more:
            if stream.eof:  # gzip allows several streams one after the other: RFC 1952 section 2.2
                data = data.lstrip(b"\0")  # and padding, as gzip itself does
                if not data:
                    return
                stream = zlib.decompressobj(wbits)
            before = stream.copy()
            try:
                plain = stream.decompress(data, _PIECE)
            except zlib.error as error:
                broken = True
                _salvage(before, data, take)
                if not strict:
                    return
                raise ProtocolError(f"the answer's {encoding} coding is broken: {error}") from error
            data = stream.unused_data if stream.eof else stream.unconsumed_tail
            more = bool(data) or len(plain) == _PIECE
            if plain:
                take(plain)

    return decode, lambda: stream.eof or not strict


def _salvage(stream: zlib._Decompress, data: bytes, take: Callable[[bytes], None]) -> None:
    """zlib gives nothing of what it has decoded in a call that fails; a byte at a time, it does."""
    plain: list[bytes] = []
    with contextlib.suppress(zlib.error):
        plain.extend(stream.decompress(data[at : at + 1]) for at in range(len(data)))
    if any(plain):
        take(b"".join(plain))


def _nothing(_data: bytes) -> None:
    pass
