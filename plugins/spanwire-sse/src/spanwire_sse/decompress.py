"""Content codings that a server insists on, although it was asked for none: decoded as they come, within a limit."""

from __future__ import annotations

import zlib
from collections.abc import Callable

from spanwire.errors import MessageTooBig, ProtocolError

__all__ = ["decompressor"]

#: ``wbits`` of zlib: 47 = 32 (gzip or zlib header, found by itself) + 15 (the largest window). Source: zlib.h.
_WBITS = {"gzip": 47, "x-gzip": 47, "deflate": 47}


def decompressor(encoding: str, max_bytes: int, *, strict: bool = True) -> Callable[[bytes], bytes]:
    """A function that takes the coded bytes as they come and gives what can be decoded by now.

    Args:
        encoding: the value of ``Content-Encoding``.
        max_bytes: what one read may unpack to.
        strict: False gives nothing where it cannot decode, instead of an error: for the body of an error status, which
            must not hide the status.

    Raises:
        ProtocolError: a coding that we do not know; from the function: bytes that are not of that coding.
        MessageTooBig: from the function: one read unpacks to more than ``max_bytes``.
    """
    wbits = _WBITS.get(encoding)
    if wbits is None:
        if strict:
            raise ProtocolError(f"the answer is coded as {encoding[:40]!r} although no coding was asked for")
        return _nothing
    stream = zlib.decompressobj(wbits)

    def decode(data: bytes) -> bytes:
        nonlocal stream
        plain = b""
        try:
            while data:
                if stream.eof:  # gzip allows several streams one after the other: RFC 1952 section 2.2
                    stream = zlib.decompressobj(wbits)
                plain += stream.decompress(data, max_bytes + 1 - len(plain))
                if len(plain) > max_bytes:
                    raise MessageTooBig(
                        f"a part of the answer unpacks to over {max_bytes} bytes (Limits.max_event_bytes)"
                    )
                data = stream.unused_data.lstrip(b"\0")  # padding, as gzip itself allows
        except zlib.error as error:
            if not strict:
                return plain
            raise ProtocolError(f"the answer's {encoding} coding is broken: {error}") from error
        return plain

    return decode


def _nothing(_data: bytes) -> bytes:
    return b""
