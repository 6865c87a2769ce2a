"""What our connections do with the socket itself, whichever version of HTTP runs on it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import sys
from typing import cast

__all__ = ["abort", "rtt_min_ns"]

#: ``tcpi_min_rtt`` in ``struct tcp_info`` of linux/tcp.h: offset in bytes, u32, microseconds; all ones = no sample yet.
_MIN_RTT = struct.Struct("=I")
_MIN_RTT_OFFSET = 148
_NO_SAMPLE = 0xFFFFFFFF
_TCP_INFO = getattr(socket, "TCP_INFO", None) if sys.platform == "linux" else None


def rtt_min_ns(of: socket.socket | None, connect_rtt_ns: int | None) -> int | None:
    """The kernel's minimum round trip to the peer (Linux), else what the connect took; None if unknown.

    ``connect_rtt_ns`` is 0 for a unix socket, and stays 0.
    """
    if _TCP_INFO is not None and of is not None and connect_rtt_ns != 0:
        try:
            info = of.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 256)
        except (OSError, ValueError):  # ValueError: uvloop's, when its loop was closed
            return connect_rtt_ns
        if len(info) >= _MIN_RTT_OFFSET + 4:
            (rtt_us,) = _MIN_RTT.unpack_from(info, _MIN_RTT_OFFSET)
            if rtt_us != _NO_SAMPLE:
                return cast(int, rtt_us) * 1000
    return connect_rtt_ns


def abort(transport: asyncio.Transport, of: socket.socket | None) -> None:
    """Close at once, also on a closed loop. Never for a connection of the parent in a forked child."""
    if of is not None:
        # Ends the connection itself: a child that was forked meanwhile holds the same socket, and closing ours
        # alone would tell the server nothing.
        _shut_down(of)
    try:
        transport.abort()
    except RuntimeError:  # the loop is closed: it will never take asyncio's last step, which closes the socket
        below = getattr(getattr(transport, "_ssl_protocol", None), "_transport", None)  # TLS has one of its own
        last_step = getattr(below or transport, "_call_connection_lost", None)
        if last_step is not None:
            with contextlib.suppress(RuntimeError):
                last_step(None)


def _shut_down(of: socket.socket) -> None:
    # uvloop's transports give a thing that looks like a socket, and raises TypeError for shutdown().
    with contextlib.suppress(OSError, ValueError):  # ValueError: it is closed already, and has no descriptor
        twin = socket.socket(of.family, of.type, of.proto, fileno=of.fileno())
        try:
            twin.shutdown(socket.SHUT_RDWR)
        finally:
            twin.detach()
