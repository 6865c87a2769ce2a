"""An echo, for messages that are nobody's schema: text stays text, bytes stay bytes, while more may be on their way.

Every message is one request of the book. Its script's ``queue_s``, ``headers_s`` and ``prefill_s`` count from its
arrival, so that a stream of messages comes back at the pace in which it was sent, later; ``writes`` come instead of the
echo, ``write_gap_s`` apart, and what ends connections does so. The rest of a script has no meaning here.
"""

from __future__ import annotations

import asyncio
from functools import partial

from msgspec.structs import replace

from spanwire.testing.loopback import Request

from .loopback_connection import Peer
from .loopback_play import Frames, as_it_is, frames, play

__all__ = ["Raw"]


class Raw:
    """One connection. Use: ``await Raw(peer).run()``."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._last: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Serve until the client or a script ends it. Raises websockets' ConnectionClosed."""
        peer = self._peer
        while True:
            message = await peer.recv()
            text = isinstance(message, str)
            raw = message.encode() if isinstance(message, str) else bytes(message)
            request = peer.arrived(raw, "message")
            arrived = peer.loop.time()
            self._last = peer.answer(request, partial(self._echo, request, arrived, self._last, binary=not text))

    async def _echo(self, request: Request, arrived: float, before: asyncio.Task[None] | None, *, binary: bool) -> None:
        peer = self._peer
        script = peer.book.script_for(request, None)
        wait_s = script.queue_s + script.headers_s + script.prefill_s
        if before is not None:
            await asyncio.wait([before])
        late = max(arrived + wait_s - peer.loop.time(), 0.0)
        script = replace(script, queue_s=0.0, headers_s=late, prefill_s=0.0, finish_reason="stop")
        given = frames(script) or [Frames(late, False, True, True, (request.raw,))]
        await play(peer, request, script, given, as_it_is, binary=binary)
