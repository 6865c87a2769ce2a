"""Realtime over WebSocket, as the loopback server speaks it: by the plain client, and by OpenAI's own SDK."""

from __future__ import annotations

import asyncio
import base64
from array import array
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.realtime import ResponseAudioDeltaEvent, ResponseAudioTranscriptDeltaEvent, ResponseDoneEvent
from spanwire_websocket.loopback_speech import SpeechDetector, tone
from websockets.exceptions import ConnectionClosed

from spanwire.calls import Usage
from spanwire.testing import LoopbackServer, Script, ScriptedTool
from tests.plugins.websocket.plain import Plain, kinds, text_of

#: PCM16 at 24 kHz.
SILENCE = bytes(48)
TEXT: dict[str, Any] = {"type": "realtime", "output_modalities": ["text"]}
MANUAL: dict[str, Any] = {"type": "realtime", "audio": {"input": {"turn_detection": None}}}


class Session(Plain):
    """A connection whose session is made."""

    def __init__(self, server: LoopbackServer, session: dict[str, Any] | None = None) -> None:
        super().__init__(server, "/v1/realtime?model=rt")
        self.created = self.event()
        assert self.created["type"] == "session.created"
        if session is not None:
            self.send("session.update", session=session)
            self.updated = self.event()
            assert self.updated["type"] == "session.updated"

    def append(self, audio: bytes) -> None:
        self.send("input_audio_buffer.append", audio=base64.b64encode(audio).decode())

    def wrong(self, type: str, **fields: Any) -> dict[str, Any]:
        """The error that an event is answered with."""
        self.send(type, event_id="mine", **fields)
        event = self.event()
        assert event["type"] == "error"
        assert event["error"]["event_id"] == "mine"
        error: dict[str, Any] = event["error"]
        return error


def serving(*scripts: Any) -> LoopbackServer:
    return LoopbackServer([*scripts], part="websocket")


def sound(events: list[dict[str, Any]]) -> bytes:
    return b"".join(base64.b64decode(e["delta"]) for e in events if e["type"] == "response.output_audio.delta")


def message(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}], **more}


# --- answers ----------------------------------------------------------------------------------------------------------


def test_a_text_answer_has_its_events_in_order() -> None:
    with serving(Script.say("Hello there", usage=Usage(3, 2, 5))) as server, Session(server, TEXT) as client:
        client.send("conversation.item.create", item=message("hi"))
        assert kinds(client.until("conversation.item.done")) == ["conversation.item.added", "conversation.item.done"]
        client.send("response.create")
        events = client.answer()
        assert kinds(events) == [
            "created",
            "rate_limits.updated",
            "output_item.added",
            "conversation.item.added",
            "content_part.added",
            "output_text.delta",
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "conversation.item.done",
            "done",
        ]
        assert text_of(events) == "Hello there"
        response = events[-1]["response"]
        assert response["status"] == "completed"
        assert response["output"][0]["content"] == [{"type": "output_text", "text": "Hello there"}]
        assert response["usage"]["total_tokens"] == 5
        ids = [event["event_id"] for event in events]
        assert len(set(ids)) == len(ids)
        assert server.requests[0].query == "model=rt"
        assert server.requests[0].ended
    assert server.faults == []


def test_an_audio_answer_has_the_text_as_its_transcript() -> None:
    with serving(Script.say("one two three")) as server, Session(server) as client:
        client.send("response.create")
        events = client.answer()
    assert text_of(events, "output_audio_transcript") == "one two three"
    assert sound(events) == tone(100) * 3
    kinds_ = kinds(events)
    assert kinds_.index("output_audio.done") < kinds_.index("output_audio_transcript.done")
    assert events[-1]["response"]["output"][0]["content"] == [{"type": "output_audio", "transcript": "one two three"}]


def test_what_was_committed_comes_back_while_more_is_sent() -> None:
    script = Script.say("you said", gap_s=0.01)
    with serving(script) as server, Session(server, MANUAL) as client:
        said = tone(730)
        client.append(said[:5001])
        client.append(said[5001:])
        client.send("input_audio_buffer.commit")
        client.until("conversation.item.done")
        client.send("response.create")
        events = client.until("response.output_audio.delta")
        client.append(tone(200))  # while it speaks
        client.send("input_audio_buffer.commit")
        events += client.answer()
        assert sound(events) == said
        assert text_of(events, "output_audio_transcript") == "you said"
        at = [event["type"] for event in events]
        assert at.index("input_audio_buffer.committed") < at.index("response.done")
        client.send("response.create")
        assert sound(client.answer()) == tone(200)


def test_tools_and_ends() -> None:
    tool = ScriptedTool("look", ['{"a"', ":1}"], id="call_7")
    scripts = [
        Script(tokens=["a"], tool_calls=[tool]),
        Script.say("a b", finish_reason="length"),
        Script(status=429),
        Script(finish_reason="error"),
    ]
    with serving(*scripts) as server, Session(server, TEXT) as client:
        client.send("response.create")
        events = client.answer()
        assert text_of(events, "function_call_arguments") == '{"a":1}'
        assert [item["type"] for item in events[-1]["response"]["output"]] == ["message", "function_call"]
        ends = []
        for _ in range(3):
            client.send("response.create")
            ends.append(client.answer()[-1]["response"])
        assert [end["status"] for end in ends] == ["incomplete", "failed", "failed"]
        assert ends[0]["status_details"]["reason"] == "max_output_tokens"
        assert ends[1]["status_details"]["error"]["code"] == "rate_limit_exceeded"


def test_an_answer_that_is_no_part_of_the_conversation() -> None:
    with serving(Script.say("a")) as server, Session(server, TEXT) as client:
        client.send(
            "response.create", response={"conversation": "none", "input": [message("x")], "metadata": {"k": "v"}}
        )
        events = client.answer()
        assert "conversation.item.added" not in kinds(events)
        assert events[-1]["response"]["conversation_id"] is None
        assert events[-1]["response"]["metadata"] == {"k": "v"}


def test_cuts_are_scripted_as_for_any_answer() -> None:
    with serving(Script.say("a b c", drop_after=3, drop_mode=1012)) as server, Session(server, TEXT) as client:
        client.send("response.create")
        client.until("response.output_text.delta")
        assert client.event()["delta"] == " b"
        with pytest.raises(ConnectionClosed) as caught:
            client.event()
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 1012
        assert server.requests[0].dropped_ns


# --- interruptions ----------------------------------------------------------------------------------------------------


def test_a_response_may_be_cancelled() -> None:
    with serving(Script.say("a b c", hang_after=2), Script.say("again")) as server, Session(server, TEXT) as client:
        client.send("response.create")
        client.until("response.output_text.delta")
        client.send("response.cancel")
        events = client.answer()
        assert kinds(events) == [
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "conversation.item.done",
            "done",
        ]
        response = events[-1]["response"]
        assert (response["status"], response["status_details"]["reason"]) == ("cancelled", "client_cancelled")
        assert response["output"][0]["status"] == "incomplete"
        assert response["output"][0]["content"][0]["text"] == "a"
        assert server.requests[0].left
        client.send("response.create")
        assert text_of(client.answer()) == "again"


def test_a_response_may_be_cancelled_before_it_says_anything() -> None:
    with serving(Script(hang_after="request")) as server, Session(server, TEXT) as client:
        client.send("response.create")
        client.send("response.cancel")
        assert kinds(client.answer()) == ["created", "done"]


def test_speech_begins_a_turn_and_interrupts_the_last_one() -> None:
    with serving(Script.say("a b", hang_after=2), Script.say("c")) as server, Session(server) as client:
        client.append(SILENCE * 200 + tone(300) + SILENCE * 600)
        events = client.until("response.output_audio.delta")
        assert kinds(events)[:5] == [
            "input_audio_buffer.speech_started",
            "input_audio_buffer.speech_stopped",
            "input_audio_buffer.committed",
            "conversation.item.added",
            "conversation.item.done",
        ]
        assert events[0]["audio_start_ms"] == 0  # 200, less the padding
        assert events[1]["audio_end_ms"] == 1000
        assert events[0]["item_id"] == events[2]["item_id"] == events[3]["item"]["id"]
        client.append(tone(100))  # barge in
        events = client.answer()
        assert kinds(events)[0] == "input_audio_buffer.speech_started"
        assert events[-1]["response"]["status_details"]["reason"] == "turn_detected"
        client.append(SILENCE * 600)
        assert text_of(client.answer(), "output_audio_transcript") == "c"
        assert [(r.left, r.ended) for r in server.requests] == [(True, False), (False, True)]


def test_speech_may_leave_the_answers_to_the_client() -> None:
    turns = {"type": "server_vad", "silence_duration_ms": 100, "create_response": False}
    session = {"type": "realtime", "audio": {"input": {"turn_detection": turns, "transcription": {"model": "x"}}}}
    with serving(Script.say("a")) as server, Session(server, session) as client:
        client.append(tone(100) + SILENCE * 200)
        kind = "conversation.item.input_audio_transcription.completed"
        assert client.until(kind)[-1]["usage"]["seconds"] == pytest.approx(0.3)
        client.send("response.create")
        assert client.event()["type"] == "response.created"


# --- session and conversation -----------------------------------------------------------------------------------------


def test_the_session_is_merged() -> None:
    with serving() as server, Session(server, MANUAL) as client:
        assert client.created["session"]["model"] == "rt"
        updated = client.updated["session"]
        assert updated["audio"]["input"]["turn_detection"] is None
        assert updated["audio"]["input"]["format"] == {"type": "audio/pcm", "rate": 24_000}
        assert updated["id"] == client.created["session"]["id"]


def test_items_are_kept_and_can_be_asked_for() -> None:
    with serving(Script.say("a b")) as server, Session(server, TEXT) as client:
        client.send("conversation.item.create", item=message("hi", id="one"))
        client.until("conversation.item.done")
        client.send("conversation.item.create", item=message("hi", id="two"))
        assert client.until("conversation.item.done")[0]["previous_item_id"] == "one"
        client.send("conversation.item.retrieve", item_id="one")
        assert client.event()["item"]["content"][0]["text"] == "hi"
        client.send("conversation.item.delete", item_id="one")
        assert client.event() | {"event_id": ""} == {
            "type": "conversation.item.deleted",
            "item_id": "one",
            "event_id": "",
        }
        client.send("response.create")
        made = client.answer()[-1]["response"]["output"][0]["id"]
        client.send("conversation.item.truncate", item_id=made, content_index=0, audio_end_ms=10)
        assert client.event()["type"] == "conversation.item.truncated"


def test_the_buffer_can_be_cleared() -> None:
    with serving() as server, Session(server, MANUAL) as client:
        client.append(tone(200))
        client.send("input_audio_buffer.clear")
        assert client.event()["type"] == "input_audio_buffer.cleared"
        assert client.wrong("input_audio_buffer.commit")["code"] == "input_audio_buffer_commit_empty"


def test_mistakes_are_errors_that_name_the_event() -> None:
    with serving(Script(hang_after="request")) as server, Session(server, TEXT) as client:
        assert client.wrong("response.cancel")["code"] == "response_cancel_not_active"
        assert client.wrong("no.such.event")["code"] == "invalid_value"
        assert client.wrong("session.update")["code"] == "missing_required_parameter"
        assert client.wrong("input_audio_buffer.append", audio="%%%")["param"] == "audio"
        assert client.wrong("input_audio_buffer.append")["param"] == "audio"
        assert client.wrong("conversation.item.delete", item_id="x")["code"] == "item_not_found"
        assert client.wrong("conversation.item.create")["param"] == "item"
        client.send("conversation.item.create", item=message("hi", id="one"))
        client.until("conversation.item.done")
        assert client.wrong("conversation.item.create", item=message("hi", id="one"))["code"] == "item_already_exists"
        assert client.wrong("conversation.item.truncate", item_id="one")["param"] == "item_id"
        client.send("response.create")
        assert client.wrong("response.create")["code"] == "conversation_already_has_active_response"
        for bad in ("no JSON", "3"):
            client.ws.send(bad)
            assert client.event()["error"]["code"] == "invalid_json"


# --- speech -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 3000), max_size=30), st.integers(0, 60), st.integers(2, 60))
def test_speech_is_found_however_it_is_cut(sizes: list[int], before: int, spoken: int) -> None:
    audio = SILENCE * 10 * before + tone(10 * spoken) + SILENCE * 200
    detector, at = SpeechDetector(100), 0
    found: list[tuple[bool, int]] = []
    for size in [*sizes, len(audio)]:
        found += detector.feed(audio[at : at + size])
        at += size
    assert found == [(True, 10 * before), (False, 10 * (before + spoken) + 100)]


def test_tones_join_without_a_click() -> None:
    assert tone(100) + tone(100) == tone(200)
    assert len(tone(7)) == 7 * 48
    assert max(array("h", tone(100))) < 2**15


# --- raw --------------------------------------------------------------------------------------------------------------


def test_an_echo_keeps_text_text_and_bytes_bytes() -> None:
    with serving() as server, Plain(server, "/raw") as client:
        for sent in ("text", b"\x00\xff", "", b""):
            client.ws.send(sent)
            assert client.ws.recv(timeout=5) == sent
        assert [request.raw for request in server.requests] == [b"text", b"\x00\xff", b"", b""]


def test_an_echo_is_late_and_in_order() -> None:
    with serving(Script(queue_s=0.05), Script()) as server, Plain(server, "/raw") as client:
        client.ws.send("one")
        client.ws.send(b"two")
        assert [client.ws.recv(timeout=5), client.ws.recv(timeout=5)] == ["one", b"two"]
        first = server.requests[0]
        assert first.content_ns is not None
        assert first.content_ns - first.arrived_ns >= 49_000_000


def test_an_echo_may_be_scripted() -> None:
    scripts = [Script(writes=[b"a", b"b"], write_gap_s=0.001), Script(drop_after="request", drop_mode=1013)]
    with serving(*scripts) as server, Plain(server, "/raw") as client:
        client.ws.send("x")
        assert [client.ws.recv(timeout=5), client.ws.recv(timeout=5)] == ["a", "b"]
        client.ws.send("x")
        with pytest.raises(ConnectionClosed) as caught:
            client.ws.recv(timeout=5)
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 1013


# --- OpenAI's SDK -----------------------------------------------------------------------------------------------------


def test_the_sdk_understands_a_spoken_turn() -> None:
    async def body(server: LoopbackServer) -> None:
        client = openai.AsyncOpenAI(api_key="sk-test", websocket_base_url=server.url)
        options: Any = {"proxy": None}
        async with client, client.realtime.connect(model="rt", websocket_connection_options=options) as connection:
            session: Any = MANUAL
            await connection.session.update(session=session)
            await connection.input_audio_buffer.append(audio=base64.b64encode(tone(250)).decode())
            await connection.input_audio_buffer.commit()
            await connection.response.create()
            heard, words = b"", ""
            async for event in connection:
                if isinstance(event, ResponseAudioDeltaEvent):
                    heard += base64.b64decode(event.delta)
                elif isinstance(event, ResponseAudioTranscriptDeltaEvent):
                    words += event.delta
                elif isinstance(event, ResponseDoneEvent):
                    assert event.response.status == "completed"
                    break
                assert type(event).__module__.startswith("openai.types.realtime"), event
            assert (heard, words) == (tone(250), "I hear you")

    with serving(Script.say("I hear you")) as server:
        asyncio.run(body(server))
        assert server.faults == []
