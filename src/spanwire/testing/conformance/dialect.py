"""The kit for dialects on HTTP with server-sent events. Pure: bytes in, chunks out, and no server."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from ...calls import Call, Chunk, ReplyBuilder, Usage
from ...endpoint import Endpoint
from ...errors import AuthenticationFailed, RateLimited, ServerError, SpanwireError, Truncated
from ...plugins import Registry
from ...transport import Dialect
from ...wire.sse import EventStreamParser
from ..script import Script, ScriptedTool
from .answers import UNICODE, WORDS
from .registration import overridden

__all__ = ["DialectConformance"]

KEY = "sk-kit-0123456789-key"
PROMPT = "kit prompt text"


class DialectConformance:
    """Subclass it in a test file, with a name that begins with ``Test``, and write what a server of the dialect sends.

    Attributes:
        dialect: its name, as in ``Endpoint(dialect=...)``.
        url: an endpoint's URL, whose scheme finds the transport.
        plugin: an object with hooks, or the name of a module with them; left out for an installed plugin.
        reasoning, tools, usage: whether its servers have them.
    """

    dialect: ClassVar[str]
    url: ClassVar[str] = "http://127.0.0.1:1/v1"
    plugin: ClassVar[object | None] = None
    reasoning: ClassVar[bool] = True
    tools: ClassVar[bool] = True
    usage: ClassVar[bool] = True

    # --- what an author writes --------------------------------------------------------------------------------------

    def stream(self, script: Script) -> bytes:
        """The event stream that a server sends for this script, to its end."""
        raise NotImplementedError

    def whole(self, script: Script) -> bytes:
        """The body that a server sends for it where the call is not streamed."""
        raise NotImplementedError

    def error(self, status: int, message: str) -> bytes:
        """The body that a server sends with an error status."""
        raise NotImplementedError

    def error_event(self, message: str) -> bytes | None:
        """The event that says, in the middle of a stream, that the server failed; None where there is none."""
        return None

    # --- what tests use ---------------------------------------------------------------------------------------------

    def found(self) -> tuple[Endpoint, Dialect]:
        """An endpoint of the dialect, and what was registered for it."""
        plugin = self.plugin
        given = [importlib.import_module(plugin) if isinstance(plugin, str) else plugin] if plugin is not None else []
        registry = Registry(given)
        endpoint = Endpoint(self.url, dialect=self.dialect, proxy=None)
        found = registry.dialect_for(endpoint, registry.spec_for(endpoint))
        assert found is not None, f"no plugin has registered the dialect {self.dialect!r}"
        return endpoint, found

    def script(self) -> Script:
        """An answer with all that the dialect has."""
        tools = (ScriptedTool("search", ['{"q', '": 1}'], id="call_a"), ScriptedTool("noop", ["{}"], id="call_b"))
        return Script(
            reasoning=("First,", " think") if self.reasoning else (),
            tokens=(*WORDS, *UNICODE),
            tool_calls=tools if self.tools else (),
            usage=Usage(7, 11, 18) if self.usage else None,
        )

    def call(self) -> Call:
        """A chat call."""
        return Call.chat("the-model", [{"role": "user", "content": PROMPT}], temperature=0.5)

    def decode(self, data: bytes, step: int | None = None) -> list[Chunk]:
        """What the dialect makes of a stream that ends after ``data``, as the transport would ask it."""
        _, dialect = self.found()
        decoder = dialect.codec.decoder(self.call(), streamed=True)
        chunks: list[Chunk] = []

        def event(name: bytes, payload: bytes) -> None:
            if not decoder.done:
                chunk = decoder.event(name, payload)
                if chunk is not None:
                    chunks.append(chunk)

        parser = EventStreamParser(event)
        for at in range(0, len(data), step or max(len(data), 1)):
            parser.feed(data[at : at + (step or len(data))])
        last = decoder.end()
        return [*chunks, last] if last is not None else chunks

    # --- tests ------------------------------------------------------------------------------------------------------

    def test_it_is_registered_on_its_transport(self) -> None:
        """Proves: the dialect is found by its name, on the transport of the URL's scheme.

        If it fails: does ``register_dialects()`` carry ``@spanwire.hookimpl``, and is ``transport`` the transport's name?
        A dialect in a distribution of its own comes in by an entry point in ``spanwire.plugins``.
        """
        _, dialect = self.found()
        assert dialect.name == self.dialect
        for name in ("encode", "credentials", "decoder", "error"):
            assert callable(getattr(dialect.codec, name, None)), f"the codec has no {name}()"
        assert "chat" in dialect.operations

    def test_a_call_is_encoded_whole(self) -> None:
        """Proves: model, prompt and parameters are in the request, and a stream is asked for only where it is wanted.

        If it fails: look at what ``encode()`` leaves out; parameters that it does not know belong into the body as they are.
        """
        endpoint, dialect = self.found()
        whole = dialect.codec.encode(self.call(), endpoint, streamed=False)
        streamed = dialect.codec.encode(self.call(), endpoint, streamed=True)
        for path, body, _headers in (whole, streamed):
            assert path.startswith("/"), "the path is below the endpoint's URL"
            assert isinstance(body, bytes)
            text = body.decode()
            assert "the-model" in text + path
            assert PROMPT in text
            assert "0.5" in text
        assert whole != streamed, "the server cannot tell whether a stream is wanted"

    def test_the_key_is_in_its_headers_alone(self) -> None:
        """Proves: ``credentials()`` gives headers with the key; neither the path nor the body has it.

        If it fails: a key in a path is logged by every proxy. ``encode()`` is never given it.
        """
        endpoint, dialect = self.found()
        headers = dialect.codec.credentials(KEY)
        assert any(KEY in value for value in headers.values())
        path, body, more = dialect.codec.encode(self.call(), endpoint, streamed=True)
        assert KEY not in f"{path} {body!r} {more}"
        assert KEY not in repr(dialect.codec)

    @pytest.mark.parametrize("step", [None, 1, 7], ids=["at once", "bytes", "pieces"])
    def test_a_stream_is_decoded_whole_and_in_order(self, step: int | None) -> None:
        """Proves: reasoning, text, tool calls, finish reason and usage come out as the script has them, once each.

        If it fails: compare ``stream()`` with what a real server sends; then look at ``event()`` of the decoder.
        """
        script = self.script()
        reply = _join(self.decode(self.stream(script), step))
        assert reply.text == "".join(script.tokens)
        assert reply.reasoning == "".join(script.reasoning)
        tools = [(tool.id, tool.name, tool.arguments) for tool in reply.tool_calls]
        assert tools == [(tool.id, tool.name, "".join(tool.arguments)) for tool in script.tool_calls]
        assert reply.finish_reason == script.finish, "finish reasons are OpenAI's: stop, length, tool_calls, ..."
        assert reply.usage is None or _same_usage(reply.usage, script)
        assert (reply.usage is not None) == self.usage

    def test_a_whole_answer_is_the_joined_stream(self) -> None:
        """Proves: ``whole()`` says the same of an answer as the events do.

        If it fails: the two decoders disagree about a field; the message names it.
        """
        _, dialect = self.found()
        script = self.script()
        streamed = _join(self.decode(self.stream(script)))
        item = dialect.codec.decoder(self.call(), streamed=False).whole(self.whole(script))
        assert isinstance(item, Chunk)
        whole = _join([item])
        for name in ("text", "reasoning", "tool_calls", "finish_reason", "usage"):
            assert getattr(whole, name) == getattr(streamed, name), name

    def test_an_empty_answer_is_an_answer(self) -> None:
        """Proves: no text, a finish reason, and no error.

        If it fails: an empty text is no missing text.
        """
        reply = _join(self.decode(self.stream(Script(usage=None))))
        assert (reply.text, reply.finish_reason) == ("", "stop")

    def test_a_stream_that_ends_too_early_is_truncated(self) -> None:
        """Proves: cut after any event before the finish reason, the answer is Truncated, and what had come was delivered.

        If it fails: ``end()`` raises Truncated unless the finish reason, or the terminal event, was seen.
        """
        script = Script(tokens=WORDS, usage=None)
        for cut, part in enumerate(_parts(self.stream(script))):
            chunks: list[Chunk] = []
            try:
                chunks = self.decode(part)
            except Truncated:
                continue
            reply = _join(chunks)
            assert reply.finish_reason == "stop", f"cut after {cut} events, {reply.text!r} passes for an answer"
            assert reply.text == "".join(WORDS)

    @pytest.mark.parametrize(
        ("status", "kind"), [(401, AuthenticationFailed), (429, RateLimited), (500, ServerError)], ids=str
    )
    def test_an_error_status_says_what_the_server_said(self, status: int, kind: type[SpanwireError]) -> None:
        """Proves: ``error()`` gives the error of the status, with the server's words; also for a body that is no JSON.

        If it fails: ``spanwire.errors.server_error`` makes it of a status and a message.
        """
        _, dialect = self.found()
        error = dialect.codec.error(status, {}, self.error(status, "the disk is full"), None)
        assert isinstance(error, kind)
        assert "the disk is full" in str(error)
        for body in (b"", b"<html>no</html>", b"\xff{"):
            assert isinstance(dialect.codec.error(status, {}, body, None), kind)

    def test_an_error_in_the_middle_of_a_stream_is_raised(self) -> None:
        """Proves: an error event is a ServerError with the server's words, not the end of an answer.

        If it fails: ``event()`` has to look for it in every event.
        """
        event = self.error_event("the disk is full")
        if event is None:
            pytest.skip("this dialect has no event for an error")
        *_, started = [part for at, part in enumerate(_parts(self.stream(Script(tokens=WORDS)))) if at <= 3]
        with pytest.raises(ServerError, match="the disk is full"):
            self.decode(started + event)

    def test_garbage_is_a_typed_error(self) -> None:
        """Proves: events and bodies that are not of the dialect raise an error of spanwire's, or are passed over.

        If it fails: turn what the JSON library raises into ProtocolError.
        """
        _, dialect = self.found()
        for data in (
            b"data: {\n\n",
            b"data: []\n\n",
            b'data: "x"\n\n',
            b"data: \xff\xfe\n\n",
            b'data: {"choices": 5}\n\n',
        ):
            with pytest.raises(SpanwireError):
                self.decode(data)
        for body in (b"{", b"[]", b"5", b"\xff", b"{}"):
            with pytest.raises(SpanwireError):
                dialect.codec.decoder(self.call(), streamed=False).whole(body)

    def test_no_test_is_overridden_without_a_reason(self) -> None:
        """Proves: this class runs the kit's own tests.

        If it fails: put ``@pytest.mark.xfail(reason=...)`` on the tests that you override.
        """
        assert overridden(type(self), "spanwire.testing.conformance") == []


def _join(chunks: list[Chunk]) -> Any:
    builder = ReplyBuilder()
    builder.add(chunks)
    return builder.reply()


def _same_usage(usage: Usage, script: Script) -> bool:
    expected = script.usage
    assert isinstance(expected, Usage)
    return (usage.input_tokens, usage.output_tokens) == (expected.input_tokens, expected.output_tokens)


def _parts(stream: bytes) -> Iterator[bytes]:
    """The stream, cut after each of its events, the whole one not among them."""
    at = 0
    while (end := stream.find(b"\n\n", at)) >= 0 and end + 2 < len(stream):
        at = end + 2
        yield stream[:at]
