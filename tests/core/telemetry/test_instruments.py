"""Metrics by both tables of the conventions."""

from __future__ import annotations

from typing import Any

import pytest

import spanwire
from spanwire.manager import ConnectionManager
from spanwire.testing import Script
from tests.core.telemetry.heard import Heard, call_once
from tests.support import AT_ONCE, chat, hello, run, serving

ALL = "duration, first_content, first_chunk, connections, tokens, segments"
USAGE = spanwire.Usage(7, 5, 12, cached_tokens=3, reasoning_tokens=2)


def metrics_of(heard: Heard, monkeypatch: pytest.MonkeyPatch, table: str | None) -> dict[str, list[Any]]:
    monkeypatch.setenv("SPANWIRE_METRICS", ALL)
    if table is None:
        monkeypatch.delenv("SPANWIRE_SEMCONV", raising=False)
    else:
        monkeypatch.setenv("SPANWIRE_SEMCONV", table)
    with serving(hello(usage=USAGE, prefill_s=0.1)) as server:
        call_once(server, heard, chat())
    return heard.metrics()


@pytest.mark.parametrize("table", [None, "", "v1.41"])
@pytest.mark.parametrize("opt_in", ["", "gen_ai_latest_experimental", "http/dup"])
def test_the_table_of_today(heard: Heard, monkeypatch: pytest.MonkeyPatch, table: str | None, opt_in: str) -> None:
    # It has a value for leaving v1.36, which was never emitted here, and none for the step after v1.41.
    monkeypatch.setenv("OTEL_SEMCONV_STABILITY_OPT_IN", opt_in)
    found = metrics_of(heard, monkeypatch, table)
    assert {name for name in found if name.startswith("gen_ai.")} == {
        "gen_ai.client.operation.duration",
        "gen_ai.client.operation.time_to_first_chunk",
        "gen_ai.client.token.usage",
    }
    assert {p.attributes["gen_ai.token.type"]: p.sum for p in found["gen_ai.client.token.usage"]} == {
        "input": 7,
        "output": 5,
    }
    assert found["gen_ai.client.token.usage"][0].explicit_bounds[:4] == (1, 4, 16, 64)


def test_the_table_to_come(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    found = metrics_of(heard, monkeypatch, "genai")
    counters = {
        "gen_ai.client.inference.usage.input_tokens": 7,
        "gen_ai.client.inference.usage.output_tokens": 5,
        "gen_ai.client.inference.usage.cache_read.input_tokens": 3,
        "gen_ai.client.inference.usage.reasoning.output_tokens": 2,
    }
    assert {name for name in found if name.startswith("gen_ai.")} == {
        "gen_ai.client.inference.duration",
        "gen_ai.client.inference.time_to_first_chunk",
        *counters,
    }
    for name, count in counters.items():
        (point,) = found[name]
        assert point.value == count
        assert point.attributes["gen_ai.request.model"] == "m"
    (first_chunk,) = found["gen_ai.client.inference.time_to_first_chunk"]
    assert first_chunk.count == 1
    assert first_chunk.explicit_bounds[:2] == (0.01, 0.02)


def test_in_the_table_to_come_embeddings_keep_their_name(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPANWIRE_SEMCONV", "genai")
    with serving(Script()) as server:

        async def body() -> None:
            async with ConnectionManager(telemetry=heard.telemetry()) as manager:
                await manager.embed(server.endpoint(), spanwire.Call.embeddings("e", ["a"]))
                await manager.complete(server.endpoint(), chat())

        run(body)
    found = heard.metrics()
    (other,) = found["gen_ai.client.operation.duration"]
    assert other.attributes["gen_ai.operation.name"] == "embeddings"
    (inference,) = found["gen_ai.client.inference.duration"]
    assert inference.attributes["gen_ai.operation.name"] == "chat"


@pytest.mark.parametrize("table", ["v1.41", "genai"])
def test_nothing_that_a_server_would_say(heard: Heard, monkeypatch: pytest.MonkeyPatch, table: str) -> None:
    assert not [name for name in metrics_of(heard, monkeypatch, table) if name.startswith("gen_ai.server.")]


def test_an_answer_that_is_not_streamed_has_no_first_chunk(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPANWIRE_METRICS", ALL)
    with serving(hello()) as server:

        async def body() -> None:
            async with ConnectionManager(telemetry=heard.telemetry()) as manager:
                await manager.complete(server.endpoint(), chat())

        run(body)
    found = heard.metrics()
    assert "gen_ai.client.operation.duration" in found
    assert "gen_ai.client.operation.time_to_first_chunk" not in found


def test_each_try_is_a_use_of_its_connection(heard: Heard) -> None:
    """Else the connection that a retried call made would have been used without ever having been new."""
    with serving(Script(status=503), Script(status=503), hello()) as server:

        async def body() -> None:
            async with ConnectionManager(telemetry=heard.telemetry()) as manager:
                await manager.complete(server.endpoint(), chat(), retries=AT_ONCE)

        run(body)
    uses = heard.metrics()["spanwire.connection.uses"]
    assert {point.attributes["spanwire.connection.reused"]: point.value for point in uses} == {False: 1, True: 2}
