"""PURE: how a job goes on. One table of states, and what each thing that is learned makes of a row.

::

    created ─► submitting ─► submitted ─► queued ─► running ─► succeeded | failed | cancelled | expired | lost
                   └─► submit_unknown ─► submitted, or after a grace the next attempt

Three rules make the order in which things are learned unimportant:

* what is open only goes forward: a late ``start`` after ``queued``, ``running`` or the end changes nothing;
* the end is reached once, and is never left. Whoever writes it does so by compare-and-set;
* a success that comes after the caller was told ``cancelled``, ``expired`` or ``lost`` is kept, flagged ``late_result``: the
  state stays, since somebody has acted on it.

An end whose result, or reason, has to be asked for first is not the end yet: the row is flagged ``fetch``, and is due at once.

Of an attempt before the current one only a success counts: the job was submitted again because nobody knew about it, and
whichever succeeds first is the result. Its failures say nothing about the attempt that runs now.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from .contract import OPEN, TERMINAL, JobRow, Seen, State, Times

__all__ = [
    "NO_INPUT",
    "Advance",
    "advance",
    "expire",
    "last_word",
    "next_attempt",
    "rank",
    "submit_begins",
    "submit_unknown",
    "withdraw",
]

#: What is said of a job that would have to be submitted, and cannot.
NO_INPUT = "it cannot be submitted (again): its input is not in the store any more, or cannot be read there"
_RANK: dict[State, int] = {
    "created": 0,
    "submitting": 1,
    "submit_unknown": 2,
    "submitted": 3,
    "queued": 4,
    "running": 5,
    **dict.fromkeys(TERMINAL, 6),
}
#: Ends after which a success is still worth keeping: ours, or the provider's word for "nothing came of it".
_TOO_EARLY: frozenset[State] = frozenset({"cancelled", "expired", "lost"})


def rank(state: State) -> int:
    """How far a job is: grows, and all ends are equally far."""
    return _RANK[state]


class Advance(NamedTuple):
    """What became of a row.

    Attributes:
        row: the row to write, by compare-and-set; None if nothing changes.
        result: the body that was seen is this job's result: put it away, and its reference into the row.
        resolved: the row is at its end now, and was not before.
        flags: what was noticed: ``late_result``, ``again`` (it had ended already), ``late`` (behind what is known),
            ``old_attempt``, ``unknown_state``.
    """

    row: JobRow | None
    result: bool = False
    resolved: bool = False
    flags: tuple[str, ...] = ()


def advance(
    row: JobRow,
    seen: Seen,
    *,
    by: str,
    now_s: float,
    attempt: int | None = None,
    flags: tuple[str, ...] = (),
    seen_s: float | None = None,
) -> Advance:
    """Take in what was seen of a job.

    Args:
        by: who saw it: ``webhook``, ``poll``, ``ack`` or ``local``.
        now_s: our clock, seconds since the epoch.
        attempt: the attempt that it is about, as the callback's URL says; None or 0 if unknown: the current one.
        flags: to be kept on the row if this resolves it, such as ``stale``.
        seen_s: when it was seen, by our clock, where that is not now: a delivery's arrival.
    """
    old = bool(attempt) and attempt != row.attempt
    if row.state in TERMINAL:
        late = (
            seen.state == "succeeded"
            and seen.body is not None
            and row.state in _TOO_EARLY
            and "late_result" not in row.flags
        )
        if not late:
            return Advance(None, flags=("again",) if seen.state in TERMINAL else ("late",))
        kept = msgspec.structs.replace(
            row, flags=_with(row.flags, "late_result", *flags), times=_merged(row.times, seen.times)
        )
        return Advance(kept, result=True, flags=("late_result",))
    if old and seen.state != "succeeded":
        return Advance(None, flags=("old_attempt",))
    known = _learned(row, seen, old=old)
    if seen.state in TERMINAL and seen.fetch and seen.body is None:
        # Not its end yet: a crash between here and the answer would leave a success without a result, or a failure
        # without its reason.
        asked = msgspec.structs.replace(
            known,
            state="running",
            submitted_s=known.submitted_s or now_s,
            poll_s=now_s,
            flags=_with(row.flags, "fetch", *flags),
        )
        return Advance(asked if asked != row else None)
    if seen.state is None:
        return Advance(known if known != row else None, flags=("unknown_state",) if by != "ack" else ())
    if seen.state in TERMINAL:
        ended = msgspec.structs.replace(
            known,
            state=seen.state,
            resolved_s=now_s,
            resolved_by=by,
            code=seen.code,
            message=seen.message,
            poll_s=0.0,
            input=b"",
            flags=_with(
                tuple(flag for flag in row.flags if flag != "fetch"), *flags, *(("old_attempt",) if old else ())
            ),
        )
        noticed = ("old_attempt",) if old else ()
        return Advance(ended, result=seen.body is not None, resolved=True, flags=noticed)
    if _RANK[seen.state] > _RANK[row.state]:
        submitted_s = known.submitted_s or (now_s if _RANK[seen.state] >= _RANK["submitted"] else 0.0)
        begun = msgspec.structs.replace(known, state=seen.state, submitted_s=submitted_s)
        # A webhook comes when it begins. A look at the status finds it begun, perhaps long ago, unless an earlier one has
        # found it waiting; and what has ended already, and is on its way, says nothing of its beginning.
        if seen.state == "running" and seen.times.finished_s is None and (by == "webhook" or row.state == "queued"):
            begun.running_s = now_s if seen_s is None else seen_s
        return Advance(begun)
    return Advance(known if known != row else None, flags=("late",) if seen.state != row.state else ())


def submit_begins(row: JobRow) -> JobRow | None:
    """The request is about to be sent; None if it must not be: somebody else has sent it, or the job has ended."""
    return msgspec.structs.replace(row, state="submitting") if row.state == "created" else None


def submit_unknown(row: JobRow, *, retry_s: float) -> JobRow | None:
    """It was sent, in part or whole, and no answer came. ``retry_s``: when to think about it again."""
    if row.state != "submitting":
        return None  # a webhook, or a look at the provider, knows more by now
    return msgspec.structs.replace(row, state="submit_unknown", poll_s=retry_s)


def next_attempt(row: JobRow, *, why: str = "resubmitted", now_s: float = 0.0) -> JobRow | None:
    """To submit it again, under the next number; None if it has ended, or its input is gone.

    Also of a job whose submitter died between its row and the provider's answer.
    """
    if row.state not in OPEN or not row.input:
        return None
    return msgspec.structs.replace(
        row,
        state="created",
        attempt=row.attempt + 1,
        provider_id=None,
        urls={},
        times=Times(),
        submitted_s=0.0,
        running_s=0.0,
        poll_s=now_s,
        flags=_with(tuple(flag for flag in row.flags if flag != "fetch"), why),
    )


def expire(row: JobRow, *, now_s: float) -> Advance:
    """Its deadline has come; nothing happens before that."""
    if row.state not in OPEN or not row.due_s or now_s < row.due_s:
        return Advance(None)
    seen = Seen(state="expired", message="the deadline came before the result")
    return advance(row, seen, by="local", now_s=now_s)


def withdraw(row: JobRow, *, now_s: float, message: str = "cancelled by its owner") -> Advance:
    """Its owner does not want it any more."""
    if row.state not in OPEN:
        return Advance(None)
    return advance(row, Seen(state="cancelled", message=message), by="local", now_s=now_s)


def last_word(row: JobRow, *, code: str | None, message: str, now_s: float) -> Advance:
    """It cannot be submitted: the provider has refused it, or was not reached."""
    if row.state not in OPEN:
        return Advance(None)
    return advance(row, Seen(state="failed", code=code, message=message), by="local", now_s=now_s)


def _learned(row: JobRow, seen: Seen, *, old: bool) -> JobRow:
    """With the provider's id, addresses and times."""
    if old:  # the current attempt's id stays: it is to be stopped
        return msgspec.structs.replace(row, times=seen.times)
    return msgspec.structs.replace(
        row,
        provider_id=row.provider_id if row.provider_id is not None else seen.provider_id,
        urls={**row.urls, **seen.urls} if seen.urls else row.urls,
        times=_merged(row.times, seen.times),
    )


def _merged(known: Times, new: Times) -> Times:
    changed = {name: value for name, value in msgspec.structs.asdict(new).items() if value is not None}
    return msgspec.structs.replace(known, **changed) if changed else known


def _with(flags: tuple[str, ...], *more: str) -> tuple[str, ...]:
    return flags + tuple(flag for flag in dict.fromkeys(more) if flag not in flags)
