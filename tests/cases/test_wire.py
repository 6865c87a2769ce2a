"""The corpus: answers, as exact bytes, that broke other streaming clients. ``expected.json`` says what is right and why.

Each is played three ways: with pauses between the server's writes, all in one write, and cut into single bytes; through
``stream`` and ``complete``, async and sync.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import spanwire
from spanwire import errors
from spanwire.testing import LoopbackServer, Script
from tests.support import AT_ONCE, assert_adds_up, chat

HERE = Path(__file__).parent
EXPECTED: dict[str, dict[str, Any]] = json.loads((HERE / "expected.json").read_text("ascii"))
KINDS: dict[str, type[errors.SpanwireError]] = {
    "server": errors.ServerError,
    "protocol": errors.ProtocolError,
    "incomplete": errors.Truncated,
    "connection": errors.ConnectionFailed,
}


def script(name: str, cut: str) -> Script:
    wire = json.loads((HERE / "wire" / f"{name}.json").read_text("utf-8"))
    writes = [base64.b64decode(item) for item in wire["writes_b64"]]
    if cut == "bytes":
        writes = [bytes([byte]) for write in writes for byte in write]
    return Script(
        status=int(wire["status"].split()[0]),
        content_type=wire["content_type"],
        headers=wire["headers"],
        writes=writes,
        write_gap_s=0.002 if cut == "paused" else 0.0,
        end_s=min(wire.get("end_delay_ms", 0) / 1000, 0.3),
        drop_after=len(writes) if wire["drop_in_next_chunk"] else None,
    )


class Seen:
    """What a client saw of one call."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.error: errors.SpanwireError | None = None
        self.reply: spanwire.Reply | None = None
        self.timeline: spanwire.Timeline | None = None

    def ended(self, reply: spanwire.Reply | None, timeline: spanwire.Timeline | None) -> None:
        self.reply, self.timeline = reply, timeline


async def _async_stream(endpoint: spanwire.Endpoint, seen: Seen) -> None:
    async with spanwire.ConnectionManager() as manager:
        async with manager.stream(endpoint, chat()) as stream:
            async for chunk in stream:
                seen.pieces.append(chunk.text)
        seen.ended(stream.reply, stream.timeline)


async def _async_complete(endpoint: spanwire.Endpoint, seen: Seen) -> None:
    async with spanwire.ConnectionManager() as manager:
        reply = await manager.complete(endpoint, chat())
        seen.ended(reply, reply.timeline)


def _sync_stream(endpoint: spanwire.Endpoint, seen: Seen) -> None:
    with spanwire.SyncConnectionManager() as manager:
        with manager.stream(endpoint, chat()) as stream:
            seen.pieces.extend(chunk.text for chunk in stream)
        seen.ended(stream.reply, stream.timeline)


def _sync_complete(endpoint: spanwire.Endpoint, seen: Seen) -> None:
    with spanwire.SyncConnectionManager() as manager:
        reply = manager.complete(endpoint, chat())
        seen.ended(reply, reply.timeline)


WAYS: dict[str, Callable[[spanwire.Endpoint, Seen], None]] = {
    "async stream": lambda endpoint, seen: asyncio.run(_async_stream(endpoint, seen)),
    "async complete": lambda endpoint, seen: asyncio.run(_async_complete(endpoint, seen)),
    "sync stream": _sync_stream,
    "sync complete": _sync_complete,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cut", ["paused", "whole", "bytes"])
@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_the_answer_is_read_for_what_it_is(name: str, cut: str, way: str, caplog: pytest.LogCaptureFixture) -> None:
    expected = EXPECTED[name]
    seen = Seen()
    with LoopbackServer([script(name, cut)]) as server:
        try:
            WAYS[way](server.endpoint(api_key="k", retries=AT_ONCE), seen)
        except errors.SpanwireError as error:
            seen.error = error
            seen.ended(error.reply, error.timeline)
        requests = len(server.requests)
        server.wait_for(lambda s: s.open_connections == 0)
    _check_error(expected["error"], seen.error, requests)
    if "stream" in way:
        assert "".join(seen.pieces) == expected["text"]
    assert seen.timeline is not None
    assert seen.timeline.outcome == expected["outcome"]
    assert_adds_up(seen.timeline)
    if seen.reply is not None:
        _check_reply(expected, seen.reply)
    else:
        assert not expected["text"]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def _check_error(expected: dict[str, Any] | None, error: errors.SpanwireError | None, requests: int) -> None:
    if expected is None:
        assert error is None
        return
    kinds = expected["kind"] if isinstance(expected["kind"], list) else [expected["kind"]]
    assert error is not None
    assert isinstance(error, tuple(KINDS[kind] for kind in kinds))
    for field in ("status", "code"):
        if field in expected:
            assert getattr(error, field) == expected[field]
    assert expected.get("message", "") in str(error)
    assert error.endpoint
    if expected.get("retried") is False:
        assert requests == 1


def _check_reply(expected: dict[str, Any], reply: spanwire.Reply) -> None:
    assert reply.text == expected["text"]
    assert reply.finish_reason == expected["finish_reason"]
    usage = reply.usage
    found = None
    if usage is not None:
        found = {name: getattr(usage, name) for name in ("input_tokens", "output_tokens", "total_tokens")}
    assert found == expected["usage"]

    def parsed(arguments: str) -> Any:
        return json.loads(arguments) if arguments else None

    assert [(call.id, call.name, parsed(call.arguments)) for call in reply.tool_calls] == [
        (call["id"], call["name"], parsed(call["arguments"])) for call in expected["tool_calls"]
    ]
