"""All hooks on one page. Synchronous, called at set-up or once for each call, never for each chunk.

Write a plugin as a module or object with functions of these names, marked ``@spanwire.hookimpl``, and name it in the
entry-point group ``spanwire.transports`` (one entry for each scheme or transport name, loaded when it is first used) or
``spanwire.plugins`` (loaded with the first manager). Without packaging: ``ConnectionManager(plugins=[obj])``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import pluggy

if TYPE_CHECKING:
    from .calls import Call
    from .endpoint import Endpoint
    from .timeline import Timeline
    from .timing import TimingReader
    from .transport import Dialect, TransportSpec

__all__ = ["PROJECT", "Observer", "hookimpl", "hookspec"]

PROJECT = "spanwire"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class Observer(Protocol):
    """Told about every call when it has ended. If it has a ``flush()`` too, that is called, on another thread, when the
    manager is closed."""

    def call_ended(self, timeline: Timeline) -> None:
        """Called on the call's loop, so be quick. An observer that raises is logged and dropped."""
        ...


@hookspec
def register_transports() -> Sequence[TransportSpec]:
    """Transports that this plugin brings. A name or scheme that is taken is a ``PluginConflict``."""
    return ()


@hookspec
def register_dialects() -> Sequence[Dialect]:
    """Message schemas that this plugin brings. A name that is taken on that transport is a ``PluginConflict``."""
    return ()


@hookspec
def register_timing_readers() -> Sequence[TimingReader]:
    """Tables of what servers say of their own time. At a path that two tables have, ours too, the last one counts.

    One that raises, or gives something else, is logged and left out; the plugin's other hooks stay.
    """
    return ()


@hookspec
def register_observers() -> Sequence[Observer]:
    """Objects that are told about every call when it has ended."""
    return ()


@hookspec
def request_metadata(call: Call, endpoint: Endpoint) -> Mapping[str, str]:  # type: ignore[empty-body]
    """Headers to send with this call. Merged over all plugins; two that set the same header are an error."""


@hookspec
def span_attributes(timeline: Timeline) -> Mapping[str, str | bool | int | float]:  # type: ignore[empty-body]
    """Attributes to set on the call's span when it ends. Merged; a later plugin wins."""
