from __future__ import annotations

from spanwire_instrument.drain import WAIT_S, DrainBook


def test_an_origin_that_misses_is_left_alone_and_tried_again() -> None:
    book = DrainBook()
    for _ in range(3):
        assert book.wanted("a")
        book.missed("a")
    tries = [book.wanted("a") for _ in range(64)]
    assert tries.count(True) == 4
    assert not tries[0]
    assert book.wanted("b")


def test_one_that_ends_in_time_again_is_drained_again() -> None:
    book = DrainBook()
    for _ in range(3):
        book.missed("a")
    assert not book.wanted("a")
    book.ended("a", 0.001)
    assert book.wanted("a")


def test_requests_wait_where_connections_usually_come_back_at_once() -> None:
    book = DrainBook()
    assert book.worth_waiting("a")
    for _ in range(3):
        book.ended("a", WAIT_S * 4)
    assert not book.worth_waiting("a")
    book.ended("a", WAIT_S / 2)
    assert book.worth_waiting("a")
    book.missed("a")
    assert not book.worth_waiting("a")


def test_what_is_learned_has_a_bound() -> None:
    book = DrainBook()
    for number in range(1000):
        book.missed(number)
    assert len(book._origins) == 256
