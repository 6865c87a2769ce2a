"""LiteLLM's router over our provider: fallbacks, attempts, cooldowns."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import litellm
import pytest

from spanwire.testing import LoopbackServer, Script
from tests.integrations.litellm.support import run
from tests.support import MESSAGES

TEXT = "You said: Say hello"


@pytest.fixture
def other() -> Iterator[LoopbackServer]:
    with LoopbackServer() as running:
        yield running
    assert running.faults == []


def deployment(server: LoopbackServer, group: str, id: str, **settings: Any) -> dict[str, Any]:
    given = {"model": "spanwire/m", "api_base": server.url, "api_key": "k", "spanwire": {"proxy": None, **settings}}
    return {"model_name": group, "litellm_params": given, "model_info": {"id": id}}


def router(*servers: LoopbackServer, **more: Any) -> litellm.Router:
    """A group of models for each server, with the next one as its fallback."""
    groups = [f"group-{number}" for number in range(len(servers))]
    fallbacks = [{one: [next_]} for one, next_ in pairwise(groups)]
    models = [deployment(server, group, group) for group, server in zip(groups, servers, strict=True)]
    return litellm.Router(models, fallbacks=fallbacks, **{"num_retries": 0, **more})


async def ask(asked: litellm.Router, *, streamed: bool) -> tuple[str, Any]:
    made = await asked.acompletion("group-0", MESSAGES, stream=streamed)
    if not streamed:
        return made.choices[0].message.content, made
    return "".join([chunk.choices[0].delta.content or "" async for chunk in made]), made


each_kind = pytest.mark.parametrize("streamed", [False, True])


@each_kind
def test_a_call(server: LoopbackServer, streamed: bool) -> None:
    async def body() -> None:
        text, made = await ask(router(server), streamed=streamed)
        assert text == TEXT
        assert made._hidden_params["model_id"] == "group-0"

    run(body)
    assert "spanwire" not in server.requests[0].body


@each_kind
@pytest.mark.parametrize("status", [429, 500, 503])
def test_falls_back_before_the_first_content(
    server: LoopbackServer, other: LoopbackServer, streamed: bool, status: int
) -> None:
    server.script(Script(status=status))
    text, _ = run(lambda: ask(router(server, other), streamed=streamed))
    assert text == TEXT
    assert (len(server.requests), len(other.requests)) == (1, 1)


def test_falls_back_synchronously(server: LoopbackServer, other: LoopbackServer) -> None:
    server.script(Script(status=503))
    made = router(server, other).completion("group-0", MESSAGES, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in made) == TEXT


def test_falls_back_from_a_server_that_is_away(other: LoopbackServer) -> None:
    with LoopbackServer() as gone:
        asked = router(gone, other)
    for streamed in (False, True):
        assert run(lambda: ask(asked, streamed=streamed))[0] == TEXT  # noqa: B023 - called at once


@each_kind
def test_falls_back_from_a_full_local_queue(server: LoopbackServer, other: LoopbackServer, streamed: bool) -> None:
    """A limit of `spanwire` is told as 429, so that another deployment takes the call."""
    server.script(Script.say("one two", hang_after=2))
    limited = deployment(server, "group-0", "a", limits={"max_concurrent": 1, "max_queue": 0})
    models = [limited, deployment(other, "group-1", "b")]

    async def body() -> None:
        asked = litellm.Router(models, fallbacks=[{"group-0": ["group-1"]}], num_retries=0)
        held = await asked.acompletion("group-0", MESSAGES, stream=True)
        async for _ in held:
            break
        assert (await ask(asked, streamed=streamed))[0] == TEXT
        await held.aclose()

    run(body)
    assert (len(server.requests), len(other.requests)) == (1, 1)


def test_what_happens_after_content(server: LoopbackServer, other: LoopbackServer) -> None:
    """LiteLLM decides, as for every provider: by default the stream fails with what the server did, and no other
    deployment is asked to go on."""
    server.script(Script.say("one two three", drop_after=3))
    pieces: list[str] = []

    async def body() -> None:
        made = await router(server, other).acompletion("group-0", MESSAGES, stream=True)
        with pytest.raises(litellm.APIConnectionError):
            async for chunk in made:
                pieces.append(chunk.choices[0].delta.content or "")  # noqa: PERF401 - what came before the error

    run(body)
    assert "".join(pieces) == "one two"
    assert (len(server.requests), len(other.requests)) == (1, 0)


@each_kind
def test_num_retries_are_attempts_of_litellms(server: LoopbackServer, streamed: bool) -> None:
    server.script(Script(status=500), times=2)
    asked = router(server, num_retries=2, disable_cooldowns=True)
    assert run(lambda: ask(asked, streamed=streamed))[0] == TEXT
    assert len(server.requests) == 3


@each_kind
def test_num_retries_without_a_router(server: LoopbackServer, streamed: bool) -> None:
    """A synchronous stream fails where it was made, which is where LiteLLM tries again."""
    pytest.importorskip("tenacity", reason="LiteLLM repeats calls with it, and does not require it")
    server.script(Script(status=500), times=2)
    made = litellm.completion("spanwire/m", MESSAGES, api_base=server.url, num_retries=2, stream=streamed)
    text = "".join(c.choices[0].delta.content or "" for c in made) if streamed else made.choices[0].message.content
    assert text == TEXT
    assert len(server.requests) == 3


@each_kind
def test_cools_down_for_as_long_as_the_server_asks(
    server: LoopbackServer, other: LoopbackServer, streamed: bool
) -> None:
    server.script(Script(status=429, headers={"retry-after": "30"}))

    async def body() -> Any:
        group = [deployment(server, "group-0", "a"), deployment(other, "group-0", "b")]
        asked = litellm.Router(group, num_retries=3)
        while not server.requests:  # which of the two it asks first is chance
            assert (await ask(asked, streamed=streamed))[0] == TEXT
        for _ in range(10):
            assert (await ask(asked, streamed=streamed))[0] == TEXT
        return await asked.cooldown_cache.async_get_active_cooldowns(["a", "b"], None)

    cooled = run(body)
    assert [(id_, found["cooldown_time"], found["status_code"]) for id_, found in cooled] == [("a", 30, "429")]
    assert len(server.requests) == 1
