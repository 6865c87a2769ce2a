"""OpenAI's batches from submit to reply, on the job server; and the job server against OpenAI's own SDK."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from openai.types import Batch, FileObject
from spanwire_webhook.dialects import OpenAIJobs
from spanwire_webhook.embedded import EmbeddedReceiver
from spanwire_webhook.loopback import SECRET, WebhookPart
from spanwire_webhook.receiver import Receiver
from spanwire_webhook.settings import ReceiverSettings

import spanwire
from spanwire import errors
from spanwire.calls import BatchReply
from spanwire.jobs import runner
from spanwire.jobs.contract import JobRow
from spanwire.jobs.stores import open_store
from spanwire.testing import LoopbackServer, Script
from spanwire.testing.loopback import Request

CODECS = {"openai": OpenAIJobs()}
FOREVER = 30.0


def chats(count: int) -> spanwire.Call:
    return spanwire.Call.batch(
        {
            f"call {number}": spanwire.Call.chat("m", [{"role": "user", "content": f"text {number}"}])
            for number in range(count)
        }
    )


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is due is looked for every second: these tests would wait for little else."""
    monkeypatch.setattr(runner, "_DUE_S", 0.05)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/jobs.db"


@pytest.fixture
def hooks(url: str) -> Iterator[str]:
    """The address of a receiver of its own over the store: as if it were another process."""
    store = open_store(url)
    with EmbeddedReceiver(Receiver(store, CODECS, ReceiverSettings(secrets={"openai": (SECRET,)}))) as served:
        yield served.url
    store.close()


def endpoint(server: LoopbackServer, url: str, hooks: str | None = None, **options: Any) -> spanwire.Endpoint:
    given = {"store": url, "poll_after_s": 0.05 if hooks is None else FOREVER, **options}
    if hooks is not None:
        given["public_url"] = hooks
    return server.endpoint(transport="webhook", dialect="openai", options=given, retries=spanwire.Retries(base_s=0.01))


def by_call(**scripts: Script) -> Any:
    """Of the call with that text; the others echo."""

    def answer(request: Request) -> Script:
        if request.path.endswith("/batches"):
            return scripts.get("batch", Script())
        said = request.body["messages"][-1]["content"]
        return scripts.get(said.replace(" ", "_"), Script.say(f"You said: {said}"))

    return answer


async def finished(manager: spanwire.ConnectionManager, where: spanwire.Endpoint, call: spanwire.Call) -> Any:
    job = await manager.submit(where, call)
    reply = await asyncio.wait_for(job.result(), 20)
    assert isinstance(reply, BatchReply)
    return job, reply


# --- to the end ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["webhook", "poll"])
def test_a_batch_comes_back_whole(way: str, url: str, hooks: str) -> None:
    part = WebhookPart(webhook_url=f"{hooks}/openai")

    async def main() -> None:
        async with spanwire.ConnectionManager() as manager:
            job, reply = await finished(manager, endpoint(server, url, hooks if way == "webhook" else None), chats(30))
            assert list(reply.items) == [f"call {number}" for number in range(30)]
            for number, item in enumerate(reply.items.values()):
                assert isinstance(item, spanwire.Reply)
                assert item.text == f"You said: text {number}"
                assert item.usage is not None
                assert item.headers["x-request-id"].startswith("req_")
            assert reply.timeline is not None
            assert job.row.code is None
            assert job.row.due_s - job.row.created_s == pytest.approx(26 * 3600)  # the provider takes a day
            # By another process, from the store alone.
            again = await manager.jobs.attach(job.id, store=url).result()
            assert isinstance(again, BatchReply)
            assert len(again.items) == 30

    with LoopbackServer(default=by_call(batch=Script(queue_s=0.05)), part=part) as server:
        asyncio.run(main())
        (done,) = part.jobs
        assert done.model == "m"
        assert [Batch.model_validate_json(_get(server, f"/batches/{done.id}")).status] == ["completed"]
        assert len(part.files) == 2
        assert not server.faults


def _get(server: LoopbackServer, path: str) -> bytes:
    import urllib.request

    with urllib.request.urlopen(server.endpoint(transport="webhook").url + path) as answer:
        return bytes(answer.read())


def test_embeddings_and_responses(url: str) -> None:
    async def main() -> None:
        async with spanwire.ConnectionManager() as manager:
            calls = {name: spanwire.Call.embeddings("e", [name, "x"], dimensions=5) for name in "abc"}
            plain = spanwire.Call.embeddings("e", ["c", "x"], dimensions=5, encoding_format="float")
            (_, reply), (_, told), (_, responses) = await asyncio.gather(
                finished(manager, endpoint(server, url), spanwire.Call.batch(calls)),
                finished(manager, endpoint(server, url), spanwire.Call.batch({"c": plain})),
                finished(manager, endpoint(server, url, batch_endpoint="responses"), chats(2)),
            )
            assert [len(item.vectors) for item in reply.items.values()] == [2, 2, 2]
            assert reply.items["c"].vectors[0] == pytest.approx(told.items["c"].vectors[0])
            assert len(told.items["c"].vectors[0]) == 5
            assert [item.text for item in responses.items.values()] == ["Hi", "Hi"]

    with LoopbackServer([Script.say("Hi")], part=WebhookPart()) as server:
        asyncio.run(main())


def test_one_calls_failure_is_its_own(url: str) -> None:
    async def main() -> None:
        async with spanwire.ConnectionManager() as manager:
            job, reply = await finished(manager, endpoint(server, url), chats(6))
            items = reply.items
            assert isinstance(items["call 1"], errors.BadRequest)
            assert isinstance(items["call 2"], errors.RateLimited)
            assert isinstance(items["call 3"], errors.ServerError)
            assert items["call 3"].status == 500
            assert isinstance(items["call 4"], errors.JobLost)
            assert all(items[name].endpoint == job.row.endpoint for name in ("call 1", "call 4"))
            assert [items[name].text for name in ("call 0", "call 5")] == ["You said: text 0", "You said: text 5"]
            assert repr(reply) == "BatchReply(6 items, 4 failed)"

    scripts = by_call(
        text_1=Script(status=400),
        text_2=Script(status=429),
        text_3=Script(finish_reason="error"),
        text_4=Script(drop_after="request"),
    )
    with LoopbackServer(default=scripts, part=WebhookPart()) as server:
        asyncio.run(main())


def test_of_a_batch_that_expires_what_was_answered_is_kept(url: str, hooks: str) -> None:
    part = WebhookPart(webhook_url=f"{hooks}/openai", batch_window_s=0.1)

    async def main() -> None:
        async with spanwire.ConnectionManager() as manager:
            job, reply = await finished(manager, endpoint(server, url, hooks), chats(3))
            assert isinstance(reply.items["call 1"], errors.JobExpired)
            assert isinstance(reply.items["call 2"], spanwire.Reply)
            assert (job.row.state, job.row.code) == ("succeeded", "batch_expired")
            alone = spanwire.Call.batch({"x": spanwire.Call.chat("m", [{"role": "user", "content": "text 1"}])})
            nothing = await manager.submit(endpoint(server, url, hooks), alone)
            with pytest.raises(errors.JobExpired):
                await asyncio.wait_for(nothing.result(), 20)

    with LoopbackServer(default=by_call(text_1=Script(hang_after="request")), part=part) as server:
        asyncio.run(main())


def test_a_file_may_be_larger_than_an_event(url: str) -> None:
    async def main() -> None:
        async with spanwire.ConnectionManager() as manager:
            where = endpoint(server, url)
            small = msgspec.structs.replace(where.limits, max_event_bytes=4000)
            where = spanwire.Endpoint(
                where.url, transport="webhook", dialect="openai", options=where.options, limits=small
            )
            _, reply = await finished(manager, where, chats(40))
            assert all(isinstance(item, spanwire.Reply) for item in reply.items.values())

    with LoopbackServer(part=(part := WebhookPart())) as server:
        asyncio.run(main())
        assert max(map(len, part.files.values())) > 4000


def test_a_file_that_is_not_valid_is_told_line_by_line(url: str) -> None:
    async def main() -> None:
        async with spanwire.ConnectionManager() as manager:
            job = await manager.submit(endpoint(server, url), chats(2))
            with pytest.raises(errors.BadRequest, match="the script says that it fails") as caught:
                await asyncio.wait_for(job.result(), 20)
            assert caught.value.code == "server_error"

    with LoopbackServer(default=by_call(batch=Script(finish_reason="error")), part=WebhookPart()) as server:
        asyncio.run(main())


def test_what_a_cancelled_batch_had_answered_is_there(url: str) -> None:
    part = WebhookPart()

    async def main() -> None:
        async with spanwire.ConnectionManager() as manager:
            job = await manager.submit(endpoint(server, url, poll_after_s=FOREVER), chats(3))
            while part.jobs[0].state != "running":
                await asyncio.sleep(0.01)
            assert await job.cancel()
            with pytest.raises(errors.JobCancelled):
                await job
            assert part.jobs[0].state == "cancelled"
            late = await job.late()
            assert isinstance(late, BatchReply)
            assert sorted(late.items) == ["call 0", "call 2"]
            assert job.row is not None
            asked = part.jobs[0].asked
            assert await job.late() is not None
            assert part.jobs[0].asked == asked  # it is in the store now

    with LoopbackServer(default=by_call(text_1=Script(hang_after="request")), part=part) as server:
        asyncio.run(main())


# --- the steps of a submit ----------------------------------------------------------------------------------------------


def test_an_upload_that_fails_has_begun_nothing(url: str) -> None:
    part = WebhookPart(upload_status=500)  # of a batch's creation, it would say nothing

    async def main() -> None:
        async with spanwire.ConnectionManager() as manager:
            with pytest.raises(errors.ServerError, match="the file was not taken"):
                await manager.submit(endpoint(server, url), chats(2), group="g")
            ended = [job async for job in manager.jobs.ended("g", endpoint=endpoint(server, url))]
            assert [(job.row and job.row.state) for job in ended] == ["failed"]

    with LoopbackServer(part=part) as server:
        asyncio.run(main())
        assert [request.path for request in server.requests].count("/v1/files") == 3  # tried again
        assert part.jobs == []


def test_a_batch_whose_acknowledgement_was_lost_is_found_and_not_paid_for_twice(url: str) -> None:
    part = WebhookPart(mute=1.0)

    async def main() -> None:
        async with spanwire.ConnectionManager() as manager:
            for number in range(3):
                other = await manager.submit(endpoint(server, url), chats(1))
                assert await other.cancel()  # which looks for it, too, and stops it
                assert part.jobs[number].state == "cancelled"
            job = await manager.submit(endpoint(server, url, grace_s=0.05), chats(2))
            assert job.row is not None
            assert job.row.state == "submit_unknown"
            reply = await asyncio.wait_for(job.result(), 20)
            assert isinstance(reply, BatchReply)
            assert len(reply.items) == 2
            assert (job.row.attempt, job.row.provider_id) == (1, part.jobs[3].id)

    with LoopbackServer(default=by_call(batch=Script(prefill_s=0.3)), part=part) as server:
        asyncio.run(main())
        assert len(part.jobs) == 4


def test_while_it_cannot_be_looked_for_it_is_not_sent_again(url: str) -> None:
    part = WebhookPart(mute=1.0)

    async def main() -> None:
        async with spanwire.ConnectionManager() as manager:
            job = await manager.submit(endpoint(server, url, grace_s=0.05), chats(1))
            part.change(api_key="another", mute=0.0)
            refused = 0
            while refused < 2:
                await asyncio.sleep(0.02)
                refused = sum(request.path.endswith("/batches") for request in server.requests) - 1
            assert await job.status() == "submit_unknown"
            part.change(api_key=None)
            assert isinstance(await asyncio.wait_for(job.result(), 20), BatchReply)

    with LoopbackServer(default=by_call(), part=part) as server:
        asyncio.run(main())
        assert len(part.jobs) == 1


def test_who_leaves_while_it_is_submitted_pays_for_nothing(url: str) -> None:
    part = WebhookPart()

    async def main() -> None:
        async with spanwire.ConnectionManager() as manager:
            task = asyncio.ensure_future(manager.submit(endpoint(server, url), chats(1)))
            while not part.jobs:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while part.jobs[0].state != "cancelled":
                await asyncio.sleep(0.01)

    script = Script(queue_s=FOREVER, hang_after="request")
    with LoopbackServer(default=by_call(batch=script), part=part) as server:
        asyncio.run(asyncio.wait_for(main(), 20))


def test_one_that_is_nowhere_is_submitted_again(url: str) -> None:
    """Its submitter died between the upload and the batch: the row says ``submitting``, and there is no batch."""
    call = chats(2)
    now_s = time.time()
    row = JobRow(
        id="0197d0c0-1234-7abc-8def-0123456789ab",
        dialect="openai",
        mode="poll",
        model="m",
        operation="batch",
        state="submitting",
        created_s=now_s - 60,
        due_s=now_s + 60,
        poll_s=now_s - 30,
        input=json.dumps(["batch", "m", call.body]).encode(),
    )

    async def main() -> None:
        where = endpoint(server, url, grace_s=0.05)
        scheme, host, port = where.origin
        row.origin = f"{scheme}://{host}:{port}{where.path}"
        store = open_store(url)
        store.add([row])
        store.close()
        async with spanwire.ConnectionManager() as manager:
            job = manager.jobs.attach(row.id, endpoint=where)
            reply = await asyncio.wait_for(job.result(), 20)
            assert isinstance(reply, BatchReply)
            assert [item.text for item in reply.items.values() if isinstance(item, spanwire.Reply)] == [
                "You said: text 0",
                "You said: text 1",
            ]
            assert job.row is not None
            assert job.row.attempt == 2

    part = WebhookPart()
    with LoopbackServer(default=by_call(), part=part) as server:
        asyncio.run(main())
        asked = [request.path for request in server.requests]
        assert asked.index("/v1/batches") < asked.index("/v1/files")  # it was looked for first
        assert len(part.jobs) == 1


def test_what_plain_calls_cannot_be(url: str) -> None:
    async def main() -> None:
        async with spanwire.ConnectionManager() as manager:
            where = endpoint(server, url)
            with pytest.raises(errors.ConfigurationError, match=r"manager\.submit"):
                await manager.complete(where, chats(1))
            with pytest.raises(errors.ConfigurationError, match="submit_many"):
                await manager.submit(where, spanwire.Call.embeddings("e", ["a"]))
            with pytest.raises(errors.ConfigurationError, match="batch"):
                await manager.submit(server.endpoint(transport="webhook", options={"store": url}), chats(1))

    with LoopbackServer(part=(part := WebhookPart())) as server:
        asyncio.run(main())
        assert part.jobs == []


def test_thin_webhooks_are_webhooks(url: str, hooks: str, caplog: pytest.LogCaptureFixture) -> None:
    """Their results are asked for, and yet the receiver is reached: jobs are not polled from then on."""
    part = WebhookPart(webhook_url=f"{hooks}/openai")

    async def main() -> None:
        async with spanwire.ConnectionManager() as manager:
            for _ in range(6):
                await finished(manager, endpoint(server, url, hooks), chats(1))

    with LoopbackServer(default=by_call(), part=part) as server:
        asyncio.run(main())
    assert "without a webhook" not in caplog.text


# --- the SDK ------------------------------------------------------------------------------------------------------------


def test_openais_own_client_finds_nothing_missing(tmp_path: Path) -> None:
    lines = [
        {
            "custom_id": f"c{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "m", "messages": [{"role": "user", "content": f"text {number}"}]},
        }
        for number in range(3)
    ]
    path = tmp_path / "calls.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    part = WebhookPart(api_key="sk-x")
    with LoopbackServer(default=by_call(text_1=Script(status=400)), part=part) as server:
        base = server.endpoint(transport="webhook").url
        with openai.OpenAI(base_url=base, api_key="sk-x", max_retries=0) as client:
            with path.open("rb") as content:
                expires: Any = {"anchor": "created_at", "seconds": 3600}
                file = client.files.create(file=content, purpose="batch", expires_after=expires)
            FileObject.model_validate(file.model_dump(), strict=True)
            assert (file.filename, file.bytes) == ("calls.jsonl", path.stat().st_size)
            assert file.expires_at == file.created_at + 3600
            batch = client.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"k": "v"}
            )
            while batch.status not in {"completed", "failed"}:
                batch = client.batches.retrieve(batch.id)
            Batch.model_validate(batch.model_dump(), strict=True)
            assert batch.request_counts is not None
            assert batch.request_counts.model_dump() == {"total": 3, "completed": 2, "failed": 1}
            assert batch.metadata == {"k": "v"}
            assert batch.output_file_id is not None
            assert batch.error_file_id is not None
            rows = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
            assert [row["custom_id"] for row in rows] == ["c2", "c0"]
            completion = openai.types.chat.ChatCompletion.model_validate(rows[0]["response"]["body"])
            assert completion.choices[0].message.content == "You said: text 2"
            (refused,) = map(json.loads, client.files.content(batch.error_file_id).text.splitlines())
            assert (refused["custom_id"], refused["response"]["status_code"]) == ("c1", 400)
            more = [
                client.batches.create(
                    input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
                ).id
                for _ in range(3)
            ]
            assert [one.id for one in client.batches.list(limit=2)] == [*reversed(more), batch.id]
            assert client.files.delete(file.id).deleted
            with pytest.raises(openai.NotFoundError):
                client.files.content(file.id)
            with pytest.raises(openai.BadRequestError):
                client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
            broken = client.files.create(file=b'{"custom_id": "a"}\nno json', purpose="batch")
            batch = client.batches.create(
                input_file_id=broken.id, endpoint="/v1/chat/completions", completion_window="24h"
            )
            while batch.status != "failed":
                batch = client.batches.retrieve(batch.id)
            assert batch.errors is not None
            assert batch.errors.data is not None
            assert [(one.code, one.line) for one in batch.errors.data] == [
                ("invalid_json_line", 1),
                ("invalid_json_line", 2),
            ]
