"""The dialect passes spanwire's conformance kit. Each of its tests says what it proves, and where to look if it fails."""

from __future__ import annotations

import server

from spanwire.testing import DialectConformance, Script


class TestAnthropic(DialectConformance):
    dialect = "anthropic"
    url = "https://api.anthropic.com"

    def stream(self, script: Script) -> bytes:
        return b"".join(server.events(script))

    def whole(self, script: Script) -> bytes:
        return server.whole(script)

    def error(self, status: int, message: str) -> bytes:
        return server.error(status, message)

    def error_event(self, message: str) -> bytes:
        return b"event: error\ndata: " + server.error(500, message) + b"\n\n"
