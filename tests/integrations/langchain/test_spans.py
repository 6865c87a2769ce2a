"""Whose child a call's span is, and that a call which somebody else traces already is counted once."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.runnables import RunnableLambda
from langchain_spanwire import ChatSpanwire, SpanwireEmbeddings
from opentelemetry import context as otel_context
from opentelemetry import trace

import spanwire
from tests.cases.spans import Spans, attributes, parent_id, span_id
from tests.integrations.langchain.asking import WAYS, Seen, aask, ask
from tests.support import run, serving

way_of = pytest.mark.parametrize("way", WAYS)

#: What other tools have current while LangChain calls a model: name, attributes. Sources: their releases of November 2026.
OUTER: dict[str, dict[str, Any]] = {
    "OpenTelemetry GenAI": {"gen_ai.operation.name": "chat"},
    "OpenInference": {"openinference.span.kind": "LLM"},
}


def ask_inside(way: str, model: Any, spans: Spans, **attributes: Any) -> Seen:
    """The call in a span that is current, in the thread or on the loop of the caller."""
    seen = Seen()
    if way.startswith("a"):

        async def body() -> None:
            with spans.tracer.start_as_current_span("outer", attributes=attributes):
                await aask(way, model, "q", seen)

        run(body)
        return seen
    with spans.tracer.start_as_current_span("outer", attributes=attributes):
        return ask(way, model)


@way_of
def test_a_call_is_a_child_of_what_is_current(way: str) -> None:
    spans = Spans()
    with serving() as server:
        model = ChatSpanwire(
            model="m", endpoint=server.url, manager=spanwire.ConnectionManager(telemetry=spans.telemetry())
        )
        ask_inside(way, model, spans)
        sent = server.requests[0].headers["traceparent"]
        spanwire.SyncConnectionManager(model.async_manager()).close()
    ours, outer = spans.one(), spans.one("outer")
    assert parent_id(ours) == span_id(outer)
    assert attributes(ours)["gen_ai.response.finish_reasons"] == ("stop",)
    assert attributes(ours)["gen_ai.usage.input_tokens"] == 1
    assert sent.split("-")[2] == f"{span_id(ours):016x}"


@way_of
@pytest.mark.parametrize("tool", OUTER)
def test_what_another_tool_traces_is_not_counted_twice(tool: str, way: str) -> None:
    spans = Spans()
    with serving() as server:
        model = ChatSpanwire(
            model="m", endpoint=server.url, manager=spanwire.ConnectionManager(telemetry=spans.telemetry())
        )
        ask_inside(way, model, spans, **OUTER[tool])
        spanwire.SyncConnectionManager(model.async_manager()).close()
    assert spans.all() == []
    attempt, outer = spans.one("spanwire.attempt"), spans.one("outer")
    assert parent_id(attempt) == span_id(outer)
    assert "gen_ai.operation.name" not in attributes(attempt)
    assert attributes(outer)["spanwire.outcome"] == "completed"


class _OpenLLMetry(BaseCallbackHandler):
    """As OpenLLMetry's handler for LangChain: a span of its own that is never current, and a key in the context."""

    run_inline = True

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        self._span: Any = None

    def on_chat_model_start(self, *_: Any, **__: Any) -> None:
        self._span = self._spans.tracer.start_span("ChatSpanwire.chat", attributes={"gen_ai.operation.name": "chat"})
        otel_context.attach(otel_context.set_value("suppress_language_model_instrumentation", True))

    def on_llm_end(self, *_: Any, **__: Any) -> None:
        self._span.end()


@pytest.mark.parametrize("way", ["ainvoke", "astream", "invoke", "stream"])
def test_under_a_handler_that_suppresses_others(way: str) -> None:
    spans = Spans()
    manager = spanwire.ConnectionManager(telemetry=spans.telemetry())
    before = otel_context.get_current()
    with serving() as server:
        model = ChatSpanwire(model="m", endpoint=server.url, manager=manager)
        ask(way, model.with_config(callbacks=[_OpenLLMetry(spans)]))
        spanwire.SyncConnectionManager(manager).close()
    otel_context.attach(before)
    assert spans.all() == []
    assert [name for name in spans.names() if name in ("ChatSpanwire.chat", "spanwire.attempt")] == [
        "spanwire.attempt",
        "ChatSpanwire.chat",
    ]


def test_spans_of_a_chain_and_of_embeddings() -> None:
    spans = Spans()
    manager = spanwire.ConnectionManager(telemetry=spans.telemetry())
    with serving() as server, spans.tracer.start_as_current_span("outer") as outer:
        model = ChatSpanwire(model="m", endpoint=server.url, manager=manager)
        chain: Any = RunnableLambda(lambda text: f"{text}!") | model
        chain.batch(["a", "b"])
        SpanwireEmbeddings(model="m", endpoint=server.url, manager=manager, chunk_size=1).embed_documents(
            ["a", "b", "c"]
        )
        assert trace.get_current_span() is outer
        spanwire.SyncConnectionManager(manager).close()
    parent = outer.get_span_context().span_id
    assert [parent_id(span) for span in spans.all()] == [parent] * 2
    assert [parent_id(span) for span in spans.all("embeddings m")] == [parent] * 3
