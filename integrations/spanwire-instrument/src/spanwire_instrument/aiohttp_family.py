"""aiohttp: a ``TraceConfig`` for a session of yours, and the same without a line of code.

::

    async with aiohttp.ClientSession(trace_configs=[trace_aiohttp()]) as session:
        ...

**How it sees.** The signals of a ``TraceConfig`` say where a connect stands; the frame that sends them says what is asked
for, and on which connection, which no signal does. The body is seen as it arrives: the reader of an answer that is watched
gets a class of ours, which keeps nothing and hands everything on. All that is read-only; where a release of aiohttp has
something else in its place, less is known of a call, and nothing breaks.

**Streams give their connection back.** A reader that stops at the terminal event and leaves would make aiohttp close the
connection, since the end of the message is unread. Where the answer is complete but for that, it is let go only when the
end has come, or a moment has passed. Nobody waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

from spanwire.bridges.aiohttp import SignalBridge
from spanwire.errors import ConfigurationError
from spanwire.manager import ConnectionManager
from spanwire.net.sockets import min_rtt_ns
from spanwire.timeline import Outcome
from spanwire.witness import TRACE_HEADERS, Witness, watching

from .drain import DRAIN_BYTES, DRAIN_S, WAIT_S, DrainBook
from .patches import Patches
from .recognise import Recognised, Rules, recognise
from .watched import Settings, endpoint_of

if TYPE_CHECKING:
    import aiohttp

__all__ = ["patch_aiohttp", "trace_aiohttp"]

_log = logging.getLogger("spanwire.instrument")
_now = time.perf_counter_ns


def trace_aiohttp(
    *, rules: Rules | None = None, manager: ConnectionManager | None = None, drain: bool = True
) -> aiohttp.TraceConfig:
    """A ``TraceConfig`` for ``aiohttp.ClientSession(trace_configs=[...])``, for any number of sessions.

    Args:
        rules: which requests are looked at, see :class:`Rules`.
        manager: whose telemetry, observers and tables are used; the process's default one if it is not given.
        drain: give connections back after streams.

    Raises:
        ConfigurationError: aiohttp is not installed.
    """
    try:
        import aiohttp
    except ImportError as error:
        raise ConfigurationError("aiohttp is not installed: pip install aiohttp") from error
    return _config_class(aiohttp)(Settings(rules=rules, manager=manager, drain=drain))  # type: ignore[no-any-return]


class _Call:
    """One request that is watched, up to the moment when its connection is somebody else's. Never raises."""

    __slots__ = (
        "_config",
        "_drained",
        "_framed",
        "_inside",
        "_left",
        "_loop",
        "_original",
        "_reader",
        "_timer",
        "begin_s",
        "bridge",
        "connection",
        "done",
        "draining",
        "origin",
        "proxied",
        "socket",
        "waiter",
        "witness",
    )

    def __init__(self, config: Any, asked: Recognised, url: Any, headers: dict[str, str]) -> None:
        manager = config.settings.manager
        more: dict[str, Any] = {}
        if manager is not None:
            more = {"telemetry": manager.telemetry, "registry": manager.registry}
        scheme, host = url.scheme, url.raw_host or ""
        port = url.explicit_port
        self.done = True  # for as long as there is no witness
        self.origin = (host, port or (443 if scheme == "https" else 80))
        self.witness = Witness.begin(
            endpoint_of(scheme, host, port),
            operation=asked.operation,
            model=asked.model,
            streamed=asked.streamed,
            body_params=asked.params,
            provider=asked.provider,
            transport="aiohttp",
            request_headers=headers,
            **more,
        )
        self.bridge = SignalBridge(self.witness.marks, secure=scheme == "https")
        self.proxied = False
        self.socket: Any = None
        self.connection: Any = None
        self.done = False
        self.draining = False
        self.begin_s = 0.0
        self.waiter: asyncio.Future[None] | None = None
        self._config = config
        self._inside: Any = None
        self._reader = 0
        self._framed = False
        self._left = DRAIN_BYTES
        self._loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self._original: Callable[[], Any] | None = None
        self._timer: asyncio.TimerHandle | None = None

    # --- the request ------------------------------------------------------------------------------------------------

    def enter(self) -> None:
        """What is made from here to :meth:`leave`, in this task, is the call's."""
        inside = contextlib.ExitStack()
        inside.enter_context(self.witness.current())
        inside.callback(_sending.reset, _sending.set(self))
        self._inside = inside

    def leave(self) -> None:
        """A second call is harmless."""
        inside, self._inside = self._inside, None
        if inside is not None:
            try:
                inside.close()
            except Exception:  # noqa: BLE001 - in another context: it is left there
                _log.debug("a context could not be left", exc_info=True)

    def goes_out(self, frames: Any) -> None:
        """The head of the request is sent. ``frames`` lead to who sends it, and on which connection."""
        protocol = None
        for _ in range(8):
            if frames is None:
                break
            found = frames.f_locals
            connection = found.get("conn")
            if connection is not None and hasattr(connection, "protocol"):
                protocol = connection.protocol
                transport = connection.transport
                self.socket = transport.get_extra_info("socket") if transport is not None else None
                self.proxied = getattr(found.get("self"), "proxy", None) is not None
                break
            frames = frames.f_back
        self.bridge.carried_by(protocol, _now(), proxied=self.proxied)

    # --- the answer -------------------------------------------------------------------------------------------------

    def answered(self, response: Any, reader_class: type[Any]) -> None:
        """The head of the answer is there, and perhaps all of it."""
        at_ns = _now()
        witness, content = self.witness, response.content
        self.bridge.answered(at_ns)
        if self.socket is not None and not self.proxied:
            witness.marks.rtt_ns = min_rtt_ns(self.socket)
        headers: dict[str, str] = {}
        for name, value in response.headers.items():
            name = name.lower()
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
        closes = "close" in headers.get("connection", "").lower()
        self._framed = not closes and ("transfer-encoding" in headers or "content-length" in headers)
        if (
            getattr(content, "total_compressed_bytes", 0) is not None
        ):  # None: nobody decodes. An old release always does
            headers.pop("content-encoding", None)
        witness.head(response.status, headers, at_ns)
        assert witness.along is not None
        buffered = b"".join(getattr(content, "_buffer", ()))  # what came with the head; nobody has read it yet
        if buffered:
            witness.along.feed(buffered, at_ns)
        if content.is_eof() or type(content) not in reader_class.__bases__:
            self.end("completed", None, at_ns)
            return
        if content.exception() is not None:
            self.broke(content.exception())
            return
        self._reader = id(content)
        _reading[self._reader] = self
        try:
            content.__class__ = reader_class
        except TypeError:
            del _reading[self._reader]
            self.end("completed", None, at_ns)
            return
        self.connection = response.connection
        if self.connection is not None:
            self.connection.release = self._released
            self.connection.close = self._closed

    def fed(self, data: bytes) -> None:
        """Bytes of the body have arrived, and are with their reader."""
        along = self.witness.along
        if self.draining:
            self._left -= len(data)
            if self._left < 0:
                self.stop_draining(found=False)
        elif along is not None and not self.done:
            at_ns = _now()
            along.feed(data, at_ns)
            if along.done_ns:  # but first whoever waits for this
                self._loop.call_soon(self.end, "completed", None, at_ns)

    def eof(self) -> None:
        """The message has ended."""
        if not self.done:
            self.end("completed")

    def broke(self, error: BaseException | None) -> None:
        """The connection, or the library's reading from it, has failed."""
        if self.draining:
            self.stop_draining(found=False)
        elif isinstance(error, asyncio.CancelledError):
            self.end("cancelled")
        else:
            self.end("timeout" if isinstance(error, TimeoutError) else "error", error)
        self._forget()

    def end(self, outcome: Outcome, error: BaseException | None = None, at_ns: int = 0) -> None:
        """Close the books. A second call is ignored."""
        if not self.done:
            self.done = True
            self.bridge.stop(_now())
            self.witness.end(outcome, error, at_ns)

    def give_up(self) -> None:
        """Something of ours is broken: inside of an ``except``."""
        _log.warning("an answer cannot be watched any more", exc_info=True)
        self._forget()

    def __del__(self) -> None:
        if not getattr(self, "done", True):  # its request never came to anything that anybody was told of
            self.witness.abandon()

    def _forget(self) -> None:
        if self._reader:
            _reading.pop(self._reader, None)
            self._reader = 0

    # --- the connection ---------------------------------------------------------------------------------------------

    def _released(self) -> Any:
        return self._let_go("release")

    def _closed(self) -> Any:
        return self._let_go("close")

    def _let_go(self, how: str) -> Any:
        """In the place of ``Connection.release()`` and ``close()``."""
        connection, self.connection = self.connection, None
        if connection is None:  # cannot be: both are taken off below
            return None
        vars(connection).pop("release", None)
        vars(connection).pop("close", None)
        original: Callable[[], Any] = getattr(connection, how)
        try:
            if self._left_by_caller(connection):
                self._original = original
                self._drain(connection)
                return None
        except Exception:  # noqa: BLE001 - the connection goes as it would have gone
            _log.warning("a connection cannot be drained", exc_info=True)
            self.stop_draining(found=None)
        self._forget()
        return original()

    def _left_by_caller(self, connection: Any) -> bool:
        """Close the books; whether the connection is worth a drain."""
        protocol = connection.protocol
        content = getattr(protocol, "_payload", None)
        if self._reader == 0 or content is None or id(content) != self._reader or content.is_eof():
            self.end("completed" if self.witness.complete else "closed_by_caller")
            return False
        if content.exception() is None:  # not by its methods: the response is being collected
            if not self.done:
                self.done = True
                self.bridge.stop(_now())
                self.witness.abandon()
            return False
        raised = sys.exc_info()[1]
        if isinstance(raised, asyncio.CancelledError):
            self.end("cancelled")
        elif isinstance(raised, TimeoutError):
            self.end("timeout", raised)
        else:
            self.end("closed_by_caller")
        config = self._config
        return bool(
            config.settings.drain
            and self._framed
            and self.witness.complete
            and protocol.is_connected()
            and not getattr(protocol, "_reading_paused", False)
            and config.book.wanted(self.origin)
        )

    def _drain(self, connection: Any) -> None:
        self.draining = True
        self.begin_s = time.monotonic()
        self.waiter = self._loop.create_future()
        self._timer = self._loop.call_later(DRAIN_S, self._overdue)
        self._config.drains[self] = self.origin
        closed = connection.protocol.closed  # a session that is closed closes it, and tells no reader
        if closed is not None:
            closed.add_done_callback(self._lost)

    def _overdue(self) -> None:
        self.stop_draining(found=False)

    def _lost(self, future: asyncio.Future[Any]) -> None:
        if not future.cancelled():
            future.exception()  # else asyncio complains that nobody has asked
        self.stop_draining(found=False)

    def stop_draining(self, *, found: bool | None) -> None:
        """The end was found, or will not be. A second call is harmless."""
        self._forget()
        if not self.draining:
            return
        self.draining = False
        self._config.drains.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)
        book: DrainBook = self._config.book
        if found:
            book.ended(self.origin, time.monotonic() - self.begin_s)
        elif found is not None:
            book.missed(self.origin)
        original, self._original = self._original, None
        if original is not None:
            if found:
                original.__self__.release()  # type: ignore[attr-defined]
            else:
                original.__self__.close()  # type: ignore[attr-defined]


#: The call whose request is being sent in this context.
_sending: ContextVar[_Call | None] = ContextVar("spanwire_aiohttp", default=None)
#: By ``id()`` of the reader, which has no room for an attribute. Each leaves with its call's end.
_reading: dict[int, _Call] = {}


class _Once(list[Any]):
    """Configurations of a session for one request; ``before``: those that it has."""

    __slots__ = ("before",)
    before: list[Any]


@lru_cache(maxsize=4)
def _reader_class(aiohttp: ModuleType) -> type[Any]:
    base: type[Any] = aiohttp.StreamReader

    class Reader(base):  # type: ignore[misc]
        __slots__ = ()

        def feed_data(self, data: bytes, *args: Any) -> Any:
            call = _reading.get(id(self))
            if call is None:
                return super().feed_data(data, *args)
            done = False if call.draining else super().feed_data(data, *args)
            try:
                call.fed(data)
            except Exception:  # noqa: BLE001 - the answer goes on without us
                call.give_up()
            return done

        def feed_eof(self) -> None:
            call = _reading.get(id(self))
            if call is not None:
                try:
                    call.eof()
                except Exception:  # noqa: BLE001 - as above
                    call.give_up()
            super().feed_eof()
            if call is not None:
                call.stop_draining(found=True)

        def set_exception(self, exc: BaseException, *args: Any) -> None:
            call = _reading.get(id(self))
            super().set_exception(exc, *args)
            if call is not None and not _is_by_caller(exc):
                try:
                    call.broke(exc)
                except Exception:  # noqa: BLE001 - as above
                    call.give_up()

        def __del__(self) -> None:
            _reading.pop(id(self), None)

    Reader.__name__ = base.__name__  # what it is to everybody else
    Reader.__qualname__ = base.__qualname__
    Reader.__module__ = base.__module__
    return Reader


def _is_by_caller(error: BaseException) -> bool:
    """What aiohttp leaves in a reader whose response was released or closed."""
    return type(error).__name__ == "ClientConnectionError" and str(error) == "Connection closed"


def _body_of(data: Any) -> tuple[bytes | None, str]:
    """The bytes, if they are there as a whole, and the type that aiohttp will give them."""
    value = getattr(data, "_value", data)
    content_type = str(getattr(data, "content_type", "") or "")
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value), content_type
    if isinstance(value, str):
        return value.encode(), content_type
    return None, content_type


@lru_cache(maxsize=4)
def _config_class(aiohttp: ModuleType) -> type[Any]:
    reader_class = _reader_class(aiohttp)

    class SpanwireTrace(aiohttp.TraceConfig):  # type: ignore[misc, name-defined]
        """See :func:`trace_aiohttp`. The context of each request is its :class:`_Call`, or None."""

        def __init__(self, settings: Settings) -> None:
            super().__init__()
            self.settings = settings
            self.book = DrainBook()
            self.drains: dict[_Call, Any] = {}
            self.on_request_start.append(_guarded(self._start))
            self.on_connection_queued_start.append(_signal(lambda call, _: call.bridge.queued(_now())))
            self.on_connection_queued_end.append(_signal(lambda call, _: call.bridge.admitted(_now())))
            self.on_connection_reuseconn.append(_signal(lambda call, _: call.bridge.reuses()))
            self.on_connection_create_start.append(_signal(lambda call, _: call.bridge.create_begins(_now())))
            self.on_connection_create_end.append(_signal(lambda call, _: call.bridge.create_ends(_now())))
            self.on_dns_resolvehost_start.append(_signal(lambda call, _: call.bridge.dns_begins(_now())))
            self.on_dns_resolvehost_end.append(_signal(lambda call, _: call.bridge.dns_ends(_now())))
            self.on_request_headers_sent.append(_signal(lambda call, _: call.goes_out(sys._getframe(3))))
            self.on_request_chunk_sent.append(_signal(lambda call, _: call.bridge.sent(_now())))
            self.on_request_end.append(_signal(self._end))
            self.on_request_exception.append(_signal(self._exception))

        def trace_config_ctx(self, trace_request_ctx: Any = None) -> Any:
            try:
                return self._begin(sys._getframe(1).f_locals)
            except Exception:  # noqa: BLE001 - the call goes on without us
                _log.warning("a request cannot be watched", exc_info=True)
                return None

        def _begin(self, asking: dict[str, Any]) -> _Call | None:
            """``asking``: what ``ClientSession._request`` works with."""
            session, url, method = asking.get("self"), asking.get("url"), asking.get("method")
            configs = getattr(session, "_trace_configs", None)
            if type(configs) is _Once:
                session._trace_configs = configs.before  # type: ignore[union-attr]
            if method != "POST" or url is None or watching.get() is not None:
                return None
            rules = self.settings.rules
            if rules.api(url.path) is None:
                return None
            body, content_type = _body_of(asking.get("data"))
            headers = asking["headers"]
            content_type = headers.get("Content-Type", content_type)
            asked = recognise(method, url.raw_host or "", url.path, content_type, body, rules)
            if asked is None:
                return None
            return _Call(self, asked, url, {name.lower(): value for name, value in headers.items()})

        async def _start(self, session: Any, call: _Call | None, params: Any) -> None:
            if call is None:
                return
            try:
                call.witness.handed_over(_now())
                if self.drains:
                    await self._wait(call)
                present = {name.lower() for name in params.headers}
                if TRACE_HEADERS.isdisjoint(present):
                    params.headers.update(call.witness.headers(present))
                call.enter()
            except asyncio.CancelledError:  # the library tells only those that have heard of the start to its end
                call.end("cancelled")
                raise

        async def _wait(self, call: _Call) -> None:
            """For a connection that is about to come back."""
            waiters = [
                drain.waiter
                for drain, origin in list(self.drains.items())
                if origin == call.origin and drain._loop is call._loop and drain.waiter is not None
            ]
            if waiters and self.book.worth_waiting(call.origin):
                begin_ns = _now()
                await asyncio.wait(waiters, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
                call.witness.marks.parts.append(("local", begin_ns, _now()))

        @staticmethod
        def _end(call: _Call, params: Any) -> None:
            call.leave()
            call.answered(params.response, reader_class)

        @staticmethod
        def _exception(call: _Call, params: Any) -> None:
            call.leave()
            error = params.exception
            status, headers = getattr(error, "status", None), getattr(error, "headers", None)
            if isinstance(status, int) and status >= 400 and headers is not None:
                call.witness.head(status, {name.lower(): value for name, value in headers.items()}, _now())
            call.broke(error)

    return SpanwireTrace


def _signal(function: Callable[[_Call, Any], object]) -> Callable[..., Coroutine[Any, Any, None]]:
    async def receive(_session: Any, call: _Call | None, params: Any) -> None:
        if call is not None:
            try:
                function(call, params)
            except Exception:  # noqa: BLE001 - the call goes on without us
                _log.warning("a request cannot be watched any more", exc_info=True)

    return receive


def _guarded(function: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., Coroutine[Any, Any, None]]:
    async def receive(session: Any, call: _Call | None, params: Any) -> None:
        try:
            await function(session, call, params)
        except Exception:  # noqa: BLE001 - as above
            _log.warning("a request cannot be watched", exc_info=True)

    return receive


# ----------------------------------------------------------------------------------------------------- without a line of code


def patch_aiohttp(aiohttp: ModuleType, patches: Patches, settings: Settings) -> None:
    """Sessions that are there already, and new ones: their requests that look like inference get our configuration."""
    config_class = _config_class(aiohttp)
    config = config_class(settings)
    config.freeze()

    async def watched(original: Any, session: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = session._trace_configs
        once = _Once([config, *before])
        once.before = before
        # Taken off again by `_begin`, which runs before anything is awaited for: no other request sees it.
        session._trace_configs = once
        try:
            return await original(session, *args, **kwargs)
        finally:
            if session._trace_configs is once:
                session._trace_configs = before

    def request(original: Any) -> Any:
        def _request(self: Any, method: Any, str_or_url: Any, *args: Any, **kwargs: Any) -> Any:
            if (
                method not in ("POST", "post")
                or not patches.on
                or not _seems_inference(str_or_url, self, settings.rules)
                or watching.get() is not None
                or any(isinstance(one, config_class) for one in self._trace_configs)
            ):
                return original(self, method, str_or_url, *args, **kwargs)
            return watched(original, self, (method, str_or_url, *args), kwargs)

        return _request

    def connected(original: Any) -> Any:
        def made(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            call = _sending.get()
            if call is not None:  # TCP is connected, in the context of whoever has asked for it
                call.bridge.tls_begins(_now())

        return made

    from aiohttp.client_proto import ResponseHandler

    patches.replace(aiohttp.ClientSession, "_request", request)
    patches.replace(ResponseHandler, "__init__", connected)


def _seems_inference(asked: Any, session: Any, rules: Rules) -> bool:
    """By the end of its address, before the library has looked at it: cheap, since every POST comes here."""
    if isinstance(asked, str):
        url, relative = asked, "://" not in asked
        for end in "?#":
            cut = url.find(end)
            if cut >= 0:
                url = url[:cut]
    else:
        url, relative = str(getattr(asked, "raw_path", "")), not getattr(asked, "absolute", True)
    if relative:  # on the session's own base, which ends with a slash
        url = f"{getattr(session, '_base_url', None) or '/'}{url}"
    if not rules.paths:  # the last two steps are all that is looked at
        url = url[max(url.rfind("/", 0, url.rfind("/")), 0) :]
    return rules.api(url) is not None
