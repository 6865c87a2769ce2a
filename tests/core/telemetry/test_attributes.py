"""What is written on a span, from the record and the timeline alone."""

from __future__ import annotations

from typing import Any

import pytest

from spanwire.endpoint import Endpoint
from spanwire.telemetry.attributes import kept, own_attributes, protocol, server
from spanwire.timeline import CallRecord, ConnectionUse, Timeline
from tests.core.test_timeline import MS, streamed_marks, warm


class Scoped(ConnectionUse, frozen=True):
    """A connection whose round trip was measured to something in between."""

    rtt_scope: str | None = None


class Told(Timeline):
    """A timeline with times that the server has reported."""

    server_timing: dict[str, Any] | None = None


def record(use: ConnectionUse) -> CallRecord:
    attempt = warm(0, 295, streamed_marks(), connection=use)
    made = CallRecord(attempt.begin_ns, operation="chat", model="m", endpoint="h:1", transport="sse")
    made.end_ns = attempt.end_ns
    made.attempts.append(attempt)
    return made


def test_segments_their_parts_and_the_weakest_source() -> None:
    of = record(ConnectionUse("c1", reused=True, age_s=2.0, idle_s=0.5))
    found = own_attributes(Timeline(of), of)
    assert found == {
        "spanwire.outcome": "completed",
        "spanwire.transport": "sse",
        "spanwire.time_to_first_byte": 0.092,
        "spanwire.time_to_first_content": 0.102,
        "spanwire.connection.id": "c1",
        "spanwire.connection.reused": True,
        "spanwire.connection.age": 2.0,
        "spanwire.connection.idle_time": 0.5,
        "spanwire.segment.client.duration": pytest.approx(0.004),
        "spanwire.segment.client.source": "measured",
        "spanwire.segment.client.encode.duration": pytest.approx(0.001),
        "spanwire.segment.client.decode.duration": pytest.approx(0.001),
        "spanwire.segment.client.waiting.duration": pytest.approx(0.002),
        "spanwire.segment.network.duration": pytest.approx(0.081),
        "spanwire.segment.network.source": "estimated",
        "spanwire.segment.network.send.duration": pytest.approx(0.001),
        "spanwire.segment.network.to_and_back.duration": pytest.approx(0.080),
        "spanwire.segment.model.duration": pytest.approx(0.210),
        "spanwire.segment.model.source": "estimated",
        "spanwire.segment.model.prefill.duration": pytest.approx(0.020),
        "spanwire.segment.model.decode.duration": pytest.approx(0.190),
    }


@pytest.mark.parametrize("scope", ["edge", None])
def test_how_far_the_round_trip_goes(scope: str | None) -> None:
    of = record(Scoped("c1", reused=True, rtt_scope=scope))
    assert own_attributes(Timeline(of), of).get("spanwire.connection.rtt_scope") == scope


@pytest.mark.parametrize(
    ("timing", "dialect"),
    [({"dialect": "vllm", "raw": {}}, "vllm"), ({"raw": {}}, None), ({"dialect": 1}, None), (None, None)],
)
def test_whose_times_the_server_reported(timing: dict[str, Any] | None, dialect: str | None) -> None:
    of = record(ConnectionUse("c1", reused=True))
    told = Told(of)
    told.server_timing = timing
    assert own_attributes(told, of).get("spanwire.server_timing.dialect") == dialect


def test_a_call_that_never_began() -> None:
    of = CallRecord(0, operation="chat", model="m", endpoint="h:1", transport="sse")
    of.end_ns, of.outcome = 5 * MS, "cancelled"
    assert own_attributes(Timeline(of), of) == {
        "spanwire.outcome": "cancelled",
        "spanwire.transport": "sse",
        "spanwire.segment.unattributed.duration": 0.005,
        "spanwire.segment.unattributed.source": "measured",
    }


def test_where_a_server_is() -> None:
    assert server(Endpoint("https://h:8443/v1")) == {"server.address": "h", "server.port": 8443}
    assert server(Endpoint("http://h/v1", uds="/run/s.sock")) == {"server.address": "/run/s.sock"}
    assert (protocol("h2"), protocol("http/1.1")) == (("http", "2"), ("http", "1.1"))


@pytest.mark.parametrize(
    ("value", "fits"),
    [
        ("text", "text"),
        ("x" * 2_000, "x" * 1_024),
        ("\ud800", "?"),
        (True, True),
        (3, 3),
        (2**63, None),
        (0.5, 0.5),
        (float("nan"), None),
        (None, None),
        ([1], None),
    ],
)
def test_what_of_a_plugins_fits_on_a_span(value: object, fits: object) -> None:
    assert kept(value) == fits
