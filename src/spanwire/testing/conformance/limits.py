"""How many calls at once: on a connection, at an endpoint, and who comes first."""

# A manager and a stream in it are two steps; an error may come anywhere while a stream is entered and read.

from __future__ import annotations

import asyncio

from ...endpoint import Limits
from ..loopback import Request
from .abilities import needs
from .answers import WORDS, hello
from .harness import DELAY_S, ELSEWHERE_S, SOON_S, Kit, Scene, read, seconds, slowly, until


class Capacity(Kit):
    """How many calls at once."""

    def test_one_at_a_time_waits_for_its_turn(self) -> None:
        """Proves: with ``Limits(max_concurrent=1)`` the server never sees two calls at once, they come in the order in which
        they were made, and the wait is on the timeline as ``queue`` ``local``.

        If it fails: slots come back with the end of the call (see the tests of leaving); a transport adds no queue of its
        own.
        """
        names = [f"m{number}" for number in range(5)]
        with self.scene(hello(prefill_s=0.03)) as scene:

            async def body() -> None:
                async with scene.manager() as manager:
                    endpoint = scene.endpoint(limits=Limits(max_concurrent=1))
                    await manager.warm(endpoint)

                    async def one(name: str) -> float:
                        async with manager.stream(endpoint, self.call(name)) as stream:
                            assert await read(stream) == "".join(WORDS)
                        return seconds(stream.timeline, "queue", "local")

                    waits = await asyncio.gather(*(one(name) for name in names))
                    assert waits[0] < ELSEWHERE_S
                    assert waits == sorted(waits), "who came later has waited less"
                    assert waits[-1] > 0.1

            scene.run(body)
            assert [request.model for request in scene.server.requests] == names
            assert _most_at_once(scene.server.requests) == 1

    def test_the_capacity_is_what_the_server_sees(self) -> None:
        """Proves: of many calls at once, no connection carries more than its ``capacity`` says; and all are answered.

        If it fails: ``capacity`` is 1 unless the wire tells exchanges apart. Where it may carry several, ``start()`` while
        others run must not wait for them.
        """
        with self.scene(slowly(WORDS, gap_s=0.01)) as scene:

            async def body() -> None:
                async with scene.manager() as manager:
                    capacities: list[int] = []

                    async def one() -> None:
                        async with manager.stream(scene.endpoint(), self.call()) as stream:
                            assert await read(stream) == "".join(WORDS)

                    calls = [asyncio.ensure_future(one()) for _ in range(12)]
                    await scene.wait_for(lambda s: len(s.requests) == 12)
                    for pool in manager.state().pools.values():
                        for member in pool.state.members:
                            capacities.append(member.connection.capacity)
                            assert member.leases <= member.connection.capacity
                    await asyncio.gather(*calls)
                    assert capacities
                    by_connection: dict[int, list[Request]] = {}
                    for request in scene.server.requests:
                        by_connection.setdefault(request.connection, []).append(request)
                    for requests in by_connection.values():
                        assert _most_at_once(requests) <= max(capacities)

            scene.run(body)

    def test_a_capacity_of_several_is_had(self) -> None:
        """Proves: a connection that says that it takes two takes two at the same time.

        If it fails: say ``capacity = 1``, or let the second ``start()`` send its request while the first is answered.
        """
        with self.scene(hello(prefill_s=DELAY_S)) as scene:

            async def body() -> None:
                async with scene.connection() as direct:
                    count = min(direct.connection.capacity, 3)
                    exchanges = [(await direct.start(self.call()))[0] for _ in range(count)]
                    for exchange in exchanges:
                        while await exchange.read():
                            pass
                    await until(lambda: sum(direct.releases) == count, lambda: "not all exchanges were released")
                    assert _most_at_once(scene.server.requests) == count

            scene.run(body)

    def test_warm_makes_room_for_as_many_as_it_was_asked_for(self) -> None:
        """Proves: after ``warm(endpoint, 3)`` three calls at once wait for no handshake and make no connection.

        If it fails: ``expect()`` promises more than a connection then carries, or a new connection is not ``usable()``.
        """
        with self.scene(hello(prefill_s=0.05)) as scene:

            async def body() -> None:
                async with scene.manager() as manager:
                    await manager.warm(scene.endpoint(), 3)
                    (pool,) = manager.state().pools.values()
                    made = len(pool.state.members)
                    assert sum(member.connection.capacity for member in pool.state.members) >= 3

                    async def one() -> None:
                        async with manager.stream(scene.endpoint(), self.call()) as stream:
                            assert await read(stream) == "".join(WORDS)
                        if not any(getattr(m.connection, "self_pooling", False) for m in pool.state.members):
                            assert "handshake" not in stream.timeline.segments, str(stream.timeline)

                    await asyncio.gather(*(one() for _ in range(3)))
                    assert len(pool.state.members) == made
                    await self._count(scene, made)

            scene.run(body)

    async def _count(self, scene: Scene, made: int) -> None:
        if self.can("connections"):
            await scene.wait_for(lambda s: s.connections >= made, SOON_S)

    @needs("hang")
    def test_a_full_connection_leaves_room_when_one_goes(self) -> None:
        """Proves: a call that waits for a slot gets it when the one in front of it is left.

        If it fails: ``abort()`` has to release at once, not when the server has understood.
        """
        with self.scene(hello(hang_after=2, role_chunk=False), hello()) as scene:

            async def body() -> None:
                async with scene.manager() as manager:
                    endpoint = scene.endpoint(limits=Limits(max_concurrent=1))
                    async with manager.stream(endpoint, self.call("first")) as first:
                        await anext(first)
                        second = asyncio.create_task(manager.complete(endpoint, self.call("second")))
                        slots = manager._prepare(endpoint).slots
                        assert slots is not None
                        await until(lambda: slots.waiting == 1, lambda: "the second call does not wait")
                    async with asyncio.timeout(SOON_S):
                        assert (await second).text == "".join(WORDS)

            if self.can("unary"):
                scene.run(body)


def _most_at_once(requests: list[Request]) -> int:
    """How many of them the server worked on at the same time."""
    steps = []
    for request in requests:
        end_ns = request.ended_ns or request.left_ns or request.dropped_ns
        assert end_ns is not None, f"{request!r} has not ended"
        steps += [(request.arrived_ns, 1), (end_ns, -1)]
    most = now = 0
    for _, step in sorted(steps):
        now += step
        most = max(most, now)
    return most
