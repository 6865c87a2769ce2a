"""The tables of the SQLite store, and how a file of an older version gets them: steps forward only, each tried once."""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Callable, Sequence

import msgspec

from ..errors import ConfigurationError
from .contract import JobRow

__all__ = ["VERSION", "migrate", "party_of"]

_V1 = """
CREATE TABLE IF NOT EXISTS job(
    id TEXT PRIMARY KEY, grp TEXT NOT NULL, state TEXT NOT NULL, attempt INTEGER NOT NULL, open INTEGER NOT NULL,
    next_s REAL, resolved_s REAL NOT NULL, input BLOB NOT NULL, result BLOB NOT NULL, row BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS job_due ON job(next_s) WHERE open = 1 AND next_s IS NOT NULL;
CREATE INDEX IF NOT EXISTS job_open ON job(grp) WHERE open = 1;
CREATE INDEX IF NOT EXISTS job_completed ON job(grp, resolved_s, id) WHERE open = 0;
CREATE INDEX IF NOT EXISTS job_age ON job(resolved_s) WHERE open = 0;
CREATE TABLE IF NOT EXISTS provider_id(
    dialect TEXT NOT NULL, provider_id TEXT NOT NULL, job TEXT NOT NULL, PRIMARY KEY(dialect, provider_id, job));
CREATE INDEX IF NOT EXISTS provider_id_job ON provider_id(job);
CREATE TABLE IF NOT EXISTS inbox(
    number INTEGER PRIMARY KEY AUTOINCREMENT, endpoint TEXT NOT NULL, dedupe TEXT NOT NULL, verified INTEGER NOT NULL,
    dialect TEXT NOT NULL, job TEXT, provider_id TEXT, received_s REAL NOT NULL, applied INTEGER NOT NULL,
    body BLOB NOT NULL, delivery BLOB NOT NULL);
CREATE UNIQUE INDEX IF NOT EXISTS inbox_once ON inbox(endpoint, dedupe, verified);
CREATE INDEX IF NOT EXISTS inbox_waiting ON inbox(number) WHERE applied = 0 AND verified = 1;
CREATE INDEX IF NOT EXISTS inbox_job ON inbox(job) WHERE applied = 0 AND verified = 1 AND job IS NOT NULL;
CREATE INDEX IF NOT EXISTS inbox_provider ON inbox(dialect, provider_id) WHERE applied = 0 AND verified = 1 AND job IS NULL;
CREATE INDEX IF NOT EXISTS inbox_quarantine ON inbox(number) WHERE verified = 0;
CREATE INDEX IF NOT EXISTS inbox_age ON inbox(received_s);
CREATE TABLE IF NOT EXISTS meta(name TEXT PRIMARY KEY, value BLOB NOT NULL);
"""
#: Leases. A job's is its ``next_s``, put off; a delivery's has a column.
_V2 = """
ALTER TABLE job ADD COLUMN party TEXT NOT NULL DEFAULT '';
ALTER TABLE inbox ADD COLUMN lease_s REAL NOT NULL DEFAULT 0;
DROP INDEX job_due;
CREATE INDEX job_due ON job(party, next_s) WHERE open = 1 AND next_s IS NOT NULL;
"""
#: Whether a delivery's job was here when one of the two came: orphans, whose number only others limit, are not looked at.
_V3 = """
ALTER TABLE inbox ADD COLUMN here INTEGER NOT NULL DEFAULT 1;
UPDATE inbox SET here = 0 WHERE applied = 0 AND NOT (EXISTS(SELECT 1 FROM job WHERE job.id = inbox.job) OR (inbox.job IS NULL
    AND EXISTS(SELECT 1 FROM provider_id AS p WHERE p.dialect = inbox.dialect AND p.provider_id = inbox.provider_id)));
DROP INDEX inbox_waiting;
CREATE INDEX inbox_waiting ON inbox(number) WHERE applied = 0 AND verified = 1 AND here = 1;
"""


def party_of(origin: str, dialect: str) -> str:
    """What the column ``party`` has: no name of a dialect has a blank."""
    return f"{origin} {dialect}"


def _first(connection: sqlite3.Connection) -> None:
    _run(connection, _V1)
    connection.execute("INSERT OR IGNORE INTO meta VALUES('instance_key', ?)", (secrets.token_bytes(32),))


def _leases(connection: sqlite3.Connection) -> None:
    _run(connection, _V2)
    decoder = msgspec.msgpack.Decoder(JobRow)
    for number, data in connection.execute("SELECT rowid, row FROM job WHERE open = 1").fetchall():
        row = decoder.decode(data)
        connection.execute("UPDATE job SET party = ? WHERE rowid = ?", (party_of(row.origin, row.dialect), number))


def _orphans(connection: sqlite3.Connection) -> None:
    _run(connection, _V3)


#: The step at index N makes version N + 1 of version N.
_STEPS: Sequence[Callable[[sqlite3.Connection], None]] = (_first, _leases, _orphans)
VERSION = len(_STEPS)


def migrate(connection: sqlite3.Connection, path: object) -> None:
    """Bring a file to our version, as a whole or not at all: whoever opens it at the same time waits.

    Raises:
        ConfigurationError: it is of a newer version.
        sqlite3.Error: it is no store.
    """
    connection.execute("BEGIN IMMEDIATE")
    try:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version > VERSION:
            raise ConfigurationError(  # noqa: TRY301 - it rolls back as the others do
                f"the store {path} was made by a newer spanwire (its version {version}, ours is {VERSION}): "
                "pip install -U spanwire"
            )
        for step in _STEPS[version:]:
            step(connection)
        if version < VERSION:
            connection.execute(f"PRAGMA user_version = {VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _run(connection: sqlite3.Connection, script: str) -> None:
    for statement in script.split(";\n"):  # executescript would commit before it begins
        connection.execute(statement)
