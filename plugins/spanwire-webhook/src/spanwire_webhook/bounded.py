"""uvicorn's fast HTTP protocol with bounds on a request's head, which it lacks: bytes, and seconds."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["protocol_class"]

_REFUSAL = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


def protocol_class(most_head_bytes: int, head_s: float) -> type[HttpToolsProtocol]:
    """A protocol that answers 431 to a larger head, hangs up on a slower one, and logs no addresses."""

    class BoundedProtocol(HttpToolsProtocol):
        """Counts what comes before the head is complete."""

        _in_head = True
        _head_bytes = 0
        _head_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.access_log = False
            self._await_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._head_arrived()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if not self._in_head:
                return
            self._head_bytes += len(data)
            if self._head_bytes > most_head_bytes and not self.transport.is_closing():
                self.transport.write(_REFUSAL)
                self.transport.close()

        def on_message_begin(self) -> None:
            self._in_head, self._head_bytes = True, 0
            if self._head_timer is None:
                self._await_head()
            super().on_message_begin()

        def on_headers_complete(self) -> Any:
            self._in_head, self._head_bytes = False, 0
            self._head_arrived()
            return super().on_headers_complete()

        def _await_head(self) -> None:
            self._head_timer = self.loop.call_later(head_s, self.transport.abort)

        def _head_arrived(self) -> None:
            timer, self._head_timer = self._head_timer, None
            if timer is not None:
                timer.cancel()

    return BoundedProtocol
