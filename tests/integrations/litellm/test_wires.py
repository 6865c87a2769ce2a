"""The same model over other wires: nothing of LiteLLM's knows which one it is."""

from __future__ import annotations

from collections.abc import Iterator

import litellm
import pytest

from spanwire.testing import LoopbackServer, Script, ScriptedTool
from tests.integrations.litellm.support import WAYS, ask, run, to

each_way = pytest.mark.parametrize("way", WAYS)


@pytest.fixture
def server() -> Iterator[LoopbackServer]:
    with LoopbackServer(part="grpc") as running:
        yield running
    assert running.faults == []


@each_way
def test_text_and_usage(way: str, server: LoopbackServer) -> None:
    seen = ask(way, to(server))
    assert seen.error is None
    assert seen.text == "You said: Say hello"
    assert seen.usage == (2, 4, 6)
    assert server.requests[0].headers["authorization"] == "Bearer sk-test"


@each_way
def test_tool_calls(way: str, server: LoopbackServer) -> None:
    server.script(Script(tool_calls=[ScriptedTool("weather", ['{"city"', ':"Oslo"}'], id="call_a")]))
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    seen = ask(way, to(server, tools=[tool]))
    assert seen.tools == [("call_a", "weather", '{"city":"Oslo"}')]
    assert seen.finish_reason == "tool_calls"


@each_way
def test_a_refusal_is_litellms_own(way: str, server: LoopbackServer) -> None:
    server.script(Script(status=429))
    seen = ask(way, to(server, num_retries=0, spanwire={"proxy": None, "retries": {"max_attempts": 1}}))
    error = getattr(seen.error, "original_exception", None) or seen.error  # LiteLLM's router would have gone elsewhere
    assert isinstance(error, litellm.RateLimitError)


def test_embeddings(server: LoopbackServer) -> None:
    async def body() -> list[int]:
        found = await litellm.aembedding("spanwire/e", ["a", "b"], api_base=server.url, spanwire={"proxy": None})
        return [len(row["embedding"]) for row in found.data]

    assert run(body) == [8, 8]
