"""Jobs of every dialect from submit to reply: the manager, the job server, and a receiver over the same store."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from spanwire_webhook.dialects import dialects
from spanwire_webhook.embedded import EmbeddedReceiver
from spanwire_webhook.loopback import SECRET, WebhookPart
from spanwire_webhook.loopback_keys import KEYS_PATH
from spanwire_webhook.loopback_routes import SHAPES
from spanwire_webhook.receiver import Receiver
from spanwire_webhook.settings import ReceiverSettings

import spanwire
from spanwire import errors
from spanwire.calls import BatchReply
from spanwire.jobs.stores import open_store
from spanwire.testing import LoopbackServer, Script
from tests.core.telemetry.heard import Heard

CODECS = {dialect.name: dialect.codec for dialect in dialects()}
NAMES = sorted(SHAPES.keys() & CODECS.keys())
POLLED = [name for name in NAMES if CODECS[name].status_has_output]
#: Their webhooks are thin: the result is fetched.
THIN = {"openai", "gemini"}
CALL = spanwire.Call.chat("fal-ai/my-model", [{"role": "user", "content": "Say hello"}])
TOKEN = "a token of at least sixteen bytes"


class Yard:
    """A store, and a receiver of its own over it: as if it were another process."""

    def __init__(self, url: str, public_url: str) -> None:
        self.store = url
        self.public_url = public_url

    def endpoint(self, server: LoopbackServer, name: str, **options: Any) -> spanwire.Endpoint:
        given = {"store": self.store, "public_url": self.public_url, **options}
        given = {name: value for name, value in given.items() if value is not None}
        return server.endpoint(transport="webhook", dialect=name, options=given)


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    url = f"sqlite:///{tmp_path}/jobs.db"
    store = open_store(url)
    secrets: dict[str, tuple[str, ...]] = {**dict.fromkeys(NAMES, (SECRET,)), "cog": (TOKEN,)}
    with LoopbackServer(part=WebhookPart()) as keys:
        urls = dict.fromkeys(("fal", "gemini"), f"{keys.origin}{KEYS_PATH}")
        settings = ReceiverSettings(secrets=secrets, keys_urls=urls)
        with EmbeddedReceiver(Receiver(store, CODECS, settings)) as served:
            yield Yard(url, served.url)
    store.close()


@pytest.mark.parametrize("name", NAMES)
def test_by_webhook(name: str, yard: Yard) -> None:
    part = WebhookPart(webhook_url=f"{yard.public_url}/openai", auth_token=TOKEN)

    async def main() -> None:
        async with spanwire.ConnectionManager() as manager:
            endpoint = yard.endpoint(server, name, poll_after_s=30.0)
            job = await manager.submit(endpoint, CALL, group="g")
            reply = await asyncio.wait_for(job.result(), 20)
            assert isinstance(reply, spanwire.Reply)
            assert reply.text == "Hello there"
            assert job.row is not None
            assert job.row.resolved_by == ("poll" if name in THIN else "webhook")
            (done,) = part.jobs
            assert done.started_s is not None
            assert done.finished_s is not None
            if name in {"generic", "replicate", "runpod"}:
                segments = job.timeline.to_dict()["segments"]
                assert segments["queue"]["duration_s"] == pytest.approx(done.started_s - done.accepted_s, abs=2e-3)
                assert segments["model"]["duration_s"] == pytest.approx(done.finished_s - done.started_s, abs=2e-3)
                assert segments["model"]["source"] == "reported"
            if name == "cog":  # it says when it begins, and not since when it waited
                segments = job.timeline.to_dict()["segments"]
                assert segments["queue"]["source"] == "estimated"
                assert 0 < segments["queue"]["duration_s"] < job.timeline.total_s
                assert sum(one["duration_s"] for one in segments.values()) == pytest.approx(job.timeline.total_s)

    with LoopbackServer([Script.say("Hello there", queue_s=0.05, prefill_s=0.05)], part=part) as server:
        asyncio.run(main())
        assert [delivery.status for delivery in part.deliveries if delivery.kind == "end"] == [
            200 if name == "runpod" else 204
        ]
        assert not server.faults


@pytest.mark.parametrize("name", POLLED)
def test_by_polling(name: str, yard: Yard) -> None:
    async def main() -> None:
        async with spanwire.ConnectionManager() as manager:
            endpoint = yard.endpoint(server, name, public_url=None, poll_after_s=0.1)
            job = await manager.submit(endpoint, CALL)
            reply = await asyncio.wait_for(job.result(), 20)
            assert isinstance(reply, spanwire.Reply)
            assert reply.text == "Hello there"

    part = WebhookPart()
    with LoopbackServer([Script.say("Hello there", queue_s=0.05)], part=part) as server:
        asyncio.run(main())
        assert part.deliveries == []


@pytest.mark.parametrize("name", sorted({*NAMES} - {*POLLED}))
def test_without_a_public_url_it_is_refused_where_the_status_has_no_output(name: str, yard: Yard) -> None:
    async def main() -> None:
        async with spanwire.ConnectionManager() as manager:
            with pytest.raises(errors.ConfigurationError, match="public_url"):
                await manager.submit(yard.endpoint(server, name, public_url=None), CALL)

    with LoopbackServer(part=(part := WebhookPart())) as server:
        asyncio.run(main())
        assert part.jobs == []


@pytest.mark.parametrize("name", NAMES)
def test_a_failure_is_the_servers_error(name: str, yard: Yard) -> None:
    async def main() -> None:
        async with spanwire.ConnectionManager() as manager:
            job = await manager.submit(yard.endpoint(server, name), CALL)
            with pytest.raises(errors.ServerError, match="the script says that it fails"):
                await asyncio.wait_for(job.result(), 20)

    part = WebhookPart(webhook_url=f"{yard.public_url}/openai", auth_token=TOKEN)
    with LoopbackServer([Script(finish_reason="error")], part=part) as server:
        asyncio.run(main())


def test_geminis_static_webhooks_find_their_job_by_its_id(yard: Yard) -> None:
    part = WebhookPart(webhook_url=f"{yard.public_url}/gemini")

    async def main() -> None:
        async with spanwire.ConnectionManager() as manager:
            endpoint = yard.endpoint(server, "gemini", poll_after_s=30.0, webhooks="static")
            job = await manager.submit(endpoint, CALL)
            reply = await asyncio.wait_for(job.result(), 20)
            assert isinstance(reply, spanwire.Reply)
            assert reply.text == "Hello"

    with LoopbackServer([Script.say("Hello", prefill_s=0.05)], part=part) as server:
        asyncio.run(main())
        assert [delivery.status for delivery in part.deliveries] == [204]
        assert "webhook_config" not in part.jobs[0].call


@pytest.mark.parametrize("by", ["webhook", "poll"])
@pytest.mark.parametrize("operation", ["chat", "embeddings"])
def test_a_batch_of_geminis(operation: str, by: str, yard: Yard) -> None:
    calls = {
        f"name/{number}": spanwire.Call.chat("g", [{"role": "user", "content": str(number)}])
        if operation == "chat"
        else spanwire.Call.embeddings("g", [f"{number} a", f"{number} b"])
        for number in range(3)
    }

    async def main() -> None:
        async with spanwire.ConnectionManager() as manager:
            options = {"poll_after_s": 30.0} if by == "webhook" else {"poll_after_s": 0.1, "public_url": None}
            job = await manager.submit(yard.endpoint(server, "gemini", **options), spanwire.Call.batch(calls))
            batch = await asyncio.wait_for(job.result(), 20)
            assert isinstance(batch, BatchReply)
            assert batch.items.keys() == calls.keys()
            for item in batch.items.values():
                if isinstance(item, spanwire.Reply):
                    assert (item.text, item.finish_reason) == ("Hello", "stop")
                else:
                    assert isinstance(item, spanwire.Embeddings)
                    assert len(item.vectors) == 2

    part = WebhookPart()
    with LoopbackServer([Script.say("Hello", prefill_s=0.05)], part=part) as server:
        asyncio.run(main())
        assert [delivery.status for delivery in part.deliveries] == ([204] if by == "webhook" else [])


@pytest.mark.parametrize("thin", [False, True])
def test_vectors_and_a_payload_that_fal_could_not_send(thin: bool, yard: Yard) -> None:
    part = WebhookPart(thin=thin)

    async def main() -> None:
        async with spanwire.ConnectionManager() as manager:
            for name in ("fal", "gemini"):
                endpoint = yard.endpoint(server, name, poll_after_s=30.0)
                call = spanwire.Call.embeddings("fal-ai/e", ["a", "b", "c"], dimensions=4)
                job = await manager.submit(endpoint, call)
                found = await asyncio.wait_for(job.result(), 20)
                assert isinstance(found, spanwire.Embeddings)
                assert [len(vector) for vector in found.vectors] == [4, 4, 4]
                assert len({tuple(vector) for vector in found.vectors}) == 3

    with LoopbackServer(part=part) as server:
        asyncio.run(main())
        assert not server.faults


@pytest.mark.parametrize("name", ["fal", "gemini", "cog"])
def test_a_wrong_key_or_token_is_refused(name: str, yard: Yard) -> None:
    """And where the status can be asked for, the job ends by that."""
    part = WebhookPart(auth_token=TOKEN, wrong=1.0)

    async def main() -> None:
        async with spanwire.ConnectionManager() as manager:
            job = await manager.submit(yard.endpoint(server, name, poll_after_s=0.3), CALL)
            if CODECS[name].polls:
                await asyncio.wait_for(job.result(), 20)
                assert job.row is not None
                assert job.row.resolved_by == "poll"
            await asyncio.to_thread(server.wait_for, lambda _: bool(part.deliveries))

    with LoopbackServer([Script.say("Hello")], part=part) as server:
        asyncio.run(main())
        assert {delivery.status for delivery in part.deliveries} == {401}


def test_a_receiver_in_the_process_counts_by_the_managers_telemetry(tmp_path: Path) -> None:
    heard = Heard()
    options = {"store": f"sqlite:///{tmp_path}/jobs.db", "receiver": "127.0.0.1:0"}
    options["receiver_options"] = {"secrets": {"generic": (SECRET,)}}  # type: ignore[assignment]

    async def main() -> None:
        async with spanwire.ConnectionManager(telemetry=heard.telemetry()) as manager:
            endpoint = server.endpoint(transport="webhook", options={**options, "poll_after_s": 30.0})
            await asyncio.wait_for((await manager.submit(endpoint, CALL)).result(), 20)
            await asyncio.to_thread(server.wait_for, lambda _: part.counts["open"] == 0)

    part = WebhookPart(duplicate=1.0, start_events=False)
    with LoopbackServer([Script.say("Hello")], part=part) as server:
        asyncio.run(main())
    points = heard.metrics()["spanwire.job.webhooks"]
    assert {point.attributes["spanwire.job.dialect"] for point in points} == {"generic"}
    found = {point.attributes["spanwire.job.event"]: point.value for point in points}
    assert found == {"received": 2, "stored": 1, "duplicate": 1}


def test_a_job_that_is_taken_up_is_received_too(tmp_path: Path, yard: Yard) -> None:
    """Its webhook comes to the receiver of the endpoint, though nothing is submitted in this process."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = {
        "public_url": None,
        "receiver": f"127.0.0.1:{port}",
        "receiver_options": {"secrets": {"generic": (SECRET,)}},
        "poll_after_s": 30.0,
    }

    async def submit() -> str:
        async with spanwire.ConnectionManager() as manager:
            return (await manager.submit(yard.endpoint(server, "generic", **options), CALL)).id

    async def take_up(id: str) -> None:
        async with spanwire.ConnectionManager() as manager:
            job = manager.jobs.attach(id, endpoint=yard.endpoint(server, "generic", **options))
            reply = await asyncio.wait_for(job.result(), 20)
            assert isinstance(reply, spanwire.Reply)
            assert job.row is not None
            assert (reply.text, job.row.resolved_by) == ("Hi", "webhook")

    with LoopbackServer([Script.say("Hi", prefill_s=0.2)], part=WebhookPart()) as server:
        asyncio.run(take_up(asyncio.run(submit())))


def test_everything_that_goes_wrong_at_once(yard: Yard) -> None:
    """Each job is resolved once, by its own result, whatever befalls its submit and its webhooks."""
    count = 150
    part = WebhookPart(
        duplicate=0.2, renumber=0.1, lose=0.2, reorder=0.2, early=0.1, swallow=0.1, mute=0.1, blank=0.1, wrong=0.05
    )

    async def main() -> dict[str, str]:
        found = {}
        async with spanwire.ConnectionManager() as manager:
            endpoint = yard.endpoint(server, "generic", poll_after_s=0.3, grace_s=0.2, poll_share=1.0)
            calls = [spanwire.Call.chat("m", [{"role": "user", "content": f"job {number}"}]) for number in range(count)]
            jobs = await asyncio.gather(*(manager.submit(endpoint, call, group="g") for call in calls))
            for number, job in enumerate(jobs):
                reply = await asyncio.wait_for(job.result(), 30)
                assert isinstance(reply, spanwire.Reply)
                assert reply.text == f"You said: job {number}"
                found[job.id] = reply.text
            ended = [job.id async for job in manager.jobs.ended("g", endpoint=endpoint)]
            assert sorted(ended) == sorted(found)
        return found

    with LoopbackServer(part=part) as server:
        assert len(asyncio.run(main())) == count
        befallen = {fault for job in part.jobs for fault in job.faults}
        assert {"duplicate", "lose", "reorder", "swallow", "mute", "blank"} <= befallen
