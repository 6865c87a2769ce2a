"""Many calls as jobs, over real connections, a real receiver and a real store."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import spanwire
from spanwire.calls import BatchReply, Embeddings, Reply
from spanwire.errors import (
    AuthenticationFailed,
    BadRequest,
    ConfigurationError,
    ConnectionFailed,
    JobError,
    ProtocolError,
    ServerError,
    server_error,
)
from spanwire.hookspecs import hookimpl
from spanwire.jobs import runner
from spanwire.jobs.bulk import BulkResult, drive
from spanwire.jobs.contract import BatchLimits
from spanwire.jobs.sqlite import SQLiteStore
from spanwire.transport import Dialect
from tests.core.jobs.server import Doing, JobServer, serving
from tests.core.jobs.simple import Simple


class Plugin:
    def __init__(self, codec: Simple) -> None:
        self.codec = codec

    @hookimpl
    def register_dialects(self) -> list[Dialect]:
        return [Dialect("webhook", "simple", self.codec, frozenset({"chat", "embeddings"}), default=True)]


class Embedder(JobServer):
    """Gives each text its number as a vector; texts with ``bad`` in them fail their job, ``refuse`` their submit."""

    embedded: Counter[str]
    fail: str = "bad"

    async def submitted(self, asked: dict[str, Any]) -> Any:
        texts = asked["input"].get("input", "")
        texts = [texts] if isinstance(texts, str) else texts
        doing = self.script.pop(0) if self.script else self.default
        if isinstance(doing.ack, int) and doing.ack < 400:
            if "refuse" in texts:
                doing = Doing(ack=422)
            elif self.fail in texts:
                doing = Doing(webhooks=[{"status": "failed", "code": "bad_input", "error": "it is bad"}])
            elif doing.webhooks is None:
                self.embedded.update(texts)
                vectors = [[float(text.partition("t")[2] or -1)] for text in texts]
                doing = Doing(webhooks=[{"status": "done", "output": vectors}])
        self.script.insert(0, doing)
        return await super().submitted(asked)


@contextlib.asynccontextmanager
async def serving_texts(*script: Doing, default: Doing | None = None) -> AsyncIterator[Embedder]:
    async with serving(*script, default=default) as server:
        server.__class__ = Embedder
        assert isinstance(server, Embedder)
        server.embedded = Counter()
        yield server


def manager_of(**more: Any) -> spanwire.ConnectionManager:
    return spanwire.ConnectionManager(plugins=[Plugin(Simple(**more))])


def endpoint_of(server: JobServer, path: Path | str, **options: Any) -> spanwire.Endpoint:
    return spanwire.Endpoint(
        f"http://127.0.0.1:{server.port}",
        transport="webhook",
        dialect="simple",
        retries=spanwire.Retries(max_attempts=1),
        options={"store": f"sqlite:///{path}/jobs.db", "receiver": "127.0.0.1:0", **options},
    )


def texts(count: int) -> list[spanwire.Call]:
    return [spanwire.Call.embeddings("e", f"t{number}") for number in range(count)]


def vectors(results: list[BulkResult]) -> dict[int, Any]:
    return {one.index: one.reply.vectors if isinstance(one.reply, Embeddings) else one.error for one in results}


async def test_each_call_has_its_own_vectors(tmp_path: Path) -> None:
    async with serving_texts() as server, manager_of() as manager:
        bulk = manager.submit_many(endpoint_of(server, tmp_path), texts(50), shard=8)
        results = [result async for result in bulk]
        assert vectors(results) == {number: [[float(number)]] for number in range(50)}
        assert len(server.submits) == 7
        assert bulk.counts == type(bulk.counts)(total=50, submitted=50, done=50, failed=0, found=0, jobs=7)
        assert len({result.job for result in results}) == 7
        assert await bulk.next() is None


async def test_an_iterator_is_read_as_it_goes(tmp_path: Path) -> None:
    async with serving_texts() as server, manager_of() as manager:
        read = 0

        def calls() -> Iterator[spanwire.Call]:
            nonlocal read
            for call in texts(2000):
                read += 1
                yield call

        bulk = manager.submit_many(endpoint_of(server, tmp_path), calls(), shard=1, window=4)
        assert bulk.counts.total is None
        async with bulk:
            await bulk.next()
            assert read < 2000
            assert len(bulk._drive._running) <= 4
        with pytest.raises(ConfigurationError, match="number 0 is str"):
            await manager.submit_many(endpoint_of(server, tmp_path), ["text"]).wait()  # type: ignore[list-item]


async def test_the_same_calls_again_submit_what_is_missing(tmp_path: Path) -> None:
    async with serving_texts() as server:
        async with manager_of() as manager:
            bulk = manager.submit_many(endpoint_of(server, tmp_path), texts(40), group="g", shard=2, window=3)
            async for result in bulk:
                if result.index > 9:
                    break
            await bulk.aclose()
            begun = len(server.submits)
            assert 0 < begun < 20
        async with manager_of() as manager:
            endpoint = endpoint_of(server, tmp_path)
            bulk = manager.submit_many(endpoint, (call for call in texts(40)), group="g", shard=2)
            results = [result async for result in bulk]
            assert vectors(results) == {number: [[float(number)]] for number in range(40)}
            assert bulk.counts.found == 2 * begun
            assert bulk.counts.jobs == 20 - begun
            assert len(server.submits) == 20
            assert set(server.embedded.values()) == {1}
            assert await manager.submit_many(endpoint, texts(40), group="g", shard=2).wait() == type(bulk.counts)(
                40, 40, 40, 0, 40, 0
            )
            # Another group, or other rules, are other jobs.
            await manager.submit_many(endpoint, texts(40), group="h", shard=2).wait()
            assert set(server.embedded.values()) == {2}


async def test_without_a_group_nothing_is_taken_up(tmp_path: Path) -> None:
    async with serving_texts() as server, manager_of() as manager:
        for _ in range(2):
            await manager.submit_many(endpoint_of(server, tmp_path), texts(3)).wait()
        assert set(server.embedded.values()) == {2}


async def test_two_at_once_make_each_job_once(tmp_path: Path) -> None:
    async with serving_texts() as server, manager_of() as one, manager_of() as two:
        bulks = [
            manager.submit_many(endpoint_of(server, tmp_path), texts(60), group="g", shard=2) for manager in (one, two)
        ]
        counts = await asyncio.gather(*(bulk.wait() for bulk in bulks))
        assert [count.done for count in counts] == [60, 60]
        assert set(server.embedded.values()) == {1}
        assert len(server.embedded) == 60


async def test_a_bad_text_fails_alone(tmp_path: Path) -> None:
    calls = texts(16)
    calls[5] = spanwire.Call.embeddings("e", "bad")
    calls[12] = spanwire.Call.embeddings("e", "refuse")
    async with serving_texts() as server, manager_of() as manager:
        endpoint = endpoint_of(server, tmp_path)
        bulk = manager.submit_many(endpoint, calls, group="g")
        found = vectors([result async for result in bulk])
        bad, refused = found.pop(5), found.pop(12)
        assert isinstance(bad, ServerError)
        assert "it is bad" in str(bad)
        assert isinstance(refused, ServerError)
        assert refused.status == 422
        assert found == {number: [[float(number)]] for number in range(16) if number not in (5, 12)}
        assert (bulk.counts.submitted, bulk.counts.done, bulk.counts.failed) == (16, 14, 2)
        assert set(server.embedded.values()) == {1}
        before = len(server.submits)
        again = manager.submit_many(endpoint, calls, group="g")
        assert (await again.wait()).failed == 2
        assert len(server.submits) == before

        server.fail = "nothing"  # mended
        mended = manager.submit_many(endpoint, calls, group="g", retry_failed=True)
        assert (await mended.wait()).failed == 1
        assert len(server.submits) == before + 2
        assert server.embedded["bad"] == 1
        plain = manager.submit_many(endpoint, calls, group="g")
        assert (await plain.wait()).failed == 1
        assert len(server.submits) == before + 2
        with pytest.raises(ConfigurationError, match="group"):
            manager.submit_many(endpoint, calls, retry_failed=True)


async def test_a_model_that_is_not_there_is_not_asked_for_with_each_text(tmp_path: Path) -> None:
    async with serving_texts(Doing(ack=404)) as server, manager_of() as manager:
        for _ in range(2):  # the second finds the failure in the store
            bulk = manager.submit_many(endpoint_of(server, tmp_path), texts(8), group="g")
            results = sorted([result async for result in bulk], key=lambda result: result.index)
            assert [type(result.error).__name__ for result in results] == ["BadRequest"] * 8
            assert list(map(type, (result.error for result in bulk.stored()))) == [type(results[0].error)] * 8
            assert len(server.submits) == 1


@pytest.mark.parametrize("status", [404, 405])
async def test_where_nothing_takes_jobs_no_half_is_tried(tmp_path: Path, status: int) -> None:
    """It is the address that is wrong, or the model: no text of the hundred."""
    async with serving_texts(default=Doing(ack=status)) as server, manager_of() as manager:
        for _ in range(2):  # and whoever reads the store later comes to the same answer
            bulk = manager.submit_many(endpoint_of(server, tmp_path), texts(16), group="g")
            found = vectors([result async for result in bulk])
            assert {type(error) for error in found.values()} == {BadRequest}
            assert "does this URL take jobs as the dialect 'simple' has them?" in str(found[0])
            assert len(server.submits) == 1
        assert [type(result.error) for result in bulk.stored()] == [BadRequest] * 16


async def test_a_wrong_number_of_vectors_is_an_error_of_its_shard(tmp_path: Path) -> None:
    wrong = Doing(webhooks=[{"status": "done", "output": [[0.0]]}])
    async with serving_texts(wrong) as server, manager_of() as manager:
        bulk = manager.submit_many(endpoint_of(server, tmp_path), texts(6), shard=3, window=1)
        found = vectors([result async for result in bulk])
        assert found.pop(5) == [[5.0]]
        assert all(isinstance(found[number], ProtocolError) for number in range(3))
        assert "shard 0 (calls 0 to 2) has 1 vectors for 3 inputs" in str(found[0])
        assert len(server.submits) == 2


async def test_too_many_requests_are_sent_again_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    later = [Doing(ack=429), Doing(ack=503), Doing(ack=429)]
    async with serving_texts(*later) as server, manager_of() as manager:
        bulk = manager.submit_many(endpoint_of(server, tmp_path), texts(40), group="g", shard=2, window=16)
        monkeypatch.setattr(bulk._drive._window, "pause", lambda now_s, dice: None)  # for no time
        assert (await bulk.wait()).done == 40
        assert set(server.embedded.values()) == {1}
        assert bulk._drive._window.limit < 16
        store = SQLiteStore(tmp_path / "jobs.db")
        assert Counter(row.state for row in store.completed("g")) == {"succeeded": 20}
        store.close()


async def test_a_server_that_refuses_our_key_ends_it_and_nothing_is_lost(tmp_path: Path) -> None:
    async with serving_texts(default=Doing(ack=401)) as server, manager_of() as manager:
        endpoint = endpoint_of(server, tmp_path)
        bulk = manager.submit_many(endpoint, texts(40), group="g", shard=2)
        with pytest.raises(AuthenticationFailed):
            await bulk.wait()
        server.default = Doing()
        assert (await manager.submit_many(endpoint, texts(40), group="g", shard=2).wait()).done == 40
        assert set(server.embedded.values()) == {1}


async def test_a_server_that_is_not_there_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving_texts() as server:
        endpoint = endpoint_of(server, tmp_path)
    async with manager_of() as manager:
        bulk = manager.submit_many(endpoint, texts(3), shard=1)
        pauses = []
        monkeypatch.setattr(bulk._drive._window, "pause", lambda now_s, dice: pauses.append(dice))
        with pytest.raises(ConnectionFailed):
            await bulk.wait()
        assert len(pauses) > 3


async def test_leaving_cancels_what_nobody_can_come_back_to(tmp_path: Path) -> None:
    async with serving_texts(default=Doing(webhooks=[])) as server, manager_of() as manager:
        endpoint = endpoint_of(server, tmp_path)
        async with manager.submit_many(endpoint, texts(3), shard=1) as bulk:
            waiting = asyncio.ensure_future(bulk.next())
            await server.until(lambda server: len(server.submits) == 3)
            await bulk.submitted()
        assert await waiting is None
        assert sorted(server.cancelled) == sorted(server.jobs)
        left = manager.submit_many(endpoint, texts(2), shard=1)
        await left.submitted()
        del left
        gc.collect()
        await server.until(lambda server: len(server.cancelled) == 5)
        async with manager.submit_many(endpoint, texts(2), group="g", shard=1) as bulk:
            assert (await bulk.submitted()).submitted == 2
        assert len(server.cancelled) == 5
        store = SQLiteStore(tmp_path / "jobs.db")
        assert store.open_jobs() == store.open_jobs("g") == 2
        store.close()


async def test_a_wait_that_is_cancelled_loses_nothing(tmp_path: Path) -> None:
    async with serving_texts() as server, manager_of() as manager:
        bulk = manager.submit_many(endpoint_of(server, tmp_path), texts(30), shard=3)
        found = []
        while True:
            taking = asyncio.ensure_future(bulk.next())
            await asyncio.sleep(0)
            taking.cancel()
            (result,) = await asyncio.gather(taking, return_exceptions=True)
            if isinstance(result, asyncio.CancelledError):
                result = await bulk.next()
            assert not isinstance(result, BaseException)
            if result is None:
                break
            found.append(result.index)
        assert sorted(found) == list(range(30))


async def test_closing_the_manager_ends_it(tmp_path: Path) -> None:
    async with serving_texts(default=Doing(webhooks=[])) as server:
        manager = manager_of()
        bulk = manager.submit_many(endpoint_of(server, tmp_path), texts(2), group="g")
        await bulk.submitted()
        await manager.aclose()
        with pytest.raises(ConnectionFailed, match="closed"):
            await bulk.wait()


async def test_a_store_that_is_down_for_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving_texts() as server, manager_of() as manager:
        bulk = manager.submit_many(endpoint_of(server, tmp_path), texts(8), group="g", shard=2)
        add, down = SQLiteStore.add, [JobError("the store is down", retryable=True)] * 3

        def sometimes(self: SQLiteStore, rows: Any) -> None:
            if down:
                raise down.pop()
            add(self, rows)

        monkeypatch.setattr(SQLiteStore, "add", sometimes)
        monkeypatch.setattr(bulk._drive._window, "pause", lambda now_s, dice: None)
        assert (await bulk.wait()).done == 8
        assert set(server.embedded.values()) == {1}


async def test_a_store_that_stays_down_is_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    changed, looks = SQLiteStore.changed, 0

    def down(self: SQLiteStore) -> int:
        nonlocal looks
        looks += 1
        if looks <= 20:
            raise JobError("database or disk is full") from OSError("it is full")
        return changed(self)

    monkeypatch.setattr(SQLiteStore, "changed", down)
    monkeypatch.setattr(runner, "_IDLE_LOOK_S", 0.001)
    async with serving_texts() as server, manager_of() as manager:
        bulk = manager.submit_many(endpoint_of(server, tmp_path), texts(2), group="g")
        assert (await bulk.wait()).done == 2
    assert looks > 20
    told = [record for record in caplog.records if "are not looked at" in record.message]
    assert len(told) == 1
    assert told[0].exc_info


async def test_calls_that_change_while_they_are_read_are_refused(tmp_path: Path) -> None:
    class Changing:
        reads = 0

        def __iter__(self) -> Iterator[spanwire.Call]:
            self.reads += 1
            return iter(texts(3 + self.reads))

    async with serving_texts() as server, manager_of() as manager:
        with pytest.raises(ConfigurationError, match="others when they were read again"):
            await manager.submit_many(endpoint_of(server, tmp_path), Changing(), group="g").wait()


class Edited:
    """Calls that are others once they were read so often: a file that is edited while its jobs run."""

    def __init__(self, reads: int, *words: str, chat: bool = False) -> None:
        self.reads, self.words, self.chat = reads, words, chat

    def __iter__(self) -> Iterator[spanwire.Call]:
        self.reads -= 1
        word = self.words[self.reads < 0]
        for number in range(4):
            text = f"{word} t{number}"
            chat = spanwire.Call.chat("m", [{"role": "user", "content": text}])
            yield chat if self.chat else spanwire.Call.embeddings("e", text)


@pytest.mark.parametrize("reads", [2, 3])
async def test_what_is_stored_of_calls_that_have_changed_is_not_given_as_theirs(tmp_path: Path, reads: int) -> None:
    async with serving_texts() as server, manager_of() as manager:
        bulk = manager.submit_many(endpoint_of(server, tmp_path), Edited(reads, "old", "new"), group="g")
        assert (await bulk.wait()).done == 4
        with pytest.raises(ConfigurationError, match="did the file change"):
            list(bulk.stored())


class Batching(Simple):
    """A batch is one job, whose output has an item for each call."""

    batches = BatchLimits(frozenset({"chat"}), most_calls=4, most_bytes=10_000)

    def fetches(self, *_: Any) -> Any:
        return ()

    def fetched(self, *_: Any) -> Any: ...

    def replies(self, body: bytes) -> BatchReply:
        items = msgspec.json.decode(body)["output"]
        return BatchReply(
            {name: Reply(text=text) if text != "no" else ServerError("no") for name, text in items.items()}
        )

    def failure(self, row: Any) -> ServerError | None:
        return server_error(row.message, code=row.code, status=429 if row.code == "queue_full" else None)


async def test_batches_first_and_their_calls_fail_alone(tmp_path: Path) -> None:
    calls = [spanwire.Call.chat("m", [{"role": "user", "content": str(number)}]) for number in range(6)]
    outputs = [{"0": "a", "1": "no", "2": "c", "3": "d"}, {"4": "e", "5": "f"}, {"1": "mended"}]
    script = [Doing(webhooks=[{"status": "done", "output": output}]) for output in outputs]
    async with serving(*script) as server, spanwire.ConnectionManager(plugins=[Plugin(Batching())]) as manager:
        endpoint = endpoint_of(server, tmp_path)

        async def run(**more: Any) -> dict[int, str]:
            bulk = manager.submit_many(endpoint, calls, group="g", window=1, **more)
            return {
                one.index: one.reply.text if isinstance(one.reply, Reply) else type(one.error).__name__
                async for one in bulk
            }

        # The calls of an open batch are not kept.
        wanted = {0: "a", 1: "ServerError", 2: "c", 3: "d", 4: "e", 5: "f"}
        assert await run() == wanted
        assert [len(submit["input"]["requests"]) for submit in server.submits] == [4, 2]
        assert await run() == wanted
        assert await run(retry_failed=True) == {**wanted, 1: "mended"}
        assert [row["custom_id"] for row in server.submits[2]["input"]["requests"]] == ["1"]
        assert await run() == {**wanted, 1: "mended"}
        assert len(server.submits) == 3


async def test_calls_that_have_changed_are_not_submitted_as_halves_of_a_batch(tmp_path: Path) -> None:
    calls = Edited(2, "old", "new", chat=True)  # read for the hash, for the batch, and for its halves
    failed = Doing(webhooks=[{"status": "failed", "code": "bad", "error": "one of them is bad"}])
    async with serving(failed) as server, spanwire.ConnectionManager(plugins=[Plugin(Batching())]) as manager:
        with pytest.raises(ConfigurationError, match="others when they were read again"):
            await manager.submit_many(endpoint_of(server, tmp_path), calls, group="g").wait()
        assert len(server.submits) == 1


async def test_a_batch_for_a_full_queue_is_submitted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [spanwire.Call.chat("m", [{"role": "user", "content": str(number)}]) for number in range(8)]
    full = Doing(webhooks=[{"status": "failed", "code": "queue_full", "error": "the queue is full"}])
    outputs = [{"0": "a", "1": "b", "2": "c", "3": "d"}, {"4": "e", "5": "f", "6": "g", "7": "h"}]
    script = [full, *(Doing(webhooks=[{"status": "done", "output": output}]) for output in outputs)]
    async with serving(*script) as server, spanwire.ConnectionManager(plugins=[Plugin(Batching())]) as manager:
        bulk = manager.submit_many(endpoint_of(server, tmp_path), calls, group="g", window=1)
        monkeypatch.setattr(bulk._drive._window, "pause", lambda now_s, dice: None)
        assert (await bulk.wait()).done == 8
        assert [len(submit["input"]["requests"]) for submit in server.submits] == [4, 4, 4]
        again = manager.submit_many(endpoint_of(server, tmp_path), calls, group="g", window=1)
        assert (await again.wait()).done == 8
        assert len(server.submits) == 3


async def test_a_run_that_died_before_a_full_queue_is_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [spanwire.Call.chat("m", [{"role": "user", "content": str(number)}]) for number in range(4)]
    full = Doing(webhooks=[{"status": "failed", "code": "queue_full", "error": "the queue is full"}])
    done = Doing(webhooks=[{"status": "done", "output": dict(zip("0123", "abcd", strict=True))}])
    async with serving(full, done) as server, spanwire.ConnectionManager(plugins=[Plugin(Batching())]) as manager:
        with monkeypatch.context() as dying:
            dying.setattr(drive, "_ROUNDS", 0)  # it never comes to the next round
            assert (await manager.submit_many(endpoint_of(server, tmp_path), calls, group="g").wait()).failed == 4
        assert (await manager.submit_many(endpoint_of(server, tmp_path), calls, group="g").wait()).done == 4
        assert len(server.submits) == 2


def test_without_asyncio(tmp_path: Path) -> None:
    from spanwire.testing import LoopbackServer

    with LoopbackServer(part="webhook") as server, spanwire.SyncConnectionManager() as manager:
        endpoint = server.endpoint(
            transport="webhook", options={"store": f"sqlite:///{tmp_path}/j.db", "poll_after_s": 0.05}
        )
        assert manager.answers_later(endpoint)
        with manager.submit_many(endpoint, texts(4), group="g") as bulk:
            assert sorted(result.index for result in bulk) == [0, 1, 2, 3]
            assert bulk.counts.done == 4
        assert manager.submit_many(endpoint, texts(4), group="g").wait().found == 4


@pytest.mark.parametrize(
    "more", [{"window": 0}, {"shard": True}, {"shard_bytes": 1.5}, {"deadline_s": 0}, {"batch": True}]
)
async def test_bad_arguments_are_refused_at_once(tmp_path: Path, more: dict[str, Any]) -> None:
    async with serving() as server, manager_of() as manager:
        with pytest.raises(ConfigurationError):
            manager.submit_many(endpoint_of(server, tmp_path), texts(1), **more)
        with pytest.raises(ConfigurationError, match="JSONLFile"):
            manager.submit_many(endpoint_of(server, tmp_path), "file.jsonl")  # type: ignore[arg-type]
