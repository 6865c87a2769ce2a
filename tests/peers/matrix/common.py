"""What the runners share: ``python -m tests.peers.matrix.<client> bare|explicit|zero KIND...`` prints answers as JSON.

A kind is ``sync-whole``, ``sync-stream``, ``async-whole`` or ``async-stream``. A runner asks six times in a row on one
client, and says of each answer what a user of the client sees. It runs in an environment that has the client, spanwire
and spanwire-instrument, and nothing else of this repository.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, NamedTuple

CALLS = 6
PROMPT = "Say hello"
MESSAGES = [{"role": "user", "content": PROMPT}]
WAYS = ("bare", "explicit", "zero")
#: Where the server is; the path of each request then begins with the kind. The certificate's authority is in SSL_CERT_FILE.
ORIGIN = "MATRIX_ORIGIN"

#: Text, finish reason and usage, as the client shows them.
Answer = dict[str, Any]


class Job(NamedTuple):
    """Six calls of one kind."""

    way: str
    kind: str

    @property
    def explicit(self) -> bool:
        return self.way == "explicit"

    @property
    def streamed(self) -> bool:
        return self.kind.endswith("-stream")

    @property
    def origin(self) -> str:
        return f"{os.environ[ORIGIN]}/{self.kind}"

    @property
    def url(self) -> str:
        return f"{self.origin}/v1"

    def times(self, ask: Callable[[], Answer]) -> list[Answer]:
        return [ask() for _ in range(CALLS)]

    async def times_async(self, ask: Callable[[], Awaitable[Answer]]) -> list[Answer]:
        return [await ask() for _ in range(CALLS)]


def main(
    *,
    sync: Callable[[Job], list[Answer]] | None = None,
    asynchronous: Callable[[Job], Awaitable[list[Answer]]] | None = None,
) -> None:
    """Run the kinds that the command line names. Clients are to be imported by these functions, not before."""
    way, *kinds = sys.argv[1:]
    assert way in WAYS, way
    logged: list[str] = []
    logging.getLogger("spanwire").addHandler(_Handler(logged))
    if way == "zero":
        import spanwire_instrument

        spanwire_instrument.instrument()
    found: dict[str, list[Answer]] = {}
    for kind in kinds:
        job = Job(way, kind)
        if kind.startswith("sync-"):
            assert sync is not None
            found[kind] = sync(job)
        else:
            assert asynchronous is not None
            found[kind] = asyncio.run(_awaited(asynchronous(job)))
    print(json.dumps({"answers": found, "logged": logged}))


class _Handler(logging.Handler):
    """Keeps what spanwire has to complain about."""

    def __init__(self, into: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._into = into

    def emit(self, record: logging.LogRecord) -> None:
        self._into.append(f"{record.getMessage()} {record.exc_info or ''}")


async def _awaited(answers: Awaitable[list[Answer]]) -> list[Answer]:
    return await answers


# --- what has the shape of OpenAI's chat completions: openai, and litellm ------------------------------------------------


def of_completion(completion: Any) -> Answer:
    (choice,) = completion.choices
    return {
        "text": choice.message.content,
        "finish_reason": choice.finish_reason,
        "usage": completion.usage and completion.usage.model_dump(),
    }


def of_chunks(chunks: Iterator[Any]) -> Answer:
    answer: Answer = {"text": "", "finish_reason": None, "usage": None}
    for chunk in chunks:
        _add(answer, chunk)
    return answer


async def of_chunks_async(chunks: AsyncIterator[Any]) -> Answer:
    answer: Answer = {"text": "", "finish_reason": None, "usage": None}
    async for chunk in chunks:
        _add(answer, chunk)
    return answer


def _add(answer: Answer, chunk: Any) -> None:
    for choice in chunk.choices:
        answer["text"] += choice.delta.content or ""
        answer["finish_reason"] = choice.finish_reason or answer["finish_reason"]
    if getattr(chunk, "usage", None):
        answer["usage"] = chunk.usage.model_dump()
