"""PURE: connections that were opened although one could have been there, and why it was not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
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
    found: list[Cold] = []
    for group in groups.values():
        needed = 0
        for at, call in enumerate(group):
            if call.reused:
                continue
            earlier = group[:at]
            ended = [one for one in earlier if one.end_s <= call.begin_s]
            if needed > at - len(ended) and ended:
                before = max(ended, key=lambda one: one.end_s)
                found.append(Cold(call, before, _why(call, before, earlier)))
            else:
                needed += 1
    return found


def _why(call: Call, before: Call, earlier: Sequence[Call]) -> Why:
    if call.client:
        same = [one for one in earlier if one.client == call.client and one.end_s <= call.begin_s]
        if not same:
            return "client"
        before = max(same, key=lambda one: one.end_s)
    expires_s = EXPIRES_S.get(call.transport)
    if before.outcome != "completed":
        return "left"
    if expires_s is not None and call.begin_s - before.end_s >= expires_s:
        return "idle"
    if before.streamed and before.protocol in ("", "http/1.1"):
        return "stream"
    return "closed"
