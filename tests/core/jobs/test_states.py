"""The table of a job's states, over every order in which things can be learned."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spanwire.jobs.contract import OPEN, TERMINAL, JobRow, Seen, State, Times
from spanwire.jobs.states import (
    advance,
    expire,
    last_word,
    next_attempt,
    rank,
    submit_begins,
    submit_unknown,
    withdraw,
)

ROW = JobRow(id="j", state="submitted", input=b"call", provider_id="p-1", due_s=100.0)
states = st.sampled_from(sorted(OPEN | TERMINAL))
seens = st.builds(
    Seen,
    state=st.one_of(st.none(), states),
    provider_id=st.sampled_from([None, "p-1", "p-2"]),
    body=st.sampled_from([None, b"{}"]),
    fetch=st.booleans(),
    urls=st.sampled_from([{}, {"status": "/s"}]),
)
rows = st.builds(
    lambda state, attempt: msgspec.structs.replace(ROW, state=state, attempt=attempt), states, st.integers(1, 3)
)


@given(row=rows, seen=seens, attempt=st.sampled_from([None, 0, 1, 2, 3]))
def test_rank_only_grows_and_no_end_is_left(row: JobRow, seen: Seen, attempt: int | None) -> None:
    before = msgspec.structs.asdict(row)
    step = advance(row, seen, by="webhook", now_s=5.0, attempt=attempt)
    assert msgspec.structs.asdict(row) == before
    if step.row is None:
        assert not step.resolved
        return
    assert rank(step.row.state) >= rank(row.state)
    assert step.row.attempt == row.attempt
    assert step.resolved == (row.state in OPEN and step.row.state in TERMINAL)
    if row.state in TERMINAL:
        assert step.row.state == row.state
        assert step.row.resolved_s == row.resolved_s
        assert "late_result" in step.row.flags
    if step.resolved:
        assert step.row.resolved_s == 5.0
        assert step.row.resolved_by == "webhook"
        assert step.row.input == b""


@given(row=rows, seens=st.lists(seens, max_size=6))
def test_what_was_seen_twice_changes_nothing_more(row: JobRow, seens: list[Seen]) -> None:
    for seen in seens:
        row = advance(row, seen, by="webhook", now_s=5.0).row or row
        assert advance(row, seen, by="webhook", now_s=5.0).row is None


@given(st.permutations(["submitted", "queued", "running", "succeeded", "failed"]))
def test_the_first_end_wins_in_any_order(order: list[State]) -> None:
    row, resolved = msgspec.structs.replace(ROW, state="submitting"), 0
    first_end = next(state for state in order if state in TERMINAL)
    for state in order:
        step = advance(row, Seen(state=state, body=b"{}"), by="webhook", now_s=1.0)
        row, resolved = step.row or row, resolved + step.resolved
    assert (row.state, resolved) == (first_end, 1)


def test_a_late_start_is_ignored() -> None:
    row = msgspec.structs.replace(ROW, state="running")
    assert advance(row, Seen(state="queued"), by="webhook", now_s=1.0) == (None, False, False, ("late",))


@pytest.mark.parametrize("ended", sorted(TERMINAL))
def test_a_late_success_is_kept_where_nothing_came_before(ended: State) -> None:
    row = msgspec.structs.replace(ROW, state=ended, resolved_s=1.0)
    step = advance(row, Seen(state="succeeded", body=b"{}"), by="webhook", now_s=9.0)
    if ended in ("expired", "cancelled", "lost"):
        assert step.row is not None
        assert step.row.flags == ("late_result",)
        assert step.result
        assert not step.resolved
        assert (step.row.state, step.row.resolved_s) == (ended, 1.0)
        assert advance(step.row, Seen(state="succeeded", body=b"{}"), by="poll", now_s=10.0).row is None
    else:
        assert step == (None, False, False, ("again",))


def test_an_old_attempt_counts_only_when_it_succeeds() -> None:
    second = msgspec.structs.replace(ROW, state="running", attempt=2, provider_id="p-2")
    for state in ("failed", "cancelled", "expired", "lost", "running", None):
        assert advance(second, Seen(state=state), by="webhook", now_s=1.0, attempt=1).row is None
    step = advance(second, Seen(state="succeeded", body=b"{}", provider_id="p-1"), by="webhook", now_s=1.0, attempt=1)
    assert step.resolved
    assert step.row is not None
    assert (step.row.provider_id, step.row.flags) == ("p-2", ("old_attempt",))
    assert step.flags == ("old_attempt",)


def test_an_unknown_state_keeps_what_else_was_said() -> None:
    row = msgspec.structs.replace(ROW, provider_id=None)
    seen = Seen(provider_id="p-9", urls={"status": "/s"}, times=Times(accepted_s=3.0))
    step = advance(row, seen, by="poll", now_s=1.0)
    assert step.flags == ("unknown_state",)
    assert step.row is not None
    assert (step.row.state, step.row.provider_id, step.row.urls) == ("submitted", "p-9", {"status": "/s"})
    assert step.row.times == Times(accepted_s=3.0)


def test_a_success_that_has_to_be_fetched_is_due_at_once_and_not_its_end() -> None:
    step = advance(ROW, Seen(state="succeeded", fetch=True), by="webhook", now_s=7.0)
    assert step.row is not None
    assert not step.resolved
    assert (step.row.state, step.row.poll_s, step.row.flags) == ("running", 7.0, ("fetch",))
    fetched = advance(step.row, Seen(state="succeeded", body=b"{}"), by="poll", now_s=8.0)
    assert fetched.resolved
    assert fetched.row is not None
    assert fetched.row.flags == ()


@pytest.mark.parametrize("state", ["expired", "cancelled"])
def test_an_end_that_may_have_a_result_is_not_the_end_either(state: State) -> None:
    """A batch that has expired has the answers of those calls that were in time."""
    step = advance(ROW, Seen(state=state, fetch=True), by="webhook", now_s=7.0)
    assert step.row is not None
    assert (step.row.state, step.row.poll_s, step.row.flags) == ("running", 7.0, ("fetch",))
    assert not step.resolved
    ended = advance(step.row, Seen(state=state), by="poll", now_s=8.0)
    assert ended.row is not None
    assert (ended.row.state, ended.row.flags) == (state, ())


def test_a_failure_whose_reason_has_to_be_fetched_is_not_the_end_either() -> None:
    step = advance(ROW, Seen(state="failed", fetch=True, code="thin"), by="webhook", now_s=7.0)
    assert step.row is not None
    assert not step.resolved
    assert (step.row.state, step.row.poll_s, step.row.flags) == ("running", 7.0, ("fetch",))
    fetched = advance(step.row, Seen(state="failed", code="why"), by="poll", now_s=8.0)
    assert fetched.resolved
    assert fetched.row is not None
    assert (fetched.row.state, fetched.row.code) == ("failed", "why")


def test_times_are_added_up() -> None:
    row = msgspec.structs.replace(ROW, times=Times(accepted_s=1.0))
    step = advance(row, Seen(state="running", times=Times(started_s=2.0)), by="webhook", now_s=5.0)
    assert step.row is not None
    assert step.row.times == Times(accepted_s=1.0, started_s=2.0)


def test_a_submit_is_begun_once() -> None:
    row = msgspec.structs.replace(ROW, state="created")
    begun = submit_begins(row)
    assert begun is not None
    assert begun.state == "submitting"
    assert submit_begins(begun) is None


def test_unknown_only_while_nothing_else_is_known() -> None:
    row = msgspec.structs.replace(ROW, state="submitting")
    unknown = submit_unknown(row, retry_s=50.0)
    assert unknown is not None
    assert (unknown.state, unknown.poll_s) == ("submit_unknown", 50.0)
    for state in sorted((OPEN | TERMINAL) - {"submitting"}):
        assert submit_unknown(msgspec.structs.replace(ROW, state=state), retry_s=50.0) is None
    known = advance(unknown, Seen(state="submitted", provider_id="p"), by="webhook", now_s=1.0)
    assert known.row is not None
    assert known.row.state == "submitted"


def test_the_next_attempt_forgets_the_last_one() -> None:
    row = msgspec.structs.replace(ROW, state="submit_unknown", urls={"status": "/s"}, poll_s=9.0)
    again = next_attempt(row)
    assert again is not None
    assert (again.state, again.attempt, again.provider_id) == ("created", 2, None)
    assert again.urls == {}
    assert again.flags == ("resubmitted",)
    assert next_attempt(msgspec.structs.replace(row, input=b"")) is None
    for state in TERMINAL:
        assert next_attempt(msgspec.structs.replace(row, state=state)) is None


def test_the_deadline_ends_what_is_open_and_not_before() -> None:
    assert expire(ROW, now_s=99.9).row is None
    step = expire(ROW, now_s=100.0)
    assert step.resolved
    assert step.row is not None
    assert (step.row.state, step.row.resolved_by) == ("expired", "local")
    assert expire(step.row, now_s=200.0).row is None
    assert expire(msgspec.structs.replace(ROW, due_s=0.0), now_s=200.0).row is None


def test_our_own_ends() -> None:
    for step in (withdraw(ROW, now_s=3.0), last_word(ROW, code="422", message="no", now_s=3.0)):
        assert step.resolved
        assert step.row is not None
        assert step.row.resolved_by == "local"
        assert withdraw(step.row, now_s=4.0).row is None
        assert last_word(step.row, code=None, message="", now_s=4.0).row is None


def test_when_it_was_first_seen_at_work_is_kept() -> None:
    row = JobRow(id="j", state="submitted", submitted_s=1.0)
    made = advance(row, Seen(state="running"), by="webhook", now_s=9.0, seen_s=3.0).row
    assert made is not None
    assert made.running_s == 3.0
    assert advance(made, Seen(state="running"), by="poll", now_s=10.0).row is None
    polled = advance(row, Seen(state="running"), by="poll", now_s=4.0).row
    assert polled is not None
    assert polled.running_s == 0.0  # nobody knows since when
    waiting = advance(row, Seen(state="queued"), by="poll", now_s=4.0).row
    assert waiting is not None
    found = advance(waiting, Seen(state="running"), by="poll", now_s=5.0).row
    assert found is not None
    assert found.running_s == 5.0
    ended = advance(waiting, Seen(state="running", times=Times(finished_s=1.0)), by="poll", now_s=5.0).row
    assert ended is not None
    assert ended.running_s == 0.0  # its result is on the way
    again = next_attempt(msgspec.structs.replace(made, input=b"x"))
    assert again is not None
    assert again.running_s == 0.0
