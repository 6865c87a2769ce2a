"""Calls over NATS, for spanwire: ``nats://host:4222/subject``.

Nothing here needs to be imported by a caller: spanwire loads it when the scheme is first used. Whoever answers calls uses
:class:`Responder`.
"""

from __future__ import annotations

from spanwire import hookimpl
from spanwire.transport import TransportSpec

from .responder import Incoming, Responder
from .transport import OPTIONS, NATSTransport

__all__ = ["Incoming", "NATSTransport", "Responder", "register_transports"]


@hookimpl
def register_transports() -> list[TransportSpec]:
    """``nats``, for ``nats://``."""
    return [TransportSpec(name="nats", schemes=("nats",), factory=NATSTransport, options=OPTIONS, contract=1)]
