"""Sessions of no schema: text, bytes and JSON as they are."""

from __future__ import annotations

import base64
import json

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from spanwire_websocket.raw import Raw
from websockets.asyncio.server import ServerConnection

import spanwire
from spanwire.manager import ConnectionManager
from spanwire.testing import Script
from tests.core.telemetry.heard import Heard
from tests.plugins.websocket.session_server import handled, raw
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


def test_vllms_realtime_transcription() -> None:
    """Not OpenAI's schema: 16 kHz, a model at the top, an error that is a text, a commit that begins and one that ends.

    The server is one of a few lines, after vllm/entrypoints/.../realtime; the client is the profile of docs/sessions.md.
    """
    said = bytes(range(256)) * 25  # 0.2 s at 16 kHz

    async def handler(socket: ServerConnection) -> None:
        audio, model = b"", None
        await socket.send(json.dumps({"type": "session.created", "id": "sess_1", "created": 1}))
        async for message in socket:
            event = json.loads(message)
            if event["type"] == "session.update":
                model = event["model"]
            elif event["type"] == "input_audio_buffer.append":
                audio += base64.b64decode(event["audio"])
            elif model is None:
                await socket.send('{"type":"error","error":"no model","code":"model_not_set"}')
            elif event.get("final"):
                usage = {"total_tokens": len(audio)}
                await socket.send('{"type":"transcription.delta","delta":"hel"}')
                await socket.send('{"type":"transcription.delta","delta":"lo"}')
                await socket.send(json.dumps({"type": "transcription.done", "text": "hello", "usage": usage}))

    async def main() -> None:
        async with handled(handler) as (url, _), ConnectionManager() as manager:
            async with manager.session(raw(url)) as session:
                assert (await anext(session)).type == "session.created"
                await session.send({"type": "input_audio_buffer.commit", "final": False})
                assert (await anext(session)).data["error"] == "no model"
                await session.send({"type": "session.update", "model": "whisper"})
                await session.send({"type": "input_audio_buffer.commit", "final": False})
                for start in range(0, len(said), 640):
                    audio = base64.b64encode(said[start : start + 640]).decode()
                    await session.send({"type": "input_audio_buffer.append", "audio": audio})
                await session.send({"type": "input_audio_buffer.commit", "final": True})
                text = ""
                async for event in session:
                    text += event.data.get("delta", "")
                    if event.type == "transcription.done":
                        break
                assert text == event.data["text"] == "hello"
                assert event.data["usage"] == {"total_tokens": len(said)}

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
        settings = {"compression": "deflate", "subprotocols": ["v2", "v1"]}
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
