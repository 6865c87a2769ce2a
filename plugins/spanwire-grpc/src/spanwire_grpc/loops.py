"""The library on a loop: one queue of events serves all loops of a process, and a socket tells all of them of each event.

Two things go wrong with that in its reader, on whichever loop comes first. An event of a loop that was closed under its
call raises RuntimeError, and those behind it are left in the queue, so that calls of living loops never end: the reader is
asked again, until the queue is empty. And before grpcio 1.80 a loop that comes too late for an event raises
BlockingIOError, which asyncio logs as a failed callback; nothing is lost by that, so here it goes no further.
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
#: More events of closed loops than lie in the queue at once: a bound, should the reader raise for another reason.
_MOST = 1000


def bind_loop() -> None:
    """Have the library read its events on the running loop, if it does not do so yet."""
    loop = asyncio.get_running_loop()
    if loop in _bound:
        return
    _bound.add(loop)
    add_reader = loop.add_reader

    def forgiving(fd: Any, callback: Callable[..., Any], *args: Any) -> Any:
        def read() -> None:
            for _ in range(_MOST):
                try:
                    callback(*args)
                except BlockingIOError:
                    return
                except RuntimeError as error:
                    if "closed" not in str(error):
                        raise
                else:
                    return

        return add_reader(fd, read)

    with contextlib.suppress(AttributeError):  # a loop that is written in C takes no attribute
        loop.add_reader = forgiving  # type: ignore[method-assign, assignment]
    try:
        grpc.aio.init_grpc_aio()
    finally:
        loop.__dict__.pop("add_reader", None)
