from __future__ import annotations

from typing import Any

import pytest
from spanwire_webhook.dialects import GenericJobs

import spanwire
from spanwire import errors
from tests.plugins.webhook.dialects.shapes import (
    CALL,
    CALLBACK,
    VECTORS,
    answer,
    completion,
    encode,
    endpoint,
    row,
    sent,
)

CODEC = GenericJobs()
T0 = 1796039990.0


def job(**more: Any) -> dict[str, Any]:
    return {"id": "job_1", "object": "job", "status": "queued", "created_at": T0, **more}


def hook(type: str, **more: Any) -> bytes:
    return encode({"type": type, "timestamp": "2026-11-30T12:00:00Z", "data": job(**more)})


def test_a_submit_is_a_row_of_a_batch_with_an_address() -> None:
    request = CODEC.submit(CALL, endpoint(), row(attempt=2, created_s=100.0, due_s=160.0), CALLBACK)
    own = "0197d0c0-1234-7abc-8def-0123456789ab.2"
    assert (request.method, request.target) == ("POST", "/v1/jobs")
    assert request.headers["idempotency-key"] == own
    assert sent(request) == {
        "custom_id": own,
        "method": "POST",
        "url": "/chat/completions",
        "body": {"model": "the-model", **CALL.body},
        "webhook_url": CALLBACK,
        "timeout_s": 60.0,
    }


def test_without_a_public_url_it_is_the_same_without_an_address() -> None:
    request = CODEC.submit(VECTORS, endpoint(), row(), None)
    assert sent(request)["url"] == "/embeddings"
    assert "webhook_url" not in sent(request)
    assert "timeout_s" not in sent(request)


def test_an_operation_that_it_does_not_know_is_refused() -> None:
    with pytest.raises(errors.ConfigurationError, match="speech"):
        CODEC.submit(spanwire.Call("speech", "m", {}), endpoint(), row(), CALLBACK)


def test_it_is_acknowledged() -> None:
    seen = CODEC.acknowledged(answer(job(), 202))
    assert (seen.state, seen.provider_id, seen.times.accepted_s) == ("submitted", "job_1", T0)
    assert CODEC.acknowledged(answer(job(status="succeeded", output={}), 200)).state == "succeeded"
    with pytest.raises(errors.ProtocolError, match="id"):
        CODEC.acknowledged(answer({"status": "queued"}, 202))


@pytest.mark.parametrize(
    ("status", "state"),
    [
        ("queued", "queued"),
        ("pending", "queued"),
        ("running", "running"),
        ("in_progress", "running"),
        ("succeeded", "succeeded"),
        ("completed", "succeeded"),
        ("failed", "failed"),
        ("cancelled", "cancelled"),
        ("canceled", "cancelled"),
        ("expired", "expired"),
        ("thinking", None),
    ],
)
def test_each_status(status: str, state: str | None) -> None:
    assert CODEC.told(answer(job(status=status))).state == state
    seen = CODEC.webhook({}, hook("job.x", status=status, output=None))
    assert (seen.state, seen.provider_id) == (state, "job_1")


def test_an_unknown_status_is_terminal_with_an_end_an_output_or_an_error() -> None:
    assert CODEC.told(answer(job(status="done", output="x"))).state == "succeeded"
    assert CODEC.told(answer(job(status="done", completed_at=T0 + 1))).state == "failed"
    seen = CODEC.told(answer(job(status="done", error={"code": "oom", "message": "no memory"})))
    assert (seen.state, seen.code, seen.message) == ("failed", "oom", "no memory")


def test_the_type_says_it_where_the_status_is_missing() -> None:
    body = encode({"type": "job.running", "data": {"id": "job_1"}})
    assert CODEC.webhook({}, body).state == "running"


def test_the_times_are_the_servers() -> None:
    seen = CODEC.webhook(
        {}, hook("job.succeeded", status="succeeded", output="x", started_at=T0 + 2, completed_at=T0 + 5)
    )
    times = seen.times
    assert (times.accepted_s, times.started_s, times.finished_s) == (T0, T0 + 2, T0 + 5)
    assert (times.queue_s, times.model_s, times.total_s) == (2, 3, 5)


def test_times_in_the_wrong_order_have_nothing_between_them() -> None:
    times = CODEC.told(answer(job(started_at=T0 - 2, completed_at=T0 - 1))).times
    assert (times.queue_s, times.model_s, times.total_s) == (None, 1, None)


def test_a_thin_webhook_has_its_result_fetched() -> None:
    seen = CODEC.webhook({}, hook("job.succeeded", status="succeeded"))
    assert (seen.state, seen.fetch, seen.body) == ("succeeded", True, None)
    request = CODEC.result(row(provider_id="job_1"), endpoint())
    assert request is not None
    assert (request.method, request.target) == ("GET", "/v1/jobs/job_1")
    told = CODEC.told(answer(job(status="succeeded", output=completion())))
    assert told.body is not None
    assert CODEC.reply("chat", told.body).text == "Hello"  # type: ignore[union-attr]


def test_the_result_is_a_completion() -> None:
    seen = CODEC.webhook({}, hook("job.succeeded", status="succeeded", output=completion("Hi there")))
    assert seen.body is not None
    reply = CODEC.reply("chat", seen.body)
    assert isinstance(reply, spanwire.Reply)
    assert (reply.text, reply.id, reply.model, reply.finish_reason) == ("Hi there", "chatcmpl-1", "the-model-1", "stop")
    assert reply.usage == spanwire.Usage(3, 1, 4)
    assert reply.raw == encode(completion("Hi there"))


def test_the_result_is_a_list_of_vectors() -> None:
    output = {
        "object": "list",
        "model": "e",
        "data": [{"index": 1, "embedding": [2.0]}, {"index": 0, "embedding": [1.0]}],
    }
    seen = CODEC.webhook({}, hook("job.succeeded", status="succeeded", output=output))
    assert seen.body is not None
    vectors = CODEC.reply("embeddings", seen.body)
    assert isinstance(vectors, spanwire.Embeddings)
    assert (vectors.vectors, vectors.model) == ([[1.0], [2.0]], "e")


def test_a_failure_says_why() -> None:
    seen = CODEC.webhook({}, hook("job.failed", status="failed", error={"code": "429", "message": "too many"}))
    assert (seen.state, seen.body) == ("failed", None)
    error = CODEC.failure(row(state="failed", code=seen.code, message=seen.message))
    assert isinstance(error, errors.RateLimited)
    assert "too many" in str(error)


def test_what_is_not_there_is_lost_and_what_was_over_is_expired() -> None:
    assert CODEC.told(answer(b"", 404)).state == "lost"
    assert CODEC.told(answer(b"", 410)).state == "expired"


def test_it_may_ask_not_to_be_asked() -> None:
    assert CODEC.told(answer(job(), retry_after="12")).retry_after_s == 12


def test_repeated_deliveries_have_one_key() -> None:
    assert CODEC.dedupe({"webhook-id": "msg_1"}, b"a") == CODEC.dedupe({"webhook-id": "msg_1"}, b"b") == "msg_1"


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"type":"job.failed"}', b'{"type":"x","data":3}', b"nonsense"])
def test_a_webhook_that_is_none(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"body|webhook"):
        CODEC.webhook({}, body)


def test_cancel() -> None:
    request = CODEC.cancel(row(provider_id="job_1"), endpoint())
    assert request is not None
    assert (request.method, request.target) == ("POST", "/v1/jobs/job_1/cancel")
