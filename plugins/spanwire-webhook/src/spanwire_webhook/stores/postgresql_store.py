"""The store in a PostgreSQL database: any number of processes, on any number of machines.

Each operation is one statement, and so one round trip and one transaction: durable when it returns, whole or not at all, and
no business of a pooler between. Whoever waits for the same row waits for one commit. See ``postgresql_schema`` for the tables.
"""

from __future__ import annotations

import atexit
import secrets
import struct
import uuid
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
from psycopg import errors

from spanwire.errors import JobError
from spanwire.jobs.apply import dialect_of
from spanwire.jobs.contract import OPEN, Delivery, JobRow, State
from spanwire.jobs.damage import Damage
from spanwire.jobs.sqlite import REMEMBER_S

from . import postgresql_sql as sql
from .inputs import Inputs
from .postgresql_schema import lock_of, named, party_of, short
from .postgresql_server import Connection, Server
from .postgresql_settings import PostgreSQLSettings
from .postgresql_wakes import Bell, Ear, mark_of

__all__ = ["PostgreSQLStore"]

#: A body up to here is its own reference, in its job's row: it costs no round trip, and the row stays small.
_INLINE_BYTES = 1024
#: Inputs that this process has written or read, so that each look at a job does not bring its input along again.
_INPUTS_BYTES = 32 * 1024 * 1024
#: A body that was written a moment ago may have a job that is not written yet, in seconds.
_YOUNG_S = 3600.0
#: Rows that a sweep deletes in one transaction.
_SWEEP_ROWS = 5000
_INLINE, _OUTSIDE = b"\x00", b"\x01"
_PLACE = struct.Struct(">q")
_open: weakref.WeakSet[PostgreSQLStore] = weakref.WeakSet()
_encoder = msgspec.msgpack.Encoder()
_row_decoder = msgspec.msgpack.Decoder(JobRow)
_delivery_decoder = msgspec.msgpack.Decoder(Delivery)


class PostgreSQLStore:
    """Jobs in a PostgreSQL database.

    Raises:
        ConfigurationError: the server refuses us, or what is there is of a newer version.
        JobError: it cannot be reached now.
    """

    def __init__(self, settings: PostgreSQLSettings) -> None:
        self.settings = settings
        self._keep_s = settings.keep_s
        self._inputs = Inputs(_INPUTS_BYTES)
        self._damage = Damage()
        self._statements: dict[str, Any] = {}
        self._server = Server(settings)
        channel = f"spanwire_{settings.schema}"
        self._bell = Bell(self._server, channel)
        self._ear = Ear(self._server, self._bell, channel)
        _open.add(self)

    def __repr__(self) -> str:
        return f"PostgreSQLStore({self.settings!r})"

    # --- jobs -------------------------------------------------------------------------------------------------------

    def add(self, rows: Sequence[JobRow]) -> None:
        """New jobs. Raises JobError if one is there already."""
        if not rows:
            return
        token = _token()
        columns = [(_uuid(row.id), short(row.group), *self._columns(row)) for row in rows]
        given = [list(column) for column in zip(*columns, strict=True)]
        given += [
            [short(row.dialect) for row in rows],
            [None if row.provider_id is None else short(row.provider_id) for row in rows],
            [row.input or None for row in rows],
        ]

        def again(connection: Connection) -> None:
            """What was committed, was committed as a whole."""
            if not self._ask(connection, "SELECT 1 FROM {s}.job WHERE id = %s AND made = %s", (given[0][0], token)):
                self._do(connection, sql.ADD, (*given, token))

        self._write(lambda connection: self._do(connection, sql.ADD, (*given, token)), again=again)
        for job, row in zip(given[0], rows, strict=True):
            self._inputs.put(job, row.input)

    def get(self, id: str) -> JobRow | None:
        """A job."""
        job = _uuid(id)
        return self._one(sql.GET, self._inputs.get(job) is None, job)

    def find(self, dialect: str, provider_id: str) -> JobRow | None:
        """A job by the provider's id of it, or of one of its attempts; the newest, if a provider gave an id twice."""
        return self._one(sql.FIND, True, short(dialect), short(provider_id))

    def swap(self, row: JobRow, *, was: tuple[State, int]) -> bool:
        """Compare-and-set on state, attempt and revision."""
        token, job = _token(), _uuid(row.id)

        def swap(connection: Connection) -> bool:
            if not row.input:
                return self._swap(connection, row, was, token, "dropped")
            # An input is written once: most of the time it is there, and need not be sent again.
            return self._swap(connection, row, was, token, "there") or self._swap(connection, row, was, token, "given")

        def again(connection: Connection) -> bool:
            found = self._ask(connection, sql.WRITTEN, (token, token, *was, row.revision, job))
            if not found:
                return False
            ours, as_it_was, has_ended = found[0]
            if ours:
                return True
            if as_it_was:
                return swap(connection)
            if has_ended and row.state not in OPEN:  # and it ends once: another one has brought it
                return False
            raise JobError(
                "the connection broke while a job was written, and others have written it since: it is not known whether "
                "this was written before",
                job=row.id,
                retryable=True,
            )

        swapped: bool = self._write(swap, again=again)
        if not row.input:
            self._inputs.drop(job)
        return swapped

    def due(
        self,
        now_s: float,
        limit: int = 500,
        *,
        parties: Sequence[tuple[str, str]] | None = None,
        lease_s: float = 0.0,
    ) -> list[JobRow]:
        """Open jobs whose deadline or next poll has come, the oldest first. A lease puts off when they are due."""
        of = sql.PARTIES if parties is None else sql.SOME_PARTIES
        given: list[Any] = [] if parties is None else [[party_of(*party) for party in parties]]
        given += [now_s, limit, limit]
        if lease_s > 0:
            found = self._run(of + sql.DUE_LEASE, (*given, now_s + lease_s))
        else:
            found = self._run(of + sql.DUE_LOOK, given)
        found.sort(key=lambda row: (row[1], row[0].int))
        self._fetch_inputs(job for job, _, _, _, has_input in found if has_input)
        return [self._job(data, result, job, has_input, None) for job, _, data, result, has_input in found]

    def states(self, ids: Sequence[str]) -> dict[str, State]:
        """How these jobs stand."""
        if not ids:
            return {}
        asked = {_uuid(text): text for text in ids}
        found = self._run("SELECT id, state FROM {s}.job WHERE id = ANY(%b::uuid[])", (list(asked),))
        return {asked[job]: state for job, state in found}

    def open_jobs(self, group: str | None = None) -> int:
        """How many are open."""
        if group is None:
            return int(self._run("SELECT count(*) FROM {s}.job WHERE open", ())[0][0])
        return int(self._run("SELECT count(*) FROM {s}.job WHERE open AND grp = %s", (short(group),))[0][0])

    def completed(self, group: str, after: tuple[float, str] = (0.0, "")) -> list[JobRow]:
        """Ended jobs of a group after a place in the order of ``(resolved_s, id)``."""
        at_s, last = after
        place = _uuid(last) if last else uuid.UUID(int=0)
        return [self._job(*found) for found in self._run(sql.COMPLETED, (short(group), at_s, place))]

    # --- the inbox --------------------------------------------------------------------------------------------------

    def receive(self, deliveries: Sequence[Delivery]) -> list[bool]:
        """Put deliveries into the inbox; False for each that was there already.

        One that could not be verified does not stand in the way of the same one, verified.
        """
        token = _token()
        keys = [(short(one.endpoint), short(one.dedupe), one.verified) for one in deliveries]
        first: dict[tuple[str, str, bool], int] = {}
        for place, (endpoint, dedupe, verified) in enumerate(keys):
            if not (verified or (endpoint, dedupe, True) in first):
                first.setdefault((endpoint, dedupe, False), place)
            elif verified:
                first.setdefault((endpoint, dedupe, True), place)
        if not first:
            return []
        rows = [_inbox_row(keys[place], deliveries[place]) for place in first.values()]
        given = [list(column) for column in zip(*rows, strict=True)]
        table = f'"{self.settings.schema}".inbox'

        def receive(connection: Connection) -> list[Any]:
            return self._ask(connection, sql.RECEIVE, (table, *given, token))

        def again(connection: Connection) -> list[Any]:
            return receive(connection) + self._ask(connection, sql.RECEIVED, (*given[:3], token))

        fresh = {first[endpoint, dedupe, verified] for endpoint, dedupe, verified in self._write(receive, again=again)}
        return [place in fresh for place in range(len(keys))]

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
            found = self._run(sql.WAITING + "AND i.job = %s ORDER BY i.number LIMIT %s", (_uuid(job), limit))
        elif provider is not None:
            found = self._run(
                sql.WAITING + "AND i.job IS NULL AND i.dialect = %s AND i.provider_id = %s ORDER BY i.number LIMIT %s",
                (*map(short, provider), limit),
            )
        elif lease_s > 0:
            found = sorted(self._run(sql.LEASE, (limit, lease_s)))
        else:
            found = self._run(sql.WAITING + sql.NO_ORPHANS, (limit,))
        return [_delivery(*row) for row in found]

    def applied(self, numbers: Sequence[int]) -> None:
        """These deliveries have been applied. What is left of them says that they have come."""
        if numbers:
            statement = "UPDATE {s}.inbox SET applied = true, body = '', data = '' WHERE number = ANY(%s::bigint[])"
            self._server.run(lambda connection: self._do(connection, statement, (list(numbers),)))

    def quarantined(self, limit: int = 1000) -> list[tuple[int, Delivery]]:
        """Deliveries that could not be verified, the oldest first."""
        statement = "SELECT number, data, body, verified FROM {s}.inbox WHERE NOT verified ORDER BY number LIMIT %s"
        return [_delivery(*row) for row in self._run(statement, (limit,))]

    def verified(self, number: int) -> None:
        """One of those could be, after all; it goes if the same one has come, verified, meanwhile."""

        def verify(connection: Connection) -> None:
            try:
                self._do(
                    connection, "UPDATE {s}.inbox SET verified = true WHERE number = %s AND NOT verified", (number,)
                )
            except errors.UniqueViolation:
                self._do(connection, "DELETE FROM {s}.inbox WHERE number = %s AND NOT verified", (number,))

        self._write(verify)

    # --- bodies -----------------------------------------------------------------------------------------------------

    def put_body(self, body: bytes) -> bytes:
        """Keep a result; returns its reference."""
        if len(body) <= _INLINE_BYTES:
            return _INLINE + body
        statement = "INSERT INTO {s}.body(made_s, data) VALUES(extract(epoch FROM clock_timestamp()), %b) RETURNING id"
        return _OUTSIDE + _PLACE.pack(self._run(statement, (body,))[0][0])

    def body(self, reference: bytes) -> bytes:
        """A result's bytes."""
        if not reference or reference[:1] == _INLINE:
            return reference[1:]
        number = _place(reference)
        found = self._run("SELECT data FROM {s}.body WHERE id = %s", (number,)) if number is not None else []
        if not found:
            raise JobError("a job's body is not in the store")
        return bytes(found[0][0])

    # --- the rest ---------------------------------------------------------------------------------------------------

    def changed(self) -> int:
        """Differs after any commit in the server."""
        return self._server.run(mark_of)

    def subscribe(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Call ``wake`` soon after anybody wrote, from a thread of the store's. Returns what ends it."""
        if not self._server.alive():
            raise JobError("the store of jobs is closed")
        return self._ear.subscribe(wake)

    def instance_key(self) -> bytes:
        """32 random bytes that were made with the store, the same for whoever opens it: they sign callback URLs."""
        return bytes(self._run("SELECT value FROM {s}.meta WHERE name = 'instance_key'", ())[0][0])

    def sweep(self, now_s: float) -> int:
        """Delete ended jobs after ``keep_s``, deliveries after 80 hours, and bodies that nobody refers to.

        One process does it at a time; the others have nothing to do.
        """
        lock = lock_of(self.settings.schema, "sweep")

        def some(statement: str, before_s: float) -> Callable[[Connection], int]:
            def delete(connection: Connection) -> int:
                with connection.transaction():
                    if not self._ask(connection, "SELECT pg_try_advisory_xact_lock(%s)", (lock,))[0][0]:
                        return 0
                    return int(self._ask(connection, statement, (before_s, _SWEEP_ROWS))[0][0])

            return delete

        gone = 0
        for statement, before_s, counts in (
            (sql.SWEEP_JOBS, now_s - self._keep_s, True),
            (sql.SWEEP_INBOX, now_s - REMEMBER_S, True),
            (sql.SWEEP_BODIES, now_s - _YOUNG_S, False),
        ):
            count = _SWEEP_ROWS
            while count == _SWEEP_ROWS:
                count = self._server.run(some(statement, before_s))
                gone += count if counts else 0
        return gone

    def close(self) -> None:
        """Let go of everything."""
        self._ear.close()
        self._bell.close()
        self._server.close()

    # --- inner ------------------------------------------------------------------------------------------------------

    def _swap(self, connection: Connection, row: JobRow, was: tuple[State, int], token: int, input: str) -> bool:
        columns = self._columns(msgspec.structs.replace(row, revision=row.revision + 1))
        is_open = columns[3]
        given: list[Any] = [*columns, token, is_open, token, _uuid(row.id), *was, row.revision]
        there = "AND EXISTS(SELECT 1 FROM {s}.input WHERE input.job = j.id)" if input == "there" else ""
        statement = sql.SWAP.replace("{input_there}", there) + sql.SWAP_INPUT[input]
        if input == "given":
            given.append(row.input)
        if row.provider_id is not None:
            statement += sql.SWAP_ID
            given += [short(row.dialect), short(row.provider_id)]
        return bool(self._ask(connection, statement + sql.SWAPPED, given))

    @staticmethod
    def _columns(row: JobRow) -> tuple[Any, ...]:
        """party, state, attempt, open, next_s, resolved_s, body, result, data, revision."""
        is_open = row.state in OPEN
        times = [at for at in (row.due_s, row.poll_s) if at > 0]
        return (
            party_of(row.origin, row.dialect),
            row.state,
            row.attempt,
            is_open,
            min(times) if is_open and times else None,
            row.resolved_s,
            _place(row.result),
            row.result,
            _encoder.encode(msgspec.structs.replace(row, input=b"", result=b"")),
            row.revision,
        )

    def _job(self, data: bytes, result: bytes, job: uuid.UUID, has_input: bool, input: bytes | None) -> JobRow:
        row = _row_decoder.decode(data)
        row.result = bytes(result)
        if has_input:
            known = bytes(input) if input is not None else self._inputs.get(job)
            if known is None:  # it was in memory a moment ago
                known = self._input(row, job)
            row.input = known
            self._inputs.put(job, known)
        return row

    def _one(self, statement: str, with_input: bool, *given: object) -> JobRow | None:
        try:
            found = self._run(statement, (with_input, *given))
        except JobError as error:
            if error.retryable or not with_input:
                raise
            found = self._run(statement, (False, *given))  # if it is the input that is damaged, the rest can be read
        return self._job(*found[0]) if found else None

    def _input(self, row: JobRow, job: uuid.UUID) -> bytes:
        try:
            found = self._run("SELECT data FROM {s}.input WHERE job = %s", (job,))
        except JobError as error:
            if error.retryable:
                raise
            return self._damage.input(row.id, error)
        return bytes(found[0][0]) if found else b""

    def _fetch_inputs(self, jobs: Iterable[uuid.UUID]) -> None:
        wanted = [job for job in jobs if self._inputs.get(job) is None]
        if not wanted:
            return
        try:
            found = self._run("SELECT job, data FROM {s}.input WHERE job = ANY(%b::uuid[])", (wanted,))
        except JobError as error:
            if error.retryable:
                raise
            return  # one of them is damaged: each is read by itself
        for job, data in found:
            self._inputs.put(job, bytes(data))

    def _statement(self, text: str) -> Any:
        made = self._statements.get(text)
        if made is None:
            made = self._statements[text] = named(text, self.settings.schema).as_string(None)
        return made

    def _do(self, connection: Connection, text: str, given: Sequence[Any]) -> None:
        connection.execute(self._statement(text), given)

    def _ask(self, connection: Connection, text: str, given: Sequence[Any]) -> list[Any]:
        return connection.execute(self._statement(text), given, binary=True).fetchall()

    def _run(self, text: str, given: Sequence[Any]) -> list[Any]:
        return self._server.run(lambda connection: self._ask(connection, text, given))

    def _write(self, write: Callable[[Connection], Any], *, again: Callable[[Connection], Any] | None = None) -> Any:
        """Have it done, and tell those who watch."""
        try:
            return self._server.run(write, again=again)
        finally:
            self._bell.ring()


def _uuid(id: str) -> uuid.UUID:
    """A job's id as the database has it. What is no UUID, spelled as we spell it, has one made of it that nobody else has."""
    try:
        found = uuid.UUID(id)
    except ValueError:
        found = None
    if found is None or str(found) != id:
        return uuid.uuid5(uuid.NAMESPACE_OID, f"spanwire {short(id)}")
    return found


def _token() -> int:
    return secrets.randbits(62) + 1


def _place(reference: bytes) -> int | None:
    """The number of a body outside, None for one that is its own reference."""
    if reference[:1] != _OUTSIDE or len(reference) != 1 + _PLACE.size:
        return None
    return int(_PLACE.unpack(reference[1:])[0])


def _inbox_row(key: tuple[str, str, bool], one: Delivery) -> tuple[Any, ...]:
    return (
        *key,
        short(dialect_of(one)),
        None if one.job is None else _uuid(one.job),
        None if one.provider_id is None else short(one.provider_id),
        one.received_s,
        one.body,
        _encoder.encode(msgspec.structs.replace(one, body=b"")),
    )


def _delivery(number: int, data: bytes, body: bytes, verified: bool) -> tuple[int, Delivery]:
    delivery = _delivery_decoder.decode(data)
    delivery.body = bytes(body)
    delivery.verified = verified
    return number, delivery


@atexit.register
def _close_all() -> None:
    """Whose owner never closed them."""
    for store in list(_open):
        store.close()
