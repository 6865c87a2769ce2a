"""What is asked and what comes back, neutral of any wire: frozen structs, no I/O.

A :class:`Call` keeps the OpenAI shape in ``body``, since that is what every framework above speaks. What comes back is
ours: a :class:`Chunk` has the same five fields whatever the server's dialect. None always means "the server did not
say".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from .errors import ConfigurationError, SpanwireError

if TYPE_CHECKING:
    from .timeline import Timeline

__all__ = [
    "BatchReply",
    "Call",
    "Chunk",
    "Embeddings",
    "Reply",
    "ReplyBuilder",
    "SessionEvent",
    "ToolCall",
    "ToolCallDelta",
    "Usage",
]


class Call(msgspec.Struct, frozen=True, eq=False):
    """One thing to ask of a server. Build it with :meth:`chat` or :meth:`embeddings`.

    Attributes:
        operation: ``"chat"`` or ``"embeddings"``; a transport or dialect may define more.
        model: the model's name as the server knows it.
        body: the request in OpenAI's shape, without ``model`` and ``stream``.
        headers: sent with this call only; they win over the endpoint's.
    """

    operation: str
    model: str
    body: Mapping[str, Any]
    headers: Mapping[str, str] = {}

    @classmethod
    def chat(
        cls,
        model: str,
        messages: Sequence[Mapping[str, Any]],
        *,
        headers: Mapping[str, str] | None = None,
        **parameters: Any,
    ) -> Call:
        """A chat completion.

        Args:
            model: the model's name.
            messages: OpenAI-shaped messages, ``{"role": ..., "content": ...}``.
            headers: sent with this call only.
            parameters: anything else that the server takes: ``temperature``, ``tools``, ``max_tokens``, ... A value
                of None is left out of the request.

        Raises:
            ConfigurationError: no model, messages that are not a list of mappings, ``stream=`` (which is chosen by
                ``manager.stream`` or ``manager.complete``), or ``n=`` over 1 (a reply holds one answer).
        """
        model = _check_model(model)
        # The commonest types first: an abstract class is asked slowly, and for every call.
        if type(messages) is not list and (
            isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence)
        ):
            raise ConfigurationError(
                'messages must be a list such as [{"role": "user", "content": "..."}], '
                f"not {_kind(messages)}; wrap a bare prompt in one"
            )
        if parameters.get("n") not in (None, 1):
            raise ConfigurationError(f"n={parameters['n']!r:.20}: a reply holds one answer; make one call for each")
        for position, message in enumerate(messages):
            if type(message) is not dict and not isinstance(message, Mapping):
                raise ConfigurationError(
                    f'messages[{position}] must be a mapping with "role" and "content", not {_kind(message)}'
                )
        return cls("chat", model, _body({"messages": list(messages)}, parameters), dict(headers) if headers else {})

    @classmethod
    def embeddings(
        cls,
        model: str,
        input: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        *,
        headers: Mapping[str, str] | None = None,
        **parameters: Any,
    ) -> Call:
        """Embeddings of one text, a list of texts, or their token ids.

        Args:
            model: the model's name.
            input: a text, a list of texts, a list of token ids, or a list of lists of token ids.
            headers: sent with this call only.
            parameters: anything else that the server takes, such as ``dimensions``. None is left out.

        Raises:
            ConfigurationError: no model, an empty input, or ``stream=``.
        """
        model = _check_model(model)
        if not isinstance(input, (str, Sequence)) or isinstance(input, bytes) or len(input) == 0:
            raise ConfigurationError(f"input must be a text or a list of texts that is not empty, not {_kind(input)}")
        return cls("embeddings", model, _body({"input": input}, parameters), dict(headers) if headers else {})

    @classmethod
    def batch(cls, calls: Mapping[str, Call]) -> Call:
        """Many calls as one, for a provider that takes them in a file.

        Args:
            calls: by a name of your own for each, which the results have too. All of one operation and one model.

        Raises:
            ConfigurationError: no calls, or calls that do not fit together.
        """
        if not isinstance(calls, Mapping) or not calls:
            raise ConfigurationError(f"a batch is made of a mapping of names to calls, not of {_kind(calls)}")
        first = next(iter(calls.values()))
        requests = []
        for name, call in calls.items():
            if not isinstance(name, str) or not name or not isinstance(call, Call) or call.operation == "batch":
                raise ConfigurationError(
                    f"a batch has names and calls of chat or embeddings, not {name!r:.60}: {call!r:.60}"
                )
            if (call.operation, call.model) != (first.operation, first.model):
                raise ConfigurationError(
                    f"all calls of a batch have one operation and one model: {name!r:.60} is {call.operation} of {call.model!r:.60}, "
                    f"others {first.operation} of {first.model!r:.60}"
                )
            if call.headers:
                raise ConfigurationError(f"calls of a batch have no headers of their own; {name!r:.60} has some")
            requests.append({"custom_id": name, "body": call.body})
        return cls("batch", first.model, {"operation": first.operation, "requests": requests})

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """What rich shows: as ``repr``, no content."""
        return [("operation", self.operation), ("model", self.model)]

    def __repr__(self) -> str:
        return f"Call(operation={self.operation!r}, model={self.model!r}, body=<{', '.join(sorted(self.body))}>)"


def _kind(value: object) -> str:
    return f"an empty {type(value).__name__}" if value in ("", [], ()) else f"a {type(value).__name__}"


def _check_model(model: object) -> str:
    if type(model) is str and model:
        return model
    if not isinstance(model, str) or not model:
        raise ConfigurationError(f"model must be the model's name as the server knows it, not {model!r:.40}")
    return str.__str__(model)  # of an enum that is text its value, which Python 3.11 and 3.12 show differently


def _body(required: dict[str, Any], parameters: dict[str, Any]) -> dict[str, Any]:
    if "stream" in parameters:
        raise ConfigurationError("stream= is not a parameter of a call: use manager.stream() or manager.complete()")
    if parameters:
        required.update({name: value for name, value in parameters.items() if value is not None})
    return required


class Usage(msgspec.Struct, frozen=True, gc=False):
    """Tokens as the server counted them. A field that the server did not give is None, never 0."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    total_tokens: int | None = None
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class ToolCallDelta(msgspec.Struct, frozen=True, gc=False):
    """A piece of one tool call.

    Attributes:
        index: which of the answer's tool calls, counted from 0 in order of appearance.
        id: only on the first piece of a call.
        name: only on the first piece of a call.
        arguments: a piece of JSON text, to be joined with the other pieces.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """What rich shows: as ``repr``, no content."""
        return [("index", self.index), ("id", self.id), ("name", self.name)]

    def __repr__(self) -> str:
        return f"ToolCallDelta(index={self.index}, id={self.id!r}, name={self.name!r}, arguments=<{len(self.arguments)} characters>)"


class ToolCall(msgspec.Struct, frozen=True, gc=False):
    """One whole tool call; ``arguments`` is JSON text as the model wrote it, not checked."""

    id: str
    name: str
    arguments: str

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """What rich shows: as ``repr``, no content."""
        return [("id", self.id), ("name", self.name)]

    def __repr__(self) -> str:
        return f"ToolCall(id={self.id!r}, name={self.name!r}, arguments=<{len(self.arguments)} characters>)"


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """One event of a streamed answer.

    Attributes:
        text: a piece of the visible answer; ``""`` if this event has none.
        reasoning: a piece of the model's reasoning; ``""`` if this event has none.
        tool_calls: pieces of tool calls.
        finish_reason: ``"stop"``, ``"length"``, ``"tool_calls"``, ...: on the event that carries it.
        usage: on the event that carries it, once for each answer.
        raw: the event's bytes as they came, for what only this server sends (``msgspec.json.decode(chunk.raw)``).
    """

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    finish_reason: str | None = None
    usage: Usage | None = None
    raw: bytes = b""

    @property
    def has_content(self) -> bool:
        """Whether text, reasoning or a tool call is in it: a role, a finish reason or usage are not content."""
        return bool(self.text or self.reasoning or self.tool_calls)

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """What rich shows: as ``repr``, no content."""
        return [("characters", len(self.text)), ("finish_reason", self.finish_reason), ("usage", self.usage)]

    def __repr__(self) -> str:
        return (
            f"Chunk(text=<{len(self.text)} characters>, reasoning=<{len(self.reasoning)} characters>, "
            f"tool_calls={len(self.tool_calls)}, finish_reason={self.finish_reason!r}, usage={self.usage!r})"
        )


class Reply(msgspec.Struct, frozen=True, eq=False):
    """A whole answer.

    Attributes:
        text: the visible answer, ``""`` if there is none.
        reasoning: the model's reasoning, ``""`` if there is none.
        tool_calls: whole tool calls in order of appearance.
        finish_reason: as the server gave it; None if it gave none (a partial reply).
        usage: None if the server gave none.
        id: the server's id of the answer, or None.
        model: the model that the server says answered, or None.
        headers: the answer's headers, names in lower case.
        timeline: where the time went.
        raw: the answer's bytes as they came, for what only this server sends; ``b""`` of a streamed one, whose chunks
            have theirs.
    """

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str | None = None
    usage: Usage | None = None
    id: str | None = None
    model: str | None = None
    headers: Mapping[str, str] = {}
    timeline: Timeline | None = None
    raw: bytes = b""

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """What rich shows: as ``repr``, no content."""
        return [("characters", len(self.text)), ("finish_reason", self.finish_reason), ("usage", self.usage)]

    def __repr__(self) -> str:
        return (
            f"Reply(text=<{len(self.text)} characters>, tool_calls={len(self.tool_calls)}, "
            f"finish_reason={self.finish_reason!r}, usage={self.usage!r}, model={self.model!r})"
        )


class Embeddings(msgspec.Struct, frozen=True, eq=False):
    """Vectors in the order of the input.

    Attributes:
        vectors: one list of floats for each input.
        model: the model that the server says answered, or None.
        usage: None if the server gave none.
        headers: the answer's headers, names in lower case.
        timeline: where the time went; set on what ``manager.embed`` returns.
    """

    vectors: list[list[float]]
    model: str | None = None
    usage: Usage | None = None
    headers: Mapping[str, str] = {}
    timeline: Timeline | None = None

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """What rich shows: as ``repr``, no content."""
        return [("vectors", len(self.vectors)), ("model", self.model), ("usage", self.usage)]

    def __repr__(self) -> str:
        width = len(self.vectors[0]) if self.vectors else 0
        return f"Embeddings({len(self.vectors)} x {width}, model={self.model!r}, usage={self.usage!r})"


class SessionEvent(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One message that came in a session (:meth:`~spanwire.manager.ConnectionManager.session`).

    Attributes:
        type: what its schema calls it, such as ``response.done``; ``""`` where it has no word for that.
        text: the piece of text, transcript or tool arguments that it carries, never None.
        audio: the piece of audio that it carries, as the bytes of its samples.
        raw: the message as it came.
        binary: it came as bytes, and not as text.
    """

    type: str = ""
    text: str = ""
    audio: bytes = b""
    raw: bytes = b""
    binary: bool = False

    @property
    def data(self) -> Any:
        """The message, parsed from JSON; None if it is none. Parsed anew each time."""
        try:
            return msgspec.json.decode(self.raw) if self.raw else None
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """What rich shows: as ``repr``, no content."""
        return [("type", self.type), ("bytes", len(self.raw))]

    def __repr__(self) -> str:
        return f"SessionEvent({self.type!r}, {len(self.raw)} bytes)"


class BatchReply(msgspec.Struct, frozen=True, eq=False):
    """What came of a batch.

    Attributes:
        items: for each name of ``Call.batch()`` that the provider has answered, the reply, or why there is none.
        timeline: of the job.
    """

    items: Mapping[str, Reply | Embeddings | SpanwireError]
    timeline: Timeline | None = None

    def __repr__(self) -> str:
        failed = sum(isinstance(item, SpanwireError) for item in self.items.values())
        return f"BatchReply({len(self.items)} items, {failed} failed)"


class ReplyBuilder:
    """Joins chunks to a :class:`Reply`. Keeps only the pieces' text, not the raw events."""

    __slots__ = ("_finish_reason", "_joined", "_reasoning", "_text", "_tools", "_usage", "content_chunks")

    def __init__(self) -> None:
        self._joined: list[str] = []  # of 16 or more tokens each: a string for every token would be ten times the text
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._tools: dict[int, tuple[str, str, list[str]]] = {}
        self._finish_reason: str | None = None
        self._usage: Usage | None = None
        self.content_chunks = 0

    @property
    def usage(self) -> Usage | None:
        """The usage that came, if any."""
        return self._usage

    @property
    def finish_reason(self) -> str | None:
        """The finish reason that came, if any."""
        return self._finish_reason

    def add(self, chunks: Sequence[Chunk]) -> None:
        """Take the next chunks in order."""
        text = self._text
        if len(chunks) == 1:  # the commonest, token by token
            chunk = chunks[0]
            if (
                chunk.text
                and chunk.finish_reason is None
                and chunk.usage is None
                and not chunk.reasoning
                and not chunk.tool_calls
            ):
                self.content_chunks += 1
                text.append(chunk.text)
                if len(text) >= 16:
                    self._joined.append("".join(text))
                    text.clear()
                return
        count = 0
        for chunk in chunks:
            if chunk.text:
                text.append(chunk.text)
                count += 1
                if chunk.finish_reason is None and chunk.usage is None and not chunk.reasoning and not chunk.tool_calls:
                    continue
            elif chunk.reasoning or chunk.tool_calls:
                count += 1
            self._add_rest(chunk)
        self.content_chunks += count
        if len(text) >= 16:
            self._joined.append("".join(text))
            text.clear()

    def _add_rest(self, chunk: Chunk) -> None:
        if chunk.reasoning:
            self._reasoning.append(chunk.reasoning)
        for delta in chunk.tool_calls:
            known = self._tools.get(delta.index)
            if known is None:
                self._tools[delta.index] = (delta.id or "", delta.name or "", [delta.arguments])
            else:
                known[2].append(delta.arguments)
                if (delta.id and not known[0]) or (delta.name and not known[1]):
                    self._tools[delta.index] = (known[0] or delta.id or "", known[1] or delta.name or "", known[2])
        if chunk.finish_reason is not None:
            self._finish_reason = chunk.finish_reason
        if chunk.usage is not None:
            self._usage = chunk.usage

    def reply(
        self,
        *,
        id: str | None = None,
        model: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeline: Timeline | None = None,
        raw: bytes = b"",
    ) -> Reply:
        """What has been added so far."""
        return Reply(
            text="".join([*self._joined, *self._text]),
            reasoning="".join(self._reasoning),
            tool_calls=tuple(
                ToolCall(id=id_ or f"call_{index}", name=name, arguments="".join(pieces))
                for index, (id_, name, pieces) in sorted(self._tools.items())
            ),
            finish_reason=self._finish_reason,
            usage=self._usage,
            id=id,
            model=model,
            headers=headers or {},
            timeline=timeline,
            raw=raw,
        )
