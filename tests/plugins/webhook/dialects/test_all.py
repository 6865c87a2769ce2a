"""What holds for every dialect: no bytes crash it, errors are typed, nothing but ids gets into paths."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from spanwire_webhook.dialects import dialects

import spanwire
from spanwire import errors
from spanwire.jobs.contract import TERMINAL, HTTPAnswer, JobCodec, Seen
from tests.plugins.webhook.dialects.shapes import CALL, CALLBACK, answer, encode, endpoint, row

CODECS = {dialect.name: dialect.codec for dialect in dialects()}
NAMES = sorted(CODECS)

#: Words that the schemas look at, so that hypothesis gets deeper than a random name would.
_WORDS = st.sampled_from(
    [
        "id",
        "request_id",
        "type",
        "status",
        "data",
        "output",
        "error",
        "errors",
        "created_at",
        "started_at",
        "completed_at",
        "time",
        "metrics",
        "predict_time",
        "urls",
        "get",
        "code",
        "message",
        "webhook_status",
        "data_removed",
        "queued",
        "running",
        "succeeded",
        "failed",
        "COMPLETED",
        "SUCCEEDED",
        "FAILED",
        "aborted",
        "completed",
        "incomplete",
        "response.completed",
        "job.succeeded",
        "payload",
        "payload_error",
        "OK",
        "ERROR",
        "IN_QUEUE",
        "choices",
        "name",
        "batches/b",
        "metadata",
        "steps",
        "response",
        "interaction.completed",
    ]
)
_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | _WORDS
    | st.sampled_from(["2026-11-30T12:00:00Z", "../../keys", "..", "a/b", 1e300, -1]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_WORDS | st.text(max_size=4), inner, max_size=8),
    max_leaves=20,
)


def _json(value: object) -> bytes:
    import json

    return json.dumps(value).encode("utf-8", "surrogatepass")


_BODIES = st.binary(max_size=60) | _VALUES.map(_json)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_a_codec(name: str) -> None:
    codec = CODECS[name]
    assert isinstance(codec, JobCodec)
    (carried,) = codec.credentials("secret").values()
    assert carried.endswith("secret")


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None)
@given(body=_BODIES)
def test_no_webhook_crashes_it(name: str, body: bytes) -> None:
    codec: JobCodec = CODECS[name]
    key = codec.dedupe({}, body)
    assert key == codec.dedupe({}, body)
    try:
        seen = codec.webhook({}, body)
    except ValueError:
        return
    _check(codec, seen)


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None)
@given(
    body=_BODIES, status=st.sampled_from([200, 201, 202, 204, 301, 400, 401, 404, 409, 410, 422, 429, 500, 503, 504])
)
def test_no_answer_crashes_it(name: str, body: bytes, status: int) -> None:
    codec: JobCodec = CODECS[name]
    given_answer = HTTPAnswer(status, {"retry-after": "7"}, body)
    for ask in (codec.acknowledged, codec.told):
        try:
            seen = ask(given_answer)
        except errors.SpanwireError as error:
            refused: errors.SpanwireError = error
            seen = None
        if seen is None:
            assert status < 300 or (isinstance(refused, errors.ServerError) and refused.status == status)
            continue
        assert 200 <= status < 300 or (ask == codec.told and status in {404, 410, 422})
        _check(codec, seen)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("operation", ["chat", "embeddings"])
@settings(deadline=None)
@given(body=_BODIES)
def test_no_result_crashes_it(name: str, operation: str, body: bytes) -> None:
    try:
        found = CODECS[name].reply(operation, body)
    except errors.SpanwireError:
        return
    if isinstance(found, spanwire.Reply):
        found.text.encode()  # can be written


def _check(codec: JobCodec, seen: Seen) -> None:
    assert seen.body is None or seen.state == "succeeded"
    assert not (seen.body is not None and seen.fetch)
    if seen.state == "failed":
        error = codec.failure(row(state="failed", code=seen.code, message=seen.message))
        assert isinstance(error, errors.ServerError)
        str(error).encode()
    times = seen.times
    for value in (times.queue_s, times.model_s, times.total_s, times.accepted_s, times.finished_s):
        assert value is None or 0 <= value < 1e12
    if seen.provider_id is not None:
        known = row(provider_id=seen.provider_id)
        for request in (codec.status(known, endpoint()), codec.cancel(known, endpoint())):
            if request is not None:
                assert request.target.startswith("/v1/")
                assert ".." not in request.target.split("/")
                assert not set(request.target) & set("?#\r\n ")
    msgspec.json.encode(seen)  # can be kept


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("status", [400, 401, 402, 403, 408, 409, 413, 422, 429, 500, 502, 503, 504])
def test_a_refused_submit_is_the_servers_error(name: str, status: int) -> None:
    with pytest.raises(errors.ServerError) as caught:
        CODECS[name].acknowledged(answer({"detail": "no"}, status, retry_after="3"))
    assert caught.value.status == status
    assert caught.value.retry_after_s == 3
    assert "no" in str(caught.value)
    assert caught.value.retryable == (status in {408, 409, 429, 500, 502, 503, 504})


@pytest.mark.parametrize("name", NAMES)
def test_a_status_that_is_refused_says_nothing_of_the_job(name: str) -> None:
    for status in (401, 403, 429, 500, 503):
        with pytest.raises(errors.ServerError):
            CODECS[name].told(answer(b"", status))


@pytest.mark.parametrize("name", NAMES)
def test_a_page_of_a_proxy_is_no_acknowledgement(name: str) -> None:
    with pytest.raises(errors.ProtocolError):
        CODECS[name].acknowledged(answer(b"<html>welcome</html>"))


@pytest.mark.parametrize("name", NAMES)
def test_before_the_acknowledgement_there_is_nothing_to_ask_for(name: str) -> None:
    assert CODECS[name].status(row(), endpoint()) is None


@pytest.mark.parametrize("name", NAMES)
def test_the_key_is_not_in_the_submit(name: str) -> None:
    request = CODECS[name].submit(replace(CALL, model="o/m"), endpoint(api_key="sk-secret"), row(), CALLBACK)
    assert "sk-secret" not in repr(request)
    assert request.target.startswith("/v1/")


@pytest.mark.parametrize("name", NAMES)
def test_only_a_failure_has_an_error(name: str) -> None:
    for state in TERMINAL - {"failed"}:
        assert CODECS[name].failure(row(state=state)) is None


@pytest.mark.parametrize("name", sorted({*NAMES} - {"openai", "gemini"}))
def test_a_call_that_cannot_be_written_is_refused(name: str) -> None:
    call = spanwire.Call.chat("o/m", [{"role": "user", "content": "x"}], odd=object())
    with pytest.raises(errors.ConfigurationError, match="JSON"):
        CODECS[name].submit(call, endpoint(), row(), CALLBACK)


@pytest.mark.parametrize("name", sorted({*NAMES} - {"openai", "gemini"}))
def test_a_webhook_parameter_in_the_input_stays_the_models(name: str) -> None:
    """The address is the dialect's, wherever the schema has it; a field of the same name in the call is for the model."""
    call = spanwire.Call.chat(
        "o/m", [], webhook="mine", webhook_url="mine", webhook_endpoint="mine", fal_webhook="mine"
    )
    request = CODECS[name].submit(call, endpoint(), row(), CALLBACK)
    body = msgspec.json.decode(request.body)
    inner = body if name == "fal" else body.get("input") or body.get("model_input") or body.get("body")
    assert inner["webhook"] == inner["webhook_url"] == inner["webhook_endpoint"] == "mine"
    outside = {} if inner is body else {name: value for name, value in body.items() if value is not inner}
    assert "mine" not in encode(outside).decode()


@pytest.mark.parametrize(
    "raw",
    [
        b'{"a":1e3}',
        rb'{"a":"\u00e9"}',
        rb'{"a":"x\/y"}',
        b'{"a":12345678901234567890.5}',
        b'{"a":1,"a":2}',
        b'{"a":NaN}',
        rb'{"a":"\ud83d"}',
        b'{"a":"\xff"}',
        b'{"a":' + b"9" * 40 + b"}",
    ],
)
def test_odd_json_in_an_output_is_kept_as_it_came(raw: bytes) -> None:
    body = b'{"id":"p1","status":"succeeded","output":' + raw + b"}"
    codec = CODECS["replicate"]
    seen = codec.webhook({}, body)
    assert seen.state == "succeeded"
    assert seen.body == body
    reply = codec.reply("chat", body)
    assert isinstance(reply, spanwire.Reply)
    assert reply.raw == raw or b"NaN" in raw or b"ud83d" in raw or b"\xff" in raw
    assert reply.text


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "value",
    [b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 100_000 + b"1" + b"}" * 100_000, b"[" * 900 + b"]" * 900, b"9" * 5000],
    ids=["lists", "objects", "some", "number"],
)
def test_what_is_nested_deeply_or_is_huge_crashes_nothing(name: str, value: bytes) -> None:
    codec: JobCodec = CODECS[name]
    fields = ("output", "data", "payload", "error", "errors", "created_at", "metrics", "delayTime", "choices", "id")
    for field in fields:
        for word in (b"succeeded", b"completed", b"COMPLETED", b"OK"):
            body = (
                b'{"request_id":"x","id":"x","status":"%b","type":"response.completed","%b":%b,"output":1,"payload":%b}'
            )
            body %= (word, field.encode(), value, value)
            codec.dedupe({}, body)
            with contextlib.suppress(ValueError):
                _check(codec, codec.webhook({}, body))
            with contextlib.suppress(errors.SpanwireError):
                _check(codec, codec.told(answer(body)))
            with contextlib.suppress(errors.SpanwireError):
                codec.reply("chat", body)
            with contextlib.suppress(errors.SpanwireError):
                codec.reply("embeddings", body)
