"""PURE codec of the OpenAI chat-completions and embeddings schema: JSON events and bodies in, chunks out.

Decoding is typed and reads only the fields that are used; an event whose fields have other types than they should
(``content`` as a list of parts, numbers as text, ...) is read once more, field by field, with every oddity allowed.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Mapping
from typing import Any

import msgspec

from ..calls import Chunk, Embeddings, ToolCallDelta, Usage
from ..errors import ProtocolError, ServerError, Truncated, server_error
from .tool_calls import ToolCallRepair

__all__ = ["ChatDecoder", "decode_chat", "decode_embeddings", "error_in"]

DONE = b"[DONE]"
_LATE_EVENTS = 8  # more than any server sends after its last finish reason: usage, timing, metadata
_SHOWN = 200  # characters of a bad answer that an error shows


class _Function(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: Any = None


class _Tool(msgspec.Struct, gc=False):
    index: Any = None
    id: str | None = None
    function: _Function | None = None


class _Delta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Tool] | None = None
    function_call: _Function | None = None


class _Choice(msgspec.Struct, gc=False):
    delta: _Delta | None = None
    finish_reason: str | None = None
    index: int | None = 0
    message: _Delta | None = None


class _Later(msgspec.Struct, gc=False):
    """An event after the first ones: id and model are known."""

    choices: list[_Choice] | None = None
    usage: Any = None
    error: Any = None


class _First(msgspec.Struct, gc=False):
    choices: list[_Choice] | None = None
    usage: Any = None
    error: Any = None
    id: str | None = None
    model: str | None = None


_decode_first = msgspec.json.Decoder(_First).decode
_decode_later = msgspec.json.Decoder(_Later).decode
_decode_any = msgspec.json.Decoder().decode
_EMPTY = _Delta()


class ChatDecoder:
    """State of one streamed answer.

    Attributes:
        done: ``[DONE]`` has been seen.
        finish_reason: the last one that was seen.
        id, model: as the server gave them.
        usage: the last count that was seen, given to the caller or not.
        late_events: the event with the finish reason and the last ones after it, as they came: servers put their timing
            there. Between them, where several answers were asked for, the others go on.
    """

    __slots__ = (
        "_later",
        "_repair",
        "_usage_given",
        "_usage_held",
        "done",
        "events",
        "finish_reason",
        "id",
        "late_events",
        "model",
        "usage",
    )

    def __init__(self) -> None:
        self.done = False
        self.finish_reason: str | None = None
        self.id: str | None = None
        self.model: str | None = None
        self.events = 0
        self._later = False
        self._repair: ToolCallRepair | None = None
        self.usage: Usage | None = None
        self._usage_given = False
        self._usage_held: tuple[Usage, bytes] | None = None
        self.late_events: list[bytes] = []

    def event(self, name: bytes, data: bytes) -> Chunk | None:
        """One event of the stream. None for one that carries nothing for a caller (``[DONE]``, no choices).

        Raises:
            ServerError: the event is an error object.
            ProtocolError: it is not JSON.
        """
        if self._later:
            try:
                later = _decode_later(data)
            except (msgspec.DecodeError, RecursionError):
                return self._odd(name, data)
            if later.error or name == b"error":
                raise error_in(data)
            choices = later.choices
            if choices and len(choices) == 1 and later.usage is None:
                choice = choices[0]
                delta = choice.delta
                if (  # the commonest event: a piece of text and nothing else
                    delta is not None
                    and delta.content is not None
                    and choice.finish_reason is None
                    and delta.tool_calls is None
                    and delta.reasoning_content is None
                    and delta.reasoning is None
                    and delta.function_call is None
                    and not choice.index
                ):
                    self.events += 1
                    return Chunk(delta.content, "", (), None, None, data)
            return self._chunk(choices, later.usage, data)
        try:
            first = _decode_first(data)
        except (msgspec.DecodeError, RecursionError):
            return self._odd(name, data)
        if first.error or name == b"error":
            raise error_in(data)
        self._see(first.id, first.model)
        return self._chunk(first.choices, first.usage, data)

    def _see(self, id: Any, model: Any) -> None:
        if isinstance(id, str) and id:
            self.id = id
        if isinstance(model, str) and model:
            self.model = model
        self._later = self.id is not None and self.model is not None

    def _odd(self, name: bytes, data: bytes) -> Chunk | None:
        """``[DONE]``, a heartbeat without data, broken UTF-8, or JSON of other types than the schema's."""
        text = data.strip()
        if text == DONE:
            self.done = True
        if text in (DONE, b""):
            return None
        if name == b"error":
            raise error_in(data)
        event = _lenient_json(data)
        if not isinstance(event, dict):
            raise ProtocolError(f"an event of the stream is not a JSON object: {_show(data)}")
        if event.get("error"):
            raise error_in(data)
        self._see(event.get("id"), event.get("model"))
        choices = event.get("choices")
        return self._chunk(
            [_lenient_choice(choice) for choice in choices if isinstance(choice, dict)]
            if isinstance(choices, list)
            else None,
            event.get("usage"),
            data,
        )

    def _chunk(self, choices: list[_Choice] | None, usage: Any, data: bytes) -> Chunk | None:
        choice = next((choice for choice in choices if not choice.index), None) if choices else None
        found = self._usage_once(usage, data)
        if choice is None:
            self._keep_late(data, ended=self.events > 0)
            if choices is None and usage is None:
                _raise_if_error_object(data)
            return None if found is None else Chunk("", "", (), None, found, data)
        self.events += 1
        if choice.finish_reason:
            self.finish_reason = choice.finish_reason
        self._keep_late(data)
        delta = choice.delta or choice.message or _EMPTY
        return Chunk(
            delta.content or "",
            delta.reasoning_content or delta.reasoning or "",
            self._tool_calls(delta) if delta.tool_calls or delta.function_call else (),
            choice.finish_reason or None,
            found,
            data,
        )

    def _keep_late(self, data: bytes, *, ended: bool = False) -> None:
        # An event without choices after content is such a last one too: some servers send no finish reason.
        if ended or self.finish_reason is not None:
            if len(self.late_events) == _LATE_EVENTS:
                del self.late_events[1]
            self.late_events.append(data)

    def _tool_calls(self, delta: _Delta) -> tuple[ToolCallDelta, ...]:
        repair = self._repair
        if repair is None:
            repair = self._repair = ToolCallRepair()
        deltas = []
        for tool in delta.tool_calls or ():
            function = tool.function or _Function()
            deltas.append(repair.delta(tool.index, tool.id, function.name, function.arguments))
        if delta.function_call is not None:  # the schema before tools
            deltas.append(repair.delta(0, None, delta.function_call.name, delta.function_call.arguments))
        return tuple(deltas)

    def _usage_once(self, usage: Any, data: bytes) -> Usage | None:
        """Usage goes out once: after the finish reason, or at :meth:`end`. Running counts before that are held, and so is
        the finish reason's own, which a better one may follow."""
        if usage is None or self._usage_given:
            return None
        found = _usage(usage)
        if found is None:
            return None
        self.usage = found
        if self.finish_reason is not None:
            self._usage_given = True
            self._usage_held = None
            return found
        self._usage_held = (found, data)
        return None

    def end(self) -> Chunk | None:
        """The stream has ended. Returns a last chunk if usage was held back for it.

        Raises:
            Truncated: it ended before the answer was complete.
        """
        if not self.done and self.finish_reason is None:
            raise Truncated("the stream ended before the answer was complete: no finish_reason and no [DONE] came")
        if self.events == 0:
            raise Truncated("the stream ended without a single choice in it")
        if self._usage_held is not None and not self._usage_given:
            self._usage_given = True
            return Chunk("", "", (), None, *self._usage_held)
        return None


def _lenient_json(data: bytes) -> Any:
    try:
        return _decode_any(data)
    except (msgspec.DecodeError, RecursionError):
        pass
    text = data.decode("utf-8", "replace")  # a broken character must not end the answer: it becomes U+FFFD
    try:
        return _decode_any(text)
    except (msgspec.DecodeError, RecursionError):
        pass
    try:  # nor must half of a surrogate pair, which JSON.stringify writes as an escape, and msgspec refuses
        return _without_surrogates(json.loads(text))
    except (ValueError, RecursionError) as error:
        problem = ProtocolError(f"an event of the stream is not JSON: {_show(data)}")
        problem.__cause__ = error
        raise problem from error


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_without_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {_without_surrogates(name): _without_surrogates(item) for name, item in value.items()}
    return value


def _lenient_choice(choice: Mapping[str, Any]) -> _Choice:
    finish = choice.get("finish_reason")
    index = choice.get("index")
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        delta = choice.get("message")
    return _Choice(
        _lenient_delta(delta) if isinstance(delta, dict) else None,
        finish if isinstance(finish, str) else None,
        index if isinstance(index, int) else 0,
    )


def _lenient_delta(delta: Mapping[str, Any]) -> _Delta:
    text, thinking = _parts(delta.get("content"))
    reasoning = delta.get("reasoning_content") or delta.get("reasoning")
    tools = delta.get("tool_calls")
    legacy = delta.get("function_call")
    return _Delta(
        content=text,
        reasoning_content=(reasoning if isinstance(reasoning, str) else "") or thinking,
        tool_calls=[_lenient_tool(tool) for tool in tools if isinstance(tool, dict)]
        if isinstance(tools, list)
        else None,
        function_call=_lenient_function(legacy) if isinstance(legacy, dict) else None,
    )


def _parts(content: Any) -> tuple[str, str]:
    """Visible text and reasoning of content that is text, or a list of typed parts."""
    if isinstance(content, str):
        return content, ""
    if not isinstance(content, list):
        return "", ""
    text: list[str] = []
    thinking: list[str] = []
    for part in content:
        if isinstance(part, str):
            text.append(part)
        elif isinstance(part, dict):
            if isinstance(part.get("text"), str):
                text.append(part["text"])
            elif "thinking" in part:
                inner, _ = _parts(part["thinking"])
                thinking.append(inner)
    return "".join(text), "".join(thinking)


def _lenient_tool(tool: Mapping[str, Any]) -> _Tool:
    id_ = tool.get("id")
    function = tool.get("function")
    return _Tool(
        tool.get("index"),
        id_ if isinstance(id_, str) else (str(id_) if isinstance(id_, int) else None),
        _lenient_function(function) if isinstance(function, dict) else None,
    )


def _lenient_function(function: Mapping[str, Any]) -> _Function:
    name = function.get("name")
    return _Function(name if isinstance(name, str) else None, function.get("arguments"))


def _usage(usage: Any) -> Usage | None:
    if not isinstance(usage, dict):
        return None
    prompt, completion = usage.get("prompt_tokens_details"), usage.get("completion_tokens_details")
    found = Usage(
        _count(usage.get("prompt_tokens", usage.get("input_tokens"))),
        _count(usage.get("completion_tokens", usage.get("output_tokens"))),
        _count(usage.get("total_tokens")),
        _count(prompt.get("cached_tokens")) if isinstance(prompt, dict) else None,
        _count(completion.get("reasoning_tokens")) if isinstance(completion, dict) else None,
    )
    known = (found.input_tokens, found.output_tokens, found.total_tokens)
    return None if known == (None, None, None) else found


def _count(value: Any) -> int | None:
    if type(value) is int and 0 <= value < 2**63:
        return value
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63 else None


def decode_chat(body: bytes) -> tuple[Chunk, str | None, str | None]:
    """A whole answer: its one chunk, id and model.

    Raises:
        ServerError: the body is an error object.
        ProtocolError: it is not a chat completion.
    """
    decoder = ChatDecoder()
    try:
        chunk = decoder.event(b"", body)
    except ProtocolError as error:
        _raise_error_in(body)
        raise ProtocolError(f"the answer is not a JSON object: {_show(body)}") from error
    if chunk is None or not decoder.events:
        raise ProtocolError(f"the answer has no choices: {_show(body)}")
    held = decoder._usage_held
    if held is not None and chunk.usage is None:  # a whole answer without a finish_reason
        chunk = msgspec.structs.replace(chunk, usage=held[0])
    return chunk, decoder.id, decoder.model


class _Row(msgspec.Struct, gc=False):
    embedding: Any
    index: int | None = None


class _Vectors(msgspec.Struct, gc=False):
    data: list[_Row]
    model: str | None = None
    usage: Any = None


_decode_vectors = msgspec.json.Decoder(_Vectors).decode


def decode_embeddings(body: bytes) -> Embeddings:
    """A whole answer to an embeddings call, in the order of the input.

    Raises:
        ServerError: the body is an error object.
        ProtocolError: it is not a list of vectors, or has two for one text. That all have the index 0, as some servers say, is
            none: their order is taken.
    """
    try:
        found = _decode_vectors(body)
    except (msgspec.DecodeError, RecursionError) as error:
        _raise_error_in(body)
        raise ProtocolError(f"the answer is not a list of embeddings: {_show(body)}") from error
    rows = found.data
    if all(row.index is not None for row in rows):
        rows = sorted(rows, key=lambda row: row.index or 0)
        if 1 < len({row.index for row in rows}) < len(rows):  # one text's twice, and so another's is missing
            raise ProtocolError("the answer has two vectors with the same index")
    return Embeddings([_vector(row.embedding) for row in rows], found.model, _usage(found.usage))


def _vector(value: Any) -> list[float]:
    try:
        if isinstance(value, list):
            return [float(number) for number in value]
        if isinstance(value, str):  # encoding_format="base64": little-endian float32
            packed = base64.b64decode(value, validate=True)
            return list(struct.unpack(f"<{len(packed) // 4}f", packed))
    except (TypeError, ValueError, OverflowError, struct.error) as error:
        raise ProtocolError(f"an embedding is not a list of numbers: {str(value)[:_SHOWN]!r}") from error
    raise ProtocolError(f"an embedding is a {type(value).__name__}, not a list of numbers")


def raise_if_error(name: bytes, data: bytes) -> None:
    """An event of an answer that is never streamed: only an error can be in it."""
    if name == b"error":
        raise error_in(data)
    _raise_error_in(data)


def _raise_error_in(body: bytes) -> None:
    try:
        found = _decode_any(body)
    except (msgspec.DecodeError, RecursionError):
        return
    if isinstance(found, list) and len(found) == 1:  # Google's form
        found = found[0]
    if isinstance(found, dict) and found.get("error"):
        raise error_in(body)


def error_in(body: bytes, *, status: int | None = None, **more: Any) -> ServerError:
    """The error that a body or event describes, in any of the forms that servers use.

    ``{"error": {"message", "code", "type"}}``, ``{"error": "words"}``, ``{"message"}``, ``{"detail"}``, or plain text.
    """
    message: Any = None
    code: Any = None
    try:
        found = _lenient_json(body)
    except ProtocolError:
        found = None
        message = body.decode("utf-8", "replace").strip()
        if message.startswith("<"):
            message = None  # an HTML page says less than the status
    if isinstance(found, list) and len(found) == 1:  # Google's form
        found = found[0]
    if isinstance(found, dict):
        inner = found.get("error")
        if inner is None:
            inner = found
        if isinstance(inner, dict):
            message = inner.get("message") or _detail(inner.get("detail")) or inner.get("msg") or found.get("message")
            code = inner.get("code")
            if code is None:
                code = inner.get("status") or inner.get("type")
        else:
            message = inner
            code = found.get("code")
    elif isinstance(found, str):
        message = found
    if message is not None and not isinstance(message, str):
        message = msgspec.json.encode(message).decode()
    if not message:
        message = _status_text(status) if status is not None else "the server sent an error without a message"
    if not isinstance(code, (str, int)) or isinstance(code, bool):
        code = None
    return server_error(_cut(message), status=status, code=code, **more)


def _detail(detail: Any) -> Any:
    """FastAPI's list of what is wrong with a request. Only where and what: ``input`` would repeat the whole prompt."""
    if not isinstance(detail, list):
        return detail
    rows = []
    for row in detail:
        if isinstance(row, dict):
            loc = row.get("loc")
            where = ".".join(str(part) for part in loc) if isinstance(loc, list) else ""
            rows.append(f"{where}: {row.get('msg', 'not valid')}" if where else str(row.get("msg", "not valid")))
        elif isinstance(row, str):
            rows.append(row)
    return "; ".join(rows)


def _raise_if_error_object(data: bytes) -> None:
    """``{"object": "error", "message", "code"}``, as older vLLM servers send in a stream."""
    found = _lenient_json(data)
    if isinstance(found, dict) and found.get("object") == "error":
        raise error_in(data)


def _status_text(status: int) -> str:
    from http import HTTPStatus

    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return f"status {status}"


def _cut(text: str, limit: int = 1000) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _show(data: bytes) -> str:
    return repr(_cut(data[: 4 * _SHOWN].decode("utf-8", "replace"), _SHOWN))
