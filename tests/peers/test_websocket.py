"""WebSocket with what other people wrote: the oldest release of the library, proxies with a limit of clients, servers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import spanwire
from spanwire import errors
from spanwire.testing import LoopbackServer, Script
from tests.peers.conftest import CUT, HELLO, TOOL, Peer
from tests.peers.processes import ROOT, free_port, python_peer
from tests.peers.test_proxies import binary, started
from tests.support import AT_ONCE, NEVER, assert_adds_up, chat, run

pytestmark = pytest.mark.peers
OLDEST = "15.0.1"
_SUITE_LIMIT_S = 540


# --- the oldest release that we allow ---------------------------------------------------------------------------------


@pytest.mark.timeout(_SUITE_LIMIT_S + 60)
def test_the_plugins_tests_pass_with_the_oldest_websockets() -> None:
    """All but those that need a peer of their own. It stands before the locked release on the path."""
    python = python_peer("websockets", f"websockets=={OLDEST}")
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    folder = subprocess.run([str(python), "-c", where], capture_output=True, text=True, check=True).stdout.strip()
    environment = {**os.environ, "PYTHONPATH": folder}
    asked = [sys.executable, "-c", "import websockets; print(websockets.__version__)"]
    found = subprocess.run(asked, capture_output=True, text=True, check=True, env=environment, cwd=ROOT)
    assert found.stdout.strip() == OLDEST
    suite = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/plugins/websocket"]
    done = subprocess.run(
        suite, capture_output=True, text=True, check=False, env=environment, cwd=ROOT, timeout=_SUITE_LIMIT_S
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-1000:]


# --- proxies --------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def haproxy(port_behind: int, folder: Path, *, queue: str = "20s") -> Iterator[str]:
    """One connection at a time; the others wait in its queue."""
    path, port = binary("haproxy"), free_port()
    (folder / "haproxy.cfg").write_text(f"""
defaults
    mode http
    timeout connect 2s
    timeout client 30s
    timeout server 30s
    timeout tunnel 60s
    timeout queue {queue}
frontend front
    bind 127.0.0.1:{port}
    default_backend one
backend one
    server only 127.0.0.1:{port_behind} maxconn 1
""")
    with started("haproxy-websocket", [path, "-f", "haproxy.cfg", "-db"], port, folder):
        yield f"ws://127.0.0.1:{port}/v1"


@contextlib.contextmanager
def nginx(port_behind: int, folder: Path, *, status: int, upgrades: bool = True) -> Iterator[str]:
    """One connection at a time; a second one is refused. With ``upgrades=False`` it passes none on."""
    path, port = binary("nginx"), free_port()
    (folder / "tmp").mkdir()
    paths = " ".join(f"{name}_temp_path tmp/{name};" for name in ("proxy", "fastcgi", "uwsgi", "scgi"))
    upgrade, connection = ("$http_upgrade", "upgrade") if upgrades else ('""', '""')
    (folder / "nginx.conf").write_text(f"""
worker_processes 1; daemon off; pid nginx.pid; error_log stderr warn;
events {{ worker_connections 256; }}
http {{
  access_log off; client_body_temp_path tmp/body; {paths}
  limit_conn_zone $server_port zone=slots:1m;
  proxy_http_version 1.1; proxy_buffering off;
  proxy_set_header Upgrade {upgrade}; proxy_set_header Connection {connection};
  server {{
    listen 127.0.0.1:{port};
    location / {{ limit_conn slots 1; limit_conn_status {status}; error_page {status} @full;
      proxy_pass http://127.0.0.1:{port_behind}; proxy_read_timeout 1s; }}
    location @full {{ add_header Retry-After 1 always; return {status} "full\\n"; }}
  }}
}}
""")
    with started("nginx-websocket", [path, "-p", ".", "-c", "nginx.conf"], port, folder):
        yield f"ws://127.0.0.1:{port}/v1"


def served(**more: object) -> LoopbackServer:
    return LoopbackServer(part="websocket", **more)  # type: ignore[arg-type]


def port_of(server: LoopbackServer) -> int:
    return int(server.origin.rpartition(":")[2])


def queue_s(timeline: spanwire.Timeline, part: str) -> float:
    queue = timeline.segments.get("queue")
    found = queue.parts.get(part) if queue is not None else None
    return found.duration_s if found is not None else 0.0


def test_the_wait_in_haproxys_queue_is_queue(tmp_path: Path) -> None:
    """Somebody else has the only place: until he leaves, our upgrade waits. Within 20 ms of the truth."""

    async def once(url: str) -> float:
        holder, ours = spanwire.ConnectionManager(telemetry=None), spanwire.ConnectionManager(telemetry=None)
        endpoint = spanwire.Endpoint(url, proxy=None, retries=NEVER)
        async with ours:
            async with holder:
                await holder.complete(endpoint, chat())
                begin = time.perf_counter()
                waiting = asyncio.create_task(ours.complete(endpoint, chat()))
                await asyncio.sleep(0.4)
            waited_s = time.perf_counter() - begin
            timeline = (await waiting).timeline
            assert timeline is not None
            assert_adds_up(timeline)
            assert timeline.segments["handshake"].duration_s < 0.1
            return queue_s(timeline, "server") - waited_s

    async def body(url: str) -> None:
        assert abs(statistics.median([await once(url) for _ in range(5)])) < 0.02

    with served() as server, haproxy(port_of(server), tmp_path) as url:
        run(lambda: body(url))


def test_haproxys_queue_runs_out(tmp_path: Path) -> None:
    """503 after its ``timeout queue``, without Retry-After: overload, and the wait was queue."""

    async def body(url: str) -> None:
        holder, ours = spanwire.ConnectionManager(telemetry=None), spanwire.ConnectionManager(telemetry=None)
        endpoint = spanwire.Endpoint(url, proxy=None, retries=NEVER)
        async with holder, ours:
            await holder.complete(endpoint, chat())
            with pytest.raises(errors.Overloaded) as caught:
                await ours.complete(endpoint, chat())
            timeline = caught.value.timeline
            assert timeline is not None
            assert_adds_up(timeline)
            assert abs(queue_s(timeline, "server") - 0.5) < 0.05

    with served() as server, haproxy(port_of(server), tmp_path, queue="500ms") as url:
        run(lambda: body(url))


def test_many_callers_behind_haproxy(tmp_path: Path) -> None:
    async def body(url: str) -> None:
        endpoint = spanwire.Endpoint(url, proxy=None, retries=NEVER, limits=spanwire.Limits(queue_timeout_s=30))
        async with spanwire.ConnectionManager(telemetry=None) as manager:
            replies = await asyncio.gather(*(manager.complete(endpoint, chat()) for _ in range(20)))
        assert {reply.text for reply in replies} == {"Hello"}
        for reply in replies:
            assert reply.timeline is not None
            assert_adds_up(reply.timeline)

    script = Script.say("Hello", prefill_s=0.02)
    with served(default=lambda _request: script) as server, haproxy(port_of(server), tmp_path) as url:
        run(lambda: body(url))
        assert len(server.requests) == 20


@pytest.mark.parametrize("status", [503, 429])
def test_nginx_with_a_limit_of_connections(tmp_path: Path, status: int) -> None:
    async def body(url: str) -> None:
        endpoint = spanwire.Endpoint(url, proxy=None, retries=NEVER, limits=spanwire.Limits(queue_timeout_s=30))
        async with spanwire.ConnectionManager(telemetry=None) as holder:
            await holder.complete(endpoint, chat())
            async with spanwire.ConnectionManager(telemetry=None) as manager:
                with pytest.raises((errors.Overloaded, errors.RateLimited)) as caught:
                    await manager.complete(spanwire.Endpoint(url, proxy=None, retries=NEVER), chat())
                assert caught.value.status == status
                assert caught.value.retry_after_s == 1
                assert "full" in str(caught.value)
        async with spanwire.ConnectionManager(telemetry=None) as manager:
            replies = await asyncio.gather(*(manager.complete(endpoint, chat()) for _ in range(8)))
        assert {reply.text for reply in replies} == {"Hello"}

    script = Script.say("Hello", prefill_s=0.02)
    with served(default=lambda _request: script) as server, nginx(port_of(server), tmp_path, status=status) as url:
        run(lambda: body(url))
        assert len(server.requests) == 9


def test_nginx_without_rules_for_upgrades(tmp_path: Path) -> None:
    async def body(url: str) -> None:
        async with spanwire.ConnectionManager(telemetry=None) as manager:
            with pytest.raises(errors.SpanwireError) as caught:
                await manager.complete(spanwire.Endpoint(url, proxy=None, retries=AT_ONCE), chat())
            assert caught.value.phase == "upgrade"
            assert caught.value.retryable is False

    with served() as server, nginx(port_of(server), tmp_path, status=503, upgrades=False) as url:
        run(lambda: body(url))


@pytest.mark.parametrize("pings", [True, False])
def test_an_idle_socket_behind_nginx(tmp_path: Path, pings: bool) -> None:
    """``proxy_read_timeout`` cuts one that is silent; pings keep it. A call after a cut is made all the same."""

    async def body(url: str) -> None:
        options = {"ping_interval_s": 0.3 if pings else None}
        async with spanwire.ConnectionManager(telemetry=None) as manager:
            endpoint = spanwire.Endpoint(url, proxy=None, retries=NEVER, options=options)
            await manager.complete(endpoint, chat())
            await asyncio.sleep(1.6)
            reply = await manager.complete(endpoint, chat())
            assert reply.timeline is not None
            assert reply.timeline.connection is not None
            assert reply.timeline.connection.reused is pings

    with served() as server, nginx(port_of(server), tmp_path, status=503) as url:
        run(lambda: body(url))
        assert server.connections == (1 if pings else 2)


# --- servers --------------------------------------------------------------------------------------------------------------


def over_websocket(peer: Peer, **more: object) -> spanwire.Endpoint:
    return peer.endpoint(url=peer.url().replace("http", "ws", 1), **more)


def test_aimock_answers_turn_after_turn_on_one_socket(aimock: Peer) -> None:
    async def body() -> None:
        endpoint = over_websocket(aimock)
        async with spanwire.ConnectionManager(telemetry=None) as manager:
            for number in range(3):
                async with manager.stream(endpoint, aimock.call("hello")) as stream:
                    text = "".join([chunk.text async for chunk in stream])
                assert text == HELLO
                assert stream.reply.finish_reason == "stop"
                assert_adds_up(stream.timeline)
                assert stream.timeline.connection is not None
                assert stream.timeline.connection.reused is (number > 0)
            reply = await manager.complete(endpoint, aimock.call("what is the weather"))
            assert [(call.name, call.arguments) for call in reply.tool_calls] == [TOOL]
            assert reply.finish_reason == "tool_calls"

    run(body)


def test_aimock_goes_on_with_a_conversation(aimock: Peer) -> None:
    async def body() -> None:
        async with spanwire.ConnectionManager(telemetry=None) as manager:
            messages: list[dict[str, str]] = []
            for _ in range(4):
                messages.append({"role": "user", "content": "hello"})
                reply = await manager.complete(over_websocket(aimock), spanwire.Call.chat(aimock.model, messages))
                assert reply.text == HELLO
                messages.append({"role": "assistant", "content": reply.text})

    run(body)


def test_aimock_cuts_an_answer(aimock: Peer) -> None:
    """A reset in the middle: what had come is there, and nothing is asked twice."""

    async def body() -> None:
        async with spanwire.ConnectionManager(telemetry=None) as manager:
            with pytest.raises((errors.ConnectionFailed, errors.Truncated)) as caught:
                await manager.complete(over_websocket(aimock, retries=AT_ONCE), aimock.call("cut"))
            assert caught.value.reply is not None
            assert CUT.startswith(caught.value.reply.text)
            assert len(caught.value.reply.text) < len(CUT)
            assert (await manager.complete(over_websocket(aimock), aimock.call("hello"))).text == HELLO

    run(body)


def test_aimock_has_no_answer(aimock: Peer) -> None:
    async def body() -> None:
        async with spanwire.ConnectionManager(telemetry=None) as manager:
            with pytest.raises(errors.ServerError) as caught:
                await manager.complete(over_websocket(aimock, retries=NEVER), aimock.call("nothing fits this"))
            assert str(caught.value)
            assert (await manager.complete(over_websocket(aimock), aimock.call("hello"))).text == HELLO

    run(body)


@pytest.mark.timeout(300)
def test_litellms_bridge(litellm: Peer) -> None:
    async def body() -> None:
        endpoint = over_websocket(litellm)
        async with spanwire.ConnectionManager(telemetry=None) as manager:
            connections = set()
            messages = [{"role": "user", "content": "hello"}]
            for _ in range(3):
                reply = await manager.complete(endpoint, spanwire.Call.chat("bridged", messages))
                assert reply.text == HELLO
                assert reply.timeline is not None
                assert_adds_up(reply.timeline)
                assert reply.timeline.connection is not None
                connections.add(reply.timeline.connection.id)
                messages += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": "hello"}]
            assert len(connections) == 1
            call = spanwire.Call.chat("bridged", [{"role": "user", "content": "what is the weather"}])
            reply = await manager.complete(endpoint, call)
            assert [(one.name, one.arguments) for one in reply.tool_calls] == [TOOL]

    run(body)


@pytest.mark.timeout(300)
def test_litellm_refuses_a_wrong_key(litellm: Peer) -> None:
    async def body() -> None:
        async with spanwire.ConnectionManager(telemetry=None) as manager:
            with pytest.raises(errors.AuthenticationFailed) as caught:
                await manager.complete(over_websocket(litellm, api_key="sk-wrong", retries=AT_ONCE), chat("bridged"))
            assert caught.value.phase == "upgrade"
            assert caught.value.retryable is False
            assert "sk-wrong" not in str(caught.value)

    run(body)


@pytest.mark.timeout(300)
def test_litellm_whose_upstream_fails(litellm: Peer) -> None:
    """``openai/`` with an ``http://`` base: it closes with 1011, in its own words."""

    async def body() -> None:
        async with spanwire.ConnectionManager(telemetry=None) as manager:
            with pytest.raises(errors.SpanwireError) as caught:
                await manager.complete(over_websocket(litellm, retries=AT_ONCE), litellm.call("hello"))
            assert caught.value.retryable is False
            assert caught.value.timeline is not None
            assert len(caught.value.timeline.to_dict()["attempts"]) == 1

    run(body)
