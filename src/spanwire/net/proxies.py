"""PURE: which proxy an endpoint's calls have to go through, from its setting and the environment, and in which way.

Follows what curl, requests and httpx agree on: ``HTTP_PROXY`` and ``HTTPS_PROXY`` by scheme (lower case first), then
``ALL_PROXY``; ``NO_PROXY`` is a comma list of host names (a domain covers its subdomains), addresses, networks in CIDR
form, each with an optional port, or ``*``. ``HTTP_PROXY`` in capitals is ignored in a CGI process, where a client's
``Proxy:`` header sets it (CVE-2016-5385).
"""

from __future__ import annotations

import base64
import ipaddress
import re
from collections.abc import Hashable, Mapping
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

import msgspec

from ..endpoint import Endpoint
from ..errors import ConfigurationError

__all__ = ["DIRECT", "Proxy", "Route", "parse_proxy", "proxy_for", "route_for"]

_SCHEMES = {"http": "http", "ws": "http", "grpc": "http", "https": "https", "wss": "https", "grpcs": "https"}
#: Ports where a proxy's URL names none. Source: IANA's names http, https and socks, as httpx and requests have it.
_PROXY_PORTS = {"http": 80, "https": 443, "socks4": 1080, "socks4a": 1080, "socks5": 1080, "socks5h": 1080}
_HAS_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*://")
_BAD = re.compile(r"[\x00-\x20\x7f]")
#: A user name and a password have one byte for their length. Source: RFC 1929 section 2.
_SOCKS_CREDENTIAL_BYTES = 255

Scheme = Literal["http", "https", "socks4", "socks4a", "socks5", "socks5h"]


class Proxy(msgspec.Struct, frozen=True):
    """A proxy, taken apart. Neither ``repr`` nor ``str`` show its user and password.

    Attributes:
        scheme: ``http`` or ``https`` (how *it* is spoken to), ``socks4`` and ``socks5`` (names are looked up here),
            ``socks4a`` and ``socks5h`` (names are looked up by the proxy).
        host, port: where it is; IPv6 addresses without brackets.
        user, password: percent-decoded, None where there are none.
        setting: what named it: a variable of the environment, or ``Endpoint.proxy``.
    """

    scheme: Scheme
    host: str
    port: int
    user: str | None = None
    password: str | None = None
    setting: str = "Endpoint.proxy"

    @property
    def socks(self) -> bool:
        """Whether it speaks SOCKS, and not HTTP."""
        return self.scheme.startswith("socks")

    @property
    def key(self) -> Hashable:
        """What makes two proxies the same to a connection: all but who named it."""
        return (self.scheme, self.host, self.port, self.user, self.password)

    @property
    def headers(self) -> Mapping[str, str]:
        """What an HTTP proxy wants to be told: the credentials, in the only form that they have in a URL."""
        if self.user is None:
            return {}
        pair = f"{self.user}:{self.password or ''}".encode()
        return {"proxy-authorization": f"Basic {base64.b64encode(pair).decode()}"}

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port} ({self.setting})"

    def __repr__(self) -> str:
        return f"Proxy({self})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """What rich shows instead of every field."""
        return [("url", str(self))]


class Route(msgspec.Struct, frozen=True):
    """The way to an endpoint, decided before anything is dialled.

    Attributes:
        how: ``direct``; ``tunnel``: the proxy moves bytes that it does not read, so the connection is as a direct one;
            ``forward``: the proxy reads each request and sends it on, so requests name the whole URL.
        proxy: None if direct.
    """

    how: Literal["direct", "tunnel", "forward"] = "direct"
    proxy: Proxy | None = None

    @property
    def key(self) -> Hashable:
        """What two endpoints must have in common, besides their own, to share a connection."""
        return None if self.proxy is None else (self.how, self.proxy.key)


DIRECT = Route()


def route_for(endpoint: Endpoint, environment: Mapping[str, str], *, forward: bool = False) -> Route:
    """The way to an endpoint.

    Args:
        forward: the caller can write requests for a proxy that forwards them. Then ``http://`` goes that way through
            an HTTP proxy: many refuse to tunnel to any port but 443.

    Raises:
        ConfigurationError: the setting is no proxy's URL.
    """
    proxy = proxy_for(endpoint, environment)
    if proxy is None:
        return DIRECT
    if forward and not proxy.socks and endpoint.origin.scheme == "http":
        return Route("forward", proxy)
    return Route("tunnel", proxy)


def proxy_for(endpoint: Endpoint, environment: Mapping[str, str]) -> Proxy | None:
    """The proxy of an endpoint; None to connect directly, as to every unix socket.

    Raises:
        ConfigurationError: the setting is no proxy's URL. Names the setting, never the password in it.
    """
    if endpoint.uds is not None or endpoint.proxy is None:
        return None
    if endpoint.proxy != "env":
        return parse_proxy(endpoint.proxy, "Endpoint.proxy")
    scheme = _SCHEMES.get(endpoint.origin.scheme)
    if scheme is None:
        return None
    names = [f"{scheme}_proxy", f"{scheme.upper()}_PROXY", "all_proxy", "ALL_PROXY"]
    if "REQUEST_METHOD" in environment and "HTTP_PROXY" in names:
        names.remove("HTTP_PROXY")
    for name in names:
        url = environment.get(name)
        if url:
            no_proxy = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
            excluded = _excluded(endpoint.origin.host, endpoint.origin.port, no_proxy)
            return None if excluded else parse_proxy(url, name)
    return None


def parse_proxy(url: str, setting: str) -> Proxy:
    """Take a proxy's URL apart. Without a scheme it is ``http``; a path is ignored, as everybody does.

    Raises:
        ConfigurationError: what is wrong, and with which setting. Nothing of the URL is shown that may be a secret.
    """
    example = 'such as "http://user:password@proxy.example:3128"'
    if _BAD.search(url.strip()):
        raise ConfigurationError(
            f"{setting} has a blank or a control character in it; percent-encode it", phase="proxy"
        )
    url = url.strip()
    try:
        parts = urlsplit(url if _HAS_SCHEME.match(url) else f"http://{url}")
        host, port = parts.hostname, parts.port
    except ValueError:  # its words repeat the URL
        raise ConfigurationError(
            f"{setting} cannot be read as a proxy's URL; write one {example}", phase="proxy"
        ) from None
    if "@" in f"{parts.path}{parts.query}{parts.fragment}":  # else a part of the password would pass for the host
        raise ConfigurationError(
            f"{setting} has an @ behind its host; percent-encode what is special in the password", phase="proxy"
        )
    scheme = parts.scheme.lower()
    if scheme not in _PROXY_PORTS:
        known = ", ".join(_PROXY_PORTS)
        raise ConfigurationError(f"{setting}: {scheme!r:.20} is no kind of proxy; known are {known}", phase="proxy")
    if not host:
        raise ConfigurationError(f"{setting} names no host; write one {example}", phase="proxy")
    if port == 0:
        raise ConfigurationError(f"{setting}: port 0 cannot be connected to", phase="proxy")
    user = unquote(parts.username) if parts.username else None
    password = unquote(parts.password) if parts.password else None
    if user is None and password is not None:
        user = ""
    _check_credentials(scheme, user, password, setting)
    return Proxy(scheme, host, port or _PROXY_PORTS[scheme], user, password, setting)  # type: ignore[arg-type]


def _check_credentials(scheme: str, user: str | None, password: str | None, setting: str) -> None:
    """What the protocol cannot carry, said here and not by a proxy that drops the connection."""
    if user is None:
        return
    wrong = None
    if scheme in ("http", "https"):
        if ":" in user:  # RFC 7617 section 2: the first colon ends it
            wrong = "the user name has a colon in it, which Basic authentication cannot carry"
    elif not (user + (password or "")).isascii():
        wrong = "SOCKS credentials have to be ASCII"
    elif scheme.startswith("socks4"):
        if password is not None:
            wrong = f"{scheme} knows user names but no passwords; use socks5"
        elif "\0" in user:
            wrong = "the user name has a NUL in it"
    elif not user or not password:
        wrong = f"{scheme} needs a user name and a password, or neither"
    elif max(len(user), len(password)) > _SOCKS_CREDENTIAL_BYTES:
        wrong = f"{scheme} carries at most {_SOCKS_CREDENTIAL_BYTES} bytes of a user name and of a password"
    if wrong is not None:
        raise ConfigurationError(f"{setting}: {wrong}", phase="proxy")


def _excluded(host: str, port: int, no_proxy: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        address = None
    for entry in no_proxy.replace(" ", ",").split(","):
        entry = entry.strip().lower()
        if not entry:
            continue
        if entry == "*":
            return True
        name, only_port = _split_port(entry)
        if only_port is not None and only_port != port:
            continue
        if address is not None:
            try:
                if address in ipaddress.ip_network(name.strip("[]"), strict=False):
                    return True
            except ValueError:
                continue
        else:
            name = name.lstrip("*").lstrip(".")
            if name and (host == name or host.endswith("." + name)):
                return True
    return False


def _split_port(entry: str) -> tuple[str, int | None]:
    if entry.count(":") == 1 or entry.startswith("["):
        name, colon, port = entry.rpartition(":")
        if colon and port.isascii() and port.isdigit():
            return name, int(port)
    return entry, None
