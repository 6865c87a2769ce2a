from __future__ import annotations

import asyncio
import gc
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import spanwire
from spanwire import witness as module
from spanwire.plugins import Registry
from spanwire.telemetry import Telemetry
from spanwire.timeline import Timeline
from spanwire.witness import Witness
from tests.support import assert_adds_up

ENDPOINT = spanwire.Endpoint("https://api.example.com/v1")
EVENT = b'data: {"id":"c1","model":"m-1","choices":[{"index":0,"delta":{"content":"Hi"},"finish_reason":null}]}\n\n'
LAST = (
    b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4},'
    b'"time_info":{"queue_time":0.001,"prompt_time":0.002,"completion_time":0.003,"total_time":0.006}}\n\n'
    b"data: [DONE]\n\n"
)
HEADERS = {"content-type": "text/event-stream"}


class Seen:
    def __init__(self) -> None:
        self.timelines: list[Timeline] = []
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.telemetry = Telemetry(
            detail="flat", tracer_provider=self.provider, meter_provider=MeterProvider([InMemoryMetricReader()])
        )
        self.registry = Registry([self])

    @spanwire.hookimpl
    def register_observers(self) -> list[Any]:
        return [self]

    @spanwire.hookimpl
    def span_attributes(self, timeline: Timeline) -> Mapping[str, Any]:
        return {"team": "blue"}

    def call_ended(self, timeline: Timeline) -> None:
        self.timelines.append(timeline)

    def begin(self, *, streamed: bool = True, **more: Any) -> Witness:
        own = {"operation": "chat", "model": "m", "telemetry": self.telemetry, "registry": self.registry}
        given: dict[str, Any] = {**own, **more}
        return Witness.begin(ENDPOINT, streamed=streamed, **given)

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self.exporter.get_finished_spans()

    def span(self) -> ReadableSpan:
        (span,) = self.spans
        return span


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture(autouse=True)
def nothing_pending() -> Iterator[None]:
    yield
    assert not module._abandoned


def now() -> int:
    return time.perf_counter_ns()


def play(witness: Witness, *pieces: bytes) -> None:
    witness.marks.sent_ns = now()
    witness.head(200, HEADERS, now())
    for piece in pieces:
        witness.feed(piece, now(), now())


def test_a_call_is_recorded_as_one_of_our_own(seen: Seen) -> None:
    witness = seen.begin(body_params={"temperature": 0.5, "unknown": 1}, transport="httpx")
    play(witness, EVENT, EVENT, LAST)
    assert witness.done
    witness.end("completed")
    (timeline,) = seen.timelines
    assert timeline is witness.timeline
    assert_adds_up(timeline)
    assert (timeline.outcome, timeline.model, timeline.transport, timeline.streamed) == (
        "completed",
        "m",
        "httpx",
        True,
    )
    assert timeline.usage == spanwire.Usage(3, 4)
    assert timeline.server_timing is not None
    assert timeline.server_timing["dialect"] == "cerebras"
    assert timeline.first_content_s is not None
    span = seen.span()
    assert span.name == "chat m"
    attributes = span.attributes or {}
    assert attributes["gen_ai.response.id"] == "c1"
    assert attributes["gen_ai.response.model"] == "m-1"
    assert attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert attributes["gen_ai.request.temperature"] == 0.5
    assert attributes["gen_ai.usage.input_tokens"] == 3
    assert attributes["team"] == "blue"
    assert attributes["spanwire.outcome"] == "completed"
    assert "error.type" not in attributes


def test_the_wall_clock_is_that_of_the_begin_however_late_the_books_are_opened(seen: Seen) -> None:
    """The first call of a process loads plugins and tables between the two; calls in a row would overlap."""
    before_s = time.time()
    witness = seen.begin(begin_ns=time.perf_counter_ns() - 60 * 10**9)
    witness.end("completed")
    (timeline,) = seen.timelines
    assert timeline.started_unix_s == pytest.approx(before_s - 60, abs=30)


def test_the_end_is_recorded_once_whoever_comes_first(seen: Seen) -> None:
    witness = seen.begin()
    play(witness, EVENT)
    barrier = threading.Barrier(8)

    def end() -> None:
        barrier.wait()
        witness.end("closed_by_caller")

    threads = [threading.Thread(target=end) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    witness.abandon()
    assert len(seen.timelines) == len(seen.spans) == 1


def test_a_caller_that_closes_after_the_terminal_event_has_completed_the_call(seen: Seen) -> None:
    witness = seen.begin()
    play(witness, EVENT, LAST)
    witness.end("closed_by_caller")
    early = seen.begin()
    play(early, EVENT)
    early.end("closed_by_caller")
    assert [timeline.outcome for timeline in seen.timelines] == ["completed", "closed_by_caller"]


@pytest.mark.parametrize("outcome", ["completed", "closed_by_caller"])
def test_an_error_status_is_an_error_however_it_was_left(seen: Seen, outcome: Any) -> None:
    witness = seen.begin()
    witness.head(503, {"content-type": "application/json"}, now())
    witness.feed(b'{"error":{"message":"secret words"}}', now())
    witness.end(outcome)
    assert seen.timelines[0].outcome == "error"
    span = seen.span()
    assert (span.attributes or {})["error.type"] == "Overloaded"
    assert (span.attributes or {})["http.response.status_code"] == 503
    assert span.status.status_code is trace.StatusCode.ERROR
    assert "secret" not in repr(span.to_json())


def test_an_error_at_the_end_of_a_stream_is_one(seen: Seen) -> None:
    witness = seen.begin()
    play(witness, EVENT, b'data: {"error":{"message":"boom"}}\n\n')
    witness.end("closed_by_caller")
    assert (seen.timelines[0].outcome, seen.timelines[0].error_type) == ("error", "ServerError")


def test_what_the_client_raised_is_named(seen: Seen) -> None:
    witness = seen.begin()
    witness.end("timeout", TimeoutError("words that nobody needs"))
    cancelled = seen.begin()
    cancelled.end("cancelled")
    first, second = seen.spans
    assert (first.attributes or {})["error.type"] == "TimeoutError"
    assert first.status.status_code is trace.StatusCode.ERROR
    assert "error.type" not in (second.attributes or {})
    assert second.status.status_code is trace.StatusCode.UNSET


def test_a_whole_answer(seen: Seen) -> None:
    witness = seen.begin(streamed=False)
    witness.marks.sent_ns = now()
    witness.head(200, {"content-type": "application/json"}, now())
    witness.feed(b'{"id":"1","model":"m-2","choices":[{"finish_reason":"stop"}],', now())
    witness.feed(b'"time_info":{"total_time":0.000001}}', now())
    witness.end("completed")
    (timeline,) = seen.timelines
    assert timeline.first_content_s is None
    assert timeline.server_timing is not None
    assert (seen.span().attributes or {})["gen_ai.response.model"] == "m-2"


def test_time_that_the_consumer_takes_is_its_own_only_where_the_answer_waited(seen: Seen) -> None:
    ms = 1_000_000
    witness = seen.begin(begin_ns=1)
    witness.marks.sent_ns = 2
    witness.head(200, HEADERS, 3)
    witness.feed(EVENT, 10 * ms, 4)
    witness.feed(EVENT, 30 * ms + 100_000, 30 * ms)  # was there: the consumer took 20 ms
    witness.feed(EVENT, 80 * ms, 35 * ms)  # came later than it was asked for
    assert witness.marks.paused_ns == 20 * ms
    assert witness.waited_ns == 20 * ms + 5 * ms - 100_000
    witness.end("closed_by_caller", at_ns=81 * ms)
    assert_adds_up(seen.timelines[0])
    assert seen.timelines[0].segments["client"].parts["waiting"].duration_s >= 0.02


# --- traces -------------------------------------------------------------------------------------------------------------


def test_the_trace_goes_to_the_server_where_the_request_has_none(seen: Seen) -> None:
    witness = seen.begin()
    headers = witness.headers({"content-type"})
    assert set(headers) == {"traceparent"}
    assert witness.headers({"traceparent"}) == {}
    assert witness.headers({"b3"}) == {}
    witness.end("completed")
    context = seen.span().get_span_context()
    assert context is not None
    assert headers["traceparent"].split("-")[1:3] == [f"{context.trace_id:032x}", f"{context.span_id:016x}"]


def test_a_trace_in_the_request_is_the_parent_where_no_span_is_current(seen: Seen) -> None:
    given = {"traceparent": "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"}
    seen.begin(request_headers=given).end("completed")
    span = seen.span()
    assert span.parent is not None
    assert (span.parent.trace_id, span.parent.span_id) == (0x0123456789ABCDEF0123456789ABCDEF, 0x0123456789ABCDEF)


def test_a_current_span_is_the_parent_whatever_the_request_says(seen: Seen) -> None:
    given = {"traceparent": "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"}
    with seen.provider.get_tracer("t").start_as_current_span("outer") as outer:
        seen.begin(request_headers=given).end("completed")
    assert seen.spans[0].parent is not None
    assert seen.spans[0].parent.span_id == outer.get_span_context().span_id


def test_a_genai_span_of_another_instrumentation_is_enriched(seen: Seen) -> None:
    tracer = seen.provider.get_tracer("t")
    with tracer.start_as_current_span("chat m", attributes={"gen_ai.operation.name": "chat"}):
        witness = seen.begin()
        play(witness, EVENT, LAST)
        witness.end("completed")
    inner, outer = seen.spans
    assert inner.name == "spanwire.attempt"
    assert "gen_ai.operation.name" not in (inner.attributes or {})
    assert (outer.attributes or {})["spanwire.outcome"] == "completed"


def test_the_calls_span_is_current_only_inside(seen: Seen) -> None:
    witness = seen.begin()
    with witness.current():
        with seen.provider.get_tracer("t").start_as_current_span("http"):
            pass
    assert not trace.get_current_span().get_span_context().is_valid
    witness.end("completed")
    http, call = seen.spans
    assert http.parent is not None
    assert http.parent.span_id == call.get_span_context().span_id  # type: ignore[union-attr]


def test_a_model_that_is_not_known_is_left_out(seen: Seen) -> None:
    seen.begin(model="").end("completed")
    assert seen.span().name == "chat"
    assert "gen_ai.request.model" not in (seen.span().attributes or {})


# --- abandoned ----------------------------------------------------------------------------------------------------------


class Handle:
    def __init__(self, witness: Witness) -> None:
        self.witness = witness

    def __del__(self) -> None:
        self.witness.abandon()


def test_an_abandoned_call_ends_at_its_last_activity_when_the_next_one_begins(seen: Seen) -> None:
    handle = Handle(seen.begin())
    play(handle.witness, EVENT)
    last_ns = handle.witness.along.last_byte_ns  # type: ignore[union-attr]
    begin_ns = handle.witness._record.begin_ns
    del handle
    assert seen.timelines == []  # a finalizer only leaves a note
    other = seen.begin()
    (timeline,) = seen.timelines
    assert timeline.outcome == "abandoned"
    assert timeline.total_s == (last_ns - begin_ns) / 1e9
    other.end("completed")
    assert len(seen.spans) == 2


def test_many_abandoned_calls_end_together(seen: Seen) -> None:
    for _ in range(3000):
        Handle(seen.begin(telemetry=None))
    seen.begin().end("completed")
    assert len(seen.timelines) == 3001


def test_on_an_event_loop_nobody_has_to_come_by(seen: Seen) -> None:
    async def main() -> None:
        Handle(seen.begin())
        while not seen.timelines:
            await asyncio.sleep(0)

    asyncio.run(main())
    assert seen.timelines[0].outcome == "abandoned"


def test_a_finalizer_in_the_middle_of_anything_is_harmless(seen: Seen) -> None:
    class Nasty:
        """Collected while the witness holds its own lock."""

        def __init__(self) -> None:
            self.me = self
            self.handle = Handle(seen.begin(telemetry=None))

    Nasty()
    witness = seen.begin()
    with witness._lock:
        gc.collect()
    witness.end("completed")
    assert sorted(timeline.outcome for timeline in seen.timelines) == ["abandoned", "completed"]


def test_at_the_processs_exit_the_rest_is_told() -> None:
    code = """
import spanwire
from spanwire.plugins import Registry
from spanwire.witness import Witness
class Seen:
    @spanwire.hookimpl
    def register_observers(self): return [self]
    def call_ended(self, timeline): print(timeline.outcome)
registry = Registry([Seen()])
Witness.begin(spanwire.Endpoint("http://x"), operation="chat", model="m", streamed=True, registry=registry).abandon()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout == "abandoned\n"
    assert done.stderr == ""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_in_a_forked_child_it_is_the_parents(seen: Seen) -> None:
    witness, pending = seen.begin(), seen.begin()
    pending.abandon()
    child = os.fork()
    if child == 0:
        try:
            witness.end("completed")
            witness.abandon()
            module.sweep()
            os._exit(len(seen.timelines))
        finally:
            os._exit(99)
    assert os.waitpid(child, 0)[1] == 0
    witness.end("completed")
    assert len(seen.timelines) == 2


# --- whatever happens ---------------------------------------------------------------------------------------------------


def test_nothing_is_raised_into_the_caller(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Registry):
        def span_attributes(self, timeline: Timeline) -> Mapping[str, Any]:
            raise ZeroDivisionError

    with caplog.at_level(logging.WARNING, "spanwire"):
        witness = Witness.begin(ENDPOINT, operation="chat", model="m", streamed=True, registry=Broken())
        witness.head(200, HEADERS, 1)
        witness.feed(b"\xff\x00data: {", 2)
        witness.end("completed")
    assert witness.ended
    assert "a call could not be recorded" in caplog.text


def test_the_default_manager_is_asked_where_nothing_is_given(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = spanwire.ConnectionManager(plugins=[seen], telemetry=None)
    monkeypatch.setattr("spanwire.manager._default", manager)
    witness = Witness.begin(ENDPOINT, operation="chat", model="m", streamed=False)
    assert witness.headers() == {}
    with pytest.raises(RuntimeError, match="has not ended"):
        _ = witness.timeline
    witness.end("completed")
    assert len(seen.timelines) == 1


def test_a_decoder_that_does_not_work_costs_no_call(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_coding: str) -> Any:
        raise AttributeError("Decompressor")

    with monkeypatch.context() as patch:
        patch.setattr("spanwire.wire.along._WBITS", {})
        patch.setattr("spanwire.wire.along.importlib.import_module", broken)
        witness = seen.begin()
        witness.head(200, {**HEADERS, "content-encoding": "br"}, now())
        witness.feed(b"x", now())
        witness.end("completed")
    assert seen.timelines[0].outcome == "completed"
