"""The handshake: what is sent, every answer that is no 101, a server that is full, and how one gets there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import traceback
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import spanwire
from spanwire import errors
from spanwire.testing import LoopbackServer
from tests.core.net.proxy_server import ProxyServer
from tests.plugins.websocket.raw_server import Peer, RawServer, answer, close_frame, error, raw_server
from tests.support import AT_ONCE, NEVER, assert_adds_up, chat, hello, read, run

FINE = answer("Hello")
Handler = Callable[[Peer], Awaitable[None]]


@pytest.fixture(autouse=True)
def _no_proxy_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for word in ("http", "https", "all", "no", "ws", "wss"):
        for name in (f"{word}_proxy", f"{word}_proxy".upper()):
            monkeypatch.delenv(name, raising=False)


@contextlib.contextmanager
def serving(*scripts: Any, **more: Any) -> Iterator[LoopbackServer]:
    more.setdefault("part", "websocket")
    with LoopbackServer([*scripts], **more) as server:
        yield server
    assert server.faults == []


def replies(data: bytes, *, keep: bool = False) -> Handler:
    """A server that answers the handshake with these bytes and ends the connection, or keeps it."""

    async def handler(peer: Peer) -> None:
        await peer.handshake()
        await peer.send(data)
        if keep:
            await peer.until_gone()

    return handler


async def fine(peer: Peer) -> None:
    await peer.upgrade()
    while True:
        await peer.request()
        await peer.send(FINE)


def refusal(status: str, *lines: str, body: str = "") -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *lines, "", body]).encode()


async def failure(server: RawServer, **more: Any) -> errors.SpanwireError:
    more.setdefault("retries", NEVER)
    async with spanwire.ConnectionManager(telemetry=None) as manager:
        with pytest.raises(errors.SpanwireError) as caught:
            await manager.complete(server.endpoint(**more), chat())
    assert caught.value.timeline is not None
    assert_adds_up(caught.value.timeline)
    return caught.value


# --- what is sent -------------------------------------------------------------------------------------------------------


def test_the_handshake_says_what_the_endpoint_says() -> None:
    async def body() -> None:
        async with raw_server(fine) as server, spanwire.ConnectionManager(telemetry=None) as manager:
            endpoint = spanwire.Endpoint(
                f"ws://127.0.0.1:{server.port}/v1/?a=1%202",
                api_key="sk-1",
                headers={"X-Team": "blue"},
                query={"b": "ä&="},
                proxy=None,
                options={"subprotocols": ["openai-beta.responses.v1", "second"]},
            )
            assert (await manager.complete(endpoint, chat())).text == "Hello"
            first, *lines = server.peers[0].head.decode().split("\r\n")
        assert first == "GET /v1/responses?a=1+2&b=%C3%A4%26%3D HTTP/1.1"
        found = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines if line)}
        assert found["host"] == f"127.0.0.1:{server.port}"
        assert found["authorization"] == "Bearer sk-1"
        assert found["x-team"] == "blue"
        assert found["user-agent"].startswith("spanwire/")
        assert found["sec-websocket-protocol"] == "openai-beta.responses.v1, second"
        assert found["sec-websocket-version"] == "13"
        assert "sec-websocket-extensions" not in found
        assert "openai-beta" not in found

    run(body)


@pytest.mark.parametrize("name", ["Host", "upgrade", "Connection", "Sec-WebSocket-Key", "Content-Length"])
def test_headers_of_the_handshake_itself_cannot_be_set(name: str) -> None:
    async def body() -> None:
        async with raw_server(fine) as server:
            problem = await failure(server, headers={name: "x"})
            assert isinstance(problem, errors.ConfigurationError)
            assert name.lower() in str(problem)
            assert server.peers == []

    run(body)


def test_an_own_authorization_header_wins_over_the_key() -> None:
    async def body() -> None:
        async with raw_server(fine) as server, spanwire.ConnectionManager(telemetry=None) as manager:
            await manager.complete(server.endpoint(api_key="sk-1", headers={"Authorization": "Key k2"}), chat())
            assert server.peers[0].head.lower().count(b"authorization:") == 1
            assert b"Key k2" in server.peers[0].head

    run(body)


# --- answers that are no 101 ----------------------------------------------------------------------------------------------


def test_a_key_that_the_server_repeats_is_in_no_traceback() -> None:
    async def body() -> None:
        async with raw_server(replies(refusal("200 OK", "sk-secret is no header"))) as server:
            problem = await failure(server, api_key="sk-secret")
            assert "sk-secret" not in "".join(traceback.format_exception(problem))

    run(body)


#: status, class, retryable, full.
STATUSES = [
    (400, errors.BadRequest, False, False),
    (401, errors.AuthenticationFailed, False, False),
    (403, errors.AuthenticationFailed, False, False),
    (404, errors.BadRequest, False, False),
    (405, errors.BadRequest, False, False),
    (426, errors.BadRequest, False, False),
    (429, errors.RateLimited, True, True),
    (500, errors.ServerError, True, False),
    (502, errors.ServerError, True, False),
    (503, errors.Overloaded, True, True),
    (504, errors.ServerError, True, False),
    (529, errors.Overloaded, True, True),
]


@pytest.mark.parametrize(("status", "kind", "retryable", "full"), STATUSES)
def test_a_refused_upgrade(status: int, kind: type[errors.ServerError], retryable: bool, full: bool) -> None:
    said = '{"error": {"message": "no room at the inn"}}'

    async def body() -> None:
        async with raw_server(replies(refusal(f"{status} X", "X-Request-Id: 7", body=said))) as server:
            problem = await failure(server, api_key="k")
            assert type(problem) is kind
            assert (problem.status, problem.phase, problem.retryable, problem.full) == (
                status,
                "upgrade",
                retryable,
                full,
            )
            assert "no room at the inn" in str(problem)
            assert str(status) in str(problem)
            assert problem.headers["x-request-id"] == "7"
            assert problem.endpoint == f"127.0.0.1:{server.port}"
            if status in (404, 405):
                assert "pass the upgrade on" in str(problem)
            assert len(server.peers) == 1

    run(body)


@pytest.mark.parametrize("status", [401, 403, 404])
def test_these_are_fatal_however_often_one_may_try(status: int) -> None:
    async def body() -> None:
        async with raw_server(replies(refusal(f"{status} X"))) as server:
            await failure(server, retries=AT_ONCE)
            assert len(server.peers) == 1

    run(body)


@pytest.mark.parametrize("status", [429, 500, 502, 503])
def test_these_are_tried_again(status: int) -> None:
    async def body() -> None:
        async with raw_server(replies(refusal(f"{status} X", "Retry-After: 0")), fine) as server:
            async with spanwire.ConnectionManager(telemetry=None) as manager:
                assert (await manager.complete(server.endpoint(retries=AT_ONCE), chat())).text == "Hello"
            assert len(server.peers) == 2

    run(body)


def test_retry_after_is_honoured() -> None:
    async def body() -> None:
        async with raw_server(replies(refusal("503 X", "Retry-After: 7"))) as server:
            problem = await failure(server)
            assert isinstance(problem, errors.Overloaded)
            assert problem.retry_after_s == 7

    run(body)


def test_an_endpoint_without_a_key_is_named() -> None:
    async def body() -> None:
        async with raw_server(replies(refusal("403 Forbidden"))) as server:
            assert "no api_key" in str(await failure(server))

    run(body)


CHUNKED = b"HTTP/1.1 503 Service Unavailable\r\nTransfer-Encoding: chunked\r\n\r\n6\r\nno roo\r\n1\r\nm\r\n0\r\n\r\n"


@pytest.mark.parametrize("keep", [False, True])
def test_a_refusal_with_a_chunked_body(keep: bool) -> None:
    async def body() -> None:
        async with raw_server(replies(CHUNKED, keep=keep)) as server:
            problem = await failure(server)
            assert isinstance(problem, errors.Overloaded), problem
            assert "no room" in str(problem)
            assert problem.full is True

    run(body)


def test_a_refusal_without_a_length_ends_with_the_connection() -> None:
    async def body() -> None:
        async with raw_server(replies(b"HTTP/1.1 429 X\r\n\r\nslow down")) as server:
            problem = await failure(server)
            assert isinstance(problem, errors.RateLimited)
            assert "slow down" in str(problem)

    run(body)


@pytest.mark.parametrize("body_", ["<html><body>Welcome</body></html>", '{"status": "ok"}', ""])
def test_a_200_is_no_websocket(body_: str) -> None:
    async def body() -> None:
        async with raw_server(replies(refusal("200 OK", "Content-Type: text/html", body=body_))) as server:
            problem = await failure(server, retries=AT_ONCE)
            assert isinstance(problem, errors.ProtocolError)
            assert "no WebSocket" in str(problem)
            assert "<" not in str(problem)
            assert (problem.phase, problem.retryable) == ("upgrade", False)
            assert len(server.peers) == 1

    run(body)


def test_a_redirect_is_told_and_not_followed_with_the_key() -> None:
    async def body() -> None:
        location = "Location: wss://user:pw@other.example/v1/responses?token=hidden"
        async with raw_server(replies(refusal("307 Moved", location))) as server:
            problem = await failure(server, api_key="k", retries=AT_ONCE)
            assert isinstance(problem, errors.ServerError)
            assert problem.retryable is False
            assert "wss://other.example/v1/responses" in str(problem)
            assert "pw" not in str(problem)
            assert "hidden" not in str(problem)
            assert len(server.peers) == 1

    run(body)


@pytest.mark.parametrize("location", ["", "/elsewhere", "http://[", "//x:99999999/"])
def test_a_redirect_to_nowhere(location: str) -> None:
    async def body() -> None:
        async with raw_server(replies(refusal("302 Found", f"Location: {location}"))) as server:
            problem = await failure(server)
            assert isinstance(problem, errors.ServerError), problem
            assert problem.status == 302

    run(body)


@pytest.mark.parametrize(
    ("data", "retryable"),
    [
        (b"", True),
        (b"HTTP/1.1 101 Switching", True),
        (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n", True),
        (b"HTTP/1.1 503 X\r\nContent-Length: 100\r\n\r\nno", True),
        (b"SSH-2.0-OpenSSH_9.2\r\n", False),
        (b"\x15\x03\x01\x00\x02\x02\x46" * 20 + b"\r\n", False),
        (b"220 smtp.example ESMTP\r\n", False),
        (b"HTTP/1.1 abc X\r\n\r\n", False),
        (b"HTTP/1.1 101 X\r\nbroken header\r\n\r\n", False),
        (b"HTTP/1.1 101 X\r\n" + b"x: y\r\n" * 10_000 + b"\r\n", False),
        (b"HTTP/1.1 101 X\r\nx: " + b"y" * 1_000_000 + b"\r\n\r\n", False),
        (b"x" * 1_000_000, False),
        (b"HTTP/1.1 503 X\r\nContent-Length: 99999999999\r\n\r\n", False),
        (b"HTTP/1.1 503 X\r\nContent-Length: many\r\n\r\n", False),
        (b"HTTP/1.1 503 X\r\nTransfer-Encoding: gzip\r\n\r\n", False),
    ],
)
def test_an_answer_that_is_none(data: bytes, retryable: bool) -> None:
    async def body() -> None:
        async with raw_server(replies(data, keep=not retryable)) as server:
            problem = await failure(server)
            assert isinstance(problem, errors.ConnectionFailed), problem
            assert problem.phase == "upgrade"
            assert problem.retryable is retryable
            assert problem.__cause__ is not None
            assert len(str(problem)) < 300

    run(body)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.binary(max_size=200), st.booleans())
def test_any_garbage_is_an_error_of_ours(data: bytes, status: bool) -> None:
    async def body() -> None:
        async with raw_server(replies((b"HTTP/1.1 " if status else b"") + data)) as server:
            assert isinstance(
                await failure(server), (errors.ConnectionFailed, errors.ServerError, errors.ProtocolError)
            )

    run(body)


def switching(**changed: str | None) -> Handler:
    """A 101 with other headers than it should have."""

    async def handler(peer: Peer) -> None:
        await peer.handshake()
        lines = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Accept": peer.accept}
        lines.update({name.replace("_", "-"): value for name, value in changed.items() if value is not None})
        for name, value in changed.items():
            if value is None:
                lines.pop(name.replace("_", "-"))
        head = ["HTTP/1.1 101 Switching Protocols", *(f"{name}: {value}" for name, value in lines.items())]
        await peer.send("\r\n".join([*head, "", ""]).encode())
        await peer.until_gone()

    return handler


@pytest.mark.parametrize(
    "changed",
    [
        {"Sec_WebSocket_Accept": "AAAAAAAAAAAAAAAAAAAAAAAAAAA="},
        {"Sec_WebSocket_Accept": None},
        {"Upgrade": "h2c"},
        {"Upgrade": None},
        {"Connection": "close"},
        {"Sec_WebSocket_Protocol": "other"},
        {"Sec_WebSocket_Extensions": "permessage-deflate"},
    ],
    ids=str,
)
def test_a_101_with_something_wrong_in_it(changed: dict[str, str | None]) -> None:
    async def body() -> None:
        async with raw_server(switching(**changed)) as server:
            problem = await failure(server, options={"subprotocols": ["mine"]}, retries=AT_ONCE)
            assert isinstance(problem, errors.ConnectionFailed)
            assert (problem.phase, problem.retryable) == ("upgrade", False)
            assert "the server's answer to the upgrade is wrong" in str(problem)
            assert len(server.peers) == 1

    run(body)


# --- a server that is full --------------------------------------------------------------------------------------------------


def parts(timeline: spanwire.Timeline, segment: str) -> dict[str, float]:
    found = timeline.segments.get(segment)
    return {name: part.duration_s for name, part in found.parts.items()} if found is not None else {}


def test_an_upgrade_that_waits_is_queue_and_not_handshake() -> None:
    with serving(hello(), options={"upgrade_s": 0.3}) as server:

        async def body() -> None:
            async with spanwire.ConnectionManager(telemetry=None) as manager:
                timeline = (await manager.complete(server.endpoint(), chat())).timeline
                assert timeline is not None
                assert_adds_up(timeline)
                assert parts(timeline, "queue")["server"] > 0.27
                assert timeline.segments["handshake"].duration_s < timeline.segments["queue"].duration_s

        run(body)


def test_an_upgrade_that_waits_and_is_then_refused_was_a_wait_too() -> None:
    async def late(peer: Peer) -> None:
        await peer.handshake()
        await asyncio.sleep(0.3)
        await peer.send(refusal("503 X"))

    async def body() -> None:
        async with raw_server(late) as server:
            problem = await failure(server)
            assert problem.full
            assert problem.timeline is not None
            assert problem.timeline.segments["queue"].duration_s > 0.27

    run(body)


def test_an_upgrade_that_is_never_answered_is_a_full_server_and_no_broken_network() -> None:
    """Envoy's circuit breaker."""

    async def body() -> None:
        async with raw_server(replies(b"", keep=True)) as server:
            problem = await failure(server, timeouts=spanwire.Timeouts(connect_s=0.3))
            assert isinstance(problem, errors.CallTimeout)
            assert (problem.limit, problem.phase, problem.retryable) == ("connect_s", "upgrade", True)
            assert "full" in str(problem)
            assert problem.timeline is not None
            assert problem.timeline.segments["queue"].duration_s > 0.25

    run(body)


@pytest.mark.parametrize("when_full", ["wait", "503", "429", "error", "1013", "never"])
def test_a_call_waits_for_the_only_place(when_full: str) -> None:
    """However the server says it: the second call is served when the first one has gone, and its wait is queue."""
    options = {"max_clients": 1, "when_full": when_full}
    with serving(hello(prefill_s=0.3), options=options) as server:
        endpoint = server.endpoint(
            retries=NEVER,
            limits=spanwire.Limits(queue_timeout_s=10),
            timeouts=spanwire.Timeouts(connect_s=0.15 if when_full == "never" else 10),
        )

        async def body() -> None:
            async with spanwire.ConnectionManager(telemetry=None) as manager:
                found = await asyncio.gather(*(manager.complete(endpoint, chat()) for _ in range(3)))
                waits = []
                for reply in found:
                    assert reply.text == "Hello from the loopback server."
                    assert reply.timeline is not None
                    assert_adds_up(reply.timeline)
                    queue = reply.timeline.segments.get("queue")
                    waits.append(queue.duration_s if queue is not None else 0.0)
                waits.sort()
                assert waits[0] < waits[1] < waits[2]
                assert waits[1] > 0.2
                assert waits[2] > 0.4

        run(body)


def test_403_is_no_matter_of_room() -> None:
    with serving(hello(prefill_s=0.2), options={"max_clients": 1, "when_full": "403"}) as server:

        async def body() -> None:
            async with spanwire.ConnectionManager(telemetry=None) as manager:
                endpoint = server.endpoint(retries=AT_ONCE)
                found = await asyncio.gather(
                    *(manager.complete(endpoint, chat()) for _ in range(2)), return_exceptions=True
                )
                assert sum(isinstance(one, errors.AuthenticationFailed) for one in found) == 1

        run(body)


FULL = error("connection_limit_reached", "too many connections", "rate_limit_error", status=429)
BAD_KEY = error("invalid_api_key", "the key is wrong", "authentication_error", status=401)


@pytest.mark.parametrize("apart", [False, True], ids=["at-once", "later"])
@pytest.mark.parametrize("fatal", [False, True])
def test_an_error_event_right_after_the_upgrade(fatal: bool, apart: bool) -> None:
    """LiteLLM's limits: 101, an error event, close 1008. Fatal unless it names a limit."""
    said = (BAD_KEY if fatal else FULL) + close_frame(1008, "policy")

    async def refuse(peer: Peer) -> None:
        if apart:
            await peer.upgrade()
            await peer.send(said)
        else:
            await peer.upgrade(then=said)
        await peer.until_gone()

    async def body() -> None:
        async with raw_server(refuse, fine) as server:
            if fatal:
                problem = await failure(server, retries=AT_ONCE)
                assert isinstance(problem, errors.AuthenticationFailed), problem
                assert "the key is wrong" in str(problem)
                assert len(server.peers) == 1
                return
            async with spanwire.ConnectionManager(telemetry=None) as manager:
                endpoint = server.endpoint(retries=NEVER, limits=spanwire.Limits(queue_timeout_s=5))
                assert (await manager.complete(endpoint, chat())).text == "Hello"
            assert len(server.peers) == 2

    run(body)


@pytest.mark.parametrize("apart", [False, True], ids=["at-once", "later"])
@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        (1008, "session refused", errors.ServerError),
        (1008, "max_active_conversations", errors.RateLimited),
        (1011, "bidirectional engine not installed", errors.ConnectionFailed),
        (1001, "", errors.ConnectionFailed),
        (1012, "", errors.ConnectionFailed),
        (1013, "", errors.ConnectionFailed),
    ],
)
def test_a_close_right_after_the_upgrade(code: int, reason: str, kind: type[errors.SpanwireError], apart: bool) -> None:
    async def refuse(peer: Peer) -> None:
        if apart:
            await peer.upgrade()
            await peer.request()
            await peer.send(close_frame(code, reason))
        else:
            await peer.upgrade(then=close_frame(code, reason))
        await peer.until_gone()

    async def body() -> None:
        async with raw_server(refuse) as server:
            problem = await failure(server)
            assert isinstance(problem, kind), problem
            assert str(code) in str(problem)
            assert reason in str(problem)
            if code == 1011:  # may be tried again only if nothing was sent
                assert problem.retryable is not apart
            elif reason == "session refused":
                assert not problem.retryable
            else:
                assert problem.retryable
            assert problem.full is (code == 1013 or "max_active" in reason)

    run(body)


# --- ways there -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("secure", [False, True], ids=["ws", "wss"])
@pytest.mark.parametrize("kind", ["http", "socks5", "socks5h", "socks4a"])
def test_through_a_proxy(kind: str, secure: bool) -> None:
    with serving(hello(), tls=secure) as server, ProxyServer() as proxy:

        async def body() -> None:
            async with spanwire.ConnectionManager(telemetry=None) as manager:
                endpoint = server.endpoint(proxy=proxy.url(kind))
                for number in range(2):
                    async with manager.stream(endpoint, chat()) as stream:
                        assert await read(stream) == "Hello from the loopback server."
                    assert_adds_up(stream.timeline)
                    assert stream.timeline.connection is not None
                    assert stream.timeline.connection.reused is (number == 1)
                    if not number:
                        found = parts(stream.timeline, "handshake")
                        assert {"proxy", "upgrade"} <= found.keys()
                        assert ("tls" in found) is secure

        run(body)
        proxy.wait_for(lambda seen: seen.open == 0)
        assert proxy.connections == 1
        if kind == "http":
            assert proxy.seen[0].startswith("CONNECT "), "a tunnel also for ws://: most proxies pass no upgrade on"


def test_the_proxy_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(hello(), tls=True) as server, ProxyServer() as proxy:
        monkeypatch.setenv("https_proxy", proxy.url("http"))

        async def body() -> None:
            async with spanwire.ConnectionManager(telemetry=None) as manager:
                assert (await manager.complete(server.endpoint(proxy="env"), chat())).text

        run(body)
        assert proxy.connections == 1


def test_tls_with_a_ca_of_ones_own_and_without() -> None:
    with serving(hello(), tls=True) as server:

        async def body() -> None:
            async with spanwire.ConnectionManager(telemetry=None) as manager:
                reply = await manager.complete(server.endpoint(), chat())
                assert reply.timeline is not None
                assert {"tcp", "tls", "upgrade"} <= parts(reply.timeline, "handshake").keys()
                with pytest.raises(errors.ConnectionFailed) as caught:
                    await manager.complete(server.endpoint(tls=spanwire.TLS(), retries=NEVER), chat())
                assert caught.value.phase == "tls"

        run(body)


def test_a_client_certificate(tmp_path: Path) -> None:
    import ssl

    authority = trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.configure_trust(context)
    context.verify_mode = ssl.CERT_REQUIRED
    mine = tmp_path / "client.pem"
    authority.issue_cert("client.example").private_key_and_cert_chain_pem.write_to_path(mine)
    trusted = authority.cert_pem.bytes().decode()

    async def body() -> None:
        from websockets.asyncio.server import ServerConnection, serve

        async def handler(connection: ServerConnection) -> None:
            async for _ in connection:
                await connection.send(b"".join([]) or FINE_EVENTS[0])
                for text in FINE_EVENTS[1:]:
                    await connection.send(text)

        async with serve(handler, "127.0.0.1", 0, ssl=context, compression=None) as server:
            port = next(iter(server.sockets)).getsockname()[1]
            url = f"wss://127.0.0.1:{port}/v1"
            async with spanwire.ConnectionManager(telemetry=None) as manager:
                with pytest.raises(errors.ConnectionFailed):
                    await manager.complete(
                        spanwire.Endpoint(url, proxy=None, tls=spanwire.TLS(ca=trusted), retries=NEVER), chat()
                    )
                tls = spanwire.TLS(ca=trusted, cert=str(mine))
                endpoint = spanwire.Endpoint(url, proxy=None, tls=tls, retries=NEVER)
                assert (await manager.complete(endpoint, chat())).text == "Hello"

    run(body)


FINE_EVENTS = [
    '{"type": "response.created", "response": {"id": "r1", "model": "m"}}',
    '{"type": "response.output_text.delta", "item_id": "i", "output_index": 0, "content_index": 0, "delta": "Hello"}',
    '{"type": "response.completed", "response": {"id": "r1", "model": "m", "status": "completed", "output": []}}',
]


@pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="no unix sockets here")
def test_a_unix_socket(tmp_path: Path) -> None:
    with serving(hello(), uds=str(tmp_path / "s")) as server:

        async def body() -> None:
            async with spanwire.ConnectionManager(telemetry=None) as manager:
                for number in range(2):
                    reply = await manager.complete(server.endpoint(), chat())
                    assert reply.text == "Hello from the loopback server."
                    assert reply.timeline is not None
                    assert reply.timeline.connection is not None
                    assert reply.timeline.connection.reused is (number == 1)

        run(body)


@pytest.mark.parametrize("offered", [["a", "b"], []])
def test_subprotocols(offered: list[str]) -> None:
    with serving(hello(), options={"subprotocols": ["b"]}) as server:

        async def body() -> None:
            async with spanwire.ConnectionManager(telemetry=None) as manager:
                endpoint = server.endpoint(retries=NEVER, options={"subprotocols": offered} if offered else {})
                if offered:
                    assert (await manager.complete(endpoint, chat())).text
                else:
                    with pytest.raises(errors.ServerError):
                        await manager.complete(endpoint, chat())

        run(body)


@pytest.mark.parametrize(("ours", "theirs"), [(True, True), (True, False), (False, True)])
def test_compression_where_both_want_it(ours: bool, theirs: bool) -> None:
    with serving(hello(), options={"compression": theirs}) as server:

        async def body() -> None:
            async with spanwire.ConnectionManager(telemetry=None) as manager:
                endpoint = server.endpoint(options={"compression": ours})
                for _ in range(3):
                    assert (await manager.complete(endpoint, chat())).text == "Hello from the loopback server."

        run(body)
        assert server.connections == 1
        assert ("permessage-deflate" in server.requests[0].headers.get("sec-websocket-extensions", "")) is ours


def test_a_compressed_message_may_not_grow_over_the_limit() -> None:
    with serving(hello(), default=lambda _request: hello(), options={"compression": True}) as server:
        server.script(spanwire.testing.Script.say("x" * 200_000), model="bomb")

        async def body() -> None:
            async with spanwire.ConnectionManager(telemetry=None) as manager:
                endpoint = server.endpoint(
                    options={"compression": True}, limits=spanwire.Limits(max_event_bytes=100_000), retries=NEVER
                )
                with pytest.raises(errors.MessageTooBig):
                    await manager.complete(endpoint, chat("bomb"))

        run(body)


# --- secrets --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["call", "warm"])
def test_a_server_that_repeats_the_key_does_not_get_it_into_the_error(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    said = '{"error": {"message": "Incorrect API key provided: sk-secret-1"}}'

    async def body() -> None:
        async with raw_server(replies(refusal("401 X", body=said))) as server:
            endpoint = server.endpoint(api_key="sk-secret-1", retries=NEVER)
            async with spanwire.ConnectionManager(telemetry=None) as manager:
                with pytest.raises(errors.AuthenticationFailed) as caught:
                    if way == "call":
                        await manager.complete(endpoint, chat())
                    else:
                        await manager.warm(endpoint)
            for text in (str(caught.value), repr(caught.value), repr(endpoint), repr(caught.value.__cause__)):
                assert "sk-secret-1" not in text

    run(body)
    assert "sk-secret-1" not in caplog.text


def test_a_refusal_that_repeats_the_target_shows_no_key() -> None:
    async def refuse(peer: Peer) -> None:
        await peer.handshake()
        said = b"Cannot GET " + peer.head.split(b" ")[1]
        await peer.send(b"HTTP/1.1 404 Not Found\r\nContent-Length: %d\r\n\r\n%b" % (len(said), said))

    async def body() -> None:
        async with raw_server(refuse) as server:
            problem = await failure(server, query={"api_key": "s3cret/1"})
            assert "Cannot GET /v1/responses?api_key=***" in str(problem)
            assert "s3cret" not in f"{problem} {problem!r} {problem.__cause__} {problem.timeline}"

    run(body)


@pytest.mark.parametrize("value", ["k\N{LATIN SMALL LETTER E WITH ACUTE}y", "\N{ZERO WIDTH SPACE}key", "k\x01y"])
@pytest.mark.parametrize("where", ["api_key", "header"])
def test_a_value_that_no_handshake_carries_is_refused_without_being_shown(value: str, where: str) -> None:
    async def body() -> None:
        async with raw_server(fine) as server:
            given: dict[str, Any] = {"api_key": value} if where == "api_key" else {"headers": {"x-key": value}}
            async with spanwire.ConnectionManager(telemetry=None) as manager:
                with pytest.raises(errors.ConfigurationError) as caught:
                    await manager.complete(server.endpoint(retries=NEVER, **given), chat())
            assert ("api_key" if where == "api_key" else "x-key") in str(caught.value)
            assert value not in "".join(traceback.format_exception(caught.value))

    run(body)


def test_a_path_that_is_no_ascii_is_percent_encoded() -> None:
    async def body() -> None:
        async with raw_server(fine) as server, spanwire.ConnectionManager(telemetry=None) as manager:
            endpoint = spanwire.Endpoint(f"{server.url}/m%C3%B6del/\N{LATIN SMALL LETTER E WITH ACUTE}", proxy=None)
            assert (await manager.complete(endpoint, chat())).text == "Hello"
            assert server.peers[0].head.startswith(b"GET /v1/m%C3%B6del/%C3%A9/responses HTTP/1.1")

    run(body)
