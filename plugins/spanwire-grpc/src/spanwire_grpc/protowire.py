"""PURE: the two kinds of protobuf field that OpenAI's JSON travels in, by hand.

A chunk is one field of bytes, sometimes with a flag behind it. Generated code reads that too (the tests compare the two);
this needs no library and, for the commonest message, one slice.

Source: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from collections.abc import Mapping

from spanwire.errors import ProtocolError

__all__ = ["body_and_number", "request"]

_VARINT, _I64, _BYTES, _I32 = 0, 1, 2, 5
#: Field 1, bytes; field 2, a map's entry.
_BODY, _ENTRY = 0x0A, 0x12
_KEY, _VALUE = 0x0A, 0x12


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _field(tag: int, data: bytes) -> bytes:
    return b"%c%b%b" % (tag, _varint(len(data)), data)


def request(body: bytes, entries: Mapping[str, str]) -> bytes:
    """``{bytes body = 1; map<string, string> entries = 2}``."""
    parts = [_field(_BODY, body)] if body else []
    for name, value in entries.items():
        parts.append(_field(_ENTRY, _field(_KEY, name.encode()) + _field(_VALUE, value.encode())))
    return b"".join(parts)


def body_and_number(message: bytes) -> tuple[bytes, int]:
    """``{bytes body = 1; bool or int32 number = 2}``, other fields skipped. Raises ProtocolError."""
    length = len(message)
    if length > 2 and message[0] == _BODY:  # the commonest, at once: a body, and nothing behind it
        first = message[1]
        if first == length - 2 and first < 0x80:
            return message[2:], 0
        if length > 3 and first >= 0x80 and message[2] < 0x80 and (first & 0x7F | message[2] << 7) == length - 3:
            return message[3:], 0
    body, number, at = b"", 0, 0
    while at < length:
        tag, at = _read_varint(message, at)
        field, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            value, at = _read_varint(message, at)
            if field == 2:
                number = value
        elif kind == _BYTES:
            size, at = _read_varint(message, at)
            if at + size > length:
                raise ProtocolError("a message of the answer ends in the middle of a field")
            if field == 1:
                body = message[at : at + size]
            at += size
        elif kind in (_I64, _I32):
            at += 8 if kind == _I64 else 4
        else:
            raise ProtocolError("a message of the answer is no protobuf of this schema: is the dialect right?")
    if at > length:
        raise ProtocolError("a message of the answer ends in the middle of a field")
    return body, number


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    for byte in message[at : at + 10]:
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise ProtocolError("a message of the answer ends in the middle of a number")
