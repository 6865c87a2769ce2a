"""PURE: what inference servers and gateways say of their own time, read by tables. Data where a row is enough.

A :class:`TimingReader` is the table of one server, :class:`Readers` reads answers by all of them, and gives each value as a
:class:`Reading`. Which of several readings a timeline believes is decided in :mod:`.precedence`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .readers import Readers
    from .reading import Reading, TimingReader, TimingRow

__all__ = ["Readers", "Reading", "TimingReader", "TimingRow"]


def __getattr__(name: str) -> Any:
    # The tables are not needed by who only imports spanwire.
    if name == "Readers":
        from .readers import Readers

        return Readers
    if name in __all__:
        from . import reading

        return getattr(reading, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
