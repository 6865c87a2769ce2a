"""PURE: what a socket's server remembers of a conversation, and what therefore need not be sent again.

A server keeps, for as long as the socket lives, the answer that it gave last on it. A call whose messages begin with all
of that conversation sends only what is new, and names the answer (``previous_response_id``).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from spanwire.calls import ToolCall
from spanwire.wire.openai_responses import answer_items

__all__ = ["Conversation", "Outgoing", "conversation_after", "outgoing"]

#: Items are compared, so that the order of their keys must not count. That of settings does: a server writes an answer's fields
#: in the order in which ``text.format`` and ``tools`` name them.
_encode_item = msgspec.json.Encoder(order="deterministic").encode
_encode = msgspec.json.encode


class Outgoing:
    """A call, encoded.

    Attributes:
        settings: all of the request but its input.
        items: the input, each item as JSON; None if the input is a text.
        digests: one for each item.
        custom: names of its custom tools.
        parent: the answer that the caller has named himself as the one before.
    """

    __slots__ = ("custom", "digests", "items", "parent", "settings")

    def __init__(
        self,
        settings: dict[str, Any],
        items: Sequence[bytes] | None,
        digests: tuple[bytes, ...] = (),
        custom: frozenset[str] = frozenset(),
    ) -> None:
        self.settings = settings
        self.items = items
        self.digests = digests
        self.custom = custom
        self.parent = settings.get("previous_response_id")

    @property
    def model(self) -> object:
        """The model that it asks for."""
        return self.settings.get("model")

    @property
    def is_kept_elsewhere(self) -> bool:
        """It goes on with a conversation in the server's store, which may hold more than the call says."""
        return self.settings.get("conversation") is not None

    def message(self, known: Conversation | None) -> bytes:
        """The event that asks for the answer, with what ``known`` does not have yet."""
        if known is None or self.items is None:
            event = self.settings if self.items is None else {**self.settings, "input": _raw(self.items)}
        else:
            event = {
                **self.settings,
                "previous_response_id": known.id,
                "input": _raw(self.items[len(known.digests) :]),
            }
        return _encode({"type": "response.create", **event})


def outgoing(request: Mapping[str, Any], custom: frozenset[str] = frozenset()) -> Outgoing:
    """Encode a request of the Responses schema; ``custom``: names of its custom tools.

    Raises:
        TypeError, ValueError: something in it cannot be written as JSON.
    """
    settings = dict(request)
    given = settings.get("input")
    if not isinstance(given, list):
        _encode(settings)  # what cannot be written is found here, and not on the connection
        return Outgoing(settings, None)
    del settings["input"]
    _encode(settings)
    items = [_encode_item(item) for item in given]
    digests = tuple(_digest(item, written) for item, written in zip(given, items, strict=True))
    return Outgoing(settings, items, digests, custom)


class Conversation:
    """What the server of one socket remembers.

    Attributes:
        id: of the last answer.
        digests: of all items up to that answer, the answer's own included.
    """

    __slots__ = ("digests", "id", "model")

    def __init__(self, id: str, digests: tuple[bytes, ...], model: object) -> None:
        self.id = id
        self.digests = digests
        self.model = model

    def is_continued_by(self, call: Outgoing) -> bool:
        """The call has all of it, and something new."""
        known = self.digests
        return (
            call.parent is None
            and not call.is_kept_elsewhere
            and call.items is not None
            and len(call.digests) > len(known)
            and call.model == self.model
            and call.digests[: len(known)] == known
        )


def conversation_after(
    before: Conversation | None, id: str, call: Outgoing, text: str, tool_calls: Sequence[ToolCall]
) -> Conversation | None:
    """What the server remembers once it has answered; None where that is not known."""
    if call.items is None or call.is_kept_elsewhere:
        return None
    known: tuple[bytes, ...] = call.digests
    if call.parent is not None:  # the caller counts by himself: only what follows its own last answer is known
        if before is None or before.id != call.parent:
            return None
        known = before.digests + call.digests
    if call.settings.get("generate") is False:  # a warm-up: there is no answer that a client could append
        return Conversation(id, known, call.model)
    answer = tuple(_digest(item, _encode_item(item)) for item in answer_items(text, tool_calls, custom=call.custom))
    return Conversation(id, known + answer, call.model)


def _digest(item: Any, written: bytes) -> bytes:
    """Equal for equal items. Frameworks parse the arguments of a call and write them anew: their JSON counts, not their text."""
    if isinstance(item, Mapping) and item.get("type") == "function_call":
        try:
            arguments = json.dumps(json.loads(item.get("arguments") or "{}"), sort_keys=True)
            written = _encode_item({**item, "arguments": arguments})
        except (TypeError, ValueError, RecursionError):
            pass
    return hashlib.blake2b(written, digest_size=16).digest()


def _raw(items: Iterable[bytes]) -> list[msgspec.Raw]:
    return [msgspec.Raw(item) for item in items]
