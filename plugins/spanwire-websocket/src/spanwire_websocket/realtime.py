"""``dialect="realtime"``: OpenAI's Realtime API. Text and audio both ways, its turns as spans, and what a voice client needs:
PCM16 in frames, and barge-in.

Source of the schema: the types of the ``openai`` package, ``openai/types/realtime``.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from spanwire.calls import SessionEvent, Usage
from spanwire.errors import ServerError, SpanwireError
from spanwire.transport import Turn
from spanwire.wire.openai_responses import response_error

__all__ = [
    "SAMPLE_RATE_HZ",
    "Playback",
    "Realtime",
    "append_audio",
    "cancel",
    "commit_audio",
    "create_response",
    "frames",
    "truncate",
    "user_text",
]

#: PCM16, mono, little-endian: the only rate of ``audio/pcm``.
SAMPLE_RATE_HZ = 24_000
_BYTES_PER_SAMPLE = 2
_TEXT = frozenset(
    {
        "response.output_text.delta",
        "response.output_audio_transcript.delta",
        "response.function_call_arguments.delta",
        "conversation.item.input_audio_transcription.delta",
    }
)
_AUDIO = "response.output_audio.delta"
#: Names that servers of the first version of the schema still use.
_OLD_TEXT = frozenset({"response.text.delta", "response.audio_transcript.delta"})
_OLD_AUDIO = "response.audio.delta"
_OUTPUT = "response."
#: A server that finds by itself that the user has ended answers without being asked.
_HEARD = frozenset({"input_audio_buffer.speech_stopped", "input_audio_buffer.committed"})


# --- what a client sends ----------------------------------------------------------------------------------------------


def append_audio(pcm: bytes) -> str:
    """The event that sends samples: PCM16, mono, little-endian, 24 kHz; any number of bytes."""
    return f'{{"type":"input_audio_buffer.append","audio":"{base64.b64encode(pcm).decode()}"}}'


def commit_audio() -> dict[str, Any]:
    """The samples so far are one message of the user. Not needed where the server detects turns."""
    return {"type": "input_audio_buffer.commit"}


def user_text(text: str) -> dict[str, Any]:
    """A message of the user in words."""
    content = [{"type": "input_text", "text": text}]
    return {"type": "conversation.item.create", "item": {"type": "message", "role": "user", "content": content}}


def create_response(**settings: Any) -> dict[str, Any]:
    """Ask for an answer; ``settings`` of this response, such as ``output_modalities=["text"]``."""
    return {"type": "response.create", **({"response": settings} if settings else {})}


def cancel(response_id: str | None = None) -> dict[str, Any]:
    """Stop the answer that is under way."""
    return {"type": "response.cancel", **({"response_id": response_id} if response_id else {})}


def truncate(item_id: str, audio_end_ms: int, *, content_index: int = 0) -> dict[str, Any]:
    """Tell the server how much of an answer was heard: it forgets the rest."""
    return {
        "type": "conversation.item.truncate",
        "item_id": item_id,
        "content_index": content_index,
        "audio_end_ms": audio_end_ms,
    }


def frames(pcm: bytes, ms: int = 20, *, rate_hz: int = SAMPLE_RATE_HZ) -> Iterator[bytes]:
    """Cut samples into frames of ``ms`` milliseconds; the last one may be shorter.

    Raises:
        ValueError: not whole samples of 16 bits, or frames of no length.
    """
    if len(pcm) % _BYTES_PER_SAMPLE:
        raise ValueError(f"{len(pcm)} bytes are no whole samples of 16 bits")
    size = rate_hz * ms // 1000 * _BYTES_PER_SAMPLE
    if size <= 0:
        raise ValueError(f"frames of {ms} ms hold no sample")
    for at in range(0, len(pcm), size):
        yield pcm[at : at + size]


class Playback:
    """What of the answer has come, and what of it was played: so that an interruption can say how much was heard.

    ::

        playback = Playback()
        async for event in session:
            playback.received(event)
            if event.audio:
                speaker.play(event.audio)  # and, as it plays: playback.played(len(samples))
            if event.type == "input_audio_buffer.speech_started":
                for message in playback.interrupt():
                    await session.send(message)
    """

    def __init__(self, *, rate_hz: int = SAMPLE_RATE_HZ) -> None:
        self._bytes_per_s = rate_hz * _BYTES_PER_SAMPLE
        self._item: str | None = None
        self._index = 0
        self._response: str | None = None
        self._came = 0
        self._played = 0

    def received(self, event: SessionEvent) -> None:
        """Tell it of each event."""
        if event.type in (_AUDIO, _OLD_AUDIO):
            found = _decode_named(event.raw)
            if found.item_id != self._item:
                self._item, self._came, self._played = found.item_id, 0, 0
            self._index = found.content_index or 0
            self._came += len(event.audio)
        elif event.type == "response.created":
            response = _decode_named(event.raw).response
            self._response = response.id if response is not None else None
        elif event.type == "response.done":
            self._response = None

    def played(self, size: int) -> None:
        """So many bytes of samples have left the speaker."""
        self._played += size

    @property
    def played_ms(self) -> int:
        """How much of the present item was heard: never more than what has come."""
        return min(self._played, self._came) * 1000 // self._bytes_per_s

    def interrupt(self) -> list[dict[str, Any]]:
        """The events that stop the answer, and cut it to what was heard; none if there is nothing to stop."""
        messages: list[dict[str, Any]] = []
        if self._response is not None:
            messages.append(cancel(self._response))
            self._response = None
        if self._item is not None and self._played < self._came:
            messages.append(truncate(self._item, self.played_ms, content_index=self._index))
        self._item, self._came, self._played = None, 0, 0
        return messages


# --- what comes -------------------------------------------------------------------------------------------------------


class _Response(msgspec.Struct, gc=False):
    id: str | None = None
    status: str | None = None
    status_details: Any = None
    usage: Any = None


class _Event(msgspec.Struct, gc=False):
    type: str = ""
    delta: str | None = None
    response_id: str | None = None
    item_id: str | None = None
    content_index: int | None = None
    response: _Response | None = None


_decode_event = msgspec.json.Decoder(_Event).decode
_NONE = _Event()


def _decode_named(raw: bytes | bytearray) -> _Event:
    try:
        return _decode_event(raw)
    except (msgspec.DecodeError, RecursionError):
        return _NONE


class Realtime:
    """The path is ``/realtime`` below the endpoint's base URL; ``manager.session(..., model=)`` names the model."""

    def path(self, base: str) -> str:
        return base if base.endswith("/realtime") else f"{base}/realtime"

    def schema(self, on_turn: Callable[[Turn], None], rtt_ns: Callable[[], int | None]) -> RealtimeSchema:
        return RealtimeSchema(on_turn, rtt_ns)


class RealtimeSchema:
    """One session. A turn begins with ``response.create``, or, where the server detects turns, when it has heard the user's
    end; it ends with ``response.done``."""

    def __init__(self, on_turn: Callable[[Turn], None], rtt_ns: Callable[[], int | None]) -> None:
        self._on_turn = on_turn
        self._rtt_ns = rtt_ns
        self._asked_ns: list[int] = []
        self._heard_ns = 0
        self._turns: dict[str, Turn] = {}

    def event(self, data: bytes | bytearray, text: bool, arrival_ns: int) -> SessionEvent:
        raw = bytes(data)
        if not text:
            return SessionEvent(raw=raw, binary=True)
        found = _decode_named(raw)
        name = found.type
        delta = found.delta
        if delta:
            self._piece(found, arrival_ns)
            if name in (_AUDIO, _OLD_AUDIO):
                return SessionEvent(name, "", _samples(delta), raw)
            return SessionEvent(name, delta if name in _TEXT or name in _OLD_TEXT else "", b"", raw)
        if name == "response.created":
            self._created(found, arrival_ns)
        elif name == "response.done":
            self._done(found, raw, arrival_ns)
        elif name in _HEARD:
            self._heard_ns = arrival_ns
        elif name == "error" and self._asked_ns and not self._turns:
            self._refused(raw, arrival_ns)
        return SessionEvent(name, "", b"", raw)

    def sent(self, message: Mapping[str, Any] | str | bytes, at_ns: int) -> None:
        if isinstance(message, Mapping):
            asks = message.get("type") == "response.create"
        else:
            asks = isinstance(message, str) and '"response.create"' in message[:4096] and _names_create(message)
        if asks:
            self._asked_ns.append(at_ns)

    def ended(self, at_ns: int, error: SpanwireError | None) -> None:
        turns, self._turns = list(self._turns.values()), {}
        for turn in turns:
            turn.outcome = "closed_by_caller" if error is None else "error"
            turn.error = error
            self._end(turn, at_ns)

    def _created(self, found: _Event, at_ns: int) -> None:
        response = found.response
        if response is None or response.id is None:
            return
        asked = bool(self._asked_ns)
        begin_ns = self._asked_ns.pop(0) if asked else self._heard_ns or at_ns
        self._heard_ns = 0
        turn = Turn(begin_ns)
        turn.head.id = response.id
        turn.head.streamed = True
        turn.marks.sent_ns = begin_ns
        turn.marks.first_byte_ns = turn.marks.last_byte_ns = at_ns
        # Of a turn that the server began by itself both moments were seen here, each one way late: no round trip is in it.
        turn.marks.rtt_ns = self._rtt_ns() if asked else 0
        self._turns[response.id] = turn

    def _piece(self, found: _Event, at_ns: int) -> None:
        turn = self._turns.get(found.response_id or "")
        if turn is not None and found.type.startswith(_OUTPUT):
            marks = turn.marks
            if not marks.first_content_ns:
                marks.first_chunk_ns = marks.first_content_ns = at_ns
            marks.last_chunk_ns = marks.last_byte_ns = at_ns

    def _done(self, found: _Event, raw: bytes, at_ns: int) -> None:
        response = found.response
        turn = self._turns.pop(response.id or "", None) if response is not None else None
        if turn is None or response is None:
            return
        marks = turn.marks
        marks.last_byte_ns = marks.ended_ns = at_ns
        turn.head.usage = _usage(response.usage)
        turn.head.late_events = (raw,)
        turn.finish_reason = {"completed": "stop", "incomplete": "length"}.get(response.status or "")
        if response.status == "cancelled":
            turn.outcome = "cancelled"
        elif response.status == "failed":
            turn.outcome = "error"
            turn.error = _failure(response)
        self._end(turn, at_ns)

    def _refused(self, raw: bytes, at_ns: int) -> None:
        turn = Turn(self._asked_ns.pop(0))
        turn.marks.sent_ns = turn.begin_ns
        turn.marks.first_byte_ns = turn.marks.last_byte_ns = at_ns
        turn.marks.rtt_ns = self._rtt_ns()
        turn.outcome = "error"
        turn.error = response_error(raw)
        self._end(turn, at_ns)

    def _end(self, turn: Turn, at_ns: int) -> None:
        turn.end_ns = max(at_ns, turn.begin_ns)
        self._on_turn(turn)


def _names_create(message: str) -> bool:
    return _decode_named(message.encode()).type == "response.create"


def _samples(delta: str) -> bytes:
    try:
        return base64.b64decode(delta)
    except (binascii.Error, ValueError):
        return b""


def _failure(response: _Response) -> ServerError:
    details = response.status_details
    inner = details.get("error") if isinstance(details, Mapping) else None
    found: Mapping[str, Any] = inner if isinstance(inner, Mapping) else {}
    code, message = found.get("code") or found.get("type"), found.get("message")
    return ServerError(
        str(message or "the server says that the response failed")[:200], code=code if isinstance(code, str) else None
    )


def _usage(given: Any) -> Usage | None:
    if not isinstance(given, Mapping):
        return None
    counts = [given.get(name) for name in ("input_tokens", "output_tokens", "total_tokens")]
    numbers: Sequence[int | None] = [
        count if isinstance(count, int) and not isinstance(count, bool) else None for count in counts
    ]
    if all(number is None for number in numbers):
        return None
    details = given.get("input_token_details")
    cached = details.get("cached_tokens") if isinstance(details, Mapping) else None
    return Usage(
        input_tokens=numbers[0],
        output_tokens=numbers[1],
        total_tokens=numbers[2],
        cached_tokens=cached if isinstance(cached, int) else None,
    )
