"""The dialect of OpenAI's Responses API: ``POST /responses``."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from spanwire.calls import Call
from spanwire.endpoint import Endpoint
from spanwire.errors import ConfigurationError, ServerError
from spanwire.wire.openai_responses import ResponsesDecoder, encode_responses, response_error

from .codec import AnswerDecoder, OpenAIChat, Request

__all__ = ["OpenAIResponses"]

_PATH = "/responses"


class OpenAIResponses(OpenAIChat):
    """Chat calls as ``POST /responses`` below the base URL; embeddings as the chat dialect has them.

    Responses' own parameters can stand in a call next to those of chat completions:
    ``Call.chat(model, messages, previous_response_id=..., reasoning={"summary": "auto"}, store=True)``. Answers are not
    stored unless a call says ``store=True``.
    """

    def encode(self, call: Call, endpoint: Endpoint, *, streamed: bool) -> Request:
        if call.operation != "chat":
            return super().encode(call, endpoint, streamed=streamed)
        if endpoint.path.endswith(_PATH):
            raise ConfigurationError(
                f"the endpoint's URL is the server's base URL: remove {_PATH!r} from its end",
                endpoint=endpoint.address,
            )
        try:
            body = encode_responses(call.body, call.model)
            if streamed:
                body["stream"] = True
            return Request(_PATH, msgspec.json.encode(body))
        except ConfigurationError as error:
            error.endpoint = error.endpoint or endpoint.address
            raise
        except (TypeError, ValueError, UnicodeEncodeError, RecursionError) as error:
            raise ConfigurationError(
                f"the call cannot be written as JSON: {error}; parameters must be text, numbers, lists and mappings",
                endpoint=endpoint.address,
            ) from error

    def decoder(self, call: Call, *, streamed: bool) -> AnswerDecoder:
        return super().decoder(call, streamed=streamed) if call.operation != "chat" else ResponsesDecoder()

    def error(self, status: int, headers: Mapping[str, str], body: bytes, retry_after_s: float | None) -> ServerError:
        return response_error(body, status=status, headers=dict(headers), retry_after_s=retry_after_s)
