"""Calls to numbers: percentiles are values that occurred, sums add up, and selections divide the calls."""

from __future__ import annotations

import math
from array import array
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spanwire.report.calls import Call
from spanwire.report.summary import (
    ALL,
    MAX_BUCKETS,
    MAX_PAIRS,
    OTHERS,
    SLOWEST,
    Stats,
    percentile,
    plain,
    shares,
    spread,
    summarize,
)
from spanwire.timeline import SEGMENTS

SECONDS = st.floats(min_value=1e-6, max_value=1e4)


def call(total_s: float = 1.0, **more: Any) -> Call:
    pieces = more.pop("pieces", [("unattributed", "", "measured", total_s)])
    values: dict[str, Any] = {
        "started_unix_s": 1000.0, "endpoint": "e", "model": "m", "operation": "chat", "transport": "sse",
        "outcome": "completed", "error_type": None, "total_s": total_s, "first_content_s": None, "last_chunk_s": None,
        "reused": True, "attempts": 1, "input_tokens": None, "output_tokens": None, "cached_tokens": None,
        "pieces": tuple(row[:3] for row in pieces), "durations": array("d", [row[3] for row in pieces]),
    }  # fmt: skip
    return Call(**values | more)


# --- percentiles ------------------------------------------------------------------------------------------------------------


@given(st.lists(SECONDS, min_size=1, max_size=300), st.integers(1, 100))
def test_a_percentile_is_the_smallest_value_that_enough_do_not_exceed(values: list[float], percent: int) -> None:
    found = percentile(sorted(values), percent)
    assert found in values
    assert 100 * sum(value <= found for value in values) >= percent * len(values)
    assert 100 * sum(value < found for value in values) < percent * len(values)


@given(st.lists(SECONDS, min_size=1, max_size=300))
def test_a_spread_is_in_order(values: list[float]) -> None:
    found = spread(values)
    assert found.n == len(values)
    assert (found.min, found.max) == (min(values), max(values))
    assert found.min <= found.p50 <= found.max
    assert found.min <= found.mean <= found.max
    assert (found.p95 is None) == (len(values) < 20)
    assert (found.p99 is None) == (len(values) < 100)
    if found.p95 is not None:
        assert found.p50 <= found.p95 <= (found.p99 or found.max) <= found.max


# --- sums -------------------------------------------------------------------------------------------------------------------

PIECES = st.lists(
    st.tuples(
        st.sampled_from([*SEGMENTS, "new"]),
        st.sampled_from(["", "a", "b"]),
        st.sampled_from(["measured", "reported", "estimated"]),
        SECONDS,
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda row: row[:2],
)


@st.composite
def some_calls(draw: st.DrawFn) -> list[Call]:
    found = []
    for _ in range(draw(st.integers(1, 25))):
        pieces = draw(PIECES)
        total_s = sum(row[3] for row in pieces)
        first_s = draw(st.none() | st.floats(0, total_s))
        found.append(
            call(
                total_s,
                pieces=pieces,
                started_unix_s=draw(st.none() | st.floats(0, 1e6)),
                endpoint=draw(st.sampled_from(["e1", "e2"])),
                model=draw(st.sampled_from(["m1", "m2", ""])),
                outcome=draw(st.sampled_from(["completed", "error", "cancelled"])),
                reused=draw(st.sampled_from([True, False, None])),
                attempts=draw(st.integers(1, 3)),
                first_content_s=first_s,
                last_chunk_s=None if first_s is None else draw(st.none() | st.floats(first_s, total_s)),
                output_tokens=draw(st.none() | st.integers(0, 1000)),
            )
        )
    return sorted(found, key=lambda row: (row.started_unix_s is None, row.started_unix_s or 0.0))


def check(stats: Stats, members: list[Call]) -> None:
    assert stats.calls == len(members)
    assert stats.sum_s == pytest.approx(sum(row.total_s for row in members))
    assert sum(stats.outcomes.values()) == len(members)
    assert stats.cold == sum(row.reused is False for row in members)
    assert stats.warm == sum(row.reused is True for row in members)
    assert stats.retried == sum(row.attempts > 1 for row in members)
    wholes = [row for row in stats.rows if not row.part]
    assert sum(row.sum_s for row in wholes) == pytest.approx(stats.sum_s)
    assert sum(shares(stats).values()) == pytest.approx(1.0)
    for row in stats.rows:
        assert sum(row.by_source) == pytest.approx(row.sum_s)
        assert row.spread.mean * row.spread.n == pytest.approx(row.sum_s)
        if row.part:
            whole = next(other for other in wholes if other.segment == row.segment)
            assert row.sum_s <= whole.sum_s * (1 + 1e-9)
            assert row.spread.n <= whole.spread.n
    assert stats.times["total"].max == max(row.total_s for row in members)
    firsts = [row.first_content_s for row in members if row.first_content_s is not None]
    assert ("first_content" in stats.times) == bool(firsts)
    if firsts:
        assert stats.times["first_content"].p50 == percentile(sorted(firsts), 50)


@given(some_calls())
def test_every_selection_is_of_its_calls_alone_and_adds_up(members: list[Call]) -> None:
    found = summarize(members)
    assert (found.selections[0].endpoint, found.selections[0].model, found.selections[0].outcome) == (ALL, ALL, ALL)
    names = set()
    for selection in found.selections:
        key = (selection.endpoint, selection.model, selection.outcome)
        assert key not in names
        names.add(key)
        mine = [
            row
            for row in members
            if selection.endpoint in (ALL, found.endpoints.index(row.endpoint))
            and selection.model in (ALL, found.models.index(row.model))
            and selection.outcome in (ALL, found.outcomes.index(row.outcome))
        ]
        check(selection.stats, mine)
        timed = [row for row in mine if row.started_unix_s is not None]
        over = selection.buckets
        assert sum(over.calls) == len(timed)
        assert sum(over.cold) == sum(row.reused is False for row in timed)
        assert sum(sum(column) for column in over.segments) == pytest.approx(sum(row.total_s for row in timed))
        assert over.index == sorted(set(over.index))
        assert all(0 <= number < found.buckets for number in over.index)
    assert found.timeless == sum(row.started_unix_s is None for row in members)
    assert found.buckets <= MAX_BUCKETS
    msgspec.json.encode(plain(found))


# --- metrics ----------------------------------------------------------------------------------------------------------------


def test_the_formulas_of_token_times() -> None:
    stats = summarize([call(2.0, first_content_s=0.5, last_chunk_s=1.5, output_tokens=11)]).all
    assert stats.times["inter_token"].p50 == pytest.approx(1.0 / 10)
    assert stats.times["tokens_per_s"].p50 == pytest.approx(11.0)


@pytest.mark.parametrize(
    "more",
    [
        {"output_tokens": None},
        {"output_tokens": 0},
        {"output_tokens": 1},
        {"last_chunk_s": None},
        {"first_content_s": None},
        {"last_chunk_s": 0.5},
        {"last_chunk_s": 0.504},  # all at once: that is no speed
    ],
)
def test_an_unknown_speed_is_left_out_and_not_0(more: dict[str, Any]) -> None:
    values = {"first_content_s": 0.5, "last_chunk_s": 1.5, "output_tokens": 10} | more
    stats = summarize([call(2.0, **values)]).all
    assert "inter_token" not in stats.times
    assert "tokens_per_s" not in stats.times


def test_cold_calls_are_apart_from_warm_ones() -> None:
    pieces = [("handshake", "tcp", "measured", 0.1), ("unattributed", "", "measured", 0.9)]
    members = [call(1.0, reused=False, pieces=pieces), call(0.5), call(0.6), call(0.7, reused=None)]
    stats = summarize(members).all
    assert (stats.cold, stats.warm, stats.calls) == (1, 2, 4)
    assert stats.cold_times["handshake"].p50 == 0.1
    assert stats.cold_times["total"].p50 == 1.0
    assert stats.warm_times["total"].max == 0.6
    assert "handshake" not in stats.warm_times


# --- limits -----------------------------------------------------------------------------------------------------------------


def test_many_models_are_folded_and_none_is_lost() -> None:
    members = [call(1.0, model=f"m{number % 97}", endpoint=f"e{number % 7}") for number in range(2000)]
    found = summarize(members)
    pairs = [s for s in found.selections if ALL not in (s.endpoint, s.model) and s.outcome == ALL]
    assert len(pairs) == MAX_PAIRS
    assert sum(selection.stats.calls for selection in pairs) == 2000
    assert OTHERS in found.endpoints
    assert OTHERS in found.models


@pytest.mark.parametrize("lasted_s", [0.0, 1e-6, 0.01, 3.0, 61.0, 3600.0, 86_400.0, 3e7, 1e10])
def test_buckets_of_any_length_of_time(lasted_s: float) -> None:
    members = [call(0.001, started_unix_s=1e9 + lasted_s * number / 999) for number in range(1000)]
    found = summarize(members)
    assert 1 <= found.buckets <= MAX_BUCKETS
    over = found.selections[0].buckets
    assert sum(over.calls) == 1000
    assert found.begin_unix_s is not None
    assert found.begin_unix_s <= 1e9
    assert max(over.index) < found.buckets


def test_calls_without_a_time_of_day_have_no_buckets() -> None:
    found = summarize([call(1.0, started_unix_s=None)])
    assert (found.buckets, found.begin_unix_s, found.timeless) == (0, None, 1)
    assert found.selections[0].buckets.index == []


def test_the_slowest_calls_are_there_for_every_model_and_outcome() -> None:
    members = [
        call(
            1.0 + number / 1000,
            model="slow" if number % 2 else "fast",
            outcome="error" if number % 100 == 0 else "completed",
        )
        for number in range(3000)
    ]
    members.append(call(0.001, model="rare"))
    found = summarize(members)
    assert len(found.slowest) <= 2 * SLOWEST
    assert found.slowest[0][2].total_s == max(row.total_s for row in members)
    kinds = {(row.model, row.outcome) for _, _, row in found.slowest}
    assert kinds == {("slow", "completed"), ("fast", "completed"), ("fast", "error"), ("rare", "completed")}
    assert 50 <= len(found.sample) <= 60
    totals = [row.total_s for *_, row in found.sample]
    assert math.isclose(sum(totals) / len(totals), 2.5, rel_tol=0.1)  # of all times, not of the slow ones
