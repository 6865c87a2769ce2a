"""What is known of a socket, and closing it, also when its loop is gone."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import socket
import ssl
import sys
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import trustme

from spanwire.net import sockets

Connect = Callable[[asyncio.Protocol], Awaitable[asyncio.Transport]]


def uvloop_loop() -> asyncio.AbstractEventLoop:
    import uvloop

    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


LOOPS = [
    asyncio.new_event_loop,
    pytest.param(uvloop_loop, marks=pytest.mark.skipif(sys.platform == "win32", reason="there is no uvloop")),
]


@pytest.mark.parametrize("new_loop", LOOPS)
def test_on_a_loop_that_was_closed(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # uvloop tells at once what is open, whoever owns it
        loop = new_loop()
        transport, _ = loop.run_until_complete(loop.create_connection(asyncio.Protocol, *listening.getsockname()))
        peer, _ = listening.accept()
        of = transport.get_extra_info("socket")
        known, asked_late = round_trip(of, 5), round_trip(of, 5)
        before = known.min_ns()
        assert before is not None
        loop.close()
        assert known.min_ns() == before
        assert asked_late.min_ns() in (5, before)
        sockets.abort(transport, of)
        assert round_trip(of, 5).min_ns() == 5
        assert known.min_ns() == before
        with peer:
            assert peer.recv(1) == b""
        del transport
        gc.collect()


def test_the_kernel_is_asked_each_time_at_first_and_then_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_connection(listening.getsockname()) as of:
        known = round_trip(of, 5)
        falling = itertools.count(999, -1)
        monkeypatch.setattr(sockets, "min_rtt_ns", lambda _of: next(falling))
        seen = [known.min_ns() for _ in range(50)]
        young = sockets._YOUNG_ASKS
        assert seen == [*range(999, 999 - young, -1), *[1000 - young] * (50 - young)]
        monkeypatch.setattr(sockets, "_FRESH_NS", 0)
        assert known.min_ns() == 999 - young


def test_a_unix_socket_has_no_round_trip_and_what_is_unknown_stays_so() -> None:
    assert round_trip(None, 0).min_ns() == 0
    assert round_trip(None, None).min_ns() is None
    with socket.socket() as unconnected:
        assert round_trip(unconnected, 0).min_ns() == 0
        assert round_trip(unconnected, 7).min_ns() == 7


@pytest.mark.skipif(not hasattr(socket, "TCP_NOTSENT_LOWAT"), reason="this system has no such limit")
def test_little_is_left_unsent_in_the_kernel_and_a_unix_socket_is_left_alone() -> None:
    with socket.socket() as of:
        sockets.limit_unsent(of)
        assert of.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == 64 * 1024
    with socket.socket(socket.AF_UNIX) as local:
        sockets.limit_unsent(local)
    sockets.limit_unsent(None)


class Reader(asyncio.Protocol):
    """Notes how much each read has brought."""

    def __init__(self, whole: int) -> None:
        self.sizes: list[int] = []
        self.done = asyncio.get_running_loop().create_future()
        self._whole = whole

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        sockets.limit_reads(transport)

    def data_received(self, data: bytes) -> None:
        self.sizes.append(len(data))
        if sum(self.sizes) == self._whole:
            self.done.set_result(None)


@pytest.mark.parametrize("new_loop", LOOPS)
def test_no_read_makes_room_for_more_than_its_limit(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def body() -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.setblocking(False)
            whole = theirs.send(bytes(150_000))
            assert whole > 2 * 64 * 1024
            loop = asyncio.get_running_loop()
            transport, reader = await loop.create_connection(lambda: Reader(whole), sock=ours)
            await reader.done
            if isinstance(loop, asyncio.SelectorEventLoop):  # the others keep a buffer of their own
                assert max(reader.sizes) == 64 * 1024
            transport.abort()

    with contextlib.closing(new_loop()) as loop:
        loop.run_until_complete(body())


@contextlib.asynccontextmanager
async def tls_server(serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], object]) -> AsyncIterator[Connect]:
    """Gives what connects to it."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority = trustme.CA()
    authority.issue_cert("127.0.0.1").configure_cert(context)
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context) as server:  # type: ignore[arg-type]
        port = server.sockets[0].getsockname()[1]

        async def connect(protocol: asyncio.Protocol) -> asyncio.Transport:
            loop = asyncio.get_running_loop()
            return (await loop.create_connection(lambda: protocol, "127.0.0.1", port, ssl=trust))[0]

        yield connect


def test_no_read_of_tls_makes_room_for_more_than_its_limit() -> None:
    """What it brings tells nothing here: a record of TLS is smaller."""

    async def body() -> None:
        async with tls_server(lambda reader, writer: reader.read()) as connect:
            transport = await connect(Reader(1))
            assert transport._ssl_protocol.max_size == 64 * 1024  # type: ignore[attr-defined]
            sockets.abort(transport, None)

    asyncio.run(body())


def test_tls_that_was_closed_twice_is_aborted_without_a_word() -> None:
    """Python up to 3.11.2 raises an AttributeError then."""

    async def body() -> None:
        async with tls_server(lambda reader, writer: reader.read()) as connect:
            transport = await connect(asyncio.Protocol())
            transport.close()
            transport.close()
            sockets.abort(transport, None)

    asyncio.run(body())


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_what_the_peer_has_not_taken_is_a_backlog() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_connection(listening.getsockname()) as of:
        known = round_trip(of, 5)
        assert known.backlog_ns() == 0
        peer, _ = listening.accept()
        with peer:
            of.setblocking(False)
            sent = 0
            with contextlib.suppress(BlockingIOError):
                while True:
                    sent += of.send(bytes(65536))
            assert known.backlog_ns() > 0
            of.setblocking(True)
            while sent > 0:
                sent -= len(peer.recv(1 << 20))
            peer.sendall(b"x")
            assert of.recv(1) == b"x"  # with which the last bytes are acknowledged
            assert known.backlog_ns() == 0
            assert round_trip(of, 0).backlog_ns() == 0
    assert sockets.backlog_ns(of) == 0  # closed
    assert round_trip(None, None).backlog_ns() == 0
    with socket.socket(socket.AF_UNIX) as local:
        assert sockets.backlog_ns(local) == 0


def round_trip(of: socket.socket | None, connect_ns: int | None) -> sockets.RoundTrip:
    made = sockets.RoundTrip()
    made.socket, made.connect_ns = of, connect_ns
    return made
