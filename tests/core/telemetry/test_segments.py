"""Segments as spans, by the real SDK."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import ReadableSpan

import spanwire
from spanwire import errors
from spanwire.manager import ConnectionManager
from spanwire.testing import LoopbackServer, Script
from tests.core.telemetry.heard import Heard, attributes, call_once, parent_id
from tests.support import AT_ONCE, NEVER, chat, hello, read, run, serving


def id_of(span: ReadableSpan) -> int:
    context = span.get_span_context()
    assert context is not None
    return context.span_id


def children(heard: Heard, parent: ReadableSpan) -> list[ReadableSpan]:
    """Segments below a span, in the order of time; they lie inside it and not over each other."""
    found = [
        span for span in heard.spans() if parent_id(span) == id_of(parent) and "spanwire.segment" in attributes(span)
    ]
    found.sort(key=lambda span: (span.start_time or 0, span.end_time or 0))
    at = parent.start_time or 0
    for span in found:
        assert at <= (span.start_time or 0) < (span.end_time or 0) <= (parent.end_time or 0)
        at = span.end_time or 0
    return found


def test_a_warm_calls_segments_are_its_children(heard: Heard) -> None:
    with serving() as server:

        async def body() -> None:
            async with ConnectionManager(telemetry=heard.telemetry(detail="full")) as manager:
                await manager.warm(server.endpoint())
                heard.exporter.clear()
                server.script(hello(prefill_s=0.03, gap_s=0.003))
                async with manager.stream(server.endpoint(), chat()) as stream:
                    await read(stream)

        run(body)
    call = heard.one("chat m")
    found = children(heard, call)
    said = attributes(call)
    assert {span.name for span in found} >= {"client encode", "network send", "model prefill", "model decode"}
    lengths: dict[tuple[str, str], int] = {}
    for span in found:
        about = attributes(span)
        assert set(about) == {
            "spanwire.segment",
            "spanwire.segment.part",
            "spanwire.segment.source",
            "spanwire.segment.placed",
        }
        segment, part = about["spanwire.segment"], about["spanwire.segment.part"]
        assert span.name == f"{segment} {part}"
        assert about["spanwire.segment.placed"] == (
            "clock" if about["spanwire.segment.source"] == "measured" else "window"
        )
        assert span.end_time is not None
        assert span.start_time is not None
        lengths[segment, part] = lengths.get((segment, part), 0) + span.end_time - span.start_time
    for (segment, part), length_ns in lengths.items():
        assert said[f"spanwire.segment.{segment}.{part}.duration"] == pytest.approx(length_ns / 1e9, abs=2e-6)


def test_a_handshake_is_drawn_once(heard: Heard) -> None:
    with LoopbackServer() as server:
        call_once(server, heard, chat())  # auto: it is cold
        call, setup = heard.one("chat m"), heard.one("spanwire.connection_setup")
        assert not [span for span in children(heard, call) if span.name.startswith("handshake")]
        (tcp,) = children(heard, setup)
        assert tcp.name == "tcp"
        assert attributes(tcp)["spanwire.segment"] == "handshake"
        assert attributes(tcp)["spanwire.segment.placed"] == "clock"


def test_a_retried_calls_segments_are_its_attempts_children(heard: Heard) -> None:
    retries = spanwire.Retries(base_s=0.02)
    with serving(Script(status=503), hello(prefill_s=0.02, gap_s=0.003)) as server:
        call_once(server, heard, chat(), retries=retries)
    call = heard.one("chat m")
    (backoff,) = children(heard, call)
    assert backoff.name == "queue backoff"
    first, second = heard.spans("spanwire.attempt")
    assert first.end_time == backoff.start_time
    assert backoff.end_time == second.start_time
    assert {span.name for span in children(heard, first)} >= {"client encode", "network send"}
    assert {span.name for span in children(heard, second)} >= {"client encode", "network send", "model decode"}


def test_a_back_off_that_the_call_did_not_survive_lies_behind_the_attempt(heard: Heard) -> None:
    with serving(Script(status=503, queue_s=0.03)) as server:
        retries = spanwire.Retries(base_s=3600, max_wait_s=7200)
        endpoint = server.endpoint(retries=retries, timeouts=spanwire.Timeouts(total_s=0.1))

        async def body() -> None:
            async with ConnectionManager(telemetry=heard.telemetry(detail="full")) as manager:
                with pytest.raises(errors.CallTimeout):
                    await manager.complete(endpoint, chat())

        run(body)
    call = heard.one("chat m")
    last = children(heard, call)[-1]
    assert (last.name, last.end_time) == ("queue backoff", call.end_time)
    assert attributes(last)["spanwire.segment.placed"] == "clock"


def test_below_somebody_elses_span_it_is_the_attempts_segments(heard: Heard) -> None:
    with serving(hello(prefill_s=0.02)) as server:

        async def body() -> None:
            async with ConnectionManager(telemetry=heard.telemetry()) as manager:
                with heard.tracer.start_as_current_span("theirs", attributes={"gen_ai.operation.name": "chat"}):
                    await manager.complete(server.endpoint(), chat())

        run(body)
    assert children(heard, heard.one("spanwire.attempt"))
    assert children(heard, heard.one("theirs")) == []


def test_flat_has_none(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPANWIRE_DETAIL", "flat")
    with serving(Script(status=503), hello()) as server:
        call_once(server, heard, chat(), retries=AT_ONCE)
    call = heard.one("chat m")
    assert [span.name for span in heard.spans() if parent_id(span) == id_of(call)].count("spanwire.attempt") == 2
    assert not [
        span for span in heard.spans() if span.name.partition(" ")[0] in ("client", "network", "model", "queue")
    ]
    assert "spanwire.segment.client.duration" in attributes(call)


def test_auto_draws_the_first_of_a_second_and_those_that_fail(heard: Heard) -> None:
    with serving(default=lambda request: Script(status=400) if request.body["model"] == "bad" else hello()) as server:

        async def body() -> None:
            async with ConnectionManager(telemetry=heard.telemetry()) as manager:
                await manager.warm(server.endpoint())
                for _ in range(40):
                    await manager.complete(server.endpoint(), chat())
                with pytest.raises(errors.BadRequest):
                    await manager.complete(server.endpoint(retries=NEVER), chat("bad"))

        run(body)
    calls = heard.spans("chat m")
    drawn = sum(bool(children(heard, call)) for call in calls)
    seconds = ((calls[-1].end_time or 0) - (calls[0].end_time or 0)) / 1e9
    assert 10 <= drawn <= 10 * (seconds + 2) + 10  # a few are slow
    assert children(heard, heard.one("chat bad"))


def test_an_unknown_detail_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(errors.ConfigurationError, match="auto, full, flat"):
        spanwire.Telemetry(detail="everything")
    monkeypatch.setenv("SPANWIRE_DETAIL", "some")
    with pytest.raises(errors.ConfigurationError, match="some"):
        spanwire.Telemetry()
