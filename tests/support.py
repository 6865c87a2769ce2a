"""Small helpers that several test files share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import spanwire
from spanwire.testing import LoopbackServer, Script
from spanwire.timeline import Timeline

T = TypeVar("T")

MESSAGES = [{"role": "user", "content": "Say hello"}]
#: Retries without waiting, where a test is not about the wait.
AT_ONCE = spanwire.Retries(base_s=0.0)
NEVER = spanwire.Retries(max_attempts=1)


def chat(model: str = "m", **more: Any) -> spanwire.Call:
    return spanwire.Call.chat(model, MESSAGES, **more)


@contextmanager
def serving(*scripts: Any, **more: Any) -> Iterator[LoopbackServer]:
    """A server whose calls get these scripts, one each, and then the last one again; it must see no fault of ours."""
    with LoopbackServer([*scripts], **more) as server:
        yield server
    assert server.faults == []


def run(body: Callable[[], Awaitable[T]]) -> T:
    """Run a coroutine function on a loop of its own; fail if the loop's exception handler hears of anything."""
    heard: list[dict[str, Any]] = []

    async def main() -> T:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: heard.append(context))
        result = await body()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not others, f"left behind: {others}"
        return result

    result = asyncio.run(main())
    assert heard == []
    return result


async def wait_for(server: LoopbackServer, predicate: Callable[[LoopbackServer], object]) -> None:
    """``server.wait_for`` without blocking the loop on which the client runs."""
    await asyncio.to_thread(server.wait_for, predicate)


async def read(stream: spanwire.Stream) -> str:
    return "".join([chunk.text async for chunk in stream])


def assert_adds_up(timeline: Timeline) -> None:
    total = sum(segment.duration_s for segment in timeline.segments.values())
    assert abs(total - timeline.total_s) < 1e-6
    for segment in timeline.segments.values():
        assert segment.duration_s > 0
        if segment.parts:
            assert abs(sum(part.duration_s for part in segment.parts.values()) - segment.duration_s) < 1e-6


def hello(**more: Any) -> Script:
    return Script.say("Hello from the loopback server.", **more)
