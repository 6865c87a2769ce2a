"""The entry points ``redis``, ``rediss``, ``valkey``, ``valkeys`` and ``redis+unix`` of ``spanwire.job_stores``. What a URL says is
read here; the client library is loaded when a store is opened."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

from spanwire.errors import ConfigurationError
from spanwire.jobs.stores import keep_s_of

if TYPE_CHECKING:
    from .redis_store import RedisStore

__all__ = ["RedisAddress", "open_store", "read_url"]

#: How long an ended job is kept, in seconds: a week, as in SQLite.
_KEEP_S = 7 * 86400.0
_SCHEMES = {"redis": False, "valkey": False, "rediss": True, "valkeys": True, "redis+unix": False}
_OPTIONS = ("prefix", "keep_s", "wait", "cacert", "cert", "key", "db")
_PREFIX = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_PORT = 6379


class RedisAddress(msgspec.Struct, frozen=True, kw_only=True):
    """What a store's URL says.

    Attributes:
        host, port, path: where the server is; ``path`` of a Unix socket instead of the others.
        db: number of the database.
        username, password: None for none. Shown by nobody.
        tls: and ``cacert``, ``cert``, ``key``: files in PEM, None for the system's authorities and no certificate of ours.
        prefix: of all keys, and their hash tag.
        keep_s: how long an ended job is kept, in seconds.
        wait: until what was written is on the disk, where the server can say so.
    """

    host: str = "localhost"
    port: int = _PORT
    path: str | None = None
    db: int = 0
    username: str | None = None
    password: str | None = None
    tls: bool = False
    cacert: str | None = None
    cert: str | None = None
    key: str | None = None
    prefix: str = "spanwire"
    keep_s: float = _KEEP_S
    wait: bool = True

    @property
    def place(self) -> str:
        """For people: no secrets."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        where = (
            f"redis+unix://{self.path}?db={self.db}&"
            if self.path
            else f"{self._scheme}://{host}:{self.port}/{self.db}?"
        )
        return f"{where}prefix={self.prefix}"

    @property
    def _scheme(self) -> Literal["redis", "rediss"]:
        return "rediss" if self.tls else "redis"

    def __repr__(self) -> str:
        return f"RedisAddress({self.place!r})"


def read_url(url: str) -> RedisAddress:
    """Pure. Raises ConfigurationError, which never has the URL's secrets in it."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # its text may have the password in it
        raise ConfigurationError(
            "the store's URL cannot be read: redis://user:password@host:6379/0, with the password percent-encoded (# is %23)"
        ) from None
    tls = _SCHEMES.get(parts.scheme)
    if tls is None:
        raise ConfigurationError(f"a store of the kind {parts.scheme!r:.40} is none of Redis: {', '.join(_SCHEMES)}")
    options: dict[str, str] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name not in _OPTIONS:
            raise ConfigurationError(f"the store's URL has an option {name!r:.40}; it can be {', '.join(_OPTIONS)}")
        options[name] = value
    unix = parts.scheme == "redis+unix"
    path = unquote(parts.path)
    if unix and (parts.hostname or path in ("", "/")):
        raise ConfigurationError("a Unix socket is named with three slashes: redis+unix:///run/redis.sock")
    if parts.fragment:
        raise ConfigurationError("the store's URL has a '#' in it: in a password it is written %23")
    prefix = options.get("prefix", "spanwire")
    if not _PREFIX.fullmatch(prefix):
        raise ConfigurationError(f"prefix={prefix!r:.80} must be 1 to 64 of letters, digits and _ . : -")
    db = options.get("db", "0" if unix else path.strip("/") or "0")
    if not db.isascii() or not db.isdigit():
        raise ConfigurationError(
            f"the store's URL ends with the number of a database, as in redis://host:6379/0, not {db!r:.40}"
        )
    files = {name: options[name] for name in ("cacert", "cert", "key") if options.get(name)}
    for name, file in files.items():
        if not tls:
            raise ConfigurationError(f"{name} is of TLS: rediss:// or valkeys://")
        if not Path(file).is_file():
            raise ConfigurationError(f"{name}={file!r:.200} is not a file")
    return RedisAddress(
        host=unquote(parts.hostname or "localhost"),
        port=port or _PORT,
        path=path if unix else None,
        db=int(db),
        username=unquote(parts.username) if parts.username else None,
        password=unquote(parts.password) if parts.password else None,
        tls=tls,
        cacert=files.get("cacert"),
        cert=files.get("cert"),
        key=files.get("key"),
        prefix=prefix,
        keep_s=keep_s_of(options["keep_s"]) if "keep_s" in options else _KEEP_S,
        wait=_yes_or_no("wait", options.get("wait", "yes")),
    )


def open_store(url: str) -> RedisStore:
    """The store of a URL such as ``rediss://user:password@host:6379/0?prefix=spanwire&keep_s=604800``.

    Raises:
        ConfigurationError: the URL is wrong, the client library is missing, or the server refuses us.
        JobError: the server is not there.
    """
    address = read_url(url)
    try:
        from .redis_store import RedisStore
    except ModuleNotFoundError as error:
        if error.name != "redis":
            raise
        raise ConfigurationError(
            "a store in Redis or Valkey needs redis-py: pip install 'spanwire-webhook[redis]'"
        ) from error
    return RedisStore(address)


def _yes_or_no(name: str, text: str) -> bool:
    if text not in ("yes", "no"):
        raise ConfigurationError(f"{name}={text!r:.40} must be yes or no")
    return text == "yes"
