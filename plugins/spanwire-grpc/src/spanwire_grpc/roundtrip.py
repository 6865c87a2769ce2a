"""The round trip to the peer, which the library does not tell: asked of the kernel, of a socket that is the library's (Linux).

The sockets that a connect has made are those that this process has now, and had not before it. One is duplicated for a
moment, and asked for its minimum round trip; so soon after the handshake that is the handshake's own.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys

from spanwire.net.sockets import min_rtt_ns

__all__ = ["open_sockets", "rtt_of_new_ns"]

#: Processes with more descriptors are not searched: it takes about 3 us for each, on the event loop.
_MOST = 2048
_FOLDER = "/proc/self/fd"


def open_sockets() -> dict[str, int]:
    """This process's sockets: descriptors by the kernel's name for them. Empty where the system does not show them."""
    found: dict[str, int] = {}
    if sys.platform != "linux":
        return found
    with contextlib.suppress(OSError):
        numbers = os.listdir(_FOLDER)  # noqa: PTH208 - names alone, of what may be gone
        if len(numbers) > _MOST:
            return found
        for number in numbers:
            with contextlib.suppress(OSError):  # closed meanwhile
                name = os.readlink(f"{_FOLDER}/{number}")  # noqa: PTH115 - no path: "socket:[1234]"
                if name.startswith("socket:"):
                    found[name] = int(number)
    return found


def rtt_of_new_ns(before: dict[str, int], port: int) -> int | None:
    """The least round trip of the TCP connections to this port that were made since, in ns; None if unknown."""
    known: list[int] = []
    for name, number in open_sockets().items():
        if name in before:
            continue
        with contextlib.suppress(OSError):  # closed meanwhile, not connected, no TCP
            twin = socket.socket(fileno=os.dup(number))
            try:
                peer = twin.getpeername()
                if isinstance(peer, tuple) and peer[1] == port:
                    rtt_ns = min_rtt_ns(twin)
                    if rtt_ns is not None:
                        known.append(rtt_ns)
            finally:
                twin.close()
    return min(known, default=None)
