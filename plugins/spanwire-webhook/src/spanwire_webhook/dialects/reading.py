"""PURE: what providers send, read field by field: any bytes in, values or ValueError out.

Objects are cut into raw fields first, and only what is asked for is decoded: the result of a job may be many megabytes,
and who asks for its status does not need it.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from spanwire.errors import ProtocolError, ServerError, server_error
from spanwire.jobs.contract import HTTPAnswer, Times
from spanwire.wire.openai_chat import error_in
from spanwire.wire.retry_after import retry_after_s

__all__ = ["Fields", "digest", "fields_of", "id_of", "json_of", "lasted_s", "refused", "span", "value_of"]

_cut = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
#: An id goes into paths: what could leave the path, or end it, is none. Providers' ids are letters, digits, ``-`` and ``_``.
_ID = re.compile(r"(?!\.+\Z)[A-Za-z0-9._~:=+@,-]{1,256}\Z")
#: Seconds since the epoch that a clock can show: up to the year 9999.
_MOST_S = 253_402_300_799.0
_SHOWN = 200


class Fields:
    """The fields of a JSON object, each decoded when it is asked for. Names that are missing, and null, are None.

    Raises:
        ValueError: the bytes are no JSON object.
    """

    __slots__ = ("_body", "_raw")

    def __init__(self, body: bytes | bytearray | memoryview | msgspec.Raw) -> None:
        self._body = data = bytes(body)
        self._raw: Mapping[str, msgspec.Raw | bytes]
        try:
            self._raw = _cut(data)
            return
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass
        found = value_of(data)
        if not isinstance(found, dict):
            raise ValueError(f"the body is no JSON object but a {type(found).__name__}")  # noqa: TRY004 - it is bad data
        try:
            self._raw = {name: json_of(value) for name, value in found.items()}
        except RecursionError:
            raise ValueError("the body is nested too deeply") from None

    def __contains__(self, name: str) -> bool:
        return name in self._raw

    def whole(self) -> bytes:
        """The object as it came."""
        return self._body

    def raw(self, name: str) -> bytes | None:
        """Its JSON as it came."""
        found = self._raw.get(name)
        data = None if found is None else bytes(found).strip()
        return None if data == b"null" else data

    def value(self, name: str) -> Any:
        """Whatever it is; None also for what cannot be read."""
        data = self.raw(name)
        try:
            return None if data is None else value_of(data)
        except ValueError:
            return None

    def text(self, name: str) -> str | None:
        """Text that is not empty."""
        found = self.value(name)
        return found if isinstance(found, str) and found else None

    def id(self, name: str = "id") -> str | None:
        """An id that may stand in a path; a number is taken as text."""
        return id_of(self.value(name))

    def inner(self, name: str) -> Fields | None:
        """An object."""
        data = self.raw(name)
        try:
            return None if data is None else Fields(data)
        except ValueError:
            return None

    def seconds(self, name: str, scale: float = 1.0) -> float | None:
        """A duration: a number from 0, times ``scale``."""
        found = self.value(name)
        seconds = _number(found) if _is_number(found) else None
        return None if seconds is None else seconds * scale

    def within(self, name: str, inner: str) -> float | None:
        """A duration in an object, in seconds."""
        found = self.inner(name)
        return None if found is None else found.seconds(inner)

    def moment(self, name: str) -> float | None:
        """A time, as seconds since the epoch: a number, or ISO 8601 (UTC where it does not say)."""
        found = self.value(name)
        if _is_number(found):
            return _number(found)
        if not isinstance(found, str) or not found[:1].isdigit():
            return None
        try:
            moment = dt.datetime.fromisoformat(found)
            if moment.tzinfo is None:
                moment = moment.replace(tzinfo=dt.UTC)
            return _number(moment.timestamp())
        except (ValueError, OverflowError):
            return None


def value_of(data: bytes) -> Any:
    """Any JSON value. NaN, broken UTF-8 and half surrogates, which some servers write, do not end a job.

    Raises:
        ValueError: it is no JSON.
    """
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        return _whole(json.loads(data.decode("utf-8", "replace")))
    except (ValueError, RecursionError):
        raise ValueError(f"the body is no JSON: {_show(data)}") from None


def json_of(value: Any) -> bytes:
    """JSON of any value that :func:`value_of` gave, numbers of any size and NaN included."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def _whole(value: Any) -> Any:
    """Without half surrogates, which cannot be written as UTF-8."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_whole(item) for item in value]
    if isinstance(value, dict):
        return {_whole(name): _whole(item) for name, item in value.items()}
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number(value: float) -> float | None:
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if 0.0 <= found <= _MOST_S and math.isfinite(found) else None


def id_of(value: Any) -> str | None:
    """An id that may stand in a path, or None."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63:
        value = str(value)
    return value if isinstance(value, str) and _ID.match(value) else None


def digest(*parts: bytes | str | None) -> str:
    """A key for deliveries that have no id of their own."""
    hashed = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "replace") if isinstance(part, str) else part or b""
        hashed.update(b"%d:" % len(data))
        hashed.update(data)
    return hashed.hexdigest()


def lasted_s(begin_s: float | None, end_s: float | None) -> float | None:
    """What passed between two times of one clock; None if one is missing, or they are in the wrong order."""
    if begin_s is None or end_s is None or end_s < begin_s:
        return None
    return end_s - begin_s


def span(
    accepted_s: float | None,
    started_s: float | None,
    finished_s: float | None,
    *,
    model_s: float | None = None,
    total_s: float | None = None,
) -> Times:
    """Times of one provider's clock, with the durations between them; durations that it gives itself go first."""
    model = lasted_s(started_s, finished_s) if model_s is None else model_s
    total = lasted_s(accepted_s, finished_s) if total_s is None else total_s
    return Times(accepted_s, started_s, finished_s, lasted_s(accepted_s, started_s), model, total)


def refused(answer: HTTPAnswer) -> ServerError:
    """The error of an answer with an error status, or with one that no request of ours can have."""
    headers = dict(answer.headers)
    if answer.status < 400:
        return server_error(f"the answer has the status {answer.status}", status=answer.status, headers=headers)
    return error_in(answer.body, status=answer.status, headers=headers, retry_after_s=retry_after_s(answer.headers))


def fields_of(answer: HTTPAnswer) -> Fields:
    """The object in an answer that says that all is well. Raises ServerError, ProtocolError."""
    if not 200 <= answer.status < 300:
        raise refused(answer)
    try:
        return Fields(answer.body)
    except ValueError as error:
        raise ProtocolError(f"the server's answer cannot be read: {error}") from None


def _show(data: bytes) -> str:
    return repr(data[:_SHOWN].decode("utf-8", "replace"))
