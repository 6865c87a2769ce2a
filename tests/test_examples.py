"""Every example, and every Python block of the README and the docs, runs as it is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
#: What pages show as an address of the reader's own server.
SERVER = re.compile(r'"http://127\.0\.0\.1:8000/v1"')
SOCKET = re.compile(r'"ws://127\.0\.0\.1:8000/(\w+)"')


class Collector(ThreadingHTTPServer):
    """Takes spans over OTLP/HTTP, as a tracing backend does, and keeps their names."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Export)
        self.spans: list[str] = []


class Export(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.spans += [
            span.name
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        self.send_response(200 if self.path == "/v1/traces" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join(10)


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **env},
    )


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_runs(name: str) -> None:
    done = run((ROOT / "examples" / name).read_text("utf-8"))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_the_examples_are_listed() -> None:
    table = (ROOT / "examples" / "README.md").read_text("utf-8")
    assert re.findall(r"`(\d\d_\w+\.py)`", table) == EXAMPLES


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_the_page_runs(page: str, collector: Collector) -> None:
    """A block that uses the reader's own server gets the loopback server in its place, and a collector for its spans."""
    for block in BLOCK.findall((ROOT / page).read_text("utf-8")):
        code = block
        if SERVER.search(code):
            start = "from spanwire.testing import LoopbackServer\n_server = LoopbackServer().start()\n"
            code = start + SERVER.sub("_server.url", code)
        elif SOCKET.search(code):
            start = "from spanwire.testing import LoopbackServer\n_server = LoopbackServer(part='websocket').start()\n"
            code = start + SOCKET.sub(r"_server.url.removesuffix('v1') + '\1'", code)
        done = run(code, OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{collector.server_port}")
        assert (done.returncode, done.stderr) == (0, ""), block
        assert ("chat my-model" in collector.spans) == ("OTLPSpanExporter" in block)
        collector.spans.clear()
