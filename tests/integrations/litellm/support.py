"""One call through LiteLLM in each of its ways, and what its user saw of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import litellm
import litellm_spanwire
from litellm.litellm_core_utils.logging_worker import GLOBAL_LOGGING_WORKER

from spanwire.errors import SpanwireError
from spanwire.testing import LoopbackServer
from tests.support import MESSAGES

T = TypeVar("T")

WAYS = ("acompletion", "acompletion stream", "completion", "completion stream")


def run(body: Callable[[], Awaitable[T]]) -> T:
    """Run it on a loop of its own; fail if the loop's exception handler hears of anything. LiteLLM leaves tasks of its own."""
    heard: list[dict[str, Any]] = []

    async def main() -> T:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: heard.append(context))
        try:
            return await body()
        finally:
            await GLOBAL_LOGGING_WORKER.flush()  # else it tells the next test's callbacks of this one's calls

    result = asyncio.run(main())
    assert heard == []
    return result


def to(server: LoopbackServer, model: str = "spanwire/m", **more: Any) -> dict[str, Any]:
    """Arguments of a chat call to this server."""
    given: dict[str, Any] = {"model": model, "messages": MESSAGES, "api_base": server.url, "api_key": "sk-test"}
    if server.uds is None:
        given["spanwire"] = {"proxy": None}
    return {**given, **more}


class Seen:
    """What the user of LiteLLM saw of a chat call."""

    def __init__(self) -> None:
        self.chunks: list[Any] = []
        self.response: Any = None  # the whole answer, or the chunks joined by LiteLLM
        self.error: Any = None
        self.report: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        """Of the chunks, or the answer."""
        if self.chunks:
            return "".join(c.choices[0].delta.content or "" for c in self.chunks if c.choices)
        return (self.response.choices[0].message.content or "") if self.response is not None else ""

    @property
    def reasoning(self) -> str:
        if self.chunks:
            deltas = [c.choices[0].delta for c in self.chunks if c.choices]
            return "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
        return getattr(self.response.choices[0].message, "reasoning_content", None) or ""

    @property
    def tools(self) -> list[tuple[str, str, str]]:
        """Id, name and arguments of each tool call; of a stream, joined by index as every client does."""
        if not self.chunks:
            calls = (self.response.choices[0].message.tool_calls or []) if self.response is not None else []
            return [(call.id, call.function.name, call.function.arguments) for call in calls]
        found: dict[int, list[str]] = {}
        for chunk in self.chunks:
            for call in (chunk.choices[0].delta.tool_calls or []) if chunk.choices else []:
                entry = found.setdefault(call.index, ["", "", ""])
                entry[0] += call.id or ""
                entry[1] += call.function.name or ""
                entry[2] += call.function.arguments or ""
        return [(id_, name, arguments) for _, (id_, name, arguments) in sorted(found.items())]

    @property
    def finish_reason(self) -> str | None:
        if not self.chunks:
            reason: str | None = self.response.choices[0].finish_reason
            return reason
        reasons = [c.choices[0].finish_reason for c in self.chunks if c.choices and c.choices[0].finish_reason]
        assert len(reasons) < 2
        return reasons[0] if reasons else None

    @property
    def usage(self) -> tuple[int, int, int] | None:
        usage = getattr(self.response, "usage", None)
        return None if usage is None else (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)


def ask(way: str, given: dict[str, Any]) -> Seen:
    """Make the call in one of the `WAYS`. A stream is asked for its usage."""
    seen = Seen()
    streamed = way.endswith("stream")
    more = {"stream": True, "stream_options": {"include_usage": True}} if streamed else {}
    try:
        if way.startswith("acompletion"):
            run(lambda: _ask(seen, {**given, **more}, streamed=streamed))
        elif streamed:
            response = litellm.completion(**given, **more)
            try:
                seen.chunks.extend(response)
            finally:
                _streamed(seen, response)
        else:
            seen.response = litellm.completion(**given, **more)
    except Exception as error:  # noqa: BLE001 - whichever it is
        seen.error = error
    found = seen.error if seen.error is not None else seen.chunks[0] if seen.chunks else seen.response
    seen.report = litellm_spanwire.report(found)
    return seen


async def _ask(seen: Seen, given: dict[str, Any], *, streamed: bool) -> None:
    if not streamed:
        seen.response = await litellm.acompletion(**given)
        return
    response = await litellm.acompletion(**given)
    try:
        async for chunk in response:
            seen.chunks.append(chunk)
    finally:
        _streamed(seen, response)


def _streamed(seen: Seen, response: Any) -> None:
    """The last chunk has the usage, as LiteLLM gives it to those who ask for it."""
    if seen.chunks and getattr(seen.chunks[-1], "usage", None) is not None:
        seen.response = seen.chunks[-1]


def ours(error: BaseException | None) -> SpanwireError | None:
    """The error of spanwire below one of LiteLLM's."""
    while error is not None and not isinstance(error, SpanwireError):
        error = getattr(error, "original_exception", None) or error.__cause__
    return error
