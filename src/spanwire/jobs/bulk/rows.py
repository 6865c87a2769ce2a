"""Calls out of a file of JSON lines, and results into one, as OpenAI's batches have them."""

from __future__ import annotations

import codecs
import itertools
import os
from collections.abc import Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any

import msgspec

from ...calls import Call, Embeddings, Reply
from ...errors import ConfigurationError, ServerError, SpanwireError

__all__ = ["JSONLFile", "Row", "opened", "result_row"]

_OPERATIONS = {"/chat/completions": "chat", "/embeddings": "embeddings"}


class Row(msgspec.Struct, frozen=True):
    """One line: the caller's name for the call, None if it gave none, and the call."""

    custom_id: str | None
    call: Call


def opened(path: Path) -> BufferedReader:
    """The file, for reading; it is read several times.

    Raises:
        ConfigurationError: it is a pipe or the like, which is empty the second time.
        OSError: it cannot be opened.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ConfigurationError(
            f"{path} is no file but a pipe or a device, and it is read several times: write it to a file first"
        )
    return path.open("rb")


class JSONLFile:
    """Calls in a file, one a line, read anew each time: give it to ``manager.submit_many`` as it is.

    A line is a row of OpenAI's batch files, ``{"custom_id": ..., "method": "POST", "url": "/v1/embeddings", "body": {...}}``, or
    such a body alone. Empty lines are left out, and so is a byte order mark.

    Args:
        path: the file, UTF-8. A pipe can be read only once: it is none.
        model: for bodies that name none.

    Raises:
        ConfigurationError: while it is read: it cannot be, or a line is no call; the message has its number.
    """

    def __init__(self, path: str | os.PathLike[str], *, model: str | None = None) -> None:
        self.path = Path(path)
        self.model = model

    def __repr__(self) -> str:
        return f"JSONLFile({str(self.path)!r})"

    def __iter__(self) -> Iterator[Call]:
        for row in self.rows():
            yield row.call

    def rows(self) -> Iterator[Row]:
        """The calls with their names."""
        try:
            with opened(self.path) as file:
                for number, line in enumerate(file, start=1):
                    if number == 1:
                        line = line.removeprefix(codecs.BOM_UTF8)
                    if line.strip():
                        yield self._row(line, number)
        except OSError as error:
            raise ConfigurationError(f"{self.path} cannot be read: {error.strerror or error}") from error

    def line_of(self, index: int) -> int:
        """The number of a call's line, from 1. Blocking; raises ConfigurationError: the file is not what it was."""
        try:
            with opened(self.path) as file:
                there = (
                    number for number, line in enumerate(file, start=1) if line.removeprefix(codecs.BOM_UTF8).strip()
                )
                found = next(itertools.islice(there, index, None), None)
        except OSError as error:
            raise ConfigurationError(f"{self.path} cannot be read: {error.strerror or error}") from error
        if found is None:
            raise ConfigurationError(f"{self.path} has no call {index} any more: did the file change?")
        return found

    def _row(self, line: bytes, number: int) -> Row:
        where = f"{self.path}, line {number}"
        try:
            found = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"{where}: no JSON: {error}") from None
        if not isinstance(found, dict):
            raise ConfigurationError(f"{where}: a line is an object, not {type(found).__name__}")
        custom_id: str | None = None
        operation: str | None = None
        body: Mapping[str, Any] = found
        if "body" in found and "messages" not in found and "input" not in found:
            custom_id, operation, body = self._batch_row(found, where)
        if operation is None:
            operation = "chat" if "messages" in body else "embeddings" if "input" in body else None
        needed = {"chat": "messages", "embeddings": "input"}.get(operation or "")
        if needed is None or needed not in body:
            raise ConfigurationError(f"{where}: a body has messages, or input")
        arguments = {name: value for name, value in body.items() if name not in ("model", "stream", needed)}
        model = body.get("model", self.model)
        if model is None:
            raise ConfigurationError(f"{where}: no model is named; give one for such lines (--model)")
        if "headers" in arguments:
            raise ConfigurationError(f"{where}: headers are no field of a body")
        call = Call.chat if operation == "chat" else Call.embeddings
        try:
            return Row(custom_id, call(model, body[needed], **arguments))
        except ConfigurationError as error:
            raise ConfigurationError(f"{where}: {error.message}") from None
        except TypeError as error:  # a field with the name of an argument of ours
            raise ConfigurationError(f"{where}: the body has a field that no call can have: {error}") from None

    @staticmethod
    def _batch_row(found: Mapping[str, Any], where: str) -> tuple[str | None, str | None, Mapping[str, Any]]:
        custom_id, url, body = found.get("custom_id"), found.get("url"), found["body"]
        if custom_id is not None and not isinstance(custom_id, str):
            raise ConfigurationError(f"{where}: custom_id is text")
        if not isinstance(body, dict):
            raise ConfigurationError(f"{where}: body is an object, not {type(body).__name__}")
        if url is None:
            return custom_id, None, body
        operation = next((name for end, name in _OPERATIONS.items() if str(url).rstrip("/").endswith(end)), None)
        if operation is None:
            raise ConfigurationError(f"{where}: url is {str(url)!r:.60}; it can be {' or '.join(_OPERATIONS)}")
        return custom_id, operation, body


def result_row(
    index: int, custom_id: str | None, job: str | None, outcome: Reply | Embeddings | SpanwireError
) -> bytes:
    """A row of OpenAI's batch output: ``{"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}``.

    Args:
        index: of the call: its name, if it has none, is ``"call-<index>"``.
    """
    response: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    if isinstance(outcome, SpanwireError):
        status = outcome.status if isinstance(outcome, ServerError) else None
        code = outcome.code if isinstance(outcome, ServerError) else None
        error = {"code": type(outcome).__name__ if code is None else str(code), "message": outcome.message}
        if status is not None:
            response = {"status_code": status, "request_id": job, "body": {"error": error}}
    else:
        response = {"status_code": 200, "request_id": job, "body": _body(outcome)}
    name = custom_id if custom_id is not None else f"call-{index}"
    row = {"id": f"{job or 'none'}:{index}", "custom_id": name, "response": response, "error": error}
    return msgspec.json.encode(row) + b"\n"


def _body(reply: Reply | Embeddings) -> dict[str, Any]:
    usage = None
    if reply.usage is not None:
        known = {
            "prompt_tokens": reply.usage.input_tokens,
            "completion_tokens": reply.usage.output_tokens,
            "total_tokens": reply.usage.total_tokens,
        }
        usage = {name: value for name, value in known.items() if value is not None}
    more = {} if usage is None else {"usage": usage}
    if isinstance(reply, Embeddings):
        data = [
            {"object": "embedding", "index": number, "embedding": vector} for number, vector in enumerate(reply.vectors)
        ]
        return {"object": "list", "model": reply.model, "data": data, **more}
    message: dict[str, Any] = {"role": "assistant", "content": reply.text}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in reply.tool_calls
        ]
    choice = {"index": 0, "message": message, "finish_reason": reply.finish_reason}
    return {"id": reply.id, "object": "chat.completion", "model": reply.model, "choices": [choice], **more}
