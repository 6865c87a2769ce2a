"""Leaving a call, at every stage and in every way: the server sees it, and nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import spanwire
from spanwire import errors
from spanwire.manager import ConnectionManager, Stream
from spanwire.run import Run
from spanwire.sync import SyncConnectionManager, SyncStream
from spanwire.testing import LoopbackServer, Script
from tests.support import AT_ONCE, NEVER, assert_adds_up, chat, hello, read, serving

HELLO = "Hello from the loopback server."
#: What the issue promises: the server sees that its client has gone within this time, in seconds.
SEEN_S = 0.3
SLOW = spanwire.Retries(base_s=3600, max_wait_s=3600)
RUNNERS = [
    "asyncio",
    "debug",
    pytest.param("uvloop", marks=pytest.mark.skipif(sys.platform == "win32", reason="there is no uvloop on Windows")),
]

#: Where a call may stand when it is left.
OPENING = ["slot", "dial", "back-off"]
OPEN = ["sent", "headers", "streaming"]


def new_loop(kind: str) -> asyncio.AbstractEventLoop:
    if kind == "uvloop":
        import uvloop

        return uvloop.new_event_loop()
    return asyncio.new_event_loop()


def live_timers(loop: asyncio.AbstractEventLoop) -> list[asyncio.TimerHandle]:
    """uvloop does not show its timers."""
    return [handle for handle in getattr(loop, "_scheduled", []) if not handle.cancelled()]


def run_on(kind: str, body: Callable[[], Awaitable[None]]) -> None:
    """Run on a loop of this kind; nothing may be left on it, and its exception handler must hear nothing."""
    heard: list[dict[str, Any]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _loop, context: heard.append(context))
        loop.slow_callback_duration = 60  # this machine may be busy
        await body()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert live_timers(loop) == []

    with asyncio.Runner(loop_factory=lambda: new_loop(kind), debug=kind == "debug") as runner:
        runner.run(main())
    assert heard == []


class Traced:
    """Telemetry whose spans can be looked at."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self._provider = TracerProvider(shutdown_on_exit=False)
        self._provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.telemetry = spanwire.Telemetry(tracer_provider=self._provider)

    def outcomes(self, model: str = "m") -> list[object]:
        """Of the spans that have ended, one for each call of this model."""
        spans = self._exporter.get_finished_spans()
        return [(span.attributes or {})["spanwire.outcome"] for span in spans if span.name == f"chat {model}"]


@pytest.fixture(autouse=True)
def _no_log(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A call that is left is not worth a line in anybody's log."""
    caplog.set_level(logging.DEBUG, "spanwire")
    yield
    assert [r.getMessage() for r in caplog.records if r.name.startswith("spanwire") or r.levelno > logging.INFO] == []


async def seen(server: LoopbackServer, number: int) -> None:
    """The server has seen in time that the client of this request has gone."""
    await asyncio.to_thread(server.wait_for, lambda s: len(s.requests) > number and s.requests[number].left, SEEN_S)


async def until(predicate: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not predicate():
            await asyncio.sleep(0)


class Scene:
    """A call that stands at one stage, on a server that will not go on by itself; the next call is answered."""

    def __init__(self, stage: str) -> None:
        self.stage = stage
        self.traced = Traced()
        self.number = 1 if stage == "slot" else 0  # of the request on the server
        first = {
            "slot": hello(hang_after=3),
            "dial": hello(),
            "back-off": Script(status=503),
            "sent": Script(hang_after="request"),
            "headers": hello(hang_after=0),
            "streaming": hello(hang_after=3),
            "body": Script(writes=[b'{"choices":', b"[]}"], hang_after=1),  # of an answer that is not streamed
        }[stage]
        self.scripts = [first, hello()]
        self.silent: socket.socket | None = None

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        with serving(*self.scripts) as self.server:
            limits = spanwire.Limits(max_concurrent=1)
            self.endpoint = self.server.endpoint(limits=limits, retries=SLOW)
            if self.stage == "dial":  # a TLS handshake that is never answered
                with socket.create_server(("127.0.0.1", 0)) as self.silent:
                    url = f"https://127.0.0.1:{self.silent.getsockname()[1]}/v1"
                    self.endpoint = spanwire.Endpoint(url, proxy=None, limits=limits, retries=SLOW)
                    yield
            else:
                yield

    @contextlib.asynccontextmanager
    async def manager(self) -> AsyncIterator[ConnectionManager]:
        async with ConnectionManager(telemetry=self.traced.telemetry) as manager:
            self.holder: Stream | None = None
            if self.stage == "slot":
                self.holder = manager.stream(self.endpoint, chat("holder"))
                await anext(self.holder)
            yield manager
            await self.after(manager)

    def at(self, stream: Stream) -> bool:
        """Whether the call stands at the stage."""
        return stream._run is not None and self.at_run(stream._run)

    def at_run(self, run: Run) -> bool:
        """The same for what is behind it."""
        if self.stage == "slot":
            slots = run._prepared.slots
            return slots is not None and slots.waiting == 1
        if self.stage == "dial":
            return any(dial.marks.open_part == "tls" for pool in run.state.pools.values() for dial in pool.state.dials)
        if self.stage == "back-off":
            return bool(run._backoff_until_ns)
        if self.stage == "sent":
            return len(self.server.requests) == 1
        if self.stage in {"headers", "body"}:
            return run.head is not None and run.head.status == 200
        attempt = getattr(run, "_attempt", None)  # a thread may look before it has one
        return attempt is not None and attempt.marks.first_content_ns > 0

    async def after(self, manager: ConnectionManager) -> None:
        """Slot and connection have come back, or are closed; the next call goes."""
        if self.holder is not None:
            await self.holder.aclose()
        slots = manager._prepare(self.endpoint).slots
        assert slots is not None
        assert repr(slots).endswith("0 of 1 in use, 0 waiting)")
        if self.stage == "dial":
            return
        reply = await asyncio.wait_for(manager.complete(self.endpoint, chat("next")), 5)
        assert reply.text == HELLO

    def gone(self) -> None:
        """After the manager was closed: no connection is open, on either side."""
        if self.silent is not None:
            accepted, _ = self.silent.accept()
            with accepted:
                accepted.settimeout(SEEN_S)
                with contextlib.suppress(ConnectionResetError):
                    while accepted.recv(65536):
                        pass
        self.server.wait_for(lambda s: s.open_connections == 0, SEEN_S)


async def in_a_block(stream: Stream) -> str:
    async with stream:
        return await read(stream)


@pytest.mark.parametrize("kind", RUNNERS)
@pytest.mark.parametrize("way", ["cancel", "timeout", "aclose", "manager"])
@pytest.mark.parametrize("stage", [*OPENING, *OPEN])
def test_a_pending_call_that_is_left(stage: str, way: str, kind: str) -> None:
    scene = Scene(stage)

    async def body() -> None:
        async with scene.manager() as manager:
            stream = manager.stream(scene.endpoint, chat())
            clock: list[asyncio.Timeout] = []

            async def consume() -> str:
                async with asyncio.timeout(None) as scope:
                    clock.append(scope)
                    return await in_a_block(stream)

            reading = asyncio.create_task(consume())
            await until(lambda: scene.at(stream))
            if way == "cancel":
                reading.cancel()
            elif way == "timeout":
                clock[0].reschedule(0)
            elif way == "aclose":
                await stream.aclose()
            else:
                await manager.aclose()
            done = (await asyncio.gather(reading, return_exceptions=True))[0]
            if way == "cancel":
                assert isinstance(done, asyncio.CancelledError)
            elif way == "timeout":
                assert isinstance(done, TimeoutError)
            elif way == "aclose" and stage in OPEN:
                assert isinstance(done, str)  # it ends like any other iteration
            else:
                assert isinstance(done, errors.ConnectionFailed)
                assert not done.retryable
            if stage in OPEN:
                await seen(scene.server, 0)
            outcome = {"aclose": "closed_by_caller", "manager": "error"}.get(way, "cancelled")
            assert scene.traced.outcomes() == [outcome]
            assert stream.timeline.outcome == outcome
            assert_adds_up(stream.timeline)
            await stream.aclose()  # leaving again is nothing
            with contextlib.suppress(errors.ConnectionFailed):
                assert await read(stream) == ""
            assert scene.traced.outcomes() == [outcome]

    with scene.serving():
        run_on(kind, body)
        scene.gone()


@pytest.mark.parametrize("kind", RUNNERS)
@pytest.mark.parametrize("stage", [*OPENING, "sent", "body"])
def test_a_whole_answer_that_nobody_waits_for_any_more(stage: str, kind: str) -> None:
    scene = Scene(stage)

    async def body() -> None:
        async with scene.manager() as manager:
            asked = asyncio.create_task(manager.complete(scene.endpoint, chat()))
            state = manager.state()
            await until(lambda: any(run.call.model == "m" and scene.at_run(run) for run in state.runs))
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
            if stage not in OPENING:
                await seen(scene.server, 0)
            assert scene.traced.outcomes() == ["cancelled"]

    with scene.serving():
        run_on(kind, body)
        scene.gone()


@pytest.mark.parametrize("kind", RUNNERS)
@pytest.mark.parametrize("way", ["leave", "raise", "return"])
@pytest.mark.parametrize("stage", OPEN)
def test_a_block_that_is_left_before_the_end(stage: str, way: str, kind: str) -> None:
    scene = Scene(stage)

    async def leave(stream: Stream) -> None:
        async with stream:
            await until(lambda: scene.at(stream))
            if stage == "streaming":
                async for chunk in stream:
                    if chunk.text:
                        break
            if way == "raise":
                raise KeyError(stage)
            if way == "return":
                return

    async def body() -> None:
        async with scene.manager() as manager:
            stream = manager.stream(scene.endpoint, chat())
            with pytest.raises(KeyError) if way == "raise" else contextlib.nullcontext():
                await leave(stream)
            await seen(scene.server, 0)
            assert scene.traced.outcomes() == ["closed_by_caller"]
            assert_adds_up(stream.timeline)

    with scene.serving():
        run_on(kind, body)
        scene.gone()


class Node:
    """Part of a reference cycle."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream
        self.itself = self


@pytest.mark.parametrize("kind", RUNNERS)
@pytest.mark.parametrize("way", ["del", "thread", "cycle", "cycle in a thread"])
@pytest.mark.parametrize("stage", OPEN)
def test_a_stream_that_is_dropped(stage: str, way: str, kind: str) -> None:
    scene = Scene(stage)

    async def body() -> None:
        async with scene.manager() as manager:
            stream: Stream | None = manager.stream(scene.endpoint, chat())
            assert stream is not None
            await stream.__aenter__()
            while not scene.at(stream):
                await asyncio.sleep(0)
            if way == "del":
                stream = None
            elif way == "thread":
                box = [stream]
                stream = None
                await asyncio.to_thread(box.clear)
            else:
                Node(stream)
                stream = None
                if way == "cycle":
                    gc.collect()
                else:
                    await asyncio.to_thread(gc.collect)
            await seen(scene.server, 0)
            assert scene.traced.outcomes() == ["abandoned"]

    gc.disable()  # so that it is collected where the test says so
    try:
        with scene.serving():
            run_on(kind, body)
            scene.gone()
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", RUNNERS)
@pytest.mark.parametrize("stage", [*OPENING, *OPEN])
def test_a_loop_that_ends_under_a_pending_call(stage: str, kind: str) -> None:
    """As when ``main()`` returns: asyncio cancels what still runs, and then closes the loop."""
    scene = Scene(stage)
    manager = ConnectionManager(telemetry=scene.traced.telemetry)
    kept: list[object] = []

    async def main() -> None:
        if stage == "slot":
            holder = manager.stream(scene.endpoint, chat("holder"))
            await anext(holder)
            kept.append(holder)
        stream = manager.stream(scene.endpoint, chat())
        kept.extend((stream, asyncio.create_task(in_a_block(stream))))
        await until(lambda: scene.at(stream))

    async def again() -> None:
        await scene.after(manager)
        await manager.aclose()

    scene.holder = None
    with scene.serving():
        with asyncio.Runner(loop_factory=lambda: new_loop(kind), debug=kind == "debug") as runner:
            runner.run(main())
        if stage in {"slot", *OPEN}:
            scene.server.wait_for(lambda s: s.requests[0].left, SEEN_S)
        assert scene.traced.outcomes() == ["cancelled"]
        assert scene.traced.outcomes("holder") == (["error"] if stage == "slot" else [])
        run_on(kind, again)
        scene.gone()


@pytest.mark.parametrize("kind", RUNNERS)
@pytest.mark.parametrize("stage", OPEN)
def test_a_loop_that_ends_under_a_stream_that_nobody_reads(stage: str, kind: str) -> None:
    scene = Scene(stage)
    manager = ConnectionManager(telemetry=scene.traced.telemetry)
    kept: list[Stream] = []

    async def main() -> None:
        stream = manager.stream(scene.endpoint, chat())
        kept.append(stream)
        await stream.__aenter__()
        await until(lambda: scene.at(stream))

    async def again() -> None:
        await scene.after(manager)
        with pytest.raises(errors.ConnectionFailed, match="manager was closed"):
            await anext(kept[0])  # on another loop by now
        await kept[0].aclose()
        await manager.aclose()

    scene.holder = None
    with scene.serving():
        with asyncio.Runner(loop_factory=lambda: new_loop(kind), debug=kind == "debug") as runner:
            runner.run(main())
        scene.server.wait_for(lambda s: s.requests[0].left, SEEN_S)
        assert scene.traced.outcomes() == ["error"]
        run_on(kind, again)
        kept.clear()
        assert scene.traced.outcomes() == ["error"]
        scene.gone()


# --- between the terminal event and the end of the message -----------------------------------------------------------


@pytest.mark.parametrize("kind", RUNNERS)
@pytest.mark.parametrize("way", ["break", "del", "aclose", "cancel", "loop"])
def test_a_stream_that_is_left_between_its_terminal_event_and_the_end_of_its_message(way: str, kind: str) -> None:
    """The call has ended well by then, and its connection waits for the end by itself."""
    traced = Traced()
    manager = ConnectionManager(telemetry=traced.telemetry)
    kept: list[Stream] = []

    async def hold(stream: Stream, ended: asyncio.Event) -> None:
        async with stream:
            assert await read(stream) == HELLO
            ended.set()
            await asyncio.get_running_loop().create_future()

    async def body() -> None:
        stream: Stream | None = manager.stream(endpoint, chat())
        assert stream is not None
        if way == "cancel":
            ended = asyncio.Event()
            task = asyncio.create_task(hold(stream, ended))
            await ended.wait()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        else:
            assert await read(stream) == HELLO
            if way == "aclose":
                await stream.aclose()
            elif way == "loop":
                kept.append(stream)
        stream = None
        assert traced.outcomes() == ["completed"]
        slots = manager._prepare(endpoint).slots
        assert slots is not None
        assert repr(slots).endswith("0 of 1 in use, 0 waiting)")
        if way == "loop":
            return
        await asyncio.to_thread(server.wait_for, lambda s: s.requests[0].ended)
        await until(lambda: "0 busy" in repr(*(p for s in manager._states.values() for p in s.pools.values())))
        assert (await manager.complete(endpoint, chat("next"))).text == HELLO
        assert server.connections == 1
        await manager.aclose()

    with serving(hello(end_s=60 if way == "loop" else 0.1), hello()) as server:
        endpoint = server.endpoint(limits=spanwire.Limits(max_concurrent=1))
        with asyncio.Runner(loop_factory=lambda: new_loop(kind), debug=kind == "debug") as runner:
            runner.run(body())
        server.wait_for(lambda s: s.open_connections == 0, SEEN_S)
        assert traced.outcomes() == ["completed"]


@pytest.mark.parametrize("kind", RUNNERS)
@pytest.mark.parametrize("way", ["del", "aclose", "cancel", "manager", "loop"])
def test_a_stream_whose_whole_answer_has_come_and_was_not_read(way: str, kind: str) -> None:
    """There is nothing to stop: the connection is kept where that can be, and the slot is free at once."""
    traced = Traced()
    manager = ConnectionManager(telemetry=traced.telemetry)
    kept: list[Stream] = []

    async def body() -> None:
        stream: Stream | None = manager.stream(endpoint, chat())
        assert stream is not None
        await stream.__aenter__()
        run = stream._run
        assert run is not None
        await until(lambda: run.exchange is not None and run.exchange.complete)
        if way == "aclose":
            await stream.aclose()
        elif way == "manager":
            await manager.aclose()
        elif way == "cancel":
            await stream.__aexit__(asyncio.CancelledError, None, None)
        elif way == "loop":
            kept.append(stream)
            return
        stream = None
        await until(lambda: run.ended)
        slots = manager._prepare(endpoint).slots
        assert slots is not None
        assert repr(slots).endswith("0 of 1 in use, 0 waiting)")
        if way != "manager":
            await asyncio.to_thread(server.wait_for, lambda s: s.requests[0].ended)
            await until(lambda: "0 busy" in repr(*(p for s in manager._states.values() for p in s.pools.values())))
        assert (await manager.complete(endpoint, chat("next"))).text == HELLO
        assert server.connections == (2 if way == "manager" else 1)
        await manager.aclose()

    with serving(hello(end_s=0.05), hello()) as server:
        endpoint = server.endpoint(limits=spanwire.Limits(max_concurrent=1))
        with asyncio.Runner(loop_factory=lambda: new_loop(kind), debug=kind == "debug") as runner:
            runner.run(body())
        server.wait_for(lambda s: s.open_connections == 0, SEEN_S)
        expected = {"del": "abandoned", "aclose": "closed_by_caller", "cancel": "cancelled"}.get(way, "error")
        assert traced.outcomes() == [expected]


# --- at every step ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", RUNNERS)
@pytest.mark.parametrize("way", ["cancel", "aclose", "cancel and aclose", "manager", "cancel twice"])
@pytest.mark.parametrize("warm", [False, True])
def test_leaving_at_any_step_of_a_call(way: str, kind: str, *, warm: bool) -> None:
    """The call is left after 0, 1, 2, ... turns of the loop, wherever that is: its span ends once, its slot comes back."""
    traced = Traced()

    async def body() -> None:
        async with ConnectionManager(telemetry=traced.telemetry) as manager:
            for steps in range(30):
                if warm:
                    await manager.warm(endpoint)
                stream = manager.stream(endpoint, chat())
                reading = asyncio.create_task(in_a_block(stream))
                for _ in range(steps):
                    await asyncio.sleep(0)
                begun = stream._run is not None
                if "cancel" in way:
                    reading.cancel()
                if "aclose" in way:
                    await stream.aclose()
                if way == "manager":
                    await manager.aclose()
                if way == "cancel twice":
                    await asyncio.sleep(0)
                    reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
                begun = begun or stream._run is not None
                assert len(traced.outcomes()) == (1 if begun else 0)
                traced._exporter.clear()
                slots = manager._prepare(endpoint).slots
                assert slots is not None
                assert repr(slots).endswith("0 of 1 in use, 0 waiting)")
                assert not any(state.runs for state in manager._states.values())
        assert asyncio.all_tasks() == {asyncio.current_task()}

    with serving(default=lambda _request: hello(gap_s=0.0005)) as server:
        endpoint = server.endpoint(limits=spanwire.Limits(max_concurrent=1), retries=NEVER)
        run_on(kind, body)
        server.wait_for(lambda s: s.open_connections == 0, SEEN_S)


@pytest.mark.parametrize("kind", RUNNERS)
def test_a_crowd_that_leaves_in_the_middle_of_everything(kind: str) -> None:
    """Some wait, some dial, some read; each second one is cancelled. The others get their answers."""
    traced = Traced()

    async def body() -> None:
        async with ConnectionManager(telemetry=traced.telemetry) as manager:
            calls = [asyncio.create_task(manager.complete(endpoint, chat())) for _ in range(60)]
            await until(lambda: len(server.requests) >= 3)
            for call in calls[::2]:
                call.cancel()
            done = await asyncio.gather(*calls, return_exceptions=True)
            for index, result in enumerate(done):
                if isinstance(result, spanwire.Reply):
                    assert result.text == HELLO
                else:
                    assert index % 2 == 0
                    assert isinstance(result, asyncio.CancelledError)
            slots = manager._prepare(endpoint).slots
            assert slots is not None
            assert repr(slots).endswith("0 of 4 in use, 0 waiting)")
            assert len(traced.outcomes()) == 60

    with serving(default=lambda _request: hello(prefill_s=0.002)) as server:
        endpoint = server.endpoint(limits=spanwire.Limits(max_concurrent=4))
        run_on(kind, body)
        server.wait_for(lambda s: s.open_connections == 0, SEEN_S)


# --- what wraps a stream ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", RUNNERS)
@pytest.mark.parametrize("way", ["break", "aclose", "cycle"])
def test_a_generator_around_a_stream_that_is_dropped(way: str, kind: str) -> None:
    """The shape of every framework's adapter."""
    scene = Scene("streaming")

    async def body() -> None:
        async with scene.manager() as manager:

            async def texts() -> AsyncIterator[str]:
                async with manager.stream(scene.endpoint, chat()) as stream:
                    async for chunk in stream:
                        if chunk.text:
                            yield chunk.text

            wrapped: Any = texts()
            async for text in wrapped:
                assert text == "Hello"
                break
            if way == "aclose":
                await wrapped.aclose()
            if way == "cycle":
                Node(wrapped)
            wrapped = None
            gc.collect()
            await seen(scene.server, 0)
            # The collector asks the stream of a cycle first, and the generator after it.
            assert scene.traced.outcomes() == ["abandoned" if way == "cycle" else "closed_by_caller"]

    with scene.serving():
        run_on(kind, body)
        scene.gone()


@pytest.mark.parametrize("kind", RUNNERS)
def test_a_task_group_whose_other_task_fails_leaves_the_stream(kind: str) -> None:
    scene = Scene("streaming")

    async def body() -> None:
        async with scene.manager() as manager:
            stream = manager.stream(scene.endpoint, chat())

            async def fail() -> None:
                await until(lambda: scene.at(stream))
                raise KeyError("other")

            with pytest.raises(ExceptionGroup) as caught:
                async with asyncio.TaskGroup() as group:
                    group.create_task(in_a_block(stream))
                    group.create_task(fail())
            assert [type(error) for error in caught.value.exceptions] == [KeyError]
            await seen(scene.server, 0)
            assert scene.traced.outcomes() == ["cancelled"]

    with scene.serving():
        run_on(kind, body)
        scene.gone()


@pytest.mark.parametrize("kind", RUNNERS)
def test_a_closing_that_is_cancelled_itself_still_closes_everything(kind: str) -> None:
    scene = Scene("dial")

    async def body() -> None:
        manager = ConnectionManager(telemetry=scene.traced.telemetry)
        assert (await manager.complete(scene.server.endpoint(), chat("idle"))).text == HELLO
        stream = manager.stream(scene.endpoint, chat())
        opening = asyncio.create_task(anext(stream))
        await until(lambda: scene.at(stream))
        closing = asyncio.create_task(manager.aclose())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.gather(closing, opening, return_exceptions=True)
        # A task that is still closing may need a few turns more.
        await asyncio.to_thread(scene.server.wait_for, lambda s: s.open_connections == 0, SEEN_S)
        await until(lambda: len(asyncio.all_tasks()) == 1)

    with scene.serving():
        run_on(kind, body)
        scene.gone()


@pytest.mark.parametrize("kind", RUNNERS)
@pytest.mark.parametrize("warming", [1, 3])
def test_warming_up_that_is_cancelled(kind: str, warming: int) -> None:
    scene = Scene("dial")

    async def body() -> None:
        async with ConnectionManager() as manager:
            warm = asyncio.create_task(manager.warm(scene.endpoint, warming))
            state = manager.state()
            pool = state.pool_for(manager._prepare(scene.endpoint), scene.endpoint)
            await until(lambda: [dial.marks.open_part for dial in pool.state.dials] == ["tls"] * warming)
            warm.cancel()
            with pytest.raises(asyncio.CancelledError):
                await warm

    with scene.serving():
        run_on(kind, body)
        scene.gone()


# --- the synchronous side ---------------------------------------------------------------------------------------------


@pytest.fixture
def sync_manager() -> Iterator[tuple[SyncConnectionManager, Traced]]:
    traced = Traced()
    with SyncConnectionManager(telemetry=traced.telemetry) as manager:
        yield manager, traced


def pending(stream: SyncStream, threads: list[BaseException | str]) -> threading.Thread:
    def consume() -> None:
        try:
            with stream:
                threads.append("".join(chunk.text for chunk in stream))
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            threads.append(error)

    thread = threading.Thread(target=consume)
    thread.start()
    return thread


@pytest.mark.parametrize("way", ["close", "manager"])
@pytest.mark.parametrize("stage", [*OPENING, *OPEN])
def test_a_sync_stream_that_another_thread_closes(
    stage: str, way: str, sync_manager: tuple[SyncConnectionManager, Traced]
) -> None:
    manager, traced = sync_manager
    scene = Scene(stage)
    with scene.serving():
        holder: SyncStream | None = None
        if stage == "slot":
            holder = manager.stream(scene.endpoint, chat("holder"))
            next(holder)
        stream = manager.stream(scene.endpoint, chat())
        found: list[BaseException | str] = []
        thread = pending(stream, found)
        while not scene.at(stream._stream):
            thread.join(0.0005)
        if way == "close":
            stream.close()
        else:
            manager.close()
        thread.join(5)
        assert not thread.is_alive()
        if way == "close" and stage in OPEN:
            assert isinstance(found[0], str)
        else:
            assert isinstance(found[0], errors.ConnectionFailed)
        if stage in OPEN:
            scene.server.wait_for(lambda s: s.requests[0].left, SEEN_S)
        assert traced.outcomes() == ["closed_by_caller" if way == "close" else "error"]
        if holder is not None:
            holder.close()
        if stage != "dial":
            assert manager.complete(scene.endpoint, chat("next")).text == HELLO
        manager.close()
        scene.gone()


@pytest.mark.parametrize("way", ["del", "thread", "cycle", "generator"])
def test_a_sync_stream_that_is_dropped(way: str, sync_manager: tuple[SyncConnectionManager, Traced]) -> None:
    manager, traced = sync_manager
    scene = Scene("streaming")
    gc.disable()
    try:
        with scene.serving():
            if way == "generator":

                def texts() -> Iterator[str]:
                    with manager.stream(scene.endpoint, chat()) as stream:
                        for chunk in stream:
                            yield chunk.text

                for text in texts():
                    if text:
                        break
            else:
                box = [manager.stream(scene.endpoint, chat())]
                next(box[0])
                if way == "thread":
                    thread = threading.Thread(target=box.clear)
                    thread.start()
                    thread.join()
                elif way == "cycle":
                    box.append(box)  # type: ignore[arg-type]
                    del box
                    gc.collect()
                else:
                    box.clear()
            scene.server.wait_for(lambda s: s.requests[0].left, SEEN_S)
            assert manager.complete(scene.endpoint, chat("next")).text == HELLO  # the slot has come back
            assert traced.outcomes() == ["closed_by_caller" if way == "generator" else "abandoned"]
            manager.close()
            scene.gone()
    finally:
        gc.enable()


def test_a_retry_after_a_loss_can_be_left_too() -> None:
    """The answer breaks before content, the next attempt hangs: leaving ends that one, and the span tells of both."""
    traced = Traced()

    async def body() -> None:
        async with ConnectionManager(telemetry=traced.telemetry) as manager:
            stream = manager.stream(endpoint, chat())
            reading = asyncio.create_task(in_a_block(stream))
            await until(lambda: len(server.requests) == 2)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await seen(server, 1)
            assert [attempt["outcome"] for attempt in stream.timeline.to_dict()["attempts"]] == ["error", "cancelled"]
            assert traced.outcomes() == ["cancelled"]

    with serving(hello(drop_after=1), Script(hang_after="request")) as server:
        endpoint = server.endpoint(limits=spanwire.Limits(max_concurrent=1), retries=AT_ONCE)
        run_on("asyncio", body)
