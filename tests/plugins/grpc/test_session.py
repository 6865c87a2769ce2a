"""Sessions over gRPC: one RPC in which both sides send when they like."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
from spanwire_grpc.loopback import ECHO
from spanwire_grpc.loops import bind_loop

import spanwire
from spanwire import errors
from spanwire.manager import ConnectionManager
from spanwire.testing import LoopbackServer, Script
from spanwire.transport import SessionExchange
from tests.core.telemetry.heard import Heard
from tests.support import NEVER, run, wait_for

_PATIENCE_S = 20.0
METHOD = "/a.B/Talk"
RELEASE = tuple(int(part) for part in grpc.__version__.split(".")[:2])

Handler = Callable[[AsyncIterator[bytes], Any], Awaitable[None]]


def serving(*scripts: Any, **more: Any) -> LoopbackServer:
    return LoopbackServer([*scripts], **{"part": "grpc", **more})


def raw(url: str, method: str = ECHO, **more: Any) -> spanwire.Endpoint:
    options = {"method": method, **more.pop("options", {})}
    return spanwire.Endpoint(url, **{"proxy": None, "retries": NEVER, "options": options, **more})


@contextlib.asynccontextmanager
async def handled(handler: Handler, **settings: Any) -> AsyncIterator[str]:
    """A server of the library on this loop, whose one method is a function. Gives its URL."""

    class Service(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: Any) -> Any:
            return grpc.stream_stream_rpc_method_handler(handler) if details.method == METHOD else None

    bind_loop()
    server = grpc.aio.server(**settings)
    server.add_generic_rpc_handlers((Service(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"grpc://127.0.0.1:{port}"
    finally:
        await server.stop(None)
        await server.wait_for_termination(5)


async def until(predicate: Callable[[], object]) -> None:
    async with asyncio.timeout(_PATIENCE_S):
        while not predicate():
            await asyncio.sleep(0.001)


def idle(manager: ConnectionManager) -> bool:
    return repr(manager).endswith(", 0 calls)")


def exchange_of(session: spanwire.Session) -> Any:
    assert session._run is not None
    return session._run.exchange


async def echo(requests: AsyncIterator[bytes], context: Any) -> None:
    async for message in requests:
        await context.write(message)


# --- both ways ------------------------------------------------------------------------------------------------------------


def test_bytes_text_and_json_go_out_and_bytes_come_back() -> None:
    with serving() as server:

        async def main() -> None:
            async with ConnectionManager() as manager:
                async with manager.session(raw(server.url)) as session:
                    assert isinstance(exchange_of(session), SessionExchange)
                    for sent, came in (
                        (b"\x00\xff", b"\x00\xff"),
                        ("words, é", "words, é".encode()),
                        (bytearray(b"ab"), b"ab"),
                        (memoryview(b"cd"), b"cd"),
                        ({"a": [1, 2]}, b'{"a":[1,2]}'),
                        (b"", b""),
                    ):
                        await session.send(sent)  # type: ignore[arg-type]
                        event = await anext(session)
                        assert (event.type, event.raw, event.binary) == ("", came, True)
                    await session.send_eof()
                    assert [event async for event in session] == []
                    assert session.turns == []
                assert session.timeline.outcome == "completed"

        run(main)
        assert server.requests[0].path == ECHO


def test_a_thousand_messages_are_on_their_way_at_once_and_come_in_order() -> None:
    async def main() -> None:
        async with handled(echo) as url, ConnectionManager() as manager, manager.session(raw(url, METHOD)) as session:
            for number in range(1000):
                await session.send(number.to_bytes(2, "big"))
            got = [int.from_bytes((await anext(session)).raw, "big") for _ in range(1000)]
            assert got == list(range(1000))

    run(main)


def test_any_number_of_tasks_may_send() -> None:
    async def main() -> None:
        async with handled(echo) as url, ConnectionManager() as manager, manager.session(raw(url, METHOD)) as session:
            await asyncio.gather(*(session.send(bytes([number]) * 5000) for number in range(200)))
            got = [(await anext(session)).raw for _ in range(200)]
            assert sorted(got) == [bytes([number]) * 5000 for number in range(200)]

    run(main)


def test_a_message_whose_sender_is_cancelled_in_the_moment_before_its_turn_is_not_sent() -> None:
    async def main() -> None:
        async with handled(echo) as url, ConnectionManager() as manager, manager.session(raw(url, METHOD)) as session:
            await session.send(b"a")
            assert (await anext(session)).raw == b"a"
            sending = asyncio.ensure_future(session.send(b"b"))
            await asyncio.sleep(0)
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            await session.send(b"c")
            assert (await anext(session)).raw == b"c"

    run(main)


def test_half_close_ends_what_is_sent_and_not_what_comes() -> None:
    """As in speech recognition: the final results come after the last sound."""

    async def answer(requests: AsyncIterator[bytes], context: Any) -> None:
        total = 0
        async for message in requests:
            total += len(message)
        await context.write(b"%d" % total)
        await context.write(b"done")

    async def main() -> None:
        async with handled(answer) as url, ConnectionManager() as manager:
            async with manager.session(raw(url, METHOD)) as session:
                await asyncio.gather(*(session.send(bytes(100_000)) for _ in range(20)))
                await session.send_eof()
                await session.send_eof()
                with pytest.raises(RuntimeError, match="send_eof"):
                    await session.send(b"more")
                assert [event.raw async for event in session] == [b"2000000", b"done"]
                await session.send_eof()
            assert idle(manager)

    run(main)


def test_a_half_close_that_is_given_up_before_its_turn_can_be_said_again() -> None:
    go_on = asyncio.Event()

    async def late(requests: AsyncIterator[bytes], context: Any) -> None:
        await go_on.wait()
        await context.write(b"%d" % len([message async for message in requests]))

    async def main() -> None:
        async with handled(late) as url, ConnectionManager() as manager:
            async with manager.session(raw(url, METHOD)) as session:
                sending = [asyncio.ensure_future(session.send(bytes(1_000_000))) for _ in range(50)]
                given_up = asyncio.ensure_future(session.send_eof())
                await asyncio.sleep(0)
                with pytest.raises(RuntimeError, match="send_eof"):
                    await session.send(b"more")
                given_up.cancel()
                await asyncio.gather(given_up, return_exceptions=True)
                go_on.set()
                await session.send_eof()
                await asyncio.gather(*sending)
                assert [event.raw async for event in session] == [b"50"]

    run(main)


def test_a_server_that_has_ended_in_order_needs_no_half_close() -> None:
    async def early(_requests: AsyncIterator[bytes], context: Any) -> None:
        await context.write(b"enough")

    async def main() -> None:
        async with handled(early) as url, ConnectionManager() as manager:
            for _ in range(20):
                async with manager.session(raw(url, METHOD)) as session:
                    sending = [asyncio.ensure_future(session.send(bytes(1_000_000))) for _ in range(3)]
                    await session.send_eof()
                    assert [event.raw async for event in session] == [b"enough"]
                    await asyncio.gather(*sending, return_exceptions=True)

    run(main)


def test_without_asyncio() -> None:
    with serving() as server, spanwire.SyncConnectionManager() as manager:
        with manager.session(raw(server.url)) as session:
            session.send(b"a")
            assert next(session).raw == b"a"
            session.send_eof()
            assert list(session) == []


def test_a_transport_without_half_close_says_so() -> None:
    with LoopbackServer(part="websocket") as server:

        async def main() -> None:
            endpoint = spanwire.Endpoint(server.url.removesuffix("/v1") + "/raw", proxy=None, dialect="raw")
            async with ConnectionManager() as manager, manager.session(endpoint) as session:
                with pytest.raises(errors.ConfigurationError, match="both sides at once"):
                    await session.send_eof()
                await session.send(b"a")
                assert (await anext(session)).raw == b"a"

        run(main)


def test_sessions_are_streams_of_one_connection_and_one_that_is_not_read_holds_up_no_other() -> None:
    async def flood(requests: AsyncIterator[bytes], context: Any) -> None:
        async for message in requests:
            if message == b"flood":
                for _ in range(200):
                    await context.write(bytes(100_000))
            await context.write(message)

    async def main() -> None:
        async with handled(flood) as url, ConnectionManager() as manager:
            endpoint = raw(url, METHOD, options={"buffer_bytes": 1_000_000})
            async with manager.session(endpoint) as held, manager.session(endpoint) as other:
                assert exchange_of(held)._connection is exchange_of(other)._connection
                await held.send(b"flood")
                await until(lambda: exchange_of(held)._paused)
                for number in range(50):
                    await other.send(b"%d" % number)
                    assert (await anext(other)).raw == b"%d" % number
                assert exchange_of(held)._bytes < 1_100_001
                sizes = [len((await anext(held)).raw) for _ in range(201)]
                assert sizes == [100_000] * 200 + [5]
                assert exchange_of(held)._bytes == 0

    run(main)


# --- back-pressure --------------------------------------------------------------------------------------------------------


def test_a_caller_who_does_not_read_holds_the_server() -> None:
    written = 0

    async def flood(_requests: AsyncIterator[bytes], context: Any) -> None:
        nonlocal written
        for _ in range(600):
            await context.write(bytes(100_000))
            written += 1

    async def main() -> None:
        async with handled(flood) as url, ConnectionManager() as manager:
            async with manager.session(raw(url, METHOD, options={"buffer_bytes": 500_000})) as session:
                await until(lambda: exchange_of(session)._paused)
                before = -1
                while before != written:  # until nothing more is taken
                    before = written
                    await asyncio.sleep(0.2)
                assert written < 300  # the windows of HTTP/2, which grow, are what is more than ours
                count = 0
                async for event in session:
                    count += len(event.raw)
                assert count == 60_000_000

    run(main)


def test_a_server_that_does_not_read_holds_the_caller_and_one_who_gives_up_has_sent_nothing() -> None:
    go_on = asyncio.Event()
    got: list[bytes] = []

    async def late(requests: AsyncIterator[bytes], context: Any) -> None:
        await go_on.wait()
        got.extend([message[:1] async for message in requests])
        await context.write(b"%d" % len(got))

    async def main() -> None:
        async with handled(late) as url, ConnectionManager() as manager:
            async with manager.session(raw(url, METHOD)) as session:
                sent = 0
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(1.0):
                        while True:
                            await session.send(b"a" * 1_000_000)
                            sent += 1
                assert sent < 100
                waiting = [asyncio.ensure_future(session.send(b"b" * 1_000_000)) for _ in range(5)]
                await asyncio.sleep(0)
                for task in waiting:
                    task.cancel()
                await asyncio.gather(*waiting, return_exceptions=True)
                assert exchange_of(session)._outgoing == {}
                go_on.set()
                await session.send(b"c")
                await session.send_eof()
                # The one that was being written when its sender gave up has left.
                assert [event.raw async for event in session] == [b"%d" % (sent + 2)]
                assert got == [b"a"] * (sent + 1) + [b"c"]

    run(main)


# --- ends -----------------------------------------------------------------------------------------------------------------


def test_leaving_is_seen_by_the_server_at_once() -> None:
    with serving(Script(hang_after="request")) as server:

        async def main() -> None:
            async with ConnectionManager() as manager:
                async with manager.session(raw(server.url)) as session:
                    await session.send(b"a")
                    await wait_for(server, lambda s: s.requests)
                await wait_for(server, lambda s: s.requests[0].left)
                await until(lambda: idle(manager))
                assert session.timeline.outcome == "closed_by_caller"
                with pytest.raises(errors.ConnectionFailed, match="ended"):
                    await session.send(b"a")

        run(main)
        assert server.connections == 1


@pytest.mark.parametrize("way", ["aclose", "cancel", "drop", "manager"])
def test_however_it_is_left_nothing_stays(way: str) -> None:
    with serving(Script(hang_after="request")) as server:

        async def main() -> None:
            manager = ConnectionManager()
            session = manager.session(raw(server.url))
            if way == "drop":
                await session.__aenter__()
                await session.send(b"a")
                await wait_for(server, lambda s: s.requests)
                del session
                gc.collect()
            else:

                async def body() -> list[Any]:
                    async with session:
                        await session.send(b"a")
                        return [event async for event in session]

                task = asyncio.ensure_future(body())
                await wait_for(server, lambda s: s.requests)
                if way == "cancel":
                    task.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await task
                elif way == "aclose":
                    await session.aclose()
                    assert await task == []
                else:
                    await manager.aclose()
                    with pytest.raises(errors.SpanwireError):
                        await task
            await wait_for(server, lambda s: s.requests[0].left)
            await until(lambda: idle(manager))
            await manager.aclose()

        run(main)
        server.wait_for(lambda s: s.open_connections == 0)


@pytest.mark.skipif(RELEASE < (1, 84), reason="the library keeps the connection to the end of the process")
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_loop_that_is_closed_under_it() -> None:
    with serving(Script(hang_after="request")) as server:
        manager = ConnectionManager()
        session = manager.session(raw(server.url))

        async def begin() -> None:
            await session.__aenter__()
            await session.send(b"a")
            await wait_for(server, lambda s: s.requests)

        loop = asyncio.new_event_loop()
        loop.run_until_complete(begin())
        loop.close()
        with contextlib.suppress(RuntimeError):
            asyncio.run(manager.aclose())
        server.wait_for(lambda s: s.requests[0].left)
        server.wait_for(lambda s: s.open_connections == 0)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.NOT_FOUND, errors.BadRequest),
        (grpc.StatusCode.UNAUTHENTICATED, errors.AuthenticationFailed),
        (grpc.StatusCode.UNAVAILABLE, errors.Overloaded),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.RateLimited),
        (grpc.StatusCode.INTERNAL, errors.ServerError),
    ],
)
def test_a_status_is_a_typed_error_after_what_had_come(code: grpc.StatusCode, kind: type[errors.ServerError]) -> None:
    headers = {"x-a": "1", "grpc-status": str(code.value[0]), "grpc-message": "no", "trailer-x-b": "2"}
    with serving(Script(headers=headers)) as server:

        async def main() -> None:
            async with ConnectionManager() as manager:
                async with manager.session(raw(server.url)) as session:
                    await session.send(b"a")
                    assert (await anext(session)).raw == b"a"
                    with pytest.raises(kind, match="no") as caught:
                        await anext(session)
                    assert caught.value.code == code.name
                    assert not caught.value.retryable
                    assert caught.value.headers["x-b"] == "2"
                    with pytest.raises(kind):
                        await session.send(b"b")
                head = session._run.head  # type: ignore[union-attr]
                assert head is not None
                assert (head.headers["x-a"], head.trailers["x-b"]) == ("1", "2")
                assert head.attributes["rpc.response.status_code"] == code.name
                assert session.timeline.outcome == "error"

        run(main)


def test_a_method_that_the_server_does_not_have() -> None:
    with serving() as server:

        async def main() -> None:
            async with ConnectionManager() as manager:
                async with manager.session(raw(server.url, "/no.Such/Method")) as session:
                    with pytest.raises(errors.BadRequest, match=r"/no\.Such/Method") as caught:
                        await anext(session)
                assert caught.value.code == "UNIMPLEMENTED"

        run(main)


@pytest.mark.parametrize("status", [None, grpc.StatusCode.NOT_FOUND])
def test_a_server_that_ends_it_while_it_is_being_sent_to_is_heard_to_its_end(status: grpc.StatusCode | None) -> None:
    """The library's own write() would replace the server's status by one of its making, and drop what it has sent."""

    async def early(requests: AsyncIterator[bytes], context: Any) -> None:
        await anext(aiter(requests))
        await context.write(b"enough")
        if status is not None:
            await context.abort(status, "gone")

    async def flood(session: spanwire.Session) -> None:
        with contextlib.suppress(errors.SpanwireError):
            while True:
                await session.send(bytes(20_000))

    async def main() -> None:
        async with handled(early) as url, ConnectionManager() as manager:
            for _ in range(30):
                async with manager.session(raw(url, METHOD)) as session:
                    sending = [asyncio.ensure_future(flood(session)) for _ in range(3)]
                    assert (await anext(session)).raw == b"enough"
                    if status is None:
                        assert [event async for event in session] == []
                    else:
                        with pytest.raises(errors.BadRequest, match="gone"):
                            await anext(session)
                    await asyncio.gather(*sending)
            assert idle(manager)

    run(main)


@pytest.mark.parametrize("mode", ["close", "reset"])
def test_a_connection_that_breaks(mode: Any) -> None:
    with serving(Script(), Script(drop_after=1, drop_mode=mode)) as server:

        async def main() -> None:
            async with ConnectionManager() as manager:
                async with manager.session(raw(server.url)) as session:
                    await session.send(b"a")
                    assert (await anext(session)).raw == b"a"
                    await session.send(b"b")
                    assert (await anext(session)).raw == b"b"
                    with pytest.raises(errors.ConnectionFailed) as caught:
                        await anext(session)
                    assert caught.value.phase == "read"
                async with manager.session(raw(server.url)) as session:
                    await session.send(b"c")
                    assert (await anext(session)).raw == b"c"

        run(main)
        assert server.connections == 2


def test_limits() -> None:
    with serving() as server:

        async def main() -> None:
            async with ConnectionManager() as manager:
                small = raw(server.url, limits=spanwire.Limits(max_event_bytes=1000))
                async with manager.session(small) as session:
                    await session.send(bytes(1001))
                    with pytest.raises(errors.MessageTooBig, match="max_event_bytes"):
                        await anext(session)
                tight = raw(server.url, options={"max_request_bytes": 1000})
                async with manager.session(tight) as session:
                    with pytest.raises(errors.MessageTooBig, match="max_request_bytes"):
                        await session.send(bytes(1001))
                    await session.send(bytes(1000))
                    assert len((await anext(session)).raw) == 1000
                async with manager.session(raw(server.url, timeouts=spanwire.Timeouts(total_s=0.3))) as session:
                    with pytest.raises(errors.CallTimeout) as caught:
                        await anext(session)
                    assert caught.value.limit == "total_s"
                assert session.timeline.outcome == "timeout"
                await until(lambda: idle(manager))

        run(main)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"options": {}}, r"'/package.Service/Method'"),
        ({"options": {"method": "no-slash"}}, "no-slash"),
        ({"options": {"method": 7}}, "and not 7"),
        ({"options": {"method": METHOD, "buffer_bytes": 0}}, "buffer_bytes"),
        ({"dialect": "openai-json"}, "has no sessions"),
        ({"options": {"methd": METHOD}}, "methd"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_dialled(more: dict[str, Any], words: str) -> None:
    with serving() as server:

        async def main() -> None:
            async with ConnectionManager() as manager:
                with pytest.raises(errors.ConfigurationError, match=words):
                    async with manager.session(spanwire.Endpoint(server.url, proxy=None, **more)):
                        pass
                with pytest.raises(errors.ConfigurationError, match="one of sessions"):
                    await manager.complete(
                        spanwire.Endpoint(server.url, proxy=None, dialect="raw"),
                        spanwire.Call.chat("m", [{"role": "user", "content": "x"}]),
                    )

        run(main)
        assert server.connections == 0


def test_a_message_that_cannot_be_written_leaves_the_session_open() -> None:
    with serving() as server:

        async def main() -> None:
            async with ConnectionManager() as manager, manager.session(raw(server.url)) as session:
                for wrong in ({"a": object()}, "\ud800"):
                    with pytest.raises(errors.ConfigurationError, match="cannot be written"):
                        await session.send(wrong)
                await session.send(b"a")
                assert (await anext(session)).raw == b"a"

        run(main)


def test_key_headers_and_query_are_metadata() -> None:
    seen: dict[str, Any] = {}

    async def handler(requests: AsyncIterator[bytes], context: Any) -> None:
        seen.update(context.invocation_metadata())
        await echo(requests, context)

    async def main() -> None:
        async with handled(handler) as url, ConnectionManager() as manager:
            endpoint = raw(url + "?a=b", METHOD, api_key="k", headers={"X-Deployment": "blue"})
            async with manager.session(endpoint, model="m") as session:
                await session.send(b"a")
                await anext(session)

    run(main)
    assert (seen["authorization"], seen["x-deployment"], seen["x-url-query"]) == ("Bearer k", "blue", "a=b&model=m")


def test_a_session_is_no_span(heard: Heard) -> None:
    with serving() as server:

        async def main() -> None:
            async with ConnectionManager(telemetry=heard.telemetry()) as manager:
                async with manager.session(raw(server.url)) as session:
                    await session.send(b"a")
                    await anext(session)

        run(main)
    assert {span.name for span in heard.spans()} <= {"spanwire.connection_setup", "connect"}
