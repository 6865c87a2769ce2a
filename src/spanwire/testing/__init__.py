"""For tests and demos: a scripted model server on this machine, and the conformance kit for plugins.

The server needs no pytest, the kit (:mod:`spanwire.testing.conformance`, loaded when it is asked for) does. The server as
a command: ``python -m spanwire.testing --help``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .loopback import Answer, Book, ConfigurablePart, Listener, LoopbackPart, LoopbackServer, Request, echo
from .reports import ServerTimes
from .script import Script, ScriptedTool

if TYPE_CHECKING:
    from .conformance import DialectConformance, StoreConformance, TransportConformance

__all__ = [
    "Answer",
    "Book",
    "ConfigurablePart",
    "DialectConformance",
    "Listener",
    "LoopbackPart",
    "LoopbackServer",
    "Request",
    "Script",
    "ScriptedTool",
    "ServerTimes",
    "StoreConformance",
    "TransportConformance",
    "echo",
]


def __getattr__(name: str) -> Any:
    if name in {"DialectConformance", "StoreConformance", "TransportConformance"}:
        from . import conformance

        return getattr(conformance, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
