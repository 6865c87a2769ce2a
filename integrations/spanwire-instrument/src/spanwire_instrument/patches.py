"""Replacing attributes of other people's classes, and giving every one of them back.

Whoever replaces the same attribute after us keeps a reference to ours. Then ours cannot be taken out of the middle; it
stays there and hands everything through, which is what :attr:`Patches.on` is for: each replacement asks it first.

Libraries that are not imported yet are waited for by a finder on ``sys.meta_path``. It is our own and not wrapt's, whose
hooks cannot be taken off again.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["ImportHook", "Patches"]

_log = logging.getLogger("spanwire.instrument")
_ABSENT = object()


class Patches:
    """What was replaced.

    Attributes:
        on: replacements do what they are for; else they hand through.
    """

    __slots__ = ("_done", "on")

    def __init__(self) -> None:
        self.on = True
        self._done: list[tuple[Any, str, Any, Any]] = []

    def replace(self, owner: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
        """Replace a function of a class or module.

        Args:
            owner, name: where. A class that has inherited it gets one of its own.
            make: is given the function that is called without us, and returns ours.
        """
        before = vars(owner).get(name, _ABSENT)
        original = getattr(owner, name)
        ours = functools.update_wrapper(make(original), original)
        setattr(owner, name, ours)
        self._done.append((owner, name, before, ours))

    def undo(self) -> None:
        """Put back everything that nobody else has replaced since, the last one first."""
        self.on = False
        while self._done:
            owner, name, before, ours = self._done.pop()
            if vars(owner).get(name) is not ours:
                continue
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


class ImportHook:
    """Calls a function when a module was imported.

    Args:
        hooks: by full name of the module. What they raise is logged, and the import goes on.
    """

    def __init__(self, hooks: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self._hooks = hooks
        self._looking = threading.local()

    def install(self) -> None:
        """From now on. Modules that are there already are not told of."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """A second call is harmless."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Part of the import system: what the other finders find, with a note on its loader."""
        hook = self._hooks.get(fullname)
        if hook is None or getattr(self._looking, "name", None) == fullname:
            return None
        self._looking.name = fullname
        try:
            for finder in list(sys.meta_path):
                find = getattr(finder, "find_spec", None)
                if finder is self or find is None:
                    continue
                spec: ModuleSpec | None = find(fullname, path, target)
                if spec is not None:
                    self._note(spec, hook)
                    return spec
        finally:
            self._looking.name = None
        return None

    def _note(self, spec: ModuleSpec, hook: Callable[[ModuleType], None]) -> None:
        loader: Any = spec.loader
        execute = getattr(loader, "exec_module", None)
        if execute is None or isinstance(loader, type):  # one loader for many modules is not ours to change
            return

        def exec_module(module: ModuleType) -> None:
            with contextlib.suppress(AttributeError):  # somebody was here already
                del loader.exec_module
            execute(module)
            if self in sys.meta_path:
                run_hook(hook, module)

        try:
            loader.exec_module = exec_module
        except AttributeError:  # it takes none
            _log.debug("the import of %s cannot be seen", spec.name)


def run_hook(hook: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Never raises."""
    try:
        hook(module)
    except Exception:  # noqa: BLE001 - the application goes on without us
        _log.warning("%s cannot be instrumented", module.__name__, exc_info=True)
