"""The transport passes spanwire's conformance kit, with a real broker between the two ends."""

from __future__ import annotations

from broker import PART

from spanwire.testing import TransportConformance


class TestNATS(TransportConformance):
    scheme = "nats"
    part = PART
    settings = {"options": {"heartbeat_s": 0.25}}
    cannot = {
        "backpressure": "the broker takes what a responder sends, and cuts off a client that does not read",
        "connections": "the connections are the broker's, who does not tell the responder of them",
        "disconnect": "the responder cannot close the connection between caller and broker",
        "embeddings": "this wire carries chat and nothing else",
        "finish": "the last message is the end",
        "reset": "the responder has no connection to the caller",
    }
