"""Whose child a call is: what other tools leave for us to find."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext

from spanwire.manager import ConnectionManager
from spanwire.telemetry.outer import inside
from tests.core.telemetry.heard import Heard, attributes, parent_id
from tests.support import chat, hello, run, serving

TRACE, SPAN = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7
SENT = f"00-{TRACE:032x}-{SPAN:016x}-01"


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before = otel_context.get_current()
    yield
    assert otel_context.get_current() == before


def call(heard: Heard, headers: dict[str, str] | None = None) -> str:
    """One call; returns the traceparent that the server was sent."""
    with serving(hello()) as server:

        async def body() -> None:
            async with ConnectionManager(telemetry=heard.telemetry()) as manager:
                await manager.complete(server.endpoint(), chat(), headers=headers)

        run(body)
        return server.requests[0].headers["traceparent"]


def id_of(span: Any) -> int:
    found: int = span.get_span_context().span_id
    return found


def test_a_callers_traceparent_is_the_parent_of_what_is_sent(heard: Heard) -> None:
    sent = call(heard, {"Traceparent": SENT})
    ours = heard.one("chat m")
    assert parent_id(ours) == SPAN
    assert sent.split("-")[1:3] == [f"{TRACE:032x}", f"{id_of(ours):016x}"]


def test_one_of_the_trace_that_is_current_too(heard: Heard) -> None:
    with heard.tracer.start_as_current_span("application"):
        theirs = heard.tracer.start_span("theirs")  # and never current
        context = theirs.get_span_context()
        sent = call(heard, {"traceparent": f"00-{context.trace_id:032x}-{context.span_id:016x}-01"})
        theirs.end()
    ours = heard.one("chat m")
    assert parent_id(ours) == id_of(theirs)
    assert sent.split("-")[2] == f"{id_of(ours):016x}"


def test_one_of_another_trace_is_sent_as_it_is(heard: Heard) -> None:
    with heard.tracer.start_as_current_span("application") as application:
        assert call(heard, {"traceparent": SENT}) == SENT
    assert parent_id(heard.one("chat m")) == id_of(application)


def test_what_is_no_traceparent_is_sent_as_it_is(heard: Heard) -> None:
    assert call(heard, {"traceparent": "nonsense"}) == "nonsense"
    assert heard.one("chat m").parent is None


def test_a_traceparent_below_a_key_that_says_it_is_counted(heard: Heard) -> None:
    """As OpenLLMetry leaves it where it wraps a client: its span's id in a header, and a key in the context."""
    token = otel_context.attach(otel_context.set_value("suppress_language_model_instrumentation", True))
    call(heard, {"traceparent": SENT})
    otel_context.detach(token)
    assert parent_id(heard.one("spanwire.attempt")) == SPAN
    assert heard.spans("chat m") == []


def test_a_key_alone_does_not_make_the_applications_span_the_calls(heard: Heard) -> None:
    with heard.tracer.start_as_current_span("application") as application:
        token = otel_context.attach(otel_context.set_value("suppress_language_model_instrumentation", True))
        call(heard)
        otel_context.detach(token)
    assert parent_id(heard.one("spanwire.attempt")) == id_of(application)
    assert attributes(heard.one("application")) == {}


def test_a_span_that_an_integration_hands_over(heard: Heard) -> None:
    theirs = heard.tracer.start_span("theirs")
    with heard.tracer.start_as_current_span("application"), inside(theirs):
        sent = call(heard)
    theirs.end()
    ours = heard.one("spanwire.attempt")
    assert parent_id(ours) == id_of(theirs)
    assert sent.split("-")[2] == f"{id_of(ours):016x}"
    assert attributes(heard.one("theirs"))["spanwire.outcome"] == "completed"
    assert attributes(heard.one("application")) == {}


@pytest.mark.parametrize("nothing", [None, "span", trace.INVALID_SPAN])
def test_what_is_no_span_is_not_handed_over(heard: Heard, nothing: object) -> None:
    with inside(nothing):
        call(heard)
    assert heard.spans("chat m")


def test_one_that_has_ended_is_left_as_it_is(heard: Heard, caplog: pytest.LogCaptureFixture) -> None:
    theirs = heard.tracer.start_span("theirs")
    theirs.end()
    with inside(theirs):
        call(heard)
    assert attributes(heard.one("theirs")) == {}
    assert caplog.records == []


class Keeps(NonRecordingSpan):
    """As OpenInference's spans, which tell their kind when they end."""

    def __init__(self, kind: str) -> None:
        super().__init__(SpanContext(TRACE, SPAN, is_remote=False, trace_flags=trace.TraceFlags(1)))
        self._self_important_attributes = {"openinference.span.kind": kind}


@pytest.mark.parametrize(("kind", "name"), [("LLM", "spanwire.attempt"), ("CHAIN", "chat m")])
def test_a_kind_that_is_kept_until_the_end(heard: Heard, kind: str, name: str) -> None:
    with trace.use_span(Keeps(kind)):
        call(heard)
    assert parent_id(heard.one(name)) == SPAN
