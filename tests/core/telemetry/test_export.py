"""Spans and metrics reach a receiver over OTLP/HTTP, by OpenTelemetry's own exporters and its own message types."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from google.protobuf.unknown_fields import UnknownFieldSet  # type: ignore[import-untyped]
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

import spanwire
from spanwire.manager import ConnectionManager
from spanwire.testing import Script
from tests.support import NEVER, chat, hello, read, run, serving

KINDS: dict[str, tuple[Any, Any]] = {
    "/v1/traces": (ExportTraceServiceRequest, ExportTraceServiceResponse),
    "/v1/metrics": (ExportMetricsServiceRequest, ExportMetricsServiceResponse),
}


class Receiver:
    """Takes OTLP over HTTP as a collector does, and refuses what is no such message to the last field."""

    def __init__(self) -> None:
        self.got: dict[str, list[Any]] = {path: [] for path in KINDS}
        self.encodings: set[str | None] = set()
        self.faults: list[str] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                answer = receiver.take(self.path, dict(self.headers.items()), body)
                self.send_response(200 if answer is not None else 400)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer or b"")))
                self.end_headers()
                self.wfile.write(answer or b"")

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def take(self, path: str, headers: dict[str, str], body: bytes) -> bytes | None:
        lower = {name.lower(): value for name, value in headers.items()}
        self.encodings.add(lower.get("content-encoding"))
        if lower.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        if path not in KINDS or lower.get("content-type") != "application/x-protobuf":
            self.faults.append(f"{path}: {lower.get('content-type')}")
            return None
        request, response = KINDS[path]
        message = request()
        message.ParseFromString(body)
        if len(UnknownFieldSet(message)) or not message.IsInitialized():
            self.faults.append(f"{path}: fields that no {request.__name__} has")
            return None
        self.got[path].append(message)
        answer: bytes = response().SerializeToString()
        return answer

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


def plain(attributes: Any) -> dict[str, Any]:
    found = {}
    for pair in attributes:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        found[pair.key] = [getattr(v, v.WhichOneof("value")) for v in value.values] if kind == "array_value" else value
    return found


@pytest.mark.parametrize("compression", [Compression.NoCompression, Compression.Gzip])
def test_everything_arrives(receiver: Receiver, compression: Compression) -> None:
    resource = Resource.create({"service.name": "tested"})
    tracers = TracerProvider(resource=resource)
    tracers.add_span_processor(
        BatchSpanProcessor(OTLPSpanExporter(f"{receiver.url}/v1/traces", compression=compression))
    )
    exporter = OTLPMetricExporter(f"{receiver.url}/v1/metrics", compression=compression)
    meters = MeterProvider([PeriodicExportingMetricReader(exporter, 3_600_000)], resource)
    telemetry = spanwire.Telemetry(
        tracer_provider=tracers,
        meter_provider=meters,
        detail="full",
        metrics=["duration", "first_content", "first_chunk", "connections", "tokens", "segments"],
    )
    with serving(hello(usage=spanwire.Usage(3, 5, 8), prefill_s=0.02), Script(status=503)) as server:

        async def body() -> None:
            async with ConnectionManager(telemetry=telemetry) as manager:
                async with manager.stream(server.endpoint(), chat()) as stream:
                    await read(stream)
                with pytest.raises(spanwire.SpanwireError):
                    await manager.complete(server.endpoint(retries=NEVER), chat())

        run(body)
    tracers.shutdown()
    meters.shutdown()
    assert receiver.faults == []
    assert receiver.encodings == {None if compression is Compression.NoCompression else "gzip"}

    spans = [
        span
        for message in receiver.got["/v1/traces"]
        for of_resource in message.resource_spans
        for scope in of_resource.scope_spans
        for span in scope.spans
        if scope.scope.name == "spanwire" and plain(of_resource.resource.attributes)["service.name"] == "tested"
    ]
    first, failed = [span for span in spans if span.name == "chat m"]
    said = plain(first.attributes)
    assert said["gen_ai.usage.input_tokens"] == 3
    assert said["gen_ai.response.finish_reasons"] == ["stop"]
    assert said["spanwire.segment.model.source"] == "estimated"
    assert first.kind == first.SPAN_KIND_CLIENT
    assert (first.status.code, failed.status.code) == (first.status.STATUS_CODE_UNSET, first.status.STATUS_CODE_ERROR)
    setup = next(span for span in spans if span.name == "spanwire.connection_setup")
    assert setup.parent_span_id == first.span_id
    assert [link.span_id for link in failed.links] == [setup.span_id]
    below = {span.name for span in spans if span.parent_span_id == first.span_id}
    assert below >= {"client encode", "network send", "model prefill", "spanwire.connection_setup"}
    for span in spans:
        if span.parent_span_id == first.span_id:
            assert first.start_time_unix_nano <= span.start_time_unix_nano
            assert span.end_time_unix_nano <= first.end_time_unix_nano

    points = {
        metric.name: list(getattr(metric, metric.WhichOneof("data")).data_points)
        for message in receiver.got["/v1/metrics"]
        for of_resource in message.resource_metrics
        for scope in of_resource.scope_metrics
        for metric in scope.metrics
    }
    assert set(points) == {
        "gen_ai.client.operation.duration",
        "gen_ai.client.operation.time_to_first_chunk",
        "gen_ai.client.token.usage",
        "spanwire.client.time_to_first_content",
        "spanwire.connection.setup.duration",
        "spanwire.connection.uses",
        "spanwire.segment.duration",
    }
    durations = {plain(p.attributes).get("error.type"): p.count for p in points["gen_ai.client.operation.duration"]}
    assert durations == {None: 1, "Overloaded": 1}
    assert sum(point.as_int for point in points["spanwire.connection.uses"]) == 2
