"""Calls of all kinds, how their owners behave, how each may end, and the check of a round of them on both sides."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from opentelemetry.sdk.trace import ReadableSpan

import spanwire
from spanwire import errors
from spanwire.admission import Slots, slots_for
from spanwire.timeline import Timeline
from tests.soak.audit import Ledger, most_at_once
from tests.soak.server import LONG, PACED, TEXT, Seen
from tests.support import assert_adds_up

SEED = int(os.environ.get("SPANWIRE_SOAK_SEED", "1"))
RETRIES = spanwire.Retries(max_attempts=3, base_s=0.01, max_wait_s=0.05)
#: For answers that never come; the others must never see a limit, however busy the machine is.
SHORT_S, LONG_S = 0.2, 30.0


class Kind(NamedTuple):
    """How a call ends whose owner reads it to its end, and after how many attempts: streamed, and as a whole.

    Not counted: those that found a connection that the server had closed.
    """

    weight: float
    streamed: tuple[str, int]
    whole: tuple[str, int]
    text: str = TEXT


DONE = "completed"
KINDS = {
    "ok": Kind(20, (DONE, 1), (DONE, 1)),
    "tools": Kind(5, (DONE, 1), (DONE, 1)),
    "slow": Kind(10, (DONE, 1), (DONE, 1), "".join(PACED)),
    "long": Kind(4, (DONE, 1), (DONE, 1), "".join(LONG)),
    "late-end": Kind(4, (DONE, 1), (DONE, 1)),
    "never-end": Kind(0.5, (DONE, 1), (DONE, 1)),
    "close": Kind(4, (DONE, 1), (DONE, 1)),
    "idle-close": Kind(6, (DONE, 1), (DONE, 1)),
    "flaky": Kind(6, (DONE, 2), (DONE, 2)),
    "s400": Kind(3, ("BadRequest", 1), ("BadRequest", 1)),
    "s429": Kind(4, ("RateLimited", 3), ("RateLimited", 3)),
    "s503": Kind(4, ("Overloaded", 3), ("Overloaded", 3)),
    "drop-before": Kind(4, ("ConnectionFailed", 3), ("ConnectionFailed", 3)),
    "drop-mid": Kind(4, ("ConnectionFailed", 1), ("ConnectionFailed", 3)),
    "reset": Kind(4, ("ConnectionFailed", 1), ("ConnectionFailed", 3)),
    "stall": Kind(2, ("CallTimeout", 1), ("CallTimeout", 3)),
    "mute": Kind(2, ("CallTimeout", 3), ("CallTimeout", 3)),
    "heartbeat": Kind(2, ("CallTimeout", 3), ("CallTimeout", 3)),
    "error-event": Kind(3, ("ServerError", 1), ("ServerError", 3)),
    "error-first": Kind(3, ("ServerError", 3), ("ServerError", 3)),
    "truncated": Kind(3, ("Truncated", 1), ("ProtocolError", 1)),
    "html": Kind(2, ("ProtocolError", 1), ("ProtocolError", 1)),
}
SHORT = {"stall", "mute", "heartbeat"}
LIMITS = {
    "free": spanwire.Limits(),
    "busy": spanwire.Limits(max_concurrent=16, queue_timeout_s=LONG_S),
    "tight": spanwire.Limits(max_concurrent=4, max_queue=6, queue_timeout_s=0.03),
}
#: What the owner does: how often with a stream, how often with a whole answer.
ASYNC_ACTIONS = {
    "read": (30, 60),
    "cancel": (12, 20),
    "timeout": (5, 10),
    "cancel-at-once": (1, 2),
    "break": (8, 0),
    "raise": (5, 0),
    "aclose": (5, 0),
    "aclose-elsewhere": (6, 0),
    "drop": (6, 0),
    "drop-ring": (2, 0),
    "generator": (4, 0),
    "poll": (4, 0),
    "slowly": (2, 0),
    "total": (4, 8),
}
SYNC_ACTIONS = {
    "read": (30, 80),
    "break": (8, 0),
    "raise": (5, 0),
    "aclose": (5, 0),
    "aclose-elsewhere": (6, 0),
    "drop": (6, 0),
    "drop-ring": (2, 0),
    "total": (4, 8),
}
#: How the call may end when its owner does that, besides the ways of its kind.
LEFT = {
    "cancel": {"cancelled"},
    "timeout": {"cancelled"},
    "cancel-at-once": {"cancelled"},
    "break": {"closed_by_caller"},
    "raise": {"closed_by_caller"},
    "aclose": {"closed_by_caller"},
    "aclose-elsewhere": {"closed_by_caller"},
    "generator": {"closed_by_caller"},
    "drop": {"abandoned"},
    "drop-ring": {"abandoned"},
    "total": {"CallTimeout"},
}


_LEFT = {"cancelled", "closed_by_caller"}


class Plan(NamedTuple):
    """One call."""

    number: int
    kind: str
    streamed: bool
    action: str
    where: str
    after: int
    delay_s: float

    @property
    def model(self) -> str:
        return f"{self.kind}:{self.number}"

    @property
    def timeouts(self) -> spanwire.Timeouts:
        limit_s = SHORT_S if self.kind in SHORT else LONG_S
        total_s = self.delay_s + 0.001 if self.action == "total" else None
        return spanwire.Timeouts(connect_s=LONG_S, first_content_s=limit_s, idle_s=limit_s, total_s=total_s)

    @property
    def expected(self) -> tuple[str, int]:
        """How it ends if its owner reads it to the end and all limits allow it; after how many attempts."""
        kind = KINDS[self.kind]
        return kind.streamed if self.streamed else kind.whole


def plan(number: int, actions: Mapping[str, tuple[float, float]]) -> Plan:
    """The call of that number: always the same one, whatever others do."""
    dice = random.Random(f"{SEED}:{number}")
    kind = dice.choices(list(KINDS), [kind.weight for kind in KINDS.values()])[0]
    streamed = dice.random() < 0.7
    action = dice.choices(list(actions), [pair[0] if streamed else pair[1] for pair in actions.values()])[0]
    # What nobody has closed keeps its slot until the collector comes, and has no business where slots are few.
    where = "free" if action == "drop-ring" else dice.choices(list(LIMITS), [4, 4, 2])[0]
    delay_s = dice.choice([0.0, 0.002, 0.01, 0.04, 0.15]) * dice.random()
    return Plan(number, kind, streamed, action, where, dice.randrange(6), delay_s)


class Leaving(Exception):
    """What an owner raises in the block of his stream."""


def check_reply(plan: Plan, reply: spanwire.Reply) -> None:
    """A completed answer is whole: not a piece is missing, doubled, or from another attempt."""
    assert reply.text == KINDS[plan.kind].text, (plan, reply.text[-80:])
    if plan.kind == "tools":
        assert (reply.reasoning, len(reply.tool_calls)) == ("hmm", 1), plan


def endpoints(url: str) -> dict[str, spanwire.Endpoint]:
    async def key() -> str:
        return "sk-busy"

    keys = {"free": None, "busy": key, "tight": "sk-tight"}
    return {
        name: spanwire.Endpoint(url, api_key=keys[name], proxy=None, limits=limits, retries=RETRIES)
        for name, limits in LIMITS.items()
    }


def slots_of(found: Mapping[str, spanwire.Endpoint]) -> list[Slots]:
    return [slots for endpoint in found.values() if (slots := slots_for(endpoint)) is not None]


class Totals:
    """Counts over all rounds; for people."""

    def __init__(self) -> None:
        self.outcomes = Counter[tuple[str, str]]()
        self.ends = Counter[str]()
        self.server = Counter[str]()
        self.attempts = 0
        self.sent = 0
        self.arrived = 0
        self.unanswered = 0
        self.stale = 0
        self.queued = 0
        self.unborn = 0
        self.left_after_s: list[float] = []
        self.used = 0
        self.connections: dict[str, int] = {}  # our name of one, and the server's


def check_round(
    plans: Sequence[Plan],
    got: Mapping[int, str],
    ledger: Ledger,
    spans_of: dict[str, list[ReadableSpan]],
    seen: Sequence[Seen],
    totals: Totals,
) -> None:
    """Everything that was told about these calls, by whomever, must be the same story."""
    told: dict[str, list[Timeline]] = {}
    for timeline in ledger.timelines:
        told.setdefault(timeline.model, []).append(timeline)
    arrived: dict[str, list[Seen]] = {}
    for row in seen:
        arrived.setdefault(row.model, []).append(row)
    wrong: list[str] = []
    slots: dict[str, list[tuple[int, int]]] = {name: [] for name in LIMITS}
    for one in plans:
        timelines, own_spans = told.pop(one.model, []), spans_of.pop(one.model, [])
        rows = arrived.pop(one.model, [])
        if got[one.number] == "unborn":
            totals.unborn += 1
            assert not timelines
            assert not own_spans
            assert not rows
            continue
        assert len(timelines) == 1, (one, got[one.number], timelines)
        assert len(own_spans) == 1, (one, own_spans)
        (timeline,) = timelines
        try:
            _check_end(one, got[one.number], timeline)
            _check_attempts(one, timeline, rows, totals)
            assert_adds_up(timeline)
            attributes = own_spans[0].attributes or {}
            assert attributes["spanwire.outcome"] == timeline.outcome
            assert attributes.get("error.type") == timeline.error_type or timeline.error_type is None
            context = own_spans[0].context
            assert context is not None
            assert {row.traceparent.split("-")[2] for row in rows} <= {f"{context.span_id:016x}"}
            assert len({row.key for row in rows}) <= 1
        except AssertionError as error:
            states = [row.state for row in rows]
            wrong.append(f"{one}: got {got[one.number]}, {timeline.to_dict()}, server {states}: {error}")
        totals.outcomes[one.action, _end(timeline)] += 1
        totals.ends[_end(timeline)] += 1
        slots[one.where] += [
            (attempt.asked_ns, attempt.end_ns) for attempt in timeline._record.attempts if attempt.asked_ns
        ]
    assert not wrong, f"{len(wrong)} of {len(plans)}:\n" + "\n".join(wrong[:10])
    assert not told
    assert not spans_of
    assert not arrived
    keys = Counter(key for key, _ in {(row.key, row.model) for row in seen})
    assert max(keys.values(), default=1) == 1, "two calls had the same Idempotency-Key"
    for name, limits in LIMITS.items():
        if limits.max_concurrent is not None:
            assert most_at_once(slots[name]) <= limits.max_concurrent
    ledger.timelines.clear()


def _tell(timeline: Timeline) -> str:
    attempts = [
        f"{attempt.outcome} {attempt.error_type or ''} on {attempt.connection and attempt.connection.id} ({attempt.served}"
        f"{', sent' if attempt.marks.sent_ns else ''}{', answered' if attempt.marks.first_byte_ns else ''})"
        for attempt in timeline._record.attempts
    ]
    return f"{_end(timeline)} after {timeline.total_s:.3f} s, attempts: {'; '.join(attempts)}"


def _end(timeline: Timeline) -> str:
    return timeline.error_type or timeline.outcome


def _check_end(one: Plan, got: str, timeline: Timeline) -> None:
    end = _end(timeline)
    # Told to its owner and to everybody else alike.
    if one.action == "aclose-elsewhere" and timeline.outcome == "closed_by_caller":
        assert got in {DONE, "ConnectionFailed"}  # "was left while it was being opened"
    elif got == "left":
        assert end in {"closed_by_caller", DONE}
    elif got == "dropped":
        assert end in {"abandoned", DONE}
    else:
        assert got == end
    if end in {"QueueTimeout", "QueueFull"}:
        assert one.where == "tight"
        return
    assert timeline.outcome in {DONE, "error", "timeout", "closed_by_caller", "cancelled", "abandoned"}
    allowed = {one.expected[0], *LEFT.get(one.action, ())}
    if one.kind == "reset" and one.streamed:  # a reset takes what is on its way with it
        allowed.add("ConnectionFailed")
    assert end in allowed, f"{end} is none of {allowed}"
    if timeline.outcome in {"error", "timeout"}:
        assert issubclass(getattr(errors, timeline.error_type or ""), errors.SpanwireError)


def _check_attempts(one: Plan, timeline: Timeline, rows: list[Seen], totals: Totals) -> None:
    attempts = timeline._record.attempts
    stale = [
        number
        for number, attempt in enumerate(attempts[:-1])
        if attempt.error_type == "ConnectionFailed"
        and attempt.connection is not None
        and attempt.connection.reused
        and not attempt.marks.first_byte_ns
    ]
    sent = [attempt for attempt in attempts if attempt.marks.sent_ns]
    answered = [attempt for attempt in sent if attempt.marks.first_byte_ns]
    totals.attempts += len(attempts)
    totals.sent += len(sent)
    totals.arrived += len(rows)
    totals.unanswered += len(sent) - len(answered)
    totals.server.update(row.state for row in rows)
    totals.queued += any(attempt.queued_ns for attempt in attempts)
    if one.kind not in {"drop-before", "reset"}:
        totals.stale += len(stale)
    # The server has seen each request that was sent once, in this order, on the connection that we say; but for those
    # that crossed its close on the wire.
    lost = [
        attempt
        for attempt in sent
        if attempt not in answered and attempt.connection is not None and attempt.connection.reused
    ]
    assert len(sent) - len(lost) <= len(rows) <= len(sent), f"{len(rows)} arrived of {len(sent)}, {len(lost)} lost"
    if len(rows) == len(sent):
        for attempt, row in zip(sent, rows, strict=True):
            assert attempt.connection is not None
            totals.used += attempt.connection.id not in totals.connections
            known = totals.connections.setdefault(attempt.connection.id, row.connection)
            assert known == row.connection, f"{attempt.connection.id} is the server's {known} and {row.connection}"
    if timeline.outcome == DONE:
        late = {"late-end", "never-end", "idle-close"}
        assert rows[-1].state == "ended" or one.kind in late, "completed, and the server was not done"
        assert all(attempt.outcome != DONE for attempt in attempts[:-1])
    # An answer that has ended but for its message is given a second to end that too.
    if rows and rows[-1].state == "left" and one.kind != "never-end" and timeline.outcome in _LEFT:
        totals.left_after_s.append((rows[-1].left_ns - timeline._record.end_ns) / 1e9)
    # How often it was tried, if nobody left and nothing was taken for stale.
    if _end(timeline) == one.expected[0] and one.action not in {"poll", "total"} and not stale:
        exactly = one.expected[1]
        if one.kind == "reset" and one.streamed:  # unless the reset took the content with it
            assert 1 <= len(attempts) <= 3
        else:
            assert len(attempts) == exactly, f"{len(attempts)} attempts, not {exactly}"
