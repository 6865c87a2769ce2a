"""What the targets share: how an input is taken apart, and what must hold of any chunks that come out.

Nothing here needs atheris, so that the test suite can replay the seeds without it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from spanwire.calls import Chunk, ReplyBuilder

__all__ = ["Controls", "Evidence", "check_chunks", "check_joined", "cut", "single_bytes"]

_NUMBERS = (int, float)


class Controls:
    """An input: bytes for the code under test, and behind them, read from the end, the numbers that say what is done.

    Text in front stays readable and can grow without a change of meaning of what is behind it; bytes that are not there
    are 0. (``atheris.FuzzedDataProvider`` does the same, but is not there without atheris.)
    """

    __slots__ = ("_data", "_end")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._end = len(data)

    def byte(self) -> int:
        """The next number, 0 to 255."""
        if not self._end:
            return 0
        self._end -= 1
        return self._data[self._end]

    def cuts(self) -> list[int]:
        """Where to cut: a count, and two bytes for each place."""
        return [self.byte() | self.byte() << 8 for _ in range(self.byte() % 12)]

    def rest(self) -> bytes:
        """What was not used for numbers."""
        return self._data[: self._end]


def cut(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    """Pieces of ``data``, none empty."""
    edges = sorted({0, len(data), *(at % (len(data) + 1) for at in cuts)})
    return [data[begin:end] for begin, end in pairwise(edges)]


def single_bytes(data: bytes, most: int = 1 << 20) -> list[bytes]:
    """The smallest pieces that there are; a bit larger ones where there were more than ``most``."""
    size = 1 + len(data) // most
    return [data[at : at + size] for at in range(0, len(data), size)]


class Evidence:
    """All numbers and texts in the JSON that a server has sent: an answer has no others in it."""

    __slots__ = ("numbers", "readable", "texts")

    def __init__(self) -> None:
        self.numbers: set[float] = set()
        self.texts: set[str] = set()
        self.readable = True  # everything until now could be read here, so what is not in the sets was not sent

    def add(self, data: bytes) -> None:
        """The data of one event, or a whole body."""
        try:
            found = json.loads(data.decode("utf-8", "replace"), object_pairs_hook=list, strict=False)
        except (ValueError, RecursionError):  # not JSON; or one of Python's limits, which the codec need not share
            self.readable = False
            return
        for value in _leaves(found):
            if isinstance(value, str):
                self.texts.add(value)
            elif isinstance(value, _NUMBERS):
                self.numbers.add(value)


def _leaves(value: Any) -> Iterator[Any]:
    todo = [value]
    while todo:
        value = todo.pop()
        if isinstance(value, (list, tuple)):
            todo.extend(value)
        else:
            yield value


def check_chunks(chunks: Sequence[Chunk], evidence: Evidence) -> None:
    """Usage once, and of the server's own numbers; its own finish reasons; tool calls dense, ids and names once."""
    known: dict[int, tuple[bool, bool]] = {}
    usages = 0
    for chunk in chunks:
        assert type(chunk) is Chunk
        assert type(chunk.text) is str
        assert type(chunk.reasoning) is str
        if chunk.finish_reason is not None:
            assert chunk.finish_reason, "an empty finish reason"
            assert not evidence.readable or chunk.finish_reason in evidence.texts, "an invented finish reason"
        if chunk.usage is not None:
            usages += 1
            usage = chunk.usage
            counts = (
                usage.input_tokens, usage.output_tokens, usage.total_tokens, usage.cached_tokens, usage.reasoning_tokens,
            )  # fmt: skip
            assert any(count is not None for count in counts[:3]), "usage without a count"
            for count in counts:
                assert count is None or (type(count) is int and count >= 0)
                assert count is None or not evidence.readable or count in evidence.numbers, "an invented count"
        for delta in chunk.tool_calls:
            assert type(delta.arguments) is str
            assert type(delta.index) is int
            assert 0 <= delta.index <= len(known), "a gap in the tool calls' indexes"
            had_id, had_name = known.get(delta.index, (False, False))
            assert not (had_id and delta.id is not None), "a second id"
            assert not (had_name and delta.name is not None), "a second name"
            assert delta.id is None or delta.id, "an empty id"
            assert delta.name is None or delta.name, "an empty name"
            known[delta.index] = (had_id or delta.id is not None, had_name or delta.name is not None)
            assert not known[delta.index][1] or known[delta.index][0], "a named call without an id"
    assert usages <= 1, "usage twice"


def check_joined(chunks: Sequence[Chunk]) -> None:
    """A reply is what its deltas add up to, however they come in batches."""
    builder, one_by_one = ReplyBuilder(), ReplyBuilder()
    builder.add(chunks)
    for chunk in chunks:
        one_by_one.add([chunk])
    reply, other = builder.reply(), one_by_one.reply()
    assert reply.text == "".join(chunk.text for chunk in chunks)
    assert reply.reasoning == "".join(chunk.reasoning for chunk in chunks)
    deltas = [delta for chunk in chunks for delta in chunk.tool_calls]
    assert len(reply.tool_calls) == len({delta.index for delta in deltas})
    for index, call in enumerate(reply.tool_calls):
        mine = [delta for delta in deltas if delta.index == index]
        assert call.arguments == "".join(delta.arguments for delta in mine)
        assert call.name == next((delta.name for delta in mine if delta.name), "")
        assert call.id == next((delta.id for delta in mine if delta.id), f"call_{index}")
    assert reply.usage == next((chunk.usage for chunk in chunks if chunk.usage is not None), None)
    assert reply.finish_reason == next((chunk.finish_reason for chunk in reversed(chunks) if chunk.finish_reason), None)
    assert builder.content_chunks == one_by_one.content_chunks == sum(chunk.has_content for chunk in chunks)
    for name in ("text", "reasoning", "tool_calls", "finish_reason", "usage"):
        assert getattr(reply, name) == getattr(other, name)
