"""What all groups of tests stand on: how the wire is served, a manager that is watched, and what may not be left."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib.metadata import EntryPoint
from typing import Any, ClassVar, Protocol, TypeVar

import pytest

from ... import run as run_module
from ...calls import Call
from ...endpoint import Endpoint, Retries
from ...manager import ConnectionManager, Stream
from ...plugins import Registry, transport_entry_points
from ...telemetry import Telemetry
from ...timeline import AttemptRecord, Timeline
from ...transport import Attempt, Connection, Dialect, Exchange, Transport, TransportSpec
from ..loopback import Answer, LoopbackPart, LoopbackServer, Request
from ..script import Script
from .abilities import ABILITIES, needs_of
from .spans import Spans

__all__ = ["AT_ONCE", "DELAY_S", "ELSEWHERE_S", "NEVER", "Kit", "Scene", "Served", "open_sockets"]

T = TypeVar("T")

#: A delay that a script asks for, and what other segments may take meanwhile at most, in seconds: wide, since machines
#: that run tests are busy.
DELAY_S = 0.15
ELSEWHERE_S = 0.075
#: Nothing in a test takes longer unless something hangs, in seconds.
PATIENCE_S = 10.0
#: Within this time a connection is given back, and a server hears that its client has left, in seconds.
SOON_S = 2.0

NEVER = Retries(max_attempts=1)
AT_ONCE = Retries(base_s=0.0)


class Served(Protocol):
    """A server that plays scripts. :class:`~spanwire.testing.LoopbackServer` is one; so is whatever has these names.

    ``requests`` tells what arrived and what became of it (:class:`~spanwire.testing.Request`): ``model``, ``raw``,
    ``headers``, ``query``, ``connection``, ``arrived_ns``, ``ended_ns``, ``left_ns`` and ``dropped_ns`` are looked at.
    """

    @property
    def requests(self) -> list[Request]:
        """What has arrived, in that order."""
        ...

    @property
    def faults(self) -> list[str]:
        """What the client did against the rules of the wire, and where the server itself failed."""
        ...

    @property
    def connections(self) -> int:
        """Connections that were made so far."""
        ...

    @property
    def open_connections(self) -> int:
        """Those that are open now."""
        ...

    def endpoint(self, **more: Any) -> Endpoint:
        """An endpoint for this server; ``more`` are further fields of it."""
        ...

    def disconnect(self, *, reset: bool = False) -> None:
        """Close every connection from the server's side."""
        ...

    def wait_for(self, predicate: Callable[[Any], Any], timeout_s: float = 5.0) -> Any:
        """Block until ``predicate(server)`` is true. Raises TimeoutError."""
        ...


class _SpiedAttempt(Attempt):
    """Counts how often a transport says that its exchange has left."""

    __slots__ = ("releases", "started")

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.releases = 0
        self.started = False

    def released(self) -> None:
        self.releases += 1
        super().released()


class Scene:
    """One server, and managers that are watched. Made by :meth:`Kit.scene`, which looks at what is left of it."""

    def __init__(self, kit: Kit, server: Served) -> None:
        self.kit = kit
        self.server = server
        self.spans = Spans()
        self.attempts: list[_SpiedAttempt] = []

    # --- calls ------------------------------------------------------------------------------------------------------

    def endpoint(self, **more: Any) -> Endpoint:
        """The server's, with the settings of the kit's author. No attempt is made again unless ``retries`` says so."""
        settings = {**self.kit.settings, "retries": NEVER, **more}
        return self.server.endpoint(**settings)

    @contextlib.asynccontextmanager
    async def manager(self, **more: Any) -> AsyncIterator[ConnectionManager]:
        """A manager that has the plugin. At its end every lease has come back; then it is closed."""
        manager = self.kit.manager(telemetry=Telemetry(tracer_provider=self.spans), **more)
        try:
            yield manager
            await self.settled(manager)
        finally:
            await manager.aclose()

    async def settled(self, manager: ConnectionManager) -> None:
        """Every connection has been given back, and every call has ended."""
        state = manager.state()

        def busy() -> list[str]:
            found = [
                f"{pool!r}, {sum(m.leases for m in pool.state.members)} leases"
                for pool in state.pools.values()
                if pool.state.waiters or pool.state.dials or any(m.leases for m in pool.state.members)
            ]
            return [*found, *(f"a call of {run.call.model!r} has not ended" for run in state.runs)]

        await until(lambda: not busy(), lambda: f"not given back within {SOON_S} s: {busy()}")

    async def left(self, number: int = 0) -> None:
        """The server has heard that the client of that request has gone; nothing, where it cannot hear that."""
        if self.kit.can("leave"):
            await self.wait_for(lambda s: len(s.requests) > number and s.requests[number].left)

    async def wait_for(self, predicate: Callable[[Served], object], timeout_s: float = SOON_S) -> None:
        """Wait for something to be true of the server, without blocking the loop."""
        await asyncio.to_thread(self.server.wait_for, predicate, timeout_s)

    # --- the contract's objects, without a manager ------------------------------------------------------------------

    def transport(self, manager: ConnectionManager, endpoint: Endpoint) -> tuple[Transport, Dialect | None]:
        """The transport object of an endpoint, and its dialect."""
        spec = manager.registry.spec_for(endpoint)
        return manager.registry.transport(spec), manager.registry.dialect_for(endpoint, spec)

    @contextlib.asynccontextmanager
    async def connection(self, **more: Any) -> AsyncIterator[Direct]:
        """A connection that no pool owns."""
        manager = self.kit.manager(telemetry=None)
        endpoint = self.endpoint(**more)
        transport, dialect = self.transport(manager, endpoint)
        transport.key(endpoint)
        connect = Attempt(endpoint, timeouts=endpoint.timeouts, dialect=dialect)
        connection = await transport.connect(endpoint, connect)
        direct = Direct(self, endpoint, dialect, connection, getattr(transport, "prepare", None))
        try:
            yield direct
        finally:
            await connection.aclose()
            connection.abort()
            await manager.aclose()

    # --- running ----------------------------------------------------------------------------------------------------

    def run(
        self,
        body: Callable[[], Awaitable[T]],
        *,
        loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
        debug: bool = False,
        manager_stays: bool = False,
        patience_s: float = PATIENCE_S,
    ) -> T:
        """Run on a loop of its own. No task may be left, and the loop's exception handler must hear nothing.

        Args:
            patience_s: nothing in it takes longer, unless it hangs.
            manager_stays: it is not closed in the body, so that the tasks of its connections are left to the loop's end.
        """
        heard: list[dict[str, Any]] = []

        async def main() -> T:
            loop = asyncio.get_running_loop()
            loop.set_exception_handler(lambda _loop, context: heard.append(context))
            loop.slow_callback_duration = 60  # in debug mode: the machine may be busy
            async with asyncio.timeout(patience_s):
                result = await body()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            if others and not manager_stays:  # a library's own, of a call that was cancelled, may need a moment
                _, others = await asyncio.wait(others, timeout=SOON_S)
            assert manager_stays or not others, f"tasks that were left: {others}"
            return result

        with asyncio.Runner(loop_factory=loop_factory, debug=debug) as runner:
            result = runner.run(main())
        assert heard == [], f"the loop's exception handler has heard: {heard}"
        return result

    # --- the end ----------------------------------------------------------------------------------------------------

    def check(self, *, faults: Sequence[str] = ()) -> None:
        """Nothing is left: no lease, no span, no connection on the server."""
        assert list(self.server.faults) == list(faults), "the server saw a client that breaks the wire's rules"
        for attempt in self.attempts:
            assert attempt.releases <= 1, f"attempt.released() was called {attempt.releases} times for one exchange"
            assert attempt.releases == 1 or not attempt.started, "attempt.released() was never called for an exchange"
        assert self.spans.problems() == []
        if self.kit.can("connections"):
            try:
                self.server.wait_for(lambda s: s.open_connections == 0, SOON_S)
            except TimeoutError:
                pytest.fail(
                    f"{self.server.open_connections} connections are open on the server after the manager was closed"
                )


class Direct:
    """A connection, and what is needed to start exchanges on it."""

    def __init__(
        self, scene: Scene, endpoint: Endpoint, dialect: Dialect | None, connection: Connection, prepare: Any = None
    ) -> None:
        self.scene = scene
        self.prepare = prepare
        self.endpoint = endpoint
        self.dialect = dialect
        self.connection = connection
        self.releases: list[int] = []

    def attempt(self, *, streamed: bool = True) -> Attempt:
        """For one exchange; how often it was released is counted in :attr:`releases`."""
        number = len(self.releases)
        self.releases.append(0)
        attempt = _SpiedAttempt(self.endpoint, timeouts=self.endpoint.timeouts, dialect=self.dialect, streamed=streamed)
        attempt.asked_ns = time.perf_counter_ns()

        def released() -> None:
            self.releases[number] = attempt.releases

        attempt._on_released = released
        self.scene.attempts.append(attempt)
        return attempt

    async def start(self, call: Call, *, streamed: bool = True) -> tuple[Exchange, Attempt]:
        """Start a call; that must not take the time of its answer."""
        attempt = self.attempt(streamed=streamed)
        if self.prepare is not None:
            attempt.prepared = self.prepare(call, self.endpoint, self.dialect)
        try:
            async with asyncio.timeout(SOON_S):
                exchange = await self.connection.start(call, attempt)
        except TimeoutError:
            pytest.fail("start() waits for the answer: it has to return once the request was handed over")
        return exchange, attempt


async def until(predicate: Callable[[], object], problem: Callable[[], str], *, soon_s: float = SOON_S) -> None:
    """Let the loop run until something is true; fail if that takes too long."""
    end = time.monotonic() + soon_s
    while not predicate():
        if time.monotonic() > end:
            pytest.fail(problem())
        await asyncio.sleep(0.001)


def open_sockets() -> frozenset[str] | None:
    """This process's sockets, None where the system does not show them."""
    found: set[str] = set()
    try:
        with os.scandir("/proc/self/fd") as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    target = os.readlink(entry.path)  # noqa: PTH115 - no path: "socket:[1234]"
                    if target.startswith("socket:"):
                        found.add(target)
    except OSError:
        return None
    return frozenset(found)


class Kit:
    """See :class:`~spanwire.testing.conformance.TransportConformance`."""

    scheme: ClassVar[str]
    plugin: ClassVar[object | None] = None
    part: ClassVar[str | LoopbackPart | None] = None
    served: ClassVar[Mapping[str, Any]] = {}
    settings: ClassVar[Mapping[str, Any]] = {}
    cannot: ClassVar[Mapping[str, str]] = {}

    # --- what an author may override --------------------------------------------------------------------------------

    def serve(self, *scripts: Answer, default: Answer | None = None) -> AbstractContextManager[Served]:
        """A server that plays these scripts, one for each call, the last one again and again.

        Args:
            default: what to answer instead, a script or a function of the request that makes one.
        """
        more: dict[str, Any] = {} if default is None else {"default": default}
        return LoopbackServer([*scripts], part=self.part or self.spec().name, **more, **self.served)

    def call(self, model: str = "m", **parameters: Any) -> Call:
        """A chat call that the server understands."""
        return Call.chat(model, [{"role": "user", "content": "Say hello"}], **parameters)

    # --- what tests use ---------------------------------------------------------------------------------------------

    def can(self, ability: str) -> bool:
        """Whether the wire can do that."""
        assert ability in ABILITIES, ability
        return ability not in self.cannot

    def plugins(self) -> list[object]:
        """The plugin, where it does not come in by an entry point."""
        plugin = self.plugin
        if plugin is None:
            return []
        return [importlib.import_module(plugin) if isinstance(plugin, str) else plugin]

    def manager(self, **more: Any) -> ConnectionManager:
        """A manager that has the plugin."""
        return ConnectionManager(plugins=self.plugins(), **more)

    def registry(self) -> Registry:
        """What a manager would look transports up in."""
        return Registry(self.plugins())

    def spec(self) -> TransportSpec:
        """What the plugin registered for the scheme."""
        return self.registry().spec_for(Endpoint(f"{self.scheme}://127.0.0.1:1"))

    def entry(self) -> EntryPoint | None:
        """The entry point of the scheme; None for a plugin that is not installed."""
        if self.plugin is not None:
            return None
        return next((entry for entry in transport_entry_points() if entry.name == self.scheme), None)

    def must(self, ability: str) -> None:
        """Inside a test: end it as an expected failure where the wire cannot do that."""
        if not self.can(ability):
            pytest.xfail(_why_not(ability, self))

    @pytest.fixture(autouse=True)
    def _what_the_wire_cannot_do(self, request: pytest.FixtureRequest) -> None:
        for ability in needs_of(request.function):
            self.must(ability)

    @contextlib.contextmanager
    def scene(self, *scripts: Answer, default: Answer | None = None, faults: Sequence[str] = ()) -> Iterator[Scene]:
        """A server, and managers that are watched; at the end nothing may be left."""
        before = open_sockets()
        with pytest.MonkeyPatch.context() as patch, self.serve(*scripts, default=default) as server:
            scene = Scene(self, server)
            _spy(patch, scene)
            yield scene
            scene.check(faults=faults)
        _no_more_sockets(before)


def _spy(patch: pytest.MonkeyPatch, scene: Scene) -> None:
    """Have the managers make attempts that count, and say which of them were started."""
    send = run_module.Run._send

    def spied(*arguments: Any, **more: Any) -> _SpiedAttempt:
        attempt = _SpiedAttempt(*arguments, **more)
        scene.attempts.append(attempt)
        return attempt

    async def sent(run: run_module.Run, record: AttemptRecord) -> None:
        await send(run, record)
        for attempt in scene.attempts:
            if attempt.marks is record.marks:
                attempt.started = True

    patch.setattr(run_module, "Attempt", spied)
    patch.setattr(run_module.Run, "_send", sent)


def _no_more_sockets(before: frozenset[str] | None) -> None:
    if before is None:
        return
    end = time.monotonic() + SOON_S
    while more := (open_sockets() or frozenset()) - before:
        if time.monotonic() > end:
            pytest.fail(f"{len(more)} sockets were left open in this process")
        time.sleep(0.005)


# --- what several groups of tests do ----------------------------------------------------------------------------------


async def read(stream: Stream) -> str:
    """All the text of a stream."""
    return "".join([chunk.text async for chunk in stream])


def attempt_of(timeline: Timeline) -> AttemptRecord:
    """The last attempt of a call that has ended, with its marks."""
    return timeline._record.attempts[-1]


def seconds(timeline: Timeline, segment: str, part: str | None = None) -> float:
    """What a timeline says of a segment, or of a part of it; 0 for nothing."""
    found = timeline.segments.get(segment)
    if found is None:
        return 0.0
    if part is None:
        return found.duration_s
    return found.parts[part].duration_s if part in found.parts else 0.0


def assert_adds_up(timeline: Timeline) -> None:
    """The segments make the total, and none is negative."""
    total = sum(segment.duration_s for segment in timeline.segments.values())
    assert abs(total - timeline.total_s) < 1e-3, f"{timeline}\nthe segments add up to {total} s"
    assert all(segment.duration_s >= 0 for segment in timeline.segments.values()), str(timeline)


def slowly(words: Sequence[str], gap_s: float = 0.02, **more: Any) -> Script:
    """Words with pauses between them."""
    return Script(tokens=words, gap_s=gap_s, **more)


def _why_not(ability: str, kit: Kit) -> str:
    return f"{kit.scheme}: no {ability!r} ({ABILITIES[ability]}): {kit.cannot[ability]}"
