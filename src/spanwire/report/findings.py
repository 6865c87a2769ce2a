"""PURE: what stands out, in words. Each finding names its number, and what to look at."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from .summary import ALL, Stats, Summary, shares

__all__ = ["Finding", "count", "duration", "findings", "percent"]

#: Below so many calls nothing is said about shares: one call would be ten percent.
_ENOUGH = 10
#: Shares from which on something is worth a sentence.
_COLD = 0.1
_DEAR = 0.01  # of a call: a handshake with a server on this machine is nothing to act on
_UNATTRIBUTED = 0.1
_QUEUE = 0.05
_BACKOFF = 0.02
_WAITING = 0.05
_FAILED = 0.01
_RETRIED = 0.01
#: p95 so many times the median is a long tail.
_TAIL = 5.0


class Finding(msgspec.Struct, frozen=True):
    """One sentence or two. ``serious``: something to act on; else something to know."""

    text: str
    serious: bool


def findings(summary: Summary) -> list[Finding]:
    """What stands out among the calls of a report, what to act on first; one sentence at least."""
    every = summary.all
    main = summary.completed or every
    found = [*_failures(every)]
    if main.calls >= _ENOUGH:
        found += [*_connections(main), *_segments(main), *_tails(summary)]
    found += [*_sources(main)]
    if not any(finding.serious for finding in found):
        few = f" among so few calls ({count(every.calls, 'call')})" if every.calls < _ENOUGH else ""
        found.insert(0, Finding(f"Nothing stands out{few}.", serious=False))
    return sorted(found, key=lambda finding: not finding.serious)


def _failures(every: Stats) -> Iterator[Finding]:
    failed = sum(every.outcomes.get(name, 0) for name in ("error", "timeout"))
    if failed and failed >= _FAILED * every.calls:
        kinds = ", ".join(f"{number:,} {name}" for name, number in list(every.errors.items())[:3])
        yield Finding(
            f"{percent(failed / every.calls)} of calls failed ({failed:,} of {every.calls:,}{': ' if kinds else ''}{kinds}).",
            serious=True,
        )
    left = every.calls - failed - every.outcomes.get("completed", 0)
    if left and left >= _FAILED * every.calls:
        kinds = ", ".join(
            f"{number:,} {name.replace('_', ' ')}"
            for name, number in every.outcomes.items()
            if name not in {"completed", "error", "timeout"}
        )
        yield Finding(f"{percent(left / every.calls)} of calls were left before their end ({kinds}).", serious=False)
    if every.retried and every.retried >= _RETRIED * every.calls:
        yield Finding(
            f"{percent(every.retried / every.calls)} of calls needed more than one attempt ({every.retried:,}).",
            serious=True,
        )


def _connections(stats: Stats) -> Iterator[Finding]:
    known = stats.cold + stats.warm
    if not known or stats.cold < _COLD * known:
        return
    handshake = stats.cold_times.get("handshake")
    cost = f": handshakes cost {duration(handshake.p50)} at the median" if handshake else ""
    yield Finding(
        f"{percent(stats.cold / known)} of calls opened a new connection ({stats.cold:,} of {known:,}){cost}. "
        "Share one manager, and compare the idle time with the other side's keep-alive.",
        serious=handshake is not None and handshake.p50 >= _DEAR * stats.cold_times["total"].p50,
    )


def _segments(stats: Stats) -> Iterator[Finding]:
    share = shares(stats)
    parts = {(row.segment, row.part): row for row in stats.rows}
    unknown = share.get("unattributed", 0.0)
    if unknown >= _UNATTRIBUTED:
        yield Finding(
            f"{percent(unknown)} of the time is unattributed: no honest rule says where it went. A proxy in between is "
            "the usual reason.",
            serious=True,
        )
    for part, limit, words in (
        (
            "local",
            _QUEUE,
            "waiting for a slot or a connection on this side: the client's own limits are the bottleneck",
        ),
        ("server", _QUEUE, "waiting in the server's queue"),
        ("backoff", _BACKOFF, "waiting between failed attempts"),
    ):
        row = parts.get(("queue", part))
        if row is not None and row.sum_s >= limit * stats.sum_s:
            yield Finding(
                f"{percent(row.sum_s / stats.sum_s)} of the time went into {words} ({duration(row.spread.p50)} at the "
                f"median of the {count(row.spread.n, 'call')} that had it).",
                serious=True,
            )
    row = parts.get(("client", "waiting"))
    if row is not None and row.sum_s >= _WAITING * stats.sum_s:
        yield Finding(
            f"{percent(row.sum_s / stats.sum_s)} of the time an answer was there and the program did not fetch it: the "
            "consumer is slower than the stream, or something blocks the event loop.",
            serious=True,
        )


def _tails(summary: Summary) -> Iterator[Finding]:
    """The pair of endpoint and model with the longest tail, if it is long."""
    worst: tuple[float, str] | None = None
    completed = summary.outcomes.index("completed") if "completed" in summary.outcomes else ALL
    for selection in summary.selections:
        if ALL in (selection.endpoint, selection.model) or selection.outcome != completed:
            continue
        first = selection.stats.times.get("first_content")
        if first is None or first.p95 is None or not first.p50 or first.p95 < _TAIL * first.p50:
            continue
        ratio = first.p95 / first.p50
        if worst is None or ratio > worst[0]:
            model = summary.models[selection.model] or "no model"
            words = (
                f"Time to first token of {model} at {summary.endpoints[selection.endpoint] or 'an unknown endpoint'} has "
                f"a long tail: {duration(first.p95)} at p95, {duration(first.p50)} at the median."
            )
            worst = (ratio, words)
    if worst is not None:
        yield Finding(worst[1], serious=True)


def _sources(stats: Stats) -> Iterator[Finding]:
    rows = [row for row in stats.rows if row.segment == "model" and not row.part]
    if rows and not rows[0].by_source[1]:
        yield Finding(
            "No server reported times of its own: how a wait divides between model and network is estimated from the "
            "connection's round trip.",
            serious=False,
        )
    if stats.times.get("first_content") and not stats.tokens.get("calls"):
        yield Finding("No call has a token count: token speeds are left blank.", serious=False)


# --- words --------------------------------------------------------------------------------------------------------------


def percent(share: float) -> str:
    """``38 %``; one digit below ten, never 0 for something and never 100 for less than all."""
    value = share * 100
    if 0 < value < 0.1:
        return "less than 0.1 %"
    if value == 100 or 9.95 <= value < 99.5:
        return f"{value:.0f} %"
    return f"{min(value, 99.9):.1f} %"


def duration(seconds: float) -> str:
    """Three digits with a unit: ``83 ms``, ``1.25 s``, ``4 min 10 s``."""
    if seconds >= 3600:
        return f"{int(seconds // 3600):,} h {int(seconds % 3600 // 60)} min".removesuffix(" 0 min")
    if seconds >= 60:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s".removesuffix(" 0 s")
    if seconds >= 0.9995:
        return f"{seconds:.3g} s"
    if seconds >= 0.09995:
        return f"{seconds * 1e3:.0f} ms"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-5 else f"{seconds * 1e6:.3g} us"


def count(number: int, what: str) -> str:
    """``1 call``, ``2 calls``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"
