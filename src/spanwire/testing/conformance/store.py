"""What every store of jobs has to do: :class:`StoreConformance`."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ...errors import JobError
from ...jobs.contract import Delivery, JobRow, State, Store, Times, Wakes

__all__ = ["StoreConformance"]

#: Long enough for a body to be worth a place of its own.
_LARGE = bytes(range(256)) * 1024


def _row(number: int = 1, **more: Any) -> JobRow:
    return JobRow(id=f"0197d0c0-0000-7000-8000-{number:012d}", dialect="d", created_s=1.0, **more)


def _delivery(dedupe: str = "m-1", **more: Any) -> Delivery:
    return Delivery(endpoint="d/hooks", dedupe=dedupe, received_s=5.0, **more)


class StoreConformance:
    """Tests that every store has to pass. A subclass says by :meth:`open` (or :meth:`url`) how it is opened."""

    def url(self, tmp_path: Path) -> str:
        """The store's URL; a new and empty one for each ``tmp_path``."""
        raise NotImplementedError("a subclass says url() or open()")

    def damage(self, store: Store, job: str) -> None:
        """Lose the input of this job, 256 KiB, and no other's, as a disk or a server does that loses one thing. A store that
        cannot lose one without the others leaves this."""
        pytest.skip("a subclass says by damage() what it looks like when something is lost in the store")

    def open(self, tmp_path: Path) -> Store:
        """Open it, or open it again: another view of the same jobs, as another process has it."""
        from ...jobs.stores import open_store

        return open_store(self.url(tmp_path))

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        """The store under test."""
        store = self.open(tmp_path)
        yield store
        store.close()

    @pytest.fixture
    def other(self, store: Store, tmp_path: Path) -> Iterator[Store]:
        """The same one, as another process sees it."""
        other = self.open(tmp_path)
        yield other
        other.close()

    # --- rows -------------------------------------------------------------------------------------------------------

    def test_a_job_comes_back_as_it_was(self, store: Store, other: Store) -> None:
        """Every field, by whoever asks."""
        row = _row(
            group="g",
            endpoint="h:1",
            origin="http://h:1",
            mode="poll",
            model="m",
            operation="embeddings",
            attempt=3,
            provider_id="p-1",
            urls={"status": "https://h/s"},
            state="running",
            submitted_s=2.0,
            due_s=100.5,
            poll_s=50.5,
            times=Times(accepted_s=1.5, queue_s=0.25),
            trace={"traceparent": "00-1-2-01"},
            input=_LARGE,
            code="c",
            message="é",
            flags=("stale",),
        )
        store.add([row])
        assert store.get(row.id) == row
        assert other.get(row.id) == row
        assert store.get("unknown") is None

    def test_the_same_job_is_not_added_twice(self, store: Store) -> None:
        """And those that came with it are not there in part."""
        store.add([_row(1)])
        with pytest.raises(JobError):
            store.add([_row(2), _row(1)])
        assert store.get(_row(2).id) is None

    def test_a_job_is_found_by_the_providers_id(self, store: Store, other: Store) -> None:
        """Once it is known, of that dialect, also where another attempt has another one by now."""
        store.add([_row()])
        assert store.find("d", "p-1") is None
        assert store.swap(_row(state="submitted", provider_id="p-1"), was=("created", 1))
        assert other.find("d", "p-1") == _row(state="submitted", provider_id="p-1", revision=1)
        assert other.find("e", "p-1") is None
        assert store.swap(_row(state="created", attempt=2, revision=1), was=("submitted", 1))
        assert store.swap(_row(state="submitted", attempt=2, provider_id="p-2", revision=2), was=("created", 2))
        for provider_id in ("p-1", "p-2"):
            found = other.find("d", provider_id)
            assert found is not None
            assert found.id == _row().id

    # --- compare-and-set --------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("was", "fits"), [(("created", 1), True), (("submitting", 1), False), (("created", 2), False)]
    )
    def test_a_swap_needs_state_and_attempt(self, store: Store, was: tuple[State, int], fits: bool) -> None:
        """Else nothing is written."""
        store.add([_row()])
        assert store.swap(_row(state="submitted"), was=was) is fits
        found = store.get(_row().id)
        assert found is not None
        assert found.state == ("submitted" if fits else "created")

    def test_two_writes_of_one_state_are_both_kept(self, store: Store, other: Store) -> None:
        """Whoever writes what it has read before another one's write is told, and reads again: nothing is written over."""
        store.add([_row(state="submitting")])
        mine, theirs = store.get(_row().id), other.get(_row().id)
        assert mine is not None
        assert theirs is not None
        mine.provider_id = "p-1"
        theirs.flags = ("fetch",)
        assert store.swap(mine, was=("submitting", 1))
        assert not other.swap(theirs, was=("submitting", 1))
        again = other.get(_row().id)
        assert again is not None
        again.flags = ("fetch",)
        assert other.swap(again, was=("submitting", 1))
        found = store.find("d", "p-1")
        assert found is not None
        assert (found.flags, found.revision) == (("fetch",), 2)

    def test_a_swap_of_nothing_fails(self, store: Store) -> None:
        """A job that was swept away does not come back."""
        assert not store.swap(_row(), was=("created", 1))
        assert store.get(_row().id) is None

    def test_one_of_many_gets_it(self, store: Store, other: Store) -> None:
        """Sixteen threads on two views resolve forty jobs: each once."""
        rows = [_row(number) for number in range(40)]
        store.add(rows)
        barrier = threading.Barrier(16)

        def resolve(who: int) -> int:
            mine = (store, other)[who % 2]
            barrier.wait()
            return sum(
                mine.swap(_row(number, state="succeeded", message=str(who)), was=("created", 1)) for number in range(40)
            )

        with ThreadPoolExecutor(16) as threads:
            assert sum(threads.map(resolve, range(16))) == 40

    def test_one_of_several_processes_gets_it(self, store: Store, tmp_path: Path) -> None:
        """Each process opens the store by itself."""
        store.add([_row(number) for number in range(20)])
        context = multiprocessing.get_context("spawn")
        with context.Pool(3) as pool:
            won = pool.map(_win, [(type(self), str(tmp_path))] * 3)
        assert sum(won) == 20

    # --- what is due, open, completed -------------------------------------------------------------------------------

    def test_what_is_due(self, store: Store) -> None:
        """By deadline or next poll, whichever is first; never what has ended."""
        store.add(
            [
                _row(1, due_s=100.0),
                _row(2, due_s=100.0, poll_s=10.0),
                _row(3),
                _row(4, due_s=5.0, state="succeeded", resolved_s=1.0),
                _row(5, poll_s=20.0, state="running"),
            ]
        )
        ids = [_row(number).id for number in range(6)]
        assert [row.id for row in store.due(9.9)] == []
        assert [row.id for row in store.due(10.0)] == [ids[2]]
        assert [row.id for row in store.due(20.0)] == [ids[2], ids[5]]
        assert [row.id for row in store.due(1000.0)] == [ids[2], ids[5], ids[1]]
        assert len(store.due(1000.0, limit=1)) == 1
        assert store.swap(_row(2, state="succeeded", resolved_s=11.0), was=("created", 1))
        assert [row.id for row in store.due(20.0)] == [ids[5]]

    def test_a_job_whose_input_is_gone_stops_no_other(self, store: Store, tmp_path: Path) -> None:
        """It comes without it, by every way, so that it can be ended. The others are whole."""
        store.add([_row(n, origin="o", poll_s=float(n), provider_id=f"p-{n}", input=_LARGE) for n in (1, 2)])
        self.damage(store, _row(1).id)
        other = self.open(tmp_path)  # which knows nothing of it
        try:
            for rows in (other.due(9.0), other.due(9.0, parties=[("o", "d")], lease_s=60.0)):
                assert [(row.id, row.input) for row in rows] == [(_row(1).id, b""), (_row(2).id, _LARGE)]
            for row in (other.get(_row(1).id), other.find("d", "p-1")):
                assert row is not None
                assert row.input == b""
            assert row is not None
            ended = msgspec.structs.replace(row, state="failed", resolved_s=1.0)
            assert other.swap(ended, was=("created", 1))
            assert [row.state for row in other.completed("")] == ["failed"]
        finally:
            other.close()

    def test_what_is_due_of_some_parties(self, store: Store, other: Store) -> None:
        """Of these alone; and of nobody else where there are none."""
        store.add(
            [
                _row(1, origin="http://h:1", poll_s=3.0),
                _row(2, origin="http://h:2", poll_s=2.0),
                _row(3, origin="http://h:3", poll_s=1.0),
                msgspec.structs.replace(_row(4, origin="http://h:1", poll_s=4.0), dialect="e"),
                _row(5, origin="http://h:1", poll_s=99.0),
            ]
        )

        def due(*parties: tuple[str, str], limit: int = 500) -> list[str]:
            return [row.id[-1] for row in other.due(9.0, limit, parties=parties)]

        assert due(("http://h:1", "d")) == ["1"]
        assert due(("http://h:1", "e")) == ["4"]
        assert due(("http://h:1", "d"), ("http://h:3", "d"), ("http://h:1", "e")) == ["3", "1", "4"]
        assert due(("http://h:1", "d"), ("http://h:3", "d"), limit=1) == ["3"]
        assert due() == due(("http://h:9", "d")) == []

    def test_what_is_leased_is_not_due(self, store: Store, other: Store) -> None:
        """For anybody, until the lease ends or the job is written. The row is as it was."""
        store.add([_row(1, origin="o", poll_s=10.0), _row(2, origin="o", poll_s=20.0)])
        assert other.due(30.0) == store.due(30.0)  # a look leases nothing
        assert store.due(30.0, 1, parties=[("o", "d")], lease_s=5.0) == [_row(1, origin="o", poll_s=10.0)]
        assert [row.id for row in other.due(34.9, lease_s=5.0)] == [_row(2).id]
        assert other.due(34.9) == store.due(34.9, parties=[("o", "d")]) == []
        assert [row.id for row in store.due(35.0)] == [_row(1).id]
        assert store.get(_row(1).id) == _row(1, origin="o", poll_s=10.0)
        assert store.swap(_row(2, origin="o", poll_s=31.0), was=("created", 1))
        assert [row.id for row in other.due(31.0, parties=[("o", "d")])] == [_row(2).id]

    def test_no_lease_is_given_twice(self, store: Store, other: Store) -> None:
        """Eight threads on two views, of jobs and of deliveries, until nothing is left."""
        store.add([_row(number, origin="o", poll_s=1.0) for number in range(100)])
        store.receive([_delivery(str(number), job=_row(number).id) for number in range(100)])
        barrier = threading.Barrier(8)

        def take(who: int) -> tuple[list[str], list[str]]:
            mine = (store, other)[who % 2]
            jobs: list[str] = []
            deliveries: list[str] = []
            barrier.wait()
            for _ in range(200):  # a look may find everything in the hands of others, and more is left
                some = mine.due(9.0, 7, parties=[("o", "d")], lease_s=600.0)
                came = mine.unapplied(limit=7, lease_s=600.0)
                jobs += [row.id for row in some]
                deliveries += [found.dedupe for _, found in came]
                if not some and not came and not mine.due(9.0):
                    break
            return jobs, deliveries

        with ThreadPoolExecutor(8) as threads:
            took = list(threads.map(take, range(8)))
        jobs = [job for mine, _ in took for job in mine]
        deliveries = [one for _, mine in took for one in mine]
        assert len(jobs) == len(set(jobs)) == 100
        assert len(deliveries) == len(set(deliveries)) == 100

    def test_states(self, store: Store, other: Store) -> None:
        """Of those that are here, however many are asked for."""
        store.add([_row(1), _row(2, state="running"), _row(3, state="failed", resolved_s=1.0)])
        ids = [_row(number).id for number in range(2500)]
        assert other.states(ids) == {ids[1]: "created", ids[2]: "running", ids[3]: "failed"}
        assert other.states([]) == {}
        assert other.states(["no id of ours"]) == {}

    def test_how_many_are_open(self, store: Store) -> None:
        """Of a group, or of all."""
        store.add([_row(1, group="a"), _row(2, group="a", state="failed", resolved_s=1.0), _row(3, group="b")])
        assert (store.open_jobs(), store.open_jobs("a"), store.open_jobs("c")) == (2, 1, 0)

    def test_completed_jobs_come_in_order_and_once(self, store: Store) -> None:
        """Whoever goes on from the last one it has seen misses none."""
        for number, at in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 2.0)):
            store.add([_row(number, group="g", state="succeeded", resolved_s=at)])
        store.add([_row(5, group="g"), _row(6, group="h", state="succeeded", resolved_s=1.0)])
        rows = store.completed("g")
        assert [row.id[-1] for row in rows] == ["2", "3", "4", "1"]
        assert [row.id[-1] for row in store.completed("g", (2.0, rows[1].id))] == ["4", "1"]

    # --- the inbox --------------------------------------------------------------------------------------------------

    def test_a_delivery_is_taken_once(self, store: Store, other: Store) -> None:
        """By its endpoint and key, in one call or in two, here or there."""
        assert store.receive([_delivery("a"), _delivery("a"), _delivery("b")]) == [True, False, True]
        assert other.receive([_delivery("b")]) == [False]
        assert other.receive([msgspec.structs.replace(_delivery("b"), endpoint="e/hooks")]) == [True]

    def test_one_of_many_delivers(self, store: Store, other: Store) -> None:
        """The same delivery on sixteen threads at once."""
        with ThreadPoolExecutor(16) as threads:
            taken = list(threads.map(lambda who: (store, other)[who % 2].receive([_delivery()])[0], range(16)))
        assert taken.count(True) == 1

    @pytest.mark.parametrize("body", [b"", b"{}", _LARGE])
    def test_a_delivery_comes_back_as_it_was(self, store: Store, other: Store, body: bytes) -> None:
        """Its raw bytes above all."""
        store.add([_row()])
        delivery = _delivery(job=_row().id, attempt=1, headers={"webhook-id": "m"}, body=body, flags=("stale",))
        store.receive([delivery])
        ((number, found),) = other.unapplied(job=_row().id)
        assert found == delivery
        other.applied([number])
        assert store.unapplied(job=_row().id) == []

    def test_many_deliveries_come_at_once(self, store: Store, other: Store) -> None:
        """As after a pause of the store: each is there once, in its order, with its bytes."""
        store.add([_row()])
        many = [_delivery(str(number), job=_row().id, body=b"%d" % number) for number in range(1500)]
        assert store.receive([*many[:700], many[3]]) == [True] * 700 + [False]
        assert store.receive(many) == [False] * 700 + [True] * 800
        assert store.receive([]) == []
        found = other.unapplied(limit=2000)
        assert [delivery for _, delivery in found] == many
        other.applied([number for number, _ in found])
        assert store.unapplied() == []

    def test_a_leased_delivery_is_not_given_to_who_leases(self, store: Store, other: Store) -> None:
        """Whoever only looks, or looks for one job, sees it; and whoever leases when the lease has ended."""
        store.add([_row(1), _row(2)])
        store.receive([_delivery("a", job=_row(1).id), _delivery("b", job=_row(2).id), _delivery("orphan", job="none")])
        ((number, found),) = store.unapplied(limit=1, lease_s=600.0)
        assert found == _delivery("a", job=_row(1).id)
        assert [found.dedupe for _, found in other.unapplied()] == ["a", "b"]
        assert [found.dedupe for _, found in other.unapplied(job=_row(1).id)] == ["a"]
        assert [found.dedupe for _, found in other.unapplied(lease_s=0.001)] == ["b"]
        again: list[str] = []
        while not again:  # a thousandth of a second by the store's clock
            again = [found.dedupe for _, found in store.unapplied(lease_s=600.0)]
        assert again == ["b"]
        store.applied([number])
        assert [found.dedupe for _, found in store.unapplied()] == ["b"]

    def test_orphans_wait_for_their_job(self, store: Store) -> None:
        """By our id, and by the provider's."""
        store.receive([_delivery("a", job=_row(1).id), _delivery("b", provider_id="p-2"), _delivery("c")])
        assert store.unapplied() == []
        store.add([_row(1), _row(2, state="submitted", provider_id="p-2")])
        assert [found.dedupe for _, found in store.unapplied()] == ["a", "b"]
        assert [found.dedupe for _, found in store.unapplied(provider=("d", "p-2"))] == ["b"]
        assert [found.dedupe for _, found in store.unapplied(job=_row(1).id)] == ["a"]
        assert store.unapplied(provider=("e", "p-2")) == []
        assert [found.dedupe for _, found in store.unapplied(limit=1)] == ["a"]

    def test_what_is_not_verified_waits_apart(self, store: Store) -> None:
        """It resolves nobody, and does not stand in the way of the same one, verified."""
        store.add([_row()])
        forged = _delivery(job=_row().id, verified=False, flags=("unverified",))
        assert store.receive([forged, forged]) == [True, False]
        assert store.unapplied() == []
        ((number, found),) = store.quarantined()
        assert found == forged
        assert store.receive([_delivery(job=_row().id)]) == [True]
        store.verified(number)  # the same one is there, verified: nobody needs it twice
        assert store.quarantined() == []
        assert len(store.unapplied()) == 1

    def test_quarantine_is_left_by_who_was_verified_after_all(self, store: Store) -> None:
        """The secret was wrong, and is right now."""
        store.add([_row()])
        store.receive([_delivery(job=_row().id, verified=False, body=_LARGE)])
        store.verified(store.quarantined()[0][0])
        ((_, found),) = store.unapplied()
        assert found.verified
        assert found.body == _LARGE

    # --- bodies, changes, age -----------------------------------------------------------------------------------------

    @pytest.mark.parametrize("size", [0, 1, 4096, 4097, 300_000])
    def test_a_body_comes_back(self, store: Store, other: Store, size: int) -> None:
        """From any process, after any other."""
        body = (_LARGE * 2)[:size]
        reference = store.put_body(body)
        store.put_body(b"another" * 1000)
        assert reference
        assert other.body(reference) == store.body(reference) == body

    def test_changes_are_noticed(self, store: Store, other: Store) -> None:
        """By whoever watches, whoever made them. While nobody writes it comes to rest."""
        for writer in (store, other):
            for watcher in (store, other):
                before = watcher.changed()
                for _ in range(1000):
                    last, before = before, watcher.changed()
                    if last == before:
                        break
                else:
                    pytest.fail("it changes all the time, and nobody writes")
                writer.receive([_delivery(f"{id(writer)} {id(watcher)}")])
                assert watcher.changed() != before

    def test_who_subscribes_is_told(self, store: Store, other: Store) -> None:
        """Of every kind of write that others wait for, by whoever made it, until it is ended."""
        if not isinstance(store, Wakes):
            pytest.skip("this store has no subscribe()")
        woken, too = threading.Event(), threading.Event()
        end = store.subscribe(woken.set)
        end_too = store.subscribe(too.set)
        writes: list[Callable[[Store], object]] = [
            lambda by: by.add([_row()]),
            lambda by: by.swap(_row(state="submitted"), was=("created", 1)),
            lambda by: by.receive([_delivery()]),
        ]
        for write, by in zip(writes, (other, store, other), strict=True):
            woken.clear()
            too.clear()
            write(by)
            assert woken.wait(20)
            assert too.wait(20)
        end()
        end()
        woken.clear()
        too.clear()
        other.receive([_delivery("another")])
        assert too.wait(20)
        assert not woken.is_set()
        end_too()

    def test_the_sweep_takes_what_is_old(self, store: Store) -> None:
        """Ended jobs and deliveries; never an open job, and no body that somebody needs."""
        body = store.put_body(_LARGE)
        now_s = 1e9
        store.add(
            [
                _row(1, state="succeeded", resolved_s=1.0),
                _row(2, state="succeeded", resolved_s=now_s - 60, result=body),
                _row(3, provider_id="p-3", input=_LARGE),
            ]
        )
        store.receive([_delivery("old"), msgspec.structs.replace(_delivery("new"), received_s=now_s - 60)])
        assert store.sweep(now_s) == 2
        assert store.get(_row(1).id) is None
        kept = store.get(_row(2).id)
        assert kept is not None
        assert store.body(kept.result) == _LARGE
        found = store.get(_row(3).id)
        assert found is not None
        assert found.input == _LARGE
        assert store.receive([_delivery("new"), _delivery("old")]) == [False, True]

    # --- across openings ----------------------------------------------------------------------------------------------

    def test_what_was_written_is_there_after_a_restart(self, store: Store, tmp_path: Path) -> None:
        """All of it."""
        store.add([_row(input=b"call")])
        store.receive([_delivery(job=_row().id, body=_LARGE)])
        reference = store.put_body(_LARGE)
        store.close()
        again = self.open(tmp_path)
        try:
            assert again.get(_row().id) == _row(input=b"call")
            assert again.unapplied()[0][1].body == _LARGE
            assert again.body(reference) == _LARGE
        finally:
            again.close()

    def test_a_closed_store_says_so(self, store: Store) -> None:
        """By an error of ours, however often it is closed."""
        store.close()
        store.close()
        with pytest.raises(JobError):
            store.add([_row()])
        with pytest.raises(JobError):
            store.get("x")


def _win(how: tuple[type[StoreConformance], str]) -> int:
    """In a process of its own."""
    kind, folder = how
    store = kind().open(Path(folder))
    try:
        return sum(
            store.swap(_row(number, state="succeeded", resolved_s=1.0), was=("created", 1)) for number in range(20)
        )
    finally:
        store.close()
