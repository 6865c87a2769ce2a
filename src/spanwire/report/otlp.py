"""PURE: calls out of OpenTelemetry spans, as OTLP writes them in JSON (ExportTraceServiceRequest).

A span that carries ``spanwire.outcome`` is a call: our own ``chat m``; or, where another instrumentation has a span for
the call already, both that one and our ``spanwire.attempt`` below it. Then ours has the times, and the outer one says
which model it was; they are one call. A ``spanwire.attempt`` with a number is one try of a call, and none.
"""

from __future__ import annotations

from typing import Any

import msgspec

from .calls import SOURCES, Call, Piece, Pieces, _last_chunk_s

__all__ = ["ResourceSpans", "Spans"]

_LIMIT_S = 1e9


class _Value(msgspec.Struct, frozen=True, gc=False):
    stringValue: str | None = None  # noqa: N815 - the names of OTLP
    boolValue: bool | None = None  # noqa: N815
    intValue: int | str | None = None  # noqa: N815 - text by the rules of protobuf's JSON, a number by habit
    doubleValue: float | str | None = None  # noqa: N815


class _Attribute(msgspec.Struct, gc=False):
    key: str
    value: _Value = _Value()


class _Span(msgspec.Struct):
    traceId: str = ""  # noqa: N815
    spanId: str = ""  # noqa: N815
    parentSpanId: str = ""  # noqa: N815
    name: str = ""
    startTimeUnixNano: int | str = 0  # noqa: N815
    endTimeUnixNano: int | str = 0  # noqa: N815
    attributes: list[_Attribute] = []


class _ScopeSpans(msgspec.Struct):
    spans: list[_Span] = []


class ResourceSpans(msgspec.Struct):
    """One item of ``resourceSpans``."""

    scopeSpans: list[_ScopeSpans] = []  # noqa: N815


class _Model(msgspec.Struct, frozen=True, gc=False):
    """What a GenAI span knows about the call that ours does not, where ours is below it."""

    model: str
    operation: str
    input_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None


#: Parts that only a clock on this side can have given; the others of a segment have the segment's source.
_MEASURED = frozenset({("queue", "local"), ("queue", "backoff"), ("network", "send")})


class Spans:
    """Takes spans in, in any order and from any number of files, and gives each call once."""

    def __init__(self, shared: Pieces) -> None:
        self._shared = shared
        self._calls: dict[tuple[str, str], Call] = {}
        self._nested: dict[tuple[str, str], tuple[str, str]] = {}  # to the span above
        self._models: dict[tuple[str, str], _Model] = {}
        self._names: dict[str, tuple[str, str, str] | None] = {}
        self.seen = 0
        self.repeated = 0

    def add(self, resources: list[ResourceSpans]) -> int:
        """Take in one export; how many of its spans are new calls."""
        new = 0
        for resource in resources:
            for scope in resource.scopeSpans:
                for span in scope.spans:
                    self.seen += 1
                    new += self._add(span)
        return new

    def _add(self, span: _Span) -> bool:
        values = {attribute.key: _plain(attribute.value) for attribute in span.attributes}
        key = (span.traceId, span.spanId)
        model = values.get("gen_ai.request.model") or values.get("llm.model_name")
        outcome = values.get("spanwire.outcome")
        nested = span.name == "spanwire.attempt"
        if model and not nested:
            self._models[key] = _Model(
                self._shared.name(str(model)),
                self._shared.name(_text(values.get("gen_ai.operation.name"))),
                _count(values.get("gen_ai.usage.input_tokens", values.get("llm.token_count.prompt"))),
                _count(values.get("gen_ai.usage.output_tokens", values.get("llm.token_count.completion"))),
                _count(values.get("gen_ai.usage.cache_read.input_tokens")),
            )
        if not outcome or "spanwire.attempt.number" in values:
            return False
        if key in self._calls and span.spanId:
            self.repeated += 1
            return False
        if not span.spanId:
            key = ("", str(len(self._calls)))
        self._calls[key] = self._call(span, values, str(outcome))
        if nested and span.parentSpanId:
            self._nested[key] = (span.traceId, span.parentSpanId)
        return True

    def _call(self, span: _Span, values: dict[str, Any], outcome: str) -> Call:
        shared = self._shared
        begin_ns, end_ns = _whole(span.startTimeUnixNano), _whole(span.endTimeUnixNano)
        rows = self._rows(values)
        total_s = sum(seconds for *_, seconds in rows) if rows else max(0.0, (end_ns - begin_ns) / 1e9)
        pieces, durations = shared.share(rows)
        first_content_s = _seconds(values.get("spanwire.time_to_first_content"))
        last_chunk_s = _seconds(values.get("spanwire.time_to_last_chunk"))
        reused = values.get("spanwire.connection.reused")
        error_type = values.get("error.type")
        return Call(
            started_unix_s=begin_ns / 1e9 if 0 < begin_ns < 253_402_300_800 * 10**9 else None,
            endpoint=shared.name(_endpoint(values)),
            model=shared.name(_text(values.get("gen_ai.request.model") or values.get("llm.model_name"))),
            operation=shared.name(_text(values.get("gen_ai.operation.name"))),
            transport=shared.name(_text(values.get("spanwire.transport"))),
            outcome=shared.name(outcome),
            error_type=shared.name(str(error_type)) if error_type and outcome != "completed" else None,
            total_s=total_s,
            first_content_s=first_content_s,
            last_chunk_s=last_chunk_s if last_chunk_s is not None else _last_chunk_s(first_content_s, rows),
            reused=reused if isinstance(reused, bool) else None,
            attempts=1 + (_count(values.get("http.request.resend_count")) or 0),
            input_tokens=_count(values.get("gen_ai.usage.input_tokens")),
            output_tokens=_count(values.get("gen_ai.usage.output_tokens")),
            cached_tokens=_count(values.get("gen_ai.usage.cache_read.input_tokens")),
            pieces=pieces,
            durations=durations,
            trace_id=span.traceId or None,
        )

    def _rows(self, values: dict[str, Any]) -> list[tuple[str, str, str, float]]:
        wholes: dict[str, float] = {}
        parts: list[tuple[str, str, float]] = []
        for name, value in values.items():
            if name.startswith("spanwire.segment."):
                found = self._names[name] if name in self._names else self._names.setdefault(name, _segment(name))
                if found is None or (seconds := _seconds(value)) is None:
                    continue
                if found[1]:
                    parts.append((found[0], found[1], seconds))
                else:
                    wholes[found[0]] = seconds
        rows: list[tuple[str, str, str, float]] = []
        for segment, whole_s in wholes.items():
            source = values.get(f"spanwire.segment.{segment}.source")
            source = source if source in SOURCES else "measured"
            rest_s = whole_s
            for name, part, seconds in parts:
                if name == segment:
                    own = values.get(f"spanwire.segment.{segment}.{part}.source")
                    if own not in SOURCES:
                        own = "measured" if (segment, part) in _MEASURED else source
                    rows.append((segment, part, own, seconds))
                    rest_s -= seconds
            if rest_s > 1e-9:
                rows.append((segment, "", source, rest_s))
        return rows

    def calls(self) -> list[Call]:
        """Every call once: without outer spans whose call has a span of its own, which gets the outer one's model."""
        told_below = set(self._nested.values())
        last: dict[tuple[str, str], tuple[float, tuple[str, str]]] = {}
        for below, above in self._nested.items():
            last[above] = max(last.get(above, (-1.0, below)), (self._calls[below].started_unix_s or 0.0, below))
        calls: list[Call] = []
        for key, call in self._calls.items():
            outer = self._nested.get(key)
            if outer is None:
                if key not in told_below:
                    calls.append(call)
                continue
            known = self._models.get(outer)
            if known is not None:
                call = msgspec.structs.replace(
                    call, model=call.model or known.model, operation=call.operation or known.operation
                )
            if known is not None and last[outer][1] == key:  # of an SDK's tries the last one has the answer
                call = msgspec.structs.replace(
                    call,
                    input_tokens=known.input_tokens if call.input_tokens is None else call.input_tokens,
                    output_tokens=known.output_tokens if call.output_tokens is None else call.output_tokens,
                    cached_tokens=known.cached_tokens if call.cached_tokens is None else call.cached_tokens,
                )
            calls.append(call)
        return calls


def _segment(name: str) -> tuple[str, str, str] | None:
    """``spanwire.segment.model.prefill.duration`` to its segment and part; None for what is no duration."""
    words = name.split(".")
    if words[-1] != "duration" or not 4 <= len(words) <= 5:
        return None
    piece: Piece = (words[2], words[3] if len(words) == 5 else "", "")
    return piece


def _plain(value: _Value) -> Any:
    if value.stringValue is not None:
        return value.stringValue
    if value.doubleValue is not None:
        return value.doubleValue
    if value.boolValue is not None:
        return value.boolValue
    return value.intValue


def _whole(value: int | str) -> int:
    try:
        return int(value)
    except ValueError:
        return 0


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _count(value: Any) -> int | None:
    if isinstance(value, str):
        value = int(value) if value.isascii() and value.isdigit() and len(value) < 17 else None
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 2**53 else None


def _seconds(value: Any) -> float | None:
    """A duration; a whole number of seconds may come as an integer, and so as text."""
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        return None
    return seconds if 0 <= seconds <= _LIMIT_S else None


def _endpoint(values: dict[str, Any]) -> str:
    """As ``Endpoint.address`` writes it; a path is a unix socket's."""
    host = _text(values.get("server.address"))
    port = _count(values.get("server.port"))
    if host.startswith("/"):
        return f"unix:{host}"
    if not host or port is None:
        return host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
