"""C07 to C09: when an answer is complete, what an end at any other place is called, and what becomes of the connection."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any, Literal

import pytest

import spanwire
from spanwire import errors, pool
from spanwire.testing import Script
from tests.cases.play import (
    AB,
    DONE,
    END,
    HEAD,
    ROLE,
    STOP,
    WAYS,
    RawServer,
    Seen,
    Want,
    ask,
    check,
    chunked,
    data,
    delta,
    nothing_left,
    play,
    send,
    tool,
    whole,
)
from tests.support import AT_ONCE, NEVER, chat, read, run

way_of = pytest.mark.parametrize("way", WAYS)
TOOL = tool({"index": 0, "id": "t1", "function": {"name": "f", "arguments": '{"a"'}})
USAGE = data({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}})
CALLED = [("t1", "f", '{"a"')]

#: Where an answer may stop: events, and what has come of it by then. Content: nothing is sent again after it.
POINTS: dict[str, tuple[list[bytes], Want]] = {
    "before anything": ([], Want(finish=None, requests=3)),
    "after comments": ([b": a\n\n", b": b\n\n"], Want(finish=None, requests=3)),
    "after the role": ([ROLE], Want(finish=None, requests=3)),
    "after empty content": ([ROLE, delta(content="")], Want(finish=None, requests=3)),
    "after reasoning": ([ROLE, delta(reasoning_content="hm")], Want(reasoning="hm", finish=None)),
    "after content": ([AB], Want("ab", finish=None)),
    "after a tool delta": ([ROLE, TOOL], Want(tools=CALLED, finish=None)),
    "after content and a comment": ([AB, b": ping\n\n"], Want("ab", finish=None)),
    "inside the next event": ([AB, AB[:30]], Want("ab", finish=None)),
    "inside the finish": ([AB, STOP[:-20]], Want("ab", finish=None)),
    "before the finish's blank line": ([AB, STOP[:-2]], Want("ab", finish=None)),
}
#: By one of these an answer is complete.
COMPLETE: dict[str, tuple[list[bytes], Want]] = {
    "finish": ([AB, STOP], Want("ab")),
    "finish and usage": ([AB, STOP, USAGE], Want("ab", usage=(3, 2, 5))),
    "[DONE] without a finish": ([AB, DONE], Want("ab", finish=None)),
    "[DONE] without its blank line": ([AB, STOP, DONE[:-1]], Want("ab")),
    "[DONE] without any line end": ([AB, STOP, DONE[:-2]], Want("ab")),
    "finish on the content": ([ROLE, delta("length", content="ab")], Want("ab", finish="length")),
    "finish without content": ([ROLE, delta("content_filter")], Want(finish="content_filter")),
}


def sized(writes: list[bytes]) -> dict[str, Any]:
    return {"headers": {"content-length": str(len(b"".join(writes)))}}


# --- C07: the body ends in order --------------------------------------------------------------------------------------


@way_of
@pytest.mark.parametrize("name", POINTS)
def test_an_end_in_order_before_the_answer_is_complete(name: str, way: str) -> None:
    writes, want = POINTS[name]
    want = want._replace(error=errors.Truncated)
    play(way, Script(writes=writes), want._replace(reused=True))
    play(way, Script(writes=writes, chunked=False), want._replace(reused=False))
    if writes:
        play(way, Script(writes=writes, **sized(writes)), want._replace(reused=True))


@way_of
@pytest.mark.parametrize("name", COMPLETE)
def test_an_end_in_order_of_a_complete_answer(name: str, way: str) -> None:
    writes, want = COMPLETE[name]
    play(way, Script(writes=writes), want._replace(reused=True))
    play(way, Script(writes=writes, chunked=False), want._replace(reused=False))
    play(way, Script(writes=writes, **sized(writes)), want._replace(reused=True))
    play(way, Script(writes=writes, close=True), want._replace(reused=False))


@way_of
@pytest.mark.parametrize("body", [b"", b"\n", b'{"choices":[]}', b'{"choices":[{"ind', b"{}"])
def test_a_whole_answer_that_is_none(body: bytes, way: str) -> None:
    kinds = (errors.Truncated, errors.ProtocolError)
    play(way, Script(body=body), Want(finish=None, error=kinds, requests=1 if body.strip() else 3))


# --- C08: [DONE], and the message goes on --------------------------------------------------------------------------------


@way_of
@pytest.mark.parametrize("end", ["late", "never"])
def test_done_is_the_end_however_late_the_message_ends(end: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the drain is in no segment. test_manager looks at what becomes of the connection."""
    monkeypatch.setattr(pool, "FINISH_LIMIT_S", 0.1)
    script = Script(writes=[AB, END], end_s=0.3) if end == "late" else Script(writes=[AB, END], hang_after=2)
    for seen in play(way, script, Want("ab", reused=False)):
        assert seen.known.total_s < 0.25


AFTER_DONE = {
    "a second [DONE]": DONE,
    "content": AB,
    "usage": USAGE,
    "an error": data({"error": {"message": "late", "code": 500}}),
    "an error event": b"event: error\ndata: late\n\n",
    "an error field": b'error: {"message": "late"}\n\n',
    "JSON": b'{"error": "late"}',
    "a page": b"<html></html>",
    "half an event": b"data: {",
    "bytes": bytes(range(256)),
}


@way_of
@pytest.mark.parametrize("name", AFTER_DONE)
def test_what_comes_after_done_belongs_to_nobody(name: str, way: str) -> None:
    play(way, Script(writes=[AB, END, AFTER_DONE[name]]), Want("ab"))
    play(way, Script(writes=[AB + END + AFTER_DONE[name]]), Want("ab", reused=True))


def test_a_server_that_never_stops_sending_is_left_soon() -> None:
    """The drain is bounded in time AND bytes: a connection is not worth hundreds of megabytes."""
    sent = [0]

    def flood(sock: socket.socket) -> None:
        sock.sendall(HEAD + chunked(AB + END))
        junk = chunked(b": x\n\n" * 13107)
        while sent[0] < 256 * 2**20:
            sock.sendall(junk)
            sent[0] += len(junk)

    with RawServer(flood) as server:

        async def body() -> None:
            async with spanwire.ConnectionManager() as manager:
                async with manager.stream(server.endpoint(retries=NEVER), chat()) as stream:
                    assert await read(stream) == "ab"
                deadline = time.monotonic() + 3
                while server.open and time.monotonic() < deadline:
                    await asyncio.sleep(0.01)

        run(body)
    assert sent[0] < 64 * 2**20


# --- C09: the connection breaks ------------------------------------------------------------------------------------------

Mode = Literal["close", "reset"]


@way_of
@pytest.mark.parametrize("mode", ["close", "reset"])
@pytest.mark.parametrize("name", [*POINTS, "after the finish", "after usage"])
def test_a_connection_that_breaks_before_the_end(name: str, mode: Mode, way: str) -> None:
    more = {
        "after the finish": ([AB, STOP], Want("ab")),
        "after usage": ([AB, STOP, USAGE], Want("ab", usage=(3, 2, 5))),
    }
    writes, want = {**POINTS, **more}[name]
    want = want._replace(error=errors.ConnectionFailed, reused=False)
    for seen in play(way, Script(writes=writes, drop_after=len(writes), drop_mode=mode), want):
        assert isinstance(seen.error, errors.ConnectionFailed)
        assert seen.error.phase == "read"
        if mode == "reset":
            assert isinstance(seen.error.__cause__, ConnectionResetError)


@way_of
@pytest.mark.parametrize("mode", ["close", "reset"])
def test_a_connection_that_breaks_before_the_answer(mode: Mode, way: str) -> None:
    want = Want(finish=None, error=errors.ConnectionFailed, requests=3)
    for seen in play(way, Script(drop_after="request", drop_mode=mode), want):
        assert seen.error is not None
        assert seen.error.phase == "wait"


@way_of
@pytest.mark.parametrize("mode", ["close", "reset"])
def test_a_connection_that_breaks_after_done_is_no_error(mode: Mode, way: str) -> None:
    play(way, Script(writes=[AB, END], drop_after=2, drop_mode=mode), Want("ab", reused=False))


@way_of
@pytest.mark.parametrize("mode", ["close", "reset"])
def test_a_length_that_is_not_reached(mode: Mode, way: str) -> None:
    script = Script(writes=[AB, STOP], headers={"content-length": "9999"}, drop_after=2, drop_mode=mode)
    play(way, script, Want("ab", error=errors.ConnectionFailed, reused=False))
    body = whole(content="ab")
    play(
        way,
        Script(body=body, drop_after=0, drop_mode=mode),
        Want(finish=None, error=errors.ConnectionFailed, requests=3),
    )


@way_of
def test_an_end_of_the_connection_is_the_end_of_a_body_without_length_unless_it_is_a_reset(way: str) -> None:
    script = Script(writes=[AB, STOP], chunked=False, drop_after=2, drop_mode="reset")
    play(way, script, Want("ab", error=errors.ConnectionFailed, reused=False))


RAW_ENDS = {  # inside the framing itself
    "inside the status line": b"HTTP/1.1 20",
    "after the status line": b"HTTP/1.1 200 OK\r\n",
    "inside a header": b"HTTP/1.1 200 OK\r\nContent-Ty",
    "before the blank line": HEAD[:-2],
    "after the head": HEAD,
    "inside a chunk's size": HEAD + b"2",
    "after a chunk's size": HEAD + b"20\r\n",
    "after an early hint": b"HTTP/1.1 103 Early Hints\r\n\r\n",
}


@way_of
@pytest.mark.parametrize("mode", ["close", "reset"])
@pytest.mark.parametrize("name", RAW_ENDS)
def test_a_connection_that_breaks_inside_the_framing(name: str, mode: str, way: str) -> None:
    with nothing_left(), RawServer(send(RAW_ENDS[name], mode)) as server:
        seen = ask(way, server.endpoint(retries=AT_ONCE))
        seen.requests = server.requests
    check(seen, Want(finish=None, error=errors.ConnectionFailed, requests=3))


@way_of
@pytest.mark.parametrize("mode", ["close", "reset"])
@pytest.mark.parametrize("last", [b"", b"0", b"0\r\n", b"0\r\n\r", b"0\r\nx-trailer: 1\r\n"])
def test_a_connection_that_breaks_inside_the_last_chunk(last: bytes, mode: str, way: str) -> None:
    """After [DONE] nobody needs it; without, the body is not complete (RFC 9112 section 8)."""

    def one(body: bytes) -> Seen:
        with nothing_left(), RawServer(send(HEAD + chunked(body) + last, mode)) as server:
            seen = ask(way, server.endpoint(retries=AT_ONCE))
            seen.requests = server.requests
        return seen

    check(one(AB + END), Want("ab"))
    check(one(AB), Want("ab", finish=None, error=errors.ConnectionFailed))


@way_of
def test_trailers_and_chunk_extensions_are_no_content(way: str) -> None:
    body = AB + END
    framed = b"%x;a=b\r\n%b\r\n0\r\nx-trailer: data\r\n\r\n" % (len(body), body)
    with nothing_left(), RawServer(send(HEAD + framed)) as server:
        seen = ask(way, server.endpoint(retries=AT_ONCE), then=False)
        seen.requests = server.requests
    check(seen, Want("ab"))
