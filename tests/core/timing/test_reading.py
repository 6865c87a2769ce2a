"""Tables that cannot be read are refused when they are made, naming the server and the path."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from spanwire.errors import ConfigurationError
from spanwire.timing import TimingReader, TimingRow
from spanwire.timing.reading import split_metric

GOOD: dict[str, Any] = {
    "location": "body",
    "path": "stats.wait_ms",
    "unit": "ms",
    "maps_to": "queue",
    "window": "to_end",
    "reader": "json_path",
}
STAMPS: dict[str, Any] = {**GOOD, "unit": "unix_s", "path": "stats.began", "since": "stats.came"}
HEADER: dict[str, Any] = {**GOOD, "location": "header", "path": "x-wait", "window": "to_headers", "reader": "header"}
METRIC: dict[str, Any] = {**HEADER, "path": "server-timing[wait].dur", "reader": "server_timing"}


def row(base: dict[str, Any] = GOOD, **changes: Any) -> TimingRow:
    return TimingRow(**{**base, **changes})


@pytest.mark.parametrize(
    "fine",
    [
        row(),
        row(path="a-b.c d.list[].x"),
        row(location="event"),
        row(location="job", window="job"),
        row(unit="go_duration"),
        row(STAMPS),
        row(STAMPS, unit="rfc3339", location="job", path="began", since="came", window="job"),
        row(HEADER),
        row(HEADER, location="trailer", window="to_end"),
        row(HEADER, location="initial_metadata"),
        row(HEADER, unit="fractional_s", unless="x-total"),
        row(HEADER, unit="rfc3339", since="x-came"),
        row(METRIC),
        row(METRIC, path="server-timing[cfL4].desc[rtt]", unit="us", maps_to="network", window="none"),
        row(unit="tokens_per_s", maps_to="decode_rate", window="none"),
        row(unit="count", maps_to="load", window="none"),
        row(unit="string", maps_to="request_id", window="none"),
        row(unit="unix_ms", maps_to="timestamp", window="none"),
        row(HEADER, unit="go_duration", maps_to="rate_limit", window="none"),
        row(HEADER, unit="none", maps_to="none", window="none"),
    ],
)
def test_rows_that_can_be_read(fine: TimingRow) -> None:
    assert TimingReader("mine", (fine,)).rows == (fine,)


@pytest.mark.parametrize(
    ("base", "changes", "why"),
    [
        (GOOD, {"unit": ""}, "no unit"),
        (GOOD, {"unit": None}, "no unit"),
        (GOOD, {"unit": "minutes"}, "unit must be one of .*, not 'minutes'"),
        (GOOD, {"unit": "none"}, "queue is a duration"),
        (GOOD, {"unit": "tokens_per_s"}, "queue is a duration"),
        (GOOD, {"unit": "unix_s"}, "needs since"),
        (GOOD, {"since": "stats.came"}, "unit of rfc3339, unix_ms, unix_s"),
        (GOOD, {"maps_to": "waiting"}, "maps_to must be one of .*, not 'waiting'"),
        (GOOD, {"maps_to": None}, "maps_to must be one of"),
        (GOOD, {"maps_to": ["queue"]}, "maps_to must be one of"),
        (GOOD, {"maps_to": "decode_rate", "window": "none"}, "units of decode_rate"),
        (GOOD, {"maps_to": "none", "window": "none"}, "unit 'none' belongs"),
        (GOOD, {"maps_to": "timestamp", "window": "none"}, "unit of a timestamp"),
        (STAMPS, {"maps_to": "timestamp", "window": "none"}, "no timestamp"),
        (GOOD, {"window": "forever"}, "window must be one of"),
        (GOOD, {"window": "none"}, "queue in window 'none'"),
        (GOOD, {"maps_to": "load", "unit": "count"}, "load in window 'to_end'"),
        (GOOD, {"location": "cookie"}, "location must be one of"),
        (GOOD, {"reader": "xpath"}, "reader must be one of"),
        (GOOD, {"reader": "header"}, "reader 'header' cannot read location 'body'"),
        (HEADER, {"reader": "json_path"}, "reader 'json_path' cannot read location 'header'"),
        (GOOD, {"path": ""}, "1 to 200"),
        (GOOD, {"path": None}, "1 to 200"),
        (GOOD, {"path": "a" * 201}, "1 to 200"),
        (GOOD, {"path": "a\nb"}, "1 to 200"),
        (GOOD, {"path": "a..b"}, "dotted keys"),
        (GOOD, {"path": ".a"}, "dotted keys"),
        (GOOD, {"path": "a."}, "dotted keys"),
        (GOOD, {"path": "a.*"}, "dotted keys"),
        (GOOD, {"path": "a[0].b"}, "dotted keys"),
        (GOOD, {"path": "[].b"}, "dotted keys"),
        (GOOD, {"path": "a.b[]"}, "dotted keys"),
        (STAMPS, {"since": "other.came"}, "same object"),
        (GOOD, {"unless": "total"}, "same object"),
        (HEADER, {"path": "X-Wait"}, "lower case"),
        (HEADER, {"path": "x wait"}, "lower case"),
        (HEADER, {"path": "llm_provider-*"}, "lower case"),
        (METRIC, {"path": "server-timing"}, "server-timing\\[NAME\\]"),
        (METRIC, {"path": "server-timing[a b].dur"}, "server-timing\\[NAME\\]"),
        (METRIC, {"path": "server-timing[a].desc"}, "server-timing\\[NAME\\]"),
        (METRIC, {"unless": "x-total"}, "not for server_timing"),
        (GOOD, {"streamed": "yes"}, "streamed must be"),
        (GOOD, {"adds": None}, "adds"),
    ],
)
def test_rows_that_cannot_be_read(base: dict[str, Any], changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why) as caught:
        TimingReader("mine", (row(base, **changes),))
    assert "'mine'" in str(caught.value)
    path = {**base, **changes}["path"]
    assert repr(path)[:100] in str(caught.value)


@pytest.mark.parametrize("server", ["", None, 7, "a" * 65, "a\nb"])
def test_a_server_has_a_name(server: Any) -> None:
    with pytest.raises(ConfigurationError, match="server"):
        TimingReader(server, (row(),))


@pytest.mark.parametrize("rows", [None, "rows", row(), {}])
def test_rows_are_a_tuple(rows: Any) -> None:
    with pytest.raises(ConfigurationError, match="'mine'"):
        TimingReader("mine", rows)


def test_a_row_is_a_row() -> None:
    with pytest.raises(ConfigurationError, match=r"'mine'.*no TimingRow"):
        TimingReader("mine", (GOOD,))  # type: ignore[arg-type]
    assert TimingReader("mine", [row()]).rows == (row(),)  # type: ignore[arg-type]


def test_tables_can_be_read_from_a_file() -> None:
    text = msgspec.json.encode(TimingReader("mine", (row(), row(HEADER, streamed=False))))
    assert msgspec.json.decode(text, type=TimingReader).rows == (row(), row(HEADER, streamed=False))
    with pytest.raises(ConfigurationError, match=r"'mine'.*minutes"):
        msgspec.json.decode(text.replace(b'"ms"', b'"minutes"'), type=TimingReader)


def test_the_path_of_a_metric() -> None:
    assert split_metric("server-timing[x-originResponse].dur") == ("server-timing", "x-originResponse", None)
    assert split_metric("server-timing[cfL4].desc[min_rtt]") == ("server-timing", "cfL4", "min_rtt")
