"""What was learned of a job goes into the store: compare-and-set, again until it is in. Blocking; any thread, any process.

This is the one place where jobs are resolved. Several processes may do the same thing at the same time: one of them
succeeds, and the others find it done.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from ..errors import JobError
from .contract import DAMAGED, OPEN, Delivery, JobCodec, JobRow, Seen, Store
from .states import Advance, advance

__all__ = ["Applied", "Learned", "add", "apply_deliveries", "ask_now", "change", "learn"]

_log = logging.getLogger("spanwire.jobs")
#: Others change the same job at the same time; a job has no more than a dozen states to go through.
_TRIES = 100


class Learned(NamedTuple):
    """A job after something was learned of it.

    Attributes:
        row: as it is stored now.
        resolved: this has brought it to its end.
        changed: this has written it.
        flags: see :class:`~spanwire.jobs.states.Advance`.
    """

    row: JobRow
    resolved: bool = False
    flags: tuple[str, ...] = ()
    changed: bool = False


def add(store: Store, row: JobRow) -> None:
    """A new job.

    Raises:
        JobError: with the job's id. Retryable: the store is down, and perhaps it has taken the job all the same.
    """
    try:
        store.add([row])
    except JobError as error:
        error.job = error.job or row.id
        if error.retryable:
            error.message += (
                f"; it is not known whether job {row.id} was written before: if it was, whoever looks after the store submits "
                f"it in a while. Once the store is back, `spanwire jobs show {row.id}` says so, and "
                f"manager.jobs.attach({row.id!r}).cancel() ends it"
            )
        raise


def change(store: Store, job: str, step: Callable[[JobRow], Advance], body: bytes | None = None) -> Learned | None:
    """Change a job's row by compare-and-set, as ``step`` makes of what is there. None if there is no such job.

    Raises:
        JobError: the store is down.
    """
    reference: bytes | None = None
    for _ in range(_TRIES):
        row = store.get(job)
        if row is None:
            return None
        made = step(row)
        if made.row is None:
            return Learned(row, flags=made.flags)
        if made.result and body is not None:
            if reference is None:
                reference = store.put_body(body)
            made.row.result = reference
        if store.swap(made.row, was=(row.state, row.attempt)):
            made.row.revision += 1
            return Learned(made.row, made.resolved, made.flags, changed=True)
    raise JobError("the job changes faster than it can be written", job=job, retryable=True)


def learn(
    store: Store,
    job: str,
    seen: Seen,
    *,
    by: str,
    now_s: float,
    attempt: int | None = None,
    flags: tuple[str, ...] = (),
    seen_s: float | None = None,
) -> Learned | None:
    """Take in what was seen of a job; arguments as of :func:`~spanwire.jobs.states.advance`."""
    return change(
        store,
        job,
        lambda row: advance(row, seen, by=by, now_s=now_s, attempt=attempt, flags=flags, seen_s=seen_s),
        seen.body,
    )


def ask_now(store: Store, job: str, *, now_s: float) -> Learned | None:
    """Something happened that cannot be read: the provider is asked at once."""

    def step(row: JobRow) -> Advance:
        return Advance(msgspec.structs.replace(row, poll_s=now_s) if row.state in OPEN else None)

    return change(store, job, step)


class Applied(NamedTuple):
    """What became of one delivery: ``learned`` is None for an orphan, whose job is not here (yet)."""

    delivery: Delivery
    learned: Learned | None


def apply_deliveries(
    store: Store,
    deliveries: Sequence[tuple[int, Delivery]],
    codec_for: Callable[[JobRow], JobCodec | None],
    *,
    now_s: float,
) -> list[Applied]:
    """Take in deliveries from the inbox, and mark them as applied. Doing it twice does no harm.

    Args:
        codec_for: the codec of a job's dialect; None for one that is not installed here, whose deliveries wait.

    Raises:
        JobError: the store is down.
    """
    done: list[int] = []
    answers: list[Applied] = []
    for number, delivery in deliveries:
        row = _row_of(store, delivery)
        codec = codec_for(row) if row is not None else None
        if row is None or codec is None:
            answers.append(Applied(delivery, None))
            continue
        learned: Learned | None
        try:
            if DAMAGED in delivery.flags:
                raise ValueError("its body is gone")  # noqa: TRY301 - as one that cannot be read
            seen = codec.webhook(delivery.headers, delivery.body)
        except Exception as error:  # noqa: BLE001 - what comes after it is not to wait for a codec's mistake
            if not isinstance(error, ValueError):
                _log.warning("a webhook of dialect %r cannot be read: %r", row.dialect, error)
            learned = ask_now(store, row.id, now_s=now_s)
        else:
            learned = learn(
                store,
                row.id,
                seen,
                by="webhook",
                now_s=now_s,
                attempt=_attempt_of(row, delivery),
                flags=tuple(flag for flag in delivery.flags if flag != "unparsed"),
                seen_s=delivery.received_s or None,
            )
        done.append(number)
        answers.append(Applied(delivery, learned))
    store.applied(done)
    return answers


def _row_of(store: Store, delivery: Delivery) -> JobRow | None:
    if delivery.job is not None:
        return store.get(delivery.job)
    if delivery.provider_id is None:
        return None
    return store.find(dialect_of(delivery), delivery.provider_id)


def dialect_of(delivery: Delivery) -> str:
    """``Delivery.endpoint`` begins with the dialect's name, up to the first character that a name cannot have."""
    end = next((at for at, one in enumerate(delivery.endpoint) if not (one.isalnum() or one in "_.-")), None)
    return delivery.endpoint[:end]


def _attempt_of(row: JobRow, delivery: Delivery) -> int | None:
    """Of which attempt it is. Found by the provider's id of an attempt before this one: an old one."""
    if delivery.attempt:
        return delivery.attempt
    if delivery.job is None and row.provider_id != delivery.provider_id:
        return row.attempt - 1 or None
    return None
