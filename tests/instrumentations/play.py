"""Calls under other people's instrumentations, in a process of its own: they patch libraries for good.

``play.py [SUBJECT ...]`` makes each subject's calls under each of its sets of tools, and prints what came out as JSON:
``{subject: {tools: {way: {"spans": [...], "sent": [traceparent, ...], "log": [...]}}}}``.
"""

from __future__ import annotations

import asyncio
import contextvars
import importlib
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import httpx
import httpx2
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import spanwire
from spanwire.testing import LoopbackServer, Script

#: Module and class of each tool's instrumentor.
TOOLS = {
    "genai-openai": ("opentelemetry.instrumentation.genai.openai", "OpenAIInstrumentor"),
    "genai-langchain": ("opentelemetry.instrumentation.genai.langchain", "LangChainInstrumentor"),
    "openllmetry-openai": ("opentelemetry.instrumentation.openai", "OpenAIInstrumentor"),
    "openllmetry-langchain": ("opentelemetry.instrumentation.langchain", "LangchainInstrumentor"),
    "openinference-openai": ("openinference.instrumentation.openai", "OpenAIInstrumentor"),
    "openinference-langchain": ("openinference.instrumentation.langchain", "LangChainInstrumentor"),
    "openinference-litellm": ("openinference.instrumentation.litellm", "LiteLLMInstrumentor"),
    "httpx": ("opentelemetry.instrumentation.httpx", "HTTPXClientInstrumentor"),
    "aiohttp-client": ("opentelemetry.instrumentation.aiohttp_client", "AioHttpClientInstrumentor"),
}
SETS: dict[str, list[str]] = {
    "bare": ["all"],
    "httpx": ["httpx", "all"],
    "langchain": ["genai-langchain", "openllmetry-langchain", "openinference-langchain", "all"],
    "litellm": ["openinference-litellm", "callback", "openinference-litellm callback", "all"],
    "openai": ["genai-openai", "openllmetry-openai", "openinference-openai", "all"],
    "zero": ["httpx", "genai-openai", "openllmetry-openai", "openinference-openai", "all"],
}
ALL = " ".join(TOOLS)

exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
tracer = trace.get_tracer("application")


class Log(logging.Handler):
    """What anybody had to complain about."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.name}: {record.getMessage()}")


log = Log()


def instrument(tools: str) -> None:
    for name in tools.split():
        if name in TOOLS:
            module, instrumentor = TOOLS[name]
            getattr(importlib.import_module(module), instrumentor)().instrument(tracer_provider=provider)


def told(span: ReadableSpan) -> dict[str, Any]:
    context = span.get_span_context()
    assert context is not None
    return {
        "name": span.name,
        "kind": span.kind.name,
        "id": f"{context.span_id:016x}",
        "trace": f"{context.trace_id:032x}",
        "parent": f"{span.parent.span_id:016x}" if span.parent is not None else None,
        "attributes": {
            name: value for name, value in (span.attributes or {}).items() if isinstance(value, (str, int, float))
        },
        "scope": span.instrumentation_scope.name if span.instrumentation_scope is not None else "",
    }


class ThroughSpanwire(httpx2.AsyncBaseTransport):
    """An SDK's transport whose bytes spanwire carries."""

    def __init__(self, manager: spanwire.ConnectionManager, url: str) -> None:
        self._manager = manager
        self._url = url

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        body = json.loads(await request.aread())
        streamed = body.pop("stream", False)
        call = spanwire.Call.chat(body.pop("model"), body.pop("messages"), **body)
        headers = {name: value for name, value in request.headers.items() if name in ("traceparent", "tracestate")}
        if not streamed:
            reply = await self._manager.complete(self._url, call, headers=headers)
            return httpx2.Response(200, headers={"content-type": "application/json"}, content=reply.raw)
        stream = self._manager.stream(self._url, call, headers=headers)
        await stream.__aenter__()
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, stream=Events(stream))


class Events(httpx2.AsyncByteStream):
    def __init__(self, stream: spanwire.Stream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._stream:
            yield b"data: " + bytes(chunk.raw) + b"\n\n"
        yield b"data: [DONE]\n\n"

    async def aclose(self) -> None:
        await self._stream.aclose()


Way = Callable[[str], Awaitable[object]]


async def bare(url: str) -> None:
    async with spanwire.ConnectionManager() as manager:
        async with manager.stream(url, spanwire.Call.chat("m", MESSAGES)) as stream:
            async for _ in stream:
                pass


async def own_client(url: str, *, streamed: bool) -> None:
    async with httpx.AsyncClient() as client, spanwire.ConnectionManager() as manager:
        endpoint = spanwire.Endpoint(url, options={"http_client": client})
        call = spanwire.Call.chat("m", MESSAGES)
        if not streamed:
            await manager.complete(endpoint, call)
            return
        async with manager.stream(endpoint, call) as stream:
            async for _ in stream:
                pass


async def own_sync_client(url: str) -> None:
    with httpx.Client() as client:
        async with spanwire.ConnectionManager() as manager:
            endpoint = spanwire.Endpoint(url, options={"http_client": client})
            await manager.complete(endpoint, spanwire.Call.chat("m", MESSAGES))


async def through_openai(url: str, *, streamed: bool) -> None:
    from openai import AsyncOpenAI

    async with spanwire.ConnectionManager() as manager:
        http_client = httpx2.AsyncClient(transport=ThroughSpanwire(manager, url))
        client: Any = AsyncOpenAI(api_key="k", base_url="http://sdk/v1", http_client=http_client)
        made = await client.chat.completions.create(model="m", messages=MESSAGES, stream=streamed)
        if streamed:
            async for _ in made:
                pass
        await client.close()


async def without_code(url: str, way: str) -> None:
    """The SDK as anybody uses it, in a process that is instrumented by us too."""
    import openai
    import spanwire_instrument

    spanwire_instrument.instrument()
    streamed = way.endswith("stream")

    def synchronous() -> None:
        with openai.OpenAI(api_key="k", base_url=url) as client:
            made: Any = client.chat.completions.create(model="m", messages=MESSAGES, stream=streamed)  # type: ignore[arg-type]
            assert list(made) if streamed else made

    if way.startswith("sync"):
        context = contextvars.copy_context()
        await asyncio.to_thread(context.run, synchronous)
        return
    http_client = openai.DefaultAioHttpClient() if way.startswith("aiohttp") else None
    async with openai.AsyncOpenAI(api_key="k", base_url=url, http_client=http_client) as client:
        made: Any = await client.chat.completions.create(model="m", messages=MESSAGES, stream=streamed)  # type: ignore[arg-type]
        if streamed:
            async for _ in made:
                pass


async def through_langchain(url: str, way: str) -> None:
    from langchain_spanwire import ChatSpanwire

    manager = spanwire.ConnectionManager()
    model = ChatSpanwire(model="m", endpoint=url, manager=manager)
    if way == "ainvoke":
        await model.ainvoke("q")
    elif way == "astream":
        async for _ in model.astream("q"):
            pass
    elif way == "chain":
        from langchain_core.runnables import RunnableLambda

        chain: Any = RunnableLambda(lambda text: f"{text}!") | model
        await chain.ainvoke("q")
    elif way == "invoke":
        await asyncio.to_thread(model.invoke, "q")
    else:
        await asyncio.to_thread(lambda: list(model.stream("q")))
    await manager.aclose()


async def through_litellm(url: str, *, streamed: bool) -> None:
    import litellm
    import litellm_spanwire

    manager = spanwire.ConnectionManager()
    litellm_spanwire.register(manager)
    made: Any = await litellm.acompletion(
        model="spanwire/m", api_base=url, api_key="k", messages=MESSAGES, stream=streamed
    )
    if streamed:
        async for _ in made:
            pass
    await manager.aclose()


MESSAGES = [{"role": "user", "content": "q"}]
SUBJECTS: dict[str, Mapping[str, Way]] = {
    "bare": {"stream": bare},
    "httpx": {
        "async": lambda url: own_client(url, streamed=False),
        "async stream": lambda url: own_client(url, streamed=True),
        "sync": own_sync_client,
    },
    "langchain": {
        way: lambda url, way=way: through_langchain(url, way)  # type: ignore[misc]
        for way in ("ainvoke", "astream", "invoke", "stream", "chain")
    },
    "litellm": {
        "whole": lambda url: through_litellm(url, streamed=False),
        "stream": lambda url: through_litellm(url, streamed=True),
    },
    "zero": {
        way: lambda url, way=way: without_code(url, way)  # type: ignore[misc]
        for way in ("whole", "stream", "sync whole", "sync stream", "aiohttp whole", "aiohttp stream")
    },
    "openai": {
        "whole": lambda url: through_openai(url, streamed=False),
        "stream": lambda url: through_openai(url, streamed=True),
    },
}


def use_litellms_callback() -> None:
    import litellm
    from litellm.integrations.opentelemetry import OpenTelemetry, OpenTelemetryConfig

    litellm.callbacks = [OpenTelemetry(config=OpenTelemetryConfig(exporter=exporter), tracer_provider=provider)]


async def settled(tools: str) -> None:
    """LiteLLM's callback tells after the call, in a task or a thread of its own."""
    until = time.monotonic() + 20
    while "callback" in tools.split() and time.monotonic() < until:
        if any(span.name == "raw_gen_ai_request" for span in exporter.get_finished_spans()):  # the last that it makes
            return
        await asyncio.sleep(0.01)


def play(subject: str, tools: str) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    instrument(ALL if tools == "all" else tools)
    if "callback" in tools.split():
        use_litellms_callback()
    for name, way in SUBJECTS[subject].items():
        exporter.clear()
        log.lines.clear()

        async def body(url: str, way: Way = way) -> None:
            with tracer.start_as_current_span("application"):
                await way(url)
            await settled(tools)

        with LoopbackServer(default=lambda _request: Script.say("Hello there.")) as server:
            asyncio.run(body(server.url))
            sent = [request.headers.get("traceparent") for request in server.requests]
            assert server.faults == []
        spans = [told(span) for span in exporter.get_finished_spans()]
        rows[name] = {"spans": spans, "sent": sent, "log": list(log.lines)}
    return rows


def apart(subject: str, tools: str) -> dict[str, Any]:
    """In a child of this process, since some tools cannot be taken off again."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            os.close(read_end)
            with os.fdopen(write_end, "w") as out:
                json.dump(play(subject, tools), out)
            status = 0
        except BaseException:  # noqa: BLE001 - whatever it was, the parent says so
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(write_end)
    with os.fdopen(read_end) as from_child:
        text = from_child.read()
    if os.waitpid(child, 0)[1]:
        raise SystemExit(f"{subject} under {tools} failed; what it said is above")
    found: dict[str, Any] = json.loads(text)
    return found


if __name__ == "__main__":
    logging.getLogger().addHandler(log)
    for module in ("openai", "langchain_spanwire", "litellm_spanwire"):
        importlib.import_module(module)  # once for all children
    subjects = sys.argv[1:] or list(SUBJECTS)
    json.dump({subject: {tools: apart(subject, tools) for tools in SETS[subject]} for subject in subjects}, sys.stdout)
