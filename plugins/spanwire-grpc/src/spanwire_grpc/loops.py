"""The library on a loop: one queue of events serves all loops of a process, and a socket tells all of them of each event.

Before grpcio 1.80 a loop that comes too late for one raises BlockingIOError in its reader, which asyncio logs as a failed
callback. Nothing is lost by that, since another loop has the event; so here it goes no further.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import grpc

__all__ = ["bind_loop"]

_bound: WeakSet[asyncio.AbstractEventLoop] = WeakSet()
#: First release that takes it by itself (measured).
_FIXED = (1, 80)


def _version() -> tuple[int, ...]:
    return tuple(int(part) for part in grpc.__version__.split(".")[:2] if part.isdigit())


def bind_loop() -> None:
    """Have the library read its events on the running loop, if it does not do so yet."""
    loop = asyncio.get_running_loop()
    if loop in _bound:
        return
    _bound.add(loop)
    add_reader = loop.add_reader

    def forgiving(fd: Any, callback: Callable[..., Any], *args: Any) -> Any:
        def read() -> None:
            with contextlib.suppress(BlockingIOError):
                callback(*args)

        return add_reader(fd, read)

    with contextlib.suppress(AttributeError):  # a loop that is written in C takes no attribute
        if _version() < _FIXED:
            loop.add_reader = forgiving  # type: ignore[method-assign, assignment]
    try:
        grpc.aio.init_grpc_aio()
    finally:
        loop.__dict__.pop("add_reader", None)
