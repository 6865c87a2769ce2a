"""PURE: what spanwire gives back, as LangChain's messages.

Adding chunks up concatenates strings and sums counts. So what describes the whole answer (usage, finish reason, model,
the timeline) is on exactly one chunk, the last; the chunks before it hold pieces of content and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec
from langchain_core.messages import AIMessage, AIMessageChunk, InvalidToolCall, ToolCall
from langchain_core.messages.ai import InputTokenDetails, OutputTokenDetails, UsageMetadata
from langchain_core.messages.tool import ToolCallChunk, invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

import spanwire

__all__ = ["Extras", "Pieces", "chat_result", "usage_metadata"]

#: What is read elsewhere, or says nothing that is worth keeping. ``obfuscation``: random padding of OpenAI's.
_KNOWN_EVENT = frozenset({"choices", "created", "error", "id", "model", "object", "obfuscation", "usage"})
_KNOWN_CHOICE = frozenset({"delta", "finish_reason", "index", "logprobs", "message"})
_KNOWN_DELTA = frozenset({"content", "function_call", "reasoning", "reasoning_content", "role", "tool_calls"})
#: Names in ``response_metadata`` that are ours.
_OURS = frozenset(
    {"finish_reason", "headers", "id", "logprobs", "model_name", "model_provider", "request_id", "spanwire"}
)

_decode = msgspec.json.Decoder().decode


def usage_metadata(usage: spanwire.Usage | None) -> UsageMetadata | None:
    """LangChain's counts, which are all whole numbers: None where one is unknown and does not follow from the others."""
    if usage is None:
        return None
    used, made, total = usage.input_tokens, usage.output_tokens, usage.total_tokens
    if total is not None:
        if used is None and made is not None:
            used = max(total - made, 0)
        elif made is None and used is not None:
            made = max(total - used, 0)
    if used is None or made is None:
        return None
    found = UsageMetadata(input_tokens=used, output_tokens=made, total_tokens=used + made if total is None else total)
    if usage.cached_tokens is not None:
        found["input_token_details"] = InputTokenDetails(cache_read=usage.cached_tokens)
    if usage.reasoning_tokens is not None:
        found["output_token_details"] = OutputTokenDetails(reasoning=usage.reasoning_tokens)
    return found


class Extras:
    """What a server sends beyond the schema, collected over the events of one answer.

    An event that has nothing but another text than one that was looked at is told by its length and its two ends,
    which costs a tenth of decoding it.
    """

    __slots__ = ("_after", "_around", "_before", "_foreign", "answer", "message")

    def __init__(self) -> None:
        self._foreign = False  # the server's schema is another one, whose keys would all be unknown
        self._before = self._after = b""
        self._around = -1  # bytes of an event like the last one, besides its text
        self.answer: dict[str, Any] = {}  # of the event and its choice
        self.message: dict[str, Any] = {}  # of the delta: refusals, and what is particular to a server

    def add(self, raw: bytes, text: str) -> None:
        """Look at one event. ``text`` is its piece of the visible answer."""
        around = len(raw) - self._around
        if (
            (around == len(text) or (around > len(text) and around == len(text.encode("utf-8", "replace"))))
            and raw.startswith(self._before)
            and raw.endswith(self._after)
        ) or self._foreign:
            return
        event = decoded(raw)
        if event is None:
            return
        if not self.take(event):
            self._remember(raw, text)

    def _remember(self, raw: bytes, text: str) -> None:
        piece = text.encode("utf-8", "replace")
        at = raw.find(b'"content"')
        at = raw.find(piece, at) if piece and at >= 0 else -1
        if at > 0 and raw[at - 1 : at] == b'"' and raw[at + len(piece) : at + len(piece) + 1] == b'"':
            self._before, self._after = raw[:at], raw[at + len(piece) :]
            self._around = len(raw) - len(piece)

    def take(self, event: Mapping[str, Any]) -> bool:
        """Keep what is unknown of a decoded event, or of a whole answer. True if there are pieces in it, so that an
        event like it must be looked at too."""
        if "choices" not in event:
            self._foreign = not self.answer and not self.message
            return False
        pieces = False
        for name, value in event.items():
            if name not in _KNOWN_EVENT and _says_something(value):
                self.answer[name] = value
        choice = _choice(event)
        for name, value in choice.items():
            if name not in _KNOWN_CHOICE and _says_something(value):
                is_list = isinstance(value, list)
                pieces = pieces or is_list
                self.answer[name] = _joined(self.answer.get(name), value) if is_list else value
        delta = choice.get("delta") or choice.get("message")
        if isinstance(delta, dict):
            for name, value in delta.items():
                if name not in _KNOWN_DELTA and _says_something(value):
                    pieces = True
                    self.message[name] = _joined(self.message.get(name), value)
        return pieces


def _says_something(value: Any) -> bool:
    return value is not None and value not in ("", [], {})


def _joined(old: Any, new: Any) -> Any:
    """Pieces of lists and texts are put together; anything else is replaced."""
    if isinstance(old, list) and isinstance(new, list):
        return [*old, *new]
    if isinstance(old, str) and isinstance(new, str):
        return old if old == new else old + new  # some servers repeat themselves in each event
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **{name: _joined(old.get(name), value) for name, value in new.items()}}
    return new


def decoded(raw: bytes) -> dict[str, Any] | None:
    """An event's or answer's JSON object, or None: what could not be read was told by who read it first."""
    try:
        found = _decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _choice(event: Mapping[str, Any]) -> dict[str, Any]:
    choices = event.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict) and not choice.get("index"):
            return choice
    return {}


def _logprobs(event: Mapping[str, Any] | None) -> dict[str, Any] | None:
    found = None if event is None else _choice(event).get("logprobs")
    return found if isinstance(found, dict) and any(map(_says_something, found.values())) else None


class Pieces:
    """Turns the chunks of one streamed answer into LangChain's.

    Args:
        blocks: content as standard blocks (``output_version="v1"``) instead of text.
        logprobs: decode each event for its log probabilities.
        headers: keep the answer's headers.
    """

    __slots__ = ("_blocks", "_extras", "_headers", "_logprobs", "_pending")

    def __init__(self, *, blocks: bool = False, logprobs: bool = False, headers: bool = False) -> None:
        self._blocks = blocks
        self._logprobs = logprobs
        self._headers = headers
        self._pending: dict[str, Any] | None = None  # log probabilities of an event without content
        self._extras = Extras()

    def next(self, chunk: spanwire.Chunk) -> ChatGenerationChunk | None:
        """The next chunk; None if there is no content in it, which then comes with the last one."""
        text, raw = chunk.text, chunk.raw
        if raw:
            self._extras.add(raw, text)
        if text and not self._logprobs and not self._blocks and not chunk.reasoning and not chunk.tool_calls:
            return ChatGenerationChunk(message=AIMessageChunk(content=text))
        found = _logprobs(decoded(raw)) if self._logprobs and raw else None
        if not (text or chunk.reasoning or chunk.tool_calls):
            self._pending = found or self._pending
            return None
        message = AIMessageChunk(
            content=_blocks(chunk) if self._blocks else text,
            additional_kwargs={"reasoning_content": chunk.reasoning} if chunk.reasoning and not self._blocks else {},
            response_metadata={"output_version": "v1"} if self._blocks else {},
            tool_call_chunks=[_tool_call_chunk(delta) for delta in chunk.tool_calls],
        )
        return ChatGenerationChunk(message=message, generation_info={"logprobs": found} if found else None)

    def last(self, reply: spanwire.Reply) -> ChatGenerationChunk:
        """What is known of the answer as a whole, as its last chunk."""
        metadata = _metadata(reply, self._extras, headers=self._headers)
        if self._pending is not None:
            metadata["logprobs"] = self._pending
        if self._blocks:
            metadata["output_version"] = "v1"
        message = AIMessageChunk(
            content=[] if self._blocks else "",
            additional_kwargs=self._extras.message,
            response_metadata=metadata,
            usage_metadata=usage_metadata(reply.usage),
            chunk_position="last",
        )
        return ChatGenerationChunk(message=message, generation_info=_generation_info(reply))


def _blocks(chunk: spanwire.Chunk) -> list[str | dict[Any, Any]]:
    """Blocks that are merged by index, each kind with its own: calls are counted from 0 too, and text is no call."""
    blocks: list[str | dict[Any, Any]] = []
    if chunk.reasoning:
        blocks.append({"type": "reasoning", "reasoning": chunk.reasoning, "index": "lc_rs_0"})
    if chunk.text:
        blocks.append({"type": "text", "text": chunk.text, "index": "lc_txt_0"})
    blocks.extend(
        {
            "type": "tool_call_chunk",
            "id": delta.id,
            "name": delta.name,
            "args": delta.arguments,
            "index": f"lc_tc_{delta.index}",
        }
        for delta in chunk.tool_calls
    )
    return blocks


def _tool_call_chunk(delta: spanwire.ToolCallDelta) -> ToolCallChunk:
    return tool_call_chunk(name=delta.name, args=delta.arguments, id=delta.id, index=delta.index)


def _generation_info(reply: spanwire.Reply) -> dict[str, Any] | None:
    return None if reply.finish_reason is None else {"finish_reason": reply.finish_reason}


def _metadata(reply: spanwire.Reply, extras: Extras, *, headers: bool) -> dict[str, Any]:
    metadata: dict[str, Any] = {name: value for name, value in extras.answer.items() if name not in _OURS}
    known = {
        "model_provider": "spanwire",
        "model_name": reply.model,
        "finish_reason": reply.finish_reason,
        "id": reply.id,
        "request_id": reply.headers.get("x-request-id"),
    }
    metadata.update({name: value for name, value in known.items() if value is not None})
    if headers:
        metadata["headers"] = dict(reply.headers)
    if reply.timeline is not None:
        metadata["spanwire"] = reply.timeline.to_dict()
    return metadata


def chat_result(reply: spanwire.Reply, *, logprobs: bool = False, headers: bool = False) -> ChatResult:
    """A whole answer as LangChain's."""
    extras = Extras()
    event = decoded(reply.raw) if reply.raw else None
    if event is not None:
        extras.take(event)
    metadata = _metadata(reply, extras, headers=headers)
    info = _generation_info(reply) or {}
    found = _logprobs(event) if logprobs else None
    if found is not None:
        info["logprobs"] = metadata["logprobs"] = found
    kept = extras.message
    if reply.reasoning:
        kept["reasoning_content"] = reply.reasoning
    calls, invalid = _tool_calls(reply)
    message = AIMessage(
        content=reply.text,
        additional_kwargs=kept,
        response_metadata=metadata,
        tool_calls=calls,
        invalid_tool_calls=invalid,
        usage_metadata=usage_metadata(reply.usage),
    )
    output: dict[str, Any] = {"model_name": reply.model} if reply.model is not None else {}
    usage = event.get("usage") if event is not None else None
    if isinstance(usage, dict):
        output["token_usage"] = usage
    return ChatResult(generations=[ChatGeneration(message=message, generation_info=info or None)], llm_output=output)


def _tool_calls(reply: spanwire.Reply) -> tuple[list[ToolCall], list[InvalidToolCall]]:
    calls: list[ToolCall] = []
    invalid: list[InvalidToolCall] = []
    for call in reply.tool_calls:
        problem = None
        arguments: Any = {}
        if call.arguments.strip():  # a tool without parameters may get none
            try:
                arguments = json.loads(call.arguments, strict=False)
            except ValueError as error:
                problem = f"the arguments are not JSON: {error}"
        if problem is None and not isinstance(arguments, dict):
            problem = f"the arguments are a JSON {type(arguments).__name__}, not an object"
        if problem is None:
            calls.append(tool_call(name=call.name, args=arguments, id=call.id))
        else:
            invalid.append(invalid_tool_call(name=call.name, args=call.arguments, id=call.id, error=problem))
    return calls, invalid
