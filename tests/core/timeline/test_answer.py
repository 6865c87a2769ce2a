"""How the wait for an answer divides when the server says what it took: the textbook case, told in every way."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spanwire.timeline import AttemptRecord, CallRecord, ConnectionUse, Reported, Timeline
from tests.core.test_timeline import MS, attempt, marks, pieces, timeline, warm, wild_attempts

#: 40 there, 10 in the server's queue, 100 of prefill, 150 of decoding, 40 back.
STREAM: dict[str, float] = {
    "sent": 0,
    "first_byte": 90,
    "first_chunk": 90,
    "first_content": 190,
    "last_chunk": 340,
    "last_byte": 340,
    "ended": 340,
}
WHOLE = dict.fromkeys(STREAM, 340.0) | {"sent": 0.0, "first_content": 0.0}


def reported(**said: Any) -> Reported:
    """``queue=10`` sets ``queue_ns`` to 10 ms; what is no number is set as it is."""
    fields: dict[str, Any] = {"server": "s"}
    for name, value in said.items():
        if isinstance(value, (bool, str, dict)):
            fields[name] = value
        else:
            fields[f"{name}_ns"] = int(value * MS)
    return Reported(**fields)


def streamed(
    rtt_ms: float | None = 80, paused_ms: float = 0, times: dict[str, float] = STREAM, **said: Any
) -> Timeline:
    made = warm(0, times["ended"], marks(rtt_ms=rtt_ms, paused_ms=paused_ms, **times), reported=reported(**said))
    return timeline(made)


def whole(rtt_ms: float | None = 80, times: dict[str, float] = WHOLE, **said: Any) -> Timeline:
    exchange = marks(rtt_ms=rtt_ms, **{name: at for name, at in times.items() if name != "first_content"})
    return timeline(warm(0, times["ended"], exchange, streamed=False, reported=reported(**said)))


def refused(made: Timeline) -> list[str]:
    assert made.server_timing is not None
    return list(made.server_timing.get("refused", []))


TEXTBOOK = {
    "queue.server": (10, "reported"),
    "model.prefill": (100, "reported"),
    "model.decode": (150, "reported"),
    "network.to_and_back": (80, "reported"),
}

# --- streams ------------------------------------------------------------------------------------------------------------


def test_queue_prefill_and_decode_leave_the_network() -> None:
    made = streamed(queue=10, prefill=100, decode=150)
    assert pieces(made) == TEXTBOOK
    assert made.segments["network"].source == "reported"
    assert made.segments["model"].duration_s == pytest.approx(0.250)


def test_the_network_follows_from_the_server_where_the_round_trip_is_unknown() -> None:
    assert pieces(streamed(rtt_ms=None, queue=10, prefill=100, decode=150)) == TEXTBOOK


def test_what_the_parts_leave_of_a_total_is_unattributed_and_not_queue() -> None:
    found = pieces(streamed(queue=10, prefill=100, decode=140, total=260))
    assert found == {**TEXTBOOK, "model.decode": (140, "reported"), "unattributed": (10, "measured")}


def test_a_model_time_without_a_queue_does_not_make_the_rest_network() -> None:
    """llama.cpp: the wait for one of its slots is in no field."""
    assert pieces(streamed(prefill=100, decode=150)) == {
        "model.prefill": (100, "reported"),
        "model.decode": (150, "reported"),
        "network.to_and_back": (80, "estimated"),
        "unattributed": (10, "measured"),
    }
    assert "network.to_and_back" not in pieces(streamed(rtt_ms=None, prefill=100, decode=150))


def test_what_the_parts_leave_is_not_network_where_the_round_trip_shows_that_it_cannot_be() -> None:
    """A server that reads images for 75 ms before its clock starts. Up to half of a round trip may be jitter."""
    assert pieces(streamed(rtt_ms=5, queue=10, prefill=100, decode=150)) == {
        **TEXTBOOK,
        "network.to_and_back": (5, "estimated"),
        "unattributed": (75, "measured"),
    }
    assert pieces(streamed(rtt_ms=54, queue=10, prefill=100, decode=150)) == TEXTBOOK
    assert pieces(streamed(rtt_ms=5, queue=10, prefill=100))["network.to_and_back"] == (5, "estimated")
    with_total = pieces(streamed(rtt_ms=5, queue=10, prefill=100, decode=150, total=260))
    assert with_total == TEXTBOOK  # it has said when the request came


def test_a_round_trip_that_ends_at_an_edge_proves_nothing_of_the_way_behind_it() -> None:
    made = warm(0, 340, marks(rtt_ms=5, **STREAM), reported=reported(queue=10, prefill=100, decode=150))
    made.connection = ConnectionUse("c1", reused=True, rtt_min_s=0.005, rtt_scope="edge")
    assert pieces(timeline(made)) == TEXTBOOK


def test_time_to_first_token_with_queue_and_total_gives_all_parts() -> None:
    assert pieces(streamed(queue=10, ttft=110, total=260)) == TEXTBOOK


def test_time_to_first_token_alone_is_prefill_and_says_that_the_queue_is_in_it() -> None:
    made = streamed(ttft=110)
    assert pieces(made) == {
        "model.prefill": (110, "reported"),
        "model.decode": (150, "estimated"),
        "network.to_and_back": (80, "reported"),
    }
    assert made.server_timing is not None
    assert made.server_timing["prefill_includes_queue"] is True
    assert made.segments["model"].source == "estimated"


def test_prefill_that_was_reported_as_such_says_nothing_of_a_queue() -> None:
    timing = streamed(queue=10, prefill=100, decode=150, ttft=110).server_timing
    assert timing is not None
    assert "prefill_includes_queue" not in timing


def test_queue_and_prefill_leave_the_network_up_to_the_first_token() -> None:
    assert pieces(streamed(rtt_ms=None, queue=10, prefill=100)) == {
        **TEXTBOOK,
        "model.decode": (150, "estimated"),
    }


def test_a_total_alone_leaves_the_model_estimated() -> None:
    assert pieces(streamed(rtt_ms=None, total=260)) == {
        "network.to_and_back": (80, "reported"),
        "model.prefill": (110, "estimated"),
        "model.decode": (150, "estimated"),
    }


def test_network_that_fell_into_the_decoding_is_cut_from_the_estimate() -> None:
    """The window leaves 240 for the network, more than there was before the first content."""
    assert pieces(streamed(rtt_ms=None, total=100)) == {
        "network.to_and_back": (240, "reported"),
        "model.decode": (100, "estimated"),
    }


def test_the_undivided_model_time_stands_alone() -> None:
    assert pieces(streamed(queue=10, model=250)) == {
        "queue.server": (10, "reported"),
        "model": (250, "reported"),
        "network.to_and_back": (80, "reported"),
    }


def test_parts_say_more_than_their_sum() -> None:
    assert pieces(streamed(queue=10, prefill=100, decode=150, model=250)) == TEXTBOOK


def test_queue_alone_is_taken_out_of_the_estimate() -> None:
    assert pieces(streamed(queue=10)) == {
        "queue.server": (10, "reported"),
        "network.to_and_back": (80, "estimated"),
        "model.prefill": (100, "estimated"),
        "model.decode": (150, "estimated"),
    }


def test_headers_of_a_stream_bound_the_network_and_are_no_model_time() -> None:
    """Written at 50 by the server's clock, of which it knows 10."""
    assert pieces(streamed(rtt_ms=None, outer=10)) == {
        "network.to_and_back": (80, "reported"),
        "model.prefill": (110, "estimated"),
        "model.decode": (150, "estimated"),
    }


def test_a_gateway_gives_the_network_where_the_server_leaves_it_open() -> None:
    found = pieces(streamed(rtt_ms=20, prefill=100, decode=150, outer=10))
    assert {"network.to_and_back": (80, "reported")}.items() <= found.items()
    assert pieces(streamed(queue=10, prefill=100, decode=150, outer=80)) == TEXTBOOK


def test_a_pause_of_the_consumer_is_in_no_window_of_the_server() -> None:
    late = {**STREAM, "last_chunk": 390.0, "last_byte": 390.0, "ended": 390.0}
    found = pieces(streamed(paused_ms=50, times=late, queue=10, prefill=100, decode=150))
    assert found == {**TEXTBOOK, "client.waiting": (50, "measured")}


# --- what does not fit --------------------------------------------------------------------------------------------------


def test_parts_that_exceed_their_window_are_refused_and_the_estimate_stands() -> None:
    made = streamed(queue=10, prefill=200, decode=150)
    assert refused(made) == ["parts"]
    assert pieces(made) == {
        "network.to_and_back": (80, "estimated"),
        "model.prefill": (110, "estimated"),
        "model.decode": (150, "estimated"),
    }


def test_a_total_that_exceeds_its_window_is_refused_and_the_parts_stand() -> None:
    made = streamed(queue=10, prefill=100, decode=150, total=400)
    assert refused(made) == ["server_total"]
    assert pieces(made) == TEXTBOOK


def test_parts_beat_a_total_that_is_less_than_their_sum() -> None:
    made = streamed(queue=10, prefill=100, decode=150, total=200)
    assert refused(made) == ["server_total"]
    assert pieces(made) == TEXTBOOK


def test_a_time_to_first_token_below_the_queue_is_refused() -> None:
    made = streamed(queue=10, ttft=5)
    assert refused(made) == ["ttft"]
    assert pieces(made)["model.prefill"] == (100, "estimated")


def test_a_prefill_that_is_longer_than_the_wait_for_the_first_content_is_refused() -> None:
    made = streamed(queue=10, prefill=190)
    assert refused(made) == ["parts"]
    assert "queue.server" not in pieces(made)


def test_a_gateway_that_exceeds_its_window_is_refused() -> None:
    made = streamed(outer=100)
    assert refused(made) == ["gateway"]
    assert pieces(made)["network.to_and_back"] == (80, "estimated")


def test_values_cut_to_whole_milliseconds_may_exceed_their_window_by_as_much() -> None:
    made = streamed(queue=10, prefill=180, decode=151, slack=3)
    assert refused(made) == []
    assert pieces(made) == {
        "queue.server": (10, "reported"),
        "model.prefill": (179, "reported"),
        "model.decode": (151, "reported"),
    }
    assert refused(streamed(queue=10, prefill=180, decode=154, slack=3)) == ["parts"]


def test_whole_seconds_do_not_exceed_their_window_by_a_second() -> None:
    """They were cut off, so they are too small. Parts may exceed a total that was cut off."""
    too_long: list[dict[str, Any]] = [{"total": 1000}, {"queue": 1000}, {"model": 1000}, {"queue": 1000, "model": 1000}]
    for said in too_long:
        made = streamed(slack=2000, **said)
        assert refused(made) == ["server_total" if "total" in said else "parts"]
        assert all(source != "reported" for _, source in pieces(made).values())
    late = {**STREAM, "first_content": 1190.0, "last_chunk": 1340.0, "last_byte": 1340.0, "ended": 1340.0}
    assert refused(streamed(times=late, prefill=1100, decode=150, total=1000, slack=1000)) == []


def test_a_pause_after_the_last_chunk_is_taken_off_no_window() -> None:
    """The consumer was slow to read the last chunks, and then only the end came."""
    late = {**STREAM, "resumed": 840.0, "last_byte": 850.0, "ended": 850.0}
    assert pieces(streamed(paused_ms=500, times=late))["model.decode"] == (150, "estimated")
    told = streamed(paused_ms=500, times=late, queue=10, prefill=100, decode=150)
    assert refused(told) == []
    assert pieces(told) == {**TEXTBOOK, "client.waiting": (500, "measured"), "unattributed": (10, "measured")}


def test_raw_values_are_kept_also_of_what_was_refused() -> None:
    timing = streamed(queue=1000, raw={"queue_time_ms": 1000}, server="vllm").server_timing
    assert timing == {"dialect": "vllm", "raw": {"queue_time_ms": 1000}, "refused": ["parts"]}


# --- answers that are not streamed ----------------------------------------------------------------------------------------


def test_a_whole_answer_divides_as_its_body_says() -> None:
    assert pieces(whole(queue=10, prefill=100, decode=150)) == TEXTBOOK
    assert pieces(whole(rtt_ms=None, total=260)) == {
        "network.to_and_back": (80, "reported"),
        "model": (260, "estimated"),
    }


def test_a_time_to_first_token_and_a_total_in_the_headers_of_a_whole_answer_divide_the_model() -> None:
    """As Fireworks tells them: such headers are written when all is done."""
    made = whole(ttft=110, total=260, total_to_headers=True)
    assert pieces(made) == {
        "model.prefill": (110, "reported"),
        "model.decode": (150, "reported"),
        "network.to_and_back": (80, "reported"),
    }
    assert made.server_timing is not None
    assert made.server_timing["prefill_includes_queue"] is True


def test_a_total_in_the_headers_of_a_whole_answer_ends_with_the_headers() -> None:
    late = {**WHOLE, "last_byte": 400.0, "ended": 400.0, "last_chunk": 400.0}
    assert pieces(whole(times=late, total=260, total_to_headers=True, queue=10, model=240)) == {
        "queue.server": (10, "reported"),
        "model": (240, "reported"),
        "network.to_and_back": (80, "reported"),
        "network.receive": (60, "estimated"),
        "unattributed": (10, "measured"),
    }


def test_the_time_of_the_body_is_network_where_the_server_told_its_whole_time() -> None:
    late = {**WHOLE, "last_byte": 400.0, "ended": 400.0, "last_chunk": 400.0}
    assert pieces(whole(times=late, queue=10, model=250)) == {
        "queue.server": (10, "reported"),
        "model": (250, "reported"),
        "network.to_and_back": (140, "reported"),
    }


def test_a_model_time_alone_of_a_whole_answer() -> None:
    assert pieces(whole(model=250)) == {
        "model": (250, "reported"),
        "network.to_and_back": (80, "estimated"),
        "unattributed": (10, "measured"),
    }


def test_an_error_has_network_and_no_model() -> None:
    made = attempt(
        0, 100, asked=0, leased=0, served="idle", outcome="error", marks=marks(sent=0, first_byte=90, rtt_ms=80)
    )
    made.reported = reported(total=20, total_to_headers=True, prefill=5)
    assert pieces(timeline(made)) == {"network.to_and_back": (70, "reported"), "unattributed": (30, "measured")}


def test_every_attempt_has_the_readings_of_its_own_answer() -> None:
    first = warm(
        0, 100, marks(sent=0, first_byte=90, rtt_ms=80), outcome="error", reported=reported(total=10, raw={"a": 1})
    )
    second = warm(100, 440, marks(rtt_ms=80, **{name: at + 100 for name, at in STREAM.items()}), reported=reported(
        queue=10, prefill=100, decode=150, raw={"b": 2}
    ))  # fmt: skip
    made = timeline(first, second).to_dict()
    assert made["server_timing"] == {"dialect": "s", "raw": {"b": 2}}
    assert [entry["server_timing"]["raw"] for entry in made["attempts"]] == [{"a": 1}, {"b": 2}]
    assert made["segments"]["queue"]["parts"]["server"] == {"duration_s": 0.010, "source": "reported"}


# --- whatever a server says -------------------------------------------------------------------------------------------------

durations = st.none() | st.integers(0, 20 * 10**9)


@st.composite
def wild_reports(draw: st.DrawFn) -> Reported | None:
    if draw(st.booleans()):
        return None
    names = ("queue_ns", "prefill_ns", "decode_ns", "model_ns", "ttft_ns", "total_ns", "outer_ns")
    fields: dict[str, Any] = {name: draw(durations) for name in names}
    return Reported(
        server="s",
        total_to_headers=draw(st.booleans()),
        outer_to_headers=draw(st.booleans()),
        slack_ns=draw(st.integers(0, 8 * MS)),
        **fields,
    )


@given(st.lists(st.tuples(wild_attempts(), wild_reports()), max_size=3), st.integers(0, 60 * 10**9))
def test_whatever_is_reported_segments_add_up(rows: list[tuple[AttemptRecord, Reported | None]], total_ns: int) -> None:
    record = CallRecord(5, operation="chat", model="m", endpoint="h", transport="t")
    record.end_ns = 5 + total_ns
    for made, said in rows:
        made.reported = said
        record.attempts.append(made)
    found = Timeline(record).pieces
    assert sum(duration_ns for duration_ns, _ in found.values()) == total_ns
    assert all(duration_ns > 0 for duration_ns, _ in found.values())
    if all(said is None for _, said in rows):
        assert "reported" not in {source for _, source in found.values()}
    said_queue = sum(said.queue_ns or 0 for _, said in rows if said is not None)
    assert found.get(("queue", "server"), (0, ""))[0] <= said_queue
    for key, (_, source) in found.items():
        if source == "reported":
            assert key[0] in ("queue", "model", "network")
    assert str(Timeline(record))
    assert Timeline(record).to_dict()


#: Windows of a stream in ns: there and back, queue, prefill, decode.
windows = st.integers(0, 3 * 10**9)


@given(rtt=windows, queue=windows, prefill=windows, decode=windows, more=windows, told=st.sampled_from(
    ["parts", "total and parts", "total and ttft", "model", "nothing"]
))  # fmt: skip
def test_what_a_truthful_server_says_comes_back(
    rtt: int, queue: int, prefill: int, decode: int, more: int, told: str
) -> None:
    """A call put together from its windows comes apart into these; ``more`` is time that the server does not explain."""
    said: dict[str, dict[str, Any]] = {
        "parts": {"queue_ns": queue, "prefill_ns": prefill, "decode_ns": decode},
        "total and parts": {
            "queue_ns": queue,
            "prefill_ns": prefill,
            "decode_ns": decode,
            "total_ns": queue + prefill + decode + more,
        },
        "total and ttft": {"queue_ns": queue, "ttft_ns": queue + prefill, "total_ns": queue + prefill + decode},
        "model": {"queue_ns": queue, "model_ns": prefill + decode},
        "nothing": {},
    }
    if told != "total and parts":
        more = 0
    made = AttemptRecord(1, streamed=True)
    made.asked_ns = made.leased_ns = 1
    made.served = "idle"
    exchange = made.marks
    exchange.rtt_ns = rtt
    exchange.sent_ns = 1
    exchange.first_byte_ns = 1 + rtt + queue
    exchange.first_content_ns = exchange.first_byte_ns + prefill + more
    exchange.last_chunk_ns = exchange.last_byte_ns = exchange.ended_ns = exchange.first_content_ns + decode
    made.end_ns = exchange.ended_ns
    made.reported = Reported(server="s", **said[told]) if told != "nothing" else None
    record = CallRecord(1, operation="chat", model="m", endpoint="h", transport="t")
    record.end_ns = made.end_ns
    record.attempts.append(made)
    expected: dict[tuple[str, str], tuple[int, str]] = {("network", "to_and_back"): (rtt, "reported")}
    if told == "nothing":
        expected = {
            ("network", "to_and_back"): (rtt, "estimated"),
            ("model", "prefill"): (queue + prefill, "estimated"),
            ("model", "decode"): (decode, "estimated"),
        }
    else:
        expected["queue", "server"] = (queue, "reported")
        if told == "model":
            expected["model", ""] = (prefill + decode, "reported")
        else:
            expected["model", "prefill"] = (prefill, "reported")
            expected["model", "decode"] = (decode, "reported")
        expected["unattributed", ""] = (more, "measured")
    assert dict(Timeline(record).pieces) == {key: row for key, row in expected.items() if row[0]}


# --- the server's word that it has begun ---------------------------------------------------------------------------------


def begun(started_ms: float | None, rtt_ms: float | None = 80, **said: Any) -> Timeline:
    times = {"first_byte": 85, "first_chunk": 85} | ({} if started_ms is None else {"started": started_ms})
    exchange = marks(rtt_ms=rtt_ms, **(STREAM | times))
    return timeline(warm(0, 340, exchange, reported=reported(**said) if said else None))


def test_the_time_until_the_server_has_begun_less_the_round_trip_is_its_queue() -> None:
    assert pieces(begun(120)) == {
        "queue.server": (40, "estimated"),
        "network.to_and_back": (80, "estimated"),
        "model.prefill": (70, "estimated"),
        "model.decode": (150, "estimated"),
    }


@pytest.mark.parametrize(("started_ms", "queue_ms"), [(80.9, None), (81, 1), (79, None), (189.9, 109.9)])
def test_a_wait_that_is_shorter_than_a_millisecond_is_no_queue(started_ms: float, queue_ms: float | None) -> None:
    found = pieces(begun(started_ms))
    if queue_ms is None:
        assert "queue.server" not in found
    else:
        assert found["queue.server"][0] == pytest.approx(queue_ms)
        assert found["queue.server"][1] == "estimated"
    assert found["model.prefill"][0] == pytest.approx(110 - (queue_ms or 0))


@pytest.mark.parametrize("started_ms", [None, 0, 190, 250])
def test_a_word_that_was_not_said_or_that_came_with_the_content_divides_nothing(started_ms: float | None) -> None:
    found = pieces(begun(started_ms))
    assert "queue.server" not in found
    assert found["model.prefill"] == (110, "estimated")


@pytest.mark.parametrize("rtt_ms", [None, 400])
def test_without_a_round_trip_that_fits_it_is_not_known_how_much_of_it_was_queue(rtt_ms: float | None) -> None:
    assert pieces(begun(120, rtt_ms)) == pieces(begun(None, rtt_ms))


def test_what_the_server_reports_of_its_queue_is_better_than_its_word() -> None:
    assert pieces(begun(120, queue=10))["queue.server"] == (10, "reported")
    assert "queue.server" not in pieces(begun(120, prefill=100))
