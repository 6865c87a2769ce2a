"""What a channel is made of: its target, its options, its credentials. Decided before anything is dialled."""

from __future__ import annotations

import ssl
from collections.abc import Hashable, Sequence
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from spanwire.endpoint import TLS, Endpoint
from spanwire.errors import ConfigurationError
from spanwire.net.dial import route_of
from spanwire.net.proxies import Proxy
from spanwire.net.tls import context_for

__all__ = ["MAX_REQUEST_BYTES", "MAX_STREAMS", "OPTIONS", "Settings", "open_channel", "settings_of"]

#: Names in ``Endpoint.options``.
#:
#: ``target``: what gRPC resolves instead of the URL's host, such as ``dns:///models:8001`` or
#: ``ipv4:10.0.0.1:8001,10.0.0.2:8001``. ``load_balancing``: ``"pick_first"`` (the default) or ``"round_robin"`` over all
#: addresses of the target. ``server_name``: the name that the server's certificate has to speak for, if that is not the
#: URL's host. ``max_streams``: calls at once on one connection. ``keepalive_s``: a ping after so many seconds without a
#: byte, while calls are under way; off by default, since servers close connections that ping more often than they like
#: (once in five minutes). ``max_request_bytes``: largest request. ``channel_options``: pairs for the channel itself.
OPTIONS = frozenset(
    {
        "channel_options",
        "keepalive_s",
        "load_balancing",
        "max_request_bytes",
        "max_streams",
        "server_name",
        "target",
    }
)
#: The library does not tell how many streams a server takes, and queues what is more. 100 is what most servers take by
#: default (RFC 9113 section 6.5.2 recommends no less).
MAX_STREAMS = 100
#: What the library takes at most, as its limits are signed 32-bit numbers.
MAX_REQUEST_BYTES = 2**31 - 1
_POLICIES = ("pick_first", "round_robin")
#: Options of the channel that are ours: the rest of spanwire depends on them.
_OURS = frozenset({"grpc.enable_retries", "grpc.max_receive_message_length", "grpc.use_local_subchannel_pool"})
#: How long the peer may take to answer a ping. Source: grpc ``doc/keepalive.md``, the default.
_PING_TIMEOUT_MS = 20_000

Option = tuple[str, int | str]


class Settings(NamedTuple):
    """Of one channel. Equal ones may share it."""

    target: str
    options: tuple[Option, ...]
    tls: TLS | None
    max_streams: int
    max_request_bytes: int

    def __repr__(self) -> str:  # a proxy's password may be among the options
        return f"Settings(target={self.target!r})"


def settings_of(endpoint: Endpoint) -> Settings:
    """What the endpoint asks for. Raises ConfigurationError for what cannot work."""
    if endpoint.path:
        raise ConfigurationError(
            f"gRPC knows no paths: remove {endpoint.path!r:.60} from the endpoint's URL", endpoint=endpoint.address
        )
    max_streams = _whole(endpoint, "max_streams", MAX_STREAMS, 1)
    max_request_bytes = _whole(endpoint, "max_request_bytes", MAX_REQUEST_BYTES, MAX_REQUEST_BYTES)
    receive = min(endpoint.limits.max_event_bytes, MAX_REQUEST_BYTES)
    options: list[Option] = [
        ("grpc.enable_retries", 0),  # the manager's business, where they are seen
        ("grpc.use_local_subchannel_pool", 1),  # else two channels may be one connection, and a handshake none
        ("grpc.max_receive_message_length", receive),
        ("grpc.max_send_message_length", max_request_bytes),
        ("grpc.primary_user_agent", _user_agent()),
        ("grpc.lb_policy_name", _policy(endpoint)),
    ]
    options += _proxy(endpoint)
    options += _keepalive(endpoint)
    server_name = _text(endpoint, "server_name")
    tls = None
    if endpoint.secure:
        tls = endpoint.tls
        _check_tls(endpoint)
        if server_name is not None:
            options.append(("grpc.ssl_target_name_override", server_name))
    elif server_name is not None:
        raise ConfigurationError(
            "Endpoint.options: server_name is a name in a certificate, and grpc:// has none: write grpcs://",
            endpoint=endpoint.address,
        )
    if endpoint.uds is not None:
        options.append(("grpc.default_authority", endpoint.origin.host))
    options += _given(endpoint)
    return Settings(_target(endpoint), tuple(options), tls, max_streams, max_request_bytes)


def open_channel(settings: Settings) -> Any:
    """A channel on the running loop. Nothing is dialled yet."""
    if settings.tls is None:
        return grpc.aio.insecure_channel(settings.target, options=settings.options)
    return grpc.aio.secure_channel(settings.target, _credentials(settings.tls), options=settings.options)


# --- options ------------------------------------------------------------------------------------------------------------


def _target(endpoint: Endpoint) -> str:
    target = _text(endpoint, "target")
    if endpoint.uds is not None:
        if target is not None:
            raise ConfigurationError(
                "Endpoint: uds and the option target exclude each other", endpoint=endpoint.address
            )
        return f"unix:{Path(endpoint.uds).absolute()}"
    if target is not None:
        return target
    host = f"[{endpoint.origin.host}]" if ":" in endpoint.origin.host else endpoint.origin.host
    return f"dns:///{host}:{endpoint.origin.port}"


def _policy(endpoint: Endpoint) -> str:
    policy = endpoint.options.get("load_balancing", "pick_first")
    if policy not in _POLICIES:
        raise ConfigurationError(
            f"Endpoint.options: load_balancing must be one of {', '.join(_POLICIES)}, not {policy!r:.40}",
            endpoint=endpoint.address,
        )
    return str(policy)


def _proxy(endpoint: Endpoint) -> list[Option]:
    """The library reads the environment by itself, in a way of its own: it is told what ours says."""
    proxy = route_of(endpoint).proxy
    if proxy is None:
        return [("grpc.enable_http_proxy", 0)]
    if proxy.scheme != "http":
        raise ConfigurationError(
            f"gRPC goes through HTTP proxies alone, not through {proxy}; set Endpoint(proxy=None) to go without",
            endpoint=endpoint.address,
        )
    return [("grpc.enable_http_proxy", 1), ("grpc.http_proxy", _proxy_url(proxy))]


def _proxy_url(proxy: Proxy) -> str:
    from urllib.parse import quote

    host = f"[{proxy.host}]" if ":" in proxy.host else proxy.host
    user = "" if proxy.user is None else f"{quote(proxy.user, safe='')}:{quote(proxy.password or '', safe='')}@"
    return f"http://{user}{host}:{proxy.port}"


def _keepalive(endpoint: Endpoint) -> list[Option]:
    every_s = endpoint.options.get("keepalive_s")
    if every_s is None:
        return []
    if isinstance(every_s, bool) or not isinstance(every_s, (int, float)) or not 1 <= every_s < 86_400:
        raise ConfigurationError(
            f"Endpoint.options: keepalive_s must be a number of seconds from 1, or None, not {every_s!r:.40}",
            endpoint=endpoint.address,
        )
    return [("grpc.keepalive_time_ms", int(every_s * 1000)), ("grpc.keepalive_timeout_ms", _PING_TIMEOUT_MS)]


def _given(endpoint: Endpoint) -> list[Option]:
    given = endpoint.options.get("channel_options", ())
    pairs: list[Option] = []
    if isinstance(given, Sequence) and not isinstance(given, str):
        pairs = [tuple(pair) for pair in given if isinstance(pair, Sequence) and len(pair) == 2]
    if not isinstance(given, Sequence) or len(pairs) != len(given) or not all(_fits(pair) for pair in pairs):
        raise ConfigurationError(
            "Endpoint.options: channel_options must be pairs of a name and a number or a text, as grpc.aio takes them",
            endpoint=endpoint.address,
        )
    for name, _ in pairs:
        if name in _OURS:
            raise ConfigurationError(
                f"Endpoint.options: channel_options may not set {name!r}, which spanwire depends on; the limit on messages "
                "is Limits.max_event_bytes, retries are Endpoint.retries",
                endpoint=endpoint.address,
            )
    return pairs


def _fits(pair: Sequence[Any]) -> bool:
    return isinstance(pair[0], str) and isinstance(pair[1], (int, str))


def _text(endpoint: Endpoint, name: str) -> str | None:
    value = endpoint.options.get(name)
    if value is not None and (not isinstance(value, str) or not value):
        raise ConfigurationError(f"Endpoint.options: {name} must be text, not {value!r:.40}", endpoint=endpoint.address)
    return value


def _whole(endpoint: Endpoint, name: str, default: int, most: int) -> int:
    value = endpoint.options.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1 or (name != "max_streams" and value > most):
        raise ConfigurationError(
            f"Endpoint.options: {name} must be a whole number from 1, not {value!r:.40}", endpoint=endpoint.address
        )
    return value


@lru_cache(maxsize=1)
def _user_agent() -> str:
    try:
        return f"spanwire/{metadata.version('spanwire-grpc')}"
    except metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return "spanwire"


# --- TLS ----------------------------------------------------------------------------------------------------------------


def _check_tls(endpoint: Endpoint) -> None:
    if not endpoint.tls.verify:
        raise ConfigurationError(
            "gRPC cannot leave the server unverified: give its certificate, or its CA's, as TLS(ca=...), and the name in "
            "it as options={'server_name': ...}",
            endpoint=endpoint.address,
        )
    context_for(endpoint.tls, alpn=("h2",))  # refuses bad files here: the library would tell of them in a handshake


def key_of(tls: TLS | None) -> Hashable:
    """What two channels must have in common: the files as they are now, since certificates are renewed in place."""
    return None if tls is None else (tls, hash(_roots(tls)), *map(hash, _identity(tls)))


def _credentials(tls: TLS) -> Any:
    key, chain = _identity(tls)
    return grpc.ssl_channel_credentials(root_certificates=_roots(tls), private_key=key, certificate_chain=chain)


def _identity(tls: TLS) -> tuple[bytes | None, bytes | None]:
    """Private key and certificate chain."""
    if tls.cert is None:
        return None, None
    paths = (tls.cert,) if isinstance(tls.cert, str) else tls.cert
    return Path(paths[-1]).read_bytes(), Path(paths[0]).read_bytes()


def _roots(tls: TLS) -> bytes | None:
    """Certificates to trust, as PEM; None: those that the library brings along."""
    ca = tls.ca
    if ca is None:
        return _system_roots()
    if "-----BEGIN" in ca:
        return ca.encode()
    path = Path(ca)
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.is_file())
        return b"\n".join(raw for file in files if b"-----BEGIN CERTIFICATE" in (raw := file.read_bytes()))
    return path.read_bytes()


@lru_cache(maxsize=1)
def _system_roots() -> bytes | None:
    """What Python trusts, where that can be read: on macOS and Windows it cannot."""
    found = context_for(TLS(), alpn=("h2",))
    try:
        ders = found.get_ca_certs(binary_form=True)
    except NotImplementedError:
        return None
    return "".join(map(ssl.DER_cert_to_PEM_cert, ders)).encode() or None
