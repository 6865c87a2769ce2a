"""What our connections do with the socket itself, whichever version of HTTP runs on it.

Public, for transports of third parties: :class:`RoundTrip`, which tells ``Marks.rtt_ns`` at the end of an exchange, and
:func:`abort`, which closes a connection at once, also when its loop is closed. In a connection's ``connection_made``::

    self.round_trip.socket = transport.get_extra_info("socket")

and at the end of each exchange ``marks.rtt_ns = connection.round_trip.min_ns()``. The timeline tells the network from the
model by it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import sys
import time
from typing import cast

__all__ = ["RoundTrip", "abort", "backlog_ns", "limit_reads", "limit_unsent", "min_rtt_ns"]

#: ``tcpi_min_rtt`` in ``struct tcp_info`` of linux/tcp.h: offset in bytes, u32, microseconds; all ones = no sample yet.
_MIN_RTT = struct.Struct("=I")
_MIN_RTT_OFFSET = 148
_NO_SAMPLE = 0xFFFFFFFF
#: From ``tcpi_snd_mss``: that (bytes), ``tcpi_rcv_mss``, ``tcpi_unacked`` (segments on their way). Then
#: ``tcpi_notsent_bytes``, ``tcpi_min_rtt``, two counts, and ``tcpi_delivery_rate`` (u64, bytes per second).
_UNDERWAY = struct.Struct("=16xI4xI116xIIIIQ")
_TCP_INFO = getattr(socket, "TCP_INFO", None) if sys.platform == "linux" else None
_FRESH_NS = 1_000_000_000
#: A young connection's minimum still falls, so it is asked each time for so many times.
_YOUNG_ASKS = 16
#: How much of a request may lie in the kernel's buffer unsent, in bytes (Linux, macOS). Without this limit the kernel takes
#: up to 4 MiB at once, and ``send`` ends long before the upload does: what is left of it would be counted as the
#: server's. A large one costs no throughput, since nothing is taken from what is on its way.
_UNSENT_BYTES = 64 * 1024
_NOTSENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", None)
#: How much asyncio makes room for at each read, in bytes, whatever comes. By itself 256 KiB (``max_size`` in its
#: selector_events.py and sslproto.py): from 128 KiB up (glibc's M_MMAP_THRESHOLD) the kernel may have to map that, clear what
#: is used of it and take it away again, for each token. A TLS record is 16 KiB at most.
_READ_BYTES = 64 * 1024


def min_rtt_ns(of: socket.socket) -> int | None:
    """The kernel's minimum round trip to the peer, in ns (Linux); None if it does not know."""
    if _TCP_INFO is None:
        return None
    try:
        info = of.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _MIN_RTT_OFFSET + _MIN_RTT.size)
    except (OSError, ValueError, TypeError):  # closed, a unix socket, uvloop's when its loop was closed
        return None
    if len(info) < _MIN_RTT_OFFSET + _MIN_RTT.size:  # an old kernel
        return None
    (rtt_us,) = _MIN_RTT.unpack_from(info, _MIN_RTT_OFFSET)
    return None if rtt_us == _NO_SAMPLE else cast(int, rtt_us) * 1000


def backlog_ns(of: socket.socket) -> int:
    """How long what the kernel has of our bytes still takes to be at the peer, less the way there, in ns (Linux).

    What was written and is not acknowledged, at the rate at which the last bytes were delivered, less a round trip. An
    estimate. 0 if nothing waits, or nothing is known.
    """
    if _TCP_INFO is None:
        return 0
    try:
        info = of.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _UNDERWAY.size)
    except (OSError, ValueError, TypeError):  # as above
        return 0
    if len(info) < _UNDERWAY.size:
        return 0
    values: tuple[int, ...] = _UNDERWAY.unpack(info)
    segment, segments, unsent, rtt_us, _, _, rate = values
    if not rate or rtt_us == _NO_SAMPLE:
        return 0
    return max(0, (segments * segment + unsent) * 1_000_000_000 // rate - rtt_us * 1000)


class RoundTrip:
    """What is known of the round trip to the peer.

    Attributes:
        socket: of the connection, None before it is made.
        connect_ns: what the TCP connect took; 0 for a unix socket; None if unknown.
        through_proxy: what the kernel knows is the round trip to a proxy, so that to the peer is unknown.
    """

    __slots__ = ("_asked_ns", "_asks", "_min_ns", "connect_ns", "socket", "through_proxy")

    def __init__(self) -> None:
        self.socket: socket.socket | None = None
        self.connect_ns: int | None = None
        self.through_proxy = False
        self._min_ns: int | None = None
        self._asked_ns = 0
        self._asks = 0

    def min_ns(self) -> int | None:
        """The kernel's minimum round trip to the peer (Linux), else what the connect took; None if unknown.

        Asked of the kernel at most once a second, after the first few times: it is a minimum over minutes.
        """
        if self.through_proxy:
            return None
        if self.socket is None or self.connect_ns == 0:
            return self.connect_ns
        now_ns = time.perf_counter_ns()
        if self._asks < _YOUNG_ASKS or now_ns - self._asked_ns > _FRESH_NS:
            self._asks += 1
            self._asked_ns = now_ns
            found_ns = min_rtt_ns(self.socket)
            if found_ns is not None:
                self._min_ns = found_ns
        return self._min_ns if self._min_ns is not None else self.connect_ns

    def backlog_ns(self) -> int:
        """See :func:`backlog_ns`; 0 for a unix socket."""
        return backlog_ns(self.socket) if self.socket is not None and self.connect_ns != 0 else 0


def limit_unsent(of: socket.socket | None) -> None:
    """Keep at most ``_UNSENT_BYTES`` of what is written unsent in the kernel, where it can."""
    if _NOTSENT_LOWAT is not None and of is not None:
        with contextlib.suppress(OSError):  # a unix socket: the server reads what is written
            of.setsockopt(socket.IPPROTO_TCP, _NOTSENT_LOWAT, _UNSENT_BYTES)


def limit_reads(transport: asyncio.BaseTransport) -> None:
    """Have asyncio read ``_READ_BYTES`` at once; other loops, which keep a buffer, are left as they are."""
    for reader in (transport, getattr(transport, "_ssl_protocol", None)):
        if getattr(reader, "max_size", 0) > _READ_BYTES:
            reader.max_size = _READ_BYTES  # type: ignore[union-attr]


def abort(transport: asyncio.WriteTransport, of: socket.socket | None) -> None:
    """Close at once, also on a closed loop. Never for a connection of the parent in a forked child.

    The protocol's ``connection_lost`` is called: by the loop, or, where that is closed, here.
    """
    if of is not None:
        # Ends the connection itself: a child that was forked meanwhile holds the same socket, and closing ours
        # alone would tell the server nothing.
        _shut_down(of)
    try:
        transport.abort()
    except AttributeError:  # Python up to 3.11.2, TLS that was closed twice
        pass
    except RuntimeError:  # the loop is closed: it will never take asyncio's last step, which closes the socket
        bottom: object = transport
        while (below := getattr(getattr(bottom, "_ssl_protocol", None), "_transport", None)) is not None:
            bottom = below  # TLS has a transport of its own, and TLS inside TLS (an https:// proxy) has two
        last_step = getattr(bottom, "_call_connection_lost", None)
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
