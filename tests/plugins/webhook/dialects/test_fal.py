from __future__ import annotations

from typing import Any

import pytest
from spanwire_webhook.dialects import FalJobs

import spanwire
from spanwire import errors
from tests.plugins.webhook.dialects.shapes import CALLBACK, answer, completion, encode, endpoint, row, sent

CODEC = FalJobs()
URL = "https://queue.fal.run"
CALL = spanwire.Call.chat("fal-ai/any-llm/fast", [{"role": "user", "content": "Hi"}])
ACKNOWLEDGED = {
    "request_id": "r-1",
    "gateway_request_id": "r-1",
    "response_url": f"{URL}/fal-ai/any-llm/requests/r-1",
    "status_url": f"{URL}/fal-ai/any-llm/requests/r-1/status",
    "cancel_url": f"{URL}/fal-ai/any-llm/requests/r-1/cancel",
    "status": "IN_QUEUE",
    "queue_position": 3,
}


def hook(status: str = "OK", **more: Any) -> bytes:
    return encode({"request_id": "r-1", "gateway_request_id": "r-1", "status": status, "payload": None, **more})


def test_the_callback_is_in_the_query_and_the_input_is_the_body() -> None:
    request = CODEC.submit(CALL, endpoint(URL), row(), "https://example.com/a?b=c&d")
    assert request.target == "/fal-ai/any-llm/fast?fal_webhook=https%3A%2F%2Fexample.com%2Fa%3Fb%3Dc%26d"
    assert sent(request) == dict(CALL.body)
    assert CODEC.submit(CALL, endpoint(URL), row(), None).target == "/fal-ai/any-llm/fast"
    assert CODEC.credentials("K") == {"authorization": "Key K"}
    options = {"timeout_s": 30, "priority": "low", "input": {"prompt": "{user}"}}
    told = CODEC.submit(CALL, endpoint(URL, options=options), row(), CALLBACK)
    assert (told.headers["x-fal-request-timeout"], told.headers["x-fal-queue-priority"]) == ("30", "low")
    assert sent(told) == {"prompt": "Hi"}
    assert "x-fal-no-retry" not in told.headers
    told = CODEC.submit(CALL, endpoint(URL, options={"no_retry": True}), row(), CALLBACK)
    assert told.headers["x-fal-no-retry"] == "1"
    with pytest.raises(errors.ConfigurationError, match="no_retry"):
        CODEC.submit(CALL, endpoint(URL, options={"no_retry": 1}), row(), CALLBACK)


def test_what_its_caller_has_cancelled_is_no_failure() -> None:
    told = CODEC.told(
        answer({"request_id": "r-1", "status": "COMPLETED", "error": "x", "error_type": "client_cancelled"})
    )
    assert (told.state, told.fetch) == ("cancelled", False)
    body = {"request_id": "r-1", "status": "ERROR", "error": "x", "error_type": "client_cancelled", "payload": None}
    assert CODEC.webhook({}, encode(body)).state == "cancelled"


@pytest.mark.parametrize("model", ["m", "../x/y", "a/../b", "a//b", "a/b?c", "/a/b", "a/b/"])
def test_a_model_that_is_no_app(model: str) -> None:
    with pytest.raises(errors.ConfigurationError, match="app"):
        CODEC.submit(spanwire.Call.chat(model, []), endpoint(URL), row(), None)


def test_it_says_where_to_ask() -> None:
    seen = CODEC.acknowledged(answer(ACKNOWLEDGED))
    assert (seen.state, seen.provider_id) == ("submitted", "r-1")
    known = row(provider_id="r-1", urls=dict(seen.urls), model=CALL.model)
    bare = row(provider_id="r-1", model=CALL.model)
    for job in (known, bare):
        found = [CODEC.status(job, endpoint(URL)), CODEC.result(job, endpoint(URL)), CODEC.cancel(job, endpoint(URL))]
        assert [request and (request.method, request.target) for request in found] == [
            ("GET", "/fal-ai/any-llm/requests/r-1/status"),
            ("GET", "/fal-ai/any-llm/requests/r-1"),
            ("PUT", "/fal-ai/any-llm/requests/r-1/cancel"),
        ]
    elsewhere = row(provider_id="r-1", urls={"result": "https://v3.fal.media/x"})
    request = CODEC.result(elsewhere, endpoint(URL))
    assert request is not None
    assert request.target == "https://v3.fal.media/x"  # whole, for core to allow or not


def test_a_payload_is_the_result() -> None:
    seen = CODEC.webhook({}, hook(payload=completion()))
    assert seen.body is not None
    assert CODEC.reply("chat", seen.body).text == "Hello"  # type: ignore[union-attr]


def test_a_payload_that_could_not_be_sent_is_fetched_and_no_failure() -> None:
    seen = CODEC.webhook({}, hook(payload_error="Response payload is not JSON serializable"))
    assert (seen.state, seen.fetch, seen.body) == ("succeeded", True, None)
    told = CODEC.told(answer({"status": "fine", "output": "Hello"}))
    assert told.state == "succeeded"
    assert told.body is not None
    assert CODEC.reply("chat", told.body).text == '{"status":"fine","output":"Hello"}'  # type: ignore[union-attr]


def test_a_failure() -> None:
    seen = CODEC.webhook({}, hook("ERROR", error="Unexpected status code: 500", payload={"detail": "x"}))
    assert (seen.state, seen.message) == ("failed", "Unexpected status code: 500")
    seen = CODEC.told(answer({**ACKNOWLEDGED, "status": "COMPLETED", "error": "boom", "error_type": "runtime"}))
    assert (seen.state, seen.code, seen.message, seen.fetch) == ("failed", "runtime", "boom", False)
    assert CODEC.told(answer({"detail": "bad"}, 422)).state == "failed"


@pytest.mark.parametrize(
    ("word", "state"), [("IN_QUEUE", "queued"), ("IN_PROGRESS", "running"), ("COMPLETED", "succeeded")]
)
def test_each_status(word: str, state: str) -> None:
    seen = CODEC.told(answer({**ACKNOWLEDGED, "status": word, "metrics": {"inference_time": 1.5}}, 202))
    assert (seen.state, seen.fetch, seen.times.model_s) == (state, word == "COMPLETED", 1.5)


def test_deliveries_are_told_apart_by_their_status() -> None:
    assert CODEC.dedupe({}, hook()) == CODEC.dedupe({}, hook(payload=1)) != CODEC.dedupe({}, hook("ERROR"))


def test_what_is_not_there_any_more_is_lost() -> None:
    assert CODEC.told(answer(b"", 404)).state == "lost"
