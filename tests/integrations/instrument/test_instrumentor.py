"""Without a line of code: clients of httpx and httpx2, and what instruments and undoes."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any

import anthropic
import httpx
import httpx2
import openai
import pytest
import spanwire_instrument
from spanwire_instrument import Rules, SpanwireInstrumentor, instrument, is_instrumented, uninstrument

import spanwire
from spanwire.errors import ConfigurationError
from spanwire.testing import LoopbackServer, Script
from tests.integrations.instrument.support import BODY, FAMILIES, Seen, chat_url, connections, trust
from tests.integrations.instrument.zero import checked, instrumented, one, same_again, snapshot
from tests.support import MESSAGES, hello, serving

WAYS = ["sync", "async"]


def streamed(server: LoopbackServer, http: Any, times: int = 1) -> list[str]:
    """Texts of calls in a row by the synchronous SDK."""
    client: Any = openai.OpenAI(base_url=server.url, api_key="k", http_client=http, max_retries=0)
    texts = []
    for _ in range(times):
        stream = client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        texts.append("".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices))
    return texts


async def streamed_async(server: LoopbackServer, http: Any, times: int = 1) -> list[str]:
    client: Any = openai.AsyncOpenAI(base_url=server.url, api_key="k", http_client=http, max_retries=0)
    texts = []
    for _ in range(times):
        stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        texts.append("".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]))
    return texts


def ask(hx: ModuleType, way: str, server: LoopbackServer, body: Any, **more: Any) -> Any:
    """One request of a plain client: what its user sees."""
    if way == "sync":
        with hx.Client(verify=trust(server), **more) as client:
            response = client.post(chat_url(server), json=body)
        return response.status_code, list(response.headers.raw), response.content

    async def main() -> Any:
        async with hx.AsyncClient(verify=trust(server), **more) as client:
            response = await client.post(chat_url(server), json=body)
        return response.status_code, list(response.headers.raw), response.content

    return asyncio.run(main())


# ------------------------------------------------------------------------------------------------------------- what is seen


@pytest.mark.parametrize("tls", [False, True])
def test_six_streamed_calls_of_the_synchronous_sdk_take_one_connection(tls: bool) -> None:
    with serving(hello(), tls=tls) as server:
        with httpx2.Client(verify=trust(server)) as http:
            bare = streamed(server, http, 6)
            assert connections(server) == 6
            server.clear()
            with instrumented() as seen:  # the same client, which is older
                assert streamed(server, http, 6) == bare
            assert connections(server) == 1
            server.clear()
            assert streamed(server, http, 6) == bare
            assert connections(server) == 6
    assert [checked(timeline).transport for timeline in seen.timelines] == ["httpx2"] * 6
    assert all(timeline.first_content_s for timeline in seen.timelines)


def test_six_streamed_calls_of_the_asynchronous_sdk_take_one_connection() -> None:
    async def main(server: LoopbackServer) -> list[str]:
        async with httpx2.AsyncClient(verify=trust(server)) as http:
            return await streamed_async(server, http, 6)

    with serving(hello(), tls=True) as server:
        bare = asyncio.run(main(server))
        server.clear()
        with instrumented() as seen:
            assert asyncio.run(main(server)) == bare
        assert connections(server) == 1
    assert [checked(timeline).outcome for timeline in seen.timelines] == ["completed"] * 6


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("hx", FAMILIES, ids=lambda hx: hx.__name__)
@pytest.mark.parametrize("body", [BODY, {**BODY, "stream": False}], ids=["stream", "whole"])
def test_answers_of_plain_clients_are_the_same(hx: ModuleType, way: str, body: Any) -> None:
    with serving(same_again(streamed=body["stream"]), tls=True) as server:
        bare = ask(hx, way, server, body)
        server.clear()
        with instrumented() as seen:
            assert ask(hx, way, server, body) == bare
        (request,) = server.requests
    timeline = one(seen)
    assert timeline.streamed is body["stream"]
    assert set(timeline.segments["handshake"].parts) == {"tcp", "tls"}
    assert request.headers["traceparent"].split("-")[1] == timeline.trace_id


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("hx", FAMILIES, ids=lambda hx: hx.__name__)
def test_an_error_status_is_an_error(hx: ModuleType, way: str) -> None:
    with serving(Script(status=503)) as server:
        bare = ask(hx, way, server, BODY)
        with instrumented() as seen:
            assert ask(hx, way, server, BODY) == bare
    one(seen, "error")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("hx", FAMILIES, ids=lambda hx: hx.__name__)
def test_what_the_library_raises_is_its_own(hx: ModuleType, way: str, closed_port: int) -> None:
    def refused() -> Any:
        url = f"http://127.0.0.1:{closed_port}/v1/chat/completions"
        if way == "sync":
            return hx.post(url, json=BODY)

        async def main() -> None:
            async with hx.AsyncClient() as client:
                await client.post(url, json=BODY)

        return asyncio.run(main())

    with pytest.raises(hx.ConnectError) as bare:
        refused()
    with instrumented() as seen, pytest.raises(hx.ConnectError) as ours:
        refused()
    assert str(ours.value) == str(bare.value)
    assert one(seen, "error").error_type == "ConnectError"


def test_a_stream_that_breaks_is_an_error_of_the_sdk() -> None:
    with serving(hello(drop_after=2)) as server, httpx2.Client() as http:
        with pytest.raises((openai.APIError, httpx2.HTTPError)) as bare:
            streamed(server, http)
        with instrumented() as seen, pytest.raises(type(bare.value)):
            streamed(server, http)
    one(seen, "error")


def test_a_stream_that_is_left_early_is_closed_by_the_caller() -> None:
    with serving(hello(gap_s=0.01)) as server, httpx2.Client() as http, instrumented() as seen:
        client: Any = openai.OpenAI(base_url=server.url, api_key="k", http_client=http)
        with client.chat.completions.create(model="m", messages=MESSAGES, stream=True) as stream:
            next(iter(stream))
    one(seen, "closed_by_caller")


def test_a_cancelled_call_is_cancelled() -> None:
    async def main(server: LoopbackServer) -> None:
        async with httpx2.AsyncClient() as http:
            task = asyncio.create_task(streamed_async(server, http))
            while not server.requests:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    with serving(hello(hang_after="request")) as server, instrumented() as seen:
        asyncio.run(main(server))
    one(seen, "cancelled")


def test_calls_of_many_threads_on_one_client() -> None:
    texts: list[str] = []
    with serving(hello(gap_s=0.001)) as server, httpx2.Client() as http, instrumented() as seen:
        threads = [threading.Thread(target=lambda: texts.extend(streamed(server, http, 3))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert len(texts) == 24
    assert [checked(timeline).outcome for timeline in seen.timelines] == ["completed"] * 24


def test_anthropics_sdk() -> None:
    events: list[tuple[str, dict[str, Any]]] = [
        ("message_start", {"message": {"id": "msg_1", "type": "message", "role": "assistant", "model": "claude-x",
                                       "content": [], "stop_reason": None, "stop_sequence": None,
                                       "usage": {"input_tokens": 3, "output_tokens": 1}}}),
        ("content_block_start", {"index": 0, "content_block": {"type": "text", "text": ""}}),
        ("content_block_delta", {"index": 0, "delta": {"type": "text_delta", "text": "Hello"}}),
        ("content_block_stop", {"index": 0}),
        ("message_delta", {"delta": {"stop_reason": "end_turn", "stop_sequence": None}, "usage": {"output_tokens": 2}}),
        ("message_stop", {}),
    ]  # fmt: skip
    writes = [f"event: {name}\ndata: {json.dumps({'type': name, **data})}\n\n".encode() for name, data in events]
    script = Script(writes=writes, content_type="text/event-stream")

    def call(server: LoopbackServer, http: Any) -> str:
        client = anthropic.Anthropic(base_url=server.origin, api_key="k", http_client=http)
        with client.messages.stream(max_tokens=9, model="claude-x", messages=[{"role": "user", "content": "q"}]) as got:
            return "".join(got.text_stream)

    with serving(script, tls=True) as server, httpx2.Client(verify=trust(server)) as http:
        # The scripted server knows no such path, so it is told to an address that it does know.
        http.event_hooks = {"request": [_to_chat]}
        assert call(server, http) == "Hello"
        with instrumented() as seen:
            assert [call(server, http) for _ in range(6)] == ["Hello"] * 6
    assert [checked(timeline).model for timeline in seen.timelines] == ["claude-x"] * 6
    assert seen.timelines[0].usage == spanwire.Usage(3, 2)


def _to_chat(request: Any) -> None:
    request.url = request.url.copy_with(path="/v1/chat/completions")


# ------------------------------------------------------------------------------------------------------- what is left alone


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("hx", FAMILIES, ids=lambda hx: hx.__name__)
def test_other_requests_are_nobodys_business(hx: ModuleType, way: str) -> None:
    sent: list[Any] = []

    async def main(url: str) -> None:
        async with hx.AsyncClient(event_hooks={"request": [_note(sent)]}) as client:
            await client.get(f"{url}/models")
            await client.post(f"{url}/files", json={"a": 1})
            await client.post(f"{url}/chat/completions", content=b"no JSON", headers={"content-type": "text/plain"})

    with serving(hello()) as server, instrumented() as seen:
        if way == "async":
            asyncio.run(main(server.url))
        else:
            with hx.Client() as client:
                client.get(f"{server.url}/models")
                client.post(f"{server.url}/files", json={"a": 1})
                client.post(
                    f"{server.url}/chat/completions", content=b"no JSON", headers={"content-type": "text/plain"}
                )
        assert all("traceparent" not in request.headers for request in server.requests)
    assert seen.timelines == []


def _note(sent: list[Any]) -> Any:
    async def hook(request: Any) -> None:
        sent.append(request)

    return hook


def test_rules_say_which_hosts() -> None:
    with serving(hello()) as server, httpx2.Client() as http:
        with instrumented(rules=Rules(never=("127.0.0.1",))) as seen:
            streamed(server, http)
        assert seen.timelines == []
        with instrumented(rules=Rules(hosts=("127.0.0.1",))) as seen:
            streamed(server, http)
        one(seen)


@pytest.mark.parametrize("hx", FAMILIES, ids=lambda hx: hx.__name__)
def test_an_explicit_transport_is_not_doubled(hx: ModuleType) -> None:
    with serving(hello()) as server, instrumented() as seen:
        with seen.client(hx) as client:
            client.post(chat_url(server), json=BODY)
        one(seen)

        async def main() -> None:
            async with seen.async_client(hx) as client:
                await client.post(chat_url(server), json=BODY)

        asyncio.run(main())
    assert len(seen.timelines) == 2


def test_a_client_that_spanwire_was_given_is_not_doubled() -> None:
    async def main(server: LoopbackServer, seen: Seen) -> None:
        async with httpx2.AsyncClient() as http:
            endpoint = spanwire.Endpoint(server.url, options={"http_client": http})
            await seen.manager.complete(endpoint, spanwire.Call.chat("m", MESSAGES))
        await seen.manager.aclose()

    with serving(hello()) as server, instrumented() as seen:
        asyncio.run(main(server, seen))
    one(seen)


def test_clients_are_not_kept() -> None:
    with serving(hello()) as server, instrumented() as seen:
        http = httpx2.Client()
        streamed(server, http)
        gone = weakref.ref(http._transport)
        http.close()
        del http
        gc.collect()
        assert gone() is None
    one(seen)


# ------------------------------------------------------------------------------------------------------------ on and off


def test_it_undoes_itself_completely_and_may_be_called_twice() -> None:
    before = snapshot()
    uninstrument()
    instrument()
    once = snapshot()
    assert once != before
    assert is_instrumented()
    instrument()
    assert snapshot() == once
    uninstrument()
    assert snapshot() == before
    uninstrument()
    assert snapshot() == before
    assert not is_instrumented()


def test_what_somebody_else_has_wrapped_since_is_left_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = httpx2.HTTPTransport.handle_request
    seen = Seen()
    instrument(manager=seen.manager)
    ours = httpx2.HTTPTransport.handle_request

    def theirs(self: Any, request: Any) -> Any:
        calls.append(request)
        return ours(self, request)

    monkeypatch.setattr(httpx2.HTTPTransport, "handle_request", theirs)
    uninstrument()
    assert httpx2.HTTPTransport.handle_request is theirs
    with serving(hello()) as server, httpx2.Client() as http:
        streamed(server, http)
    assert len(calls) == 1
    assert seen.timelines == []  # ours hands through
    monkeypatch.setattr(httpx2.HTTPTransport, "handle_request", original)


def test_an_unknown_library_is_an_error_that_names_the_known() -> None:
    with pytest.raises(ConfigurationError, match="requests is unknown; known are httpx, httpx2, aiohttp"):
        instrument(libraries=["requests"])
    assert not is_instrumented()


def test_only_some_libraries() -> None:
    before = vars(httpx.HTTPTransport)["handle_request"]
    with instrumented(libraries=["httpx2"]):
        assert vars(httpx.HTTPTransport)["handle_request"] is before


def test_many_threads_instrument_at_once() -> None:
    before = snapshot()
    start = threading.Barrier(8)

    def work() -> None:
        start.wait()
        instrument()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    uninstrument()
    assert snapshot() == before


def test_a_patch_that_fails_is_logged_and_the_others_work(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import aiohttp

    monkeypatch.delattr(aiohttp, "TraceConfig")
    from spanwire_instrument import aiohttp_family

    aiohttp_family._config_class.cache_clear()
    with serving(hello()) as server, httpx2.Client() as http, instrumented() as seen:
        streamed(server, http)
    assert "aiohttp cannot be instrumented" in caplog.text
    one(seen)


def test_opentelemetrys_instrumentor() -> None:
    before = snapshot()
    seen = Seen()
    with serving(hello()) as server, httpx2.Client() as http:
        SpanwireInstrumentor().instrument(manager=seen.manager)
        streamed(server, http)
        SpanwireInstrumentor().uninstrument()
    one(seen)
    assert snapshot() == before


def test_an_instrumentor_with_a_provider_uses_that() -> None:
    seen = Seen()
    with serving(hello()) as server, httpx2.Client() as http:
        SpanwireInstrumentor().instrument(tracer_provider=seen.tracers)
        streamed(server, http)
        SpanwireInstrumentor().uninstrument()
    assert "chat m" in [span.name for span in seen.spans]


AGENT = """
import sys
before = [name for name in ("httpx", "httpx2", "aiohttp") if name in sys.modules]
{first}
import httpx2, spanwire_instrument
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
body = {{"model": "m", "messages": [{{"role": "user", "content": "q"}}]}}
httpx2.post({url!r} + "/chat/completions", json=body)
print(before, spanwire_instrument.is_instrumented(), [s.name for s in exporter.get_finished_spans() if s.kind.name == "CLIENT"])
"""


def run(*command: str) -> str:
    env = {**os.environ, "OTEL_TRACES_EXPORTER": "none", "OTEL_METRICS_EXPORTER": "none", "OTEL_LOGS_EXPORTER": "none"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_libraries_that_are_imported_later() -> None:
    with serving(hello()) as server:
        code = AGENT.format(first="import spanwire_instrument; spanwire_instrument.instrument()", url=server.url)
        assert run(sys.executable, "-W", "error", "-c", code) == "[] True ['chat m']"


def test_the_first_call_loads_nothing_of_ours() -> None:
    """It would wait for that: what is needed came with the library's import."""
    code = (
        "import sys, spanwire_instrument; spanwire_instrument.instrument()\n"
        "import httpx2\n"
        "def ours(): return {name for name in sys.modules if name.partition('.')[0] in ('spanwire', 'opentelemetry')}\n"
        "before, body = ours(), {'model': 'm', 'messages': [{'role': 'user', 'content': 'x'}], 'stream': True}\n"
        "url = sys.argv[1] + '/chat/completions'\n"
        "print(before >= {'spanwire.timing.readers'}, httpx2.post(url, json=body).status_code, sorted(ours() - before))\n"
    )
    with serving(hello()) as server:
        assert run(sys.executable, "-W", "error", "-c", code, server.url) == "True 200 []"


def test_not_even_a_line(tmp_path: Path) -> None:
    """``opentelemetry-instrument python agent.py``."""
    agent = tmp_path / "agent.py"
    command = str(Path(sys.executable).parent / "opentelemetry-instrument")
    with serving(hello()) as server:
        agent.write_text(AGENT.format(first="", url=server.url), "utf-8")
        printed = run(command, "--disabled_instrumentations", "httpx,httpx2", sys.executable, str(agent))
    assert printed.endswith("True ['chat m']")


def test_public_names() -> None:
    assert set(spanwire_instrument.__all__) <= set(dir(spanwire_instrument))


@pytest.mark.parametrize("way", WAYS)
def test_a_variable_alone_shows_each_call(
    way: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPANWIRE_WATERFALL", "1")
    with serving(hello()) as server, instrumented() as seen:
        for hx in FAMILIES:
            assert ask(hx, way, server, BODY)[0] == 200
    assert capsys.readouterr().err == "".join(f"{timeline}\n" for timeline in seen.timelines)
    assert seen.outcomes == ["completed"] * 2
