from __future__ import annotations

from typing import Any

import pytest
from spanwire_webhook.dialects import BasetenJobs

import spanwire
from spanwire import errors
from tests.plugins.webhook.dialects.shapes import CALL, CALLBACK, answer, completion, encode, endpoint, row, sent

CODEC = BasetenJobs()
URL = "https://model-ab12.api.baseten.co/production"


def hook(**more: Any) -> bytes:
    return encode(
        {
            "request_id": "9f1c",
            "model_id": "m1",
            "deployment_id": "d1",
            "type": "async_request_completed",
            "time": "2026-11-30T12:00:00.000000Z",
            "data": {"text": "café"},
            "errors": [],
            **more,
        }
    )


def status(word: str, **more: Any) -> Any:
    return answer(
        {
            "request_id": "9f1c",
            "status": word,
            "webhook_status": "PENDING",
            "created_at": "2026-11-30T12:00:00Z",
            "status_at": "2026-11-30T12:00:04Z",
            "errors": [],
            **more,
        }
    )


@pytest.mark.parametrize(
    ("url", "submit", "asks"),
    [
        (URL, "/production/async_predict", "/async_request/9f1c"),
        ("https://model-a.api.baseten.co/environments/x", "/environments/x/async_predict", "/async_request/9f1c"),
        ("https://model-a.api.baseten.co/deployment/d", "/deployment/d/async_predict", "/async_request/9f1c"),
        ("https://model-a-prod.api.baseten.co", "/async_predict", "/async_request/9f1c"),
        ("https://chain-a.api.baseten.co/development", "/development/async_run_remote", "/async_request/9f1c"),
        ("http://127.0.0.1:1/baseten/production", "/baseten/production/async_predict", "/baseten/async_request/9f1c"),
    ],
)
def test_where_it_asks(url: str, submit: str, asks: str) -> None:
    request = CODEC.submit(CALL, endpoint(url), row(), CALLBACK)
    assert (request.method, request.target) == ("POST", submit)
    known = row(provider_id="9f1c")
    found, cancel = CODEC.status(known, endpoint(url)), CODEC.cancel(known, endpoint(url))
    assert found is not None
    assert cancel is not None
    assert (found.method, found.target) == ("GET", asks)
    assert (cancel.method, cancel.target) == ("DELETE", asks)
    assert CODEC.result(known, endpoint(url)) is None


def test_the_call_is_the_models_input() -> None:
    request = CODEC.submit(CALL, endpoint(URL), row(), CALLBACK)
    assert sent(request) == {"model_input": {"model": "the-model", **CALL.body}, "webhook_endpoint": CALLBACK}
    assert CODEC.credentials("K") == {"authorization": "Api-Key K"}


def test_options_and_the_deadline() -> None:
    options = {"priority": 2, "retries": {"max_attempts": 1, "initial_delay_ms": 0}, "input": {"text": "{user}"}}
    request = CODEC.submit(CALL, endpoint(URL, options=options), row(created_s=100.0, due_s=3700.0), CALLBACK)
    assert sent(request) == {
        "model_input": {"text": "Hi"},
        "webhook_endpoint": CALLBACK,
        "priority": 2,
        "max_time_in_queue_seconds": 3600,
        "inference_retry_config": {"max_attempts": 1, "initial_delay_ms": 0},
    }
    at_least = CODEC.submit(CALL, endpoint(URL), row(created_s=100.0, due_s=101.0), CALLBACK)
    assert sent(at_least)["max_time_in_queue_seconds"] == 10
    at_most = CODEC.submit(CALL, endpoint(URL), row(created_s=100.0, due_s=1e6), CALLBACK)
    assert sent(at_most)["max_time_in_queue_seconds"] == 259_200


@pytest.mark.parametrize(
    "options",
    [
        {"priority": 3},
        {"priority": True},
        {"max_time_in_queue_s": 9},
        {"retries": {"max_attempts": 11}},
        {"retries": {"attempts": 1}},
        {"retries": 3},
        {"input": "{prompt}"},
    ],
)
def test_a_bad_option_is_named(options: dict[str, Any]) -> None:
    with pytest.raises(errors.ConfigurationError, match=next(iter(options))):
        CODEC.submit(CALL, endpoint(URL, options=options), row(), CALLBACK)


def test_what_cannot_work_is_refused_before_it_is_sent() -> None:
    with pytest.raises(errors.ConfigurationError, match="public URL"):
        CODEC.submit(CALL, endpoint(URL), row(), None)
    with pytest.raises(errors.ConfigurationError, match="https"):
        CODEC.submit(CALL, endpoint(URL), row(), "http://example.com/hook")
    local = CODEC.submit(CALL, endpoint(URL), row(), "http://127.0.0.1:8000/hook")
    assert sent(local)["webhook_endpoint"] == "http://127.0.0.1:8000/hook"
    big = spanwire.Call.chat("m", [{"role": "user", "content": "x" * 262_144}])
    with pytest.raises(errors.ConfigurationError, match="262,144"):
        CODEC.submit(big, endpoint(URL), row(), CALLBACK)


def test_it_is_acknowledged() -> None:
    seen = CODEC.acknowledged(answer({"request_id": "9f1c"}, 202))
    assert (seen.state, seen.provider_id) == ("submitted", "9f1c")


def test_a_webhook_has_the_output() -> None:
    seen = CODEC.webhook({}, hook())
    assert (seen.state, seen.provider_id, seen.times.finished_s) == ("succeeded", "9f1c", 1796040000.0)
    assert seen.body is not None
    reply = CODEC.reply("chat", seen.body)
    assert isinstance(reply, spanwire.Reply)
    assert (reply.text, reply.raw) == ('{"text":"café"}', '{"text":"café"}'.encode())
    done = CODEC.reply("chat", hook(data=completion()))
    assert isinstance(done, spanwire.Reply)
    assert (done.text, done.finish_reason) == ("Hello", "stop")


@pytest.mark.parametrize(
    ("output", "text"),
    [
        ("hi", "hi"),
        (["a", "b"], "ab"),
        (None, ""),
        (3, "3"),
        ([], "[]"),
        ({"a": [1]}, '{"a":[1]}'),
        (["a", 1], '["a",1]'),
    ],
)
def test_any_output_is_a_reply(output: Any, text: str) -> None:
    seen = CODEC.webhook({}, hook(data=output))
    assert seen.state == "succeeded"
    assert seen.body is not None
    assert CODEC.reply("chat", seen.body).text == text  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("output", "vectors"),
    [
        ([[1, 2.5]], [[1.0, 2.5]]),
        ([0.5, 1], [[0.5, 1.0]]),
        ({"embeddings": [[1.0]]}, [[1.0]]),
        ({"embedding": [1.0]}, [[1.0]]),
        ({"data": [{"embedding": [1.0], "index": 0}]}, [[1.0]]),
        ([{"embedding": [1.0]}], [[1.0]]),
    ],
)
def test_vectors_in_the_forms_that_models_give(output: Any, vectors: list[list[float]]) -> None:
    found = CODEC.reply("embeddings", hook(data=output))
    assert isinstance(found, spanwire.Embeddings)
    assert found.vectors == vectors


@pytest.mark.parametrize("output", [None, "text", [], {}, {"embeddings": "x"}, [["a"]], [[True]]])
def test_what_is_no_vector(output: Any) -> None:
    with pytest.raises(errors.ProtocolError):
        CODEC.reply("embeddings", hook(data=output))


@pytest.mark.parametrize(
    ("code", "kind", "retryable"),
    [
        ("MODEL_NOT_READY", errors.BadRequest, False),
        ("MODEL_DOES_NOT_EXIST", errors.BadRequest, False),
        ("MODEL_INVALID_INPUT", errors.BadRequest, False),
        ("MODEL_PREDICT_ERROR", errors.ServerError, True),
        ("MODEL_UNAVAILABLE", errors.Overloaded, True),
        ("MODEL_PREDICT_TIMEOUT", errors.ServerError, True),
        ("MODEL_SOMETHING", errors.ServerError, False),
    ],
)
def test_each_error(code: str, kind: type[errors.ServerError], retryable: bool) -> None:
    seen = CODEC.webhook({}, hook(data=None, errors=[{"code": code, "message": "words"}]))
    assert (seen.state, seen.code, seen.message, seen.body) == ("failed", code, "words", None)
    error = CODEC.failure(row(state="failed", code=seen.code, message=seen.message))
    assert type(error) is kind
    assert error is not None
    assert (error.code, error.status, error.retryable, error.message) == (code, None, retryable, "words")


def test_output_beside_errors_is_a_failure() -> None:
    assert CODEC.webhook({}, hook(errors=["odd"])).state == "failed"
    assert CODEC.webhook({}, hook(errors=[{}])).state == "failed"


@pytest.mark.parametrize(
    ("word", "webhook", "state"),
    [
        ("QUEUED", "PENDING", "queued"),
        ("IN_PROGRESS", "PENDING", "running"),
        ("SUCCEEDED", "PENDING", "running"),  # the output is on its way
        ("SUCCEEDED", "SUCCEEDED", "running"),  # somebody took it: perhaps our receiver, a moment ago
        ("SUCCEEDED", "FAILED", "lost"),
        ("SUCCEEDED", "CANCELED", "lost"),
        ("SUCCEEDED", "NO_WEBHOOK_PROVIDED", "lost"),
        ("WEBHOOK_FAILED", "FAILED", "lost"),
        ("FAILED", "SUCCEEDED", "failed"),
        ("EXPIRED", "CANCELED", "expired"),
        ("CANCELED", "CANCELED", "cancelled"),
        ("PAUSED", "PENDING", None),
    ],
)
def test_each_status(word: str, webhook: str, state: str | None) -> None:
    seen = CODEC.told(status(word, webhook_status=webhook))
    assert (seen.state, seen.provider_id, seen.body) == (state, "9f1c", None)
    assert seen.times.total_s == (4.0 if word in {"SUCCEEDED", "FAILED", "WEBHOOK_FAILED"} else None)
    if state == "lost":
        assert seen.message is not None
        assert webhook in seen.message


def test_the_errors_of_an_undelivered_failure_are_known_all_the_same() -> None:
    seen = CODEC.told(status("WEBHOOK_FAILED", errors=[{"code": "MODEL_PREDICT_ERROR", "message": "x"}]))
    assert (seen.state, seen.code, seen.message) == ("failed", "MODEL_PREDICT_ERROR", "x")


def test_after_an_hour_the_status_is_gone_and_the_output_was_never_there() -> None:
    assert CODEC.told(answer({"error": "not found"}, 404)).state == "lost"


def test_the_request_is_what_deliveries_have_in_common() -> None:
    assert CODEC.dedupe({}, hook()) == CODEC.dedupe({}, hook(data=1)) == "9f1c"
    assert CODEC.dedupe({"x-baseten-request-id": "9f1c"}, b"") == "9f1c"
    assert CODEC.webhook({"x-baseten-request-id": "h1"}, hook(request_id=None)).provider_id == "h1"


@pytest.mark.parametrize("body", [b"", b"null", b'{"request_id":"x"}'])
def test_a_webhook_that_is_none(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"body|webhook"):
        CODEC.webhook({}, body)
