"""The server for benchmarks: its scripts, and what it says of itself."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest

from benchmarks import clients, processes, server


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with processes.serving(None) as port:
        yield f"http://127.0.0.1:{port}/v1"


@pytest.mark.parametrize(
    ("model", "script"),
    [
        ("m-200-0-1", ("m", 200, 0.0, 1)),
        ("m-100-20000-5", ("m", 100, 0.02, 5)),
        ("m-2-0", ("m", 2, 0.0, 1)),
        ("t-3000-20000", ("t", 3000, 0.02, 1)),
        ("f-10", ("f", 10, 0.0, 1)),
    ],
)
def test_scripts(model: str, script: tuple[str, int, float, int]) -> None:
    assert server.Script.parse(model) == script


@pytest.mark.parametrize("model", ["gpt-4", "x-1-0-1", "m", "m-a-0-1", "m-1-0-1-1"])
def test_what_is_no_script(model: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - whatever it is that is wrong
        server.Script.parse(model)


def texts(answer: bytes) -> list[str]:
    """The tokens in an answer, as it went over the wire."""
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    pieces = [piece.partition(b'"')[0].decode() for piece in answer.split(b'"content":"')[1:]]
    return [piece for piece in pieces if piece]  # the first chunk has the role, and no text


@contextmanager
def calling(url: str, model: str) -> Iterator[socket.socket]:
    """A call whose answer is read as slowly as one likes."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", int(url.split(":")[2].split("/", maxsplit=1)[0])))
        body = json.dumps({"model": model, "stream": True}).encode()
        connection.sendall(b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        yield connection


def read(connection: socket.socket) -> list[str]:
    answer = bytearray()
    while not answer.endswith(b"0\r\n\r\n"):
        answer += connection.recv(1 << 20)
    return texts(bytes(answer))


def follow(url: str, model: str) -> list[str]:
    with calling(url, model) as connection:
        return read(connection)


def test_timed_tokens_say_when_they_were_written(url: str) -> None:
    begun_ns = time.monotonic_ns()
    stamps = [int(text) for text in follow(url, "t-20-1000")]
    assert len(stamps) == 20
    assert begun_ns < stamps[0]
    assert stamps == sorted(stamps)
    assert stamps[-1] < time.monotonic_ns()
    assert stamps[-1] - stamps[0] > 10_000_000  # 20 ms by the script; it may catch up with what it was late by


def test_log_says_how_late_timed_tokens_were(url: str) -> None:
    clients.server_log(url)
    follow(url, "t-20-1000")
    late_ms = clients.server_log(url)["late_ms"]
    assert 0 < late_ms["p50"] <= late_ms["p99"]
    assert clients.server_log(url)["late_ms"] == {"p50": 0.0, "p99": 0.0}


def test_timed_tokens_wait_for_a_client_that_does_not_read_and_lose_nothing(url: str) -> None:
    tokens, begun_ns = 20_000, time.monotonic_ns()  # all due within 20 ms
    with calling(url, f"t-{tokens}-1") as connection:
        connection.recv(1, socket.MSG_PEEK)
        while clients.server_log(url)["late_ms"]["p50"]:  # 0: none was written since we last asked
            pass
        stamps = [int(text) for text in read(connection)]
    assert len(stamps) == tokens
    assert begun_ns < stamps[0]
    # What it could not write says when it was due, a microsecond apart; before that, when it was written.
    assert {later - earlier for earlier, later in pairwise(stamps[-1000:])} == {1000}


def test_flood_is_poured_out_as_it_is_taken(url: str) -> None:
    clients.server_log(url)
    assert len(follow(url, "f-1234")) == 1234
    assert clients.server_log(url)["poured"] == 1234 * len(server.WORDS[0])


def test_flood_waits_for_a_client_that_does_not_read(url: str) -> None:
    tokens, poured = 60_000, 0
    clients.server_log(url)
    with calling(url, f"f-{tokens}") as connection:
        connection.recv(1, socket.MSG_PEEK)
        while now := clients.server_log(url)["poured"]:  # 0: nothing since we last asked
            poured += now
        assert 0 < poured < tokens * len(server.WORDS[0])
        assert len(read(connection)) == tokens


def test_no_script_is_told(url: str) -> None:
    with calling(url, "gpt-4") as connection:
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 400 Bad Request")


def test_lateness_is_counted_in_steps() -> None:
    log = server.Log()
    for late_ns in [0] * 98 + [250_000] * 2:
        log.written(late_ns)
    assert (log.late_ms(0.5), log.late_ms(0.98), log.late_ms(0.99)) == pytest.approx((0.1, 0.1, 0.3))
    log.written(10**12)  # beyond the last step
    assert log.late_ms(1.0) == pytest.approx(1000.0)
