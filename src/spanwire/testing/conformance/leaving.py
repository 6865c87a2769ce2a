"""Leaving a call: the server hears of it, and nothing is left."""

# A manager and a stream in it are two steps; an error may come anywhere while a stream is entered and read.
# ruff: noqa: SIM117

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
from collections.abc import Callable
from typing import TYPE_CHECKING
from weakref import ref

import pytest

from ...calls import Chunk
from ...endpoint import Limits
from ...errors import ConfigurationError, ConnectionFailed, SpanwireError
from ..script import Script
from .abilities import needs
from .answers import WORDS, hello
from .harness import SOON_S, Kit, Scene, assert_adds_up, read, slowly, until

if TYPE_CHECKING:
    from ...manager import ConnectionManager, Stream

STAGES = {"sent": Script(hang_after="request"), "streaming": hello(hang_after=3, role_chunk=False)}
OUTCOMES = {"cancel": "cancelled", "close": "closed_by_caller", "manager": "error", "dropped": "abandoned"}


class Leaving(Kit):
    """Leaving a call, in every way."""

    @needs("hang")
    @pytest.mark.parametrize("way", ["cancel", "close", "manager", "dropped"])
    @pytest.mark.parametrize("stage", list(STAGES))
    def test_a_call_that_is_left_leaves_nothing(self, stage: str, way: str) -> None:
        """Proves: cancelled, closed from another task, closed with the manager, or simply dropped: the server hears of it,
        slot and lease come back, the span ends, no task and no socket stays, and the next call is answered.

        If it fails: ``Exchange.abort()`` has to tell the server (close the connection, reset the stream, cancel the
        call) and to call ``attempt.released()``; a pending read returns empty then. Never catch CancelledError and go on.
        """
        with self.scene(STAGES[stage], hello()) as scene:

            async def body() -> None:
                async with scene.manager() as manager:
                    endpoint = scene.endpoint(limits=Limits(max_concurrent=1))
                    stream: Stream | None = manager.stream(endpoint, self.call("left"))
                    assert stream is not None
                    await stream.__aenter__()
                    await scene.wait_for(lambda s: s.requests)
                    if stage == "streaming":
                        assert (await anext(stream)).text == WORDS[0]
                    if way == "dropped":
                        stream = None
                        gc.collect()
                    else:
                        await self._leave(manager, stream, way)
                        assert stream.timeline.outcome == OUTCOMES[way]
                        assert_adds_up(stream.timeline)
                    await scene.left()
                    slots = manager._prepare(endpoint).slots
                    assert slots is not None
                    await until(
                        lambda: "0 of 1 in use" in repr(slots), lambda: f"the slot was not given back: {slots!r}"
                    )
                    if way != "manager":
                        await scene.settled(manager)
                    async with asyncio.timeout(SOON_S):
                        async with manager.stream(endpoint, self.call("next")) as after:
                            assert await read(after) == "".join(WORDS)
                spans = [span for span in scene.spans.spans if span.name == "chat left"]
                assert [span.attributes["spanwire.outcome"] for span in spans] == [OUTCOMES[way]]

            scene.run(body)

    @staticmethod
    async def _leave(manager: ConnectionManager, stream: Stream, way: str) -> None:
        async def consume() -> str:  # the rest of an `async with` block
            try:
                return await read(stream)
            except BaseException as error:
                await stream.__aexit__(type(error), error, None)
                raise

        reading = asyncio.create_task(consume())
        for _ in range(5):  # until it waits
            await asyncio.sleep(0.002)
        if way == "cancel":
            reading.cancel()
        elif way == "close":
            await stream.aclose()
        else:
            await manager.aclose()
        done, _ = await asyncio.wait([reading], timeout=SOON_S)
        if not done:
            reading.cancel()
            pytest.fail("a pending read did not end: CancelledError was caught, or abort() did not wake the reader")
        if way == "cancel":
            assert reading.cancelled(), "the read was cancelled, and CancelledError did not come through"
        elif way == "close":
            assert reading.exception() is None
        else:
            assert isinstance(reading.exception(), ConnectionFailed)

    @needs("hang")
    def test_a_cancelled_read_loses_nothing(self) -> None:
        """Proves: a read that is given up after a few milliseconds, again and again, leaves every piece for the next one.

        If it fails: take items out of the inbox only when they are returned, not before an ``await``.
        """
        with self.scene(slowly([f" {n}" for n in range(20)], gap_s=0.005)) as scene:

            async def body() -> None:
                async with scene.manager() as manager:
                    async with manager.stream(scene.endpoint(), self.call()) as stream:
                        text = ""
                        while True:
                            try:
                                text += (await asyncio.wait_for(anext(stream), 0.002)).text
                            except TimeoutError:
                                continue
                            except StopAsyncIteration:
                                break
                        assert text == "".join(f" {n}" for n in range(20))

            scene.run(body)

    def test_a_break_after_the_finish_reason_keeps_the_connection(self) -> None:
        """Proves: who leaves when only usage and the end are to come costs nobody a connection.

        If it fails: ``Exchange.complete`` is True from the finish reason on. The manager then lets the message end
        instead of aborting it.
        """
        script = hello(end_s=0.02) if self.can("finish") else hello()
        with self.scene(script) as scene:

            async def body() -> None:
                async with scene.manager() as manager:
                    for _ in range(3):
                        async with manager.stream(scene.endpoint(), self.call()) as stream:
                            async for chunk in stream:
                                if chunk.finish_reason:
                                    break
                        await scene.settled(manager)
                        assert stream.timeline.outcome in {"completed", "closed_by_caller"}
                    use = stream.timeline.connection
                    assert use is not None
                    assert use.reused, "the connection was thrown away"
                    if self.can("connections"):
                        assert scene.server.connections == 1

            scene.run(body)

    def test_a_completed_call_gives_its_connection_back(self) -> None:
        """Proves: ten calls in a row go over one connection, each released at the end of its message and not before.

        If it fails: call ``attempt.released()`` exactly once, when the message has ended. Never: calls pile up
        connections, and each message's end is called overdue after a second. Too early: two calls meet on one connection.
        """
        with self.scene(hello()) as scene:

            async def body() -> None:
                async with scene.manager() as manager:
                    for number in range(10):
                        async with manager.stream(scene.endpoint(), self.call()) as stream:
                            assert await read(stream) == "".join(WORDS)
                        (pool,) = manager.state().pools.values()
                        await until(
                            lambda: not any(member.leases for member in pool.state.members),  # noqa: B023 - awaited
                            lambda: "the answer has ended, and attempt.released() was not called",
                            soon_s=0.5,
                        )
                        use = stream.timeline.connection
                        assert use is not None
                        assert use.reused == (number > 0)
                if self.can("connections"):
                    assert scene.server.connections == 1

            scene.run(body)

    def test_a_call_that_cannot_be_written_costs_no_connection(self) -> None:
        """Proves: a ``start()`` that raises (here: a parameter that no wire can carry) leaves the connection as it was, and
        the manager has it back; nothing reaches the server, and the error is ConfigurationError, not the library's.

        If it fails: encode before anything is written or registered. ``released()`` is not needed for an exchange that was
        never started.
        """
        with self.scene(hello()) as scene:

            async def body() -> None:
                async with scene.manager() as manager:
                    await manager.warm(scene.endpoint())
                    with pytest.raises(ConfigurationError):
                        async with manager.stream(scene.endpoint(), self.call(unheard_of=object())) as stream:
                            await read(stream)
                    await scene.settled(manager)
                    (pool,) = manager.state().pools.values()
                    assert len(pool.state.members) == 1, "the connection was thrown away"
                    assert not scene.server.requests
                    async with manager.stream(scene.endpoint(), self.call()) as stream:
                        assert await read(stream) == "".join(WORDS)
                if self.can("connections"):
                    assert scene.server.connections == 1

            scene.run(body)

    @needs("hang")
    def test_abort_is_idempotent_and_wakes_the_reader(self) -> None:
        """Proves: ``Exchange.abort()`` may be called again and again; a pending read returns empty, without an error.

        If it fails: keep a flag. The reader is woken by a result, not by cancelling its task.
        """
        with self.scene(STAGES["streaming"]) as scene:

            async def body() -> None:
                async with scene.connection() as direct:
                    exchange, _ = await direct.start(self.call())
                    await self._read_words(exchange.read, 3)
                    reading = asyncio.ensure_future(exchange.read())
                    await asyncio.sleep(0.01)
                    for _ in range(3):
                        exchange.abort()
                    done, _ = await asyncio.wait([reading], timeout=SOON_S)
                    assert done, "a pending read did not return when the exchange was aborted"
                    assert not reading.cancelled(), "abort() has cancelled the task that reads"
                    assert not reading.result()
                    assert not await exchange.read()
                    exchange.abort()
                    await until(lambda: direct.releases[0], lambda: "abort() did not lead to attempt.released()")
                    await scene.left()
                assert direct.releases == [1]

            scene.run(body)

    @staticmethod
    async def _read_words(read_batch: object, count: int) -> str:
        text = ""
        async with asyncio.timeout(SOON_S):
            while text != "".join(WORDS[:count]):
                items = await read_batch()  # type: ignore[operator]
                assert items, f"the read ended after {text!r}"
                text += "".join(item.text for item in items if isinstance(item, Chunk))
        return text

    @needs("hang")
    def test_abort_with_an_error_delivers_first_and_then_raises(self) -> None:
        """Proves: what has arrived before a limit was hit is read, and then the limit's error is raised, once.

        If it fails: ``abort(error)`` keeps the items, and has the read after the last of them raise the error.
        """
        with self.scene(STAGES["streaming"]) as scene:

            async def body() -> None:
                async with scene.connection() as direct:
                    exchange, attempt = await direct.start(self.call())
                    await scene.wait_for(lambda s: s.requests)
                    await until(
                        lambda: attempt.marks.first_content_ns or not self.can("segments"), lambda: "no content came"
                    )
                    await asyncio.sleep(0.05)
                    exchange.abort(ConnectionFailed("the limit", endpoint="h"))
                    await self._read_words(exchange.read, 3)
                    with pytest.raises(ConnectionFailed, match="the limit"):
                        await exchange.read()

            scene.run(body)

    @needs("hang")
    def test_start_does_not_wait_for_the_answer(self) -> None:
        """Proves: ``start()`` returns once the request was handed over, on a server that never answers.

        If it fails: whatever waits for the answer's head belongs into a task or a callback; ``read()`` waits.
        """
        with self.scene(Script(hang_after="request")) as scene:

            async def body() -> None:
                async with scene.connection() as direct:
                    exchange, _ = await direct.start(self.call())
                    await scene.wait_for(lambda s: s.requests)
                    exchange.abort()
                    await scene.left()

            scene.run(body)

    @pytest.mark.parametrize("busy", [False, True])
    def test_a_connection_closes_once_and_again(self, busy: bool) -> None:
        """Proves: ``aclose()`` and ``abort()`` may follow each other in any order, also with an exchange under way.

        If it fails: keep a flag. After either, ``usable()`` is False; an exchange that was under way ends with
        ConnectionFailed, or empty, and is released.
        """
        if busy:
            self.must("hang")
        with self.scene(STAGES["streaming"] if busy else hello()) as scene:

            async def body() -> None:
                for order in ("aclose abort aclose abort", "abort abort aclose"):
                    async with scene.connection() as direct:
                        exchange, _ = await direct.start(self.call())
                        if busy:
                            await self._read_words(exchange.read, 3)
                        else:
                            while await exchange.read():
                                pass
                        for step in order.split():
                            async with asyncio.timeout(SOON_S):
                                if step == "aclose":
                                    await direct.connection.aclose()
                                else:
                                    direct.connection.abort()
                            assert not direct.connection.usable()
                        async with asyncio.timeout(SOON_S):
                            with contextlib.suppress(SpanwireError):
                                while await exchange.read():
                                    pass
                        await until(lambda: direct.releases[0], lambda: "the exchange was not released")
                        assert direct.releases == [1]

            scene.run(body)

    def test_a_connection_keeps_no_call_alive(self) -> None:
        """Proves: what a call had in its context variables goes with the call, while its connection stays.

        If it fails: start a connection's own tasks with ``context=contextvars.Context()``; let go of the attempt and of
        the call when the exchange has left.
        """
        variable: contextvars.ContextVar[object] = contextvars.ContextVar("kit")

        class Thing:
            pass

        with self.scene(hello()) as scene:

            async def body() -> None:
                async with scene.manager() as manager:
                    thing = Thing()
                    gone = ref(thing)

                    async def one() -> None:
                        variable.set(thing)  # noqa: F821 - deleted below, when this has run
                        async with manager.stream(scene.endpoint(), self.call()) as stream:
                            await read(stream)

                    await asyncio.create_task(one())
                    await scene.settled(manager)
                    del thing, one
                    await self._forgotten(scene, gone)

            scene.run(body)

    @staticmethod
    async def _forgotten(scene: Scene, gone: Callable[[], object]) -> None:
        scene.attempts[:] = [attempt for attempt in scene.attempts if attempt.started]

        def alive() -> bool:
            gc.collect()
            return gone() is not None

        await until(lambda: not alive(), lambda: "the context of an ended call is kept by its connection")
