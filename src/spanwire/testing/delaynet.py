"""A network on this machine whose round trip takes a known time. Linux only; no packet leaves the machine.

A command runs in a network namespace of its own. What it sends to :data:`PEER` comes back to it, later, as if from there::

    client ─── connects to 198.18.0.2 ───►┐  device "delay0": swaps source and destination,  ┌──► 0.0.0.0  server
    198.18.0.1                            └──────── holds each packet for rtt / 2 ───────────┘  (sees 198.18.0.2)

So a server on ``0.0.0.0`` and a client that goes to ``198.18.0.2``, both inside, are ``rtt`` apart, and everything in
between is the kernel's own: handshakes, delayed ACKs, Nagle, slow start, lost connections. The delay is the only thing
that is added, and on demand a limit of the rate: no loss, packets of one connection stay in order. ``127.0.0.1`` is
there too, without a delay; DNS and the outside world are not.

There may be more addresses, each with a distance of its own (:class:`Link`): a server behind a near edge that
terminates TCP, or two servers of which one is far. Each packet's real delay can be recorded (:func:`read_record`), so
that a measurement is judged by what the network did and not by what it was told.

From Python: :func:`run_delayed`. As a command: ``python -m spanwire.testing.delaynet --rtt-ms 40 -- python script.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import gc
import heapq
import ipaddress
import math
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ..errors import ConfigurationError

__all__ = ["PEER", "Link", "Packet", "available", "read_record", "run_delayed"]

#: Where packets turn round. Its network is set aside for measurements like these: RFC 2544, RFC 6890.
PEER = "198.18.0.2"
_OWN = "198.18.0.1"
_NETWORK = ipaddress.IPv4Network("198.18.0.0/24")
_DEVICE = b"delay0"
#: Of Ethernet, so that a large prompt takes as many packets as on most networks.
_MTU = 1500
#: Packets that the kernel keeps for us: several times what one connection has under way, so that none is lost.
_QUEUE_PACKETS = 10_000
#: No network on earth is slower; more is a mix-up of seconds and milliseconds.
_MAX_RTT_S = 10.0
#: A modem's. Slower, and the handshake alone is out of all timeouts; more likely Mbit/s were meant for bit/s.
_MIN_RATE_BIT_S = 1000.0
#: A process that sleeps is awake so much later than it should be (measured: 50 to 100 us on an idle machine, less on a
#: busy one). It happens twice to each packet: when it is read, and when it is due.
_WAKE_NS = 50_000
#: Of real-time processes (1 to 99): before all that have none, and before a measured one that took the lowest.
_PRIORITY = 10
#: Packets that are read before those that are due are looked at again.
_BATCH = 32
#: Exit codes for what is not the command's own, as `env` and `timeout` have them.
_EXIT_OURS, _EXIT_NOT_EXECUTABLE, _EXIT_NOT_FOUND = 125, 126, 127

# linux/sched.h, linux/prctl.h, linux/sockios.h, linux/if.h, linux/if_tun.h
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_PR_SET_PDEATHSIG, _PR_SET_TIMERSLACK = 1, 29
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK = 0x8913, 0x8914, 0x8916, 0x891C
_SIOCSIFMTU, _SIOCSIFTXQLEN = 0x8922, 0x8943
_IFF_UP = 0x1
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


class Link(NamedTuple):
    """The way to an address.

    Attributes:
        rtt_s: the round trip in seconds; a packet takes half of it each way.
        rate_bit_s: each direction of each connection has a line of its own of so many bits per second, on which one
            packet goes after the other, and before which any number may wait. None: no limit.
    """

    rtt_s: float
    rate_bit_s: float | None = None


class Packet(NamedTuple):
    """One that crossed the network, as the device saw it. Times in ns of ``time.perf_counter_ns`` (and ``monotonic``).

    Attributes:
        taken_ns: it was read from the sender's side.
        given_ns: it was written to the receiver's.
        peer: the address whose link it took.
        size: in bytes, with its headers.
    """

    taken_ns: int
    given_ns: int
    peer: str
    size: int

    @property
    def held_s(self) -> float:
        """The delay that it really had, with the time that passed before the device knew of it."""
        return (self.given_ns - self.taken_ns + _WAKE_NS) / 1e9


# --- for tests --------------------------------------------------------------------------------------------------------


@cache
def available() -> str | None:
    """None if a delay network can be made here, else the reason why not, for a skip. Tried once for each process."""
    if sys.platform != "linux":
        return "a delay network needs Linux: network namespaces and a TUN device"
    try:
        done = subprocess.run(_command("--check"), capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"a delay network cannot be tried: {error}"
    return None if done.returncode == 0 else done.stderr.strip()[-500:]


def run_delayed(
    command: Sequence[str],
    *,
    rtt_s: float = 0.040,
    rate_bit_s: float | None = None,
    peers: Mapping[str, Link] | None = None,
    record: str | os.PathLike[str] | None = None,
    timeout_s: float | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command where :data:`PEER` is ``rtt_s`` seconds away, and wait for it.

    Args:
        command: program and arguments, such as ``[sys.executable, "script.py"]``.
        rtt_s: the round trip in seconds; a packet takes half of it each way.
        rate_bit_s: bits per second, as in :class:`Link`.
        peers: further addresses of 198.18.0.0/24, other than .1, and the way to each.
        record: write to this file what happened to each packet, for :func:`read_record`.
        timeout_s: kill the command after so many seconds.
        env: its environment; None: this process's.
        cwd: its working directory; None: this process's.

    Returns:
        What the command wrote, as text, and its exit code; 128 plus the number of the signal that ended it; 126 or 127
        if it cannot be executed or is not there.

    Raises:
        ConfigurationError: a bad argument, or there can be no delay network here (see :func:`available`).
        subprocess.TimeoutExpired: ``timeout_s`` is over.
    """
    if isinstance(command, (str, bytes)) or not command:
        raise ConfigurationError("run_delayed() takes a list: the program and its arguments")
    links = {PEER: Link(rtt_s, rate_bit_s), **(peers or {})}
    for address, link in links.items():
        _check_link(address, link)
    reason = available()
    if reason is not None:
        raise ConfigurationError(reason)
    options = [f"--peer={address}={_link_text(link)}" for address, link in links.items()]
    if record is not None:
        options.append(f"--record={Path(record).resolve()}")
    return subprocess.run(
        _command(*options, "--", *command),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=env,
        cwd=cwd,
        check=False,
    )


def _command(*arguments: str) -> list[str]:
    # -P: a file in the working directory must not stand in for a module of ours. The command is not told.
    return [sys.executable, "-P", "-m", "spanwire.testing.delaynet", *arguments]


def read_record(path: str | os.PathLike[str]) -> list[Packet]:
    """What happened to the packets of a run that was recorded, in the order in which they arrived.

    Raises:
        OSError: there is no such file: the run ended before its command did.
    """
    found = []
    for line in Path(path).read_text(encoding="ascii").splitlines():
        taken, given, peer, size = line.split(" ")
        found.append(Packet(int(taken), int(given), peer, int(size)))
    return found


def _is_number(value: object, low: float, high: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


def _check_link(address: str, link: Link) -> None:
    rtt_s, rate_bit_s = link
    try:
        usable = ipaddress.IPv4Address(address) in list(_NETWORK.hosts())[1:]
    except ValueError:
        usable = False
    if not usable:
        raise ConfigurationError(f"run_delayed(peers=...): an address of {_NETWORK} from .2 on, not {address!r:.40}")
    if not _is_number(rtt_s, 0, _MAX_RTT_S):
        raise ConfigurationError(
            f"run_delayed(rtt_s=...) must be a number of seconds from 0 to {_MAX_RTT_S:.0f}, not {rtt_s!r:.40}"
        )
    if rate_bit_s is not None and not _is_number(rate_bit_s, _MIN_RATE_BIT_S, math.inf):
        raise ConfigurationError(
            f"run_delayed(rate_bit_s=...) must be bits per second, at least {_MIN_RATE_BIT_S:.0f}, "
            f"or None, not {rate_bit_s!r:.40}"
        )


def _link_text(link: Link) -> str:
    return repr(link.rtt_s * 1e3) + ("" if link.rate_bit_s is None else f",{link.rate_bit_s / 1e6!r}")


def _link(text: str) -> tuple[str, Link]:
    """``ADDRESS=RTT_MS[,MBIT_S]``. Raises ValueError, ConfigurationError."""
    address, _, way = text.partition("=")
    rtt_ms, comma, rate = way.partition(",")
    link = Link(float(rtt_ms) / 1e3, float(rate) * 1e6 if comma else None)
    _check_link(address, link)
    return address, link


# --- the namespace and its device -------------------------------------------------------------------------------------


class _Unavailable(Exception):
    """The reason, in words."""


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _enter_namespace() -> None:
    """Put this process into a network namespace of its own, for good; without root, in a user namespace of its own."""
    unshare = _libc().unshare
    if unshare(_CLONE_NEWNET) == 0:
        return
    user, group = os.geteuid(), os.getegid()
    if unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
        raise _Unavailable(
            "this process may not make a network namespace "
            f"({os.strerror(ctypes.get_errno())}); it needs root, or user namespaces that are open to everybody"
        )
    try:  # inside we are who we were outside: files keep their owners
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1", encoding="ascii")
        Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1", encoding="ascii")
    except OSError as error:
        raise _Unavailable(f"this process may not set up a user namespace ({error.strerror}); it needs root") from error


def _open_device() -> int:
    """The device, up, with its address; packets are read from and written to the descriptor that is returned."""
    import fcntl

    try:
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    except OSError as error:
        hint = " (for a container: --device /dev/net/tun)" if error.errno == errno.ENOENT else ""
        raise _Unavailable(f"/dev/net/tun cannot be opened: {error.strerror}{hint}") from error
    try:
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", _DEVICE, _IFF_TUN | _IFF_NO_PI))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            for request, address in ((_SIOCSIFADDR, _OWN), (_SIOCSIFNETMASK, str(_NETWORK.netmask))):
                sockaddr = struct.pack("=HH4s16x", socket.AF_INET, 0, socket.inet_aton(address))
                fcntl.ioctl(control, request, struct.pack("16s24s", _DEVICE, sockaddr))
            fcntl.ioctl(control, _SIOCSIFMTU, struct.pack("16si20x", _DEVICE, _MTU))
            with contextlib.suppress(PermissionError):  # in a user namespace; it stays at the device's own 500
                fcntl.ioctl(control, _SIOCSIFTXQLEN, struct.pack("16si20x", _DEVICE, _QUEUE_PACKETS))
            for name in (b"lo", _DEVICE):
                asked = fcntl.ioctl(control, _SIOCGIFFLAGS, struct.pack("16sH22x", name, 0))
                flags: int = struct.unpack("16sH22x", asked)[1]
                fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH22x", name, flags | _IFF_UP))
    except OSError as error:
        os.close(device)
        raise _Unavailable(f"a TUN device cannot be set up: {error.strerror}; it needs root") from error
    return device


# --- the delay --------------------------------------------------------------------------------------------------------


def turned(packet: bytes) -> bytes | None:
    """An IPv4 packet with source and destination swapped; None for what is no IPv4, such as IPv6's search for routers.

    Checksums stay valid: those of IP, TCP and UDP are sums, to which both addresses belong.
    """
    if len(packet) < 20 or packet[0] >> 4 != 4:
        return None
    return b"".join((packet[:12], packet[16:20], packet[12:16], packet[20:]))


class _Way:
    """The packets to one peer: how long each is held."""

    def __init__(self, link: Link) -> None:
        # The device's own lateness is part of the delay.
        self._delay_ns = max(0, int(link.rtt_s / 2 * 1e9) - 2 * _WAKE_NS)
        self._bit_ns = None if link.rate_bit_s is None else 1e9 / link.rate_bit_s
        self._free_ns: dict[bytes, int] = {}

    def due_ns(self, packet: bytes, now_ns: int) -> int:
        """When it is to be given back."""
        if self._bit_ns is None:
            return now_ns + self._delay_ns
        # Both ends are here, and both directions go to the peer. The two ports, in their order, tell them apart. They
        # follow the header, whose length in words is the low half of the first byte.
        at = 4 * (packet[0] & 15)
        line = packet[at : at + 4]
        begins_ns = max(now_ns, self._free_ns.get(line, 0))
        self._free_ns[line] = over_ns = begins_ns + int(8 * len(packet) * self._bit_ns)
        return over_ns + self._delay_ns


def _pump(device: int, end: int, links: Mapping[str, Link], seen: list[Packet] | None) -> None:
    """Take packets from the device and give each back when it is due, until ``end`` becomes readable.

    Args:
        device: the TUN device.
        end: a descriptor.
        links: by address; packets to others are lost.
        seen: where to note them.
    """
    ways = {socket.inet_aton(address): _Way(link) for address, link in links.items()}
    held: list[tuple[int, int, int, bytes]] = []  # due, number in order of arrival, arrival, packet
    number = 0
    while True:
        now_ns = time.monotonic_ns()
        while held and held[0][0] <= now_ns:
            _, _, taken_ns, packet = heapq.heappop(held)
            os.write(device, packet)
            if seen is not None:
                peer = socket.inet_ntoa(packet[12:16])
                seen.append(Packet(taken_ns, time.monotonic_ns(), peer, len(packet)))
        wait_s = (held[0][0] - now_ns) / 1e9 if held else None
        # Not poll() and not epoll: they wait for whole milliseconds.
        ready, _, _ = select.select([device, end], [], [], wait_s)
        if end in ready:
            return
        if not ready:
            continue
        for _ in range(_BATCH):
            try:
                back = turned(os.read(device, _MTU))
            except BlockingIOError:
                break
            way = None if back is None else ways.get(back[12:16])
            if back is not None and way is not None:
                taken_ns = time.monotonic_ns()
                number += 1
                heapq.heappush(held, (way.due_ns(back, taken_ns), number, taken_ns, back))


def _write_record(path: str, seen: Sequence[Packet]) -> None:
    lines = [f"{packet.taken_ns} {packet.given_ns} {packet.peer} {packet.size}\n" for packet in seen]
    Path(path).write_text("".join(lines), encoding="ascii")


def _be_punctual() -> None:
    """Ask for exact timers and, where we may, to come first: a busy machine must not add to the delay."""
    _libc().prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)  # ns; the default of 50 us would be added to each wait
    gc.freeze()
    with contextlib.suppress(OSError):  # only root may; on an idle machine it makes no difference
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_PRIORITY))


# --- as a command -----------------------------------------------------------------------------------------------------


def _start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    libc, parent = _libc(), os.getpid()

    def die_with_parent() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(_EXIT_OURS)

    return subprocess.Popen(command, preexec_fn=die_with_parent)  # noqa: PLW1509 - there are no threads here


def _run(command: Sequence[str], links: Mapping[str, Link], record: str | None) -> int:
    _enter_namespace()
    device = _open_device()
    child: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, _frame: object) -> None:
        if child is None:
            raise SystemExit(128 + number)
        child.send_signal(number)

    # Handlers, not SIG_IGN, which the command would inherit. Ctrl-C goes to the command too: its end is ours.
    signal.signal(signal.SIGINT, lambda *_: None)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, pass_on)
    try:
        child = _start(command)
    except OSError as error:
        print(f"{command[0]} cannot be started: {error.strerror}", file=sys.stderr)
        return _EXIT_NOT_FOUND if error.errno == errno.ENOENT else _EXIT_NOT_EXECUTABLE
    _be_punctual()
    end = os.pidfd_open(child.pid)
    seen: list[Packet] | None = None if record is None else []
    _pump(device, end, links, seen)
    code = child.wait()
    if record is not None and seen is not None:
        try:
            _write_record(record, seen)
        except OSError as error:
            print(f"{record} cannot be written: {error.strerror}", file=sys.stderr)
            return _EXIT_OURS
    return code if code >= 0 else 128 - code


def _check() -> int:
    _enter_namespace()
    os.close(_open_device())
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        raise _Unavailable(f"this kernel has no pidfd_open ({error.strerror}); Linux 5.3 has") from error
    return 0


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m spanwire.testing.delaynet",
        usage="%(prog)s [--rtt-ms MS] [--peer ADDRESS=MS[,MBIT/S]] [--record FILE] -- COMMAND [ARGUMENT ...]",
        description=f"Runs a command where {PEER} is a server on 0.0.0.0 of its own, so many milliseconds away.",
        epilog="Exits as the command does; with 125 where there can be no delay network.",
    )
    parser.add_argument("--rtt-ms", type=float, default=40.0, metavar="MS", help="round trip (default: %(default)s)")
    parser.add_argument("--rate-mbit", type=float, metavar="MBIT/S", help="limit of the rate (default: none)")
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="ADDRESS=MS[,MBIT/S]",
        help=f"a further address of {_NETWORK}, its round trip and its limit; may be repeated",
    )
    parser.add_argument("--record", metavar="FILE", help="write each packet's times to this file at the end")
    parser.add_argument("--check", action="store_true", help="run nothing; say whether it would work")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    own, command = given, []
    if "--" in given:
        own, command = given[: given.index("--")], given[given.index("--") + 1 :]
    parser = _arguments()
    options = parser.parse_args(own)
    links = {PEER: Link(options.rtt_ms / 1e3, options.rate_mbit * 1e6 if options.rate_mbit is not None else None)}
    if not _is_number(options.rtt_ms, 0, _MAX_RTT_S * 1e3):
        parser.error(f"--rtt-ms must be from 0 to {_MAX_RTT_S * 1000:.0f}, not {options.rtt_ms}")
    try:
        _check_link(PEER, links[PEER])
        links.update(map(_link, options.peer))
    except (ValueError, ConfigurationError) as error:
        parser.error(f"--peer, --rate-mbit: {error}")
    if not command and not options.check:
        parser.error("no command; it stands after --")
    if sys.platform != "linux":
        print("no delay network: it needs Linux", file=sys.stderr)
        return _EXIT_OURS
    try:
        return _check() if options.check else _run(command, links, options.record)
    except _Unavailable as error:
        print(f"no delay network: {error}", file=sys.stderr)
        return _EXIT_OURS


if __name__ == "__main__":
    sys.exit(main())
