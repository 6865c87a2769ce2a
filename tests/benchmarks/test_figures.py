"""Spreads, ratios, budgets and verdicts, of rounds that nobody measured."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.figures import (
    Finding,
    Measured,
    Spread,
    Verdict,
    budget,
    by_workload,
    find,
    judge,
    ratio,
    ratios,
    work_out,
)
from benchmarks.workloads import WORKLOADS
from tests.benchmarks.support import failed, measured

values = st.lists(st.floats(0.01, 1e6), min_size=1, max_size=40)


@given(values)
def test_interval_of_a_median_holds_it_and_lies_within_the_spread(rounds: list[float]) -> None:
    inner, outer = Spread.of_median(rounds), Spread.of(rounds)
    assert outer.low <= inner.low <= inner.median <= inner.high <= outer.high
    assert inner.median == outer.median == statistics.median(rounds)


@pytest.mark.parametrize(("count", "cut"), [(1, 0), (3, 0), (5, 0), (7, 0), (8, 1), (10, 1), (11, 2), (15, 3), (20, 5)])
def test_interval_leaves_out_what_90_percent_allow(count: int, cut: int) -> None:
    rounds = [float(number) for number in range(count)]
    interval = Spread.of_median(rounds)
    assert (interval.low, interval.high) == (cut, count - 1 - cut)


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ((1.95, 2.0, 2.05), (1.96, 2.02, 2.06), Verdict.SAME),
        ((1.95, 2.0, 2.05), (2.1, 2.2, 2.3), Verdict.SAME),  # 10 % more, and surely so: within what is allowed
        ((1.95, 2.0, 2.05), (2.2, 2.4, 2.6), Verdict.REGRESSION),
        ((1.95, 2.0, 2.05), (2.04, 2.4, 2.6), Verdict.UNCLEAR),  # 20 % more, but a round was as before
        ((1.5, 2.0, 2.5), (1.5, 2.0, 2.5), Verdict.UNCLEAR),  # no more, but who knows
        ((1.95, 2.0, 2.05), (1.6, 1.7, 1.8), Verdict.BETTER),
        ((1.95, 2.0, 2.05), (1.85, 1.9, 1.94), Verdict.SAME),  # 5 % less, and surely so
        ((1.0, 1.0, 1.0), (1.0, 1.0, 1.0), Verdict.SAME),
        ((1.0, 1.0, 1.0), (6.0, 6.0, 6.0), Verdict.REGRESSION),
    ],
)
def test_verdicts(before: tuple[float, ...], after: tuple[float, ...], verdict: Verdict) -> None:
    assert judge(Spread(*before), Spread(*after)) is verdict


@given(values, st.floats(1.2, 10))
def test_what_is_steady_and_grew_by_more_than_the_limit_is_a_regression(rounds: list[float], times: float) -> None:
    steady = [100 + value / 1e6 for value in rounds]  # within a percent
    before, after = Spread.of_median(steady), Spread.of_median([value * times for value in steady])
    assert judge(before, after) is Verdict.REGRESSION
    assert judge(after, before) is Verdict.BETTER
    assert judge(before, before) is Verdict.SAME


def test_finding_says_by_how_much() -> None:
    finding = Finding("burst", "uvloop", "spanwire", "raw", Spread(2, 2, 2), Spread(2.5, 2.5, 2.5))
    assert finding.grown == pytest.approx(0.25)
    assert finding.verdict is Verdict.REGRESSION


def test_ratios_are_taken_round_by_round() -> None:
    raw, ours = measured("burst", "raw", [1, 2, 4]), measured("burst", "spanwire", [2, 4, 8])
    assert ratios(ours, raw) == [2, 2, 2]
    assert ratio(ours, raw) == 2


def test_nothing_is_divided_by_nothing() -> None:
    raw, ours = measured("memory", "raw", [0, -1, 2]), measured("memory", "spanwire", [10, 11, 12])
    assert ratios(ours, raw) == []
    assert ratio(ours, raw) is None
    assert ratio(ours, None) is None


def test_workload_without_a_meaningful_ratio_has_none() -> None:
    raw, ours = measured("backpressure", "raw", [1]), measured("backpressure", "spanwire", [2])
    assert ratio(ours, raw) is None


def test_loops_are_kept_apart() -> None:
    all_of_them = [
        measured("burst", "raw", [1], loop="asyncio"),
        measured("burst", "raw", [2]),
        measured("burst", "spanwire", [3], loop="asyncio"),
    ]
    groups = by_workload(all_of_them)
    assert [[(one.loop, one.client) for one in group] for group in groups] == [
        [("asyncio", "raw"), ("asyncio", "spanwire")],
        [("uvloop", "raw")],
    ]
    found = find(all_of_them, "burst", "uvloop", "raw")
    assert found is not None
    assert found.values() == [2]


def test_who_failed_is_not_found() -> None:
    assert find([failed("burst", "raw")], "burst", "uvloop", "raw") is None


def test_memory_is_worked_out_round_by_round() -> None:
    rows = [WORKLOADS["burst"], WORKLOADS["crowd"], WORKLOADS["memory"]]
    crowd = measured("crowd", "raw", [9, 9], at_once=256)
    for number, figures in enumerate(crowd.rounds):
        figures["rss_mib"] = 40 + 255 / 1024 * (number + 3)
    (memory,) = work_out(rows, [measured("burst", "raw", [1, 1], rss_mib=40), crowd])
    assert (memory.workload, memory.loop, memory.client) == ("memory", "uvloop", "raw")
    assert memory.values() == pytest.approx([3, 4])


def test_memory_of_who_failed_is_not_worked_out() -> None:
    rows = [WORKLOADS["memory"]]
    assert work_out(rows, [measured("burst", "raw", [1]), failed("crowd", "raw")]) == []
    assert work_out(rows, [failed("burst", "raw"), measured("crowd", "raw", [1], at_once=256)]) == []
    assert work_out([WORKLOADS["crowd"]], [measured("crowd", "raw", [1])]) == []


def test_budget_in_times_another_client() -> None:
    raw, ours = measured("burst", "raw", [1.0]), measured("burst", "spanwire", [1.9])
    found = budget(ours, [raw, ours])
    assert found == ("2 x raw", 2.0, True)
    assert budget(measured("burst", "spanwire", [2.1]), [raw]) == ("2 x raw", 2.0, False)


def test_budget_in_the_unit_of_the_figure() -> None:
    assert budget(measured("memory", "spanwire", [19]), []) == ("20", 20, True)
    assert budget(measured("reuse", "spanwire", [6]), []) == ("1", 1, False)


def test_budget_for_keeping_up() -> None:
    raw = measured("crowd", "raw", [10])
    slow, quick = (measured("crowd", "spanwire", [11], wall_s=wall_s) for wall_s in (2.6, 2.1))
    assert [found and found.met for found in (budget(slow, [raw]), budget(quick, [raw]))] == [False, True]


@pytest.mark.parametrize(
    "one",
    [
        measured("burst", "aiohttp", [1]),  # not ours
        measured("thousand/250", "spanwire", [1]),  # no budget
        measured("latency", "spanwire", [1]),  # aiohttp was not measured
        failed("reuse", "spanwire"),
    ],
)
def test_no_budget(one: Measured) -> None:
    assert budget(one, [measured(one.workload, "raw", [1])]) is None
