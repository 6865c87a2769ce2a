"""PURE: connections that were opened although one could have been there, and why it was not."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

import msgspec

from .facts import Call

__all__ = ["EXPIRES_S", "Cold", "Why", "avoidable"]

#: A connection that has been idle for so long is closed, in seconds: httpx's own default, and aiohttp's.
EXPIRES_S: Mapping[str, float] = {"httpx": 5.0, "httpx2": 5.0, "aiohttp": 15.0}

#: ``client``: the client was new. ``idle``: it had thrown the connection away by its age. ``stream``: the end of a streamed
#: answer was not read. ``left``: the call before was not read to the end. ``closed``: none of that: the other side did it.
Why = Literal["client", "idle", "stream", "left", "closed"]


class Cold(msgspec.Struct, frozen=True):
    """A call that opened a connection although one could have been there. ``before``: the call that had one last."""

    call: Call
    before: Call
    why: Why


def avoidable(calls: Iterable[Call]) -> list[Cold]:
    """Calls on new connections, without those that a perfect client opens: as many as calls that run at once."""
    groups: dict[tuple[int, str], list[Call]] = defaultdict(list)
    for call in sorted(calls, key=lambda call: call.begin_s):
        if call.process and call.reused is not None:
            groups[call.process, call.endpoint].append(call)
    return [cold for group in groups.values() for cold in _avoidable(group)]


def _avoidable(group: Iterable[Call]) -> Iterator[Cold]:
    """Of one process and one endpoint, in the order of their begin."""
    running: list[tuple[float, int, Call]] = []
    last: Call | None = None  # that has ended last
    last_of: dict[int, Call] = {}  # the same for each client
    needed = 0
    for number, call in enumerate(group):
        while running and running[0][0] <= call.begin_s:
            last = heapq.heappop(running)[2]
            last_of[last.client] = last
        if not call.reused:
            if last is not None and needed > len(running):
                yield Cold(call, last, _why(call, last_of.get(call.client) if call.client else last))
            else:
                needed += 1
        heapq.heappush(running, (call.end_s, number, call))


def _why(call: Call, before: Call | None) -> Why:
    if before is None:
        return "client"
    if before.outcome != "completed":
        return "left"
    expires_s = EXPIRES_S.get(call.transport)
    if expires_s is not None and call.begin_s - before.end_s >= expires_s:
        return "idle"
    if before.streamed and before.protocol in ("", "http/1.1"):
        return "stream"
    return "closed"
