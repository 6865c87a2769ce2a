"""PURE: how a scripted server says what a call took, each dialect where and in the unit in which the real server does.

What is said is what the server measured (:class:`ServerTimes`), not what was scripted: timers are late, and a client's
figures are judged by these. Of the phases of :class:`~spanwire.testing.Script`, ``queue_s`` is the queue, ``headers_s``
and ``prefill_s`` are the prefill, the gaps are the decode, and ``end_s`` belongs only to a total.

Dialects after the servers' source, documentation and recorded answers; ``server-timing`` is the header of
https://www.w3.org/TR/server-timing/, with metric names of spanwire's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import msgspec

__all__ = ["DIALECTS", "Dialect", "ServerTimes"]


class ServerTimes(msgspec.Struct, frozen=True, kw_only=True):
    """What a server measured of one call, in seconds; None: that phase is not over.

    Attributes:
        queue_s: from the arrival of the whole request to the end of its wait.
        prefill_s: from there to the first content.
        decode_s: first to last content.
        total_s: from the arrival to now, or to the answer's end.
    """

    queue_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    total_s: float | None = None


_Headers = Callable[[ServerTimes], dict[str, str]]
_Fields = Callable[[ServerTimes], dict[str, Any]]


class Dialect(NamedTuple):
    """Where one kind of server says it. None: not there.

    Attributes:
        headers: of an answer that is not streamed.
        stream_headers: of a stream, which leave before the first token: they know the time to themselves only.
        fields: of a whole chat answer, merged into it.
        event_fields: of one event of a streamed chat answer, merged into it.
        event: which: that with the finish reason, that with the usage, or the last of the two that is sent. An event
            that is not sent says nothing.
        asked_by: a field of the request without which a stream has no ``event_fields``.
        on_errors: an error status has the headers too.
    """

    headers: _Headers | None = None
    stream_headers: _Headers | None = None
    fields: _Fields | None = None
    event_fields: _Fields | None = None
    event: Literal["finish", "usage", "last"] = "last"
    asked_by: str | None = None
    on_errors: bool = False


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 6)


def _s(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 9)


def _whole_ms(seconds: float | None) -> str:
    """Truncated, as servers do that count in whole milliseconds."""
    return str(int((seconds or 0.0) * 1e3))


def _model_s(times: ServerTimes) -> float | None:
    if times.prefill_s is None:
        return None
    return times.prefill_s + (times.decode_s or 0.0)


def _vllm(times: ServerTimes) -> dict[str, Any]:
    # The "time to first token" of this block begins when the request is scheduled: it is the prefill alone.
    return {
        "metrics": {
            "queue_time_ms": _ms(times.queue_s),
            "time_to_first_token_ms": _ms(times.prefill_s),
            "generation_time_ms": _ms(times.decode_s),
        }
    }


def _llama_cpp(times: ServerTimes) -> dict[str, Any]:
    # Neither a queue nor a total.
    return {"timings": {"prompt_ms": _ms(times.prefill_s), "predicted_ms": _ms(times.decode_s)}}


def _groq_usage(times: ServerTimes) -> dict[str, Any]:
    # The total does not include the queue.
    return {
        "queue_time": _s(times.queue_s),
        "prompt_time": _s(times.prefill_s),
        "completion_time": _s(times.decode_s),
        "total_time": _s(_model_s(times)),
    }


def _groq(times: ServerTimes) -> dict[str, Any]:
    return {"usage": _groq_usage(times)}


def _groq_event(times: ServerTimes) -> dict[str, Any]:
    return {"x_groq": {"id": "req_loopback", "usage": _groq_usage(times)}}


def _cerebras(times: ServerTimes) -> dict[str, Any]:
    # The total includes the queue.
    return {
        "time_info": {
            "queue_time": _s(times.queue_s),
            "prompt_time": _s(times.prefill_s),
            "completion_time": _s(times.decode_s),
            "total_time": _s(times.total_s),
            "created": time.time(),
        }
    }


def _tgi(times: ServerTimes) -> dict[str, str]:
    # Whole milliseconds, except for x-compute-time.
    return {
        "x-compute-type": "cpu",
        "x-compute-time": f"{times.total_s or 0.0:.9f}",
        "x-total-time": _whole_ms(times.total_s),
        "x-validation-time": "0",
        "x-queue-time": _whole_ms(times.queue_s),
        "x-inference-time": _whole_ms(_model_s(times)),
    }


def _tgi_stream(_: ServerTimes) -> dict[str, str]:
    return {"x-compute-type": "cpu"}


_FIREWORKS = (
    ("prefill-queue-duration", "queue_s"),
    ("prefill-duration", "prefill_s"),
    ("generation-duration", "decode_s"),
)


def _fireworks_values(times: ServerTimes) -> dict[str, str]:
    # Text, even in JSON.
    found = {name: getattr(times, field) for name, field in _FIREWORKS}
    if times.queue_s is not None and times.prefill_s is not None:
        found["server-time-to-first-token"] = times.queue_s + times.prefill_s
    found["server-processing-time"] = times.total_s
    return {name: f"{value:.6f}" for name, value in found.items() if value is not None}


def _fireworks(times: ServerTimes) -> dict[str, str]:
    return {f"fireworks-{name}": value for name, value in _fireworks_values(times).items()}


def _fireworks_event(times: ServerTimes) -> dict[str, Any]:
    return {"perf_metrics": _fireworks_values(times)}


def _openai(times: ServerTimes) -> dict[str, str]:
    return {"openai-processing-ms": _whole_ms(times.total_s)}


def _envoy(times: ServerTimes) -> dict[str, str]:
    return {"x-envoy-upstream-service-time": _whole_ms(times.total_s)}


def _server_timing(times: ServerTimes) -> dict[str, str]:
    metrics = {"queue": times.queue_s, "prefill": times.prefill_s, "decode": times.decode_s, "total": times.total_s}
    known = ", ".join(f"{name};dur={value * 1e3:.3f}" for name, value in metrics.items() if value is not None)
    return {"server-timing": known}


#: The names for ``Script(server_timing=...)``.
DIALECTS: Mapping[str, Dialect] = {
    "vllm": Dialect(fields=_vllm, event_fields=_vllm, event="usage"),
    "llama.cpp": Dialect(fields=_llama_cpp, event_fields=_llama_cpp),
    "groq": Dialect(fields=_groq, event_fields=_groq_event, event="finish"),
    "cerebras": Dialect(fields=_cerebras, event_fields=_cerebras, event="usage"),
    "fireworks": Dialect(
        headers=_fireworks, event_fields=_fireworks_event, event="finish", asked_by="perf_metrics_in_response"
    ),
    "tgi": Dialect(headers=_tgi, stream_headers=_tgi_stream),
    "openai": Dialect(headers=_openai, stream_headers=_openai, on_errors=True),
    "envoy": Dialect(headers=_envoy, stream_headers=_envoy, on_errors=True),
    "server-timing": Dialect(headers=_server_timing, stream_headers=_server_timing, on_errors=True),
}
