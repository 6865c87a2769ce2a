"""What servers write, to nanoseconds: four units, numbers as text, two stamps, and whatever else comes."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spanwire.timing.units import UNITS, number, slack_ns, stamp_ns, to_ns


@pytest.mark.parametrize(
    ("value", "unit", "ns"),
    [
        (3722518334, "ns", 3_722_518_334),
        (5317, "us", 5_317_000),
        ("5317", "us", 5_317_000),
        (30.958, "ms", 30_958_000),
        ("2484", "ms", 2_484_000_000),
        ("29.1074", "ms", 29_107_400),
        (" 7 ", "ms", 7_000_000),
        (0.00491786, "s", 4_917_860),
        ("1.25", "s", 1_250_000_000),
        ("1e-3", "s", 1_000_000),
        (".5", "s", 500_000_000),
        (0, "ms", 0),
        ("0", "ms", 0),
        (2592000, "s", 2_592_000_000_000_000),
        ("2.484567121", "fractional_s", 2_484_567_121),
        ("2.0", "fractional_s", 2_000_000_000),
        ("6237", "fractional_s", None),  # TEI's milliseconds, or TGI's seconds: nobody knows
        ("0", "fractional_s", None),
        ("20m52.666s", "go_duration", 1_252_666_000_000),
        ("12ms", "go_duration", 12_000_000),
        ("17.399999999s", "go_duration", 17_399_999_999),
        ("1h2m3s4ms5\u00b5s6ns", "go_duration", 3_723_004_005_006),
        ("0s", "go_duration", 0),
        ("0", "go_duration", 0),
        ("12", "go_duration", None),
        ("-12ms", "go_duration", None),
        ("12ms!", "go_duration", None),
        ("999999h", "go_duration", None),
    ],
)
def test_a_value_and_its_unit(value: Any, unit: str, ns: int | None) -> None:
    assert to_ns(value, unit) == ns


@pytest.mark.parametrize(
    "value",
    [
        None, True, False, "", " ", "None", "null", "nan", "NaN", "inf", "-inf", "Infinity", "-1", "-0.5", "+1", -1, -0.001,
        float("nan"), float("inf"), float("-inf"), "1_000", "0x10", "\u0661\u0662", "\u00b2", "12 ms", "1,5", "1 2", "695, 700",
        "1e999", 10**400, "9" * 41, "9" * 5000, 31 * 86_400 * 10**9, [], {}, [1], b"1", object(),
    ],
)  # fmt: skip
@pytest.mark.parametrize("unit", sorted(UNITS - {"rfc3339"}))
def test_what_is_no_duration_is_no_reading(value: Any, unit: str) -> None:
    assert to_ns(value, unit) is None


def test_an_epoch_in_milliseconds_is_no_duration_whatever_its_key_says() -> None:
    assert to_ns(1777312800000, "ms") is None


@pytest.mark.parametrize(
    ("earlier", "later", "unit", "ns"),
    [
        ("2024-02-12T16:44:47.04927Z", "2024-02-12T16:44:47.295853Z", "rfc3339", 246_583_000),
        ("2024-06-06T18:17:41.736Z", "2024-06-06T18:17:42.258Z", "rfc3339", 522_000_000),
        ("2024-02-29T23:59:59.999999999Z", "2024-03-01T00:00:00Z", "rfc3339", 1),
        ("2024-01-01T01:00:00+01:00", "2023-12-31T19:00:00.25-05:00", "rfc3339", 250_000_000),
        ("2016-12-31T23:59:60Z", "2017-01-01T00:00:00Z", "rfc3339", 0),
        (1714502400, 1714502463, "unix_s", 63_000_000_000),
        (1773777098.25, 1773777098.5, "unix_s", 250_000_000),
        (1777312800000, 1777312800250, "unix_ms", 250_000_000),
    ],
)
def test_the_time_between_two_stamps(earlier: Any, later: Any, unit: str, ns: int) -> None:
    first, last = stamp_ns(earlier, unit), stamp_ns(later, unit)
    assert first is not None
    assert last is not None
    assert last - first == ns


@pytest.mark.parametrize(
    "value",
    [
        None, True, "", "None", 1714502400, "1714502400", "2024-02-12", "2024-02-12T16:44:47", "2024-13-12T16:44:47Z",
        "2024-02-30T16:44:47Z", "2024-02-12T24:44:47Z", "2024-02-12T16:60:47Z", "2024-02-12T16:44:61Z", "0000-01-01T00:00:00Z",
        "2024-02-12T16:44:47.0123456789Z", "2024-02-12T16:44:47.Z", "x2024-02-12T16:44:47Z", "2024-02-12T16:44:47Z\n",
    ],
)  # fmt: skip
def test_what_is_no_rfc_3339_is_no_stamp(value: Any) -> None:
    assert stamp_ns(value, "rfc3339") is None


def test_a_stamp_shared_by_two_dialects_is_told_apart_by_its_type() -> None:
    assert stamp_ns("2024-02-12T16:44:47Z", "unix_s") is None
    assert stamp_ns(1707756287, "rfc3339") is None
    assert stamp_ns("2024-02-12T16:44:47Z", "rfc3339") == stamp_ns(1707756287, "unix_s")
    assert stamp_ns(10**30, "unix_s") is None
    assert stamp_ns(1, "ms") is None


@given(st.datetimes(timezones=st.just(dt.UTC)))
def test_stamps_agree_with_the_standard_library(moment: dt.datetime) -> None:
    text = moment.isoformat().replace("+00:00", "Z")
    expected = (moment - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)) // dt.timedelta(microseconds=1) * 1000
    assert stamp_ns(text, "rfc3339") == expected


@pytest.mark.parametrize(
    ("value", "unit", "slack"),
    [
        ("2484", "ms", 1_000_000),
        (0, "ms", 1_000_000),  # cut off: anything below 1
        ("29.1074", "ms", 0),
        (4.0, "ms", 0),
        (7, "s", 1_000_000_000),
        (0, "s", 0),  # how some serializers print 0.0
        ("0.044", "s", 0),
        (179676000, "ns", 0),
        (1714502400, "unix_s", 1_000_000_000),
        (1773777098.25, "unix_s", 0),
        (1777312800000, "unix_ms", 1_000_000),
        ("2024-06-06T18:17:41.736Z", "rfc3339", 1_000_000),
        ("2024-06-06T18:17:41Z", "rfc3339", 1_000_000_000),
        ("2024-02-12T16:44:47.04927Z", "rfc3339", 0),
    ],
)
def test_what_may_have_been_cut_off(value: Any, unit: str, slack: int) -> None:
    assert slack_ns(value, unit) == slack


def test_numbers_keep_whether_they_are_whole() -> None:
    assert [type(number(value)) for value in (1, "1", 1.0, "1.0", "1e3")] == [int, int, float, float, float]


anything = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=40) | st.from_regex(r"-?[0-9.]+(e-?[0-9]+)?")
)  # fmt: skip


@given(anything, st.sampled_from(sorted(UNITS)))
def test_never_raises_and_is_never_negative(value: object, unit: str) -> None:
    for found in (to_ns(value, unit), stamp_ns(value, unit)):
        assert found is None or type(found) is int
    duration = to_ns(value, unit)
    assert duration is None or 0 <= duration <= 30 * 86_400 * 10**9
    assert slack_ns(value, unit) >= 0
    assert (plain := number(value)) is None or 0 <= plain < float("inf")
