"""C01 to C06: line ends, byte order marks, fields, comments, characters, codings. The framing never shows in the reply."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import time
import zlib
from typing import Any

import pytest

import spanwire
from spanwire import errors
from spanwire.testing import Script
from tests.cases.play import (
    AB,
    BOM,
    DONE,
    END,
    ROLE,
    STOP,
    WAYS,
    Want,
    ask,
    choice,
    data,
    delta,
    nothing_left,
    play,
    split_everywhere,
    whole,
)
from tests.support import AT_ONCE, NEVER, chat, run, serving

way_of = pytest.mark.parametrize("way", WAYS)
CUT = (errors.Truncated, errors.ConnectionFailed)
SEPARATORS = "\u2028\u0085\u2029\u00a0\ufeff\u200b"
JSON_AB = data(choice(content="ab"), b"").removeprefix(b"data: ")
TEXT = "café 北京 🙂"


def text(raw: bytes) -> bytes:
    """An event whose content is these bytes, inside a JSON string as they are."""
    return b'data: {"choices":[{"index":0,"delta":{"content":"' + raw + b'"},"finish_reason":null}]}\n\n'


# --- C01, C02, C03, C04 -------------------------------------------------------------------------------------------------


@way_of
@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"], ids=["LF", "CR", "CRLF"])
def test_what_other_standards_call_a_line_end_is_text(end: bytes, way: str) -> None:
    pieces = [f"{separator}a{separator}" for separator in SEPARATORS]
    writes = [*(delta(content=piece, reasoning=piece).replace(b"\n", end) for piece in pieces), END]
    play(way, Script(writes=writes), Want("".join(pieces), "".join(pieces)))


FRAMINGS: dict[str, list[bytes]] = {
    # C02
    "bom": [BOM + delta(content="ab"), END],
    "bom in three reads": [BOM[:1], BOM[1:2], BOM[2:] + AB, END],
    "bom in two reads": [BOM[:2], BOM[2:] + AB + END],
    "bom alone": [BOM, AB, END],
    "bom before a comment": [BOM + b": hi\n\n", AB, END],
    "bom before a blank line": [BOM + b"\n\n", AB, END],
    "bom at the second event": [AB, BOM + delta(content="lost"), END],
    "bom twice": [BOM + BOM + delta(content="lost"), AB, END],
    "bom inside a line": [delta(content="a"), delta(content="b"), END],
    "bom before a whole answer": [BOM + whole(content="ab")],
    "bom in pieces before a whole answer": [BOM[:1], BOM[1:2], BOM[2:], whole(content="ab")],
    # C03
    "several data lines": [
        b'data: {"choices":[{"index":0,\ndata: "delta":{"content":"ab"},"finish_reason":null}]}\n\n',
        END,
    ],
    "a data line for each token": [b"data: " + JSON_AB.replace(b",", b"\ndata: ,") + b"\n\n", END],
    "an empty data line": [b"data\ndata: " + JSON_AB + b"\ndata\ndata:\n\n", END],
    "no space": [b"data:" + JSON_AB + b"\n\n", STOP.replace(b": {", b":{"), b"data:[DONE]\n\n"],
    "more spaces": [b"data:   " + JSON_AB + b"  \n\n", STOP, b"data:   [DONE] \n\n"],
    "other fields": [b"id: 1\nretry: 5\nfoo: 1\nbar\nevent: message\n" + AB, b"id\n" + STOP, b"id: 3\n" + DONE],
    "fields behind the data": [AB[:-1] + b"event: x\nid: 4\n\n", END],
    "names of other case": [b"Data: lost\nDATA: lost\n data: lost\n\n", AB, END],
    "all in one write": [ROLE + AB + END],
    "two and a half events": [AB[:20], AB[20:] + STOP + DONE[:3], DONE[3:]],
    "blank lines": [b"\n\n\n", AB, b"\n\n", STOP, b"\n", DONE, b"\n\n"],
    # C04
    "comments": [b": OPENROUTER PROCESSING\n\n", b":\n\n", AB, b": ping\n\n", STOP, b":ping\n\n", DONE, b": bye\n\n"],
    "comments after an id": [b"id: 7\n" + AB, b": ping\n\n", b": ping\n\n", STOP, b": ping\n\n", DONE],
    "a comment inside an event": [b": a\nevent: message\n: b\ndata: " + JSON_AB + b"\n: c\n\n", END],
    "a comment between data lines": [b"data: " + JSON_AB[:12] + b"\n: ping\ndata: " + JSON_AB[12:] + b"\n\n", END],
    "a comment that looks like data": [b": data: [DONE]\n\n:data: " + JSON_AB + b"\n\n", AB, END],
    "a long comment": [b": " + b"x" * 3000 + b"\n\n", AB, END],
    "a comment that is no text": [b": \xff\xfe\xf0\x9f\n\n", AB, END],
    "an id alone": [AB, b"id: 8\n\n", END],
    "an event name alone": [b"event: ping\n\n", AB, b"event: keepalive\n\n", END],
    "a heartbeat with empty data": [b"data:\n\n", b"data\n\n", AB, b"event: ping\ndata: \n\n", END],
    "a heartbeat that is an object": [
        b"event: ping\ndata: {}\n\n",
        AB,
        b'event: ping\ndata: {"type": "ping"}\n\n',
        END,
    ],
}


@way_of
@pytest.mark.parametrize("name", FRAMINGS)
def test_the_framing_does_not_show(name: str, way: str) -> None:
    play(way, Script(writes=FRAMINGS[name]), Want("ab"))


@way_of
@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"], ids=["LF", "CR", "CRLF"])
@pytest.mark.parametrize(
    "name", ["several data lines", "comments", "other fields", "bom in three reads", "blank lines"]
)
def test_every_line_end(name: str, end: bytes, way: str) -> None:
    play(way, Script(writes=[write.replace(b"\n", end) for write in FRAMINGS[name]]), Want("ab"))


def test_line_ends_may_be_mixed() -> None:
    writes = [ROLE[:-2] + b"\r\n\n", AB[:-2] + b"\n\r", STOP[:-2] + b"\r\r\n", DONE[:-2] + b"\r\r"]
    play("async stream", Script(writes=writes), Want("ab"))


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"], ids=["LF", "CR", "CRLF"])
def test_a_stream_may_be_split_anywhere(end: bytes) -> None:
    stream = BOM + b"id: 1\n" + text(TEXT.encode()) + b": \xf0\x9f\n\n" + text(rb"\ud83d\ude42 \u00e9") + END
    split_everywhere(stream.replace(b"\n", end), Want(TEXT + "🙂 é"))


def test_heartbeats_keep_a_call_alive_and_are_no_progress() -> None:
    """C04: for the limits a comment shows that the connection lives, not that the model makes progress."""
    pings = Script(writes=[b": ping\n\n"] * 15 + [AB + END], write_gap_s=0.02)
    with serving(pings) as server, nothing_left(server):
        seen = ask("async stream", server.endpoint(retries=NEVER, timeouts=spanwire.Timeouts(idle_s=0.2)))
        assert seen.got.text == "ab"
        limited = server.endpoint(retries=NEVER, timeouts=spanwire.Timeouts(idle_s=5, first_content_s=0.1))
        for way in WAYS:
            found = ask(way, limited).error
            assert isinstance(found, errors.CallTimeout)
            assert found.limit == "first_content_s"


# --- C05 --------------------------------------------------------------------------------------------------------------

BAD = {
    "an invalid byte": b"a\xffb",
    "a lead byte without its tail": b"a\xc3b",
    "half a character": b"a\xf0\x9f\x99b",
    "an overlong form": b"a\xc0\xafb",
    "a surrogate in UTF-8": b"a\xed\xa0\xbdb",
    "at the end": b"ab\xf0\x9f",
    "at the start": b"\x99\x82ab",
}


@way_of
@pytest.mark.parametrize("name", BAD)
def test_a_broken_character_is_replaced_and_the_stream_goes_on(name: str, way: str) -> None:
    replaced = BAD[name].decode("utf-8", "replace")
    writes = [ROLE, text(BAD[name]), text(b" c"), END]
    play(way, Script(writes=writes), Want(f"{replaced} c", reused=True))
    reasoning = text(BAD[name]).replace(b"content", b"reasoning_content")
    arguments = (
        b'{"choices":[{"delta":{"tool_calls":[{"id":"t1","function":{"name":"f","arguments":"' + BAD[name] + b'"}}]}}]}'
    )
    play(way, Script(writes=[reasoning, data(arguments), END]), Want(reasoning=replaced, tools=[("t1", "f", replaced)]))


SURROGATES = {  # as JSON escapes: name -> pieces of content, what may come of them
    "a pair": ([rb"a\ud83d\ude42b"], {"a🙂b"}),
    "a pair in capitals": ([rb"a\uD83D\uDE42b"], {"a🙂b"}),
    "half of a pair": ([rb"a\ud83db"], {"a\ufffdb"}),
    "half of a pair at the end": ([rb"a\ud83d", rb"b"], {"a\ufffdb"}),
    "the other half": ([rb"a\ude42b"], {"a\ufffdb"}),
    "in the wrong order": ([rb"a\ude42\ud83db"], {"a\ufffd\ufffdb"}),
    "a pair in two events": ([rb"a\ud83d", rb"\ude42b"], {"a🙂b", "a\ufffd\ufffdb"}),
}


@way_of
@pytest.mark.parametrize("name", SURROGATES)
def test_surrogates_as_escapes_never_end_a_stream(name: str, way: str) -> None:
    """JSON.stringify and json.dumps write half a pair as an escape; it is no character, as a broken byte is none."""
    pieces, allowed = SURROGATES[name]
    with serving(Script(writes=[ROLE, *map(text, pieces), END])) as server, nothing_left(server):
        seen = ask(way, server.endpoint(retries=AT_ONCE))
    assert seen.error is None
    assert seen.got.finish_reason == "stop"
    assert seen.got.text in allowed
    seen.got.text.encode()


@way_of
@pytest.mark.parametrize("cut", range(1, 4))
def test_a_stream_that_ends_inside_a_character_is_truncated(cut: int, way: str) -> None:
    broken = text("🙂".encode()[:cut]).split(b'"}')[0]
    play(way, Script(writes=[AB, broken]), Want("ab", finish=None, error=errors.Truncated, reused=True))
    play(way, Script(writes=[broken]), Want(finish=None, error=errors.Truncated, requests=3))


@way_of
@pytest.mark.parametrize(
    "content_type",
    [
        "text/event-stream; charset=iso-8859-1",
        "text/event-stream;charset=utf-16",
        "TEXT/EVENT-STREAM; charset=",
        "application/json; charset=latin-1",
        "text/html; charset=shift_jis",
    ],
)
def test_no_charset_is_believed(content_type: str, way: str) -> None:
    play(way, Script(writes=[text(TEXT.encode()), END], content_type=content_type), Want(TEXT))
    body = whole(content=TEXT).decode("ascii").encode()
    play(way, Script(body=body, content_type=content_type), Want(TEXT))


# --- C06 --------------------------------------------------------------------------------------------------------------


def coded(coding: str, *events: bytes, flush: int = zlib.Z_SYNC_FLUSH) -> list[bytes]:
    """One stream of the coding, flushed after each event; the last item is what ends it."""
    packer = zlib.compressobj(wbits={"deflate": 15}.get(coding.lower(), 31))
    return [*(packer.compress(event) + packer.flush(flush) for event in events), packer.flush()]


def coding(name: str) -> dict[str, Any]:
    return {"headers": {"content-encoding": name}}


@way_of
@pytest.mark.parametrize("name", ["gzip", "x-gzip", "deflate", "GZIP", " gzip"])
def test_a_coding_is_undone(name: str, way: str) -> None:
    one = b"".join(coded(name.strip(), ROLE + AB + END, flush=zlib.Z_NO_FLUSH))
    play(way, Script(writes=[one[:20], one[20:]], headers={"content-encoding": name.strip()}), Want("ab"))
    play(way, Script(writes=coded(name.strip(), ROLE, AB, STOP, DONE), **coding(name.strip())), Want("ab"))
    body = b"".join(coded(name.strip(), whole(content="ab")))
    play(way, Script(body=body, **coding(name.strip())), Want("ab"))


def test_a_coded_stream_may_be_split_anywhere() -> None:
    packed = gzip.compress(AB + END)
    with serving() as server, nothing_left(server):

        async def body() -> None:
            async with spanwire.ConnectionManager() as manager:
                for at in range(1, len(packed)):
                    server.script(Script(writes=[packed[:at], packed[at:]], **coding("gzip")), model=f"m{at}")
                    assert (await manager.complete(server.endpoint(retries=NEVER), chat(f"m{at}"))).text == "ab"

        run(body)


def test_each_event_of_a_coded_stream_comes_with_its_flush() -> None:
    writes = coded("gzip", delta(content="a"), delta(content="b"), delta(content="c"), STOP, DONE)
    with serving(Script(writes=writes, write_gap_s=0.1, **coding("gzip"))) as server, nothing_left(server):
        came: list[float] = []

        async def body() -> None:
            async with spanwire.ConnectionManager() as manager:
                async with manager.stream(server.endpoint(), chat()) as stream:
                    async for _ in stream:
                        came.append(time.perf_counter())
                        await asyncio.sleep(0)

        run(body)
    gaps = [later - before for before, later in itertools.pairwise(came)]
    assert len(gaps) == 3
    assert min(gaps) > 0.02  # held back by a decoder, they would come together


CODED_ENDS: dict[str, tuple[list[bytes], Want]] = {
    "after the first event": (coded("gzip", AB, STOP, DONE)[:1], Want("ab", finish=None, error=CUT)),
    "inside the second event": (
        [*coded("gzip", AB)[:1], coded("gzip", AB, STOP)[1][:5]],
        Want("ab", finish=None, error=CUT),
    ),
    "inside its header": ([gzip.compress(AB)[:6]], Want(finish=None, error=CUT, requests=3)),
    "before its trailer": ([gzip.compress(AB)[:-8]], Want("ab", finish=None, error=CUT)),
    "inside its trailer": ([gzip.compress(AB)[:-3]], Want("ab", finish=None, error=CUT)),
    # what came is the whole answer, by its own end
    "before its trailer, after [DONE]": ([gzip.compress(AB + END)[:-8]], Want("ab")),
}


@way_of
@pytest.mark.parametrize("name", CODED_ENDS)
def test_a_coded_stream_that_is_cut_is_no_success(name: str, way: str) -> None:
    writes, want = CODED_ENDS[name]
    play(way, Script(writes=writes, **coding("gzip")), want)


@way_of
@pytest.mark.parametrize("left", [30, -8])
def test_a_coded_whole_answer_that_is_cut_is_no_success(left: int, way: str) -> None:
    packed = gzip.compress(whole(content="ab" * 200))[:left]
    play(way, Script(body=packed, **coding("gzip")), Want(finish=None, error=CUT, requests=3))


@way_of
def test_a_coding_that_is_broken_or_unknown_is_told(way: str) -> None:
    wrong = Want("ab", finish=None, error=errors.ProtocolError, says="gzip")
    play(way, Script(writes=[*coded("gzip", AB)[:1], b"\xff" * 40], **coding("gzip")), wrong)
    play(way, Script(writes=[AB, END], **coding("br")), Want(finish=None, error=errors.ProtocolError, says="'br'"))
    packed = gzip.compress(b'{"error":"rate limited"}')
    limited = Want(finish=None, error=errors.RateLimited, says="rate limited", requests=3)
    play(way, Script(status=429, body=packed, **coding("gzip")), limited)


def test_no_coding_is_asked_for_unless_the_call_does() -> None:
    with serving(default=lambda _request: Script(writes=[AB, END])) as server, nothing_left(server):
        for way in WAYS:
            ask(way, server.endpoint())
            ask(way, server.endpoint(), chat(headers={"Accept-Encoding": "gzip"}))
        asked = [request.headers["accept-encoding"] for request in server.requests]
    assert asked == ["identity", "gzip"] * 4
