from __future__ import annotations

import socket
import sys

import pytest
from spanwire_grpc.roundtrip import open_sockets, rtt_of_new_ns

import spanwire
from spanwire.testing import LoopbackServer
from tests.support import chat, hello, read, run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asked of Linux's kernel")


def test_a_socket_that_is_new_is_asked_and_left_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as old, listener.accept()[0] as accepted:
            before = open_sockets()
            assert rtt_of_new_ns(before, port) is None
            with socket.create_connection(("127.0.0.1", port)) as new, listener.accept()[0]:
                found = rtt_of_new_ns(before, port)
                assert found is not None
                assert 0 < found < 1_000_000_000
                assert rtt_of_new_ns(before, port + 1) is None
                new.sendall(b"x")
            accepted.sendall(b"y")
            assert old.recv(1) == b"y"
        assert set(open_sockets()) <= set(before)


@pytest.mark.parametrize("tls", [False, True])
def test_the_network_is_on_the_timeline(tls: bool) -> None:
    with LoopbackServer([hello(prefill_s=0.02)], part="grpc", tls=tls) as server:

        async def body() -> spanwire.Timeline:
            async with spanwire.ConnectionManager() as manager:
                async with manager.stream(server.endpoint(), chat()) as stream:
                    await read(stream)
            return stream.timeline

        timeline = run(body)
    assert timeline.connection is not None
    assert timeline.connection.rtt_min_s is not None
    assert timeline.segments["network"].parts["to_and_back"].duration_s > 0
    assert timeline.segments["model"].parts["prefill"].duration_s > 0.015
