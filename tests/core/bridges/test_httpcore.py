"""What httpcore's trace events become: by the table first, then from the clients themselves."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from spanwire.bridges import httpcore as bridge_module
from spanwire.bridges.httpcore import TraceBridge, new_connection_id, shut_down
from spanwire.timeline import ConnectionUse, Marks
from tests.clients import each, is_async, library, opened
from tests.support import hello, run, serving

MS = 1_000_000


class Stream:
    """Like httpcore's: something with ``get_extra_info``."""

    def get_extra_info(self, _name: str) -> None:
        return None


class Request:
    def __init__(self, method: bytes) -> None:
        self.method = method


POST, CONNECT = {"request": Request(b"POST")}, {"request": Request(b"CONNECT")}
SERVER = {"host": "server", "port": 443}


def made(**more: Any) -> TraceBridge:
    bridge = TraceBridge(Marks(), engine="httpx", id="c0", **more)
    bridge.to(("server", 443))
    return bridge


def play(bridge: TraceBridge, *events: tuple[int, str, Mapping[str, Any]]) -> Marks:
    bridge.begin(0)
    for at_ms, name, info in events:
        bridge.event(name, info, at_ms * MS)
    return bridge._marks


def parts(marks: Marks) -> list[tuple[str, int, int]]:
    return [(part, begin // MS, end // MS) for part, begin, end in marks.parts if end > begin]


def use_of(marks: Marks) -> ConnectionUse:
    assert marks.use is not None
    return marks.use


def steps(name: str, begin_ms: int, end_ms: int, info: Mapping[str, Any], made: object = None) -> list[Any]:
    return [(begin_ms, f"{name}.started", info), (end_ms, f"{name}.complete", {"return_value": made})]


def exchange(begin_ms: int, prefix: str = "http11") -> list[Any]:
    return [
        *steps(f"{prefix}.send_request_headers", begin_ms, begin_ms + 1, POST),
        *steps(f"{prefix}.send_request_body", begin_ms + 1, begin_ms + 2, POST),
        *steps(f"{prefix}.receive_response_headers", begin_ms + 2, begin_ms + 9, POST),
    ]


# --- the table ----------------------------------------------------------------------------------------------------------


def test_a_new_connection_with_tls_and_http2() -> None:
    bridge, stream = made(), Stream()
    marks = play(
        bridge,
        *steps("connection.connect_tcp", 5, 10, SERVER, Stream()),
        *steps("connection.start_tls", 10, 20, {}, stream),
        *steps("http2.send_connection_init", 20, 22, {}),
        *exchange(23, "http2"),
    )
    assert parts(marks) == [("local", 0, 5), ("tcp", 5, 10), ("tls", 10, 20), ("upgrade", 20, 22), ("send", 23, 25)]
    assert (marks.sent_ns, bridge.head_ns) == (25 * MS, 32 * MS)
    assert marks.open_part is None
    bridge.carried_by(stream, 23 * MS)
    assert (use_of(marks).reused, use_of(marks).protocol, bridge.proxied) == (False, "h2", False)


def test_a_wait_that_is_none_is_not_told() -> None:
    bridge = made()
    bridge.begin(0)
    bridge.event("connection.connect_tcp.started", SERVER, 900_000)
    assert parts(bridge._marks) == []
    assert bridge._marks.open_part == "tcp"


def test_a_unix_socket() -> None:
    marks = play(made(), *steps("connection.connect_unix_socket", 0, 1, {"path": "/x"}, Stream()))
    assert parts(marks) == [("connect", 0, 1)]


def test_a_connect_that_is_tried_again_begins_anew() -> None:
    marks = play(
        made(),
        (0, "connection.connect_tcp.started", SERVER),
        (3, "connection.connect_tcp.failed", {"exception": OSError()}),
        (3, "connection.retry.started", {}),
        (8, "connection.retry.complete", {}),
        *steps("connection.connect_tcp", 8, 10, SERVER, Stream()),
    )
    assert parts(marks) == [("tcp", 8, 10)]


def test_a_connect_that_fails_says_where_it_stood() -> None:
    marks = play(
        made(),
        *steps("connection.connect_tcp", 0, 4, SERVER, Stream()),
        (4, "connection.start_tls.started", {}),
        (6, "connection.start_tls.failed", {"exception": OSError()}),
    )
    assert (marks.open_part, marks.begun_ns("tls")) == ("tls", 4 * MS)


def test_a_tunnel_is_the_proxys_part_until_its_answer() -> None:
    bridge, stream = made(), Stream()
    marks = play(
        bridge,
        *steps("connection.connect_tcp", 0, 1, {"host": "proxy", "port": 3128}, Stream()),
        *steps("http11.send_request_headers", 1, 2, CONNECT),
        *steps("http11.send_request_body", 2, 2, CONNECT),
        *steps("http11.receive_response_headers", 2, 6, CONNECT),
        *steps("proxy.start_tls", 6, 9, {}, stream),
        *exchange(9),
    )
    assert parts(marks) == [("tcp", 0, 1), ("proxy", 1, 6), ("tls", 6, 9), ("send", 9, 11)]
    assert (marks.sent_ns, bridge.head_ns, bridge.proxied) == (11 * MS, 18 * MS, True)


def test_a_proxy_that_forwards_is_told_by_its_address() -> None:
    bridge = made()
    play(bridge, *steps("connection.connect_tcp", 0, 1, {"host": "proxy", "port": 3128}, Stream()), *exchange(1))
    assert bridge.proxied


def test_socks() -> None:
    bridge = made()
    marks = play(
        bridge,
        *steps("socks.connect_tcp", 0, 1, {"host": "proxy", "port": 1080}, Stream()),
        *steps("socks.setup_socks5_connection", 1, 4, {}, Stream()),
        *steps("socks.start_tls", 4, 6, {}, Stream()),
        *exchange(6),
    )
    assert parts(marks) == [("tcp", 0, 1), ("proxy", 1, 4), ("tls", 4, 6), ("send", 6, 8)]
    assert bridge.proxied


def test_of_several_requests_in_one_call_the_last_one_counts() -> None:
    """A challenge, and its answer."""
    bridge = made()
    marks = play(bridge, *exchange(1))
    bridge.begin(20 * MS)
    for at_ms, name, info in exchange(20):
        bridge.event(name, info, at_ms * MS)
    assert parts(marks) == [("local", 0, 1), ("send", 1, 3), ("send", 20, 22)]
    assert (marks.sent_ns, bridge.head_ns) == (22 * MS, 29 * MS)


def test_nothing_is_marked_after_the_end() -> None:
    bridge = made()
    marks = play(bridge, *steps("connection.connect_tcp", 0, 1, SERVER, Stream()))
    bridge.stop()
    bridge.event("connection.start_tls.started", {}, 2 * MS)
    bridge.begin(3 * MS)
    bridge.carried_by(Stream(), 4 * MS)
    bridge.answered(Stream(), "HTTP/1.1", 4 * MS)
    assert (parts(marks), marks.open_part, use_of(marks).id) == ([("tcp", 0, 1)], None, "c0")


def test_a_connection_keeps_its_name() -> None:
    stream, last_ms = Stream(), 0
    uses: list[ConnectionUse] = []
    for _ in range(3):
        bridge = made()
        bridge.begin(last_ms * MS)
        if not uses:
            for at_ms, name, info in steps("connection.connect_tcp", 0, 1, SERVER, stream):
                bridge.event(name, info, at_ms * MS)
        for at_ms, name, info in exchange(last_ms + 1):
            bridge.event(name, info, at_ms * MS)
        bridge.carried_by(stream, (last_ms + 1) * MS)
        bridge.stop()
        uses.append(use_of(bridge._marks))
        last_ms += 20
    assert len({use.id for use in uses}) == 1
    assert [use.reused for use in uses] == [False, True, True]
    assert [use.age_s for use in uses] == [None, 0.020, 0.040]


def test_another_ones_connect_is_shared() -> None:
    """Over HTTP/2: this one waits from 2 to 30, of which the other one's connect takes 5 to 20."""
    stream, first, second = Stream(), made(), made()
    first.begin(5 * MS)
    second.begin(2 * MS)
    for at_ms, name, info in steps("connection.connect_tcp", 5, 20, SERVER, stream):
        first.event(name, info, at_ms * MS)
    for bridge, at_ms in ((first, 21), (second, 30)):
        bridge.event("http2.send_request_headers.started", POST, at_ms * MS)
        bridge.carried_by(stream, at_ms * MS)
    assert parts(second._marks) == [("local", 2, 5), ("shared", 5, 20), ("local", 20, 30)]
    assert (use_of(second._marks).reused, use_of(second._marks).id) == (False, use_of(first._marks).id)
    assert not first.alone_on(stream)
    second.stop()
    assert first.alone_on(stream)


def test_a_connection_whose_connect_was_not_seen() -> None:
    """The client was used before it was brought."""
    bridge = made()
    play(bridge, *exchange(0))
    bridge.carried_by(Stream(), 0)
    use = use_of(bridge._marks)
    assert (use.reused, use.age_s, bridge.rtt_min_ns()) == (True, None, None)


def test_connections_are_forgotten_with_their_streams() -> None:
    stream = Stream()
    bridge = made()
    bridge.carried_by(stream, 0)
    bridge.stop()
    before = len(bridge_module._known)
    bridge.stream = None
    del stream
    gc.collect()
    assert len(bridge_module._known) < before


def test_names_are_of_the_pools_own_count() -> None:
    first, second = new_connection_id(), new_connection_id()
    assert int(second[1:]) > int(first[1:])
    assert first.startswith("c")


def test_ending_something_that_has_no_socket() -> None:
    shut_down(Stream())


_STEPS = st.sampled_from(
    [
        "connect_tcp",
        "start_tls",
        "send_connection_init",
        "send_request_headers",
        "send_request_body",
        "retry",
        "x",
        "",
        "receive_response_headers",
        "setup_socks5_connection",
        "response_closed",
        "connect_unix_socket",
    ]
)
_NAMES = st.one_of(
    st.text(max_size=12),
    st.builds(
        lambda *words: ".".join(words),
        st.sampled_from(["connection", "http11", "http2", "proxy", "socks", ""]),
        _STEPS,
        st.sampled_from(["started", "complete", "failed", ""]),
    ),
)
_INFOS = st.sampled_from([{}, POST, CONNECT, SERVER, {"return_value": 5}, {"return_value": Stream()}])


@given(st.lists(st.tuples(st.integers(0, 100), _NAMES, _INFOS), max_size=30))
def test_whatever_comes_nothing_raises_and_no_part_is_negative(
    events: list[tuple[int, str, Mapping[str, Any]]],
) -> None:
    bridge = made()
    marks = play(bridge, *sorted(events, key=lambda event: event[0]))
    bridge.carried_by(Stream(), 100 * MS)
    bridge.answered(None, "HTTP/1.1", 100 * MS)
    bridge.stop()
    assert all(0 <= begin <= end for _, begin, end in marks.parts)
    assert marks.use is not None


# --- from the clients themselves ----------------------------------------------------------------------------------------


BODY = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}'


async def send(client: Any, url: str, bridge: TraceBridge, given: Mapping[str, Any] | None = None) -> Any:
    request = client.build_request("POST", url, content=BODY)
    bridge.to((request.url.raw_host.decode(), request.url.port))
    asynchronous = hasattr(client, "aclose")
    request.extensions = bridge.extensions({**request.extensions, **(given or {})}, asynchronous=asynchronous)
    bridge.begin(time.perf_counter_ns())
    if asynchronous:
        response = await client.send(request)
    else:
        response = await asyncio.to_thread(client.send, request)
    bridge.answered(response.extensions["network_stream"], response.http_version, time.perf_counter_ns())
    return response


@each()
def test_without_anything_of_a_plugin(cls: Any) -> None:
    with serving(hello()) as server:

        async def body() -> None:
            uses: list[ConnectionUse] = []
            async with opened(cls) as client:
                for _ in range(3):
                    bridge = TraceBridge(Marks(), engine=library(cls).__name__, id="c0")
                    response = await send(client, f"{server.url}/chat/completions", bridge)
                    assert response.status_code == 200
                    marks = bridge._marks
                    names = [part for part, begin, end in marks.parts if end > begin and part != "local"]
                    assert names == (["send"] if uses else ["tcp", "send"])
                    assert marks.sent_ns <= bridge.head_ns
                    assert bridge.rtt_min_ns() is not None
                    uses.append(use_of(marks))
                    bridge.stop()
            assert len({use.id for use in uses}) == 1
            assert [use.reused for use in uses] == [False, True, True]
            assert {use.protocol for use in uses} == {"http/1.1"}

        run(body)


@each()
def test_a_callback_that_is_there_already_is_called_too(cls: Any) -> None:
    seen: list[str] = []
    told: list[str] = []

    async def asynchronous(name: str, _info: Mapping[str, Any]) -> None:
        seen.append(name)

    def synchronous(name: str, _info: Mapping[str, Any]) -> None:
        seen.append(name)

    with serving(hello()) as server:

        async def body() -> None:
            async with opened(cls) as client:
                bridge = TraceBridge(Marks(), engine="x", id="c0", on_event=lambda name, _stream: told.append(name))
                given = {"trace": asynchronous if is_async(cls) else synchronous}
                await send(client, f"{server.url}/chat/completions", bridge, given)
                assert bridge.stream is not None

        run(body)
        assert seen == told
        assert seen[0] == "connection.connect_tcp.started"


@each()
def test_which_connection_is_known_before_its_answer(cls: Any) -> None:
    """Also of one that was used before, of which no event tells: we look at who has called."""
    with serving(hello(), hello(queue_s=0.0)) as server:

        async def body() -> None:
            found: list[Any] = []
            async with opened(cls) as client:
                for _ in range(2):
                    bridge = TraceBridge(
                        Marks(),
                        engine="x",
                        id="c0",
                        on_event=lambda name, stream: found.append(stream) if "request_headers" in name else None,
                    )
                    response = await send(client, f"{server.url}/chat/completions", bridge)
                    assert found[0] is response.extensions["network_stream"]
                    assert found[0] is bridge.stream
                    found.clear()

        run(body)


def test_no_library_is_imported() -> None:
    code = "import sys, spanwire.bridges.httpcore; print({'httpx', 'httpx2', 'httpcore', 'httpcore2'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "set()\n"
