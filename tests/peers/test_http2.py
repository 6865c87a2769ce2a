"""HTTP/2 to nginx, which speaks HTTP/1.1 to the loopback server behind it: how most servers are reached."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import trustme

import spanwire
from spanwire import errors
from spanwire.testing import LoopbackServer, Script
from tests.peers.processes import HOME, free_port, running
from tests.support import AT_ONCE, NEVER, assert_adds_up, chat, hello, read, run, wait_for

pytestmark = [pytest.mark.peers, pytest.mark.timeout(60, func_only=True)]

TEXT = "Hello from the loopback server."
#: What nginx allows at once in these tests; its own default is 128.
STREAMS = 8


class Nginx(NamedTuple):
    behind: LoopbackServer
    tls: int
    plain: int
    old: int
    ca: str

    def endpoint(self, kind: str = "tls", version: str = "2", **more: object) -> spanwire.Endpoint:
        port = getattr(self, kind)
        fields: dict[str, object] = {"proxy": None, "options": {"http_version": version}, "retries": NEVER}
        if kind != "plain":
            fields["tls"] = spanwire.TLS(ca=self.ca)
        scheme = "http" if kind == "plain" else "https"
        return spanwire.Endpoint(f"{scheme}://127.0.0.1:{port}/v1", **{**fields, **more})  # type: ignore[arg-type]


CONFIG = """
daemon off;
{user}
pid {folder}/nginx.pid;
error_log stderr;
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    client_max_body_size 64m;
    http2_max_concurrent_streams {streams};
    ssl_certificate {folder}/cert.pem;
    ssl_certificate_key {folder}/key.pem;
    server {{
        listen 127.0.0.1:{tls} ssl http2;
        listen 127.0.0.1:{plain} http2;
        keepalive_requests 40;
        location / {{
            proxy_pass http://127.0.0.1:{behind};
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
        }}
    }}
    server {{
        listen 127.0.0.1:{old} ssl;
        location / {{ proxy_pass http://127.0.0.1:{behind}; proxy_buffering off; }}
    }}
}}
"""


@pytest.fixture
def nginx(tmp_path: Path) -> Iterator[Nginx]:
    binary = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if binary is None:
        pytest.skip("found no nginx: apt-get install nginx-light")
    HOME.mkdir(exist_ok=True)
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    certificate.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    ports = {name: free_port() for name in ("tls", "plain", "old")}
    with LoopbackServer(default=lambda _request: hello()) as behind:
        user = "user root;" if os.geteuid() == 0 else ""
        config = tmp_path / "nginx.conf"
        config.write_text(CONFIG.format(folder=tmp_path, user=user, streams=STREAMS, behind=behind.port, **ports))

        def ready() -> bool:
            try:
                socket.create_connection(("127.0.0.1", ports["plain"]), 1).close()
            except OSError:
                return False
            return True

        command = [binary, "-p", str(tmp_path), "-c", str(config)]
        with running("nginx", command, ready=ready, limit_s=20, cwd=tmp_path):
            yield Nginx(behind, **ports, ca=authority.cert_pem.bytes().decode())


@pytest.mark.parametrize("kind", ["tls", "plain"])
def test_streamed_and_whole_answers(nginx: Nginx, kind: str) -> None:
    async def body() -> None:
        async with spanwire.ConnectionManager() as manager:
            endpoint = nginx.endpoint(kind)
            async with manager.stream(endpoint, chat()) as stream:
                assert await read(stream) == TEXT
            assert_adds_up(stream.timeline)
            assert stream.timeline.to_dict()["connection"]["protocol"] == "h2"
            reply = await manager.complete(endpoint, chat())
            assert reply.text == TEXT
            assert reply.timeline is not None
            assert reply.timeline.to_dict()["connection"]["reused"]
            big = spanwire.Call.chat("m", [{"role": "user", "content": "x" * 5_000_000}])
            assert (await manager.complete(endpoint, big)).text == TEXT

    run(body)


def test_auto(nginx: Nginx) -> None:
    async def body() -> None:
        async with spanwire.ConnectionManager() as manager:
            for kind, protocol in (("tls", "h2"), ("old", "http/1.1")):
                reply = await manager.complete(nginx.endpoint(kind, "auto"), chat())
                assert reply.timeline is not None
                assert reply.timeline.to_dict()["connection"]["protocol"] == protocol
            with pytest.raises(errors.ConnectionFailed, match="does not speak HTTP/2"):
                await manager.complete(nginx.endpoint("old", "2"), chat())

    run(body)


def test_leaving_reaches_the_server_behind_and_the_connection_goes_on(nginx: Nginx) -> None:
    nginx.behind.script(hello(hang_after=3), times=1)

    async def body() -> None:
        async with spanwire.ConnectionManager() as manager:
            endpoint = nginx.endpoint()
            async with manager.stream(endpoint, chat()) as stream:
                async for _ in stream:
                    break
            await wait_for(nginx.behind, lambda server: server.requests[0].left)
            reply = await manager.complete(endpoint, chat())
            assert reply.timeline is not None
            assert reply.timeline.to_dict()["connection"]["reused"]

    run(body)


def test_more_calls_at_once_than_nginx_allows(nginx: Nginx) -> None:
    """It refuses those that came before its SETTINGS; they are sent again, as the limit is known."""

    async def body() -> None:
        async with spanwire.ConnectionManager() as manager:
            endpoint = nginx.endpoint(retries=AT_ONCE)
            for _ in range(3):
                replies = await asyncio.gather(*(manager.complete(endpoint, chat()) for _ in range(20)))
                assert {reply.text for reply in replies} == {TEXT}
            (pool,) = manager.state().pools.values()
            assert pool.transport.expect(endpoint) == STREAMS

    run(body)


def test_a_connection_that_nginx_ends_after_some_calls(nginx: Nginx) -> None:
    """`keepalive_requests`: GOAWAY, and no call notices."""

    async def body() -> None:
        async with spanwire.ConnectionManager() as manager:
            used: set[str] = set()
            for _ in range(100):
                reply = await manager.complete(nginx.endpoint(), chat())
                assert reply.timeline is not None
                used.add(reply.timeline.to_dict()["connection"]["id"])
            assert 1 < len(used) < 10

    run(body)


def test_errors(nginx: Nginx) -> None:
    for answer in (Script(status=503), hello(), Script(status=503)):
        nginx.behind.script(answer, times=1)

    async def body() -> None:
        async with spanwire.ConnectionManager() as manager:
            assert (await manager.complete(nginx.endpoint(retries=AT_ONCE), chat())).text == TEXT
            with pytest.raises(errors.Overloaded):
                await manager.complete(nginx.endpoint(), chat())

    run(body)
