"""What a table of a server's times is made of, and what reading it gives."""

from __future__ import annotations

import re
from typing import Any, Literal, NamedTuple, NoReturn, get_args

import msgspec
from msgspec.structs import force_setattr

from ..errors import ConfigurationError
from .units import DURATIONS, RATES, STAMPS, UNITS

__all__ = ["DURATION_MAPS", "Location", "MapsTo", "Reading", "RowReader", "TimingReader", "TimingRow", "Window"]

#: What a value is a time of. ``queue``, ``prefill``, ``decode`` are parts; ``model_total`` is prefill and decode;
#: ``server_total`` is arrival to end of answer (to headers, where the window says so); ``server_part`` is a part of that
#: which is none of the others; ``ttft`` is arrival to first token, queue included; ``gateway`` is a hop in front of the
#: server; ``network`` is a round trip as the other side saw it. The others are no durations. ``none``: the key alone
#: counts, it tells which server this is.
MapsTo = Literal[
    "queue",
    "prefill",
    "decode",
    "model_total",
    "server_total",
    "server_part",
    "ttft",
    "gateway",
    "network",
    "decode_rate",
    "timestamp",
    "load",
    "request_id",
    "rate_limit",
    "none",
]
#: The client's window that contains the duration: request sent to first header byte, to first content, to last byte;
#: submission of a job to its result; or no window of this call.
Window = Literal["to_headers", "to_first_token", "to_end", "job", "none"]
#: Where it stands: the JSON of an answer, of one event of a stream, of a job; a header; gRPC's initial metadata; an HTTP
#: trailer or gRPC's trailing metadata.
Location = Literal["body", "event", "header", "job", "initial_metadata", "trailer"]
#: How it is read: a dotted path in JSON, one field with one value, one metric of a ``Server-Timing`` field.
RowReader = Literal["json_path", "header", "server_timing"]

#: The ``maps_to`` that are durations.
DURATION_MAPS = frozenset(
    {"queue", "prefill", "decode", "model_total", "server_total", "server_part", "ttft", "gateway", "network"}
)
_JSON = frozenset({"body", "event", "job"})
_TOKEN = r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"  # noqa: S105 - RFC 9110's token, no secret
_FIELD = re.compile(
    r"[!#$%&'+\-.^_`|~0-9a-z]+"
)  # a header's name in lower case; no `*`, which would look like a pattern
_JSON_PATH = re.compile(r"[^.\[\]*]+(?:\[\])?(?:\.[^.\[\]*]+(?:\[\])?)*")
_METRIC_PATH = re.compile(rf"({_FIELD.pattern})\[({_TOKEN})\]\.(?:dur|desc\[([^\[\]]+)\])")


class Reading(NamedTuple):
    """One value that a server told, fit to stand on a span: numbers and short text, no ids of people, no content.

    Attributes:
        server: the best guess at who told it, by the keys of the answer.
        maps_to: see ``MapsTo``.
        duration_ns: in nanoseconds, never negative; None where the value is no duration (a rate).
        raw: as sent, a number or text of at most 200 characters; of two stamps ``"<end> - <start>"``.
        path: where it stood, as the table's row writes it; of two stamps ``"<end's path> - <start's path>"``.
        location: see ``Location``.
        window: see ``Window``.
        slack_ns: by how much the server may have cut it off: 1 ms for whole milliseconds, 1 s for whole seconds, else 0.
        adds: the sum of all readings of this ``maps_to`` and location is what counts.
    """

    server: str
    maps_to: str
    duration_ns: int | None
    raw: Any
    path: str
    location: str
    window: str
    slack_ns: int = 0
    adds: bool = False


class TimingRow(msgspec.Struct, frozen=True):
    """Where one value stands and what it is.

    Attributes:
        location: see ``Location``.
        path: ``json_path``: dotted keys, ``[]`` after a key = each element of its list. ``header``: the name, in lower case.
            ``server_timing``: ``server-timing[NAME].dur``, or ``server-timing[NAME].desc[KEY]`` for a number in a
            description that is a query string.
        unit: ``ns``, ``us``, ``ms``, ``s``, ``go_duration`` (``1m3.5s``), ``fractional_s`` (seconds, read only where a
            fraction is written); with ``since``: ``unix_s``, ``unix_ms``, ``rfc3339``; of rates ``tokens_per_s``,
            ``ms_per_token``; ``count``, ``string``; ``none`` where the key alone counts.
        maps_to: see ``MapsTo``.
        window: see ``Window``.
        reader: see ``RowReader``.
        streamed: True: only where the answer was a stream; False: only where it was none; None: both. A header of a stream
            is written before the first token: with None, one that maps to prefill, decode or model_total is not read there.
        adds: several rows of this server and ``maps_to`` sum up. Otherwise the first that has a value counts.
        since: the path of a sibling in the same object. Both are stamps, and the value is the time between them.
        unless: the path of a sibling in the same object; where it is, this row is not read.
    """

    location: Location
    path: str
    unit: str
    maps_to: MapsTo
    window: Window
    reader: RowReader
    streamed: bool | None = None
    adds: bool = False
    since: str | None = None
    unless: str | None = None


class TimingReader(msgspec.Struct, frozen=True):
    """The table of one server. The first row with a value counts where several have the same ``maps_to``.

    Raises:
        ConfigurationError: a row that cannot be read; names the server and the path.
    """

    server: str
    rows: tuple[TimingRow, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.server, str) or not 0 < len(self.server) <= 64 or not self.server.isprintable():
            raise ConfigurationError(
                f"TimingReader(server=...) must be a name of 1 to 64 characters, not {self.server!r:.80}"
            )
        if not isinstance(self.rows, (tuple, list)):
            raise ConfigurationError(
                f"TimingReader({self.server!r}, rows=...) must be a tuple of TimingRow, not {type(self.rows).__name__}"
            )
        force_setattr(self, "rows", tuple(self.rows))
        for row in self.rows:
            if not isinstance(row, TimingRow):
                raise ConfigurationError(f"TimingReader({self.server!r}) has a row that is no TimingRow: {row!r:.80}")
            _check(row, self.server)


def _check(row: TimingRow, server: str) -> None:
    def refuse(why: str) -> NoReturn:
        raise ConfigurationError(f"TimingReader({server!r}): row {row.path!r:.200}: {why}")

    def one_of(field: str, known: Any) -> None:
        value = getattr(row, field)
        if not isinstance(value, str) or value not in known:
            refuse(f"{field} must be one of {', '.join(sorted(known))}, not {value!r:.60}")

    one_of("location", get_args(Location))
    one_of("maps_to", get_args(MapsTo))
    one_of("window", get_args(Window))
    one_of("reader", get_args(RowReader))
    if not row.unit:
        refuse("it has no unit, and servers use four: say ns, us, ms or s")
    one_of("unit", UNITS)
    if row.streamed not in (None, True, False) or row.adds not in (True, False):
        refuse("streamed must be True, False or None, and adds True or False")
    if (row.reader == "json_path") != (row.location in _JSON):
        refuse(f"reader {row.reader!r} cannot read location {row.location!r}")
    _check_path(row, refuse)
    if row.since is not None or row.unit in STAMPS:
        if row.maps_to != "timestamp" and (row.since is None or row.unit not in STAMPS):
            refuse(f"a duration between two stamps needs since=... and a unit of {', '.join(sorted(STAMPS))}")
        if row.maps_to == "timestamp" and row.since is not None:
            refuse("the time since a sibling is a duration, no timestamp")
    elif row.maps_to in DURATION_MAPS and row.unit not in DURATIONS:
        refuse(f"{row.maps_to} is a duration; its unit is one of {', '.join(sorted(DURATIONS))}, not {row.unit!r}")
    if row.maps_to == "timestamp" and row.unit not in STAMPS:
        refuse(f"the unit of a timestamp is one of {', '.join(sorted(STAMPS))}, not {row.unit!r}")
    if (row.maps_to == "decode_rate") != (row.unit in RATES):
        refuse(f"units of decode_rate, and of nothing else, are {', '.join(sorted(RATES))}")
    if (row.maps_to == "none") != (row.unit == "none"):
        refuse("unit 'none' belongs to maps_to 'none', a key that only tells which server this is")
    if (row.maps_to in DURATION_MAPS - {"network"}) == (row.window == "none"):
        refuse(f"{row.maps_to} in window {row.window!r}: a duration has one, and nothing else has")


def _check_path(row: TimingRow, refuse: Any) -> None:
    siblings = [path for path in (row.since, row.unless) if path is not None]
    if not all(isinstance(path, str) and 0 < len(path) <= 200 and path.isprintable() for path in (row.path, *siblings)):
        refuse("a path must be text of 1 to 200 printable characters")
    if row.reader == "json_path":
        for path in (row.path, *siblings):
            if not _JSON_PATH.fullmatch(path) or path.endswith("[]"):
                refuse("a path in JSON is dotted keys, with [] after a key for each element of its list")
            if path.rpartition(".")[0] != row.path.rpartition(".")[0]:
                refuse(f"{path!r} must stand in the same object: two clocks are never subtracted")
    elif row.reader == "header":
        for path in (row.path, *siblings):
            if not _FIELD.fullmatch(path):
                refuse("the path of a header is its name, in lower case")
    elif siblings:
        refuse("since and unless are for JSON and headers, not for server_timing")
    elif not _METRIC_PATH.fullmatch(row.path):
        refuse("the path of a metric is server-timing[NAME].dur, or server-timing[NAME].desc[KEY]")


def split_metric(path: str) -> tuple[str, str, str | None]:
    """``server-timing[cfL4].desc[rtt]`` as (header, metric, key of its description or None for its duration)."""
    match = _METRIC_PATH.fullmatch(path)
    assert match is not None, "rows are checked when they are made"
    return match[1], match[2], match[3]
