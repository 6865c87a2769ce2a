"""Calls over a real broker, as a user makes them, and what only this transport has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import nats
import pytest
from broker import PART
from nats.aio.client import Client
from spanwire_nats import Incoming, NATSTransport, Responder

import spanwire
from spanwire.errors import ConfigurationError, ConnectionFailed, MessageTooBig, ProtocolError, ServerError
from spanwire.testing import LoopbackServer, Script

CALL = spanwire.Call.chat("my-model", [{"role": "user", "content": "Say hello"}])
NEVER = spanwire.Retries(max_attempts=1)


@pytest.fixture
def server() -> Iterator[LoopbackServer]:
    with LoopbackServer([Script.say("Hello over NATS")], part=PART) as server:
        yield server
        assert server.faults == []


def url(server: LoopbackServer, path: str = "") -> str:
    return f"nats://127.0.0.1:{server.port}{path}"


@asynccontextmanager
async def client(server: LoopbackServer) -> AsyncIterator[Client]:
    made = await nats.connect(url(server))
    try:
        yield made
    finally:
        await made.close()


def test_a_call(server: LoopbackServer) -> None:
    with spanwire.SyncConnectionManager() as manager:
        with manager.stream(server.url, CALL) as stream:
            assert "".join(chunk.text for chunk in stream) == "Hello over NATS"
        print(stream.timeline)
        assert manager.complete(server.url, CALL).text == "Hello over NATS"


def test_many_calls_at_once_share_a_connection(server: LoopbackServer) -> None:
    async def main() -> set[str]:
        async with spanwire.ConnectionManager() as manager:
            replies = await asyncio.gather(*(manager.complete(server.url, CALL) for _ in range(100)))
        assert {reply.text for reply in replies} == {"Hello over NATS"}
        return {reply.timeline.connection.id for reply in replies if reply.timeline and reply.timeline.connection}

    assert len(asyncio.run(main())) == 1


def test_a_subject_that_nobody_answers_fails_at_once(server: LoopbackServer) -> None:
    endpoint = spanwire.Endpoint(url(server, "/no/such/model"), retries=NEVER)
    with spanwire.SyncConnectionManager() as manager:
        with pytest.raises(ConnectionFailed, match=r"nobody answers on the subject no\.such\.model") as caught:
            manager.complete(endpoint, CALL)
    assert caught.value.phase == "wait"
    assert caught.value.retryable


def test_a_call_over_the_brokers_limit_says_so(server: LoopbackServer) -> None:
    big = spanwire.Call.chat("my-model", [{"role": "user", "content": "x" * 9_000_000}])
    with spanwire.SyncConnectionManager() as manager:
        with pytest.raises(MessageTooBig, match="max_payload"):
            manager.complete(server.url, big)
        assert manager.complete(server.url, CALL).text == "Hello over NATS"


def test_responders_share_the_calls_and_each_is_answered_once(server: LoopbackServer) -> None:
    async def main() -> None:
        taken: list[list[str]] = [[], []]

        async with client(server) as one, client(server) as other:
            for number, connected in enumerate((one, other)):

                async def answer(call: Incoming, number: int = number) -> AsyncIterator[spanwire.Chunk]:
                    taken[number].append(call.model)
                    yield spanwire.Chunk(text=call.model)
                    yield spanwire.Chunk(finish_reason="stop")

                await Responder(connected, "shared", answer).start()
            async with spanwire.ConnectionManager() as manager:
                names = [f"m{number}" for number in range(40)]
                calls = [spanwire.Call.chat(name, [{"role": "user", "content": "?"}]) for name in names]
                endpoint = spanwire.Endpoint(url(server, "/shared"))
                replies = await asyncio.gather(*(manager.complete(endpoint, call) for call in calls))
        assert [reply.text for reply in replies] == names
        assert sorted(taken[0] + taken[1]) == sorted(names)
        assert all(taken)

    asyncio.run(main())


def test_a_bug_in_a_responder_is_a_status_that_tells_nothing_of_it(server: LoopbackServer) -> None:
    async def answer(call: Incoming) -> AsyncIterator[spanwire.Chunk]:
        yield spanwire.Chunk(text="half")
        raise RuntimeError("a secret path")

    async def main() -> None:
        async with client(server) as connected, spanwire.ConnectionManager() as manager:
            asyncio.get_running_loop().set_exception_handler(lambda *_: None)
            await Responder(connected, "broken", answer).start()
            endpoint = spanwire.Endpoint(url(server, "/broken"), retries=NEVER)
            text = ""
            with pytest.raises(ServerError) as caught:
                async with manager.stream(endpoint, CALL) as stream:
                    async for chunk in stream:
                        text += chunk.text
            assert (text, caught.value.status) == ("half", 500)
            assert "secret" not in str(caught.value)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("payload", "error", "words"),
    [(b'{"n": 1, "text": "b"}', ConnectionFailed, "dropped a message"), (b"[]", ProtocolError, "not an object")],
)
def test_an_answer_that_cannot_be_trusted_is_an_error(
    server: LoopbackServer, payload: bytes, error: type[Exception], words: str
) -> None:
    async def main() -> None:
        async with client(server) as connected, spanwire.ConnectionManager() as manager:

            async def answer(message: Any) -> None:
                await connected.publish(message.reply, payload)

            await connected.subscribe("odd", cb=answer)
            await connected.flush()
            with pytest.raises(error, match=words):
                await manager.complete(spanwire.Endpoint(url(server, "/odd"), retries=NEVER), CALL)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("path", "options", "words"),
    [
        ("/a*", {}, "no subject"),
        ("/a", {"heartbeat_s": 0}, "heartbeat_s"),
        ("/a", {"nats": {"servers": []}}, "without"),
        ("/a", {"nats": "x"}, "mapping"),
    ],
)
def test_settings_that_cannot_work_are_refused(path: str, options: dict[str, Any], words: str) -> None:
    endpoint = spanwire.Endpoint(f"nats://127.0.0.1:4222{path}", options=options)
    with pytest.raises(ConfigurationError, match=words):
        NATSTransport().key(endpoint)


def test_another_account_is_another_connection() -> None:
    keys = {
        NATSTransport().key(
            spanwire.Endpoint("nats://127.0.0.1:4222", options={"nats": {"user": user, "password": "p"}})
        )
        for user in ("a", "b", "a")
    }
    assert len(keys) == 2
