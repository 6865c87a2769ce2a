from __future__ import annotations

from typing import Any

import pytest
from openai import BaseModel
from openai.types import webhooks
from openai.types.responses import Response
from spanwire_webhook.dialects import OpenAIJobs

import spanwire
from spanwire import errors
from spanwire.testing.responses_events import whole_response
from spanwire.testing.script import Script
from tests.plugins.webhook.dialects.shapes import CALL, CALLBACK, VECTORS, answer, encode, endpoint, row, sent

CODEC = OpenAIJobs()
EVENTS: dict[str, tuple[type[BaseModel], str]] = {
    "response.completed": (webhooks.ResponseCompletedWebhookEvent, "succeeded"),
    "response.incomplete": (webhooks.ResponseIncompleteWebhookEvent, "succeeded"),
    "response.failed": (webhooks.ResponseFailedWebhookEvent, "failed"),
    "response.cancelled": (webhooks.ResponseCancelledWebhookEvent, "cancelled"),
}


def response(**more: Any) -> dict[str, Any]:
    found = whole_response(Script.say("Hello there"), {"model": "m", "background": True})
    details = {
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    }
    found["usage"] = {**found["usage"], **details}  # the SDK asks for them
    return {**found, "created_at": 1796039990, "completed_at": 1796039995, **more}


def test_a_submit_is_stored_in_the_background() -> None:
    request = CODEC.submit(CALL, endpoint(), row(trace={"traceparent": "00-a-b-01", "baggage": "x"}), CALLBACK)
    assert (request.method, request.target) == ("POST", "/v1/responses")
    body = sent(request)
    assert body["background"] is True
    assert body["store"] is True
    assert body["max_output_tokens"] == 5
    assert "stream" not in body
    assert body["metadata"] == {
        "spanwire_job": "0197d0c0-1234-7abc-8def-0123456789ab.1",
        "traceparent": "00-a-b-01",
    }
    assert CALLBACK not in request.body.decode()


def test_what_the_call_says_stays() -> None:
    metadata = {f"k{number}": "v" for number in range(16)}
    call = spanwire.Call.chat("m", [{"role": "user", "content": "x"}], store=False, metadata=metadata)
    body = sent(CODEC.submit(call, endpoint(), row(), None))
    assert body["store"] is False
    assert body["metadata"] == metadata


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(errors.ConfigurationError, match="embeddings"):
        CODEC.submit(VECTORS, endpoint(), row(), None)
    with pytest.raises(errors.ConfigurationError, match="stop"):
        CODEC.submit(spanwire.Call.chat("m", [], stop=["x"]), endpoint(), row(), None)


@pytest.mark.parametrize("kind", sorted(EVENTS))
def test_each_webhook(kind: str) -> None:
    model, state = EVENTS[kind]
    raw = {"object": "event", "id": "evt_1", "type": kind, "created_at": 1796039990, "data": {"id": "resp_1"}}
    event = model.model_validate(raw)
    seen = CODEC.webhook({}, event.model_dump_json().encode())
    assert (seen.state, seen.provider_id, seen.body) == (state, "resp_1", None)
    assert seen.fetch == (state in {"succeeded", "failed"})
    assert seen.times.finished_s == 1796039990


@pytest.mark.parametrize("kind", ["response.queued", "eval.run.succeeded", "x"])
def test_a_webhook_of_something_else_says_nothing(kind: str) -> None:
    seen = CODEC.webhook({}, encode({"type": kind, "data": {"id": "batch_1"}}))
    assert (seen.state, seen.fetch) == (None, False)


@pytest.mark.parametrize("body", [b"", b"{}", b'{"type":"response.completed"}', b'{"data":{"id":"r"}}'])
def test_a_webhook_that_is_none(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"body|webhook"):
        CODEC.webhook({}, body)


@pytest.mark.parametrize(
    ("word", "state"),
    [
        ("queued", "queued"),
        ("in_progress", "running"),
        ("completed", "succeeded"),
        ("incomplete", "succeeded"),
        ("failed", "failed"),
        ("cancelled", "cancelled"),
        ("napping", None),
    ],
)
def test_each_status(word: str, state: str | None) -> None:
    body = response(status=word, completed_at=None, output=[])
    seen = CODEC.told(answer(body))
    assert (seen.state, seen.provider_id) == (state, body["id"])
    assert (seen.body is not None) == (state == "succeeded")
    acknowledged = CODEC.acknowledged(answer(body))
    assert acknowledged.state == (state if state in {"succeeded", "failed", "cancelled"} else "submitted")


def test_the_sdks_response_comes_back_as_a_reply() -> None:
    theirs = Response.model_validate(response())
    seen = CODEC.told(answer(theirs.model_dump_json().encode()))
    assert seen.body is not None
    reply = CODEC.reply("chat", seen.body)
    assert isinstance(reply, spanwire.Reply)
    assert (reply.text, reply.id, reply.model) == (theirs.output_text, theirs.id, theirs.model)
    assert reply.text == "Hello there"
    assert reply.usage is not None
    assert theirs.usage is not None
    assert reply.usage.output_tokens == theirs.usage.output_tokens
    assert (seen.times.accepted_s, seen.times.finished_s, seen.times.total_s) == (1796039990, 1796039995, 5)
    assert (seen.times.queue_s, seen.times.model_s) == (None, None)


def test_an_incomplete_one_says_so() -> None:
    body = whole_response(Script.say("Hello", finish_reason="length"), {"model": "m"})
    seen = CODEC.told(answer(body))
    assert seen.state == "succeeded"
    assert seen.body is not None
    assert CODEC.reply("chat", seen.body).finish_reason == "length"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("rate_limit_exceeded", errors.RateLimited),
        ("invalid_prompt", errors.BadRequest),
        ("server_error", errors.ServerError),
    ],
)
def test_a_failed_one_says_why(code: str, kind: type[errors.ServerError]) -> None:
    seen = CODEC.told(answer(response(status="failed", error={"code": code, "message": "words"})))
    assert (seen.state, seen.code, seen.message) == ("failed", code, "words")
    error = CODEC.failure(row(state="failed", code=seen.code, message=seen.message))
    assert isinstance(error, kind)
    assert (error.code, error.message) == (code, "words")


def test_after_ten_minutes_it_may_be_gone() -> None:
    seen = CODEC.told(answer({"error": {"message": "Response not found"}}, 404))
    assert seen.state == "lost"
    assert seen.message is not None
    assert "ten minutes" in seen.message


def test_where_it_asks() -> None:
    known = row(provider_id="resp_1")
    for request, expected in (
        (CODEC.status(known, endpoint()), ("GET", "/v1/responses/resp_1")),
        (CODEC.result(known, endpoint()), ("GET", "/v1/responses/resp_1")),
        (CODEC.cancel(known, endpoint()), ("POST", "/v1/responses/resp_1/cancel")),
    ):
        assert request is not None
        assert (request.method, request.target) == expected


def test_repeated_deliveries_have_one_key() -> None:
    assert CODEC.dedupe({"webhook-id": "wh_1"}, b"a") == "wh_1"
