"""Real proxies: Squid and tinyproxy before the server, HAProxy in front of it. Skipped where they are not installed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

import spanwire
from spanwire import errors
from spanwire.testing import LoopbackServer
from tests.peers.processes import HOME, free_port, running
from tests.support import NEVER, chat, hello, read, run, serving

pytestmark = pytest.mark.peers
CALLS = 6
_INSTALL_LIMIT_S = 300


def binary(name: str) -> str:
    """The path of a server that Debian packages under its own name. Installs it if that is possible, else skips."""
    places = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    found = shutil.which(name, path=places)
    apt = shutil.which("apt-get")
    if found is None and apt is not None and os.geteuid() == 0:
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        command = [apt, "install", "--yes", "--no-install-recommends", name]
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(command, env=environment, timeout=_INSTALL_LIMIT_S, capture_output=True, check=False)
        found = shutil.which(name, path=places)
    if found is None:
        pytest.skip(f"{name} is not installed, and apt-get cannot install it here")
    return found


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


@contextlib.contextmanager
def started(name: str, command: list[str], port: int, folder: Path) -> Iterator[None]:
    HOME.mkdir(exist_ok=True)
    (HOME / ".gitignore").write_text("*\n")
    with running(name, command, ready=lambda: listens(port), limit_s=30, cwd=folder):
        yield


@contextlib.contextmanager
def squid(folder: Path, *, deny: bool = False) -> Iterator[int]:
    path, port = binary("squid"), free_port()
    folder.chmod(0o777)  # it gives up root for a user of its own
    (folder / "squid.conf").write_text(
        f"http_port 127.0.0.1:{port}\n"
        f"http_access {'deny' if deny else 'allow'} all\n"
        f"pid_filename {folder}/squid.pid\n"
        "access_log none\ncache_log /dev/null\ncache_store_log none\ncache deny all\nshutdown_lifetime 0 seconds\n"
        "pinger_enable off\n"
    )
    with started("squid", [path, "-N", "-f", str(folder / "squid.conf")], port, folder):
        yield port


@contextlib.contextmanager
def tinyproxy(folder: Path, *, auth: bool = False) -> Iterator[int]:
    path, port = binary("tinyproxy"), free_port()
    (folder / "tinyproxy.conf").write_text(
        f"Port {port}\nListen 127.0.0.1\nTimeout 600\nMaxClients 50\nAllow 127.0.0.1\n"
        + ("BasicAuth user hunter2\n" if auth else "")
    )
    with started("tinyproxy", [path, "-d", "-c", str(folder / "tinyproxy.conf")], port, folder):
        yield port


@contextlib.contextmanager
def haproxy(folder: Path, backend: int, *, authority: trustme.CA | None = None, more: str = "") -> Iterator[int]:
    path, port = binary("haproxy"), free_port()
    bind = f"bind 127.0.0.1:{port}"
    if authority is not None:
        authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(folder / "server.pem"))
        bind += f" ssl crt {folder}/server.pem alpn http/1.1"
    (folder / "haproxy.cfg").write_text(
        "defaults\n  mode http\n  timeout connect 2s\n  timeout client 60s\n  timeout server 60s\n  retries 0\n"
        f"  {more}\n"
        f"frontend f\n  {bind}\n  default_backend b\n"
        f"backend b\n  server s 127.0.0.1:{backend}\n"
    )
    with started("haproxy", [path, "-db", "-f", str(folder / "haproxy.cfg")], port, folder):
        yield port


async def six_calls(endpoint: spanwire.Endpoint) -> list[bool]:
    """Whether each of them found a connection that was there."""
    reused = []
    async with spanwire.ConnectionManager() as manager:
        for _ in range(CALLS):
            async with manager.stream(endpoint, chat()) as stream:
                assert await read(stream) == "Hello from the loopback server."
            assert stream.timeline is not None
            assert stream.timeline.connection is not None
            reused.append(stream.timeline.connection.reused)
    return reused


async def refused(endpoint: spanwire.Endpoint) -> errors.SpanwireError:
    async with spanwire.ConnectionManager() as manager:
        with pytest.raises(errors.SpanwireError) as caught:
            await manager.complete(endpoint, chat())
    return caught.value


AGAIN = [False, *[True] * (CALLS - 1)]


@pytest.mark.parametrize("secure", [False, True], ids=["forward", "connect"])
def test_squid(tmp_path: Path, secure: bool) -> None:
    with serving(hello(), tls=secure) as server, squid(tmp_path) as port:
        # Its defaults let nobody CONNECT to ports but 443; ours allow all.
        assert run(lambda: six_calls(server.endpoint(proxy=f"http://127.0.0.1:{port}"))) == AGAIN


@pytest.mark.parametrize("secure", [False, True], ids=["forward", "connect"])
def test_squid_that_allows_nothing(tmp_path: Path, secure: bool) -> None:
    with LoopbackServer([hello()], tls=secure) as server, squid(tmp_path, deny=True) as port:
        endpoint = server.endpoint(proxy=f"http://127.0.0.1:{port}", retries=NEVER)
        error = run(lambda: refused(endpoint))
        assert "403" in str(error) or getattr(error, "status", None) == 403
        assert not error.retryable
        assert server.requests == []


def test_tinyproxy_tunnels(tmp_path: Path) -> None:
    with serving(hello(), tls=True) as server, tinyproxy(tmp_path) as port:
        assert run(lambda: six_calls(server.endpoint(proxy=f"http://127.0.0.1:{port}"))) == AGAIN


def test_tinyproxy_forwards_and_closes_each_time(tmp_path: Path) -> None:
    """It knows no keep-alive, and says so: no call is lost on a connection that is about to close."""
    with serving(hello()) as server, tinyproxy(tmp_path) as port:
        assert run(lambda: six_calls(server.endpoint(proxy=f"http://127.0.0.1:{port}"))) == [False] * CALLS


@pytest.mark.parametrize("secure", [False, True], ids=["forward", "connect"])
def test_tinyproxy_that_wants_credentials(tmp_path: Path, secure: bool) -> None:
    with serving(hello(), tls=secure) as server, tinyproxy(tmp_path, auth=True) as port:
        good = server.endpoint(proxy=f"http://user:hunter2@127.0.0.1:{port}")
        assert len(run(lambda: six_calls(good))) == CALLS
        error = run(lambda: refused(server.endpoint(proxy=f"http://127.0.0.1:{port}")))
        assert isinstance(error, errors.ConnectionFailed)
        assert (error.phase, error.retryable) == ("proxy", False)
        assert "put user:password@" in str(error)


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_haproxy_in_front_of_the_server(tmp_path: Path, tls: bool) -> None:
    authority = trustme.CA()
    ca = spanwire.TLS(ca=authority.cert_pem.bytes().decode())
    with serving(hello()) as server, haproxy(tmp_path, server.port, authority=authority if tls else None) as port:
        endpoint = spanwire.Endpoint(f"{'https' if tls else 'http'}://127.0.0.1:{port}/v1", proxy=None, tls=ca)
        assert run(lambda: six_calls(endpoint)) == AGAIN


def test_haproxy_closes_an_idle_connection(tmp_path: Path) -> None:
    """The pool sees the close, and the next call finds a new connection, without a retry."""

    async def body() -> None:
        endpoint = spanwire.Endpoint(f"http://127.0.0.1:{port}/v1", proxy=None, retries=NEVER)
        async with spanwire.ConnectionManager() as manager:
            for _ in range(2):
                assert (await manager.complete(endpoint, chat())).text
                (pool,) = manager.state().pools.values()
                while any(member.connection.usable() for member in pool.state.members):
                    await asyncio.sleep(0.01)

    with serving(hello()) as server, haproxy(tmp_path, server.port, more="timeout http-keep-alive 100ms") as port:
        run(body)
        assert len(server.requests) == 2


def test_haproxy_without_a_server_behind_it(tmp_path: Path) -> None:
    with haproxy(tmp_path, free_port()) as port:
        endpoint = spanwire.Endpoint(f"http://127.0.0.1:{port}/v1", proxy=None, retries=NEVER)
        error = run(lambda: refused(endpoint))
        assert isinstance(error, errors.Overloaded)
        assert (error.status, error.retryable) == (503, True)


def test_haproxy_that_waits_no_longer_for_the_server(tmp_path: Path) -> None:
    with (
        serving(hello(hang_after="request")) as server,
        haproxy(tmp_path, server.port, more="timeout server 200ms") as port,
    ):
        endpoint = spanwire.Endpoint(f"http://127.0.0.1:{port}/v1", proxy=None, retries=NEVER)
        error = run(lambda: refused(endpoint))
        assert isinstance(error, errors.ServerError)
        assert (error.status, error.retryable) == (504, True)
