"""PURE but for the clock: how long a server asks its client to wait."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime

__all__ = ["retry_after_s"]


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """How long the server asks to wait, in seconds: ``retry-after-ms``, ``Retry-After`` as seconds or as a date.

    A date in the past is 0; what cannot be read, or is negative, is None.
    """
    for name, scale in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        value = headers.get(name, "").strip()
        if value.isascii() and value.replace(".", "", 1).isdigit():
            return float(value) * scale
    value = headers.get("retry-after", "")
    if not value or value.lstrip("-").isdigit():
        return None
    try:
        moment = parsedate_to_datetime(value)
        if moment.tzinfo is None:  # "-0000", which says that it is UTC all the same: RFC 5322 section 3.3
            moment = moment.replace(tzinfo=UTC)
        until_s = moment.timestamp()
    except (TypeError, ValueError, OverflowError):  # a year or an offset that no clock can show
        return None
    return max(0.0, until_s - time.time())
