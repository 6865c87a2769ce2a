"""PURE: what inference servers and gateways say of their own time, read by tables. Data where a row is enough.

A :class:`TimingReader` is the table of one server, :class:`Readers` reads answers by all of them, and gives each value as a
:class:`Reading`. Which of several readings a timeline believes is not decided here.
"""

from .readers import Readers
from .reading import Reading, TimingReader, TimingRow

__all__ = ["Readers", "Reading", "TimingReader", "TimingRow"]
