"""The registry: found by entry point, loaded when needed, and one broken plugin stops nothing else."""

from __future__ import annotations

import logging
from importlib import metadata
from typing import Any

import pytest

import spanwire
from spanwire import errors, plugins
from spanwire.manager import ConnectionManager
from spanwire.plugins import Registry
from spanwire.timing import TimingReader, TimingRow
from spanwire.transport import Dialect, TransportSpec
from tests.support import chat, hello, run, serving


class Wire:
    """A transport that is never connected."""

    def expect(self, endpoint: spanwire.Endpoint) -> int:
        return 1

    def key(self, endpoint: spanwire.Endpoint) -> object:
        return endpoint.connection_key()

    async def connect(self, endpoint: spanwire.Endpoint, attempt: object) -> object:
        raise NotImplementedError


def spec(name: str = "echo", *schemes: str, **more: Any) -> TransportSpec:
    return TransportSpec(name=name, schemes=schemes or (name,), factory=Wire, **more)  # type: ignore[arg-type]


def plugin(*specs: Any, dialects: tuple[Any, ...] = ()) -> Any:
    class Plugin:
        @spanwire.hookimpl
        def register_transports(self) -> list[Any]:
            return list(specs)

        @spanwire.hookimpl
        def register_dialects(self) -> list[Any]:
            return list(dialects)

    return Plugin()


class FakeDist:
    version = "9"

    def __init__(self, name: str) -> None:
        self.name = name


class FakeEntry:
    """An installed entry point, without installing anything."""

    def __init__(self, name: str, value: str, dist: str, loaded: Any) -> None:
        self.name, self.value, self.dist, self._loaded = name, value, FakeDist(dist), loaded
        self.loads = 0

    def load(self) -> Any:
        self.loads += 1
        if isinstance(self._loaded, Exception):
            raise self._loaded
        return self._loaded


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    groups: dict[str, list[Any]] = {
        "spanwire.transports": list(metadata.entry_points(group="spanwire.transports")),
        "spanwire.plugins": [],
    }
    monkeypatch.setattr(plugins, "_entry_points", lambda group: tuple(groups[group]))
    return groups


def test_the_built_in_transport_comes_in_like_anybody_elses(installed: dict[str, list[Any]]) -> None:
    registry = Registry()
    found = registry.spec_for(spanwire.Endpoint("https://h/v1"))
    assert (found.name, found.schemes) == ("sse", ("http", "https"))
    assert registry.spec_for(spanwire.Endpoint("http://h/v1")) is found
    assert registry.spec_for(spanwire.Endpoint("odd://h:1/v1", transport="sse")) is found
    dialect = registry.dialect_for(spanwire.Endpoint("http://h/v1"), found)
    assert dialect is not None
    assert dialect.name == "openai"
    installed["spanwire.transports"].clear()
    with pytest.raises(errors.ConfigurationError, match="installed: none"):
        Registry().spec_for(spanwire.Endpoint("http://h/v1"))


def test_a_transport_is_loaded_when_its_scheme_is_first_used(installed: dict[str, list[Any]]) -> None:
    entry = FakeEntry("echo", "echo_wire", "spanwire-echo", plugin(spec()))
    installed["spanwire.transports"].append(entry)
    registry = Registry()
    assert entry.loads == 0
    endpoint = spanwire.Endpoint("echo://somewhere")
    assert registry.spec_for(endpoint).name == "echo"
    assert registry.spec_for(endpoint).name == "echo"
    assert entry.loads == 1


def test_a_plugin_can_be_given_without_packaging() -> None:
    registry = Registry([plugin(spec())])
    assert registry.spec_for(spanwire.Endpoint("echo://h")).name == "echo"
    assert isinstance(registry.transport(registry.spec_for(spanwire.Endpoint("echo://h"))), Wire)


def test_a_broken_plugin_is_named_and_stops_nothing_else(installed: dict[str, list[Any]]) -> None:
    installed["spanwire.transports"].append(FakeEntry("bad", "bad_wire", "spanwire-bad", ImportError("no libbad")))
    registry = Registry()
    for _ in range(2):
        with pytest.raises(errors.PluginError, match=r"spanwire-bad \(bad_wire\).*no libbad"):
            registry.spec_for(spanwire.Endpoint("bad://h"))
    assert registry.spec_for(spanwire.Endpoint("http://h/v1")).name == "sse"
    rows = {row["distribution"]: row for row in registry.describe()}
    assert rows["spanwire-sse"]["status"] == "ok"
    assert rows["spanwire-sse"]["transports"][0]["dialects"] == ["openai", "responses"]
    assert "no libbad" in rows["spanwire-bad"]["status"]


def test_an_eager_plugin_that_fails_is_logged_and_left_out(
    installed: dict[str, list[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    installed["spanwire.plugins"].append(FakeEntry("watch", "watcher", "spanwire-watch", ImportError("gone")))
    with caplog.at_level(logging.WARNING, "spanwire.plugins"):
        Registry()
    assert "spanwire-watch" in caplog.text


def test_two_plugins_for_one_scheme_are_a_conflict_that_names_both(installed: dict[str, list[Any]]) -> None:
    with pytest.raises(errors.PluginConflict, match=r"'http' is served by .*spanwire-sse.* and by .*Plugin"):
        registry = Registry()
        registry.spec_for(spanwire.Endpoint("http://h/v1"))
        registry._register(plugin(spec("other", "http")), "Plugin")
    installed["spanwire.transports"] += [
        FakeEntry("echo", "one", "dist-one", plugin(spec())),
        FakeEntry("echo", "two", "dist-two", plugin(spec())),
    ]
    with pytest.raises(errors.PluginConflict, match=r"dist-one \(one\) and dist-two \(two\)"):
        Registry().spec_for(spanwire.Endpoint("echo://h"))


def test_a_dialect_that_is_taken_is_a_conflict() -> None:
    first = plugin(spec(), dialects=(Dialect("echo", "plain", None, default=True),))
    second = plugin(dialects=(Dialect("echo", "plain", None),))
    with pytest.raises(errors.PluginConflict, match="'plain' on 'echo'"):
        Registry([first, second])


def test_a_plugin_that_says_no_contract_was_written_for_the_first(
    installed: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later core must not take it for one of its own time."""
    monkeypatch.setattr("spanwire.plugins.CONTRACT", 2)
    installed["spanwire.transports"] = [FakeEntry("old", "old_wire", "spanwire-old", plugin(spec("old")))]
    with pytest.raises(
        errors.PluginError, match="contract 1 of spanwire's transports, this is contract 2; run `pip install -U"
    ):
        Registry().spec_for(spanwire.Endpoint("old://h"))


def test_a_plugin_of_another_contract_names_the_upgrade_command(installed: dict[str, list[Any]]) -> None:
    installed["spanwire.transports"] += [
        FakeEntry("old", "old_wire", "spanwire-old", plugin(spec("old", contract=0))),
        FakeEntry("new", "new_wire", "spanwire-new", plugin(spec("new", contract=2))),
    ]
    with pytest.raises(errors.PluginError, match="pip install -U spanwire-old"):
        Registry().spec_for(spanwire.Endpoint("old://h"))
    with pytest.raises(errors.PluginError, match="pip install -U spanwire`"):
        Registry().spec_for(spanwire.Endpoint("new://h"))


def test_a_misspelt_hook_is_an_error_that_names_the_plugin() -> None:
    class Plugin:
        @spanwire.hookimpl
        def register_transport(self) -> list[Any]:
            return []

    with pytest.raises(errors.PluginError, match=r"Plugin.*register_transport"):
        Registry([Plugin()])


@pytest.mark.parametrize("given", [["sse"], None, 5])
def test_a_hook_that_gives_something_else_is_an_error(given: Any) -> None:
    class Plugin:
        @spanwire.hookimpl
        def register_transports(self) -> Any:
            return given

    if given is None:  # pluggy's way to say nothing
        Registry([Plugin()])
        return
    with pytest.raises(errors.PluginError, match="Plugin"):
        Registry([Plugin()])


def test_plugins_can_be_disabled_by_the_environment(
    installed: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPANWIRE_DISABLE_PLUGINS", "other, spanwire-sse")
    with pytest.raises(errors.ConfigurationError, match="no installed transport"):
        Registry().spec_for(spanwire.Endpoint("http://h/v1"))
    assert installed


def test_request_metadata_is_merged_and_a_clash_is_an_error() -> None:
    def setting(**headers: str) -> Any:
        class Plugin:
            @spanwire.hookimpl
            def request_metadata(self, call: spanwire.Call, endpoint: spanwire.Endpoint) -> dict[str, str]:
                return {name.replace("_", "-"): value.format(model=call.model) for name, value in headers.items()}

        return Plugin()

    with serving(hello()) as server:

        async def body() -> None:
            async with ConnectionManager(plugins=[setting(X_a="{model}"), setting(x_b="2")]) as manager:
                await manager.complete(server.endpoint(), chat())
            manager = ConnectionManager(plugins=[setting(x_a="1"), setting(X_A="2")])
            with pytest.raises(errors.PluginConflict, match="x-a"):
                await manager.complete(server.endpoint(), chat())

        run(body)
        assert server.requests[0].headers["x-a"] == "m"
        assert server.requests[0].headers["x-b"] == "2"


def test_an_observer_hears_of_each_call_and_one_that_raises_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[str] = []

    class Good:
        def call_ended(self, timeline: spanwire.Timeline) -> None:
            heard.append(timeline.outcome)

    class Bad:
        calls = 0

        def call_ended(self, _timeline: spanwire.Timeline) -> None:
            Bad.calls += 1
            raise ZeroDivisionError

    class Plugin:
        @spanwire.hookimpl
        def register_observers(self) -> list[Any]:
            return [Bad(), Good()]

    with serving(hello()) as server, caplog.at_level(logging.WARNING, "spanwire.plugins"):

        async def body() -> None:
            async with ConnectionManager(plugins=[Plugin()]) as manager:
                for _ in range(2):
                    await manager.complete(server.endpoint(), chat())

        run(body)
    assert heard == ["completed", "completed"]
    assert Bad.calls == 1
    assert "is dropped" in caplog.text


def test_of_two_plugins_attributes_the_later_ones_count() -> None:
    class Plugin:
        def __init__(self, number: int) -> None:
            self.number = number

        @spanwire.hookimpl
        def span_attributes(self, timeline: spanwire.Timeline) -> dict[str, Any]:
            return {"number": self.number, f"number.{self.number}": True}

    found = Registry([Plugin(1), Plugin(2)]).span_attributes(_Ended())  # type: ignore[arg-type]
    assert found == {"number": 2, "number.1": True, "number.2": True}


def test_span_attributes_are_added(caplog: pytest.LogCaptureFixture) -> None:
    class Plugin:
        @spanwire.hookimpl
        def span_attributes(self, timeline: spanwire.Timeline) -> dict[str, Any]:
            return {"team": timeline.model}

    class Bad:
        @spanwire.hookimpl
        def span_attributes(self, timeline: spanwire.Timeline) -> dict[str, Any]:
            raise ZeroDivisionError

    assert Registry([Plugin()]).span_attributes(_Ended()) == {"team": "m"}  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING, "spanwire.plugins"):
        assert Registry([Bad()]).span_attributes(_Ended()) == {}  # type: ignore[arg-type]
    assert "failed" in caplog.text


class _Ended:
    model = "m"


# --- tables of servers' own times -----------------------------------------------------------------------------------


def table(server: str, path: str = "x-wait", unit: str = "ms") -> TimingReader:
    return TimingReader(server, (TimingRow("header", path, unit, "queue", "to_headers", "header"),))


def with_tables(*tables: Any) -> Any:
    class Plugin:
        @spanwire.hookimpl
        def register_timing_readers(self) -> list[Any]:
            if isinstance(tables[0], Exception):
                raise tables[0]
            return list(tables)

        @spanwire.hookimpl
        def register_transports(self) -> list[TransportSpec]:
            return [spec(f"wire{id(self)}")]

    return Plugin()


def waits(registry: Registry, **headers: str) -> list[tuple[str, int | None]]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    found = registry.timing_readers.read(headers=named, streamed=False)
    return [(reading.server, reading.duration_ns) for reading in found]


def test_timing_readers_of_plugins_are_read_beside_ours() -> None:
    registry = Registry([with_tables(table("one"), table("two", "x-other"))])
    assert sorted(waits(registry, x_wait="5", x_other="6", openai_processing_ms="7")) == [
        ("one", 5_000_000),
        ("openai", 7_000_000),
        ("two", 6_000_000),
    ]
    assert registry.timing_readers is registry.timing_readers
    assert waits(Registry(), x_wait="5") == []


def test_of_two_timing_readers_at_one_path_the_later_plugins_counts() -> None:
    registry = Registry([with_tables(table("one")), with_tables(table("two", unit="us"))])
    assert waits(registry, x_wait="5") == [("two", 5_000)]


def test_timing_readers_of_a_transport_that_is_loaded_later_come_in_too(installed: dict[str, list[Any]]) -> None:
    class Late:
        @spanwire.hookimpl
        def register_transports(self) -> list[TransportSpec]:
            return [spec("echo")]

        @spanwire.hookimpl
        def register_timing_readers(self) -> list[TimingReader]:
            return [table("late")]

    installed["spanwire.transports"].append(FakeEntry("echo", "echo_wire", "spanwire-echo", Late()))
    registry = Registry()
    assert waits(registry, x_wait="5") == []
    registry.spec_for(spanwire.Endpoint("echo://h"))
    assert waits(registry, x_wait="5") == [("late", 5_000_000)]


@pytest.mark.parametrize("broken", [errors.ConfigurationError("no unit"), "no table", None])
def test_a_broken_timing_reader_is_logged_by_name_and_stops_nothing_else(
    broken: Any, caplog: pytest.LogCaptureFixture
) -> None:
    plugin = with_tables(broken, table("lost"))
    with caplog.at_level(logging.WARNING, "spanwire.plugins"):
        registry = Registry([plugin, with_tables(table("one", "x-one"))])
    assert "register_timing_readers() of plugin plugins[0] (Plugin) failed" in caplog.text
    assert waits(registry, x_wait="5", x_one="6") == [("one", 6_000_000)]
    name = f"wire{id(plugin)}"
    assert registry.spec_for(spanwire.Endpoint("http://h", transport=name)).name == name  # its transport still works
