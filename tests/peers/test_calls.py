"""Calls to real servers: what comes back, how they fail, and on how many connections."""

from __future__ import annotations

import asyncio
import time

import pytest

import spanwire
from spanwire.errors import AuthenticationFailed, BadRequest, ConnectionFailed, Overloaded, ServerError
from tests.peers.conftest import CUT, HELLO, KATAN_IN_FLIGHT, SLOW, TOOL, Peer
from tests.peers.relay import relay_to
from tests.support import NEVER, assert_adds_up, read, run

pytestmark = [pytest.mark.peers, pytest.mark.timeout(60, func_only=True)]

#: How long uvicorn and Node.js keep a connection that nobody uses: both 5 s by default.
KEEP_ALIVE_S = 5.0
STREAMED_CALLS = 6


def ask(peer: Peer, prompt: str, **more: object) -> spanwire.Reply:
    """One streamed call on a manager of its own."""

    async def body() -> spanwire.Reply:
        async with (
            spanwire.ConnectionManager() as manager,
            manager.stream(peer.endpoint(**more), peer.call(prompt)) as stream,
        ):
            await read(stream)
            return stream.reply

    return run(body)


def timeline_of(found: spanwire.Reply | spanwire.SpanwireError) -> spanwire.Timeline:
    assert found.timeline is not None
    assert_adds_up(found.timeline)
    return found.timeline


# --- what comes back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt", "text"), [("hello", HELLO), ("slow", SLOW)])
def test_streamed_text(scripted: Peer, prompt: str, text: str) -> None:
    async def body() -> list[spanwire.Chunk]:
        async with (
            spanwire.ConnectionManager() as manager,
            manager.stream(scripted.endpoint(), scripted.call(prompt)) as stream,
        ):
            chunks = [chunk async for chunk in stream]
        assert stream.reply.text == text
        assert stream.reply.finish_reason == "stop"
        assert stream.reply.usage is not None
        assert stream.reply.id
        timeline_of(stream.reply)
        return chunks

    chunks = run(body)
    assert sum(chunk.has_content for chunk in chunks) == (2 if prompt == "hello" else -(-len(SLOW) // 4))


def test_streamed_text_over_tls(katan: Peer) -> None:
    reply = ask(katan, "Grüße, 東京")
    assert reply.text.endswith("User: Grüße, 東京")
    assert reply.finish_reason == "stop"
    assert reply.model == katan.model
    assert reply.usage is not None
    assert set(timeline_of(reply).segments["handshake"].parts) >= {"tcp", "tls"}


def test_tool_call(scripted: Peer) -> None:
    reply = ask(scripted, "weather")
    assert reply.text == ""
    assert reply.finish_reason == "tool_calls"
    (tool,) = reply.tool_calls
    assert (tool.name, tool.arguments) == TOOL
    assert tool.id
    timeline_of(reply)


def test_whole_answer(scripted: Peer) -> None:
    with spanwire.SyncConnectionManager() as manager:
        text = manager.complete(scripted.endpoint(), scripted.call("hello"))
        tools = manager.complete(scripted.endpoint(), scripted.call("weather"))
    assert (text.text, text.finish_reason) == (HELLO, "stop")
    assert [(tool.name, tool.arguments) for tool in tools.tool_calls] == [TOOL]


# --- failures ---------------------------------------------------------------------------------------------------------


def test_answer_that_breaks_off(aimock: Peer) -> None:
    with pytest.raises(ConnectionFailed) as caught:  # aimock resets the connection: no clean end
        ask(aimock, "cut")
    error = caught.value
    assert (error.phase, error.retryable) == ("read", True)
    assert error.reply is not None
    assert error.reply.text
    assert CUT.startswith(error.reply.text)
    assert error.reply.finish_reason is None
    timeline = timeline_of(error)
    assert timeline.outcome == "error"
    assert len(timeline.to_dict()["attempts"]) == 1  # content was delivered: not tried again


def test_answer_that_breaks_off_behind_a_proxy(litellm: Peer) -> None:
    """LiteLLM ends the stream cleanly, with an error object in place of `[DONE]`."""
    with pytest.raises(ServerError) as caught:
        ask(litellm, "cut")
    error = caught.value
    assert error.code == "500"
    assert error.reply is not None
    assert error.reply.text
    assert CUT.startswith(error.reply.text)
    assert len(timeline_of(error).to_dict()["attempts"]) == 1


def test_wrong_key(litellm: Peer) -> None:
    with pytest.raises(AuthenticationFailed) as caught:
        ask(litellm, "hello", api_key="sk-wrong-5e2a")
    error = caught.value
    assert (error.status, error.retryable) == (401, False)
    assert "Invalid API key" in str(error)
    assert "sk-wrong" not in str(error)
    assert len(timeline_of(error).to_dict()["attempts"]) == 1


def test_no_key_over_tls(katan: Peer) -> None:
    with pytest.raises(AuthenticationFailed) as caught:
        ask(katan, "hello", api_key=None)
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")


def test_certificate_that_nobody_trusts(katan: Peer) -> None:
    with pytest.raises(ConnectionFailed) as caught:
        ask(katan, "hello", tls=spanwire.TLS(), retries=NEVER)
    assert caught.value.phase == "tls"
    assert "not trusted" in str(caught.value)


def test_request_that_the_server_refuses(scripted: Peer) -> None:
    with pytest.raises(BadRequest) as caught:
        ask(scripted, "nothing matches this")
    assert caught.value.status == 404
    assert "No fixture matched" in str(caught.value)


def test_server_over_its_limit(katan: Peer) -> None:
    """Half of these calls are refused with 503 at once; tried again after a wait, all are answered."""
    calls = 2 * KATAN_IN_FLIGHT

    async def burst(retries: spanwire.Retries) -> list[spanwire.Reply | BaseException]:
        async with spanwire.ConnectionManager() as manager:
            await manager.warm(katan.endpoint(), calls)
            jobs = (manager.complete(katan.endpoint(), katan.call("hello"), retries=retries) for _ in range(calls))
            return await asyncio.gather(*jobs, return_exceptions=True)

    once = run(lambda: burst(NEVER))
    refused = [found for found in once if isinstance(found, BaseException)]
    assert refused
    for error in refused:
        assert isinstance(error, Overloaded)
        assert (error.status, error.retryable) == (503, True)
    again = run(lambda: burst(spanwire.Retries(max_attempts=8, base_s=0.1)))
    assert all(isinstance(found, spanwire.Reply) for found in again)
    assert (
        max(len(timeline_of(found).to_dict()["attempts"]) for found in again if isinstance(found, spanwire.Reply)) > 1
    )


# --- connections ------------------------------------------------------------------------------------------------------


def test_streamed_calls_on_one_connection(peer: Peer) -> None:
    async def body() -> set[str]:
        ids = set()
        async with spanwire.ConnectionManager() as manager:
            for _ in range(STREAMED_CALLS):
                async with manager.stream(endpoint, peer.call("hello")) as stream:
                    assert await read(stream)
                assert stream.timeline.connection is not None
                ids.add(stream.timeline.connection.id)
        return ids

    with relay_to(peer.port) as relay:
        endpoint = peer.endpoint(url=peer.url(relay.port))
        assert len(run(body)) == 1
        assert relay.connections == 1


def test_streamed_calls_on_one_connection_sync(peer: Peer) -> None:
    ids = set()
    with relay_to(peer.port) as relay:
        endpoint = peer.endpoint(url=peer.url(relay.port))
        with spanwire.SyncConnectionManager() as manager:
            for _ in range(STREAMED_CALLS):
                with manager.stream(endpoint, peer.call("hello")) as stream:
                    assert "".join(chunk.text for chunk in stream)
                assert stream.timeline.connection is not None
                ids.add(stream.timeline.connection.id)
        assert len(ids) == 1
        assert relay.connections == 1


def test_call_after_the_server_has_closed_an_idle_connection(peer: Peer) -> None:
    async def body() -> tuple[spanwire.Reply, spanwire.Reply]:
        async with spanwire.ConnectionManager() as manager:
            before = await manager.complete(peer.endpoint(), peer.call("hello"))
            await asyncio.sleep(KEEP_ALIVE_S + 1)
            return before, await manager.complete(peer.endpoint(), peer.call("hello"))

    before, after = (timeline_of(reply) for reply in run(body))
    assert before.connection is not None
    assert after.connection is not None
    assert after.connection.id != before.connection.id
    assert len(after.to_dict()["attempts"]) == 1  # noticed before it was used


def test_stream_that_is_left_early(scripted: Peer) -> None:
    async def body() -> tuple[spanwire.Timeline, spanwire.Reply]:
        async with spanwire.ConnectionManager() as manager:
            async with manager.stream(scripted.endpoint(), scripted.call("slow")) as stream:
                async for chunk in stream:
                    if chunk.has_content:
                        break
            return stream.timeline, await manager.complete(scripted.endpoint(), scripted.call("hello"))

    begin_s = time.perf_counter()
    left, reply = run(body)
    assert time.perf_counter() - begin_s < 10
    assert left.outcome == "closed_by_caller"
    assert_adds_up(left)
    assert reply.text == HELLO  # and nothing of the answer that was left
