"""What OpenTelemetry is told of jobs: short spans, linked, also across a restart."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.trace import SpanKind, StatusCode

import spanwire
from spanwire.errors import JobError
from spanwire.jobs.contract import JobRow, Times
from spanwire.jobs.sqlite import SQLiteStore
from spanwire.jobs.timing import spent, timeline_of
from tests.core.jobs.server import Doing, serving
from tests.core.jobs.test_jobs import CALL, POLL, Plugin, endpoint_of
from tests.core.telemetry.heard import Heard, attributes
from tests.support import assert_adds_up

DONE: dict[str, Any] = {"status": "done", "output": "x"}


def manager_of(heard: Heard) -> spanwire.ConnectionManager:
    return spanwire.ConnectionManager(plugins=[Plugin()], telemetry=heard.telemetry())


async def test_three_spans_tell_of_a_job(tmp_path: Path) -> None:
    heard = Heard()
    times = {"accepted_s": 5.0, "started_s": 5.002, "finished_s": 5.003}
    async with serving(Doing(webhooks=[{**DONE, "times": times}])) as server, manager_of(heard) as manager:
        with heard.tracer.start_as_current_span("agent") as agent:
            job = await manager.submit(endpoint_of(server, tmp_path), CALL, group="g")
        await job
        sent = server.requests[0][2]["traceparent"]
    send, process, whole = (heard.one(f"{name} simple/m") for name in ("send", "process", "job"))
    assert send.kind == SpanKind.PRODUCER
    assert send.parent is not None
    assert send.parent.span_id == agent.get_span_context().span_id
    context = send.get_span_context()
    assert context is not None
    assert sent.split("-")[1:3] == [f"{context.trace_id:032x}", f"{context.span_id:016x}"]
    assert attributes(send)["http.response.status_code"] == 202
    assert attributes(send)["spanwire.outcome"] == "completed"
    assert process.kind == SpanKind.CONSUMER
    for span in (process, whole):
        assert span.parent is None
        assert [link.context.span_id for link in span.links] == [context.span_id]
        assert attributes(span)["spanwire.job.id"] == job.id
    assert job.row is not None
    assert whole.start_time == int(job.row.created_s * 1e9)
    assert whole.end_time == int(job.row.resolved_s * 1e9)
    assert attributes(whole)["spanwire.job.state"] == "succeeded"
    assert attributes(whole)["spanwire.job.group"] == "g"
    assert attributes(whole)["spanwire.segment.model.source"] == "reported"
    children = {
        span.name: span for span in heard.spans() if span.parent and span.parent.span_id == whole.context.span_id
    }
    assert {"queue", "model"} <= children.keys()
    model = children["model"]
    assert model.start_time == children["queue"].end_time
    assert [span.name for span in heard.spans() if span.name.startswith(("chat", "status"))] == []


async def test_a_question_is_no_span(tmp_path: Path) -> None:
    heard = Heard()
    async with serving() as server, manager_of(heard) as manager:
        await (await manager.submit(endpoint_of(server, tmp_path, **POLL), CALL))
    names = {span.name for span in heard.spans() if not span.name.startswith(("queue", "network", "model", "client"))}
    assert names <= {"send simple/m", "job simple/m", "spanwire.connection_setup", "tcp"}


async def test_who_ends_it_links_to_who_has_sent_it(tmp_path: Path) -> None:
    before, after = Heard(), Heard()
    async with serving(Doing(webhooks=[])) as server:
        async with manager_of(before) as manager:
            job = await manager.submit(endpoint_of(server, tmp_path, **POLL), CALL)
        async with manager_of(after) as manager:
            await manager.jobs.attach(job.id, endpoint=endpoint_of(server, tmp_path, **POLL))
    context = before.one("send simple/m").get_span_context()
    (link,) = after.one("job simple/m").links
    assert context is not None
    assert (link.context.trace_id, link.context.span_id) == (context.trace_id, context.span_id)
    assert before.spans("job simple/m") == []


async def test_a_bad_end_is_an_error(tmp_path: Path) -> None:
    heard = Heard()
    failed = {"status": "failed", "error": "sk-content of the user", "code": "X1"}
    async with serving(Doing(webhooks=[failed])) as server, manager_of(heard) as manager:
        job = await manager.submit(endpoint_of(server, tmp_path), CALL)
        with contextlib.suppress(spanwire.SpanwireError):
            await job
    span = heard.one("job simple/m")
    assert span.status.status_code == StatusCode.ERROR
    assert attributes(span)["error.type"] == "X1"
    assert "sk-content" not in span.to_json()


async def test_metrics_count_each_end_once(tmp_path: Path) -> None:
    heard = Heard()
    twice = Doing(webhooks=[DONE, {**DONE, "output": "again"}])
    async with serving(twice) as server, manager_of(heard) as manager:
        job = await manager.submit(endpoint_of(server, tmp_path), CALL)
        await server.until(lambda server: len(server.answers) == 2)
        await job
        while "spanwire.job.events" not in heard.metrics():  # the second one is taken in a moment later
            await job.status()
    metrics = heard.metrics()
    (resolved,) = metrics["spanwire.job.resolved"]
    assert resolved.value == 1
    assert resolved.attributes["spanwire.job.resolved_by"] == "webhook"
    assert [point.value for point in metrics["spanwire.job.open"]] == [0]
    assert [point.count for point in metrics["spanwire.job.duration"]] == [1]
    events = {point.attributes["spanwire.job.event"]: point.value for point in metrics["spanwire.job.events"]}
    assert events == {"again": 1}
    assert "gen_ai.client.operation.duration" not in metrics


async def test_without_telemetry_nothing_is_told(tmp_path: Path) -> None:
    async with serving() as server, spanwire.ConnectionManager(plugins=[Plugin()], telemetry=None) as manager:
        await (await manager.submit(endpoint_of(server, tmp_path), CALL))
        assert "traceparent" not in server.requests[0][2]


def test_the_providers_time_is_taken_as_durations_of_its_own_clock() -> None:
    assert spent(Times(accepted_s=100.0, started_s=101.0, finished_s=103.0)) == (1.0, 2.0, 3.0)
    assert spent(Times(queue_s=1.0, model_s=2.0)) == (1.0, 2.0, 3.0)
    assert spent(Times(accepted_s=5.0, started_s=4.0)) == (None, None, None)
    assert spent(Times()) == (None, None, None)


def test_a_jobs_timeline_adds_up() -> None:
    row = JobRow(
        id="j",
        state="succeeded",
        created_s=1000.0,
        submitted_s=1000.1,
        resolved_s=1003.2,
        times=Times(accepted_s=5.0, started_s=6.0, finished_s=8.0),
        trace={"traceparent": "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"},
    )
    timeline = timeline_of(row)
    assert_adds_up(timeline)
    segments = timeline.segments
    assert abs(segments["queue"].duration_s - 1.0) < 1e-6
    assert abs(segments["model"].duration_s - 2.0) < 1e-6
    assert abs(segments["network"].duration_s - 0.2) < 1e-3
    assert timeline.trace_id == "ab" * 16
    assert timeline_of(JobRow(id="j", state="expired", created_s=1.0, resolved_s=2.0)).outcome == "timeout"


@pytest.mark.parametrize(
    ("times", "running_s", "queue_s", "model_s", "model"),
    [
        (Times(model_s=2.0), 1001.0, 0.9, 2.0, "reported"),  # Cog: its start event came
        (Times(total_s=3.0), 1001.0, 0.9, 2.1, "estimated"),  # Baseten: a status said so
        (Times(model_s=2.0), 1003.0, 1.1, 2.0, "reported"),  # seen late: no more than the model leaves
        (Times(), 1001.0, 0.9, None, None),
        (Times(total_s=3.0), 0.0, None, 3.0, "estimated"),  # never seen at work
        (Times(queue_s=0.5, model_s=2.0), 1001.0, 0.5, 2.0, "reported"),  # it says it itself
    ],
)
def test_a_queue_that_was_seen_from_outside_is_an_estimate(
    times: Times, running_s: float, queue_s: float | None, model_s: float | None, model: str | None
) -> None:
    row = JobRow(
        id="j",
        state="succeeded",
        created_s=1000.0,
        submitted_s=1000.1,
        running_s=running_s,
        resolved_s=1003.2,
        times=times,
    )
    timeline = timeline_of(row)
    assert_adds_up(timeline)
    segments = timeline.segments
    if queue_s is None:
        assert "queue" not in segments
    else:
        assert segments["queue"].duration_s == pytest.approx(queue_s)
        assert segments["queue"].source == ("reported" if times.queue_s else "estimated")
    if model_s is not None:
        assert segments["model"].duration_s == pytest.approx(model_s)
        assert segments["model"].source == model


async def test_a_job_that_was_never_written_is_not_open(tmp_path: Path) -> None:
    heard = Heard()
    store = SQLiteStore(tmp_path / "own.db")

    def down(rows: list[JobRow]) -> None:
        raise JobError("the store of jobs cannot be used", retryable=True)

    store.add = down  # type: ignore[assignment,method-assign]
    async with serving() as server, manager_of(heard) as manager:
        with pytest.raises(JobError):
            await manager.submit(endpoint_of(server, tmp_path, store=store), CALL)
    assert "spanwire.job.open" not in heard.metrics()
    store.close()
