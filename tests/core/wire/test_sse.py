"""The event-stream parser: to the letter of WHATWG HTML 9.2.6, whatever the split of the bytes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from spanwire.errors import MessageTooBig
from spanwire.wire.sse import EventStreamParser

Events = list[tuple[bytes, bytes]]


def reference(stream: bytes) -> list[tuple[str, str]]:
    """The standard's algorithm, on decoded text, in its own words and its own order. Slow and simple on purpose."""
    text = stream.decode("utf-8", "replace")
    text = text.removeprefix("\ufeff")  # "UTF-8 decode" strips one byte order mark
    lines: list[str] = []
    line = ""
    position = 0
    while position < len(text):
        character = text[position]
        if character == "\r" and text[position + 1 : position + 2] == "\n":
            position += 1
        if character in "\r\n":
            lines.append(line)
            line = ""
        else:
            line += character
        position += 1
    # what stands in `line` now has no end: "any pending data must be discarded"
    events: list[tuple[str, str]] = []
    data_buffer = event_type = ""
    for line in lines:
        if not line:
            if not data_buffer:
                event_type = ""
                continue
            events.append((event_type, data_buffer.removesuffix("\n")))
            data_buffer = event_type = ""
        elif line.startswith(":"):
            continue
        else:
            if ":" in line:
                field, _, value = line.partition(":")
                value = value.removeprefix(" ")
            else:
                field, value = line, ""
            if field == "event":
                event_type = value
            elif field == "data":
                data_buffer += value + "\n"
    return events


def parse(*reads: bytes, limit: int = 1 << 20) -> Events:
    events: Events = []
    parser = EventStreamParser(lambda name, data: events.append((name, data)), max_event_bytes=limit)
    for read in reads:
        parser.feed(read)
    return events


def decoded(events: Events) -> list[tuple[str, str]]:
    return [(name.decode("utf-8", "replace"), data.decode("utf-8", "replace")) for name, data in events]


def cut(stream: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    return [stream[begin:end] for begin, end in pairwise(edges)]


WORDS = [
    b"data", b"data:", b"data: ", b"data:  ", b"event", b"event:", b"event: e", b"id: 7", b"id", b"retry: 5", b":", b": ping", b" ", b":data",
    b"\n", b"\n", b"\n\n", b"\r", b"\r\n", b"\r\n\r\n", b"\n\r", b"data: x\n\n", b"data: x\r\n\r\n", b"data:y\r\r",
    b"x", b"a: b", b"{}", b"[DONE]", b"\xef\xbb\xbf", b"\xef\xbb", b"\xef", b"\xbf", b"\xe2\x80\xa8", b"\xc2\x85", b"\x0b", b"\x0c", b"\x00",
    b"\x1c", b"\xff", b"\xf0\x9f\x99\x82", b"\xf0\x9f", "é".encode(), b"foo: 1", b"dat", b"Data: x", b"data : x", b"\tdata: x",
]  # fmt: skip
streams = st.lists(st.sampled_from(WORDS), max_size=30).map(b"".join) | st.binary(max_size=60)
cuts = st.lists(st.integers(0, 400), max_size=12)


@given(streams, cuts)
@example(b"\xef\xbb\xbfdata: a\r\n\r\ndata: b\n\n", [1, 2, 9, 10, 11, 12])
@example(b"data: x\r", [])
@example(b"data: x\r\n\r\ndata: y\n\n", [8])
def test_any_split_gives_the_events_of_the_standard(stream: bytes, cuts: list[int]) -> None:
    expected = reference(stream)
    assert decoded(parse(stream)) == expected
    assert decoded(parse(*cut(stream, cuts))) == expected
    assert decoded(parse(*(bytes([byte]) for byte in stream))) == expected
    assert decoded(parse(b"", *(piece for byte in stream for piece in (bytes([byte]), b"")))) == expected


@given(streams, cuts)
def test_any_split_leaves_the_same_tail_and_the_same_ignored_lines(stream: bytes, cuts: list[int]) -> None:
    whole, pieces = (EventStreamParser(lambda name, data: None) for _ in range(2))
    whole.feed(stream)
    for piece in cut(stream, cuts):
        pieces.feed(piece)
    assert pieces.tail == whole.tail
    assert pieces.ignored == whole.ignored
    assert pieces.unfinished_line == whole.unfinished_line


@given(st.lists(st.binary(max_size=20).filter(lambda data: not set(data) & set(b"\r\n")), max_size=8), cuts)
def test_what_servers_send_comes_back(payloads: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(b"data: " + payload + b"\n\n" for payload in payloads)
    expected = [(b"", payload) for payload in payloads]
    assert parse(stream) == expected
    assert parse(*(b"data: " + payload + b"\n\n" for payload in payloads)) == expected
    assert parse(*cut(stream, cuts)) == expected


def outcome(reads: list[bytes], limit: int) -> tuple[Events, bool]:
    events: Events = []
    parser = EventStreamParser(lambda name, data: events.append((name, data)), max_event_bytes=limit)
    try:
        for read in reads:
            parser.feed(read)
    except MessageTooBig:
        return events, True
    return events, False


@given(st.lists(st.sampled_from([*WORDS, b"12345678"]), max_size=20).map(b"".join), cuts, st.integers(1, 24))
def test_whether_an_event_is_too_big_does_not_depend_on_the_split(stream: bytes, cuts: list[int], limit: int) -> None:
    expected = outcome([stream], limit)
    assert outcome(cut(stream, cuts), limit) == expected
    assert outcome([bytes([byte]) for byte in stream], limit) == expected


def test_the_limit_counts_the_event_and_not_the_stream() -> None:
    event = b"data: 12345678\n\n"
    assert len(parse(event * 100, limit=32)) == 100
    assert len(parse(*[event] * 100, limit=32)) == 100
    assert len(parse(*(bytes([byte]) for byte in event * 100), limit=32)) == 100


@pytest.mark.parametrize(
    "reads",
    [
        [b"data: " + b"x" * 100 + b"\n\n"],
        [b"data: " + b"x" * 100],
        [b"data: ", b"x" * 60, b"x" * 60],
        [b"data: xxxxxxxxxx\n"] * 20,
        [b"data\n" * 200],
        [b"never a line's end", b"x" * 100],
        [b": a comment without an end", b"x" * 100],
        [b"\xef\xbb\xbf" + b"x" * 100],
    ],
)
def test_an_event_over_the_limit_is_refused_before_it_fills_the_memory(reads: list[bytes]) -> None:
    with pytest.raises(MessageTooBig, match=r"50 bytes \(Limits\.max_event_bytes\)"):
        parse(*reads, limit=50)


def test_heartbeats_for_ever_are_not_too_big() -> None:
    assert parse(*[b": ping\n\n", b": ping\r\n", b"id: 7\n", b"event: e\n"] * 100, limit=50) == []
    assert parse(*(bytes([byte]) for byte in b": ping\n\nid: 7\n" * 100), limit=50) == []


# --- the standard's rules, one by one ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        # its own examples
        (b"data: YHOO\ndata: +2\ndata: 10\n\n", [(b"", b"YHOO\n+2\n10")]),
        (
            b": test stream\n\ndata: first event\nid: 1\n\ndata:second event\nid\n\ndata:  third event",
            [(b"", b"first event"), (b"", b"second event")],
        ),
        (b"data\n\ndata\ndata\n\ndata:", [(b"", b""), (b"", b"\n")]),
        (b"data:test\n\ndata: test\n\n", [(b"", b"test"), (b"", b"test")]),
        # lines
        (b"data: a\r\rdata: b\n\ndata: c\r\n\r\n", [(b"", b"a"), (b"", b"b"), (b"", b"c")]),
        (b"data: a\n\r", [(b"", b"a")]),
        (b"data: a\r\n\n", [(b"", b"a")]),
        (b"data: p\x0bq\xe2\x80\xa8\xc2\x85\x0c\x1cr\n\n", [(b"", b"p\x0bq\xe2\x80\xa8\xc2\x85\x0c\x1cr")]),
        # fields
        (b"data: x\ndata\ndata: y \n\n", [(b"", b"x\n\ny ")]),
        (b"data:  two spaces\n\n", [(b"", b" two spaces")]),
        (b"data:\ttab\n\n", [(b"", b"\ttab")]),
        (b"data: a: b\n\n", [(b"", b"a: b")]),
        (b"foo: 1\ndata: z\nbar\n\n", [(b"", b"z")]),
        (b"DATA: x\nData: x\ndata : x\n data: x\n\n", []),
        (b"event: add\ndata: x\n\ndata: y\n\n", [(b"add", b"x"), (b"", b"y")]),
        (b"event: add\nevent\ndata: x\n\n", [(b"", b"x")]),
        (b"event:add\nevent: remove\ndata: x\n\n", [(b"remove", b"x")]),
        (b"event: add\n\ndata: x\n\n", [(b"", b"x")]),
        (b"id: 7\n\n: ping\n\nid: 8\n\nretry: 5\n\n", []),
        (b"\n\n\r\r\r\n", []),
        (b"data: {}", []),
        (b"data: {}\n", []),
        # the byte order mark
        (b"\xef\xbb\xbfdata: a\n\n", [(b"", b"a")]),
        (b"\xef\xbb\xbf\xef\xbb\xbfdata: a\n\ndata: b\n\n", [(b"", b"b")]),
        (b"data: a\n\n\xef\xbb\xbfdata: b\n\ndata: c\n\n", [(b"", b"a"), (b"", b"c")]),
        (b"data: \xef\xbb\xbfa\n\n", [(b"", b"\xef\xbb\xbfa")]),
        (b"\xef\xbb\xbf\n\n", []),
        (b"\xef\xbbdata: a\n\ndata: b\n\n", [(b"", b"b")]),
        # characters are not looked at
        (b"data: a\xffb\xf0\x9f\n\n", [(b"", b"a\xffb\xf0\x9f")]),
    ],
)
def test_rules(stream: bytes, expected: Events) -> None:
    assert decoded(expected) == reference(stream), "the reference disagrees with the example"
    assert parse(stream) == expected
    assert parse(*(bytes([byte]) for byte in stream)) == expected
    for at in range(len(stream)):
        assert parse(stream[:at], stream[at:]) == expected


@pytest.mark.parametrize("at", range(4))
def test_a_split_byte_order_mark(at: int) -> None:
    stream = b"\xef\xbb\xbfdata: a\n\n"
    assert parse(stream[:at], stream[at:]) == [(b"", b"a")]


def test_a_cr_at_the_end_of_a_read_ends_the_line_at_once() -> None:
    """Or the last event of a stream that ends with CR would wait for a byte that never comes."""
    assert parse(b"data: a\r\r") == [(b"", b"a")]
    assert parse(b"data: a\r\r", b"\ndata: b\n\n") == [(b"", b"a"), (b"", b"b")]
    assert parse(b"data: a\r", b"\ndata: b\r", b"\r") == [(b"", b"a\nb")]


def test_events_come_out_with_the_read_that_ends_them() -> None:
    events: Events = []
    parser = EventStreamParser(lambda name, data: events.append((name, data)))
    parser.feed(b"data: a\n")
    assert events == []
    parser.feed(b"\nda")
    assert events == [(b"", b"a")]
    parser.feed(b"ta: b\n\ndata: c\n\n")
    assert events == [(b"", b"a"), (b"", b"b"), (b"", b"c")]


# --- for the layer above -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stream", "tail"),
    [
        (b"", b""),
        (b"data: a\n\n", b""),
        (b"data: a\n", b"a"),
        (b"data: a", b"a"),
        (b"data: a\ndata:b", b"a\nb"),
        (b"data: a\n\ndata: b\r\n", b"b"),
        (b"data: a\n\n: ping", b""),
        (b"data: a\n\nevent: x", b""),
    ],
)
def test_tail_is_the_data_that_no_blank_line_ended(stream: bytes, tail: bytes) -> None:
    parser = EventStreamParser(lambda name, data: None)
    parser.feed(stream)
    assert parser.tail == tail


@pytest.mark.parametrize(
    ("stream", "line"),
    [
        (b"", b""),
        (b"data: a\n", b""),
        (b"data: a\r\n\r", b""),
        (b'data: a\n{"error":', b'{"error":'),
        (b"<html>", b"<html>"),
    ],
)
def test_the_line_that_has_no_end(stream: bytes, line: bytes) -> None:
    parser = EventStreamParser(lambda name, data: None)
    for byte in stream:
        parser.feed(bytes([byte]))
    assert parser.unfinished_line == line


def test_lines_that_mean_nothing_are_kept_for_the_explanation_and_comments_are_not() -> None:
    parser = EventStreamParser(lambda name, data: None)
    parser.feed(b': ping\nerror: {"code":400}\n\nid: 7\nretry: 1\nevent: e\n<html>\ndata: [DONE]\n\n')
    assert parser.ignored == [b'error: {"code":400}', b"<html>"]


def test_only_a_little_of_what_means_nothing_is_kept() -> None:
    parser = EventStreamParser(lambda name, data: None)
    for _ in range(10_000):
        parser.feed(b"junk " * 200 + b"\n")
    assert 0 < sum(map(len, parser.ignored)) <= 2 * 4096
