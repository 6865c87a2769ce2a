"""What is known of a socket, and closing it, also when its loop is gone."""

from __future__ import annotations

import asyncio
import gc
import socket
import sys
import warnings
from collections.abc import Callable

import pytest

from spanwire.net import sockets


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
        before = sockets.rtt_min_ns(of, 5)
        assert before is not None
        loop.close()
        assert sockets.rtt_min_ns(of, 5) in (5, before)
        sockets.abort(transport, of)
        assert sockets.rtt_min_ns(of, 5) == 5
        with peer:
            assert peer.recv(1) == b""
        del transport
        gc.collect()


def test_a_unix_socket_has_no_round_trip_and_what_is_unknown_stays_so() -> None:
    assert sockets.rtt_min_ns(None, 0) == 0
    assert sockets.rtt_min_ns(None, None) is None
    with socket.socket() as unconnected:
        assert sockets.rtt_min_ns(unconnected, 0) == 0
        assert sockets.rtt_min_ns(unconnected, 7) == 7
