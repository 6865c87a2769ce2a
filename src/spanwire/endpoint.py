"""Where a call goes and under which rules: frozen structs that validate themselves, no I/O.

Connection identity is not policy: :meth:`Endpoint.connection_key` holds only what decides whether two endpoints may
share a connection. Keys, headers, timeouts, retries and limits are no part of it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Callable, Hashable, Mapping
from functools import cached_property
from typing import Any, Literal, NamedTuple, Self
from urllib.parse import parse_qsl, quote, quote_plus, urlsplit

import msgspec
from msgspec.structs import force_setattr

from .errors import ConfigurationError, ServerError, SpanwireError, visible

__all__ = [
    "TLS",
    "ApiKey",
    "Endpoint",
    "Limits",
    "Origin",
    "Retries",
    "Timeouts",
    "check_headers",
    "hide_secrets",
    "without_secrets",
]

#: A key, or something that gives one: called once for each attempt, may be async (tokens that expire).
ApiKey = str | Callable[[], str | Awaitable[str]]

#: Ports of the schemes that have a default one. Source: IANA service names; RFC 6455 for ws and wss.
_DEFAULT_PORTS = {"http": 80, "https": 443, "ws": 80, "wss": 443, "grpc": 80, "grpcs": 443}
_SECURE = frozenset({"https", "wss", "grpcs"})
#: RFC 9110 section 5.6.2 (token) and 5.5 (field values: no CR, LF, NUL).
_HEADER_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_BAD_VALUE = re.compile(r"[\r\n\0]")
#: Headers and parameters of a query whose values are nobody's to see; a shorter value would be found in any text.
_SECRET = re.compile(r"auth|key|token|secret|sig|pass|cookie|credential", re.IGNORECASE)
_SECRET_CHARACTERS = 6
#: Causes of an error that are looked at. Real ones have some three.
_LONGEST_CHAIN = 16
_BAD_URL = re.compile(r"[\x00-\x20\x7f]")


def check_headers(headers: Mapping[str, str], where: str) -> None:
    """Refuse names and values that would let a header smuggle in another one.

    Raises:
        ConfigurationError: names the header, never its value.
    """
    if not isinstance(headers, Mapping):
        raise ConfigurationError(f"{where} must be a mapping of names to text, not {type(headers).__name__}")
    for name, value in headers.items():
        if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name):
            raise ConfigurationError(f"{where}: {name!r:.60} is not a header name (RFC 9110: letters, digits and -_.)")
        if not isinstance(value, str):
            raise ConfigurationError(f"{where}: the value of header {name!r} must be text, not {type(value).__name__}")
        if _BAD_VALUE.search(value):
            raise ConfigurationError(f"{where}: the value of header {name!r} has a line break or NUL in it")


def _check_seconds(
    owner: str, values: Mapping[str, float | None], *, zero_is_fine: bool = False, none_is_fine: bool = True
) -> None:
    for name, value in values.items():
        if value is None and none_is_fine:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
            kind = "a number of seconds or None" if none_is_fine else "a number of seconds"
            raise ConfigurationError(f"{owner}({name}=...) must be {kind}, not {value!r:.40}")
        if value < 0 or (value == 0 and not zero_is_fine):
            raise ConfigurationError(f"{owner}({name}={value}) must be more than 0; None means no limit")


class TLS(msgspec.Struct, frozen=True):
    """How the server is verified and how we identify ourselves.

    Attributes:
        verify: check the server's certificate and name. False is for tests: anybody can read the call.
        ca: a file or folder of CA certificates to trust instead of the system's, or the PEM text itself.
        cert: a client certificate: a PEM file with certificate and key, or (certificate file, key file).

    Raises:
        ConfigurationError: a field of another type. Nothing but ``verify=False`` turns verification off.
    """

    verify: bool = True
    ca: str | None = None
    cert: str | tuple[str, str] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.verify, bool):
            raise ConfigurationError(
                f"TLS(verify=...) must be True or False, not {_shown(self.verify)}; a file of CA certificates is TLS(ca=...)"
            )
        if self.ca is not None and not (isinstance(self.ca, str) and self.ca):
            raise ConfigurationError(f"TLS(ca=...) must be a path or PEM text, not {_shown(self.ca)}")
        cert = self.cert
        pair = (cert,) if isinstance(cert, str) else cert
        if cert is not None and not (
            isinstance(pair, tuple) and len(pair) in (1, 2) and all(isinstance(part, str) and part for part in pair)
        ):
            raise ConfigurationError(
                f"TLS(cert=...) must be a PEM file's path, or (certificate file, key file), not {_shown(cert)}"
            )


def without_secrets(text: str, endpoint: Endpoint, api_key: str | None, headers: Mapping[str, str]) -> str:
    """A server's words without the key, and the values of headers and query that are named like one: servers repeat what
    they refuse, and the whole target of a path that they do not have.

    Args:
        headers: of the call.
    """
    found = {api_key} if api_key else set()
    for name, value in (*endpoint.headers.items(), *headers.items(), *endpoint.query.items()):
        if _SECRET.search(name) and len(value) >= _SECRET_CHARACTERS:
            found |= {value, quote(value), quote_plus(value)}
            found.add(value.rpartition(" ")[2])  # without "Bearer"
    for secret in sorted(filter(None, found), key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


def hide_secrets(error: SpanwireError, endpoint: Endpoint, api_key: str | None, headers: Mapping[str, str]) -> None:
    """Take what is secret out of all that an error shows, also where a traceback shows it: wire libraries put a server's words
    into their own errors. The rest of a chain of causes is left out from the first one on that has a secret in it.

    Args:
        headers: of the call.
    """

    def clean(text: str) -> str:
        return without_secrets(text, endpoint, api_key, headers)

    error.message = clean(error.message)
    error.args = (error.message,)  # other people's reporters read these
    if isinstance(error, ServerError):
        if isinstance(error.code, str):
            error.code = clean(error.code)
        error.headers = {name: clean(str(value)) for name, value in error.headers.items()}
    above: BaseException = error
    for _ in range(_LONGEST_CHAIN):
        below = above.__cause__ or above.__context__
        if below is None:
            return
        try:
            words = f"{below} {below!r}"
        except Exception:  # noqa: BLE001 - somebody else's class; a traceback would fail the same way
            break
        if visible(clean(words)) != words:
            break
        above = below
    else:
        below = above
    above.__cause__ = above.__context__ = None
    above.add_note(f"Its cause is left out, a {type(below).__name__}: it repeats what is not to be shown.")


def _shown(value: object) -> str:
    """What was given, without what may be a secret."""
    return (
        repr(value)
        if value is None or isinstance(value, (bool, int, float)) or value == ""
        else f"a {type(value).__name__}"
    )


def _shown_text(value: object) -> str:
    return repr(value)[:40] if isinstance(value, str) else _shown(value)


class Limits(msgspec.Struct, frozen=True):
    """Local limits, for each endpoint and process. None means no limit.

    Attributes:
        max_concurrent: calls at once.
        max_queue: calls that may wait for a slot; one more is refused with ``QueueFull``.
        queue_timeout_s: longest wait for a slot, or for room on a server that is full, in seconds; then ``QueueTimeout``.
        max_event_bytes: largest single event, or unary answer, in bytes.
        max_connection_age_s: a connection older than this is not used again, in seconds.
        max_idle_s: a connection idle for longer than this is closed, in seconds. The default stays below the 60 s and
            75 s after which common proxies (AWS load balancers, nginx) close.
    """

    max_concurrent: int | None = None
    max_queue: int | None = None
    queue_timeout_s: float | None = None
    max_event_bytes: int = 64 * 1024 * 1024
    max_connection_age_s: float | None = None
    max_idle_s: float | None = 55.0

    def __post_init__(self) -> None:
        for name, value, least in (
            ("max_concurrent", self.max_concurrent, 1),
            ("max_queue", self.max_queue, 0),
            ("max_event_bytes", self.max_event_bytes, 1),
        ):
            if value is None and name != "max_event_bytes":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                or_none = "" if name == "max_event_bytes" else ", or None"
                raise ConfigurationError(
                    f"Limits({name}={value!r:.40}) must be a whole number of at least {least}{or_none}"
                )
        _check_seconds("Limits", {"queue_timeout_s": self.queue_timeout_s}, zero_is_fine=True)
        _check_seconds("Limits", {"max_connection_age_s": self.max_connection_age_s, "max_idle_s": self.max_idle_s})


class Timeouts(msgspec.Struct, frozen=True):
    """How long to wait, in seconds. None means no limit. The wait for a local slot is not in them (``Limits``).

    Attributes:
        connect_s: for a connection: DNS, TCP, TLS.
        first_content_s: from the request until the first text, reasoning or tool call; heartbeats do not count.
        idle_s: between two bytes of the answer; any byte resets it.
        total_s: for the whole call, with its retries.
    """

    connect_s: float | None = 10.0
    first_content_s: float | None = 600.0
    idle_s: float | None = 120.0
    total_s: float | None = None

    def __post_init__(self) -> None:
        _check_seconds("Timeouts", msgspec.structs.asdict(self))


class Retries(msgspec.Struct, frozen=True):
    """When a call is sent again: only before its first content was delivered, only where it can help.

    Attributes:
        max_attempts: in all, with the first one. 1 turns retries off.
        base_s: the back-off before attempt n+1 is random between 0 and ``base_s * 2 ** (n - 1)`` seconds.
        max_wait_s: longest wait before one attempt, in seconds. A server that asks for more (``Retry-After``) gets
            its error raised at once, with ``retry_after_s`` on it.
        stale: send a call once more, at once and on a new connection, when a connection that was used before breaks
            before any byte of the answer: nearly always the server had closed it while it was idle. Not counted in
            ``max_attempts``; every call carries an ``Idempotency-Key`` for the server that did see it.
    """

    max_attempts: int = 3
    base_s: float = 0.5
    max_wait_s: float = 8.0
    stale: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.max_attempts, bool) or not isinstance(self.max_attempts, int) or self.max_attempts < 1:
            raise ConfigurationError(
                f"Retries(max_attempts={self.max_attempts!r:.40}) counts the first attempt too: at least 1"
            )
        waits = {"base_s": self.base_s, "max_wait_s": self.max_wait_s}
        _check_seconds("Retries", waits, zero_is_fine=True, none_is_fine=False)


class Origin(NamedTuple):
    """Scheme, host and port of an endpoint; what a certificate speaks for."""

    scheme: str
    host: str
    port: int


class Endpoint(msgspec.Struct, frozen=True, dict=True):
    """A server, and how to talk to it.

    Attributes:
        url: base URL, such as ``http://127.0.0.1:8000/v1``; its scheme chooses the transport. A query in it is moved
            to ``query``.
        api_key: the key, or a function that gives it (sync or async), called once for each attempt.
        headers: sent with every call.
        query: added to the URL of every call.
        tls: see :class:`TLS`.
        proxy: ``"env"`` (HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, NO_PROXY; read when the endpoint is first used), a proxy's
            URL (``http``, ``https``, ``socks4``, ``socks4a``, ``socks5``, ``socks5h``), or None for none. An ``https``
            proxy is always verified, by the system's certificates and ``TLS.ca``, and gets no client certificate.
        uds: path of a unix socket to connect to instead of the URL's host and port.
        transport: the transport's name, where the scheme does not say it.
        dialect: the server's message schema; None takes the transport's default.
        timeouts, limits, retries: defaults of every call to this endpoint.
        server_timing: what the server says of its own time. ``"listen"``: read it where it is. ``"ask"``: also send what
            makes servers say it; a server that refuses such fields gets the call once more without them. ``"off"``: do
            not read it.
        options: what only one transport or dialect understands; unknown names are refused.

    Endpoints can be pickled, and a pickle has the key in it. Copies, deep ones too, share a function that gives the key, and
    a client in ``options``.

    Raises:
        ConfigurationError: says which field, what is wrong with it, and what to do.
    """

    url: str
    api_key: ApiKey | None = None
    headers: Mapping[str, str] = {}
    query: Mapping[str, str] = {}
    tls: TLS = TLS()
    proxy: str | None = "env"
    uds: str | None = None
    transport: str | None = None
    dialect: str | None = None
    timeouts: Timeouts = Timeouts()
    limits: Limits = Limits()
    retries: Retries = Retries()
    server_timing: Literal["ask", "listen", "off"] = "listen"
    options: Mapping[str, Any] = {}

    def __post_init__(self) -> None:
        url, query, origin, path = _parse(self.url)
        force_setattr(self, "url", url)
        for name in ("query", "options"):
            if not isinstance(getattr(self, name), Mapping):
                raise ConfigurationError(f"Endpoint.{name} must be a mapping, not {type(getattr(self, name)).__name__}")
        for name, value in self.query.items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise ConfigurationError(f"Endpoint.query must be a mapping of text to text; look at {name!r:.40}")
        if query:
            force_setattr(self, "query", {**query, **self.query})
        check_headers(self.headers, "Endpoint.headers")
        if isinstance(self.api_key, str):
            check_headers({"authorization": self.api_key}, "Endpoint.api_key")
        elif self.api_key is not None and not callable(self.api_key):
            raise ConfigurationError(
                f"Endpoint.api_key must be text or a function that gives it, not {type(self.api_key).__name__}"
            )
        for name in ("proxy", "uds", "transport", "dialect"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ConfigurationError(f"Endpoint.{name} must be text or None, not {_shown(value)}")
        for name, kind in (("tls", TLS), ("timeouts", Timeouts), ("limits", Limits), ("retries", Retries)):
            if not isinstance(getattr(self, name), kind):
                raise ConfigurationError(
                    f"Endpoint.{name} must be spanwire.{kind.__name__}(...), not {type(getattr(self, name)).__name__}"
                )
        if self.server_timing not in ("ask", "listen", "off"):
            raise ConfigurationError(
                f'Endpoint.server_timing must be "ask", "listen" or "off", not {_shown_text(self.server_timing)}'
            )
        self.__dict__["origin"] = origin
        self.__dict__["path"] = path

    @cached_property
    def origin(self) -> Origin:
        """Scheme, host and port."""
        return _parse(self.url)[2]

    @cached_property
    def path(self) -> str:
        """The base URL's path without a slash at its end, ``""`` for none."""
        return _parse(self.url)[3]

    @property
    def secure(self) -> bool:
        """Whether the scheme asks for TLS."""
        return self.origin.scheme in _SECURE

    @cached_property
    def address(self) -> str:
        """Host and port as people write them, or ``unix:PATH``: for errors, spans and timelines."""
        if self.uds is not None:
            return f"unix:{self.uds}"
        host = f"[{self.origin.host}]" if ":" in self.origin.host else self.origin.host
        return f"{host}:{self.origin.port}" if self.origin.port else host

    def connection_key(self) -> Hashable:
        """What two endpoints must have in common to share a connection. Never keys, headers or policy."""
        return self._connection_key

    @cached_property
    def _connection_key(self) -> Hashable:
        client = self.options.get("http_client")
        return (self.origin, self.tls, self.proxy, self.uds, None if client is None else id(client))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return msgspec.structs.replace(
            self, headers=dict(self.headers), query=dict(self.query), options=dict(self.options)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        if callable(self.api_key):
            _check_pickle(self.api_key, "Endpoint.api_key", "define the function at the top of a module")
        for name, value in self.options.items():
            _check_pickle(value, f"Endpoint.options[{name!r}]", "leave it out, and make it in the process that uses it")
        return _unpickle, (type(self), msgspec.structs.asdict(self))

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """What rich shows instead of every field, which is what msgspec would give it."""
        return [("url", f"{self.origin.scheme}://{self.address}{self.path}"), ("api_key", self.api_key and "<set>")]

    def __repr__(self) -> str:
        scheme = self.origin.scheme
        key = "" if self.api_key is None else ", api_key=<set>"
        headers = f", headers=<{', '.join(sorted(self.headers))}>" if self.headers else ""
        query = f", query=<{', '.join(sorted(self.query))}>" if self.query else ""
        return f"Endpoint({f'{scheme}://{self.address}{self.path}'!r}{key}{headers}{query})"


def _unpickle(kind: type[Endpoint], fields: dict[str, Any]) -> Endpoint:
    return kind(**fields)


def _check_pickle(value: object, what: str, then: str) -> None:
    import pickle  # only who pickles needs it

    try:
        pickle.dumps(value)
    except Exception as error:  # PicklingError, AttributeError, TypeError: by what it is, and by the version of Python
        raise ConfigurationError(f"{what} cannot be pickled, it is a {type(value).__name__}: {then}") from error


def _parse(url: str) -> tuple[str, dict[str, str], Origin, str]:
    example = 'such as "http://127.0.0.1:8000/v1"'
    if not isinstance(url, str):
        raise ConfigurationError(f"Endpoint.url must be text {example}, not {type(url).__name__}")
    if _BAD_URL.search(url):
        raise ConfigurationError("Endpoint.url has a space or a control character in it; percent-encode it")
    # What is wrong is said without the URL where it may hold a password; urlsplit's own words repeat it too.
    shown = "" if "@" in url else f" {url.split('?', maxsplit=1)[0]!r:.80}"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        words = "" if "@" in url else f": {error}"
        raise ConfigurationError(f"Endpoint.url{shown} cannot be read{words}; write one {example}") from None
    scheme = parts.scheme.lower()
    if not scheme or not parts.netloc:
        raise ConfigurationError(f"Endpoint.url{shown} has no scheme and host; write one {example}")
    if parts.username is not None or parts.password is not None:
        raise ConfigurationError("Endpoint.url has a user name or password in it; use api_key= or headers= instead")
    if parts.fragment:
        raise ConfigurationError("Endpoint.url has a #fragment, which is never sent to a server; remove it")
    if not parts.hostname:
        raise ConfigurationError(f"Endpoint.url{shown} has no host; write one {example}")
    if port is None:
        port = _DEFAULT_PORTS.get(scheme, 0)  # 0: a third party's scheme, whose transport knows what that means
    path = parts.path.rstrip("/")
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    return f"{scheme}://{parts.netloc.lower()}{path}", query, Origin(scheme, parts.hostname, port), path
