"""One OpenTelemetry SDK for one test, and what came out of it."""

from __future__ import annotations

from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import spanwire
from spanwire.manager import ConnectionManager
from spanwire.testing import LoopbackServer
from tests.support import read, run


class Heard:
    """One SDK for one test."""

    def __init__(self, **more: Any) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracers = TracerProvider(**more)
        self.tracers.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.reader = InMemoryMetricReader()
        self.meters = MeterProvider([self.reader])
        self.tracer = self.tracers.get_tracer("test")

    def telemetry(self, **more: Any) -> spanwire.Telemetry:
        return spanwire.Telemetry(tracer_provider=self.tracers, meter_provider=self.meters, **more)

    def spans(self, name: str | None = None) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if name is None or span.name == name]

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.spans(name)
        return span

    def metrics(self) -> dict[str, list[Any]]:
        data = self.reader.get_metrics_data()
        if data is None:
            return {}
        return {
            metric.name: list(metric.data.data_points)
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def parent_id(span: ReadableSpan) -> int | None:
    return span.parent.span_id if span.parent is not None else None


def call_once(
    server: LoopbackServer, heard: Heard, call: spanwire.Call, detail: str | None = None, **more: Any
) -> None:
    async def body() -> None:
        async with ConnectionManager(telemetry=heard.telemetry(detail=detail)) as manager:
            async with manager.stream(server.endpoint(**more), call) as stream:
                await read(stream)

    run(body)
