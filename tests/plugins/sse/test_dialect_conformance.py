"""The built-in dialect passes the kit for dialects; a server of it is what the loopback server plays."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from spanwire_sse.loopback import _chat_events, _Report, _whole_chat

from spanwire.errors import Truncated
from spanwire.testing import DialectConformance, Request, Script

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
