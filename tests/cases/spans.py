"""One OpenTelemetry SDK for one test, and what its exporter was given."""

from __future__ import annotations

from typing import Any

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import spanwire
from tests.cases.play import nothing_left


class Spans:
    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self._provider = TracerProvider()
        self._provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self._provider.get_tracer("test")

    def telemetry(self) -> spanwire.Telemetry:
        return spanwire.Telemetry(tracer_provider=self._provider)

    def all(self, name: str = "chat m") -> list[ReadableSpan]:
        """The finished spans of that name, in the order of their begin; all of them can be sent to a collector."""
        finished = self._exporter.get_finished_spans()
        with nothing_left():  # the encoder logs what it cannot encode
            encode_spans(finished).SerializeToString()
        assert all(span.to_json() for span in finished)
        return sorted((span for span in finished if span.name == name), key=lambda span: span.start_time or 0)

    def one(self, name: str = "chat m") -> ReadableSpan:
        (span,) = self.all(name)
        return span

    def names(self) -> list[str]:
        return [span.name for span in self._exporter.get_finished_spans()]


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def span_id(span: ReadableSpan) -> int:
    context = span.get_span_context()
    assert context is not None
    return context.span_id


def parent_id(span: ReadableSpan) -> int | None:
    return span.parent.span_id if span.parent is not None else None
