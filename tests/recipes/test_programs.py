"""Recipes that are programs: a notebook, LangGraph, a traced one, one behind a corporate proxy."""

from __future__ import annotations

import json
import re
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from spanwire.testing import LoopbackServer, Script, ScriptedTool
from tests.peers.processes import free_port, python_peer, running

from .conftest import ROOT, URL, Kitchen, environment, files
from .test_servers import listening

pytestmark = [pytest.mark.recipes, pytest.mark.timeout(180, func_only=True)]


def test_a_notebook(kitchen: Kitchen) -> None:
    cells = [
        files()[title].replace(URL, kitchen.server.url)
        for title in ("notebook, cell 1", "notebook, cell 2", "notebook, cell 3")
    ]
    code = (
        "import json, sys, nbformat\n"
        "from nbclient import NotebookClient\n"
        "book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in json.load(open('cells.json'))])\n"
        "NotebookClient(book, timeout=60, kernel_name='python3').execute()\n"
        "print(json.dumps([[out.get('text') or out['data']['text/plain'] for out in cell.outputs] for cell in book.cells]))\n"
    )
    (kitchen.folder / "cells.json").write_text(json.dumps(cells), "utf-8")
    env = {"JUPYTER_PLATFORM_DIRS": "1", "IPYTHONDIR": str(kitchen.folder), "HOME": str(kitchen.folder)}
    shown = json.loads(kitchen.run(str(kitchen.python), "-W", "ignore", "-c", code, **env))
    assert shown[0] == []
    assert "".join(shown[1]).startswith("You said: Say hello")
    assert "handshake tcp" in shown[1][-1] or "Timeline" in shown[1][-1]
    assert shown[2] == ["You said: Say hello\n"]


def test_langgraph(kitchen: Kitchen) -> None:
    kitchen.file("graph.py")
    tool = ScriptedTool("get_weather", ['{"city"', ': "Lisbon"}'])
    kitchen.server.script(Script(tool_calls=[tool]), times=1)
    kitchen.server.script(Script.say("Sunny."))
    said = kitchen.run(str(kitchen.python), "graph.py")
    assert said.splitlines() == [
        "human: Weather in Lisbon?", "ai: ", "tool: It is sunny in Lisbon.", "ai: Sunny.", "False", "True",
    ]  # fmt: skip
    assert kitchen.server.connections == 1


class Collector(ThreadingHTTPServer):
    """Takes OTLP over HTTP, as a backend does."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Export)
        self.spans: list[str] = []


class Export(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        message = ExportTraceServiceRequest.FromString(body)
        self.server.spans += [
            span.name for resource in message.resource_spans for scope in resource.scope_spans for span in scope.spans
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


def test_a_tracing_backend(kitchen: Kitchen, collector: Collector) -> None:
    kitchen.file("traced.py")
    address = f"http://127.0.0.1:{collector.server_port}"
    said = kitchen.run(str(kitchen.python), "traced.py", OTEL_EXPORTER_OTLP_ENDPOINT=address)
    assert said == "You said: Say hello\n"
    assert {"chat my-model", "spanwire.connection_setup", "tcp"} <= set(collector.spans)


AGENT = """
import openai

client = openai.OpenAI(base_url={url!r}, api_key="any")
question = [{{"role": "user", "content": "Say hello"}}]
for chunk in client.chat.completions.create(model="my-model", messages=question, stream=True):
    print(chunk.choices[0].delta.content or "" if chunk.choices else "", end="")
"""


@pytest.mark.timeout(400, func_only=True)  # it has an environment of its own to install
def test_an_agent_below_opentelemetry_instrument(tmp_path: Path, server: LoopbackServer, collector: Collector) -> None:
    """With what docs/instrument.md exports, and nothing else: without its protocol the distro wants an exporter for gRPC."""
    page = (ROOT / "docs" / "instrument.md").read_text("utf-8")
    block = page.partition("## Without a line")[2].partition("```sh\n")[2].partition("```")[0]
    assert 'pip install "spanwire[instrument,otel]" opentelemetry-distro\n' in block
    exports = dict(re.findall(r"([A-Z_]+)=(\S+)", block))
    assert exports["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://localhost:4318"
    exports["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{collector.server_port}"
    kitchen = Kitchen(
        tmp_path, environment("recipes-distro", "instrument,otel", "opentelemetry-distro", "openai"), server
    )
    (tmp_path / "agent.py").write_text(AGENT.format(url=server.url), "utf-8")
    said = kitchen.run(*kitchen.command("opentelemetry-instrument", str(kitchen.python), "agent.py"), **exports)
    assert said == "You said: Say hello"
    assert "chat my-model" in collector.spans


def test_behind_a_corporate_proxy(kitchen: Kitchen) -> None:
    """mitmproxy opens TLS and signs with a CA of its own, as such proxies do."""
    mitm = python_peer("mitmproxy", "mitmproxy")
    with LoopbackServer(tls=True) as server:
        assert server.ca is not None
        url = server.url.replace("127.0.0.1", "localhost")
        kitchen.file("behind_a_proxy.py", url=url)
        port, folder = free_port(), kitchen.folder / "mitm"
        command = [
            str(mitm.parent / "mitmdump"), "--listen-host", "127.0.0.1", "--listen-port", str(port),
            "--set", f"confdir={folder}", "--set", f"ssl_verify_upstream_trusted_ca={server.ca}",
        ]  # fmt: skip
        with running("recipe-mitmproxy", command, ready=listening(port), limit_s=60, cwd=kitchen.folder):
            authority = folder / "mitmproxy-ca-cert.pem"
            ssl.create_default_context(cafile=authority)  # it is one
            env = {"HTTPS_PROXY": f"http://127.0.0.1:{port}", "NO_PROXY": ""}
            said = kitchen.run(str(kitchen.python), "behind_a_proxy.py", SSL_CERT_FILE=str(authority), **env)
            assert said.count("You said: Say hello") == 2
            assert "handshake proxy" in said
            assert said.count("handshake tls") == 1  # the second call re-uses the tunnel
            assert server.connections == 1
            with pytest.raises(AssertionError) as refused:
                kitchen.run(str(kitchen.python), "behind_a_proxy.py", SSL_CERT_FILE="", **env)
            assert "ConnectionFailed" in str(refused.value)
            assert "SSL_CERT_FILE" in str(refused.value) or "ca=" in str(refused.value)
    assert server.requests
