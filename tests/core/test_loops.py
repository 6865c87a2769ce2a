"""One manager on several event loops: one after the other, at once, of other kinds, and loops that die."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from functools import partial
from typing import Any
from weakref import ref

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import spanwire
from spanwire import errors
from spanwire.admission import Slots, Ticket
from spanwire.manager import ConnectionManager, Stream
from spanwire.run import Run
from spanwire.sync import SyncConnectionManager
from spanwire.testing import Script
from tests.support import NEVER, chat, hello, read, serving

HELLO = "Hello from the loopback server."
SEEN_S = 0.3
RUNNERS = [
    "asyncio",
    pytest.param("debug", marks=pytest.mark.long),
    pytest.param("uvloop", marks=pytest.mark.skipif(sys.platform == "win32", reason="there is no uvloop on Windows")),
]


def new_loop(kind: str) -> asyncio.AbstractEventLoop:
    if kind == "uvloop":
        import uvloop

        loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    else:
        loop = asyncio.new_event_loop()
    if kind == "debug":
        loop.set_debug(True)
    loop.slow_callback_duration = 60  # this machine may be busy
    return loop


def run_on(kind: str, body: Callable[[], Awaitable[None]]) -> None:
    """Run on a loop of this kind, as ``asyncio.run`` does; its exception handler must hear nothing."""
    heard: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: heard.append(context))
        await body()

    with asyncio.Runner(loop_factory=lambda: new_loop(kind)) as runner:
        runner.run(main())
    assert heard == []


def close_at_once(loop: asyncio.AbstractEventLoop) -> None:
    """Close a loop without the steps that let its tasks and generators end."""
    for task in asyncio.all_tasks(loop):
        task._log_destroy_pending = False  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # uvloop tells at once what is open, whoever owns it
        loop.close()


def has_come(run: Run) -> bool:
    """The whole answer is here, read or not."""
    return run.exchange is not None and run.exchange.complete


async def until(predicate: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not predicate():
            await asyncio.sleep(0)


class Traced:
    """Telemetry whose spans can be looked at."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.telemetry = spanwire.Telemetry(tracer_provider=provider)

    def outcomes(self, model: str = "m") -> list[object]:
        spans = self._exporter.get_finished_spans()
        return [(span.attributes or {})["spanwire.outcome"] for span in spans if span.name == f"chat {model}"]


@contextlib.contextmanager
def foreign_sockets() -> Iterator[None]:
    """Sockets of somebody else, on the numbers that were free; they must stay as they are."""
    pairs = [socket.socketpair() for _ in range(16)]
    try:
        yield
        for one, other in pairs:
            one.send(b"x")
            other.settimeout(1)
            assert other.recv(2) == b"x"
            other.send(b"y")
            one.settimeout(1)
            assert one.recv(2) == b"y"
    finally:
        for pair in pairs:
            for end in pair:
                end.close()


# --- one after the other ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kinds", [["asyncio"] * 4, ["debug"] * 3, ["uvloop"] * 4, ["asyncio", "uvloop", "debug", "uvloop"]]
)
def test_loops_of_any_kind_in_turn_on_one_manager(kinds: list[str]) -> None:
    """Each has connections of its own, which close with it."""
    manager = ConnectionManager()
    with serving() as server:
        endpoint = server.endpoint(limits=spanwire.Limits(max_concurrent=3))

        async def body() -> None:
            async with manager.stream(endpoint, chat()) as stream:
                assert await read(stream)
            replies = await asyncio.gather(*(manager.complete(endpoint, chat()) for _ in range(9)))
            assert all(reply.text for reply in replies)
            assert 1 <= server.open_connections <= 3

        for kind in kinds:
            run_on(kind, body)
            server.wait_for(lambda s: s.open_connections == 0, SEEN_S)
        assert manager._states == {} or all(state.closed for state in manager._states.values())


@pytest.mark.parametrize("kind", RUNNERS)
def test_a_loop_for_each_test_function(kind: str) -> None:
    """What pytest's async plugins do: a loop for each function and its fixtures, with a stream left open by some."""
    manager = ConnectionManager()
    with serving(default=lambda request: hello(hang_after=3 if request.model == "hangs" else None)) as server:
        kept: list[Stream] = []
        for number in range(6):
            loop = new_loop(kind)
            asyncio.set_event_loop(loop)
            try:
                loop.run_until_complete(manager.warm(server.endpoint()))  # a fixture
                assert loop.run_until_complete(manager.complete(server.endpoint(), chat())).text == HELLO
                if number % 2:
                    kept.append(manager.stream(server.endpoint(), chat("hangs")))
                    loop.run_until_complete(kept[-1].__anext__())
            finally:
                loop.run_until_complete(loop.shutdown_asyncgens())
                asyncio.set_event_loop(None)
                loop.close()
            server.wait_for(lambda s: s.open_connections == 0, SEEN_S)
        assert [stream.timeline.outcome for stream in kept] == ["error"] * 3
        assert server.connections == 6


@pytest.mark.parametrize("kind", RUNNERS)
def test_one_loop_in_pieces(kind: str) -> None:
    """Between two ``run_until_complete`` nothing runs: the connection waits, also one that the server closes meanwhile."""
    manager = ConnectionManager()
    loop = new_loop(kind)
    with serving() as server:
        endpoint = server.endpoint(retries=spanwire.Retries(base_s=60))  # an ordinary retry would be seen

        def call() -> str:
            return loop.run_until_complete(manager.complete(endpoint, chat())).text

        assert call()
        assert call()
        assert server.connections == 1
        stream = manager.stream(endpoint, chat())
        loop.run_until_complete(stream.__aenter__())
        server.wait_for(lambda s: s.requests[-1].ended)  # everything is here before the loop runs again
        assert loop.run_until_complete(read(stream))
        server.disconnect()
        server.wait_for(lambda s: s.open_connections == 0)
        assert call()
        loop.run_until_complete(manager.aclose())
        assert call()  # a manager that was closed may be used again
        loop.run_until_complete(loop.shutdown_asyncgens())
        server.wait_for(lambda s: s.open_connections == 0, SEEN_S)
        loop.close()


@pytest.mark.parametrize("kind", RUNNERS)
def test_a_loop_that_ends_at_any_step_of_a_call(kind: str) -> None:
    """``main()`` returns after 0, 1, 2, ... turns of the loop with a call under way: the next loop has every slot."""
    traced = Traced()
    manager = ConnectionManager(telemetry=traced.telemetry)
    with serving(default=lambda _request: hello(gap_s=0.0005)) as server:
        endpoint = server.endpoint(limits=spanwire.Limits(max_concurrent=1), retries=NEVER)
        for steps in range(25):
            tasks: list[asyncio.Task[Any]] = []

            async def main() -> None:
                tasks.append(asyncio.create_task(read(manager.stream(endpoint, chat()))))  # noqa: B023 - runs at once
                for _ in range(steps):  # noqa: B023
                    await asyncio.sleep(0)

            with asyncio.Runner(loop_factory=lambda: new_loop(kind)) as runner:
                runner.run(main())
            assert tasks[0].done()
            slots = manager._prepare(endpoint).slots
            assert slots is not None
            assert repr(slots).endswith("0 of 1 in use, 0 waiting)")
            assert len(traced.outcomes()) <= 1
            traced._exporter.clear()
        server.wait_for(lambda s: s.open_connections == 0, SEEN_S)


@pytest.mark.parametrize("kind", RUNNERS)
def test_a_call_in_a_generators_clean_up_while_the_loop_ends(kind: str) -> None:
    """The loop closes generators in any order: the manager's guard may be closed before one that still makes a call."""
    manager = ConnectionManager()
    done: list[str] = []
    with serving() as server:

        async def resource() -> AsyncIterator[None]:
            try:
                yield
            finally:
                await asyncio.sleep(0)
                await asyncio.sleep(0)  # the guard is closed by now
                done.append((await manager.complete(server.endpoint(), chat())).text)

        kept = resource()

        async def main() -> None:
            await manager.complete(server.endpoint(), chat())
            await anext(kept)

        with asyncio.Runner(loop_factory=lambda: new_loop(kind)) as runner:
            runner.run(main())
        assert len(done) == 1
        server.wait_for(lambda s: s.open_connections == 0, SEEN_S)
    gc.collect()


# --- loops that are closed without a word -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", RUNNERS)
@pytest.mark.parametrize("stage", ["idle", "unread", "read", "slot", "dial", "back-off", "finishing", "arrived"])
def test_a_loop_that_is_closed_without_shutting_down_its_generators(stage: str, kind: str) -> None:
    """The next loop finds it: connections are closed and no other descriptor, slots come back, spans end, no warning."""
    traced = Traced()
    manager = ConnectionManager(telemetry=traced.telemetry)
    first = {
        "idle": hello(),
        "back-off": Script(status=503),
        "finishing": hello(end_s=60),
        "arrived": hello(end_s=60),
    }.get(stage, hello(hang_after=3))
    with (
        serving(default=lambda r: hello() if r.model == "next" else first) as server,
        socket.create_server(("127.0.0.1", 0)) as silent,
    ):
        limits = spanwire.Limits(max_concurrent=2)
        slow = spanwire.Retries(base_s=3600, max_wait_s=3600)
        endpoint = server.endpoint(limits=limits, retries=slow)
        if stage == "dial":
            url = f"https://127.0.0.1:{silent.getsockname()[1]}/v1"
            endpoint = spanwire.Endpoint(url, proxy=None, limits=limits)
        streams = [manager.stream(endpoint, chat()) for _ in range(4 if stage == "slot" else 2)]
        tasks: list[asyncio.Task[Any]] = []

        async def main() -> None:
            pools = manager.state().pools
            if stage == "idle":
                await asyncio.gather(*(read(stream) for stream in streams))
            elif stage == "unread":
                for stream in streams:
                    await anext(stream)
            elif stage in {"finishing", "arrived"}:
                for stream in streams:
                    await stream.__aenter__()
                    run = stream._run
                    assert run is not None
                    await until(partial(has_come, run))
                    if stage == "finishing":
                        await read(stream)
            else:
                tasks.extend(asyncio.create_task(read(stream)) for stream in streams)
                if stage == "dial":
                    await until(lambda: "2 dialling" in repr(pools))
                elif stage == "back-off":
                    await until(lambda: any(stream._run and stream._run._backoff_until_ns for stream in streams))
                else:
                    await until(lambda: sum(bool(stream._run and stream._run._reading) for stream in streams) == 2)
                if stage == "slot":
                    await until(lambda: streams[-1]._run and streams[-1]._run._opener)

        loop = new_loop(kind)
        loop.run_until_complete(main())
        close_at_once(loop)

        async def again() -> None:
            good = server.endpoint(limits=limits)
            if stage == "dial":
                good = endpoint
                prepared = manager._prepare(good)
                assert prepared.slots is not None
                manager.state()  # what a call would do first
                held = [await asyncio.wait_for(prepared.slots.acquire("next", None), 2) for _ in range(2)]
                for ticket in held:
                    prepared.slots.release(ticket)
                return
            replies = await asyncio.gather(
                *(asyncio.wait_for(manager.complete(good, chat("next")), 2) for _ in range(4))
            )
            assert [reply.text for reply in replies] == [HELLO] * 4

        with foreign_sockets():
            run_on(kind, again)
        slots = manager._prepare(endpoint).slots
        assert slots is not None
        assert repr(slots).endswith("0 of 2 in use, 0 waiting)")
        begun = {"slot": 4}.get(stage, 2)
        ended = "completed" if stage in {"idle", "finishing"} else "error"
        assert traced.outcomes() == [ended] * begun
        server.wait_for(lambda s: s.open_connections == 0, SEEN_S)
        for task in tasks:  # what the collector does, in an order of its own
            task.get_coro().close()
        del loop
        streams.clear()
        tasks.clear()
        with warnings.catch_warnings():
            if stage == "dial":  # a handshake under way is asyncio's, whose transport tells when it is collected
                warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()  # else a warning of a socket or transport that was not closed is an error


@pytest.mark.parametrize("kind", RUNNERS)
@pytest.mark.parametrize("stage", ["idle", "unread"])
def test_a_tls_connection_of_a_loop_that_is_closed_without_a_word(stage: str, kind: str) -> None:
    """The same below TLS, where asyncio has two transports for it."""
    manager = ConnectionManager()
    with serving(default=lambda r: hello() if r.model == "whole" else hello(hang_after=3), tls=True) as server:
        endpoint = server.endpoint()
        stream: Stream | None = manager.stream(endpoint, chat("whole" if stage == "idle" else "hangs"))
        assert stream is not None
        loop = new_loop(kind)
        loop.run_until_complete(read(stream) if stage == "idle" else stream.__aenter__())
        close_at_once(loop)

        async def again() -> None:
            assert (await manager.complete(endpoint, chat("whole"))).text == HELLO

        with foreign_sockets():
            run_on(kind, again)
        server.wait_for(lambda s: s.open_connections == 0, SEEN_S)
        stream = None
        del loop
        gc.collect()  # a warning of a socket or transport that was not closed is an error


@pytest.mark.parametrize("held", ["unread", "read"])
def test_slots_of_a_closed_loop_come_back_to_another_manager(held: str) -> None:
    """The limit is the process's: who waits may know nothing of the manager that the dead loop's calls belonged to."""
    gone = ConnectionManager()
    with serving(hello(hang_after=3), hello()) as server:
        endpoint = server.endpoint(limits=spanwire.Limits(max_concurrent=1))
        stream = gone.stream(endpoint, chat())
        loop = new_loop("asyncio")
        loop.run_until_complete(stream.__anext__())
        if held == "read":
            task = loop.create_task(read(stream))
            loop.run_until_complete(asyncio.sleep(0))
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        close_at_once(loop)

        async def body() -> None:
            async with ConnectionManager() as manager:
                assert (await asyncio.wait_for(manager.complete(endpoint, chat()), 3)).text == HELLO

        try:
            run_on("asyncio", body)
        finally:  # so that this test's failure is its own
            with contextlib.suppress(Exception):
                run_on("asyncio", gone.aclose)


def test_a_caller_that_waits_already_gets_the_slot_of_a_loop_that_closes() -> None:
    manager = ConnectionManager()
    with serving(hello(hang_after=3), hello()) as server:
        endpoint = server.endpoint(limits=spanwire.Limits(max_concurrent=1))
        stream = manager.stream(endpoint, chat())
        dying = new_loop("asyncio")
        dying.run_until_complete(stream.__anext__())

        async def body() -> None:
            waiting = asyncio.create_task(manager.complete(endpoint, chat()))
            slots = manager._prepare(endpoint).slots
            assert slots is not None
            await until(lambda: slots.waiting)
            await asyncio.to_thread(close_at_once, dying)
            assert (await asyncio.wait_for(waiting, 3)).text == HELLO

        try:
            run_on("asyncio", body)
        finally:
            with contextlib.suppress(Exception):
                run_on("asyncio", manager.aclose)


def test_an_observer_may_use_the_manager_while_a_closed_loops_calls_are_ended() -> None:
    """It is told of them on the thread of the next loop, in the middle of that one's first call.

    In a process of its own: a deadlock would hold up every later test that makes a synchronous call.
    """
    program = """
        import asyncio, sys
        import spanwire

        def call(model):
            return spanwire.Call.chat(model, [{"role": "user", "content": "x"}])

        class Observer:
            def call_ended(self, timeline):
                if timeline.outcome == "error":
                    print("observer", spanwire.SyncConnectionManager(manager).complete(endpoint, call("other")).text)

        class Plugin:
            @spanwire.hookimpl
            def register_observers(self):
                return [Observer()]

        manager = spanwire.ConnectionManager(plugins=[Plugin()])
        endpoint = spanwire.Endpoint(sys.argv[1], proxy=None)
        stream = manager.stream(endpoint, call("m"))
        loop = asyncio.new_event_loop()
        loop.run_until_complete(stream.__anext__())
        loop.close()
        print("next loop", asyncio.run(manager.complete(endpoint, call("m"))).text)
        """
    with serving(hello(hang_after=3), hello()) as server:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program), server.url],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
        assert done.stderr == ""
        assert done.stdout == f"observer {HELLO}\nnext loop {HELLO}\n"


# --- at once ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", RUNNERS)
def test_two_loops_at_once_share_the_limit_and_no_connection(kind: str) -> None:
    manager = ConnectionManager()
    failed: list[BaseException] = []
    used: dict[int, set[str]] = {0: set(), 1: set()}
    together = threading.Barrier(2)
    with serving(default=lambda _request: hello()) as server:
        endpoint = server.endpoint(limits=spanwire.Limits(max_concurrent=4))

        async def body(number: int) -> None:
            async def call() -> None:
                async with manager.stream(endpoint, chat()) as stream:
                    assert await read(stream) == HELLO
                use = stream.timeline.connection
                assert use is not None
                used[number].add(use.id)

            await asyncio.gather(*(call() for _ in range(100)))

        def main(number: int) -> None:
            try:
                together.wait()
                run_on(kind, lambda: body(number))
            except BaseException as error:
                failed.append(error)
                raise

        threads = [threading.Thread(target=main, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert failed == []
        assert not any(thread.is_alive() for thread in threads)
        assert used[0].isdisjoint(used[1])
        slots = manager._prepare(endpoint).slots
        assert slots is not None
        assert repr(slots).endswith("0 of 4 in use, 0 waiting)")
        server.wait_for(lambda s: s.open_connections == 0, SEEN_S)


@pytest.mark.parametrize("kind", RUNNERS)
def test_closing_a_manager_from_one_loop_ends_what_runs_on_another(kind: str) -> None:
    traced = Traced()
    manager = ConnectionManager(telemetry=traced.telemetry)
    ready = threading.Event()
    timers: list[asyncio.TimerHandle] = []
    found: list[object] = []
    with serving(hello(), hello(hang_after=3)) as server:

        async def other() -> None:
            await manager.warm(server.endpoint(), 2)
            await manager.complete(server.endpoint(), chat("first"))  # one idle connection, one in use
            async with manager.stream(server.endpoint(), chat()) as stream:
                await anext(stream)
                ready.set()
                with pytest.raises(errors.ConnectionFailed, match="manager was closed"):
                    await read(stream)
            found.append(stream.timeline.outcome)
            loop = asyncio.get_running_loop()
            await asyncio.sleep(0)
            timers.extend(handle for handle in getattr(loop, "_scheduled", []) if not handle.cancelled())

        thread = threading.Thread(target=run_on, args=(kind, other))
        thread.start()
        assert ready.wait(10)
        run_on(kind, manager.aclose)
        thread.join(10)
        assert not thread.is_alive()
        assert found == ["error"]
        assert traced.outcomes() == ["error"]
        server.wait_for(lambda s: s.open_connections == 0, SEEN_S)
    assert timers == []


@pytest.mark.parametrize("kind", RUNNERS)
def test_a_sync_call_in_a_coroutine_while_the_same_manager_has_a_stream_there(kind: str) -> None:
    """A notebook's cell: it blocks its own loop, and what is open there goes on afterwards."""
    manager = ConnectionManager()
    with serving(hello(gap_s=0.005), hello()) as server, SyncConnectionManager(manager) as blocking:
        endpoint = server.endpoint(limits=spanwire.Limits(max_concurrent=2))

        async def cell() -> None:
            async with manager.stream(endpoint, chat()) as stream:
                texts = [(await anext(stream)).text]
                for _ in range(3):
                    assert blocking.complete(endpoint, chat()).text == HELLO
                with blocking.stream(endpoint, chat()) as other:
                    assert "".join(chunk.text for chunk in other) == HELLO
                texts += [chunk.text async for chunk in stream]
            assert "".join(texts) == HELLO

        run_on(kind, cell)
        assert server.connections == 2  # one for each loop


# --- managers that nobody holds any more ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", RUNNERS)
def test_a_manager_that_is_collected_closes_its_idle_connections(kind: str) -> None:
    with serving() as server:

        async def body() -> None:
            manager: ConnectionManager | None = ConnectionManager()
            assert manager is not None
            await manager.warm(server.endpoint(), 2)
            gone = ref(manager)
            manager = None
            gc.collect()
            await asyncio.to_thread(server.wait_for, lambda s: s.open_connections == 0, SEEN_S)
            await until(lambda: len(asyncio.all_tasks()) == 1)
            gc.collect()
            assert gone() is None

        run_on(kind, body)


@pytest.mark.parametrize("kind", RUNNERS)
@pytest.mark.parametrize("where", ["same loop", "thread"])
def test_a_manager_that_is_collected_with_a_stream(where: str, kind: str) -> None:
    """A stream keeps what it needs; when it is dropped too, everything goes."""
    with serving(hello(), hello(hang_after=3)) as server:

        async def body() -> None:
            manager: ConnectionManager | None = ConnectionManager()
            assert manager is not None
            gone = ref(manager)
            whole: Stream | None = manager.stream(server.endpoint(), chat())
            half: Stream | None = manager.stream(server.endpoint(), chat())
            assert whole is not None
            assert half is not None
            await whole.__aenter__()
            await anext(half)
            manager = None
            gc.collect()
            assert await read(whole) == HELLO
            whole = half = None
            if where == "thread":
                await asyncio.to_thread(gc.collect)
            else:
                gc.collect()
            await asyncio.to_thread(server.wait_for, lambda s: s.requests[1].left, SEEN_S)
            gc.collect()
            await asyncio.to_thread(server.wait_for, lambda s: s.open_connections == 0, SEEN_S)
            await until(lambda: len(asyncio.all_tasks()) == 1)
            gc.collect()
            assert gone() is None

        run_on(kind, body)


@pytest.mark.parametrize("kind", RUNNERS)
def test_a_manager_and_its_stream_that_are_collected_after_their_loop(kind: str) -> None:
    """Nothing is left to tell: the loop has ended the call, and closed the connection."""
    with serving(hello(hang_after=3)) as server:
        manager: ConnectionManager | None = ConnectionManager()
        assert manager is not None
        stream: Stream | None = manager.stream(server.endpoint(), chat())

        async def main() -> None:
            assert stream is not None
            await anext(stream)

        with asyncio.Runner(loop_factory=lambda: new_loop(kind)) as runner:
            runner.run(main())
        gone = ref(manager)
        manager = stream = None
        gc.collect()
        assert gone() is None
        server.wait_for(lambda s: s.open_connections == 0, SEEN_S)


# --- slots, model-checked ---------------------------------------------------------------------------------------------


class Caller:
    """A call that waits for a slot on a loop."""

    def __init__(self, slots: Slots, loop: asyncio.AbstractEventLoop, timeout_s: float | None) -> None:
        self.loop = loop
        self.coroutine: Coroutine[Any, Any, Ticket] = slots.acquire("call", timeout_s)
        self.task = loop.create_task(self.coroutine)


def step(loop: asyncio.AbstractEventLoop, turns: int = 1) -> None:
    for _ in range(turns):
        loop.call_soon(loop.stop)
        loop.run_forever()


class SlotsMachine(RuleBasedStateMachine):
    """Slots over three loops that run when the machine says so, and die.

    A loop dies with its holders (whoever finds it dead releases their slots, as the manager does) and with its waiters:
    in order, by cancelling them, or at once; then their coroutines are collected at some later time, or never.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.loops = [self.new_loop() for _ in range(3)]
        self.waiting: list[Caller] = []  # in order of arrival
        self.held: list[tuple[Ticket, asyncio.AbstractEventLoop | None]] = []
        self.lost: list[Caller] = []  # their loop is closed, and they were not collected yet
        self.released: list[Ticket] = []

    @initialize(most=st.integers(1, 3), queue=st.one_of(st.none(), st.integers(0, 4)))
    def start(self, most: int, queue: int | None) -> None:
        self.most = most
        self.slots = Slots("host:1", spanwire.Limits(max_concurrent=most, max_queue=queue))

    def new_loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        loop.time = lambda: self.now  # type: ignore[method-assign]
        return loop

    def harvest(self) -> None:
        """Look at the calls whose task has ended. First come, first served: but a wait that was given up ends anyhow."""
        for caller in list(self.waiting):
            if caller.task.done():
                self.waiting.remove(caller)
                if caller.task.cancelled():
                    continue
                error = caller.task.exception()
                if error is None:
                    self.held.append((caller.task.result(), caller.loop))
                else:
                    assert isinstance(error, errors.NoSlot)

    @rule(which=st.integers(0, 2), timeout_s=st.sampled_from([None, 1.0, 3.0]), turns=st.integers(0, 2))
    def acquire(self, which: int, timeout_s: float | None, turns: int) -> None:
        self.waiting.append(Caller(self.slots, self.loops[which], timeout_s))
        step(self.loops[which], turns)
        self.harvest()

    @rule()
    def try_acquire(self) -> None:
        ticket = self.slots.try_acquire("call")
        if ticket is not None:
            self.held.append((ticket, None))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        ticket, _loop = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.slots.release(ticket)
        self.released.append(ticket)

    @precondition(lambda self: self.released)
    @rule(data=st.data())
    def release_again(self, data: st.DataObject) -> None:
        self.slots.release(data.draw(st.sampled_from(self.released)))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), turns=st.integers(0, 3))
    def cancel(self, data: st.DataObject, turns: int) -> None:
        caller = data.draw(st.sampled_from(self.waiting))
        caller.task.cancel()
        step(caller.loop, turns)
        self.harvest()

    @rule(which=st.integers(0, 2), turns=st.integers(1, 3))
    def run_a_loop(self, which: int, turns: int) -> None:
        step(self.loops[which], turns)
        self.harvest()

    @rule(seconds=st.sampled_from([0.5, 1.0, 5.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(which=st.integers(0, 2), in_order=st.booleans())
    def loop_dies(self, which: int, *, in_order: bool) -> None:
        loop = self.loops[which]
        mine = [caller for caller in self.waiting if caller.loop is loop]
        if in_order:
            for caller in mine:
                caller.task.cancel()
            step(loop, 5)
            self.harvest()
            assert all(caller.task.done() for caller in mine)
        else:
            self.waiting = [caller for caller in self.waiting if caller.loop is not loop]
            self.lost.extend(mine)
        loop.close()
        for caller in mine:
            caller.task._log_destroy_pending = False  # type: ignore[attr-defined]
        for ticket, owner in list(self.held):
            if owner is loop:
                self.held.remove((ticket, owner))
                self.slots.release(ticket)
        self.loops[which] = self.new_loop()

    @precondition(lambda self: self.lost)
    @rule()
    def collect(self) -> None:
        """What the garbage collector does with a task of a loop that is closed."""
        lost, self.lost = self.lost, []
        for caller in lost:
            with contextlib.suppress(RuntimeError):  # it has ended
                caller.coroutine.close()

    @invariant()
    def never_too_many(self) -> None:
        holders = self.slots._admission.holders
        assert len(holders) <= self.most
        assert {ticket for ticket, _ in self.held} <= holders

    @invariant()
    def nobody_waits_beside_a_free_slot(self) -> None:
        admission = self.slots._admission
        if admission.waiters:
            assert len(admission.holders) == self.most

    @invariant()
    def every_slot_has_somebody(self) -> None:
        """Held, or given to a call whose task has not run yet, alive or (until it is collected) dead."""
        unknown = len(self.slots._admission.holders) - len(self.held)
        assert 0 <= unknown <= len(self.waiting) + len(self.lost)

    def teardown(self) -> None:
        if not hasattr(self, "slots"):
            return
        if self.lost:
            self.collect()
        for _ in range(100):
            if not self.waiting:
                break
            for loop in self.loops:
                step(loop, 5)
            self.harvest()
            for ticket, _owner in self.held:
                self.slots.release(ticket)
            self.held = []
        assert self.waiting == []  # each got a slot, or an error
        for ticket, _owner in self.held:
            self.slots.release(ticket)
        assert repr(self.slots).endswith(f"0 of {self.most} in use, 0 waiting)")
        assert all(self.slots.try_acquire("after") for _ in range(self.most))
        assert self.slots.try_acquire("one too many") is None
        for loop in self.loops:
            loop.close()


TestSlotsOverLoops = SlotsMachine.TestCase
