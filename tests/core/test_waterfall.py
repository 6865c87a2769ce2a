"""The drawing of a timeline: its width, that nothing is hidden, and one example as a whole."""

from hypothesis import given
from hypothesis import strategies as st

from spanwire.timeline import CallRecord, ConnectionUse, Reported, Timeline
from spanwire.waterfall import draw
from tests.core.test_timeline import attempt, marks, retried, streamed_marks, timeline, warm, wild_attempts


def example() -> Timeline:
    return timeline(
        attempt(
            -30,
            298,
            queued=-30,
            slot=-26,
            asked=-26,
            leased=-1,
            served="dialled",
            connect=marks(("dns", -26, -24), ("tcp", -24, -4)),
            connect_begin=-26,
            connect_end=-4,
            marks=streamed_marks(),
            connection=ConnectionUse("c7", reused=False, protocol="http/1.1"),
        ),
        begin=-30,
    )


GOLDEN = """\
chat m  h:1 over sse
completed in 328.0 ms  connection c7 new, http/1.1
first byte 122.0 ms, chunk 122.0 ms, content 132.0 ms
                            ms  0                                    source
queue local               4.00  ▌                                    measured
handshake dns             2.00  ▋                                    measured
handshake tcp            20.00  ██▉                                  measured
client encode             2.00    █▏                                 measured
network send              1.00     ▏                                 measured
network to_and_back      80.00     █████████                         estimated
model prefill            20.00             ███▏                      estimated
model decode             190.0                █████████████████████  estimated
client decode             1.00                                     ▏ measured
client waiting            5.00                                     ▋ measured
unattributed              3.00                                     █ measured
total                    328.0
""".splitlines()


def test_one_drawing_as_a_whole() -> None:
    assert str(example()) == draw(example())
    assert draw(example()).splitlines() == GOLDEN


def test_a_reused_connection_says_so() -> None:
    use = ConnectionUse("c7", reused=True, idle_s=1.5, protocol="http/1.1")
    text = draw(timeline(warm(0, 298, streamed_marks(), connection=use)))
    assert "connection c7 re-used after 1.5 s idle, http/1.1" in text


def test_what_the_server_said_is_shown_with_its_units_and_what_did_not_fit() -> None:
    said = Reported(server="vllm", queue_ns=10_000_000, raw={"queue_time_ms": 10.25985})
    text = draw(timeline(warm(0, 298, streamed_marks(), reported=said)))
    assert "vllm says queue_time_ms 10.26" in text
    assert "queue server" in text
    wrong = Reported(server="vllm", queue_ns=10_000_000_000, raw={"queue_time_ms": 10_000})
    text = draw(timeline(warm(0, 298, streamed_marks(), reported=wrong)))
    assert "vllm says what does not fit (parts): queue_time_ms 10000" in text
    first_token = Reported(server="b", ttft_ns=15_000_000, raw={"firstByteLatency": 15})
    text = draw(timeline(warm(0, 298, streamed_marks(), reported=first_token)))
    assert "b says prefill with queue: firstByteLatency 15" in text


def test_a_round_trip_that_ends_at_an_edge_says_so() -> None:
    use = ConnectionUse("c7", reused=True, protocol="h2", rtt_min_s=0.02, rtt_scope="edge")
    assert "h2, round trip to the edge" in draw(timeline(warm(0, 298, streamed_marks(), connection=use)))


def test_attempts_and_the_error_are_named() -> None:
    text = draw(retried())
    assert "3 attempts: ConnectionFailed, Overloaded, completed" in text
    assert "queue backoff" in text
    failed = draw(timeline(attempt(0, 5, outcome="error", error_type="ConnectionFailed")))
    assert "error (ConnectionFailed) in 5.0 ms" in failed
    assert "no connection" in failed


def test_a_call_that_took_no_time_can_be_drawn() -> None:
    record = CallRecord(5, operation="chat", model="m", endpoint="h", transport="t")
    record.end_ns = 5
    assert "total" in draw(Timeline(record))


def check(made: Timeline) -> None:
    lines = draw(made).splitlines()
    assert all(len(line) <= 80 for line in lines), max(lines, key=len)
    header = next(index for index, line in enumerate(lines) if line.endswith(" source"))
    rows = lines[header + 1 : -1]
    assert lines[-1].startswith("total")
    assert len(rows) == len(made.pieces)
    for row in rows:
        label, source = row.split("  ")[0], row.split()[-1]
        segment, _, part = label.partition(" ")
        assert source == made.pieces[segment, part.split(" ")[0]][1]
        assert any(cell in row[32:68] for cell in "█▏▎▍▌▋▊▉"), "every part has a bar, however short"
        assert row[68:] == f" {source}", "the bars end in one column"


@given(
    st.lists(wild_attempts(), max_size=3),
    st.integers(1, 10**12),
    st.text(st.characters(codec="ascii", exclude_categories=["C"]), max_size=90),
)
def test_at_most_80_columns_a_bar_and_a_source_for_each_part(attempts: list, total_ns: int, model: str) -> None:  # type: ignore[type-arg]
    record = CallRecord(1_000, operation="chat", model=model, endpoint="h" * 70, transport="sse")
    record.end_ns = 1_000 + total_ns
    record.attempts = attempts
    check(Timeline(record))


def test_a_part_of_a_plugins_own_with_a_long_name_stays_within_80_columns() -> None:
    connect = marks(("quic-handshake-with-0rtt-resumption", 0, 20))
    text = draw(timeline(attempt(0, 25, asked=0, leased=25, served="dialled", connect=connect)))
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "handshake quic" in text


def test_a_part_too_short_to_see_is_seen() -> None:
    for begin in (0, 0.0001, 500, 999.9998):
        check(timeline(warm(0, 1000, marks(("encode", begin, begin + 0.0001), ("send", 0, begin)))))


def test_bars_follow_each_other_in_order_of_time() -> None:
    lines = draw(example()).splitlines()
    labels = [line[:21].strip() for line in lines[4:-1]]
    assert labels == [
        "queue local",
        "handshake dns",
        "handshake tcp",
        "client encode",
        "network send",
        "network to_and_back",
        "model prefill",
        "model decode",
        "client decode",
        "client waiting",
        "unattributed",
    ]


def test_what_others_wrote_steers_no_terminal_and_begins_no_line() -> None:
    """The model's name may be what a client of a proxy sent."""
    record = CallRecord(5, operation="chat", model="\x1b[2Jm\nerror: all is lost\t\r", endpoint="h", transport="t")
    record.end_ns = 5
    first, second, *_ = draw(Timeline(record)).splitlines()
    assert first == "chat \\u001b[2Jm\\nerror: all is lost\\t\\u000d  h over t"
    assert second.startswith("completed in ")
