"""Runs scenarios inside a delay network: ``python -m benchmarks.truth.inside NAME ...`` prints what came of them as JSON.

Server and client are in one process and so is an edge, in threads of their own: all read one clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

import spanwire
from benchmarks.truth import edges
from benchmarks.truth.h2 import h2_server
from benchmarks.truth.scenarios import (
    BACKOFF_MS,
    DNS_S,
    LATE_S,
    READ_S,
    SCENARIOS,
    UPLOAD_BYTES,
    Scenario,
    address,
)
from spanwire.testing import LoopbackServer, Request, Script

CALLS = 9
_NAME = "server.test"


class Server(Protocol):
    """Of either protocol."""

    @property
    def requests(self) -> list[Request]:
        """What has arrived."""
        ...


@dataclass
class Stage:
    """What a driver works with."""

    scenario: Scenario
    server: Server
    endpoint: spanwire.Endpoint
    script: Callable[[Script], None]
    facts: dict[str, float] = field(default_factory=dict)
    calls: list[dict[str, Any]] = field(default_factory=list)

    def note(
        self, begin_ns: int, timeline: spanwire.Timeline | None, *, request: Request | None = None, **facts: float
    ) -> None:
        """Keep a call that ended just now: its timeline, and what it was given."""
        assert timeline is not None
        assert timeline.outcome == "completed", timeline
        end_ns = time.perf_counter_ns()
        request = request or self.server.requests[-1]
        assert request.ended_ns is not None
        times = request.times
        self.calls.append(
            {
                "begin_ns": begin_ns,
                "end_ns": end_ns,
                "timeline": timeline.to_dict(),
                # The way back is half a round trip, which the judge takes off.
                "unread": (end_ns - request.ended_ns) / 1e6,
                "upload": (request.arrived_ns - begin_ns) / 1e6,
                "queue": (times.queue_s or 0.0) * 1e3,
                "prefill": (times.prefill_s or 0.0) * 1e3,
                "decode": (times.decode_s or 0.0) * 1e3,
                "server": (times.total_s or 0.0) * 1e3,
                **self.facts,
                **facts,
            }
        )


def _chat(content: str = "Say hello") -> spanwire.Call:
    # With usage: some servers report beside it.
    return spanwire.Call.chat("m", [{"role": "user", "content": content}], stream_options={"include_usage": True})


def _call(stage: Stage) -> spanwire.Call:
    if stage.scenario.streamed:
        return _chat()
    return spanwire.Call.chat("m", [{"role": "user", "content": "Say hello"}])


async def _once(stage: Stage, manager: spanwire.ConnectionManager, call: spanwire.Call) -> spanwire.Timeline | None:
    if not stage.scenario.streamed:
        return (await manager.complete(stage.endpoint, call)).timeline
    async with manager.stream(stage.endpoint, call) as stream:
        async for _ in stream:
            pass
    return stream.timeline


# --- what the client does ---------------------------------------------------------------------------------------------


async def reused(stage: Stage) -> None:
    """Calls in a row on one connection; the first one, which makes it, does not count."""
    call = _call(stage)
    async with spanwire.ConnectionManager() as manager:
        await _once(stage, manager, call)
        for _ in range(CALLS):
            begin_ns = time.perf_counter_ns()
            stage.note(begin_ns, await _once(stage, manager, call))


async def cold(stage: Stage) -> None:
    """A manager, and so a connection, for each."""
    for _ in range(CALLS):
        async with spanwire.ConnectionManager() as manager:
            begin_ns = time.perf_counter_ns()
            stage.note(begin_ns, await _once(stage, manager, _call(stage)))


async def warmed(stage: Stage) -> None:
    """The same, with the connection made before the call."""
    for _ in range(CALLS):
        async with spanwire.ConnectionManager() as manager:
            await manager.warm(stage.endpoint)
            begin_ns = time.perf_counter_ns()
            stage.note(begin_ns, await _once(stage, manager, _call(stage)))


async def _read_slowly(stage: Stage, *, first_s: float, each_s: float) -> None:
    async with spanwire.ConnectionManager() as manager:
        await _once(stage, manager, _chat())
        for _ in range(CALLS):
            begin_ns = time.perf_counter_ns()
            async with manager.stream(stage.endpoint, _chat()) as stream:
                if first_s:
                    await asyncio.sleep(first_s)
                async for _chunk in stream:
                    if each_s:
                        await asyncio.sleep(each_s)
            stage.note(begin_ns, stream.timeline)


async def slow_reader(stage: Stage) -> None:
    """Works on each chunk, and lets the loop go on meanwhile."""
    await _read_slowly(stage, first_s=0.0, each_s=READ_S)


async def late_reader(stage: Stage) -> None:
    """Asks for the first chunk late."""
    await _read_slowly(stage, first_s=LATE_S, each_s=0.0)


async def upload(stage: Stage) -> None:
    """A large prompt, on a connection that is there."""
    call = _chat("x" * UPLOAD_BYTES)  # no blanks: the server counts words, which would take it a while
    async with spanwire.ConnectionManager() as manager:
        await _once(stage, manager, _chat())
        for _ in range(CALLS):
            begin_ns = time.perf_counter_ns()
            stage.note(begin_ns, await _once(stage, manager, call))


async def riders(stage: Stage) -> None:
    """Two cold calls at once: the first one's connection is the second one's too."""
    leads = stage.scenario.name == "riders-leader"
    for _ in range(CALLS):
        async with spanwire.ConnectionManager() as manager:
            begin_ns = time.perf_counter_ns()
            timelines = await asyncio.gather(*(_once(stage, manager, _call(stage)) for _ in range(2)))
            # The order of arrival is that of the calls.
            at = 0 if leads else 1
            stage.note(begin_ns, timelines[at], request=stage.server.requests[-2 + at])
            ids = {timeline.connection.id for timeline in timelines if timeline and timeline.connection}
            assert len(ids) == 1, ids


async def retried(stage: Stage) -> None:
    """The server refuses each call once."""
    async with spanwire.ConnectionManager() as manager:
        await _once(stage, manager, _call(stage))
        for _ in range(CALLS):
            stage.script(Script(status=503, headers={"retry-after-ms": str(BACKOFF_MS)}))
            begin_ns = time.perf_counter_ns()
            timeline = await _once(stage, manager, _call(stage))
            stage.note(begin_ns, timeline, backoff=BACKOFF_MS)
            assert timeline is not None
            first, second = timeline.to_dict()["attempts"]
            assert (first["outcome"], second["outcome"]) == ("error", "completed")
            waited_s = second["begin_s"] - first["begin_s"] - first["total_s"]
            assert abs(first["total_s"] + waited_s + second["total_s"] - timeline.total_s) < 1e-3


async def limited(stage: Stage) -> None:
    """Two calls at once where one may run."""
    async with spanwire.ConnectionManager() as manager:
        await _once(stage, manager, _call(stage))
        for _ in range(CALLS):
            begin_ns = time.perf_counter_ns()
            ended_ns: list[int] = []

            async def one(ended_ns: list[int] = ended_ns) -> spanwire.Timeline | None:
                timeline = await _once(stage, manager, _call(stage))
                ended_ns.append(time.perf_counter_ns())
                return timeline

            _, second = await asyncio.gather(one(), one())
            stage.note(begin_ns, second, ahead=(ended_ns[0] - begin_ns) / 1e6)


# --- stages -----------------------------------------------------------------------------------------------------------


async def _crypto_ms(port: int, pem: str, alpn: list[str]) -> float:
    """What a TLS handshake takes on this machine where there is no network, by asyncio alone."""
    context = ssl.create_default_context(cadata=pem)
    context.set_alpn_protocols(alpn)
    found = []
    for _ in range(CALLS):
        begin = time.perf_counter()
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        plain_s = time.perf_counter() - begin
        writer.close()
        begin = time.perf_counter()
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        found.append(time.perf_counter() - begin - plain_s)
        writer.transport.abort()
    return median(found) * 1e3


@contextlib.contextmanager
def _resolving(peer: str) -> Iterator[None]:
    """One name, which takes its time."""
    loop = asyncio.get_running_loop()
    resolve = loop.getaddrinfo

    async def getaddrinfo(host: Any, port: Any, **more: Any) -> Any:
        if host == _NAME:
            await asyncio.sleep(DNS_S)
            host = peer
        return await resolve(host, port, **more)

    loop.getaddrinfo = getaddrinfo  # type: ignore[method-assign]
    try:
        yield
    finally:
        loop.getaddrinfo = resolve  # type: ignore[method-assign]


async def _play(scenario: Scenario) -> list[dict[str, Any]]:
    drive: Callable[[Stage], Awaitable[None]] = globals()[scenario.how]
    with contextlib.ExitStack() as stack:
        if scenario.how == "riders":
            other = stack.enter_context(h2_server(scenario.script, scenario.peer))
            endpoint = spanwire.Endpoint(
                f"https://{scenario.peer}:{other.port}/v1",
                tls=spanwire.TLS(ca=other.pem),
                proxy=None,
                options={"http_version": "2"},
            )
            stage = Stage(scenario, other, endpoint, lambda _: None)
            stage.facts["crypto"] = await _crypto_ms(other.port, other.pem, ["h2"])
        else:
            named = scenario.how == "cold"
            server = LoopbackServer(
                default=scenario.script,
                host="0.0.0.0",
                public_host=_NAME if named else scenario.peer,
                tls=scenario.tls,
            )
            stack.enter_context(server)
            more: dict[str, Any] = {}
            if scenario.how == "limited":
                more["limits"] = spanwire.Limits(max_concurrent=1)
            if scenario.how == "retried":
                more["retries"] = spanwire.Retries(base_s=0.0)
            endpoint = server.endpoint(**more)
            if scenario.edge is not None:
                hop = edges.relay if scenario.edge == "relay" else edges.haproxy
                port = stack.enter_context(hop(address(scenario.upstream_ms), server.port))
                endpoint = spanwire.Endpoint(f"http://{scenario.peer}:{port}/v1", proxy=None)
            stage = Stage(scenario, server, endpoint, lambda script: server.script(script, times=1))
            if named:
                stack.enter_context(_resolving(scenario.peer))
                stage.facts["dns"] = DNS_S * 1e3
            if scenario.tls:
                assert endpoint.tls.ca is not None
                stage.facts["crypto"] = await _crypto_ms(server.port, str(endpoint.tls.ca), ["http/1.1"])
        await drive(stage)
    return stage.calls


async def _import_all() -> None:
    """The first call of a process imports what later ones find."""
    with LoopbackServer(tls=True) as server:
        async with spanwire.ConnectionManager() as manager:
            async with manager.stream(server.endpoint(), _chat()) as stream:
                async for _ in stream:
                    pass
            await manager.complete(server.endpoint(), _chat())


async def main(names: list[str]) -> dict[str, list[dict[str, Any]]]:
    await _import_all()
    return {scenario.name: await _play(scenario) for scenario in SCENARIOS if scenario.name in names}


if __name__ == "__main__":
    with contextlib.suppress(OSError):  # before all other processes of a busy machine, where we may ask for it
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    print(json.dumps(asyncio.run(main(sys.argv[1:]))))
