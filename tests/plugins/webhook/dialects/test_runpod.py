from __future__ import annotations

import pytest
from spanwire_webhook.dialects import RunPodJobs

from spanwire import errors
from tests.plugins.webhook.dialects.shapes import CALL, CALLBACK, answer, completion, encode, endpoint, row, sent

CODEC = RunPodJobs()
URL = "https://api.runpod.ai/v2/abc"


def test_a_submit() -> None:
    request = CODEC.submit(CALL, endpoint(URL), row(created_s=100.0, due_s=160.0), CALLBACK)
    assert (request.method, request.target) == ("POST", "/v2/abc/run")
    assert sent(request) == {
        "input": {"model": "the-model", **CALL.body},
        "webhook": CALLBACK,
        "policy": {"ttl": 60_000},
    }
    options = {"execution_timeout_s": 30, "low_priority": True, "input": {"openai_input": {"messages": "{messages}"}}}
    told = sent(CODEC.submit(CALL, endpoint(URL, options=options), row(), None))
    assert told == {
        "input": {"openai_input": {"messages": CALL.body["messages"]}},
        "policy": {"executionTimeout": 30_000, "lowPriority": True},
    }
    with pytest.raises(errors.ConfigurationError, match="low_priority"):
        CODEC.submit(CALL, endpoint(URL, options={"low_priority": 1}), row(), None)


@pytest.mark.parametrize(
    ("word", "state"),
    [
        ("IN_QUEUE", "queued"),
        ("IN_PROGRESS", "running"),
        ("RUNNING", "running"),
        ("COMPLETED", "succeeded"),
        ("FAILED", "failed"),
        ("CANCELLED", "cancelled"),
        ("TIMED_OUT", "expired"),
        ("DREAMING", None),
    ],
)
def test_each_status(word: str, state: str | None) -> None:
    body = {"id": "j-1", "status": word, "delayTime": 1500, "executionTime": 250}
    seen = CODEC.told(answer(body))
    assert (seen.state, seen.provider_id) == (state, "j-1")
    assert CODEC.webhook({}, encode(body)) == seen
    if state in {"queued", "running"}:
        assert (seen.times.queue_s, seen.times.model_s) == (None, None)
    else:
        assert (seen.times.queue_s, seen.times.model_s, seen.times.total_s) == (1.5, 0.25, 1.75)


def test_after_its_ttl_it_is_expired_and_not_asked_for_again() -> None:
    assert CODEC.told(answer(b"", 404)).state == "expired"


def test_a_failure_and_a_result() -> None:
    seen = CODEC.webhook({}, encode({"id": "j-1", "status": "FAILED", "error": "Traceback ..."}))
    assert (seen.state, seen.code, seen.message) == ("failed", "FAILED", "Traceback ...")
    body = encode({"id": "j-1", "status": "COMPLETED", "output": [completion("Hi")]})
    assert CODEC.webhook({}, body).body == body
    assert CODEC.reply("chat", body).text == "Hi"  # type: ignore[union-attr]


def test_an_empty_body_with_a_right_status_is_no_result() -> None:
    with pytest.raises(ValueError, match="body"):
        CODEC.webhook({}, b"")


def test_where_it_asks() -> None:
    known = row(provider_id="j-1")
    status, cancel = CODEC.status(known, endpoint(URL)), CODEC.cancel(known, endpoint(URL))
    assert status is not None
    assert cancel is not None
    assert (status.target, cancel.method, cancel.target) == ("/v2/abc/status/j-1", "POST", "/v2/abc/cancel/j-1")
