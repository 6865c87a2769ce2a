"""PURE: requests and responses of the Open Inference Protocol as JSON has them, and as its messages do.

The shape is that of the protocol over HTTP (KServe's ``open_inference_rest``): ``data`` is a list of numbers, truth values
or texts, flat or nested as ``shape`` says. Bytes that are no UTF-8 are ``{"b64": "..."}``, as KServe's first protocol has it.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spanwire.errors import ConfigurationError

from . import tensors
from .stubs import oip

__all__ = ["request_of", "response_data"]

_REQUEST = frozenset({"id", "inputs", "model_name", "model_version", "outputs", "parameters"})
_INPUT = frozenset({"data", "datatype", "name", "parameters", "shape"})


def request_of(message: Mapping[str, Any], *, model: str) -> Any:
    """A ``ModelInferRequest``; ``model`` where it names none. Raises ConfigurationError that says where."""
    _known(message, _REQUEST, "the request")
    request = oip.ModelInferRequest()
    request.model_name = _text(message.get("model_name", model), "model_name")
    request.model_version = _text(message.get("model_version", ""), "model_version")
    request.id = _text(message.get("id", ""), "id")
    if not request.model_name:
        raise ConfigurationError("the request names no model: give it a model_name, or session(model=...)")
    _parameters(request.parameters, message.get("parameters", {}), "parameters")
    inputs = [_input(given, f"inputs[{n}]") for n, given in enumerate(_list(message.get("inputs", ()), "inputs"))]
    raw = any(datatype == "FP16" for _, datatype, _, _ in inputs)  # which can be sent in no other way; then all are
    for given, datatype, shape, values in inputs:
        tensor = request.inputs.add(name=_text(given.get("name"), "an input's name"), datatype=datatype)
        try:
            tensor.shape.extend(shape)
            if raw:
                request.raw_input_contents.append(tensors.packed(datatype, values))
            else:
                tensors.fill(tensor, values)
        except Exception as error:
            raise ConfigurationError(
                f"the input {tensor.name!r:.60} cannot be written as {datatype} in the shape {shape!r:.60}: {error}"
            ) from error
        _parameters(tensor.parameters, given.get("parameters", {}), f"parameters of {tensor.name!r:.60}")
    for number, wanted in enumerate(_list(message.get("outputs", ()), "outputs")):
        name = wanted.get("name") if isinstance(wanted, Mapping) else wanted
        output = request.outputs.add(name=_text(name, f"outputs[{number}]"))
        if isinstance(wanted, Mapping):
            _known(wanted, frozenset({"name", "parameters"}), f"outputs[{number}]")
            _parameters(output.parameters, wanted.get("parameters", {}), f"outputs[{number}]")
    return request


def _input(given: Any, where: str) -> tuple[Mapping[str, Any], str, list[int], list[Any]]:
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"{where} must be a mapping with name, datatype, shape and data")
    _known(given, _INPUT, where)
    datatype = _text(given.get("datatype"), f"the datatype of {where}")
    if datatype not in tensors.DATATYPES:
        raise ConfigurationError(f"the datatype of {where} must be one of {', '.join(sorted(tensors.DATATYPES))}")
    data: Any = given.get("data")
    values = list(_flat(data.tolist() if hasattr(data, "tolist") else data))
    if datatype == "BYTES":
        values = [_bytes(value, where) for value in values]
    shape = list(given.get("shape", getattr(data, "shape", (len(values),))))
    if not all(isinstance(size, int) and size >= 0 for size in shape) or math.prod(shape) != len(values):
        raise ConfigurationError(f"{where} has {len(values)} elements, which are not those of the shape {shape!r:.60}")
    return given, datatype, shape, values


def _flat(data: Any) -> Iterator[Any]:
    if isinstance(data, Sequence) and not isinstance(data, str | bytes):
        for item in data:
            yield from _flat(item)
    elif data is not None:
        yield data


def _bytes(value: Any, where: str) -> bytes:
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if isinstance(value, Mapping) and set(value) == {"b64"}:
        try:
            return base64.b64decode(value["b64"], validate=True)
        except (TypeError, ValueError, binascii.Error) as error:
            raise ConfigurationError(f"{where}: this b64 is no base64") from error
    return _text(value, f"an element of {where}").encode()


def _known(given: Mapping[str, Any], names: frozenset[str], where: str) -> None:
    other = next((name for name in given if name not in names), None)
    if other is not None:
        raise ConfigurationError(f"{where} has no field {other!r:.60}; it has: {', '.join(sorted(names))}")


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise ConfigurationError(f"{what} must be text, not {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ConfigurationError(f"{what} has a lone surrogate in it, which no protocol can carry") from error
    return value


def _list(value: Any, what: str) -> Sequence[Any]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise ConfigurationError(f"{what} must be a list, not {type(value).__name__}")
    return value


def _parameters(into: Any, given: Any, where: str) -> None:
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"{where} must be a mapping, not {type(given).__name__}")
    for name, value in given.items():
        parameter = into[_text(name, f"a name in {where}")]
        if isinstance(value, bool):
            parameter.bool_param = value
        elif isinstance(value, int) and -(2**63) <= value < 2**63:
            parameter.int64_param = value
        elif isinstance(value, float):
            parameter.double_param = value
        else:
            parameter.string_param = _text(value, f"{name!r:.60} in {where}, if it is no number and no truth value,")


# --- responses ----------------------------------------------------------------------------------------------------------


def response_data(response: Any, outputs: Mapping[str, tensors.Output]) -> dict[str, Any]:
    """A ``ModelInferResponse``, whose outputs were read by :func:`spanwire_grpc.tensors.outputs`."""
    found: dict[str, Any] = {"model_name": response.model_name}
    if response.model_version:
        found["model_version"] = response.model_version
    found["id"] = response.id
    if response.parameters:
        found["parameters"] = {name: _value(parameter) for name, parameter in response.parameters.items()}
    found["outputs"] = [
        {
            "name": output.name,
            "datatype": output.datatype,
            "shape": output.shape,
            "data": [_readable(v) if isinstance(v, bytes) else v for v in output.values],
        }
        for output in outputs.values()
    ]
    return found


def _value(parameter: Any) -> Any:
    choice = parameter.WhichOneof("parameter_choice")
    return None if choice is None else getattr(parameter, choice)


def _readable(value: bytes) -> str | dict[str, str]:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"b64": base64.b64encode(value).decode("ascii")}
