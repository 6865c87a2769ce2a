"""The clients that are compared: a function each, and a row in :data:`PEERS`.

Every client is used in the way its documentation shows, with its connections left open and its limits out of the way.
Libraries are imported by the one client that needs them; a process pays in memory for nothing else. Peers are imported
by name because types of packages that need not be installed would make mypy's verdict depend on the environment.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import Any, NamedTuple, cast

import msgspec

MESSAGES = [{"role": "user", "content": "Say hello to the world, please."}]
#: More calls at once than any workload has.
AMPLE = 2000


class Streamed(NamedTuple):
    """What a client saw of one answer: how many tokens, and when the first came (CLOCK_MONOTONIC; 0 for never)."""

    tokens: int
    first_ns: int


#: Gets the text of each token as it comes. Where it returns something, the stream is not read on before that is done.
Take = Callable[[str], Awaitable[object] | None]


class Client(NamedTuple):
    """An async client, ready to call.

    Attributes:
        stream: (model, user) to what was seen; reads to the end.
        unary: one call that is answered as a whole, and decoded.
        follow: (model, take): hands out every token's text. Apart from ``stream``, where a call for each token would
            be a good part of what the fastest of them cost.
    """

    stream: Callable[[str, str | None], Awaitable[Streamed]]
    unary: Callable[[], Awaitable[None]]
    follow: Callable[[str, Take], Awaitable[None]] | None = None


def _streamed_body(model: str, user: str | None) -> dict[str, Any]:
    return {"model": model, "messages": MESSAGES, "stream": True, "user": user}


UNARY_BODY: dict[str, Any] = {"model": "m", "messages": MESSAGES}


# ---------------------------------------------------------------------------------------------------------------- raw


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta


class _Event(msgspec.Struct):
    choices: list[_Choice]


_decode_event = msgspec.json.Decoder(_Event).decode


class _RawConnection(asyncio.Protocol):
    """The floor: as little as reads *this* server's answers. It skips chunk framing, errors, timeouts, everything."""

    def __init__(self) -> None:
        self.buffer = b""
        self.done: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # not isinstance: uvloop's is none by name

    def connection_lost(self, exc: Exception | None) -> None:
        if self.done is not None and not self.done.done():
            self.done.set_exception(exc or ConnectionResetError("the server closed the connection"))

    def send(self, body: dict[str, Any], take: Take | None = None) -> asyncio.Future[None]:
        """Send a call; the future is done when the answer has been read."""
        self.read = self._read_events if "stream" in body else self._read_whole
        if take is not None:
            self.take, self.read = take, self._follow_events
        self.tokens = self.first_ns = 0
        self.done = asyncio.get_running_loop().create_future()
        data = json.dumps(body).encode()
        self.transport.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(data), data)
        )
        return self.done

    def data_received(self, data: bytes) -> None:
        self.read(self.buffer + data)

    def _read_events(self, buffer: bytes) -> None:
        while (end := buffer.find(b"\n\n")) >= 0:
            text, buffer = buffer[:end], buffer[end + 2 :]
            payload = text[text.rfind(b"data: ") + 6 :]
            if payload != b"[DONE]":
                choices = _decode_event(payload).choices
                if choices and choices[0].delta.content:
                    self.first_ns = self.first_ns or time.monotonic_ns()
                    self.tokens += 1
        self.buffer = buffer
        if buffer.endswith(b"0\r\n\r\n"):
            self._answered()

    def _follow_events(self, buffer: bytes) -> None:
        while (end := buffer.find(b"\n\n")) >= 0:
            text, buffer = buffer[:end], buffer[end + 2 :]
            payload = text[text.rfind(b"data: ") + 6 :]
            if payload != b"[DONE]":
                choices = _decode_event(payload).choices
                if choices and (content := choices[0].delta.content):
                    wait = self.take(content)
                    if wait is not None:
                        self.transport.pause_reading()
                        asyncio.ensure_future(wait).add_done_callback(lambda _: self.transport.resume_reading())
        self.buffer = buffer
        if buffer.endswith(b"0\r\n\r\n"):
            self._answered()

    def _read_whole(self, buffer: bytes) -> None:
        self.buffer = buffer
        head, found, body = buffer.partition(b"\r\n\r\n")
        if found and len(body) == int(head.partition(b"content-length: ")[2]):
            msgspec.json.decode(body)
            self._answered()

    def _answered(self) -> None:
        self.buffer = b""
        assert self.done is not None
        self.done.set_result(None)


def raw(url: str) -> Client:
    """A protocol on a socket, and msgspec."""
    host, port = url.split("/")[2].split(":")
    idle: list[_RawConnection] = []

    async def connection() -> _RawConnection:
        if idle:
            return idle.pop()
        _, made = await asyncio.get_running_loop().create_connection(_RawConnection, host, int(port))
        return made

    async def stream(model: str, user: str | None) -> Streamed:
        used = await connection()
        await used.send(_streamed_body(model, user))
        idle.append(used)
        return Streamed(used.tokens, used.first_ns)

    async def unary() -> None:
        used = await connection()
        await used.send(UNARY_BODY)
        idle.append(used)

    async def follow(model: str, take: Take) -> None:
        used = await connection()
        await used.send(_streamed_body(model, None), take)
        idle.append(used)

    return Client(stream, unary, follow)


# -------------------------------------------------------------------------------------------------------------- peers


def aiohttp(url: str) -> Client:
    """Lines of the response, and the standard library's JSON."""
    library: Any = import_module("aiohttp")
    session = library.ClientSession(connector=library.TCPConnector(limit=0))

    async def stream(model: str, user: str | None) -> Streamed:
        tokens = first_ns = 0
        async with session.post(f"{url}/chat/completions", json=_streamed_body(model, user)) as response:
            async for line in response.content:
                if line.startswith(b"data: ") and line != b"data: [DONE]\n":
                    choices = json.loads(line[6:])["choices"]
                    if choices and choices[0]["delta"].get("content"):
                        first_ns = first_ns or time.monotonic_ns()
                        tokens += 1
        return Streamed(tokens, first_ns)

    async def unary() -> None:
        async with session.post(f"{url}/chat/completions", json=UNARY_BODY) as response:
            json.loads(await response.read())

    async def follow(model: str, take: Take) -> None:
        async with session.post(f"{url}/chat/completions", json=_streamed_body(model, None)) as response:
            async for line in response.content:
                if line.startswith(b"data: ") and line != b"data: [DONE]\n":
                    choices = json.loads(line[6:])["choices"]
                    if choices and (text := choices[0]["delta"].get("content")) and (wait := take(text)) is not None:
                        await wait

    return Client(stream, unary, follow)


def httpx(url: str) -> Client:
    """Lines of the response, and the standard library's JSON."""
    library: Any = import_module("httpx")
    limits = library.Limits(max_connections=AMPLE, max_keepalive_connections=AMPLE)
    client = library.AsyncClient(limits=limits, timeout=60)

    async def stream(model: str, user: str | None) -> Streamed:
        tokens = first_ns = 0
        async with client.stream("POST", f"{url}/chat/completions", json=_streamed_body(model, user)) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    choices = json.loads(line[6:])["choices"]
                    if choices and choices[0]["delta"].get("content"):
                        first_ns = first_ns or time.monotonic_ns()
                        tokens += 1
        return Streamed(tokens, first_ns)

    async def unary() -> None:
        (await client.post(f"{url}/chat/completions", json=UNARY_BODY)).json()

    async def follow(model: str, take: Take) -> None:
        async with client.stream("POST", f"{url}/chat/completions", json=_streamed_body(model, None)) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    choices = json.loads(line[6:])["choices"]
                    if choices and (text := choices[0]["delta"].get("content")) and (wait := take(text)) is not None:
                        await wait

    return Client(stream, unary, follow)


def httpx_sync(url: str) -> Callable[[str], None]:
    """The same, synchronous."""
    client = import_module("httpx").Client(timeout=60)

    def stream(model: str) -> None:
        with client.stream("POST", f"{url}/chat/completions", json=_streamed_body(model, None)) as response:
            for _ in response.iter_lines():
                pass

    return stream


def openai(url: str) -> Client:
    """OpenAI's own client."""
    client = import_module("openai").AsyncOpenAI(base_url=url, api_key="x", max_retries=0)

    async def stream(model: str, user: str | None) -> Streamed:
        tokens = first_ns = 0
        async for chunk in await client.chat.completions.create(
            model=model, messages=MESSAGES, stream=True, user=user, stream_options={"include_usage": True}
        ):
            if chunk.choices and chunk.choices[0].delta.content:
                first_ns = first_ns or time.monotonic_ns()
                tokens += 1
        return Streamed(tokens, first_ns)

    async def unary() -> None:
        await client.chat.completions.create(**UNARY_BODY)

    async def follow(model: str, take: Take) -> None:
        async for chunk in await client.chat.completions.create(
            model=model, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        ):
            if chunk.choices and (text := chunk.choices[0].delta.content) and (wait := take(text)) is not None:
                await wait

    return Client(stream, unary, follow)


def openai_sync(url: str) -> Callable[[str], None]:
    """The same, synchronous."""
    client = import_module("openai").OpenAI(base_url=url, api_key="x", max_retries=0)

    def stream(model: str) -> None:
        for _ in client.chat.completions.create(model=model, messages=MESSAGES, stream=True):
            pass

    return stream


def _chat_openai(url: str, model: str) -> Any:
    make = import_module("langchain_openai").ChatOpenAI
    return make(model=model, base_url=url, api_key="x", max_retries=0, stream_usage=True)


def _chat_spanwire(url: str, model: str) -> Any:
    return import_module("langchain_spanwire").ChatSpanwire(model=model, endpoint=url, api_key="x", max_retries=0)


def _in_langchain(make: Callable[[str], Any]) -> Client:
    """A chat model of LangChain, one object for each script."""
    question = MESSAGES[0]["content"]
    models: dict[str, Any] = {}

    def chat(model: str) -> Any:
        return models.get(model) or models.setdefault(model, make(model))

    async def stream(model: str, user: str | None) -> Streamed:
        tokens = first_ns = 0
        async for chunk in chat(model).astream(question, user=user):
            if chunk.content:
                first_ns = first_ns or time.monotonic_ns()
                tokens += 1
        return Streamed(tokens, first_ns)

    async def unary() -> None:
        await chat("m").ainvoke(question)

    return Client(stream, unary)


def _in_langchain_sync(make: Callable[[str], Any]) -> Callable[[str], None]:
    models: dict[str, Any] = {}

    def stream(model: str) -> None:
        chat = models.get(model) or models.setdefault(model, make(model))
        for _ in chat.stream(MESSAGES[0]["content"]):
            pass

    return stream


def langchain(url: str) -> Client:
    """LangChain's ChatOpenAI."""
    return _in_langchain(lambda model: _chat_openai(url, model))


def langchain_sync(url: str) -> Callable[[str], None]:
    """The same, synchronous."""
    return _in_langchain_sync(lambda model: _chat_openai(url, model))


def langchain_spanwire(url: str) -> Client:
    """LangChain over this project, traced."""
    _trace()
    return _in_langchain(lambda model: _chat_spanwire(url, model))


def langchain_spanwire_sync(url: str) -> Callable[[str], None]:
    """The same, synchronous."""
    _trace()
    return _in_langchain_sync(lambda model: _chat_spanwire(url, model))


def _litellm() -> Any:
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it fetches a price list when imported
    library: Any = import_module("litellm")
    library.suppress_debug_info = True
    return library


def _in_litellm(url: str, provider: str) -> Client:
    library = _litellm()
    more = {"api_base": url, "api_key": "x", "messages": MESSAGES, "max_retries": 0}

    async def stream(model: str, user: str | None) -> Streamed:
        tokens = first_ns = 0
        async for chunk in await library.acompletion(
            model=f"{provider}/{model}", stream=True, extra_body={"user": user}, **more
        ):
            if chunk.choices and chunk.choices[0].delta.content:
                first_ns = first_ns or time.monotonic_ns()
                tokens += 1
        return Streamed(tokens, first_ns)

    async def unary() -> None:
        await library.acompletion(model=f"{provider}/m", **more)

    return Client(stream, unary)


def _in_litellm_sync(url: str, provider: str) -> Callable[[str], None]:
    library = _litellm()

    def stream(model: str) -> None:
        for _ in library.completion(
            model=f"{provider}/{model}", messages=MESSAGES, stream=True, api_base=url, api_key="x", max_retries=0
        ):
            pass

    return stream


def litellm(url: str) -> Client:
    """LiteLLM, as a library, with its OpenAI provider."""
    return _in_litellm(url, "openai")


def litellm_sync(url: str) -> Callable[[str], None]:
    """The same, synchronous."""
    return _in_litellm_sync(url, "openai")


def litellm_spanwire(url: str) -> Client:
    """LiteLLM over this project, traced."""
    _trace()
    _litellm()
    import_module("litellm_spanwire").register()
    return _in_litellm(url, "spanwire")


def litellm_spanwire_sync(url: str) -> Callable[[str], None]:
    """The same, synchronous."""
    _trace()
    _litellm()
    import_module("litellm_spanwire").register()
    return _in_litellm_sync(url, "spanwire")


# ----------------------------------------------------------------------------------------------------------- spanwire


def _trace() -> None:
    """An SDK that samples everything and drops it at export: spanwire is measured with its tracing on."""
    from collections.abc import Sequence

    from opentelemetry import metrics, trace
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

    class Drop(SpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            return SpanExportResult.SUCCESS

    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(Drop()))
    trace.set_tracer_provider(provider)
    metrics.set_meter_provider(MeterProvider())


def spanwire(url: str) -> Client:
    """This project, traced."""
    _trace()
    import spanwire as library

    manager = library.ConnectionManager()
    endpoint = library.Endpoint(url, api_key="x", limits=library.Limits(max_concurrent=AMPLE))

    async def stream(model: str, user: str | None) -> Streamed:
        tokens = first_ns = 0
        async with manager.stream(endpoint, library.Call.chat(model, MESSAGES, user=user)) as chunks:
            async for chunk in chunks:
                if chunk.text:
                    first_ns = first_ns or time.monotonic_ns()
                    tokens += 1
        return Streamed(tokens, first_ns)

    async def unary() -> None:
        await manager.complete(endpoint, library.Call.chat("m", MESSAGES))

    async def follow(model: str, take: Take) -> None:
        async with manager.stream(endpoint, library.Call.chat(model, MESSAGES)) as chunks:
            async for chunk in chunks:
                if chunk.text and (wait := take(chunk.text)) is not None:
                    await wait

    return Client(stream, unary, follow)


def spanwire_sync(url: str) -> Callable[[str], None]:
    """The same, synchronous."""
    _trace()
    import spanwire as library

    manager = library.SyncConnectionManager()
    endpoint = library.Endpoint(url, api_key="x")

    def stream(model: str) -> None:
        with manager.stream(endpoint, library.Call.chat(model, MESSAGES)) as chunks:
            for _ in chunks:
                pass

    return stream


class Peer(NamedTuple):
    """A client that can be named.

    Attributes:
        package: the module that has to be there.
        client: makes the client, given the base URL.
        sync: makes a function that streams one call, where the client has a synchronous side.
    """

    package: str
    client: Callable[[str], Client]
    sync: Callable[[str], Callable[[str], None]] | None = None


PEERS = {
    "raw": Peer("msgspec", raw),
    "aiohttp": Peer("aiohttp", aiohttp),
    "httpx": Peer("httpx", httpx, httpx_sync),
    "openai": Peer("openai", openai, openai_sync),
    "langchain": Peer("langchain_openai", langchain, langchain_sync),
    "langchain_spanwire": Peer("langchain_spanwire", langchain_spanwire, langchain_spanwire_sync),
    "litellm": Peer("litellm", litellm, litellm_sync),
    "litellm_spanwire": Peer("litellm_spanwire", litellm_spanwire, litellm_spanwire_sync),
    "spanwire": Peer("spanwire", spanwire, spanwire_sync),
}
