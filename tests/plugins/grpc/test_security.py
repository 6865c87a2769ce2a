"""Client certificates, keys and proxies, over the wire."""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from spanwire_grpc.loopback import ECHO
from spanwire_grpc.loops import bind_loop
from spanwire_grpc.stubs import openai_json

import spanwire
from spanwire import errors
from spanwire.manager import ConnectionManager
from spanwire.testing import LoopbackServer, Script
from tests.proxies import proxy
from tests.support import AT_ONCE, NEVER, chat, hello, run, wait_for

HELLO = "Hello from the loopback server."
SECRET = "s3cret"


@functools.cache
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(autouse=True)
def _no_proxy_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for word in ("grpc", "http", "https", "all", "no"):
        for name in (f"{word}_proxy", f"{word}_proxy".upper()):
            monkeypatch.delenv(name, raising=False)


@contextlib.asynccontextmanager
async def strict(seen: list[Any]) -> AsyncIterator[str]:
    """A server that asks for a certificate of our authority, and tells whose it has got."""

    async def answer(_request: bytes, context: Any) -> AsyncIterator[bytes]:
        seen.append(context.auth_context()["x509_common_name"][0])
        body = b'{"choices":[{"index":0,"delta":{"content":"x"},"finish_reason":"stop"}]}'
        yield openai_json.OpenAIStreamChunk(json_chunk=body).SerializeToString()
        yield openai_json.OpenAIStreamChunk(finished=True).SerializeToString()

    methods = {"ChatComplete": grpc.unary_stream_rpc_method_handler(answer)}
    own = authority().issue_cert("127.0.0.1")
    credentials = grpc.ssl_server_credentials(
        [(own.private_key_pem.bytes(), b"".join(blob.bytes() for blob in own.cert_chain_pems))],
        root_certificates=authority().cert_pem.bytes(),
        require_client_auth=True,
    )
    bind_loop()
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("sglang.runtime.v1.SglangService", methods),))
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        yield f"grpcs://127.0.0.1:{port}"
    finally:
        await server.stop(None)
        await server.wait_for_termination(5)


def identity(folder: Path, name: str, of: trustme.CA | None = None) -> tuple[str, str]:
    """Files of a client's certificate and key."""
    made = (of or authority()).issue_cert(common_name=name)
    chain, key = folder / f"{name}.pem", folder / f"{name}.key"
    chain.write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
    made.private_key_pem.write_to_path(str(key))
    return str(chain), str(key)


def at(url: str, *, cert: Any = None, **more: Any) -> spanwire.Endpoint:
    ca = authority().cert_pem.bytes().decode()
    return spanwire.Endpoint(
        url,
        **{"proxy": None, "retries": NEVER, "tls": spanwire.TLS(ca=ca, cert=cert), "dialect": "openai-json", **more},
    )


# --- client certificates ------------------------------------------------------------------------------------------------------


def test_the_server_sees_whose_certificate_it_is_and_two_clients_share_no_connection(tmp_path: Path) -> None:
    seen: list[Any] = []
    certs = {name: identity(tmp_path, name) for name in ("one", "two")}

    async def main() -> None:
        async with strict(seen) as url, ConnectionManager() as manager:
            for name in ("one", "two", "one"):
                assert (await manager.complete(at(url, cert=certs[name]), chat())).text == "x"
            assert repr(manager) == "ConnectionManager(2 connections, 0 calls)"

    run(main)
    assert seen == [b"one", b"two", b"one"]


def test_certificate_and_key_in_one_file(tmp_path: Path) -> None:
    seen: list[Any] = []
    chain, key = identity(tmp_path, "one")
    both = tmp_path / "both.pem"
    both.write_bytes(Path(key).read_bytes() + Path(chain).read_bytes())

    async def main() -> None:
        async with strict(seen) as url, ConnectionManager() as manager:
            assert (await manager.complete(at(url, cert=str(both)), chat())).text == "x"

    run(main)
    assert seen == [b"one"]


@pytest.mark.parametrize("cert", ["none", "of somebody else"])
def test_without_a_certificate_that_the_server_takes_there_is_no_connection(tmp_path: Path, cert: str) -> None:
    seen: list[Any] = []
    given = None if cert == "none" else identity(tmp_path, "other", trustme.CA())

    async def main() -> None:
        async with strict(seen) as url, ConnectionManager() as manager:
            with pytest.raises(errors.ConnectionFailed) as caught:
                await manager.complete(at(url, cert=given), chat())
            assert "TLS(cert=...)" in str(caught.value)
            assert repr(manager) == "ConnectionManager(0 connections, 0 calls)"

    run(main)
    assert seen == []


# --- keys ---------------------------------------------------------------------------------------------------------------------


def test_a_key_is_asked_for_each_call_and_sent_on_the_same_connection() -> None:
    keys = iter(["first", "second"])
    with LoopbackServer([hello()], part="grpc", tls=True) as server:

        async def main() -> None:
            async with ConnectionManager() as manager:
                endpoint = server.endpoint(api_key=lambda: next(keys))
                for _ in range(2):
                    assert (await manager.complete(endpoint, chat())).text == HELLO

        run(main)
        assert [request.headers["authorization"] for request in server.requests] == ["Bearer first", "Bearer second"]
        assert server.connections == 1


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED])
def test_a_key_that_is_refused_is_told_and_not_shown(code: grpc.StatusCode) -> None:
    headers = {"grpc-status": str(code.value[0]), "grpc-message": "who are you?"}
    with LoopbackServer([Script(headers=headers, done=False)], part="grpc", tls=True) as server:

        async def main() -> None:
            async with ConnectionManager() as manager:
                endpoint = server.endpoint(api_key=SECRET, retries=AT_ONCE, headers={"x-token": SECRET})
                with pytest.raises(errors.AuthenticationFailed, match="who are you") as caught:
                    await manager.complete(endpoint, chat())
                assert not caught.value.retryable
                assert SECRET not in "".join(traceback.format_exception(caught.value)) + repr(manager) + repr(endpoint)

        run(main)
        assert len(server.requests) == 1
        assert server.requests[0].headers["x-token"] == SECRET


# --- proxies ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("password", [None, f"user:{SECRET}"])
@pytest.mark.parametrize("secure", [False, True])
def test_through_a_tunnel_of_an_http_proxy(secure: bool, password: str | None) -> None:
    with LoopbackServer([hello()], part="grpc", tls=secure) as server, proxy(password) as via:
        user = "" if password is None else f"{password}@"
        endpoint = server.endpoint(proxy=f"http://{user}127.0.0.1:{via.port}")

        async def main() -> None:
            async with ConnectionManager() as manager:
                for _ in range(3):
                    reply = await manager.complete(endpoint, chat())
                    assert reply.text == HELLO
                assert SECRET not in repr(endpoint) + repr(manager) + str(reply.timeline)

        run(main)
        assert via.lines == [f"CONNECT 127.0.0.1:{server.port} HTTP/1.1"]
        assert server.connections == 1


@pytest.mark.parametrize("name", ["http_proxy", "https_proxy"])
def test_the_environment_names_it_as_for_every_other_endpoint(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    secure = name == "https_proxy"
    with LoopbackServer([hello()], part="grpc", tls=secure) as server, proxy() as via:
        monkeypatch.setenv(name, f"http://127.0.0.1:{via.port}")

        async def main() -> None:
            async with ConnectionManager() as manager:
                assert (await manager.complete(server.endpoint(proxy="env"), chat())).text == HELLO
            monkeypatch.setenv("no_proxy", "127.0.0.1")
            async with ConnectionManager() as manager:
                assert (await manager.complete(server.endpoint(proxy="env"), chat())).text == HELLO

        run(main)
        assert via.connections == 1


def test_a_proxy_that_wants_another_password_is_told_and_the_password_is_not_shown() -> None:
    with LoopbackServer([hello()], part="grpc") as server, proxy("user:other") as via:
        endpoint = server.endpoint(proxy=f"http://user:{SECRET}@127.0.0.1:{via.port}", retries=NEVER)

        async def main() -> None:
            async with ConnectionManager() as manager:
                with pytest.raises(errors.ConnectionFailed) as caught:
                    await manager.complete(endpoint, chat())
                assert "407" in str(caught.value)
                assert (caught.value.phase, caught.value.retryable) == ("proxy", False)
                assert SECRET not in "".join(traceback.format_exception(caught.value))

        run(main)
        assert server.connections == 0


def test_a_proxy_that_is_not_there() -> None:
    with LoopbackServer([hello()], part="grpc") as server:
        with proxy() as gone:
            port = gone.port
        endpoint = server.endpoint(proxy=f"http://127.0.0.1:{port}", retries=NEVER)

        async def main() -> None:
            async with ConnectionManager() as manager:
                with pytest.raises(errors.ConnectionFailed) as caught:
                    await manager.complete(endpoint, chat())
                assert (caught.value.phase, caught.value.retryable) == ("tcp", True)

        run(main)
        assert server.connections == 0


def test_a_server_behind_it_that_is_not_there() -> None:
    with LoopbackServer([hello()], part="grpc") as gone:
        port = gone.port
    with proxy() as via:
        endpoint = spanwire.Endpoint(f"grpc://127.0.0.1:{port}", proxy=f"http://127.0.0.1:{via.port}", retries=NEVER)

        async def main() -> None:
            async with ConnectionManager() as manager:
                with pytest.raises(errors.ConnectionFailed) as caught:
                    await manager.complete(endpoint, chat())
                assert caught.value.retryable

        run(main)


def test_a_session_goes_through_it_too() -> None:
    with LoopbackServer([], part="grpc", tls=True) as server, proxy() as via:
        endpoint = server.endpoint(proxy=f"http://127.0.0.1:{via.port}", options={"method": ECHO})

        async def main() -> None:
            async with ConnectionManager() as manager:
                async with manager.session(endpoint) as session:
                    await session.send(b"a")
                    assert (await anext(session)).raw == b"a"
                await wait_for(server, lambda s: s.requests)

        run(main)
        assert via.connections == 1
