"""One client, one workload, one process: writes a line of JSON. Started by run.py; README.md says what is measured.

Usage: ``clients.py CLIENT WORKLOAD PORT [--core CORE] [--quick]``

Every client is used in the way its documentation shows, with its connections left open and its limits out of the way.
Libraries are imported by the one client that needs them; a process pays in memory for nothing else. Peers are imported
by name because types of packages that need not be installed would make mypy's verdict depend on the environment.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import resource
import statistics
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec

MESSAGES = [{"role": "user", "content": "Say hello to the world, please."}]
#: More calls at once than any workload has.
AMPLE = 2000


class Streamed(NamedTuple):
    """What a client saw of one answer: how many tokens, and when the first came (CLOCK_MONOTONIC; 0 for never)."""

    tokens: int
    first_ns: int


class Client(NamedTuple):
    """An async client, ready to call.

    Attributes:
        stream: (model, user) to what was seen; reads to the end.
        unary: one call that is answered as a whole, and decoded.
    """

    stream: Callable[[str, str | None], Awaitable[Streamed]]
    unary: Callable[[], Awaitable[None]]


def _streamed_body(model: str, user: str | None) -> dict[str, Any]:
    return {"model": model, "messages": MESSAGES, "stream": True, "user": user}


UNARY_BODY: dict[str, Any] = {"model": "m", "messages": MESSAGES}


# ---------------------------------------------------------------------------------------------------------------- raw


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta


class _Event(msgspec.Struct):
    choices: list[_Choice]


_decode_event = msgspec.json.Decoder(_Event).decode


class _RawConnection(asyncio.Protocol):
    """The floor: as little as reads *this* server's answers. It skips chunk framing, errors, timeouts, everything."""

    def __init__(self) -> None:
        self.buffer = b""
        self.done: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # not isinstance: uvloop's is none by name

    def connection_lost(self, exc: Exception | None) -> None:
        if self.done is not None and not self.done.done():
            self.done.set_exception(exc or ConnectionResetError("the server closed the connection"))

    def send(self, body: dict[str, Any]) -> asyncio.Future[None]:
        """Send a call; the future is done when the answer has been read."""
        self.streaming = "stream" in body
        self.tokens = self.first_ns = 0
        self.done = asyncio.get_running_loop().create_future()
        data = json.dumps(body).encode()
        self.transport.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(data), data)
        )
        return self.done

    def data_received(self, data: bytes) -> None:
        if self.streaming:
            self._read_events(self.buffer + data)
        else:
            self._read_whole(self.buffer + data)

    def _read_events(self, buffer: bytes) -> None:
        while (end := buffer.find(b"\n\n")) >= 0:
            text, buffer = buffer[:end], buffer[end + 2 :]
            payload = text[text.rfind(b"data: ") + 6 :]
            if payload != b"[DONE]":
                choices = _decode_event(payload).choices
                if choices and choices[0].delta.content:
                    self.first_ns = self.first_ns or time.monotonic_ns()
                    self.tokens += 1
        self.buffer = buffer
        if buffer.endswith(b"0\r\n\r\n"):
            self._answered()

    def _read_whole(self, buffer: bytes) -> None:
        self.buffer = buffer
        head, found, body = buffer.partition(b"\r\n\r\n")
        if found and len(body) == int(head.partition(b"content-length: ")[2]):
            msgspec.json.decode(body)
            self._answered()

    def _answered(self) -> None:
        self.buffer = b""
        assert self.done is not None
        self.done.set_result(None)


def raw(url: str) -> Client:
    """A protocol on a socket, and msgspec."""
    host, port = url.split("/")[2].split(":")
    idle: list[_RawConnection] = []

    async def connection() -> _RawConnection:
        if idle:
            return idle.pop()
        _, made = await asyncio.get_running_loop().create_connection(_RawConnection, host, int(port))
        return made

    async def stream(model: str, user: str | None) -> Streamed:
        used = await connection()
        await used.send(_streamed_body(model, user))
        idle.append(used)
        return Streamed(used.tokens, used.first_ns)

    async def unary() -> None:
        used = await connection()
        await used.send(UNARY_BODY)
        idle.append(used)

    return Client(stream, unary)


# -------------------------------------------------------------------------------------------------------------- peers


def aiohttp(url: str) -> Client:
    """Lines of the response, and the standard library's JSON."""
    library: Any = import_module("aiohttp")
    session = library.ClientSession(connector=library.TCPConnector(limit=0))

    async def stream(model: str, user: str | None) -> Streamed:
        tokens = first_ns = 0
        async with session.post(f"{url}/chat/completions", json=_streamed_body(model, user)) as response:
            async for line in response.content:
                if line.startswith(b"data: ") and line != b"data: [DONE]\n":
                    choices = json.loads(line[6:])["choices"]
                    if choices and choices[0]["delta"].get("content"):
                        first_ns = first_ns or time.monotonic_ns()
                        tokens += 1
        return Streamed(tokens, first_ns)

    async def unary() -> None:
        async with session.post(f"{url}/chat/completions", json=UNARY_BODY) as response:
            json.loads(await response.read())

    return Client(stream, unary)


def httpx(url: str) -> Client:
    """Lines of the response, and the standard library's JSON."""
    library: Any = import_module("httpx")
    limits = library.Limits(max_connections=AMPLE, max_keepalive_connections=AMPLE)
    client = library.AsyncClient(limits=limits, timeout=60)

    async def stream(model: str, user: str | None) -> Streamed:
        tokens = first_ns = 0
        async with client.stream("POST", f"{url}/chat/completions", json=_streamed_body(model, user)) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    choices = json.loads(line[6:])["choices"]
                    if choices and choices[0]["delta"].get("content"):
                        first_ns = first_ns or time.monotonic_ns()
                        tokens += 1
        return Streamed(tokens, first_ns)

    async def unary() -> None:
        (await client.post(f"{url}/chat/completions", json=UNARY_BODY)).json()

    return Client(stream, unary)


def httpx_sync(url: str) -> Callable[[str], None]:
    """The same, synchronous."""
    client = import_module("httpx").Client(timeout=60)

    def stream(model: str) -> None:
        with client.stream("POST", f"{url}/chat/completions", json=_streamed_body(model, None)) as response:
            for _ in response.iter_lines():
                pass

    return stream


def openai(url: str) -> Client:
    """OpenAI's own client."""
    client = import_module("openai").AsyncOpenAI(base_url=url, api_key="x", max_retries=0)

    async def stream(model: str, user: str | None) -> Streamed:
        tokens = first_ns = 0
        async for chunk in await client.chat.completions.create(
            model=model, messages=MESSAGES, stream=True, user=user, stream_options={"include_usage": True}
        ):
            if chunk.choices and chunk.choices[0].delta.content:
                first_ns = first_ns or time.monotonic_ns()
                tokens += 1
        return Streamed(tokens, first_ns)

    async def unary() -> None:
        await client.chat.completions.create(**UNARY_BODY)

    return Client(stream, unary)


def openai_sync(url: str) -> Callable[[str], None]:
    """The same, synchronous."""
    client = import_module("openai").OpenAI(base_url=url, api_key="x", max_retries=0)

    def stream(model: str) -> None:
        for _ in client.chat.completions.create(model=model, messages=MESSAGES, stream=True):
            pass

    return stream


# ----------------------------------------------------------------------------------------------------------- spanwire


def _trace() -> None:
    """An SDK that samples everything and drops it at export: spanwire is measured with its tracing on."""
    from collections.abc import Sequence

    from opentelemetry import metrics, trace
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

    class Drop(SpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            return SpanExportResult.SUCCESS

    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(Drop()))
    trace.set_tracer_provider(provider)
    metrics.set_meter_provider(MeterProvider())


def spanwire(url: str) -> Client:
    """This project, traced."""
    _trace()
    import spanwire as library

    manager = library.ConnectionManager()
    endpoint = library.Endpoint(url, api_key="x", limits=library.Limits(max_concurrent=AMPLE))

    async def stream(model: str, user: str | None) -> Streamed:
        tokens = first_ns = 0
        async with manager.stream(endpoint, library.Call.chat(model, MESSAGES, user=user)) as chunks:
            async for chunk in chunks:
                if chunk.text:
                    first_ns = first_ns or time.monotonic_ns()
                    tokens += 1
        return Streamed(tokens, first_ns)

    async def unary() -> None:
        await manager.complete(endpoint, library.Call.chat("m", MESSAGES))

    return Client(stream, unary)


def spanwire_sync(url: str) -> Callable[[str], None]:
    """The same, synchronous."""
    _trace()
    import spanwire as library

    manager = library.SyncConnectionManager()
    endpoint = library.Endpoint(url, api_key="x")

    def stream(model: str) -> None:
        with manager.stream(endpoint, library.Call.chat(model, MESSAGES)) as chunks:
            for _ in chunks:
                pass

    return stream


CLIENTS: dict[str, Callable[[str], Client]] = {
    "raw": raw,
    "aiohttp": aiohttp,
    "httpx": httpx,
    "openai": openai,
    "spanwire": spanwire,
}
#: Those that have a synchronous side too.
SYNC_CLIENTS: dict[str, Callable[[str], Callable[[str], None]]] = {
    "httpx": httpx_sync,
    "openai": openai_sync,
    "spanwire": spanwire_sync,
}


# ---------------------------------------------------------------------------------------------------------- workloads


class Load(NamedTuple):
    """How much is asked for: calls in all, and how many of them at once."""

    model: str
    at_once: int
    calls: int

    def quick(self) -> Load:
        """A sixteenth: enough to see that it works, too little to measure."""
        return Load(self.model, max(self.at_once // 16, 1), max(self.calls // 16, 2))


LOADS = {
    "burst": Load("m-200-0-1", 1, 40),
    "paced": Load("m-100-20000-1", 32, 32),
    "crowd": Load("m-100-20000-1", 256, 256),
    "unary": Load("m", 64, 640),
    "latency": Load("m-4-0-1", 1, 60),
    "reuse": Load("m-20-0-1", 1, 6),
}
#: Measured on uvloop where it is installed, as servers that stream a lot would have it.
ON_UVLOOP = frozenset({"burst", "paced", "crowd"})

Figures = dict[str, float]


def server_log(url: str) -> dict[str, Any]:
    """What the server saw since it was last asked."""
    with urllib.request.urlopen(url.removesuffix("/v1") + "/log") as response:
        log: dict[str, Any] = json.load(response)
    return log


async def _all(load: Load, call: Callable[[], Awaitable[None]]) -> tuple[float, float]:
    """Make the calls of a load; returns CPU and wall time, in seconds."""
    todo = iter(range(load.calls))

    async def worker() -> None:
        for _ in todo:  # shared: whoever is free takes the next one
            await call()

    gc.collect()
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    await asyncio.gather(*[worker() for _ in range(load.at_once)])
    return time.process_time() - cpu_s, time.perf_counter() - wall_s


async def stream_tokens(client: Client, load: Load) -> Figures:
    """CPU time for each token. Raises RuntimeError if a token is missing."""
    tokens = 0

    async def call() -> None:
        nonlocal tokens
        seen = await client.stream(load.model, None)
        tokens += seen.tokens  # on a line of its own: `+=` reads its left side before an await on its right

    await asyncio.gather(*[client.stream("m-2-0-1", None) for _ in range(load.at_once)])  # connections
    await client.stream("m-200-0-1", None)  # and code
    cpu_s, wall_s = await _all(load, call)
    expected = load.calls * int(load.model.split("-")[1])
    if tokens != expected:
        raise RuntimeError(f"{tokens} tokens came, {expected} were sent")
    return {"cpu_us_per_token": cpu_s / tokens * 1e6, "wall_s": wall_s}


async def call_unary(client: Client, load: Load) -> Figures:
    """CPU time for each call."""
    await asyncio.gather(*[client.unary() for _ in range(load.at_once)])
    cpu_s, wall_s = await _all(load, client.unary)
    return {"cpu_us_per_call": cpu_s / load.calls * 1e6, "wall_s": wall_s}


async def first_tokens(client: Client, load: Load, url: str) -> Figures:
    """What the client adds to the first token: from the call to the server's reading it, and from its writing on."""
    for number in range(5):
        await client.stream(load.model, f"warm{number}")
    server_log(url)
    times: dict[str, tuple[int, int]] = {}
    for number in range(load.calls):
        started_ns = time.monotonic_ns()
        times[f"u{number}"] = started_ns, (await client.stream(load.model, f"u{number}")).first_ns
    seen = server_log(url)["calls"]
    added_us = sorted(
        (seen[user][0] - started_ns + first_ns - seen[user][1]) / 1e3 for user, (started_ns, first_ns) in times.items()
    )
    return {"added_us_median": statistics.median(added_us), "added_us_p95": added_us[int(len(added_us) * 0.95) - 1]}


async def connections(name: str, load: Load, url: str) -> Figures:
    """Connections that calls in a row open."""
    server_log(url)
    if name in SYNC_CLIENTS:
        stream = SYNC_CLIENTS[name](url)
        for _ in range(load.calls):
            stream(load.model)
    else:
        client = CLIENTS[name](url)
        for _ in range(load.calls):
            await client.stream(load.model, None)
    return {"connections": server_log(url)["connections"]}


async def measure(name: str, workload: str, url: str, load: Load) -> Figures:
    """The figures of one workload."""
    if workload == "reuse":
        return await connections(name, load, url)
    client = CLIENTS[name](url)
    if workload == "unary":
        return await call_unary(client, load)
    if workload == "latency":
        return await first_tokens(client, load, url)
    return await stream_tokens(client, load)


def peak_rss_mib() -> float:
    """The most memory that this process had at once, in MiB."""
    status = Path("/proc/self/status")
    if status.exists():  # not getrusage: on Linux that begins with what our parent had when it started us
        (line,) = [line for line in status.read_text().splitlines() if line.startswith("VmHWM:")]
        return int(line.split()[1]) / 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1024 * 1024 if sys.platform == "darwin" else 1024)  # macOS counts bytes, others KiB


def main() -> None:
    options = argparse.ArgumentParser(description="One client, one workload, one process.")
    options.add_argument("client", choices=CLIENTS)
    options.add_argument("workload", choices=LOADS)
    options.add_argument("port", type=int)
    options.add_argument("--core", type=int, help="run on this core only (Linux)")
    options.add_argument("--quick", action="store_true", help="a sixteenth of the load")
    given = options.parse_args()
    if given.core is not None:
        os.sched_setaffinity(0, {given.core})
    runner = asyncio.run
    if given.workload in ON_UVLOOP:
        try:
            import uvloop
        except ImportError:
            pass
        else:
            runner = uvloop.run
    load = LOADS[given.workload]
    work = measure(
        given.client, given.workload, f"http://127.0.0.1:{given.port}/v1", load.quick() if given.quick else load
    )
    figures = runner(work)
    sys.stdout.write(json.dumps({**figures, "rss_mib": peak_rss_mib()}) + "\n")
    sys.stdout.flush()
    os._exit(0)  # clients are left open: how they close is not what is measured, nor what they say if nobody does


if __name__ == "__main__":
    main()
