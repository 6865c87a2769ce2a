"""An HTTP/2 server that does what a test says, frame by frame: the other side of ``h2``."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.settings
from hyperframe.frame import GoAwayFrame

E = TypeVar("E", bound=h2.events.Event)


class Server:
    """The other side of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.http = h2.connection.H2Connection(
            h2.config.H2Configuration(client_side=False, validate_outbound_headers=False, header_encoding="utf-8")
        )
        self.seen: list[h2.events.Event] = []
        self._unread: list[h2.events.Event] = []

    def hello(self, **values: int) -> None:
        """SETTINGS. Everything that comes is acknowledged only where a test does it."""
        self.http.local_settings = h2.settings.Settings(
            client=False,
            initial_values={h2.settings.SettingCodes[name.upper()]: value for name, value in values.items()},
        )
        self.http.initiate_connection()
        self.flush()

    def flush(self) -> None:
        data = self.http.data_to_send()
        if data:
            self.writer.write(data)

    async def read(self) -> None:
        data = await self.reader.read(1 << 16)
        if not data:
            raise asyncio.IncompleteReadError(b"", None)
        events = self.http.receive_data(data)
        self.flush()
        self.seen += events
        self._unread += events

    async def wait(self, kind: type[E], *, of: int | None = None) -> E:
        """The next event of this kind (and stream)."""
        while True:
            for at, event in enumerate(self._unread):
                if isinstance(event, kind) and of in (None, getattr(event, "stream_id", None)):
                    del self._unread[: at + 1]
                    return event
            self._unread = []
            await self.read()

    async def request(self) -> int:
        return (await self.wait(h2.events.RequestReceived)).stream_id

    def head(self, stream: int, *more: tuple[str, str], status: str = "200", end: bool = False) -> None:
        self.http.send_headers(stream, [(":status", status), *more], end_stream=end)
        self.flush()

    def data(self, stream: int, data: bytes, *, end: bool = False) -> None:
        self.http.send_data(stream, data, end_stream=end)
        self.flush()

    def answer(self, stream: int, body: bytes = b"hello", *more: tuple[str, str]) -> None:
        self.head(stream, *more)
        self.data(stream, body, end=True)

    def reset(self, stream: int, code: h2.errors.ErrorCodes) -> None:
        self.http.reset_stream(stream, code)
        self.flush()

    def goaway(self, last: int, code: int = 0) -> None:
        """Not by h2, which sends nothing any more afterwards."""
        self.raw(GoAwayFrame(0, last_stream_id=last, error_code=code))

    def raw(self, *frames: Any) -> None:
        self.writer.write(b"".join(frame if isinstance(frame, bytes) else frame.serialize() for frame in frames))
