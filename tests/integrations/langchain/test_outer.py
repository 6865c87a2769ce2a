"""Spans that other tools' handlers keep to themselves. The tools themselves are in tests/instrumentations."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_spanwire import ChatSpanwire
from langchain_spanwire import outer as outer_module
from langchain_spanwire.outer import noted, span_of
from opentelemetry.trace import Span

import spanwire
from tests.cases.spans import Spans, attributes, parent_id, span_id
from tests.integrations.langchain.asking import ask
from tests.support import serving

RUN = UUID(int=7)


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if one of the tools had been imported."""
    monkeypatch.setitem(sys.modules, "openinference.instrumentation.langchain", ModuleType("tool"))


def fails(_run_id: object) -> object:
    raise ZeroDivisionError


def test_without_such_a_tool_nothing_is_looked_for() -> None:
    manager: Any = object()
    assert noted({"tags": ["a"]}) == {"tags": ["a"]}
    assert noted(None) is None
    assert span_of(manager) is None


@pytest.mark.usefixtures("tool")
def test_the_first_that_has_one() -> None:
    handlers = [
        SimpleNamespace(),
        SimpleNamespace(spans="something else"),
        SimpleNamespace(get_span=fails),
        SimpleNamespace(get_span=lambda _run_id: None),
        SimpleNamespace(spans={RUN: SimpleNamespace(span="its span")}),
    ]
    assert span_of(SimpleNamespace(run_id=RUN, handlers=handlers)) == "its span"
    assert span_of(SimpleNamespace(run_id=UUID(int=8), handlers=handlers)) is None
    assert span_of(SimpleNamespace(run_id=RUN, handlers=[])) is None


@pytest.mark.usefixtures("tool")
def test_a_config_keeps_what_it_has() -> None:
    found = noted({"tags": ["a"], "callbacks": [BaseCallbackHandler()]})
    assert found is not None
    assert found["tags"] == ["a"]
    callbacks: Any = found["callbacks"]
    assert len(callbacks) == 2


class _Keeps(BaseCallbackHandler):
    """As OpenInference's."""

    def __init__(self, spans: Spans) -> None:
        self._tracer = spans.tracer
        self.spans_by_run: dict[UUID, Span] = {}

    def get_span(self, run_id: UUID) -> Span | None:
        return self.spans_by_run.get(run_id)

    def on_chat_model_start(self, *_: Any, run_id: UUID, **__: Any) -> None:
        self.spans_by_run[run_id] = self._tracer.start_span("theirs")

    def on_llm_end(self, *_: Any, run_id: UUID, **__: Any) -> None:
        self.spans_by_run.pop(run_id).end()


@pytest.mark.usefixtures("tool")
@pytest.mark.parametrize("way", ["ainvoke", "astream", "invoke", "stream"])
def test_the_call_is_below_it_in_every_way(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spans = Spans()
    handler = _Keeps(spans)
    # The tools put theirs into every manager that is made.
    monkeypatch.setattr(outer_module, "CallbackManager", lambda _: SimpleNamespace(handlers=[handler]))
    manager = spanwire.ConnectionManager(telemetry=spans.telemetry())
    with serving() as server:
        model = ChatSpanwire(model="m", endpoint=server.url, manager=manager)
        for _ in range(2):
            ask(way, model.with_config(callbacks=[handler]))
        spanwire.SyncConnectionManager(manager).close()
    assert spans.all() == []
    theirs = spans.all("theirs")
    assert [parent_id(span) for span in spans.all("spanwire.attempt")] == [span_id(span) for span in theirs]
    assert [attributes(span)["spanwire.outcome"] for span in theirs] == ["completed"] * 2
