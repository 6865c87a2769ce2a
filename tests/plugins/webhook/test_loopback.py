"""The scripted job server, by the dialects' own requests, with a plain receiver behind it."""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import itertools
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec.structs import replace
from spanwire_webhook.dialects import dialects
from spanwire_webhook.loopback import SECRET, WebhookPart
from spanwire_webhook.loopback_routes import SHAPES

import spanwire
from spanwire import errors
from spanwire.jobs.contract import HTTPRequest, JobCodec, JobRow, Seen
from spanwire.testing import LoopbackServer, Script
from tests.plugins.webhook.dialects.shapes import CALL, VECTORS, row
from tests.plugins.webhook.receiver import Receiver, ask, receiving

CODECS: dict[str, JobCodec] = {dialect.name: dialect.codec for dialect in dialects()}
NAMES = sorted(SHAPES.keys() & CODECS.keys())
POLLED = [name for name in NAMES if CODECS[name].status_has_output]
MODEL = "fal-ai/my-model"
OTHER = "whsec_" + base64.b64encode(b"another secret of 24 byt").decode()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as found:
        yield found


def known(seen: Seen, operation: str = "chat") -> JobRow:
    return row(provider_id=seen.provider_id, model=MODEL, operation=operation)


class Client:
    """Submits as a manager would: by the codec's request."""

    def __init__(self, server: LoopbackServer, name: str, receiver: Receiver | None) -> None:
        self.codec = CODECS[name]
        self.server = server
        self.receiver = receiver
        self.endpoint = server.endpoint(api_key="k")
        self.number = 0

    def submit(self, call: spanwire.Call = CALL, row: JobRow | None = None) -> Seen:
        self.number += 1
        row = row or JobRow(id=f"own-{self.number}")
        call = replace(call, model=MODEL)  # fal's name their app
        url = None if self.receiver is None else f"{self.receiver.url}/{row.id}"
        return self.codec.acknowledged(self.ask(self.codec.submit(call, self.endpoint, row, url)))

    def ask(self, request: HTTPRequest | None) -> Any:
        assert request is not None
        return ask(self.server.origin, request, self.codec.credentials("k"))

    def status(self, seen: Seen) -> Seen:
        return self.codec.told(self.ask(self.codec.status(known(seen), self.endpoint)))

    def result(self, seen: Seen, operation: str = "chat") -> Seen:
        return self.codec.told(self.ask(self.codec.result(known(seen, operation), self.endpoint)))

    def ends(self) -> list[Seen]:
        """What the webhooks of ends say."""
        assert self.receiver is not None
        seen = [self.codec.webhook(hook.headers, hook.body) for hook in self.receiver.hooks]
        return [each for each in seen if each.state not in {"queued", "running"}]


def done(part: WebhookPart, server: LoopbackServer) -> None:
    server.wait_for(lambda _: part.counts["open"] == 0)


@pytest.mark.parametrize("name", NAMES)
def test_a_job_by_webhook(name: str, receiver: Receiver) -> None:
    part = WebhookPart(webhook_url=receiver.url, api_key="k")
    with LoopbackServer([Script.say("Hello there", queue_s=0.02, prefill_s=0.05)], part=part) as server:
        client = Client(server, name, receiver)
        acknowledged = client.submit()
        assert acknowledged.state == "submitted"
        done(part, server)
        (end,) = client.ends()
        assert (end.state, end.provider_id) == ("succeeded", acknowledged.provider_id)
        if end.fetch:
            end = client.status(end)
        assert end.body is not None
        assert client.codec.reply("chat", end.body).text == "Hello there"  # type: ignore[union-attr]
        (job,) = part.jobs
        assert (job.dialect, job.state, job.webhook, job.taken) == (name, "succeeded", "SUCCEEDED", 1)
        assert job.started_s is not None
        assert job.finished_s is not None
        assert job.started_s - job.accepted_s >= 0.02
        assert job.finished_s - job.started_s >= 0.05
        if name in {"generic", "replicate"}:
            assert end.times.queue_s == pytest.approx(job.started_s - job.accepted_s, abs=1e-4)
            assert end.times.model_s == pytest.approx(job.finished_s - job.started_s, abs=1e-4)
        starts = [delivery for delivery in part.deliveries if delivery.kind == "start"]
        assert len(starts) == (name in {"generic", "replicate", "cog"})
        assert part.counts["taken"] == len(receiver.hooks) == len(starts) + 1
        assert not server.faults


@pytest.mark.parametrize("name", POLLED)
def test_a_job_by_polling(name: str) -> None:
    part = WebhookPart()
    with LoopbackServer([Script.say("Hi", queue_s=0.2)], part=part) as server:
        client = Client(server, name, None)
        acknowledged = client.submit()
        assert client.status(acknowledged).state == "queued"
        done(part, server)
        told = client.status(acknowledged)
        assert told.state == "succeeded"
        assert told.fetch == (name == "fal")
        told = client.result(acknowledged) if told.fetch else told
        assert told.body is not None
        assert client.codec.reply("chat", told.body).text == "Hi"  # type: ignore[union-attr]
        (job,) = part.jobs
        assert (job.asked - (name == "fal"), job.webhook, job.deliveries) == (2, "NONE", [])
        unknown = Seen(provider_id="nobodys")
        gone = "expired" if name == "runpod" else "lost"
        assert client.status(unknown).state == gone
        part.change(retention_s=0)
        assert client.status(acknowledged).state == gone


@pytest.mark.parametrize("name", [name for name in NAMES if name != "openai"])
def test_vectors(name: str, receiver: Receiver) -> None:
    part = WebhookPart()
    with LoopbackServer(part=part) as server:
        client = Client(server, name, receiver)
        acknowledged = client.submit(VECTORS)
        done(part, server)
        (end,) = client.ends()
        end = client.result(acknowledged, "embeddings") if end.fetch else end
        assert end.body is not None
        found = client.codec.reply("embeddings", end.body)
        assert isinstance(found, spanwire.Embeddings)
        assert [len(vector) for vector in found.vectors] == [8, 8]


@pytest.mark.parametrize("name", NAMES)
def test_a_job_that_fails(name: str, receiver: Receiver) -> None:
    part = WebhookPart(webhook_url=receiver.url)
    with LoopbackServer([Script(finish_reason="error")], part=part) as server:
        client = Client(server, name, receiver)
        acknowledged = client.submit()
        done(part, server)
        (end,) = client.ends()
        assert (end.state, end.body) == ("failed", None)
        if client.codec.polls:
            told = client.status(acknowledged)
            assert (told.state, told.message) == ("failed", "the script says that it fails")


@pytest.mark.parametrize("name", NAMES)
def test_a_job_that_is_cancelled(name: str, receiver: Receiver) -> None:
    part = WebhookPart(webhook_url=receiver.url)
    with LoopbackServer([Script.say("Hi", queue_s=60)], part=part) as server:
        client = Client(server, name, receiver)
        acknowledged = client.submit(row=row())
        request = client.codec.cancel(known(acknowledged), client.endpoint)
        assert client.ask(request).status == (202 if name == "fal" else 200)
        done(part, server)
        assert part.jobs[0].state == "cancelled"
        if client.codec.polls:
            assert client.status(acknowledged).state == "cancelled"
        assert [end.state for end in client.ends()] == ([] if name in {"baseten", "fal"} else ["cancelled"])


def test_baseten_cancels_only_what_waits() -> None:
    with (
        LoopbackServer([Script.say("Hi", prefill_s=60)], part=(part := WebhookPart())) as server,
        receiving() as receiver,
    ):
        client = Client(server, "baseten", receiver)
        acknowledged = client.submit()
        server.wait_for(lambda _: part.jobs[0].state == "running")
        answer = client.ask(client.codec.cancel(row(provider_id=acknowledged.provider_id), client.endpoint))
        assert json.loads(answer.body)["canceled"] is False
        assert client.status(acknowledged).state == "running"


def test_workers_make_a_queue(receiver: Receiver) -> None:
    part = WebhookPart(workers=1)
    with LoopbackServer(default=Script.say("Hi", prefill_s=0.05), part=part) as server:
        client = Client(server, "generic", receiver)
        for _ in range(3):
            client.submit()
        done(part, server)
        spans = sorted((job.started_s or 0.0, job.finished_s or 0.0) for job in part.jobs)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))


# --- signatures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["generic", "replicate", "openai"])
def test_standard_webhooks_are_signed_as_the_sdk_checks(name: str, receiver: Receiver) -> None:
    part = WebhookPart(webhook_url=receiver.url, secrets=[OTHER, SECRET])
    with LoopbackServer(part=part) as server:
        Client(server, name, receiver).submit()
        done(part, server)
    for secret in (SECRET, OTHER):
        sdk = openai.OpenAI(api_key="x", webhook_secret=secret)
        for hook in receiver.hooks:
            sdk.webhooks.verify_signature(hook.body.decode(), hook.headers)
            with pytest.raises(openai.InvalidWebhookSignatureError):
                sdk.webhooks.verify_signature(hook.body.decode() + " ", hook.headers)


def test_a_wrong_signature_is_wrong(receiver: Receiver) -> None:
    part = WebhookPart(wrong=1.0)
    with LoopbackServer(part=part) as server:
        Client(server, "generic", receiver).submit()
        done(part, server)
    sdk = openai.OpenAI(api_key="x", webhook_secret=SECRET)
    for hook in receiver.hooks:
        with pytest.raises(openai.InvalidWebhookSignatureError):
            sdk.webhooks.verify_signature(hook.body.decode(), hook.headers)
    assert all(delivery.faults == ("wrong",) for delivery in part.deliveries)


def test_v1a(receiver: Receiver) -> None:
    seed = "c9a231b6096979c724dcdd232ce8c16dcc79eb7d55ea2cc4006a2baac83735fb"
    part = WebhookPart(secrets=[], seed_v1a=seed)
    with LoopbackServer(part=part) as server:
        Client(server, "generic", receiver).submit()
        done(part, server)
    hook = receiver.hooks[-1]
    version, _, signature = hook.headers["webhook-signature"].partition(",")
    assert version == "v1a"
    signed = f"{hook.headers['webhook-id']}.{hook.headers['webhook-timestamp']}.".encode() + hook.body
    key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(seed)).public_key()
    key.verify(base64.b64decode(signature), signed)


def test_baseten_signs_the_body_with_the_secrets_text(receiver: Receiver) -> None:
    part = WebhookPart(secrets=[SECRET, OTHER])
    with LoopbackServer(part=part) as server:
        Client(server, "baseten", receiver).submit()
        done(part, server)
    (hook,) = receiver.hooks
    expected = [f"v1={hmac.new(secret.encode(), hook.body, hashlib.sha256).hexdigest()}" for secret in (SECRET, OTHER)]
    assert hook.headers["x-baseten-signature"] == ",".join(expected)
    assert hook.headers["x-baseten-request-id"] == part.jobs[0].id


def test_cog_signs_nothing_and_gives_the_trace_back(receiver: Receiver) -> None:
    part = WebhookPart()
    with LoopbackServer(part=part) as server:
        codec = CODECS["cog"]
        request = codec.submit(CALL, server.endpoint(), row(), receiver.url)
        ask(server.origin, request, {"traceparent": "00-1-2-01", "tracestate": "a=b"})
        done(part, server)
    for hook in receiver.hooks:
        assert (hook.headers["traceparent"], hook.headers["tracestate"]) == ("00-1-2-01", "a=b")
        assert not any("signature" in name for name in hook.headers)


def test_openais_sdk_takes_it_for_openai(receiver: Receiver) -> None:
    part = WebhookPart(webhook_url=receiver.url)
    scripts = [Script.say("Hello there", prefill_s=0.1), Script.say("never", queue_s=60), Script(finish_reason="error")]
    with (
        LoopbackServer(scripts, part=part) as server,
        openai.OpenAI(api_key="x", base_url=server.url, webhook_secret=SECRET, max_retries=0) as sdk,
    ):
        begun = sdk.responses.create(model="m", input="Hi", background=True)
        assert begun.status in {"queued", "in_progress"}
        cancelled = sdk.responses.create(model="m", input="Hi", background=True)
        assert sdk.responses.cancel(cancelled.id).status == "cancelled"
        failed = sdk.responses.create(model="m", input="Hi", background=True)
        done(part, server)
        found = sdk.responses.retrieve(begun.id)
        assert (found.status, found.output_text, found.id) == ("completed", "Hello there", begun.id)
        error = sdk.responses.retrieve(failed.id).error
        assert error is not None
        assert error.message == "the script says that it fails"
        events: dict[str, str] = {}
        for hook in receiver.hooks:
            event: Any = sdk.webhooks.unwrap(hook.body, hook.headers)
            events[event.data.id] = event.type
        assert events == {
            begun.id: "response.completed",
            cancelled.id: "response.cancelled",
            failed.id: "response.failed",
        }
        with pytest.raises(openai.NotFoundError):
            sdk.responses.retrieve("resp_nobodys")


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_a_webhook_is_tried_again_with_its_id_and_a_fresh_signature(receiver: Receiver) -> None:
    statuses = iter([500, 302, 429])
    receiver.answer = lambda hook: next(statuses, 204)
    part = WebhookPart(start_events=False, speed=1e6)
    with LoopbackServer(part=part) as server:
        Client(server, "generic", receiver).submit()
        done(part, server)
    assert [delivery.status for delivery in part.deliveries] == [500, 302, 429, 204]
    assert len({hook.headers["webhook-id"] for hook in receiver.hooks}) == 1
    assert part.jobs[0].webhook == "SUCCEEDED"


def test_baseten_gives_up_after_two_attempts_and_at_once_on_401(receiver: Receiver) -> None:
    part = WebhookPart(speed=1e6)
    with LoopbackServer(part=part) as server:
        client = Client(server, "baseten", receiver)
        for status, attempts in ((503, 2), (401, 1)):
            receiver.answer = lambda hook, status=status: status  # type: ignore[misc]
            acknowledged = client.submit()
            done(part, server)
            job = part.jobs[-1]
            assert (len(job.deliveries), job.webhook) == (attempts, "FAILED")
            assert client.status(acknowledged).state == "lost"


def test_a_receiver_that_hangs_up_is_tried_again(receiver: Receiver) -> None:
    statuses = iter([None])
    receiver.answer = lambda hook: next(statuses, 204)
    part = WebhookPart(start_events=False, speed=1e6)
    with LoopbackServer(part=part) as server:
        Client(server, "generic", receiver).submit()
        done(part, server)
    first, second = part.deliveries
    assert (first.status, second.status) == (None, 204)
    assert first.error is not None


@pytest.mark.parametrize(("fault", "ids"), [("duplicate", 1), ("renumber", 2)])
def test_twice(fault: str, ids: int, receiver: Receiver) -> None:
    part = WebhookPart(start_events=False, **{fault: 1.0})
    with LoopbackServer(part=part) as server:
        Client(server, "generic", receiver).submit()
        done(part, server)
    first, second = receiver.hooks
    assert first.body == second.body
    assert len({first.headers["webhook-id"], second.headers["webhook-id"]}) == ids
    assert part.jobs[0].taken == 2


def test_a_webhook_that_is_lost_leaves_the_status(receiver: Receiver) -> None:
    part = WebhookPart(start_events=False, lose=1.0)
    with LoopbackServer(part=part) as server:
        client = Client(server, "generic", receiver)
        acknowledged = client.submit()
        done(part, server)
        assert client.status(acknowledged).state == "succeeded"
    assert receiver.hooks == []
    assert (part.jobs[0].webhook, part.jobs[0].taken) == ("LOST", 0)


def test_the_start_after_the_end(receiver: Receiver) -> None:
    part = WebhookPart(reorder=1.0)
    with LoopbackServer(part=part) as server:
        Client(server, "replicate", receiver).submit()
        done(part, server)
    states = [CODECS["replicate"].webhook({}, hook.body).state for hook in receiver.hooks]
    assert states == ["succeeded", "running"]


def test_an_end_that_later_ones_overtake(receiver: Receiver) -> None:
    part = WebhookPart(reorder=1.0)
    with LoopbackServer(part=part) as server:
        client = Client(server, "baseten", receiver)
        first = client.submit()
        part.change(reorder=0.0)
        second = client.submit()
        done(part, server)
        assert [end.provider_id for end in client.ends()] == [second.provider_id, first.provider_id]


@pytest.mark.parametrize("name", ["generic", "baseten", "openai"])
def test_the_webhook_before_the_acknowledgement(name: str, receiver: Receiver) -> None:
    part = WebhookPart(early=1.0, webhook_url=receiver.url)
    with LoopbackServer(part=part) as server:
        client = Client(server, name, receiver)
        acknowledged = client.submit()
        (end,) = client.ends()  # it was there before the answer
        assert end.provider_id == acknowledged.provider_id


def test_taken_and_not_acknowledged(receiver: Receiver) -> None:
    part = WebhookPart(swallow=1.0)
    with LoopbackServer(part=part) as server:
        client = Client(server, "generic", receiver)
        with pytest.raises(errors.ServerError) as caught:
            client.submit()
        assert caught.value.status == 504
        part.change(swallow=0.0, mute=1.0)
        with pytest.raises((http.client.HTTPException, OSError)):
            client.submit()
        part.change(mute=0.0)
        server.script(Script.say("x", drop_after="request", drop_mode="reset"))
        with pytest.raises((http.client.HTTPException, OSError)):
            client.submit()
        done(part, server)
        assert len(client.ends()) == len(part.jobs) == 3


@pytest.mark.parametrize("name", ["generic", "cog"])
def test_the_same_submit_is_the_same_job(name: str, receiver: Receiver) -> None:
    assert CODECS[name].resubmits
    part = WebhookPart(swallow=1.0)
    with LoopbackServer(part=part) as server:
        client = Client(server, name, receiver)
        with pytest.raises(errors.ServerError):
            client.submit(row=row())
        ids = {client.submit(row=row()).provider_id for _ in range(2)}
        done(part, server)
        (job,) = part.jobs
        assert (ids, job.submits) == ({job.id}, 3)
        assert len(client.ends()) == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_submit_that_is_refused_makes_no_job(name: str, receiver: Receiver) -> None:
    part = WebhookPart(api_key="k")
    with LoopbackServer([Script(status=429, headers={"Retry-After": "9"})], part=part) as server:
        client = Client(server, name, receiver)
        with pytest.raises(errors.RateLimited) as caught:
            client.submit()
        assert caught.value.retry_after_s == 9
        request = client.codec.submit(replace(CALL, model=MODEL), client.endpoint, row(), receiver.url)
        assert ask(server.origin, request, client.codec.credentials("other")).status == 401
        assert (
            ask(
                server.origin, HTTPRequest(request.method, request.target, {}, b"[]"), client.codec.credentials("k")
            ).status
            == 400
        )
        assert part.jobs == []


def test_an_empty_body_and_one_that_is_large(receiver: Receiver) -> None:
    part = WebhookPart(start_events=False, blank=1.0)
    with LoopbackServer(part=part) as server:
        client = Client(server, "generic", receiver)
        client.submit()
        done(part, server)
        assert receiver.hooks[0].body == b""
        part.change(blank=0.0)
        server.script(Script(body=msgspec.json.encode("x" * 8_000_000)))
        client.submit()
        done(part, server)
        assert len(receiver.hooks[1].body) > 8_000_000


def test_a_thin_webhook(receiver: Receiver) -> None:
    part = WebhookPart(thin=True, start_events=False)
    with LoopbackServer([Script.say("Hi")], part=part) as server:
        client = Client(server, "generic", receiver)
        client.submit()
        done(part, server)
        (end,) = client.ends()
        assert (end.fetch, end.body) == (True, None)
        told = client.status(end)
        assert told.body is not None
        assert client.codec.reply("chat", told.body).text == "Hi"  # type: ignore[union-attr]


def test_shares_befall_the_same_jobs_in_every_run() -> None:
    found = []
    for _ in range(2):
        part = WebhookPart(lose=0.2, duplicate=0.5, seed=3)
        with LoopbackServer(part=part) as server:
            client = Client(server, "generic", None)
            for _ in range(100):
                client.submit()
            found.append([sorted(job.faults) for job in part.jobs])
    assert found[0] == found[1]
    counted = Counter(fault for faults in found[0] for fault in faults)
    assert 5 <= counted["lose"] <= 40
    assert 30 <= counted["duplicate"] <= 70


def test_closing_ends_jobs_and_deliveries_that_are_under_way(receiver: Receiver) -> None:
    receiver.answer = lambda hook: 500
    part = WebhookPart(speed=1e-3)
    with LoopbackServer([Script.say("a"), Script.say("b", queue_s=60)], part=part) as server:
        client = Client(server, "generic", receiver)
        client.submit()
        client.submit()
        receiver.wait_for(1)
    assert not server.faults


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lost": 1}, "lost"),
        ({"lose": 2}, "lose"),
        ({"lose": True}, "lose"),
        ({"workers": 0}, "workers"),
        ({"speed": 0}, "speed"),
        ({"secrets": "x"}, "secrets"),
        ({"seed_v1a": "00"}, "seed_v1a"),
        ({"webhook_url": "ftp://x"}, "webhook_url"),
        ({"thin": 1}, "thin"),
        ({"log": 3}, "log"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(errors.ConfigurationError, match=words):
        LoopbackServer(part="webhook", options=options)


def test_as_a_process_of_its_own(receiver: Receiver, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    command = [sys.executable, "-m", "spanwire.testing", "--part", "webhook", "--tokens", "2"]
    process = subprocess.Popen(
        [*command, "--option", f"log={log}", "--option", "duplicate=1.0"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[0]
        codec, endpoint = CODECS["generic"], spanwire.Endpoint(url)
        origin = url.removesuffix("/v1")
        codec.acknowledged(ask(origin, codec.submit(CALL, endpoint, row(), receiver.url)))
        receiver.wait_for(3)
        while True:
            counts = json.loads(ask(origin, HTTPRequest("GET", "/loopback/counts")).body)
            if counts["open"] == 0:
                break
        assert (counts["jobs"], counts["ended"], counts["taken"]) == (1, 1, 3)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["what"] for line in lines if line["what"] != "delivery"] == ["job", "running", "succeeded", "webhook"]
    assert [line["kind"] for line in lines if line["what"] == "delivery"] == ["start", "end", "end"]
