"""Cheap probes beside the calls themselves: TLS contexts, look-ups of names, clients that are made.

Each wraps one function of its module, calls it as it was called, and writes a line after it. What happens once for each
call costs some ten us; nothing here happens for each token.
"""

from __future__ import annotations

import functools
import inspect
import ipaddress
import socket
import ssl
import sys
import time
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..patches import ImportHook, Patches, run_hook
from .sites import find

if TYPE_CHECKING:
    from .recorder import Recorder

__all__ = ["install"]

#: Classes whose objects have connections of their own, and the method that sends.
_CLIENTS = {
    "httpx": {"Client": "send", "AsyncClient": "send"},
    "httpx2": {"Client": "send", "AsyncClient": "send"},
    "aiohttp": {"ClientSession": "_request"},
}


def install(recorder: Recorder) -> None:
    """Put them in place, for the life of the process."""
    patches = Patches()
    _contexts(recorder, patches)
    patches.replace(socket, "getaddrinfo", functools.partial(_lookups, recorder))
    hooks = {module: functools.partial(_clients, recorder, patches, names) for module, names in _CLIENTS.items()}
    ImportHook(hooks).install()
    for name, hook in hooks.items():
        if name in sys.modules:
            run_hook(hook, sys.modules[name])


def _contexts(recorder: Recorder, patches: Patches) -> None:
    cls = ssl.SSLContext
    new = cls.__new__

    def made(kind: Any, *args: Any, **kwargs: Any) -> Any:
        context = new(kind, *args, **kwargs)
        recorder.write("context", find(2))
        return context

    cls.__new__ = staticmethod(functools.wraps(new)(made))  # type: ignore[assignment,method-assign]
    # Reading the roots is what costs: 10 to 30 ms each time.
    for name in ("load_verify_locations", "set_default_verify_paths"):
        patches.replace(cls, name, functools.partial(_timed, recorder))


def _timed(recorder: Recorder, method: Callable[..., Any]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        begin_ns = time.perf_counter_ns()
        result = method(*args, **kwargs)
        recorder.write("roots", find(2), s=(time.perf_counter_ns() - begin_ns) / 1e9)
        return result

    return timed


def _lookups(recorder: Recorder, ask: Callable[..., Any]) -> Callable[..., Any]:
    """``loop.getaddrinfo`` of asyncio asks this function, in a thread."""

    def asked(host: Any, *args: Any, **kwargs: Any) -> Any:
        begin_ns = time.perf_counter_ns()
        try:
            return ask(host, *args, **kwargs)
        finally:
            name = host.decode("ascii", "replace") if isinstance(host, bytes) else host
            if isinstance(name, str) and not _is_address(name):
                recorder.write("lookup", find(2), host=name.lower(), s=(time.perf_counter_ns() - begin_ns) / 1e9)

    return asked


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True


def _clients(recorder: Recorder, patches: Patches, names: Mapping[str, str], module: ModuleType) -> None:
    for name, method in names.items():
        cls = getattr(module, name, None)
        if isinstance(cls, type):
            recorder.clients.sends(inspect.unwrap(getattr(cls, method)))
            patches.replace(cls, "__init__", functools.partial(_made, recorder, f"{module.__name__}.{name}"))


def _made(recorder: Recorder, name: str, init: Callable[..., None]) -> Callable[..., None]:
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        recorder.write("client", find(2), cls=name, client=recorder.clients.add(self))

    return made
