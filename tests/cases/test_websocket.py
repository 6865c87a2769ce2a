"""C22 and C23, and C21 over WebSocket: messages over a limit, pings while somebody is slow, and a fixed number of clients.

Pings are scaled to a fifth of the corpus's times.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, Self

import pytest

import spanwire
from spanwire import errors
from spanwire.testing import LoopbackServer, Script
from tests.cases.play import WAYS, Seen, ask, nothing_left
from tests.support import AT_ONCE, NEVER, chat, hello, run

MEBIBYTE = 1024 * 1024
PINGS = {"ping_interval_s": 0.1, "ping_timeout_s": 0.2}


@contextlib.contextmanager
def serving(*scripts: Any, **options: Any) -> Iterator[LoopbackServer]:
    with LoopbackServer([*scripts], part="websocket", options=options) as server:
        yield server


def text_event(size: int) -> bytes:
    """An event whose message has so many bytes."""
    frame = b'{"type":"response.output_text.delta","item_id":"i","output_index":0,"content_index":0,"delta":"%b"}'
    return frame % (b"x" * (size - len(frame) + 2))


def answer(size: int) -> Script:
    """An answer with one message of that size."""
    begin = b'{"type":"response.created","response":{"id":"r1","model":"m"}}'
    end = b'{"type":"response.completed","response":{"id":"r1","model":"m","status":"completed","output":[]}}'
    return Script(writes=[begin, text_event(size), end])


# --- C22 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_c22_a_message_of_a_mebibyte_and_one_byte(way: str) -> None:
    with serving(answer(MEBIBYTE + 1)) as server, nothing_left(server):
        seen = ask(way, server.endpoint(retries=NEVER))
        assert seen.error is None
        assert len(seen.got.text) > MEBIBYTE - 200
        assert seen.known.outcome == "completed"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("over", [0, 1])
def test_c22_over_our_limit(way: str, over: int) -> None:
    with serving(answer(MEBIBYTE + over), hello()) as server, nothing_left(server):
        server.script(lambda _request: hello(), model="next")
        endpoint = server.endpoint(retries=AT_ONCE, limits=spanwire.Limits(max_event_bytes=MEBIBYTE))
        seen = ask(way, endpoint, then=False)
        if not over:
            assert seen.error is None
            return
        assert isinstance(seen.error, errors.MessageTooBig)
        assert "we have closed with 1009" in str(seen.error)
        assert "Limits.max_event_bytes" in str(seen.error)
        assert seen.error.retryable is False
        assert seen.known.outcome == "error"
        assert len(server.requests) == 1


@pytest.mark.parametrize("way", WAYS)
def test_c22_over_the_servers_limit(way: str) -> None:
    with LoopbackServer([hello()], part="websocket", options={"max_size": 1000}) as server:
        call = spanwire.Call.chat("m", [{"role": "user", "content": "x" * 2000}])
        seen = ask(way, server.endpoint(retries=AT_ONCE), call)
        assert isinstance(seen.error, errors.MessageTooBig)
        assert "the server closed with 1009" in str(seen.error)
        assert seen.error.retryable is False
        assert seen.known.outcome == "error"
        assert server.connections == 1
        server.wait_for(lambda s: s.open_connections == 0)
        assert all("PayloadTooBig" in fault for fault in server.faults)


# --- C23 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_c23_a_the_server_computes_and_answers_pings(way: str) -> None:
    with serving(hello(prefill_s=0.5)) as server, nothing_left(server):
        seen = ask(way, server.endpoint(retries=NEVER, options=PINGS))
        assert seen.error is None
        assert seen.got.text == "Hello from the loopback server."
        assert seen.known.connection is not None
        rtt_s = seen.known.connection.rtt_min_s
        assert rtt_s is not None
        assert rtt_s < 0.3, "measured by pings, and without the model's time in it"


@pytest.mark.parametrize("way", WAYS)
def test_c23_b_the_servers_loop_is_blocked(way: str) -> None:
    """It answers nothing for longer than interval and limit together."""

    def blocks(_request: Any) -> Script:
        time.sleep(0.5)
        return hello()

    with serving(blocks) as server, nothing_left(server):
        seen = ask(way, server.endpoint(retries=NEVER, options=PINGS))
        assert seen.error is None
        assert seen.got.text == "Hello from the loopback server."
        assert seen.known.outcome == "completed"


@pytest.mark.parametrize("way", WAYS)
def test_c23_b_a_server_that_answers_no_ping_at_all(way: str) -> None:
    with serving(hello(prefill_s=0.5), answers_pings=False) as server, nothing_left(server):
        seen = ask(way, server.endpoint(retries=NEVER, options=PINGS))
        assert seen.error is None
        assert seen.known.outcome == "completed"


def test_c23_c_our_consumer_blocks_our_loop() -> None:
    with serving(hello(gap_s=0.02)) as server, nothing_left(server):

        async def body() -> None:
            async with spanwire.ConnectionManager() as manager:
                endpoint = server.endpoint(retries=NEVER, options=PINGS)
                for _ in range(2):
                    text = ""
                    async with manager.stream(endpoint, chat()) as stream:
                        async for chunk in stream:
                            if not text and chunk.text:
                                time.sleep(0.4)  # noqa: ASYNC251 - that is what is tested
                            text += chunk.text
                    assert text == "Hello from the loopback server."
                    assert stream.timeline.outcome == "completed"
                    time.sleep(0.4)  # noqa: ASYNC251 - and while it is idle
                    await asyncio.sleep(0)

        run(body)
        assert server.connections == 1


class Dropping:
    """Passes bytes on, up to the first content; then it drops them all: a network that is gone without a word."""

    def __init__(self, port: int) -> None:
        self._behind = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self.dead = threading.Event()
        self._pairs: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._thread.join(5)
        for one in self._pairs:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                there = socket.create_connection(("127.0.0.1", self._behind))
                self._pairs += [client, there]
                for source, sink in ((client, there), (there, client)):
                    threading.Thread(target=self._pass, args=(source, sink), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if not self.dead.is_set():
                    sink.sendall(data)
                if b"output_text.delta" in data:
                    self.dead.set()
            if not self.dead.is_set():
                sink.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("way", WAYS)
def test_c23_d_the_network_drops_everything(way: str) -> None:
    with serving(hello(gap_s=0.05)) as server, Dropping(int(server.origin.rpartition(":")[2])) as network:
        endpoint = spanwire.Endpoint(
            f"ws://127.0.0.1:{network.port}/v1",
            proxy=None,
            retries=NEVER,
            options=PINGS,
            timeouts=spanwire.Timeouts(idle_s=0.5),
        )
        seen: Seen = ask(way, endpoint)
        assert isinstance(seen.error, errors.CallTimeout), seen.error
        assert seen.error.limit == "idle_s"
        assert "1011" not in str(seen.error)
        assert seen.known.outcome == "timeout"


# --- C21 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["async", "sync"])
def test_c21_a_server_with_a_fixed_number_of_clients(way: str) -> None:
    """Two places, five calls of 200 ms: all are served, the wait is queue, and no limit for reading is met."""
    with serving(Script.say("a", prefill_s=0.2), max_clients=2, when_full="503") as server, nothing_left(server):
        endpoint = server.endpoint(
            retries=NEVER,
            limits=spanwire.Limits(queue_timeout_s=10),
            timeouts=spanwire.Timeouts(first_content_s=0.5, idle_s=0.5),
        )
        replies: list[spanwire.Reply] = []
        if way == "async":

            async def body() -> None:
                async with spanwire.ConnectionManager() as manager:
                    replies.extend(await asyncio.gather(*(manager.complete(endpoint, chat()) for _ in range(5))))

            run(body)
        else:
            with spanwire.SyncConnectionManager() as manager:
                threads = [
                    threading.Thread(target=lambda: replies.append(manager.complete(endpoint, chat())))
                    for _ in range(5)
                ]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
        assert [reply.text for reply in replies] == ["a"] * 5
        waits = []
        for reply in replies:
            assert reply.timeline is not None
            queue = reply.timeline.segments.get("queue")
            waits.append(0.0 if queue is None else queue.duration_s)
        waits.sort()
        assert waits[1] < waits[2]
        assert waits[4] > 0.3
