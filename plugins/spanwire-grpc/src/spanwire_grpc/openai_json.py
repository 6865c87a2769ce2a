"""The dialect ``openai-json``: OpenAI's JSON as bytes, in SGLang's service. Nothing is lost on the way, tools included.

Source: SGLang ``proto/sglang/runtime/v1/sglang.proto`` and ``rust/sglang-grpc``. One message is one chunk object, without
framing and without ``[DONE]``; a stream ends with an empty chunk that says ``finished``. A request that is refused is
answered by a stream like any other, with the error in it, and the status OK.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from spanwire.calls import Call, Chunk, Usage
from spanwire.endpoint import Endpoint
from spanwire.errors import BadRequest, ConfigurationError, ServerError, Truncated
from spanwire.transport import Item
from spanwire.wire.openai_chat import ChatDecoder, decode_embeddings, error_in

from .codec import AnswerDecoder, Rpc
from .protowire import body_and_number, request

__all__ = ["OPTIONS", "TIMING_FIELDS", "OpenAIJSON"]

#: Names in ``Endpoint.options``. ``include_usage``: ask streamed answers for their usage (default True).
OPTIONS = frozenset({"include_usage"})
#: As for the same servers over HTTP.
TIMING_FIELDS: Mapping[str, Any] = {"perf_metrics_in_response": True, "nvext": {"extra_fields": ["timing"]}}
_SERVICE = "/sglang.runtime.v1.SglangService/"
#: ``type`` of the error objects of requests that the server does not take.
_REFUSED = frozenset({"BadRequest", "BadRequestError", "invalid_request_error"})
_TRACE = ("traceparent", "tracestate")


class OpenAIJSON:
    """``ChatComplete`` (a stream in any case) and ``OpenAIEmbed``."""

    learn = None
    learns_by = ()

    def encode(
        self, call: Call, endpoint: Endpoint, *, streamed: bool, headers: Mapping[str, str], learned: Any
    ) -> Rpc:
        body: dict[str, Any] = {"model": call.model, **call.body}
        if streamed:
            body["stream"] = True
            if "stream_options" not in body and endpoint.options.get("include_usage", True):
                body["stream_options"] = {"include_usage": True}
        try:
            raw = msgspec.json.encode(body)
        except (TypeError, ValueError, UnicodeEncodeError, RecursionError) as error:
            raise ConfigurationError(
                f"the call cannot be written as JSON: {error}; parameters must be text, numbers, lists and mappings",
                endpoint=endpoint.address,
            ) from error
        # Where this server's engine looks for the trace; the metadata have it too.
        packed = request(raw, {name: headers[name] for name in _TRACE if name in headers})
        if call.operation == "embeddings":
            return Rpc(_SERVICE + "OpenAIEmbed", packed, "unary")
        return Rpc(_SERVICE + "ChatComplete", packed)

    def credentials(self, api_key: str) -> Mapping[str, str]:
        return {"authorization": f"Bearer {api_key}"}

    def decoder(self, call: Call, endpoint: Endpoint, *, streamed: bool, learned: Any) -> AnswerDecoder:
        return _Embeddings() if call.operation == "embeddings" else _Chat()

    def error(self, code: str, details: str) -> ServerError | None:
        return None


class _Chat(ChatDecoder):
    """A chunk for each message, or the whole answer in one."""

    __slots__ = ()

    def message(self, data: bytes) -> Chunk | None:
        body, finished = body_and_number(data)
        if finished:
            self.done = True
        if not body:
            return None
        try:
            return self.event(b"", body)
        except ServerError as error:
            if error.code in _REFUSED and not isinstance(error, BadRequest):  # it has no status to say so
                raise BadRequest(error.message, code=error.code, headers=error.headers) from None
            raise


class _Embeddings:
    """One message, with a status of its own."""

    __slots__ = ("done", "finish_reason", "id", "late_events", "model", "usage")

    def __init__(self) -> None:
        self.done = False
        self.finish_reason: str | None = None
        self.id: str | None = None
        self.model: str | None = None
        self.usage: Usage | None = None
        self.late_events: list[bytes] = []

    def message(self, data: bytes) -> Item | None:
        body, status = body_and_number(data)
        if status >= 300:
            raise error_in(body, status=status)
        found = decode_embeddings(body)
        self.model, self.usage, self.late_events, self.done = found.model, found.usage, [body], True
        return found

    def end(self) -> Item | None:
        if not self.done:
            raise Truncated("the call ended without embeddings in it")
        return None
