"""Streams of the plain clients: what their users get is what they get without us, and connections come back."""

from __future__ import annotations

import asyncio
import gc
import gzip
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import httpx2
import pytest
import spanwire_instrument
from spanwire_instrument.httpx_family import make

from spanwire.testing import LoopbackServer, Script
from tests.hypercorn_server import h2_server
from tests.integrations.instrument.support import BODY, FAMILIES, Seen, chat_url, connections, trust
from tests.support import assert_adds_up, hello, serving

pytestmark = pytest.mark.parametrize("hx", FAMILIES, ids=lambda hx: hx.__name__)


@pytest.fixture
def seen() -> Seen:
    return Seen()


def until_done(client: Any, url: str) -> bytes:
    """As SDKs read: to the terminal event, and then they close."""
    got = b""
    with client.stream("POST", url, json=BODY) as response:
        for piece in response.iter_raw():
            got += piece
            if b"[DONE]" in got:
                break
    return got


async def until_done_async(client: Any, url: str) -> bytes:
    got = b""
    async with client.stream("POST", url, json=BODY) as response:
        pieces = response.aiter_raw()
        async for piece in pieces:
            got += piece
            if b"[DONE]" in got:
                break
        await pieces.aclose()
    return got


def settle(client: Any) -> None:
    """Wait for what drains in the background: how long that takes is no matter of these tests."""
    for ended in list(client._transport._drains._running):
        ended.wait()


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("late_s", [0.0, 0.002])
def test_six_streams_in_a_row_take_one_connection(hx: ModuleType, tls: bool, late_s: float, seen: Seen) -> None:
    with serving(hello(end_s=late_s), tls=tls) as server:
        with hx.Client(verify=trust(server)) as bare:
            expected = [until_done(bare, chat_url(server)) for _ in range(6)]
        assert connections(server) == 6
        server.clear()
        with seen.client(hx, verify=trust(server)) as client:
            got = []
            for _ in range(6):
                got.append(until_done(client, chat_url(server)))
                settle(client)
        assert [len(one) for one in got] == [len(one) for one in expected]
        assert connections(server) == 1
    assert seen.outcomes == ["completed"] * 6
    for timeline in seen.timelines:
        assert_adds_up(timeline)
    assert [timeline.connection.reused for timeline in seen.timelines if timeline.connection] == [False] + [True] * 5
    assert "handshake" in seen.timelines[0].segments
    assert "handshake" not in seen.timelines[1].segments


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("late_s", [0.0, 0.002])
def test_the_same_of_an_asynchronous_client(hx: ModuleType, tls: bool, late_s: float, seen: Seen) -> None:
    async def main(server: LoopbackServer) -> None:
        async with seen.async_client(hx, verify=trust(server)) as client:
            for _ in range(6):
                assert b"[DONE]" in await until_done_async(client, chat_url(server))
                for task in list(client._transport._drains._running):
                    await task

    with serving(hello(end_s=late_s), tls=tls) as server:
        asyncio.run(main(server))
        assert connections(server) == 1
    assert seen.outcomes == ["completed"] * 6


def test_without_the_drain_nothing_changes(hx: ModuleType, seen: Seen) -> None:
    with serving(hello()) as server, seen.client(hx, drain=False) as client:
        for _ in range(3):
            until_done(client, chat_url(server))
        assert connections(server) == 3
    assert seen.outcomes == ["completed"] * 3


def test_a_server_that_ends_late_is_left_alone_after_some_misses(hx: ModuleType, seen: Seen) -> None:
    with serving(hello(end_s=30.0)) as server:
        client = seen.client(hx)
        book = client._transport._common.book
        for number in range(5):
            until_done(client, chat_url(server))
            settle(client)  # in the background, and bounded
            assert min(number + 1, 3) == book._of(("127.0.0.1", server.port)).misses
        client.close()
        server.clear()


def test_closing_the_client_ends_drains_that_run(hx: ModuleType, seen: Seen) -> None:
    with serving(hello(end_s=30.0)) as server:
        with seen.client(hx) as client:
            until_done(client, chat_url(server))
        assert not client._transport._drains._running

        async def main() -> None:
            async with seen.async_client(hx) as client:
                await until_done_async(client, chat_url(server))
            assert len(asyncio.all_tasks()) == 1

        asyncio.run(main())
        server.clear()


def test_a_loop_that_closes_at_once_hears_nothing_of_a_drain(
    hx: ModuleType, seen: Seen, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(hello(end_s=30.0)) as server:
        asyncio.run(until_done_async(seen.async_client(hx), chat_url(server)))
        loop = asyncio.new_event_loop()
        loop.run_until_complete(until_done_async(seen.async_client(hx), chat_url(server)))
        for task in asyncio.all_tasks(loop):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                loop.run_until_complete(task)
        loop.close()
        gc.collect()
        server.clear()
    assert caplog.records == []


def test_leaving_early_stops_the_server_at_once(hx: ModuleType, seen: Seen) -> None:
    script = Script(tokens=["a"] * 5, hang_after=3)
    with serving(script) as server, seen.client(hx) as client:
        with client.stream("POST", chat_url(server), json=BODY) as response:
            next(response.iter_raw())
        server.wait_for(lambda server: server.requests[0].left)
    assert seen.outcomes == ["closed_by_caller"]


def test_a_stream_that_is_dropped_is_abandoned(hx: ModuleType, seen: Seen) -> None:
    with serving(Script(tokens=["a"] * 5, hang_after=3), hello()) as server, seen.client(hx) as client:
        response = client.send(client.build_request("POST", chat_url(server), json=BODY), stream=True)
        del response  # not read at all: generators of httpx2 close their response when they are collected
        gc.collect()
        until_done(client, chat_url(server))
        server.requests[0].dropped_ns = 1
    assert sorted(seen.outcomes) == ["abandoned", "completed"]


def test_a_cancelled_task_cancels_its_call(hx: ModuleType, seen: Seen) -> None:
    async def main(server: LoopbackServer) -> None:
        async with seen.async_client(hx) as client:
            task = asyncio.create_task(until_done_async(client, chat_url(server)))
            await asyncio.to_thread(server.wait_for, lambda server: server.requests and server.requests[0].content_ns)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    with serving(Script(tokens=["a"] * 5, hang_after=3)) as server:
        asyncio.run(main(server))
        server.wait_for(lambda server: server.requests[0].left)
    assert seen.outcomes == ["cancelled"]


Call = Callable[[Any, str], Any]


def _whole(client: Any, url: str) -> Any:
    response = client.post(url, json=BODY)
    return response.status_code, response.headers.multi_items(), response.content, response.http_version, response.url


def _streamed(client: Any, url: str) -> Any:
    with client.stream("POST", url, json=BODY) as response:
        return response.status_code, response.headers.multi_items(), b"".join(response.iter_raw())


def _lines(client: Any, url: str) -> Any:
    with client.stream("POST", url, json=BODY) as response:
        return list(response.iter_lines())


PLAIN = b'data: {"id":"x","choices":[{"delta":{"content":"Hello"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
ANSWERS = {
    "stream": Script(writes=[PLAIN[:40], PLAIN[40:]]),
    "json": Script(body=b'{"id":"x","choices":[{"finish_reason":"stop","message":{"content":"Hello"}}]}'),
    "error": Script(status=503, body=b'{"error":{"message":"no"}}', headers={"Retry-After": "0"}),
    "gzip": Script(body=gzip.compress(PLAIN), headers={"Content-Encoding": "gzip"}, content_type="text/event-stream"),
    "page": Script(body=b"<html>", content_type="text/html"),
    "empty": Script(body=b""),
    "redirect": Script(status=307, headers={"Location": "/v1/models"}, body=b""),
    "until eof": Script(writes=[PLAIN], chunked=False),
}


@pytest.mark.parametrize("call", [_whole, _streamed, _lines], ids=lambda call: call.__name__.strip("_"))
@pytest.mark.parametrize("name", ANSWERS)
def test_answers_are_those_of_the_bare_client(hx: ModuleType, name: str, call: Call, seen: Seen) -> None:
    with serving(ANSWERS[name]) as server:
        with hx.Client() as bare, seen.client(hx, follow_redirects=False) as client:
            expected, got = call(bare, chat_url(server)), call(client, chat_url(server))

            def without_date(value: Any) -> Any:
                if not isinstance(value, tuple):
                    return value
                return tuple(
                    [pair for pair in part if pair[0] != "date"] if isinstance(part, list) else part for part in value
                )

            assert without_date(got) == without_date(expected)
        first, second = server.requests
        ours = {name: value for name, value in second.headers.items() if name != "traceparent"}
        assert ours == dict(first.headers)
        assert second.raw == first.raw
    (timeline,) = seen.timelines
    assert timeline.outcome == ("error" if name == "error" else "completed")


FAILURES = {
    "reset": Script(tokens=["a"] * 9, drop_after=3, drop_mode="reset"),
    "closed": Script(tokens=["a"] * 9, drop_after=3),
    "no answer": Script(drop_after="request"),
    "timeout": Script(tokens=["a"] * 9, hang_after=3),
    "no headers": Script(hang_after="request"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_failures_are_those_of_the_bare_client(hx: ModuleType, name: str, seen: Seen) -> None:
    timeout = hx.Timeout(5, read=0.2)
    with serving(FAILURES[name]) as server:
        errors = []
        for client in (hx.Client(timeout=timeout), seen.client(hx, timeout=timeout)):
            with client, pytest.raises(hx.HTTPError) as caught:
                _streamed(client, chat_url(server))
            errors.append(caught.value)
        assert type(errors[1]) is type(errors[0])
        assert str(errors[1]) == str(errors[0])
        assert str(errors[1].request.url) == str(errors[0].request.url)
        assert "traceparent" not in errors[1].request.headers  # the user's own request
        server.clear()
    (timeline,) = seen.timelines
    assert timeline.outcome == ("timeout" if name in ("timeout", "no headers") else "error")
    assert timeline.error_type == type(errors[0]).__name__


def test_a_server_that_is_not_there(hx: ModuleType, seen: Seen, closed_port: int) -> None:
    with seen.client(hx) as client, pytest.raises(hx.ConnectError) as caught:
        _whole(client, f"http://127.0.0.1:{closed_port}/v1/chat/completions")
    (timeline,) = seen.timelines
    assert (timeline.outcome, timeline.error_type) == ("error", "ConnectError")
    assert "handshake" in timeline.segments
    assert isinstance(caught.value, hx.HTTPError)


NOWHERE = ("://127.0.0.1", "http://", "ftp://127.0.0.1", "http://127.0.0.1:123456", "http://127.0.0.1:0")


@pytest.mark.parametrize("origin", NOWHERE)
def test_a_url_that_leads_nowhere_fails_as_without_us(
    hx: ModuleType, origin: str, seen: Seen, caplog: pytest.LogCaptureFixture
) -> None:
    def failed(client: Any) -> BaseException:
        with client, pytest.raises(Exception) as caught:  # noqa: PT011 - whatever it is
            _whole(client, f"{origin}/v1/chat/completions")
        return caught.value

    bare, got = failed(hx.Client()), failed(seen.client(hx))
    assert (type(got), str(got)) == (type(bare), str(bare))
    assert not [record for record in caplog.records if record.name.startswith("spanwire")]


def test_requests_that_are_no_inference_pass_untouched(hx: ModuleType, seen: Seen) -> None:
    got: list[Any] = []

    def answer(request: Any) -> Any:
        got.append(request)
        return hx.Response(200, json={})

    transport = make(hx).Transport(hx.MockTransport(answer), _settings(seen))
    with hx.Client(transport=transport) as client:
        requests = [
            client.build_request("GET", "http://x/v1/models"),
            client.build_request("POST", "http://x/v1/files", json={"input": "x"}),
            client.build_request("POST", "http://x/v1/chat/completions", content=iter([b"{}"])),
        ]
        for request in requests:
            client.send(request)
        assert all(one is other for one, other in zip(got, requests, strict=True))
    assert seen.timelines == []


def _settings(seen: Seen) -> Any:
    from spanwire_instrument.watched import Settings

    return Settings(manager=seen.manager)


def test_a_body_that_is_a_stream_is_not_consumed(hx: ModuleType, seen: Seen) -> None:
    body = b'{"model":"m","messages":[{"role":"user","content":"x"}]}'
    with serving(hello()) as server, seen.client(hx) as client:
        response = client.post(
            chat_url(server), content=iter([body[:9], body[9:]]), headers={"content-type": "application/json"}
        )
        assert response.status_code == 200
        assert server.requests[0].raw == body
    assert seen.timelines[0].model == ""


def test_another_transport_that_tells_nothing(hx: ModuleType, seen: Seen) -> None:
    def answer(request: Any) -> Any:
        return hx.Response(200, json={"id": "x", "choices": [{"finish_reason": "stop"}]}, request=request)

    transport = make(hx).Transport(hx.MockTransport(answer), _settings(seen))
    with hx.Client(transport=transport) as client:
        response = client.post("http://x/v1/chat/completions", json={**BODY, "stream": False})
    assert response.json()["id"] == "x"
    assert seen.outcomes == ["completed"]
    assert_adds_up(seen.timelines[0])


def test_the_users_own_trace_callback_goes_on(hx: ModuleType, seen: Seen) -> None:
    names: list[str] = []
    with serving(hello()) as server, seen.client(hx) as client:
        client.post(chat_url(server), json=BODY, extensions={"trace": lambda name, _: names.append(name)})
    assert "http11.send_request_headers.started" in names
    assert "connection.connect_tcp.complete" in names


def test_a_client_in_many_threads(hx: ModuleType, seen: Seen) -> None:
    with serving(hello()) as server, seen.client(hx) as client:
        done: list[bool] = []

        def work() -> None:
            done.extend(b"[DONE]" in until_done(client, chat_url(server)) for _ in range(5))

        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert done == [True] * 30
        assert connections(server) <= 12
    assert seen.outcomes == ["completed"] * 30


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
def test_one_asynchronous_client_on_two_loops_behaves_as_the_bare_one(hx: ModuleType, seen: Seen) -> None:
    def play(client: Any, url: str) -> list[str]:
        results = []
        for _ in range(3):
            try:
                asyncio.run(until_done_async(client, url))
                results.append("well")
            except RuntimeError as error:
                results.append(str(error))
        return results

    with serving(hello()) as server:
        expected = play(hx.AsyncClient(), chat_url(server))
        # Ours gives its connection back, so that the next loop finds it: as after an answer that is no stream.
        assert play(seen.async_client(hx), chat_url(server)) in (expected, ["well", "Event loop is closed", "well"])
    gc.collect()  # of the connections that both have left on closed loops


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_makes_calls_of_its_own(hx: ModuleType, seen: Seen) -> None:
    with serving(hello()) as server, seen.client(hx) as client:
        until_done(client, chat_url(server))
        child = os.fork()
        if child == 0:
            code = 9
            try:
                with seen.client(hx) as own:
                    code = 0 if b"[DONE]" in until_done(own, chat_url(server)) and len(seen.timelines) == 2 else 1
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        until_done(client, chat_url(server))
    assert seen.outcomes == ["completed"] * 2


def test_classes_are_made_once_for_each_library(hx: ModuleType) -> None:
    family = make(hx)
    assert make(hx) is family
    assert issubclass(family.Transport, hx.BaseTransport)
    assert issubclass(family.AsyncTransport, hx.AsyncBaseTransport)
    assert make(httpx) is not make(httpx2)


def test_a_tunnel_to_a_server_with_tls_gives_connections_back_too(hx: ModuleType, seen: Seen) -> None:
    from tests.proxies import proxy

    with proxy() as between, serving(hello(), tls=True) as server:
        with seen.client(hx, verify=trust(server), proxy=f"http://127.0.0.1:{between.port}") as client:
            for _ in range(4):
                until_done(client, chat_url(server))
                settle(client)
        assert connections(server) == 1
        assert between.connections == 1
    assert "proxy" in seen.timelines[0].segments["handshake"].parts


def test_over_http2_nothing_is_drained_since_nothing_is_lost(hx: ModuleType, seen: Seen, tmp_path: Path) -> None:
    async def main(url: str, context: Any) -> None:
        async with seen.async_client(hx, http2=True, verify=context) as client:
            for _ in range(3):
                assert b"[DONE]" in await until_done_async(client, url)
                assert not client._transport._drains._running

    with h2_server(tmp_path) as server:
        url = f"https://127.0.0.1:{server.port}/v1/chat/completions"
        with seen.client(hx, http2=True, verify=server.context) as client:
            for _ in range(3):
                assert b"[DONE]" in until_done(client, url)
        asyncio.run(main(url, server.context))
        assert server.versions == ["2"] * 6
        assert len(server.peers) == 2
    assert seen.outcomes == ["completed"] * 6
    assert all(timeline.connection is not None and timeline.connection.protocol == "h2" for timeline in seen.timelines)


def test_the_transports_take_the_librarys_settings(hx: ModuleType, seen: Seen) -> None:
    name = hx.__name__
    with serving(hello(), tls=True) as server:
        transport = getattr(spanwire_instrument, f"{name}_transport")(manager=seen.manager, verify=trust(server))
        with hx.Client(transport=transport) as client:
            for _ in range(3):
                until_done(client, chat_url(server))

        async def main() -> None:
            inner = getattr(spanwire_instrument, f"{name}_async_transport")(manager=seen.manager, verify=trust(server))
            async with hx.AsyncClient(transport=inner) as client:
                for _ in range(3):
                    await until_done_async(client, chat_url(server))

        asyncio.run(main())
        assert connections(server) == 2
    assert seen.outcomes == ["completed"] * 6
