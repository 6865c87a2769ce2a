"""PURE: how the wait for an answer divides between network, server queue and model.

The client sees four moments: the request was sent, the first byte came, the first content came (of an answer that is not
streamed: its body), the last chunk came. What lies between them is explained by what is known, the best first:

1. **The server's total**: the rest of its window is ``network``; what queue and model leave of it is ``unattributed``.
2. **Its queue and its model time**, without a total: the rest of the window is ``network``, unless the minimum round trip
   shows that most of it cannot be. Then the server has done what it did not count: reading the request, cutting it into
   tokens, waiting for the first byte to be written. That part is ``unattributed``.
3. **Some parts of it**: they stand as reported. ``network`` comes from what a gateway or the headers of a stream say,
   whose window ends with the headers, else from the minimum round trip. The rest is estimated, or ``unattributed``.
4. **Nothing**: ``network`` is the minimum round trip, ``model`` the rest of the wait, both estimated. Where the schema
   has a word for it, the time until the server said that it has begun, less the round trip, is its ``queue``.

Readings that do not fit into their window are refused and named, and the next best explains the wait.
"""

from __future__ import annotations

from typing import NamedTuple

from .marks import AttemptRecord, Reported
from .sources import WEAKNESS, Piece

__all__ = ["Explained", "explain"]


#: As many minimum round trips may lie in what the server's parts leave, for all of it to be the network's: room for jitter,
#: of half of a round trip. Our own choice.
_ROUND_TRIPS = 1.5


#: A shorter wait for the server's word, in ns, is its work on the request and no queue. Our own choice.
_LEAST_QUEUE_NS = 1_000_000


#: By so much, in ns, may a reading exceed its window: rounding of some values to whole milliseconds. A value that was cut
#: off is too small, never too large, so whole seconds get no second.
_MOST_OVER_NS = 10_000_000


class Explained(NamedTuple):
    """The pieces of the wait, the names of readings that did not fit, and whether the prefill has the queue in it."""

    pieces: list[Piece]
    refused: tuple[str, ...] = ()
    prefill_includes_queue: bool = False


class _Waits(NamedTuple):
    """The windows, in ns: from the request's bytes to the headers, to the first content, and to the end; from the first
    content to the last chunk; and of a body that is not streamed. What the consumer had stopped is in none of them."""

    headers_ns: int
    first_ns: int
    whole_ns: int
    decode_ns: int
    receive_ns: int
    rtt_ns: int | None
    path_ns: int | None  # the round trip as far as it is known to be the whole way: not where it ends at an edge
    started_ns: int  # to the server's word that it has begun; 0 if there was none, or it came with the content
    streamed: bool
    answered: bool  # with an answer, and not with an error
    began: bool  # and something of it came


class _Told(NamedTuple):
    """What was reported and fits; None = unknown. ``network_ns`` follows from it."""

    queue_ns: int | None = None
    prefill_ns: int | None = None
    decode_ns: int | None = None
    model_ns: int | None = None
    total_ns: int | None = None
    network_ns: int | None = None
    network_to_end: bool = False

    @property
    def whole_model_ns(self) -> int | None:
        """All that the model took, if that is known; the parts say more than the sum."""
        if self.prefill_ns is not None and self.decode_ns is not None:
            return self.prefill_ns + self.decode_ns
        return self.model_ns

    @property
    def known_ns(self) -> int:
        model_ns = self.whole_model_ns
        return (self.queue_ns or 0) + ((self.prefill_ns or 0) + (self.decode_ns or 0) if model_ns is None else model_ns)


_NOTHING = _Told()


def explain(attempt: AttemptRecord, *, answered: bool) -> Explained:
    """Divide the wait. ``answered``: it was an answer, not an error status."""
    if not attempt.marks.sent_ns or not attempt.marks.first_byte_ns:
        return Explained([])
    waits = _waits(attempt, answered=answered)
    reported = attempt.reported
    if reported is None:
        return Explained(_divide(_NOTHING, waits))
    refused: list[str] = []
    told = _fitting(reported, waits, refused)
    pieces = _divide(told, waits)
    if reported.queue_estimated:  # and so is what it leaves of the wait
        pieces = [
            (segment, part, duration_ns, "estimated" if segment in ("queue", "network") else source)
            for segment, part, duration_ns, source in pieces
        ]
    _trim(pieces, waits.whole_ns)
    includes_queue = told.prefill_ns is not None and reported.prefill_ns is None and reported.queue_ns is None
    return Explained(pieces, tuple(refused), includes_queue)


def _waits(attempt: AttemptRecord, *, answered: bool) -> _Waits:  # for every call: no look-up twice
    marks, streamed, connection = attempt.marks, attempt.streamed, attempt.connection
    sent_ns, first_byte_ns, paused_ns, rtt_ns = marks.sent_ns, marks.first_byte_ns, marks.paused_ns, marks.rtt_ns
    content_ns, end_ns = marks.first_content_ns, marks.last_chunk_ns if streamed else marks.last_byte_ns
    if streamed and paused_ns and end_ns < marks.resumed_ns:
        end_ns = marks.resumed_ns  # what is taken off below is inside the window: nothing may have come after the pause
    until_ns = first_byte_ns
    if answered:
        until_ns = (content_ns or end_ns) if streamed else (marks.first_chunk_ns or first_byte_ns)
    began = until_ns > 0
    # How long the server's work may have lasted: to the first content, to the body, or, of an error, to its first byte.
    until_ns = max(until_ns, first_byte_ns)
    return _Waits(
        first_byte_ns - sent_ns,
        until_ns - sent_ns,
        max(until_ns, end_ns) - sent_ns - paused_ns,
        end_ns - content_ns - paused_ns if content_ns and streamed and answered else 0,
        0 if streamed else end_ns - until_ns,
        rtt_ns,
        None if connection is not None and connection.rtt_scope == "edge" else rtt_ns,
        marks.started_ns - sent_ns if sent_ns < marks.started_ns < (content_ns or 0) else 0,
        streamed,
        answered,
        began,
    )


def _fitting(reported: Reported, waits: _Waits, refused: list[str]) -> _Told:
    """What of the readings fits into the windows, and what it leaves to the network."""
    slack_ns, total_ns = reported.slack_ns, reported.total_ns
    over_ns = min(slack_ns, _MOST_OVER_NS)
    told = _parts(reported, refused) if waits.answered else _Told(reported.queue_ns)
    if total_ns is not None:
        window_ns = waits.headers_ns if reported.total_to_headers else waits.whole_ns
        if told.known_ns <= total_ns + slack_ns and total_ns <= window_ns + over_ns:
            network_ns = max(window_ns - total_ns, 0)
            return told._replace(total_ns=total_ns, network_ns=network_ns, network_to_end=not reported.total_to_headers)
        refused.append("server_total")
    if told.known_ns > waits.whole_ns + over_ns:
        refused.append("parts")
        told = _NOTHING
    if told.queue_ns is not None and told.whole_model_ns is not None:
        network_ns = max(waits.whole_ns - told.known_ns, 0)
        if waits.path_ns is None or network_ns - waits.receive_ns <= waits.path_ns * _ROUND_TRIPS:
            return told._replace(network_ns=network_ns, network_to_end=True)
    if waits.streamed and told.whole_model_ns is None:
        first_ns = (told.queue_ns or 0) + (told.prefill_ns or 0)
        if first_ns > waits.first_ns + over_ns or (told.decode_ns or 0) > waits.decode_ns + over_ns:
            refused.append("parts")
            told = _NOTHING
        elif told.prefill_ns is not None and (told.queue_ns is not None or reported.ttft_ns is not None):
            network_ns = max(waits.first_ns - first_ns, 0)  # all is known up to the first token
            if reported.ttft_ns is not None or waits.path_ns is None or network_ns <= waits.path_ns * _ROUND_TRIPS:
                return told._replace(network_ns=network_ns)
    outer_ns = reported.outer_ns
    if outer_ns is not None:
        window_ns = waits.headers_ns if reported.outer_to_headers else waits.whole_ns
        if outer_ns <= window_ns + over_ns:
            network_ns = max(window_ns - outer_ns, 0)
            return told._replace(network_ns=network_ns, network_to_end=not reported.outer_to_headers)
        refused.append("gateway")
    return told


def _parts(reported: Reported, refused: list[str]) -> _Told:
    """The parts of the server's time, with those that follow from its time to the first token."""
    queue_ns, prefill_ns, decode_ns = reported.queue_ns, reported.prefill_ns, reported.decode_ns
    ttft_ns, total_ns = reported.ttft_ns, reported.total_ns
    if ttft_ns is not None:
        if prefill_ns is None:
            if ttft_ns >= (queue_ns or 0):
                prefill_ns = ttft_ns - (queue_ns or 0)
            else:
                refused.append("ttft")
        if prefill_ns is not None and decode_ns is None and total_ns is not None:
            decode_ns = total_ns - ttft_ns if total_ns >= ttft_ns else None
    return _Told(queue_ns, prefill_ns, decode_ns, reported.model_ns)


def _divide(told: _Told, waits: _Waits) -> list[Piece]:
    """The pieces. One of 0 or less is left out by whoever adds them up."""
    pieces: list[Piece] = []
    queue_ns = known_ns = 0
    prefill_ns, decode_ns, model_ns, network_ns = told.prefill_ns, told.decode_ns, told.model_ns, told.network_ns
    if told is not _NOTHING:  # which is what most servers say
        queue_ns, model_ns, known_ns = told.queue_ns or 0, told.whole_model_ns, told.known_ns
        pieces.append(("queue", "server", queue_ns, "reported"))
    if network_ns is not None:
        pieces.append(("network", "to_and_back", network_ns, "reported"))
    elif waits.rtt_ns is not None:
        before_ns = queue_ns + (prefill_ns or 0) if waits.streamed else known_ns
        if waits.rtt_ns <= waits.first_ns - before_ns and waits.rtt_ns <= waits.whole_ns - known_ns:
            network_ns = waits.rtt_ns
            pieces.append(("network", "to_and_back", network_ns, "estimated"))
            if told is _NOTHING and waits.started_ns:
                waited_ns = waits.started_ns - network_ns
                queue_ns = waited_ns if waited_ns >= _LEAST_QUEUE_NS else 0
                pieces.append(("queue", "server", queue_ns, "estimated"))
    if not waits.answered:
        return pieces
    if not waits.streamed and not told.network_to_end:
        pieces.append(("network", "receive", waits.receive_ns, "estimated"))
    if model_ns is not None and (prefill_ns is None or decode_ns is None):
        pieces.append(("model", "", model_ns, "reported"))  # undivided; one part alone would say less
        return pieces
    if prefill_ns is not None:
        pieces.append(("model", "prefill", prefill_ns, "reported"))
    if decode_ns is not None:
        pieces.append(("model", "decode", decode_ns, "reported"))
    if not waits.streamed:
        if prefill_ns is None and decode_ns is None:
            if told.total_ns is not None:
                pieces.append(("model", "", told.total_ns - queue_ns, "estimated"))
            elif network_ns is not None:
                pieces.append(("model", "", waits.first_ns - network_ns - queue_ns, "estimated"))
        return pieces
    if prefill_ns is None and network_ns is not None and waits.began:
        pieces.append(("model", "prefill", waits.first_ns - network_ns - queue_ns, "estimated"))
    if decode_ns is None:
        pieces.append(("model", "decode", waits.decode_ns, "estimated"))
    return pieces


def _trim(pieces: list[Piece], whole_ns: int) -> None:
    """Cut what the pieces exceed their window by, the weakest and largest first: what rounding and the slack left over,
    or network that fell into the decoding, of which the estimate knows nothing."""
    excess_ns = sum(max(piece[2], 0) for piece in pieces) - whole_ns
    for index in sorted(range(len(pieces)), key=lambda n: (-WEAKNESS[pieces[n][3]], -pieces[n][2])):
        if excess_ns <= 0:
            return
        segment, part, duration_ns, source = pieces[index]
        cut_ns = min(excess_ns, max(duration_ns, 0))
        pieces[index] = (segment, part, duration_ns - cut_ns, source)
        excess_ns -= cut_ns
