"""Stores by URL: SQLite's own, and those that installed packages bring (entry points ``spanwire.job_stores``).

A store's URL may have a password in it: it is shown nowhere. :func:`redacted` says what may be shown, and
:func:`without_secrets` cleans what somebody else has written about it.
"""

from __future__ import annotations

import os
import re
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from ..errors import ConfigurationError, SpanwireError
from .contract import Store

__all__ = ["default_store_url", "file_of", "keep_s_of", "open_store", "redacted", "without_secrets"]

_GROUP = "spanwire.job_stores"
#: What to install for schemes of our own, where the package that has them is missing.
_EXTRAS = {
    **dict.fromkeys(("postgresql", "postgres"), "postgresql"),
    **dict.fromkeys(("redis", "rediss", "valkey", "valkeys", "redis+unix"), "redis"),
}
#: Up to the last @, since passwords are often typed as they are; a fragment is a # in one.
_USER = re.compile(r"(?s)^([A-Za-z][A-Za-z0-9+.-]*://)([^/@:?]*)(:.*)?@")
_VALUE = re.compile(r"([?&;][^=&;]*)=[^&;]*")


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
    Other schemes are those of the installed packages: ``postgresql://user@host/database``.

    Raises:
        ConfigurationError: no such kind of store, or it cannot be opened.
        JobError: it cannot be reached now.
    """
    if not isinstance(url, str):
        raise ConfigurationError(f"the store must be a URL such as sqlite:///jobs.db, not {type(url).__name__}")
    scheme, colon, _ = url.partition("://")
    scheme = scheme.lower() if colon else ""
    if scheme == "sqlite":
        return _sqlite(url)
    return _installed(scheme, url)


def file_of(url: str) -> Path | None:
    """The file of a store's URL, None if it is no file's. Looks at nothing."""
    if not url.startswith("sqlite:"):
        return None  # which may be no URL that can be taken apart
    parts = urlsplit(url)
    path = unquote(parts.path[1:])
    return Path(path) if not parts.netloc and path else None


def keep_s_of(value: str) -> float:
    """The option ``keep_s`` of a store's URL, in seconds. Raises ConfigurationError."""
    try:
        keep_s = float(value)
    except ValueError:
        keep_s = 0.0
    if not keep_s > 0:
        raise ConfigurationError(f"keep_s={value!r:.40} must be a number of seconds, more than 0")
    return keep_s


def redacted(url: str) -> str:
    """A store's URL as it may be shown: no password, and no values of its query."""
    return _VALUE.sub(r"\1=***", _USER.sub(lambda found: f"{found[1]}{found[2]}{':***' if found[3] else ''}@", url))


def without_secrets(text: str, url: str) -> str:
    """What somebody else has written about a store, without what its URL has to hide."""
    text = text.replace(url, redacted(url))
    found = _USER.match(url)
    secrets = [found[3][1:]] if found and found[3] else []
    secrets += [value for name, _, value in _values(url) if re.search("(?i)pass|secret|token|key", name)]
    for secret in secrets:
        # Whoever takes the URL apart at an @ in the password takes the rest of it for a part of the host's name.
        for at in (place for place, one in enumerate(secret[:-1]) if one == "@"):
            text = text.replace(f"{secret[at + 1 :]}@", "***@")
        for spelling in {secret, unquote(secret)} - {""}:
            text = text.replace(spelling, "***")
    return text


def _values(url: str) -> list[tuple[str, str, str]]:
    return [one.partition("=") for one in re.split("[&;]", url.partition("?")[2])]


def _sqlite(url: str) -> Store:
    parts = urlsplit(url)
    if parts.netloc:
        raise ConfigurationError("the store's URL has a host: write three slashes, sqlite:///jobs.db")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    keep = options.pop("keep_s", None)
    if options:
        raise ConfigurationError(f"the store's URL has an option {next(iter(options))!r:.40}; it can be keep_s")
    from .sqlite import KEEP_S, SQLiteStore  # sqlite3 is loaded where jobs are used

    keep_s = KEEP_S if keep is None else keep_s_of(keep)
    return SQLiteStore(unquote(parts.path[1:]) or None, keep_s=keep_s)


def _installed(scheme: str, url: str) -> Store:
    entry = _entry(scheme)
    owner = f"{_distribution(entry)} ({entry.value})"
    try:
        made: Any = entry.load()(url)
    except SpanwireError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it is, it is said whose it is
        what = without_secrets(f"{type(error).__name__}: {error}", url)
        problem = ConfigurationError(f"the store of jobs that {owner} brings for {scheme}:// cannot be opened: {what}")
        # The original says more, in a traceback; not where it would say too much.
        raise problem from (error if what == f"{type(error).__name__}: {error}" else None)
    missing = sorted(name for name in vars(Store) if name[0] != "_" and not callable(getattr(made, name, None)))
    if missing:
        raise ConfigurationError(
            f"{owner} gives a {type(made).__name__} for {scheme}://, which is no store of jobs: it has no "
            f"{', '.join(f'{name}()' for name in missing)}"
        )
    store: Store = made
    return store


def _entry(scheme: str) -> metadata.EntryPoint:
    from ..plugins import _disabled, _entry_points

    entries = {
        (entry.name, entry.value, _distribution(entry)): entry  # found twice, where a folder is twice on sys.path
        for entry in _entry_points(_GROUP)
        if not _disabled() & {entry.name, _distribution(entry)}
    }
    found = [entry for entry in entries.values() if scheme and entry.name.lower() == scheme]
    if not found:
        extra = _EXTRAS.get(scheme)
        advice = f"pip install 'spanwire[{extra}]'" if extra else "use sqlite:///jobs.db"
        known = sorted({"sqlite", *(entry.name for entry in entries.values())})
        raise ConfigurationError(
            f"a store of the kind {scheme!r:.40} is not known (there is {', '.join(known)}); {advice}"
        )
    if len(found) > 1:
        owners = " and ".join(sorted(_distribution(entry) for entry in found))
        raise ConfigurationError(
            f"both {owners} bring a store for {scheme}://; uninstall one, or leave it out with SPANWIRE_DISABLE_PLUGINS"
        )
    return found[0]


def _distribution(entry: metadata.EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.value
