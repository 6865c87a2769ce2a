"""PURE: which addresses that a server names may be asked.

A webhook, or a status, may carry addresses: of a result, of a status, to cancel. Whoever can send one could have us ask
anything, inside our own network too. So: only hosts that were allowed. The key goes to the endpoint's own origin alone, and
redirects are not followed: :mod:`spanwire.jobs.carry` sees to both.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from urllib.parse import SplitResult, urlsplit

from spanwire.errors import ProtocolError

__all__ = ["ResultHosts"]

_PORTS = {"http": 80, "https": 443}
_HOST = re.compile(r"(\*\.)?[a-z0-9]([a-z0-9.-]*[a-z0-9])?|\[[0-9a-f:.]+\]")


class ResultHosts:
    """The addresses that a server's word is enough for.

    Args:
        origin: the endpoint's: scheme, host and port. It is allowed.
        allowed: further origins, ``https://api.replicate.com`` or ``https://*.fal.run`` (any name below it, not the name itself).
    """

    def __init__(self, origin: str, allowed: Iterable[str] = ()) -> None:
        self._own = _origin(origin)
        self._allowed = [_origin(one) for one in allowed]

    def check(self, url: str) -> str:
        """The address, if it may be asked.

        Raises:
            ProtocolError: it may not. The message has the host, not the path: that may be signed.
        """
        scheme, host, port = _origin(url)
        for one in (self._own, *self._allowed):
            if (scheme, port) == (one[0], one[2]) and _fits(host, one[1]):
                return url
        raise ProtocolError(
            f"the server names an address at {scheme}://{host}:{port}, which is none of its own; allow that host if it is"
        )


def _fits(host: str, pattern: str) -> bool:
    if not pattern.startswith("*."):
        return host == pattern
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host.endswith(pattern[1:])
    return False


def _origin(url: str) -> tuple[str, str, int]:
    """Scheme, host in lower case, port. Raises ProtocolError for whatever two parsers may read in two ways."""
    if not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
        raise ProtocolError("the server names an address with characters that none can have")
    try:
        parts: SplitResult = urlsplit(url)
        host, port = (parts.hostname or "").removesuffix("."), parts.port
    except ValueError as error:
        raise ProtocolError("the server names an address that is none") from error
    if ":" in host:
        host = f"[{host}]"
    if parts.scheme not in _PORTS or "@" in parts.netloc or not _HOST.fullmatch(host):
        raise ProtocolError("the server names an address that is not http:// or https:// at a plain host")
    return parts.scheme, host, port if port is not None else _PORTS[parts.scheme]
