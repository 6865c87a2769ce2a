"""The other end: answers the calls of a subject. Run as many as you like; the broker gives each call to one of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import msgspec
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from spanwire import Chunk, SpanwireError
from spanwire.errors import ServerError

from .wire import HEARTBEAT, cancel_subject, decode, encode, fields_of, joined

__all__ = ["Incoming", "Responder"]

#: A call that was cancelled before it came here (the two are different subjects): so many are remembered.
_REMEMBERED = 1000


class Incoming(msgspec.Struct, frozen=True):
    """A call that arrived.

    Attributes:
        inbox: where its answer goes; unlike that of any other call.
        model, body, streamed: what was asked, in OpenAI's shape.
        headers: names in lower case.
        query: of the endpoint's URL.
    """

    inbox: str
    model: str
    body: Mapping[str, Any]
    streamed: bool
    headers: Mapping[str, str]
    query: Mapping[str, str]


class Responder:
    """Answers calls::

        async def answer(call: Incoming) -> AsyncIterator[Chunk]:
            yield Chunk(text="Hello")
            yield Chunk(finish_reason="stop")


        client = await nats.connect("nats://127.0.0.1:4222")
        responder = Responder(client, "models.small", answer)
        await responder.start()

    ``answer`` is cancelled when the caller leaves or dies. A ServerError that it raises is the caller's; anything else is
    a status 500, whose text says nothing of it.

    Args:
        queue: responders of one subject with the same queue share its calls.
    """

    def __init__(
        self,
        client: Client,
        subject: str,
        answer: Callable[[Incoming], AsyncIterator[Chunk]],
        *,
        queue: str = "spanwire",
    ) -> None:
        self._client = client
        self._subject = subject
        self._answer = answer
        self._queue = queue
        self._inbox = ""
        self._running: dict[str, asyncio.Task[None]] = {}
        self._cancelled: OrderedDict[str, None] = OrderedDict()
        self._beats: dict[
            str, str
        ] = {}  # the subject on which the broker says that nobody listens, to the call's inbox
        self._count = 0
        self._subscriptions: list[Any] = []

    async def start(self) -> None:
        """Begin to take calls."""
        self._inbox = self._client.new_inbox()
        self._subscriptions = [
            await self._client.subscribe(cancel_subject(self._subject), cb=self._on_cancel),
            await self._client.subscribe(f"{self._inbox}.*", cb=self._on_nobody),
            await self._client.subscribe(self._subject, queue=self._queue, cb=self._on_call),
        ]
        await self._client.flush()

    async def stop(self) -> None:
        """Take no more calls, and drop those that are under way."""
        for subscription in self._subscriptions:
            with contextlib.suppress(nats.errors.Error):
                await subscription.unsubscribe()
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    # --- what comes -------------------------------------------------------------------------------------------------

    async def _on_call(self, message: Msg) -> None:
        inbox = message.reply
        if not inbox or inbox in self._running:
            return
        if inbox in self._cancelled:
            del self._cancelled[inbox]
            return
        task = asyncio.get_running_loop().create_task(self._run(message, inbox))
        self._running[inbox] = task
        task.add_done_callback(lambda _: self._running.pop(inbox, None))

    async def _on_cancel(self, message: Msg) -> None:
        inbox = message.data.decode("ascii", "replace")
        task = self._running.get(inbox)
        if task is not None:
            task.cancel()
            return
        self._cancelled[inbox] = None
        if len(self._cancelled) > _REMEMBERED:
            self._cancelled.popitem(last=False)

    async def _on_nobody(self, message: Msg) -> None:
        inbox = self._beats.get(message.subject)
        task = self._running.get(inbox or "")
        if task is not None and message.headers and message.headers.get("Status") == "503":
            task.cancel()

    # --- one call ---------------------------------------------------------------------------------------------------

    async def _run(self, message: Msg, inbox: str) -> None:
        headers = {name.lower(): value for name, value in (message.headers or {}).items()}
        beating = asyncio.create_task(self._beat(inbox, _seconds(headers.get(HEARTBEAT))))
        number = 0

        async def send(fields: dict[str, Any]) -> None:
            nonlocal number
            await self._client.publish(inbox, encode({"n": number, **fields}))
            number += 1

        try:
            call = _incoming(message.data, inbox, headers)
            chunks: list[Chunk] = []
            async with contextlib.aclosing(self._answer(call)) as answer:  # type: ignore[type-var]
                async for chunk in answer:
                    if call.streamed:
                        await send(fields_of(chunk))
                    else:
                        chunks.append(chunk)
            if chunks:
                await send(fields_of(joined(chunks)))
            await send({"end": True})
        except ServerError as error:
            await send({"error": {"status": error.status or 500, "message": error.message}})
        except SpanwireError as error:  # the call cannot be understood
            await send({"error": {"status": 400, "message": error.message}})
        except (OSError, nats.errors.Error):  # the broker has gone, and nobody can be told
            pass
        except Exception:
            await send({"error": {"status": 500, "message": "the responder failed"}})
            raise
        finally:
            beating.cancel()

    async def _beat(self, inbox: str, every_s: float) -> None:
        self._count += 1
        mine = f"{self._inbox}.{self._count}"
        self._beats[mine] = inbox
        try:
            while True:
                await asyncio.sleep(every_s)
                await self._client.publish(inbox, b"", reply=mine)
        except (OSError, nats.errors.Error):
            pass
        finally:
            del self._beats[mine]


def _seconds(text: str | None) -> float:
    try:
        return min(max(float(text or ""), 0.01), 3600.0)
    except ValueError:
        return 2.0


def _incoming(payload: bytes, inbox: str, headers: Mapping[str, str]) -> Incoming:
    """Raises ProtocolError."""
    message = decode(payload)
    body, query = message.get("body"), message.get("query")
    return Incoming(
        inbox=inbox,
        model=str(message.get("model", "")),
        body=body if isinstance(body, dict) else {},
        streamed=bool(message.get("stream")),
        headers=headers,
        query=query if isinstance(query, dict) else {},
    )
