"""PURE: tensors of the Open Inference Protocol, in both of the ways in which servers send them.

An element of BYTES is in ``contents`` (KServe, Dynamo), or raw, each with a length of four bytes before it (Triton, and
MLServer where the request was raw). Shapes are not looked at but for vectors: MLServer sends ``[1, 1]`` for one text.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from spanwire.errors import ProtocolError

from .stubs import oip

__all__ = [
    "DATATYPES",
    "Output",
    "boolean",
    "fill",
    "floats",
    "integer",
    "outputs",
    "packed",
    "rows",
    "text",
    "texts",
    "whole_number",
]

#: Field of ``InferTensorContents``, and the format of one raw element, by datatype. FP16 has no field: it is always raw.
_KINDS = {
    "BOOL": ("bool_contents", "?"),
    "INT8": ("int_contents", "b"),
    "INT16": ("int_contents", "h"),
    "INT32": ("int_contents", "i"),
    "INT64": ("int64_contents", "q"),
    "UINT8": ("uint_contents", "B"),
    "UINT16": ("uint_contents", "H"),
    "UINT32": ("uint_contents", "I"),
    "UINT64": ("uint64_contents", "Q"),
    "FP16": ("", "e"),
    "FP32": ("fp32_contents", "f"),
    "FP64": ("fp64_contents", "d"),
}
#: What an input may be.
DATATYPES = frozenset({*_KINDS, "BYTES"})


class Output:
    """One output: its name, datatype, shape and elements."""

    __slots__ = ("datatype", "name", "shape", "values")

    def __init__(self, name: str, datatype: str, shape: Sequence[int], values: Sequence[Any]) -> None:
        self.name = name
        self.datatype = datatype
        self.shape = tuple(shape)
        self.values = values


def text(name: str, *values: str) -> Any:
    """An input of texts."""
    contents = oip.InferTensorContents(bytes_contents=[value.encode() for value in values])
    return oip.InferTensor(name=name, datatype="BYTES", shape=[len(values)], contents=contents)


def boolean(name: str, value: bool) -> Any:
    """An input of one truth value."""
    contents = oip.InferTensorContents(bool_contents=[value])
    return oip.InferTensor(name=name, datatype="BOOL", shape=[1], contents=contents)


def integer(name: str, value: int) -> Any:
    """An input of one whole number of 32 bits."""
    contents = oip.InferTensorContents(int_contents=[value])
    return oip.InferTensor(name=name, datatype="INT32", shape=[1], contents=contents)


def fill(tensor: Any, values: Sequence[Any]) -> None:
    """Put elements into an input's ``contents``; not for FP16. Raises TypeError, ValueError."""
    field = "bytes_contents" if tensor.datatype == "BYTES" else _KINDS[tensor.datatype][0]
    tensor.contents.SetInParent()
    getattr(tensor.contents, field).extend(values)


def packed(datatype: str, values: Sequence[Any]) -> bytes:
    """Elements as ``raw_input_contents`` have them. Raises struct.error, OverflowError."""
    if datatype == "BYTES":
        return b"".join(len(value).to_bytes(4, "little") + value for value in values)
    return struct.pack(f"<{len(values)}{_KINDS[datatype][1]}", *values)


def outputs(response: Any) -> dict[str, Output]:
    """What a ``ModelInferResponse`` holds, by name. Raises ProtocolError."""
    raws = list(response.raw_output_contents)
    found: dict[str, Output] = {}
    for position, tensor in enumerate(response.outputs):
        if tensor.HasField("contents") or position >= len(raws):
            values = _contents(tensor)
        else:
            values = _raw(tensor.name, tensor.datatype, raws[position])
        found[tensor.name] = Output(tensor.name, tensor.datatype, tensor.shape, values)
    return found


def _contents(tensor: Any) -> Sequence[Any]:
    if tensor.datatype in ("BYTES", "STRING"):
        return list(tensor.contents.bytes_contents)
    field = _KINDS.get(tensor.datatype, ("", ""))[0]
    if not field:
        raise ProtocolError(
            f"the output {tensor.name!r:.60} has the datatype {tensor.datatype!r:.20}, which is not known"
        )
    return list(getattr(tensor.contents, field))


def _raw(name: str, datatype: str, raw: bytes) -> Sequence[Any]:
    if datatype in ("BYTES", "STRING"):
        values, at = [], 0
        while at < len(raw):
            size = int.from_bytes(raw[at : at + 4], "little")
            at += 4
            if at + size > len(raw):
                raise ProtocolError(f"the output {name!r:.60} ends in the middle of an element")
            values.append(raw[at : at + size])
            at += size
        return values
    if datatype not in _KINDS:
        raise ProtocolError(f"the output {name!r:.60} has the datatype {datatype!r:.20}, which is not known")
    form = _KINDS[datatype][1]
    size = struct.calcsize(f"<{form}")
    if len(raw) % size:
        raise ProtocolError(f"the output {name!r:.60} ends in the middle of an element")
    return struct.unpack(f"<{len(raw) // size}{form}", raw)


def texts(output: Output) -> list[str]:
    """Its elements as text. A broken character must not end the answer: it becomes U+FFFD."""
    return [value.decode("utf-8", "replace") for value in output.values]


def whole_number(output: Output | None) -> int | None:
    """Its one number, None where there is none."""
    value = output.values[0] if output is not None and output.values else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def floats(output: Output) -> list[float]:
    """Its elements as numbers."""
    return [float(value) for value in output.values]


def rows(output: Output, count: int) -> list[list[float]]:
    """``count`` vectors. Raises ProtocolError."""
    values = floats(output)
    if count < 1 or len(values) % count or not values:
        raise ProtocolError(
            f"the output {output.name!r:.60} has {len(values)} numbers in the shape {output.shape}, for {count} inputs"
        )
    width = len(values) // count
    return [values[at : at + width] for at in range(0, len(values), width)]
