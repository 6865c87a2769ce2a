"""Spans of ours with and without LiteLLM's OpenTelemetry callback."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import litellm
import litellm_spanwire
import pytest
from litellm.integrations.opentelemetry import OpenTelemetry, OpenTelemetryConfig
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import spanwire
from spanwire.testing import LoopbackServer, Script
from tests.integrations.litellm.support import run, to

each_way = pytest.mark.parametrize("way", ["acompletion", "acompletion stream", "completion", "completion stream"])


def _scope(span: ReadableSpan) -> str | None:
    return span.instrumentation_scope.name if span.instrumentation_scope is not None else None


class Traced:
    """A provider for both, and what came out of it."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("app")

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self.exporter.get_finished_spans())

    def of_spanwire(self) -> ReadableSpan:
        """Its one span for the call."""
        calls = [s for s in self.spans if s.kind is trace.SpanKind.CLIENT and _scope(s) == "spanwire"]
        assert len(calls) == 1
        return calls[0]

    def model_calls(self) -> list[str]:
        """Spans that say of themselves that they are the call. LiteLLM may tell of an earlier test's late."""
        said = [(s.name, (s.attributes or {}).get("gen_ai.request.model")) for s in self.spans]
        return [name for name, model in said if model in ("beside", "spanwire/beside")]


@pytest.fixture
def traced() -> Iterator[Traced]:
    made = Traced()
    telemetry = spanwire.Telemetry(tracer_provider=made.provider)
    manager = spanwire.ConnectionManager(telemetry=telemetry)
    litellm_spanwire.register(manager)
    yield made
    litellm_spanwire.handler.sync_manager.close()


@pytest.fixture(params=[False, True], ids=["on the user's span", "on a span of its own"])
def beside(request: pytest.FixtureRequest, traced: Traced, monkeypatch: pytest.MonkeyPatch) -> Traced:
    """LiteLLM's callback too, in both of its manners."""
    if request.param:
        monkeypatch.setenv("USE_OTEL_LITELLM_REQUEST_SPAN", "true")
    config = OpenTelemetryConfig(exporter=traced.exporter)
    litellm.callbacks = [OpenTelemetry(config=config, tracer_provider=traced.provider)]
    return traced


async def call(way: str, given: dict[str, Any]) -> None:
    streamed = way.endswith("stream")
    if way.startswith("acompletion"):
        made = await litellm.acompletion(**given, stream=streamed)
        if streamed:
            async for _ in made:
                assert not trace.get_current_span().get_span_context().is_valid or _is_users()
    else:
        made = litellm.completion(**given, stream=streamed)
        if streamed:
            list(made)


def _is_users() -> bool:
    return getattr(trace.get_current_span(), "name", None) == "user"


@each_way
def test_one_span_for_the_call_below_the_users(traced: Traced, server: LoopbackServer, way: str) -> None:
    async def body() -> None:
        with traced.tracer.start_as_current_span("user"):
            await call(way, to(server, "spanwire/traced"))
            assert _is_users()

    run(body)
    (user,) = [span for span in traced.spans if span.name == "user"]
    ours = traced.of_spanwire()
    assert ours.name == "chat traced"
    assert ours.parent is not None
    assert ours.parent.span_id == user.context.span_id
    assert not user.attributes
    sent = server.requests[0].headers["traceparent"].split("-")
    assert sent[1:3] == [f"{ours.context.trace_id:032x}", f"{ours.context.span_id:016x}"]


def test_a_stream_hangs_below_the_span_in_which_it_was_asked_for(traced: Traced, server: LoopbackServer) -> None:
    async def body() -> None:
        with traced.tracer.start_as_current_span("user") as user:
            stream = await litellm.acompletion(**to(server, "spanwire/traced"), stream=True)
        with traced.tracer.start_as_current_span("elsewhere"):
            async for _ in stream:
                pass
        ours = traced.of_spanwire()
        assert ours.parent is not None
        assert ours.parent.span_id == user.get_span_context().span_id

    run(body)


def test_the_proxys_span_is_the_parent(traced: Traced, server: LoopbackServer) -> None:
    """Which the proxy hands along, and never makes current."""
    parent = traced.tracer.start_span("Received Proxy Server Request")
    given = to(server, "spanwire/traced", metadata={"litellm_parent_otel_span": parent})
    run(lambda: call("acompletion", given))
    ours = traced.of_spanwire()
    assert ours.parent is not None
    assert ours.parent.span_id == parent.get_span_context().span_id


@each_way
def test_beside_litellms_callback_the_call_is_one_model_call(
    beside: Traced, server: LoopbackServer, way: str, request: pytest.FixtureRequest
) -> None:
    own = "on a span of its own" in request.node.name

    async def body() -> None:
        with beside.tracer.start_as_current_span("user"):
            await call(way, to(server, "spanwire/beside"))
            async with asyncio.timeout(20):  # it writes after the call, in a task or a thread of its own
                while not beside.model_calls() and not _written(trace.get_current_span()):
                    await asyncio.sleep(0.001)

    run(body)
    (user,) = [span for span in beside.spans if span.name == "user"]
    ours = beside.of_spanwire()
    assert ours.name == "spanwire.attempt"
    assert ours.parent is not None
    assert ours.parent.span_id == user.context.span_id
    assert ours.attributes is not None
    assert "spanwire.segment.client.duration" in ours.attributes
    assert not [name for name in ours.attributes if name.startswith("gen_ai.")]
    assert not [name for name in user.attributes or {} if name.startswith("spanwire.")]
    if own:
        assert beside.model_calls() == ["litellm_request"]
    else:  # where it can find the user's span when it writes, it does
        assert beside.model_calls() in (["litellm_request"], ["user"])


def _written(span: Any) -> bool:
    return "gen_ai.operation.name" in (getattr(span, "attributes", None) or {})


def test_beside_litellms_callback_without_a_span_of_the_users(beside: Traced, server: LoopbackServer) -> None:
    async def body() -> None:
        await call("acompletion", to(server, "spanwire/beside"))
        async with asyncio.timeout(20):
            while not beside.model_calls():
                await asyncio.sleep(0.001)

    run(body)
    assert beside.of_spanwire().parent is None
    assert beside.model_calls() == ["litellm_request"]


def test_a_call_that_fails(traced: Traced, server: LoopbackServer) -> None:
    server.script(Script(status=503))

    async def body() -> None:
        with traced.tracer.start_as_current_span("user") as user:
            with pytest.raises(litellm.ServiceUnavailableError):
                await litellm.acompletion(**to(server, "spanwire/traced"))
            assert trace.get_current_span() is user

    run(body)
    assert traced.of_spanwire().status.status_code is trace.StatusCode.ERROR
