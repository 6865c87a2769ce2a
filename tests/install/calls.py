"""Runs in a fresh environment: a call over each transport that is there, and what the extras named on the command line are
for. Prints what was answered, by name."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import spanwire
from spanwire.testing import LoopbackServer

MESSAGES = [{"role": "user", "content": "Say hello"}]
CALL = spanwire.Call.chat("m", MESSAGES)


def over(name: str) -> str:
    """A call over the transport of this name: streamed, whole, or as a job."""
    with LoopbackServer(part=name) as server:

        async def main() -> str:
            async with spanwire.ConnectionManager() as manager:
                endpoint = server.endpoint(proxy=None)
                spec = manager.registry.spec_for(endpoint)
                if spec.name != name:
                    endpoint = server.endpoint(
                        proxy=None, transport=name, options=getattr(server.part, "endpoint_options", {})
                    )
                    spec = manager.registry.spec_for(endpoint)
                if "jobs" in spec.capabilities:
                    reply = await (await manager.submit(endpoint, CALL))
                    assert isinstance(reply, spanwire.Reply)
                    return reply.text
                async with manager.stream(endpoint, CALL) as stream:
                    text = "".join([chunk.text async for chunk in stream])
                total_s = sum(segment.duration_s for segment in stream.timeline.segments.values())
                assert abs(total_s - stream.timeline.total_s) < 1e-3
                assert (await manager.complete(endpoint, CALL)).text == text
                assert server.connections == 1, server.connections
                return text

        return asyncio.run(main())


def cli() -> str:
    import subprocess

    command = Path(sys.executable).with_name("spanwire")
    done = subprocess.run([command, "demo", "--json"], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return " ".join(json.loads(done.stdout)["transports"])


def otel() -> str:
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    OTLPSpanExporter(endpoint="http://127.0.0.1:9/v1/traces")
    kept = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    trace.set_tracer_provider(provider)
    over("sse")
    return " ".join(sorted({span.name for span in kept.get_finished_spans() if span.parent is None}))


def testing() -> str:
    import spanwire.testing.conformance

    with LoopbackServer(tls=True) as server, spanwire.SyncConnectionManager() as manager:
        return manager.complete(server.endpoint(proxy=None), CALL).text


def http2() -> str:
    # No server of HTTP/2 comes along: that it is asked for, and found to be missing on the other side, is what can be seen.
    with LoopbackServer() as server, spanwire.SyncConnectionManager() as manager:
        endpoint = server.endpoint(proxy=None, options={"http_version": "2"}, retries=spanwire.Retries(max_attempts=1))
        with contextlib.suppress(
            spanwire.errors.ConnectionFailed, spanwire.errors.ProtocolError, spanwire.errors.Truncated
        ):
            manager.complete(endpoint, CALL)
    assert "h2" in sys.modules
    return "h2"


def socks() -> str:
    with LoopbackServer() as server, spanwire.SyncConnectionManager() as manager:
        endpoint = server.endpoint(proxy="socks5h://127.0.0.1:9", retries=spanwire.Retries(max_attempts=1))
        with contextlib.suppress(spanwire.errors.ConnectionFailed):
            manager.complete(endpoint, CALL)
            raise AssertionError("there is no such proxy")
    return "refused by the proxy"


def uvloop() -> str:
    os.environ["SPANWIRE_LOOP"] = "uvloop"
    with LoopbackServer() as server, spanwire.SyncConnectionManager() as manager:
        text = manager.complete(server.endpoint(proxy=None), CALL).text
    assert "uvloop" in sys.modules
    return text


def langchain() -> str:
    from langchain_spanwire import ChatSpanwire, SpanwireEmbeddings

    with LoopbackServer() as server:
        message = ChatSpanwire(model="m", endpoint=server.url).invoke("Say hello")
        assert message.response_metadata["spanwire"]["outcome"] == "completed"
        assert SpanwireEmbeddings(model="e", endpoint=server.url).embed_query("a")
        assert "".join(str(chunk.content) for chunk in ChatSpanwire(model="m", endpoint=server.url).stream("Say hello"))
        return str(message.content)


def litellm() -> str:
    import litellm
    import litellm_spanwire

    litellm_spanwire.register()
    with LoopbackServer() as server:
        answer = litellm.completion("spanwire/m", MESSAGES, api_base=server.url, api_key="k")
        return str(answer.choices[0].message.content)


def instrument() -> str:
    import spanwire_instrument

    spanwire_instrument.instrument()
    assert spanwire_instrument.is_instrumented()
    spanwire_instrument.uninstrument()
    return "instrumented"


def openai() -> str:
    import openai
    import spanwire_instrument

    with LoopbackServer() as server:
        client: Any = openai.OpenAI(api_key="k", base_url=server.url, http_client=spanwire_instrument.httpx2_client())
        for _ in range(2):
            text = "".join(
                chunk.choices[0].delta.content or ""
                for chunk in client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
                if chunk.choices
            )
        assert server.connections == 1
        return text


CHECKS: dict[str, Callable[[], str]] = {
    made.__name__: made for made in (cli, otel, testing, http2, socks, uvloop, langchain, litellm, instrument, openai)
}


def main() -> None:
    """Names of checks are the arguments."""
    where = [sys.modules["spanwire"].__file__ or ""]
    assert all("site-packages" in path for path in where), where
    found: dict[str, Any] = {
        f"over {entry.name}": over(entry.name) for entry in sorted(entry_points(group="spanwire.loopback"))
    }
    for name in sys.argv[1:]:
        found[name] = CHECKS[name]()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
