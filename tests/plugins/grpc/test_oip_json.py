"""Requests and responses of the Open Inference Protocol, as JSON and as messages."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spanwire_grpc import tensors
from spanwire_grpc.oip_json import request_of, response_data
from spanwire_grpc.stubs import oip

from spanwire.errors import ConfigurationError


def back(request: Any) -> dict[str, Any]:
    """A request, as if its inputs were the outputs of an answer: as text."""
    response = oip.ModelInferResponse(model_name=request.model_name, id=request.id)
    response.outputs.extend(request.inputs)
    response.raw_output_contents.extend(request.raw_input_contents)
    return response_data(response, tensors.outputs(response))


def one(datatype: str, data: Any, **more: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "x", "datatype": datatype, "data": data, **more}]}


NUMBERS = {
    "BOOL": st.booleans(),
    "INT8": st.integers(-(2**7), 2**7 - 1),
    "INT64": st.integers(-(2**63), 2**63 - 1),
    "UINT16": st.integers(0, 2**16 - 1),
    "UINT64": st.integers(0, 2**64 - 1),
    "FP16": st.floats(width=16, allow_nan=False, allow_infinity=False),
    "FP32": st.floats(width=32, allow_nan=False),
    "FP64": st.floats(allow_nan=False),
    "BYTES": st.text(max_size=20),
}


@given(st.sampled_from(sorted(NUMBERS)).flatmap(lambda kind: st.tuples(st.just(kind), st.lists(NUMBERS[kind]))))
def test_elements_of_every_kind_come_back(case: tuple[str, list[Any]]) -> None:
    datatype, values = case
    (output,) = back(request_of(one(datatype, values), model="m"))["outputs"]
    assert output == {"name": "x", "datatype": datatype, "shape": (len(values),), "data": values}


def test_every_datatype_is_known() -> None:
    for datatype in tensors.DATATYPES:
        value = "a" if datatype == "BYTES" else True if datatype == "BOOL" else 1
        (output,) = back(request_of(one(datatype, [value]), model="m"))["outputs"]
        assert output["data"] == [value]


@given(st.binary(max_size=20))
def test_bytes_that_are_no_text_are_base64_in_both_directions(value: bytes) -> None:
    (output,) = back(request_of(one("BYTES", [value]), model="m"))["outputs"]
    assert back(request_of(one("BYTES", output["data"]), model="m"))["outputs"] == [output]
    (data,) = output["data"]
    assert data == {"b64": base64.b64encode(value).decode()} if isinstance(data, dict) else data.encode() == value


def test_a_request_with_everything() -> None:
    request = request_of(
        {
            "model_name": "m2",
            "model_version": "3",
            "id": "7",
            "parameters": {"a": 1, "b": "x", "c": 0.5, "d": True},
            "inputs": [
                {
                    "name": "x",
                    "datatype": "FP32",
                    "shape": [2, 2],
                    "data": [[1, 2], [3, 4]],
                    "parameters": {"p": True},
                }
            ],
            "outputs": ["y", {"name": "z", "parameters": {"binary_data": False}}],
        },
        model="m",
    )
    assert (request.model_name, request.model_version, request.id) == ("m2", "3", "7")
    assert list(request.inputs[0].shape) == [2, 2]
    assert list(request.inputs[0].contents.fp32_contents) == [1, 2, 3, 4]
    assert request.inputs[0].parameters["p"].bool_param
    assert [p.WhichOneof("parameter_choice") for _, p in sorted(request.parameters.items())] == [
        "int64_param",
        "string_param",
        "double_param",
        "bool_param",
    ]
    assert [output.name for output in request.outputs] == ["y", "z"]


def test_an_array_says_its_shape() -> None:
    class Array:
        shape = (2, 1)

        def tolist(self) -> list[list[int]]:
            return [[1], [2]]

    request = request_of(one("INT32", Array()), model="m")
    assert list(request.inputs[0].shape) == [2, 1]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"inputs": [], "prompt": "x"}, "no field 'prompt'"),
        ({"inputs": {}}, "inputs must be a list"),
        ({"inputs": ["x"]}, r"inputs\[0\] must be a mapping"),
        ({"id": 3}, "id must be text"),
        ({"parameters": {"a": [1]}}, "'a' in parameters"),
        ({"parameters": {"a": 2**64}}, "'a' in parameters"),
        ({"parameters": []}, "parameters must be a mapping"),
        (one("FLOAT", [1]), "must be one of BOOL, BYTES"),
        (one("FP32", [1], shape=[2]), "not those of the shape"),
        (one("FP32", [1, 1], shape=[-1]), "not those of the shape"),
        (one("FP32", ["a"]), "cannot be written as FP32"),
        (one("INT32", [2**31]), "cannot be written as INT32"),
        (one("FP16", [1e9]), "cannot be written as FP16"),
        (one("BYTES", [1]), "an element of"),
        (one("BYTES", ["\ud800"]), "lone surrogate"),
        (one("BYTES", [{"b64": "?"}]), "no base64"),
    ],
)
def test_what_cannot_be_sent_is_told_by_its_place(message: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        request_of(message, model="m")


def test_a_model_is_needed() -> None:
    with pytest.raises(ConfigurationError, match="names no model"):
        request_of(one("BYTES", ["x"]), model="")
