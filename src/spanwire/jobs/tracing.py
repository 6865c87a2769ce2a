"""Spans and metrics of jobs. No span is open for longer than an exchange: a job's own is made when it has ended, back-dated.

* ``send {dialect}/{model}`` (PRODUCER): the submit, to the acknowledgement. Its context goes to the provider, and into the
  row, so that whoever sees the end, in another process or after a restart, knows where it began.
* ``process {dialect}/{model}`` (CONSUMER): a delivery, from its arrival until it is taken in; links to the first.
* ``job {dialect}/{model}``: from the row's writing to the end, with children ``queue``, ``model`` and ``network`` where the
  provider has said how long it took; links to the first, for tail samplers decide long before a job ends.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..endpoint import Endpoint
from ..timeline import Timeline
from .contract import Delivery, JobRow
from .timing import known_of, timeline_of

if TYPE_CHECKING:
    from ..telemetry import CallSpan, Telemetry
    from .apply import Learned

__all__ = ["JobTelemetry", "SubmitSpan"]

_log = logging.getLogger("spanwire.telemetry")


class SubmitSpan:
    """The producer's span, and what is sent along of it."""

    __slots__ = ("call_span", "headers")

    def __init__(self, call_span: CallSpan | None, headers: dict[str, str]) -> None:
        self.call_span = call_span
        self.headers = headers

    def end(self) -> None:
        """End it, if no exchange has."""
        span = self.call_span.span if self.call_span is not None else None
        if span is not None and span.is_recording():
            with contextlib.suppress(Exception):
                span.end()


class JobTelemetry:
    """What is told of jobs; ``telemetry`` None: nothing. Never raises."""

    def __init__(self, telemetry: Telemetry | None) -> None:
        self._telemetry = telemetry
        self._instruments: dict[str, Any] = {}

    def begin_submit(
        self, endpoint: Endpoint, row: JobRow, headers: Mapping[str, str], *, again: bool = False
    ) -> SubmitSpan:
        """Start the producer's span as a child of what is current; of a later attempt it links to the first one's."""
        telemetry = self._telemetry
        if telemetry is None:
            return SubmitSpan(None, {})
        try:
            attributes = self._attributes(row)
            attributes["messaging.operation.type"] = "send"
            attributes["messaging.operation.name"] = "submit"
            attributes["spanwire.job.attempt"] = row.attempt
            links = _links(row.trace) if again else ()
            call_span = telemetry.start_producer(
                f"send {row.dialect}/{row.model}", endpoint, attributes, time.perf_counter_ns(), headers, links
            )
            self._add("spanwire.job.submits", 1, row)
            return SubmitSpan(call_span, telemetry.headers(call_span))
        except Exception:  # noqa: BLE001 - telemetry never raises into the caller
            _log.warning("a job's span could not be started", exc_info=True)
            return SubmitSpan(None, {})

    def written(self, row: JobRow) -> None:
        """A new job is in the store, whatever becomes of it: :meth:`resolved` says its end, here or elsewhere."""
        if self._telemetry is not None:
            with contextlib.suppress(Exception):
                self._add("spanwire.job.open", 1, row)

    def delivery(self, delivery: Delivery, learned: Learned) -> None:
        """A delivery was taken in."""
        if self._telemetry is None:
            return
        try:
            row = learned.row
            what = next((flag for flag in learned.flags if flag != "unknown_state"), None)
            if what is not None:
                self.count(what, row)
            if "stale" in delivery.flags:
                self.count("stale", row)
            attributes = self._attributes(row)
            attributes["messaging.operation.type"] = "process"
            attributes["messaging.operation.name"] = "process"
            attributes["messaging.message.body.size"] = len(delivery.body)
            attributes["spanwire.job.state"] = row.state
            begin_ns = int(delivery.received_s * 1e9)
            span = self._telemetry.start_job_span(
                f"process {row.dialect}/{row.model}", "consumer", attributes, begin_ns, _links(row.trace)
            )
            span.end(max(time.time_ns(), begin_ns))
        except Exception:  # noqa: BLE001
            _log.warning("a delivery's span could not be made", exc_info=True)

    def resolved(self, row: JobRow) -> None:
        """It has come to its end, here and now: said once for each job."""
        if self._telemetry is None:
            return
        try:
            more: dict[str, str] = {"spanwire.job.state": row.state, "spanwire.job.resolved_by": row.resolved_by}
            self._add("spanwire.job.open", -1, row)
            self._add("spanwire.job.resolved", 1, row, more)
            self._histogram().record(max(0.0, row.resolved_s - row.created_s), {**self._labels(row), **more})
            self._draw(row)
        except Exception:  # noqa: BLE001
            _log.warning("a job's span could not be made", exc_info=True)

    def count(self, event: str, row: JobRow) -> None:
        """Something that is worth a number: ``again``, ``late``, ``late_result``, ``stale``, ``submit_unknown``,
        ``resubmitted``, ``overdue``, ``old_attempt``."""
        if self._telemetry is not None:
            with contextlib.suppress(Exception):
                self._add("spanwire.job.events", 1, row, {"spanwire.job.event": event})

    def webhook(self, event: str, dialect: str) -> None:
        """What became of a webhook at a receiver: ``received``, and then ``stored``, ``duplicate``, ``bad_signature``, and so
        on. From any thread; also in a process that only receives."""
        if self._telemetry is not None:
            with contextlib.suppress(Exception):
                name = "spanwire.job.webhooks"
                found = self._instruments.get(name)
                if found is None:
                    found = self._instruments[name] = self._telemetry.meter.create_counter(
                        name, "{webhook}", _WHAT[name]
                    )
                found.add(1, {"spanwire.job.dialect": dialect or "unknown", "spanwire.job.event": event})

    @staticmethod
    def timeline(row: JobRow) -> Timeline:
        """Where the job's time went."""
        return timeline_of(row)

    # --- inner --------------------------------------------------------------------------------------------------------

    def _draw(self, row: JobRow) -> None:
        assert self._telemetry is not None
        attributes = self._attributes(row)
        attributes.update(
            {
                "spanwire.job.state": row.state,
                "spanwire.job.attempt": row.attempt,
                "spanwire.job.resolved_by": row.resolved_by,
            }
        )
        if row.group:
            attributes["spanwire.job.group"] = row.group
        if row.provider_id:
            attributes["spanwire.job.provider_id"] = row.provider_id[:200]
        if row.flags:
            attributes["spanwire.job.flags"] = ",".join(row.flags)
        pieces = timeline_of(row).pieces
        for (segment, part), (duration_ns, source) in pieces.items():
            name = f"spanwire.segment.{segment}" + (f".{part}" if part else "")
            attributes[f"{name}.duration"] = duration_ns / 1e9
            attributes[f"{name}.source"] = source
        begin_ns, end_ns = int(row.created_s * 1e9), int(max(row.resolved_s, row.created_s) * 1e9)
        error = None
        if row.state in ("failed", "expired", "lost"):
            error = str(row.code or row.state)
            attributes["error.type"] = error
        span = self._telemetry.start_job_span(
            f"job {row.dialect}/{row.model}", "internal", attributes, begin_ns, _links(row.trace), error=error
        )
        at_ns = int((row.submitted_s or row.created_s) * 1e9)
        told, estimated = known_of(row)
        rest_s = None if told.total_s is None else row.resolved_s - at_ns / 1e9 - told.total_s
        for name, seconds, source in (
            ("queue", told.queue_s, "estimated" if estimated else "reported"),
            ("model", told.model_s, "reported"),
            ("network", rest_s, "estimated"),
        ):
            if seconds is None or seconds <= 0:
                continue
            until_ns = min(at_ns + int(seconds * 1e9), end_ns)
            child = self._telemetry.start_job_span(
                name, "internal", {"spanwire.segment": name, "spanwire.segment.source": source}, at_ns, (), parent=span
            )
            child.end(until_ns)
            at_ns = until_ns
        span.end(end_ns)

    @staticmethod
    def _attributes(row: JobRow) -> dict[str, Any]:
        attributes: dict[str, Any] = {
            "messaging.system": "spanwire_webhook",
            "messaging.destination.name": row.dialect,
            "messaging.message.id": row.id,
            "spanwire.job.id": row.id,
            "gen_ai.operation.name": row.operation,
            "server.address": row.endpoint.rpartition(":")[0] or row.endpoint,
        }
        if row.model:
            attributes["gen_ai.request.model"] = row.model
        return attributes

    @staticmethod
    def _labels(row: JobRow) -> dict[str, Any]:
        return {"server.address": row.endpoint.rpartition(":")[0] or row.endpoint, "spanwire.job.dialect": row.dialect}

    def _add(self, name: str, number: int, row: JobRow, more: Mapping[str, str] | None = None) -> None:
        found = self._instruments.get(name)
        if found is None:
            assert self._telemetry is not None
            meter = self._telemetry.meter
            make = meter.create_up_down_counter if name == "spanwire.job.open" else meter.create_counter
            found = self._instruments[name] = make(name, "{job}", _WHAT[name])
        found.add(number, {**self._labels(row), **(more or {})})

    def _histogram(self) -> Any:
        found = self._instruments.get("duration")
        if found is None:
            assert self._telemetry is not None
            found = self._instruments["duration"] = self._telemetry.meter.create_histogram(
                "spanwire.job.duration",
                "s",
                "From the job's creation to its end",
                explicit_bucket_boundaries_advisory=_BUCKETS,
            )
        return found


_WHAT = {
    "spanwire.job.open": "Jobs that have not ended; the sum over all processes counts",
    "spanwire.job.submits": "Submits that were begun, further attempts included",
    "spanwire.job.resolved": "Jobs that have ended, each once",
    "spanwire.job.webhooks": "What became of webhooks at a receiver; one of them may be several things",
    "spanwire.job.events": "What does not happen to most jobs",
}
#: In seconds: from a job that is answered at once to one of a day.
_BUCKETS = [0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14_400.0, 86_400.0]


def _links(trace: Mapping[str, str]) -> Any:
    """To the producer's span, as the row keeps it; with its sampled flag."""
    if "traceparent" not in trace:
        return ()
    from opentelemetry import trace as api
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    context = TraceContextTextMapPropagator().extract(dict(trace), Context())
    found = api.get_current_span(context).get_span_context()
    return (api.Link(found),) if found.is_valid else ()
