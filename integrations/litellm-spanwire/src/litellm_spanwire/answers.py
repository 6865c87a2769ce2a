"""What spanwire gives, in the types that LiteLLM gives to its users."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

import litellm
import msgspec
from litellm.types.utils import Choices, Delta, Message, ModelResponseStream, StreamingChoices

from spanwire import Chunk, Embeddings, Reply, Usage

from .reports import KEY, fill

__all__ = ["Shaper", "fill_embeddings", "fill_reply", "hidden_params"]


class _Other(msgspec.Struct, gc=False):
    """Parts of an answer that are neither text, reasoning nor tool calls, and that LiteLLM has a place for."""

    refusal: Any = None
    audio: Any = None
    images: Any = None
    annotations: Any = None
    thinking_blocks: Any = None

    def parts(self) -> dict[str, Any]:
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value}


class _Choice(msgspec.Struct, gc=False):
    delta: _Other | None = None
    message: _Other | None = None
    logprobs: Any = None


class _Raw(msgspec.Struct, gc=False):
    """What spanwire has no field for, out of an event or a whole answer."""

    choices: list[_Choice] = []
    created: Any = None
    system_fingerprint: Any = None
    service_tier: Any = None

    @property
    def choice(self) -> _Choice:
        return self.choices[0] if self.choices else _Choice()

    def of_all(self) -> dict[str, Any]:
        """What every chunk of an answer repeats."""
        found: dict[str, Any] = {}
        if isinstance(self.created, int) and self.created > 0:
            found["created"] = self.created
        for name in ("system_fingerprint", "service_tier"):
            value = getattr(self, name)
            if isinstance(value, str):
                found[name] = value
        return found


_decode = msgspec.json.Decoder(_Raw).decode


def _raw(raw: bytes) -> _Raw:
    try:
        return _decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _Raw()  # another wire's, or an odd one that spanwire has read all the same


def hidden_params(litellm_params: Mapping[str, Any], api_base: str | None, found: dict[str, Any]) -> dict[str, Any]:
    """``_hidden_params`` of a stream's chunks: one object for all of them, so that its report is filled at the end."""
    info = litellm_params.get("model_info")
    model_id = info.get("id") if isinstance(info, Mapping) else None
    return {"custom_llm_provider": "spanwire", "model_id": model_id, "api_base": api_base, KEY: found}


def _usage(usage: Usage) -> tuple[Any, str | None]:
    """LiteLLM's usage, which has no word for unknown, and ours for that."""
    prompt, completion, total = usage.input_tokens, usage.output_tokens, usage.total_tokens
    if total is not None and completion is None and prompt is not None:
        completion = total - prompt
    elif total is not None and prompt is None and completion is not None:
        prompt = total - completion
    details: dict[str, Any] = {}
    if usage.cached_tokens is not None:
        details["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
    if usage.reasoning_tokens is not None:
        details["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    made = litellm.Usage(
        prompt_tokens=prompt or 0,
        completion_tokens=completion or 0,
        total_tokens=total if total is not None else (prompt or 0) + (completion or 0),
        **details,
    )
    return made, "incomplete" if prompt is None or completion is None else None


# --- whole answers ------------------------------------------------------------------------------------------------------


def fill_reply(response: Any, reply: Reply, model: str, found: dict[str, Any]) -> Any:
    """Fill the ``ModelResponse`` that LiteLLM has made for the call: it keeps what it has put there."""
    raw = _raw(reply.raw)
    other = raw.choice.message
    more = {} if other is None else other.parts()
    if reply.reasoning:
        more["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        more["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in reply.tool_calls
        ]
    message = Message(content=reply.text or (None if reply.tool_calls else ""), role="assistant", **more)
    choice: dict[str, Any] = {"finish_reason": reply.finish_reason or "stop", "index": 0, "message": message}
    if raw.choice.logprobs is not None:
        choice["logprobs"] = raw.choice.logprobs
    response.choices = [Choices(**choice)]
    response.model = reply.model or model
    if reply.id:
        response.id = reply.id
    for name, value in raw.of_all().items():
        setattr(response, name, value)
    response.usage, counted = (None, "unknown") if reply.usage is None else _usage(reply.usage)
    fill(found, reply.timeline, usage_source=counted, finish_reason=None if reply.finish_reason else "assumed")
    return _with_headers(response, reply.headers, found)


def fill_embeddings(response: Any, embeddings: Embeddings, model: str, found: dict[str, Any]) -> Any:
    """The same for an ``EmbeddingResponse``."""
    response.data = [
        {"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(embeddings.vectors)
    ]
    response.model = embeddings.model or model
    given = embeddings.usage
    if given is not None and given.output_tokens is None:
        given = msgspec.structs.replace(given, output_tokens=0)  # vectors are no tokens
    response.usage, counted = (None, "unknown") if given is None else _usage(given)
    fill(found, embeddings.timeline, usage_source=counted)
    return _with_headers(response, embeddings.headers, found)


def _with_headers(response: Any, headers: Mapping[str, str], found: dict[str, Any]) -> Any:
    response._response_headers = dict(headers)
    # A new object: the class has one for all of its instances.
    response._hidden_params = {**response._hidden_params, KEY: found, "additional_headers": dict(headers)}
    return response


# --- streams ------------------------------------------------------------------------------------------------------------


class Shaper:
    """Chunks of one answer. Hands out content as it comes, and usage and the finish reason at the end, in that order.

    LiteLLM ends a custom provider's stream at the first chunk without content after a finish reason: usage that comes
    later, as OpenAI sends it, would be lost, and replaced by an estimate.

    Args:
        model: what the user asked for.
        hidden: see :func:`hidden_params`.
        logprobs: the request asks for log probabilities.
    """

    __slots__ = ("_all", "_finish_reason", "_hidden", "_logprobs", "_role", "_usage", "begun")

    def __init__(self, model: str, hidden: dict[str, Any], *, logprobs: bool) -> None:
        self._hidden = hidden
        self._logprobs = logprobs
        # Of every chunk. An id that the server did not give is made once, not for each of them.
        self._all: dict[str, Any] = {"id": f"chatcmpl-{uuid4()}", "created": int(time.time()), "model": model}
        self._role: str | None = "assistant"  # on the first chunk, as everybody sends it
        self._usage: Usage | None = None
        self._finish_reason: str | None = None
        self.begun = False

    def begin(self, chunk: Chunk, id: str | None, model: str | None, headers: Mapping[str, str]) -> None:
        """The first chunk has come: what all of them have in common."""
        self.begun = True
        self._all["id"] = id or self._all["id"]
        self._all["model"] = model or self._all["model"]
        self._all.update(_raw(chunk.raw).of_all())
        self._hidden["additional_headers"] = litellm.utils.process_response_headers(dict(headers))

    def add(self, chunk: Chunk) -> Any | None:
        """LiteLLM's chunk for one of ours; None if there is nothing in it to show yet."""
        if (
            chunk.text
            and chunk.finish_reason is None
            and chunk.usage is None
            and not chunk.reasoning
            and not chunk.tool_calls
            and not self._logprobs
        ):
            role, self._role = self._role, None
            return self._chunk(Delta(chunk.text, role), None)
        if chunk.usage is not None:
            self._usage = chunk.usage
        if chunk.finish_reason is not None:
            self._finish_reason = chunk.finish_reason
        parts: dict[str, Any] = {}
        if chunk.text:
            parts["content"] = chunk.text
        if chunk.reasoning:
            parts["reasoning_content"] = chunk.reasoning
        if chunk.tool_calls:
            parts["tool_calls"] = [
                {
                    "index": call.index,
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in chunk.tool_calls
            ]
        logprobs = None
        if self._logprobs or not parts:
            choice = _raw(chunk.raw).choice
            logprobs = choice.logprobs
            if choice.delta is not None:
                parts.update(choice.delta.parts())
        if not parts and not logprobs:
            return None
        role, self._role = self._role, None
        return self._chunk(Delta(role=role, **parts), logprobs)

    def _chunk(self, delta: Any, logprobs: Any, finish_reason: str | None = None) -> Any:
        made = ModelResponseStream([StreamingChoices(finish_reason, 0, delta, logprobs)], **self._all)
        made._hidden_params = self._hidden
        return made

    def end(self) -> tuple[list[Any], dict[str, str | None]]:
        """The answer is complete: what is left to hand out, the last one first, and what LiteLLM will make up."""
        left: list[Any] = []
        made_up: dict[str, str | None] = {}
        if self._finish_reason is not None:
            left.append(self._chunk(Delta(), None, self._finish_reason))
        else:
            made_up["finish_reason"] = "assumed"
        if self._usage is None:
            made_up["usage_source"] = "estimated"
        else:
            usage, made_up["usage_source"] = _usage(self._usage)
            counted = ModelResponseStream([], usage=usage, **self._all)
            counted._hidden_params = dict(self._hidden)  # LiteLLM puts the usage into it
            left.append(counted)
        return left, made_up
