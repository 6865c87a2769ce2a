"""What samplers are told, and what is left undone where nothing is recorded or wanted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import _SUPPRESS_INSTRUMENTATION_KEY, Context
from opentelemetry.sdk.trace.sampling import (
    ALWAYS_OFF,
    Decision,
    ParentBased,
    Sampler,
    SamplingResult,
    TraceIdRatioBased,
)
from opentelemetry.trace import Link, SpanKind, TraceState
from opentelemetry.util.types import Attributes

import spanwire
from spanwire.manager import ConnectionManager
from spanwire.telemetry import attributes as attributes_module
from spanwire.testing import LoopbackServer
from tests.core.telemetry.heard import Heard, attributes, call_once
from tests.support import chat, hello, read, run, serving


class ByModel(Sampler):
    """Keeps calls of one model, and notes what it was asked."""

    def __init__(self, keep: str) -> None:
        self.keep = keep
        self.asked: list[tuple[str, SpanKind | None, dict[str, Any]]] = []

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        self.asked.append((name, kind, dict(attributes or {})))
        keep = (attributes or {}).get("gen_ai.request.model") == self.keep
        return SamplingResult(Decision.RECORD_AND_SAMPLE if keep else Decision.DROP, attributes)

    def get_description(self) -> str:
        return "by model"


def test_a_sampler_sees_what_the_conventions_promise() -> None:
    sampler = ByModel("m")
    heard = Heard(sampler=ParentBased(sampler))
    with serving(hello(), hello()) as server:
        call_once(server, heard, chat("other"))
        call_once(server, heard, chat(temperature=0.5))
        name, kind, given = sampler.asked[0]
        assert (name, kind) == ("chat other", SpanKind.CLIENT)
        assert given == {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "openai",
            "gen_ai.request.model": "other",
            "gen_ai.request.stream": True,
            "server.address": "127.0.0.1",
            "server.port": server.port,
        }
        sent = [request.headers["traceparent"].split("-") for request in server.requests]
    assert {span.name for span in heard.spans()} >= {"chat m", "tcp"}
    assert not heard.spans("chat other")
    # Both go on to the server, which samples as we did.
    assert [int(flags, 16) & 1 for *_, flags in sent] == [0, 1]


@pytest.mark.parametrize(("ratio", "kept"), [(0.0, 0), (1.0, 1)])
def test_the_ratio_sampler(ratio: float, kept: int) -> None:
    heard = Heard(sampler=ParentBased(TraceIdRatioBased(ratio)))
    with serving(hello()) as server:
        call_once(server, heard, chat(), detail="full")
        assert int(server.requests[0].headers["traceparent"][-2:], 16) & 1 == kept
    assert len(heard.spans("chat m")) == kept
    assert bool(heard.spans()) == bool(kept)


def test_the_parents_decision_is_kept() -> None:
    heard = Heard(sampler=ParentBased(ALWAYS_OFF))
    with serving(hello(), hello()) as server:

        async def body() -> None:
            remote = trace.SpanContext(1 << 100, 7, is_remote=True, trace_flags=trace.TraceFlags(1))
            async with ConnectionManager(telemetry=heard.telemetry()) as manager:
                with trace.use_span(trace.NonRecordingSpan(remote)):
                    await manager.complete(server.endpoint(), chat())
                await manager.complete(server.endpoint(), chat())

        run(body)
        first, second = [request.headers["traceparent"].split("-") for request in server.requests]
    assert len(heard.spans("chat m")) == 1
    assert int(first[1], 16) == 1 << 100
    assert [int(sent[3], 16) & 1 for sent in (first, second)] == [1, 0]


def test_an_unsampled_call_is_counted_and_nothing_is_made_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_of_it(*_: object) -> dict[str, Any]:
        raise AssertionError

    monkeypatch.setattr(attributes_module, "own_attributes", none_of_it)
    monkeypatch.setattr(spanwire.telemetry, "own_attributes", none_of_it)
    heard = Heard(sampler=ALWAYS_OFF)
    with serving(hello()) as server:

        async def body() -> None:
            async with ConnectionManager(telemetry=heard.telemetry(detail="full")) as manager:
                async with manager.stream(server.endpoint(), chat()) as stream:
                    await read(stream)
                assert "pieces" not in stream.timeline.__dict__  # worked out when somebody asks

        run(body)
    assert heard.spans() == []
    (duration,) = heard.metrics()["gen_ai.client.operation.duration"]
    assert duration.count == 1


@pytest.mark.parametrize("key", [_SUPPRESS_INSTRUMENTATION_KEY, "suppress_instrumentation"], ids=["new", "old"])
def test_where_instrumentation_is_suppressed_nothing_is_told(key: str) -> None:
    heard = Heard()
    with LoopbackServer(default=lambda _request: hello()) as server:
        endpoint = server.endpoint(limits=spanwire.Limits(max_concurrent=1))

        async def body() -> None:
            async with ConnectionManager(telemetry=heard.telemetry()) as manager:
                token = otel_context.attach(otel_context.set_value(key, True))
                async with manager.stream(endpoint, chat()) as stream:
                    other = manager.complete(endpoint, chat())
                    await read(stream)
                await other
                otel_context.detach(token)
                assert stream.timeline.segments

        run(body)
        assert all("traceparent" not in request.headers for request in server.requests)
    assert heard.spans() == []
    assert heard.metrics() == {}


def test_a_call_that_is_told_uses_a_connection_that_was_not() -> None:
    heard = Heard()
    with serving() as server:

        async def body() -> None:
            async with ConnectionManager(telemetry=heard.telemetry()) as manager:
                token = otel_context.attach(otel_context.set_value("suppress_instrumentation", True))
                await manager.complete(server.endpoint(), chat())
                otel_context.detach(token)
                await manager.complete(server.endpoint(), chat())

        run(body)
    call = heard.one("chat m")
    assert list(call.links) == []
    assert attributes(call)["spanwire.connection.reused"] is True
