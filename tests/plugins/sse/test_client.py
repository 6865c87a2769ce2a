"""Calls through a client that the user brings, over real connections."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import socket
import ssl
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from spanwire_sse import SSETransport

import spanwire
from spanwire import errors
from spanwire.manager import ConnectionManager
from spanwire.sync import SyncConnectionManager
from spanwire.testing import LoopbackServer, Script
from spanwire.timeline import Timeline
from spanwire.transport import Connection
from tests.clients import ASYNC_CLIENTS, SYNC_CLIENTS, each, hook, is_async, library, name_of, opened, threads, to
from tests.hypercorn_server import h2_server
from tests.proxies import proxy
from tests.support import AT_ONCE, NEVER, assert_adds_up, chat, hello, read, run, serving, wait_for

TEXT = "Hello from the loopback server."


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    yield
    for thread in threads():
        thread.join(10)
    assert not threads()


async def complete(endpoint: spanwire.Endpoint, **more: Any) -> spanwire.Reply:
    async with ConnectionManager() as manager:
        return await manager.complete(endpoint, chat(), **more)


async def failure(endpoint: spanwire.Endpoint, **more: Any) -> errors.SpanwireError:
    with pytest.raises(errors.SpanwireError) as caught:
        await complete(endpoint, **{"retries": NEVER, **more})
    return caught.value


def parts_of(timeline: Timeline | None, segment: str) -> set[str]:
    assert timeline is not None
    found = timeline.segments.get(segment)
    return set(found.parts) if found is not None else set()


def trusting(server: LoopbackServer) -> ssl.SSLContext:
    return ssl.create_default_context(cadata=server.ca_pem)


# --- answers ------------------------------------------------------------------------------------------------------------


@each()
def test_a_stream_a_whole_answer_and_embeddings(cls: Any) -> None:
    with serving(hello(prefill_s=0.005, gap_s=0.001)) as server:

        async def body() -> None:
            async with opened(cls) as client, ConnectionManager() as manager:
                async with manager.stream(to(server, client, api_key="k"), chat()) as stream:
                    assert await read(stream) == TEXT
                assert stream.headers["content-type"].startswith("text/event-stream")
                assert stream.reply.usage is not None
                timeline = stream.timeline
                assert_adds_up(timeline)
                assert parts_of(timeline, "handshake") == {"tcp"}
                assert parts_of(timeline, "client") >= {"encode"}
                assert parts_of(timeline, "network") >= {"send", "to_and_back"}
                assert parts_of(timeline, "model") == {"prefill", "decode"}
                use = timeline.connection
                assert use is not None
                assert (use.reused, use.protocol, use.engine) == (False, "http/1.1", library(cls).__name__)
                assert use.rtt_min_s is not None
                reply = await manager.complete(to(server, client), chat())
                assert reply.text == TEXT
                assert reply.timeline is not None
                assert_adds_up(reply.timeline)
                call = spanwire.Call.embeddings("e", ["a", "b"])
                vectors = await manager.embed(to(server, client), call)
                assert len(vectors.vectors) == 2

        run(body)
        assert server.connections == 1
        assert server.requests[0].headers["authorization"] == "Bearer k"


@each()
def test_through_the_synchronous_manager(cls: Any) -> None:
    client = cls(trust_env=False)
    with serving(hello()) as server, SyncConnectionManager() as manager:
        if is_async(cls):
            with pytest.raises(errors.ConfigurationError, match=rf"give it an {library(cls).__name__}\.Client"):
                manager.complete(to(server, client), chat())
            asyncio.run(client.aclose())
            return
        with manager.stream(to(server, client), chat()) as stream:
            assert "".join(chunk.text for chunk in stream) == TEXT
        assert manager.complete(to(server, client), chat()).text == TEXT
        client.close()


@each()
def test_many_at_once(cls: Any) -> None:
    """More than the threads of the loop's executor, and all at the same time."""
    with serving(hello(queue_s=0.05)) as server:

        async def body() -> None:
            async with opened(cls) as client, ConnectionManager() as manager:
                endpoint = to(server, client)
                replies = await asyncio.gather(*(manager.complete(endpoint, chat()) for _ in range(64)))
                assert {reply.text for reply in replies} == {TEXT}
                for reply in replies:
                    assert reply.timeline is not None
                    assert_adds_up(reply.timeline)

        run(body)
        assert len(server.requests) == 64


@each()
@pytest.mark.parametrize("end_s", [0.0, 0.02])
def test_six_streams_in_a_row_use_one_connection(cls: Any, end_s: float) -> None:
    """Though each is read to its terminal event, and the end of the message comes later."""
    with serving(hello(end_s=end_s)) as server:

        async def body() -> None:
            uses = []
            async with opened(cls) as client, ConnectionManager() as manager:
                for _ in range(6):
                    async with manager.stream(to(server, client), chat()) as stream:
                        assert await read(stream) == TEXT
                    uses.append(stream.timeline.connection)
                    if end_s:
                        while _leased(manager):
                            await asyncio.sleep(0)
            assert [use.reused for use in uses if use] == [False, True, True, True, True, True]
            assert len({use.id for use in uses if use}) == 1
            assert all(use.idle_s is not None and use.age_s is not None for use in uses[1:] if use)

        run(body)
        assert server.connections == 1


def _leased(manager: ConnectionManager) -> bool:
    return any(member.leases for pool in manager.state().pools.values() for member in pool.state.members)


@each(SYNC_CLIENTS)
def test_six_streams_of_the_synchronous_manager_use_one_connection(cls: Any) -> None:
    with serving(hello()) as server, SyncConnectionManager() as manager, cls(trust_env=False) as client:
        for _ in range(6):
            with manager.stream(to(server, client), chat()) as stream:
                assert "".join(chunk.text for chunk in stream) == TEXT
        assert server.connections == 1


@each()
def test_tls_with_the_clients_own_context(cls: Any) -> None:
    with serving(hello(), tls=True) as server:

        async def body() -> None:
            async with opened(cls, verify=trusting(server)) as client, ConnectionManager() as manager:
                first = await manager.complete(to(server, client), chat())
                second = await manager.complete(to(server, client), chat())
                assert parts_of(first.timeline, "handshake") == {"tcp", "tls"}
                assert parts_of(second.timeline, "handshake") == set()
                assert second.timeline is not None
                assert second.timeline.connection is not None
                assert second.timeline.connection.reused
                assert second.timeline.connection.rtt_min_s is not None
                assert_adds_up(second.timeline)

        run(body)


@each()
def test_the_wait_for_the_clients_pool_is_queue_local(cls: Any) -> None:
    with serving(hello(queue_s=0.05)) as server:

        async def body() -> None:
            limits = library(cls).Limits(max_connections=1)
            async with opened(cls, limits=limits) as client, ConnectionManager() as manager:
                replies = await asyncio.gather(*(manager.complete(to(server, client), chat()) for _ in range(3)))
                waits = []
                for reply in replies:
                    assert reply.timeline is not None
                    assert_adds_up(reply.timeline)
                    queue = reply.timeline.segments.get("queue")
                    waits.append(queue.parts["local"].duration_s if queue is not None else 0.0)
                waits.sort()
                assert 0 < waits[1] < waits[2]

        run(body)
        assert server.connections == 1


@each()
def test_a_pool_wait_over_the_queue_limit_is_a_queue_timeout(cls: Any) -> None:
    with serving(hello(hang_after="request")) as server:

        async def body() -> None:
            limits = library(cls).Limits(max_connections=1)
            async with opened(cls, limits=limits) as client, ConnectionManager() as manager:
                async with manager.stream(to(server, client), chat()):
                    await wait_for(server, lambda s: s.requests)
                    endpoint = to(server, client, limits=spanwire.Limits(queue_timeout_s=0.05), retries=NEVER)
                    with pytest.raises(errors.QueueTimeout, match=r"queue_timeout_s") as caught:
                        await manager.complete(endpoint, chat())
                    assert caught.value.phase == "queue"
                    assert parts_of(caught.value.timeline, "queue") == {"local"}

        run(body)


@each()
def test_http2(cls: Any, tmp_path: Path) -> None:
    """A cold burst: one connects, the others wait for that without an event. Of a synchronous client one by one: the
    HTTP/2 of httpcore is not safe with threads."""
    with h2_server(tmp_path) as server:

        async def body() -> None:
            async with opened(cls, verify=server.context, http2=True) as client, ConnectionManager() as manager:
                endpoint = spanwire.Endpoint(f"https://127.0.0.1:{server.port}/v1", options={"http_client": client})

                async def one() -> Timeline:
                    async with manager.stream(endpoint, chat()) as stream:
                        assert await read(stream) == "over h2"
                    assert_adds_up(stream.timeline)
                    assert stream.timeline.connection is not None
                    assert stream.timeline.connection.protocol == "h2"
                    return stream.timeline

                cold = await asyncio.gather(*(one() for _ in range(4 if is_async(cls) else 1)))
                warm = await one()
                handshakes = [parts_of(timeline, "handshake") for timeline in cold]
                assert {"tcp", "tls", "upgrade"} in handshakes
                assert handshakes.count({"shared"}) == len(cold) - 1
                for timeline in cold:
                    assert timeline.connection is not None
                    assert not timeline.connection.reused
                assert warm.connection is not None
                assert warm.connection.reused
                assert "handshake" not in warm.segments

        run(body)
        assert set(server.versions) == {"2"}
        assert len(server.peers) == 1


@each()
def test_leaving_over_http2(cls: Any, tmp_path: Path) -> None:
    """Nothing tells the server, unless nobody else is on the connection of a blocked thread; here it all ends."""
    with h2_server(tmp_path) as server:

        async def body() -> None:
            async with opened(cls, verify=server.context, http2=True) as client, ConnectionManager() as manager:
                url = f"https://127.0.0.1:{server.port}/hang"
                endpoint = spanwire.Endpoint(url, options={"http_client": client})
                async with manager.stream(endpoint, chat()) as stream:
                    assert (await anext(stream)).text == "over"
                assert_adds_up(stream.timeline)
            assert await asyncio.to_thread(server.gone.wait, 10)

        run(body)


# --- what the client brings ---------------------------------------------------------------------------------------------


@each()
def test_the_clients_headers_and_parameters_apply_below_ours(cls: Any) -> None:
    with serving(hello()) as server:

        async def body() -> None:
            brought = {"headers": {"X-Mine": "client", "X-Both": "client"}, "params": {"tenant": "t", "v": "client"}}
            async with opened(cls, **brought) as client:
                endpoint = to(server, client, headers={"x-both": "Ünï"}, query={"v": "endpoint", "a b": "c&d"})
                await complete(endpoint, headers={"x-call": "call"})
                await complete(to(server, client))

        run(body)
        first, second = server.requests
        assert (first.headers["x-mine"], first.headers["x-call"]) == ("client", "call")
        assert first.headers["x-both"].encode("latin-1").decode() == "Ünï"
        assert set(first.query.split("&")) == {"tenant=t", "v=endpoint", "a+b=c%26d"}
        assert set(second.query.split("&")) == {"tenant=t", "v=client"}
        assert first.headers["user-agent"].startswith("spanwire/")
        assert first.headers["idempotency-key"].startswith("spanwire-")


@each()
def test_its_authentication_is_used(cls: Any) -> None:
    with serving(hello()) as server:

        async def body() -> None:
            async with opened(cls, auth=("me", "secret")) as client:
                await complete(to(server, client))

        run(body)
        assert server.requests[0].headers["authorization"].startswith("Basic ")


@each()
def test_its_event_hooks_run_in_the_callers_context(cls: Any) -> None:
    var: contextvars.ContextVar[str] = contextvars.ContextVar("var", default="")
    seen: list[tuple[str, str]] = []
    with serving(hello()) as server:

        async def body() -> None:
            hooks = {
                "request": [hook(cls, lambda request: seen.append(("request", var.get())))],
                "response": [hook(cls, lambda response: seen.append((str(response.status_code), var.get())))],
            }
            async with opened(cls, event_hooks=hooks) as client:
                var.set("mine")
                await complete(to(server, client))

        run(body)
        assert seen == [("request", "mine"), ("200", "mine")]


@each()
def test_a_challenge_is_answered_and_its_trip_is_no_wait(cls: Any) -> None:
    """Digest authentication: two requests for one call; the marks are those of the second."""
    refused = Script(status=401, headers={"www-authenticate": 'Digest realm="r", nonce="n", qop="auth"'})
    with serving(refused, hello()) as server:

        async def body() -> None:
            async with opened(cls, auth=library(cls).DigestAuth("me", "secret")) as client:
                reply = await complete(to(server, client))
                assert reply.text == TEXT
                assert reply.timeline is not None
                assert_adds_up(reply.timeline)
                assert "backoff" not in parts_of(reply.timeline, "queue")

        run(body)
        assert server.connections == 1
        assert "authorization" in server.requests[1].headers


@each()
def test_redirects_are_not_followed(cls: Any) -> None:
    with serving(Script(status=307, headers={"location": "http://127.0.0.1:1/other?key=k"})) as server:

        async def body() -> None:
            async with opened(cls, follow_redirects=True) as client:
                error = await failure(to(server, client))
                assert isinstance(error, errors.ServerError)
                assert "redirects to 'http://127.0.0.1:1/other'" in error.message

        run(body)


@each()
def test_its_time_limits_do_not_end_a_call(cls: Any) -> None:
    with serving(hello(queue_s=0.1, gap_s=0.03)) as server:

        async def body() -> None:
            async with opened(cls, timeout=0.01) as client, ConnectionManager() as manager:
                async with manager.stream(to(server, client), chat()) as stream:
                    assert await read(stream) == TEXT

        run(body)


@each()
def test_a_hook_that_fails_is_told(cls: Any) -> None:
    def fail(_thing: Any) -> None:
        raise LookupError("secret")

    with serving(hello()) as server:

        async def body() -> None:
            async with opened(cls, event_hooks={"request": [hook(cls, fail)]}) as client:
                error = await failure(to(server, client), retries=AT_ONCE)
                assert isinstance(error, errors.ConnectionFailed)
                assert not error.retryable
                assert "LookupError" in error.message
                assert "secret" not in str(error)
                assert isinstance(error.__cause__, LookupError)

        run(body)
        assert not server.requests


@each()
def test_a_hook_that_has_read_the_answer(cls: Any) -> None:
    import gzip

    answer = gzip.compress(b'{"choices": [{"message": {"content": "read"}}]}')
    seen: list[int] = []
    with serving(Script(body=answer, headers={"content-encoding": "gzip"})) as server:

        async def aread(response: Any) -> None:
            seen.append(len(await response.aread()))

        async def body() -> None:
            reading = aread if is_async(cls) else lambda response: seen.append(len(response.read()))
            async with opened(cls, event_hooks={"response": [reading]}) as client:
                assert (await complete(to(server, client))).text == "read"

        run(body)
        assert seen


@each()
def test_raise_for_status_in_a_hook_is_the_servers_error(cls: Any) -> None:
    with serving(Script(status=429, headers={"retry-after": "7"})) as server:

        async def body() -> None:
            hooks = {"response": [hook(cls, lambda response: response.raise_for_status())]}
            async with opened(cls, event_hooks=hooks) as client:
                error = await failure(to(server, client))
                assert isinstance(error, errors.RateLimited)
                assert error.retry_after_s == 7

        run(body)


@each()
def test_the_client_stays_open(cls: Any) -> None:
    with serving(hello()) as server:

        async def body() -> None:
            async with opened(cls) as client:
                assert (await complete(to(server, client))).text == TEXT
                assert not client.is_closed
                assert (await complete(to(server, client))).text == TEXT

        run(body)
        assert server.connections == 1  # of two managers, one after the other


@each()
def test_two_origins_over_one_client(cls: Any) -> None:
    with serving(hello()) as one, serving(hello()) as other:

        async def body() -> None:
            async with opened(cls) as client, ConnectionManager() as manager:
                for server in (one, other, one):
                    await manager.complete(to(server, client), chat())
                assert len(manager.state().pools) == 2

        run(body)
        assert (one.connections, other.connections) == (1, 1)


@each()
def test_warming_does_nothing(cls: Any) -> None:
    with serving(hello()) as server:

        async def body() -> None:
            async with opened(cls) as client, ConnectionManager() as manager:
                await manager.warm(to(server, client), 20)
                (pool,) = manager.state().pools.values()
                (member,) = pool.state.members
                assert isinstance(member.connection, Connection)

        run(body)
        assert server.connections == 0


@each()
def test_no_connect_is_told_that_was_none(cls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(hello()) as server:

        async def body() -> None:
            async with opened(cls) as client, ConnectionManager() as manager:
                told: list[object] = []
                monkeypatch.setattr(manager.telemetry, "connected", lambda *arguments: told.append(arguments))
                await manager.complete(to(server, client), chat())
                assert told == []
                await manager.complete(server.endpoint(), chat())
                assert len(told) == 1

        run(body)


@each()
def test_a_transport_that_tells_nothing(cls: Any) -> None:
    """Such as a mock: no trace events, no stream; nothing is claimed."""
    made = library(cls).MockTransport(
        lambda request: library(cls).Response(200, json={"choices": [{"message": {"content": "mocked"}}]})
    )

    async def body() -> None:
        async with opened(cls, transport=made) as client:
            endpoint = spanwire.Endpoint("http://mock.invalid/v1", options={"http_client": client})
            reply = await complete(endpoint)
            assert reply.text == "mocked"
            assert reply.timeline is not None
            assert_adds_up(reply.timeline)
            assert not {"handshake", "queue"} & set(reply.timeline.segments)
            assert parts_of(reply.timeline, "network") <= {"receive"}
            use = reply.timeline.connection
            assert use is not None
            assert (use.reused, use.rtt_min_s) == (False, None)

    run(body)


# --- through a proxy ----------------------------------------------------------------------------------------------------


@each()
@pytest.mark.parametrize("tls", [False, True], ids=["forward", "tunnel"])
def test_through_a_proxy_no_round_trip_is_claimed(cls: Any, tls: bool) -> None:
    with serving(hello(), tls=tls) as server, proxy("me:secret") as between:

        async def body() -> None:
            more: dict[str, Any] = {"verify": trusting(server)} if tls else {}
            url = f"http://me:secret@127.0.0.1:{between.port}"
            async with opened(cls, proxy=url, **more) as client, ConnectionManager() as manager:
                first = (await manager.complete(to(server, client), chat())).timeline
                second = (await manager.complete(to(server, client), chat())).timeline
                assert first is not None
                assert second is not None
                assert parts_of(first, "handshake") == ({"tcp", "proxy", "tls"} if tls else {"tcp"})
                assert parts_of(second, "handshake") == set()
                for timeline in (first, second):
                    assert_adds_up(timeline)
                    assert "to_and_back" not in parts_of(timeline, "network")
                    assert timeline.connection is not None
                    assert timeline.connection.rtt_min_s is None
                    assert "secret" not in str(timeline)
                assert second.connection is not None
                assert second.connection.reused

        run(body)
        assert between.connections == 1


@each()
def test_a_proxy_that_refuses(cls: Any) -> None:
    with serving(hello(), tls=True) as server, proxy("me:secret") as between:

        async def body() -> None:
            url = f"http://me:wrong-secret@127.0.0.1:{between.port}"
            async with opened(cls, proxy=url, verify=trusting(server)) as client:
                error = await failure(to(server, client), retries=AT_ONCE)
                assert isinstance(error, errors.ConnectionFailed)
                assert (error.phase, error.retryable) == ("proxy", False)
                assert "407 Proxy Authentication Required" in error.message
                assert "wrong-secret" not in str(error)

        run(body)
        assert between.connections == 1


@each()
def test_a_proxy_that_is_not_there(cls: Any) -> None:
    with serving(hello()) as server:

        async def body() -> None:
            async with opened(cls, proxy=f"http://me:secret@127.0.0.1:{closed_port()}") as client:
                error = await failure(to(server, client))
                assert isinstance(error, errors.ConnectionFailed)
                assert error.phase == "proxy"
                assert error.message == "the client's proxy cannot be reached: connection refused"

        run(body)


def closed_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


# --- errors -------------------------------------------------------------------------------------------------------------


@each()
def test_a_port_where_nobody_listens(cls: Any) -> None:
    async def body() -> None:
        async with opened(cls) as client:
            endpoint = spanwire.Endpoint(f"http://127.0.0.1:{closed_port()}/v1", options={"http_client": client})
            error = await failure(endpoint)
            assert isinstance(error, errors.ConnectionFailed)
            assert (error.phase, error.retryable) == ("tcp", True)
            assert error.message == "the server cannot be reached: connection refused"
            assert isinstance(error.__cause__, library(cls).ConnectError)
            assert error.timeline is not None
            assert_adds_up(error.timeline)
            assert parts_of(error.timeline, "handshake") == {"tcp"}
            again = await failure(endpoint, retries=AT_ONCE)
            assert again.timeline is not None
            assert len(again.timeline.to_dict()["attempts"]) == 3  # none of them taken for a dead old connection

    run(body)


@each()
def test_a_host_that_does_not_exist(cls: Any) -> None:
    async def body() -> None:
        async with opened(cls) as client:
            error = await failure(spanwire.Endpoint("http://nowhere.invalid/v1", options={"http_client": client}))
            assert isinstance(error, errors.ConnectionFailed)
            assert error.phase == "dns"
            assert "the name 'nowhere.invalid' cannot be resolved" in error.message

    run(body)


@each()
def test_a_certificate_that_is_not_trusted(cls: Any) -> None:
    with serving(hello(), tls=True) as server:

        async def body() -> None:
            async with opened(cls) as client:
                error = await failure(to(server, client), retries=AT_ONCE)
                assert isinstance(error, errors.ConnectionFailed)
                assert (error.phase, error.retryable) == ("tls", False)
                assert "not trusted" in error.message
                assert "verify=" in error.message
                assert parts_of(error.timeline, "handshake") == {"tcp", "tls"}

        run(body)


@each()
def test_tls_where_none_is_spoken(cls: Any) -> None:
    with LoopbackServer() as server:  # which notes the bytes as a fault

        async def body() -> None:
            async with opened(cls) as client:
                url = server.url.replace("http://", "https://")
                error = await failure(spanwire.Endpoint(url, options={"http_client": client}))
                assert error.phase == "tls"
                assert "is it http:// and not https://?" in error.message

        run(body)


@each()
def test_a_connect_that_takes_too_long(cls: Any) -> None:
    """A server that accepts, and never says a word of TLS."""
    with socket.create_server(("127.0.0.1", 0)) as silent:

        async def body() -> None:
            async with opened(cls) as client:
                url = f"https://127.0.0.1:{silent.getsockname()[1]}/v1"
                limits = spanwire.Timeouts(connect_s=0.1)
                error = await failure(spanwire.Endpoint(url, options={"http_client": client}, timeouts=limits))
                assert isinstance(error, errors.CallTimeout)
                assert (error.limit, error.phase) == ("connect_s", "tls")
                assert error.message == "no connection within 0.1 s (Timeouts.connect_s), it stood at tls"

        run(body)


@each()
@pytest.mark.parametrize("mode", ["close", "reset"])
def test_a_server_that_goes_before_any_byte(cls: Any, mode: Any) -> None:
    with serving(hello(drop_after="request", drop_mode=mode)) as server:

        async def body() -> None:
            async with opened(cls) as client:
                error = await failure(to(server, client))
                assert isinstance(error, errors.ConnectionFailed)
                assert (error.phase, error.retryable) == ("wait", True)
                assert "before anything of the answer came" in error.message
                assert error.timeline is not None
                assert_adds_up(error.timeline)

        run(body)
        assert len(server.requests) == 1  # a new connection: no second try at once


@each()
def test_a_connection_that_was_used_before_and_breaks_is_tried_again(cls: Any) -> None:
    with serving(hello(), hello(drop_after="request"), hello()) as server:

        async def body() -> None:
            async with opened(cls) as client, ConnectionManager() as manager:
                endpoint = to(server, client, retries=NEVER)
                first = await manager.complete(endpoint, chat())
                second = await manager.complete(endpoint, chat())
                assert second.text == TEXT
                assert first.timeline is not None
                assert second.timeline is not None
                assert_adds_up(second.timeline)
                dead, fresh = second.timeline.to_dict()["attempts"]
                assert first.timeline.connection is not None
                assert dead["connection"]["id"] == first.timeline.connection.id
                assert dead["connection"]["reused"]
                assert not fresh["connection"]["reused"]

        run(body)
        assert server.connections == 2


@each()
@pytest.mark.parametrize("mode", ["close", "reset"])
def test_a_server_that_goes_in_the_middle(cls: Any, mode: Any) -> None:
    with serving(hello(drop_after=3, drop_mode=mode, gap_s=0.01)) as server:

        async def body() -> None:
            async with opened(cls) as client, ConnectionManager() as manager:
                text = ""
                with pytest.raises(errors.ConnectionFailed, match="in the middle of the answer") as caught:
                    async with manager.stream(to(server, client), chat()) as stream:
                        async for chunk in stream:
                            text += chunk.text
                assert caught.value.phase == "read"
                assert TEXT.startswith(text)
                assert text
                assert caught.value.reply is not None
                assert caught.value.reply.text == text
                assert_adds_up(stream.timeline)

        run(body)
        assert len(server.requests) == 1


@each()
@pytest.mark.parametrize(("status", "kind"), [(429, errors.RateLimited), (503, errors.Overloaded)])
def test_an_error_status_is_tried_again_on_the_same_connection(cls: Any, status: int, kind: type[Exception]) -> None:
    with serving(Script(status=status), Script(status=status), hello()) as server:

        async def body() -> None:
            async with opened(cls) as client, ConnectionManager() as manager:
                with pytest.raises(kind):
                    await manager.complete(to(server, client), chat(), retries=NEVER)
                reply = await manager.complete(to(server, client), chat(), retries=AT_ONCE)
                assert reply.text == TEXT

        run(body)
        assert server.connections == 1


@each()
def test_an_answer_that_is_not_complete(cls: Any) -> None:
    with serving(hello(done=False, finish_reason=None)) as server:

        async def body() -> None:
            async with opened(cls) as client, ConnectionManager() as manager:
                with pytest.raises(errors.Truncated):
                    async with manager.stream(to(server, client, retries=NEVER), chat()) as stream:
                        await read(stream)

        run(body)


@each()
def test_a_server_that_does_not_speak_http(cls: Any) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")
        writer.close()

    async def body() -> None:
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with opened(cls) as client:
            error = await failure(spanwire.Endpoint(f"http://127.0.0.1:{port}/v1", options={"http_client": client}))
            assert isinstance(error, errors.ProtocolError)
            assert "not HTTP" in error.message
        server.close()
        await server.wait_closed()

    run(body)


@each()
def test_an_answer_that_cannot_be_handled_ends_its_connection_only(cls: Any) -> None:
    with serving(hello(writes=[b"nonsense\n\n", b"more\n\n"], write_gap_s=0.01), hello()) as server:

        async def body() -> None:
            async with opened(cls) as client, ConnectionManager() as manager:
                endpoint = to(server, client, limits=spanwire.Limits(max_event_bytes=4), retries=NEVER)
                with pytest.raises(errors.ProtocolError):
                    async with manager.stream(endpoint, chat()) as stream:
                        await read(stream)
                assert (await manager.complete(to(server, client), chat())).text == TEXT

        run(body)


@each()
def test_a_compressed_answer(cls: Any) -> None:
    import gzip

    answer = gzip.compress(b'{"choices": [{"message": {"content": "small"}}]}')
    with serving(Script(body=answer, headers={"content-encoding": "gzip"})) as server:

        async def body() -> None:
            async with opened(cls) as client:
                assert (await complete(to(server, client))).text == "small"

        run(body)


# --- leaving ------------------------------------------------------------------------------------------------------------


@each()
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_leaving_early_ends_the_connection(cls: Any, tls: bool) -> None:
    with serving(hello(gap_s=0.01, hang_after=4), hello(), tls=tls) as server:

        async def body() -> None:
            more: dict[str, Any] = {"verify": trusting(server)} if tls else {}
            async with opened(cls, **more) as client, ConnectionManager() as manager:
                async with manager.stream(to(server, client), chat()) as stream:
                    async for _ in stream:
                        break
                await wait_for(server, lambda s: s.requests[0].left and s.open_connections == 0)
                assert stream.timeline.outcome == "closed_by_caller"
                assert_adds_up(stream.timeline)
                assert (await manager.complete(to(server, client), chat())).text == TEXT

        run(body)


@each()
@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
def test_leaving_before_the_answer_ends_the_connection(cls: Any, used: bool) -> None:
    """Also on a connection that was used before, of which no event tells which one it is."""
    with serving(hello(), hello(hang_after="request")) as server:

        async def body() -> None:
            async with opened(cls) as client, ConnectionManager() as manager:
                if not used:
                    server.script(hello(hang_after="request"))
                await manager.complete(to(server, client), chat())
                if not used:
                    server.disconnect()
                    await wait_for(server, lambda s: s.open_connections == 0)
                task = asyncio.ensure_future(manager.complete(to(server, client), chat()))
                await wait_for(server, lambda s: len(s.requests) == 2)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                await wait_for(server, lambda s: s.requests[1].left and s.open_connections == 0)

        run(body)
        assert server.connections == (1 if used else 2)


@each()
def test_a_stream_that_is_dropped(cls: Any) -> None:
    with serving(hello(gap_s=0.01, hang_after=4)) as server:

        async def body() -> None:
            async with opened(cls) as client, ConnectionManager() as manager:
                stream = manager.stream(to(server, client), chat())
                await anext(stream)
                del stream
                gc.collect()
                await wait_for(server, lambda s: s.requests[0].left and s.open_connections == 0)

        run(body)


@each()
def test_a_time_limit_ends_the_connection(cls: Any) -> None:
    with serving(hello(hang_after="request")) as server:

        async def body() -> None:
            async with opened(cls) as client:
                error = await failure(to(server, client), timeouts=spanwire.Timeouts(total_s=0.1))
                assert isinstance(error, errors.CallTimeout)
                assert (error.limit, error.phase) == ("total_s", "wait")
                assert error.timeline is not None
                assert_adds_up(error.timeline)
                await wait_for(server, lambda s: s.open_connections == 0)

        run(body)


@each()
def test_leaving_while_waiting_for_the_clients_pool(cls: Any) -> None:
    """The place in its queue is given up, and costs it no connection."""
    with serving(hello(gap_s=0.05), hello()) as server:

        async def body() -> None:
            limits = library(cls).Limits(max_connections=1)
            async with opened(cls, limits=limits) as client, ConnectionManager() as manager:
                async with manager.stream(to(server, client), chat()) as stream:
                    await anext(stream)
                    waiting = [asyncio.ensure_future(manager.complete(to(server, client), chat())) for _ in range(5)]
                    await asyncio.sleep(0.02)
                    for task in waiting:
                        task.cancel()
                    await asyncio.gather(*waiting, return_exceptions=True)
                    assert (await read(stream)).strip()
                assert (await manager.complete(to(server, client), chat())).text == TEXT

        run(body)
        assert len(server.requests) == 2


@each(ASYNC_CLIENTS)
def test_leaving_just_as_the_clients_pool_gives_a_connection(cls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """httpcore 1 would count that connection for ever, and its only slot would be gone."""
    with serving(hello(gap_s=0.05), hello()) as server:

        async def body() -> None:
            limits = library(cls).Limits(max_connections=1)
            async with opened(cls, limits=limits) as client, ConnectionManager() as manager:
                pool = client._transport._pool
                endpoint = to(server, client, limits=spanwire.Limits(queue_timeout_s=5), retries=NEVER)
                stream = manager.stream(endpoint, chat())
                await anext(stream)
                waiting = asyncio.ensure_future(manager.complete(endpoint, chat()))
                while len(pool._requests) < 2:
                    await asyncio.sleep(0)
                pool_request = type(pool._requests[1])
                assign = pool_request.assign_to_connection

                def assign_and_leave(self: Any, connection: Any) -> None:
                    assign(self, connection)
                    monkeypatch.undo()
                    for left in list(manager.state().runs):
                        left.leave("cancelled")

                monkeypatch.setattr(pool_request, "assign_to_connection", assign_and_leave)
                await stream.aclose()
                await waiting
                assert waiting.result().text == ""  # left
                assert (await manager.complete(endpoint, chat())).text == TEXT

        run(body)


@each()
def test_closing_the_manager_ends_what_runs(cls: Any) -> None:
    with serving(hello(gap_s=0.01, hang_after=4)) as server:

        async def body() -> None:
            async with opened(cls) as client:
                manager = ConnectionManager()
                stream = manager.stream(to(server, client), chat())
                await anext(stream)
                await manager.aclose()
                with pytest.raises(errors.ConnectionFailed, match="closed"):
                    await read(stream)
                await wait_for(server, lambda s: s.open_connections == 0)

        run(body)


@each()
def test_a_loop_that_ends_in_the_middle_of_a_stream(cls: Any) -> None:
    """Nobody closes anything: the loop's end does."""
    with serving(hello(gap_s=0.01, hang_after=4)) as server:
        kept: list[Any] = []

        async def body() -> None:
            client = cls(trust_env=False)
            stream = ConnectionManager().stream(to(server, client), chat())
            await anext(stream)
            kept.extend([client, stream])

        asyncio.run(body())
        server.wait_for(lambda s: s.open_connections == 0)
        for thread in threads():
            thread.join(10)
        if not is_async(cls):
            kept[0].close()


@each()
def test_a_slow_reader_stops_the_server(cls: Any) -> None:
    """Some 20 MB of events, of which nobody reads any for a while: they do not pile up here."""
    piece = "x" * 2000
    with serving(Script(tokens=[piece] * 10_000)) as server:

        async def body() -> None:
            async with opened(cls) as client, ConnectionManager() as manager:
                async with manager.stream(to(server, client), chat()) as stream:
                    await anext(stream)
                    run_ = stream._run
                    assert run_ is not None
                    carrier: Any = run_.exchange._http  # type: ignore[union-attr]
                    while not carrier._paused:
                        await asyncio.sleep(0)
                    assert not server.requests[0].ended
                    assert len(await read(stream)) >= 9_999 * len(piece)
                assert_adds_up(stream.timeline)

        run(body)


@each()
def test_leaving_a_stream_that_stands_still(cls: Any) -> None:
    piece = "x" * 2000
    with serving(Script(tokens=[piece] * 10_000)) as server:

        async def body() -> None:
            async with opened(cls) as client, ConnectionManager() as manager:
                async with manager.stream(to(server, client), chat()) as stream:
                    await anext(stream)
                    run_ = stream._run
                    assert run_ is not None
                    carrier: Any = run_.exchange._http  # type: ignore[union-attr]
                    while not carrier._paused:
                        await asyncio.sleep(0)
                await wait_for(server, lambda s: s.open_connections == 0)

        run(body)


# --- what is refused ----------------------------------------------------------------------------------------------------


@each(ASYNC_CLIENTS)
def test_a_second_loop_is_refused(cls: Any) -> None:
    with serving(hello()) as server:
        client = cls(trust_env=False)
        endpoint = to(server, client)

        async def first() -> None:
            await complete(endpoint)
            await client._transport.aclose()  # its connections, and not itself

        async def second() -> None:
            with pytest.raises(errors.ConfigurationError, match="another event loop"):
                await complete(endpoint)
            await client.aclose()

        run(first)
        run(second)


@each(SYNC_CLIENTS)
def test_a_synchronous_client_serves_many_loops(cls: Any) -> None:
    with serving(hello()) as server, cls(trust_env=False) as client:
        for _ in range(3):
            run(lambda: complete(to(server, client)))
        assert server.connections == 1


@each()
def test_a_closed_client_is_refused(cls: Any) -> None:
    async def body() -> None:
        async with opened(cls) as client:
            endpoint = spanwire.Endpoint("http://127.0.0.1:1/v1", options={"http_client": client})
        with pytest.raises(errors.ConfigurationError, match="is closed"):
            await complete(endpoint)

    run(body)


@pytest.mark.parametrize("thing", [None, "client", 1, *SYNC_CLIENTS], ids=repr)
def test_what_is_no_client_is_refused(thing: object) -> None:
    endpoint = spanwire.Endpoint("http://127.0.0.1:1/v1", options={"http_client": thing})
    with pytest.raises(errors.ConfigurationError) as caught:
        SSETransport().key(endpoint)
    for cls in (*ASYNC_CLIENTS, *SYNC_CLIENTS):
        assert name_of(cls) in caught.value.message


@each()
@pytest.mark.parametrize(
    "setting",
    [{"tls": spanwire.TLS(verify=False)}, {"proxy": "http://u:secret@p:1"}, {"uds": "/tmp/x"}],
    ids=lambda setting: next(iter(setting)),
)
def test_settings_that_would_be_ignored_are_refused(cls: Any, setting: dict[str, Any]) -> None:
    async def body() -> None:
        async with opened(cls) as client:
            endpoint = spanwire.Endpoint("https://127.0.0.1:1/v1", options={"http_client": client}, **setting)
            with pytest.raises(errors.ConfigurationError, match=rf"Endpoint\.{next(iter(setting))} has no") as caught:
                SSETransport().key(endpoint)
            assert "secret" not in str(caught.value)

    run(body)


@each()
def test_the_version_of_http_is_the_clients_business(cls: Any) -> None:
    async def body() -> None:
        async with opened(cls) as client:
            options = {"http_client": client, "http_version": "2"}
            with pytest.raises(errors.ConfigurationError, match=r"http_version.* has no effect"):
                SSETransport().key(spanwire.Endpoint("https://127.0.0.1:1/v1", proxy=None, options=options))

    run(body)


def test_a_process_where_httpx_is_httpx2() -> None:
    code = """
        import asyncio, httpx2
        httpx2.alias_httpx()
        import httpx, spanwire
        from spanwire.testing import LoopbackServer

        async def main(url):
            async with httpx.AsyncClient() as client, spanwire.ConnectionManager() as manager:
                endpoint = spanwire.Endpoint(url, options={"http_client": client})
                call = spanwire.Call.chat("m", [{"role": "user", "content": "hi"}])
                reply = await manager.complete(endpoint, call)
                print(reply.text, reply.timeline.connection.engine)

        with LoopbackServer() as server:
            asyncio.run(main(server.url))
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("You said: hi httpx2\n", "")
