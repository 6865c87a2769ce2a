"""httpx and httpx2 without a line of code: their own transports, in clients that are there already and in new ones.

The methods of ``HTTPTransport`` and ``AsyncHTTPTransport`` are replaced, so it does not matter who has made the client,
when, and from which subclass. A request that looks like inference goes through a transport of :mod:`.httpx_family`, one
for each transport of the library; every other one takes the way that it took, after one or two comparisons.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary, ref

from spanwire.bridges.httpcore import is_watched
from spanwire.witness import watching

from .httpx_family import make
from .patches import Patches
from .watched import Settings

__all__ = ["patch_httpx"]


class _Inner:
    """The library's transport as it is without us. Not kept alive: ours is kept for as long as that one lives."""

    __slots__ = ("_call", "_transport")

    def __init__(self, transport: Any, call: Callable[[Any, Any], Any]) -> None:
        self._transport = ref(transport)
        self._call = call

    def handle_request(self, request: Any) -> Any:
        return self._call(self._transport(), request)

    handle_async_request = handle_request  # its result is awaited


class _Around:
    """Our transports, by the library's."""

    __slots__ = ("_call", "_made", "_make", "settings")

    def __init__(self, made_by: type[Any], call: Callable[[Any, Any], Any], settings: Settings) -> None:
        self._make = made_by
        self._call = call
        self.settings = settings
        self._made: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def of(self, transport: Any) -> Any:
        found = self._made.get(transport)
        if found is None:
            # No lock, which a fork might find held: of two threads at once one has made it in vain.
            found = self._made.setdefault(transport, self._make(_Inner(transport, self._call), self.settings))
        return found

    def drains(self, transport: Any) -> Any:
        """What still reads from this transport's connections, None if nothing ever did."""
        found = self._made.get(transport)
        return None if found is None else found._drains

    def wants(self, request: Any) -> bool:
        """Whether to look at a POST more closely. Not if a transport of ours, or spanwire itself, does so above."""
        return (
            self.settings.rules.api(request.url.path) is not None
            and watching.get() is None
            and not is_watched(request.extensions)
        )


def patch_httpx(hx: ModuleType, patches: Patches, settings: Settings) -> None:
    """Replace what is to be replaced in ``httpx`` or ``httpx2``."""
    family = make(hx)
    _patch_sync(hx.HTTPTransport, family.Transport, patches, settings)
    _patch_async(hx.AsyncHTTPTransport, family.AsyncTransport, patches, settings)


def _patch_sync(cls: Any, ours: type[Any], patches: Patches, settings: Settings) -> None:
    around = _Around(ours, cls.handle_request, settings)

    def handle_request(original: Any) -> Any:
        def handle_request(self: Any, request: Any) -> Any:
            if request.method != "POST" or not patches.on or not around.wants(request):
                return original(self, request)
            return around.of(self).handle_request(request)

        return handle_request

    def before(original: Any) -> Any:
        def close(self: Any, *args: Any) -> Any:
            drains = around.drains(self)
            if drains is not None:
                drains.close()
            return original(self, *args)

        return close

    patches.replace(cls, "handle_request", handle_request)
    patches.replace(cls, "close", before)
    patches.replace(cls, "__exit__", before)


def _patch_async(cls: Any, ours: type[Any], patches: Patches, settings: Settings) -> None:
    around = _Around(ours, cls.handle_async_request, settings)

    def handle_async_request(original: Any) -> Any:
        async def handle_async_request(self: Any, request: Any) -> Any:
            if request.method != "POST" or not patches.on or not around.wants(request):
                return await original(self, request)
            return await around.of(self).handle_async_request(request)

        return handle_async_request

    def before(original: Any) -> Any:
        async def aclose(self: Any, *args: Any) -> Any:
            drains = around.drains(self)
            if drains is not None:
                await drains.aclose()
            return await original(self, *args)

        return aclose

    patches.replace(cls, "handle_async_request", handle_async_request)
    patches.replace(cls, "aclose", before)
    patches.replace(cls, "__aexit__", before)
