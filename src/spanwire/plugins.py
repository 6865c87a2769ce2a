"""Finds plugins by entry point, loads them when they are needed, and survives a broken one.

``spanwire.transports`` has one entry for each URL scheme or transport name; it is loaded when that scheme or name is
first used. ``spanwire.plugins`` is loaded with the first manager. A plugin that fails is reported once, by name, and
stops nothing else; only a call that needs it gets its error. ``SPANWIRE_DISABLE_PLUGINS=a,b`` leaves plugins out, by
entry-point name or distribution.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING, Any

import pluggy

from . import hookspecs
from .calls import Call
from .endpoint import Endpoint, check_headers
from .errors import ConfigurationError, PluginConflict, PluginError
from .hookspecs import PROJECT, Observer
from .timeline import Timeline
from .transport import CONTRACT, Dialect, Transport, TransportSpec

if TYPE_CHECKING:
    from .timing import Readers, TimingReader

__all__ = ["Registry", "plugin_entry_points", "transport_entry_points"]

_log = logging.getLogger("spanwire.plugins")
#: What a hook that is called on the event loop may take before somebody is told, in ns. As asyncio's debug mode has it
#: (``loop.slow_callback_duration``).
_SLOW_NS = 100_000_000
#: Which extra brings a scheme or transport of ours: for the message that it is not installed, and for nothing else. A test
#: holds it against the plugins' entry points.
_EXTRAS = {
    "grpc": "grpc",
    "grpcs": "grpc",
    "webhook": "webhook",
    "websocket": "websocket",
    "ws": "websocket",
    "wss": "websocket",
}
_TRANSPORTS, _PLUGINS = "spanwire.transports", "spanwire.plugins"


@cache
def _entry_points(group: str) -> tuple[metadata.EntryPoint, ...]:
    # Reading the metadata of every distribution takes tens of milliseconds: once for each process.
    return tuple(metadata.entry_points(group=group))


def transport_entry_points() -> tuple[metadata.EntryPoint, ...]:
    """Everything that is installed in the group ``spanwire.transports``, loaded or not."""
    return _entry_points(_TRANSPORTS)


def plugin_entry_points() -> tuple[metadata.EntryPoint, ...]:
    """The same of the group ``spanwire.plugins``."""
    return _entry_points(_PLUGINS)


def _disabled() -> frozenset[str]:
    return frozenset(name.strip() for name in os.environ.get("SPANWIRE_DISABLE_PLUGINS", "").split(",") if name.strip())


def _dist_name(entry: metadata.EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.value


def _close_to(name: str, known: Iterable[str]) -> list[str]:
    import difflib  # only when something is wrong

    return difflib.get_close_matches(name, list(known), n=1)


class Registry:
    """Everything that plugins have registered, for one manager.

    Args:
        plugins: objects with hooks, without packaging.

    Raises:
        PluginError: one of ``plugins`` breaks the contract. Installed plugins never raise here.
        PluginConflict: two of ``plugins`` claim the same name.
    """

    def __init__(self, plugins: Iterable[object] = ()) -> None:
        self._pm = pluggy.PluginManager(PROJECT)
        self._pm.add_hookspecs(hookspecs)
        self._lock = threading.RLock()
        self._by_name: dict[str, tuple[TransportSpec, str]] = {}
        self._by_scheme: dict[str, str] = {}
        self._dialects: dict[tuple[str, str], tuple[Dialect, str]] = {}
        self._transports: dict[str, Transport] = {}
        self._loaded: set[str] = set()
        self._broken: dict[str, PluginError | PluginConflict] = {}
        self._slow: set[tuple[str, str]] = set()
        self._observers: tuple[tuple[Observer, str], ...] = ()
        self._timing_tables: tuple[TimingReader, ...] = ()
        self._timing_readers: tuple[tuple[TimingReader, ...], Readers] | None = None
        self._has_metadata = False
        self._has_attributes = False
        for number, plugin in enumerate(plugins):
            name = getattr(plugin, "__name__", None) or type(plugin).__name__
            self._register(plugin, f"plugins[{number}] ({name})")
        for entry in plugin_entry_points():
            if not _disabled() & {entry.name, _dist_name(entry)}:
                try:
                    self._load(entry)
                except (PluginError, PluginConflict) as error:
                    _log.warning("plugin left out: %s", error)
        if os.environ.get("SPANWIRE_CALL_LOG"):
            self._add_call_log()
        if os.environ.get("SPANWIRE_WATERFALL"):
            self._add_call_print()

    # --- loading ----------------------------------------------------------------------------------------------------

    def _load(self, entry: metadata.EntryPoint) -> None:
        with _loading:
            self._load_one(entry)

    def _load_one(self, entry: metadata.EntryPoint) -> None:
        name = f"{_dist_name(entry)} ({entry.value})"
        if name in self._broken:
            raise self._broken[name]
        if name in self._loaded:
            return
        try:
            try:
                plugin = entry.load()
            except (Exception, SystemExit) as error:
                raise PluginError(
                    f"plugin {name} cannot be imported: {type(error).__name__}: {error}; repair it with "
                    f"`pip install --force-reinstall {_dist_name(entry)}` or leave it out with SPANWIRE_DISABLE_PLUGINS"
                ) from error
            self._register(plugin, name, _dist_name(entry))
        except (PluginError, PluginConflict) as error:
            self._broken[name] = error
            raise
        self._loaded.add(name)

    def _register(self, plugin: object, name: str, dist: str | None = None) -> None:
        """Register one plugin and take over what its hooks give. All or nothing."""
        if self._pm.is_registered(plugin):  # the same object under another of its entry points
            return
        try:
            self._pm.register(plugin, name=name)
            self._pm.check_pending()
        except pluggy.PluginValidationError as error:
            if self._pm.is_registered(plugin):
                self._pm.unregister(plugin)
            raise PluginError(
                f"plugin {name} has a hook that spanwire does not know, or with other arguments: {error}"
            ) from error
        try:
            specs = self._ask(plugin, "register_transports")
            dialects = self._ask(plugin, "register_dialects")
            observers = self._ask(plugin, "register_observers")
            self._check(specs, dialects, name, dist)
        except (PluginError, PluginConflict):
            self._pm.unregister(plugin)
            raise
        except Exception as error:
            self._pm.unregister(plugin)
            raise PluginError(f"plugin {name} failed while it registered: {type(error).__name__}: {error}") from error
        for spec in specs:
            self._by_name[spec.name] = (spec, name)
            self._by_scheme.update(dict.fromkeys(spec.schemes, spec.name))
        for dialect in dialects:
            self._dialects[dialect.transport, dialect.name] = (dialect, name)
        self._observers += tuple((observer, name) for observer in observers)
        self._add_timing_tables(plugin, name)
        self._has_metadata = bool(self._pm.hook.request_metadata.get_hookimpls())
        self._has_attributes = bool(self._pm.hook.span_attributes.get_hookimpls())

    def _add_timing_tables(self, plugin: object, name: str) -> None:
        """Without its tables a plugin still works, and a call still has a timeline: logged, not raised."""
        try:
            self._timing_tables += self._ask_timing_tables(plugin)
        except Exception as error:  # noqa: BLE001 - somebody else's code
            _log.warning(
                "register_timing_readers() of plugin %s failed, its tables are left out: %s: %s",
                name,
                type(error).__name__,
                error,
            )

    def _ask_timing_tables(self, plugin: object) -> tuple[TimingReader, ...]:
        tables = self._ask(plugin, "register_timing_readers")
        if tables:
            from .timing import TimingReader  # not with `import spanwire`

            for table in tables:
                if not isinstance(table, TimingReader):
                    raise PluginError(f"it must give TimingReader objects, not {table!r:.60}")
        return tuple(tables)

    def _add_call_log(self) -> None:
        from .calllog import call_log_from_environment  # only for who asks for it

        call_log = call_log_from_environment()
        # A program that gives its manager a log of the same file wants each call in it once.
        given = [getattr(observer, "path", None) for observer, _ in self._observers]
        if call_log is not None and call_log.path not in given:
            self._register(call_log, "SPANWIRE_CALL_LOG")

    def _add_call_print(self) -> None:
        from .callprint import call_print_from_environment  # only for who asks for it

        call_print = call_print_from_environment()
        if call_print is not None:
            self._register(call_print, "SPANWIRE_WATERFALL")

    def _ask(self, plugin: object, hook: str) -> list[Any]:
        others = [other for other in self._pm.get_plugins() if other is not plugin]
        answers: list[Sequence[Any]] = self._pm.subset_hook_caller(hook, others)()
        return [item for answer in answers for item in answer]

    def _check(self, specs: list[Any], dialects: list[Any], name: str, dist: str | None) -> None:
        seen: set[tuple[str, str]] = set()

        def once(kind: str, what: str) -> None:
            if (kind, what) in seen:
                raise PluginConflict(f"plugin {name} registers the {kind} {what!r} twice")
            seen.add((kind, what))

        for spec in specs:
            if not isinstance(spec, TransportSpec):
                raise PluginError(
                    f"plugin {name}: register_transports() must give TransportSpec objects, not {spec!r:.60}"
                )
            if spec.contract != CONTRACT:
                older = spec.contract < CONTRACT
                what = f"`pip install -U {dist or spec.name}`" if older else "`pip install -U spanwire`"
                raise PluginError(
                    f"plugin {name} was written for contract {spec.contract} of spanwire's transports, this is contract "
                    f"{CONTRACT}; run {what}"
                )
            once("transport", spec.name)
            if spec.name in self._by_name:
                raise PluginConflict(
                    f"transport {spec.name!r} comes from {self._by_name[spec.name][1]} and from {name}"
                )
            for scheme in spec.schemes:
                once("scheme", scheme)
                if scheme in self._by_scheme:
                    owner = self._by_name[self._by_scheme[scheme]][1]
                    raise PluginConflict(f"scheme {scheme!r} is served by {owner} and by {name}; remove one of them")
        for dialect in dialects:
            if not isinstance(dialect, Dialect):
                raise PluginError(f"plugin {name}: register_dialects() must give Dialect objects, not {dialect!r:.60}")
            once("dialect", f"{dialect.transport}/{dialect.name}")
            taken = self._dialects.get((dialect.transport, dialect.name))
            if taken is not None:
                raise PluginConflict(
                    f"dialect {dialect.name!r} on {dialect.transport!r} comes from {taken[1]} and from {name}"
                )

    # --- what calls need --------------------------------------------------------------------------------------------

    def spec_for(self, endpoint: Endpoint) -> TransportSpec:
        """The transport of an endpoint, by its name or its scheme; loads it if need be.

        Raises:
            ConfigurationError: nothing that is installed serves it; names what does.
            PluginError, PluginConflict: what serves it is broken.
        """
        with self._lock:
            wanted = endpoint.transport or endpoint.origin.scheme
            found = self._known(wanted, by_name=endpoint.transport is not None)
            if found is None:
                loaded = self._load_for(wanted)
                found = self._known(wanted, by_name=endpoint.transport is not None)
                if found is None and loaded:
                    raise PluginError(
                        f"plugin {' and '.join(loaded)} has an entry point {wanted!r}, yet registers no transport for it: "
                        "is its register_transports() marked with @spanwire.hookimpl, and the scheme in its TransportSpec?",
                        endpoint=endpoint.address,
                    )
            if found is None:
                raise self._unknown(wanted, endpoint)
            return found

    def owner(self, spec: TransportSpec) -> str:
        """Transport and plugin, for messages: ``transport 'sse' of spanwire-sse (spanwire_sse)``."""
        known = self._by_name.get(spec.name)
        return f"transport {spec.name!r}" + (f" of {known[1]}" if known is not None else "")

    def _known(self, wanted: str, *, by_name: bool) -> TransportSpec | None:
        name = wanted if by_name else self._by_scheme.get(wanted)
        return self._by_name[name][0] if name in self._by_name else None

    def _load_for(self, wanted: str) -> list[str]:
        """Load what has an entry point of this name. Returns the plugins' names."""
        entries = [
            entry
            for entry in transport_entry_points()
            if entry.name == wanted and not _disabled() & {entry.name, _dist_name(entry)}
        ]
        values = {(_dist_name(entry), entry.value) for entry in entries}
        if len(values) > 1:
            names = " and ".join(sorted(f"{dist} ({value})" for dist, value in values))
            raise PluginConflict(
                f"{wanted!r} is claimed by {names}; uninstall one of them, or SPANWIRE_DISABLE_PLUGINS"
            )
        for entry in entries:
            self._load(entry)
        return [f"{dist} ({value})" for dist, value in values]

    def _unknown(self, wanted: str, endpoint: Endpoint) -> ConfigurationError:
        kind = "transport" if endpoint.transport is not None else "URL scheme"
        names = sorted({entry.name for entry in transport_entry_points()} | set(self._by_name) | set(self._by_scheme))
        extra = _EXTRAS.get(wanted)
        close = _close_to(wanted, names)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        if extra is not None and wanted not in names:
            hint = f": pip install 'spanwire[{extra}]'"
        return ConfigurationError(
            f"no installed transport serves the {kind} {wanted!r}{hint}; installed: {', '.join(names) or 'none'}",
            endpoint=endpoint.address,
        )

    def transport(self, spec: TransportSpec) -> Transport:
        """The one transport object of a spec.

        Raises:
            PluginError: its factory failed, or made something else.
        """
        with self._lock:
            found = self._transports.get(spec.name)
            if found is None:
                try:
                    with _loading:  # it may import too
                        found = spec.factory()
                except ConfigurationError:
                    raise
                except Exception as error:
                    raise PluginError(f"{self.owner(spec)} cannot be made: {type(error).__name__}: {error}") from error
                if not isinstance(found, Transport):
                    raise PluginError(
                        f"{self.owner(spec)}: its factory made {found!r:.60}, which is no Transport (expect, key, connect)"
                    )
                self._transports[spec.name] = found
            return found

    def key_for(self, endpoint: Endpoint, spec: TransportSpec) -> object:
        """What an endpoint's connections are kept by.

        Raises:
            ConfigurationError: the transport refuses the endpoint.
            PluginError: its ``key()`` failed, or gave something that cannot be a key.
        """
        try:
            key = self.transport(spec).key(endpoint)
            hash(key)
            return key
        except ConfigurationError:
            raise
        except Exception as error:
            raise PluginError(
                f"key() of {self.owner(spec)} failed with {type(error).__name__}", endpoint=endpoint.address
            ) from error

    def dialect_for(self, endpoint: Endpoint, spec: TransportSpec, *, session: bool = False) -> Dialect | None:
        """The dialect of an endpoint on its transport, for calls or for a session; None for a transport without any.

        Raises:
            ConfigurationError: an unknown dialect, or options that neither transport nor dialect understands.
        """
        mine = {name: dialect for (transport, name), (dialect, _) in self._dialects.items() if transport == spec.name}
        found: Dialect | None = None
        if endpoint.dialect is not None:
            found = mine.get(endpoint.dialect)
            if found is None:
                close = _close_to(endpoint.dialect, mine)
                hint = f" (did you mean {close[0]!r}?)" if close else ""
                raise ConfigurationError(
                    f"transport {spec.name!r} has no dialect {endpoint.dialect!r}{hint}; it has: {', '.join(sorted(mine)) or 'none'}",
                    endpoint=endpoint.address,
                )
        elif mine:
            found = next(
                (
                    dialect
                    for dialect in mine.values()
                    if dialect.default and ("session" in dialect.operations) is session
                ),
                None,
            )
        understood = spec.options | (found.options if found is not None else frozenset())
        for name in endpoint.options:
            if name not in understood:
                close = _close_to(name, understood)
                hint = f"did you mean {close[0]!r}?" if close else f"it has: {', '.join(sorted(understood)) or 'none'}"
                raise ConfigurationError(
                    f"Endpoint.options: transport {spec.name!r} has no option {name!r}; {hint}",
                    endpoint=endpoint.address,
                )
        return found

    def codec_named(self, transport: str, dialect: str) -> Any:
        """The codec of a dialect by the names that were written down; None if it is not installed, or broken."""
        with self._lock:
            if (transport, dialect) not in self._dialects:
                try:
                    self._load_for(transport)
                except (PluginError, PluginConflict) as error:
                    _log.warning("plugin left out: %s", error)
            found = self._dialects.get((transport, dialect))
            return None if found is None else found[0].codec

    def codecs_of(self, transport: str) -> dict[str, Any]:
        """The codecs of all dialects of a transport that was loaded, by name."""
        with self._lock:
            return {name: dialect.codec for (of, name), (dialect, _) in self._dialects.items() if of == transport}

    def after_fork(self) -> None:
        """In the child: a lock that another thread of the parent held would never be freed."""
        self._lock = threading.RLock()

    # --- hooks for each call ----------------------------------------------------------------------------------------

    def request_metadata(self, call: Call, endpoint: Endpoint) -> Mapping[str, str]:
        """Headers that plugins add to this call.

        Raises:
            PluginConflict: two plugins set the same header.
            PluginError: a plugin raised, or gave something that is no header.
        """
        if not self._has_metadata:
            return {}
        merged: dict[str, str] = {}
        begin_ns = time.perf_counter_ns()
        try:
            answers = self._pm.hook.request_metadata(call=call, endpoint=endpoint)
        except Exception as error:
            who = self._who("request_metadata", error)
            raise PluginError(f"request_metadata() of {who} failed: {type(error).__name__}: {error}") from error
        if time.perf_counter_ns() - begin_ns > _SLOW_NS:
            self._say_slow("request_metadata", self._who("request_metadata"))
        for answer in answers:
            try:
                check_headers(answer, "request_metadata()")
            except ConfigurationError as error:
                raise PluginError(f"plugin {self._who('request_metadata')}: {error.message}") from error
            for name, value in answer.items():
                if merged.setdefault(name.lower(), value) != value:
                    raise PluginConflict(f"two plugins set the header {name.lower()!r} in request_metadata()")
        return merged

    def span_attributes(self, timeline: Timeline) -> Mapping[str, Any]:
        """Attributes that plugins add to the call's span. Never raises."""
        if not self._has_attributes:
            return {}
        merged: dict[str, Any] = {}
        begin_ns = time.perf_counter_ns()
        try:
            for answer in reversed(self._pm.hook.span_attributes(timeline=timeline)):  # pluggy asks the last one first
                merged.update(answer)
        except Exception as error:  # noqa: BLE001 - somebody else's code must not end a call
            _log.warning("span_attributes() of %s failed", self._who("span_attributes", error), exc_info=True)
        if time.perf_counter_ns() - begin_ns > _SLOW_NS:
            self._say_slow("span_attributes", self._who("span_attributes"))
        return merged

    def _who(self, hook: str, error: BaseException | None = None) -> str:
        """The plugins that have this hook; of those the one that an error came through."""
        found = getattr(self._pm.hook, hook).get_hookimpls()
        codes = set()
        trace = error.__traceback__ if error is not None else None
        while trace is not None:
            codes.add(trace.tb_frame.f_code)
            trace = trace.tb_next
        guilty = [one for one in found if getattr(one.function, "__code__", None) in codes]
        return " or ".join(one.plugin_name for one in guilty or found)

    def _say_slow(self, hook: str, who: str) -> None:
        """Once for each: a hook runs on the event loop, where every other call waits meanwhile."""
        if (hook, who) not in self._slow:
            self._slow.add((hook, who))
            _log.warning(
                "%s() of %s took more than %d ms on the event loop, which every call has to wait for; hand its work to a "
                "thread",
                hook,
                who,
                _SLOW_NS // 1_000_000,
            )

    @property
    def timing_readers(self) -> Readers:
        """What reads servers' own times out of answers: our tables, and those of the plugins that are loaded by now."""
        tables, compiled = self._timing_tables, self._timing_readers
        # Compared each time: a transport's plugin is loaded when its scheme is first used, and may bring tables.
        if compiled is None or compiled[0] is not tables:
            with _loading:
                from .timing import Readers  # with the first call that is read, not with `import spanwire`

                compiled = self._timing_readers = tables, Readers(tables)
        return compiled[1]

    def observe(self, timeline: Timeline) -> None:
        """Tell the observers that a call has ended. One that raises is logged and dropped."""
        for pair in self._observers:
            begin_ns = time.perf_counter_ns()
            try:
                pair[0].call_ended(timeline)
            except Exception:  # noqa: BLE001 - somebody else's code must not end a call
                if not _is_readable(timeline):  # which is no fault of who reads it
                    known = self._by_name.get(timeline.transport)
                    _log.warning(
                        "the timeline of a call over %s cannot be read", known[1] if known else "", exc_info=True
                    )
                    continue
                _log.warning("an observer of %s failed and is dropped", pair[1], exc_info=True)
                self._observers = tuple(other for other in self._observers if other is not pair)
            if time.perf_counter_ns() - begin_ns > _SLOW_NS:
                self._say_slow("call_ended", pair[1])

    def flush(self) -> None:
        """Have observers that keep something back write it out. Waits for them: not for an event loop's thread."""
        for observer, name in self._observers:
            flush = getattr(observer, "flush", None)
            if callable(flush):
                try:
                    flush()
                except Exception:  # noqa: BLE001 - somebody else's code must not end a call
                    _log.warning("an observer of %s could not be flushed", name, exc_info=True)

    @property
    def keeps_back(self) -> bool:
        """Whether an observer has something to :meth:`flush`."""
        return any(callable(getattr(observer, "flush", None)) for observer, _ in self._observers)

    @property
    def has_observers(self) -> bool:
        """Whether anybody is to be told."""
        return bool(self._observers)

    def describe(self) -> list[dict[str, Any]]:
        """What is installed, for ``spanwire transports``: loads everything, reports what is broken."""
        rows: dict[tuple[str, str], dict[str, Any]] = {}
        for entry in transport_entry_points():
            dist = entry.dist
            key = (_dist_name(entry), entry.value)
            row = rows.setdefault(
                key,
                {
                    "distribution": _dist_name(entry),
                    "version": dist.version if dist is not None else None,
                    "module": entry.value,
                    "entries": [],
                    "transports": [],
                    "status": "ok",
                },
            )
            row["entries"].append(entry.name)
            if _disabled() & {entry.name, _dist_name(entry)}:
                row["status"] = "disabled by SPANWIRE_DISABLE_PLUGINS"
                continue
            try:
                with self._lock:
                    self._load(entry)
            except ConfigurationError as error:
                row["status"] = str(error)
        for spec, owner in self._by_name.values():
            entry_row = {
                "name": spec.name,
                "schemes": list(spec.schemes),
                "capabilities": sorted(spec.capabilities),
                "contract": spec.contract,
                "dialects": sorted(name for transport, name in self._dialects if transport == spec.name),
            }
            for (dist_name, value), row in rows.items():
                if owner == f"{dist_name} ({value})":
                    row["transports"].append(entry_row)
                    break
            else:
                rows[owner, ""] = {
                    "distribution": owner,
                    "version": None,
                    "module": "",
                    "entries": [],
                    "transports": [entry_row],
                    "status": "ok",
                }
        return list(rows.values())


def _is_readable(timeline: Timeline) -> bool:
    """Not where a transport has marked something that is no time."""
    try:
        timeline.to_dict()
    except Exception:  # noqa: BLE001 - that is the question
        return False
    return True


#: Held while plugins are imported and taken in, and while the process forks: the child of a fork in the middle of another
#: thread's import would find a half-made module whose lock nobody holds any more.
_loading = threading.RLock()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_loading.acquire, after_in_parent=_loading.release, after_in_child=_loading.release)
