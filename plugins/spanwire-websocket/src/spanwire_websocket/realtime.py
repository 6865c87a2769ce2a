"""``dialect="realtime"``: OpenAI's Realtime API. Text and audio both ways, its turns as spans, and what a voice client needs:
PCM16 in frames, and barge-in.

Source of the schema: the types of the ``openai`` package, ``openai/types/realtime``.
"""

from __future__ import annotations

import base64
import binascii
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from spanwire.calls import SessionEvent, Usage
from spanwire.errors import CallTimeout, ServerError, SpanwireError
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
#: Codes of errors that are about other events than ``response.create``; it may have been sent meanwhile.
_NOT_OF_CREATE = ("response_cancel", "input_audio_buffer", "item_")
#: The code for a ``response.create`` while a response is under way.
_BUSY = "conversation_already_has_active_response"


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
    """What of the answers has come, and what of it was played: so that an interruption can say how much was heard.

    ::

        playback = Playback()
        async for event in session:
            if playback.received(event):
                speaker.play(event.audio)  # and, as it plays: playback.played(len(samples))
            if event.type == "input_audio_buffer.speech_started":
                for message in playback.interrupt(server_cancels=True):
                    await session.send(message)

    Answers come faster than they are heard: the next one may be here while the one before is still played.
    """

    def __init__(self, *, rate_hz: int = SAMPLE_RATE_HZ) -> None:
        self._bytes_per_s = rate_hz * _BYTES_PER_SAMPLE
        self._parts: deque[_Part] = deque()
        self._response: str | None = None
        self._stopped: set[str] = set()  # what was interrupted: responses and items

    def received(self, event: SessionEvent) -> bool:
        """Tell it of each event.

        Returns:
            Whether it has sound to be played. What still comes of an interrupted answer, which the server has made before
            it knew, is not: nobody will hear it, and it counts for nothing.
        """
        if event.type in (_AUDIO, _OLD_AUDIO):
            found = _decode_named(event.raw)
            if found.item_id is None:
                return bool(event.audio)
            if found.item_id in self._stopped or (found.response_id and found.response_id in self._stopped):
                return False
            at = (found.item_id, found.content_index or 0)
            if not self._parts or self._parts[-1].at != at:
                self._parts.append(_Part(at))
            self._parts[-1].came += len(event.audio)
            self._forget()
        elif event.type == "response.created":
            response = _decode_named(event.raw).response
            self._response = response.id if response is not None else None
            self._stopped.clear()  # of the one before nothing more comes
        elif event.type == "response.done":
            response = _decode_named(event.raw).response
            if response is None or response.id == self._response:
                self._response = None
        return bool(event.audio)

    def played(self, size: int) -> None:
        """So many bytes of samples have left the speaker, in the order in which they came."""
        for part in self._parts:
            some = min(size, part.came - part.played)
            part.played += some
            size -= some
        self._forget()

    def _forget(self) -> None:
        while len(self._parts) > 1 and self._parts[0].played == self._parts[0].came:
            self._parts.popleft()

    @property
    def played_ms(self) -> int:
        """How much of the item that is being heard was played: never more than what has come."""
        return self._ms(self._parts[0]) if self._parts else 0

    def _ms(self, part: _Part) -> int:
        return part.played * 1000 // self._bytes_per_s

    def interrupt(self, *, server_cancels: bool = False) -> list[dict[str, Any]]:
        """The events that stop the answer, and cut what has come to what was heard; none if there is nothing to stop.

        Args:
            server_cancels: the server stops its answer by itself when somebody speaks (``interrupt_response`` of its turn
                detection, which is the default). To cancel it too would be answered with an error event, which harms
                nothing.
        """
        messages: list[dict[str, Any]] = []
        if self._response is not None and not server_cancels:
            messages.append(cancel(self._response))
        if self._response is not None:
            self._stopped.add(self._response)
        self._response = None
        self._stopped.update(part.at[0] for part in self._parts)
        for part in self._parts:
            if part.played < part.came:
                item, index = part.at
                messages.append(truncate(item, self._ms(part), content_index=index))
        self._parts.clear()
        return messages


class _Part:
    """The sound of one part of an item, in bytes."""

    __slots__ = ("at", "came", "played")

    def __init__(self, at: tuple[str, int]) -> None:
        self.at = at
        self.came = self.played = 0


# --- what comes -------------------------------------------------------------------------------------------------------


class _Response(msgspec.Struct, gc=False):
    id: str | None = None
    status: str | None = None
    status_details: Any = None
    usage: Any = None
    output: Any = None


class _Event(msgspec.Struct, gc=False):
    type: str = ""
    event_id: str | None = None
    delta: str | None = None
    response_id: str | None = None
    item_id: str | None = None
    content_index: int | None = None
    response: _Response | None = None


class _Typed(msgspec.Struct, gc=False):
    type: str = ""


_decode_event = msgspec.json.Decoder(_Event).decode
_decode_typed = msgspec.json.Decoder(_Typed).decode
_NONE = _Event()


def _decode_named(raw: bytes | bytearray) -> _Event:
    """What of an event we look at; of one whose fields are not as we know them the type alone."""
    try:
        return _decode_event(raw)
    except (msgspec.DecodeError, RecursionError):
        pass
    try:
        return _Event(_decode_typed(raw).type)
    except (msgspec.DecodeError, RecursionError):
        return _NONE


class Realtime:
    """The path is ``/realtime`` below the endpoint's base URL; ``manager.session(..., model=)`` names the model."""

    def path(self, base: str) -> str:
        return base if base.endswith("/realtime") else f"{base}/realtime"

    def schema(self, on_turn: Callable[[Turn], None], rtt_ns: Callable[[], int | None]) -> RealtimeSchema:
        return RealtimeSchema(on_turn, rtt_ns)


class _Ask(NamedTuple):
    """A ``response.create`` that was sent, and not answered yet."""

    at_ns: int
    event_id: str | None


class RealtimeSchema:
    """One session. A turn begins with ``response.create``, or, where the server detects turns, when it has heard the user's
    end; it ends with ``response.done``, or with the error event that refuses it."""

    def __init__(self, on_turn: Callable[[Turn], None], rtt_ns: Callable[[], int | None]) -> None:
        self._on_turn = on_turn
        self._rtt_ns = rtt_ns
        self._asks: list[_Ask] = []
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
        elif name == "error" and self._asks:
            self._refused(raw, arrival_ns)
        return SessionEvent(name, "", b"", raw)

    def sent(self, message: Mapping[str, Any] | str | bytes, at_ns: int) -> None:
        if isinstance(message, Mapping):
            name, event_id = message.get("type"), message.get("event_id")
        elif isinstance(message, str) and '"response.create"' in message:
            found = _decode_named(message.encode())
            name, event_id = found.type, found.event_id
        else:
            return
        if name == "response.create":
            self._asks.append(_Ask(at_ns, event_id if isinstance(event_id, str) else None))

    def ended(self, at_ns: int, error: SpanwireError | None) -> None:
        turns = list(self._turns.values())
        turns += [self._asked(ask) for ask in self._asks]
        self._turns, self._asks = {}, []
        for turn in turns:
            turn.outcome = (
                "closed_by_caller" if error is None else "timeout" if isinstance(error, CallTimeout) else "error"
            )
            turn.error = error
            self._end(turn, at_ns)

    def _created(self, found: _Event, at_ns: int) -> None:
        response = found.response
        if response is None or response.id is None or response.id in self._turns:
            return
        if self._asks:
            turn = self._asked(self._asks.pop(0))
            rtt_ns = self._rtt_ns()
            # It cannot have taken longer than this whole way there and back.
            turn.marks.rtt_ns = rtt_ns and min(rtt_ns, at_ns - turn.begin_ns)
        else:
            turn = Turn(self._heard_ns or at_ns)
            turn.marks.sent_ns = turn.begin_ns
            # Both moments were seen here, each one way late: no round trip is in it.
            turn.marks.rtt_ns = 0
        self._heard_ns = 0
        turn.head.id = response.id
        turn.head.streamed = True
        turn.marks.first_byte_ns = turn.marks.last_byte_ns = at_ns
        self._turns[response.id] = turn

    def _asked(self, ask: _Ask) -> Turn:
        turn = Turn(ask.at_ns)
        turn.marks.sent_ns = ask.at_ns
        turn.marks.rtt_ns = self._rtt_ns()
        return turn

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
        turn.finish_reason = _finish_reason(response)
        if response.status == "cancelled":
            turn.outcome = "cancelled"
        elif response.status == "failed":
            turn.outcome = "error"
            turn.error = _failure(response)
        self._end(turn, at_ns)

    def _refused(self, raw: bytes, at_ns: int) -> None:
        """Of which ask, if of any? Errors say what they are about only where that had an ``event_id``."""
        fields = _error_fields(raw)
        event_id, code = fields.get("event_id"), fields.get("code")
        if event_id is not None:
            found = next((ask for ask in self._asks if ask.event_id == event_id), None)
        elif code != _BUSY and (self._turns or (isinstance(code, str) and code.startswith(_NOT_OF_CREATE))):
            found = None
        else:
            found = self._asks[0]
        if found is None:
            return
        self._asks.remove(found)
        turn = self._asked(found)
        turn.marks.first_byte_ns = turn.marks.last_byte_ns = at_ns
        turn.outcome = "error"
        turn.error = response_error(raw)
        self._end(turn, at_ns)

    def _end(self, turn: Turn, at_ns: int) -> None:
        turn.end_ns = max(at_ns, turn.begin_ns)
        self._on_turn(turn)


def _error_fields(raw: bytes) -> Mapping[str, Any]:
    try:
        event = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return {}
    fields = event.get("error") if isinstance(event, dict) else None
    return fields if isinstance(fields, dict) else {}


def _finish_reason(response: _Response) -> str | None:
    """In the words of chat calls."""
    if response.status == "incomplete":
        details = response.status_details
        reason = details.get("reason") if isinstance(details, Mapping) else None
        return "content_filter" if reason == "content_filter" else "length"
    if response.status != "completed":
        return None
    output = response.output if isinstance(response.output, list) else []
    calls = any(isinstance(item, Mapping) and item.get("type") == "function_call" for item in output)
    return "tool_calls" if calls else "stop"


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
