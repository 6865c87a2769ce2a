"""Which line of the user's own code is behind what happens now, found on the stack.

The user's code is what lies in no library: not in the standard library, in no ``site-packages``, not in spanwire. Looking
costs some us, once for each call.
"""

from __future__ import annotations

import itertools
import os
import sys
import sysconfig
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import spanwire

__all__ = ["Clients", "Site", "find"]

_PARTS = {"site-packages", "dist-packages"}
_OURS = tuple(str(Path(module).parent) + os.sep for module in (spanwire.__file__, str(Path(__file__).parent)))
_STANDARD = tuple({str(Path(path)) + os.sep for name in ("stdlib", "platstdlib") if (path := sysconfig.get_path(name))})
_SCRIPTS = str(Path(sysconfig.get_path("scripts"))) + os.sep
#: Relative names in code objects are relative to where the program was started.
_CWD = Path.cwd()


class Site(NamedTuple):
    """Where in the user's code.

    Attributes:
        file, line: None and 0 if there is no code of the user's on the stack: a thread or task of a library's own.
        function: as in tracebacks; ``<module>`` for the top of a file.
        library: the package that the user's code called, ``""`` if it is at work itself.
        made: ``package.Class`` if it called one, to make an object of it.
        call: a number for that one call into the library, the same as long as it has not returned; 0 for unknown.
    """

    file: str | None
    line: int
    function: str
    library: str
    made: str
    call: int


class _Number:
    """Left on a frame, with which it goes. See :func:`_number`."""

    __slots__ = ("value",)

    def __init__(self, value: int) -> None:
        self.value = value

    def __call__(self, *_: object) -> None:
        return None


_numbers = itertools.count(1)


@lru_cache(maxsize=4096)
def _kind(name: str) -> str:
    """``user``, ``library``, ``standard`` or ``ours``."""
    if name.startswith("<frozen"):
        return "standard"
    if name.startswith("<"):
        return "user"  # python -c, a notebook's cell
    if name.startswith(_OURS):
        return "ours"
    if not _PARTS.isdisjoint(Path(name).parts):
        return "library"
    if name.startswith(_STANDARD):
        return "standard"
    return "library" if name.startswith(_SCRIPTS) else "user"


def find(skip: int = 1) -> Site:
    """The site of what happens now.

    Args:
        skip: that many of the innermost frames are not looked at, this function's own aside.
    """
    frame: FrameType | None = sys._getframe(skip)
    below: FrameType | None = None
    while frame is not None:
        kind = _kind(frame.f_code.co_filename)
        if kind == "user":
            break
        if kind == "library":
            below = frame
        frame = frame.f_back
    library = made = ""
    call = 0
    if below is not None:
        library = str(below.f_globals.get("__name__") or "").partition(".")[0]
        if below.f_code.co_name == "__init__":
            made = _class(below)
        call = _number(below)
    if frame is None:
        return Site(None, 0, "", library, made, call)
    code = frame.f_code
    name = code.co_filename
    file = name if name.startswith("<") else str(_CWD / name)
    return Site(file, frame.f_lineno or code.co_firstlineno, code.co_qualname, library, made, call)


def _class(frame: FrameType) -> str:
    code = frame.f_code
    if not code.co_argcount:
        return ""
    cls = type(frame.f_locals.get(code.co_varnames[0]))
    return f"{cls.__module__.partition('.')[0]}.{cls.__qualname__}"


class Clients:
    """The HTTP clients of this process, by number, and which of them is sending."""

    def __init__(self) -> None:
        self._numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._count = itertools.count(1)
        self._senders: set[CodeType] = set()

    def sends(self, method: Any) -> None:
        """This method of clients is on the stack while they send."""
        code = getattr(method, "__code__", None)
        if code is not None:
            self._senders.add(code)

    def add(self, client: Any) -> int:
        """A client was made; its number."""
        number = self._numbers[client] = next(self._count)
        return number

    def sending(self) -> int:
        """The number of the one that sends now, 0 for unknown."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if code in self._senders:
                return self._numbers.get(frame.f_locals.get(code.co_varnames[0]), 0)
            frame = frame.f_back
        return 0


def _number(frame: FrameType) -> int:
    """The number of this frame; it gets one. 0 under a debugger, whose place that is.

    Frames take no weak reference, and their addresses are used again at once. A reference to one would keep alive what
    it refers to, which the program may have dropped. ``f_trace`` is the one attribute to which something may be assigned; it has no
    effect without a trace function, and one that gets this one traces nothing more.
    """
    if sys.gettrace() is not None:
        return 0
    there = frame.f_trace
    if isinstance(there, _Number):
        return there.value
    if there is not None:
        return 0
    number = _Number(next(_numbers))
    frame.f_trace = number
    return number.value
