"""Files to calls: every form, told by its content; what cannot be read is named and stops nothing."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import spanwire
from spanwire.calllog import CallLog
from spanwire.errors import ConfigurationError
from spanwire.report.read import Found, between, read
from spanwire.report.summary import plain, summarize
from spanwire.testing import Script
from tests.core.report import traffic
from tests.support import chat, serving


def write(path: Path, *documents: Any, end: str = "\n") -> str:
    path.write_text("\n".join(json.dumps(document) for document in documents) + end, encoding="utf-8")
    return str(path)


def calls(n: int = 30, seed: int = 1) -> list[dict[str, Any]]:
    return list(traffic.timelines(n, seed=seed))


def numbers(found: Found) -> dict[str, Any]:
    return plain(summarize(found.calls))


def same(a: Any, b: Any) -> None:
    """Equal but for the last digits of sums."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            same(one, other)
    elif isinstance(a, float):
        assert a == pytest.approx(b, rel=1e-6, abs=2e-6)
    else:
        assert a == b


# --- the same calls in every form -----------------------------------------------------------------------------------------


def forms(folder: Path, timelines: list[dict[str, Any]]) -> dict[str, list[str]]:
    own = [span for timeline in timelines for span in traffic.spans(timeline, nested=False)]
    nested = [span for timeline in timelines for span in traffic.spans(timeline, nested=True)]
    log = write(folder / "calls.jsonl", *timelines)
    packed = folder / "calls.jsonl.gz"
    packed.write_bytes(gzip.compress(Path(log).read_bytes()))
    pretty = folder / "pretty.json"
    pretty.write_text(json.dumps(timelines, indent=2))
    whole = folder / "traces.json"
    whole.write_text(json.dumps(traffic.export(own), indent=1))
    half = len(timelines) // 2
    return {
        "log": [log],
        "two logs": [write(folder / "a.jsonl", *timelines[half:]), write(folder / "b.jsonl", *timelines[:half])],
        "gzip": [str(packed)],
        "list": [write(folder / "list.json", timelines)],
        "pretty list": [str(pretty)],
        "probe": [write(folder / "probe.json", {"schema": 1, "spanwire": "0.1.0", "timelines": timelines})],
        "otlp": [str(whole)],
        "otlp lines": [write(folder / "lines.json", *(traffic.export([span]) for span in own))],
        "nested": [write(folder / "nested.json", traffic.export(nested))],
        "nested, outer first": [write(folder / "first.json", *(traffic.export([span]) for span in reversed(nested)))],
        "log and traces": [log, str(whole)],
        "traces twice": [str(whole), write(folder / "again.json", traffic.export(own))],
        "the same file twice": [log, log],
    }


@pytest.mark.parametrize(
    "form",
    [
        "two logs",
        "gzip",
        "list",
        "pretty list",
        "probe",
        "otlp",
        "otlp lines",
        "nested",
        "nested, outer first",
        "log and traces",
        "traces twice",
        "the same file twice",
    ],
)
def test_the_same_calls_give_the_same_numbers(tmp_path: Path, form: str) -> None:
    made = forms(tmp_path, calls(60))
    expected = read(made["log"])
    found = read(made[form])
    assert (found.bad_lines, len(found.calls)) == (0, 60)
    same(numbers(found), numbers(expected))
    assert [call.error_type for call in found.calls] == [call.error_type for call in expected.calls]
    assert found.repeated == (60 if form in {"log and traces", "traces twice"} else 0)


def test_an_outer_span_alone_is_the_call(tmp_path: Path) -> None:
    """Where ours was not sampled, or the outer one is all that was exported. Its own duration is not the call's."""
    (timeline,) = calls(1)
    outer = traffic.spans(timeline, nested=True)[-1]
    outer["endTimeUnixNano"] = str(int(outer["startTimeUnixNano"]) + 10**12)
    (call,) = read([write(tmp_path / "t.json", traffic.export([outer]))]).calls
    assert call.model == timeline["model"]
    assert call.total_s == pytest.approx(timeline["total_s"])


def test_an_outer_span_that_was_not_enriched_still_names_the_model(tmp_path: Path) -> None:
    (timeline,) = calls(1)
    *_, own, outer = traffic.spans(timeline, nested=True)
    outer["attributes"] = [a for a in outer["attributes"] if a["key"].startswith("gen_ai.")]
    (call,) = read([write(tmp_path / "t.json", traffic.export([own]), traffic.export([outer]))]).calls
    assert (call.model, call.endpoint) == (timeline["model"], timeline["endpoint"])
    assert call.output_tokens == timeline["usage"]["output_tokens"]


def test_two_calls_below_one_outer_span_are_two(tmp_path: Path) -> None:
    """As with a fallback: the outer span has the last one's numbers."""
    first, second = calls(2)
    spans = [
        traffic.span(first, "spanwire.attempt", "a1", "0f", **traffic.own_attributes(first)),
        traffic.span(first, "spanwire.attempt", "a2", "0f", **traffic.own_attributes(second)),
        traffic.span(first, "completion", "0f", **traffic.own_attributes(second), **traffic.genai(second)),
    ]
    found = read([write(tmp_path / "t.json", traffic.export(spans))]).calls
    assert sorted(call.total_s for call in found) == pytest.approx(sorted((first["total_s"], second["total_s"])))


def test_the_tokens_of_an_outer_span_are_its_last_calls(tmp_path: Path) -> None:
    """An SDK that tries again has one span for all its tries: its tokens must not count once for each."""
    first, second = calls(2)
    later = {**first, "started_unix_s": first["started_unix_s"] + 60}
    usage: dict[str, Any] = {
        "gen_ai.request.model": "m",
        "gen_ai.usage.input_tokens": 10,
        "gen_ai.usage.output_tokens": 20,
    }
    spans = [
        traffic.span(later, "spanwire.attempt", "a1", "0f", **traffic.own_attributes(second)),
        traffic.span(first, "spanwire.attempt", "a2", "0f", **traffic.own_attributes(first)),
        traffic.span(first, "chat m", "0f", **usage),
    ]
    tried, answered = read([write(tmp_path / "t.json", traffic.export(spans))]).calls
    assert (tried.model, tried.input_tokens, tried.output_tokens) == ("m", None, None)
    assert (answered.model, answered.input_tokens, answered.output_tokens) == ("m", 10, 20)


@pytest.mark.parametrize(
    ("attributes", "endpoint"),
    [
        ({"server.address": "10.0.0.1", "server.port": 80}, "10.0.0.1:80"),
        ({"server.address": "::1", "server.port": 80}, "[::1]:80"),
        ({"server.address": "/run/model.sock"}, "unix:/run/model.sock"),
        ({"server.address": "example.com"}, "example.com"),
        ({}, ""),
    ],
)
def test_the_endpoint_of_a_span_is_written_as_everywhere(tmp_path: Path, attributes: Any, endpoint: str) -> None:
    (timeline,) = calls(1)
    span = traffic.span(timeline, "chat m", "1", **{"spanwire.outcome": "completed"}, **attributes)
    assert read([write(tmp_path / "t.json", traffic.export([span]))]).calls[0].endpoint == endpoint


def test_real_calls_recorded_by_both_ways_at_once(tmp_path: Path) -> None:
    """A call log, and what an OpenTelemetry SDK exports, through OTLP's own encoder."""
    from google.protobuf.json_format import MessageToJson  # type: ignore[import-untyped]
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry = spanwire.Telemetry(tracer_provider=provider)
    log = tmp_path / "calls.jsonl"
    script = Script.say("one two three four", prefill_s=0.002, gap_s=0.001)
    with (
        serving(script) as server,
        spanwire.SyncConnectionManager(plugins=[CallLog(log)], telemetry=telemetry) as manager,
    ):
        for number in range(6):
            with manager.stream(server.endpoint(), chat(f"m{number % 2}")) as stream:
                assert "".join(chunk.text for chunk in stream)
    traces = tmp_path / "traces.json"
    traces.write_text(MessageToJson(encode_spans(exporter.get_finished_spans())))
    by_log, by_traces = read([str(log)]), read([str(traces)])
    assert len(by_log.calls) == len(by_traces.calls) == 6
    for one, other in zip(by_log.calls, by_traces.calls, strict=True):
        assert one.total_s == pytest.approx(other.total_s, abs=1e-6)
        assert one.first_content_s == pytest.approx(other.first_content_s)
        assert dict(zip(one.pieces, one.durations, strict=True)) == pytest.approx(
            dict(zip(other.pieces, other.durations, strict=True))
        )
        assert (one.model, one.endpoint, one.outcome, one.reused, one.operation, one.transport) == (
            (other.model, other.endpoint, other.outcome, other.reused, other.operation, other.transport)
        )
        assert one.started_unix_s == pytest.approx(other.started_unix_s, abs=0.5)


# --- fields ---------------------------------------------------------------------------------------------------------------


def test_the_form_of_today_without_what_is_optional(tmp_path: Path) -> None:
    line = {
        "schema": 1, "outcome": "completed", "total_s": 0.342, "first_content_s": 0.141,
        "segments": {"model": {"duration_s": 0.26, "source": "estimated",
                               "parts": {"prefill": {"duration_s": 0.061, "source": "estimated"},
                                         "decode": {"duration_s": 0.199, "source": "estimated"}}},
                     "unattributed": {"duration_s": 0.082, "source": "measured"}},
        "attempts": [{"outcome": "completed"}], "endpoint": "127.0.0.1:8000", "model": "m", "something_new": [1],
    }  # fmt: skip
    (call,) = read([write(tmp_path / "calls.jsonl", line)]).calls
    assert (call.started_unix_s, call.reused, call.output_tokens, call.trace_id) == (None, None, None, None)
    assert call.last_chunk_s == pytest.approx(0.34)  # the decode begins with the first content
    assert call.pieces == (
        ("model", "prefill", "estimated"), ("model", "decode", "estimated"), ("unattributed", "", "measured"),
    )  # fmt: skip


def test_what_parts_leave_of_a_segment_is_kept(tmp_path: Path) -> None:
    model = {"duration_s": 0.3, "source": "reported", "parts": {"decode": {"duration_s": 0.2, "source": "reported"}}}
    line = {"schema": 1, "outcome": "completed", "total_s": 0.3, "segments": {"model": model}}
    (call,) = read([write(tmp_path / "calls.jsonl", line)]).calls
    assert call.pieces == (("model", "decode", "reported"), ("model", "", "reported"))
    assert list(call.durations) == pytest.approx([0.2, 0.1])


# --- what cannot be read ----------------------------------------------------------------------------------------------------


def test_bad_lines_are_counted_and_named(tmp_path: Path) -> None:
    good, *_ = calls(1)
    path = tmp_path / "calls.jsonl"
    bad = [
        b"not json",
        b'{"schema": 1, "outcome": "completed"}',
        b'{"schema": 2, "outcome": "completed", "total_s": 1}',
        b'{"schema": 1, "outcome": "completed", "total_s": "soon"}',
        b'{"schema": 1, "outcome": "completed", "total_s": -1}',
        b'{"schema": 1, "outcome": "completed", "total_s": 1e300}',
        b'{"schema": 1, "outcome": "completed", "total_s": NaN}',
        b'{"log": "of somebody else"}',
        b"[1, 2]",
        b'{"schema": 1, "outcome": "\xff", "total_s": 1}',
        b"[" * 100_000,
        b'{"resourceSpans": [{"scopeSpans": 7}]}',
    ]
    line = json.dumps(good).encode()
    path.write_bytes(b"\n".join([line, *bad, b"", line]) + b"\n")
    found = read([str(path)])
    assert len(found.calls) == 2
    assert found.bad_lines == len(bad) == len(found.bad)
    assert [row.line for row in found.bad] == list(range(2, 2 + len(bad)))
    text = [str(row) for row in found.bad]
    assert text[0] == f"{path}:2: no JSON: 'not json'"
    assert "no total_s" in text[1]
    assert "schema 2" in text[2]
    assert "$.total_s" in text[3]
    assert "neither a timeline" in text[7]


def test_only_some_bad_lines_are_named(tmp_path: Path) -> None:
    found = read([write(tmp_path / "calls.jsonl", *calls(1), *([{"other": 1}] * 500))])
    assert (found.bad_lines, len(found.bad)) == (500, 20)


def test_a_bad_first_line_does_not_hide_the_others(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    path.write_text('{"schema": 1, "outc\n' + "".join(json.dumps(call) + "\n" for call in calls(3)))
    found = read([str(path)])
    assert (len(found.calls), found.bad_lines, found.bad[0].line) == (3, 1, 1)


def test_a_last_line_that_is_being_written_is_no_fault(tmp_path: Path) -> None:
    first, second = calls(2)
    path = tmp_path / "calls.jsonl"
    text = json.dumps(first) + "\n" + json.dumps(second)
    path.write_text(text)
    assert len(read([str(path)]).calls) == 2
    for length in range(len(json.dumps(first)) + 2, len(text), 37):
        path.write_text(text[:length])
        found = read([str(path)])
        assert (len(found.calls), found.bad_lines, found.unfinished) == (1, 0, 1)


def test_a_gzip_file_that_is_cut_off_gives_what_it_has(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl.gz"
    packed = gzip.compress("".join(json.dumps(call) + "\n" for call in calls(300)).encode())
    path.write_bytes(packed[: len(packed) // 2])
    found = read([str(path)])
    assert 0 < len(found.calls) < 300
    assert (found.bad_lines, found.unfinished) == (0, 1)
    path.write_bytes(packed[:-8] + b"\0" * 8)  # the checksum
    found = read([str(path)])
    assert len(found.calls) >= 299
    assert "not to be unpacked" in str(found.bad[-1])


def test_other_signals_in_a_collectors_file_are_passed_over(tmp_path: Path) -> None:
    (timeline,) = calls(1)
    export = traffic.export(traffic.spans(timeline, nested=False))
    path = write(tmp_path / "t.json", {"resourceMetrics": [{}]}, {"resourceLogs": [{}]}, export, {"resourceSpans": []})
    found = read([path])
    assert (len(found.calls), found.bad_lines) == (1, 0)


def test_calls_that_a_log_could_not_write_are_told(tmp_path: Path) -> None:
    found = read([write(tmp_path / "calls.jsonl", *calls(2), {"schema": 1, "dropped": 5}, {"schema": 1, "dropped": 2})])
    assert (len(found.calls), found.dropped, found.bad_lines) == (2, 7, 0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no call in "),
        (b"\n\n", "no call in "),
        (b"[]", "no call in "),
        (b"hello\nworld\n", "1: no JSON: 'hello' (and 1 more lines"),
        (b"\x89PNG\r\n\x1a\n\0\0\0", "no JSON"),
        (b'{"some": "json"}', "neither a timeline"),
        (b'{"resourceSpans": [{"scopeSpans": [{"spans": [{"name": "GET"}]}]}]}', "none of the 1 spans"),
    ],
)
def test_nothing_to_report(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError) as caught:
        read([str(path)])
    assert str(caught.value).startswith("nothing to report: ")
    assert message in str(caught.value)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"none.jsonl: No such file"):
        read([str(tmp_path / "none.jsonl")])
    with pytest.raises(ConfigurationError, match="is a folder"):
        read([str(tmp_path)])


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(json.dumps(call) + "\n" for call in calls(3)).encode()
    for data in (text, gzip.compress(text)):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BufferedReader(io.BytesIO(data))))
        found = read(["-", "-"])
        assert (len(found.calls), found.files) == (3, {"standard input": 3})


@given(
    st.lists(
        st.one_of(
            st.binary(max_size=40),
            st.sampled_from([b"{", b"[", b"{}", b"null", b'{"schema":1}', b'{"resourceSpans":[]}', b"\x1f\x8b", b"\xef\xbb\xbf"]),
            st.recursive(
                st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
                lambda inner: st.lists(inner, max_size=3)
                | st.dictionaries(st.sampled_from(["schema", "outcome", "total_s", "segments", "resourceSpans", "scopeSpans", "spans", "attributes", "key", "value", "timelines", "x"]), inner, max_size=4),
                max_leaves=8,
            ).map(lambda value: json.dumps(value).encode()),
        ),
        max_size=6,
    )
)  # fmt: skip
def test_any_file_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, parts: list[bytes]) -> None:
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_bytes(b"\n".join(parts))
    with contextlib.suppress(ConfigurationError):
        assert read([str(path)]).calls


# --- windows of time --------------------------------------------------------------------------------------------------------


def test_only_calls_that_began_in_a_window(tmp_path: Path) -> None:
    rows = [{"schema": 1, "outcome": "completed", "total_s": 5.0, "started_unix_s": 100.0 + n} for n in range(10)]
    rows.append({"schema": 1, "outcome": "completed", "total_s": 5.0})
    path = write(tmp_path / "calls.jsonl", *rows)
    found = read([path])
    assert between(found, None, None) == 0
    assert len(found.calls) == 11
    assert between(found, 103.0, 106.0) == 1
    assert [call.started_unix_s for call in found.calls] == [103.0, 104.0, 105.0]


def test_calls_are_in_order_of_their_start(tmp_path: Path) -> None:
    timelines = calls(20)
    found = read([write(tmp_path / "calls.jsonl", *reversed(timelines))])
    assert [call.started_unix_s for call in found.calls] == sorted(t["started_unix_s"] for t in timelines)


def test_encoders_agree(tmp_path: Path) -> None:
    """msgspec writes the log, and anybody's JSON library may have rewritten it."""
    (timeline,) = calls(1)
    path = tmp_path / "a"
    path.write_bytes(b"\xef\xbb\xbf" + msgspec.json.encode(timeline) + b"\r\n")
    assert len(read([str(path)]).calls) == 1
