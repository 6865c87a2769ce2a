"""Content codings that a server insists on, although it was asked for none: decoded as they come, within a limit."""

from __future__ import annotations

import zlib
from collections.abc import Callable

from spanwire.errors import MessageTooBig, ProtocolError

__all__ = ["decompressor"]

#: ``wbits`` of zlib: 47 = 32 (gzip or zlib header, found by itself) + 15 (the largest window). Source: zlib.h.
_WBITS = {"gzip": 47, "x-gzip": 47, "deflate": 47}


def decompressor(encoding: str, max_bytes: int) -> Callable[[bytes], bytes]:
    """A function that takes the coded bytes as they come and gives what can be decoded by now.

    Raises:
        ProtocolError: a coding that we do not know; from the function: bytes that are not of that coding.
        MessageTooBig: from the function: one read unpacks to more than ``max_bytes``.
    """
    wbits = _WBITS.get(encoding.strip().lower())
    if wbits is None:
        raise ProtocolError(f"the answer is coded as {encoding[:40]!r} although no coding was asked for")
    stream = zlib.decompressobj(wbits)

    def decode(data: bytes) -> bytes:
        try:
            plain = stream.decompress(data, max_bytes + 1)
        except zlib.error as error:
            raise ProtocolError(f"the answer's {encoding} coding is broken: {error}") from error
        if len(plain) > max_bytes:
            raise MessageTooBig(f"a part of the answer unpacks to over {max_bytes} bytes (Limits.max_event_bytes)")
        return plain

    return decode
