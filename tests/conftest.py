"""What every test process does once."""

from __future__ import annotations

import gc


def pytest_collection_finish() -> None:
    """Take what was imported for good out of the garbage collector's sight: half a gigabyte of frameworks, which every test
    that asks it for what has been left behind would wait for, a second each time."""
    gc.collect()
    gc.freeze()
