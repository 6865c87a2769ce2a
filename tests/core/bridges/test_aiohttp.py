from __future__ import annotations

from typing import Any

from spanwire.bridges.aiohttp import SignalBridge
from spanwire.timeline import Marks


class Protocol:
    """What stands for a connection."""


def bridge(*, secure: bool = True) -> tuple[SignalBridge, Marks]:
    marks = Marks()
    return SignalBridge(marks, secure=secure), marks


def connect(of: SignalBridge, *, tls: bool = True) -> None:
    of.create_begins(10)
    of.dns_begins(12)
    of.dns_ends(20)
    if tls:
        of.tls_begins(30)
    of.create_ends(50)


def use(marks: Marks) -> Any:
    assert marks.use is not None
    return marks.use


def test_a_connect_in_parts() -> None:
    made, marks = bridge()
    connect(made)
    made.carried_by(Protocol(), 51)
    made.sent(53)
    made.sent(55)  # of a long body
    made.answered(60)
    assert marks.parts == [("dns", 12, 20), ("tcp", 20, 30), ("tls", 30, 50), ("send", 51, 55)]
    assert marks.sent_ns == 55
    assert not use(marks).reused


def test_without_a_word_of_tls_tcp_and_tls_are_one() -> None:
    made, marks = bridge()
    connect(made, tls=False)
    assert marks.parts == [("dns", 12, 20), ("connect", 20, 50)]


def test_a_connect_without_tls_and_without_a_name() -> None:
    made, marks = bridge(secure=False)
    made.create_begins(10)
    made.tls_begins(11)  # the connection's object is made all the same
    made.create_ends(20)
    assert marks.parts == [("tcp", 10, 20)]


def test_the_way_through_a_proxy_is_one_part() -> None:
    made, marks = bridge()
    connect(made)
    made.carried_by(Protocol(), 51, proxied=True)
    assert [part for part, *_ in marks.parts] == ["dns", "proxy", "proxy"]


def test_a_connection_is_known_again() -> None:
    protocol = Protocol()
    first, marks = bridge()
    connect(first)
    first.carried_by(protocol, 1_000_000_000)
    first.stop(2_000_000_000)
    second, again = bridge()
    second.reuses()
    second.carried_by(protocol, 5_000_000_000)
    assert use(again).id == use(marks).id
    assert (use(again).reused, use(again).age_s, use(again).idle_s) == (True, 4.0, 3.0)


def test_a_connection_whose_connect_was_not_seen_has_no_age() -> None:
    made, marks = bridge()
    made.reuses()
    made.carried_by(Protocol(), 10)
    assert (use(marks).reused, use(marks).age_s, use(marks).idle_s) == (True, None, None)


def test_a_connection_that_cannot_be_told() -> None:
    made, marks = bridge()
    made.reuses()
    made.carried_by(None, 10)
    assert use(marks).reused


def test_a_wait_for_the_pool_may_come_again() -> None:
    made, marks = bridge()
    for begin_ns in (1, 5):
        made.queued(begin_ns)
        made.admitted(begin_ns + 2)
    assert marks.parts == [("local", 1, 3), ("local", 5, 7)]


def test_a_failed_connect_stays_open() -> None:
    made, marks = bridge()
    made.create_begins(10)
    made.dns_begins(12)
    made.stop(20)
    assert marks.open_part == "dns"
    assert marks.parts == []


def test_nothing_is_marked_after_the_end() -> None:
    made, marks = bridge()
    made.stop(1)
    made.queued(2)
    made.admitted(3)
    connect(made)
    made.carried_by(Protocol(), 51)
    made.sent(52)
    made.answered(53)
    assert marks.parts == []
    assert marks.sent_ns == 0
