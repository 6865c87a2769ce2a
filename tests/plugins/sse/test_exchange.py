"""Answers that are not what was asked for, and how they are read."""

from __future__ import annotations

import asyncio
import email.utils
import gc
import gzip
import time
import zlib
from typing import Any

import pytest
from spanwire_sse.exchange import HTTPExchange

import spanwire
from spanwire import errors
from spanwire.manager import ConnectionManager
from spanwire.net import sockets
from spanwire.testing import Script
from spanwire.wire.retry_after import retry_after_s
from tests.support import AT_ONCE, NEVER, assert_adds_up, chat, hello, read, run, serving, wait_for

HELLO = "Hello from the loopback server."
ANSWER = (
    b'{"id":"c1","model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"whole"},'
    b'"finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":2,"total_tokens":3}}'
)
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"ab"}}]}\n\n'
STOP = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
DONE = b"data: [DONE]\n\n"


def stream_of(*scripts: Script, **more: Any) -> tuple[str, spanwire.Reply, spanwire.Timeline]:
    found: list[Any] = []
    with serving(*scripts) as server:

        async def body() -> None:
            async with ConnectionManager() as manager:
                async with manager.stream(server.endpoint(**more), chat()) as stream:
                    found.append(await read(stream))
                found.extend([stream.reply, stream.timeline])

        run(body)
    assert_adds_up(found[2])
    return found[0], found[1], found[2]


def failing(script: Script, kind: type[errors.SpanwireError], **more: Any) -> errors.SpanwireError:
    found: list[errors.SpanwireError] = []
    with serving(script) as server:

        async def body() -> None:
            async with ConnectionManager() as manager:
                with pytest.raises(kind) as caught:
                    async with manager.stream(server.endpoint(retries=NEVER, **more), chat()) as stream:
                        await read(stream)
                found.append(caught.value)

        run(body)
    error = found[0]
    assert error.timeline is not None
    assert_adds_up(error.timeline)
    return error


def test_a_whole_answer_where_a_stream_was_asked_for_is_one_chunk() -> None:
    text, reply, timeline = stream_of(Script(body=ANSWER))
    assert (text, reply.finish_reason, reply.id, reply.usage) == ("whole", "stop", "c1", spanwire.Usage(1, 2, 3))
    assert timeline.first_content_s is not None


def test_a_stream_where_a_whole_answer_was_asked_for_is_joined() -> None:
    with serving(Script(writes=[EVENT, EVENT, STOP, DONE])) as server:

        async def body() -> None:
            async with ConnectionManager() as manager:
                reply = await manager.complete(server.endpoint(), chat())
                assert (reply.text, reply.finish_reason) == ("abab", "stop")

        run(body)


@pytest.mark.parametrize("content_type", ["text/html", "application/json", "application/octet-stream"])
def test_the_content_type_is_not_believed(content_type: str) -> None:
    assert stream_of(Script(writes=[EVENT, STOP, DONE], content_type=content_type))[0] == "ab"


def test_a_page_is_refused_with_its_beginning() -> None:
    error = failing(
        Script(body=b"<html><body>Sign in to the hotel's network", content_type="text/html"), errors.ProtocolError
    )
    assert "hotel" in str(error)
    assert not error.retryable


@pytest.mark.parametrize("body", [b"", b"  \r\n"])
def test_nothing_at_all_is_truncated(body: bytes) -> None:
    failing(Script(body=body), errors.Truncated)


def test_a_body_without_length_ends_with_the_connection() -> None:
    text, _, timeline = stream_of(hello(chunked=False))
    assert text == HELLO
    assert timeline.outcome == "completed"


@pytest.mark.parametrize("pause_s", [0.0, 0.001])
def test_an_answer_that_closes_is_not_used_again(pause_s: float) -> None:
    with serving(default=lambda _request: hello(close=True, end_s=pause_s)) as server:

        async def body() -> None:
            async with ConnectionManager() as manager:
                for _ in range(2):
                    async with manager.stream(server.endpoint(), chat()) as stream:
                        assert await read(stream) == HELLO

        run(body)
        assert server.connections == 2


def test_a_redirect_is_told_and_not_followed() -> None:
    script = Script(status=307, headers={"location": "https://other.example/v1?key=1"}, body=b"")
    error = failing(script, errors.ServerError)
    assert isinstance(error, errors.ServerError)
    assert error.status == 307
    assert "https://other.example/v1" in str(error)
    assert "key=1" not in str(error)


def test_an_error_inside_the_stream_comes_after_what_had_come() -> None:
    failure = b'data: {"error":{"message":"out of memory","code":503}}\n\n'
    with serving(Script(writes=[EVENT, failure, DONE])) as server:

        async def body() -> None:
            async with ConnectionManager() as manager:
                text = ""
                with pytest.raises(errors.Overloaded, match="out of memory") as caught:
                    async with manager.stream(server.endpoint(), chat()) as stream:
                        async for chunk in stream:
                            text += chunk.text
                assert text == "ab"
                assert caught.value.reply is not None
                assert caught.value.reply.text == "ab"

        run(body)
        assert len(server.requests) == 1


def test_an_error_event_as_the_first_event_is_retried_by_its_code() -> None:
    failure = b'event: error\ndata: {"message":"busy","code":503}\n\n'
    text, _, timeline = stream_of(Script(writes=[failure]), hello(), retries=AT_ONCE)
    assert text == HELLO
    assert len(timeline.to_dict()["attempts"]) == 2


@pytest.mark.parametrize("pieces", [1, 7, 1000])
@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_a_coding_that_nobody_asked_for_is_undone(coding: str, pieces: int) -> None:
    plain = EVENT + STOP + DONE
    packed = gzip.compress(plain) if coding == "gzip" else zlib.compress(plain)
    size = max(1, len(packed) // pieces)
    writes = [packed[i : i + size] for i in range(0, len(packed), size)]
    assert stream_of(Script(writes=writes, headers={"content-encoding": coding}))[0] == "ab"


def test_an_unknown_coding_and_a_broken_one_are_protocol_errors() -> None:
    failing(Script(writes=[b"x"], headers={"content-encoding": "br"}), errors.ProtocolError)
    failing(Script(writes=[b"no gzip at all"], headers={"content-encoding": "gzip"}), errors.ProtocolError)


@pytest.mark.parametrize("whole", [True, False])
def test_a_message_over_the_limit_is_refused(whole: bool) -> None:
    limits = spanwire.Limits(max_event_bytes=1000)
    big = b'{"choices":[{"message":{"content":"' + b"x" * 2000 + b'"}}]}'
    script = Script(body=big) if whole else Script(writes=[b"data: " + big[:500], big[500:] + b"\n\n"])
    error = failing(script, errors.MessageTooBig, limits=limits)
    assert "max_event_bytes" in str(error)
    assert error.endpoint is not None


def test_a_small_body_that_unpacks_to_a_huge_one_is_refused() -> None:
    bomb = gzip.compress(b"x" * 5_000_000)
    limits = spanwire.Limits(max_event_bytes=1_000_000)
    failing(Script(body=bomb, headers={"content-encoding": "gzip"}), errors.MessageTooBig, limits=limits)


def test_a_last_event_without_its_blank_line_counts_if_it_is_done() -> None:
    assert stream_of(Script(writes=[EVENT, STOP, b"data: [DONE]"]))[0] == "ab"


def test_a_consumer_that_stops_reading_stops_the_server_and_loses_nothing() -> None:
    """What the server has sent is bounded by the kernel's buffers and the inbox, and the pause is the client's time."""
    pieces = 60_000
    padding = "x" * 400
    with serving(Script(tokens=[padding] * pieces)) as server:

        async def body() -> None:
            async with ConnectionManager() as manager:
                async with manager.stream(server.endpoint(), chat()) as stream:
                    await anext(stream)
                    await asyncio.sleep(0.3)  # the delay under test: long enough to send it all
                    assert not server.requests[0].ended
                    assert len(await read(stream)) == pieces * len(padding)
                    assert stream._run is not None
                    marks = stream._run._attempt.marks
                    assert marks.first_content_ns < marks.resumed_ns  # from when the server may be called idle again
                assert stream.timeline.segments["client"].parts["waiting"].duration_s > 0.1
                assert_adds_up(stream.timeline)

        run(body)


def test_a_large_prompt_is_sent_whole_and_its_upload_is_network() -> None:
    call = spanwire.Call.chat("m", [{"role": "user", "content": "x" * 20_000_000}])
    with serving() as server:

        async def body() -> None:
            async with ConnectionManager() as manager:
                reply = await manager.complete(server.endpoint(), call)
                assert reply.timeline is not None
                assert reply.timeline.segments["network"].parts["send"].duration_s > 0
                assert_adds_up(reply.timeline)

        run(body)
        assert len(server.requests[0].raw) > 20_000_000


@pytest.mark.parametrize(
    ("content", "backlog_ns", "least_s", "most_s"),
    [
        ("x" * 200_000, 20_000_000, 0.0199, 0.0201),
        ("x" * 200_000, 60_000_000_000, 0.039, 5.0),  # it had left, for the answer is there
        ("x" * 200_000, 900_000, 0.0, 0.0),
        ("small", 20_000_000, 0.0, 0.0),
    ],
    ids=["known", "too long", "next to none", "small"],
)
def test_what_a_large_request_waits_in_the_kernel_is_network(
    content: str, backlog_ns: int, least_s: float, most_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "backlog_ns", lambda _: backlog_ns)
    call = spanwire.Call.chat("m", [{"role": "user", "content": content}])
    with serving(Script.say("hello", queue_s=0.04)) as server:

        async def body() -> spanwire.Timeline:
            async with ConnectionManager() as manager, manager.stream(server.endpoint(), call) as stream:
                await read(stream)
            assert stream.timeline is not None
            return stream.timeline

        timeline = run(body)
    assert_adds_up(timeline)
    parts = timeline.segments["network"].parts
    found_s = parts["backlog"].duration_s if "backlog" in parts else 0.0
    assert least_s <= found_s <= most_s
    # Nothing is counted twice: what was not the model's is the network's.
    model_s = timeline.segments["model"].duration_s if "model" in timeline.segments else 0.0
    assert (model_s > 0.035) == (found_s < 0.001)


def test_leaving_while_the_message_ends_leaves_the_connection_for_the_next() -> None:
    with serving(hello(end_s=0.05), hello()) as server:

        async def body() -> None:
            async with ConnectionManager() as manager:
                async with manager.stream(server.endpoint(), chat()) as stream:
                    await read(stream)
                await wait_for(server, lambda s: s.requests[0].ended)
                async with manager.stream(server.endpoint(), chat()) as stream:
                    await read(stream)
                assert stream.timeline.connection is not None
                assert stream.timeline.connection.reused

        run(body)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "3"}, 3.0),
        ({"retry-after": "1.5"}, 1.5),
        ({"retry-after": "3600"}, 3600.0),
        ({"retry-after-ms": "250"}, 0.25),
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        ({"retry-after": "-5"}, None),
        ({"retry-after": "\u00b2"}, None),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "Sun, 06 Nov 1994 08:49:37 GMT"}, 0.0),
    ],
)
def test_retry_after_in_all_its_forms(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after_s(headers) == seconds


def test_retry_after_as_a_date_is_rounded_to_no_less_than_asked() -> None:
    found = retry_after_s({"retry-after": email.utils.formatdate(time.time() + 30, usegmt=True)})
    assert found is not None
    assert 28 < found <= 31


def test_blank_heartbeats_before_a_whole_answer_are_the_models_time() -> None:
    script = Script(writes=[b"\n", b"\n", b"\n", b"\n", ANSWER], write_gap_s=0.02, content_type="application/json")
    with serving(script) as server:

        async def body() -> None:
            async with ConnectionManager() as manager:
                reply = await manager.complete(server.endpoint(), chat())
                assert reply.timeline is not None
                assert reply.timeline.segments["model"].duration_s >= 0.07
                assert_adds_up(reply.timeline)

        run(body)


def test_empty_data_and_empty_errors_do_not_end_a_good_stream() -> None:
    polite = b'data: {"error":"","choices":[{"index":0,"delta":{"content":"ab"}}]}\n\n'
    assert stream_of(Script(writes=[b"data:\n\n", b"data\n\n", polite, STOP, DONE]))[0] == "ab"


def test_a_plain_text_answer_is_shown_for_what_it_is() -> None:
    error = failing(Script(body=b"upstream not ready", content_type="text/plain"), errors.ProtocolError)
    assert "upstream not ready" in str(error)


def test_an_error_inside_a_stream_keeps_what_the_head_said() -> None:
    script = Script(writes=[b'data: {"error":{"message":"no","code":"x"}}\n\n'], headers={"x-request-id": "r1"})
    error = failing(script, errors.ServerError)
    assert isinstance(error, errors.ServerError)
    assert (error.status, error.code, error.headers["x-request-id"]) == (200, "x", "r1")


def test_an_unknown_coding_does_not_hide_an_error_status() -> None:
    script = Script(status=429, body=b"????", headers={"content-encoding": "br", "retry-after": "7"})
    error = failing(script, errors.RateLimited)
    assert isinstance(error, errors.RateLimited)
    assert error.retry_after_s == 7


def test_several_gzip_streams_one_after_the_other_are_one_answer() -> None:
    writes = [gzip.compress(EVENT) + gzip.compress(STOP), gzip.compress(DONE)]
    assert stream_of(Script(writes=writes, headers={"content-encoding": "GZIP"}))[0] == "ab"


def test_what_a_server_says_of_a_request_does_not_repeat_the_prompt() -> None:
    detail = b'{"detail":[{"loc":["body","messages",0],"msg":"Field required","input":{"content":"my secret"}}]}'
    error = failing(Script(status=422, body=detail), errors.BadRequest)
    assert "body.messages.0: Field required" in str(error)
    assert "secret" not in str(error)


def test_a_stream_over_tls_has_all_its_parts_on_a_connection_that_is_used_again() -> None:
    with serving(default=lambda _request: hello(prefill_s=0.02), tls=True) as server:

        async def body() -> None:
            async with ConnectionManager() as manager:
                for _ in range(5):
                    async with manager.stream(server.endpoint(), chat()) as stream:
                        await read(stream)
                    segments = stream.timeline.segments
                    assert segments["model"].duration_s >= 0.015
                    assert segments["network"].parts["send"].duration_s < 0.015
                    assert_adds_up(stream.timeline)

        run(body)
        assert server.connections == 1


@pytest.mark.parametrize("left", [False, True], ids=["read", "left"])
def test_a_slow_readers_connection_is_not_given_back_stopped(left: bool) -> None:
    """The inbox gets over its bound in the read that ends the message: the next call has to get its answer."""
    first = Script(writes=[EVENT, EVENT * 4000, EVENT * 200 + STOP + DONE], write_gap_s=0.1)
    with serving(first, hello()) as server:

        async def body() -> None:
            async with ConnectionManager() as manager:
                endpoint = server.endpoint(timeouts=spanwire.Timeouts(first_content_s=20))
                async with manager.stream(endpoint, chat()) as stream:
                    assert (await anext(aiter(stream))).text == "ab"
                    await wait_for(server, lambda s: s.requests[0].ended)
                    run_ = stream._run
                    assert run_ is not None
                    assert run_.exchange is not None
                    while not run_.exchange.complete:  # all of it has come, and nobody has read it
                        await asyncio.sleep(0)
                    if not left:
                        assert await read(stream) == "ab" * 4200
                assert (await manager.complete(endpoint, chat())).text == HELLO
                assert_adds_up(stream.timeline)

        run(body)
        assert server.connections == 1


@pytest.mark.parametrize("way", ["whole", "stream", "left"])
def test_an_exchange_goes_with_its_call_and_not_with_the_collector(way: str) -> None:
    script = Script(hang_after=2) if way == "left" else Script()

    async def call(manager: ConnectionManager, endpoint: spanwire.Endpoint) -> None:
        if way == "whole":
            await manager.complete(endpoint, chat())
            return
        async with manager.stream(endpoint, chat()) as stream:
            if way == "left":
                await anext(aiter(stream))
            else:
                await read(stream)

    with serving(script) as server:

        async def body() -> None:
            endpoint = server.endpoint(retries=NEVER)
            async with ConnectionManager() as manager:
                await call(manager, endpoint)
            assert not [one for one in gc.get_objects() if isinstance(one, HTTPExchange)]

        gc.collect()
        gc.disable()
        try:
            run(body)
        finally:
            gc.enable()


def test_a_refusal_says_what_may_be_wrong_with_the_endpoint() -> None:
    error = failing(Script(status=404, body=b'{"detail": "Not Found"}'), errors.BadRequest)
    assert error.message == "Not Found; is the endpoint's URL the server's base URL?"
    error = failing(Script(status=401, body=b"no."), errors.AuthenticationFailed)
    assert error.message == "no; the endpoint has no api_key"
    assert failing(Script(status=401, body=b"no"), errors.AuthenticationFailed, api_key="k").message == "no"
