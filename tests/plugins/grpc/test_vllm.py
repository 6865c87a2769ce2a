from __future__ import annotations

from typing import Any

import pytest
from spanwire_grpc.vllm import MAX_NEW_TOKENS

import spanwire
from spanwire import errors
from spanwire.testing import LoopbackServer, Script
from tests.support import AT_ONCE, hello, run

HELLO = "Hello from the loopback server."


def ask(server: LoopbackServer, *, streamed: bool = True, **parameters: Any) -> tuple[list[str], spanwire.Reply]:
    async def body() -> tuple[list[str], spanwire.Reply]:
        endpoint = server.endpoint(dialect="vllm", options={"chat_template": "plain"}, retries=AT_ONCE)
        call = spanwire.Call.chat("m", [{"role": "user", "content": "Say hello"}], **parameters)
        async with spanwire.ConnectionManager() as manager:
            if not streamed:
                reply = await manager.complete(endpoint, call)
                return [reply.text], reply
            async with manager.stream(endpoint, call) as stream:
                pieces = [chunk.text async for chunk in stream if chunk.text]
            return pieces, stream.reply

    return run(body)


@pytest.mark.parametrize("streamed", [True, False])
def test_text_a_finish_reason_and_exact_counts(streamed: bool) -> None:
    with LoopbackServer([hello()], part="grpc") as server:
        pieces, reply = ask(server, streamed=streamed)
    assert "".join(pieces) == HELLO
    assert len(pieces) == (5 if streamed else 1)
    assert reply.finish_reason == "stop"
    assert reply.usage == spanwire.Usage(2, 5, 7)
    assert reply.headers["x-spanwire-prompt"] == "rendered; template=plain"


def test_the_servers_default_of_twenty_tokens_is_not_taken() -> None:
    with LoopbackServer([hello()], part="grpc") as server:
        ask(server)
        ask(server, max_tokens=7, temperature=0.0, top_p=0.5, seed=3, stop="x", min_tokens=2)
        first, second = (request.body for request in server.requests)
    assert first["max_new_tokens"] == MAX_NEW_TOKENS
    assert "temperature" not in first
    expected = {"max_new_tokens": 7, "temperature": 0.0, "top_p": 0.5, "seed": 3, "min_new_tokens": 2}
    assert {name: second[name] for name in expected} == expected
    assert second["stop_strings"] == ["x"]


@pytest.mark.parametrize("parameters", [{"logit_bias": {"1": 2}}, {"seed": -1}, {"temperature": "hot"}])
def test_what_the_schema_has_no_place_for_is_refused(parameters: dict[str, Any]) -> None:
    with LoopbackServer([hello()], part="grpc") as server:
        with pytest.raises(errors.ConfigurationError, match="schema"):
            ask(server, **parameters)
        assert server.requests == []


def test_a_length_that_was_reached_and_an_answer_that_was_cut() -> None:
    cut = Script(tokens=["a"], finish_reason=None, done=False)
    with LoopbackServer([Script(tokens=["a"], finish_reason="length"), cut], part="grpc") as server:
        assert ask(server)[1].finish_reason == "length"
        with pytest.raises(errors.Truncated) as caught:
            ask(server)
    assert caught.value.reply is not None
    assert caught.value.reply.text == "a"


def test_a_full_server_is_tried_again() -> None:
    with LoopbackServer([Script(status=503), hello()], part="grpc") as server:
        assert "".join(ask(server)[0]) == HELLO
