"""For tests and demos: a scripted model server on this machine. Needs no pytest.

As a command: ``python -m spanwire.testing --help``.
"""

from __future__ import annotations

from .loopback import Answer, Book, Listener, LoopbackPart, LoopbackServer, Request, echo
from .reports import ServerTimes
from .script import Script, ScriptedTool

__all__ = [
    "Answer",
    "Book",
    "Listener",
    "LoopbackPart",
    "LoopbackServer",
    "Request",
    "Script",
    "ScriptedTool",
    "ServerTimes",
    "echo",
]
