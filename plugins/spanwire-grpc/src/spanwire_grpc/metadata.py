"""PURE: headers as gRPC's metadata, and back.

Names of metadata are lower-case letters, digits and ``-_.``; those that end in ``-bin`` carry bytes, the others printable
ASCII. ``grpc-`` is gRPC's own. Source: https://grpc.github.io/grpc/core/md_doc_statuscodes.html and the gRPC-over-HTTP/2
specification, "Custom-Metadata".
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping
from urllib.parse import urlencode

from spanwire.endpoint import Endpoint
from spanwire.errors import ConfigurationError

__all__ = ["QUERY", "fixed", "incoming", "merged"]

#: gRPC has no query: that of the endpoint's URL is sent under this name.
QUERY = "x-url-query"
_NAME = re.compile(r"[0-9a-z_.\-]+")
_TEXT = re.compile(r"[\x20-\x7e]*")
#: Written by the library from the call itself.
_OURS = frozenset({"content-length", "content-type", "connection", "host", "te", "transfer-encoding", "user-agent"})

Metadata = tuple[tuple[str, str | bytes], ...]


def fixed(endpoint: Endpoint, credentials: Mapping[str, str]) -> dict[str, str]:
    """What all calls of an endpoint have in common. Raises ConfigurationError."""
    headers = dict(credentials)
    headers.update((name.lower(), value) for name, value in endpoint.headers.items())
    if endpoint.query:
        headers[QUERY] = urlencode(endpoint.query)
    _check(headers, endpoint)
    return headers


def merged(same: Mapping[str, str], more: Mapping[str, str], endpoint: Endpoint) -> Metadata:
    """All metadata of one call; ``more`` wins. Raises ConfigurationError, which names a header and not its value."""
    headers = {**same}
    for name, value in more.items():
        headers[name.lower()] = value
    _check(more, endpoint)
    return tuple(
        (name, value.encode() if name.endswith("-bin") else value)  # the library writes bytes as base64
        for name, value in headers.items()
    )


def _check(headers: Mapping[str, str], endpoint: Endpoint) -> None:
    for name, value in headers.items():
        lower = name.lower()
        if lower in _OURS or lower.startswith("grpc-"):
            raise ConfigurationError(
                f"the header {name!r} is written by gRPC itself; remove it from the headers", endpoint=endpoint.address
            )
        if not _NAME.fullmatch(lower):
            raise ConfigurationError(
                f"the header {name!r:.60} cannot be sent over gRPC, whose metadata have names of letters, digits and -_.",
                endpoint=endpoint.address,
            )
        if not lower.endswith("-bin") and not _TEXT.fullmatch(value):
            raise ConfigurationError(
                f"the value of the header {name!r} is not printable ASCII, which is all that gRPC's metadata carry; "
                f"a name that ends in -bin may carry anything",
                endpoint=endpoint.address,
            )


def incoming(metadata: Iterable[tuple[str, str | bytes]] | None) -> dict[str, str]:
    """Metadata as headers: repeated names joined with ``", "``, bytes as base64."""
    headers: dict[str, str] = {}
    for name, value in metadata or ():
        text = value if isinstance(value, str) else base64.b64encode(value).decode("ascii")
        headers[name] = f"{headers[name]}, {text}" if name in headers else text
    return headers
