"""What a dialect on this transport has to be: which method, which bytes out, and what the bytes that come mean."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal, NamedTuple, Protocol

from spanwire.calls import Call
from spanwire.endpoint import Endpoint
from spanwire.errors import ServerError
from spanwire.transport import Item

__all__ = ["AnswerDecoder", "Ask", "Codec", "Kind", "Rpc"]

#: ``unary``: one message each way. ``stream``: one out, many back. ``bidi``: the same over a method that takes many, which
#: is told at once that no more come; ``held``: as ``bidi``, told when the terminal message is here.
Kind = Literal["unary", "stream", "bidi", "held"]
#: One unary RPC on the call's own channel, with the call's metadata: method and request, to the reply's bytes. Raises
#: :class:`~spanwire.errors.SpanwireError`; the name of the status is a ServerError's ``code``.
Ask = Callable[[str, bytes], Awaitable[bytes]]


class Rpc(NamedTuple):
    """What goes onto the wire: the full method name, such as ``/pkg.Service/Method``, and the request's bytes."""

    method: str
    request: bytes
    kind: Kind = "stream"


class AnswerDecoder(Protocol):
    """State of one answer.

    Attributes:
        done: the terminal message has been seen.
        finish_reason: the last one that was seen, or None: from then on only usage and the end are to come.
        id, model: as the server gave them, once known.
        usage: optional: the last count of tokens that was seen.
        late_events: optional: raw JSON of the last messages, where servers put their timing.
        headers: optional: what this dialect has to say about the call, beside the server's metadata (``Reply.headers``).
    """

    done: bool
    finish_reason: str | None
    id: str | None
    model: str | None

    def message(self, data: bytes) -> Item | None:
        """One message; None for one that carries nothing for the caller. Raises ServerError, ProtocolError."""

    def end(self) -> Item | None:
        """The stream has ended; may give a last item. Raises Truncated if the answer is not complete."""


class Codec(Protocol):
    """A dialect on gRPC.

    Attributes:
        learn: None, or what has to be known of a server and a model before the first call: asked once for each
            connection and model, by unary RPCs. What it returns is given to :meth:`encode` and :meth:`decoder`.
        learns_by: names in ``Endpoint.options`` that it depends on.
    """

    learn: Callable[[Ask, Call, Endpoint], Awaitable[Any]] | None
    learns_by: tuple[str, ...]

    def encode(
        self, call: Call, endpoint: Endpoint, *, streamed: bool, headers: Mapping[str, str], learned: Any
    ) -> Rpc:
        """The request of a call. ``headers`` are sent as metadata anyway. Raises ConfigurationError."""

    def credentials(self, api_key: str) -> Mapping[str, str]:
        """Metadata that carries the key."""

    def decoder(self, call: Call, endpoint: Endpoint, *, streamed: bool, learned: Any) -> AnswerDecoder:
        """Decodes the answer to this call."""

    def error(self, code: str, details: str) -> ServerError | None:
        """The error that this server means by a status, where that differs from what the status says by itself."""
