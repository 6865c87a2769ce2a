"""Ids of jobs: UUID version 7 (RFC 9562), so that new rows go to the end of an index."""

from __future__ import annotations

import secrets
import threading
import time

__all__ = ["new_id"]

_last_ms = 0
_counter = 0
_lock = threading.Lock()


def new_id() -> str:
    """A new id, greater than the last one of this process.

    48 bits of milliseconds, a counter of 12 bits within one (RFC 9562, section 6.2, method 1), 62 random bits.
    """
    global _last_ms, _counter
    with _lock:
        now_ms = time.time_ns() // 1_000_000
        if now_ms > _last_ms:
            _last_ms, _counter = now_ms, secrets.randbits(11)
        else:  # the same millisecond, or a clock that was set back
            _counter += 1
            if _counter > 0xFFF:
                _last_ms, _counter = _last_ms + 1, 0
        high = _last_ms << 16 | 0x7 << 12 | _counter
    digits = f"{high:016x}{0b10 << 62 | secrets.randbits(62):016x}"
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"
