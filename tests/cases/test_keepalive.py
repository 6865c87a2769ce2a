"""C17 and C18: connections that the server closes just as they are used again, and who shares them."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from typing import Any, Literal

import pytest

import spanwire
from spanwire import errors
from spanwire.testing import LoopbackServer, Script
from tests.cases.play import AB, END, HEAD, RawServer, chunked, data, nothing_left, send
from tests.support import NEVER, assert_adds_up, chat, hello, read, run, serving, wait_for

FINE = send(HEAD + chunked(AB + END) + b"0\r\n\r\n")
Ask = Callable[..., spanwire.Timeline]
KINDS = ("async stream", "async complete", "sync stream", "sync complete")


def twice(kind: str, endpoint: spanwire.Endpoint, between: Callable[[], Any] = lambda: None) -> list[Any]:
    """Two calls on one manager; what each gave: a timeline, or an error."""
    found: list[Any] = []

    async def one(manager: spanwire.ConnectionManager) -> None:
        try:
            if kind.endswith("stream"):
                async with manager.stream(endpoint, chat()) as stream:
                    await read(stream)
                found.append(stream.timeline)
            else:
                found.append((await manager.complete(endpoint, chat())).timeline)
        except errors.SpanwireError as error:
            found.append(error)

    async def both() -> None:
        async with spanwire.ConnectionManager() as manager:
            await one(manager)
            await asyncio.to_thread(between)
            await one(manager)

    def one_sync(manager: spanwire.SyncConnectionManager) -> None:
        try:
            if kind.endswith("stream"):
                with manager.stream(endpoint, chat()) as stream:
                    list(stream)
                found.append(stream.timeline)
            else:
                found.append(manager.complete(endpoint, chat()).timeline)
        except errors.SpanwireError as error:
            found.append(error)

    if kind.startswith("async"):
        run(both)
    else:
        with spanwire.SyncConnectionManager() as manager:
            one_sync(manager)
            between()
            one_sync(manager)
    for item in found:
        timeline: Any = item.timeline if isinstance(item, errors.SpanwireError) else item
        assert_adds_up(timeline)
    return found


def attempts(timeline: Any) -> int:
    return len(timeline.to_dict()["attempts"])


# --- C17 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reset", [False, True])
def test_a_an_idle_connection_that_the_server_has_closed(kind: str, reset: bool) -> None:
    with serving(default=lambda _request: hello()) as server, nothing_left(server):

        def close() -> None:
            server.disconnect(reset=reset)
            server.wait_for(lambda s: s.open_connections == 0)
            time.sleep(0.05)

        _, second = twice(kind, server.endpoint(retries=NEVER), close)
        assert isinstance(second, spanwire.Timeline)
        assert second.connection is not None
        assert not second.connection.reused
        assert attempts(second) == 1
        assert len(server.requests) == server.connections == 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["close", "reset"])
def test_b_a_connection_that_closes_on_the_request(kind: str, mode: Literal["close", "reset"]) -> None:
    with serving(hello(), Script(drop_after="request", drop_mode=mode), hello()) as server, nothing_left(server):
        _, second = twice(kind, server.endpoint(retries=NEVER))
        assert isinstance(second, spanwire.Timeline)
        assert attempts(second) == 2
        assert second.connection is not None
        assert not second.connection.reused
        assert len(server.requests) == 3
        assert len({request.headers["idempotency-key"] for request in server.requests[1:]}) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["close", "reset"])
def test_b_only_where_retries_allow_it_and_only_once(kind: str, mode: Literal["close", "reset"]) -> None:
    drop = Script(drop_after="request", drop_mode=mode)
    for retries, scripts, requests in (
        (spanwire.Retries(max_attempts=1, stale=False), (hello(), drop, hello()), 2),
        (NEVER, (hello(), drop), 3),  # a new connection that breaks too is no stale one
        (NEVER, (drop, drop), 2),  # nor is one that is used for the first time
    ):
        with serving(*scripts) as server, nothing_left(server):
            second = twice(kind, server.endpoint(retries=retries))[1]
            assert isinstance(second, errors.ConnectionFailed)
            assert second.phase == "wait"
            assert len(server.requests) == requests


def test_b_the_retry_does_not_go_to_another_connection_of_the_same_age() -> None:
    """A server that has closed one idle connection has probably closed them all: the retry is on a NEW one."""
    drop = Script(drop_after="request")
    with serving(default=lambda _request: hello()) as server, nothing_left(server):
        endpoint = server.endpoint(retries=NEVER)

        async def body() -> None:
            async with spanwire.ConnectionManager() as manager:
                await manager.warm(endpoint, 3)
                await asyncio.gather(*(manager.complete(endpoint, chat()) for _ in range(3)))
                assert server.connections == 3
                server.clear()
                server.script(drop, model="last", times=1)
                reply = await manager.complete(endpoint, chat("last"))
                assert reply.timeline is not None
                assert reply.timeline.connection is not None
                assert not reply.timeline.connection.reused
                assert server.requests[-1].connection == 4

        run(body)


CUT_HEADS = {
    "status line": b"HTTP/1.1 200 OK\r\n",
    "half a status line": b"HTTP/1.1 2",
    "one byte": b"H",
    "half a head": HEAD[:-2],
    "head": HEAD,
    "head and a role": HEAD + chunked(data({"choices": [{"delta": {"role": "assistant"}}]})),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["close", "reset"])
@pytest.mark.parametrize("name", CUT_HEADS)
def test_c_an_answer_that_has_begun_is_no_stale_connection(name: str, mode: str, kind: str) -> None:
    """Not one byte of the answer may have come: the server has seen the request, and has begun."""
    with nothing_left(), RawServer(FINE, send(CUT_HEADS[name], mode), FINE) as server:
        _, second = twice(kind, server.endpoint(retries=NEVER))
        assert isinstance(second, errors.ConnectionFailed)
        assert second.phase == "read"
        assert server.requests == 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "extra",
    [b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n", b"junk", HEAD + chunked(AB + END) + b"0\r\n\r\n"],
    ids=["an early 408", "junk", "a second answer"],
)
def test_bytes_that_nobody_asked_for_make_a_connection_useless(extra: bytes, kind: str) -> None:
    """They belong to no request; the next call must not take them for its own answer."""
    one = HEAD + chunked(AB + END) + b"0\r\n\r\n"
    with nothing_left(), RawServer(send(one + extra), FINE) as server:
        _, second = twice(kind, server.endpoint(retries=NEVER), lambda: time.sleep(0.02))
        assert isinstance(second, spanwire.Timeline)
        assert server.requests == server.connections == 2


@pytest.mark.parametrize("kind", ["async stream", "sync complete"])
def test_a_server_says_how_long_it_keeps_a_connection(kind: str) -> None:
    with serving(default=lambda _request: hello(headers={"keep-alive": "timeout=1"})) as server, nothing_left(server):
        _, second = twice(kind, server.endpoint(retries=NEVER), lambda: time.sleep(0.55))
        assert not second.connection.reused
    for headers in ({"connection": "close"}, {"Connection": "Keep-Alive, Close"}):
        with serving(default=lambda _request, h=headers: hello(headers=h)) as server:
            _, second = twice(kind, server.endpoint(retries=NEVER))
            assert not second.connection.reused


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("status", [400, 429, 500])
def test_an_error_status_keeps_the_connection(status: int, kind: str) -> None:
    with serving(Script(status=status, body=b"no" * 40_000), hello()) as server, nothing_left(server):
        first, second = twice(kind, server.endpoint(retries=NEVER))
        assert isinstance(first, errors.ServerError)
        assert second.connection.reused
        assert server.connections == 1


# --- C18 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["async", "sync"])
def test_a_hundred_calls_with_equal_settings_are_one_handshake(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An endpoint object for each call, with settings that are no part of a connection; one context, one handshake."""
    made = []
    real = ssl.create_default_context

    def counted(*arguments: Any, **more: Any) -> ssl.SSLContext:
        made.append(arguments)
        return real(*arguments, **more)

    with LoopbackServer(tls=True, default=lambda _request: hello()) as server, nothing_left(server):
        monkeypatch.setattr(ssl, "create_default_context", counted)
        found: list[spanwire.Timeline] = []

        def endpoint(n: int) -> spanwire.Endpoint:
            return server.endpoint(api_key=f"k{n}", headers={"x-n": str(n)}, timeouts=spanwire.Timeouts(total_s=60 + n))

        async def body() -> None:
            async with spanwire.ConnectionManager() as manager:
                for n in range(100):
                    reply = await manager.complete(endpoint(n), chat())
                    assert reply.timeline is not None
                    found.append(reply.timeline)

        if kind == "async":
            run(body)
        else:
            with spanwire.SyncConnectionManager() as manager:
                for n in range(100):
                    timeline = manager.complete(endpoint(n), chat()).timeline
                    assert timeline is not None
                    found.append(timeline)
        assert server.connections == 1
        assert [request.headers["authorization"] for request in server.requests] == [f"Bearer k{n}" for n in range(100)]
    assert len(made) <= 1
    assert "tls" in found[0].segments["handshake"].parts
    assert all("handshake" not in timeline.segments for timeline in found[1:])


def test_managers_share_nothing_and_closing_one_leaves_the_other() -> None:
    with serving(default=lambda _request: hello()) as server, nothing_left(server):
        endpoint = server.endpoint(retries=NEVER)

        async def body() -> None:
            async with spanwire.ConnectionManager() as kept:
                await kept.complete(endpoint, chat())
                async with spanwire.ConnectionManager() as other:
                    await other.complete(endpoint, chat())
                    assert server.connections == 2
                await wait_for(server, lambda s: s.open_connections == 1)
                reply = await kept.complete(endpoint, chat())
                assert reply.timeline is not None
                assert reply.timeline.connection is not None
                assert reply.timeline.connection.reused

        run(body)


@pytest.mark.parametrize("differs", ["ca", "verify", "host", "uds"])
def test_what_decides_about_a_connection_keeps_them_apart(differs: str, tmp_path: Any) -> None:
    with LoopbackServer(tls=True, default=lambda _request: hello()) as server, nothing_left(server):
        first = server.endpoint(retries=NEVER)
        others = {
            "ca": lambda: spanwire.Endpoint(first.url, tls=spanwire.TLS(ca=_copy(first.tls.ca, tmp_path))),
            "verify": lambda: spanwire.Endpoint(first.url, tls=spanwire.TLS(verify=False)),
            "host": lambda: spanwire.Endpoint(f"https://localhost:{server.port}/v1", tls=first.tls),
            "uds": lambda: spanwire.Endpoint(first.url, tls=first.tls, uds=str(tmp_path / "none")),
        }
        second = others[differs]()

        async def body() -> None:
            async with spanwire.ConnectionManager() as manager:
                await manager.complete(first, chat())
                if differs == "uds":
                    with pytest.raises(errors.ConnectionFailed):
                        await manager.complete(second, chat(), retries=NEVER)
                    return
                await manager.complete(second, chat())
                assert server.connections == 2

        run(body)


def _copy(ca: str | None, folder: Any) -> str:
    assert ca is not None
    path = folder / "ca.pem"
    text = ca if ca.startswith("-----") else open(ca).read()  # noqa: PTH123, SIM115
    path.write_text(text)
    return str(path)
