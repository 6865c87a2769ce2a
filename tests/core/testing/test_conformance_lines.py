"""The kit on a wire that has nothing of HTTP: given as an object, many calls on one connection."""

# ruff: noqa: RUF012 - settings of a class, as every author of a transport writes them

from __future__ import annotations

from spanwire.testing import TransportConformance
from tests.core.testing.lines_wire import Part, Plugin


class TestLines(TransportConformance):
    scheme = "lines"
    plugin = Plugin()
    part = Part()
    cannot = {
        "backpressure": "calls share a connection, and the wire has no word to stop one of them",
        "embeddings": "the wire has one operation",
    }
