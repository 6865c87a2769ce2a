"""The loopback server as any client of gRPC sees it: the library's own, here."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest
from spanwire_grpc.loopback import PART
from spanwire_grpc.metadata import incoming
from spanwire_grpc.stubs import openai_json, vllm

from spanwire.testing import LoopbackPart, LoopbackServer, Script
from tests.support import hello

CHAT = "/sglang.runtime.v1.SglangService/ChatComplete"


def request(**body: Any) -> bytes:
    raw = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Say hello"}], **body}).encode()
    made: bytes = openai_json.OpenAIRequest(json_body=raw).SerializeToString()
    return made


def play(server: LoopbackServer, body: Callable[[Any], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        async with grpc.aio.insecure_channel(server.url.removeprefix("grpc://")) as channel:
            return await body(channel)

    return asyncio.run(main())


async def chunks(channel: Any, **more: Any) -> list[Any]:
    call = channel.unary_stream(CHAT)(request(stream=True), **more)
    return [openai_json.OpenAIStreamChunk.FromString(message) async for message in call]


def test_it_is_what_the_contract_says() -> None:
    assert isinstance(PART, LoopbackPart)
    assert PART.url("h", 5, secure=True) == "grpcs://h:5"
    assert PART.url("[::1]", 5, secure=False) == "grpc://[::1]:5"


def test_a_chunk_for_each_piece_and_an_empty_one_that_says_finished() -> None:
    with LoopbackServer([hello()], part="grpc") as server:
        found = play(server, chunks)
        assert [chunk.finished for chunk in found] == [False] * 7 + [True]
        assert found[-1].json_chunk == b""
        assert json.loads(found[1].json_chunk)["choices"][0]["delta"] == {"content": "Hello"}
        assert json.loads(found[-2].json_chunk)["choices"][0]["finish_reason"] == "stop"
        (seen,) = server.requests
        assert (seen.path, seen.model, seen.connection, seen.ended) == (CHAT, "m", 1, True)


def test_metadata_of_both_kinds_and_a_status() -> None:
    headers = {"x-a": "1", "trailer-x-b": "2", "grpc-status": "14", "grpc-message": "later"}
    with LoopbackServer([Script(tokens=["a"], headers=headers)], part="grpc") as server:

        async def body(channel: Any) -> None:
            call = channel.unary_stream(CHAT)(request(stream=True))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                [message async for message in call]
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert caught.value.details() == "later"
            assert incoming(await call.initial_metadata())["x-a"] == "1"
            assert incoming(await call.trailing_metadata())["x-b"] == "2"

        play(server, body)
        assert server.faults == []


def test_a_client_that_leaves_is_seen() -> None:
    with LoopbackServer([Script(tokens=["a"] * 1000, gap_s=0.01)], part="grpc") as server:

        async def body(channel: Any) -> None:
            call = channel.unary_stream(CHAT)(request(stream=True))
            await call.read()
            call.cancel()
            await asyncio.to_thread(server.wait_for, lambda s: s.requests[0].left)

        play(server, body)


def test_connections_are_counted_and_cut() -> None:
    with LoopbackServer([hello()], part="grpc") as server:

        async def body(channel: Any) -> None:
            await chunks(channel)
            assert (server.connections, server.open_connections) == (1, 1)
            server.disconnect()
            await asyncio.to_thread(server.wait_for, lambda s: s.open_connections == 0)

        play(server, body)
        play(server, chunks)
        assert server.connections == 2


def test_a_bad_request_and_an_unknown_method() -> None:
    with LoopbackServer([hello()], part="grpc") as server:

        async def body(channel: Any) -> None:
            call = channel.unary_stream(CHAT)(openai_json.OpenAIRequest(json_body=b"{}").SerializeToString())
            (first, last) = [openai_json.OpenAIStreamChunk.FromString(message) async for message in call]
            assert json.loads(first.json_chunk)["error"]["code"] == 400
            assert last.finished
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/no.Such/Method")(b"")
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED

        play(server, body)


def test_text_is_told_as_if_it_had_been_asked_in_openais_json() -> None:
    with LoopbackServer(part="grpc") as server:

        async def body(channel: Any) -> str:
            asked = vllm.GenerateRequest(model="m", text="one two").SerializeToString()
            answer = vllm.GenerateResponse.FromString(await channel.unary_unary("/vllm.Inference/Generate")(asked))
            text: str = answer.outputs[0].text
            return text

        assert play(server, body) == "You said: one two"
        assert server.requests[0].body["prompt"] == "one two"
