"""Key sets: what is taken, and how often they are loaded."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from spanwire_webhook.keys import KEEP_S, LEAST_RELOAD_S, KeySet, fetch

SETS: dict[str, Any] = json.loads((Path(__file__).parent / "signatures.json").read_text())["key_sets"]


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_broken_key_is_left_out_and_a_broken_set_changes_nothing() -> None:
    keys = KeySet(SETS["fal_with_broken_key"])
    assert len(keys.ed25519) == 1
    keys.replace(b"<html>")
    keys.replace(b'{"keys":[]}')
    assert len(keys.ed25519) == 1


@pytest.mark.parametrize("exponent", ["AQ", "Ag", "", "AQABAQABAQAB"])
def test_an_exponent_that_proves_nothing_is_left_out(exponent: str) -> None:
    key = SETS["gemini"]["keys"][0]
    assert KeySet({"keys": [key]}).rs256.keys() == {"g1"}
    assert KeySet({"keys": [{**key, "e": exponent}]}).rs256 == {}
    assert KeySet({"keys": [{**key, "use": "enc"}]}).rs256 == {}
    assert KeySet({"keys": [{**key, "n": key["n"][:100]}]}).rs256 == {}


def test_a_set_is_loaded_once_a_minute_at_most_and_is_stale_after_a_day() -> None:
    clock, loads = Clock(), [0]

    def load() -> bytes:
        loads[0] += 1
        return json.dumps(SETS["fal"]).encode()

    keys = KeySet(load=load, clock=clock)
    assert keys.stale()
    assert keys.reload()
    assert not keys.stale()
    clock.now += LEAST_RELOAD_S - 1
    assert not keys.reload()
    assert loads == [1]
    clock.now += 1
    assert keys.reload()
    assert loads == [2]
    clock.now += KEEP_S + 1
    assert keys.stale()
    assert not KeySet(SETS["fal"]).reload()


def test_a_set_that_cannot_be_loaded_is_tried_again_later() -> None:
    clock = Clock()

    def fails() -> bytes:
        raise ConnectionRefusedError

    keys = KeySet(load=fails, clock=clock)
    assert not keys.reload()
    assert keys.stale()


class _Pages(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status, body = {
            "/keys": (200, json.dumps(SETS["fal"]).encode()),
            "/away": (302, b""),
            "/big": (200, b"x" * 300_000),
        }[self.path]
        self.send_response(status)
        self.send_header("location", "/keys")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def pages() -> Iterator[str]:
    server = http.server.HTTPServer(("127.0.0.1", 0), _Pages)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_set_is_fetched_without_redirects_and_within_bounds(pages: str) -> None:
    assert len(KeySet(fetch(f"{pages}/keys")).ed25519) == 2
    with pytest.raises(ValueError, match="302"):
        fetch(f"{pages}/away")
    with pytest.raises(ValueError, match="over"):
        fetch(f"{pages}/big")
