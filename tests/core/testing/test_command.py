"""``python -m spanwire.testing``, as a process of its own."""

import http.client
import json
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from spanwire.testing import LoopbackServer

COMMAND = [sys.executable, "-m", "spanwire.testing"]


@contextmanager
def running(*arguments: str, stop: signal.Signals = signal.SIGINT) -> Iterator[list[str]]:
    """The words of its one line; then stopped, with exit code 0 and nothing on stderr."""
    process = subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()
        process.send_signal(stop)
        assert process.communicate(timeout=20) == ("", "")
        assert process.returncode == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def ask(url: str, *, stream: bool = False, ca: str | None = None) -> bytes:
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection = (
        http.client.HTTPConnection(parts.hostname, parts.port, timeout=20)
        if ca is None
        else http.client.HTTPSConnection(
            parts.hostname, parts.port, timeout=20, context=ssl.create_default_context(cafile=ca)
        )
    )
    body = {"model": "m", "stream": stream, "messages": [{"role": "user", "content": "hi"}]}
    connection.request("POST", f"{parts.path}/chat/completions", json.dumps(body))
    answer = connection.getresponse().read()
    connection.close()
    return answer


def test_prints_its_url_serves_and_ends_well_on_ctrl_c() -> None:
    with running() as (url,):
        assert b"You said: hi" in ask(url)


@pytest.mark.long
def test_ends_well_when_it_is_terminated() -> None:
    with running(stop=signal.SIGTERM) as (url,):
        assert url.startswith("http://127.0.0.1:")


def test_delays_and_tokens_by_option() -> None:
    with running("--tokens", "3", "--queue-ms", "10", "--prefill-ms", "20", "--token-gap-ms", "15") as (url,):
        start = time.perf_counter()
        answer = ask(url, stream=True)
        assert time.perf_counter() - start >= 0.059
        assert answer.count(b'"content":" t') == 3


@pytest.mark.long
def test_reports_its_times_in_a_dialect() -> None:
    with running("--tokens", "1", "--prefill-ms", "20", "--server-timing", "llama.cpp") as (url,):
        assert b'"timings":{"prompt_ms":' in ask(url, stream=True)


def test_tls_names_the_file_to_trust() -> None:
    with running("--tls") as (url, ca):
        name, _, file = ca.partition("=")
        assert name == "ca"
        assert b"You said: hi" in ask(url, ca=file)
    assert not Path(file).exists()


@pytest.mark.long
def test_listens_on_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with running("--uds", str(path)) as (url, uds):
        assert url == "http://localhost/v1"
        assert uds == f"uds={path}"
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(20)
            client.connect(str(path))
            client.sendall(b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            assert client.recv(15) == b"HTTP/1.1 200 OK"
    assert not path.exists()


def test_a_part_may_have_options() -> None:
    arguments = ("--part", "websocket", "--option", "max_clients=0", "--option", "when_full=429")
    with running(*arguments) as (url,):
        parts = urlsplit(url)
        assert parts.scheme == "ws"
        assert parts.port is not None
        connection = http.client.HTTPConnection("127.0.0.1", parts.port, timeout=20)
        connection.request("GET", "/v1/responses")
        assert connection.getresponse().status == 429
        connection.close()


def test_an_address_that_is_taken_is_one_line_and_exit_code_1() -> None:
    with LoopbackServer() as server:
        done = subprocess.run(
            [*COMMAND, "--port", str(server.port)], capture_output=True, text=True, timeout=20, check=False
        )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("cannot listen: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--queue-ms", "-1"], "queue_s"),
        (["--part", "nothing"], "nothing"),
        (["--port", "x"], "--port"),
        (["--option", "max_clients"], "NAME=VALUE"),
        (["--option", "max_clients=1"], "'sse' has no options: max_clients"),
        (["--part", "websocket", "--option", "max_clients=many"], "max_clients"),
    ],
)
def test_wrong_options_are_explained_with_exit_code_2(arguments: list[str], words: str) -> None:
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
