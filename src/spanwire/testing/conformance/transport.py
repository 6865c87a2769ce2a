"""The kit for transports, put together."""

from __future__ import annotations

from .answers import Answers
from .dialling import Dialling
from .failures import Failures
from .leaving import Leaving
from .limits import Capacity
from .loops import Loops
from .pressure import Pressure
from .privacy import Privacy
from .registration import Registration
from .segments import Segments

__all__ = ["TransportConformance"]


class TransportConformance(
    Registration, Answers, Segments, Leaving, Dialling, Failures, Capacity, Pressure, Loops, Privacy
):
    """Subclass it in a test file, with a name that begins with ``Test``.

    Attributes:
        scheme: the URL scheme.
        plugin: an object with hooks, or the name of a module with them, for a plugin that is not installed. Left out: an
            entry point of the scheme finds it, as it does for users.
        part: how a script is served: an entry point of ``spanwire.loopback``, or a
            :class:`~spanwire.testing.LoopbackPart`. Left out: the entry point with the transport's name. Or override
            :meth:`serve`.
        served: further arguments of :class:`~spanwire.testing.LoopbackServer`, such as ``{"tls": True}``.
        settings: further fields of every endpoint, such as ``{"options": {"http_version": "2"}}``.
        cannot: what this wire, or its server, is unable to do, by a name of
            :data:`~spanwire.testing.conformance.ABILITIES`, with the reason.
    """
