"""The waterfall of every call on stderr, as ``print(timeline)`` draws it: for who looks at an agent without changing it.

``SPANWIRE_WATERFALL=1`` switches it on for all managers of the process. A waterfall is drawn once, when its call has ended,
and written as a whole: those of several threads do not mix.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Sequence
from functools import cache

from .errors import visible
from .hookspecs import Observer, hookimpl
from .timeline import Timeline
from .waterfall import draw

__all__ = ["ENVIRONMENT", "CallPrint", "call_print_from_environment"]

_log = logging.getLogger("spanwire.callprint")

#: The variable that switches it on for every manager of the process.
ENVIRONMENT = "SPANWIRE_WATERFALL"
_ON, _OFF = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


class CallPrint:
    """An observer, and the plugin that registers it, which writes every ended call's waterfall to ``sys.stderr``.

    A stderr that is closed, or that nobody reads any more, is no fault of the call: what cannot be written is left out.
    """

    def __init__(self) -> None:
        self._writing = threading.RLock()  # a signal handler may run into a call in the middle of a write

    def __repr__(self) -> str:
        return "CallPrint()"

    @hookimpl
    def register_observers(self) -> Sequence[Observer]:
        """It is its own observer."""
        return (self,)

    def call_ended(self, timeline: Timeline) -> None:
        """Draw the call, and write it where ``sys.stderr`` leads now."""
        text = draw(timeline) + "\n"
        with self._writing, contextlib.suppress(OSError, ValueError):
            stream = sys.stderr
            if stream is None:  # pythonw, or closed before Python began
                return
            try:
                stream.write(text)
            except UnicodeEncodeError:  # not of Python's own stderr: of what a program has put in its place
                stream.write(text.encode("ascii", "backslashreplace").decode("ascii"))
            stream.flush()

    def _after_fork(self) -> None:
        self._writing = threading.RLock()  # another thread of the parent may hold it


_shared = CallPrint()


def call_print_from_environment() -> CallPrint | None:
    """What ``SPANWIRE_WATERFALL`` asks for, one for all managers of the process; None if it asks for nothing.

    A value that is neither a yes nor a no is one line in the log, and the calls go on.
    """
    return _shared if _is_on(os.environ.get(ENVIRONMENT, "").strip().lower()) else None


@cache
def _is_on(value: str) -> bool:
    if value not in (*_ON, *_OFF):
        _log.error("%s=%s has no effect: 1 prints every call's waterfall, 0 none", ENVIRONMENT, visible(value[:40]))
    return value in _ON


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_shared._after_fork)
