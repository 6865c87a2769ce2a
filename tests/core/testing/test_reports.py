"""What each dialect says of known times. That it is sent, and when: tests/plugins/sse/test_loopback.py."""

from typing import Any

import pytest

from spanwire.testing import ServerTimes
from spanwire.testing.reports import DIALECTS

TIMES = ServerTimes(queue_s=0.0105, prefill_s=0.1, decode_s=0.15, total_s=0.2619)
#: As they are when a stream's headers leave.
EARLY = ServerTimes(queue_s=0.0105, total_s=0.0119)


@pytest.mark.parametrize(
    ("dialect", "fields"),
    [
        ("vllm", {"metrics": {"queue_time_ms": 10.5, "time_to_first_token_ms": 100, "generation_time_ms": 150}}),
        ("llama.cpp", {"timings": {"prompt_ms": 100, "predicted_ms": 150}}),
        ("groq", {"usage": {"queue_time": 0.0105, "prompt_time": 0.1, "completion_time": 0.15, "total_time": 0.25}}),
    ],
)
def test_fields_of_a_whole_answer_in_the_dialect_s_unit(dialect: str, fields: dict[str, Any]) -> None:
    make = DIALECTS[dialect].fields
    assert make is not None
    assert make(TIMES) == fields


def test_cerebras_counts_the_queue_into_its_total_and_adds_a_stamp() -> None:
    make = DIALECTS["cerebras"].fields
    assert make is not None
    block = make(TIMES)["time_info"]
    assert isinstance(block.pop("created"), float)
    assert block == {"queue_time": 0.0105, "prompt_time": 0.1, "completion_time": 0.15, "total_time": 0.2619}


@pytest.mark.parametrize(
    ("dialect", "whole", "streamed"),
    [
        (
            "tgi",
            {
                "x-compute-type": "cpu",
                "x-compute-time": "0.261900000",
                "x-total-time": "261",
                "x-validation-time": "0",
                "x-queue-time": "10",
                "x-inference-time": "250",
            },
            {"x-compute-type": "cpu"},
        ),
        ("openai", {"openai-processing-ms": "261"}, {"openai-processing-ms": "11"}),
        ("envoy", {"x-envoy-upstream-service-time": "261"}, {"x-envoy-upstream-service-time": "11"}),
        (
            "server-timing",
            {"server-timing": "queue;dur=10.500, prefill;dur=100.000, decode;dur=150.000, total;dur=261.900"},
            {"server-timing": "queue;dur=10.500, total;dur=11.900"},
        ),
    ],
)
def test_headers_of_a_stream_know_the_time_to_themselves_only(
    dialect: str, whole: dict[str, str], streamed: dict[str, str]
) -> None:
    headers, stream_headers = DIALECTS[dialect].headers, DIALECTS[dialect].stream_headers
    assert headers is not None
    assert stream_headers is not None
    assert headers(TIMES) == whole
    assert stream_headers(EARLY) == streamed


def test_fireworks_has_text_in_headers_or_in_the_last_event() -> None:
    headers, event = DIALECTS["fireworks"].headers, DIALECTS["fireworks"].event_fields
    assert headers is not None
    assert event is not None
    assert headers(TIMES)["fireworks-prefill-queue-duration"] == "0.010500"
    assert event(TIMES) == {
        "perf_metrics": {
            "prefill-queue-duration": "0.010500",
            "prefill-duration": "0.100000",
            "generation-duration": "0.150000",
            "server-time-to-first-token": "0.110500",
            "server-processing-time": "0.261900",
        }
    }


@pytest.mark.parametrize("dialect", ["vllm", "llama.cpp", "groq", "cerebras"])
def test_a_phase_that_never_ended_is_null(dialect: str) -> None:
    event = DIALECTS[dialect].event_fields
    assert event is not None
    (block,) = event(EARLY).values()
    assert None in (block.get("usage") or block).values()
