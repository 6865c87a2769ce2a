"""The SSE transport, broken in one way at a time, under the conformance kit: each has to be caught by a test that says so.

``python -m tests.plugins.sse.mutants [NAME ...] [--whole]`` prints a table; with ``--whole`` every test of the kit runs on
each of them, and not only those that have to fail.
"""

from __future__ import annotations

import argparse
import asyncio
import contextvars
import gc
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import spanwire_sse
import spanwire_sse.codec
import spanwire_sse.transport as module
from spanwire_sse.exchange import HTTPExchange
from spanwire_sse.transport import SSEConnection, SSETransport

from spanwire import hookimpl
from spanwire.errors import ConnectionFailed, SpanwireError
from spanwire.testing import conformance as _loaded  # noqa: F401 - once, for all that are forked
from spanwire.transport import Inbox

ROOT = Path(__file__).parents[3]
KIT = "tests/plugins/sse/test_conformance.py::TestHTTP1"
#: A mutant that hangs is not waited for any longer, in seconds.
LIMIT_S = 120.0
#: The untouched methods.
connect, start, capacity = SSETransport.connect, SSEConnection.start, SSEConnection.capacity
exchange = {name: getattr(HTTPExchange, name) for name in dir(HTTPExchange) if callable(getattr(HTTPExchange, name))}


class Mutant(NamedTuple):
    """What is broken, and which tests have to fail."""

    apply: Callable[[], None]
    caught_by: Sequence[str]


MUTANTS: dict[str, Mutant] = {}


def mutant(*caught_by: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def add(apply: Callable[[], None]) -> Callable[[], None]:
        MUTANTS[apply.__name__.replace("_", " ")] = Mutant(apply, caught_by)
        return apply

    return add


def patch(owner: Any, **methods: Any) -> None:
    for name, method in methods.items():
        setattr(owner, name, method)


def wrap_exchanges(kind: type[Wrapped]) -> None:
    async def started(self: Any, call: Any, attempt: Any) -> Any:
        return kind(await start(self, call, attempt))

    patch(SSEConnection, start=started)


class Wrapped:
    """An exchange that hands everything on."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    @property
    def head(self) -> Any:
        return self.inner.head

    @property
    def complete(self) -> Any:
        return self.inner.complete

    async def read(self) -> Any:
        return await self.inner.read()

    def abort(self, error: Any = None) -> None:
        self.inner.abort(error)


# --- registration -----------------------------------------------------------------------------------------------------


def respecified(**fields: Any) -> None:
    (spec,) = spanwire_sse.register_transports()
    changed = msgspec.structs.replace(spec, **fields)

    @hookimpl
    def register_transports() -> Any:
        return [changed]

    patch(spanwire_sse, register_transports=register_transports)


@mutant("test_it_was_written_for_this_contract")
def written_for_another_contract() -> None:
    respecified(contract=2)


@mutant("test_what_it_declares_it_has")
def a_capability_that_it_has_not() -> None:
    respecified(capabilities=frozenset({"session"}))


@mutant("test_endpoints_share_connections_by_where_they_lead")
def limits_in_the_key() -> None:
    key = SSETransport.key
    patch(SSETransport, key=lambda self, endpoint: (key(self, endpoint), endpoint.limits))


# --- answers ----------------------------------------------------------------------------------------------------------


@mutant("test_chunks_come_in_order_and_unchanged")
def chunks_reordered() -> None:
    patch(HTTPExchange, take=lambda self: exchange["take"](self)[::-1])


@mutant("test_a_piece_is_there_when_it_has_come")
def buffers_to_the_end() -> None:
    def wait(self: Any) -> Any:
        if self._ended:
            return None
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter

    def on_batch(self: Any) -> None:
        if self._ended:
            exchange["on_batch"](self)

    patch(HTTPExchange, wait=wait, on_batch=on_batch)


@mutant("test_usage_comes_once_and_is_not_made_up")
def usage_lost() -> None:
    def take(self: Any) -> Any:
        return [msgspec.structs.replace(chunk, usage=None) for chunk in exchange["take"](self)]

    patch(HTTPExchange, take=take)


@mutant("test_usage_comes_once_and_is_not_made_up")
def usage_told_again() -> None:
    def take(self: Any) -> Any:
        return [twin for chunk in exchange["take"](self) for twin in (chunk,) * (2 if chunk.usage else 1)]

    patch(HTTPExchange, take=take)


@mutant("test_reading_ends_at_the_terminal_event_and_not_before")
def a_read_returns_empty_before_the_end() -> None:
    class Hasty(Wrapped):
        async def read(self) -> Any:
            if self.inner._items or self.inner._ended:
                return await self.inner.read()
            await asyncio.sleep(0.005)
            return self.inner.take()

    wrap_exchanges(Hasty)


@mutant("test_a_whole_answer_is_the_joined_stream")
def a_whole_answer_differs_from_the_stream() -> None:
    whole = spanwire_sse.codec._Chat.whole

    def without_ids(self: Any, body: bytes) -> Any:
        chunk: Any = whole(self, body)
        tools = tuple(msgspec.structs.replace(tool, id="another") for tool in chunk.tool_calls)
        return msgspec.structs.replace(chunk, tool_calls=tools)

    patch(spanwire_sse.codec._Chat, whole=without_ids)


@mutant("test_bytes_may_be_split_anywhere[1]")
def text_decoded_piece_by_piece() -> None:
    def sniff(self: Any, data: bytes) -> None:
        exchange["_sniff"](self, data)
        feed = self.on_body
        self.on_body = lambda more: feed(more.decode("utf-8", "replace").encode())

    patch(HTTPExchange, _sniff=sniff)


@mutant("test_ten_thousand_chunks[late]")
def drops_what_is_over_the_mark() -> None:
    def on_batch(self: Any) -> None:
        del self._items[4096:]
        exchange["on_batch"](self)

    patch(HTTPExchange, on_batch=on_batch)


# --- marks ------------------------------------------------------------------------------------------------------------


def connecting(after: Callable[[Any, Any], None]) -> None:
    async def connected(self: Any, endpoint: Any, attempt: Any) -> Any:
        connection = await connect(self, endpoint, attempt)
        after(connection, attempt)
        return connection

    patch(SSETransport, connect=connected)


@mutant("test_handshake_marks_are_paired_and_in_order")
def a_step_marked_twice() -> None:
    connecting(lambda _, attempt: attempt.marks.parts.append(attempt.marks.parts[-1]))


@mutant("test_handshake_marks_are_paired_and_in_order")
def a_step_that_is_never_ended() -> None:
    connecting(lambda _, attempt: attempt.marks.begin("tls", time.perf_counter_ns()))


@mutant("test_handshake_marks_are_paired_and_in_order", "test_a_cold_call_has_a_handshake_and_a_warm_one_has_none")
def no_handshake_marks() -> None:
    connecting(lambda _, attempt: attempt.marks.parts.clear())


@mutant("test_a_cold_call_has_a_handshake_and_a_warm_one_has_none")
def a_handshake_on_every_call() -> None:
    async def started(self: Any, call: Any, attempt: Any) -> Any:
        begin_ns = time.perf_counter_ns()
        found = await start(self, call, attempt)
        attempt.marks.parts.append(("connect", begin_ns, begin_ns + 1000))
        return found

    patch(SSEConnection, start=started)


@mutant(
    "test_a_servers_delay_before_the_first_token_is_the_servers[queue]", "test_a_delay_of_a_whole_answer_is_the_servers"
)
def the_servers_delay_marked_as_send() -> None:
    def on_head(self: Any, status: Any, headers: Any) -> None:
        self._marks.sent_ns = self._http.first_arrival_ns
        self._marks.end("send", self._marks.sent_ns)
        exchange["on_head"](self, status, headers)

    patch(HTTPExchange, on_sent=lambda self: None, on_head=on_head)


@mutant("test_a_consumers_delay_is_the_clients", "test_a_servers_delay_between_tokens_is_decoding")
def arrival_stamped_when_it_is_read() -> None:
    def take(self: Any) -> Any:
        items = exchange["take"](self)
        if items:
            marks, now_ns = self._marks, time.perf_counter_ns()
            marks.first_byte_ns = marks.first_chunk_ns = marks.first_content_ns = now_ns
            marks.last_chunk_ns = marks.last_byte_ns = marks.ended_ns = now_ns
        return items

    patch(HTTPExchange, take=take)


@mutant("test_an_exchanges_marks_are_there_paired_and_in_order")
def no_mark_of_the_first_content() -> None:
    def take(self: Any) -> Any:
        self._marks.first_content_ns = 0
        return exchange["take"](self)

    patch(HTTPExchange, take=take)


@mutant("test_a_late_end_of_the_message_is_nobodys_time")
def the_call_ends_with_its_message() -> None:
    class Patient(Wrapped):
        async def read(self) -> Any:
            items = await self.inner.read()
            while not items and not self.inner._released:
                await asyncio.sleep(0.002)
            return items

    wrap_exchanges(Patient)


# --- leaving ----------------------------------------------------------------------------------------------------------


@mutant("test_a_completed_call_gives_its_connection_back")
def never_released() -> None:
    patch(HTTPExchange, _release=lambda self: None)


@mutant("test_a_completed_call_gives_its_connection_back")
def released_twice() -> None:
    def release(self: Any) -> None:
        self._attempt.released()
        exchange["_release"](self)

    patch(HTTPExchange, _release=release)


@mutant("test_a_late_end_of_the_message_is_nobodys_time", "test_a_break_after_the_finish_reason_keeps_the_connection")
def released_at_the_terminal_event() -> None:
    def terminal(self: Any) -> None:
        exchange["_terminal"](self)
        self._release()

    patch(HTTPExchange, _terminal=terminal)


@mutant("test_a_call_that_is_left_leaves_nothing[streaming-cancel]")
def cancel_swallowed() -> None:
    class Stubborn(Wrapped):
        async def read(self) -> Any:
            while True:
                try:
                    return await self.inner.read()
                except asyncio.CancelledError:
                    continue

    wrap_exchanges(Stubborn)


@mutant("test_a_cancelled_read_loses_nothing")
def a_cancelled_read_takes_items_along() -> None:
    class Forgetful(Wrapped):
        async def read(self) -> Any:
            items = await self.inner.read()
            await asyncio.sleep(0.0015)
            return items

    wrap_exchanges(Forgetful)


@mutant("test_a_call_that_is_left_leaves_nothing[streaming-close]", "test_start_does_not_wait_for_the_answer")
def the_server_is_never_told() -> None:
    def abort(self: Any, error: Any = None) -> None:
        Inbox.abort(self, error)
        self._release()

    patch(HTTPExchange, abort=abort)


@mutant("test_abort_is_idempotent_and_wakes_the_reader")
def abort_does_not_wake_the_reader() -> None:
    def abort(self: Any, error: Any = None) -> None:
        self._waiter, waiter = None, self._waiter
        exchange["abort"](self, error)
        self._waiter = waiter

    patch(HTTPExchange, abort=abort)


@mutant("test_abort_with_an_error_delivers_first_and_then_raises")
def abort_drops_what_had_come() -> None:
    def abort(self: Any, error: Any = None) -> None:
        self._items = []
        exchange["abort"](self, error)

    patch(HTTPExchange, abort=abort)


@mutant("test_start_does_not_wait_for_the_answer")
def start_waits_for_the_answer() -> None:
    async def started(self: Any, call: Any, attempt: Any) -> Any:
        found = await start(self, call, attempt)
        while not attempt.marks.first_byte_ns and not found._ended:  # type: ignore[attr-defined]
            await asyncio.sleep(0.001)
        return found

    patch(SSEConnection, start=started)


@mutant("test_a_call_that_cannot_be_written_costs_no_connection")
def a_call_that_cannot_be_written_throws_the_connection_away() -> None:
    async def started(self: Any, call: Any, attempt: Any) -> Any:
        try:
            return await start(self, call, attempt)
        except SpanwireError:
            self.abort()
            raise

    patch(SSEConnection, start=started)


@mutant("test_a_call_that_cannot_be_written_costs_no_connection")
def what_the_encoder_raises_comes_through() -> None:
    async def started(self: Any, call: Any, attempt: Any) -> Any:
        try:
            return await start(self, call, attempt)
        except SpanwireError as error:
            raise error.__cause__ or error from None

    patch(SSEConnection, start=started)


@mutant("test_a_break_after_the_finish_reason_keeps_the_connection")
def a_break_throws_the_connection_away() -> None:
    patch(HTTPExchange, complete=property(lambda self: False))


@mutant("test_a_connection_closes_once_and_again[False]")
def closing_twice_fails() -> None:
    aclose = SSEConnection.aclose

    async def strict(self: Any) -> None:
        if not self.http.usable():
            raise RuntimeError("it is closed")
        await aclose(self)

    patch(SSEConnection, aclose=strict)


@mutant("test_a_connection_keeps_no_call_alive")
def a_connection_keeps_the_calls_context() -> None:
    kept: dict[int, Any] = {}

    async def started(self: Any, call: Any, attempt: Any) -> Any:
        kept[id(self)] = contextvars.copy_context()
        return await start(self, call, attempt)

    patch(SSEConnection, start=started)


@mutant("test_a_completed_call_gives_its_connection_back")
def a_task_for_each_connection_that_never_ends() -> None:
    tasks: list[Any] = []
    connecting(lambda *_: tasks.append(asyncio.ensure_future(asyncio.sleep(3600))))


@mutant("test_a_completed_call_gives_its_connection_back")
def a_socket_for_each_connection_that_is_never_closed() -> None:
    sockets: list[Any] = []
    connecting(lambda *_: sockets.append(socket.socketpair()))


# --- dialling, and a consumer that does not read ------------------------------------------------------------------------


@mutant("test_a_dial_that_is_cancelled_leaves_nothing")
def a_dial_goes_on_when_it_is_cancelled() -> None:
    async def shielded(self: Any, endpoint: Any, attempt: Any) -> Any:
        return await asyncio.shield(asyncio.ensure_future(connect(self, endpoint, attempt)))

    patch(SSETransport, connect=shielded)


@mutant("test_a_dial_that_is_cancelled_leaves_nothing")
def a_cancelled_dial_leaves_its_socket_open() -> None:
    async def dialled(self: Any, endpoint: Any, attempt: Any) -> Any:
        sock = socket.socket()
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, endpoint.origin[1:])
        await asyncio.sleep(0.001)  # the handshake
        sock.close()
        return await connect(self, endpoint, attempt)

    patch(SSETransport, connect=dialled)


@mutant("test_a_dial_that_is_cancelled_leaves_nothing")
def a_cancelled_dial_is_begun_anew() -> None:
    async def stubborn(self: Any, endpoint: Any, attempt: Any) -> Any:
        try:
            return await connect(self, endpoint, attempt)
        except asyncio.CancelledError:
            return await connect(self, endpoint, attempt)

    patch(SSETransport, connect=stubborn)


@mutant("test_a_dial_that_is_cancelled_leaves_nothing")
def a_cancelled_upgrade_leaves_its_connection_open() -> None:
    async def upgraded(self: Any, endpoint: Any, attempt: Any) -> Any:
        connection = await connect(self, endpoint, attempt)
        await asyncio.sleep(0.001)  # a round trip more: an upgrade, a login
        return connection

    patch(SSETransport, connect=upgraded)


@mutant("test_a_consumer_that_does_not_read_stops_the_server")
def a_consumer_that_does_not_read_stops_nobody() -> None:
    patch(HTTPExchange, on_high=lambda self: None)


@mutant("test_a_consumer_that_does_not_read_stops_the_server")
def the_mark_is_never_looked_at() -> None:
    def on_batch(self: Any) -> None:
        high, self._high = self._high, 1 << 40
        exchange["on_batch"](self)
        self._high = high

    patch(HTTPExchange, on_batch=on_batch)


@mutant("test_a_consumer_that_does_not_read_stops_the_server")
def what_was_stopped_never_goes_on() -> None:
    patch(HTTPExchange, on_low=lambda self: None)


# --- failures ---------------------------------------------------------------------------------------------------------


@mutant("test_data_before_a_failure_is_delivered[close]")
def data_before_a_failure_dropped() -> None:
    def end(self: Any, error: Any = None) -> None:
        if error is not None:
            self._items = []
        Inbox.end(self, error)

    patch(HTTPExchange, end=end)


@mutant("test_a_break_before_the_answer_is_tried_again[close]")
def a_break_that_is_not_retryable() -> None:
    def end(self: Any, error: Any = None) -> None:
        if error is not None:
            error.retryable = False
        Inbox.end(self, error)

    patch(HTTPExchange, end=end)


@mutant("test_an_end_that_came_too_early_is_no_answer")
def any_end_passes_for_the_end() -> None:
    patch(spanwire_sse.codec._Chat, end=lambda self: None)


@mutant("test_a_refusal_is_an_error_of_its_kind[stream-429]", "test_a_refusal_is_an_error_of_its_kind[unary-503]")
def every_refusal_is_a_bad_request() -> None:
    error = spanwire_sse.codec.OpenAIChat.error

    def bad(self: Any, status: int, *more: Any) -> Any:
        return error(self, 400, *more)

    patch(spanwire_sse.codec.OpenAIChat, error=bad)


@mutant("test_a_server_that_hangs_meets_each_limit[idle_s]")
def no_error_when_a_limit_is_hit() -> None:
    patch(HTTPExchange, abort=lambda self, error=None: exchange["abort"](self))


@mutant("test_a_server_that_is_not_there")
def what_the_system_raises_comes_through() -> None:
    async def bare(self: Any, endpoint: Any, attempt: Any) -> Any:
        try:
            return await connect(self, endpoint, attempt)
        except SpanwireError as error:
            raise error.__cause__ or error from None

    patch(SSETransport, connect=bare)


@mutant("test_a_connection_that_died_while_idle_is_replaced[noticed]")
def a_dead_connection_is_usable() -> None:
    class Undead(SSEConnection):
        __slots__ = ()

        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more)
            self.usable = lambda: True

    patch(module, SSEConnection=Undead)


@mutant("test_a_connection_that_died_while_idle_is_replaced[not noticed]")
def a_dead_connection_has_a_first_byte() -> None:
    def on_lost(self: Any, error: Any) -> None:
        self._marks.first_byte_ns = self._marks.first_byte_ns or time.perf_counter_ns()
        exchange["on_lost"](self, error)

    patch(HTTPExchange, on_lost=on_lost)


# --- limits, loops, privacy -------------------------------------------------------------------------------------------


@mutant("test_a_capacity_of_several_is_had")
def a_capacity_that_it_has_not() -> None:
    patch(SSEConnection, capacity=4)


@mutant("test_a_completed_call_gives_its_connection_back", "test_a_cold_call_has_a_handshake_and_a_warm_one_has_none")
def never_used_again() -> None:
    used: set[int] = set()
    init = SSEConnection.__init__

    async def started(self: Any, call: Any, attempt: Any) -> Any:
        used.add(id(self))
        return await start(self, call, attempt)

    def once(self: Any, *arguments: Any, **more: Any) -> None:
        init(self, *arguments, **more)
        used.discard(id(self))
        usable = self.http.usable
        self.usable = lambda: id(self) not in used and usable()

    patch(SSEConnection, start=started, __init__=once)


@mutant("test_warm_makes_room_for_as_many_as_it_was_asked_for")
def expects_more_than_it_gets() -> None:
    patch(SSETransport, expect=lambda self, endpoint: 3)


@mutant("test_one_loop_after_another[asyncio]")
def a_future_that_all_loops_share() -> None:
    waiting: list[Any] = []

    async def shared(self: Any, endpoint: Any, attempt: Any) -> Any:
        if not waiting:
            waiting.append(asyncio.get_running_loop().create_future())
            asyncio.get_running_loop().call_later(0.005, waiting[0].set_result, None)
        elif waiting[0].get_loop() is not asyncio.get_running_loop():
            waiting[0] = waiting[0].get_loop().create_future()
        await waiting[0]
        return await connect(self, endpoint, attempt)

    patch(SSETransport, connect=shared)


@mutant("test_secrets_are_shown_nowhere")
def a_header_in_the_error() -> None:
    async def chatty(self: Any, endpoint: Any, attempt: Any) -> Any:
        try:
            return await connect(self, endpoint, attempt)
        except SpanwireError as error:
            raise ConnectionFailed(f"no connection, with {dict(endpoint.headers)}", phase="tcp") from error

    patch(SSETransport, connect=chatty)


@mutant("test_secrets_are_shown_nowhere")
def the_prompt_in_the_log() -> None:
    async def chatty(self: Any, call: Any, attempt: Any) -> Any:
        logging.getLogger("spanwire_sse").debug("sending %s", call.body)
        return await start(self, call, attempt)

    patch(SSEConnection, start=chatty)


@mutant("test_credentials_reach_the_server")
def the_calls_headers_are_not_sent() -> None:
    async def silent(self: Any, call: Any, attempt: Any) -> Any:
        attempt.headers = {}
        return await start(self, call, attempt)

    patch(SSEConnection, start=silent)


# --- running ----------------------------------------------------------------------------------------------------------


class _Failed:
    """A pytest plugin that remembers."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.ran = 0

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.ran += report.when == "call"
        name = report.nodeid.rpartition("::")[2]
        if report.failed and name not in self.names:
            self.names.append(name)


def _child(name: str, *, whole: bool) -> dict[str, Any]:
    """In a process of its own."""
    found = MUTANTS[name]
    found.apply()
    failed = _Failed()
    nodes = [KIT] if whole else [f"{KIT}::{test}" for test in found.caught_by]
    # A broken transport breaks other things too: what the garbage collector says of it is no test's failure.
    quiet = ["-W", "ignore", "-p", "no:unraisableexception", "-p", "no:threadexception", "-p", "no:cacheprovider"]
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # of the many that are installed, loading takes longest
    pytest.main([*nodes, "-q", "--tb=no", "-p", "pytest_timeout", "--timeout=20", *quiet], plugins=[failed])
    return {"name": name, "failed": failed.names, "ran": failed.ran}


def run_all(names: Sequence[str], *, whole: bool = False) -> dict[str, dict[str, Any]]:
    """Every mutant in a process of its own, forked from this one, which has imported everything; two at a time."""
    results: dict[str, dict[str, Any]] = {
        name: {"name": name, "failed": [], "output": "it did not end"} for name in names
    }
    waiting, running = list(names), dict[int, tuple[str, float]]()
    gc.freeze()  # what is here stays shared
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < 2:
                name = waiting.pop(0)
                running[_fork(name, Path(folder), whole=whole)] = (
                    name,
                    time.monotonic() + LIMIT_S * (4 if whole else 1),
                )
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid:
                name, _ = running.pop(pid)
                out = Path(folder, f"{name}.json")
                found = json.loads(out.read_text()) if out.exists() else results[name]
                results[name] = {**found, "output": Path(folder, f"{name}.log").read_text()[-3000:]}
                continue
            for pid, (_, end) in running.items():
                if time.monotonic() > end:
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
    return results


def _fork(name: str, folder: Path, *, whole: bool) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        log = os.open(folder / f"{name}.log", os.O_WRONLY | os.O_CREAT)
        for number in (1, 2):
            os.dup2(log, number)
        found = _child(name, whole=whole)
        (folder / f"{name}.json").write_text(json.dumps(found))
        code = 0
    finally:
        sys.stdout.flush()
        os._exit(code)


def table(results: dict[str, dict[str, Any]]) -> str:
    """One line for each."""
    lines = [f"{'broken':50} caught by"]
    for name, found in results.items():
        missed = [test for test in MUTANTS[name].caught_by if test not in found["failed"]]
        others = len(found["failed"]) - len(MUTANTS[name].caught_by) + len(missed)
        more = f" and {others} more" if others else ""
        lines.append(f"{name:50} {', '.join(found['failed'][:4] if missed else MUTANTS[name].caught_by)}{more}")
        if missed:
            lines.append(f"{'':50} NOT by {', '.join(missed)}\n{found.get('output', '')}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    results = run_all(options.names or list(MUTANTS), whole=options.whole)
    print(table(results))
    if options.json:
        Path(options.json).write_text(json.dumps(results))
    return int(any(set(MUTANTS[name].caught_by) - set(found["failed"]) for name, found in results.items()))


if __name__ == "__main__":
    sys.exit(main())
