"""Connections to PostgreSQL: a pool, made anew in a forked child; what a broken one means for what it was doing."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import psycopg
from psycopg import errors
from psycopg_pool import ConnectionPool, PoolTimeout

from spanwire.errors import ConfigurationError, JobError
from spanwire.jobs.stores import redacted

from .postgresql_schema import migrate, missing
from .postgresql_settings import WAIT_S, PostgreSQLSettings

__all__ = ["Connection", "Server"]

_log = logging.getLogger("spanwire.jobs")
_T = TypeVar("_T")
Connection: TypeAlias = "psycopg.Connection[tuple[Any, ...]]"
_Pool: TypeAlias = "ConnectionPool[Connection]"
#: The server has taken it back itself, and the same may succeed.
_AGAIN = (errors.SerializationFailure, errors.DeadlockDetected)
#: It is not broken, it is busy or full: the same at once would make it worse.
_NOT_AGAIN = (
    errors.QueryCanceled,
    errors.LockNotAvailable,
    errors.DiskFull,
    errors.OutOfMemory,
    errors.TooManyConnections,
)
#: How long a lost connection is sought, with longer and longer waits, before the next one who needs it begins anew, in seconds:
#: a server that is back after a long time is found within some seconds.
_SEEK_S = 10.0
#: Of our pools, in the log of psycopg_pool.
_POOL = "spanwire jobs "
_numbers = itertools.count(1)
#: Source: pg_current_snapshot() is of PostgreSQL 13, and 12 is out of support since November 2024.
_OLDEST = 13
_parked: list[object] = []
_warned: set[str] = set()


class _Pooled(psycopg.Connection[tuple[Any, ...]]):
    """One of a pool of ours: its class says so where the pool tells of it."""


class _Told(logging.Filter):
    """What psycopg_pool tells of our pools, each attempt to connect as a warning: ours to tell, once, as an error.

    Attributes:
        last: by the pool's name, when connecting failed last, and how.
    """

    def __init__(self) -> None:
        super().__init__()
        self.last: dict[str, tuple[float, str]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        args = record.args if isinstance(record.args, tuple) else ()
        name = next((arg for arg in args if isinstance(arg, str) and arg.startswith(_POOL)), None)
        if name is None and not any(isinstance(arg, _Pooled) for arg in args):
            return True
        if name is not None and isinstance(args[-1], psycopg.Error):
            self.last[name] = (time.monotonic(), str(args[-1]))
        return False


_told = _Told()
logging.getLogger("psycopg.pool").addFilter(_told)


class Server:
    """One store's connections, for any number of threads."""

    def __init__(self, settings: PostgreSQLSettings) -> None:
        self.settings = settings
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._pool: _Pool | None = None
        self._closed = False
        self._migrate()

    def connect(self) -> Connection:
        """A connection of its owner's own. Raises psycopg.Error."""
        settings = self.settings
        return psycopg.connect(autocommit=True, prepare_threshold=settings.prepare_threshold, **settings.libpq)

    def run(self, do: Callable[[Connection], _T], *, again: Callable[[Connection], _T] | None = None) -> _T:
        """Do something on a connection; once more on another one if that one is broken.

        Args:
            again: what to do then instead, where doing it twice is not the same as doing it once.

        Raises:
            JobError: the store is closed, or the server cannot do it.
        """
        try:
            pool = self._pool_now()
            try:
                with pool.connection() as connection:
                    return do(connection)
            except PoolTimeout:
                raise
            except (psycopg.OperationalError, psycopg.InterfaceError, errors.ReadOnlySqlTransaction) as error:
                if isinstance(error, _NOT_AGAIN):
                    raise
                _log.info("the store is asked again, on another connection: %s", self.settings.clean(error))
                if isinstance(error, errors.ReadOnlySqlTransaction):
                    self._leave(pool)  # a primary that is a standby now: all of them lead there, and none is broken
                elif not isinstance(error, _AGAIN):
                    pool.check()  # what broke one has mostly broken all
                with self._pool_now().connection() as connection:
                    return (again or do)(connection)
        except errors.UniqueViolation as error:
            raise JobError("the store has a job of this id already") from error
        except psycopg.Error as error:
            raise self._down(error) from error

    def alive(self) -> bool:
        """It was not closed."""
        return not self._closed

    def close(self) -> None:
        """Let go of all connections."""
        with self._lock if self._pid == os.getpid() else contextlib.nullcontext():
            self._closed = True
            pool, self._pool = self._pool, None
        if pool is not None and self._pid == os.getpid():
            pool.close()
            _told.last.pop(pool.name, None)

    def _pool_now(self) -> _Pool:
        if self._pid != os.getpid():
            # What its parent has opened is never touched in a forked child, not even to close it.
            _parked.append((self._pool, self._lock))
            self._lock, self._pool, self._pid = threading.Lock(), None, os.getpid()
        pool = self._pool
        if pool is None:
            with self._lock:
                if self._closed:
                    raise JobError("the store of jobs is closed")
                pool = self._pool
                if pool is None:
                    pool = self._pool = self._new_pool()
        return pool

    def _leave(self, pool: _Pool) -> None:
        with self._lock:
            if self._pool is pool:
                self._pool = None
        pool.close(timeout=0)  # those in use are closed when they come back
        _told.last.pop(pool.name, None)

    def _new_pool(self) -> _Pool:
        settings = self.settings
        return ConnectionPool(
            kwargs={"autocommit": True, "prepare_threshold": settings.prepare_threshold, **settings.libpq},
            min_size=1,
            max_size=settings.pool,
            timeout=WAIT_S,
            reconnect_timeout=_SEEK_S,
            max_waiting=0,
            connection_class=_Pooled,
            name=f"{_POOL}{next(_numbers)}",
            open=True,
        )

    def _migrate(self) -> None:
        try:
            with self.connect() as connection:
                self._check(connection)
                try:
                    migrate(connection, self.settings.schema)
                except errors.InsufficientPrivilege as error:
                    raise ConfigurationError(
                        f"the store cannot be opened: {self.settings.clean(error.diag.message_primary)}; the role needs: "
                        f"{missing(connection, self.settings.schema)}"
                    ) from error
                self._warn(connection)
        except (psycopg.OperationalError, psycopg.InterfaceError) as error:
            if "unsupported startup parameter" in str(error):
                raise ConfigurationError(
                    "the store is behind a pooler that takes no settings of a connection: add ?prepare_threshold=none to "
                    "its URL"
                ) from error
            if _refused(error):
                raise ConfigurationError(f"the store cannot be opened: {self.settings.clean(error)}") from error
            raise self._down(error) from error
        except psycopg.Error as error:
            raise ConfigurationError(f"the store cannot be opened: {self.settings.clean(error)}") from error

    def _check(self, connection: Connection) -> None:
        version = connection.info.server_version
        if version // 10_000 < _OLDEST:
            raise ConfigurationError(
                f"the store's server is PostgreSQL {version // 10_000}, and it has to be {_OLDEST} or newer: upgrade it, or "
                f"name another one in {redacted(self.settings.url)}"
            )

    def _warn(self, connection: Connection) -> None:
        for name, value, meaning in (
            ("synchronous_commit", "off", "the last second of webhooks"),
            ("fsync", "off", "everything"),
        ):
            found = connection.execute("SELECT current_setting(%s)", (name,)).fetchone()
            known = f"{name} {self.settings.url}"
            if found is not None and found[0] == value and known not in _warned:
                _warned.add(known)
                _log.warning(
                    "the store's server has %s=%s: a webhook that was answered 2xx may be lost with it (%s, if it crashes)",
                    name,
                    value,
                    meaning,
                )

    def _down(self, error: psycopg.Error) -> JobError:
        retryable = isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError, errors.ReadOnlySqlTransaction))
        why: object = error
        pool = self._pool
        if isinstance(error, PoolTimeout) and pool is not None:
            failed_s, words = _told.last.get(pool.name, (0.0, ""))
            if time.monotonic() - failed_s <= _SEEK_S + WAIT_S:  # else all of them are in use
                why = f"no connection within {WAIT_S:g} s: {words}"
        return JobError(f"the store of jobs cannot be used: {self.settings.clean(why)}", retryable=retryable)


def _refused(error: psycopg.Error) -> bool:
    """By who we are or what we ask for, and not by its state: to try again brings the same."""
    state = error.sqlstate
    if state is not None:
        return state[:2] in ("28", "3D", "42")
    # libpq has no code for errors of connecting: the server's words are all there is.
    text = str(error)
    return (
        "invalid integer value" in text
        or "password" in text
        or ("does not exist" in text and "FATAL" in text)
        or "no pg_hba.conf entry" in text
    )
