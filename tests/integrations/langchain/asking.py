"""One call through a model in each of LangChain's ways."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_spanwire import ChatSpanwire

import spanwire
from spanwire import errors
from spanwire.testing import LoopbackServer
from tests.support import run

STREAMS = ("astream", "stream")
WAYS = (*STREAMS, "ainvoke", "invoke")


class Seen:
    """What came: the chunks before an error, all of them added up, or the message."""

    def __init__(self) -> None:
        self.chunks: list[AIMessage] = []
        self.error: errors.SpanwireError | None = None
        self._message: AIMessage | None = None

    @property
    def message(self) -> AIMessage:
        """The message, or the chunks added up as LangChain does at the end of a stream."""
        if self._message is not None:
            return self._message
        assert self.chunks, "nothing has come"
        if not isinstance(self.chunks[0], AIMessageChunk):  # streaming is off: the whole message in one
            return self.chunks[0]
        return self.added()

    def added(self) -> AIMessageChunk:
        first, *others = self.chunks
        one_by_one: Any = first
        for chunk in others:
            one_by_one = one_by_one + chunk
        at_once: Any = first.__add__(others)
        assert isinstance(one_by_one, AIMessageChunk)
        assert at_once == one_by_one
        return one_by_one

    @property
    def timeline(self) -> dict[str, Any]:
        found = self.message.response_metadata["spanwire"]
        assert isinstance(found, dict)
        return found


def ask(way: str, model: Any, prompt: Any = "q", /, **more: Any) -> Seen:
    """``model`` is a chat model, or one with something bound to it."""
    seen = Seen()
    try:
        if way.startswith("a"):
            run(lambda: aask(way, model, prompt, seen, **more))
        elif way == "stream":
            seen.chunks.extend(model.stream(prompt, **more))
        else:
            seen._message = model.invoke(prompt, **more)
    except errors.SpanwireError as error:
        seen.error = error
    return seen


async def aask(way: str, model: Any, prompt: Any, seen: Seen, /, **more: Any) -> None:
    if way == "astream":
        async for chunk in model.astream(prompt, **more):
            seen.chunks.append(chunk)
    else:
        seen._message = await model.ainvoke(prompt, **more)


@contextmanager
def model_on(server: LoopbackServer, model: str = "m", **more: Any) -> Iterator[ChatSpanwire]:
    """A model with a manager of its own, which is closed at the end."""
    more.setdefault("api_key", "k")
    manager = spanwire.ConnectionManager()
    sync = spanwire.SyncConnectionManager(manager)
    try:
        yield ChatSpanwire(model=model, endpoint=more.pop("endpoint", server.url), manager=manager, **more)
    finally:
        sync.close()
        asyncio.run(manager.aclose())
