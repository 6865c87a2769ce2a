"""Calls through proxies: one connection for all of them, the same marks, errors that say what to do."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import ssl
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

import spanwire
from spanwire import errors
from spanwire.manager import ConnectionManager
from spanwire.net.http2 import HTTP2Connection
from spanwire.sync import SyncConnectionManager
from spanwire.testing import LoopbackServer, Script
from tests.core.net.proxy_server import ProxyServer, loops
from tests.hypercorn_server import h2_server
from tests.support import AT_ONCE, NEVER, assert_adds_up, chat, hello, read, run, serving

CALLS = 6
KINDS = ["http", "https", "socks4", "socks4a", "socks5", "socks5h"]
both_schemes = pytest.mark.parametrize("secure", [False, True], ids=["plain", "tls"])


@functools.cache
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(autouse=True)
def _no_proxy_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for word in ("http", "https", "all", "no"):
        for name in (f"{word}_proxy", f"{word}_proxy".upper()):
            monkeypatch.delenv(name, raising=False)


@contextlib.contextmanager
def proxied(kind: str = "http", **more: Any) -> Iterator[ProxyServer]:
    context = None
    if kind == "https":
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        authority().issue_cert("127.0.0.1").configure_cert(context)
    with ProxyServer(tls=context, **more) as proxy:
        yield proxy


def through(server: LoopbackServer, via: ProxyServer | None, kind: str | None = None, **more: Any) -> spanwire.Endpoint:
    """An endpoint behind a proxy; trusts both."""
    if via is not None:
        more.setdefault("proxy", via.url(kind))
    tls = spanwire.TLS(ca=(server.ca_pem or "") + authority().cert_pem.bytes().decode())
    return server.endpoint(tls=tls, **more)


def parts(stream: spanwire.Stream) -> set[str]:
    assert stream.timeline is not None
    handshake = stream.timeline.segments.get("handshake")
    return set(handshake.parts) if handshake else set()


def expected_parts(kind: str, *, secure: bool) -> set[str]:
    found = {"proxy"} if kind.startswith("socks") else {"tcp"}
    if kind == "https" or (secure and kind == "http"):
        found.add("proxy")
    return found | {"tls"} if secure else found


@both_schemes
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loop", loops(), ids=lambda factory: factory.__module__.split(".")[0])
def test_one_connection_for_all_calls(kind: str, secure: bool, loop: Any) -> None:
    async def body() -> None:
        async with ConnectionManager(telemetry=None) as manager:
            endpoint = through(server, proxy, kind)
            for number in range(CALLS):
                async with manager.stream(endpoint, chat()) as stream:
                    assert await read(stream) == "Hello from the loopback server."
                timeline = stream.timeline
                assert timeline is not None
                assert timeline.connection is not None
                assert_adds_up(timeline)
                assert timeline.connection.reused is (number > 0)
                assert timeline.connection.rtt_min_s is None, "the kernel's ends at the proxy"
                assert "to_and_back" not in timeline.segments["network"].parts
                assert parts(stream) == (set() if number else expected_parts(kind, secure=secure))

    with serving(hello(), tls=secure) as server, proxied(kind) as proxy:
        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(body())
        proxy.wait_for(lambda seen: seen.open == 0)
        assert proxy.connections == 1
        assert {request.connection for request in server.requests} == {1}
        forwarded = not secure and not kind.startswith("socks")
        assert len(proxy.seen) == (CALLS if forwarded else 1)
        if forwarded:
            assert proxy.seen[0] == f"POST {server.url}/chat/completions"


@both_schemes
@pytest.mark.parametrize("kind", ["http", "https", "socks5h"])
def test_one_connection_for_all_calls_of_the_synchronous_manager(kind: str, secure: bool) -> None:
    with serving(hello(), tls=secure) as server, proxied(kind) as proxy:
        with SyncConnectionManager(telemetry=None) as manager:
            endpoint = through(server, proxy, kind)
            for _ in range(CALLS):
                with manager.stream(endpoint, chat()) as stream:
                    assert "".join(chunk.text for chunk in stream) == "Hello from the loopback server."
        proxy.wait_for(lambda seen: seen.open == 0)
        assert proxy.connections == 1


@both_schemes
@pytest.mark.parametrize("kind", ["http", "https", "socks5"])
def test_warm(kind: str, secure: bool) -> None:
    async def body() -> None:
        async with ConnectionManager(telemetry=None) as manager:
            endpoint = through(server, proxy, kind)
            await manager.warm(endpoint, 3)
            await asyncio.to_thread(proxy.wait_for, lambda seen: seen.connections == 3)
            async with manager.stream(endpoint, chat()) as stream:
                await read(stream)
            assert parts(stream) == set()
            assert proxy.connections == 3

    with serving(hello(), tls=secure) as server, proxied(kind) as proxy:
        run(body)


@both_schemes
@pytest.mark.parametrize("kind", ["http", "https", "socks5"])
def test_credentials(kind: str, secure: bool) -> None:
    async def body() -> None:
        async with ConnectionManager(telemetry=None) as manager:
            good = through(server, proxy, proxy=proxy.url(kind, auth="user:hunter2@"))
            assert (await manager.complete(good, chat())).text
            for auth, words in (("", "put user:password@ before the host"), ("user:wr0ng@", "refuses the user name")):
                bad = through(server, proxy, proxy=proxy.url(kind, auth=auth), retries=AT_ONCE)
                with pytest.raises(errors.ConnectionFailed, match=words) as caught:
                    await manager.complete(bad, chat())
                assert (caught.value.phase, caught.value.retryable) == ("proxy", False)
                assert f"the proxy {kind}://127.0.0.1:{proxy.port} (Endpoint.proxy)" in str(caught.value)
                assert "wr0ng" not in str(caught.value)
                assert caught.value.timeline is not None
                assert len(caught.value.timeline.to_dict()["attempts"]) == 1

    with serving(hello(), tls=secure) as server, proxied(kind, auth=("user", "hunter2")) as proxy:
        run(body)
        assert all("proxy-authorization" not in request.headers for request in server.requests)


def test_a_tunnelled_server_may_answer_407_itself() -> None:
    """No proxy reads that connection, so it is the server's own business."""

    async def body() -> None:
        async with ConnectionManager(telemetry=None) as manager:
            with pytest.raises(errors.BadRequest) as caught:
                await manager.complete(through(server, proxy, retries=NEVER), chat())
            assert caught.value.status == 407

    with serving(Script(status=407), tls=True) as server, proxied() as proxy:
        run(body)


def test_a_proxy_that_cannot_reach_the_server() -> None:
    async def body() -> None:
        async with ConnectionManager(telemetry=None) as manager:
            nowhere = spanwire.Endpoint(f"https://127.0.0.1:{gone.port}", proxy=proxy.url(), retries=AT_ONCE)
            with pytest.raises(errors.ConnectionFailed, match="answered 502 Bad Gateway") as caught:
                await manager.complete(nowhere, chat())
            assert (caught.value.phase, caught.value.retryable) == ("proxy", True)
            assert len(proxy.seen) == 3, "tried again as other failures are"

    with ProxyServer() as gone:
        pass
    with proxied() as proxy:
        run(body)


@pytest.mark.parametrize("kind", ["http", "socks5"])
def test_a_proxy_that_says_nothing_is_waited_for_as_long_as_for_any_connection(kind: str) -> None:
    async def body() -> None:
        async with ConnectionManager(telemetry=None) as manager:
            timeouts = spanwire.Timeouts(connect_s=0.05)
            endpoint = spanwire.Endpoint("https://h", proxy=proxy.url(kind), retries=NEVER, timeouts=timeouts)
            with pytest.raises(errors.CallTimeout) as caught:
                await manager.complete(endpoint, chat())
            assert (caught.value.limit, caught.value.phase) == ("connect_s", "proxy")
            assert caught.value.timeline is not None
            assert caught.value.timeline.segments["handshake"].parts["proxy"].duration_s > 0

    with proxied(silent=True) as proxy:
        run(body)
        proxy.wait_for(lambda seen: seen.open == 0)


# --- which proxy -------------------------------------------------------------------------------------------------------


def test_a_proxy_of_the_environment_and_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read when an endpoint is first used; endpoints that came to different proxies share no connection."""

    async def body() -> None:
        async with ConnectionManager(telemetry=None) as manager:

            async def call(endpoint: spanwire.Endpoint) -> None:
                assert (await manager.complete(endpoint, chat())).text

            monkeypatch.setenv("HTTP_PROXY", one.url())
            first = through(server, None, proxy="env")
            await call(first)
            monkeypatch.setenv("HTTP_PROXY", two.url())
            second = through(server, None, proxy="env")
            await call(second)
            await call(first)  # stays where its connection is
            assert (len(one.seen), len(two.seen)) == (2, 1)
            monkeypatch.setenv("NO_PROXY", "127.0.0.0/8")
            await call(through(server, None, proxy="env"))
            await call(through(server, None, proxy=None))
            assert (len(one.seen), len(two.seen)) == (2, 1)
            assert (one.connections, two.connections) == (1, 1)

    with serving(hello()) as server, proxied() as one, proxied() as two:
        run(body)
        assert len({request.connection for request in server.requests}) == 4


def test_two_users_of_one_proxy_share_no_connection() -> None:
    async def body() -> None:
        async with ConnectionManager(telemetry=None) as manager:
            for user in ("a", "b", "a"):
                endpoint = through(server, proxy, proxy=proxy.url(auth=f"{user}:p@"))
                assert (await manager.complete(endpoint, chat())).text
            assert proxy.connections == 2

    with serving(hello()) as server, proxied() as proxy:
        run(body)


def test_a_bad_setting_is_said_before_anything_is_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with ConnectionManager(telemetry=None) as manager:
            with pytest.raises(errors.ConfigurationError, match=r"Endpoint\.proxy") as caught:
                await manager.complete(spanwire.Endpoint("http://h", proxy="ftp://user:hunter2@p"), chat())
            assert "hunter2" not in str(caught.value)
            monkeypatch.setenv("all_proxy", "http://user:hun ter2@p")
            with pytest.raises(errors.ConfigurationError, match="all_proxy"):
                await manager.warm(spanwire.Endpoint("http://h"))

    run(body)


def test_a_unix_socket_goes_through_no_proxy(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with ConnectionManager(telemetry=None) as manager:
            assert (await manager.complete(server.endpoint(proxy="env"), chat())).text

    with serving(hello(), uds=str(tmp_path / "s")) as server, proxied() as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url())
        run(body)
        assert proxy.connections == 0


# --- nothing is left ---------------------------------------------------------------------------------------------------


@both_schemes
@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_that_is_left_ends_at_the_server(kind: str, secure: bool) -> None:
    async def body() -> None:
        async with ConnectionManager(telemetry=None) as manager:
            async with manager.stream(through(server, proxy, kind), chat()) as stream:
                async for _ in stream:
                    break
            await asyncio.to_thread(server.wait_for, lambda seen: seen.requests[0].left)
            await asyncio.to_thread(proxy.wait_for, lambda seen: seen.open == 0)

    script = Script.say("word " * 2000, gap_s=0.01)
    with serving(script, tls=secure) as server, proxied(kind) as proxy:
        run(body)


@both_schemes
@pytest.mark.parametrize("kind", ["http", "https", "socks5"])
@pytest.mark.parametrize("loop", loops(), ids=lambda factory: factory.__module__.split(".")[0])
def test_a_loop_that_is_closed_without_a_word_leaves_no_socket(kind: str, secure: bool, loop: Any) -> None:
    """With TLS in TLS the socket is two transports further down."""
    manager = ConnectionManager(telemetry=None)

    async def body() -> None:
        assert (await manager.complete(through(server, proxy, kind), chat())).text

    with serving(hello(), tls=secure) as server, proxied(kind) as proxy:
        running = loop()
        running.run_until_complete(body())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # uvloop tells at once what is open
            running.close()
        with asyncio.Runner() as runner:
            runner.run(manager.aclose())
        gc.collect()
        proxy.wait_for(lambda seen: seen.open == 0)


@pytest.mark.parametrize("kind", ["http", "https", "socks5h"])
@pytest.mark.parametrize("version", ["2", "auto"])
def test_http2_goes_through_a_tunnel(kind: str, version: str, tmp_path: Path) -> None:
    async def body() -> None:
        async with ConnectionManager(telemetry=None) as manager:
            tls = spanwire.TLS(ca=server.ca_pem + authority().cert_pem.bytes().decode())
            endpoint = spanwire.Endpoint(
                f"https://127.0.0.1:{server.port}/v1",
                tls=tls,
                proxy=proxy.url(kind),
                options={"http_version": version},
            )
            for number in range(2):
                async with manager.stream(endpoint, chat()) as stream:
                    assert await read(stream) == "over h2"
                timeline = stream.timeline
                assert_adds_up(timeline)
                assert timeline.connection is not None
                assert (timeline.connection.protocol, timeline.connection.reused) == ("h2", number > 0)
                assert timeline.connection.rtt_min_s is None, "the kernel's ends at the proxy"
                assert parts(stream) == (set() if number else expected_parts(kind, secure=True))

    with h2_server(tmp_path) as server, proxied(kind) as proxy:
        asyncio.run(body())
        assert server.versions == ["2", "2"]
        assert len(server.peers) == 1
        assert proxy.connections == 1


def test_a_session_is_resumed_over_http2_too(tmp_path: Path) -> None:
    resumed: list[bool] = []
    made = HTTP2Connection.connection_made

    def noted(self: HTTP2Connection, transport: asyncio.BaseTransport) -> None:
        resumed.append(transport.get_extra_info("ssl_object").session_reused)
        made(self, transport)

    async def body() -> None:
        endpoint = spanwire.Endpoint(
            f"https://127.0.0.1:{server.port}/v1",
            tls=spanwire.TLS(ca=server.ca_pem),
            options={"http_version": "2"},
        )
        for _ in range(2):
            async with ConnectionManager(telemetry=None) as manager, manager.stream(endpoint, chat()) as stream:
                assert await read(stream) == "over h2"

    with h2_server(tmp_path) as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr(HTTP2Connection, "connection_made", noted)
        asyncio.run(body())
    assert resumed == [False, True]
