"""LiteLLM's proxy with our provider in it, in front of the loopback server."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

import spanwire
from spanwire.errors import BadRequest, RateLimited, ServerError
from spanwire.testing import LoopbackServer, Script, ScriptedTool
from tests.peers.processes import ROOT, answers, free_port, python_peer, running
from tests.support import MESSAGES, NEVER, read, run, wait_for

pytestmark = [pytest.mark.peers, pytest.mark.timeout(60, func_only=True)]

TEXT = "You said: Say hello"


class Proxy(NamedTuple):
    upstream: LoopbackServer
    endpoint: spanwire.Endpoint


@pytest.fixture(scope="module")
def _running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    ours = (ROOT, ROOT / "plugins/spanwire-sse", ROOT / "integrations/litellm-spanwire")
    python = python_peer("litellm-spanwire", "litellm[proxy]==1.108.7", *(f"--editable={folder}" for folder in ours))
    folder = tmp_path_factory.mktemp("litellm-spanwire")
    port, key = free_port(), f"sk-{secrets.token_hex(16)}"
    with LoopbackServer() as upstream:
        params = {"model": "spanwire/org/m", "api_base": upstream.url, "api_key": "sk-upstream"}
        config = {
            "litellm_settings": {
                "custom_provider_map": [{"provider": "spanwire", "custom_handler": "litellm_spanwire.handler"}]
            },
            "model_list": [
                {"model_name": "m", "litellm_params": {**params, "spanwire": {"limits": {"max_concurrent": 8}}}},
                {"model_name": "e", "litellm_params": {**params, "model": "spanwire/e"}},
            ],
            "router_settings": {"disable_cooldowns": True, "num_retries": 0},
        }
        (folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
        with running(
            "litellm-spanwire",
            [
                *(str(python), str(python.with_name("litellm"))),
                *f"--config config.yaml --host 127.0.0.1 --port {port}".split(),
            ],
            ready=lambda: answers(port, "/health/liveliness"),
            limit_s=180,  # it imports for half a minute on a busy machine
            cwd=folder,
            LITELLM_LOCAL_MODEL_COST_MAP="True",  # else it asks the network
            LITELLM_MASTER_KEY=key,
        ):
            yield Proxy(upstream, spanwire.Endpoint(f"http://127.0.0.1:{port}/v1", key, proxy=None, retries=NEVER))


@pytest.fixture
def proxy(_running: Proxy) -> Proxy:
    _running.upstream.clear()
    return _running


def call(**more: Any) -> spanwire.Call:
    return spanwire.Call.chat("m", MESSAGES, **more)


@pytest.mark.parametrize("streamed", [False, True])
def test_an_answer(proxy: Proxy, streamed: bool) -> None:
    async def body() -> spanwire.Reply:
        async with spanwire.ConnectionManager() as manager:
            if not streamed:
                return await manager.complete(proxy.endpoint, call(temperature=0, user="u"))
            async with manager.stream(proxy.endpoint, call(temperature=0, user="u")) as stream:
                await read(stream)
            return stream.reply

    reply = run(body)
    assert (reply.text, reply.finish_reason) == (TEXT, "stop")
    assert reply.usage is not None
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (2, 4)  # as the server counted
    request = proxy.upstream.requests[-1]
    assert (request.body["model"], request.body["temperature"]) == ("org/m", 0)
    assert request.headers["authorization"] == "Bearer sk-upstream"
    assert "spanwire" not in request.body


def test_tool_calls(proxy: Proxy) -> None:
    tools = [ScriptedTool("f", ['{"a"', ":1}"], id="t1"), ScriptedTool("g", '{"b":2}', id="t2")]
    proxy.upstream.script(Script(tool_calls=tools), times=1)
    with spanwire.SyncConnectionManager() as manager:
        with manager.stream(proxy.endpoint, call()) as stream:
            list(stream)
    found = [(tool.id, tool.name, tool.arguments) for tool in stream.reply.tool_calls]
    assert found == [("t1", "f", '{"a":1}'), ("t2", "g", '{"b":2}')]


def test_embeddings(proxy: Proxy) -> None:
    with spanwire.SyncConnectionManager() as manager:
        made = manager.embed(proxy.endpoint, spanwire.Call.embeddings("e", ["a", "b"]))
    assert len(made.vectors) == 2


@pytest.mark.parametrize("streamed", [False, True])
def test_too_many_requests(proxy: Proxy, streamed: bool) -> None:
    proxy.upstream.script(Script(status=429, headers={"retry-after": "7"}), times=1)

    async def body() -> None:
        async with spanwire.ConnectionManager() as manager:
            if not streamed:
                await manager.complete(proxy.endpoint, call())
                return
            async with manager.stream(proxy.endpoint, call()) as stream:
                await read(stream)

    with pytest.raises(RateLimited) as caught:
        run(body)
    assert caught.value.status == 429
    assert "as scripted" in str(caught.value)
    assert "sk-upstream" not in str(caught.value)


def test_an_answer_that_breaks_off(proxy: Proxy) -> None:
    proxy.upstream.script(Script.say("one two three", drop_after=3), times=1)
    with spanwire.SyncConnectionManager() as manager:
        with pytest.raises(ServerError) as caught:
            with manager.stream(proxy.endpoint, call()) as stream:
                list(stream)
    assert caught.value.reply is not None
    assert caught.value.reply.text == "one two"


def test_a_client_that_goes_away(proxy: Proxy) -> None:
    """The server behind the proxy hears of it."""
    proxy.upstream.script(Script.say("one two three", hang_after=2), times=1)

    async def body() -> None:
        async with spanwire.ConnectionManager() as manager:
            async with manager.stream(proxy.endpoint, call()) as stream:
                async for chunk in stream:
                    if chunk.text:
                        break
        await wait_for(proxy.upstream, lambda server: server.requests[-1].left)

    run(body)


def test_a_client_that_wants_to_choose_the_socket(proxy: Proxy) -> None:
    wanted: Any = {"uds": "/var/run/docker.sock"}
    with spanwire.SyncConnectionManager() as manager:
        with pytest.raises(BadRequest, match="not by its clients"):
            manager.complete(proxy.endpoint, call(spanwire=wanted))
        with pytest.raises(BadRequest, match="not by its clients"):
            manager.embed(proxy.endpoint, spanwire.Call.embeddings("e", ["a"], spanwire=wanted))
    assert proxy.upstream.requests == []


def test_calls_share_a_connection(proxy: Proxy) -> None:
    before = proxy.upstream.connections
    with spanwire.SyncConnectionManager() as manager:
        for _ in range(10):
            with manager.stream(proxy.endpoint, call()) as stream:
                assert "".join(chunk.text for chunk in stream) == TEXT
    assert len(proxy.upstream.requests) == 10
    assert proxy.upstream.connections - before <= 1
