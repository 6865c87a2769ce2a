"""Timeline to OpenTelemetry spans and metrics. Uses the API only, and never raises into the caller.

Spans: ``chat {model}`` (CLIENT, GenAI conventions) for each call, to the end of its stream; ``spanwire.attempt`` below it
for each try of a call that was tried more than once; ``spanwire.connection_setup`` with children ``dns``, ``tcp``,
``tls``, ... when a connection was made: a child of the call that waited for it, a root when pre-warmed, and every call
that uses the connection links to it; ``{segment} {part}`` for each piece of the timeline, for the calls that
:mod:`.detail` chooses. Where a GenAI span of another instrumentation is active already, the call's span is a
``spanwire.attempt`` below it, and the outer span gets the ``spanwire.*`` attributes too: no call is counted twice.

Metrics, at most three records for each call by default: duration, time to first content (streams), and
``spanwire.connection.uses``. The others are opt-in (``Telemetry(metrics=...)``).

======================  ================================================================================================
module                  what lives there
======================  ================================================================================================
``names``               the one table of names, by both tables of the GenAI conventions
``attributes``          what is written on spans and metrics
``outer``               which span of somebody else's stands for the call already
``detail``              for which calls segments are spans
``placement``           where in time the pieces of a timeline lie
``segments``            attempts and segments as spans
``instruments``         metrics
``content``             messages, where the application asks for them
======================  ================================================================================================
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any, Literal

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode

from ..calls import Reply, Usage
from ..endpoint import Endpoint
from ..errors import ConfigurationError, SpanwireError
from ..pool import Dial
from ..timeline import CallRecord, Timeline
from ..transport import Head
from .attributes import (
    Asked,
    Labels,
    Value,
    add_answer,
    description,
    kept,
    labels_of,
    own_attributes,
    parameters,
    protocol,
    server,
    server_address,
)
from .names import DEFAULT_METRICS, DETAILS, METRICS, PARAMETER_NAMES

if TYPE_CHECKING:
    from opentelemetry import metrics

    from .instruments import Instruments
    from .outer import Outer

__all__ = ["CallSpan", "Telemetry"]

_log = logging.getLogger("spanwire.telemetry")

_NO_HEADERS: Mapping[str, str] = {}


class CallSpan:
    """The span of one call, and what its end needs.

    Attributes:
        context: whose span is this one: what the server is sent, and the parent of all that the call makes.
        counted: somebody else's span stands for the call; ``outer`` is that one, where it can be written on.
        suppressed: the application wants no telemetry of this call.
        parent_sent: the caller's own ``traceparent`` names this span's parent: the server is sent this span instead.
    """

    __slots__ = ("_linked", "anchor_ns", "context", "counted", "labels", "outer", "parent_sent", "span", "suppressed")

    def __init__(
        self,
        span: Span,
        context: Context,
        anchor_ns: int,
        outer: Outer | None,
        linked: SpanContext | None,
        labels: Labels | None,
    ) -> None:
        self.span = span
        self.labels = labels
        self.context = context
        self.anchor_ns = anchor_ns  # wall clock minus perf_counter: read once, so that no two clocks are compared
        self.suppressed = outer is None
        if outer is not None:
            self.counted = outer.counted
            self.outer = outer.span
            self.parent_sent = outer.sent
        else:
            self.counted, self.outer, self.parent_sent = True, None, False
        self._linked = [] if linked is None else [linked]

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make it current, for what another library makes in this await or starts in it. Never across a ``yield``."""
        if self.suppressed:
            yield
            return
        token = otel_context.attach(self.context)
        try:
            yield
        finally:
            otel_context.detach(token)

    def link(self, context: SpanContext) -> None:
        """Link the span to a connection's, once."""
        if context not in self._linked:
            self._linked.append(context)
            self.span.add_link(context)


class Telemetry:
    """Settings of spans and metrics for one manager.

    Args:
        tracer_provider, meter_provider: of OpenTelemetry; the process's global ones by default.
        metrics: which to record: ``duration``, ``first_content``, ``connections`` by default; ``first_chunk``,
            ``tokens``, ``segments``. The environment variable SPANWIRE_METRICS (comma list) sets the default.
        detail: whether segments are spans of their own: ``full`` for every call that is sampled, ``flat`` never, ``auto``
            (the default) for failed calls, and of each second ten cold, ten slow and ten others. The environment variable
            SPANWIRE_DETAIL sets the default. Their durations are attributes of the call's span in any case.

    Raises:
        ConfigurationError: an unknown name in ``metrics``, an unknown ``detail``.
    """

    def __init__(
        self,
        *,
        tracer_provider: trace.TracerProvider | None = None,
        meter_provider: metrics.MeterProvider | None = None,
        metrics: Iterable[str] | None = None,
        detail: str | None = None,
    ) -> None:
        wanted = frozenset(metrics) if metrics is not None else _metrics_from_environment()
        unknown = wanted - METRICS
        if unknown:
            raise ConfigurationError(
                f"Telemetry(metrics=...) does not know {', '.join(sorted(unknown))}; it knows {', '.join(sorted(METRICS))}"
            )
        if detail is None:
            detail = os.environ.get("SPANWIRE_DETAIL", "").strip() or "auto"
        if detail not in DETAILS:
            raise ConfigurationError(
                f"Telemetry(detail=...) or SPANWIRE_DETAIL must be one of {', '.join(DETAILS)}, not {detail!r:.40}"
            )
        self._wanted = wanted
        # Not needed by who only imports spanwire, and a dozen modules; and not to be loaded in the middle of a call.
        from opentelemetry import metrics as metrics_api
        from opentelemetry import propagate

        from . import content, outer, segments
        from .detail import Detail
        from .instruments import Instruments

        self._segments = segments
        self._make_instruments = Instruments
        self._find = outer.find
        self._suppressed = outer.suppressed
        self._inject = propagate.inject
        self._get_meter = metrics_api.get_meter
        self._tracer = trace.get_tracer("spanwire", _version(), tracer_provider)
        self._meter_provider = meter_provider
        self._made: Instruments | None = None
        self._detail = Detail(detail)
        self._add_messages = content.add_messages if content.wanted() else None

    def start(
        self,
        call: Asked,
        endpoint: Endpoint,
        begin_ns: int,
        *,
        streamed: bool,
        connection: SpanContext | None = None,
        headers: Mapping[str, str] = _NO_HEADERS,
    ) -> CallSpan | None:
        """Start the call's span as a child of what is current now, linked to its connection's. None if that failed.

        ``headers`` are the call's own, with names in lower case.
        """
        try:
            anchor_ns = time.time_ns() - time.perf_counter_ns()
            context = otel_context.get_current()
            outer = self._find(context, headers)
            if outer is None:
                return CallSpan(trace.INVALID_SPAN, Context(), anchor_ns, None, None, None)
            context = outer.context
            labels = labels_of(endpoint, call, streamed=streamed)
            if not outer.counted:
                name, attributes = labels.name, labels.attributes
                if not PARAMETER_NAMES.isdisjoint(call.body):
                    attributes = {**attributes, **parameters(call.body)}
            else:
                name, attributes = "spanwire.attempt", labels.nested
            links = None if connection is None else (Link(connection),)
            span = self._tracer.start_span(
                name, context, SpanKind.CLIENT, attributes, links, anchor_ns + begin_ns, record_exception=False
            )
            return CallSpan(span, trace.set_span_in_context(span, context), anchor_ns, outer, connection, labels)
        except Exception:  # noqa: BLE001 - telemetry never raises into the caller
            _log.warning("a span could not be started", exc_info=True)
            return None

    def start_producer(
        self,
        name: str,
        endpoint: Endpoint,
        attributes: Mapping[str, Any],
        begin_ns: int,
        headers: Mapping[str, str],
        links: Sequence[Link] = (),
    ) -> CallSpan | None:
        """The span of a job's submit, a child of what is current; None if nothing is to be told."""
        anchor_ns = time.time_ns() - time.perf_counter_ns()
        outer = self._find(otel_context.get_current(), headers)
        if outer is None:
            return None
        about = {**server(endpoint), **attributes}
        span = self._tracer.start_span(
            name, outer.context, SpanKind.PRODUCER, about, links, anchor_ns + begin_ns, record_exception=False
        )
        # Counted: it is no model call, and those who wait for one are not told of it.
        ours = outer._replace(counted=True, span=None)
        return CallSpan(span, trace.set_span_in_context(span, outer.context), anchor_ns, ours, None, None)

    def start_job_span(
        self,
        name: str,
        kind: Literal["consumer", "internal"],
        attributes: Mapping[str, Any],
        begin_unix_ns: int,
        links: Sequence[Link],
        *,
        parent: Span | None = None,
        error: str | None = None,
    ) -> Span:
        """A span of a job that is over, a root unless it has a parent; the caller ends it."""
        context = Context() if parent is None else trace.set_span_in_context(parent, Context())
        kinds = {"consumer": SpanKind.CONSUMER, "internal": SpanKind.INTERNAL}
        span = self._tracer.start_span(name, context, kinds[kind], attributes, links, begin_unix_ns)
        if error is not None:
            span.set_status(Status(StatusCode.ERROR, error))
        return span

    @property
    def meter(self) -> metrics.Meter:
        """What jobs' instruments are made of."""
        return self._get_meter("spanwire", _version(), self._meter_provider)

    def headers(self, call_span: CallSpan | None) -> dict[str, str]:
        """``traceparent`` and whatever else the process's propagators send along."""
        carrier: dict[str, str] = {}
        if call_span is not None and not call_span.suppressed:
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
        self, endpoint: Endpoint, transport: str, dial: Dial, spoken: str | None, error: SpanwireError | None
    ) -> SpanContext | None:
        anchor_ns = time.time_ns() - time.perf_counter_ns()
        parent = Context()
        if isinstance(dial.context, CallSpan):
            if dial.context.suppressed:
                return None
            parent, anchor_ns = dial.context.context, dial.context.anchor_ns
        attributes: dict[str, Value] = {**server(endpoint), "spanwire.transport": transport}
        if spoken is not None:
            attributes["network.protocol.name"], attributes["network.protocol.version"] = protocol(spoken)
        if error is not None:
            attributes["error.type"] = type(error).__name__
            attributes["spanwire.phase"] = error.phase
        self._instruments.setup_duration.record((dial.end_ns - dial.begin_ns) / 1e9, attributes)
        span = self._tracer.start_span(
            "spanwire.connection_setup", parent, SpanKind.INTERNAL, attributes, start_time=anchor_ns + dial.begin_ns
        )
        if not span.is_recording():
            return None
        segment_labels = self._segments.segment_labels
        context = trace.set_span_in_context(span, parent)
        for part, begin_ns, end_ns in dial.marks.parts:
            _, about = segment_labels("handshake", part, "measured", "clock")
            child = self._tracer.start_span(part, context, attributes=about, start_time=anchor_ns + begin_ns)
            child.end(anchor_ns + end_ns)
        if error is not None:
            open_part = dial.marks.open_part
            if open_part is not None:
                begin_ns = dial.marks.begun_ns(open_part)
                _, about = segment_labels("handshake", open_part, "measured", "clock")
                child = self._tracer.start_span(open_part, context, attributes=about, start_time=anchor_ns + begin_ns)
                child.set_status(Status(StatusCode.ERROR))
                child.end(anchor_ns + dial.end_ns)
            span.set_status(Status(StatusCode.ERROR, description(type(error).__name__, error)))
        span.end(anchor_ns + dial.end_ns)
        return span.get_span_context()

    def waiting(self, endpoint: Endpoint, change: int) -> None:
        """A call begins (+1) or ends (-1) to wait for a slot."""
        try:
            if not self._suppressed(otel_context.get_current()):
                self._instruments.waiting.add(change, {"server.address": server_address(endpoint)})
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
        reply: Callable[[], Reply] | None,
        *,
        streamed: bool,
    ) -> None:
        """The call has ended: set everything at once, end the span at the call's end, record the metrics.

        ``reply`` makes what has arrived into one; it is asked for where the application wants messages on spans. None where
        the answer was not kept.
        """
        try:
            if call_span is not None and call_span.suppressed:
                return
            error_type = None
            if error is not None and timeline.outcome in ("error", "timeout"):
                error_type = type(error).__name__
            labels = call_span.labels if call_span is not None else None
            if labels is None:
                labels = labels_of(endpoint, call, streamed=streamed)
            if call_span is not None and call_span.span.is_recording():
                attributes: dict[str, Any] = own_attributes(timeline, record)
                if extra:
                    attributes |= {name: fit for name, value in extra.items() if (fit := kept(value)) is not None}
                if call_span.outer is not None:
                    if call_span.outer.is_recording():
                        call_span.outer.set_attributes(attributes)
                elif not call_span.counted:
                    add_answer(attributes, record, head, usage, finish_reason)
                    if self._add_messages is not None and reply is not None:
                        try:
                            self._add_messages(attributes, call, reply(), endpoint)
                        except Exception:  # noqa: BLE001 - such as what no JSON can be made of: the call failed for it
                            _log.warning("a call's messages could not be put on its span", exc_info=True)
                if head is not None and head.status is not None:
                    attributes["http.response.status_code"] = head.status
                if head is not None and head.attributes:
                    attributes |= head.attributes
                self._end_span(call_span, timeline, record, labels, attributes, error, error_type)
            counted = call_span is not None and call_span.counted
            self._instruments.record(timeline, record, labels, usage, error_type, counted=counted)
        except Exception:  # noqa: BLE001 - telemetry never raises into the caller
            _log.warning("a call's telemetry could not be recorded", exc_info=True)
            with contextlib.suppress(Exception):
                if call_span is not None and call_span.span.is_recording():  # else the call were missing in its trace
                    call_span.span.end(call_span.anchor_ns + record.end_ns)

    def _end_span(
        self,
        call_span: CallSpan,
        timeline: Timeline,
        record: CallRecord,
        labels: Labels,
        attributes: dict[str, Any],
        error: BaseException | None,
        error_type: str | None,
    ) -> None:
        span, context, anchor_ns = call_span.span, call_span.context, call_span.anchor_ns
        tries = len(record.attempts)
        if tries > 1:
            attributes["http.request.resend_count"] = tries - 1
        detailed = self._detail.wants(record, labels)
        if detailed or tries > 1:
            if tries > 1:
                self._segments.draw_attempts(self._tracer, context, anchor_ns, record, detailed=detailed)
            else:
                self._segments.draw_segments(self._tracer, context, anchor_ns, record, timeline.pieces)
        if error_type is not None:
            attributes["error.type"] = error_type
            span.set_status(Status(StatusCode.ERROR, description(error_type, error)))
        span.set_attributes(attributes)
        span.end(anchor_ns + record.end_ns)

    @property
    def _instruments(self) -> Instruments:
        if self._made is None:
            self._made = self._make_instruments(
                self._get_meter("spanwire", _version(), self._meter_provider), self._wanted
            )
        return self._made


def _metrics_from_environment() -> frozenset[str]:
    text = os.environ.get("SPANWIRE_METRICS")
    return DEFAULT_METRICS if text is None else frozenset(name.strip() for name in text.split(",") if name.strip())


def _version() -> str:
    try:
        return metadata.version("spanwire")
    except metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return "0"
