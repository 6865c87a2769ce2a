"""The timeline: handshake marks, the exchange's marks, and a delay that lands in its segment and in no other."""

# A manager and a stream in it are two steps; an error may come anywhere while a stream is entered and read.

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from ..script import Script
from .abilities import needs
from .answers import WORDS, hello
from .harness import DELAY_S, ELSEWHERE_S, SOON_S, Kit, Scene, assert_adds_up, attempt_of, read, seconds, until

if TYPE_CHECKING:
    from ...manager import ConnectionManager
    from ...pool import Member
    from ...timeline import Marks, Timeline

#: Parts that a connect may have. Source: ``spanwire.timeline.Marks``.
HANDSHAKE_PARTS = frozenset({"dns", "tcp", "tls", "proxy", "upgrade", "connect"})


class Segments(Kit):
    """Where the time went."""

    @needs("handshake")
    def test_a_cold_call_has_a_handshake_and_a_warm_one_has_none(self) -> None:
        """Proves: the connect's steps are on the call that waited for it, and a connection is used again without them.

        If it fails: mark each step on the attempt that ``connect`` was given (``attempt.marks.begin`` and ``end``), and
        none on an exchange's. Without a second use: ``usable()``, and ``released()`` at the end of the message.
        """
        with self.scene(hello()) as scene:

            async def body() -> None:
                async with scene.manager() as manager:
                    cold = await self._streamed(scene, manager)
                    warm = await self._streamed(scene, manager)
                    for timeline in (cold, warm):
                        assert_adds_up(timeline)
                        assert timeline.connection is not None
                    assert cold.connection is not None
                    assert warm.connection is not None
                    assert not cold.connection.reused
                    assert 0 < seconds(cold, "handshake") <= cold.total_s
                    assert set(cold.segments["handshake"].parts) <= HANDSHAKE_PARTS
                    assert warm.connection.reused
                    assert warm.connection.id == cold.connection.id
                    assert "handshake" not in warm.segments, f"a warm call shows a handshake:\n{warm}"

            scene.run(body)

    async def _streamed(self, scene: Scene, manager: ConnectionManager) -> Timeline:
        async with manager.stream(scene.endpoint(), self.call()) as stream:
            await read(stream)
        await scene.settled(manager)
        return stream.timeline

    @needs("handshake")
    def test_handshake_marks_are_paired_and_in_order(self) -> None:
        """Proves: each step of a connect is begun and ended once, none overlaps another, all are inside the connect.

        If it fails: end what you begin, also where a step fails; take the times from ``time.perf_counter_ns()``; begin a
        step after the one before has ended. Two marks for one step count its time twice.
        """
        with self.scene(hello()) as scene:

            async def body() -> None:
                async with scene.manager() as manager:
                    await manager.warm(scene.endpoint())
                    (member,) = _members(manager)
                    _assert_paired(member.marks, *member.connect_ns)
                    names = [name for name, *_ in member.marks.parts]
                    assert names, "the connect has marked nothing"
                    known = HANDSHAKE_PARTS | {"admission"}  # on a busy machine a handshake waits for its server
                    assert set(names) <= known, f"unknown parts: {set(names) - known}"
                    if self.can(
                        "connections"
                    ):  # else it may end before the server has taken it, and not be closed there
                        await scene.wait_for(lambda s: s.connections)

            scene.run(body)

    @needs("segments")
    def test_an_exchanges_marks_are_there_paired_and_in_order(self) -> None:
        """Proves: encode, send, first byte, first chunk, first content, last chunk, last byte and end, in that order.

        If it fails: the message names the mark that is missing (0), or earlier than the one before it. All are times of
        arrival, ns of ``time.perf_counter_ns()``; see ``spanwire.timeline.Marks``.
        """
        with self.scene(Script(tokens=WORDS, gap_s=0.005)) as scene:

            async def body() -> None:
                async with scene.manager() as manager:
                    for _ in ("cold", "warm"):
                        timeline = await self._streamed(scene, manager)
                        attempt = attempt_of(timeline)
                        marks = attempt.marks
                        names = (
                            "sent_ns",
                            "first_byte_ns",
                            "first_chunk_ns",
                            "first_content_ns",
                            "last_chunk_ns",
                            "last_byte_ns",
                            "ended_ns",
                        )
                        times = {name: getattr(marks, name) for name in names}
                        assert all(times.values()), f"marks that are missing: {[n for n in names if not times[n]]}"
                        assert [*times.values()] == sorted(times.values()), f"marks that are not in order: {times}"
                        assert attempt.leased_ns <= marks.sent_ns
                        assert marks.ended_ns <= attempt.end_ns
                        _assert_paired(marks, attempt.begin_ns, attempt.end_ns)
                        assert {"encode", "send"} <= {name for name, *_ in marks.parts}
                        assert not HANDSHAKE_PARTS & {name for name, *_ in marks.parts} or marks.use is not None
                        assert_adds_up(timeline)

            scene.run(body)

    @needs("segments")
    @pytest.mark.parametrize("delay", ["queue", "prefill"])
    def test_a_servers_delay_before_the_first_token_is_the_servers(self, delay: str) -> None:
        """Proves: 150 ms before the first token are the model's, or the server's queue (or unattributed, where no round
        trip is known), and not handshake, network, client or a local queue.

        If it fails: ``network``: ``sent_ns`` is late; take it when the request's last bytes were handed over, not when the
        answer begins. ``handshake``: a connect was counted too long. ``client``: an arrival was stamped when it was read.
        """
        script = hello(queue_s=DELAY_S) if delay == "queue" else hello(prefill_s=DELAY_S)
        timeline = self._warm_call(script)
        assert timeline.first_content_s is not None
        assert timeline.first_content_s >= DELAY_S * 0.95
        servers = seconds(timeline, "model") + seconds(timeline, "queue", "server") + seconds(timeline, "unattributed")
        assert servers >= DELAY_S * 0.95, f"the delay is somewhere else:\n{timeline}"
        _assert_short(timeline, "handshake", "network", "client")
        assert seconds(timeline, "queue", "local") < ELSEWHERE_S, str(timeline)
        assert seconds(timeline, "model", "decode") < ELSEWHERE_S, str(timeline)

    @needs("segments")
    def test_a_servers_delay_between_tokens_is_decoding(self) -> None:
        """Proves: 150 ms between two tokens are the model's decoding, and in no other segment.

        If it fails: ``first_content_ns`` and ``last_chunk_ns`` are the arrivals of the first token and of the last event.
        Equal ones were stamped when they were read, or when the answer had ended.
        """
        timeline = self._warm_call(Script(tokens=["a", "b"], gap_s=DELAY_S))
        assert seconds(timeline, "model", "decode") >= DELAY_S * 0.95, f"the delay is somewhere else:\n{timeline}"
        assert timeline.first_content_s is not None
        assert timeline.first_content_s < ELSEWHERE_S
        _assert_short(timeline, "handshake", "network", "client", "queue", "unattributed")
        assert seconds(timeline, "model", "prefill") < ELSEWHERE_S, str(timeline)

    @needs("segments")
    def test_a_consumers_delay_is_the_clients(self) -> None:
        """Proves: where everything has come at once, and the consumer reads 150 ms later, the model is not blamed.

        If it fails: stamp arrivals when bytes arrive (in the callback of the connection, or in the task that pulls), not
        in ``read()``.
        """
        with self.scene(hello()) as scene:

            async def body() -> None:
                async with scene.manager() as manager:
                    await manager.warm(scene.endpoint())
                    async with manager.stream(scene.endpoint(), self.call()) as stream:
                        await scene.wait_for(lambda s: s.requests and s.requests[-1].ended)
                        run = stream._run
                        assert run is not None
                        exchange = run.exchange
                        assert exchange is not None
                        await until(lambda: exchange.complete, lambda: "the answer came, and `complete` is not True")
                        await asyncio.sleep(DELAY_S)
                        await read(stream)
                    timeline = stream.timeline
                    assert_adds_up(timeline)
                    assert timeline.first_content_s is not None
                    assert timeline.first_content_s < ELSEWHERE_S + 0.02, "arrival was stamped when it was read"
                    # The last event may come after `complete`: on a busy machine some milliseconds.
                    assert seconds(timeline, "client") >= DELAY_S * 0.85, f"the delay is somewhere else:\n{timeline}"
                    _assert_short(timeline, "handshake", "network", "model", "queue", "unattributed")

            scene.run(body)

    @needs("segments", "unary")
    def test_a_delay_of_a_whole_answer_is_the_servers(self) -> None:
        """Proves: the same for an answer that is not streamed.

        If it fails: ``first_chunk_ns`` is the arrival of the body's first byte there, ``last_byte_ns`` of its last.
        """
        with self.scene(hello(queue_s=DELAY_S)) as scene:

            async def body() -> None:
                async with scene.manager() as manager:
                    await manager.warm(scene.endpoint())
                    reply = await manager.complete(scene.endpoint(), self.call())
                    timeline = reply.timeline
                    assert timeline is not None
                    assert_adds_up(timeline)
                    servers = (
                        seconds(timeline, "model")
                        + seconds(timeline, "queue", "server")
                        + seconds(timeline, "unattributed")
                    )
                    assert servers >= DELAY_S * 0.95, f"the delay is somewhere else:\n{timeline}"
                    _assert_short(timeline, "handshake", "network", "client")

            scene.run(body)

    def _warm_call(self, script: Script) -> Timeline:
        with self.scene(script) as scene:

            async def body() -> Timeline:
                async with scene.manager() as manager:
                    await manager.warm(scene.endpoint())
                    timeline = await self._streamed(scene, manager)
                    assert_adds_up(timeline)
                    return timeline

            return scene.run(body)

    @needs("finish")
    def test_a_late_end_of_the_message_is_nobodys_time(self) -> None:
        """Proves: the call ends at the terminal event, 150 ms before the message on the connection does.

        If it fails: ``read()`` gives its empty batch at the terminal event; ``released()`` is called at the message's end.
        """
        with self.scene(hello(end_s=DELAY_S)) as scene:

            async def body() -> None:
                async with scene.manager() as manager:
                    await manager.warm(scene.endpoint())
                    async with manager.stream(scene.endpoint(), self.call()) as stream:
                        await read(stream)
                    assert stream.timeline.total_s < DELAY_S * 0.95, str(stream.timeline)
                    (member,) = _members(manager)
                    assert member.leases, "released() was called before the message had ended"
                    await until(lambda: not member.leases, lambda: "released() was not called", soon_s=SOON_S / 2)
                    assert member.connection.usable()

            scene.run(body)


def _members(manager: ConnectionManager) -> list[Member]:
    return [member for pool in manager.state().pools.values() for member in pool.state.members]


def _assert_short(timeline: Timeline, *segments: str) -> None:
    for name in segments:
        assert seconds(timeline, name) < ELSEWHERE_S, f"the delay is in {name}, where it does not belong:\n{timeline}"


def _assert_paired(marks: Marks, low_ns: int, high_ns: int) -> None:
    assert marks.open_part is None, f"{marks.open_part!r} was begun and not ended"
    last_ns = low_ns
    names = [name for name, *_ in marks.parts]
    assert len(names) == len(set(names)), f"marked twice: {names}"
    for name, begin_ns, end_ns in sorted(marks.parts, key=lambda part: part[1]):
        assert begin_ns <= end_ns, f"{name} ends before it begins"
        assert begin_ns >= last_ns, f"{name} begins before the part in front of it has ended, or before the attempt"
        assert end_ns <= high_ns, f"{name} ends after the attempt has"
        last_ns = end_ns
