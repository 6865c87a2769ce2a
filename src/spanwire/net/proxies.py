"""PURE: which proxy an endpoint's calls have to go through, from its setting and the environment.

Follows what curl, requests and httpx agree on: ``HTTP_PROXY`` and ``HTTPS_PROXY`` by scheme (lower case first), then
``ALL_PROXY``; ``NO_PROXY`` is a comma list of host names (a domain covers its subdomains), addresses, networks in CIDR
form, each with an optional port, or ``*``. ``HTTP_PROXY`` in capitals is ignored in a CGI process, where a client's
``Proxy:`` header sets it (CVE-2016-5385).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

from ..endpoint import Endpoint

__all__ = ["proxy_for"]

_SCHEMES = {"http": "http", "ws": "http", "grpc": "http", "https": "https", "wss": "https", "grpcs": "https"}


def proxy_for(endpoint: Endpoint, environment: Mapping[str, str]) -> tuple[str, str] | None:
    """The proxy's URL and the name of the setting that names it; None to connect directly."""
    if endpoint.uds is not None or endpoint.proxy is None:
        return None
    if endpoint.proxy != "env":
        return endpoint.proxy, "Endpoint.proxy"
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
            return None if _excluded(endpoint.origin.host, endpoint.origin.port, no_proxy) else (url, name)
    return None


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
