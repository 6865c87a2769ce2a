"""PURE: single fields of events and response objects, in whatever form a server sends them."""

from __future__ import annotations

from typing import Any

import msgspec

from ...calls import Usage
from ...errors import ProtocolError
from ..openai_chat import _count, _lenient_json, _show
from .failure import response_error
from .parts import ItemState, Part, text_of_part

__all__ = ["as_id", "as_index", "as_piece", "late_events", "part_of", "response_in", "usage_of"]


class _Terminal(msgspec.Struct, gc=False):
    response: msgspec.Raw = msgspec.Raw()


_decode_terminal = msgspec.json.Decoder(_Terminal).decode


def response_in(body: bytes) -> dict[str, Any]:
    """The response object of a body. Raises ServerError where it is an error, ProtocolError where it is none of both."""
    try:
        found = _lenient_json(body)
    except ProtocolError as error:
        raise ProtocolError(f"the answer is not a JSON object: {_show(body)}") from error
    if isinstance(found, list) and len(found) == 1 and isinstance(found[0], dict) and found[0].get("error"):
        raise response_error(body)  # Google's form
    if isinstance(found, dict) and (found.get("error") or found.get("type") == "error"):
        raise response_error(body)
    if not isinstance(found, dict) or not (isinstance(found.get("output"), list) or found.get("object") == "response"):
        raise ProtocolError(f"the answer is not a response object: {_show(body)}")
    return found


def late_events(data: bytes) -> list[bytes]:
    """Rows that read a server's times know them by their place in the response object."""
    try:
        inner = bytes(_decode_terminal(data).response)
    except (msgspec.DecodeError, RecursionError):
        inner = b""
    return [data, inner] if inner else [data]


def usage_of(usage: Any) -> Usage | None:
    """A server's count of tokens; None if it says nothing."""
    if not isinstance(usage, dict):
        return None
    prompt, completion = usage.get("input_tokens_details"), usage.get("output_tokens_details")
    found = Usage(
        _count(usage.get("input_tokens")),
        _count(usage.get("output_tokens")),
        _count(usage.get("total_tokens")),
        _count(prompt.get("cached_tokens")) if isinstance(prompt, dict) else None,
        _count(completion.get("reasoning_tokens")) if isinstance(completion, dict) else None,
    )
    known = (found.input_tokens, found.output_tokens, found.total_tokens)
    return None if known == (None, None, None) else found


def part_of(item: ItemState, field: str, event: dict[str, Any]) -> Part:
    """The part of an item that an event is about, by ``content_index`` or ``summary_index``."""
    place = as_index(event.get(field)) or 0
    return item.part(place if field == "content_index" else ~place)


def as_piece(value: Any) -> str:
    """Text, or an object with a text in it, as older servers send it."""
    if isinstance(value, dict):
        return text_of_part(value)
    return value if isinstance(value, str) else ""


def as_id(value: Any) -> str | None:
    """An item's id, also one that is a number; None for none."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return value if isinstance(value, str) and value else None


def as_index(value: Any) -> int | None:
    """A place, also as text or as a whole float; anything else is none."""
    if isinstance(value, str) and value.isascii() and value.isdigit():
        return int(value[:9])
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
