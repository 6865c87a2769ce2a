"""What a message costs over WebSocket: spanwire beside the bare ``websockets`` library, on one answer.

A server in a process of its own sends the events of an OpenAI Responses answer, paced or all at once. Each client, in
turn, runs its streams in this process and decodes every event; time is the process's CPU time. Of the rounds the least is
taken: what disturbs a run makes it longer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

if not __package__:  # started by its path
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import msgspec
from opentelemetry.metrics import set_meter_provider
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import set_tracer_provider
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve

import spanwire
from benchmarks.processes import cores, note

MESSAGES = [{"role": "user", "content": "Say hello"}]


class Workload(NamedTuple):
    """Streams at once, tokens in each, and seconds between two of them."""

    streams: int
    tokens: int
    pace_s: float


WORKLOADS = {"paced": Workload(32, 100, 0.02), "burst": Workload(8, 2_000, 0.0)}


# --- the server, in a process of its own ------------------------------------------------------------------------------


def events(tokens: int) -> list[str]:
    """An answer as OpenAI sends it: some 190 bytes for each token."""
    number = 0

    def event(type: str, **fields: Any) -> str:
        nonlocal number
        number += 1
        return msgspec.json.encode({"type": type, "sequence_number": number, **fields}).decode()

    response = {"id": "resp_1", "object": "response", "model": "m", "status": "in_progress", "output": []}
    item = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": []}
    place = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    found = [
        event("response.created", response=response),
        event("response.in_progress", response=response),
        event("response.output_item.added", output_index=0, item={**item, "status": "in_progress"}),
    ]
    found += [event("response.output_text.delta", delta=f" word{n}", logprobs=[], **place) for n in range(tokens)]
    usage = {"input_tokens": 2, "output_tokens": tokens, "total_tokens": tokens + 2}
    found.append(
        event("response.completed", response={**response, "status": "completed", "output": [item], "usage": usage})
    )
    return found


async def run_server() -> None:
    """Answer every message with the answer that its model names: ``tokens:pace_s``."""
    answers: dict[str, tuple[list[str], float]] = {}

    async def handler(socket: ServerConnection) -> None:
        async for message in socket:
            model = msgspec.json.decode(message)["model"]
            if model not in answers:
                tokens, pace_s = model.split(":")
                answers[model] = events(int(tokens)), float(pace_s)
            found, pace_s = answers[model]
            due_s = time.perf_counter()
            for text in found:
                await socket.send(text)
                if pace_s:
                    due_s += pace_s
                    await asyncio.sleep(max(0.0, due_s - time.perf_counter()))

    async with serve(handler, "127.0.0.1", 0, compression=None, ping_interval=None) as server:
        print(next(iter(server.sockets)).getsockname()[1], flush=True)
        await server.serve_forever()


@contextlib.contextmanager
def serving(core: int | None) -> Iterator[int]:
    """Gives its port."""
    command = [sys.executable, str(Path(__file__).resolve()), "--serve"]
    if core is not None:
        command = ["taskset", "-c", str(core), *command]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield int(server.stdout.readline())
        finally:
            server.kill()


# --- the clients ------------------------------------------------------------------------------------------------------

Client = Callable[[str], Awaitable[int]]


def bare(url: str) -> Client:
    """``websockets`` and msgspec: what a program of ten lines does."""
    idle: list[Any] = []
    decode = msgspec.json.Decoder(type=dict[str, Any]).decode

    async def answer(model: str) -> int:
        socket = idle.pop() if idle else await connect(f"{url}/responses", compression=None, proxy=None, max_size=None)
        body = {"type": "response.create", "model": model, "store": False, "input": MESSAGES}
        await socket.send(msgspec.json.encode(body).decode())
        count = 0
        while True:
            event = decode(await socket.recv(decode=False))
            count += 1
            if event["type"] == "response.completed":
                break
        idle.append(socket)
        return count

    return answer


def ours(url: str, options: dict[str, Any] | None = None) -> Client:
    manager = spanwire.ConnectionManager()
    endpoint = spanwire.Endpoint(url, proxy=None, options=options or {})

    async def answer(model: str) -> int:
        count = 0
        async with manager.stream(endpoint, spanwire.Call.chat(model, MESSAGES)) as stream:
            async for _ in stream:
                count += 1
        return count

    return answer


CLIENTS: dict[str, Callable[[str], Client]] = {"websockets": bare, "spanwire": ours}


async def one_round(client: Client, workload: Workload) -> float:
    """CPU time for each token, in microseconds."""
    model = f"{workload.tokens}:{workload.pace_s}"
    gc.collect()
    cpu_s = time.process_time()
    await asyncio.gather(*[client(model) for _ in range(workload.streams)])
    return (time.process_time() - cpu_s) / (workload.streams * workload.tokens) * 1e6


async def measure(url: str, names: Sequence[str], rounds: int) -> dict[str, dict[str, float]]:
    """The least of the rounds, by workload and client."""
    clients = {name: make(url) for name, make in CLIENTS.items()}
    found: dict[str, dict[str, float]] = {name: dict.fromkeys(clients, float("inf")) for name in names}
    for name in names:
        workload = WORKLOADS[name]
        for client in clients.values():
            await one_round(client, workload._replace(tokens=10))
        for number in range(rounds):
            for label, client in list(clients.items())[:: 1 if number % 2 else -1]:
                taken = await one_round(client, workload)
                found[name][label] = min(taken, found[name][label])
            note(f"{name}: round {number + 1} of {rounds}")
    return found


def table(found: dict[str, dict[str, float]]) -> str:
    """Markdown."""
    lines = ["| workload | " + " | ".join(CLIENTS) + " | ratio |", "| --- |" + " ---: |" * (len(CLIENTS) + 1)]
    for name, taken in found.items():
        ratio = taken["spanwire"] / taken["websockets"]
        lines.append(f"| {name} | " + " | ".join(f"{us:.1f}" for us in taken.values()) + f" | {ratio:.2f} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    options = argparse.ArgumentParser(description="What a message costs over WebSocket, in us of CPU for each token.")
    options.add_argument("workloads", nargs="*", metavar="workload", help=f"of {', '.join(WORKLOADS)}; default: all")
    options.add_argument("--rounds", type=int, default=5, metavar="N", help="default: 5")
    options.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = options.parse_args(arguments)
    if given.serve:
        asyncio.run(run_server())
        return
    names = given.workloads or list(WORKLOADS)
    if unknown := [name for name in names if name not in WORKLOADS]:
        options.error(f"unknown workloads: {', '.join(unknown)}; there are {', '.join(WORKLOADS)}")
    set_tracer_provider(TracerProvider())  # tracing is on: that is what users have
    set_meter_provider(MeterProvider())
    server_core, client_core = cores()
    if client_core is not None:
        os.sched_setaffinity(0, {client_core})
    note(f"websockets {metadata.version('websockets')}")
    with serving(server_core) as port:
        found = asyncio.run(measure(f"ws://127.0.0.1:{port}/v1", names, given.rounds))
    print(table(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
