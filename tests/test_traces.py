"""The traces of docs/traces/, made anew and as they are committed: each has the spans of the life that it shows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from scripts.export_traces import ABANDONED_S, NAMES, SERVICE, export, main

ROOT = Path(__file__).parent.parent
UNSET, ERROR = 0, 2
SETUP = "spanwire.connection_setup"
#: The outcomes of the calls in each trace, in the order of their beginning.
OUTCOMES = {
    "cold-call": ["completed"],
    "warm-call": ["completed"],
    "retry-after-503": ["completed"],
    "cancelled-stream": ["cancelled"],
    "abandoned-stream": ["abandoned"],
    "pre-warmed-connection": ["completed"],
    "two-riders": ["completed", "completed"],
}


class Span:
    """One span of OTLP JSON."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.name: str = data["name"]
        self.id: str = data["spanId"]
        self.trace: str = data["traceId"]
        self.parent: str | None = data.get("parentSpanId")
        self.begin_ns, self.end_ns = int(data["startTimeUnixNano"]), int(data["endTimeUnixNano"])
        self.status: int = data["status"].get("code", UNSET)
        self.attributes = {entry["key"]: value(entry["value"]) for entry in data.get("attributes", ())}
        self.links = [(link["traceId"], link["spanId"]) for link in data.get("links", ())]

    @property
    def key(self) -> tuple[str, str]:
        return self.trace, self.id

    @property
    def outcome(self) -> Any:
        return self.attributes.get("spanwire.outcome")


class Trace:
    """What one file holds."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = data
        found = (Span(span) for scope in scopes(data) for span in scope["spans"])
        self.spans = sorted(found, key=lambda span: span.begin_ns)

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    @property
    def calls(self) -> list[Span]:
        return [span for span in self.spans if "gen_ai.operation.name" in span.attributes]

    @property
    def application(self) -> Span:
        (found,) = [
            span
            for scope in scopes(self.data)
            for span in map(Span, scope["spans"])
            if scope["scope"]["name"] == "agent"
        ]
        return found

    @property
    def setup(self) -> Span:
        (found,) = self.named(SETUP)
        return found


def scopes(data: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for resource in data["resourceSpans"]:
        yield from resource["scopeSpans"]


def value(data: Mapping[str, Any]) -> Any:
    ((kind, found),) = data.items()
    return int(found) if kind == "intValue" else found


@pytest.fixture(scope="module", params=["made anew", "as committed"])
def traces(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trace]:
    folder = ROOT / "docs/traces"
    if request.param == "made anew":
        folder = tmp_path_factory.mktemp("traces")
        export(folder)
    return {path.stem: Trace(json.loads(path.read_text("utf-8"))) for path in sorted(folder.glob("*.json"))}


def test_there_are_seven(traces: dict[str, Trace]) -> None:
    assert set(traces) == set(NAMES) == set(OUTCOMES)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_otlp_json(traces: dict[str, Trace], name: str) -> None:
    data = traces[name].data
    assert set(data) == {"resourceSpans"}
    for span in (span for scope in scopes(data) for span in scope["spans"]):
        for holder in (span, *span.get("links", ())):
            assert re.fullmatch("[0-9a-f]{32}", holder["traceId"])
            assert re.fullmatch("[0-9a-f]{16}", holder["spanId"])
        assert re.fullmatch("[0-9a-f]{16}", span.get("parentSpanId", "0" * 16))
        assert isinstance(span["startTimeUnixNano"], str)
        assert isinstance(span["endTimeUnixNano"], str)
        assert isinstance(span["kind"], int)


@pytest.mark.parametrize("name", NAMES)
def test_it_tells_nothing_of_this_machine(traces: dict[str, Trace], name: str) -> None:
    for resource in traces[name].data["resourceSpans"]:
        assert resource["resource"] == {"attributes": [{"key": "service.name", "value": {"stringValue": SERVICE}}]}
    addresses = {span.attributes.get("server.address") for span in traces[name].spans}
    assert addresses <= {None, "localhost", "127.0.0.1"}


@pytest.mark.parametrize("name", NAMES)
def test_children_lie_inside_their_parents(traces: dict[str, Trace], name: str) -> None:
    spans = {span.key: span for span in traces[name].spans}
    assert len(spans) == len(traces[name].spans)
    for span in spans.values():
        assert span.begin_ns <= span.end_ns
        if span.parent is not None:
            parent = spans[span.trace, span.parent]
            assert parent.begin_ns <= span.begin_ns, (parent.name, span.name)
            assert span.end_ns <= parent.end_ns, (parent.name, span.name)


@pytest.mark.parametrize("name", NAMES)
def test_each_call_is_one_genai_span(traces: dict[str, Trace], name: str) -> None:
    trace = traces[name]
    assert [call.outcome for call in trace.calls] == OUTCOMES[name]
    assert {call.name for call in trace.calls} == {"chat my-model"}
    assert {call.parent for call in trace.calls} == {trace.application.id}


@pytest.mark.parametrize("name", NAMES)
def test_only_an_error_is_marked_as_one(traces: dict[str, Trace], name: str) -> None:
    for span in traces[name].spans:
        failed = span.outcome in {"error", "timeout"}
        assert (span.status == ERROR, "error.type" in span.attributes) == (failed, failed), span.name
        assert span.status in {UNSET, ERROR}


@pytest.mark.parametrize("name", NAMES)
def test_each_call_links_to_its_connection(traces: dict[str, Trace], name: str) -> None:
    setups = {setup.key for trace in traces.values() for setup in trace.named(SETUP)}
    for call in traces[name].calls:
        assert len(call.links) == 1
        assert call.links[0] in setups


@pytest.mark.parametrize("name", [name for name in NAMES if name != "warm-call"])
def test_a_connection_is_made_once_step_by_step(traces: dict[str, Trace], name: str) -> None:
    trace = traces[name]
    steps = [span.name for span in trace.spans if span.parent == trace.setup.id]
    assert steps[-2:] == ["tcp", "tls"]
    assert all(call.links == [trace.setup.key] for call in trace.calls)


@pytest.mark.parametrize("name", ["cold-call", "retry-after-503", "cancelled-stream", "abandoned-stream"])
def test_who_waits_for_the_connection_is_its_parent(traces: dict[str, Trace], name: str) -> None:
    (call,) = traces[name].calls
    assert traces[name].setup.parent == call.id
    assert "spanwire.segment.handshake.tls.duration" in call.attributes


def test_the_warm_call_makes_none(traces: dict[str, Trace]) -> None:
    (call,), (cold,) = traces["warm-call"].calls, traces["cold-call"].calls
    assert traces["warm-call"].named(SETUP) == []
    assert call.links == [traces["cold-call"].setup.key]
    assert (cold.attributes["spanwire.connection.reused"], call.attributes["spanwire.connection.reused"]) == (
        False,
        True,
    )
    assert cold.attributes["spanwire.connection.id"] == call.attributes["spanwire.connection.id"]
    assert "spanwire.segment.handshake.duration" not in call.attributes


def test_two_attempts_are_one_call(traces: dict[str, Trace]) -> None:
    trace = traces["retry-after-503"]
    (call,), attempts = trace.calls, trace.named("spanwire.attempt")
    assert [(span.attributes["spanwire.attempt.number"], span.outcome) for span in attempts] == [
        (1, "error"),
        (2, "completed"),
    ]
    assert {span.parent for span in attempts} == {call.id}
    assert attempts[0].attributes["error.type"] == "Overloaded"
    assert attempts[0].end_ns <= attempts[1].begin_ns
    assert call.attributes["http.request.resend_count"] == 1
    assert call.attributes["http.response.status_code"] == 200


@pytest.mark.parametrize("name", NAMES)
def test_one_server_tells_what_it_knows_and_the_others_nothing(traces: dict[str, Trace], name: str) -> None:
    trace = traces[name]
    reported = {span.name for span in trace.spans if span.attributes.get("spanwire.segment.source") == "reported"}
    dialects = {call.attributes.get("spanwire.server_timing.dialect") for call in trace.calls}
    if name == "retry-after-503":
        assert (reported, dialects) == ({"queue server", "model prefill", "model decode"}, {"vllm"})
        (call,) = trace.calls
        assert call.attributes["spanwire.segment.model.source"] == "reported"
    else:
        assert (reported, dialects) == (set(), {None})


@pytest.mark.parametrize("name", [name for name in NAMES if name != "retry-after-503"])
def test_one_attempt_has_no_span_of_its_own(traces: dict[str, Trace], name: str) -> None:
    assert traces[name].named("spanwire.attempt") == []


def test_the_abandoned_one_ends_with_what_came_last(traces: dict[str, Trace]) -> None:
    trace = traces["abandoned-stream"]
    (call,) = trace.calls
    content_ns = call.begin_ns + call.attributes["spanwire.time_to_first_content"] * 1e9
    assert call.end_ns >= content_ns - 1e3  # seconds are floats
    assert trace.application.end_ns - call.end_ns >= ABANDONED_S * 1e9  # not with the drop, which was that much later


def test_the_pre_warmed_connection_is_a_trace_of_its_own(traces: dict[str, Trace]) -> None:
    trace = traces["pre-warmed-connection"]
    (call,) = trace.calls
    assert trace.setup.parent is None
    assert trace.setup.trace != call.trace
    assert trace.setup.end_ns <= call.begin_ns
    assert "spanwire.segment.handshake.duration" not in call.attributes


def test_two_riders_share_a_handshake(traces: dict[str, Trace]) -> None:
    trace = traces["two-riders"]
    first, second = trace.calls
    assert trace.setup.parent == first.id
    assert trace.setup.attributes["network.protocol.version"] == "2"
    assert first.attributes["spanwire.connection.id"] == second.attributes["spanwire.connection.id"]
    assert "spanwire.segment.handshake.tls.duration" in first.attributes
    assert "spanwire.segment.handshake.shared.duration" in second.attributes


def test_the_command_makes_what_it_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(tmp_path / "new"), "--only", "warm-call"])
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["warm-call.json"]
    assert capsys.readouterr().out == f"{tmp_path / 'new/warm-call.json'}\n"
