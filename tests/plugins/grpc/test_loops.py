"""The library's reader of events, on a loop of ours."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import grpc
import pytest
from spanwire_grpc.loops import bind_loop


@pytest.mark.parametrize("raised", [RuntimeError("Event loop is closed"), BlockingIOError()])
def test_what_belongs_to_other_loops_stops_no_event_of_this_one(
    monkeypatch: pytest.MonkeyPatch, raised: Exception
) -> None:
    """Events of loops that were closed are passed over, until one that can be delivered; one that came too late is nothing."""
    heard: list[Any] = []
    outcomes: list[Exception | None] = [raised, raised, None]
    inlet, outlet = os.pipe()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _loop, context: heard.append(context))
        read = loop.create_future()

        def callback() -> None:
            outcome = outcomes.pop(0)
            if not outcomes or isinstance(raised, BlockingIOError):
                loop.remove_reader(inlet)
                read.set_result(None)
            if outcome is not None:
                raise outcome

        monkeypatch.setattr(grpc.aio, "init_grpc_aio", lambda: loop.add_reader(inlet, callback))
        bind_loop()
        os.write(outlet, b"x")
        await read

    try:
        asyncio.run(main())
    finally:
        os.close(inlet)
        os.close(outlet)
    assert heard == []
