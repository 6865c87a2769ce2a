"""The chat codec: any bytes as events and as a whole body.

Input, by its last byte: even: events with an empty line between them, the names of the events behind them (see
``Controls``). Odd: all of it are numbers, from which events in the schema's neighbourhood are made, for the bytes of
which a mutation of text would take for ever to guess.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, cast

from fuzz.common import Controls, Evidence, check_chunks, check_joined
from spanwire.calls import Chunk, Embeddings, Usage
from spanwire.errors import ProtocolError, ServerError, Truncated
from spanwire.wire.openai_chat import ChatDecoder, decode_chat, decode_embeddings, error_in

Event = tuple[bytes, bytes]
_NAMES = (b"", b"", b"", b"error", b"message", b"\xff")
_PRIME = b'{"id":"prime","model":"prime","choices":[]}'


def check(data: bytes) -> None:
    """Raises AssertionError, or whatever a bug raises."""
    controls = Controls(data)
    if controls.byte() % 2:
        events = [_made_event(controls) for _ in range(1 + controls.byte() % 8)]
    else:
        names = [_NAMES[controls.byte() % len(_NAMES)] for _ in range(controls.byte() % 8)]
        events = [
            (names[at] if at < len(names) else b"", part) for at, part in enumerate(controls.rest().split(b"\n\n"))
        ]
    _check_stream(events)
    _check_stream([(b"", _PRIME), *events])
    for _, part in events[:4]:
        _check_whole(part)


def _check_stream(events: Sequence[Event]) -> None:
    decoder, slow, lenient = ChatDecoder(), ChatDecoder(), ChatDecoder()
    evidence = Evidence()
    chunks: list[Chunk] = []
    done = False
    for name, part in events:
        text = part.strip()
        if text not in (b"", b"[DONE]"):
            evidence.add(part)
        done = done or text == b"[DONE]"
        slow._later = False  # on the other path through the decoder, and with the same result
        got, other = _event(decoder, name, part), _event(slow, name, part)
        assert got == other, "the short path and the long one differ"
        assert got == _event(lenient, name, part, "_odd"), "the typed path and the lenient one differ"
        assert decoder.done == done
        if isinstance(got, tuple):
            break
        if got is not None:
            assert got.raw == part
            chunks.append(got)
        check_chunks(chunks, evidence)
    else:
        try:
            last = decoder.end()
        except Truncated as error:
            assert str(error)  # noqa: PT017 - no exception is fine as well
        else:
            assert decoder.done or decoder.finish_reason is not None, "an invented success"
            assert decoder.events, "a success without an answer in it"
            if last is not None:
                assert last == Chunk(usage=last.usage, raw=last.raw)
                assert last.usage is not None
                chunks.append(last)
            assert decoder.end() is None, "a second last chunk"
    finishes = [chunk.finish_reason for chunk in chunks if chunk.finish_reason is not None]
    assert not finishes or decoder.finish_reason == finishes[-1]
    for known in (decoder.id, decoder.model):
        assert known is None or (type(known) is str and known)
        assert known is None or not evidence.readable or known in evidence.texts, "an invented id or model"
    check_chunks(chunks, evidence)
    check_joined(chunks)


def _event(
    decoder: ChatDecoder, name: bytes, data: bytes, way: str = "event"
) -> Chunk | tuple[type[Exception], str] | None:
    try:
        return cast(Chunk | None, getattr(decoder, way)(name, data))
    except (ServerError, ProtocolError) as error:
        return (type(error), _checked(error))


def _checked(error: ServerError | ProtocolError) -> str:
    text = str(error)
    assert text, "an error without words"
    # 200 characters of it, each of which may need ten to be shown.
    assert len(text) <= (1000 if isinstance(error, ServerError) else 2200), "an error as long as the answer"
    if isinstance(error, ServerError):
        assert error.code is None or type(error.code) in (str, int)
    return text


def _check_whole(body: bytes) -> None:
    evidence = Evidence()
    evidence.add(body)
    try:
        chunk, id_, model = decode_chat(body)
    except (ServerError, ProtocolError) as error:
        _checked(error)
    else:
        assert chunk.raw == body
        check_chunks([chunk], evidence)
        check_joined([chunk])
        for known in (id_, model):
            assert known is None or not evidence.readable or known in evidence.texts, "an invented id or model"
    try:
        found = decode_embeddings(body)
    except (ServerError, ProtocolError) as error:
        _checked(error)
    else:
        assert type(found) is Embeddings
        assert all(type(number) is float for vector in found.vectors for number in vector)
        assert found.usage is None or type(found.usage) is Usage
    for status in (None, 200, 429, 599):
        assert _checked(error_in(body, status=status))


# --- JSON that is nearly what it should be -------------------------------------------------------------------------------

_TOP = ("choices", "choices", "choices", "usage", "id", "model", "error", "object", "data", "detail", "message", "code")
_CHOICE = ("delta", "delta", "delta", "finish_reason", "index", "message")
_DELTA = ("content", "content", "tool_calls", "tool_calls", "reasoning_content", "reasoning", "function_call", "role")
_TOOL = ("index", "id", "function", "function", "type")
_FUNCTION = ("name", "arguments")
_USAGE = (
    "prompt_tokens", "completion_tokens", "total_tokens", "input_tokens", "output_tokens", "prompt_tokens_details",
    "completion_tokens_details", "cached_tokens", "reasoning_tokens",
)  # fmt: skip
_OTHER = (
    "error",
    "message",
    "code",
    "type",
    "status",
    "detail",
    "msg",
    "loc",
    "embedding",
    "index",
    "text",
    "thinking",
)
#: Below which key which keys are likely.
_BELOW = {
    "choices": _CHOICE, "delta": _DELTA, "message": _DELTA, "tool_calls": _TOOL, "function": _FUNCTION,
    "function_call": _FUNCTION, "usage": _USAGE, "prompt_tokens_details": _USAGE, "completion_tokens_details": _USAGE,
}  # fmt: skip
_LISTS = frozenset({"choices", "tool_calls", "data", "detail", "loc", "embedding"})
_TEXTS = (
    "",
    "a",
    "b",
    "stop",
    "call_0",
    "call_1",
    "{",
    "}",
    "error",
    "é",
    "\ud83d\ude42",
    "\u2028",
    "7",
    "429",
    "\x00",
)
_NUMBERS: tuple[Any, ...] = (0, 1, 2, 3, -1, 7, 429, 503, 1.0, 0.5, -0.0, 1e3, 1e300, 2**53, 2**63, 2**64, 10**400)


def _made_event(controls: Controls) -> Event:
    name = _NAMES[controls.byte() % len(_NAMES)]
    if controls.byte() % 16 == 15:
        return name, b"[DONE]"
    data = json.dumps(_made(controls, "", 0), ensure_ascii=controls.byte() % 2 == 0).encode("utf-8", "surrogatepass")
    return name, data


def _made(controls: Controls, key: str, depth: int) -> Any:
    kind = controls.byte() % 16
    if kind < 9 and depth < 8 and (key in _BELOW or key in _LISTS or not key):  # as the schema has it
        if key in _LISTS:
            return [_made_object(controls, key, depth) for _ in range(1 + controls.byte() % 3)]
        return _made_object(controls, key, depth)
    if kind < 11:
        return _TEXTS[controls.byte() % len(_TEXTS)]
    if kind == 11:
        return None
    if kind == 12:
        return controls.byte() % 2 == 0
    if kind == 13 and depth < 8:
        return [_made(controls, "x", depth + 1) for _ in range(controls.byte() % 4)]
    if kind == 14 and depth < 8:
        return _made_object(controls, "x", depth)
    return _NUMBERS[controls.byte() % len(_NUMBERS)]


def _made_object(controls: Controls, key: str, depth: int) -> dict[str, Any]:
    likely = _BELOW.get(key, _OTHER if key else _TOP)
    found: dict[str, Any] = {}
    for _ in range(controls.byte() % 6):
        name = likely[controls.byte() % len(likely)]
        found[name] = _made(controls, name, depth + 1)
    return found
