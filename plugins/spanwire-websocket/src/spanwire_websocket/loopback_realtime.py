"""OpenAI Realtime, scripted: a session, its conversation, sound in and sound out at the same time.

What was committed comes back: an audio answer has the sound that the user said since the last one, with the script's text
as its transcript (a tone, if nothing was said). Speech is told from silence by loudness alone, in the time of the audio,
so that a test never waits; an answer is cancelled when somebody speaks (``interrupt_response``).
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from typing import Any

import msgspec

from spanwire.testing.loopback import Request
from spanwire.testing.responses_events import input_tokens

from .loopback_connection import Gone, Peer
from .loopback_play import as_it_is, frames, play
from .loopback_realtime_events import Answer
from .loopback_speech import BYTES_PER_MS, SpeechDetector

__all__ = ["Realtime"]

_Event = dict[str, Any]

#: Less cannot be committed (OpenAI's server says so in its error), in milliseconds.
_LEAST_MS = 100
_PREFIX_MS = 300
_SILENCE_MS = 500

_ids = count(1)
_encode = msgspec.json.encode


class _Wrong(Exception):
    """An event that cannot be obeyed: becomes an ``error`` event."""

    def __init__(self, code: str, words: str, param: str | None = None) -> None:
        super().__init__(words)
        self.code = code
        self.param = param


class Realtime:
    """One connection. Use: ``await Realtime(peer).run()``."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._number = next(_ids)
        self._events = count(1)
        self._made = count(1)
        self._conversation = f"conv_{self._number:08x}"
        self._items: dict[str, _Event] = {}
        self._buffer = bytearray()
        self._received_ms = 0
        self._speech_item = ""
        self._heard = b""
        self._running: tuple[Request, Answer] | None = None
        self._task: asyncio.Task[None] | None = None
        query = dict(pair.partition("=")[::2] for pair in peer.query.split("&"))
        pcm = {"type": "audio/pcm", "rate": 24_000}
        vad = {
            "type": "server_vad",
            "threshold": 0.5,
            "prefix_padding_ms": _PREFIX_MS,
            "silence_duration_ms": _SILENCE_MS,
            "create_response": True,
            "interrupt_response": True,
        }
        self._session: _Event = {
            "type": "realtime",
            "object": "realtime.session",
            "id": f"sess_{self._number:08x}",
            "model": query.get("model"),
            "output_modalities": ["audio"],
            "instructions": "",
            "tools": [],
            "tool_choice": "auto",
            "max_output_tokens": "inf",
            "audio": {
                "input": {"format": pcm, "transcription": None, "noise_reduction": None, "turn_detection": vad},
                "output": {"format": pcm, "voice": "alloy", "speed": 1.0},
            },
        }
        self._detector = self._new_detector()
        self._handlers: Mapping[str, Callable[[_Event], None]] = {
            "session.update": self._update,
            "input_audio_buffer.append": self._append,
            "input_audio_buffer.commit": self._commit,
            "input_audio_buffer.clear": self._clear,
            "conversation.item.create": self._create_item,
            "conversation.item.delete": self._delete_item,
            "conversation.item.retrieve": self._retrieve_item,
            "conversation.item.truncate": self._truncate_item,
            "response.create": self._create_response,
            "response.cancel": self._cancel_response,
        }

    async def run(self) -> None:
        """Serve until the client or a script ends it. Raises websockets' ConnectionClosed."""
        try:
            self._say({"type": "session.created", "session": self._session})
            while True:
                message = await self._peer.recv(decode=False)
                assert isinstance(message, bytes)
                self._take(message)
        except Gone:
            await self._peer.wait_closed()

    def _take(self, message: bytes) -> None:
        peer = self._peer
        event: Any = None
        try:
            event = msgspec.json.decode(message)
            self._obey(event, message)
        except (msgspec.DecodeError, UnicodeDecodeError):
            peer.book.fault(f"connection {peer.number}: a message that is not JSON")
            self._error(_Wrong("invalid_json", "the message is not JSON"), None)
        except _Wrong as wrong:
            self._error(wrong, event.get("event_id") if isinstance(event, dict) else None)

    def _obey(self, event: Any, message: bytes) -> None:
        if not isinstance(event, dict):
            raise _Wrong("invalid_json", "the message is not a JSON object")
        kind = event.get("type")
        handler = self._handlers.get(kind) if isinstance(kind, str) else None
        if handler is None:
            raise _Wrong("invalid_value", f"there is no event {kind!r:.60}", "type")
        event["raw"] = message
        handler(event)

    # --- saying -----------------------------------------------------------------------------------------------------

    def _bytes(self, event: _Event) -> bytes:
        return _encode({"event_id": f"event_{self._number:04x}_{next(self._events)}", **event})

    def _say(self, *events: _Event) -> None:
        self._peer.push([self._bytes(event) for event in events])

    def _error(self, wrong: _Wrong, event_id: object) -> None:
        error = {
            "type": "invalid_request_error",
            "code": wrong.code,
            "message": str(wrong),
            "param": wrong.param,
            "event_id": event_id if isinstance(event_id, str) else None,
        }
        self._say({"type": "error", "error": error})

    # --- the session ------------------------------------------------------------------------------------------------

    def _update(self, event: _Event) -> None:
        session = event.get("session")
        if not isinstance(session, dict):
            raise _Wrong("missing_required_parameter", "session must be an object", "session")
        before = self._input
        self._session = _merged(self._session, session)
        if self._input != before:
            self._detector = self._new_detector()
        self._say({"type": "session.updated", "session": self._session})

    @property
    def _input(self) -> _Event:
        return _object(_object(self._session.get("audio")).get("input"))

    @property
    def _turns(self) -> _Event:
        """How turns are told apart; empty: by the client."""
        return _object(self._input.get("turn_detection"))

    def _new_detector(self) -> SpeechDetector | None:
        if not self._turns or self._bytes_per_ms("input") != BYTES_PER_MS["audio/pcm"]:
            return None
        silence = self._turns.get("silence_duration_ms")
        return SpeechDetector(silence if isinstance(silence, int) else _SILENCE_MS)

    def _bytes_per_ms(self, direction: str) -> int:
        settings = _object(_object(self._session.get("audio")).get(direction))
        return BYTES_PER_MS.get(_object(settings.get("format")).get("type", ""), BYTES_PER_MS["audio/pcm"])

    # --- what is said to us -----------------------------------------------------------------------------------------

    def _append(self, event: _Event) -> None:
        data = _sound(event.get("audio"), "audio")
        self._buffer += data
        if self._detector is None:
            return
        for begins, at_ms in self._detector.feed(data):
            if begins:
                self._speech_began(at_ms)
            else:
                self._speech_ended(at_ms)

    def _speech_began(self, at_ms: int) -> None:
        self._speech_item = self._new_id()
        start = max(at_ms - int(self._turns.get("prefix_padding_ms") or 0), 0)
        started = {"type": "input_audio_buffer.speech_started", "audio_start_ms": start, "item_id": self._speech_item}
        self._say(started)
        if self._turns.get("interrupt_response", True):
            self._cancel("turn_detected")

    def _speech_ended(self, at_ms: int) -> None:
        stopped = {"type": "input_audio_buffer.speech_stopped", "audio_end_ms": at_ms, "item_id": self._speech_item}
        self._say(stopped)
        self._committed(self._speech_item)
        if self._turns.get("create_response", True) and self._running is None:
            self._respond({}, b'{"type":"response.create"}')

    def _commit(self, _: _Event) -> None:
        if len(self._buffer) < _LEAST_MS * self._bytes_per_ms("input"):
            held = len(self._buffer) / self._bytes_per_ms("input")
            words = f"the buffer has {held:.2f} ms of audio; at least {_LEAST_MS} ms are needed"
            raise _Wrong("input_audio_buffer_commit_empty", words)
        self._committed(self._new_id())

    def _committed(self, id_: str) -> None:
        audio, self._buffer = bytes(self._buffer), bytearray()
        self._heard += audio
        previous = self._last_item()
        self._say({"type": "input_audio_buffer.committed", "previous_item_id": previous, "item_id": id_})
        content = {"type": "input_audio", "transcript": None}
        self._add({"id": id_, "type": "message", "role": "user", "content": [content]})
        if self._input.get("transcription"):
            seconds = len(audio) / self._bytes_per_ms("input") / 1000
            self._say(
                {
                    "type": "conversation.item.input_audio_transcription.completed",
                    "item_id": id_,
                    "content_index": 0,
                    "transcript": f"{seconds:.1f} seconds of sound",
                    "usage": {"type": "duration", "seconds": seconds},
                }
            )

    def _clear(self, _: _Event) -> None:
        self._buffer = bytearray()
        self._say({"type": "input_audio_buffer.cleared"})

    # --- the conversation -------------------------------------------------------------------------------------------

    def _new_id(self) -> str:
        return f"item_user_{self._number:04x}_{next(self._made)}"

    def _last_item(self) -> str | None:
        return next(reversed(self._items), None)

    def _add(self, item: _Event) -> None:
        item = {"object": "realtime.item", "status": "completed", **item}
        previous = self._last_item()
        self._items[item["id"]] = item
        self._say(
            {"type": "conversation.item.added", "previous_item_id": previous, "item": item},
            {"type": "conversation.item.done", "previous_item_id": previous, "item": item},
        )

    def _create_item(self, event: _Event) -> None:
        item = event.get("item")
        if not isinstance(item, dict) or not isinstance(item.get("type"), str):
            raise _Wrong("missing_required_parameter", "item must be an object with a type", "item")
        id_ = item.get("id") or self._new_id()
        if id_ in self._items:
            raise _Wrong("item_already_exists", f"there is an item {id_!r:.80} already", "item.id")
        if item["type"] == "message" and item.get("role") == "user":
            for part in item.get("content") or ():
                if isinstance(part, dict) and isinstance(part.get("audio"), str):
                    self._heard += _sound(part["audio"], "item.content")
        self._add({**item, "id": id_})

    def _known(self, event: _Event) -> str:
        id_ = event.get("item_id")
        if not isinstance(id_, str) or id_ not in self._items:
            raise _Wrong("item_not_found", f"there is no item {id_!r:.80}", "item_id")
        return id_

    def _delete_item(self, event: _Event) -> None:
        id_ = self._known(event)
        del self._items[id_]
        self._say({"type": "conversation.item.deleted", "item_id": id_})

    def _retrieve_item(self, event: _Event) -> None:
        self._say({"type": "conversation.item.retrieved", "item": self._items[self._known(event)]})

    def _truncate_item(self, event: _Event) -> None:
        id_ = self._known(event)
        if self._items[id_].get("role") != "assistant":
            raise _Wrong("invalid_value", "only the assistant's messages can be truncated", "item_id")
        places = {name: event.get(name) for name in ("content_index", "audio_end_ms")}
        self._say({"type": "conversation.item.truncated", "item_id": id_, **places})

    # --- responses --------------------------------------------------------------------------------------------------

    def _create_response(self, event: _Event) -> None:
        if self._running is not None:
            words = "the conversation has a response that is under way"
            raise _Wrong("conversation_already_has_active_response", words)
        self._respond(_object(event.get("response")), event["raw"])

    def _respond(self, asked: _Event, raw: bytes) -> None:
        request = self._peer.arrived(raw, "response.create")
        peer, settings = self._peer, _merged(self._session, asked)
        model = settings.get("model")
        try:
            script = peer.book.script_for(request, model if isinstance(model, str) else None)
        except Exception as error:
            peer.book.fault(f"the script for {request.path} failed: {error!r}")
            peer.ended(request)
            raise _Wrong("server_error", f"the script failed: {error!r}") from error
        heard, self._heard = self._heard, b""
        apart = asked.get("conversation") == "none"
        items = asked.get("input") if apart else list(self._items.values())
        answer = Answer(
            script,
            audio=heard if "audio" in settings["output_modalities"] else None,
            bytes_per_ms=self._bytes_per_ms("output"),
            settings=settings,
            conversation=None if apart else self._conversation,
            after=self._last_item(),
            input_tokens=input_tokens({"instructions": settings.get("instructions"), "input": items}),
        )
        self._running = (request, answer)
        given = frames(script)
        if given is not None:
            playing = partial(play, peer, request, script, given, as_it_is)
        else:
            encode = partial(self._played, answer)
            playing = partial(play, peer, request, script, answer.steps(), encode, truncates=True)
        self._task = peer.answer(request, playing)
        self._task.add_done_callback(lambda _: self._over(answer))

    def _played(self, answer: Answer, event: _Event) -> bytes:
        kind = event["type"]
        if kind in {"conversation.item.added", "conversation.item.done"}:
            self._items[event["item"]["id"]] = event["item"]
        elif kind == "response.done":
            self._over(answer)  # whoever has read this may ask for the next one
        return self._bytes(event)

    def _over(self, answer: Answer) -> None:
        if self._running is not None and self._running[1] is answer:
            self._running = None

    def _cancel_response(self, event: _Event) -> None:
        id_ = event.get("response_id")
        if self._running is None or (id_ is not None and id_ != self._running[1].id):
            raise _Wrong("response_cancel_not_active", "there is no response that is under way")
        self._cancel("client_cancelled")

    def _cancel(self, reason: str) -> None:
        if self._running is None:
            return
        request, answer = self._running
        self._running = None
        task = self._peer.left(request)
        if task is not None:
            task.cancel()
        self._peer.push([self._played(answer, event) for event in answer.cancelled(reason)])


def _sound(audio: object, param: str) -> bytes:
    try:
        if isinstance(audio, str):
            return base64.b64decode(audio, validate=True)
    except (binascii.Error, ValueError):  # ValueError: not ASCII
        pass
    raise _Wrong("invalid_value", "audio must be base64", param)


def _object(value: object) -> _Event:
    return value if isinstance(value, dict) else {}


def _merged(settings: _Event, changes: _Event) -> _Event:
    """``changes`` over ``settings``: objects are merged, anything else replaces."""
    merged = dict(settings)
    for name, value in changes.items():
        old = merged.get(name)
        merged[name] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged
