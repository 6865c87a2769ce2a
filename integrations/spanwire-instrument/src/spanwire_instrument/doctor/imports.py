"""Do something with a module as soon as it is there."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["when_imported"]

_log = logging.getLogger("spanwire.instrument")


def when_imported(name: str, do: Callable[[ModuleType], None]) -> None:
    """Now, if it is imported already; else right after its code has run, in the thread that imports it."""
    module = sys.modules.get(name)
    if module is not None:
        _do(do, module)
        return
    sys.meta_path.insert(0, _Finder(name, do))


def _do(do: Callable[[ModuleType], None], module: ModuleType) -> None:
    try:
        do(module)
    except Exception:  # noqa: BLE001 - the program goes on without us
        _log.debug("%s cannot be watched", module.__name__, exc_info=True)


class _Finder:
    """Waits for one module, and then goes."""

    def __init__(self, name: str, do: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._do = do
        self._busy = False

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        if name != self._name or self._busy:
            return None
        self._busy = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._busy = False
        if spec is None or spec.loader is None or not hasattr(spec.loader, "exec_module"):
            return None
        self._follow(spec)
        return spec

    def _follow(self, spec: ModuleSpec) -> None:
        loader: Any = spec.loader
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            loader.__dict__.pop("exec_module", None)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            run(module)
            _do(self._do, module)

        loader.exec_module = exec_module
