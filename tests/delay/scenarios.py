"""What is measured, run inside a delay network: ``python -m tests.delay.scenarios NAME`` prints its figures as JSON.

Server and client are in one process, so that both read one clock. The server is on all addresses; the client goes to
the one whose packets take their time.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from typing import Any

import spanwire
from spanwire.testing import LoopbackServer, Request, Script
from spanwire.testing.delaynet import PEER
from tests.support import assert_adds_up, chat, run, wait_for

#: What the judges know that the server does, in seconds.
QUEUE_S, PREFILL_S, GAP_S, TOKENS = 0.010, 0.250, 0.020, 4
CALLS = 9
LARGE_BYTES = 2 << 20

Timelines = list[dict[str, Any]]


def serve(script: Script, *, tls: bool = True) -> LoopbackServer:
    return LoopbackServer(default=script, host="0.0.0.0", public_host=PEER, tls=tls)


def known(timeline: spanwire.Timeline | None) -> dict[str, Any]:
    assert timeline is not None
    assert_adds_up(timeline)
    return timeline.to_dict()


# --- the network itself -----------------------------------------------------------------------------------------------


def echoes() -> dict[str, Any]:
    """Round trips of single bytes over TCP, in ms."""

    def answer(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            while data := connection.recv(100):
                connection.sendall(data)

    with socket.create_server(("0.0.0.0", 0)) as server:
        thread = threading.Thread(target=answer, args=(server,))
        thread.start()
        with socket.create_connection((PEER, server.getsockname()[1])) as client:
            found = []
            for _ in range(25):
                begin = time.perf_counter()
                client.sendall(b"x")
                client.recv(100)
                found.append((time.perf_counter() - begin) * 1000)
        thread.join()
    return {"round_trips_ms": found}


def paced_packets() -> dict[str, Any]:
    """1,000 datagrams in a second: which arrived, in which order, and how long each took one way, in ms."""
    number, arrived = 1000, []
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender,
    ):
        receiver.bind(("0.0.0.0", 0))
        receiver.settimeout(5)

        def receive() -> None:
            for _ in range(number):
                index, sent = map(float, receiver.recv(1000).split())
                arrived.append((int(index), (time.perf_counter() - sent) * 1000))

        thread = threading.Thread(target=receive)
        thread.start()
        begin = time.perf_counter()
        for index in range(number):
            time.sleep(max(0.0, begin + index / 1000 - time.perf_counter()))
            sender.sendto(f"{index} {time.perf_counter()}".encode(), (PEER, receiver.getsockname()[1]))
        thread.join()
    return {"order": [index for index, _ in arrived], "one_way_ms": [took for _, took in arrived]}


# --- first content ----------------------------------------------------------------------------------------------------


def _firsts(*, warm: bool, blocking: bool) -> dict[str, Any]:
    """Time to the first content as the caller sees it, in ms, of calls in a row on one manager; the first timeline."""
    with serve(Script.say("one two three four")) as server:
        endpoint, call = server.endpoint(), chat()
        near = spanwire.Endpoint(server.url.replace(PEER, "127.0.0.1"), tls=endpoint.tls, proxy=None)
        first_ms: list[float] = []
        timelines: Timelines = []

        async def asynchronous() -> None:
            async with spanwire.ConnectionManager() as other:  # imports what the first call of a process imports
                await other.complete(near, call)
            async with spanwire.ConnectionManager() as manager:
                if warm:
                    await manager.warm(endpoint)
                for number in range(1, CALLS + 2):
                    begin = time.perf_counter()
                    async with manager.stream(endpoint, call) as stream:
                        async for chunk in stream:
                            if chunk.text and len(first_ms) < number:
                                first_ms.append((time.perf_counter() - begin) * 1000)
                    timelines.append(known(stream.timeline))

        def synchronous() -> None:
            with spanwire.SyncConnectionManager() as other:
                other.complete(near, call)
            with spanwire.SyncConnectionManager() as manager:
                if warm:
                    manager.warm(endpoint)
                for number in range(1, CALLS + 2):
                    begin = time.perf_counter()
                    with manager.stream(endpoint, call) as stream:
                        for chunk in stream:
                            if chunk.text and len(first_ms) < number:
                                first_ms.append((time.perf_counter() - begin) * 1000)
                    timelines.append(known(stream.timeline))

        if blocking:
            synchronous()
        else:
            run(asynchronous)
        return {"first_ms": first_ms, "timelines": timelines, "connections": server.connections - 1}


def firsts_async_cold() -> dict[str, Any]:
    return _firsts(warm=False, blocking=False)


def firsts_async_warm() -> dict[str, Any]:
    return _firsts(warm=True, blocking=False)


def firsts_sync_cold() -> dict[str, Any]:
    return _firsts(warm=False, blocking=True)


def firsts_sync_warm() -> dict[str, Any]:
    return _firsts(warm=True, blocking=True)


# --- segments ---------------------------------------------------------------------------------------------------------


def segments() -> dict[str, Any]:
    """A cold call and nine warm ones, and what the server did for each: from the request to the first content, in ms."""
    script = Script(tokens=["word"] * TOKENS, queue_s=QUEUE_S, prefill_s=PREFILL_S, gap_s=GAP_S)
    with serve(script) as server:

        async def body() -> Timelines:
            found: Timelines = []
            async with spanwire.ConnectionManager() as manager:
                for _ in range(CALLS + 1):
                    async with manager.stream(server.endpoint(), chat()) as stream:
                        async for _chunk in stream:
                            pass
                    found.append(known(stream.timeline))
            return found

        return {"timelines": run(body), "server_ms": _server_ms(server.requests)}


def _server_ms(requests: list[Request]) -> list[float]:
    return [(request.content_ns - request.arrived_ns) / 1e6 for request in requests if request.content_ns is not None]


def whole_answers() -> dict[str, Any]:
    """The same for answers that are not streamed."""
    with serve(Script.say("one two", queue_s=QUEUE_S, prefill_s=0.050)) as server:

        async def body() -> Timelines:
            async with spanwire.ConnectionManager() as manager:
                replies = [await manager.complete(server.endpoint(), chat()) for _ in range(CALLS + 1)]
            return [known(reply.timeline) for reply in replies]

        return {"timelines": run(body), "server_ms": _server_ms(server.requests)}


def large_prompt() -> dict[str, Any]:
    """A cold call with a large prompt, and when the server had it, in ms from the moment at which sending began."""
    # Without blanks: the server counts words, which takes it a while.
    call = spanwire.Call.chat("m", [{"role": "user", "content": "x" * LARGE_BYTES}])
    with serve(Script.say("one two", prefill_s=0.100)) as server:

        async def body() -> dict[str, Any]:
            async with spanwire.ConnectionManager() as manager:
                begin_ns = time.perf_counter_ns()
                async with manager.stream(server.endpoint(), call) as stream:
                    async for _chunk in stream:
                        pass
            (request,) = server.requests
            assert len(request.raw) > LARGE_BYTES
            return {
                "timeline": known(stream.timeline),
                "arrived_ms": (request.arrived_ns - begin_ns) / 1e6,
                "server_ms": _server_ms([request])[0],
            }

        return run(body)


# --- the bad ends -----------------------------------------------------------------------------------------------------


def _left_ms(request: Request, since_ns: int) -> float:
    assert request.left_ns is not None
    return (request.left_ns - since_ns) / 1e6


def abandoned() -> dict[str, Any]:
    """How long after a stream was left the server knew of it, in ms."""
    with serve(Script(tokens=["word"] * 1000, gap_s=GAP_S)) as server:

        async def body() -> dict[str, Any]:
            found = []
            async with spanwire.ConnectionManager() as manager:
                for _ in range(CALLS):
                    async with manager.stream(server.endpoint(), chat()) as stream:
                        async for chunk in stream:
                            if chunk.text:
                                break
                        left_ns = time.perf_counter_ns()
                    await wait_for(server, lambda s: s.requests[-1].left)
                    found.append(_left_ms(server.requests[-1], left_ns))
            return {"noticed_ms": found}

        return run(body)


def _stale(*, tls: bool) -> Timelines:
    """Calls each of which is sent while the news that the server has closed the connection is on its way."""
    with serve(Script.say("one two"), tls=tls) as server:

        async def body() -> Timelines:
            found: Timelines = []
            async with spanwire.ConnectionManager() as manager:
                for number in range(1, CALLS + 2):
                    reply = await manager.complete(server.endpoint(), chat())
                    assert server.connections == number
                    found.append(known(reply.timeline))
                    server.disconnect(reset=True)
                    await wait_for(server, lambda s: s.open_connections == 0)
            return found[1:]

        return run(body)


def stale_plain() -> Timelines:
    return _stale(tls=False)


def stale_tls() -> Timelines:
    return _stale(tls=True)


if __name__ == "__main__":
    with contextlib.suppress(OSError):  # before all other processes of a busy machine, where we may ask for it
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    print(json.dumps(globals()[sys.argv[1]]()))
