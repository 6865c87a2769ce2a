"""Spans that are counted, on OpenTelemetry's API alone: the kit asks for no SDK."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from opentelemetry import trace

__all__ = ["Spans"]


class _Span(trace.Span):
    def __init__(self, name: str, attributes: Mapping[str, Any] | None) -> None:
        self.name = name
        self.attributes: dict[str, Any] = dict(attributes or {})
        self.told: list[str] = []
        self.ends = 0
        flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)
        self._context = trace.SpanContext(
            random.getrandbits(128) or 1, random.getrandbits(64) or 1, is_remote=False, trace_flags=flags
        )

    def end(self, end_time: int | None = None) -> None:
        self.ends += 1

    def get_span_context(self) -> trace.SpanContext:
        return self._context

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        self.attributes.update(attributes)

    def set_attribute(self, key: str, value: Any) -> None:
        self.attributes[key] = value

    def add_event(self, name: str, attributes: Any = None, timestamp: int | None = None) -> None:
        self.told.append(f"{name} {attributes}")

    def add_link(self, context: trace.SpanContext, attributes: Any = None) -> None:
        self.told.append(f"link {attributes}")

    def update_name(self, name: str) -> None:
        self.name = name

    def is_recording(self) -> bool:
        return not self.ends

    def set_status(self, status: Any, description: str | None = None) -> None:
        self.told.append(f"{getattr(status, 'description', status)} {description}")

    def record_exception(self, exception: BaseException, *more: Any, **rest: Any) -> None:
        self.told.append(repr(exception))


class _Tracer(trace.Tracer):
    def __init__(self, spans: list[_Span]) -> None:
        self._spans = spans

    def start_span(
        self, name: str, context: Any = None, kind: Any = None, attributes: Any = None, *_: Any, **__: Any
    ) -> _Span:
        span = _Span(name, attributes)
        self._spans.append(span)
        return span

    def start_as_current_span(self, *_: Any, **__: Any) -> Any:  # spanwire has no use for it
        raise NotImplementedError


class Spans(trace.TracerProvider):
    """A tracer provider that keeps every span."""

    def __init__(self) -> None:
        self.spans: list[_Span] = []

    def get_tracer(self, *_: Any, **__: Any) -> trace.Tracer:
        """One that adds to :attr:`spans`."""
        return _Tracer(self.spans)

    def problems(self) -> list[str]:
        """Spans that were not ended, or more than once."""
        return [f"span {span.name!r} was ended {span.ends} times" for span in self.spans if span.ends != 1]

    def text(self) -> str:
        """All that they say."""
        return "\n".join(f"{span.name} {span.attributes} {span.told}" for span in self.spans)
