"""grpc.aio: interceptors, and without a line of code. A server of the Open Inference Protocol's methods, on bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import pytest
import trustme
from spanwire_instrument import Rules, grpc_aio_interceptors

from spanwire.errors import ConfigurationError
from tests.integrations.instrument.support import Seen
from tests.integrations.instrument.zero import checked, instrumented, one

SERVICE = "inference.GRPCInferenceService"
MODES = ["explicit", "zero"]


class Request:
    """What a generated message would be."""

    def __init__(self, model_name: str, data: bytes = b"q") -> None:
        self.model_name = model_name
        self.data = data


class Server:
    """Echoes, in as many messages as asked for; ``fail`` fails, ``hang`` hangs."""

    last: Server

    def __init__(self) -> None:
        Server.last = self
        self.metadata: list[dict[str, Any]] = []
        self.target = ""

    def _note(self, context: Any) -> None:
        self.metadata.append(dict(context.invocation_metadata()))

    async def unary(self, request: bytes, context: Any) -> bytes:
        self._note(context)
        if request == b"fail":
            await context.abort(grpc.StatusCode.UNAVAILABLE, "on purpose")
        if request == b"hang":
            await asyncio.sleep(60)
        return b"answer to " + request

    async def stream(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        self._note(context)
        for number in range(3):
            yield b"%d" % number
        if request == b"fail":
            await context.abort(grpc.StatusCode.UNAVAILABLE, "on purpose")
        if request == b"hang":
            await asyncio.sleep(60)

    async def both(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        self._note(context)
        async for request in requests:
            yield b"answer to " + request

    def handlers(self, service: str) -> Any:
        return grpc.method_handlers_generic_handler(
            service,
            {
                "ModelInfer": grpc.unary_unary_rpc_method_handler(self.unary),
                "ServerReady": grpc.unary_unary_rpc_method_handler(self.unary),
                "Generate": grpc.unary_stream_rpc_method_handler(self.stream),
                "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(self.both),
            },
        )


Body = Callable[[Any], Awaitable[Any]]


def play(mode: str, body: Body, *, tls: bool = False, **more: Any) -> tuple[Any, Seen, Server]:
    """What the body returns on a channel, what was seen, and the server. Mode ``bare``: nothing is seen."""
    server = Server()
    seen = Seen()

    async def main() -> Any:
        served = grpc.aio.server()
        served.add_generic_rpc_handlers((server.handlers(SERVICE), server.handlers("my.Service")))
        ca = trustme.CA() if tls else None
        if ca is None:
            port = served.add_insecure_port("127.0.0.1:0")
        else:
            issued = ca.issue_cert("localhost")
            chain = b"".join(blob.bytes() for blob in issued.cert_chain_pems)
            credentials = grpc.ssl_server_credentials([(issued.private_key_pem.bytes(), chain)])
            port = served.add_secure_port("localhost:0", credentials)
        await served.start()
        server.target = f"localhost:{port}" if tls else f"127.0.0.1:{port}"
        settings: dict[str, Any] = {}
        if mode == "explicit":
            settings["interceptors"] = grpc_aio_interceptors(server.target, manager=seen.manager, **more)
        if ca is None:
            channel = grpc.aio.insecure_channel(server.target, **settings)
        else:
            roots = grpc.ssl_channel_credentials(ca.cert_pem.bytes())
            channel = grpc.aio.secure_channel(server.target, roots, **settings)
        try:
            async with channel:
                return await body(channel)
        finally:
            await served.stop(None)

    if mode != "zero":
        return asyncio.run(main()), seen, server
    with instrumented(**more) as seen:
        return asyncio.run(main()), seen, server


def unary(channel: Any, method: str = f"/{SERVICE}/ModelInfer") -> Any:
    return channel.unary_unary(method, request_serializer=lambda request: request.data)


def streaming(channel: Any) -> Any:
    return channel.unary_stream("/my.Service/Generate", response_deserializer=lambda data: data.decode())


RULES = Rules(paths={"/my.Service/Generate": "chat"})


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_unary_calls(mode: str, tls: bool) -> None:
    async def body(channel: Any) -> Any:
        call = unary(channel)
        return [await call(Request("m"), metadata=(("x-mine", "1"),)) for _ in range(3)]

    expected, _, _ = play("bare", body, tls=tls)
    found, seen, server = play(mode, body, tls=tls)
    assert found == expected == [b"answer to q"] * 3
    assert [checked(timeline).model for timeline in seen.timelines] == ["m"] * 3
    assert {timeline.operation for timeline in seen.timelines} == {"inference"}
    assert {timeline.endpoint for timeline in seen.timelines} == {server.target}
    sent = [metadata["traceparent"].split("-")[1] for metadata in server.metadata]
    assert sent == [timeline.trace_id for timeline in seen.timelines]
    assert {metadata["x-mine"] for metadata in server.metadata} == {"1"}
    if mode == "zero":  # the channel is known, and so is when it connects
        reused = [timeline.connection.reused for timeline in seen.timelines if timeline.connection is not None]
        assert reused == [False, True, True]
        assert set(seen.timelines[0].segments["handshake"].parts) == {"connect"}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["iterate", "read"])
def test_streams(mode: str, how: str) -> None:
    async def body(channel: Any) -> Any:
        call = streaming(channel)(b"q")
        if how == "iterate":
            return [message async for message in call], isinstance(call, grpc.aio.UnaryStreamCall)
        found = []
        while (message := await call.read()) is not grpc.aio.EOF:
            found.append(message)
        return found, isinstance(call, grpc.aio.UnaryStreamCall)

    expected, _, _ = play("bare", body)
    found, seen, _ = play(mode, body, rules=RULES)
    assert found == expected == (["0", "1", "2"], True)
    timeline = one(seen)
    assert timeline.operation == "chat"
    assert timeline.first_content_s is not None
    assert timeline.last_chunk_s is not None
    assert timeline.first_content_s <= timeline.last_chunk_s <= timeline.total_s


@pytest.mark.parametrize("mode", MODES)
def test_streams_both_ways(mode: str) -> None:
    async def body(channel: Any) -> Any:
        async def requests() -> AsyncIterator[bytes]:
            yield b"1"
            yield b"2"

        return [message async for message in channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")(requests())]

    expected, _, _ = play("bare", body)
    found, seen, _ = play(mode, body)
    assert found == expected == [b"answer to 1", b"answer to 2"]
    one(seen)


@pytest.mark.parametrize("mode", MODES)
def test_an_error_is_the_librarys_own(mode: str) -> None:
    async def body(channel: Any) -> Any:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await unary(channel)(Request("m", b"fail"))
        return raised.value.code(), raised.value.details()

    expected, _, _ = play("bare", body)
    found, seen, _ = play(mode, body)
    assert found == expected
    assert one(seen, "error").error_type == "AioRpcError"


@pytest.mark.parametrize("mode", MODES)
def test_a_stream_that_breaks(mode: str) -> None:
    async def body(channel: Any) -> Any:
        found = []
        with pytest.raises(grpc.aio.AioRpcError):
            async for message in streaming(channel)(b"fail"):
                found += [message]
        return found

    found, seen, _ = play(mode, body, rules=RULES)
    assert found == ["0", "1", "2"]
    one(seen, "error")


@pytest.mark.parametrize("mode", MODES)
def test_a_deadline_is_a_timeout(mode: str) -> None:
    async def body(channel: Any) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await unary(channel)(Request("m", b"hang"), timeout=0.3)
        assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED

    _, seen, _ = play(mode, body)
    one(seen, "timeout")


@pytest.mark.parametrize("mode", MODES)
def test_a_stream_that_is_left_early(mode: str) -> None:
    async def body(channel: Any) -> None:
        call = streaming(channel)(b"hang")
        assert await call.read() == "0"
        call.cancel()
        assert await call.code() is grpc.StatusCode.CANCELLED
        await asyncio.sleep(0)

    _, seen, _ = play(mode, body, rules=RULES)
    one(seen, "closed_by_caller")


@pytest.mark.parametrize("mode", MODES)
def test_a_cancelled_call(mode: str) -> None:
    async def body(channel: Any) -> None:
        await channel.channel_ready()

        async def wait() -> None:
            await unary(channel)(Request("m", b"hang"))

        task = asyncio.create_task(wait())
        while not Server.last.metadata:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)

    _, seen, _ = play(mode, body)
    one(seen, "cancelled")


@pytest.mark.parametrize("mode", MODES)
def test_a_server_that_is_not_there(mode: str, closed_port: int) -> None:
    async def body(_: Any) -> None:
        settings: dict[str, Any] = {}
        target = f"127.0.0.1:{closed_port}"
        if mode == "explicit":
            settings["interceptors"] = grpc_aio_interceptors(target, manager=explicit.manager)
        async with grpc.aio.insecure_channel(target, **settings) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await unary(channel)(Request("m"))
        assert not [
            task for task in asyncio.all_tasks() if task.get_name() == "spanwire grpc" and not task.cancelling()
        ]

    explicit = Seen()
    _, seen, _ = play(mode, body)
    one(explicit if mode == "explicit" else seen, "error")


@pytest.mark.parametrize("mode", MODES)
def test_other_methods_are_nobodys_business(mode: str) -> None:
    kinds: list[Any] = []

    async def body(channel: Any) -> None:
        call = unary(channel, f"/{SERVICE}/ServerReady")
        kinds.append(type(call))
        assert await call(Request("m")) == b"answer to q"
        assert [message async for message in streaming(channel)(b"q")] == ["0", "1", "2"]

    _, seen, server = play(mode, body)
    assert seen.timelines == []
    assert all("traceparent" not in metadata for metadata in server.metadata)
    assert kinds == [grpc.aio._channel.UnaryUnaryMultiCallable]


def test_interceptors_of_the_application_come_first() -> None:
    class Mine(grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[misc]
        async def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
            return await continuation(details._replace(metadata=grpc.aio.Metadata(("x-mine", "1"))), request)

    server = Server()

    async def body(_: Any) -> Any:
        async with grpc.aio.insecure_channel(server.target, interceptors=[Mine()]) as channel:
            return await unary(channel)(Request("m"))

    async def main() -> Any:
        served = grpc.aio.server()
        served.add_generic_rpc_handlers((server.handlers(SERVICE),))
        server.target = f"127.0.0.1:{served.add_insecure_port('127.0.0.1:0')}"
        await served.start()
        try:
            return await body(None)
        finally:
            await served.stop(None)

    with instrumented() as seen:
        assert asyncio.run(main()) == b"answer to q"
    (metadata,) = server.metadata
    assert metadata["x-mine"] == "1"
    assert metadata["traceparent"].split("-")[1] == one(seen).trace_id


def test_a_target_is_needed() -> None:
    with pytest.raises(ConfigurationError, match="target"):
        grpc_aio_interceptors("")


@pytest.mark.parametrize(
    ("target", "address"),
    [
        ("h:1", ("grpc", "h", 1)),
        ("dns:///h:1", ("grpc", "h", 1)),
        ("dns://8.8.8.8/h", ("grpc", "h", None)),
        ("ipv4:1.2.3.4:80", ("grpc", "1.2.3.4", 80)),
        ("ipv4:1.2.3.4:80,1.2.3.5:80", ("grpc", "1.2.3.4", 80)),
        ("[::1]:5", ("grpc", "::1", 5)),
        ("ipv6:[::1]:5", ("grpc", "::1", 5)),
        ("::1", ("grpc", "::1", None)),
        ("unix:///run/s", ("grpc", "localhost", None)),
    ],
)
def test_targets(target: str, address: Any) -> None:
    from spanwire_instrument.grpc_family import _Target

    assert _Target.of(target, secure=False) == address
