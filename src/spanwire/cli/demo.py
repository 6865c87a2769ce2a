"""``spanwire demo``: three calls over every installed transport that has a loopback server, and their waterfalls.

``--json`` prints one object::

    {
        "schema": 1,
        "spanwire": "0.1.0",
        "transports": {"sse": {"connections_opened": 1, "cold": TIMELINE, "warm": TIMELINE, "tool_call": TIMELINE}},
    }

TIMELINE is ``Timeline.to_dict()``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points, version
from typing import Any, NamedTuple

import typer
from msgspec.structs import replace

from ..calls import Call, Reply
from ..endpoint import Endpoint
from ..errors import SpanwireError
from ..manager import ConnectionManager
from ..plugins import Registry
from ..testing import LoopbackServer, Script, ScriptedTool
from ..timeline import Timeline
from .output import Unwritable, complain, milliseconds, plural, print_json

__all__ = ["run_demo"]

#: A small model's pace, shortened so that all of it takes well under a second.
_PACE = Script(queue_s=0.012, prefill_s=0.035, gap_s=0.006)
_QUESTION = "What does a handshake cost?"
_COLD = "A round trip for TCP and one or two for TLS, before any byte of the call."
_WARM = "Nothing, if the connection of the call before is used again."
_TOOL = ScriptedTool("get_weather", ['{"city"', ': "Lisbon"', ', "unit": "celsius"}'])
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "unit": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]


class _Step(NamedTuple):
    key: str
    title: str
    script: Script
    call: Call


def _say(text: str) -> Script:
    return replace(_PACE, tokens=Script.say(text).tokens)


def _steps() -> tuple[_Step, ...]:
    ask = Call.chat("demo", [{"role": "user", "content": _QUESTION}])
    weather = Call.chat("demo", [{"role": "user", "content": "Weather in Lisbon?"}], tools=_TOOLS)
    return (
        _Step("cold", "A cold call: it waits until its connection is made.", _say(_COLD), ask),
        _Step(
            "warm",
            "A warm call: no handshake. And the server says how long it took.",
            replace(_say(_WARM), server_timing="vllm"),
            ask,
        ),
        _Step(
            "tool_call",
            "A tool call, streamed in pieces.",
            replace(_PACE, tool_calls=[_TOOL], server_timing="vllm"),
            weather,
        ),
    )


def run_demo(*, as_json: bool) -> int:
    """Show the calls, one transport after the other. Returns the exit code: 1 if none went well."""
    names = sorted({entry.name for entry in entry_points(group="spanwire.loopback")})
    found: dict[str, Any] = {}
    for name in names:
        try:
            found[name] = asyncio.run(_one_transport(name, quiet=as_json))
        except Unwritable as error:
            raise error.why from None  # also a reader that has seen enough
        except (SpanwireError, OSError) as error:
            complain(f"{name}: {error}")
    if not names:
        complain("no installed transport has a loopback server; reinstall: pip install --force-reinstall spanwire-sse")
    if as_json:
        print_json({"schema": 1, "spanwire": version("spanwire"), "transports": found})
    return 0 if found else 1


async def _one_transport(name: str, *, quiet: bool) -> dict[str, Any]:
    def say(text: object = "") -> None:
        if not quiet:
            try:
                typer.echo(text)
            except OSError as error:
                raise Unwritable(error) from error

    steps = _steps()
    timelines: dict[str, Timeline] = {}
    with LoopbackServer(part=name) as server:
        for step in steps:
            server.script(step.script, times=1)
        async with ConnectionManager() as manager:
            endpoint = _endpoint(server, name, manager.registry)
            say(f"Transport {name!r}, to a scripted model at {server.url}")
            for number, step in enumerate(steps, 1):
                say(f"\n{number}. {step.title}")
                if "jobs" in manager.registry.spec_for(endpoint).capabilities:
                    reply, timeline = await _job(manager, endpoint, step.call, say)
                else:
                    async with manager.stream(endpoint, step.call) as stream:
                        async for _ in stream:
                            pass
                    reply, timeline = stream.reply, stream.timeline
                timelines[step.key] = timeline
                for line in _answer(reply):
                    say(f"   {line}")
                say()
                say(timeline)
        opened = server.connections
    say()
    for line in _summary(opened, timelines):
        say(line)
    return {"connections_opened": opened, **{key: timeline.to_dict() for key, timeline in timelines.items()}}


async def _job(
    manager: ConnectionManager, endpoint: Endpoint, call: Call, say: Callable[[object], None]
) -> tuple[Reply, Timeline]:
    """A call that is answered later: its acknowledgement is worth a line."""
    job = await manager.submit(endpoint, call)
    if job.row is not None:
        say(f"   Acknowledged after {milliseconds(job.row.submitted_s - job.row.created_s)} ms, as job {job.id}.")
    reply = await job
    assert isinstance(reply, Reply)
    if job.row is not None:
        how = "its webhook" if job.row.resolved_by == "webhook" else "asking for it"
        say(f"   Answered after {milliseconds(job.timeline.total_s)} ms, by {how}.")
    return reply, job.timeline


def _endpoint(server: LoopbackServer, name: str, registry: Registry) -> Endpoint:
    """By its scheme; where another transport serves that, by its name, with what it needs to be tried out."""
    endpoint = server.endpoint(proxy=None)
    if registry.spec_for(endpoint).name == name:
        return endpoint
    return server.endpoint(proxy=None, transport=name, options=getattr(server.part, "endpoint_options", {}))


def _answer(reply: Reply) -> Iterator[str]:
    if reply.text:
        yield reply.text
    for tool in reply.tool_calls:
        yield f"{tool.name}({tool.arguments})"


def _summary(opened: int, timelines: dict[str, Timeline]) -> Iterator[str]:
    yield f"Connections opened: {opened}, for {plural(len(timelines), 'call')}."
    handshake = timelines["cold"].segments.get("handshake")
    if handshake is None:
        return
    parts = ", ".join(f"{name} {milliseconds(part.duration_s)}" for name, part in handshake.parts.items())
    paid = f"{milliseconds(handshake.duration_s)} ms{f' ({parts})' if parts else ''}"
    if "handshake" in timelines["warm"].segments:
        yield f"The cold call waited for its handshake: {paid}."
        return
    yield f"Only the cold call waited for its handshake: {paid}."
    yield "Over a network each part of a handshake costs a round trip or more."
