"""The PostgreSQL store on a real server: the kit, and what only a server can do to it."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import psycopg_pool.base
import pytest
from psycopg import sql
from spanwire_webhook.stores import postgresql_schema, postgresql_server, postgresql_sql, postgresql_wakes
from spanwire_webhook.stores.postgresql import open_postgresql
from spanwire_webhook.stores.postgresql_schema import short
from spanwire_webhook.stores.postgresql_settings import PostgreSQLSettings
from spanwire_webhook.stores.postgresql_store import PostgreSQLStore
from typer.testing import CliRunner

import spanwire
from spanwire.cli.app import app
from spanwire.errors import ConfigurationError, JobError
from spanwire.jobs.contract import Delivery, JobRow, Store
from spanwire.jobs.ids import new_id
from spanwire.jobs.stores import open_store
from spanwire.testing import LoopbackServer, Script, StoreConformance
from tests.plugins.webhook.stores.postgresql import PostgreSQL, schema_of, url_of


@pytest.mark.usefixtures("postgresql")
class TestPostgreSQL(StoreConformance):
    def url(self, tmp_path: Path) -> str:
        return url_of(tmp_path)

    def damage(self, store: Store, job: str) -> None:
        assert isinstance(store, PostgreSQLStore)
        assert store._run("DELETE FROM {s}.input WHERE job = %s RETURNING 1", (job,)) == [(1,)]


@pytest.fixture
def store(postgresql: PostgreSQL, tmp_path: Path) -> Iterator[PostgreSQLStore]:
    made = open_postgresql(url_of(tmp_path))
    yield made
    made.close()


def admin(postgresql: PostgreSQL, statement: str, tmp_path: Path) -> Any:
    """One statement by its own connection; ``{s}`` is the test's schema."""
    with psycopg.connect(postgresql.uri, autocommit=True) as connection:
        cursor = connection.execute(sql.SQL(statement).format(s=sql.Identifier(schema_of(tmp_path))))
        return cursor.fetchall() if cursor.description else None


# --- opening ------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("postgresql")
def test_many_open_a_new_store_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(6) as threads:
        stores = list(threads.map(lambda _: open_store(url_of(tmp_path)), range(6)))
    assert len({store.instance_key() for store in stores}) == 1
    for store in stores:
        store.close()


@pytest.mark.parametrize("version", [1, 2])
def test_tables_of_an_older_version_go_on(
    postgresql: PostgreSQL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    """With everything that is in them, leases and revisions too."""
    with monkeypatch.context() as older:
        older.setattr(postgresql_schema, "_STEPS", postgresql_schema._STEPS[:version])
        older.setattr(postgresql_schema, "VERSION", version)
        first = open_postgresql(url_of(tmp_path))
        key = first.instance_key()
        first.close()
    encode = msgspec.msgpack.encode
    rows = [
        JobRow(id=new_id(), group="g", origin="http://h:1/x", dialect="d", state="running", due_s=100.0),
        JobRow(id=new_id(), origin="http://h:2", dialect="e", state="submitted", poll_s=5.0),
    ]
    delivery = Delivery(endpoint="d/hooks", dedupe="m", job=rows[0].id)
    with psycopg.connect(postgresql.uri, autocommit=True) as connection:
        schema = schema_of(tmp_path)
        for row in rows:
            connection.execute(
                postgresql_schema.named(
                    "INSERT INTO {s}.job VALUES(%s, %s, %s, 1, true, %s, 0, NULL, '', %b, 1, 1, NULL)", schema
                ),
                (row.id, row.group, row.state, row.due_s or row.poll_s, encode(row)),
            )
            if version > 1:
                party = postgresql_schema.party_of(row.origin, row.dialect)
                connection.execute(
                    postgresql_schema.named("UPDATE {s}.job SET party = %s WHERE id = %s", schema), (party, row.id)
                )
        connection.execute(
            postgresql_schema.named(
                "INSERT INTO {s}.inbox VALUES(1, 'd/hooks', 'm', true, 'd', %s, NULL, 0, false, 1, 'body', %b)", schema
            ),
            (rows[0].id, encode(delivery)),
        )
    store = open_postgresql(url_of(tmp_path))
    assert store.instance_key() == key
    assert [store.get(row.id) for row in rows] == rows
    assert store.due(1000.0, parties=[("http://h:1/x", "d")]) == [rows[0]]
    assert store.due(1000.0, lease_s=60.0) == [rows[1], rows[0]]
    assert store.due(1000.0) == []
    assert [found.body for _, found in store.unapplied(lease_s=60.0)] == [b"body"]
    assert store.unapplied(lease_s=60.0) == []
    queued = msgspec.structs.replace(rows[0], state="queued")
    assert store.swap(queued, was=("running", 1))
    assert not store.swap(queued, was=("queued", 1))
    store.close()


def test_newer_tables_are_refused(postgresql: PostgreSQL, store: PostgreSQLStore, tmp_path: Path) -> None:
    admin(postgresql, "UPDATE {s}.meta SET value = '99' WHERE name = 'version'", tmp_path)
    with pytest.raises(ConfigurationError, match="pip install -U spanwire"):
        open_postgresql(url_of(tmp_path))


@pytest.fixture
def guest(postgresql: PostgreSQL, tmp_path: Path) -> Iterator[str]:
    """A role that may nothing yet, of the schema's name: the URL with it."""
    admin(postgresql, "CREATE ROLE {s} LOGIN", tmp_path)
    yield url_of(tmp_path).replace("postgres:@", f"{schema_of(tmp_path)}:@")
    admin(postgresql, "DROP OWNED BY {s} CASCADE", tmp_path)
    admin(postgresql, "DROP ROLE {s}", tmp_path)


def test_a_role_that_may_not_is_told_what_it_needs(
    postgresql: PostgreSQL, guest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the message says is done, statement by statement, until the store can be used."""

    def needed() -> str:
        with pytest.raises(ConfigurationError, match="the store cannot be opened: ") as caught:
            open_postgresql(guest)
        return caught.value.message.partition("; the role needs: ")[2]

    name = f'"{schema_of(tmp_path)}"'
    schema, _, database = needed().partition(", or ")
    assert database == f'GRANT CREATE ON DATABASE "postgres" TO {name}'
    assert schema == f"CREATE SCHEMA {name} AUTHORIZATION {name}"
    admin(postgresql, "CREATE SCHEMA {s}", tmp_path)
    assert needed() == f"GRANT USAGE, CREATE ON SCHEMA {name} TO {name}"
    open_postgresql(url_of(tmp_path)).close()
    grants = needed()
    for statement in grants.split("; "):
        admin(postgresql, statement, tmp_path)
    store = open_postgresql(guest)
    row = JobRow(id=new_id())
    store.add([row])
    assert store.receive([Delivery(endpoint="d", dedupe="1", job=row.id, body=b"x")]) == [True]
    store.close()
    monkeypatch.setattr(postgresql_schema, "VERSION", postgresql_schema.VERSION + 1)
    steps = (
        *postgresql_schema._STEPS,
        lambda one, of: postgresql_schema._run(one, of, "ALTER TABLE {s}.job ADD x int"),
    )
    monkeypatch.setattr(postgresql_schema, "_STEPS", steps)
    assert needed().startswith(f"only who owns the tables can bring them to version {postgresql_schema.VERSION}: ")


def test_a_server_that_is_too_old_is_refused(
    store: PostgreSQLStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is made there."""
    ours = store._server.run(lambda connection: connection.info.server_version) // 10_000
    monkeypatch.setattr(postgresql_server, "_OLDEST", ours + 1)
    with pytest.raises(ConfigurationError, match=f"is PostgreSQL {ours}, and it has to be {ours + 1} or newer"):
        open_postgresql(url_of(tmp_path / "new").replace("postgres:@", "postgres:hunter2@"))
    made = store._run("SELECT count(*) FROM pg_namespace WHERE nspname = %s", (schema_of(tmp_path / "new"),))
    assert made == [(0,)]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ("keep_s=0", "keep_s"),
        ("schema=Robert'); DROP", "schema"),
        ("pool=0", "pool"),
        ("prepare_threshold=x", "prepare_threshold"),
        ("listen=maybe", "listen"),
        ("keeps=1", "keeps"),
    ],
)
def test_an_option_that_is_wrong_is_named(options: str, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match) as caught:
        open_store(f"postgresql://u:hunter2@127.0.0.1:1/d?{options}")
    assert "hunter2" not in str(caught.value)


def test_what_is_not_ours_is_libpqs() -> None:
    url = "postgres://u:p%40@h1:1,h2:2/d?sslmode=require&pool=3&options=-c%20search_path%3Dx&schema=jobs&keep_s=60&listen=no"
    made = PostgreSQLSettings.of(url)
    assert (made.pool, made.schema, made.keep_s, made.listen, made.prepare_threshold) == (3, "jobs", 60.0, False, 5)
    libpq = {name: made.libpq[name] for name in ("host", "port", "password", "dbname", "sslmode")}
    assert libpq == {"host": "h1,h2", "port": "1,2", "password": "p@", "dbname": "d", "sslmode": "require"}
    assert made.libpq["options"].endswith("-c search_path=x")
    assert "statement_timeout" in made.libpq["options"]
    pooled = PostgreSQLSettings.of("postgresql://h/d?prepare_threshold=none")
    assert pooled.prepare_threshold is None
    assert "options" not in pooled.libpq  # which poolers refuse


def test_secrets_are_shown_nowhere(postgresql: PostgreSQL, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    url = url_of(tmp_path).replace("postgres:@", "postgres:hunter2@")
    assert "hunter2" in url
    store = open_postgresql(url)
    shown = [repr(store), repr(store.settings), repr(list(store.settings.__rich_repr__()))]
    store.close()
    with pytest.raises(JobError) as closed:
        store.get("x")
    with pytest.raises(JobError) as down:
        open_postgresql("postgresql://me:hunter2@127.0.0.1:1/d")
    assert down.value.retryable
    with pytest.raises(ConfigurationError) as nobody:
        open_postgresql(url.replace("postgres:hunter2@/postgres", "nobody:hunter2@/postgres"))
    shown += [str(error.value) for error in (closed, down, nobody)]
    shown += [str(error.value.__cause__) for error in (closed, down, nobody)]
    assert "hunter2" not in " ".join([*shown, caplog.text])


def test_a_server_that_forgets_is_told_of(
    postgresql: PostgreSQL, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once. (The server of these tests has fsync=off.)"""
    monkeypatch.setattr(postgresql_server, "_warned", set())
    for _ in range(2):
        open_postgresql(url_of(tmp_path) + "&options=-c%20synchronous_commit%3Doff").close()
    told = [record.getMessage() for record in caplog.records if "2xx" in record.getMessage()]
    assert [message.partition(":")[0] for message in told] == [
        "the store's server has synchronous_commit=off",
        "the store's server has fsync=off",
    ]


# --- rows ---------------------------------------------------------------------------------------------------------------


def test_any_text_is_a_key(store: PostgreSQLStore) -> None:
    """Providers and forgers send what they like: a batch does not fail because of one of them."""
    odd = ["nul \0 in it", "x" * 10_000, "\ud800 half", "é" * 200, "sha256:x", ""]
    deliveries = [
        Delivery(endpoint="d/hooks", dedupe=text, provider_id=text, body=b"b") for text in odd if "\ud800" not in text
    ]
    assert store.receive([*deliveries, deliveries[0]]) == [True] * 5 + [False]
    rows = [
        JobRow(id=text, group=text, dialect="d", provider_id=text, origin=text) for text in odd if "\ud800" not in text
    ]
    store.add(rows)
    for row in rows:
        assert store.get(row.id) == row
        assert store.find("d", row.id) == row
        assert store.open_jobs(row.group) == 1
        assert [found.dedupe for _, found in store.unapplied(provider=("d", row.id))] == [row.id]
    assert len({short(text) for text in odd}) == len(odd)
    assert store.get(new_id().upper()) is None


def test_an_input_is_not_read_again_and_again(store: PostgreSQLStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """And whoever has not seen it reads it."""
    rows = [JobRow(id=new_id(), input=b"call %d" % n, due_s=1.0, provider_id="p") for n in range(3)]
    store.add(rows)
    other = PostgreSQLStore(store.settings)
    asked: list[str] = []
    ask = other._ask

    def counting(connection: Any, text: str, given: Any) -> Any:
        asked.append(text)
        return ask(connection, text, given)

    monkeypatch.setattr(other, "_ask", counting)
    for _ in range(2):
        assert other.due(5.0) == rows
    assert len(asked) == 3  # the inputs once
    assert other.get(rows[0].id) == rows[0]
    done = msgspec.structs.replace(rows[0], state="succeeded", input=b"")
    assert store.swap(done, was=("created", 1))
    assert other.get(rows[0].id) == msgspec.structs.replace(done, revision=1)
    assert store._run("SELECT count(*) FROM {s}.input", ()) == [(2,)]
    other.close()


def test_an_input_that_the_server_cannot_read_stops_no_other(
    postgresql: PostgreSQL, store: PostgreSQLStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A page of it is damaged: its job comes without it, by every way, and can be ended."""
    rows = [JobRow(id=new_id(), dialect="d", provider_id=f"p-{n}", input=b"call", due_s=1.0) for n in range(3)]
    store.add(rows)
    damage = """
    CREATE FUNCTION {s}.lost() RETURNS bytea STABLE LANGUAGE plpgsql AS $$ BEGIN
        RAISE EXCEPTION USING ERRCODE = 'XX001', MESSAGE = 'missing chunk number 0 for toast value 1'; END $$;
    ALTER TABLE {s}.input RENAME TO pages;
    CREATE VIEW {s}.input AS SELECT job, CASE WHEN job = 'ID' THEN {s}.lost() ELSE data END AS data FROM {s}.pages
    """
    admin(postgresql, damage.replace("ID", rows[1].id), tmp_path)
    lost = msgspec.structs.replace(rows[1], input=b"")
    for look in (
        lambda other: other.due(5.0),
        lambda other: other.due(5.0, lease_s=60.0),
        lambda other: [rows[0], other.get(lost.id), rows[2]],
        lambda other: [rows[0], other.find("d", "p-1"), rows[2]],
    ):
        other = PostgreSQLStore(store.settings)
        assert look(other) == [rows[0], lost, rows[2]]
        other.close()
    assert "missing chunk" in caplog.text
    assert store.swap(msgspec.structs.replace(lost, state="failed"), was=("created", 1))


def test_what_is_asked_all_the_time_is_looked_up(
    postgresql: PostgreSQL, store: PostgreSQLStore, tmp_path: Path
) -> None:
    """By an index, whatever the planner knows of the tables."""
    many = [JobRow(id=new_id(), origin="o", dialect="d", poll_s=1.0, input=b"x") for _ in range(3000)]
    store.add(many)
    store.receive([Delivery(endpoint="d", dedupe=str(n), job=many[n].id if n % 3 else new_id()) for n in range(3000)])

    def plan(text: str, given: list[Any]) -> str:
        found = store._run("EXPLAIN " + text, given)
        return "\n".join(str(line) for (line,) in found)

    for _ in range(2):
        for text, given in (
            (postgresql_sql.SOME_PARTIES + postgresql_sql.DUE_LEASE, [["o d"], 9.0, 20, 20, 9.0]),
            (postgresql_sql.PARTIES + postgresql_sql.DUE_LOOK, [9.0, 20, 20]),
        ):
            shown = plan(text, given)
            assert "job_due" in shown
            assert "Seq Scan on job" not in shown
        shown = plan(postgresql_sql.LEASE, [20, 5.0])
        assert "inbox_waiting" in shown
        assert "Seq Scan on job" not in shown
        admin(postgresql, "ANALYZE {s}.job", tmp_path)
        admin(postgresql, "ANALYZE {s}.inbox", tmp_path)


# --- broken connections -------------------------------------------------------------------------------------------------


@pytest.fixture
def breaks(store: PostgreSQLStore, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """After this, the next operation is committed, and its answer never comes."""

    def break_next() -> None:
        ask, do = store._ask, store._do

        def lost(do_it: Callable[..., Any]) -> Callable[..., Any]:
            def once(connection: Any, text: str, given: Any) -> Any:
                monkeypatch.setattr(store, "_ask", ask)
                monkeypatch.setattr(store, "_do", do)
                do_it(connection, text, given)
                connection.close()
                raise psycopg.OperationalError("server closed the connection unexpectedly")

            return once

        monkeypatch.setattr(store, "_ask", lost(ask))
        monkeypatch.setattr(store, "_do", lost(do))

    return break_next


def test_a_write_whose_answer_was_lost_is_not_lost(store: PostgreSQLStore, breaks: Callable[[], None]) -> None:
    row = JobRow(id=new_id(), due_s=5.0)
    breaks()
    store.add([row])  # and not: there is such a job already
    breaks()
    assert store.swap(msgspec.structs.replace(row, state="submitting"), was=("created", 1))
    breaks()
    ended = msgspec.structs.replace(row, state="succeeded", resolved_s=1.0, revision=1)
    assert store.swap(ended, was=("submitting", 1))
    breaks()
    assert not store.swap(msgspec.structs.replace(row, state="failed"), was=("submitting", 1))
    breaks()
    assert store.receive([Delivery(endpoint="d", dedupe="a"), Delivery(endpoint="d", dedupe="a")]) == [True, False]
    breaks()
    assert store.receive([Delivery(endpoint="d", dedupe="a"), Delivery(endpoint="d", dedupe="b")]) == [False, True]
    breaks()
    assert store.get(row.id) == msgspec.structs.replace(ended, revision=2)


def test_an_end_is_known_by_who_has_brought_it(store: PostgreSQLStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if somebody has written the job since. Where it cannot be known, it is said."""
    row = JobRow(id=new_id(), due_s=5.0)
    store.add([row])
    other = PostgreSQLStore(store.settings)
    running = msgspec.structs.replace(row, state="running")
    ended = msgspec.structs.replace(row, state="cancelled", resolved_s=1.0, revision=1)
    swap = store._swap

    def lost(meanwhile: Callable[[], object]) -> None:
        def once(*arguments: Any) -> bool:
            monkeypatch.setattr(store, "_swap", swap)
            swap(*arguments)
            meanwhile()
            raise psycopg.OperationalError("gone")

        monkeypatch.setattr(store, "_swap", once)

    lost(lambda: other.swap(ended, was=("running", 1)))
    with pytest.raises(JobError, match="not known") as caught:
        store.swap(running, was=("created", 1))
    assert caught.value.retryable
    second = JobRow(id=new_id(), due_s=5.0)
    store.add([second])
    ended = msgspec.structs.replace(second, state="cancelled", resolved_s=1.0)
    late = msgspec.structs.replace(ended, flags=("late_result",), revision=1)
    lost(lambda: other.swap(late, was=("cancelled", 1)))
    assert store.swap(ended, was=("created", 1))
    other.close()


def test_a_restart_of_the_server_loses_nothing(postgresql: PostgreSQL, store: PostgreSQLStore, tmp_path: Path) -> None:
    """It is killed while eight threads write and somebody listens. What was said to be written is there, once."""
    woken, stop = threading.Event(), threading.Event()
    end = store.subscribe(woken.set)
    said: list[tuple[str, bool]] = []
    refused: list[JobError] = []

    def write(who: int) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            row = JobRow(id=new_id(), group="g", input=b"call")
            try:
                store.add([row])
                (fresh,) = store.receive([Delivery(endpoint="d", dedupe=f"{who} {number}", job=row.id)])
                won = store.swap(msgspec.structs.replace(row, state="succeeded", input=b""), was=("created", 1))
            except JobError as error:
                refused.append(error)
            else:
                said.append((row.id, fresh and won))

    def written(more: int) -> None:
        goal = len(said) + more
        while len(said) < goal:
            stop.wait(0.005)

    threads = [threading.Thread(target=write, args=(who,)) for who in range(8)]
    for thread in threads:
        thread.start()
    try:
        written(50)
        postgresql.stop()
        postgresql.start()
        written(50)
        woken.clear()
        assert woken.wait(20)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    end()
    assert all(error.retryable for error in refused)
    assert all(ours for _, ours in said)
    assert {job for job, _ in said} <= {row.id for row in store.completed("g")}
    assert {job for job, _ in said} <= {delivery.job for _, delivery in store.unapplied(limit=100_000)}
    assert store.due(1.0) == []


@pytest.mark.usefixtures("store")
def test_a_server_that_is_back_after_long_is_found_soon(
    postgresql: PostgreSQL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not after a wait as long as it was away. The errors say why, and the pool, which tries all the time, nothing beside."""
    monkeypatch.setattr(psycopg_pool.base.AttemptWithBackoff, "INITIAL_DELAY", 0.1)
    monkeypatch.setattr(postgresql_server, "WAIT_S", 1.0)
    monkeypatch.setattr(postgresql_server, "_SEEK_S", postgresql_server._SEEK_S / 10)
    caplog.set_level(logging.WARNING)
    store = open_postgresql(url_of(tmp_path))
    store.add([JobRow(id=new_id())])
    caplog.clear()
    postgresql.stop()
    try:
        for _ in range(4):
            with pytest.raises(JobError) as caught:
                store.open_jobs()
            assert caught.value.retryable
        assert "no connection within 1 s: connection " in caught.value.message
        assert caplog.records == []
    finally:
        postgresql.start()
    assert store.open_jobs() == 1
    store.close()


def test_pools_of_others_go_on_telling(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("psycopg.pool").warning("error connecting in %r: %s", "spanwire", psycopg.OperationalError("no"))
    assert caplog.messages == ["error connecting in 'spanwire': no"]


def test_a_primary_that_has_become_a_standby_is_left(store: PostgreSQLStore) -> None:
    """Its connections are not broken, and lead nowhere: the next ones may find the new primary."""
    row = JobRow(id=new_id(), due_s=1.0)

    def demote(connection: Any) -> None:
        connection.execute("SET default_transaction_read_only = on")

    for write in (
        lambda: store.add([row]),
        lambda: store.swap(msgspec.structs.replace(row, state="running"), was=("created", 1)),
        lambda: store.receive([Delivery(endpoint="d", dedupe="1", job=row.id)]),
        lambda: store.due(2.0, lease_s=60.0),
        lambda: store.applied([1]),
    ):
        store._server.run(demote)
        write()
    assert store.due(2.0) == []
    assert store.states([row.id]) == {row.id: "running"}


def test_a_standby_alone_is_an_error_that_passes(store: PostgreSQLStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(store.settings.libpq, "options", "-c default_transaction_read_only=on")
    store._server.run(lambda connection: connection.execute("SET default_transaction_read_only = on"))
    for _ in range(2):
        with pytest.raises(JobError, match="read-only") as caught:
            store.add([JobRow(id=new_id())])
        assert caught.value.retryable
    assert store.open_jobs() == 0


def test_a_forked_child_uses_its_own_connections(postgresql: PostgreSQL, tmp_path: Path) -> None:
    code = (
        "import os, sys, threading\n"
        "from spanwire.jobs.contract import JobRow\n"
        "from spanwire.jobs.stores import open_store\n"
        "store = open_store(sys.argv[1])\n"
        "store.subscribe(lambda: None)\n"
        "store.add([JobRow(id='1', input=b'x')])\n"
        "if os.fork() == 0:\n"
        "    woken = threading.Event()\n"
        "    store.subscribe(woken.set)\n"
        "    store.add([JobRow(id='2')])\n"
        "    good = store.get('1') and woken.wait(20)\n"
        "    store.close()\n"
        "    os._exit(0 if good else 1)\n"
        "assert os.waitstatus_to_exitcode(os.wait()[1]) == 0\n"
        "store.add([JobRow(id='3')])\n"
        "assert store.get('2') and store.get('3')\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, url_of(tmp_path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr


@pytest.mark.usefixtures("postgresql")
def test_the_commands_take_its_url(tmp_path: Path) -> None:
    url = url_of(tmp_path)
    row = JobRow(id=new_id(), dialect="generic", model="m", state="submitted", provider_id="p", due_s=9e9)
    store = open_store(url)
    store.add([row])
    store.close()
    for arguments in (["jobs", "list", "--store", url], ["jobs", "show", "generic:p", "--store", url]):
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
        assert row.id in done.stdout


def test_nothing_is_left_open(postgresql: PostgreSQL, tmp_path: Path) -> None:
    before = set(threading.enumerate())
    store = open_postgresql(url_of(tmp_path))
    store.subscribe(lambda: None)
    store.add([JobRow(id="1")])
    store.close()
    assert set(threading.enumerate()) <= before
    mine = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'spanwire'"
    while admin(postgresql, mine, tmp_path) != [(0,)]:  # the server takes a moment
        pass


# --- watching -----------------------------------------------------------------------------------------------------------


def test_where_notifications_do_not_come_it_asks(
    store: PostgreSQLStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As through a pooler that hands each transaction another connection. It notices by itself."""
    monkeypatch.setattr(postgresql_wakes, "_ECHO_S", 0.05)
    monkeypatch.setattr(store._bell, "notify", lambda connection: None)
    for watched in (store, open_postgresql(url_of(tmp_path) + "&listen=no")):
        woken = threading.Event()
        end = watched.subscribe(woken.set)
        while watched is store and not store._ear._deaf:
            woken.wait(0.001)
        for n in range(2):
            woken.clear()
            store.receive([Delivery(endpoint="d", dedupe=f"{id(watched)} {n}")])
            assert woken.wait(20)
        end()
        if watched is not store:
            watched.close()
    assert "listen=no" in caplog.text


@pytest.mark.usefixtures("postgresql")
def test_a_job_whose_webhook_another_process_receives(tmp_path: Path) -> None:
    """One manager submits and receives, and another one, over connections of its own, hears of it."""

    async def main() -> None:
        endpoint = server.endpoint(transport="webhook", options={"store": url_of(tmp_path)})
        async with spanwire.ConnectionManager() as one, spanwire.ConnectionManager() as two:
            job = await one.submit(endpoint, spanwire.Call.chat("m", [{"role": "user", "content": "hi"}]))
            mine, theirs = await asyncio.gather(job, two.jobs.attach(job.id, store=url_of(tmp_path)))
            assert isinstance(mine, spanwire.Reply)
            assert isinstance(theirs, spanwire.Reply)
            assert mine.text == theirs.text != ""

    with LoopbackServer([Script.say("Hello there.")], part="webhook") as server:
        asyncio.run(main())
