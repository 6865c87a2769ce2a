"""PURE: how a scripted WebSocket server treats its clients, apart from its answers: settings, checked, no I/O.

What real servers and the proxies before them do: HAProxy lets an upgrade wait (``when_full="wait"``), and gives up after
its queue's time-out (``full_wait_s``); Envoy never answers it (``"never"``); nginx says 503 or 429; uvicorn says 403
without a body; LiteLLM and others accept, send an error event, and close with 1008 (``"error"``); others close with 1011
or 1013.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self, get_args

import msgspec
from msgspec.structs import force_setattr

from spanwire.errors import ConfigurationError

__all__ = ["Rules", "WhenFull"]

WhenFull = Literal["wait", "503", "429", "403", "error", "1013", "1011", "never"]

_WHERE = "the WebSocket loopback server's option"


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """The options of the part: ``LoopbackServer(part="websocket", options={"max_clients": 1})``.

    Attributes:
        max_clients: upgraded connections at once. None: any number.
        when_full: what an upgrade beyond them gets. ``"wait"``: no answer until one of them is gone, first come, first
            served. ``"503"``, ``"429"``, ``"403"``: that status. ``"error"``: 101, an error event, close 1008.
            ``"1013"``, ``"1011"``: 101, and that close code. ``"never"``: no answer at all.
        full_wait_s: with ``"wait"``, seconds after which it gets 503. None: it waits for ever.
        retry_after: value of ``Retry-After`` in a refusal with 429 or 503.
        upgrades: the status of the first upgrade, of the second, ...; the last one again and again. 101: accepted, as
            far as the other rules allow.
        upgrade_s: seconds before an upgrade is answered.
        location: where a redirect points to: ``upgrades=[307, 101]``.
        api_key: the bearer key that an upgrade must have. None: anything goes.
        unauthorized: the status without it: 401 with a JSON body, or 403 with an empty one, as uvicorn's servers have it.
        subprotocols: of which a client must offer one; the first of these that it offers is chosen.
        compression: agree to permessage-deflate.
        max_size: bytes of a message; a larger one closes the connection with 1009. None: no limit.
        answers_pings: False: pings are never answered.
        ping_interval_s: seconds between pings of the server's own. None: it sends none.
        ping_timeout_s: without a pong for so long it closes with 1011. None: it does not care.
        idle_s: after so many seconds without a byte from either side, pings and pongs included, the connection is cut
            without a close frame, as proxies do (nginx's ``proxy_read_timeout``).
        max_age_s: life of a connection in seconds.
        max_turns: life of a connection in responses: the same end, without a clock.
        when_old: ``"error"``: the next turn after that gets the error event ``websocket_connection_limit_reached``, and
            then the connection is closed. ``"close"``: closed with 1001 as soon as no response is under way.
        lanes: responses with different ``stream_id`` interleave, and their events say it. False: it is ignored.
        max_active: responses that are made at once on a connection; more wait.
        max_lanes: distinct names of lanes on a connection.
        shows_queue: a script's ``queue_s`` is told by ``response.queued``. False: ``response.created`` comes after it.

    Raises:
        ConfigurationError: a value that cannot be meant; the message names the option.
    """

    max_clients: int | None = None
    when_full: WhenFull = "wait"
    full_wait_s: float | None = None
    retry_after: str | None = None
    upgrades: Sequence[int] = (101,)
    upgrade_s: float = 0.0
    location: str | None = None
    api_key: str | None = None
    unauthorized: Literal[401, 403] = 401
    subprotocols: Sequence[str] = ()
    compression: bool = False
    #: A prompt with pictures in it; the record keeps every message.
    max_size: int | None = 64 * 1024 * 1024
    answers_pings: bool = True
    ping_interval_s: float | None = None
    ping_timeout_s: float | None = None
    idle_s: float | None = None
    max_age_s: float | None = None
    max_turns: int | None = None
    when_old: Literal["error", "close"] = "error"
    lanes: bool = True
    #: 16 and 32: OpenAI's, as its SDK documents them (``openai/lib/responses_websocket/README.md``).
    max_active: int = 16
    max_lanes: int = 32
    shows_queue: bool = True

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """Raises ConfigurationError also for a name that is no option."""
        known = cls.__struct_fields__
        unknown = [name for name in options if name not in known]
        if unknown:
            raise ConfigurationError(
                f"the WebSocket loopback server has no option {unknown[0]!r}; it has: {', '.join(known)}"
            )
        return cls(**options)

    def __post_init__(self) -> None:
        for name in ("when_full", "retry_after"):  # numbers are meant as well, as the command's options have them
            if _is_count(getattr(self, name)):
                force_setattr(self, name, str(getattr(self, name)))
        for name in ("retry_after", "location", "api_key"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ConfigurationError(f"{_WHERE} {name} must be text, not {type(value).__name__}")
        if self.when_full not in get_args(WhenFull):
            raise _bad("when_full", f"one of {', '.join(get_args(WhenFull))}", self.when_full)
        if self.when_old not in {"error", "close"}:
            raise _bad("when_old", '"error" or "close"', self.when_old)
        if self.unauthorized not in {401, 403}:
            raise _bad("unauthorized", "401 or 403", self.unauthorized)
        for name in ("full_wait_s", "upgrade_s", "ping_interval_s", "ping_timeout_s", "idle_s", "max_age_s"):
            value = getattr(self, name)
            if value is not None and (not _is_number(value) or not 0 <= value < math.inf):
                raise _bad(name, "a number of seconds from 0", value)
        for name, least in (("max_clients", 0), ("max_turns", 0), ("max_active", 1), ("max_lanes", 0), ("max_size", 1)):
            value = getattr(self, name)
            if value is not None and (not _is_count(value) or value < least):
                raise _bad(name, f"a number from {least}", value)
        if isinstance(self.upgrades, (str, bytes)) or not self.upgrades:
            raise _bad("upgrades", "a list of statuses that is not empty", self.upgrades)
        for status in self.upgrades:
            if not _is_count(status) or (status != 101 and not 200 <= status <= 599):
                raise _bad("upgrades", "a list of statuses, 101 or 200 to 599", status)
        if any(300 <= status <= 399 for status in self.upgrades) and self.location is None:
            raise ConfigurationError(f"{_WHERE} upgrades has a redirect: location must say where it points to")
        force_setattr(self, "upgrades", tuple(self.upgrades))
        if isinstance(self.subprotocols, str) or not all(isinstance(name, str) and name for name in self.subprotocols):
            raise _bad("subprotocols", "a list of names", self.subprotocols)
        force_setattr(self, "subprotocols", tuple(self.subprotocols))

    def __repr__(self) -> str:  # without the key
        return f"Rules(max_clients={self.max_clients}, when_full={self.when_full!r})"


def _bad(name: str, must: str, value: object) -> ConfigurationError:
    return ConfigurationError(f"{_WHERE} {name} must be {must}, not {value!r:.40}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
