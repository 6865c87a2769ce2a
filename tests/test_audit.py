"""The audit of dependencies, against an advisory service that says what a test wants."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
ADVISORY = {
    "id": "TEST-1",
    "summary": "made up",
    "modified": "2026-01-01T00:00:00Z",
    "published": "2026-01-01T00:00:00Z",
    "affected": [{"package": {"ecosystem": "PyPI", "name": "msgspec"}, "ranges": []}],
}


class Service(ThreadingHTTPServer):
    """OSV's two requests. Source: https://google.github.io/osv.dev/post-v1-querybatch/"""

    def __init__(self, bad: str) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.bad = bad
        self.asked: list[str] = []


class Answer(BaseHTTPRequestHandler):
    server: Service

    def do_POST(self) -> None:
        queries = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["queries"]
        names = [query["package"]["name"] for query in queries]
        self.server.asked += names
        known = {"vulns": [{"id": ADVISORY["id"], "modified": ADVISORY["modified"]}]}
        self._say({"results": [known if name == self.server.bad else {} for name in names]})

    def do_GET(self) -> None:
        self._say(ADVISORY)

    def _say(self, data: Any) -> None:
        body = json.dumps(data).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    with Service(request.param) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join(10)


def audit(port: int, **env: str) -> subprocess.CompletedProcess[str]:
    given = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "audit.py", "--service-url", f"http://127.0.0.1:{port}/"],
        env={**given, "UV_HTTP_RETRIES": "0", "SPANWIRE_AUDIT": "", **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if "too old for `uv audit`" in done.stderr:
        pytest.skip("an older uv is installed here")
    return done


@pytest.mark.parametrize(("service", "code"), [("msgspec", 1), ("nobody", 0)], indirect=["service"])
def test_a_known_vulnerability_fails(service: Service, code: int) -> None:
    done = audit(service.server_port)
    assert done.returncode == code, done.stderr
    assert ("TEST-1" in done.stdout) == bool(code)
    # What users get, and what we work with; never ourselves.
    assert {"msgspec", "pluggy", "litellm", "langchain-core", "grpcio", "uvicorn", "pytest"} <= set(service.asked)
    assert not [name for name in service.asked if "spanwire" in name]


@pytest.mark.parametrize(("setting", "code", "word"), [("", 0, "warning"), ("require", 1, "error")])
def test_nobody_can_be_asked(setting: str, code: int, word: str) -> None:
    done = audit(1, SPANWIRE_AUDIT=setting)
    assert done.returncode == code
    assert done.stderr.startswith(f"{word}: no audit of dependencies: the advisory service could not be asked (")
    assert done.stderr.count("\n") == 1
