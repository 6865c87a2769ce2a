"""ChatSpanwire and SpanwireEmbeddings on an endpoint of jobs: the same calls, answered later."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_spanwire import ChatSpanwire, SpanwireEmbeddings

import spanwire
from spanwire.errors import ServerError
from spanwire.testing import LoopbackServer, Script, ScriptedTool


@pytest.fixture
def server() -> Iterator[LoopbackServer]:
    with LoopbackServer(part="webhook") as running:
        yield running
    spanwire.default_sync_manager().close()  # with its stores, which are watched, and receivers
    assert running.faults == []


def endpoint(server: LoopbackServer, path: Path) -> spanwire.Endpoint:
    options = {"store": f"sqlite:///{path}/jobs.db", "receiver": "127.0.0.1:0", "poll_after_s": 0.1}
    return server.endpoint(
        transport="webhook", dialect="generic", options={**options, "receiver_options": {"unsigned": {"generic"}}}
    )


def test_the_answer_comes_later(server: LoopbackServer, tmp_path: Path) -> None:
    model = ChatSpanwire(model="m", endpoint=endpoint(server, tmp_path))
    answer = model.invoke("Say hello")
    assert answer.text == "You said: Say hello"
    assert answer.response_metadata["spanwire"]["outcome"] == "completed"
    assert "".join(chunk.text for chunk in model.stream("Say hello")) == "You said: Say hello"

    async def both() -> tuple[str, str]:
        whole = await model.ainvoke("Say hello")
        return whole.text, "".join([chunk.text async for chunk in model.astream("Say hello")])

    assert asyncio.run(both()) == ("You said: Say hello",) * 2


def test_tools_and_batches(server: LoopbackServer, tmp_path: Path) -> None:
    model = ChatSpanwire(model="m", endpoint=endpoint(server, tmp_path))
    server.script(Script(tool_calls=[ScriptedTool("f", '{"a":1}', id="t1")]), times=1)
    (call,) = model.invoke("Say hello").tool_calls
    assert (call["name"], call["args"]) == ("f", {"a": 1})
    answers = model.batch(["a", "b", "c"])
    assert [answer.text for answer in answers] == ["You said: a", "You said: b", "You said: c"]


def test_a_job_that_failed_raises(server: LoopbackServer, tmp_path: Path) -> None:
    errors: list[BaseException] = []

    class Seen(BaseCallbackHandler):
        def on_llm_error(self, error: BaseException, **_: Any) -> None:
            errors.append(error)

    server.script(Script(finish_reason="error"), times=1)
    model = ChatSpanwire(model="m", endpoint=endpoint(server, tmp_path), callbacks=[Seen()])
    with pytest.raises(ServerError):
        model.invoke("Say hello")
    assert len(errors) == 1


def test_vectors(server: LoopbackServer, tmp_path: Path) -> None:
    embeddings = SpanwireEmbeddings(model="e", endpoint=endpoint(server, tmp_path))
    assert len(embeddings.embed_documents(["a", "b"])) == 2
