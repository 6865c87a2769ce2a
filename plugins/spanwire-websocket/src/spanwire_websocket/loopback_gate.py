"""Who is let in: the scripted answers to upgrades, and the slots of a server that takes so many clients."""

from __future__ import annotations

import asyncio
from collections import deque
from http import HTTPStatus

import msgspec
from websockets.asyncio.server import ServerConnection
from websockets.datastructures import Headers
from websockets.http11 import Request, Response

from .loopback_connection import Gone, Peer
from .loopback_rules import Rules

__all__ = ["Gate", "kind_of"]

_KINDS = ("responses", "realtime", "raw")


def kind_of(path: str) -> str | None:
    """What is spoken at a path: the last segment decides."""
    last = path.rstrip("/").rpartition("/")[2]
    return last if last in _KINDS else None


class Gate:
    """Answers upgrades by the rules. One for each server that runs."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._asked = 0
        self._taken = 0
        self._inside: set[Peer] = set()
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def upgrade(self, connection: ServerConnection, request: Request) -> Response | None:
        """For ``serve(process_request=...)``: None lets the library go on with the handshake."""
        assert isinstance(connection, Peer)
        peer, rules = connection, self._rules
        peer.path, _, peer.query = request.path.partition("?")
        for name, value in request.headers.raw_items():
            key = name.lower()
            peer.headers[key] = f"{peer.headers[key]}, {value}" if key in peer.headers else value
        number = self._asked
        self._asked += 1
        if rules.upgrade_s:
            await self._until(peer, rules.upgrade_s)
        if kind_of(peer.path) is None:
            return _refusal(404, f"there is nothing at GET {peer.path}", "not_found_error")
        status = rules.upgrades[min(number, len(rules.upgrades) - 1)]
        if status != HTTPStatus.SWITCHING_PROTOCOLS:
            return self._refuse(status)
        if rules.api_key is not None and peer.headers.get("authorization") != f"Bearer {rules.api_key}":
            if rules.unauthorized == 403:
                return _response(403, b"", {})
            more = {"WWW-Authenticate": "Bearer"}
            return _refusal(401, "the key is missing, or it is another one", "invalid_api_key", more)
        if rules.max_clients is not None:
            return await self._slot(peer, rules.max_clients)
        return None

    async def _slot(self, peer: Peer, most: int) -> Response | None:
        when_full = self._rules.when_full
        if self._taken < most:
            self._taken += 1
        elif when_full == "wait":
            if not await self._wait(peer):
                return self._refuse(503)
        elif when_full == "never":
            await self._until(peer, None)
        elif when_full in {"503", "429", "403"}:
            return self._refuse(int(when_full))
        else:
            peer.refusal = when_full
            return None
        self._inside.add(peer)
        return None

    async def _wait(self, peer: Peer) -> bool:
        """Wait in line for a slot. Returns False if that took too long. Raises Gone."""
        turn: asyncio.Future[None] = peer.loop.create_future()
        self._waiting.append(turn)
        lost = peer.connection_lost_waiter
        await asyncio.wait([turn, lost], timeout=self._rules.full_wait_s, return_when=asyncio.FIRST_COMPLETED)
        if turn.done() and not lost.done():
            return True
        if turn.done():  # its turn has come, and it is not there any more
            self._free()
        else:
            self._waiting.remove(turn)
        if lost.done():
            raise Gone
        return False

    @staticmethod
    async def _until(peer: Peer, seconds: float | None) -> None:
        """Wait; for ever with None. Raises Gone, which is how the library hears that there is nothing to answer."""
        await asyncio.wait([peer.connection_lost_waiter], timeout=seconds)
        if peer.connection_lost_waiter.done():
            raise Gone

    def lost(self, peer: Peer) -> None:
        """A connection is gone."""
        if peer in self._inside:
            self._inside.remove(peer)
            self._free()

    def _free(self) -> None:
        """A slot is free: the first in line gets it at once, so that nobody who comes now is served before."""
        if self._waiting:
            self._waiting.popleft().set_result(None)
        else:
            self._taken -= 1

    def _refuse(self, status: int) -> Response:
        more: dict[str, str] = {}
        if status in {429, 503} and self._rules.retry_after is not None:
            more["Retry-After"] = self._rules.retry_after
        if 300 <= status <= 399 and self._rules.location is not None:
            more["Location"] = self._rules.location
        if status == HTTPStatus.FORBIDDEN:
            return _response(403, b"", more)
        return _refusal(status, f"no upgrade: status {status}, as scripted", "upgrade_refused", more)


def _refusal(status: int, words: str, code: str, more: dict[str, str] | None = None) -> Response:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    body = msgspec.json.encode({"error": {"message": words, "type": kind, "param": None, "code": code}})
    return _response(status, body, {"Content-Type": "application/json", **(more or {})})


def _response(status: int, body: bytes, headers: dict[str, str]) -> Response:
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return Response(status, phrase, Headers({**headers, "Content-Length": str(len(body)), "Connection": "close"}), body)
