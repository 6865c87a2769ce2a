"""The self-check: what stands between the world and the receiver."""

from __future__ import annotations

import http.client
import http.server
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from spanwire_webhook.embedded import EmbeddedReceiver
from spanwire_webhook.selfcheck import self_check
from spanwire_webhook.url_mac import URLMac

from spanwire.errors import ConfigurationError

from .fakes import Yard


@pytest.fixture
def yard() -> Iterator[Yard]:
    made = Yard()
    made.now_s = time.time()
    yield made
    made.close()


@contextmanager
def relay(served: EmbeddedReceiver, how: str) -> Iterator[str]:
    """Something that stands in front of the receiver, and does not leave things as they are."""

    class Relay(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if how == "redirect" or (how == "redirect-slash" and not self.path.endswith("/")):
                return self._say(301, b"", location=self.path + "/")
            if how == "html":
                return self._say(200, b"<!doctype html><title>Log in</title>", content_type="text/html")
            if how == "json":
                return self._say(200, b'{"ok":true}')
            if how == "anew":
                body = json.dumps(json.loads(body)).encode()
            connection = http.client.HTTPConnection(served.host, served.port, timeout=10)
            connection.request("POST", self.path, body)
            answer = connection.getresponse()
            said = answer.read()
            connection.close()
            if how == "cache":
                said = kept.setdefault("said", said)
            return self._say(answer.status, said)

        def _say(self, status: int, body: bytes, **headers: str) -> None:
            self.send_response(status)
            for name, value in {"content_length": str(len(body)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    kept: dict[str, bytes] = {}
    server = http.server.HTTPServer(("127.0.0.1", 0), Relay)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/hooks"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("how", "problems"),
    [
        ("nothing", []),
        (
            "redirect",
            [
                "without a slash at the end: it answers with a redirect (301)",
                "with a slash at the end: it answers with a redirect",
            ],
        ),
        ("redirect-slash", ["without a slash at the end: it answers with a redirect (301)"]),
        ("html", ["page of HTML", "page of HTML"]),
        ("json", ["not as the receiver does", "not as the receiver does"]),
        ("anew", ["the body arrives changed", "the body arrives changed"]),
        ("cache", ["something in between has a cache"]),
    ],
)
def test_what_stands_in_front_is_found(yard: Yard, how: str, problems: list[str]) -> None:
    with EmbeddedReceiver(yard.receiver) as served, relay(served, how) as url:
        checked = self_check(url, yard.receiver.mac)
    assert len(checked.problems) == len(problems)
    assert all(expected in problem for expected, problem in zip(problems, checked.problems, strict=True))
    if not problems:
        assert checked.round_trip_s is not None
        assert checked.offset_s is not None
        assert abs(checked.offset_s) < 60


def test_clocks_another_key_and_nobody_there(yard: Yard) -> None:
    with EmbeddedReceiver(yard.receiver) as served:
        (problem,) = self_check(served.url, yard.receiver.mac, clock=lambda: time.time() - 400).problems
        assert "clock differs" in problem
        problems = self_check(served.url, URLMac([b"k" * 32])).problems
        assert all("404: another instance key" in problem for problem in problems)
        assert len(problems) == 2
    (problem,) = self_check(served.url, yard.receiver.mac).problems
    assert "cannot be reached" in problem
    with pytest.raises(ConfigurationError):
        self_check("ftp://x", yard.receiver.mac)
