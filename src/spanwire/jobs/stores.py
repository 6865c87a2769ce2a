"""Stores by URL."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from ..errors import ConfigurationError
from .contract import Store

__all__ = ["default_store_url", "file_of", "open_store"]


def default_store_url() -> str:
    """SPANWIRE_STORE, else ``jobs.db`` in the user's state folder (``$XDG_STATE_HOME/spanwire``)."""
    named = os.environ.get("SPANWIRE_STORE")
    if named:
        return named
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return f"sqlite:///{Path(base) / 'spanwire' / 'jobs.db'}"


def open_store(url: str) -> Store:
    """The store that a URL names.

    ``sqlite:///jobs.db`` is a file of the working folder, ``sqlite:////var/lib/app/jobs.db`` one by its whole path, and
    ``sqlite://`` a private one that goes with the store. ``?keep_s=86400``: how long ended jobs are kept, in seconds.

    Raises:
        ConfigurationError: no such kind of store, or it cannot be opened.
    """
    if not isinstance(url, str):
        raise ConfigurationError(f"the store must be a URL such as sqlite:///jobs.db, not {type(url).__name__}")
    parts = urlsplit(url)
    if parts.scheme != "sqlite":
        raise ConfigurationError(
            f"a store of the kind {parts.scheme or url.partition('?')[0]!r:.40} is not known; use sqlite:///jobs.db"
        )
    if parts.netloc:
        raise ConfigurationError("the store's URL has a host: write three slashes, sqlite:///jobs.db")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    keep = options.pop("keep_s", None)
    if options:
        raise ConfigurationError(f"the store's URL has an option {next(iter(options))!r:.40}; it can be keep_s")
    from .sqlite import KEEP_S, SQLiteStore  # sqlite3 is loaded where jobs are used

    try:
        keep_s = KEEP_S if keep is None else float(keep)
    except ValueError:
        keep_s = 0.0
    if not keep_s > 0:
        raise ConfigurationError(f"keep_s={keep!r:.40} must be a number of seconds, more than 0")
    return SQLiteStore(unquote(parts.path[1:]) or None, keep_s=keep_s)


def file_of(url: str) -> Path | None:
    """The file of a store's URL, None if it is no file's. Looks at nothing."""
    parts = urlsplit(url)
    path = unquote(parts.path[1:])
    return Path(path) if parts.scheme == "sqlite" and not parts.netloc and path else None
