"""Sessions over a real wire: their ends, limits and back-pressure, whatever is spoken in them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
from collections.abc import AsyncIterator
from socket import SO_LINGER, SOL_SOCKET
from struct import pack
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed
from websockets.frames import Frame, Opcode
from websockets.http11 import Request
from websockets.server import ServerProtocol

import spanwire
from spanwire import errors
from spanwire.manager import ConnectionManager
from spanwire.sync import SyncConnectionManager
from spanwire.testing import LoopbackServer, Script
from spanwire.testing.tls import ThrowAwayCA
from tests.plugins.websocket.session_server import handled, member_socket, nothing_is_left, raw, until
from tests.support import AT_ONCE, NEVER, run, serving, wait_for

MIB = 1024 * 1024


def at_raw(server: LoopbackServer, **more: Any) -> spanwire.Endpoint:
    """The server's echo."""
    return raw(server.url.removesuffix("/v1") + "/raw", **{"tls": server.endpoint().tls, **more})


async def echoing(socket: ServerConnection) -> None:
    async for message in socket:
        await socket.send(message)


async def silent(socket: ServerConnection) -> None:
    async for _ in socket:
        pass


# --- ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (1000, None),
        (None, None),
        (1001, errors.ConnectionFailed),
        (1002, errors.ConnectionFailed),
        (1003, errors.ConnectionFailed),
        (1007, errors.ConnectionFailed),
        (1008, errors.ServerError),
        (1009, errors.MessageTooBig),
        (1010, errors.ConnectionFailed),
        (1011, errors.ConnectionFailed),
        (1012, errors.ConnectionFailed),
        (1013, errors.ConnectionFailed),
        (1014, errors.ConnectionFailed),
        (3000, errors.ConnectionFailed),
        (4999, errors.ConnectionFailed),
        ("reset", errors.ConnectionFailed),
        ("gone", errors.ConnectionFailed),
    ],
)
def test_the_server_ends_it(code: int | str | None, kind: type[errors.SpanwireError] | None) -> None:
    """What came before is read first; then iteration ends, or says why there is no more. Nothing is tried again."""

    async def handler(socket: ServerConnection) -> None:
        await socket.recv()
        await socket.send("last words")
        if isinstance(code, int):
            await socket.close(code, "as told")
        elif code is None:
            socket.protocol.send_close()
            socket.transport.write(b"".join(socket.protocol.data_to_send()))
        elif code == "reset":
            await socket.recv()
            socket.transport.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, pack("ii", 1, 0))
            socket.transport.abort()
        else:
            socket.transport.close()

    async def body() -> None:
        async with handled(handler) as (url, _), ConnectionManager() as manager:
            session = manager.session(raw(url))
            async with session:
                await session.send("go")
                event = await anext(session)
                assert event.raw == b"last words"
                if code == "reset":
                    await session.send("go")
                if kind is None:
                    with pytest.raises(StopAsyncIteration):
                        await anext(session)
                    assert session.timeline.outcome == "completed"
                else:
                    with pytest.raises(kind) as caught:
                        await anext(session)
                    assert not caught.value.retryable
                    assert caught.value.timeline is session.timeline
                    assert session.timeline.outcome == "error"
                    if isinstance(code, int):
                        assert str(code) in str(caught.value)
                        assert "as told" in str(caught.value)
                with pytest.raises(errors.SpanwireError):
                    await session.send("too late")
            await nothing_is_left(manager)

    run(body)


REFUSAL = b'{"type":"error","error":{"code":"c","message":"%s"}}'


def test_a_limit_that_the_server_names_is_a_rate_limit() -> None:
    async def handler(socket: ServerConnection) -> None:
        await socket.recv()
        await socket.send(REFUSAL % b"too many sessions", text=True)
        await socket.close(1008, "rate limit")

    async def body() -> None:
        async with handled(handler) as (url, _), ConnectionManager() as manager:
            async with manager.session(raw(url)) as session:
                await session.send("go")
                assert (await anext(session)).type == "error"
                with pytest.raises(errors.RateLimited, match="rate limit"):
                    await anext(session)

    run(body)


@contextlib.asynccontextmanager
async def refusing(code: int, reason: str, message: bytes, times: int) -> AsyncIterator[tuple[str, list[int]]]:
    """Accepts, says something, and closes, all in one write; but only so many times, and then it is an echo."""
    tries: list[int] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tries.append(code)
        protocol = ServerProtocol()
        protocol.receive_data(await reader.readuntil(b"\r\n\r\n"))
        (request,) = protocol.events_received()
        assert isinstance(request, Request)
        protocol.send_response(protocol.accept(request))
        protocol.send_text(message)
        if len(tries) <= times:
            protocol.send_close(code, reason)
        writer.write(b"".join(protocol.data_to_send()))
        await reader.read()
        writer.close()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        yield f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}/raw", tries


def test_closing_at_once_is_a_refusal_that_tells_why() -> None:
    async def body() -> None:
        async with ConnectionManager() as manager:
            async with refusing(1008, "no", REFUSAL % b"no such model", 9) as (url, tries):
                with pytest.raises(errors.ServerError, match=r"1008 \(policy\): no \(no such model\)") as caught:
                    await manager.session(raw(url)).__aenter__()
                assert caught.value.phase == "upgrade"
                assert len(tries) == 1
            for code in (1001, 1011):
                async with refusing(code, "", REFUSAL % b"restarting", 1) as (url, tries):
                    async with manager.session(raw(url, retries=AT_ONCE)) as session:
                        assert (await anext(session)).type == "error"
                    assert len(tries) == 2

    run(body)


def test_a_server_that_closes_at_once_for_it_is_full_is_waited_for() -> None:
    async def body() -> None:
        async with ConnectionManager() as manager:
            for code, reason in ((1013, ""), (1008, "max_active_conversations")):
                async with refusing(code, reason, b"hello", 1) as (url, tries):
                    patient = spanwire.Limits(queue_timeout_s=20)
                    async with manager.session(raw(url, retries=NEVER, limits=patient)) as session:
                        assert (await anext(session)).raw == b"hello"
                    assert len(tries) == 2

    run(body)


def test_leaving_says_goodbye() -> None:
    async def body() -> None:
        async with handled(echoing) as (url, ended), ConnectionManager() as manager:
            async with manager.session(raw(url)) as session:
                await session.send("hello")
                assert (await anext(session)).raw == b"hello"
            assert session.timeline.outcome == "closed_by_caller"
            assert [event async for event in session] == []
            await until(lambda: ended)
            assert ended == [(1000, "")]
            await nothing_is_left(manager)

    run(body)


@pytest.mark.parametrize("close", [True, False])
def test_what_was_not_read_is_dropped_by_leaving(close: bool) -> None:
    async def handler(socket: ServerConnection) -> None:
        await socket.recv()
        socket.protocol.send_text(b"1")
        socket.protocol.send_text(b"2")
        socket.transport.write(b"".join(socket.protocol.data_to_send()))
        await silent(socket)

    async def body() -> None:
        async with handled(handler) as (url, _), ConnectionManager() as manager:
            session = manager.session(raw(url))
            async with session:
                await session.send("go")
                assert (await anext(session)).raw == b"1"
                if close:
                    await session.aclose()
                    assert [event async for event in session] == []
            assert [event async for event in session] == []

    run(body)


def test_closing_it_from_another_task_ends_a_pending_read() -> None:
    async def body() -> None:
        async with handled(silent) as (url, ended), ConnectionManager() as manager:
            async with manager.session(raw(url)) as session:
                reading = asyncio.ensure_future(anext(session, None))
                await until(lambda: session._run is not None and session._run._reading)
                await session.aclose()
                assert await reading is None
            await until(lambda: ended)
            assert session.timeline.outcome == "closed_by_caller"
            await nothing_is_left(manager)

    run(body)


def test_sending_after_its_end_is_no_error_to_try_again() -> None:
    async def body() -> None:
        async with handled(silent) as (url, _), ConnectionManager() as manager:
            async with manager.session(raw(url)) as session:
                await session.aclose()
                with pytest.raises(errors.ConnectionFailed, match="has ended") as caught:
                    await session.send({})
            assert (caught.value.phase, caught.value.retryable) == ("send", False)

    run(body)


def test_dropping_it_is_noticed() -> None:
    async def body() -> None:
        async with handled(silent) as (url, ended), ConnectionManager() as manager:
            session = manager.session(raw(url))
            await session.__aenter__()
            del session
            gc.collect()
            await until(lambda: ended)
            assert ended == [(1000, "")]
            await nothing_is_left(manager)

    run(body)


def test_cancelling_whoever_reads_ends_it() -> None:
    async def body() -> None:
        async with handled(silent) as (url, ended), ConnectionManager() as manager:
            held: list[spanwire.Session] = []

            async def use() -> None:
                async with manager.session(raw(url)) as session:
                    held.append(session)
                    async for _ in session:
                        pass

            task = asyncio.ensure_future(use())
            await until(lambda: held and held[0]._run is not None and held[0]._run._reading)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert held[0].timeline.outcome == "cancelled"
            await until(lambda: ended)
            await nothing_is_left(manager)

    run(body)


def test_cancelling_a_read_alone_loses_nothing() -> None:
    async def body() -> None:
        async with handled(echoing) as (url, _), ConnectionManager() as manager:
            async with manager.session(raw(url)) as session:
                reading = asyncio.ensure_future(anext(session))
                await until(lambda: session._run is not None and session._run._reading)
                reading.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await reading
                await session.send("still there")
                assert (await anext(session)).raw == b"still there"

    run(body)


def test_cancelling_the_opening_leaves_nothing() -> None:
    with serving(part="websocket", options={"max_clients": 0, "when_full": "never"}) as server:

        async def body() -> None:
            async with ConnectionManager() as manager:
                opening = asyncio.ensure_future(manager.session(at_raw(server)).__aenter__())
                await wait_for(server, lambda s: s.open_connections)
                opening.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await opening
            await wait_for(server, lambda s: not s.open_connections)

        run(body)


def test_closing_the_manager_ends_it() -> None:
    async def body() -> None:
        async with handled(silent) as (url, ended):
            manager = ConnectionManager()
            async with manager.session(raw(url)) as session:
                reading = asyncio.ensure_future(anext(session))
                await until(lambda: session._run is not None and session._run._reading)
                await manager.aclose()
                with pytest.raises(errors.ConnectionFailed, match="manager was closed"):
                    await reading
                with pytest.raises(errors.ConnectionFailed):
                    await session.send("too late")
            await until(lambda: ended)
            assert ended == [(1000, "")]
            await nothing_is_left(manager)

    run(body)


def test_it_ends_with_its_loop() -> None:
    with serving(part="websocket") as server:
        manager = ConnectionManager()
        session = manager.session(at_raw(server))

        async def body() -> None:
            await session.__aenter__()
            await session.send("hello")
            await anext(session)

        run(body)
        server.wait_for(lambda s: not s.open_connections)
        assert session.timeline.outcome == "error"
        assert repr(manager) == "ConnectionManager(0 connections, 0 calls)"


def test_it_holds_a_slot_as_long_as_it_lasts() -> None:
    async def body() -> None:
        async with handled(silent) as (url, _), ConnectionManager() as manager:
            endpoint = raw(url, limits=spanwire.Limits(max_concurrent=1))
            async with manager.session(endpoint):
                second = asyncio.ensure_future(manager.session(endpoint).__aenter__())
                await until(lambda: "2 calls" in repr(manager))
                assert not second.done()
            session = await second
            await session.aclose()
            assert session.timeline.segments["queue"].duration_s > 0
            await nothing_is_left(manager)

    run(body)


def test_a_connection_serves_one_session() -> None:
    with serving(part="websocket") as server:

        async def body() -> None:
            async with ConnectionManager() as manager:
                for number in range(3):
                    async with manager.session(at_raw(server)) as session:
                        await session.send(f"{number}")
                        assert (await anext(session)).raw == b"%d" % number
                await wait_for(server, lambda s: not s.open_connections)
                await nothing_is_left(manager)

        run(body)
        assert server.connections == 3


def test_the_total_limit_holds_for_the_whole_session() -> None:
    async def body() -> None:
        async with handled(silent) as (url, ended), ConnectionManager() as manager:
            with pytest.raises(errors.CallTimeout) as caught:
                async with manager.session(raw(url), timeouts=spanwire.Timeouts(total_s=0.1)) as session:
                    await anext(session)
            assert caught.value.limit == "total_s"
            assert session.timeline.outcome == "timeout"
            await until(lambda: ended)
            await nothing_is_left(manager)

    run(body)


@pytest.mark.parametrize(
    ("status", "kind"),
    [(401, errors.AuthenticationFailed), (403, errors.AuthenticationFailed), (404, errors.ServerError)],
)
def test_an_upgrade_that_is_refused_is_the_entrys_error(status: int, kind: type[errors.SpanwireError]) -> None:
    with serving(part="websocket", options={"upgrades": [status]}) as server:

        async def body() -> None:
            async with ConnectionManager() as manager:
                with pytest.raises(kind) as caught:
                    await manager.session(at_raw(server)).__aenter__()
                assert caught.value.phase == "upgrade"
                await nothing_is_left(manager)

        run(body)


def test_a_full_server_is_waited_for() -> None:
    with serving(part="websocket", options={"max_clients": 1, "when_full": "503"}) as server:

        async def body() -> None:
            async with ConnectionManager() as manager:
                async with manager.session(at_raw(server)):
                    second = asyncio.ensure_future(manager.session(at_raw(server)).__aenter__())
                    await wait_for(server, lambda s: s.connections >= 2)
                session = await second
                await session.send("in")
                assert (await anext(session)).raw == b"in"
                await session.aclose()

        run(body)


def test_only_transports_with_sessions_have_them() -> None:
    manager = ConnectionManager()
    with pytest.raises(errors.ConfigurationError, match="session"):
        manager.session("http://127.0.0.1:9/v1")


# --- misuse -----------------------------------------------------------------------------------------------------------


def test_misuse_is_told() -> None:
    async def body() -> None:
        async with handled(echoing) as (url, _), ConnectionManager() as manager:
            session = manager.session(raw(url))
            with pytest.raises(RuntimeError, match="not entered"):
                await session.send("x")
            async with session:
                with pytest.raises(RuntimeError, match="once"):
                    await session.__aenter__()
                with pytest.raises(RuntimeError, match="has not ended"):
                    _ = session.timeline
                reading = asyncio.ensure_future(anext(session))
                await until(lambda: session._run is not None and session._run._reading)
                with pytest.raises(RuntimeError, match="two tasks"):
                    await anext(session)
                for bad in ({"type": object()}, "\ud800", {"text": "\ud800"}):
                    with pytest.raises(errors.ConfigurationError, match="message cannot be written"):
                        await session.send(bad)
                await session.send("goes on")
                assert (await reading).raw == b"goes on"

    run(body)


# --- pings ------------------------------------------------------------------------------------------------------------

#: Twice what a timer may be late before it says that our own loop was busy: a busy machine is no dead server.
FAST_PINGS = {"ping_interval_s": 0.1, "ping_timeout_s": 0.5}
#: In which a keep-alive that is wrong would have ended the socket.
LONGER_S = 1.2


def test_the_servers_pings_are_answered_while_nobody_reads() -> None:
    async def body() -> None:
        answered = asyncio.Event()

        async def handler(socket: ServerConnection) -> None:
            await socket.recv()
            for _ in range(100):
                await socket.send(bytes(10_000))
                await (await socket.ping())
            answered.set()
            await silent(socket)

        async with handled(handler) as (url, _), ConnectionManager() as manager:
            async with manager.session(raw(url)) as session:
                await session.send("go")
                await answered.wait()
                assert [len((await anext(session)).raw) for _ in range(100)] == [10_000] * 100

    run(body)


def test_a_server_that_never_answers_pings_is_left_alone() -> None:
    with serving(part="websocket", options={"answers_pings": False}) as server:

        async def body() -> None:
            async with ConnectionManager() as manager:
                async with manager.session(at_raw(server, options=FAST_PINGS)) as session:
                    await asyncio.sleep(LONGER_S)
                    await session.send("still here")
                    assert (await anext(session)).raw == b"still here"

        run(body)


def test_a_server_that_answers_pings_no_more_is_given_up() -> None:
    async def handler(socket: ServerConnection) -> None:
        send = socket.protocol.send_frame
        answered: list[Frame] = []

        def send_frame(frame: Frame) -> None:
            if frame.opcode is Opcode.PONG:
                answered.append(frame)
                if len(answered) > 2:
                    return
            send(frame)

        socket.protocol.send_frame = send_frame  # type: ignore[method-assign]
        await silent(socket)

    async def body() -> None:
        async with handled(handler) as (url, ended), ConnectionManager() as manager:
            async with manager.session(raw(url, options=FAST_PINGS)) as session:
                with pytest.raises(errors.ConnectionFailed, match="keepalive"):
                    await anext(session)
            await until(lambda: ended)
            await nothing_is_left(manager)

    run(body)


# --- back-pressure ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("authority", [None, ThrowAwayCA()], ids=["plain", "tls"])
def test_a_slow_reader_holds_the_server_and_keeps_the_socket(authority: ThrowAwayCA | None) -> None:
    """Little lies here unread, TCP holds the server, our own keep-alive ends nothing, and all comes in order."""
    size, count = 16 * 1024, 2000  # 32 MB: more than the kernel's buffers take
    sent = 0

    async def handler(socket: ServerConnection) -> None:
        nonlocal sent
        await socket.recv()
        for number in range(count):
            await socket.send(number.to_bytes(4, "big") * (size // 4))
            sent += 1

    async def body() -> None:
        async with handled(handler, authority=authority, write_limit=size) as (url, _), ConnectionManager() as manager:
            endpoint = raw(url, authority=authority, options={"buffer_bytes": 256 * 1024, **FAST_PINGS})
            async with manager.session(endpoint) as session:
                await session.send("go")
                first = await anext(session)
                socket = member_socket(session)
                await until(lambda: socket.paused)
                held = -1
                while held != sent:  # the server is held, too
                    held = sent
                    for _ in range(10):  # of the loop's turns, in which it could have gone on
                        await asyncio.sleep(0.01)
                await asyncio.sleep(LONGER_S)
                assert sent < count
                assert socket.paused
                channel = session._run.exchange  # type: ignore[union-attr]
                waiting = sum(len(event.raw) for event in channel._items)  # type: ignore[union-attr,misc]
                # One read of the loop may go over it.
                assert waiting <= 256 * 1024 + 512 * 1024
                got = [first.raw[:4]] + [(await anext(session)).raw[:4] for _ in range(count - 1)]
                assert got == [number.to_bytes(4, "big") for number in range(count)]

    run(body)


@pytest.mark.parametrize("authority", [None, ThrowAwayCA()], ids=["plain", "tls"])
def test_a_server_that_does_not_read_makes_send_wait(authority: ThrowAwayCA | None) -> None:
    """Also if each send is given up by its caller: what was not written is not kept."""
    go = asyncio.Event()
    got: list[int] = []
    size = 64 * 1024

    async def handler(socket: ServerConnection) -> None:
        socket.transport.pause_reading()
        await go.wait()
        socket.transport.resume_reading()
        async for message in socket:
            assert isinstance(message, bytes)
            got.append(int.from_bytes(message[:4], "big"))

    async def body() -> None:
        nonlocal go
        go = asyncio.Event()
        async with handled(handler, authority=authority) as (url, _), ConnectionManager() as manager:
            async with manager.session(raw(url, authority=authority, options={"ping_interval_s": None})) as session:
                socket = member_socket(session)
                number = quiet = 0
                blocked = asyncio.ensure_future(session.send(bytes(size)))
                while quiet < 20:  # turns of the loop in which nothing went on
                    await asyncio.sleep(0.01)
                    quiet += 1
                    if blocked.done():
                        number += 1
                        assert number < 1000
                        quiet = 0
                        blocked = asyncio.ensure_future(session.send(number.to_bytes(4, "big") * (size // 4)))
                number += 1
                unsent = socket._transport.get_write_buffer_size() + sum(map(len, socket._out))
                for _ in range(200):
                    with pytest.raises(TimeoutError):
                        await asyncio.wait_for(session.send(bytes(size)), 0.001)
                blocked.cancel()
                held = socket._transport.get_write_buffer_size() + sum(map(len, socket._out))
                assert held <= unsent + size
                go.set()
                await session.send((number).to_bytes(4, "big"))
                await until(lambda: got and got[-1] == number)
                assert got == sorted(set(got))

    run(body)


def test_a_send_that_waits_is_told_of_the_end() -> None:
    async def body() -> None:
        connections: list[ServerConnection] = []

        async def holding(socket: ServerConnection) -> None:
            connections.append(socket)
            socket.transport.pause_reading()
            await socket.wait_closed()

        async with handled(holding) as (url, _), ConnectionManager() as manager:
            async with manager.session(raw(url, options={"ping_interval_s": None})) as session:
                socket = member_socket(session)
                sending = asyncio.ensure_future(session.send(bytes(32 * MIB)))
                await until(lambda: socket._write_paused)
                connections[0].transport.abort()
                with pytest.raises(errors.ConnectionFailed):
                    await sending
            await nothing_is_left(manager)

    run(body)


@pytest.mark.parametrize("authority", [None, ThrowAwayCA()], ids=["plain", "tls"])
def test_leaving_ends_a_send_that_waits(authority: ThrowAwayCA | None) -> None:
    async def body() -> None:
        connections: list[ServerConnection] = []

        async def holding(socket: ServerConnection) -> None:
            connections.append(socket)
            socket.transport.pause_reading()
            await socket.wait_closed()

        async with handled(holding, authority=authority) as (url, _), ConnectionManager() as manager:
            async with manager.session(raw(url, authority=authority, options={"ping_interval_s": None})) as session:
                socket = member_socket(session)
                sending = asyncio.ensure_future(session.send(bytes(32 * MIB)))
                await until(lambda: socket._write_paused)
            with pytest.raises(errors.ConnectionFailed, match="ended"):
                await sending
            await nothing_is_left(manager)
            connections[0].transport.abort()

    run(body)


def test_two_tasks_send() -> None:
    async def body() -> None:
        got: list[bytes] = []

        async def handler(socket: ServerConnection) -> None:
            async for message in socket:
                assert isinstance(message, bytes)
                got.append(message)

        async with handled(handler, max_size=None) as (url, _), ConnectionManager() as manager:
            async with manager.session(raw(url)) as session:

                async def send(name: bytes) -> None:
                    for number in range(40):
                        await session.send(name * 50_000 + b"%d" % number)

                await asyncio.gather(send(b"a"), send(b"b"))
                await until(lambda: len(got) == 80)
            for name in (b"a", b"b"):
                mine = [message for message in got if message[:1] == name]
                assert mine == [name * 50_000 + b"%d" % number for number in range(40)]

    run(body)


def test_a_session_that_was_left_takes_in_nothing_more() -> None:
    """A server that does not hear the goodbye, and goes on sending, does not fill the memory meanwhile."""

    async def handler(socket: ServerConnection) -> None:
        await socket.recv()
        socket.transport.pause_reading()  # it will not hear it
        with contextlib.suppress(ConnectionClosed):
            while True:
                await socket.send(bytes(64 * 1024))

    async def body() -> None:
        async with handled(handler) as (url, ended), ConnectionManager() as manager:
            async with manager.session(raw(url)) as session:
                await session.send("go")
                await anext(session)
                socket = member_socket(session)
                channel: Any = session._run.exchange  # type: ignore[union-attr]
            await until(lambda: socket.lost is not None)
            assert channel._items == []
            await until(lambda: ended)
            await nothing_is_left(manager)

    run(body)


# --- limits -----------------------------------------------------------------------------------------------------------


def test_a_message_over_our_limit() -> None:
    async def handler(socket: ServerConnection) -> None:
        await socket.recv()
        await socket.send("short")
        await socket.send(bytes(2 * MIB))
        await socket.wait_closed()

    async def body() -> None:
        async with handled(handler) as (url, ended), ConnectionManager() as manager:
            endpoint = raw(url, limits=spanwire.Limits(max_event_bytes=MIB))
            async with manager.session(endpoint) as session:
                await session.send("go")
                assert (await anext(session)).raw == b"short"
                with pytest.raises(errors.MessageTooBig, match="max_event_bytes"):
                    await anext(session)
            await until(lambda: ended)
            assert ended[0][0] == 1009
            await nothing_is_left(manager)

    run(body)


def test_a_message_over_the_servers_limit() -> None:
    async def body() -> None:
        async with handled(echoing, max_size=1000) as (url, _), ConnectionManager() as manager:
            async with manager.session(raw(url)) as session:
                await session.send(bytes(2000))
                with pytest.raises(errors.MessageTooBig, match="too big for it") as caught:
                    await anext(session)
                assert caught.value.phase == "send"
            await nothing_is_left(manager)

    run(body)


def test_large_messages_in_fragments_come_whole() -> None:
    async def handler(socket: ServerConnection) -> None:
        await socket.send(iter(["ab", "c" * 70_000, "d"]))
        await socket.send(iter([b"12", b"3" * 70_000]))

    async def body() -> None:
        async with handled(handler) as (url, _), ConnectionManager() as manager:
            async with manager.session(raw(url)) as session:
                text, binary = await anext(session), await anext(session)
                assert (text.raw, text.binary) == (b"ab" + b"c" * 70_000 + b"d", False)
                assert (binary.raw, binary.binary) == (b"12" + b"3" * 70_000, True)

    run(body)


def test_over_tls_and_through_the_synchronous_facade() -> None:
    with serving(Script(), part="websocket", tls=True) as server, SyncConnectionManager() as manager:
        with manager.session(at_raw(server)) as session:
            got: list[bytes] = []
            reader = threading.Thread(target=lambda: got.extend(event.raw for event in session))
            reader.start()
            for number in range(100):
                session.send(b"%d" % number)
            server.wait_for(lambda s: len(s.requests) == 100)
            begin = time.monotonic()
            while len(got) < 100 and time.monotonic() - begin < 20:
                reader.join(0.001)
            session.close()
            reader.join(20)
        assert got == [b"%d" % number for number in range(100)]
        assert session.timeline.outcome == "closed_by_caller"
        assert set(session.timeline.segments["handshake"].parts) >= {"tcp", "tls", "upgrade"}
