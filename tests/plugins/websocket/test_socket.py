"""The socket: frames whole, broken, cut and in pieces; pings; limits; what becomes of it in the end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from spanwire_websocket.socket import Closed, Keepalive, Sink, WebSocket, quiet_logger
from websockets.client import ClientProtocol
from websockets.frames import Frame
from websockets.protocol import State
from websockets.uri import WebSocketURI

import spanwire
from spanwire import errors
from tests.plugins.websocket.raw_server import (
    BINARY,
    CONT,
    PING,
    PONG,
    TEXT,
    Peer,
    RawServer,
    answer,
    close_frame,
    completed,
    created,
    delta,
    event,
    frame,
    raw_server,
)
from tests.support import NEVER, assert_adds_up, chat, run

FINE = answer("Hel", "lo ", "wörld", " \N{EARTH GLOBE EUROPE-AFRICA}")
WORDS = "Hello wörld \N{EARTH GLOBE EUROPE-AFRICA}"


def says(*writes: bytes) -> Callable[[Peer], Awaitable[None]]:
    """A server that answers every request with these writes."""

    async def handler(peer: Peer) -> None:
        await peer.upgrade()
        while True:
            await peer.request()
            for data in writes:
                await peer.send(data)
                await asyncio.sleep(0)

    return handler


def says_and_ends(data: bytes, *, reset: bool = False) -> Callable[[Peer], Awaitable[None]]:
    """A server that answers the first request with this and ends the connection."""

    async def handler(peer: Peer) -> None:
        await peer.upgrade()
        await peer.request()
        await peer.send(data)
        if reset:
            peer.reset()

    return handler


async def ask(server: RawServer, manager: spanwire.ConnectionManager, **more: Any) -> spanwire.Reply:
    more.setdefault("retries", NEVER)
    return await manager.complete(server.endpoint(**more), chat())


async def failure(server: RawServer, **more: Any) -> errors.SpanwireError:
    async with spanwire.ConnectionManager(telemetry=None) as manager:
        with pytest.raises(errors.SpanwireError) as caught:
            await ask(server, manager, **more)
    assert caught.value.endpoint == f"127.0.0.1:{server.port}"
    assert caught.value.timeline is not None
    assert_adds_up(caught.value.timeline)
    return caught.value


# --- the parser of ours against the library's -------------------------------------------------------------------------


class Pipe(asyncio.Transport):
    """The other side of a socket that a test feeds by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close


class Heard:
    """A sink that keeps what it is told."""

    patient = True

    def __init__(self) -> None:
        self.messages: list[tuple[bytes, bool]] = []
        self.closed: list[int | None] = []

    def on_message(self, data: bytes | bytearray, text: bool) -> None:
        self.messages.append((bytes(data), text))

    def on_batch(self) -> None:
        pass

    def on_sent(self) -> None:
        pass

    def on_lost(self, closed: Closed) -> None:
        self.closed.append(closed.code)


def _heard(pieces: list[bytes], max_size: int) -> tuple[list[tuple[bytes, bool]], list[int | None]]:
    """What a socket tells of these reads, and what its library says alone."""
    uri = WebSocketURI(secure=False, host="h", port=1, path="/", query="", username=None, password=None)
    wire = ClientProtocol(uri, max_size=max_size, logger=quiet_logger)
    wire.state = State.OPEN  # as after the upgrade
    wire.parser = super(ClientProtocol, wire).parse()
    next(wire.parser)
    socket, sink = WebSocket("h", wire, Keepalive(None, None), max_size=max_size), Heard()
    socket.upgraded_ns = 1
    socket.connection_made(Pipe())
    socket.start()
    socket.take(sink)
    for piece in pieces:
        socket.data_received(piece)
    socket.abort()
    socket.connection_lost(None)
    return sink.messages, sink.closed


def _by_the_library(data: bytes, max_size: int) -> list[tuple[bytes, bool]]:
    uri = WebSocketURI(secure=False, host="h", port=1, path="/", query="", username=None, password=None)
    wire = ClientProtocol(uri, max_size=max_size, logger=quiet_logger)
    wire.state = State.OPEN
    wire.parser = super(ClientProtocol, wire).parse()
    next(wire.parser)
    wire.receive_data(data)
    found: list[tuple[bytes, bool]] = []
    pieces: list[bytes] = []
    text = False
    for one in wire.events_received():
        assert isinstance(one, Frame)
        if one.opcode in (TEXT, BINARY):
            pieces, text = [], one.opcode == TEXT
        if one.opcode in (TEXT, BINARY, CONT):
            pieces.append(bytes(one.data))
            if one.fin:
                found.append((b"".join(pieces), text))
    return found


payloads = st.one_of(
    st.binary(max_size=12),
    st.binary(max_size=6).map(lambda some: b"\x81\x02hi" + some),  # looks like a whole message itself
    st.integers(120, 131).map(lambda size: b"\x81" * size),
)
frames = st.one_of(
    st.builds(frame, payloads, st.sampled_from([TEXT, TEXT, TEXT, BINARY])),
    st.builds(frame, payloads, st.sampled_from([TEXT, BINARY, CONT]), fin=st.booleans()),
    st.builds(lambda some, code: frame(some[:125], code), payloads, st.sampled_from([PING, PONG])),
    st.builds(frame, payloads, rsv=st.sampled_from([0, 0, 0x40, 0x10])),
    st.sampled_from([b"\x81\x7e\x00\x05hello", b"\x81\x85\x00\x00\x00\x00hello", b"\x83\x00"]),
    st.sampled_from([close_frame(), close_frame(1000), close_frame(1013, "full"), close_frame(7)]),
)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(frames, max_size=8).map(b"".join), st.lists(st.integers(0, 600), max_size=8), st.sampled_from([9, 1 << 20])
)
def test_whatever_comes_is_told_as_the_library_reads_it(data: bytes, cuts: list[int], max_size: int) -> None:
    """However it is cut: messages of the fast way, and those of the library's parser, are the same in the same order."""
    places = sorted({0, *(cut for cut in cuts if cut < len(data)), len(data)})
    pieces = [data[a:b] for a, b in itertools.pairwise(places)]

    async def body() -> None:
        messages, closed = _heard(pieces, max_size)
        assert messages == _by_the_library(data, max_size)
        assert len(closed) == 1

    asyncio.run(body())


def test_the_fast_way_is_taken_wherever_a_message_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """It depends on where the library's parser stands, which is told in no documented way."""
    taken: list[int] = []
    take = WebSocket._take_plain

    def noted(self: WebSocket, data: bytes, sink: Sink) -> int:
        taken.append(take(self, data, sink))
        return taken[-1]

    monkeypatch.setattr(WebSocket, "_take_plain", noted)
    whole, half = frame("whole"), frame("a", fin=False)
    reads = [whole, frame(b"b", BINARY), whole, whole[:3], whole[3:], half, frame("c", CONT), whole]

    async def body() -> None:
        messages, _ = _heard(reads, 1 << 20)
        assert len(messages) == 6

    asyncio.run(body())
    assert taken == [7, 0, 7, 0, 7, 0, 7]


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_frame_whose_head_comes_first_is_not_read_as_another_one(cut: int) -> None:
    """Bytes that follow the head of a binary frame may look like a whole message of text."""
    payload = b"\x81\x02hi\x00rest"
    whole = frame(payload, BINARY)

    async def body() -> None:
        assert _heard([whole[:cut], whole[cut:]], 1 << 20)[0] == [(payload, False)]

    asyncio.run(body())


# --- how the bytes come ----------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.integers(1, len(FINE) - 1), max_size=12))
def test_any_split_of_the_bytes_gives_the_same_chunks(cuts: list[int]) -> None:
    places = sorted({0, *cuts, len(FINE)})
    pieces = [FINE[a:b] for a, b in itertools.pairwise(places)]

    async def body() -> None:
        async with raw_server(says(*pieces)) as server, spanwire.ConnectionManager(telemetry=None) as manager:
            for _ in range(2):  # the second one on the same socket: nothing of the first is left
                async with manager.stream(server.endpoint(retries=NEVER), chat()) as stream:
                    chunks = [chunk async for chunk in stream]
                assert [chunk.text for chunk in chunks if chunk.text] == ["Hel", "lo ", "wörld", WORDS[-2:]]
                assert stream.reply.text == WORDS
                assert stream.reply.finish_reason == "stop"
                assert stream.reply.usage == spanwire.Usage(1, 2, 3)
            assert len(server.peers) == 1

    run(body)


def test_byte_by_byte() -> None:
    async def body() -> None:
        pieces = [bytes([byte]) for byte in FINE]
        async with raw_server(says(*pieces)) as server, spanwire.ConnectionManager(telemetry=None) as manager:
            assert (await ask(server, manager)).text == WORDS

    run(body)


@pytest.mark.parametrize("size", [1, 7, 125, 126])
def test_a_message_in_fragments_with_pings_in_between(size: int) -> None:
    """RFC 6455 section 5.4: control frames may come in the middle of a fragmented message."""
    inner = completed("", "r1")[4:]  # without the header of a 16-bit length
    pieces = [inner[at : at + size] for at in range(0, len(inner), size)]
    frames = [
        frame(piece, TEXT if n == 0 else CONT, fin=n == len(pieces) - 1) + frame(b"p%d" % n, PING)
        for n, piece in enumerate(pieces)
    ]
    pongs: list[bytes] = []

    async def handler(peer: Peer) -> None:
        await peer.upgrade()
        await peer.request()
        await peer.send(created() + delta("Hi") + b"".join(frames))
        while len(pongs) < len(pieces):
            opcode, data = await peer.frame()
            if opcode == PONG:
                pongs.append(data)
        await peer.until_gone()

    async def body() -> None:
        async with raw_server(handler) as server, spanwire.ConnectionManager(telemetry=None) as manager:
            reply = await ask(server, manager)
            assert (reply.text, reply.finish_reason) == ("Hi", "stop")
        assert pongs == [b"p%d" % n for n in range(len(pieces))]

    run(body)


def test_binary_frames_with_json_are_read_as_text() -> None:
    """Some gateways send their JSON in binary frames."""

    async def body() -> None:
        binary = [bytes([0x80 | BINARY]) + part[1:] for part in (created(), delta("Hi"), completed("Hi"))]
        async with raw_server(says(*binary)) as server, spanwire.ConnectionManager(telemetry=None) as manager:
            assert (await ask(server, manager)).text == "Hi"

    run(body)


def test_one_bad_byte_of_utf8_costs_one_character_and_not_the_answer() -> None:
    async def body() -> None:
        bad = delta("a#b").replace(b"#", b"\xff")
        async with (
            raw_server(says(created() + bad + completed("a\ufffdb"))) as server,
            spanwire.ConnectionManager(telemetry=None) as manager,
        ):
            assert (await ask(server, manager)).text == "a\ufffdb"

    run(body)


def test_messages_for_nobody_and_unknown_ones_are_passed_over_in_an_answer() -> None:
    async def body() -> None:
        odd = event("codex.rate_limits", limits={}) + frame(b"x", PONG) + event("response.brand_new", x=1)
        async with (
            raw_server(says(odd + created() + odd + delta("Hi") + odd + completed("Hi"))) as server,
            spanwire.ConnectionManager(telemetry=None) as manager,
        ):
            assert (await ask(server, manager)).text == "Hi"
            assert (await ask(server, manager)).text == "Hi"
            assert len(server.peers) == 1

    run(body)


# --- broken frames ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        frame(b"{}", TEXT, rsv=0x40),
        frame(b"{}", 3),
        frame(b"{}", CONT),
        frame(b"a" * 126, PING),
        frame(b"a", PING, fin=False),
        frame(b"{", TEXT, fin=False) + frame(b"}", TEXT),
        close_frame(1005),
        close_frame(999),
        frame(b"\x03", 8),
        b"\x81\x85\x00\x00\x00\x00hello",  # masked: only clients do that
        frame(struct.pack("!H", 1000) + b"\xff", 8),
        b"HTTP/1.1 400 Bad Request\r\n\r\n" + b" " * 100,
    ],
    ids=[
        "rsv",
        "opcode",
        "cont",
        "long-ping",
        "cut-ping",
        "interleaved",
        "1005",
        "999",
        "short-close",
        "masked",
        "utf8",
        "http",
    ],
)
@pytest.mark.parametrize("before", [b"", created() + delta("Hi")], ids=["first", "later"])
def test_a_broken_frame_is_a_protocol_error_that_is_not_tried_again(bad: bytes, before: bytes) -> None:
    codes: list[int] = []

    async def handler(peer: Peer) -> None:
        await peer.upgrade()
        await peer.request()
        await peer.send(before + bad)
        await peer.until_gone()
        codes.append(peer.closed or 0)

    async def body() -> None:
        async with raw_server(handler) as server:
            error = await failure(server, retries=spanwire.Retries(base_s=0))
            assert isinstance(error, errors.ProtocolError), error
            assert "no WebSocket" in str(error)
            assert error.retryable is False
            assert error.__cause__ is not None
            assert (error.reply.text if error.reply else "") == ("Hi" if before else "")
            assert len(server.asked) == 1

    run(body)
    assert codes[0] in (1002, 1007), "RFC 6455 section 7.1.7"


@pytest.mark.parametrize("json", [b"hello", b"[]", b"7", b'"x"', b"{", b"null", b"\x00\xff"])
def test_what_is_no_event_is_a_protocol_error_and_the_socket_is_given_up(json: bytes) -> None:
    async def body() -> None:
        async with raw_server(says(frame(json) + FINE)) as server, spanwire.ConnectionManager() as manager:
            for number in range(2):
                with pytest.raises(errors.ProtocolError) as caught:
                    await ask(server, manager)
                assert len(str(caught.value)) < 400
                assert len(server.peers) == number + 1

    run(body)


# --- ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reset", [False, True], ids=["eof", "reset"])
@pytest.mark.parametrize("at", ["start", "header", "payload", "between"])
@pytest.mark.parametrize("begun", [False, True])
def test_the_end_of_the_connection_anywhere(begun: bool, at: str, reset: bool) -> None:
    before = created() + delta("Hi") if begun else b""
    rest = {"start": b"", "header": delta("x" * 300)[:3], "payload": delta("x" * 300)[:90], "between": frame(b"", PING)}
    sent = before + rest[at]

    async def body() -> None:
        async with raw_server(says_and_ends(sent, reset=reset)) as server:
            error = await failure(server)
            assert isinstance(error, errors.ConnectionFailed)
            assert error.phase == ("read" if begun else "wait")
            assert error.retryable is not begun
            if begun and not reset:
                assert error.reply is not None
                assert error.reply.text == "Hi"
                assert error.reply.finish_reason is None

    run(body)


@pytest.mark.parametrize("code", [None, 1000, 1001, 1005, 1011, 1012, 1013, 4000])
def test_a_close_in_the_middle_of_an_answer_is_never_its_end(code: int | None) -> None:
    """Also those codes that say that all is well: only a terminal event ends an answer."""

    async def body() -> None:
        end = close_frame(None if code == 1005 else code)
        async with raw_server(says_and_ends(created() + delta("Hi") + end)) as server:
            error = await failure(server, retries=spanwire.Retries(base_s=0))
            expected = errors.Truncated if code in (None, 1000, 1005) else errors.ConnectionFailed
            assert isinstance(error, expected)
            assert error.retryable is False
            assert error.full is False
            assert error.reply is not None
            assert error.reply.text == "Hi"
            assert str(code or 1005) in str(error)
            assert len(server.asked) == 1

    run(body)


# --- limits (C22) -------------------------------------------------------------------------------------------------------


def test_c22_a_message_of_over_a_mebibyte_is_no_problem() -> None:
    """The library's own default is 1 MiB."""
    text = "x" * (1024 * 1024 + 1)

    async def body() -> None:
        async with (
            raw_server(says(answer(text))) as server,
            spanwire.ConnectionManager(telemetry=None) as manager,
        ):
            assert len((await ask(server, manager)).text) == len(text)

    run(body)


@pytest.mark.parametrize("kind", ["whole", "fragments"])
def test_c22_a_message_over_our_limit(kind: str) -> None:
    codes: list[int | None] = []
    big = delta("x" * 1_048_577)
    if kind == "fragments":
        inner = big[10:]
        big = b"".join(
            frame(inner[at : at + 60_000], TEXT if not at else CONT, fin=at + 60_000 >= len(inner))
            for at in range(0, len(inner), 60_000)
        )

    async def handler(peer: Peer) -> None:
        await peer.upgrade()
        await peer.request()
        with contextlib.suppress(ConnectionError):
            await peer.send(created() + delta("Hi") + big)
        await peer.until_gone()
        codes.append(peer.closed)

    async def body() -> None:
        async with raw_server(handler) as server:
            error = await failure(
                server, limits=spanwire.Limits(max_event_bytes=1024 * 1024), retries=spanwire.Retries(base_s=0)
            )
            assert isinstance(error, errors.MessageTooBig)
            assert "Limits.max_event_bytes" in str(error)
            assert "1048576" in str(error)
            assert "we have closed" in str(error)
            assert error.retryable is False
            assert error.timeline is not None
            assert error.timeline.outcome == "error"
            assert error.reply is not None
            assert error.reply.text == "Hi"
            assert len(server.asked) == 1

    run(body)
    assert codes == [1009]


def test_c22_our_request_is_over_the_servers_limit() -> None:
    async def handler(peer: Peer) -> None:
        await peer.upgrade()
        await peer.request()
        await peer.send(close_frame(1009, "message too big"))
        await peer.until_gone()

    async def body() -> None:
        async with raw_server(handler) as server:
            error = await failure(server, retries=spanwire.Retries(base_s=0))
            assert isinstance(error, errors.MessageTooBig)
            assert "the server closed with 1009" in str(error)
            assert "message too big" in str(error)
            assert "Limits.max_event_bytes" not in str(error).split("not ")[0]
            assert error.retryable is False
            assert error.phase == "send"
            assert len(server.asked) == 1

    run(body)


# --- pings (C23) --------------------------------------------------------------------------------------------------------

QUICK = {"ping_interval_s": 0.05, "ping_timeout_s": 0.1}


def test_c23_a_server_that_computes_and_answers_pings() -> None:
    async def handler(peer: Peer) -> None:
        await peer.upgrade()
        await peer.request()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await peer.request()  # answers pings meanwhile
        await peer.send(FINE)
        await peer.until_gone()

    async def body() -> None:
        async with raw_server(handler) as server, spanwire.ConnectionManager(telemetry=None) as manager:
            reply = await ask(server, manager, options=QUICK)
            assert reply.text == WORDS
            assert reply.timeline is not None
            assert reply.timeline.connection is not None
            assert reply.timeline.connection.rtt_min_s is not None
            assert reply.timeline.connection.rtt_min_s < 0.2

    run(body)


def test_c23_missing_pongs_alone_do_not_end_a_call() -> None:
    """The server's loop is blocked: it reads nothing for longer than interval and limit together."""

    async def handler(peer: Peer) -> None:
        await peer.upgrade()
        await peer.request()
        await asyncio.sleep(0.6)
        await peer.send(FINE)
        await peer.until_gone()

    async def body() -> None:
        async with raw_server(handler) as server, spanwire.ConnectionManager(telemetry=None) as manager:
            for _ in range(1):
                reply = await ask(server, manager, options=QUICK)
                assert reply.text == WORDS
                assert reply.timeline is not None
                assert reply.timeline.outcome == "completed"

    run(body)


@pytest.mark.parametrize("answered", [0, 3])
def test_c23_a_server_that_answers_no_ping_gets_more_of_them(answered: int) -> None:
    """Else the connection of a long call would be silent, and a proxy would cut it. The last one may be answered alone."""
    pings: list[bytes] = []

    async def handler(peer: Peer) -> None:
        await peer.upgrade()
        while len(pings) < 4:
            opcode, data = await peer.frame()
            if opcode == PING:
                pings.append(data)
                if len(pings) == answered:
                    await peer.send(frame(data, PONG))
        await peer.send(FINE)
        await peer.until_gone()

    async def body() -> None:
        async with raw_server(handler) as server, spanwire.ConnectionManager(telemetry=None) as manager:
            reply = await ask(server, manager, options={"ping_interval_s": 0.05, "ping_timeout_s": 0.02})
            assert reply.text == WORDS
            assert reply.timeline is not None
            assert reply.timeline.connection is not None
            assert_adds_up(reply.timeline)

    run(body)
    assert pings == ([b"1", b"again", b"again", b"2"] if answered else [b"1", b"again", b"again", b"again"])


def test_c23_our_own_loop_is_blocked() -> None:
    import time

    async def body() -> None:
        gate = asyncio.Event()

        async def handler(peer: Peer) -> None:
            await peer.upgrade()
            await peer.request()
            await peer.send(created() + delta("Hel"))
            await gate.wait()
            await peer.send(delta("lo") + completed("Hello"))
            await peer.until_gone()

        async with raw_server(handler) as server, spanwire.ConnectionManager(telemetry=None) as manager:
            async with manager.stream(server.endpoint(retries=NEVER, options=QUICK), chat()) as stream:
                text = ""
                async for chunk in stream:
                    if not text:
                        time.sleep(0.6)  # noqa: ASYNC251 - that is what is tested
                        gate.set()
                    text += chunk.text
            assert text == "Hello"
            assert stream.timeline.outcome == "completed"

    run(body)


def test_c23_a_dead_network_is_a_timeout_by_the_idle_limit() -> None:
    async def body() -> None:
        dead = asyncio.Event()

        async def handler(peer: Peer) -> None:
            await peer.upgrade()
            await peer.request()
            await peer.send(created() + delta("Hi"))
            await dead.wait()  # reads nothing, says nothing

        async with raw_server(handler) as server:
            try:
                error = await failure(server, options=QUICK, timeouts=spanwire.Timeouts(idle_s=0.4))
            finally:
                dead.set()
            assert isinstance(error, errors.CallTimeout)
            assert error.limit == "idle_s"
            assert error.timeline is not None
            assert error.timeline.outcome == "timeout"
            assert error.reply is not None
            assert error.reply.text == "Hi"

    run(body)


def test_c23_an_idle_socket_that_answers_no_ping_takes_no_further_call() -> None:
    async def body() -> None:
        gone = asyncio.Event()

        async def mute(peer: Peer) -> None:
            await peer.upgrade()
            await peer.request()
            await peer.send(FINE)
            with contextlib.suppress(ConnectionError):
                opcode, data = await peer.frame()
                assert opcode == PING
                await peer.send(frame(data, PONG))
                while await peer.reader.read(65536):
                    pass
            gone.set()

        async with raw_server(mute, says(FINE)) as server, spanwire.ConnectionManager(telemetry=None) as manager:
            endpoint = {"options": QUICK}
            assert (await ask(server, manager, **endpoint)).text == WORDS
            await asyncio.wait_for(gone.wait(), 5)
            assert (await ask(server, manager, **endpoint)).text == WORDS
            assert len(server.peers) == 2

    run(body)


@pytest.mark.parametrize("options", [{"ping_interval_s": None}, {"ping_interval_s": 0.02, "ping_timeout_s": None}])
def test_pings_can_be_left_out_and_missing_answers_ignored(options: dict[str, Any]) -> None:
    seen: list[int] = []

    async def handler(peer: Peer) -> None:
        await peer.upgrade()
        for _ in range(2):
            opcode = PING
            while opcode == PING:
                opcode, _ = await peer.frame()
                seen.append(opcode)
            await asyncio.sleep(0.1)
            await peer.send(FINE)
        await peer.until_gone()

    async def body() -> None:
        async with raw_server(handler) as server, spanwire.ConnectionManager(telemetry=None) as manager:
            for _ in range(2):
                assert (await ask(server, manager, options=options)).text == WORDS
                await asyncio.sleep(0.1)
            assert len(server.peers) == 1

    run(body)
    assert (PING in seen) is (options["ping_interval_s"] is not None)


def test_a_pong_that_nobody_asked_for_measures_nothing() -> None:
    """RFC 6455 section 5.5.3: it may come at any time."""

    async def handler(peer: Peer) -> None:
        await peer.upgrade()
        await peer.request()
        await peer.send(frame(b"0", PONG) + frame(b"", PONG) + frame(b"99", PONG) + FINE)
        await peer.until_gone()

    async def body() -> None:
        async with raw_server(handler) as server, spanwire.ConnectionManager(telemetry=None) as manager:
            assert (await ask(server, manager)).text == WORDS

    run(body)


# --- nobody is told more than he should be ----------------------------------------------------------------------------------


def test_no_log_record_has_the_key_the_headers_or_a_message(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    async def body() -> None:
        async with raw_server(says(FINE)) as server, spanwire.ConnectionManager(telemetry=None) as manager:
            await ask(
                server,
                manager,
                api_key="sk-very-secret",
                headers={"x-secret": "hidden-header"},
                query={"token": "hidden-query"},
            )
            assert b"sk-very-secret" in server.peers[0].head
            assert b"x-secret: hidden-header" in server.peers[0].head.lower()
            assert b"token=hidden-query" in server.peers[0].head.split(b"\r\n")[0]
            assert repr(manager)

    run(body)
    for record in caplog.records:
        for secret in ("sk-very-secret", "hidden-header", "hidden-query", "Hel", "Say hello"):
            assert secret not in record.getMessage(), record
