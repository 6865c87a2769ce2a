"""What servers say of their own time: data. Each row is documented by its vendor, seen in a recorded answer, or read in the
server's source. Servers are told apart by their keys, so a row that several share stands in each of their tables, word for
word, and the most general table comes last.

Left out: cumulative counters (Triton), spans that the server exports itself, stamps without a sibling, rate limits, load
hints, what nobody has seen on the wire (NVIDIA NIM's and Baseten's own headers; NIM in front of vLLM is read as vLLM), and
keys that grpcio hides (``grpc-server-stats-bin``).
"""

from __future__ import annotations

from .reading import Location, MapsTo, TimingReader, TimingRow, Window

__all__ = ["BUILT_IN", "SERVER_TIMING_NAMES"]


def _json(
    path: str, unit: str, maps_to: MapsTo, window: Window = "to_end", **more: str | bool
) -> tuple[TimingRow, ...]:
    """The same path in the JSON of an answer and of the last events of a stream."""
    return _body(path, unit, maps_to, window, **more) + _event(path, unit, maps_to, window, **more)


def _body(
    path: str, unit: str, maps_to: MapsTo, window: Window = "to_end", **more: str | bool
) -> tuple[TimingRow, ...]:
    return (TimingRow("body", path, unit, maps_to, window, "json_path", **more),)  # type: ignore[arg-type]


def _event(
    path: str, unit: str, maps_to: MapsTo, window: Window = "to_end", **more: str | bool
) -> tuple[TimingRow, ...]:
    return (TimingRow("event", path, unit, maps_to, window, "json_path", **more),)  # type: ignore[arg-type]


def _job(path: str, unit: str, maps_to: MapsTo, window: Window = "job", since: str | None = None) -> TimingRow:
    return TimingRow("job", path, unit, maps_to, window, "json_path", since=since)


def _header(
    path: str, unit: str, maps_to: MapsTo, window: Window = "to_headers", **more: str | bool | None
) -> TimingRow:
    return TimingRow("header", path, unit, maps_to, window, "header", **more)  # type: ignore[arg-type]


def _rate(path: str) -> TimingRow:
    return TimingRow("header", path, "ms_per_token", "decode_rate", "none", "header", streamed=False)


def _mark(path: str) -> TimingRow:
    """A header that is no time and tells which server this is."""
    return TimingRow("header", path, "none", "none", "none", "header")


# ------------------------------------------------------------------------------------------------------ server-timing

#: Names of metrics in ``Server-Timing``, with what they map to and whose they are. Case-sensitive. ``server-timing`` is
#: nobody's in particular. Of several that map to the same part of a call the first of this table counts.
SERVER_TIMING_NAMES: tuple[tuple[str, MapsTo, str], ...] = (
    ("queue", "queue", "server-timing"),  # origin: spanwire's own convention; no server was found that sends it
    ("wait", "queue", "server-timing"),  # origin: spanwire
    ("prefill", "prefill", "server-timing"),  # origin: spanwire
    ("prompt", "prefill", "server-timing"),  # origin: spanwire
    ("decode", "decode", "server-timing"),  # origin: spanwire
    ("gen", "decode", "server-timing"),  # origin: spanwire
    ("model", "model_total", "server-timing"),  # origin: spanwire
    ("inference", "model_total", "server-timing"),  # origin: spanwire
    ("compute", "model_total", "server-timing"),  # origin: spanwire
    ("total", "server_total", "server-timing"),  # origin: the examples of W3C's specification
    ("app", "server_total", "server-timing"),  # origin: the same
    ("gfet4t7", "gateway", "google"),  # origin: Google's front end: everything behind it, the model included
    ("afe", "gateway", "google"),  # origin: Google's API front end
    ("x-originResponse", "gateway", "anthropic"),  # origin: Anthropic, edge to origin
    ("proxy", "gateway", "server-timing"),  # origin: Anthropic, once; too common a word to name anybody
    ("cfReqDur", "gateway", "bedrock"),  # origin: seen on Bedrock
    ("cfEdge", "server_part", "cloudflare"),  # origin: Cloudflare, its own time: the origin's is not in it
    ("cfOrigin", "gateway", "cloudflare"),  # origin: Cloudflare; 0: the origin was not asked
    ("cfWorker", "gateway", "cloudflare"),  # origin: Cloudflare
    # Without a duration, so without a row: intid (watsonx, an id), cache and host (Wikimedia, words).
)

#: A front end's metrics have the name of its best-known service in HTTP headers, and of the protocol in metadata.
_NAMED = {
    "header": {"google": "gemini"},
    "initial_metadata": {"google": "google-grpc"},
    "trailer": {"google": "google-grpc"},
}
_WINDOWS: tuple[tuple[Location, Window], ...] = (
    ("header", "to_headers"),
    ("initial_metadata", "to_headers"),
    ("trailer", "to_end"),
)


def _metrics(server: str) -> tuple[TimingRow, ...]:
    """The rows of all metrics of one server, in each place where it stands under that name."""
    return tuple(
        TimingRow(location, f"server-timing[{name}].dur", "ms", maps_to, window, "server_timing")
        for location, window in _WINDOWS
        for name, maps_to, owner in SERVER_TIMING_NAMES
        if _NAMED[location].get(owner, owner) == server
    )


# ---------------------------------------------------------------------------------------------- headers that are shared

_ENVOY = _header("x-envoy-upstream-service-time", "ms", "gateway")
#: What a hop took for itself is a part of the way to the model, and bounds nothing: all the rest would be network.
_KONG = (_header("x-kong-upstream-latency", "ms", "gateway"), _header("x-kong-proxy-latency", "ms", "server_part"))
#: Text Generation Inference and what descends from it. Whole milliseconds, cut off: 0 is less than 1. Never on streams.
_TGI = (
    _header("x-queue-time", "ms", "queue", streamed=False),
    _header("x-inference-time", "ms", "model_total", streamed=False),
    _header("x-total-time", "ms", "server_total", streamed=False),
    # TGI sends it in seconds with a fraction, TEI and Together in whole milliseconds, and nothing but the fraction tells
    # them apart. All three send x-total-time too, which says the same.
    _header("x-compute-time", "fractional_s", "server_total", streamed=False, unless="x-total-time"),
)


BUILT_IN: tuple[TimingReader, ...] = (
    # --- blocks in the answer ---------------------------------------------------------------------------------------
    TimingReader(
        "vllm",  # --enable-per-request-metrics; NVIDIA NIM and others that run vLLM
        (
            *_json("metrics.queue_time_ms", "ms", "queue"),
            *_json("metrics.time_to_first_token_ms", "ms", "prefill"),  # from scheduled on: without the queue
            *_json("metrics.generation_time_ms", "ms", "decode"),
            *_json("metrics.mean_itl_ms", "ms_per_token", "decode_rate", "none"),
        ),
    ),
    TimingReader(
        "sglang",  # /generate; with --enable-metrics but for e2e_latency
        (
            *_json("meta_info.queue_time", "s", "queue"),
            *_json(
                "meta_info.prefill_finished_time", "unix_s", "prefill", "to_end", since="meta_info.forward_entry_time"
            ),
            *_json("meta_info.e2e_latency", "s", "server_total"),
            *_json("meta_info.first_token_latency", "s", "ttft", "to_first_token"),
            *_json("meta_info.decode_throughput", "tokens_per_s", "decode_rate", "none"),
        ),
    ),
    TimingReader(
        "llama.cpp",
        (
            *_json("timings.prompt_ms", "ms", "prefill"),
            *_json("timings.predicted_ms", "ms", "decode"),
            *_event("prompt_progress.time_ms", "ms", "prefill", "to_first_token"),  # return_progress, before the answer
        ),
    ),
    TimingReader(
        "ollama",  # /api/*; zeros are left out by the server
        (
            *_json("load_duration", "ns", "queue"),  # loading the model, and waiting for memory or a runner
            *_json("prompt_eval_duration", "ns", "prefill"),
            *_json("eval_duration", "ns", "decode"),
            *_json("total_duration", "ns", "server_total"),
        ),
    ),
    TimingReader(
        "nvidia-dynamo",  # nvext.extra_fields: ["timing"]. request_received_ms is a stamp, whatever its name says
        (
            *_json("nvext.timing.prefill_wait_time_ms", "ms", "queue"),
            *_json("nvext.timing.prefill_time_ms", "ms", "prefill"),
            *_json("nvext.timing.ttft_ms", "ms", "ttft", "to_first_token"),
            *_json("nvext.timing.total_time_ms", "ms", "server_total"),
        ),
    ),
    TimingReader(
        "groq",  # total_time is prompt and completion, without the queue
        (
            *_event("x_groq.usage.queue_time", "s", "queue"),
            *_event("x_groq.usage.prompt_time", "s", "prefill"),
            *_event("x_groq.usage.completion_time", "s", "decode"),
            *_event("x_groq.usage.total_time", "s", "model_total"),
            # The same once more where include_usage was asked for, and of answers that are no stream.
            *_json("usage.queue_time", "s", "queue"),
            *_json("usage.prompt_time", "s", "prefill"),
            *_json("usage.completion_time", "s", "decode"),
            *_json("usage.total_time", "s", "model_total"),
            # groq/compound repeats the same numbers for each inner model: the first counts, nothing is summed.
            *_event("x_groq.usage_breakdown.models[].usage.total_time", "s", "model_total"),
        ),
    ),
    TimingReader(
        "cerebras",  # total_time has the queue in it, and some milliseconds that no field explains
        (
            *_json("time_info.queue_time", "s", "queue"),
            *_json("time_info.prompt_time", "s", "prefill"),
            *_json("time_info.completion_time", "s", "decode"),
            *_json("time_info.total_time", "s", "server_total"),
        ),
    ),
    TimingReader(
        "sambanova",
        (
            *_json("usage.time_to_first_token", "s", "ttft", "to_first_token"),
            *_json("usage.total_latency", "s", "server_total"),
            *_json("usage.completion_tokens_after_first_per_sec", "tokens_per_s", "decode_rate", "none"),
        ),
    ),
    TimingReader(
        "fireworks",  # perf_metrics_in_response; numbers may be text. The three queues sum up
        (
            *_json("perf_metrics.tokenizer-queue-duration", "s", "queue", adds=True),
            *_json("perf_metrics.prefill-queue-duration", "s", "queue", adds=True),
            *_json("perf_metrics.generation-queue-duration", "s", "queue", adds=True),
            *_json("perf_metrics.tokenizer-duration", "s", "server_part"),
            *_json("perf_metrics.prefill-duration", "s", "prefill"),
            *_json("perf_metrics.generation-duration", "s", "decode"),
            *_json("perf_metrics.server-time-to-first-token", "s", "ttft", "to_first_token"),
            *_json("perf_metrics.server-processing-time", "s", "server_total"),
            _header("fireworks-tokenizer-queue-duration", "s", "queue", streamed=False, adds=True),
            _header("fireworks-prefill-queue-duration", "s", "queue", streamed=False, adds=True),
            _header("fireworks-generation-queue-duration", "s", "queue", streamed=False, adds=True),
            _header("fireworks-tokenizer-duration", "s", "server_part", streamed=False),
            _header("fireworks-prefill-duration", "s", "prefill", streamed=False),
            _header("fireworks-generation-duration", "s", "decode", streamed=False),
            _header("fireworks-server-time-to-first-token", "s", "ttft", "to_first_token"),  # on streams too
            _header("fireworks-server-processing-time", "s", "server_total", streamed=False),
        ),
    ),
    TimingReader("deepinfra", _body("inference_status.runtime_ms", "ms", "model_total")),  # /v1/inference; 0: unknown
    TimingReader(
        "openrouter",  # with the network to the provider in it
        (
            *_json("openrouter_metadata.generation_time", "ms", "gateway"),  # request header X-OpenRouter-Metadata
            # GET /generation?id=..., a second call
            _job("data.latency", "ms", "gateway", "to_end"),
            _job("data.generation_time", "ms", "gateway", "to_end"),
            _job("data.moderation_latency", "ms", "server_part", "to_end"),
        ),
    ),
    TimingReader(
        "bedrock",
        (
            *_json(
                "metrics.latencyMs", "ms", "server_total"
            ),  # Converse; the payload of ConverseStream's metadata event
            *_event("metadata.metrics.latencyMs", "ms", "server_total"),  # the same event as the SDKs wrap it
            *_event("amazon-bedrock-invocationMetrics.invocationLatency", "ms", "server_total"),
            *_event("amazon-bedrock-invocationMetrics.firstByteLatency", "ms", "ttft", "to_first_token"),
            _header("x-amzn-bedrock-invocation-latency", "ms", "server_total", streamed=False),
            *_metrics("bedrock"),
        ),
    ),
    # --- jobs -------------------------------------------------------------------------------------------------------
    TimingReader(
        "runpod",
        (
            _job("delayTime", "ms", "queue"),  # with the cold start of a worker
            _job("executionTime", "ms", "model_total"),
        ),
    ),
    TimingReader(
        "replicate",
        (
            _job("started_at", "rfc3339", "queue", since="created_at"),  # with the boot
            _job("metrics.predict_time", "s", "model_total"),
        ),
    ),
    TimingReader("fal", (_job("metrics.inference_time", "s", "model_total"),)),
    # --- headers of one server --------------------------------------------------------------------------------------
    TimingReader(
        "openai",  # to the headers: of a stream not the model's time
        (
            _header("openai-processing-ms", "ms", "server_total"),  # Azure once wrote it with a fraction
            _ENVOY,
            _job("in_progress_at", "unix_s", "queue", since="created_at"),  # Batch; whole seconds
        ),
    ),
    TimingReader(
        "azure-openai",  # what they mean is not documented, and they do not nest: 315 in 235
        (
            _header("ms-azureml-model-time", "ms", "model_total", streamed=False),
            _header("cmp-upstream-response-duration", "ms", "gateway"),
        ),
    ),
    TimingReader(
        "anthropic", (*_metrics("anthropic"), _mark("anthropic-ratelimit-requests-reset"), _ENVOY)
    ),  # nothing official
    TimingReader("gemini", _metrics("gemini")),
    TimingReader("google-grpc", _metrics("google-grpc")),
    TimingReader("mistral", (_mark("mistral-correlation-id"), _ENVOY, *_KONG)),  # Kong in front of Envoy: nested
    TimingReader("cohere", (_mark("x-debug-trace-id"), _ENVOY)),
    TimingReader("watsonx", (_header("x-proxy-upstream-service-time", "ms", "gateway"),)),
    TimingReader("pinecone", (_header("x-pinecone-request-latency-ms", "ms", "gateway"), _ENVOY)),
    TimingReader(
        "litellm-proxy",  # the overhead can be negative, which is no reading
        (
            _header("x-litellm-response-duration-ms", "ms", "gateway"),
            _header("x-litellm-overhead-duration-ms", "ms", "server_part"),
            _header("x-litellm-callback-duration-ms", "ms", "server_part"),
            _header("x-litellm-timing-pre-processing-ms", "ms", "server_part"),
            _header("x-litellm-timing-llm-api-ms", "ms", "gateway"),
            _header("x-litellm-timing-post-processing-ms", "ms", "server_part"),
            _header("x-litellm-timing-message-copy-ms", "ms", "server_part"),
        ),
    ),
    TimingReader(
        "huawei-apig",  # request header X-Apig-Mode: debug; milliseconds are assumed
        (_header("x-apig-latency", "ms", "gateway"), _header("x-apig-upstream-latency", "ms", "gateway")),
    ),
    TimingReader(
        "cloudflare",
        (
            *_metrics("cloudflare"),
            # The edge's round trip to us, in microseconds (inferred), inside a description.
            TimingRow("header", "server-timing[cfL4].desc[min_rtt]", "us", "network", "none", "server_timing"),
        ),
    ),
    # --- the family of TGI ------------------------------------------------------------------------------------------
    TimingReader("tei", (_header("x-tokenization-time", "ms", "server_part", streamed=False), *_TGI)),
    TimingReader(
        "together",
        (
            # Two stamps of one gateway, with its network to the model in between.
            _header("x-api-call-end", "rfc3339", "gateway", since="x-api-call-start"),
            _mark("x-api-received"),
            *_TGI,
            _rate("x-time-per-token"),
        ),
    ),
    TimingReader(
        "tgi",
        (
            _header("x-validation-time", "ms", "server_part", streamed=False),
            *_TGI,
            _rate("x-time-per-token"),
            _mark("x-compute-type"),  # all that a stream has
        ),
    ),
    # --- gateways ---------------------------------------------------------------------------------------------------
    TimingReader("kong", (*_KONG, _header("x-kong-response-latency", "ms", "gateway"))),  # when Kong answers by itself
    TimingReader("istio", (_ENVOY,)),  # every sidecar overwrites it: the outermost hop's is left
    TimingReader("envoy", (_ENVOY,)),  # request received to upstream's headers, retries included
    TimingReader("server-timing", _metrics("server-timing")),
)
