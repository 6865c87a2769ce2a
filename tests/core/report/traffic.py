"""Calls as a service would make them, in both forms that a report reads: a call log's lines, and OTLP spans.

Deterministic for a seed. Three models on two endpoints; cold and warm connections, a burst that waits for slots, a bad
quarter of an hour on one endpoint, retries, timeouts, calls that were left; one endpoint reports times of its own.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

BEGIN_UNIX_S = 1_790_000_000.0
#: endpoint, model, weight, round trip, prefill, seconds a token, whether the server reports
KINDS = (
    ("api.example.com:443", "llama-3.3-70b", 5, 0.028, 0.42, 0.021, False),
    ("api.example.com:443", "qwen-2.5-7b", 8, 0.028, 0.11, 0.008, False),
    ("10.0.3.7:8000", "qwen-2.5-7b", 6, 0.0011, 0.07, 0.007, True),
    ("10.0.3.7:8000", "mixtral-8x22b", 2, 0.0011, 0.31, 0.034, True),
)


def timelines(n: int, *, seed: int = 7, hours: float = 6.0) -> Iterator[dict[str, Any]]:
    """``n`` calls as ``Timeline.to_dict()`` has them, in order of their start."""
    rng = random.Random(seed)
    weights = [kind[2] for kind in KINDS]
    at_s = 0.0
    for number in range(n):
        at_s = hours * 3600 * number / n + rng.random()
        kind = rng.choices(KINDS, weights)[0]
        yield _timeline(rng, number, at_s, at_s / (hours * 3600), kind)


def _timeline(rng: random.Random, number: int, at_s: float, phase: float, kind: Any) -> dict[str, Any]:
    endpoint, model, _, rtt_s, prefill_s, token_s, reports = kind
    load = 1 + 0.6 * math.sin(phase * 6.28) + rng.lognormvariate(-2, 0.8)
    bad = 0.45 < phase < 0.5 and not reports
    parts: list[tuple[str, str, str, float]] = []
    cold = rng.random() < (0.5 if bad else 0.12)
    if 0.7 < phase < 0.76 and rng.random() < 0.7:
        parts.append(("queue", "local", "measured", rng.expovariate(1 / 0.4)))
    if cold:
        if not reports:
            parts.append(("handshake", "dns", "measured", rng.expovariate(1 / 0.004)))
        parts.append(("handshake", "tcp", "measured", rtt_s * rng.uniform(1, 1.2)))
        if not reports:
            parts.append(("handshake", "tls", "measured", rtt_s * rng.uniform(1.1, 2.4)))
    parts += [("client", "encode", "measured", rng.uniform(4e-5, 3e-4)), ("network", "send", "measured", 4e-5)]
    waited_s = sum(row[3] for row in parts)
    tokens = max(2, int(rng.lognormvariate(4.2, 0.8)))
    outcome, error_type = "completed", None
    dice = rng.random()
    if bad and dice < 0.25:
        outcome, error_type = rng.choice(
            [("error", "RateLimited"), ("error", "Overloaded"), ("timeout", "CallTimeout")]
        )
    elif dice < 0.012:
        outcome = "closed_by_caller"
    elif dice < 0.02:
        outcome, error_type = "error", "ConnectionFailed"
    timeline: dict[str, Any] = {"schema": 1, "outcome": outcome}
    first_content_s = last_chunk_s = None
    if outcome in ("completed", "closed_by_caller"):
        prefill = prefill_s * load * rng.uniform(0.7, 1.3) * (4 if bad else 1)
        decode = tokens * token_s * load * rng.uniform(0.8, 1.2)
        source = "reported" if reports else "estimated"
        parts.append(("network", "to_and_back", "estimated", rtt_s))
        queue = rng.expovariate(1 / 0.03) if reports else 0.0
        if reports:
            parts.append(("queue", "server", "reported", queue))
        parts += [("model", "prefill", source, prefill), ("model", "decode", source, decode)]
        first_content_s = waited_s + rtt_s + queue + prefill
        last_chunk_s = first_content_s + decode
        if outcome == "completed":
            parts += [("client", "decode", "measured", 1e-4), ("client", "waiting", "measured", rng.expovariate(2000))]
        parts.append(
            ("unattributed", "", "measured", rng.expovariate(1 / (0.08 if model == "mixtral-8x22b" else 0.004)))
        )
    else:
        parts.append(("unattributed", "", "measured", 10.0 if outcome == "timeout" else rng.uniform(0.05, 0.4)))
    total_s = sum(row[3] for row in parts)
    timeline["total_s"] = total_s
    timeline["started_unix_s"] = BEGIN_UNIX_S + at_s
    timeline["trace_id"] = f"{number + 1:032x}"
    if first_content_s is not None:
        timeline["first_byte_s"] = timeline["first_chunk_s"] = first_content_s - 1e-4
        timeline["first_content_s"] = first_content_s
        timeline["last_chunk_s"] = last_chunk_s
        if outcome == "completed":
            timeline["usage"] = {
                "input_tokens": 200 + number % 900,
                "output_tokens": tokens,
                "cached_tokens": number % 100,
            }
    segments: dict[str, Any] = {}
    for segment, part, source, seconds in parts:
        row = segments.setdefault(segment, {"duration_s": 0.0, "source": source})
        row["duration_s"] += seconds
        row["source"] = max(row["source"], source, key=["measured", "reported", "estimated"].index)
        if part:
            row.setdefault("parts", {})[part] = {"duration_s": seconds, "source": source}
    timeline["segments"] = segments
    timeline["connection"] = {"id": f"c{number % 50}", "reused": not cold, "engine": "spanwire"}
    attempt = {"outcome": outcome} | ({"error_type": error_type} if error_type else {})
    retried = rng.random() < 0.015
    timeline["attempts"] = [{"outcome": "error", "error_type": "Overloaded"}, attempt] if retried else [attempt]
    timeline |= {"endpoint": endpoint, "transport": "sse", "operation": "chat", "model": model}
    return timeline


# --- the same calls as spans --------------------------------------------------------------------------------------------


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    return {"stringValue": value}


def span(timeline: dict[str, Any], name: str, span_id: str, parent: str = "", **more: Any) -> dict[str, Any]:
    """A span with these attributes, at the time of the call."""
    begin_ns = int(timeline["started_unix_s"] * 1e9)
    return {
        "traceId": timeline["trace_id"],
        "spanId": span_id,
        "parentSpanId": parent,
        "name": name,
        "kind": 3,
        "startTimeUnixNano": str(begin_ns),
        "endTimeUnixNano": str(begin_ns + int(timeline["total_s"] * 1e9)),
        "attributes": [{"key": key, "value": _value(value)} for key, value in more.items()],
    }


def own_attributes(timeline: dict[str, Any]) -> dict[str, Any]:
    """``spanwire.*``, as on our span and on an outer one."""
    values: dict[str, Any] = {"spanwire.outcome": timeline["outcome"], "spanwire.transport": timeline["transport"]}
    if "first_content_s" in timeline:
        values["spanwire.time_to_first_content"] = timeline["first_content_s"]
    values["spanwire.connection.id"] = timeline["connection"]["id"]
    values["spanwire.connection.reused"] = timeline["connection"]["reused"]
    for segment, row in timeline["segments"].items():
        values[f"spanwire.segment.{segment}.duration"] = row["duration_s"]
        values[f"spanwire.segment.{segment}.source"] = row["source"]
        for part, piece in row.get("parts", {}).items():
            values[f"spanwire.segment.{segment}.{part}.duration"] = piece["duration_s"]
    attempts = timeline["attempts"]
    if len(attempts) > 1:
        values["http.request.resend_count"] = len(attempts) - 1
    if "error_type" in attempts[-1]:
        values["error.type"] = attempts[-1]["error_type"]
    return values


def server(timeline: dict[str, Any]) -> dict[str, Any]:
    host, _, port = timeline["endpoint"].rpartition(":")
    return {"server.address": host, "server.port": int(port)}


def genai(timeline: dict[str, Any]) -> dict[str, Any]:
    values = {"gen_ai.operation.name": timeline["operation"], "gen_ai.request.model": timeline["model"]}
    for name, attribute in (
        ("input_tokens", "gen_ai.usage.input_tokens"),
        ("output_tokens", "gen_ai.usage.output_tokens"),
        ("cached_tokens", "gen_ai.usage.cache_read.input_tokens"),
    ):
        if name in timeline.get("usage", {}):
            values[attribute] = timeline["usage"][name]
    return values


def spans(timeline: dict[str, Any], *, nested: bool) -> list[dict[str, Any]]:
    """The call's spans: our own; or another instrumentation's, enriched, with ours below it. Tries too, children first."""
    number = int(timeline["trace_id"], 16)
    outer_id, own_id = f"{2 * number:016x}", f"{2 * number + 1:016x}"
    made = []
    if len(timeline["attempts"]) > 1:
        for at, attempt in enumerate(timeline["attempts"], 1):
            values = {"spanwire.attempt.number": at, "spanwire.outcome": attempt["outcome"]}
            made.append(span(timeline, "spanwire.attempt", f"{number:08x}{at:08x}", own_id, **values))
    own = own_attributes(timeline) | server(timeline)
    if not nested:
        return [*made, span(timeline, f"chat {timeline['model']}", own_id, **own, **genai(timeline))]
    outer = own_attributes(timeline) | genai(timeline)
    return [
        *made,
        span(timeline, "spanwire.attempt", own_id, outer_id, **own),
        span(timeline, "ChatOpenAI.chat", outer_id, **outer),
    ]


def export(spans_: list[dict[str, Any]]) -> dict[str, Any]:
    """An ExportTraceServiceRequest."""
    return {"resourceSpans": [{"resource": {}, "scopeSpans": [{"scope": {"name": "spanwire"}, "spans": spans_}]}]}
