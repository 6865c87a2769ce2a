"""What a wire, or the server at its other end, may be unable to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

__all__ = ["ABILITIES", "needs", "needs_of"]

_F = TypeVar("_F", bound=Callable[..., Any])

#: Names for ``TransportConformance.cannot``, each with what a test that needs it does.
ABILITIES: Mapping[str, str] = {
    "backpressure": "the server has to wait while nobody reads its answer",
    "call_headers": "headers of a single call, its ``traceparent`` among them, reach the server, not only the handshake's",
    "connections": "the server counts its clients' connections (``connections``, ``open_connections``)",
    "credentials": "a key, headers and a query reach the server (``Request.headers``, ``Request.query``)",
    "dials": "nobody makes a connection but the transport: its library does not replace one that broke by itself",
    "disconnect": "the server closes its connections while they are idle",
    "drop": "the server cuts the connection in an answer, or before it (``Script.drop_after``)",
    "embeddings": "calls for embeddings",
    "finish": "the message ends later than the answer (``Script.end_s``)",
    "hang": "the server stops in the middle of an answer, or before it (``Script.hang_after``)",
    "handshake": "making a connection takes steps that can be marked",
    "leave": "the server hears that a client has left a call (``Request.left``)",
    "reasoning": "a model's reasoning, apart from its text",
    "relay": "a plain TCP hop, or one of unix sockets, may stand between client and server",
    "reset": "the server cuts the connection with RST (``Script.drop_mode``)",
    "segments": "the exchange's marks say when things happened",
    "status": "the server refuses a call, for a reason that has a status (``Script.status``)",
    "stop": "nobody listens any more once the server was stopped",
    "tools": "tool calls, in pieces",
    "truncate": "an answer ends in order before it is complete (``Script(finish_reason=None, done=False)``)",
    "unary": "answers that are not streamed",
    "whole": "a call that is not streamed is answered in one piece (``Head.streamed`` is False)",
    "usage": "the server says how many tokens it counted",
}


def needs(*abilities: str) -> Callable[[_F], _F]:
    """Mark a test: a wire that cannot do this fails it, for the reason that its author gives."""
    unknown = set(abilities) - set(ABILITIES)
    assert not unknown, unknown

    def mark(test: _F) -> _F:
        test.needs = (*needs_of(test), *abilities)  # type: ignore[attr-defined]
        return test

    return mark


def needs_of(test: Callable[..., Any]) -> tuple[str, ...]:
    """The abilities that a test was marked with."""
    found: tuple[str, ...] = getattr(test, "needs", ())
    return found
