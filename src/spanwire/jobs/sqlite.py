"""The store in an SQLite file: the default, for any number of processes of one machine.

One thread of each process writes, and commits together whatever waits (group commit); readers never wait for it (WAL). A
commit is on the disk before its caller goes on (``synchronous=FULL``): the receiver's 2xx is a promise.

Measured choices: keys that grow (UUIDv7), ordinary rowid tables, bodies over 4 KiB in files beside the database.
"""

from __future__ import annotations

import atexit
import contextlib
import heapq
import logging
import os
import queue
import re
import shutil
import sqlite3
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ..errors import ConfigurationError, JobError
from .contract import OPEN, Delivery, JobRow, State
from .damage import Damage
from .segments import NAME_BYTES, Segments, inline
from .sqlite_schema import migrate, party_of

__all__ = ["SQLiteStore"]

_log = logging.getLogger("spanwire.jobs")

_T = TypeVar("_T")
_open: weakref.WeakSet[SQLiteStore] = weakref.WeakSet()
_Write = Callable[[sqlite3.Connection], Any]

#: How long a result is kept after its job has ended, in seconds: a week.
KEEP_S = 7 * 86400.0
#: How long deliveries are remembered, in seconds. Source: OpenAI delivers again for up to 72 h.
REMEMBER_S = 80 * 3600.0
#: How long a write waits for another process's, in seconds.
_BUSY_S = 30.0
#: Writes in one commit, and rows that a sweep deletes in one: others wait for it.
_BATCH, _SWEEP_ROWS = 1000, 2000
#: Ids in one statement. Source: SQLITE_MAX_VARIABLE_NUMBER was 999 before SQLite 3.32.
_NAMED = 900
#: A lease that seems to be longer is one from before the clock was set back, in seconds.
_LONGEST_LEASE_S = 86400.0
_DUE = (
    "SELECT row, input, result, rowid, next_s FROM job INDEXED BY job_due WHERE party = ? AND open = 1 "
    "AND next_s IS NOT NULL AND next_s <= ? ORDER BY next_s LIMIT ?"
)
#: Each party that has open jobs: a jump through the index for each.
_PARTIES = (
    "WITH RECURSIVE of(party) AS (SELECT min(party) FROM job WHERE open = 1 AND next_s IS NOT NULL UNION ALL SELECT "
    "(SELECT min(party) FROM job WHERE open = 1 AND next_s IS NOT NULL AND party > of.party) FROM of "
    "WHERE of.party IS NOT NULL) SELECT party FROM of WHERE party IS NOT NULL"
)
_WAITING = "SELECT number, delivery, body, verified FROM inbox AS i WHERE applied = 0 AND verified = 1 AND "
_FREE = "NOT lease_s BETWEEN ? AND ? AND "
#: ``here`` alone has those whose job was swept away.
_NO_ORPHANS = (
    "here = 1 AND (EXISTS(SELECT 1 FROM job WHERE job.id = i.job) OR (i.job IS NULL AND EXISTS(SELECT 1 FROM provider_id AS p "
    "WHERE p.dialect = i.dialect AND p.provider_id = i.provider_id))) ORDER BY number LIMIT ?"
)
#: Whether the job of a delivery is here: by our id of it, else by the provider's. Arguments: id, id, dialect, provider's id.
_HERE = (
    "EXISTS(SELECT 1 FROM job WHERE id = ?) OR (? IS NULL AND EXISTS("
    "SELECT 1 FROM provider_id WHERE dialect = ? AND provider_id = ?))"
)
_ARRIVED = "UPDATE inbox SET here = 1 WHERE applied = 0 AND verified = 1 AND here = 0 AND "


class _Revision(msgspec.Struct):
    revision: int = 0


_row_decoder = msgspec.msgpack.Decoder(JobRow)
_revision_decoder = msgspec.msgpack.Decoder(_Revision)
_delivery_decoder = msgspec.msgpack.Decoder(Delivery)
_encoder = msgspec.msgpack.Encoder()
_DIALECT = re.compile(r"[A-Za-z0-9_.-]*")


class SQLiteStore:
    """Jobs in one SQLite file, and their larger bodies in the folder ``<file>-bodies`` beside it.

    Args:
        path: the file; made if it is not there, for its owner alone. None for a private one that goes with the store.
        keep_s: how long an ended job is kept, in seconds.

    Raises:
        ConfigurationError: the file is no store, of a newer version, or cannot be made.
    """

    _thread: threading.Thread | None
    _reader: sqlite3.Connection | None
    _closed: bool

    def __init__(self, path: str | os.PathLike[str] | None = None, *, keep_s: float = KEEP_S) -> None:
        self._keep_s = keep_s
        self._damage = Damage()
        self._temporary: Callable[[], object] | None = None
        if path is None:
            folder = tempfile.mkdtemp(prefix="spanwire-jobs-")
            self._temporary = weakref.finalize(self, _remove, folder, os.getpid())
            path = Path(folder) / "jobs.db"
        self.path = Path(path).absolute()
        self._start()
        _open.add(self)
        try:
            self._make()
        except sqlite3.Error as error:
            self.close()
            raise ConfigurationError(f"the store {self.path} cannot be opened: {error}") from error
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"SQLiteStore({str(self.path)!r})"

    # --- jobs -------------------------------------------------------------------------------------------------------

    def add(self, rows: Sequence[JobRow]) -> None:
        """New jobs. Raises JobError if one is there already."""

        def write(connection: sqlite3.Connection) -> None:
            for row in rows:
                connection.execute(
                    "INSERT INTO job(id, grp, party, state, attempt, open, next_s, resolved_s, input, result, row) "
                    "VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (row.id, *self._columns(row)),
                )
                connection.execute(_ARRIVED + "job = ?", (row.id,))
                self._index(connection, row)

        self._write(write)

    def get(self, id: str) -> JobRow | None:
        """A job."""
        found = self._read("SELECT row, input, result FROM job WHERE id = ?", (id,))
        return self._job(found[0]) if found else None

    def find(self, dialect: str, provider_id: str) -> JobRow | None:
        """A job by the provider's id of it, or of one of its attempts; the newest, if a provider gave an id twice."""
        found = self._read(
            "SELECT row, input, result FROM job JOIN provider_id ON job.id = provider_id.job "
            "WHERE dialect = ? AND provider_id.provider_id = ? ORDER BY job.id DESC LIMIT 1",
            (dialect, provider_id),
        )
        return self._job(found[0]) if found else None

    def swap(self, row: JobRow, *, was: tuple[State, int]) -> bool:
        """Compare-and-set on state, attempt and revision."""

        written = msgspec.structs.replace(row, revision=row.revision + 1)

        def write(connection: sqlite3.Connection) -> bool:
            state, attempt = was
            known = connection.execute(
                "SELECT input, row FROM job WHERE id = ? AND state = ? AND attempt = ?", (row.id, state, attempt)
            ).fetchone()
            if known is None or _revision_decoder.decode(known[1]).revision != row.revision:
                return False
            connection.execute(
                "UPDATE job SET party = ?, state = ?, attempt = ?, open = ?, next_s = ?, resolved_s = ?, input = ?, "
                "result = ?, row = ? WHERE id = ?",
                (*self._columns(written, known[0])[1:], row.id),
            )
            self._index(connection, row)
            return True

        return self._write(write)

    def due(
        self,
        now_s: float,
        limit: int = 500,
        *,
        parties: Sequence[tuple[str, str]] | None = None,
        lease_s: float = 0.0,
    ) -> list[JobRow]:
        """Open jobs whose deadline or next poll has come, the oldest first. A lease puts off when they are due."""
        found = self._read_with(partial(_due, now_s, limit, parties))
        if lease_s > 0 and found:  # somebody may have taken some meanwhile
            found = self._write(partial(_lease_due, now_s, limit, parties, now_s + lease_s))
        return self._readable(found, lambda row: self._job(row[:3]), lambda error, _: f"job {error.job}")

    def states(self, ids: Sequence[str]) -> dict[str, State]:
        """How these jobs stand."""
        found: dict[str, State] = {}
        for start in range(0, len(ids), _NAMED):
            some = tuple(ids[start : start + _NAMED])
            marks = ",".join("?" * len(some))
            found.update(self._read(f"SELECT id, state FROM job WHERE id IN ({marks})", some))  # noqa: S608
        return found

    def open_jobs(self, group: str | None = None) -> int:
        """How many are open."""
        if group is None:
            return int(self._read("SELECT count(*) FROM job INDEXED BY job_open WHERE open = 1", ())[0][0])
        return int(self._read("SELECT count(*) FROM job WHERE open = 1 AND grp = ?", (group,))[0][0])

    def completed(self, group: str, after: tuple[float, str] = (0.0, "")) -> list[JobRow]:
        """Ended jobs of a group after a place in the order of ``(resolved_s, id)``."""
        return [
            self._job(found)
            for found in self._read(
                "SELECT row, input, result FROM job WHERE open = 0 AND grp = ? AND (resolved_s, id) > (?, ?) "
                "ORDER BY resolved_s, id LIMIT 10000",
                (group, *after),
            )
        ]

    # --- the inbox --------------------------------------------------------------------------------------------------

    def receive(self, deliveries: Sequence[Delivery]) -> list[bool]:
        """Put deliveries into the inbox; False for each that was there already.

        One that could not be verified does not stand in the way of the same one, verified.
        """

        def write(connection: sqlite3.Connection) -> list[bool]:
            fresh = []
            for delivery in deliveries:
                key = (delivery.endpoint, delivery.dedupe, int(delivery.verified))
                if connection.execute(
                    "SELECT 1 FROM inbox WHERE endpoint = ? AND dedupe = ? AND verified >= ?", key
                ).fetchone():
                    fresh.append(False)
                    continue
                found = _DIALECT.match(delivery.endpoint)
                dialect = found.group() if found else ""
                connection.execute(
                    "INSERT INTO inbox(endpoint, dedupe, verified, dialect, job, provider_id, received_s, applied, body, "
                    f"delivery, here) VALUES(?, ?, ?, ?, ?, ?, ?, 0, ?, ?, {_HERE})",
                    (
                        *key,
                        dialect,
                        delivery.job,
                        delivery.provider_id,
                        delivery.received_s,
                        self._segments.append(delivery.body),
                        _encoder.encode(msgspec.structs.replace(delivery, body=b"")),
                        delivery.job,
                        delivery.job,
                        dialect,
                        delivery.provider_id,
                    ),
                )
                fresh.append(True)
            return fresh

        return self._write(write)

    def unapplied(
        self,
        *,
        job: str | None = None,
        provider: tuple[str, str] | None = None,
        limit: int = 1000,
        lease_s: float = 0.0,
    ) -> list[tuple[int, Delivery]]:
        """Verified deliveries that were not applied yet, the oldest first."""
        if job is not None:
            found = self._read(_WAITING + "job = ? ORDER BY number LIMIT ?", (job, limit))
        elif provider is not None:
            found = self._read(
                _WAITING + "job IS NULL AND dialect = ? AND provider_id = ? ORDER BY number LIMIT ?", (*provider, limit)
            )
        elif lease_s > 0:
            now_s = time.time()
            found = self._read(_WAITING + _FREE + _NO_ORPHANS, (now_s, now_s + _LONGEST_LEASE_S, 1))
            if found:  # most looks find nothing, and write nothing
                found = self._write(partial(_lease_deliveries, now_s, limit, now_s + lease_s))
        else:
            found = self._read(_WAITING + _NO_ORPHANS, (limit,))
        return self._readable(found, self._delivery, lambda _, row: f"webhook {row[0]}")

    def applied(self, numbers: Sequence[int]) -> None:
        """These deliveries have been applied."""
        wanted = [(number,) for number in numbers]
        if wanted:
            self._write(
                lambda connection: connection.executemany("UPDATE inbox SET applied = 1 WHERE number = ?", wanted)
            )

    def quarantined(self, limit: int = 1000) -> list[tuple[int, Delivery]]:
        """Deliveries that could not be verified, the oldest first."""
        found = self._read(
            "SELECT number, delivery, body, verified FROM inbox WHERE verified = 0 ORDER BY number LIMIT ?", (limit,)
        )
        return self._readable(found, self._delivery, lambda _, row: f"webhook {row[0]}")

    def verified(self, number: int) -> None:
        """One of those could be, after all; it goes if the same one has come, verified, meanwhile."""

        def write(connection: sqlite3.Connection) -> None:
            found = connection.execute("SELECT job, job, dialect, provider_id FROM inbox WHERE number = ?", (number,))
            for who in found.fetchall():
                connection.execute(
                    f"UPDATE OR IGNORE inbox SET verified = 1, here = {_HERE} WHERE number = ?",  # noqa: S608
                    (*who, number),
                )
            connection.execute("DELETE FROM inbox WHERE number = ? AND verified = 0", (number,))

        self._write(write)

    # --- bodies -----------------------------------------------------------------------------------------------------

    def put_body(self, body: bytes) -> bytes:
        """Keep a result; returns its reference."""
        small = inline(body)
        return small if small is not None else self._write(lambda _: self._segments.append(body))

    def body(self, reference: bytes) -> bytes:
        """A result's bytes."""
        return self._segments.read(reference)

    # --- the rest ---------------------------------------------------------------------------------------------------

    def changed(self) -> int:
        """SQLite's count of commits by others; our own writer is one of them."""
        return int(self._read("PRAGMA data_version", ())[0][0])

    def instance_key(self) -> bytes:
        """32 random bytes that were made with the store, the same for whoever opens it: they sign callback URLs."""
        return bytes(self._read("SELECT value FROM meta WHERE name = 'instance_key'", ())[0][0])

    def sweep(self, now_s: float) -> int:
        """Delete ended jobs after ``keep_s``, deliveries after 80 hours, and bodies that nobody refers to."""
        gone = 0
        for statement, before in (
            (
                "DELETE FROM job WHERE rowid IN (SELECT rowid FROM job WHERE open = 0 AND resolved_s < ? LIMIT ?)",
                self._keep_s,
            ),
            ("DELETE FROM inbox WHERE number IN (SELECT number FROM inbox WHERE received_s < ? LIMIT ?)", REMEMBER_S),
        ):
            while True:
                count = self._write(partial(_delete, statement, (now_s - before, _SWEEP_ROWS)))
                gone += count
                if count < _SWEEP_ROWS:
                    break

        def clean(connection: sqlite3.Connection) -> None:
            if gone:
                connection.execute("DELETE FROM provider_id WHERE job NOT IN (SELECT id FROM job)")
            used: set[bytes] = set()
            for table, column in (("job", "input"), ("job", "result"), ("inbox", "body")):
                places = connection.execute(
                    f"SELECT DISTINCT substr({column}, 2, ?) FROM {table} WHERE substr({column}, 1, 1) = x'01'",  # noqa: S608
                    (NAME_BYTES,),
                )
                used.update(bytes(place) for (place,) in places)
            self._segments.sweep(used)

        self._write(clean)
        return gone

    def close(self) -> None:
        """Let go of everything. What was begun is written."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            thread, self._thread = self._thread, None
        if self._pid == os.getpid():
            self._queue.put(None)
            if thread is not None and thread is not threading.current_thread():
                thread.join()
            with self._reading:
                reader, self._reader = self._reader, None
                if reader is not None:
                    reader.close()
        if self._temporary is not None:
            self._temporary()

    # --- inner ------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._queue: queue.SimpleQueue[tuple[_Write, Future[Any]] | None] = queue.SimpleQueue()
        self._thread = None
        self._reader = None
        self._closed = False
        self._segments = Segments(self.path.with_name(self.path.name + "-bodies"))

    def _alive(self) -> None:
        """Also in a forked child: what its parent has opened is never touched there, not even to close it."""
        if self._pid != os.getpid():
            _parked.append((self._reader, self._segments, self._queue, self._thread))
            closed = self._closed
            self._start()
            self._closed = closed
        if self._closed:
            raise JobError("the store of jobs is closed")

    def _make(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Results are in it: for its owner alone. Never opened by hand once it is there: to close it again would drop every
            # lock that this process holds on it (POSIX), and with them what keeps SQLite's writers apart.
            with contextlib.suppress(FileExistsError):
                os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        except OSError as error:
            raise ConfigurationError(f"the store {self.path} cannot be opened: {error.strerror}") from error
        connection = self._connect()
        try:
            migrate(connection, self.path)
        finally:
            connection.close()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            give_up_s = time.monotonic() + _BUSY_S
            while True:  # the change to WAL does not wait for others by itself
                try:
                    connection.execute("PRAGMA journal_mode = WAL")
                    break
                except sqlite3.OperationalError:
                    if time.monotonic() > give_up_s:
                        raise
                    time.sleep(0.01)
            connection.execute("PRAGMA synchronous = FULL")
        except BaseException:
            connection.close()
            raise
        return connection

    def _columns(self, row: JobRow, known_input: bytes | None = None) -> tuple[Any, ...]:
        is_open = row.state in OPEN
        times = [at for at in (row.due_s, row.poll_s) if at > 0]
        if not row.input:
            input_ref = b""
        elif known_input:
            input_ref = known_input  # it is the same: an input is written once, or dropped
        else:
            input_ref = self._segments.append(row.input)
        data = _encoder.encode(msgspec.structs.replace(row, input=b"", result=b""))
        next_s = min(times) if is_open and times else None
        return (
            row.group,
            party_of(row.origin, row.dialect),
            row.state,
            row.attempt,
            int(is_open),
            next_s,
            row.resolved_s,
            input_ref,
            row.result,
            data,
        )

    @staticmethod
    def _index(connection: sqlite3.Connection, row: JobRow) -> None:
        if row.provider_id is not None:
            named = (row.dialect, row.provider_id)
            new = connection.execute("INSERT OR IGNORE INTO provider_id VALUES(?, ?, ?)", (*named, row.id)).rowcount
            if new:
                connection.execute(_ARRIVED + "job IS NULL AND dialect = ? AND provider_id = ?", named)

    def _job(self, found: tuple[bytes, bytes, bytes]) -> JobRow:
        data, input_ref, result = found
        row = _row_decoder.decode(data)
        row.result = bytes(result)
        if input_ref:
            try:
                row.input = self._segments.read(input_ref)
            except JobError as error:
                if error.retryable:
                    error.job = row.id
                    raise
                row.input = self._damage.input(row.id, error)
        return row

    def _delivery(self, found: tuple[int, bytes, bytes, int]) -> tuple[int, Delivery]:
        number, data, reference, verified = found
        delivery = _delivery_decoder.decode(data)
        delivery.verified = bool(verified)
        try:
            delivery.body = self._segments.read(reference)
        except JobError as error:
            if error.retryable:
                raise
            delivery = self._damage.delivery(number, delivery, error)
        return number, delivery

    def _readable(
        self, found: Sequence[Any], read: Callable[[Any], _T], name: Callable[[JobError, Any], str]
    ) -> list[_T]:
        """Of these, what can be read now; if that is nothing, the store is down."""
        good: list[_T] = []
        down: JobError | None = None
        for one in found:
            try:
                good.append(read(one))
            except JobError as error:
                down = error
                self._damage.left_out(name(error, one), error)
        if down is not None and not good:
            raise down
        return good

    def _read(self, statement: str, arguments: tuple[Any, ...]) -> list[Any]:
        return self._read_with(lambda connection: connection.execute(statement, arguments).fetchall())

    def _read_with(self, read: Callable[[sqlite3.Connection], list[Any]]) -> list[Any]:
        self._alive()
        with self._reading:
            try:
                try:
                    return read(self._reader_now())
                except sqlite3.Error as error:  # it may be the connection's trouble alone
                    _log.info("a read of the store is made again, on a new connection: %s", error, exc_info=True)
                    reader, self._reader = self._reader, None
                    if reader is not None:
                        reader.close()
                    return read(self._reader_now())
            except sqlite3.Error as error:
                raise _down(error) from error

    def _reader_now(self) -> sqlite3.Connection:
        if self._reader is None:
            if self._closed:
                raise JobError("the store of jobs is closed")
            self._reader = self._connect()
        return self._reader

    def _write(self, write: Callable[[sqlite3.Connection], _T]) -> _T:
        """Have the writer do it, and wait until it is on the disk."""
        future: Future[_T] = Future()
        with self._lock if self._pid == os.getpid() else contextlib.nullcontext():
            self._alive()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_writer,
                    args=(self._connect, self._segments, self._queue),
                    name="spanwire store",
                    daemon=True,
                )
                self._thread.start()
            self._queue.put((write, future))
        return future.result()


def _writer(
    connect: Callable[[], sqlite3.Connection],
    segments: Segments,
    work: queue.SimpleQueue[tuple[_Write, Future[Any]] | None],
) -> None:
    connection: sqlite3.Connection | None = None
    going = True
    while going:
        batch: list[tuple[_Write, Future[Any]]] = []
        for item in _waiting(work):
            if item is None:
                going = False
                break
            batch.append(item)
        if not batch:
            continue
        try:
            if connection is None:
                connection = connect()
            answers = _commit(connection, segments, [write for write, _ in batch])
        except Exception as error:  # noqa: BLE001 - nobody may wait for ever
            if connection is None or (len(batch) == 1 and not isinstance(error, sqlite3.Error)):
                answers = [error] * len(batch)
            else:
                if not isinstance(error, sqlite3.IntegrityError):  # it may be the connection's trouble alone
                    _log.info("a write to the store is made again, on a new connection: %s", error, exc_info=True)
                    with contextlib.suppress(sqlite3.Error):
                        connection.close()
                    connection = None
                answers = []
                for write, _ in batch:  # one of them may spoil it for the others
                    try:
                        connection = connection or connect()
                        answers += _commit(connection, segments, [write])
                    except Exception as single:  # noqa: BLE001 - it is its caller's
                        answers.append(single)
        for (_, future), answer in zip(batch, answers, strict=True):
            if isinstance(answer, (sqlite3.Error, OSError)):
                down = _down(answer)
                down.__cause__ = answer
                future.set_exception(down)
            elif isinstance(answer, BaseException):
                future.set_exception(answer)
            else:
                future.set_result(answer)
    segments.close()
    if connection is not None:
        with contextlib.suppress(sqlite3.Error):
            connection.close()


def _waiting(work: queue.SimpleQueue[Any]) -> Iterator[Any]:
    yield work.get()
    for _ in range(_BATCH - 1):
        try:
            yield work.get_nowait()
        except queue.Empty:
            return


def _commit(connection: sqlite3.Connection, segments: Segments, writes: Sequence[_Write]) -> list[Any]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        answers = [write(connection) for write in writes]
        segments.sync()  # before the rows that refer to them
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    return answers


def _due(
    now_s: float, limit: int, parties: Sequence[tuple[str, str]] | None, connection: sqlite3.Connection
) -> list[Any]:
    if parties is None:
        names = [name for (name,) in connection.execute(_PARTIES)]
    else:
        names = [party_of(*party) for party in parties]
    found: list[Any] = []
    for name in names:  # each is looked up in the index; together they would be sorted
        found += connection.execute(_DUE, (name, now_s, limit))
    return heapq.nsmallest(limit, found, key=itemgetter(4)) if len(names) > 1 else found


def _lease_due(
    now_s: float, limit: int, parties: Sequence[tuple[str, str]] | None, until_s: float, connection: sqlite3.Connection
) -> list[Any]:
    found = _due(now_s, limit, parties, connection)
    connection.executemany("UPDATE job SET next_s = ? WHERE rowid = ?", [(until_s, row[3]) for row in found])
    return found


def _lease_deliveries(now_s: float, limit: int, until_s: float, connection: sqlite3.Connection) -> list[Any]:
    found = connection.execute(_WAITING + _FREE + _NO_ORPHANS, (now_s, now_s + _LONGEST_LEASE_S, limit)).fetchall()
    connection.executemany("UPDATE inbox SET lease_s = ? WHERE number = ?", [(until_s, row[0]) for row in found])
    return found


def _delete(statement: str, arguments: tuple[Any, ...], connection: sqlite3.Connection) -> int:
    return connection.execute(statement, arguments).rowcount


def _down(error: sqlite3.Error | OSError) -> JobError:
    if isinstance(error, sqlite3.IntegrityError):
        return JobError("the store has a job of this id already")
    return JobError(f"the store of jobs cannot be used: {error}", retryable=True)


def _remove(folder: str, pid: int) -> None:
    if os.getpid() == pid:  # not a forked child
        shutil.rmtree(folder, ignore_errors=True)


@atexit.register
def _close_all() -> None:
    """Whose owner never closed them: what was begun is written."""
    for store in list(_open):
        store.close()


_parked: list[object] = []
