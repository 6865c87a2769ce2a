"""A consumer that is slower than the server: what waits for it is bounded."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest

from ...calls import Chunk
from ...timeline import Marks
from ...transport import Exchange, Item
from ..script import Script
from .abilities import needs
from .harness import Kit, Scene

#: 32 MiB: more than what the kernels' buffers of a connection (Linux: up to 6 and 4 MiB) and an inbox of 4096 items hold.
PIECE = "0123456789abcdef" * 128
PIECES = 16_384
#: So long nothing has come, in seconds: the server waits.
QUIET_S = 0.3
#: For all of it, in seconds: the machine may be busy.
POUR_S = 30.0


class Pressure(Kit):
    """A consumer that does not read."""

    @needs("backpressure")
    def test_a_consumer_that_does_not_read_stops_the_server(self) -> None:
        """Proves: of an answer of 32 MiB that nobody reads, the server can write only a part: then its writes wait, and
        this process holds no more than that. Read on, the answer comes whole.

        If it fails: :meth:`~spanwire.transport.Inbox.on_high` has to stop reading from the socket (``pause_reading()``
        of asyncio's transport, no more ``recv()``, no more window), ``on_low`` to go on. Call ``wake()`` after each batch of
        bytes: it is what looks at the mark. On a shared connection only this exchange may be stopped; a wire that
        cannot do that says so in ``cannot``.
        """
        with self.scene(Script(tokens=(PIECE,) * PIECES, usage=None)) as scene:

            async def body() -> None:
                async with scene.connection() as direct:
                    exchange, attempt = await direct.start(self.call())
                    items = await _next(exchange)
                    await self._server_waits(scene, attempt.marks)
                    size = 0
                    while items:
                        for item in items:
                            assert isinstance(item, Chunk)
                            size += len(item.text)
                        items = await _next(exchange)
                    assert size == len(PIECE) * PIECES, "the answer is not whole after it was stopped"

            scene.run(body, patience_s=POUR_S)

    async def _server_waits(self, scene: Scene, marks: Marks) -> None:
        """Nothing comes any more, and the server has not written all."""
        last_ns, since = 0, time.monotonic()
        while time.monotonic() - since < QUIET_S:
            await asyncio.sleep(0.01)
            if scene.server.requests[0].ended:
                pytest.fail(
                    f"the server has written all {len(PIECE) * PIECES >> 20} MiB, and nobody has read them: they are in "
                    "this process"
                )
            if marks.last_byte_ns != last_ns:
                last_ns, since = marks.last_byte_ns, time.monotonic()


async def _next(exchange: Exchange) -> Sequence[Item]:
    try:
        async with asyncio.timeout(POUR_S / 2):
            return await exchange.read()
    except TimeoutError:
        pytest.fail(f"nothing came for {POUR_S / 2} s: what on_high() has stopped, on_low() has to let go on")
