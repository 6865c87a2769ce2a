"""PURE: what a server wrote, with its unit, to nanoseconds.

Servers write times as numbers and as text, in four units, and some of them as two stamps. Anything that cannot be a
duration (negative, not finite, ``true``, ``"None"``, empty, longer than a month) is None: no reading, never 0.
"""

from __future__ import annotations

import datetime as dt
import re

__all__ = ["DURATIONS", "RATES", "STAMPS", "UNITS", "number", "slack_ns", "stamp_ns", "to_ns"]

#: Units of durations. ``fractional_s``: seconds, and only where a fraction is written, which proves that they are: for
#: the one key that servers send in seconds and in whole milliseconds. ``go_duration``: ``1m3.5s``, as Go prints them.
DURATIONS = frozenset({"ns", "us", "ms", "s", "fractional_s", "go_duration"})
#: Units of stamps: durations only between two of one object. ``rfc3339`` with up to nine digits of fraction.
STAMPS = frozenset({"unix_s", "unix_ms", "rfc3339"})
#: Units that are kept as they are and never added.
RATES = frozenset({"tokens_per_s", "ms_per_token"})
#: All of them. ``count``: any other number. ``string``: short text. ``none``: the key counts, not its value.
UNITS = DURATIONS | STAMPS | RATES | {"count", "string", "none"}

_NS = {"ns": 1, "us": 1_000, "ms": 1_000_000, "s": 1_000_000_000, "fractional_s": 1_000_000_000}
_STAMP_NS = {"unix_s": 1_000_000_000, "unix_ms": 1_000_000}
#: No call takes longer: OpenAI's batches have a day, RunPod's jobs a week. What is more is another unit, or an epoch.
_LONGEST_NS = 30 * 86_400 * 1_000_000_000
#: The end of the year 9999, in seconds since 1970: the last that RFC 3339 can write.
_LAST_SECOND = 253_402_300_799

#: ASCII alone, and no sign: `float()` would take `1_000`, `nan` and the digits of other scripts.
_NUMBER = re.compile(r"(?:[0-9]{1,40}(?:\.[0-9]{0,40})?|\.[0-9]{1,40})(?:[eE][+-]?[0-9]{1,3})?")
_RFC3339 = re.compile(
    r"([0-9]{4})-([0-9]{2})-([0-9]{2})[Tt ]([0-9]{2}):([0-9]{2}):([0-9]{2})(?:\.([0-9]{1,9}))?"
    r"(?:[Zz]|([+-])([0-9]{2}):([0-9]{2}))"
)
_GO_PART = re.compile(r"([0-9]{1,20}(?:\.[0-9]{0,20})?)(ns|us|\u00b5s|\u03bcs|ms|s|m|h)")
_GO = re.compile(rf"(?:{_GO_PART.pattern}){{1,6}}")
_GO_NS = {
    "ns": 1,
    "us": 1_000,
    "\u00b5s": 1_000,
    "\u03bcs": 1_000,
    "ms": 1_000_000,
    "s": 1_000_000_000,
    "m": 60_000_000_000,
    "h": 3_600_000_000_000,
}


def number(value: object) -> int | float | None:
    """A finite number of 0 or more, given as one or as text; None for everything else. An int says: no fraction."""
    kind = type(value)
    if kind is int or kind is float:  # `kind`, since True is an int too
        return value if 0 <= value < float("inf") else None  # type: ignore[operator, return-value]
    if isinstance(value, str):
        if value.isdigit() and value.isascii() and len(value) <= 40:  # what most headers hold
            return int(value)
        text = value.strip(" \t")
        if not _NUMBER.fullmatch(text):
            return None
        if text.isdigit():
            return int(text)
        real = float(text)
        return real if real < float("inf") else None
    return None


def to_ns(value: object, unit: str) -> int | None:
    """A duration in nanoseconds, or None. For a unit that is no duration: None."""
    if unit == "go_duration":
        return _go_ns(value)
    scale = _NS.get(unit)
    found = number(value) if scale is not None else None
    if scale is None or found is None or (unit == "fractional_s" and type(found) is int):
        return None
    # Compared before it is multiplied: an int may have hundreds of digits, which no float has room for.
    return round(found * scale) if found <= _LONGEST_NS // scale else None


def _go_ns(value: object) -> int | None:
    if value == "0":
        return 0
    if not isinstance(value, str) or not _GO.fullmatch(value):
        return None
    total = sum(float(part) * _GO_NS[unit] for part, unit in _GO_PART.findall(value))
    return round(total) if total <= _LONGEST_NS else None


def stamp_ns(value: object, unit: str) -> int | None:
    """A stamp in nanoseconds since 1970, on the server's clock, or None. Subtract it from its siblings alone."""
    if unit == "rfc3339":
        return _rfc3339_ns(value)
    scale = _STAMP_NS.get(unit)
    found = number(value) if scale is not None else None
    if scale is None or found is None or found * scale > _LAST_SECOND * 1_000_000_000:
        return None
    whole = int(found)  # apart: a float of today's nanoseconds has room for every 256th only
    return whole * scale + round((found - whole) * scale)


def _rfc3339_ns(value: object) -> int | None:
    match = _RFC3339.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return None
    year, month, day, hour, minute, second = (int(match[group]) for group in range(1, 7))
    if hour > 23 or minute > 59 or second > 60:  # 60: a leap second
        return None
    try:
        days = dt.date(year, month, day).toordinal() - dt.date(1970, 1, 1).toordinal()
    except ValueError:
        return None
    seconds = ((days * 24 + hour) * 60 + minute) * 60 + second
    if match[8] is not None:
        offset = (int(match[9]) * 60 + int(match[10])) * 60
        seconds += -offset if match[8] == "+" else offset
    return seconds * 1_000_000_000 + int((match[7] or "").ljust(9, "0"))


def slack_ns(value: object, unit: str) -> int:
    """By how much a value may be too small because the server cut it off: one unit of whole ms and whole seconds."""
    if unit == "rfc3339":
        match = _RFC3339.fullmatch(value) if isinstance(value, str) else None
        digits = len(match[7] or "") if match is not None else 9
        return 1_000_000_000 if digits == 0 else 1_000_000 if digits <= 3 else 0
    if unit in ("ms", "unix_ms"):
        return 1_000_000 if type(number(value)) is int else 0
    if unit == "unix_s":
        return 1_000_000_000 if type(number(value)) is int else 0
    if unit == "s":
        # Servers that write seconds write floats, and some serializers print the float 0.0 as 0. A whole number that
        # is not 0 was cut off.
        found = number(value)
        return 1_000_000_000 if type(found) is int and found else 0
    return 0
