"""Calls over gRPC: what is particular to this wire."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import textwrap
import threading
import traceback
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from spanwire_grpc import GRPCTransport, OpenAIJSON
from spanwire_grpc.loopback import GRPCPart
from spanwire_grpc.loops import bind_loop
from spanwire_grpc.stubs import openai_json
from spanwire_grpc.transport import _ready

import spanwire
from spanwire import errors
from spanwire.testing import LoopbackServer, Script
from spanwire.transport import Transport
from tests.cases.spans import Spans, attributes
from tests.support import AT_ONCE, NEVER, assert_adds_up, chat, hello, read, run, wait_for

HELLO = "Hello from the loopback server."
METHOD = "sglang.runtime.v1.SglangService/ChatComplete"


def serving(*scripts: Any, **more: Any) -> LoopbackServer:
    return LoopbackServer([*scripts], **{"part": "grpc", **more})


def refusing(code: grpc.StatusCode, message: str = "", **more: Any) -> Script:
    """A script that ends with a status."""
    headers = {"grpc-status": str(code.value[0]), "grpc-message": message, **more.pop("headers", {})}
    return Script(headers=headers, role_chunk=False, finish_reason=None, usage=None, done=False, **more)


async def complete(endpoint: spanwire.Endpoint, **more: Any) -> spanwire.Reply:
    async with spanwire.ConnectionManager(**more) as manager:
        return await manager.complete(endpoint, chat())


def test_it_is_what_the_contract_says() -> None:
    assert isinstance(GRPCTransport(), Transport)


# --- what is sent, and what is told ---------------------------------------------------------------------------------------


def test_the_trace_is_in_the_request_too_where_this_server_looks_for_it() -> None:
    headers = {"traceparent": "00-1-2-01", "x-other": "1"}
    endpoint = spanwire.Endpoint("grpc://h:1")
    rpc = OpenAIJSON().encode(chat(), endpoint, streamed=True, headers=headers, learned=None)
    request = openai_json.OpenAIRequest.FromString(rpc.request)
    assert dict(request.trace_headers) == {"traceparent": "00-1-2-01"}
    assert (rpc.method, rpc.kind) == (f"/{METHOD}", "stream")


def test_metadata_come_back_as_headers_and_the_span_has_the_conventions_names() -> None:
    spans = Spans()
    with serving(hello(headers={"x-model-host": "h1"})) as server:
        reply = run(lambda: complete(server.endpoint(), telemetry=spans.telemetry()))
        assert server.requests[0].headers["traceparent"]
    assert reply.headers["x-model-host"] == "h1"
    found = attributes(spans.one())
    assert found["rpc.system.name"] == "grpc"
    assert found["rpc.method"] == METHOD
    assert found["rpc.response.status_code"] == "OK"
    assert found["network.protocol.name"] == "grpc" if "network.protocol.name" in found else True


def test_a_status_is_on_the_span() -> None:
    spans = Spans()
    with serving(refusing(grpc.StatusCode.NOT_FOUND, "no such model")) as server:
        with pytest.raises(errors.BadRequest, match="no such model"):
            run(lambda: complete(server.endpoint(), telemetry=spans.telemetry()))
    assert attributes(spans.one())["rpc.response.status_code"] == "NOT_FOUND"


def test_a_key_that_the_server_repeats_is_in_no_traceback() -> None:
    key = "sk-secret"  # by its name, since a traceback has the lines of this file in it
    with serving(refusing(grpc.StatusCode.UNAUTHENTICATED, f"bad key {key}")) as server:
        with pytest.raises(errors.AuthenticationFailed, match=r"bad key \*\*\*") as caught:
            run(lambda: complete(server.endpoint(api_key=key)))
    assert key not in "".join(traceback.format_exception(caught.value))


def test_what_the_server_says_of_its_time_in_trailing_metadata_is_heard() -> None:
    script = hello(headers={"trailer-server-timing": "gfet4t7; dur=12.5"}, prefill_s=0.02)
    with serving(script) as server:

        async def body() -> spanwire.Stream:
            async with spanwire.ConnectionManager() as manager:
                async with manager.stream(server.endpoint(), chat()) as stream:
                    await read(stream)
                return stream

        timing = run(body).timeline.to_dict()["server_timing"]
    assert timing["dialect"] == "google-grpc"
    assert 12.5 in timing["raw"].values()


@pytest.mark.parametrize("dialect", ["vllm", "groq", "server-timing", "envoy"])
def test_the_servers_own_times_are_on_the_timeline(dialect: str) -> None:
    with serving(hello(server_timing=dialect, queue_s=0.02, prefill_s=0.02)) as server:
        reply = run(lambda: complete(server.endpoint()))
    assert reply.timeline is not None
    assert "server_timing" in reply.timeline.to_dict()


# --- statuses ---------------------------------------------------------------------------------------------------------------


def test_a_queue_that_is_full_is_tried_again_when_the_server_says() -> None:
    full = refusing(grpc.StatusCode.RESOURCE_EXHAUSTED, "queue full", headers={"trailer-retry-after-ms": "20"})
    with serving(full, full, hello()) as server:
        with pytest.raises(errors.RateLimited) as caught:
            run(lambda: complete(server.endpoint(retries=NEVER)))
        assert caught.value.retry_after_s == 0.02
        assert caught.value.code == "RESOURCE_EXHAUSTED"
        assert run(lambda: complete(server.endpoint(retries=AT_ONCE))).text == HELLO
        assert len(server.requests) == 3


def test_a_server_that_is_unavailable_by_its_own_word_has_not_lost_its_connection() -> None:
    with serving(refusing(grpc.StatusCode.UNAVAILABLE, "model is loading"), hello()) as server:
        reply = run(lambda: complete(server.endpoint(retries=AT_ONCE)))
        assert reply.text == HELLO
        assert server.connections == 1
        assert reply.timeline is not None
        assert len(reply.timeline.to_dict()["attempts"]) == 2


def test_a_status_in_mid_stream_comes_after_what_had_arrived_and_is_final() -> None:
    with serving(refusing(grpc.StatusCode.UNAVAILABLE, "draining", tokens=["a", "b"])) as server:

        async def body() -> None:
            async with spanwire.ConnectionManager() as manager:
                text = ""
                with pytest.raises(errors.Overloaded, match="draining") as caught:
                    async with manager.stream(server.endpoint(retries=AT_ONCE), chat()) as stream:
                        async for chunk in stream:
                            text += chunk.text
                assert text == "ab"
                assert caught.value.reply is not None
                assert caught.value.reply.text == "ab"
                assert not caught.value.retryable
                assert_adds_up(stream.timeline)

        run(body)
        assert len(server.requests) == 1


def test_a_refused_request_is_a_normal_stream_with_an_error_in_it() -> None:
    words = b'{"error":{"message":"messages: field required","type":"BadRequest"}}'
    with serving(Script(writes=[words])) as server:
        with pytest.raises(errors.BadRequest, match="field required") as caught:
            run(lambda: complete(server.endpoint()))
    assert caught.value.code == "BadRequest"
    assert not caught.value.retryable


def test_embeddings_have_a_status_of_their_own() -> None:
    async def embed(endpoint: spanwire.Endpoint) -> spanwire.Embeddings:
        async with spanwire.ConnectionManager() as manager:
            return await manager.embed(endpoint, spanwire.Call.embeddings("e", ["a", "b"]))

    with serving(Script(status=400), Script(dimensions=3)) as server:
        with pytest.raises(errors.BadRequest) as caught:
            run(lambda: embed(server.endpoint()))
        assert caught.value.status == 400
        found = run(lambda: embed(server.endpoint()))
    assert [len(vector) for vector in found.vectors] == [3, 3]
    assert found.usage is not None
    assert found.usage.input_tokens == 2


def test_a_dialect_that_the_server_does_not_speak() -> None:
    async def body() -> None:
        bind_loop()
        server = grpc.aio.server()
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        with pytest.raises(errors.BadRequest, match=METHOD) as caught:
            await complete(spanwire.Endpoint(f"grpc://127.0.0.1:{port}", proxy=None, retries=AT_ONCE))
        assert caught.value.code == "UNIMPLEMENTED"
        await server.stop(None)

    asyncio.run(body())


# --- connecting -------------------------------------------------------------------------------------------------------------


def test_nobody_listens() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        with pytest.raises(errors.ConnectionFailed, match="refused") as caught:
            run(lambda: complete(spanwire.Endpoint(f"grpc://127.0.0.1:{port}", proxy=None, retries=NEVER)))
    assert caught.value.phase == "tcp"
    assert isinstance(caught.value.__cause__, grpc.aio.AioRpcError)


def test_what_is_no_grpc_server_is_told_and_not_tried_again() -> None:
    with LoopbackServer() as server:  # HTTP/1.1
        with pytest.raises(errors.ConnectionFailed, match="not a gRPC server") as caught:
            run(lambda: complete(spanwire.Endpoint(f"grpc://127.0.0.1:{server.port}", proxy=None, retries=AT_ONCE)))
    assert not caught.value.retryable


def test_a_certificate_that_nobody_trusts() -> None:
    with serving(tls=True) as server, LoopbackServer(tls=True) as other:
        assert other.ca_pem is not None
        with pytest.raises(errors.ConnectionFailed) as caught:
            run(lambda: complete(server.endpoint(tls=spanwire.TLS(ca=other.ca_pem), retries=AT_ONCE)))
    assert (caught.value.phase, caught.value.retryable) == ("tls", False)


def test_a_certificate_for_another_name() -> None:
    with serving(hello(), tls=True, public_host="only.example") as server:
        at = f"grpcs://127.0.0.1:{server.port}"
        named = spanwire.Endpoint(
            at, tls=spanwire.TLS(ca=server.ca), proxy=None, options={"server_name": "only.example"}
        )
        assert run(lambda: complete(named)).text == HELLO


def test_each_connection_is_one() -> None:
    """Two channels of the library with the same target share one by themselves."""
    with serving(hello()) as server:

        async def body() -> None:
            async with spanwire.ConnectionManager() as one, spanwire.ConnectionManager() as two:
                for manager in (one, two):
                    reply = await manager.complete(server.endpoint(), chat())
                    assert reply.timeline is not None
                    assert reply.timeline.segments["handshake"].parts["connect"].duration_s > 0
                assert server.connections == 2

        run(body)


def test_a_connect_that_was_given_up_leaves_nothing() -> None:
    async def body() -> None:
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            endpoint = spanwire.Endpoint(
                f"grpc://127.0.0.1:{silent.getsockname()[1]}",
                proxy=None,
                timeouts=spanwire.Timeouts(connect_s=0.2),
                retries=NEVER,
            )
            with pytest.raises(errors.CallTimeout) as caught:
                await complete(endpoint)
            assert caught.value.limit == "connect_s"

    run(body)


def test_a_change_of_state_that_is_missed_is_found() -> None:
    """The library may not tell while it backs off."""

    class Channel:
        def __init__(self) -> None:
            self.asked = 0

        def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
            self.asked += 1
            ready = self.asked > 2
            return grpc.ChannelConnectivity.READY if ready else grpc.ChannelConnectivity.CONNECTING

        async def wait_for_state_change(self, _: Any) -> None:
            await asyncio.get_running_loop().create_future()

    asyncio.run(_ready(Channel(), spanwire.Endpoint("grpc://h:1")))


# --- a connection that ends ---------------------------------------------------------------------------------------------------


def test_a_server_that_is_killed_in_mid_stream() -> None:
    command = [sys.executable, "-m", "spanwire.testing", "--part", "grpc", "--tokens", "1000", "--token-gap-ms", "5"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()

        async def body() -> None:
            async with spanwire.ConnectionManager() as manager:
                endpoint = spanwire.Endpoint(url, proxy=None, retries=AT_ONCE)
                with pytest.raises(errors.ConnectionFailed) as caught:
                    async with manager.stream(endpoint, chat()) as stream:
                        while not (await anext(stream)).text:  # the role
                            pass
                        server.kill()
                        await read(stream)
                assert caught.value.phase == "read"
                assert not caught.value.retryable
                assert caught.value.reply is not None
                assert caught.value.reply.text
                assert_adds_up(stream.timeline)

        run(body)
    finally:
        server.kill()
        server.communicate()


def test_a_server_that_sends_its_connections_away_is_followed() -> None:
    """GOAWAY without an error: what is under way goes on, and the next call is on a new connection, at no cost to anybody."""
    part = GRPCPart(options=[("grpc.max_connection_age_ms", 150), ("grpc.max_connection_age_grace_ms", 5000)])
    with serving(Script(tokens=["a"] * 10, gap_s=0.01), part=part) as server:

        async def body() -> None:
            async with spanwire.ConnectionManager() as manager:
                end = asyncio.get_running_loop().time() + 1.0
                while asyncio.get_running_loop().time() < end:
                    async with manager.stream(server.endpoint(retries=NEVER), chat()) as stream:
                        assert await read(stream) == "a" * 10
            assert server.connections > 1

        run(body)


def test_too_many_pings() -> None:
    """GOAWAY with ENHANCE_YOUR_CALM, for a client that pings more often than the server likes."""
    options = {"channel_options": [("grpc.keepalive_time_ms", 50), ("grpc.http2.max_pings_without_data", 0)]}
    part = GRPCPart(
        options=[("grpc.http2.min_ping_interval_without_data_ms", 60_000), ("grpc.http2.max_ping_strikes", 1)]
    )
    with serving(Script(hang_after="request"), hello(), part=part) as server:

        async def body() -> None:
            async with spanwire.ConnectionManager() as manager:
                endpoint = server.endpoint(
                    options=options, retries=NEVER, timeouts=spanwire.Timeouts(first_content_s=20)
                )
                with pytest.raises(errors.ConnectionFailed) as caught:
                    await manager.complete(endpoint, chat())
                assert caught.value.retryable
                assert (await manager.complete(server.endpoint(), chat())).text == HELLO

        run(body)


# --- time ---------------------------------------------------------------------------------------------------------------------


def test_the_server_knows_the_deadline_of_the_call() -> None:
    seen: list[float | None] = []

    async def answer(request: bytes, context: Any) -> AsyncIterator[bytes]:
        seen.append(context.time_remaining())
        yield openai_json.OpenAIStreamChunk(
            json_chunk=b'{"choices":[{"index":0,"delta":{"content":"x"},"finish_reason":"stop"}]}'
        ).SerializeToString()
        yield openai_json.OpenAIStreamChunk(finished=True).SerializeToString()

    async def body() -> None:
        bind_loop()
        server = grpc.aio.server()
        service, name = METHOD.split("/")
        methods = {name: grpc.unary_stream_rpc_method_handler(answer)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        for total_s in (None, 30.0):
            timeouts = spanwire.Timeouts(total_s=total_s)
            await complete(spanwire.Endpoint(f"grpc://127.0.0.1:{port}", proxy=None, timeouts=timeouts))
        await server.stop(None)

    asyncio.run(body())
    assert seen[0] is None or seen[0] > 1e6
    assert seen[1] is not None
    assert 0 < seen[1] <= 30


def test_a_deadline_that_is_hit() -> None:
    with serving(hello(gap_s=0.2)) as server:
        with pytest.raises(errors.CallTimeout) as caught:
            run(lambda: complete(server.endpoint(timeouts=spanwire.Timeouts(total_s=0.3), retries=AT_ONCE)))
        assert caught.value.limit == "total_s"
        assert not caught.value.retryable
        server.wait_for(lambda s: s.requests[0].left or s.requests[0].ended)


# --- loops, threads, processes ------------------------------------------------------------------------------------------------


def test_one_manager_on_loops_in_a_row_and_in_a_thread() -> None:
    manager = spanwire.ConnectionManager()
    texts: list[str] = []

    async def body() -> None:
        texts.append((await manager.complete(server.endpoint(), chat())).text)

    with serving(hello()) as server:
        asyncio.run(body())
        asyncio.run(body())
        thread = threading.Thread(target=lambda: asyncio.run(body()))
        thread.start()
        thread.join()
    assert texts == [HELLO] * 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_after_a_fork_it_says_so_instead_of_hanging() -> None:
    code = textwrap.dedent("""
        import os, sys, warnings
        warnings.simplefilter("ignore")
        import spanwire
        manager = spanwire.SyncConnectionManager()
        endpoint = spanwire.Endpoint(sys.argv[1], proxy=None)
        call = spanwire.Call.chat("m", [{"role": "user", "content": "Say hello"}])
        print(manager.complete(endpoint, call).text, flush=True)
        child = os.fork()
        if not child:
            try:
                manager.complete(endpoint, call)
            except spanwire.errors.ConfigurationError as error:
                print("refused" if "forked" in str(error) else error, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        print(manager.complete(endpoint, call).text, flush=True)
    """)
    with serving(hello()) as server:
        done = subprocess.run(
            [sys.executable, "-c", code, server.url], capture_output=True, text=True, timeout=50, check=False
        )
    assert done.stdout.splitlines() == [HELLO, "refused", HELLO], done.stderr[-2000:]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_process_that_forks_before_its_first_call_is_fine() -> None:
    code = textwrap.dedent("""
        import os, sys
        import spanwire
        manager = spanwire.SyncConnectionManager()
        endpoint = spanwire.Endpoint(sys.argv[1], proxy=None)
        call = spanwire.Call.chat("m", [{"role": "user", "content": "Say hello"}])
        child = os.fork()
        print(manager.complete(endpoint, call).text, flush=True)
        if child:
            os.waitpid(child, 0)
        os._exit(0)
    """)
    with serving(hello()) as server:
        done = subprocess.run(
            [sys.executable, "-c", code, server.url], capture_output=True, text=True, timeout=50, check=False
        )
    assert done.stdout.splitlines() == [HELLO] * 2, done.stderr[-2000:]


def test_calls_share_one_connection_and_the_option_bounds_them() -> None:
    with serving(hello(prefill_s=0.05)) as server:

        async def body() -> None:
            async with spanwire.ConnectionManager() as manager:
                endpoint = server.endpoint(options={"max_streams": 2})
                await asyncio.gather(*(manager.complete(endpoint, chat()) for _ in range(4)))
                await wait_for(server, lambda s: s.connections == 2)
            async with spanwire.ConnectionManager() as manager:
                await asyncio.gather(*(manager.complete(server.endpoint(), chat()) for _ in range(8)))
            assert server.connections == 3

        run(body)
