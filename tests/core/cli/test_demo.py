import json
from importlib import metadata
from typing import Any

import pytest

import spanwire.cli.demo as spanwire_demo

from .conftest import Spanwire


def test_it_shows_a_cold_a_warm_and_a_tool_call_on_one_connection(
    spanwire: Spanwire, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    found = spanwire("demo")
    assert (found.exit_code, found.stderr) == (0, "")
    text = found.stdout
    assert max(map(len, text.splitlines())) <= 80
    parts = dict(part.split("'", 1) for part in text.split("Transport '")[1:])
    assert {"sse", "websocket"} <= parts.keys()
    for name, part in parts.items():
        for words in (
            "1. A cold call",
            "2. A warm call",
            "3. A tool call",
            'get_weather({"city": "Lisbon", "unit": "celsius"})',
            "handshake connect" if name == "grpc" else "handshake tcp",
            "model" if name == "webhook" else "model prefill",
            "Connections opened: 1, for 3 calls.",
            "Only the cold call waited for its handshake: ",
        ):
            assert words in part, name
        assert part.count("handshake connect" if name == "grpc" else "handshake tcp") == 1
        assert part.count(" re-used") == 2


def test_as_json(spanwire: Spanwire) -> None:
    data = json.loads(spanwire("demo", "--json").stdout)
    assert (data["schema"], data["spanwire"]) == (1, metadata.version("spanwire"))
    assert {"sse", "websocket"} <= data["transports"].keys()
    for found in data["transports"].values():
        assert found["connections_opened"] == 1
        for key in ("cold", "warm", "tool_call"):
            assert found[key]["outcome"] == "completed"
            assert ("handshake" in found[key]["segments"]) == (key == "cold")
            parts = sum(segment["duration_s"] for segment in found[key]["segments"].values())
            assert parts == pytest.approx(found[key]["total_s"], abs=1e-3)


def entries(*names: str) -> Any:
    found = [metadata.EntryPoint("acme", "acme_is_not_there:PART", "spanwire.loopback")] if "acme" in names else []

    def entry_points(group: str) -> list[metadata.EntryPoint]:
        return [*found, *(one for one in metadata.entry_points(group=group) if one.name in names)]

    return entry_points


def test_a_part_that_does_not_work_is_one_line_and_stops_nothing(
    spanwire: Spanwire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spanwire_demo, "entry_points", entries("acme", "sse"))
    found = spanwire("demo", "--json")
    assert found.exit_code == 0
    assert found.stderr.startswith("spanwire: acme: there is no loopback server for 'acme'")
    assert found.stderr.count("\n") == 1
    assert list(json.loads(found.stdout)["transports"]) == ["sse"]


@pytest.mark.parametrize("names", [(), ("acme",)])
def test_nothing_to_show_is_an_error(
    spanwire: Spanwire, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    monkeypatch.setattr(spanwire_demo, "entry_points", entries(*names))
    found = spanwire("demo")
    assert (found.exit_code, found.stdout) == (1, "")
    assert found.stderr.startswith("spanwire: ")
    assert found.stderr.count("\n") == 1


def test_whoever_reads_it_may_leave(spanwire: Spanwire) -> None:
    process = spanwire.start("demo")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(30) == 1
