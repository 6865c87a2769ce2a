"""The Responses dialect passes both kits: that of dialects, and that of transports when it is spoken on one."""

# ruff: noqa: RUF012 - settings of a class, as every author of a transport writes them

from __future__ import annotations

import msgspec
import pytest
from spanwire_sse.loopback import _Report, _responses_events

from spanwire.testing import DialectConformance, Request, Script, TransportConformance
from spanwire.testing.responses_events import error_event, whole_response

BODY = {"model": "the-model", "input": "x"}


class TestResponses(DialectConformance):
    dialect = "responses"

    def stream(self, script: Script) -> bytes:
        request = Request(method="POST", path="/", query="", headers={}, raw=b"", connection=1)
        return b"".join(data for *_, data in _responses_events(script, BODY, _Report(script, request)))

    def whole(self, script: Script) -> bytes:
        return msgspec.json.encode(whole_response(script, BODY))

    def error(self, status: int, message: str) -> bytes:
        return msgspec.json.encode({"error": {"message": message, "code": status}})

    def error_event(self, message: str) -> bytes:
        event = error_event(message, code="server_error", nested=False)
        return b"event: error\ndata: %b\n\n" % msgspec.json.encode(event)


@pytest.mark.long
class TestHTTP1(TransportConformance):
    scheme = "http"
    settings = {"dialect": "responses"}
