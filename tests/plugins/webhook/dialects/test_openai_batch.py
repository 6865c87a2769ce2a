from __future__ import annotations

import base64
import contextlib
import email.policy
import json
import struct
from email.parser import BytesParser
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import BaseModel
from openai.types import Batch, webhooks
from spanwire_webhook.dialects import OpenAIJobs

import spanwire
from spanwire import errors
from spanwire.calls import BatchReply
from spanwire.jobs.contract import BatchCodec, HTTPAnswer, HTTPRequest, JobRow, Seeks, Seen, Steps
from spanwire.testing.responses_events import whole_response
from spanwire.testing.script import Script
from tests.plugins.webhook.dialects.shapes import answer, completion, encode, endpoint, row, sent

CODEC = OpenAIJobs()
NAMES = ["a", "b", "c"]
CALLS = {name: spanwire.Call.chat("m", [{"role": "user", "content": f"say {name}"}], max_tokens=5) for name in NAMES}
CALL = spanwire.Call.batch(CALLS)
EVENTS: dict[str, type[BaseModel]] = {
    "completed": webhooks.BatchCompletedWebhookEvent,
    "failed": webhooks.BatchFailedWebhookEvent,
    "expired": webhooks.BatchExpiredWebhookEvent,
    "cancelled": webhooks.BatchCancelledWebhookEvent,
}


def job(**more: Any) -> JobRow:
    return row(**{"operation": "batch", "provider_id": "batch_1", "created_s": 1796040000.0, **more})


def batch(status: str = "in_progress", **more: Any) -> dict[str, Any]:
    made = {
        "id": "batch_1",
        "object": "batch",
        "endpoint": "/v1/chat/completions",
        "input_file_id": "file-in",
        "completion_window": "24h",
        "status": status,
        "created_at": 1796040000,
        "metadata": {"spanwire_job": "0197d0c0-1234-7abc-8def-0123456789ab.1"},
        **more,
    }
    return Batch.model_validate(made, strict=True).model_dump()  # with all that the SDK knows, as null


def form(request: HTTPRequest) -> dict[str, tuple[str | None, bytes]]:
    """As the standard library reads it."""
    head = f"Content-Type: {request.headers['content-type']}\r\n\r\n".encode()
    message = BytesParser(policy=email.policy.HTTP).parsebytes(head + request.body)
    found = {}
    for part in message.walk():
        name = part.get_param("name", header="content-disposition")
        content = part.get_payload(decode=True)
        if isinstance(name, str) and isinstance(content, bytes):
            found[name] = (part.get_filename(), content)
    return found


def lines(request: HTTPRequest) -> list[dict[str, Any]]:
    return [json.loads(line) for line in form(request)["file"][1].splitlines()]


# --- the submit ---------------------------------------------------------------------------------------------------------


def test_it_is_a_codec_of_batches() -> None:
    assert isinstance(CODEC, BatchCodec)
    assert isinstance(CODEC, Steps)
    assert isinstance(CODEC, Seeks)
    assert CODEC.steps(CALL) == 2
    assert CODEC.steps(CALLS["a"]) == 1


def test_the_file_is_uploaded_first() -> None:
    request = CODEC.submit(CALL, endpoint(), job(), None)
    assert (request.method, request.target) == ("POST", "/v1/files")
    fields = form(request)
    assert fields.keys() == {"purpose", "file"}
    assert fields["purpose"][1] == b"batch"
    assert fields["file"][0] == "0197d0c0-1234-7abc-8def-0123456789ab.1.jsonl"
    assert lines(request) == [
        {
            "custom_id": name,
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "m", "messages": [{"role": "user", "content": f"say {name}"}], "max_tokens": 5},
        }
        for name in NAMES
    ]


def test_the_batch_is_made_of_it() -> None:
    known = job(trace={"traceparent": "00-a-b-01", "baggage": "x"})
    request = CODEC.follow(CALL, endpoint(), known, None, [answer({"id": "file-1", "object": "file"})])
    assert (request.method, request.target) == ("POST", "/v1/batches")
    assert sent(request) == {
        "input_file_id": "file-1",
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
        "metadata": {"spanwire_job": f"{known.id}.1", "traceparent": "00-a-b-01"},
    }


@pytest.mark.parametrize(
    ("given_answer", "error"),
    [
        (answer({"error": {"message": "no"}}, 401), errors.AuthenticationFailed),
        (answer(b"", 503), errors.Overloaded),
        (answer({"object": "file"}), errors.ProtocolError),
        (answer(b"<html>"), errors.ProtocolError),
    ],
)
def test_an_upload_that_was_not_taken(given_answer: HTTPAnswer, error: type[Exception]) -> None:
    with pytest.raises(error):
        CODEC.follow(CALL, endpoint(), job(), None, [given_answer])


def test_chat_calls_may_go_to_responses() -> None:
    there = endpoint(options={"batch_endpoint": "responses"})
    first, *_ = lines(CODEC.submit(CALL, there, job(), None))
    assert first["url"] == "/v1/responses"
    assert first["body"]["max_output_tokens"] == 5
    assert first["body"]["store"] is False
    assert sent(CODEC.follow(CALL, there, job(), None, [answer({"id": "f"})]))["endpoint"] == "/v1/responses"


def test_embeddings_come_packed_unless_they_are_asked_for_otherwise() -> None:
    call = spanwire.Call.batch(
        {
            "x": spanwire.Call.embeddings("e", ["t"]),
            "y": spanwire.Call.embeddings("e", "t", encoding_format="float"),
        }
    )
    first, second = lines(CODEC.submit(call, endpoint(), job(), None))
    assert first["url"] == "/v1/embeddings"
    assert first["body"] == {"model": "e", "input": ["t"], "encoding_format": "base64"}
    assert second["body"]["encoding_format"] == "float"


def test_files_may_be_kept_for_less() -> None:
    there = endpoint(options={"keep_files_s": 3600})
    fields = form(CODEC.submit(CALL, there, job(), None))
    assert fields["expires_after[anchor]"][1] == b"created_at"
    assert fields["expires_after[seconds]"][1] == b"90000"  # the batch needs it for a day
    made = sent(CODEC.follow(CALL, there, job(), None, [answer({"id": "f"})]))
    assert made["output_expires_after"] == {"anchor": "created_at", "seconds": 3600}


@pytest.mark.parametrize(
    ("call", "options", "words"),
    [
        (CALL, {"batch_endpoint": "completions"}, "batch_endpoint"),
        (CALL, {"keep_files_s": 60}, "keep_files_s"),
        (spanwire.Call("batch", "m", {"operation": "image", "requests": []}), {}, "image"),
        (spanwire.Call.batch({"no": spanwire.Call.chat("m", [], stop=["x"])}), {"batch_endpoint": "responses"}, "'no'"),
        (spanwire.Call.batch({"no": spanwire.Call.chat("m", [], user=object())}), {}, "'no'"),
        (spanwire.Call.batch({str(n): CALLS["a"] for n in range(50_001)}), {}, "50,001 calls"),
        (
            spanwire.Call.batch({str(n): spanwire.Call.embeddings("e", ["t"] * 2048) for n in range(25)}),
            {},
            "51,200 texts",
        ),
        (
            spanwire.Call.batch({str(n): spanwire.Call.embeddings("e", "t" * 1_000_000) for n in range(200)}),
            {},
            "200,000,000",
        ),
    ],
)
def test_what_it_cannot_take_is_refused(call: spanwire.Call, options: dict[str, Any], words: str) -> None:
    with pytest.raises(errors.ConfigurationError, match=words):
        CODEC.submit(call, endpoint(options=options), job(), None)


# --- what is said of it -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", sorted(EVENTS))
def test_each_webhook(word: str) -> None:
    raw = {"object": "event", "id": "evt_1", "type": f"batch.{word}", "created_at": 1, "data": {"id": "batch_1"}}
    seen = CODEC.webhook({}, EVENTS[word].model_validate(raw).model_dump_json().encode())
    assert (seen.state, seen.provider_id) == ("succeeded" if word == "completed" else word, "batch_1")
    assert seen.fetch
    assert seen.body is None


def test_a_webhook_of_no_end_says_nothing() -> None:
    seen = CODEC.webhook({}, encode({"type": "batch.napping", "data": {"id": "batch_1"}}))
    assert (seen.state, seen.fetch) == (None, False)


@pytest.mark.parametrize(
    ("word", "more", "state", "fetch"),
    [
        ("validating", {}, "queued", False),
        ("in_progress", {"in_progress_at": 1796040005}, "running", False),
        ("finalizing", {"output_file_id": "file-o"}, "running", False),
        ("cancelling", {}, "running", False),
        ("completed", {"output_file_id": "file-o", "completed_at": 1796040100}, "succeeded", True),
        ("completed", {"error_file_id": "file-e"}, "succeeded", True),
        ("failed", {}, "failed", False),
        ("expired", {"error_file_id": "file-e"}, "expired", False),
        ("expired", {"output_file_id": "file-o"}, "expired", True),
        ("cancelled", {"output_file_id": "file-o"}, "cancelled", True),
        ("cancelled", {}, "cancelled", False),
    ],
)
def test_each_status(word: str, more: dict[str, Any], state: str, fetch: bool) -> None:
    body = batch(word, **more)
    for seen in (CODEC.told(answer(body)), CODEC.acknowledged(answer(body))):
        said = seen.state if seen.state != "submitted" else state
        assert (said, seen.fetch, seen.body, seen.provider_id) == (state, fetch, None, "batch_1")
        files = {name: more[f"{name}_id"] for name in ("output_file", "error_file") if f"{name}_id" in more}
        assert seen.urls == (files if state not in {"queued", "running"} else {})


def test_a_status_that_nobody_knows_is_judged() -> None:
    assert CODEC.told(answer({**batch(), "status": "napping"})).state is None
    assert CODEC.told(answer({**batch(), "status": "done", "output_file_id": "f"})).state == "succeeded"


def test_its_times_are_those_of_one_clock() -> None:
    times = {"in_progress_at": 1796040010, "finalizing_at": 1796040090, "completed_at": 1796040100}
    seen = CODEC.told(answer(batch("completed", **times)))
    assert (seen.times.queue_s, seen.times.model_s, seen.times.total_s) == (10, 90, 100)


def test_a_file_that_is_not_valid_is_told_by_its_lines() -> None:
    wrong = [
        {"code": "duplicate_custom_id", "line": number, "message": "Twice.", "param": None, "object": "error"}
        for number in range(1, 9)
    ]
    seen = CODEC.told(answer(batch("failed", errors={"object": "list", "data": wrong})))
    assert (seen.state, seen.code) == ("failed", "duplicate_custom_id")
    assert seen.message is not None
    assert seen.message.startswith("line 1: Twice.; line 2: Twice.;")
    assert seen.message.endswith("and 3 more")
    error = CODEC.failure(job(state="failed", code=seen.code, message=seen.message))
    assert isinstance(error, errors.BadRequest)
    assert not error.retryable


def test_a_queue_that_is_full_is_another_matter() -> None:
    wrong = [{"code": "token_limit_exceeded", "line": None, "message": "Enqueued token limit reached.", "param": None}]
    seen = CODEC.told(answer(batch("failed", errors={"data": wrong})))
    error = CODEC.failure(job(state="failed", code=seen.code, message=seen.message))
    assert isinstance(error, errors.RateLimited)
    assert error.retryable
    assert str(error) == "Enqueued token limit reached."


def test_where_it_is_asked_and_cancelled() -> None:
    for request, method, target in (
        (CODEC.status(job(), endpoint()), "GET", "/v1/batches/batch_1"),
        (CODEC.result(job(), endpoint()), "GET", "/v1/batches/batch_1"),
        (CODEC.cancel(job(), endpoint()), "POST", "/v1/batches/batch_1/cancel"),
    ):
        assert request is not None
        assert (request.method, request.target) == (method, target)
    assert CODEC.cancel(job(provider_id=None), endpoint()) is None


# --- results ------------------------------------------------------------------------------------------------------------


def line(name: str, body: Any = None, status: int = 200, error: Any = None) -> bytes:
    response = None if body is None else {"status_code": status, "request_id": "req_1", "body": body}
    return encode({"id": f"batch_req_{name}", "custom_id": name, "response": response, "error": error})


def read(*output: bytes, refused: tuple[bytes, ...] = (), ended: str = "succeeded", names: list[str] = NAMES) -> Any:
    known = job(urls={"output_file": "file-o", "error_file": "file-e"})
    answers = [answer(b"\n".join([*output, b""])), answer(b"\n".join([*refused, b""]))]
    seen = CODEC.fetched(known, Seen(state=ended, fetch=True), names, answers)  # type: ignore[arg-type]
    assert seen.state == "succeeded"
    assert not seen.fetch
    assert seen.body is not None
    return CODEC.replies(seen.body).items


def test_its_files_are_asked_for() -> None:
    both = CODEC.fetches(job(urls={"error_file": "file-e", "output_file": "file-o"}), endpoint())
    assert [request.target for request in both] == ["/v1/files/file-o/content", "/v1/files/file-e/content"]
    assert all(request.most_bytes == 2**30 for request in both)
    assert CODEC.fetches(job(), endpoint()) == []


def test_rows_are_found_by_their_ids_in_any_order() -> None:
    items = read(line("c", completion("C")), line("a", completion("A")), line("b", completion("B")))
    assert [(name, item.text) for name, item in items.items()] == [("a", "A"), ("b", "B"), ("c", "C")]
    assert items["a"].headers == {"x-request-id": "req_1"}
    assert items["a"].usage.total_tokens == 4


def test_each_shape_of_an_answer() -> None:
    response = whole_response(Script.say("Hello"), {"model": "m"})
    packed = base64.b64encode(struct.pack("<2f", 0.5, -1.0)).decode()
    vectors = {"object": "list", "model": "e", "data": [{"object": "embedding", "index": 0, "embedding": packed}]}
    items = read(line("a", response), line("b", vectors), line("c", completion()))
    assert items["a"].text == "Hello"
    assert items["b"].vectors == [[0.5, -1.0]]
    assert items["c"].text == "Hello"


@pytest.mark.parametrize(
    ("said", "error", "words"),
    [
        (line("b", {"error": {"message": "too long", "code": "c"}}, 400), errors.BadRequest, "too long"),
        (line("b", {"error": {"message": "slow"}}, 429), errors.RateLimited, "slow"),
        (line("b", {"detail": "oh"}, 500), errors.ServerError, "oh"),
        (line("b", "text", 503), errors.Overloaded, "text"),
        (line("b", error={"code": "batch_expired", "message": "It expired."}), errors.JobExpired, "It expired"),
        (line("b", error={"code": "batch_cancelled", "message": None}), errors.JobCancelled, "not answered"),
        (line("b", error={"code": "other", "message": "Hm."}), errors.ServerError, "Hm"),
        (line("b", error="words"), errors.ServerError, "words"),
        (line("b"), errors.ProtocolError, "neither"),
        (line("b", {"choices": "no"}), errors.ProtocolError, ""),
        (line("b", [1]), errors.ProtocolError, "cannot be read"),
        (line("b", {"object": "list", "data": []}), spanwire.Embeddings, ""),
        (b'{"custom_id": "b", "response": ', errors.ProtocolError, "1 lines that cannot be read"),
        (b"[]", errors.ProtocolError, "1 lines that cannot be read"),
        (line(""), errors.ProtocolError, "1 lines that cannot be read"),
        (line("nobody's", completion()), errors.JobLost, "no row"),
        (b"", errors.JobLost, "no row"),
    ],
)
def test_one_rows_trouble_is_its_own(said: bytes, error: type[Any], words: str) -> None:
    for items in (
        read(line("a", completion()), said, line("c", completion())),
        read(line("a", completion()), line("c", completion()), refused=(said,)),
    ):
        assert list(items) == NAMES
        assert isinstance(items["a"], spanwire.Reply)
        assert isinstance(items["c"], spanwire.Reply)
        assert isinstance(items["b"], error)
        assert words in str(items["b"])


def test_of_two_rows_of_a_call_the_answer_counts() -> None:
    refused = (line("a", {"error": "no"}, 500), line("b", {"error": "no"}, 500), line("b", {"error": "again"}, 400))
    items = read(line("a", completion("first")), line("a", completion("second")), refused=refused)
    assert items["a"].text == "first"
    assert items["b"].status == 500
    late = read(line("a", {"error": "no"}, 500), line("a", completion("at last")))
    assert late["a"].text == "at last"


@pytest.mark.parametrize(("ended", "error"), [("expired", errors.JobExpired), ("cancelled", errors.JobCancelled)])
def test_an_end_before_its_time_keeps_what_was_answered(ended: Any, error: type[Exception]) -> None:
    items = read(line("b", completion()), ended=ended)
    assert isinstance(items["b"], spanwire.Reply)
    assert isinstance(items["a"], error)
    known = job(urls={"output_file": "file-o"})
    told = Seen(state=ended, fetch=True, message="it was so")
    seen = CODEC.fetched(known, told, NAMES, [answer(line("b", completion()))])
    assert (seen.state, seen.code) == ("succeeded", f"batch_{ended}")
    nothing = CODEC.fetched(known, told, NAMES, [answer(b"\n")])
    assert (nothing.state, nothing.body, nothing.fetch, nothing.message) == (ended, None, False, "it was so")


def test_without_the_names_there_is_what_is_there() -> None:
    items = read(line("x", completion()), refused=(line("y", {"error": "no"}, 400),), names=[])
    assert sorted(items) == ["x", "y"]


def test_files_that_are_gone() -> None:
    known = job(urls={"output_file": "file-o", "error_file": "file-e"})
    told = Seen(state="succeeded", fetch=True)
    gone = CODEC.fetched(known, told, NAMES, [answer(b"", 404), answer(b"")])
    assert (gone.state, gone.body, gone.fetch) == ("lost", None, False)
    half = CODEC.fetched(known, told, NAMES, [answer(line("a", completion())), answer(b"", 404)])
    assert half.body is not None
    assert isinstance(CODEC.replies(half.body).items["b"], errors.JobLost)
    for status in (401, 429, 500, 503):
        with pytest.raises(errors.ServerError):
            CODEC.fetched(known, told, NAMES, [answer(b"", status), answer(b"")])


def test_a_result_of_something_else_is_refused() -> None:
    for body in (b"", b"{}", b"no", line("a", completion())):
        with pytest.raises(errors.ProtocolError):
            CODEC.replies(body)


# --- looking for one ----------------------------------------------------------------------------------------------------


def page(*batches: dict[str, Any], more: bool = False) -> HTTPAnswer:
    return answer({"object": "list", "data": list(batches), "has_more": more})


def other(number: int, **more: Any) -> dict[str, Any]:
    return {**batch(), "id": f"batch_{number}", "metadata": None, **more}


def test_the_list_is_read_until_it_is_found() -> None:
    known = job(provider_id=None)
    first = CODEC.seek(known, endpoint(), [])
    assert first is not None
    assert first.target == "/v1/batches?limit=100"
    pages = [page(other(9), other(8), more=True)]
    second = CODEC.seek(known, endpoint(), pages)
    assert second is not None
    assert second.target == "/v1/batches?limit=100&after=batch_8"
    assert CODEC.sought(known, pages) is None
    pages.append(page(other(7), batch(), more=True))
    assert CODEC.seek(known, endpoint(), pages) is None
    seen = CODEC.sought(known, pages)
    assert seen is not None
    assert (seen.state, seen.provider_id) == ("submitted", "batch_1")


def test_it_is_not_looked_for_for_ever() -> None:
    known = job(provider_id=None)
    assert CODEC.seek(known, endpoint(), [page(other(9))]) is None
    old = other(9, created_at=1796040000 - 4000)
    assert CODEC.seek(known, endpoint(), [page(old, more=True)]) is None
    assert CODEC.sought(known, [page({**batch(), "created_at": 1796040000 - 4000})]) is None
    assert CODEC.seek(known, endpoint(), [page(more=True)]) is None
    assert CODEC.seek(known, endpoint(), [page(other(9), more=True)] * 100) is None
    assert CODEC.seek(job(operation="chat"), endpoint(), []) is None
    with pytest.raises(errors.Overloaded):
        CODEC.seek(known, endpoint(), [answer(b"", 503)])
    with pytest.raises(errors.ProtocolError):
        CODEC.seek(known, endpoint(), [answer({"data": [1]})])


def test_of_two_the_one_that_goes_on_is_it() -> None:
    good = {**batch("completed", output_file_id="file-o"), "id": "batch_2"}
    seen = CODEC.sought(job(provider_id=None), [page(batch("failed"), good)])
    assert seen is not None
    assert (seen.state, seen.provider_id, seen.fetch) == ("succeeded", "batch_2", True)


# --- anything -----------------------------------------------------------------------------------------------------------

_WORDS = st.sampled_from(
    [
        "id",
        "object",
        "batch",
        "status",
        "completed",
        "failed",
        "expired",
        "data",
        "errors",
        "code",
        "message",
        "line",
        "metadata",
        "spanwire_job",
        "created_at",
        "output_file_id",
        "error_file_id",
        "custom_id",
        "response",
        "status_code",
        "body",
        "error",
        "choices",
        "list",
        "embedding",
        "names",
        "ended",
        "spanwire_batch",
        "has_more",
        "in_progress_at",
    ]
)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | _WORDS | st.just("../x"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_WORDS | st.text(max_size=3), inner, max_size=8),
    max_leaves=15,
)
_JSON = _VALUES.map(lambda value: json.dumps(value).encode("utf-8", "surrogatepass"))
_OBJECT = st.dictionaries(_WORDS, _VALUES, max_size=8).map(
    lambda value: json.dumps({"object": "batch", "id": "batch_1", **value}).encode("utf-8", "surrogatepass")
)


def _row(value: Any) -> bytes:
    made = {"custom_id": "a", "response": {"status_code": 200, "body": value}, "error": value}
    return json.dumps(made).encode("utf-8", "surrogatepass")


@settings(max_examples=50, deadline=None)
@given(body=_OBJECT)
def test_nothing_said_crashes_it(body: bytes) -> None:
    for ask in (CODEC.told, CODEC.acknowledged):
        try:
            seen = ask(answer(body))
        except errors.SpanwireError:
            continue
        msgspec.json.encode(seen)
        known = job(urls=dict(seen.urls))
        for request in CODEC.fetches(known, endpoint()):
            assert ".." not in request.target.split("/")
        if seen.state == "failed":
            str(CODEC.failure(job(state="failed", code=seen.code, message=seen.message))).encode()
    listed = [answer(b'{"data":[' + body + b'],"has_more":true}')]
    try:
        CODEC.seek(job(), endpoint(), listed)
        CODEC.sought(job(), listed)
    except errors.SpanwireError:
        pass


@settings(max_examples=50, deadline=None)
@given(rows=st.lists(_JSON | st.binary(max_size=30) | _VALUES.map(_row), max_size=5))
def test_no_row_crashes_it(rows: list[bytes]) -> None:
    body = b"\n".join([encode({"spanwire_batch": 1, "names": NAMES}), *rows])
    found = CODEC.replies(body)
    assert isinstance(found, BatchReply)
    assert list(found.items) == NAMES
    for item in found.items.values():
        assert isinstance(item, (spanwire.Reply, spanwire.Embeddings, errors.SpanwireError))


@settings(max_examples=50, deadline=None)
@given(body=_JSON | st.binary(max_size=60))
def test_no_result_crashes_it(body: bytes) -> None:
    with contextlib.suppress(errors.ProtocolError):
        CODEC.replies(body)
