"""What a token costs over each wire, on the same script: ``python -m benchmarks.wires``.

The loopback server plays one script over every wire that is installed; each client runs in a process of its own, in turns,
round after round. ``grpc.aio`` is the library alone: it reads the messages and decodes their JSON, and does nothing else.

* ``cpu``: client CPU (user and system, all threads) for each token, 32 streams at a pace of 20 ms.
* ``first``: from the call to its first token on a warm connection, one at a time, the server's own time included.
* ``bytes``: on the wire for each token, both directions, without TCP's own headers: as a relay counts them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Any

import msgspec

import spanwire

STREAMS = 32
TOKENS = 100
GAP_MS = 20
CALLS = 200
MESSAGES = [{"role": "user", "content": "Say hello"}]
BARE = "grpc.aio"

Call = Callable[[], Awaitable[float]]


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta


class _Chunk(msgspec.Struct):
    choices: list[_Choice]


# --- clients ------------------------------------------------------------------------------------------------------------


async def _bare(url: str) -> tuple[Call, Callable[[], Awaitable[None]]]:
    import grpc
    from spanwire_grpc.protowire import body_and_number, request

    channel = grpc.aio.insecure_channel(url.removeprefix("grpc://"))
    method = channel.unary_stream("/sglang.runtime.v1.SglangService/ChatComplete")
    raw = request(json.dumps({"model": "m", "messages": MESSAGES, "stream": True}).encode(), {})
    decode = msgspec.json.Decoder(_Chunk).decode

    async def call() -> float:
        began, first = time.perf_counter(), 0.0
        async for message in method(raw):
            body, finished = body_and_number(message)
            if finished:
                continue
            choices = decode(body).choices
            if choices and choices[0].delta.content and not first:
                first = time.perf_counter() - began
        return first

    return call, channel.close


async def _spanwire(url: str) -> tuple[Call, Callable[[], Awaitable[None]]]:
    manager = spanwire.ConnectionManager()
    endpoint = spanwire.Endpoint(url, proxy=None)
    asked = spanwire.Call.chat("m", MESSAGES)

    async def call() -> float:
        began, first = time.perf_counter(), 0.0
        async with manager.stream(endpoint, asked) as stream:
            async for chunk in stream:
                if chunk.text and not first:
                    first = time.perf_counter() - began
        return first

    return call, manager.aclose


async def _cpu(call: Call) -> float:
    """us of CPU for each token."""
    await asyncio.gather(*(call() for _ in range(4)))
    began = time.process_time()
    await asyncio.gather(*(call() for _ in range(STREAMS)))
    return (time.process_time() - began) / (STREAMS * TOKENS) * 1e6


async def _first(call: Call) -> float:
    """us to the first token."""
    for _ in range(10):
        await call()
    return statistics.median([await call() for _ in range(CALLS)]) * 1e6


async def _once(call: Call) -> float:
    await call()
    return 0.0


async def _client(name: str, figure: str, url: str) -> float:
    call, close = await (_bare if name == BARE else _spanwire)(url)
    try:
        return await {"cpu": _cpu, "first": _first, "bytes": _once}[figure](call)
    finally:
        await close()


# --- the other side -----------------------------------------------------------------------------------------------------


@contextmanager
def _serving(part: str, tokens: int, gap_ms: float) -> Iterator[str]:
    command = [sys.executable, "-m", "spanwire.testing", "--part", part, "--tokens", str(tokens)]
    command += ["--token-gap-ms", str(gap_ms)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield server.stdout.readline().split()[0]
    finally:
        server.terminate()
        server.communicate()


async def _counted(name: str, url: str) -> float:
    """Bytes for each token, of one call through a relay."""
    scheme, _, rest = url.partition("://")
    where, _, path = rest.partition("/")
    host, _, port = where.rpartition(":")
    counted = 0

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(host, int(port))

        async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            nonlocal counted
            while data := await source.read(65536):
                counted += len(data)
                target.write(data)
            target.close()

        await asyncio.gather(pump(reader, there_writer), pump(there_reader, writer), return_exceptions=True)

    relay = await asyncio.start_server(accepted, "127.0.0.1", 0)
    at = f"{scheme}://127.0.0.1:{relay.sockets[0].getsockname()[1]}{'/' if path else ''}{path}"
    await _client(name, "bytes", at)
    relay.close()
    return counted / TOKENS


def _measured(name: str, figure: str, url: str) -> float:
    command = [sys.executable, "-m", "benchmarks.wires", "--one", name, figure, url]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout)


def _wires() -> list[str]:
    """Parts of the loopback server that are installed, and can be loaded."""
    found = []
    for point in sorted(entry_points(group="spanwire.loopback"), key=lambda point: point.name):
        if point.name == "webhook":  # answers later
            continue
        try:
            point.load()
        except ImportError:
            continue
        found.append(point.name)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one", nargs=3, metavar=("CLIENT", "FIGURE", "URL"), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.one:
        name, figure, url = given.one
        print(asyncio.run(_counted(name, url) if figure == "bytes" else _client(name, figure, url)))
        return
    rows: dict[tuple[str, str], dict[str, list[float]]] = {}
    for figure, tokens, gap_ms in (("cpu", TOKENS, GAP_MS), ("first", 1, 0), ("bytes", TOKENS, GAP_MS / 4)):
        for _ in range(given.rounds if figure != "bytes" else 1):
            for part in _wires():
                with _serving(part, tokens, gap_ms) as url:
                    for name in ("spanwire", BARE) if part == "grpc" else ("spanwire",):
                        found = rows.setdefault((name, part), {})
                        found.setdefault(figure, []).append(_measured(name, figure, url))
    _print(rows)


def _print(rows: dict[tuple[str, str], dict[str, list[float]]]) -> None:
    print(f"{'client':10} {'wire':10} {'cpu us/token':>14} {'first us':>14} {'bytes/token':>12}")
    for (name, part), figures in rows.items():
        cells: list[Any] = []
        for figure in ("cpu", "first", "bytes"):
            values = figures[figure]
            cells.append(f"{statistics.median(values):.0f} ±{(max(values) - min(values)) / 2:.0f}")
        print(f"{name:10} {part:10} {cells[0]:>14} {cells[1]:>14} {cells[2]:>12}")
    ours, bare = (rows.get((name, "grpc"), {}).get("cpu") for name in ("spanwire", BARE))
    if ours and bare:
        ratios = [one / other for one, other in zip(ours, bare, strict=True)]
        print(f"gRPC, CPU beside grpc.aio alone: {statistics.median(ratios):.2f} x (budget 1.35)")


if __name__ == "__main__":
    main()
