"""What the loopback server does with one call: :class:`Script`, neutral of any wire, no I/O.

A streamed answer and its delays::

    request    headers    first event       first content             terminal event   end of the message
       ├─queue_s──┼─headers_s─┼─────prefill_s─────┼──gap_s──┼──gap_s──┼─────────┼──────end_s──────┤
                              (role)              (token)   (token)   (token, finish, usage, [DONE])

An answer that is not streamed comes after the sum of these delays.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import force_setattr

from ..calls import Usage
from ..endpoint import check_headers
from ..errors import ConfigurationError
from .reports import DIALECTS

__all__ = ["Script", "ScriptedTool"]

#: A piece is a word with the space before it, as most tokenizers cut; what follows the last word stays with it.
_PIECE = re.compile(r"\s*\S+(?:\s+$)?|\s+$")
#: Vectors of real models have at most some thousand numbers; the limit keeps a typo from filling the memory.
_MAX_DIMENSIONS = 65_536
_CLOSE_CODES = frozenset({*range(1000, 1004), *range(1007, 1015)})
_OWN_CLOSE_CODES = range(3000, 5000)
_DELAYS = ("queue_s", "headers_s", "prefill_s", "gap_s", "end_s", "write_gap_s")


class ScriptedTool(msgspec.Struct, frozen=True):
    """A tool call in an answer.

    Attributes:
        name: the tool's name.
        arguments: JSON text, or the pieces in which it is sent. It is not checked: broken JSON is a fine script.
        id: the call's id; ``call_0``, ``call_1``, ... by position if it is not given.
    """

    name: str
    arguments: str | Sequence[str] = "{}"
    id: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigurationError(f"ScriptedTool(name=...) must be the tool's name, not {self.name!r:.40}")
        pieces = (self.arguments,) if isinstance(self.arguments, str) else self.arguments
        force_setattr(self, "arguments", _pieces("ScriptedTool(arguments=...)", pieces, "JSON text"))


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """What the server does with one call. The default is an empty answer that ends well, at once.

    Attributes:
        tokens: pieces of the visible text, one event each; :meth:`say` cuts a text into them.
        reasoning: pieces of the reasoning, one event each, before the text.
        tool_calls: after the text; one event with the name, then one for each piece of the arguments.
        finish_reason: left out: ``"tool_calls"`` if there are any, else ``"stop"``. None: none is sent.
        usage: left out: counted from this script, and sent as a server does (in a whole answer; in a stream if the
            request asks by ``stream_options.include_usage``). None: never sent. Else: these numbers, always.
        role_chunk: begin a stream with an event that has only the role.
        done: end a stream with ``data: [DONE]``.
        queue_s: seconds between the request and the headers.
        headers_s: seconds between the headers and the first event.
        prefill_s: seconds between the role's event (without one: the headers) and the first content.
        gap_s: seconds between two pieces of content. 0: everything that is due is one write.
        end_s: seconds between the terminal event and the end of the message: a late chunked terminator.
        status: HTTP status. From 400 the answer is an error object, unless ``body`` or ``writes`` is given.
        headers: further headers, or other values for those that the server sets by itself. With a ``Content-Length``
            the body is sent as it is, right or wrong.
        content_type: the default is that of the answer: ``text/event-stream``, or ``application/json``.
        body: this instead of the generated answer, in one piece with its length. A script with a body or writes is
            played at any path: so the server speaks a dialect that it does not know.
        writes: these bytes instead of the generated answer, each of them one HTTP chunk.
        write_gap_s: seconds between two of ``writes``. 0: all in one write.
        chunked: False: no chunks and no length; the end of a stream is the end of the connection.
        close: answer with ``Connection: close``, and do so.
        drop_after: close the connection after so many events (or ``writes``), in the middle of the next one, or at
            the end if there are no more. ``"request"``: before any byte of the answer. A whole body counts as one.
        drop_mode: ``"close"``: in order (FIN), inside a chunk. ``"reset"``: RST, as from a crashed host or a load
            balancer; on a unix socket, which has none, the same as close. A number: a WebSocket is closed with that
            code (RFC 6455, section 7.4), and between two messages; for other wires it is ``"close"``.
        hang_after: send nothing more after so many events (or ``writes``), and keep the connection open.
            ``"request"``: never answer.
        dimensions: length of the vectors for an embeddings call, if the request does not say.
        server_timing: the server tells the client what the call took, as it measured it, in this dialect:
            ``"vllm"``, ``"llama.cpp"``, ``"groq"``, ``"cerebras"``, ``"fireworks"``, ``"tgi"``, ``"openai"``,
            ``"envoy"`` or ``"server-timing"``, each where and when the real one does (see
            :mod:`spanwire.testing.reports`). ``queue_s`` is its queue, ``headers_s`` and ``prefill_s`` its prefill,
            the gaps its decode. None: it says nothing.

    Raises:
        ConfigurationError: a value that cannot be meant; the message names the field.
    """

    tokens: Sequence[str] = ()
    reasoning: Sequence[str] = ()
    tool_calls: Sequence[ScriptedTool] = ()
    finish_reason: str | UnsetType | None = UNSET
    usage: Usage | UnsetType | None = UNSET
    role_chunk: bool = True
    done: bool = True
    queue_s: float = 0.0
    headers_s: float = 0.0
    prefill_s: float = 0.0
    gap_s: float = 0.0
    end_s: float = 0.0
    status: int = 200
    headers: Mapping[str, str] = {}
    content_type: str | None = None
    body: bytes | None = None
    writes: Sequence[bytes] | None = None
    write_gap_s: float = 0.0
    chunked: bool = True
    close: bool = False
    drop_after: int | Literal["request"] | None = None
    drop_mode: Literal["close", "reset"] | int = "close"
    hang_after: int | Literal["request"] | None = None
    dimensions: int = 8
    server_timing: str | None = None

    @classmethod
    def say(cls, text: str, **more: Any) -> Script:
        """A script whose tokens are the words of ``text``; ``more`` are its other fields.

        Raises:
            ConfigurationError: as the class does.
        """
        if not isinstance(text, str):
            raise ConfigurationError(f"Script.say() takes a text, not {type(text).__name__}")
        return cls(tokens=_PIECE.findall(text), **more)

    def __post_init__(self) -> None:
        force_setattr(self, "tokens", _pieces("Script(tokens=...)", self.tokens, "text, such as Script.say() makes"))
        force_setattr(self, "reasoning", _pieces("Script(reasoning=...)", self.reasoning, "text"))
        if isinstance(self.tool_calls, ScriptedTool) or not all(isinstance(t, ScriptedTool) for t in self.tool_calls):
            raise ConfigurationError("Script(tool_calls=...) must be a list of ScriptedTool")
        force_setattr(self, "tool_calls", tuple(self.tool_calls))
        if not isinstance(self.usage, (Usage, UnsetType, type(None))):
            raise ConfigurationError(f"Script(usage=...) must be a spanwire.Usage or None, not {self.usage!r:.40}")
        for name in _DELAYS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise ConfigurationError(f"Script({name}=...) must be a number of seconds from 0, not {value!r:.40}")
        if not _is_count(self.status) or not 200 <= self.status <= 599:
            raise ConfigurationError(
                f"Script(status=...) must be a final HTTP status, 200 to 599, not {self.status!r:.40}"
            )
        check_headers(self.headers, "Script(headers=...)")
        if self.content_type is not None:
            check_headers({"content-type": self.content_type}, "Script(content_type=...)")
        self._check_bytes()
        self._check_ends()
        if not _is_count(self.dimensions) or not 1 <= self.dimensions <= _MAX_DIMENSIONS:
            raise ConfigurationError(
                f"Script(dimensions=...) must be a number from 1 to {_MAX_DIMENSIONS}, not {self.dimensions!r:.40}"
            )
        if self.server_timing is not None and self.server_timing not in tuple(DIALECTS):  # a list has no hash
            raise ConfigurationError(
                f"Script(server_timing=...) must be one of {', '.join(DIALECTS)}, or None, "
                f"not {self.server_timing!r:.40}"
            )

    def _check_bytes(self) -> None:
        if self.body is not None and not isinstance(self.body, bytes):
            raise ConfigurationError(f"Script(body=...) must be bytes, not {type(self.body).__name__}")
        if self.writes is None:
            return
        if self.body is not None:
            raise ConfigurationError("Script(): body and writes are two ways to give the whole answer; choose one")
        writes: object = self.writes
        if isinstance(writes, bytes) or not all(isinstance(write, bytes) and write for write in self.writes):
            raise ConfigurationError(
                "Script(writes=...) must be a list of bytes, none of them empty: one HTTP chunk each"
            )
        force_setattr(self, "writes", tuple(self.writes))

    def _check_ends(self) -> None:
        for name in ("drop_after", "hang_after"):
            value = getattr(self, name)
            if value is not None and value != "request" and (not _is_count(value) or value < 0):
                raise ConfigurationError(
                    f'Script({name}=...) must be a number of events, "request" or None, not {value!r:.40}'
                )
        if self.drop_after is not None and self.hang_after is not None:
            raise ConfigurationError(
                "Script(): after drop_after nothing can hang; choose one of drop_after and hang_after"
            )
        if self.drop_mode not in ("close", "reset") and not _is_close_code(self.drop_mode):
            raise ConfigurationError(
                'Script(drop_mode=...) must be "close", "reset" or a code with which a WebSocket can be closed, '
                f"not {self.drop_mode!r:.40}"
            )

    @property
    def finish(self) -> str | None:
        """The finish reason that is sent."""
        if isinstance(self.finish_reason, UnsetType):
            return "tool_calls" if self.tool_calls else "stop"
        return self.finish_reason

    @property
    def pieces(self) -> int:
        """How many pieces of content there are: what a server counts as output tokens."""
        return len(self.reasoning) + len(self.tokens) + sum(1 + len(tool.arguments) for tool in self.tool_calls)

    @property
    def decode_s(self) -> float:
        """Seconds from the first piece of content to the last."""
        return max(self.pieces - 1, 0) * self.gap_s

    @property
    def total_s(self) -> float:
        """All delays together, in seconds: what an answer takes that is not streamed."""
        return self.queue_s + self.headers_s + self.prefill_s + self.decode_s + self.end_s

    def usage_for(self, input_tokens: int, *, asked: bool) -> Usage | None:
        """The usage to send.

        Args:
            input_tokens: what the server counted in the request, for a script that does not say.
            asked: the answer has usage by itself, or the request asks for it.
        """
        if not isinstance(self.usage, UnsetType):
            return self.usage
        if not asked:
            return None
        return Usage(
            input_tokens, self.pieces, input_tokens + self.pieces, reasoning_tokens=len(self.reasoning) or None
        )


def _is_close_code(value: object) -> bool:
    """Those that may be sent: RFC 6455, section 7.4, and the registry that it founded."""
    return _is_count(value) and (value in _CLOSE_CODES or value in _OWN_CLOSE_CODES)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _pieces(where: str, value: Sequence[str], of: str) -> tuple[str, ...]:
    if isinstance(value, (str, bytes)) or not all(isinstance(piece, str) for piece in value):
        raise ConfigurationError(f"{where} must be a list of pieces of {of}, not {type(value).__name__}")
    try:
        "".join(value).encode()
    except UnicodeEncodeError as error:
        raise ConfigurationError(
            f"{where} has text that UTF-8 does not carry; bytes that are no text go into writes"
        ) from error
    return tuple(value)
