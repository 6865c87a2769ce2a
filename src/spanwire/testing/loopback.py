"""The scripted loopback server: a thread, the record of what arrived, and the scripts. The wire is a plugin's part.

A part (entry-point group ``spanwire.loopback``) speaks one wire; it asks the :class:`Book` what to answer and tells it
what happened::

    your test or demo              LoopbackServer                  LoopbackPart (its own loop, in a daemon thread)
    ─────────────────              ──────────────                  ─────────────
    server.script(...)  ─────────► Book: scripts  ────────────────► script_for(request)
    server.requests     ◄───────── Book: what arrived ◄──────────── connected, arrived, ended, left, disconnected
    server.wait_for(...)           (a condition variable)
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

import msgspec

from ..endpoint import TLS, Endpoint
from ..errors import ConfigurationError, PluginError
from .reports import ServerTimes
from .script import Script
from .tls import ThrowAwayCA

__all__ = ["Answer", "Book", "ConfigurablePart", "Listener", "LoopbackPart", "LoopbackServer", "Request", "echo"]

_GROUP = "spanwire.loopback"
#: How long ``start`` and ``close`` wait for the server's thread, in seconds: both take milliseconds, so more is a bug.
_THREAD_S = 10.0
_ECHOED_WORDS = 12
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}

T = TypeVar("T")


class Request:
    """One call that arrived. Times are ns of ``time.perf_counter_ns()``, None for what has not happened.

    Attributes:
        method, path: as sent, the path without the query.
        query: what stood after ``?``, ``""`` for nothing.
        headers: names in lower case; repeated ones joined with ``", "``.
        raw: the bytes of the body.
        connection: number of the connection that it came on, counted from 1.
        arrived_ns: the whole request was here.
        queued_ns: its wait in the queue was over.
        prefilled_ns: the first piece of content was made; of an answer that is not streamed, nothing shows it.
        decoded_ns: the last piece of content so far was made.
        headers_ns: the first bytes of the answer were written.
        content_ns: the first piece of content, or the whole body, was written.
        ended_ns: the last byte of the answer was written: at the latest when the client reads it.
        left_ns: the client went away before that.
        dropped_ns: the script, or the server's end, cut the connection before that.
    """

    __slots__ = (
        "_body",
        "arrived_ns",
        "connection",
        "content_ns",
        "decoded_ns",
        "dropped_ns",
        "ended_ns",
        "headers",
        "headers_ns",
        "left_ns",
        "method",
        "path",
        "prefilled_ns",
        "query",
        "queued_ns",
        "raw",
    )

    def __init__(
        self, *, method: str, path: str, query: str, headers: Mapping[str, str], raw: bytes, connection: int
    ) -> None:
        self.method = method
        self.path = path
        self.query = query
        self.headers = headers
        self.raw = raw
        self.connection = connection
        self.arrived_ns = time.perf_counter_ns()
        self.queued_ns: int | None = None
        self.prefilled_ns: int | None = None
        self.decoded_ns: int | None = None
        self.headers_ns: int | None = None
        self.content_ns: int | None = None
        self.ended_ns: int | None = None
        self.left_ns: int | None = None
        self.dropped_ns: int | None = None

    @property
    def body(self) -> Any:
        """The body, parsed from JSON; None if it is empty or no JSON. Parsed anew each time."""
        try:
            return msgspec.json.decode(self.raw) if self.raw else None
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None

    @property
    def model(self) -> str | None:
        """The model that it asks for, or None."""
        body = self.body
        model = body.get("model") if isinstance(body, dict) else None
        return model if isinstance(model, str) else None

    @property
    def times(self) -> ServerTimes:
        """What the server measured of this call; the total up to now, or to the answer's end."""
        end_ns = self.ended_ns or time.perf_counter_ns()
        return ServerTimes(
            queue_s=_between_s(self.arrived_ns, self.queued_ns),
            prefill_s=_between_s(self.queued_ns, self.prefilled_ns),
            decode_s=_between_s(self.prefilled_ns, self.decoded_ns),
            total_s=_between_s(self.arrived_ns, end_ns),
        )

    @property
    def ended(self) -> bool:
        """The whole answer was written."""
        return self.ended_ns is not None

    @property
    def left(self) -> bool:
        """The client went away before the whole answer was written."""
        return self.left_ns is not None

    def __repr__(self) -> str:
        state = "left" if self.left else "dropped" if self.dropped_ns else "ended" if self.ended else "open"
        return f"Request({self.method} {self.path}, connection={self.connection}, {state})"


def _between_s(begin_ns: int | None, end_ns: int | None) -> float | None:
    return None if begin_ns is None or end_ns is None else (end_ns - begin_ns) / 1e9


#: What may be queued: a script, or a function that makes one for the request.
Answer = Script | Callable[[Request], Script]


def echo(request: Request) -> Script:
    """The default answer: a short sentence made of the last user message."""
    body = request.body
    messages = body.get("messages", body.get("input")) if isinstance(body, dict) else None
    if isinstance(messages, str):  # OpenAI's Responses take a text, too
        messages = [{"role": "user", "content": messages}]
    words: list[str] = []
    for message in reversed(messages if isinstance(messages, list) else []):
        if isinstance(message, dict) and message.get("role") == "user":
            words = _text(message.get("content")).split()
            break
    if not words:
        return Script.say("Hello from the loopback server.")
    more = "…" if len(words) > _ECHOED_WORDS else ""
    return Script.say(f"You said: {' '.join(words[:_ECHOED_WORDS])}{more}")


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return " ".join(p["text"] for p in parts if isinstance(p, dict) and isinstance(p.get("text"), str))


def _made(answer: Answer, request: Request) -> Script:
    script = answer if isinstance(answer, Script) else answer(request)
    if not isinstance(script, Script):
        raise ConfigurationError(f"a script's function must return a Script, not {script!r:.40}")
    return script


class _Queued:
    __slots__ = ("answer", "times", "used")

    def __init__(self, answer: Answer, times: int | None) -> None:
        self.answer = answer
        self.times = times
        self.used = 0


class Book:
    """What to answer and what arrived; shared by the server's thread and everybody else.

    Args:
        default: the answer to a call for which nothing is queued.
        keep: how many requests are kept; then the oldest is forgotten, and counted in ``forgotten``.
    """

    def __init__(self, *, default: Answer = echo, keep: int = 100_000) -> None:
        self.changed = threading.Condition()  # re-entrant: predicates read properties under it
        self.default = default
        self.requests: deque[Request] = deque(maxlen=keep)
        self.faults: deque[str] = deque(maxlen=1000)
        self.forgotten = 0
        self.connections = 0
        self.open_connections = 0
        self._next: deque[_Queued] = deque()
        self._by_model: dict[str, deque[_Queued]] = {}

    # --- for whoever scripts ----------------------------------------------------------------------------------------

    def script(self, answer: Answer, *, model: str | None = None, times: int | None = None) -> None:
        """See :meth:`LoopbackServer.script`."""
        if not isinstance(answer, Script) and not callable(answer):
            raise ConfigurationError(f"a script is a Script, or a function of the request, not {answer!r:.40}")
        if times is not None and (isinstance(times, bool) or not isinstance(times, int) or times < 1):
            raise ConfigurationError(f"script(times=...) must be a number from 1, or None, not {times!r:.40}")
        with self.changed:
            queue = self._next if model is None else self._by_model.setdefault(model, deque())
            queue.append(_Queued(answer, times))

    def clear(self) -> None:
        """Forget requests and faults; scripts, connections and their numbers stay."""
        with self.changed:
            self.requests.clear()
            self.faults.clear()
            self.forgotten = 0
            self.changed.notify_all()

    # --- for a part -------------------------------------------------------------------------------------------------

    def script_for(self, request: Request, model: str | None) -> Script:
        """The script of this call; takes it from its queue. What a user's function raises comes through."""
        with self.changed:
            queued = self._queued(model)
            if queued is not None:
                queued.used += 1
        return _made(self.default if queued is None else queued.answer, request)

    def canned_for(self, request: Request) -> Script | None:
        """For a request that the part itself does not understand, such as one of a dialect that it does not know: the
        script, if it brings bytes of its own (``body``, ``writes``). Else None, and the script stays where it is."""
        with self.changed:
            queued = self._queued(request.model)
            script = _made(self.default if queued is None else queued.answer, request)
            if script.body is None and script.writes is None:
                return None
            if queued is not None:
                queued.used += 1
            return script

    def _queued(self, model: str | None) -> _Queued | None:
        """What is next: of the model's own scripts, else of those for all; None where both are used up."""
        for queue in (self._by_model.get(model) if model is not None else None, self._next):
            while queue:
                first = queue[0]
                used_up = first.used >= first.times if first.times is not None else first.used > 0 and len(queue) > 1
                if not used_up:
                    return first
                queue.popleft()
        return None

    def models(self) -> list[str]:
        """Names of models that have scripts of their own."""
        with self.changed:
            return sorted(self._by_model)

    def connected(self) -> int:
        """A client has connected (with TLS: shaken hands). Returns the connection's number."""
        with self.changed:
            self.connections += 1
            self.open_connections += 1
            self.changed.notify_all()
            return self.connections

    def disconnected(self) -> None:
        """A connection is gone."""
        with self.changed:
            self.open_connections -= 1
            self.changed.notify_all()

    def arrived(self, request: Request) -> None:
        """A whole request is here."""
        with self.changed:
            self.forgotten += len(self.requests) == self.requests.maxlen
            self.requests.append(request)
            self.changed.notify_all()

    def wrote(self, request: Request, *, headers: bool = False, content: bool = False) -> None:
        """Headers or content of the answer are being written; only the first time counts."""
        now = time.perf_counter_ns()
        with self.changed:
            if headers and request.headers_ns is None:
                request.headers_ns = now
            if content and request.content_ns is None:
                request.content_ns = now
            self.changed.notify_all()

    def ended(self, request: Request) -> None:
        """The whole answer was written."""
        with self.changed:
            request.ended_ns = time.perf_counter_ns()
            self.changed.notify_all()

    def left(self, request: Request) -> None:
        """The client went away before the answer's end."""
        with self.changed:
            request.left_ns = time.perf_counter_ns()
            self.changed.notify_all()

    def dropped(self, request: Request) -> None:
        """We cut the connection before the answer's end."""
        with self.changed:
            request.dropped_ns = time.perf_counter_ns()
            self.changed.notify_all()

    def fault(self, words: str) -> None:
        """A client broke the rules of the wire, or the server itself failed."""
        with self.changed:
            self.faults.append(words)
            self.changed.notify_all()


class Listener(Protocol):
    """A part that is running. All but ``address`` is called on its loop."""

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port that it listens on; None for a unix socket."""
        ...

    def disconnect(self, *, reset: bool) -> None:
        """Close every connection now, in order or with RST; go on listening."""
        ...

    async def aclose(self) -> None:
        """Stop listening, close every connection, end every task."""
        ...


@runtime_checkable
class LoopbackPart(Protocol):
    """What a plugin names in the entry-point group ``spanwire.loopback``: a server for its wire."""

    @property
    def name(self) -> str:
        """The entry point's name, as in ``LoopbackServer(part=...)``."""
        ...

    @property
    def alpn(self) -> Sequence[str]:
        """Protocols to offer in the TLS handshake."""
        ...

    async def start(self, book: Book, *, host: str, port: int, uds: str | None, ssl: ssl.SSLContext | None) -> Listener:
        """Listen on ``host`` and ``port`` (0: any free one), or on the unix socket ``uds``. Raises OSError."""
        ...

    def url(self, host: str, port: int, *, secure: bool) -> str:
        """The base URL for clients. ``host`` is a name, or an address (IPv6 in brackets)."""
        ...


@runtime_checkable
class ConfigurablePart(LoopbackPart, Protocol):
    """A part that has options of its own."""

    def configured(self, options: Mapping[str, Any]) -> LoopbackPart:
        """A part with these options. Raises ConfigurationError for one that it does not know, or a bad value."""
        ...


def load_part(name: str) -> LoopbackPart:
    """The part of that name.

    Raises:
        ConfigurationError: no installed distribution has it.
        PluginError: it cannot be loaded, or is no part.
    """
    found = {point.name: point for point in entry_points(group=_GROUP)}
    point = found.get(name)
    if point is None:
        known = ", ".join(sorted(found)) or "none"
        raise ConfigurationError(
            f"there is no loopback server for {name!r}; installed: {known}. Built in are those of the transports: "
            "pip install spanwire (sse), 'spanwire[websocket]', 'spanwire[grpc]', 'spanwire[webhook]'"
        )
    try:
        part = point.load()
    except (Exception, SystemExit) as error:  # whatever a foreign module raises when it is imported
        raise PluginError(f"the loopback server {_origin(point)} cannot be loaded: {error}") from error
    if not isinstance(part, LoopbackPart):
        raise PluginError(
            f"the loopback server {_origin(point)} has not what LoopbackPart asks for: name, alpn, start, url"
        )
    return part


def _configured(part: LoopbackPart, options: Mapping[str, Any]) -> LoopbackPart:
    if not isinstance(part, ConfigurablePart):
        raise ConfigurationError(f"the loopback server {part.name!r} has no options: {', '.join(options)}")
    return part.configured(options)


def _origin(point: EntryPoint) -> str:
    return f"{point.name!r} ({point.value}{f' of {point.dist.name}' if point.dist else ''})"


class LoopbackServer:
    """A model server on this machine that does what it is told. Use it as a context manager::

        with LoopbackServer(scripts=[Script.say("Hello there", prefill_s=0.1)]) as server:
            endpoint = spanwire.Endpoint(server.url)
            ...
            assert server.connections == 1

    It runs in a daemon thread with a loop of its own; everything here may be called from any thread. Of these,
    ``wait_for`` and ``close`` block: in a coroutine, ``await asyncio.to_thread(server.wait_for, ...)``.

    Args:
        scripts: queued for the next calls, or by model; see :meth:`script`.
        default: the answer when nothing is queued.
        tls: with a throw-away CA (needs ``spanwire[testing]``); clients trust :attr:`ca`.
        host: address to listen on.
        public_host: name or address under which clients reach it, if that is another one, such as
            ``delaynet.PEER``: for :attr:`url`, and for the certificate.
        port: 0: any free one.
        uds: path of a unix socket to listen on instead.
        part: which wire: the name of an entry point of ``spanwire.loopback``, or the part itself.
        options: for the part, if it has any; see its own documentation.
        keep: how many requests are kept for :attr:`requests`.

    Raises:
        ConfigurationError: a bad argument; the part or trustme is missing.
        PluginError: the part cannot be loaded.
    """

    def __init__(
        self,
        scripts: Iterable[Answer] | Mapping[str, Answer | list[Answer]] = (),
        *,
        default: Answer = echo,
        tls: bool = False,
        host: str = "127.0.0.1",
        public_host: str | None = None,
        port: int = 0,
        uds: str | None = None,
        part: str | LoopbackPart = "sse",
        options: Mapping[str, Any] | None = None,
        keep: int = 100_000,
    ) -> None:
        found = load_part(part) if isinstance(part, str) else part
        self._part = found if not options else _configured(found, options)
        self._book = Book(default=default, keep=keep)
        if isinstance(scripts, Mapping):
            for model, answers in scripts.items():
                for answer in answers if isinstance(answers, list) else (answers,):
                    self._book.script(answer, model=model)
        elif isinstance(scripts, Script):
            raise ConfigurationError("LoopbackServer(scripts=...) takes a list of scripts; put this one in [ ]")
        else:
            for answer in scripts:
                self._book.script(answer)
        self._host = host
        self._public_host = public_host
        self._port = port
        self.uds = uds
        self._authority = ThrowAwayCA() if tls else None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._ca: str | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._listener: Listener | None = None
        self._address: tuple[str, int] | None = None

    # --- life -------------------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Listen. Called by ``with``; needed only without it.

        Raises:
            OSError: the address cannot be used.
            RuntimeError: it was started before.
        """
        if self._thread is not None:
            raise RuntimeError("this loopback server was started before; make a new one")
        context = None
        if self._authority is not None:
            reached = self._public_host or _ANY_ADDRESS.get(self._host, self._host)
            names = dict.fromkeys(("localhost", "127.0.0.1", "::1", reached))
            context = self._authority.server_context(*names, alpn=self._part.alpn)
            self._folder = tempfile.TemporaryDirectory(prefix="spanwire-loopback-")
            file = Path(self._folder.name, "ca.pem")
            file.write_text(self._authority.pem, encoding="ascii")
            self._ca = str(file)
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(context, ready), name="spanwire-loopback", daemon=True)
        self._thread.start()
        try:
            ready.result(_THREAD_S)
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """Close every connection and end the thread. Idempotent; what was recorded stays."""
        thread, loop, stop = self._thread, self._loop, self._stop
        if loop is not None and stop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed already
                loop.call_soon_threadsafe(stop.set)
        if thread is not None:
            thread.join(_THREAD_S)
            if thread.is_alive():
                raise RuntimeError("the loopback server's thread does not end: a script's function blocks it")
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, context: ssl.SSLContext | None, ready: Future[None]) -> None:
        try:
            asyncio.run(self._serve(context, ready))
        except BaseException as error:  # the thread's end; whoever waits for `ready` has to hear of it
            if ready.done():
                raise
            ready.set_exception(error)

    async def _serve(self, context: ssl.SSLContext | None, ready: Future[None]) -> None:
        self._stop = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._note)
        listener = await self._part.start(self._book, host=self._host, port=self._port, uds=self.uds, ssl=context)
        self._listener, self._address = listener, listener.address
        ready.set_result(None)
        try:
            await self._stop.wait()
        finally:
            await listener.aclose()

    def _note(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, OSError):  # a client's doing, such as a TLS alert; reported in asyncio's debug mode only
            return
        self._book.fault(f"{context['message']}{'' if error is None else f': {error!r}'}")

    # --- where it is ------------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """The base URL, such as ``http://127.0.0.1:43210/v1``."""
        if self._listener is None:
            raise RuntimeError('the loopback server is not started; use it in a "with" block, or call start()')
        if self._address is None:
            return self._part.url("localhost", 0, secure=self._authority is not None)
        host, port = self._address
        host = self._public_host or _ANY_ADDRESS.get(host, host)
        return self._part.url(f"[{host}]" if ":" in host else host, port, secure=self._authority is not None)

    @property
    def origin(self) -> str:
        """Scheme, host and port of :attr:`url`."""
        found = re.match(r"[^:]+://[^/]*", self.url)
        return found[0] if found else self.url

    @property
    def port(self) -> int:
        """The port that it listens on; 0 for a unix socket."""
        _ = self.url
        return self._address[1] if self._address is not None else 0

    @property
    def ca(self) -> str | None:
        """With TLS, the file of the CA's certificate (PEM), which :meth:`close` removes; None without."""
        return self._ca

    @property
    def ca_pem(self) -> str | None:
        """With TLS, the CA's certificate as PEM text; None without."""
        return None if self._authority is None else self._authority.pem

    @property
    def part(self) -> LoopbackPart:
        """What serves the wire."""
        return self._part

    def endpoint(self, **more: Any) -> Endpoint:
        """An endpoint for this server: URL, CA and unix socket filled in; ``more`` are its other fields."""
        if self._authority is not None:
            more.setdefault("tls", TLS(ca=self._authority.pem))
        return Endpoint(self.url, **{"uds": self.uds, "proxy": None, **more})

    # --- what it does and did ---------------------------------------------------------------------------------------

    def script(self, script: Answer, model: str | None = None, times: int | None = None) -> None:
        """Queue an answer.

        A call takes the first one in the queue of its model; if there is none, the first one in the queue for all;
        if there is none either, the default.

        Args:
            script: what to do; or a function of the :class:`Request` that returns it, called on the server's thread.
            model: only for calls of this model.
            times: for so many calls. None: until another one that was queued after it takes over, at least once.

        Raises:
            ConfigurationError: it is not a script, or ``times`` is not a number from 1.
        """
        self._book.script(script, model=model, times=times)

    def clear(self) -> None:
        """Forget the requests and faults so far; scripts and the count of connections stay."""
        self._book.clear()

    def disconnect(self, *, reset: bool = False) -> None:
        """Close every connection from the server's side: an idle time-out, or with ``reset`` (RST) a crash.

        Returns at once; ``server.wait_for(lambda s: s.open_connections == 0)`` waits until it is done.
        """
        loop, listener = self._loop, self._listener
        if loop is not None and listener is not None:
            with contextlib.suppress(RuntimeError):  # closed: there are none
                loop.call_soon_threadsafe(lambda: listener.disconnect(reset=reset))

    @property
    def requests(self) -> list[Request]:
        """What has arrived, in that order. The list is a copy; its items go on to change."""
        with self._book.changed:
            return list(self._book.requests)

    @property
    def forgotten(self) -> int:
        """How many requests are no longer in :attr:`requests`, which keeps the newest ``keep``."""
        return self._book.forgotten

    @property
    def faults(self) -> list[str]:
        """What clients did against the rules of the wire, and where the server itself failed. The last 1,000."""
        with self._book.changed:
            return list(self._book.faults)

    @property
    def connections(self) -> int:
        """Connections accepted so far: at the latest when the client reads its first answer there."""
        return self._book.connections

    @property
    def open_connections(self) -> int:
        """Connections that are open now."""
        return self._book.open_connections

    def wait_for(self, predicate: Callable[[LoopbackServer], T], timeout_s: float = 5.0) -> T:
        """Block until ``predicate(server)`` is true, and return what it gave.

        It is asked at each change: a connection, a request, an answer's end, a client that leaves.

        Raises:
            TimeoutError: it was not true within ``timeout_s`` seconds.
        """
        with self._book.changed:
            found = self._book.changed.wait_for(lambda: predicate(self), timeout_s)
            if not found:
                raise TimeoutError(f"not true within {timeout_s} s; {self!r}, requests: {self.requests!r:.400}")
            return found

    def __repr__(self) -> str:
        state = self.url if self._listener is not None else "not started"
        return f"LoopbackServer({state}, connections={self.connections}, open={self.open_connections})"
