"""Plugins that are wrong, each in its way: the message names the plugin, and everything else goes on."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import spanwire
from spanwire import errors, plugins
from spanwire.calls import Chunk
from spanwire.manager import ConnectionManager
from spanwire.transport import CONTRACT, Connection, Head, Inbox, TransportSpec
from tests.support import NEVER, chat, hello, read, run, serving

HELLO = "Hello from the loopback server."

# --- installed ones: real distributions, on sys.path ------------------------------------------------------------------

GOOD = """
import spanwire
from spanwire.transport import TransportSpec
class Wire:
    def expect(self, endpoint): return 1
    def key(self, endpoint): return endpoint.connection_key()
    async def connect(self, endpoint, attempt): raise NotImplementedError
@spanwire.hookimpl
def register_transports():
    return [TransportSpec(name="odd", schemes=("odd",), factory=Wire)]
"""

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts a distribution with one module and its entry points where Python finds it."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))

    def add(code: str, *, name: str = "odd", group: str = "spanwire.transports", entry: str = "odd") -> None:
        (tmp_path / f"{name}_wire.py").write_text(code)
        info = tmp_path / f"spanwire_{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: spanwire-{name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{entry} = {name}_wire\n")
        plugins._entry_points.cache_clear()

    yield add
    plugins._entry_points.cache_clear()
    for module in set(sys.modules) - before:
        if module.endswith("_wire"):
            del sys.modules[module]


def the_others_work(manager: ConnectionManager | None = None) -> None:
    async def body() -> None:
        with serving(hello()) as server:
            async with manager or ConnectionManager() as used:
                async with used.stream(server.endpoint(), chat()) as stream:
                    assert await read(stream) == HELLO
                assert (await used.complete(server.endpoint(), chat())).text == HELLO

    run(body)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import no_such_library", "cannot be imported: ModuleNotFoundError: No module named 'no_such_library'"),
        ("def (", "cannot be imported: SyntaxError"),
        ("raise SystemExit(3)", "cannot be imported: SystemExit: 3"),
        (GOOD.replace("factory=Wire", "factory=Wire, contract=0"), "was written for contract 0"),
        (GOOD.replace("factory=Wire)]", "factory=Wire)] * 2"), "registers the transport 'odd' twice"),
        (GOOD.replace('("odd",)', '("odd", "odd")'), "registers the scheme 'odd' twice"),
        (GOOD.replace('("odd",)', '("http",)'), "'http' is served by spanwire-sse"),
        (GOOD.replace("def register_transports", "def register_transport"), "does not know.*register_transport"),
        (
            GOOD.replace("register_transports()", "register_transports(endpoint)"),
            "(?s)does not know, or with other arguments.*endpoint",
        ),
        (GOOD.replace("@spanwire.hookimpl", ""), "registers no transport for it: is its register_transports"),
        (GOOD.replace('("odd",)', '("old",)'), "registers no transport for it"),
        (GOOD.replace("return [", "return 5 or ["), "failed while it registered"),
        (GOOD.replace("return [", "return ['sse'] or ["), "must give TransportSpec objects, not 'sse'"),
        (GOOD.replace("return [", "1 / 0; return ["), "failed while it registered: ZeroDivisionError"),
        (GOOD.replace("factory=Wire", "factory=dict"), r"its factory made \{\}, which is no Transport"),
        (GOOD.replace("factory=Wire", "factory=lambda: 1 / 0"), "cannot be made: ZeroDivisionError"),
        (GOOD.replace("return endpoint.connection_key()", "return []"), r"key\(\) of .* failed with TypeError"),
        (GOOD.replace("return endpoint.connection_key()", "1 / 0"), r"key\(\) of .* failed with ZeroDivisionError"),
    ],
)
def test_one_that_is_installed(install: Install, code: str, words: str) -> None:
    install(code)
    manager = ConnectionManager()
    if "'http' is served" in words:
        manager.registry.spec_for(spanwire.Endpoint("http://h/v1"))
    for _ in range(2):
        with pytest.raises((errors.PluginError, errors.PluginConflict), match=words) as caught:
            manager.stream(spanwire.Endpoint("odd://h:1"), chat())
        assert "spanwire-odd (odd_wire)" in str(caught.value)
    the_others_work(manager)
    rows = {row["distribution"]: row["status"] for row in manager.registry.describe()}
    assert rows["spanwire-sse"] == "ok"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import no_such_library", "No module named 'no_such_library'"),
        ("raise SystemExit(3)", "SystemExit"),
        (GOOD.replace("def register_transports", "def register_transport"), "register_transport"),
        (GOOD.replace("factory=Wire)]", "factory=Wire)] * 2"), "registers the transport 'odd' twice"),
    ],
)
def test_one_that_is_loaded_at_once_is_left_out(
    install: Install, caplog: pytest.LogCaptureFixture, code: str, words: str
) -> None:
    install(code, group="spanwire.plugins")
    with caplog.at_level(logging.WARNING, "spanwire.plugins"):
        manager = ConnectionManager()
    (record,) = caplog.records
    assert "spanwire-odd (odd_wire)" in record.getMessage()
    assert words in record.getMessage()
    the_others_work(manager)


def test_two_distributions_for_one_scheme(install: Install) -> None:
    install(GOOD)
    install(GOOD, name="even")
    with pytest.raises(errors.PluginConflict, match=r"spanwire-even.* and spanwire-odd"):
        ConnectionManager().stream(spanwire.Endpoint("odd://h:1"), chat())
    the_others_work()


# --- hooks for each call ----------------------------------------------------------------------------------------------


class Fine:
    @spanwire.hookimpl
    def request_metadata(self, call: spanwire.Call, endpoint: spanwire.Endpoint) -> dict[str, str]:
        return {"x-fine": "1"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda: 1 / 0, "ZeroDivisionError"),
        (lambda: 5, "must be a mapping"),
        (lambda: {"bad name": "x"}, "is not a header name"),
        (lambda: {"x": "a\nb"}, "line break"),
    ],
)
def test_request_metadata_that_fails_names_its_plugin(given: Callable[[], Any], words: str) -> None:
    class Faulty:
        @spanwire.hookimpl
        def request_metadata(self, call: spanwire.Call, endpoint: spanwire.Endpoint) -> Any:
            return given()

    async def body() -> None:
        with serving(hello()) as server:
            async with ConnectionManager(plugins=[Fine(), Faulty()]) as manager:
                with pytest.raises(errors.PluginError, match=words) as caught:
                    await manager.complete(server.endpoint(), chat())
                assert "(Faulty)" in str(caught.value)
                if "Zero" in words:
                    assert "(Fine)" not in str(caught.value)
            assert server.requests == []

    run(body)
    the_others_work()


@pytest.mark.parametrize("given", [lambda: 1 / 0, lambda: 5])
def test_span_attributes_that_fail_are_logged_by_name(
    given: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    class Faulty:
        @spanwire.hookimpl
        def span_attributes(self, timeline: spanwire.Timeline) -> Any:
            return given()

    with caplog.at_level(logging.WARNING, "spanwire.plugins"):
        the_others_work(ConnectionManager(plugins=[Faulty()]))
    assert "span_attributes() of plugins[0] (Faulty) failed" in caplog.text


class Observing:
    """A plugin with one observer."""

    def __init__(self, observer: object) -> None:
        self._observer = observer

    @spanwire.hookimpl
    def register_observers(self) -> list[Any]:
        return [self._observer]


def test_an_observer_that_raises_or_is_none_is_dropped_by_name(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[str] = []

    class Good:
        def call_ended(self, timeline: spanwire.Timeline) -> None:
            heard.append(timeline.outcome)

    with caplog.at_level(logging.WARNING, "spanwire.plugins"):
        the_others_work(ConnectionManager(plugins=[Observing(object()), Observing(Good())]))
    assert heard == ["completed", "completed"]
    assert caplog.text.count("an observer of plugins[0] (Observing) failed and is dropped") == 1


def test_a_hook_that_blocks_the_loop_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    class Slow:
        def call_ended(self, timeline: spanwire.Timeline) -> None:
            time.sleep(0.12)

        @spanwire.hookimpl
        def register_observers(self) -> list[Any]:
            return [self]

        @spanwire.hookimpl
        def request_metadata(self, call: spanwire.Call, endpoint: spanwire.Endpoint) -> dict[str, str]:
            time.sleep(0.12)
            return {}

        @spanwire.hookimpl
        def span_attributes(self, timeline: spanwire.Timeline) -> dict[str, str]:
            time.sleep(0.12)
            return {}

    with caplog.at_level(logging.WARNING, "spanwire.plugins"):
        the_others_work(ConnectionManager(plugins=[Slow()]))
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 3
    for hook in ("call_ended", "request_metadata", "span_attributes"):
        assert any(text.startswith(f"{hook}() of plugins[0] (Slow) took more than 100 ms") for text in told)


# --- transports that yield garbage, or raise what is not ours -----------------------------------------------------------


class GoodExchange(Inbox):
    """Says hello at once."""

    def __init__(self, attempt: Any) -> None:
        super().__init__()
        self.head = Head()
        self._attempt = attempt
        self.put(Chunk(text="hi", finish_reason="stop"))
        self.end()
        attempt.released()


class Apart:
    """The same, without Inbox: what reads gives is asked for."""

    complete = False

    def __init__(self, attempt: Any) -> None:
        self.head: Any = Head()
        self._attempt = attempt
        self._batches: list[Any] = [[Chunk(text="hi", finish_reason="stop")], []]

    async def read(self) -> Any:
        return self._batches.pop(0)

    def abort(self, error: Any = None) -> None:
        self._attempt.released()


class GoodConnection:
    capacity: Any = 1
    protocol = "odd"
    engine = "odd"
    closed = False

    async def start(self, call: Any, attempt: Any) -> Any:
        return GoodExchange(attempt)

    def usable(self) -> bool:
        return not self.closed

    async def aclose(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True


class Wire:
    connection: type[Any] = GoodConnection

    def expect(self, endpoint: Any) -> Any:
        return 1

    def key(self, endpoint: Any) -> Any:
        return endpoint.connection_key()

    async def connect(self, endpoint: Any, attempt: Any) -> Any:
        return self.connection()


def boom(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("sk-secret")


async def aboom(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("sk-secret")


def wire(**methods: Any) -> type[Any]:
    return type("Faulty", (Wire,), methods)


def connection(**methods: Any) -> type[Any]:
    return wire(connection=type("FaultyConnection", (GoodConnection,), methods))


def reading(*batches: Any) -> type[Any]:
    class Exchange(Apart):
        def __init__(self, attempt: Any) -> None:
            super().__init__(attempt)
            self._batches = list(batches)

        async def read(self) -> Any:
            batch = self._batches.pop(0)
            return batch() if callable(batch) else batch

    async def start(self: Any, call: Any, attempt: Any) -> Any:
        return Exchange(attempt)

    return connection(start=start)


def starting(made: Callable[[Any], Any]) -> type[Any]:
    async def start(self: Any, call: Any, attempt: Any) -> Any:
        return made(attempt)

    return connection(start=start)


async def gives(*_: Any) -> Any:
    return None


class Lacking:
    """A connection without its attributes."""

    def usable(self) -> bool:
        return True


async def lacking(*_: Any) -> Any:
    return Lacking()


def plugin_for(factory: type[Any]) -> Any:
    class Odd:
        @spanwire.hookimpl
        def register_transports(self) -> list[TransportSpec]:
            return [TransportSpec(name="odd", schemes=("odd",), factory=factory, contract=CONTRACT)]

    return Odd()


def inbox_of(*items: Any) -> type[Any]:
    class Exchange(GoodExchange):
        def __init__(self, attempt: Any) -> None:
            super().__init__(attempt)
            self._items = list(items)

    return starting(Exchange)


FAIL = [
    ("connect raises", wire(connect=aboom), "ZeroDivisionError"),
    ("connect gives None", wire(connect=gives), r"connect\(\) gave NoneType, which is no Connection"),
    ("connect gives half of one", wire(connect=lacking), r"connect\(\) gave Lacking, which is no Connection"),
    ("connect is not async", wire(connect=lambda *_: GoodConnection()), "TypeError"),
    ("a capacity of None", connection(capacity=None), "capacity is a number, not NoneType"),
    ("a capacity that raises", connection(capacity=property(boom)), "ZeroDivisionError"),
    ("no capacity at all", connection(capacity=0), "takes no call"),
    ("never usable", connection(usable=lambda _self: False), "takes no call"),
    ("usable raises", connection(usable=boom), "takes no call"),
    ("start raises", connection(start=aboom), "ZeroDivisionError"),
    ("start gives None", connection(start=gives), r"start\(\) gave NoneType, which is no Exchange"),
    ("start gives a list", starting(lambda _: []), r"start\(\) gave list, which is no Exchange"),
    ("read raises", reading(boom), "ZeroDivisionError"),
    ("read gives None", reading(None), r"read\(\) gave NoneType, not a list of chunks"),
    ("read gives 5", reading(5), "TypeError"),
    ("read gives text", reading("hello"), r"read\(\) gave str where a Chunk was due"),
    ("read gives bytes in a list", reading([b"hello"]), r"read\(\) gave bytes where a Chunk was due"),
    ("read gives None in a list", reading([None]), r"read\(\) gave NoneType where a Chunk was due"),
    ("a chunk, and None", reading([Chunk(text="a"), None]), "AttributeError"),
    ("an inbox with garbage", inbox_of("hello"), r"read\(\) gave str where a Chunk was due"),
    ("an inbox with some garbage", inbox_of(Chunk(text="a"), 5), "AttributeError"),
]


@pytest.mark.parametrize("streamed", [True, False], ids=["stream", "unary"])
@pytest.mark.parametrize(("factory", "words"), [row[1:] for row in FAIL], ids=[row[0] for row in FAIL])
def test_a_transport_that_fails_fails_its_calls_alone(factory: type[Any], words: str, streamed: bool) -> None:
    limits = spanwire.Limits(max_concurrent=1)

    async def body() -> None:
        with serving(hello()) as server:
            async with ConnectionManager(plugins=[plugin_for(factory)]) as manager:
                endpoint = spanwire.Endpoint("odd://h:1", retries=NEVER, limits=limits)
                for _ in range(2):
                    with pytest.raises(errors.ConnectionFailed, match=words) as caught:
                        async with asyncio.timeout(5):
                            if streamed:
                                async with manager.stream(endpoint, chat()) as stream:
                                    await read(stream)
                            else:
                                await manager.complete(endpoint, chat())
                    assert "sk-secret" not in str(caught.value)
                    assert caught.value.timeline is not None
                    if "takes no call" not in words:
                        assert "transport 'odd' of plugins[0] (Odd)" in str(caught.value)
                        assert caught.value.__cause__ is not None
                        assert not caught.value.retryable
                slots = manager._prepare(endpoint).slots
                assert "0 of 1 in use, 0 waiting" in repr(slots)
                for pool in manager.state().pools.values():
                    assert not pool.state.waiters
                    assert not pool.state.dials
                    assert not any(member.leases for member in pool.state.members)
                assert manager.state().runs == set()
                assert (await manager.complete(server.endpoint(), chat())).text == HELLO

    run(body)


def with_head(head: Any) -> type[Any]:
    class Exchange(Apart):
        @property
        def head(self) -> Any:
            return head()

        @head.setter
        def head(self, value: Any) -> None:
            pass

    return starting(Exchange)


async def marked_wrongly(self: Any, call: Any, attempt: Any) -> Any:
    attempt.marks.parts.append(("send", None, "x"))
    attempt.marks.sent_ns = attempt.marks.first_byte_ns = "soon"
    return GoodExchange(attempt)


def never_released(attempt: Any) -> Any:
    class Exchange(GoodExchange):
        def abort(self, error: Any = None) -> None:
            raise ZeroDivisionError

    return Exchange(type("Mute", (), {"released": lambda _self: None})())


GO_ON = [
    ("expect raises", wire(expect=boom), "expect"),
    ("expect gives None", wire(expect=lambda *_: None), "expect"),
    ("abort of the connection raises", connection(abort=boom), ""),
    ("aclose raises", connection(aclose=aboom), ""),
    ("neither way to close works", connection(aclose=aboom, abort=boom), "abort() of FaultyConnection failed"),
    ("the head is something else", with_head(lambda: "200 OK"), ""),
    (
        "the head raises after the start",
        with_head(lambda: boom() if sys._getframe(2).f_code.co_name == "head" else 1),
        "",
    ),
    ("marks that are no numbers", connection(start=marked_wrongly), ""),
    ("released never, and no abort", starting(never_released), "could not be aborted"),
]


@pytest.mark.parametrize(("factory", "words"), [row[1:] for row in GO_ON], ids=[row[0] for row in GO_ON])
def test_what_a_call_can_do_without_is_logged(factory: type[Any], words: str, caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        with serving(hello()) as server:
            async with ConnectionManager(plugins=[plugin_for(factory)]) as manager:
                endpoint = spanwire.Endpoint("odd://h:1", retries=NEVER, limits=spanwire.Limits(max_concurrent=1))
                await manager.warm(endpoint)
                for _ in range(2):
                    async with asyncio.timeout(5):
                        async with manager.stream(endpoint, chat()) as stream:
                            assert await read(stream) == "hi"
                        assert stream.timeline.outcome == "completed"
                    for pool in list(manager.state().pools.values()):
                        while any(member.leases for member in pool.state.members):  # an overdue end
                            await asyncio.sleep(0.01)
                assert manager.state().runs == set()
                assert (await manager.complete(server.endpoint(), chat())).text == HELLO

    with caplog.at_level(logging.DEBUG, "spanwire"):
        run(body)
    assert words in caplog.text


def test_an_exchange_that_cannot_be_left_gives_slot_and_lease_back(caplog: pytest.LogCaptureFixture) -> None:
    class Exchange(Apart):
        def __init__(self, attempt: Any) -> None:
            super().__init__(attempt)
            self._batches = [[Chunk(text="a")], [Chunk(text="b")], []]

        def abort(self, error: Any = None) -> None:
            raise ZeroDivisionError

    async def body() -> None:
        async with ConnectionManager(plugins=[plugin_for(starting(Exchange))]) as manager:
            endpoint = spanwire.Endpoint("odd://h:1", retries=NEVER, limits=spanwire.Limits(max_concurrent=1))
            for _ in range(2):
                async with asyncio.timeout(5):
                    async with manager.stream(endpoint, chat()) as stream:
                        assert (await anext(stream)).text == "a"
                assert stream.timeline.outcome == "closed_by_caller"
            (pool,) = manager.state().pools.values()
            assert not any(member.leases for member in pool.state.members)

    with caplog.at_level(logging.WARNING, "spanwire"):
        run(body)
    assert "failed to leave its exchange" in caplog.text


def test_marks_that_are_no_numbers_drop_no_observer(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[str] = []

    class Reader:
        def call_ended(self, timeline: spanwire.Timeline) -> None:
            seen.append(timeline.transport)
            timeline.to_dict()

    async def body() -> None:
        with serving(hello()) as server:
            odd = plugin_for(connection(start=marked_wrongly))
            async with ConnectionManager(plugins=[odd, Observing(Reader())]) as manager:
                await manager.complete("odd://h:1", chat())
                await manager.complete(server.endpoint(), chat())

    with caplog.at_level(logging.WARNING, "spanwire.plugins"):
        run(body)
    assert seen == ["odd", "sse"]
    assert "the timeline of a call over plugins[0] (Odd) cannot be read" in caplog.text


def test_the_good_ones_that_these_are_made_of_are_what_the_contract_says() -> None:
    assert isinstance(GoodConnection(), Connection)
    for factory in (Wire, starting(Apart)):
        the_call(factory)


def the_call(factory: type[Any]) -> None:
    async def body() -> None:
        async with ConnectionManager(plugins=[plugin_for(factory)]) as manager:
            assert (await manager.complete("odd://h:1", chat())).text == "hi"

    run(body)
