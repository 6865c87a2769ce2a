"""How a call becomes an HTTP request: its target, its headers, its body. What stays the same from call to call on one
connection is made once."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from urllib.parse import urlencode

from spanwire.calls import Call
from spanwire.endpoint import Endpoint, check_headers
from spanwire.errors import ConfigurationError
from spanwire.transport import Attempt

from .codec import Codec

__all__ = ["Outline", "host_header"]


def _user_agent() -> str:
    try:
        return f"spanwire/{metadata.version('spanwire')}"
    except metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return "spanwire"


_USER_AGENT = _user_agent()
#: Written by us from the request itself; a caller's own would make two answers out of one, or none.
_OURS = frozenset({"content-length", "transfer-encoding", "connection", "host"})


class Outline:
    """The part of the requests on one connection that stays the same from call to call.

    Args:
        prefix: stands before every target: ``http://host:port`` where a proxy forwards the requests.
        more: further headers of every request, which are the connection's and not the caller's.
    """

    __slots__ = ("_fixed", "_for", "_more", "_path", "_prefix", "_start", "_target")

    def __init__(self, *, prefix: str = "", more: Mapping[str, str] | None = None) -> None:
        self._prefix = prefix
        self._more = more or {}
        self._for: tuple[Endpoint, str | None, Codec] | None = None
        self._fixed: dict[str, str] = {}
        self._path: str | None = None
        self._target = ""
        self._start = b""

    def make(self, call: Call, attempt: Attempt) -> tuple[str, dict[str, str], bytes]:
        """Target, headers (names in lower case, without host and content-length) and body.

        Raises:
            ConfigurationError: what cannot be encoded, a header that is ours to write.
        """
        path, body, own = self._encode(call, attempt)
        self._renew(attempt, path)
        return self._target, self._merged(attempt, own), body

    def http1(self, call: Call, attempt: Attempt) -> bytes:
        """The whole request as HTTP/1.1. Raises as :meth:`make` does."""
        path, body, own = self._encode(call, attempt)
        self._renew(attempt, path)
        more = attempt.headers
        if own or not self._fixed.keys().isdisjoint(more) or not _OURS.isdisjoint(more):
            start = self._lines(self._merged(attempt, own))
            return b"%scontent-length: %d\r\n\r\n%s" % (start, len(body), body)
        lines = "".join([f"{name}: {value}\r\n" for name, value in more.items()])
        return b"%s%scontent-length: %d\r\n\r\n%s" % (self._start, lines.encode(), len(body), body)

    @staticmethod
    def _encode(call: Call, attempt: Attempt) -> tuple[str, bytes, Mapping[str, str]]:
        assert attempt.dialect is not None
        codec: Codec = attempt.dialect.codec
        return codec.encode(call, attempt.endpoint, streamed=attempt.streamed)

    def _renew(self, attempt: Attempt, path: str) -> None:
        endpoint, api_key = attempt.endpoint, attempt.api_key
        assert attempt.dialect is not None
        codec: Codec = attempt.dialect.codec
        known = self._for
        # By identity: comparing two endpoints field by field costs more than all the rest.
        if (
            known is not None
            and known[0] is endpoint
            and known[1] == api_key
            and known[2] is codec
            and self._path == path
        ):
            return
        self._for = None
        self._fixed = self._fixed_headers(codec, endpoint, api_key)
        target = f"{self._prefix}{endpoint.path}{path}"
        self._target = f"{target}?{urlencode(endpoint.query)}" if endpoint.query else target
        self._start = self._lines(self._fixed, endpoint)
        self._for, self._path = (endpoint, api_key, codec), path

    def _fixed_headers(self, codec: Codec, endpoint: Endpoint, api_key: str | None) -> dict[str, str]:
        headers = {
            "user-agent": _USER_AGENT,
            "accept": "text/event-stream, application/json",
            "content-type": "application/json",
            # Compressed events would wait for each other in the compressor.
            "accept-encoding": "identity",
        }
        if api_key is not None:
            headers.update(codec.credentials(api_key))
        headers.update((name.lower(), value) for name, value in endpoint.headers.items())
        check_headers(headers, "the request's headers")
        _refuse_ours(headers, endpoint)
        return headers

    def _merged(self, attempt: Attempt, own: Mapping[str, str]) -> dict[str, str]:
        headers = {**self._fixed, **own}
        for name, value in attempt.headers.items():
            headers[name.lower()] = value
        _refuse_ours(headers, attempt.endpoint)
        return headers

    def _lines(self, headers: Mapping[str, str], endpoint: Endpoint | None = None) -> bytes:
        if endpoint is None:
            assert self._for is not None
            endpoint = self._for[0]
        lines = "".join([f"{name}: {value}\r\n" for name, value in (*headers.items(), *self._more.items())])
        return f"POST {self._target} HTTP/1.1\r\nhost: {host_header(endpoint)}\r\n{lines}".encode()


def _refuse_ours(headers: Mapping[str, str], endpoint: Endpoint) -> None:
    for name in _OURS:
        if name in headers:
            raise ConfigurationError(
                f"the header {name!r} is written by spanwire itself; remove it from the headers",
                endpoint=endpoint.address,
            )


def host_header(endpoint: Endpoint) -> str:
    """The endpoint's host, with its port unless that is the scheme's own."""
    scheme, host, port = endpoint.origin
    name = f"[{host}]" if ":" in host else host
    return name if port == (443 if scheme == "https" else 80) else f"{name}:{port}"
