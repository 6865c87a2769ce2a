"""Results as Markdown."""

from typing import Any

from benchmarks.figures import Finding, Spread
from benchmarks.table import comparison, number, pace_table, regressions, table
from tests.benchmarks.support import failed, measured


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_row_for_each_client_in_each_workload() -> None:
    lines = table(
        [
            measured("crowd", "raw", [9, 10, 12], wall_s=2.05),
            measured("crowd", "spanwire", [19, 20, 20.5], wall_s=2.1),
            failed("crowd", "openai"),
            measured("reuse", "raw", [1], loop="asyncio"),
        ],
        "raw",
    ).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert cells(lines[2]) == [
        *("crowd", "uvloop", "raw", "us CPU per token", "10", "9 to 12", "1.00 x raw", "", "40", "done after 2.05 s"),
    ]
    assert cells(lines[3])[4:] == ["20", "19 to 20.5", "2.00 x raw", "2.1 x raw, 2.5 s: met", "40", "done after 2.10 s"]
    assert cells(lines[4])[4:] == ["failed", "", "", "", "", ""]
    assert cells(lines[5])[:3] == ["reuse", "asyncio", "raw"]


def test_ratios_are_left_out_where_the_first_client_failed() -> None:
    lines = table([failed("burst", "raw"), measured("burst", "spanwire", [2])], "raw").splitlines()
    assert cells(lines[3])[6:8] == ["", ""]


def test_budget_missed_is_said() -> None:
    lines = table([measured("burst", "raw", [1]), measured("burst", "spanwire", [2.5])], "raw").splitlines()
    assert cells(lines[3])[7] == "2 x raw: missed"


def test_streams_that_keep_pace_by_their_number() -> None:
    more: Any = {"added_ms_p50": 0.1, "cpu_share": 0.5, "late_ms_p99": 1.0}
    found = pace_table(
        [
            measured("thousand/250", "raw", [1], keep_pace=250, streams=250, **more),
            measured("thousand/1000", "raw", [1], keep_pace=981, streams=1000, **more),
            failed("thousand/1000", "openai"),
        ]
    ).splitlines()
    assert cells(found[0]) == ["streams that keep pace", "loop", "250", "1,000"]
    assert cells(found[2]) == ["raw", "uvloop", "250 of 250", "981 of 1000"]
    assert cells(found[3]) == ["openai", "uvloop", "", "failed"]
    assert pace_table([measured("burst", "raw", [1])]) == ""


def test_comparison_and_sentences_of_regressions() -> None:
    worse = Finding("burst", "uvloop", "spanwire", "raw", Spread(1.9, 2, 2.1), Spread(2.9, 3, 3.1))
    same = Finding("unary", "asyncio", "spanwire", "raw", Spread(4, 4, 4), Spread(4, 4, 4))
    lines = comparison([worse, same], "main", "working tree").splitlines()
    assert cells(lines[0])[4:6] == ["main", "working tree"]
    assert cells(lines[2])[4:] == ["2.00 (1.90 to 2.10)", "3.00 (2.90 to 3.10)", "+50%", "REGRESSION"]
    assert cells(lines[3])[6:] == ["+0%", "within 15%"]
    (sentence,) = regressions([worse, same])
    assert sentence == "burst on uvloop: spanwire takes 3.00 x raw, 2.00 before (+50%)"


def test_numbers_have_three_digits() -> None:
    assert [number(value) for value in (0.1234, 1.234, 12.34, 123.4, 12345.6, 6.0)] == [
        *("0.12", "1.23", "12.3", "123", "12,346", "6"),
    ]
