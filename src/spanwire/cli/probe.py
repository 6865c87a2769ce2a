"""``spanwire probe``: the same call many times to a real server, and where their time went, cold apart from warm.

``--json`` prints one object. Times are seconds in fields that end in ``_s``; what is not known is left out::

    {"schema": 1, "spanwire": "0.1.0",
     "url": "http://127.0.0.1:8000/v1", "endpoint": "127.0.0.1:8000", "transport": "sse", "model": "m",
     "streamed": true, "concurrency": 4, "every_call_cold": false,
     "interrupted": false,                      # Ctrl-C
     "gave_up": false,                          # the first calls failed, and the others were not tried
     "elapsed_s": 1.93, "connections_opened": 4,
     "calls": {"planned": 20, "ok": 19, "failed": 1,
               "errors": {"RateLimited": {"count": 1, "message": "the first one's text"}}},
     "tokens": {"output": 380, "source": "usage", "per_second": 196.9, "per_second_in_call": 51.2},
     "percentiles": "nearest-rank",
     "cold": {"calls": 4, "total": SUMMARY, "first_byte": SUMMARY, "first_chunk": SUMMARY, "first_content": SUMMARY,
              "segments": {"handshake": {"source": "measured", ...SUMMARY..., "parts": {"tcp": {the same}}}, ...}},
     "warm": {the same},
     "timelines": [Timeline.to_dict() of each call that got as far as to have one]}

SUMMARY is ``{"n": 15, "min_s": ..., "mean_s": ..., "p50_s": ..., "p95_s": ..., "p99_s": ..., "max_s": ...}``; ``n``
counts the calls that have the segment, ``p95_s`` is there from 20 of them on and ``p99_s`` from 100. ``source`` of
``tokens`` is ``usage`` (counted by the server), ``chunks`` (pieces of content, counted here) or ``mixed``.
``cold``, ``warm`` and ``tokens`` are absent where there is nothing to say.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import msgspec

from ..calls import Call, Reply
from ..endpoint import Endpoint
from ..errors import AuthenticationFailed, ConfigurationError, SpanwireError
from ..manager import ConnectionManager
from ..pool import Dial
from ..telemetry import Telemetry
from .stats import Outcome, Report, report

__all__ = ["Plan", "Probe"]

#: With nothing but failures, this many are enough (or as many as run at once): the rest would take its time-outs too.
_HOPELESS_AFTER = 3


class Plan(msgspec.Struct, frozen=True, eq=False):
    """What to do: ``calls`` times the same ``call``, ``concurrency`` of them at once.

    ``cold``: a connection of its own for each call. ``streamed``: ask for a stream of events, or for a whole answer.
    """

    endpoint: Endpoint
    call: Call
    calls: int
    concurrency: int
    cold: bool = False
    streamed: bool = True


class _Connections(Telemetry):
    """Counts what is dialled: a connection that no call ended up on was opened all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = 0
        _ = self._instruments  # made now, not within the first call

    def connected(
        self, endpoint: Endpoint, transport: str, dial: Dial, protocol: str | None, error: SpanwireError | None
    ) -> Any:
        self.opened += error is None
        return super().connected(endpoint, transport, dial, protocol, error)


class Probe:
    """One run. What it has found so far can be asked for at any time, also after it was interrupted.

    Args:
        plan: what to do.
        on_call: called after each call.
    """

    def __init__(self, plan: Plan, on_call: Callable[[Outcome], None] = lambda outcome: None) -> None:
        self.plan = plan
        self.outcomes: list[Outcome] = []
        self.interrupted = False
        self.gave_up = False
        self._on_call = on_call
        self._left = plan.calls
        self._ok = False
        self._running = 0
        self._wrong: ConfigurationError | None = None
        self._connections = _Connections()
        self._begin_s = 0.0
        self._end_s = 0.0

    async def run(self) -> None:
        """Make the calls.

        Raises:
            ConfigurationError: what was asked for cannot be asked; no other call could either.
        """
        if self.plan.endpoint.secure:
            from ..net.tls import context_for

            context_for(self.plan.endpoint.tls)  # reads the system's certificates: not what a cold connection costs
        self._begin_s = time.perf_counter()
        try:
            async with ConnectionManager(telemetry=self._connections) as manager:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(self.plan.concurrency, self.plan.calls)):
                        group.create_task(self._caller(manager))
                self._end_s = time.perf_counter()  # without the end of the connections
        finally:
            self._end_s = self._end_s or time.perf_counter()
        if self._wrong is not None:
            raise self._wrong

    @property
    def elapsed_s(self) -> float:
        """How long it ran."""
        return self._end_s - self._begin_s

    @property
    def connections_opened(self) -> int:
        """How many connections were made."""
        return self._connections.opened

    @property
    def transport(self) -> str | None:
        """The transport's name, None before a call has ended."""
        return next((outcome.timeline.transport for outcome in self.outcomes if outcome.timeline is not None), None)

    def report(self) -> Report:
        """The calls that have ended, put together."""
        return report(self.outcomes, self.elapsed_s)

    def to_dict(self) -> dict[str, Any]:
        """The object of ``--json``; see the module."""
        plan, found = self.plan, self.report()
        data: dict[str, Any] = {
            "schema": 1,
            "spanwire": version("spanwire"),
            "url": plan.endpoint.url,
            "endpoint": plan.endpoint.address,
            "transport": self.transport,
            "model": plan.call.model,
            "streamed": plan.streamed,
            "concurrency": plan.concurrency,
            "every_call_cold": plan.cold,
            "interrupted": self.interrupted,
            "gave_up": self.gave_up,
            "elapsed_s": self.elapsed_s,
            "connections_opened": self.connections_opened,
            "calls": {
                "planned": plan.calls,
                "ok": found.ok,
                "failed": found.failed,
                "errors": {
                    name: {"count": count, "message": message} for name, (count, message) in found.errors.items()
                },
            },
            "tokens": found.tokens and found.tokens.to_dict(),
            "percentiles": "nearest-rank",
            "cold": found.cold and found.cold.to_dict(),
            "warm": found.warm and found.warm.to_dict(),
            "timelines": [outcome.timeline.to_dict() for outcome in self.outcomes if outcome.timeline is not None],
        }
        return {name: value for name, value in data.items() if value is not None}

    async def _caller(self, manager: ConnectionManager) -> None:
        while self._left and self._wrong is None and not self.gave_up:
            self._left -= 1
            self._running += 1
            try:
                if self.plan.cold:
                    async with ConnectionManager(telemetry=self._connections) as own:
                        outcome = await self._one(own)
                else:
                    outcome = await self._one(manager)
            except ConfigurationError as error:
                self._wrong = error
                return
            finally:
                self._running -= 1
            self._take(outcome)

    def _take(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self._ok = self._ok or outcome.error_type is None
        self._on_call(outcome)

    async def _one(self, manager: ConnectionManager) -> Outcome:
        plan = self.plan
        content_chunks = 0
        try:
            if plan.streamed:
                async with manager.stream(plan.endpoint, plan.call) as stream:
                    async for chunk in stream:
                        content_chunks += chunk.has_content
                reply = stream.reply
            else:
                reply = await manager.complete(plan.endpoint, plan.call)
        except ConfigurationError:
            raise
        except SpanwireError as error:
            # Not while others still run: a server that takes two calls at once refuses the rest at once.
            many = len(self.outcomes) + 1 >= max(_HOPELESS_AFTER, plan.concurrency) and self._running == 1
            if not self._ok and (many or not error.retryable):
                self.gave_up = bool(self._left)
            message = f"{error}{_hint(error, plan.endpoint)}"
            return Outcome(error.timeline, error_type=type(error).__name__, message=message)
        return _outcome(reply, content_chunks)


def _hint(error: SpanwireError, endpoint: Endpoint) -> str:
    """What helps on a command line."""
    if isinstance(error, AuthenticationFailed):
        return "; the key is taken from SPANWIRE_API_KEY, or --api-key-env NAME"
    if error.phase == "tls" and endpoint.tls.verify:
        return "; --ca FILE trusts a private CA, --insecure anybody"
    return ""


def _outcome(reply: Reply, content_chunks: int) -> Outcome:
    counted = reply.usage.output_tokens if reply.usage is not None else None
    if counted is not None:
        return Outcome(reply.timeline, counted, "usage")
    return Outcome(reply.timeline, content_chunks, "chunks")
