"""The request's head on the wire."""

from __future__ import annotations

import asyncio

import pytest
from spanwire_sse import SSETransport, register_transports

import spanwire
from spanwire import errors
from spanwire.manager import ConnectionManager
from spanwire.transport import Connection, Transport
from tests.support import NEVER, chat, run, serving


def test_it_is_what_the_contract_says() -> None:
    assert isinstance(SSETransport(), Transport)
    (spec,) = register_transports()
    assert spec.factory is SSETransport


def test_a_connection_is_what_the_contract_says() -> None:
    with serving() as server:

        async def body() -> None:
            async with ConnectionManager() as manager:
                await manager.warm(server.endpoint())
                (pool,) = manager.state().pools.values()
                (member,) = pool.state.members
                assert isinstance(member.connection, Connection)
                assert member.connection.usable()
                member.connection.abort()
                assert not member.connection.usable()

        run(body)


def test_the_bytes_of_a_request() -> None:
    """Seen by a server that does not parse."""
    seen: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        writer.close()

    async def body() -> None:
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        endpoint = spanwire.Endpoint(f"http://127.0.0.1:{port}/v1/", proxy=None, query={"a b": "c&d"}, retries=NEVER)
        async with ConnectionManager(telemetry=None) as manager:
            with pytest.raises(errors.ConnectionFailed, match="before anything of the answer came"):
                await manager.complete(endpoint, chat())
        server.close()
        await server.wait_closed()
        head = seen[0].decode().split("\r\n")
        assert head[0] == "POST /v1/chat/completions?a+b=c%26d HTTP/1.1"
        assert head[1] == f"host: 127.0.0.1:{port}"
        assert head[2].startswith("user-agent: spanwire/")
        names = [line.split(":")[0] for line in head[1:-2]]
        assert len(names) == len(set(names))

    run(body)


def test_a_header_of_the_call_replaces_the_endpoints_and_ours() -> None:
    with serving() as server:

        async def body() -> None:
            async with ConnectionManager() as manager:
                endpoint = server.endpoint(headers={"User-Agent": "mine/1", "X-A": "endpoint"}, api_key="k")
                await manager.complete(endpoint, chat(headers={"x-a": "call", "Accept-Encoding": "gzip"}))
                await manager.complete(endpoint, chat())

        run(body)
        first, second = (request.headers for request in server.requests)
        assert (first["user-agent"], first["x-a"], first["accept-encoding"]) == ("mine/1", "call", "gzip")
        assert (second["user-agent"], second["x-a"], second["accept-encoding"]) == ("mine/1", "endpoint", "identity")


@pytest.mark.parametrize("name", ["Host", "content-length", "Transfer-Encoding", "connection"])
def test_headers_that_frame_the_message_are_ours_alone(name: str) -> None:
    with serving() as server:

        async def body() -> None:
            async with ConnectionManager() as manager:
                with pytest.raises(errors.ConfigurationError, match=name.lower()):
                    await manager.complete(server.endpoint(headers={name: "x"}), chat())

        run(body)
        assert server.requests == []
