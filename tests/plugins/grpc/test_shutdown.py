"""What the library itself leaves behind of calls that were cancelled, and when that is gone."""

from __future__ import annotations

import asyncio
import gc
import time
from typing import Any

import pytest
from spanwire_grpc import connection
from spanwire_grpc.loopback import ECHO

import spanwire
from spanwire.manager import ConnectionManager
from spanwire.testing import LoopbackServer, Script
from tests.support import NEVER, chat, hello, run

ROUNDS = 40
AT_ONCE = 20
#: Of the pool for one connection, by the contract of transports, and what a busy machine may add.
_CLOSED_S = 1.0 + 1.0


def others() -> set[asyncio.Task[Any]]:
    return asyncio.all_tasks() - {asyncio.current_task()}


async def ask(manager: ConnectionManager, endpoint: spanwire.Endpoint, kind: str) -> None:
    if kind == "session":
        async with manager.session(endpoint) as session:
            await session.send(b"a")
            async for _ in session:
                pass
    elif kind == "stream":
        async with manager.stream(endpoint, chat()) as stream:
            async for _ in stream:
                pass
    else:
        await manager.complete(endpoint, chat())


@pytest.mark.parametrize("kind", ["complete", "stream", "session"])
@pytest.mark.parametrize(
    "dialect",
    ["openai-json", pytest.param("oip", marks=pytest.mark.long), pytest.param("vllm", marks=pytest.mark.long)],
)
def test_no_task_outlives_a_manager_whose_calls_were_cancelled(kind: str, dialect: str) -> None:
    options: dict[str, Any] = {} if dialect == "openai-json" else {"chat_template": "plain"}
    if kind == "session":
        if dialect != "openai-json":
            pytest.skip("sessions have dialects of their own")
        dialect, options = "raw", {"method": ECHO}
    with LoopbackServer(default=Script(hang_after="request"), part="grpc") as server:
        endpoint = server.endpoint(dialect=dialect, options=options, retries=NEVER)
        took: list[float] = []

        async def main() -> None:
            for number in range(ROUNDS):
                manager = ConnectionManager()
                tasks = [asyncio.ensure_future(ask(manager, endpoint, kind)) for _ in range(AT_ONCE)]
                for _ in range(number):  # at another moment of the calls each time
                    await asyncio.sleep(0.0005)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                begin = time.perf_counter()
                await manager.aclose()
                took.append(time.perf_counter() - begin)
                left = others()
                assert not left, f"round {number}: {left}"

        gc.disable()  # a connection that is closed must not be held until the collector comes
        try:
            run(main)
            server.wait_for(lambda s: s.open_connections == 0)
        finally:
            gc.enable()
        print(f"{max(took):.3f} s at most, {sum(took) / len(took):.4f} s on average")
        assert max(took) < _CLOSED_S


def test_who_has_cancelled_nothing_does_not_wait_for_calls_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_LIBRARY_S", 3600.0)
    with LoopbackServer([Script(tokens=["a"], hang_after=2), hello()], part="grpc") as server:

        async def main() -> None:
            async with ConnectionManager() as busy:
                stream = busy.stream(server.endpoint(), chat())
                assert (await anext(stream)) is not None
                async with asyncio.timeout(10):
                    for _ in range(3):
                        async with ConnectionManager() as manager:
                            assert (await manager.complete(server.endpoint(), chat())).text
                monkeypatch.undo()

        run(main)
