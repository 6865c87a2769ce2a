"""Event loops, threads, and synchronous callers: one manager for all of them."""

# A manager and a stream in it are two steps; an error may come anywhere while a stream is entered and read.

from __future__ import annotations

import asyncio
import gc
import importlib.util
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress

import pytest

from ...errors import SpanwireError
from ...sync import SyncConnectionManager, _loop_thread
from .abilities import needs
from .answers import WORDS, hello
from .harness import PATIENCE_S, SOON_S, Kit, Scene, read
from .leaving import STAGES


def _factory(kind: str) -> Callable[[], asyncio.AbstractEventLoop] | None:
    if kind != "uvloop":
        return None
    if importlib.util.find_spec("uvloop") is None:
        pytest.skip("uvloop is not installed")
    import uvloop

    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


class Loops(Kit):
    """Event loops, threads, and synchronous callers."""

    @pytest.mark.parametrize("kind", ["asyncio", "debug", "uvloop"])
    def test_one_loop_after_another(self, kind: str) -> None:
        """Proves: a manager that outlives its loop makes new connections on the next one, on loops of each kind.

        If it fails: nothing that belongs to a loop (futures, locks, connections) may be kept on the transport object.
        In debug mode: something is called from another thread than the loop's, or a coroutine was never awaited.
        """
        with self.scene(hello()) as scene:
            manager = self.manager(telemetry=None)

            async def body() -> None:
                for _ in range(2):
                    async with manager.stream(scene.endpoint(), self.call()) as stream:
                        assert await read(stream) == "".join(WORDS)
                await scene.settled(manager)

            for _ in range(3):
                scene.run(body, loop_factory=_factory(kind), debug=kind == "debug", manager_stays=True)

    def test_several_loops_at_once(self) -> None:
        """Proves: threads with loops of their own share a manager, and no connection.

        If it fails: look for state on the transport object, or in its module, that one loop fills and another takes.
        """
        with self.scene(hello(prefill_s=0.02)) as scene:
            manager = self.manager(telemetry=None)
            problems: list[BaseException] = []

            async def body() -> None:
                for _ in range(5):
                    async with manager.stream(scene.endpoint(), self.call()) as stream:
                        assert await read(stream) == "".join(WORDS)
                await scene.settled(manager)

            def main() -> None:
                try:
                    scene.run(body, manager_stays=True)
                except BaseException as error:  # noqa: BLE001 - raised by the test
                    problems.append(error)

            threads = [threading.Thread(target=main) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(PATIENCE_S)
            if problems:
                raise problems[0]

    @pytest.mark.parametrize("where", ["main thread", "two threads", "inside a loop"])
    def test_synchronously(self, where: str) -> None:
        """Proves: ``SyncConnectionManager`` carries calls, also for several threads, and on a thread whose loop is running.

        If it fails: a transport must not ask for the running loop outside of coroutines, nor need the main thread.
        """
        _loop_thread()  # the process's own, which stays: its sockets are none of the transport's
        with self.scene(hello()) as scene:
            problems: list[BaseException] = []
            with SyncConnectionManager(plugins=self.plugins(), telemetry=None) as manager:

                def body() -> None:
                    try:
                        for _ in range(2):
                            with manager.stream(scene.endpoint(), self.call()) as stream:
                                assert "".join(chunk.text for chunk in stream) == "".join(WORDS)
                        if self.can("unary"):
                            assert manager.complete(scene.endpoint(), self.call()).text == "".join(WORDS)
                    except BaseException as error:  # noqa: BLE001 - raised by the test
                        problems.append(error)

                async def inside() -> None:
                    body()  # blocks this loop, on purpose

                if where == "inside a loop":
                    asyncio.run(inside())
                elif where == "main thread":
                    body()
                else:
                    threads = [threading.Thread(target=body) for _ in range(2)]
                    for thread in threads:
                        thread.start()
                    for thread in threads:
                        thread.join(PATIENCE_S)
            if problems:
                raise problems[0]

    # Of a library's tasks and transports on such a loop, Python itself complains.
    @pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
    @needs("hang")
    def test_a_loop_that_was_closed_with_a_call_on_it(self) -> None:
        """Proves: where a loop is closed under a call and its connection, ``usable()``, ``abort()`` and the next loop's calls
        work, and the server hears that its client has gone.

        If it fails: suppress the RuntimeError of a closed loop, and close the socket itself there.
        """
        self._close_under_a_call()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()  # here, and not in somebody else's test

    def _close_under_a_call(self) -> None:
        with self.scene(STAGES["streaming"], hello()) as scene:
            manager = self.manager(telemetry=None)
            stream = manager.stream(scene.endpoint(), self.call())

            async def begin() -> None:
                assert (await anext(stream)).text == WORDS[0]

            loop = asyncio.new_event_loop()
            loop.run_until_complete(begin())
            pools = [pool for state in manager._states.values() for pool in state.pools.values()]
            connections = [member.connection for pool in pools for member in pool.state.members]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ResourceWarning)
                loop.close()
            assert connections
            for connection in connections:
                connection.usable()
                connection.abort()
                connection.abort()
                assert not connection.usable()

            async def next_one() -> None:
                async with manager.stream(scene.endpoint(), self.call()) as after:
                    assert await read(after) == "".join(WORDS)
                await scene.settled(manager)
                await scene.left()

            self._closed(scene, next_one)
            with suppress(SpanwireError, RuntimeError):
                asyncio.run(stream.aclose())

    def _closed(self, scene: Scene, next_one: Callable[[], object]) -> None:
        scene.run(next_one, manager_stays=True)  # type: ignore[arg-type]
        if self.can("connections"):
            scene.server.wait_for(lambda s: s.open_connections == 0, SOON_S)
