"""PURE: what helps against a refusal where the server's own words say no more than its status."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..endpoint import Endpoint
from ..errors import ServerError

__all__ = ["advice", "nothing_there"]

#: How web servers and frameworks say that no program of theirs answers at a path. A server that knows the path and misses the
#: model names the model: nothing is to be added to that.
_WORDS = (
    r"(?:(?:the )?(?:requested )?(?:file|page|path|route|url|resource) )?(?:was )?(?:not found|method not allowed)\W*"
)
_NOTHING = re.compile(rf"(?:status )?40[45]\W*(?:{_WORDS})?|{_WORDS}", re.IGNORECASE)
_CREDENTIALS = ("authorization", "x-api-key", "api-key")


def nothing_there(error: ServerError) -> bool:
    """Whether the server has nothing at this path, or nothing that takes calls, as far as its words go."""
    return error.status in (404, 405) and _NOTHING.fullmatch(error.message) is not None


def advice(error: ServerError, endpoint: Endpoint, *, api_key: str | None, headers: Mapping[str, str]) -> str:
    """What to add to the message of a refusal, ``""`` for nothing. Shows no part of the URL: a path may be secret.

    Args:
        api_key: what the call was sent with.
        headers: further headers of the call: a key may be in them, or in those of the endpoint.
    """
    if nothing_there(error):
        ends = "" if endpoint.path.rstrip("/").endswith("/v1") else ", which ends in /v1 with most servers"
        return f"; is the endpoint's URL the server's base URL{ends}?"
    if error.status == 401 and api_key is None:
        sent = {name.lower() for name in (*endpoint.headers, *headers)}
        if sent.isdisjoint(_CREDENTIALS):
            return "; the endpoint has no api_key"
    return ""
