"""The built-in dialect passes the kit for dialects; a server of it is what the loopback server plays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from spanwire_sse.codec import OpenAIChat, _Chat
from spanwire_sse.loopback import _chat_events, _Report, _whole_chat

from spanwire import Chunk, hookimpl
from spanwire.errors import Truncated, server_error
from spanwire.testing import DialectConformance, Request, Script
from spanwire.transport import Dialect

BODY = {"model": "the-model", "messages": [{"role": "user", "content": "x"}]}


def report(script: Script) -> _Report:
    return _Report(script, Request(method="POST", path="/", query="", headers={}, raw=b"", connection=1))


class TestOpenAI(DialectConformance):
    dialect = "openai"

    def stream(self, script: Script) -> bytes:
        return b"".join(data for *_, data in _chat_events(script, BODY, report(script)))

    def whole(self, script: Script) -> bytes:
        return _whole_chat(script, BODY, report(script))

    def error(self, status: int, message: str) -> bytes:
        return msgspec.json.encode({"error": {"message": message, "code": status}})

    def error_event(self, message: str) -> bytes:
        return b"data: %b\n\n" % self.error(500, message)


class Broken(TestOpenAI):
    """Loses the first piece of every stream, and takes any end for the end."""

    __test__ = False

    def decode(self, data: bytes, step: int | None = None) -> Any:
        try:
            return super().decode(data, step)[2:]
        except Truncated:
            return []


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("test_a_stream_is_decoded_whole_and_in_order", (None,)),
        ("test_a_whole_answer_is_the_joined_stream", ()),
        ("test_a_stream_that_ends_too_early_is_truncated", ()),
    ],
)
def test_a_broken_dialect_is_caught(name: str, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(AssertionError):
        getattr(Broken(), name)(*arguments)


class KeepsText(_Chat):
    """Gives the text when all of it is there."""

    def event(self, name: bytes, data: bytes) -> Chunk | None:
        chunk = super().event(name, data)
        self.kept = getattr(self, "kept", "") + (chunk.text if chunk is not None else "")
        if chunk is None or chunk.finish_reason is None:
            return None
        return msgspec.structs.replace(chunk, text=self.kept)


class NeverDone(_Chat):
    """Does not know the end when it sees it, and takes any for the end."""

    done = property(lambda self: False, lambda self, value: None)

    def end(self) -> None:
        return None


class KeepsErrors(_Chat):
    """Passes over what it does not understand."""

    def event(self, name: bytes, data: bytes) -> Chunk | None:
        return None if b'"error"' in data else super().event(name, data)


class Codec(OpenAIChat):
    """With another decoder, or with errors that say less."""

    def __init__(self, decoder: Callable[[], _Chat] = _Chat, **broken: Any) -> None:
        self._decoder = decoder
        self._broken = broken

    def decoder(self, call: Any, *, streamed: bool) -> Any:
        return self._decoder()

    def credentials(self, api_key: str) -> Any:
        return {} if "keyless" in self._broken else super().credentials(api_key)

    def error(self, status: int, headers: Any, body: bytes, retry_after_s: float | None) -> Any:
        found = super().error(status, headers, body, retry_after_s)
        return server_error(found.message, status=status) if "terse" in self._broken else found


@pytest.mark.parametrize(
    ("codec", "name", "arguments"),
    [
        (Codec(KeepsText), "test_a_piece_is_there_when_it_has_come", ()),
        (Codec(NeverDone), "test_a_stream_that_breaks_off_is_truncated_for_the_caller", ()),
        (Codec(KeepsErrors), "test_an_error_in_a_stream_comes_after_what_had_come", ()),
        (Codec(terse=True), "test_a_refusal_reaches_the_caller", (429, Exception)),
        (Codec(keyless=True), "test_calls_go_through_a_manager", ()),
    ],
)
def test_a_codec_that_fails_its_caller_is_caught(codec: Codec, name: str, arguments: tuple[Any, ...]) -> None:
    class Plugin:
        @hookimpl
        def register_dialects(self) -> list[Dialect]:
            return [Dialect(transport="sse", name="broken", codec=codec)]

    class Kit(TestOpenAI):
        __test__ = False
        dialect = "broken"
        plugin = Plugin()

    with pytest.raises((AssertionError, pytest.fail.Exception, Truncated)):
        getattr(Kit(), name)(*arguments)


def test_a_plugin_that_is_not_installed_passes() -> None:
    class Plugin:
        @hookimpl
        def register_dialects(self) -> list[Dialect]:
            return [Dialect(transport="sse", name="whole", codec=OpenAIChat())]

    class Kit(TestOpenAI):
        __test__ = False
        dialect = "whole"
        plugin = Plugin()

    Kit().test_calls_go_through_a_manager()
