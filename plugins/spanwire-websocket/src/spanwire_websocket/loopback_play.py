"""Plays a scripted answer on a connection: the waits, the writes, the stamps, and the end or the cut."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

from spanwire.testing.loopback import Request
from spanwire.testing.script import Script

from .loopback_connection import Peer

__all__ = ["Frames", "as_it_is", "frames", "play"]

T = TypeVar("T")

#: Messages that are due together go out in writes of about this size, with other connections served in between.
_WRITE_BYTES = 64 * 1024


class Frames(NamedTuple):
    """A moment of an answer that is scripted frame by frame, as a :class:`~spanwire.testing.responses_events.Step`."""

    wait_s: float
    paced: bool
    content: bool
    counts: bool
    events: tuple[bytes, ...]


def as_it_is(frame: bytes) -> bytes:
    """How :class:`Frames` are encoded."""
    return frame


def frames(script: Script) -> Iterator[Frames] | None:
    """``Script(writes=..., body=...)``: these messages instead of an answer. None: it has none."""
    if script.body is not None:
        wait_s = script.total_s - script.queue_s - script.end_s
        return iter([Frames(wait_s, False, True, True, (script.body,))])
    return _writes(script, script.writes) if script.writes is not None else None


def _writes(script: Script, writes: Iterable[bytes]) -> Iterator[Frames]:
    wait_s, paced = script.headers_s + script.prefill_s, False
    for write in writes:
        yield Frames(wait_s, paced, True, True, (write,))
        wait_s, paced = script.write_gap_s, True


async def play(
    peer: Peer,
    request: Request,
    script: Script,
    steps: Iterable[tuple[float, bool, bool, bool, tuple[T, ...]]],
    encode: Callable[[T], bytes],
    *,
    queue_shown: bool = False,
    truncates: bool = False,
    binary: bool = False,
) -> None:
    """Answer a request.

    Args:
        steps: a :class:`~spanwire.testing.responses_events.Step` each, or :class:`Frames`.
        encode: makes an event's message; called when it is due.
        queue_shown: ``steps`` tell of the queue: its wait is the first part of that of the first step that counts. Else
            it is waited before anything is made.
        truncates: without a finish reason, the connection is closed in order when the answer is over.
        binary: the messages are bytes, not text.

    Raises:
        Gone: there is no connection any more.
    """
    loop = peer.loop
    if script.drop_after == "request":
        await peer.cut(script, partial=False)
        return
    if script.hang_after == "request":
        await loop.create_future()
    if not queue_shown:
        if script.queue_s:
            await asyncio.sleep(script.queue_s)
        request.queued_ns = time.perf_counter_ns()
    held: list[bytes] = []  # what goes out with the next write
    size = played = 0
    due = loop.time()
    cut = False
    stops = {script.drop_after, script.hang_after}
    for wait_s, paced, content, counts, events in steps:
        if counts:
            if played in stops:
                cut = True
                break
            played += 1
        now = loop.time()
        due = (due if paced else now) + wait_s
        if (wait_s and due > now) or size > _WRITE_BYTES:
            if held:
                await peer.write(held, binary=binary)
                held, size = [], 0
            if request.queued_ns is None and counts:
                await asyncio.sleep(due - wait_s + script.queue_s - loop.time())
                request.queued_ns = time.perf_counter_ns()
            await asyncio.sleep(due - loop.time())
        if request.queued_ns is None and counts:
            request.queued_ns = time.perf_counter_ns()
        if request.headers_ns is None:
            peer.book.wrote(request, headers=True)
        if content:
            if request.content_ns is None:
                peer.book.wrote(request, content=True)
                request.prefilled_ns = request.content_ns
            request.decoded_ns = time.perf_counter_ns()
        for event in events:
            message = encode(event)
            held.append(message)
            size += len(message)
    if not cut:
        peer.ended(request)  # before the bytes: whoever has read the whole answer finds it recorded
    await peer.write(held, binary=binary)
    if cut and script.hang_after is not None:
        await loop.create_future()
    if script.drop_after is not None:
        await peer.cut(script, partial=cut)
        return
    if script.end_s:
        await asyncio.sleep(script.end_s)
    if script.close or (truncates and script.finish is None):
        await peer.finish(1000)
