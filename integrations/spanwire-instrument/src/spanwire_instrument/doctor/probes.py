"""Cheap probes beside the calls themselves: TLS contexts, look-ups of names, clients that are made.

Each wraps one function of its module, calls it as it was called, and writes a line after it. What happens once for each
call costs some ten us; nothing here happens for each token.
"""

from __future__ import annotations

import functools
import inspect
import ipaddress
import logging
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .imports import when_imported
from .sites import find

if TYPE_CHECKING:
    from .recorder import Recorder

__all__ = ["install"]

_log = logging.getLogger("spanwire.instrument")

#: Classes whose objects have connections of their own, and the method that sends.
_CLIENTS = {
    "httpx": {"Client": "send", "AsyncClient": "send"},
    "httpx2": {"Client": "send", "AsyncClient": "send"},
    "aiohttp": {"ClientSession": "_request"},
}


def install(recorder: Recorder) -> None:
    """Put them in place, for the life of the process."""
    _contexts(recorder)
    _lookups(recorder)
    for module, names in _CLIENTS.items():
        when_imported(module, functools.partial(_clients, recorder, names))


def _contexts(recorder: Recorder) -> None:
    cls = ssl.SSLContext
    new = cls.__new__

    def made(kind: Any, *args: Any, **kwargs: Any) -> Any:
        context = new(kind, *args, **kwargs)
        recorder.write("context", find(2))
        return context

    cls.__new__ = staticmethod(functools.wraps(new)(made))  # type: ignore[assignment,method-assign]
    # Reading the roots is what costs: 10 to 30 ms each time.
    for name in ("load_verify_locations", "set_default_verify_paths"):
        setattr(cls, name, _timed(recorder, getattr(cls, name)))


def _timed(recorder: Recorder, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def timed(*args: Any, **kwargs: Any) -> Any:
        begin_ns = time.perf_counter_ns()
        result = method(*args, **kwargs)
        recorder.write("roots", find(2), s=(time.perf_counter_ns() - begin_ns) / 1e9)
        return result

    return timed


def _lookups(recorder: Recorder) -> None:
    """``loop.getaddrinfo`` of asyncio asks this function, in a thread."""
    ask = socket.getaddrinfo

    @functools.wraps(ask)
    def asked(host: Any, *args: Any, **kwargs: Any) -> Any:
        begin_ns = time.perf_counter_ns()
        try:
            return ask(host, *args, **kwargs)
        finally:
            name = host.decode("ascii", "replace") if isinstance(host, bytes) else host
            if isinstance(name, str) and not _is_address(name):
                recorder.write("lookup", find(2), host=name.lower(), s=(time.perf_counter_ns() - begin_ns) / 1e9)

    socket.getaddrinfo = asked


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True


def _clients(recorder: Recorder, names: Mapping[str, str], module: ModuleType) -> None:
    for name, method in names.items():
        cls = getattr(module, name, None)
        if isinstance(cls, type):
            recorder.clients.sends(inspect.unwrap(getattr(cls, method)))
            _watch_class(recorder, f"{module.__name__}.{name}", cls)


def _watch_class(recorder: Recorder, name: str, cls: type[Any]) -> None:
    init = cls.__init__

    @functools.wraps(init)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        recorder.write("client", find(2), cls=name, client=recorder.clients.add(self))

    cls.__init__ = made  # type: ignore[method-assign]
