from __future__ import annotations

from typing import Any

import pytest
from spanwire_webhook.dialects import CogJobs, ReplicateJobs

import spanwire
from spanwire import errors
from tests.plugins.webhook.dialects.shapes import CALL, CALLBACK, answer, encode, endpoint, row, sent

REPLICATE, COG = ReplicateJobs(), CogJobs()
OWN = "0197d0c0-1234-7abc-8def-0123456789ab.1"


def prediction(status: str = "succeeded", **more: Any) -> dict[str, Any]:
    return {
        "id": "gm3qorzdhgbfurvjtvhg6dckhu",
        "version": "v",
        "status": status,
        "input": {"prompt": "Hi"},
        "output": None,
        "error": None,
        "logs": "",
        "created_at": "2026-11-30T12:00:00.123456789Z",
        "started_at": "2026-11-30T12:00:02.123Z",
        "completed_at": None,
        "urls": {"get": "https://api.replicate.com/v1/predictions/gm3", "cancel": "https://evil.example/cancel"},
        **more,
    }


DONE = prediction(
    output=["Hel", "lo"],
    completed_at="2026-11-30T12:00:05.123Z",
    metrics={"predict_time": 2.5, "total_time": 5.0},
)


def test_a_submit() -> None:
    request = REPLICATE.submit(CALL, endpoint("https://api.replicate.com/v1"), row(), CALLBACK)
    assert (request.method, request.target) == ("POST", "/v1/predictions")
    assert sent(request) == {
        "version": "the-model",
        "input": dict(CALL.body),
        "webhook": CALLBACK,
        "webhook_events_filter": ["start", "completed"],
    }
    assert "prefer" not in request.headers
    assert sent(REPLICATE.submit(CALL, endpoint(), row(), None)) == {"version": "the-model", "input": dict(CALL.body)}


def test_the_input_by_a_template() -> None:
    template = {
        "prompt": "{prompt}",
        "system_prompt": "{system}",
        "max_new_tokens": "{max_tokens}",
        "top_p": "{top_p}",
        "note": "{user}, by {model} with {max_tokens}{top_p}",
        "rest": [{"fixed": 1}, "{top_p}", "{messages}"],
    }
    request = REPLICATE.submit(CALL, endpoint(options={"input": template}), row(), None)
    assert sent(request)["input"] == {
        "prompt": "Be short.\nHi",
        "system_prompt": "Be short.",
        "max_new_tokens": 5,
        "note": "Hi, by the-model with 5",
        "rest": [{"fixed": 1}, CALL.body["messages"]],
    }


def test_it_is_acknowledged() -> None:
    seen = REPLICATE.acknowledged(answer(prediction("starting", started_at=None), 201))
    assert (seen.state, seen.provider_id) == ("submitted", "gm3qorzdhgbfurvjtvhg6dckhu")
    assert seen.urls["status"] == "https://api.replicate.com/v1/predictions/gm3"
    assert REPLICATE.acknowledged(answer(DONE, 201)).state == "succeeded"


def test_addresses_in_answers_are_data_and_not_asked() -> None:
    known = row(provider_id="gm3", urls={"status": "http://169.254.169.254/", "cancel": "https://evil.example/"})
    for request, path in (
        (REPLICATE.status(known, endpoint()), "/v1/predictions/gm3"),
        (REPLICATE.result(known, endpoint()), "/v1/predictions/gm3"),
        (REPLICATE.cancel(known, endpoint()), "/v1/predictions/gm3/cancel"),
    ):
        assert request is not None
        assert request.target == path


@pytest.mark.parametrize(
    ("word", "state"),
    [
        ("starting", "queued"),
        ("processing", "running"),
        ("succeeded", "succeeded"),
        ("failed", "failed"),
        ("canceled", "cancelled"),
        ("aborted", None),
        ("hatching", None),
    ],
)
def test_each_status(word: str, state: str | None) -> None:
    assert REPLICATE.webhook({}, encode(prediction(word))).state == state
    assert REPLICATE.told(answer(prediction(word))).state == state


def test_aborted_is_terminal_with_an_end_an_output_or_an_error() -> None:
    for more in ({"completed_at": "2026-11-30T12:00:05Z"}, {"output": ["a part"]}, {"error": "deadline"}):
        seen = REPLICATE.webhook({}, encode(prediction("aborted", **more)))
        assert (seen.state, seen.code, seen.body) == ("failed", "aborted", None)
    assert REPLICATE.webhook({}, encode(prediction("finished", output="x"))).state == "succeeded"


def test_the_result_and_its_times() -> None:
    seen = REPLICATE.webhook({}, encode(DONE))
    assert seen.body is not None
    reply = REPLICATE.reply("chat", seen.body)
    assert isinstance(reply, spanwire.Reply)
    assert (reply.text, reply.raw) == ("Hello", b'["Hel","lo"]')
    times = seen.times
    assert times.queue_s == pytest.approx(1.999544, abs=1e-5)
    assert (times.model_s, times.total_s) == (2.5, 5.0)
    assert times.accepted_s == pytest.approx(1796040000.123456)


def test_without_metrics_the_durations_are_between_the_times() -> None:
    times = REPLICATE.told(answer({**DONE, "metrics": None})).times
    assert times.model_s == pytest.approx(3.0)
    assert times.total_s == pytest.approx(4.999544, abs=1e-5)


def test_a_failure() -> None:
    seen = REPLICATE.webhook({}, encode(prediction("failed", error="CUDA out of memory")))
    assert (seen.state, seen.code, seen.message) == ("failed", "failed", "CUDA out of memory")
    error = REPLICATE.failure(row(state="failed", code=seen.code, message=seen.message))
    assert error is not None
    assert str(error) == "CUDA out of memory"
    odd = REPLICATE.webhook({}, encode(prediction("failed", error={"detail": 1})))
    assert odd.message == '{"detail":1}'


def test_what_was_removed_is_lost() -> None:
    assert REPLICATE.told(answer(prediction(data_removed=True))).state == "lost"
    assert REPLICATE.told(answer(prediction())).state == "succeeded"
    assert REPLICATE.told(answer({"detail": "not found"}, 404)).state == "lost"


def test_a_put_of_cog_has_our_id() -> None:
    assert COG.resubmits
    request = COG.submit(CALL, endpoint("http://127.0.0.1:5000"), row(), "http://127.0.0.1:1/hook")
    assert (request.method, request.target) == ("PUT", f"/predictions/{OWN}")
    assert request.headers["prefer"] == "respond-async"
    assert sent(request)["webhook"] == "http://127.0.0.1:1/hook"
    again = COG.submit(CALL, endpoint("http://127.0.0.1:5000"), row(), "http://127.0.0.1:1/hook")
    assert again == request
    with pytest.raises(errors.ConfigurationError, match="public URL"):
        COG.submit(CALL, endpoint(), row(), None)


@pytest.mark.parametrize("body", [{}, {"status": "starting"}, {"id": OWN, "status": "starting"}])
def test_cog_acknowledges_with_as_much_as_it_likes(body: dict[str, Any]) -> None:
    seen = COG.acknowledged(answer(body, 202))
    assert (seen.state, seen.provider_id) == ("submitted", body.get("id"))


def test_a_start_of_cog_is_the_beginning_of_the_work() -> None:
    seen = COG.webhook({}, encode({"id": OWN, "status": "starting", "input": {}}))
    assert (seen.state, seen.times.queue_s) == ("running", None)
    done = COG.webhook({}, encode({**DONE, "urls": {"get": "http://evil.example/"}}))
    assert (done.state, done.urls) == ("succeeded", {})
    assert (done.times.accepted_s, done.times.queue_s, done.times.model_s) == (None, None, 2.5)


def test_cog_has_no_status_and_can_be_cancelled_by_our_id() -> None:
    assert COG.status(row(provider_id="x"), endpoint()) is None
    assert COG.result(row(provider_id="x"), endpoint()) is None
    request = COG.cancel(row(), endpoint("http://127.0.0.1:5000"))
    assert request is not None
    assert (request.method, request.target) == ("POST", f"/predictions/{OWN}/cancel")


def test_deliveries_of_cog_are_told_apart_by_what_is_in_them() -> None:
    start, done = encode(prediction("processing")), encode(DONE)
    assert COG.dedupe({}, start) == COG.dedupe({}, start) != COG.dedupe({}, done)
    assert REPLICATE.dedupe({"webhook-id": "msg_1"}, start) == "msg_1"
