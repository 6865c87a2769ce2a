"""TLS contexts: what they trust, what they remember, how they say that a certificate is missing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Self

import pytest
import trustme

from spanwire.endpoint import TLS, Endpoint
from spanwire.errors import ConfigurationError, ConnectionFailed, SpanwireError
from spanwire.net import tls as tls_module
from spanwire.net.dial import dial
from spanwire.net.http1 import HTTP1Connection
from spanwire.net.tls import MAX_SESSIONS, context_for, handshake_with, proxy_context_for, remember_session
from spanwire.timeline import Marks
from tests.core.net.proxy_server import loops

CA = trustme.CA()
OTHER_CA = trustme.CA()
TRUSTED = TLS(ca=CA.cert_pem.bytes().decode())
VERSIONS = [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3]
REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"
both_loops = pytest.mark.parametrize("loop", loops(), ids=lambda factory: factory.__module__.split(".")[0])
both_versions = pytest.mark.parametrize("version", VERSIONS, ids=["tls1.2", "tls1.3"])


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR", "SSLKEYLOGFILE"):
        monkeypatch.delenv(name, raising=False)
    forget = tls_module._build.cache_clear
    forget()
    yield
    forget()


class Server:
    """Blocking sockets, since these send the alert of a handshake that they refuse, which asyncio's servers do not.

    `resumed`: for each handshake whether it was one of a session that the client had kept.
    """

    def __init__(self, context: ssl.SSLContext) -> None:
        self.context = context
        self.resumed: list[bool] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        self.threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for thread in self.threads:
            thread.join(10)

    def endpoint(self, tls: TLS = TRUSTED, host: str = "127.0.0.1") -> Endpoint:
        return Endpoint(f"https://{host}:{self.port}", tls=tls, proxy=None)

    def _start(self, target: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self.threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self.listener.accept()
                self._start(self._serve, sock)

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError), sock:
            with self.context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False) as secure:
                try:
                    secure.do_handshake()
                except ssl.SSLError:
                    with socket.socket(fileno=secure.detach()) as plain:
                        plain.shutdown(socket.SHUT_WR)  # and not a reset, which may overtake the alert
                        while plain.recv(4096):
                            pass
                    return
                self.resumed.append(bool(secure.session_reused))
                while secure.recv(4096):
                    secure.sendall(ANSWER)


def server_context(
    version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3, *, client_ca: trustme.CA | None = None, ca: trustme.CA = CA
) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ca.issue_cert("127.0.0.1", "localhost").configure_cert(context)
    context.maximum_version = version
    if client_ca is not None:
        client_ca.configure_trust(context)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


class Answer:
    """A sink for one answer."""

    def __init__(self) -> None:
        self.done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.body = b""

    def on_head(self, status: int, headers: dict[str, str]) -> None: ...

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_batch(self) -> None: ...

    def on_sent(self) -> None: ...

    def on_trailers(self, trailers: dict[str, str]) -> None: ...

    def on_end(self) -> None:
        self.done.set_result(self.body)

    def on_lost(self, error: SpanwireError) -> None:
        self.done.set_exception(error)


async def call(endpoint: Endpoint) -> bool:
    """One call on a connection of its own; whether its TLS was resumed."""
    connection = await dial(endpoint, Marks(), lambda: HTTP1Connection(endpoint.address))
    try:
        answer = Answer()
        connection.send(REQUEST, answer)
        assert await answer.done == b"hi"
        assert connection._transport is not None
        return bool(connection._transport.get_extra_info("ssl_object").session_reused)
    finally:
        await connection.aclose()


def run(main: Callable[[], Coroutine[Any, Any, Any]], loop: Any = None) -> Any:
    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(asyncio.wait_for(main(), 20))


# --- sessions ----------------------------------------------------------------------------------------------------------


@both_loops
@both_versions
def test_the_second_connection_resumes_the_session_of_the_first(loop: Any, version: ssl.TLSVersion) -> None:
    async def main() -> list[bool]:
        return [await call(server.endpoint()) for _ in range(3)]

    with Server(server_context(version)) as server:
        assert run(main, loop) == [False, True, True]
    assert server.resumed == [False, True, True]


@both_loops
def test_connections_that_are_dialled_at_once_do_not_mix_up_their_servers(loop: Any) -> None:
    """The name alone does not tell them apart, and the port is known to the dial's task only."""

    async def main() -> None:
        endpoints = [server.endpoint() for server in servers]
        assert await asyncio.gather(*[call(endpoint) for endpoint in endpoints]) == [False] * 4
        assert await asyncio.gather(*[call(endpoint) for endpoint in endpoints * 2]) == [True] * 8
        context: Any = context_for(TRUSTED)
        assert set(context.sessions) == {("127.0.0.1", server.port) for server in servers}

    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(Server(server_context())) for _ in range(4)]
        run(main, loop)


@both_versions
def test_another_configuration_never_gets_a_session(tmp_path: Path, version: ssl.TLSVersion) -> None:
    """Resuming one of an unverified connection would skip the verification; of another client's, its identity."""
    certificate = CA.issue_cert("client.example")
    file = tmp_path / "client.pem"
    certificate.private_key_and_cert_chain_pem.write_to_path(str(file))

    async def main() -> None:
        for tls in (TLS(verify=False), TRUSTED, TLS(ca=TRUSTED.ca, cert=str(file))):
            assert not await call(server.endpoint(tls))
            assert await call(server.endpoint(tls))

    with Server(server_context(version)) as server:
        run(main)


@both_versions
def test_a_session_that_the_server_has_forgotten_makes_a_full_handshake(version: ssl.TLSVersion) -> None:
    async def main() -> None:
        assert not await call(server.endpoint())
        server.context = server_context(version)  # new ticket keys, as after a restart
        assert not await call(server.endpoint())
        assert await call(server.endpoint())

    with Server(server_context(version)) as server:
        run(main)


@both_loops
def test_a_session_that_a_handshake_failed_with_is_forgotten(loop: Any) -> None:
    """There are servers that end the connection where they should make a full handshake."""

    async def main() -> None:
        assert not await call(server.endpoint())
        assert await call(server.endpoint())
        good, server.context = server.context, server_context()
        server.context.set_alpn_protocols(["http/1.1"])
        server.context.set_ciphers("ECDHE-RSA-AES128-GCM-SHA256")
        server.context.minimum_version = server.context.maximum_version = ssl.TLSVersion.TLSv1_2
        context: Any = context_for(TRUSTED)
        context.minimum_version = ssl.TLSVersion.TLSv1_3  # now the two have nothing in common
        with pytest.raises(ConnectionFailed):
            await call(server.endpoint())
        assert not context.sessions
        server.context = good
        assert not await call(server.endpoint())

    with Server(server_context()) as server:
        run(main, loop)


def test_only_so_many_sessions_are_kept_and_the_oldest_goes() -> None:
    async def main() -> None:
        endpoint = server.endpoint()
        connection = await dial(endpoint, Marks(), lambda: HTTP1Connection(endpoint.address))
        answer = Answer()
        connection.send(REQUEST, answer)
        await answer.done
        assert connection._transport is not None
        ssl_object = connection._transport.get_extra_info("ssl_object")
        context = ssl_object.context
        for number in range(MAX_SESSIONS + 5):
            ssl_object._spanwire_keep = (context, ("h", number))
            remember_session(ssl_object)
        assert [port for _, port in context.sessions] == list(range(5, MAX_SESSIONS + 5))
        await connection.aclose()

    with Server(server_context()) as server:
        run(main)


def test_what_has_no_session_is_no_matter() -> None:
    remember_session(None)
    context = ssl.create_default_context()
    remember_session(context.wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_hostname="h"))
    context = context_for(TRUSTED)
    with handshake_with(context, "h", 1):
        remember_session(context.wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_hostname="h"))
    assert not context.sessions  # type: ignore[attr-defined]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_parent_and_child_may_resume_the_same_session() -> None:
    async def main() -> bool:
        return await call(server.endpoint())

    with Server(server_context()) as server:
        assert not run(main)
        child = os.fork()
        if not child:
            code = 1
            with contextlib.suppress(BaseException):
                code = 0 if run(main) and run(main) else 2
            os._exit(code)
        assert run(main)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# --- client certificates -----------------------------------------------------------------------------------------------


@pytest.fixture
def client(tmp_path: Path) -> dict[str, Any]:
    """Client certificates: as one file, as two, and one of a CA that the server does not know."""
    mine, other = CA.issue_cert("client.example"), OTHER_CA.issue_cert("client.example")
    mine.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "both.pem"))
    mine.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    mine.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    other.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "other.pem"))
    return {
        "both": str(tmp_path / "both.pem"),
        "two": (str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")),
        "other": str(tmp_path / "other.pem"),
        "none": None,
    }


@both_loops
@both_versions
@pytest.mark.parametrize("which", ["both", "two"])
def test_a_server_that_wants_a_client_certificate(
    client: dict[str, Any], loop: Any, version: ssl.TLSVersion, which: str
) -> None:
    async def main() -> list[bool]:
        return [await call(server.endpoint(TLS(ca=TRUSTED.ca, cert=client[which]))) for _ in range(2)]

    with Server(server_context(version, client_ca=CA)) as server:
        assert run(main, loop) == [False, True]


@both_loops
@both_versions
@pytest.mark.parametrize("which", ["none", "other"])
def test_a_client_certificate_that_is_missing_or_wrong(
    client: dict[str, Any], loop: Any, version: ssl.TLSVersion, which: str
) -> None:
    """With TLS 1.3 the client's handshake is done when the server says no: the first read says it."""

    async def main() -> None:
        endpoint = server.endpoint(TLS(ca=TRUSTED.ca, cert=client[which]))
        with pytest.raises(ConnectionFailed, match=r"client certificate, TLS\(cert=") as caught:
            await call(endpoint)
        assert (caught.value.phase, caught.value.retryable) == ("tls", False)
        assert isinstance(caught.value.__cause__, ssl.SSLError)

    with Server(server_context(version, client_ca=CA)) as server:
        run(main, loop)


@both_loops
def test_a_refusal_that_comes_while_the_connection_is_idle_is_kept_for_the_call(
    client: dict[str, Any], loop: Any
) -> None:
    async def main() -> None:
        endpoint = server.endpoint(TLS(ca=TRUSTED.ca))
        connection = await dial(endpoint, Marks(), lambda: HTTP1Connection(endpoint.address))
        await connection._closed
        with pytest.raises(ConnectionFailed, match="client certificate") as caught:
            connection.send(REQUEST, Answer())
        assert caught.value.phase == "tls"

    with Server(server_context(client_ca=CA)) as server:
        run(main, loop)


# --- trust -------------------------------------------------------------------------------------------------------------


def ca_file(folder: Path, name: str = "ca.pem") -> Path:
    CA.cert_pem.write_to_path(str(folder / name))
    return folder / name


def works(server: Server, tls: TLS) -> None:
    run(lambda: call(server.endpoint(tls)))


def is_not_trusted(server: Server, tls: TLS) -> ConnectionFailed:
    with pytest.raises(ConnectionFailed, match="not trusted") as caught:
        run(lambda: call(server.endpoint(tls)))
    assert (caught.value.phase, caught.value.retryable) == ("tls", False)
    return caught.value


def test_the_environment_names_what_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read when a context is made, so a variable that is set later holds for the connections after it."""
    file = ca_file(tmp_path)
    folder = tmp_path / "folder"
    folder.mkdir()
    ca_file(folder, f"{name_hash(file)}.0")
    with Server(server_context()) as server:
        is_not_trusted(server, TLS())
        monkeypatch.setenv("SSL_CERT_FILE", str(file))
        works(server, TLS())
        monkeypatch.delenv("SSL_CERT_FILE")
        is_not_trusted(server, TLS())
        monkeypatch.setenv("SSL_CERT_DIR", f"{tmp_path / 'missing'}{os.pathsep}{folder}")
        works(server, TLS())
        works(server, TRUSTED)  # TLS.ca stands in the place of all that
        is_not_trusted(server, TLS(ca=OTHER_CA.cert_pem.bytes().decode()))


def name_hash(file: Path) -> str:
    """The name under which OpenSSL looks for a certificate in a folder."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the openssl command")
    command = [openssl, "x509", "-noout", "-hash", "-in", str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_ca_as_a_folder(tmp_path: Path) -> None:
    file = ca_file(tmp_path)
    file.rename(tmp_path / f"{name_hash(file)}.0")
    with Server(server_context()) as server:
        works(server, TLS(ca=str(tmp_path)))


@pytest.mark.skipif(sys.platform in ("darwin", "win32"), reason="the system's own store is not empty")
def test_a_system_without_certificates_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(_self: ssl.SSLContext, _purpose: ssl.Purpose = ssl.Purpose.SERVER_AUTH) -> None: ...

    monkeypatch.setattr(tls_module._ResumingContext, "load_default_certs", nothing)
    monkeypatch.setattr(tls_module, "_CA_FILES", (str(tmp_path / "missing"),))
    paths = ssl.get_default_verify_paths()._replace(openssl_capath=str(tmp_path))
    monkeypatch.setattr(ssl, "get_default_verify_paths", lambda: paths)
    with Server(server_context()) as server:
        error = is_not_trusted(server, TLS())
        assert "no CA certificates were found on this system: install ca-certificates or use TLS(ca=FILE)" in str(error)
        assert "SSL_CERT_FILE" not in str(error)


def test_variables_that_name_nothing_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "missing.pem"))
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path))
    with Server(server_context()) as server:
        assert "SSL_CERT_FILE and SSL_CERT_DIR" in str(is_not_trusted(server, TLS()))


@pytest.mark.skipif(sys.platform in ("darwin", "win32"), reason="the system's own store")
def test_the_places_of_other_distributions_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python that was built elsewhere looks for certificates where that system had them."""
    file = ca_file(tmp_path)

    def nothing(_self: ssl.SSLContext, _purpose: ssl.Purpose = ssl.Purpose.SERVER_AUTH) -> None: ...

    monkeypatch.setattr(tls_module._ResumingContext, "load_default_certs", nothing)
    monkeypatch.setattr(tls_module, "_CA_FILES", (str(tmp_path / "missing"), str(file)))
    paths = ssl.get_default_verify_paths()._replace(openssl_capath=str(tmp_path / "missing"))
    monkeypatch.setattr(ssl, "get_default_verify_paths", lambda: paths)
    with Server(server_context()) as server:
        works(server, TLS())


@both_loops
def test_the_platforms_own_verification(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop: Any) -> None:
    """What macOS and Windows use; here truststore reads OpenSSL's places. It is asked at each handshake anew."""
    import truststore

    monkeypatch.setattr(sys, "platform", "darwin")
    context = context_for(TLS())
    monkeypatch.undo()
    assert isinstance(context, truststore.SSLContext)
    monkeypatch.setattr(tls_module, "_build", lambda *_: context)
    with Server(server_context()) as server:
        is_not_trusted(server, TLS())
        monkeypatch.setenv("SSL_CERT_FILE", str(ca_file(tmp_path)))
        assert [run(lambda: call(server.endpoint(TLS())), loop) for _ in range(2)] == [False, False]


def test_contexts_are_shared_by_all_that_are_configured_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    assert context_for(TRUSTED) is context_for(TLS(ca=TRUSTED.ca))
    assert context_for(TRUSTED, ("h2", "http/1.1")) is not context_for(TRUSTED)
    assert context_for(TRUSTED, ("http/1.1",)) is context_for(TRUSTED)
    assert context_for(TLS(verify=False)) is not context_for(TLS())
    assert proxy_context_for(TLS(verify=False)) is proxy_context_for(TLS())
    assert proxy_context_for(TLS()).verify_mode is ssl.CERT_REQUIRED
    before = context_for(TLS())
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere.pem")
    assert context_for(TLS()) is not before


def test_a_context_is_as_strict_as_pythons_own() -> None:
    mine, default = context_for(TLS()), ssl.create_default_context()
    for name in ("verify_flags", "verify_mode", "check_hostname", "options", "minimum_version", "maximum_version"):
        assert getattr(mine, name) == getattr(default, name), name
    assert mine.get_ciphers() == default.get_ciphers()


def test_keys_are_logged_where_python_logs_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSLKEYLOGFILE", str(tmp_path / "keys"))
    assert context_for(TRUSTED).keylog_filename == str(tmp_path / "keys")


@pytest.mark.parametrize("ca", ["missing.pem", "a\0b", "x" * 5000])
def test_a_ca_that_cannot_be_loaded(ca: str) -> None:
    with pytest.raises(ConfigurationError, match=r"TLS\(ca="):
        context_for(TLS(ca=ca))


def test_a_renewed_certificate_is_read_again(tmp_path: Path) -> None:
    ca = trustme.CA()
    path = tmp_path / "client.pem"

    def renew(name: str) -> None:
        path.write_bytes(ca.issue_cert(name).private_key_and_cert_chain_pem.bytes())

    renew("one.test")
    setting = TLS(cert=str(path))
    first = context_for(setting)
    assert context_for(setting) is first
    renew("a-second-one.test")
    assert context_for(setting) is not first
