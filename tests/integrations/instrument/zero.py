"""What the tests of zero-code instrumentation share."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import spanwire_instrument
from opentelemetry.trace import SpanKind

from spanwire.testing import Script
from spanwire.timeline import Timeline
from tests.integrations.instrument.support import Seen
from tests.support import assert_adds_up


@contextmanager
def instrumented(**more: Any) -> Iterator[Seen]:
    """Everything is watched inside, and as it was afterwards."""
    before = snapshot()
    seen = Seen()
    spanwire_instrument.instrument(manager=seen.manager, **more)
    try:
        yield seen
    finally:
        spanwire_instrument.uninstrument()
        assert snapshot() == before


def snapshot() -> dict[str, Any]:
    """Every attribute of everything that is patched, and what finds modules."""
    import aiohttp
    import aiohttp.client_proto
    import grpc.aio._channel
    import httpx
    import httpx2
    import websockets.asyncio.client

    owners: list[Any] = [
        *(getattr(hx, name) for hx in (httpx, httpx2) for name in ("HTTPTransport", "AsyncHTTPTransport")),
        *(getattr(hx, name) for hx in (httpx, httpx2) for name in ("Client", "AsyncClient")),
        aiohttp.ClientSession,
        aiohttp.ClientResponse,
        aiohttp.TCPConnector,
        aiohttp.StreamReader,
        aiohttp.client_proto.ResponseHandler,
        websockets.asyncio.client.ClientConnection,
        websockets.asyncio.client.connect,
        grpc.aio._channel.Channel,
        httpx,
        httpx2,
        aiohttp,
        grpc.aio,
        websockets.asyncio.client,
    ]
    found: dict[str, Any] = {f"{owner!r}.{name}": id(value) for owner in owners for name, value in vars(owner).items()}
    found["meta_path"] = list(map(id, sys.meta_path))
    return found


def same_again(*, streamed: bool) -> Script:
    """An answer without an id that grows."""
    if not streamed:
        body = {
            "id": "1",
            "model": "m",
            "choices": [{"index": 0, "message": {"content": "Hi"}, "finish_reason": "stop"}],
        }
        return Script(body=json.dumps(body).encode(), headers={"date": "now"})
    writes = [
        b'data: {"id":"1","model":"m","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n',
        b'data: {"id":"1","model":"m","choices":[{"index":0,"delta":{"content":"Hi"},"finish_reason":"stop"}]}\n\n',
        b"data: [DONE]\n\n",
    ]
    return Script(writes=writes, headers={"date": "now"})


def checked(timeline: Timeline, outcome: str = "completed") -> Timeline:
    """One whose segments add up."""
    assert timeline.outcome == outcome
    assert_adds_up(timeline)
    return timeline


def one(seen: Seen, outcome: str = "completed") -> Timeline:
    """The only call, told of once, in one span."""
    (timeline,) = seen.timelines
    assert len([span for span in seen.spans if span.kind is SpanKind.CLIENT]) == 1
    return checked(timeline, outcome)
