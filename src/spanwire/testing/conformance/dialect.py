"""The kit for dialects on HTTP with server-sent events.

First pure, bytes in and chunks out. Then calls through a manager, to a loopback server that sends what the author wrote.
"""

# A manager and a stream in it are two steps; an error may come anywhere while a stream is entered and read.
# ruff: noqa: SIM117

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar
from urllib.parse import urlsplit

import pytest

from ...calls import Call, Chunk, Reply, ReplyBuilder, Usage
from ...endpoint import Endpoint, Retries
from ...errors import AuthenticationFailed, RateLimited, ServerError, SpanwireError, Truncated
from ...plugins import Registry
from ...sync import SyncConnectionManager
from ...transport import Dialect
from ...wire.sse import EventStreamParser
from ..loopback import LoopbackServer, Request
from ..script import Script, ScriptedTool
from .answers import UNICODE, WORDS
from .registration import overridden

__all__ = ["DialectConformance"]

KEY = "sk-kit-0123456789-key"
PROMPT = "kit prompt text"
#: Between two events, in seconds: a timer of a busy machine is still seen apart.
GAP_S = 0.03


class DialectConformance:
    """Subclass it in a test file, with a name that begins with ``Test``, and write what a server of the dialect sends.

    Attributes:
        dialect: its name, as in ``Endpoint(dialect=...)``.
        url: an endpoint's URL, whose scheme finds the transport.
        plugin: an object with hooks, or the name of a module with them; left out for an installed plugin.
        settings: further fields of every endpoint, such as ``{"options": {...}}``.
        reasoning, tools, usage: whether its servers have them.
    """

    dialect: ClassVar[str]
    url: ClassVar[str] = "http://127.0.0.1:1/v1"
    plugin: ClassVar[object | None] = None
    settings: ClassVar[Mapping[str, Any]] = {}
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

    def plugins(self) -> list[object]:
        """The plugin, where it does not come in by an entry point."""
        plugin = self.plugin
        if plugin is None:
            return []
        return [importlib.import_module(plugin) if isinstance(plugin, str) else plugin]

    def endpoint(self, url: str, **more: Any) -> Endpoint:
        """An endpoint of the dialect; no call is made again."""
        given = {"dialect": self.dialect, "proxy": None, "retries": Retries(max_attempts=1), **self.settings, **more}
        return Endpoint(url, **given)

    def server(self, *answers: Script) -> LoopbackServer:
        """A server that sends these, one for each call, whatever path it is asked at."""
        return LoopbackServer(answers)

    def endpoint_of(self, server: LoopbackServer) -> Endpoint:
        """The server's, with the path of :attr:`url` and a key."""
        origin = urlsplit(server.url)
        return self.endpoint(f"{origin.scheme}://{origin.netloc}{urlsplit(self.url).path}", api_key=KEY)

    def streaming(self, script: Script, **more: Any) -> Script:
        """For :meth:`server`: the events that a server of the dialect sends for it, each in a write of its own."""
        writes = events_of(self.stream(script))
        return Script(writes=writes, content_type="text/event-stream", write_gap_s=script.gap_s, **more)

    def found(self) -> tuple[Endpoint, Dialect]:
        """An endpoint of the dialect, and what was registered for it."""
        registry = Registry(self.plugins())
        endpoint = self.endpoint(self.url)
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
        self._assert_said(_join(self.decode(self.stream(script), step)), script)

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

    # --- tests, through a manager -----------------------------------------------------------------------------------

    def test_calls_go_through_a_manager(self) -> None:
        """Proves: over HTTP a streamed call and a whole one bring the script's answer, on one connection; what was asked
        and the key reach the server, below the URL's path; the timeline adds up, and knows when the content came.

        If it fails: the pure tests of the same names say more. A stream on a connection of its own means that its end
        was not found: ``decoder.done`` has to be true after the terminal event, and that event gives no chunk.
        """
        script = self.script()
        with self.server(self.streaming(script), Script(body=self.whole(script))) as server:
            endpoint = self.endpoint_of(server)
            with SyncConnectionManager(plugins=self.plugins()) as manager:
                with manager.stream(endpoint, self.call()) as stream:
                    chunks = list(stream)
                whole = manager.complete(endpoint, self.call())
            assert server.connections == 1
            for request in server.requests:
                self._assert_asked(request, endpoint)
        for reply in (_join(chunks), stream.reply, whole):
            self._assert_said(reply, script)
        for timeline in (stream.timeline, whole.timeline):
            assert timeline is not None
            assert timeline.outcome == "completed"
            total_s = sum(segment.duration_s for segment in timeline.segments.values())
            assert abs(total_s - timeline.total_s) < 1e-3, f"{timeline}\nthe segments add up to {total_s} s"
        assert stream.timeline.first_content_s is not None, str(stream.timeline)

    def test_a_piece_is_there_when_it_has_come(self) -> None:
        """Proves: of a stream whose events come one after the other each piece is given at once.

        If it fails: the decoder keeps text back until the end.
        """
        script = Script(tokens=WORDS, usage=None, gap_s=GAP_S)
        with self.server(self.streaming(script)) as server, SyncConnectionManager(plugins=self.plugins()) as manager:
            with manager.stream(self.endpoint_of(server), self.call()) as stream:
                texts = [chunk.text for chunk in stream if chunk.text]
        assert texts == list(WORDS)
        first_s = stream.timeline.first_content_s
        assert first_s is not None
        later_s = stream.timeline.total_s - first_s
        assert later_s > GAP_S * (len(WORDS) - 1) / 2, f"all came {later_s} s before the end\n{stream.timeline}"

    def test_a_stream_that_breaks_off_is_truncated_for_the_caller(self) -> None:
        """Proves: an answer that ends without its finish reason is Truncated, after what had come, which is on ``.reply``.

        If it fails: ``end()`` raises Truncated unless the finish reason, or the terminal event, was seen.
        """
        events = events_of(self.stream(Script(tokens=WORDS, usage=None)))
        cut = self._up_to(events, WORDS[1])
        with self.server(Script(writes=cut, content_type="text/event-stream")) as server:
            error = self._fails(server, Truncated)
            assert len(server.requests) == 1
        assert error.reply is not None
        assert error.reply.text == "".join(WORDS[:2])

    @pytest.mark.parametrize(
        ("status", "kind"), [(401, AuthenticationFailed), (429, RateLimited), (500, ServerError)], ids=str
    )
    def test_a_refusal_reaches_the_caller(self, status: int, kind: type[ServerError]) -> None:
        """Proves: an error status is raised with the server's words, its headers, and the wait that it asks for.

        If it fails: hand ``headers`` and ``retry_after_s`` of ``error()`` on to ``spanwire.errors.server_error``.
        """
        refusal = Script(status=status, body=self.error(status, "the disk is full"), headers={"retry-after": "7"})
        with self.server(refusal) as server:
            error = self._fails(server, kind)
        assert isinstance(error, ServerError)
        assert "the disk is full" in str(error)
        assert (error.status, error.retry_after_s) == (status, 7.0)
        assert error.headers["retry-after"] == "7"
        assert error.retryable == (status != 401)

    def test_an_error_in_a_stream_comes_after_what_had_come(self) -> None:
        """Proves: an error event in the middle is a ServerError for the caller, with the text before it on ``.reply``.

        If it fails: ``event()`` has to look for an error in every event.
        """
        event = self.error_event("the disk is full")
        if event is None:
            pytest.skip("this dialect has no event for an error")
        cut = self._up_to(events_of(self.stream(Script(tokens=WORDS, usage=None))), WORDS[1])
        with self.server(Script(writes=[*cut, event], content_type="text/event-stream")) as server:
            error = self._fails(server, ServerError)
        assert "the disk is full" in str(error)
        assert error.reply is not None
        assert error.reply.text == "".join(WORDS[:2])

    def _fails(self, server: LoopbackServer, kind: type[SpanwireError]) -> SpanwireError:
        endpoint = self.endpoint_of(server)
        with SyncConnectionManager(plugins=self.plugins()) as manager, pytest.raises(kind) as caught:
            with manager.stream(endpoint, self.call()) as stream:
                list(stream)
        assert KEY not in str(caught.value)
        assert caught.value.endpoint == endpoint.address
        return caught.value

    def _up_to(self, events: list[bytes], word: str) -> list[bytes]:
        """The first events, to the one that brings this word."""
        for count in range(1, len(events)):
            decoder = self.found()[1].codec.decoder(self.call(), streamed=True)
            text = ""

            def event(name: bytes, payload: bytes) -> None:
                nonlocal text
                chunk = decoder.event(name, payload)  # noqa: B023 - used up in this turn
                text += chunk.text if chunk is not None else ""

            EventStreamParser(event).feed(b"".join(events[:count]))
            if text.endswith(word):
                return events[:count]
        pytest.fail(f"{word!r} comes with the last event, or not at all")

    def _assert_asked(self, request: Request, endpoint: Endpoint) -> None:
        assert request.path.startswith(endpoint.path), f"{request.path} is not below the endpoint's URL"
        text = request.raw.decode()
        assert PROMPT in text
        assert "the-model" in text + request.path
        assert any(KEY in value for value in request.headers.values()), "the key does not reach the server"
        assert KEY not in f"{request.path}?{request.query} {text}"

    def _assert_said(self, reply: Reply, script: Script) -> None:
        assert reply.text == "".join(script.tokens)
        assert reply.reasoning == "".join(script.reasoning)
        tools = [(tool.id, tool.name, tool.arguments) for tool in reply.tool_calls]
        assert tools == [(tool.id, tool.name, "".join(tool.arguments)) for tool in script.tool_calls]
        assert reply.finish_reason == script.finish, "finish reasons are OpenAI's: stop, length, tool_calls, ..."
        assert reply.usage is None or _same_usage(reply.usage, script)
        assert (reply.usage is not None) == self.usage

    def test_no_test_is_overridden_without_a_reason(self) -> None:
        """Proves: this class runs the kit's own tests.

        If it fails: put ``@pytest.mark.xfail(reason=...)`` on the tests that you override.
        """
        assert overridden(type(self), "spanwire.testing.conformance") == []


def events_of(stream: bytes) -> list[bytes]:
    """The stream's events, and what comes after the last of them."""
    parts = stream.split(b"\n\n")
    return [part + b"\n\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


def _join(chunks: list[Chunk]) -> Reply:
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
