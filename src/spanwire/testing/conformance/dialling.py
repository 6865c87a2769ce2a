"""Making a connection, and being stopped in the middle of it: nothing may stay open."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any

import pytest

from ...transport import Attempt, Connection
from .answers import hello
from .harness import SOON_S, Kit, Scene, open_sockets, until

#: Turns of the loop between the beginning of a wait and the cancel: what is waited for goes on meanwhile.
TURNS = (0, 1, 2, 3, 5, 8, 13, 21, 34, 55)
#: A connect that waits more often than this is not looked at any further.
MOST_WAITS = 40


class _Stopped:
    """Awaits a connect, and cancels its task in one of its waits.

    Attributes:
        reached: it has waited that often.
        told: CancelledError was raised in it.
    """

    def __init__(self, work: Coroutine[Any, Any, Connection], *, wait: int, turns: int) -> None:
        self._work = work
        self._wait = wait
        self._turns = turns
        self.reached = False
        self.told = False

    async def run(self) -> Connection:
        return await self

    def __await__(self) -> Generator[Any, Any, Connection]:
        task = asyncio.current_task()
        assert task is not None
        raised: BaseException | None = None
        waits = 0
        while True:
            try:
                waited_for = self._work.send(None) if raised is None else self._work.throw(raised)
            except StopIteration as end:
                found: Connection = end.value
                return found
            waits += 1
            if waits == self._wait:
                self.reached = True
                _after_turns(self._turns, task)
            raised = None
            try:
                yield waited_for
            except BaseException as error:  # noqa: BLE001 - it goes to whom it was meant for
                self.told = self.told or isinstance(error, asyncio.CancelledError)
                raised = error


def _after_turns(turns: int, task: asyncio.Task[Any]) -> None:
    loop = asyncio.get_running_loop()
    if turns:
        loop.call_soon(_after_turns, turns - 1, task)
    else:
        loop.call_soon(task.cancel)


class Dialling(Kit):
    """Being stopped while a connection is made."""

    def test_a_dial_that_is_cancelled_leaves_nothing(self) -> None:
        """Proves: ``connect()``, cancelled in each of its waits (a look-up, TCP, a handshake, an upgrade), raises
        CancelledError soon, closes its socket by itself, and the server sees the connection close. This is what happens
        at ``Timeouts.connect_s``, and when the manager is closed.

        If it fails: whatever holds a socket needs ``except BaseException: sock.close(); raise`` until the connection
        that owns it is returned. Do not catch CancelledError and go on, nor shield the dial; ``asyncio.wait_for`` on
        Python 3.11 swallows a cancel that comes together with the result, ``asyncio.timeout`` does not.
        :func:`spanwire.net.dial.dial` does all of that.
        """
        with self.scene(hello()) as scene:
            # With their tracebacks, and so with the locals of what was cancelled: the garbage collector closes nothing.
            kept: list[BaseException] = []

            async def body() -> None:
                async with scene.connection():
                    pass  # what is made once is there
                for turns in TURNS:
                    for wait in range(1, MOST_WAITS):
                        if not await self._stop_one(scene, wait, turns, kept):
                            break
                async with scene.connection() as direct:
                    exchange, _ = await direct.start(self.call())
                    while await exchange.read():
                        pass  # the server accepts in order: now it has seen those before
                await self._no_connection(scene, None, "a connection that was closed")

            scene.run(body)

    async def _stop_one(self, scene: Scene, wait: int, turns: int, kept: list[BaseException]) -> bool:
        """Cancel a connect in that wait; False if it does not wait so often."""
        manager = self.manager(telemetry=None)
        endpoint = scene.endpoint()
        transport, dialect = scene.transport(manager, endpoint)
        transport.key(endpoint)
        await self._no_connection(scene, None, "a connection that was closed")
        before = open_sockets()
        attempt = Attempt(endpoint, timeouts=endpoint.timeouts, dialect=dialect)
        stopped = _Stopped(transport.connect(endpoint, attempt), wait=wait, turns=turns)
        dialling = asyncio.ensure_future(stopped.run())
        done, _ = await asyncio.wait([dialling], timeout=SOON_S)
        where = f"connect(), cancelled in its wait number {wait}"
        if not done:
            pytest.fail(f"{where}, has not ended")
        connection: Connection | None = None
        try:
            connection = await dialling
        except asyncio.CancelledError as error:
            kept.append(error)
        if connection is not None:
            await connection.aclose()
            connection.abort()
            assert not stopped.told, f"{where}, gave a connection: CancelledError was caught"
        await self._no_connection(scene, before, where)
        await manager.aclose()
        return stopped.reached

    async def _no_connection(self, scene: Scene, before: frozenset[str] | None, what: str) -> None:
        """No socket that was not there before, and no connection on the server."""
        if before is not None:
            await until(lambda: not ((open_sockets() or before) - before), lambda: f"{what}, has left a socket open")
        if self.can("connections"):
            await until(
                lambda: scene.server.open_connections == 0,
                lambda: f"{what}, is still open on the server",
            )
