"""Exchanges with a provider: a submit, a question, a cancel. Each is a unary call over the manager's connections."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

import msgspec

from ..calls import Call
from ..endpoint import Endpoint, Retries, without_secrets
from ..errors import CallTimeout, ConnectionFailed, NoSlot, ServerError, SpanwireError
from ..pool import Member
from ..run import Prepared, Run
from ..telemetry import CallSpan
from ..timeline import AttemptRecord, CallRecord, Timeline
from .contract import HTTPAnswer, HTTPRequest, Seen
from .settings import Ask

if TYPE_CHECKING:
    from ..manager import LoopState

__all__ = ["JobRun", "carry", "was_refused"]

_T = TypeVar("_T")
#: Nothing of the request has left before these are over.
_BEFORE_SENDING = frozenset({"configure", "queue", "dns", "tcp", "tls", "proxy", "upgrade", "connect"})
#: 5xx that are said before anything was begun: 501 and 505 never will, 503 and 529 not now. Source: RFC 9110 section 15.6.
_NOT_BEGUN = frozenset({501, 503, 505, 529})
#: A file of many megabytes takes its time: at this speed, 1 Mbit/s, up to an hour more than an answer otherwise may take.
_SLOW_BYTES_PER_S, _MOST_EXTRA_S = 125_000, 3600.0


def was_refused(error: SpanwireError) -> bool:
    """Whether a submit that ended with this error was surely not taken. Else nobody knows: the request was sent.

    A 500, 502 or 504 says only that somebody on the way gave up; the job may be running.
    """
    if isinstance(error, ServerError):
        return error.status is not None and (error.status < 500 or error.status in _NOT_BEGUN) and error.status >= 300
    return isinstance(error, NoSlot) or error.phase in _BEFORE_SENDING


class JobRun(Run):
    """One exchange. A submit is sent again only where the provider surely has not taken it."""

    __slots__ = ("_idempotent", "_quiet", "_span")

    def __init__(
        self,
        state: LoopState,
        prepared: Prepared,
        endpoint: Endpoint,
        call: Call,
        *,
        span: CallSpan | None,
        headers: Mapping[str, str],
        idempotent: bool,
        quiet: bool,
        retried: bool,
    ) -> None:
        request = call.body["ask"].request
        extra_s = min(max(len(request.body), request.most_bytes) / _SLOW_BYTES_PER_S, _MOST_EXTRA_S)
        timeouts = endpoint.timeouts
        if extra_s > 1.0 and timeouts.first_content_s is not None:
            timeouts = msgspec.structs.replace(timeouts, first_content_s=timeouts.first_content_s + extra_s)
        retries = endpoint.retries if idempotent else msgspec.structs.replace(endpoint.retries, stale=False)
        super().__init__(
            state,
            prepared,
            endpoint,
            call,
            streamed=False,
            timeouts=timeouts,
            retries=retries if retried else Retries(max_attempts=1),
            headers=headers,
        )
        self._span = span
        self._idempotent = idempotent
        self._quiet = quiet

    @property
    def books(self) -> AttemptRecord:
        """Of its last attempt."""
        return self._attempt

    def without_secrets(self, learned: _T) -> _T:
        """What was learned, as it may be stored: of a failed job the server's words without the key."""
        if not isinstance(learned, Seen) or (learned.message is None and learned.code is None):
            return learned
        code, message = (
            None if words is None else without_secrets(words, self.endpoint, self._api_key, self._headers)
            for words in (learned.code, learned.message)
        )
        return msgspec.structs.replace(learned, code=code, message=message)

    def _trace(self, member: Member | None = None) -> None:
        if self._traced:
            return
        self._traced = True
        self._call_span = self._span
        if self._span is not None and member is not None and member.context is not None:
            self._span.link(member.context)  # type: ignore[arg-type]

    def _after_failure(self, error: SpanwireError) -> None:
        if not self._idempotent and not was_refused(error) and not self.ended:
            outcome = "timeout" if isinstance(error, CallTimeout) else "error"
            self._end_attempt(self._attempt, outcome, error)  # type: ignore[arg-type]
            raise error
        super()._after_failure(error)

    def _tell(self, timeline: Timeline, record: CallRecord, error: Exception | None) -> None:
        if not self._quiet:
            super()._tell(timeline, record, error)


async def carry(
    state: LoopState,
    prepared: Prepared,
    endpoint: Endpoint,
    request: HTTPRequest,
    read: Callable[[HTTPAnswer], _T],
    *,
    operation: str,
    model: str,
    span: CallSpan | None = None,
    headers: Mapping[str, str] | None = None,
    idempotent: bool = True,
    quiet: bool = True,
    retried: bool = False,
    check_url: Callable[[str], str] | None = None,
) -> tuple[_T, JobRun]:
    """One exchange: send the request, and make something of the answer.

    Args:
        span: of a submit, already begun.
        idempotent: it may be sent twice.
        quiet: no telemetry: a question is no call of the user's.
        retried: by the endpoint's ``retries``; else the caller asks again later.
        check_url: for a request to a whole URL.

    Raises:
        SpanwireError: as of any call; ProtocolError for a URL that may not be asked.
    """
    if not request.target.startswith("/"):
        endpoint, prepared, request = _elsewhere(state, prepared, endpoint, request, check_url)
    call = Call(operation, model, {"ask": Ask(request, read)})
    run = JobRun(
        state,
        prepared,
        endpoint,
        call,
        span=span,
        headers=headers or {},
        idempotent=idempotent,
        quiet=quiet,
        retried=retried,
    )
    await run.open()
    await run.drain()
    exchange = run.exchange
    if exchange is None:  # pragma: no cover - a run that has ended well has one
        raise ConnectionFailed("the exchange was left", endpoint=endpoint.address, retryable=False)
    learned: _T = exchange.learned  # type: ignore[attr-defined]
    return run.without_secrets(learned), run


def _elsewhere(
    state: LoopState,
    prepared: Prepared,
    endpoint: Endpoint,
    request: HTTPRequest,
    check_url: Callable[[str], str] | None,
) -> tuple[Endpoint, Prepared, HTTPRequest]:
    """To a whole URL: if that is another host, over a connection of its own, and without the endpoint's key and headers."""
    url = check_url(request.target) if check_url is not None else request.target
    parts = urlsplit(url)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    request = HTTPRequest(request.method, target, request.headers, request.body)
    there = Endpoint(
        f"{parts.scheme}://{parts.netloc}",
        tls=endpoint.tls,
        proxy=endpoint.proxy,
        transport=prepared.spec.name,
        dialect=endpoint.dialect,
        timeouts=endpoint.timeouts,
        limits=endpoint.limits,
        options=endpoint.options,
    )
    if there.origin == endpoint.origin:
        return endpoint, prepared, request
    return there, state.manager._prepare(there), request
