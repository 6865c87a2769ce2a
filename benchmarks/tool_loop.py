"""A loop of tool calls over WebSocket and over server-sent events: what the socket's memory saves, in time and in bytes.

Run it where the server is away: ``python -m spanwire.testing.delaynet --rtt-ms 40 -- python benchmarks/tool_loop.py``.
An agent with a system prompt and ten turns, each with a tool's result, over TLS and one warm connection: the same calls, the
same scripted answers.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

if not __package__:  # started by its path
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import spanwire
from spanwire.testing import LoopbackServer, Script, ScriptedTool
from spanwire.testing.delaynet import PEER

TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}


class Loop(NamedTuple):
    """What one run of the agent took: seconds in all, bytes of all requests' bodies, connections."""

    total_s: float
    sent_bytes: int
    connections: int


def answers(turns: int) -> list[Script]:
    """A tool call each turn, and words at the end. The model takes no time: what is left is the way there."""
    calls = [Script(tool_calls=[ScriptedTool("search", f'{{"page":{n}}}', id=f"call_{n}")]) for n in range(turns - 1)]
    return [*calls, Script.say("That is all.")]


async def run(part: str, turns: int, prompt_bytes: int, result_bytes: int) -> Loop:
    """One agent's loop on a connection that is warm."""
    with LoopbackServer(part=part, tls=True, host="0.0.0.0", public_host=PEER) as server:
        endpoint = server.endpoint()
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": "x" * prompt_bytes},
            {"role": "user", "content": "Look it up"},
        ]
        async with spanwire.ConnectionManager() as manager:
            await manager.warm(endpoint)
            for script in answers(turns):
                server.script(script, times=1)
            begin_s = time.perf_counter()
            for _ in range(turns):
                async with manager.stream(endpoint, spanwire.Call.chat("m", messages, tools=[TOOL])) as stream:
                    async for _chunk in stream:
                        pass
                reply = stream.reply
                called = [
                    {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                    for call in reply.tool_calls
                ]
                messages.append(
                    {"role": "assistant", "content": reply.text or None, **({"tool_calls": called} if called else {})}
                )
                messages += [
                    {"role": "tool", "tool_call_id": call["id"], "content": "r" * result_bytes} for call in called
                ]
            total_s = time.perf_counter() - begin_s
        sent = sum(len(request.raw) for request in server.requests)
        return Loop(total_s, sent, server.connections)


def main(arguments: Sequence[str] | None = None) -> None:
    options = argparse.ArgumentParser(description="A loop of tool calls over WebSocket and server-sent events.")
    options.add_argument("--turns", type=int, default=10, help="default: 10")
    options.add_argument("--prompt-bytes", type=int, default=16_000, help="of the system prompt; default: 16000")
    options.add_argument("--result-bytes", type=int, default=8_000, help="of each tool's result; default: 8000")
    options.add_argument("--rounds", type=int, default=3, help="of which the fastest counts; default: 3")
    given = options.parse_args(arguments)
    print("| over | total ms | sent KB | connections |")
    print("| --- | ---: | ---: | ---: |")
    for name, part in (("server-sent events", "sse"), ("WebSocket", "websocket")):
        loops = [
            asyncio.run(run(part, given.turns, given.prompt_bytes, given.result_bytes)) for _ in range(given.rounds)
        ]
        best = min(loops)
        print(f"| {name} | {best.total_s * 1e3:.0f} | {best.sent_bytes / 1e3:.1f} | {best.connections} |", flush=True)


if __name__ == "__main__":
    main()
