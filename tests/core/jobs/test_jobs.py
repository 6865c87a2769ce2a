"""Jobs from their submit to their end, over real connections, a real receiver, and a real store."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sqlite3
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

import spanwire
from spanwire.errors import (
    AuthenticationFailed,
    CallTimeout,
    ConfigurationError,
    ConnectionFailed,
    JobCancelled,
    JobError,
    JobExpired,
    JobLost,
    ServerError,
)
from spanwire.hookspecs import hookimpl
from spanwire.jobs import runner as runner_module
from spanwire.jobs.apply import learn
from spanwire.jobs.contract import Delivery, JobRow, Seen
from spanwire.jobs.sqlite import SQLiteStore
from spanwire.transport import Dialect
from tests.core.jobs.server import Doing, JobServer, serving
from tests.core.jobs.simple import Simple, said

CALL = spanwire.Call.chat("m", [{"role": "user", "content": "hi"}])
TEXT = str([{"role": "user", "content": "hi"}])


class Plugin:
    """The schema ``simple``, and variants of it."""

    def __init__(self, **more: Any) -> None:
        self.codec = Simple(**more)

    @hookimpl
    def register_dialects(self) -> list[Dialect]:
        operations = frozenset({"chat", "embeddings"})
        return [Dialect("webhook", "simple", self.codec, operations, default=True)]


def manager_of(**more: Any) -> spanwire.ConnectionManager:
    return spanwire.ConnectionManager(plugins=[Plugin(**more)])


def endpoint_of(server: JobServer, path: Path | str, **options: Any) -> spanwire.Endpoint:
    named = {"store": f"sqlite:///{path}/jobs.db", "receiver": "127.0.0.1:0", **options}
    given = {name: value for name, value in named.items() if value is not None}
    return spanwire.Endpoint(
        f"http://127.0.0.1:{server.port}",
        transport="webhook",
        dialect="simple",
        api_key="sk-secret",
        retries=spanwire.Retries(base_s=0.01),
        options=given,
    )


POLL: dict[str, Any] = {"receiver": None, "poll_after_s": 0.05}


# --- the plain way ------------------------------------------------------------------------------------------------------


async def test_a_job_is_acknowledged_and_answered_by_its_webhook(tmp_path: Path) -> None:
    async with serving() as server, manager_of() as manager:
        job = await manager.submit(endpoint_of(server, tmp_path), CALL, group="g")
        assert job.row is not None
        assert job.row.state in ("submitted", "succeeded")
        reply = await job
        assert isinstance(reply, spanwire.Reply)
        assert reply.text == TEXT
        assert job.row.resolved_by == "webhook"
        assert await job.status() == "succeeded"
        assert (await job).text == TEXT  # type: ignore[union-attr] # again
        await server.until(lambda server: bool(server.answers))
        assert server.answers == [204]
        assert [(method, path) for method, path, _ in server.requests] == [("POST", "/jobs")]
        assert server.requests[0][2]["authorization"] == "Bearer sk-secret"


async def test_without_a_way_in_it_is_polled(tmp_path: Path) -> None:
    doing = Doing(status={"status": "running"})
    async with serving(doing) as server, manager_of() as manager:
        job = await manager.submit(endpoint_of(server, tmp_path, **POLL), CALL)
        assert server.submits[0]["callback"] is None
        assert job.row is not None
        waiting = asyncio.ensure_future(job.result())
        await server.until(lambda server: any(method == "GET" for method, *_ in server.requests))
        (known,) = server.jobs
        server.jobs[known] = {"id": known, "status": "done", "output": "polled"}
        reply = await waiting
        assert isinstance(reply, spanwire.Reply)
        assert reply.text == "polled"
        assert job.row.resolved_by == "poll"


async def test_embeddings_too(tmp_path: Path) -> None:
    doing = Doing(webhooks=[{"status": "done", "output": [[1.0, 2.0]]}])
    async with serving(doing, doing) as server, manager_of() as manager:
        endpoint, call = endpoint_of(server, tmp_path), spanwire.Call.embeddings("e", ["a"])
        found = await (await manager.submit(endpoint, call))
        assert isinstance(found, spanwire.Embeddings)
        assert found.vectors == [[1.0, 2.0]]
        assert (await manager.embed(endpoint, call)).vectors == [[1.0, 2.0]]


async def test_a_plain_call_answers_later(tmp_path: Path) -> None:
    async with serving() as server, manager_of() as manager:
        endpoint = endpoint_of(server, tmp_path)
        reply = await manager.complete(endpoint, CALL)
        assert reply.text == TEXT
        assert reply.timeline is not None
        assert reply.timeline.outcome == "completed"
        async with manager.stream(endpoint, CALL) as stream:
            chunks = [chunk async for chunk in stream]
        assert [chunk.text for chunk in chunks] == [TEXT]
        assert stream.reply.text == TEXT
        assert stream.timeline.outcome == "completed"


# --- out of order -------------------------------------------------------------------------------------------------------


async def test_the_webhook_may_come_before_the_acknowledgement(tmp_path: Path) -> None:
    async with serving(Doing(early=True)) as server, manager_of() as manager:
        job = await manager.submit(endpoint_of(server, tmp_path), CALL)
        assert (await job).text == TEXT  # type: ignore[union-attr]
        assert job.row is not None
        assert job.row.resolved_by == "webhook"


async def test_an_orphan_of_an_account_is_found_by_the_acknowledgement(tmp_path: Path) -> None:
    """Its webhooks know the provider's id alone; here it came before anybody knew whose it is."""
    store = SQLiteStore(tmp_path / "jobs.db")
    async with serving() as server, manager_of(callback="account") as manager:

        async def early(url: str, body: dict[str, Any]) -> None:
            raise AssertionError("nobody gave it an address")

        server.send = early  # type: ignore[method-assign]
        endpoint = endpoint_of(server, tmp_path, public_url="http://127.0.0.1:9/hooks", receiver=None)
        submitted = server.submitted

        async def deliver_first(asked: dict[str, Any]) -> Any:
            answer = await submitted(asked)
            (known,) = server.jobs
            delivery = Delivery(
                endpoint="simple/hooks", dedupe="m", provider_id=known, body=said("done", known, output="x")
            )
            await asyncio.to_thread(store.receive, [delivery])
            return answer

        server.submitted = deliver_first  # type: ignore[method-assign]
        job = await manager.submit(endpoint, CALL)
        assert (await job).text == "x"  # type: ignore[union-attr]
    store.close()


async def test_repeated_and_late_webhooks_change_nothing(tmp_path: Path) -> None:
    done = {"status": "done", "output": "one"}
    doing = Doing(webhooks=[done, done, {"status": "running"}, {**done, "output": "two"}, {"status": "failed"}])
    async with serving(doing) as server, manager_of() as manager:
        job = await manager.submit(endpoint_of(server, tmp_path), CALL)
        await server.until(lambda server: len(server.answers) == 5)
        assert (await job).text == "one"  # type: ignore[union-attr]
        assert server.answers == [204, 200, 204, 204, 204]
        assert await job.status() == "succeeded"


async def test_a_thin_webhook_has_its_result_fetched(tmp_path: Path) -> None:
    doing = Doing(webhooks=[{"status": "done", "thin": True}])
    async with serving(doing) as server, manager_of() as manager:
        job = await manager.submit(endpoint_of(server, tmp_path), CALL)
        assert (await job).text == TEXT  # type: ignore[union-attr]
        assert [method for method, *_ in server.requests] == ["POST", "GET"]


# --- failures -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ({"status": "failed", "error": "it broke", "code": "X1"}, ServerError),
        ({"status": "cancelled"}, JobCancelled),
        ({"status": "gone"}, JobLost),
    ],
)
async def test_each_bad_end_has_its_error(tmp_path: Path, said: dict[str, Any], error: type[Exception]) -> None:
    async with serving(Doing(webhooks=[said])) as server, manager_of() as manager:
        job = await manager.submit(endpoint_of(server, tmp_path), CALL)
        with pytest.raises(error) as caught:
            await job
        assert caught.value.endpoint == f"127.0.0.1:{server.port}"  # type: ignore[attr-defined]
        if isinstance(caught.value, JobError):
            assert caught.value.job == job.id


async def test_a_refused_submit_is_raised_and_written_down(tmp_path: Path) -> None:
    async with serving(Doing(ack=401)) as server, manager_of() as manager:
        with pytest.raises(AuthenticationFailed):
            await manager.submit(endpoint_of(server, tmp_path), CALL, group="g")
        (job,) = [job async for job in manager.jobs.ended("g")]
        assert job.row is not None
        assert (job.row.state, job.row.resolved_by) == ("failed", "local")


async def test_a_busy_server_is_asked_again(tmp_path: Path) -> None:
    async with serving(Doing(ack=429, retry_after="0"), Doing(ack=503)) as server, manager_of() as manager:
        assert (await (await manager.submit(endpoint_of(server, tmp_path), CALL))).text == TEXT  # type: ignore[union-attr]
        assert len(server.submits) == 3


@pytest.mark.parametrize("ack", [500, 502, 504, "cut"])
async def test_a_submit_without_an_answer_is_not_sent_again_at_once(tmp_path: Path, ack: int | str) -> None:
    """The job shows up by its webhook."""
    async with serving(Doing(ack=ack)) as server, manager_of() as manager:
        job = await manager.submit(endpoint_of(server, tmp_path, grace_s=30.0), CALL)
        assert (await job).text == TEXT  # type: ignore[union-attr]
        assert len(server.submits) == 1


async def test_after_the_grace_it_is_submitted_under_the_next_number(tmp_path: Path) -> None:
    async with serving(Doing(ack="cut", webhooks=[])) as server, manager_of() as manager:
        job = await manager.submit(endpoint_of(server, tmp_path, grace_s=0.1), CALL)
        assert await job.status() in ("submit_unknown", "created", "submitting", "submitted", "succeeded")
        assert (await job).text == TEXT  # type: ignore[union-attr]
        assert job.row is not None
        assert (job.row.attempt, job.row.flags) == (2, ("resubmitted",))
        first, second = (submit["callback"].rpartition("/")[2].split(".") for submit in server.submits)
        assert first[:2] == [job.id, "1"]
        assert second[:2] == [job.id, "2"]


async def test_after_the_grace_it_is_the_same_attempt_where_that_is_no_second_job(tmp_path: Path) -> None:
    cut = Doing(ack="cut", webhooks=[])
    async with serving(cut, cut, cut) as server, manager_of(resubmits=True) as manager:
        job = await manager.submit(endpoint_of(server, tmp_path, grace_s=0.1), CALL)
        assert (await job).text == TEXT  # type: ignore[union-attr]
        assert job.row is not None
        assert (job.row.attempt, job.row.flags) == (1, ())
        assert len(server.submits) == 4
        assert len({submit["callback"] for submit in server.submits}) == 1


@pytest.mark.parametrize(("resubmits", "options"), [(True, POLL), (False, POLL), (False, {})])
async def test_answers_that_cannot_be_read_end_it(tmp_path: Path, resubmits: bool, options: dict[str, Any]) -> None:
    """A page of another server, for instance: it is not submitted until the deadline comes."""
    page = Doing(ack="page", webhooks=[])
    async with serving(default=page) as server, manager_of(resubmits=resubmits) as manager:
        job = await manager.submit(endpoint_of(server, tmp_path, grace_s=0.05, **options), CALL)
        with pytest.raises(ServerError, match="cannot be read"):
            await job
        assert len(server.submits) == 2


async def test_where_a_webhook_may_come_all_the_same_it_is_waited_for(tmp_path: Path) -> None:
    page = Doing(ack="page", webhooks=[])
    async with serving(page, page, Doing(ack="page")) as server, manager_of(resubmits=True) as manager:
        job = await manager.submit(endpoint_of(server, tmp_path, grace_s=0.05), CALL)
        assert (await job).text == TEXT  # type: ignore[union-attr]
        assert len(server.submits) == 3


async def test_the_first_attempt_may_still_win(tmp_path: Path) -> None:
    async with serving(Doing(ack="cut", webhooks=[]), Doing(webhooks=[])) as server, manager_of() as manager:
        job = await manager.submit(endpoint_of(server, tmp_path, grace_s=0.1), CALL)
        await server.until(lambda server: len(server.submits) == 2)
        await server.send(server.submits[0]["callback"], {"id": "p-old", "status": "failed"})
        await server.send(server.submits[0]["callback"], {"id": "p-old", "status": "done", "output": "first"})
        assert (await job).text == "first"  # type: ignore[union-attr]
        await server.until(lambda server: server.cancelled == list(server.jobs)[1:])


async def test_the_deadline_ends_it_and_a_late_result_is_kept(tmp_path: Path) -> None:
    doing = Doing(webhooks=[], status={"status": "running"})
    async with serving(doing) as server, manager_of() as manager:
        job = await manager.submit(endpoint_of(server, tmp_path), CALL, deadline_s=0.1)
        with pytest.raises(JobExpired):
            await job
        assert await job.late() is None
        (known,) = server.jobs
        await server.until(lambda server: server.cancelled == [known])
        await server.send(server.submits[0]["callback"], {"id": known, "status": "done", "output": "late"})
        while await job.late() is None:
            await asyncio.sleep(0.01)
        late = await job.late()
        assert isinstance(late, spanwire.Reply)
        assert late.text == "late"
        assert await job.status() == "expired"
        with pytest.raises(JobExpired):
            await manager.jobs.attach(job.id)


async def test_what_was_never_delivered_is_found_at_the_deadline(tmp_path: Path) -> None:
    async with serving(Doing(webhooks=[])) as server, manager_of() as manager:
        job = await manager.submit(endpoint_of(server, tmp_path), CALL, deadline_s=0.1)
        assert (await job).text == TEXT  # type: ignore[union-attr]


async def test_a_lost_job_is_submitted_again_if_that_is_wanted(tmp_path: Path) -> None:
    lost = Doing(webhooks=[], status={"status": "gone"})
    async with serving(lost, lost) as server, manager_of() as manager:
        job = await manager.submit(endpoint_of(server, tmp_path, poll_after_s=0.05), CALL)
        with pytest.raises(JobLost):
            await job
        job = await manager.submit(endpoint_of(server, tmp_path, poll_after_s=0.05, on_lost="resubmit"), CALL)
        assert (await job).text == TEXT  # type: ignore[union-attr]
        assert job.row is not None
        assert job.row.attempt == 2


async def test_a_status_of_404_ends_it(tmp_path: Path) -> None:
    async with serving(Doing(webhooks=[])) as server, manager_of() as manager:
        job = await manager.submit(endpoint_of(server, tmp_path, poll_after_s=0.05), CALL)
        server.jobs.clear()
        with pytest.raises(JobExpired, match="does not know it"):
            await job
        asked = len(server.requests)
        assert await job.status() == "expired"
        assert len(server.requests) == asked


# --- cancelling and leaving -----------------------------------------------------------------------------------------------


async def test_cancelling_the_await_leaves_the_job(tmp_path: Path) -> None:
    async with serving(Doing(webhooks=[], status={"status": "running"})) as server, manager_of() as manager:
        job = await manager.submit(endpoint_of(server, tmp_path), CALL)
        waiting = asyncio.ensure_future(job.result())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await job.status() == "submitted"
        assert server.cancelled == []
        assert await job.cancel()
        assert not await job.cancel()
        with pytest.raises(JobCancelled):
            await job
        assert server.cancelled == list(server.jobs)


async def test_leaving_while_the_row_is_written_leaves_no_job(tmp_path: Path) -> None:
    """Nobody has its id, and nothing was sent: whoever finds the row is not to submit it."""
    async with serving() as server, manager_of() as manager:
        store = SQLiteStore(tmp_path / "own.db")
        add, begun, go_on = store.add, threading.Event(), threading.Event()

        def slow(rows: list[JobRow]) -> None:
            begun.set()
            go_on.wait()
            add(rows)

        store.add = slow  # type: ignore[assignment,method-assign]
        endpoint = endpoint_of(server, tmp_path, store=store)
        submit = asyncio.ensure_future(manager.submit(endpoint, CALL, group="g"))
        await asyncio.to_thread(begun.wait)
        submit.cancel()
        with pytest.raises(asyncio.CancelledError):
            await submit
        go_on.set()
        async with asyncio.timeout(10):
            while [row.state for row in await asyncio.to_thread(store.completed, "g")] != ["cancelled"]:
                await asyncio.sleep(0.01)
        assert server.submits == []
    store.close()


async def test_an_acknowledgement_outlives_a_store_that_is_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the job that the provider has taken would be submitted once more."""
    monkeypatch.setattr(runner_module, "_IDLE_LOOK_S", 0.01)
    store = SQLiteStore(tmp_path / "own.db")
    swap, left = store.swap, [True, True]

    def down(row: JobRow, **was: Any) -> bool:
        if left:
            left.pop()
            raise JobError("the store of jobs cannot be used", retryable=True)
        return swap(row, **was)

    store.swap = down  # type: ignore[method-assign]
    async with serving(Doing(webhooks=[], status={"status": "running"})) as server, manager_of() as manager:
        endpoint = endpoint_of(server, tmp_path, store=store, receiver=None, poll_after_s=100.0)
        with pytest.raises(JobError) as caught:
            await manager.submit(endpoint, CALL)
        assert caught.value.job is not None
        async with asyncio.timeout(10):
            while (row := await asyncio.to_thread(store.get, caught.value.job)) and row.state != "submitted":
                await asyncio.sleep(0.01)
        assert row is not None
        assert [row.provider_id] == list(server.jobs)
    store.close()


async def test_a_webhook_that_comes_while_its_job_is_asked_for_is_not_put_off(tmp_path: Path) -> None:
    """The answer was on its way already, and says less than the webhook."""
    async with serving(Doing(webhooks=[])) as server, manager_of() as manager:
        endpoint = endpoint_of(server, tmp_path, poll_after_s=100.0)
        job = await manager.submit(endpoint, CALL)
        assert job.row is not None
        runner = await job._runner()
        seen = Seen(state="running")
        await asyncio.to_thread(partial(learn, runner.store, job.id, seen, by="poll", now_s=1.0))
        asked = await runner.get(job.id)
        assert asked is not None
        thin = Seen(state="succeeded", fetch=True)
        await asyncio.to_thread(partial(learn, runner.store, job.id, thin, by="webhook", now_s=2.0))
        await runner._plan(asked, 5e9)
        row = await runner.get(job.id)
        assert row is not None
        assert (row.poll_s, row.flags) == (2.0, ("fetch",))


async def test_what_cannot_be_looked_at_does_not_hold_up_what_is_due(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "own.db")

    def damaged(**more: object) -> list[tuple[int, Delivery]]:
        raise JobError("a job's body is damaged")

    store.unapplied = damaged  # type: ignore[method-assign]
    async with serving(Doing(webhooks=[])) as server, manager_of() as manager:
        endpoint = endpoint_of(server, tmp_path, store=store, receiver=None, poll_after_s=100.0)
        store.add([JobRow(id="j", dialect="simple", origin="http://elsewhere:1/", state="running", due_s=1.0)])
        with pytest.raises(JobExpired):
            await manager.jobs.attach("j", endpoint=endpoint)
    store.close()


async def test_leaving_a_plain_call_cancels_its_job(tmp_path: Path) -> None:
    doing = Doing(webhooks=[], status={"status": "running"})
    async with serving(default=doing) as server, manager_of() as manager:
        endpoint = endpoint_of(server, tmp_path)
        task = asyncio.ensure_future(manager.complete(endpoint, CALL))
        await server.until(lambda server: len(server.submits) == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with manager.stream(endpoint, CALL):
            pass
        with pytest.raises(CallTimeout) as caught:
            await manager.complete(endpoint, CALL, timeouts=spanwire.Timeouts(total_s=0.2))
        assert caught.value.limit == "total_s"
        await server.until(lambda server: len(server.cancelled) >= 2)


async def test_closing_the_manager_tells_who_waits_and_leaves_the_job(tmp_path: Path) -> None:
    async with serving(Doing(webhooks=[], status={"status": "running"})) as server:
        async with manager_of() as manager:
            job = await manager.submit(endpoint_of(server, tmp_path, **POLL), CALL)
            waiting = asyncio.ensure_future(job.result())
            await asyncio.sleep(0.05)
        with pytest.raises(ConnectionFailed, match="jobs go on"):
            await waiting
        server.jobs = {known: {"id": known, "status": "done", "output": "after"} for known in server.jobs}
        async with manager_of() as other:
            taken = other.jobs.attach(job.id, endpoint=endpoint_of(server, tmp_path, **POLL))
            assert (await taken).text == "after"  # type: ignore[union-attr]


async def test_nothing_is_left_behind(tmp_path: Path) -> None:
    tasks = asyncio.all_tasks()
    async with serving(default=Doing(webhooks=[], status={"status": "running"})) as server:
        async with manager_of() as manager:
            for _ in range(5):
                await manager.submit(endpoint_of(server, tmp_path), CALL)
        left = {task for task in asyncio.all_tasks() - tasks if "spanwire" in repr(task.get_coro())}
        assert left == set()
    gc.collect()


# --- several who look after them --------------------------------------------------------------------------------------------


async def test_a_job_is_taken_up_by_its_id(tmp_path: Path) -> None:
    """By a process that knows nothing but the store."""
    async with serving(Doing(webhooks=[])) as server, manager_of() as submitter, manager_of() as other:
        job = await submitter.submit(endpoint_of(server, tmp_path), CALL)
        taken = other.jobs.attach(job.id, store=f"sqlite:///{tmp_path}/jobs.db")
        assert taken.row is None
        assert await taken.status() == "submitted"
        waiting = asyncio.gather(taken, job)
        await server.send(server.submits[0]["callback"], {"status": "done", "output": "both"})
        assert [reply.text for reply in await waiting] == ["both", "both"]  # type: ignore[union-attr]


async def test_an_unknown_job_is_told(tmp_path: Path) -> None:
    async with manager_of() as manager:
        job = manager.jobs.attach("0197d0c0-0000-7000-8000-000000000000", store=f"sqlite:///{tmp_path}/jobs.db")
        for ask in (job.status, job.result, job.cancel):
            with pytest.raises(JobError, match="no such job"):
                await ask()


async def test_several_runners_resolve_each_job_once(tmp_path: Path) -> None:
    """Both see every delivery, and both poll."""
    async with serving() as server, manager_of() as one, manager_of() as two:
        resolved: list[str] = []
        for manager in (one, two):
            runner = await manager.jobs.runner(
                manager.jobs._source(endpoint_of(server, tmp_path, poll_after_s=0.02), None)
            )
            tell = runner._tell.resolved

            def note(row: Any, tell: Callable[[Any], None] = tell) -> None:
                resolved.append(row.id)
                tell(row)

            runner._tell.resolved = note  # type: ignore[method-assign]
        endpoint = endpoint_of(server, tmp_path, poll_after_s=0.02)
        jobs = await asyncio.gather(*((one, two)[n % 2].submit(endpoint, CALL) for n in range(40)))
        other = [two.jobs.attach(job.id, endpoint=endpoint) for job in jobs]
        await asyncio.gather(*jobs, *other)
        while len(resolved) < len(jobs):  # who waits may see it in the store before its runner has said it
            await asyncio.sleep(0.01)
        assert sorted(resolved) == sorted(job.id for job in jobs)


async def test_a_submitter_that_died_is_followed_by_another(tmp_path: Path) -> None:
    """Its row says ``submitting``, and nobody has said for a while that this is still so."""
    store = SQLiteStore(tmp_path / "jobs.db")
    async with serving(Doing(ack="hang", webhooks=[])) as server:
        dead = manager_of()
        endpoint = endpoint_of(server, tmp_path, grace_s=0.1)
        task = asyncio.ensure_future(dead.submit(endpoint, CALL, group="g"))
        await server.until(lambda server: len(server.submits) == 1)
        connection = sqlite3.connect(store.path)
        (known,) = connection.execute("SELECT id FROM job").fetchone()
        connection.close()
        row = store.get(known)
        assert row is not None
        assert row.state == "submitting"
        for state in dead._states.values():
            for runner in state.jobs.values():
                runner._submitting.clear()  # it is dead: it renews nothing
        assert store.swap(msgspec.structs.replace(row, poll_s=1.0), was=("submitting", 1))
        async with manager_of() as manager:
            job = manager.jobs.attach(known, endpoint=endpoint_of(server, tmp_path, grace_s=0.1))
            assert (await job).text == TEXT  # type: ignore[union-attr]
            assert job.row is not None
            assert job.row.attempt == 2
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await dead.aclose()
    store.close()


async def test_a_job_whose_input_is_gone_ends(tmp_path: Path) -> None:
    """It cannot be submitted, and says so; before, it was tried until its deadline."""
    async with serving() as server, manager_of() as manager:
        endpoint = endpoint_of(server, tmp_path)
        job = await manager.submit(endpoint, CALL)
        await job
        assert job.row is not None
        store = SQLiteStore(tmp_path / "jobs.db")
        lost = JobRow(id="lost", origin=job.row.origin, dialect="simple", state="created", poll_s=1.0, due_s=4e9)
        store.add([lost])
        with pytest.raises(ServerError, match="its input is not in the store any more"):
            await manager.jobs.attach("lost", endpoint=endpoint)
        assert len(server.submits) == 1
        store.close()


class Unsure(SQLiteStore):
    """Loses its answer to what it has written."""

    def add(self, rows: Sequence[JobRow]) -> None:
        super().add(rows)
        raise JobError("the store of jobs cannot be used: it is gone", retryable=True)


async def test_a_job_that_was_perhaps_written_is_named(tmp_path: Path) -> None:
    """It may be submitted later, by whoever looks after the store: its caller can find it, and end it."""
    store = Unsure(tmp_path / "jobs.db")
    async with serving() as server, manager_of() as manager:
        endpoint = endpoint_of(server, tmp_path, store=store)
        with pytest.raises(JobError, match="not known whether") as caught:
            await manager.submit(endpoint, CALL)
        assert caught.value.retryable
        assert caught.value.job is not None
        assert caught.value.job in str(caught.value)
        job = manager.jobs.attach(caught.value.job, endpoint=endpoint)
        assert await job.cancel()
        assert server.submits == []
    store.close()


async def test_deliveries_of_a_dialect_that_is_not_here_hold_up_nobody(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "jobs.db")
    store.add([JobRow(id="elsewhere", dialect="unknown", state="submitted")])
    store.receive([Delivery(endpoint="unknown", dedupe=str(n), job="elsewhere") for n in range(450)])
    store.close()
    async with serving() as server, manager_of() as manager:
        assert (await (await manager.submit(endpoint_of(server, tmp_path), CALL))).text == TEXT  # type: ignore[union-attr]


class Telling(SQLiteStore):
    """Tells of writes, as a test says, and counts how often it is asked."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.wakes: list[Callable[[], None]] = []
        self.asked = 0

    def subscribe(self, wake: Callable[[], None]) -> Callable[[], None]:
        self.wakes.append(wake)
        return lambda: self.wakes.remove(wake)

    def changed(self) -> int:
        self.asked += 1
        return super().changed()


async def test_a_store_that_tells_of_writes_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but its word makes the runner look: an hour would pass otherwise."""
    for name in ("_ASK_S", "_IDLE_LOOK_S", "_LOOK_S"):
        monkeypatch.setattr(runner_module, name, 3600.0)
    store, other = Telling(tmp_path / "jobs.db"), SQLiteStore(tmp_path / "jobs.db")
    row = JobRow(id="1", dialect="simple", state="submitted", due_s=4e9)
    other.add([row])
    async with manager_of() as manager:
        waiting = asyncio.ensure_future(manager.jobs.attach("1", store=store).result())
        while not store.wakes or store.asked == 0:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0)
        ended = msgspec.structs.replace(row, state="cancelled", resolved_s=2.0)
        assert await asyncio.to_thread(other.swap, ended, was=("submitted", 1))
        store.wakes[0]()
        with pytest.raises(JobCancelled):
            await waiting
        assert store.asked <= 3
    assert store.wakes == []
    store.close()
    other.close()


async def test_what_another_runner_took_and_dropped_is_taken_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had leased a delivery, and died: nothing is written after that."""
    monkeypatch.setattr(runner_module, "_APPLYING_S", 0.05)
    store = SQLiteStore(tmp_path / "jobs.db")
    store.add([JobRow(id="1", dialect="simple", state="submitted", provider_id="p", due_s=4e9)])
    done = Delivery(endpoint="simple", dedupe="m", job="1", attempt=1, body=said("done", "p", output="x"))
    store.receive([done])
    assert len(store.unapplied(lease_s=0.2)) == 1
    async with manager_of() as manager:
        assert (await manager.jobs.attach("1", store=store)).text == "x"  # type: ignore[union-attr]
    store.close()


# --- groups -------------------------------------------------------------------------------------------------------------


async def test_the_replies_of_a_group_come_as_they_end(tmp_path: Path) -> None:
    async with serving(*[Doing(webhooks=[])] * 3) as server, manager_of() as manager:
        endpoint = endpoint_of(server, tmp_path)
        for _ in range(3):
            await manager.submit(endpoint, CALL, group="g")
        await manager.submit(endpoint, CALL, group="other")
        replies = manager.jobs.completed("g", endpoint=endpoint)
        for n in (2, 0):
            await server.send(server.submits[n]["callback"], {"status": "done", "output": str(n)})
            assert (await anext(replies)).text == str(n)  # type: ignore[union-attr]
        await server.send(server.submits[1]["callback"], {"status": "failed", "error": "it broke"})
        with pytest.raises(ServerError, match="it broke"):
            await anext(replies)
        assert [reply async for reply in replies] == []
        assert [job.row.state async for job in manager.jobs.ended("g") if job.row] == [
            "succeeded",
            "succeeded",
            "failed",
        ]


async def test_a_job_of_a_group_is_given_though_a_clock_is_far_behind(tmp_path: Path) -> None:
    """Whoever has resolved it dates it long before what was given already."""
    store = SQLiteStore(tmp_path / "own.db")
    store.add([JobRow(id="open", group="g", state="running")])
    ended = [JobRow(id=f"{n:05}", group="g", state="succeeded", resolved_s=1000.0 + n) for n in range(1200)]
    store.add(ended)
    async with manager_of() as manager:
        given = []
        async for job in manager.jobs.ended("g", store=store):
            given.append(job.id)
            if len(given) == len(ended):
                late = JobRow(id="open", group="g", state="succeeded", resolved_s=500.0)
                assert await asyncio.to_thread(partial(store.swap, late, was=("running", 1)))
    assert given == [row.id for row in ended] + ["open"]
    store.close()


async def test_an_empty_group_ends_at_once(tmp_path: Path) -> None:
    async with manager_of() as manager:
        assert [job async for job in manager.jobs.ended("g", store=f"sqlite:///{tmp_path}/jobs.db")] == []
        with pytest.raises(ConfigurationError):
            manager.jobs.ended("")


# --- what is refused, and what is never told ---------------------------------------------------------------------------------


async def test_a_status_without_an_output_needs_a_way_in(tmp_path: Path) -> None:
    async with serving() as server, manager_of(status_has_output=False) as manager:
        with pytest.raises(ConfigurationError, match="public_url"):
            await manager.submit(endpoint_of(server, tmp_path, receiver=None), CALL)
        assert server.submits == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"deadline_s": 0}, "deadline_s"),
        ({"grace_s": "1"}, "grace_s"),
        ({"poll_share": 2}, "poll_share"),
        ({"on_lost": "cry"}, "on_lost"),
        ({"public_url": "hooks.example.com"}, "public_url"),
        ({"receiver": "8000"}, "receiver"),
        ({"receiver_options": {"secret": "x"}}, "receiver_options"),
        ({"result_hosts": "https://a"}, "result_hosts"),
        ({"store": "mysql://x"}, "store"),
        ({"instance_key": "xyz"}, "instance key"),
        ({"instance": "xyz"}, "instance_key"),
    ],
)
async def test_bad_options_are_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    async with serving() as server, manager_of() as manager:
        with pytest.raises(ConfigurationError, match=words):
            await manager.submit(endpoint_of(server, tmp_path, **options), CALL)
        assert server.submits == []


async def test_other_transports_have_no_jobs() -> None:
    async with manager_of() as manager:
        with pytest.raises(ConfigurationError, match="has no jobs"):
            await manager.submit("http://127.0.0.1:1", CALL)


async def test_a_submit_over_the_limit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    async with serving() as server, manager_of(most_body_bytes=10) as manager:
        with pytest.raises(ConfigurationError, match="takes 10"):
            await manager.submit(endpoint_of(server, tmp_path), CALL, group="g")
        assert [job async for job in manager.jobs.ended("g")] == []


def _files(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in folder.rglob("*") if path.is_file()]


async def test_no_key_is_in_the_store(tmp_path: Path) -> None:
    async with serving() as server, manager_of() as manager:
        call = spanwire.Call.chat("m", [{"role": "user", "content": "hi"}], headers={"x-tenant": "sk-header"})
        await (await manager.submit(endpoint_of(server, tmp_path), call, headers={"x-more": "sk-more"}))
        assert server.requests[0][2]["x-tenant"] == "sk-header"
        assert server.requests[0][2]["x-more"] == "sk-more"
    assert not any(b"sk-" in data for data in _files(tmp_path))


async def test_a_key_that_the_server_repeats_is_neither_in_the_store_nor_shown(tmp_path: Path) -> None:
    async with serving() as server, manager_of() as manager:
        server.default = Doing(
            webhooks=[], status={"status": "failed", "code": "bad sk-secret", "error": "sk-secret is no key"}
        )
        job = await manager.submit(endpoint_of(server, tmp_path, receiver=None), CALL)
        with pytest.raises(ServerError, match=r"^\*\*\* is no key") as caught:
            await job
        assert caught.value.code == "bad ***"
    assert not any(b"sk-" in data for data in _files(tmp_path))


# --- synchronous code -----------------------------------------------------------------------------------------------------


async def test_the_synchronous_forms(tmp_path: Path) -> None:
    async with serving() as server:

        def work() -> None:
            with spanwire.SyncConnectionManager(manager_of()) as manager:
                endpoint = endpoint_of(server, tmp_path)
                job = manager.submit(endpoint, CALL, group="g")
                reply = job.result()
                assert isinstance(reply, spanwire.Reply)
                assert reply.text == TEXT
                assert (job.status(), job.cancel(), job.late()) == ("succeeded", False, None)
                assert job.timeline.outcome == "completed"
                assert job.row is not None
                assert manager.jobs.attach(job.id).status() == "succeeded"
                assert [job.id for job in manager.jobs.ended("g")] == [job.id]
                assert [type(reply) for reply in manager.jobs.completed("g")] == [spanwire.Reply]
                assert manager.complete(endpoint, CALL).text == TEXT
                with manager.stream(endpoint, CALL) as stream:
                    assert "".join(chunk.text for chunk in stream) == TEXT

        await asyncio.to_thread(work)
