"""What goes wrong: typed, with the right word on whether to try again, and after what had arrived before it."""

# A manager and a stream in it are two steps; an error may come anywhere while a stream is entered and read.
# ruff: noqa: PT012

from __future__ import annotations

import asyncio
import time

import pytest

from ...endpoint import Timeouts
from ...errors import (
    AuthenticationFailed,
    BadRequest,
    CallTimeout,
    ConnectionFailed,
    Overloaded,
    RateLimited,
    ServerError,
    SpanwireError,
    Truncated,
)
from ..script import Script
from .abilities import needs
from .answers import WORDS, hello
from .harness import AT_ONCE, NEVER, Kit, assert_adds_up, read
from .relay import Relay

CONNECTING = frozenset({"dns", "tcp", "tls", "proxy", "upgrade", "connect"})
#: A status, the error that it is, and whether the same call may succeed later.
REFUSALS = (
    (400, BadRequest, False),
    (401, AuthenticationFailed, False),
    (429, RateLimited, True),
    (500, ServerError, True),
    (503, Overloaded, True),
)


class Failures(Kit):
    """What goes wrong."""

    @needs("stop")
    def test_a_server_that_is_not_there(self) -> None:
        """Proves: ConnectionFailed of a phase of the connect, retryable, with the library's own exception as its cause.

        If it fails: turn what the library raises into ``ConnectionFailed(..., phase=...) from error``. Self-pooling
        transports do that in the exchange.
        """
        with self.scene(hello()) as scene:
            endpoint = scene.endpoint()

        async def body() -> None:
            async with scene.manager() as manager:
                for streamed in (True, False):
                    with pytest.raises(ConnectionFailed) as caught:
                        if streamed:
                            async with manager.stream(endpoint, self.call()) as stream:
                                await read(stream)
                        else:
                            await manager.complete(endpoint, self.call())
                    error = caught.value
                    assert error.phase in CONNECTING, error.phase
                    assert error.retryable
                    assert error.__cause__ is not None
                    assert error.endpoint == endpoint.address
                    assert error.timeline is not None
                    assert error.timeline.outcome == "error"
                    assert_adds_up(error.timeline)
                with pytest.raises(ConnectionFailed):
                    await manager.warm(endpoint)

        scene.run(body)
        assert scene.spans.problems() == []

    @needs("drop")
    @pytest.mark.parametrize("mode", ["close", "reset"])
    def test_a_break_before_the_answer_is_tried_again(self, mode: str) -> None:
        """Proves: ConnectionFailed, retryable, where nothing of the answer had come; the next attempt succeeds.

        If it fails: a connection that ends before the answer is no empty answer. ``retryable`` is True by default for
        ConnectionFailed; retries are the manager's.
        """
        if mode == "reset":
            self.must("reset")
        broken = Script(drop_after="request", drop_mode="reset" if mode == "reset" else "close")
        with self.scene(broken, broken, hello()) as scene:

            async def body() -> None:
                async with scene.manager() as manager:
                    with pytest.raises(ConnectionFailed) as caught:
                        async with manager.stream(scene.endpoint(), self.call()) as stream:
                            await read(stream)
                    assert caught.value.retryable
                    assert caught.value.phase in {"send", "wait", "read"}, caught.value.phase
                    async with manager.stream(scene.endpoint(retries=AT_ONCE), self.call()) as stream:
                        assert await read(stream) == "".join(WORDS)
                    assert len(stream.timeline.to_dict()["attempts"]) == 2
                    assert_adds_up(stream.timeline)

            scene.run(body)
            assert len(scene.server.requests) == 3

    @needs("drop")
    @pytest.mark.parametrize("mode", ["close", "reset"])
    def test_data_before_a_failure_is_delivered(self, mode: str) -> None:
        """Proves: three pieces arrive and the connection breaks, before anybody reads: all three are read, and then comes
        the error, with the pieces on its ``reply``. Nothing is tried again.

        If it fails: end the inbox with the error (``end(error)``) and leave its items alone.
        """
        if mode == "reset":
            self.must("reset")
        script = hello(role_chunk=False, drop_after=3, drop_mode="reset" if mode == "reset" else "close")
        with self.scene(script) as scene:

            async def body() -> None:
                async with scene.manager() as manager:
                    text = ""
                    with pytest.raises((ConnectionFailed, Truncated)) as caught:
                        async with manager.stream(scene.endpoint(retries=AT_ONCE), self.call()) as stream:
                            await scene.wait_for(lambda s: s.requests and s.requests[0].dropped_ns)
                            await asyncio.sleep(0.05)
                            async for chunk in stream:
                                text += chunk.text
                    assert text == "".join(WORDS[:3]), "what had arrived before the failure was not delivered"
                    assert caught.value.reply is not None
                    assert caught.value.reply.text == text
                    assert caught.value.phase == "read", caught.value.phase
                    assert stream.timeline.outcome == "error"
                    assert_adds_up(stream.timeline)

            scene.run(body)
            assert len(scene.server.requests) == 1

    @needs("truncate")
    def test_an_end_that_came_too_early_is_no_answer(self) -> None:
        """Proves: a message that ends in order, without finish reason and terminal event, raises Truncated.

        If it fails: ``end()`` without an error says that the answer was complete. Look for its terminal event first.
        """
        with self.scene(hello(finish_reason=None, usage=None, done=False)) as scene:

            async def body() -> None:
                async with scene.manager() as manager:
                    with pytest.raises(Truncated) as caught:
                        async with manager.stream(scene.endpoint(), self.call()) as stream:
                            await read(stream)
                    assert caught.value.reply is not None
                    assert caught.value.reply.text == "".join(WORDS)

            scene.run(body)

    @needs("status")
    @pytest.mark.parametrize(("status", "kind", "retryable"), REFUSALS, ids=[str(row[0]) for row in REFUSALS])
    @pytest.mark.parametrize("streamed", [True, False], ids=["stream", "unary"])
    def test_a_refusal_is_an_error_of_its_kind(
        self, status: int, kind: type[SpanwireError], retryable: bool, streamed: bool
    ) -> None:
        """Proves: what the server refuses is a ServerError of the right class, and says whether to try again.

        If it fails: ``spanwire.errors.server_error`` makes the error of a status; map the codes of your wire to those.
        """
        if not streamed:
            self.must("unary")
        with self.scene(Script(status=status), hello()) as scene:

            async def body() -> None:
                async with scene.manager() as manager:
                    with pytest.raises(ServerError) as caught:
                        if streamed:
                            async with manager.stream(scene.endpoint(), self.call()) as stream:
                                await read(stream)
                        else:
                            await manager.complete(scene.endpoint(), self.call())
                    assert isinstance(caught.value, kind)
                    assert caught.value.retryable is retryable
                    assert caught.value.timeline is not None
                    assert_adds_up(caught.value.timeline)
                    await scene.settled(manager)
                    async with manager.stream(scene.endpoint(), self.call()) as stream:
                        assert await read(stream) == "".join(WORDS)

            scene.run(body)

    @needs("hang")
    @pytest.mark.parametrize("limit", ["first_content_s", "idle_s", "total_s"])
    def test_a_server_that_hangs_meets_each_limit(self, limit: str) -> None:
        """Proves: CallTimeout names the limit, comes about when it should, and the server hears that its client has gone.

        If it fails: limits are the manager's, which calls ``abort(error)``: that must not wait for anything. ``idle_s``
        counts from the last byte: mark ``first_byte_ns`` and ``last_byte_ns`` when bytes arrive.
        """
        script = Script(hang_after="request") if limit == "first_content_s" else hello(hang_after=3, role_chunk=False)
        with self.scene(script, hello()) as scene:

            async def body() -> None:
                async with scene.manager() as manager:
                    began = time.monotonic()
                    with pytest.raises(CallTimeout) as caught:
                        timeouts = Timeouts(**{limit: 0.15})
                        async with manager.stream(scene.endpoint(timeouts=timeouts), self.call()) as stream:
                            await read(stream)
                    assert caught.value.limit == limit
                    assert time.monotonic() - began < 2, "the limit was hit much too late"
                    assert stream.timeline.outcome == "timeout"
                    await scene.left()
                    async with manager.stream(scene.endpoint(), self.call()) as stream:
                        assert await read(stream) == "".join(WORDS)

            scene.run(body)

    @needs("relay")
    def test_a_peer_that_says_nothing_meets_a_limit(self) -> None:
        """Proves: who takes the connection and never speaks costs ``connect_s`` (or ``first_content_s``), and nothing stays.

        If it fails: a connect that is cancelled has to close what it has opened. Never catch CancelledError and go on.
        """
        with self.scene(hello()) as scene:

            async def body() -> None:
                async with scene.manager() as manager:
                    timeouts = Timeouts(connect_s=0.2, first_content_s=0.2)
                    with Relay(scene.endpoint(timeouts=timeouts), silent=True) as relay:
                        began = time.monotonic()
                        with pytest.raises(CallTimeout) as caught:
                            async with manager.stream(relay.endpoint, self.call()) as stream:
                                await read(stream)
                        assert caught.value.limit in {"connect_s", "first_content_s"}
                        assert time.monotonic() - began < 3, "the limit was hit much too late"
                        await scene.settled(manager)

            scene.run(body)

    @needs("disconnect", "connections")
    @pytest.mark.parametrize("noticed", [True, False], ids=["noticed", "not noticed"])
    def test_a_connection_that_died_while_idle_is_replaced(self, noticed: bool) -> None:
        """Proves: a call on a connection that the server has closed is tried once on a fresh one, without any retries.

        If it fails: ``usable()`` is False once the end of the connection was seen. If it was not, the call fails with
        ConnectionFailed before any byte of the answer (``first_byte_ns`` is 0), and the connection is unusable.
        """
        with self.scene(hello()) as scene:

            async def body() -> None:
                async with scene.manager() as manager:
                    endpoint = scene.endpoint(retries=NEVER)
                    async with manager.stream(endpoint, self.call()) as stream:
                        await read(stream)
                    await scene.settled(manager)
                    scene.server.disconnect()
                    if noticed:
                        await scene.wait_for(lambda s: s.open_connections == 0)
                        await asyncio.sleep(0.02)
                    else:  # the loop is blocked meanwhile, and cannot
                        scene.server.wait_for(lambda s: s.open_connections == 0)
                    async with manager.stream(endpoint, self.call()) as stream:
                        assert await read(stream) == "".join(WORDS)
                    assert_adds_up(stream.timeline)
                    use = stream.timeline.connection
                    assert use is not None
                    if noticed or self.can("dials"):
                        assert not use.reused
                    assert scene.server.connections == 2

            scene.run(body)
