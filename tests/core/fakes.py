"""A transport and connections without a wire, for the tests of the pool."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable

from spanwire.calls import Call
from spanwire.endpoint import Endpoint, Limits, Timeouts
from spanwire.transport import Attempt, Exchange


class FakeConnection:
    """Carries nothing. ``ok`` is what ``usable`` says."""

    protocol = "fake"
    engine = "fake"

    def __init__(self, capacity: int = 1, *, ok: bool = True) -> None:
        self.capacity = capacity
        self.ok = ok
        self.closed = False
        self.aborted = False
        self.close_gate: asyncio.Future[None] | None = None
        self.on_abort: asyncio.Future[None] | None = None

    async def start(self, call: Call, attempt: Attempt) -> Exchange:
        raise NotImplementedError

    def usable(self) -> bool:
        return self.ok and not self.closed and not self.aborted

    async def aclose(self) -> None:
        self.closed = True
        if self.close_gate is not None:
            await self.close_gate

    def abort(self) -> None:
        self.aborted = True
        if self.on_abort is not None and not self.on_abort.done():
            self.on_abort.set_result(None)


class Gate:
    """One connect that waits to be told how it ends."""

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.answer: asyncio.Future[FakeConnection] = asyncio.get_running_loop().create_future()

    def open(self, capacity: int = 1) -> FakeConnection:
        connection = FakeConnection(capacity)
        self.answer.set_result(connection)
        return connection

    def fail(self, error: BaseException) -> None:
        self.answer.set_exception(error)


class FakeTransport:
    """Every connect waits at a gate, in :attr:`gates`."""

    def __init__(self, expect: int = 1) -> None:
        self.expected = expect
        self.gates: list[Gate] = []
        self._changed = asyncio.Event()

    def expect(self, endpoint: Endpoint) -> int:
        return self.expected

    def key(self, endpoint: Endpoint) -> Hashable:
        return endpoint.connection_key()

    async def connect(self, endpoint: Endpoint, attempt: Attempt) -> FakeConnection:
        gate = Gate(attempt)
        self.gates.append(gate)
        self._changed.set()
        return await gate.answer

    async def dialled(self, count: int) -> None:
        """Wait until so many dials have begun."""
        while len(self.gates) < count:
            self._changed.clear()
            await self._changed.wait()


def fake_attempt(
    *, limits: Limits | None = None, connect_s: float | None = None, headers: dict[str, str] | None = None
) -> Attempt:
    endpoint = Endpoint("http://host:1", limits=limits or Limits(max_idle_s=None))
    return Attempt(endpoint, timeouts=Timeouts(connect_s=connect_s), headers=headers)


async def settle() -> None:
    """Let every task and callback that can run, run."""
    for _ in range(10):
        await asyncio.sleep(0)
