"""websockets (asyncio): a span for each response on a connection to ``/responses`` or ``/realtime``.

::

    client.realtime.connect(model="m", websocket_connection_options=websocket_options())

One connection carries many responses, so the connection is no span: each ``response.create`` begins a call, which the
server's terminal event ends; one that the server begins by itself, since somebody has spoken, begins with its first event.
Messages are seen when they arrive. Only the objects of such connections get methods of ours, others none.
"""

from __future__ import annotations

import logging
import time
from types import ModuleType
from typing import Any
from urllib.parse import parse_qs, urlsplit

from spanwire.endpoint import Endpoint
from spanwire.errors import ConfigurationError
from spanwire.manager import ConnectionManager
from spanwire.net.sockets import min_rtt_ns
from spanwire.pool import _ids
from spanwire.timeline import ConnectionUse
from spanwire.wire.along import Along
from spanwire.witness import Witness

from .patches import Patches
from .recognise import Rules
from .turns import Turns, asked, told
from .watched import Settings, endpoint_of

__all__ = ["patch_websockets", "websocket_options"]

_log = logging.getLogger("spanwire.instrument")
_now = time.perf_counter_ns
_PATHS = ("/responses", "/realtime")
#: How much of a message in fragments is kept, in bytes: events of text and audio are far below.
_MAX_BYTES = 16 * 1024 * 1024


def websocket_options(
    *, rules: Rules | None = None, manager: ConnectionManager | None = None, **options: Any
) -> dict[str, Any]:
    """Options for ``AsyncOpenAI().responses.connect()`` and ``.realtime.connect()``, or ``websockets.connect()`` itself.

    Args:
        rules: hosts, and further paths, see :class:`Rules`.
        manager: whose telemetry, observers and tables are used; the process's default one if it is not given.
        options: others, as ``websockets.asyncio.client.connect`` takes them.

    Raises:
        ConfigurationError: websockets is not installed, or too old.
    """
    try:
        from websockets.asyncio.client import ClientConnection
    except ImportError as error:
        raise ConfigurationError(
            "websockets is not installed, or older than 14: pip install 'websockets>=14'"
        ) from error
    base = options.get("create_connection") or ClientConnection
    return {**options, "create_connection": _class_for(base, Settings(rules=rules, manager=manager))}


def _class_for(base: Any, settings: Settings) -> Any:
    class WatchedConnection(base):  # type: ignore[misc]
        async def handshake(self, *args: Any, **kwargs: Any) -> None:
            await super().handshake(*args, **kwargs)
            attach(self, settings)

    return WatchedConnection


class _Turn:
    """One response."""

    __slots__ = ("witness",)

    def __init__(self, watched: _Watched, model: str, params: dict[str, Any]) -> None:
        manager = watched.settings.manager
        more: dict[str, Any] = {}
        if manager is not None:
            more = {"telemetry": manager.telemetry, "registry": manager.registry}
        self.witness = Witness.begin(
            watched.endpoint,
            operation="chat",
            model=model,
            streamed=True,
            body_params=params,
            transport="websockets",
            **more,
        )
        self.witness.marks.use = watched.use()

    def take(self, data: bytes, at_ns: int) -> None:
        """A message of the server about it."""
        witness = self.witness
        if witness.along is None:
            witness.along = Along(content_type="text/event-stream")
            witness.marks.first_byte_ns = at_ns
        witness.along.feed(b"data: " + data + b"\n\n", at_ns)


class _Watched:
    """One connection. Its methods never raise but what the library's do."""

    def __init__(
        self, connection: Any, settings: Settings, endpoint: Endpoint, model: str, patches: Patches | None
    ) -> None:
        self.settings = settings
        self.endpoint = endpoint
        self._patches = patches
        self._model = model
        self._made_ns = _now()
        self._idle_ns = 0
        self._id = f"c{next(_ids)}"
        self._count = 0
        self._turns: Turns[_Turn] = Turns()
        self._pieces: list[bytes] = []
        self._size = 0
        self._socket = connection.transport.get_extra_info("socket")
        self._send = connection.send
        self._process_event = connection.process_event
        self._protocol = connection.protocol
        self._connection = connection

    @property
    def _on(self) -> bool:
        """Calls may begin: not after everything was undone."""
        return self._patches is None or self._patches.on

    def use(self) -> ConnectionUse:
        """The connection as the next turn finds it."""
        now_ns = _now()
        first = self._count == 0
        self._count += 1
        idle_s = (now_ns - self._idle_ns) / 1e9 if self._idle_ns else None
        age_s = None if first else (now_ns - self._made_ns) / 1e9
        return ConnectionUse(self._id, not first, age_s, idle_s, "websocket", engine="websockets")

    async def send(self, message: Any, *args: Any, **kwargs: Any) -> Any:
        """In the place of the connection's."""
        turn = None
        if isinstance(message, (str, bytes)) and self._on:
            try:
                asks = asked(message)
                if asks is not None:
                    turn = _Turn(self, asks.model or self._model, asks.params)
                    self._turns.ask(turn)
                    turn.witness.marks.begin("send", _now())
            except Exception:  # noqa: BLE001 - the call goes on without us
                _log.warning("a message cannot be watched", exc_info=True)
        if turn is None:
            return await self._send(message, *args, **kwargs)
        try:
            result = await self._send(message, *args, **kwargs)
        except BaseException as error:
            self._turns.drop(turn)
            turn.witness.end("error" if isinstance(error, Exception) else "cancelled", error)
            raise
        marks = turn.witness.marks
        marks.sent_ns = _now()
        marks.end("send", marks.sent_ns)
        return result

    def process_event(self, event: Any) -> None:
        """In the place of the connection's: a frame has arrived."""
        at_ns = _now()
        self._process_event(event)
        try:
            self._frame(event, at_ns)
        except Exception:  # noqa: BLE001 - as above
            _log.warning("a message cannot be watched", exc_info=True)

    def _frame(self, frame: Any, at_ns: int) -> None:
        if int(frame.opcode) > 2:  # continuation, text, binary; then control frames
            return
        data = bytes(frame.data)
        if not frame.fin or self._pieces:
            self._size += len(data)
            if self._size <= _MAX_BYTES:
                self._pieces.append(data)
            if not frame.fin:
                return
            data = b"".join(self._pieces) if self._size <= _MAX_BYTES else b""
            self._pieces, self._size = [], 0
        event = told(data)
        if event is None:
            return
        turn = self._turns.find(event)
        if turn is None:
            if event.type != "response.created" or event.id is None or not self._on:
                return
            turn = _Turn(self, self._model, {})
            self._turns.begin(event.id, turn)
        turn.take(event.data, at_ns)
        if event.end is not None:
            self._idle_ns = at_ns
            if self._socket is not None:
                turn.witness.marks.rtt_ns = min_rtt_ns(self._socket)
            turn.witness.end(event.end, None, at_ns)

    def lost(self, _future: Any) -> None:
        """The connection has ended."""
        try:
            for name in ("send", "process_event"):  # breaks the cycle
                vars(self._connection).pop(name, None)
            protocol = self._protocol
            by_us = protocol.close_sent is not None and not protocol.close_rcvd_then_sent
            for turn in self._turns.close():
                if by_us:
                    turn.witness.end("closed_by_caller")
                else:
                    turn.witness.end("error", protocol.close_exc)
        except Exception:  # noqa: BLE001 - as above
            _log.warning("the end of a connection cannot be seen", exc_info=True)


def attach(connection: Any, settings: Settings, patches: Patches | None = None) -> None:
    """Watch a connection whose handshake is done, if it is one for inference. Never raises."""
    try:
        if "process_event" in vars(connection):
            return
        path, _, query = connection.request.path.partition("?")
        path = path.rstrip("/")
        rules = settings.rules
        if not path.endswith((*_PATHS, *rules.paths)):
            return
        where = urlsplit(f"//{connection.request.headers['Host']}")
        host = where.hostname or ""
        if not rules.takes_host(host):
            return
        secure = connection.transport.get_extra_info("ssl_object") is not None
        (model,) = parse_qs(query).get("model", [""])[:1]
        endpoint = endpoint_of("wss" if secure else "ws", host, where.port)
        watched = _Watched(connection, settings, endpoint, model, patches)
        connection.connection_lost_waiter.add_done_callback(watched.lost)
        connection.send = watched.send
        connection.process_event = watched.process_event
    except Exception:  # noqa: BLE001 - the connection goes on without us
        _log.warning("a connection cannot be watched", exc_info=True)


# ----------------------------------------------------------------------------------------------------- without a line of code


def patch_websockets(client: ModuleType, patches: Patches, settings: Settings) -> None:
    """Connections that are made from now on."""

    def handshake(original: Any) -> Any:
        async def handshake(self: Any, *args: Any, **kwargs: Any) -> None:
            await original(self, *args, **kwargs)
            if patches.on:
                attach(self, settings, patches)

        return handshake

    patches.replace(client.ClientConnection, "handshake", handshake)
