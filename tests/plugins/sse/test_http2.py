"""Calls over HTTP/2: through the managers, against hypercorn and against a server that does what a test says."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import h2.errors
import h2.events
import pytest
import trustme
from hypercorn.asyncio import serve
from hypercorn.config import Config
from spanwire_sse import SSETransport, register_transports

import spanwire
from spanwire import errors
from spanwire.manager import ConnectionManager
from spanwire.net import http2 as http2_module
from spanwire.pool import Member
from spanwire.sync import SyncConnectionManager
from spanwire.transport import Attempt, Connection
from tests.http2_server import Server
from tests.support import AT_ONCE, NEVER, assert_adds_up, chat, read, run, serving

H2 = {"http_version": "2"}
AUTO = {"http_version": "auto"}
TEXT = "Hello over one connection."


# --- a server that others wrote: hypercorn ------------------------------------------------------------------------------


async def released(member: Member) -> None:
    """Wait until nothing is on it any more: the end of a message may come later than its last event."""
    async with asyncio.timeout(20):
        while member.leases:
            await asyncio.sleep(0.001)


def event(text: str) -> bytes:
    return b"data: %s\n\n" % json.dumps({"id": "x", "model": "m", "choices": [{"delta": {"content": text}}]}).encode()


END = b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
WHOLE = {"id": "x", "model": "m", "choices": [{"message": {"content": TEXT}, "finish_reason": "stop"}]}


class App:
    """An ASGI application that answers chat calls. A call's model says how."""

    def __init__(self) -> None:
        self.versions: list[str] = []
        self.clients: set[tuple[str, int]] = set()
        self.headers: list[dict[str, str]] = []
        self.left = threading.Event()
        self.overloaded = 0
        self.crowd = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        self.versions.append(scope["http_version"])
        self.clients.add(tuple(scope["client"]))
        self.headers.append({name.decode(): value.decode() for name, value in scope["headers"]})
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        call = json.loads(body)
        if call["model"] == "overloaded" and self.overloaded:
            self.overloaded -= 1
            await send({"type": "http.response.start", "status": 503, "headers": [(b"retry-after", b"0")]})
            await send({"type": "http.response.body", "body": b'{"error": {"message": "busy"}}'})
            return
        kind = b"text/event-stream" if call.get("stream") else b"application/json"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
        if not call.get("stream"):
            await send({"type": "http.response.body", "body": json.dumps(WHOLE).encode()})
            return
        for word in TEXT.split(" "):
            first = word == TEXT.split(" ", maxsplit=1)[0]
            await send({"type": "http.response.body", "body": event(word if first else f" {word}"), "more_body": True})
        if call["model"] == "crowd":  # they all run at the same time, or this fails
            self.crowd += 1
            while self.crowd < 20:
                await asyncio.sleep(0.001)
        elif call["model"] == "endless":
            while (await receive())["type"] != "http.disconnect":
                pass
            self.left.set()
            return
        elif call["model"] == "truncated":
            await send({"type": "http.response.body", "body": b""})
            return
        elif call["model"] == "overdue":  # the stream's end stays away
            await send({"type": "http.response.body", "body": END, "more_body": True})
            while (await receive())["type"] != "http.disconnect":
                pass
            self.left.set()
            return
        await send({"type": "http.response.body", "body": END})


class Hypercorn:
    def __init__(self, app: App, port: int, ca: str | None) -> None:
        self.app, self.port, self.ca = app, port, ca

    def endpoint(self, **more: Any) -> spanwire.Endpoint:
        if self.ca is not None:
            more.setdefault("tls", spanwire.TLS(ca=self.ca))
        fields = {"proxy": None, "options": H2, "retries": NEVER, **more}
        return spanwire.Endpoint(f"{'http' if self.ca is None else 'https'}://127.0.0.1:{self.port}/v1", **fields)


@contextlib.contextmanager
def hypercorn(folder: Path | None, *, alpn: tuple[str, ...] = ("h2", "http/1.1")) -> Iterator[Hypercorn]:
    """With TLS if there is a folder for its certificate."""
    import socket

    listening = socket.create_server(("127.0.0.1", 0))
    config = Config()
    config.bind = [f"fd://{listening.fileno()}"]
    config.errorlog = None
    config.alpn_protocols = list(alpn)
    config.graceful_timeout = 0.1
    config.shutdown_timeout = 1
    authority = None
    if folder is not None:
        authority = trustme.CA()
        certificate = authority.issue_cert("127.0.0.1")
        certificate.private_key_pem.write_to_path(str(folder / "key.pem"))
        certificate.cert_chain_pems[0].write_to_path(str(folder / "cert.pem"))
        config.certfile, config.keyfile = str(folder / "cert.pem"), str(folder / "key.pem")
    app = App()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    problems: list[BaseException] = []

    def main() -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(serve(app, config, shutdown_trigger=stop.wait, mode="asgi"))
            loop.run_until_complete(loop.shutdown_default_executor())
        except BaseException as error:  # noqa: BLE001 - raised by the test
            problems.append(error)
        finally:
            loop.close()

    thread = threading.Thread(target=main)
    thread.start()
    try:
        ca = None if authority is None else authority.cert_pem.bytes().decode()
        yield Hypercorn(app, listening.getsockname()[1], ca)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(20)
        listening.detach()  # hypercorn has closed it
    assert problems == []


@pytest.fixture(params=["tls", "prior knowledge"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Hypercorn]:
    with hypercorn(tmp_path if request.param == "tls" else None) as found:
        yield found


def test_streamed_and_whole_answers(server: Hypercorn) -> None:
    async def body() -> None:
        async with ConnectionManager() as manager:
            endpoint = server.endpoint(api_key="k", headers={"X-Mine": "1"})
            async with manager.stream(endpoint, chat()) as stream:
                assert await read(stream) == TEXT
            timeline = stream.timeline
            assert_adds_up(timeline)
            found = timeline.to_dict()["connection"]
            assert (found["protocol"], found["reused"]) == ("h2", False)
            parts = set(timeline.segments["handshake"].parts)
            assert parts == ({"tcp", "tls"} if server.ca else {"tcp"})
            reply = await manager.complete(endpoint, chat())
            assert reply.text == TEXT
            assert reply.finish_reason == "stop"
            assert reply.timeline is not None
            assert reply.timeline.to_dict()["connection"]["reused"]

    run(body)
    assert server.app.versions == ["2", "2"]
    assert len(server.app.clients) == 1
    for headers in server.app.headers:
        assert headers["authorization"] == "Bearer k"
        assert headers["x-mine"] == "1"
        assert headers["host"] == f"127.0.0.1:{server.port}"
        assert headers["content-length"].isdigit()


def test_a_cold_burst_shares_one_connection(server: Hypercorn) -> None:
    """And all its calls run at the same time: the server waits until it has them all."""

    async def body() -> None:
        async with ConnectionManager() as manager:
            endpoint = server.endpoint()

            async def one() -> spanwire.Timeline:
                async with manager.stream(endpoint, chat("crowd")) as stream:
                    assert await read(stream) == TEXT
                assert_adds_up(stream.timeline)
                return stream.timeline

            timelines = await asyncio.gather(*(one() for _ in range(20)))
            parts = [set(timeline.segments["handshake"].parts) for timeline in timelines]
            assert sum("shared" in found for found in parts) == 19
            assert len({timeline.to_dict()["connection"]["id"] for timeline in timelines}) == 1
            (pool,) = manager.state().pools.values()
            (member,) = pool.state.members
            assert isinstance(member.connection, Connection)
            await released(member)
            assert member.connection.usable()

    run(body)
    assert len(server.app.clients) == 1


def test_synchronously(server: Hypercorn) -> None:
    with SyncConnectionManager() as manager:
        endpoint = server.endpoint()
        for _ in range(3):
            with manager.stream(endpoint, chat()) as stream:
                assert "".join(chunk.text for chunk in stream) == TEXT
        assert manager.complete(endpoint, chat()).text == TEXT
    assert len(server.app.clients) == 1


def test_a_large_prompt(server: Hypercorn) -> None:
    call = spanwire.Call.chat("m", [{"role": "user", "content": "x" * 3_000_000}])

    async def body() -> None:
        async with ConnectionManager() as manager:
            assert (await manager.complete(server.endpoint(), call)).text == TEXT

    run(body)


@pytest.mark.parametrize("how", ["break", "cancel", "timeout"])
def test_leaving_tells_the_server_and_the_connection_goes_on(server: Hypercorn, how: str) -> None:
    async def body() -> None:
        async with ConnectionManager() as manager:
            endpoint = server.endpoint(timeouts=spanwire.Timeouts(idle_s=0.2 if how == "timeout" else 60))
            started = asyncio.Event()

            async def endless() -> None:
                async with manager.stream(endpoint, chat("endless")) as stream:
                    async for _ in stream:
                        started.set()
                        if how == "break":
                            break

            leaving = asyncio.ensure_future(endless())
            await started.wait()
            if how == "cancel":
                leaving.cancel()
            with contextlib.suppress(asyncio.CancelledError, errors.CallTimeout):
                await leaving
            assert await asyncio.to_thread(server.app.left.wait, 20)
            assert (await manager.complete(endpoint, chat())).text == TEXT

    run(body)
    assert len(server.app.clients) == 1


def test_an_end_that_is_overdue_is_reset_alone(server: Hypercorn) -> None:
    async def body() -> None:
        async with ConnectionManager() as manager:
            endpoint = server.endpoint()
            async with manager.stream(endpoint, chat("overdue")) as stream:
                assert await read(stream) == TEXT
            assert not server.app.left.is_set()
            (pool,) = manager.state().pools.values()
            (member,) = pool.state.members
            assert member.leases == 1  # the server still counts it
            assert await asyncio.to_thread(server.app.left.wait, 20)
            await released(member)
            assert (await manager.complete(endpoint, chat())).text == TEXT

    run(body)
    assert len(server.app.clients) == 1


def test_an_overloaded_server_is_asked_again_on_the_same_connection(server: Hypercorn) -> None:
    async def body() -> None:
        async with ConnectionManager() as manager:
            server.app.overloaded = 1
            reply = await manager.complete(server.endpoint(retries=AT_ONCE), chat("overloaded"))
            assert reply.text == TEXT
            server.app.overloaded = 1
            with pytest.raises(errors.Overloaded, match="busy"):
                await manager.complete(server.endpoint(), chat("overloaded"))

    run(body)
    assert len(server.app.clients) == 1


def test_a_clean_end_before_the_answer_was_complete(server: Hypercorn) -> None:
    async def body() -> None:
        async with ConnectionManager() as manager:
            with pytest.raises(errors.Truncated) as caught:
                async with manager.stream(server.endpoint(), chat("truncated")) as stream:
                    await read(stream)
            assert caught.value.reply is not None
            assert caught.value.reply.text == TEXT

    run(body)


@pytest.mark.skipif(sys.platform == "win32", reason="there is no uvloop")
def test_on_uvloop(server: Hypercorn) -> None:
    import uvloop

    async def body() -> None:
        async with ConnectionManager() as manager:
            for options in (H2, AUTO):
                endpoint = server.endpoint(options=options)
                texts = await asyncio.gather(*(manager.complete(endpoint, chat()) for _ in range(5)))
                assert {reply.text for reply in texts} == {TEXT}

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(body())


# --- which version ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("alpn", "version", "protocol", "expected"),
    [(("h2", "http/1.1"), "2", "h2", 100), (("http/1.1",), "1.1", "http/1.1", 1), ((), "1.1", "http/1.1", 1)],
)
def test_auto_takes_what_the_server_chooses(
    tmp_path: Path, alpn: tuple[str, ...], version: str, protocol: str, expected: int
) -> None:
    with hypercorn(tmp_path, alpn=alpn) as server:

        async def body() -> None:
            async with ConnectionManager() as manager:
                endpoint = server.endpoint(options=AUTO)
                replies = await asyncio.gather(*(manager.complete(endpoint, chat()) for _ in range(5)))
                assert {reply.text for reply in replies} == {TEXT}
                assert replies[0].timeline is not None
                assert replies[0].timeline.to_dict()["connection"]["protocol"] == protocol
                (pool,) = manager.state().pools.values()
                assert pool.transport.expect(endpoint) == expected

        run(body)
        assert set(server.app.versions) == {version}
        assert (len(server.app.clients) == 1) == (protocol == "h2")


@pytest.mark.parametrize("alpn", [("http/1.1",), ()])
def test_a_server_without_http2_where_it_is_required(tmp_path: Path, alpn: tuple[str, ...]) -> None:
    with hypercorn(tmp_path, alpn=alpn) as server:

        async def body() -> None:
            async with ConnectionManager() as manager:
                with pytest.raises(errors.ConnectionFailed, match="does not speak HTTP/2 here") as caught:
                    await manager.complete(server.endpoint(retries=AT_ONCE), chat())
                assert (caught.value.phase, caught.value.retryable) == ("tls", False)

        run(body)
        assert server.app.versions == []


def test_without_tls_auto_is_http_1_1() -> None:
    with serving() as server:

        async def body() -> None:
            async with ConnectionManager() as manager:
                await manager.complete(server.endpoint(options=AUTO), chat())
                await manager.complete(server.endpoint(), chat())
                (pool,) = manager.state().pools.values()  # and they share connections
                (member,) = pool.state.members
                assert member.uses == 2

        run(body)


def test_a_server_of_http_1_1_where_http2_is_known_beforehand() -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await reader.read()
        writer.close()

    async def body() -> None:
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        endpoint = spanwire.Endpoint(f"http://127.0.0.1:{port}/v1", proxy=None, options=H2, retries=NEVER)
        async with ConnectionManager() as manager:
            with pytest.raises(errors.ProtocolError, match=r"not HTTP/2 \(HTTP/1.1\)"):
                await manager.complete(endpoint, chat())
        server.close()
        await server.wait_closed()

    run(body)


@pytest.mark.parametrize("version", ["3", "", 2, None, ["2"], "h2"])
def test_versions_that_do_not_exist(version: object) -> None:
    endpoint = spanwire.Endpoint("http://h/v1", options={"http_version": version})
    with pytest.raises(errors.ConfigurationError, match=r'must be "1\.1", "2" or "auto"'):
        SSETransport().key(endpoint)


@pytest.mark.parametrize("version", ["2", "auto"])
def test_without_h2_the_line_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setitem(sys.modules, "h2.connection", None)
    monkeypatch.setitem(sys.modules, "h2", None)
    endpoint = spanwire.Endpoint("https://h/v1", options={"http_version": version})
    with pytest.raises(errors.ConfigurationError, match=r"pip install 'spanwire\[http2\]'"):
        SSETransport().key(endpoint)
    SSETransport().key(spanwire.Endpoint("https://h/v1"))


def test_endpoints_of_different_versions_share_no_connection() -> None:
    transport = SSETransport()
    endpoints = [
        spanwire.Endpoint("https://h/v1", options={"http_version": version}) for version in ("1.1", "2", "auto")
    ]
    assert len({transport.key(endpoint) for endpoint in endpoints}) == 3
    assert transport.key(endpoints[0]) == transport.key(spanwire.Endpoint("https://h/v1"))
    assert [transport.expect(endpoint) for endpoint in endpoints] == [1, 100, 100]
    (spec,) = register_transports()
    assert "http_version" in spec.options


# --- a server that does what it is told ---------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def scripted(*scripts: Callable[[Server], Awaitable[None]], **more: Any) -> AsyncIterator[spanwire.Endpoint]:
    """Each connection runs the next script, without TLS."""
    left = list(scripts)
    tasks: list[asyncio.Task[Any]] = []
    failures: list[Exception] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.append(task)
        try:
            await left.pop(0)(Server(reader, writer))
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        except Exception as error:  # noqa: BLE001 - raised by the test
            failures.append(error)
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield spanwire.Endpoint(f"http://127.0.0.1:{port}/v1", proxy=None, options=H2, **{"retries": NEVER, **more})
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        server.close()
        await server.wait_closed()
    assert failures == []
    assert left == []


def say(server: Server, stream: int) -> None:
    server.head(stream, ("content-type", "text/event-stream"))
    server.data(stream, event(TEXT) + END, end=True)


async def on(server: Server) -> None:
    """Until the client leaves."""
    while True:
        await server.read()


def test_a_refused_stream_is_sent_again() -> None:
    async def script(server: Server) -> None:
        server.hello()
        server.reset(await server.request(), h2.errors.ErrorCodes.REFUSED_STREAM)
        say(server, await server.request())
        await on(server)

    async def body() -> None:
        async with scripted(script, retries=AT_ONCE) as endpoint, ConnectionManager() as manager:
            assert (await manager.complete(endpoint, chat())).text == TEXT

    run(body)


def test_what_a_goaway_left_out_is_sent_again_on_a_new_connection() -> None:
    """Without a retry of the caller's: the connection was used before, and nothing was processed."""

    async def first(server: Server) -> None:
        server.hello()
        stream = await server.request()
        say(server, stream)
        await server.request()
        server.goaway(stream)
        await on(server)

    async def second(server: Server) -> None:
        server.hello()
        say(server, await server.request())
        await on(server)

    async def body() -> None:
        async with scripted(first, second) as endpoint, ConnectionManager() as manager:
            assert (await manager.complete(endpoint, chat())).text == TEXT
            reply = await manager.complete(endpoint, chat())
            assert reply.text == TEXT
            assert reply.timeline is not None
            assert len(reply.timeline.to_dict()["attempts"]) == 2

    run(body)


def test_a_connection_that_is_going_away_is_not_used_again() -> None:
    async def first(server: Server) -> None:
        server.hello()
        stream = await server.request()
        server.goaway(2**31 - 1)
        say(server, stream)
        while await server.reader.read(100):
            pass

    async def second(server: Server) -> None:
        server.hello()
        say(server, await server.request())
        await on(server)

    async def body() -> None:
        async with scripted(first, second) as endpoint, ConnectionManager() as manager:
            for _ in range(2):
                reply = await manager.complete(endpoint, chat())
                assert reply.text == TEXT
                assert reply.timeline is not None
                assert len(reply.timeline.to_dict()["attempts"]) == 1

    run(body)


def test_an_answer_that_breaks_off_is_delivered_up_to_there() -> None:
    async def script(server: Server) -> None:
        server.hello()
        one, two = await server.request(), await server.request()
        server.head(one, ("content-type", "text/event-stream"))
        server.data(one, event("Hello"))
        server.reset(one, h2.errors.ErrorCodes.INTERNAL_ERROR)
        say(server, two)
        await on(server)

    async def body() -> None:
        async with scripted(script) as endpoint, ConnectionManager() as manager:
            broken: list[spanwire.SpanwireError] = []

            async def one() -> str:
                async with manager.stream(endpoint, chat()) as stream:
                    try:
                        return await read(stream)
                    except errors.ConnectionFailed as error:
                        broken.append(error)
                        return ""

            texts = [*await asyncio.gather(one(), one())]
            assert texts == ["", TEXT]
            (error,) = broken
            assert "INTERNAL_ERROR" in str(error)
            assert error.phase == "read"
            assert error.reply is not None
            assert error.reply.text == "Hello"

    run(body)


def test_a_server_that_takes_one_at_a_time_gets_a_connection_for_each() -> None:
    """More than it allows were planned on one connection, before it said so: they wait for each other there."""

    async def script(server: Server) -> None:
        server.hello(max_concurrent_streams=1)
        for _ in range(3):
            say(server, await server.request())
        await on(server)

    async def body() -> None:
        async with scripted(script) as endpoint, ConnectionManager() as manager:
            await manager.warm(endpoint)
            (pool,) = manager.state().pools.values()
            (member,) = pool.state.members
            while member.connection.capacity > 1:
                await asyncio.sleep(0)
            for _ in range(3):
                assert (await manager.complete(endpoint, chat())).text == TEXT

    run(body)


def test_a_server_that_allows_few_is_known_to_do_so_the_next_time() -> None:
    async def script(server: Server) -> None:
        server.hello(max_concurrent_streams=2)
        while True:
            say(server, await server.request())

    async def body() -> None:
        async with scripted(*[script] * 4) as endpoint, ConnectionManager() as manager:
            assert (await manager.complete(endpoint, chat())).text == TEXT
            (pool,) = manager.state().pools.values()
            assert pool.transport.expect(endpoint) == 2
            (first,) = pool.state.members
            first.connection.abort()
            replies = await asyncio.gather(*(manager.complete(endpoint, chat()) for _ in range(6)))
            assert {reply.text for reply in replies} == {TEXT}
            assert {member.connection.capacity for member in pool.state.members} == {2}

    run(body)


def test_capacity_is_free_as_soon_as_the_server_has_ended_the_stream() -> None:
    """At the limit of one stream: the next call waits for the end of the message, and no longer."""

    async def script(server: Server) -> None:
        server.hello(max_concurrent_streams=1)
        stream = await server.request()
        server.head(stream)
        server.data(stream, event(TEXT) + END)
        server.http.end_stream(stream)
        server.flush()
        say(server, await server.request())
        await on(server)

    async def body() -> None:
        async with scripted(script) as endpoint, ConnectionManager() as manager:
            await manager.warm(endpoint)
            for _ in range(2):
                async with manager.stream(endpoint, chat()) as stream:
                    assert await read(stream) == TEXT

    run(body)


@pytest.mark.parametrize("header", ["Keep-Alive", "TE", "Upgrade"])
def test_headers_of_http_1_1_are_refused(header: str) -> None:
    async def script(server: Server) -> None:
        server.hello()
        say(server, await server.request())
        await on(server)

    async def body() -> None:
        async with scripted(script) as endpoint, ConnectionManager() as manager:
            with pytest.raises(errors.ConfigurationError, match=header.lower()):
                await manager.complete(endpoint, chat(headers={header: "x"}))
            assert (await manager.complete(endpoint, chat())).text == TEXT
            (pool,) = manager.state().pools.values()
            (member,) = pool.state.members
            await released(member)

    run(body)


@pytest.mark.parametrize("code", ["INTERNAL_ERROR", "ENHANCE_YOUR_CALM", "REFUSED_STREAM"])
def test_a_stream_that_is_reset_is_no_dead_connection(code: str) -> None:
    """The server has said no to this call, on a connection that is well: nothing is sent again for that."""
    asked: list[int] = []

    async def script(server: Server) -> None:
        server.hello()
        while True:
            number = await server.request()
            asked.append(number)
            if len(asked) == 1:
                server.answer(number, SSE, ("content-type", "text/event-stream"))
            else:
                server.reset(number, h2.errors.ErrorCodes[code])

    async def body(endpoint: spanwire.Endpoint) -> None:
        async with ConnectionManager(telemetry=None) as manager:
            await manager.complete(endpoint, chat())
            for _ in range(3):
                with pytest.raises(errors.ConnectionFailed):
                    await manager.complete(endpoint, chat(), retries=NEVER)

    assert served(script, body) == 1
    assert len(asked) == 4


def test_calls_that_lose_their_connection_share_the_next_one() -> None:
    count = 30
    asked = 0

    async def script(server: Server) -> None:
        nonlocal asked
        server.hello()
        while True:
            number = await server.request()
            asked += 1
            if 1 < asked <= 1 + count:
                if asked == 1 + count:
                    server.writer.transport.abort()
                    return
            else:
                server.answer(number, SSE, ("content-type", "text/event-stream"))

    async def body(endpoint: spanwire.Endpoint) -> None:
        async with ConnectionManager(telemetry=None) as manager:
            await manager.complete(endpoint, chat())
            calls = [manager.complete(endpoint, chat(), retries=NEVER) for _ in range(count)]
            assert {reply.text for reply in await asyncio.gather(*calls)} == {"over h2"}

    assert served(script, body) == 2
    assert asked == 1 + 2 * count


def test_a_peer_that_is_gone_without_a_word_costs_one_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2_module, "_SILENCE_NS", 0)
    connections = 0

    async def script(server: Server) -> None:
        nonlocal connections
        connections += 1
        silent = connections == 1
        server.hello()
        server.answer(await server.request(), SSE, ("content-type", "text/event-stream"))
        while not silent:
            server.answer(await server.request(), SSE, ("content-type", "text/event-stream"))
        await asyncio.sleep(3600)

    async def body(endpoint: spanwire.Endpoint) -> None:
        async with ConnectionManager(telemetry=None) as manager:
            await manager.complete(endpoint, chat())
            timeouts = spanwire.Timeouts(first_content_s=0.2)
            reply = await manager.complete(endpoint, chat(), timeouts=timeouts, retries=AT_ONCE)
            assert reply.text == "over h2"
            assert reply.timeline is not None
            assert [one["outcome"] for one in reply.timeline.to_dict()["attempts"]] == ["timeout", "completed"]

    assert served(script, body) == 2


def test_a_server_that_takes_no_call_now_is_not_remembered_so() -> None:
    transport = SSETransport()
    endpoint = spanwire.Endpoint("http://127.0.0.1:1/v1", proxy=None, options={"http_version": "2"})

    async def script(server: Server) -> None:
        server.hello(max_concurrent_streams=0)
        await asyncio.sleep(3600)

    async def body(endpoint: spanwire.Endpoint) -> None:
        attempt = Attempt(endpoint, timeouts=spanwire.Timeouts())
        connection = await transport.connect(endpoint, attempt)
        while connection.capacity:
            await asyncio.sleep(0)
        connection.abort()
        assert transport.expect(endpoint) > 0

    assert transport.expect(endpoint) > 0
    served(script, body)


SSE = b'data: {"choices":[{"index":0,"delta":{"content":"over h2"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'


def served(script: Callable[[Server], Awaitable[None]], body: Callable[[spanwire.Endpoint], Awaitable[None]]) -> int:
    """Run ``body`` with an endpoint where ``script`` serves each connection. Returns how many there were."""
    connections = 0

    async def main() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal connections
            connections += 1
            with contextlib.suppress(OSError, EOFError, asyncio.CancelledError):
                await script(Server(reader, writer))
            writer.close()

        listening = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        try:
            await body(spanwire.Endpoint(f"http://127.0.0.1:{port}/v1", proxy=None, options={"http_version": "2"}))
        finally:
            listening.close()

    asyncio.run(asyncio.wait_for(main(), 20))
    return connections
