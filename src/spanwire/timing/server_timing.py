"""PURE parser of the ``Server-Timing`` header (W3C Server Timing): a list of named durations.

Lenient where browsers are, by the parsing cases of the Web Platform Tests: junk after a value or a parameter's name is
skipped, of a repeated parameter only the first counts (even when it is invalid), unknown parameters are ignored, junk
after a metric's name ends the list. Two differences: browsers read a missing or bad ``dur`` as 0, which here is None;
and empty elements of the list are skipped (RFC 9110 section 5.6.1.2).
"""

from __future__ import annotations

import re
from typing import NamedTuple

from .units import number

__all__ = ["Metric", "parse_server_timing"]

#: RFC 9110 section 5.6.2.
_TOKEN = r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"  # noqa: S105 - a grammar's token, no secret
_NAME = re.compile(rf"[ \t,]*({_TOKEN})[ \t]*")
#: Groups: name, `=`, token, quoted text, a quote that is never closed. What follows up to the next `;` or `,` is junk.
_PARAMETER = re.compile(
    rf';[ \t]*({_TOKEN})?[ \t]*(?:(=)[ \t]*(?:({_TOKEN})|"((?:[^"\\]|\\.)*+)"|("))?)?[^,;]*', re.DOTALL
)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)


class Metric(NamedTuple):
    """One metric. ``duration_ms`` is None where there is none that is a number of 0 or more; ``description`` is None
    where there is none, and may be empty. Names are case-sensitive."""

    name: str
    duration_ms: float | None
    description: str | None


def parse_server_timing(value: str) -> list[Metric]:
    """The metrics of a header's value, in its order, those of the same name too. Never raises.

    A header that came in several lines may be given joined with ``", "``.
    """
    metrics: list[Metric] = []
    position = 0
    while (match := _NAME.match(value, position)) is not None:
        name = match[1]
        position = match.end()
        given: dict[str, str] = {}
        while (match := _PARAMETER.match(value, position)) is not None:
            position = match.end()
            parameter, _, token, quoted, unclosed = match.groups()
            if unclosed is not None:  # nobody knows where it should have ended
                position = len(value)
            if parameter is not None:
                text = token or (_ESCAPED.sub(r"\1", quoted) if quoted is not None else "")
                given.setdefault(parameter.lower(), text)
        metrics.append(Metric(name, number(given.get("dur")), given.get("desc")))
        if value[position : position + 1] != ",":
            break
    return metrics
