"""What the tests of sessions share: a server whose behaviour is a function, and how to see that nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

import spanwire
from spanwire.manager import ConnectionManager
from spanwire.session import Session
from spanwire.testing.tls import ThrowAwayCA

__all__ = ["Endings", "handled", "member_socket", "nothing_is_left", "raw", "until"]

_PATIENCE_S = 20.0


class Endings(list[tuple[int, str]]):
    """The close codes and reasons of the connections that have ended, as the server saw them."""


@contextlib.asynccontextmanager
async def handled(
    handler: Callable[[ServerConnection], Awaitable[None]], *, authority: ThrowAwayCA | None = None, **settings: Any
) -> AsyncIterator[tuple[str, Endings]]:
    """A server on this loop: gives its URL, and how its connections ended."""
    ended = Endings()

    async def handle(socket: ServerConnection) -> None:
        with contextlib.suppress(ConnectionClosed):
            await handler(socket)
        await socket.wait_closed()
        ended.append((socket.close_code or 0, socket.close_reason or ""))

    settings = {"ping_interval": None, "compression": None, "close_timeout": 1, **settings}
    if authority is not None:
        settings["ssl"] = authority.server_context("127.0.0.1")
    async with serve(handle, "127.0.0.1", 0, **settings) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        yield f"{'ws' if authority is None else 'wss'}://127.0.0.1:{port}/raw", ended


def raw(url: str, *, authority: ThrowAwayCA | None = None, **more: Any) -> spanwire.Endpoint:
    """The endpoint of such a server."""
    if authority is not None:
        more["tls"] = spanwire.TLS(ca=authority.pem)
    return spanwire.Endpoint(url, proxy=None, dialect="raw", **more)


async def until(predicate: Callable[[], object]) -> None:
    """Let the loop go on until it is so."""
    async with asyncio.timeout(_PATIENCE_S):
        while not predicate():
            await asyncio.sleep(0.001)


async def nothing_is_left(manager: ConnectionManager) -> None:
    """No connection, no call, no slot: all that a session held is given back."""
    await until(lambda: repr(manager) == "ConnectionManager(0 connections, 0 calls)")


def member_socket(session: Session) -> Any:
    """The WebSocket below a session that is open."""
    run = session._run
    assert run is not None
    return run.exchange._socket  # type: ignore[union-attr]
