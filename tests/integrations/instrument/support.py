"""What several tests of the instrumentation share: clients of both families, and what their calls left behind."""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import httpx
import httpx2
import spanwire_instrument
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import spanwire
from spanwire.testing import LoopbackServer
from spanwire.timeline import Timeline

FAMILIES = (httpx, httpx2)
BODY = {"model": "m", "messages": [{"role": "user", "content": "Say hello"}], "stream": True}


class Seen:
    """A manager, and what it was told of the calls that it did not make itself."""

    def __init__(self) -> None:
        self.timelines: list[Timeline] = []
        self.exporter = InMemorySpanExporter()
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.reader = InMemoryMetricReader()
        self.manager = spanwire.ConnectionManager(
            plugins=[self],
            telemetry=spanwire.Telemetry(
                detail="flat", tracer_provider=self.tracers, meter_provider=MeterProvider(metric_readers=[self.reader])
            ),
        )

    @spanwire.hookimpl
    def register_observers(self) -> list[Any]:
        return [self]

    def call_ended(self, timeline: Timeline) -> None:
        self.timelines.append(timeline)

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self.exporter.get_finished_spans()

    @property
    def outcomes(self) -> list[str]:
        return [timeline.outcome for timeline in self.timelines]

    def client(self, hx: ModuleType, **more: Any) -> Any:
        return getattr(spanwire_instrument, f"{hx.__name__}_client")(manager=self.manager, **more)

    def async_client(self, hx: ModuleType, **more: Any) -> Any:
        return getattr(spanwire_instrument, f"{hx.__name__}_async_client")(manager=self.manager, **more)


def trust(server: LoopbackServer) -> Any:
    """For ``verify=``."""
    if server.ca is None:
        return True
    return ssl.create_default_context(cafile=str(server.ca))


def chat_url(server: LoopbackServer) -> str:
    return f"{server.url}/chat/completions"


def connections(server: LoopbackServer) -> int:
    """How many connections the requests came on."""
    return len({request.connection for request in server.requests})


@contextmanager
def environment(monkeypatch: Any, values: Mapping[str, str]) -> Iterator[None]:
    with monkeypatch.context() as patch:
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
            patch.delenv(name, raising=False)
            patch.delenv(name.lower(), raising=False)
        for name, value in values.items():
            patch.setenv(name, value)
        yield
