"""PURE: read along in an answer that another client reads, without holding or altering it.

Finds the first chunk, the first content, the finish reason, usage, id, model, and the late events in which servers tell
their own time. Schemas are known by their keys, so that nobody has to say which one it is: OpenAI chat and legacy
completions, OpenAI Responses, Anthropic Messages, Gemini, Ollama, embeddings. Framings by their first bytes: event
streams, newline-delimited JSON, one JSON value, an array that is streamed element by element (Gemini without
``alt=sse``).

Cheap: JSON is decoded up to the first content and from the finish reason on. Between them an event costs some searches
for byte strings; text of the model that contains them costs one decoding, and misleads nobody. Bounded: an event or a
body over ``max_bytes`` ends the reading along, and only times are kept from there on. Never raises: what cannot be read is
not found.
"""

from __future__ import annotations

import importlib
import re
import zlib
from collections.abc import Callable
from typing import Any

import msgspec

from ..calls import Usage
from .sse import EventStreamParser

__all__ = ["MAX_BYTES", "Along"]

#: How much of one event, or of an answer that is no stream, is kept, in bytes. Answers of chat and most batches of
#: embeddings are below it.
MAX_BYTES = 4 * 1024 * 1024
_LATE_EVENTS = 8  # more than any server sends after its finish reason: usage, timing, metadata
_LATE_BYTES = 1024 * 1024
_DONE = b"[DONE]"
_BOM = b"\xef\xbb\xbf"
_WBITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
_PIECE = 1024 * 1024

#: Strings of which an event after the first content has at least one if it tells more than content. By shape.
_CHOICES = (b'finish_reason":"', b'finish_reason": "', b'"usage":{', b'"usage": {', b"[DONE]", b'"error"', b"event: er")
_CANDIDATES = (b'"finishReason"', b"[DONE]", b'"error"')
_OLLAMA = (b'"done":true', b'"done": true', b'"error"')
_TYPED = (b"response.co", b"response.in", b"response.fa", b'"message_', b"[DONE]", b'"error"', b"event: er")
_TERMINAL = frozenset({"response.completed", "response.incomplete", "response.failed", "message_stop"})
#: Content in an array that is not split into its elements yet.
_CONTENT = re.compile(rb'"(?:text|functionCall|inlineData|executableCode)"\s*:\s*(?:"[^"]|\{)')
#: The last bytes of an event of chat completions that say that there is no finish reason yet, ``"finish_reason":null}]}``
#: with what stands behind it. An event that ends like one that was looked into has none either: one comparison, no search.
_ENDING = 40
_TAIL = 64  # longer than what `_CONTENT` matches, blanks aside

_decode = msgspec.json.Decoder().decode
_decode_elements = msgspec.json.Decoder(list[msgspec.Raw]).decode


class _Finish(msgspec.Struct, gc=False):
    finish_reason: Any = None
    finishReason: Any = None  # noqa: N815 - Gemini's


class _Whole(msgspec.Struct, gc=False):
    """A whole answer without what it is about: vectors and texts are skipped, not built."""

    id: Any = None
    model: Any = None
    choices: list[_Finish] | None = None
    candidates: list[_Finish] | None = None
    usage: Any = None
    usageMetadata: Any = None  # noqa: N815 - Gemini's, as the next two
    modelVersion: Any = None  # noqa: N815
    responseId: Any = None  # noqa: N815
    stop_reason: Any = None
    status: Any = None
    done_reason: Any = None
    prompt_eval_count: Any = None
    eval_count: Any = None
    error: Any = None


_decode_whole = msgspec.json.Decoder(_Whole).decode


class Along:
    """State of one answer. Times are whatever :meth:`feed` is given, 0 = did not happen.

    Args:
        status, content_type, content_encoding: of the answer's head.
        max_bytes: largest event, or whole answer, that is looked into.

    Attributes:
        first_chunk_ns: the first data event; of an answer that is no stream, its first byte.
        first_content_ns: the first text, reasoning or tool call of a stream.
        last_chunk_ns: the last data event.
        last_byte_ns: the last bytes, up to the terminal event.
        done_ns: the terminal event, after which nothing of the answer comes (``[DONE]`` and its kind).
        finish_reason, id, model, usage: as the server gave them, usage in our names.
        late_events: raw JSON from the finish reason on, or the whole answer: see ``Head.late_events``.
        streamed: it is a stream of events; None before its first byte.
        failed: the answer is, or ends with, an error object.
        blind: why nothing is looked for: ``coding``, ``size``, ``status``, ``broken``; None while it is.
        bytes: of the body so far, as they came.
    """

    __slots__ = (
        "_at_ns",
        "_by_lines",
        "_ending",
        "_late",
        "_marks",
        "_max_bytes",
        "_over",
        "_parser",
        "_pieces",
        "_quiet",
        "_size",
        "_take",
        "_unpack",
        "blind",
        "bytes",
        "done_ns",
        "failed",
        "finish_reason",
        "first_chunk_ns",
        "first_content_ns",
        "id",
        "last_byte_ns",
        "last_chunk_ns",
        "late_events",
        "model",
        "streamed",
        "usage",
    )

    def __init__(
        self, *, status: int = 200, content_type: str = "", content_encoding: str = "", max_bytes: int = MAX_BYTES
    ) -> None:
        self.first_chunk_ns = 0
        self.first_content_ns = 0
        self.last_chunk_ns = 0
        self.last_byte_ns = 0
        self.done_ns = 0
        self.finish_reason: str | None = None
        self.id: str | None = None
        self.model: str | None = None
        self.usage: Usage | None = None
        self.late_events: list[bytes] = []
        self.streamed: bool | None = None
        self.failed = False
        self.blind: str | None = None
        self.bytes = 0
        self._at_ns = 0
        self._max_bytes = max_bytes
        self._pieces: list[bytes] = []
        self._size = 0
        self._late = False
        self._marks: tuple[bytes, ...] = ()  # what an event after the first content is searched for
        self._ending = b""
        self._quiet = False  # past the first content, nothing late has come, and the parser stands between two events
        self._by_lines = "ndjson" in content_type or "jsonl" in content_type
        self._over = False
        self._parser: EventStreamParser | None = None
        self._take: Callable[[bytes], None] = self._sniff
        self._unpack: Callable[[bytes], bytes] | None = None
        coding = content_encoding.strip().lower()
        if not 200 <= status < 300:
            self._give_up("status")
        elif coding not in ("", "identity"):
            self._unpack = _unpacker(coding)
            if self._unpack is None:
                self._give_up("coding")
                if content_type:
                    self.streamed = "event-stream" in content_type or "ndjson" in content_type

    @property
    def complete(self) -> bool:
        """Everything of the answer but its end has come."""
        return self.done_ns > 0 or self.finish_reason is not None

    def feed(self, data: bytes, at_ns: int) -> None:
        """The next bytes of the body as they came over the wire, and when. Never raises."""
        if type(data) is not bytes:  # a view of another library's buffer
            data = bytes(data)
        self.bytes += len(data)
        if self.done_ns:
            return  # what comes after the terminal event belongs to nobody
        self.last_byte_ns = at_ns
        if self._quiet and data[-2:] == b"\n\n":  # whole events: the parser would stand where it stands
            if data[-_ENDING:] == self._ending:  # as the one before, and so no finish reason
                self.last_chunk_ns = at_ns
                return
            for mark in self._marks:
                if mark in data:
                    break
            else:
                if data[:5] == b"data:" or b"\ndata:" in data:
                    self.last_chunk_ns = at_ns
                    ending = data[-_ENDING:]
                    if b'finish_reason":' in ending:
                        self._ending = ending
                return
        self._at_ns = at_ns
        try:
            if self._unpack is not None:
                data = self._unpack(data)
            if data:
                self._take(data)
            parser = self._parser
            if parser is not None and self._unpack is None:
                self._quiet = self.first_content_ns > 0 and parser._plain and bool(self._marks) and not self._late
        except Exception:  # noqa: BLE001 - whatever a server sends, it is another client's answer
            self._give_up("broken")

    def end(self) -> None:
        """The answer has ended, or nobody reads it any more. A second call is harmless. Never raises."""
        if self._over:
            return
        self._over = True
        try:
            self._finish()
        except Exception:  # noqa: BLE001 - as above
            self.blind = self.blind or "broken"
        self._take = _ignore  # breaks the cycle of bound methods
        self._unpack = None
        self._parser = None
        self._pieces = []

    def _give_up(self, why: str) -> None:
        self.blind = why
        self._quiet = False
        self._unpack = None
        self._parser = None
        self._pieces = []
        self._take = self._only_times

    def _only_times(self, _data: bytes) -> None:
        self.first_chunk_ns = self.first_chunk_ns or self._at_ns
        self.last_chunk_ns = self._at_ns

    # --- framing ----------------------------------------------------------------------------------------------------

    def _sniff(self, data: bytes) -> None:
        start = b"".join([*self._pieces, data]) if self._pieces else data
        text = start.removeprefix(_BOM).lstrip(b" \t\r\n")
        if not text or _BOM.startswith(text):
            self._pieces = [start[-_TAIL:]]  # blanks are heartbeats, and may be any number
            return
        self._pieces = []
        first = text[:1]
        if first == b"{":
            self._take = self._first_line
            self._first_line(text)
        elif first == b"[":
            self.streamed = True
            self.first_chunk_ns = self._at_ns
            self._take = self._array
            self._array(text)
        else:
            self.streamed = True
            self._parser = EventStreamParser(self._first_event, max_event_bytes=self._max_bytes)
            self._take = self._parser.feed
            self._parser.feed(start)

    def _first_line(self, data: bytes) -> None:
        """One JSON value, or the first of many, each on its line: known by what follows its first line's end."""
        self.first_chunk_ns = self.first_chunk_ns or self._at_ns
        self._collect(data)
        if self.blind is None and b"\n" in data:
            line, _, rest = b"".join(self._pieces).partition(b"\n")
            # A value that goes on behind the line's end is one that is written over many lines, and one behind which
            # nothing comes is alone: many servers end a whole answer with a line's end.
            if not rest.strip() and not self._by_lines:
                return
            if line.rstrip()[-1:] == b"}" and _is_json(line):
                self.streamed = True
                self._pieces, self._size = [], 0
                self._take = self._lines
                self._line(line)
                if rest:
                    self._lines(rest)
            else:
                self.streamed = False
                self._take = self._collect

    def _collect(self, data: bytes) -> None:
        self.last_chunk_ns = self._at_ns
        self._size += len(data)
        if self._size > self._max_bytes:
            self._give_up("size")
        else:
            self._pieces.append(data)

    def _lines(self, data: bytes) -> None:
        if b"\n" not in data:
            self._size += len(data)
            if self._size > self._max_bytes:
                self._give_up("size")
            else:
                self._pieces.append(data)
            return
        lines = b"".join([*self._pieces, data]).split(b"\n")
        rest = lines.pop()
        self._pieces, self._size = ([rest], len(rest)) if rest else ([], 0)
        for line in lines:
            self._line(line)

    def _line(self, line: bytes) -> None:
        line = line.strip()
        if line.startswith(b"data:"):  # some servers end a stream of lines as they end one of events
            line = line[5:].strip()
        if line:
            if self.first_content_ns:
                self._later_event(b"", line)
            else:
                self._first_event(b"", line)

    def _array(self, data: bytes) -> None:
        self._collect(data)
        if not self.first_content_ns and self.blind is None:
            before = self._pieces[-2][-_TAIL:] if len(self._pieces) > 1 else b""
            if _CONTENT.search(before + data):
                self.first_content_ns = self._at_ns

    def _finish(self) -> None:
        if self._parser is not None:
            tail = self._parser.tail.strip()
            if tail:  # the blank line after it is missing
                self._parser.on_event(b"", tail)
            return
        take, body = self._take, b"".join(self._pieces)
        if self.blind is not None or not body:
            return
        if take == self._lines:
            self._line(body)
        elif take == self._array:
            self._elements(body)
        elif take in (self._first_line, self._collect):
            self._whole(body)

    def _elements(self, body: bytes) -> None:
        """The elements of an array: events of a stream, or lists of numbers."""
        for raw in _decode_elements(body)[-_LATE_EVENTS:]:
            element = bytes(raw)
            if element[:1] == b"{":
                self._keep_late(element)
                self._look(b"", _decode(element))
        if self.bytes and self.finish_reason is None and not self.first_content_ns:
            self.streamed = False

    def _whole(self, body: bytes) -> None:
        self.streamed = False
        body = body.strip()
        end = body.find(b"\ndata:")  # some servers end a JSON body as they end a stream
        body = body if end < 0 else body[:end]
        self._keep_late(body)
        found = _decode_whole(body)
        self.id = _text(found.id) or _text(found.responseId)
        self.model = _text(found.model) or _text(found.modelVersion)
        parts = found.choices or found.candidates or ()
        for part in parts:
            self._finished(part.finish_reason or part.finishReason)
        self._finished(found.stop_reason or found.done_reason or (found.status if not parts else None))
        self._count(found.usage if isinstance(found.usage, dict) else found.usageMetadata)
        if found.eval_count is not None or found.prompt_eval_count is not None:
            self._count({"prompt_eval_count": found.prompt_eval_count, "eval_count": found.eval_count})
        self.failed = bool(found.error)

    # --- events -----------------------------------------------------------------------------------------------------

    def _first_event(self, name: bytes, data: bytes) -> None:
        """An event up to the first content."""
        at_ns = self.last_chunk_ns = self._at_ns
        if not self.first_chunk_ns:
            self.first_chunk_ns = at_ns
        if self._read(name, data) and not self.first_content_ns:
            self.first_content_ns = at_ns
            if self._parser is not None:
                self._parser.on_event = self._later_event

    def _later_event(self, name: bytes, data: bytes) -> None:
        self.last_chunk_ns = self._at_ns
        if not self._late and name != b"error" and data[:1] == b"{" and self._marks:
            for mark in self._marks:
                if mark in data:
                    break
            else:
                return
        self._read(name, data)

    def _read(self, name: bytes, data: bytes) -> bool:
        """Decode an event. Returns whether it has content."""
        if data[:6] == _DONE:
            self._end_at_this()
            return False
        try:
            event = _decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return False
        if not isinstance(event, dict):
            return False
        content = self._look(name, event)
        if self._late:
            self._keep_late(data)
        return content

    def _keep_late(self, data: bytes) -> None:
        if len(data) <= _LATE_BYTES:
            self.late_events.append(data)
            if len(self.late_events) > _LATE_EVENTS:
                del self.late_events[0]

    def _end_at_this(self) -> None:
        self._late = True
        self.done_ns = self._at_ns

    def _finished(self, reason: object) -> None:
        if isinstance(reason, str) and reason:
            self._late = True
            self.finish_reason = reason

    def _count(self, usage: object) -> None:
        if isinstance(usage, dict):
            found = _usage(usage)
            if found is not None:
                self.usage = found if self.usage is None else _merged(self.usage, found)

    # --- schemas, by their keys ---------------------------------------------------------------------------------------

    def _look(self, name: bytes, event: dict[str, Any]) -> bool:
        if event.get("error") or name == b"error":
            self.failed = True
        if self.id is None:
            self.id = _text(event.get("id")) or _text(event.get("responseId"))
        if self.model is None:
            self.model = _text(event.get("model")) or _text(event.get("modelVersion"))
        choices = event.get("choices")
        if isinstance(choices, list):
            self._marks = _CHOICES
            self._count(event.get("usage"))
            content = [self._choice(choice) for choice in choices if isinstance(choice, dict)]  # each, for its finish
            return any(content)
        candidates = event.get("candidates")
        if isinstance(candidates, list) or "usageMetadata" in event:
            self._marks = _CANDIDATES
            self._count(event.get("usageMetadata"))
            if not isinstance(candidates, list):
                return False
            found = [self._candidate(one) for one in candidates if isinstance(one, dict)]
            return any(found)
        kind = event.get("type")
        if isinstance(kind, str):
            self._marks = _TYPED
            return self._typed(kind, event)
        if "done" in event:
            self._marks = _OLLAMA
            return self._ollama(event)
        self._count(event.get("usage"))
        return False

    def _choice(self, choice: dict[str, Any]) -> bool:
        self._finished(choice.get("finish_reason"))
        if choice.get("text"):
            return True
        for key in ("delta", "message"):
            delta = choice.get(key)
            if isinstance(delta, dict) and (
                delta.get("content")
                or delta.get("reasoning_content")
                or delta.get("reasoning")
                or delta.get("tool_calls")
                or delta.get("function_call")
                or delta.get("refusal")
                or delta.get("audio")
            ):
                return True
        return False

    def _candidate(self, candidate: dict[str, Any]) -> bool:
        self._finished(candidate.get("finishReason"))
        content = candidate.get("content")
        parts = content.get("parts") if isinstance(content, dict) else None
        return isinstance(parts, list) and any(
            isinstance(part, dict)
            and any(part.get(key) for key in ("text", "functionCall", "inlineData", "executableCode"))
            for part in parts
        )

    def _ollama(self, event: dict[str, Any]) -> bool:
        if event.get("done") is True:
            self._finished(event.get("done_reason") or "stop")
            self._count(event)
            self._end_at_this()
        message = event.get("message")
        inner = message if isinstance(message, dict) else {}
        return bool(
            event.get("response")
            or event.get("thinking")
            or inner.get("content")
            or inner.get("thinking")
            or inner.get("tool_calls")
        )

    def _typed(self, kind: str, event: dict[str, Any]) -> bool:
        """Events that say what they are: Responses, Anthropic Messages."""
        if kind == "error":
            self.failed = True
            return False
        for holder in (event.get("response"), event.get("message")):
            if isinstance(holder, dict):
                # A response's id, not that of an item in it.
                self.id = _text(holder.get("id")) or self.id
                self.model = _text(holder.get("model")) or self.model
                self._count(holder.get("usage"))
                if holder.get("error"):
                    self.failed = True
        self._count(event.get("usage"))
        delta = event.get("delta")
        if kind in _TERMINAL:
            if kind != "message_stop":
                self._finished(kind.rpartition(".")[2])
                self.failed = self.failed or kind == "response.failed"
            self._end_at_this()
        elif kind == "message_delta":
            if isinstance(delta, dict):
                self._finished(delta.get("stop_reason"))
        elif kind == "content_block_delta":
            return isinstance(delta, dict) and any(
                delta.get(key) for key in ("text", "thinking", "partial_json", "citation")
            )
        elif kind == "content_block_start":
            block = event.get("content_block")
            return isinstance(block, dict) and bool(
                block.get("text") or block.get("thinking") or str(block.get("type")).endswith("tool_use")
            )
        else:
            return bool(delta) and kind.endswith(".delta")
        return False


def _ignore(_data: bytes) -> None:
    pass


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _is_json(line: bytes) -> bool:
    try:
        msgspec.json.decode(line, type=msgspec.Raw)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False
    return True


# ------------------------------------------------------------------------------------------------------------------ usage


def _usage(told: dict[str, Any]) -> Usage | None:
    """Tokens in any of the schemas' names. The input includes what came from a cache, the output includes reasoning."""
    cached = _number(told, "cache_read_input_tokens", "cachedContentTokenCount", "prompt_cache_hit_tokens")
    reasoning = _number(told, "thoughtsTokenCount")
    given = _number(told, "prompt_tokens", "input_tokens", "promptTokenCount", "prompt_eval_count")
    made = _number(told, "completion_tokens", "output_tokens", "candidatesTokenCount", "eval_count")
    if given is not None and "cache_read_input_tokens" in told:  # Anthropic counts them apart
        given += (cached or 0) + (_number(told, "cache_creation_input_tokens") or 0)
    if made is not None and reasoning is not None:  # Gemini does so with these
        made += reasoning
    for key in ("prompt_tokens_details", "input_tokens_details"):
        details = told.get(key)
        if cached is None and isinstance(details, dict):
            cached = _number(details, "cached_tokens")
    for key in ("completion_tokens_details", "output_tokens_details"):
        details = told.get(key)
        if reasoning is None and isinstance(details, dict):
            reasoning = _number(details, "reasoning_tokens")
    total = _number(told, "total_tokens", "totalTokenCount")
    if given is None and made is None and total is None:
        return None
    return Usage(given, made, total, cached, reasoning)


def _number(told: dict[str, Any], *names: str) -> int | None:
    for name in names:
        value = told.get(name)
        if type(value) is int and 0 <= value < 1 << 53:
            return value
    return None


def _merged(before: Usage, now: Usage) -> Usage:
    """The newer count, and what only the older one has: Anthropic tells the input first and the output last."""
    if before == now:
        return before
    older, newer = msgspec.structs.asdict(before), msgspec.structs.asdict(now)
    return Usage(**{name: older[name] if value is None else value for name, value in newer.items()})


# ----------------------------------------------------------------------------------------------------------------- coding


def _unpacker(coding: str) -> Callable[[bytes], bytes] | None:
    """Decodes a copy as it comes; None for a coding that cannot be read here. Errors come out as they are."""
    wbits = _WBITS.get(coding)
    if wbits is not None:
        return _Zlib(wbits).feed
    # Clients ask for these two only where a library for them is installed.
    if coding == "br":
        for name in ("brotli", "brotlicffi"):
            try:
                module: Any = importlib.import_module(name)
            except ImportError:
                continue
            stream = module.Decompressor()
            return getattr(stream, "process", None) or stream.decompress  # type: ignore[no-any-return]
    if coding == "zstd":
        try:
            module = importlib.import_module("compression.zstd")
            return module.ZstdDecompressor().decompress  # type: ignore[no-any-return]
        except ImportError:
            pass
        try:
            module = importlib.import_module("zstandard")
        except ImportError:
            return None
        return module.ZstdDecompressor().decompressobj().decompress  # type: ignore[no-any-return]
    return None


class _Zlib:
    """A copy is decoded in pieces, so that a few bytes which stand for a gigabyte cost no gigabyte."""

    __slots__ = ("_raw", "_stream")

    def __init__(self, wbits: int) -> None:
        self._stream = zlib.decompressobj(wbits)
        self._raw = wbits == 15  # "deflate" is zlib's format by the standard, and the bare one with some servers

    def feed(self, data: bytes) -> bytes:
        try:
            plain = self._stream.decompress(data, _PIECE)
        except zlib.error:
            if not self._raw:
                raise
            self._stream = zlib.decompressobj(-15)
            plain = self._stream.decompress(data, _PIECE)
        self._raw = False
        pieces = [plain]
        size = len(plain)
        while self._stream.unconsumed_tail:
            if size > MAX_BYTES:
                raise ValueError("more than is looked into")
            plain = self._stream.decompress(self._stream.unconsumed_tail, _PIECE)
            size += len(plain)
            pieces.append(plain)
        return b"".join(pieces) if len(pieces) > 1 else pieces[0]
