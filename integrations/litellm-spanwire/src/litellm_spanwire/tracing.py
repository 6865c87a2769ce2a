"""Spans of ours beside LiteLLM's.

LiteLLM's OpenTelemetry callback makes its spans after the call, as one model call each, or writes on the span that is
current then. Ours must not be a second model call beside them, must never be current while LiteLLM's code runs, and
hangs below the span that was current when the call was made, wherever a stream is read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import litellm
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan

from spanwire.telemetry.outer import is_model_call

__all__ = ["context_of", "entered"]

#: The key by which instrumentations tell each other that a model call has its span already (OpenLLMetry's).
_SUPPRESS_KEY = "suppress_language_model_instrumentation"
#: Names of LiteLLM's callbacks that make OpenTelemetry spans, and the classes behind them.
_NAMES = frozenset(
    {"otel", "arize", "arize_phoenix", "langfuse_otel", "langtrace", "levo", "logfire", "signoz", "weave_otel"}
)
_CLASSES = frozenset({"OpenTelemetry", "OpenTelemetryV2"})


def context_of(litellm_params: Mapping[str, Any]) -> Context:
    """Where the span of a call that begins now belongs."""
    context = otel_context.get_current()
    if not trace.get_current_span(context).get_span_context().is_valid:
        metadata = litellm_params.get("metadata")
        parent = metadata.get("litellm_parent_otel_span") if isinstance(metadata, Mapping) else None
        if isinstance(parent, trace.Span):  # the proxy's own for the request, which it never makes current
            context = trace.set_span_in_context(parent, context)
    current = trace.get_current_span(context)
    if _litellm_traces() and not is_model_call(current):
        # Its context without itself: spanwire writes on a span that stands for the model call, and this one is the user's.
        parent = NonRecordingSpan(current.get_span_context())
        context = otel_context.set_value(_SUPPRESS_KEY, True, trace.set_span_in_context(parent, context))
    return context


def _litellm_traces() -> bool:
    for callbacks in (litellm.callbacks, litellm.success_callback, litellm._async_success_callback):
        for callback in callbacks:
            if isinstance(callback, str):
                if callback in _NAMES:
                    return True
            elif not _CLASSES.isdisjoint(cls.__name__ for cls in type(callback).__mro__):
                return True
    return False


@contextlib.contextmanager
def entered(context: Context) -> Iterator[None]:
    """Make it current; for one await, never across a ``yield`` to the caller."""
    token = otel_context.attach(context)
    try:
        yield
    finally:
        otel_context.detach(token)
