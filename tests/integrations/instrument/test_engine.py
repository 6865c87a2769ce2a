"""``engine="spanwire"``: on our own connections everything is as on the library's."""

from __future__ import annotations

import asyncio
import gc
import gzip
import os
from types import ModuleType
from typing import Any

import openai
import pytest
from spanwire_instrument import httpx2_async_client, httpx2_async_transport

from spanwire.errors import ConfigurationError
from spanwire.testing import LoopbackServer, Script
from tests.integrations.instrument.support import BODY, FAMILIES, Seen, chat_url, connections, environment, trust
from tests.proxies import proxy
from tests.support import MESSAGES, assert_adds_up, hello, run, serving

pytestmark = pytest.mark.parametrize("hx", FAMILIES, ids=lambda hx: hx.__name__)

PLAIN = b'data: {"id":"x","choices":[{"delta":{"content":"Hello"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'


@pytest.fixture
def seen() -> Seen:
    return Seen()


def ours(hx: ModuleType, seen: Seen, **more: Any) -> Any:
    return seen.async_client(hx, engine="spanwire", follow_redirects=False, **more)


async def until_done(client: Any, url: str) -> bytes:
    got = b""
    async with client.stream("POST", url, json=BODY) as response:
        pieces = response.aiter_raw()
        async for piece in pieces:
            got += piece
            if b"[DONE]" in got:
                break
        await pieces.aclose()
    return got


async def close(client: Any, seen: Seen) -> None:
    await client.aclose()
    await seen.manager.aclose()


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("late_s", [0.0, 0.002])
def test_streams_in_a_row_take_one_connection(hx: ModuleType, tls: bool, late_s: float, seen: Seen) -> None:
    async def main(server: LoopbackServer) -> None:
        client = ours(hx, seen, verify=trust(server))
        for _ in range(6):
            assert b"[DONE]" in await until_done(client, chat_url(server))
            while any(member.leases for pool in seen.manager.state().pools.values() for member in pool.state.members):
                await asyncio.sleep(0)
        await close(client, seen)

    with serving(hello(end_s=late_s), tls=tls) as server:
        run(lambda: main(server))
        assert connections(server) == 1
    assert seen.outcomes == ["completed"] * 6
    for timeline in seen.timelines:
        assert_adds_up(timeline)
    first, second = seen.timelines[0], seen.timelines[1]
    assert set(first.segments["handshake"].parts) == ({"tcp", "tls"} if tls else {"tcp"})
    assert "handshake" not in second.segments
    assert second.connection is not None
    assert (second.connection.reused, second.connection.engine) == (True, "spanwire")
    assert len([span for span in seen.spans if span.name == "spanwire.connection_setup"]) == 1


ANSWERS = {
    "stream": Script(writes=[PLAIN[:40], PLAIN[40:]]),
    "json": Script(body=b'{"id":"x","choices":[]}', headers={"X-Odd-Case": "a b", "Set-Cookie": "a=1"}),
    "error": Script(status=503, body=b'{"error":{"message":"no"}}'),
    "gzip": Script(body=gzip.compress(PLAIN), headers={"Content-Encoding": "gzip"}, content_type="text/event-stream"),
    "empty": Script(body=b""),
    "redirect": Script(status=307, headers={"Location": "/v1/models"}, body=b""),
    "until eof": Script(writes=[PLAIN], chunked=False),
    "no content": Script(status=204, body=b""),
}


async def _whole(client: Any, url: str) -> Any:
    response = await client.post(url, json=BODY)
    return _seen_of(response), response.content


async def _raw(client: Any, url: str) -> Any:
    async with client.stream("POST", url, json=BODY) as response:
        return _seen_of(response), b"".join([piece async for piece in response.aiter_raw()])


async def _get(client: Any, url: str) -> Any:
    response = await client.get(f"{url.removesuffix('/chat/completions')}/models?x=%20y")
    return _seen_of(response), response.content


def _seen_of(response: Any) -> Any:
    raw = [pair for pair in response.headers.raw if pair[0].lower() != b"date"]
    stream = response.extensions["network_stream"]
    return (
        response.status_code,
        response.reason_phrase,
        response.http_version,
        raw,
        stream.get_extra_info("ssl_object") is None,
    )


@pytest.mark.parametrize("call", [_whole, _raw, _get], ids=lambda call: call.__name__[1:])
@pytest.mark.parametrize("name", ANSWERS)
def test_answers_and_requests_are_those_of_the_bare_client(hx: ModuleType, name: str, call: Any, seen: Seen) -> None:
    async def main(server: LoopbackServer) -> None:
        async with hx.AsyncClient() as bare:
            expected = await call(bare, chat_url(server))
        client = ours(hx, seen)
        assert await call(client, chat_url(server)) == expected
        await close(client, seen)

    with serving(ANSWERS[name]) as server:
        run(lambda: main(server))
        first, second = server.requests
        assert {key: value for key, value in second.headers.items() if key != "traceparent"} == dict(first.headers)
        assert (second.raw, second.method, second.path, second.query) == (
            first.raw,
            first.method,
            first.path,
            first.query,
        )
    assert len(seen.timelines) == (0 if call is _get else 1)


FAILURES = {
    "reset": Script(tokens=["a"] * 9, drop_after=3, drop_mode="reset"),
    "closed": Script(tokens=["a"] * 9, drop_after=3),
    "no answer": Script(drop_after="request"),
    "timeout": Script(tokens=["a"] * 9, hang_after=3),
    "no headers": Script(hang_after="request"),
    "no http": None,
}


@pytest.mark.parametrize("name", FAILURES)
def test_failures_are_of_the_same_class(hx: ModuleType, name: str, seen: Seen) -> None:
    async def main(url: str) -> list[type]:
        classes = []
        timeout = hx.Timeout(5, read=0.2)
        bare, client = hx.AsyncClient(timeout=timeout), ours(hx, seen, timeout=timeout)
        for one in (bare, client):
            with pytest.raises(hx.HTTPError) as caught:
                await _raw(one, url)
            assert caught.value.request.url == url
            classes.append(type(caught.value))
        await bare.aclose()
        await close(client, seen)
        return classes

    async def odd() -> list[type]:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"220 smtp.example.com ready\r\n")
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await main(f"http://127.0.0.1:{port}/v1/chat/completions")

    script = FAILURES[name]
    if script is None:
        expected, got = asyncio.run(odd())
    else:
        with serving(script) as server:
            expected, got = run(lambda: main(chat_url(server)))
            server.clear()
    assert got is expected
    assert seen.timelines[0].outcome == ("timeout" if name in ("timeout", "no headers") else "error")
    assert seen.timelines[0].error_type == got.__name__


def test_a_server_that_is_not_there(hx: ModuleType, seen: Seen, closed_port: int) -> None:
    async def main() -> None:
        client = ours(hx, seen)
        with pytest.raises(hx.ConnectError):
            await _whole(client, f"http://127.0.0.1:{closed_port}/v1/chat/completions")
        await close(client, seen)

    run(main)
    assert "handshake" in seen.timelines[0].segments


@pytest.mark.parametrize(
    "origin", ["://127.0.0.1", "http://", "ftp://127.0.0.1", "http://127.0.0.1:123456", "http://127.0.0.1:0"]
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/anything"])
def test_a_url_that_leads_nowhere_fails_as_without_us(
    hx: ModuleType, origin: str, path: str, seen: Seen, caplog: pytest.LogCaptureFixture
) -> None:
    async def failed(client: Any) -> BaseException:
        with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever it is
            await _whole(client, f"{origin}{path}")
        return caught.value

    async def main() -> tuple[BaseException, BaseException]:
        async with hx.AsyncClient() as client:
            bare = await failed(client)
        client = ours(hx, seen)
        got = await failed(client)
        await close(client, seen)
        return bare, got

    bare, got = run(main)
    assert (type(got), str(got)) == (type(bare), str(bare))
    assert not [record for record in caplog.records if record.name.startswith("spanwire")]


def test_a_certificate_that_is_not_trusted(hx: ModuleType, seen: Seen) -> None:
    async def main(server: LoopbackServer) -> None:
        client = ours(hx, seen)
        with pytest.raises(hx.ConnectError):
            await _whole(client, chat_url(server))
        unverified = ours(hx, seen, verify=False)
        assert (await _whole(unverified, chat_url(server)))[0][0] == 200
        await client.aclose()
        await close(unverified, seen)

    with serving(hello(), tls=True) as server:
        run(lambda: main(server))


def test_leaving_early_cancelling_and_dropping_tell_the_server(hx: ModuleType, seen: Seen) -> None:
    async def main(server: LoopbackServer) -> None:
        client = ours(hx, seen)

        async def first_piece() -> Any:
            response = await client.send(client.build_request("POST", chat_url(server), json=BODY), stream=True)
            pieces = response.aiter_raw()
            await anext(pieces)
            return response, pieces

        response, pieces = await first_piece()
        await response.aclose()
        await asyncio.to_thread(server.wait_for, lambda server: server.requests[0].left)

        async def hold() -> None:
            _response, pieces = await first_piece()
            async for _ in pieces:
                pass

        task = asyncio.create_task(hold())
        await asyncio.to_thread(
            server.wait_for, lambda server: len(server.requests) > 1 and server.requests[1].content_ns
        )
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(server.wait_for, lambda server: server.requests[1].left)

        response = await client.send(client.build_request("POST", chat_url(server), json=BODY), stream=True)
        del response, pieces
        gc.collect()
        await asyncio.to_thread(server.wait_for, lambda server: server.requests[2].left)
        await close(client, seen)

    with serving(Script(tokens=["a"] * 9, hang_after=3)) as server:
        asyncio.run(main(server))
    assert seen.outcomes == ["closed_by_caller", "cancelled", "abandoned"]


def test_the_limit_of_connections_is_kept(hx: ModuleType, seen: Seen) -> None:
    async def main(server: LoopbackServer) -> None:
        client = ours(hx, seen, limits=hx.Limits(max_connections=2), timeout=hx.Timeout(5, pool=0.05))
        held = [
            await client.send(client.build_request("POST", chat_url(server), json=BODY), stream=True) for _ in range(2)
        ]
        with pytest.raises(hx.PoolTimeout):
            await _whole(client, chat_url(server))
        for response in held:
            await response.aclose()
        server.script(hello())
        assert (await _whole(client, chat_url(server)))[0][0] == 200
        await close(client, seen)

    with serving(Script(tokens=["a"] * 9, hang_after=3)) as server:
        run(lambda: main(server))
        server.clear()
    assert seen.timelines[0].error_type == "PoolTimeout"


def test_large_bodies_both_ways_in_bounded_memory(hx: ModuleType, seen: Seen) -> None:
    size = 20 * 1024 * 1024

    async def main(server: LoopbackServer) -> None:
        client = ours(hx, seen)
        body = {**BODY, "messages": [{"role": "user", "content": "x" * size}]}
        async with client.stream("POST", chat_url(server), json=body) as response:
            answer = response.stream._stream._answer
            there = response.extensions["network_stream"].get_extra_info("server_addr")
            assert there == ("127.0.0.1", server.port)
            got = most = 0
            async for piece in response.aiter_raw():
                got += len(piece)
                most = max(most, len(piece))
                await asyncio.sleep(0)
                assert answer._ahead < 3 * 1024 * 1024
            assert got == size
            assert most < 3 * 1024 * 1024
        await close(client, seen)

    with serving(Script(body=b"y" * size, content_type="application/octet-stream")) as server:
        run(lambda: main(server))
        assert len(server.requests[0].raw) > size


def test_one_client_on_several_loops(hx: ModuleType, seen: Seen) -> None:
    client = ours(hx, seen)
    with serving(hello()) as server:
        for _ in range(3):
            assert b"[DONE]" in asyncio.run(until_done(client, chat_url(server)))
        assert connections(server) == 3
    assert seen.outcomes == ["completed"] * 3


def test_clients_share_connections_of_the_manager(hx: ModuleType, seen: Seen) -> None:
    async def main(server: LoopbackServer) -> None:
        for _ in range(5):
            await until_done(ours(hx, seen), chat_url(server))
        await seen.manager.aclose()

    with serving(hello()) as server:
        run(lambda: main(server))
        assert connections(server) == 1


def test_what_it_does_not_take_goes_through_the_librarys(hx: ModuleType, seen: Seen) -> None:
    async def main(server: LoopbackServer) -> None:
        client = ours(hx, seen)

        async def body() -> Any:
            yield b'{"model":"m","messages":[{"role":"user",'
            yield b'"content":"x"}]}'

        response = await client.post(chat_url(server), content=body(), headers={"content-type": "application/json"})
        assert response.status_code == 200
        assert server.requests[0].raw == b'{"model":"m","messages":[{"role":"user","content":"x"}]}'
        assert (await client.head(f"{server.url}/models")).status_code < 500
        await close(client, seen)

    with LoopbackServer([hello()]) as server:
        run(lambda: main(server))
    (timeline,) = seen.timelines
    assert timeline.connection is not None
    assert timeline.connection.engine == hx.__name__


def test_a_proxy_of_the_environment_goes_through_the_librarys(
    hx: ModuleType, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(server: LoopbackServer) -> None:
        client = ours(hx, seen)
        assert (await _whole(client, chat_url(server)))[0][0] == 200
        await close(client, seen)

    with proxy() as between, serving(hello()) as server:
        with environment(monkeypatch, {"HTTP_PROXY": f"http://127.0.0.1:{between.port}"}):
            asyncio.run(main(server))
        assert between.connections == 1


@pytest.mark.parametrize(
    "headers", [[(b"a b", b"c")], [(b"a", b"b\r\nc: d")], [(b"a", b"b\0")]], ids=["name", "line", "nul"]
)
def test_no_header_smuggles_in_another_one(hx: ModuleType, headers: Any, seen: Seen) -> None:
    async def main(server: LoopbackServer) -> None:
        client = ours(hx, seen)
        with pytest.raises(hx.LocalProtocolError):
            await client.post(chat_url(server), json=BODY, headers=headers)
        await close(client, seen)

    with serving(hello()) as server:
        run(lambda: main(server))
        assert server.requests == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_makes_connections_of_its_own(hx: ModuleType, seen: Seen) -> None:
    with serving(hello()) as server:
        client = ours(hx, seen)
        asyncio.run(until_done(client, chat_url(server)))
        child = os.fork()
        if child == 0:
            code = 9
            try:
                code = 0 if b"[DONE]" in asyncio.run(until_done(client, chat_url(server))) else 1
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert connections(server) == 2


@pytest.mark.parametrize(
    "wrong", [{"http2": True}, {"transport": object()}, {"engine": "other"}], ids=lambda wrong: next(iter(wrong))
)
def test_settings_that_it_cannot_follow_are_refused(hx: ModuleType, wrong: dict[str, Any], seen: Seen) -> None:
    with pytest.raises(ConfigurationError, match="engine"):
        seen.async_client(hx, **{"engine": "spanwire", **wrong})


def test_the_openai_sdk_on_it(hx: ModuleType, seen: Seen) -> None:
    async def main(server: LoopbackServer) -> None:
        transport = httpx2_async_transport(engine="spanwire", manager=seen.manager)
        for http in (httpx2_async_client(engine="spanwire", manager=seen.manager),
                     openai.DefaultAsyncHttpxClient(transport=transport)):  # fmt: skip
            client: Any = openai.AsyncOpenAI(base_url=server.url, api_key="k", http_client=http)
            for _ in range(3):
                stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
                chunks = [chunk async for chunk in stream]
                assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            await client.close()
        await seen.manager.aclose()

    with serving(hello()) as server:
        asyncio.run(main(server))
        assert connections(server) == 1
    assert seen.outcomes == ["completed"] * 6
