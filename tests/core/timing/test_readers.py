"""The rules for reading, whoever the server is, and that nothing a server sends makes a reader fail."""

from __future__ import annotations

import json
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from spanwire.errors import ConfigurationError
from spanwire.timing import Readers, Reading, TimingReader, TimingRow
from spanwire.timing.tables import BUILT_IN

READERS = Readers()
MS = 1_000_000


def header_row(path: str = "x-wait", unit: str = "ms", maps_to: Any = "queue", **more: Any) -> TimingRow:
    window = more.pop("window", "to_headers")
    return TimingRow("header", path, unit, maps_to, window, "header", **more)


def json_row(path: str, unit: str = "ms", maps_to: Any = "queue", location: Any = "body", **more: Any) -> TimingRow:
    window = more.pop("window", "to_end")
    return TimingRow(location, path, unit, maps_to, window, "json_path", **more)


def mine(*rows: TimingRow, server: str = "mine") -> Readers:
    return Readers([TimingReader(server, rows)])


def read(readers: Readers = READERS, **given: Any) -> list[tuple[str, str, int | None]]:
    readings = readers.read(**{"headers": {}, "streamed": False, **given})
    return [(reading.server, reading.maps_to, reading.duration_ns) for reading in readings]


# --- headers --------------------------------------------------------------------------------------------------------


def test_a_header_of_a_stream_is_never_the_models_time_even_when_it_is_alone() -> None:
    for name in ("prefill", "prompt", "decode", "gen", "model", "inference", "compute"):
        headers = {"server-timing": f"{name};dur=5"}
        assert len(read(headers=headers)) == 1
        assert read(headers=headers, streamed=True) == []
        assert READERS.read_metadata(headers, {}) == []
    assert read(headers={"x-inference-time": "2484", "x-queue-time": "3"}, streamed=True) == []
    assert read(headers={"ms-azureml-model-time": "315"}, streamed=True) == []
    readers = mine(header_row(maps_to="decode"))
    assert read(readers, headers={"x-wait": "1"}, streamed=True) == []
    # Unless the author of the row says that he knows.
    readers = mine(header_row(maps_to="prefill", streamed=True))
    assert read(readers, headers={"x-wait": "1"}, streamed=True) == [("mine", "prefill", MS)]
    assert read(readers, headers={"x-wait": "1"}) == []


@pytest.mark.parametrize(
    "value", ["", " ", "None", "null", "-1", "nan", "inf", "1,2", "12ms", "true", "695, 700", "9" * 30]
)
def test_a_header_that_is_no_time(value: str) -> None:
    for name in ("openai-processing-ms", "x-envoy-upstream-service-time", "fireworks-prefill-duration"):
        assert read(headers={name: value}) == []


def test_every_header_is_looked_up_behind_litellms_prefix_too() -> None:
    def passed_on(headers: dict[str, str]) -> list[tuple[str, str, int | None]]:
        return read(headers={f"llm_provider-{name}": value for name, value in headers.items()})

    headers = {"x-queue-time": "22", "x-inference-time": "6214", "x-total-time": "6237", "x-compute-time": "6237.5"}
    stamps = {"x-api-call-start": "2024-06-06T18:17:41.736Z", "x-api-call-end": "2024-06-06T18:17:42.258Z"}
    assert passed_on({**headers, **stamps}) == read(headers={**headers, **stamps})
    assert {server for server, _, _ in passed_on({**headers, **stamps})} == {"together"}
    assert passed_on({"server-timing": "gfet4t7; dur=477"}) == [("gemini", "gateway", 477 * MS)]
    names = {
        row.path
        for reader in BUILT_IN
        for row in reader.rows
        if row.reader == "header" and row.unit in {"ms", "s"} and row.streamed is None
    }
    assert len(names) > 15
    for name in names:
        (reading,) = READERS.read(headers={f"llm_provider-{name}": "3"}, streamed=True)
        assert reading.path == f"llm_provider-{name}"


def test_the_same_total_with_and_without_the_prefix_counts_once() -> None:
    headers = {"llm_provider-openai-processing-ms": "256", "openai-processing-ms": "300"}
    assert read(headers=headers, streamed=True) == [("openai", "server_total", 300 * MS)]


def test_gateways_nest_and_all_are_kept() -> None:
    headers = {
        "x-kong-upstream-latency": "696",
        "x-envoy-upstream-service-time": "695",
        "server-timing": "cfOrigin;dur=700, cfOrigin;dur=710, gfet4t7;dur=690",
        "llm_provider-x-envoy-upstream-service-time": "600",
    }
    found = read(headers=headers, streamed=True)
    assert sorted(duration or 0 for _, _, duration in found) == [n * MS for n in (600, 690, 695, 696, 700, 710)]


@pytest.mark.parametrize(
    "headers",
    [
        {"server-timing": "cfEdge;dur=9"},
        {"server-timing": "cfEdge;dur=9, cfOrigin;dur=0"},  # a worker answered: the origin was not asked
        {"x-kong-proxy-latency": "1"},
        {"x-litellm-overhead-duration-ms": "15.1"},
        {"x-litellm-timing-pre-processing-ms": "3.1", "x-litellm-callback-duration-ms": "0.4"},
    ],
)
@pytest.mark.parametrize("streamed", [True, False])
def test_what_a_gateway_took_for_itself_bounds_nothing(headers: dict[str, str], streamed: bool) -> None:
    """Else all the rest, the model's time, would be the network's."""
    readings = READERS.read(headers=headers, streamed=streamed)
    chosen = READERS.choose(readings, streamed=streamed)
    assert chosen is not None
    assert chosen.outer_ns is None
    assert len(chosen.raw) == len(readings) > 0


def test_lines_of_a_repeated_server_timing_are_all_read() -> None:
    assert read(headers={"server-timing": "cache;desc=hit, queue;dur=3, model;dur=12.5"}) == [
        ("server-timing", "queue", 3 * MS),
        ("server-timing", "model_total", 12_500_000),
    ]


def test_two_names_for_one_thing_count_once() -> None:
    assert read(headers={"server-timing": "wait;dur=2, queue;dur=1, app;dur=47.2, total;dur=60, queue;dur=9"}) == [
        ("server-timing", "queue", MS),
        ("server-timing", "server_total", 60 * MS),
    ]


def test_a_key_of_its_own_decides_who_the_server_is() -> None:
    shared = {"x-queue-time": "1", "x-total-time": "5"}
    for more, server in (
        ({}, "tgi"),
        ({"x-validation-time": "0"}, "tgi"),
        ({"x-compute-type": "1-a10g"}, "tgi"),
        ({"x-tokenization-time": "1"}, "tei"),
        ({"x-api-call-start": "2024-06-06T18:17:41.736Z"}, "together"),
        ({"x-api-received": "2024-06-06T18:17:41.736Z", "x-validation-time": "0"}, "together"),
    ):
        found = read(headers={**shared, **more})
        assert (server, "queue", MS) in found
        assert (server, "server_total", 5 * MS) in found
    for marker, server in (
        ("openai-processing-ms", "openai"),
        ("mistral-correlation-id", "mistral"),
        ("x-debug-trace-id", "cohere"),
        ("x-request-id", "envoy"),
    ):
        found = read(headers={"x-envoy-upstream-service-time": "7", marker: "7"})
        assert (server, "gateway", 7 * MS) in found


def test_stamps_that_go_backwards_are_no_reading() -> None:
    stamps = {"x-api-call-end": "2024-06-06T18:17:41.736Z", "x-api-call-start": "2024-06-06T18:17:42.258Z"}
    assert read(headers=stamps) == []
    assert read(headers={"x-api-call-end": "2024-06-06T18:17:41.736Z"}) == []
    assert READERS.read_job({"in_progress_at": 5, "created_at": 6}) == []


def test_what_an_answer_can_cost_is_bounded() -> None:
    headers = {"server-timing": ", ".join(f"cfOrigin;dur={number}" for number in range(2000))}
    assert len(read(headers=headers)) == 64


# --- JSON -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        b"", b" ", b"{", b"[DONE]", b"null", b"true", b"7", b'"x"', b"[]", b"[{}]", b"\xff\xfe", b'{"metrics": {"queue_time_ms": 1}',
        b'{"metrics": [1]}', b'{"metrics": {"queue_time_ms": [4]}}', b'{"metrics": {"queue_time_ms": {"a": 1}}}',
        b'{"metrics": {"queue_time_ms": true}}', b'{"metrics": {"queue_time_ms": -4}}', b'{"usage": 7, "x_groq": "y"}',
        b'{"x_groq": {"usage_breakdown": {"models": {"usage": {}}}}}', b'{"x_groq": {"usage_breakdown": {"models": [[], 1]}}}',
        b'{"nvext": {"timing": []}}', b'{"metrics": {"queue_time_ms": 1e999}}', b'{"a": ' + b"[" * 5000,
        b'{"metrics": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", b'{"total_duration": ' + b"9" * 5000 + b"}",
        b'{"metrics": {"\\ud800": 1, "queue_time_ms": "\\ud800"}}',
    ],
)  # fmt: skip
def test_what_is_broken_or_of_another_type_is_no_reading(text: bytes) -> None:
    assert read(body=text) == []
    assert read(events=[text], streamed=True) == []
    fine = b'{"time_info": {"queue_time": 0.25}}'
    assert read(events=[fine, text], streamed=True) == [("cerebras", "queue", 250 * MS)]
    assert read(events=[text, fine], streamed=True) == [("cerebras", "queue", 250 * MS)]


def test_a_field_of_the_wrong_type_spoils_no_other() -> None:
    body = b'{"usage": "none", "metrics": {"queue_time_ms": 1, "generation_time_ms": []}, "time_info": {"queue_time": 2.5}}'
    assert read(body=body) == [("vllm", "queue", MS), ("cerebras", "queue", 2500 * MS)]


def test_the_last_event_counts_and_a_null_in_it_does_not() -> None:
    events = [
        b'{"metrics": {"queue_time_ms": 1, "generation_time_ms": 1}}',
        b'{"metrics": {"queue_time_ms": 2, "generation_time_ms": 2}}',
        b'{"metrics": {"queue_time_ms": 3, "generation_time_ms": null}}',
        b"[DONE]",
    ]
    assert read(events=events, streamed=True) == [("vllm", "queue", 3 * MS), ("vllm", "decode", 2 * MS)]


def test_zero_is_real_for_a_queue_and_missing_for_a_total() -> None:
    body = {
        "metrics": {"queue_time_ms": 0, "time_to_first_token_ms": 0, "generation_time_ms": 0, "latencyMs": 0},
        "usage": {"queue_time": 0.0, "total_time": 0.0, "time_to_first_token": 0.0, "total_latency": 0},
        "perf_metrics": {"tokenizer-duration": "0"},
    }
    assert read(body=json.dumps(body).encode()) == [
        ("vllm", "queue", 0),
        ("vllm", "decode", 0),
        ("groq", "queue", 0),
        ("fireworks", "server_part", 0),
    ]


def test_one_call_of_read_reads_everything() -> None:
    found = READERS.read(
        headers={"openai-processing-ms": "5"},
        streamed=True,
        events=[b'{"metrics": {"queue_time_ms": 1}}'],
        trailers={"server-timing": "model;dur=12.5"},
    )
    assert [(reading.location, reading.server, reading.duration_ns) for reading in found] == [
        ("event", "vllm", MS),
        ("trailer", "server-timing", 12_500_000),
        ("header", "openai", 5 * MS),
    ]


def test_grpc_metadata() -> None:
    assert READERS.read_metadata({}, {}) == []
    trailing = {"server-timing": "queue;dur=2, prefill;dur=3, decode;dur=4", "grpc-status": "0"}
    found = READERS.read_metadata({}, trailing)  # after an abort the initial metadata are empty
    assert [(reading.maps_to, reading.location, reading.window) for reading in found] == [
        ("queue", "trailer", "to_end"),
        ("prefill", "trailer", "to_end"),
        ("decode", "trailer", "to_end"),
    ]
    # Envoy writes into the headers that are gRPC's initial metadata too.
    (reading,) = READERS.read_metadata({"x-envoy-upstream-service-time": "16"}, {})
    assert (reading.location, reading.duration_ns) == ("initial_metadata", 16 * MS)


def test_binary_metadata_is_left_alone() -> None:
    odd: Any = {"server-timing": b"total;dur=1", "x-envoy-upstream-service-time": b"16", "x-bin": b"\xff"}
    assert READERS.read_metadata(odd, odd) == []


def test_mappings_need_not_be_dictionaries() -> None:
    headers = MappingProxyType({"openai-processing-ms": "5"})
    assert read(headers=headers) == [("openai", "server_total", 5 * MS)]
    assert len(READERS.read_job(MappingProxyType({"executionTime": 5, "metrics": {}}))) == 1


def test_white_space_around_a_value_is_not_kept() -> None:
    (reading,) = READERS.read(headers={"openai-processing-ms": "\t5 "}, streamed=False)
    assert (reading.raw, reading.duration_ns) == ("5", 5 * MS)
    (reading,) = READERS.read_job({"in_progress_at": "7\t", "created_at": "\t5"})
    assert (reading.raw, reading.duration_ns) == ("7 - 5", 2000 * MS)


def test_values_are_numbers_and_short_text() -> None:
    readers = mine(
        header_row("x-id", "string", "request_id", window="none"),
        header_row("x-reset", "go_duration", "rate_limit", window="none"),
        header_row("x-waiting", "count", "load", window="none"),
        header_row("x-now", "rfc3339", "timestamp", window="none"),
        header_row("x-rate", "tokens_per_s", "decode_rate", window="none"),
    )
    fine = {
        "x-id": "abc" * 100,
        "x-reset": "17.4s",
        "x-waiting": "3",
        "x-now": "2026-11-30T10:00:00Z",
        "x-rate": "41.5",
    }
    found = readers.read(headers=fine, streamed=True)
    assert {reading.path: reading.raw for reading in found} == {**fine, "x-id": ("abc" * 100)[:200]}
    assert {(reading.duration_ns, reading.slack_ns, reading.window) for reading in found} == {(None, 0, "none")}
    odd = {"x-id": "a\x1b[31m", "x-reset": "soon", "x-waiting": "many", "x-now": "now", "x-rate": "nan"}
    assert readers.read(headers=odd, streamed=True) == []
    assert readers.read(headers={"x-id": ""}, streamed=True) == []
    readers = mine(json_row("waiting", "count", "load", window="none"))
    assert read(readers, body=b'{"waiting": ' + b"9" * 300 + b"}") == []


# --- other people's tables ------------------------------------------------------------------------------------------


def test_a_table_of_somebody_else() -> None:
    readers = mine(
        header_row("x-wait", "us"),
        json_row("stats.parts[].wait_ms", maps_to="server_part"),
        json_row("stats.done", "unix_ms", "model_total", since="stats.began"),
        json_row("wait", "ms", "queue", "event", unless="total"),
        TimingRow("trailer", "x-decode", "go_duration", "decode", "to_end", "header"),
        TimingRow("header", "server-timing[gpu].dur", "us", "model_total", "to_headers", "server_timing"),
    )
    assert read(readers, headers={"x-wait": "1500", "llm_provider-x-wait": "7"}) == [("mine", "queue", 1_500_000)]
    body = b'{"stats": {"parts": [{}, {"wait_ms": 2}, {"wait_ms": 3}], "began": 1777312800000, "done": 1777312800250}}'
    assert read(readers, body=body) == [("mine", "server_part", 2 * MS), ("mine", "model_total", 250 * MS)]
    assert read(readers, events=[b'{"wait": 5}'], streamed=True) == [("mine", "queue", 5 * MS)]
    assert read(readers, events=[b'{"wait": 5, "total": 6}'], streamed=True) == []
    assert read(readers, trailers={"x-decode": "1m0.5s"}, streamed=True) == [("mine", "decode", 60_500 * MS)]
    assert read(readers, headers={"server-timing": "gpu;dur=12"}) == [("mine", "model_total", 12_000)]


def test_the_first_row_of_a_server_counts_and_rows_that_add_are_all_kept() -> None:
    rows = (json_row("better", "ms"), json_row("good", "ms"))
    assert read(mine(*rows), body=b'{"good": 1, "better": 2}') == [("mine", "queue", 2 * MS)]
    assert read(mine(*rows), body=b'{"good": 1, "better": -2}') == [("mine", "queue", MS)]
    rows = (json_row("a", "ms", adds=True), json_row("b", "ms", adds=True))
    assert [duration for _, _, duration in read(mine(*rows), body=b'{"a": 1, "b": 2}')] == [MS, 2 * MS]


def test_the_last_table_counts_at_a_path_that_several_have() -> None:
    first = TimingReader("first", (header_row("openai-processing-ms", "s"), header_row("x-first")))
    second = TimingReader("second", (header_row("openai-processing-ms", "us"),))
    headers = {"openai-processing-ms": "5", "x-first": "1"}
    assert read(Readers([first]), headers=headers) == [("first", "queue", 5000 * MS)]
    assert read(Readers([first, second]), headers=headers) == [("first", "queue", MS), ("second", "queue", 5000)]
    assert read(headers=headers) == [("openai", "server_total", 5 * MS)]  # and ours stay as they are


def test_two_rows_at_one_path_for_streams_and_for_others() -> None:
    readers = mine(header_row(streamed=False), header_row(streamed=True, maps_to="server_total"))
    assert read(readers, headers={"x-wait": "5"}) == [("mine", "queue", 5 * MS)]
    assert read(readers, headers={"x-wait": "5"}, streamed=True) == [("mine", "server_total", 5 * MS)]


def test_what_is_no_table_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="TimingReader"):
        Readers([{"server": "mine"}])  # type: ignore[list-item]


# --- whatever comes -------------------------------------------------------------------------------------------------

KEYS = sorted(
    {key.removesuffix("[]") for reader in BUILT_IN for row in reader.rows for key in row.path.split(".")}
    | {"created_at", "forward_entry_time", "x"}
)
NAMES = sorted(
    {row.path.partition("[")[0] for reader in BUILT_IN for row in reader.rows if row.reader != "json_path"}
    | {"llm_provider-x-queue-time", "llm_provider-server-timing", "x-api-call-start", "x"}
)
scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30)
    | st.sampled_from(["0.5", "None", "2024-02-12T16:44:47.04927Z", 1714508499, 10**400])
)  # fmt: skip
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)
)
objects = st.dictionaries(st.sampled_from(KEYS), values, max_size=6)
texts = st.binary(max_size=60) | objects.map(lambda value: json.dumps(value, default=str).encode())
header_values = (
    st.text(max_size=40)
    | st.floats().map(str)
    | st.integers().map(str)
    | st.lists(st.sampled_from(["queue", "model", "cfL4", "gfet4t7", ";dur=", "5", ", ", ';desc="?min_rtt=', '"'])).map(
        "".join
    )
)
fields = st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=10), header_values, max_size=6)


def check(readings: list[Reading]) -> None:
    assert len(readings) <= 3 * 64
    for reading in readings:
        if reading.duration_ns is None:
            assert reading.maps_to == "decode_rate"
        else:
            assert type(reading.duration_ns) is int
            assert 0 <= reading.duration_ns <= 30 * 86_400 * 10**9
        assert type(reading.raw) in (int, float, str)
        assert str(reading.raw).isprintable()
        assert len(str(reading.raw)) <= 200
        assert reading.slack_ns in (0, MS, 1000 * MS)


@given(fields, st.booleans(), st.lists(texts, max_size=3), st.none() | texts, fields)
@example({}, True, [b'{"usage": {"queue_time": ' + b"9" * 4400 + b"}}"], None, {})
def test_an_answer_never_makes_a_reader_fail(
    headers: dict[str, str], streamed: bool, events: list[bytes], body: bytes | None, trailers: dict[str, str]
) -> None:
    check(READERS.read(headers=headers, streamed=streamed, events=events, body=body, trailers=trailers))
    check(READERS.read_metadata(headers, trailers))


@given(objects)
def test_a_job_never_makes_a_reader_fail(job: dict[str, Any]) -> None:
    check(READERS.read_job(job))
