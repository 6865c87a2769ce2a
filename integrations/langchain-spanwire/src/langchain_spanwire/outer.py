"""The span that another tool's callback handler has made for this run, and keeps to itself.

Handlers make a span for the model's run and do not make it current, so that nothing below them can see it. spanwire's
span belongs below it, and the run is not to be counted twice. Read in the releases of November 2026: OpenInference's
handler has ``get_span(run_id)``, OpenLLMetry's has ``spans``, by run, of holders with ``span``; both tools put theirs into
every callback manager that is made.

LangChain tells ``_stream`` and ``_astream`` neither run nor handlers, so under such a tool a handler of our own notes the
run's id, in the context in which the stream's first step runs.
"""

from __future__ import annotations

import sys
from contextvars import ContextVar
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler, CallbackManager
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import merge_configs

__all__ = ["noted", "span_of"]

#: Tools whose handlers keep spans to themselves.
_TOOLS = frozenset({"openinference.instrumentation.langchain", "opentelemetry.instrumentation.langchain"})
_run_id: ContextVar[UUID | None] = ContextVar("langchain_spanwire_run_id", default=None)


class _Note(BaseCallbackHandler):
    """Hears of a run's start alone."""

    run_inline = True  # in the caller's own context

    @property
    def ignore_llm(self) -> bool:
        return True

    def on_chat_model_start(self, *_: Any, run_id: UUID, **__: Any) -> None:
        _run_id.set(run_id)


_NOTE = _Note()


def noted(config: RunnableConfig | None) -> RunnableConfig | None:
    """The config of a stream that begins now, with what :func:`span_of` will ask for."""
    if _TOOLS.isdisjoint(sys.modules):
        return config
    return merge_configs(config, RunnableConfig(callbacks=[_NOTE]))


def span_of(run_manager: Any) -> object | None:
    """What the first handler that has one calls its span of this run, None if none does."""
    if _TOOLS.isdisjoint(sys.modules):
        return None
    if run_manager is not None:
        run_id, handlers = run_manager.run_id, run_manager.handlers
    else:
        run_id, handlers = _run_id.get(), CallbackManager([]).handlers
        _run_id.set(None)
    for handler in handlers:
        try:
            get_span = getattr(handler, "get_span", None)
            span: object | None = get_span(run_id) if get_span is not None else handler.spans[run_id].span
        except Exception:  # noqa: BLE001, S112 - a handler of another kind, whose names mean something else
            continue
        if span is not None:
            return span
    return None
