"""Where pieces are put in time: by the clock, or one after the other in their window; never over each other."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from spanwire.telemetry.placement import Placed, place
from spanwire.timeline import AttemptRecord, CallRecord, Source, Timeline
from tests.core.test_timeline import MS, START, attempt, marks, streamed_marks, warm, wild_attempts


def alone(made: AttemptRecord) -> Mapping[tuple[str, str], tuple[int, Source]]:
    record = CallRecord(made.begin_ns, operation="chat", model="m", endpoint="h", transport="t")
    record.end_ns = made.end_ns
    record.outcome = made.outcome
    record.attempts = [made]
    return Timeline(record).pieces


def rows(placed: list[Placed]) -> list[tuple[str, float, float, str]]:
    return [
        (
            f"{row.segment} {row.part}".rstrip(),
            (row.begin_ns - START) / MS,
            (row.end_ns - START) / MS,
            row.placed,
        )
        for row in placed
    ]


def test_a_stream_on_a_warm_connection() -> None:
    made = warm(0, 295, streamed_marks())
    assert rows(place(made, alone(made))) == [
        ("client encode", 0, 1, "clock"),
        ("network send", 1, 2, "clock"),
        ("network to_and_back", 2, 82, "window"),
        ("model prefill", 82, 102, "window"),
        ("model decode", 102, 292, "window"),
        ("client decode", 292, 293, "clock"),
        ("client waiting", 293, 295, "clock"),
    ]


def test_a_slot_and_a_handshake_come_before_the_request() -> None:
    connect = marks(("dns", 12, 13), ("tcp", 13, 33))
    exchange = marks(("encode", 34, 35), ("send", 35, 36), sent=36)
    made = attempt(
        0,
        50,
        queued=1,
        slot=10,
        asked=11,
        leased=33,
        served="dialled",
        connect=connect,
        marks=exchange,
        outcome="timeout",
    )
    assert rows(place(made, alone(made))) == [
        ("queue local", 1, 10, "clock"),
        ("handshake dns", 12, 13, "clock"),
        ("handshake tcp", 13, 33, "clock"),
        ("client encode", 33, 35, "clock"),
        ("network send", 35, 36, "clock"),
    ]


def test_a_handshake_that_failed_has_its_open_part() -> None:
    connect = marks(("tcp", 1, 20))
    connect.begin("tls", START + 20 * MS)
    made = attempt(0, 45, asked=1, served="dialled", connect=connect, connect_begin=1, connect_end=45, outcome="error")
    assert rows(place(made, alone(made)))[1:] == [
        ("handshake tcp", 1, 20, "clock"),
        ("handshake tls", 20, 45, "clock"),
    ]


def test_a_ride_and_a_wait_for_somebody_elses_connection() -> None:
    made = attempt(0, 30, asked=0, leased=25, served="rode", connect=marks(), connect_begin=-5, connect_end=20)
    assert rows(place(made, alone(made))) == [("handshake shared", 0, 20, "clock")]
    made = attempt(0, 30, asked=0, leased=25, served="freed")
    assert rows(place(made, alone(made))) == [("queue local", 0, 25, "clock")]


def test_time_in_which_nothing_is_known_stays_empty() -> None:
    made = warm(0, 295, streamed_marks(rtt_ms=None))  # nothing is known of the wait: 2 to 102
    assert rows(place(made, alone(made)))[1:3] == [
        ("network send", 1, 2, "clock"),
        ("model decode", 102, 292, "window"),
    ]


def test_what_the_server_reports_is_put_in_the_order_of_the_waterfall() -> None:
    made = warm(0, 295, streamed_marks())
    reported: dict[tuple[str, str], tuple[int, Source]] = {
        ("model", "decode"): (190 * MS, "reported"),
        ("model", "prefill"): (8 * MS, "reported"),
        ("queue", "server"): (10 * MS, "reported"),
        ("network", "to_and_back"): (70 * MS, "reported"),
    }
    assert rows(place(made, reported)) == [
        ("network to_and_back", 2, 72, "window"),
        ("queue server", 72, 82, "window"),
        ("model prefill", 82, 90, "window"),
        ("model decode", 102, 292, "window"),
    ]


def test_a_report_that_is_longer_than_its_place_begins_earlier() -> None:
    made = warm(0, 295, streamed_marks())
    assert rows(place(made, {("model", "decode"): (200 * MS, "reported")})) == [("model decode", 92, 292, "window")]
    # The consumer's part is measured, and keeps its place.
    tail: dict[tuple[str, str], tuple[int, Source]] = {
        ("client", "waiting"): (2 * MS, "measured"),
        ("model", ""): (300 * MS, "reported"),
    }
    assert rows(place(made, tail)) == [("model", 2, 292, "window"), ("client waiting", 293, 295, "clock")]


def test_a_pause_of_the_consumers_has_no_place_of_its_own() -> None:
    made = warm(0, 295, streamed_marks(paused_ms=50))
    found = rows(place(made, alone(made)))
    assert ("model decode", 102, 242, "window") in found
    assert ("client waiting", 242, 292, "window") in found
    assert ("client waiting", 293, 295, "clock") in found


def test_an_answer_that_is_not_streamed() -> None:
    exchange = marks(
        ("encode", 0, 1), ("send", 1, 2), sent=2, first_byte=100, first_chunk=102, last_byte=110, ended=111, rtt_ms=40
    )
    made = warm(0, 111, exchange, streamed=False)
    assert rows(place(made, alone(made)))[2:] == [
        ("network to_and_back", 2, 42, "window"),
        ("model", 42, 102, "window"),
        ("network receive", 102, 110, "window"),
        ("client decode", 110, 111, "clock"),
    ]


def test_what_marks_and_timeline_disagree_about_has_no_place_on_the_clock() -> None:
    made = warm(0, 10, marks(("send", 1, 2), sent=2, first_byte=8))
    assert rows(place(made, {("network", "send"): (MS // 2, "measured")})) == [("network send", 2, 2.5, "window")]


@given(wild_attempts(), st.booleans())
def test_whatever_the_marks_nothing_overlaps_or_lies_outside(made: AttemptRecord, backwards: bool) -> None:
    if made.end_ns < made.begin_ns and not backwards:
        made.begin_ns, made.end_ns = made.end_ns, made.begin_ns
    pieces = alone(made)
    placed = place(made, pieces)
    at_ns = made.begin_ns
    sums: dict[tuple[str, str], int] = {}
    for row in placed:
        assert at_ns <= row.begin_ns < row.end_ns <= made.end_ns
        at_ns = row.end_ns
        key = (row.segment, row.part)
        sums[key] = sums.get(key, 0) + row.end_ns - row.begin_ns
        assert row.source == pieces[key][1]
        assert row.placed == "window" or row.source == "measured"
    assert all(length <= pieces[key][0] + 1_000 for key, length in sums.items())
