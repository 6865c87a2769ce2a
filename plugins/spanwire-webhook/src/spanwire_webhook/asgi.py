"""The receiver as an ASGI application: to serve by itself, or to mount in FastAPI, Starlette or Django.

::

    app.mount("/hooks", WebhookApp(receiver))

Mounted applications get no lifespan of their own in most frameworks; this one needs none. ``await app.aclose()`` when the
server goes, if you like to be exact.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

from .committer import Committer
from .receiver import Answer, Receiver, Reception

__all__ = ["WebhookApp"]

_Scope: TypeAlias = MutableMapping[str, Any]
_Message: TypeAlias = MutableMapping[str, Any]
_Receive: TypeAlias = Callable[[], Awaitable[_Message]]
_Send: TypeAlias = Callable[[_Message], Awaitable[None]]


class WebhookApp:
    """A pure ASGI 3 application over a :class:`~spanwire_webhook.receiver.Receiver`.

    Args:
        receiver: what it does.
    """

    def __init__(self, receiver: Receiver) -> None:
        self.receiver = receiver
        self._committer = Committer(receiver)

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1000})

    async def aclose(self) -> None:
        """What was begun is stored."""
        await asyncio.to_thread(self._committer.close)

    async def _live(self, receive: _Receive, send: _Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                await send({"type": "lifespan.startup.complete"})
            else:
                await self.aclose()
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def _answer(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        reception = self.receiver.begin(scope["method"], scope["path"], scope["headers"])
        try:
            answer = reception.answer
            if answer is None:
                answer = await self._read(reception, receive)
            if answer is None:
                if reception.wants_keys():
                    await asyncio.to_thread(reception.reload_keys)
                answer = await self._committer.finished(reception)
        except BaseException:
            reception.abandon()
            raise
        headers = [*answer.headers, (b"content-length", str(len(answer.body)).encode())]
        if answer.status == 204:
            headers.pop()
        if answer.status in (404, 408, 413, 431) and scope.get("http_version", "").startswith("1"):
            headers.append((b"connection", b"close"))  # rather than read to the end of what nobody wants
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await send({"type": "http.response.body", "body": answer.body})

    async def _read(self, reception: Reception, receive: _Receive) -> Answer | None:
        """The body, to its end. The answer if it is one before that."""
        settings = self.receiver.settings
        until_s = time.monotonic() + settings.total_s
        while reception.reads:
            try:
                async with asyncio.timeout(min(settings.idle_s, until_s - time.monotonic())):
                    message = await receive()
            except TimeoutError:
                return reception.give_up("timeout")
            if message["type"] == "http.disconnect":
                return reception.give_up("disconnected")
            reception.feed(message.get("body", b""))
            if not message.get("more_body", False):
                break
        return reception.answer
