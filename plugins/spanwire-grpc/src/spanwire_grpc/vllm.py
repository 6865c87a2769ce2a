"""The dialect ``vllm``: the service of vLLM's Rust frontend. Text in, text out, with exact counts of tokens.

Source: vLLM ``rust/proto/vllm_grpc.proto``. Cancelling a call makes the server abort it.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from spanwire.calls import Call, Chunk, Usage
from spanwire.endpoint import Endpoint
from spanwire.errors import ConfigurationError, ProtocolError, ServerError, Truncated
from spanwire.transport import Item

from .codec import AnswerDecoder, Rpc
from .stubs import vllm
from .template import OPTIONS as TEMPLATE_OPTIONS
from .template import SAYS, prompt_of

__all__ = ["MAX_NEW_TOKENS", "OPTIONS", "VLLM"]

OPTIONS = TEMPLATE_OPTIONS
#: Sent where a call does not say ``max_tokens``: this server's own default would end every answer after 20 tokens.
MAX_NEW_TOKENS = 1024
_SERVICE = "/vllm.Inference/"
_REASONS = {1: "length", 2: "stop", 3: "abort"}
#: Parameters of the call by their place in the request. Those of sampling and stopping have messages of their own.
_SAMPLING = {"top_k": int, "top_p": float, "min_p": float, "seed": int}
_IGNORED = frozenset({"messages", "stream_options", "n"})


class VLLM:
    """``Generate`` and ``GenerateStream``."""

    learn = None
    learns_by = ()

    def encode(
        self, call: Call, endpoint: Endpoint, *, streamed: bool, headers: Mapping[str, str], learned: Any
    ) -> Rpc:
        prompt, _ = prompt_of(call, endpoint, None)
        request = vllm.GenerateRequest(request_id=uuid.uuid4().hex, model=call.model, text=prompt)
        try:
            self._fill(request, {k: v for k, v in call.body.items() if k not in _IGNORED}, endpoint)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"a parameter of the call does not fit this server's schema: {error}", endpoint=endpoint.address
            ) from error
        method = "GenerateStream" if streamed else "Generate"
        return Rpc(_SERVICE + method, request.SerializeToString(), "stream" if streamed else "unary")

    @staticmethod
    def _fill(request: Any, wanted: dict[str, Any], endpoint: Endpoint) -> None:
        temperature = wanted.pop("temperature", None)
        if temperature is not None:
            request.temperature = temperature
        for name in _SAMPLING:
            if name in wanted:
                setattr(request.sampling, name, wanted.pop(name))
        stopping = request.stopping
        most = wanted.pop("max_tokens", None)
        stopping.max_new_tokens = wanted.pop("max_completion_tokens", most) or MAX_NEW_TOKENS
        stopping.min_new_tokens = wanted.pop("min_tokens", 0)
        stop = wanted.pop("stop", ())
        stopping.stop_strings.extend([stop] if isinstance(stop, str) else stop)
        stopping.stop_token_ids.extend(wanted.pop("stop_token_ids", ()))
        if wanted:
            raise ConfigurationError(
                f"this server's schema has no place for {', '.join(sorted(wanted))}", endpoint=endpoint.address
            )

    def credentials(self, api_key: str) -> Mapping[str, str]:
        return {"authorization": f"Bearer {api_key}"}

    def decoder(self, call: Call, endpoint: Endpoint, *, streamed: bool, learned: Any) -> AnswerDecoder:
        by = "plain" if endpoint.options.get("chat_template") == "plain" else "given"
        return _Text(call.model, f"rendered; template={by}")

    def error(self, code: str, details: str) -> ServerError | None:
        return None


class _Text:
    def __init__(self, model: str, says: str) -> None:
        self.done = False
        self.finish_reason: str | None = None
        self.id: str | None = None
        self.model: str | None = None  # the server does not say which one has answered
        self.usage: Usage | None = None
        self.headers: Mapping[str, str] = {SAYS: says}
        self._input_tokens: int | None = None
        self._messages = 0

    def message(self, data: bytes) -> Chunk | None:
        try:
            response = vllm.GenerateResponse.FromString(data)
        except Exception as error:
            raise ProtocolError("a message of the answer is not of this protocol: is the dialect right?") from error
        self._messages += 1
        if response.HasField("prompt_info"):
            self._input_tokens = response.prompt_info.num_prompt_tokens
        output = next((output for output in response.outputs if not output.index), None)
        if output is None:
            return None
        finish = None
        if output.HasField("finish_info") and output.finish_info.finish_reason:
            finish = self.finish_reason = _REASONS.get(output.finish_info.finish_reason, "unknown")
            made = output.finish_info.num_output_tokens
            if self._input_tokens is not None:
                self.usage = Usage(self._input_tokens, made, self._input_tokens + made)
            elif made:
                self.usage = Usage(None, made)
            self.done = True
        if not output.text and finish is None:
            return None
        return Chunk(output.text, "", (), finish, self.usage, data)

    def end(self) -> Item | None:
        if self.finish_reason is None:
            what = (
                "before the answer was complete: no finish reason came" if self._messages else "without an answer in it"
            )
            raise Truncated(f"the call ended {what}")
        return None
