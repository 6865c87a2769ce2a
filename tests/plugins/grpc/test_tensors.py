from __future__ import annotations

import contextlib
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spanwire_grpc import tensors
from spanwire_grpc.stubs import oip

from spanwire.errors import ProtocolError


def response(
    datatype: str, *, raw: bytes | None = None, name: str = "o", shape: tuple[int, ...] = (1,), **contents: Any
) -> Any:
    made = oip.ModelInferResponse()
    tensor = made.outputs.add(name=name, datatype=datatype, shape=shape)
    if raw is None:
        for field, values in contents.items():
            getattr(tensor.contents, field).extend(values)
    else:
        made.raw_output_contents.append(raw)
    return made


@given(st.lists(st.text(max_size=30), max_size=5))
def test_texts_come_back_in_both_forms(values: list[str]) -> None:
    data = [value.encode("utf-8", "replace") for value in values]
    raw = b"".join(struct.pack("<I", len(item)) + item for item in data)
    for found in (response("BYTES", raw=raw), response("BYTES", bytes_contents=data)):
        assert tensors.texts(tensors.outputs(found)["o"]) == [item.decode() for item in data]


@given(st.lists(st.floats(width=32, allow_nan=False), max_size=8))
def test_so_do_numbers(values: list[float]) -> None:
    raw = struct.pack(f"<{len(values)}f", *values)
    for found in (response("FP32", raw=raw), response("FP32", fp32_contents=values)):
        assert tensors.floats(tensors.outputs(found)["o"]) == values


@pytest.mark.parametrize(
    ("datatype", "raw", "values"),
    [
        ("BOOL", b"\x01\x00", (True, False)),
        ("INT8", b"\xff", (-1,)),
        ("UINT32", b"\x07\x00\x00\x00", (7,)),
        ("INT64", b"\xfe" + b"\xff" * 7, (-2,)),
        ("FP16", b"\x00\x3c", (1.0,)),
        ("FP64", struct.pack("<d", 2.5), (2.5,)),
    ],
)
def test_each_datatype(datatype: str, raw: bytes, values: tuple[Any, ...]) -> None:
    assert tensors.outputs(response(datatype, raw=raw))["o"].values == values


@pytest.mark.parametrize(
    ("datatype", "raw"),
    [("BYTES", b"\x05\x00\x00\x00ab"), ("FP32", b"\x00\x00\x00"), ("WORDS", b"x"), ("BYTES", b"\x01")],
)
def test_what_is_cut_or_unknown_is_told(datatype: str, raw: bytes) -> None:
    with pytest.raises(ProtocolError):
        tensors.outputs(response(datatype, raw=raw))


def test_vectors() -> None:
    found = tensors.outputs(response("FP32", fp32_contents=[1, 2, 3, 4], shape=(2, 2)))["o"]
    assert tensors.rows(found, 2) == [[1, 2], [3, 4]]
    for count in (3, 0):
        with pytest.raises(ProtocolError, match="numbers"):
            tensors.rows(found, count)


@given(st.binary(max_size=40), st.sampled_from(["BYTES", "FP32", "INT64", "BOOL"]))
def test_any_raw_bytes_are_elements_or_an_error_of_ours(raw: bytes, datatype: str) -> None:
    with contextlib.suppress(ProtocolError):
        tensors.outputs(response(datatype, raw=raw))
