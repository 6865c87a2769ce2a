"""Timeline to OpenTelemetry spans and metrics. Uses the API only, and never raises into the caller.

Spans: ``chat {model}`` (CLIENT, GenAI conventions) for each call, to the end of its stream; ``spanwire.attempt`` below it
for each try of a call that was tried more than once; ``spanwire.connection_setup`` with children ``dns``, ``tcp``,
``tls``, ... when a connection was made: a child of the call that waited for it, a root when pre-warmed, and every call
that uses the connection links to it. Where a GenAI span of another instrumentation is active already, the call's span is
a ``spanwire.attempt`` below it, and the outer span gets the ``spanwire.*`` attributes too: no call is counted twice.

Metrics, at most three records for each call by default: duration, time to first content (streams), and
``spanwire.connection.uses``. Token usage and segment durations are opt-in (``Telemetry(metrics=...)``).
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib import metadata
from typing import TYPE_CHECKING, Any, Protocol

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode

from .calls import Usage
from .endpoint import Endpoint
from .errors import CallTimeout, ConfigurationError, ServerError, SpanwireError
from .pool import Dial
from .timeline import CallRecord, Source, Timeline, weakest_source
from .transport import Head

if TYPE_CHECKING:
    from opentelemetry import metrics

__all__ = ["Asked", "CallSpan", "Telemetry"]

_log = logging.getLogger("spanwire.telemetry")

# --- the one table of names -----------------------------------------------------------------------------------------

#: Metric names that the GenAI conventions are about to change: as everybody emits them today (v1.41), and as in
#: semantic-conventions-genai, which has no release yet. ``SPANWIRE_SEMCONV=genai`` switches.
_NAMES = {
    "v1.41": {
        "duration": "gen_ai.client.operation.duration",
        "tokens": "gen_ai.client.token.usage",
    },
    "genai": {
        "duration": "gen_ai.client.inference.duration",
        "tokens": "gen_ai.client.token.usage",
    },
}
#: Histogram boundaries in seconds. Source: GenAI conventions v1.41 for whole calls; for handshakes and segments the
#: proposal of design section 8: from a loopback connect (1 ms) to a connect limit (10 s).
_CALL_BUCKETS = [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92]
_PART_BUCKETS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10]
#: Tokens. Source: GenAI conventions v1.41.
_TOKEN_BUCKETS = [4**power for power in range(14)]
#: ``gen_ai.provider.name`` by host suffix. Source: GenAI conventions v1.41, the attribute's well-known values. The
#: conventions ask for ``openai`` where an OpenAI-compatible server cannot be told apart.
_PROVIDERS = (
    ("openai.azure.com", "azure.ai.openai"),
    ("services.ai.azure.com", "azure.ai.inference"),
    ("api.anthropic.com", "anthropic"),
    ("api.groq.com", "groq"),
    ("api.mistral.ai", "mistral_ai"),
    ("api.deepseek.com", "deepseek"),
    ("api.perplexity.ai", "perplexity"),
    ("api.x.ai", "x_ai"),
    ("api.cohere.com", "cohere"),
    ("generativelanguage.googleapis.com", "gcp.gemini"),
    ("aiplatform.googleapis.com", "gcp.vertex_ai"),
    ("amazonaws.com", "aws.bedrock"),
)
#: Request parameters that have an attribute. Source: GenAI conventions v1.41.
_PARAMETERS = (
    ("temperature", "gen_ai.request.temperature"),
    ("top_p", "gen_ai.request.top_p"),
    ("max_tokens", "gen_ai.request.max_tokens"),
    ("max_completion_tokens", "gen_ai.request.max_tokens"),
    ("frequency_penalty", "gen_ai.request.frequency_penalty"),
    ("presence_penalty", "gen_ai.request.presence_penalty"),
    ("seed", "gen_ai.request.seed"),
)
_PARAMETER_NAMES = frozenset(parameter for parameter, _ in _PARAMETERS)
#: What a caller can switch on and off.
_METRICS = frozenset({"duration", "first_content", "connections", "tokens", "segments"})
_DEFAULT_METRICS = frozenset({"duration", "first_content", "connections"})
#: Longest text on a span, in characters: what a server or a plugin gives has no limit of its own.
_TEXT_LIMIT = 1024
#: As many models' labels are kept with an endpoint.
_LABELS_KEPT = 64
_GENAI_KEY = "opentelemetry.genai.client.inference.context"
_SUPPRESS_KEY = "suppress_language_model_instrumentation"
_Value = str | bool | int | float


class Asked(Protocol):
    """What spans and metrics tell of a request: a :class:`~spanwire.calls.Call`, or what was seen of another client's."""

    @property
    def operation(self) -> str:
        """As in ``gen_ai.operation.name``."""

    @property
    def model(self) -> str:
        """``""`` where it is not known."""

    @property
    def body(self) -> Mapping[str, Any]:
        """The request's parameters; others than those that have an attribute are ignored."""


class CallSpan:
    """The span of one call, and what its end needs."""

    __slots__ = ("_linked", "anchor_ns", "context", "nested", "outer", "span")

    def __init__(
        self, span: Span, context: Context, anchor_ns: int, outer: Span | None, linked: SpanContext | None
    ) -> None:
        self.span = span
        self.context = context
        self.anchor_ns = anchor_ns  # wall clock minus perf_counter: read once, so that no two clocks are compared
        self.outer = outer
        self.nested = outer is not None
        self._linked = [] if linked is None else [linked]

    def link(self, context: SpanContext) -> None:
        """Link the span to a connection's, once."""
        if context not in self._linked:
            self._linked.append(context)
            self.span.add_link(context)


class _Labels:
    """What spans and metrics of calls to one endpoint, of one operation and model, have in common: made once."""

    __slots__ = ("attributes", "first_content", "fresh", "genai", "name", "nested", "reused")

    def __init__(self, endpoint: Endpoint, operation: str, model: str, *, streamed: bool) -> None:
        model = _text(model)
        server = _server(endpoint)
        self.name = f"{operation} {model}" if model else operation
        self.nested = server
        asked: dict[str, _Value] = {"gen_ai.request.model": model} if model else {}
        self.genai: dict[str, _Value] = {
            **server,
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": _provider(endpoint.origin.host),
            **asked,
        }
        self.attributes: dict[str, _Value] = {**self.genai, "gen_ai.request.stream": streamed}
        self.first_content: dict[str, _Value] = {**server, **asked}
        self.fresh: dict[str, _Value] = {**server, "spanwire.connection.reused": False}
        self.reused: dict[str, _Value] = {**server, "spanwire.connection.reused": True}


def _labels(endpoint: Endpoint, call: Asked, *, streamed: bool) -> _Labels:
    known: dict[tuple[str, str, bool], _Labels] | None = endpoint.__dict__.get("_labels")
    if known is None:
        known = endpoint.__dict__["_labels"] = {}
    key = (call.operation, call.model, streamed)
    found = known.get(key)
    if found is None:
        if len(known) >= _LABELS_KEPT:
            known.clear()
        found = known[key] = _Labels(endpoint, call.operation, call.model, streamed=streamed)
    return found


def _server(endpoint: Endpoint) -> dict[str, _Value]:
    server: dict[str, _Value] = {"server.address": _server_address(endpoint)}
    if endpoint.uds is None and endpoint.origin.port:
        server["server.port"] = endpoint.origin.port
    return server


@lru_cache(maxsize=256)
def _provider(host: str) -> str:
    return next((name for suffix, name in _PROVIDERS if host == suffix or host.endswith("." + suffix)), "openai")


class Telemetry:
    """Settings of spans and metrics for one manager.

    Args:
        tracer_provider, meter_provider: of OpenTelemetry; the process's global ones by default.
        metrics: which to record: ``duration``, ``first_content``, ``connections`` by default; ``tokens``, ``segments``.
            The environment variable SPANWIRE_METRICS (comma list) sets the default.

    Raises:
        ConfigurationError: an unknown name in ``metrics``.
    """

    def __init__(
        self,
        *,
        tracer_provider: trace.TracerProvider | None = None,
        meter_provider: metrics.MeterProvider | None = None,
        metrics: Iterable[str] | None = None,
    ) -> None:
        wanted = frozenset(metrics) if metrics is not None else _metrics_from_environment()
        unknown = wanted - _METRICS
        if unknown:
            raise ConfigurationError(
                f"Telemetry(metrics=...) does not know {', '.join(sorted(unknown))}; it knows {', '.join(sorted(_METRICS))}"
            )
        self._wanted = wanted
        # Not needed by who only imports spanwire, and a dozen modules.
        from opentelemetry import metrics as metrics_api
        from opentelemetry import propagate

        self._inject = propagate.inject
        self._extract = propagate.extract
        self._get_meter = metrics_api.get_meter
        self._tracer = trace.get_tracer("spanwire", _version(), tracer_provider)
        self._meter_provider = meter_provider
        self._made: _Instruments | None = None

    def start(
        self,
        call: Asked,
        endpoint: Endpoint,
        begin_ns: int,
        *,
        streamed: bool,
        connection: SpanContext | None = None,
        carrier: Mapping[str, str] | None = None,
    ) -> CallSpan | None:
        """Start the call's span as a child of what is current now, linked to its connection's. None if that failed.

        ``carrier``: the request's own trace headers, names in lower case. They name the parent where no span is current.
        """
        try:
            anchor_ns = time.time_ns() - time.perf_counter_ns()
            context = otel_context.get_current()
            if carrier and not trace.get_current_span(context).get_span_context().is_valid:
                context = self._extract(carrier, context)
            outer = _active_genai_span(context)
            labels = _labels(endpoint, call, streamed=streamed)
            if outer is None:
                name, attributes = labels.name, labels.attributes
                if not _PARAMETER_NAMES.isdisjoint(call.body):
                    attributes = {**attributes, **_parameters(call.body)}
            else:
                name, attributes = "spanwire.attempt", labels.nested
            links = None if connection is None else (Link(connection),)
            span = self._tracer.start_span(
                name, context, SpanKind.CLIENT, attributes, links, anchor_ns + begin_ns, record_exception=False
            )
            return CallSpan(span, trace.set_span_in_context(span, context), anchor_ns, outer, connection)
        except Exception:  # noqa: BLE001 - telemetry never raises into the caller
            _log.warning("a span could not be started", exc_info=True)
            return None

    def headers(self, call_span: CallSpan | None) -> dict[str, str]:
        """``traceparent`` and whatever else the process's propagators send along."""
        carrier: dict[str, str] = {}
        if call_span is not None:
            try:
                self._inject(carrier, call_span.context)
            except Exception:  # noqa: BLE001 - telemetry never raises into the caller
                _log.warning("the trace context could not be injected", exc_info=True)
        return carrier

    def connected(
        self, endpoint: Endpoint, transport: str, dial: Dial, protocol: str | None, error: SpanwireError | None
    ) -> SpanContext | None:
        """A connect has ended: make its spans and its metric. Returns what users of the connection link to."""
        try:
            return self._connected(endpoint, transport, dial, protocol, error)
        except Exception:  # noqa: BLE001 - telemetry never raises into the caller
            _log.warning("a connection's span could not be made", exc_info=True)
            return None

    def _connected(
        self, endpoint: Endpoint, transport: str, dial: Dial, protocol: str | None, error: SpanwireError | None
    ) -> SpanContext | None:
        anchor_ns = time.time_ns() - time.perf_counter_ns()
        parent = dial.context.context if isinstance(dial.context, CallSpan) else Context()
        attributes: dict[str, _Value] = {**_server(endpoint), "spanwire.transport": transport}
        if protocol is not None:
            attributes["network.protocol.name"], attributes["network.protocol.version"] = _protocol(protocol)
        if error is not None:
            attributes["error.type"] = type(error).__name__
            attributes["spanwire.phase"] = error.phase
        self._instruments.setup_duration.record((dial.end_ns - dial.begin_ns) / 1e9, attributes)
        span = self._tracer.start_span(
            "spanwire.connection_setup", parent, SpanKind.INTERNAL, attributes, start_time=anchor_ns + dial.begin_ns
        )
        if not span.is_recording():
            return None
        context = trace.set_span_in_context(span, parent)
        for part, begin_ns, end_ns in dial.marks.parts:
            self._tracer.start_span(part, context, start_time=anchor_ns + begin_ns).end(anchor_ns + end_ns)
        if error is not None:
            open_part = dial.marks.open_part
            if open_part is not None:
                begin_ns = dial.marks.begun_ns(open_part)
                child = self._tracer.start_span(open_part, context, start_time=anchor_ns + begin_ns)
                child.set_status(Status(StatusCode.ERROR))
                child.end(anchor_ns + dial.end_ns)
            span.set_status(Status(StatusCode.ERROR, _description(type(error).__name__, error)))
        span.end(anchor_ns + dial.end_ns)
        return span.get_span_context()

    def waiting(self, endpoint: Endpoint, change: int) -> None:
        """A call begins (+1) or ends (-1) to wait for a slot."""
        try:
            self._instruments.waiting.add(change, {"server.address": _server_address(endpoint)})
        except Exception:  # noqa: BLE001 - telemetry never raises into the caller
            _log.warning("a metric could not be recorded", exc_info=True)

    def end(
        self,
        call_span: CallSpan | None,
        timeline: Timeline,
        record: CallRecord,
        call: Asked,
        endpoint: Endpoint,
        head: Head | None,
        usage: Usage | None,
        finish_reason: str | None,
        error: BaseException | None,
        extra: Mapping[str, Any],
        *,
        streamed: bool,
    ) -> None:
        """The call has ended: set everything at once, end the span at the call's end, record the metrics."""
        try:
            error_type = None
            if error is not None and timeline.outcome in ("error", "timeout"):
                error_type = type(error).__name__
            if call_span is not None and call_span.span.is_recording():
                self._end_span(call_span, timeline, record, head, usage, finish_reason, error, error_type, extra)
            labels = _labels(endpoint, call, streamed=streamed)
            self._record(timeline, labels, usage, error_type, nested=call_span is not None and call_span.nested)
        except Exception:  # noqa: BLE001 - telemetry never raises into the caller
            _log.warning("a call's telemetry could not be recorded", exc_info=True)

    def _end_span(
        self,
        call_span: CallSpan,
        timeline: Timeline,
        record: CallRecord,
        head: Head | None,
        usage: Usage | None,
        finish_reason: str | None,
        error: BaseException | None,
        error_type: str | None,
        extra: Mapping[str, Any],
    ) -> None:
        span, outer = call_span.span, call_span.outer
        attributes: dict[str, Any] = _own_attributes(timeline, record)
        for extra_name, value in extra.items():
            if (kept := _kept(value)) is not None:
                attributes[extra_name] = kept
        if outer is not None:
            if outer.is_recording():
                outer.set_attributes(attributes)
        else:
            attempt = record.attempts[-1] if record.attempts else None
            if attempt is not None and attempt.streamed and attempt.marks.first_chunk_ns:
                first_s = (attempt.marks.first_chunk_ns - record.begin_ns) / 1e9
                attributes["gen_ai.response.time_to_first_chunk"] = first_s
            if head is not None:
                if head.id:
                    attributes["gen_ai.response.id"] = _text(head.id)
                if head.model:
                    attributes["gen_ai.response.model"] = _text(head.model)
            if finish_reason:
                attributes["gen_ai.response.finish_reasons"] = (_text(finish_reason),)
            if usage is not None:
                _add_usage(attributes, usage)
        if head is not None and head.status is not None:
            attributes["http.response.status_code"] = head.status
        if len(record.attempts) > 1:
            attributes["http.request.resend_count"] = len(record.attempts) - 1
            self._attempts(call_span, record)
        if error_type is not None:
            attributes["error.type"] = error_type
            span.set_status(Status(StatusCode.ERROR, _description(error_type, error)))
        span.set_attributes(attributes)
        span.end(call_span.anchor_ns + record.end_ns)

    def _attempts(self, call_span: CallSpan, record: CallRecord) -> None:
        for number, attempt in enumerate(record.attempts, 1):
            span = self._tracer.start_span(
                "spanwire.attempt",
                call_span.context,
                SpanKind.CLIENT,
                {"spanwire.attempt.number": number, "spanwire.outcome": attempt.outcome},
                start_time=call_span.anchor_ns + attempt.begin_ns,
            )
            if attempt.error_type is not None:
                span.set_attribute("error.type", attempt.error_type)
                span.set_status(Status(StatusCode.ERROR))
            span.end(call_span.anchor_ns + attempt.end_ns)

    def _record(
        self, timeline: Timeline, labels: _Labels, usage: Usage | None, error_type: str | None, *, nested: bool
    ) -> None:
        wanted, instruments = self._wanted, self._instruments
        connection = timeline.connection
        if connection is not None and "connections" in wanted:
            instruments.connection_uses.add(1, labels.reused if connection.reused else labels.fresh)
        if not nested:  # the outer instrumentation counts the call
            genai = labels.genai if error_type is None else {**labels.genai, "error.type": error_type}
            if "duration" in wanted:
                instruments.duration.record(timeline.total_s, genai)
            if "tokens" in wanted and usage is not None:
                for kind, count in (("input", usage.input_tokens), ("output", usage.output_tokens)):
                    if count is not None:
                        instruments.tokens.record(count, {**genai, "gen_ai.token.type": kind})
        first_content_s = timeline.first_content_s
        if first_content_s is not None and "first_content" in wanted:
            instruments.first_content.record(first_content_s, labels.first_content)
        if "segments" in wanted:
            for name, segment in timeline.segments.items():
                more = {"spanwire.segment": name, "spanwire.segment.source": segment.source}
                instruments.segment_duration.record(segment.duration_s, {**labels.nested, **more})

    @property
    def _instruments(self) -> _Instruments:
        if self._made is None:
            self._made = _Instruments(self._get_meter("spanwire", _version(), self._meter_provider))
        return self._made


class _Instruments:
    """All instruments, made when the first is needed."""

    def __init__(self, meter: metrics.Meter) -> None:
        names = _NAMES["genai" if os.environ.get("SPANWIRE_SEMCONV", "").strip() == "genai" else "v1.41"]

        def histogram(name: str, unit: str, what: str, buckets: list[float]) -> metrics.Histogram:
            return meter.create_histogram(name, unit, what, explicit_bucket_boundaries_advisory=buckets)

        self.duration = histogram(names["duration"], "s", "Duration of the call, retries included", _CALL_BUCKETS)
        self.first_content = histogram(
            "spanwire.client.time_to_first_content",
            "s",
            "From the call's start to its first text, reasoning or tool call",
            _CALL_BUCKETS,
        )
        self.tokens = histogram(names["tokens"], "{token}", "Tokens as the server counted them", [*_TOKEN_BUCKETS])
        self.segment_duration = histogram(
            "spanwire.segment.duration", "s", "One segment of the call's timeline", _PART_BUCKETS
        )
        self.setup_duration = histogram(
            "spanwire.connection.setup.duration", "s", "Making of a connection, failed ones included", _PART_BUCKETS
        )
        self.connection_uses = meter.create_counter(
            "spanwire.connection.uses", "{use}", "Exchanges by whether their connection was used before"
        )
        self.waiting = meter.create_up_down_counter(
            "spanwire.queue.waiting", "{call}", "Calls that wait for a slot of the local limits"
        )


def _own_attributes(timeline: Timeline, record: CallRecord) -> dict[str, _Value]:
    """From the record and the pieces, not from the timeline's own objects: this runs for every call."""
    attributes: dict[str, _Value] = {"spanwire.outcome": record.outcome, "spanwire.transport": record.transport}
    if record.attempts:
        attempt, begin_ns = record.attempts[-1], record.begin_ns
        marks, connection = attempt.marks, attempt.connection
        if marks.first_byte_ns:
            attributes["spanwire.time_to_first_byte"] = (marks.first_byte_ns - begin_ns) / 1e9
        if marks.first_content_ns:
            attributes["spanwire.time_to_first_content"] = (marks.first_content_ns - begin_ns) / 1e9
        if connection is not None:
            attributes["spanwire.connection.id"] = connection.id
            attributes["spanwire.connection.reused"] = connection.reused
            if connection.age_s is not None:
                attributes["spanwire.connection.age"] = connection.age_s
            if connection.idle_s is not None:
                attributes["spanwire.connection.idle_time"] = connection.idle_s
            if connection.engine not in (None, "spanwire"):
                attributes["spanwire.connection.engine"] = connection.engine or ""
    sums: dict[str, tuple[int, Source]] = {}
    for key, (duration_ns, source) in timeline.pieces.items():
        segment = key[0]
        before = sums.get(segment)
        if before is None:
            sums[segment] = (duration_ns, source)
        else:
            sums[segment] = (before[0] + duration_ns, weakest_source(before[1], source))
        if key[1]:
            attributes[_part_name(key)] = duration_ns / 1e9
    for segment, (duration_ns, source) in sums.items():
        duration_name, source_name = _segment_names(segment)
        attributes[duration_name] = duration_ns / 1e9
        attributes[source_name] = source
    return attributes


@lru_cache(maxsize=256)
def _part_name(piece: tuple[str, str]) -> str:
    return f"spanwire.segment.{piece[0]}.{piece[1]}.duration"


@lru_cache(maxsize=32)
def _segment_names(segment: str) -> tuple[str, str]:
    return f"spanwire.segment.{segment}.duration", f"spanwire.segment.{segment}.source"


def _text(value: str) -> str:
    """Text that every exporter can encode: cut, and without halves of surrogate pairs."""
    if len(value) > _TEXT_LIMIT:
        value = value[:_TEXT_LIMIT]
    return value if value.isascii() else value.encode("utf-8", "replace").decode()


def _kept(value: object) -> _Value | None:
    """A plugin's attribute, if it is one."""
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, bool) or (isinstance(value, int) and abs(value) < 2**63):
        return value
    return value if isinstance(value, float) and math.isfinite(value) else None


def _add_usage(attributes: dict[str, Any], usage: Usage) -> None:
    if usage.input_tokens is not None:
        attributes["gen_ai.usage.input_tokens"] = usage.input_tokens
    if usage.output_tokens is not None:
        attributes["gen_ai.usage.output_tokens"] = usage.output_tokens
    if usage.cached_tokens is not None:
        attributes["gen_ai.usage.cache_read.input_tokens"] = usage.cached_tokens
    if usage.reasoning_tokens is not None:
        attributes["gen_ai.usage.reasoning.output_tokens"] = usage.reasoning_tokens


def _parameters(body: Mapping[str, Any]) -> dict[str, _Value]:
    """The request's parameters that have an attribute, and a value that one may have."""
    return {
        attribute: value
        for parameter, attribute in _PARAMETERS
        if (type(value := body.get(parameter)) is int and abs(value) < 2**63)
        or (type(value) is float and math.isfinite(value))
    }


def _description(error_type: str, error: BaseException | None) -> str:
    """Not the message: a server's words may repeat what it was asked."""
    if isinstance(error, ServerError) and error.status is not None:
        return f"{error_type} {error.status}"
    if isinstance(error, CallTimeout):
        return f"{error_type} {error.limit}"
    return f"{error_type} in phase {error.phase}" if isinstance(error, SpanwireError) else error_type


def _protocol(protocol: str) -> tuple[str, str]:
    name, _, version = protocol.partition("/")
    if name == "h2":
        return "http", "2"
    return name, version


def _server_address(endpoint: Endpoint) -> str:
    return endpoint.uds if endpoint.uds is not None else endpoint.origin.host


def _active_genai_span(context: Context) -> Span | None:
    """The span of another instrumentation for this very call, if there is one."""
    span = trace.get_current_span(context)
    attributes: Mapping[str, Any] | None = getattr(span, "attributes", None)
    if attributes and ("gen_ai.operation.name" in attributes or attributes.get("openinference.span.kind") == "LLM"):
        # Our own span is never current, so it is not ours.
        operation = attributes.get("gen_ai.operation.name")
        if operation not in ("invoke_agent", "create_agent", "execute_tool", "invoke_workflow"):
            return span
        return None
    if otel_context.get_value(_GENAI_KEY, context) is not None:
        return span
    return span if otel_context.get_value(_SUPPRESS_KEY, context) is True else None


def _metrics_from_environment() -> frozenset[str]:
    text = os.environ.get("SPANWIRE_METRICS")
    return _DEFAULT_METRICS if text is None else frozenset(name.strip() for name in text.split(",") if name.strip())


def _version() -> str:
    try:
        return metadata.version("spanwire")
    except metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return "0"
