"""The SQLite store: the kit, every order of events on it, and what a crash leaves."""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from spanwire.errors import ConfigurationError, JobError
from spanwire.jobs import segments as segments_module
from spanwire.jobs import sqlite as sqlite_module
from spanwire.jobs import sqlite_schema
from spanwire.jobs.apply import apply_deliveries, learn
from spanwire.jobs.contract import DAMAGED, Delivery, JobRow, Seen, Store
from spanwire.jobs.segments import Segments
from spanwire.jobs.sqlite import SQLiteStore
from spanwire.jobs.stores import open_store
from spanwire.testing import StoreConformance
from tests.core.jobs.simple import Simple, said


class TestSQLite(StoreConformance):
    def url(self, tmp_path: Path) -> str:
        return f"sqlite:///{tmp_path}/jobs.db"

    def damage(self, store: Store, job: str) -> None:
        assert isinstance(store, SQLiteStore)
        spoil(store, "SELECT input FROM job WHERE id = ?", job)


def spoil(store: SQLiteStore, select: str, who: object) -> Path:
    """Change one byte of a body on the disk."""
    connection = sqlite3.connect(store.path)
    ((reference,),) = connection.execute(select, (who,)).fetchall()
    connection.close()
    name, offset, _, _ = segments_module._PLACE.unpack(reference[1:])
    path = Path(f"{store.path}-bodies") / f"{name.decode()}.bodies"
    whole = bytearray(path.read_bytes())
    whole[offset] ^= 1
    path.write_bytes(whole)
    return path


# --- every order --------------------------------------------------------------------------------------------------------

EVENTS = ("ack", "start", "done", "same again", "done, new id", "poll")


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, where there is one: thousands of commits wait for no disk there."""
    shared = "/dev/shm"
    if not os.access(shared, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=shared) as folder:
        yield Path(folder)


@pytest.mark.parametrize("callback", ["request", "account"])
def test_a_job_is_resolved_once_in_every_order(memory: Path, callback: Literal["request", "account"]) -> None:
    """The webhooks go through the inbox, and are taken in when they can be; what is known by the ack alone waits for it."""
    store = SQLiteStore(memory / "jobs.db")
    codec = Simple(callback)
    orders = list(permutations(EVENTS))
    assert len(orders) == 720
    for number, order in enumerate(orders):
        job, theirs = f"job-{number:04d}", f"p-{number}"
        store.add([JobRow(id=job, dialect="d", state="submitting", input=b"call", created_s=1.0)])
        mine = job if callback == "request" else None
        resolved = 0

        def deliver(dedupe: str, body: bytes, *, mine: str | None = mine, theirs: str = theirs) -> bool:
            delivery = Delivery(
                endpoint="d/hooks",
                dedupe=f"{theirs} {dedupe}",
                job=mine,
                attempt=1 if mine else 0,
                provider_id=theirs,
                body=body,
            )
            return store.receive([delivery])[0]

        done = said("done", theirs, output="yes")
        for event in order:
            if event == "ack":
                learned = learn(store, job, Seen(state="submitted", provider_id=theirs), by="ack", now_s=2.0)
                resolved += learned is not None and learned.resolved
            elif event == "start":
                deliver("start", said("running", theirs))
            elif event in ("done", "same again"):
                deliver("done", done)
            elif event == "done, new id":
                deliver("done2", done)
            elif (row := store.get(job)) is not None and row.provider_id is not None:
                learned = learn(store, job, codec.webhook({}, done), by="poll", now_s=2.0)
                resolved += learned is not None and learned.resolved
            for applied in apply_deliveries(store, store.unapplied(), lambda row: codec, now_s=3.0):
                resolved += applied.learned is not None and applied.learned.resolved
        assert resolved == 1, order
        row = store.get(job)
        assert row is not None
        assert row.state == "succeeded"
        assert store.body(row.result) == done
        assert store.unapplied() == []
    store.close()


# --- the file -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "mysql://x/y",
        "jobs.db",
        "sqlite://host/jobs.db",
        "sqlite:///x?keep=1",
        "sqlite:///x?keep_s=0",
        "sqlite:///x?keep_s=a",
        "",
    ],
)
def test_a_url_that_is_no_store_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError):
        open_store(url)


def test_a_private_store_goes_with_its_owner() -> None:
    store = open_store("sqlite://")
    assert isinstance(store, SQLiteStore)
    assert store.path.exists()
    store.put_body(b"x" * 10_000)
    store.close()
    assert not store.path.parent.exists()


def test_results_are_for_the_owner_alone(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "a" / "jobs.db")
    store.put_body(b"x" * 10_000)
    store.add([JobRow(id="1")])
    for path in [store.path, *store.path.parent.glob("*-wal"), *store.path.parent.glob("*-bodies/*")]:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    store.close()


def test_a_file_that_is_no_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "jobs.db").write_text("a letter to my aunt " * 100)
    with pytest.raises(ConfigurationError, match="cannot be opened"):
        SQLiteStore(tmp_path / "jobs.db")


def test_a_newer_store_names_the_upgrade(tmp_path: Path) -> None:
    SQLiteStore(tmp_path / "jobs.db").close()
    connection = sqlite3.connect(tmp_path / "jobs.db")
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(ConfigurationError, match="pip install -U spanwire"):
        SQLiteStore(tmp_path / "jobs.db")


def test_the_instance_key_is_the_stores(tmp_path: Path) -> None:
    one, two = SQLiteStore(tmp_path / "jobs.db"), SQLiteStore(tmp_path / "jobs.db")
    assert len(one.instance_key()) == 32
    assert one.instance_key() == two.instance_key()
    one.close()
    two.close()


@pytest.mark.parametrize("parties", [None, [("http://h:1", "d"), ("http://h:2", "d")]])
def test_what_is_due_is_looked_up(tmp_path: Path, parties: list[tuple[str, str]] | None) -> None:
    """By its index: a scan of a hundred thousand open jobs each tenth of a second would be all that the process does."""
    store = SQLiteStore(tmp_path / "jobs.db")
    store.add([JobRow(id="1", origin="http://h:1", dialect="d", due_s=1.0)])
    asked: list[str] = []
    connection = sqlite3.connect(store.path)
    connection.set_trace_callback(asked.append)
    sqlite_module._due(5.0, 500, parties, connection)
    connection.set_trace_callback(None)
    plans = [plan for one in asked for *_, plan in connection.execute(f"EXPLAIN QUERY PLAN {one}")]
    looks = [plan for plan in plans if " job " in plan]
    assert len(looks) == len(parties or "123")  # the last: which parties there are
    assert all("SEARCH" in plan and "INDEX job_due" in plan for plan in looks), plans
    assert not any("TEMP B-TREE" in plan for plan in plans)  # nothing is sorted
    connection.close()
    store.close()


#: What version 1 was made by.
V1 = """
CREATE TABLE job(
    id TEXT PRIMARY KEY, grp TEXT NOT NULL, state TEXT NOT NULL, attempt INTEGER NOT NULL, open INTEGER NOT NULL,
    next_s REAL, resolved_s REAL NOT NULL, input BLOB NOT NULL, result BLOB NOT NULL, row BLOB NOT NULL);
CREATE INDEX job_due ON job(next_s) WHERE open = 1 AND next_s IS NOT NULL;
CREATE INDEX job_open ON job(grp) WHERE open = 1;
CREATE INDEX job_completed ON job(grp, resolved_s, id) WHERE open = 0;
CREATE INDEX job_age ON job(resolved_s) WHERE open = 0;
CREATE TABLE provider_id(
    dialect TEXT NOT NULL, provider_id TEXT NOT NULL, job TEXT NOT NULL, PRIMARY KEY(dialect, provider_id, job));
CREATE INDEX provider_id_job ON provider_id(job);
CREATE TABLE inbox(
    number INTEGER PRIMARY KEY AUTOINCREMENT, endpoint TEXT NOT NULL, dedupe TEXT NOT NULL, verified INTEGER NOT NULL,
    dialect TEXT NOT NULL, job TEXT, provider_id TEXT, received_s REAL NOT NULL, applied INTEGER NOT NULL,
    body BLOB NOT NULL, delivery BLOB NOT NULL);
CREATE UNIQUE INDEX inbox_once ON inbox(endpoint, dedupe, verified);
CREATE INDEX inbox_waiting ON inbox(number) WHERE applied = 0 AND verified = 1;
CREATE INDEX inbox_job ON inbox(job) WHERE applied = 0 AND verified = 1 AND job IS NOT NULL;
CREATE INDEX inbox_provider ON inbox(dialect, provider_id) WHERE applied = 0 AND verified = 1 AND job IS NULL;
CREATE INDEX inbox_quarantine ON inbox(number) WHERE verified = 0;
CREATE INDEX inbox_age ON inbox(received_s);
CREATE TABLE meta(name TEXT PRIMARY KEY, value BLOB NOT NULL);
PRAGMA user_version = 1;
"""


#: What version 2 has changed.
V2 = """
ALTER TABLE job ADD COLUMN party TEXT NOT NULL DEFAULT '';
ALTER TABLE inbox ADD COLUMN lease_s REAL NOT NULL DEFAULT 0;
DROP INDEX job_due;
CREATE INDEX job_due ON job(party, next_s) WHERE open = 1 AND next_s IS NOT NULL;
UPDATE job SET party = CASE id WHEN '1' THEN 'http://h:1/x y d' ELSE 'http://h:2 e' END;
PRAGMA user_version = 2;
"""


def a_file_of_version_1(path: Path) -> tuple[list[JobRow], list[Delivery]]:
    encode = msgspec.msgpack.encode
    rows = [
        JobRow(id="1", group="g", origin="http://h:1/x y", dialect="d", state="running", created_s=1.0, due_s=100.0),
        JobRow(id="2", origin="http://h:2", dialect="e", state="submitted", poll_s=5.0, provider_id="p-2"),
        JobRow(id="3", group="g", origin="http://h:2", dialect="e", state="succeeded", resolved_s=2.0),
    ]
    deliveries = [
        Delivery(endpoint="d/hooks", dedupe="m", job="1"),
        Delivery(endpoint="e", dedupe="n", provider_id="p-2"),
    ]
    connection = sqlite3.connect(path)
    connection.executescript(V1)
    for row in rows:
        is_open, next_s = row.state != "succeeded", min((at for at in (row.due_s, row.poll_s) if at), default=None)
        connection.execute(
            "INSERT INTO job VALUES(?, ?, ?, ?, ?, ?, ?, x'', x'', ?)",
            (
                row.id,
                row.group,
                row.state,
                row.attempt,
                is_open,
                next_s if is_open else None,
                row.resolved_s,
                encode(row),
            ),
        )
        if row.provider_id:
            connection.execute("INSERT INTO provider_id VALUES(?, ?, ?)", (row.dialect, row.provider_id, row.id))
    for one in deliveries:
        connection.execute(
            "INSERT INTO inbox(endpoint, dedupe, verified, dialect, job, provider_id, received_s, applied, body, delivery) "
            "VALUES(?, ?, 1, ?, ?, ?, 0, 0, ?, ?)",
            (one.endpoint, one.dedupe, one.endpoint[:1], one.job, one.provider_id, b"\0body", encode(one)),
        )
    connection.execute("INSERT INTO meta VALUES('instance_key', ?)", (b"k" * 32,))
    connection.commit()
    connection.close()
    return rows, deliveries


@pytest.mark.parametrize("version", [1, 2])
def test_a_file_of_an_older_version_goes_on(tmp_path: Path, version: int) -> None:
    """With everything that is in it, its leases too, and its orphans wait as they did."""
    rows, deliveries = a_file_of_version_1(tmp_path / "jobs.db")
    connection = sqlite3.connect(tmp_path / "jobs.db")
    connection.execute(
        "INSERT INTO inbox(endpoint, dedupe, verified, dialect, provider_id, received_s, applied, body, delivery) "
        "SELECT endpoint, 'orphan', 1, dialect, 'p-9', 0, 0, body, ? FROM inbox WHERE dedupe = 'n'",
        (msgspec.msgpack.encode(Delivery(endpoint="e", dedupe="orphan", provider_id="p-9")),),
    )
    connection.commit()
    if version == 2:
        connection.executescript(V2)
    connection.close()
    for _ in range(2):  # once it is migrated, it is opened like any other
        store = SQLiteStore(tmp_path / "jobs.db")
        assert [store.get(row.id) for row in rows] == rows
        assert store.instance_key() == b"k" * 32
        assert [found.dedupe for _, found in store.unapplied()] == ["m", "n"]
        assert store.due(1000.0) == [rows[1], rows[0]]
        assert store.due(1000.0, parties=[("http://h:1/x y", "d")]) == [rows[0]]
        assert store.completed("g") == [rows[2]]
        store.close()
    store = SQLiteStore(tmp_path / "jobs.db")
    assert [found.body for _, found in store.unapplied(lease_s=60.0)] == [b"body"] * len(deliveries)
    assert store.unapplied(lease_s=60.0) == []
    assert store.due(1000.0, lease_s=60.0) == [rows[1], rows[0]]
    assert store.due(1000.0) == []
    store.add([JobRow(id="9", dialect="e", state="submitted", provider_id="p-9")])
    assert [found.dedupe for _, found in store.unapplied(lease_s=60.0)] == ["orphan"]
    assert store.swap(msgspec.structs.replace(rows[0], state="queued"), was=("running", 1))
    store.close()


def test_orphans_are_not_looked_at(tmp_path: Path) -> None:
    """Webhooks of an account may be those of other programs, a hundred thousand of them: a look does not grow with them."""
    store = SQLiteStore(tmp_path / "jobs.db")
    store.add([JobRow(id="1", dialect="d", state="submitted", provider_id="p")])

    def steps() -> int:
        """What a look costs, in steps of SQLite's virtual machine."""
        connection, taken = sqlite3.connect(store.path), 0

        def step() -> int:
            nonlocal taken
            taken += 1
            return 0

        connection.set_progress_handler(step, 10)
        found = connection.execute(sqlite_module._WAITING + sqlite_module._NO_ORPHANS, (10,)).fetchall()
        connection.close()
        assert len(found) == 1
        return taken

    store.receive([Delivery(endpoint="d/hooks", dedupe="mine", provider_id="p")])
    before = steps()
    store.receive([Delivery(endpoint="d/hooks", dedupe=str(n), provider_id=f"x-{n}") for n in range(500)])
    store.receive([Delivery(endpoint="d/hooks", dedupe=f"j {n}", job=f"x-{n}") for n in range(500)])
    assert steps() <= before + 2
    # Their job may come all the same: added, named, or named anew.
    store.add(
        [JobRow(id="x-1", dialect="d"), JobRow(id="2", dialect="d", provider_id="x-2"), JobRow(id="3", dialect="d")]
    )
    assert store.swap(JobRow(id="3", dialect="d", provider_id="x-3"), was=("created", 1))
    assert [found.dedupe for _, found in store.unapplied()] == ["mine", "2", "3", "j 1"]
    store.close()


def test_an_orphan_that_is_verified_later_is_seen(tmp_path: Path) -> None:
    """Its job came after it."""
    store = SQLiteStore(tmp_path / "jobs.db")
    store.receive([Delivery(endpoint="d", dedupe=name, job=name, verified=False) for name in ("1", "2")])
    store.add([JobRow(id="1")])
    for number, _ in store.quarantined():
        store.verified(number)
    assert [found.dedupe for _, found in store.unapplied()] == ["1"]
    store.close()


def test_a_migration_that_fails_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a whole, or not at all."""
    rows, _ = a_file_of_version_1(tmp_path / "jobs.db")
    before = schema_of(tmp_path / "jobs.db")

    def fails(connection: sqlite3.Connection) -> None:
        raise sqlite3.OperationalError("the disk is full")

    monkeypatch.setattr(sqlite_schema, "_STEPS", (*sqlite_schema._STEPS, fails))
    monkeypatch.setattr(sqlite_schema, "VERSION", len(sqlite_schema._STEPS))
    with pytest.raises(ConfigurationError, match="disk is full"):
        SQLiteStore(tmp_path / "jobs.db")
    assert schema_of(tmp_path / "jobs.db") == before
    monkeypatch.undo()
    store = SQLiteStore(tmp_path / "jobs.db")
    assert store.get("1") == rows[0]
    store.close()


def schema_of(path: Path) -> list[object]:
    connection = sqlite3.connect(path)
    found = connection.execute("SELECT sql FROM sqlite_master ORDER BY name").fetchall()
    found.append(connection.execute("PRAGMA user_version").fetchone())
    connection.close()
    return found


def test_a_damaged_body_is_told(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "jobs.db")
    reference = store.put_body(b"x" * 10_000)
    (path,) = (tmp_path / "jobs.db-bodies").iterdir()
    path.chmod(0o600)
    path.write_bytes(b"y" + path.read_bytes()[1:])
    with pytest.raises(JobError, match="damaged"):
        store.body(reference)
    path.unlink()
    with pytest.raises(JobError, match="cannot be read"):
        store.body(reference)
    with pytest.raises(JobError):
        store.body(b"\x01nonsense")
    store.close()


def test_a_webhook_whose_body_is_damaged_stops_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """That it has come is known: its provider is asked."""
    store = SQLiteStore(tmp_path / "jobs.db")
    store.add([JobRow(id=name, dialect="d", state="submitted", provider_id=f"p-{name}") for name in "12"])
    done = said("done", "p-1", output="x" * 10_000)
    store.receive([Delivery(endpoint="d", dedupe=name, job=name, body=done) for name in "12"])
    spoil(store, "SELECT body FROM inbox WHERE job = ?", "1")
    for _ in range(2):
        first, second = store.unapplied()
    assert (first[1].body, first[1].flags, second[1].body, second[1].flags) == (b"", (DAMAGED,), done, ())
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["webhook 1 of job 1"]  # once
    apply_deliveries(store, [first, second], lambda row: Simple(), now_s=7.0)
    rows = [store.get(name) for name in "12"]
    assert [(row.state, row.poll_s) for row in rows if row] == [("submitted", 7.0), ("succeeded", 0.0)]
    assert store.unapplied() == []
    store.close()


def test_what_cannot_be_read_now_is_left_for_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is not damage: the job is whole again when its file is. Only if nothing can be read, the store is down."""
    store, other = SQLiteStore(tmp_path / "jobs.db"), SQLiteStore(tmp_path / "jobs.db")
    rows = [JobRow(id=name, poll_s=1.0, input=name.encode() * 10_000) for name in "12"]
    store.add(rows[:1])
    other.add(rows[1:])  # another file
    path = spoil(store, "SELECT input FROM job WHERE id = ?", "1")
    aside = path.rename(path.with_suffix(".aside"))
    path.mkdir()  # reading it fails, for root too
    assert store.due(5.0) == store.due(5.0) == rows[1:]
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["job 1 is left for later"]
    with pytest.raises(JobError, match="cannot be read now") as caught:
        store.due(5.0, 1)
    assert (caught.value.retryable, caught.value.job) == (True, "1")
    path.rmdir()
    aside.rename(path)
    spoil(store, "SELECT input FROM job WHERE id = ?", "1")  # twice: as it was
    assert store.due(5.0) == rows
    store.close()
    other.close()


def test_a_reference_leads_nowhere_else(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"s" * 100)
    with pytest.raises(JobError):
        Segments(tmp_path / "bodies").read(b"\x01" + b"../secret\0\0\0\0\0\0\0" + bytes(20))


def test_bodies_that_nobody_needs_are_swept(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "jobs.db")
    reference = store.put_body(b"x" * 10_000)
    store.add([JobRow(id="1", state="succeeded", resolved_s=1.0, result=reference)])
    folder = tmp_path / "jobs.db-bodies"
    (path,) = folder.iterdir()
    os.utime(path, (1.0, 1.0))
    other = SQLiteStore(tmp_path / "jobs.db")
    assert other.sweep(1e9) == 1
    assert path.exists()  # the first store writes to it still
    store.close()
    other.sweep(1e9)
    assert not path.exists()
    other.close()


def test_a_forked_child_uses_its_own_connections(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "from spanwire.jobs.contract import JobRow\n"
        "from spanwire.jobs.sqlite import SQLiteStore\n"
        "store = SQLiteStore(sys.argv[1])\n"
        "store.add([JobRow(id='1')]); store.get('1')\n"
        "if os.fork() == 0:\n"
        "    store.add([JobRow(id='2')])\n"
        "    os._exit(0 if store.get('1') else 1)\n"
        "assert os.waitstatus_to_exitcode(os.wait()[1]) == 0\n"
        "store.add([JobRow(id='3')])\n"
        "assert store.get('2') and store.get('3')\n"
        "store.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "jobs.db")],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


# --- crashes ------------------------------------------------------------------------------------------------------------

WRITER = """
import sys, threading
from spanwire.jobs.contract import Delivery, JobRow
from spanwire.jobs.sqlite import SQLiteStore

store = SQLiteStore(sys.argv[1])
start, lock = int(sys.argv[2]), threading.Lock()

def write(thread):
    for number in range(start + thread, start + 100000, 4):
        name = f"{number:08d}"
        body = name.encode() * (1 if number % 2 else 2000)
        store.add([JobRow(id=name, group="g", state="submitted", input=body)])
        store.receive([Delivery(endpoint="d", dedupe=name, job=name, body=body)])
        done = JobRow(id=name, state="succeeded", resolved_s=1.0, group="g", result=store.put_body(body))
        assert store.swap(done, was=("submitted", 1))
        with lock:
            print(name, flush=True)

for thread in range(4):
    threading.Thread(target=write, args=(thread,), daemon=True).start()
threading.Event().wait()
"""


def test_nothing_is_half_after_a_kill(tmp_path: Path) -> None:
    """Killed in the middle of writes, again and again: what it said was written is there, whole, and the rest is whole too."""
    path, said_names = tmp_path / "jobs.db", set()
    for run in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(run * 1_000_000)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        for _ in range(25 + 7 * run):
            said_names.add(process.stdout.readline().strip())
        process.send_signal(signal.SIGKILL)
        said_names.update(line.strip() for line in process.stdout if len(line) == 9)
        process.wait()
        process.stdout.close()
        store = SQLiteStore(path)
        found = {row.id: row for row in store.completed("g")}
        assert said_names <= set(found)
        for name, row in found.items():
            assert store.body(row.result) == name.encode() * (1 if int(name) % 2 else 2000)
        waiting = {delivery.job: delivery for _, delivery in store.unapplied(limit=100_000)}
        assert set(found) <= set(waiting)
        for job, delivery in waiting.items():
            name = job or ""
            assert delivery.body == name.encode() * (1 if int(name) % 2 else 2000)
            stored = store.get(name)
            assert stored is not None
            assert stored.state in ("submitted", "succeeded")
        connection = sqlite3.connect(path)
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        connection.close()
        store.close()
