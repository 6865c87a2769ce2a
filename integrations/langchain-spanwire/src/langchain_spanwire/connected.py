"""The fields that both models share: where to, with which key, under which limits, over whose connections."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Self, cast

import msgspec
from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    field_validator,
    model_validator,
)

import spanwire
from spanwire.errors import ConfigurationError

from .names import check_names, known_names, mapping_of

__all__ = ["Connected", "timeouts_of"]

#: The only host that gets the key of OPENAI_API_KEY: any other server would learn a secret that is not meant for it.
_OPENAI = "api.openai.com"


def timeouts_of(timeout: Any, where: str) -> spanwire.Timeouts | None:
    """Limits from a number of seconds: the longest silence, before the first content and after it, and to connect.

    Raises:
        ConfigurationError: neither a number nor ``spanwire.Timeouts``.
    """
    if timeout is None or isinstance(timeout, spanwire.Timeouts):
        return timeout
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise ConfigurationError(
            f"{where}(timeout=...) must be a number of seconds or spanwire.Timeouts(...), not {type(timeout).__name__}"
        )
    connect_s = spanwire.Timeouts().connect_s
    return spanwire.Timeouts(
        connect_s=timeout if connect_s is None else min(timeout, connect_s), first_content_s=timeout, idle_s=timeout
    )


class Connected(BaseModel):
    """Base of the two models."""

    model_config = ConfigDict(arbitrary_types_allowed=True, populate_by_name=True, protected_namespaces=())

    endpoint: str | spanwire.Endpoint = Field(validation_alias=AliasChoices("endpoint", "base_url"))
    """The server: its base URL, or ``spanwire.Endpoint(...)`` for TLS, proxies, limits. Also ``base_url``."""

    api_key: SecretStr | str | Callable[[], str | Awaitable[str]] | None = None  # a text becomes a SecretStr
    """The key, or a function that gives it (sync or async), asked for each call. Left out: the endpoint's own, then
    SPANWIRE_API_KEY; OPENAI_API_KEY is sent to api.openai.com alone."""

    transport: str | None = None
    """The transport's name, where the URL's scheme does not say it."""

    dialect: str | None = None
    """The server's message schema; None takes the transport's default."""

    timeout: float | spanwire.Timeouts | None = None
    """Seconds without a sign of life, or ``spanwire.Timeouts(...)``; None leaves the endpoint's."""

    max_retries: int | None = Field(default=None, ge=0)
    """How often a call is sent again before its first content: n + 1 attempts in all. None leaves the endpoint's."""

    default_headers: Mapping[str, str] | None = Field(default=None, repr=False)
    """Sent with every call."""

    default_query: Mapping[str, str] | None = Field(default=None, repr=False)
    """Added to the URL of every call."""

    manager: spanwire.ConnectionManager | spanwire.SyncConnectionManager | None = Field(
        default=None, exclude=True, repr=False
    )
    """Whose connections to use. By default the process's: every model shares them."""

    # What the fields above come to, and the fields it was made from, compared by identity: neither is bound to a loop.
    _made: tuple[tuple[Any, ...], spanwire.Endpoint] | None = PrivateAttr(default=None)
    _facade: spanwire.SyncConnectionManager | None = PrivateAttr(default=None)

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, values: Any) -> Any:
        given = mapping_of(values)
        if given is None:
            return values
        if given.get("n", ...) in (None, 1) and "n" not in cls.model_fields:
            del given["n"]  # what servers do by themselves
        check_names(cls.__name__, given, known_names(cls))
        if "endpoint" not in given and "base_url" not in given:
            raise ConfigurationError(
                f'{cls.__name__} needs the server\'s address: endpoint="http://127.0.0.1:8000/v1", or spanwire.Endpoint(...)'
            )
        return given

    @field_validator("endpoint", mode="before")
    @classmethod
    def _as_endpoint(cls, value: Any) -> Any:
        # Here, and not when it is first used: an address is checked where it was written, and one with a key in its
        # query never reaches a repr.
        return spanwire.Endpoint(value) if isinstance(value, str) else value

    @field_validator("api_key", mode="before")
    @classmethod
    def _as_secret(cls, value: Any) -> Any:
        return SecretStr(value) if isinstance(value, str) else value

    @field_validator("timeout", mode="before")
    @classmethod
    def _check_timeout(cls, value: Any) -> Any:
        timeouts_of(value, cls.__name__)
        return value

    @model_validator(mode="after")
    def _find_key(self) -> Self:
        endpoint = cast(spanwire.Endpoint, self.endpoint)
        if self.api_key is None and endpoint.api_key is None:
            key = os.environ.get("SPANWIRE_API_KEY")
            if not key and endpoint.origin.host == _OPENAI:
                key = os.environ.get("OPENAI_API_KEY")
            if key:
                self.api_key = SecretStr(key)
        self.endpoint_now()  # a bad header or key is told here too
        return self

    @property
    def lc_secrets(self) -> dict[str, str]:
        """Names of secrets, and where they come from."""
        return {"api_key": "SPANWIRE_API_KEY"}

    def endpoint_now(self) -> spanwire.Endpoint:
        """The endpoint, with what the other fields say."""
        given = (
            self.endpoint,
            self.api_key,
            self.transport,
            self.dialect,
            self.timeout,
            self.max_retries,
            self.default_headers,
            self.default_query,
        )
        made = self._made
        if made is not None and all(map(_same, made[0], given)):
            return made[1]
        endpoint = spanwire.Endpoint(self.endpoint) if isinstance(self.endpoint, str) else self.endpoint
        changes: dict[str, Any] = {}
        if self.api_key is not None:
            changes["api_key"] = (
                self.api_key.get_secret_value() if isinstance(self.api_key, SecretStr) else self.api_key
            )
        if self.transport is not None:
            changes["transport"] = self.transport
        if self.dialect is not None:
            changes["dialect"] = self.dialect
        timeouts = timeouts_of(self.timeout, type(self).__name__)
        if timeouts is not None:
            changes["timeouts"] = timeouts
        if self.max_retries is not None:
            changes["retries"] = msgspec.structs.replace(endpoint.retries, max_attempts=self.max_retries + 1)
        for name, more, old in (
            ("headers", self.default_headers, endpoint.headers),
            ("query", self.default_query, endpoint.query),
        ):
            if more:
                changes[name] = {**old, **more}
        if changes:
            endpoint = msgspec.structs.replace(endpoint, **changes)
        self._made = (given, endpoint)
        return endpoint

    def async_manager(self) -> spanwire.ConnectionManager:
        """Whose connections async code uses."""
        manager = self.manager
        if manager is None:
            return spanwire.default_manager()
        return manager.manager if isinstance(manager, spanwire.SyncConnectionManager) else manager

    def sync_manager(self) -> spanwire.SyncConnectionManager:
        """Whose connections synchronous code uses."""
        manager = self.manager
        if manager is None:
            return spanwire.default_sync_manager()
        if isinstance(manager, spanwire.SyncConnectionManager):
            return manager
        if self._facade is None or self._facade.manager is not manager:
            self._facade = spanwire.SyncConnectionManager(manager)
        return self._facade

    # Copies share the manager; another process cannot.

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        memo = {} if memo is None else memo
        for shared in (self.manager, self._facade, self._made):
            if shared is not None:
                memo[id(shared)] = shared
        return super().__deepcopy__(memo)

    def __getstate__(self) -> dict[Any, Any]:
        if self.manager is not None:
            raise ConfigurationError(
                f"{type(self).__name__}(manager=...) cannot be pickled: connections don't cross processes; leave manager "
                "out, and each process uses its own default one"
            )
        self.endpoint_now().__reduce__()  # says what of it cannot be pickled: a key's function, a client
        state = dict(super().__getstate__())
        state["__pydantic_private__"] = {**(state.get("__pydantic_private__") or {}), "_made": None, "_facade": None}
        return state


def _same(one: Any, other: Any) -> bool:
    return one is other
