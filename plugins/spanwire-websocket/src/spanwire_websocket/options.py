"""PURE: what ``Endpoint(options={...})`` says to this transport."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from spanwire.endpoint import Endpoint
from spanwire.errors import ConfigurationError

from .chat import MAX_AGE_S
from .socket import Keepalive

__all__ = ["NAMES", "Options", "options_of"]

NAMES = frozenset(
    {
        "buffer_bytes",
        "compression",
        "continue_conversations",
        "max_age_s",
        "ping_interval_s",
        "ping_timeout_s",
        "subprotocols",
    }
)


#: A name is a token, and stands there once. Source: RFC 6455 section 4.1, RFC 9110 section 5.6.2.
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
#: More than that, some 30 years, is a mistake.
_MOST_S = 1e9


class Options(NamedTuple):
    """Attributes:
    keepalive: ``ping_interval_s`` (default 20; None for no pings) and ``ping_timeout_s`` (default 20; None: a missing
        answer ends nothing).
    subprotocols: to offer, the preferred one first.
    compression: offer ``permessage-deflate``. Default off: small messages do not shrink, and each socket would hold
        another 64 KiB.
    max_age_s: a socket for chat takes no call after that. Default 55 minutes, since servers close them after 60.
    continue_conversations: send only what the server of the socket does not have yet. Default on.
    buffer_bytes: how much of a session's events may lie here unread until the server is held up. Default 16 MiB.
    """

    keepalive: Keepalive = Keepalive()
    subprotocols: tuple[str, ...] = ()
    compression: bool = False
    max_age_s: float = MAX_AGE_S
    continue_conversations: bool = True
    buffer_bytes: int = 16 * 1024 * 1024


def options_of(endpoint: Endpoint) -> Options:
    """Raises ConfigurationError that names the option and what it may be."""
    found = endpoint.options
    keepalive = Keepalive(
        _seconds(endpoint, "ping_interval_s", 20.0, optional=True),
        _seconds(endpoint, "ping_timeout_s", 20.0, optional=True),
    )
    subprotocols: Any = found.get("subprotocols", ())
    if (
        isinstance(subprotocols, str)
        or not isinstance(subprotocols, list | tuple)
        or not all(isinstance(name, str) and _TOKEN.fullmatch(name) for name in subprotocols)
        or len(set(subprotocols)) < len(subprotocols)
    ):
        raise _bad(endpoint, "subprotocols", "a list of different names, without spaces", subprotocols)
    buffer_bytes = found.get("buffer_bytes", 16 * 1024 * 1024)
    if isinstance(buffer_bytes, bool) or not isinstance(buffer_bytes, int) or buffer_bytes < 1:
        raise _bad(endpoint, "buffer_bytes", "a number of bytes from 1", buffer_bytes)
    max_age_s = _seconds(endpoint, "max_age_s", MAX_AGE_S, optional=False)
    assert max_age_s is not None
    return Options(
        keepalive,
        tuple(subprotocols),
        _flag(endpoint, "compression", default=False),
        max_age_s,
        _flag(endpoint, "continue_conversations", default=True),
        buffer_bytes,
    )


def _seconds(endpoint: Endpoint, name: str, default: float, *, optional: bool) -> float | None:
    value = endpoint.options.get(name, default)
    if value is None and optional:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _MOST_S:
        raise _bad(endpoint, name, "seconds, over 0" + (", or None" if optional else ""), value)
    return float(value)


def _flag(endpoint: Endpoint, name: str, *, default: bool) -> bool:
    value = endpoint.options.get(name, default)
    if not isinstance(value, bool):
        raise _bad(endpoint, name, "True or False", value)
    return value


def _bad(endpoint: Endpoint, name: str, wanted: str, value: object) -> ConfigurationError:
    return ConfigurationError(
        f"Endpoint.options: {name} must be {wanted}, not {value!r:.40}", endpoint=endpoint.address
    )
