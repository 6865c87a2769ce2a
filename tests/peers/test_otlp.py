"""Spans over OTLP/HTTP into backends that other people wrote, and what their APIs say of them afterwards."""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult

from scripts.export_traces import NAMES, export, play, pre_warmed, retried
from tests.peers.processes import answers, free_port, python_peer, running

# Not the fixtures' time: the first test that uses a backend may have to install it, and that has a limit of its own.
pytestmark = [pytest.mark.peers, pytest.mark.timeout(120, func_only=True)]

#: Backends import half of what they need with the first request, and store what they took a little later.
STORED_LIMIT_S = 30.0


class Kept(NamedTuple):
    """A span as a backend gives it back. `links` is None where its API does not tell."""

    name: str
    parent_id: str | None
    failed: bool
    attributes: dict[str, Any]
    links: int | None


class Backend(NamedTuple):
    """A backend that runs: where spans go, and how to read a trace back."""

    port: int
    headers: dict[str, str]
    read: Callable[[int, str], dict[str, Kept]]


def get(port: int, path: str) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=STORED_LIMIT_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read()
    finally:
        connection.close()
    return json.loads(body) if response.status == 200 else None


# --- the backends -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def phoenix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    """Arize Phoenix: GenAI attributes become its own names, the rest is kept."""
    python = python_peer("phoenix", "arize-phoenix==20.26.1")
    folder, port = tmp_path_factory.mktemp("phoenix"), free_port()
    with running(
        "phoenix",
        [str(python), str(python.with_name("phoenix")), "serve"],
        ready=lambda: answers(port, "/healthz"),
        limit_s=180,
        cwd=folder,
        PHOENIX_WORKING_DIR=str(folder),
        PHOENIX_HOST="127.0.0.1",
        PHOENIX_PORT=str(port),
        PHOENIX_GRPC_PORT=str(free_port()),
        PHOENIX_TELEMETRY_ENABLED="false",
    ):
        yield Backend(port, {}, read_phoenix)


def read_phoenix(port: int, trace_id: str) -> dict[str, Kept]:
    found = get(port, f"/v1/projects/default/spans?limit=100&trace_id={trace_id}")
    return {
        span["context"]["span_id"]: Kept(
            span["name"], span["parent_id"], span["status_code"] == "ERROR", span["attributes"], None
        )
        for span in (found["data"] if found else ())
    }


@pytest.fixture(scope="session")
def mlflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    """MLflow's tracking server on SQLite."""
    python = python_peer("mlflow", "mlflow==3.17.2")
    folder, port = tmp_path_factory.mktemp("mlflow"), free_port()
    with running(
        "mlflow",
        [
            *(str(python), "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"),
            *("--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--default-artifact-root", str(folder)),
        ],
        ready=lambda: answers(port, "/health"),
        limit_s=180,
        cwd=folder,
        MLFLOW_DISABLE_TELEMETRY="true",
    ):
        yield Backend(port, {"x-mlflow-experiment-id": "0"}, read_mlflow)


def read_mlflow(port: int, trace_id: str) -> dict[str, Kept]:
    found = get(port, f"/ajax-api/3.0/mlflow/get-trace-artifact?request_id=tr-{trace_id}")
    return {
        base64.b64decode(span["span_id"]).hex(): Kept(
            span["name"],
            base64.b64decode(span["parent_span_id"]).hex() if span["parent_span_id"] else None,
            span["status"]["code"] == "STATUS_CODE_ERROR",
            {name: json.loads(value) for name, value in span["attributes"].items()},
            len(span["links"]),
        )
        for span in (found["spans"] if found else ())
    }


@pytest.fixture(params=["phoenix", "mlflow"])
def backend(request: pytest.FixtureRequest) -> Backend:
    found: Backend = request.getfixturevalue(request.param)
    return found


# --- the tests --------------------------------------------------------------------------------------------------------


def send(backend: Backend, spans: tuple[ReadableSpan, ...]) -> None:
    url = f"http://127.0.0.1:{backend.port}/v1/traces"
    exporter = OTLPSpanExporter(url, headers=backend.headers, timeout=STORED_LIMIT_S)
    try:
        assert exporter.export(spans) is SpanExportResult.SUCCESS
    finally:
        exporter.shutdown()  # type: ignore[no-untyped-call]


def stored(backend: Backend, trace_id: str, count: int) -> dict[str, Kept]:
    """The trace, as soon as it is whole."""
    deadline_s = time.monotonic() + STORED_LIMIT_S
    while len(found := backend.read(backend.port, trace_id)) < count:
        assert time.monotonic() < deadline_s, f"{len(found)} of {count} spans after {STORED_LIMIT_S:.0f} s"
        time.sleep(0.1)
    return found


def by_trace(spans: tuple[ReadableSpan, ...]) -> dict[str, list[ReadableSpan]]:
    found: dict[str, list[ReadableSpan]] = {}
    for span in spans:
        assert span.context is not None
        found.setdefault(f"{span.context.trace_id:032x}", []).append(span)
    return found


@pytest.mark.parametrize("scenario", [retried, pre_warmed])
def test_the_spans_come_back_as_they_were_sent(backend: Backend, scenario: Any) -> None:
    spans = asyncio.run(play(scenario))
    send(backend, spans)
    for trace_id, sent in by_trace(spans).items():
        kept = stored(backend, trace_id, len(sent))
        assert len(kept) == len(sent)
        for span in sent:
            assert span.context is not None
            found = kept[f"{span.context.span_id:016x}"]
            assert found.name == span.name
            assert found.parent_id == (f"{span.parent.span_id:016x}" if span.parent else None)
            assert found.failed == (not span.status.is_ok)
            assert found.links in (None, len(span.links))
            own = {name: value for name, value in (span.attributes or {}).items() if name.startswith("spanwire.")}
            assert {name: found.attributes.get(name) for name in own} == own


def test_the_files_are_taken_as_they_are(mlflow: Backend, tmp_path: Path) -> None:
    """Phoenix takes protobuf only (415)."""
    for path in export(tmp_path, NAMES):
        connection = http.client.HTTPConnection("127.0.0.1", mlflow.port, timeout=STORED_LIMIT_S)
        connection.request(
            "POST", "/v1/traces", path.read_bytes(), {"Content-Type": "application/json", **mlflow.headers}
        )
        assert connection.getresponse().status == 200, path.name
        connection.close()
        scopes = json.loads(path.read_text("utf-8"))["resourceSpans"][0]["scopeSpans"]
        sent = [span for scope in scopes for span in scope["spans"]]
        for trace_id in {span["traceId"] for span in sent}:
            ids = {span["spanId"] for span in sent if span["traceId"] == trace_id}
            assert set(stored(mlflow, trace_id, len(ids))) == ids
