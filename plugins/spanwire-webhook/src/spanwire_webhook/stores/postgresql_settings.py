"""What a store's URL says, taken apart: ours, and what goes to libpq. Secrets are in here, and in no text that it makes."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote

import msgspec
import psycopg
from psycopg.conninfo import conninfo_to_dict

from spanwire.errors import ConfigurationError
from spanwire.jobs.sqlite import KEEP_S
from spanwire.jobs.stores import keep_s_of, redacted, without_secrets

__all__ = ["PostgreSQLSettings"]

#: In seconds: to connect, to wait for a free connection, for one statement.
CONNECT_S, WAIT_S, STATEMENT_S = 10, 10.0, 60
#: A peer that is gone without a word is noticed after about a minute. Source: libpq's connection parameters.
_ALIVE = {"keepalives_idle": "30", "keepalives_interval": "10", "keepalives_count": "3", "tcp_user_timeout": "60000"}
_SCHEMA = re.compile(r"[a-z_][a-z0-9_]{0,47}")
_OURS = ("keep_s", "schema", "pool", "prepare_threshold", "listen")


class PostgreSQLSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a store.

    Attributes:
        url: as it was given.
        libpq: parameters of a connection.
        keep_s: how long ended jobs are kept, in seconds.
        schema: the PostgreSQL schema that has the tables.
        pool: most connections of this process, besides one that listens.
        prepare_threshold: a statement is prepared when it is used that often; None: never, as a pooler needs it that hands
            each transaction another connection (pgbouncer before 1.21, in transaction mode).
        listen: hear of others' writes by LISTEN. False: ask several times a second.
    """

    url: str
    libpq: dict[str, Any]
    keep_s: float = KEEP_S
    schema: str = "spanwire"
    pool: int = 8
    prepare_threshold: int | None = 5
    listen: bool = True

    def __repr__(self) -> str:
        return f"PostgreSQLSettings({redacted(self.url)!r})"

    def __rich_repr__(self) -> list[tuple[str, object]]:
        return [("url", redacted(self.url))]

    @classmethod
    def of(cls, url: str) -> PostgreSQLSettings:
        """Raises ConfigurationError."""
        base, _, query = url.partition("?")
        pairs = [one for one in query.split("&") if one]
        # Like libpq, which knows no + for a blank: what is not ours stays as it is spelled.
        ours = {name: unquote(value) for name, _, value in (one.partition("=") for one in pairs) if name in _OURS}
        theirs = "&".join(one for one in pairs if one.partition("=")[0] not in _OURS)
        try:
            libpq = conninfo_to_dict(base + (f"?{theirs}" if theirs else ""))
        except psycopg.ProgrammingError as error:
            raise ConfigurationError(
                f"the store's URL cannot be read: {without_secrets(str(error).strip(), url)}; ours are {', '.join(_OURS)}"
            ) from None  # the original shows the URL
        made: dict[str, Any] = {}
        if "keep_s" in ours:
            made["keep_s"] = keep_s_of(ours["keep_s"])
        if "schema" in ours:
            if not _SCHEMA.fullmatch(ours["schema"]):
                raise ConfigurationError(f"schema={ours['schema']!r:.60} must be a name of small letters, digits and _")
            made["schema"] = ours["schema"]
        if "pool" in ours:
            made["pool"] = _number("pool", ours["pool"], 1)
        if "prepare_threshold" in ours:
            text = ours["prepare_threshold"]
            made["prepare_threshold"] = None if text.lower() == "none" else _number("prepare_threshold", text, 0)
        if "listen" in ours:
            if ours["listen"] not in ("yes", "no"):
                raise ConfigurationError(f"listen={ours['listen']!r:.40} must be yes or no")
            made["listen"] = ours["listen"] == "yes"
        libpq = {"connect_timeout": str(CONNECT_S), "application_name": "spanwire", **_ALIVE, **libpq}
        if made.get("prepare_threshold", 5) is not None:  # a pooler refuses `options`
            given = libpq.get("options") or ""
            limits = f"-c statement_timeout={STATEMENT_S}s -c idle_in_transaction_session_timeout={STATEMENT_S}s"
            libpq["options"] = f"{limits} {given}".strip()
        return cls(url=url, libpq=libpq, **made)

    def clean(self, text: object) -> str:
        """What the server or the driver says, on one line, without secrets."""
        return without_secrets(" ".join(str(text).split()), self.url)


def _number(name: str, text: str, least: int) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise ConfigurationError(f"{name}={text!r:.40} must be a number, {least} or more")
    return int(text)
