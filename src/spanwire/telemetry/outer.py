"""Which span of somebody else's stands for the call already, so that no call is counted twice.

Other tools make a span for a model call too. Where theirs can be seen, spanwire's is a ``spanwire.attempt`` below it.
How they can be seen (read in their releases of November 2026):

* the current span says so: OpenTelemetry's GenAI, OpenLLMetry for SDKs, OpenInference for SDKs and LiteLLM;
* a key in the context says so: OpenTelemetry's GenAI; OpenLLMetry's handler for LangChain, whose span is not current;
* an integration of ours knows the span, which is nowhere in the context, and hands it over by :func:`inside`:
  OpenInference's and OpenLLMetry's handlers for LangChain;
* a ``traceparent`` among the call's headers: a tool that leaves it at that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import _SUPPRESS_INSTRUMENTATION_KEY, Context
from opentelemetry.trace import Span

__all__ = ["Outer", "find", "inside", "is_model_call", "suppressed"]

_GENAI_KEY = "opentelemetry.genai.client.inference.context"
_MODEL_KEY = "suppress_language_model_instrumentation"
#: What :func:`inside` sets.
_INSIDE_KEY = "spanwire.inside"
#: What ``opentelemetry.instrumentation.utils.suppress_instrumentation`` sets besides the API's own key.
_PLAIN_KEY = "suppress_instrumentation"
#: Operations that contain model calls, and are none. Source: GenAI conventions.
_AROUND = frozenset({"create_agent", "execute_tool", "invoke_agent", "invoke_workflow", "plan", "retrieval"})
#: OpenInference's attribute, and those of its kinds that are calls of ours.
_KIND = "openinference.span.kind"
_KINDS = frozenset({"LLM", "EMBEDDING"})


class Outer(NamedTuple):
    """The parent's context; whether somebody else's span stands for the call; and that span, where it can be written on.

    ``sent``: the parent is the one that the caller's own ``traceparent`` names.
    """

    context: Context
    counted: bool
    span: Span | None
    sent: bool = False


_NOBODY = Outer(Context(), False, None)


@contextlib.contextmanager
def inside(span: object) -> Iterator[None]:
    """Calls that begin now are inside ``span``, a model call's of another tool that did not make it current.

    For integrations: a span of the OpenTelemetry API; anything else is ignored. For one await, never across a ``yield``.
    """
    if not isinstance(span, Span) or not span.get_span_context().is_valid:
        yield
        return
    token = otel_context.attach(otel_context.set_value(_INSIDE_KEY, span))
    try:
        yield
    finally:
        otel_context.detach(token)


def suppressed(context: Context) -> bool:
    """The application wants no telemetry of what happens now, as while an exporter sends."""
    return bool(context.get(_SUPPRESS_INSTRUMENTATION_KEY) or context.get(_PLAIN_KEY))


def find(context: Context, headers: Mapping[str, str]) -> Outer | None:
    """Whose child a call is that begins now, None if nothing is to be told of it.

    ``headers`` are the call's own, with names in lower case.
    """
    if not context and not headers:
        return _NOBODY
    if suppressed(context):
        return None
    span = trace.get_current_span(context)
    sent = headers.get("traceparent") if headers else None
    named = _named(sent, span) if sent is not None else None
    handed: Any = context.get(_INSIDE_KEY)
    if is_model_call(span):
        return Outer(context, True, span, named is not None)
    if handed is not None:
        return Outer(trace.set_span_in_context(handed, context), True, handed, named is not None)
    genai = context.get(_GENAI_KEY) is not None
    counted = genai or context.get(_MODEL_KEY) is True
    if named is not None:
        return Outer(trace.set_span_in_context(named, context), counted, None, True)
    # Where only a key tells of a span, the current one is the application's own, and not to be written on.
    return Outer(context, counted, span if genai else None)


def is_model_call(span: Span) -> bool:
    """Whether a span says that it stands for a model's call."""
    attributes: Mapping[str, Any] | None = getattr(span, "attributes", None)
    if attributes:
        operation = attributes.get("gen_ai.operation.name")
        if operation is not None:
            # Our own span is current only while a client that the user brought is handed its request, so it is not ours.
            return operation not in _AROUND
        if attributes.get(_KIND) in _KINDS:
            return True
    # OpenInference's spans keep their kind to themselves until they end.
    kept: Any = getattr(span, "_self_important_attributes", None)
    return isinstance(kept, dict) and kept.get(_KIND) in _KINDS


def _named(traceparent: str, current: Span) -> Span | None:
    """The span that a caller's ``traceparent`` names, if it is of the trace that is current, or none is.

    One of another trace is where the caller wants the server's spans, and is sent as it is.
    """
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    extracted = TraceContextTextMapPropagator().extract({"traceparent": traceparent}, Context())
    named = trace.get_current_span(extracted)
    theirs, ours = named.get_span_context(), current.get_span_context()
    if not theirs.is_valid or (ours.is_valid and ours.trace_id != theirs.trace_id):
        return None
    return named
