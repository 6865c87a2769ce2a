"""What a dialect on this transport has to be, and the one that is built in: OpenAI's chat completions and embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import msgspec

from spanwire.calls import Call, Chunk
from spanwire.endpoint import Endpoint
from spanwire.errors import ConfigurationError, ServerError, Truncated
from spanwire.transport import Item
from spanwire.wire.openai_chat import ChatDecoder, decode_chat, decode_embeddings, error_in, raise_if_error

__all__ = ["OPTIONS", "TIMING_FIELDS", "TIMING_HEADERS", "AnswerDecoder", "Codec", "OpenAIChat", "Request"]

#: Names in ``Endpoint.options``. ``include_usage``: ask streamed answers for their usage (default True); False for the
#: few servers that refuse ``stream_options``.
OPTIONS = frozenset({"include_usage"})


#: What makes servers of this schema tell their times, where they do not do so anyway: Fireworks
#: (``perf_metrics_in_response``) and NVIDIA Dynamo (``nvext``) in the body, OpenRouter and Huawei's gateway by a header.
#: vLLM tells them on the usage chunk, which is asked for in any case.
TIMING_FIELDS: Mapping[str, Any] = {"perf_metrics_in_response": True, "nvext": {"extra_fields": ["timing"]}}
TIMING_HEADERS: Mapping[str, str] = {"x-openrouter-metadata": "enabled", "x-apig-mode": "debug"}


class Request(NamedTuple):
    """What goes onto the wire: path below the endpoint's base URL, headers of the dialect, and the body's bytes."""

    path: str
    body: bytes
    headers: Mapping[str, str] = {}


class AnswerDecoder(Protocol):
    """State of one answer.

    Attributes:
        done: the terminal event has been seen. Looked at after each event that gave no chunk: one that brings a chunk
            does not end the answer. Where the last event has both, keep the chunk for :meth:`end`.
        id, model: as the server gave them, once known.
        created: optional: the answer has begun, by an event that gives no chunk.
        finish_reason: optional: once it is known. From then on a caller who leaves costs nobody a connection.
        usage: optional: the last count of tokens that was seen.
        late_events: optional: raw JSON of the last events, or of the whole answer, where servers put their timing.
    """

    done: bool
    id: str | None
    model: str | None

    def event(self, name: bytes, data: bytes) -> Chunk | None:
        """One event of a stream; None for one that carries nothing for the caller. Raises ServerError, ProtocolError."""

    def end(self) -> Chunk | None:
        """The stream has ended, by its terminal event or with its message; may give a last chunk. Called once. Raises
        Truncated if the answer is not complete."""

    def whole(self, body: bytes) -> Item:
        """A whole answer that is not a stream. Raises ServerError, ProtocolError."""


class Codec(Protocol):
    """A dialect on HTTP with server-sent events."""

    def encode(self, call: Call, endpoint: Endpoint, *, streamed: bool) -> Request:
        """The request of a call. Raises ConfigurationError for what cannot be encoded."""

    def credentials(self, api_key: str) -> Mapping[str, str]:
        """Headers that carry the key."""

    def decoder(self, call: Call, *, streamed: bool) -> AnswerDecoder:
        """Decodes the answer to this call."""

    def error(self, status: int, headers: Mapping[str, str], body: bytes, retry_after_s: float | None) -> ServerError:
        """The error that an answer with an error status describes."""


class OpenAIChat:
    """``POST /chat/completions`` and ``POST /embeddings`` below the base URL."""

    _PATHS = {"chat": "/chat/completions", "embeddings": "/embeddings"}  # noqa: RUF012 - a constant table

    def encode(self, call: Call, endpoint: Endpoint, *, streamed: bool) -> Request:
        path = self._PATHS[call.operation]
        if endpoint.path.endswith(path):
            raise ConfigurationError(
                f"the endpoint's URL is the server's base URL: remove {path!r} from its end", endpoint=endpoint.address
            )
        body: dict[str, Any] = {"model": call.model, **call.body}
        if streamed:
            body["stream"] = True
            if "stream_options" not in body and endpoint.options.get("include_usage", True):
                body["stream_options"] = {"include_usage": True}
        try:
            return Request(path, msgspec.json.encode(body))
        except (TypeError, ValueError, UnicodeEncodeError, RecursionError) as error:
            raise ConfigurationError(
                f"the call cannot be written as JSON: {error}; parameters must be text, numbers, lists and mappings",
                endpoint=endpoint.address,
            ) from error

    def credentials(self, api_key: str) -> Mapping[str, str]:
        return {"authorization": f"Bearer {api_key}"}

    def decoder(self, call: Call, *, streamed: bool) -> AnswerDecoder:
        return _Embeddings() if call.operation == "embeddings" else _Chat()

    def error(self, status: int, headers: Mapping[str, str], body: bytes, retry_after_s: float | None) -> ServerError:
        return error_in(body, status=status, headers=dict(headers), retry_after_s=retry_after_s)


class _Chat(ChatDecoder):
    __slots__ = ()

    def whole(self, body: bytes) -> Item:
        chunk, self.id, self.model = decode_chat(body)
        self.late_events = [body]
        return chunk


class _Embeddings:
    """Embeddings are never streamed."""

    __slots__ = ("done", "id", "model")

    def __init__(self) -> None:
        self.done = False
        self.id: str | None = None
        self.model: str | None = None

    def event(self, name: bytes, data: bytes) -> Chunk | None:
        raise_if_error(name, data)
        return None

    def end(self) -> Chunk | None:
        raise Truncated("the stream ended without embeddings in it")

    def whole(self, body: bytes) -> Item:
        found = decode_embeddings(body)
        self.model = found.model
        return found
