"""Makes the seven traces of docs/traces/: `python scripts/export_traces.py [FOLDER] [--only NAME] [--send]`.

Each is one life of a call, played against a scripted server on this machine, and written as OTLP JSON: one
``{"resourceSpans": [...]}``, as the OTLP specification maps it (ids in hex, names in camelCase, nanoseconds as text):
what goes to ``/v1/traces`` with ``Content-Type: application/json``.

cold-call               the first call: its connection is made for it, over TLS
warm-call               the next one, on the same connection: no handshake, and a link to who paid for it
retry-after-503         the server is overloaded once: two attempts below one call; it tells of its time, as vLLM does
cancelled-stream        the task that reads is cancelled
abandoned-stream        the stream is dropped without being closed: the span ends with the last token, not with the drop
pre-warmed-connection   the connection was made before the call: a trace of its own, which the call links to
two-riders              two calls at once over HTTP/2: one handshake, both link to it

``--send`` gives the spans to an OTLP endpoint too (OTEL_EXPORTER_OTLP_ENDPOINT and the other variables of the
exporter; http://localhost:4318 by default). Needs spanwire[otel,testing,http2].
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import h2.config
import h2.connection
import h2.events
from google.protobuf.json_format import MessageToDict  # type: ignore[import-untyped]
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import spanwire
from spanwire.testing import LoopbackServer, Script
from spanwire.testing.tls import ThrowAwayCA

SERVICE = "spanwire-traces"
#: Seconds for which the abandoned stream's owner does something else before it drops the stream.
ABANDONED_S = 0.25
_ANSWER = "Every millisecond of this answer is accounted for."
_PACE = {"prefill_s": 0.08, "gap_s": 0.02}
_IDS = ("traceId", "spanId", "parentSpanId")
#: The headers of an HTTP/2 answer, and what comes in it.
_H2_HEADERS = [(":status", "200"), ("content-type", "text/event-stream")]
_H2_DELTAS = ({"role": "assistant"}, *({"content": word} for word in ("Two ", "calls, ", "one ", "handshake.")))


class Stage(NamedTuple):
    """What a scenario plays on."""

    manager: spanwire.ConnectionManager
    tracer: trace.Tracer
    call_ended: asyncio.Event

    def agent(self, doing: str) -> contextlib.AbstractContextManager[trace.Span]:
        """The span of the application around a call."""
        return self.tracer.start_as_current_span(doing)


Scenario = Callable[[Stage], Awaitable[None]]


# --- the seven --------------------------------------------------------------------------------------------------------


async def cold_and_warm(stage: Stage) -> None:
    with _server() as server:
        endpoint = server.endpoint()
        with stage.agent("first question"):
            await _read(stage, endpoint)
        with stage.agent("second question"):
            await _read(stage, endpoint)


async def retried(stage: Stage) -> None:
    with _server(queue_s=0.03, server_timing="vllm") as server:
        server.script(Script(status=503, queue_s=0.02), times=1)
        endpoint = server.endpoint(retries=spanwire.Retries(base_s=0.05))
        with stage.agent("ask a busy server"):
            await _read(stage, endpoint)


async def cancelled(stage: Stage) -> None:
    with _server() as server:
        endpoint = server.endpoint()
        reading = asyncio.Event()

        async def read() -> None:
            async with stage.manager.stream(endpoint, _call()) as stream:
                async for chunk in stream:
                    if chunk.text:
                        reading.set()

        with stage.agent("ask, and change one's mind"):
            task = asyncio.create_task(read())
            await reading.wait()
            task.cancel()
            await asyncio.wait([task])


async def abandoned(stage: Stage) -> None:
    with _server(hang_after=2) as server:
        endpoint = server.endpoint()
        with stage.agent("ask, and forget"):
            stream = stage.manager.stream(endpoint, _call())
            await stream.__aenter__()
            async for chunk in stream:
                if chunk.text:
                    break
            await asyncio.sleep(ABANDONED_S)
            del stream
            await asyncio.wait_for(stage.call_ended.wait(), 10)


async def pre_warmed(stage: Stage) -> None:
    with _server() as server:
        endpoint = server.endpoint()
        await stage.manager.warm(endpoint)
        with stage.agent("first question"):
            await _read(stage, endpoint)


async def two_riders(stage: Stage) -> None:
    async with _http2_server() as endpoint:
        with stage.agent("two questions at once"):
            await asyncio.gather(_read(stage, endpoint), _read(stage, endpoint))


#: Scenario -> the traces that it makes, by the names of the spans of the application in them.
SCENARIOS: tuple[tuple[Scenario, dict[str, tuple[str, ...]]], ...] = (
    (cold_and_warm, {"cold-call": ("first question",), "warm-call": ("second question",)}),
    (retried, {"retry-after-503": ()}),
    (cancelled, {"cancelled-stream": ()}),
    (abandoned, {"abandoned-stream": ()}),
    (pre_warmed, {"pre-warmed-connection": ()}),
    (two_riders, {"two-riders": ()}),
)
NAMES = tuple(name for _, traces in SCENARIOS for name in traces)


def _call() -> spanwire.Call:
    return spanwire.Call.chat("my-model", [{"role": "user", "content": "Where did the time go?"}], temperature=0)


async def _read(stage: Stage, endpoint: spanwire.Endpoint) -> None:
    async with stage.manager.stream(endpoint, _call()) as stream:
        async for _ in stream:
            pass


def _server(**more: Any) -> LoopbackServer:
    # By name, so that there is a look-up to see.
    answer = Script.say(_ANSWER, **_PACE, **more)
    return LoopbackServer(default=lambda _request: answer, tls=True, public_host="localhost")


# --- a server that speaks HTTP/2, which the loopback server does not ---------------------------------------------------


@contextlib.asynccontextmanager
async def _http2_server() -> AsyncIterator[spanwire.Endpoint]:
    authority = ThrowAwayCA()
    served: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        http = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
        http.initiate_connection()
        writer.write(http.data_to_send())
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                for event in http.receive_data(data):
                    if isinstance(event, h2.events.StreamEnded) and event.stream_id is not None:
                        served.add(asyncio.create_task(_answer(http, writer, event.stream_id)))
                writer.write(http.data_to_send())
        writer.close()

    context = authority.server_context("127.0.0.1", alpn=("h2",))
    listener = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=context)
    try:
        port = listener.sockets[0].getsockname()[1]
        tls = spanwire.TLS(ca=authority.pem)
        yield spanwire.Endpoint(f"https://127.0.0.1:{port}/v1", tls=tls, proxy=None, options={"http_version": "2"})
        await asyncio.gather(*served)
    finally:
        listener.close()


async def _answer(http: h2.connection.H2Connection, writer: asyncio.StreamWriter, stream: int) -> None:
    def write(event: str) -> None:
        http.send_data(stream, f"data: {event}\n\n".encode())
        writer.write(http.data_to_send())

    http.send_headers(stream, _H2_HEADERS)
    for number, delta in enumerate(_H2_DELTAS):
        await asyncio.sleep(_PACE["prefill_s" if number == 1 else "gap_s"])
        write(json.dumps({"choices": [{"index": 0, "delta": delta}]}))
    write(json.dumps({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}))
    write("[DONE]")
    http.end_stream(stream)
    writer.write(http.data_to_send())


# --- spans to files ---------------------------------------------------------------------------------------------------


class _CallEnded(SpanProcessor):
    """Tells of the end of a call's span, which for an abandoned one no code waits for."""

    def __init__(self) -> None:
        self.event = asyncio.Event()

    def on_end(self, span: ReadableSpan) -> None:
        if "gen_ai.operation.name" in (span.attributes or {}):
            self.event.set()


async def play(scenario: Scenario, *, send: bool = False) -> tuple[ReadableSpan, ...]:
    """The spans of one scenario, in the order of their beginning."""
    memory, ended = InMemorySpanExporter(), _CallEnded()
    # Made by hand, without detectors: nothing of this machine or its environment is in it.
    provider = TracerProvider(resource=Resource({"service.name": SERVICE}), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    provider.add_span_processor(ended)
    telemetry = spanwire.Telemetry(tracer_provider=provider)
    async with spanwire.ConnectionManager(telemetry=telemetry) as manager:
        await scenario(Stage(manager, provider.get_tracer("agent"), ended.event))
    spans = tuple(sorted(memory.get_finished_spans(), key=lambda span: span.start_time or 0))
    if send:
        _send(spans)
    return spans


def _send(spans: Sequence[ReadableSpan]) -> None:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    exporter = OTLPSpanExporter()
    try:
        result = exporter.export(spans)
        if result.name != "SUCCESS":
            sys.exit("export_traces: the OTLP endpoint did not take the spans (see the log above)")
    finally:
        exporter.shutdown()  # type: ignore[no-untyped-call]


def otlp_json(spans: Sequence[ReadableSpan]) -> dict[str, Any]:
    """Spans as the OTLP specification maps them to JSON. protobuf's own mapping has ids in base64, OTLP's in hex."""
    found: dict[str, Any] = MessageToDict(encode_spans(spans), use_integers_for_enums=True)
    for resource in found["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                for holder in (span, *span.get("links", ())):
                    for name in _IDS:
                        if name in holder:
                            holder[name] = base64.b64decode(holder[name]).hex()
    return found


def _traces_of(spans: Sequence[ReadableSpan], titles: Sequence[str]) -> Sequence[ReadableSpan]:
    """The traces that have a span with one of these names; without names, all."""
    wanted = {span.context.trace_id for span in spans if span.name in titles and span.context}
    return [span for span in spans if span.context and span.context.trace_id in wanted] if titles else spans


def export(folder: Path, only: Sequence[str] = NAMES, *, send: bool = False) -> list[Path]:
    """Play what is asked for, and write a file for each."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for scenario, traces in SCENARIOS:
        wanted = [name for name in traces if name in only]
        if not wanted:
            continue
        spans = asyncio.run(play(scenario, send=send))
        for name in wanted:
            path = folder / f"{name}.json"
            path.write_text(json.dumps(otlp_json(_traces_of(spans, traces[name])), indent=1) + "\n", "utf-8")
            paths.append(path)
    return paths


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Make the traces of docs/traces/.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path("docs/traces"), help="default: docs/traces")
    parser.add_argument("--only", action="append", choices=NAMES, help="this one; may be given several times")
    parser.add_argument("--send", action="store_true", help="send the spans to an OTLP endpoint too")
    options = parser.parse_args(arguments)
    for path in export(options.folder, options.only or NAMES, send=options.send):
        print(path)


if __name__ == "__main__":
    main()
