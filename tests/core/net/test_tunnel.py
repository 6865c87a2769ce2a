"""Through proxies: CONNECT, TLS in TLS, SOCKS, on both kinds of event loops; what fails, and that nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, cast

import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st

from spanwire.endpoint import TLS, Endpoint
from spanwire.errors import ConfigurationError, ConnectionFailed
from spanwire.net import tunnel as tunnel_module
from spanwire.net.dial import dial, route_of
from spanwire.net.tls import proxy_context_for
from spanwire.net.tunnel import MAX_ANSWER_BYTES, ConnectAnswer
from spanwire.timeline import Marks
from tests.core.net.proxy_server import ProxyServer, Target, loops

CA = trustme.CA()
TRUSTED = TLS(ca=CA.cert_pem.bytes().decode())
HTTP = ["http", "https"]
SOCKS = ["socks4", "socks4a", "socks5", "socks5h"]
both_loops = pytest.mark.parametrize("loop", loops(), ids=lambda factory: factory.__module__.split(".")[0])


def server_context(name: str = "127.0.0.1") -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    CA.issue_cert(name, "localhost").configure_cert(context)
    return context


class Client(asyncio.Protocol):
    """Collects what comes, and fails where it comes before the connection was made."""

    def __init__(self) -> None:
        self.data = b""
        self.transport: asyncio.Transport | None = None
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert self.transport is None
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are none by name

    def data_received(self, data: bytes) -> None:
        assert self.transport is not None
        self.data += data

    def connection_lost(self, error: Exception | None) -> None:
        assert self.transport is not None
        self.lost.set_result(None)


def echo(sock: socket.socket) -> None:
    """Speaks first, then says what it hears, and ends after "bye"."""
    sock.sendall(b"hello ")
    heard = b""
    while b"bye" not in heard and (data := sock.recv(4096)):
        heard += data
    sock.sendall(heard)


def mirror(sock: socket.socket) -> None:
    while data := sock.recv(65536):
        sock.sendall(data)


def say_nothing(sock: socket.socket) -> None:
    while sock.recv(4096):
        pass


def speak_http(sock: socket.socket) -> None:
    sock.recv(65536)
    sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


@contextlib.asynccontextmanager
async def served(
    context: ssl.SSLContext | None = None, handler: Callable[[socket.socket], None] = echo
) -> AsyncIterator[int]:
    target = Target(handler, context)
    target.__enter__()
    try:
        yield target.port
    finally:
        await asyncio.to_thread(target.__exit__)


def run(main: Callable[[], Coroutine[Any, Any, None]], loop: Any = None) -> None:
    async def quietly() -> None:
        # The scripted servers' side of what clients break off goes to the loop's handler.
        asyncio.get_running_loop().set_exception_handler(lambda _loop, _context: None)
        await asyncio.wait_for(main(), 30)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(quietly())


def proxied(scheme: str = "http", **more: Any) -> ProxyServer:
    return ProxyServer(tls=server_context() if scheme == "https" else None, **more)


def endpoint(port: int, proxy: str, *, secure: bool = True, host: str = "127.0.0.1", tls: TLS = TRUSTED) -> Endpoint:
    return Endpoint(f"{'https' if secure else 'http'}://{host}:{port}", proxy=proxy, tls=tls)


async def talks(to: Endpoint) -> Marks:
    """Dials, hears the server out, and says goodbye."""
    marks = Marks()
    client = await dial(to, marks, Client)
    assert client.transport is not None
    client.transport.write(b"and bye")
    await client.lost
    assert client.data == b"hello and bye"
    assert marks.open_part is None
    assert all(one[2] <= two[1] for one, two in itertools.pairwise(marks.parts)), "parts overlap"
    assert marks.rtt_ns is None, "that of the proxy is not that of the server"
    return marks


async def fails(to: Endpoint, phase: str = "proxy", *, retryable: bool) -> ConnectionFailed:
    with pytest.raises(ConnectionFailed) as caught:
        await dial(to, Marks(), Client)
    assert (caught.value.phase, caught.value.retryable) == (phase, retryable), caught.value
    assert caught.value.endpoint == to.address
    assert "hunter2" not in str(caught.value)
    return caught.value


def parts(marks: Marks) -> list[str]:
    return [part for part, _, _ in marks.parts]


# --- CONNECT -----------------------------------------------------------------------------------------------------------


@both_loops
@pytest.mark.parametrize("scheme", HTTP)
@pytest.mark.parametrize("secure", [True, False])
def test_a_tunnel(loop: Any, scheme: str, secure: bool) -> None:
    async def main() -> None:
        async with served(server_context() if secure else None) as port:
            marks = await talks(endpoint(port, proxy.url(), secure=secure))
            assert parts(marks) == ["tcp", "proxy", "tls"] if secure else ["tcp", "proxy"]
            assert proxy.seen == [f"CONNECT 127.0.0.1:{port}"]
            assert proxy.headers["host"] == f"127.0.0.1:{port}"
            assert "proxy-authorization" not in proxy.headers

    with proxied(scheme) as proxy:
        run(main, loop)
        proxy.wait_for(lambda seen: seen.open == 0)


@both_loops
@pytest.mark.parametrize("scheme", HTTP)
def test_much_both_ways(loop: Any, scheme: str) -> None:
    """More than any buffer on the way holds, so that each has to stop the one before it."""
    size = 3_000_000

    async def main() -> None:
        async with served(server_context(), mirror) as port:
            client = await dial(endpoint(port, proxy.url()), Marks(), Client)
            assert client.transport is not None
            client.transport.write(b"x" * size)
            while len(client.data) < size:
                assert not client.lost.done()
                await asyncio.sleep(0)
            client.transport.abort()
            await client.lost

    with proxied(scheme) as proxy:
        run(main, loop)


def test_names_are_looked_up_by_the_proxy_and_its_own_by_us() -> None:
    async def main() -> None:
        async with served(server_context()) as port:
            marks = await talks(endpoint(port, proxy.url(host="localhost"), host="localhost"))
            assert parts(marks) == ["dns", "tcp", "proxy", "tls"]
            assert proxy.seen == [f"CONNECT localhost:{port}"]

    with proxied() as proxy:
        run(main)


@pytest.mark.parametrize(("host", "target"), [("[::1]", "[::1]:443"), ("bücher.example", "xn--bcher-kva.example:443")])
def test_how_a_target_is_written(host: str, target: str) -> None:
    async def main() -> None:
        await fails(Endpoint(f"https://{host}", proxy=proxy.url()), retryable=False)
        assert proxy.seen == [f"CONNECT {target}"]
        assert proxy.headers["host"] == target

    with proxied(answer=b"HTTP/1.1 403 No\r\n\r\n") as proxy:
        run(main)


def test_a_name_that_cannot_be_written() -> None:
    async def main() -> None:
        error = await fails(Endpoint(f"https://{'ü' * 70}.example", proxy=proxy.url()), retryable=False)
        assert "cannot be told to a proxy" in str(error)

    with proxied() as proxy:
        run(main)
        proxy.wait_for(lambda seen: seen.connections == 1 and seen.open == 0)
        assert proxy.seen == []


@pytest.mark.parametrize("scheme", HTTP)
def test_credentials(scheme: str) -> None:
    async def main() -> None:
        async with served(server_context()) as port:
            await talks(endpoint(port, proxy.url(auth="us%40er:hunter2@")))
            error = await fails(endpoint(port, proxy.url()), retryable=False)
            assert "wants credentials: put user:password@" in str(error)
            error = await fails(endpoint(port, proxy.url(auth="us%40er:other@")), retryable=False)
            assert "refuses the user name and password" in str(error)
            assert "other" not in str(error)
            assert "us@er" not in str(error)

    with proxied(scheme, auth=("us@er", "hunter2")) as proxy:
        run(main)
        proxy.wait_for(lambda seen: seen.open == 0)


@pytest.mark.parametrize("scheme", HTTP)
@pytest.mark.parametrize(
    ("answer", "words", "retryable"),
    [
        (b"HTTP/1.1 403 Forbidden by us\r\n\r\n", "answered 403 Forbidden by us", False),
        (b"HTTP/1.1 405 \r\n\r\n", "answered 405", False),
        (b"HTTP/1.1 302 Found\r\nlocation: http://login/\r\n\r\n", "answered 302 Found", False),
        (b"HTTP/1.1 429 Slow\r\n\r\n", "answered 429", True),
        (b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 5\r\n\r\nsorry", "answered 502", True),
        (b"HTTP/1.0 503 No\r\n\r\n", "answered 503", True),
        (b"HTTP/1.1 504 No\r\n\r\n", "answered 504", True),
        (b"", "hung up", True),
        (b"HTTP/1.1 200 OK\r\n", "hung up", True),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "not HTTP", True),
        (b"HTTP/1.1 two hundred\r\n\r\n", "not HTTP", True),
        (b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n", "switch of protocols", True),
        (b"HTTP/1.1 200 OK\r\nx: " + b"x" * MAX_ANSWER_BYTES + b"\r\n\r\n", "head of over", True),
        (b"x" * (MAX_ANSWER_BYTES + 1), "", True),
        (b"HTTP/1.1 200 OK\r\n\r\nmore", "more than an answer", True),
        (b"HTTP/1.1 200 OK\r\n\r\n", "", True),
    ],
)
def test_what_a_proxy_may_say_instead(scheme: str, answer: bytes, words: str, retryable: bool) -> None:
    async def main() -> None:
        with pytest.raises(ConnectionFailed, match=words or "proxy|TLS") as caught:
            await dial(endpoint(1, proxy.url()), Marks(), Client)
        assert caught.value.retryable is retryable
        # The end may be seen just before or in the handshake through the tunnel.
        assert caught.value.phase in (("proxy", "tls") if answer == b"HTTP/1.1 200 OK\r\n\r\n" else ("proxy",))

    with proxied(scheme, answer=answer) as proxy:
        run(main)
        proxy.wait_for(lambda seen: seen.open == 0)


def test_an_interim_answer_and_what_comes_behind_the_final_one() -> None:
    """In a tunnel without TLS a server may speak at once: its first bytes come with the consent."""

    async def main() -> None:
        client = await dial(endpoint(1, proxy.url(), secure=False), Marks(), Client)
        await client.lost
        assert client.data == b"first words"

    with proxied(answer=b"HTTP/1.1 100 Wait\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nfirst words") as proxy:
        run(main)


@both_loops
@pytest.mark.parametrize("scheme", HTTP)
def test_a_certificate_that_is_not_trusted_inside(loop: Any, scheme: str) -> None:
    async def main() -> None:
        async with served(server_context("other.example")) as port:
            error = await fails(endpoint(port, proxy.url()), "tls", retryable=False)
            assert isinstance(error.__cause__, ssl.SSLCertVerificationError)

    with proxied(scheme) as proxy:
        run(main, loop)
        proxy.wait_for(lambda seen: seen.open == 0)


@both_loops
@pytest.mark.parametrize("tls", [TLS(), TLS(verify=False)], ids=["trusted", "unverified"])
def test_a_proxy_that_is_not_trusted_gets_no_password(loop: Any, tls: TLS) -> None:
    async def main() -> None:
        error = await fails(endpoint(1, proxy.url(auth="user:hunter2@"), tls=tls), retryable=False)
        assert "certificate of the proxy" in str(error)
        assert "TLS(ca=" in str(error)

    with proxied("https") as proxy:
        run(main, loop)
        proxy.wait_for(lambda seen: seen.open == 0)
        assert proxy.seen == []


@both_loops
def test_a_proxy_that_does_not_speak_tls(loop: Any) -> None:
    async def main() -> None:
        async with served(handler=speak_http) as port:
            error = await fails(endpoint(1, f"https://127.0.0.1:{port}"), retryable=True)
            assert "does not speak TLS here (is it http:// and not https://?)" in str(error)

    run(main, loop)


def test_a_proxy_never_sees_the_client_certificate(tmp_path: Any) -> None:
    file = str(tmp_path / "client.pem")
    CA.issue_cert("client.example").private_key_and_cert_chain_pem.write_to_path(file)
    tls = TLS(ca=TRUSTED.ca, cert=file)
    assert proxy_context_for(tls) is proxy_context_for(TRUSTED)
    context = server_context()
    CA.configure_trust(context)
    context.verify_mode = ssl.CERT_OPTIONAL  # would see it, did we send it

    async def main() -> None:
        async with served(context_that_wants_one()) as port:
            await talks(endpoint(port, proxy.url(), tls=tls))

    def context_that_wants_one() -> ssl.SSLContext:
        inner = server_context()
        CA.configure_trust(inner)
        inner.verify_mode = ssl.CERT_REQUIRED
        return inner

    with ProxyServer(tls=context) as proxy:
        run(main)
        assert proxy.certificates == [None]


@both_loops
@pytest.mark.parametrize("scheme", ["http", "https", "socks5h"])
def test_a_proxy_that_cannot_be_reached(loop: Any, scheme: str) -> None:
    with ProxyServer() as gone:
        url = gone.url(scheme, auth="user:hunter2@")

    async def main() -> None:
        phase = "proxy" if scheme.startswith("socks") else "tcp"
        error = await fails(endpoint(1, url), phase, retryable=True)
        assert f"the proxy {scheme}://127.0.0.1:{gone.port} (Endpoint.proxy) cannot be reached" in str(error)

    run(main, loop)


@pytest.mark.parametrize("scheme", ["http", "socks5h"])
def test_a_proxys_name_that_does_not_exist(scheme: str) -> None:
    async def main() -> None:
        phase = "proxy" if scheme.startswith("socks") else "dns"
        with pytest.raises(ConnectionFailed, match="proxy") as caught:
            await dial(endpoint(1, f"{scheme}://user:hunter2@nothing.invalid:1"), Marks(), Client)
        assert caught.value.phase == phase
        assert "hunter2" not in str(caught.value)

    run(main)


# --- the answer to CONNECT, as bytes -----------------------------------------------------------------------------------

ANSWER = b"HTTP/1.1 103 Early\r\na: b\r\n\r\nHTTP/1.0 200 Connection established\r\nVia: 1.1 p\r\nContent-Length: 9\r\n\r\nrest"


@given(st.lists(st.integers(1, len(ANSWER) - 1), max_size=8))
def test_any_split_reads_the_same(cuts: list[int]) -> None:
    edges = [0, *sorted({*cuts}), len(ANSWER)]
    answer = ConnectAnswer()
    done_at = None
    rest = b""
    for low, high in itertools.pairwise(edges):
        if done_at is not None:
            rest += ANSWER[low:high]
        elif answer.feed(ANSWER[low:high]):
            done_at = high
    assert (answer.status, answer.reason, answer.rest + rest) == (200, "Connection established", b"rest")


@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_are_an_answer_or_an_error(data: bytes, like_http: bool) -> None:
    answer = ConnectAnswer()
    with contextlib.suppress(ValueError):
        if answer.feed(b"HTTP/1.1 " + data if like_http else data):
            assert 200 <= answer.status <= 999
            assert len(answer.reason) <= 60
            assert answer.reason.isprintable()


# --- SOCKS -------------------------------------------------------------------------------------------------------------


@both_loops
@pytest.mark.parametrize("scheme", SOCKS)
@pytest.mark.parametrize("secure", [True, False])
def test_socks(loop: Any, scheme: str, secure: bool) -> None:
    async def main() -> None:
        async with served(server_context() if secure else None) as port:
            marks = await talks(endpoint(port, proxy.url(scheme), secure=secure))
            assert parts(marks) == ["proxy", "tls"] if secure else ["proxy"]
            await talks(endpoint(port, proxy.url(scheme), secure=secure, host="localhost"))
            there = "localhost" if scheme in ("socks4a", "socks5h") else "127.0.0.1"
            assert proxy.seen == [f"{scheme[:6]} 127.0.0.1:{port}", f"{scheme[:6]} {there}:{port}"]

    with proxied() as proxy:
        run(main, loop)
        proxy.wait_for(lambda seen: seen.open == 0)


@both_loops
def test_socks_credentials(loop: Any) -> None:
    async def main() -> None:
        async with served() as port:
            await talks(endpoint(port, proxy.url("socks5", auth="us%40er:hunter2@"), secure=False))
            error = await fails(endpoint(port, proxy.url("socks5")), retryable=False)
            assert "wants credentials" in str(error)
            error = await fails(endpoint(port, proxy.url("socks5", auth="us%40er:other@")), retryable=False)
            assert "refuses the user name and password" in str(error)
            await talks(endpoint(port, proxy.url("socks4", auth="me@"), secure=False))
            assert proxy.seen[-1] == f"socks4 me@127.0.0.1:{port}"

    with proxied(auth=("us@er", "hunter2")) as proxy:
        run(main, loop)
        proxy.wait_for(lambda seen: seen.open == 0)


@both_loops
@pytest.mark.parametrize("scheme", SOCKS)
def test_a_socks_proxy_that_cannot_reach_the_server(loop: Any, scheme: str) -> None:
    with ProxyServer() as gone:
        pass

    async def main() -> None:
        error = await fails(endpoint(gone.port, proxy.url(scheme)), retryable=True)
        assert "makes no connection to the server" in str(error)

    with proxied() as proxy:
        run(main, loop)
        proxy.wait_for(lambda seen: seen.open == 0)


@both_loops
@pytest.mark.parametrize("scheme", ["socks4", "socks5h"])
def test_what_is_no_socks_proxy(loop: Any, scheme: str) -> None:
    async def main() -> None:
        async with served(handler=speak_http) as port:
            await fails(endpoint(1, f"{scheme}://127.0.0.1:{port}"), retryable=True)

    run(main, loop)


def test_a_name_that_socks_here_cannot_resolve() -> None:
    async def main() -> None:
        with pytest.raises(ConnectionFailed, match=r"nothing\.invalid") as caught:
            await dial(endpoint(1, proxy.url("socks5"), host="nothing.invalid"), Marks(), Client)
        assert caught.value.phase == "proxy"

    with proxied() as proxy:
        run(main)
        proxy.wait_for(lambda seen: seen.open == 0)


def test_socks4_and_ipv6() -> None:
    async def main() -> None:
        for scheme in ("socks4", "socks4a"):
            with pytest.raises(ConfigurationError, match="SOCKS4 knows no IPv6"):
                await dial(endpoint(1, f"{scheme}://127.0.0.1:1", host="[::1]"), Marks(), Client)

    run(main)


def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "python_socks", None)

    async def main() -> None:
        with pytest.raises(ConfigurationError, match=r"pip install 'spanwire\[socks\]'") as caught:
            await dial(endpoint(1, "socks5://user:hunter2@127.0.0.1:1"), Marks(), Client)
        assert "hunter2" not in str(caught.value)

    run(main)


# --- nothing is left ---------------------------------------------------------------------------------------------------


@both_loops
@pytest.mark.parametrize(("scheme", "secure"), [("http", True), ("https", True), ("https", False), ("socks5", True)])
def test_a_dial_that_is_cancelled_anywhere_leaves_no_socket(loop: Any, scheme: str, secure: bool) -> None:
    """A socket that nobody closed is a ResourceWarning, and so a failure here; the proxy sees each one end."""

    async def main() -> None:
        async with served(server_context() if secure else None) as port:
            to = endpoint(port, proxy.url(scheme), secure=secure)
            steps, finished = 0, 0
            while finished < 3:
                task = asyncio.create_task(dial(to, Marks(), Client))
                await asyncio.sleep(steps * 0.0005)  # somewhere on the way; the next test says where
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    client = await task
                    finished += 1
                    assert client.transport is not None
                    client.transport.abort()
                    await client.lost
                steps += 1
            await asyncio.to_thread(proxy.wait_for, lambda seen: seen.open == 0)
            del client, task
        gc.collect()

    with proxied(scheme) as proxy:
        run(main, loop)


@both_loops
@pytest.mark.parametrize(
    ("scheme", "silent_proxy", "stands_at"),
    [
        ("http", True, "proxy"),
        ("https", True, "proxy"),
        ("socks4", True, "proxy"),
        ("socks5h", True, "proxy"),
        ("http", False, "tls"),
        ("https", False, "tls"),
        ("socks5", False, "tls"),
    ],
)
def test_a_dial_that_is_cancelled_while_it_waits(loop: Any, scheme: str, silent_proxy: bool, stands_at: str) -> None:
    async def main() -> None:
        async with served(handler=say_nothing) as port:
            marks = Marks()
            task = asyncio.create_task(dial(endpoint(port, proxy.url(scheme)), marks, Client))
            await asyncio.to_thread(proxy.wait_for, lambda seen: bool(seen.seen))
            while marks.open_part != stands_at:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(proxy.wait_for, lambda seen: seen.open == 0)
            del task
        gc.collect()

    with proxied(scheme, silent=silent_proxy) as proxy:
        run(main, loop)


def test_forwarding_is_for_those_who_ask_for_it() -> None:
    """Who knows nothing of it gets a tunnel, on which requests are written as ever."""

    async def main() -> None:
        async with served() as port:
            to = endpoint(port, proxy.url(), secure=False)
            await talks(to)
            assert proxy.seen == [f"CONNECT 127.0.0.1:{port}"]
            client = await dial(to, Marks(), Client, route=route_of(to, forward=True))
            assert client.transport is not None
            client.transport.abort()
            await client.lost
            assert len(proxy.seen) == 1

    with proxied() as proxy:
        run(main)


def test_what_came_early_goes_to_whom_a_stand_in_has_put_in_its_place() -> None:
    """As the one does that waits for what ALPN says: a server may speak before ``start_tls`` returns."""

    class Real(asyncio.Protocol):
        def __init__(self) -> None:
            self.seen: list[object] = []

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.seen.append("made")

        def data_received(self, data: bytes) -> None:
            self.seen.append(data)

        def eof_received(self) -> None:
            self.seen.append("eof")

        def connection_lost(self, error: Exception | None) -> None:
            self.seen.append(error)

    real = Real()

    class StandIn(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            cast(asyncio.Transport, transport).set_protocol(real)
            real.connection_made(transport)

    class Transport(asyncio.Transport):
        def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
            self.protocol = protocol

        def get_protocol(self) -> asyncio.BaseProtocol:
            return self.protocol

    gate = tunnel_module._Gate()
    gate.data_received(b"set")
    gate.data_received(b"tings")
    gate.eof_received()
    gate.connection_lost(None)
    gate.open(Transport(), StandIn())
    assert real.seen == ["made", b"settings", "eof", None]


def test_a_proxy_whose_handshake_fails_leaves_no_complaint() -> None:
    complaints: list[object] = []

    async def body() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: complaints.append(context))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
        with ProxyServer(tls=context) as proxy:  # whose authority nobody knows
            endpoint = Endpoint("https://127.0.0.1:9/v1", proxy=proxy.url("https"))
            failed = False
            try:
                await dial(endpoint, Marks(), asyncio.Protocol)
            except ConnectionFailed:
                failed = True
            assert failed
            for _ in range(10):  # the transport's end, and then what is left of it
                await asyncio.sleep(0)
                gc.collect()

    asyncio.run(body())
    assert complaints == []
