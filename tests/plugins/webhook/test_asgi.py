"""The receiver behind a real uvicorn, talked to over sockets; and mounted in an application that is not ours."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from spanwire_webhook.asgi import WebhookApp
from spanwire_webhook.embedded import EmbeddedReceiver
from spanwire_webhook.receiver import Receiver, Reception
from spanwire_webhook.settings import ReceiverSettings

from spanwire.errors import ConfigurationError

from .fakes import SECRET, SETTINGS, Yard, said, signed, signed_now

T_WAIT = 10.0


class RealTime(Yard):
    def __init__(self, settings: ReceiverSettings = SETTINGS) -> None:
        super().__init__(settings)
        self.receiver = Receiver(self.store, self.codecs, settings)


@pytest.fixture
def yard() -> Iterator[RealTime]:
    made = RealTime()
    yield made
    made.close()


@pytest.fixture
def served(yard: RealTime) -> Iterator[EmbeddedReceiver]:
    with EmbeddedReceiver(yard.receiver) as server:
        yield server


def until(condition: Callable[[], object]) -> None:
    give_up_s = time.monotonic() + T_WAIT
    while not condition():
        assert time.monotonic() < give_up_s
        time.sleep(0.005)


def head(path: str, headers: list[tuple[str, str]], length: int | None = None, method: str = "POST") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: h", *(f"{name}: {value}" for name, value in headers)]
    lines.append("transfer-encoding: chunked" if length is None else f"content-length: {length}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def connect(served: EmbeddedReceiver) -> socket.socket:
    return socket.create_connection((served.host, served.port), timeout=T_WAIT)


def answer_of(sock: socket.socket) -> http.client.HTTPResponse:
    answer = http.client.HTTPResponse(sock)
    answer.begin()
    answer.read()
    return answer


def post(served: EmbeddedReceiver, path: str, headers: list[tuple[str, str]], body: bytes) -> int:
    with connect(served) as sock:
        sock.sendall(head(path, headers, len(body)) + body)
        return answer_of(sock).status


def test_over_a_socket(served: EmbeddedReceiver, yard: RealTime) -> None:
    body = said()
    path = yard.path("generic")
    with connect(served) as sock:  # one connection for all of it
        statuses = []
        for headers, data in ((signed_now(body), body), (signed_now(body), body), (signed_now(body), body + b" ")):
            sock.sendall(head(path + "/?a=b", headers, len(data)) + data)
            statuses.append(answer_of(sock).status)
        assert statuses == [204, 200, 401]
        sock.sendall(head(path, [], 0, "GET"))
        assert answer_of(sock).status == 405
        sock.sendall(head("/robots.txt", [], 0))
        refused = answer_of(sock)
        assert (refused.status, refused.getheader("connection")) == (404, "close")
        assert refused.getheader("server") is None


def test_the_mac_is_checked_before_a_body_is_asked_for(served: EmbeddedReceiver, yard: RealTime) -> None:
    expecting = [("expect", "100-continue")]
    with connect(served) as sock:
        sock.sendall(head(yard.path("generic")[:-2] + "xx", expecting, 1000))
        assert sock.recv(100).startswith(b"HTTP/1.1 404")
    with connect(served) as sock:
        sock.sendall(head(yard.path("generic"), expecting, 1000))
        assert sock.recv(100).startswith(b"HTTP/1.1 100")
    with connect(served) as sock:
        sock.sendall(head(yard.path("generic"), expecting, 10**9))
        assert sock.recv(100).startswith(b"HTTP/1.1 413")


def test_a_slow_sender_piece_by_piece(served: EmbeddedReceiver, yard: RealTime) -> None:
    body = said()
    whole = head(yard.path("generic"), signed_now(body), len(body)) + body
    with connect(served) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in whole:
            sock.sendall(bytes([byte]))
        assert answer_of(sock).status == 204
    assert yard.inbox()[0].body == body


def test_chunked(served: EmbeddedReceiver, yard: RealTime) -> None:
    body = said(text="x" * 200_000)
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:7], body[7:150_000], body[150_000:]))
    with connect(served) as sock:
        sock.sendall(head(yard.path("generic"), signed_now(body)) + chunks + b"0\r\n\r\n")
        assert answer_of(sock).status == 204
    assert yard.inbox()[0].body == body


def test_chunked_without_an_end_is_cut_at_the_limit() -> None:
    yard = RealTime(ReceiverSettings(secrets=SETTINGS.secrets, body_limit_bytes=100_000))
    with EmbeddedReceiver(yard.receiver) as served, connect(served) as sock:
        sock.sendall(head(yard.path("generic"), signed_now(b"")))
        for _ in range(11):
            sock.sendall(b"%x\r\n%s\r\n" % (10_000, b"x" * 10_000))
        assert answer_of(sock).status == 413
    yard.close()


def test_a_sender_that_goes_away_in_the_middle_leaves_nothing(served: EmbeddedReceiver, yard: RealTime) -> None:
    body = said(text="x" * 3_000_000)
    for length in (1, 100, 2_000_000):
        with connect(served) as sock:
            sock.sendall(head(yard.path("generic"), signed_now(body), len(body)) + body[:length])
    until(lambda: yard.count("disconnected") == 3)
    assert (yard.inbox(), yard.quarantine(), yard.store.batches) == ([], [], [])
    assert post(served, yard.path("generic"), signed_now(body), body) == 204


def test_a_sender_that_stops_is_408() -> None:
    yard = RealTime(ReceiverSettings(secrets=SETTINGS.secrets, idle_s=0.05))
    with EmbeddedReceiver(yard.receiver) as served, connect(served) as sock:
        sock.sendall(head(yard.path("generic"), [], 100) + b"x")
        assert answer_of(sock).status == 408
    assert (yard.count("timeout"), yard.inbox()) == (1, [])
    yard.close()


def test_pipelined_posts_are_answered_in_order(served: EmbeddedReceiver, yard: RealTime) -> None:
    path = yard.path("generic")
    requests = []
    for n in range(20):
        body = said(f"p{n}")
        requests.append(head(path, signed_now(body, id=f"m{n % 10}"), len(body)) + body)
    with connect(served) as sock:
        sock.sendall(b"".join(requests))
        reader = sock.makefile("rb")
        statuses: list[int] = []
        while len(statuses) < 20:
            line = reader.readline()
            assert line
            if line.startswith(b"HTTP/1.1 "):
                statuses.append(int(line.split()[1]))
        reader.close()
    assert statuses == [204] * 10 + [200] * 10


def test_the_same_delivery_at_the_same_moment_is_new_once(served: EmbeddedReceiver, yard: RealTime) -> None:
    body, path = said(), yard.path("generic")
    headers = signed_now(body)
    ready = threading.Barrier(8)
    statuses: list[int] = []

    def send() -> None:
        with connect(served) as sock:
            ready.wait()
            sock.sendall(head(path, headers, len(body)) + body)
            statuses.append(answer_of(sock).status)

    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(statuses) == [200] * 7 + [204]
    assert len(yard.inbox()) == 1


def test_a_head_without_an_end_is_refused_while_it_comes(served: EmbeddedReceiver, yard: RealTime) -> None:
    with connect(served) as sock:
        try:
            sock.sendall(head(yard.path("generic"), [("a", "b")] * 100_000, 0))
            assert answer_of(sock).status == 431
        except (ConnectionResetError, BrokenPipeError):
            pass  # it hung up on the rest
    with connect(served) as sock:
        try:
            sock.sendall(b"POST / HTTP/1.1\r\nx: " + b"y" * 10_000_000)
            assert answer_of(sock).status == 431
        except (ConnectionResetError, BrokenPipeError):
            pass
    with connect(served) as sock:
        sock.sendall(head(yard.path("generic"), [("a", "b")] * 1000, 0))
        assert answer_of(sock).status == 431  # of a head that is small enough: too many lines
    body = said()
    assert post(served, yard.path("generic"), signed_now(body), body) == 204


def test_a_head_that_does_not_come_is_hung_up_on(yard: RealTime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spanwire_webhook.embedded._HEAD_S", 0.05)
    with EmbeddedReceiver(yard.receiver) as served:
        for start in (b"", b"POST /x HTTP/1.1\r\nhos"):
            with connect(served) as sock:
                sock.sendall(start)
                with contextlib.suppress(ConnectionResetError):
                    assert sock.recv(100) == b""


def test_503_when_the_store_is_down(served: EmbeddedReceiver, yard: RealTime) -> None:
    body, path = said(), yard.path("generic")
    yard.store.down = True
    with connect(served) as sock:
        sock.sendall(head(path, signed_now(body), len(body)) + body)
        answer = answer_of(sock)
        assert (answer.status, answer.getheader("retry-after")) == (503, "5")
        yard.store.down = False
        sock.sendall(head(path, signed_now(body), len(body)) + body)
        assert answer_of(sock).status == 204


def test_signal_handlers_and_loggers_stay_as_they_are(yard: RealTime) -> None:
    import logging

    access, error = logging.getLogger("uvicorn.access"), logging.getLogger("uvicorn.error")
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    levels = access.level, access.propagate, access.handlers[:], error.level
    with EmbeddedReceiver(yard.receiver):
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert (access.level, access.propagate, access.handlers, error.level) == levels


def test_addresses_are_not_logged(yard: RealTime, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    body, path = said(), yard.path("generic")
    with EmbeddedReceiver(yard.receiver) as served:
        post(served, path, signed_now(body), body)
    assert path.rpartition(".")[2] not in caplog.text
    assert SECRET not in caplog.text


def test_nothing_is_left_when_it_is_closed(yard: RealTime) -> None:
    before = set(threading.enumerate())
    served = EmbeddedReceiver(yard.receiver)
    body = said()
    assert post(served, yard.path("generic"), signed_now(body), body) == 204
    served.close()
    served.close()
    left = [thread.name for thread in set(threading.enumerate()) - before]
    assert [name for name in left if name.startswith("spanwire-")] == []
    with pytest.raises(ConnectionRefusedError):
        connect(served)


def test_a_port_that_is_taken_is_said(yard: RealTime, served: EmbeddedReceiver) -> None:
    with pytest.raises(ConfigurationError, match="cannot listen"):
        EmbeddedReceiver(yard.receiver, port=served.port)


# --- as an application ------------------------------------------------------------------------------------------------


async def ask(app: WebhookApp, scope: dict[str, Any], messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = []
    waiting = iter(messages)

    async def receive() -> dict[str, Any]:
        return next(waiting)

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent


def test_mounted_below_another_application() -> None:
    yard = Yard()
    app = WebhookApp(yard.receiver)
    body = said()

    async def main() -> None:
        for prefix, version in (("", "1.1"), ("/hooks", "2")):
            scope = {
                "type": "http",
                "http_version": version,
                "method": "POST",
                "path": prefix + yard.path("generic"),
                "root_path": prefix,
                "headers": [(name.encode(), value.encode()) for name, value in signed(body)],
            }
            request = {"type": "http.request", "body": body, "more_body": False}
            start, end = await ask(app, scope, [request])
            assert start["status"] == 204
            assert all(name != b"content-length" for name, _ in start["headers"])
            assert end["body"] == b""
            scope["path"] = "/nothing"
            start, _ = await ask(app, scope, [])
            assert start["status"] == 404
            assert ((b"connection", b"close") in start["headers"]) == (version == "1.1")  # HTTP/2 has no such header
        (closed,) = await ask(app, {"type": "websocket"}, [{"type": "websocket.connect"}])
        assert closed["type"] == "websocket.close"
        lived = await ask(app, {"type": "lifespan"}, [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])
        assert [message["type"] for message in lived] == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
        await app.aclose()

    asyncio.run(main())
    assert len(yard.inbox()) == 2
    yard.close()


def test_a_server_that_gives_up_a_request_gives_up_its_body_too(monkeypatch: pytest.MonkeyPatch) -> None:
    yard = Yard(ReceiverSettings(secrets=SETTINGS.secrets, spool_bytes=10))
    app = WebhookApp(yard.receiver)
    begun: list[Reception] = []
    begin = yard.receiver.begin

    def remembered(*head: Any) -> Reception:
        begun.append(begin(*head))
        return begun[0]

    monkeypatch.setattr(yard.receiver, "begin", remembered)

    async def main() -> None:
        pieces = iter([b"x" * 100])

        async def never() -> dict[str, Any]:
            for piece in pieces:
                return {"type": "http.request", "body": piece, "more_body": True}
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Any) -> None:
            raise AssertionError(message)

        scope = {"type": "http", "method": "POST", "path": yard.path("generic"), "headers": []}
        task = asyncio.create_task(app(scope, never, send))
        while not begun or begun[0].size < 100:
            await asyncio.sleep(0)
        spool: Any = begun[0]._body
        assert not spool.closed
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert spool.closed

    asyncio.run(main())
    assert yard.inbox() == []
    yard.close()


def test_the_answer_is_json_for_the_self_check(served: EmbeddedReceiver, yard: RealTime) -> None:
    with connect(served) as sock:
        sock.sendall(head(yard.path("self-check"), [], 2) + b"{}")
        answer = http.client.HTTPResponse(sock)
        answer.begin()
        assert json.loads(answer.read())["bytes"] == 2
