"""The store in Redis and Valkey, on a real Valkey: the kit, the same answers as SQLite's, and what such a store is made of."""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from spanwire_webhook.stores import redis_store
from spanwire_webhook.stores.redis import open_store
from spanwire_webhook.stores.redis_store import RedisStore

from spanwire.errors import ConfigurationError, JobError
from spanwire.jobs.contract import DAMAGED, OPEN, Delivery, JobRow, State, Store
from spanwire.jobs.sqlite import SQLiteStore
from spanwire.testing import StoreConformance
from tests.plugins.webhook.stores.valkey import Valkey

LARGE = bytes(range(256)) * 40


class TestRedis(StoreConformance):
    @pytest.fixture(autouse=True)
    def server(self, shared_valkey: Valkey, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TESTS_VALKEY_PORT", str(shared_valkey.port))  # for processes of their own

    def open(self, tmp_path: Path) -> RedisStore:
        prefix = hashlib.sha256(str(tmp_path).encode()).hexdigest()[:16]
        return open_store(f"valkey://127.0.0.1:{os.environ['TESTS_VALKEY_PORT']}/0?prefix={prefix}")

    def damage(self, store: Store, job: str) -> None:
        assert isinstance(store, RedisStore)
        (reference,) = store._link.run([("HGET", store._job(job), "i")])
        assert store._link.run([("DEL", store._body_key(reference))]) == [1]  # as a server does that evicts keys


# --- the same answers as SQLite's ---------------------------------------------------------------------------------------

STATES: tuple[State, ...] = ("created", "submitted", "running", "succeeded", "failed")
IDS = ("job-1", "job-2", "job-3")
ROWS = st.builds(
    JobRow,
    id=st.sampled_from(IDS),
    group=st.just("g"),
    dialect=st.just("d"),
    origin=st.sampled_from(["o", "q"]),
    state=st.sampled_from(STATES),
    attempt=st.integers(1, 2),
    provider_id=st.sampled_from([None, "p-1", "p-2"]),
    due_s=st.sampled_from([0.0, 10.0, 30.0]),
    poll_s=st.sampled_from([0.0, 5.0, 20.0]),
    resolved_s=st.sampled_from([1.0, 2.0, 1e9]),
    input=st.sampled_from([b"", b"call", LARGE]),
)
DELIVERIES = st.builds(
    Delivery,
    endpoint=st.just("d/hooks"),
    dedupe=st.sampled_from("ab"),
    job=st.sampled_from([None, "job-1", "job-2"]),
    provider_id=st.sampled_from([None, "p-1", "p-2"]),
    received_s=st.sampled_from([1.0, 1e9]),
    body=st.sampled_from([b"{}", LARGE]),
    verified=st.booleans(),
)
STEP = st.one_of(
    st.tuples(st.just("add"), st.lists(ROWS, min_size=1, max_size=2)),
    st.tuples(st.just("swap"), ROWS, st.tuples(st.sampled_from(STATES), st.integers(1, 2))),
    st.tuples(st.just("swap"), ROWS, st.none()),
    st.tuples(st.just("receive"), st.lists(DELIVERIES, max_size=3)),
    st.tuples(st.sampled_from(["applied", "verified", "sweep"]), st.integers(1, 4)),
)


def _step(store: Store, what: Sequence[Any]) -> object:
    name, *arguments = what
    if name == "add":
        try:
            store.add(arguments[0])
        except JobError:
            return "there already"
    elif name == "swap":
        row, was = arguments
        now = store.get(row.id)
        if now is not None:  # an input is written once, or dropped
            row = msgspec.structs.replace(row, input=now.input if row.input else b"", revision=now.revision)
            was = was or (now.state, now.attempt)
        return store.swap(row, was=was or ("created", 1))
    elif name == "receive":
        return store.receive(arguments[0])
    elif name == "sweep":
        return store.sweep(1e9)
    elif name == "applied":
        numbers = [number for number, _ in store.unapplied()]
        store.applied(numbers[: arguments[0]])
    else:
        numbers = [number for number, _ in store.quarantined()]
        if numbers:
            store.verified(numbers[0])
    return None


def _all(store: Store) -> dict[str, object]:
    def found(deliveries: list[tuple[int, Delivery]]) -> list[Delivery]:
        assert deliveries == sorted(deliveries, key=lambda one: one[0])
        return [delivery for _, delivery in deliveries]

    return {
        "rows": [store.get(one) for one in IDS],
        "found": [store.find("d", name) for name in ("p-1", "p-2")],
        "due": [sorted(row.id for row in store.due(now_s)) for now_s in (5.0, 10.0, 40.0)],
        "states": store.states(IDS),
        "open": (store.open_jobs(), store.open_jobs("g")),
        "completed": (store.completed("g"), store.completed("g", (1.0, "job-2"))),
        "waiting": [found(store.unapplied()), *(found(store.unapplied(job=one)) for one in IDS)],
        "theirs": [found(store.unapplied(provider=("d", name))) for name in ("p-1", "p-2")],
        "quarantined": found(store.quarantined()),
    }


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(STEP, max_size=12))
def test_it_answers_as_sqlite_does(shared_valkey: Valkey, monkeypatch: pytest.MonkeyPatch, steps: list[Any]) -> None:
    """Whatever is done, in whatever order."""
    monkeypatch.setattr("spanwire.jobs.sqlite.SQLiteStore._connect", _fast(SQLiteStore._connect))
    ours, theirs = open_store(shared_valkey.url()), SQLiteStore()
    try:
        for step in steps:
            assert _step(ours, step) == _step(theirs, step)
        assert _all(ours) == _all(theirs)
        # A sweep of everything leaves nothing behind but what belongs to the store itself and to jobs that are open.
        for row in [row for row in map(ours.get, IDS) if row is not None and row.state in OPEN]:
            gone = msgspec.structs.replace(row, state="failed", resolved_s=1.0)
            assert ours.swap(gone, was=(row.state, row.attempt))
        ours.sweep(3e9)
        with shared_valkey.client() as client:
            left = {key.rpartition(b"}:")[2].partition(b":")[0] for key in client.keys(ours._link.key("*"))}
            client.delete(*client.keys(ours._link.key("*")))
        assert left <= {b"version", b"instance_key", b"changed", b"changes", b"number", b"once", b"repeats", b"b"}
    finally:
        ours.close()
        theirs.close()


def _fast(connect: Callable[[SQLiteStore], Any]) -> Callable[[SQLiteStore], Any]:
    """The model need not be on the disk."""
    if getattr(connect, "fast", False):
        return connect

    def connected(store: SQLiteStore) -> Any:
        connection = connect(store)
        connection.execute("PRAGMA synchronous = OFF")
        return connection

    connected.fast = True  # type: ignore[attr-defined]
    return connected


# --- bodies -------------------------------------------------------------------------------------------------------------


def test_bodies_go_with_what_refers_to_them(shared_valkey: Valkey) -> None:
    """A result with its job, an input when it is dropped, a delivery's when it was applied, and after an hour what nobody took."""
    store = open_store(shared_valkey.url())
    client = shared_valkey.client()

    def bodies() -> list[int]:
        return sorted(client.ttl(key) for key in client.keys(store._link.key("b:*")))

    row = JobRow(id="j", input=LARGE)
    store.add([row])
    assert bodies() == [-1]  # for as long as the job
    reference = store.put_body(LARGE)
    assert [0 < ttl <= 3600 for ttl in bodies()] == [False, True]
    done = msgspec.structs.replace(row, state="succeeded", input=b"", result=reference, resolved_s=1.0)
    assert store.swap(done, was=("created", 1))
    assert bodies() == [-1]
    store.receive([Delivery(endpoint="d", dedupe="a", job="j", body=LARGE)])
    store.receive([Delivery(endpoint="d", dedupe="a", job="j", body=LARGE)])
    assert bodies() == [-1, -1]
    store.applied([number for number, _ in store.unapplied()])
    assert bodies() == [-1]
    assert store.sweep(1e9) == 2
    assert bodies() == []
    with pytest.raises(JobError, match="gone"):
        store.body(reference)
    client.close()
    store.close()


def test_a_webhook_whose_body_is_gone_stops_no_other(shared_valkey: Valkey) -> None:
    """That it has come is known: its provider is asked. One that was applied in between is not taken for that."""
    store = open_store(shared_valkey.url())
    store.add([JobRow(id="j", state="submitted")])
    came = [Delivery(endpoint="d", dedupe=name, job="j", body=LARGE) for name in "ab"]
    store.receive(came)
    (reference,) = store._link.run([("HGET", store._link.key("d:1"), "b")])
    store._link.run([("DEL", store._body_key(reference))])
    lost = msgspec.structs.replace(came[0], body=b"", flags=(DAMAGED,))
    assert [found for _, found in store.unapplied()] == [lost, came[1]]
    bodies = store._bodies

    def applied_meanwhile(references: Sequence[bytes]) -> list[bytes | None]:
        store.applied([1])
        return bodies(references)

    with pytest.MonkeyPatch.context() as meanwhile:
        meanwhile.setattr(store, "_bodies", applied_meanwhile)
        assert [found for _, found in store.unapplied()] == [came[1]]
    store.close()


# --- waking -------------------------------------------------------------------------------------------------------------


def test_who_subscribes_is_woken(shared_valkey: Valkey) -> None:
    """By anybody's write, until it ends its subscription; the thread goes with the last one."""
    store, other = open_store(shared_valkey.url("wakes")), open_store(shared_valkey.url("wakes"))
    first, second = threading.Event(), threading.Event()
    stops = [store.subscribe(first.set), store.subscribe(second.set)]
    other.add([JobRow(id="1")])
    assert first.wait(30)
    assert second.wait(30)
    stops[0]()
    for event in (first, second):
        event.clear()
    store.receive([Delivery(endpoint="d", dedupe="a")])
    assert second.wait(30)
    assert not first.is_set()
    stops[1]()
    stops[1]()
    assert not any(thread.name == "spanwire store listener" for thread in threading.enumerate())
    again = threading.Event()
    store.subscribe(again.set)
    other.swap(JobRow(id="1", state="running"), was=("created", 1))
    assert again.wait(30)
    for one in (store, other):
        one.close()
    assert not any(thread.name == "spanwire store listener" for thread in threading.enumerate())


def test_who_subscribes_is_woken_after_a_restart(tmp_path: Path) -> None:
    """Also of what was written while nobody listened."""
    server = Valkey(tmp_path)
    store = open_store(server.url("wakes"))
    woken = threading.Event()
    store.subscribe(woken.set)
    server.kill()
    server.start()
    woken.clear()
    store.add([JobRow(id="1")])
    assert woken.wait(30)
    server.kill()
    store.close()


# --- processes ----------------------------------------------------------------------------------------------------------


def test_a_forked_child_uses_its_own_connections(shared_valkey: Valkey) -> None:
    """And leaves its parent's alone, closed or not."""
    code = (
        "import os, sys\n"
        "from spanwire.jobs.contract import JobRow\n"
        "from spanwire_webhook.stores.redis import open_store\n"
        "store = open_store(sys.argv[1])\n"
        "stop = store.subscribe(lambda: None)\n"
        "store.add([JobRow(id='1')]); store.get('1')\n"
        "if os.fork() == 0:\n"
        "    store.add([JobRow(id='2')])\n"
        "    found = store.get('1')\n"
        "    store.subscribe(lambda: None)\n"
        "    store.close()\n"
        "    os._exit(0 if found else 1)\n"
        "assert os.waitstatus_to_exitcode(os.wait()[1]) == 0\n"
        "if os.fork() == 0:\n"
        "    store.close(); os._exit(0)\n"
        "assert os.waitstatus_to_exitcode(os.wait()[1]) == 0\n"
        "store.add([JobRow(id='3')])\n"
        "assert store.get('2') and store.get('3')\n"
        "store.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, shared_valkey.url()],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_close_leaves_no_connection(shared_valkey: Valkey) -> None:
    """Nor does an opening that fails."""
    with shared_valkey.client() as client:
        before = {one["id"] for one in client.client_list()}
        store = open_store(shared_valkey.url("closes"))
        store.subscribe(lambda: None)
        store.add([JobRow(id="1")])
        store.close()
        client.set("{closes}:version", 99)
        with pytest.raises(ConfigurationError):
            open_store(shared_valkey.url("closes"))
        while {one["id"] for one in client.client_list()} - before:
            pass  # the server hears of it a moment later


# --- versions -----------------------------------------------------------------------------------------------------------


def test_a_newer_store_is_refused(shared_valkey: Valkey) -> None:
    """When it is opened, and when another process has brought it to a newer version meanwhile: nothing is written."""
    store = open_store(shared_valkey.url("newer"))
    store.add([JobRow(id="1")])
    with shared_valkey.client() as client:
        client.set("{newer}:version", 2)
    with pytest.raises(ConfigurationError, match="pip install -U"):
        open_store(shared_valkey.url("newer"))
    with pytest.raises(ConfigurationError, match="pip install -U"):
        store.add([JobRow(id="2")])
    assert store.open_jobs() == 1
    store.close()


def test_an_older_store_is_brought_here_once(
    shared_valkey: Valkey, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A step that writes the rows anew, cut off in the middle by the first who tries, then done by one of four who open it at
    once. Version 0 kept the model's name as ``engine``."""
    old = open_store(shared_valkey.url("older"))
    old.add([JobRow(id=f"job-{number}", model="m", input=b"call") for number in range(50)])
    with shared_valkey.client() as client:
        for number in range(50):
            key = f"{{older}}:j:job-{number}"
            row = msgspec.msgpack.decode(client.hget(key, "r"))
            row["engine"] = row.pop("model")
            client.hset(key, "r", msgspec.msgpack.encode(row))
        client.set("{older}:version", 0)
    runs: list[int] = []

    def step(run: Callable[[Sequence[Any]], list[Any]], prefix: str) -> None:
        runs.append(0)
        cursor = b"0"
        while True:
            cursor, keys = run([("SCAN", cursor, "MATCH", f"{prefix}j:*", "COUNT", 1000)])[0]
            for key in keys:
                row = msgspec.msgpack.decode(run([("HGET", key, "r")])[0])
                if "engine" in row:
                    row["model"] = row.pop("engine")
                    run([("HSET", key, "r", msgspec.msgpack.encode(row))])
                runs[-1] += 1
                if len(runs) == 1 and runs[0] == 20:
                    raise JobError("cut off", retryable=True)
            if int(cursor) == 0:
                return

    monkeypatch.setattr(redis_store, "STEPS", {0: step})
    with pytest.raises(JobError, match="cut off"):
        open_store(shared_valkey.url("older"))
    with pytest.raises(ConfigurationError):
        old.add([JobRow(id="new")])  # by whom it was opened before
    stores: list[RedisStore] = []
    with caplog.at_level(logging.INFO, "spanwire.jobs"):
        threads = [
            threading.Thread(target=lambda: stores.append(open_store(shared_valkey.url("older")))) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [runs[0], len(runs), runs[1]] == [20, 2, 50]
    assert caplog.text.count("from version 0 to 1") == 1
    for number in range(50):
        row = stores[number % 4].get(f"job-{number}")
        assert row is not None
        assert (row.model, row.input) == ("m", b"call")
    with shared_valkey.client() as client:
        assert client.get("{older}:version") == b"1"
    for store in [old, *stores]:
        store.close()
