"""What core gives to transports: the inbox, and an attempt's release."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from spanwire.calls import Chunk
from spanwire.endpoint import Endpoint, Timeouts
from spanwire.errors import ConnectionFailed
from spanwire.transport import Attempt, Inbox, Item
from tests.support import run

ONE, TWO, THREE = Chunk("1"), Chunk("2"), Chunk("3")


class Watched(Inbox):
    """Notes when the peer is stopped and goes on."""

    def __init__(self, high: int) -> None:
        super().__init__(high=high)
        self.heard: list[str] = []

    def on_high(self) -> None:
        self.heard.append("high")

    def on_low(self) -> None:
        self.heard.append("low")


def test_a_read_gives_all_that_has_arrived_in_order_and_then_the_end() -> None:
    async def body() -> None:
        inbox = Inbox()
        inbox.put(ONE)
        inbox.put(TWO)
        inbox.end()
        assert [*await inbox.read()] == [ONE, TWO]
        assert [*await inbox.read()] == []
        assert [*await inbox.read()] == []

    run(body)


def test_a_pending_read_is_woken_once_for_a_batch() -> None:
    async def body() -> None:
        inbox = Inbox()
        pending = asyncio.create_task(inbox.read())
        await asyncio.sleep(0)
        inbox.put(ONE)
        inbox.put(TWO)
        assert not pending.done()
        inbox.wake()
        assert [*await pending] == [ONE, TWO]

    run(body)


def test_what_arrived_comes_before_the_error_which_is_raised_once() -> None:
    async def body() -> None:
        inbox = Inbox()
        inbox.put(ONE)
        inbox.end(ConnectionFailed("broke"))
        assert not inbox.complete
        assert [*await inbox.read()] == [ONE]
        with pytest.raises(ConnectionFailed):
            await inbox.read()
        assert [*await inbox.read()] == []
        assert not inbox.complete

    run(body)


@pytest.mark.parametrize("error", [None, ConnectionFailed("limit")])
def test_abort_drops_what_was_not_read_unless_it_has_an_error(error: ConnectionFailed | None) -> None:
    async def body() -> None:
        inbox = Inbox()
        inbox.put(ONE)
        inbox.abort(error)
        inbox.abort() if error is None else inbox.abort(ConnectionFailed("a second one"))
        if error is None:
            assert [*await inbox.read()] == []
        else:
            assert [*await inbox.read()] == [ONE]
            with pytest.raises(ConnectionFailed, match="limit"):
                await inbox.read()
        assert not inbox.complete

    run(body)


def test_abort_ends_a_pending_read_and_a_cancelled_read_loses_nothing() -> None:
    async def body() -> None:
        inbox = Inbox()
        pending = asyncio.create_task(inbox.read())
        await asyncio.sleep(0)
        inbox.put(ONE)
        inbox.wake()
        pending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pending
        assert [*await inbox.read()] == [ONE]
        pending = asyncio.create_task(inbox.read())
        await asyncio.sleep(0)
        inbox.abort()
        assert [*await pending] == []

    run(body)


def test_the_first_end_counts() -> None:
    async def body() -> None:
        inbox = Inbox()
        inbox.end()
        inbox.end(ConnectionFailed("later"))
        assert inbox.complete
        assert [*await inbox.read()] == []

    run(body)


def test_a_peer_that_is_too_fast_is_stopped_once_and_goes_on_after_the_read() -> None:
    async def body() -> None:
        inbox = Watched(high=2)
        for chunk in (ONE, TWO, THREE):
            inbox.put(chunk)
            inbox.wake()
        assert inbox.heard == ["high"]
        read: Sequence[Item] = await inbox.read()
        assert [*read] == [ONE, TWO, THREE]
        assert inbox.heard == ["high", "low"]

    run(body)


def test_an_exchange_is_released_once() -> None:
    released: list[str] = []
    attempt = Attempt(Endpoint("http://h"), timeouts=Timeouts(), on_released=lambda: released.append("x"))
    attempt.released()
    attempt.released()
    assert released == ["x"]
