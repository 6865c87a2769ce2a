"""The segment rules, one by one, and that segments add up whatever the marks say."""

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spanwire.timeline import (
    SEGMENTS,
    AttemptRecord,
    CallRecord,
    ConnectionUse,
    Marks,
    Timeline,
)

MS = 1_000_000
START = 7_000 * MS  # an arbitrary moment of the monotonic clock
WEAKNESS = ["measured", "reported", "estimated"]


def at(ms: float) -> int:
    return START + int(ms * MS)


def marks(*parts: tuple[str, float, float], rtt_ms: float | None = None, paused_ms: float = 0, **times: float) -> Marks:
    """Marks at ms after START: ``sent=2`` sets ``sent_ns``."""
    made = Marks()
    for name, begin, end in parts:
        made.begin(name, at(begin))
        made.end(name, at(end))
    for name, ms in times.items():
        assert hasattr(made, f"{name}_ns")
        setattr(made, f"{name}_ns", at(ms))
    made.rtt_ns = None if rtt_ms is None else int(rtt_ms * MS)
    made.paused_ns = int(paused_ms * MS)
    return made


def attempt(begin: float, end: float, *, streamed: bool = True, **fields: Any) -> AttemptRecord:
    """Times in ms after START; what is no number of ms is set as it is."""
    made = AttemptRecord(at(begin), streamed=streamed)
    made.end_ns = at(end)
    for name, value in fields.items():
        if name in ("queued", "slot", "asked", "dial_asked", "leased", "connect_begin", "connect_end"):
            setattr(made, f"{name}_ns", at(value))
        else:
            assert hasattr(made, name)
            setattr(made, name, value)
    return made


def timeline(*attempts: AttemptRecord, begin: float = 0, end: float | None = None) -> Timeline:
    record = CallRecord(at(begin), operation="chat", model="m", endpoint="h:1", transport="sse")
    record.attempts.extend(attempts)
    record.end_ns = at(end) if end is not None else attempts[-1].end_ns
    if attempts:
        record.outcome = attempts[-1].outcome
        record.error_type = attempts[-1].error_type
    return Timeline(record)


def pieces(made: Timeline) -> dict[str, tuple[float, str]]:
    """``"segment.part"`` to (ms, source)."""
    return {
        ".".join(filter(None, key)): (duration_ns / MS, source) for key, (duration_ns, source) in made.pieces.items()
    }


def ms(made: Timeline) -> dict[str, float]:
    return {name: duration for name, (duration, _) in pieces(made).items()}


def warm(begin: float, end: float, marks: Marks, **fields: Any) -> AttemptRecord:
    """An attempt on an idle connection, at once."""
    return attempt(begin, end, **{"asked": begin, "leased": begin, "served": "idle", "marks": marks, **fields})


def streamed_marks(**changes: Any) -> Marks:
    """encode 0..1, send 1..2, first byte 92, content 92..292, parsed 293."""
    return marks(
        ("encode", 0, 1),
        ("send", 1, 2),
        **{
            "rtt_ms": 80,
            "sent": 2,
            "first_byte": 92,
            "first_chunk": 92,
            "first_content": 102,
            "last_chunk": 292,
            "last_byte": 292,
            "ended": 293,
            **changes,
        },
    )


# --- one completed stream ----------------------------------------------------------------------------------------------


def test_a_stream_on_an_idle_connection() -> None:
    made = timeline(warm(0, 298, streamed_marks()))
    assert pieces(made) == {
        "client.encode": (1, "measured"),
        "network.send": (1, "measured"),
        "network.to_and_back": (80, "estimated"),
        "model.prefill": (20, "estimated"),  # 2 to 102, less 80
        "model.decode": (190, "estimated"),
        "client.decode": (1, "measured"),
        "client.waiting": (5, "measured"),
    }
    assert made.total_s == pytest.approx(0.298)
    assert (made.first_byte_s, made.first_chunk_s, made.first_content_s) == (0.092, 0.092, 0.102)


def test_segments_carry_their_parts_and_the_weakest_source() -> None:
    segments = timeline(warm(0, 298, streamed_marks())).segments
    assert set(segments) == {"client", "network", "model"}
    assert list(segments) == [name for name in SEGMENTS if name in segments]
    assert segments["client"].source == "measured"
    assert segments["client"].duration_s == pytest.approx(0.007)
    assert segments["network"].source == "estimated"  # although send was measured
    assert segments["network"].parts["send"].source == "measured"
    assert segments["model"].parts["prefill"].duration_s == pytest.approx(0.020)


def test_what_the_client_did_before_the_requests_bytes_is_the_clients() -> None:
    """Settings, the span, the books: 10 ms from the connection to the beginning of the encoding."""
    late = marks(("encode", 10, 11), sent=11, first_byte=31, first_chunk=31, first_content=31, rtt_ms=20)
    late.last_chunk_ns = late.last_byte_ns = late.ended_ns = at(31)
    made = timeline(warm(0, 31, late))
    assert pieces(made) == {
        "client.encode": (11, "measured"),
        "network.to_and_back": (20, "estimated"),
    }


def test_an_unknown_round_trip_leaves_network_and_prefill_out() -> None:
    made = timeline(warm(0, 298, streamed_marks(rtt_ms=None)))
    assert ms(made) == {
        "client.encode": 1,
        "network.send": 1,
        "model.decode": 190,
        "client.decode": 1,
        "client.waiting": 5,
        "unattributed": 100,  # 2 to 102
    }


def test_a_round_trip_longer_than_the_wait_is_no_explanation() -> None:
    made = timeline(warm(0, 298, streamed_marks(rtt_ms=100.5)))
    assert "network.to_and_back" not in ms(made)
    assert "model.prefill" not in ms(made)
    assert ms(made)["unattributed"] == 100


def test_a_round_trip_as_long_as_the_wait_explains_all_of_it() -> None:
    made = timeline(warm(0, 298, streamed_marks(rtt_ms=90)))
    assert ms(made)["network.to_and_back"] == 90
    assert ms(made)["model.prefill"] == 10  # from the first byte to the first content


def test_over_a_unix_socket_the_model_has_the_whole_wait() -> None:
    made = timeline(warm(0, 298, streamed_marks(rtt_ms=0)))
    assert "network.to_and_back" not in ms(made)
    assert pieces(made)["model.prefill"] == (100, "estimated")


def test_a_consumer_that_paused_the_stream_is_client_not_model() -> None:
    made = timeline(warm(0, 298, streamed_marks(paused_ms=60)))
    assert ms(made)["model.decode"] == 130
    assert ms(made)["client.waiting"] == 65
    assert "unattributed" not in ms(made)


def test_a_pause_longer_than_the_decoding_drops_the_estimate() -> None:
    made = timeline(warm(0, 298, streamed_marks(paused_ms=190)))
    assert "model.decode" not in ms(made)
    assert ms(made)["client.waiting"] == 195


def test_heartbeats_and_role_chunks_are_prefill_not_content() -> None:
    made = timeline(warm(0, 298, streamed_marks(first_byte=83, first_chunk=90, first_content=200)))
    assert ms(made)["model.prefill"] == 118
    assert ms(made)["model.decode"] == 92
    assert (made.first_byte_s, made.first_chunk_s, made.first_content_s) == (0.083, 0.090, 0.200)


def test_an_answer_without_content_is_prefill_to_its_last_event() -> None:
    empty = streamed_marks()
    empty.first_content_ns = 0
    made = timeline(warm(0, 298, empty))
    assert ms(made)["model.prefill"] == 210
    assert "model.decode" not in ms(made)
    assert made.first_content_s is None
    assert "first_content_s" not in made.to_dict()


# --- unary -------------------------------------------------------------------------------------------------------------


def test_a_unary_answer_knows_only_the_undivided_wait() -> None:
    unary = marks(
        ("encode", 0, 1), ("send", 1, 2), sent=2, first_byte=102, last_byte=112, ended=114, rtt_ms=40,
    )  # fmt: skip
    made = timeline(warm(0, 117, unary, streamed=False))
    assert pieces(made) == {
        "client.encode": (1, "measured"),
        "network.send": (1, "measured"),
        "network.to_and_back": (40, "estimated"),
        "model": (60, "estimated"),
        "network.receive": (10, "estimated"),
        "client.decode": (2, "measured"),
        "client.waiting": (3, "measured"),
    }
    assert made.segments["model"].parts == {}


def test_the_wait_for_a_unary_answer_ends_with_its_body() -> None:
    """Servers send the head at once and compute then."""
    unary = marks(sent=2, first_byte=52, first_chunk=102, last_byte=112, ended=112, rtt_ms=40)
    assert pieces(timeline(warm(2, 112, unary, streamed=False), begin=2)) == {
        "network.to_and_back": (40, "estimated"),
        "model": (60, "estimated"),
        "network.receive": (10, "estimated"),
    }


@pytest.mark.parametrize("rtt_ms", [None, 100.5])
def test_a_unary_wait_without_a_fitting_round_trip_is_unattributed(rtt_ms: float | None) -> None:
    unary = marks(sent=2, first_byte=102, last_byte=102, ended=102, rtt_ms=rtt_ms)
    assert pieces(timeline(warm(2, 102, unary, streamed=False), begin=2)) == {"unattributed": (100, "measured")}


# --- the connection ----------------------------------------------------------------------------------------------------

CONNECT = (("dns", 10, 13), ("tcp", 13, 33), ("tls", 33, 63))


def test_a_new_connection_shows_the_parts_of_its_handshake() -> None:
    made = timeline(
        attempt(
            5, 70, asked=10, leased=63, served="dialled", connect=marks(*CONNECT), connect_begin=10, connect_end=63
        ),
        begin=5,
    )
    assert pieces(made) == {
        "client.encode": (5, "measured"),
        "handshake.dns": (3, "measured"),
        "handshake.tcp": (20, "measured"),
        "handshake.tls": (30, "measured"),
        "unattributed": (7, "measured"),
    }


def test_a_handshake_is_clipped_to_the_wait_for_it() -> None:
    made = timeline(attempt(0, 50, asked=20, leased=50, served="dialled", connect=marks(*CONNECT)))
    assert ms(made) == {"client.encode": 20, "handshake.tcp": 13, "handshake.tls": 17}


def test_a_handshake_that_failed_shows_where() -> None:
    broken = marks(("dns", 10, 13), ("tcp", 13, 33))
    broken.begin("tls", at(33))
    made = timeline(attempt(10, 40, asked=10, connect=broken, outcome="error", error_type="ConnectionFailed"), begin=10)
    assert pieces(made) == {
        "handshake.dns": (3, "measured"),
        "handshake.tcp": (20, "measured"),
        "handshake.tls": (7, "measured"),
    }
    assert broken.open_part == "tls"


def test_the_part_that_failed_ends_with_the_connect_and_not_with_the_attempt() -> None:
    broken = marks(("dns", 10, 13))
    broken.begin("tcp", at(13))
    made = timeline(
        attempt(10, 40, asked=10, connect=broken, connect_begin=10, connect_end=33, outcome="error"), begin=10
    )
    assert ms(made) == {"handshake.dns": 3, "handshake.tcp": 20, "unattributed": 7}


def test_the_part_that_failed_is_clipped_to_the_wait_too() -> None:
    broken = marks()
    broken.begin("tcp", at(5))
    made = timeline(
        attempt(10, 40, asked=10, connect=broken, connect_begin=5, connect_end=33, outcome="error"), begin=10
    )
    assert ms(made) == {"handshake.tcp": 23, "unattributed": 7}


def test_a_wait_for_a_finishing_connection_that_ended_in_a_handshake_is_both() -> None:
    made = timeline(
        attempt(
            0, 70, asked=5, dial_asked=10, leased=64, served="dialled", connect=marks(*CONNECT), connect_begin=10, connect_end=63
        )
    )  # fmt: skip
    assert pieces(made) == {
        "client.encode": (5, "measured"),
        "queue.local": (5, "measured"),
        "handshake.dns": (3, "measured"),
        "handshake.tcp": (20, "measured"),
        "handshake.tls": (30, "measured"),
        "unattributed": (7, "measured"),
    }
    rode = attempt(0, 70, asked=5, dial_asked=20, leased=64, served="rode", connect_begin=10, connect_end=63)
    assert ms(timeline(rode)) == {"client.encode": 5, "queue.local": 15, "handshake.shared": 43, "unattributed": 7}
    freed = attempt(0, 70, asked=5, dial_asked=20, leased=64, served="freed")
    assert ms(timeline(freed)) == {"client.encode": 5, "queue.local": 59, "unattributed": 6}


def test_a_client_of_the_users_own_marks_its_handshake_on_the_exchange() -> None:
    own = marks(("dns", 0, 2), ("tcp", 2, 12), ("shared", 12, 15), ("encode", 15, 16), ("send", 16, 18))
    assert pieces(timeline(warm(0, 20, own, outcome="timeout"))) == {
        "handshake.dns": (2, "measured"),
        "handshake.tcp": (10, "measured"),
        "handshake.shared": (3, "measured"),
        "client.encode": (1, "measured"),
        "network.send": (2, "measured"),
        "unattributed": (2, "measured"),
    }


def test_waiting_for_somebody_elses_handshake_is_shared() -> None:
    made = timeline(
        attempt(0, 80, asked=30, leased=64, served="rode", connect=marks(*CONNECT), connect_begin=10, connect_end=63)
    )
    assert pieces(made) == {
        "client.encode": (30, "measured"),
        "handshake.shared": (33, "measured"),
        "unattributed": (17, "measured"),
    }


#: The server was full: it let the upgrade wait.
ADMITTED = (*CONNECT, ("upgrade", 63, 65), ("admission", 65, 95))


def test_a_handshake_that_the_server_let_wait_is_its_queue() -> None:
    made = timeline(
        attempt(
            0, 95, asked=10, leased=95, served="dialled", connect=marks(*ADMITTED), connect_begin=10, connect_end=95
        )
    )
    assert pieces(made) == {
        "client.encode": (10, "measured"),
        "handshake.dns": (3, "measured"),
        "handshake.tcp": (20, "measured"),
        "handshake.tls": (30, "measured"),
        "handshake.upgrade": (2, "measured"),
        "queue.server": (30, "estimated"),
    }


@pytest.mark.parametrize(("asked", "shared", "queue"), [(30, 35, 30), (80, None, 15)])
def test_who_rode_on_such_a_handshake_shares_the_queue_too(asked: float, shared: float | None, queue: float) -> None:
    made = timeline(
        attempt(
            0, 95, asked=asked, leased=95, served="rode", connect=marks(*ADMITTED), connect_begin=10, connect_end=95
        )
    )
    expected = {"client.encode": (asked, "measured"), "queue.server": (queue, "estimated")}
    if shared is not None:
        expected["handshake.shared"] = (shared, "measured")
    assert pieces(made) == expected


def test_local_and_server_queue_stand_side_by_side() -> None:
    made = timeline(
        attempt(
            0, 95, queued=0, slot=4, asked=4, dial_asked=10, leased=95, served="dialled", connect=marks(*ADMITTED),
            connect_begin=10, connect_end=95,
        )
    )  # fmt: skip
    assert pieces(made)["queue.local"] == (10, "measured")
    assert pieces(made)["queue.server"] == (30, "estimated")
    assert made.segments["queue"].source == "estimated"
    assert "unattributed" not in pieces(made)


def test_a_shared_handshake_that_has_not_ended_counts_to_the_end_of_the_attempt() -> None:
    made = timeline(attempt(0, 40, asked=30, served="rode", connect=marks(), connect_begin=10))
    assert ms(made) == {"client.encode": 30, "handshake.shared": 10}


def test_waiting_for_a_connection_that_somebody_held_is_queue() -> None:
    made = timeline(attempt(0, 40, asked=10, leased=35, served="freed"))
    assert pieces(made) == {
        "client.encode": (10, "measured"),
        "queue.local": (25, "measured"),
        "unattributed": (5, "measured"),
    }


def test_waiting_for_a_slot_and_for_a_connection_are_one_part() -> None:
    made = timeline(attempt(0, 40, queued=1, slot=8, asked=10, leased=35, served="freed"))
    assert ms(made) == {"queue.local": 7 + 25, "unattributed": 8}


def test_a_reused_connection_has_no_handshake() -> None:
    """Although its marks may lie around."""
    made = timeline(warm(0, 298, streamed_marks(), connect=None))
    assert "handshake" not in made.segments


def test_a_call_that_ended_in_the_queue_was_only_there() -> None:
    made = timeline(attempt(0, 25, queued=1, outcome="cancelled"))
    assert pieces(made) == {"queue.local": (24, "measured"), "unattributed": (1, "measured")}


def test_a_call_that_got_its_slot_and_never_asked_for_a_connection_waited_only_for_the_slot() -> None:
    """A key function that failed, say, or took its time."""
    made = timeline(attempt(0, 25, queued=1, slot=5, outcome="error"))
    assert ms(made) == {"queue.local": 4, "unattributed": 21}


def test_a_call_that_never_waited_for_a_slot_was_in_no_queue() -> None:
    assert ms(timeline(attempt(0, 25, outcome="error"))) == {"unattributed": 25}


def test_a_refusal_before_the_first_attempt_has_an_honest_timeline_too() -> None:
    record = CallRecord(at(0), operation="chat", model="m", endpoint="h:1", transport="sse")
    record.end_ns, record.outcome = at(3), "error"
    made = Timeline(record)
    assert ms(made) == {"unattributed": 3}
    assert made.connection is None
    assert made.error_type is None
    assert made.first_byte_s is None
    assert made.to_dict()["attempts"] == []


# --- calls that did not complete ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", ["closed_by_caller", "cancelled", "abandoned", "timeout", "error"])
def test_the_tail_of_a_call_that_did_not_complete_is_unattributed(outcome: str) -> None:
    early = streamed_marks()
    early.ended_ns = 0
    made = timeline(warm(0, 500, early, outcome=outcome))
    assert ms(made) == {
        "client.encode": 1,
        "network.send": 1,
        "network.to_and_back": 80,
        "model.prefill": 20,
        "model.decode": 190,
        "unattributed": 208,
    }
    assert made.outcome == outcome


def test_a_pause_is_the_clients_also_where_the_call_did_not_complete() -> None:
    early = streamed_marks(paused_ms=60)
    early.ended_ns = 0
    made = timeline(warm(0, 500, early, outcome="closed_by_caller"))
    assert pieces(made)["client.waiting"] == (60, "measured")
    assert ms(made)["model.decode"] == 130


def test_an_upload_that_was_given_up_is_network() -> None:
    stuck = marks(("encode", 0, 1))
    stuck.begin("send", at(1))
    made = timeline(warm(0, 500, stuck, outcome="timeout"))
    assert pieces(made) == {"client.encode": (1, "measured"), "network.send": (499, "measured")}


def test_a_timeout_before_the_first_byte_blames_nobody() -> None:
    waiting = marks(("encode", 0, 1), ("send", 1, 2), sent=2, rtt_ms=80)
    made = timeline(warm(0, 600, waiting, outcome="timeout"))
    assert ms(made) == {"client.encode": 1, "network.send": 1, "unattributed": 598}


def test_an_error_status_is_no_model_time() -> None:
    refused = marks(sent=2, first_byte=92, last_byte=95, ended=95, rtt_ms=80)
    for streamed in (True, False):
        made = timeline(warm(0, 95, refused, streamed=streamed, outcome="error", error_type="RateLimited"))
        assert ms(made) == {"network.to_and_back": 80, "unattributed": 15}


def test_an_error_after_the_first_chunk_keeps_what_the_model_did() -> None:
    broken = streamed_marks()
    broken.ended_ns = 0
    made = timeline(warm(0, 292, broken, outcome="error", error_type="ConnectionFailed"))
    assert ms(made)["model.decode"] == 190


# --- retries -----------------------------------------------------------------------------------------------------------


def retried() -> Timeline:
    first = attempt(0, 30, queued=0, slot=2, asked=2, connect=marks(("tcp", 2, 22)), outcome="error")
    first.error_type = "ConnectionFailed"
    refused = marks(sent=531, first_byte=541, rtt_ms=5)
    second = warm(530, 545, refused, outcome="error", error_type="Overloaded")
    third_marks = marks(
        sent=1601, first_byte=1612, first_chunk=1612, first_content=1612, last_chunk=1702, last_byte=1702, ended=1703
    )
    third_marks.rtt_ns = 5 * MS
    third = warm(1600, 1703, third_marks, connection=ConnectionUse("c2", reused=True))
    return timeline(first, second, third)


def test_the_wait_between_attempts_is_queue_backoff() -> None:
    made = retried()
    assert pieces(made) == {
        "queue.local": (2, "measured"),
        "queue.backoff": (500 + 1055, "measured"),
        "handshake.tcp": (20, "measured"),
        "network.to_and_back": (10, "estimated"),
        "model.prefill": (6, "estimated"),
        "model.decode": (90, "estimated"),
        "client.decode": (1, "measured"),
        "unattributed": (8 + 10 + 1, "measured"),
    }


def test_a_call_that_ended_while_it_waited_for_another_attempt() -> None:
    failed = attempt(0, 30, outcome="error", error_type="ConnectionFailed")
    made = timeline(failed, end=130)
    assert ms(made) == {"queue.backoff": 100, "unattributed": 30}


def test_what_follows_the_last_attempt_of_a_completed_call_is_no_backoff() -> None:
    made = timeline(warm(0, 298, streamed_marks()), end=299)
    assert "queue" not in made.segments
    assert ms(made)["unattributed"] == 1


def test_first_times_count_from_the_start_of_the_call() -> None:
    assert retried().first_content_s == pytest.approx(1.612)
    assert retried().error_type is None
    assert timeline(attempt(0, 5, outcome="error", error_type="Truncated")).error_type == "Truncated"
    assert retried().connection == ConnectionUse("c2", reused=True)


def test_every_attempt_has_its_own_timeline() -> None:
    attempts = retried().to_dict()["attempts"]
    assert [entry["outcome"] for entry in attempts] == ["error", "error", "completed"]
    assert [entry.get("error_type") for entry in attempts] == ["ConnectionFailed", "Overloaded", None]
    assert [entry["begin_s"] for entry in attempts] == pytest.approx([0, 0.53, 1.6])
    assert [entry["total_s"] for entry in attempts] == pytest.approx([0.03, 0.015, 0.103])
    for entry in attempts:
        total = sum(segment["duration_s"] for segment in entry["segments"].values())
        assert total == pytest.approx(entry["total_s"], abs=1e-6)
    assert "backoff" not in str(attempts)
    assert attempts[2]["connection"]["id"] == "c2"


# --- marks that cannot be ----------------------------------------------------------------------------------------------


def test_too_much_is_cut_by_the_largest_estimate_first() -> None:
    """100 ms, of which 60 were measured sending: prefill (50) goes, to_and_back (30) may stay."""
    overlapping = marks(("send", 0, 60), sent=10, first_byte=90, first_content=90, rtt_ms=30)
    made = timeline(warm(0, 100, overlapping))
    assert ms(made) == {"network.send": 60, "network.to_and_back": 30, "unattributed": 10}


def test_measured_parts_go_last() -> None:
    overlapping = marks(("encode", 0, 40), ("send", 0, 90), sent=10, first_byte=90, first_content=90, rtt_ms=30)
    made = timeline(warm(0, 100, overlapping))
    assert ms(made) == {"client.encode": 40, "unattributed": 60}


def test_intervals_of_marks() -> None:
    made = Marks()
    seen = [made.open_part]
    made.end("dns", 5)  # was never opened
    assert made.parts == []
    made.begin("dns", 10)
    made.begin("dns", 20)  # anew
    made.begin("tcp", 30)
    seen.append(made.open_part)
    made.end("tcp", 25)  # a clock that went back gives an empty interval, not a negative one
    seen.append(made.open_part)
    made.end("dns", 40)
    seen.append(made.open_part)
    assert seen == [None, "tcp", "dns", None]
    assert made.parts == [("tcp", 30, 30), ("dns", 20, 40)]
    assert (made.duration_ns("dns"), made.duration_ns("tcp"), made.duration_ns("tls")) == (20, 0, None)


# --- the public form ---------------------------------------------------------------------------------------------------


def test_to_dict_is_the_form_of_the_design() -> None:
    use = ConnectionUse("c7", reused=True, age_s=1.2, idle_s=0.3, protocol="http/1.1", rtt_min_s=0.08)
    data = timeline(warm(0, 298, streamed_marks(), connection=use)).to_dict()
    assert data["schema"] == 1
    assert data["outcome"] == "completed"
    assert data["total_s"] == pytest.approx(0.298)
    assert data["segments"]["model"] == {
        "duration_s": pytest.approx(0.210),
        "source": "estimated",
        "parts": {
            "prefill": {"duration_s": pytest.approx(0.020), "source": "estimated"},
            "decode": {"duration_s": pytest.approx(0.190), "source": "estimated"},
        },
    }
    assert data["connection"] == {
        "id": "c7", "reused": True, "age_s": 1.2, "idle_s": 0.3, "protocol": "http/1.1", "rtt_min_s": 0.08,
    }  # fmt: skip
    assert data["attempts"] == [{"outcome": "completed"}]
    assert (data["endpoint"], data["transport"], data["model"]) == ("h:1", "sse", "m")


def test_unknown_entries_are_absent_never_none_or_zero() -> None:
    data = timeline(attempt(0, 25, connection=ConnectionUse("c1", reused=False))).to_dict()
    assert "first_byte_s" not in data
    assert data["connection"] == {"id": "c1", "reused": False}
    assert "None" not in repr(data)


def test_repr_and_pickle() -> None:
    made = retried()
    assert repr(made).startswith("Timeline(completed, total=1703.0ms, queue=")
    assert pickle.loads(pickle.dumps(made)).to_dict() == made.to_dict()


# --- properties --------------------------------------------------------------------------------------------------------

times = st.integers(0, 3_000) | st.integers(0, 10**11)
part_names = st.sampled_from(["dns", "tcp", "tls", "proxy", "upgrade", "admission", "connect", "encode", "send", "own"])


@st.composite
def wild_marks(draw: st.DrawFn) -> Marks:
    made = Marks()
    made.parts = draw(st.lists(st.tuples(part_names, times, times), max_size=5))
    for name in (
        "sent",
        "started",
        "first_byte",
        "first_chunk",
        "first_content",
        "last_chunk",
        "last_byte",
        "ended",
        "paused",
    ):
        setattr(made, f"{name}_ns", draw(times))
    for part in draw(st.lists(part_names, max_size=2)):
        made.begin(part, draw(times))
    made.rtt_ns = draw(st.none() | st.integers(-10, 10**10))
    return made


@st.composite
def wild_attempts(draw: st.DrawFn) -> AttemptRecord:
    made = AttemptRecord(draw(times), streamed=draw(st.booleans()))
    for name in ("end", "queued", "slot", "asked", "dial_asked", "leased", "connect_begin", "connect_end"):
        setattr(made, f"{name}_ns", draw(times))
    made.served = draw(st.sampled_from(["", "idle", "dialled", "rode", "freed"]))
    made.connect = draw(st.none() | wild_marks())
    made.marks = draw(wild_marks())
    made.outcome = draw(st.sampled_from(["completed", "closed_by_caller", "timeout", "error"]))
    return made


@given(st.lists(wild_attempts(), max_size=3), times, times)
def test_whatever_the_marks_parts_are_positive_and_add_up(
    attempts: list[AttemptRecord], begin_ns: int, total_ns: int
) -> None:
    record = CallRecord(begin_ns, operation="chat", model="m", endpoint="h", transport="t")
    record.end_ns = begin_ns + total_ns
    record.attempts = attempts
    made = Timeline(record)
    assert sum(duration_ns for duration_ns, _ in made.pieces.values()) == total_ns
    assert all(duration_ns > 0 for duration_ns, _ in made.pieces.values())
    assert sum(segment.duration_s for segment in made.segments.values()) == pytest.approx(made.total_s, abs=1e-6)
    for name, segment in made.segments.items():
        rows = {part: row for (of, part), row in made.pieces.items() if of == name}
        assert segment.source == max((source for _, source in rows.values()), key=WEAKNESS.index)
        assert segment.duration_s == pytest.approx(sum(ns for ns, _ in rows.values()) / 1e9)
        assert set(segment.parts) == set(rows) - {""}
    assert str(made)
    assert repr(made)
    for entry, one in zip(made.to_dict()["attempts"], attempts, strict=True):
        if len(attempts) > 1 and one.end_ns >= one.begin_ns:
            assert sum(s["duration_s"] for s in entry["segments"].values()) == pytest.approx(entry["total_s"], abs=1e-6)


gaps = st.integers(0, 5 * 10**9)


@given(
    slot=gaps,
    wait=gaps,
    encode=gaps,
    send=gaps,
    rtt=st.none() | st.integers(0, 10**9),
    rest=st.integers(0, 10**9),
    to_content=gaps,
    decode=gaps,
    paused_share=st.integers(0, 100),
    tail=gaps,
    parsed=gaps,
    kept=gaps,
    served=st.sampled_from(["idle", "dialled", "rode", "freed"]),
)
def test_plausible_streams_divide_as_the_rules_say(
    slot: int,
    wait: int,
    encode: int,
    send: int,
    rtt: int | None,
    rest: int,
    to_content: int,
    decode: int,
    paused_share: int,
    tail: int,
    parsed: int,
    kept: int,
    served: Any,
) -> None:
    """A call put together from the lengths of its windows has to come apart into these."""
    clock = START
    made = AttemptRecord(clock, streamed=True)
    if slot:
        made.queued_ns, made.slot_ns = clock, clock + slot
    made.asked_ns = clock = clock + slot
    if served == "idle":
        wait = 0
    if served in ("dialled", "rode"):
        made.connect = Marks()
        made.connect.parts = [("connect", clock, clock + wait)]
        made.connect_begin_ns = clock - 5 if served == "rode" else clock
        made.connect_end_ns = clock + wait
    made.served = served
    made.leased_ns = clock = clock + wait
    made.marks.parts = [("encode", clock, clock + encode), ("send", clock + encode, clock + encode + send)]
    made.marks.sent_ns = clock = clock + encode + send
    made.marks.rtt_ns = rtt
    made.marks.first_byte_ns = made.marks.first_chunk_ns = clock = clock + (rtt or 0) + rest
    made.marks.first_content_ns = clock = clock + to_content
    made.marks.last_chunk_ns = clock = clock + decode
    made.marks.paused_ns = paused = decode * paused_share // 100
    made.marks.last_byte_ns = clock = clock + tail
    made.marks.ended_ns = clock = clock + parsed
    made.end_ns = clock = clock + kept
    record = CallRecord(START, operation="chat", model="m", endpoint="h", transport="t")
    record.end_ns = clock
    record.attempts = [made]
    expected = {
        ("queue", "local"): slot + (wait if served == "freed" else 0),
        ("handshake", "connect"): wait if served == "dialled" else 0,
        ("handshake", "shared"): wait if served == "rode" else 0,
        ("client", "encode"): encode,
        ("network", "send"): send,
        ("network", "to_and_back"): rtt or 0,
        ("model", "prefill"): rest + to_content if rtt is not None else 0,
        ("model", "decode"): decode - paused,
        ("client", "decode"): parsed,
        ("client", "waiting"): kept + paused,
        ("unattributed", ""): tail + (rest + to_content if rtt is None else 0),
    }
    found = {key: duration_ns for key, (duration_ns, _) in Timeline(record).pieces.items()}
    assert found == {key: duration_ns for key, duration_ns in expected.items() if duration_ns}
