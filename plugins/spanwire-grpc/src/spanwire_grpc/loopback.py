"""gRPC for the loopback server: a server of grpc.aio that speaks all dialects of this plugin, as scripted.

What scripts say, on this wire:

* ``headers`` are initial metadata; one named ``trailer-NAME`` is sent as ``NAME`` after the answer instead;
* a header ``grpc-status`` (with ``grpc-message``) ends the answer with this status, after its pieces;
* ``status`` from 400 is an error object in ``openai-json``, where the call itself ends well, and the status that comes
  nearest in the other dialects;
* ``writes``, or ``body``, are the JSON chunks of ``openai-json``.

``Request.body`` is what was asked, as OpenAI's JSON has it, in every dialect.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl as tls
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any, NoReturn

import grpc

from spanwire.testing.loopback import Book, Request
from spanwire.testing.script import Script

from . import loopback_json as js
from .loopback_hop import Hop
from .metadata import QUERY, incoming
from .stubs import openai_json as openai

__all__ = ["PART", "GRPCPart"]

#: Before a connection is cut after some pieces, in seconds: the library drops what it has received and not handed out when
#: its connection breaks, so that what a client was sent and what it can know would differ from run to run.
_BEFORE_A_CUT_S = 0.05
_TRAILER = "trailer-"
#: Statuses of HTTP as gRPC has them. Source: google.rpc.Code, and the other way round grpc ``doc/http-grpc-status-mapping.md``.
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.ABORTED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    500: grpc.StatusCode.INTERNAL,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
_BY_NUMBER = {code.value[0]: code for code in grpc.StatusCode}


class Turn:
    """One call: its request, its script, and what may still become of it."""

    def __init__(self, book: Book, hop: Hop, context: Any, method: str) -> None:
        self.book = book
        self.context = context
        self.loop = asyncio.get_running_loop()
        self._method = method
        self._pipe = hop.pipe_of(context.peer())
        self.request: Request = None  # type: ignore[assignment] # made in the first step of every call
        self.script = Script()
        self.report = js.Report(self.script, Request(method="", path="", query="", headers={}, raw=b"", connection=0))
        self._over = False

    def arrived(self, raw: bytes, model: str | None) -> None:
        """The request is here; finds its script."""
        headers = incoming(self.context.invocation_metadata())
        self.request = Request(
            method="POST",
            path=self._method,
            query=headers.get(QUERY, ""),
            headers=headers,
            raw=raw,
            connection=self._pipe.number if self._pipe is not None else 0,
        )
        self.book.arrived(self.request)
        self.script = self.book.script_for(self.request, model)
        self.report = js.Report(self.script, self.request)

    async def begin(self, *, streamed: bool) -> None:
        """The wait before the answer, and its initial metadata."""
        script = self.script
        if script.drop_after == "request":
            await self.cut()
        if script.hang_after == "request":
            await self.loop.create_future()
        await asyncio.sleep(script.queue_s)
        self.request.queued_ns = time.perf_counter_ns()
        if not streamed:
            await asyncio.sleep(script.headers_s + script.prefill_s)
            self.request.prefilled_ns = time.perf_counter_ns()
            await asyncio.sleep(script.decode_s)
            self.request.decoded_ns = time.perf_counter_ns()
            await asyncio.sleep(script.end_s)
        plain = {name.lower(): value for name, value in script.headers.items()}
        first = {**self.report.headers(streamed=streamed)}
        first |= {n: v for n, v in plain.items() if not n.startswith((_TRAILER, "grpc-"))}
        self.book.wrote(self.request, headers=True)
        await self.context.send_initial_metadata(tuple(first.items()))
        last = {n[len(_TRAILER) :]: v for n, v in plain.items() if n.startswith(_TRAILER)}
        self.context.set_trailing_metadata(tuple(last.items()))

    async def play(self, events: Iterable[js.Event], frame: Callable[[bytes], bytes], last: bytes | None) -> None:
        """A stream. ``last``: the terminal message, where there is one."""
        script, request = self.script, self.request
        stops = {script.drop_after, script.hang_after}
        played = 0
        due = self.loop.time()
        for event in events:
            if played in stops:
                await self._stop()
            now = self.loop.time()
            due = (due if event.paced else now) + event.wait_s
            if event.wait_s and due > now:
                await asyncio.sleep(due - now)
            if event.content:
                self.book.wrote(request, content=True)
                if request.prefilled_ns is None:
                    request.prefilled_ns = request.content_ns
                request.decoded_ns = time.perf_counter_ns()
            await self.context.write(frame(event.data))
            played += 1
        if played in stops or script.drop_after is not None or script.hang_after is not None:
            await self._stop()
        await self.refuse_if_told()
        if last is None:
            await asyncio.sleep(script.end_s)
            self.ended()
            return
        if not script.end_s:
            self.ended()
        await self.context.write(last)
        if script.end_s:
            await asyncio.sleep(script.end_s)
            self.ended()

    async def whole(self, make: Callable[[], bytes]) -> bytes:
        """One message, made when its time has come."""
        script = self.script
        await self.refuse_if_told()
        if script.drop_after == 0:
            await self.cut()
        if script.hang_after == 0:
            await self.loop.create_future()
        self.book.wrote(self.request, content=True)
        made = make()
        if script.drop_after is not None:
            await self.cut()
        self.ended()
        return made

    async def refuse_if_told(self) -> None:
        """The status of a script that names one."""
        plain = {name.lower(): value for name, value in self.script.headers.items()}
        code = _BY_NUMBER.get(int(plain.get("grpc-status", "0")), grpc.StatusCode.UNKNOWN)
        if code is not grpc.StatusCode.OK:
            await self.refuse(code, plain.get("grpc-message", ""))

    async def refuse_status(self) -> None:
        """The nearest to an HTTP status, for dialects whose errors are gRPC's."""
        status = self.script.status
        if status >= 400:
            await self.refuse(_CODES.get(status, grpc.StatusCode.UNKNOWN), f"the script says {status}", ended=True)

    async def refuse(self, code: Any, message: str, *, ended: bool = True) -> NoReturn:
        """End with a status."""
        if ended:
            self.ended()
        await self.context.abort(code, message, self.context.trailing_metadata() or ())
        raise AssertionError  # abort() raises

    def ended(self) -> None:
        """The whole answer was written."""
        self._over = True
        self.book.ended(self.request)

    def left(self) -> None:
        """The client has gone, if it is not over anyway."""
        if not self._over and self.request is not None:
            self._over = True
            self.book.left(self.request)

    async def _stop(self) -> None:
        if self.script.hang_after is not None:
            await self.loop.create_future()
        await asyncio.sleep(_BEFORE_A_CUT_S)
        await self.cut()

    async def cut(self) -> None:
        """Cut the connection that the call came on."""
        self._over = True
        self.book.dropped(self.request)
        if self._pipe is not None:
            self._pipe.cut(reset=self.script.drop_mode == "reset")
        await self.loop.create_future()  # until the library has noticed


#: What a method does: with its requests, and a Turn.
Answer = Callable[[Turn, AsyncIterator[bytes]], Awaitable[bytes | None]]


class Service(grpc.GenericRpcHandler):  # type: ignore[misc] # grpc has no types
    """Methods by their full names."""

    def __init__(self, book: Book, hop: Hop) -> None:
        self._book = book
        self._hop = hop
        self._methods: dict[str, Any] = {}

    def add(self, method: str, shape: str, answer: Answer) -> None:
        """``shape``: ``unary_unary``, ``unary_stream`` or ``stream_stream``."""

        async def handle(request: Any, context: Any) -> bytes | None:
            turn = Turn(self._book, self._hop, context, method)
            requests = request if shape == "stream_stream" else _one(request)
            try:
                return await answer(turn, requests)
            except asyncio.CancelledError:
                turn.left()
                raise
            except grpc.aio.AbortError:
                raise
            except Exception as error:
                if turn.script.status >= 0 and context.done():  # the client has gone while something was written
                    turn.left()
                    return None
                self._book.fault(f"the loopback server failed in {method}: {error!r}")
                raise

        self._methods[method] = getattr(grpc, f"{shape}_rpc_method_handler")(handle)

    def service(self, details: Any) -> Any:
        return self._methods.get(details.method)


async def _one(request: bytes) -> AsyncIterator[bytes]:
    yield request


# --- openai-json --------------------------------------------------------------------------------------------------------


def _chunk(data: bytes) -> bytes:
    made: bytes = openai.OpenAIStreamChunk(json_chunk=data).SerializeToString()
    return made


_FINISHED: bytes = openai.OpenAIStreamChunk(finished=True).SerializeToString()


async def _openai_request(turn: Turn, requests: AsyncIterator[bytes]) -> Any:
    message = openai.OpenAIRequest.FromString(await anext(requests))
    raw: bytes = message.json_body
    import json

    try:
        body = json.loads(raw)
    except ValueError:
        body = {}
    model = body.get("model") if isinstance(body, dict) else None
    turn.arrived(raw, model)
    return body


async def chat_complete(turn: Turn, requests: AsyncIterator[bytes]) -> None:
    """``ChatComplete``: a stream in any case."""
    body = await _openai_request(turn, requests)
    script = turn.script
    streamed = bool(body.get("stream"))
    wrong = None if isinstance(body.get("messages"), list) and body["messages"] else "messages must be a list"
    failed = script.status >= 400
    await turn.begin(streamed=streamed and not failed)
    events: Iterable[js.Event]
    given: Sequence[bytes] | None = script.writes if script.writes is not None else None
    if script.body is not None:
        given = [script.body]
    if wrong is not None:
        events = [js.Event(0, False, False, js.error(400, wrong))]
    elif given is not None:
        events = [js.Event(script.write_gap_s, True, True, data) for data in given]
    elif failed:
        events = [js.Event(0, False, False, js.error(script.status, f"the script says {script.status}"))]
    elif streamed:
        events = js.chunks(script, body, turn.report)
    else:
        events = _made(lambda: js.whole(script, body, turn.report))
    await turn.play(events, _chunk, _FINISHED if script.done else None)


def _made(make: Callable[[], bytes]) -> Iterable[js.Event]:
    yield js.Event(0, False, True, make())


async def openai_embed(turn: Turn, requests: AsyncIterator[bytes]) -> bytes:
    """``OpenAIEmbed``: a status of its own, in an answer that is OK."""
    body = await _openai_request(turn, requests)
    script = turn.script
    await turn.begin(streamed=False)

    def make() -> bytes:
        status, raw = 200, script.body
        if script.status >= 400:
            status, raw = script.status, raw or js.error(script.status, f"the script says {script.status}")
        raw = raw if raw is not None else js.embeddings(script, body)
        made: bytes = openai.OpenAIResponse(json_body=raw, status_code=status).SerializeToString()
        return made

    return await turn.whole(make)


# --- the part -----------------------------------------------------------------------------------------------------------


class _Listener:
    """See :class:`spanwire.testing.loopback.Listener`."""

    def __init__(self, server: Any, hop: Hop) -> None:
        self._server = server
        self._hop = hop
        self.address = hop.address

    def disconnect(self, *, reset: bool) -> None:
        self._hop.disconnect(reset=reset)

    async def aclose(self) -> None:
        await self._hop.aclose()
        await self._server.stop(None)
        with contextlib.suppress(TimeoutError):
            await self._server.wait_for_termination(1.0)


def _hear_no_others(loop: asyncio.AbstractEventLoop) -> None:
    """The library has one queue of events for all loops of a process, and any loop that takes one of a loop which was
    closed hears that this cannot be done: no fault of this server, nor of its client."""
    before = loop.get_exception_handler()

    def handler(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "PollerCompletionQueue" in context["message"] and isinstance(context.get("exception"), RuntimeError):
            return
        if before is not None:
            before(loop, context)
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(handler)


class GRPCPart:
    """See :class:`spanwire.testing.loopback.LoopbackPart`.

    Args:
        max_request_bytes: larger requests are refused; None for no limit.
    """

    name = "grpc"
    alpn = ("h2",)

    def __init__(self, *, max_request_bytes: int | None = None) -> None:
        self._max_request_bytes = max_request_bytes

    async def start(
        self, book: Book, *, host: str, port: int, uds: str | None, ssl: tls.SSLContext | None
    ) -> _Listener:
        """Listen."""
        _hear_no_others(asyncio.get_running_loop())
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", self._max_request_bytes or -1),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),
            ]
        )
        inner = server.add_insecure_port("127.0.0.1:0")
        hop = Hop(book, inner)
        service = Service(book, hop)
        service.add("/sglang.runtime.v1.SglangService/ChatComplete", "unary_stream", chat_complete)
        service.add("/sglang.runtime.v1.SglangService/OpenAIEmbed", "unary_unary", openai_embed)
        server.add_generic_rpc_handlers((service,))
        await server.start()
        try:
            await hop.start(host=host, port=port, uds=uds, ssl=ssl)
        except BaseException:
            await server.stop(None)
            raise
        return _Listener(server, hop)

    @staticmethod
    def url(host: str, port: int, *, secure: bool) -> str:
        return f"{'grpcs' if secure else 'grpc'}://{host}{f':{port}' if port else ''}"


PART = GRPCPart()
