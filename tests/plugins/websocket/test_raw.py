"""Sessions of no schema: text, bytes and JSON as they are."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from spanwire_websocket.raw import Raw
from websockets.asyncio.server import ServerConnection

import spanwire
from spanwire.manager import ConnectionManager
from spanwire.testing import Script
from tests.core.telemetry.heard import Heard
from tests.plugins.websocket.session_server import handled, nothing_is_left, raw
from tests.support import run, serving


def test_text_bytes_and_json_come_back_as_they_are(heard: Heard) -> None:
    with serving(part="websocket") as server:

        async def main() -> None:
            async with ConnectionManager(telemetry=heard.telemetry()) as manager:
                async with manager.session(raw(server.url.removesuffix("/v1") + "/raw")) as session:
                    for sent, type_, came, binary in (
                        ("words, é", "", "words, é".encode(), False),
                        (b"\x00\xff", "", b"\x00\xff", True),
                        (bytearray(b"ab"), "", b"ab", True),
                        (memoryview(b"cd"), "", b"cd", True),
                        ({"type": "a.b", "x": 1}, "a.b", b'{"type":"a.b","x":1}', False),
                        ({"type": 7}, "", b'{"type":7}', False),
                        ("{not json", "", b"{not json", False),
                        ("", "", b"", False),
                        (b"", "", b"", True),
                    ):
                        await session.send(sent)  # type: ignore[arg-type]
                        event = await anext(session)
                        assert (event.type, event.raw, event.binary) == (type_, came, binary)
                        assert (event.text, event.audio) == ("", b"")
                    await session.send({"a": [1, 2]})
                    assert (await anext(session)).data == {"a": [1, 2]}
                    assert session.turns == []

        run(main)
    # Nothing is known of turns, and a session is none.
    assert {span.name for span in heard.spans()} <= {
        "spanwire.connection_setup",
        "dns",
        "tcp",
        "upgrade",
    }


def test_a_stream_of_messages_overlaps_with_its_answers() -> None:
    """Nobody waits for an answer before the next message: a thousand are on their way at once."""
    with serving(Script(headers_s=0.05), part="websocket") as server:

        async def main() -> None:
            async with ConnectionManager() as manager:
                async with manager.session(raw(server.url.removesuffix("/v1") + "/raw")) as session:
                    for number in range(1000):
                        await session.send(number.to_bytes(2, "big"))
                    got = [int.from_bytes((await anext(session)).raw, "big") for _ in range(1000)]
                    assert got == list(range(1000))

        run(main)


@given(st.binary(max_size=60) | st.text(max_size=20).map(str.encode))
def test_whatever_comes_is_an_event(data: bytes) -> None:
    schema = Raw().schema(lambda _turn: None, lambda: None)
    assert schema.event(data, True, 1).raw == data
    assert schema.event(data, False, 1).binary


def test_the_path_is_the_endpoints() -> None:
    assert Raw().path("/environments/production/websocket") == "/environments/production/websocket"
    assert Raw().path("") == "/"


def profile() -> dict[str, Any]:
    """The names of the block of docs/sessions.md that has vLLM's profile."""
    page = (Path(__file__).parents[3] / "docs/sessions.md").read_text("utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(next(block for block in blocks if "async def transcribe" in block), names)
    return names


async def vllm(socket: ServerConnection) -> None:
    """A server of a few lines, after vllm/entrypoints/.../realtime: not OpenAI's schema, whatever its names."""
    audio, model, began = b"", None, False
    await socket.send(json.dumps({"type": "session.created", "id": "sess_1", "created": 1}))
    async for message in socket:
        event = json.loads(message)
        if event["type"] == "session.update":
            model = event["model"]
        elif event["type"] == "input_audio_buffer.append":
            audio += base64.b64decode(event["audio"])
        elif model != "whisper":
            await socket.send('{"type":"error","error":"no such model","code":"model_not_found"}')
        elif not event["final"]:
            began = True
        else:
            assert began
            await socket.send(json.dumps({"type": "transcription.delta", "delta": f"{len(audio)} "}))
            await socket.send('{"type":"transcription.delta","delta":"bytes"}')
            await socket.send('{"type":"transcription.done","text":"","usage":{}}')


def test_the_profile_of_vllms_realtime_transcription() -> None:
    async def main() -> None:
        transcribe = profile()["transcribe"]
        async with handled(vllm) as (url, _), ConnectionManager() as manager:
            assert [piece async for piece in transcribe(manager, raw(url), "whisper", bytes(8000))] == [
                "8000 ",
                "bytes",
            ]
            with pytest.raises(RuntimeError, match=r"no such model \(model_not_found\)"):
                await anext(transcribe(manager, raw(url), "other", b""))
            await nothing_is_left(manager)

    run(main)


def test_deflate_subprotocols_and_headers() -> None:
    seen: list[tuple[str | None, str | None, bool]] = []

    async def handler(socket: ServerConnection) -> None:
        assert socket.request is not None
        extensions = bool(socket.protocol.extensions)
        seen.append((socket.subprotocol, socket.request.headers.get("x-deployment"), extensions))
        async for message in socket:
            await socket.send(message)

    async def main() -> None:
        settings: dict[str, Any] = {"compression": "deflate", "subprotocols": ["v2", "v1"]}
        async with handled(handler, **settings) as (url, _), ConnectionManager() as manager:
            endpoint = raw(
                url, headers={"x-deployment": "d"}, options={"compression": True, "subprotocols": ["v1", "v2"]}
            )
            async with manager.session(endpoint) as session:
                for message in ("same " * 10_000, "same " * 10_000):
                    await session.send(message)
                    assert (await anext(session)).raw == message.encode()

    run(main)
    assert [row[1:] for row in seen] == [("d", True)]
    assert seen[0][0] in {"v1", "v2"}


def test_an_event_shows_no_content() -> None:
    event = spanwire.SessionEvent("a", text="secret", raw=b"secret")
    assert "secret" not in repr(event)
    assert event.data is None
    assert spanwire.SessionEvent(raw=msgspec.json.encode({"a": 1})).data == {"a": 1}
