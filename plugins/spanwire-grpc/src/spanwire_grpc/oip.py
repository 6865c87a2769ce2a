"""The dialect ``oip``: the Open Inference Protocol, version 2, as Triton, MLServer, KServe and Dynamo speak it.

The protocol carries tensors, and says nothing of text, of streams or of chat: those are four habits. Which one a server
has is asked once for each connection; which inputs a model takes, once for each model::

    server    told by its metadata           a stream                      its end
    ────────  ─────────────────────────────  ────────────────────────────  ─────────────────────────────────────
    triton    name "triton"                  ModelStreamInfer, wrapped     parameter triton_final_response
    dynamo    none (UNIMPLEMENTED), or the   the same                      the output finish_reason
              model's platform "dynamo"
    mlserver  name "mlserver"                ModelStreamInfer, unwrapped   the server ends the call
    kserve    name "kserve"                  none: one message holds all   -

``Triton`` and ``MLServer`` use the same path for different messages, so a wrong guess is not an error but nonsense.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

import msgspec

from spanwire.calls import Call, Chunk, Embeddings, Usage
from spanwire.endpoint import Endpoint
from spanwire.errors import ConfigurationError, ProtocolError, ServerError, Truncated
from spanwire.transport import Item

from . import tensors
from .codec import AnswerDecoder, Ask, Kind, Rpc
from .stubs import oip
from .template import OPTIONS as TEMPLATE_OPTIONS
from .template import SAYS, prompt_of

__all__ = ["ABOUT", "OPTIONS", "SERVERS", "SERVICE", "OpenInference", "parse", "server_of"]

#: Names in ``Endpoint.options``, besides those of the template. ``oip_server``: ``"triton"``, ``"mlserver"``, ``"kserve"``
#: or ``"dynamo"``, where its metadata do not tell. ``text_input``, ``text_output``: names of the model's tensors;
#: ``embedding_output``: that of the vectors. Left out: ``text_input``, and what the answer has.
OPTIONS = TEMPLATE_OPTIONS | {"embedding_output", "oip_server", "text_input", "text_output"}
SERVICE = "/inference.GRPCInferenceService/"
SERVERS = ("triton", "mlserver", "kserve", "dynamo")
#: Outputs that tell of an answer, and are none.
ABOUT = frozenset({"finish_reason", "num_input_tokens", "num_output_tokens", "cumulative_logprob", "logprobs"})
#: Inputs of Triton's vLLM backend that make it tell more.
_TELL = ("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens", "exclude_input_in_output")
_FLOATS = frozenset({"FP16", "FP32", "FP64"})
_ids = count(1)


class _Learned(NamedTuple):
    """Of a server and a model."""

    server: str
    inputs: frozenset[str]
    template: str | None


class OpenInference:
    """``ModelInfer`` and ``ModelStreamInfer``."""

    learns_by = ("oip_server",)

    async def learn(self, ask: Ask, call: Call, endpoint: Endpoint) -> _Learned:
        """Two questions. Raises what the server answers, such as that it does not know the model."""
        server = endpoint.options.get("oip_server")
        if server is None:
            server = await server_of(ask)
        try:
            raw = await ask(SERVICE + "ModelMetadata", oip.ModelMetadataRequest(name=call.model).SerializeToString())
        except ServerError as error:
            if error.code != "UNIMPLEMENTED":
                raise
            return _Learned(server, frozenset(), None)
        model = parse(oip.ModelMetadataResponse, raw)
        if model.platform == "dynamo" and "oip_server" not in endpoint.options:
            server = "dynamo"
        template = model.parameters["chat_template"].string_param if "chat_template" in model.parameters else ""
        return _Learned(server, frozenset(tensor.name for tensor in model.inputs), template or None)

    def encode(
        self, call: Call, endpoint: Endpoint, *, streamed: bool, headers: Mapping[str, str], learned: Any
    ) -> Rpc:
        facts: _Learned = learned
        name = _name(endpoint, "text_input") or "text_input"
        if call.operation == "embeddings":
            request = oip.ModelInferRequest(model_name=call.model, id=str(next(_ids)))
            request.inputs.append(tensors.text(name, *_texts(call, endpoint)))
            _parameters(request, {k: v for k, v in call.body.items() if k != "input"}, endpoint)
            return Rpc(SERVICE + "ModelInfer", request.SerializeToString(), "unary")
        prompt, _ = prompt_of(call, endpoint, facts.template)
        request = oip.ModelInferRequest(model_name=call.model, id=str(next(_ids)))
        request.inputs.append(tensors.text(name, prompt))
        self._ask(request, call, endpoint, facts, streamed=streamed)
        kind = _kind(facts.server, streamed=streamed)
        if kind == "held":
            # Else nobody could tell an answer that goes on from one that has ended.
            request.parameters["triton_enable_empty_final_response"].bool_param = True
        return Rpc(
            SERVICE + ("ModelInfer" if kind == "unary" else "ModelStreamInfer"), request.SerializeToString(), kind
        )

    @staticmethod
    def _ask(request: Any, call: Call, endpoint: Endpoint, facts: _Learned, *, streamed: bool) -> None:
        """How to sample, where this model looks for it."""
        inputs = facts.inputs
        wanted = {name: value for name, value in call.body.items() if name not in ("messages", "stream_options")}
        if "max_completion_tokens" in wanted:
            wanted.setdefault("max_tokens", wanted.pop("max_completion_tokens"))
        stream: str | None = next((name for name in ("stream", "streaming") if name in inputs), None)
        if stream is None and not inputs:
            stream = {"triton": "stream", "dynamo": "streaming"}.get(facts.server)
        if stream is not None:
            request.inputs.append(tensors.boolean(stream, streamed))
        for name in _TELL:
            if name in inputs:
                request.inputs.append(tensors.boolean(name, True))
        if "max_tokens" in inputs and isinstance(wanted.get("max_tokens"), int):
            request.inputs.append(tensors.integer("max_tokens", wanted.pop("max_tokens")))
        if wanted and ("sampling_parameters" in inputs or (facts.server == "triton" and not inputs)):
            request.inputs.append(tensors.text("sampling_parameters", _json(wanted, endpoint)))
        else:
            _parameters(request, wanted, endpoint)

    def credentials(self, api_key: str) -> Mapping[str, str]:
        return {"authorization": f"Bearer {api_key}"}

    def decoder(self, call: Call, endpoint: Endpoint, *, streamed: bool, learned: Any) -> AnswerDecoder:
        facts: _Learned = learned
        if call.operation == "embeddings":
            return _Vectors(len(_texts(call, endpoint)), _name(endpoint, "embedding_output"))
        given = endpoint.options.get("chat_template")
        by = "plain" if given == "plain" else "given" if given else "model"
        kind = _kind(facts.server, streamed=streamed)
        return _Text(kind, _name(endpoint, "text_output"), f"rendered; template={by}")

    def error(self, code: str, details: str) -> ServerError | None:
        return None


def _kind(server: str, *, streamed: bool) -> Kind:
    if server == "triton":
        return "held"  # a model that answers in pieces refuses ModelInfer, and nothing tells which ones do
    if not streamed or server == "kserve":
        return "unary"
    return "held" if server == "dynamo" else "bidi"


async def server_of(ask: Ask) -> str:
    """Which of :data:`SERVERS` it is, by its metadata. Raises ConfigurationError for one that is none of them."""
    try:
        raw = await ask(SERVICE + "ServerMetadata", oip.ServerMetadataRequest().SerializeToString())
    except ServerError as error:
        if error.code == "UNIMPLEMENTED":
            return "dynamo"
        raise
    name = str(parse(oip.ServerMetadataResponse, raw).name).lower()
    found = next((server for server in SERVERS if server in name), None)
    if found is None:
        raise ConfigurationError(
            f"the server calls itself {name!r:.60}, and it is not known how it streams: give options={{'oip_server': ...}}, "
            f"one of {', '.join(SERVERS)}"
        )
    return found


# --- requests -----------------------------------------------------------------------------------------------------------


def _name(endpoint: Endpoint, option: str) -> str | None:
    value = endpoint.options.get(option)
    if value is not None and (not isinstance(value, str) or not value):
        raise ConfigurationError(f"Endpoint.options: {option} must be a tensor's name", endpoint=endpoint.address)
    return value


def _texts(call: Call, endpoint: Endpoint) -> list[str]:
    given = call.body.get("input")
    found = [given] if isinstance(given, str) else list(given) if isinstance(given, Sequence) else []
    if not found or not all(isinstance(item, str) for item in found):
        raise ConfigurationError("this dialect makes embeddings of texts, not of token ids", endpoint=endpoint.address)
    return found


def _parameters(request: Any, wanted: Mapping[str, Any], endpoint: Endpoint) -> None:
    for name, value in wanted.items():
        parameter = request.parameters[name]
        if isinstance(value, bool):
            parameter.bool_param = value
        elif isinstance(value, int) and abs(value) < 2**63:
            parameter.int64_param = value
        elif isinstance(value, str):
            parameter.string_param = value
        elif isinstance(value, float):
            parameter.double_param = value
        else:
            parameter.string_param = _json(value, endpoint)


def _json(value: Any, endpoint: Endpoint) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, UnicodeEncodeError, RecursionError) as error:
        raise ConfigurationError(f"the call cannot be written as JSON: {error}", endpoint=endpoint.address) from error


# --- answers ------------------------------------------------------------------------------------------------------------


def parse(kind: Any, raw: bytes) -> Any:
    """A message of the answer. Raises ProtocolError."""
    try:
        return kind.FromString(raw)
    except Exception as error:
        raise ProtocolError("a message of the answer is not of this protocol: is the dialect right?") from error


class _Answer:
    """What both kinds of answer have."""

    def __init__(self) -> None:
        self.done = False
        self.finish_reason: str | None = None
        self.id: str | None = None
        self.model: str | None = None
        self.usage: Usage | None = None
        self.headers: Mapping[str, str] = {}

    def _see(self, response: Any) -> None:
        self.id = response.id or self.id
        self.model = response.model_name or self.model


class _Text(_Answer):
    def __init__(self, kind: Kind, output: str | None, says: str) -> None:
        super().__init__()
        self._kind = kind
        self._output = output
        self._input_tokens: int | None = None
        self._output_tokens: int | None = None
        self._messages = 0
        self.headers = {SAYS: says}

    def message(self, data: bytes) -> Chunk | None:
        if self._kind == "held":
            wrapped = parse(oip.ModelStreamInferResponse, data)
            if wrapped.error_message:
                raise ServerError(wrapped.error_message)
            response = wrapped.infer_response
        else:
            response = parse(oip.ModelInferResponse, data)
        self._see(response)
        self._messages += 1
        found = tensors.outputs(response)
        finish = self._finish(found)
        self._count(found)
        if "triton_final_response" in response.parameters:
            self.done = self.done or response.parameters["triton_final_response"].bool_param
        self.done = self.done or self._kind == "unary" or finish is not None
        output = self._text_of(found)
        text = "".join(tensors.texts(output)) if output is not None else ""
        if self.done and self.usage is None and (self._input_tokens is not None or self._output_tokens is not None):
            usage = self.usage = self._counted()
            return Chunk(text, "", (), finish, usage, data)
        return Chunk(text, "", (), finish, None, data) if text or finish is not None else None

    def _text_of(self, found: Mapping[str, tensors.Output]) -> tensors.Output | None:
        name = self._output
        if name is not None:
            if name in found or not found or (self.done and self._kind == "held"):
                return found.get(name)
        elif "text_output" in found:
            return found["text_output"]
        else:
            names = [o.name for o in found.values() if o.datatype in ("BYTES", "STRING") and o.name not in ABOUT]
            if len(names) == 1:
                return found[names[0]]
            if not found or (self.done and self._kind == "held" and not names):
                return None
        have = ", ".join(f"{output.name} ({output.datatype})" for output in found.values())
        raise ProtocolError(
            f"the answer has no one output of text, but {have:.200}: give options={{'text_output': ...}}"
        )

    def _finish(self, found: Mapping[str, tensors.Output]) -> str | None:
        output = found.get("finish_reason")
        words = tensors.texts(output) if output is not None and output.datatype in ("BYTES", "STRING") else []
        reason = words[0] if words and words[0] not in ("", "None", "null") else None
        self.finish_reason = reason or self.finish_reason
        return reason

    def _count(self, found: Mapping[str, tensors.Output]) -> None:
        self._input_tokens = tensors.whole_number(found.get("num_input_tokens")) or self._input_tokens
        more = tensors.whole_number(found.get("num_output_tokens"))
        if more is not None:  # those of this message
            self._output_tokens = (self._output_tokens or 0) + more

    def _counted(self) -> Usage:
        known = (self._input_tokens, self._output_tokens)
        total = None if None in known else sum(number or 0 for number in known)
        return Usage(*known, total)

    def end(self) -> Item | None:
        if not self._messages:
            raise Truncated("the call ended without an answer in it")
        if self._kind == "held" and not self.done:
            raise Truncated(
                "the stream ended before the answer was complete: neither a final response nor a finish reason"
            )
        if self.usage is None and (self._input_tokens is not None or self._output_tokens is not None):
            self.usage = self._counted()
            return Chunk(usage=self.usage)
        return None


class _Vectors(_Answer):
    def __init__(self, inputs: int, output: str | None) -> None:
        super().__init__()
        self._inputs = inputs
        self._output = output

    def message(self, data: bytes) -> Embeddings:
        response = parse(oip.ModelInferResponse, data)
        self._see(response)
        found = tensors.outputs(response)
        names = [o.name for o in found.values() if o.datatype in _FLOATS]
        name = self._output or (names[0] if len(names) == 1 else "")
        if name not in found:
            have = ", ".join(f"{output.name} ({output.datatype})" for output in found.values())
            raise ProtocolError(
                f"the answer has no one output of vectors, but {have:.200}: give options={{'embedding_output': ...}}"
            )
        self.done = True
        return Embeddings(tensors.rows(found[name], self._inputs), self.model)

    def end(self) -> Item | None:
        if not self.done:
            raise Truncated("the call ended without embeddings in it")
        return None
