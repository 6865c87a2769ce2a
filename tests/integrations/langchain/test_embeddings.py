from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_spanwire import SpanwireEmbeddings
from langchain_spanwire.embeddings import batches_of
from spanwire_webhook.loopback import WebhookPart

import spanwire
from spanwire import errors
from spanwire.errors import ConfigurationError
from spanwire.testing import LoopbackServer, Script
from spanwire.testing.loopback import Request
from tests.support import run, serving

both = pytest.mark.parametrize("way", ["async", "sync"])


def embed(way: str, model: SpanwireEmbeddings, texts: list[str]) -> list[list[float]]:
    return run(lambda: model.aembed_documents(texts)) if way == "async" else model.embed_documents(texts)


def on(server: LoopbackServer, **more: Any) -> SpanwireEmbeddings:
    return SpanwireEmbeddings(model="e", endpoint=server.url, **more)


@given(st.lists(st.text(max_size=20), max_size=30), st.integers(1, 7), st.integers(1, 40))
def test_batches(texts: list[str], most: int, most_bytes: int) -> None:
    batches = list(batches_of(texts, most, most_bytes))
    assert [text for batch in batches for text in batch] == texts
    for number, batch in enumerate(batches):
        size = sum(len(text.encode()) for text in batch)
        assert 1 <= len(batch) <= most
        assert size <= most_bytes or len(batch) == 1
        if number + 1 < len(batches):  # no batch is smaller than it has to be
            more = len(batches[number + 1][0].encode())
            assert len(batch) == most or size + more > most_bytes


@both
def test_the_order_of_the_texts_is_kept(way: str) -> None:
    texts = [f"text {number}" for number in range(23)]
    with serving() as server:
        expected = [embed(way, on(server), [text])[0] for text in texts]
        server.clear()
        assert embed(way, on(server, chunk_size=5, max_concurrency=3), texts) == expected
        assert sorted(len(request.body["input"]) for request in server.requests) == [3, 5, 5, 5, 5]
        server.clear()
        assert embed(way, on(server, chunk_bytes=16), texts) == expected
        assert {len(request.body["input"]) for request in server.requests} <= {1, 2}


@both
def test_queries(way: str) -> None:
    with serving() as server:
        model = on(server)
        one = run(lambda: model.aembed_query("q")) if way == "async" else model.embed_query("q")
        assert one == embed(way, model, ["q"])[0]


@both
def test_nothing_to_embed(way: str) -> None:
    with serving() as server:
        assert embed(way, on(server), []) == []
        assert not server.requests


@both
def test_what_is_sent(way: str) -> None:
    with serving() as server:
        model = on(
            server, dimensions=3, encoding_format="base64", model_kwargs={"user": "u"}, extra_body={"truncate": True}
        )
        (vector,) = embed(way, model, ["a"])
        body = server.requests[-1].body
    assert len(vector) == 3
    assert body == {
        "model": "e", "input": ["a"], "dimensions": 3, "encoding_format": "base64", "user": "u", "truncate": True,
    }  # fmt: skip


@both
def test_as_many_at_once_as_allowed(way: str) -> None:
    """The server holds answers until as many have come as may run, and sees no more of them."""
    seen = threading.Condition()
    open_now = most = 0

    def slow(request: Request) -> Script:
        return Script(queue_s=0.02)

    with serving(slow) as server:
        embed(way, on(server, chunk_size=1, max_concurrency=4), [str(number) for number in range(16)])
        spans = [(request.arrived_ns, request.ended_ns or 0) for request in server.requests]
        assert len(spans) == 16
    with seen:
        for arrived, _ in spans:
            open_now = sum(begin <= arrived < end for begin, end in spans)
            most = max(most, open_now)
    assert 2 <= most <= 4


@both
def test_the_first_error_ends_all(way: str) -> None:
    with serving(Script(status=400)) as server:
        with pytest.raises(errors.BadRequest):
            embed(way, on(server, chunk_size=1, max_concurrency=2), ["a"] * 50)
        assert len(server.requests) <= 2


@both
def test_too_few_vectors(way: str) -> None:
    with serving(Script(body=b'{"data": [{"index": 0, "embedding": [1.0]}]}')) as server:
        with pytest.raises(errors.ProtocolError, match="1 vectors for 2 texts"):
            embed(way, on(server), ["a", "b"])


def test_a_text_is_no_list() -> None:
    with pytest.raises(ConfigurationError, match="embed_query"):
        SpanwireEmbeddings(model="e", endpoint="http://127.0.0.1:1/v1").embed_documents("text")  # type: ignore[arg-type]


@both
def test_one_connection_for_one_call_after_another(way: str) -> None:
    with serving() as server:

        async def body() -> None:
            for _ in range(5):
                await on(server).aembed_query("q")

        if way == "async":
            run(body)
        else:
            for _ in range(5):
                on(server).embed_query("q")
        assert server.connections == 1


def test_cancelling_leaves_nothing() -> None:
    async def body() -> None:
        import asyncio

        from tests.support import wait_for

        with serving(Script(hang_after="request")) as server:
            manager = spanwire.ConnectionManager()
            task = asyncio.ensure_future(
                on(server, chunk_size=1, max_concurrency=3, manager=manager).aembed_documents(["a"] * 9)
            )
            await wait_for(server, lambda s: len(s.requests) == 3)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await wait_for(server, lambda s: all(request.left for request in s.requests))
            await manager.aclose()

    run(body)


def by_jobs(way: str, endpoint: spanwire.Endpoint, texts: list[str], **more: Any) -> list[list[float]]:
    def model(manager: Any) -> SpanwireEmbeddings:
        return SpanwireEmbeddings(model="e", endpoint=endpoint, manager=manager, **more)

    async def ask() -> list[list[float]]:
        async with spanwire.ConnectionManager() as manager:
            if len(texts) == 1:
                return [await model(manager).aembed_query(texts[0])]
            return await model(manager).aembed_documents(texts)

    if way == "async":
        return run(ask)
    with spanwire.SyncConnectionManager() as manager:
        return [model(manager).embed_query(texts[0])] if len(texts) == 1 else model(manager).embed_documents(texts)


@both
def test_by_jobs(way: str, tmp_path: Path) -> None:
    part = WebhookPart()
    texts = [f"text {number}" for number in range(23)]

    def scripted(request: Request) -> Script:
        return Script(finish_reason="error" if broken and "text 22" in request.body["input"] else "stop")

    broken = True
    with LoopbackServer(default=scripted, part=part) as server:
        options = {**part.endpoint_options, "store": f"sqlite:///{tmp_path}/jobs.db"}
        endpoint = server.endpoint(transport="webhook", options=options)
        with pytest.raises(errors.ServerError, match="the script says"):
            by_jobs(way, endpoint, texts, chunk_size=5, group="texts")
        broken = False
        assert len(by_jobs(way, endpoint, texts, chunk_size=5, group="texts")) == 23
        embedded = [text for job in part.jobs if job.state == "succeeded" for text in job.call["input"]]
        assert sorted(embedded) == sorted(texts)  # each once, the one that had failed too
        found = by_jobs(way, endpoint, texts[:22], chunk_size=5, group="others")
        assert len(found) == 22
        assert sorted(len(job.call["input"]) for job in part.jobs[-5:]) == [2, 5, 5, 5, 5]
        count = len(part.jobs)
        assert by_jobs(way, endpoint, texts[:22], chunk_size=5, group="others") == found
        assert len(part.jobs) == count
        assert by_jobs(way, endpoint, texts[:22]) == found
        assert by_jobs(way, endpoint, ["text 0"], group="others") == found[:1]
        assert len(part.jobs) == count + 2
