"""PURE: which of a server's readings answers which question. All are kept as raw values; none is overwritten.

What was measured at the end of the answer, by the server itself, beats what was measured before it and by others::

    body or last event > job object > trailer > header of a whole answer > header of a stream > gateway

Headers of a stream were written before its first token: of them only the queue is what it says. A total or a time to first
token in them is an outer bound of the time to the headers, and never model time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..timeline.marks import Reported

if TYPE_CHECKING:
    from .reading import Reading

__all__ = ["choose"]

_RANKS = {"body": 0, "event": 0, "job": 1, "trailer": 2, "header": 3, "initial_metadata": 4}
_STREAM_HEADER = 4
#: 0 here: the origin was not asked, so nothing is known of whoever answered in its place.
_NOT_ASKED = "server-timing[cfOrigin].dur"
#: Questions that a reading can answer, and the field of :class:`Reported` with the answer.
_FIELDS = {
    "queue": "queue_ns",
    "prefill": "prefill_ns",
    "decode": "decode_ns",
    "model_total": "model_ns",
    "ttft": "ttft_ns",
    "server_total": "total_ns",
}


def choose(readings: Sequence[Reading], *, streamed: bool) -> Reported | None:
    """One value for each question; None where there is no reading at all.

    Args:
        readings: as the readers found them.
        streamed: whether the answer was a stream of events (``text/event-stream`` and its kind), whatever was asked for.
    """
    if not readings:
        return None
    best: dict[str, tuple[int, list[Reading]]] = {}
    outer: list[Reading] = []
    gateways: list[Reading] = []
    for reading in readings:
        if reading.duration_ns is None:
            continue
        rank = _RANKS.get(reading.location, _STREAM_HEADER)
        if rank == _RANKS["header"] and streamed:
            rank = _STREAM_HEADER
        if reading.maps_to == "gateway":
            if reading.duration_ns or not reading.path.endswith(_NOT_ASKED):
                gateways.append(reading)
        elif reading.maps_to not in _FIELDS:
            continue
        elif rank == _STREAM_HEADER and reading.maps_to != "queue":
            if reading.maps_to in ("server_total", "ttft"):
                outer.append(reading)
        else:
            known = best.get(reading.maps_to)
            if known is None or rank < known[0]:
                best[reading.maps_to] = (rank, [reading])
            elif rank == known[0]:
                known[1].append(reading)
    values: dict[str, Any] = {}
    used: list[Reading] = []
    for question, (_, found) in best.items():
        summed = [found[0], *(more for more in found[1:] if more.adds and found[0].adds)]
        values[_FIELDS[question]] = sum(reading.duration_ns or 0 for reading in summed)
        used += summed
        if question == "server_total":
            values["total_to_headers"] = summed[0].window == "to_headers"
    # Gateways nest, so the outermost is the largest; the sum would count one inside the other twice.
    bound = max(outer or gateways, key=lambda reading: reading.duration_ns or 0, default=None)
    if bound is not None:
        values["outer_ns"] = bound.duration_ns
        values["outer_to_headers"] = bound.window != "to_end"
        used.append(bound)
    server = min(used or readings, key=lambda reading: _RANKS.get(reading.location, _STREAM_HEADER)).server
    slack_ns = sum(reading.slack_ns for reading in used)
    return Reported(server=server, slack_ns=slack_ns, raw=_raw(readings), **values)


def _raw(readings: Sequence[Reading]) -> dict[str, Any]:
    """By the last name of its path, or by the whole path where two share a name."""
    raw: dict[str, Any] = {}
    for reading in readings:
        name = reading.path.rpartition(".")[2] if reading.location in ("body", "event", "job") else reading.path
        raw[reading.path if name in raw else name] = reading.raw
    return raw
