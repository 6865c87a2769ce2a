"""The transport passes the conformance kit, as an ordinary user of it."""

# ruff: noqa: RUF012 - settings of a class, as every author of a transport writes them

from __future__ import annotations

import pytest

from spanwire.testing import TransportConformance

CANNOT = {
    "call_headers": "headers go with the handshake, which serves many calls",
    "embeddings": "the schema has none",
    "finish": "the terminal event is the last message of an answer",
    "whole": "every answer is a stream of events; a call that is not streamed gets them joined",
}


class TestPlain(TransportConformance):
    scheme = "ws"
    cannot = CANNOT


@pytest.mark.long
class TestTLS(TransportConformance):
    scheme = "wss"
    served = {"tls": True}
    cannot = CANNOT
