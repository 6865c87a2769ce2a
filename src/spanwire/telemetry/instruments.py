"""The metrics: at most three records for each call by default."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..calls import Usage
from ..timeline import CallRecord, Timeline
from .attributes import Labels, add_usage
from .names import CALL_BUCKETS, PART_BUCKETS, TOKEN_BUCKETS, names

if TYPE_CHECKING:
    from opentelemetry import metrics

__all__ = ["Instruments"]

#: Numbers of a span that are counters too, in the conventions' newer table.
_COUNTED = {
    "gen_ai.usage.input_tokens": "input_tokens",
    "gen_ai.usage.output_tokens": "output_tokens",
    "gen_ai.usage.cache_read.input_tokens": "cache_read.input_tokens",
    "gen_ai.usage.reasoning.output_tokens": "reasoning.output_tokens",
}


class Instruments:
    """All instruments, made when the first is needed, and what is recorded for a call that has ended."""

    def __init__(self, meter: metrics.Meter, wanted: frozenset[str]) -> None:
        table = names()

        def histogram(name: str, unit: str, what: str, buckets: Sequence[float]) -> metrics.Histogram:
            return meter.create_histogram(name, unit, what, explicit_bucket_boundaries_advisory=list(buckets))

        self._wanted = wanted
        what = "Duration of the call, retries included"
        self._duration = histogram(table.duration, "s", what, CALL_BUCKETS)
        self._other_duration = self._duration
        if table.other_duration != table.duration:
            self._other_duration = histogram(table.other_duration, "s", what, CALL_BUCKETS)
        self._first_content = histogram(
            "spanwire.client.time_to_first_content",
            "s",
            "From the call's start to its first text, reasoning or tool call",
            CALL_BUCKETS,
        )
        self._first_chunk = histogram(
            table.first_chunk, "s", "From the call's start to its first chunk, which may be empty", CALL_BUCKETS
        )
        self._tokens: metrics.Histogram | None = None
        self._token_counters: dict[str, metrics.Counter] = {}
        if table.tokens is not None:
            self._tokens = histogram(table.tokens, "{token}", "Tokens as the server counted them", TOKEN_BUCKETS)
        if table.token_counters is not None:
            self._token_counters = {
                attribute: meter.create_counter(table.token_counters + name, "{token}", "As the server counted them")
                for attribute, name in _COUNTED.items()
            }
        self._segment_duration = histogram(
            "spanwire.segment.duration", "s", "One segment of the call's timeline", PART_BUCKETS
        )
        self.setup_duration = histogram(
            "spanwire.connection.setup.duration", "s", "Making of a connection, failed ones included", PART_BUCKETS
        )
        self._connection_uses = meter.create_counter(
            "spanwire.connection.uses", "{use}", "Exchanges by whether their connection was used before"
        )
        self.waiting = meter.create_up_down_counter(
            "spanwire.queue.waiting", "{call}", "Calls that wait for a slot of the local limits"
        )

    def record(
        self,
        timeline: Timeline,
        record: CallRecord,
        labels: Labels,
        usage: Usage | None,
        error_type: str | None,
        *,
        counted: bool,
    ) -> None:
        """``counted``: somebody else's instrumentation counts the call."""
        wanted, begin_ns = self._wanted, record.begin_ns
        attempt = record.attempts[-1] if record.attempts else None
        if "connections" in wanted:
            for (
                tried
            ) in record.attempts:  # each of them was an exchange: the handshake is nearly always the first one's
                if tried.connection is not None:
                    self._connection_uses.add(1, labels.reused if tried.connection.reused else labels.fresh)
        if not counted:
            genai = labels.genai if error_type is None else {**labels.genai, "error.type": error_type}
            if "duration" in wanted:
                duration = self._duration if labels.inference else self._other_duration
                duration.record((record.end_ns - begin_ns) / 1e9, genai)
            if "tokens" in wanted and usage is not None:
                self._record_tokens(usage, genai)
            if "first_chunk" in wanted and labels.streamed and attempt is not None and attempt.marks.first_chunk_ns:
                self._first_chunk.record((attempt.marks.first_chunk_ns - begin_ns) / 1e9, genai)
        if attempt is not None and attempt.marks.first_content_ns and "first_content" in wanted:
            self._first_content.record((attempt.marks.first_content_ns - begin_ns) / 1e9, labels.first_content)
        if "segments" in wanted:
            for name, segment in timeline.segments.items():
                more = {"spanwire.segment": name, "spanwire.segment.source": segment.source}
                self._segment_duration.record(segment.duration_s, {**labels.nested, **more})

    def _record_tokens(self, usage: Usage, genai: dict[str, str | bool | int | float]) -> None:
        if self._tokens is not None:
            for kind, count in (("input", usage.input_tokens), ("output", usage.output_tokens)):
                if count is not None:
                    self._tokens.record(count, {**genai, "gen_ai.token.type": kind})
        if self._token_counters:
            counts: dict[str, int] = {}
            add_usage(counts, usage)
            for attribute, count in counts.items():
                self._token_counters[attribute].add(count, genai)
