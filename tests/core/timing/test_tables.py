"""What each server sends, in its surroundings and its unit, as it was recorded or is documented."""

from __future__ import annotations

import json
from typing import Any

import pytest

from spanwire.timing import Readers, Reading
from spanwire.timing.tables import BUILT_IN, SERVER_TIMING_NAMES

READERS = Readers()
MS = 1_000_000
S = 1_000_000_000

Told = dict[tuple[str, str], int | None]
"""(server, maps_to) to nanoseconds; or (path, maps_to), where one server tells several."""


def chat_body(**more: Any) -> bytes:
    message = {"role": "assistant", "content": "Hello! How can I help?"}
    body = {
        "id": "chatcmpl-0123456789abcdef",
        "object": "chat.completion",
        "created": 1764196886,
        "model": "a-model",
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 38, "completion_tokens": 10, "total_tokens": 48},
        "system_fingerprint": "fp_0123456789",
    }
    return json.dumps({**body, **more}).encode()


def chunk(choices: list[Any] | None = None, **more: Any) -> bytes:
    event = {
        "id": "chatcmpl-0123456789abcdef",
        "object": "chat.completion.chunk",
        "created": 1764196886,
        "model": "a-model",
        "choices": choices or [],
    }
    return json.dumps({**event, **more}).encode()


LAST = [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]
USAGE = {"prompt_tokens": 38, "completion_tokens": 10, "total_tokens": 48}
JSON = {"content-type": "application/json", "date": "Mon, 30 Nov 2026 10:00:00 GMT", "connection": "keep-alive"}
SSE = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}


def told(readings: list[Reading]) -> Told:
    found = {(reading.server, reading.maps_to): reading.duration_ns for reading in readings}
    assert len(found) == len(readings), "two of a kind; ask for them by path"
    return found


def by_path(readings: list[Reading]) -> Told:
    return {(reading.path, reading.maps_to): reading.duration_ns for reading in readings}


def of_stream(*events: bytes, headers: dict[str, str] | None = None) -> list[Reading]:
    return READERS.read(headers={**SSE, **(headers or {})}, streamed=True, events=events)


def of_body(body: bytes | None = None, **headers: str) -> list[Reading]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return READERS.read(headers={**JSON, **named}, streamed=False, body=body)


# --- blocks in the answer -------------------------------------------------------------------------------------------


def test_vllm() -> None:
    block = {
        "queue_time_ms": 4.1,
        "time_to_first_token_ms": 31.0,
        "generation_time_ms": 210.5,
        "mean_itl_ms": 3.2,
    }
    expected: Told = {
        ("vllm", "queue"): 4_100_000,
        ("vllm", "prefill"): 31 * MS,  # without the queue, whatever its name says
        ("vllm", "decode"): 210_500_000,
        ("vllm", "decode_rate"): None,
    }
    streamed = of_stream(chunk(LAST), chunk(usage=USAGE, metrics=block))
    assert told(streamed) == expected
    assert {reading.location for reading in streamed} == {"event"}
    assert {reading.raw for reading in streamed} == {4.1, 31.0, 210.5, 3.2}
    whole = of_body(chat_body(metrics=block))
    assert told(whole) == expected
    assert {reading.location for reading in whole} == {"body"}
    assert [reading.window for reading in whole] == ["to_end", "to_end", "to_end", "none"]


@pytest.mark.parametrize("block", [None, {}, [], "none", {"queue_time_ms": None}, {"queue_time_ms": "None"}, [{}]])
def test_vllm_without_the_flag(block: Any) -> None:
    assert of_stream(chunk(usage=USAGE, metrics=block)) == []
    assert of_body(chat_body(metrics=block)) == []


def test_vllm_with_stamps_missing() -> None:
    block = {"queue_time_ms": 4, "time_to_first_token_ms": None, "generation_time_ms": 0, "mean_itl_ms": None}
    (queue, decode) = of_body(chat_body(metrics=block))
    assert (queue.maps_to, queue.duration_ns, queue.slack_ns) == ("queue", 4 * MS, MS)
    assert (decode.maps_to, decode.duration_ns) == ("decode", 0)  # one token: first and last are the same


def test_sglang() -> None:
    meta = {
        "id": "0123456789abcdef0123456789abcdef",
        "finish_reason": {"type": "stop"},
        "prompt_tokens": 5,
        "completion_tokens": 16,
        "queue_time": 0.0021,
        "forward_entry_time": 1773777097.25,
        "prefill_finished_time": 1773777097.375,
        "response_sent_to_client_ts": 1773777098.2503688,
        "first_token_latency": 0.1291,
        "decode_throughput": 41.5,
        "e2e_latency": 0.9037937670946121,
    }
    expected: Told = {
        ("sglang", "queue"): 2_100_000,
        ("sglang", "prefill"): 125 * MS,
        ("sglang", "ttft"): 129_100_000,
        ("sglang", "server_total"): 903_793_767,
        ("sglang", "decode_rate"): None,
    }
    body = json.dumps({"text": " Paris", "output_ids": [1, 2], "meta_info": meta}).encode()
    assert told(of_body(body)) == expected
    first = json.dumps({"text": "", "meta_info": {"id": "0", "queue_time": 0.1, "finish_reason": None}}).encode()
    assert told(of_stream(first, body)) == expected  # it may repeat on every chunk: the last counts
    prefill = next(reading for reading in of_body(body) if reading.maps_to == "prefill")
    assert prefill.path == "meta_info.prefill_finished_time - meta_info.forward_entry_time"
    assert prefill.raw == "1773777097.375 - 1773777097.25"
    plain = json.dumps({"text": "", "meta_info": {"e2e_latency": 0.5, "forward_entry_time": 1773777097.25}}).encode()
    assert told(of_body(plain)) == {("sglang", "server_total"): 500 * MS}


def test_text_generation_inference() -> None:
    headers = {
        "x-compute-type": "1-a10g",
        "x-compute-time": "2.484567121",
        "x-compute-characters": "12",
        "x-total-time": "2484",
        "x-validation-time": "0",
        "x-queue-time": "0",
        "x-inference-time": "2484",
        "x-time-per-token": "124",
    }
    readings = READERS.read(headers={**JSON, **headers}, streamed=False, body=b'[{"generated_text": "x"}]')
    assert told(readings) == {
        ("tgi", "queue"): 0,  # cut off, and real for a queue
        ("tgi", "server_part"): 0,
        ("tgi", "model_total"): 2484 * MS,
        ("tgi", "server_total"): 2484 * MS,
        ("tgi", "decode_rate"): None,
    }
    assert {reading.slack_ns for reading in readings} == {MS, 0}
    stream = {"x-compute-type": "1-a10g", "x-compute-characters": "12", "x-accel-buffering": "no"}
    assert READERS.read(headers={**SSE, **stream}, streamed=True) == []


def test_text_embeddings_inference() -> None:
    headers = {
        "x-compute-type": "gpu+optimized",
        "x-compute-time": "21",
        "x-total-time": "21",
        "x-tokenization-time": "1",
        "x-queue-time": "3",
        "x-inference-time": "16",
    }
    assert told(READERS.read(headers={**JSON, **headers}, streamed=False, body=b"[[0.1, 0.2]]")) == {
        ("tei", "queue"): 3 * MS,
        ("tei", "server_part"): 1 * MS,
        ("tei", "model_total"): 16 * MS,
        ("tei", "server_total"): 21 * MS,
    }


def test_together() -> None:
    headers = {
        "x-api-received": "2024-06-06T18:17:41.732Z",
        "x-api-call-start": "2024-06-06T18:17:41.736Z",
        "x-api-call-end": "2024-06-06T18:17:42.258Z",
        "x-compute-time": "6237",
        "x-queue-time": "22",
        "x-inference-time": "6214",
        "x-total-time": "6237",
        "x-time-per-token": "10",
        "x-ratelimit-reset": "2",
    }
    readings = READERS.read(headers={**JSON, **headers}, streamed=False, body=chat_body())
    assert told(readings) == {
        ("together", "queue"): 22 * MS,
        ("together", "model_total"): 6214 * MS,
        ("together", "server_total"): 6237 * MS,
        ("together", "decode_rate"): None,
        ("together", "gateway"): 522 * MS,
    }
    gateway = next(reading for reading in readings if reading.maps_to == "gateway")
    assert (gateway.path, gateway.slack_ns) == ("x-api-call-end - x-api-call-start", MS)
    assert gateway.raw == "2024-06-06T18:17:42.258Z - 2024-06-06T18:17:41.736Z"


def test_compute_time_has_two_units_and_only_a_fraction_proves_seconds() -> None:
    assert told(of_body(x_compute_time="2.484567121")) == {("tgi", "server_total"): 2_484_567_121}
    assert of_body(x_compute_time="6237") == []
    assert of_body(x_compute_time="0") == []  # TGI's sum of several prompts
    # Whatever x-total-time holds, nothing is read twice and nothing is guessed.
    assert told(of_body(x_compute_time="2.5", x_total_time="2484")) == {("tgi", "server_total"): 2484 * MS}
    assert of_body(x_compute_time="2.5", x_total_time="None") == []


TIMINGS = {
    "cache_n": 236,
    "prompt_n": 1,
    "prompt_ms": 30.958,
    "prompt_per_token_ms": 30.958,
    "prompt_per_second": 32.301,
    "predicted_n": 35,
    "predicted_ms": 661.064,
    "predicted_per_token_ms": 18.887,
    "predicted_per_second": 52.944,
}


def test_llama_cpp() -> None:
    expected: Told = {("llama.cpp", "prefill"): 30_958_000, ("llama.cpp", "decode"): 661_064_000}
    assert told(of_stream(chunk(LAST, timings=TIMINGS), b"[DONE]")) == expected
    assert told(of_body(chat_body(timings=TIMINGS))) == expected
    # timings_per_token: every chunk has them, the last counts
    early = chunk(LAST, timings={**TIMINGS, "predicted_ms": 600.0})
    assert told(of_stream(early, chunk(LAST, timings=TIMINGS))) == expected


def test_llama_cpp_progress_before_the_first_token() -> None:
    progress = {"total": 2048, "cache": 0, "processed": 1024, "time_ms": 210}
    (reading,) = of_stream(chunk(LAST, prompt_progress=progress))
    assert (reading.maps_to, reading.window, reading.duration_ns) == ("prefill", "to_first_token", 210 * MS)
    assert told(of_stream(chunk(prompt_progress=progress), chunk(LAST, timings=TIMINGS))) == {
        ("llama.cpp", "prefill"): 30_958_000,
        ("llama.cpp", "decode"): 661_064_000,
    }


def test_ollama() -> None:
    done = {
        "model": "llama3.2",
        "created_at": "2025-01-01T00:00:00.123456789Z",
        "message": {"role": "assistant", "content": ""},
        "done_reason": "stop",
        "done": True,
        "total_duration": 3722518334,
        "load_duration": 1534053125,
        "prompt_eval_count": 26,
        "prompt_eval_duration": 179676000,
        "eval_count": 298,
        "eval_duration": 2006086000,
    }
    expected: Told = {
        ("ollama", "server_total"): 3722518334,
        ("ollama", "queue"): 1534053125,
        ("ollama", "prefill"): 179676000,
        ("ollama", "decode"): 2006086000,
    }
    assert told(of_stream(json.dumps(done).encode())) == expected
    assert told(of_body(json.dumps(done).encode())) == expected
    embed = {"model": "m", "embeddings": [[0.1]], "total_duration": 14143917, "load_duration": 1019500}
    assert told(of_body(json.dumps(embed).encode())) == {
        ("ollama", "server_total"): 14143917,
        ("ollama", "queue"): 1019500,
    }
    assert of_stream(b'{"done": true, "total_duration": 0, "eval_count": 1}') == []  # a zero total is a missing one


def test_nvidia_dynamo() -> None:
    timing = {
        "request_received_ms": 1777312800000,
        "prefill_wait_time_ms": 12.5,
        "prefill_time_ms": 80.0,
        "ttft_ms": 92.5,
        "total_time_ms": 400.25,
        "kv_hit_rate": 0.5,
    }
    expected: Told = {
        ("nvidia-dynamo", "queue"): 12_500_000,
        ("nvidia-dynamo", "prefill"): 80 * MS,
        ("nvidia-dynamo", "ttft"): 92_500_000,
        ("nvidia-dynamo", "server_total"): 400_250_000,
    }
    readings = of_stream(chunk(LAST, nvext={"worker_id": {"prefill": 1}, "timing": timing}))
    assert told(readings) == expected  # and the epoch is no duration
    assert {reading.maps_to: reading.window for reading in readings}["ttft"] == "to_first_token"


def test_groq() -> None:
    usage = {
        "queue_time": 0.00491786,
        "prompt_tokens": 38,
        "prompt_time": 0.01460151,
        "completion_tokens": 10,
        "completion_time": 0.11216431,
        "total_tokens": 48,
        "total_time": 0.12676582,
    }
    expected: Told = {
        ("groq", "queue"): 4_917_860,
        ("groq", "prefill"): 14_601_510,
        ("groq", "decode"): 112_164_310,
        ("groq", "model_total"): 126_765_820,  # without the queue, so no server_total
    }
    assert told(of_body(chat_body(usage=usage))) == expected
    last = chunk(LAST, x_groq={"id": "req_0123456789abcdef", "usage": usage})
    assert told(of_stream(last)) == expected
    # include_usage: the same numbers once more, in the same event and in one of its own
    both = of_stream(chunk(LAST, usage=usage, x_groq={"id": "req_0", "usage": usage}), chunk(usage=usage))
    assert told(both) == expected
    assert {reading.path for reading in both} == {
        f"x_groq.usage.{name}" for name in ("queue_time", "prompt_time", "completion_time", "total_time")
    }
    assert told(of_stream(chunk(LAST), chunk(usage=usage))) == expected


def test_groq_null_queue_and_broken_stream() -> None:
    usage = {"queue_time": None, "prompt_time": 0.0146, "completion_time": 0.1}
    assert ("groq", "queue") not in told(of_body(chat_body(usage=usage)))
    failed = (
        b'{"error": {"message": "Failed to call a function.", "code": "tool_use_failed"}, "x_groq": {"id": "req_0"}}'
    )
    assert of_stream(failed) == []


def test_groq_compound_repeats_itself() -> None:
    inner = {"model": "a", "usage": {"queue_time": 0.1, "total_time": 0.5}}
    models = [inner, {**inner, "model": "b"}, {"usage": None}, None]
    breakdown = {"models": models}
    x_groq = {"id": "req_0", "usage": {"total_time": 0.75}, "usage_breakdown": breakdown}
    (reading,) = of_stream(chunk(LAST, x_groq=x_groq))
    assert (reading.path, reading.duration_ns) == ("x_groq.usage.total_time", 750 * MS)
    (reading,) = of_stream(chunk(LAST, x_groq={"usage_breakdown": breakdown}))
    assert reading.path == "x_groq.usage_breakdown.models[].usage.total_time"
    assert reading.duration_ns == 500 * MS  # not the sum


def test_cerebras() -> None:
    info = {
        "queue_time": 0.04307491,
        "prompt_time": 0.003177936,
        "completion_time": 0.003934382,
        "total_time": 0.051694631576538086,
        "created": 1764196886.043911,
    }
    expected: Told = {
        ("cerebras", "queue"): 43_074_910,
        ("cerebras", "prefill"): 3_177_936,
        ("cerebras", "decode"): 3_934_382,
        ("cerebras", "server_total"): 51_694_632,
    }
    assert told(of_body(chat_body(time_info=info))) == expected
    assert told(of_stream(chunk(LAST), chunk(usage=USAGE, time_info=info))) == expected


def test_sambanova() -> None:
    usage = {
        **USAGE,
        "time_to_first_token": 0.05225324630737305,
        "total_latency": 0.12290094310097868,
        "start_time": 1745918327.936912,
        "end_time": 1745918328.0640328,
        "completion_tokens_after_first_per_sec": 414.06492005209907,
        "is_last_response": True,
    }
    expected: Told = {
        ("sambanova", "ttft"): 52_253_246,
        ("sambanova", "server_total"): 122_900_943,  # not end - start, which is 127 ms
        ("sambanova", "decode_rate"): None,
    }
    assert told(of_body(chat_body(usage=usage))) == expected
    assert told(of_stream(chunk(LAST), chunk(usage=usage))) == expected


def test_fireworks() -> None:
    perf = {
        "prompt-tokens": "12",
        "server-time-to-first-token": "0.11",
        "server-processing-time": "1.25",
        "tokenizer-queue-duration": "0.001",
        "tokenizer-duration": "0.002",
        "prefill-queue-duration": 0.01,
        "prefill-duration": "0.09",
        "generation-queue-duration": "0.003",
        "generation-duration": "1.1",
    }
    readings = of_stream(chunk(LAST, usage=USAGE, perf_metrics=perf))
    assert by_path(readings) == {
        ("perf_metrics.tokenizer-queue-duration", "queue"): 1 * MS,
        ("perf_metrics.prefill-queue-duration", "queue"): 10 * MS,
        ("perf_metrics.generation-queue-duration", "queue"): 3 * MS,
        ("perf_metrics.tokenizer-duration", "server_part"): 2 * MS,
        ("perf_metrics.prefill-duration", "prefill"): 90 * MS,
        ("perf_metrics.generation-duration", "decode"): 1100 * MS,
        ("perf_metrics.server-time-to-first-token", "ttft"): 110 * MS,
        ("perf_metrics.server-processing-time", "server_total"): 1250 * MS,
    }
    assert {reading.maps_to for reading in readings if reading.adds} == {"queue"}
    assert sum(reading.duration_ns or 0 for reading in readings if reading.adds) == 14 * MS
    assert {reading.server for reading in readings} == {"fireworks"}
    assert by_path(of_body(chat_body(perf_metrics=perf))) == by_path(readings)

    headers = {f"fireworks-{name}": str(value) for name, value in perf.items()}
    whole = READERS.read(headers={**JSON, **headers}, streamed=False, body=chat_body())
    assert {(reading.path, reading.maps_to): reading.duration_ns for reading in whole} == {
        (path.replace("perf_metrics.", "fireworks-"), maps_to): value
        for (path, maps_to), value in by_path(readings).items()
    }
    assert {reading.maps_to: reading.window for reading in whole}["ttft"] == "to_first_token"
    # A stream's headers can know one of them.
    assert by_path(of_stream(headers=headers)) == {("fireworks-server-time-to-first-token", "ttft"): 110 * MS}


def test_deepinfra() -> None:
    def body(runtime: Any) -> bytes:
        status = {"status": "succeeded", "runtime_ms": runtime, "cost": 0.0001, "tokens_generated": 10}
        return json.dumps(
            {"request_id": "R0", "results": [{"generated_text": "x"}], "inference_status": status}
        ).encode()

    assert told(of_body(body(228))) == {("deepinfra", "model_total"): 228 * MS}
    assert of_body(body(0)) == []  # the docs' sample, with status "unknown"


def test_openrouter() -> None:
    event = chunk(usage=USAGE, openrouter_metadata={"generation_time": 1311, "provider": "X"})
    assert told(of_stream(event)) == {("openrouter", "gateway"): 1311 * MS}
    assert of_stream(chunk([{"delta": {}, "finish_reason": "error"}], error={"code": 502})) == []
    generation = {
        "id": "gen-0",
        "latency": 1250,
        "generation_time": 1000,
        "moderation_latency": 50,
        "created_at": "2024-07-15T23:33:19.433273+00:00",
    }
    readings = READERS.read_job({"data": generation})
    assert by_path(readings) == {
        ("data.latency", "gateway"): 1250 * MS,
        ("data.generation_time", "gateway"): 1000 * MS,
        ("data.moderation_latency", "server_part"): 50 * MS,
    }
    assert {(reading.location, reading.window) for reading in readings} == {("job", "to_end")}


def test_bedrock() -> None:
    headers = {"x-amzn-requestid": "01234567-89ab-cdef-0123-456789abcdef", "x-amzn-bedrock-invocation-latency": "3304"}
    assert told(READERS.read(headers={**JSON, **headers}, streamed=False)) == {("bedrock", "server_total"): 3304 * MS}
    converse = json.dumps({"metrics": {"latencyMs": 836}, "output": {"message": {}}, "stopReason": "end_turn"}).encode()
    assert told(of_body(converse)) == {("bedrock", "server_total"): 836 * MS}
    usage = {"inputTokens": 1, "outputTokens": 2, "totalTokens": 3}
    events: tuple[dict[str, Any], ...] = (
        {"metadata": {"metrics": {"latencyMs": 1176}, "usage": usage}},
        {"metadata": {"usage": usage, "metrics": {"latencyMs": 1176}}},
        {"usage": usage, "metrics": {"latencyMs": 1176}},
    )
    for event in events:
        assert told(of_stream(json.dumps(event).encode())) == {("bedrock", "server_total"): 1176 * MS}
    metrics = {"inputTokenCount": 8, "outputTokenCount": 12, "invocationLatency": 738, "firstByteLatency": 378}
    stop = {"type": "message_stop", "amazon-bedrock-invocationMetrics": metrics}
    readings = of_stream(json.dumps(stop).encode())
    assert told(readings) == {("bedrock", "server_total"): 738 * MS, ("bedrock", "ttft"): 378 * MS}
    assert {reading.maps_to: reading.window for reading in readings}["ttft"] == "to_first_token"
    assert told(of_body(server_timing="cfReqDur;dur=392.897")) == {("bedrock", "gateway"): 392_897_000}


# --- headers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [True, False])
def test_openai(streamed: bool) -> None:
    headers = {
        "openai-processing-ms": "152",
        "x-envoy-upstream-service-time": "1872",
        "x-request-id": "req_0123456789abcdef",
        "openai-version": "2020-10-01",
        "x-ratelimit-reset-requests": "20m52.666s",
        "cf-ray": "0123456789abcdef-BOS",
    }
    readings = READERS.read(headers=headers, streamed=streamed)
    assert told(readings) == {("openai", "server_total"): 152 * MS, ("openai", "gateway"): 1872 * MS}
    assert {reading.window for reading in readings} == {"to_headers"}  # of a stream: not the model's time
    assert {reading.slack_ns for reading in readings} == {MS}


def test_azure_openai() -> None:
    headers = {
        "apim-request-id": "01234567-89ab-cdef-0123-456789abcdef",
        "x-ms-region": "Sweden Central",
        "x-ratelimit-reset-requests": "500",
        "cmp-upstream-response-duration": "235",
        "ms-azureml-model-time": "315",
    }
    assert told(READERS.read(headers=headers, streamed=False)) == {
        ("azure-openai", "model_total"): 315 * MS,
        ("azure-openai", "gateway"): 235 * MS,
    }
    (reading,) = of_body(openai_processing_ms="29.1074")
    assert (reading.duration_ns, reading.slack_ns, reading.raw) == (29_107_400, 0, "29.1074")


def test_anthropic() -> None:
    headers = {
        "request-id": "req_0123456789abcdef",
        "anthropic-ratelimit-requests-reset": "2025-06-23T10:26:53Z",
        "server-timing": "x-originResponse;dur=833",
        "x-envoy-upstream-service-time": "388",
    }
    readings = READERS.read(headers=headers, streamed=True)
    assert by_path(readings) == {
        ("server-timing[x-originResponse].dur", "gateway"): 833 * MS,
        ("x-envoy-upstream-service-time", "gateway"): 388 * MS,
    }
    assert {reading.server for reading in readings} == {"anthropic"}
    assert told(of_body(server_timing="proxy;dur=5018")) == {("server-timing", "gateway"): 5018 * MS}
    assert of_body(server_timing="x-originresponse;dur=53") == []  # names are case-sensitive


def test_mistral_kong_in_front_of_envoy() -> None:
    headers = {
        "mistral-correlation-id": "01234567-89ab-cdef-0123-456789abcdef",
        "x-kong-request-id": "01234567-89ab-cdef-0123-456789abcdef",
        "x-envoy-upstream-service-time": "695",
        "x-kong-upstream-latency": "696",
        "x-kong-proxy-latency": "8",
        "x-ratelimit-remaining-req-10-second": "53",
    }
    readings = READERS.read(headers=headers, streamed=True)
    assert by_path(readings) == {
        ("x-envoy-upstream-service-time", "gateway"): 695 * MS,
        ("x-kong-upstream-latency", "gateway"): 696 * MS,
        ("x-kong-proxy-latency", "server_part"): 8 * MS,
    }
    assert {reading.server for reading in readings} == {"mistral"}


def test_cohere() -> None:
    headers = {"x-debug-trace-id": "0123456789abcdef0123456789abcdef", "x-envoy-upstream-service-time": "3858"}
    assert told(READERS.read(headers=headers, streamed=False)) == {("cohere", "gateway"): 3858 * MS}


@pytest.mark.parametrize(("streamed", "milliseconds"), [(False, 11009), (True, 477)])
def test_gemini(streamed: bool, milliseconds: int) -> None:
    headers = {"server": "scaffolding on HTTPServer2", "server-timing": f"gfet4t7; dur={milliseconds}"}
    (reading,) = READERS.read(headers=headers, streamed=streamed)
    assert reading == Reading(
        "gemini", "gateway", milliseconds * MS, milliseconds, "server-timing[gfet4t7].dur", "header", "to_headers", MS
    )


def test_google_over_grpc() -> None:
    readings = READERS.read_metadata({"server-timing": "gfet4t7; dur=55, afe; dur=23", "date": "Mon"}, {})
    assert by_path(readings) == {
        ("server-timing[gfet4t7].dur", "gateway"): 55 * MS,
        ("server-timing[afe].dur", "gateway"): 23 * MS,
    }
    assert {(reading.server, reading.location) for reading in readings} == {("google-grpc", "initial_metadata")}


def test_watsonx_tells_an_id_in_server_timing_which_is_no_time() -> None:
    headers = {"server-timing": "intid;desc=0123456789abcdef", "x-proxy-upstream-service-time": "1188"}
    assert told(READERS.read(headers=headers, streamed=False)) == {("watsonx", "gateway"): 1188 * MS}


def test_pinecone() -> None:
    headers = {"x-pinecone-request-latency-ms": "1738", "x-envoy-upstream-service-time": "1733"}
    readings = READERS.read(headers=headers, streamed=False)
    assert by_path(readings) == {
        ("x-pinecone-request-latency-ms", "gateway"): 1738 * MS,
        ("x-envoy-upstream-service-time", "gateway"): 1733 * MS,
    }
    assert {reading.server for reading in readings} == {"pinecone"}


def test_litellm_proxy() -> None:
    headers = {
        "x-litellm-call-id": "01234567-89ab-cdef-0123-456789abcdef",
        "x-litellm-response-duration-ms": "842.3",
        "x-litellm-overhead-duration-ms": "15.1",
        "x-litellm-callback-duration-ms": "0.4",
        "x-litellm-timing-pre-processing-ms": "3.1",
        "x-litellm-timing-llm-api-ms": "827.2",
        "x-litellm-timing-post-processing-ms": "1.5",
        "x-litellm-timing-message-copy-ms": "0.0",
        "llm_provider-openai-processing-ms": "256",
    }
    readings = READERS.read(headers=headers, streamed=True)
    whole = {"x-litellm-response-duration-ms", "x-litellm-timing-llm-api-ms"}
    expected = {  # the others are what the proxy took for itself: the upstream's time is not in them
        (name, "gateway" if name in whole else "server_part"): round(float(value) * MS)
        for name, value in headers.items()
        if name.startswith("x-litellm") and name.endswith("-ms")
    }
    assert by_path(readings) == {**expected, ("llm_provider-openai-processing-ms", "server_total"): 256 * MS}
    assert {reading.server for reading in readings} == {"litellm-proxy", "openai"}
    assert len(expected) == 7


def test_litellm_proxy_negative_and_none() -> None:
    headers = {"x-litellm-overhead-duration-ms": "-3.2", "x-litellm-response-duration-ms": "None"}
    assert READERS.read(headers=headers, streamed=False) == []


def test_envoy_and_istio() -> None:
    for headers in ({"server": "envoy"}, {"server": "istio-envoy"}):
        found = told(READERS.read(headers={**headers, "x-envoy-upstream-service-time": "16"}, streamed=True))
        assert found == {("envoy", "gateway"): 16 * MS}


def test_kong() -> None:
    headers = {"via": "1.1 kong/3.9", "x-kong-upstream-latency": "696", "x-kong-proxy-latency": "8"}
    assert by_path(READERS.read(headers=headers, streamed=True)) == {
        ("x-kong-upstream-latency", "gateway"): 696 * MS,
        ("x-kong-proxy-latency", "server_part"): 8 * MS,
    }
    assert told(of_body(x_kong_response_latency="2")) == {("kong", "gateway"): 2 * MS}


def test_cloudflare() -> None:
    value = 'cfEdge;dur=9, cfOrigin;dur=0, cfWorker;dur=1.5, cfL4;desc="?proto=TCP&rtt=5570&min_rtt=5317&rtt_var=2175"'
    readings = READERS.read(headers={"cf-ray": "0123456789abcdef-BOS", "server-timing": value}, streamed=False)
    assert by_path(readings) == {
        ("server-timing[cfEdge].dur", "server_part"): 9 * MS,
        ("server-timing[cfOrigin].dur", "gateway"): 0,  # the origin was not asked
        ("server-timing[cfWorker].dur", "gateway"): 1_500_000,
        ("server-timing[cfL4].desc[min_rtt]", "network"): 5_317_000,
    }
    assert {reading.server for reading in readings} == {"cloudflare"}
    assert readings[-1].raw == "5317"  # not the description, in which ids stand


def test_huawei() -> None:
    assert by_path(of_body(x_apig_latency="20", x_apig_upstream_latency="18")) == {
        ("x-apig-latency", "gateway"): 20 * MS,
        ("x-apig-upstream-latency", "gateway"): 18 * MS,
    }


@pytest.mark.parametrize(
    "headers",
    [
        {"x-baseten-request-id": "0", "x-baseten-received-at": "1"},
        {"nvcf-reqid": "0", "nvcf-status": "fulfilled"},
        {"modal-function-call-id": "fc-0123456789abcdef"},
        {"x-fal-request-id": "0"},
        {"endpoint-load-metrics": "TEXT named_metrics.kv_cache_usage_perc=0.4"},
        {"x-ratelimit-reset-requests": "12ms", "retry-after": "30", "retry-after-ms": "500"},
        {"x-vertex-ai-llm-request-type": "shared"},
        {"server-timing": 'cache;desc="hit-front", host;desc="cp1"'},
        {"inference-id": "chatcmpl-0123456789abcdef", "x-request-id": "0"},
    ],
)
def test_headers_that_tell_no_time(headers: dict[str, str]) -> None:
    assert READERS.read(headers=headers, streamed=False) == []
    assert READERS.read(headers=headers, streamed=True) == []


@pytest.mark.parametrize("metadata", [{"createTime": "2025-01-01T00:00:00.123456Z", "responseId": "0"}])
def test_vertex_tells_none(metadata: dict[str, str]) -> None:
    assert of_body(json.dumps({"candidates": [], **metadata}).encode()) == []


# --- server-timing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "maps_to"),
    [
        ("queue", "queue"),
        ("wait", "queue"),
        ("prefill", "prefill"),
        ("prompt", "prefill"),
        ("decode", "decode"),
        ("gen", "decode"),
        ("model", "model_total"),
        ("inference", "model_total"),
        ("compute", "model_total"),
        ("total", "server_total"),
        ("app", "server_total"),
        ("gfet4t7", "gateway"),
        ("afe", "gateway"),
        ("x-originResponse", "gateway"),
        ("proxy", "gateway"),
        ("cfReqDur", "gateway"),
        ("cfEdge", "server_part"),
        ("cfOrigin", "gateway"),
        ("cfWorker", "gateway"),
    ],
)
def test_names_of_metrics(name: str, maps_to: str) -> None:
    value = {"server-timing": f"{name};dur=12.5"}
    (header,) = READERS.read(headers=value, streamed=False)
    (trailer,) = READERS.read(headers={}, streamed=False, trailers=value)
    (trailing,) = READERS.read_metadata({}, value)
    assert {reading.maps_to for reading in (header, trailer, trailing)} == {maps_to}
    assert {reading.duration_ns for reading in (header, trailer, trailing)} == {12_500_000}
    assert (header.location, header.window) == ("header", "to_headers")
    assert (trailer.location, trailer.window) == ("trailer", "to_end")
    assert trailing == trailer
    assert (name, maps_to) in {(known, maps) for known, maps, _ in SERVER_TIMING_NAMES}


def test_w3c_example() -> None:
    readings = READERS.read(headers={"server-timing": "miss, db;dur=53, app;dur=47.2"}, streamed=False)
    assert told(readings) == {("server-timing", "server_total"): 47_200_000}


# --- jobs -----------------------------------------------------------------------------------------------------------


def test_runpod() -> None:
    job = {"id": "0-u1", "status": "COMPLETED", "delayTime": 31618, "executionTime": 1437, "output": {"x": 1}}
    readings = READERS.read_job(job)
    assert told(readings) == {("runpod", "queue"): 31618 * MS, ("runpod", "model_total"): 1437 * MS}
    assert {(reading.location, reading.window, reading.slack_ns) for reading in readings} == {("job", "job", MS)}
    assert READERS.read_job({"id": "0", "status": "IN_QUEUE"}) == []


def test_replicate() -> None:
    job = {
        "id": "0",
        "status": "succeeded",
        "created_at": "2024-02-12T16:44:47.04927Z",
        "started_at": "2024-02-12T16:44:47.295853Z",
        "completed_at": "2024-02-12T16:44:50.107216Z",
        "metrics": {"predict_time": 2.811363},
        "output": "Hello",
    }
    readings = READERS.read_job(job)
    assert told(readings) == {("replicate", "queue"): 246_583_000, ("replicate", "model_total"): 2_811_363_000}
    assert readings[0].path == "started_at - created_at"
    assert readings[0].raw == "2024-02-12T16:44:47.295853Z - 2024-02-12T16:44:47.04927Z"
    assert READERS.read_job({**job, "started_at": None, "metrics": {}}) == []


def test_fal() -> None:
    done = {"status": "COMPLETED", "request_id": "0", "metrics": {"inference_time": 2.1722686290740967}}
    assert told(READERS.read_job(done)) == {("fal", "model_total"): 2_172_268_629}
    assert READERS.read_job({"status": "IN_QUEUE", "queue_position": 0, "metrics": {}}) == []


def test_openai_batch() -> None:
    batch = {"id": "batch_0", "status": "completed", "created_at": 1714508499, "in_progress_at": 1714508562,
             "completed_at": 1714508700, "failed_at": None}  # fmt: skip
    (reading,) = READERS.read_job(batch)
    assert reading == Reading(
        "openai", "queue", 63 * S, "1714508562 - 1714508499", "in_progress_at - created_at", "job", "job", S
    )
    background = {"id": "resp_0", "status": "completed", "created_at": 1714508499, "completed_at": 1714508700}
    assert READERS.read_job(background) == []


# --- the tables themselves ------------------------------------------------------------------------------------------


def test_no_value_of_ours_has_two_meanings() -> None:
    """Rows at one path are the same row, or belong to different kinds of answers."""
    by_place: dict[tuple[str, str], list[Any]] = {}
    for reader in BUILT_IN:
        for row in reader.rows:
            by_place.setdefault((row.location, row.path), []).append(row)
    for place, rows in by_place.items():
        different = set(rows)
        kinds = [row.streamed for row in different]
        assert len(different) == 1 or (None not in kinds and len(set(kinds)) == len(kinds)), place


def test_every_server_has_one_table() -> None:
    names = [reader.server for reader in BUILT_IN]
    assert len(names) == len(set(names))
    assert all(reader.rows for reader in BUILT_IN)
