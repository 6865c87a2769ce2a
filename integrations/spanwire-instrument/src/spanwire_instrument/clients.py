"""Clients and transports of httpx and httpx2 that are ready to be handed to an SDK.

::

    openai.OpenAI(http_client=httpx2_client())  # openai 3, anthropic 2, pydantic-ai, openai-agents, mcp
    openai.AsyncOpenAI(http_client=httpx_async_client())  # openai 2, LlamaIndex, LiteLLM's aclient_session
    ChatOpenAI(model="m", **chat_openai())

They are clients of the library's own class, made by it from the arguments that it knows: proxies of the environment,
``verify``, ``cert``, ``http2``, ``limits``, ``mounts``, ``trust_env``, event hooks do what they do without us. Two
defaults are those of the SDKs' own clients and not the library's: ``limits`` (1000 connections, 100 of them idle) and
``follow_redirects=True``. Close them as any other, or leave that to the SDK.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from spanwire.errors import ConfigurationError
from spanwire.manager import ConnectionManager

from .httpx_family import make
from .recognise import Rules
from .watched import Settings

if TYPE_CHECKING:
    import httpx
    import httpx2

__all__ = [
    "chat_openai",
    "httpx2_async_client",
    "httpx2_async_transport",
    "httpx2_client",
    "httpx2_transport",
    "httpx_async_client",
    "httpx_async_transport",
    "httpx_client",
    "httpx_transport",
]

#: What moves the bytes of asynchronous clients.
Engine = Literal["wrap", "spanwire"]


def httpx_client(
    *, rules: Rules | None = None, manager: ConnectionManager | None = None, drain: bool = True, **kwargs: Any
) -> httpx.Client:
    """An ``httpx.Client`` whose inference requests are traced, and whose streams give their connection back.

    Args:
        rules: which requests are looked at, see :class:`Rules`.
        manager: whose telemetry, observers and tables are used; the process's default one if it is not given.
        drain: give connections back after streams.
        kwargs: everything that ``httpx.Client`` takes.

    Raises:
        ConfigurationError: httpx is not installed.
    """
    return _client("httpx", "Client", Settings(rules=rules, manager=manager, drain=drain), "wrap", kwargs)  # type: ignore[no-any-return]


def httpx2_client(
    *, rules: Rules | None = None, manager: ConnectionManager | None = None, drain: bool = True, **kwargs: Any
) -> httpx2.Client:
    """An ``httpx2.Client``; the rest as of :func:`httpx_client`."""
    return _client("httpx2", "Client", Settings(rules=rules, manager=manager, drain=drain), "wrap", kwargs)  # type: ignore[no-any-return]


def httpx_async_client(
    *,
    engine: Engine = "wrap",
    rules: Rules | None = None,
    manager: ConnectionManager | None = None,
    drain: bool = True,
    **kwargs: Any,
) -> httpx.AsyncClient:
    """An ``httpx.AsyncClient``; see :func:`httpx_client`.

    Args:
        engine: ``"wrap"``: the library's own connections. ``"spanwire"``: ours, which cost a fraction of the CPU, belong
            to the event loop on which they are used, and are shared with the manager's other clients. What they cannot
            do goes through the library's: an upload that is streamed, a proxy, a mount, HEAD and upgrades, other loops than
            asyncio's. HTTP/1.1 only. Of ``limits``, ``max_keepalive_connections`` has no effect.
        rules, manager, drain, kwargs: as there.
    """
    return _client("httpx", "AsyncClient", Settings(rules=rules, manager=manager, drain=drain), engine, kwargs)  # type: ignore[no-any-return]


def httpx2_async_client(
    *,
    engine: Engine = "wrap",
    rules: Rules | None = None,
    manager: ConnectionManager | None = None,
    drain: bool = True,
    **kwargs: Any,
) -> httpx2.AsyncClient:
    """An ``httpx2.AsyncClient``; the rest as of :func:`httpx_async_client`."""
    return _client("httpx2", "AsyncClient", Settings(rules=rules, manager=manager, drain=drain), engine, kwargs)  # type: ignore[no-any-return]


def httpx_transport(
    inner: Any = None,
    *,
    rules: Rules | None = None,
    manager: ConnectionManager | None = None,
    drain: bool = True,
    **kwargs: Any,
) -> httpx.BaseTransport:
    """The transport below :func:`httpx_client`, for a client that you make yourself: ``httpx.Client(transport=...)``.

    A client that is given a transport leaves proxies of the environment, ``verify``, ``cert``, ``http2`` and ``limits`` to
    it without a word: so give them here.

    Args:
        inner: a transport to stand around; without it what ``httpx.Client(**kwargs)`` would choose for each request.
        rules, manager, drain: see :func:`httpx_client`.
        kwargs: as of ``httpx.Client``: ``verify``, ``cert``, ``http2``, ``limits``, ``proxy``, ``trust_env``, ``mounts``.

    Raises:
        ConfigurationError: both ``inner`` and its settings are given; httpx is not installed.
    """
    settings = Settings(rules=rules, manager=manager, drain=drain)
    return _transport("httpx", settings, inner, kwargs, asynchronous=False)  # type: ignore[no-any-return]


def httpx2_transport(
    inner: Any = None,
    *,
    rules: Rules | None = None,
    manager: ConnectionManager | None = None,
    drain: bool = True,
    **kwargs: Any,
) -> httpx2.BaseTransport:
    """As :func:`httpx_transport`, for httpx2."""
    settings = Settings(rules=rules, manager=manager, drain=drain)
    return _transport("httpx2", settings, inner, kwargs, asynchronous=False)  # type: ignore[no-any-return]


def httpx_async_transport(
    inner: Any = None,
    *,
    engine: Engine = "wrap",
    rules: Rules | None = None,
    manager: ConnectionManager | None = None,
    drain: bool = True,
    **kwargs: Any,
) -> httpx.AsyncBaseTransport:
    """As :func:`httpx_transport`, for an ``httpx.AsyncClient``; ``engine`` as of :func:`httpx_async_client`."""
    settings = Settings(rules=rules, manager=manager, drain=drain)
    return _transport("httpx", settings, inner, kwargs, asynchronous=True, engine=engine)  # type: ignore[no-any-return]


def httpx2_async_transport(
    inner: Any = None,
    *,
    engine: Engine = "wrap",
    rules: Rules | None = None,
    manager: ConnectionManager | None = None,
    drain: bool = True,
    **kwargs: Any,
) -> httpx2.AsyncBaseTransport:
    """As :func:`httpx_async_transport`, for httpx2."""
    settings = Settings(rules=rules, manager=manager, drain=drain)
    return _transport("httpx2", settings, inner, kwargs, asynchronous=True, engine=engine)  # type: ignore[no-any-return]


def chat_openai(
    *,
    library: Literal["httpx", "httpx2"] | None = None,
    engine: Engine = "wrap",
    rules: Rules | None = None,
    manager: ConnectionManager | None = None,
    drain: bool = True,
    **kwargs: Any,
) -> dict[str, Any]:
    """Arguments for ``ChatOpenAI`` and its kin: ``ChatOpenAI(model="m", **chat_openai())``.

    Both clients, since a model that is given one makes the other by itself; and ``stream_usage``, which LangChain turns
    off for a model that is given any, so that no usage would come with streams.

    Args:
        library: which one the installed ``openai`` is made on; found out by default.
        engine, rules, manager, drain, kwargs: as of :func:`httpx_async_client`; ``kwargs`` go to both clients.

    Raises:
        ConfigurationError: the library is not installed.
    """
    name = library or _library_of_openai()
    settings = Settings(rules=rules, manager=manager, drain=drain)
    return {
        "http_client": _client(name, "Client", settings, "wrap", kwargs),
        "http_async_client": _client(name, "AsyncClient", settings, engine, kwargs),
        "stream_usage": True,
    }


# ------------------------------------------------------------------------------------------------------------------- inner


def _library(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigurationError(f"{name} is not installed: pip install {name}") from error


def _library_of_openai() -> str:
    """openai 3 is made on httpx2, and older ones on httpx."""
    from importlib import metadata

    try:
        major = int(metadata.version("openai").partition(".")[0])
    except (metadata.PackageNotFoundError, ValueError):
        major = 0
    return "httpx" if 0 < major < 3 else "httpx2"


def _client(name: str, kind: str, settings: Settings, engine: str, kwargs: dict[str, Any]) -> Any:
    hx = _library(name)
    kwargs = dict(kwargs)
    kwargs.setdefault("follow_redirects", True)
    kwargs.setdefault("limits", hx.Limits(max_connections=1000, max_keepalive_connections=100))
    client = getattr(hx, kind)(**kwargs)
    family = make(hx)
    around = family.Transport if kind == "Client" else family.AsyncTransport
    more = _engine(engine, hx, settings, kwargs)
    # The library has chosen them, by arguments and environment. Its own clients look them up in these two places, in every
    # release that is supported; a client that is given a transport would not look at the environment.
    client._transport = around(client._transport, settings, **more)
    client._mounts = {
        pattern: None if transport is None else around(transport, settings)
        for pattern, transport in client._mounts.items()
    }
    return client


def _transport(
    name: str, settings: Settings, inner: Any, kwargs: dict[str, Any], *, asynchronous: bool, engine: str = "wrap"
) -> Any:
    hx = _library(name)
    family = make(hx)
    around = family.AsyncTransport if asynchronous else family.Transport
    if inner is not None:
        if engine != "wrap":
            raise ConfigurationError(
                f"{name}_async_transport(inner): a transport that is given does it all; leave engine= out"
            )
        if kwargs:
            raise ConfigurationError(
                f"{name}_transport(): {', '.join(sorted(kwargs))} would have no effect on a transport that is given; "
                "set them on it"
            )
        method = "handle_async_request" if asynchronous else "handle_request"
        if not hasattr(inner, method):
            raise ConfigurationError(
                f"{name}_transport(inner) must be a transport with {method}(), not a {type(inner)}"
            )
    else:
        kwargs.setdefault("limits", hx.Limits(max_connections=1000, max_keepalive_connections=100))
        inner = (hx.AsyncClient if asynchronous else hx.Client)(**kwargs)
    return around(inner, settings, **_engine(engine, hx, settings, kwargs))


def _engine(engine: str, hx: ModuleType, settings: Settings, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The further arguments of an asynchronous transport."""
    if engine == "wrap":
        return {}
    if engine != "spanwire":
        raise ConfigurationError(f'engine must be "wrap" or "spanwire", not {engine!r:.40}')
    if kwargs.get("transport") is not None:
        raise ConfigurationError(
            'engine="spanwire" has connections of its own: leave transport= out, or use engine="wrap"'
        )
    if kwargs.get("http2"):
        raise ConfigurationError('engine="spanwire" speaks HTTP/1.1: leave http2= out, or use engine="wrap"')
    from .engine import Engine as OurEngine

    known = {name: kwargs[name] for name in ("verify", "cert", "trust_env", "limits") if name in kwargs}
    return {"engine": OurEngine(hx, settings, **known)}
