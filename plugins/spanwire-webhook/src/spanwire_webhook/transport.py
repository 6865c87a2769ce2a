"""The transport ``webhook``: submits, questions and cancels as plain HTTP exchanges, by :mod:`spanwire.net`.

Options of an endpoint (``Endpoint(url, transport="webhook", dialect="...", options={...})``):

===================  ===================================================================================================
``store``            where jobs are: a URL (``sqlite:///jobs.db``) or a store. Default: the environment variable
                     SPANWIRE_STORE, else ``jobs.db`` in the user's state folder (``$XDG_STATE_HOME/spanwire``)
``public_url``       base of the callbacks' URLs, where a receiver over the same store is reached. Default: the environment
                     variable SPANWIRE_WEBHOOK_PUBLIC_URL. Without it, and without ``receiver``, jobs are polled
``receiver``         ``"host:port"`` (port 0: any): a receiver in this process; ``public_url`` is then its own, unless set
``receiver_options`` further fields of ``ReceiverSettings`` for it, such as ``{"secrets": {"baseten": ("whsec_...",)}}``
``instance_key``     the key that signs callback URLs, in hex. Default: the first of SPANWIRE_WEBHOOK_KEYS, else the store's
``deadline_s``       how long a job may take where ``submit(deadline_s=)`` does not say. Default: a day, of a batch 26 hours
``grace_s``          after a submit that was not answered: how long to wait for the job to show up, before it is submitted
                     again. Default: 60
``on_lost``          the provider has finished, and the output is gone: ``"raise"`` (default) or ``"resubmit"``
``poll_after_s``     ask for the status at the earliest after so long. Default: 60 with webhooks, 1 without
``poll_share``       of the status requests that the provider allows: how many are ours. Default: 0.5
``result_hosts``     origins besides the endpoint's own whose URLs, named by a provider, may be asked for a result:
                     ``["https://*.fal.run"]``. They never get the key
===================  ===================================================================================================
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable, Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import msgspec

from spanwire.calls import Call, Chunk
from spanwire.endpoint import Endpoint, check_headers
from spanwire.errors import ConfigurationError, MessageTooBig, ProtocolError, SpanwireError
from spanwire.jobs.contract import HTTPAnswer, JobCodec, JobRow, Store
from spanwire.jobs.settings import Ask, JobSettings, Receiving
from spanwire.jobs.stores import default_store_url
from spanwire.net.dial import dial, route_of
from spanwire.net.http1 import HTTP1Connection
from spanwire.net.tls import context_for
from spanwire.transport import Attempt, Connection, Dialect, Exchange, Head, Inbox

from .settings import ReceiverSettings
from .ssrf import ResultHosts
from .url_mac import URLMac, parse_instance_key

if TYPE_CHECKING:
    from .embedded import EmbeddedReceiver

__all__ = ["OPTIONS", "WebhookTransport"]

OPTIONS = frozenset(
    {
        "deadline_s",
        "grace_s",
        "instance_key",
        "on_lost",
        "poll_after_s",
        "poll_share",
        "public_url",
        "receiver",
        "receiver_options",
        "result_hosts",
        "store",
    }
)


def _user_agent() -> str:
    try:
        return f"spanwire/{metadata.version('spanwire')}"
    except metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return "spanwire"


_USER_AGENT = _user_agent()
#: Written by us from the request itself.
_OURS = frozenset({"content-length", "transfer-encoding", "connection", "host"})


class WebhookTransport:
    """Makes connections of one exchange at a time, HTTP/1.1."""

    def expect(self, endpoint: Endpoint) -> int:
        """1."""
        return 1

    def key(self, endpoint: Endpoint) -> Hashable:
        """Credentials go with each request, so endpoints that differ in them share connections."""
        if endpoint.origin.scheme not in ("http", "https"):
            raise ConfigurationError(
                f"transport 'webhook' submits over http:// or https://, not {endpoint.origin.scheme}://",
                endpoint=endpoint.address,
            )
        if endpoint.secure:
            context_for(endpoint.tls, alpn=("http/1.1",))
        return endpoint.connection_key(), route_of(endpoint).key

    async def connect(self, endpoint: Endpoint, attempt: Attempt) -> Connection:
        """Dial; marks dns, tcp, proxy, tls. Raises ConnectionFailed, ConfigurationError."""
        route = route_of(endpoint)
        http = await dial(endpoint, attempt.marks, lambda: HTTP1Connection(endpoint.address), route=route)
        http.set_connect_rtt(attempt.marks.rtt_ns, through_proxy=route.proxy is not None)
        return WebhookConnection(http)

    def jobs(self, endpoint: Endpoint, dialect: Dialect) -> JobSettings:
        """See :class:`spanwire.jobs.settings.JobTransport`."""
        return _settings(endpoint, dialect)


class WebhookConnection:
    """One HTTP/1.1 connection."""

    __slots__ = ("http", "usable")

    capacity = 1
    protocol = "http/1.1"
    engine = "spanwire"

    def __init__(self, http: HTTP1Connection) -> None:
        self.http = http
        self.usable = http.usable

    async def aclose(self) -> None:
        await self.http.aclose()

    def abort(self) -> None:
        self.http.abort()

    async def start(self, call: Call, attempt: Attempt) -> Exchange:
        """Write the request of ``call.body["ask"]``; marks encode and send."""
        begin_ns = time.perf_counter_ns()
        ask = call.body.get("ask")
        if not isinstance(ask, Ask):
            raise ConfigurationError(
                f"transport 'webhook' carries no {call.operation!r}: its calls are jobs, see manager.submit()",
                endpoint=attempt.endpoint.address,
            )
        request = _encode(ask, attempt)
        exchange = WebhookExchange(self.http, ask, attempt)
        encoded_ns = time.perf_counter_ns()
        attempt.marks.parts.append(("encode", begin_ns, encoded_ns))
        attempt.marks.begin("send", encoded_ns)
        if self.http.send(request, exchange):
            exchange.on_sent()
        return exchange


def _encode(ask: Ask, attempt: Attempt) -> bytes:
    endpoint, request = attempt.endpoint, ask.request
    codec: JobCodec | None = attempt.dialect.codec if attempt.dialect is not None else None
    headers = {"user-agent": _USER_AGENT, "accept": "application/json", "accept-encoding": "identity"}
    if attempt.api_key is not None and codec is not None:
        headers.update((name.lower(), value) for name, value in codec.credentials(attempt.api_key).items())
    for more in (endpoint.headers, request.headers, attempt.headers):
        headers.update((name.lower(), value) for name, value in more.items())
    check_headers(headers, "the request's headers")
    for name in _OURS & headers.keys():
        raise ConfigurationError(
            f"the header {name!r} is written by spanwire itself; remove it from the headers", endpoint=endpoint.address
        )
    target = request.target
    if endpoint.query:
        target += ("&" if "?" in target else "?") + urlencode(endpoint.query)
    if any(ord(one) <= 32 or ord(one) > 126 for one in target + request.method):
        raise ProtocolError("a target of a request has a character that no URL has", endpoint=endpoint.address)
    length = f"content-length: {len(request.body)}\r\n" if request.body or request.method != "GET" else ""
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    start = f"{request.method} {target} HTTP/1.1\r\nhost: {_host(endpoint)}\r\n{lines}{length}\r\n"
    return start.encode() + request.body


def _host(endpoint: Endpoint) -> str:
    scheme, host, port = endpoint.origin
    name = f"[{host}]" if ":" in host else host
    return name if port == (443 if scheme == "https" else 80) else f"{name}:{port}"


class WebhookExchange(Inbox):
    """Takes one whole answer.

    Attributes:
        learned: what ``Ask.read`` made of it.
    """

    __slots__ = ("_ask", "_attempt", "_body", "_finished", "_head", "_http", "_marks", "_released", "_size", "learned")

    def __init__(self, http: HTTP1Connection, ask: Ask, attempt: Attempt) -> None:
        super().__init__()
        self._http = http
        self._ask = ask
        self._attempt = attempt
        self._marks = attempt.marks
        self._head = Head()
        self._body: list[bytes] = []
        self._size = 0
        self._finished = False
        self._released = False
        self.learned: object = None

    @property
    def head(self) -> Head:
        return self._head

    def on_sent(self) -> None:
        if not self._marks.sent_ns:
            self._marks.sent_ns = time.perf_counter_ns()
            self._marks.end("send", self._marks.sent_ns)

    def on_head(self, status: int, headers: dict[str, str]) -> None:
        self._marks.first_byte_ns = self._http.first_arrival_ns
        self.on_sent()
        self._head.status = status
        self._head.headers = headers
        self._head.streamed = False
        encoding = headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):  # we have asked for none
            raise ProtocolError(f"the answer is coded as {encoding!r:.40}, which was not asked for")

    def on_body(self, data: bytes) -> None:
        if self._finished:
            return
        self._size += len(data)
        limit = max(self._attempt.endpoint.limits.max_event_bytes, self._ask.request.most_bytes)
        if self._size > limit:
            raise MessageTooBig(
                f"the answer is over {limit} bytes (Limits.max_event_bytes)", endpoint=self._attempt.endpoint.address
            )
        self._marks.first_chunk_ns = self._marks.first_chunk_ns or self._http.arrival_ns
        self._body.append(data)

    def on_batch(self) -> None:
        if not self._finished:
            self._marks.last_byte_ns = self._http.arrival_ns

    def on_trailers(self, trailers: dict[str, str]) -> None:
        self._head.trailers = trailers

    def on_end(self) -> None:
        if not self._finished:
            self._finished = True
            marks = self._marks
            marks.last_byte_ns = marks.last_chunk_ns = self._http.arrival_ns
            marks.rtt_ns = self._http.rtt_min_ns()
            body, self._body = b"".join(self._body), []
            marks.ended_ns = time.perf_counter_ns()
            try:
                self.learned = self._ask.read(HTTPAnswer(self._head.status or 0, self._head.headers, body))
            except SpanwireError as error:
                if error.endpoint is None:
                    error.endpoint = self._attempt.endpoint.address
                self.end(error)
            except Exception as error:  # noqa: BLE001 - a bug in a dialect is the error of its exchange
                problem = ProtocolError(f"the dialect cannot read the answer: {type(error).__name__}")
                problem.__cause__ = error
                self.end(problem)
            else:
                self._items.append(Chunk())
                self.end()
        self._release()

    def on_lost(self, error: SpanwireError) -> None:
        try:
            if not self._finished:
                self._finished = True
                self._marks.rtt_ns = self._http.rtt_min_ns()
                self.end(error)
        finally:
            self._release()

    def abort(self, error: SpanwireError | None = None) -> None:
        """Leave: HTTP/1.1 knows no other way than to close the connection, unless the message has ended already."""
        self._finished = True
        super().abort(error)
        self._http.leave(self)
        self._release()

    def _release(self) -> None:
        if not self._released:
            self._released = True
            self._attempt.released()


# --- options ------------------------------------------------------------------------------------------------------------


def _settings(endpoint: Endpoint, dialect: Dialect) -> JobSettings:
    options, codec = endpoint.options, dialect.codec

    def fail(name: str, what: str) -> ConfigurationError:
        return ConfigurationError(f"Endpoint.options: {name} must be {what}", endpoint=endpoint.address)

    numbers: dict[str, float] = {}
    for name, least in (("deadline_s", 0.0), ("grace_s", 0.0), ("poll_after_s", 0.0), ("poll_share", 0.0)):
        value = options.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > least:
            raise fail(name, "a number of seconds, more than 0" if name != "poll_share" else "a number from 0 to 1")
        numbers[name] = float(value)
    if numbers.get("poll_share", 0.5) > 1:
        raise fail("poll_share", "a number from 0 to 1")
    if "deadline_s" in numbers:
        numbers["batch_deadline_s"] = numbers["deadline_s"]
    on_lost = options.get("on_lost", "raise")
    if on_lost not in ("raise", "resubmit"):
        raise fail("on_lost", '"raise" or "resubmit"')
    public_url = options.get("public_url") or os.environ.get("SPANWIRE_WEBHOOK_PUBLIC_URL") or None
    if public_url is not None and not (
        isinstance(public_url, str) and public_url.startswith(("http://", "https://")) and "?" not in public_url
    ):
        raise fail("public_url", 'a URL such as "https://hooks.example.com/spanwire", without a query')
    hosts = options.get("result_hosts", ())
    if isinstance(hosts, str) or not all(isinstance(host, str) for host in hosts):
        raise fail("result_hosts", 'a list of origins such as ["https://*.fal.run"]')
    scheme, host, port = endpoint.origin
    allowed = ResultHosts(f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}", hosts)
    named = options.get("instance_key") or next(
        iter(os.environ.get("SPANWIRE_WEBHOOK_KEYS", "").replace(",", " ").split()), None
    )
    if named is not None and not isinstance(named, str):
        raise fail("instance_key", "text in hex")
    own_key = None if named is None else parse_instance_key(named)
    receiver = _receiver(endpoint, public_url, own_key)
    mode = _mode(endpoint, dialect, codec, reachable=receiver is not None or public_url is not None)

    def callback(base: str, row: JobRow, key: bytes) -> str:
        return URLMac([own_key or key]).url(base, row.dialect, row.id, row.attempt)

    return JobSettings(
        store=_store(endpoint),
        mode=mode,
        callback=callback,
        check_url=allowed.check,
        public_url=public_url,
        receiver=receiver,
        receiver_at=str(options.get("receiver", "")),
        on_lost=on_lost,
        **numbers,
    )


def _mode(endpoint: Endpoint, dialect: Dialect, codec: JobCodec, *, reachable: bool) -> Any:
    if reachable:
        return "webhook"
    if codec.polls and codec.status_has_output:
        return "poll"
    raise ConfigurationError(
        f"dialect {dialect.name!r} gives results by webhook alone, for its status has no output: set options "
        '{"public_url": ...} to where a receiver is reached (`spanwire receive`), or {"receiver": "127.0.0.1:0"} for one '
        "in this process",
        endpoint=endpoint.address,
    )


def _store(endpoint: Endpoint) -> str | Store:
    store = endpoint.options.get("store")
    if store is None:
        return default_store_url()
    if not isinstance(store, str) and not isinstance(store, Store):
        raise ConfigurationError(
            f"Endpoint.options: store must be a URL such as sqlite:///jobs.db, or a store, not {type(store).__name__}",
            endpoint=endpoint.address,
        )
    return store


_Start = Callable[[Store, Mapping[str, JobCodec], Callable[[], None]], Receiving]


def _receiver(endpoint: Endpoint, public_url: str | None, own_key: bytes | None) -> _Start | None:
    address = endpoint.options.get("receiver")
    if address is None:
        return None
    more: Mapping[str, Any] = endpoint.options.get("receiver_options", {})
    host, colon, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    if not (colon and host and port.isdigit() and isinstance(more, Mapping)):
        raise ConfigurationError(
            'Endpoint.options: receiver must be "host:port", such as "127.0.0.1:0", and receiver_options a mapping',
            endpoint=endpoint.address,
        )
    unknown = sorted(set(more) - set(ReceiverSettings.__struct_fields__))
    if unknown:
        raise ConfigurationError(
            f"Endpoint.options: receiver_options has no {unknown[0]!r}; it has: "
            f"{', '.join(sorted(ReceiverSettings.__struct_fields__))}",
            endpoint=endpoint.address,
        )

    def start(store: Store, codecs: Mapping[str, JobCodec], wake: Callable[[], None]) -> Receiving:
        from .embedded import EmbeddedReceiver
        from .receiver import Receiver

        given = dict(more)
        if public_url is not None:
            given.setdefault("public_url", public_url)
        settings = ReceiverSettings.from_environment(**given)
        if own_key is not None:
            keys = (own_key, *settings.instance_keys)
            settings = msgspec.structs.replace(settings, instance_keys=keys)
        receiver = Receiver(store, codecs, settings, stored=lambda _: wake())
        return _Served(EmbeddedReceiver(receiver, host=host.strip("[]"), port=int(port)), public_url)

    return start


class _Served:
    """An embedded receiver, and where it is reached."""

    def __init__(self, served: EmbeddedReceiver, public_url: str | None) -> None:
        self._served = served
        self.public_url = public_url or served.url

    def hear(self, tell: Callable[[str, str], None]) -> None:
        """See :class:`spanwire.jobs.settings.Heard`."""
        self._served.receiver.tell = tell

    def close(self) -> None:
        self._served.close()
