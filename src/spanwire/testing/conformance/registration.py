"""How the plugin comes in: found by its scheme, loaded when it is first used, and what it registers."""

# A manager and a stream in it are two steps; an error may come anywhere while a stream is entered and read.

from __future__ import annotations

import subprocess
import sys

import pytest
from msgspec.structs import replace

from ...endpoint import Endpoint, Limits, Retries, Timeouts
from ...errors import ConfigurationError
from ...plugins import transport_entry_points
from ...transport import CONTRACT, Connection, Exchange, Transport, TransportSpec
from .abilities import ABILITIES
from .answers import hello
from .harness import Kit

#: Source: ``TransportSpec.capabilities``.
CAPABILITIES = frozenset({"session", "jobs", "self_pooling"})

_LAZY = """
import sys
import spanwire
module, url = sys.argv[1:]
assert module not in sys.modules, "`import spanwire` has imported the plugin"
manager = spanwire.ConnectionManager()
assert module not in sys.modules, "making a manager has imported the plugin"
spec = manager.registry.spec_for(spanwire.Endpoint(url))
assert module in sys.modules, "the scheme was used, and the plugin was not imported"
print(spec.name)
"""


class Registration(Kit):
    """How the plugin comes in."""

    def test_it_is_registered_for_its_scheme(self) -> None:
        """Proves: the scheme finds a TransportSpec that has it, with a factory that makes a Transport.

        If it fails: does ``register_transports()`` carry ``@spanwire.hookimpl``, and name the scheme in ``schemes``? Is
        the distribution installed, with an entry point in ``spanwire.transports``? ``spanwire transports`` tells.
        """
        spec = self.spec()
        assert isinstance(spec, TransportSpec)
        assert self.scheme in spec.schemes
        transport = self.registry().transport(spec)
        assert isinstance(transport, Transport), f"{transport!r} lacks one of: expect, key, connect"
        named = self.registry().spec_for(Endpoint(f"{self.scheme}://127.0.0.1:1", transport=spec.name))
        assert named.name == spec.name, "Endpoint(transport=...) finds another one than the scheme does"

    def test_it_was_written_for_this_contract(self) -> None:
        """Proves: the spec states the version of the contract that this spanwire has.

        If it fails: read what has changed since (:mod:`spanwire.transport`), then raise ``TransportSpec(contract=...)``.
        """
        assert self.spec().contract == CONTRACT

    def test_an_entry_point_for_each_scheme_and_for_its_name(self) -> None:
        """Proves: every scheme, and the transport's name, finds the plugin before anything of it was loaded.

        If it fails: add the missing names to ``[project.entry-points."spanwire.transports"]``, and install anew.
        """
        entry = self.entry()
        if entry is None:
            pytest.skip("the plugin was given as an object: it has no entry points to look at")
        names = {other.name for other in transport_entry_points() if other.value == entry.value}
        assert {*self.spec().schemes, self.spec().name} <= names

    def test_it_is_loaded_when_its_scheme_is_first_used(self) -> None:
        """Proves: neither ``import spanwire`` nor a manager imports the plugin; the first use of the scheme does.

        If it fails: something else imports it, such as an entry in ``spanwire.plugins``, which is loaded at once.
        """
        entry = self.entry()
        if entry is None:
            pytest.skip("the plugin was given as an object: nothing loads it")
        url = f"{self.scheme}://127.0.0.1:1"
        done = subprocess.run(
            [sys.executable, "-c", _LAZY, entry.module, url], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        assert done.stdout.strip() == self.spec().name

    def test_endpoints_share_connections_by_where_they_lead(self) -> None:
        """Proves: ``key()`` is the same for the same place, whatever the limits; another for another place.

        If it fails: return ``endpoint.connection_key()`` and what the handshake sends, and nothing of timeouts, retries
        or limits.
        """
        with self.scene() as scene:
            endpoint = scene.endpoint()
            manager = self.manager(telemetry=None)
            transport, _ = scene.transport(manager, endpoint)
            key = transport.key(endpoint)
            hash(key)
            assert transport.key(scene.endpoint()) == key
            patient = replace(
                endpoint, timeouts=Timeouts(total_s=9), limits=Limits(max_queue=9), retries=Retries(max_attempts=9)
            )
            assert transport.key(patient) == key, "timeouts, limits or retries are in the key"
            elsewhere = replace(endpoint, url=f"{self.scheme}://192.0.2.1:9", uds=None)
            assert transport.key(elsewhere) != key, "another host has the same key"
            assert transport.expect(endpoint) >= 1

    def test_its_objects_are_what_the_contract_says(self) -> None:
        """Proves: the connection and the exchange have every name of the contract, with the right type.

        If it fails: compare with ``Connection`` and ``Exchange`` in :mod:`spanwire.transport`. Names that are
        missing make calls fail in odd places.
        """
        with self.scene(hello()) as scene:

            async def body() -> None:
                async with scene.connection() as direct:
                    connection = direct.connection
                    assert isinstance(connection, Connection), f"{connection!r} lacks a name of Connection"
                    assert isinstance(connection.capacity, int)
                    assert connection.capacity >= 1
                    assert connection.protocol
                    assert connection.engine
                    assert connection.usable() is True
                    exchange, _ = await direct.start(self.call())
                    assert isinstance(exchange, Exchange), f"{exchange!r} lacks a name of Exchange"
                    while await exchange.read():
                        pass
                    assert exchange.complete
                    exchange.abort()

            scene.run(body)

    def test_what_it_declares_it_has(self) -> None:
        """Proves: capabilities in the spec are known ones, and the connection has them.

        If it fails: ``TransportSpec(capabilities=...)`` says ``session`` where a default dialect has that operation,
        ``self_pooling`` for connections with ``self_pooling = True``.
        """
        declared = self.spec().capabilities
        assert declared <= CAPABILITIES, f"unknown capabilities: {set(declared - CAPABILITIES)}"
        registry = self.registry()
        endpoint = Endpoint(f"{self.scheme}://127.0.0.1:1")
        dialect = registry.dialect_for(endpoint, registry.spec_for(endpoint), session=True)
        has_sessions = dialect is not None and "session" in dialect.operations
        assert ("session" in declared) == has_sessions, "a transport with sessions has a default dialect for them"
        with self.scene(hello()) as scene:

            async def body() -> None:
                async with scene.connection() as direct:
                    found = direct.connection
                    if "self_pooling" in declared:
                        assert getattr(found, "self_pooling", False) is True
                    exchange, _ = await direct.start(self.call())  # so that the server has seen the connection
                    while await exchange.read():
                        pass

            scene.run(body)

    def test_an_unknown_option_is_refused_by_name(self) -> None:
        """Proves: ``TransportSpec.options`` lists names, not everything: a misspelt option is told before anything is sent.

        If it fails: the spec, or its dialect, claims an option of any name.
        """
        with self.scene() as scene:
            options = {**self.settings.get("options", {}), "no_such_option": 1}

            async def body() -> None:
                async with scene.manager() as manager:
                    with pytest.raises(ConfigurationError, match="no_such_option"):
                        manager.stream(scene.endpoint(options=options), self.call())

            scene.run(body)

    def test_no_test_is_overridden_without_a_reason(self) -> None:
        """Proves: this class runs the kit's own tests.

        If it fails: put ``@pytest.mark.xfail(reason=...)`` on the tests that you override, and into ``cannot`` only
        names of ``ABILITIES``, each with a reason.
        """
        assert overridden(type(self), "spanwire.testing.conformance") == []
        assert set(self.cannot) <= set(ABILITIES), f"unknown names in `cannot`: {set(self.cannot) - set(ABILITIES)}"
        for ability, reason in self.cannot.items():
            assert isinstance(reason, str), f"cannot[{ability!r}] needs a reason, as text"
            assert reason.strip(), f"cannot[{ability!r}] needs a reason"


def overridden(kit: type, package: str) -> list[str]:
    """Tests of the kit that a subclass has replaced without saying why."""
    found = []
    for base in kit.__mro__:
        if not base.__module__.startswith(package):
            continue
        for name, test in vars(base).items():
            mine = getattr(kit, name)
            theirs = mine is not test and not getattr(mine, "__module__", "").startswith(package)
            if name.startswith("test_") and theirs and name not in found:
                marks = getattr(mine, "pytestmark", [])
                if not any(mark.name == "xfail" and mark.kwargs.get("reason") for mark in marks):
                    found.append(name)
    return found
