"""PURE: draws a timeline as text, at most 80 columns wide."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .errors import visible

if TYPE_CHECKING:
    from .timeline import Timeline

__all__ = ["draw", "rank"]

_BAR = 36
_EIGHTHS = " ▏▎▍▌▋▊▉"
#: Parts in the order in which they happen.
_ORDER = (
    ("queue", "local"),
    ("queue", "backoff"),
    ("handshake", "shared"),
    ("handshake", "connect"),
    ("handshake", "dns"),
    ("handshake", "tcp"),
    ("handshake", "proxy"),
    ("handshake", "tls"),
    ("handshake", "upgrade"),
    ("client", "encode"),
    ("network", "send"),
    ("network", "backlog"),
    ("network", "to_and_back"),
    ("queue", "server"),
    ("model", ""),
    ("model", "prefill"),
    ("model", "decode"),
    ("network", "receive"),
    ("client", "decode"),
    ("client", "waiting"),
    ("unattributed", ""),
)


def rank(key: tuple[str, str]) -> int:
    """Where a piece stands in the waterfall; what has no place of its own, at the end."""
    return _ORDER.index(key) if key in _ORDER else len(_ORDER) - 1


def _bar(begin: float, end: float) -> str:
    """A bar from ``begin`` to ``end`` (0 to 1 of the width), at least one eighth of a cell, in eighths at its end."""
    first = min(int(begin * _BAR), _BAR - 1)
    eighths = max(1, round((end * _BAR - first) * 8))
    full, rest = divmod(eighths, 8)
    text = "█" * full + (_EIGHTHS[rest] if rest else "")
    return " " * first + text[: _BAR - first]


def _ms(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:9.1f}" if value >= 100 else f"{value:9.2f}"


def _span(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def _head(timeline: Timeline) -> Iterator[str]:
    what = f"{timeline.operation} {timeline.model}"
    where = f"{timeline.endpoint} over {timeline.transport}"
    outcome: str = timeline.outcome
    if timeline.error_type:
        outcome = f"{outcome} ({timeline.error_type})"
    yield _cut(f"{what}  {where}")
    use = timeline.connection
    if use is None:
        connection = "no connection"
    elif use.reused:
        idle = f" after {_span(use.idle_s)} idle" if use.idle_s is not None else ""
        connection = f"connection {use.id} re-used{idle}"
    else:
        connection = f"connection {use.id} new"
    if use is not None and use.protocol:
        connection += f", {use.protocol}"
    if use is not None and use.engine not in (None, "spanwire"):
        connection += f" by {use.engine}"
    if use is not None and use.rtt_scope == "edge":
        connection += ", round trip to the edge"
    yield _cut(f"{outcome} in {timeline.total_s * 1e3:.1f} ms  {connection}")
    firsts = [
        f"{label} {value * 1e3:.1f} ms"
        for label, value in (
            ("first byte", timeline.first_byte_s),
            ("chunk", timeline.first_chunk_s),
            ("content", timeline.first_content_s),
        )
        if value is not None
    ]
    if firsts:
        yield _cut(", ".join(firsts))
    timing = timeline.server_timing
    if timing is not None:
        said = ", ".join(f"{name} {_number(value)}" for name, value in timing["raw"].items())
        refused = timing.get("refused")
        if refused:
            said = f"what does not fit ({', '.join(refused)}): {said}"
        elif timing.get("prefill_includes_queue"):
            said = f"prefill with queue: {said}"
        yield _cut(f"{timing['dialect']} says {said}")


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _cut(line: str) -> str:
    # A model's name may be what a proxy's client sent, and a reading what the server did: neither is to steer a terminal, or
    # to begin a line.
    line = visible(line).replace("\n", "\\n").replace("\t", "\\t")
    return line if len(line) <= 80 else line[:79] + "…"


def draw(timeline: Timeline) -> str:
    """The waterfall: one line for each part, in order, each bar beginning where the one before ended.

    Estimated parts have no place of their own in time, only a length: the bars show how the total divides.
    """
    lines = list(_head(timeline))
    attempts = timeline.to_dict()["attempts"]
    if len(attempts) > 1:
        lines.append(
            _cut(f"{len(attempts)} attempts: " + ", ".join(a.get("error_type", a["outcome"]) for a in attempts))
        )
    total_ns = timeline.total_s * 1e9
    lines.append(f"{'':21}{'ms':>9}  {'0':<{_BAR - 1}}{'':1} source")
    begin = 0
    for (segment, part), (duration_ns, source) in sorted(timeline.pieces.items(), key=lambda row: rank(row[0])):
        label = f"{segment} {part}".rstrip()
        bar = _bar(begin / total_ns, (begin + duration_ns) / total_ns)
        lines.append(f"{label[:21]:<21}{_ms(duration_ns / 1e9)}  {bar:<{_BAR}} {source}")
        begin += duration_ns
    lines.append(f"{'total':<21}{_ms(timeline.total_s)}")
    return "\n".join(lines)
