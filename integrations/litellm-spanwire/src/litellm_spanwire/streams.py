"""Streamed answers, as the iterators that LiteLLM reads from."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any, Self

from opentelemetry.context import Context

from spanwire import Chunk, SpanwireError
from spanwire.manager import Stream
from spanwire.sync import SyncStream

from .answers import Shaper
from .errors import translated
from .reports import fill
from .tracing import entered

__all__ = ["AsyncAnswer", "SyncAnswer"]


class _Answer:
    """What both have in common: the shape of chunks, and how the end of the call is told."""

    __slots__ = ("_found", "_left", "_model", "_shaper", "_stream", "_url")

    def __init__(self, stream: Any, shaper: Shaper, found: dict[str, Any], model: str, url: str | None) -> None:
        self._stream = stream
        self._shaper = shaper
        self._found = found
        self._model = model
        self._url = url
        self._left: list[Any] | None = None  # after the end of the answer: what is still to hand out, in reverse

    def _begin(self, chunk: Chunk) -> None:
        reply = self._stream.reply
        self._shaper.begin(chunk, reply.id, reply.model, self._stream.headers)

    def _completed(self) -> None:
        self._left, made_up = self._shaper.end()
        fill(self._found, self._stream.timeline, **made_up)

    def _was_left(self) -> None:
        self._left = []
        with contextlib.suppress(RuntimeError):  # it was never entered
            fill(self._found, self._stream.timeline)

    def _failed(self, error: SpanwireError) -> Exception:
        self._left = []
        return translated(error, self._model, self._url, self._found)


class AsyncAnswer(_Answer):
    """Nothing is sent before it is read: LiteLLM makes it on another thread. Dropping it is noticed."""

    __slots__ = ("_context", "_entered", "_next")

    def __init__(
        self, stream: Stream, shaper: Shaper, found: dict[str, Any], model: str, url: str | None, context: Context
    ) -> None:
        super().__init__(stream, shaper, found, model, url)
        self._context = context
        self._next = stream.__anext__
        self._entered = False

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        left = self._left
        if left is not None:
            if left:
                return left.pop()
            raise StopAsyncIteration
        shaper = self._shaper
        try:
            if not self._entered:
                self._entered = True
                with entered(self._context):
                    await self._stream.__aenter__()
            while True:
                chunk = await self._next()
                if not shaper.begun:
                    self._begin(chunk)
                made = shaper.add(chunk)
                if made is not None:
                    return made
        except StopAsyncIteration:
            self._completed()
        except SpanwireError as error:
            raise self._failed(error) from error
        except BaseException as error:  # cancelled: the server hears of it now
            await self._stream.__aexit__(type(error), error, None)
            self._was_left()
            raise
        return await self.__anext__()

    async def aclose(self) -> None:
        """Leave the call now. Does nothing if it has ended."""
        if self._left is None:
            await self._stream.aclose()
            self._was_left()


class SyncAnswer(_Answer):
    """The call is made at once, so that one that fails before its first event fails where it was made."""

    __slots__ = ("_first",)

    def __init__(
        self, stream: SyncStream, shaper: Shaper, found: dict[str, Any], model: str, url: str | None, context: Context
    ) -> None:
        super().__init__(stream, shaper, found, model, url)
        self._first: Chunk | None = None
        try:
            with entered(context):
                stream.__enter__()
            self._first = next(stream, None)
        except SpanwireError as error:
            raise self._failed(error) from error
        except BaseException:
            self.close()
            raise
        if self._first is None:
            self._completed()
        else:
            self._begin(self._first)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __next__(self) -> Any:
        left = self._left
        if left is not None:
            if left:
                return left.pop()
            raise StopIteration
        try:
            while True:
                chunk, self._first = self._first, None
                made = self._shaper.add(chunk if chunk is not None else next(self._stream))
                if made is not None:
                    return made
        except StopIteration:
            self._completed()
        except SpanwireError as error:
            raise self._failed(error) from error
        except BaseException:  # Ctrl-C
            self.close()
            raise
        return self.__next__()

    def close(self) -> None:
        """Leave the call now. Does nothing if it has ended."""
        if self._left is None:
            self._stream.close()
            self._was_left()
