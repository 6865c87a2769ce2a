"""What a server says of its own time, through whole calls: read, asked for, refused, and never in the way."""

import json
from typing import Any

import pytest

import spanwire
from spanwire.errors import BadRequest, ConfigurationError
from spanwire.testing import Script
from spanwire.timing import TimingReader, TimingRow
from tests.support import AT_ONCE, NEVER, assert_adds_up, chat, hello, read, run, serving


def events(*events: Any) -> list[bytes]:
    return [*(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events), b"data: [DONE]\n\n"]


TEXT = {"id": "a", "model": "m", "choices": [{"index": 0, "delta": {"content": "Hello"}}]}
STOP = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
METRICS = {"queue_time_ms": 0.0001, "time_to_first_token_ms": 0.0002, "generation_time_ms": 0.0001}
VLLM = Script(writes=events(TEXT, STOP, {"choices": [], "usage": USAGE, "metrics": METRICS}))
RAW = {"dialect": "vllm", "raw": METRICS}


async def streamed(endpoint: spanwire.Endpoint, **more: Any) -> spanwire.Timeline:
    async with spanwire.ConnectionManager() as manager:
        async with manager.stream(endpoint, chat(), **more) as stream:
            await read(stream)
        assert_adds_up(stream.timeline)
        return stream.timeline


def test_the_last_event_of_a_stream_is_read() -> None:
    with serving(VLLM) as server:
        timeline = run(lambda: streamed(server.endpoint()))
    assert timeline.server_timing == RAW
    assert timeline.segments["queue"].parts["server"].source == "reported"
    assert timeline.segments["model"].source == "reported"
    assert timeline.to_dict()["server_timing"] == RAW
    assert timeline.to_dict()["usage"] == {"input_tokens": 3, "output_tokens": 2, "total_tokens": 5}


def test_an_event_without_choices_is_read_also_where_no_finish_reason_was_sent() -> None:
    script = Script(writes=events(TEXT, {"choices": [], "usage": USAGE, "metrics": METRICS}))
    with serving(script) as server:
        timeline = run(lambda: streamed(server.endpoint()))
    assert timeline.server_timing == RAW


def test_the_body_of_a_whole_answer_is_read() -> None:
    body = {"id": "a", "choices": [{"message": {"content": "x"}, "finish_reason": "stop"}], "metrics": METRICS}

    async def main() -> spanwire.Timeline:
        async with spanwire.ConnectionManager() as manager:
            timeline = (await manager.complete(server.endpoint(), chat())).timeline
            assert timeline is not None
            return timeline

    with serving(Script(body=json.dumps(body).encode())) as server:
        timeline = run(main)
    assert timeline.server_timing == RAW
    assert timeline.segments["model"].parts["prefill"].source == "reported"


def test_a_stream_where_a_whole_answer_was_asked_for_is_read_as_what_it_is() -> None:
    """A total in the headers of a stream ends with the headers: it must not become the model's time."""
    headers = {"openai-processing-ms": "0.0001"}
    script = Script(writes=events(TEXT, STOP), headers=headers, content_type="text/event-stream")

    async def main() -> spanwire.Timeline:
        async with spanwire.ConnectionManager() as manager:
            timeline = (await manager.complete(server.endpoint(), chat())).timeline
            assert timeline is not None
            return timeline

    with serving(script) as server:
        timeline = run(main)
    assert timeline.server_timing == {"dialect": "openai", "raw": {"openai-processing-ms": "0.0001"}}
    assert "refused" not in timeline.server_timing
    assert timeline.segments["model"].source == "estimated"


def test_the_time_of_a_stream_where_a_whole_answer_was_asked_for_is_the_models() -> None:
    """And not the network's, as the body of a whole answer that comes in slowly would be."""
    script = Script(
        writes=events(TEXT, *[TEXT] * 20, STOP), write_gap_s=0.002, content_type="text/event-stream"
    )  # fmt: skip

    async def main() -> spanwire.Timeline:
        async with spanwire.ConnectionManager() as manager:
            timeline = (await manager.complete(server.endpoint(), chat())).timeline
            assert timeline is not None
            return timeline

    with serving(script) as server:
        timeline = run(main)
    assert_adds_up(timeline)
    assert "decode" in timeline.segments["model"].parts
    assert "receive" not in timeline.segments["network"].parts


def test_the_wait_for_a_whole_answer_where_a_stream_was_asked_for_is_not_divided() -> None:
    body = {"id": "a", "choices": [{"message": {"content": "x"}, "finish_reason": "stop"}]}
    # Of a hop that ends TCP, so that nothing is known of the whole way; and no decoding is told.
    told = {"metrics": {"queue_time_ms": 0.001, "time_to_first_token_ms": 0.001}}
    bodies = [json.dumps({**body, **more}).encode() for more in ({}, {"timings": {"predicted_ms": 4}}, told)]
    scripts = [Script(body=body, headers={"via": "1.1 hop"}, queue_s=0.01) for body in bodies]
    with serving(*scripts) as server:
        silent, decoded, queued = (run(lambda: streamed(server.endpoint())) for _ in scripts)
    assert not silent.segments["model"].parts
    assert decoded.server_timing is not None
    assert "refused" not in decoded.server_timing
    assert decoded.segments["model"].parts["decode"].duration_s == pytest.approx(0.004)
    # The decoding, which nobody told, is not the network's.
    assert queued.segments["network"].source == "estimated"


def test_trailers_of_a_chunked_answer_are_read() -> None:
    body = json.dumps({"id": "a", "choices": [{"message": {"content": "x"}, "finish_reason": "stop"}]}).encode()
    wire = (
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
        + f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\nserver-timing: queue;dur=0.0001, total;dur=0.0003\r\n\r\n"
    )  # fmt: skip

    async def main() -> spanwire.Timeline:
        import asyncio

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(wire)
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, spanwire.ConnectionManager() as manager:
            timeline = (await manager.complete(spanwire.Endpoint(f"http://127.0.0.1:{port}"), chat())).timeline
            assert timeline is not None
            return timeline

    timeline = run(main)
    assert timeline.segments["queue"].parts["server"].source == "reported"
    assert timeline.segments["network"].parts["to_and_back"].source == "reported"


def test_off_reads_nothing() -> None:
    with serving(VLLM) as server:
        timeline = run(lambda: streamed(server.endpoint(server_timing="off")))
    assert timeline.server_timing is None
    assert "reported" not in {segment.source for segment in timeline.segments.values()}


def test_listening_sends_nothing_that_was_not_in_the_call() -> None:
    with serving(VLLM) as server:
        run(lambda: streamed(server.endpoint()))
        (request,) = server.requests
    assert set(request.body) == {"model", "messages", "stream", "stream_options"}
    assert "x-openrouter-metadata" not in request.headers


def test_asking_sends_what_makes_servers_talk() -> None:
    with serving(VLLM) as server:
        run(lambda: streamed(server.endpoint(server_timing="ask")))
        (request,) = server.requests
    assert request.body["perf_metrics_in_response"] is True
    assert request.body["nvext"] == {"extra_fields": ["timing"]}
    assert request.body["stream_options"] == {"include_usage": True}
    assert request.headers["x-openrouter-metadata"] == "enabled"


def test_fields_of_the_call_win_over_those_that_ask() -> None:
    async def main() -> None:
        async with spanwire.ConnectionManager() as manager:
            await manager.complete(
                server.endpoint(server_timing="ask"),
                chat(nvext={"a": 1}),
                headers={"x-openrouter-metadata": "disabled"},
            )

    with serving(hello()) as server:
        run(main)
        (request,) = server.requests
    assert request.body["nvext"] == {"a": 1}
    assert request.body["perf_metrics_in_response"] is True
    assert request.headers["x-openrouter-metadata"] == "disabled"


def test_headers_of_the_endpoint_win_over_those_that_ask() -> None:
    with serving(VLLM) as server:
        run(lambda: streamed(server.endpoint(server_timing="ask", headers={"X-OpenRouter-Metadata": "disabled"})))
        (request,) = server.requests
    assert request.headers["x-openrouter-metadata"] == "disabled"
    assert request.headers["x-apig-mode"] == "debug"


@pytest.mark.parametrize("own", [False, True])
def test_the_call_without_those_fields_has_an_idempotency_key_of_its_own(own: bool) -> None:
    """A server that keeps answers by their key would repeat its refusal, or refuse the key for another body."""
    headers = {"idempotency-key": "mine"} if own else {}
    with serving(Script(status=503), STRICT, Script(status=503), VLLM) as server:
        run(lambda: streamed(server.endpoint(server_timing="ask", retries=AT_ONCE), headers=headers))
        keys = [request.headers["idempotency-key"] for request in server.requests]
    assert len(keys) == 4
    if own:
        assert set(keys) == {"mine"}
    else:
        assert keys[0] == keys[1] != keys[2] == keys[3]


def test_embeddings_are_not_asked_about() -> None:
    async def main() -> None:
        async with spanwire.ConnectionManager() as manager:
            await manager.embed(server.endpoint(server_timing="ask"), spanwire.Call.embeddings("e", ["a"]))

    with serving() as server:
        run(main)
        (request,) = server.requests
    assert "nvext" not in request.body


STRICT = Script(status=400, body=b'{"error": {"message": "Unrecognized request argument supplied: nvext"}}')


@pytest.mark.parametrize("status", [400, 422])
def test_a_server_that_refuses_those_fields_gets_the_call_without_them_and_is_not_asked_again(status: int) -> None:
    refusal = Script(status=status, body=STRICT.body)

    async def main() -> list[spanwire.Timeline]:
        async with spanwire.ConnectionManager() as manager:
            timelines = []
            for _ in range(2):
                endpoint = server.endpoint(server_timing="ask")  # another object for the same server
                async with manager.stream(endpoint, chat(), retries=NEVER) as stream:
                    await read(stream)
                timelines.append(stream.timeline)
            return timelines

    with serving(refusal, VLLM, VLLM) as server:
        first, second = run(main)
        assert ["nvext" in request.body for request in server.requests] == [True, False, False]
    assert [attempt["outcome"] for attempt in first.to_dict()["attempts"]] == ["error", "completed"]
    assert [attempt["outcome"] for attempt in second.to_dict()["attempts"]] == ["completed"]
    assert first.server_timing == RAW


def test_a_call_that_is_wrong_in_itself_is_refused_with_the_servers_words_and_teaches_nothing() -> None:
    async def main() -> None:
        async with spanwire.ConnectionManager() as manager:
            for _ in range(2):
                with pytest.raises(BadRequest, match="temperature"):
                    await manager.complete(server.endpoint(server_timing="ask"), chat(), retries=AT_ONCE)

    with serving(Script(status=400, body=b'{"error": {"message": "temperature is too hot"}}')) as server:
        run(main)
        assert ["nvext" in request.body for request in server.requests] == [True, False, True, False]


def test_a_refusal_is_remembered_though_its_callers_leave_their_streams() -> None:
    async def main() -> None:
        async with spanwire.ConnectionManager() as manager:
            for _ in range(2):
                async with manager.stream(server.endpoint(server_timing="ask"), chat()) as stream:
                    async for _chunk in stream:
                        break

    with serving(STRICT, hello(gap_s=0.01)) as server:
        run(main)
        assert ["nvext" in request.body for request in server.requests] == [True, False, False]


def test_only_the_three_words_are_taken() -> None:
    with pytest.raises(ConfigurationError, match=r'server_timing must be "ask", "listen" or "off", not \'yes\''):
        spanwire.Endpoint("http://h", server_timing="yes")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="server_timing"):
        spanwire.Endpoint("http://h", server_timing=True)  # type: ignore[arg-type]


def test_an_error_status_is_read_too() -> None:
    script = Script(status=400, headers={"openai-processing-ms": "0.0001"})

    async def main() -> spanwire.Timeline:
        async with spanwire.ConnectionManager() as manager:
            with pytest.raises(BadRequest) as caught:
                await manager.complete(server.endpoint(), chat(), retries=NEVER)
            assert caught.value.timeline is not None
            return caught.value.timeline

    with serving(script) as server:
        timeline = run(main)
    assert timeline.server_timing == {"dialect": "openai", "raw": {"openai-processing-ms": "0.0001"}}
    assert timeline.segments["network"].parts["to_and_back"].source == "reported"
    assert "model" not in timeline.segments


@pytest.mark.parametrize(
    "headers",
    [
        {"via": "1.1 edge"},
        {"cf-ray": "1-BOS"},
        {"server": "cloudflare"},
        {"server-timing": "gfet4t7; dur=1"},
        {"server-timing": "db;dur=1, cfEdge;dur=2"},
    ],
)
def test_an_answer_from_behind_an_edge_says_so(headers: dict[str, str]) -> None:
    with serving(hello(headers=headers)) as server:
        timeline = run(lambda: streamed(server.endpoint()))
    assert timeline.connection is not None
    assert timeline.connection.rtt_scope == "edge"
    assert timeline.to_dict()["connection"]["rtt_scope"] == "edge"


def test_an_answer_straight_from_the_server_says_nothing_of_an_edge() -> None:
    with serving(hello()) as server:
        timeline = run(lambda: streamed(server.endpoint()))
    assert timeline.connection is not None
    assert timeline.connection.rtt_scope is None
    assert "rtt_scope" not in timeline.to_dict()["connection"]


class Table:
    """A plugin with a table of its own."""

    def __init__(self, *readers: Any) -> None:
        self.readers = readers

    @spanwire.hookimpl
    def register_timing_readers(self) -> Any:
        return self.readers


def test_a_table_of_a_plugin_is_read() -> None:
    row = TimingRow(
        location="event", path="mine.queued_us", unit="us", maps_to="queue", window="to_end", reader="json_path"
    )
    table = Table(TimingReader("mine", (row,)))
    script = Script(writes=events(TEXT, {**STOP, "mine": {"queued_us": 0.5}}))

    async def main() -> spanwire.Timeline:
        async with spanwire.ConnectionManager(plugins=[table]) as manager:
            async with manager.stream(server.endpoint(), chat()) as stream:
                await read(stream)
            return stream.timeline

    with serving(script) as server:
        timeline = run(main)
    assert timeline.server_timing == {"dialect": "mine", "raw": {"queued_us": 0.5}}
    assert timeline.segments["queue"].parts["server"].duration_s == 0.5e-6


def test_a_caller_who_leaves_after_the_finish_reason_has_what_was_said_by_then() -> None:
    async def main() -> spanwire.Timeline:
        async with spanwire.ConnectionManager() as manager:
            async with manager.stream(server.endpoint(), chat()) as stream:
                async for chunk in stream:
                    if chunk.finish_reason:
                        break
            return stream.timeline

    timings = {"prompt_ms": 0.0001, "predicted_ms": 0.0001}
    with serving(Script(writes=events(TEXT, {**STOP, "timings": timings}))) as server:
        timeline = run(main)
    assert timeline.outcome in ("closed_by_caller", "completed")
    assert timeline.server_timing == {"dialect": "llama.cpp", "raw": timings}
