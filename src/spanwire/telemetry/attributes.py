"""What is written on spans and metrics: values in, attributes out. No span is made here, and nothing is recorded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Protocol

from ..calls import Usage
from ..endpoint import Endpoint
from ..errors import CallTimeout, ServerError, SpanwireError
from ..timeline import CallRecord, Source, Timeline, weakest_source
from ..transport import Head
from .names import PARAMETERS, PROVIDERS

__all__ = [
    "Asked",
    "Labels",
    "Value",
    "add_answer",
    "add_usage",
    "description",
    "kept",
    "labels_of",
    "own_attributes",
    "parameters",
    "protocol",
    "server",
    "server_address",
]

Value = str | bool | int | float

#: Longest text on a span, in characters: what a server or a plugin gives has no limit of its own.
_TEXT_LIMIT = 1024
#: As many models' labels are kept with an endpoint.
_LABELS_KEPT = 64
#: Names of parts that are kept.
_NAMES_KEPT = 256


class Asked(Protocol):
    """What spans and metrics tell of a request: a :class:`~spanwire.calls.Call`, or what was seen of another client's."""

    @property
    def operation(self) -> str:
        """As in ``gen_ai.operation.name``."""

    @property
    def model(self) -> str:
        """``""`` where it is not known."""

    @property
    def body(self) -> Mapping[str, Any]:
        """The request's parameters; others than those that have an attribute are ignored."""


class Labels:
    """What spans and metrics of calls to one endpoint, of one operation and model, have in common: made once.

    Attributes:
        slowness: what has been usual for these calls; the one that decides about detail keeps it here.
    """

    __slots__ = (
        "attributes",
        "first_content",
        "fresh",
        "genai",
        "inference",
        "name",
        "nested",
        "reused",
        "slowness",
        "streamed",
    )

    def __init__(self, endpoint: Endpoint, operation: str, model: str, *, streamed: bool, provider: str = "") -> None:
        model = _text(model)
        where = server(endpoint)
        self.name = f"{operation} {model}" if model else operation
        asked: dict[str, Value] = {"gen_ai.request.model": model} if model else {}
        self.nested = where
        self.genai: dict[str, Value] = {
            **where,
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": _provider(endpoint.origin.host, provider),
            **asked,
        }
        self.streamed = streamed
        self.inference = operation != "embeddings"
        self.attributes: dict[str, Value] = {**self.genai, "gen_ai.request.stream": streamed}
        self.first_content: dict[str, Value] = {**where, **asked}
        self.fresh: dict[str, Value] = {**where, "spanwire.connection.reused": False}
        self.reused: dict[str, Value] = {**where, "spanwire.connection.reused": True}
        self.slowness: Any = None


def labels_of(endpoint: Endpoint, call: Asked, *, streamed: bool) -> Labels:
    """Kept with the endpoint, which is looked up for each call anyway."""
    known: dict[tuple[str, str, bool, str], Labels] | None = endpoint.__dict__.get("_labels")
    if known is None:
        known = endpoint.__dict__["_labels"] = {}
    provider = getattr(call, "provider", "")  # of another client's request: whose schema it is
    key = (call.operation, call.model, streamed, provider)
    found = known.get(key)
    if found is None:
        if len(known) >= _LABELS_KEPT:
            known.clear()
        found = known[key] = Labels(endpoint, call.operation, call.model, streamed=streamed, provider=provider)
    return found


def server(endpoint: Endpoint) -> dict[str, Value]:
    """``server.address`` and, unless it is a unix socket, ``server.port``."""
    found: dict[str, Value] = {"server.address": server_address(endpoint)}
    if endpoint.uds is None and endpoint.origin.port:
        found["server.port"] = endpoint.origin.port
    return found


def server_address(endpoint: Endpoint) -> str:
    """The host, or the path of the unix socket."""
    return endpoint.uds if endpoint.uds is not None else endpoint.origin.host


@lru_cache(maxsize=256)
def _provider(host: str, schema: str) -> str:
    known = next((name for suffix, name in PROVIDERS if host == suffix or host.endswith("." + suffix)), "")
    return known or schema or "openai"


class _PartNames(dict[tuple[str, str], str]):
    """Made once for each piece; plugins may mark parts that nobody has heard of, so not without end."""

    def __missing__(self, piece: tuple[str, str]) -> str:
        name = f"spanwire.segment.{piece[0]}.{piece[1]}.duration"
        if len(self) < _NAMES_KEPT:
            self[piece] = name
        return name


class _SegmentNames(dict[str, tuple[str, str]]):
    """The same for segments, of which there are few."""

    def __missing__(self, segment: str) -> tuple[str, str]:
        made = self[segment] = f"spanwire.segment.{segment}.duration", f"spanwire.segment.{segment}.source"
        return made


_part_names = _PartNames()
_segment_names = _SegmentNames()


def own_attributes(timeline: Timeline, record: CallRecord) -> dict[str, Value]:
    """``spanwire.*``, from the record and the pieces, not from the timeline's own objects: this runs for every call."""
    attributes: dict[str, Value] = {"spanwire.outcome": record.outcome, "spanwire.transport": record.transport}
    if record.attempts:
        attempt, begin_ns = record.attempts[-1], record.begin_ns
        marks, connection = attempt.marks, attempt.connection
        if marks.first_byte_ns:
            attributes["spanwire.time_to_first_byte"] = (marks.first_byte_ns - begin_ns) / 1e9
        if marks.first_content_ns:
            attributes["spanwire.time_to_first_content"] = (marks.first_content_ns - begin_ns) / 1e9
        if connection is not None:
            attributes["spanwire.connection.id"] = connection.id
            attributes["spanwire.connection.reused"] = connection.reused
            if connection.age_s is not None:
                attributes["spanwire.connection.age"] = connection.age_s
            if connection.idle_s is not None:
                attributes["spanwire.connection.idle_time"] = connection.idle_s
            if connection.engine not in (None, "spanwire"):
                attributes["spanwire.connection.engine"] = connection.engine or ""
            rtt_scope = getattr(connection, "rtt_scope", None)
            if rtt_scope is not None:
                attributes["spanwire.connection.rtt_scope"] = rtt_scope
    said: Mapping[str, Any] | None = getattr(timeline, "server_timing", None)
    if said is not None and isinstance(dialect := said.get("dialect"), str):
        attributes["spanwire.server_timing.dialect"] = _text(dialect)
    sums: dict[str, tuple[int, Source]] = {}
    for key, (duration_ns, source) in timeline.pieces.items():
        segment = key[0]
        if key[1]:
            attributes[_part_names[key]] = duration_ns / 1e9
        if segment in sums:
            before_ns, weakest = sums[segment]
            duration_ns += before_ns
            if weakest != source:
                source = weakest_source(weakest, source)
        sums[segment] = (duration_ns, source)
    for segment, (duration_ns, source) in sums.items():
        duration_name, source_name = _segment_names[segment]
        attributes[duration_name] = duration_ns / 1e9
        attributes[source_name] = source
    return attributes


def add_answer(
    attributes: dict[str, Any], record: CallRecord, head: Head | None, usage: Usage | None, finish_reason: str | None
) -> None:
    """What the conventions say of an answer."""
    attempt = record.attempts[-1] if record.attempts else None
    if attempt is not None and attempt.streamed and attempt.marks.first_chunk_ns:
        attributes["gen_ai.response.time_to_first_chunk"] = (attempt.marks.first_chunk_ns - record.begin_ns) / 1e9
    if head is not None:
        if head.id:
            attributes["gen_ai.response.id"] = _text(head.id)
        if head.model:
            attributes["gen_ai.response.model"] = _text(head.model)
    if finish_reason:
        attributes["gen_ai.response.finish_reasons"] = (_text(finish_reason),)
    if usage is not None:
        add_usage(attributes, usage)


def add_usage(attributes: dict[str, Any], usage: Usage) -> None:
    """Token counts that the server gave. Their names are the same in both tables of the conventions."""
    if usage.input_tokens is not None:
        attributes["gen_ai.usage.input_tokens"] = usage.input_tokens
    if usage.output_tokens is not None:
        attributes["gen_ai.usage.output_tokens"] = usage.output_tokens
    if usage.cached_tokens is not None:
        attributes["gen_ai.usage.cache_read.input_tokens"] = usage.cached_tokens
    if usage.reasoning_tokens is not None:
        attributes["gen_ai.usage.reasoning.output_tokens"] = usage.reasoning_tokens


def parameters(body: Mapping[str, Any]) -> dict[str, Value]:
    """The request's parameters that have an attribute, and a value that one may have."""
    return {
        attribute: value
        for parameter, attribute in PARAMETERS
        if (type(value := body.get(parameter)) is int and abs(value) < 2**63)
        or (type(value) is float and math.isfinite(value))
    }


def _text(value: str) -> str:
    """Text that every exporter can encode: cut, and without halves of surrogate pairs."""
    if len(value) > _TEXT_LIMIT:
        value = value[:_TEXT_LIMIT]
    return value if value.isascii() else value.encode("utf-8", "replace").decode()


def kept(value: object) -> Value | None:
    """A plugin's attribute, if it is one."""
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, bool) or (isinstance(value, int) and abs(value) < 2**63):
        return value
    return value if isinstance(value, float) and math.isfinite(value) else None


def description(error_type: str, error: BaseException | None) -> str:
    """Not the message: a server's words may repeat what it was asked."""
    if isinstance(error, ServerError) and error.status is not None:
        return f"{error_type} {error.status}"
    if isinstance(error, CallTimeout):
        return f"{error_type} {error.limit}"
    return f"{error_type} in phase {error.phase}" if isinstance(error, SpanwireError) else error_type


def protocol(name: str) -> tuple[str, str]:
    """``http/1.1`` as ``network.protocol.name`` and ``.version``."""
    family, _, version = name.partition("/")
    return ("http", "2") if family == "h2" else (family, version)
