"""The plain ``websockets`` client, for tests of the loopback server: no transport of ours in between."""

from __future__ import annotations

import contextlib
import json
from typing import Any, Self

from websockets.sync.client import ClientConnection, connect

from spanwire.testing import LoopbackServer

__all__ = ["PATIENCE_S", "Plain", "kinds", "text_of"]

#: Nothing takes longer unless something hangs.
PATIENCE_S = 10.0
_SETTINGS: dict[str, Any] = {"proxy": None, "compression": None, "open_timeout": PATIENCE_S, "close_timeout": 1}


class Plain:
    """One connection. Use as a context manager; ``more`` goes to ``websockets.connect``."""

    def __init__(self, server: LoopbackServer, path: str = "/v1/responses", **more: Any) -> None:
        self._stack = contextlib.ExitStack()
        self.ws: ClientConnection = self._stack.enter_context(connect(server.origin + path, **{**_SETTINGS, **more}))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def send(self, type: str, **fields: Any) -> None:
        self.ws.send(json.dumps({"type": type, **fields}))

    def create(self, input: Any = "Say hello", model: str = "m", **fields: Any) -> None:
        self.send("response.create", model=model, input=input, **fields)

    def event(self) -> dict[str, Any]:
        event: dict[str, Any] = json.loads(self.ws.recv(timeout=PATIENCE_S))
        return event

    def until(self, *types: str) -> list[dict[str, Any]]:
        """All events up to the first of one of these types."""
        events = [self.event()]
        while events[-1]["type"] not in types:
            events.append(self.event())
        return events

    def answer(self) -> list[dict[str, Any]]:
        """All events of a response, or an error."""
        return self.until("response.completed", "response.incomplete", "response.failed", "response.done", "error")

    def turn(self, *arguments: Any, **fields: Any) -> list[dict[str, Any]]:
        self.create(*arguments, **fields)
        return self.answer()


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """Their types, those that repeat once."""
    found: list[str] = []
    for event in events:
        if not found or found[-1] != event["type"]:
            found.append(event["type"])
    return [kind.removeprefix("response.") for kind in found]


def text_of(events: list[dict[str, Any]], kind: str = "output_text") -> str:
    return "".join(event["delta"] for event in events if event["type"] == f"response.{kind}.delta")
