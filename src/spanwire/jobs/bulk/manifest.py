"""PURE: what a bulk is, as a hash, and the ids of its jobs, which follow from it.

The same calls, group, endpoint and rules of cutting give the same manifest, and with it the same ids, in any process. The
store refuses an id that is there, so whatever several processes do at once, each job is made once.
"""

from __future__ import annotations

import hashlib
import secrets

import msgspec

from ...calls import Call
from ...errors import ConfigurationError

__all__ = ["MOST_SHARDS", "Manifest", "encoded", "job_id", "unlike_any"]

#: Shards of one bulk: 28 bits of their ids.
MOST_SHARDS = 1 << 28
_VERSION = b"spanwire bulk 1"
_encode = msgspec.json.Encoder(order="deterministic").encode


def encoded(call: Call) -> bytes:
    """A call as it is hashed and measured: without its headers, which may hold keys. The order of its fields says nothing.

    Raises:
        ConfigurationError: it cannot be written as JSON.
    """
    try:
        return _encode([call.operation, call.model, call.body])
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"the call cannot be written as JSON: {error}") from error


class Manifest:
    """Hashes a bulk call by call.

    Args:
        origin: the endpoint's scheme, host, port and path.
        rules: what else decides which calls are in which job; anything that can be written as JSON.
    """

    def __init__(self, *, group: str, origin: str, dialect: str, rules: object) -> None:
        self._hash = hashlib.sha256(_VERSION)
        self._add(_encode([group, origin, dialect, rules]))
        self.calls = 0

    def add(self, call: bytes) -> None:
        """The next call, as :func:`encoded` gives it."""
        self.calls += 1
        self._add(call)

    def digest(self) -> bytes:
        """32 bytes."""
        return self._hash.digest()

    def _add(self, piece: bytes) -> None:
        self._hash.update(len(piece).to_bytes(8))  # or two calls could look like one
        self._hash.update(piece)


def unlike_any() -> bytes:
    """A manifest for calls that nobody comes back to: the same ones submitted again are others."""
    return secrets.token_bytes(32)


def job_id(manifest: bytes, path: str, round: int) -> str:
    """The id of a shard's job.

    A UUID of version 8 (RFC 9562, section 5.8): 32 bits of the manifest, 28 of the shard's number, so that the ids of one bulk
    grow and new rows go to the end of an index, and 62 of a hash over all three arguments.

    Args:
        path: the shard's number, and after a split which half of it: ``"3"``, ``"3/0"``, ``"3/0/1"``.
        round: 0, and one more each time that what has failed is tried again.
    """
    number = int(path.partition("/")[0])
    if not 0 <= number < MOST_SHARDS:
        raise ConfigurationError(f"a bulk has at most {MOST_SHARDS} jobs: submit it in several parts")
    whole = hashlib.sha256(b"%b|%b|%d" % (manifest, path.encode(), round)).digest()
    front = int.from_bytes(manifest[:4]) << 28 | number  # 60 bits, around the version
    high = front >> 12 << 16 | 0x8 << 12 | front & 0xFFF
    low = 0b10 << 62 | int.from_bytes(whole[:8]) >> 2
    digits = f"{high:016x}{low:016x}"
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"
