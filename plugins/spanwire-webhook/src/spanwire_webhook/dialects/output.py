"""PURE: a job's output as a reply: OpenAI-shaped answers, text, pieces of text, vectors, or any other JSON."""

from __future__ import annotations

from typing import Any

from spanwire.calls import Embeddings, Reply, ReplyBuilder
from spanwire.errors import ProtocolError
from spanwire.wire.openai_chat import decode_chat, decode_embeddings
from spanwire.wire.openai_responses import decode_response

from .reading import json_of, value_of

__all__ = ["reply_of"]


def reply_of(operation: str, output: bytes, *, model: str | None = None) -> Reply | Embeddings:
    """What a model gave.

    A chat completion and a response object are read as such; text is the reply's text, and so are pieces of text, joined;
    of anything else the text is its JSON. ``raw`` is the output's JSON as it came.

    Args:
        operation: of the call.
        output: JSON; b"" for none.
        model: for a reply that does not say it.

    Raises:
        ServerError: it is an error.
        ProtocolError: it is not JSON, or has no vectors in it where those were asked for.
    """
    try:
        value = value_of(output) if output else None
    except ValueError as error:
        raise ProtocolError(f"the job's output cannot be read: {error}") from None
    if operation == "embeddings":
        return _embeddings(value, output, model)
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict) and "choices" in value[0]:
        return _built(decode_chat(json_of(value[0])), output, model)  # RunPod's vLLM worker
    if isinstance(value, dict):
        if "choices" in value:
            return _built(decode_chat(output), output, model)
        if value.get("object") == "response":
            return _built(decode_response(output), output, model)
    return Reply(text=_text(value, output), model=model, raw=output)


def _built(decoded: tuple[Any, str | None, str | None], output: bytes, model: str | None) -> Reply:
    chunk, id_, said = decoded
    builder = ReplyBuilder()
    builder.add([chunk])
    return builder.reply(id=id_, model=said or model, raw=output)


def _text(value: Any, output: bytes) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(piece, str) for piece in value):
        return "".join(value)
    return output.decode("utf-8", "replace")


def _embeddings(value: Any, output: bytes, model: str | None) -> Embeddings:
    if isinstance(value, dict):
        if "data" in value or "error" in value:
            found = decode_embeddings(output)
            return Embeddings(found.vectors, found.model or model, found.usage)
        value = value.get("embeddings", value.get("embedding"))
    if isinstance(value, list) and value:
        rows: list[Any] = [row.get("embedding") if isinstance(row, dict) else row for row in value]
        if all(_is_number(number) for number in rows):
            rows = [rows]
        if all(isinstance(row, list) and all(_is_number(number) for number in row) for row in rows):
            try:
                return Embeddings([[float(number) for number in row] for row in rows], model)
            except OverflowError:
                pass
    raise ProtocolError(f"the job's output has no vectors in it: {output[:200].decode('utf-8', 'replace')!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
