"""``postgresql://`` and ``postgres://``: the store of jobs in a PostgreSQL database, version 13 or newer.

``postgresql://user:password@host/database?keep_s=86400&schema=jobs``. What is in the query and not ours goes to libpq
(``sslmode=verify-full``, ``target_session_attrs=read-write``). Needs ``pip install 'spanwire[postgresql]'``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spanwire.errors import ConfigurationError

if TYPE_CHECKING:
    from .postgresql_store import PostgreSQLStore

__all__ = ["open_postgresql"]


def open_postgresql(url: str) -> PostgreSQLStore:
    """The store that a URL names; its tables are made if they are not there.

    Raises:
        ConfigurationError: the driver is missing, an option is wrong, or the server refuses us.
        JobError: the server cannot be reached now.
    """
    try:
        import psycopg  # noqa: F401
        import psycopg_pool  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(
            f"jobs in PostgreSQL need psycopg and its pool ({error}): pip install 'spanwire[postgresql]'"
        ) from error
    from .postgresql_settings import PostgreSQLSettings
    from .postgresql_store import PostgreSQLStore

    return PostgreSQLStore(PostgreSQLSettings.of(url))
