"""The clients that a user may bring: the async and the synchronous one of httpx and of httpx2."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import httpx2
import pytest

import spanwire
from spanwire.testing import LoopbackServer

CLIENTS: list[Any] = [httpx.AsyncClient, httpx.Client, httpx2.AsyncClient, httpx2.Client]
ASYNC_CLIENTS: list[Any] = [httpx.AsyncClient, httpx2.AsyncClient]
SYNC_CLIENTS: list[Any] = [httpx.Client, httpx2.Client]


def name_of(cls: Any) -> str:
    return f"{cls.__module__.partition('.')[0]}.{cls.__name__}"


def each(classes: list[Any] = CLIENTS) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("cls", classes, ids=name_of)


def is_async(cls: Any) -> bool:
    return bool(cls.__name__ == "AsyncClient")


def library(cls: Any) -> Any:
    return httpx if cls.__module__.partition(".")[0] == "httpx" else httpx2


@contextlib.asynccontextmanager
async def opened(cls: Any, **more: Any) -> AsyncIterator[Any]:
    """A client of this class, closed at the end. It does not read the machine's own proxy settings."""
    client = cls(**{"trust_env": False, **more})
    try:
        yield client
    finally:
        if is_async(cls):
            await client.aclose()
        else:
            client.close()


def to(server: LoopbackServer, client: Any, **more: Any) -> spanwire.Endpoint:
    return spanwire.Endpoint(server.url, options={"http_client": client}, **more)


def hook(cls: Any, function: Callable[[Any], object]) -> Any:
    """An event hook of the kind that the client takes."""
    if not is_async(cls):
        return function

    async def asynchronous(thing: Any) -> None:
        function(thing)

    return asynchronous


def threads() -> list[threading.Thread]:
    """Those that carry exchanges over synchronous clients."""
    return [thread for thread in threading.enumerate() if thread.name == "spanwire client call"]
