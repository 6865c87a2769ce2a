"""Spans and metrics, with the real SDK and in-memory exporters."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import SpanKind, StatusCode

import spanwire
from spanwire import errors
from spanwire.manager import ConnectionManager
from spanwire.testing import LoopbackServer, Script
from tests.core.telemetry.heard import Heard, attributes, call_once, parent_id
from tests.support import AT_ONCE, NEVER, chat, hello, read, run, serving, wait_for


def test_a_call_is_one_client_span_by_the_genai_conventions(heard: Heard) -> None:
    with serving(hello(usage=spanwire.Usage(3, 5, 8))) as server:
        call_once(server, heard, chat(temperature=0.5, max_tokens=9))
        span = heard.one("chat m")
        found = attributes(span)
        assert span.kind is SpanKind.CLIENT
        assert span.status.status_code is StatusCode.UNSET
        assert span.parent is None
        expected = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "openai",
            "gen_ai.request.model": "m",
            "gen_ai.request.stream": True,
            "gen_ai.request.temperature": 0.5,
            "gen_ai.request.max_tokens": 9,
            "gen_ai.response.model": "m",
            "gen_ai.response.finish_reasons": ("stop",),
            "gen_ai.usage.input_tokens": 3,
            "gen_ai.usage.output_tokens": 5,
            "server.address": "127.0.0.1",
            "server.port": server.port,
            "http.response.status_code": 200,
            "spanwire.outcome": "completed",
            "spanwire.transport": "sse",
            "spanwire.connection.reused": False,
        }
        assert {name: found.get(name) for name in expected} == expected
        assert found["gen_ai.response.id"]
        assert "error.type" not in found
        firsts = [
            found[name]
            for name in (
                "spanwire.time_to_first_byte",
                "gen_ai.response.time_to_first_chunk",
                "spanwire.time_to_first_content",
            )
        ]
        assert firsts == sorted(firsts)
        json.loads(span.to_json())


def test_segments_on_the_span_add_up_to_its_duration(heard: Heard) -> None:
    with serving(hello(prefill_s=0.02, gap_s=0.005)) as server:
        call_once(server, heard, chat())
        span = heard.one("chat m")
        assert span.start_time is not None
        assert span.end_time is not None
        found = attributes(span)
        names = [name for name in found if name.startswith("spanwire.segment.") and name.endswith(".duration")]
        whole = sum(found[name] for name in names if name.count(".") == 3)
        assert abs(whole - (span.end_time - span.start_time) / 1e9) < 1e-6
        assert found["spanwire.segment.model.source"] == "estimated"
        assert found["spanwire.segment.client.source"] == "measured"
        assert found["spanwire.segment.model.prefill.duration"] >= 0.015
        for segment in ("handshake", "client", "network", "model"):
            parts = sum(
                found[name]
                for name in names
                if name.startswith(f"spanwire.segment.{segment}.") and name.count(".") == 4
            )
            assert abs(parts - found[f"spanwire.segment.{segment}.duration"]) < 1e-6


def test_the_server_gets_the_spans_context(heard: Heard) -> None:
    with serving(hello()) as server:
        call_once(server, heard, chat())
        context = heard.one("chat m").get_span_context()
        assert context is not None
        sent = server.requests[0].headers["traceparent"]
        assert sent.startswith(f"00-{context.trace_id:032x}-{context.span_id:016x}-0")


def test_the_span_is_a_child_of_what_is_current_and_is_never_current_itself(heard: Heard) -> None:
    with serving(hello()) as server:

        async def body() -> None:
            async with ConnectionManager(telemetry=heard.telemetry()) as manager:
                with heard.tracer.start_as_current_span("outer") as outer:
                    async with manager.stream(server.endpoint(), chat()) as stream:
                        async for _ in stream:
                            assert trace.get_current_span() is outer

        run(body)
        outer_context = heard.one("outer").get_span_context()
        assert outer_context is not None
        assert parent_id(heard.one("chat m")) == outer_context.span_id


def test_the_parent_reaches_the_sync_facade_from_its_callers_thread(heard: Heard) -> None:
    with serving(hello()) as server, spanwire.SyncConnectionManager(telemetry=heard.telemetry()) as manager:
        with heard.tracer.start_as_current_span("outer"):
            manager.complete(server.endpoint(), chat())
        context = heard.one("outer").get_span_context()
        assert context is not None
        assert parent_id(heard.one("chat m")) == context.span_id


def test_a_connection_has_a_span_below_the_call_that_waited_for_it(heard: Heard) -> None:
    with LoopbackServer(tls=True) as server:

        async def body() -> None:
            async with ConnectionManager(telemetry=heard.telemetry()) as manager:
                for _ in range(2):
                    await manager.complete(server.endpoint(), chat())

        run(body)
        first, second = heard.spans("chat m")
        setup = heard.one("spanwire.connection_setup")
        first_context, setup_context = first.get_span_context(), setup.get_span_context()
        assert first_context is not None
        assert setup_context is not None
        assert parent_id(setup) == first_context.span_id
        for part in ("tcp", "tls"):
            child = heard.one(part)
            assert parent_id(child) == setup_context.span_id
            assert setup.start_time <= child.start_time <= child.end_time <= setup.end_time  # type: ignore[operator]
        assert first.start_time <= setup.start_time <= setup.end_time <= first.end_time  # type: ignore[operator]
        for span in (first, second):
            assert [link.context.span_id for link in span.links] == [setup_context.span_id]
        assert attributes(second)["spanwire.connection.reused"] is True
        assert "spanwire.segment.handshake.duration" not in attributes(second)
        assert attributes(second)["spanwire.connection.id"] == attributes(first)["spanwire.connection.id"]


def test_a_warmed_connection_has_a_root_span(heard: Heard) -> None:
    with serving() as server:

        async def body() -> None:
            async with ConnectionManager(telemetry=heard.telemetry()) as manager:
                with heard.tracer.start_as_current_span("outer"):
                    await manager.warm(server.endpoint())

        run(body)
        assert heard.one("spanwire.connection_setup").parent is None


def test_a_failed_handshake_says_where(heard: Heard) -> None:
    with LoopbackServer(tls=True) as server:

        async def body() -> None:
            async with ConnectionManager(telemetry=heard.telemetry()) as manager:
                with pytest.raises(errors.ConnectionFailed):
                    await manager.complete(spanwire.Endpoint(server.url, proxy=None), chat())

        run(body)
        setup = heard.one("spanwire.connection_setup")
        assert setup.status.status_code is StatusCode.ERROR
        assert attributes(setup)["spanwire.phase"] == "tls"
        assert heard.one("tls").status.status_code is StatusCode.ERROR
        assert heard.one("tcp").status.status_code is StatusCode.UNSET
        assert attributes(heard.one("chat m"))["error.type"] == "ConnectionFailed"


def test_retries_are_attempts_below_the_one_span(heard: Heard) -> None:
    with serving(Script(status=503), hello()) as server:
        call_once(server, heard, chat(), retries=AT_ONCE)
        span = heard.one("chat m")
        context = span.get_span_context()
        assert context is not None
        attempts = heard.spans("spanwire.attempt")
        assert [parent_id(attempt) for attempt in attempts] == [context.span_id] * 2
        assert [attributes(attempt).get("error.type") for attempt in attempts] == ["Overloaded", None]
        assert attributes(span)["http.request.resend_count"] == 1
        assert span.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize(
    ("way", "outcome", "status"),
    [
        ("break", "closed_by_caller", StatusCode.UNSET),
        ("close", "closed_by_caller", StatusCode.UNSET),
        ("raise", "closed_by_caller", StatusCode.UNSET),
        ("cancel", "cancelled", StatusCode.UNSET),
        ("drop", "abandoned", StatusCode.UNSET),
        ("never read", "closed_by_caller", StatusCode.UNSET),
        ("time out", "timeout", StatusCode.ERROR),
        ("fail", "error", StatusCode.ERROR),
        ("end", "completed", StatusCode.UNSET),
    ],
)
def test_every_end_is_one_span_with_its_outcome(
    heard: Heard, caplog: pytest.LogCaptureFixture, way: str, outcome: str, status: StatusCode
) -> None:
    script = {"end": hello(), "fail": hello(drop_after=3)}.get(way, hello(hang_after=3))
    timeouts = spanwire.Timeouts(idle_s=0.05) if way == "time out" else spanwire.Timeouts()

    async def leave(manager: ConnectionManager, endpoint: spanwire.Endpoint) -> None:
        if way == "drop":
            dropped = manager.stream(endpoint, chat())
            await anext(dropped)
            return
        async with manager.stream(endpoint, chat()) as stream:
            if way == "never read":
                return
            async for chunk in stream:
                if not chunk.text or way in ("end", "fail", "time out"):
                    continue
                if way == "break":
                    break
                if way == "close":
                    await stream.aclose()
                if way == "raise":
                    raise ZeroDivisionError
                if way == "cancel":
                    raise asyncio.CancelledError

    with serving(script) as server:

        async def body() -> None:
            async with ConnectionManager(telemetry=heard.telemetry()) as manager:
                endpoint = server.endpoint(timeouts=timeouts, retries=NEVER)
                with contextlib.suppress(ZeroDivisionError, asyncio.CancelledError, errors.SpanwireError):
                    await leave(manager, endpoint)
                gc.collect()
                if way not in ("end", "fail"):
                    await wait_for(server, lambda s: s.requests and s.requests[0].left)

        with caplog.at_level(logging.WARNING):
            run(body)
        span = heard.one("chat m")
        assert attributes(span)["spanwire.outcome"] == outcome
        assert span.status.status_code is status
        assert ("error.type" in attributes(span)) == (status is StatusCode.ERROR)
        assert caplog.records == []


def test_a_genai_span_of_somebody_else_is_not_doubled_but_enriched(heard: Heard) -> None:
    with serving(hello(prefill_s=0.02)) as server:

        async def body() -> None:
            async with ConnectionManager(telemetry=heard.telemetry()) as manager:
                with heard.tracer.start_as_current_span("chat m", attributes={"gen_ai.operation.name": "chat"}):
                    await manager.complete(server.endpoint(), chat())

        run(body)
        theirs, ours = heard.one("chat m"), heard.one("spanwire.attempt")
        context = theirs.get_span_context()
        assert context is not None
        assert parent_id(ours) == context.span_id
        assert "gen_ai.operation.name" not in attributes(ours)
        assert attributes(theirs)["spanwire.outcome"] == "completed"
        assert "spanwire.segment.model.duration" in attributes(theirs)
        assert "gen_ai.client.operation.duration" not in heard.metrics()


def test_an_agents_span_is_an_ordinary_parent(heard: Heard) -> None:
    with serving(hello()) as server:

        async def body() -> None:
            async with ConnectionManager(telemetry=heard.telemetry()) as manager:
                with heard.tracer.start_as_current_span("agent", attributes={"gen_ai.operation.name": "invoke_agent"}):
                    await manager.complete(server.endpoint(), chat())

        run(body)
        assert parent_id(heard.one("chat m")) is not None


def test_the_default_metrics_are_three_records_for_each_call(heard: Heard) -> None:
    with serving() as server:

        async def body() -> None:
            async with ConnectionManager(telemetry=heard.telemetry()) as manager:
                for _ in range(2):
                    async with manager.stream(server.endpoint(), chat()) as stream:
                        await read(stream)

        run(body)
    found = heard.metrics()
    assert set(found) == {
        "gen_ai.client.operation.duration",
        "spanwire.client.time_to_first_content",
        "spanwire.connection.uses",
        "spanwire.connection.setup.duration",
    }
    (duration,) = found["gen_ai.client.operation.duration"]
    assert duration.count == 2
    assert duration.explicit_bounds[0] == 0.01
    assert {
        point.attributes["spanwire.connection.reused"]: point.value for point in found["spanwire.connection.uses"]
    } == {
        False: 1,
        True: 1,
    }


def test_token_usage_and_segments_are_opt_in(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPANWIRE_METRICS", "tokens, segments")
    # Longer than any round trip on loopback: an estimate below that would be dropped.
    with serving(hello(usage=spanwire.Usage(3, 5, 8), prefill_s=0.1)) as server:
        call_once(server, heard, chat())
    found = heard.metrics()
    assert "gen_ai.client.operation.duration" not in found
    assert {p.attributes["gen_ai.token.type"]: p.sum for p in found["gen_ai.client.token.usage"]} == {
        "input": 3,
        "output": 5,
    }
    assert {p.attributes["spanwire.segment"] for p in found["spanwire.segment.duration"]} >= {
        "model",
        "client",
        "network",
    }


def test_an_unknown_metric_is_refused() -> None:
    with pytest.raises(errors.ConfigurationError, match="tokenz"):
        spanwire.Telemetry(metrics=["tokenz"])


def test_calls_that_wait_for_a_slot_are_counted_up_and_down(heard: Heard) -> None:
    with serving(default=lambda _request: hello()) as server:
        endpoint = server.endpoint(limits=spanwire.Limits(max_concurrent=1))

        async def body() -> None:
            async with ConnectionManager(telemetry=heard.telemetry()) as manager:
                await asyncio.gather(*(manager.complete(endpoint, chat()) for _ in range(3)))

        run(body)
    (point,) = heard.metrics()["spanwire.queue.waiting"]
    assert point.value == 0


def test_odd_parameters_leave_no_attribute_and_no_log(heard: Heard, caplog: pytest.LogCaptureFixture) -> None:
    odd = chat(temperature=True, top_p="high", seed=[1], max_tokens=10**30)
    with serving(hello()) as server, caplog.at_level(logging.WARNING):
        call_once(server, heard, odd)
        found = attributes(heard.one("chat m"))
        assert not {"gen_ai.request.temperature", "gen_ai.request.top_p", "gen_ai.request.seed"} & set(found)
        assert caplog.records == []


def test_telemetry_that_fails_does_not_fail_the_call(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(TracerProvider):
        def get_tracer(self, *_: Any, **__: Any) -> Any:
            class Tracer:
                def start_span(self, *_: Any, **__: Any) -> Any:
                    raise ZeroDivisionError

            return Tracer()

    with serving(hello()) as server:

        async def body() -> None:
            telemetry = spanwire.Telemetry(tracer_provider=Broken())
            async with ConnectionManager(telemetry=telemetry) as manager:
                assert (await manager.complete(server.endpoint(), chat())).text

        with caplog.at_level(logging.WARNING, "spanwire.telemetry"):
            run(body)
    assert {record.message for record in caplog.records} == {
        "a span could not be started",
        "a connection's span could not be made",
    }


def test_telemetry_can_be_turned_off() -> None:
    with serving(hello()) as server:

        async def body() -> None:
            async with ConnectionManager(telemetry=None) as manager:
                reply = await manager.complete(server.endpoint(), chat())
                assert reply.timeline is not None

        run(body)
        assert "traceparent" not in server.requests[0].headers


def test_no_span_shows_keys_headers_queries_or_content(heard: Heard) -> None:
    secret = "s3cret"
    with serving(hello(), Script(status=401), Script.say(secret)) as server:
        endpoint = server.endpoint(api_key=secret, headers={"x-secret": secret}, query={"q": secret})
        call = spanwire.Call.chat("m", [{"role": "user", "content": secret}], user=secret)

        async def body() -> None:
            async with ConnectionManager(telemetry=heard.telemetry()) as manager:
                await manager.complete(endpoint, call)
                with pytest.raises(errors.AuthenticationFailed):
                    await manager.complete(endpoint, call)
                reply = await manager.complete(endpoint, call)
                assert reply.text == secret

        run(body)
        assert all(secret not in span.to_json() for span in heard.spans())
        assert secret not in repr(heard.metrics())
        assert secret not in repr(endpoint) + repr(call)
