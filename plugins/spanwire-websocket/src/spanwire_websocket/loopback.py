"""WebSocket for the loopback server: OpenAI's Responses, Realtime, and an echo, on the ``websockets`` library's server.

The last segment of the path decides: ``/v1/responses``, ``/v1/realtime`` or ``/raw``. Options (see
:class:`~spanwire_websocket.loopback_rules.Rules`) decide who is let in and for how long, scripts what is answered::

    with LoopbackServer(
        [Script.say("Hello")], part="websocket", options={"max_clients": 1, "when_full": "429"}
    ) as server:
        ...
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl as tls
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.server import ServerProtocol
from websockets.typing import Subprotocol

from spanwire.testing.loopback import Book
from spanwire.testing.responses_events import error_event

from .loopback_connection import GOODBYE_S, Gone, Peer
from .loopback_gate import Gate, kind_of
from .loopback_raw import Raw
from .loopback_realtime import Realtime
from .loopback_responses import Responses, Stored
from .loopback_rules import Rules

__all__ = ["PART", "WebSocketPart"]

_BACKLOG = 4096
#: asyncio accepts a connection some turns of the loop before it makes its transport, which fails, and leaves the socket
#: to nobody, if the server was closed in between (CPython 3.11 to 3.13: an assertion in Server._attach).
_ACCEPT_TURNS = 5

#: The library logs what clients do wrong, which the book records.
_logger = logging.getLogger("spanwire.testing.websocket")
_logger.setLevel(logging.CRITICAL + 1)


class _Listener:
    """See :class:`spanwire.testing.loopback.Listener`."""

    def __init__(self, server: Server, peers: set[Peer], uds: str | None) -> None:
        self._server = server
        self._peers = peers
        self._uds = uds
        self.address: tuple[str, int] | None = None
        if uds is None:
            self.address = next(iter(server.sockets)).getsockname()[:2]

    def disconnect(self, *, reset: bool) -> None:
        for peer in list(self._peers):
            if reset:
                peer.drop(reset=True)
            else:
                peer.close_soon(1001, "going away")

    async def aclose(self) -> None:
        loop = asyncio.get_running_loop()
        for listening in self._server.sockets:
            with contextlib.suppress(NotImplementedError):  # Windows' loop, which accepts in another way
                loop.remove_reader(listening.fileno())
        for _ in range(_ACCEPT_TURNS):
            await asyncio.sleep(0)
        self._server.close(close_connections=False)
        peers = list(self._peers)
        for peer in peers:
            peer.drop()
        await asyncio.gather(*(peer.wait_closed() for peer in peers))
        # Not for ever: from Python 3.12 on it also waits for clients that never finish their TLS handshake.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._server.wait_closed(), GOODBYE_S)
        self._remove_socket()

    def _remove_socket(self) -> None:
        if self._uds is not None:
            with contextlib.suppress(OSError):  # Python 3.13 removes it by itself
                Path(self._uds).unlink()


class WebSocketPart:
    """See :class:`spanwire.testing.loopback.LoopbackPart`. The options are those of ``Rules``.

    Raises:
        ConfigurationError: a bad option.
    """

    name = "websocket"
    alpn = ("http/1.1",)

    def __init__(self, **options: Any) -> None:
        self._rules = Rules.of(options)

    def configured(self, options: Mapping[str, Any]) -> WebSocketPart:
        """A part with these options instead."""
        return WebSocketPart(**options)

    async def start(
        self, book: Book, *, host: str, port: int, uds: str | None, ssl: tls.SSLContext | None
    ) -> _Listener:
        rules = self._rules
        peers: set[Peer] = set()
        stored: Stored = {}
        gate = Gate(rules)

        def connection(protocol: ServerProtocol, server: Server, **settings: Any) -> Peer:
            return Peer(
                protocol,
                server,
                book=book,
                peers=peers,
                on_lost=gate.lost,
                answers_pings=rules.answers_pings,
                **settings,
            )

        async def handler(connection: ServerConnection) -> None:
            assert isinstance(connection, Peer)
            await _serve(connection, rules, stored)

        where: dict[str, Any] = {"host": host, "port": port} if uds is None else {"unix": True, "path": uds}
        server = await serve(
            handler,
            subprotocols=[Subprotocol(name) for name in rules.subprotocols] or None,
            compression="deflate" if rules.compression else None,
            process_request=gate.upgrade,
            open_timeout=None,
            ping_interval=rules.ping_interval_s,
            ping_timeout=rules.ping_timeout_s,
            close_timeout=GOODBYE_S,
            max_size=rules.max_size,
            # Told as soon as the kernel does not take everything, so that a cut waits for what was sent before. Not
            # high=0: with TLS, asyncio then pauses at every write and never says that writing goes on.
            write_limit=(1, 0),
            logger=_logger,
            create_connection=connection,  # type: ignore[arg-type] # it says a class, and calls it
            ssl=ssl,
            backlog=_BACKLOG,
            **({} if ssl is None else {"ssl_handshake_timeout": None}),
            **where,
        )
        return _Listener(server, peers, uds)

    @staticmethod
    def url(host: str, port: int, *, secure: bool) -> str:
        return f"{'wss' if secure else 'ws'}://{host}{f':{port}' if port else ''}/v1"


async def _serve(peer: Peer, rules: Rules, stored: Stored) -> None:
    """One upgraded connection, to its end."""
    try:
        if rules.idle_s is not None:
            peer.cut_when_idle(rules.idle_s)
        if peer.refusal is not None:
            await _refuse(peer, peer.refusal)
        elif kind_of(peer.path) == "responses":
            await Responses(peer, rules, stored).run()
        elif kind_of(peer.path) == "realtime":
            await Realtime(peer).run()
        else:
            await Raw(peer).run()
    except (ConnectionClosed, Gone):
        pass
    except Exception as error:  # noqa: BLE001 - a fault of ours must not look like a slow server
        peer.book.fault(f"connection {peer.number}: the loopback server failed: {error!r}")
        peer.drop()
    finally:
        if not peer.connection_lost_waiter.done():
            await asyncio.shield(peer.connection_lost_waiter)


async def _refuse(peer: Peer, how: str) -> None:
    words = "too many connections"
    if how == "error":
        event = error_event(words, code="connection_limit_reached", type="rate_limit_error", status=429)
        peer.push([msgspec.json.encode(event)])
        await peer.close(1008, words)
    else:
        await peer.close(int(how), words)


PART = WebSocketPart()
