"""spanwire by webhook: submit a call, be acknowledged at once, get the result hours later.

Nothing here needs to be imported by hand: spanwire loads it for ``Endpoint(url, transport="webhook", dialect=...)``. Options of
such an endpoint are in :mod:`spanwire_webhook.transport`. A dialect of your own registers with
``Dialect(transport="webhook", name=..., codec=...)``, where the codec is a :class:`spanwire.jobs.contract.JobCodec`.
"""

from __future__ import annotations

from spanwire.hookspecs import hookimpl
from spanwire.transport import Dialect, TransportSpec

from .dialects import dialects
from .transport import OPTIONS, WebhookTransport

__all__ = ["WebhookTransport", "register_dialects", "register_transports"]


@hookimpl
def register_transports() -> list[TransportSpec]:
    """``webhook``, by name alone: its URLs are ``http://`` and ``https://``."""
    return [
        TransportSpec(
            name="webhook", schemes=(), factory=WebhookTransport, capabilities=frozenset({"jobs"}), options=OPTIONS
        )
    ]


@hookimpl
def register_dialects() -> list[Dialect]:
    """``generic`` (the default), and those of providers."""
    return dialects()
