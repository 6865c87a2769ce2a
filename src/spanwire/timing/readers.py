"""PURE: all tables, compiled once, and an answer read by them.

Hot: runs once for each call. An answer that tells no time costs one look-up for each of its headers, and one decoding of
each event that builds nothing but the few root keys that some table names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from ..errors import ConfigurationError
from . import units
from .edge import is_edge
from .precedence import choose
from .reading import DURATION_MAPS, Reading, TimingReader, TimingRow, split_metric
from .server_timing import parse_server_timing
from .tables import BUILT_IN

__all__ = ["Readers"]

#: What LiteLLM's proxy puts before the names of its upstream's headers.
_PASSED_ON = "llm_provider-"
#: A header of a stream is written before the first token, so it cannot know these.
_MODEL = frozenset({"prefill", "decode", "model_total"})
#: A call has one of each, so the first in table order counts. Parts and gateways there may be several.
_SINGLE = frozenset({"queue", "prefill", "decode", "model_total", "server_total", "ttft"})
#: 0 here means that the server did not know. Elsewhere it is real: nothing waited, one token was generated.
_ZERO_IS_MISSING = frozenset({"prefill", "model_total", "server_total", "ttft", "network"})
_MOST_TEXT = 200
#: Bounds on what a strange server can make of one answer.
_MOST_READINGS = 64
_MOST_ELEMENTS = 64

_EMPTY: Mapping[str, str] = {}


class _Rule(NamedTuple):
    """A row, as it stands in one place. ``key``, ``since`` and ``unless`` are keys of the object that holds it."""

    order: int
    row: TimingRow
    servers: tuple[str, ...]
    location: str
    path: str
    key: str
    since: str | None
    unless: str | None


class _Table:
    """Rules by (location, path). Tables of plugins replace what stood at their paths."""

    def __init__(self, more: Sequence[TimingReader]) -> None:
        self._rows: dict[tuple[str, str], list[tuple[TimingRow, list[str]]]] = {}
        for reader in BUILT_IN:
            self._add(reader)
        for reader in more:
            if not isinstance(reader, TimingReader):
                raise ConfigurationError(f"Readers(more=...) takes TimingReader objects, not {reader!r:.80}")
            for row in reader.rows:
                self._rows.pop((row.location, row.path), None)
            self._add(reader)

    def _add(self, reader: TimingReader) -> None:
        for row in reader.rows:
            here = self._rows.setdefault((row.location, row.path), [])
            for other, servers in here:
                if other == row:
                    servers.append(reader.server)
                    break
            else:
                here.append((row, [reader.server]))

    def of(self, location: str, streamed: bool) -> Iterable[tuple[TimingRow, tuple[str, ...]]]:
        """The rows of one location that apply to an answer of this kind, with the servers that have them."""
        for (where, _), rows in self._rows.items():
            if where != location:
                continue
            for row, servers in rows:
                if row.streamed is None:
                    if not (streamed and location in ("header", "initial_metadata") and row.maps_to in _MODEL):
                        yield row, tuple(servers)
                elif row.streamed == streamed:
                    yield row, tuple(servers)


# --------------------------------------------------------------------------------------------------------- headers, trailers


class _Fields:
    """Headers, metadata or trailers, compiled.

    Attributes:
        names: of all fields that any rule looks at.
    """

    def __init__(self, rows: Iterable[tuple[TimingRow, tuple[str, ...]]], location: str) -> None:
        self._plain: dict[str, list[_Rule]] = {}
        self._metrics: dict[str, dict[str, list[tuple[_Rule, str | None]]]] = {}
        owners: dict[str, set[str]] = {}
        kept = list(rows)
        for number, prefix in enumerate(("", _PASSED_ON)):
            for order, (row, servers) in enumerate(kept):
                rule = _Rule(
                    order + number * len(kept),
                    row,
                    servers,
                    location,
                    _path(row, prefix),
                    prefix + row.path,
                    prefix + row.since if row.since else None,
                    prefix + row.unless if row.unless else None,
                )
                if row.reader == "server_timing":
                    header, metric, key = split_metric(row.path)
                    rules = self._metrics.setdefault(prefix + header, {})
                    rules.setdefault(metric, []).append((rule, key))
                    continue
                for name in filter(None, (rule.key, rule.since)):
                    owners.setdefault(name, set()).update(servers)
                if row.maps_to != "none":
                    self._plain.setdefault(rule.key, []).append(rule)
        # A key that one server alone has says who it is.
        self._unique: dict[str, frozenset[str]] = {
            server: frozenset(name for name, of in owners.items() if of == {server})
            for server in set().union(*owners.values())
        }
        self.names = frozenset(self._plain) | frozenset(self._metrics)

    def read(self, fields: Mapping[str, str]) -> list[Reading]:
        """What the fields tell. Names in lower case, repeated lines joined."""
        found: list[tuple[int, Reading]] = []
        for name in self.names.intersection(fields):
            rules = self._plain.get(name)
            if rules is not None:
                for rule in rules:
                    value = _reading(rule, fields, self._server(rule, fields))
                    if value is not None:
                        found.append((rule.order, value))
            metrics = self._metrics.get(name)
            if metrics is not None and isinstance(fields[name], str):
                for metric in parse_server_timing(fields[name]):
                    for rule, key in metrics.get(metric.name, ()):
                        raw = metric.duration_ms if key is None else _from_query(metric.description, key)
                        value = _reading(rule, {rule.key: raw}, self._server(rule, fields))
                        if value is not None:
                            found.append((rule.order, value))
        return _settled(found)

    def _server(self, rule: _Rule, fields: Mapping[str, str]) -> str:
        for server in rule.servers[:-1]:
            if not self._unique[server].isdisjoint(fields):
                return server
        return rule.servers[-1]


def _path(row: TimingRow, prefix: str = "") -> str:
    if row.since is not None:
        return f"{prefix}{row.path} - {prefix}{row.since}"
    return prefix + row.path


def _from_query(text: str | None, key: str) -> str | None:
    """One value of ``?a=1&b=2``, as Cloudflare writes descriptions."""
    for pair in (text or "").removeprefix("?").split("&"):
        name, _, value = pair.partition("=")
        if name == key:
            return value
    return None


# ------------------------------------------------------------------------------------------------------------------- JSON


class _Group(NamedTuple):
    """The rules of one object: how to come to it from the value of its root key, and its leaves."""

    steps: tuple[tuple[str, bool], ...]
    """Keys on the way; True where the key holds a list, each of whose elements is meant."""
    leaves: dict[str, list[_Rule]]


class _Json:
    """Paths in the JSON of one location, compiled."""

    def __init__(self, rows: Iterable[tuple[TimingRow, tuple[str, ...]]], location: str) -> None:
        self._own: dict[str, list[_Rule]] = {}
        self._groups: dict[tuple[str, bool], dict[tuple[tuple[str, bool], ...], _Group]] = {}
        roots: dict[str, None] = {}
        for order, (row, servers) in enumerate(rows):
            *steps, leaf = ((key.removesuffix("[]"), key.endswith("[]")) for key in row.path.split("."))
            siblings = (path.rpartition(".")[2] if path else None for path in (row.since, row.unless))
            rule = _Rule(order, row, servers, location, _path(row), leaf[0], *siblings)
            if row.maps_to == "none":
                continue
            if steps:
                groups = self._groups.setdefault(steps[0], {})
                group = groups.setdefault(tuple(steps[1:]), _Group(tuple(steps[1:]), {}))
                group.leaves.setdefault(rule.key, []).append(rule)
                roots[steps[0][0]] = None
            else:
                self._own.setdefault(rule.key, []).append(rule)
                roots.update(dict.fromkeys(name for name in (rule.key, rule.since, rule.unless) if name))
        self._names = tuple(roots)
        self._by_root: dict[str, list[tuple[bool, _Group]]] = {}
        for (root, each), by_steps in self._groups.items():
            self._by_root.setdefault(root, []).extend((each, group) for group in by_steps.values())
        fields = [(f"f{number}", Any, None) for number in range(len(self._names))]
        names = {f"f{number}": name for number, name in enumerate(self._names)}
        # No garbage collection: it lives for one call of `read`, and what JSON gives has no cycles.
        shape: Any = msgspec.defstruct("Roots", fields, rename=names, gc=False)
        self._decode = msgspec.json.Decoder(shape).decode
        # Nearly every answer has a `usage` with nothing but counts in it. So the first look goes one level deeper: an
        # object that has none of the keys that matter is equal to none at all, and no Python was run.
        glance: Any = msgspec.defstruct(
            "Glance", [(name, *self._leaves(names[name])) for name, _, _ in fields], rename=names, gc=False
        )
        self._glance = msgspec.json.Decoder(glance).decode
        self._nothing = glance()

    def _leaves(self, root: str) -> tuple[Any, Any]:
        """Type and default of a root key's value in the first look: an object of the keys that matter, where that is all."""
        groups = self._by_root.get(root, [])
        if root in self._own or any(each or group.steps for each, group in groups):
            return Any, None
        keys = dict.fromkeys(key for _, group in groups for key in group.leaves)
        fields = [(f"k{number}", Any, None) for number in range(len(keys))]
        rename = {f"k{number}": key for number, key in enumerate(keys)}
        shape: Any = msgspec.defstruct("Leaves", fields, rename=rename, frozen=True, gc=False)
        return shape, shape()

    def read(self, texts: Sequence[bytes]) -> list[Reading]:
        """What the texts tell; of several, the last that has a value."""
        found: dict[int, Reading] = {}
        for text in reversed(texts):
            if text[:1] == b"[":  # `[DONE]`, a list of embeddings: nothing to read, and an error to decode
                continue
            try:
                if self._glance(text) == self._nothing:
                    continue
            except (msgspec.MsgspecError, ValueError, RecursionError):
                pass  # such as a null where an object was expected
            try:
                roots = self._decode(text)
            except (msgspec.MsgspecError, ValueError, RecursionError):
                continue
            names, values = self._names, msgspec.structs.astuple(roots)
            self._collect({names[index]: value for index, value in enumerate(values) if value is not None}, found)
        return _settled(list(found.items())) if found else []

    def read_object(self, value: Mapping[str, Any]) -> list[Reading]:
        """What a decoded object tells."""
        found: dict[int, Reading] = {}
        self._collect(value, found)
        return _settled(list(found.items()))

    def _collect(self, roots: Mapping[str, Any], found: dict[int, Reading]) -> None:
        for root, value in roots.items():
            own = self._own.get(root)
            if own is not None:
                _take(own, roots, found)
            for each, group in self._by_root.get(root, ()):
                # The commonest by far is an object right there: a `usage` with nothing but counts in it.
                right_there = not each and not group.steps and isinstance(value, dict)
                for holder in (value,) if right_there else _reach(value, each, group.steps):
                    if not group.leaves.keys().isdisjoint(holder):
                        for key, rules in group.leaves.items():
                            if key in holder:
                                _take(rules, holder, found)


def _take(rules: list[_Rule], holder: Mapping[str, Any], found: dict[int, Reading]) -> None:
    for rule in rules:
        if rule.order not in found:  # else a later event told it, or an earlier element of the same list
            value = _reading(rule, holder, rule.servers[-1])
            if value is not None:
                found[rule.order] = value


def _reach(value: Any, each: bool, steps: tuple[tuple[str, bool], ...]) -> list[dict[str, Any]]:
    if not steps and not each:
        return [value] if isinstance(value, dict) else []
    here = _elements(value) if each else [value]
    for key, in_list in steps:
        here = [item[key] for item in here if isinstance(item, dict) and key in item]
        if in_list:
            here = [element for item in here for element in _elements(item)]
    return [item for item in here if isinstance(item, dict)]


def _elements(value: Any) -> list[Any]:
    return value[:_MOST_ELEMENTS] if isinstance(value, list) else []


# ----------------------------------------------------------------------------------------------------------------- values


def _reading(rule: _Rule, holder: Mapping[str, Any], server: str) -> Reading | None:
    row = rule.row
    if rule.unless is not None and rule.unless in holder:
        return None
    raw = _trimmed(holder[rule.key])
    slack = 0
    duration: int | None = None
    if rule.since is not None:
        begin = _trimmed(holder.get(rule.since))
        last, first = units.stamp_ns(raw, row.unit), units.stamp_ns(begin, row.unit)
        if last is None or first is None:
            return None
        duration = units.to_ns(last - first, "ns")
        slack = max(units.slack_ns(raw, row.unit), units.slack_ns(begin, row.unit))
        raw = f"{raw} - {begin}"
    elif row.maps_to in DURATION_MAPS:
        duration = units.to_ns(raw, row.unit)
        slack = units.slack_ns(raw, row.unit)
    elif row.unit == "string":
        if not isinstance(raw, str) or not raw or not raw.isprintable():
            return None
        raw = raw[:_MOST_TEXT]
    elif row.unit in units.STAMPS:
        if units.stamp_ns(raw, row.unit) is None:
            return None
    elif row.unit in units.DURATIONS:
        if units.to_ns(raw, row.unit) is None:
            return None
    elif units.number(raw) is None or (type(raw) is int and raw >= 1 << 63):
        return None
    if row.maps_to in DURATION_MAPS and (duration is None or (duration == 0 and row.maps_to in _ZERO_IS_MISSING)):
        return None
    return Reading(server, row.maps_to, duration, raw, rule.path, rule.location, row.window, slack, row.adds)


def _trimmed(value: Any) -> Any:
    return value.strip(" \t") if isinstance(value, str) else value


def _settled(found: list[tuple[int, Reading]]) -> list[Reading]:
    """In the order of the tables, and of what a server tells twice in one place the first."""
    if len(found) > 1:
        found.sort(key=lambda pair: pair[0])
        seen: set[tuple[str, str]] = set()
        kept: list[Reading] = []
        for _, reading in found:
            if reading.maps_to in _SINGLE and not reading.adds:
                key = (reading.server, reading.maps_to)
                if key in seen:
                    continue
                seen.add(key)
            kept.append(reading)
        return kept[:_MOST_READINGS]
    return [found[0][1]] if found else []


# ---------------------------------------------------------------------------------------------------------------- readers


class Readers:
    """Everything that is known of servers' own times, ready to read answers. Never raises for what a server sent.

    Of several servers that write the same key, a reading is named after the first that has another key of its own in the
    answer (``x-api-call-start``: Together; ``x-validation-time``: TGI), else after the most general (``envoy``).

    Args:
        more: tables of others, from hooks. At a path that two of them have, and that is ours too, the last one counts.

    Raises:
        ConfigurationError: something in ``more`` is no :class:`~spanwire.timing.TimingReader`.
    """

    choose = staticmethod(choose)
    is_edge = staticmethod(is_edge)

    def __init__(self, more: Sequence[TimingReader] = ()) -> None:
        table = _Table(more)
        self._unary_headers = _Fields(table.of("header", False), "header")
        self._stream_headers = _Fields(table.of("header", True), "header")
        self._unary_trailers = _Fields(table.of("trailer", False), "trailer")
        self._stream_trailers = _Fields(table.of("trailer", True), "trailer")
        # gRPC's initial metadata are the headers of its answer, and Envoy writes into both. Taken as a stream's, since
        # nobody waits with them for the end.
        initial = list(table.of("initial_metadata", True))
        paths = {row.path for row, _ in initial}
        initial += [pair for pair in table.of("header", True) if pair[0].path not in paths]
        self._initial = _Fields(initial, "initial_metadata")
        self._bodies = _Json(table.of("body", False), "body")
        self._events = _Json(table.of("event", True), "event")
        self._jobs = _Json(table.of("job", False), "job")

    def read(
        self,
        *,
        headers: Mapping[str, str],
        streamed: bool,
        events: Sequence[bytes] = (),
        body: bytes | None = None,
        trailers: Mapping[str, str] = _EMPTY,
    ) -> list[Reading]:
        """What an answer tells, in no order of worth: all of it.

        Args:
            headers: names in lower case, repeated lines joined with ``", "``.
            streamed: what the answer was, by its content type, whatever was asked for.
            events: the JSON of the last events of a stream, from the one with the finish reason on.
            body: the JSON of an answer that was no stream.
            trailers: as headers.
        """
        readings: list[Reading] = []
        if events:
            readings += self._events.read(events)
        if body is not None:
            readings += self._bodies.read((body,))
        if trailers:
            readings += (self._stream_trailers if streamed else self._unary_trailers).read(trailers)
        fields = self._stream_headers if streamed else self._unary_headers
        if not fields.names.isdisjoint(headers):
            readings += fields.read(headers)
        return readings

    def read_job(self, job: Mapping[str, Any]) -> list[Reading]:
        """What the status or result of a job tells, decoded from its JSON."""
        return self._jobs.read_object(job)

    def read_metadata(self, initial: Mapping[str, str], trailing: Mapping[str, str]) -> list[Reading]:
        """What gRPC's metadata tell. After an abort the initial ones are empty, and the trailing ones are there."""
        readings = self._stream_trailers.read(trailing) if trailing else []
        if not self._initial.names.isdisjoint(initial):
            readings += self._initial.read(initial)
        return readings
