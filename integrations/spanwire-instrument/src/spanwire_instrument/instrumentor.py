"""Everything without a line of code: ``instrument()`` and ``uninstrument()``, and the same for OpenTelemetry.

::

    import spanwire_instrument

    spanwire_instrument.instrument()  # and the agent goes on as it is

    $ opentelemetry-instrument python agent.py  # or not even that

Libraries that are there are patched at once, others when they are imported. Clients that were made before are seen, too.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from spanwire.errors import ConfigurationError
from spanwire.manager import ConnectionManager
from spanwire.witness import prepare

from .patches import ImportHook, Patches, run_hook
from .recognise import DEFAULT_RULES, Rules
from .watched import Settings

__all__ = ["LIBRARIES", "SpanwireInstrumentor", "instrument", "is_instrumented", "uninstrument"]

Patch = Callable[[ModuleType, Patches, Settings], None]


def _httpx(module: ModuleType, patches: Patches, settings: Settings) -> None:
    from .zero_httpx import patch_httpx

    if module.HTTPTransport not in _seen:  # `alias_httpx()` makes one of the two
        _seen.append(module.HTTPTransport)
        patch_httpx(module, patches, settings)


def _aiohttp(module: ModuleType, patches: Patches, settings: Settings) -> None:
    from .aiohttp_family import patch_aiohttp

    patch_aiohttp(module, patches, settings)


def _websockets(module: ModuleType, patches: Patches, settings: Settings) -> None:
    from .websockets_family import patch_websockets

    patch_websockets(module, patches, settings)


def _grpc(module: ModuleType, patches: Patches, settings: Settings) -> None:
    from .grpc_family import patch_grpc

    patch_grpc(module, patches, settings)


#: By the module whose import makes it possible: the library's name, and what patches it.
_PATCHES: Mapping[str, tuple[str, Patch]] = {
    "httpx": ("httpx", _httpx),
    "httpx2": ("httpx2", _httpx),
    "aiohttp": ("aiohttp", _aiohttp),
    "websockets.asyncio.client": ("websockets", _websockets),
    "grpc.aio": ("grpc", _grpc),
}
#: What :func:`instrument` knows.
LIBRARIES = tuple(name for name, _ in _PATCHES.values())

_lock = threading.RLock()
_patches: Patches | None = None
_hook: ImportHook | None = None
_settings = Settings()
_seen: list[Any] = []


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()  # a thread that the child does not have may have held it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def instrument(
    *,
    rules: Rules | None = None,
    manager: ConnectionManager | None = None,
    drain: bool = True,
    libraries: Iterable[str] = LIBRARIES,
) -> None:
    """Watch the inference requests of every client in this process, and give connections back after streams.

    May be called from any thread, at any time. A second call changes the settings, and nothing else.

    Args:
        rules: which requests are looked at, see :class:`Rules`.
        manager: whose telemetry, observers and tables are used; the process's default one if it is not given.
        drain: give connections back after streams.
        libraries: only these of ``httpx``, ``httpx2``, ``aiohttp``, ``websockets``, ``grpc``. Fixed by the first call.

    Raises:
        ConfigurationError: an unknown library. What goes wrong with a known one is logged.
    """
    global _patches, _hook
    wanted = {libraries} if isinstance(libraries, str) else set(libraries)
    unknown = sorted(str(name) for name in wanted.difference(LIBRARIES))
    if unknown:
        raise ConfigurationError(
            f"instrument(libraries=...): {', '.join(unknown)[:80]} is unknown; known are {', '.join(LIBRARIES)}"
        )
    with _lock:
        _settings.rules, _settings.manager, _settings.drain = rules or DEFAULT_RULES, manager, drain
        if _patches is not None:
            return
        patches = _patches = Patches()

        def patched(patch: Patch) -> Callable[[ModuleType], None]:
            def hook(module: ModuleType) -> None:
                with _lock:
                    if patches.on:
                        patch(module, patches, _settings)
                        prepare()  # with an import that takes its time anyway, and not in the first call

            return hook

        hooks = {module: patched(patch) for module, (name, patch) in _PATCHES.items() if name in wanted}
        _hook = ImportHook(hooks)
        _hook.install()
        for name, hook in hooks.items():
            module = sys.modules.get(name)
            # One that is being imported by another thread is not complete; its end calls the hook.
            if module is not None and not getattr(module.__spec__, "_initializing", False):
                run_hook(hook, module)


def uninstrument() -> None:
    """Put back everything as it was. Calls that are under way are recorded to their end. A second call is harmless."""
    global _patches, _hook
    with _lock:
        if _hook is not None:
            _hook.remove()
            _hook = None
        if _patches is not None:
            _patches.undo()
            _patches = None
        _seen.clear()


def is_instrumented() -> bool:
    """Between :func:`instrument` and :func:`uninstrument`."""
    return _patches is not None


if TYPE_CHECKING:

    class _Base:
        def instrument(self, **kwargs: Any) -> None: ...
        def uninstrument(self, **kwargs: Any) -> None: ...

else:
    try:
        from opentelemetry.instrumentation.instrumentor import BaseInstrumentor as _Base
    except ImportError:

        class _Base:
            """What is needed of it where OpenTelemetry's package is not installed."""

            def instrument(self, **kwargs: Any) -> None:
                """See :func:`instrument`."""
                self._instrument(**kwargs)

            def uninstrument(self, **kwargs: Any) -> None:
                """See :func:`uninstrument`."""
                self._uninstrument(**kwargs)


class SpanwireInstrumentor(_Base):
    """For those who collect instrumentors of OpenTelemetry: ``SpanwireInstrumentor().instrument()``.

    It takes what :func:`instrument` takes, and ``tracer_provider`` and ``meter_provider``, for a manager of its own.
    """

    def instrumentation_dependencies(self) -> Collection[str]:
        """None: what is not there is not patched."""
        return ()

    def _instrument(self, **kwargs: Any) -> None:
        providers = {
            name: value for name in ("tracer_provider", "meter_provider") if (value := kwargs.get(name)) is not None
        }
        known = {name: kwargs[name] for name in ("rules", "manager", "drain", "libraries") if name in kwargs}
        if providers and known.get("manager") is None:
            from spanwire.telemetry import Telemetry

            known["manager"] = ConnectionManager(telemetry=Telemetry(**providers))
        instrument(**known)

    def _uninstrument(self, **kwargs: Any) -> None:
        uninstrument()
