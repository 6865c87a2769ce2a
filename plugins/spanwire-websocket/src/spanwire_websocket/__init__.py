"""spanwire over WebSocket: chat on servers that speak OpenAI's Responses on a socket, and sessions: realtime audio, or any
schema.

Nothing here needs to be imported by hand: spanwire loads it for ``ws://`` and ``wss://`` endpoints. For voice,
:mod:`spanwire_websocket.realtime` has the events that a client sends, and helpers for samples and barge-in.
"""

from __future__ import annotations

from spanwire.hookspecs import hookimpl
from spanwire.transport import Dialect, TransportSpec

from .options import NAMES
from .raw import Raw
from .realtime import Realtime
from .transport import WebSocketTransport

__all__ = ["WebSocketTransport", "register_dialects", "register_transports"]


@hookimpl
def register_transports() -> list[TransportSpec]:
    """``websocket``, for ``ws`` and ``wss``."""
    return [
        TransportSpec(
            name="websocket",
            schemes=("ws", "wss"),
            factory=WebSocketTransport,
            capabilities=frozenset({"session"}),
            options=NAMES,
            contract=1,
        )
    ]


@hookimpl
def register_dialects() -> list[Dialect]:
    """``responses``: OpenAI's Responses, one at a time on a socket. For sessions ``realtime``, and ``raw`` for any schema."""
    session = frozenset({"session"})
    return [
        Dialect(transport="websocket", name="responses", codec=None, operations=frozenset({"chat"}), default=True),
        Dialect(transport="websocket", name="realtime", codec=Realtime(), operations=session, default=True),
        Dialect(transport="websocket", name="raw", codec=Raw(), operations=session),
    ]
