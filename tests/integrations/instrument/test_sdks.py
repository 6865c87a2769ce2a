"""Under the SDKs that the development environment has: openai, and LangChain's model on it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

import httpx2
import openai
import pytest
from langchain_openai import ChatOpenAI
from pydantic import SecretStr
from spanwire_instrument import chat_openai, httpx2_async_client, httpx2_client, httpx2_transport

from spanwire.errors import ConfigurationError
from spanwire.testing import LoopbackServer, Script
from tests.integrations.instrument.support import Seen, connections, environment, trust
from tests.proxies import proxy
from tests.support import MESSAGES, assert_adds_up, hello, serving


@pytest.fixture
def seen() -> Seen:
    return Seen()


def sdk(server: LoopbackServer, http_client: Any, **more: Any) -> Any:
    return openai.OpenAI(base_url=server.url, api_key="k", http_client=http_client, **more)


def streamed(client: Any) -> str:
    with client.chat.completions.create(model="m", messages=MESSAGES, stream=True) as stream:
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


@pytest.mark.parametrize("tls", [False, True])
def test_six_streamed_calls_of_the_synchronous_sdk_take_one_connection(tls: bool, seen: Seen) -> None:
    with serving(hello(), tls=tls) as server:
        with openai.DefaultHttpxClient(verify=trust(server)) as http:
            texts = [streamed(sdk(server, http)) for _ in range(6)]
        assert connections(server) == 6
        server.clear()
        with httpx2_client(manager=seen.manager, verify=trust(server)) as http:
            assert [streamed(sdk(server, http)) for _ in range(6)] == texts
        assert connections(server) == 1
    assert seen.outcomes == ["completed"] * 6
    for timeline in seen.timelines:
        assert_adds_up(timeline)
        assert timeline.first_content_s is not None
    assert len(seen.spans) == 6


@pytest.mark.parametrize("tls", [False, True])
def test_six_streamed_calls_of_the_asynchronous_sdk_take_one_connection(tls: bool, seen: Seen) -> None:
    async def main(server: LoopbackServer) -> None:
        async with httpx2_async_client(manager=seen.manager, verify=trust(server)) as http:
            client: Any = openai.AsyncOpenAI(base_url=server.url, api_key="k", http_client=http)
            for _ in range(6):
                stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
                assert [chunk async for chunk in stream]

    with serving(hello(), tls=tls) as server:
        asyncio.run(main(server))
        assert connections(server) == 1
    assert seen.outcomes == ["completed"] * 6


def _completion(client: Any) -> Any:
    return client.chat.completions.create(model="m", messages=MESSAGES).model_dump()


def _stream(client: Any) -> Any:
    chunks = client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
    return [chunk.model_dump() for chunk in chunks]


def _raw(client: Any) -> Any:
    raw = client.chat.completions.with_raw_response.create(model="m", messages=MESSAGES)
    return raw.status_code, sorted(set(raw.headers) - {"date"}), raw.parse().choices[0].message.content


def _embeddings(client: Any) -> Any:
    return client.embeddings.create(model="m", input=["a", "b"]).model_dump()


def _early(client: Any) -> Any:
    with client.chat.completions.create(model="m", messages=MESSAGES, stream=True) as stream:
        return next(iter(stream)).choices[0].delta.model_dump()


SCRIPTS = {
    "well": [hello()],
    "slow end": [hello(end_s=0.01)],
    "retried": [Script(status=503, headers={"Retry-After": "0"}), hello()],
    "limited": [Script(status=429)],
    "broken": [Script(tokens=["a"] * 5, drop_after=2, drop_mode="reset")],
    "error in the stream": [Script(writes=[b'data: {"error":{"message":"boom","code":500}}\n\n'])],
}


@pytest.mark.parametrize("call", [_completion, _stream, _raw, _embeddings, _early], ids=lambda call: call.__name__[1:])
@pytest.mark.parametrize("name", SCRIPTS)
def test_what_the_sdk_gives_is_the_same(name: str, call: Callable[[Any], Any], seen: Seen) -> None:
    def play(http: Any) -> Any:
        with serving(*SCRIPTS[name]) as server, http:
            try:
                result = call(sdk(server, http, max_retries=1))
            except (openai.APIError, ValueError) as error:  # ValueError: no JSON
                result = type(error), str(error), type(error.__cause__), getattr(error, "body", None)
            server.clear()
            return _without_ids(result)

    assert play(httpx2_client(manager=seen.manager)) == play(openai.DefaultHttpxClient())
    assert seen.timelines
    for timeline in seen.timelines:
        assert_adds_up(timeline)
    if name == "retried":  # a transport sees tries, not calls
        assert seen.outcomes[0] == "error"
        assert seen.timelines[0].error_type == "Overloaded"
    if name == "error in the stream" and call is _stream:
        assert seen.outcomes == ["error"]


def _without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_ids(inner) for key, inner in value.items() if key not in ("id", "created")}
    if isinstance(value, (list, tuple)):
        return [_without_ids(inner) for inner in value]
    return value


def test_responses_are_read_along(seen: Seen) -> None:
    base = {"id": "resp_1", "object": "response", "created_at": 0, "model": "m-1", "output": [], "tools": []}
    response = {**base, "parallel_tool_calls": True, "tool_choice": "auto"}
    usage = {
        "input_tokens": 1,
        "output_tokens": 2,
        "total_tokens": 3,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    }
    delta = {"content_index": 0, "item_id": "i", "output_index": 0, "delta": "Hello", "logprobs": []}
    told: list[tuple[str, dict[str, Any]]] = [
        ("response.created", {"response": response}),
        ("response.output_text.delta", delta),
        ("response.completed", {"response": {**response, "usage": usage}}),
    ]
    events = [
        f"event: {kind}\ndata: {json.dumps({'type': kind, 'sequence_number': number, **more})}\n\n".encode()
        for number, (kind, more) in enumerate(told)
    ]

    def answer(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=iter(events))

    transport = httpx2_transport(httpx2.MockTransport(answer), manager=seen.manager)
    with httpx2.Client(transport=transport) as http:
        client = openai.OpenAI(base_url="http://x/v1", api_key="k", http_client=http)
        with client.responses.create(model="m", input="x", stream=True) as stream:
            assert [event.type for event in stream][-1] == "response.completed"
    attributes = seen.spans[0].attributes or {}
    assert attributes["gen_ai.response.id"] == "resp_1"
    assert attributes["gen_ai.usage.output_tokens"] == 2
    assert "spanwire.time_to_first_content" in attributes


# --- LangChain ----------------------------------------------------------------------------------------------------------


def test_chat_openai_keeps_its_usage_and_its_connection(seen: Seen) -> None:
    with serving(hello()) as server:
        kwargs = chat_openai(manager=seen.manager)
        model = ChatOpenAI(model="m", base_url=server.url, api_key=SecretStr("k"), **kwargs)
        for _ in range(6):
            chunks = list(model.stream("Say hello"))
            assert any(chunk.usage_metadata for chunk in chunks)
        assert connections(server) == 1

        async def main() -> None:
            for _ in range(6):
                assert [chunk async for chunk in model.astream("Say hello")]
            await kwargs["http_async_client"].aclose()

        asyncio.run(main())
        assert connections(server) == 2
        kwargs["http_client"].close()
    assert seen.outcomes == ["completed"] * 12
    assert all(timeline.usage is not None for timeline in seen.timelines)


def test_what_is_not_installed_is_said() -> None:
    with pytest.raises(ConfigurationError, match="pip install httpx9"):
        chat_openai(library="httpx9")  # type: ignore[arg-type]


# --- under other instrumentations --------------------------------------------------------------------------------------


def test_an_outer_genai_span_is_enriched_and_not_doubled(seen: Seen) -> None:
    tracer = seen.tracers.get_tracer("outer")
    with serving(hello()) as server, httpx2_client(manager=seen.manager) as http:
        with tracer.start_as_current_span("chat m", attributes={"gen_ai.operation.name": "chat"}) as outer:
            streamed(sdk(server, http))
        context = outer.get_span_context()
        assert server.requests[0].headers["traceparent"].startswith(f"00-{context.trace_id:032x}-")
    attempt, span = seen.spans
    assert attempt.name == "spanwire.attempt"
    assert (span.attributes or {})["spanwire.outcome"] == "completed"
    assert not any(name.startswith("gen_ai.response") for name in attempt.attributes or {})


def test_a_traceparent_that_the_request_has_is_left_alone_and_is_the_parent(seen: Seen) -> None:
    given = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
    with serving(hello()) as server, httpx2_client(manager=seen.manager) as http:
        client = sdk(server, http, default_headers={"traceparent": given})
        streamed(client)
        assert server.requests[0].headers["traceparent"] == given
    assert seen.spans[0].parent is not None
    assert seen.spans[0].parent.span_id == 0x0123456789ABCDEF


# --- settings that a transport of one's own usually loses -------------------------------------------------------------


def test_proxies_of_the_environment_are_used(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    with proxy() as between, serving(hello()) as server:
        url = f"http://127.0.0.1:{between.port}"
        with environment(monkeypatch, {"HTTP_PROXY": url}):
            with httpx2_client(manager=seen.manager) as http:
                for _ in range(3):
                    streamed(sdk(server, http))
            with httpx2_client(manager=seen.manager, trust_env=False) as http:
                streamed(sdk(server, http))
        with environment(monkeypatch, {"HTTP_PROXY": url, "NO_PROXY": "127.0.0.1"}):
            with httpx2_client(manager=seen.manager) as http:
                streamed(sdk(server, http))
        assert between.connections == 1
        assert len(server.requests) == 5
    assert seen.outcomes == ["completed"] * 5


def test_mounts_are_used(seen: Seen) -> None:
    def answer(request: Any) -> Any:
        return httpx2.Response(200, json={"id": "x", "choices": [], "model": "m", "created": 0, "object": "o"})

    mounts = {"all://mounted": httpx2.MockTransport(answer)}
    with httpx2_client(manager=seen.manager, mounts=mounts) as http:
        client: Any = openai.OpenAI(base_url="http://mounted/v1", api_key="k", http_client=http)
        client.chat.completions.create(model="m", messages=MESSAGES)
    assert seen.outcomes == ["completed"]


def test_the_defaults_are_those_of_the_sdks_own_client() -> None:
    with httpx2_client() as ours, openai.DefaultHttpxClient() as theirs:
        assert ours.follow_redirects == theirs.follow_redirects
        pool, expected = ours._transport._inner._pool, theirs._transport._pool  # type: ignore[attr-defined]
        assert pool._max_connections == expected._max_connections
        assert pool._max_keepalive_connections == expected._max_keepalive_connections
        assert sdk_timeout(ours) == sdk_timeout(theirs)


def sdk_timeout(http: Any) -> Any:
    return openai.OpenAI(base_url="http://x", api_key="k", http_client=http).timeout


@pytest.mark.parametrize(
    "wrong", [{"inner": object()}, {"inner": httpx2.MockTransport(lambda _: httpx2.Response(200)), "http2": True}]
)
def test_a_transport_that_cannot_be_meant_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="httpx2_transport"):
        httpx2_transport(**wrong)


def test_a_bug_in_here_costs_no_call(seen: Seen, monkeypatch: Any, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    with serving(hello()) as server, httpx2_client(manager=seen.manager) as http:
        expected = streamed(sdk(server, http))
        for name in ("Watched.answered", "Watched.__init__", "recognise"):
            with monkeypatch.context() as patch, caplog.at_level(logging.CRITICAL):
                owner = "watched" if "." in name else "httpx_family"
                patch.setattr(f"spanwire_instrument.{owner}.{name}", fail)
                assert streamed(sdk(server, http)) == expected


def test_importing_loads_no_client_library() -> None:
    import subprocess
    import sys

    code = (
        "import sys, spanwire_instrument; print([m for m in ('httpx','httpx2','openai','aiohttp') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout == "[]\n"
