"""Dialling: TCP, TLS and unix sockets on loopback, each part marked, each failure with its phase."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import trustme

from spanwire.endpoint import TLS, Endpoint
from spanwire.errors import ConfigurationError, ConnectionFailed
from spanwire.net import dial as dial_module
from spanwire.net.dial import dial, route_of
from spanwire.timeline import Marks

PROXY_VARIABLES = [
    name for word in ("http", "https", "all", "no") for name in (f"{word}_proxy", f"{word}_proxy".upper())
]


@pytest.fixture(autouse=True)
def _no_proxy_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*PROXY_VARIABLES, "REQUEST_METHOD"]:
        monkeypatch.delenv(name, raising=False)


class Client(asyncio.Protocol):
    """Collects what comes."""

    def __init__(self) -> None:
        self.data = b""
        self.transport: asyncio.Transport | None = None
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.data += data

    def connection_lost(self, error: Exception | None) -> None:
        self.lost.set_result(None)


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        writer.write(b"hello")
        await writer.drain()
        writer.close()
        await writer.wait_closed()


async def slam(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers a TLS handshake with something else."""
    with contextlib.suppress(OSError):
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()
        await writer.wait_closed()


@contextlib.asynccontextmanager
async def served(server: asyncio.Server) -> AsyncIterator[int]:
    try:
        address = server.sockets[0].getsockname()
        yield address[1] if isinstance(address, tuple) else 0
    finally:
        server.close()
        await server.wait_closed()


def tcp(handler: Callable[..., Any] = greet, **options: Any) -> Coroutine[Any, Any, asyncio.Server]:
    return asyncio.start_server(handler, "127.0.0.1", 0, **options)


@functools.cache
def authority() -> trustme.CA:
    return trustme.CA()


def server_context(*names: str) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority().issue_cert(*names).configure_cert(context)
    return context


def trusted() -> TLS:
    return TLS(ca=authority().cert_pem.bytes().decode())


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), 20))


def parts(marks: Marks) -> list[str]:
    return [part for part, _, _ in marks.parts]


async def check_works(endpoint: Endpoint, marks: Marks) -> Client:
    client = await dial(endpoint, marks, Client)
    await client.lost
    assert client.data == b"hello"
    assert marks.open_part is None
    for _, begin, end in marks.parts:
        assert 0 < begin <= end
    ends = [end for _, _, end in marks.parts]
    begins = [begin for _, begin, _ in marks.parts]
    assert all(end <= begin for end, begin in zip(ends, begins[1:], strict=False)), "parts overlap"
    return client


async def fails(endpoint: Endpoint, marks: Marks | None = None) -> ConnectionFailed:
    with pytest.raises(ConnectionFailed) as caught:
        await dial(endpoint, marks or Marks(), Client)
    assert caught.value.endpoint == endpoint.address
    assert caught.value.__cause__ is not None
    return caught.value


# --- TCP ---------------------------------------------------------------------------------------------------------------


def test_an_address_is_only_tcp_and_its_connect_is_a_round_trip() -> None:
    async def main() -> None:
        async with served(await tcp()) as port:
            marks = Marks()
            await check_works(Endpoint(f"http://127.0.0.1:{port}"), marks)
            assert parts(marks) == ["tcp"]
            assert marks.rtt_ns == marks.duration_ns("tcp")

    run(main)


def test_a_name_is_looked_up_first() -> None:
    async def main() -> None:
        async with served(await tcp()) as port:
            marks = Marks()
            await check_works(Endpoint(f"http://localhost:{port}"), marks)
            assert parts(marks) == ["dns", "tcp"]

    run(main)


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
def test_an_ipv6_address() -> None:
    async def main() -> None:
        try:
            server = await asyncio.start_server(greet, "::1", 0)
        except OSError:
            pytest.skip("no IPv6 on loopback")
        async with served(server) as port:
            marks = Marks()
            await check_works(Endpoint(f"http://[::1]:{port}"), marks)
            assert parts(marks) == ["tcp"]

    run(main)


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_a_refused_port() -> None:
    async def main() -> None:
        marks = Marks()
        error = await fails(Endpoint(f"http://127.0.0.1:{closed_port()}"), marks)
        assert error.phase == "tcp"
        assert error.retryable
        assert isinstance(error.__cause__, OSError)
        assert marks.open_part == "tcp"

    run(main)


def test_a_name_that_does_not_exist() -> None:
    async def main() -> None:
        marks = Marks()
        error = await fails(Endpoint("http://nothing.invalid:80"), marks)
        assert error.phase == "dns"
        assert "nothing.invalid" in str(error)
        assert marks.open_part == "dns"

    run(main)


@pytest.mark.parametrize(("errno", "retryable"), [(socket.EAI_NONAME, False), (socket.EAI_AGAIN, True)])
def test_a_resolver_that_is_busy_may_know_it_later(
    monkeypatch: pytest.MonkeyPatch, errno: int, retryable: bool
) -> None:
    async def main() -> None:
        async def unknown(*_: Any, **__: Any) -> Any:
            raise socket.gaierror(errno, "the resolver's words")

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", unknown)
        error = await fails(Endpoint("http://name.example:80"))
        assert (error.phase, error.retryable) == ("dns", retryable)
        assert "the resolver's words" in str(error)

    run(main)


@pytest.mark.parametrize("host", ["a" * 64 + ".invalid", "a..invalid"])
def test_a_name_that_cannot_exist(host: str) -> None:
    async def main() -> None:
        error = await fails(Endpoint(f"http://{host}:80"))
        assert error.phase == "dns"

    run(main)


def test_the_second_address_is_tried_when_the_first_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with served(await tcp()) as port:

            async def two_addresses(*_: Any, **__: Any) -> Any:
                return [
                    (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", closed_port())),
                    (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port)),
                ]

            monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", two_addresses)
            marks = Marks()
            await check_works(Endpoint("http://two.example:80"), marks)
            assert parts(marks) == ["dns", "tcp"]
            assert marks.rtt_ns is None, "of a race the interval is more than one round trip"

    run(main)


def test_all_addresses_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async def two_addresses(*_: Any, **__: Any) -> Any:
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", closed_port())) for _ in range(2)]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", two_addresses)
        error = await fails(Endpoint("http://two.example:80"))
        assert error.phase == "tcp"
        assert "2 addresses" in str(error)

    run(main)


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_cancelled_dial_leaves_no_socket(scheme: str) -> None:
    """A socket that nobody closed is a ResourceWarning, and so a failure here."""

    async def main() -> None:
        context = server_context("127.0.0.1") if scheme == "https" else None
        async with served(await tcp(ssl=context)) as port:
            endpoint = Endpoint(f"{scheme}://127.0.0.1:{port}", tls=trusted())
            for steps in range(12):
                task = asyncio.create_task(dial(endpoint, Marks(), Client))
                for _ in range(steps):
                    await asyncio.sleep(0)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    client = await task
                    assert client.transport is not None
                    client.transport.abort()
                    await client.lost
            await asyncio.sleep(0)
        gc.collect()

    quiet(main)


# --- TLS ---------------------------------------------------------------------------------------------------------------


def test_tls_with_a_ca_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    authority().cert_pem.write_to_path(str(file))

    async def main() -> None:
        async with served(await tcp(ssl=server_context("127.0.0.1", "localhost"))) as port:
            for tls in (trusted(), TLS(ca=str(file)), TLS(verify=False)):
                for host, expected in (("127.0.0.1", ["tcp", "tls"]), ("localhost", ["dns", "tcp", "tls"])):
                    marks = Marks()
                    client = await check_works(Endpoint(f"https://{host}:{port}", tls=tls), marks)
                    assert parts(marks) == expected
                    assert client.transport is not None

    run(main)


def test_http_1_1_is_offered() -> None:
    async def main() -> None:
        context = server_context("127.0.0.1")
        context.set_alpn_protocols(["h2", "http/1.1"])
        async with served(await tcp(ssl=context)) as port:
            client = await dial(Endpoint(f"https://127.0.0.1:{port}", tls=trusted()), Marks(), Client)
            assert client.transport is not None
            assert client.transport.get_extra_info("ssl_object").selected_alpn_protocol() == "http/1.1"
            await client.lost

    run(main)


@pytest.mark.parametrize("alpn", [("h2", "http/1.1"), ("h2",)])
def test_other_protocols_may_be_offered(alpn: tuple[str, ...]) -> None:
    async def main() -> None:
        context = server_context("127.0.0.1")
        context.set_alpn_protocols(["h2", "http/1.1"])
        async with served(await tcp(ssl=context)) as port:
            client = await dial(Endpoint(f"https://127.0.0.1:{port}", tls=trusted()), Marks(), Client, alpn=alpn)
            assert client.transport is not None
            assert client.transport.get_extra_info("ssl_object").selected_alpn_protocol() == "h2"
            await client.lost

    run(main)


def test_a_certificate_that_is_not_trusted() -> None:
    async def main() -> None:
        async with served(await tcp(ssl=server_context("127.0.0.1"))) as port:
            marks = Marks()
            error = await fails(Endpoint(f"https://127.0.0.1:{port}"), marks)
            assert error.phase == "tls"
            assert not error.retryable
            assert "TLS(ca=" in str(error)
            assert isinstance(error.__cause__, ssl.SSLCertVerificationError)
            assert parts(marks) == ["tcp"]
            assert marks.open_part == "tls"

    quiet(main)


def quiet(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """The scripted server's side of a handshake that the client refuses goes to its loop's exception handler."""

    async def inner() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        await main()

    run(inner)


def test_a_certificate_for_another_name() -> None:
    async def main() -> None:
        async with served(await tcp(ssl=server_context("other.example"))) as port:
            error = await fails(Endpoint(f"https://127.0.0.1:{port}", tls=trusted()))
            assert (error.phase, error.retryable) == ("tls", False)

    quiet(main)


def test_a_server_that_does_not_speak_tls() -> None:
    async def main() -> None:
        async with served(await tcp(slam)) as port:
            error = await fails(Endpoint(f"https://127.0.0.1:{port}", tls=trusted()))
            assert error.phase == "tls"

    run(main)


def test_a_server_that_hangs_up_in_the_handshake() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async def main() -> None:
        async with served(await tcp(hang_up)) as port:
            error = await fails(Endpoint(f"https://127.0.0.1:{port}", tls=trusted()))
            assert error.phase == "tls"
            assert error.retryable

    run(main)


def test_tls_files_that_cannot_be_loaded(tmp_path: Path) -> None:
    empty = tmp_path / "empty.pem"
    empty.write_text("nothing")

    async def main() -> None:
        for tls in (
            TLS(ca=str(tmp_path / "missing.pem")),
            TLS(ca=str(empty)),
            TLS(ca="-----BEGIN CERTIFICATE-----\nnothing\n-----END CERTIFICATE-----"),
            TLS(cert=str(tmp_path / "missing.pem")),
            TLS(cert=(str(empty), str(empty))),
        ):
            with pytest.raises(ConfigurationError, match=r"Endpoint\.tls"):
                await dial(Endpoint("https://127.0.0.1:1", tls=tls), Marks(), Client)

    run(main)


def test_a_client_certificate() -> None:
    async def main() -> None:
        context = server_context("127.0.0.1")
        authority().configure_trust(context)
        context.verify_mode = ssl.CERT_REQUIRED
        certificate = authority().issue_cert("client.example")
        async with served(await tcp(ssl=context)) as port:
            with certificate.private_key_and_cert_chain_pem.tempfile() as file:
                tls = TLS(ca=trusted().ca, cert=file)
                await check_works(Endpoint(f"https://127.0.0.1:{port}", tls=tls), Marks())

    run(main)


# --- unix sockets ------------------------------------------------------------------------------------------------------

unix = pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="no unix sockets on this system")


@unix
def test_a_unix_socket_has_no_network(tmp_path: Path) -> None:
    path = str(tmp_path / "s")

    async def main() -> None:
        async with served(await asyncio.start_unix_server(greet, path)):
            marks = Marks()
            await check_works(Endpoint("http://model.example/v1", uds=path), marks)
            assert parts(marks) == ["connect"]
            assert marks.rtt_ns == 0

    run(main)


@unix
def test_a_unix_socket_that_is_not_there(tmp_path: Path) -> None:
    async def main() -> None:
        error = await fails(Endpoint("http://model.example", uds=str(tmp_path / "missing")))
        assert error.phase == "connect"
        assert error.endpoint == f"unix:{tmp_path / 'missing'}"

    run(main)


@unix
def test_tls_over_a_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "s")

    async def main() -> None:
        async with served(await asyncio.start_unix_server(greet, path, ssl=server_context("model.example"))):
            await check_works(Endpoint("https://model.example", uds=path, tls=trusted()), Marks())

    run(main)


@unix
def test_a_certificate_that_is_not_trusted_over_a_unix_socket(tmp_path: Path) -> None:
    """The socket was reached: the phase is tls, and trying again cannot help."""
    path = str(tmp_path / "s")

    async def main() -> None:
        async with served(await asyncio.start_unix_server(greet, path, ssl=server_context("model.example"))):
            error = await fails(Endpoint("https://model.example", uds=path))
            assert (error.phase, error.retryable) == ("tls", False)

    quiet(main)


# --- proxies -----------------------------------------------------------------------------------------------------------


def test_the_way_is_decided_when_an_endpoint_is_first_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its key was made with that proxy, so its connections go through it, whatever a variable says meanwhile."""
    endpoint = Endpoint("https://h")
    monkeypatch.setenv("HTTPS_PROXY", "http://one:1")
    first = route_of(endpoint)
    monkeypatch.setenv("HTTPS_PROXY", "http://two:2")
    assert route_of(endpoint) is first
    assert first.proxy is not None
    assert first.proxy.host == "one"
    other = route_of(Endpoint("https://h")).proxy
    assert other is not None
    assert other.host == "two"
    monkeypatch.setenv("HTTPS_PROXY", "nonsense://")
    with pytest.raises(ConfigurationError, match="HTTPS_PROXY"):
        route_of(Endpoint("https://h"))


def test_no_proxy_and_proxy_none_go_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy.invalid:3128")

    async def main() -> None:
        async with served(await tcp()) as port:
            await check_works(Endpoint(f"http://127.0.0.1:{port}", proxy=None), Marks())
            monkeypatch.setenv("no_proxy", "127.0.0.0/8")
            await check_works(Endpoint(f"http://127.0.0.1:{port}"), Marks())

    run(main)


def test_the_head_start_is_that_of_the_rfc() -> None:
    assert dial_module.HAPPY_EYEBALLS_DELAY_S == 0.25
