"""aiohttp: a plain session with and without a line of code, and LiteLLM on it."""

from __future__ import annotations

import asyncio
import gc
import gzip
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from opentelemetry import trace
from spanwire_instrument import instrument, trace_aiohttp, uninstrument
from spanwire_instrument.aiohttp_family import _reading

from spanwire.testing import LoopbackServer, Script
from tests.integrations.instrument.support import BODY, Seen, chat_url, connections, trust
from tests.integrations.instrument.zero import checked, instrumented, one, same_again
from tests.support import hello, run, serving

Body = Callable[[aiohttp.ClientSession], Awaitable[Any]]
MODES = ["explicit", "zero"]


def session(server: LoopbackServer, **more: Any) -> aiohttp.ClientSession:
    ssl = trust(server)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=ssl), **more)


def bare(server: LoopbackServer, body: Body) -> Any:
    async def main() -> Any:
        async with session(server) as client:
            return await body(client)

    return run(main)


def watched(mode: str, server: LoopbackServer, body: Body, **more: Any) -> tuple[Any, Seen]:
    """What the body returns, and what was seen."""
    if mode == "zero":
        with instrumented(**more) as seen:
            return bare(server, body), seen
    seen = Seen()
    config = trace_aiohttp(manager=seen.manager, **more)

    async def main() -> Any:
        async with session(server, trace_configs=[config]) as client:
            return await body(client)

    return run(main), seen


async def lines(client: aiohttp.ClientSession, url: str, *, to_end: bool = False) -> list[bytes]:
    """As most readers of event streams: up to the terminal event."""
    found = []
    async with client.post(url, json=BODY) as response:
        async for line in response.content:
            found.append(line)
            if b"[DONE]" in line and not to_end:
                break
    return found


async def _any(response: aiohttp.ClientResponse) -> Any:
    return b"".join([data async for data in response.content.iter_any()])


async def _chunked(response: aiohttp.ClientResponse) -> Any:
    return b"".join([data async for data in response.content.iter_chunked(7)])


async def _chunks(response: aiohttp.ClientResponse) -> Any:
    return b"".join([data async for data, _ in response.content.iter_chunks()])


async def _read(response: aiohttp.ClientResponse) -> Any:
    return await response.read()


async def _text(response: aiohttp.ClientResponse) -> Any:
    return await response.text()


@pytest.mark.parametrize("reader", [_any, _chunked, _chunks, _read, _text])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("streamed", [True, False])
def test_answers_are_the_same_however_they_are_read(
    mode: str, streamed: bool, reader: Callable[[aiohttp.ClientResponse], Awaitable[Any]]
) -> None:
    async def body(client: aiohttp.ClientSession) -> Any:
        async with client.post(chat_url(server), json={**BODY, "stream": streamed}) as response:
            found = await reader(response)
            kind = type(response), type(response.content).__name__, isinstance(response.content, aiohttp.StreamReader)
            return response.status, list(response.raw_headers), found, kind

    with serving(same_again(streamed=streamed), tls=True) as server:
        expected = bare(server, body)
        server.clear()
        found, seen = watched(mode, server, body)
        assert found == expected
        (request,) = server.requests
    timeline = one(seen)
    assert timeline.transport == "aiohttp"
    assert timeline.model == "m"
    assert timeline.streamed is streamed
    assert (timeline.first_content_s is not None) or not streamed
    assert request.headers["traceparent"].split("-")[1] == timeline.trace_id
    # Without a line of code it is seen when TCP is connected; no signal of the library says so.
    parts = {"tcp", "tls"} if mode == "zero" else {"connect"}
    assert set(timeline.segments["handshake"].parts) == parts
    assert timeline.connection is not None
    assert timeline.connection.rtt_min_s


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("end_s", [0.0, 0.02])
@pytest.mark.parametrize("tls", [False, True])
def test_streams_that_are_left_at_the_terminal_event_keep_their_connection(mode: str, end_s: float, tls: bool) -> None:
    async def body(client: aiohttp.ClientSession) -> Any:
        found = []
        for _ in range(6):
            found.append(len(await lines(client, chat_url(server))))
            while _reading:  # the next call would wait for it for 5 ms, which a busy machine may need for itself
                await asyncio.sleep(0)
        return found

    with serving(hello(end_s=end_s, gap_s=0.001), tls=tls) as server:
        if end_s and not tls:  # with TLS the library does not wait for the last one that it closes
            bare(server, body)
            assert connections(server) == 6
            server.clear()
        found, seen = watched(mode, server, body)
        assert len(set(found)) == 1
        assert connections(server) == 1
    assert [checked(timeline).outcome for timeline in seen.timelines] == ["completed"] * 6
    first, *others = [timeline.connection for timeline in seen.timelines]
    assert first is not None
    assert not first.reused
    assert [(use.reused, use.id) for use in others if use is not None] == [(True, first.id)] * 5


@pytest.mark.parametrize("mode", MODES)
def test_a_drain_can_be_switched_off(mode: str) -> None:
    async def body(client: aiohttp.ClientSession) -> Any:
        return [len(await lines(client, chat_url(server))) for _ in range(3)]

    with serving(hello(end_s=0.1)) as server:
        watched(mode, server, body, drain=False)
        assert connections(server) == 3


@pytest.mark.parametrize("mode", MODES)
def test_an_end_that_does_not_come_costs_nothing_but_the_connection(mode: str) -> None:
    async def body(client: aiohttp.ClientSession) -> Any:
        return [len(await lines(client, chat_url(server))) for _ in range(8)]

    with serving(hello(end_s=5.0)) as server:
        _, seen = watched(mode, server, body)
        assert connections(server) == 8
    assert seen.outcomes == ["completed"] * 8


@pytest.mark.parametrize("mode", MODES)
def test_a_session_that_closes_while_a_stream_is_drained(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    async def body(client: aiohttp.ClientSession) -> Any:
        return await lines(client, chat_url(server))

    with serving(hello(end_s=1.0)) as server, caplog.at_level(logging.DEBUG):
        _, seen = watched(mode, server, body)
    one(seen)
    assert "Unclosed" not in caplog.text
    assert not [record for record in caplog.records if record.name == "asyncio" and record.levelno >= logging.WARNING]


@pytest.mark.parametrize("mode", MODES)
def test_a_stream_that_is_left_early_is_closed_by_the_caller(mode: str) -> None:
    async def body(client: aiohttp.ClientSession) -> None:
        async with client.post(chat_url(server), json=BODY) as response:
            await response.content.readline()

    with serving(hello(gap_s=0.02)) as server:
        _, seen = watched(mode, server, body)
    one(seen, "closed_by_caller")


@pytest.mark.parametrize("mode", MODES)
def test_a_call_that_is_cancelled_while_it_waits_for_a_connection_that_is_drained(mode: str) -> None:
    async def body(client: aiohttp.ClientSession) -> None:
        await lines(client, chat_url(server))
        task = asyncio.create_task(lines(client, chat_url(server)))
        await asyncio.sleep(0)  # its first step, up to the wait
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with serving(hello(end_s=1.0)) as server:
        _, seen = watched(mode, server, body)
        assert len(server.requests) == 1
    assert seen.outcomes == ["completed", "cancelled"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("hang", ["request", 2])
def test_a_cancelled_call_is_cancelled(mode: str, hang: Any) -> None:
    async def body(client: aiohttp.ClientSession) -> None:
        begun = asyncio.Event()

        async def call() -> None:
            async with client.post(chat_url(server), json=BODY) as response:
                async for _ in response.content:
                    begun.set()

        task = asyncio.create_task(call())
        while not server.requests:
            await asyncio.sleep(0)
        if hang != "request":
            await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with serving(hello(hang_after=hang)) as server:
        _, seen = watched(mode, server, body)
    one(seen, "cancelled")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("hang", ["request", 2])
@pytest.mark.parametrize("limit", ["total", "sock_read"])
def test_a_call_that_takes_too_long_is_a_timeout(mode: str, hang: Any, limit: str) -> None:
    async def body(client: aiohttp.ClientSession) -> None:
        timeout = aiohttp.ClientTimeout(**{limit: 0.2})
        with pytest.raises(asyncio.TimeoutError):
            async with client.post(chat_url(server), json=BODY, timeout=timeout) as response:
                await response.read()

    with serving(hello(hang_after=hang)) as server:
        _, seen = watched(mode, server, body)
    one(seen, "timeout")


@pytest.mark.parametrize("mode", MODES)
def test_a_stream_that_breaks_is_an_error(mode: str) -> None:
    async def body(client: aiohttp.ClientSession) -> str:
        with pytest.raises(aiohttp.ClientPayloadError) as raised:
            await lines(client, chat_url(server), to_end=True)
        return str(raised.value)

    with serving(hello(drop_after=2)) as server:
        expected = bare(server, body)
        found, seen = watched(mode, server, body)
        assert found == expected
    assert one(seen, "error").error_type == "ClientPayloadError"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("strict", [False, True])
def test_an_error_status_is_an_error(mode: str, strict: bool) -> None:
    async def body(client: aiohttp.ClientSession) -> Any:
        try:
            async with client.post(chat_url(server), json=BODY, raise_for_status=strict) as response:
                return response.status, await response.json()
        except aiohttp.ClientResponseError as error:
            return error.status, error.message

    with serving(Script(status=503)) as server:
        expected = bare(server, body)
        found, seen = watched(mode, server, body)
        assert found == expected
    one(seen, "error")


@pytest.mark.parametrize("mode", MODES)
def test_a_connect_that_is_refused_is_an_error(mode: str, closed_port: int) -> None:
    async def body(client: aiohttp.ClientSession) -> None:
        with pytest.raises(aiohttp.ClientConnectorError):
            await client.post(f"http://127.0.0.1:{closed_port}/v1/chat/completions", json=BODY)

    with serving(hello()) as server:
        _, seen = watched(mode, server, body)
    assert one(seen, "error").error_type == "ClientConnectorError"


@pytest.mark.parametrize("mode", MODES)
def test_a_packed_answer_is_read_along_behind_the_decoder(mode: str) -> None:
    plain = b'{"id":"x","model":"m-1","choices":[],"usage":{"prompt_tokens":4,"completion_tokens":2,"total_tokens":6}}'
    script = Script(body=gzip.compress(plain), headers={"content-encoding": "gzip"})

    async def body(client: aiohttp.ClientSession) -> Any:
        async with client.post(chat_url(server), json={**BODY, "stream": False}) as response:
            return await response.read()

    with serving(script) as server:
        found, seen = watched(mode, server, body)
    assert found == plain
    usage = one(seen).usage
    assert usage is not None
    assert usage.total_tokens == 6


@pytest.mark.parametrize("mode", MODES)
def test_the_wait_for_the_connector_is_queue(mode: str) -> None:
    async def main(client: aiohttp.ClientSession) -> None:
        await asyncio.gather(*(lines(client, chat_url(server), to_end=True) for _ in range(3)))

    with serving(hello(gap_s=0.01)) as server:
        seen = Seen()
        configs = [trace_aiohttp(manager=seen.manager)] if mode == "explicit" else []

        async def body() -> None:
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1), trace_configs=configs) as client:
                await main(client)

        if mode == "zero":
            instrument(manager=seen.manager)
        try:
            run(body)
        finally:
            uninstrument()
    waits = [checked(timeline).segments.get("queue") for timeline in seen.timelines]
    assert [wait is None for wait in waits] == [True, False, False]


@pytest.mark.parametrize("mode", MODES)
def test_a_name_is_looked_up(mode: str) -> None:
    async def body(client: aiohttp.ClientSession) -> Any:
        return await lines(client, chat_url(server).replace("127.0.0.1", "localhost"))

    with serving(hello()) as server:
        _, seen = watched(mode, server, body)
    assert set(one(seen).segments["handshake"].parts) == {"dns", "tcp"}


@pytest.mark.parametrize("mode", MODES)
def test_other_requests_are_nobodys_business(mode: str) -> None:
    async def body(client: aiohttp.ClientSession) -> None:
        await (await client.get(f"{server.url}/models")).read()
        await (await client.post(f"{server.url}/files", json={"a": 1})).read()
        await (await client.post(chat_url(server), data=b"no JSON")).read()

    with serving(hello()) as server:
        _, seen = watched(mode, server, body)
        assert all("traceparent" not in request.headers for request in server.requests)
    assert seen.timelines == []


def test_a_session_that_is_older_is_seen_too_and_gets_nothing_of_ours() -> None:
    seen = Seen()

    async def main() -> None:
        async with session(server) as client:
            before = dict(vars(client))
            await lines(client, chat_url(server))
            assert seen.timelines == []
            instrument(manager=seen.manager)
            try:
                await lines(client, chat_url(server))
            finally:
                uninstrument()
            await lines(client, chat_url(server))
            assert vars(client) == before

    with serving(hello()) as server:
        run(main)
    one(seen)


def test_a_request_that_cannot_be_made_is_no_call_that_hangs() -> None:
    bad: Any = {"a": object()}

    async def main() -> None:
        async with session(server) as client:
            with pytest.raises(TypeError):
                await client.post(chat_url(server), json=BODY, params=bad)
            gc.collect()
            await lines(client, chat_url(server))

    with serving(hello()) as server, instrumented() as seen:
        run(main)
    assert seen.outcomes[-1:] == ["completed"]
    assert set(seen.outcomes[:-1]) <= {"abandoned", "error"}


def test_opentelemetrys_own_spans_are_below_ours() -> None:
    """What another configuration makes while the request is sent."""
    parents = []

    async def note(_session: Any, _context: Any, _params: Any) -> None:
        parents.append(trace.get_current_span().get_span_context().span_id)

    config = aiohttp.TraceConfig()
    config.on_request_start.append(note)
    config.on_request_end.append(note)

    async def main() -> None:
        async with session(server, trace_configs=[config]) as client:
            await lines(client, chat_url(server))
        assert not trace.get_current_span().get_span_context().is_valid

    with serving(hello()) as server, instrumented() as seen:
        run(main)
    (span,) = [span for span in seen.spans if span.kind is trace.SpanKind.CLIENT]
    context = span.get_span_context()
    assert context is not None
    assert parents == [context.span_id, 0]


def test_a_session_with_a_base() -> None:
    async def main() -> None:
        async with aiohttp.ClientSession(f"{server.url}/") as client:
            await lines(client, "chat/completions")

    with serving(hello()) as server, instrumented() as seen:
        run(main)
    one(seen)


def test_the_explicit_configuration_is_not_doubled() -> None:
    async def main() -> None:
        async with session(server, trace_configs=[trace_aiohttp(manager=seen.manager)]) as client:
            await lines(client, chat_url(server))

    with serving(hello()) as server, instrumented() as seen:
        run(main)
    one(seen)


def test_other_configurations_of_a_session_see_what_they_saw() -> None:
    heard: list[str] = []

    def config() -> aiohttp.TraceConfig:
        made = aiohttp.TraceConfig()

        async def note(_session: Any, context: Any, params: Any) -> None:
            heard.append(type(params).__name__)

        made.on_request_start.append(note)
        made.on_request_end.append(note)
        return made

    async def main() -> None:
        async with session(server, trace_configs=[config()]) as client:
            await asyncio.gather(*(lines(client, chat_url(server)) for _ in range(4)))
            await (await client.get(f"{server.url}/models")).read()

    with serving(hello(gap_s=0.001)) as server, instrumented() as seen:
        run(main)
    assert len(seen.timelines) == 4
    assert len(heard) == 10


@pytest.mark.parametrize("mode", MODES)
def test_a_broken_tracing_does_not_break_the_call(
    mode: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from spanwire_instrument import aiohttp_family

    def broken(*_: Any, **__: Any) -> Any:
        raise ValueError("on purpose")

    async def body(client: aiohttp.ClientSession) -> Any:
        return len(await lines(client, chat_url(server)))

    with serving(hello(gap_s=0.001)) as server:
        expected = bare(server, body)
        for name in ("__init__", "enter", "goes_out", "answered", "fed", "eof", "_left_by_caller"):
            with monkeypatch.context() as patch:
                patch.setattr(aiohttp_family._Call, name, broken)
                found, _ = watched(mode, server, body)
                assert found == expected, name
    assert "on purpose" in caplog.text


# ---------------------------------------------------------------------------------------------------------------- litellm


@pytest.mark.filterwarnings(
    r"ignore:Items? .* the `ReadOnly` qualifier:UserWarning", "ignore::DeprecationWarning"
)  # its own
@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
@pytest.mark.parametrize("streamed", [True, False])
def test_litellm_on_aiohttp(provider: str, streamed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its default transport. ``openai/`` reads on by itself, ``hosted_vllm/`` closes at the terminal event."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    async def main() -> list[str]:
        litellm.in_memory_llm_clients_cache.flush_cache()
        texts = []
        for _ in range(6):
            made: Any = await litellm.acompletion(
                model=f"{provider}/m", api_base=server.url, api_key="k", messages=BODY["messages"], stream=streamed
            )
            if streamed:
                texts.append("".join([chunk.choices[0].delta.content or "" async for chunk in made]))
            else:
                texts.append(made.choices[0].message.content)
        await litellm.close_litellm_async_clients()
        return texts

    with serving(hello(gap_s=0.001)) as server:
        expected = asyncio.run(main())
        server.clear()
        with instrumented() as seen:
            assert asyncio.run(main()) == expected
        assert connections(server) == 1
    assert [checked(timeline).transport for timeline in seen.timelines] == ["aiohttp"] * 6
    assert len(seen.timelines) == 6


@pytest.mark.filterwarnings(
    r"ignore:Items? .* the `ReadOnly` qualifier:UserWarning", "ignore::DeprecationWarning"
)  # its own
def test_litellm_with_a_shared_session() -> None:
    import litellm

    seen = Seen()

    async def main() -> None:
        async with aiohttp.ClientSession(trace_configs=[trace_aiohttp(manager=seen.manager)]) as shared:
            for _ in range(3):
                made: Any = await litellm.acompletion(
                    model="openai/m", api_base=server.url, api_key="k", messages=BODY["messages"], stream=True,
                    shared_session=shared,
                )  # fmt: skip
                assert [chunk async for chunk in made]
        await litellm.close_litellm_async_clients()
        litellm.in_memory_llm_clients_cache.flush_cache()

    with serving(hello()) as server:
        asyncio.run(main())
        assert connections(server) == 1
    assert seen.outcomes == ["completed"] * 3
