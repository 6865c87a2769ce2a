"""The grammar of Server-Timing, with the parsing cases of the Web Platform Tests; a bad `dur` is None here, not 0."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from spanwire.timing.server_timing import Metric, parse_server_timing

Short = tuple[str, float | None] | tuple[str, float | None, str | None]


def metrics(*short: Short) -> list[Metric]:
    return [Metric(name, duration, *(rest or (None,))) for name, duration, *rest in short]


CASES: list[tuple[str, list[Metric]]] = [
    # durations
    ("m", metrics(("m", None))),
    ("m;dur=123.4", metrics(("m", 123.4))),
    ('m;dur="123.4"', metrics(("m", 123.4))),
    ("m;DuR=123.4", metrics(("m", 123.4))),
    ("m ; dur = 123.4", metrics(("m", 123.4))),
    ("m\t;\tdur\t=\t123.4\t", metrics(("m", 123.4))),
    ("gfet4t7; dur=477", metrics(("gfet4t7", 477))),
    ("m;dur=0", metrics(("m", 0))),
    ("m;dur=1e3", metrics(("m", 1000.0))),
    # no durations, which browsers read as 0
    ("m;dur=foo", metrics(("m", None))),
    ('m;dur="foo"', metrics(("m", None))),
    ("m;dur=-5", metrics(("m", None))),
    ("m;dur=nan", metrics(("m", None))),
    ("m;dur=inf", metrics(("m", None))),
    ("m;dur=1e999", metrics(("m", None))),
    ("m;dur=12ms", metrics(("m", None))),
    ("m;dur=", metrics(("m", None))),
    ("m;dur", metrics(("m", None))),
    # of a repeated parameter the first counts, even when it is invalid
    ("m;dur=foo;dur=567.8", metrics(("m", None))),
    ("m;dur;dur=123.4", metrics(("m", None))),
    ("m;dur=;dur=123.4;desc=d", metrics(("m", None, "d"))),
    ("m;dur=123.4;dur=567.8", metrics(("m", 123.4))),
    ("m;desc;desc=d;dur=123.4", metrics(("m", 123.4, ""))),
    ("m;desc=;desc=d;dur=123.4", metrics(("m", 123.4, ""))),
    ("m;desc=d1;desc=d2", metrics(("m", None, "d1"))),
    # quotes
    ('m;desc="a, b; c";dur=5, n;dur=6', metrics(("m", 5, "a, b; c"), ("n", 6))),
    ('m;desc="a\\"b";dur=5', metrics(("m", 5, 'a"b'))),
    ('m;desc="\\\\"', metrics(("m", None, "\\"))),
    ('m;desc="\t d \t"', metrics(("m", None, "\t d \t"))),
    ('m;desc=""', metrics(("m", None, ""))),
    ('m;desc="open', metrics(("m", None, ""))),
    ('m;desc="open;dur=5, n;dur=6', metrics(("m", None, ""))),
    ('m;desc="', metrics(("m", None, ""))),
    ('m;desc="\\', metrics(("m", None, ""))),
    ('m;desc="\\"', metrics(("m", None, ""))),
    ('m;desc="""', metrics(("m", None, ""))),
    ("m;desc=\\", metrics(("m", None, ""))),
    ('m;desc=\\"', metrics(("m", None, ""))),
    ('cfL4;desc="?proto=TCP&rtt=5570&min_rtt=5317"', metrics(("cfL4", None, "?proto=TCP&rtt=5570&min_rtt=5317"))),
    # junk
    ("m;desc=d1 d2;dur=5", metrics(("m", 5, "d1"))),
    ("m1;desc=d1 d2,m2", metrics(("m1", None, "d1"), ("m2", None))),
    ('m;desc="d1" d2;dur=5', metrics(("m", 5, "d1"))),
    ('m1;desc="d1" d2,m2', metrics(("m1", None, "d1"), ("m2", None))),
    ("m1;foo=bar;dur=5;foo=bar,m2", metrics(("m1", 5), ("m2", None))),
    ('m==   ""foo;dur=123.4', metrics(("m", None))),
    ('m1==   ""foo,m2', metrics(("m1", None))),
    ("m;dur foo=12", metrics(("m", None))),
    ("m;foo dur=12", metrics(("m", None))),
    ("m ; ", metrics(("m", None))),
    ("m , ", metrics(("m", None))),
    *((text, []) for text in ("", " ", "=", ";", ",", "[", "]", "=;", ";=", "=,", ",=", ";,", ",;", "=;,")),
    # lists
    ("m;dur=1, m;dur=2", metrics(("m", 1), ("m", 2))),
    ("M;dur=1, m;dur=2", metrics(("M", 1), ("m", 2))),
    ("m1,m2 ,m3, m4 , m5", metrics(*((f"m{number}", None) for number in range(1, 6)))),
    (",m;dur=1,, n;dur=2,", metrics(("m", 1), ("n", 2))),  # RFC 9110 section 5.6.1.2
    ("aB3!#$%&'*+-.^_`|~;dur=1", metrics(("aB3!#$%&'*+-.^_`|~", 1))),
    # what servers were seen to send
    ("intid;desc=0f", metrics(("intid", None, "0f"))),
    ('cache;desc="hit-front", host;desc="cp1"', metrics(("cache", None, "hit-front"), ("host", None, "cp1"))),
    ("miss, db;dur=53, app;dur=47.2", metrics(("miss", None), ("db", 53), ("app", 47.2))),
    ("x-originResponse;dur=833", metrics(("x-originResponse", 833))),
    ("cfReqDur;dur=392.897", metrics(("cfReqDur", 392.897))),
]


@pytest.mark.parametrize(("value", "expected"), CASES, ids=[repr(value) for value, _ in CASES])
def test_the_grammar(value: str, expected: list[Metric]) -> None:
    assert parse_server_timing(value) == expected


@given(st.text() | st.text(alphabet=' \t,;="\\abdurdesc0123.-e'))
@example('m;desc="' + "\\" * 2001)
def test_never_raises_and_no_duration_is_negative_or_infinite(value: str) -> None:
    for metric in parse_server_timing(value):
        assert metric.name
        assert metric.duration_ms is None or 0 <= metric.duration_ms < float("inf")


names = st.text("!#$%&'*+-.^_`|~09azAZ", min_size=1, max_size=12)
durations = st.none() | st.floats(0, 1e6).map(lambda value: round(value, 3))
given_metrics = st.lists(st.builds(Metric, names, durations, st.none() | st.text(max_size=20)), max_size=6)


@given(given_metrics)
def test_quoted_text_comes_back_as_it_was(expected: list[Metric]) -> None:
    parts = []
    for metric in expected:
        part = metric.name
        if metric.description is not None:
            escaped = metric.description.replace("\\", "\\\\").replace('"', '\\"')
            part += f';desc="{escaped}"'
        if metric.duration_ms is not None:
            part += f";dur={metric.duration_ms!r}"
        parts.append(part)
    assert parse_server_timing(", ".join(parts)) == expected
